"""One speculative iteration: propose, verify, accept, observe, publish.

On a GPU each (bucket, rows) of it is captured and replayed; on the CPU the same object runs the same steps on the same
buffers. It reads and moves forward the per-slot arrays by itself and leaves its results in a ring, so that the host may
launch the next one before it has read this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from twostroke.engines.base import Engine
from twostroke.engines.manifest import SCRATCH_SLOT
from twostroke.plugins.accept import Acceptor, SamplingSlots
from twostroke.runtime.buckets import choose_bucket, iteration_shape
from twostroke.runtime.counters import EngineCounters
from twostroke.runtime.flat_step import FlatStep, Floats, Ints
from twostroke.runtime.page_table import PageTable
from twostroke.runtime.runtime_config import Limits
from twostroke.runtime.slots import Slots
from twostroke.runtime.speculation import DraftBlock, DraftMethod, Enqueue
from twostroke.runtime.state import State

Bools = NDArray[np.bool_]


@dataclass
class Results:
    """What one iteration brought, one entry a request of its batch; valid until the ring comes round.

    slot, generation i32 [R]; tokens i32 [R, T], the first count[r] of them new; drafted, accepted i32 [R]: drafts
    verified and kept; done bool [R]; reason i8 [R] (`FinishReason`). A request that was done before has count 0.
    `logits` f32 [R, T, V] as the target gave them, or None where no slot asked.
    """

    slot: Ints
    generation: Ints
    tokens: Ints
    count: Ints
    drafted: Ints
    accepted: Ints
    done: Bools
    reason: NDArray[np.int8]
    requests: int = 0
    logits: Floats | None = None

    @classmethod
    def allocate(cls, requests: int, rows: int) -> Results:
        """An empty entry with room for `requests` requests of `rows` rows."""
        return cls(
            slot=np.zeros(requests, np.int32),
            generation=np.zeros(requests, np.int32),
            tokens=np.zeros((requests, rows), np.int32),
            count=np.zeros(requests, np.int32),
            drafted=np.zeros(requests, np.int32),
            accepted=np.zeros(requests, np.int32),
            done=np.zeros(requests, np.bool_),
            reason=np.zeros(requests, np.int8),
        )


@dataclass(frozen=True)
class _Frame:
    """The buffers and bound steps of one (bucket, rows per request, page tier)."""

    name: str
    bucket: int
    rows: int
    step: FlatStep
    block: DraftBlock
    tokens: Ints
    propose: Enqueue
    verify: Enqueue
    observe: Enqueue
    column: Ints = field(repr=False)

    def by_request(self, flat: Ints) -> Ints:
        """A flat i32 [N] array as [bucket, T], its padding left out."""
        return flat[: self.bucket * self.rows].reshape(self.bucket, self.rows)


class Iteration:
    """Runs iterations over any slots, up to `max_batch_size` at a time. Shapes are bound on first use, then kept."""

    def __init__(
        self,
        target: Engine,
        draft: DraftMethod,
        state: State,
        page_table: PageTable,
        slots: Slots,
        sampling: SamplingSlots,
        limits: Limits,
        counters: EngineCounters,
    ) -> None:
        requests, rows = limits.max_batch_size, limits.rows
        widest = iteration_shape(requests, rows)
        taps = target.bindings.get("taps")
        self._target = target
        self._draft = draft
        self._state = state
        self._page_table = page_table
        self._slots = slots
        self._sampling = sampling
        self._limits = limits
        self._counters = counters
        self._acceptor = Acceptor(requests, limits.draft_length, limits.vocab_size)
        self._step = FlatStep.allocate(widest, limits.vocab_size, 0 if taps is None else int(taps.shape[1]))
        self._block = DraftBlock.allocate(requests, draft.block_length, limits.vocab_size, slots.valid_from)
        self._frames: dict[tuple[int, int, int], _Frame] = {}
        self._tier = 0
        # Row-wise scratch, all [R]: the slots as asked for, and what the device part works on.
        self._owner = np.zeros(requests, np.int32)
        self._slot = np.zeros(requests, np.int32)
        self._position = np.zeros(requests, np.int32)
        self._length = np.zeros(requests, np.int32)
        self._count = np.zeros(requests, np.int32)
        self._accepted = np.zeros(requests, np.int32)
        self._was_done = np.zeros(requests, np.bool_)
        self._done = np.zeros(requests, np.bool_)
        self._reason = np.zeros(requests, np.int8)
        self._tokens = np.zeros(requests * rows, np.int32)
        self._sure = np.zeros((requests, limits.draft_length), np.bool_)
        self._ring = [Results.allocate(requests, rows) for _ in range(limits.lag + 2)]
        self._launched = 0
        self._collected = 0

    @property
    def in_flight(self) -> int:
        """Iterations launched and not collected."""
        return self._launched - self._collected

    def launch(self, slots: Sequence[int], reach: int, keep_logits: bool = False) -> None:
        """One iteration over `slots`, each named once. No token of it may stand at position `reach` or beyond.

        Slots that are done by now are carried along as scratch. `keep_logits` copies the judged rows out.
        """
        if self.in_flight == len(self._ring):
            raise ValueError(f"{self.in_flight} iterations are in flight and none was collected")
        rows = self._limits.rows if any(self._slots.depth[slot] for slot in slots) else 1
        frame = self._frame(len(slots), rows, self._page_table.tier(reach))
        results = self._ring[self._launched % len(self._ring)]

        self._load(frame, slots)
        if frame.rows > 1:
            self._propose(frame, len(slots))
        self._verify(frame)
        results.logits = self._judged_rows(frame, len(slots)) if keep_logits else None
        self._accept(frame, len(slots))
        self._observe(frame, len(slots))
        self._publish(frame, len(slots), results)
        self._count_replay(frame, len(slots))

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Prepares every bucket, the largest first, and runs each once on scratch alone: what a first request would
        otherwise wait for. Longer sequences bind wider page tiers when they get there."""
        rows_of = sorted({self._limits.rows, 1}, reverse=True)
        shapes = [(bucket, rows) for bucket in reversed(self._limits.buckets) for rows in rows_of]
        for done, (bucket, rows) in enumerate(shapes):
            progress(done, len(shapes))
            frame = self._frame(bucket, rows, self._page_table.tier(1))
            self._load(frame, ())
            if rows > 1:
                self._propose(frame, 0)
            self._verify(frame)
            self._observe(frame, 0)
        progress(len(shapes), len(shapes))

    def collect(self) -> Results:
        """The oldest results not collected yet."""
        if not self.in_flight:
            raise ValueError("no iteration is in flight")
        results = self._ring[self._collected % len(self._ring)]
        self._collected += 1
        return results

    def _load(self, frame: _Frame, slots: Sequence[int]) -> None:
        """Where each request stands, and how many drafts it may verify: no row reaches its limit."""
        requests = len(slots)
        self._owner.fill(SCRATCH_SLOT)
        for request, slot in enumerate(slots):
            self._owner[request] = slot
        np.take(self._slots.done, self._owner, out=self._was_done, mode="clip")
        self._was_done[requests:] = True
        np.copyto(self._slot, self._owner)
        np.copyto(self._slot, SCRATCH_SLOT, where=self._was_done)
        np.take(self._slots.position, self._slot, out=self._position, mode="clip")
        # The last token of a request is delivered and never fed: it stands at limit-1, drafts at limit-2 at most.
        np.take(self._sampling.limit, self._slot, out=self._length, mode="clip")
        np.subtract(self._length, self._position, out=self._length)
        np.subtract(self._length, 2, out=self._length)
        np.minimum(self._length, self._slots.depth[self._slot], out=self._length)
        np.clip(self._length, 0, frame.rows - 1, out=self._length)
        np.copyto(self._length, 0, where=self._was_done)
        block, bucket = frame.block, frame.bucket
        block.slot[:] = self._slot[:bucket]
        block.position[:] = self._position[:bucket]
        np.take(self._slots.anchor, block.slot, out=block.anchor, mode="clip")

    def _propose(self, frame: _Frame, requests: int) -> None:
        """x_1..x_G behind every anchor; doubtful ones and what follows them will not be verified."""
        block = frame.block
        self._acceptor.draft_noise(
            self._slot[:requests],
            self._position[:requests],
            self._sampling,
            block.noise[:requests],
            block.inverse_temperature[:requests],
        )
        frame.propose()
        if self._limits.confidence_threshold > 0:
            sure = self._sure[:requests, : frame.rows - 1]
            np.greater_equal(block.confidence[:requests, : frame.rows - 1], self._limits.confidence_threshold, out=sure)
            np.logical_and.accumulate(sure, axis=1, out=sure)
            np.minimum(self._length[:requests], sure.sum(axis=1), out=self._length[:requests], casting="same_kind")
        self._counters.draft_rounds += 1

    def _verify(self, frame: _Frame) -> None:
        """The target on [x_0, x_1, .., x_length] of every request, x_0 the anchor; further rows are scratch."""
        step, bucket = frame.step, frame.bucket
        step.clear()
        token_ids, positions, slots = (frame.by_request(flat) for flat in (step.token_ids, step.positions, step.slots))
        token_ids[:, 0] = frame.block.anchor[:bucket]
        token_ids[:, 1:] = frame.block.tokens[:bucket, : frame.rows - 1]
        positions[:] = self._position[:bucket, None]
        positions += frame.column
        slots[:] = self._slot[:bucket, None]
        step.request_slot[:] = self._slot[:bucket]
        self._to_scratch(frame, frame.column > self._length[:bucket, None])
        frame.verify()

    def _accept(self, frame: _Frame, requests: int) -> None:
        """What the target keeps of each block, cut where the text ends."""
        drafts = frame.rows - 1
        slot, position = self._slot[:requests], self._position[:requests]
        count = self._count[:requests]
        self._acceptor.accept(
            self._logits(frame, requests),
            frame.block.tokens[:requests, :drafts],
            frame.block.logits[:requests, :drafts],
            self._length[:requests],
            slot,
            position,
            self._sampling,
            tokens_out=frame.tokens[:requests],
            count_out=count,
            accepted_out=self._accepted[:requests],
        )
        self._acceptor.finish(
            frame.tokens[:requests],
            count,
            slot,
            position,
            self._sampling,
            done_out=self._done[:requests],
            reason_out=self._reason[:requests],
        )
        np.copyto(count, 0, where=self._was_done[:requests])
        self._count[requests:] = 0
        self._sampling.commit(slot, frame.tokens[:requests], count)

    def _observe(self, frame: _Frame, requests: int) -> None:
        """Every committed row, the anchor's included, and the token that came after it; rejected rows are scratch."""
        next_ids = frame.by_request(frame.step.next_ids)
        next_ids[:requests] = frame.tokens[:requests]
        next_ids[requests:] = 0
        self._to_scratch(frame, frame.column >= self._count[: frame.bucket, None])
        frame.observe()

    def _publish(self, frame: _Frame, requests: int, results: Results) -> None:
        """The slots move on and the host gets its copy."""
        owner, count = self._owner[:requests], self._count[:requests]
        for request in range(requests):
            slot, new = owner[request], count[request]
            if new:
                self._slots.position[slot] += new
                self._slots.anchor[slot] = frame.tokens[request, new - 1]
                self._slots.done[slot] = self._done[request]
        results.requests = requests
        results.slot[:requests] = owner
        np.take(self._slots.generation, owner, out=results.generation[:requests], mode="clip")
        results.tokens[:requests, : frame.rows] = frame.tokens[:requests]
        results.count[:requests] = count
        results.drafted[:requests] = self._length[:requests]
        results.accepted[:requests] = self._accepted[:requests]
        results.done[:requests] = self._done[:requests]
        results.reason[:requests] = self._reason[:requests]
        self._launched += 1

    def _to_scratch(self, frame: _Frame, rows: Bools) -> None:
        """Rows [bucket, T] become padding: token 0 at position 0 of the scratch slot."""
        for flat in (frame.step.token_ids, frame.step.positions, frame.step.slots):
            np.copyto(frame.by_request(flat), 0, where=rows)

    def _logits(self, frame: _Frame, requests: int) -> Floats:
        """The judged rows f32 [requests, T, V], a view."""
        rows = frame.step.logits[: requests * frame.rows]
        return rows.reshape(requests, frame.rows, self._limits.vocab_size)

    def _judged_rows(self, frame: _Frame, requests: int) -> Floats:
        return self._logits(frame, requests).copy()

    def _frame(self, requests: int, rows: int, tier: int) -> _Frame:
        """The prepared shape for a batch; a new one is bound and counted."""
        bucket = choose_bucket(self._limits.buckets, requests)
        if tier != self._tier:
            self._counters.tier_changes += self._tier != 0
            self._tier = tier
        frame = self._frames.get((bucket, rows, tier))
        if frame is None:
            frame = self._frames[bucket, rows, tier] = self._bind(bucket, rows, tier)
            self._counters.bound += 1
        return frame

    def _bind(self, bucket: int, rows: int, tier: int) -> _Frame:
        shape = iteration_shape(bucket, rows)
        step = replace(
            self._step.narrow(shape),
            row_start=np.arange(bucket + 1, dtype=np.int32) * rows,
            logit_rows=np.arange(shape.logit_rows, dtype=np.int32),
        )
        block, page_table = self._block.narrow(bucket), self._page_table.columns(tier)
        return _Frame(
            name=f"{bucket}x{rows}",
            bucket=bucket,
            rows=rows,
            step=step,
            block=block,
            tokens=self._tokens[: bucket * rows].reshape(bucket, rows),
            propose=self._draft.bind_propose(block, page_table),
            verify=step.bind_target(self._target, self._state.bindings(), page_table).enqueue,
            observe=self._draft.bind_observe(step, page_table),
            column=np.arange(rows, dtype=np.int32)[None, :],
        )

    def _count_replay(self, frame: _Frame, requests: int) -> None:
        self._counters.count_replay(frame.name)
        live = int(self._length[:requests].sum()) + requests - int(self._was_done[:requests].sum())
        self._counters.padding_rows += frame.step.token_ids.size - live
