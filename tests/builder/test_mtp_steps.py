"""MTP's observe, pick and next against the whole-sequence reference, and what a chain may depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from twostroke.__main__ import main
from twostroke.builder.build import BuildOptions, build
from twostroke.builder.eager import EagerEngine
from twostroke.builder.inventory import nextn_inventory
from twostroke.builder.networks import deepseek_v4_nextn
from twostroke.builder.networks.registry import TARGETS
from twostroke.builder.weights import load_into
from twostroke.engines.base import Engine
from twostroke.engines.errors import BuildError
from twostroke.engines.loading import LoadedEngine
from twostroke.engines.manifest import StateTensor, read_weights_index
from twostroke.tests.builder.flat_runs import (
    Array,
    Chunk,
    Memory,
    Rows,
    Toy,
    assert_close,
    assert_same_live,
    enqueue,
    forward,
    observe,
)

TOLERANCE = 1e-5
DEPTH, WINDOW, STREAMS = 5, 8, 2


@dataclass(frozen=True)
class Draft:
    """The three steps of one engine over their state."""

    observing: Engine
    following: Engine
    picking: Engine
    state: tuple[StateTensor, ...]

    def memory(self) -> Memory:
        return Memory(self.state)

    def observe(self, memory: Memory, taps: Array, tokens: Sequence[int], chunks: Sequence[Chunk]) -> None:
        """The rows of `chunks` of the sequence `tokens`, whose taps are `taps`."""
        spans = [slice(chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks]
        following = [list(tokens[span.start + 1 : span.stop + 1]) for span in spans]
        observe(self.observing, memory, [taps[span] for span in spans], chunks, next_ids=following)

    def seen(self, taps: Array, tokens: Sequence[int], sizes: Sequence[int], slot: int = 1) -> Memory:
        """After all of `tokens` but the last, the anchor, in chunks of the given sizes."""
        memory, at = self.memory(), 0
        for size in sizes:
            self.observe(memory, taps, tokens, [Chunk(slot, at, tokens[at : at + size])])
            at += size
        assert at == len(tokens) - 1
        return memory

    def propose(
        self,
        memory: Memory,
        requests: Sequence[tuple[int, int]],
        depth: int = 3,
        noise: Array | None = None,
        inverse_temperature: float = 1.0,
    ) -> dict[str, Array]:
        """tokens [R, depth], logits, confidence for (slot, position) each: pick, then next and pick again. One row of
        scratch behind; noise [R, depth, V]."""
        rows = len(requests) + 1
        slots, positions = (np.array([*column, 0], np.int32) for column in zip(*requests, strict=True))
        vocab = int(self.picking.bindings["noise"].shape[1])
        columns: list[dict[str, Array]] = []
        for k in range(depth):
            if k:
                enqueue(
                    self.following,
                    memory,
                    token_ids=columns[-1]["tokens"],
                    positions=positions + np.int32(k - 1) * (slots != 0),
                    slots=slots,
                    row_start=np.arange(rows, dtype=np.int32),
                    page_table=memory.table,
                )
            drawn = np.zeros((rows, vocab), np.float32)
            if noise is not None:
                drawn[:-1] = noise[:, k]
            heat = np.full(rows, inverse_temperature, np.float32)
            columns.append(enqueue(self.picking, memory, slots=slots, inverse_temperature=heat, noise=drawn))
        return {name: np.stack([column[name] for column in columns], axis=1)[:-1] for name in columns[0]}


@pytest.fixture(scope="session")
def preview(preview_engine: LoadedEngine) -> Toy:
    """The checkpoint the preview engine was built from."""
    return Toy(preview_engine.folder.parent / "checkpoint")


def eager(toy: Toy, depth: int = DEPTH) -> Draft:
    modules = [step(toy.config, depth, 128, frozenset()) for step in deepseek_v4_nextn.STEPS]
    for module in modules:
        load_into(module, toy.checkpoint)
    observing, following, picking = (EagerEngine(module.step()) for module in modules)
    return Draft(observing, following, picking, observing.spec.state)


@pytest.fixture(scope="session")
def compiled(preview_engine: LoadedEngine, preview: Toy) -> Draft:
    engines = preview_engine.engines
    return Draft(engines["observe"], engines["next"], engines["pick"], eager(preview).state)


@pytest.fixture(scope="session", params=["eager", "onnxruntime"])
def draft(request: pytest.FixtureRequest, preview: Toy, compiled: Draft) -> Draft:
    return eager(preview) if request.param == "eager" else compiled


@pytest.fixture(scope="session")
def taps(preview: Toy, stream: list[int]) -> Array:
    """The target's streams after its last layer, of the whole stream."""
    return preview.oracle(stream)[1]


