"""A watch on the call boundary: the real engines, with every input of every call checked before the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from twostroke.engines.base import BoundStep, Buffer, Engine
from twostroke.engines.loading import LoadedEngine
from twostroke.engines.manifest import SCRATCH_PAGE, SCRATCH_SLOT, Binding, BuildConfig

Arrays = Mapping[str, np.ndarray]


def guarded(loaded: LoadedEngine) -> LoadedEngine:
    """`loaded` with an assertion at every call."""
    after: dict[tuple[int, int], int] = {}
    engines = {
        name: GuardedEngine(name, engine, loaded.manifest.build_config, after)
        for name, engine in loaded.engines.items()
    }
    return dataclasses.replace(loaded, engines=engines)


class GuardedEngine:
    """One engine behind its guard. `after`: by (slot, position), the token the target was last given there."""

    def __init__(self, name: str, engine: Engine, build: BuildConfig, after: dict[tuple[int, int], int]) -> None:
        self.step = engine.step
        self.in_place = engine.in_place
        self._name = name
        self._engine = engine
        self._build = build
        self._after = after

    @property
    def bindings(self) -> Mapping[str, Binding]:
        return self._engine.bindings

    def bind(self, buffers: Mapping[str, Buffer]) -> BoundStep:
        arrays = {name: buffer.owner for name, buffer in buffers.items()}
        return GuardedStep(self._name, self._engine.bind(buffers), arrays, self._build, self._after)


class GuardedStep:
    def __init__(
        self, name: str, step: BoundStep, arrays: Arrays, build: BuildConfig, after: dict[tuple[int, int], int]
    ) -> None:
        self._step = step
        self._arrays = arrays
        self._build = build
        self._after = after
        checks = {
            "target": self._target,
            "observe": self._observe,
            "propose": self._propose,
            "pick": self._pick,
            "next": self._next,
        }
        self._check = checks[name]

    def enqueue(self, stream: int = 0) -> None:
        self._check(self._arrays)
        self._step.enqueue(stream)

    def _target(self, given: Arrays) -> None:
        self._rows(given)
        token_ids, slots, positions = given["token_ids"], given["slots"], given["positions"]
        assert_within(token_ids, self._build.vocab_size)
        assert_within(given["logit_rows"], len(token_ids))
        assert len(given["logit_rows"]) == len(given["logits"]) >= 2
        assert len(given["row_start"]) == len(given["request_slot"]) + 1
        for request, slot in enumerate(given["request_slot"]):
            rows = slots[given["row_start"][request] : given["row_start"][request + 1]]
            assert set(rows.tolist()) <= {int(slot), SCRATCH_SLOT}
        real = slots != SCRATCH_SLOT
        columns = positions[real] // self._build.tokens_per_page
        assert_within(columns, given["page_table"].shape[1])
        assert (given["page_table"][slots[real], columns] != SCRATCH_PAGE).all()
        for slot, position, token in zip(slots[real], positions[real], token_ids[real], strict=True):
            self._after[int(slot), int(position)] = int(token)

    def _observe(self, given: Arrays) -> None:
        self._rows(given)
        next_ids, slots, positions = given["next_ids"], given["slots"], given["positions"]
        assert_within(next_ids, self._build.vocab_size)
        for row in np.flatnonzero(slots != SCRATCH_SLOT):
            if row + 1 < len(slots) and slots[row + 1] == slots[row]:
                assert next_ids[row] == self._after[int(slots[row]), int(positions[row]) + 1]

    def _propose(self, given: Arrays) -> None:
        requests = len(given["slot"])
        assert requests >= 1
        assert all(
            len(given[name]) == requests for name in ("anchor", "position", "inverse_temperature", "noise", "tokens")
        )
        assert_within(given["anchor"], self._build.vocab_size)
        assert_within(given["slot"], len(given["valid_from"]))
        # The anchor stands below the limit, and a block is only drafted where a token may still follow it.
        assert_within(given["position"], self._build.max_seq_len - 1)

    def _pick(self, given: Arrays) -> None:
        assert len(given["slots"]) == len(given["tokens"]) == len(given["noise"]) == len(given["logits"]) >= 2
        real = given["slots"][given["slots"] != SCRATCH_SLOT]
        assert len(set(real.tolist())) == len(real)
        assert given["slots"][-1] == SCRATCH_SLOT

    def _next(self, given: Arrays) -> None:
        """One row a request, for a token that stands behind the anchor; the last row is padding."""
        slots, positions, row_start = given["slots"], given["positions"], given["row_start"]
        assert len(slots) == len(positions) == len(given["token_ids"]) == len(row_start) >= 2
        assert row_start.tolist() == list(range(len(slots)))
        assert slots[-1] == SCRATCH_SLOT
        assert_within(given["token_ids"], self._build.vocab_size)
        real = slots != SCRATCH_SLOT
        assert len(set(slots[real].tolist())) == real.sum()
        for slot, position in zip(slots[real].tolist(), positions[real].tolist(), strict=True):
            assert (slot, position - 1) in self._after, "the row before it was fed, or drafted"
            self._after.setdefault((slot, position), -1)

    def _rows(self, given: Arrays) -> None:
        """Rows of a request: real ones first, of one slot, ascending by one; the others are scratch at position 0."""
        slots, positions, row_start = given["slots"], given["positions"], given["row_start"]
        assert len(slots) == len(positions) >= 2
        assert row_start[0] == 0
        assert (np.diff(row_start) >= 0).all()
        assert row_start[-1] <= len(slots)
        assert_within(positions, self._build.max_seq_len - 1)  # the last token allowed is delivered, never fed
        seen: list[int] = []
        for request in range(len(row_start) - 1):
            part = slice(row_start[request], row_start[request + 1])
            real = int((slots[part] != SCRATCH_SLOT).sum())
            assert len(set(slots[part][:real].tolist())) <= 1
            assert (slots[part][real:] == SCRATCH_SLOT).all()
            assert (np.diff(positions[part][:real]) == 1).all()
            assert (positions[part][real:] == 0).all()
            seen += slots[part][:1].tolist() if real else []
        assert len(seen) == len(set(seen))
        assert (slots[row_start[-1] :] == SCRATCH_SLOT).all()


def assert_within(values: np.ndarray, size: int) -> None:
    """Every value is an index below `size`."""
    assert values.size == 0 or (values.min() >= 0 and values.max() < size)
