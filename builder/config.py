"""A checkpoint's config.json as frozen dataclasses: what every family shares, and the fields of DeepSeek-V4.

Every field is read, checked and accounted for: a missing one, a wrong type or range, a value that is not implemented
and a name that is not known are errors. Nothing falls back to built-in values. `model_type` chooses the family in
`networks.registry.TARGETS`. V4's field names are those of the V4-Flash-0731 config.json (`spec/deepseek_v4.md`
section 2).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from twostroke.builder.strict_json import Fields, read_json_object, shown
from twostroke.engines.errors import ConfigError

SLIDING = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
LAYER_TYPES = (SLIDING, CSA, HCA)
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")

# Fields of which one value is implemented. A config without them means that value: the model type implies it.
ONLY_VALUE: Mapping[str, Any] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "first_k_dense_replace": 0,
}

ONLY_NOTE: Mapping[str, str] = {
    "tie_word_embeddings": ": store head.weight beside embed.weight and set this field to false",
}

# Fields that are read by nobody here, and why that changes no result.
HARMLESS: Mapping[str, str] = {
    "architectures": "names a class of another library; model_type decides",
    "auto_map": "points to Python code in the folder, which is never executed",
    "transformers_version": "who wrote the file",
    "_name_or_path": "where the file came from",
    "initializer_range": "training only",
    "attention_dropout": "training only",
    "router_aux_loss_coef": "training only",
    "router_jitter_noise": "training only",
    "output_router_logits": "asks another library for extra outputs",
    "use_cache": "the runtime always keeps its state",
    "pad_token_id": "padding is addressed by slot, never by token id",
}

UNSUPPORTED_MODEL_TYPES: Mapping[str, str] = {
    "deepseek_v41": "V4.1 is a different network (single-pass hyper-connections, engram, ratios 1 and 2)",
    "deepseek_v41_text": "V4.1 is a different network (single-pass hyper-connections, engram, ratios 1 and 2)",
}

SIZE = (1, 1 << 24)
"""Range of every dimension."""
HEADS = (1, 1 << 16)
"""Range of numbers of heads and of their sizes: rope tables are made of the latter, and products must fit 64 bits."""
LAYERS = (1, 512)
EXPERTS = (1, 1024)
MOST_EXPERTS = 1 << 15
"""Routed experts of all layers together: each is several tensors that are listed one by one."""
DSPARK_BLOCKS = (1, 64)
"""Range of a DSpark block."""

FP8_BLOCK = 128
"""Weights per scale along both axes of an FP8 matrix."""
FP4_GROUP = 32
"""Weights per scale along a row of an FP4 matrix."""

QUANTISATION: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    "activation_scheme": "dynamic",
}
"""`quantization_config` of every release. What it says of activations concerns kernels that quantise them; results are
those of unquantised activations. Which tensors are left out of it, their dtypes say."""

_Reading = TypeVar("_Reading")


class ModelConfig(Protocol):
    """What the build asks of any family's config."""

    model_type: ClassVar[str]
    scale_suffix: ClassVar[str]  # X.<suffix> beside a quantised X.weight

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def bos_token_id(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def quantised(self) -> bool: ...

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """A word for each layer, for people."""


@dataclass(frozen=True)
class RopeScaling:
    """YaRN. No attention factor: cos and sin are not rescaled. V4 applies it to layers with a compressor only.

    V3.2 multiplies the softmax scale by (0.1 * mscale * ln(factor) + 1)^2, V4 does not: `mscale` 0.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float = 0.0


@dataclass(frozen=True)
class DSparkConfig:
    """The DSpark drafter stored as `mtp.0` .. `mtp.{stages-1}` (`spec/dspark.md` section 2.1)."""

    block_size: int  # G, tokens drafted per iteration; also the number of draft input rows
    noise_token_id: int  # embedded in rows 1..G-1
    target_layer_ids: tuple[int, ...]  # 0-based target layers whose outputs are the taps, in tap order
    markov_rank: int
    markov_head_type: str = "vanilla"  # of MARKOV_HEAD_TYPES
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    @property
    def stages(self) -> int:
        """Draft stages: one per tapped layer. `num_nextn_predict_layers` says 1 in the release and is misleading."""
        return len(self.target_layer_ids)


@dataclass(frozen=True)
class DeepseekV4Config:
    """One DeepSeek-V4 target and, where the checkpoint has one, its DSpark drafter."""

    model_type: ClassVar[str] = "deepseek_v4"
    scale_suffix: ClassVar[str] = "scale"

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]  # [num_hidden_layers], 0 where the layer has no compressor
    layer_types: tuple[str, ...]  # [num_hidden_layers], of LAYER_TYPES; 0 in compress_ratios is SLIDING
    compress_rope_theta: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    num_hash_layers: int
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    torch_dtype: str
    num_nextn_predict_layers: int  # NextN blocks the config promises; means nothing when `dspark` is set
    dspark: DSparkConfig | None
    quantised: bool = False  # FP8 linears and FP4 experts, as released; else floats

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The layer types."""
        return self.layer_types


def load_config(folder: Path | str) -> Any:
    """The config of the checkpoint in `folder`, of its family's class.

    Raises ConfigError in one sentence for every way it cannot be used.
    """
    folder = Path(folder)
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist; expected a checkpoint folder")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file; expected a checkpoint folder that holds config.json")
    path = folder / "config.json"
    return parse_config(read_json_object(path, ConfigError, limit=1 << 24), str(path))


