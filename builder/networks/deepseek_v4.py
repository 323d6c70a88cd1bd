"""DeepSeek-V4 target network as one flat step for prefill, plain decode and verify.

    X[0..m-1] = embed(ids)                                            m identical residual streams
    for every layer:
        a, post, C = hc_pre(X);   X = hc_post(attention(norm(a)), X, post, C)
        f, post, C = hc_pre(X);   X = hc_post(experts(norm(f)),   X, post, C)
    logits = head(norm(hc_head(X)))

Attention is over a sliding window, plus every row of a heavily compressed memory (HCA), or plus the rows a lightning
indexer chose from a lightly compressed one (CSA). Source: DeepSeek-V4 report (arXiv 2606.19348). Everything is fp32;
parameter names are those of the released checkpoints, except that the experts of a layer are one bank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twostroke.builder.config import CSA, HCA, SLIDING, DeepseekV4Config
from twostroke.builder.networks.layers import (
    ExpertBank,
    Linear,
    RMSNorm,
    Rotation,
    StepSpec,
    rms,
    rope_frequencies,
    routed_experts,
    step_input,
    step_output,
    weight,
)
from twostroke.engines.errors import ConfigError
from twostroke.engines.manifest import StateTensor
from twostroke.plugins.all_reduce.torch_op import ALL_REDUCE
from twostroke.plugins.compressor.torch_op import COMPRESS
from twostroke.plugins.flat_step import closing_rows
from twostroke.plugins.hyper_connection.torch_op import HC_HEAD, HC_POST, HC_PRE
from twostroke.plugins.moe.reference import swiglu
from twostroke.plugins.moe.torch_op import MOE_ROUTE, MOE_ROUTE_HASH
from twostroke.plugins.nsa.torch_op import NSA_CSA, NSA_HCA, NSA_WINDOW

TOKENS_PER_PAGE = 256


# A tap is a layer number, whose output is averaged over streams, or this: all streams after the last layer, [N, m*D].
RESIDUAL = "residual"


@dataclass(frozen=True)
class Rows:
    """What a layer with a sliding window reads of a step, all i64. `window_turn` rotates by window-only frequencies."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    row_start: Tensor
    window_turn: Rotation


@dataclass(frozen=True)
class Flat(Rows):
    """What every layer of a step reads. `turn` and `index_turn` rotate by the compressed layers' frequencies,
    `entry_turn[ratio, size]` at the first token of each window of `ratio` that the rows `closing[ratio]` complete."""

    page_table: Tensor
    turn: Rotation
    index_turn: Rotation
    entry_turn: dict[tuple[int, int], Rotation]
    closing: dict[int, Tensor]


