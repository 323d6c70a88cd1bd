"""The propose step with every markov head and confidence form, against a block of the oracle and a loop in numpy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from twostroke.builder.demo import whole_sequence
from twostroke.engines.base import Engine
from twostroke.engines.loading import load_engine_directory
from twostroke.tests.builder.flat_runs import Array, Chunk, Memory, Toy, assert_close, observe, propose
from twostroke.tests.draft_heads import HEADS
from twostroke.tests.engines import engine_directory
from twostroke.tests.markov_loop import confidences, greedy_block

SMALL = 1e-5


class Draft:
    """A toy checkpoint, and observe and propose of one engine made from it."""

    def __init__(self, heads: str, compiled: bool) -> None:
        folder = engine_directory(HEADS[heads])
        self.toy = Toy(folder.parent / "checkpoint")
        eager = self.toy.draft()
        self.state = eager[1].spec.state
        self.observing: Engine = eager[0]
        self.proposing: Engine = eager[1]
        if compiled:
            engines = load_engine_directory(folder).engines
            self.observing, self.proposing = engines["observe"], engines["propose"]

    @property
    def head(self) -> Mapping[str, Array]:
        prefix = "mtp.1.markov_head."
        return {n.removeprefix(prefix): w.numpy() for n, w in self.toy.weights.items() if n.startswith(prefix)}

    def seen(self, taps: Array, slot: int = 1) -> Memory:
        memory = Memory(self.state)
        observe(self.observing, memory, [taps], [Chunk(slot, 0, [0] * len(taps))])
        return memory

    @torch.no_grad()
    def block(self, taps: Array, position: int, anchor: int) -> tuple[Array, Array]:
        """Base logits [G, V] and hidden rows [G, D] before the final norm, from the oracle."""
        block = whole_sequence.draft(
            self.toy.raw,
            self.toy.weights,
            torch.from_numpy(taps)[None],
            torch.tensor([[anchor]]),
            torch.tensor([[position]]),
        )
        return block.logits[0, 0].numpy(), block.hidden[0, 0].numpy()


@pytest.fixture(scope="module", params=HEADS)
def heads(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=["eager", "onnxruntime"])
def draft(request: pytest.FixtureRequest, heads: str) -> Draft:
    return Draft(heads, compiled=request.param == "onnxruntime")


@pytest.fixture(scope="module")
def taps(draft: Draft, stream: list[int]) -> Array:
    return draft.toy.oracle(stream)[1]


@pytest.mark.parametrize("position", [1, 8, 9, 30, 60])
def test_picks_and_confidence_are_those_of_the_written_formulas(
    draft: Draft, taps: Array, stream: list[int], position: int
) -> None:
    """Both heads read the hidden row before the final norm; V4's confidence has no bias."""
    base, hidden = draft.block(taps, position, stream[position])
    tokens, logits = greedy_block(draft.head, base, hidden, stream[position])
    found = propose(draft.proposing, draft.seen(taps[:position]), [(1, position, stream[position])])
    assert found["tokens"][0].tolist() == tokens
    assert_close(found["logits"][0], logits, SMALL)
    config = draft.toy.config.dspark
    assert ("confidence" in found) == config.enable_confidence_head
    if config.enable_confidence_head:
        proj = draft.toy.weights["mtp.1.confidence_head.proj.weight"]
        w1 = draft.head["markov_w1.weight"] if config.confidence_head_with_markov else None
        expected = confidences(proj, hidden, w1, stream[position], tokens)
        np.testing.assert_allclose(found["confidence"][0], expected, atol=SMALL)


def test_the_head_type_matters_to_the_logits(draft: Draft, taps: Array, stream: list[int]) -> None:
    """The same matrices read as a vanilla head would give visibly other logits: the tests above could not pass by luck.
    So would the hidden row after the norm."""
    base, hidden = draft.block(taps, 30, stream[30])
    _, logits = greedy_block(draft.head, base, hidden, stream[30])
    vanilla = {name: value for name, value in draft.head.items() if name.startswith("markov_w")}
    norm = draft.toy.weights["mtp.1.norm.weight"].numpy()
    normed = hidden / np.sqrt((hidden**2).mean(1, keepdims=True) + 1e-6) * norm
    for _, other in (
        greedy_block(vanilla, base, hidden, stream[30]),
        greedy_block(draft.head, base, normed, stream[30]),
    ):
        differs = np.abs(other[0] - logits[0]).max() > 1e-2 * logits.std()
        assert differs == (draft.toy.config.dspark.markov_head_type != "vanilla")


def test_requests_of_a_batch_draft_as_they_would_alone(draft: Draft, taps: Array, stream: list[int]) -> None:
    """To the bit under ONNX Runtime, which rounds a row alike whatever stands beside it; torch's matmul does not."""
    memory = Memory(draft.state)
    lengths = {1: 20, 2: 3, 3: 9}
    observe(
        draft.observing,
        memory,
        [taps[:n] for n in lengths.values()],
        [Chunk(s, 0, [0] * n) for s, n in lengths.items()],
    )
    requests = [(1, 20, stream[20]), (2, 3, stream[3]), (0, 0, 0), (3, 9, stream[9])]
    together = propose(draft.proposing, memory, requests)
    for row, (slot, position, anchor) in enumerate(requests):
        if slot:
            alone = propose(draft.proposing, draft.seen(taps[:position], slot=slot), [(slot, position, anchor)])
            for name, values in alone.items():
                if draft.proposing.step.engine == "onnxruntime":
                    np.testing.assert_array_equal(together[name][row], values[0], err_msg=name)
                else:
                    np.testing.assert_allclose(together[name][row], values[0], rtol=1e-5, atol=5e-5, err_msg=name)
