"""The engines that everything the runtime promises is tested on: each target with each draft method, in one list.

What a test needs to know of one beyond this (depth, longest sequence, tokens a page) is in its manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Served:
    """A target with a draft method. `engine` is the fixture of the loaded engine, `config` and `eight_tokens` name its
    config and that of the same network over eight tokens in `tests/checkpoints.py`, `build` says how it is built."""

    target: str
    method: str
    engine: str
    config: str
    eight_tokens: str | None = None
    build: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.target}-{self.method}"

    def directory(self, config: str | None = None, **options: Any) -> Path:
        """An engine directory of it with other options, or of another config."""
        from twostroke.tests import checkpoints
        from twostroke.tests.engines import engine_directory

        return engine_directory(getattr(checkpoints, config or self.config), **{**self.build, **options})


DRAFTED = (
    Served("v4", "dspark", "f4_engine", "F4", "TINY8"),
    Served("v4", "mtp", "preview_engine", "F4_PREVIEW", "PREVIEW8", {"max_draft_len": 5}),
    Served("v32", "mtp", "t32_mtp_engine", "T32", "T32_8", {"max_draft_len": 5}),
)
SERVED = (*DRAFTED, Served("v32", "none", "t32_engine", "T32", build={"draft": "none"}))
