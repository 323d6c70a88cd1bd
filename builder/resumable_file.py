"""One large file written part by part, which the next process can go on with when one is killed.

Beside `X` lies `X.journal`, JSON lines: first the key of what is being written, then one for each part that is safely
on disk, with its name, offset and length and the SHA-256 of the file from its start to the end of the part. So the one
hash made while writing serves every part and at the end the file. A line is appended and flushed after the data it
vouches for. Whoever goes on reads those data back and keeps what has its hash; all that follows, torn data and a torn
line among it, is cut off.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

PIECE = 16 << 20
"""Bytes held in memory at once."""
VOUCH = 64 << 20
"""Bytes written between two flushes to disk: at most these and the part they end in are lost with the process."""

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Part:
    """Bytes of the file; before `offset` zeros up to the end of the part in front."""

    name: str
    offset: int
    bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.bytes


@dataclass(frozen=True)
class _Vouched:
    """A line of the journal: the part, the hash of the file up to its end, and where the line ends in the journal."""

    part: Part
    sha256: str
    line_end: int


def journal_of(path: Path) -> Path:
    """The journal's place. It is no part of what is finished: whoever moves the file into place removes it."""
    return path.with_name(f"{path.name}.journal")


def write_parts(
    path: Path, key: str, parts: Sequence[Part], content: Callable[[Part], Iterable[memoryview]], progress: Progress
) -> None:
    """Writes `parts`, in order and behind each other, or what an earlier call with the same `key` lacks of them.

    `content` gives a part's bytes in pieces. A file of another key is replaced, and that is logged.
    """
    end, hashed, line_end = _kept(path, key, parts, progress)
    total = parts[-1].end if parts else 0
    with open(path, "r+b" if end else "wb") as data, open(journal_of(path), "r+b" if end else "wb") as journal:
        for file, length in ((data, end), (journal, line_end)):
            file.truncate(length)
            file.seek(length)
        if not end:
            _append(journal, {"key": key})
        done = flushed = end
        lines: list[dict[str, Any]] = []
        for part in parts:
            if part.end <= end:
                continue
            for piece in _padded(part, done, content(part)):
                hashed.update(piece)
                data.write(piece)
                done += len(piece)
                progress("writing weights", done, total)
            assert done == part.end, f"{part} has another length: it ends at {done}"
            lines.append({**asdict(part), "sha256": hashed.hexdigest()})
            if done - flushed >= VOUCH or part is parts[-1]:
                data.flush()
                os.fdatasync(data.fileno())
                _append(journal, *lines)
                flushed, lines = done, []


def vouched_bytes(path: Path) -> int:
    """How much of the file its journal vouches for; 0 without one."""
    return max((found.part.end for found in _read_journal(path)[1]), default=0)


def recorded_hash(path: Path) -> str | None:
    """The SHA-256 of a file that was written to its end here; None for any other."""
    _, vouched = _read_journal(path)
    return vouched[-1].sha256 if vouched and vouched[-1].part.end == path.stat().st_size else None


def _kept(path: Path, key: str, parts: Sequence[Part], progress: Progress) -> tuple[int, Any, int]:
    """How far the file is what it shall be, the hash up to there, and the length of the journal up to there."""
    found, vouched = _read_journal(path)
    if found is not None and found != key:
        _log.warning("%s was begun from other inputs, with other options or by another version: it starts anew", path)
        vouched = []
    end, hashed, line_end = 0, hashlib.sha256(), 0
    if not vouched or not path.is_file():
        return end, hashed, line_end
    claimed = vouched[-1].part.end
    with open(path, "rb") as file:
        for expected, line in zip(parts, vouched, strict=False):
            until = hashed.copy()
            for piece in _pieces(file, line.part.end - end):
                until.update(piece)
                progress("verifying weights", file.tell(), claimed)
            if line.part != expected or until.hexdigest() != line.sha256:
                _log.warning("%s is damaged behind byte %d, at %s: it is written anew from there", path, end, line.part)
                break
            end, hashed, line_end = line.part.end, until, line.line_end
    if end:
        _log.warning("%s: kept %d of %d bytes of a build that was stopped", path, end, parts[-1].end)
    return end, hashed, line_end


def _read_journal(path: Path) -> tuple[str | None, list[_Vouched]]:
    """Key and lines up to the first one that is torn; no key where there is no journal, or none that can be used."""
    try:
        lines = journal_of(path).read_bytes().splitlines(keepends=True)
    except OSError:
        return None, []
    key, found, at = None, [], 0
    for line in lines:
        at += len(line)
        try:
            fields = json.loads(line) if line.endswith(b"\n") else {}
            if key is None:
                key = str(fields["key"])
            else:
                part = Part(str(fields["name"]), int(fields["offset"]), int(fields["bytes"]))
                found.append(_Vouched(part, str(fields["sha256"]), at))
        except (ValueError, TypeError, KeyError):
            break
    return key, found


def _append(journal: IO[bytes], *lines: dict[str, Any]) -> None:
    journal.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    journal.flush()
    os.fdatasync(journal.fileno())


def _padded(part: Part, done: int, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    yield memoryview(bytes(part.offset - done))
    yield from pieces


def _pieces(file: IO[bytes], count: int) -> Iterator[bytes]:
    while count > 0 and (piece := file.read(min(PIECE, count))):
        count -= len(piece)
        yield piece
