"""The sequential head written anew from its published formulas (`spec/dspark.md` sections 7 and 8): numpy, float64, one
request and one token at a time. Shares no code with what it judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def bias_of(weights: Mapping[str, Array], embedded: Array, hidden: Array, state: Array) -> tuple[Array, Array]:
    """(B_k [V], s_k [r]) of one position. The head's type shows in its tensors; names as behind `markov_head.`."""
    w2 = weights["markov_w2.weight"]
    if "gate_proj.weight" in weights:
        gate = weights["gate_proj.weight"] @ np.concatenate([hidden, embedded]) + weights["gate_proj.bias"]
        return w2 @ (sigmoid(gate) * embedded), state
    if "joint_proj.weight" in weights:
        z = np.concatenate([state, embedded, hidden])
        g, c, o = np.split(weights["joint_proj.weight"] @ z + weights["joint_proj.bias"], 3)
        return w2 @ np.tanh(o), sigmoid(g) * state + (1 - sigmoid(g)) * np.tanh(c)
    return w2 @ embedded, state


def greedy_block(weights: Mapping[str, Any], base_logits: Any, hidden: Any, anchor: int) -> tuple[list[int], Array]:
    """Tokens and biased logits [G, V] of one request: base_logits [G, V], hidden [G, D]."""
    heads = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    rows, states = np.asarray(base_logits, np.float64), np.asarray(hidden, np.float64)
    state = np.zeros(heads["markov_w1.weight"].shape[1])
    previous, tokens, logits = anchor, [], []
    for row, h in zip(rows, states, strict=True):
        bias, state = bias_of(heads, heads["markov_w1.weight"][previous], h, state)
        logits.append(row + bias)
        previous = int(np.argmax(logits[-1]))
        tokens.append(previous)
    return tokens, np.stack(logits)


def confidences(proj: Any, hidden: Any, w1: Any | None, anchor: int, tokens: Sequence[int], bias: float = 0.0) -> Array:
    """[G] of one request; without `w1` the head reads the hidden row alone."""
    weights = np.asarray(proj, np.float64)[0]
    found = []
    for row, previous in zip(np.asarray(hidden, np.float64), [anchor, *tokens[:-1]], strict=True):
        feature = row if w1 is None else np.concatenate([row, np.asarray(w1, np.float64)[previous]])
        found.append(sigmoid(weights @ feature + bias))
    return np.array(found)
