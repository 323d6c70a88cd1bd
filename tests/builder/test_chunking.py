"""A sequence is the same however it is cut, packed or padded: one-shot prefill, chunks, decode, any batch mates.

Memory starts as NaN throughout, so a row that is read without having been written shows in every result. Under ONNX
Runtime all comparisons are to the bit: a row's arithmetic does not depend on the number of rows, from two on.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twostroke.builder.eager import EagerEngine
from twostroke.builder.networks import deepseek_v4
from twostroke.engines.base import Engine
from twostroke.engines.loading import LoadedEngine, load_engine_directory
from twostroke.engines.manifest import StateTensor
from twostroke.plugins.nsa import reference
from twostroke.tests.builder.flat_runs import (
    Array,
    Chunk,
    Memory,
    Toy,
    assert_close,
    assert_same_live,
    every,
    feed,
    forward,
)
from twostroke.tests.engines import engine_directory

State = tuple[StateTensor, ...]
# One below, at and above: ratio 4 and 8, window 8, top-k (4 rows of 4 tokens), ring 13; then far beyond.
LENGTHS = [3, 4, 5, 7, 8, 9, 12, 13, 14, 15, 16, 17, 19, 20, 24, 25, 31, 32, 33, 63, 64, 65, 110]


@pytest.fixture(scope="module")
def token_by_token(compiled_target: Engine, target_state: State, stream: list[int]) -> dict[int, dict[str, Array]]:
    """Live state after every prefix of the stream, and under key -1 logits and taps of every row."""
    memory, found, states = Memory(target_state), [], {}
    for at, token in enumerate(stream):
        found.append(forward(compiled_target, memory, [Chunk(2, at, [token])])[0])
        states[at + 1] = memory.live(2, at + 1)
    states[-1] = {name: np.concatenate([rows[name] for rows in found]) for name in ("logits", "taps")}
    return states


@pytest.mark.parametrize("size", [*range(2, 18), 33, 120])
def test_chunks_of_every_size_equal_decode(
    compiled_target: Engine, target_state: State, stream: list[int], token_by_token: dict, size: int
) -> None:
    for length in LENGTHS:
        memory = Memory(target_state)
        found = feed(compiled_target, memory, 2, stream[:length], every(size))
        for name, rows in found.items():
            np.testing.assert_array_equal(rows, token_by_token[-1][name][:length], err_msg=f"{name}, {length} tokens")
        assert_same_live(memory.live(2, length), token_by_token[length])


def test_chunks_of_changing_size_equal_decode(
    compiled_target: Engine, target_state: State, stream: list[int], token_by_token: dict
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        memory = Memory(target_state)
        sizes = rng.integers(1, 30, size=120)
        found = feed(compiled_target, memory, 2, stream, sizes.tolist())
        np.testing.assert_array_equal(found["logits"], token_by_token[-1]["logits"])
        assert_same_live(memory.live(2, 120), token_by_token[120])


def test_the_engine_agrees_with_the_oracle_to_the_end_of_its_range(
    toy: Toy, compiled_target: Engine, target_state: State
) -> None:
    """All 128 tokens of the maximum length."""
    tokens = np.random.default_rng(1).integers(2, 319, size=128).tolist()
    found = feed(compiled_target, Memory(target_state), 3, tokens, every(9))
    assert_close(found["logits"], toy.oracle(tokens)[0], 1e-5)


@pytest.mark.parametrize("size", [2, 5, 16, 17, 64])
def test_small_pages_are_crossed_without_a_trace(
    toy: Toy, stream: list[int], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager torch with pages of 16 tokens, dealt out of order: 8 pages a request instead of one."""
    monkeypatch.setattr(deepseek_v4, "TOKENS_PER_PAGE", 16)
    paged = toy.target()
    memory = Memory(paged.spec.state, pages_per_slot=8)
    assert {t.rows for t in paged.spec.state if t.addressing == "paged"} == {4}
    found = feed(paged, memory, 1, stream[:100], every(size))
    one_shot = Memory(paged.spec.state, pages_per_slot=8)
    assert_close(feed(paged, one_shot, 1, stream[:100], [100])["logits"], found["logits"], 1e-5)
    assert_same_live(memory.live(1, 100), one_shot.live(1, 100), 1e-5)
    assert_close(found["logits"], toy.oracle(stream[:100])[0], 1e-5)


