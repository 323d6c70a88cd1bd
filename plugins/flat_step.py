"""Addressing shared by every op of a flat step: which earlier rows a token can read, and where it may write.

Tokens of a step are flat (`N`), those of one request contiguous and ascending; request `r` owns rows
`row_start[r] .. row_start[r+1]-1`, rows from `row_start[R]` on are padding. Slot 0 and page 0 are scratch.
Ring memory is position-addressed: position `p` of slot `s` lives in row `s*ring + p mod ring`.
All functions are plain torch, exportable, and keep every tensor dimension a function of `N` alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def request_of(rows: Tensor, row_start: Tensor) -> Tensor:
    """Request index of each of `rows [X]`; padding rows get index `R`. row_start: i64 [R+1], row_start[0] = 0."""
    return (rows[:, None] >= row_start[None, :]).sum(dim=1) - 1


def closing_rows(positions: Tensor, slots: Tensor, row_start: Tensor, *, ratio: int) -> Tensor:
    """The rows that complete a window of `ratio` tokens, in order, then -1: i64 [C]. Scratch rows complete nothing.

    There can be N // ratio + R of them; C is one more, because engines sum a lone row in another order than several.
    """
    tokens = positions.shape[0]
    most = tokens // ratio + row_start.shape[0]
    closes = (positions % ratio == ratio - 1) & (slots != 0)
    rank = torch.cumsum(closes.to(torch.int64), dim=0) - 1
    wanted = torch.arange(most)[:, None]
    match = closes[None, :] & (rank[None, :] == wanted)
    return torch.where(match, torch.arange(tokens)[None, :] + 1, 0).sum(dim=1) - 1


def gather_recent(
    fresh: Tensor,
    ring_rows: Tensor,
    positions: Tensor,
    slots: Tensor,
    row_start: Tensor,
    *,
    count: int,
    ring: int,
    of: Tensor | None = None,
    first_position: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The `count` most recent rows of every token, oldest first, its own row last; only of the rows `of [X]` if given.

    A row whose position belongs to this step comes from `fresh [N, W]`, an older one from `ring_rows [S*ring, W]`
    as it was before the step. Positions below `first_position [X]` (default 0) do not exist: they are redirected by
    index to the token's own fresh row and reported as invalid, so stale memory is never multiplied by anything.

    Returns rows [X, count, W] and valid [X, count] (bool), X = N without `of`.
    """
    whose = torch.arange(fresh.shape[0]) if of is None else of
    at, owner = (positions, slots) if of is None else (positions[of], slots[of])
    here, back = whose[:, None], torch.arange(count - 1, -1, -1)[None, :]
    wanted = at[:, None] - back
    valid = wanted >= (0 if first_position is None else first_position[:, None])
    start = row_start[request_of(whose, row_start)][:, None]
    source = (here - back).clamp(min=0)
    in_step = (here - back >= start) & (slots[source] == owner[:, None])
    source = torch.where(in_step & valid, source, here)
    old = owner[:, None] * ring + torch.where(valid, wanted, at[:, None]) % ring
    rows = torch.where((in_step | ~valid)[:, :, None], take(fresh, source), take(ring_rows, old))
    return rows, valid


def ring_targets(positions: Tensor, slots: Tensor, row_start: Tensor, *, ring: int) -> Tensor:
    """Ring row each token writes, i64 [N]: its own, or scratch (row 0) if a later token of this step owns it too."""
    tokens = positions.shape[0]
    ends = torch.cat([row_start, torch.full((1,), tokens, dtype=row_start.dtype)])
    rows = torch.arange(tokens)
    last = rows + ring >= ends[request_of(rows, row_start) + 1]
    return torch.where(last, slots * ring + positions % ring, 0)


def scatter_rows(memory: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
    """A copy of `memory [X, W]` with `rows [N, W]` at `targets [N]`. Duplicate targets only ever name scratch rows."""
    return memory.index_put((targets,), rows)


def page_rows(page_table: Tensor, slots: Tensor, rows: Tensor, *, rows_per_page: int) -> Tensor:
    """Physical row of logical `rows` (any shape [N, ...]) of each token's slot, through `page_table [S, P]`."""
    column = (rows // rows_per_page).clamp(max=page_table.shape[1] - 1)
    own_pages = page_table[slots]
    flat_column = column.reshape(column.shape[0], -1)
    return own_pages.gather(1, flat_column).reshape(rows.shape) * rows_per_page + rows % rows_per_page


def take(rows: Tensor, index: Tensor) -> Tensor:
    """rows [X, W] at `index` (any shape [...]) -> [..., W]; one Gather in a graph."""
    return torch.nn.functional.embedding(index, rows)


def exact_topk(scores: Tensor, k: int) -> Tensor:
    """Indices of the `k` highest entries of the last dimension; among equals the lowest index wins.

    Exported graphs use TopK, whose CPU kernel keeps the lowest index; eager torch promises nothing about ties, so the
    reference sorts stably.
    """
    if torch.compiler.is_exporting():
        return torch.topk(scores, k, dim=-1, sorted=True).indices
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]
