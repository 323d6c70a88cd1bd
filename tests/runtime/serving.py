"""Serving in tests: run requests to the end, what the oracle says, and drafts that are right or wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twostroke.engines.base import Engine
from twostroke.engines.loading import LoadedEngine
from twostroke.plugins.accept import SamplingSlots
from twostroke.runtime.counters import EngineCounters
from twostroke.runtime.flat_step import FlatStep, Ints
from twostroke.runtime.page_table import PageTable
from twostroke.runtime.prefill import Chunk, Prefill
from twostroke.runtime.request import Progress, Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.sampling_params import SamplingParams
from twostroke.runtime.scheduler import Scheduler
from twostroke.runtime.slots import Slots
from twostroke.runtime.speculation import DraftBlock, DraftFactory, DraftMethod, Enqueue, draft_method
from twostroke.runtime.state import State

Rows = Mapping[str, np.ndarray]


@dataclass
class Answer:
    """All progress of one request."""

    tokens: list[int] = field(default_factory=list)
    pieces: list[Progress] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        return self.pieces[-1].finish_reason

    def add(self, progress: Progress) -> None:
        assert self.finish_reason is None if self.pieces else True
        self.tokens += progress.token_ids
        self.pieces.append(progress)


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy parameters; end of text is an ordinary token unless asked for."""
    return SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **options})


def serve(
    scheduler: Scheduler,
    requests: Sequence[Request],
    *,
    arrivals: Mapping[int, Sequence[Request]] | None = None,
    after_step: Callable[[Scheduler, dict[str, Answer]], None] | None = None,
) -> dict[str, Answer]:
    """Runs `requests`, and those of `arrivals` from their step on, until nothing is left."""
    answers: dict[str, Answer] = {}
    pending = {step: list(each) for step, each in (arrivals or {}).items()}
    for request in requests:
        answers[request.id] = Answer()
        scheduler.submit(request)
    step = 0
    while scheduler.has_work or pending:
        for request in pending.pop(step, ()):
            answers[request.id] = Answer()
            scheduler.submit(request)
        for progress in scheduler.step():
            answers[progress.request_id].add(progress)
        if after_step is not None:
            after_step(scheduler, answers)
        step += 1
        assert step < 10_000
    assert_clean(scheduler)
    return answers


def assert_clean(scheduler: Scheduler) -> None:
    """Every slot and page is back."""
    assert scheduler.running == 0
    assert scheduler.waiting == 0
    assert scheduler.slots.free_slots == scheduler.limits.max_batch_size
    assert scheduler.page_table.free_pages == scheduler.page_table.pages
    assert not scheduler.page_table.full.any()


class Oracle:
    """Same weights, one request, one token a step, no drafts: answers and the state after every token, kept."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self.loaded = loaded
        self._answers: dict[tuple[tuple[int, ...], str], list[int]] = {}
        self._states: dict[tuple[int, ...], list[Rows]] = {}

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """The tokens of plain decoding."""
        key = (tuple(prompt), repr(params))
        if key not in self._answers:
            scheduler = Scheduler(self.loaded, RuntimeConfig(max_batch_size=1, draft_length=0))
            self._answers[key] = serve(scheduler, [Request("oracle", prompt, params)])["oracle"].tokens
        return self._answers[key]

    def states(self, sequence: Sequence[int]) -> list[Rows]:
        """Live rows with 0, 1, .. len(sequence)-1 tokens committed, fed one at a time; the last token is the anchor."""
        key = tuple(sequence)
        if key not in self._states:
            self._states[key] = self._feed(key)
        return self._states[key]

    def _feed(self, sequence: Sequence[int]) -> list[Rows]:
        manifest = self.loaded.manifest
        limits = RuntimeConfig(max_batch_size=1).limits(manifest)
        state = State(manifest.state, 2, limits.pages + 1, poison=True)
        table = PageTable(2, limits.pages, limits.pages_per_slot, limits.tokens_per_page)
        slots, sampling = Slots(2), SamplingSlots(2, limits.vocab_size)
        make = draft_method(manifest.speculative.method)
        draft = make(self.loaded.engines, state, manifest.speculative.draft_len)
        prefill = Prefill(self.loaded.engines["target"], draft, state, table, slots, sampling, limits, EngineCounters())
        slot = slots.take(depth=0)
        table.reserve(slot, len(sequence))
        seen = [state.live_rows(slot, 0, table.full)]
        for position in range(len(sequence) - 1):
            prefill.run([Chunk(slot, sequence, position, position + 1)])
            seen.append(state.live_rows(slot, position + 1, table.full))
        return seen


def assert_same_rows(found: Rows, expected: Rows) -> None:
    """Bit for bit, tensor by tensor; nothing live is NaN."""
    assert found.keys() == expected.keys()
    for name, rows in found.items():
        np.testing.assert_array_equal(rows, expected[name], err_msg=name)
        assert not np.isnan(rows).any(), name


class WatchedDraft:
    """The engine's own draft, with `proposed` called after every proposal."""

    def __init__(self, loaded: LoadedEngine, state: State, draft_length: int) -> None:
        self.real: DraftMethod = draft_method(loaded.manifest.speculative.method)(loaded.engines, state, draft_length)

    @property
    def block_length(self) -> int:
        return self.real.block_length

    def bind_propose(self, block: DraftBlock, page_table: Ints) -> Enqueue:
        real = self.real.bind_propose(block, page_table)

        def propose() -> None:
            real()
            self.proposed(block)

        return propose

    def bind_observe(self, step: FlatStep, page_table: Ints) -> Enqueue:
        return self.real.bind_observe(step, page_table)

    def proposed(self, block: DraftBlock) -> None:
        """What a watch does with a block."""


