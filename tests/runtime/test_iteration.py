"""The iteration as a captured object: prepared shapes, static buffers, nothing allocated while it runs."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Literal

import numpy as np
import pytest

from twostroke.engines.loading import LoadedEngine
from twostroke.plugins.accept import Purpose, gumbel_rows
from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.sampling_params import SamplingParams
from twostroke.runtime.scheduler import Scheduler
from twostroke.runtime.speculation import DraftBlock, Mtp
from twostroke.tests.runtime.guarded import guarded
from twostroke.tests.runtime.serving import Answer, Oracle, Proposals, greedy, serve, watching

RANDOM = np.random.default_rng(5)
PROMPTS = [RANDOM.integers(2, 319, size=length).tolist() for length in (9, 17, 3, 30)]
LARGEST = np.iinfo(np.int32).max


def decoding(loaded: LoadedEngine, config: RuntimeConfig, prompts: list[list[int]]) -> tuple[Scheduler, list[int]]:
    """A scheduler whose requests have all been prefilled, and their slots."""
    scheduler = Scheduler(loaded, config)
    for i, prompt in enumerate(prompts):
        scheduler.submit(Request(str(i), prompt, greedy(80)))
    scheduler.step()
    slots = [scheduler.slot_of(str(i)) for i in range(len(prompts))]
    return scheduler, [slot for slot in slots if slot is not None]


@pytest.mark.parametrize("draft_length", [0, 5])
def test_an_iteration_allocates_nothing_after_its_first_run(drafted_engine: LoadedEngine, draft_length: int) -> None:
    config = RuntimeConfig(max_batch_size=4, max_num_tokens=64, draft_length=draft_length)
    scheduler, slots = decoding(drafted_engine, config, PROMPTS)
    iteration = scheduler._iteration

    start = scheduler.slots.position.copy()

    def run(times: int) -> None:
        for _ in range(times):
            np.copyto(scheduler.slots.position, start)  # the same iteration over and over, never done
            iteration.launch(slots, 128)
            iteration.collect()

    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        run(100)  # as many as fill the interpreter's own free lists
        kept, held = [], []
        for _ in range(5):  # what grows grows every time; another thread of the test process allocates once
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            run(20)
            after, peak = tracemalloc.get_traced_memory()
            kept.append(after - before)
            held.append(peak - before)
    finally:
        tracemalloc.stop()
        gc.enable()
    assert not scheduler.slots.done[slots].any()
    assert min(kept) < 256  # counters that outgrow the interpreter's small integers
    assert min(held) < 4096


@pytest.mark.parametrize("draft_length", [0, 5])
def test_static_inputs_carry_nothing_over_from_a_larger_batch(oracle: Oracle, draft_length: int) -> None:
    config = RuntimeConfig(max_batch_size=4, draft_length=draft_length)
    scheduler = Scheduler(oracle.loaded, config, poison=True)

    def poison(scheduler: Scheduler, answers: dict[str, Answer]) -> None:
        iteration, prefill = scheduler._iteration, scheduler._prefill
        for step in (iteration._step, prefill._step):
            for array in (step.token_ids, step.positions, step.slots, step.request_slot, step.next_ids):
                array.fill(LARGEST)
            step.taps.fill(np.nan)
            step.logits.fill(np.nan)
        block = iteration._block
        for array in (block.anchor, block.position, block.slot, block.tokens):
            array.fill(LARGEST)
        for array in (block.inverse_temperature, block.logits, block.confidence):
            array.fill(np.nan)
        for chain in iteration._draft._chains.values() if isinstance(iteration._draft, Mtp) else ():
            for array in (chain.rows.slots, chain.rows.positions, chain.rows.tokens):
                array[:-1].fill(LARGEST)  # the last row is scratch and nobody's
            for array in (chain.rows.inverse_temperature, chain.rows.noise, chain.rows.logits, chain.rows.confidence):
                array[:-1].fill(np.nan)

    requests = [Request(str(i), prompt, greedy(4 + 9 * i)) for i, prompt in enumerate(PROMPTS)]
    answers = serve(scheduler, requests, after_step=poison)
    for request in requests:
        assert answers[request.id].tokens == oracle.answer(request.prompt_ids, request.params)
    rows = draft_length + 1
    assert {f"1x{rows}", f"2x{rows}", f"4x{rows}"} <= scheduler.counters.replays.keys()


def test_a_done_slot_is_carried_along_as_scratch(drafted_engine: LoadedEngine) -> None:
    scheduler, slots = decoding(guarded(drafted_engine), RuntimeConfig(max_batch_size=4), PROMPTS)
    scheduler.slots.done[slots[1]] = True
    before = {name: array.copy() for name, array in scheduler.state.arrays.items()}
    position, anchor = scheduler.slots.position.copy(), scheduler.slots.anchor.copy()
    scheduler._iteration.launch(slots, 128)
    results = scheduler._iteration.collect()
    assert results.count[:4].astype(bool).tolist() == [True, False, True, True]
    assert scheduler.slots.position[slots[1]] == position[slots[1]]
    assert scheduler.slots.anchor[slots[1]] == anchor[slots[1]]
    for tensor in scheduler.state.tensors:
        blocks = scheduler.page_table.owned(slots[1]) if tensor.addressing == "paged" else (slots[1],)
        for block in blocks:
            own = slice(block * tensor.rows, (block + 1) * tensor.rows)
            np.testing.assert_array_equal(scheduler.state.arrays[tensor.name][own], before[tensor.name][own])


def test_the_iteration_that_ends_a_text_makes_those_launched_behind_it_carry_the_slot_as_scratch(
    oracle: Oracle,
) -> None:
    """The host has not read the end yet, and the slot is still its request's."""
    tokens = oracle.answer(PROMPTS[0], greedy(8))
    params = greedy(40, stop_token_ids=[tokens[1]])
    assert tokens[0] != tokens[1]
    scheduler = Scheduler(oracle.loaded, RuntimeConfig(max_batch_size=1, lag=2))
    scheduler.submit(Request("a", PROMPTS[0], params))
    scheduler.step()  # prefill and the iteration that brings the second token, unread
    slot = scheduler.slot_of("a")
    assert slot is not None
    position = int(scheduler.slots.position[slot])
    scheduler._iteration.launch([slot], 128)
    ending, behind = scheduler._iteration.collect(), scheduler._iteration.collect()
    assert (ending.count[0], ending.done[0], ending.tokens[0, 0]) == (1, True, tokens[1])
    assert behind.count[0] == 0
    assert scheduler.slots.position[slot] == position


