"""A built V3.2 engine gives the greedy ids of its eager network, drafting or not, whatever runs beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from twostroke.builder.eager import EagerEngine
from twostroke.engines.loading import LoadedEngine
from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.scheduler import Scheduler
from twostroke.tests.builder.flat_runs import Chunk, Memory, Toy, forward
from twostroke.tests.runtime.serving import greedy, serve
from twostroke.tests.served import SERVED

# (prompt length, tokens to generate): across top-k (8), across a page (64), from one token, to the maximum length (96).
LENGTHS = [(5, 30), (60, 20), (1, 40), (37, 59), (64, 10), (2, 12)]
REQUESTS = [
    Request(str(n), tuple(np.random.default_rng(n).integers(2, 318, size=prompt).tolist()), greedy(new))
    for n, (prompt, new) in enumerate(LENGTHS)
]


def eager_answer(target: EagerEngine, request: Request, count: int) -> list[int]:
    """Greedy ids by one row a step in memory of its own; ties go to the lowest id."""
    memory, tokens = Memory(target.spec.state, slots=2, pages_per_slot=2), list(request.prompt_ids)
    logits = forward(target, memory, [Chunk(1, 0, tokens)])[0]["logits"][-1]
    for _ in range(count - 1):
        tokens.append(int(logits.argmax()))
        logits = forward(target, memory, [Chunk(1, len(tokens) - 1, tokens[-1:])])[0]["logits"][-1]
    return [*tokens[len(request.prompt_ids) :], int(logits.argmax())]


@pytest.fixture(scope="module")
def expected(t32_engine_dir: Path) -> dict[str, list[int]]:
    target = Toy(t32_engine_dir.parent / "checkpoint").target(max_seq_len=96)
    return {request.id: eager_answer(target, request, new) for request, (_, new) in zip(REQUESTS, LENGTHS, strict=True)}


@pytest.fixture(scope="module", params=[served for served in SERVED if served.target == "v32"], ids=str)
def engine(request: pytest.FixtureRequest) -> LoadedEngine:
    """Of one checkpoint, with its MTP layer and without."""
    return request.getfixturevalue(request.param.engine)


@pytest.mark.parametrize(("batch", "chunk", "lag"), [(1, 64, 0), (3, 16, 0), (8, 7, 1)])
def test_greedy_ids_are_those_of_the_eager_network(
    engine: LoadedEngine, expected: dict[str, list[int]], batch: int, chunk: int, lag: int
) -> None:
    """Alone, three at a time, and all at once with the host behind; memory starts as NaN."""
    config = RuntimeConfig(max_batch_size=batch, max_num_tokens=chunk, lag=lag)
    answers = serve(Scheduler(engine, config, poison=True), REQUESTS)
    assert {name: answer.tokens for name, answer in answers.items()} == expected
    assert len(set(expected["3"])) > 5, "the toy says one thing only: this shows nothing"


def test_pages_are_shared_and_given_back(engine: LoadedEngine, expected: dict[str, list[int]]) -> None:
    """Three pages for six requests of one or two: some wait for a page, all get their answer."""
    config = RuntimeConfig(max_batch_size=4, kv_pages=3)
    answers = serve(Scheduler(engine, config, poison=True), REQUESTS)
    assert {name: answer.tokens for name, answer in answers.items()} == expected
