"""Random inputs of flat steps for op tests: packed requests with history, dead rows and padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """positions, slots [N] and row_start [R+1] of a step, i64."""

    positions: Tensor
    slots: Tensor
    row_start: Tensor

    @property
    def tokens(self) -> int:
        return len(self.positions)

    def closing(self, ratio: int) -> Tensor:
        """Rows of real slots that complete a window of `ratio`, then -1: i64 [N // ratio + R + 1]."""
        rows = [n for n in range(self.tokens) if self.slots[n] and (int(self.positions[n]) + 1) % ratio == 0]
        most = self.tokens // ratio + len(self.row_start)
        return torch.tensor([*rows, *[-1] * (most - len(rows))])


def layout(*requests: tuple[int, int, int], padding: int = 0, dead: int = 0) -> Layout:
    """Requests as (slot, start, count); the last `dead` rows of the last one carry slot 0, `padding` rows follow."""
    positions = [torch.arange(start, start + count) for _, start, count in requests]
    slots = [torch.full((count,), slot) for slot, _, count in requests]
    if dead:
        slots[-1][-dead:] = 0
    ends = torch.cumsum(torch.tensor([0, *(count for *_, count in requests)]), 0)
    zeros = torch.zeros(padding, dtype=torch.int64)
    return Layout(torch.cat([*positions, zeros]), torch.cat([*slots, zeros]), ends)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> Tensor:
    """Standard normal values."""
    return torch.randn(*shape, generator=generator(seed))
