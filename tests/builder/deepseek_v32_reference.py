"""DeepSeek-V3.2 and its MTP layer in numpy, float64: `spec/deepseek_v32.md` sections 2 to 5 and 8, formula by formula.

Independent of the code it judges: weights come under their checkpoint names, attention is in its plain form (keys and
values spelt out for each head), a row is computed once and kept. Index rows are used as they are (section 5.3), or with
`fp8_index` rotated and quantised. `Alignment` has a switch for each way in which an MTP row has been made wrongly.

Letters: T new rows, W rows so far, D hidden, H heads, I index heads, E experts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from twostroke.tests.plugins.nsa import fp8_reference

Array = np.ndarray
EPS = 1e-6


def layer_norm(x: Array, gain: Array, bias: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS) * gain + bias


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def ranked(score: Array) -> Array:
    """5.4. Indices from the highest score to the lowest; of equals the first comes first."""
    return np.argsort(-score, axis=1, kind="stable")


def frequencies(config: Mapping[str, Any]) -> Array:
    """2.1. Angle per position of each rotary pair, [rope/2]."""
    d, theta, yarn = config["qk_rope_head_dim"], config["rope_theta"], config["rope_scaling"]
    i = np.arange(d // 2)
    f = np.asarray(theta ** (-2 * i / d))
    if yarn is None:
        return f

    def c(n: float) -> float:
        return d * math.log(yarn["original_max_position_embeddings"] / (2 * math.pi * n)) / (2 * math.log(theta))

    low, high = max(math.floor(c(yarn["beta_fast"])), 0), min(math.ceil(c(yarn["beta_slow"])), d - 1)
    ramp = np.clip((i - low) / max(high - low, 0.001), 0, 1)
    return f / yarn["factor"] * ramp + f * (1 - ramp)


def softmax_scale(config: Mapping[str, Any]) -> float:
    """2.1. (nope + rope)^-1/2 m^2; the tables' own factor m(mscale) / m(mscale_all_dim) is 1, both being equal."""
    yarn = config["rope_scaling"]
    m = 1.0 if yarn is None else 0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1
    return float((config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * m * m)


def turn_pairs(x: Array, angle: Array) -> Array:
    """3. Interleaved: (2i, 2i+1) is a pair. x [T, heads, rope], angle [T, rope/2]."""
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle[:, None])
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def turn_halves(x: Array, angle: Array) -> Array:
    """5.2. Half-split: (i, i + rope/2) is a pair, of the first `rope` features. x [T, heads, size]."""
    pairs = angle.shape[1]
    turned = (x[..., :pairs] + 1j * x[..., pairs : 2 * pairs]) * np.exp(1j * angle[:, None])
    return np.concatenate([turned.real, turned.imag, x[..., 2 * pairs :]], -1)


@dataclass
class Memory:
    """The rows of one layer: position [W], key [W, H, nope+rope], value [W, H, v], index key [W, size]."""

    rows: tuple[Array, ...] = ()

    def add(self, *new: Array) -> tuple[Array, ...]:
        self.rows = tuple(np.concatenate(pair) for pair in zip(self.rows, new, strict=True)) if self.rows else new
        assert (np.diff(self.rows[0]) > 0).all(), "rows in order of position"
        return self.rows


class Target(NamedTuple):
    """logits [T, V]; the hidden [T, D] after `model.norm` and before it."""

    logits: Array
    hidden: Array
    before_norm: Array


