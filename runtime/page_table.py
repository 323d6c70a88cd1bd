"""Physical pages: who owns which, and the table that tells a step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twostroke.engines.manifest import SCRATCH_PAGE, SCRATCH_SLOT


class PageTable:
    """`pages` pages (numbers 1..pages; page 0 is scratch) shared by `slots` slots of at most `pages_per_slot` each.

    The table is kept once per tier, a width in pages: a step binds the narrowest tier that covers its requests, so
    short requests do not pay for the longest the engine allows. All tiers hold the same entries; unassigned ones are
    scratch.
    """

    def __init__(self, slots: int, pages: int, pages_per_slot: int, tokens_per_page: int) -> None:
        self.pages = pages
        self.pages_per_slot = pages_per_slot
        self.tokens_per_page = tokens_per_page
        widths = {pages_per_slot}
        width = 1
        while width < pages_per_slot:
            widths.add(width)
            width *= 2
        self.tiers = tuple(sorted(widths))
        self._columns = {tier: np.full((slots, tier), SCRATCH_PAGE, np.int32) for tier in self.tiers}
        self._free = list(range(pages, SCRATCH_PAGE, -1))
        self._owned: list[list[int]] = [[] for _ in range(slots)]

    @property
    def free_pages(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    @property
    def full(self) -> NDArray[np.int32]:
        """The table at full width, i32 [S, pages_per_slot]."""
        return self._columns[self.pages_per_slot]

    def columns(self, tier: int) -> NDArray[np.int32]:
        """The table of one tier, i32 [S, tier]; the same array for as long as this object lives."""
        return self._columns[tier]

    def tier(self, tokens: int) -> int:
        """The narrowest tier that covers `tokens` tokens of every slot."""
        wanted = self.pages_for(tokens)
        for tier in self.tiers:
            if tier >= wanted:
                return tier
        raise ValueError(f"{tokens} tokens need {wanted} pages, expected at most {self.pages_per_slot} a slot")

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.tokens_per_page)

    def owned(self, slot: int) -> tuple[int, ...]:
        """Pages of a slot, in the order of the tokens they hold."""
        return tuple(self._owned[slot])

    def can_reserve(self, slot: int, tokens: int) -> bool:
        """Whether `reserve(slot, tokens)` would succeed now."""
        wanted = self.pages_for(tokens)
        return wanted <= self.pages_per_slot and wanted - len(self._owned[slot]) <= len(self._free)

    def reserve(self, slot: int, tokens: int) -> None:
        """Gives a slot what it lacks to hold `tokens` tokens."""
        if slot == SCRATCH_SLOT:
            raise ValueError("the scratch slot owns no pages")
        if not self.can_reserve(slot, tokens):
            raise ValueError(
                f"slot {slot} holds {len(self._owned[slot])} pages and needs {self.pages_for(tokens)} (at most "
                f"{self.pages_per_slot}), but {self.free_pages} of {self.pages} are free"
            )
        owned = self._owned[slot]
        while len(owned) < self.pages_for(tokens):
            page = self._free.pop()
            for tier, columns in self._columns.items():
                if len(owned) < tier:
                    columns[slot, len(owned)] = page
            owned.append(page)

    def release(self, slot: int) -> None:
        """Takes every page of a slot back; a slot that owns none has been released before."""
        if not self._owned[slot]:
            raise ValueError(f"slot {slot} owns no pages: released twice, or never reserved")
        self._free.extend(reversed(self._owned[slot]))
        self._owned[slot] = []
        for columns in self._columns.values():
            columns[slot] = SCRATCH_PAGE
