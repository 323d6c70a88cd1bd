"""The bar that the target has to clear is a proper probability model."""

import random

import numpy as np
import pytest

from twostroke.builder.demo.ngram import NGram, bits_per_byte


def _documents() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.choice([0, 0, 1, 2, 3, 5]) for _ in range(200)] for _ in range(3)]


@pytest.mark.parametrize("context", [[], [0], [0, 1, 2], [4, 4, 4], [5, 3]])
def test_probabilities_sum_to_one_after_seen_and_unseen_contexts(context: list[int]) -> None:
    model = NGram(_documents(), size=6, order=3)
    total = sum(model.probabilities([*context, symbol])[-1] for symbol in range(6))
    assert total == pytest.approx(1)


def test_a_repeated_text_is_cheap_and_an_unseen_symbol_is_not_free() -> None:
    model = NGram([[0, 1, 2] * 50], size=6, order=3)
    assert model.bits([0, 1, 2] * 10) / 30 < 0.5
    assert 0 < model.probabilities([0, 1, 4])[-1] < 0.1


def test_bits_per_byte_divides_the_bits_of_all_documents() -> None:
    model = NGram(_documents(), size=6, order=2)
    parts = [[0, 1], [2, 3, 0]]
    expected = sum(-np.log2(model.probabilities(part)).sum() for part in parts) / 7
    assert bits_per_byte(model, parts, 7) == pytest.approx(expected)


def test_grams_too_long_for_a_key_are_refused() -> None:
    with pytest.raises(ValueError, match="64-bit"):
        NGram([[0]], size=256, order=8)
