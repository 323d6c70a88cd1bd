"""Addressing in a flat step against loops over positions."""

from __future__ import annotations

import pytest
import torch

from twostroke.plugins.flat_step import (
    closing_rows,
    exact_topk,
    gather_recent,
    page_rows,
    request_of,
    ring_targets,
    scatter_rows,
)
from twostroke.tests.plugins.flat_inputs import layout, normal

LAYOUTS = {
    "prefill": layout((1, 0, 30)),
    "decode": layout((1, 40, 1), (2, 3, 1), (3, 0, 1), padding=1),
    "verify": layout((2, 17, 6), (1, 9, 6), padding=2, dead=3),
    "mixed": layout((3, 0, 19), (1, 21, 1), (2, 14, 6), padding=3, dead=2),
    "long-chunk-with-history": layout((1, 11, 40), (2, 100, 2)),
    "padding-requests": layout((1, 5, 3), (0, 0, 2), (2, 8, 2)),
}


def test_rows_know_their_request_and_padding_has_none() -> None:
    found = request_of(torch.arange(7), torch.tensor([0, 3, 3, 5]))
    assert found.tolist() == [0, 0, 0, 2, 2, 3, 3], "an empty request owns no row"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("count", "ring"), [(8, 13), (4, 9), (1, 6)])
def test_recent_rows_are_those_of_a_loop_over_positions(name: str, count: int, ring: int) -> None:
    """Rows of this step come from it, older ones from the ring as it was before. Everything nobody may read is NaN."""
    where = LAYOUTS[name]
    history = {(s, p): normal(1000 * s + p, 2) for s in (1, 2, 3) for p in range(160)}
    memory = torch.full((4 * ring, 2), torch.nan)
    first = {int(s): int(p) for p, s in zip(reversed(where.positions), reversed(where.slots), strict=True) if s}
    for slot, start in first.items():
        for position in range(max(0, start - ring), start):
            memory[slot * ring + position % ring] = history[slot, position]
    fresh = torch.stack(
        [
            history[int(s), int(p)] if s else torch.full((2,), torch.nan)
            for p, s in zip(where.positions, where.slots, strict=True)
        ]
    )
    rows, valid = gather_recent(fresh, memory, where.positions, where.slots, where.row_start, count=count, ring=ring)
    for n, (position, slot) in enumerate(zip(where.positions.tolist(), where.slots.tolist(), strict=True)):
        if slot == 0:
            continue
        for k in range(count):
            wanted = position - (count - 1 - k)
            assert bool(valid[n, k]) is (wanted >= 0)
            expected = history[slot, wanted] if wanted >= 0 else fresh[n]
            assert torch.equal(rows[n, k], expected), (n, k)


def test_rows_before_the_first_position_are_invalid_and_never_read() -> None:
    """`first_position` cuts below; a masked row is the token's own, so stale NaN meets no arithmetic."""
    where = layout((1, 10, 4))
    fresh = normal(0, 4, 2)
    memory = torch.full((26, 2), torch.nan)
    memory[13 + 9] = 7.0
    rows, valid = gather_recent(
        fresh,
        memory,
        where.positions,
        where.slots,
        where.row_start,
        count=8,
        ring=13,
        first_position=torch.tensor([9, 9, 11, 13]),
    )
    assert not torch.isnan(rows).any()
    assert valid.sum(dim=1).tolist() == [2, 3, 2, 1]
    assert torch.equal(rows[0, 6], torch.full((2,), 7.0))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ratio", [1, 2, 4, 8, 128])
def test_closing_rows_are_the_real_rows_that_complete_a_window(name: str, ratio: int) -> None:
    """In order, then -1; there is room for all of them, and always for two: a lone row would round differently."""
    where = LAYOUTS[name]
    found = closing_rows(where.positions, where.slots, where.row_start, ratio=ratio)
    assert len(found) >= 2
    assert found.tolist() == where.closing(ratio).tolist()


