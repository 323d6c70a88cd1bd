"""What a request gets does not depend on drafts, batch mates, chunks, buckets, slots or who came before."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twostroke.engines.errors import ConfigError, RequestError
from twostroke.engines.loading import LoadedEngine, load_engine_directory
from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.sampling_params import SamplingParams
from twostroke.runtime.scheduler import Scheduler
from twostroke.tests.runtime.scripted_engine import EOS, write_scripted_engine
from twostroke.tests.runtime.serving import (
    Answer,
    Oracle,
    Proposals,
    assert_clean,
    assert_same_proposals,
    forced_scheduler,
    greedy,
    serve,
    watching,
)

RANDOM = np.random.default_rng(11)
PROMPTS = [RANDOM.integers(2, 319, size=length).tolist() for length in (1, 2, 5, 8, 13, 21, 34, 55)]
STREAM = RANDOM.integers(2, 319, size=80).tolist()


def requests_for(prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
    return [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]


def tokens_of(answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in answers.items()}


def scripted(folder: Path, script: Sequence[int], **options: Any) -> LoadedEngine:
    return load_engine_directory(write_scripted_engine(folder, script, **options))


def refusal(scheduler: Scheduler, request: Request) -> RequestError:
    """The error of a refused request; an ordinary one is answered afterwards."""
    with pytest.raises(RequestError) as caught:
        scheduler.submit(request)
    assert not scheduler.has_work
    assert len(serve(scheduler, [Request("next", [3, 4], greedy(3))])["next"].tokens) == 3
    return caught.value


# -- the target's own answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "depth"), [(1, 1), (1, 3), (1, 5), (3, 1), (3, 2), (3, 3), (3, 4), (3, 5), (8, 2), (8, 5)]
)
def test_greedy_speculation_gives_the_ids_of_plain_decoding(oracle: Oracle, batch: int, depth: int) -> None:
    params = greedy(60)
    config = RuntimeConfig(max_batch_size=batch, draft_length=depth)
    answers = serve(Scheduler(oracle.loaded, config, poison=True), requests_for(PROMPTS, params))
    assert tokens_of(answers) == {str(i): oracle.answer(prompt, params) for i, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_requests_that_arrive_in_between_change_nothing_for_the_others(
    any_oracle: Oracle, lag: int, budget: int
) -> None:
    params = greedy(25)
    requests = requests_for(PROMPTS, params)
    config = RuntimeConfig(max_batch_size=3, max_num_tokens=budget, lag=lag)
    scheduler = Scheduler(any_oracle.loaded, config, poison=True)
    answers = serve(scheduler, requests[:2], arrivals={1: requests[2:4], 3: requests[4:5], 20: requests[5:]})
    assert tokens_of(answers) == {str(i): any_oracle.answer(prompt, params) for i, prompt in enumerate(PROMPTS)}


def test_judged_rows_are_bit_equal_alone_and_among_others(any_oracle: Oracle) -> None:
    """A-13: alone, and in buckets of 2 and 4 with one to three others of other lengths."""
    params = greedy(12, return_generation_logits=True)
    depth = any_oracle.loaded.manifest.speculative.draft_len

    def rows(batch: int, draft_length: int) -> dict[str, np.ndarray]:
        config = RuntimeConfig(max_batch_size=batch, draft_length=draft_length)
        answers = serve(Scheduler(any_oracle.loaded, config, poison=True), requests_for(PROMPTS[2:6], params))
        found = {name: np.concatenate([p.logits for p in each.pieces]) for name, each in answers.items()}
        for name, answer in answers.items():
            assert found[name].argmax(axis=1).tolist() == answer.tokens
        return found

    alone = rows(1, 0)
    for batch, draft_length in ((2, 0), (4, 0), (1, depth), (3, depth), (4, depth // 2)):
        for name, logits in rows(batch, draft_length).items():
            np.testing.assert_array_equal(logits, alone[name])


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.3}, {"frequency_penalty": 2.0}, {"presence_penalty": 1.5}]
)
def test_penalties_give_the_same_tokens_with_and_without_speculation(oracle: Oracle, penalty: dict[str, float]) -> None:
    params = greedy(40, **penalty)
    answers = serve(Scheduler(oracle.loaded, RuntimeConfig(max_batch_size=3)), requests_for(PROMPTS[:5], params))
    assert tokens_of(answers) == {str(i): oracle.answer(prompt, params) for i, prompt in enumerate(PROMPTS[:5])}


def test_requests_may_draft_less_or_not_at_all(oracle: Oracle) -> None:
    wishes: list[Any] = [None, "off", 1, 0, 3, 5]
    requests = [Request(str(i), PROMPTS[i], greedy(30, speculative=wish)) for i, wish in enumerate(wishes)]
    answers = serve(Scheduler(oracle.loaded, RuntimeConfig(max_batch_size=6)), requests)
    for i, wish in enumerate(wishes):
        assert answers[str(i)].tokens == oracle.answer(PROMPTS[i], greedy(30))
        drafted_at = answers[str(i)].pieces[-1].acceptance.drafted_at
        assert len(drafted_at) == (5 if wish is None else 0 if wish == "off" else wish)


def test_no_draft_runs_for_a_batch_that_wants_none(oracle: Oracle) -> None:
    scheduler = Scheduler(oracle.loaded, RuntimeConfig(max_batch_size=2))
    serve(scheduler, requests_for(PROMPTS[:2], greedy(10, speculative="off")))
    assert scheduler.counters.draft_rounds == 0
    assert scheduler.counters.replays == {"2x1": 9}


@pytest.mark.parametrize("batch", [1, 4])
def test_confidence_changes_the_verify_length_of_each_request_and_nothing_else(oracle: Oracle, batch: int) -> None:
    params = greedy(30)
    lengths: dict[float, dict[tuple[str, int], int]] = {}
    for threshold in (0.0, 0.3, 0.7, 1.0):
        verified: dict[tuple[str, int], int] = {}
        before: Counter[str] = Counter()
        stood: dict[str, int] = {}

        def note(
            scheduler: Scheduler,
            answers: dict[str, Answer],
            verified: dict[tuple[str, int], int] = verified,
            before: Counter[str] = before,
            stood: dict[str, int] = stood,
        ) -> None:
            for name, answer in answers.items():
                if answer.pieces:
                    drafted = answer.pieces[-1].acceptance.drafted
                    if name in stood and len(answer.tokens) > stood[name]:
                        verified[name, stood[name]] = drafted - before[name]
                    before[name], stood[name] = drafted, len(answer.tokens)

        config = RuntimeConfig(max_batch_size=batch, confidence_threshold=threshold)
        answers = serve(Scheduler(oracle.loaded, config), requests_for(PROMPTS[:4], params), after_step=note)
        assert tokens_of(answers) == {str(i): oracle.answer(p, params) for i, p in enumerate(PROMPTS[:4])}
        lengths[threshold] = verified
    assert all(count == min(5, 30 - done - 1) for (_, done), count in lengths[0.0].items())
    for lower, higher in ((0.0, 0.3), (0.3, 0.7), (0.7, 1.0)):
        common = lengths[lower].keys() & lengths[higher].keys()
        assert len(common) > 20
        assert all(lengths[higher][key] <= lengths[lower][key] for key in common)
    assert len(set(lengths[0.3].values()) | set(lengths[0.7].values())) > 2


@pytest.mark.parametrize("draft_length", [3, None])
def test_a_prompt_sent_again_and_then_longer_gets_what_a_cold_engine_gives_it(
    oracle: Oracle, draft_length: int | None
) -> None:
    """A-14: tokens, and proposals position by position. There is no prefix cache: every prompt is computed."""
    prompts = [STREAM[:24], STREAM[:24], STREAM[:29]]
    params = greedy(40)
    config = RuntimeConfig(max_batch_size=1, draft_length=draft_length)

    def run(scheduler: Scheduler, proposals: Proposals, prompt: Sequence[int]) -> dict[int, Any]:
        proposals.blocks.clear()
        assert serve(scheduler, [Request("a", prompt, params)])["a"].tokens == oracle.answer(prompt, params)
        return proposals.of(1)

    warm_proposals = Proposals()
    warm = Scheduler(oracle.loaded, config, draft=watching(oracle.loaded, warm_proposals.note), poison=True)
    for prompt in prompts:
        cold_proposals = Proposals()
        cold = Scheduler(oracle.loaded, config, draft=watching(oracle.loaded, cold_proposals.note), poison=True)
        found, expected = run(warm, warm_proposals, prompt), run(cold, cold_proposals, prompt)
        assert len(found) > 5
        assert_same_proposals(found, expected, limit=len(prompt) + 40)
    assert warm.counters.prefill_tokens == sum(map(len, prompts))


# -- sampling -------------------------------------------------------------------------------------------------------


def sampled(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "temperature": 1.0, "ignore_eos": True, "seed": seed, **options})


def test_greedy_and_seeded_requests_are_the_same_alone_and_together(any_oracle: Oracle) -> None:
    requests = [
        Request("g0", PROMPTS[2], greedy(40)),
        Request("s0", PROMPTS[3], sampled(1)),
        Request("g1", PROMPTS[4], greedy(40)),
        Request("s1", PROMPTS[5], sampled(2, top_p=0.9, top_k=50)),
    ]
    alone = {}
    for request in requests:
        scheduler = Scheduler(any_oracle.loaded, RuntimeConfig(max_batch_size=1))
        alone[request.id] = serve(scheduler, [request])[request.id].tokens
    scheduler = Scheduler(any_oracle.loaded, RuntimeConfig(max_batch_size=4))
    for _ in range(3):
        random.Random(0).shuffle(requests)
        assert tokens_of(serve(scheduler, requests)) == alone


def test_a_seed_decides_the_answer_whatever_ran_before(oracle: Oracle) -> None:
    scheduler = Scheduler(oracle.loaded, RuntimeConfig(max_batch_size=2, draft_length=3))

    def answer(seed: int) -> list[int]:
        return serve(scheduler, [Request("a", PROMPTS[3], sampled(seed))])["a"].tokens

    first = answer(1)
    serve(scheduler, requests_for(PROMPTS[:5], greedy(9)))
    assert answer(1) == first
    assert answer(2) != first


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_gumbel_coupling_gives_the_tokens_of_plain_sampling(oracle: Oracle, depth: int) -> None:
    requests = [Request(str(i), prompt, sampled(i, coupling="gumbel")) for i, prompt in enumerate(PROMPTS[:5])]
    plain = {request.id: oracle.answer(request.prompt_ids, request.params) for request in requests}
    config = RuntimeConfig(max_batch_size=3, draft_length=depth, max_num_tokens=10)
    assert tokens_of(serve(Scheduler(oracle.loaded, config), requests)) == plain


# -- where an answer ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", range(1, 13))
@pytest.mark.parametrize("lag", [0, 1])
def test_a_full_budget_in_a_block_delivers_exactly_max_tokens(oracle: Oracle, max_tokens: int, lag: int) -> None:
    prompt, params = PROMPTS[4], greedy(max_tokens)
    sequences = {"a": prompt + oracle.answer(prompt, greedy(12))}
    config = RuntimeConfig(max_batch_size=1, draft_length=4, lag=lag)
    scheduler = forced_scheduler(oracle.loaded, config, sequences, lambda turn: 4)
    answer = serve(scheduler, [Request("a", prompt, params)])["a"]
    assert answer.tokens == oracle.answer(prompt, greedy(12))[:max_tokens]
    assert answer.finish_reason == "length"
    assert answer.pieces[-1].acceptance.emitted == max_tokens - 1
    needed = math.ceil((max_tokens - 1) / 5)
    assert answer.pieces[-1].acceptance.iterations == needed
    if lag == 0:  # otherwise one round may be under way when the answer is found to be complete
        assert scheduler.counters.draft_rounds == needed


@pytest.mark.parametrize("length", range(25, 32))
def test_an_answer_ends_where_the_context_ends(oracle: Oracle, length: int) -> None:
    prompt = (PROMPTS[6] + PROMPTS[5])[:length]
    expected = oracle.answer(prompt, greedy(20))[: 32 - length]
    for wrong_at in (0, 3, 5):
        config = RuntimeConfig(max_batch_size=2, max_seq_len=32)
        sequences = {"a": prompt + oracle.answer(prompt, greedy(20))}
        scheduler = forced_scheduler(oracle.loaded, config, sequences, lambda turn, wrong_at=wrong_at: wrong_at)
        answer = serve(scheduler, [Request("a", prompt, greedy(20))])["a"]
        assert answer.tokens == expected
        assert answer.finish_reason == "length"


def test_a_very_large_budget_is_cut_to_the_context(oracle: Oracle) -> None:
    scheduler = Scheduler(oracle.loaded, RuntimeConfig(max_batch_size=1, max_seq_len=96))
    answer = serve(scheduler, [Request("a", PROMPTS[2], greedy(100_000_000))])["a"]
    assert (len(answer.tokens), answer.finish_reason) == (96 - len(PROMPTS[2]), "length")


@pytest.mark.parametrize("draft_length", [0, 5])
@pytest.mark.parametrize("by", ["end of text", "stop_token_ids"])
def test_a_stop_inside_a_block_wins_over_the_budget_behind_it(tmp_path: Path, draft_length: int, by: str) -> None:
    stop = EOS if by == "end of text" else 7
    loaded = scripted(tmp_path, [5, 9, 10, 11, stop, 20, 21, 22], draft_length=draft_length)
    extra = {} if by == "end of text" else {"stop_token_ids": [7]}
    # The first token, 9, comes with the prompt; the block is [10, 11, stop, 20, 21, 22].
    answer = serve(Scheduler(loaded, RuntimeConfig()), [Request("a", [5], SamplingParams(max_tokens=6, **extra))])["a"]
    assert (answer.tokens, answer.finish_reason) == ([9, 10, 11, stop], "stop")
    assert answer.pieces[-1].stop_reason == (None if by == "end of text" else 7)
    answer = serve(Scheduler(loaded, RuntimeConfig()), [Request("a", [5], SamplingParams(max_tokens=3, **extra))])["a"]
    assert (answer.tokens, answer.finish_reason) == ([9, 10, 11], "length")


def test_a_stop_as_the_first_token_runs_no_iteration(tmp_path: Path) -> None:
    scheduler = Scheduler(scripted(tmp_path, [5, EOS, 3], draft_length=5), RuntimeConfig())
    answer = serve(scheduler, [Request("a", [5], SamplingParams(max_tokens=6))])["a"]
    assert (answer.tokens, answer.finish_reason) == ([EOS], "stop")
    assert scheduler.counters.replays == {}


@pytest.mark.parametrize("draft_length", [0, 4])
def test_min_tokens_counts_tokens_and_not_steps(tmp_path: Path, draft_length: int) -> None:
    loaded = scripted(tmp_path, [5, 9, *[EOS] * 30], draft_length=draft_length)
    answer = serve(
        Scheduler(loaded, RuntimeConfig()), [Request("a", [5], SamplingParams(max_tokens=20, min_tokens=6))]
    )["a"]
    assert answer.tokens.index(EOS) == 6
    assert (len(answer.tokens), answer.finish_reason) == (7, "stop")


def test_end_of_text_is_an_ordinary_token_where_it_is_ignored(tmp_path: Path) -> None:
    loaded = scripted(tmp_path, [5, 9, EOS, 3, EOS, 4], draft_length=3)
    answer = serve(Scheduler(loaded, RuntimeConfig()), [Request("a", [5], greedy(5))])["a"]
    assert (answer.tokens, answer.finish_reason) == ([9, EOS, 3, EOS, 4], "length")


def test_penalty_counts_are_the_histogram_of_what_was_committed(tmp_path: Path) -> None:
    loaded = scripted(tmp_path, [5, *[9, 8, 7, 9] * 12], draft_length=4)
    params = greedy(40, frequency_penalty=0.5)

    def check(scheduler: Scheduler, answers: dict[str, Answer]) -> None:
        slot = scheduler.slot_of("a")
        if slot is not None:
            counts = scheduler.sampling.output_counts
            assert counts is not None
            assert {int(t): int(counts[slot, t]) for t in np.flatnonzero(counts[slot])} == Counter(answers["a"].tokens)

    speculative = serve(Scheduler(loaded, RuntimeConfig()), [Request("a", [5], params)], after_step=check)
    plain = serve(Scheduler(loaded, RuntimeConfig(draft_length=0)), [Request("a", [5], params)])
    assert tokens_of(speculative) == tokens_of(plain)


# -- budgets, pages, refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(32,), (16, 16), (31, 1), (33,), (33, 40, 1)])
def test_prefill_at_the_token_budget_and_beyond_it_passes(any_oracle: Oracle, lengths: tuple[int, ...]) -> None:
    prompts = [(PROMPTS[7] + PROMPTS[6])[:length] for length in lengths]
    scheduler = Scheduler(any_oracle.loaded, RuntimeConfig(max_batch_size=3, max_num_tokens=32))
    answers = serve(scheduler, requests_for(prompts, greedy(12)))
    assert tokens_of(answers) == {str(i): any_oracle.answer(prompt, greedy(12)) for i, prompt in enumerate(prompts)}
    assert scheduler.counters.prefill_steps == math.ceil(sum(lengths) / 32)
    assert scheduler.counters.prefill_tokens == sum(lengths)


def test_a_request_left_out_of_a_step_comes_back_unharmed(any_oracle: Oracle) -> None:
    """A-03: the third request has a slot and gets no row in step 3, while the first one drafts, and all its rows in
    step 4; the host is an iteration behind. Ids are checked at every call."""
    prompts = [STREAM[:34], STREAM[34:60], STREAM[60:65]]
    taken: list[int] = []

    def count(scheduler: Scheduler, answers: dict[str, Answer]) -> None:
        taken.append(0 if (slot := scheduler.slot_of("2")) is None else int(scheduler.slots.position[slot]))

    config = RuntimeConfig(
        max_batch_size=3,
        max_num_tokens=20,
        draft_length=min(3, any_oracle.loaded.manifest.speculative.draft_len),
        lag=1,
    )
    scheduler = Scheduler(any_oracle.loaded, config, poison=True)
    answers = serve(scheduler, requests_for(prompts, greedy(20)), after_step=count)
    assert scheduler.counters.prefill_steps == 4
    assert taken[2] == 0
    assert taken[3] >= 5
    assert tokens_of(answers) == {str(i): any_oracle.answer(prompt, greedy(20)) for i, prompt in enumerate(prompts)}


def test_two_prompts_packed_into_one_step_get_what_each_gets_alone(any_oracle: Oracle) -> None:
    """A-09: 40 and 37 tokens, logits, memory and first proposals to the bit; nothing is read that was not written."""
    prompts = {"a": STREAM[:40], "b": STREAM[40:77]}
    params = greedy(12, return_generation_logits=True)

    def run(names: str) -> tuple[Scheduler, dict[str, Answer], dict[str, dict[str, Any]]]:
        proposals, held = Proposals(), {}

        def note(scheduler: Scheduler, answers: dict[str, Answer]) -> None:
            for name in names:
                if name not in held:
                    slot = scheduler.slot_of(name)
                    assert slot is not None
                    position = int(scheduler.slots.position[slot])
                    rows = scheduler.state.live_rows(slot, position, scheduler.page_table.full)
                    block = proposals.of(slot).get(len(prompts[name]), {})
                    held[name] = {"position": position, **rows, **block}

        draft = watching(any_oracle.loaded, proposals.note)
        config = RuntimeConfig(max_batch_size=2, max_num_tokens=96)
        scheduler = Scheduler(any_oracle.loaded, config, draft=draft, poison=True)
        answers = serve(scheduler, [Request(name, prompts[name], params) for name in names], after_step=note)
        return scheduler, answers, held

    scheduler, answers, held = run("ab")
    assert (scheduler.counters.prefill_steps, scheduler.counters.prefill_tokens) == (1, 77)
    for name in "ab":
        _, alone, alone_held = run(name)
        for ours, theirs in zip(answers[name].pieces, alone[name].pieces, strict=True):
            np.testing.assert_array_equal(ours.logits, theirs.logits)
        assert answers[name].tokens == any_oracle.answer(prompts[name], params)
        assert held[name].keys() == alone_held[name].keys()
        for what, value in held[name].items():
            np.testing.assert_array_equal(value, alone_held[name][what], err_msg=what)
            assert not np.isnan(value).any(), what


@pytest.mark.parametrize(("pages", "at_once"), [(7, 1), (8, 2)])  # four a request
def test_requests_beyond_the_pages_wait_in_line(tmp_path: Path, pages: int, at_once: int) -> None:
    loaded = scripted(tmp_path, [5, *range(10, 60)], draft_length=4, max_seq_len=64)
    scheduler = Scheduler(loaded, RuntimeConfig(max_batch_size=4, kv_pages=pages))  # pages of four tokens
    most = 0

    def watch(scheduler: Scheduler, answers: dict[str, Answer]) -> None:
        nonlocal most
        most = max(most, scheduler.running)

    answers = serve(scheduler, requests_for([[5]] * 5, greedy(15)), after_step=watch)
    assert most == at_once
    assert all(answer.tokens == list(range(10, 25)) for answer in answers.values())


def test_a_request_that_can_never_fit_is_refused_when_it_comes(tmp_path: Path) -> None:
    loaded = scripted(tmp_path, [5, *range(10, 60)], draft_length=4, max_seq_len=64)
    error = refusal(Scheduler(loaded, RuntimeConfig(kv_pages=8)), Request("a", [5], greedy(40)))
    assert error.field == "max_tokens"
    assert "11 pages" in str(error)
    assert "8 pages" in str(error)


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([], {}, "prompt"),
        ([1] * 128, {}, "prompt"),
        (None, {}, "prompt"),  # as many tokens as the context holds
        ([1] * 100_000, {}, "prompt"),
        ([5, 320], {}, "prompt"),
        ([5, -1], {}, "prompt"),
        ([5], {"speculative": 6}, "speculative"),
        ([5], {"stop_token_ids": [320]}, "stop_token_ids"),
        ([5], {"stop_token_ids": list(range(2, 40))}, "stop_token_ids"),
        ([5], {"logit_bias": {400: 1.0}}, "logit_bias"),
    ],
)
def test_a_bad_request_is_refused_by_field_and_the_next_is_served(
    served_engine: LoadedEngine, prompt: list[int] | None, options: dict[str, Any], field: str
) -> None:
    scheduler = Scheduler(served_engine, RuntimeConfig(max_batch_size=2))
    prompt = [1] * served_engine.manifest.build_config.max_seq_len if prompt is None else prompt
    assert refusal(scheduler, Request("a", prompt, greedy(4, **options))).field == field


def test_an_id_in_use_is_refused_until_its_request_is_done(served_engine: LoadedEngine) -> None:
    scheduler = Scheduler(served_engine, RuntimeConfig(max_batch_size=2))
    scheduler.submit(Request("a", [5], greedy(4)))
    with pytest.raises(RequestError, match="'a' is in use"):
        scheduler.submit(Request("a", [6], greedy(4)))
    while scheduler.has_work:
        scheduler.step()
    assert len(serve(scheduler, [Request("a", [6], greedy(4))])["a"].tokens) == 4


# -- requests that go away ------------------------------------------------------------------------------------------


def test_aborts_of_unknown_and_finished_requests_are_ignored(oracle: Oracle) -> None:
    scheduler = Scheduler(oracle.loaded, RuntimeConfig(max_batch_size=2))
    scheduler.abort("never")
    serve(scheduler, [Request("a", PROMPTS[2], greedy(4))])
    scheduler.abort("a")
    assert not scheduler.has_work
    scheduler.submit(Request("b", PROMPTS[3], greedy(20)))
    scheduler.submit(Request("c", PROMPTS[4], greedy(20)))
    scheduler.step()
    scheduler.abort("b")
    scheduler.abort("b")
    answers = {"b": Answer(), "c": Answer()}
    while scheduler.has_work:
        for progress in scheduler.step():
            answers[progress.request_id].add(progress)
    assert answers["b"].finish_reason == "abort"
    assert answers["c"].tokens[-10:] == oracle.answer(PROMPTS[4], greedy(20))[-10:]
    assert_clean(scheduler)


def test_a_request_in_the_queue_can_be_aborted(served_engine: LoadedEngine) -> None:
    scheduler = Scheduler(served_engine, RuntimeConfig(max_batch_size=1))
    for name in "ab":
        scheduler.submit(Request(name, [5], greedy(3)))
    scheduler.step()
    scheduler.abort("b")
    finished = {}
    while scheduler.has_work:
        finished.update({p.request_id: p.finish_reason for p in scheduler.step() if p.finish_reason})
    assert finished == {"a": "length", "b": "abort"}


@pytest.mark.parametrize("lag", [1, 2])
def test_results_that_come_after_a_slot_changed_hands_are_dropped(any_oracle: Oracle, lag: int) -> None:
    scheduler = Scheduler(any_oracle.loaded, RuntimeConfig(max_batch_size=1, lag=lag))
    scheduler.submit(Request("old", PROMPTS[3], greedy(40)))
    for _ in range(4):
        scheduler.step()
    scheduler.abort("old")
    scheduler.submit(Request("new", PROMPTS[4], greedy(20)))
    tokens: list[int] = []
    while scheduler.has_work:
        for progress in scheduler.step():
            if progress.request_id == "new":
                tokens += progress.token_ids
    assert tokens == any_oracle.answer(PROMPTS[4], greedy(20))
    assert scheduler.counters.stale_results >= lag
    assert_clean(scheduler)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("buckets", [tuple(range(1, 9)), (1, 2, 4, 8), (8,)])
def test_churn_gives_every_request_its_own_tokens(oracle: Oracle, buckets: tuple[int, ...], lag: int) -> None:
    draw = random.Random(3)
    prompts = {str(i): PROMPTS[7][: draw.randint(1, 12)] for i in range(130)}
    budgets = {name: draw.randint(1, 12) for name in prompts}
    config = RuntimeConfig(max_batch_size=8, cuda_graph_batch_sizes=buckets, draft_length=3, lag=lag)
    scheduler = Scheduler(oracle.loaded, config, poison=True)
    answers = {name: Answer() for name in prompts}
    waiting = list(prompts)
    while waiting or scheduler.has_work:
        for name in waiting[:3]:
            scheduler.submit(Request(name, prompts[name], greedy(budgets[name])))
            if int(name) % 2 and draw.random() < 0.5:
                scheduler.abort(name)
        del waiting[:3]
        for progress in scheduler.step():
            answers[progress.request_id].add(progress)
        for name in prompts:
            if int(name) % 2 and scheduler.slot_of(name) is not None and draw.random() < 0.3:
                scheduler.abort(name)
    assert_clean(scheduler)
    for name, answer in answers.items():
        expected = oracle.answer(prompts[name], greedy(budgets[name]))
        assert answer.finish_reason == "length" or int(name) % 2
        assert answer.tokens == expected[: len(answer.tokens)]
        if answer.finish_reason == "length":
            assert answer.tokens == expected


def test_more_requests_than_memory_holds_are_refused_with_the_bytes_they_take(f4_engine: LoadedEngine) -> None:
    with pytest.raises(ConfigError, match=r"not enough memory for max_batch_size 100000000, .* takes [\d,]+ bytes"):
        Scheduler(f4_engine, RuntimeConfig(max_batch_size=100_000_000, cuda_graph_batch_sizes=(1,)))
