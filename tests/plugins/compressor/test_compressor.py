"""The compressor against the formula applied to a whole sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twostroke.plugins.compressor.reference import compress
from twostroke.tests.plugins.flat_inputs import layout, normal

SIZE, LENGTH, BLOCK = 6, 260, 6
# (ratio, overlap): CSA has two feature halves, HCA one.
KINDS = [(4, True), (128, False), (8, False)]


def whole(ratio: int, overlap: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K, wgate x (before ape) [LENGTH, c*D], and ape [ratio, c*D]."""
    width = 2 * SIZE if overlap else SIZE
    return normal(1, LENGTH, width), normal(2, LENGTH, width), normal(3, ratio, width)


def row_closed_at(t: int, ratio: int, overlap: bool) -> np.ndarray:
    """E_w of the window that ends at t, per channel, float64."""
    kv, gate, ape = (tensor.double().numpy() for tensor in whole(ratio, overlap))
    row = np.zeros(SIZE)
    first = t - ratio + 1
    for channel in range(SIZE):
        values, scores = [], []
        if overlap and first > 0:
            for j in range(first - ratio, first):  # first halves of the window before
                values.append(kv[j, channel])
                scores.append(gate[j, channel] + ape[j % ratio, channel])
        own = channel + SIZE if overlap else channel
        for j in range(first, t + 1):
            values.append(kv[j, own])
            scores.append(gate[j, own] + ape[j % ratio, own])
        weights = np.exp(np.array(scores) - max(scores))
        row[channel] = (weights / weights.sum() * np.array(values)).sum()
    return row


def run(ratio: int, overlap: bool, sizes: list[int], slot: int = 1) -> dict[int, torch.Tensor]:
    """Row completed at each t, fed in chunks over a poisoned ring of the contract's size."""
    kv, gate, ape = whole(ratio, overlap)
    ring = BLOCK + (2 * ratio - 2 if overlap else ratio - 2)
    raw = torch.full((3 * ring, 2 * kv.shape[1]), torch.nan)
    rows: dict[int, torch.Tensor] = {}
    at = 0
    for size in sizes:
        where = layout((slot, at, size), padding=2)
        piece, gates = (torch.cat([x[at : at + size], torch.zeros(2, x.shape[1])]) for x in (kv, gate))
        closing = where.closing(ratio)
        row, raw = compress(
            piece, gates, ape, raw, where.positions, where.slots, where.row_start, closing, ratio, overlap, ring
        )
        rows |= {at + n: row[i] for i, n in enumerate(closing.tolist()) if n >= 0}
        at += size
    return rows


@pytest.mark.parametrize(("ratio", "overlap"), KINDS)
@pytest.mark.parametrize("sizes", [[260], [1] * 260, [6] * 43 + [2], [3, 1, 124, 3, 1, 123, 5]], ids=len)
def test_closed_rows_are_the_formula_however_the_sequence_is_cut(ratio: int, overlap: bool, sizes: list[int]) -> None:
    rows = run(ratio, overlap, sizes)
    assert list(rows) == [t for t in range(LENGTH) if (t + 1) % ratio == 0], "not at 4 or 128"
    for t in {3, 7, 11, 127, 131, 255, 259} & rows.keys():
        np.testing.assert_allclose(rows[t], row_closed_at(t, ratio, overlap), atol=1e-5, err_msg=f"t = {t}")


@pytest.mark.parametrize(("ratio", "overlap"), KINDS)
def test_what_fills_up_the_rows_is_finite(ratio: int, overlap: bool) -> None:
    """A step that completes nothing still returns rows; they are computed and then thrown away."""
    kv, gate, ape = whole(ratio, overlap)
    ring = BLOCK + (2 * ratio - 2 if overlap else ratio - 2)
    where = layout((1, 0, 2), padding=1)
    raw = torch.full((2 * ring, 2 * kv.shape[1]), torch.nan)
    closing = where.closing(ratio)
    assert (closing == -1).all()
    rows, _ = compress(
        kv[:3], gate[:3], ape, raw, where.positions, where.slots, where.row_start, closing, ratio, overlap, ring
    )
    assert rows.shape == (len(closing), SIZE)
    assert torch.isfinite(rows).all()


def test_the_first_window_has_no_predecessor() -> None:
    """t = 3: its four slots alone; t = 7 already mixes in the first halves of window 0."""
    kv, gate, ape = whole(4, True)
    scores = (gate + ape.repeat(65, 1))[:4, SIZE:]
    alone = (torch.softmax(scores, dim=0) * kv[:4, SIZE:]).sum(dim=0)
    rows = run(4, True, [8])
    torch.testing.assert_close(rows[3], alone)
    own = (torch.softmax((gate + ape.repeat(65, 1))[4:8, SIZE:], dim=0) * kv[4:8, SIZE:]).sum(dim=0)
    assert (rows[7] - own).abs().max() > 1e-2


def test_the_first_half_of_the_features_serves_the_next_window() -> None:
    """Moving Ca of window 0 moves the row closed at 7 and not the one at 3; moving Cb does the opposite."""
    kv, gate, ape = whole(4, True)
    where = layout((1, 0, 8))
    raw = torch.full((2 * 12, 4 * SIZE), torch.nan)

    def rows(changed: torch.Tensor) -> torch.Tensor:
        return compress(
            changed[:8],
            gate[:8],
            ape,
            raw,
            where.positions,
            where.slots,
            where.row_start,
            torch.tensor([3, 7]),
            4,
            True,
            12,
        )[0]

    plain = rows(kv)
    for half, moved, kept in ((slice(0, SIZE), 1, 0), (slice(SIZE, None), 0, 1)):
        changed = kv.clone()
        changed[1, half] += 5.0
        difference = (rows(changed) - plain).abs().amax(dim=1)
        assert difference[moved] > 1e-3
        assert difference[kept] == 0
