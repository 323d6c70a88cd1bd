"""DeepSeek-V3.2 on disk: its config, every tensor of its checkpoint, and which drafter a folder holds.

Source: `spec/deepseek_v32.md` sections 1, 8.1 and 11. The MTP layer follows the last layer of the target in numbering.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from twostroke.builder import config as shared
from twostroke.builder.config import EXPERTS, FP8_BLOCK, HEADS, LAYERS, SIZE, RopeScaling
from twostroke.builder.draft_detection import check_requested
from twostroke.builder.inventory import FLOAT_DTYPES, FP8_SCALES, WEIGHT_DTYPES, TensorSpec
from twostroke.builder.strict_json import Fields, shown_list
from twostroke.engines.errors import BuildError, CheckpointError, ConfigError

# Fields of which one value is implemented. A config without them means that value: the model type implies it.
ONLY_VALUE: Mapping[str, Any] = {
    "n_shared_experts": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
ONLY_NOTE = {
    "tie_word_embeddings": ": store lm_head.weight beside model.embed_tokens.weight and set this field to false"
}
HARMLESS = (
    *shared.HARMLESS,
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "pretraining_tp",
)  # training, and parallel layouts

FP8_INDEX_KEYS = "fp8_e4m3"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeepseekV32Config:
    """One DeepSeek-V3.2 target. Its MTP layers, where the checkpoint has them, are the layers after the last."""

    model_type: ClassVar[str] = "deepseek_v32"
    scale_suffix: ClassVar[str] = "weight_scale_inv"

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_rope_interleave: bool  # attention is always interleaved; the indexer has its own setting
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    rms_norm_eps: float
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    torch_dtype: str
    num_nextn_predict_layers: int
    quantised: bool = False  # FP8 matrices, as released; else floats
    index_key_dtype: str = "float32"  # a choice of the build, not of the checkpoint

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query: the part without rotation, then the rotary one."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim^-0.5 * m^2 with YaRN's m = 0.1 * mscale * ln(factor) + 1, in the absorbed form too."""
        scaling = self.rope_scaling
        m = 1.0 if scaling is None else 0.1 * scaling.mscale * math.log(max(scaling.factor, 1.0)) + 1.0
        return float(self.qk_head_dim**-0.5 * m * m)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """dense or experts."""
        dense = self.first_k_dense_replace
        return ("dense",) * dense + ("experts",) * (self.num_hidden_layers - dense)


