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

    def bind_propose(self, block: DraftBlock) -> Enqueue:
        """What fills `block` when called."""

    def bind_observe(self, step: FlatStep) -> Enqueue:
        """What absorbs the committed rows of `step` when called: taps, next_ids, positions; others carry slot 0."""


class NoDraft:
    """Plain decoding."""

    block_length = 0

    def __init__(self, engines: Mapping[str, Engine], state: State, draft_length: int) -> None:
        pass

    def bind_propose(self, block: DraftBlock) -> Enqueue:
        """Nothing to do."""
        return _nothing

    def bind_observe(self, step: FlatStep) -> Enqueue:
        """Nothing to learn."""
        return _nothing


class DSpark:
    """One parallel block, then sequential picks with a low-rank bigram bias: a single `propose` step."""

    def __init__(self, engines: Mapping[str, Engine], state: State, draft_length: int) -> None:
        self.block_length = draft_length
        self._propose = _step(engines, "propose")
        self._observe = _step(engines, "observe")
        self._context = state.bindings()

    def bind_propose(self, block: DraftBlock) -> Enqueue:
        """The draft block behind the anchors, over the context that was observed."""
        return bind(self._propose, {**self._context, **block.arrays()}).enqueue

    def bind_observe(self, step: FlatStep) -> Enqueue:
        """Context rows of every committed token, from the target's hidden rows."""
        arrays: dict[str, NDArray[np.generic]] = {
            "taps": step.taps,
            "next_ids": step.next_ids,
            "positions": step.positions,
            "slots": step.slots,
            "row_start": step.row_start,
        }
        return bind(self._observe, {**self._context, **arrays}).enqueue


DraftFactory = Callable[[Mapping[str, Engine], State, int], DraftMethod]

DRAFT_METHODS: dict[str, DraftFactory] = {
    "none": NoDraft,
    "dspark": DSpark,
}


def draft_method(name: str) -> DraftFactory:
    """What makes the method an engine directory names from its engines, the state and the length of a block."""
    if name not in DRAFT_METHODS:
        raise EngineError(
            f"the engine's draft method is {name!r}; this runtime knows {', '.join(sorted(DRAFT_METHODS))}. Install "
            "the version of twostroke that built the engine, or rebuild it"
        )
    return DRAFT_METHODS[name]


def _step(engines: Mapping[str, Engine], name: str) -> Engine:
    if name not in engines:
        raise EngineError(f"the engine has no step {name!r} ({', '.join(sorted(engines))} found); rebuild it")
    return engines[name]


def _nothing() -> None:
    pass
