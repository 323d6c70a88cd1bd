"""DeepSeek-V4 target and its drafts (DSpark, NextN) over whole sequences, in plain differentiable torch.

Written from the published maths alone (section numbers: V4 = the target, DS = the drafts) and shares no code with the
ops, graphs or state handling of the rest of the tree. That makes it two things: what the demo model is trained with,
and the independent oracle of the tests. There is no cache: every key is recomputed from the whole sequence. No FP8,
FP4 or Hadamard rounding is applied (V4 sections 6 and 8 allow that for a model stored in bf16).

`config` is any object with the field names of `config.json`; `weights` maps the checkpoint's own tensor names
(`layers.0.attn.wq_a.weight`, `mtp.2.markov_head.markov_w1.weight`, ...) to tensors. Exact in float32.

Letters: B sequences, L positions, T query rows, S hyper-connection streams, D hidden, H heads, C = head_dim,
E experts, A anchors per sequence, G = dspark_block_size, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.builder.demo.trace import Trace

Config = SimpleNamespace
Weights = Mapping[str, Tensor]


class TargetOutput(NamedTuple):
    logits: Tensor  # [B, T, V]
    taps: Tensor  # [B, T, len(dspark_target_layer_ids) * D]; without DSpark all streams after the last layer, S * D
    inputs: list[Tensor]  # per layer: what attention read at positions 0..L-1, [B, L, D]


class NextnOutput(NamedTuple):
    logits: Tensor  # [B, L, V], row i predicts token i + 2
    hidden: Tensor  # [B, L, S * D], what a further row starts from


class DraftOutput(NamedTuple):
    logits: Tensor  # [B, A, G, V] before the markov bias
    hidden: Tensor  # [B, A, G, D] before the final norm


# Norm and rotary positions


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def frequencies(config: Config, ratio: int, device: torch.device) -> Tensor:
    """[qk_rope_head_dim / 2]. V4 section 5: YaRN only where keys are compressed, and without its attention factor."""
    width = config.qk_rope_head_dim
    step = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    if ratio == 0:
        return config.rope_theta**-step
    theta, scaling = config.compress_rope_theta, config.rope_scaling
    plain = theta**-step

    def dim(beta: float) -> float:
        original = scaling["original_max_position_embeddings"]
        return width * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))

    low = max(math.floor(dim(scaling["beta_fast"])), 0)
    high = min(math.ceil(dim(scaling["beta_slow"])), width - 1)
    ramp = ((torch.arange(width // 2, device=device) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / scaling["factor"] * ramp + plain * (1 - ramp)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the interleaved pairs of the last dims of `x` [..., C] by `angles` [..., rope/2]; the first dims stay."""
    width = 2 * angles.shape[-1]
    even, odd = x[..., -width::2], x[..., -width + 1 :: 2]
    cos, sin = angles.cos(), angles.sin()
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-width], turned), -1)


# Hyper-connections, V4 section 4


