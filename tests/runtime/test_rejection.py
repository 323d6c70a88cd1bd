"""Rejection needs no undo: after any mix of kept and refused drafts, what a request holds is what it would hold had it
only ever seen its committed tokens, one at a time, alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.scheduler import Scheduler
from twostroke.tests.runtime.serving import (
    Answer,
    Oracle,
    Proposals,
    assert_same_proposals,
    assert_same_rows,
    forced_scheduler,
    greedy,
    serve,
    watching,
)

BLOCK = 5
STREAM = np.random.default_rng(7).integers(2, 319, size=80).tolist()


def assert_state_of_committed_tokens(
    scheduler: Scheduler, oracle: Oracle, sequences: dict[str, list[int]], answers: dict[str, Answer]
) -> None:
    """Every running request's live rows are those of its committed tokens; its anchor is its last token."""
    for name, sequence in sequences.items():
        slot = scheduler.slot_of(name)
        if slot is None or not answers[name].tokens:
            continue
        position = int(scheduler.slots.position[slot])
        assert scheduler.slots.anchor[slot] == sequence[position]
        found = scheduler.state.live_rows(slot, position, scheduler.page_table.full)
        assert_same_rows(found, oracle.states(sequence)[position])


def run_forced(
    oracle: Oracle,
    prompts: Sequence[list[int]],
    max_tokens: int,
    config: RuntimeConfig,
    wrong_at: Sequence[int],
) -> Scheduler:
    """Serves the prompts with drafts that go wrong as `wrong_at` says, in turn, checking state after every step."""
    params = greedy(max_tokens)
    sequences = {str(i): prompt + oracle.answer(prompt, params) for i, prompt in enumerate(prompts)}
    scheduler = forced_scheduler(oracle.loaded, config, sequences, lambda turn: wrong_at[turn % len(wrong_at)])
    answers = serve(
        scheduler,
        [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)],
        after_step=lambda scheduler, answers: assert_state_of_committed_tokens(scheduler, oracle, sequences, answers),
    )
    for i, prompt in enumerate(prompts):
        assert answers[str(i)].tokens == sequences[str(i)][len(prompt) :]
    return scheduler


@pytest.mark.parametrize(("depth", "wrong_at"), [(depth, j) for depth in range(1, 6) for j in range(depth + 1)])
def test_rejected_block_leaves_state_as_if_never_drafted(oracle: Oracle, depth: int, wrong_at: int) -> None:
    prompts = [STREAM[:length] for length in range(8, 24)]  # every phase of the ratio-4 and ratio-8 pools
    config = RuntimeConfig(max_batch_size=16, max_num_tokens=256, draft_length=depth)
    scheduler = run_forced(oracle, prompts, 24, config, [wrong_at])
    acceptance = scheduler.counters.acceptance
    assert acceptance.accepted_at == [count if k < wrong_at else 0 for k, count in enumerate(acceptance.drafted_at)]


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_rejected_blocks_across_a_page_leave_state_as_if_never_drafted(oracle: Oracle, depth: int) -> None:
    """V3.2's pages hold 64 tokens: blocks that end before the boundary, at it and behind it, wrong at every offset in
    turn. V4's hold 256 and are not crossed here, its rings turn over several times."""
    prompts = [STREAM[:length] for length in range(54, 66)]
    config = RuntimeConfig(max_batch_size=6, max_num_tokens=256, draft_length=depth)
    scheduler = run_forced(oracle, prompts, 14, config, range(depth + 1))
    assert scheduler.counters.tier_changes == (oracle.loaded.manifest.build_config.tokens_per_page == 64)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pattern=st.lists(st.integers(0, BLOCK), min_size=1, max_size=12),
    # Within a page of 64 tokens, and across its end.
    lengths=st.lists(st.integers(1, 24) | st.integers(50, 64), min_size=1, max_size=5),
    chunk=st.sampled_from([1, 3, 7, 8, 64]),
    batch=st.integers(1, 3),
    depth=st.integers(1, BLOCK),
)
def test_any_mix_of_accepts_chunks_and_reused_slots_leaves_the_state_of_the_committed_tokens(
    oracle: Oracle, pattern: list[int], lengths: list[int], chunk: int, batch: int, depth: int
) -> None:
    config = RuntimeConfig(max_batch_size=batch, max_num_tokens=chunk, draft_length=depth)
    run_forced(oracle, [STREAM[:length] for length in lengths], 20, config, pattern)


@pytest.mark.parametrize("chunk", [8, 7, 5, 1])
def test_chunked_prefill_leaves_the_state_and_the_first_block_of_a_whole_one(oracle: Oracle, chunk: int) -> None:
    def prefilled(budget: int) -> tuple[Scheduler, Proposals]:
        proposals = Proposals()
        config = RuntimeConfig(max_batch_size=1, max_num_tokens=budget)
        draft = watching(oracle.loaded, proposals.note)
        scheduler = Scheduler(oracle.loaded, config, draft=draft, poison=True)
        scheduler.submit(Request("a", STREAM[:21], greedy(20)))
        while not proposals.blocks:
            scheduler.step()
        return scheduler, proposals

    (whole, whole_draft), (chunked, chunked_draft) = prefilled(21), prefilled(chunk)
    slot = whole.slot_of("a")
    assert slot == chunked.slot_of("a") == 1
    assert list(whole_draft.of(slot)) == [21]
    assert_same_proposals(chunked_draft.of(slot), whole_draft.of(slot), limit=41)
    position = int(whole.slots.position[slot])
    assert position == chunked.slots.position[slot]
    assert_same_rows(
        chunked.state.live_rows(slot, position, chunked.page_table.full),
        whole.state.live_rows(slot, position, whole.page_table.full),
    )


def test_the_first_tokens_of_a_block_do_not_depend_on_the_draft_length(oracle: Oracle) -> None:
    firsts = []
    for depth in range(1, BLOCK + 1):
        proposals = Proposals()
        draft = watching(oracle.loaded, proposals.note)
        scheduler = Scheduler(oracle.loaded, RuntimeConfig(max_batch_size=1, draft_length=depth), draft=draft)
        serve(scheduler, [Request("a", STREAM[:21], greedy(3))])
        firsts.append(proposals.of(1)[21]["tokens"].tolist())
    assert len(firsts[-1]) == BLOCK
    assert all(first == firsts[-1][: len(first)] for first in firsts)


def test_a_reused_slot_shows_nothing_of_who_had_it_before(oracle: Oracle) -> None:
    config = RuntimeConfig(max_batch_size=1)
    run_forced(oracle, [STREAM[:40], STREAM[5:6], STREAM[3:12]], 30, config, [2, 5, 0])


def test_a_one_token_prompt_has_one_row_of_draft_context(oracle: Oracle) -> None:
    for depth in range(1, 6):
        run_forced(oracle, [[7], [0]], 12, RuntimeConfig(max_batch_size=2, draft_length=depth), [depth, 0])
    context = {name: rows for name, rows in oracle.states([7, 8])[1].items() if name.startswith("mtp.")}
    assert context
    assert all(rows.shape[0] == 1 for rows in context.values())
