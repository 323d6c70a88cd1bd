import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.plugins.accept import Acceptor, SamplingSlots
from twostroke.plugins.accept.reference import Request, accept

V = 8

numbers = st.integers(-12, 12).map(lambda n: n / 4)
ids = st.integers(0, V - 1)
requests = st.builds(
    Request,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    coupled=st.booleans(),
    top_k=st.sampled_from([0, 0, 1, 3]),
    top_p=st.sampled_from([1.0, 1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.25]),
    seed=st.integers(0, 2**64 - 1),
    min_position=st.sampled_from([0, 12]),
    eos_ids=st.just([2]),
    bias=st.dictionaries(ids, numbers, max_size=2),
    prompt_ids=st.lists(ids, max_size=3),
    output_ids=st.lists(ids, max_size=3),
)


@st.composite
def batches(draw):
    count, drafts = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = generator.integers(-12, 13, (count, drafts + 1, V)) / 4
    draft_logits = logits[:, :drafts] + generator.integers(-2, 3, (count, drafts, V)) / 4
    # Half likely ids, half any, some of them no ids at all.
    tokens = np.where(
        generator.random((count, drafts)) < 0.5,
        logits[:, :drafts].argmax(axis=2),
        generator.integers(-1, V + 1, (count, drafts)),
    )
    return {
        "logits": logits,
        "drafts": tokens,
        "draft_logits": draft_logits,
        "requests": draw(st.lists(requests, min_size=count, max_size=count)),
        "anchor_position": generator.integers(8, 13, count),
        "draft_length": generator.integers(0, drafts + 1, count),
        "allowed": generator.random(logits.shape) < 0.8 if draw(st.booleans()) else None,
    }


def only(batch, r):
    return {name: value if value is None else value[r : r + 1] for name, value in batch.items()}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(batches())
def test_the_batched_implementation_gives_the_specified_tokens(judge, batch):
    for r, answer in enumerate(judge(**batch)):
        allowed = batch["allowed"]
        expected = accept(
            batch["logits"][r],
            batch["drafts"][r, : batch["draft_length"][r]].tolist(),
            batch["draft_logits"][r],
            batch["requests"][r],
            int(batch["anchor_position"][r]),
            None if allowed is None else allowed[r],
        )
        assert answer == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(batches())
def test_a_request_gets_the_same_tokens_alone_as_in_a_batch(judge, batch):
    together = judge(**batch)
    assert together == [judge(**only(batch, r))[0] for r in range(len(together))]


def test_processed_rows_are_bit_equal_alone_and_in_a_batch():
    generator = np.random.default_rng(0)
    count, rows, vocab_size = 5, 3, 1003
    sampling = SamplingSlots(count, vocab_size)
    for slot in range(count):
        sampling.set(slot, temperature=0.3 + 0.2 * slot, top_p=0.9, frequency_penalty=0.3, output_ids=[1, 2], seed=slot)
    logits = generator.normal(size=(count, rows, vocab_size)).astype(np.float32)
    draft_logits = generator.normal(size=(count, rows - 1, vocab_size)).astype(np.float32)
    drafts = generator.integers(0, vocab_size, (count, rows - 1)).astype(np.int32)

    def run(part):
        size = part.stop - part.start
        judged, tokens = logits[part].copy(), np.zeros((size, rows), np.int32)
        Acceptor(count, rows - 1, vocab_size).accept(
            judged,
            drafts[part],
            draft_logits[part],
            np.full(size, rows - 1, np.int32),
            np.arange(part.start, part.stop, dtype=np.int32),
            np.full(size, 7, np.int32),
            sampling,
            tokens_out=tokens,
            count_out=np.zeros(size, np.int32),
            accepted_out=np.zeros(size, np.int32),
        )
        return judged, tokens

    together = run(slice(0, count))
    for r in range(count):
        for ours, alone in zip(together, run(slice(r, r + 1)), strict=True):
            assert ours[r].tobytes() == alone[0].tobytes()


def test_greedy_rows_ignore_seeds_and_sampled_neighbours_and_seeded_rows_equal_their_solo_run(judge):
    #
    generator = np.random.default_rng(1)
    logits = generator.normal(0, 2, (4, 4, V))
    drafts, draft_logits = generator.integers(0, V, (4, 3)), generator.normal(0, 2, (4, 3, V))

    def answers(seeds, chosen):
        wanted = [Request(temperature=float(r >= 2), seed=seeds[r]) for r in chosen]
        return judge(logits[chosen], drafts[chosen], draft_logits[chosen], wanted, [5] * len(chosen))

    first = answers([0, 0, 1, 1], [0, 1, 2, 3])
    for run in range(20):
        assert answers([run, run, 1, 1], [0, 1, 2, 3]) == first
    assert [answers([9, 9, 1, 1], [r])[0] for r in range(4)] == first


