"""DSpark's observe and propose against the whole-sequence oracle, and what a draft may depend on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from twostroke.builder.demo import whole_sequence
from twostroke.builder.eager import EagerEngine
from twostroke.builder.networks.dspark import with_forced_block
from twostroke.engines.base import Engine
from twostroke.engines.errors import BuildError
from twostroke.engines.loading import LoadedEngine
from twostroke.engines.manifest import StateTensor
from twostroke.tests.builder.flat_runs import (
    Array,
    Chunk,
    Memory,
    Rows,
    Toy,
    assert_close,
    assert_same_live,
    observe,
    propose,
)

TOLERANCE = 1e-5
GAMMA, WINDOW = 5, 8


def assert_same_block(found: Rows, expected: Rows, tolerance: float) -> None:
    """Equal tokens, and equal logits and confidence to the bit unless a tolerance is given."""
    np.testing.assert_array_equal(found["tokens"], expected["tokens"])
    for name in ("logits", "confidence"):
        if tolerance == 0.0:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
        else:
            np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=5 * tolerance, err_msg=name)


class Draft:
    """Observe and propose of one engine over their context rings."""

    def __init__(self, observing: Engine, proposing: Engine, state: tuple[StateTensor, ...]) -> None:
        self.observing, self.proposing, self.state = observing, proposing, state
        # ONNX Runtime computes a row to the same bits whatever stands beside it (N >= 2); torch's matmul does not.
        self.tolerance = 0.0 if proposing.step.engine == "onnxruntime" else 1e-5

    def memory(self) -> Memory:
        return Memory(self.state)

    def seen(self, taps: Array, sizes: Sequence[int] | None = None, slot: int = 1) -> Memory:
        """Context of a request after observing `taps`, in chunks of the given sizes."""
        memory, at = self.memory(), 0
        for size in sizes or [len(taps)]:
            piece = taps[at : at + size]
            observe(self.observing, memory, [piece], [Chunk(slot, at, [0] * len(piece))])
            at += len(piece)
        assert at == len(taps)
        return memory


@pytest.fixture(scope="session", params=["eager", "onnxruntime"])
def draft(request: pytest.FixtureRequest, toy: Toy, f4_engine: LoadedEngine) -> Draft:
    observing, proposing = toy.draft()
    state = proposing.spec.state
    if request.param == "eager":
        return Draft(observing, proposing, state)
    return Draft(f4_engine.engines["observe"], f4_engine.engines["propose"], state)


@pytest.fixture(scope="session")
def taps(toy: Toy, stream: list[int]) -> Array:
    """The target's taps of the whole stream."""
    return toy.oracle(stream)[1]


@torch.no_grad()
def oracle_draft(toy: Toy, taps: Array, position: int, anchor: int) -> dict[str, Array]:
    """tokens, biased logits, confidence and hidden rows of one block, from the oracle."""
    anchors, at = torch.tensor([[anchor]]), torch.tensor([[position]])
    block = whole_sequence.draft(toy.raw, toy.weights, torch.from_numpy(taps)[None], anchors, at)
    tokens, confidence = whole_sequence.greedy_draft(toy.raw, toy.weights, block, anchors)
    previous = torch.cat([anchors[..., None], tokens[..., :-1]], dim=-1)
    logits = block.logits + whole_sequence.markov_bias(toy.raw, toy.weights, previous)
    return {
        "tokens": tokens[0, 0].numpy(),
        "logits": logits[0, 0].numpy(),
        "confidence": torch.sigmoid(confidence)[0, 0].numpy(),
        "hidden": block.hidden[0, 0].numpy(),
        "base": block.logits[0, 0].numpy(),
    }


