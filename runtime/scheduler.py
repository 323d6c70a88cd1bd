"""Continuous batching: who waits, who is in prefill, who decodes, and what came of it.

One `step` admits, runs one prefill step and one iteration, and reads the results that are due. Pages for the longest
the request can get are reserved at admission, so a running request never waits for a page and nothing can deadlock; a
request that finds none free waits in line, first come, first served.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from twostroke.engines.errors import ConfigError, RequestError
from twostroke.engines.loading import LoadedEngine
from twostroke.engines.manifest import SCRATCH_SLOT
from twostroke.plugins.accept import FinishReason, SamplingSlots
from twostroke.runtime.counters import Acceptance, EngineCounters
from twostroke.runtime.iteration import Iteration, Results
from twostroke.runtime.page_table import PageTable
from twostroke.runtime.prefill import Chunk, FirstToken, Prefill
from twostroke.runtime.request import (
    MAX_STOP_TOKEN_IDS,
    FinishReasonName,
    Progress,
    Request,
    check_prompt,
    check_stops,
    draft_depth,
    token_limit,
)
from twostroke.runtime.runtime_config import Limits, RuntimeConfig
from twostroke.runtime.slots import Slots
from twostroke.runtime.speculation import DraftFactory, NoDraft, draft_method
from twostroke.runtime.state import State

LOGGER = logging.getLogger(__name__)
_NAMES: dict[int, FinishReasonName] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass
class _Entry:
    """A request the scheduler knows. `position` is P as far as results have been read."""

    request: Request
    limit: int
    depth: int
    slot: int = SCRATCH_SLOT
    generation: int = -1
    prefilled: int = 0
    position: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt is in memory."""
        return self.prefilled == len(self.request.prompt_ids)


@dataclass(frozen=True)
class _Ended:
    """A request that ended by itself in the step before."""

    acceptance: Acceptance
    reason: FinishReasonName


