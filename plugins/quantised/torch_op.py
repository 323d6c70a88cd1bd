"""quantised as torch ops."""

from __future__ import annotations

import torch

from twostroke.plugins.op import Op
from twostroke.plugins.quantised import reference

LINEAR_FP8 = Op(
    "linear_fp8",
    reference.linear_fp8,
    lambda x, codes, scale: x.new_empty(x.shape[0], codes.shape[0]),
    any_size=True,
)
DEQUANTISE_FP8 = Op(
    "dequantise_fp8",
    reference.dequantise_fp8,
    lambda codes, scale: codes.new_empty(codes.shape, dtype=torch.float32),
    any_size=True,
)
OPS = (LINEAR_FP8, DEQUANTISE_FP8)