@pytest.mark.parametrize("position", [1, 2, 7, 8, 9, 13, 14, 60])
def test_a_block_equals_the_oracle(draft: Draft, toy: Toy, taps: Array, stream: list[int], position: int) -> None:
    """Context shorter and longer than the window (8) and the ring (13). Rows from P on were never written."""
    memory = draft.seen(taps[:position])
    found = propose(draft.proposing, memory, [(1, position, stream[position])])
    expected = oracle_draft(toy, taps, position, stream[position])
    assert found["tokens"][0].tolist() == expected["tokens"].tolist()
    assert_close(found["logits"][0], expected["logits"], TOLERANCE)
    assert_close(found["confidence"][0], expected["confidence"], 1e-4)


def test_several_requests_draft_as_they_would_alone(draft: Draft, taps: Array, stream: list[int]) -> None:
    """Different lengths, one observe step of packed rows, one propose step; a scratch row between them."""
    lengths = {1: 20, 2: 3, 3: 9}
    together = draft.memory()
    observe(
        draft.observing,
        together,
        [taps[:n] for n in lengths.values()],
        [Chunk(slot, 0, [0] * n) for slot, n in lengths.items()],
        padding=2,
    )
    requests = [(1, 20, stream[20]), (2, 3, stream[3]), (0, 0, 0), (3, 9, stream[9])]
    found = propose(draft.proposing, together, requests)
    for row, (slot, position, anchor) in enumerate(requests):
        if slot:
            alone = propose(draft.proposing, draft.seen(taps[:position], slot=slot), [(slot, position, anchor)])
            own = {name: values[row : row + 1] for name, values in found.items()}
            assert_same_block(own, alone, draft.tolerance)


def test_the_markov_bias_of_the_anchor_shapes_the_first_pick(
    draft: Draft, toy: Toy, taps: Array, stream: list[int]
) -> None:
    found = propose(draft.proposing, draft.seen(taps[:30]), [(1, 30, stream[30])])["logits"][0, 0]
    base = oracle_draft(toy, taps, 30, stream[30])["base"][0]
    w1 = toy.weights["mtp.2.markov_head.markov_w1.weight"].numpy()
    w2 = toy.weights["mtp.2.markov_head.markov_w2.weight"].numpy()
    assert_close(found, base + w2 @ w1[stream[30]], TOLERANCE)
    assert np.abs(found - base).max() > 0.1 * base.std()


def test_confidence_reads_the_hidden_row_before_the_final_norm(
    draft: Draft, toy: Toy, taps: Array, stream: list[int]
) -> None:  # C-06
    found = propose(draft.proposing, draft.seen(taps[:30]), [(1, 30, stream[30])])
    hidden = oracle_draft(toy, taps, 30, stream[30])["hidden"]
    w1 = toy.weights["mtp.2.markov_head.markov_w1.weight"].numpy()
    proj = toy.weights["mtp.2.confidence_head.proj.weight"].numpy()[0]
    previous = [stream[30], *found["tokens"][0, :-1]]

    def by_hand(rows: Array) -> Array:
        logits = [float(proj @ np.concatenate([row, w1[t]])) for row, t in zip(rows, previous, strict=True)]
        return 1 / (1 + np.exp(-np.array(logits)))

    norm = toy.weights["mtp.2.norm.weight"].numpy()
    normed = hidden / np.sqrt((hidden**2).mean(1, keepdims=True) + 1e-6) * norm
    np.testing.assert_allclose(found["confidence"][0], by_hand(hidden), atol=1e-5)
    assert np.abs(by_hand(hidden) - by_hand(normed)).max() > 1e-2, "the two would look alike on these weights"


def test_every_block_row_sees_the_rows_behind_it(draft: Draft, toy: Toy, taps: Array, stream: list[int]) -> None:
    """Bidirectional: the first row's base logits move when a mask hides the later rows."""
    expected = oracle_draft(toy, taps, 12, stream[12])
    found = propose(draft.proposing, draft.seen(taps[:12]), [(1, 12, stream[12])])["logits"][0, 0]
    assert_close(found, expected["logits"][0], TOLERANCE)
    toy.raw.dspark_block_size = 1  # a block of the anchor alone
    try:
        alone = oracle_draft(toy, taps, 12, stream[12])["logits"][0]
    finally:
        toy.raw.dspark_block_size = GAMMA
    assert np.abs(found - alone).max() > 1e-2 * alone.std()


