"""Progress bars on stderr: one per phase of a build, nothing where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

BYTES = ("writing weights", "verifying weights")
"""Phases that count bytes; the others count steps."""


class _Amount(ProgressColumn):
    """Done of total, in bytes where the phase counts them."""

    def render(self, task: Task) -> Text:
        done, total = int(task.completed), int(task.total or 0)
        if task.description in BYTES:
            return Text(f"{decimal(done)}/{decimal(total)}", style="progress.download")
        return Text(f"{done}/{total}", style="progress.download")


@contextmanager
def bars() -> Iterator[Callable[[str, int, int], None]]:
    """A `progress(what, done, total)` function. Phases are told apart by the first word of `what`."""
    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), _Amount(), TimeElapsedColumn())
    with Progress(*columns, console=console) as shown:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            phase = what.split()[0]
            if phase not in tasks:
                tasks[phase] = shown.add_task(what, total=total)
            shown.update(tasks[phase], description=what, completed=done)

        yield progress
