"""nsa as torch ops."""

from __future__ import annotations

from typing import Any

from twostroke.plugins.nsa import reference
from twostroke.plugins.op import Op


def _like(*tensors: Any) -> Any:
    return tuple(t.new_empty(t.shape) for t in tensors)


NSA_WINDOW = Op(
    "nsa_window",
    reference.nsa_window,
    lambda q, kv, sink, window_rows, positions, slots, row_start, window, ring, scale: _like(q, window_rows),
)


def _hca(q, kv, entry, sink, window_rows, hca_rows, *_):
    return _like(q, window_rows, hca_rows)


def _csa(q, kv, entry, iq, iw, ientry, sink, window_rows, compressed_rows, index_rows, *_):
    return _like(q, window_rows, compressed_rows, index_rows)


NSA_HCA = Op("nsa_hca", reference.nsa_hca, _hca)
NSA_CSA = Op("nsa_csa", reference.nsa_csa, _csa)
NSA_BLOCK = Op("nsa_block", reference.nsa_block, lambda q, *_: q.new_empty(q.shape))


def _mla(q, row, iq, iw, irow, latent_rows, index_rows, positions, slots, page_table, value_size, *_):
    return q.new_empty(q.shape[0], q.shape[1], value_size), *_like(latent_rows, index_rows)


NSA_MLA = Op("nsa_mla", reference.nsa_mla, _mla)
NSA_MLA_FP8_INDEX = Op("nsa_mla_fp8_index", reference.nsa_mla_fp8_index, _mla)
OPS = (NSA_WINDOW, NSA_HCA, NSA_CSA, NSA_BLOCK, NSA_MLA, NSA_MLA_FP8_INDEX)
