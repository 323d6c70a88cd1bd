"""A build is whole or it is not there: killed builds, full disks, taken places, and what a whole one contains."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from twostroke.builder import build as build_module
from twostroke.builder.build import BuildOptions, build
from twostroke.builder.engine_directory import check_space, staging
from twostroke.engines.errors import BuildError, EngineError
from twostroke.engines.loading import load_engine_directory
from twostroke.engines.manifest import Manifest, read_manifest
from twostroke.tests.checkpoints import F4_PLAIN, with_overrides, write_checkpoint

# One layer, no draft: a second to export.
ONE_LAYER = with_overrides(
    F4_PLAIN, num_hidden_layers=1, compress_ratios=[0], num_hash_layers=1, hc_sinkhorn_iters=1, hc_mult=2
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("one-layer") / "checkpoint", ONE_LAYER)


@dataclass(frozen=True)
class Built:
    """A finished build: its folder, the manifest it returned, and the progress it reported."""

    folder: Path
    manifest: Manifest
    progress: list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def built(checkpoint: Path) -> Built:
    seen: list[tuple[str, int, int]] = []
    folder = checkpoint.parent / "engine"
    return Built(folder, build(checkpoint, folder, BuildOptions(), lambda *step: seen.append(step)), seen)


def refusal(checkpoint: Path, destination: Path, **options: Any) -> str:
    """The error of a build; it is one line and nothing that loads is left at the destination's side."""
    before = {path.name for path in destination.parent.iterdir()} if destination.parent.is_dir() else set()
    with pytest.raises(BuildError) as caught:
        build(checkpoint, destination, BuildOptions(**options))
    after = {path.name for path in destination.parent.iterdir()} if destination.parent.is_dir() else set()
    assert after == before, "a failed build leaves no files"
    assert "\n" not in str(caught.value)
    return str(caught.value)


BUILDS = """
import os, signal, sys
from pathlib import Path
from twostroke.builder import build as module
from twostroke.builder.build import BuildOptions, build
from twostroke.builder.engine_directory import staging

checkpoint, folder, replaced = map(Path, sys.argv[1:])
build(checkpoint, folder / "whole" / "engine", BuildOptions())

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def killed(stage, done, destination, force=False):
    child = os.fork()
    if child == 0:
        if stage == "sealing":
            module.seal = die
        where = lambda what, at, total: die() if what.split()[0] == stage and at >= done else None
        build(checkpoint, destination, BuildOptions(force=force), where)
        os._exit(0)
    print(stage, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

killed("exporting", 0, folder / "exporting" / "engine")
killed("writing", 50_000, folder / "writing" / "engine")
killed("sealing", 0, folder / "sealing" / "engine")
killed("writing", 50_000, replaced, force=True)
"""