def assert_same_chain(found: Rows, expected: Rows, row: int = 0) -> None:
    np.testing.assert_array_equal(found["tokens"][row], expected["tokens"])
    for k, (ours, theirs) in enumerate(zip(found["logits"][row], expected["logits"], strict=True)):
        assert_close(ours, theirs, TOLERANCE, f"depth {k + 1}")


def test_the_target_taps_all_streams_after_its_last_layer(
    preview_engine: LoadedEngine, taps: Array, stream: list[int]
) -> None:
    assert taps.shape == (len(stream), STREAMS * 64)
    target = preview_engine.engines["target"]
    memory = Memory(t for t in preview_engine.manifest.state if t.name.startswith("layers."))
    found = forward(target, memory, [Chunk(1, 0, stream[:60])])[0]
    assert_close(found["taps"], taps[:60], 2e-5)


@pytest.mark.parametrize("position", [1, 2, 7, 8, 9, 13, 14, 60])
def test_draft_logits_equal_the_reference_after_prefill(
    draft: Draft, preview: Toy, taps: Array, stream: list[int], position: int
) -> None:
    """Context shorter and longer than the window (8) and the ring (12). Rows from P on were never written."""
    tokens = stream[: position + 1]
    found = draft.propose(draft.seen(taps, tokens, [position]), [(1, position)], DEPTH)
    assert_same_chain(found, preview.chain(taps, tokens, DEPTH))


@pytest.mark.parametrize("sizes", [[21], [8, 8, 5], [7, 7, 7], [1] * 21, [20, 1], [1, 20]])
def test_draft_logits_equal_the_reference_after_chunked_prefill(
    draft: Draft, preview: Toy, taps: Array, stream: list[int], sizes: list[int]
) -> None:
    tokens = stream[:22]
    found = draft.propose(draft.seen(taps, tokens, sizes), [(1, 21)])
    assert_same_chain(found, preview.chain(taps, tokens))


@pytest.mark.parametrize("kept", range(1, DEPTH + 2))
def test_draft_logits_equal_the_reference_after_rejection(
    draft: Draft, preview: Toy, taps: Array, stream: list[int], kept: int
) -> None:
    """A full chain leaves its rows behind, `kept` rows are committed over them, the others carry slot 0."""
    memory = draft.seen(taps, stream[:20], [19])
    for position in (19, 19 + kept):
        draft.propose(memory, [(1, position)], DEPTH)
        rows = stream[position : position + DEPTH + 1]
        draft.observe(memory, taps, stream, [Chunk(1, position, rows, dead=DEPTH + 1 - kept)])
        at = position + kept
        alone = draft.seen(taps, stream[: at + 1], [at])
        assert_same_live(memory.live(1, at), alone.live(1, at), 0.0 if draft.observing.step.engine != "eager" else 1e-5)
        assert_same_chain(draft.propose(memory, [(1, at)], 3), preview.chain(taps, stream[: at + 1]))


def test_a_chain_is_the_same_alone_and_among_others(
    compiled: Draft, taps: Array, preview: Toy, stream: list[int]
) -> None:
    memory, positions = compiled.memory(), {1: 30, 2: 5, 3: 11}
    chunks = [Chunk(slot, 0, stream[:position]) for slot, position in positions.items()]
    compiled.observe(memory, taps, stream, chunks)
    together = compiled.propose(memory, list(positions.items()))
    for row, (slot, position) in enumerate(positions.items()):
        alone = compiled.seen(taps, stream[: position + 1], [position], slot)
        found = compiled.propose(alone, [(slot, position)])
        for name, values in found.items():
            np.testing.assert_array_equal(values[0], together[name][row], err_msg=name)
        assert_same_chain(together, preview.chain(taps, stream[: position + 1]), row)


def test_the_engines_agree_on_sampled_chains(compiled: Draft, preview: Toy, taps: Array, stream: list[int]) -> None:
    rng = np.random.default_rng(4)
    positions = [(1, 17), (2, 40)]
    noise = rng.gumbel(size=(2, DEPTH, 320)).astype(np.float32)
    found = []
    for draft in (compiled, eager(preview)):
        memory = draft.memory()
        draft.observe(memory, taps, stream, [Chunk(slot, 0, stream[:position]) for slot, position in positions])
        found.append(draft.propose(memory, positions, DEPTH, noise, 1 / 0.7))
    ours, theirs = found
    np.testing.assert_array_equal(ours["tokens"], theirs["tokens"])
    assert_close(ours["logits"], theirs["logits"], 2e-5)
    np.testing.assert_allclose(ours["confidence"], theirs["confidence"], rtol=1e-4)


