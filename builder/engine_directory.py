"""Writing an engine directory so that it is either whole or not there.

Everything goes into a hidden folder beside the destination; the manifest is written last, files and folders are flushed
to disk and the folder is renamed in one step. A build that is killed, or runs out of disk, leaves at most that hidden
folder: without a manifest it does not load, with one it is whole. The next build to the same place removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twostroke.engines.errors import BuildError
from twostroke.engines.loading import file_hash
from twostroke.engines.manifest import CONFIG_FILE, FileRecord, Manifest, encode


@contextmanager
def staging(destination: Path, replace: bool) -> Iterator[Path]:
    """The hidden folder of a build to `destination`. On success it must hold a manifest (`seal`) and is moved into
    place; on any error it is removed. BuildError for a destination that is taken, not writable, or a disk that is
    full."""
    destination = destination.resolve()  # a link keeps pointing where it did, `.` has a name
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        engine = (destination / CONFIG_FILE).is_file() and (destination / "weights.index.json").is_file()
        if not (replace and engine):
            advice = "give --force to replace it" if engine else "it is not an engine directory; choose another -o"
            raise BuildError(f"{destination} already exists and is not empty: {advice}")
    folder = destination.parent / f".{destination.name}.building"
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
    try:
        _empty(folder)
        yield folder
        _flush(folder)
        if destination.exists() and any(destination.iterdir()):
            retired = destination.parent / f".{destination.name}.replaced"
            shutil.rmtree(retired, ignore_errors=True)
            os.rename(destination, retired)
            os.rename(folder, destination)
            shutil.rmtree(retired)
        else:
            os.rename(folder, destination)  # over an empty folder too
        _flush_folder(destination.parent)
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


def _empty(folder: Path) -> None:
    """Removes what a build that was killed left behind."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def file_records(folder: Path) -> dict[str, FileRecord]:
    """Size and hash of every file of the folder, by relative name."""
    return {
        str(path.relative_to(folder)): FileRecord(path.stat().st_size, file_hash(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
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