@pytest.mark.parametrize(("threshold", "verified"), [(0.0, 5), (0.1, 5), (0.5, 1), (0.9001, 0), (1.0, 0)])
def test_the_first_doubtful_draft_ends_what_is_verified(
    drafted_engine: LoadedEngine, threshold: float, verified: int
) -> None:
    def sure_of_first_and_third(block: DraftBlock) -> None:
        block.confidence[:] = [0.9, 0.2, 0.9, 0.2, 0.2]

    config = RuntimeConfig(max_batch_size=1, confidence_threshold=threshold)
    draft = watching(drafted_engine, sure_of_first_and_third)
    scheduler = Scheduler(guarded(drafted_engine), config, draft=draft)
    scheduler.submit(Request("a", PROMPTS[0], greedy(80)))
    scheduler.step()
    assert scheduler.counters.acceptance.drafted == verified


def test_a_proposal_is_drawn_with_the_noise_of_its_request_and_position(drafted_engine: LoadedEngine) -> None:
    """And by its rule: the largest of logits / T + noise, of every token of a block."""
    proposals = Proposals()

    def sampled(seed: int, coupling: Literal["rejection", "gumbel"]) -> SamplingParams:
        return SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, seed=seed, coupling=coupling)

    draft = watching(drafted_engine, proposals.note)
    scheduler = Scheduler(guarded(drafted_engine), RuntimeConfig(max_batch_size=3), draft=draft)
    params = {"greedy": greedy(30), "rejection": sampled(3, "rejection"), "gumbel": sampled(2**40 + 5, "gumbel")}
    for name, prompt in zip(params, PROMPTS, strict=False):
        scheduler.submit(Request(name, prompt, params[name]))
    scheduler.step()
    slots = {name: slot for name in params if (slot := scheduler.slot_of(name))}
    while scheduler.has_work:
        scheduler.step()
    k = np.arange(1, 6)
    for name, slot in slots.items():
        blocks = proposals.of(slot)
        assert len(blocks) >= 5
        for position, rows in blocks.items():
            expected = np.zeros_like(rows["noise"])
            if name == "rejection":
                gumbel_rows(3, position, k, Purpose.DRAFT, expected)
            elif name == "gumbel":
                gumbel_rows(2**40 + 5, position + k, 0, Purpose.COUPLED, expected)
            np.testing.assert_array_equal(rows["noise"], expected)
            assert rows["inverse_temperature"] == (1.0 if name == "greedy" else np.float32(1 / 0.8))
            scaled = rows["logits"] * rows["inverse_temperature"] + expected
            assert rows["tokens"].tolist() == scaled.argmax(axis=1).tolist()


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_no_iteration_is_launched_that_could_not_bring_a_token(served_engine: LoadedEngine, lag: int) -> None:
    scheduler = Scheduler(served_engine, RuntimeConfig(max_batch_size=1, draft_length=0, lag=lag))
    serve(scheduler, [Request("a", PROMPTS[0], greedy(9))])
    assert scheduler.counters.replays == {"1x1": 8}