@pytest.fixture(scope="module")
def long_target() -> LoadedEngine:
    """F4 with room for 1100 tokens: five pages of 256."""
    return load_engine_directory(engine_directory(max_position_embeddings=1100))


def long_state(loaded: LoadedEngine) -> State:
    return tuple(t for t in loaded.manifest.state if t.name in loaded.engines["target"].bindings)


def test_full_size_pages_are_crossed_without_a_trace(long_target: LoadedEngine) -> None:
    engine, state = long_target.engines["target"], long_state(long_target)
    tokens = np.random.default_rng(2).integers(2, 319, size=600).tolist()
    whole, chunked = Memory(state, pages_per_slot=5), Memory(state, pages_per_slot=5)
    expected = feed(engine, whole, 2, tokens, [600])
    sizes = [250, *[1] * 12, 6, 6, 100, 130, *[5] * 4, 76]
    found = feed(engine, chunked, 2, tokens, sizes)
    for name, rows in expected.items():
        np.testing.assert_array_equal(found[name], rows, err_msg=name)
    assert_same_live(chunked.live(2, 600), whole.live(2, 600))


def test_a_wider_page_table_changes_nothing(long_target: LoadedEngine) -> None:
    """Page-table tiers: the narrowest that covers the length, and every wider one, at lengths beside a page's end."""
    engine, state = long_target.engines["target"], long_state(long_target)
    tokens = np.random.default_rng(4).integers(2, 319, size=530).tolist()
    for length in (255, 256, 257, 511, 513):
        narrow = -(-(length + 6) // 256)
        results = []
        for columns in range(narrow, 6):
            memory = Memory(state, pages_per_slot=5)
            feed(engine, memory, 1, tokens[: length - 6], [length - 6])
            verify = forward(engine, memory, [Chunk(1, length - 6, tokens[length - 6 : length])], columns=columns)[0]
            results.append((verify["logits"], memory.live(1, length)))
        for logits, live in results[1:]:
            np.testing.assert_array_equal(logits, results[0][0])
            assert_same_live(live, results[0][1])


# What else is in the step does not change a row.


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(2, 319, size=n).tolist() for n in (40, 37, 3)]


def test_packed_prefill_equals_separate_ones(
    compiled_target: Engine, eager_target: EagerEngine, target_state: State, prompts: list[list[int]]
) -> None:
    for engine, tolerance in ((compiled_target, 0.0), (eager_target, 1e-5)):
        together = Memory(target_state)
        chunks = [Chunk(slot, 0, prompt) for slot, prompt in enumerate(prompts, 1)]
        found = forward(engine, together, chunks, padding=5)
        for slot, prompt in enumerate(prompts, 1):
            alone = Memory(target_state)
            expected = feed(engine, alone, slot, prompt, [len(prompt)])
            for name, rows in expected.items():
                if tolerance:
                    assert_close(found[slot - 1][name], rows, tolerance)
                else:
                    np.testing.assert_array_equal(found[slot - 1][name], rows)
            n = len(prompt)
            assert_same_live(together.live(slot, n), alone.live(slot, n), tolerance)


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
def test_prefill_decode_and_verify_share_a_step(
    compiled_target: Engine, target_state: State, prompts: list[list[int]], order: tuple[int, ...]
) -> None:
    """A prefill chunk, one decode row and a verify block of six, in any order, between padding and dead rows."""
    sizes = {1: 17, 2: 1, 3: 6}
    fed = {1: 20, 2: 36, 3: 3}
    more = {slot: np.random.default_rng(slot).integers(2, 319, size=sizes[slot]).tolist() for slot in sizes}
    together = Memory(target_state)
    for slot, prompt in enumerate(prompts, 1):
        feed(compiled_target, together, slot, prompt[: fed[slot]], every(11))
    chunks = [Chunk(slot, fed[slot], more[slot]) for slot in order]
    chunks.insert(1, Chunk(0, 0, [4, 4, 4]))
    found = forward(compiled_target, together, chunks, padding=4)
    for chunk, rows in zip(chunks, found, strict=True):
        if not chunk.slot:
            continue
        alone = Memory(target_state)
        feed(compiled_target, alone, chunk.slot, prompts[chunk.slot - 1][: fed[chunk.slot]], every(11))
        expected = forward(compiled_target, alone, [chunk])[0]
        np.testing.assert_array_equal(rows["logits"], expected["logits"])
        np.testing.assert_array_equal(rows["taps"], expected["taps"])
        end = chunk.start + len(chunk.tokens)
        assert_same_live(together.live(chunk.slot, end), alone.live(chunk.slot, end))