def parse_config(fields: Fields) -> DeepseekV32Config:
    """The fields of a V3.2 config (`spec/deepseek_v32.md` section 1). Raises ConfigError."""
    shared.check_only_values(fields, ONLY_VALUE, ONLY_NOTE)
    layers = fields.integer("num_hidden_layers", *LAYERS)
    vocab = fields.integer("vocab_size", 2, SIZE[1])
    experts = fields.integer("n_routed_experts", *EXPERTS)
    groups = fields.integer("n_group", 1, experts)
    rotary = fields.integer("qk_rope_head_dim", 2, HEADS[1])
    interleave = fields.take("indexer_rope_interleave", False)
    if not isinstance(interleave, bool):
        raise fields.refused("indexer_rope_interleave", interleave, "expected true or false")

    def rope(name: str, found: object) -> tuple[float | None, RopeScaling | None]:
        return shared.rope_section(fields, name, found, rotary, mscale=True)

    nothing: tuple[float | None, RopeScaling | None] = (None, None)
    theta, scaling = shared.rope_spellings(fields, rope, nothing)
    config = DeepseekV32Config(
        vocab_size=vocab,
        hidden_size=fields.integer("hidden_size", *SIZE),
        num_hidden_layers=layers,
        num_attention_heads=fields.integer("num_attention_heads", *HEADS),
        q_lora_rank=fields.integer("q_lora_rank", *SIZE),
        kv_lora_rank=fields.integer("kv_lora_rank", *SIZE),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim", *HEADS),
        qk_rope_head_dim=rotary,
        v_head_dim=fields.integer("v_head_dim", *HEADS),
        index_n_heads=fields.integer("index_n_heads", *HEADS),
        index_head_dim=fields.integer("index_head_dim", *HEADS),
        index_topk=fields.integer("index_topk", *SIZE),
        indexer_rope_interleave=interleave,
        rope_theta=shared.read_theta(fields, "rope_theta", theta),
        rope_scaling=scaling,
        max_position_embeddings=fields.integer("max_position_embeddings", 1, (1 << 31) - 1),
        first_k_dense_replace=fields.integer("first_k_dense_replace", 0, layers),
        intermediate_size=fields.integer("intermediate_size", *SIZE),
        moe_intermediate_size=fields.integer("moe_intermediate_size", *SIZE),
        n_routed_experts=experts,
        num_experts_per_tok=fields.integer("num_experts_per_tok", 1, experts),
        n_group=groups,
        topk_group=fields.integer("topk_group", 1, groups),
        routed_scaling_factor=fields.positive("routed_scaling_factor"),
        rms_norm_eps=fields.positive("rms_norm_eps"),
        bos_token_id=fields.integer("bos_token_id", 0, vocab - 1),
        eos_token_ids=shared.read_eos(fields, vocab),
        torch_dtype=shared.read_dtype(fields),
        num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", 0, LAYERS[1], default=0),
        quantised=shared.read_quantised(fields, None),
    )
    _check_relations(config, fields)
    fields.check_all_taken(HARMLESS)
    return config


