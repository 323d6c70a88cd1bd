"""Prompts into memory: chunks of several requests packed into one target step, and the first tokens of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from twostroke.engines.base import Engine
from twostroke.plugins.accept import Acceptor, SamplingSlots
from twostroke.runtime.buckets import StepShape, prefill_buckets, prefill_shape
from twostroke.runtime.counters import EngineCounters
from twostroke.runtime.flat_step import FlatStep, Floats
from twostroke.runtime.page_table import PageTable
from twostroke.runtime.runtime_config import Limits
from twostroke.runtime.slots import Slots
from twostroke.runtime.speculation import DraftMethod, Enqueue
from twostroke.runtime.state import State


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `stop` of a prompt, for a slot that holds the ones before."""

    slot: int
    prompt: Sequence[int]
    start: int
    stop: int

    @property
    def ends_prompt(self) -> bool:
        """Whether the first token of the answer follows."""
        return self.stop == len(self.prompt)


@dataclass(frozen=True)
class FirstToken:
    """The first token after a prompt. `reason` is a `FinishReason`; `logits` f32 [1, V] where asked for."""

    slot: int
    token: int
    done: bool
    reason: int
    logits: Floats | None


@dataclass(frozen=True)
class _Frame:
    shape: StepShape
    step: FlatStep
    target: Enqueue
    observe: Enqueue


class Prefill:
    """Runs packed chunks of at most `max_num_tokens` tokens. The first token is judged as every later one is."""

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
        requests = limits.max_batch_size
        self._token_buckets = prefill_buckets(limits.max_num_tokens)
        widest = prefill_shape(limits.buckets, self._token_buckets, requests, self._token_buckets[-1])
        taps = target.bindings.get("taps")
        self._target = target
        self._draft = draft
        self._state = state
        self._page_table = page_table
        self._slots = slots
        self._sampling = sampling
        self._limits = limits
        self._counters = counters
        self._acceptor = Acceptor(requests, 0, limits.vocab_size)
        self._step = FlatStep.allocate(widest, limits.vocab_size, 0 if taps is None else int(taps.shape[1]))
        self._frames: dict[tuple[StepShape, int], _Frame] = {}
        self._no_draft = np.zeros(requests, np.int32)
        self._no_tokens = np.zeros((requests, 0), np.int32)
        self._no_logits = np.zeros((requests, 0, limits.vocab_size), np.float32)

    def run(self, chunks: Sequence[Chunk], keep_logits: bool = False) -> list[FirstToken]:
        """One step over `chunks`, of different slots. Slots whose prompt it ends get their position and anchor."""
        tokens = sum(chunk.stop - chunk.start for chunk in chunks)
        if tokens > self._limits.max_num_tokens:
            raise ValueError(
                f"{tokens} tokens in one prefill step, expected at most max_num_tokens = {self._limits.max_num_tokens}"
            )
        shape = prefill_shape(self._limits.buckets, self._token_buckets, len(chunks), tokens)
        frame = self._frame(shape, self._page_table.tier(max(chunk.stop for chunk in chunks)))
        ending = [chunk for chunk in chunks if chunk.ends_prompt]

        self._pack(frame.step, chunks)
        frame.target()
        first = self._first_tokens(frame.step, ending, keep_logits)
        self._link(frame.step, chunks, {token.slot: token.token for token in first})
        frame.observe()

        for chunk, token in zip(ending, first, strict=True):
            self._slots.anchor[chunk.slot] = token.token
            self._slots.done[chunk.slot] = token.done
        for chunk in chunks:
            self._slots.position[chunk.slot] = chunk.stop
        self._counters.prefill_steps += 1
        self._counters.prefill_tokens += tokens
        self._counters.prefill_padding_rows += shape.tokens - tokens
        return first

    def _pack(self, step: FlatStep, chunks: Sequence[Chunk]) -> None:
        """Chunks one after another, then padding; logits of the rows that end a prompt."""
        step.clear()
        step.logit_rows.fill(0)
        row = ending = 0
        for request, chunk in enumerate(chunks):
            end = row + chunk.stop - chunk.start
            step.token_ids[row:end] = chunk.prompt[chunk.start : chunk.stop]
            step.positions[row:end] = np.arange(chunk.start, chunk.stop)
            step.slots[row:end] = chunk.slot
            step.request_slot[request] = chunk.slot
            step.row_start[request] = row
            if chunk.ends_prompt:
                step.logit_rows[ending] = end - 1
                ending += 1
            row = end
        step.row_start[len(chunks) :] = row

    def _first_tokens(self, step: FlatStep, ending: Sequence[Chunk], keep_logits: bool) -> list[FirstToken]:
        """The target's own choice after each finished prompt: an iteration without drafts behind its last token."""
        requests = len(ending)
        if not requests:
            return []
        slots = np.array([chunk.slot for chunk in ending], np.int32)
        last = np.array([chunk.stop - 1 for chunk in ending], np.int32)
        rows = step.logits[:requests]
        kept = rows.copy() if keep_logits else None
        tokens, count, accepted = np.zeros((requests, 1), np.int32), np.zeros(requests, np.int32), last.copy()
        done: NDArray[np.bool_] = np.zeros(requests, np.bool_)
        reason = np.zeros(requests, np.int8)
        self._acceptor.accept(
            rows[:, None],
            self._no_tokens[:requests],
            self._no_logits[:requests],
            self._no_draft[:requests],
            slots,
            last,
            self._sampling,
            tokens_out=tokens,
            count_out=count,
            accepted_out=accepted,
        )
        self._acceptor.finish(tokens, count, slots, last, self._sampling, done_out=done, reason_out=reason)
        self._sampling.commit(slots, tokens, count)
        return [
            FirstToken(
                slot=int(slots[request]),
                token=int(tokens[request, 0]),
                done=bool(done[request]),
                reason=int(reason[request]),
                logits=None if kept is None else kept[request : request + 1],
            )
            for request in range(requests)
        ]

    def _link(self, step: FlatStep, chunks: Sequence[Chunk], first: dict[int, int]) -> None:
        """The token after each row: the prompt's next one, or the first of the answer."""
        for request, chunk in enumerate(chunks):
            row, end = int(step.row_start[request]), int(step.row_start[request + 1])
            following = list(chunk.prompt[chunk.start + 1 : chunk.stop + 1])
            if chunk.ends_prompt:
                following.append(first[chunk.slot])
            step.next_ids[row:end] = following

    def _frame(self, shape: StepShape, tier: int) -> _Frame:
        frame = self._frames.get((shape, tier))
        if frame is None:
            step: FlatStep = replace(
                self._step.narrow(shape),
                row_start=np.zeros(shape.requests + 1, np.int32),
                logit_rows=np.zeros(shape.logit_rows, np.int32),
            )
            page_table = self._page_table.columns(tier)
            bound = step.bind_target(self._target, self._state.bindings(), page_table)
            frame = _Frame(shape, step, bound.enqueue, self._draft.bind_observe(step, page_table))
            self._frames[shape, tier] = frame
            self._counters.bound += 1
        return frame
