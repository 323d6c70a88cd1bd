"""Where the live rows of a slot lie."""

import numpy as np

from twostroke.engines.manifest import StateTensor
from twostroke.runtime.page_table import PageTable
from twostroke.runtime.state import State

WINDOW = StateTensor("window", "ring", tokens_per_row=1, rows=13, width=2, lookback=7)
RAW = StateTensor("raw", "ring", tokens_per_row=1, rows=12, width=2, ratio=4, lookback=4)
PAGED = StateTensor("compressed", "paged", tokens_per_row=4, rows=2, width=2)
LINEAR = StateTensor("heavy", "linear", tokens_per_row=8, rows=16, width=2)


def test_live_rows_come_in_logical_order_from_wherever_they_lie() -> None:
    table = PageTable(slots=3, pages=8, pages_per_slot=4, tokens_per_page=8)
    table.reserve(1, 8)
    table.reserve(2, 24)
    state = State((WINDOW, RAW, PAGED, LINEAR), slots=3, pages=9)
    slot, position = 2, 23
    for p in range(position):
        state.arrays["window"][slot * 13 + p % 13] = p
        state.arrays["raw"][slot * 12 + p % 12] = p
    for w in range(position // 4):
        state.arrays["compressed"][table.owned(slot)[w // 2] * 2 + w % 2] = w
    for w in range(position // 8):
        state.arrays["heavy"][slot * 16 + w] = w
    live = {name: rows[:, 0].tolist() for name, rows in state.live_rows(slot, position, table.full).items()}
    assert live == {
        "window": list(range(16, 23)),
        "raw": list(range(16, 23)),
        "compressed": list(range(5)),
        "heavy": [0, 1],
    }


def test_nothing_is_live_before_the_first_token() -> None:
    state = State((WINDOW, RAW, PAGED, LINEAR), slots=2, pages=2)
    assert all(not rows.size for rows in state.live_rows(1, 0, np.zeros((2, 1), np.int32)).values())


def test_poison_is_nan_or_all_bits() -> None:
    packed = StateTensor("packed", "paged", tokens_per_row=4, rows=2, width=3, dtype="uint8", layout="v4_584")
    state = State((WINDOW, packed), slots=2, pages=2, poison=True)
    assert np.isnan(state.arrays["window"]).all()
    assert (state.arrays["packed"] == 0xFF).all()


def test_a_tensor_is_read_and_updated_in_the_same_memory() -> None:
    bindings = State((WINDOW,), slots=2, pages=2).bindings()
    assert bindings["window"] is bindings["window.next"]
