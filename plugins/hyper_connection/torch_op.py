"""hyper_connection as torch ops."""

from __future__ import annotations

from twostroke.plugins.hyper_connection import reference
from twostroke.plugins.op import Op


def _pre_shapes(streams, fn, base, scale, iterations, eps, norm_eps):
    n, m, d = streams.shape
    return streams.new_empty(n, d), streams.new_empty(n, m), streams.new_empty(n, m, m)


HC_PRE = Op("hc_pre", reference.hc_pre, _pre_shapes)
HC_POST = Op("hc_post", reference.hc_post, lambda y, streams, post, comb: streams.new_empty(streams.shape))
HC_HEAD = Op(
    "hc_head",
    reference.hc_head,
    lambda streams, fn, base, scale, eps, norm_eps: streams.new_empty(streams.shape[0], streams.shape[2]),
)
OPS = (HC_PRE, HC_POST, HC_HEAD)