def _check_relations(config: DeepseekV32Config, fields: Fields) -> None:
    """Sizes that must fit each other, and fields that only repeat what others say."""
    rotary, experts, groups = config.qk_rope_head_dim, config.n_routed_experts, config.n_group
    shared.check_experts(fields, config.num_hidden_layers + config.num_nextn_predict_layers, experts)
    if rotary % 2:
        raise fields.refused("qk_rope_head_dim", rotary, "rotary dims come in pairs: expected an even number")
    if config.index_head_dim < rotary:
        raise fields.refused("index_head_dim", config.index_head_dim, f"must hold qk_rope_head_dim = {rotary} dims")
    if experts % groups or experts // groups < 2:
        raise fields.refused("n_group", groups, f"must cut n_routed_experts = {experts} into groups of two or more")
    if config.num_experts_per_tok > config.topk_group * (experts // groups):
        most = f"at most topk_group groups of {experts // groups} experts can be chosen from"
        raise fields.refused("num_experts_per_tok", config.num_experts_per_tok, most)
    dense, layers = config.first_k_dense_replace, config.num_hidden_layers
    implied = {
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": rotary,
        "qk_head_dim": config.qk_head_dim,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "layer_types": ["indexed_attention"] * layers,
    }
    for name, value in implied.items():
        found = fields.take(name, value)
        if found != value:
            raise fields.refused(name, found, f"but the other fields mean {value}; correct it or leave it out")


def with_fp8_index_keys(config: DeepseekV32Config) -> DeepseekV32Config:
    """The config of a build that keeps the index keys of target and MTP layer in fp8. Raises BuildError."""
    size = config.index_head_dim
    if size & (size - 1):
        raise BuildError(
            f"--index-key-dtype is {FP8_INDEX_KEYS}, but index_head_dim is {size}: fp8 keys are rotated by a Hadamard "
            "matrix, whose size is a power of two; use float32"
        )
    return replace(config, index_key_dtype=FP8_INDEX_KEYS)


def target_tensors(config: DeepseekV32Config) -> tuple[TensorSpec, ...]:
    """Every tensor of the target; in a quantised checkpoint every matrix of a layer is FP8 with a `.weight_scale_inv`
    beside it (`spec/deepseek_v32.md` section 11)."""
    return tuple(_target(config))


def all_tensors(config: DeepseekV32Config) -> tuple[TensorSpec, ...]:
    """Target tensors, then those of the MTP layers the config promises (section 8.1)."""
    return (*_target(config), *_mtp(config))


def draft_prefix(config: DeepseekV32Config) -> str:
    """What the names of the first MTP layer, the only one a release has, start with."""
    return f"model.layers.{config.num_hidden_layers}."


def component(config: DeepseekV32Config, name: str) -> str:
    """What a tensor is part of, as people count a model (`spec/deepseek_v32.md` section 11.1)."""
    parts, number = {*name.split(".")}, _layer_number(name)
    if number is not None and number >= config.num_hidden_layers:
        return "draft"
    if "embed_tokens" in parts or "lm_head" in parts:
        return "embedding" if "embed_tokens" in parts else "output head"
    if "indexer" in parts:
        return "indexers"
    if "self_attn" in parts:
        return "attention"
    if "experts" in parts or "shared_experts" in parts:
        return "routed experts" if "experts" in parts else "shared experts"
    if "mlp" in parts:
        return "router" if "gate" in parts else "dense layers"
    return "norms" if name.endswith("norm.weight") else "unknown"


def _target(config: DeepseekV32Config) -> Iterator[TensorSpec]:
    whole = (config.vocab_size, config.hidden_size)
    yield TensorSpec("model.embed_tokens.weight", whole, WEIGHT_DTYPES)
    for layer in range(config.num_hidden_layers):
        yield from _layer(config, f"model.layers.{layer}.", dense=layer < config.first_k_dense_replace)
    yield TensorSpec("model.norm.weight", (config.hidden_size,), WEIGHT_DTYPES)
    yield TensorSpec("lm_head.weight", whole, WEIGHT_DTYPES)


def _mtp(config: DeepseekV32Config) -> Iterator[TensorSpec]:
    D = config.hidden_size
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        prefix = f"model.layers.{layer}."
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield TensorSpec(f"{prefix}{name}.weight", (D,), WEIGHT_DTYPES)
        yield TensorSpec(f"{prefix}eh_proj.weight", (D, 2 * D), WEIGHT_DTYPES)
        whole = (config.vocab_size, D)
        yield TensorSpec(f"{prefix}embed_tokens.weight", whole, WEIGHT_DTYPES, "model.embed_tokens.weight")
        yield TensorSpec(f"{prefix}shared_head.head.weight", whole, WEIGHT_DTYPES, "lm_head.weight")
        yield from _layer(config, prefix, dense=False)


def _layer(config: DeepseekV32Config, prefix: str, dense: bool) -> Iterator[TensorSpec]:
    D, heads = config.hidden_size, config.num_attention_heads
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield TensorSpec(f"{prefix}{name}.weight", (D,), WEIGHT_DTYPES)
    attn, kv_width = f"{prefix}self_attn.", config.qk_nope_head_dim + config.v_head_dim
    yield from _linear(f"{attn}q_a_proj", config.q_lora_rank, D, config.quantised)
    yield TensorSpec(f"{attn}q_a_layernorm.weight", (config.q_lora_rank,), WEIGHT_DTYPES)
    yield from _linear(f"{attn}q_b_proj", heads * config.qk_head_dim, config.q_lora_rank, config.quantised)
    yield from _linear(f"{attn}kv_a_proj_with_mqa", config.kv_lora_rank + config.qk_rope_head_dim, D, config.quantised)
    yield TensorSpec(f"{attn}kv_a_layernorm.weight", (config.kv_lora_rank,), WEIGHT_DTYPES)
    yield from _linear(f"{attn}kv_b_proj", heads * kv_width, config.kv_lora_rank, config.quantised)
    yield from _linear(f"{attn}o_proj", D, heads * config.v_head_dim, config.quantised)
    indexer = f"{attn}indexer."
    yield from _linear(
        f"{indexer}wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank, config.quantised
    )
    yield from _linear(f"{indexer}wk", config.index_head_dim, D, config.quantised)
    for name in ("weight", "bias"):
        yield TensorSpec(f"{indexer}k_norm.{name}", (config.index_head_dim,), WEIGHT_DTYPES)
    yield TensorSpec(f"{indexer}weights_proj.weight", (config.index_n_heads, D), WEIGHT_DTYPES)
    mlp = f"{prefix}mlp."
    if dense:
        yield from _mlp(mlp, D, config.intermediate_size, config.quantised)
        return
    yield TensorSpec(f"{mlp}gate.weight", (config.n_routed_experts, D), WEIGHT_DTYPES)
    yield TensorSpec(f"{mlp}gate.e_score_correction_bias", (config.n_routed_experts,), FLOAT_DTYPES)
    for expert in range(config.n_routed_experts):
        yield from _mlp(f"{mlp}experts.{expert}.", D, config.moe_intermediate_size, config.quantised)
    yield from _mlp(f"{mlp}shared_experts.", D, config.moe_intermediate_size, config.quantised)


def _mlp(prefix: str, hidden: int, inner: int, quantised: bool) -> Iterator[TensorSpec]:
    yield from _linear(f"{prefix}gate_proj", inner, hidden, quantised)
    yield from _linear(f"{prefix}up_proj", inner, hidden, quantised)
    yield from _linear(f"{prefix}down_proj", hidden, inner, quantised)


def _linear(name: str, rows: int, columns: int, quantised: bool) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (rows, columns), ("F8_E4M3",) if quantised else WEIGHT_DTYPES)
    if quantised:
        yield TensorSpec(
            f"{name}.weight_scale_inv", (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)), FP8_SCALES[::-1]
        )


