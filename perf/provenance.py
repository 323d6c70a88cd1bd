"""Where a table of this folder comes from."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def device() -> str:
    """This machine, as result files are named after it."""
    return f"cpu-{len(os.sched_getaffinity(0))}core"


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return found.stdout.strip() or "unknown"
