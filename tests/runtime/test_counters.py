"""Acceptance in numbers."""

import pytest

from twostroke.runtime.counters import Acceptance, EngineCounters


def test_mean_accepted_length_counts_the_bonus_token() -> None:
    acceptance = Acceptance()
    acceptance.add(drafted=3, accepted=3, emitted=4)
    acceptance.add(drafted=3, accepted=0, emitted=1)
    assert acceptance.mean_accepted_length == pytest.approx(2.5)
    assert acceptance.acceptance_rate == pytest.approx(0.5)
    assert acceptance.drafted_at == [2, 2, 2]
    assert acceptance.accepted_at == [1, 1, 1]


def test_drafts_behind_the_end_of_the_text_are_not_counted_as_accepted() -> None:
    acceptance = Acceptance()
    acceptance.add(drafted=5, accepted=5, emitted=2)
    assert acceptance.accepted == 2
    assert acceptance.accepted_at == [1, 1, 0, 0, 0]


def test_nothing_yet_is_zero_and_not_an_error() -> None:
    assert Acceptance().mean_accepted_length == 0
    assert Acceptance().acceptance_rate == 0


def test_shapes_and_finishes_are_counted_by_name() -> None:
    counters = EngineCounters()
    for shape in ("1x6", "4x6", "4x6"):
        counters.count_replay(shape)
    counters.count_finish("stop")
    assert counters.replays == {"1x6": 1, "4x6": 2}
    assert counters.finished == {"stop": 1}
