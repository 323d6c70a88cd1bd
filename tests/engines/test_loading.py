"""Every reason not to load an engine directory is one sentence that names the path and says what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from twostroke.__main__ import main
from twostroke.engines.errors import EngineError
from twostroke.engines.file_records import LARGE, file_record
from twostroke.engines.loading import load_engine_directory, map_weights
from twostroke.engines.manifest import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    WeightRecord,
    WeightsIndex,
    encode,
    read_manifest,
    read_weights_index,
)

FILES = ["target.portable.onnx", "propose.plugin.onnx", "weights.bin", "tokenizer.json", WEIGHTS_FILE]


@pytest.fixture
def engine(f4_engine_dir: Path, tmp_path: Path) -> Path:
    """A copy of an engine directory and of the checkpoint it refers to."""
    shutil.copytree(f4_engine_dir, tmp_path / "engine")
    shutil.copytree(f4_engine_dir.parent / "checkpoint", tmp_path / "checkpoint")
    index = read_weights_index(tmp_path / "engine")
    here = {shard: str(tmp_path / "checkpoint" / Path(shard).name) for shard in index.shards}
    weights = {n: msgspec.structs.replace(r, file=here.get(r.file, r.file)) for n, r in index.weights.items()}
    shards = {here[shard]: record for shard, record in index.shards.items()}
    (tmp_path / "engine" / WEIGHTS_FILE).write_bytes(encode(WeightsIndex(weights, shards)))
    reseal(tmp_path / "engine")
    return tmp_path / "engine"


def reseal(folder: Path, edit: Callable[[dict[str, Any]], None] = lambda config: None) -> None:
    """Makes the manifest agree with the files again, after an optional edit of its JSON."""
    manifest = read_manifest(folder)
    files = {n: file_record(folder / n) for n in manifest.files}
    config = json.loads(encode(msgspec.structs.replace(manifest, files=files)))
    edit(config)
    (folder / CONFIG_FILE).write_text(json.dumps(config))


def refusal(folder: Path) -> str:
    with pytest.raises(EngineError) as caught:
        load_engine_directory(folder)
    message = str(caught.value)
    assert str(folder) in message or "step" in message, "names the place"
    return message


def test_the_copy_loads(engine: Path) -> None:
    loaded = load_engine_directory(engine)
    assert list(loaded.engines) == ["target", "observe", "propose"]


def test_progress_counts_the_steps(engine: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_engine_directory(str(engine), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nowhere")
    assert "no such engine directory" in message
    assert "twostroke build CHECKPOINT -o DIR" in message


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    message = refusal(tmp_path)
    assert "is not an engine directory: config.json is missing" in message
    assert "twostroke build" in message


def test_a_checkpoint_given_as_an_engine(engine: Path) -> None:
    message = refusal(engine.parent / "checkpoint")
    assert "if this is a checkpoint, build it first with `twostroke build`" in message


def test_a_manifest_of_another_schema(engine: Path) -> None:
    reseal(engine, lambda config: config.update(schema=2))
    message = refusal(engine)
    assert f"{engine / CONFIG_FILE}: schema 2 found, 1 expected" in message
    assert "rebuild the engine" in message


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda c: c.update(extra=1), "extra"),
        (lambda c: c.pop("steps"), "steps"),
        (lambda c: c["build_config"].update(vocab_size="many"), "$.build_config.vocab_size"),
        (lambda c: c["state"][0].update(addressing="heap"), "$.state[0].addressing"),
    ],
)
def test_a_manifest_with_a_wrong_field_names_it(
    engine: Path, edit: Callable[[dict[str, Any]], None], place: str
) -> None:
    reseal(engine, edit)
    message = refusal(engine)
    assert str(engine / CONFIG_FILE) in message
    assert place in message


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"null"])
@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_json_that_is_none(engine: Path, name: str, content: bytes) -> None:
    (engine / name).write_bytes(content)
    assert f"{engine / name} cannot be read" in refusal(engine)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(engine: Path, name: str) -> None:
    (engine / name).unlink()
    message = refusal(engine)
    assert f"{name} is missing" in message


@pytest.mark.parametrize("name", FILES[:-1])
@pytest.mark.parametrize("cut", [1, 100, 0.5, 1.0])
def test_a_truncated_file(engine: Path, name: str, cut: float) -> None:
    path = engine / name
    size = path.stat().st_size
    kept = size - (cut if isinstance(cut, int) else int(cut * size))
    with open(path, "r+b") as file:
        file.truncate(kept)
    assert f"{path}: {kept} bytes found, {size} expected; rebuild the engine" in refusal(engine)


@pytest.mark.parametrize("name", FILES[:-1])
def test_one_changed_byte(engine: Path, name: str) -> None:
    path = engine / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    message = refusal(engine)
    assert f"{path}: the contents changed since the build" in message
    assert "rebuild the engine" in message


@pytest.fixture
def large(engine: Path) -> Path:
    """The engine with weights.bin grown beyond what is read whole at load; holes follow the weights."""
    with open(engine / "weights.bin", "r+b") as file:
        file.truncate(LARGE + 12345)
    reseal(engine)
    return engine


def test_a_large_file_is_checked_by_its_fingerprint_at_load_and_in_full_on_demand(
    large: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One byte where no block of the fingerprint is."""
    assert main(["inspect", str(large), "--verify"]) == 0
    assert "verified     every file has the hash it was built with" in capsys.readouterr().out
    with open(large / "weights.bin", "r+b") as file:
        file.seek(200_000_000)
        file.write(b"!")
    load_engine_directory(large)
    assert main(["inspect", str(large)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(large), "--verify"]) == 2
    said = capsys.readouterr().err
    assert f"{large / 'weights.bin'}: the contents changed since the build (SHA-256 differs); rebuild" in said


