"""Sparse attention against loops in numpy, float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from twostroke.plugins.nsa.reference import (
    indexer_scores,
    nsa_block,
    nsa_csa,
    nsa_hca,
    nsa_window,
    sink_attention,
)
from twostroke.tests.plugins.flat_inputs import Layout, layout, normal

HEADS, SIZE, INDEX_HEADS, INDEX_SIZE = 3, 8, 2, 4
WINDOW, RING, RATIO, TOP_K = 4, 9, 4, 2
SCALE = SIZE**-0.5

Array = np.ndarray


def attend(q: Array, keys: list[Array], sink: Array) -> Array:
    """One query [H, D] over the listed keys: the formula, with the sink in the denominator only."""
    out = np.zeros_like(q)
    for head in range(len(q)):
        z = [SCALE * float(q[head] @ key) for key in keys]
        top = max(*z, float(sink[head])) if z else float(sink[head])
        total = sum(math.exp(x - top) for x in z) + math.exp(float(sink[head]) - top)
        for x, key in zip(z, keys, strict=True):
            out[head] += math.exp(x - top) / total * key
    return out


def test_the_sink_takes_weight_and_gives_no_value() -> None:
    q, keys, sink = normal(0, 5, HEADS, SIZE), normal(1, 5, 6, SIZE), normal(2, HEADS)
    valid = torch.ones(5, 6, dtype=torch.bool)
    valid[1, 2:] = False
    found = sink_attention(q, keys, valid, sink, SCALE)
    for n in range(5):
        expected = attend(q[n].double().numpy(), [k.double().numpy() for k in keys[n][valid[n]]], sink.numpy())
        np.testing.assert_allclose(found[n], expected, atol=1e-6)
    flooded = sink_attention(q, keys, valid, torch.full((HEADS,), 80.0), SCALE)
    assert flooded.abs().max() < 1e-20
    without = sink_attention(q, keys, valid, torch.full((HEADS,), -1e9), SCALE)
    plain = torch.softmax((q @ keys.transpose(1, 2) * SCALE).masked_fill(~valid[:, None], -1e30), -1) @ keys
    torch.testing.assert_close(without, plain)


def test_indexer_scores_are_gated_sums_of_relu() -> None:
    q, gate, keys = normal(3, 4, INDEX_HEADS, INDEX_SIZE), normal(4, 4, INDEX_HEADS), normal(5, 4, 7, INDEX_SIZE)
    found = indexer_scores(q, gate, keys)
    for n in range(4):
        for w in range(7):
            expected = sum(float(gate[n, h]) * max(0.0, float(q[n, h] @ keys[n, w])) for h in range(INDEX_HEADS))
            assert found[n, w] == pytest.approx(expected, abs=1e-5)


class History:
    """What every position of every slot holds, and memory filled as far as a step may rely on; the rest is NaN."""

    def __init__(self, where: Layout, rows_per_page: int = 2, pages: int = 12) -> None:
        self.where, self.rows_per_page = where, rows_per_page
        self.kv = {s: normal(10 + s, 64, SIZE) for s in range(4)}
        self.entry = {s: normal(20 + s, 64, SIZE) for s in range(4)}  # the row a token at this position completes
        self.index_entry = {s: normal(30 + s, 64, INDEX_SIZE) for s in range(4)}
        self.table = torch.zeros(4, 8, dtype=torch.int64)
        order = torch.randperm(31, generator=torch.Generator().manual_seed(0)) + 1
        self.table[1:] = order[:24].reshape(3, 8)
        self.window = torch.full((4 * RING, SIZE), torch.nan)
        self.compressed = torch.full((32 * rows_per_page, SIZE), torch.nan)
        self.index = torch.full((32 * rows_per_page, INDEX_SIZE), torch.nan)
        self.linear = torch.full((4 * 16, SIZE), torch.nan)
        starts: dict[int, int] = {}
        for position, slot in zip(where.positions.tolist(), where.slots.tolist(), strict=True):
            starts.setdefault(slot, position)
        for slot, start in starts.items():
            for p in range(max(0, start - RING), start):
                self.window[slot * RING + p % RING] = self.kv[slot][p]
            for row in range(start // RATIO):
                closed = row * RATIO + RATIO - 1
                physical = self.physical(slot, row)
                self.compressed[physical] = self.entry[slot][closed]
                self.index[physical] = self.index_entry[slot][closed]
                self.linear[slot * 16 + row] = self.entry[slot][closed]

    def physical(self, slot: int, row: int) -> int:
        return int(self.table[slot, row // self.rows_per_page]) * self.rows_per_page + row % self.rows_per_page

    def fresh(self, of: dict[int, torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.where.slots.tolist(), self.where.positions.tolist(), strict=True)
        return torch.stack([of[s][p] for s, p in pairs])

    def completed(self, of: dict[int, torch.Tensor]) -> torch.Tensor:
        """The rows the closing tokens complete; what fills up is NaN and must not matter."""
        closing = self.where.closing(RATIO)
        return torch.where(closing[:, None] >= 0, self.fresh(of)[closing.clamp(min=0)], torch.nan)

    def window_keys(self, slot: int, position: int) -> list[Array]:
        return [self.kv[slot][p].numpy() for p in range(max(0, position - WINDOW + 1), position + 1)]

    def visible(self, position: int) -> range:
        return range((position + 1) // RATIO)

    def rows_of(self, slot: int, rows: list[int] | range, of: dict[int, torch.Tensor]) -> list[Array]:
        return [of[slot][row * RATIO + RATIO - 1].numpy() for row in rows]


LAYOUTS = {
    "prefill": layout((1, 0, 21)),
    "verify": layout((2, 17, 6), (1, 9, 6), padding=2, dead=3),
    "decode": layout((1, 31, 1), (2, 3, 1), (3, 0, 1), padding=1),
    "mixed": layout((3, 0, 13), (1, 21, 1), (2, 14, 6), padding=3),
}


@pytest.fixture(params=LAYOUTS)
def history(request: pytest.FixtureRequest) -> History:
    return History(LAYOUTS[request.param])


def common(history: History) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return normal(40, history.where.tokens, HEADS, SIZE), history.fresh(history.kv), normal(41, HEADS)


Extra = Callable[[int, int, int], list[Array]]


def check(history: History, q: torch.Tensor, sink: torch.Tensor, out: torch.Tensor, extra: Extra) -> None:
    """Every real row equals the loop over its window and the rows `extra(n, slot, position)` lists."""
    for n, (slot, p) in enumerate(zip(history.where.slots.tolist(), history.where.positions.tolist(), strict=True)):
        if slot:
            expected = attend(q[n].numpy(), [*history.window_keys(slot, p), *extra(n, slot, p)], sink.numpy())
            np.testing.assert_allclose(out[n], expected, atol=1e-5, err_msg=f"row {n}: slot {slot}, position {p}")


def test_window_attention_is_the_loop_over_the_window(history: History) -> None:
    q, kv, sink = common(history)
    where = history.where
    out, window = nsa_window(
        q, kv, sink, history.window, where.positions, where.slots, where.row_start, WINDOW, RING, SCALE
    )
    check(history, q, sink, out, lambda n, slot, p: [])
    assert window.shape == history.window.shape


def test_hca_adds_every_closed_row_the_one_it_closes_included(history: History) -> None:
    q, kv, sink = common(history)
    where = history.where
    out, _, linear = nsa_hca(
        q,
        kv,
        history.completed(history.entry),
        sink,
        history.window,
        history.linear,
        where.positions,
        where.slots,
        where.row_start,
        where.closing(RATIO),
        WINDOW,
        RING,
        RATIO,
        16,
        SCALE,
    )
    check(history, q, sink, out, lambda n, slot, p: history.rows_of(slot, history.visible(p), history.entry))
    written = (~torch.isnan(linear)).all(dim=1).nonzero()[:, 0].tolist()
    for slot, p in zip(where.slots.tolist(), where.positions.tolist(), strict=True):
        if slot and p % RATIO == RATIO - 1:
            assert slot * 16 + p // RATIO in written


@pytest.mark.parametrize("columns", [8, 16])
def test_csa_adds_the_top_rows_by_index_score(history: History, columns: int) -> None:
    """Chosen rows from a loop; ties at an exact zero go to the lowest row. The table may be wider than needed."""
    q, kv, sink = common(history)
    where = history.where
    index_q, gate = normal(42, where.tokens, INDEX_HEADS, INDEX_SIZE), normal(43, where.tokens, INDEX_HEADS)
    gate[::2] = 0.0  # every score of these rows is zero: the lowest rows win
    table = torch.nn.functional.pad(history.table, (0, columns - 8))
    out, _, compressed, index = nsa_csa(
        q,
        kv,
        history.completed(history.entry),
        index_q,
        gate,
        history.completed(history.index_entry),
        sink,
        history.window,
        history.compressed,
        history.index,
        where.positions,
        where.slots,
        where.row_start,
        where.closing(RATIO),
        table,
        WINDOW,
        RING,
        RATIO,
        history.rows_per_page,
        TOP_K,
        SCALE,
    )

    def chosen(n: int, slot: int, p: int) -> list[Array]:
        def score(row: int) -> float:
            key = history.index_entry[slot][row * RATIO + RATIO - 1]
            return sum(float(gate[n, h]) * max(0.0, float(index_q[n, h] @ key)) for h in range(INDEX_HEADS))

        scores = {row: score(row) for row in history.visible(p)}
        best = sorted(scores, key=lambda row: (-scores[row], row))[:TOP_K]
        return history.rows_of(slot, best, history.entry)

    check(history, q, sink, out, chosen)
    for slot, p in zip(where.slots.tolist(), where.positions.tolist(), strict=True):
        if slot and p % RATIO == RATIO - 1:
            physical = history.physical(slot, p // RATIO)
            assert torch.equal(compressed[physical], history.entry[slot][p])
            assert torch.equal(index[physical], history.index_entry[slot][p])


def test_a_dead_row_writes_only_scratch() -> None:
    """Rows with slot 0 complete nothing; what they write lands in slot 0."""
    history = History(layout((1, 3, 6), dead=6))
    q, kv, sink = common(history)
    where = history.where
    _, window, linear = nsa_hca(
        q,
        kv,
        history.completed(history.entry),
        sink,
        history.window,
        history.linear,
        where.positions,
        where.slots,
        where.row_start,
        where.closing(RATIO),
        WINDOW,
        RING,
        RATIO,
        16,
        SCALE,
    )
    for before, after, rows in ((history.window, window, RING), (history.linear, linear, 16)):
        torch.testing.assert_close(after[rows:], before[rows:], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("valid_from", [0, 3, 5, 9])
def test_a_block_sees_its_context_and_itself_both_ways(valid_from: int) -> None:
    gamma, window, ring = 3, 4, 7
    position, slot = torch.tensor([5, 1, 9]), torch.tensor([2, 1, 3])
    context = {s: normal(50 + s, 16, SIZE) for s in range(4)}
    memory = torch.full((4 * ring, SIZE), torch.nan)
    for s, p in zip(slot.tolist(), position.tolist(), strict=True):
        for at in range(max(valid_from, p - window), p):
            memory[s * ring + at % ring] = context[s][at]
    q, kv, sink = normal(60, 9, HEADS, SIZE), normal(61, 9, SIZE), normal(62, HEADS)
    out = nsa_block(q, kv, sink, memory, position, slot, torch.full((4,), valid_from), window, ring, SCALE)
    for r, (s, p) in enumerate(zip(slot.tolist(), position.tolist(), strict=True)):
        seen = [context[s][at].numpy() for at in range(max(valid_from, p - window, 0), p)]
        block = [kv[r * gamma + k].numpy() for k in range(gamma)]
        for k in range(gamma):
            expected = attend(q[r * gamma + k].numpy(), [*seen, *block], sink.numpy())
            np.testing.assert_allclose(out[r * gamma + k], expected, atol=1e-5)
