"""Plain torch specification of quantised weights. Shapes: codes u8 [O, K], two fp4 codes a byte [O, K/2].

A scale is fp32, or e8m0 bytes in u8; the last block of a dimension may be short.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.plugins.flat_step import take
from twostroke.plugins.quantised.codes import E2M1_PAIRS, E4M3, E8M0

BLOCK = 128  # rows and columns of an fp8 scale
GROUP = 32  # columns of an fp4 scale


def look_up(table: Sequence[float], codes: Tensor) -> Tensor:
    """table[codes] of whole numbers of any shape, fp32. In a graph GatherElements, at a third of Gather's time."""
    return torch.gather(torch.tensor(table), 0, codes.reshape(-1).to(torch.int64)).reshape(codes.shape)


def fp4_values(packed: Tensor) -> Tensor:
    """The values of packed fp4 codes u8 [..., K/2], low nibble first: fp32 [..., K]."""
    return take(torch.tensor(E2M1_PAIRS), packed.to(torch.int32)).flatten(-2)


def dequantise_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """The matrix [O, K] of codes u8 [O, K] and scale [ceil(O / 128), ceil(K / 128)]."""
    return _scaled(look_up(E4M3, codes), scale, BLOCK, BLOCK)


def dequantise_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """The matrix [O, K] of packed codes u8 [O, K/2] and scale [O, ceil(K / 32)]."""
    return _scaled(fp4_values(packed), scale, 1, GROUP)


def linear_fp8(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x [N, K] times the transposed matrix of codes u8 [O, K] and scale [ceil(O / 128), ceil(K / 128)]: [N, O]."""
    return torch.nn.functional.linear(x, dequantise_fp8(codes, scale))


def _scaled(values: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    """values [O, K] times the scale of their block of `rows` x `columns`."""
    factor = look_up(E8M0, scale) if scale.dtype == torch.uint8 else scale
    wide = factor.index_select(1, torch.arange(values.shape[1]) // columns)
    return values * (wide if rows == 1 else wide.index_select(0, torch.arange(values.shape[0]) // rows))
