"""`twostroke inspect` of a checkpoint: its numbers are those of the release and of the engine that would be built, and
every problem of a folder is found in one pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twostroke.__main__ import main
from twostroke.builder.checkpoint import INDEX
from twostroke.builder.inspection import inspect_checkpoint, render
from twostroke.engines.errors import CheckpointError
from twostroke.engines.loading import LoadedEngine
from twostroke.runtime.inspection import inspect_engine
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.state import State
from twostroke.tests.checkpoints import F4, REMOVED, with_overrides, write_checkpoint

# `spec/deepseek_v4.md` section 12.
FLASH_BYTES = {
    "embedding": 1_059_061_760,
    "output head": 1_059_061_760,
    "attention": 4_599_478_144,
    "CSA compressors": 352_687_104,
    "indexers": 275_353_344,
    "HCA compressors": 173_035_520,
    "hyper-connections": 135_537_756,
    "router": 90_218_496,
    "hash routing tables": 18_616_320,
    "shared experts": 1_082_196_480,
    "routed experts": 147_169_738_752,
    "norms": 712_704,
    "draft": 10_862_838_300,
}
FLASH_MILLIONS = {
    "embedding": 529.53,
    "attention": 4_599.12,
    "CSA compressors": 176.26,
    "indexers": 225.73,
    "HCA compressors": 85.21,
    "hyper-connections": 33.88,
    "router": 45.10,
    "hash routing tables": 2.33,
    "shared experts": 1_082.13,
    "routed experts": 277_025.39,
    "norms": 0.36,
}


def made(folder: Path, model: str, *options: str) -> Path:
    assert main(["make-checkpoint", "--model", model, "-o", str(folder), "--sparse", *options]) == 0
    return folder


def inspected(folder: Path, capsys: pytest.CaptureFixture[str], code: int, *options: str) -> tuple[Any, str]:
    """(JSON on stdout, stderr) of a run that ends with `code`."""
    capsys.readouterr()
    assert main(["inspect", str(folder), "--json", *options]) == code
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Changes the header of a shard in place: the new one is no longer than the old."""
    with open(path, "r+b") as shard:
        length = int.from_bytes(shard.read(8), "little")
        header = json.loads(shard.read(length))
        edit(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= length
        shard.seek(8)
        shard.write(text + b" " * (length - len(text)))


def damage(folder: Path) -> tuple[list[str], int]:
    """Deletes a shard, alters a header and renames an index entry; what each is called, how many problems they are."""
    index = json.loads((folder / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    deleted, altered = files[-1], files[0]
    (folder / deleted).unlink()
    turned = next(name for name, file in index["weight_map"].items() if file == altered and name.endswith("hc_attn_fn"))
    edit_header(folder / altered, lambda header: header[turned]["shape"].reverse())
    renamed = next(name for name, file in index["weight_map"].items() if file == altered and name.endswith("hc_ffn_fn"))
    index["weight_map"] = {f"{n}_x" if n == renamed else n: file for n, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    return [
        f"shard {deleted} is missing",
        f"tensor {turned} has shape",
        f"{INDEX} says tensor {renamed}_x is in {altered}, which lacks it; no shard has it",
        f"tensor {renamed} is in {altered}, but {INDEX} does not name it",
    ], 4


def check_damage_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named, count = damage(folder)
    report, err = inspected(folder, capsys, 2)
    for words in named:
        assert [problem for problem in report["problems"] if problem.startswith(words)], words
    assert len(report["problems"]) == count, "what a deleted shard held is no problem of its own"
    assert err.count("\n") == 1
    assert f"{folder} has 4 problems, first: shard" in err


# Problems


def test_a_deleted_shard_an_altered_header_and_a_renamed_index_entry_are_each_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_damage_is_found(made(tmp_path / "toy", "v4-flash-0731", "--scale", "0.03"), capsys)


def test_problems_of_every_kind_are_found_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "toy", "v3.2", "--scale", "0.02")
    first, second, third = sorted(folder.glob("*.safetensors"))
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    plain = next(name for name, file in names.items() if file == first.name and name.endswith("layernorm.weight"))
    half = next(name for name, file in names.items() if file == second.name and name.endswith("_proj.weight"))

    def other_dtype(header: dict[str, Any]) -> None:
        header[plain]["dtype"] = "F16"

    def negative(header: dict[str, Any]) -> None:
        header[half]["shape"][0] = -1

    edit_header(first, other_dtype)
    edit_header(second, negative)
    os.truncate(third, third.stat().st_size - 8)
    (folder / "model-99999.safetensors").write_bytes(b"")
    problems = "\n".join(inspected(folder, capsys, 2)[0]["problems"])
    for words in (
        f"tensor {plain} has dtype F16; accepted: BF16, F32",
        f"shard {second.name}, tensor {half}: shape [-1, ",
        f"shard {third.name} is truncated",
        "model-99999.safetensors lies in the folder",
    ):
        assert words in problems
    assert problems.count("\n") == 3
    assert main(["inspect", str(folder)]) == 2
    shown = capsys.readouterr().out
    assert "problems: 4\n" in shown
    assert all(f"  {problem}" in shown for problem in problems.splitlines())


def test_a_draft_that_config_and_files_disagree_about_is_one_problem_among_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def drop(tensors: dict[str, Any]) -> None:
        del tensors["norm.weight"]

    without = {name: REMOVED for name in F4 if name.startswith("dspark_")}
    folder = write_checkpoint(tmp_path, F4, edit=drop)
    (folder / "config.json").write_text(json.dumps(with_overrides(F4, torch_dtype="float32", **without)))
    report, _ = inspected(folder, capsys, 2)
    assert len(report["problems"]) == 2
    assert "config and files contradict each other" in report["problems"][0]
    assert report["problems"][1] == "missing tensor norm.weight [64]"
    assert report["draft"] == "none"


def test_a_config_that_cannot_be_used_is_said_together_with_what_is_wrong_with_the_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path, F4, hidden_size=64)
    (folder / "config.json").write_text("{")
    assert main(["inspect", str(folder)]) == 2
    assert "config.json is not JSON" in capsys.readouterr().err
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(folder)
    assert len(caught.value.problems) == 2
    assert main(["inspect", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "config.json is not JSON" in err
    assert "shard model-00002-of-00002.safetensors is missing" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--batch-size", "0"], "--batch-size is 0; expected at least 1"),
        (["--seq-len", "129"], "--seq-len is 129; accepted: 2 to 128, the config's max_position_embeddings"),
    ],
)
def test_a_load_that_cannot_be_is_refused(
    tmp_path: Path, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(write_checkpoint(tmp_path, F4)), *options]) == 2
    assert says in capsys.readouterr().err


# Numbers


def test_a_checkpoint_is_said_to_take_what_its_engine_takes(f4_engine: LoadedEngine) -> None:
    manifest, engine_report = f4_engine.manifest, inspect_engine(f4_engine.folder, batch_size=3, seq_len=90)
    report = inspect_checkpoint(f4_engine.folder.parent / "checkpoint", batch_size=3)
    assert report["state"] == {name: engine_report["state"][name] for name in report["state"]}
    assert report["build"]["steps"] == list(manifest.steps)
    weights = engine_report["weights"]
    assert report["memory"]["weights"] == weights["bytes"]
    assert report["build"]["bytes_referred_to"] == weights["bytes_in_checkpoint"]
    assert report["build"]["weights_referred_to"] + report["build"]["weights_written"] == weights["bindings"]
    limits = RuntimeConfig(max_batch_size=3, max_seq_len=90).limits(manifest)
    held = State(manifest.state, limits.slots, limits.pages + 1).nbytes
    assert engine_report["memory"]["state"] == held
    assert engine_report["memory"]["total"] == held + engine_report["weights"]["bytes"]


def test_the_report_counts_two_fp4_values_a_byte_and_no_scale_as_a_parameter(tmp_path: Path) -> None:
    quantised = inspect_checkpoint(made(tmp_path / "q", "v4-flash-0731", "--scale", "0.02"))
    plain = inspect_checkpoint(made(tmp_path / "p", "v4-flash-0731", "--scale", "0.02", "--dtype", "bf16"))
    assert quantised["parameters"] == plain["parameters"]
    assert quantised["bytes"] < plain["bytes"]
    assert quantised["quantisation"].startswith("fp8 e4m3 in blocks of 128x128; packed fp4")
    assert plain["quantisation"] == "none: BF16, F32, I64"
    for name, part in plain["components"].items():
        assert quantised["components"][name]["parameters"] == part["parameters"]
    assert quantised["problems"] == plain["problems"] == []


def test_the_text_shows_every_number_of_the_report(tmp_path: Path) -> None:
    report = inspect_checkpoint(write_checkpoint(tmp_path, F4), batch_size=2)
    text = render(report)
    assert "draft: dspark\ndraft_block_size: 5\n" in text
    assert "problems: none" in text
    for part, numbers in report["components"].items():
        assert [
            line for line in text.splitlines() if line.split() == [*part.split(), *(f"{n:,}" for n in numbers.values())]
        ]
    for name in ("state", "build", "memory"):
        for key, value in report[name].items():
            assert f"  {key}: {', '.join(value) if isinstance(value, list) else value}\n" in text


# Full size


def inspect_in_a_process(folder: Path) -> tuple[Any, float, int]:
    """(report, CPU seconds, peak resident bytes)."""
    code = (
        "import resource, sys; from twostroke.__main__ import main; code = main(sys.argv[1:]); "
        "used = resource.getrusage(resource.RUSAGE_SELF); "
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "inspect", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak = done.stderr.split()[-2:]
    return json.loads(done.stdout), float(seconds), int(peak)


@pytest.mark.slow
def test_the_full_size_0731_is_inspected_in_20_seconds_and_has_the_published_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path / "full", "v4-flash-0731")
    report, seconds, peak = inspect_in_a_process(folder)
    assert (report["tensors"], report["bytes"]) == (72_317, 166_878_536_440)
    assert {name: part["bytes"] for name, part in report["components"].items()} == FLASH_BYTES
    for name, millions in FLASH_MILLIONS.items():
        assert report["components"][name]["parameters"] / 1e6 == pytest.approx(millions, abs=0.005)
    assert round(report["parameters"] / 1e7) == 30418
    assert (report["draft"], report["draft_block_size"], report["problems"]) == ("dspark", 5, [])
    # Section 14 in fp32 rows: 21 * (512 + 128) / 4 floats a token in pages.
    assert report["state"]["bytes_per_token"] == 21 * (512 + 128)
    assert seconds < 20
    assert peak < 1.5 * 2**30
    check_damage_is_found(folder, capsys)


@pytest.mark.slow
def test_the_full_size_v32_is_inspected_in_20_seconds_and_has_the_published_numbers(tmp_path: Path) -> None:
    report, seconds, peak = inspect_in_a_process(made(tmp_path / "full", "v3.2"))
    parts = report["components"]
    assert report["tensors"] == 92_425
    assert round((report["bytes"] - parts["draft"]["bytes"]) / 1e7) == 67_403
    assert round(parts["draft"]["bytes"] / 1e7) == 1_544
    assert round(report["parameters"] / 1e6) == 685_355
    assert round((report["parameters"] - parts["draft"]["parameters"]) / 1e6) == 671_878
    assert parts["indexers"]["parameters"] == 61 * (13_500_416 + 458_752 + 256)
    assert parts["attention"]["parameters"] == 61 * (187_105_280 + 1536 + 512)
    assert report["state"]["bytes_per_token"] == 62 * 4 * (512 + 64 + 128)
    assert (report["draft"], report["problems"]) == ("mtp", [])
    assert seconds < 20
    assert peak < 1.5 * 2**30