def test_a_forced_block_is_the_oracles_block_of_that_size_and_changes_every_row(
    toy: Toy, taps: Array, stream: list[int]
) -> None:
    """Seven rows instead of the five that were trained: none of them is what it was."""
    at = 60
    trained = oracle_draft(toy, taps, at, stream[at])
    config, trained_for = with_forced_block(toy.config, "dspark", 7)
    forced = Toy(toy.checkpoint.folder)
    forced.config, forced.raw.dspark_block_size = config, 7
    observing, proposing = forced.draft()
    found = propose(proposing, Draft(observing, proposing, proposing.spec.state).seen(taps[:at]), [(1, at, stream[at])])
    expected = oracle_draft(forced, taps, at, stream[at])
    assert trained_for == GAMMA
    assert found["tokens"][0].tolist() == expected["tokens"].tolist()
    assert_close(found["logits"][0], expected["logits"], TOLERANCE)
    changed = np.abs(expected["base"][:GAMMA] - trained["base"]).max(axis=1)
    assert (changed > 0.01).all(), changed


@pytest.mark.parametrize(
    ("method", "depth", "sentence"),
    [
        ("mtp", 7, "--force-draft-len is for dspark, which has a trained block; the draft method is mtp"),
        ("none", None, "the draft method is none"),
        ("dspark", None, "--force-draft-len needs --max-draft-len, which is missing; accepted: 1 to 64, trained: 5"),
        ("dspark", 65, "which is 65; accepted: 1 to 64"),
    ],
)
def test_what_cannot_be_forced_is_refused(toy: Toy, method: str, depth: int | None, sentence: str) -> None:
    with pytest.raises(BuildError) as caught:
        with_forced_block(toy.config, method, depth)
    assert sentence in str(caught.value)


def test_a_forced_block_of_the_trained_size_is_the_trained_one(toy: Toy) -> None:
    assert with_forced_block(toy.config, "dspark", GAMMA) == (toy.config, None)


def test_context_before_valid_from_is_not_seen(draft: Draft, toy: Toy, taps: Array, stream: list[int]) -> None:
    """A request resumed without draft context drafts from the rows it has, down to none; masked rows may hold NaN."""
    position, anchor = 20, stream[20]
    whole = draft.seen(taps[:position])
    for first in (0, 12, 13, 17, 20):
        found = propose(draft.proposing, whole, [(1, position, anchor)], valid_from=first)
        partial = draft.memory()
        if first < position:
            rows = taps[first:position]
            observe(draft.observing, partial, [rows], [Chunk(1, first, [0] * len(rows))])
        poisoned = propose(draft.proposing, partial, [(1, position, anchor)], valid_from=first)
        assert_same_block(found, poisoned, draft.tolerance)
        hidden_from = max(first, position - WINDOW)
        expected = oracle_from(toy, taps, position, anchor, hidden_from)
        assert_close(found["logits"][0], expected, TOLERANCE)


def oracle_from(toy: Toy, taps: Array, position: int, anchor: int, first: int) -> Array:
    """The oracle with context from `first` on only: the same block with a window that long."""
    window = toy.raw.sliding_window
    toy.raw.sliding_window = position - first
    try:
        return oracle_draft(toy, taps, position, anchor)["logits"]
    finally:
        toy.raw.sliding_window = window