def test_equal_seeds_agree_different_seeds_differ_and_earlier_traffic_has_no_influence(judge):
    #
    blocks = (np.zeros((1, 40, 64)), np.zeros((1, 39)), np.zeros((1, 39, 64)))

    def answer(seed):
        return [judge(*blocks, [Request(temperature=1.0, seed=seed)], [p], [0])[0][0][0] for p in range(10)]

    first = answer(1)
    assert answer(2) != first
    assert answer(1) == first


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize(("drafts", "most"), [([5, -1, 7], 1), ([-1, -1, -1], 0), ([V, 3, 1], 0)])
def test_an_id_outside_the_vocabulary_is_refused_and_what_follows_it_ignored(judge, drafts, most, temperature, coupled):
    # A-22; the target wants 5, 7, 7, 1 in this order
    logits = np.eye(V)[[5, 7, 7, 1]] * 50
    for seed in range(20):
        request = Request(temperature=temperature, coupled=coupled, seed=seed)
        ((tokens, accepted),) = judge([logits], [drafts], [logits[:3]], [request], [3])
        assert accepted == most
        assert tokens == [5, 7][: most + 1]


def test_the_lowest_index_wins_a_tie(judge):
    logits = np.zeros((1, 2, V))
    logits[0, :, [3, 6]] = 1
    assert judge(logits, [[6]], logits[:, :1], [Request()], [0]) == [([3], 0)]
    assert judge(logits, [[3]], logits[:, :1], [Request()], [0]) == [([3, 3], 1)]
    assert judge(logits, [[3]], logits[:, :1], [Request(bias={0: 1.0})], [0]) == [([0], 0)]


def test_equal_distributions_accept_every_draft(judge):
    logits = np.random.default_rng(4).normal(0, 3, (50, 4, V))
    drafts = np.random.default_rng(5).integers(0, V, (50, 3))
    wanted = [Request(temperature=0.5, seed=r) for r in range(50)]
    assert all(accepted == 3 for _, accepted in judge(logits, drafts, logits[:, :3], wanted, [9] * 50))


def test_a_residual_without_mass_falls_back_to_the_target(judge):
    # p = q up to 1e-9, and a drafted token that p forbids: the residual proper would know token 3 only
    logits, draft_logits = np.zeros((1, 2, V)), np.zeros((1, 1, V))
    logits[0, :, 0], draft_logits[0, 0, 0], draft_logits[0, 0, 3] = -np.inf, -30, -1e-9
    answers = [judge(logits, [[0]], draft_logits, [Request(temperature=1.0, seed=seed)], [0])[0] for seed in range(80)]
    assert {accepted for _, accepted in answers} == {0}
    assert {tokens[0] for tokens, _ in answers} == set(range(1, V))


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_draft_row_that_is_no_distribution_counts_as_not_drafted(judge, broken):
    logits, draft_logits = np.zeros((1, 3, V)), np.zeros((1, 2, V))
    wanted = [Request(temperature=1.0, seed=5)]
    short = judge(logits, [[1, 2]], draft_logits, wanted, [0], [1])
    draft_logits[0, 1, 4] = broken
    assert judge(logits, [[1, 2]], draft_logits, wanted, [0]) == short


def test_drafts_beyond_the_draft_length_have_no_influence(judge):
    logits = np.random.default_rng(6).normal(0, 1, (1, 4, V))
    for request in (Request(), Request(temperature=1.0, seed=3), Request(temperature=1.0, seed=3, coupled=True)):
        first = judge(logits, [[1, 2, 3]], logits[:, :3], [request], [0], [1])
        assert judge(logits, [[1, -9, 5]], logits[:, :3] + np.array([[0], [1], [2]]) ** 2, [request], [0], [1]) == first
        assert first[0][1] <= 1


def test_a_row_that_forbids_everything_is_counted():
    acceptor, sampling = Acceptor(1, 0, V), SamplingSlots(1, V)
    out = {"tokens_out": np.ones((1, 1), np.int32)}
    out |= {name: np.ones(1, np.int32) for name in ("count_out", "accepted_out")}
    zero, nothing = np.zeros(1, np.int32), np.zeros((1, 0, V), np.float32)
    logits, mask = np.ones((1, 1, V), np.float32), np.zeros((1, 1, V), np.bool_)
    acceptor.accept(logits, zero[:, None][:, :0], nothing, zero, zero, zero, sampling, mask, **out)
    assert out["tokens_out"][0, 0] == 0
    assert acceptor.exhausted_rows == 1


def arrays(count, drafts, vocab_size):
    generator = np.random.default_rng(7)
    return {
        "target_logits": generator.normal(size=(count, drafts + 1, vocab_size)).astype(np.float32),
        "draft_tokens": np.zeros((count, drafts), np.int32),
        "draft_logits": np.zeros((count, drafts, vocab_size), np.float32),
        "draft_length": np.full(count, drafts, np.int32),
        "slots": np.arange(count, dtype=np.int32),
        "anchor_position": np.full(count, 9, np.int32),
        "tokens_out": np.zeros((count, drafts + 1), np.int32),
        "count_out": np.zeros(count, np.int32),
        "accepted_out": np.zeros(count, np.int32),
    }


