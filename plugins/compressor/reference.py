"""Plain torch specification of compress. Shapes: kv and gate [N, c*D], raw [S*ring, 2*c*D], ape [ratio, c*D]."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.plugins.flat_step import gather_recent, ring_targets, scatter_rows, take


def compress(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    raw: Tensor,
    positions: Tensor,
    slots: Tensor,
    row_start: Tensor,
    closing: Tensor,
    ratio: int,
    overlap: bool,
    ring: int,
) -> tuple[Tensor, Tensor]:
    """Returns the rows [C, D] of the windows this step completes and the raw ring with this step's rows.

    `closing` i64 [C] names the token rows that complete a window, -1 fills up (its result is of no meaning). A ring
    holds T + 2*ratio - 2 rows (CSA) or T + ratio - 2 (HCA): enough for all that the open window and, with overlap, the
    one before it still need.
    """
    fresh = torch.cat([kv, gate + take(ape, positions % ratio)], dim=1)
    width = kv.shape[1]
    span = 2 * ratio if overlap else ratio
    closer = closing.clamp(min=0)
    at = positions[closer]
    recent, valid = gather_recent(
        fresh,
        raw,
        positions,
        slots,
        row_start,
        count=span,
        ring=ring,
        of=closer,
        first_position=(at - at % ratio - (ratio if overlap else 0)).clamp(min=0),
    )
    values, scores = recent[:, :, :width], recent[:, :, width:]
    if overlap:
        half = width // 2
        values = torch.cat([values[:, :ratio, :half], values[:, ratio:, half:]], dim=1)
        scores = torch.cat([scores[:, :ratio, :half], scores[:, ratio:, half:]], dim=1)
    scores = torch.where(valid[:, :, None], scores, -1e30)
    completed = (torch.softmax(scores, dim=1) * values).sum(dim=1)
    return completed, scatter_rows(raw, ring_targets(positions, slots, row_start, ring=ring), fresh)
