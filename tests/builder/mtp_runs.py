"""MTP's steps driven by hand: draft-extend, then a chain of pick, next, pick; and what its reference says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from twostroke.builder.eager import EagerEngine
from twostroke.builder.networks.layers import StepSpec
from twostroke.builder.networks.registry import TARGETS
from twostroke.builder.shared_tensors import own_tensors
from twostroke.builder.weights import load_into
from twostroke.engines.base import Engine
from twostroke.engines.loading import LoadedEngine
from twostroke.engines.manifest import StateTensor
from twostroke.tests.builder.flat_runs import Array, Chunk, Memory, Rows, Toy, assert_close, enqueue, observe

TOLERANCE = 1e-5
DEPTH = 5
ROWS = 128  # of a slot's page table: one page of V4, two of V3.2


@dataclass(frozen=True)
class Draft:
    """The three steps of one engine over their state."""

    observing: Engine
    following: Engine
    picking: Engine
    state: tuple[StateTensor, ...]
    pages: int

    @property
    def exact(self) -> bool:
        """Whether a row is the same to the bit whatever else is in its step."""
        return self.observing.step.engine != "eager"

    def memory(self, slots: int = 4) -> Memory:
        return Memory(self.state, slots, self.pages)

    def observe(self, memory: Memory, taps: Array, tokens: Sequence[int], chunks: Sequence[Chunk]) -> None:
        """The rows of `chunks` of the sequence `tokens`, whose taps are `taps`."""
        spans = [slice(chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks]
        following = [list(tokens[span.start + 1 : span.stop + 1]) for span in spans]
        observe(self.observing, memory, [taps[span] for span in spans], chunks, next_ids=following)

    def seen(
        self, taps: Array, tokens: Sequence[int], sizes: Sequence[int], slot: int = 1, memory: Memory | None = None
    ) -> Memory:
        """After all of `tokens` but the last, the anchor, in chunks of the given sizes."""
        memory, at = memory or self.memory(), 0
        for size in sizes:
            self.observe(memory, taps, tokens, [Chunk(slot, at, tokens[at : at + size])])
            at += size
        assert at == len(tokens) - 1
        return memory

    def propose(
        self,
        memory: Memory,
        requests: Sequence[tuple[int, int]],
        depth: int = 3,
        noise: Array | None = None,
        inverse_temperature: float = 1.0,
    ) -> dict[str, Array]:
        """tokens [R, depth], logits, confidence for (slot, position) each: pick, then next and pick again. One row of
        scratch behind; noise [R, depth, V]."""
        rows = len(requests) + 1
        slots, positions = (np.array([*column, 0], np.int32) for column in zip(*requests, strict=True))
        vocab = int(self.picking.bindings["noise"].shape[1])
        columns: list[dict[str, Array]] = []
        for k in range(depth):
            if k:
                enqueue(
                    self.following,
                    memory,
                    token_ids=columns[-1]["tokens"],
                    positions=positions + np.int32(k - 1) * (slots != 0),
                    slots=slots,
                    row_start=np.arange(rows, dtype=np.int32),
                    page_table=memory.table,
                )
            drawn = np.zeros((rows, vocab), np.float32)
            if noise is not None:
                drawn[:-1] = noise[:, k]
            heat = np.full(rows, inverse_temperature, np.float32)
            columns.append(enqueue(self.picking, memory, slots=slots, inverse_temperature=heat, noise=drawn))
        return {name: np.stack([column[name] for column in columns], axis=1)[:-1] for name in columns[0]}


def compiled(loaded: LoadedEngine) -> Draft:
    """The draft steps of an engine directory."""
    state = tuple(tensor for tensor in loaded.manifest.state if tensor.name.startswith("mtp."))
    observing, following, picking = (loaded.engines[name] for name in ("observe", "next", "pick"))
    return Draft(observing, following, picking, state, _pages(loaded.manifest.build_config.tokens_per_page))


def eager(toy: Toy, depth: int = DEPTH, max_seq_len: int = ROWS) -> Draft:
    """The draft steps a build would export, in eager torch, with the checkpoint's weights."""
    specs = draft_steps(toy, depth, max_seq_len)
    for spec in specs:
        load_into(spec.module, toy.checkpoint)
    observing, following, picking = map(EagerEngine, specs)
    pages = _pages(TARGETS[toy.config.model_type].tokens_per_page)
    return Draft(observing, following, picking, observing.spec.state, pages)


def draft_steps(toy: Toy, depth: int = DEPTH, max_seq_len: int = ROWS) -> tuple[StepSpec, ...]:
    """observe, next, pick as a build makes them; every parameter is NaN until it is loaded."""
    family = TARGETS[toy.config.model_type]
    own = own_tensors(toy.checkpoint, family.all_tensors(toy.config))
    specs = family.drafts["mtp"](toy.config, depth).steps(max_seq_len, own)
    for spec in specs:
        for parameter in spec.module.parameters():
            parameter.data.fill_(torch.nan)
    return specs


def assert_same_chain(found: Rows, expected: Mapping[str, Array], row: int = 0) -> None:
    """Tokens of request `row` and, to 1e-5 of their spread, its logits at every depth of `expected`."""
    np.testing.assert_array_equal(found["tokens"][row], expected["tokens"])
    for k, (ours, theirs) in enumerate(zip(found["logits"][row], expected["logits"], strict=True)):
        assert_close(ours, theirs, TOLERANCE, f"depth {k + 1}")


def _pages(tokens_per_page: int) -> int:
    return -(-ROWS // tokens_per_page)