@pytest.mark.parametrize(
    ("engine", "lengths"),
    [
        ("f4_long_engine", (248, 505)),  # tiers 1 to 2 at 256 tokens, 2 to 4 at 512
        ("t32_long_engine", (56, 120)),  # 1 to 2 at 64, 2 to 4 at 128
    ],
)
def test_a_page_tier_is_crossed_without_a_trace_and_counted(
    request: pytest.FixtureRequest, engine: str, lengths: tuple[int, ...]
) -> None:
    oracle = Oracle(guarded(request.getfixturevalue(engine)))
    stream = np.random.default_rng(2).integers(2, 319, size=540).tolist()
    for length in lengths:
        prompt = stream[:length]
        expected = oracle.answer(prompt, greedy(24))
        scheduler = Scheduler(oracle.loaded, RuntimeConfig(max_batch_size=2), poison=True)
        answers = serve(scheduler, [Request("a", prompt, greedy(24))])
        assert answers["a"].tokens == expected
        assert scheduler.counters.tier_changes == 1
        # Beside a long request a short one reads a wider table, to no effect.
        scheduler = Scheduler(oracle.loaded, RuntimeConfig(max_batch_size=2), poison=True)
        answers = serve(scheduler, [Request("a", prompt, greedy(24)), Request("b", stream[:9], greedy(24))])
        assert answers["a"].tokens == expected
        assert answers["b"].tokens == oracle.answer(stream[:9], greedy(24))


def test_every_replay_and_padding_row_is_counted(drafted_engine: LoadedEngine) -> None:
    scheduler = Scheduler(drafted_engine, RuntimeConfig(max_batch_size=4, cuda_graph_batch_sizes=(4,), draft_length=2))
    serve(scheduler, [Request("a", PROMPTS[0], greedy(2))])
    # One iteration for the second token: of 4 x 3 rows only the anchor's counts, no draft is wanted behind it.
    assert scheduler.counters.replays == {"4x3": 1}
    assert scheduler.counters.padding_rows == 11
    assert scheduler.counters.bound == 2  # one prefill shape, one iteration shape


def test_iterations_that_nobody_collects_are_refused(drafted_engine: LoadedEngine) -> None:
    scheduler, slots = decoding(drafted_engine, RuntimeConfig(max_batch_size=4), PROMPTS)
    iteration = scheduler._iteration
    for _ in range(2):
        iteration.launch(slots, 128)
    with pytest.raises(ValueError, match="none was collected"):
        iteration.launch(slots, 128)
    iteration.collect()
    iteration.collect()
    with pytest.raises(ValueError, match="no iteration is in flight"):
        iteration.collect()