def parse_config(values: Mapping[str, Any], where: str) -> Any:
    """A config.json object, checked, as the class of its family. `where` names the file in errors. Raises ConfigError.

    The result is a `ModelConfig`; which one, only the file knows.
    """
    from twostroke.builder.dense_draft_config import is_dense_draft, refuse_to_build
    from twostroke.builder.networks.registry import TARGETS  # here: networks are written in terms of this module

    if is_dense_draft(values):
        raise refuse_to_build(values, where, TARGETS)
    fields = Fields(values, where)
    if "model_type" not in values and {"dim", "n_layers"} <= values.keys():
        raise ConfigError(
            f"{where}: it has dim and n_layers but no model_type, as the config of the publisher's own inference code, "
            "which leaves rope and token ids to that code; put the config.json of the release in its place"
        )
    found = fields.take("model_type")
    if not isinstance(found, str) or found not in TARGETS:
        reason = UNSUPPORTED_MODEL_TYPES.get(found) if isinstance(found, str) else None
        note = f" ({reason})" if reason else ""
        raise fields.refused("model_type", found, f"supported model types: {', '.join(TARGETS)}{note}")
    return TARGETS[found].parse(fields)


def check_only_values(fields: Fields, only_value: Mapping[str, Any], note: Mapping[str, str]) -> None:
    """Refuses a field whose value is not the one implemented, with what `note` says about it."""
    for name, only in only_value.items():
        found = fields.take(name, only)
        if found != only or isinstance(found, bool) != isinstance(only, bool):
            raise fields.refused(name, found, f"only {json.dumps(only)} is implemented{note.get(name, '')}")