class Projections(nn.Module):
    """Query bottleneck, the one key/value row, and the grouped low-rank output projection of an attention layer."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        self.config = config
        heads = config.num_attention_heads * config.head_dim
        self.wq_a = Linear(config.hidden_size, config.q_lora_rank)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = Linear(config.q_lora_rank, heads)
        self.wkv = Linear(config.hidden_size, config.head_dim)
        self.kv_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.wo_a = Linear(heads // config.o_groups, config.o_groups * config.o_lora_rank)
        self.wo_b = Linear(config.o_groups * config.o_lora_rank, config.hidden_size)
        self.attn_sink = weight(config.num_attention_heads)

    @property
    def scale(self) -> float:
        """Softmax scale, head_dim^-0.5."""
        return self.config.head_dim**-0.5

    def latent(self, x: Tensor) -> Tensor:
        """Normalised query latent [N, q_lora_rank]; the indexer reads it too."""
        normed: Tensor = self.q_norm(self.wq_a(x))
        return normed

    def queries(self, latent: Tensor, turn: Rotation) -> Tensor:
        """q [N, heads, head_dim], each head normalised without a weight, then rotated."""
        q = self.wq_b(latent).reshape(-1, self.config.num_attention_heads, self.config.head_dim)
        return turn(rms(q, self.config.rms_norm_eps))

    def key_rows(self, x: Tensor, turn: Rotation) -> Tensor:
        """The row [N, head_dim] that is key and value of every head."""
        return turn(self.kv_norm(self.wkv(x)))

    def output(self, o: Tensor, turn: Rotation) -> Tensor:
        """Undoes the rotation the value rows carry, then projects group by group. o [N, heads, head_dim] -> [N, D]."""
        groups = self.config.o_groups
        grouped = turn(o, inverse=True).reshape(o.shape[0], groups, -1).transpose(0, 1)
        down = self.wo_a.matrix().reshape(groups, self.config.o_lora_rank, -1)
        low = torch.matmul(grouped, down.transpose(1, 2)).transpose(0, 1)
        return ALL_REDUCE.overload(self.wo_b(low.reshape(o.shape[0], -1)))


class Compressor(nn.Module):
    """One key/value row per `ratio` tokens. c = 2 feature halves when windows overlap (CSA), 1 otherwise (HCA)."""

    def __init__(self, config: DeepseekV4Config, ratio: int, size: int, overlap: bool, ring: int) -> None:
        super().__init__()
        self.ratio, self.size, self.overlap, self.ring = ratio, size, overlap, ring
        width = 2 * size if overlap else size
        self.ape = weight(ratio, width)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.wkv = Linear(config.hidden_size, width)
        self.wgate = Linear(config.hidden_size, width)

    def forward(self, x: Tensor, flat: Flat, raw: Tensor) -> tuple[Tensor, Tensor]:
        """The rows [C, size] this step completes, normed and rotated, and the raw ring after the step."""
        row, raw = COMPRESS.overload(
            self.wkv(x),
            self.wgate(x),
            self.ape,
            raw,
            flat.positions,
            flat.slots,
            flat.row_start,
            flat.closing[self.ratio],
            self.ratio,
            self.overlap,
            self.ring,
        )
        return flat.entry_turn[self.ratio, self.size](self.norm(row)), raw


class Indexer(nn.Module):
    """Lightning indexer of a CSA layer: which compressed rows a query attends to."""

    def __init__(self, config: DeepseekV4Config, ratio: int, ring: int) -> None:
        super().__init__()
        self.heads, self.size = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.size)
        self.weights_proj = Linear(config.hidden_size, self.heads)
        self.compressor = Compressor(config, ratio, self.size, overlap=True, ring=ring)

    def forward(self, x: Tensor, latent: Tensor, flat: Flat, raw: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Index queries [N, heads, size], head weights [N, heads], the index rows completed [C, size], the raw ring."""
        q = flat.index_turn(self.wq_b(latent).reshape(-1, self.heads, self.size))
        head_weight = self.weights_proj(x) * (self.heads**-0.5 * self.size**-0.5)
        row, raw = self.compressor(x, flat, raw)
        return q, head_weight, row, raw


