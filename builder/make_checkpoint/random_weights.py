"""Random bytes of a tensor, in pieces: the same for the same seed and name on every machine.

Raw bits of a generator go through inverse-CDF tables, which costs little more than a copy: a byte becomes an FP8 code
or two FP4 codes, sixteen bits a BF16 or F32 number. A row of K inputs of variance one gives an output of variance one.
Scales differ from block to block, so that a scale taken from the wrong place is seen.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from twostroke.builder.inventory import TensorSpec

PIECE = 1 << 20  # random bytes per piece: what the tables make of it stays in a core's cache
_E8M0_BIAS = 127
_SPREAD = 1.75  # mean of 4^e over e = -1, 0, 1, what the exponents of scales vary by

# Value of each code without its sign; E4M3FN's 127 is NaN.
_E4M3 = np.array([math.ldexp(c & 7 | (c > 7) << 3, max(c >> 3, 1) - 10) for c in range(127)])
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# Standard deviation of codes: this to twice this, which keeps FP8 far from its limit of 448 and FP4 mostly below 6.
_FP8_LEAST, _FP4_LEAST = 16.0, 1.25


def tensor_pieces(spec: TensorSpec, weight: TensorSpec, experts: int, seed: int) -> Iterator[bytes]:
    """The bytes of `spec` in its first dtype. `weight` is the tensor a scale belongs to, for all others `spec` itself;
    `experts` are the routed ones, whose ids a table of token ids holds. A copy of a tensor has that one's values."""
    bits = np.random.SFC64(np.random.SeedSequence([seed, zlib.crc32((spec.copy_of or spec.name).encode())]))
    count = math.prod(spec.shape)
    fp4 = weight.dtypes[0] == "I8"
    exponent, deviation = _split(weight.shape[-1] * (2 if fp4 else 1), _FP4_LEAST if fp4 else _FP8_LEAST)
    if spec is not weight:
        if spec.dtypes[0] == "F8_E8M0":
            return _translated(bits, count, _e8m0_table(exponent))
        return _looked_up(bits, count, _powers_table(exponent))
    if fp4:
        return _translated(bits, count, _fp4_table(deviation))
    if spec.dtypes[0] == "F8_E4M3":
        return _translated(bits, count, _fp8_table(deviation))
    if spec.dtypes[0] == "I64":
        return iter((_distinct_ids(bits, spec.shape[0], spec.shape[1], experts).tobytes(),))
    return _looked_up(bits, count, _normal_table(*distribution(spec), spec.dtypes[0]))


def distribution(spec: TensorSpec) -> tuple[float, float]:
    """Mean and standard deviation of an unquantised tensor: every part of a network matters to the logits, of about
    3."""
    part = spec.name.removesuffix(".weight").rsplit(".", 1)[-1]
    if part.endswith("norm"):
        return 1.0, 0.1
    if part.startswith("hc_") and part.endswith("_scale"):
        return 0.8, 0.1
    if (part.startswith("hc_") and part.endswith("_base")) or part in ("ape", "attn_sink"):
        return 0.0, 0.5
    if part.endswith("bias"):
        return 0.0, 0.02
    if part in ("embed", "embed_tokens", "markov_w1"):
        return 0.0, 1.0
    gain = 3.0 if part in ("head", "lm_head", "markov_w2") else 1.0
    return 0.0, gain / math.sqrt(spec.shape[-1])


def _split(columns: int, least: float) -> tuple[int, float]:
    """(exponent of the scales, deviation of the codes from `least` to twice that) for rows of `columns` values."""
    whole = math.sqrt(_SPREAD * columns)
    exponent = -math.ceil(math.log2(least * whole))
    return exponent, math.ldexp(1 / whole, -exponent)


def _raw(bits: np.random.SFC64, count: int) -> Iterator[NDArray[np.uint64]]:
    """At least `count` random bytes, the last piece no longer than needed."""
    for start in range(0, count, PIECE):
        yield bits.random_raw(-(-min(PIECE, count - start) // 8)).astype("<u8", copy=False)


def _translated(bits: np.random.SFC64, count: int, table: bytes) -> Iterator[bytes]:
    """`count` bytes, each `table` [256] of a random byte."""
    for piece in _raw(bits, count):
        yield piece.tobytes()[:count].translate(table)
        count -= PIECE


def _looked_up(bits: np.random.SFC64, count: int, table: NDArray[np.generic]) -> Iterator[bytes]:
    """`count` elements, each `table` [65536] of sixteen random bits."""
    for piece in _raw(bits, 2 * count):
        yield table.take(piece.view("<u2")[:count], mode="wrap").tobytes()  # wrap: no bounds to check
        count -= PIECE // 2


@functools.cache
def _quantiles(count: int) -> NDArray[np.float64]:
    """Normal quantiles in the middle of `count` equal probabilities, scaled to variance one."""
    half = np.array([NormalDist().inv_cdf((2 * i + 1) / (2 * count)) for i in range(count // 2)])
    both = np.concatenate([half, -half[::-1]])
    return both / math.sqrt(math.fsum(both * both) / count)


def _nearest(values: NDArray[np.float64], magnitudes: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Code of the nearest of ascending `magnitudes`, without the sign."""
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    return np.searchsorted(middles, np.abs(values)).astype(np.uint8)


@functools.cache
def _fp8_table(deviation: float) -> bytes:
    values = _quantiles(256) * deviation
    return (_nearest(values, _E4M3) | (values < 0).astype(np.uint8) << 7).tobytes()


@functools.cache
def _fp4_table(deviation: float) -> bytes:
    """Two codes a byte, one for each half of the random one."""
    values = _quantiles(16) * deviation
    codes = _nearest(values, _E2M1) | (values < 0).astype(np.uint8) << 3
    return (codes[None, :] | codes[:, None] << 4).astype(np.uint8).tobytes()


@functools.cache
def _e8m0_table(exponent: int) -> bytes:
    return (_E8M0_BIAS + exponent + np.arange(256) * 3 // 256 - 1).astype(np.uint8).tobytes()


@functools.cache
def _powers_table(exponent: int) -> NDArray[np.generic]:
    return np.ldexp(np.float32(1), exponent + np.arange(1 << 16) * 3 // (1 << 16) - 1).astype("<f4")


@functools.lru_cache(maxsize=64)
def _normal_table(mean: float, deviation: float, dtype: str) -> NDArray[np.generic]:
    values = (_quantiles(1 << 16) * deviation + mean).astype("<f4")
    if dtype == "F32":
        return values
    assert dtype == "BF16", f"no random values of dtype {dtype}"
    whole = values.view("<u4")
    return (whole + 0x7FFF + (whole >> 16 & 1) >> 16).astype("<u2")  # to the nearest, ties to even


def _distinct_ids(bits: np.random.SFC64, rows: int, picks: int, experts: int) -> NDArray[np.int64]:
    """[rows, picks] of expert ids, distinct within a row: steps of one length, prime to the number of experts."""
    draws = bits.random_raw(rows)
    steps = np.array([step for step in range(1, experts + 1) if math.gcd(step, experts) == 1])
    first, step = draws % experts, steps[(draws >> 32) % len(steps)]
    ids = first[:, None].astype("<i8") + step[:, None] * np.arange(picks)
    return (ids % experts).astype("<i8")