def parse_deepseek_v4(fields: Fields) -> DeepseekV4Config:
    """The fields of a V4 config, as the releases or as transformers spell them. Raises ConfigError."""
    from twostroke.builder.transformers_layout import in_original_fields  # here: it reads entries, which need configs

    fields = Fields(in_original_fields(fields.values, fields.where), fields.where)
    fields.take("model_type")
    check_only_values(fields, ONLY_VALUE, ONLY_NOTE)
    layers = fields.integer("num_hidden_layers", *LAYERS)
    heads = fields.integer("num_attention_heads", *HEADS)
    vocab = fields.integer("vocab_size", 2, SIZE[1])
    head_dim = fields.integer("head_dim", *HEADS)
    experts = fields.integer("n_routed_experts", *EXPERTS)
    rope_theta, compress_rope_theta, rope_scaling = _rope(fields, head_dim)
    dspark = _dspark(fields, layers, vocab)
    ratios, layer_types = _layers(fields, layers)
    config = DeepseekV4Config(
        vocab_size=vocab,
        hidden_size=fields.integer("hidden_size", *SIZE),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        head_dim=head_dim,
        qk_rope_head_dim=fields.integer("qk_rope_head_dim", 2, head_dim),
        q_lora_rank=fields.integer("q_lora_rank", *SIZE),
        o_groups=fields.integer("o_groups", 1, heads),
        o_lora_rank=fields.integer("o_lora_rank", *SIZE),
        sliding_window=fields.integer("sliding_window", *SIZE),
        compress_ratios=ratios,
        layer_types=layer_types,
        compress_rope_theta=compress_rope_theta,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=fields.integer("max_position_embeddings", 1, (1 << 31) - 1),
        index_n_heads=fields.integer("index_n_heads", *HEADS),
        index_head_dim=fields.integer("index_head_dim", *HEADS),
        index_topk=fields.integer("index_topk", *SIZE),
        moe_intermediate_size=fields.integer("moe_intermediate_size", *SIZE),
        n_routed_experts=experts,
        n_shared_experts=ONLY_VALUE["n_shared_experts"],
        num_experts_per_tok=fields.integer("num_experts_per_tok", 1, experts),
        routed_scaling_factor=fields.positive("routed_scaling_factor"),
        num_hash_layers=fields.integer("num_hash_layers", 0, layers),
        swiglu_limit=fields.positive("swiglu_limit"),
        hc_mult=fields.integer("hc_mult", 1, 64),
        hc_sinkhorn_iters=fields.integer("hc_sinkhorn_iters", 1, 1000),
        hc_eps=fields.positive("hc_eps"),
        rms_norm_eps=fields.positive("rms_norm_eps"),
        bos_token_id=fields.integer("bos_token_id", 0, vocab - 1),
        eos_token_ids=read_eos(fields, vocab),
        torch_dtype=read_dtype(fields),
        num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", 0, LAYERS[1], default=0),
        dspark=dspark,
        quantised=read_quantised(fields, "fp4"),
    )
    _check_relations(config, fields)
    fields.check_all_taken(HARMLESS)
    return config


def check_experts(fields: Fields, layers: int, experts: int) -> None:
    """Refuses more routed experts than anybody has, before each is listed. `layers` are those of the draft too."""
    if layers * experts > MOST_EXPERTS:
        accepted = f"in {layers:,} layers that is more than {MOST_EXPERTS:,} experts in all, the most accepted"
        raise fields.refused("n_routed_experts", experts, accepted)


def read_quantised(fields: Fields, expert_dtype: str | None) -> bool:
    """Whether the weights are FP8 in blocks as released, and the experts as `expert_dtype` says: None where the family
    keeps them like all other weights. False without `quantization_config`."""
    found = fields.take("quantization_config", None)
    stated = fields.take("expert_dtype", None)
    if found is None:
        if stated not in (None, "bf16", "bfloat16", "fp32", "float32"):
            raise fields.refused("expert_dtype", stated, "but there is no quantization_config; add it, or remove both")
        return False
    if not isinstance(found, Mapping):
        raise fields.refused("quantization_config", found, "expected an object or null")
    section = Fields(found, fields.where, prefix="quantization_config.")
    for name, only in QUANTISATION.items():
        value = section.take(name, None) if name in ("scale_fmt", "activation_scheme") else section.take(name)
        if value not in (only, None):
            raise section.refused(name, value, f"only {json.dumps(only)} is implemented")
    section.take("modules_to_not_convert", None)
    section.check_all_taken()
    if stated != expert_dtype:
        raise fields.refused(
            "expert_dtype", stated, f"beside this quantization_config only {json.dumps(expert_dtype)} is implemented"
        )
    return True