def test_a_large_file_with_a_changed_weight_does_not_load(large: Path) -> None:
    with open(large / "weights.bin", "r+b") as file:
        file.write(b"!")
    assert f"{large / 'weights.bin'}: the contents changed since the build (fingerprint differs)" in refusal(large)


def test_verify_of_a_checkpoint_is_refused(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(engine.parent / "checkpoint"), "--verify"]) == 2
    assert "--verify is for engine directories" in capsys.readouterr().err


def test_a_changed_weights_index(engine: Path) -> None:
    path = engine / WEIGHTS_FILE
    path.write_text(path.read_text().replace("as stored", "as storeD", 1))
    assert f"{path}: the contents changed" in refusal(engine)


def a_shard(engine: Path) -> Path:
    return sorted((engine.parent / "checkpoint").glob("*.safetensors"))[-1]


def test_a_missing_shard(engine: Path) -> None:
    shard = a_shard(engine)
    shard.unlink()
    assert f"{engine}: checkpoint shard {shard} is missing; restore it or rebuild the engine" in refusal(engine)


@pytest.mark.parametrize("change", ["header", "shorter", "longer", "empty"])
def test_a_changed_shard(engine: Path, change: str) -> None:
    shard = a_shard(engine)
    data = bytearray(shard.read_bytes())
    if change == "header":
        data[20] ^= 1
    elif change == "shorter":
        del data[-4:]
    elif change == "longer":
        data += bytes(4)
    else:
        data.clear()
    shard.write_bytes(data)
    assert f"{engine}: checkpoint shard {shard} changed since the build; rebuild the engine" in refusal(engine)


def test_a_step_for_an_engine_nobody_has(engine: Path) -> None:
    reseal(engine, lambda config: config["steps"]["observe"].update(engine="abacus"))
    message = refusal(engine)
    assert "step observe is for engine 'abacus'" in message
    assert "this installation has onnxruntime" in message


def rename_binding(config: dict[str, Any]) -> None:
    binding = next(b for b in config["steps"]["target"]["bindings"] if b["name"] == "positions")
    binding["name"] = "places"


@pytest.mark.parametrize(("field", "value"), [("stage", "final"), ("device", "cuda:9.0")])
def test_a_step_of_another_stage_or_device(engine: Path, field: str, value: str) -> None:
    reseal(engine, lambda config: config["steps"]["observe"].update({field: value}))
    message = refusal(engine)
    assert f"step observe is of stage {value if field == 'stage' else 'portable'}" in message
    assert "runs portable steps on cpu" in message


@pytest.mark.parametrize("alias", [None, "layers.1.window"])
def test_a_state_that_the_manifest_aliases_otherwise(engine: Path, alias: str | None) -> None:
    def edit(config: dict[str, Any]) -> None:
        bindings = {binding["name"]: binding for binding in config["steps"]["target"]["bindings"]}
        bindings["layers.0.window.next"]["alias"] = alias

    reseal(engine, edit)
    assert f"layers.0.window.next updates {alias} in the manifest, layers.0.window in the graph" in refusal(engine)


