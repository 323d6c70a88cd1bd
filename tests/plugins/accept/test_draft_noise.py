import numpy as np
import pytest

from twostroke.plugins.accept import Acceptor, Purpose, SamplingSlots
from twostroke.plugins.accept.reference import noise

V, G = 10, 3


def batch_of_rules():
    sampling = SamplingSlots(4, V)
    sampling.set(0, presence_penalty=1.0)
    sampling.set(1, temperature=0.5, seed=11)
    sampling.set(2, temperature=2.0, seed=12, coupled=True)
    return sampling


def test_each_rule_gets_its_own_noise():
    slots, anchors = np.array([2, 0, 1], np.int32), np.array([5, 6, 7], np.int32)
    out, inverse = np.full((3, G, V), 9, np.float32), np.zeros(3, np.float32)
    Acceptor(3, G, V).draft_noise(slots, anchors, batch_of_rules(), out, inverse)
    assert inverse.tolist() == [0.5, 1, 2]
    assert not out[1].any()
    for k in range(1, G + 1):
        assert (out[0, k - 1] == noise(V, 12, 5 + k, 0, Purpose.COUPLED)).all()
        assert (out[2, k - 1] == noise(V, 11, 7, k, Purpose.DRAFT)).all()


def test_a_row_that_was_sampled_and_is_greedy_now_is_zeroed_once():
    sampling, acceptor = batch_of_rules(), Acceptor(3, G, V)
    out, inverse, anchors = np.full((3, G, V), 9, np.float32), np.zeros(3, np.float32), np.zeros(3, np.int32)
    acceptor.draft_noise(np.array([1, 1, 1], np.int32), anchors, sampling, out, inverse)
    assert out.all()
    acceptor.draft_noise(np.array([1, 0], np.int32), anchors[:2], sampling, out[:2], inverse[:2])
    assert not out[1].any()
    out[1] = 3  # not rewritten: it is known to be zero
    acceptor.draft_noise(np.array([0, 0, 0], np.int32), anchors, sampling, out, inverse)
    assert not out[[0, 2]].any()
    assert (out[1] == 3).all()


def test_another_buffer_is_not_taken_for_the_one_before():
    sampling, acceptor = batch_of_rules(), Acceptor(3, G, V)
    inverse, anchors, slots = np.zeros(3, np.float32), np.zeros(3, np.int32), np.zeros(3, np.int32)
    for out in (np.ones((3, G, V), np.float32), np.ones((3, G, V), np.float32), np.ones((3, 1, V), np.float32)):
        acceptor.draft_noise(slots, anchors, sampling, out, inverse)
        assert not out.any()


def test_a_buffer_that_cannot_be_filled_in_place_is_refused():
    with pytest.raises(ValueError, match="C-contiguous"):
        Acceptor(1, G, V).draft_noise(
            np.zeros(1, np.int32),
            np.zeros(1, np.int32),
            batch_of_rules(),
            np.zeros((1, V, G), np.float32).transpose(0, 2, 1),
            np.zeros(1, np.float32),
        )