@pytest.fixture(scope="module")
def other_process(checkpoint: Path, built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of builds by another process with other hash seeds: `whole/`, and `exporting/`, `writing/`, `sealing/`
    that were killed there; the one in `replacing/` was to replace a finished engine."""
    folder = tmp_path_factory.mktemp("builds")
    shutil.copytree(built.folder, folder / "replacing" / "engine")
    environment = {**os.environ, "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BUILDS, str(checkpoint), str(folder), str(folder / "replacing" / "engine")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[1::2] == [str(-signal.SIGKILL)] * 4, result.stdout
    return folder


@pytest.mark.parametrize("stage", ["exporting", "writing", "sealing"])
def test_a_killed_build_leaves_nothing_that_loads(other_process: Path, stage: str) -> None:
    """SIGKILL before the first graph, among the weights, and just before the manifest."""
    place = other_process / stage
    assert [path.name for path in place.iterdir()] == [".engine.building"]
    with pytest.raises(EngineError, match="no such engine directory"):
        load_engine_directory(place / "engine")
    with pytest.raises(EngineError, match=r"config\.json is missing"):
        load_engine_directory(place / ".engine.building")


def test_a_killed_replacement_leaves_the_old_engine_whole(other_process: Path) -> None:
    assert {path.name for path in (other_process / "replacing").iterdir()} == {"engine", ".engine.building"}
    load_engine_directory(other_process / "replacing" / "engine")


def test_the_next_build_clears_away_what_a_killed_one_left(
    checkpoint: Path, other_process: Path, tmp_path: Path
) -> None:
    shutil.copytree(other_process / "sealing", tmp_path, dirs_exist_ok=True)
    (tmp_path / ".engine.building" / "stray").write_text("")
    build(checkpoint, tmp_path / "engine", BuildOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
    assert not (tmp_path / "engine" / "stray").exists()
    load_engine_directory(tmp_path / "engine")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 KiB: room for the graphs, not for the weights."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", place], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_without_room_for_the_weights_is_refused_before_anything_is_written(
    checkpoint: Path, tiny_disk: Path
) -> None:
    message = refusal(checkpoint, tiny_disk / "engine")
    assert re.fullmatch(
        f"{tiny_disk}/engine needs [0-9,]+ bytes for weights, the device that holds {tiny_disk} has [0-9,]+ free; free "
        "some or choose another -o",
        message,
    )
    needed, free = (
        int(found.replace(",", "")) for found in re.findall(r"[0-9,]{5,}", message.replace(str(tiny_disk), ""))
    )
    assert free <= 96 << 10 < needed


def test_what_a_stopped_build_left_of_the_weights_counts_as_room(tiny_disk: Path) -> None:
    """80 of 96 KiB are taken by the half that is there already."""
    (tiny_disk / ".engine.building").mkdir()
    (tiny_disk / ".engine.building" / "weights.bin").write_bytes(b"x" * (80 << 10))
    check_space(tiny_disk / "engine", 90 << 10, "weights.bin")
    with pytest.raises(BuildError, match="needs 99,328 bytes"):
        check_space(tiny_disk / "engine", 97 << 10, "weights.bin")


def test_a_file_size_limit_is_one_sentence_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))  # weights.bin needs 100 KB
    try:
        message = refusal(checkpoint, tmp_path / "engine")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"{tmp_path / 'engine'} could not be written: File too large" in message


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_running_out_of_space_in_the_middle_is_told_apart(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(*_: Any) -> None:
        raise OSError(code, os.strerror(code), "target.plugin.onnx")

    monkeypatch.setattr(build_module, "export_step", full)
    assert "no space left on the device" in refusal(checkpoint, tmp_path / "engine")


def test_an_interrupted_build_cleans_up(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build_module, "export_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build(checkpoint, tmp_path / "engine", BuildOptions())
    assert not list(tmp_path.iterdir())


def test_a_destination_with_other_things_in_it_is_refused_even_with_force(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("keep me")
    for force in (False, True):
        message = refusal(checkpoint, tmp_path / "letters", force=force)
        assert "already exists and is not empty: it is not an engine directory; choose another -o" in message
    assert (tmp_path / "letters" / "dear.txt").read_text() == "keep me"


def test_a_checkpoint_is_never_taken_for_an_engine_to_replace(checkpoint: Path) -> None:
    """Both have a config.json; building over one's checkpoint would delete it."""
    assert "it is not an engine directory" in refusal(checkpoint, checkpoint, force=True)
    assert (checkpoint / "model.safetensors.index.json").is_file()


def test_a_file_as_destination_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "engine").write_text("")
    assert str(tmp_path / "engine") in refusal(checkpoint, tmp_path / "engine", force=True)


def test_an_engine_is_replaced_only_by_force(checkpoint: Path, built: Built, tmp_path: Path) -> None:
    destination = tmp_path / "engine"
    shutil.copytree(built.folder, destination)
    (destination / "stale").write_text("")
    assert "give --force to replace it" in refusal(checkpoint, destination)
    build(checkpoint, destination, BuildOptions(force=True))
    assert not (destination / "stale").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"engine"}