def test_a_greedy_batch_that_edits_nothing_allocates_nothing_after_warm_up():
    count, drafts, vocab_size = 8, 5, 512
    acceptor, sampling = Acceptor(count, drafts, vocab_size), SamplingSlots(count + 1, vocab_size)
    for slot in range(count):
        sampling.set(slot, eos_ids=[7, 9], limit=100)
    step = arrays(count, drafts, vocab_size)
    noise, inverse = np.ones((count, drafts, vocab_size), np.float32), np.zeros(count, np.float32)
    done, reason = np.zeros(count, np.bool_), np.zeros(count, np.int8)

    def iteration():
        acceptor.draft_noise(step["slots"], step["anchor_position"], sampling, noise, inverse)
        acceptor.accept(**step, sampling=sampling)
        acceptor.finish(
            step["tokens_out"],
            step["count_out"],
            step["slots"],
            step["anchor_position"],
            sampling,
            done_out=done,
            reason_out=reason,
        )
        sampling.commit(step["slots"], step["tokens_out"], step["count_out"])

    for _ in range(3):
        iteration()
    tracemalloc.start()
    try:
        iteration()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        iteration()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 2048
    assert not noise.any()
    assert (inverse == 1).all()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("draft_tokens", np.zeros((2, 3), np.int32), "draft_tokens has shape"),
        ("draft_length", np.full(2, 3, np.int32), "draft_length spans 3..3, expected 0..2"),
        ("slots", np.array([0, 4], np.int32), "slots spans 0..4, expected 0..2"),
        ("target_logits", np.zeros((2, 5, V), np.float32), "5 rows per request, expected 1..3"),
        ("tokens_out", np.zeros((2, 2), np.int32), "tokens_out has shape"),
    ],
)
def test_a_wrong_array_is_named_with_what_was_found_and_expected(name, value, message):
    step = {**arrays(2, 2, V), name: value}
    with pytest.raises(ValueError, match=message):
        Acceptor(2, 2, V).accept(**step, sampling=SamplingSlots(3, V))


SCRIPT_EOS = 7


def script_logits(position, prompt=10):
    """A target that wants 1, 1, then the end of text, by a margin of 2 to 4 over the token after it in the alphabet."""
    wanted = 1 if position < prompt + 2 else SCRIPT_EOS
    logits = np.zeros(V)
    logits[wanted], logits[2], logits[3] = 4, 2, 1.75
    return logits


@pytest.mark.parametrize(
    "request_",
    [
        Request(repetition_penalty=1.3, prompt_ids=[3]),
        Request(frequency_penalty=0.5, presence_penalty=0.25),
        Request(min_position=16, eos_ids=[SCRIPT_EOS]),
        Request(frequency_penalty=2.0, temperature=1.0, seed=4, coupled=True, min_position=13, eos_ids=[SCRIPT_EOS]),
    ],
)
def test_penalties_and_min_tokens_inside_a_block_equal_one_token_at_a_time(judge, request_):
    # the histogram that judges is that of the committed tokens, block or not
    def answer(depth):
        generator, output = np.random.default_rng(depth), []
        while len(output) < 24:
            anchor = 9 + len(output)
            rows = np.array([script_logits(anchor + 1 + i) for i in range(depth + 1)])
            now = replace(request_, output_ids=output)
            drafts: list[int] = []
            for _ in range(depth):  # the target's own next token, sometimes a wrong one
                state = replace(now, output_ids=output + drafts)
                row = script_logits(anchor + 1 + len(drafts))
                right = accept(row[None], [], row[None], state, anchor + len(drafts))[0][0]
                drafts.append(right if generator.random() < 0.8 else 4)
            ((tokens, accepted),) = judge([rows], [drafts], np.zeros((1, depth, V)), [now], [anchor])
            assert depth == 0 or accepted >= 0
            output += tokens
        return output[:24]

    plain = answer(0)
    assert len(set(plain)) > 1
    assert answer(2) == plain
    assert answer(4) == plain


def test_end_of_text_comes_as_the_first_token_after_min_tokens(judge):
    # prompt of 10, min_tokens 6, a target that wants the end from output token 2 on
    request = Request(min_position=16, eos_ids=[SCRIPT_EOS])
    rows = np.array([script_logits(10 + i) for i in range(8)])
    ((tokens, _),) = judge([rows], [[1, 1, 2, 2, 2, 2, SCRIPT_EOS]], np.zeros((1, 7, V)), [request], [9])
    assert tokens[:7] == [1, 1, 2, 2, 2, 2, SCRIPT_EOS]
