"""Plain torch specification of moe. Shapes: x [N, D], gate [E, D], w1 and w3 [E, F, D], w2 [E, D, F].

Quantised banks are u8, codes [E, O, K] or packed codes [E, O, K/2], beside scales of `quantised`'s blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from twostroke.plugins.flat_step import exact_topk, take
from twostroke.plugins.quantised.reference import dequantise_fp4, dequantise_fp8

Dequantise = Callable[[Tensor, Tensor], Tensor]  # codes, scale -> fp32 matrix


def _scores(x: Tensor, gate: Tensor) -> Tensor:
    return torch.sqrt(torch.nn.functional.softplus(torch.nn.functional.linear(x.float(), gate.float())))


def _normalised(scores: Tensor, ids: Tensor, scaling: float) -> Tensor:
    chosen = scores.gather(1, ids)
    return chosen / (chosen.sum(dim=1, keepdim=True) + 1e-20) * scaling


def moe_route(x: Tensor, gate: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Learned routing: ids [N, k] (i64), weights [N, k]. bias [E] takes part in the selection only."""
    scores = _scores(x, gate)
    ids = exact_topk(scores + bias, top_k)
    return ids, _normalised(scores, ids, scaling)


def moe_route_hash(
    x: Tensor, gate: Tensor, token_ids: Tensor, experts_of_token: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Hash routing: the experts of a token id are a table, experts_of_token [V, k]; their weights are still learned."""
    ids = take(experts_of_token, token_ids).long()
    return ids, _normalised(_scores(x, gate), ids, scaling)


def moe_route_grouped(
    x: Tensor, gate: Tensor, bias: Tensor, groups: int, top_groups: int, top_k: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Sigmoid routing within the best groups: ids [N, k] (i64), weights [N, k]. Groups are consecutive experts.

    A group's score is the sum of its two largest biased scores; experts of the other groups are at -inf, not at zero,
    since a biased score may be negative. bias [E] takes part in the selections only.
    """
    scores = torch.sigmoid(torch.nn.functional.linear(x.float(), gate.float()))
    grouped = (scores + bias).reshape(-1, groups, gate.shape[0] // groups)
    best = grouped.gather(2, exact_topk(grouped, 2)).sum(dim=2)
    kept = (exact_topk(best, top_groups)[:, :, None] == torch.arange(groups)).any(dim=1)
    ids = exact_topk(torch.where(kept[:, :, None], grouped, -torch.inf).reshape(-1, gate.shape[0]), top_k)
    return ids, _normalised(scores, ids, scaling)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit): the clamp acts before the activation. No clamp at infinity."""
    if math.isinf(limit):
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


def moe_experts(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    """Weighted sum of the chosen experts, [N, D].

    This form computes every expert on every token and keeps the chosen ones: a verify step of a few requests hits most
    experts anyway, and rows never depend on how the others were routed. Unchosen results are dropped by selection, not
    multiplied by zero.
    """
    experts = w1.shape[0]
    inner = swiglu(torch.matmul(x[None], w1.transpose(1, 2)), torch.matmul(x[None], w3.transpose(1, 2)), limit)
    each = torch.matmul(inner, w2.transpose(1, 2))
    chosen = ids[:, :, None] == torch.arange(experts)
    weight = torch.where(chosen, weights[:, :, None], 0.0).sum(dim=1)
    hit = chosen.any(dim=1)
    picked = torch.where(hit.t()[:, :, None], each * weight.t()[:, :, None], 0.0)
    return picked.sum(dim=0)


def moe_experts_fp8(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w3: Tensor,
    w3_scale: Tensor,
    limit: float,
) -> Tensor:
    """`moe_experts` over fp8 banks, scales [E, ceil(O / 128), ceil(K / 128)]; only picked experts are dequantised."""
    banks = (w1, w1_scale, w2, w2_scale, w3, w3_scale)
    return picked_experts(dequantise_fp8, x, ids, weights, banks, limit)


def moe_experts_fp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w3: Tensor,
    w3_scale: Tensor,
    limit: float,
) -> Tensor:
    """`moe_experts` over packed fp4 banks, scales [E, O, ceil(K / 32)]; only picked experts are dequantised."""
    banks = (w1, w1_scale, w2, w2_scale, w3, w3_scale)
    return picked_experts(dequantise_fp4, x, ids, weights, banks, limit)


def picked_experts(
    dequantise: Dequantise,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    banks: Sequence[Tensor],
    limit: float,
) -> Tensor:
    """Weighted sum of the picked experts, [N, D], one expert at a time; banks [E, ...] of w1, w2 and w3, each as codes
    and scale."""
    total = torch.zeros_like(x)
    for expert in torch.unique(ids):  # ascending
        total = add_expert(dequantise, total, x, ids, weights, expert, [bank[expert] for bank in banks], limit)
    return total


def add_expert(
    dequantise: Dequantise,
    total: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert: Tensor,
    stored: Sequence[Tensor],
    limit: float,
) -> Tensor:
    """`total` [N, D] and, in the rows that chose it, the share of expert number `expert` [] (i64), whose w1, w2 and w3
    are `stored` as codes and scale each. Every row is computed: none depends on how the others were routed."""
    linear = torch.nn.functional.linear
    w1, w2, w3 = (dequantise(codes, scale) for codes, scale in zip(stored[::2], stored[1::2], strict=True))
    each = linear(swiglu(linear(x, w1), linear(x, w3), limit), w2)
    chosen = ids == expert
    weight = torch.where(chosen, weights, 0.0).sum(dim=1, keepdim=True)
    return torch.where(chosen.any(dim=1, keepdim=True), total + each * weight, total)
