"""A folder with a DSpark draft of a dense target, explained: its headers are held to its config.

Names and shapes as the training repository writes them (`spec/dspark.md` section 14).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from twostroke.builder.checkpoint import Checkpoint, TensorEntry, read_entries
from twostroke.builder.dense_draft_config import DenseDraftConfig, is_dense_draft, read_dense_draft
from twostroke.builder.inventory import WEIGHT_DTYPES, TensorSpec, markov_head_tensors
from twostroke.builder.strict_json import read_json_object, shown_list
from twostroke.engines.errors import CheckpointError, ConfigError

_LAYER = re.compile(r"layers\.(\d{1,6})\..+", re.DOTALL)
_HEADS = ("markov_head.", "confidence_head.")
# The target's own, which a draft may carry a copy of.
_COPIES = ("embed_tokens.weight", "lm_head.weight")


def holds_dense_draft(folder: Path) -> bool:
    """Whether the folder's config.json says so. Raises ConfigError if it cannot be read."""
    return is_dense_draft(_config_values(folder))


def open_dense_draft(folder: Path) -> Checkpoint:
    """The folder's tensors, checked against its config; `config` is a DenseDraftConfig.

    The layers' own tensors are counted and not checked: their shapes are those of a network that is not built here.
    Raises ConfigError or CheckpointError.
    """
    config = read_dense_draft(_config_values(folder), str(folder / "config.json"))
    entries = read_entries(folder)
    found = sorted({int(match[1]) for name in entries if (match := _LAYER.fullmatch(name))})
    if found != list(range(config.num_hidden_layers)):
        raise CheckpointError(
            f"{folder} holds layers {shown_list(map(str, found)) or 'none'}; its config promises num_hidden_layers = "
            f"{config.num_hidden_layers} of them"
        )
    checkpoint = Checkpoint(folder, config, entries)
    checkpoint.skip("layers.")
    checkpoint.check([*draft_tensors(config), *_copies(config, entries)])
    return checkpoint


def draft_tensors(config: DenseDraftConfig) -> Iterator[TensorSpec]:
    """What every such draft has beside its layers: the context projection, the final norm and the heads."""
    D, rank = config.hidden_size, config.markov_rank
    context = len(config.target_layer_ids) * config.target_hidden_size
    yield TensorSpec("fc.weight", (D, context), WEIGHT_DTYPES)
    yield TensorSpec("hidden_norm.weight", (D,), WEIGHT_DTYPES)
    yield TensorSpec("norm.weight", (D,), WEIGHT_DTYPES)
    if config.markov_head_type is not None:
        sizes = {"vocab": config.vocab_size, "draft_vocab": config.draft_vocab_size, "rank": rank, "hidden": D}
        yield from markov_head_tensors("markov_head.", config.markov_head_type, **sizes)
    if config.enable_confidence_head:
        width = D + (rank if config.confidence_head_with_markov else 0)
        yield TensorSpec("confidence_head.proj.weight", (1, width), WEIGHT_DTYPES)
        yield TensorSpec("confidence_head.proj.bias", (1,), WEIGHT_DTYPES)
    if config.draft_vocab_size < config.vocab_size:
        yield TensorSpec("d2t", (config.draft_vocab_size,), ("I64", "I32"))


def describe(folder: Path) -> dict[str, Any]:
    """What `twostroke inspect` tells of the folder. Raises as `open_dense_draft`."""
    checkpoint = open_dense_draft(folder)
    config: DenseDraftConfig = checkpoint.config
    of = "" if config.num_target_layers is None else f" of {config.num_target_layers}"
    layers = ", ".join("embedding" if layer < 0 else str(layer) for layer in config.target_layer_ids)
    head = "none" if config.markov_head_type is None else f"{config.markov_head_type}, rank {config.markov_rank}"
    heads = {name: list(entry.shape) for name, entry in checkpoint.entries.items() if name.startswith(_HEADS)}
    return {
        "draft_folder": str(folder),
        "model_type": config.base,
        "format": "speculators" if config.speculators else "own config",
        "build": "not supported: dense targets are not built; the folder is only explained",
        "draft": "dspark",
        "draft_block_size": config.draft_len,
        "block": _block(config),
        "target_layers": f"{layers}{of}",
        "markov_head": head,
        "confidence_head": _confidence(config),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
        "tensors": len(checkpoint.entries),
        "head_tensors": heads,
        "bytes": _bytes(checkpoint.entries),
    }


def _config_values(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / "config.json", ConfigError, limit=1 << 24)


def _copies(config: DenseDraftConfig, entries: Mapping[str, TensorEntry]) -> Iterator[TensorSpec]:
    """What a draft may have and need not: copies of the target's embedding and head, maps between the vocabularies."""
    V, D = config.vocab_size, config.hidden_size
    optional = (
        TensorSpec("embed_tokens.weight", (V, D), WEIGHT_DTYPES),
        TensorSpec("lm_head.weight", (config.draft_vocab_size, D), WEIGHT_DTYPES),
        TensorSpec("t2d", (V,), ("BOOL",)),
    )
    yield from (spec for spec in optional if spec.name in entries)
    if config.draft_vocab_size == V and "d2t" in entries:
        yield TensorSpec("d2t", (V,), ("I64", "I32"))


def _block(config: DenseDraftConfig) -> str:
    rows = f"{config.block_size} rows: the anchor and {config.block_size - 1} of token {config.mask_token_id}"
    return f"{rows}; {'every row predicts a token' if config.sample_from_anchor else 'the anchor row is dropped'}"


def _confidence(config: DenseDraftConfig) -> str:
    if not config.enable_confidence_head:
        return "none"
    return "of the hidden row and the token before" if config.confidence_head_with_markov else "of the hidden row"


def _bytes(entries: Mapping[str, TensorEntry]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, entry in entries.items():
        part = "heads" if name.startswith(_HEADS) else "copies" if name in _COPIES else "draft"
        found[part] = found.get(part, 0) + entry.nbytes
    return found
