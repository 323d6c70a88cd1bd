"""Sampling through a compiled engine over eight tokens, with its real draft: the target's distribution comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from twostroke.engines.loading import LoadedEngine, load_engine_directory
from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.sampling_params import SamplingParams
from twostroke.runtime.scheduler import Scheduler
from twostroke.tests.served import DRAFTED

PROMPT = (3, 5, 2, 7, 1)
ROUNDS = 4000
LENGTH = 3


@pytest.fixture(scope="module", params=DRAFTED, ids=str)
def tiny8(request: pytest.FixtureRequest) -> LoadedEngine:
    return load_engine_directory(request.param.directory(request.param.eight_tokens, tokenizer=False))


def answers(
    loaded: LoadedEngine,
    params: Sequence[SamplingParams],
    prompts: Sequence[tuple[int, ...]] | None = None,
    **config: int,
) -> list[tuple[int, ...]]:
    """Ids of one request a parameter set, batched as the scheduler likes."""
    scheduler = Scheduler(loaded, RuntimeConfig(max_batch_size=8, **config))
    for index, each in enumerate(params):
        scheduler.submit(Request(str(index), PROMPT if prompts is None else prompts[index], each))
    found: dict[str, list[int]] = {}
    while scheduler.has_work:
        for progress in scheduler.step():
            found.setdefault(progress.request_id, []).extend(progress.token_ids)
    return [tuple(found[str(index)]) for index in range(len(params))]


def target_distribution(loaded: LoadedEngine, temperature: float) -> np.ndarray:
    """Exact probability of every answer of LENGTH tokens, [8] * LENGTH, from plain decoding's own logits."""

    def next_token(prefix: tuple[int, ...]) -> np.ndarray:
        scheduler = Scheduler(loaded, RuntimeConfig(max_batch_size=1, draft_length=0))
        params = SamplingParams(max_tokens=1, seed=0, ignore_eos=True, return_generation_logits=True)
        scheduler.submit(Request("0", prefix, params))
        logits = scheduler.step()[0].logits[0].astype(np.float64) / temperature
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    joint = np.zeros((8,) * LENGTH)
    first = next_token(PROMPT)
    for a in range(8):
        second = next_token((*PROMPT, a))
        for b in range(8):
            joint[a, b] = first[a] * second[b] * next_token((*PROMPT, a, b))
    return joint


@pytest.mark.parametrize("coupling", ["rejection", "gumbel"])
def test_sampled_answers_follow_the_target_whatever_the_draft_proposed(tiny8: LoadedEngine, coupling: str) -> None:
    temperature = 1.5
    expected = target_distribution(tiny8, temperature).ravel() * ROUNDS
    params = [
        SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=seed, coupling=coupling, ignore_eos=True)
        for seed in range(ROUNDS)
    ]
    # Of two drafts behind the first token one is verified: the last token is the target's own.
    seen = Counter(answers(tiny8, params, draft_length=2))
    observed = np.array([seen[answer] for answer in np.ndindex((8,) * LENGTH)], dtype=float)
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    assert len(expected) > 50
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_a_wrong_distribution_would_be_noticed(tiny8: LoadedEngine) -> None:
    expected = target_distribution(tiny8, 1.5).ravel() * ROUNDS
    params = [SamplingParams(max_tokens=LENGTH, temperature=1.3, seed=s, ignore_eos=True) for s in range(ROUNDS)]
    seen = Counter(answers(tiny8, params))
    observed = np.array([seen[answer] for answer in np.ndindex((8,) * LENGTH)], dtype=float)
    keep = expected >= 5
    observed, expected = (
        np.append(observed[keep], observed[~keep].sum()),
        np.append(expected[keep], expected[~keep].sum()),
    )
    assert stats.chisquare(observed, expected).pvalue < 1e-6


def test_some_drafts_are_kept_and_some_are_not(tiny8: LoadedEngine) -> None:
    scheduler = Scheduler(tiny8, RuntimeConfig(max_batch_size=8))
    for seed in range(64):
        params = SamplingParams(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)
        scheduler.submit(Request(str(seed), PROMPT, params))
    while scheduler.has_work:
        scheduler.step()
    total = scheduler.counters.acceptance
    assert 0.02 < total.acceptance_rate < 0.98


def test_gumbel_answers_are_the_same_ids_with_and_without_speculation_in_any_batch_mix(tiny8: LoadedEngine) -> None:
    rng = np.random.default_rng(3)
    prompts = [tuple(int(t) for t in rng.integers(0, 8, rng.integers(1, 30))) for _ in range(24)]
    params = [
        SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=seed, coupling="gumbel", ignore_eos=True)
        for seed in range(24)
    ]
    plain = answers(tiny8, params, prompts, draft_length=0)
    assert len(set(plain)) > 20
    for options in ({}, {"draft_length": 3}, {"max_num_tokens": 7}, {"lag": 1}):
        assert answers(tiny8, params, prompts, **options) == plain
    alone = [answers(tiny8, [each], [prompt])[0] for each, prompt in zip(params[:6], prompts[:6], strict=True)]
    assert alone == plain[:6]
    backwards = answers(tiny8, params[::-1], prompts[::-1])[::-1]
    assert backwards == plain


def test_a_seed_decides_a_sampled_answer_whatever_ran_before_and_beside_it(tiny8: LoadedEngine) -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=30, temperature=1.0, seed=seed, ignore_eos=True)

    one, again, other = answers(tiny8, [params(1), params(1), params(2)])
    assert one == again
    assert one != other
    greedy = SamplingParams(max_tokens=30, seed=0, ignore_eos=True)
    mixed = answers(tiny8, [greedy, params(9), params(1), greedy, params(1)])
    assert mixed[2] == mixed[4] == one
    assert mixed[0] == mixed[3] == answers(tiny8, [greedy])[0]
