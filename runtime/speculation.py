"""Draft methods: where the tokens of a block come from, and what a method learns from committed ones.

`propose` and `observe` are bound once per shape and then only run; what they read and write are the arrays of a
`DraftBlock` and a `FlatStep`. A new method is one class and one line in `DRAFT_METHODS`; nothing else knows which one
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twostroke.engines.base import Engine
from twostroke.engines.errors import EngineError
from twostroke.runtime.flat_step import FlatStep, Floats, Ints, bind
from twostroke.runtime.state import State

Enqueue = Callable[[], None]


@dataclass(frozen=True)
class DraftBlock:
    """What `propose` reads and writes for R requests (padding is slot 0).

    Reads anchor, position, slot i32 [R]; valid_from i32 [S]; inverse_temperature f32 [R]; noise f32 [R, G, V].
    Writes tokens i32 [R, G] with ids in [0, V), logits f32 [R, G, V], confidence f32 [R, G].
    """

    anchor: Ints
    position: Ints
    slot: Ints
    valid_from: Ints
    inverse_temperature: Floats
    noise: Floats
    tokens: Ints
    logits: Floats
    confidence: Floats

    @classmethod
    def allocate(cls, requests: int, draft_length: int, vocab_size: int, valid_from: Ints) -> DraftBlock:
        """Zeroed arrays for `requests` requests; `valid_from` is shared with the slots."""
        return cls(
            anchor=np.zeros(requests, np.int32),
            position=np.zeros(requests, np.int32),
            slot=np.zeros(requests, np.int32),
            valid_from=valid_from,
            inverse_temperature=np.ones(requests, np.float32),
            noise=np.zeros((requests, draft_length, vocab_size), np.float32),
            tokens=np.zeros((requests, draft_length), np.int32),
            logits=np.zeros((requests, draft_length, vocab_size), np.float32),
            confidence=np.zeros((requests, draft_length), np.float32),
        )

    def narrow(self, requests: int) -> DraftBlock:
        """The leading requests of the same memory."""
        return DraftBlock(
            anchor=self.anchor[:requests],
            position=self.position[:requests],
            slot=self.slot[:requests],
            valid_from=self.valid_from,
            inverse_temperature=self.inverse_temperature[:requests],
            noise=self.noise[:requests],
            tokens=self.tokens[:requests],
            logits=self.logits[:requests],
            confidence=self.confidence[:requests],
        )

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """By the names steps use."""
        return {
            "anchor": self.anchor,
            "position": self.position,
            "slot": self.slot,
            "valid_from": self.valid_from,
            "inverse_temperature": self.inverse_temperature,
            "noise": self.noise,
            "tokens": self.tokens,
            "logits": self.logits,
            "confidence": self.confidence,
        }


class DraftMethod(Protocol):
    """A way to draft. `block_length` is G, the tokens of a full block; 0 means that there is nothing to propose."""

    @property
    def block_length(self) -> int:
        """G."""

    def bind_propose(self, block: DraftBlock, page_table: Ints) -> Enqueue:
        """What fills `block` when called. page_table i32 [S, P] covers every token that will be verified."""

    def bind_observe(self, step: FlatStep, page_table: Ints) -> Enqueue:
        """What absorbs the committed rows of `step` when called: taps, next_ids, positions; others carry slot 0."""


class NoDraft:
    """Plain decoding."""

    block_length = 0

    def __init__(self, engines: Mapping[str, Engine], state: State, draft_length: int) -> None:
        pass

    def bind_propose(self, block: DraftBlock, page_table: Ints) -> Enqueue:
        """Nothing to do."""
        return _nothing

    def bind_observe(self, step: FlatStep, page_table: Ints) -> Enqueue:
        """Nothing to learn."""
        return _nothing


class DSpark:
    """One parallel block, then sequential picks with a low-rank bigram bias: a single `propose` step, which drafts the
    full block it was trained for, however few tokens of it are wanted."""

    def __init__(self, engines: Mapping[str, Engine], state: State, draft_length: int) -> None:
        self._propose = _step(engines, "propose")
        self.block_length = int(self._propose.bindings["tokens"].shape[1])
        self._observe = _step(engines, "observe")
        self._context = state.bindings()

    def bind_propose(self, block: DraftBlock, page_table: Ints) -> Enqueue:
        """The draft block behind the anchors, over the context that was observed."""
        return bind(self._propose, {**self._context, **block.arrays()}).enqueue

    def bind_observe(self, step: FlatStep, page_table: Ints) -> Enqueue:
        """Context rows of every committed token, from the target's hidden rows."""
        return bind(self._observe, {**self._context, **_committed(step)}).enqueue


