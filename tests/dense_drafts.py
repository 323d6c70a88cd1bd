"""Toy drafts of dense targets, as the training repository writes them and as a "speculators" export."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from twostroke.builder.dense_draft_config import read_dense_draft
from twostroke.builder.dense_draft_folder import draft_tensors
from twostroke.tests.checkpoints import with_overrides, write_tensors

TOY_DRAFT: Mapping[str, Any] = {
    "block_size": 5,
    "target_layer_ids": [1, 3, 6],
    "mask_token_id": 31,
    "num_target_layers": 8,
    "markov_rank": 4,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
TOY: Mapping[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "hidden_size": 16,
    "vocab_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "num_anchors": 512,
    **TOY_DRAFT,
}
SPECULATORS: Mapping[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "block_size": 8,
    "aux_hidden_state_layer_ids": [2, 6],
    "mask_token_id": 31,
    "draft_vocab_size": 32,
    "markov_rank": 4,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "transformer_layer_config": {"model_type": "qwen3", "hidden_size": 16, "vocab_size": 32, "num_hidden_layers": 2},
}
Tensors = dict[str, torch.Tensor]


def write_dense_draft(
    folder: Path,
    config: Mapping[str, Any] = TOY,
    *,
    edit: Callable[[Tensors], None] = lambda tensors: None,
    **overrides: Any,
) -> Path:
    """config.json and tensors of zeros: what a header says is all that is read of them."""
    folder.mkdir(parents=True, exist_ok=True)
    values = with_overrides(config, **overrides)
    (folder / "config.json").write_text(json.dumps(values))
    parsed = read_dense_draft(values, "config.json")
    tensors: Tensors = {f"layers.{i}.mlp.up_proj.weight": torch.zeros(32, 16) for i in range(parsed.num_hidden_layers)}
    for spec in draft_tensors(parsed):
        tensors[spec.name] = torch.zeros(spec.shape, dtype=torch.int64 if spec.name == "d2t" else torch.bfloat16)
    edit(tensors)
    write_tensors(folder, tensors, shards=1)
    return folder
