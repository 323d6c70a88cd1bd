"""Where each running request stands: the arrays a captured iteration reads and moves forward by itself."""

from __future__ import annotations

import numpy as np

from twostroke.engines.manifest import SCRATCH_SLOT


class Slots:
    """Per-slot arrays, first axis S, and who may use which slot. Slot 0 is scratch and never handed out.

    position i32: P, tokens committed to the target's memory; anchor i32: the token that stands at P, not yet in memory;
    depth i32: drafts the request wants verified per iteration; done bool: finished, its rows go to scratch;
    valid_from i32: first position with draft context; generation i32: changes when the slot changes hands, so that a
    result that arrives late is known to belong to somebody else. The limit lies with the sampling parameters.
    """

    def __init__(self, slots: int) -> None:
        self.position = np.zeros(slots, np.int32)
        self.anchor = np.zeros(slots, np.int32)
        self.depth = np.zeros(slots, np.int32)
        self.done = np.zeros(slots, np.bool_)
        self.valid_from = np.zeros(slots, np.int32)
        self.generation = np.zeros(slots, np.int32)
        self._free = list(range(slots - 1, SCRATCH_SLOT, -1))

    @property
    def free_slots(self) -> int:
        """Slots nobody uses."""
        return len(self._free)

    def take(self, depth: int) -> int:
        """A free slot at position 0 for a request that wants `depth` drafts per iteration."""
        slot = self._free.pop()
        self.position[slot] = 0
        self.anchor[slot] = 0
        self.depth[slot] = depth
        self.done[slot] = False
        self.valid_from[slot] = 0
        return slot

    def give_back(self, slot: int) -> None:
        """Frees a slot; whatever is still under way for it is stale from now on."""
        if slot == SCRATCH_SLOT or slot in self._free:
            raise ValueError(f"slot {slot} is not in use")
        self.generation[slot] += 1
        self.done[slot] = True
        self._free.append(slot)
