"""Index keys in fp8 as numpy has them, float64 from `spec/deepseek_v32.md` 5.2 (steps 3 to 6) and 5.6.

Independent of the code it judges: the nearest value is looked up, the scale comes from the number's own exponent, a
page is written with numpy's types.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray
VALUES = np.array(
    [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
)  # of the codes 0 .. 126


def hadamard(size: int) -> Array:
    """Step 3, Sylvester: [[H, H], [H, -H]], times size^-1/2."""
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(size)


def scales(rows: Array) -> Array:
    """Step 4: 2^ceil(log2(max(amax, 1e-4) / 448)) of rows [..., I]."""
    mantissa, exponent = np.frexp(np.maximum(np.abs(rows).max(-1), 1e-4).astype(np.float64) / 448)
    return 2.0 ** (exponent - (mantissa == 0.5))


def codes(values: Array) -> Array:
    """Step 4: the code of the nearest value, the even one of two; beyond 448 that of 448."""
    size = np.minimum(np.abs(values.astype(np.float64)), 448)
    above = np.searchsorted(VALUES, size)
    below = np.maximum(above - 1, 0)
    up, down = VALUES[above] - size, size - VALUES[below]
    nearest = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (nearest + 128 * np.signbit(values)).astype(np.uint8)


def decoded(code: Array) -> Array:
    return np.where(code >= 128, -1, 1) * VALUES[code % 128]


def quantised(rows: Array) -> tuple[Array, Array]:
    """Rows [..., I] over their scales, rounded, and the scales."""
    scale = scales(rows)
    return decoded(codes(rows / scale[..., None])), scale


def page(rows: Array) -> bytes:
    """5.6: the page of as many tokens as there are rows: all their codes, then all their scales."""
    scale = scales(rows)
    return codes(rows / scale[:, None]).tobytes() + scale.astype("<f4").tobytes()


def parsed(data: bytes, tokens: int) -> tuple[Array, Array]:
    """Codes [tokens, I] and scales [tokens] of a page."""
    at = len(data) - 4 * tokens
    return np.frombuffer(data[:at], np.uint8).reshape(tokens, -1), np.frombuffer(data[at:], "<f4")


def scores(query: Array, weight: Array, key: Array, key_scale: Array) -> Array:
    """Steps 5 and 6 for queries [N, H, I], weights [N, H] and keys [K, I] over their scales [K]: [N, K]."""
    q, q_scale = quantised(query)
    relevance = np.maximum(np.einsum("nhi,ki->nhk", q, key), 0)
    return np.einsum("nhk,nh->nk", relevance, weight * q_scale) * key_scale
