"""Peak memory and time of a build, of going on with one that was killed, and of what is checked at load.

    python perf/build.py                    writes perf/results/build-<device>.{json,md}

The checkpoint is made by `twostroke make-checkpoint`: layers of a release at full width, random weights. Each arm is
a process of its own, its peak is what the kernel counted for it. `copy` reads and writes as many bytes as the build
writes, plainly, in the same pieces: the floor. `killed` is a build that got SIGKILL when half of its weights were on
disk, `resumed` the build after it. Gates: peaks below 2 GiB plus the largest tensor; the resumed engine's files equal
the undisturbed one's.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from twostroke.builder.checkpoint import read_entries
from twostroke.engines.manifest import read_weights_index
from twostroke.perf.provenance import commit, device, processor

RESULTS = Path(__file__).parent / "results"
TABLE = "build"
LIMIT = 2 << 30

COPY = """
import os, sys
source, destination, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with open(destination, "wb") as out:
    while count:
        with open(source, "rb", buffering=0) as file:
            while count and (piece := file.read(min(16 << 20, count))):
                out.write(piece)
                count -= len(piece)
    out.flush()
    os.fsync(out.fileno())
"""


def twostroke(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "twostroke", *map(str, arguments)]


def run(command: Sequence[str], stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Seconds and peak bytes of a process; it is killed when `stop` says so. RuntimeError if it fails by itself."""
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    stopped = False
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        if not stopped and stop():
            stopped = True
            process.send_signal(signal.SIGKILL)
        time.sleep(0.01)
    assert process.stderr is not None
    said = process.stderr.read()
    code = os.waitstatus_to_exitcode(status)
    process.returncode = code
    if code != (-signal.SIGKILL if stopped else 0):
        raise RuntimeError(f"{' '.join(command)} ended with {code}: {said}")
    return {"seconds": round(time.perf_counter() - started, 1), "peak_bytes": usage.ru_maxrss * 1024, "said": said}


def half_written(destination: Path, total: int) -> bool:
    """Whether the journal of a build vouches for half of its weights."""
    try:
        lines = (destination.parent / f".{destination.name}.building" / "weights.bin.journal").read_text().splitlines()
        last = json.loads(lines[-1])
    except (OSError, ValueError, IndexError):
        return False
    return int(last.get("offset", 0)) + int(last.get("bytes", 0)) >= total // 2


def measure(place: Path, make: Sequence[str]) -> dict[str, Any]:
    """All arms over one checkpoint."""
    checkpoint, whole, resumed = place / "checkpoint", place / "whole", place / "resumed"
    made = run(twostroke("make-checkpoint", *make, "-o", checkpoint))
    entries = read_entries(checkpoint)
    built = run(twostroke("build", checkpoint, "-o", whole))
    written = (whole / "weights.bin").stat().st_size
    total = sum(record.bytes for record in read_weights_index(whole).weights.values())
    shard = max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    copied = run([sys.executable, "-c", COPY, str(shard), str(place / "copy"), str(written)])
    (place / "copy").unlink()
    killed = run(twostroke("build", checkpoint, "-o", resumed), lambda: half_written(resumed, written))
    again = run(twostroke("build", checkpoint, "-o", resumed))
    names = sorted(path.name for path in whole.iterdir())
    same = names == sorted(path.name for path in resumed.iterdir())
    same = same and filecmp.cmpfiles(whole, resumed, names, shallow=False)[0] == names
    shutil.rmtree(resumed)
    loading = (
        "import sys; from twostroke.engines.loading import verify_files\n"
        "from twostroke.engines.manifest import read_manifest, read_weights_index\n"
        "from pathlib import Path; folder = Path(sys.argv[1])\n"
        "verify_files(folder, read_manifest(folder), read_weights_index(folder))"
    )
    arms = {
        "make-checkpoint": made,
        "copy": copied,
        "build": built,
        "killed": killed,
        "resumed": again,
        "check at load": run([sys.executable, "-c", loading, str(whole)]),
        "inspect --verify": run(twostroke("inspect", whole, "--verify")),
    }
    return {
        "checkpoint_bytes": sum(entry.nbytes for entry in entries.values()),
        "tensors": len(entries),
        "largest_tensor_bytes": max(entry.nbytes for entry in entries.values()),
        "weights_bin_bytes": written,
        "referred_bytes": total - written,
        "resumed_equal": same,
        "rows": [
            {"arm": name, "seconds": found["seconds"], "peak_bytes": found["peak_bytes"]}
            for name, found in arms.items()
        ],
    }


def markdown(table: dict[str, Any]) -> str:
    found = table["build"]
    lines = [
        f"# A streamed build on {table['device']}",
        "",
        f"{table['processor']}; torch {table['versions']['torch']}, Python {table['versions']['python']}, commit "
        f"{table['commit']}. Regenerate with `python perf/build.py`.",
        "",
        f"`make-checkpoint {' '.join(table['make'])}`: {found['checkpoint_bytes'] / 1e9:.1f} GB in {found['tensors']} "
        f"tensors, the largest of {found['largest_tensor_bytes'] / 1e6:.0f} MB. The build writes "
        f"{found['weights_bin_bytes'] / 1e9:.1f} GB and refers to {found['referred_bytes'] / 1e9:.1f} GB in shards.",
        "",
        "| | seconds | GB/s of what is written | peak memory, GB |",
        "|---|---|---|---|",
    ]
    for row in found["rows"]:
        rate = found["weights_bin_bytes"] / 1e9 / row["seconds"] if row["arm"] in ("copy", "build") else None
        lines.append(
            f"| {row['arm']} | {row['seconds']:.1f} | {'' if rate is None else f'{rate:.2f}'} | "
            f"{row['peak_bytes'] / 1e9:.2f} |"
        )
    limit = (LIMIT + found["largest_tensor_bytes"]) / 1e9
    return "\n".join(
        [
            *lines,
            "",
            f"Limit of a build's memory: {limit:.2f} GB (2 GiB and the largest tensor). The engine of the resumed "
            f"build is {'the same' if found['resumed_equal'] else 'NOT THE SAME'} to the byte.",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=device())
    parser.add_argument("--model", default="v4-flash-0731")
    parser.add_argument("--scale", default="1")
    parser.add_argument("--layers", default="0,2,3", help="layers of the release (0,2,3: one of each kind, 12 GB)")
    parser.add_argument("--place", type=Path, help="folder for checkpoint and engines (the temporary one)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    make = ["--model", options.model, "--scale", options.scale, "--layers", options.layers, "--no-draft"]
    with tempfile.TemporaryDirectory(dir=options.place) as temporary:
        found = measure(Path(temporary), make)
    table = {
        "table": TABLE,
        "make": make,
        "build": found,
        "device": options.device,
        "processor": processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": commit(),
    }
    options.output.mkdir(exist_ok=True)
    name = f"{TABLE}-{options.device}"
    (options.output / f"{name}.json").write_text(json.dumps(table, indent=1) + "\n")
    text = markdown(table)
    (options.output / f"{name}.md").write_text(text)
    print(text)
    peaks = {row["arm"]: row["peak_bytes"] for row in found["rows"]}
    bounded = all(peaks[arm] < LIMIT + found["largest_tensor_bytes"] for arm in ("build", "killed", "resumed"))
    return 0 if bounded and found["resumed_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