def test_a_step_whose_file_nobody_recorded(engine: Path) -> None:
    """Its contents would go unchecked."""
    reseal(engine, lambda config: config["files"].pop("propose.portable.onnx"))
    assert "step propose is in propose.portable.onnx, which is none of the directory's files" in refusal(engine)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda c: c["build_config"].update(tokens_per_page=0),
            "build_config.tokens_per_page is 0, expected 1 or more",
        ),
        (lambda c: c["steps"].pop("target"), "steps holds observe, propose, expected target among them"),
        (lambda c: c["speculative"].update(method="none"), "speculative.method is none, draft_len 5"),
        (lambda c: c["speculative"].update(draft_len=9), "draft_len is 9, but step propose drafts 5"),
        (lambda c: c["speculative"].update(draft_len=0), "speculative.method is dspark, draft_len 0"),
    ],
)
def test_values_that_no_build_writes(engine: Path, edit: Callable[[dict[str, Any]], None], words: str) -> None:
    reseal(engine, edit)
    message = refusal(engine)
    assert words in message
    assert "rebuild the engine" in message


def test_a_manifest_that_names_other_bindings_than_the_graph(engine: Path) -> None:
    reseal(engine, rename_binding)
    message = refusal(engine)
    assert "step target: graph and manifest disagree on bindings places, positions" in message
    assert "rebuild the engine" in message


def test_a_graph_that_onnx_runtime_refuses(engine: Path) -> None:
    path = engine / "propose.portable.onnx"
    path.write_bytes(b"not a graph")
    reseal(engine)
    message = refusal(engine)
    assert f"{path}: ONNX Runtime" in message
    assert "cannot load it" in message


def edit_weight(engine: Path, name: str, **changes: Any) -> None:
    """Replaces fields of one weight's record, or drops the record."""
    index = read_weights_index(engine)
    weights = dict(index.weights)
    if changes:
        weights[name] = msgspec.structs.replace(weights[name], **changes)
    else:
        del weights[name]
    (engine / WEIGHTS_FILE).write_bytes(encode(WeightsIndex(weights, index.shards)))
    reseal(engine)


def test_a_weight_nobody_can_find(engine: Path) -> None:
    edit_weight(engine, "layers.1.ffn.experts.w1.weight")
    assert "step target: weight layers.1.ffn.experts.w1.weight is not in the weights index" in refusal(engine)


@pytest.mark.parametrize("changes", [{"offset": 1 << 40}, {"offset": -64}, {"bytes": 12}])
def test_a_weight_outside_its_file(engine: Path, changes: dict[str, int]) -> None:
    edit_weight(engine, "layers.1.ffn.experts.w1.weight", **changes)
    message = refusal(engine)
    assert f"{engine / 'weights.bin'}: weight layers.1.ffn.experts.w1.weight should be 32768 bytes" in message


def test_a_weight_of_another_shape(engine: Path) -> None:
    edit_weight(engine, "layers.1.ffn.experts.w1.weight", shape=(4, 64, 32))
    message = refusal(engine)
    assert (
        "weight layers.1.ffn.experts.w1.weight has shape (4, 64, 32) in the weights index, (4, 32, 64) in the graph"
        in message
    )


def test_a_weight_of_another_dtype(engine: Path) -> None:
    edit_weight(engine, "layers.1.ffn.experts.w1.weight", dtype="int32")
    assert "layers.1.ffn.experts.w1.weight is int32 on cpu, expected float32" in refusal(engine)


def test_a_weight_in_a_file_that_is_not_listed(engine: Path) -> None:
    edit_weight(engine, "layers.1.ffn.experts.w1.weight", file="more.bin")
    assert "weight layers.1.ffn.experts.w1.weight is in more.bin, which is missing" in refusal(engine)


def test_refusals_come_before_any_session_is_made(engine: Path) -> None:
    """The last file checked is wrong, and no step has been loaded when that is said."""
    shard = a_shard(engine)
    shard.write_bytes(b"")
    seen: list[str] = []
    with pytest.raises(EngineError):
        load_engine_directory(engine, progress=seen.append)
    assert seen == []


def test_mapped_weights_are_views_that_nobody_can_write(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32)
    (tmp_path / "weights.bin").write_bytes(bytes(8) + values.tobytes())
    record = WeightRecord("weights.bin", 8, 48, "float32", (3, 4), "convert")
    found = map_weights(tmp_path, WeightsIndex({"w": record}))["w"]
    np.testing.assert_array_equal(found.owner, values.reshape(3, 4))
    assert not found.owner.flags.writeable
    assert found.shape == (3, 4)