def watching(loaded: LoadedEngine, proposed: Callable[[DraftBlock], None]) -> DraftFactory:
    """Makes the engine's own draft, and calls `proposed` with what it says."""

    class Watching(WatchedDraft):
        def proposed(self, block: DraftBlock) -> None:
            proposed(block)

    return lambda engines, state, draft_length: Watching(loaded, state, draft_length)


@dataclass
class Proposals:
    """What a draft proposed, by slot and the anchor's position: its anchor, tokens [G], logits [G, V], confidence [G],
    and what it was given, noise [G, V] and inverse_temperature."""

    blocks: dict[tuple[int, int], Rows] = field(default_factory=dict)

    def note(self, block: DraftBlock) -> None:
        """Keeps the rows of requests; those of the scratch slot mean nothing."""
        names = ("anchor", "tokens", "logits", "confidence", "noise", "inverse_temperature")
        for row, (slot, position) in enumerate(zip(block.slot.tolist(), block.position.tolist(), strict=True)):
            if slot:
                self.blocks[slot, position] = {name: getattr(block, name)[row].copy() for name in names}

    def of(self, slot: int) -> dict[int, Rows]:
        """The blocks of a slot, by position."""
        return {position: rows for (owner, position), rows in self.blocks.items() if owner == slot}


def assert_same_proposals(found: Mapping[int, Rows], expected: Mapping[int, Rows], limit: int) -> None:
    """The same blocks at the same positions, to the bit, as far as drafts are verified in a sequence of `limit` tokens:
    the last one stands at limit - 2. What a draft says behind that reaches nobody."""
    assert found.keys() == expected.keys()
    for position, rows in found.items():
        wanted = max(0, limit - 2 - position)
        assert rows["anchor"] == expected[position]["anchor"]
        for name in ("tokens", "logits", "confidence"):
            ours, theirs = rows[name][:wanted], expected[position][name][:wanted]
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{name} at {position}")
            assert not np.isnan(ours).any(), f"{name} at {position}"


class ForcedDraft(WatchedDraft):
    """Observes as the real draft does, and proposes what `right` says, wrong from draft `wrong_at` on.

    `right(slot, position)` are the tokens that follow the anchor at `position`; `wrong_at(round)` is the offset of the
    first wrong draft of the so many-th proposal (the block's length: all right).
    """

    def __init__(
        self,
        loaded: LoadedEngine,
        state: State,
        draft_length: int,
        right: Callable[[int, int], Sequence[int]],
        wrong_at: Callable[[int], int],
    ) -> None:
        super().__init__(loaded, state, draft_length)
        self.right = right
        self.wrong_at = wrong_at
        self.rounds = 0

    def proposed(self, block: DraftBlock) -> None:
        vocab = block.noise.shape[2]
        for row, (slot, position) in enumerate(zip(block.slot.tolist(), block.position.tolist(), strict=True)):
            if slot:
                tokens = [*self.right(slot, position), *[0] * self.block_length][: self.block_length]
                wrong = self.wrong_at(self.rounds + row)
                block.tokens[row] = [(token + (k >= wrong)) % vocab for k, token in enumerate(tokens)]
        self.rounds += 1


def forced_scheduler(
    loaded: LoadedEngine,
    config: RuntimeConfig,
    sequences: Mapping[str, Sequence[int]],
    wrong_at: Callable[[int], int],
) -> Scheduler:
    """A scheduler whose drafts know `sequences`: by request id, prompt and right answer."""
    scheduler: Scheduler

    def right(slot: int, position: int) -> Sequence[int]:
        owner = next(name for name in sequences if scheduler.slot_of(name) == slot)
        return sequences[owner][position + 1 :]

    def make(engines: Mapping[str, Engine], state: State, draft_length: int) -> ForcedDraft:
        return ForcedDraft(loaded, state, draft_length, right, wrong_at)

    scheduler = Scheduler(loaded, config, draft=make, poison=True)
    return scheduler
