"""The heads of a DSpark draft: the one that picks its tokens from left to right, and the one that says how sure it is.

Formulas in `plugins/markov_head`. Parameters carry their checkpoint names behind `markov_head.` and `confidence_head.`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from twostroke.builder.networks.layers import Affine, Linear
from twostroke.plugins.markov_head.reference import confidence
from twostroke.plugins.markov_head.torch_op import MARKOV_PICKS, MARKOV_PICKS_GATED, MARKOV_PICKS_RNN

Picks = tuple[Tensor, Tensor]
"""tokens [R, G] (i32), biased logits [R, G, V]."""


class MarkovHead(nn.Module):
    """Vanilla: markov_w1 [V, r] embeds the token before, markov_w2 [V, r] scores the next."""

    def __init__(self, vocab: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.markov_w1 = Linear(rank, vocab)
        self.markov_w2 = Linear(rank, vocab)

    def forward(
        self, base: Tensor, hidden: Tensor, anchor: Tensor, inverse_temperature: Tensor, noise: Tensor
    ) -> Picks:
        """base [R, G, V], hidden [R, G, D], anchor and inverse_temperature [R], noise [R, G, V]."""
        w1, w2 = self.markov_w1.weight, self.markov_w2.weight
        return MARKOV_PICKS.overload(base, anchor, w1, w2, inverse_temperature, noise)


class GatedMarkovHead(MarkovHead):
    """gate_proj D+r -> r: how much of each feature of the token before the hidden row lets through."""

    def __init__(self, vocab: int, rank: int, hidden: int) -> None:
        super().__init__(vocab, rank, hidden)
        self.gate_proj = Affine(hidden + rank, rank)

    def forward(
        self, base: Tensor, hidden: Tensor, anchor: Tensor, inverse_temperature: Tensor, noise: Tensor
    ) -> Picks:
        w1, w2, gate = self.markov_w1.weight, self.markov_w2.weight, self.gate_proj
        return MARKOV_PICKS_GATED.overload(
            base, hidden, anchor, w1, w2, gate.weight, gate.bias, inverse_temperature, noise
        )


class RnnMarkovHead(MarkovHead):
    """joint_proj 2r+D -> 3r: a state of r features runs through the block."""

    def __init__(self, vocab: int, rank: int, hidden: int) -> None:
        super().__init__(vocab, rank, hidden)
        self.joint_proj = Affine(2 * rank + hidden, 3 * rank)

    def forward(
        self, base: Tensor, hidden: Tensor, anchor: Tensor, inverse_temperature: Tensor, noise: Tensor
    ) -> Picks:
        w1, w2, joint = self.markov_w1.weight, self.markov_w2.weight, self.joint_proj
        return MARKOV_PICKS_RNN.overload(
            base, hidden, anchor, w1, w2, joint.weight, joint.bias, inverse_temperature, noise
        )


MARKOV_HEADS: Mapping[str, type[MarkovHead]] = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RnnMarkovHead}


class ConfidenceHead(nn.Module):
    """proj [1, width], no bias, as V4 has it; width D + r, or D where the head reads the hidden row alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = Linear(width, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """hidden [R, G, D], embedded [R, G, r] -> [R, G]."""
        return confidence(hidden, embedded, self.proj.weight, None)