class Mtp:
    """One row at a time: `pick` takes a token from the hidden a slot keeps, `next` computes the hidden after it.

    `observe` keeps the hidden of the last committed token. A block of G tokens is pick, then next and pick G-1 times,
    over one row a request and one of scratch: matrix kernels round a lone row differently. The row of x_k stands at
    position P+k-1, that of the hidden it is paired with.
    """

    def __init__(self, engines: Mapping[str, Engine], state: State, draft_length: int) -> None:
        self.block_length = draft_length
        self._pick = _step(engines, "pick")
        self._next = _step(engines, "next")
        self._observe = _step(engines, "observe")
        self._memory = state.bindings()
        self._chains: dict[tuple[int, int], _Chain] = {}

    def bind_propose(self, block: DraftBlock, page_table: Ints) -> Enqueue:
        """The chain behind the anchors, from the hidden that was observed."""
        requests, _, vocab_size = block.noise.shape
        shape = requests, page_table.shape[1]
        if shape not in self._chains:
            rows = ChainRows.allocate(requests + 1, vocab_size)
            arrays = {**self._memory, **rows.arrays(), "page_table": page_table}
            self._chains[shape] = _Chain(rows, bind(self._pick, arrays).enqueue, bind(self._next, arrays).enqueue)
        chain = self._chains[shape]
        return lambda: chain.draft(block)

    def bind_observe(self, step: FlatStep, page_table: Ints) -> Enqueue:
        """Draft rows of every committed token and the token after it."""
        return bind(self._observe, {**self._memory, **_committed(step), "page_table": page_table}).enqueue


@dataclass(frozen=True)
class ChainRows:
    """What `pick` and `next` read and write, one row a request and scratch rows behind them.

    slots, positions i32 [N]; row_start i32 [N], row N-1 being padding; inverse_temperature f32 [N]; noise, logits
    f32 [N, V]; confidence f32 [N]; tokens i32 [N], picked by `pick` and the `token_ids` of `next`.
    """

    slots: Ints
    positions: Ints
    row_start: Ints
    inverse_temperature: Floats
    noise: Floats
    tokens: Ints
    logits: Floats
    confidence: Floats

    @classmethod
    def allocate(cls, rows: int, vocab_size: int) -> ChainRows:
        """Every row scratch."""
        return cls(
            slots=np.zeros(rows, np.int32),
            positions=np.zeros(rows, np.int32),
            row_start=np.arange(rows, dtype=np.int32),
            inverse_temperature=np.ones(rows, np.float32),
            noise=np.zeros((rows, vocab_size), np.float32),
            tokens=np.zeros(rows, np.int32),
            logits=np.zeros((rows, vocab_size), np.float32),
            confidence=np.zeros(rows, np.float32),
        )

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """By the names steps use."""
        return {**vars(self), "token_ids": self.tokens}


@dataclass(frozen=True)
class _Chain:
    """The steps of a proposal, bound to their rows."""

    rows: ChainRows
    pick: Enqueue
    next: Enqueue

    def draft(self, block: DraftBlock) -> None:
        """Fills `block`, column by column."""
        rows, requests = self.rows, len(block.slot)
        rows.slots[:requests] = block.slot
        rows.positions[:requests] = block.position
        rows.positions[:requests] -= 1
        rows.inverse_temperature[:requests] = block.inverse_temperature
        for k in range(block.tokens.shape[1]):
            if k:
                rows.positions[:requests] += 1
                self.next()
            rows.noise[:requests] = block.noise[:, k]
            self.pick()
            block.tokens[:, k] = rows.tokens[:requests]
            block.logits[:, k] = rows.logits[:requests]
            block.confidence[:, k] = rows.confidence[:requests]


DraftFactory = Callable[[Mapping[str, Engine], State, int], DraftMethod]

DRAFT_METHODS: dict[str, DraftFactory] = {
    "none": NoDraft,
    "dspark": DSpark,
    "mtp": Mtp,
}


def draft_method(name: str) -> DraftFactory:
    """What makes the method an engine directory names, from its engines, the state and the tokens wanted a block."""
    if name not in DRAFT_METHODS:
        raise EngineError(
            f"the engine's draft method is {name!r}; this runtime knows {', '.join(sorted(DRAFT_METHODS))}. Install "
            "the version of twostroke that built the engine, or rebuild it"
        )
    return DRAFT_METHODS[name]


def _committed(step: FlatStep) -> dict[str, NDArray[np.generic]]:
    """What `observe` reads of a step, by the names steps use."""
    return {
        "taps": step.taps,
        "next_ids": step.next_ids,
        "positions": step.positions,
        "slots": step.slots,
        "row_start": step.row_start,
    }


def _step(engines: Mapping[str, Engine], name: str) -> Engine:
    if name not in engines:
        raise EngineError(f"the engine has no step {name!r} ({', '.join(sorted(engines))} found); rebuild it")
    return engines[name]


def _nothing() -> None:
    pass
