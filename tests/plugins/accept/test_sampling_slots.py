import numpy as np
import pytest

from twostroke.plugins.accept import SamplingSlots


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", {"temperature": -1.0}),
        ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": 1e-9}),
        ("top_k", {"top_k": -1}),
        ("top_p", {"top_p": 0.0}),
        ("min_p", {"min_p": 1.5}),
        ("repetition_penalty", {"repetition_penalty": 0.0, "prompt_ids": []}),
        ("presence_penalty", {"presence_penalty": float("inf")}),
        ("frequency_penalty", {"frequency_penalty": float("nan")}),
        ("seed", {"seed": 2**64}),
        ("eos_ids", {"eos_ids": [8]}),
        ("number of eos_ids", {"eos_ids": range(3)}),
        ("bias", {"bias": {-1: 1.0}}),
        ("bias of token 3", {"bias": {3: float("nan")}}),
        ("prompt_ids", {"repetition_penalty": 1.5}),
        ("output_ids", {"presence_penalty": 1.0, "output_ids": [9]}),
    ],
)
def test_a_wrong_value_is_named_and_nothing_is_written(name, values):
    sampling = SamplingSlots(2, 8, max_eos_ids=2)
    sampling.set(0, temperature=0.5, seed=3)
    with pytest.raises(ValueError, match=f"^{name} "):
        sampling.set(0, **values)
    assert sampling.temperature[0] == 0.5
    assert sampling.seed[0] == 3


def test_token_counts_take_no_memory_until_a_slot_uses_penalties():
    sampling = SamplingSlots(2, 8)
    sampling.set(0, temperature=1.0, top_k=3, bias={1: 2.0})
    assert sampling.output_counts is None
    sampling.set(1, presence_penalty=1.0)
    assert sampling.output_counts.shape == (2, 8)


def test_commit_counts_exactly_the_tokens_that_were_let_through():
    sampling = SamplingSlots(3, 8)
    sampling.set(0, frequency_penalty=0.5, prompt_ids=[1, 1, 2], output_ids=[3])
    sampling.set(1)
    tokens = np.array([[3, 3, 5], [4, 4, 4]], np.int32)
    sampling.commit(np.array([0, 1], np.int32), tokens, np.array([2, 3], np.int32))
    assert sampling.output_counts.tolist() == [[0, 0, 0, 3, 0, 0, 0, 0], [0] * 8, [0] * 8]
    assert np.flatnonzero(sampling.prompt_seen[0]).tolist() == [1, 2]


def test_a_reused_slot_knows_nothing_of_the_request_before():
    used, fresh = SamplingSlots(2, 8), SamplingSlots(2, 8)
    used.set(
        0,
        temperature=0.7,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.3,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        seed=9,
        coupled=True,
        min_position=5,
        limit=9,
        eos_ids=[1],
        bias={1: 1.0},
        prompt_ids=[1],
        output_ids=[2],
    )
    used.clear(0)
    for name, value in vars(fresh).items():
        if isinstance(value, np.ndarray):
            assert (getattr(used, name) == value).all(), name
    assert used.bias == fresh.bias
    assert not used.prompt_seen.any()
    assert not used.output_counts.any()
