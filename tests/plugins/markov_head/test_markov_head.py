"""Sequential picks and their confidence against a loop in numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from twostroke.plugins.markov_head.reference import confidence, markov_picks, markov_picks_gated, markov_picks_rnn
from twostroke.tests.markov_loop import bias_of, confidences, greedy_block
from twostroke.tests.plugins.flat_inputs import normal

R, G, V, D, RANK = 3, 4, 11, 6, 2
PICKS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "vanilla": markov_picks,
    "gated": markov_picks_gated,
    "rnn": markov_picks_rnn,
}
# Argument -> the name behind `markov_head.` in a checkpoint.
NAMES = {
    "w1": "markov_w1.weight",
    "w2": "markov_w2.weight",
    "gate_weight": "gate_proj.weight",
    "gate_bias": "gate_proj.bias",
    "joint_weight": "joint_proj.weight",
    "joint_bias": "joint_proj.bias",
}


def tensors(kind: str) -> dict[str, Tensor]:
    """Arguments of the picks of a head type."""
    given = {
        "base_logits": normal(0, R, G, V),
        "anchor": torch.tensor([3, 0, 10]),
        "w1": normal(2, V, RANK) * 2,
        "w2": normal(3, V, RANK) * 2,
        "inverse_temperature": torch.ones(R),
        "noise": torch.zeros(R, G, V),
    }
    if kind == "gated":
        given |= {"gate_weight": normal(5, RANK, D + RANK), "gate_bias": normal(6, RANK)}
    if kind == "rnn":
        given |= {"joint_weight": normal(5, 3 * RANK, 2 * RANK + D), "joint_bias": normal(6, 3 * RANK)}
    return given if kind == "vanilla" else given | {"hidden": normal(1, R, G, D)}


def head_of(given: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: given[argument].numpy() for argument, name in NAMES.items() if argument in given}


@pytest.mark.parametrize("kind", PICKS)
def test_each_pick_is_biased_by_the_ones_before_it_and_the_first_by_the_anchor(kind: str) -> None:
    given = tensors(kind)
    tokens, logits = PICKS[kind](**given)
    assert tokens.dtype == torch.int32
    hidden = given.get("hidden", torch.zeros(R, G, D))
    for r in range(R):
        expected, rows = greedy_block(head_of(given), given["base_logits"][r], hidden[r], int(given["anchor"][r]))
        assert tokens[r].tolist() == expected
        np.testing.assert_allclose(logits[r], rows, atol=1e-5)
    added = (logits - given["base_logits"]).abs().amax(dim=2)
    assert (added > 0.05).all(), "at every position, the first included"
    assert (tokens != given["base_logits"].argmax(dim=2)).any()


def test_the_state_of_an_rnn_head_starts_at_zero_and_carries_the_block() -> None:
    """With the tokens of a block given, its third bias differs from what any state but the carried one would give."""
    given = tensors("rnn")
    tokens, logits = markov_picks_rnn(**given)
    head, hidden = head_of(given), given["hidden"][0].numpy()
    embedded = head["markov_w1.weight"][[3, *tokens[0, :2].tolist()]]
    state, zero = np.zeros(RANK), np.zeros(RANK)
    for k in range(3):
        bias, after = bias_of(head, embedded[k], hidden[k], state)
        np.testing.assert_allclose(logits[0, k] - given["base_logits"][0, k], bias, atol=1e-5)
        forgetful = bias_of(head, embedded[k], hidden[k], zero)[0]
        assert (np.abs(forgetful - bias).max() > 1e-2) == (k > 0)
        state = after


@pytest.mark.parametrize("kind", PICKS)
def test_noise_and_temperature_enter_the_pick_only(kind: str) -> None:
    given = tensors(kind)
    given["inverse_temperature"] = torch.tensor([1.0, 0.5, 4.0])
    given["noise"] = -torch.log(-torch.log(torch.rand(R, G, V, generator=torch.Generator().manual_seed(1))))
    tokens, logits = PICKS[kind](**given)
    picked = (logits * given["inverse_temperature"][:, None, None] + given["noise"]).argmax(dim=-1)
    assert torch.equal(tokens.long(), picked)


@pytest.mark.parametrize("kind", PICKS)
def test_a_request_is_picked_for_as_if_it_were_alone(kind: str) -> None:
    given = tensors(kind)
    together = PICKS[kind](**given)
    per_request = ("base_logits", "hidden", "anchor", "inverse_temperature", "noise")
    for r in range(R):
        alone = PICKS[kind](**{name: v[r : r + 1] if name in per_request else v for name, v in given.items()})
        assert torch.equal(alone[0][0], together[0][r])
        torch.testing.assert_close(alone[1][0], together[1][r])


def test_gumbel_noise_samples_the_softmax() -> None:
    """20,000 draws of one row: frequencies within 4 standard errors of softmax(logits / T)."""
    count, base = 20_000, normal(9, 5)
    tokens, logits = markov_picks(
        base.expand(count, 1, 5),
        torch.zeros(count, dtype=torch.int64),
        torch.zeros(5, RANK),
        torch.zeros(5, RANK),
        torch.full((count,), 1.5),
        -torch.log(-torch.log(torch.rand(count, 1, 5, generator=torch.Generator().manual_seed(2)))),
    )
    expected = torch.softmax(logits[0, 0] * 1.5, dim=0).numpy()
    found = np.bincount(tokens[:, 0].numpy(), minlength=5) / count
    assert (np.abs(found - expected) < 4 * np.sqrt(expected * (1 - expected) / count)).all()


@pytest.mark.parametrize("kind", PICKS)
def test_tied_picks_go_to_the_lowest_id(kind: str) -> None:
    given = tensors(kind)
    given["base_logits"] = torch.zeros(R, G, V)
    given["w2"] = torch.zeros(V, RANK)
    assert (PICKS[kind](**given)[0] == 0).all()


@pytest.mark.parametrize("with_bias", [False, True], ids=["v4", "dense"])
@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_reads_hidden_and_the_token_before_with_and_without_bias(with_markov: bool, with_bias: bool) -> None:
    hidden, w1, tokens = normal(1, R, G, D), normal(2, V, RANK), torch.randint(0, V, (R, G))
    anchor = torch.tensor([3, 0, 10])
    proj = normal(4, 1, D + RANK if with_markov else D)
    embedded = w1[torch.cat([anchor[:, None], tokens[:, :-1]], dim=1)] if with_markov else None
    found = confidence(hidden, embedded, proj, torch.tensor([0.7]) if with_bias else None)
    for r in range(R):
        expected = confidences(
            proj,
            hidden[r],
            w1 if with_markov else None,
            int(anchor[r]),
            tokens[r].tolist(),
            bias=0.7 if with_bias else 0.0,
        )
        np.testing.assert_allclose(found[r], expected, atol=1e-6)
