"""Interpolated Kneser-Ney n-gram models, the bar the target has to clear.

p_n(w | h) = (max(c(hw) - d_n, 0) + d_n * followers(h) * p_{n-1}(w | h')) / c(h), with d_n = n1 / (n1 + 2 n2), counts at
the highest order and continuation counts below it, ending in the uniform distribution (Chen & Goodman 1999).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Level:
    grams: Ints  # sorted keys of context and symbol
    counts: Ints
    contexts: Ints  # sorted keys of contexts
    totals: Ints
    followers: Ints
    discount: float


class NGram:
    """`order` symbols per gram, the predicted one included; symbols 0..size-1, `size` itself pads the beginning."""

    def __init__(self, documents: Iterable[Sequence[int]], size: int, order: int) -> None:
        self.size, self.order, self._base = size, order, size + 1
        if self._base**order >= 2**63:
            raise ValueError(f"{order} symbols of {self._base} values do not fit a 64-bit key")
        keys = np.concatenate([self._keys(document)[0] for document in documents])
        grams, counts = np.unique(keys, return_counts=True)
        self._levels = []
        for length in range(order, 0, -1):
            self._levels.append(self._level(grams, counts))
            grams, counts = np.unique(grams % self._base ** (length - 1), return_counts=True)

    def _keys(self, document: Sequence[int]) -> tuple[Ints, Ints]:
        symbols = np.concatenate((np.full(self.order - 1, self.size), np.asarray(document, dtype=np.int64)))
        keys = np.zeros(len(document), dtype=np.int64)
        for place in range(self.order):
            keys = keys * self._base + symbols[place : place + len(document)]
        return keys, symbols

    def _level(self, grams: Ints, counts: Ints) -> _Level:
        contexts, first = np.unique(grams // self._base, return_index=True)
        totals = np.add.reduceat(counts, first)
        followers = np.diff(np.append(first, len(grams)))
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        discount = once / (once + 2 * twice) if once and twice else 0.5
        return _Level(grams, counts, contexts, totals, followers, discount)

    def probabilities(self, document: Sequence[int]) -> NDArray[np.float64]:
        """p of each symbol of `document` after those before it, [len(document)]."""
        keys = self._keys(document)[0]
        p = np.full(len(keys), 1.0 / self.size)
        for length, level in zip(range(1, self.order + 1), reversed(self._levels), strict=True):
            part = keys % self._base**length
            count = _look_up(level.grams, level.counts, part)
            total = _look_up(level.contexts, level.totals, part // self._base)
            followers = _look_up(level.contexts, level.followers, part // self._base)
            seen = np.maximum(count - level.discount, 0) + level.discount * followers * p
            p = np.where(total > 0, seen / np.maximum(total, 1), p)
        return p

    def bits(self, document: Sequence[int]) -> float:
        return float(-np.log2(self.probabilities(document)).sum())


def _look_up(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def bits_per_byte(model: NGram, documents: Iterable[Sequence[int]], total_bytes: int) -> float:
    return sum(model.bits(document) for document in documents) / total_bytes
