"""A build that was stopped is gone on with: what it wrote is kept if it is right, and the end is the same bytes."""

from __future__ import annotations

import filecmp
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from twostroke.__main__ import main
from twostroke.builder.build import BuildOptions, build
from twostroke.builder.resumable_file import vouched_bytes
from twostroke.engines.loading import load_engine_directory
from twostroke.tests.checkpoints import F4_PLAIN, with_overrides, write_checkpoint

# One layer of three banks of 67 MB, none of which is usable as stored: each is vouched for when it is written.
WIDE = with_overrides(
    F4_PLAIN,
    num_hidden_layers=1,
    compress_ratios=[0],
    num_hash_layers=1,
    hc_sinkhorn_iters=1,
    hc_mult=2,
    moe_intermediate_size=65536,
)
BANK = 4 * 65536 * 64 * 4
OPTIONS = BuildOptions(self_check=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("wide") / "checkpoint", WIDE, seed=3)


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path) -> Path:
    build(checkpoint, checkpoint.parent / "undisturbed", OPTIONS)
    return checkpoint.parent / "undisturbed"


def assert_same(folder: Path, undisturbed: Path) -> None:
    """The same files with the same bytes, and nothing beside the folder."""
    names = sorted(path.name for path in undisturbed.iterdir())
    assert not any(name.endswith(".journal") for name in names)
    assert sorted(path.name for path in folder.iterdir()) == names
    assert filecmp.cmpfiles(folder, undisturbed, names, shallow=False) == (names, [], [])
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


class Stop(KeyboardInterrupt):
    pass


def stopping(at: int) -> Callable[[str, int, int], None]:
    """Progress that interrupts the writing of weights at that many bytes."""

    def progress(what: str, done: int, total: int) -> None:
        if what == "writing weights" and done >= at:
            raise Stop

    return progress


@pytest.fixture(scope="module")
def interrupted(checkpoint: Path) -> Path:
    """The destination of a build that was interrupted in the third bank; stray files lie among what it left."""
    destination = checkpoint.parent / "interrupted" / "engine"
    with pytest.raises(Stop):
        build(checkpoint, destination, OPTIONS, stopping(int(2.5 * BANK)))
    staged = staged_weights(destination).parent
    graphs = ["target.plugin.onnx", "target.portable.onnx"]
    assert sorted(path.name for path in staged.iterdir()) == [*graphs, "weights.bin", "weights.bin.journal"]
    assert not destination.exists()
    (staged / "target.onnx.tmp").write_text("half")
    (staged / "folder").mkdir()
    return destination


@pytest.fixture
def stopped(interrupted: Path, tmp_path: Path) -> Path:
    """The same, for one test."""
    shutil.copytree(interrupted.parent, tmp_path / "builds")
    return tmp_path / "builds" / "engine"


def staged_weights(destination: Path) -> Path:
    return destination.parent / f".{destination.name}.building" / "weights.bin"


def test_the_next_build_goes_on_with_the_weights_and_clears_away_the_rest(
    stopped: Path, checkpoint: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[str, int]] = []
    build(checkpoint, stopped, OPTIONS, lambda what, done, total: seen.append((what, done)))
    assert "weights.bin: kept" in caplog.text
    assert min(done for what, done in seen if what == "writing weights") > 2 * BANK
    assert max(done for what, done in seen if what == "verifying weights") > 2 * BANK
    assert_same(stopped, undisturbed)