def test_one_row_is_padded_and_keeps_its_bits_in_every_bucket(
    compiled_target: Engine, target_state: State, prompts: list[list[int]]
) -> None:
    results = []
    for padding in (0, 1, 2, 3, 7, 47):
        memory = Memory(target_state)
        feed(compiled_target, memory, 1, prompts[0], [40])
        results.append(forward(compiled_target, memory, [Chunk(1, 40, [77])], padding=padding)[0]["logits"])
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


# A compressed row of the first chunk stays selectable in later chunks and in decode.


def test_rows_of_every_earlier_chunk_are_selectable(
    eager_target: EagerEngine, target_state: State, stream: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 tokens in three chunks of 8, then 10 decode steps; the scores each query chooses from are watched."""
    watched: list[Array] = []
    plain = reference.exact_topk

    def watching(scores: torch.Tensor, k: int) -> torch.Tensor:
        watched.append(scores.numpy().copy())
        return plain(scores, k)

    monkeypatch.setattr(reference, "exact_topk", watching)
    index = next(t for t in target_state if t.name == "layers.2.index")
    memory = Memory(target_state)
    written = []
    for start, size in [(0, 8), (8, 8), (16, 8), *[(24 + i, 1) for i in range(10)]]:
        watched.clear()
        forward(eager_target, memory, [Chunk(1, start, stream[start : start + size])])
        scores = watched[0]  # layer 2; layer 4 is the other CSA layer
        for row in range(size):
            selectable = (scores[row] > reference.MASKED / 2).sum()
            assert selectable == (start + row + 1) // 4, f"position {start + row}"
        closed = memory.rows(index, 1, range(64))
        written.append(int((~np.isnan(memory.arrays[index.name][closed]).any(axis=1)).sum()))
    assert written == [2, 4, 6, *[(24 + i + 1) // 4 for i in range(10)]], "one more row at each boundary"


def test_a_planted_row_changes_later_chunks_and_decode(
    compiled_target: Engine, target_state: State, stream: list[int]
) -> None:
    """Replacing the value of row 0 after chunk 1 moves chunk 3 and every decode step: the row is really read. Its
    index row is scaled up so that every query whose heads weigh it positively chooses it."""
    results = []
    for value in (1.0, -1.0):
        memory = Memory(target_state)
        forward(compiled_target, memory, [Chunk(1, 0, stream[:8])])
        for name, factor in (("compressed", value), ("index", 50.0)):
            tensor = next(t for t in target_state if t.name == f"layers.2.{name}")
            memory.arrays[tensor.name][memory.rows(tensor, 1, [0])] *= factor
        chunk2, chunk3 = (forward(compiled_target, memory, [Chunk(1, s, stream[s : s + 8])])[0] for s in (8, 16))
        decode = [forward(compiled_target, memory, [Chunk(1, 24 + i, [stream[24 + i]])])[0] for i in range(10)]
        results.append([r["logits"] for r in (chunk2, chunk3, *decode)])
    moved = [np.abs(a - b).max() > 1e-3 for a, b in zip(*results, strict=True)]
    assert moved[1], "chunk 3 does not read chunk 1's row"
    assert all(moved), f"steps that ignore the planted row: {[i for i, m in enumerate(moved) if not m]}"
