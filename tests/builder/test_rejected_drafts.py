"""Rejection needs no undo (A-01): after a verify step of which only the first rows count, a request's memory is that
of a run that saw the committed tokens only, one at a time.

Every start length and every number of accepted drafts is one request of a packed step, so a whole depth is two steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from twostroke.builder.eager import EagerEngine
from twostroke.engines.base import Engine
from twostroke.engines.manifest import StateTensor
from twostroke.tests.builder.flat_runs import (
    Array,
    Chunk,
    Memory,
    Toy,
    assert_close,
    assert_same_live,
    forward,
)

STARTS = range(8, 24)  # every phase of the ratio-4 and ratio-8 windows, past the sliding window of 8
State = tuple[StateTensor, ...]


class Committed:
    """What a request is when it only ever saw its committed tokens, one row a step."""

    def __init__(self, engine: Engine, state: State, stream: Sequence[int], length: int) -> None:
        memory, logits = Memory(state), []
        self.live: dict[int, dict[str, Array]] = {}
        for at in range(length):
            logits.append(forward(engine, memory, [Chunk(1, at, [stream[at]])])[0]["logits"])
            self.live[at + 1] = memory.live(1, at + 1)
        self.logits = np.concatenate(logits)


def verify_rounds(
    engine: Engine, state: State, committed: Committed, stream: Sequence[int], rows: int, tolerance: float
) -> None:
    """For every start and every j: a verify step of `rows` rows with j drafts right, then one that is all right."""
    cases = [(start, right) for start in STARTS for right in range(rows)]
    memory = Memory(state, slots=len(cases) + 1)
    forward(engine, memory, [Chunk(slot, 0, stream[:start]) for slot, (start, _) in enumerate(cases, 1)])

    def step(blocks: list[Chunk]) -> list[Array]:
        return [found["logits"] for found in forward(engine, memory, blocks)]

    def check(slot: int, logits: Array, start: int, kept: int) -> None:
        expected = committed.logits[start : start + kept]
        if tolerance == 0.0:
            np.testing.assert_array_equal(logits[:kept], expected)
        else:
            assert_close(logits[:kept], expected, tolerance)
        assert_same_live(memory.live(slot, start + kept), committed.live[start + kept], tolerance)

    wrong = [(token + 1) % 320 for token in stream]
    first = [
        Chunk(slot, start, [*stream[start : start + right + 1], *wrong[start + right + 1 : start + rows]])
        for slot, (start, right) in enumerate(cases, 1)
    ]
    for slot, logits in enumerate(step(first), 1):
        start, right = cases[slot - 1]
        check(slot, logits, start, right + 1)
    second = [
        Chunk(slot, start + right + 1, stream[start + right + 1 : start + right + 1 + rows])
        for slot, (start, right) in enumerate(cases, 1)
    ]
    for slot, logits in enumerate(step(second), 1):
        start, right = cases[slot - 1]
        check(slot, logits, start + right + 1, rows)


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 5])
def test_compiled_state_after_rejection_is_that_of_committed_tokens(
    compiled_target: Engine, target_state: State, stream: list[int], gamma: int
) -> None:
    """To the bit under ONNX Runtime; the rings have room for depth 5 and serve every smaller one."""
    committed = Committed(compiled_target, target_state, stream, 23 + 12)
    verify_rounds(compiled_target, target_state, committed, stream, gamma + 1, tolerance=0.0)


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 5, 7])
def test_rings_sized_for_the_depth_are_enough(toy: Toy, stream: list[int], gamma: int) -> None:
    """Eager torch, each depth with rings of exactly its own size, to 1e-5 of each tensor's spread: torch's matmul
    rounds a row differently beside others."""
    target = toy.target(draft_len=gamma)
    committed = Committed(target, target.spec.state, stream, 23 + 2 * (gamma + 1))
    verify_rounds(target, target.spec.state, committed, stream, gamma + 1, tolerance=1e-5)


def test_a_verify_wider_than_the_rings_would_be_noticed(toy: Toy, stream: list[int]) -> None:
    """The check has teeth: rings for depth 4 under six rows lose rows that are still needed."""
    target = toy.target(draft_len=4)
    committed = Committed(target, target.spec.state, stream, 35)
    with pytest.raises(AssertionError, match=r"differs by|never written"):
        verify_rounds(target, target.spec.state, committed, stream, 6, tolerance=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_long_runs_of_mixed_rounds_end_in_the_committed_state(
    compiled_target: Engine, target_state: State, stream: list[int], seed: int
) -> None:
    """Three requests, blocks of changing width, random acceptance, rejected rows sometimes on slot 0."""
    rng = np.random.default_rng(seed)
    streams = {slot: stream[10 * slot :] + stream[: 10 * slot] for slot in (1, 2, 3)}
    memory, position = Memory(target_state), {1: 9, 2: 16, 3: 2}
    forward(compiled_target, memory, [Chunk(slot, 0, streams[slot][:at]) for slot, at in position.items()])
    while min(position.values()) < 80:
        blocks, kept = [], {}
        for slot, at in position.items():
            width = int(rng.integers(1, 7))
            kept[slot] = int(rng.integers(1, width + 1))
            dead = int(rng.integers(0, width - kept[slot] + 1))
            tokens = [*streams[slot][at : at + kept[slot]], *rng.integers(2, 319, size=width - kept[slot]).tolist()]
            blocks.append(Chunk(slot, at, tokens, dead))
        forward(compiled_target, memory, blocks, padding=int(rng.integers(0, 3)))
        position = {slot: at + kept[slot] for slot, at in position.items()}
    for slot, at in position.items():
        alone = Memory(target_state)
        forward(compiled_target, alone, [Chunk(slot, 0, streams[slot][:at])])
        assert_same_live(memory.live(slot, at), alone.live(slot, at))


def test_eager_and_compiled_agree_after_rejections(
    compiled_target: Engine, eager_target: EagerEngine, target_state: State, stream: list[int]
) -> None:
    """The same mixed rounds on both engines: logits, taps and every row of memory that holds a number."""
    memories = {id(engine): Memory(target_state) for engine in (compiled_target, eager_target)}
    rng, at = np.random.default_rng(8), {1: 0, 2: 0, 3: 0}
    for _ in range(12):
        chunks = [Chunk(s, p, rng.integers(0, 320, size=int(rng.integers(1, 8))).tolist()) for s, p in at.items()]
        results = [
            forward(engine, memories[id(engine)], chunks, padding=2) for engine in (compiled_target, eager_target)
        ]
        for ours, oracle in zip(*results, strict=True):
            assert_close(ours["logits"], oracle["logits"], 2e-5)
            assert_close(ours["taps"], oracle["taps"], 2e-5)
        for chunk in chunks:
            at[chunk.slot] += int(rng.integers(1, len(chunk.tokens) + 1))
    compiled, eager = (memories[id(engine)].arrays for engine in (compiled_target, eager_target))
    for tensor in target_state:
        own = slice(tensor.rows, None)  # slot 0 and page 0 are scratch: whoever wrote last
        np.testing.assert_allclose(
            compiled[tensor.name][own], eager[tensor.name][own], atol=1e-4, rtol=0, equal_nan=True, err_msg=tensor.name
        )
