"""The demo models: held-out prompts give the same ids with and without speculation, however they are batched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import twostroke
from twostroke.builder.build import BuildOptions, build
from twostroke.builder.demo import corpus
from twostroke.engines.loading import LoadedEngine, load_engine_directory
from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.sampling_params import SamplingParams
from twostroke.runtime.scheduler import Scheduler
from twostroke.tests.engines import CACHE, code_hash, locked

MODELS = Path(twostroke.__file__).parent / "runtime" / "demo"
WORTH = {"v4-dspark": 2.5, "v32-mtp": 1.9}  # tokens per iteration that each must bring
Ids = dict[str, list[int]]


@pytest.fixture(scope="module", params=list(WORTH))
def demo(request: pytest.FixtureRequest) -> LoadedEngine:
    folder = CACHE / f"demo-{request.param}-{code_hash()}"
    with locked(folder):
        if not (folder / "engine" / "config.json").exists():
            build(MODELS / request.param, folder / "engine", BuildOptions(force=True))
    return load_engine_directory(folder / "engine")


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    _, held = corpus.split(corpus.stdlib_root())
    tokenizer = Tokenizer.from_file(str(MODELS / "v4-dspark" / "tokenizer.json"))  # both models have the same
    return [p.token_ids for p in corpus.prompts(held, tokenizer, 100)]


def answers(
    demo: LoadedEngine,
    prompts: list[tuple[int, ...]],
    max_tokens: int,
    arrivals: Iterator[int] | None = None,
    **config: int,
) -> tuple[Ids, Scheduler]:
    """Greedy ids by prompt number. `arrivals` says how many requests join before each step; all at once without it."""
    scheduler = Scheduler(demo, RuntimeConfig(**config))
    waiting = list(enumerate(prompts))
    found: Ids = {}
    while waiting or scheduler.has_work:
        for _ in range(len(waiting) if arrivals is None else min(next(arrivals), len(waiting))):
            number, prompt = waiting.pop(0)
            scheduler.submit(Request(str(number), prompt, SamplingParams(max_tokens=max_tokens, seed=0)))
        for progress in scheduler.step():
            found.setdefault(progress.request_id, []).extend(progress.token_ids)
    return found, scheduler


def mixed() -> Iterator[int]:
    """Requests that join before each step: none, some, many."""
    step = 0
    while True:
        yield (0, 1, 0, 0, 3, 0, 2)[step % 7] if step else 1
        step += 1


def test_greedy_ids_of_a_few_prompts_are_the_same_with_and_without_speculation(
    demo: LoadedEngine, prompts: list[tuple[int, ...]]
) -> None:
    few = prompts[:6]
    plain, _ = answers(demo, few, 40, max_batch_size=1, draft_length=0)
    for batch in (1, 3, 8):
        fast, scheduler = answers(demo, few, 40, max_batch_size=batch)
        assert fast == plain
        assert scheduler.counters.acceptance.mean_accepted_length > 1.3


@pytest.mark.slow
def test_greedy_ids_of_a_hundred_prompts_are_the_same_in_every_batch_and_order_of_arrival(
    demo: LoadedEngine, prompts: list[tuple[int, ...]]
) -> None:
    plain, _ = answers(demo, prompts, 128, max_batch_size=1, draft_length=0)
    assert len(plain) == 100
    for config in (
        {"max_batch_size": 1},
        {"max_batch_size": 3},
        {"max_batch_size": 8},
        {"max_batch_size": 8, "lag": 1},
    ):
        fast, _ = answers(demo, prompts, 128, **config)
        assert fast == plain, config
    fast, _ = answers(demo, prompts, 128, arrivals=mixed(), max_batch_size=8)
    assert fast == plain


@pytest.mark.slow
def test_the_demo_draft_brings_the_tokens_an_iteration_it_was_trained_for(
    demo: LoadedEngine, prompts: list[tuple[int, ...]], request: pytest.FixtureRequest
) -> None:
    _, scheduler = answers(demo, prompts, 128, max_batch_size=8)
    total = scheduler.counters.acceptance
    assert total.mean_accepted_length >= WORTH[request.node.callspec.params["demo"]]
    shares = [accepted / total.iterations for accepted in total.accepted_at]
    assert shares == sorted(shares, reverse=True)
