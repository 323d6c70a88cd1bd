"""Each documented misalignment of the MTP layer is another network: the compiled draft is the right one and none of
these. On the random toy, and on the trained demo model where it is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import twostroke
from twostroke.builder.build import BuildOptions, build
from twostroke.engines.loading import LoadedEngine, load_engine_directory
from twostroke.perf.misalignment import answered, iterations, prompts, read
from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.sampling_params import SamplingParams
from twostroke.runtime.scheduler import Scheduler
from twostroke.tests.builder.deepseek_v32_reference import MISTAKES, RIGHT, UNIFORM_SHIFT, Alignment, Drafter, Network
from twostroke.tests.builder.flat_runs import Array, Chunk, Memory, forward
from twostroke.tests.builder.mtp_runs import compiled
from twostroke.tests.engines import CACHE, code_hash, locked

DEPTH, CHANGE = 3, 1e-3
DEMO = Path(twostroke.__file__).parent / "runtime" / "demo" / "v32-mtp"
# What a chain is made of later than its first row cannot move the first draft.
LATER = ("drafted rows one position on", "recycled before shared_head.norm")


@dataclass(frozen=True)
class Model:
    """An engine, the reference network of its checkpoint, and prompts."""

    engine: LoadedEngine
    network: Network
    prompts: Sequence[Sequence[int]]


def demo_engine(checkpoint: Path) -> LoadedEngine:
    """The engine of a demo model, built once per state of the code."""
    place = CACHE / f"{checkpoint.name}-{code_hash()}"
    with locked(place):
        if not (place / "engine" / "config.json").exists():
            build(checkpoint, place / "engine", BuildOptions(force=True))
    return load_engine_directory(place / "engine")


@pytest.fixture(scope="module", params=["toy", DEMO.name])
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == "toy":
        engine = request.getfixturevalue("t32_mtp_engine")
        network = read(engine.folder.parent / "checkpoint")
        rng = np.random.default_rng(11)
        return Model(engine, network, [rng.integers(2, 319, size=size).tolist() for size in (9, 40, 62)])
    network = read(DEMO)
    return Model(demo_engine(DEMO), network, prompts(DEMO, network, 3))


def drafted(model: Model, tokens: Sequence[int]) -> tuple[list[int], Array]:
    """Tokens and logits of the compiled chain behind `tokens`, the last of which is the anchor; target and draft-extend
    take all the others in one step each."""
    draft, rows, engines = compiled(model.engine), len(tokens) - 1, model.engine.engines
    pages = -(-(rows + DEPTH) // model.engine.manifest.build_config.tokens_per_page)
    target = Memory([t for t in model.engine.manifest.state if not t.name.startswith("mtp.")], pages_per_slot=pages)
    taps = forward(engines["target"], target, [Chunk(1, 0, tokens[:rows])])[0]["taps"]
    memory = Memory(draft.state, pages_per_slot=pages)
    draft.observe(memory, taps, tokens, [Chunk(1, 0, tokens[:rows])])
    found = draft.propose(memory, [(1, rows)], DEPTH)
    return found["tokens"][0].tolist(), found["logits"][0]


def referred(model: Model, tokens: Sequence[int], alignment: Alignment, forced: Sequence[int]) -> Array:
    """The reference's logits of that chain under an alignment, its tokens forced."""
    rows = len(tokens) - 1
    drafter = Drafter(model.network, alignment)
    drafter.observe(alignment.hidden(model.network.target(tokens[:rows])), tokens, 0, rows)
    return drafter.chain(DEPTH, forced)[1]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_documented_misalignment_changes_the_draft_logits(model: Model, mistake: str) -> None:
    """By more than 1e-3 at every depth it can reach, where the right reference is a tenth of that away or less."""
    for tokens in model.prompts:
        picked, logits = drafted(model, tokens)
        right = referred(model, tokens, RIGHT, picked)
        assert right.argmax(axis=1).tolist() == picked
        assert np.abs(logits - right).max() < CHANGE / 10
        changed = np.abs(logits - referred(model, tokens, MISTAKES[mistake], picked)).max(axis=1)
        first = 1 if mistake in LATER else 0
        assert (changed[:first] < CHANGE / 10).all()
        assert (changed[first:] > CHANGE).all(), changed


def test_one_position_more_for_every_row_changes_nothing(model: Model) -> None:
    """Rope and the indexer know differences only: a mistake of position is one where rows disagree about it."""
    for tokens in model.prompts:
        picked, _ = drafted(model, tokens)
        shifted = referred(model, tokens, UNIFORM_SHIFT, picked)
        np.testing.assert_allclose(shifted, referred(model, tokens, RIGHT, picked), rtol=0, atol=1e-9)


def test_the_engine_accepts_what_the_aligned_reference_accepts(model: Model) -> None:
    """Iteration for iteration along the same greedy answer; the last ones, which a limit may cut, left out."""
    count = 24
    for prompt in model.prompts:
        text = answered(model.network, prompt, count, DEPTH)
        scheduler = Scheduler(model.engine, RuntimeConfig(max_batch_size=1, draft_length=DEPTH))
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        scheduler.submit(Request("a", prompt, params))
        pieces = []
        while scheduler.has_work:
            pieces += [progress.token_ids for progress in scheduler.step()]
        answer = text.tokens[len(prompt) :]
        told = [token for piece in pieces for token in piece]
        assert told[: len(answer)] == answer[:count]
        expected = [accepted + 1 for _, accepted in iterations(model.network, text, DEPTH, RIGHT)]
        whole = [len(piece) for piece in pieces if piece][1 : len(expected) - DEPTH]
        assert whole == expected[: len(whole)]
        assert len(whole) > 2
