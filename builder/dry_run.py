"""`twostroke build --dry-run`: what a build would make for a target device, and whether it has room."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from twostroke.builder.build import BuildOptions, plan
from twostroke.builder.devices import memory_of
from twostroke.builder.inspection import Load, describe_build, inspect_checkpoint


def dry_run(folder: Path, destination: Path, options: BuildOptions, device: str = "cpu") -> dict[str, Any]:
    """The report of `inspect_checkpoint` for these options, with the room on disk and on the device. A folder with
    problems is reported with all of them and without room; other refusals of a build are raised as it raises them."""
    report = inspect_checkpoint(folder, batch_size=options.max_batch_size, seq_len=options.max_seq_len)
    if report.get("problems"):
        return report
    planned = plan(folder, options)
    load = Load(options.max_batch_size, planned.build_config.max_seq_len)
    page = planned.target.tokens_per_page
    specs = planned.stored_networks()

    def described(batch_size: int) -> dict[str, Any]:
        one = Load(batch_size, load.seq_len)
        return describe_build(planned.checkpoint, planned.method, planned.draft.block_size, specs, page, one)

    report |= described(load.batch_size)
    report["disk"] = {"written": report["build"]["bytes_written"], "free": _free_disk(destination)}
    total = memory_of(device)
    needed = report["memory"]["total"]
    a_request = described(load.batch_size + 1)["memory"]["state"] - report["memory"]["state"]
    room = total - described(1)["memory"]["total"]
    report["device"] = {
        "name": device,
        "bytes": total,
        "needed": needed,
        "fits": needed <= total,
        "largest_batch": max(0, room // a_request + 1) if room >= 0 else 0,
    }
    report["problems"] = report.pop("problems")
    return report


def _free_disk(destination: Path) -> int:
    """Free bytes where an engine directory would be."""
    place = destination.resolve().parent
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
