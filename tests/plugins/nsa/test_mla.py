"""The MLA form of sparse attention against loops in numpy, float64."""

from __future__ import annotations

import math

import numpy as np
import torch

from twostroke.plugins.nsa.reference import nsa_mla
from twostroke.tests.plugins.flat_inputs import Layout, layout, normal

HEADS, LATENT, ROTARY, INDEX_HEADS, INDEX_SIZE = 3, 6, 2, 2, 4
PAGE, TOP_K, SCALE = 4, 3, 0.3
WIDTH = LATENT + ROTARY


class Case:
    """Random inputs for `where`, with history in pages dealt at random; whatever no token owns is NaN."""

    def __init__(self, where: Layout, seed: int = 0, pages: int = 5) -> None:
        n, slots = where.tokens, int(where.slots.max()) + 1
        self.where = where
        self.q, self.row = normal(seed, n, HEADS, WIDTH), normal(seed + 1, n, WIDTH)
        self.index_q, self.index_weight = normal(seed + 2, n, INDEX_HEADS, INDEX_SIZE), normal(seed + 3, n, INDEX_HEADS)
        self.index_row = normal(seed + 4, n, INDEX_SIZE)
        dealt = torch.randperm((slots - 1) * pages, generator=torch.Generator().manual_seed(seed)) + 1
        self.table = torch.cat([torch.zeros(1, pages, dtype=torch.int64), dealt.reshape(slots - 1, pages)])
        self.latent = torch.full((slots * pages * PAGE, WIDTH), torch.nan)
        self.index = torch.full((slots * pages * PAGE, INDEX_SIZE), torch.nan)
        for r in range(len(where.row_start) - 1):
            first = int(where.row_start[r])
            for p in range(int(where.positions[first])):
                at = self.physical(int(where.slots[first]), p)
                self.latent[at], self.index[at] = normal(seed + 10 + p, WIDTH), normal(seed + 500 + p, INDEX_SIZE)

    def physical(self, slot: int, position: int) -> int:
        return int(self.table[slot, position // PAGE]) * PAGE + position % PAGE

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return nsa_mla(
            self.q,
            self.row,
            self.index_q,
            self.index_weight,
            self.index_row,
            self.latent,
            self.index,
            self.where.positions,
            self.where.slots,
            self.table,
            LATENT,
            PAGE,
            TOP_K,
            SCALE,
        )

    def by_hand(self, n: int, latent: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Token n over the memory after the step: top-k by (score, then lowest position), softmax, values."""
        slot, position = int(self.where.slots[n]), int(self.where.positions[n])
        rows = [self.physical(slot, p) for p in range(position + 1)]
        q, g = self.index_q[n].double().numpy(), self.index_weight[n].double().numpy()
        scores = [float(sum(g[h] * max(0.0, q[h] @ index[at]) for h in range(INDEX_HEADS))) for at in rows]
        chosen = sorted(range(len(rows)), key=lambda p: (-scores[p], p))[:TOP_K]
        out = np.zeros((HEADS, LATENT))
        for head in range(HEADS):
            z = [SCALE * float(self.q[n, head].double().numpy() @ latent[rows[p]]) for p in chosen]
            total = sum(math.exp(x) for x in z)
            for x, p in zip(z, chosen, strict=True):
                out[head] += math.exp(x) / total * latent[rows[p]][:LATENT]
        return out


def test_attention_is_over_the_best_rows_own_and_same_step_rows_included() -> None:
    case = Case(layout((2, 0, 6), (1, 9, 4), (3, 2, 1), padding=2))
    out, latent, index = case.run()
    for n in range(11):
        at = case.physical(int(case.where.slots[n]), int(case.where.positions[n]))
        assert torch.equal(latent[at], case.row[n])
        assert torch.equal(index[at], case.index_row[n])
        expected = case.by_hand(n, latent.double().numpy(), index.double().numpy())
        np.testing.assert_allclose(out[n], expected, atol=1e-5)


def test_only_this_steps_rows_change() -> None:
    case = Case(layout((1, 3, 5), (2, 7, 2), dead=1, padding=1))
    _, latent, index = case.run()
    written = {case.physical(int(s), int(p)) for s, p in zip(case.where.slots, case.where.positions, strict=True)}
    for at in set(range(len(latent))) - written - set(range(PAGE)):
        torch.testing.assert_close(latent[at], case.latent[at], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(index[at], case.index[at], rtol=0, atol=0, equal_nan=True)


def test_ties_go_to_the_lowest_position_wherever_its_page_is() -> None:
    """All scores of a token are equal: exact zeros behind the ReLU, of either sign, or one value of equal keys."""
    results = []
    for seed in (0, 7):
        case = Case(layout((1, 10, 6), (2, 3, 2)))
        deal = torch.randperm(10, generator=torch.Generator().manual_seed(seed)) + 1
        latent, index = torch.full_like(case.latent, torch.nan), torch.full_like(case.index, torch.nan)
        old = case.table.clone()
        case.table = torch.cat([old[:1], deal.reshape(2, 5)])
        for slot, end in ((1, 10), (2, 3)):
            for p in range(end):
                before = int(old[slot, p // PAGE]) * PAGE + p % PAGE
                latent[case.physical(slot, p)] = case.latent[before]
                index[case.physical(slot, p)] = 1.0
        case.latent, case.index, case.index_row = latent, index, torch.ones_like(case.index_row)
        case.index_weight[::2] = -0.0
        out, after, _ = case.run()
        results.append(out)
        for n in range(8):
            rows = [case.physical(int(case.where.slots[n]), p) for p in range(TOP_K)]
            keys = after[torch.tensor(rows)].double()
            z = torch.softmax(case.q[n].double() @ keys.T * SCALE, dim=-1)
            torch.testing.assert_close(out[n].double(), z @ keys[:, :LATENT], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_score_that_is_no_number_is_chosen_behind_all_others() -> None:
    """Rows 1 and 4 have index keys of NaN: a token that sees three others or more reads none of them, one that sees
    fewer reads them too."""
    case = Case(layout((1, 1, 1), (2, 8, 2)))
    for slot, position in ((1, 0), (2, 1), (2, 4)):
        case.index[case.physical(slot, position)] = torch.nan
    out, latent, index = case.run()
    index[index.isnan()] = 0.0
    without = case.table[2].repeat_interleave(PAGE) * PAGE + torch.arange(5 * PAGE) % PAGE
    for n in (1, 2):
        rows = [p for p in range(int(case.where.positions[n]) + 1) if p not in (1, 4)]
        q, g = case.index_q[n].double(), case.index_weight[n].double()
        scores = {p: float((g * torch.relu(q @ index[without[p]].double())).sum()) for p in rows}
        chosen = sorted(rows, key=lambda p: (-scores[p], p))[:TOP_K]
        keys = latent[without[torch.tensor(chosen)]].double()
        z = torch.softmax(case.q[n].double() @ keys.T * SCALE, dim=-1)
        torch.testing.assert_close(out[n].double(), z @ keys[:, :LATENT], rtol=1e-5, atol=1e-5)
    both = latent[[case.physical(1, 0), case.physical(1, 1)]].double()
    z = torch.softmax(case.q[0].double() @ both.T * SCALE, dim=-1)
    torch.testing.assert_close(out[0].double(), z @ both[:, :LATENT], rtol=1e-5, atol=1e-5)


def test_values_are_the_latent_part_and_keys_the_whole_row() -> None:
    case = Case(layout((1, 0, 2)))
    plain, *_ = case.run()
    case.row[:, LATENT:] = torch.tensor([[5.0, 0.0], [-5.0, 0.0]])
    turned, *_ = case.run()
    torch.testing.assert_close(turned[0], plain[0])  # one row: its weight is 1 whatever its key
    assert (turned[1] - plain[1]).abs().max() > 1e-3
