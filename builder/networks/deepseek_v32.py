"""DeepSeek-V3.2: its config, its checkpoint's tensors, and the target network as one flat step.

    x = embed(ids)
    for every layer:
        x += attention(norm(x))                                MLA over the rows a lightning indexer chose
        x += ffn(norm(x))                                      dense in the first layers, then experts
    logits = lm_head(norm(x))

Attention is in its absorbed form: kv_b = [W_UK; W_UV] is applied to queries and outputs, so a token's memory is one row
[c | k_pe] for all heads and one index key. Source: DeepSeek-V3.2 report, `spec/deepseek_v32.md`. Everything is fp32
and index keys are stored unquantised and unrotated (section 5.3); parameter names are those of the released
checkpoints, except that the experts of a layer are one bank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from twostroke.builder import config as shared
from twostroke.builder.config import SIZE, RopeScaling
from twostroke.builder.draft_detection import check_requested
from twostroke.builder.inventory import FLOAT_DTYPES, FP8_BLOCK, WEIGHT_DTYPES, TensorSpec
from twostroke.builder.networks.layers import (
    LayerNorm,
    Linear,
    RMSNorm,
    Rotation,
    StepSpec,
    rope_frequencies,
    step_input,
    step_output,
    weight,
)
from twostroke.builder.strict_json import Fields, shown_list
from twostroke.engines.errors import ConfigError
from twostroke.engines.manifest import StateTensor
from twostroke.plugins.all_reduce.torch_op import ALL_REDUCE
from twostroke.plugins.moe.reference import swiglu
from twostroke.plugins.moe.torch_op import MOE_EXPERTS, MOE_ROUTE_GROUPED
from twostroke.plugins.nsa.torch_op import NSA_MLA

TOKENS_PER_PAGE = 64
INNER_EPS = 1e-6  # of the norms inside attention, whatever rms_norm_eps says (publisher and library alike)

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

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeepseekV32Config:
    """One DeepSeek-V3.2 target. Its MTP layers, where the checkpoint has them, are the layers after the last."""

    model_type: ClassVar[str] = "deepseek_v32"

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
    layers = fields.integer("num_hidden_layers", 1, 1024)
    vocab = fields.integer("vocab_size", 2, SIZE[1])
    experts = fields.integer("n_routed_experts", 1, 4096)
    groups = fields.integer("n_group", 1, experts)
    rotary = fields.integer("qk_rope_head_dim", 2, SIZE[1])
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
        num_attention_heads=fields.integer("num_attention_heads", *SIZE),
        q_lora_rank=fields.integer("q_lora_rank", *SIZE),
        kv_lora_rank=fields.integer("kv_lora_rank", *SIZE),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim", *SIZE),
        qk_rope_head_dim=rotary,
        v_head_dim=fields.integer("v_head_dim", *SIZE),
        index_n_heads=fields.integer("index_n_heads", *SIZE),
        index_head_dim=fields.integer("index_head_dim", *SIZE),
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
        num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", 0, 1024, default=0),
    )
    _check_relations(config, fields)
    fields.check_all_taken(HARMLESS)
    return config


def _check_relations(config: DeepseekV32Config, fields: Fields) -> None:
    """Sizes that must fit each other, and fields that only repeat what others say."""
    rotary, experts, groups = config.qk_rope_head_dim, config.n_routed_experts, config.n_group
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


def target_tensors(config: DeepseekV32Config, *, quantised: bool = False) -> tuple[TensorSpec, ...]:
    """Every tensor of the target. `quantised` gives the release's storage: FP8 linears, `.weight_scale_inv` beside each
    (`spec/deepseek_v32.md` section 11)."""
    return tuple(_target(config, quantised))


def all_tensors(config: DeepseekV32Config, *, quantised: bool = False) -> tuple[TensorSpec, ...]:
    """Target tensors, then those of the MTP layers the config promises (section 8.1)."""
    return (*_target(config, quantised), *_mtp(config, quantised))


def draft_prefix(config: DeepseekV32Config) -> str:
    """What the names of the first MTP layer, the only one a release has, start with."""
    return f"model.layers.{config.num_hidden_layers}."


def _target(config: DeepseekV32Config, quantised: bool) -> Iterator[TensorSpec]:
    whole = (config.vocab_size, config.hidden_size)
    yield TensorSpec("model.embed_tokens.weight", whole, WEIGHT_DTYPES)
    for layer in range(config.num_hidden_layers):
        yield from _layer(config, f"model.layers.{layer}.", quantised, dense=layer < config.first_k_dense_replace)
    yield TensorSpec("model.norm.weight", (config.hidden_size,), WEIGHT_DTYPES)
    yield TensorSpec("lm_head.weight", whole, WEIGHT_DTYPES)


def _mtp(config: DeepseekV32Config, quantised: bool) -> Iterator[TensorSpec]:
    D = config.hidden_size
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        prefix = f"model.layers.{layer}."
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield TensorSpec(f"{prefix}{name}.weight", (D,), WEIGHT_DTYPES)
        yield TensorSpec(f"{prefix}eh_proj.weight", (D, 2 * D), WEIGHT_DTYPES)
        for name in ("embed_tokens", "shared_head.head"):
            yield TensorSpec(f"{prefix}{name}.weight", (config.vocab_size, D), WEIGHT_DTYPES)
        yield from _layer(config, prefix, quantised, dense=False)


def _layer(config: DeepseekV32Config, prefix: str, quantised: bool, dense: bool) -> Iterator[TensorSpec]:
    D, heads = config.hidden_size, config.num_attention_heads
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield TensorSpec(f"{prefix}{name}.weight", (D,), WEIGHT_DTYPES)
    attn, kv_width = f"{prefix}self_attn.", config.qk_nope_head_dim + config.v_head_dim
    yield from _linear(f"{attn}q_a_proj", config.q_lora_rank, D, quantised)
    yield TensorSpec(f"{attn}q_a_layernorm.weight", (config.q_lora_rank,), WEIGHT_DTYPES)
    yield from _linear(f"{attn}q_b_proj", heads * config.qk_head_dim, config.q_lora_rank, quantised)
    yield from _linear(f"{attn}kv_a_proj_with_mqa", config.kv_lora_rank + config.qk_rope_head_dim, D, quantised)
    yield TensorSpec(f"{attn}kv_a_layernorm.weight", (config.kv_lora_rank,), WEIGHT_DTYPES)
    yield from _linear(f"{attn}kv_b_proj", heads * kv_width, config.kv_lora_rank, quantised)
    yield from _linear(f"{attn}o_proj", D, heads * config.v_head_dim, quantised)
    indexer = f"{attn}indexer."
    yield from _linear(f"{indexer}wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank, quantised)
    yield from _linear(f"{indexer}wk", config.index_head_dim, D, quantised)
    for name in ("weight", "bias"):
        yield TensorSpec(f"{indexer}k_norm.{name}", (config.index_head_dim,), WEIGHT_DTYPES)
    yield TensorSpec(f"{indexer}weights_proj.weight", (config.index_n_heads, D), WEIGHT_DTYPES)
    mlp = f"{prefix}mlp."
    if dense:
        yield from _mlp(mlp, D, config.intermediate_size, quantised)
        return
    yield TensorSpec(f"{mlp}gate.weight", (config.n_routed_experts, D), WEIGHT_DTYPES)
    yield TensorSpec(f"{mlp}gate.e_score_correction_bias", (config.n_routed_experts,), FLOAT_DTYPES)
    for expert in range(config.n_routed_experts):
        yield from _mlp(f"{mlp}experts.{expert}.", D, config.moe_intermediate_size, quantised)
    yield from _mlp(f"{mlp}shared_experts.", D, config.moe_intermediate_size, quantised)


def _mlp(prefix: str, hidden: int, inner: int, quantised: bool) -> Iterator[TensorSpec]:
    yield from _linear(f"{prefix}gate_proj", inner, hidden, quantised)
    yield from _linear(f"{prefix}up_proj", inner, hidden, quantised)
    yield from _linear(f"{prefix}down_proj", hidden, inner, quantised)


def _linear(name: str, rows: int, columns: int, quantised: bool) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (rows, columns), ("F8_E4M3",) if quantised else WEIGHT_DTYPES)
    if quantised:
        yield TensorSpec(f"{name}.weight_scale_inv", (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)), ("F32",))


def detect_draft(config: DeepseekV32Config, tensor_names: Iterable[str], requested: str = "auto") -> Literal["none"]:
    """The draft method to build: `none`, on request or because nothing else is there.

    Raises ConfigError for a method that does not fit or is not there yet; a config that promises an MTP layer without
    its tensors is a warning, no drafter.
    """
    check_requested(requested)
    if requested == "none":
        return "none"
    prefix = draft_prefix(config)
    names = [name for name in tensor_names if name.startswith(prefix)]
    found = (
        f"the files hold an MTP layer in {prefix}* ({shown_list(names, 3)})"
        if names
        else (f"the files hold no {prefix}* tensors")
    )
    promise = f"the config promises {config.num_nextn_predict_layers} MTP layers (num_nextn_predict_layers)"
    if requested == "dspark":
        raise ConfigError(f"draft method 'dspark' is none of deepseek_v32's: {found} and {promise}; use 'none'")
    if names:
        raise ConfigError(f"draft method {requested!r}: {found}, and MTP drafting is not there yet; use 'none'")
    if requested == "mtp":
        parts = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        missing = ", ".join(f"{prefix}{part}.weight" for part in parts)
        raise ConfigError(f"draft method 'mtp' needs an MTP layer ({missing}), which is missing: {found}; use 'none'")
    if config.num_nextn_predict_layers:
        _log.warning("%s, but %s: decoding without a drafter", promise, found)
    return "none"


@dataclass(frozen=True)
class Flat:
    """What every layer of a step reads, i64. `turn` rotates a rotary part of its own, interleaved; `index_turn` the
    first dims of an index row, half-split unless the config says interleaved."""

    positions: Tensor
    slots: Tensor
    page_table: Tensor
    turn: Rotation
    index_turn: Rotation


class Indexer(nn.Module):
    """Lightning indexer: which tokens a query attends to."""

    def __init__(self, config: DeepseekV32Config) -> None:
        super().__init__()
        self.heads, self.size = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.size)
        self.wk = Linear(config.hidden_size, self.size)
        self.k_norm = LayerNorm(self.size, INNER_EPS)
        self.weights_proj = Linear(config.hidden_size, self.heads)

    def forward(self, x: Tensor, latent: Tensor, flat: Flat) -> tuple[Tensor, Tensor, Tensor]:
        """Index queries [N, heads, size], head weights [N, heads], index keys [N, size]."""
        q = flat.index_turn(self.wq_b(latent).reshape(-1, self.heads, self.size))
        head_weight = self.weights_proj(x) * (self.heads**-0.5 * self.size**-0.5)
        return q, head_weight, flat.index_turn(self.k_norm(self.wk(x)))


class LatentAttention(nn.Module):
    """MLA in its absorbed form over the rows the indexer chose. Two tensors of state: latent rows and index keys."""

    def __init__(self, config: DeepseekV32Config, max_seq_len: int) -> None:
        super().__init__()
        self.config = config
        heads, latent = config.num_attention_heads, config.kv_lora_rank
        # A table of whole pages holds no more rows than this; beyond it a larger top-k chooses nothing.
        self.top_k = min(config.index_topk, -(-max_seq_len // TOKENS_PER_PAGE) * TOKENS_PER_PAGE)
        self.rows_per_page = TOKENS_PER_PAGE
        self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, INNER_EPS)
        self.q_b_proj = Linear(config.q_lora_rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, latent + config.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(latent, INNER_EPS)
        self.kv_b_proj = Linear(latent, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = Linear(heads * config.v_head_dim, config.hidden_size)
        self.indexer = Indexer(config)

    def state(self, prefix: str) -> tuple[StateTensor, ...]:
        """Latent rows [c | k_pe] and index keys, one of each a token."""
        width = self.config.kv_lora_rank + self.config.qk_rope_head_dim
        return (
            StateTensor(f"{prefix}.latent", "paged", 1, self.rows_per_page, width),
            StateTensor(f"{prefix}.index", "paged", 1, self.rows_per_page, self.config.index_head_dim),
        )

    def absorbed(self) -> tuple[Tensor, Tensor]:
        """W_UK [heads, nope, L] and W_UV [heads, v, L] out of kv_b_proj, which holds both for each head."""
        nope, v = self.config.qk_nope_head_dim, self.config.v_head_dim
        both = self.kv_b_proj.weight.reshape(self.config.num_attention_heads, nope + v, -1)
        return both[:, :nope], both[:, nope:]

    def queries(self, latent: Tensor, up_keys: Tensor, turn: Rotation) -> Tensor:
        """q [N, heads, L + rope]: q_nope through W_UK beside the rotated part. Tokens are the rows of the product."""
        config = self.config
        q = self.q_b_proj(latent).reshape(-1, config.num_attention_heads, config.qk_head_dim)
        nope, rotary = q[:, :, : config.qk_nope_head_dim], q[:, :, config.qk_nope_head_dim :]
        through = torch.matmul(nope.transpose(0, 1), up_keys).transpose(0, 1)
        return torch.cat([through, turn(rotary)], dim=-1)

    def latent_rows(self, x: Tensor, turn: Rotation) -> Tensor:
        """The row [c | k_pe] of each token, [N, L + rope]; only c is normed."""
        both, L = self.kv_a_proj_with_mqa(x), self.config.kv_lora_rank
        return torch.cat([self.kv_a_layernorm(both[:, :L]), turn(both[:, L:])], dim=-1)

    def forward(self, x: Tensor, flat: Flat, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        up_keys, up_values = self.absorbed()
        latent = self.q_a_layernorm(self.q_a_proj(x))
        index_q, index_weight, index_key = self.indexer(x, latent, flat)
        out, latent_after, index_after = NSA_MLA.overload(
            self.queries(latent, up_keys, flat.turn),
            self.latent_rows(x, flat.turn),
            index_q,
            index_weight,
            index_key,
            *state,
            flat.positions,
            flat.slots,
            flat.page_table,
            self.config.kv_lora_rank,
            self.rows_per_page,
            self.top_k,
            self.config.softmax_scale,
        )
        values = torch.matmul(out.transpose(0, 1), up_values.transpose(1, 2)).transpose(0, 1)
        return ALL_REDUCE.overload(self.o_proj(values.reshape(x.shape[0], -1))), (latent_after, index_after)


class MLP(nn.Module):
    """down(silu(gate x) * up x): a dense layer's, and the expert every token passes, which has weight 1."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, inner)
        self.up_proj = Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), math.inf))
        return out


