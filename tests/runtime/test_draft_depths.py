"""Every depth of a draft gives the tokens of plain decoding: any number of verified rows, a forced block too."""

from __future__ import annotations

import numpy as np
import pytest

from twostroke.engines.loading import LoadedEngine, load_engine_directory
from twostroke.engines.manifest import Speculative
from twostroke.runtime.inspection import inspect_engine, render, startup_line
from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.scheduler import Scheduler
from twostroke.tests.engines import engine_directory
from twostroke.tests.runtime.guarded import guarded
from twostroke.tests.runtime.serving import Oracle, forced_scheduler, greedy, serve

PROMPTS = {str(n): np.random.default_rng(n).integers(2, 318, size).tolist() for n, size in enumerate((5, 17, 40))}


def requests(new: int) -> list[Request]:
    return [Request(name, prompt, greedy(new)) for name, prompt in PROMPTS.items()]


@pytest.mark.parametrize("depth", range(1, 6))
def test_a_v32_target_verifies_any_number_of_rows_and_says_by_which_implementation(
    t32_mtp_engine: LoadedEngine, depth: int
) -> None:
    """Two to six rows a request; drafts go wrong at every offset in turn, and once more as the MTP layer has them."""
    oracle = Oracle(guarded(t32_mtp_engine))
    answers = {name: oracle.answer(prompt, greedy(40)) for name, prompt in PROMPTS.items()}
    sequences = {name: [*prompt, *answers[name]] for name, prompt in PROMPTS.items()}
    config = RuntimeConfig(max_batch_size=3, draft_length=depth)
    forced = forced_scheduler(oracle.loaded, config, sequences, lambda turn: turn % (depth + 1))
    for scheduler in (forced, Scheduler(oracle.loaded, config, poison=True)):
        served = serve(scheduler, requests(40))
        assert {name: answer.tokens for name, answer in served.items()} == answers
        assert "onnxruntime, attention portable" in startup_line(t32_mtp_engine.manifest, scheduler.limits)
    acceptance = forced.counters.acceptance
    pairs = list(zip(acceptance.accepted_at, acceptance.drafted_at, strict=True))
    assert len(pairs) == depth
    assert all(0 < accepted < drafted for accepted, drafted in pairs)


@pytest.fixture(scope="module")
def forced() -> LoadedEngine:
    """Two layers and one draft stage with blocks of seven tokens, although the draft was trained for five."""
    small = {
        "num_hidden_layers": 2,
        "compress_ratios": [0, 4, 0],
        "dspark_target_layer_ids": [1],
        "hc_sinkhorn_iters": 1,
    }
    return load_engine_directory(engine_directory(max_draft_len=7, force_draft_len=True, **small))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [7, 6, 3])
def test_a_forced_block_gives_the_targets_own_answer(forced: LoadedEngine, depth: int) -> None:
    oracle = Oracle(guarded(forced))
    answers = {name: oracle.answer(prompt, greedy(60)) for name, prompt in PROMPTS.items()}
    config = RuntimeConfig(max_batch_size=2, draft_length=depth)
    served = serve(Scheduler(oracle.loaded, config, poison=True), requests(60))
    assert {name: answer.tokens for name, answer in served.items()} == answers
    sequences = {name: [*prompt, *answers[name]] for name, prompt in PROMPTS.items()}
    scheduler = forced_scheduler(oracle.loaded, config, sequences, lambda turn: turn % (depth + 1))
    assert {name: answer.tokens for name, answer in serve(scheduler, requests(60)).items()} == answers


@pytest.mark.slow
def test_a_forced_engine_says_what_it_was_trained_for(forced: LoadedEngine) -> None:
    assert forced.engines["propose"].bindings["tokens"].shape == ("R", 7)
    assert forced.manifest.speculative == Speculative("dspark", 7, 64, trained_len=5)
    assert "7 tokens drafted an iteration, a forced block: trained for 5" in render(inspect_engine(forced.folder))