def test_an_interrupt_in_the_middle_of_a_replacement_puts_the_old_engine_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when the old folder has been moved away and the new one is not in its place."""
    destination, rename = tmp_path / "engine", os.rename
    destination.mkdir()
    for name in ("config.json", "weights.index.json"):
        (destination / name).write_text("old")

    def interrupted(source: Path, target: Path) -> None:
        if source.name == ".engine.building":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), staging(destination, replace=True) as folder:
        (folder / "config.json").write_text("new")
    assert (destination / "config.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_place_that_cannot_be_written_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    assert "could not be written: Permission denied" in refusal(checkpoint, tmp_path / "closed" / "engine")


def test_a_folder_below_a_file_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="could not be written: Not a directory"):
        build(checkpoint, tmp_path / "file" / "engine", BuildOptions())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "tensorrt9"}, ["'tensorrt9'", "accepted: onnxruntime"]),
        ({"max_seq_len": 129}, ["--max-seq-len is 129", "2 to 128", "max_position_embeddings"]),
        ({"max_seq_len": 1}, ["--max-seq-len is 1", "2 to 128"]),
    ],
)
def test_an_impossible_choice_is_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any], words: list[str]
) -> None:
    message = refusal(checkpoint, tmp_path / "engine", **options)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("content", ["[", "[]", '{"eos_token_id": "two"}', '{"eos_token_id": [1, true]}'])
def test_a_broken_generation_config_is_named(tmp_path: Path, content: str) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", ONE_LAYER)
    (folder / "generation_config.json").write_text(content)
    assert str(folder / "generation_config.json") in refusal(folder, tmp_path / "engine")


def test_end_of_text_ids_of_both_files_are_kept(tmp_path: Path) -> None:
    """And an empty folder is as good a destination as none."""
    folder = write_checkpoint(tmp_path / "checkpoint", ONE_LAYER)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1, 9]}))
    (tmp_path / "engine").mkdir()
    manifest = build(folder, tmp_path / "engine", BuildOptions(max_seq_len=100))
    assert manifest.build_config.eos_token_ids == (1, 7, 9)
    assert manifest.build_config.max_seq_len == 100
    assert (tmp_path / "engine" / "generation_config.json").is_file()


def test_the_manifest_on_disk_is_the_one_returned(built: Built) -> None:
    assert read_manifest(built.folder) == built.manifest
    files = {path.name for path in built.folder.iterdir()}
    assert set(built.manifest.files) == files - {"config.json"}, "every file but the manifest itself has a hash"


def test_a_target_without_a_draft_has_one_step(built: Built) -> None:
    assert list(built.manifest.steps) == ["target"]
    assert (built.manifest.speculative.method, built.manifest.speculative.draft_len) == ("none", 0)
    assert "taps" not in {b.name for b in built.manifest.steps["target"].bindings}


def test_building_twice_gives_the_same_files(built: Built, other_process: Path) -> None:
    """In another process, with other hash seeds and another destination: to the byte."""
    for path in built.folder.iterdir():
        assert (other_process / "whole" / "engine" / path.name).read_bytes() == path.read_bytes(), path.name


def test_progress_names_every_stage_and_ends_complete(built: Built) -> None:
    assert [what for what, *_ in built.progress[:2]] == ["exporting target", "exporting"]
    weights = [(done, total) for what, done, total in built.progress if what == "writing weights"]
    assert {total for _, total in weights} == {(built.folder / "weights.bin").stat().st_size}, "bytes are counted"
    assert [done for done, _ in weights] == sorted(done for done, _ in weights)
    assert weights[-1][0] == weights[-1][1]


def test_a_second_build_to_the_same_place_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    with staging(tmp_path / "engine", replace=False) as folder:
        (folder / "half").write_text("written")
        with pytest.raises(BuildError, match="another build"), staging(tmp_path / "engine", replace=False):
            pass
        assert (folder / "half").exists()


def filled(destination: Path) -> None:
    with staging(destination, replace=False) as folder:
        (folder / "config.json").write_text("{}")


def test_a_link_to_an_empty_folder_stays_a_link_and_the_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    filled(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "config.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_the_empty_current_folder_can_be_the_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    filled(Path())
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
