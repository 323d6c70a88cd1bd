"""Repetition in generated text: what is counted, and which tokens training discourages."""

from collections.abc import Sequence

import torch
from torch import Tensor


def repeats_eight_thrice(tokens: Sequence[int]) -> bool:
    """t[i:i+8] == t[i+8:i+16] == t[i+16:i+24] for some i."""
    return _longest_echo(tokens, 8) >= 16


def repeats_thrice(tokens: Sequence[int], longest_period: int = 8, at_least: int = 24) -> bool:
    """Some period up to `longest_period` holds three times over, for `at_least` tokens or more."""
    return any(
        _longest_echo(tokens, period) >= max(2 * period, at_least - period) for period in range(1, longest_period + 1)
    )


def _longest_echo(tokens: Sequence[int], period: int) -> int:
    """Length of the longest run in which every token equals the one `period` before it."""
    longest = run = 0
    for place in range(period, len(tokens)):
        run = run + 1 if tokens[place] == tokens[place - period] else 0
        longest = max(longest, run)
    return longest


def loop_tokens(tokens: Tensor, start: int, longest_period: int = 48, at_least: int = 6) -> Tensor:
    """[B, L] bool: tokens from `start` on that complete or prolong a repetition of a period <= `longest_period`.

    A token counts once its whole period (and at least `at_least` tokens) has come again.
    """
    length = tokens.shape[1]
    marked = torch.zeros_like(tokens, dtype=torch.bool)
    for period in range(1, longest_period + 1):
        needed = max(period, at_least)
        if length - period < needed:
            break
        same = (tokens[:, period:] == tokens[:, :-period]).float()
        # All of the last `needed` comparisons agree, ending at this token.
        full = torch.nn.functional.avg_pool1d(same[:, None], needed, stride=1)[:, 0] > 1 - 0.5 / needed
        marked[:, period + needed - 1 :] |= full
    marked[:, :start] = False
    return marked