class WindowAttention(Projections):
    """Sliding window only."""

    def __init__(self, config: DeepseekV4Config, block: int) -> None:
        super().__init__(config)
        self.ring = block + config.sliding_window - 1

    def state(self, prefix: str) -> tuple[StateTensor, ...]:
        return (window_state(prefix, self.config, self.ring),)

    def forward(self, x: Tensor, flat: Rows, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        q = self.queries(self.latent(x), flat.window_turn)
        kv = self.key_rows(x, flat.window_turn)
        out, window = NSA_WINDOW.overload(
            q,
            kv,
            self.attn_sink,
            state[0],
            flat.positions,
            flat.slots,
            flat.row_start,
            self.config.sliding_window,
            self.ring,
            self.scale,
        )
        return self.output(out, flat.window_turn), (window,)


class HeavilyCompressedAttention(Projections):
    """Window plus every compressed row."""

    def __init__(self, config: DeepseekV4Config, ratio: int, block: int, max_seq_len: int) -> None:
        super().__init__(config)
        self.ratio = ratio
        self.capacity = max(1, max_seq_len // ratio)
        self.ring = block + config.sliding_window - 1
        self.compressor = Compressor(config, ratio, config.head_dim, overlap=False, ring=block + ratio - 2)

    def state(self, prefix: str) -> tuple[StateTensor, ...]:
        size = self.config.head_dim
        return (
            window_state(prefix, self.config, self.ring),
            StateTensor(f"{prefix}.compressed", "linear", self.ratio, self.capacity, size),
            StateTensor(f"{prefix}.raw", "ring", 1, self.compressor.ring, 2 * size, ratio=self.ratio),
        )

    def forward(self, x: Tensor, flat: Flat, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        window, compressed, raw = state
        q = self.queries(self.latent(x), flat.turn)
        kv = self.key_rows(x, flat.turn)
        entry, raw = self.compressor(x, flat, raw)
        out, window, compressed = NSA_HCA.overload(
            q,
            kv,
            entry,
            self.attn_sink,
            window,
            compressed,
            flat.positions,
            flat.slots,
            flat.row_start,
            flat.closing[self.ratio],
            self.config.sliding_window,
            self.ring,
            self.ratio,
            self.capacity,
            self.scale,
        )
        return self.output(out, flat.turn), (window, compressed, raw)


class CompressedSparseAttention(Projections):
    """Window plus the compressed rows the indexer chose."""

    def __init__(self, config: DeepseekV4Config, ratio: int, block: int) -> None:
        super().__init__(config)
        if TOKENS_PER_PAGE % ratio:
            raise ConfigError(
                f"compress_ratios has {ratio} for a {CSA} layer; expected a divisor of {TOKENS_PER_PAGE}, the tokens "
                "of a page, which holds whole compressed rows"
            )
        self.ratio = ratio
        self.ring = block + config.sliding_window - 1
        raw_ring = block + 2 * ratio - 2
        self.compressor = Compressor(config, ratio, config.head_dim, overlap=True, ring=raw_ring)
        self.indexer = Indexer(config, ratio, raw_ring)

    def state(self, prefix: str) -> tuple[StateTensor, ...]:
        size, index_size, ratio = self.config.head_dim, self.config.index_head_dim, self.ratio
        rows, ring = TOKENS_PER_PAGE // ratio, self.compressor.ring
        return (
            window_state(prefix, self.config, self.ring),
            StateTensor(f"{prefix}.compressed", "paged", ratio, rows, size),
            StateTensor(f"{prefix}.index", "paged", ratio, rows, index_size),
            StateTensor(f"{prefix}.raw", "ring", 1, ring, 4 * size, ratio=ratio, lookback=ratio),
            StateTensor(f"{prefix}.index_raw", "ring", 1, ring, 4 * index_size, ratio=ratio, lookback=ratio),
        )

    def forward(self, x: Tensor, flat: Flat, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        window, compressed, index, raw, index_raw = state
        latent = self.latent(x)
        q = self.queries(latent, flat.turn)
        kv = self.key_rows(x, flat.turn)
        entry, raw = self.compressor(x, flat, raw)
        index_q, index_weight, index_entry, index_raw = self.indexer(x, latent, flat, index_raw)
        out, window, compressed, index = NSA_CSA.overload(
            q,
            kv,
            entry,
            index_q,
            index_weight,
            index_entry,
            self.attn_sink,
            window,
            compressed,
            index,
            flat.positions,
            flat.slots,
            flat.row_start,
            flat.closing[self.ratio],
            flat.page_table,
            self.config.sliding_window,
            self.ring,
            self.ratio,
            TOKENS_PER_PAGE // self.ratio,
            self.config.index_topk,
            self.scale,
        )
        return self.output(out, flat.turn), (window, compressed, index, raw, index_raw)


def window_state(prefix: str, config: DeepseekV4Config, ring: int) -> StateTensor:
    """The sliding-window ring of a layer. The next token sees the last window-1 committed rows."""
    return StateTensor(f"{prefix}.window", "ring", 1, ring, config.head_dim, lookback=config.sliding_window - 1)


class Experts(nn.Module):
    """All routed experts of a layer: w1 and w3 [E, F, D], w2 [E, D, F]."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        experts, inner, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.w1 = ExpertBank(experts, hidden, inner)
        self.w2 = ExpertBank(experts, inner, hidden)
        self.w3 = ExpertBank(experts, hidden, inner)


class SharedExpert(nn.Module):
    """The expert every token passes, with the same clamp."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.w1 = Linear(config.hidden_size, config.moe_intermediate_size)
        self.w2 = Linear(config.moe_intermediate_size, config.hidden_size)
        self.w3 = Linear(config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(swiglu(self.w1(x), self.w3(x), self.limit))
        return out


class Gate(nn.Module):
    """Router: learned with a selection bias, or by a table of token ids in the first layers."""

    def __init__(self, config: DeepseekV4Config, hashed: bool) -> None:
        super().__init__()
        self.top_k, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor
        self.hashed = hashed
        self.weight = weight(config.n_routed_experts, config.hidden_size)
        if hashed:
            self.tid2eid = weight(config.vocab_size, self.top_k, dtype=torch.int32)
        else:
            self.bias = weight(config.n_routed_experts)

    def forward(self, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [N, k] and their weights [N, k]."""
        if self.hashed:
            return MOE_ROUTE_HASH.overload(x, self.weight, token_ids, self.tid2eid, self.scaling)
        return MOE_ROUTE.overload(x, self.weight, self.bias, self.top_k, self.scaling)


class MixtureOfExperts(nn.Module):
    """Routed experts plus the shared one."""

    def __init__(self, config: DeepseekV4Config, hashed: bool) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.gate = Gate(config, hashed)
        self.experts = Experts(config)
        self.shared_experts = SharedExpert(config)

    def forward(self, x: Tensor, token_ids: Tensor) -> Tensor:
        ids, weights = self.gate(x, token_ids)
        bank = self.experts
        routed = routed_experts(x, ids, weights, bank.w1, bank.w2, bank.w3, self.limit)
        return ALL_REDUCE.overload(routed + self.shared_experts(x))


class HyperConnected(nn.Module):
    """A layer's two sublayers between their hyper-connections. The draft's stages are layers too."""

    def __init__(self, config: DeepseekV4Config, attn: nn.Module, hashed: bool) -> None:
        super().__init__()
        self.config = config
        streams, width = config.hc_mult, config.hc_mult * config.hidden_size
        mixes = (2 + streams) * streams
        self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale = weight(mixes, width), weight(mixes), weight(3)
        self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale = weight(mixes, width), weight(mixes), weight(3)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = attn
        self.ffn = MixtureOfExperts(config, hashed)

    def _pre(self, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        return HC_PRE.overload(streams, fn, base, scale, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)

    def forward(self, streams: Tensor, flat: Rows, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        a, post, comb = self._pre(streams, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale)
        out, state = self.attn(self.attn_norm(a), flat, state)
        streams = HC_POST.overload(out, streams, post, comb)
        f, post, comb = self._pre(streams, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale)
        streams = HC_POST.overload(self.ffn(self.ffn_norm(f), flat.token_ids), streams, post, comb)
        return streams, state


class DeepseekV4(nn.Module):
    """The target step. `draft_len` drafted tokens a request (T = draft_len + 1) size the rings; `taps` are what the
    draft method asks for, side by side: layer numbers or RESIDUAL. `layer_state` has each layer's state tensors in the
    order `forward` takes them."""

    window_frequencies: Tensor
    frequencies: Tensor

    def __init__(self, config: DeepseekV4Config, draft_len: int, max_seq_len: int, taps: tuple[int | str, ...]) -> None:
        super().__init__()
        self.config, self.max_seq_len, self.taps = config, max_seq_len, taps
        block = draft_len + 1
        hidden, streams = config.hidden_size, config.hc_mult
        self.embed = Linear(hidden, config.vocab_size)
        attention = [self._attention(layer, block) for layer in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(
            HyperConnected(config, attn, hashed=layer < config.num_hash_layers) for layer, attn in enumerate(attention)
        )
        self.layer_state = tuple(attn.state(f"layers.{layer}") for layer, attn in enumerate(attention))
        self.hc_head_fn, self.hc_head_base = weight(streams, streams * hidden), weight(streams)
        self.hc_head_scale = weight(1)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.head = Linear(hidden, config.vocab_size)
        rope = config.qk_rope_head_dim
        self.register_buffer("window_frequencies", rope_frequencies(rope, config.rope_theta, None))
        self.register_buffer("frequencies", rope_frequencies(rope, config.compress_rope_theta, config.rope_scaling))

    def _attention(
        self, layer: int, block: int
    ) -> WindowAttention | HeavilyCompressedAttention | CompressedSparseAttention:
        kind, ratio = self.config.layer_types[layer], self.config.compress_ratios[layer]
        if kind == SLIDING:
            return WindowAttention(self.config, block)
        if kind == HCA:
            return HeavilyCompressedAttention(self.config, ratio, block, self.max_seq_len)
        return CompressedSparseAttention(self.config, ratio, block)

    def flat(self, token_ids: Tensor, positions: Tensor, slots: Tensor, row_start: Tensor, page_table: Tensor) -> Flat:
        """Step inputs (i32) as the layers read them (i64), with every rotation computed once."""
        positions, slots, row_start = positions.long(), slots.long(), row_start.long()
        size, index_size = self.config.head_dim, self.config.index_head_dim
        turn_at = functools.partial(Rotation.at, frequencies=self.frequencies)
        ratios = {ratio for ratio in self.config.compress_ratios if ratio}
        closing = {ratio: closing_rows(positions, slots, row_start, ratio=ratio) for ratio in sorted(ratios)}
        kinds = zip(self.config.compress_ratios, self.config.layer_types, strict=True)
        entries = {(ratio, n) for ratio, kind in kinds if ratio for n in (size, index_size) if n == size or kind == CSA}

        def opened(ratio: int) -> Tensor:
            return (positions[closing[ratio].clamp(min=0)] - (ratio - 1)).clamp(min=0)

        return Flat(
            token_ids.long(),
            positions,
            slots,
            row_start,
            Rotation.at(positions, self.window_frequencies, size),
            page_table.long(),
            turn_at(positions, size=size),
            turn_at(positions, size=index_size),
            {(ratio, n): turn_at(opened(ratio), size=n) for ratio, n in sorted(entries)},
            closing,
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
        """logits [M, V], taps [N, W] where a draft method asks for them, then the new value of every state tensor.

        `request_slot` [R] is part of the contract for kernels that work per request; this network reads per token.
        """
        flat = self.flat(token_ids, positions, slots, row_start, page_table)
        embedded = self.embed.rows(flat.token_ids)
        streams = embedded[:, None, :].expand(-1, self.config.hc_mult, -1).contiguous()
        taps: dict[int | str, Tensor] = {}
        after: list[Tensor] = []
        taken = 0
        for index, (layer, spec) in enumerate(zip(self.layers, self.layer_state, strict=True)):
            streams, new = layer(streams, flat, state[taken : taken + len(spec)])
            taken += len(spec)
            after.extend(new)
            if index in self.taps:
                taps[index] = streams.mean(dim=1)
        taps[RESIDUAL] = streams.reshape(streams.shape[0], -1)
        hidden = self.collapse(streams[logit_rows.long()])
        logits = self.head(self.norm(hidden))
        tapped = (torch.cat([taps[tap] for tap in self.taps], dim=1),) if self.taps else ()
        return (logits, *tapped, *after)

    def collapse(self, streams: Tensor) -> Tensor:
        """The streams as one hidden row, [M, D]."""
        return HC_HEAD.overload(
            streams,
            self.hc_head_fn,
            self.hc_head_base,
            self.hc_head_scale,
            self.config.hc_eps,
            self.config.rms_norm_eps,
        )

    def step(self) -> StepSpec:
        """The declaration of the target step."""
        state = tuple(tensor for layer in self.layer_state for tensor in layer)
        outputs = [step_output("logits", "M", self.config.vocab_size)]
        if self.taps:
            widths = [self.config.hc_mult if tap == RESIDUAL else 1 for tap in self.taps]
            outputs.append(step_output("taps", "N", sum(widths) * self.config.hidden_size))
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