@pytest.mark.parametrize("phase", range(4))
def test_there_is_room_for_the_most_windows_a_step_can_complete(phase: int) -> None:
    """Many short requests that each complete one, and a long one that completes one more than its length suggests."""
    short = layout(*[(slot, 3, 1) for slot in range(1, 8)])
    assert closing_rows(short.positions, short.slots, short.row_start, ratio=4).tolist() == [*range(7), -1, -1]
    long = layout((1, phase, 9), (2, 3, 5))
    found = closing_rows(long.positions, long.slots, long.row_start, ratio=4)
    assert found.tolist() == long.closing(4).tolist()
    assert (found >= 0).sum() == sum((p + 1) % 4 == 0 for p in long.positions.tolist())


def test_recent_rows_of_chosen_tokens_are_those_of_all() -> None:
    where = LAYOUTS["mixed"]
    fresh, memory = normal(0, where.tokens, 2), normal(1, 4 * 13, 2)
    given = (fresh, memory, where.positions, where.slots, where.row_start)
    rows, valid = gather_recent(*given, count=8, ring=13)
    chosen = torch.tensor([20, 0, 3, 3])
    some_rows, some_valid = gather_recent(*given, count=8, ring=13, of=chosen)
    assert torch.equal(some_rows, rows[chosen])
    assert torch.equal(some_valid, valid[chosen])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ring", [1, 6, 13, 64])
def test_a_token_writes_only_if_no_later_token_of_the_step_owns_its_row(name: str, ring: int) -> None:
    where = LAYOUTS[name]
    targets = ring_targets(where.positions, where.slots, where.row_start, ring=ring).tolist()
    ends = [*where.row_start.tolist(), where.tokens]
    for n, target in enumerate(targets):
        request_end = next(end for end in ends if end > n)
        owner = n + ring >= request_end
        expected = int(where.slots[n]) * ring + int(where.positions[n]) % ring
        assert target == (expected if owner else 0), n
    real = [t for t in targets if t >= ring]
    assert len(real) == len(set(real)), "two tokens write one real row: the order of a scatter would decide"


def test_after_a_step_the_ring_holds_the_last_rows_of_the_request() -> None:
    where = layout((1, 3, 40))
    rows = normal(2, 40, 2)
    memory = scatter_rows(
        torch.full((26, 2), torch.nan), ring_targets(where.positions, where.slots, where.row_start, ring=13), rows
    )
    for position in range(43 - 13, 43):
        assert torch.equal(memory[13 + position % 13], rows[position - 3])


def test_scatter_leaves_its_argument_alone() -> None:
    memory = torch.zeros(5, 2)
    after = scatter_rows(memory, torch.tensor([3, 1]), torch.ones(2, 2))
    assert memory.sum() == 0
    assert after[[1, 3]].sum() == 4


def test_logical_rows_find_their_page() -> None:
    table = torch.tensor([[0, 0, 0], [5, 2, 7], [1, 0, 0]])
    rows = torch.tensor([[0, 3, 4, 11], [0, 1, 2, 3]])
    found = page_rows(table, torch.tensor([1, 2]), rows, rows_per_page=4)
    assert found.tolist() == [[20, 23, 8, 31], [4, 5, 6, 7]]


def test_rows_beyond_the_table_stay_inside_it() -> None:
    """A padding row or a row past the narrow tier must still address memory that exists; it is masked by its caller."""
    found = page_rows(torch.tensor([[0], [3]]), torch.tensor([1]), torch.tensor([[9]]), rows_per_page=4)
    assert found.tolist() == [[13]]


def test_top_k_gives_equals_to_the_lowest_index() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0], [-1.0, 3.0, 0.0, 3.0, 3.0]])
    assert exact_topk(scores, 3).tolist() == [[1, 3, 0], [0, 1, 2], [1, 3, 4]]


def test_top_k_of_many_ties_is_a_stable_sort() -> None:
    """Three values over 500 entries, so that nearly everything ties."""
    scores = torch.randint(0, 3, (20, 500), generator=torch.Generator().manual_seed(0)).float()
    for row, chosen in zip(scores.tolist(), exact_topk(scores, 200).tolist(), strict=True):
        assert chosen == sorted(range(500), key=lambda i: (-row[i], i))[:200]
