"""markov_head as a torch op."""

from __future__ import annotations

import torch

from twostroke.plugins.markov_head import reference
from twostroke.plugins.op import Op


def _shapes(base_logits, *_):
    requests, gamma, _vocab = base_logits.shape
    return (
        base_logits.new_empty(requests, gamma, dtype=torch.int32),
        base_logits.new_empty(base_logits.shape),
        base_logits.new_empty(requests, gamma),
    )


MARKOV_PICKS = Op("markov_picks", reference.markov_picks, _shapes)
OPS = (MARKOV_PICKS,)
