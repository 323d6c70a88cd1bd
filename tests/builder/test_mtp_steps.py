"""MTP's observe, pick and next against the reference of each family, and what a chain may depend on.

The NextN block of V4 Preview keeps a window ring; the MTP layer of V3.2 keeps pages of 64 tokens and reads the best 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from twostroke.__main__ import main
from twostroke.builder.build import BuildOptions, build
from twostroke.builder.networks.registry import TARGETS
from twostroke.engines.errors import BuildError
from twostroke.engines.loading import LoadedEngine
from twostroke.engines.manifest import read_weights_index
from twostroke.tests.builder.deepseek_v32_reference import Drafter, Network, ranked
from twostroke.tests.builder.flat_runs import Array, Chunk, Memory, Toy, assert_close, assert_same_live, forward
from twostroke.tests.builder.mtp_runs import DEPTH, Draft, assert_same_chain, compiled, eager
from twostroke.tests.checkpoints import T32, write_checkpoint

FAMILIES = {"v4-preview": "preview_engine", "v32": "t32_mtp_engine"}


@dataclass(frozen=True)
class Family:
    """An engine with its draft, and the checkpoint it was built from."""

    loaded: LoadedEngine
    toy: Toy
    compiled: Draft


def family_of(loaded: LoadedEngine) -> Family:
    return Family(loaded, Toy(loaded.folder.parent / "checkpoint"), compiled(loaded))


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return family_of(request.getfixturevalue(FAMILIES[request.param]))


@pytest.fixture(scope="session")
def v32(t32_mtp_engine: LoadedEngine) -> Family:
    return family_of(t32_mtp_engine)


@pytest.fixture(scope="session", params=["eager", "onnxruntime"])
def draft(request: pytest.FixtureRequest, family: Family) -> Draft:
    return eager(family.toy) if request.param == "eager" else family.compiled


@pytest.fixture(scope="session")
def taps(family: Family, stream: list[int]) -> Array:
    """What the draft reads of the target, of the whole stream."""
    return family.toy.oracle(stream)[1]


def test_the_target_taps_what_its_draft_reads(family: Family, taps: Array, stream: list[int]) -> None:
    """All streams after the last layer of V4; the hidden after the final norm of V3.2."""
    assert taps.shape == (len(stream), family.loaded.manifest.speculative.taps_width)
    state = [t for t in family.loaded.manifest.state if not t.name.startswith("mtp.")]
    memory = Memory(state, pages_per_slot=family.compiled.pages)
    found = forward(family.loaded.engines["target"], memory, [Chunk(1, 0, stream[:90])])[0]
    assert_close(found["taps"], taps[:90], 2e-5)


@pytest.mark.parametrize("position", [1, 2, 5, 7, 8, 9, 13, 14, 60, 61, 63, 64, 65, 90])
def test_draft_logits_equal_the_reference_after_prefill(
    draft: Draft, family: Family, taps: Array, stream: list[int], position: int
) -> None:
    """Rows from P on were never written. Chains that lie below and above the window and the top-k (8), fill the ring
    (12), and cross each, a page of 64 tokens included."""
    tokens = stream[: position + 1]
    found = draft.propose(draft.seen(taps, tokens, [position]), [(1, position)], DEPTH)
    assert_same_chain(found, family.toy.chain(taps, tokens, DEPTH))


@pytest.mark.parametrize("sizes", [[21], [8, 8, 5], [7, 7, 7], [1] * 21, [20, 1], [1, 20], [64, 2], [61, 5], [33, 33]])
def test_draft_logits_equal_the_reference_after_chunked_prefill(
    draft: Draft, family: Family, taps: Array, stream: list[int], sizes: list[int]
) -> None:
    position = sum(sizes)
    tokens = stream[: position + 1]
    found = draft.propose(draft.seen(taps, tokens, sizes), [(1, position)], DEPTH)
    assert_same_chain(found, family.toy.chain(taps, tokens, DEPTH))


@pytest.mark.parametrize("kept", range(1, DEPTH + 2))
@pytest.mark.parametrize("start", [4, 19, 58])
def test_draft_logits_equal_the_reference_after_rejection(
    draft: Draft, family: Family, taps: Array, stream: list[int], start: int, kept: int
) -> None:
    """A full chain leaves its rows behind, `kept` rows are committed over them, the others carry slot 0: memory and
    chain are those of a request that never drafted. Within a page and across one."""
    memory = draft.seen(taps, stream[: start + 1], [start])
    for position in (start, start + kept):
        draft.propose(memory, [(1, position)], DEPTH)
        rows = stream[position : position + DEPTH + 1]
        draft.observe(memory, taps, stream, [Chunk(1, position, rows, dead=DEPTH + 1 - kept)])
        at = position + kept
        alone = draft.seen(taps, stream[: at + 1], [at])
        assert_same_live(memory.live(1, at), alone.live(1, at), 0.0 if draft.exact else 1e-5)
        found = draft.propose(memory, [(1, at)], DEPTH)
        assert_same_chain(found, family.toy.chain(taps, stream[: at + 1], DEPTH))


def test_rejections_of_many_requests_in_one_step_leave_each_as_if_it_never_drafted(
    draft: Draft, family: Family, taps: Array, stream: list[int]
) -> None:
    """Six requests at positions of their own, of whose blocks 1 to 6 rows hold; then one chain for all of them."""
    starts = dict(enumerate([3, 8, 17, 59, 62, 64], 1))
    memory = draft.memory(slots=7)
    draft.observe(memory, taps, stream, [Chunk(slot, 0, stream[:start]) for slot, start in starts.items()])
    draft.propose(memory, list(starts.items()), DEPTH)
    blocks = [
        Chunk(slot, at, stream[at : at + DEPTH + 1], dead=DEPTH + 1 - kept)
        for kept, (slot, at) in enumerate(starts.items(), 1)
    ]
    draft.observe(memory, taps, stream, blocks)
    reached = {slot: start + kept for kept, (slot, start) in enumerate(starts.items(), 1)}
    alone = {slot: draft.seen(taps, stream[: at + 1], [at], slot, draft.memory(7)) for slot, at in reached.items()}
    for slot, at in reached.items():
        assert_same_live(memory.live(slot, at), alone[slot].live(slot, at), 0.0 if draft.exact else 1e-5)
    found = draft.propose(memory, list(reached.items()), DEPTH)
    for row, at in enumerate(reached.values()):
        assert_same_chain(found, family.toy.chain(taps, stream[: at + 1], DEPTH), row)


def test_a_chain_is_the_same_alone_and_among_others(family: Family, taps: Array, stream: list[int]) -> None:
    """To the bit; one of the chains crosses a page."""
    draft, positions = family.compiled, {1: 30, 2: 5, 3: 63}
    memory = draft.memory()
    chunks = [Chunk(slot, 0, stream[:position]) for slot, position in positions.items()]
    draft.observe(memory, taps, stream, chunks)
    together = draft.propose(memory, list(positions.items()), DEPTH)
    for row, (slot, position) in enumerate(positions.items()):
        alone = draft.seen(taps, stream[: position + 1], [position], slot)
        found = draft.propose(alone, [(slot, position)], DEPTH)
        for name, values in found.items():
            np.testing.assert_array_equal(values[0], together[name][row], err_msg=name)
        assert_same_chain(together, family.toy.chain(taps, stream[: position + 1], DEPTH), row)


@pytest.mark.parametrize("position", [7, 40, 58])
def test_columns_of_the_page_table_that_no_token_needs_change_nothing(
    family: Family, taps: Array, stream: list[int], position: int
) -> None:
    """To the bit: one column, as many as the longest request needs, two unassigned ones more."""
    draft, chains = family.compiled, []
    for columns in (1, draft.pages, draft.pages + 2):
        memory = draft.memory()
        wide = np.pad(memory.table, ((0, 0), (0, 2)))
        memory.table = np.ascontiguousarray(wide[:, :columns])
        draft.seen(taps, stream[: position + 1], [position], memory=memory)
        chains.append((draft.propose(memory, [(1, position)], DEPTH), memory.live(1, position + DEPTH - 1)))
    for found, live in chains[1:]:
        for name, values in found.items():
            np.testing.assert_array_equal(values, chains[0][0][name], err_msg=name)
        assert_same_live(live, chains[0][1])


def test_the_engines_agree_on_sampled_chains(family: Family, taps: Array, stream: list[int]) -> None:
    rng = np.random.default_rng(4)
    positions = [(1, 17), (2, 40), (3, 62)]
    noise = rng.gumbel(size=(3, DEPTH, 320)).astype(np.float32)
    found = []
    for draft in (family.compiled, eager(family.toy)):
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
def test_one_layer_drafts_to_any_depth(family: Family, taps: Array, stream: list[int], depth: int) -> None:
    """C-04. A network made for shorter chains says the same; only a ring is shorter for it, pages are not."""
    short = eager(family.toy, depth)
    rows = {tensor.name: tensor.rows for tensor in short.state}
    window = {"mtp.0.window": 8 + depth - 1} if "mtp.0.window" in rows else {"mtp.0.latent": 64, "mtp.0.index": 64}
    assert rows == {**window, "mtp.0.hidden": 1}
    found = short.propose(short.seen(taps, stream[:31], [30]), [(1, 30)], depth)
    assert_same_chain(found, family.toy.chain(taps, stream[:31], depth))


def test_the_layer_is_stored_once(family: Family) -> None:
    """C-04. Observe and next read the same bytes, there are no more of them than the checkpoint has, and the copies of
    embedding and head are the target's."""
    index = read_weights_index(family.loaded.folder)
    used = {
        name: {b.name for b in family.loaded.manifest.steps[name].bindings if b.role == "weight"}
        for name in ("target", "observe", "next", "pick")
    }
    assert used["observe"] == used["next"]
    model = TARGETS[family.toy.config.model_type]
    prefix = model.draft_prefix(family.toy.config)
    tensors = [spec for spec in model.all_tensors(family.toy.config) if spec.name.startswith(prefix)]
    copies = {spec.name: spec.copy_of for spec in tensors if spec.copy_of is not None}
    embedding, head = copies.values()
    assert embedding in used["next"] & used["target"]
    assert head in used["pick"] & used["target"]
    stored = sum(record.bytes for name, record in index.weights.items() if name.startswith(prefix))
    assert stored == sum(4 * int(np.prod(spec.shape)) for spec in tensors if spec.copy_of is None)


