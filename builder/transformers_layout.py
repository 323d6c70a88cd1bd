"""DeepSeek-V4 as transformers writes it: other names for tensors and some config fields, and all experts in one tensor.

    model.layers.L.mlp.experts.gate_up_proj [E, 2F, D]     w1 of expert 0, w3 of expert 0, w1 of expert 1, ...
    model.layers.L.mlp.experts.down_proj    [E, D, F]      w2 of expert 0, ...

Rows are stored one after the other, so an expert's matrix is a range of the bank's bytes: all tensors become entries of
the original layout without touching a byte. Names: `spec/deepseek_v4.md` section 10.2. The library drops drafters.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from twostroke.builder.checkpoint import TensorEntry
from twostroke.builder.config import HEADS
from twostroke.builder.strict_json import named, shown
from twostroke.engines.errors import CheckpointError, ConfigError

# Parts of a name behind `model.layers.L.`, the longer ones first: (transformers, original).
_PARTS = (
    ("input_layernorm.", "attn_norm."),
    ("post_attention_layernorm.", "ffn_norm."),
    ("attn_hc.", "hc_attn_"),
    ("ffn_hc.", "hc_ffn_"),
    ("self_attn.q_a_proj.", "attn.wq_a."),
    ("self_attn.q_a_norm.", "attn.q_norm."),
    ("self_attn.q_b_proj.", "attn.wq_b."),
    ("self_attn.kv_proj.", "attn.wkv."),
    ("self_attn.kv_norm.", "attn.kv_norm."),
    ("self_attn.o_a_proj.", "attn.wo_a."),
    ("self_attn.o_b_proj.", "attn.wo_b."),
    ("self_attn.sinks", "attn.attn_sink"),
    ("self_attn.compressor.indexer.q_b_proj.", "attn.indexer.wq_b."),
    ("self_attn.compressor.indexer.scorer.weights_proj.", "attn.indexer.weights_proj."),
    ("self_attn.compressor.indexer.", "attn.indexer.compressor."),
    ("self_attn.compressor.", "attn.compressor."),
    ("mlp.gate.e_score_correction_bias", "ffn.gate.bias"),
    ("mlp.gate.", "ffn.gate."),
    ("mlp.shared_experts.gate_proj.", "ffn.shared_experts.w1."),
    ("mlp.shared_experts.down_proj.", "ffn.shared_experts.w2."),
    ("mlp.shared_experts.up_proj.", "ffn.shared_experts.w3."),
)
_COMPRESSOR = {"kv_proj.weight": "wkv.weight", "gate_proj.weight": "wgate.weight", "position_bias": "ape"} | {
    "kv_norm.weight": "norm.weight"
}
_TOP = {
    "model.embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "norm.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}
_LAYER = re.compile(r"model\.(layers\.\d{1,6}\.)(.+)", re.DOTALL)
_BANKS = {"mlp.experts.gate_up_proj": ("w1", "w3"), "mlp.experts.down_proj": ("w2",)}

# Fields that transformers writes with every config and that ask nothing of the model.
HARMLESS = (
    *("output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("id2label", "label2id", "problem_type"),
)


def in_original_names(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries under the names of the original layout; unchanged where none has a name of transformers.

    A name that is no tensor of either layout is kept, for the check that names it. Raises CheckpointError for a bank
    that is none, and where both layouts have a tensor.
    """
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        for original, part in _original(name, entry):
            if original in found:
                raise CheckpointError(f"tensor {named(original)} is there twice, once as {named(name)}")
            found[original] = part
    return found


def _original(name: str, entry: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
    match = _LAYER.fullmatch(name)
    if match is None:
        yield _TOP.get(name, name), entry
        return
    layer, rest = match.groups()
    if rest in _BANKS:
        yield from _experts(f"{layer}ffn.experts.", name, entry, _BANKS[rest])
        return
    for theirs, ours in _PARTS:
        if rest.startswith(theirs):
            leaf = rest.removeprefix(theirs)
            if ours.endswith("compressor."):
                leaf = _COMPRESSOR.get(leaf, leaf)
            yield f"{layer}{ours}{leaf}", entry
            return
    yield name, entry


def _experts(
    prefix: str, name: str, entry: TensorEntry, matrices: tuple[str, ...]
) -> Iterator[tuple[str, TensorEntry]]:
    """Each expert's matrices out of a bank [E, matrices * rows, columns]."""
    if len(entry.shape) != 3 or 0 in entry.shape or entry.shape[1] % len(matrices):
        expected = f"[experts, {'2 * ' if len(matrices) == 2 else ''}rows, columns]"
        raise CheckpointError(f"tensor {named(name)} has shape {list(entry.shape)}; expected {expected}")
    experts, rows, columns = entry.shape[0], entry.shape[1] // len(matrices), entry.shape[2]
    size = entry.nbytes // (experts * len(matrices))
    for number in range(experts * len(matrices)):
        expert, which = divmod(number, len(matrices))
        part = dataclasses.replace(entry, offset=entry.offset + number * size, nbytes=size, shape=(rows, columns))
        yield f"{prefix}{expert}.{matrices[which]}.weight", part


def in_original_fields(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A V4 config with the fields of the original layout in place of `compress_rates`, `mlp_layer_types` and
    `partial_rotary_factor`. A field that is there in both spellings must say the same. Raises ConfigError."""
    found = dict(values)

    def put(name: str, value: object, source: str) -> None:
        if name in values and values[name] != value:
            raise ConfigError(
                f"{where}: field {name} is {shown(values[name])}, but {source} means {shown(value)}; keep one of "
                "the two"
            )
        found[name] = value

    if "compress_rates" in found:
        rates, types = found.pop("compress_rates"), values.get("layer_types")
        if not isinstance(rates, Mapping) or not isinstance(types, list):
            raise ConfigError(
                f"{where}: field compress_rates is {shown(rates)}; expected an object of layer type -> tokens a row, "
                "beside a list layer_types"
            )
        ratios = [rates.get(kind, 0) if isinstance(kind, str) else 0 for kind in types]
        stated = values.get("compress_ratios")
        if not isinstance(stated, list) or stated[: len(ratios)] != ratios:
            put("compress_ratios", ratios, "compress_rates with layer_types")
    if "mlp_layer_types" in found:
        types = found.pop("mlp_layer_types")
        hashed = types.count("hash_moe") if isinstance(types, list) else -1
        layers = values.get("num_hidden_layers")
        if hashed < 0 or types != ["hash_moe"] * hashed + ["moe"] * (len(types) - hashed) or len(types) != layers:
            raise ConfigError(
                f"{where}: field mlp_layer_types is {shown(types)}; expected hash_moe for the first layers and moe for "
                f"the others, num_hidden_layers = {shown(layers)} in all"
            )
        put("num_hash_layers", hashed, "mlp_layer_types")
    if "partial_rotary_factor" in found:
        share, size = found.pop("partial_rotary_factor"), values.get("head_dim")
        fits = isinstance(share, int | float) and 0 < share <= 1 and isinstance(size, int) and 0 < size <= HEADS[1]
        if not fits:
            raise ConfigError(
                f"{where}: field partial_rotary_factor is {shown(share)}; expected a share of head_dim, above 0 and at "
                "most 1"
            )
        put("qk_rope_head_dim", round(share * size), "partial_rotary_factor")
    for name in HARMLESS:
        found.pop(name, None)
    return found
