"""The live rows of a packed tensor: the pieces of each token, from all planes of its page."""

from __future__ import annotations

from twostroke.engines.manifest import StateTensor
from twostroke.runtime.page_table import PageTable
from twostroke.runtime.state import State

# Four tokens a page, three bytes in the first plane and two in the second: 20 bytes.
PACKED = StateTensor("index", "paged", 1, 4, 5, "uint8", "packed_5", planes=(3, 2))


def test_a_packed_row_is_its_pieces_side_by_side_from_wherever_its_page_is() -> None:
    table = PageTable(slots=3, pages=5, pages_per_slot=3, tokens_per_page=4)
    table.reserve(1, 4)
    table.reserve(2, 11)
    state = State((PACKED,), slots=3, pages=6)
    assert state.arrays["index"].shape == (6, 20)
    for p in range(10):
        page, at = state.arrays["index"][table.owned(2)[p // 4]], p % 4
        page[3 * at : 3 * at + 3] = [10 * p, 10 * p + 1, 10 * p + 2]
        page[12 + 2 * at : 12 + 2 * at + 2] = [10 * p + 3, 10 * p + 4]
    live = state.live_rows(2, 10, table.full)["index"]
    assert live.tolist() == [[10 * p + i for i in range(5)] for p in range(10)]
    assert state.live_rows(1, 0, table.full)["index"].shape == (0, 5)
    live[:] = 0
    assert state.arrays["index"].any(), "live rows are copies"
