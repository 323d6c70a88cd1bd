from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.engines.errors import EngineError
from twostroke.engines.loading import load_engine_directory
from twostroke.runtime.generation import Generation
from twostroke.runtime.request import Progress
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.sampling_params import SamplingParams
from twostroke.runtime.scheduler import Scheduler
from twostroke.runtime.serving_loop import ServingLoop
from twostroke.tests.runtime.scripted_engine import write_scripted_engine


class FailingScheduler(Scheduler):
    """Its engine breaks down at a step."""

    fails_at = 3

    def step(self) -> list[Progress]:
        if self.counters.steps + 1 >= self.fails_at:
            raise ZeroDivisionError("the device is gone")
        return super().step()


def generation(loop: ServingLoop, request_id: int) -> Generation:
    return Generation(request_id, None, [0], SamplingParams(max_tokens=50), streaming=False, abort=loop.abort)


@pytest.mark.parametrize("max_batch_size", [1, 4])
def test_a_failed_step_ends_every_request_with_its_reason_and_refuses_new_ones(
    tmp_path: Path, max_batch_size: int
) -> None:
    loaded = load_engine_directory(write_scripted_engine(tmp_path, [0, 10, 11]))
    loop = ServingLoop(FailingScheduler(loaded, RuntimeConfig(max_batch_size=max_batch_size)))
    running = [generation(loop, number) for number in range(3)]
    loop.submit([(each, None) for each in running])
    for each in running:
        with pytest.raises(EngineError, match=r"serving has stopped.*ZeroDivisionError: the device is gone") as caught:
            each.result(timeout=10)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(EngineError, match="serving has stopped"):
        loop.submit([(generation(loop, 9), None)])
    loop.close()


def test_a_request_the_scheduler_refuses_fails_alone(tmp_path: Path) -> None:
    loaded = load_engine_directory(write_scripted_engine(tmp_path, [0, 10, 11]))
    loop = ServingLoop(Scheduler(loaded, RuntimeConfig()))
    first, second = generation(loop, 1), generation(loop, 1)
    loop.submit([(first, None), (second, None)])
    with pytest.raises(Exception, match="'1' is in use"):
        second.result(timeout=10)
    assert first.result(timeout=10).outputs[0].length == 50
    loop.close()


def test_aborting_what_is_not_there_or_twice_is_nothing(tmp_path: Path) -> None:
    loaded = load_engine_directory(write_scripted_engine(tmp_path, [0, 10, 11]))
    loop = ServingLoop(Scheduler(loaded, RuntimeConfig()))
    loop.abort(77)
    only = generation(loop, 1)
    loop.submit([(only, None)])
    assert only.result(timeout=10).outputs[0].length == 50
    only.abort()
    only.abort()
    after = generation(loop, 2)
    loop.submit([(after, None)])
    assert after.result(timeout=10).outputs[0].finish_reason == "length"
    loop.close()