class Scheduler:
    """Serves requests on one loaded engine. Not thread-safe: one caller submits, aborts and steps.

    `draft` makes another draft method than the engine's own; `poison` starts with memory full of NaN.
    """

    def __init__(
        self,
        loaded: LoadedEngine,
        config: RuntimeConfig,
        *,
        draft: DraftFactory | None = None,
        poison: bool = False,
    ) -> None:
        manifest = loaded.manifest
        self.limits = limits = config.limits(manifest)
        try:
            self._allocate(loaded, limits, draft, poison)
        except MemoryError as error:
            state = sum(t.bytes_for(limits.slots, limits.pages + 1) for t in manifest.state)
            raise ConfigError(
                f"not enough memory for max_batch_size {limits.max_batch_size}, max_seq_len {limits.max_seq_len} and "
                f"max_num_tokens {limits.max_num_tokens}, whose state alone takes {state:,} bytes ({error}); ask for "
                "less"
            ) from None
        self._entries: dict[str, _Entry] = {}
        self._waiting: deque[_Entry] = deque()
        self._running: dict[int, _Entry] = {}
        self._aborted: list[Progress] = []
        self._ended: dict[str, _Ended] = {}

    def _allocate(self, loaded: LoadedEngine, limits: Limits, draft: DraftFactory | None, poison: bool) -> None:
        """Everything whose size the limits decide."""
        manifest = loaded.manifest
        self.counters = EngineCounters()
        self.state = State(manifest.state, limits.slots, limits.pages + 1, poison=poison)
        self.page_table = PageTable(limits.slots, limits.pages, limits.pages_per_slot, limits.tokens_per_page)
        self.slots = Slots(limits.slots)
        self.sampling = SamplingSlots(limits.slots, limits.vocab_size, len(limits.eos_token_ids) + MAX_STOP_TOKEN_IDS)
        if draft is None:
            draft = draft_method(manifest.speculative.method) if limits.draft_length else NoDraft
        parts = (
            loaded.engines["target"],
            draft(loaded.engines, self.state, limits.draft_length),
            self.state,
            self.page_table,
            self.slots,
            self.sampling,
            limits,
            self.counters,
        )
        self._prefill = Prefill(*parts)
        self._iteration = Iteration(*parts)

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Prepares every iteration shape before the first request; `progress(done, total)`."""
        self._iteration.warm_up(progress)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything left to do or to tell."""
        return bool(self._entries or self._aborted)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    def slot_of(self, request_id: str) -> int | None:
        """Where a running request's memory is; None while it waits and once it is gone."""
        entry = self._entries.get(request_id)
        return None if entry is None or entry.slot == SCRATCH_SLOT else entry.slot

    def submit(self, request: Request) -> None:
        """Queues a request; RequestError says why it can never be served, and then nothing has changed."""
        params, limits = request.params, self.limits
        if request.id in self._entries:
            raise RequestError(f"request id {request.id!r} is in use by an unfinished request", field="request_id")
        check_prompt(request.prompt_ids, limits.vocab_size, limits.max_seq_len)
        check_stops(params, limits.vocab_size)
        entry = _Entry(
            request=request,
            limit=token_limit(len(request.prompt_ids), params.max_tokens, limits.max_seq_len),
            depth=draft_depth(params.speculative, limits.draft_length),
        )
        needed = self.page_table.pages_for(entry.limit)
        if needed > self.page_table.pages:
            raise RequestError(
                f"prompt and max_tokens come to {entry.limit} tokens, {needed} pages, but there are only "
                f"{self.page_table.pages} pages of {limits.tokens_per_page} tokens (kv_pages); ask for fewer tokens",
                field="max_tokens",
            )
        self._check_sampling(entry)
        self._entries[request.id] = entry
        self._waiting.append(entry)

    def abort(self, request_id: str) -> None:
        """Ends a request; its last Progress comes with the next step. One that is not there is none of our business."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            LOGGER.debug("abort of request %r ignored: unknown or finished", request_id)
            return
        if entry.slot == SCRATCH_SLOT:
            self._waiting.remove(entry)
        else:
            self._release(entry)
        self.counters.count_finish("abort")
        self._aborted.append(Progress(request_id, [], entry.acceptance.copy(), "abort"))

    def stop(self, request_id: str, delivered: Acceptance) -> None:
        """The text of a request ended within a Progress of the last step, after what `delivered` counts.

        Whatever came behind it counts no more: tokens, iterations, and another end in the same step.
        """
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._release(entry)
            counted = entry.acceptance
        else:
            ended = self._ended.pop(request_id)
            self.counters.uncount_finish(ended.reason)
            counted = ended.acceptance
        self.counters.acceptance.correct(counted, delivered)
        self.counters.count_finish("stop")

    def step(self) -> list[Progress]:
        """Admits, prefills once, iterates once; what is new for whom, in that order."""
        self.counters.steps += 1
        self._ended.clear()
        progress, self._aborted = self._aborted, []
        self._admit()
        progress += self._run_prefill()
        launched = self._launch()
        while self._iteration.in_flight > (self.limits.lag if launched else 0):
            progress += self._read(self._iteration.collect())
        if not self._running:
            while self._iteration.in_flight:
                self._read(self._iteration.collect())
        return progress

    def _admit(self) -> None:
        """Slots and pages for those who wait, in order; nobody overtakes."""
        while self._waiting and self.slots.free_slots:
            entry = self._waiting[0]
            if self.page_table.pages_for(entry.limit) > self.page_table.free_pages:
                return
            self._waiting.popleft()
            entry.slot = self.slots.take(entry.depth)
            entry.generation = int(self.slots.generation[entry.slot])
            self.page_table.reserve(entry.slot, entry.limit)
            self._set_sampling(entry.slot, entry)
            self._running[entry.slot] = entry

    def _run_prefill(self) -> list[Progress]:
        """Prompt tokens up to the budget, oldest request first."""
        budget = self.limits.max_num_tokens
        chunks: list[Chunk] = []
        for entry in self._running.values():
            if entry.decoding or not budget:
                continue
            prompt = entry.request.prompt_ids
            stop = min(len(prompt), entry.prefilled + budget)
            budget -= stop - entry.prefilled
            chunks.append(Chunk(entry.slot, prompt, entry.prefilled, stop))
        if not chunks:
            return []
        keep = any(self._running[chunk.slot].request.params.return_generation_logits for chunk in chunks)
        first = self._prefill.run(chunks, keep)
        for chunk in chunks:
            self._running[chunk.slot].prefilled = self._running[chunk.slot].position = chunk.stop
        return [self._first_progress(token) for token in first]

    def _first_progress(self, first: FirstToken) -> Progress:
        entry = self._running[first.slot]
        wanted = entry.request.params.return_generation_logits
        return self._progress(entry, [first.token], first.done, first.reason, first.logits if wanted else None)

    def _launch(self) -> bool:
        """One iteration over every request that can still get a token, whatever is in flight."""
        ahead = self._iteration.in_flight
        entries = [
            entry
            for entry in self._running.values()
            # Each iteration in flight brings at least a token; the last one allowed stands at limit - 1.
            if entry.decoding and entry.position + ahead < entry.limit - 1
        ]
        if not entries:
            return False
        reach = max(min(entry.limit, entry.position + self.limits.rows * (ahead + 1)) for entry in entries)
        keep = any(entry.request.params.return_generation_logits for entry in entries)
        self._iteration.launch([entry.slot for entry in entries], reach, keep)
        return True

    def _read(self, results: Results) -> list[Progress]:
        """Results of one iteration; those of slots that changed hands since belong to nobody."""
        progress = []
        for row in range(results.requests):
            count = int(results.count[row])
            entry = self._running.get(int(results.slot[row]))
            if entry is None or entry.generation != results.generation[row]:
                LOGGER.debug("result for slot %d ignored: its request is gone", results.slot[row])
                self.counters.stale_results += 1
                continue
            if not count:
                continue
            entry.position += count
            drafted, accepted = int(results.drafted[row]), int(results.accepted[row])
            entry.acceptance.add(drafted, accepted, count)
            self.counters.acceptance.add(drafted, accepted, count)
            logits = None
            if results.logits is not None and entry.request.params.return_generation_logits:
                logits = results.logits[row, :count]
            tokens = results.tokens[row, :count].tolist()
            progress.append(self._progress(entry, tokens, bool(results.done[row]), int(results.reason[row]), logits))
        return progress

    def _progress(
        self, entry: _Entry, tokens: list[int], done: bool, reason: int, logits: np.ndarray | None
    ) -> Progress:
        request, acceptance = entry.request, entry.acceptance.copy()
        if not done:
            return Progress(request.id, tokens, acceptance, logits=logits)
        stop_ids = request.params.stop_token_ids or ()
        stopped_by = tokens[-1] if reason == FinishReason.STOP and tokens[-1] in stop_ids else None
        del self._entries[request.id]
        self._release(entry)
        self._ended[request.id] = _Ended(entry.acceptance, _NAMES[reason])
        self.counters.count_finish(_NAMES[reason])
        return Progress(request.id, tokens, acceptance, _NAMES[reason], stopped_by, logits)

    def _release(self, entry: _Entry) -> None:
        """Slot and pages back. What is in flight for the slot carries the old generation."""
        del self._running[entry.slot]
        self.page_table.release(entry.slot)
        self.slots.give_back(entry.slot)

    def _check_sampling(self, entry: _Entry) -> None:
        """Tries the parameters on the scratch slot, so that a request is refused before it is queued."""
        try:
            self._set_sampling(SCRATCH_SLOT, entry)
        except ValueError as error:
            raise RequestError(str(error), field=str(error).split()[0]) from None
        finally:
            self.sampling.clear(SCRATCH_SLOT)

    def _set_sampling(self, slot: int, entry: _Entry) -> None:
        params, prompt = entry.request.params, entry.request.prompt_ids
        eos: tuple[int, ...] = self.limits.eos_token_ids
        if params.end_id is not None:
            eos = () if params.end_id < 0 else (params.end_id,)
        if params.ignore_eos:
            eos = ()
        self.sampling.set(
            slot,
            **params.judging(),
            min_position=len(prompt) + (params.min_tokens or 0),
            limit=entry.limit,
            eos_ids=sorted({*eos, *(params.stop_token_ids or ())}),
            prompt_ids=prompt,
        )
