"""Plain torch specification of the markov head.

Shapes: base_logits and noise [R, G, V], hidden [R, G, D], anchor [R], w1 and w2 [V, r], inverse_temperature [R]. Every
op returns tokens [R, G] (i32) and biased logits [R, G, V].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from twostroke.plugins.flat_step import take


def markov_picks(
    base_logits: Tensor, anchor: Tensor, w1: Tensor, w2: Tensor, inverse_temperature: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Vanilla: the bias depends on the token before alone."""

    def latent(k: int, embedded: Tensor) -> Tensor:
        return embedded

    return _pick(base_logits, anchor, w1, w2, inverse_temperature, noise, latent)


def markov_picks_gated(
    base_logits: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    w1: Tensor,
    w2: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    inverse_temperature: Tensor,
    noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gated: the hidden row scales the embedding's features. gate_weight [r, D + r], gate_bias [r]."""

    def latent(k: int, embedded: Tensor) -> Tensor:
        gate = _linear(torch.cat([hidden[:, k], embedded], dim=1), gate_weight) + gate_bias
        return torch.sigmoid(gate) * embedded

    return _pick(base_logits, anchor, w1, w2, inverse_temperature, noise, latent)


def markov_picks_rnn(
    base_logits: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    w1: Tensor,
    w2: Tensor,
    joint_weight: Tensor,
    joint_bias: Tensor,
    inverse_temperature: Tensor,
    noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """Recurrent: the bias depends on all tokens of the block so far. joint_weight [3r, 2r + D], joint_bias [3r]."""
    rank = w1.shape[1]
    state = hidden.new_zeros(hidden.shape[0], rank)

    def latent(k: int, embedded: Tensor) -> Tensor:
        nonlocal state
        joint = _linear(torch.cat([state, embedded, hidden[:, k]], dim=1), joint_weight) + joint_bias
        keep, candidate, output = joint.split(rank, dim=1)
        keep = torch.sigmoid(keep)
        state = keep * state + (1 - keep) * torch.tanh(candidate)
        return torch.tanh(output)

    return _pick(base_logits, anchor, w1, w2, inverse_temperature, noise, latent)


def confidence(hidden: Tensor, embedded: Tensor | None, proj: Tensor, bias: Tensor | None) -> Tensor:
    """[R, G]: the chance that a pick is kept if those before it are. embedded [R, G, r] are rows of w1, None where the
    head reads the hidden row alone; proj [1, D + r] or [1, D]; bias [1]."""
    feature = hidden if embedded is None else torch.cat([hidden, embedded], dim=2)
    # Not a matrix product: those round a row as it stands among others, and a confidence decides what is verified.
    logit = (feature * proj).sum(dim=2)
    return torch.sigmoid(logit if bias is None else logit + bias)


def _pick(
    base_logits: Tensor,
    anchor: Tensor,
    w1: Tensor,
    w2: Tensor,
    inverse_temperature: Tensor,
    noise: Tensor,
    latent: Callable[[int, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """G picks from left to right; `latent(k, w1 row of the token before [R, r])` [R, r] is what w2 turns into B_k."""
    previous = anchor
    tokens, logits = [], []
    for k in range(base_logits.shape[1]):
        biased = base_logits[:, k] + _linear(latent(k, take(w1, previous)), w2)
        previous = torch.argmax(biased * inverse_temperature[:, None] + noise[:, k], dim=1)
        logits.append(biased)
        tokens.append(previous)
    return torch.stack(tokens, dim=1).to(torch.int32), torch.stack(logits, dim=1)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T with one row more than needed: matrix kernels round a lone row differently, and R may be 1."""
    return torch.nn.functional.linear(torch.cat([x, x[:1]]), weight)[:-1]
