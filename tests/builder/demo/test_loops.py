"""What counts as a loop, and what a chain of drafts emits."""

import torch

from twostroke.builder.demo.generate import chain
from twostroke.builder.demo.loops import loop_tokens, repeats_eight_thrice, repeats_thrice

CYCLE = [9, 8, 7, 6, 5, 4, 3, 2]


def test_eight_tokens_three_times_are_a_loop_and_twice_are_not() -> None:
    assert repeats_eight_thrice([1, 2, 3, *CYCLE * 3, 1])
    assert not repeats_eight_thrice([1, 2, 3, *CYCLE * 2, 1])
    assert not repeats_eight_thrice([*CYCLE, *CYCLE, *CYCLE[:-1], 1])


def test_other_periods_count_only_in_the_stricter_figure() -> None:
    fives = [1, 2, 3, 4, 5] * 6
    assert not repeats_eight_thrice(fives)
    assert repeats_thrice(fives)
    assert not repeats_thrice(list(range(60)))


def test_marked_tokens_are_those_that_complete_or_prolong_a_repetition() -> None:
    tokens = torch.tensor([[20, 21, *CYCLE, *CYCLE, 2, 30, 31]])
    assert loop_tokens(tokens, 0)[0].nonzero().flatten().tolist() == [2 + 15]
    assert not loop_tokens(tokens, 18).any()


def test_a_chain_counts_the_bonus_and_nothing_past_the_end() -> None:
    assert chain([0, 2, 9, 9, 5, 9, 9, 9, 9], tokens_wanted=9) == [1, 3, 4]
