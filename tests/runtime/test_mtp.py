"""Drafting with an MTP layer as it is served: which hidden meets which token, and what the chain then says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from twostroke.engines.base import BoundStep, Buffer, Engine
from twostroke.engines.loading import LoadedEngine
from twostroke.engines.manifest import Binding
from twostroke.runtime.inspection import startup_line
from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.scheduler import Scheduler
from twostroke.runtime.speculation import DraftBlock
from twostroke.runtime.state import State
from twostroke.tests.builder.flat_runs import Toy, assert_close
from twostroke.tests.runtime.guarded import guarded
from twostroke.tests.runtime.serving import (
    Answer,
    Oracle,
    WatchedDraft,
    assert_same_rows,
    forced_scheduler,
    greedy,
    serve,
)
from twostroke.tests.served import DRAFTED

STREAM = np.random.default_rng(7).integers(2, 319, size=64).tolist()
Arrays = Mapping[str, np.ndarray]


@pytest.fixture(scope="module", params=[served for served in DRAFTED if served.method == "mtp"], ids=str)
def oracle(request: pytest.FixtureRequest) -> Oracle:
    return Oracle(guarded(request.getfixturevalue(request.param.engine)))


@pytest.fixture(scope="module")
def toy(oracle: Oracle) -> Toy:
    """The checkpoint of the same engine."""
    return Toy(oracle.loaded.folder.parent / "checkpoint")


class Watched:
    """An engine; `seen` gets the arrays of every call before it runs."""

    def __init__(self, engine: Engine, seen: Callable[[Arrays], None]) -> None:
        self.step, self.in_place = engine.step, engine.in_place
        self.engine, self.seen = engine, seen

    @property
    def bindings(self) -> Mapping[str, Binding]:
        return self.engine.bindings

    def bind(self, buffers: Mapping[str, Buffer]) -> WatchedStep:
        return WatchedStep(self.engine.bind(buffers), {name: b.owner for name, b in buffers.items()}, self.seen)


@dataclasses.dataclass
class WatchedStep:
    step: BoundStep
    arrays: Arrays
    seen: Callable[[Arrays], None]

    def enqueue(self, stream: int = 0) -> None:
        self.seen(self.arrays)
        self.step.enqueue(stream)


def watched(loaded: LoadedEngine, **seen: Callable[[Arrays], None]) -> LoadedEngine:
    engines = {name: Watched(e, seen[name]) if name in seen else e for name, e in loaded.engines.items()}
    return dataclasses.replace(loaded, engines=engines)


@pytest.mark.parametrize("budget", [64, 4, 1])
def test_hidden_i_meets_token_i_plus_one_in_prefill_and_in_decode(oracle: Oracle, toy: Toy, budget: int) -> None:
    """A-05: (h0, t1), (h1, t2), .., (h5, t6), then on through the answer; never (h0, t0)."""
    prompt = STREAM[:6]
    sequence = prompt + oracle.answer(prompt, greedy(12))
    taps = toy.oracle(sequence)[1]
    pairs: list[tuple[int, int]] = []

    def note(given: Arrays) -> None:
        for row in np.flatnonzero(given["slots"]):
            position = int(given["positions"][row])
            assert_close(given["taps"][row], taps[position], 5e-5)
            pairs.append((position, int(given["next_ids"][row])))

    config = RuntimeConfig(max_batch_size=1, max_num_tokens=budget, draft_length=3)
    scheduler = forced_scheduler(watched(oracle.loaded, observe=note), config, {"a": sequence}, lambda turn: turn % 4)
    serve(scheduler, [Request("a", prompt, greedy(12))])
    assert pairs[:6] == [(i, sequence[i + 1]) for i in range(6)]
    assert pairs == [(i, sequence[i + 1]) for i in range(len(sequence) - 1)]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_chain_of_g_tokens_is_one_pick_and_g_minus_one_rows_behind_the_committed_ones(
    oracle: Oracle, depth: int
) -> None:
    calls: list[Any] = []
    loaded = watched(
        oracle.loaded,
        pick=lambda given: calls.append("pick"),
        next=lambda given: calls.append((int(given["positions"][0]), int(given["token_ids"][0]))),
        observe=lambda given: calls.append("observe"),
    )
    scheduler = Scheduler(loaded, RuntimeConfig(max_batch_size=1, draft_length=depth))
    scheduler.submit(Request("a", STREAM[:9], greedy(40)))
    scheduler.step()
    slot = scheduler.slot_of("a")
    assert slot is not None
    scheduler.step()
    chain = calls[calls.index("pick") : calls.index("observe", calls.index("pick"))]
    assert chain[::2] == ["pick"] * depth
    assert [position for position, _ in chain[1::2]] == list(range(9, 9 + depth - 1))


@pytest.mark.parametrize("budget", [64, 7])
def test_served_draft_logits_equal_the_reference_after_any_mix_of_accepts(
    oracle: Oracle, toy: Toy, budget: int
) -> None:
    """Depths 1 to 3 behind whole and chunked prompts, and after 0, 1, 2 and 3 accepted drafts, in a mixed batch."""
    prompts = {"a": STREAM[:5], "b": STREAM[3:24], "c": STREAM[30:31]}
    sequences = {name: prompt + oracle.answer(prompt, greedy(20)) for name, prompt in prompts.items()}
    taps = {name: toy.oracle(sequence)[1] for name, sequence in sequences.items()}
    compared = 0

    class Compared(WatchedDraft):
        def proposed(self, block: DraftBlock) -> None:
            nonlocal compared
            for row, (slot, position) in enumerate(zip(block.slot.tolist(), block.position.tolist(), strict=True)):
                if slot:
                    name = next(name for name in sequences if scheduler.slot_of(name) == slot)
                    tokens = sequences[name][: position + 1]
                    expected = toy.chain(taps[name], tokens)
                    assert block.anchor[row] == tokens[-1]
                    assert block.tokens[row].tolist() == expected["tokens"].tolist()
                    for k in range(3):
                        assert_close(block.logits[row, k], expected["logits"][k], 2e-5, f"{name} at {position}, {k}")
                    wrong = compared % 4
                    following = [*sequences[name][position + 1 :], 0, 0, 0][:3]
                    block.tokens[row] = [(token + (k >= wrong)) % 320 for k, token in enumerate(following)]
                    compared += 1

    def make(engines: Mapping[str, Engine], state: State, draft_length: int) -> Compared:
        return Compared(oracle.loaded, state, draft_length)

    config = RuntimeConfig(max_batch_size=3, max_num_tokens=budget, draft_length=3)
    scheduler = Scheduler(oracle.loaded, config, draft=make, poison=True)
    answers = serve(scheduler, [Request(name, prompt, greedy(20)) for name, prompt in prompts.items()])
    assert {name: prompts[name] + answer.tokens for name, answer in answers.items()} == sequences
    assert compared > 20


@pytest.mark.parametrize("max_seq_len", [None, 64])
def test_a_chain_that_runs_over_the_length_limit_changes_no_answer(oracle: Oracle, max_seq_len: int | None) -> None:
    """Nor any memory: drafted rows may stand behind the last position a request has a page for; beside a longer
    request, in columns of the page table that are scratch to it; with a limit of one page for all, beyond the table."""
    limits = {"a": 64, "b": 60, "c": max_seq_len or 90}
    prompts = {"a": STREAM[:50], "b": STREAM[5:60], "c": STREAM[:58]}
    requests = [Request(name, prompt, greedy(limits[name] - len(prompt))) for name, prompt in prompts.items()]
    config = RuntimeConfig(max_batch_size=3, draft_length=5, max_seq_len=max_seq_len)
    sequences = {r.id: [*r.prompt_ids, *oracle.answer(r.prompt_ids, r.params)] for r in requests}
    scheduler = forced_scheduler(oracle.loaded, config, sequences, lambda turn: 0)
    compared = set()

    def check(scheduler: Scheduler, answers: dict[str, Answer]) -> None:
        for name, sequence in sequences.items():
            slot = scheduler.slot_of(name)
            if slot is not None and answers[name].tokens:
                position = int(scheduler.slots.position[slot])
                found = scheduler.state.live_rows(slot, position, scheduler.page_table.full)
                assert_same_rows(found, oracle.states(sequence)[position])
                if position == limits[name] - 2:  # the last block went to position limit + 1
                    compared.add(name)

    answers = serve(scheduler, requests, after_step=check)
    assert compared == set(sequences)
    assert {r.id: [*r.prompt_ids, *answers[r.id].tokens] for r in requests} == sequences
    assert {name: len(sequence) for name, sequence in sequences.items()} == limits


STATE = {
    "preview_engine": {"mtp.0.window": ("ring", 12), "mtp.0.hidden": ("ring", 1)},
    "t32_mtp_engine": {"mtp.0.latent": ("paged", 64), "mtp.0.index": ("paged", 64), "mtp.0.hidden": ("ring", 1)},
}


@pytest.mark.parametrize(("engine", "width"), [("preview_engine", 2 * 64), ("t32_mtp_engine", 64)])
def test_the_manifest_and_the_start_up_line_name_method_and_depth(
    request: pytest.FixtureRequest, engine: str, width: int
) -> None:
    manifest = request.getfixturevalue(engine).manifest
    assert manifest.speculative.method == "mtp"
    assert manifest.speculative.draft_len == manifest.build_config.max_draft_len == 5
    assert manifest.speculative.taps_width == width
    assert {t.name: (t.addressing, t.rows) for t in manifest.state if t.name.startswith("mtp.")} == STATE[engine]
    limits = RuntimeConfig(draft_length=3).limits(manifest)
    assert "draft mtp, depth 3 of 5; onnxruntime" in startup_line(manifest, limits)
