"""Plain torch specification of all_reduce at world size 1."""

from __future__ import annotations

from torch import Tensor


def all_reduce(x: Tensor) -> Tensor:
    """x [N, D] -> the same values in memory of their own."""
    return x.clone()
