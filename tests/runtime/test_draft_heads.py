"""Drafts with every markov head, served: what they propose never changes what is answered."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from twostroke.engines.errors import ConfigError
from twostroke.engines.loading import load_engine_directory
from twostroke.runtime.inspection import startup_line
from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.scheduler import Scheduler
from twostroke.tests.draft_heads import HEADS
from twostroke.tests.engines import engine_directory
from twostroke.tests.runtime.guarded import guarded
from twostroke.tests.runtime.serving import Oracle, forced_scheduler, greedy, serve

STREAM = np.random.default_rng(7).integers(2, 319, size=64).tolist()
PROMPTS = [STREAM[:5], STREAM[3:24], STREAM[30:31], STREAM[10:50]]


@pytest.fixture(scope="module", params=HEADS)
def folder(request: pytest.FixtureRequest) -> Path:
    return engine_directory(HEADS[request.param])


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(guarded(load_engine_directory(folder)))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_greedy_answers_are_those_of_plain_decoding(oracle: Oracle, batch: int, depth: int) -> None:
    params = greedy(40)
    scheduler = Scheduler(oracle.loaded, RuntimeConfig(max_batch_size=batch, draft_length=depth), poison=True)
    answers = serve(scheduler, [Request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)])
    for i, prompt in enumerate(PROMPTS):
        assert answers[str(i)].tokens == oracle.answer(prompt, params)
    assert scheduler.counters.acceptance.drafted > 0


def test_greedy_answers_are_those_of_plain_decoding_whatever_share_of_the_drafts_is_right(oracle: Oracle) -> None:
    params = greedy(40)
    sequences = {str(i): prompt + oracle.answer(prompt, params) for i, prompt in enumerate(PROMPTS)}
    config = RuntimeConfig(max_batch_size=3)
    scheduler = forced_scheduler(oracle.loaded, config, sequences, lambda turn: turn % 6)
    answers = serve(scheduler, [Request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)])
    assert {name: PROMPTS[int(name)] + answer.tokens for name, answer in answers.items()} == sequences
    assert 0 < scheduler.counters.acceptance.accepted < scheduler.counters.acceptance.drafted


def test_a_draft_without_confidence_head_says_so_at_start_and_refuses_a_threshold() -> None:
    manifest = load_engine_directory(engine_directory(HEADS["vanilla"])).manifest
    line = startup_line(manifest, RuntimeConfig().limits(manifest))
    assert "markov_head loaded, confidence_head missing" in line
    with pytest.raises(ConfigError, match=r"confidence_threshold is 0\.5, but .* \(dspark\) gives no confidence"):
        RuntimeConfig(confidence_threshold=0.5).limits(manifest)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_a_threshold_cuts_what_is_verified_and_changes_no_answer(kind: str) -> None:
    oracle, params = Oracle(load_engine_directory(engine_directory(HEADS[kind]))), greedy(40)
    drafted = []
    for threshold in (0.0, 0.5):
        scheduler = Scheduler(oracle.loaded, RuntimeConfig(max_batch_size=4, confidence_threshold=threshold))
        answers = serve(scheduler, [Request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)])
        assert [answers[str(i)].tokens for i in range(4)] == [oracle.answer(prompt, params) for prompt in PROMPTS]
        drafted.append(scheduler.counters.acceptance.drafted)
    assert drafted[1] < drafted[0]
