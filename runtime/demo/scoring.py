"""Bits a compiled target needs for given text: the target step alone, every row judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from twostroke.engines.loading import LoadedEngine
from twostroke.runtime.buckets import StepShape
from twostroke.runtime.flat_step import FlatStep
from twostroke.runtime.page_table import PageTable
from twostroke.runtime.state import State

_CHUNK = 64


def bits(
    loaded: LoadedEngine,
    rows: Sequence[tuple[Sequence[int], int]],
    progress: Callable[[int], None] = lambda row: None,
) -> float:
    """Total bits of the scored tokens of `rows`. A row is (token ids, first): the ids from index `first` on are scored,
    each given all before it."""
    build = loaded.manifest.build_config
    longest = max(len(ids) for ids, _ in rows)
    pages = -(-longest // build.tokens_per_page)
    table = PageTable(2, pages, pages, build.tokens_per_page)
    state = State(loaded.manifest.state, 2, pages + 1)
    table.reserve(1, longest)
    step = FlatStep.allocate(StepShape(1, _CHUNK, _CHUNK), build.vocab_size, loaded.manifest.speculative.taps_width)
    step.logit_rows[:] = np.arange(_CHUNK)
    step.request_slot[:] = 1
    bound = step.bind_target(loaded.engines["target"], state.bindings(), table.columns(pages))
    total = 0.0
    for index, (ids, first) in enumerate(rows):
        tokens = np.asarray(ids, np.int32)
        for start in range(0, len(tokens) - 1, _CHUNK):
            fed = tokens[start : min(start + _CHUNK, len(tokens) - 1)]
            step.token_ids.fill(0)
            step.positions.fill(0)
            step.slots.fill(0)
            step.token_ids[: fed.size] = fed
            step.positions[: fed.size] = np.arange(start, start + fed.size)
            step.slots[: fed.size] = 1
            step.row_start[1] = fed.size
            bound.enqueue()
            judged = np.arange(start + 1, start + fed.size + 1)
            logits = step.logits[: fed.size].astype(np.float64)
            largest = logits.max(axis=1)
            normaliser = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
            nats = normaliser - logits[np.arange(fed.size), tokens[judged]]
            total += float(nats[judged >= first].sum())
        progress(index + 1)
    return total / math.log(2)
