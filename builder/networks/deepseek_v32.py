"""DeepSeek-V3.2 as one flat step.

    x = embed(ids)
    for every layer:
        x += attention(norm(x))                                MLA over the rows a lightning indexer chose
        x += ffn(norm(x))                                      dense in the first layers, then experts
    logits = lm_head(norm(x))

Attention is in its absorbed form: kv_b = [W_UK; W_UV] is applied to queries and outputs, so a token's memory is one row
[c | k_pe] for all heads and one index key. Source: DeepSeek-V3.2 report, `spec/deepseek_v32.md`. Everything is fp32.
Index keys are stored as they are, or rotated and in fp8 as the published code has them (section 5.3): a choice of the
build for all layers. Parameter names are those of the released checkpoints, except that the experts of a layer are one
bank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twostroke.builder.networks.deepseek_v32_checkpoint import FP8_INDEX_KEYS, DeepseekV32Config
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
from twostroke.engines.manifest import StateTensor
from twostroke.plugins.all_reduce.torch_op import ALL_REDUCE
from twostroke.plugins.moe.reference import swiglu
from twostroke.plugins.moe.torch_op import MOE_EXPERTS, MOE_ROUTE_GROUPED
from twostroke.plugins.nsa.index_keys import SCALE_BYTES, hadamard, page_layout
from twostroke.plugins.nsa.torch_op import NSA_MLA, NSA_MLA_FP8_INDEX

TOKENS_PER_PAGE = 64
NORMED = "normed"  # the tap of the hidden after the final norm, what the MTP layer pairs with the next token
INNER_EPS = 1e-6  # of the norms inside attention, whatever rms_norm_eps says (publisher and library alike)


@dataclass(frozen=True)
class Flat:
    """What every layer of a step reads, i64. `turn` rotates a rotary part of its own, interleaved; `index_turn` the
    first dims of an index row, half-split unless the config says interleaved; `spread` [I, I] is what index rows go
    through before they become fp8."""

    positions: Tensor
    slots: Tensor
    page_table: Tensor
    turn: Rotation
    index_turn: Rotation
    spread: Tensor | None

    @classmethod
    def of(
        cls, config: DeepseekV32Config, frequencies: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor
    ) -> Flat:
        """Step inputs (i64), with both rotations computed once."""
        halves = not config.indexer_rope_interleave
        return cls(
            positions,
            slots,
            page_table,
            Rotation.at(positions, frequencies, config.qk_rope_head_dim),
            Rotation.at(positions, frequencies, config.index_head_dim, halves=halves, leading=True),
            hadamard(config.index_head_dim) if config.index_key_dtype == FP8_INDEX_KEYS else None,
        )


def frequencies_of(config: DeepseekV32Config) -> Tensor:
    """Angle per position of each rotary pair, the same for attention and indexer."""
    return rope_frequencies(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)


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
        k = flat.index_turn(self.k_norm(self.wk(x)))
        head_weight = self.weights_proj(x) * (self.heads**-0.5 * self.size**-0.5)
        if flat.spread is not None:
            q, k = torch.matmul(q, flat.spread), torch.matmul(k, flat.spread)
        return q, head_weight, k


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
        rows, size = self.rows_per_page, self.config.index_head_dim
        latent = StateTensor(
            f"{prefix}.latent", "paged", 1, rows, self.config.kv_lora_rank + self.config.qk_rope_head_dim
        )
        if self.config.index_key_dtype != FP8_INDEX_KEYS:
            return latent, StateTensor(f"{prefix}.index", "paged", 1, rows, size)
        planes = (size, SCALE_BYTES)
        return latent, StateTensor(
            f"{prefix}.index", "paged", 1, rows, sum(planes), "uint8", page_layout(size), planes=planes
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
        op = NSA_MLA_FP8_INDEX if self.config.index_key_dtype == FP8_INDEX_KEYS else NSA_MLA
        out, latent_after, index_after = op.overload(
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
    """The target step. All its memory is paged, so `draft_len` sizes nothing; `taps` are what the draft method asks
    for: nothing, or (NORMED,). `layer_state` has each layer's state tensors in the order `forward` takes them."""

    frequencies: Tensor

    def __init__(self, config: DeepseekV32Config, draft_len: int, max_seq_len: int, taps: tuple[str, ...]) -> None:
        super().__init__()
        assert taps in ((), (NORMED,)), taps
        self.config, self.taps = config, taps
        self.model = Decoder(config, max_seq_len)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.layer_state = tuple(
            layer.self_attn.state(f"layers.{index}")  # type: ignore[operator, union-attr]
            for index, layer in enumerate(self.model.layers)
        )
        self.register_buffer("frequencies", frequencies_of(config))

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
        """logits [M, V], taps [N, D] where the draft method asks for them, then the new value of every state tensor.

        `row_start` [R+1] and `request_slot` [R] are part of the contract for kernels that work per request; this
        network reads per token.
        """
        flat = Flat.of(self.config, self.frequencies, positions.long(), slots.long(), page_table.long())
        x = self.model.embed_tokens.weight[token_ids.long()]
        after: list[Tensor] = []
        for layer, spec in zip(self.model.layers, self.layer_state, strict=True):
            x, new = layer(x, flat, state[len(after) : len(after) + len(spec)])
            after.extend(new)
        hidden, wanted = self.model.norm(x), logit_rows.long()
        return (self.lm_head(hidden[wanted]), *((hidden,) if self.taps else ()), *after)

    def step(self) -> StepSpec:
        """The declaration of the target step."""
        state = tuple(tensor for layer in self.layer_state for tensor in layer)
        outputs = [step_output("logits", "M", self.config.vocab_size)]
        if self.taps:
            outputs.append(step_output("taps", "N", self.config.hidden_size))
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
            tuple(outputs),
            state,
            tuple(tensor.name for tensor in state),
            sizes={"N": 12, "R1": 4, "R": 3, "S": 5, "P": 2, "M": 7, "pages": 6},
        )
