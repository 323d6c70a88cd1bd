"""Plain torch specification of markov_picks. Shapes: base_logits [R, G, V], hidden [R, G, D], w1 and w2 [V, r]."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.plugins.flat_step import take


def markov_picks(
    base_logits: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    w1: Tensor,
    w2: Tensor,
    confidence_proj: Tensor,
    inverse_temperature: Tensor,
    noise: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens [R, G] (i32), biased logits [R, G, V], confidence [R, G].

    anchor [R], confidence_proj [1, D + r], inverse_temperature [R], noise [R, G, V].
    """
    previous = anchor
    tokens, logits, confidence = [], [], []
    for k in range(base_logits.shape[1]):
        embedded = take(w1, previous)
        # One row more than needed: matrix kernels round a lone row differently, and R may be 1.
        bias = torch.nn.functional.linear(torch.cat([embedded, embedded[:1]]), w2)[:-1]
        biased = base_logits[:, k] + bias
        feature = torch.cat([hidden[:, k], embedded], dim=1)
        confidence.append((feature * confidence_proj).sum(dim=1))
        previous = torch.argmax(biased * inverse_temperature[:, None] + noise[:, k], dim=1)
        logits.append(biased)
        tokens.append(previous)
    return (
        torch.stack(tokens, dim=1).to(torch.int32),
        torch.stack(logits, dim=1),
        torch.sigmoid(torch.stack(confidence, dim=1)),
    )