def read_eos(fields: Fields, vocab: int) -> tuple[int, ...]:
    """`eos_token_id`, one id or a list."""
    eos = fields.take("eos_token_id")
    if not isinstance(eos, int | list):
        raise fields.refused("eos_token_id", eos, "expected a token id or a list of token ids")
    return fields.integers("eos_token_id", [eos] if isinstance(eos, int) else eos, 0, vocab - 1)


def read_dtype(fields: Fields) -> str:
    """`torch_dtype` or its newer name `dtype`. FP16 is not accepted: tapped hidden rows overflow it."""
    names = [name for name in ("torch_dtype", "dtype") if fields.take(name, None) is not None]
    if not names:
        raise fields.missing("torch_dtype")
    found = fields.values[names[0]]
    if len(names) == 2 and found != fields.values[names[1]]:
        raise fields.refused("torch_dtype", found, f"but dtype is {shown(fields.values['dtype'])}; keep one")
    if found not in ("bfloat16", "float32"):
        raise fields.refused(names[0], found, "accepted: bfloat16, float32")
    return str(found)


def _layers(fields: Fields, layers: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ratio and type of each target layer. Without `layer_types`, ratio 4 is CSA and every other one HCA."""
    ratios = fields.integers("compress_ratios", fields.take("compress_ratios"), 0, 1 << 16)
    if len(ratios) < layers:
        raise fields.refused("compress_ratios", list(ratios), f"expected at least num_hidden_layers = {layers} entries")
    if any(ratios[layers:]):
        raise fields.refused(
            "compress_ratios", list(ratios), f"entries after the first {layers} belong to draft stages and must be 0"
        )
    ratios = ratios[:layers]
    if 1 in ratios:
        raise fields.refused("compress_ratios", list(ratios), "accepted: 0 (no compressor) or 2 and above")
    types = fields.take("layer_types", None)
    if types is None:
        return ratios, tuple(SLIDING if ratio == 0 else CSA if ratio == 4 else HCA for ratio in ratios)
    if not isinstance(types, list) or len(types) != layers:
        raise fields.refused("layer_types", types, f"expected a list of num_hidden_layers = {layers} names")
    for i, (name, ratio) in enumerate(zip(types, ratios, strict=True)):
        if name not in LAYER_TYPES:
            raise fields.refused(f"layer_types[{i}]", name, f"accepted: {', '.join(LAYER_TYPES)}")
        if (name == SLIDING) != (ratio == 0):
            raise fields.refused(f"layer_types[{i}]", name, f"which contradicts compress_ratios[{i}] = {ratio}")
    return ratios, tuple(types)


def rope_spellings(fields: Fields, read: Callable[[str, object], _Reading], nothing: _Reading) -> _Reading:
    """`read(name, value)` of `rope_scaling` or of `rope_parameters`, its newer name; `nothing` where both are absent.

    Both may be there if they say the same.
    """
    names = ("rope_scaling", "rope_parameters")
    readings = [read(name, fields.values[name]) for name in names if fields.take(name, None) is not None]
    if len(readings) == 2 and readings[0] != readings[1]:
        raise fields.refused(
            "rope_scaling",
            fields.values["rope_scaling"],
            f"but rope_parameters is {shown(fields.values['rope_parameters'])}; keep one of the two spellings",
        )
    return readings[0] if readings else nothing


def read_theta(fields: Fields, name: str, inner: float | None) -> float:
    """Field `name`, which may be missing where a rope dictionary says `inner`, and must agree with it."""
    theta = fields.positive(name, ... if inner is None else inner)
    if inner is not None and theta != inner:
        raise fields.refused(name, theta, f"but the rope dictionary says {inner}; they must agree")
    if theta <= 1:
        raise fields.refused(name, theta, "expected a number above 1: frequencies are its negative powers")
    return theta


def _rope(fields: Fields, head_dim: int) -> tuple[float, float, RopeScaling | None]:
    """(rope_theta, compress_rope_theta, scaling) from `rope_scaling`, `rope_parameters` and the two theta fields."""

    def read(name: str, found: object) -> _RopeReading:
        return _rope_dictionary(fields, name, found, head_dim)

    nothing: _RopeReading = (None, None, None)
    main, compress, scaling = rope_spellings(fields, read, nothing)
    return read_theta(fields, "rope_theta", main), read_theta(fields, "compress_rope_theta", compress), scaling


_RopeReading = tuple[float | None, float | None, RopeScaling | None]  # theta of main, theta of compress, scaling


def _rope_dictionary(fields: Fields, name: str, found: object, head_dim: int) -> _RopeReading:
    """One spelling of the RoPE settings: a flat dictionary, or {main, compress} with one dictionary each."""
    if not isinstance(found, Mapping):
        raise fields.refused(name, found, "expected an object or null")
    if not found.keys() & {"main", "compress"}:
        theta, scaling = rope_section(fields, name, found, head_dim)
        return theta, None, scaling
    if found.keys() != {"main", "compress"}:
        raise fields.refused(name, found, "expected exactly the two sections main and compress, or neither")
    main, main_scaling = rope_section(fields, f"{name}.main", found["main"], head_dim)
    if main_scaling is not None:
        raise fields.refused(f"{name}.main", found["main"], "layers without a compressor are never scaled in V4")
    compress, scaling = rope_section(fields, f"{name}.compress", found["compress"], head_dim)
    return main, compress, scaling


def rope_section(
    fields: Fields, name: str, found: object, head_dim: int, *, mscale: bool = False
) -> tuple[float | None, RopeScaling | None]:
    """(theta, YaRN scaling) of one flat dictionary, None where it has none; `mscale`: whether the family has that."""
    if not isinstance(found, Mapping):
        raise fields.refused(name, found, "expected an object")
    section = Fields(found, fields.where, prefix=f"{name}.")
    kinds = {key: section.take(key) for key in ("type", "rope_type") if key in found}
    if len({shown(kind) for kind in kinds.values()}) != 1:
        raise fields.refused(name, found, "expected type (or rope_type): default or yarn")
    kind = next(iter(kinds.values()))
    thetas = {section.positive(key) for key in ("rope_theta", "theta") if key in found}
    if len(thetas) > 1:
        raise fields.refused(name, found, "rope_theta and theta must agree")
    if "partial_rotary_factor" in found:
        share = section.positive("partial_rotary_factor")
        rotary = fields.integer("qk_rope_head_dim", 2, head_dim)
        if not math.isclose(share * head_dim, rotary):
            accepted = f"but qk_rope_head_dim / head_dim is {rotary}/{head_dim}"
            raise section.refused("partial_rotary_factor", share, accepted)
    scaling = None
    if kind == "yarn":
        scaling = RopeScaling(
            factor=section.positive("factor"),
            original_max_position_embeddings=section.integer("original_max_position_embeddings", 1, 1 << 31),
            beta_fast=section.positive("beta_fast"),
            beta_slow=section.positive("beta_slow"),
            mscale=section.positive("mscale_all_dim") if mscale else 0.0,
        )
        if mscale and section.positive("mscale") != scaling.mscale:
            accepted = f"but mscale_all_dim is {found['mscale_all_dim']}; only equal values are implemented"
            raise section.refused("mscale", found["mscale"], accepted)
        # cos and sin are multiplied by nothing; generic YaRN code would use about 1.277 for V4.
        if section.take("attention_factor", 1) not in (1, None):
            raise section.refused("attention_factor", found["attention_factor"], "only 1 is implemented")
    elif kind != "default":
        raise fields.refused(f"{name}.{next(iter(kinds))}", kind, "accepted: default, yarn")
    section.check_all_taken()
    return (next(iter(thetas)) if thetas else None), scaling


# Field of DSparkConfig -> the names it may have under `dspark_config`; at top level the name starts with `dspark_`.
_DSPARK_NAMES: Mapping[str, tuple[str, ...]] = {
    "block_size": ("block_size",),
    "noise_token_id": ("noise_token_id", "mask_token_id"),
    "target_layer_ids": ("target_layer_ids",),
    "markov_rank": ("markov_rank",),
    "markov_head_type": ("markov_head_type",),
    "enable_confidence_head": ("enable_confidence_head",),
    "confidence_head_with_markov": ("confidence_head_with_markov",),
}
_UNPREFIXED = ("enable_confidence_head", "confidence_head_with_markov")  # also accepted bare at top level


def _dspark(fields: Fields, layers: int, vocab: int) -> DSparkConfig | None:
    """The drafter's settings, flat `dspark_*` or nested in `dspark_config`; a field given twice must agree."""
    nested = fields.take("dspark_config", None)
    flat = [name for name in fields.values if name.startswith("dspark_") and name != "dspark_config"]
    if nested is None and not flat:
        return None
    if not isinstance(nested, Mapping | None):
        raise fields.refused("dspark_config", nested, "expected an object")
    inner = Fields(nested or {}, fields.where, prefix="dspark_config.")
    merged: dict[str, Any] = {}
    for field, names in _DSPARK_NAMES.items():
        found = []
        for name in (f"dspark_{field}", *([field] if field in _UNPREFIXED else [])):
            if name in fields.values:
                found.append((name, fields.take(name)))
        for name in (*names, f"dspark_{field}"):
            if name in inner.values:
                found.append((f"dspark_config.{name}", inner.take(name)))
        for name, value in found[1:]:
            if value != found[0][1]:
                raise fields.refused(found[0][0], found[0][1], f"but {name} is {shown(value)}; keep one of the two")
        if found:
            merged[field] = found[0][1]
    inner.check_all_taken()
    reader = Fields(merged, fields.where, prefix="dspark_")
    kind = read_markov_head_type(reader, "vanilla")
    for name in _UNPREFIXED:
        if not isinstance(reader.take(name, True), bool):
            raise reader.refused(name, merged[name], "expected true or false")
    ids = reader.integers("target_layer_ids", reader.take("target_layer_ids"), 0, layers - 1)
    if len(set(ids)) != len(ids):
        raise reader.refused("target_layer_ids", list(ids), "each layer may be tapped once")
    return DSparkConfig(
        block_size=reader.integer("block_size", *DSPARK_BLOCKS),
        noise_token_id=reader.integer("noise_token_id", 0, vocab - 1),
        target_layer_ids=ids,
        markov_rank=reader.integer("markov_rank", *SIZE),
        markov_head_type=kind,
        enable_confidence_head=merged.get("enable_confidence_head", True),
        confidence_head_with_markov=merged.get("confidence_head_with_markov", True),
    )


def read_markov_head_type(fields: Fields, default: Any = ...) -> str:
    """`markov_head_type`, one of MARKOV_HEAD_TYPES."""
    found = fields.take("markov_head_type", default)
    if found not in MARKOV_HEAD_TYPES:
        raise fields.refused("markov_head_type", found, f"accepted: {', '.join(MARKOV_HEAD_TYPES)}")
    return str(found)


def _check_relations(config: DeepseekV4Config, fields: Fields) -> None:
    """Sizes that must fit each other, or a reshape would mix what does not belong together."""
    heads, groups, rotary = config.num_attention_heads, config.o_groups, config.qk_rope_head_dim
    stages = config.dspark.stages if config.dspark else config.num_nextn_predict_layers
    check_experts(fields, config.num_hidden_layers + stages, config.n_routed_experts)
    if heads % groups:
        raise fields.refused("o_groups", groups, f"must divide num_attention_heads = {heads}")
    if rotary % 2:
        raise fields.refused("qk_rope_head_dim", rotary, "rotary dims come in pairs: expected an even number")
    if config.index_head_dim < rotary:
        raise fields.refused("index_head_dim", config.index_head_dim, f"must hold qk_rope_head_dim = {rotary} dims")
    for name in ("hidden_size", "moe_intermediate_size") if config.quantised else ():
        if getattr(config, name) % FP4_GROUP:
            accepted = f"FP4 experts have a scale for every {FP4_GROUP} weights of a row: expected a multiple"
            raise fields.refused(name, getattr(config, name), accepted)