class DenseFeedForward(MLP):
    """The whole feed-forward part of one of the first layers."""

    def forward(self, x: Tensor) -> Tensor:
        return ALL_REDUCE.overload(super().forward(x))


class Experts(nn.Module):
    """All routed experts of a layer: gate_proj and up_proj [E, F, D], down_proj [E, D, F]."""

    def __init__(self, config: DeepseekV32Config) -> None:
        super().__init__()
        experts, inner, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_proj = weight(experts, inner, hidden)
        self.up_proj = weight(experts, inner, hidden)
        self.down_proj = weight(experts, hidden, inner)


class Gate(nn.Module):
    """Router: sigmoid scores, a bias that selects only, the best groups first."""

    def __init__(self, config: DeepseekV32Config) -> None:
        super().__init__()
        self.config = config
        self.weight = weight(config.n_routed_experts, config.hidden_size)
        self.e_score_correction_bias = weight(config.n_routed_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [N, k] and their weights [N, k]."""
        config = self.config
        return MOE_ROUTE_GROUPED.overload(
            x,
            self.weight,
            self.e_score_correction_bias,
            config.n_group,
            config.topk_group,
            config.num_experts_per_tok,
            config.routed_scaling_factor,
        )


class MixtureOfExperts(nn.Module):
    """Routed experts plus the shared one."""

    def __init__(self, config: DeepseekV32Config) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.gate(x)
        bank = self.experts
        routed = MOE_EXPERTS.overload(x, ids, weights, bank.gate_proj, bank.down_proj, bank.up_proj, math.inf)
        return ALL_REDUCE.overload(routed + self.shared_experts(x))


class Layer(nn.Module):
    """Attention and feed-forward, each behind its norm on one residual stream."""

    def __init__(self, config: DeepseekV32Config, max_seq_len: int, dense: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.self_attn = LatentAttention(config, max_seq_len)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.mlp = DenseFeedForward(hidden, config.intermediate_size) if dense else MixtureOfExperts(config)

    def forward(self, x: Tensor, flat: Flat, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, state = self.self_attn(self.input_layernorm(x), flat, state)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), state


class Decoder(nn.Module):
    """Embedding, layers and final norm, under the name they have in a checkpoint."""

    def __init__(self, config: DeepseekV32Config, max_seq_len: int) -> None:
        super().__init__()
        self.embed_tokens = Linear(config.hidden_size, config.vocab_size)
        self.layers = nn.ModuleList(
            Layer(config, max_seq_len, dense=layer < config.first_k_dense_replace)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DeepseekV32(nn.Module):
    """The target step. All its memory is paged, so `draft_len` sizes nothing; no draft method asks for `taps` yet.
    `layer_state` has each layer's state tensors in the order `forward` takes them."""

    frequencies: Tensor

    def __init__(self, config: DeepseekV32Config, draft_len: int, max_seq_len: int, taps: tuple[int, ...]) -> None:
        super().__init__()
        assert not taps, "no draft method of this family taps layers"
        self.config = config
        self.model = Decoder(config, max_seq_len)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.layer_state = tuple(
            layer.self_attn.state(f"layers.{index}")  # type: ignore[operator, union-attr]
            for index, layer in enumerate(self.model.layers)
        )
        frequencies = rope_frequencies(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)
        self.register_buffer("frequencies", frequencies)

    def flat(self, positions: Tensor, slots: Tensor, page_table: Tensor) -> Flat:
        """Step inputs (i32) as the layers read them (i64), with both rotations computed once."""
        config, positions = self.config, positions.long()
        halves = not config.indexer_rope_interleave
        return Flat(
            positions,
            slots.long(),
            page_table.long(),
            Rotation.at(positions, self.frequencies, config.qk_rope_head_dim),
            Rotation.at(positions, self.frequencies, config.index_head_dim, halves=halves, leading=True),
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        row_start: Tensor,
        request_slot: Tensor,
        page_table: Tensor,
        logit_rows: Tensor,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        """logits [M, V], then the new value of every state tensor.

        `row_start` [R+1] and `request_slot` [R] are part of the contract for kernels that work per request; this
        network reads per token.
        """
        flat = self.flat(positions, slots, page_table)
        x = self.model.embed_tokens.weight[token_ids.long()]
        after: list[Tensor] = []
        for layer, spec in zip(self.model.layers, self.layer_state, strict=True):
            x, new = layer(x, flat, state[len(after) : len(after) + len(spec)])
            after.extend(new)
        logits = self.lm_head(self.model.norm(x[logit_rows.long()]))
        return (logits, *after)

    def step(self) -> StepSpec:
        """The declaration of the target step."""
        state = tuple(tensor for layer in self.layer_state for tensor in layer)
        return StepSpec(
            "target",
            self,
            (
                step_input("token_ids", "N"),
                step_input("positions", "N"),
                step_input("slots", "N"),
                step_input("row_start", "R1"),
                step_input("request_slot", "R"),
                step_input("page_table", "S", "P"),
                step_input("logit_rows", "M"),
            ),
            (step_output("logits", "M", self.config.vocab_size),),
            state,
            tuple(tensor.name for tensor in state),
            sizes={"N": 12, "R1": 4, "R": 3, "S": 5, "P": 2, "M": 7, "pages": 6},
        )
