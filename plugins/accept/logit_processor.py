"""From the target's logits to those that judge: bias, penalties, bans, grammar, temperature, cut-offs, in this order.

Works in place on one row at a time, because row i of a block matters only once x_1..x_i were kept. Penalties follow
vLLM and the OpenAI API: the repetition penalty reads prompt and output (a positive logit is divided, any other
multiplied), the presence and frequency penalties read the output only. Row i counts x_1..x_i as output.

Cut-offs are value thresholds and keep ties, so they do not depend on any order among equal logits:

- top-k keeps v iff z_v >= the k-th largest value;
- top-p keeps v iff the probability strictly above z_v is below top_p (the smallest nucleus, plus its ties);
- min-p keeps v iff z_v >= max z + log(min_p).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .sampling_slots import SamplingSlots

# Most nuclei are this small; larger ones are found by widening eightfold.
_NUCLEUS_WIDTH = 64


def process_row(
    row: NDArray[np.float32],
    sampling: SamplingSlots,
    slot: int,
    position: int,
    drafted: Sequence[int] = (),
    allowed: NDArray[np.bool_] | None = None,
) -> bool:
    """Turn a target row f32 [V] into what judges the token at absolute `position`, in place.

    `drafted` = x_1..x_i, the tokens of this block before that position, ids in [0, V). `allowed` bool [V] is the
    grammar's mask. A forbidden token becomes -inf. A greedy slot skips temperature and cut-offs: they cannot move its
    argmax. A row on which a slot uses nothing is not written to.

    Returns False when bias, bans and mask together forbid every token; the row then allows id 0 only.
    """
    bias = sampling.bias[slot]
    if bias is not None:
        ids, values = bias
        row[ids] += values
    if sampling.penalised[slot]:
        _penalise(row, sampling, slot, drafted)
    banned = position < sampling.min_position[slot]
    if banned:
        eos = sampling.eos[slot]
        row[eos[eos >= 0]] = -np.inf
    if allowed is not None:
        row[~allowed] = -np.inf
    possible = True
    if (banned or allowed is not None or bias is not None) and row.max() == -np.inf:
        row[0] = 0
        possible = False
    if sampling.temperature[slot] > 0:
        if sampling.temperature[slot] != 1:
            # A product, as in the draft's own picks: under the gumbel rule equal logits must give equal scores.
            np.multiply(row, sampling.inverse_temperature[slot], out=row)
        _cut_off(row, int(sampling.top_k[slot]), float(sampling.top_p[slot]), float(sampling.min_p[slot]))
    return possible


def _penalise(row: NDArray[np.float32], sampling: SamplingSlots, slot: int, drafted: Sequence[int]) -> None:
    assert sampling.prompt_seen is not None
    assert sampling.output_counts is not None
    counts = sampling.output_counts[slot]
    if drafted:
        counts = counts.copy()
        np.add.at(counts, np.asarray(drafted, np.intp), 1)
    repetition = sampling.repetition_penalty[slot]
    if repetition != 1:
        seen = np.flatnonzero(sampling.prompt_seen[slot] | (counts > 0))
        logits = row[seen]
        row[seen] = np.where(logits > 0, logits / repetition, logits * repetition)
    repeated = np.flatnonzero(counts)
    row[repeated] -= (
        sampling.frequency_penalty[slot] * counts[repeated].astype(np.float32) + sampling.presence_penalty[slot]
    )


def _cut_off(row: NDArray[np.float32], top_k: int, top_p: float, min_p: float) -> None:
    if 0 < top_k < row.size:
        threshold = np.partition(row, row.size - top_k)[row.size - top_k]
        row[row < threshold] = -np.inf
    if top_p < 1:
        row[row < _nucleus_edge(row, top_p)] = -np.inf
    if min_p > 0:
        row[row < np.float64(row.max()) + math.log(min_p)] = -np.inf


def _nucleus_edge(row: NDArray[np.float32], top_p: float) -> np.float32:
    """The smallest value that top-p keeps: the first, going down, at which the probability so far reaches top_p."""
    highest = np.float64(row.max())
    wanted = top_p * np.exp(row - highest).sum()
    width = _NUCLEUS_WIDTH
    while True:
        head = row if width >= row.size else np.partition(row, row.size - width)[row.size - width :]
        head = np.sort(head)[::-1]
        edge = int(np.searchsorted(np.cumsum(np.exp(head - highest)), wanted))
        if edge < head.size:
            return head[edge]
        if width >= row.size:  # rounding alone kept the sum below: everything is in
            return head[-1]
        width *= 8
