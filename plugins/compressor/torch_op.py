"""compressor as a torch op."""

from __future__ import annotations

from twostroke.plugins.compressor import reference
from twostroke.plugins.op import Op


def _shapes(kv, gate, ape, raw, positions, slots, row_start, closing, ratio, overlap, ring):
    width = kv.shape[1] // 2 if overlap else kv.shape[1]
    return kv.new_empty(closing.shape[0], width), raw.new_empty(raw.shape)


COMPRESS = Op("compress", reference.compress, _shapes)
OPS = (COMPRESS,)
