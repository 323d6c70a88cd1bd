"""Sequential picks against a loop."""

from __future__ import annotations

import numpy as np
import torch

from twostroke.plugins.markov_head.reference import markov_picks
from twostroke.tests.plugins.flat_inputs import normal

R, G, V, D, RANK = 3, 4, 11, 6, 2


def tensors() -> dict[str, torch.Tensor]:
    return {
        "base_logits": normal(0, R, G, V),
        "hidden": normal(1, R, G, D),
        "anchor": torch.tensor([3, 0, 10]),
        "w1": normal(2, V, RANK) * 2,
        "w2": normal(3, V, RANK) * 2,
        "confidence_proj": normal(4, 1, D + RANK),
        "inverse_temperature": torch.ones(R),
        "noise": torch.zeros(R, G, V),
    }


def test_each_pick_is_biased_by_the_one_before_it_and_the_first_by_the_anchor() -> None:
    given = tensors()
    tokens, logits, confidence = markov_picks(**given)
    assert tokens.dtype == torch.int32
    w1, w2 = given["w1"].numpy(), given["w2"].numpy()
    unbiased_differ = False
    for r in range(R):
        previous = int(given["anchor"][r])
        for k in range(G):
            row = given["base_logits"][r, k].numpy() + w2 @ w1[previous]
            feature = np.concatenate([given["hidden"][r, k].numpy(), w1[previous]])
            np.testing.assert_allclose(logits[r, k], row, atol=1e-5)
            expected = 1 / (1 + np.exp(-float(given["confidence_proj"][0].numpy() @ feature)))
            np.testing.assert_allclose(confidence[r, k], expected, atol=1e-5)
            previous = int(tokens[r, k])
            assert previous == int(np.argmax(row))
            unbiased_differ |= previous != int(given["base_logits"][r, k].argmax())
    assert unbiased_differ


def test_noise_and_temperature_enter_the_pick_only() -> None:
    given = tensors()
    given["inverse_temperature"] = torch.tensor([1.0, 0.5, 4.0])
    given["noise"] = -torch.log(-torch.log(torch.rand(R, G, V, generator=torch.Generator().manual_seed(1))))
    tokens, logits, _ = markov_picks(**given)
    picked = (logits * given["inverse_temperature"][:, None, None] + given["noise"]).argmax(dim=-1)
    assert torch.equal(tokens.long(), picked)


def test_gumbel_noise_samples_the_softmax() -> None:
    """20,000 draws of one row: frequencies within 4 standard errors of softmax(logits / T)."""
    count, base = 20_000, normal(9, 5)
    tokens, logits, _ = markov_picks(
        base.expand(count, 1, 5),
        torch.zeros(count, 1, D),
        torch.zeros(count, dtype=torch.int64),
        torch.zeros(5, RANK),
        torch.zeros(5, RANK),
        torch.zeros(1, D + RANK),
        torch.full((count,), 1.5),
        -torch.log(-torch.log(torch.rand(count, 1, 5, generator=torch.Generator().manual_seed(2)))),
    )
    expected = torch.softmax(logits[0, 0] * 1.5, dim=0).numpy()
    found = np.bincount(tokens[:, 0].numpy(), minlength=5) / count
    assert (np.abs(found - expected) < 4 * np.sqrt(expected * (1 - expected) / count)).all()


def test_tied_picks_go_to_the_lowest_id() -> None:
    given = tensors()
    given["base_logits"] = torch.zeros(R, G, V)
    given["w2"] = torch.zeros(V, RANK)
    assert (markov_picks(**given)[0] == 0).all()
