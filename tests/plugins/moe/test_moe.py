"""Routing and experts against loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from twostroke.plugins.moe.reference import moe_experts, moe_route, moe_route_grouped, moe_route_hash, swiglu
from twostroke.tests.plugins.flat_inputs import normal

N, D, F, E, K = 9, 6, 5, 7, 3


def scores_by_hand(x: torch.Tensor, gate: torch.Tensor) -> np.ndarray:
    logits = x.double().numpy() @ gate.double().numpy().T
    return np.sqrt(np.log1p(np.exp(logits)))


def test_the_bias_selects_and_never_weighs() -> None:
    x, gate, bias = normal(0, N, D), normal(1, E, D), normal(2, E)
    ids, weights = moe_route(x, gate, bias, K, 1.5)
    scores = scores_by_hand(x, gate)
    for n in range(N):
        order = sorted(range(E), key=lambda e: (-(scores[n, e] + float(bias[e])), e))[:K]
        assert ids[n].tolist() == order
        share = scores[n, order] / scores[n, order].sum() * 1.5
        np.testing.assert_allclose(weights[n], share, atol=1e-6)
    unbiased, _ = moe_route(x, gate, torch.zeros(E), K, 1.5)
    assert (unbiased != ids).any(), "the bias changed nothing here"


def test_tied_experts_go_to_the_lowest_index() -> None:
    """Experts 1, 4 and 5 share a gate row, and all scores tie for a zero input."""
    gate = normal(1, E, D)
    gate[4] = gate[5] = gate[1]
    ids, _ = moe_route(torch.cat([torch.zeros(1, D), gate[1:2] * 3]), gate, torch.zeros(E), K, 1.0)
    assert ids[0].tolist() == [0, 1, 2]
    assert ids[1].tolist()[:3] == [1, 4, 5]


def test_hash_routing_reads_the_experts_of_the_token_and_learns_their_weights() -> None:
    x, gate = normal(3, N, D), normal(4, E, D)
    table = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(i))[:K] for i in range(20)])
    tokens = torch.tensor([0, 19, 3, 3, 7, 1, 0, 2, 11])
    ids, weights = moe_route_hash(x, gate, tokens, table.int(), 2.5)
    scores = scores_by_hand(x, gate)
    for n, token in enumerate(tokens.tolist()):
        assert ids[n].tolist() == table[token].tolist()
        chosen = scores[n, table[token].numpy()]
        np.testing.assert_allclose(weights[n], chosen / chosen.sum() * 2.5, atol=1e-6)


def grouped_by_hand(scores: np.ndarray, bias: np.ndarray, groups: int, top_groups: int, k: int) -> list[int]:
    """Best groups by their two largest biased scores, then the best experts among them; lowest index on ties."""
    biased, size = scores + bias, len(scores) // groups
    worth = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: (-worth[g], g))[:top_groups]
    inside = [e for e in range(len(scores)) if e // size in kept]
    return sorted(inside, key=lambda e: (-biased[e], e))[:k]


@pytest.mark.parametrize(("experts", "groups", "top_groups", "k"), [(12, 4, 2, 3), (8, 2, 1, 4), (6, 1, 1, 3)])
def test_grouped_routing_takes_the_best_experts_of_the_best_groups(
    experts: int, groups: int, top_groups: int, k: int
) -> None:
    x, gate, bias = normal(0, 60, D), normal(1, experts, D), normal(2, experts)
    ids, weights = moe_route_grouped(x, gate, bias, groups, top_groups, k, 2.5)
    scores = 1 / (1 + np.exp(-(x.double().numpy() @ gate.double().numpy().T)))
    for n in range(60):
        order = grouped_by_hand(scores[n], bias.double().numpy(), groups, top_groups, k)
        assert ids[n].tolist() == order
        np.testing.assert_allclose(weights[n], scores[n, order] / scores[n, order].sum() * 2.5, atol=1e-6)
    torch.testing.assert_close(weights.sum(dim=1), torch.full((60,), 2.5))
    unbiased, _ = moe_route_grouped(x, gate, torch.zeros(experts), groups, top_groups, k, 2.5)
    assert (unbiased != ids).any(), "the bias changed nothing here"


def test_negative_biased_scores_never_let_a_masked_group_in() -> None:
    """With -10 on every expert all biased scores are below zero: groups left out stand at -inf, not at zero."""
    x, gate = normal(3, 60, D), normal(4, 12, D)
    low, _ = moe_route_grouped(x, gate, torch.full((12,), -10.0), 4, 2, 5, 1.0)
    plain, _ = moe_route_grouped(x, gate, torch.zeros(12), 4, 2, 5, 1.0)
    assert (low.sort(dim=1).values == plain.sort(dim=1).values).float().mean() > 0.99  # -10 rounds the last bits off
    assert all(len({int(e) // 3 for e in row}) <= 2 for row in low)


def test_tied_groups_and_experts_go_to_the_lowest_index() -> None:
    ids, weights = moe_route_grouped(torch.zeros(1, D), normal(1, 12, D), torch.zeros(12), 4, 2, 4, 1.0)
    assert ids[0].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(weights[0], torch.full((4,), 0.25))


def test_an_infinite_limit_clamps_nothing() -> None:
    gate, up = torch.tensor([-90.0, 90.0, 3.0]), torch.tensor([-90.0, 9.0, -200.0])
    torch.testing.assert_close(swiglu(gate, up, math.inf), gate * torch.sigmoid(gate) * up)


def test_the_gate_is_clamped_above_only_and_before_the_activation() -> None:
    gate, up = torch.tensor([-9.0, -1.0, 9.0, 1.0]), torch.tensor([-9.0, 9.0, 1.0, -1.0])
    silu = lambda v: v / (1 + math.exp(-v))  # noqa: E731
    expected = [silu(-9.0) * -2.0, silu(-1.0) * 2.0, silu(2.0) * 1.0, silu(1.0) * -1.0]
    np.testing.assert_allclose(swiglu(gate, up, 2.0), expected, rtol=1e-6)


@pytest.fixture
def bank() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return normal(5, E, F, D), normal(6, E, D, F), normal(7, E, F, D)


def test_the_result_is_the_weighted_sum_of_the_chosen_experts(bank: tuple[torch.Tensor, ...]) -> None:
    w1, w2, w3 = bank
    x = normal(8, N, D)
    ids, weights = moe_route(x, normal(1, E, D), normal(2, E), K, 1.5)
    found = moe_experts(x, ids, weights, w1, w2, w3, 2.0)
    for n in range(N):
        expected = torch.zeros(D)
        for e, share in zip(ids[n].tolist(), weights[n], strict=True):
            gate, up = (w1[e] @ x[n]).clamp(max=2.0), (w3[e] @ x[n]).clamp(-2.0, 2.0)
            expected += share * (w2[e] @ (gate * torch.sigmoid(gate) * up))
        torch.testing.assert_close(found[n], expected, rtol=1e-4, atol=1e-5)


def test_an_expert_nobody_chose_cannot_spoil_the_result(bank: tuple[torch.Tensor, ...]) -> None:
    """Results are dropped by selection: an infinite or NaN row of another expert stays outside."""
    w1, w2, w3 = bank
    w2[0] = torch.nan
    x = normal(8, 2, D)
    found = moe_experts(x, torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 2), w1, w2, w3, 2.0)
    assert torch.isfinite(found).all()


def test_a_row_does_not_depend_on_how_others_were_routed(bank: tuple[torch.Tensor, ...]) -> None:
    w1, w2, w3 = bank
    x = normal(8, N, D)
    ids, weights = moe_route(x, normal(1, E, D), normal(2, E), K, 1.5)
    whole = moe_experts(x, ids, weights, w1, w2, w3, 2.0)
    other = ids.clone()
    other[1:] = torch.tensor([4, 5, 6])
    torch.testing.assert_close(moe_experts(x, other, weights, w1, w2, w3, 2.0)[0], whole[0], rtol=0, atol=0)
