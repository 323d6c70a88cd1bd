"""Plain torch specification of the nsa ops.

Shapes: q [N, H, D], kv [N, D] (this step's rows), sink [H], window ring [S*ring, D], HCA rows [S*capacity, D],
compressed or latent rows [pages*rows_per_page, D], indexer rows [pages*rows_per_page, I], page_table [S, P].
"""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.plugins.flat_step import exact_topk, gather_recent, page_rows, ring_targets, scatter_rows, take
from twostroke.plugins.nsa.index_keys import quantised, read_pages, write_pages

MASKED = -1e30


def sink_attention(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Attention of q [N, H, D] over keys [N, K, D] (values too); valid [N, K]; the sink is a key without a value."""
    logits = torch.matmul(q, keys.transpose(1, 2)) * scale
    logits = torch.where(valid[:, None, :], logits, MASKED)
    extra = sink[None, :, None].expand(q.shape[0], q.shape[1], 1)
    weights = torch.softmax(torch.cat([logits, extra], dim=-1), dim=-1)[:, :, :-1]
    return torch.matmul(weights, keys)


def indexer_scores(index_q: Tensor, index_weight: Tensor, index_keys: Tensor) -> Tensor:
    """score[n, w] = sum_h g[n, h] relu(qI[n, h] . kI[n, w]); index_q [N, HI, I], index_keys [N, K, I] -> [N, K]."""
    relevance = torch.relu(torch.matmul(index_q, index_keys.transpose(1, 2)))
    return (relevance * index_weight[:, :, None]).sum(dim=1)


def _completed(positions: Tensor, slots: Tensor, closing: Tensor, ratio: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slot and number of the compressed row each closing token completes, and whether it is one at all; all [C]."""
    closer = closing.clamp(min=0)
    return slots[closer], positions[closer] // ratio, closing >= 0


def nsa_window(
    q: Tensor,
    kv: Tensor,
    sink: Tensor,
    window_rows: Tensor,
    positions: Tensor,
    slots: Tensor,
    row_start: Tensor,
    window: int,
    ring: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Sliding-window attention. Returns out [N, H, D] and the window ring with this step's rows."""
    keys, valid = gather_recent(kv, window_rows, positions, slots, row_start, count=window, ring=ring)
    out = sink_attention(q, keys, valid, sink, scale)
    return out, scatter_rows(window_rows, ring_targets(positions, slots, row_start, ring=ring), kv)


def nsa_hca(
    q: Tensor,
    kv: Tensor,
    entry: Tensor,
    sink: Tensor,
    window_rows: Tensor,
    hca_rows: Tensor,
    positions: Tensor,
    slots: Tensor,
    row_start: Tensor,
    closing: Tensor,
    window: int,
    ring: int,
    ratio: int,
    capacity: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Window plus every visible HCA row. entry [C, D] are the rows the tokens `closing` [C] complete; hca_rows are
    linear, `capacity` a slot. Returns out, the window ring, the HCA rows."""
    slot, row, real = _completed(positions, slots, closing, ratio)
    target = torch.where(real, slot * capacity + row.clamp(max=capacity - 1), 0)
    hca_after = scatter_rows(hca_rows, target, entry)
    rows = torch.arange(capacity)[None, :]
    visible = rows < ((positions + 1) // ratio)[:, None]
    own = kv[:, None, :]
    heavy = torch.where(visible[:, :, None], take(hca_after, slots[:, None] * capacity + rows), own)
    keys, valid = gather_recent(kv, window_rows, positions, slots, row_start, count=window, ring=ring)
    out = sink_attention(q, torch.cat([keys, heavy], dim=1), torch.cat([valid, visible], dim=1), sink, scale)
    window_after = scatter_rows(window_rows, ring_targets(positions, slots, row_start, ring=ring), kv)
    return out, window_after, hca_after


def nsa_csa(
    q: Tensor,
    kv: Tensor,
    entry: Tensor,
    index_q: Tensor,
    index_weight: Tensor,
    index_entry: Tensor,
    sink: Tensor,
    window_rows: Tensor,
    compressed_rows: Tensor,
    index_rows: Tensor,
    positions: Tensor,
    slots: Tensor,
    row_start: Tensor,
    closing: Tensor,
    page_table: Tensor,
    window: int,
    ring: int,
    ratio: int,
    rows_per_page: int,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Window plus the top-k compressed rows by indexer score.

    index_q [N, HI, I], index_weight [N, HI]; entry [C, D] and index_entry [C, I] are the rows the tokens `closing` [C]
    complete (-1 fills up).
    Returns out [N, H, D], the window ring, the compressed rows, the indexer rows.
    """
    slot, row, real = _completed(positions, slots, closing, ratio)
    target = torch.where(real, page_rows(page_table, slot, row, rows_per_page=rows_per_page), 0)
    compressed_after = scatter_rows(compressed_rows, target, entry)
    index_after = scatter_rows(index_rows, target, index_entry)

    rows = torch.arange(page_table.shape[1] * rows_per_page)[None, :].expand(q.shape[0], -1)
    visible = rows < ((positions + 1) // ratio)[:, None]
    physical = page_rows(page_table, slots, rows, rows_per_page=rows_per_page)
    scores = indexer_scores(index_q, index_weight, take(index_after, physical))
    scores = torch.where(visible, scores, MASKED)
    padding = torch.full((scores.shape[0], top_k), MASKED)
    chosen = exact_topk(torch.cat([scores, padding], dim=1), top_k)
    seen = chosen < ((positions + 1) // ratio)[:, None]
    chosen = torch.where(seen, chosen, 0)
    selected = take(compressed_after, page_rows(page_table, slots, chosen, rows_per_page=rows_per_page))
    selected = torch.where(seen[:, :, None], selected, kv[:, None, :])

    keys, valid = gather_recent(kv, window_rows, positions, slots, row_start, count=window, ring=ring)
    out = sink_attention(q, torch.cat([keys, selected], dim=1), torch.cat([valid, seen], dim=1), sink, scale)
    window_after = scatter_rows(window_rows, ring_targets(positions, slots, row_start, ring=ring), kv)
    return out, window_after, compressed_after, index_after


def nsa_block(
    q: Tensor,
    kv: Tensor,
    sink: Tensor,
    context_rows: Tensor,
    position: Tensor,
    slot: Tensor,
    valid_from: Tensor,
    window: int,
    ring: int,
    scale: float,
) -> Tensor:
    """A draft block of G rows per request, q [R*G, H, D], kv [R*G, D], over its context and itself, both directions.

    Context rows are those of positions max(0, P-window) .. P-1 with P = position [R], cut to valid_from[slot]; every
    row of the block sees the same context and the whole block. Returns out [R*G, H, D]; nothing is written.
    """
    requests = position.shape[0]
    gamma = q.shape[0] // requests
    wanted = position[:, None] - torch.arange(window, 0, -1)[None, :]
    seen = wanted >= valid_from[slot].clamp(min=0)[:, None]
    own = kv.reshape(requests, gamma, -1)
    context = take(context_rows, slot[:, None] * ring + torch.where(seen, wanted, 0) % ring)
    context = torch.where(seen[:, :, None], context, own[:, :1])
    keys = torch.cat([context, own], dim=1)
    valid = torch.cat([seen, torch.ones_like(own[:, :, 0], dtype=torch.bool)], dim=1)
    queries = q.reshape(requests, gamma * q.shape[1], q.shape[2])
    out = sink_attention(queries, keys, valid, sink.repeat(gamma), scale)
    return out.reshape(q.shape)


def token_rows(positions: Tensor, slots: Tensor, page_table: Tensor, *, rows_per_page: int) -> Tensor:
    """Physical row of each token [N]; scratch for a token beyond the table."""
    held = positions < page_table.shape[1] * rows_per_page
    return torch.where(held, page_rows(page_table, slots, positions[:, None], rows_per_page=rows_per_page)[:, 0], 0)


def best_rows(scores: Tensor, positions: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The top-k rows up to each token's own position by scores [N, K], and which of them there are: both [N, top_k]."""
    rows = torch.arange(scores.shape[1])[None, :]
    scores = torch.where(rows <= positions[:, None], scores, MASKED)
    padding = torch.full((scores.shape[0], top_k), MASKED)
    chosen = exact_topk(torch.cat([scores, padding], dim=1), top_k)
    seen = chosen <= positions[:, None]
    return torch.where(seen, chosen, 0), seen


def latent_attention(q: Tensor, keys: Tensor, seen: Tensor, value_size: int, scale: float) -> Tensor:
    """q [N, H, L+R] over each token's own keys [N, K, L+R] where seen [N, K]; the first L features are the values."""
    logits = torch.where(seen[:, None, :], torch.matmul(q, keys.transpose(1, 2)) * scale, MASKED)
    return torch.matmul(torch.softmax(logits, dim=-1), keys[:, :, :value_size])


def nsa_mla(
    q: Tensor,
    row: Tensor,
    index_q: Tensor,
    index_weight: Tensor,
    index_row: Tensor,
    latent_rows: Tensor,
    index_rows: Tensor,
    positions: Tensor,
    slots: Tensor,
    page_table: Tensor,
    value_size: int,
    rows_per_page: int,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Absorbed MLA over the top-k rows of a paged latent cache, one row a token, its own among the candidates.

    q [N, H, L+R] and row [N, L+R] are latent and rotary features side by side, L = value_size; a row's first L features
    are its value. index_q [N, HI, I], index_weight [N, HI], index_row [N, I]. Up to `top_k` tokens every row is chosen:
    dense attention is no case of its own. A token beyond the table (a draft that nobody will verify) is kept nowhere
    and reads what the table holds. Returns out [N, H, L], the latent rows, the indexer rows.
    """
    target = token_rows(positions, slots, page_table, rows_per_page=rows_per_page)
    latent_after = scatter_rows(latent_rows, target, row)
    index_after = scatter_rows(index_rows, target, index_row)

    rows = torch.arange(page_table.shape[1] * rows_per_page)[None, :].expand(q.shape[0], -1)
    physical = page_rows(page_table, slots, rows, rows_per_page=rows_per_page)
    scores = indexer_scores(index_q, index_weight, take(index_after, physical))
    chosen, seen = best_rows(scores, positions, top_k)
    keys = take(latent_after, page_rows(page_table, slots, chosen, rows_per_page=rows_per_page))
    keys = torch.where(seen[:, :, None], keys, row[:, None, :])
    return latent_attention(q, keys, seen, value_size, scale), latent_after, index_after


def nsa_mla_fp8_index(
    q: Tensor,
    row: Tensor,
    index_q: Tensor,
    index_weight: Tensor,
    index_row: Tensor,
    latent_rows: Tensor,
    index_pages: Tensor,
    positions: Tensor,
    slots: Tensor,
    page_table: Tensor,
    value_size: int,
    rows_per_page: int,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`nsa_mla` with index queries and keys in fp8 (`index_keys.py`): index_pages u8 [pages, rows_per_page * (I + 4)].

    index_q and index_row come rotated and not yet quantised. A token's own key, too, is the one that was stored.
    """
    target = token_rows(positions, slots, page_table, rows_per_page=rows_per_page)
    latent_after = scatter_rows(latent_rows, target, row)
    index_after = write_pages(index_pages, target, index_row, rows_per_page)

    query, query_scale = quantised(index_q)
    keys, key_scale = read_pages(index_after, page_table[slots], rows_per_page)
    scores = indexer_scores(query, index_weight * query_scale, keys) * key_scale
    chosen, seen = best_rows(scores, positions, top_k)
    keys = take(latent_after, page_rows(page_table, slots, chosen, rows_per_page=rows_per_page))
    keys = torch.where(seen[:, :, None], keys, row[:, None, :])
    return latent_attention(q, keys, seen, value_size, scale), latent_after, index_after