def hc_pre(config: Config, weights: Weights, at: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Streams [B, T, S, D] -> sublayer input [B, T, D], post [B, T, S], comb [B, T, S (source), S (destination)]."""
    count, eps = config.hc_mult, config.hc_eps
    flat = rms_norm(streams.flatten(-2), None, config.rms_norm_eps)
    mixed = F.linear(flat, weights[f"{at}_fn"])
    scale, base = weights[f"{at}_scale"], weights[f"{at}_base"]
    pre = torch.sigmoid(mixed[..., :count] * scale[0] + base[:count]) + eps
    post = 2 * torch.sigmoid(mixed[..., count : 2 * count] * scale[1] + base[count : 2 * count])
    comb = (mixed[..., 2 * count :] * scale[2] + base[2 * count :]).unflatten(-1, (count, count))
    comb = comb.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return (pre[..., None] * streams).sum(-2), post, comb


def hc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_k = post_k y + sum_j comb[j, k] X_j: the sum runs over the first index of comb."""
    return post[..., None] * y[..., None, :] + (comb[..., None] * streams[..., :, None, :]).sum(-3)


def hc_head(config: Config, weights: Weights, at: str, streams: Tensor) -> Tensor:
    """[B, T, S, D] -> [B, T, D]."""
    mixed = F.linear(rms_norm(streams.flatten(-2), None, config.rms_norm_eps), weights[f"{at}_fn"])
    pre = torch.sigmoid(mixed * weights[f"{at}_scale"] + weights[f"{at}_base"]) + config.hc_eps
    return (pre[..., None] * streams).sum(-2)


# Attention, V4 sections 6 to 8


def query_latent(config: Config, weights: Weights, at: str, x: Tensor) -> Tensor:
    """[B, T, D] -> [B, T, q_lora_rank]; the indexer starts from it too."""
    return rms_norm(F.linear(x, weights[f"{at}.wq_a.weight"]), weights[f"{at}.q_norm.weight"], config.rms_norm_eps)


def queries(config: Config, weights: Weights, at: str, latent: Tensor, angles: Tensor) -> Tensor:
    """[B, T, q_lora_rank], angles [..., T, rope/2] -> [B, T, H, C]. The per-head norm has no weight."""
    q = F.linear(latent, weights[f"{at}.wq_b.weight"]).unflatten(-1, (config.num_attention_heads, -1))
    return rotate(rms_norm(q, None, config.rms_norm_eps), angles[..., None, :])


def window_keys(config: Config, weights: Weights, at: str, x: Tensor, angles: Tensor) -> Tensor:
    """[B, L, D] -> [B, L, C], key and value at once, for all heads."""
    kv = F.linear(x, weights[f"{at}.wkv.weight"])
    return rotate(rms_norm(kv, weights[f"{at}.kv_norm.weight"], config.rms_norm_eps), angles)


def attend(
    config: Config, weights: Weights, at: str, q: Tensor, angles: Tensor, keys: Tensor, allowed: Tensor
) -> tuple[Tensor, Tensor]:
    """q [B, T, H, C], keys [B, K, C], allowed [B or 1, T, K] -> output [B, T, D], probabilities [B, H, T, K].

    The sink is one more key with a fixed logit and no value (exact). Values carry rope, so the output is turned back.
    """
    logits = torch.einsum("bthc,bkc->bhtk", q, keys) * config.head_dim**-0.5
    logits = logits.masked_fill(~allowed[:, None], -torch.inf)
    sink = weights[f"{at}.attn_sink"][:, None, None].expand(*logits.shape[:-1], 1)
    probabilities = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
    out = rotate(torch.einsum("bhtk,bkc->bthc", probabilities, keys), -angles[..., None, :])
    groups = out.reshape(*out.shape[:2], config.o_groups, -1)
    low = weights[f"{at}.wo_a.weight"].unflatten(0, (config.o_groups, -1))
    low_rank = torch.einsum("btgi,goi->btgo", groups, low).flatten(-2)
    return F.linear(low_rank, weights[f"{at}.wo_b.weight"]), probabilities


def compress(config: Config, weights: Weights, at: str, x: Tensor, ratio: int) -> Tensor:
    """[B, L, D] -> rows [B, L // ratio, width]: per-channel softmax over a window's tokens, norm, rope at its start.

    Ratio 4 overlaps: the first half of the features serves the next window, the second half its own.
    """
    count = x.shape[1] // ratio
    x = x[:, : count * ratio].unflatten(1, (count, ratio))
    values = F.linear(x, weights[f"{at}.wkv.weight"])
    scores = F.linear(x, weights[f"{at}.wgate.weight"]) + weights[f"{at}.ape"]
    if ratio == 4:
        before = (0, 0, 0, 0, 1, 0)  # one window earlier; the first window has no predecessor
        value_next, value_own = values.chunk(2, -1)
        score_next, score_own = scores.chunk(2, -1)
        values = torch.cat((F.pad(value_next, before)[:, :count], value_own), 2)
        scores = torch.cat((F.pad(score_next, before, value=-torch.inf)[:, :count], score_own), 2)
    rows = (scores.softmax(2) * values).sum(2)
    starts = torch.arange(count, device=x.device) * ratio
    angles = starts[:, None] * frequencies(config, ratio, x.device)
    return rotate(rms_norm(rows, weights[f"{at}.norm.weight"], config.rms_norm_eps), angles)


def index_scores(
    config: Config, weights: Weights, at: str, x: Tensor, every_x: Tensor, latent: Tensor, angles: Tensor
) -> Tensor:
    """Lightning indexer, V4 section 8: [B, T, rows], sum over heads of g_h relu(q_h . k_w). No per-head norm here."""
    heads, width = config.index_n_heads, config.index_head_dim
    q = F.linear(latent, weights[f"{at}.wq_b.weight"]).unflatten(-1, (heads, width))
    q = rotate(q, angles[..., None, :])
    keys = compress(config, weights, f"{at}.compressor", every_x, ratio=4)
    gates = F.linear(x, weights[f"{at}.weights_proj.weight"]) * (heads**-0.5 * width**-0.5)
    return (gates[..., None] * torch.einsum("bthc,bwc->bthw", q, keys).relu()).sum(-2)


def top_rows(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Which `count` visible rows score highest, [B, T, rows] bool; ties go to the lowest index (stable sort)."""
    order = torch.sort(scores.masked_fill(~visible, -torch.inf), stable=True, descending=True).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :count], True)
    return chosen & visible


def target_attention(
    config: Config, weights: Weights, layer: int, x: Tensor, start: int, trace: Trace | None
) -> Tensor:
    """x [B, L, D] -> [B, L - start, D]: the rows from `start` on attend to all of x that they may see."""
    at, ratio = f"layers.{layer}.attn", config.compress_ratios[layer]
    positions = torch.arange(x.shape[1], device=x.device)
    angles = positions[:, None] * frequencies(config, ratio, x.device)
    rows, when = x[:, start:], positions[start:, None]
    latent = query_latent(config, weights, at, rows)
    q = queries(config, weights, at, latent, angles[start:])
    keys = window_keys(config, weights, at, x, angles)
    allowed = ((positions <= when) & (positions > when - config.sliding_window))[None]
    if ratio:
        compressed = compress(config, weights, f"{at}.compressor", x, ratio)
        numbers = torch.arange(compressed.shape[1], device=x.device)
        visible = (numbers < (when + 1) // ratio)[None].expand(len(x), -1, -1)
        if ratio == 4:
            # The indexer learns from its own loss only; with no trace the detachment changes nothing.
            scores = index_scores(
                config, weights, f"{at}.indexer", rows.detach(), x.detach(), latent.detach(), angles[start:]
            )
            if trace is not None:
                similarity = torch.einsum("bthc,bwc->bhtw", q, compressed).detach() * config.head_dim**-0.5
                mass = similarity.masked_fill(~visible[:, None], -1e9).softmax(-1).mean(1)
                trace.indexer.append((scores.masked_fill(~visible, -1e9), mass * visible))
            visible = top_rows(scores, visible, config.index_topk)
        keys = torch.cat((keys, compressed), 1)
        allowed = torch.cat((allowed.expand(len(x), -1, -1), visible), -1)
    return attend(config, weights, at, q, angles[start:], keys, allowed)[0]


# Experts, V4 section 9


def swiglu(config: Config, gate: Tensor, up: Tensor) -> Tensor:
    limit = config.swiglu_limit
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def experts(config: Config, weights: Weights, at: str, x: Tensor, tokens: Tensor, trace: Trace | None) -> Tensor:
    """[B, T, D] -> [B, T, D]. Every expert runs on every row; the routing weights of those not chosen are zero."""
    scores = F.softplus(F.linear(x, weights[f"{at}.gate.weight"])).sqrt()
    if f"{at}.gate.tid2eid" in weights:
        chosen = weights[f"{at}.gate.tid2eid"][tokens]
    else:
        order = torch.sort(scores + weights[f"{at}.gate.bias"], stable=True, descending=True).indices
        chosen = order[..., : config.num_experts_per_tok]
    share = scores.gather(-1, chosen)
    share = share / (share.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    route = torch.zeros_like(scores).scatter_add(-1, chosen, share)
    if trace is not None:
        trace.routes.append((f"{at}.gate.bias", route.detach()))
    count = config.n_routed_experts
    w1, w2, w3 = (
        torch.stack([weights[f"{at}.experts.{e}.{name}.weight"] for e in range(count)]) for name in ("w1", "w2", "w3")
    )
    gate, up = torch.einsum("btd,eid->btei", x, w1), torch.einsum("btd,eid->btei", x, w3)
    routed = torch.einsum("btei,edi->btd", swiglu(config, gate, up) * route[..., None], w2)
    shared = f"{at}.shared_experts"
    gate, up = F.linear(x, weights[f"{shared}.w1.weight"]), F.linear(x, weights[f"{shared}.w3.weight"])
    return routed + F.linear(swiglu(config, gate, up), weights[f"{shared}.w2.weight"])


# The two networks


def block(
    config: Config,
    weights: Weights,
    at: str,
    streams: Tensor,
    tokens: Tensor,
    attention: Callable[[Tensor], Tensor],
    trace: Trace | None,
    dropout: float,
) -> Tensor:
    """Streams [B, T, S, D] -> the same shape, V4 section 3."""
    x, post, comb = hc_pre(config, weights, f"{at}.hc_attn", streams)
    y = attention(rms_norm(x, weights[f"{at}.attn_norm.weight"], config.rms_norm_eps))
    streams = hc_post(F.dropout(y, dropout), streams, post, comb)
    x, post, comb = hc_pre(config, weights, f"{at}.hc_ffn", streams)
    x = rms_norm(x, weights[f"{at}.ffn_norm.weight"], config.rms_norm_eps)
    y = experts(config, weights, f"{at}.ffn", x, tokens, trace)
    return hc_post(F.dropout(y, dropout), streams, post, comb)


def target(
    config: Config,
    weights: Weights,
    tokens: Tensor,
    earlier: list[Tensor] | None = None,
    trace: Trace | None = None,
    dropout: float = 0.0,
) -> TargetOutput:
    """Tokens [B, T] -> logits and taps of these T rows.

    `earlier` continues a sequence: the `inputs` of a previous call, of which only the attention inputs are kept; every
    key is still recomputed.
    """
    start = earlier[0].shape[1] if earlier else 0
    streams = weights["embed.weight"][tokens][:, :, None].expand(-1, -1, config.hc_mult, -1)
    inputs: list[Tensor] = []
    outputs: dict[int, Tensor] = {}
    tapped = getattr(config, "dspark_target_layer_ids", ())
    for layer in range(config.num_hidden_layers):

        def attention(x: Tensor, layer: int = layer) -> Tensor:
            inputs.append(torch.cat((earlier[layer], x), 1) if earlier else x)
            return target_attention(config, weights, layer, inputs[layer], start, trace)

        streams = block(config, weights, f"layers.{layer}", streams, tokens, attention, trace, dropout)
        if layer in tapped:
            outputs[layer] = streams.mean(-2)  # DS section 4: after both sublayers, no norm
    hidden = rms_norm(hc_head(config, weights, "hc_head", streams), weights["norm.weight"], config.rms_norm_eps)
    taps = torch.cat([outputs[layer] for layer in tapped], -1) if tapped else streams.flatten(-2)
    return TargetOutput(F.linear(hidden, weights["head.weight"]), taps, inputs)


def nextn(config: Config, weights: Weights, hidden: Tensor, next_tokens: Tensor) -> NextnOutput:
    """DS section 12. Row i stands at position i and joins hidden i [B, L, S * D] with token i + 1 [B, L]."""
    eps, at = config.rms_norm_eps, "mtp.0"
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    angles = positions[:, None] * frequencies(config, 0, hidden.device)
    age = positions[:, None] - positions
    allowed = ((age >= 0) & (age < config.sliding_window))[None]
    token = rms_norm(weights["embed.weight"][next_tokens], weights[f"{at}.enorm.weight"], eps)
    past = rms_norm(hidden.unflatten(-1, (config.hc_mult, -1)), weights[f"{at}.hnorm.weight"], eps)
    streams = F.linear(token, weights[f"{at}.e_proj.weight"])[:, :, None]
    streams = streams + F.linear(past, weights[f"{at}.h_proj.weight"])

    def attention(x: Tensor) -> Tensor:
        q = queries(config, weights, f"{at}.attn", query_latent(config, weights, f"{at}.attn", x), angles)
        keys = window_keys(config, weights, f"{at}.attn", x, angles)
        return attend(config, weights, f"{at}.attn", q, angles, keys, allowed)[0]

    streams = block(config, weights, at, streams, next_tokens, attention, None, 0.0)
    collapsed = rms_norm(hc_head(config, weights, f"{at}.hc_head", streams), weights[f"{at}.norm.weight"], eps)
    return NextnOutput(F.linear(collapsed, weights["head.weight"]), streams.flatten(-2))


def draft(
    config: Config,
    weights: Weights,
    taps: Tensor,
    anchors: Tensor,
    at_position: Tensor,
    trace: Trace | None = None,
    dropout: float = 0.0,
) -> DraftOutput:
    """DS sections 5 and 6. Taps [B, L, W] of the target; anchors and their positions P, [B, A] each.

    Block rows [anchor, noise, ...] stand at P..P+G-1. All of them see the same keys: the context positions
    max(0, P - window)..P-1 and the whole block, later rows included.
    """
    size, eps = config.dspark_block_size, config.rms_norm_eps
    batch, count = anchors.shape
    rows = torch.full((batch, count, size), config.dspark_noise_token_id, device=anchors.device)
    rows[..., 0] = anchors
    tokens = rows.flatten(1)
    where = (at_position[..., None] + torch.arange(size, device=anchors.device)).flatten(1)  # [B, A * G]
    context = torch.arange(taps.shape[1], device=taps.device)
    turn = frequencies(config, 0, taps.device)
    context_angles, row_angles = context[:, None] * turn, where[..., None] * turn

    anchor_of = at_position.repeat_interleave(size, 1)[..., None]
    sees_context = (context < anchor_of) & (context >= anchor_of - config.sliding_window)
    own = torch.arange(count, device=taps.device).repeat_interleave(size)
    sees_block = (own[:, None] == own).expand(batch, -1, -1)
    allowed = torch.cat((sees_context, sees_block), -1)

    main = rms_norm(F.linear(taps, weights["mtp.0.main_proj.weight"]), weights["mtp.0.main_norm.weight"], eps)
    streams = weights["embed.weight"][tokens][:, :, None].expand(-1, -1, config.hc_mult, -1)
    stages = len(config.dspark_target_layer_ids)
    for stage in range(stages):

        def attention(x: Tensor, at: str = f"mtp.{stage}.attn") -> Tensor:
            q = queries(config, weights, at, query_latent(config, weights, at, x), row_angles)
            from_context = window_keys(config, weights, at, main, context_angles)
            keys = torch.cat((from_context, window_keys(config, weights, at, x, row_angles)), 1)
            return attend(config, weights, at, q, row_angles, keys, allowed)[0]

        streams = block(config, weights, f"mtp.{stage}", streams, tokens, attention, trace, dropout)
    last = f"mtp.{stages - 1}"
    hidden = hc_head(config, weights, f"{last}.hc_head", streams)
    logits = F.linear(rms_norm(hidden, weights[f"{last}.norm.weight"], eps), weights["head.weight"])
    return DraftOutput(logits.unflatten(1, (count, size)), hidden.unflatten(1, (count, size)))


# The sequential head, DS sections 7 and 8


def _last_stage(config: Config) -> str:
    return f"mtp.{len(config.dspark_target_layer_ids) - 1}"


def markov_bias(config: Config, weights: Weights, previous: Tensor) -> Tensor:
    """Token ids [...] -> bias [..., V] on the next token's logits; used at every position, the first included. Vanilla
    head: the one the demo model has."""
    head = f"{_last_stage(config)}.markov_head"
    return F.linear(weights[f"{head}.markov_w1.weight"][previous], weights[f"{head}.markov_w2.weight"])


def confidence(config: Config, weights: Weights, hidden: Tensor, previous: Tensor) -> Tensor:
    """Hidden [..., D] before the final norm, previous ids [...] -> survival logit [...]. No bias."""
    last = _last_stage(config)
    features = torch.cat((hidden, weights[f"{last}.markov_head.markov_w1.weight"][previous]), -1)
    return F.linear(features, weights[f"{last}.confidence_head.proj.weight"])[..., 0]


def greedy_draft(config: Config, weights: Weights, output: DraftOutput, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Picks left to right: tokens [B, A, G] and confidence logits [B, A, G]. Ties go to the lowest id."""
    previous, tokens, survives = anchors, [], []
    for k in range(config.dspark_block_size):
        survives.append(confidence(config, weights, output.hidden[..., k, :], previous))
        previous = (output.logits[..., k, :] + markov_bias(config, weights, previous)).argmax(-1)
        tokens.append(previous)
    return torch.stack(tokens, -1), torch.stack(survives, -1)
