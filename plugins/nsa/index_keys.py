"""Index keys in fp8: what is kept of a key, and where in a page.

    a = max(max_i |k_i|, 1e-4),   s = 2^ceil(log2(a / 448)),   kept: e4m3(k_i / s) and s

    score_j = s_j * sum_h relu(q8_h . k8_j) * (g_h * s_h)              a query is treated as a key and not kept

A page of T tokens in layout `indexk_<I+4>` is T * (I + 4) bytes: T rows of I e4m3 codes, then T scales, fp32,
little-endian (`spec/deepseek_v32.md` sections 5.2 and 5.6; 64 tokens of 128 features are 8448 bytes). Keys and queries
come rotated by `hadamard`, which spreads an outlier over all features and leaves every q . k as it is.

No engine lets a graph look at the bits of a float. What takes their place is exact: comparisons, multiplication by
powers of two, and tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.plugins.flat_step import take

SCALE_BYTES = 4
LARGEST = 448.0  # of e4m3
FLOOR_EXPONENT = -22  # ceil(log2(1e-4 / 448)): an all-zero row has a scale, too


def page_layout(size: int) -> str:
    """Name of the layout of keys with `size` features."""
    return f"indexk_{size + SCALE_BYTES}"


def hadamard(size: int) -> Tensor:
    """H * size^-1/2 in Sylvester's order, [size, size]: entry (i, j) is negative where i & j has odd parity."""
    signs = [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(size)] for i in range(size)]
    return torch.tensor(signs) * size**-0.5


def row_scales(rows: Tensor) -> tuple[Tensor, Tensor]:
    """For rows [..., I] the lowest power of two s with all of |row| <= 448 s, from the floor's upwards, and its
    exponent: both fp32 [...]."""
    largest = rows.abs().amax(dim=-1)
    scale, exponent = torch.full_like(largest, 2.0**FLOOR_EXPONENT), torch.full_like(largest, FLOOR_EXPONENT)
    for jump in (64, 64, 32, 16, 8, 4, 2, 1):
        above = (largest > scale * (LARGEST * 2.0 ** (jump - 1))).to(torch.float32)
        scale, exponent = scale * (1 + above * (2.0**jump - 1)), exponent + above * jump
    return scale, exponent


def e4m3(values: Tensor) -> tuple[Tensor, Tensor]:
    """`values` rounded to e4m3, half to even, saturating at 448, and their codes 0..255: both fp32. NaN is code 127.

    From 0 to 2^-5 neighbours are 2^-9 apart, in every octave above twice as far; in units of that distance a value of
    octave n is m = 0..16, and its code 8 n + m.
    """
    values = values.clamp(-LARGEST, LARGEST)
    size = values.abs()
    unit, octave = torch.full_like(size, 2.0**-9), torch.zeros_like(size)
    for jump in (8, 4, 2, 1):
        above = (size >= unit * 2.0 ** (jump + 3)).to(torch.float32)
        unit, octave = unit * (1 + above * (2.0**jump - 1)), octave + above * jump
    units = torch.round(size / unit)
    negative = (1.0 / values < 0).to(torch.float32)  # of zeros, too
    code = octave * 8 + units + negative * 128
    return units * unit * (1 - 2 * negative), torch.where(values == values, code, 127.0)


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [..., I] over their scales as e4m3 has them, and the scales [...]."""
    scale, _ = row_scales(rows)
    return e4m3(rows / scale[..., None])[0], scale


def write_pages(pages: Tensor, targets: Tensor, rows: Tensor, tokens_per_page: int) -> Tensor:
    """A copy of `pages` u8 [pages, page_bytes] with the keys `rows` [N, I] at the physical tokens `targets` [N]."""
    scale, exponent = row_scales(rows)
    code = e4m3(rows / scale[:, None])[1]
    size, inside = rows.shape[1], (targets % tokens_per_page)[:, None]
    biased = exponent.to(torch.int64)[:, None] + 127  # the bits of a power of two: eight of exponent, then zeros
    word = torch.cat([biased * 0, biased * 0, biased % 2 * 128, biased // 2], dim=1)
    data = torch.cat([code.to(torch.int64), word], dim=1)
    code_column = inside * size + torch.arange(size)
    scale_column = tokens_per_page * size + inside * SCALE_BYTES + torch.arange(SCALE_BYTES)
    column = torch.cat([code_column, scale_column], dim=1)
    page = (targets // tokens_per_page)[:, None].expand_as(column)
    return pages.index_put((page, column), data.to(torch.uint8))


def read_pages(pages: Tensor, chosen: Tensor, tokens_per_page: int) -> tuple[Tensor, Tensor]:
    """All keys of the pages `chosen` [N, P] in order, [N, P * tokens, I], over their scales, and those scales
    [N, P * tokens], which may be any fp32 numbers."""
    found = take(pages, chosen)
    count, size = chosen.shape[1] * tokens_per_page, pages.shape[1] // tokens_per_page - SCALE_BYTES
    code = found[:, :, : tokens_per_page * size].reshape(-1, count, size)
    word = found[:, :, tokens_per_page * size :].reshape(-1, count, SCALE_BYTES).to(torch.int32)
    exponent = word[:, :, 3] % 128 * 2 + word[:, :, 2] // 128
    mantissa = word[:, :, 2] % 128 * 65536 + word[:, :, 1] * 256 + word[:, :, 0]
    scale = _look_up(_POWERS, exponent) * (1.0 + mantissa.to(torch.float32) * 2.0**-23)
    return _look_up(_E4M3, code.to(torch.int32)), scale


def _look_up(table: list[float], index: Tensor) -> Tensor:
    return take(torch.tensor(table)[:, None], index).squeeze(-1)


def _e4m3_value(code: int) -> float:
    exponent, mantissa, sign = code % 128 // 8, code % 8, -1.0 if code >= 128 else 1.0
    if code % 128 == 127:
        return float("nan")
    return sign * (2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-9 * mantissa)


_E4M3 = [_e4m3_value(code) for code in range(256)]
_POWERS = [0.0, *(2.0**exponent for exponent in range(-126, 128)), float("nan")]  # by the exponent bits of an fp32
