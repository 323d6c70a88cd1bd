"""moe as torch ops."""

from __future__ import annotations

import torch

from twostroke.plugins.moe import reference
from twostroke.plugins.op import Op


def _routed(x, top_k):
    return x.new_empty(x.shape[0], top_k, dtype=torch.int64), x.new_empty(x.shape[0], top_k, dtype=torch.float32)


MOE_ROUTE = Op("moe_route", reference.moe_route, lambda x, gate, bias, top_k, scaling: _routed(x, top_k))
MOE_ROUTE_HASH = Op(
    "moe_route_hash",
    reference.moe_route_hash,
    lambda x, gate, token_ids, experts_of_token, scaling: _routed(x, experts_of_token.shape[1]),
)
MOE_ROUTE_GROUPED = Op(
    "moe_route_grouped",
    reference.moe_route_grouped,
    lambda x, gate, bias, groups, top_groups, top_k, scaling: _routed(x, top_k),
)
MOE_EXPERTS = Op("moe_experts", reference.moe_experts, lambda x, ids, weights, w1, w2, w3, limit: x.new_empty(x.shape))
MOE_EXPERTS_FP4 = Op("moe_experts_fp4", reference.moe_experts_fp4, lambda x, *_: x.new_empty(x.shape))
MOE_EXPERTS_FP8 = Op("moe_experts_fp8", reference.moe_experts_fp8, lambda x, *_: x.new_empty(x.shape))
OPS = (MOE_ROUTE, MOE_ROUTE_HASH, MOE_ROUTE_GROUPED, MOE_EXPERTS, MOE_EXPERTS_FP4, MOE_EXPERTS_FP8)
