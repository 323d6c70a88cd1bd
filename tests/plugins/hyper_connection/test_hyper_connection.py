"""Hyper-connections: the formula, which way the mix runs, and what Sinkhorn leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twostroke.plugins.hyper_connection.reference import hc_head, hc_post, hc_pre
from twostroke.tests.plugins.flat_inputs import normal

M, D, N, EPS = 4, 6, 5, 1e-6


def inputs(m: int = M) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four different streams, and fn, base, scale."""
    mixes = (2 + m) * m
    return normal(0, N, m, D), normal(1, mixes, m * D) * 0.3, normal(2, mixes) * 0.5, normal(3, 3)


def by_hand(row: int, iterations: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a, post and C of one token, written out."""
    streams, fn, base, scale = (x.double().numpy() for x in inputs())
    x = streams[row].reshape(-1)
    mixed = fn @ x / np.sqrt((x**2).mean() + EPS)
    sigmoid = lambda v: 1 / (1 + np.exp(-v))  # noqa: E731
    pre = sigmoid(mixed[:M] * scale[0] + base[:M]) + EPS
    post = 2 * sigmoid(mixed[M : 2 * M] * scale[1] + base[M : 2 * M])
    comb = np.zeros((M, M))
    for j in range(M):
        logits = [mixed[2 * M + j * M + k] * scale[2] + base[2 * M + j * M + k] for k in range(M)]
        comb[j] = np.exp(logits) / np.exp(logits).sum() + EPS
    comb = comb / (comb.sum(axis=0) + EPS)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(axis=1, keepdims=True) + EPS)
        comb = comb / (comb.sum(axis=0) + EPS)
    return sum(pre[j] * streams[row, j] for j in range(M)), post, comb


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_mixing_is_the_formula(iterations: int) -> None:
    a, post, comb = hc_pre(*inputs(), iterations, EPS, EPS)
    for row in range(N):
        for found, expected in zip((a[row], post[row], comb[row]), by_hand(row, iterations), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("m", [2, 3, 4])
def test_sinkhorn_leaves_columns_of_one_and_rows_near_it(m: int) -> None:
    _, _, comb = hc_pre(*inputs(m), 20, EPS, EPS)
    assert (comb > 0).all()
    torch.testing.assert_close(comb.sum(dim=1), torch.ones(N, m), rtol=0, atol=1e-5)
    torch.testing.assert_close(comb.sum(dim=2), torch.ones(N, m), rtol=0, atol=1e-3)


def test_streams_mix_over_the_first_index() -> None:
    """X'_k = post_k y + sum_j C[j, k] X_j. With four different streams the transposed mix is a different answer."""
    streams, *rest = inputs()
    _, post, comb = hc_pre(streams, *rest, 20, EPS, EPS)
    y = normal(4, N, D)
    found = hc_post(y, streams, post, comb)
    for n in range(N):
        for k in range(M):
            expected = post[n, k] * y[n] + sum(comb[n, j, k] * streams[n, j] for j in range(M))
            torch.testing.assert_close(found[n, k], expected)
    transposed = hc_post(y, streams, post, comb.transpose(1, 2))
    assert (found - transposed).abs().max() > 0.1
    same = streams[:, :1].expand(-1, M, -1)
    assert (hc_post(y, same, post, comb) - hc_post(y, same, post, comb.transpose(1, 2))).abs().max() < 1e-3, (
        "equal streams would not have told the two apart"
    )


def test_the_head_collapses_with_its_own_weights() -> None:
    streams = normal(0, N, M, D)
    fn, base, scale = normal(5, M, M * D) * 0.3, normal(6, M), normal(7, 1)
    found = hc_head(streams, fn, base, scale, EPS, EPS)
    for n in range(N):
        x = streams[n].reshape(-1)
        pre = torch.sigmoid(fn @ x / torch.sqrt(x.square().mean() + EPS) * scale[0] + base) + EPS
        torch.testing.assert_close(found[n], (pre[:, None] * streams[n]).sum(dim=0))
