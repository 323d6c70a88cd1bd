"""A phase ends with its steps or with its time, and its learning rate falls to nothing either way."""

import time

import torch

from twostroke.builder.demo.budget import Budget, Pace
from twostroke.builder.demo.optimiser import Optimiser

CPU = torch.device("cpu")


def shares(pace: Pace, wait: float = 0.0) -> list[float]:
    """Progress before each step of a whole phase."""
    found = []
    while pace.share < 1:
        found.append(pace.share)
        time.sleep(wait)
        pace.tick()
    return found


def test_without_a_limit_every_step_is_taken() -> None:
    assert shares(Pace(4, None, CPU)) == [0.0, 0.25, 0.5, 0.75]


def test_with_time_to_spare_every_step_is_taken() -> None:
    assert len(shares(Pace(4, 3600.0, CPU))) == 4


def test_time_ends_a_phase_early_and_one_step_is_always_taken() -> None:
    found = shares(Pace(10_000, 0.2, CPU), wait=0.02)
    assert 1 < len(found) <= 10
    assert found == sorted(found)
    assert len(shares(Pace(10_000, 0.0, CPU))) == 1


def test_the_learning_rate_follows_the_time_where_that_runs_out_first() -> None:
    weight = torch.zeros(2, 2)
    optimiser = Optimiser({"w": weight}, 1.0, 100)
    pace, rates = Pace(100, 0.3, CPU), []
    while pace.share < 1:
        optimiser.set_rate(pace)
        rates.append(float(optimiser._rate))
        time.sleep(0.015)
        pace.tick()
    assert len(rates) < 100
    assert max(rates) > 0.4
    assert rates[-1] < 0.2


def test_a_budget_counts_down_to_the_mark_of_a_stage() -> None:
    assert Budget(None).until(0.5) is None
    left = Budget(2.0).until(0.5)
    assert left is not None
    assert 55 < left <= 60
    assert Budget(0.0).until(0.5) == 0.0
