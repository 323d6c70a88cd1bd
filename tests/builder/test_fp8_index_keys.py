"""V3.2 with index keys in fp8: the network of the quantised reference, its memory layer by layer, its MTP layer, and
what a build records and refuses."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from twostroke.__main__ import main
from twostroke.builder.build import BuildOptions, build
from twostroke.builder.eager import EagerEngine
from twostroke.builder.networks.deepseek_v32 import DeepseekV32
from twostroke.engines.base import Buffer, Engine
from twostroke.engines.errors import BuildError, EngineError
from twostroke.engines.loading import LoadedEngine, load_engine_directory
from twostroke.engines.manifest import CONFIG_FILE, StateTensor, encode, read_manifest
from twostroke.plugins.nsa import reference
from twostroke.runtime.inspection import inspect_engine, render
from twostroke.runtime.state import State
from twostroke.tests.builder import mtp_runs
from twostroke.tests.builder.deepseek_v32_reference import Memory as ReferenceMemory
from twostroke.tests.builder.flat_runs import (
    Array,
    Chunk,
    Memory,
    Toy,
    assert_close,
    assert_same_live,
    every,
    feed,
)
from twostroke.tests.checkpoints import F4_PLAIN, T32, write_checkpoint
from twostroke.tests.plugins.nsa import fp8_reference

DEPTH = 5


@pytest.fixture(scope="module")
def toy(t32_fp8_engine: LoadedEngine) -> Toy:
    """The checkpoint of the fp8 engine; its oracle quantises."""
    return Toy(t32_fp8_engine.folder.parent / "checkpoint", "fp8_e4m3")


@pytest.fixture(scope="module")
def eager(toy: Toy) -> EagerEngine:
    return toy.target(max_seq_len=96)


@pytest.fixture(scope="module")
def state(eager: EagerEngine) -> tuple[StateTensor, ...]:
    return eager.spec.state


@pytest.fixture(scope="module", params=["eager", "onnxruntime"])
def target(request: pytest.FixtureRequest, eager: EagerEngine, t32_fp8_engine: LoadedEngine) -> Engine:
    return eager if request.param == "eager" else t32_fp8_engine.engines["target"]


def fresh(state: tuple[StateTensor, ...]) -> Memory:
    return Memory(state, pages_per_slot=2)


def parts(memory: Memory, name: str, slot: int, count: int) -> tuple[Array, Array]:
    """Codes [count, 128] and scales [count] of a slot's first tokens, read as the layout says."""
    pages = [fp8_reference.parsed(memory.arrays[name][page].tobytes(), 64) for page in memory.table[slot]]
    codes, scales = (np.concatenate(each)[:count] for each in zip(*pages, strict=True))
    return codes, scales


@pytest.mark.parametrize("size", [90, 13, 1])
def test_logits_are_those_of_the_quantised_reference(
    target: Engine, state: tuple[StateTensor, ...], toy: Toy, stream: list[int], size: int
) -> None:
    """To 1e-5, from the packed pages, whole and in chunks; the unquantised network is another one above top-k (8).

    A value in the last bit's reach of a tie may be rounded to the other side and move a choice: five rows may differ.
    """
    found = feed(target, fresh(state), 1, stream[:90], every(size))["logits"]
    expected = toy.oracle(stream[:90])[0]
    plain = Toy(toy.checkpoint.folder).oracle(stream[:90])[0]
    off, off_plain = (np.abs(found - rows).max(1) > 1e-5 * rows.std() for rows in (expected, plain))
    assert off.sum() <= 5
    assert not off[:8].any()
    assert not off_plain[:8].any(), "every row is chosen"
    assert off_plain[8:].sum() > 60


def test_pages_hold_the_references_keys(
    target: Engine, state: tuple[StateTensor, ...], toy: Toy, stream: list[int]
) -> None:
    """Codes and scales of all layers; of a thousand codes one may be a step away, by a tie."""
    memory, kept = fresh(state), [ReferenceMemory() for _ in range(3)]
    feed(target, memory, 1, stream[:90], [90])
    assert toy.reference is not None
    toy.reference.target(stream[:90], kept)
    for layer, expected in enumerate(kept):
        codes, scales = parts(memory, f"layers.{layer}.index", 1, 90)
        rows = expected.rows[3]
        np.testing.assert_array_equal(scales, fp8_reference.scales(rows))
        steps = np.abs(codes.astype(int) - fp8_reference.codes(rows / scales[:, None]))
        assert steps.max() <= 1
        assert steps.sum() <= rows.size / 1000


# One region a layer.


def test_no_two_layers_share_memory(t32_fp8_engine: LoadedEngine) -> None:
    """A-08, by address: what the runtime allocates and an engine is bound to."""
    allocated = State(t32_fp8_engine.manifest.state, 4, 7).arrays
    regions = sorted((Buffer.of(a).pointer, Buffer.of(a).pointer + a.nbytes, name) for name, a in allocated.items())
    assert len([name for *_, name in regions if name.endswith(".index")]) == 4, "three layers and the MTP layer"
    for (_, end, first), (start, _, second) in pairwise(regions):
        assert end <= start, f"{first} and {second} overlap"


