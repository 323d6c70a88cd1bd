"""Plain torch specification of hc_pre, hc_post and hc_head. Shapes: streams [N, m, D], fn [(2+m)m, m*D]."""

from __future__ import annotations

import torch
from torch import Tensor


def _mixes(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    x = streams.flatten(1)
    return torch.nn.functional.linear(x, fn) / torch.sqrt(x.square().mean(-1, keepdim=True) + norm_eps)


def _weighted_sum(pre: Tensor, streams: Tensor) -> Tensor:
    return torch.matmul(pre[:, None, :], streams).squeeze(1)


def hc_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sublayer input a [N, D], post [N, m] and the mixing matrix C [N, m, m] (row = source stream)."""
    m = streams.shape[1]
    part = torch.tensor([0] * m + [1] * m + [2] * m * m)
    mixes = _mixes(streams, fn, norm_eps) * scale[part] + base
    pre, post, comb = mixes.split([m, m, m * m], dim=1)
    comb = torch.softmax(comb.reshape(-1, m, m), dim=-1) + eps
    comb = comb / (comb.sum(dim=1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(dim=2, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=1, keepdim=True) + eps)
    return _weighted_sum(torch.sigmoid(pre) + eps, streams), 2.0 * torch.sigmoid(post), comb


def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'[k] = post[k] y + sum_j C[j, k] X_j, [N, m, D]. y [N, D]."""
    return post[:, :, None] * y[:, None, :] + torch.matmul(comb.transpose(1, 2), streams)


def hc_head(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, norm_eps: float) -> Tensor:
    """Collapse of the streams after the last layer, [N, D]. fn [m, m*D], base [m], scale [1]."""
    pre = torch.sigmoid(_mixes(streams, fn, norm_eps) * scale[0] + base) + eps
    return _weighted_sum(pre, streams)
