"""Slots change hands without confusing what is still under way."""

import pytest

from twostroke.runtime.slots import Slots


def test_scratch_is_never_handed_out() -> None:
    slots = Slots(4)
    assert sorted(slots.take(depth=2) for _ in range(3)) == [1, 2, 3]
    assert slots.free_slots == 0


def test_a_slot_that_changed_hands_has_another_generation() -> None:
    slots = Slots(2)
    first = slots.take(depth=2)
    before = int(slots.generation[first])
    slots.give_back(first)
    second = slots.take(depth=0)
    assert second == first
    assert slots.generation[second] != before


def test_a_reused_slot_starts_at_position_zero_and_is_not_done() -> None:
    slots = Slots(2)
    slot = slots.take(depth=2)
    slots.position[slot], slots.anchor[slot] = 40, 7
    slots.give_back(slot)
    assert slots.done[slot]
    slots.take(depth=1)
    assert (slots.position[slot], slots.anchor[slot], slots.depth[slot], slots.done[slot]) == (0, 0, 1, False)


@pytest.mark.parametrize("slot", [0, 1])
def test_a_slot_that_is_not_in_use_cannot_be_given_back(slot: int) -> None:
    with pytest.raises(ValueError, match=f"slot {slot} is not in use"):
        Slots(3).give_back(slot)
