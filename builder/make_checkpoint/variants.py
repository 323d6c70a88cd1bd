"""Smaller and cut forms of a named model: the same network with other numbers in its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.builder.config import parse_config
from twostroke.builder.inventory import TensorSpec
from twostroke.builder.make_checkpoint.named_models import NamedModel
from twostroke.builder.networks.registry import TARGETS
from twostroke.engines.errors import ConfigError

DTYPES = ("release", "bf16", "f32")
_QUANTISATION_FIELDS = ("quantization_config", "expert_dtype")
_DRAFT_FIELDS = "dspark_"

# Field -> (multiple it stays of, least value). Packed FP4 rows and their scales want multiples of 32.
_SIZES: Mapping[str, tuple[int, int]] = {
    "hidden_size": (32, 64),
    "head_dim": (32, 32),
    "qk_rope_head_dim": (8, 8),
    "qk_nope_head_dim": (16, 16),
    "v_head_dim": (16, 16),
    "q_lora_rank": (32, 32),
    "kv_lora_rank": (32, 32),
    "o_lora_rank": (32, 32),
    "o_groups": (1, 2),
    "index_n_heads": (2, 2),
    "index_topk": (4, 8),
    "intermediate_size": (32, 64),
    "moe_intermediate_size": (32, 32),
    "n_routed_experts": (8, 16),  # eight groups of two or more in V3.2, six or eight picks
    "dspark_markov_rank": (8, 8),
    "vocab_size": (32, 320),
}
_LEAST_INDEX_HEAD = 16


@dataclass(frozen=True)
class Variant:
    """What to write: the fields of config.json and every tensor, each in the first of its dtypes."""

    values: Mapping[str, Any]
    config: Any
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)


def variant(
    model: NamedModel,
    *,
    scale: float = 1.0,
    layers: Sequence[int] | None = None,
    draft: bool = True,
    dtype: str = "release",
) -> Variant:
    """`model` with its widths, heads, experts, vocabulary and layers times `scale`, at least what one of every kind of
    layer needs; `layers` of the release are kept instead of the first ones. Raises ConfigError."""
    if not 0 < scale <= 1:
        raise ConfigError(f"--scale is {scale}; expected a number above 0, at most 1")
    values = dict(model.config)
    depth = values["num_hidden_layers"]
    if layers is None:
        least = 5 if "compress_ratios" in values else 2  # V4: window, CSA by hash, HCA and CSA by router
        kept = list(range(max(least, round(depth * scale))))
    else:
        kept = list(layers)
        if not kept or kept != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < depth:
            raise ConfigError(
                f"--layers is {','.join(map(str, layers))}; expected ascending layers of the release, 0 to {depth - 1},"
                " each once"
            )
    dense = values.get("first_k_dense_replace", 0)
    if layers is None and dense:
        dense = max(1, round(dense * scale))
    _scale_sizes(values, scale)
    _cut(values, kept, dense)
    if not draft:
        _drop_draft(values)
    if dtype != "release":
        values = {name: value for name, value in values.items() if name not in _QUANTISATION_FIELDS}
        values["torch_dtype"] = {"bf16": "bfloat16", "f32": "float32"}[dtype]
    config = parse_config(values, "config.json")
    listed = TARGETS[config.model_type].all_tensors(config)
    kept_specs = [spec for spec in listed if model.stores_copies or spec.copy_of is None]
    if dtype == "f32":
        kept_specs = [TensorSpec(s.name, s.shape, _f32(s.dtypes), s.copy_of) for s in kept_specs]
    return Variant(values, config, tuple(kept_specs))


def _f32(dtypes: tuple[str, ...]) -> tuple[str, ...]:
    return ("F32",) if "F32" in dtypes else dtypes


def _scale_sizes(values: dict[str, Any], scale: float) -> None:
    if scale == 1:
        return
    full = dict(values)
    for name, (multiple, least) in _SIZES.items():
        if name in values:
            values[name] = max(least, round(full[name] * scale / multiple) * multiple)
    heads, groups = full["num_attention_heads"], values.get("o_groups", 2)
    values["num_attention_heads"] = max(2, round(heads * scale / groups)) * groups
    if full["num_key_value_heads"] != 1:
        values["num_key_value_heads"] = values["num_attention_heads"]
    size = full["index_head_dim"]
    while size > max(full["index_head_dim"] * scale, _LEAST_INDEX_HEAD, values["qk_rope_head_dim"]):
        size //= 2  # a power of two: index keys in fp8 are rotated by a Hadamard matrix
    values["index_head_dim"] = size
    if "dspark_noise_token_id" in values:
        values["dspark_noise_token_id"] = full["dspark_noise_token_id"] * values["vocab_size"] // full["vocab_size"]


def _cut(values: dict[str, Any], kept: Sequence[int], dense: int) -> None:
    """Keeps the layers `kept`, renumbered; the first `dense` layers, and those that route by hash, stay that."""
    depth, count = values["num_hidden_layers"], len(kept)
    values["num_hidden_layers"] = count
    if "first_k_dense_replace" in values:
        values["first_k_dense_replace"] = sum(layer < dense for layer in kept)
    if "num_hash_layers" in values:
        values["num_hash_layers"] = sum(layer < values["num_hash_layers"] for layer in kept)
    if "compress_ratios" in values:
        ratios = values["compress_ratios"]
        stages = min(len(ratios) - depth, count)
        values["compress_ratios"] = [ratios[layer] for layer in kept] + [0] * stages
    if "dspark_target_layer_ids" in values:
        stages = min(len(values["dspark_target_layer_ids"]), count)
        values["dspark_target_layer_ids"] = list(range(count - stages, count))  # the last layers, as in the release


def _drop_draft(values: dict[str, Any]) -> None:
    values["num_nextn_predict_layers"] = 0
    for name in [name for name in values if name.startswith(_DRAFT_FIELDS)]:
        del values[name]
    if "compress_ratios" in values:
        values["compress_ratios"] = values["compress_ratios"][: values["num_hidden_layers"]]
