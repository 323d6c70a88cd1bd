"""What a forward pass records for training's auxiliary terms, and these terms."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Trace:
    """Filled by a forward pass that is given one."""

    indexer: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # scores, attention mass: [B, T, rows]
    routes: list[tuple[str, Tensor]] = field(default_factory=list)  # name of the selection bias, weights [B, T, E]

    def indexer_loss(self) -> Tensor:
        """KL from the attention mass on rows to the indexer's softmax: a top-k passes no gradient itself."""
        total = torch.zeros((), device=self.indexer[0][0].device)
        for scores, mass in self.indexer:
            total = total + (torch.xlogy(mass, mass) - mass * scores.log_softmax(-1)).sum(-1).mean()
        return total

    def loads(self) -> dict[str, Tensor]:
        """Share of rows that chose each expert [E], by the name of the selection bias; a mean over its passes."""
        chosen: dict[str, list[Tensor]] = {}
        for bias, route in self.routes:
            chosen.setdefault(bias, []).append((route > 0).float().mean((0, 1)))
        return {bias: torch.stack(parts).mean(0) for bias, parts in chosen.items()}
