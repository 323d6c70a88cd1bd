"""The specification, to be checked by eye: one request, float64, no shortcuts. Everything faster is tested against it.

Noise is the only thing shared with the implementations (`philox.py`, held to published vectors).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .philox import Purpose, gumbel_rows, uniforms

Row = NDArray[np.float64]
RESIDUAL_FLOOR = 1e-8


@dataclass(frozen=True)
class Request:
    """What one request asks for; the names and meanings of `SamplingSlots.set`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    coupled: bool = False
    min_position: int = 0
    limit: int = 2**31 - 1
    eos_ids: Sequence[int] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()


def process_row(
    logits: NDArray[np.floating],
    request: Request,
    position: int,
    drafted: Sequence[int] = (),
    allowed: NDArray[np.bool_] | None = None,
) -> Row:
    """Logits [V] to what judges the token at `position`, x_1..x_i = `drafted` standing before it: [V]."""
    z = logits.astype(np.float64)
    for token, value in request.bias.items():
        z[token] += value
    output = [*request.output_ids, *drafted]
    for token in range(z.size):
        count = output.count(token)
        if count or token in request.prompt_ids:
            z[token] = z[token] / request.repetition_penalty if z[token] > 0 else z[token] * request.repetition_penalty
        z[token] -= request.frequency_penalty * count + request.presence_penalty * (count > 0)
    if position < request.min_position:
        z[list(request.eos_ids)] = -np.inf
    if allowed is not None:
        z[~allowed] = -np.inf
    if np.all(z == -np.inf):  # nothing is allowed: id 0 is
        z[0] = 0
    if request.temperature == 0:
        return z
    z = z / request.temperature
    if request.top_k:
        kth_largest = np.sort(z)[::-1][min(request.top_k, z.size) - 1]
        z[z < kth_largest] = -np.inf
    if request.top_p < 1:
        p = softmax(z)
        strictly_above = np.array([p[z > value].sum() for value in z])
        z[strictly_above >= request.top_p] = -np.inf
    if request.min_p > 0:
        z[z < z.max() + np.log(request.min_p)] = -np.inf
    return z


def accept_greedy(rows: Sequence[Row], drafts: Sequence[int]) -> tuple[list[int], int]:
    """Longest prefix of x_1..x_n that the argmaxes of rows 1..n+1 repeat, then the next argmax: (tokens, accepted)."""
    return _accept_equal([lowest_argmax(row) for row in rows], drafts)


def accept_gumbel(rows: Sequence[Row], drafts: Sequence[int], seed: int, anchor_position: int) -> tuple[list[int], int]:
    """As greedy, row i picking argmax_v(z_v + g(seed, anchor_position + 1 + i, v)): (tokens, accepted)."""
    picks = [
        lowest_argmax(row + noise(row.size, seed, anchor_position + 1 + i, 0, Purpose.COUPLED))
        for i, row in enumerate(rows)
    ]
    return _accept_equal(picks, drafts)


def accept_rejection(
    rows: Sequence[Row],
    drafts: Sequence[int],
    draft_logits: NDArray[np.floating],
    inverse_temperature: float,
    seed: int,
    anchor_position: int,
) -> tuple[list[int], int]:
    """Chain rejection sampling (Leviathan et al. 2023, algorithm 1): (tokens, accepted).

    rows: n+1 processed target rows [V]; drafts: x_1..x_n; draft_logits [>= n, V], the row that x_k was drawn from at
    k-1. A row of the draft that is no distribution (NaN) ends the chain before its token, as if nothing had been
    drafted there.
    """
    tokens: list[int] = []
    for k, drafted in enumerate(_usable(drafts, rows[0].size), start=1):
        p = softmax(rows[k - 1])
        q = softmax(draft_logits[k - 1].astype(np.float64) * inverse_temperature)
        if not np.all(np.isfinite(q)):
            break
        u = uniforms(seed, anchor_position, k, Purpose.ACCEPT)
        if u * q[drafted] < p[drafted]:
            tokens.append(drafted)
            continue
        residual = np.maximum(p - q, 0)
        if residual.sum() <= RESIDUAL_FLOOR:
            residual = p
        with np.errstate(divide="ignore"):
            score = np.log(residual) + noise(p.size, seed, anchor_position, k, Purpose.RESIDUAL)
        return [*tokens, lowest_argmax(score)], len(tokens)
    accepted = len(tokens)
    score = rows[accepted] + noise(rows[accepted].size, seed, anchor_position, accepted + 1, Purpose.BONUS)
    return [*tokens, lowest_argmax(score)], accepted


def accept(
    logits: NDArray[np.floating],
    drafts: Sequence[int],
    draft_logits: NDArray[np.floating],
    request: Request,
    anchor_position: int,
    allowed: NDArray[np.bool_] | None = None,
) -> tuple[list[int], int]:
    """One request's verdict on x_1..x_n from target logits [>= n+1, V]: (tokens, how many of them were drafted)."""
    drafts = _usable(drafts, logits.shape[1])
    rows = [
        process_row(logits[i], request, anchor_position + 1 + i, drafts[:i], None if allowed is None else allowed[i])
        for i in range(len(drafts) + 1)
    ]
    if request.temperature == 0:
        return accept_greedy(rows, drafts)
    if request.coupled:
        return accept_gumbel(rows, drafts, request.seed, anchor_position)
    return accept_rejection(rows, drafts, draft_logits, 1 / request.temperature, request.seed, anchor_position)


def softmax(z: Row) -> Row:
    """exp(z) / sum exp(z) over the only axis."""
    weights = np.exp(z - z.max())
    return weights / weights.sum()


def lowest_argmax(score: Row) -> int:
    """The highest value's index, the lowest one among equals."""
    return int(np.flatnonzero(score == score.max())[0])


def noise(vocab_size: int, seed: int, position: int, k: int, purpose: Purpose) -> Row:
    """Gumbel noise [V] under one key."""
    out = np.empty((1, vocab_size), np.float32)
    gumbel_rows(seed, position, k, purpose, out)
    return out[0].astype(np.float64)


def _accept_equal(picks: Sequence[int], drafts: Sequence[int]) -> tuple[list[int], int]:
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == picks[accepted]:
        accepted += 1
    return list(picks[: accepted + 1]), accepted


def _usable(drafts: Sequence[int], vocab_size: int) -> Sequence[int]:
    """The drafted ids before the first that is no token."""
    for k, token in enumerate(drafts):
        if not 0 <= token < vocab_size:
            return drafts[:k]
    return drafts
