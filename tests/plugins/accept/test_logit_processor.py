from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.plugins.accept import process_row
from twostroke.plugins.accept.reference import Request
from twostroke.plugins.accept.reference import process_row as specified_row

V = 12
NOTHING = -np.inf


def processed(make_slots, logits, request, position=0, drafted=(), allowed=None):
    row = np.array(logits, np.float32)
    process_row(row, make_slots([request], row.size), 0, position, drafted, allowed)
    return row


tokens = st.integers(0, V - 1)
requests = st.builds(
    Request,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, V + 2),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.3, 1e-3]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 2.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    min_position=st.sampled_from([0, 5, 6]),
    eos_ids=st.lists(tokens, max_size=3, unique=True),
    bias=st.dictionaries(tokens, st.sampled_from([-2.0, 0.5, 4.0, -np.inf]), max_size=3),
    prompt_ids=st.lists(tokens, max_size=4),
    output_ids=st.lists(tokens, max_size=4),
)
rows = st.lists(st.integers(-16, 16).map(lambda n: n / 4), min_size=V, max_size=V)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(rows, requests, st.lists(tokens, max_size=3), st.none() | st.lists(st.booleans(), min_size=V, max_size=V))
def test_a_processed_row_is_the_specified_one(make_slots, logits, request, drafted, mask):
    allowed = None if mask is None else np.array(mask)
    expected = specified_row(np.array(logits), request, 5, drafted, allowed)
    assert (processed(make_slots, logits, request, 5, drafted, allowed) == expected).all()


@pytest.mark.parametrize("request_", [Request(), Request(temperature=1.0), Request(top_k=2, top_p=0.5, min_p=0.5)])
def test_a_row_on_which_nothing_is_used_is_bit_identical_and_never_written(make_slots, request_):
    row = np.random.default_rng(0).normal(size=V).astype(np.float32)
    row.flags.writeable = False
    assert process_row(row, make_slots([request_], V), 0, 0)


def test_top_k_keeps_all_ties_with_the_kth_value(make_slots):
    row = processed(make_slots, [1, 3, 2, 2, 0, 2], Request(temperature=1.0, top_k=2))
    assert row.tolist() == [NOTHING, 3, 2, 2, NOTHING, 2]


def test_top_p_keeps_all_ties_with_the_last_value_needed(make_slots):
    row = processed(make_slots, [1, 3, 2, 2, 0, 2], Request(temperature=1.0, top_p=0.6))
    assert row.tolist() == [NOTHING, 3, 2, 2, NOTHING, 2]


def test_min_p_keeps_a_value_equal_to_its_threshold(make_slots):
    row = processed(make_slots, [1, 3, 3, -2], Request(temperature=1.0, min_p=1.0))
    assert row.tolist() == [NOTHING, 3, 3, NOTHING]


def test_cut_offs_do_not_depend_on_the_order_of_the_vocabulary(make_slots):
    generator = np.random.default_rng(1)
    row = np.round(generator.normal(0, 2, 500), 1).astype(np.float32)
    request = Request(temperature=0.5, top_k=60, top_p=0.9, min_p=0.01)
    order = generator.permutation(500)
    assert (processed(make_slots, row[order], request) == processed(make_slots, row, request)[order]).all()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99, 0.99999])
def test_a_nucleus_wider_than_the_first_look_is_found_whole(make_slots, top_p):
    row = np.random.default_rng(2).normal(0, 0.5, 3000).astype(np.float32)
    request = Request(temperature=1.0, top_p=top_p)
    ours = np.isfinite(processed(make_slots, row, request))
    assert (ours == np.isfinite(specified_row(row, request, 0))).all()


def test_top_p_counts_the_probability_left_by_top_k(make_slots):
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    row = processed(make_slots, logits, Request(temperature=1.0, top_k=2, top_p=0.5))
    assert np.isfinite(row).tolist() == [True, False, False, False]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits(make_slots):
    request = Request(repetition_penalty=2.0, prompt_ids=[0, 1], output_ids=[2])
    assert processed(make_slots, [4, -4, 4, 4], request).tolist() == [2, -8, 2, 4]


def test_presence_and_frequency_count_the_output_but_not_the_prompt(make_slots):
    request = Request(presence_penalty=1.0, frequency_penalty=0.5, prompt_ids=[0], output_ids=[1, 1])
    assert processed(make_slots, [0, 0, 0], request, drafted=[2]).tolist() == [0, -2, -1.5]


def test_drafted_tokens_count_for_their_row_only(make_slots):
    sampling = make_slots([Request(frequency_penalty=1.0)], 4)
    for drafted, expected in (([1, 1], [0, -2, 0, 0]), ([], [0, 0, 0, 0])):
        row = np.zeros(4, np.float32)
        process_row(row, sampling, 0, 0, drafted)
        assert row.tolist() == expected
    assert not sampling.output_counts.any()


def test_a_row_that_forbids_everything_says_so_and_allows_id_0(make_slots):
    sampling = make_slots([Request(min_position=9, eos_ids=[2])], 4)
    row = np.ones(4, np.float32)
    assert not process_row(row, sampling, 0, 5, (), np.array([False, False, True, False]))
    assert row.tolist() == [0, NOTHING, NOTHING, NOTHING]


def test_temperature_multiplies_by_the_inverse_the_draft_uses(make_slots):
    logits = np.random.default_rng(3).normal(size=V).astype(np.float32)
    request = Request(temperature=0.7)
    inverse = make_slots([request], V).inverse_temperature[0]
    assert (processed(make_slots, logits, request) == logits * inverse).all()
    assert (processed(make_slots, logits, replace(request, temperature=0.0)) == logits).all()
