"""The host's side of a flat step: the arrays a target step and the `observe` after it are bound to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twostroke.engines.base import BoundStep, Buffer, Engine
from twostroke.engines.errors import EngineError
from twostroke.runtime.buckets import StepShape

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class FlatStep:
    """One target step of N tokens, R requests, M logit rows.

    token_ids, positions, slots i32 [N]; row_start i32 [R+1]; request_slot i32 [R]; logit_rows i32 [M];
    logits f32 [M, V]; taps f32 [N, W]; next_ids i32 [N]: for `observe`, the token after each row's.
    """

    token_ids: Ints
    positions: Ints
    slots: Ints
    row_start: Ints
    request_slot: Ints
    logit_rows: Ints
    logits: Floats
    taps: Floats
    next_ids: Ints

    @classmethod
    def allocate(cls, shape: StepShape, vocab_size: int, taps_width: int) -> FlatStep:
        """Zeroed arrays: every row is padding."""
        return cls(
            token_ids=np.zeros(shape.tokens, np.int32),
            positions=np.zeros(shape.tokens, np.int32),
            slots=np.zeros(shape.tokens, np.int32),
            row_start=np.zeros(shape.requests + 1, np.int32),
            request_slot=np.zeros(shape.requests, np.int32),
            logit_rows=np.zeros(shape.logit_rows, np.int32),
            logits=np.zeros((shape.logit_rows, vocab_size), np.float32),
            taps=np.zeros((shape.tokens, taps_width), np.float32),
            next_ids=np.zeros(shape.tokens, np.int32),
        )

    def narrow(self, shape: StepShape) -> FlatStep:
        """The leading part of the same memory, for a smaller shape."""
        return FlatStep(
            token_ids=self.token_ids[: shape.tokens],
            positions=self.positions[: shape.tokens],
            slots=self.slots[: shape.tokens],
            row_start=self.row_start[: shape.requests + 1],
            request_slot=self.request_slot[: shape.requests],
            logit_rows=self.logit_rows[: shape.logit_rows],
            logits=self.logits[: shape.logit_rows],
            taps=self.taps[: shape.tokens],
            next_ids=self.next_ids[: shape.tokens],
        )

    def bind_target(self, target: Engine, state: Mapping[str, NDArray[np.generic]], page_table: Ints) -> BoundStep:
        """The target step on these arrays, `state` and `page_table` [S, P]."""
        return bind(
            target,
            {
                **state,
                "token_ids": self.token_ids,
                "positions": self.positions,
                "slots": self.slots,
                "row_start": self.row_start,
                "request_slot": self.request_slot,
                "page_table": page_table,
                "logit_rows": self.logit_rows,
                "logits": self.logits,
                "taps": self.taps,
            },
        )

    def clear(self) -> None:
        """Every row is padding again, whatever another shape left here: token 0 at position 0 of the scratch slot."""
        for array in (self.token_ids, self.positions, self.slots, self.request_slot, self.next_ids):
            array.fill(0)


def bind(engine: Engine, arrays: Mapping[str, NDArray[np.generic]]) -> BoundStep:
    """`engine` on numpy memory; arrays under names that the step does not have are left out."""
    if not engine.in_place and any(binding.role == "state" for binding in engine.bindings.values()):
        raise EngineError(
            f"step {engine.step.name} of engine {engine.step.engine} cannot update its state in place, and this "
            "runtime keeps one copy of it; build the step for another engine"
        )
    return engine.bind({name: Buffer.of(array) for name, array in arrays.items() if name in engine.bindings})
