"""markov_head as torch ops."""

from __future__ import annotations

import torch

from twostroke.plugins.markov_head import reference
from twostroke.plugins.op import Op


def _shapes(base_logits, *_):
    requests, gamma, _vocab = base_logits.shape
    return base_logits.new_empty(requests, gamma, dtype=torch.int32), base_logits.new_empty(base_logits.shape)


MARKOV_PICKS = Op("markov_picks", reference.markov_picks, _shapes)
MARKOV_PICKS_GATED = Op("markov_picks_gated", reference.markov_picks_gated, _shapes)
MARKOV_PICKS_RNN = Op("markov_picks_rnn", reference.markov_picks_rnn, _shapes)
OPS = (MARKOV_PICKS, MARKOV_PICKS_GATED, MARKOV_PICKS_RNN)
