"""What a manifest records of a file, and whether a file still is what was recorded.

Reading hundreds of gigabytes at every start takes minutes, so a large file also has a fingerprint: the hash of blocks
spread evenly over it, the first and the last among them. It notices a file that was replaced, cut or filled with holes,
and any change of more bytes than lie between two blocks; a single changed byte only the full hash is sure to notice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from twostroke.engines.errors import EngineError
from twostroke.engines.manifest import FileRecord

LARGE = 256 << 20
"""Bytes above which a file has a fingerprint."""
BLOCKS, BLOCK = 1024, 16 << 10
_PIECE = 1 << 20

Advance = Callable[[int], None]


def file_record(path: Path, sha256: str | None = None) -> FileRecord:
    """Size, hash and, of a large file, fingerprint. The hash is made here unless it is known."""
    size = path.stat().st_size
    return FileRecord(size, sha256 or file_hash(path), fingerprint(path) if size > LARGE else None)


def check_file(path: Path, record: FileRecord, full: bool = False, advance: Advance = lambda count: None) -> None:
    """Raises EngineError where `path` is not the file recorded: by its fingerprint if it has one and not `full`."""
    if (size := path.stat().st_size) != record.bytes:
        raise EngineError(f"{path}: {size} bytes found, {record.bytes} expected; rebuild the engine")
    if record.fingerprint is not None and not full:
        kind, same = "fingerprint", fingerprint(path) == record.fingerprint
    else:
        kind, same = "SHA-256", file_hash(path, advance) == record.sha256
    if not same:
        raise EngineError(f"{path}: the contents changed since the build ({kind} differs); rebuild the engine")


def file_hash(path: Path, advance: Advance = lambda count: None) -> str:
    """SHA-256 of a file's contents. `advance` is told the bytes of each piece read."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            advance(len(piece))
    return digest.hexdigest()


def fingerprint(path: Path) -> str:
    """SHA-256 of a file's size and of BLOCKS blocks of BLOCK bytes at even distances, from its start to its end."""
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with open(path, "rb", buffering=0) as file:
        for number in range(BLOCKS):
            file.seek(max(0, size - BLOCK) * number // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()
