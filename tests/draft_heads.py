"""A small V4 with each markov head, and each way its confidence can be read or be missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twostroke.tests.checkpoints import F4

# A window layer and a CSA layer, both tapped, so two draft stages: the heads lie in the second.
_SMALL: Mapping[str, Any] = {
    **F4,
    "num_hidden_layers": 2,
    "compress_ratios": [0, 4, 0, 0],
    "dspark_target_layer_ids": [0, 1],
}
HEADS: Mapping[str, Mapping[str, Any]] = {
    "gated": {**_SMALL, "dspark_markov_head_type": "gated"},
    "rnn": {**_SMALL, "dspark_markov_head_type": "rnn", "confidence_head_with_markov": False},
    "vanilla": {**_SMALL, "dspark_markov_head_type": "vanilla", "enable_confidence_head": False},
}