def detect_draft(
    config: DeepseekV32Config, tensor_names: Iterable[str], requested: str = "auto"
) -> Literal["mtp", "none"]:
    """The draft method to build: `mtp` where config and files agree on one MTP layer, else `none`.

    `none` is always granted. Raises ConfigError for a request that does not fit, CheckpointError where config and files
    contradict each other; both name both findings. A config that promises an MTP layer without its tensors is common: a
    warning, no drafter, unless `mtp` was asked for.
    """
    check_requested(requested)
    if requested == "none":
        return "none"
    prefix, promised = draft_prefix(config), config.num_nextn_predict_layers
    numbers = {number for name in tensor_names if (number := _layer_number(name)) is not None}
    beyond = sorted(number for number in numbers if number >= config.num_hidden_layers)
    names = [f"model.layers.{number}.*" for number in beyond]
    found = f"the files hold MTP layers {shown_list(names, 3)}" if names else f"the files hold no {prefix}* tensors"
    promise = f"the config promises {promised} MTP layers (num_nextn_predict_layers)"
    if requested == "dspark":
        fits = "mtp" if names and promised else "none"
        raise ConfigError(f"draft method 'dspark' is none of deepseek_v32's: {found} and {promise}; use {fits!r}")
    if not names:
        if requested == "mtp":
            missing = ", ".join(f"{prefix}{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
            raise ConfigError(
                f"draft method 'mtp' needs an MTP layer ({missing}), which is missing: {found} and {promise}; use"
                " 'none'"
            )
        if promised:
            _log.warning("%s, but %s: decoding without a drafter", promise, found)
        return "none"
    if beyond != list(range(config.num_hidden_layers, config.num_hidden_layers + promised)):
        raise CheckpointError(
            f"config and files contradict each other: {promise}, but {found}; correct the folder, or use 'none' to"
            " decode without a drafter"
        )
    if promised > 1:
        raise ConfigError(f"{promise} and {found}; one layer is implemented, used again for every token: use 'none'")
    return "mtp"


def _layer_number(name: str) -> int | None:
    match = re.match(r"model\.layers\.(\d{1,6})\.", name)
    return int(match[1]) if match else None
