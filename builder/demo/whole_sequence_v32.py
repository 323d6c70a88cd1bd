"""DeepSeek-V3.2 target and its MTP layer over whole sequences, in plain differentiable torch.

The V3.2 counterpart of `whole_sequence`, under the same promise: written from the published maths alone (section
numbers: `spec/deepseek_v32.md`), no code of the ops, graphs or state handling, every key recomputed from the whole
sequence. Attention is in its plain form, keys and values expanded for each head, where the compiled step absorbs them.
No FP8 and no Hadamard rotation (sections 5.3 and 11 allow that for a model stored in bf16). Exact in float32.

`config` is any object with the field names of `config.json`; `weights` maps the checkpoint's own tensor names to
tensors, the experts one by one.

Letters: B sequences, L positions, T query rows, K key rows, D hidden, H heads, J index heads, E experts, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.builder.demo.trace import Trace
from twostroke.builder.demo.whole_sequence import Config, Weights, rms_norm, rotate, top_rows

INNER_EPS = 1e-6  # of the norms inside attention


class TargetOutput(NamedTuple):
    logits: Tensor  # [B, T, V]
    hidden: Tensor  # [B, T, D] after model.norm, what the MTP layer reads
    inputs: list[Tensor]  # per layer: what attention read at positions 0..L-1, [B, L, D]


class MtpOutput(NamedTuple):
    logits: Tensor  # [B, T, V]; the row at position i predicts token i + 2
    hidden: Tensor  # [B, T, D] after shared_head.norm, what a further row starts from


class Queries(NamedTuple):
    q: Tensor  # [B, T, H, nope + rope]
    indexer: Tensor  # [B, T, J, C]
    gates: Tensor  # [B, T, J]


class Keys(NamedTuple):
    k: Tensor  # [B, K, H, nope + rope]
    v: Tensor  # [B, K, H, v]
    indexer: Tensor  # [B, K, C], one for all index heads


# Rotary positions, section 2.1


def frequencies(config: Config, device: torch.device) -> Tensor:
    """[qk_rope_head_dim / 2], YaRN where the config has it; the same for attention and indexer."""
    width, theta, scaling = config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
    plain = theta ** -(torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    if scaling is None:
        return plain

    def dim(turns: float) -> float:
        return (
            width * math.log(scaling["original_max_position_embeddings"] / (2 * math.pi * turns)) / 2 / math.log(theta)
        )

    low = max(math.floor(dim(scaling["beta_fast"])), 0)
    high = min(math.ceil(dim(scaling["beta_slow"])), width - 1)
    ramp = ((torch.arange(width // 2, device=device) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / scaling["factor"] * ramp + plain * (1 - ramp)


def softmax_scale(config: Config) -> float:
    """(nope + rope)^-0.5 m^2. mscale and mscale_all_dim are equal, so the tables of sines carry no factor."""
    scaling = config.rope_scaling
    m = 1.0 if scaling is None else 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1
    return float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5 * m * m)


def rotate_index(config: Config, x: Tensor, angles: Tensor) -> Tensor:
    """Turn the first dims of `x` [..., C] by `angles` [..., rope/2], pairs (i, i + rope/2); attention turns its last
    ones, interleaved."""
    pairs = angles.shape[-1]
    cos, sin = angles.cos(), angles.sin()
    if getattr(config, "indexer_rope_interleave", False):
        first, second = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
    else:
        first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
        turned = torch.cat((first * cos - second * sin, first * sin + second * cos), -1)
    return torch.cat((turned, x[..., 2 * pairs :]), -1)


# Attention, sections 3 and 5


def queries(config: Config, weights: Weights, at: str, x: Tensor, angles: Tensor) -> Queries:
    """x [B, T, D], angles [T, rope/2]. The indexer learns from its own loss only: what it reads is detached, which
    changes nothing outside training."""
    latent = F.linear(x, weights[f"{at}.q_a_proj.weight"])
    latent = rms_norm(latent, weights[f"{at}.q_a_layernorm.weight"], INNER_EPS)
    q = F.linear(latent, weights[f"{at}.q_b_proj.weight"]).unflatten(-1, (config.num_attention_heads, -1))
    heads, width = config.index_n_heads, config.index_head_dim
    index = F.linear(latent.detach(), weights[f"{at}.indexer.wq_b.weight"]).unflatten(-1, (heads, width))
    gates = F.linear(x.detach(), weights[f"{at}.indexer.weights_proj.weight"]) * (heads**-0.5 * width**-0.5)
    return Queries(rotate(q, angles[:, None]), rotate_index(config, index, angles[:, None]), gates)


def keys(config: Config, weights: Weights, at: str, x: Tensor, angles: Tensor) -> Keys:
    """x [B, K, D], angles [K, rope/2]. Only the latent is normed; the rotated part is one for all heads."""
    both = F.linear(x, weights[f"{at}.kv_a_proj_with_mqa.weight"])
    latent = rms_norm(both[..., : config.kv_lora_rank], weights[f"{at}.kv_a_layernorm.weight"], INNER_EPS)
    rotary = rotate(both[..., config.kv_lora_rank :], angles)[..., None, :]
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    expanded = F.linear(latent, weights[f"{at}.kv_b_proj.weight"]).unflatten(-1, (heads, -1))
    k = torch.cat((expanded[..., :nope], rotary.expand(*expanded.shape[:-1], -1)), -1)
    index = F.layer_norm(
        F.linear(x.detach(), weights[f"{at}.indexer.wk.weight"]),
        (config.index_head_dim,),
        weights[f"{at}.indexer.k_norm.weight"],
        weights[f"{at}.indexer.k_norm.bias"],
        INNER_EPS,
    )
    return Keys(k, expanded[..., nope:], rotate_index(config, index, angles))


def attend(
    config: Config,
    weights: Weights,
    at: str,
    query: Queries,
    shared: Keys,
    own: list[Keys],
    visible: Tensor,
    trace: Trace | None,
) -> Tensor:
    """[B, T, D] out of the `index_topk` rows each query's indexer likes best.

    `shared` rows are candidates of the queries that `visible` [T, K] says. Each of `own` has as many rows as there are
    queries, and row t is a candidate of query t alone, later than all before it: that is how a draft chain sees its own
    earlier rows.
    """
    scores = torch.einsum(
        "btj,btjk->btk", query.gates, torch.einsum("btjc,bkc->btjk", query.indexer, shared.indexer).relu()
    )
    logits = torch.einsum("bthc,bkhc->bhtk", query.q * softmax_scale(config), shared.k)
    for one in own:
        score = (query.gates * torch.einsum("btjc,btc->btj", query.indexer, one.indexer).relu()).sum(-1, keepdim=True)
        logit = torch.einsum("bthc,bthc->bht", query.q * softmax_scale(config), one.k)
        scores, logits = torch.cat((scores, score), -1), torch.cat((logits, logit[..., None]), -1)
    visible = F.pad(visible, (0, len(own)), value=True)[None]
    if trace is not None:
        with torch.no_grad():
            mass = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1).mean(1)
        trace.indexer.append((scores.masked_fill(~visible, -1e9), mass))
    if scores.shape[-1] > config.index_topk:
        visible = top_rows(scores.detach(), visible, config.index_topk)
    share = logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    count = shared.k.shape[1]
    out = torch.einsum("bhtk,bkhv->bthv", share[..., :count], shared.v)
    for number, one in enumerate(own):
        out = out + share[..., count + number].transpose(1, 2)[..., None] * one.v
    return F.linear(out.flatten(-2), weights[f"{at}.o_proj.weight"])


# Feed-forward, section 4


def swiglu(weights: Weights, at: str, x: Tensor) -> Tensor:
    gate, up = F.linear(x, weights[f"{at}.gate_proj.weight"]), F.linear(x, weights[f"{at}.up_proj.weight"])
    return F.linear(F.silu(gate) * up, weights[f"{at}.down_proj.weight"])


def routing(config: Config, weights: Weights, at: str, x: Tensor) -> Tensor:
    """[B, T, D] -> weight of each expert [B, T, E], zero for those not chosen. The bias only selects."""
    scores = torch.sigmoid(F.linear(x, weights[f"{at}.gate.weight"]))
    biased = scores.detach() + weights[f"{at}.gate.e_score_correction_bias"]
    grouped = biased.unflatten(-1, (config.n_group, -1))
    worth = grouped.sort(-1, descending=True).values[..., :2].sum(-1)
    best = worth.sort(stable=True, dim=-1, descending=True).indices[..., : config.topk_group]
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, best, True)
    biased = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    chosen = biased.sort(stable=True, dim=-1, descending=True).indices[..., : config.num_experts_per_tok]
    share = scores.gather(-1, chosen)
    share = share / (share.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    return torch.zeros_like(scores).scatter(-1, chosen, share)


def feed_forward(config: Config, weights: Weights, at: str, x: Tensor, trace: Trace | None) -> Tensor:
    """[B, T, D] -> [B, T, D]. Every expert runs on every row; the weights of those not chosen are zero."""
    if f"{at}.gate.weight" not in weights:
        return swiglu(weights, at, x)
    route = routing(config, weights, at, x)
    if trace is not None:
        trace.routes.append((f"{at}.gate.e_score_correction_bias", route.detach()))
    gate, up, down = (
        torch.stack([weights[f"{at}.experts.{e}.{name}_proj.weight"] for e in range(config.n_routed_experts)])
        for name in ("gate", "up", "down")
    )
    inner = F.silu(torch.einsum("btd,eid->btei", x, gate)) * torch.einsum("btd,eid->btei", x, up)
    routed = torch.einsum("btei,edi->btd", inner * route[..., None], down)
    return routed + swiglu(weights, f"{at}.shared_experts", x)


def finish_layer(
    config: Config, weights: Weights, at: str, x: Tensor, attended: Tensor, trace: Trace | None, dropout: float
) -> Tensor:
    """Both residual additions of a layer, given what its attention brought."""
    x = x + F.dropout(attended, dropout)
    normed = rms_norm(x, weights[f"{at}.post_attention_layernorm.weight"], config.rms_norm_eps)
    return x + F.dropout(feed_forward(config, weights, f"{at}.mlp", normed, trace), dropout)


# The two networks


def target(
    config: Config,
    weights: Weights,
    tokens: Tensor,
    earlier: list[Tensor] | None = None,
    trace: Trace | None = None,
    dropout: float = 0.0,
) -> TargetOutput:
    """Tokens [B, T] -> logits and hidden rows of these T rows.

    `earlier` continues a sequence: the `inputs` of a previous call, of which only the attention inputs are kept; every
    key is still recomputed.
    """
    start = earlier[0].shape[1] if earlier else 0
    positions = torch.arange(start + tokens.shape[1], device=tokens.device)
    angles = positions[:, None] * frequencies(config, tokens.device)
    visible = positions <= positions[start:, None]
    x = weights["model.embed_tokens.weight"][tokens]
    inputs: list[Tensor] = []
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        normed = rms_norm(x, weights[f"{at}.input_layernorm.weight"], config.rms_norm_eps)
        inputs.append(torch.cat((earlier[layer], normed), 1) if earlier else normed)
        query = queries(config, weights, f"{at}.self_attn", normed, angles[start:])
        context = keys(config, weights, f"{at}.self_attn", inputs[layer], angles)
        attended = attend(config, weights, f"{at}.self_attn", query, context, [], visible, trace)
        x = finish_layer(config, weights, at, x, attended, trace, dropout)
    hidden = rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    return TargetOutput(F.linear(hidden, weights["lm_head.weight"]), hidden, inputs)


class MtpChain:
    """The MTP layer of section 8 over rows 0..L-1, used again and again, a chain from every row at once.

    The first step's row i joins the target's hidden i with token i + 1. Step j's row continues the chain of row i: it
    stands at position i + j, starts from the hidden row of the step before, and sees the first step's rows 0..i (made
    of the target's hidden rows) and its own chain's.
    """

    def __init__(self, config: Config, weights: Weights, hidden: Tensor, trace: Trace | None = None) -> None:
        self._config, self._weights, self._trace = config, weights, trace
        self._hidden = hidden
        self._context: list[Keys] = []

    def step(self, tokens: Tensor) -> MtpOutput:
        """Token ids [B, L] that follow each chain so far."""
        config, weights, eps = self._config, self._weights, self._config.rms_norm_eps
        at = f"model.layers.{config.num_hidden_layers}"
        rows = torch.arange(tokens.shape[1], device=tokens.device)
        angles = (rows + len(self._context))[:, None] * frequencies(config, tokens.device)
        token = rms_norm(weights["model.embed_tokens.weight"][tokens], weights[f"{at}.enorm.weight"], eps)
        past = rms_norm(self._hidden, weights[f"{at}.hnorm.weight"], eps)
        x = F.linear(torch.cat((token, past), -1), weights[f"{at}.eh_proj.weight"])
        normed = rms_norm(x, weights[f"{at}.input_layernorm.weight"], eps)
        query = queries(config, weights, f"{at}.self_attn", normed, angles)
        self._context.append(keys(config, weights, f"{at}.self_attn", normed, angles))
        first, *own = self._context
        visible = rows <= rows[:, None]
        attended = attend(config, weights, f"{at}.self_attn", query, first, own, visible, self._trace)
        y = finish_layer(config, weights, at, x, attended, self._trace, 0.0)
        self._hidden = rms_norm(y, weights[f"{at}.shared_head.norm.weight"], eps)
        return MtpOutput(F.linear(self._hidden, weights["lm_head.weight"]), self._hidden)


def mtp(config: Config, weights: Weights, hidden: Tensor, next_tokens: Tensor) -> MtpOutput:
    """Section 8.2: hidden rows 0..L-1 [B, L, D], the tokens after them [B, L]. A draft chain by the book appends the
    last row's hidden and its token and calls this again."""
    return MtpChain(config, weights, hidden).step(next_tokens)