def test_hidden_i_is_paired_with_token_i_plus_one(family: Family, taps: Array, stream: list[int]) -> None:
    """A-05. (h0, t1), (h1, t2), ..: the other pairing is another network."""
    tokens, draft = stream[:7], family.compiled
    found = draft.propose(draft.seen(taps, tokens, [6]), [(1, 6)])
    assert_same_chain(found, family.toy.chain(taps, tokens))
    mistaken = family.toy.chain(taps, tokens, shift=0)
    assert np.abs(found["logits"][0, 0] - mistaken["logits"][0]).max() > 1e-3


# Rows of a chain that no page is for.


class UpTo(Network):
    """The reference with a memory of `held` rows: later ones are read by nobody, themselves included."""

    held = 64

    def chosen(self, at: str, x: Array, qr: Array, angle: Array, keys: Array, visible: Array) -> Array:
        return super().chosen(at, x, qr, angle, keys, visible & (np.arange(visible.shape[1]) < self.held))


@pytest.mark.parametrize("engine", ["eager", "onnxruntime"])
@pytest.mark.parametrize("position", [60, 61, 62, 63, 64])
def test_rows_beyond_the_page_table_go_to_scratch(v32: Family, stream: list[int], position: int, engine: str) -> None:
    """At the longest length a table of one page is full and a chain of five goes on: its rows are kept nowhere, read
    what the table holds, and touch no committed row, neither of this request nor of its neighbour."""
    draft, taps = eager(v32.toy) if engine == "eager" else v32.compiled, v32.toy.oracle(stream)[1]
    requests = [(1, position), (2, 20)]
    memory = draft.memory()
    memory.table = np.ascontiguousarray(memory.table[:, :1])
    draft.observe(memory, taps, stream, [Chunk(slot, 0, stream[:at]) for slot, at in requests])

    def committed() -> list[dict[str, Array]]:
        lives = [memory.live(slot, at) for slot, at in requests]
        return [{name: rows for name, rows in live.items() if name != "mtp.0.hidden"} for live in lives]

    before = committed()
    found = draft.propose(memory, requests, DEPTH)
    for now, then in zip(committed(), before, strict=True):
        assert_same_live(now, then)
    for tensor in draft.state:  # nobody else's page or slot was written
        assert np.isnan(memory.arrays[tensor.name][memory.rows(tensor, 3, range(tensor.rows))]).all()

    drafter = Drafter(UpTo(vars(v32.toy.raw), {name: w.numpy() for name, w in v32.toy.weights.items()}))
    drafter.observe(taps, stream, 0, position)
    tokens, logits = drafter.chain(DEPTH)
    assert_same_chain(found, {"tokens": np.array(tokens), "logits": logits})
    assert_same_chain(found, v32.toy.chain(taps, stream[:21], DEPTH), row=1)


