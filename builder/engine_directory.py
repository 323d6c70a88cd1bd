"""Writing an engine directory so that it is either whole or not there.

Everything goes into a hidden folder beside the destination; the manifest is written last, files and folders are flushed
to disk and the folder is renamed in one step. A build that is killed leaves at most that hidden folder: without a
manifest it does not load, with one it is whole. The next build to the same place goes on with its weights, if they are
those it needs, and removes the rest.

A build that is interrupted or terminated keeps that folder too, once it holds weights. One that fails removes it: the
same inputs would fail again, and on a disk that filled up its hundred gigabytes are in everybody's way.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twostroke.builder.resumable_file import journal_of, recorded_hash, vouched_bytes
from twostroke.engines.errors import BuildError
from twostroke.engines.file_records import file_record
from twostroke.engines.manifest import CONFIG_FILE, FileRecord, Manifest, encode

_log = logging.getLogger(__name__)


@contextmanager
def staging(destination: Path, replace: bool, resumable: str | None = None) -> Iterator[Path]:
    """The hidden folder of a build to `destination`. On success it must hold a manifest (`seal`) and is moved into
    place, on any error it is removed. It comes empty, but for the file `resumable` and its journal if a build that
    was stopped left them; an interrupted one leaves its folder if that file has been begun.

    BuildError for a destination that is taken, not writable, or a disk that is full.
    """
    destination = destination.resolve()  # a link keeps pointing where it did, `.` has a name
    folder = _staged(destination)
    _check_free(destination, replace)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise BuildError(f"{destination} could not be written: {error.strerror or error} ({error.filename})") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise BuildError(f"another build to {destination} is running; wait for it, or choose another -o") from None
    kept = folder / (resumable or "")
    try:
        _empty(folder, {kept, journal_of(kept)} if resumable else set())
        yield folder
        _flush(folder)
        if resumable:
            journal_of(kept).unlink()
        _move(folder, destination)
        _flush_folder(destination.parent)
    except (KeyboardInterrupt, SystemExit):
        if resumable and (count := vouched_bytes(kept)):
            _log.warning("%s keeps %d bytes of weights: the same build goes on from there", folder, count)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BuildError(
                f"no space left on the device that holds {destination.parent}: the build was removed; free some "
                "and rerun"
            ) from None
        raise BuildError(f"{destination} could not be written: {error.strerror or error} ({error.filename})") from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def check_space(destination: Path, needed: int, resumable: str) -> None:
    """Raises BuildError if the device of `destination` has no room for `needed` bytes of the file `resumable`, what a
    build that was stopped left of it counted as room."""
    destination = destination.resolve()
    begun = _staged(destination) / resumable
    place = next(parent for parent in destination.parents if parent.exists())
    free = shutil.disk_usage(place).free + (begun.stat().st_blocks * 512 if begun.is_file() else 0)
    if needed > free:
        raise BuildError(
            f"{destination} needs {needed:,} bytes for weights, the device that holds {place} has {free:,} free; free "
            "some or choose another -o"
        )


def _staged(destination: Path) -> Path:
    return destination.parent / f".{destination.name}.building"


def _check_free(destination: Path, replace: bool) -> None:
    """Raises BuildError for a destination that is taken."""
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        engine = (destination / CONFIG_FILE).is_file() and (destination / "weights.index.json").is_file()
        if not (replace and engine):
            advice = "give --force to replace it" if engine else "it is not an engine directory; choose another -o"
            raise BuildError(f"{destination} already exists and is not empty: {advice}")


def _move(folder: Path, destination: Path) -> None:
    """Puts `folder` in the place of `destination`."""
    retired = destination.parent / f".{destination.name}.replaced"
    try:
        if destination.exists() and any(destination.iterdir()):
            shutil.rmtree(retired, ignore_errors=True)
            os.rename(destination, retired)
        os.rename(folder, destination)  # over an empty folder too
    except BaseException:
        if retired.exists() and not destination.exists():
            os.rename(retired, destination)
        raise
    shutil.rmtree(retired, ignore_errors=True)


def _empty(folder: Path, kept: set[Path]) -> None:
    """Removes what a build that was killed left behind."""
    for path in set(folder.iterdir()) - kept:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def file_records(folder: Path) -> dict[str, FileRecord]:
    """Size and hash of every file of the folder, by relative name; the hash that was made while writing, where there
    is one. Journals are not part of what is built."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    journals = {journal_of(path) for path in files}
    return {
        str(path.relative_to(folder)): file_record(path, recorded_hash(path)) for path in files if path not in journals
    }


def seal(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest: the last file of a directory and the one that makes it load."""
    (folder / CONFIG_FILE).write_bytes(encode(manifest))


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