class Network:
    """The target, and the parts its MTP layer is made of. `config` is config.json, `weights` the checkpoint by name."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Array], *, fp8_index: bool = False) -> None:
        assert config["rms_norm_eps"] == EPS
        assert not config.get("indexer_rope_interleave"), "absent in V3.2"
        self.config, self.layers, self.fp8_index = config, int(config["num_hidden_layers"]), fp8_index
        self.weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self.frequencies, self.scale = frequencies(config), softmax_scale(config)

    def target(self, tokens: Sequence[int], memories: Sequence[Memory] = (), start: int = 0) -> Target:
        """The rows of `tokens` from position `start` on, behind those that `memories`, one a layer, hold."""
        x = self.weights["model.embed_tokens.weight"][np.asarray(tokens)]
        for layer in range(self.layers):
            memory = memories[layer] if memories else Memory()
            x = self.layer(f"model.layers.{layer}", x, start + np.arange(len(tokens)), memory)
        hidden = self.norm("model.norm", x)
        return Target(self.linear("lm_head", hidden), hidden, x)

    def linear(self, name: str, x: Array) -> Array:
        return np.asarray(x @ self.weights[f"{name}.weight"].T)

    def norm(self, name: str, x: Array) -> Array:
        """2. RMSNorm."""
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + EPS) * self.weights[f"{name}.weight"]

    def layer(self, at: str, x: Array, positions: Array, memory: Memory) -> Array:
        """2. Each sublayer behind its norm, on one residual."""
        x = x + self.attention(f"{at}.self_attn", self.norm(f"{at}.input_layernorm", x), positions, memory)
        return x + self.feed_forward(f"{at}.mlp", self.norm(f"{at}.post_attention_layernorm", x))

    def attention(self, at: str, x: Array, positions: Array, memory: Memory) -> Array:
        """3. MLA, non-absorbed, over the rows that the indexer chose."""
        config, rows, angle = self.config, len(x), positions[:, None] * self.frequencies
        heads, nope, latent = (config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "kv_lora_rank"))
        qr = self.norm(f"{at}.q_a_layernorm", self.linear(f"{at}.q_a_proj", x))
        q = self.linear(f"{at}.q_b_proj", qr).reshape(rows, heads, -1)
        q = np.concatenate([q[..., :nope], turn_pairs(q[..., nope:], angle)], -1)
        both = self.linear(f"{at}.kv_a_proj_with_mqa", x)
        c = self.norm(f"{at}.kv_a_layernorm", both[:, :latent])
        k_pe = turn_pairs(both[:, None, latent:], angle)  # one for all heads, not normed
        kv = self.linear(f"{at}.kv_b_proj", c).reshape(rows, heads, -1)
        key = np.concatenate([kv[..., :nope], np.repeat(k_pe, heads, 1)], -1)
        index_key = self.index_key(f"{at}.indexer", x, angle)
        where, keys, values, index_keys = memory.add(positions, key, kv[..., nope:], index_key)
        chosen = self.chosen(f"{at}.indexer", x, qr, angle, index_keys, where <= positions[:, None])
        logits = np.where(chosen, np.einsum("thd,whd->htw", q, keys) * self.scale, -np.inf)
        weight = np.exp(logits - logits.max(-1, keepdims=True))
        out = np.einsum("htw,whv->thv", weight / weight.sum(-1, keepdims=True), values)
        return self.linear(f"{at}.o_proj", out.reshape(rows, -1))

    def index_key(self, at: str, x: Array, angle: Array) -> Array:
        """5.2, steps 1 to 3: [T, size], one for all index heads."""
        gain, bias = (self.weights[f"{at}.k_norm.{name}"] for name in ("weight", "bias"))
        return self.spread(turn_halves(layer_norm(self.linear(f"{at}.wk", x), gain, bias)[:, None], angle)[:, 0])

    def spread(self, rows: Array) -> Array:
        """5.2, step 3."""
        return rows @ fp8_reference.hadamard(rows.shape[-1]) if self.fp8_index else rows

    def in_fp8(self, rows: Array) -> Array:
        """5.2, step 4: index rows as they come back from fp8, times their scales."""
        if not self.fp8_index:
            return rows
        found, scale = fp8_reference.quantised(rows)
        return np.asarray(found * scale[..., None])

    def chosen(self, at: str, x: Array, qr: Array, angle: Array, keys: Array, visible: Array) -> Array:
        """5.2, steps 5 to 8: which rows attention reads, the best `index_topk` of the visible ones, [T, W]."""
        heads, size = self.config["index_n_heads"], self.config["index_head_dim"]
        q = self.spread(turn_halves(self.linear(f"{at}.wq_b", qr).reshape(len(x), heads, size), angle))
        q, keys = self.in_fp8(q), self.in_fp8(keys)
        w = self.linear(f"{at}.weights_proj", x) * heads**-0.5 * size**-0.5
        score = np.einsum("thw,th->tw", np.maximum(np.einsum("thd,wd->thw", q, keys), 0), w)
        found = np.zeros_like(visible)
        best = ranked(np.where(visible, score, -np.inf))[:, : self.config["index_topk"]]
        np.put_along_axis(found, best, True, axis=1)
        return found & visible

    def feed_forward(self, at: str, x: Array) -> Array:
        """4. Dense in the first layers; then routed experts and the shared one, which has weight 1."""
        if f"{at}.gate.weight" not in self.weights:
            return self.swiglu(at, x)
        out = self.swiglu(f"{at}.shared_experts", x)
        for expert, weight in enumerate(self.route(f"{at}.gate", x).T):
            if len(rows := np.flatnonzero(weight)):
                out[rows] += weight[rows, None] * self.swiglu(f"{at}.experts.{expert}", x[rows])
        return out

    def swiglu(self, at: str, x: Array) -> Array:
        return self.linear(f"{at}.down_proj", silu(self.linear(f"{at}.gate_proj", x)) * self.linear(f"{at}.up_proj", x))

    def route(self, at: str, x: Array) -> Array:
        """4, steps 1 to 5: weights [T, E], zero for experts that were not chosen."""
        config = self.config
        s = 1 / (1 + np.exp(-self.linear(at, x)))
        b = (s + self.weights[f"{at}.e_score_correction_bias"]).reshape(len(x), config["n_group"], -1)
        groups = ranked(np.sort(b, -1)[..., -2:].sum(-1))[:, : config["topk_group"]]
        outside = np.ones(b.shape[:2], bool)
        np.put_along_axis(outside, groups, False, axis=1)
        b = np.where(outside[..., None], -np.inf, b).reshape(s.shape)
        best = ranked(b)[:, : config["num_experts_per_tok"]]
        picked, weight = np.take_along_axis(s, best, 1), np.zeros_like(s)
        np.put_along_axis(weight, best, picked / (picked.sum(1, keepdims=True) + 1e-20), axis=1)
        return np.asarray(weight * config["routed_scaling_factor"])


@dataclass(frozen=True)
class Alignment:
    """8.2. What the row of hidden i is made of and where it stands; the defaults are right."""

    token_shift: int = 1  # beside h_i stands t_{i+1}
    after_norm: bool = True  # h_i is the target's hidden after `model.norm`
    embedding_first: bool = True  # eh_proj([ enorm(Emb) | hnorm(h) ])
    shift: int = 0  # the row's position is i,
    chain_shift: int = 0  # that of a drafted row, which is made of the recycled hidden i, too
    every_row: bool = True  # draft-extend over all committed rows, not over the last alone
    recycled_after_norm: bool = True  # a chain goes on from g = shared_head.norm(y), not from y
    first_embedding: bool = True  # the row of position 0 has its embedding, which vLLM masks

    def hidden(self, target: Target) -> Array:
        return target.hidden if self.after_norm else target.before_norm


RIGHT = Alignment()
MASKED_FIRST = Alignment(first_embedding=False)
UNIFORM_SHIFT = Alignment(shift=1)  # no mistake to be seen: rope and indexer know only differences of positions
MISTAKES: Mapping[str, Alignment] = {
    "token i beside hidden i": Alignment(token_shift=0),
    "hidden before model.norm": Alignment(after_norm=False),
    "hidden first in eh_proj": Alignment(embedding_first=False),
    "drafted rows one position on": Alignment(chain_shift=1),
    "row of the last position only": Alignment(every_row=False),
    "recycled before shared_head.norm": Alignment(recycled_after_norm=False),
}


class Drafter:
    """8.3. The MTP layer behind one sequence."""

    def __init__(self, network: Network, alignment: Alignment = RIGHT) -> None:
        self.network, self.alignment, self.memory = network, alignment, Memory()

    def observe(self, hidden: Array, tokens: Sequence[int], start: int, stop: int) -> None:
        """Draft-extend: rows start .. stop-1 of the sequence `tokens`, `hidden` being the target's of all of it."""
        i = np.arange(start if self.alignment.every_row else stop - 1, stop)
        self.rows(np.asarray(tokens)[i + self.alignment.token_shift], hidden[i], i + self.alignment.shift)
        self.last = stop - 1

    def rows(self, ids: Array, hidden: Array, positions: Array) -> None:
        """Adds rows to the layer's memory; keeps the logits of the last one and what a chain recycles of it."""
        network, at, weights = self.network, f"model.layers.{self.network.layers}", self.network.weights
        embedding, head = f"{at}.embed_tokens.weight", f"{at}.shared_head.head"  # own ones, or copies, or absent
        emb = weights[embedding if embedding in weights else "model.embed_tokens.weight"][ids]
        if not self.alignment.first_embedding:
            emb = np.where(positions[:, None] == 0, 0.0, emb)
        parts = [network.norm(f"{at}.enorm", emb), network.norm(f"{at}.hnorm", hidden)]
        u = network.linear(f"{at}.eh_proj", np.concatenate(parts if self.alignment.embedding_first else parts[::-1], 1))
        y = network.layer(at, u, positions, self.memory)[-1:]
        g = network.norm(f"{at}.shared_head.norm", y)
        self.logits = network.linear(head if f"{head}.weight" in weights else "lm_head", g)[0]
        self.recycled = g if self.alignment.recycled_after_norm else y

    def chain(self, depth: int, forced: Sequence[int] = ()) -> tuple[list[int], Array]:
        """Tokens and logits [depth, V] of a chain, greedy or as `forced`. Its rows are gone afterwards."""
        before, logits, picked = (self.memory.rows, self.recycled, self.logits), [self.logits], list[int]()
        for k in range(depth):
            picked.append(int(forced[k]) if forced else int(self.logits.argmax()))
            if k + 1 < depth:
                place = self.last + 1 + k + self.alignment.shift + self.alignment.chain_shift
                self.rows(np.array([picked[-1]]), self.recycled, np.array([place]))
                logits.append(self.logits)
        self.memory, (self.recycled, self.logits) = Memory(before[0]), before[1:]
        return picked, np.stack(logits)
