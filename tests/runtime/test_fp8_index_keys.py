"""Serving with index keys in fp8: speculation says what plain decoding says, and what it refuses leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest

from twostroke.engines.loading import LoadedEngine
from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.scheduler import Scheduler
from twostroke.tests.runtime.guarded import guarded
from twostroke.tests.runtime.serving import Answer, Oracle, assert_same_rows, forced_scheduler, greedy, serve

# Prompts below and above top-k (8), up to and across a page (64 tokens).
PROMPTS = {str(n): np.random.default_rng(n).integers(2, 318, size).tolist() for n, size in enumerate((5, 17, 40, 62))}
NEW = 24


@pytest.fixture(scope="module")
def oracle(t32_fp8_engine: LoadedEngine) -> Oracle:
    return Oracle(guarded(t32_fp8_engine))


@pytest.fixture(scope="module")
def sequences(oracle: Oracle) -> dict[str, list[int]]:
    """Prompt and plain greedy answer."""
    return {name: [*prompt, *oracle.answer(prompt, greedy(NEW))] for name, prompt in PROMPTS.items()}


def requests() -> list[Request]:
    return [Request(name, prompt, greedy(NEW)) for name, prompt in PROMPTS.items()]


@pytest.mark.parametrize(("depth", "batch", "chunk", "lag"), [(1, 1, 64, 0), (3, 4, 16, 0), (5, 3, 7, 1)])
def test_drafts_change_no_greedy_id(
    oracle: Oracle, sequences: dict[str, list[int]], depth: int, batch: int, chunk: int, lag: int
) -> None:
    """With the drafts the MTP layer makes; pages start as 0xFF."""
    config = RuntimeConfig(max_batch_size=batch, max_num_tokens=chunk, draft_length=depth, lag=lag)
    scheduler = Scheduler(oracle.loaded, config, poison=True)
    answers = serve(scheduler, requests())
    assert {name: PROMPTS[name] + answer.tokens for name, answer in answers.items()} == sequences
    assert sum(scheduler.counters.acceptance.drafted_at) > 0
    assert len(set(sequences["2"][40:])) > 5, "the toy says one thing only: this shows nothing"


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_rejected_blocks_leave_packed_state_as_if_never_drafted(
    oracle: Oracle, sequences: dict[str, list[int]], depth: int
) -> None:
    """Drafts go wrong at every offset in turn; after every step the live rows of target and MTP layer are, byte for
    byte, those of a request that saw its committed tokens one at a time."""
    config = RuntimeConfig(max_batch_size=4, max_num_tokens=128, draft_length=depth)
    scheduler = forced_scheduler(oracle.loaded, config, sequences, lambda turn: turn % (depth + 1))
    compared = 0

    def check(scheduler: Scheduler, answers: dict[str, Answer]) -> None:
        nonlocal compared
        for name, sequence in sequences.items():
            slot = scheduler.slot_of(name)
            if slot is not None and answers[name].tokens:
                position = int(scheduler.slots.position[slot])
                found = scheduler.state.live_rows(slot, position, scheduler.page_table.full)
                assert found["layers.0.index"].shape == found["mtp.0.index"].shape == (position, 132)
                assert_same_rows(found, oracle.states(sequence)[position])
                compared += 1

    answers = serve(scheduler, requests(), after_step=check)
    assert {name: PROMPTS[name] + answer.tokens for name, answer in answers.items()} == sequences
    assert compared > 20
    acceptance = scheduler.counters.acceptance
    assert all(0 < a < d for a, d in zip(acceptance.accepted_at, acceptance.drafted_at, strict=True))