def test_each_layer_selects_as_with_a_buffer_of_its_own(
    eager: EagerEngine, t32_fp8_engine: LoadedEngine, stream: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-08. 40 tokens, top-k 8, in two steps, so that keys of the first are read in the second. What every layer was
    given is given to it again, alone, over memory of its own: the same keys, scales and choices, to the bit."""
    chosen: list[torch.Tensor] = []
    plain = reference.best_rows

    def watching(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = plain(*arguments)
        chosen.append(found[0])
        return found

    monkeypatch.setattr(reference, "best_rows", watching)
    network = eager.spec.module
    assert isinstance(network, DeepseekV32)
    layers = [layer.self_attn for layer in network.model.layers]
    calls: list[tuple[Any, ...]] = []
    hooks = [layer.register_forward_pre_hook(lambda _, given: calls.append(given)) for layer in layers]
    together = fresh(eager.spec.state)
    feed(eager, together, 1, stream[:40], [25, 15])
    for hook in hooks:
        hook.remove()
    expected, chosen[:] = list(chosen), []
    assert len(expected) == len(calls) == 6
    assert not torch.equal(expected[3], expected[4]), "layers choose differently"

    for number, layer in enumerate(layers):
        alone = fresh(network.layer_state[number])
        held = tuple(torch.from_numpy(array) for array in alone.arrays.values())
        for x, flat, _ in calls[number::3]:
            with torch.no_grad():
                _, held = layer(x, flat, held)
        alone.arrays = {name: after.numpy() for name, after in zip(alone.arrays, held, strict=True)}
        assert torch.equal(torch.cat(chosen), torch.cat(expected[number::3]))
        for found, own in zip(
            parts(together, f"layers.{number}.index", 1, 40), parts(alone, f"layers.{number}.index", 1, 40), strict=True
        ):
            np.testing.assert_array_equal(found, own)
        chosen.clear()


def test_layers_over_one_buffer_would_be_noticed(
    t32_fp8_engine: LoadedEngine, state: tuple[StateTensor, ...], stream: list[int]
) -> None:
    """A-08: what was reported is to be seen, and only above top-k."""
    target, logits = t32_fp8_engine.engines["target"], []
    for aliased in (False, True):
        memory = fresh(state)
        for layer in (1, 2) if aliased else ():
            memory.arrays[f"layers.{layer}.index"] = memory.arrays["layers.0.index"]
        logits.append(feed(target, memory, 1, stream[:40], [5, 3, 17, 15])["logits"])
    assert_close(logits[0][:8], logits[1][:8], 1e-5)
    assert np.abs(logits[0][8:] - logits[1][8:]).max() > 0.1


# The MTP layer keeps its own keys the same way.


@pytest.fixture(scope="module")
def draft(t32_fp8_engine: LoadedEngine) -> mtp_runs.Draft:
    return mtp_runs.compiled(t32_fp8_engine)


@pytest.fixture(scope="module")
def taps(toy: Toy, stream: list[int]) -> Array:
    return toy.oracle(stream)[1]


def test_draft_logits_are_those_of_the_quantised_reference(
    draft: mtp_runs.Draft, toy: Toy, taps: Array, stream: list[int]
) -> None:
    """Depths 1 to 3 behind whole and chunked prompts, to 1e-5; a tie may move one of the eighteen. The plain layer
    drafts otherwise."""
    off = off_plain = 0
    plain = Toy(toy.checkpoint.folder)
    for sizes in ([9], [40], [33, 33], [1] * 21, [61, 5], [90]):
        tokens = stream[: sum(sizes) + 1]
        found = draft.propose(draft.seen(taps, tokens, sizes), [(1, sum(sizes))])["logits"][0]
        quantised, unquantised = (each.chain(taps, tokens)["logits"] for each in (toy, plain))
        off += int((np.abs(found - quantised).max(1) > 1e-5 * quantised.std()).sum())
        off_plain += int((np.abs(found - unquantised).max(1) > 1e-5 * quantised.std()).sum())
    assert off <= 1
    assert off_plain > 6


@pytest.mark.parametrize("kept", range(1, DEPTH + 2))
@pytest.mark.parametrize("start", [19, 58])
def test_draft_memory_and_chain_after_rejection_are_those_of_committed_tokens(
    draft: mtp_runs.Draft, taps: Array, stream: list[int], start: int, kept: int
) -> None:
    """To the bit, within a page and across one; a chain left its rows behind before every block."""
    memory = draft.seen(taps, stream[: start + 1], [start])
    for position in (start, start + kept):
        draft.propose(memory, [(1, position)], DEPTH)
        rows = stream[position : position + DEPTH + 1]
        draft.observe(memory, taps, stream, [Chunk(1, position, rows, dead=DEPTH + 1 - kept)])
        at = position + kept
        alone = draft.seen(taps, stream[: at + 1], [at])
        assert_same_live(memory.live(1, at), alone.live(1, at))
        expected = draft.propose(alone, [(1, at)], DEPTH)
        for name, found in draft.propose(memory, [(1, at)], DEPTH).items():
            np.testing.assert_array_equal(found, expected[name], err_msg=name)


# What a build records, and what is refused.


def test_the_manifest_and_inspect_say_how_index_keys_are_kept(t32_fp8_engine: LoadedEngine) -> None:
    manifest = t32_fp8_engine.manifest
    assert manifest.build_config.index_key_dtype == "fp8_e4m3"
    packed = {tensor.name: tensor for tensor in manifest.state if tensor.planes}
    assert list(packed) == ["layers.0.index", "layers.1.index", "layers.2.index", "mtp.0.index"]
    for tensor in packed.values():
        assert (tensor.dtype, tensor.layout, tensor.planes, tensor.line) == ("uint8", "indexk_132", (128, 4), 8448)
    bound = t32_fp8_engine.engines["next"].bindings["mtp.0.index"]
    assert (bound.dtype, bound.shape) == ("uint8", ("mtp.0.index.pages", 8448))
    report = inspect_engine(t32_fp8_engine.folder)
    assert report["attention"]["index_key_dtype"] == "fp8_e4m3"
    assert report["state"]["packed"] == {"indexk_132": {"tensors": 4, "bytes_per_token": 132.0}}
    assert report["state"]["bytes_per_token"] == 4 * (132 + 4 * (16 + 8))
    said = render(report)
    assert "memory in float32, index keys in fp8_e4m3" in said
    assert "indexk_132: 4 tensors, 132 bytes a token each" in said


def test_memory_of_other_numerics_is_refused_by_every_step(
    t32_fp8_engine: LoadedEngine, t32_mtp_engine: LoadedEngine
) -> None:
    """State allocated for one engine never runs through the other, whichever way."""
    for ours, other in ((t32_fp8_engine, t32_mtp_engine), (t32_mtp_engine, t32_fp8_engine)):
        memory = State(other.manifest.state, 2, 3).bindings()
        for step, name in (("target", "layers.0.index"), ("observe", "mtp.0.index"), ("next", "mtp.0.index")):
            engine = ours.engines[step]
            shapes = {
                n: [d if isinstance(d, int) else 2 for d in b.shape]
                for n, b in engine.bindings.items()
                if b.role in ("input", "output") and n not in memory
            }
            inputs = {n: np.zeros(shape, engine.bindings[n].dtype) for n, shape in shapes.items()}
            found, expected = memory[name].dtype, engine.bindings[name].dtype
            with pytest.raises(EngineError, match=rf"{step}: \S*index is {found} on cpu, expected {expected}"):
                engine.bind({n: Buffer.of(array) for n, array in {**inputs, **memory}.items()})


def test_a_manifest_that_declares_other_memory_than_its_steps_use_does_not_load(
    t32_fp8_engine: LoadedEngine, t32_mtp_engine: LoadedEngine, tmp_path: Path
) -> None:
    folder = tmp_path / "engine"
    shutil.copytree(t32_fp8_engine.folder, folder)
    manifest = msgspec.structs.replace(read_manifest(folder), state=t32_mtp_engine.manifest.state)
    (folder / CONFIG_FILE).write_bytes(encode(manifest))
    refusal = (
        r"step target keeps layers\.0\.index as uint8 lines of 8448, the manifest declares float32 lines of 16 \(rows\)"
    )
    with pytest.raises(EngineError, match=refusal):
        load_engine_directory(folder)


def test_what_cannot_be_kept_in_fp8_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = write_checkpoint(tmp_path / "odd", T32, index_head_dim=24)
    assert main(["build", str(odd), "-o", str(tmp_path / "no"), "--index-key-dtype", "fp8_e4m3"]) == 2
    assert "index_head_dim is 24: fp8 keys are rotated by a Hadamard matrix" in capsys.readouterr().err
    v4 = write_checkpoint(tmp_path / "v4", F4_PLAIN)
    with pytest.raises(BuildError, match="fp8_e4m3, but deepseek_v4 keeps its index keys in float32"):
        build(v4, tmp_path / "no", BuildOptions(index_key_dtype="fp8_e4m3"))
    with pytest.raises(BuildError, match="int8, but deepseek_v32 keeps its index keys in float32 or fp8_e4m3"):
        build(odd, tmp_path / "no", BuildOptions(index_key_dtype="int8"))
    assert not (tmp_path / "no").exists()


def test_keys_of_sixteen_features_take_twenty_bytes(tmp_path: Path) -> None:
    """By the command line, for a target without a draft."""
    folder = write_checkpoint(tmp_path / "checkpoint", T32, num_hidden_layers=1)
    line = ["build", str(folder), "-o", str(tmp_path / "engine"), "--draft", "none", "--index-key-dtype", "fp8_e4m3"]
    assert main(line) == 0
    config = json.loads((tmp_path / "engine" / CONFIG_FILE).read_text())
    assert config["build_config"]["index_key_dtype"] == "fp8_e4m3"
    report = inspect_engine(tmp_path / "engine")
    assert report["state"]["packed"] == {"indexk_20": {"tensors": 1, "bytes_per_token": 20.0}}
    load_engine_directory(tmp_path / "engine")