def test_a_chain_behind_the_last_row_of_the_widest_table_is_finite_and_leaves_it_alone(v32: Family) -> None:
    """128 committed tokens in two pages, more than the model's length: every row of the chain lies beyond."""
    tokens = np.random.default_rng(9).integers(2, 319, size=129).tolist()
    draft, taps = v32.compiled, v32.toy.oracle(tokens)[1]
    memory = draft.seen(taps, tokens, [100, 28])
    before = memory.live(1, 128)
    found = draft.propose(memory, [(1, 128)], DEPTH)
    after = memory.live(1, 128)
    for name in ("mtp.0.latent", "mtp.0.index"):
        np.testing.assert_array_equal(after[name], before[name])
    assert np.isfinite(found["logits"]).all()
    assert_close(found["logits"][0, 0], v32.toy.chain(taps, tokens, 1)["logits"][0], 1e-5)


def test_tied_index_scores_of_draft_rows_go_to_the_lowest_position(
    tmp_path: Path, stream: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one index head half of the scores are exactly zero; the opposite rule gives other logits."""
    toy = Toy(write_checkpoint(tmp_path, T32, index_n_heads=1))
    taps, draft, tokens = toy.oracle(stream)[1], eager(toy), stream[:62]
    found = draft.propose(draft.seen(taps, tokens, [61]), [(1, 61)], DEPTH)
    assert_same_chain(found, toy.chain(taps, tokens, DEPTH))

    def last_first(score: Array) -> Array:
        return score.shape[1] - 1 - ranked(score[:, ::-1])

    monkeypatch.setattr("twostroke.tests.builder.deepseek_v32_reference.ranked", last_first)
    assert np.abs(found["logits"][0] - toy.chain(taps, tokens, DEPTH)["logits"]).max() > 1e-3


def test_depths_that_a_method_cannot_draft_are_refused(tmp_path: Path, family: Family, f4_engine_dir: Path) -> None:
    drafts = TARGETS[family.toy.config.model_type].drafts
    for depth in (0, -1, 17):
        with pytest.raises(BuildError, match=f"--max-draft-len is {depth}; accepted for mtp: 1 to 16"):
            drafts["mtp"](family.toy.config, depth)
    assert drafts["mtp"](family.toy.config, None).block_size == 3
    assert main(["build", str(family.toy.checkpoint.folder), "-o", str(tmp_path / "no"), "--max-draft-len", "99"]) == 2
    assert not (tmp_path / "no").exists()
    with pytest.raises(BuildError, match="no draft method"):
        drafts["none"](family.toy.config, 3)
    dspark = Toy(f4_engine_dir.parent / "checkpoint").config
    drafts = TARGETS["deepseek_v4"].drafts
    assert drafts["dspark"](dspark, None).block_size == drafts["dspark"](dspark, 5).block_size == 5
    with pytest.raises(BuildError, match=r"--max-draft-len is 7, but dspark .* dspark_block_size = 5"):
        build(f4_engine_dir.parent / "checkpoint", tmp_path / "engine", BuildOptions(max_draft_len=7))
