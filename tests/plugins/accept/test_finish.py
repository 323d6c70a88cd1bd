import numpy as np
import pytest

from twostroke.plugins.accept import Acceptor, FinishReason, SamplingSlots

V, STOP = 32, 7


def finish(blocks, limits, anchors, counts=None, ignore_eos=None, eos=(STOP, 9)):
    """(tokens, count, done, reason) per request of equally long blocks."""
    size, rows = len(blocks), len(blocks[0])
    sampling = SamplingSlots(size, V)
    for slot, limit in enumerate(limits):
        sampling.set(slot, eos_ids=eos, limit=limit)
    tokens = np.array(blocks, np.int32)
    count = np.array(counts or [rows] * size, np.int32)
    done, reason = np.zeros(size, np.bool_), np.zeros(size, np.int8)
    Acceptor(size, rows - 1, V).finish(
        tokens,
        count,
        np.arange(size, dtype=np.int32),
        np.array(anchors, np.int32),
        sampling,
        None if ignore_eos is None else np.array(ignore_eos),
        done_out=done,
        reason_out=reason,
    )
    assert all((tokens[r, count[r] :] == 0).all() for r in range(size))
    return [(tokens[r, : count[r]].tolist(), bool(done[r]), FinishReason(reason[r])) for r in range(size)]


def test_a_stop_inside_the_budget_wins_over_the_length_and_a_budget_before_the_stop_over_the_stop():
    # a prompt of 10, so output token 0 stands at position 10 and max_tokens n is a limit of 10 + n
    block = [10, 11, STOP, 20, 21, 22]
    assert finish([block, block], [15, 12], [9, 9]) == [
        ([10, 11, STOP], True, FinishReason.STOP),
        ([10, 11], True, FinishReason.LENGTH),
    ]


def test_a_stop_in_the_very_last_place_is_a_stop():
    assert finish([[10, 11, STOP, 20]], [13], [9]) == [([10, 11, STOP], True, FinishReason.STOP)]


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_exactly_max_tokens_are_delivered_and_no_round_follows(max_tokens):
    # blocks of five from a perfect draft of depth 4
    delivered, rounds, done = 0, 0, False
    while not done:
        ((tokens, done, reason),) = finish([[10, 11, 12, 13, 14]], [10 + max_tokens], [9 + delivered])
        delivered += len(tokens)
        rounds += 1
    assert delivered == max_tokens
    assert reason is FinishReason.LENGTH
    assert rounds == -(-max_tokens // 5)


def test_tokens_after_the_count_cannot_stop_a_block():
    assert finish([[10, STOP, STOP]], [99], [9], counts=[1]) == [([10], False, FinishReason.NONE)]
    assert finish([[10, 0, 0]], [99], [9], counts=[1], eos=(0,)) == [([10], False, FinishReason.NONE)]


def test_ignored_end_of_text_runs_to_the_length():
    block = [STOP, 9, 10]
    assert finish([block, block], [12, 12], [9, 9], ignore_eos=[True, False]) == [
        ([STOP, 9], True, FinishReason.LENGTH),
        ([STOP], True, FinishReason.STOP),
    ]


def test_a_slot_at_its_limit_emits_nothing_and_is_done():
    assert finish([[10, STOP]], [10], [9]) == [([], True, FinishReason.LENGTH)]
    assert finish([[10, STOP]], [10], [30]) == [([], True, FinishReason.LENGTH)]


def test_a_cleared_slot_never_ends():
    sampling = SamplingSlots(1, V)
    tokens, one = np.array([[5, 6]], np.int32), np.array([2], np.int32)
    done, reason = np.ones(1, np.bool_), np.ones(1, np.int8)
    zero = np.zeros(1, np.int32)
    Acceptor(1, 1, V).finish(tokens, one, zero, zero, sampling, done_out=done, reason_out=reason)
    assert (one[0], done[0], reason[0]) == (2, False, FinishReason.NONE)
