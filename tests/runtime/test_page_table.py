"""The page allocator: every page has one owner, and every tier says the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.runtime.page_table import PageTable


def test_scratch_page_is_never_handed_out() -> None:
    table = PageTable(slots=3, pages=4, pages_per_slot=4, tokens_per_page=4)
    table.reserve(1, 8)
    table.reserve(2, 8)
    assert sorted(table.owned(1) + table.owned(2)) == [1, 2, 3, 4]
    assert not table.full[0].any()


def test_growing_a_reservation_keeps_the_pages_it_has() -> None:
    table = PageTable(slots=2, pages=4, pages_per_slot=4, tokens_per_page=4)
    table.reserve(1, 5)
    before = table.owned(1)
    table.reserve(1, 9)
    table.reserve(1, 3)
    assert table.owned(1)[:2] == before
    assert len(table.owned(1)) == 3


def test_releasing_twice_is_refused() -> None:
    table = PageTable(slots=2, pages=4, pages_per_slot=4, tokens_per_page=4)
    table.reserve(1, 5)
    table.release(1)
    with pytest.raises(ValueError, match="slot 1 owns no pages"):
        table.release(1)
    assert table.free_pages == 4


def test_a_reservation_beyond_the_free_pages_takes_nothing() -> None:
    table = PageTable(slots=3, pages=3, pages_per_slot=3, tokens_per_page=4)
    table.reserve(1, 8)
    assert not table.can_reserve(2, 8)
    with pytest.raises(ValueError, match="1 of 3 are free"):
        table.reserve(2, 8)
    assert table.free_pages == 1
    assert table.owned(2) == ()


def test_tiers_are_powers_of_two_up_to_the_full_width() -> None:
    table = PageTable(slots=2, pages=20, pages_per_slot=10, tokens_per_page=4)
    assert table.tiers == (1, 2, 4, 8, 10)
    assert [table.tier(tokens) for tokens in (1, 4, 5, 16, 17, 33, 40)] == [1, 1, 2, 4, 8, 10, 10]
    with pytest.raises(ValueError, match="41 tokens need 11 pages, expected at most 10"):
        table.tier(41)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.one_of(st.none(), st.integers(1, 24))),
        max_size=60,
    )
)
def test_no_page_has_two_owners_and_all_tiers_agree(events: list[tuple[int, int | None]]) -> None:
    table = PageTable(slots=5, pages=11, pages_per_slot=6, tokens_per_page=4)
    for slot, tokens in events:
        if tokens is None:
            if table.owned(slot):
                table.release(slot)
        elif table.can_reserve(slot, tokens):
            table.reserve(slot, tokens)
        owned = [page for each in range(5) for page in table.owned(each)]
        assert len(owned) == len(set(owned))
        assert 0 not in owned
        assert table.free_pages + len(owned) == 11
        for tier in table.tiers:
            np.testing.assert_array_equal(table.columns(tier), table.full[:, :tier])
        for each in range(5):
            held = table.owned(each)
            assert table.full[each].tolist() == [*held, *[0] * (6 - len(held))]
