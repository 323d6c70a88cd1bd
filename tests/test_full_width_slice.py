"""Three layers of the 0731 release at full width, one of each kind, from make-checkpoint to tokens within 20 GiB."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DISK = 30 * 2**30
GIB = 2**30

RUN = """
import json, resource, sys
from twostroke.engines.loading import load_engine_directory
from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.sampling_params import SamplingParams
from twostroke.runtime.scheduler import Scheduler
engine = load_engine_directory(sys.argv[1])
scheduler = Scheduler(engine, RuntimeConfig(max_batch_size=1, max_seq_len=256))
scheduler.submit(Request("a", (11, 12, 13), SamplingParams(max_tokens=2, ignore_eos=True)))
found = []
while scheduler.has_work:
    for progress in scheduler.step():
        found += progress.token_ids
print(json.dumps([found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def command(*arguments: str) -> int:
    """Peak resident bytes of a `twostroke` command."""
    code = (
        "import resource, sys\nfrom twostroke.__main__ import main\nassert main(sys.argv[1:]) == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return int(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.xdist_group("large")
def test_a_slice_of_the_release_is_built_and_runs_within_twenty_gib(tmp_path: Path) -> None:
    """A window layer that routes by hash, a CSA and an HCA layer: 12.8 GB of FP8, FP4 and BF16 as stored."""
    if shutil.disk_usage(tmp_path).free < DISK:
        pytest.skip(f"needs {DISK / GIB:.0f} GiB of free disk")
    checkpoint, engine = tmp_path / "checkpoint", tmp_path / "engine"
    try:
        command("make-checkpoint", "--model", "v4-flash-0731", "--layers", "0,2,3", "--no-draft", "-o", str(checkpoint))
        built = command("build", str(checkpoint), "-o", str(engine), "--max-seq-len", "256")
        shapes = json.loads((checkpoint / "config.json").read_text())
        assert (shapes["hidden_size"], shapes["compress_ratios"][:3]) == (4096, [0, 4, 128])
        run = subprocess.run([sys.executable, "-c", RUN, str(engine)], check=True, capture_output=True, text=True)
        tokens, resident = json.loads(run.stdout)
        print(f"peak resident: build {built / GIB:.1f} GiB, two tokens {resident / GIB:.1f} GiB")
        assert len(tokens) == 2
        assert built < 20 * GIB
        assert resident < 20 * GIB
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
        shutil.rmtree(engine, ignore_errors=True)