def test_a_pick_is_the_noisy_argmax_and_its_confidence_the_drafts_own_probability(
    draft: Draft, taps: Array, stream: list[int]
) -> None:
    noise = np.random.default_rng(5).gumbel(size=(1, 3, 320)).astype(np.float32)
    found = draft.propose(draft.seen(taps, stream[:13], [12]), [(1, 12)], 3, noise, 1 / 0.8)
    scaled = found["logits"] * np.float32(1 / 0.8)
    np.testing.assert_array_equal(found["tokens"], (scaled + noise).argmax(axis=2))
    weights = np.exp(scaled - scaled.max(axis=2, keepdims=True))
    share = np.take_along_axis(weights / weights.sum(axis=2, keepdims=True), found["tokens"][..., None], axis=2)
    np.testing.assert_allclose(found["confidence"], share[..., 0], rtol=1e-5)


def test_ties_in_a_pick_go_to_the_lowest_id(draft: Draft, taps: Array, stream: list[int]) -> None:
    noise = np.zeros((1, 1, 320), np.float32)
    noise[0, 0, [9, 7, 200]] = 3e38  # larger than any logit can move
    found = draft.propose(draft.seen(taps, stream[:13], [12]), [(1, 12)], 1, noise)
    assert found["tokens"].tolist() == [[7]]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_layer_drafts_to_any_depth(
    preview: Toy, compiled: Draft, taps: Array, stream: list[int], depth: int
) -> None:
    """C-04. A network for shorter chains has a shorter ring and says the same."""
    short = eager(preview, depth)
    assert short.state[0].rows == WINDOW + depth - 1
    found = short.propose(short.seen(taps, stream[:31], [30]), [(1, 30)], depth)
    assert_same_chain(found, preview.chain(taps, stream[:31], depth))


def test_the_layer_is_stored_once(preview_engine: LoadedEngine, preview: Toy) -> None:
    """C-04. Observe and next read the same bytes, and there are no more of them than the checkpoint has."""
    index = read_weights_index(preview_engine.folder)
    used = {
        name: {b.name for b in preview_engine.manifest.steps[name].bindings if b.role == "weight"}
        for name in ("target", "observe", "next", "pick")
    }
    assert used["observe"] == used["next"]
    assert "embed.weight" in used["next"] & used["target"]
    assert "head.weight" in used["pick"] & used["target"]
    stored = sum(record.bytes for name, record in index.weights.items() if name.startswith("mtp."))
    assert stored == sum(4 * int(np.prod(spec.shape)) for spec in nextn_inventory(preview.config))


def test_hidden_i_is_paired_with_token_i_plus_one(
    compiled: Draft, preview: Toy, taps: Array, stream: list[int]
) -> None:
    """A-05. (h0, t1), (h1, t2), ..: the other pairing is another network."""
    tokens = stream[:7]
    found = compiled.propose(compiled.seen(taps, tokens, [6]), [(1, 6)])
    assert_same_chain(found, preview.chain(taps, tokens))
    mistaken = preview.chain(taps, tokens, shift=0)
    assert np.abs(found["logits"][0, 0] - mistaken["logits"][0]).max() > 1e-3


def test_depths_that_a_method_cannot_draft_are_refused(tmp_path: Path, preview: Toy, f4_engine_dir: Path) -> None:
    drafts = TARGETS["deepseek_v4"].drafts
    for depth in (0, -1, 17):
        with pytest.raises(BuildError, match=f"--max-draft-len is {depth}; accepted for mtp: 1 to 16"):
            drafts["mtp"](preview.config, depth)
    assert drafts["mtp"](preview.config, None).block_size == 3
    dspark = Toy(f4_engine_dir.parent / "checkpoint").config
    assert drafts["dspark"](dspark, None).block_size == drafts["dspark"](dspark, 5).block_size == 5
    with pytest.raises(BuildError, match=r"--max-draft-len is 7, but dspark .* dspark_block_size = 5"):
        build(f4_engine_dir.parent / "checkpoint", tmp_path / "engine", BuildOptions(max_draft_len=7))
    assert main(["build", str(preview.checkpoint.folder), "-o", str(tmp_path / "no"), "--max-draft-len", "99"]) == 2
    assert not (tmp_path / "no").exists()
    with pytest.raises(BuildError, match="no draft method"):
        drafts["none"](dspark, 3)