def test_damage_in_what_was_kept_is_noticed_and_mended(
    stopped: Path, checkpoint: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One bit, in the second bank."""
    with open(staged_weights(stopped), "r+b") as file:
        file.seek(int(1.5 * BANK))
        byte = file.read(1)
        file.seek(int(1.5 * BANK))
        file.write(bytes([byte[0] ^ 4]))
    build(checkpoint, stopped, OPTIONS)
    assert "weights.bin is damaged behind byte" in caplog.text
    assert_same(stopped, undisturbed)


@pytest.mark.parametrize(
    "change", ["date of a shard", *(pytest.param(c, marks=pytest.mark.slow) for c in ("options", "version"))]
)
def test_other_inputs_start_anew(
    stopped: Path, checkpoint: Path, change: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, shard = OPTIONS, checkpoint / "model-00001-of-00002.safetensors"
    before = shard.stat().st_mtime_ns
    if change == "date of a shard":
        os.utime(shard)
    elif change == "options":
        options = BuildOptions(self_check=False, max_seq_len=100)
    else:
        monkeypatch.setattr("twostroke.__version__", "99.0")
    seen: list[tuple[str, int]] = []
    build(checkpoint, stopped, options, lambda what, done, total: seen.append((what, done)))
    os.utime(shard, ns=(before, before))
    assert "begun from other inputs, with other options or by another version: it starts anew" in caplog.text
    assert "kept" not in caplog.text
    assert min(done for what, done in seen if what == "writing weights") < BANK
    load_engine_directory(stopped)


@pytest.mark.slow
def test_force_is_no_other_input(stopped: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(checkpoint, stopped, BuildOptions(self_check=False, force=True))
    assert "weights.bin: kept" in caplog.text


def test_a_build_that_fails_leaves_nothing_although_it_has_written_weights(checkpoint: Path, tmp_path: Path) -> None:
    def fails(what: str, done: int, total: int) -> None:
        if what == "writing weights" and done > 2 * BANK:
            raise RuntimeError("of ours")

    with pytest.raises(RuntimeError):
        build(checkpoint, tmp_path / "engine", OPTIONS, fails)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_build_interrupted_before_any_weight_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        build(checkpoint, tmp_path / "engine", OPTIONS, stopping(0))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_command_keeps_what_was_written(
    checkpoint: Path, undisturbed: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """The signal comes when two banks are vouched for."""
    destination = tmp_path / "builds" / "engine"
    command = [sys.executable, "-m", "twostroke", "build", str(checkpoint), "-o", str(destination), "--no-self-check"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until:
        if vouched_bytes(staged_weights(destination)) > 2 * BANK:
            process.send_signal(number)
            break
        time.sleep(0.001)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == code, said
    kept = re.search(r"\.engine\.building keeps (\d+) bytes of weights: the same build goes on from there", said)
    assert kept is not None, said
    assert int(kept[1]) > 2 * BANK
    assert "Traceback" not in said
    assert main(command[3:]) == 0
    assert_same(destination, undisturbed)


KILLS = """
import os, signal, sys, time
from pathlib import Path
from twostroke.builder.build import BuildOptions, build

checkpoint, destination = map(Path, sys.argv[1:])
OPTIONS = BuildOptions(self_check=False)
WATCHED = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
reader, writer = os.pipe()


def child(kill_at):
    \"\"\"A build that reports how many file operations it made, or dies before number `kill_at`.\"\"\"
    count = 0

    def watch(event, arguments):
        nonlocal count
        if event in WATCHED:
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    build(checkpoint, destination, OPTIONS)
    os.write(writer, f"{count}\\n".encode())
    os._exit(0)


def fork(kill_at=0):
    pid = os.fork()
    if pid == 0:
        child(kill_at)
    return pid


started = time.monotonic()
os.waitpid(fork(), 0)
took = time.monotonic() - started
operations = int(os.read(reader, 100))
print(took, operations, flush=True)
for line in sys.stdin:
    kind, share = line.split()
    if kind == "time":
        pid = fork()
        time.sleep(float(share) * took)
        os.kill(pid, signal.SIGKILL)
    else:
        pid = fork(operations - int(share))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_fifty_kills_never_leave_a_wrong_engine_and_a_second_run_completes_it(
    checkpoint: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """SIGKILL 30 times at a random moment of the build and before each of the last 20 file operations, the renaming
    among them. Every third time the second run is killed too."""
    destination = tmp_path / "builds" / "engine"
    command = [sys.executable, "-c", KILLS, str(checkpoint), str(destination)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    rng = random.Random(0)
    moments = [f"time {rng.random():.4f}" for _ in range(30)] + [f"operation {back}" for back in range(20)]
    outcomes = {"nothing": 0, "staged": 0, "whole": 0}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert float(process.stdout.readline().split()[0]) > 0
        assert_same(destination, undisturbed)
        for number, moment in enumerate(moments):
            for path in destination.parent.iterdir():
                shutil.rmtree(path)
            for _ in range(2 if number % 3 == 0 else 1):
                process.stdin.write(f"{moment}\n")
                process.stdin.flush()
                killed = int(process.stdout.readline())
                if destination.exists():
                    break
                assert killed == -signal.SIGKILL, moment
            if destination.exists():
                outcomes["whole"] += 1
                load_engine_directory(destination)
            else:
                outcomes["staged" if staged_weights(destination).exists() else "nothing"] += 1
                build(checkpoint, destination, OPTIONS)
            assert_same(destination, undisturbed)
        process.stdin.close()
    assert outcomes["staged"] >= 10, outcomes