def test_noise_and_temperature_steer_the_picks_but_not_the_logits(draft: Draft, taps: Array, stream: list[int]) -> None:
    memory, request = draft.seen(taps[:30]), (1, 30, stream[30])
    greedy = propose(draft.proposing, memory, [request])
    noise = np.zeros((1, GAMMA, 320), np.float32)
    noise[0, 0, 7] = 1e4
    forced = propose(draft.proposing, memory, [request], noise=noise)
    assert forced["tokens"][0, 0] == 7
    np.testing.assert_array_equal(forced["logits"][0, 0], greedy["logits"][0, 0])
    assert np.abs(forced["logits"][0, 1] - greedy["logits"][0, 1]).max() > 0, "the next bias follows the pick"
    cold = np.full(1, 1e3, np.float32)
    mild = np.random.default_rng(0).gumbel(size=noise.shape).astype(np.float32)
    sharpened = propose(draft.proposing, memory, [request], noise=mild, inverse_temperature=cold)
    np.testing.assert_array_equal(sharpened["tokens"], greedy["tokens"])
    hot = propose(draft.proposing, memory, [request], noise=mild, inverse_temperature=np.full(1, 1e-3, np.float32))
    assert hot["tokens"][0].tolist() == mild[0].argmax(-1).tolist()


@pytest.mark.parametrize("size", [21, 8, 7, 5, 2, 1])
def test_context_and_first_block_do_not_depend_on_chunking(
    draft: Draft, taps: Array, stream: list[int], size: int
) -> None:
    sizes = [size] * (21 // size) + ([21 % size] if 21 % size else [])
    whole, chunked = draft.seen(taps[:21]), draft.seen(taps[:21], sizes)
    assert_same_live(chunked.live(1, 21), whole.live(1, 21), draft.tolerance)
    found, expected = (propose(draft.proposing, memory, [(1, 21, stream[21])]) for memory in (chunked, whole))
    assert_same_block(found, expected, draft.tolerance)


def test_a_new_request_in_a_used_slot_sees_nothing_of_the_last(draft: Draft, taps: Array, stream: list[int]) -> None:
    """Nothing is cleared: a chunk that starts at position 0 starts over because only positions are read."""
    used = draft.seen(taps[40:100])
    observe(draft.observing, used, [taps[:6]], [Chunk(1, 0, [0] * 6)])
    found, expected = (propose(draft.proposing, memory, [(1, 6, stream[6])]) for memory in (used, draft.seen(taps[:6])))
    assert_same_block(found, expected, 0.0)


@pytest.mark.parametrize("accepted", range(GAMMA + 1))
def test_rejected_rows_leave_no_trace_in_the_context(
    draft: Draft, taps: Array, stream: list[int], accepted: int
) -> None:
    """A verify step's rows are observed with the rejected ones on slot 0; the context is that of committed tokens."""
    wrong = np.full((GAMMA - accepted, taps.shape[1]), 1e6, np.float32)
    for start in range(8, 24):
        memory = draft.seen(taps[:start])
        rows = np.concatenate([taps[start : start + accepted + 1], wrong])
        observe(draft.observing, memory, [rows], [Chunk(1, start, [0] * (GAMMA + 1), dead=len(wrong))])
        committed = start + accepted + 1
        one_by_one = draft.seen(taps[:committed], [1] * committed)
        assert_same_live(memory.live(1, committed), one_by_one.live(1, committed), draft.tolerance)


def test_both_engines_draft_the_same(toy: Toy, f4_engine: LoadedEngine, taps: Array, stream: list[int]) -> None:
    eager_observe, eager_propose = toy.draft()
    assert isinstance(eager_propose, EagerEngine)
    state = eager_propose.spec.state
    pairs = [(eager_observe, eager_propose), (f4_engine.engines["observe"], f4_engine.engines["propose"])]
    found = []
    for observing, proposing in pairs:
        memory = Draft(observing, proposing, state).seen(taps[:50], [19, 1, 30])
        found.append((propose(proposing, memory, [(1, 50, stream[50])]), memory.live(1, 50)))
    (eager, eager_live), (compiled, compiled_live) = found
    np.testing.assert_array_equal(eager["tokens"], compiled["tokens"])
    assert_close(compiled["logits"], eager["logits"], TOLERANCE)
    assert_same_live(compiled_live, eager_live, TOLERANCE)
