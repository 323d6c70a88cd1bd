"""A large file is checked at load by its fingerprint, and in full when that is asked for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from twostroke.engines.errors import EngineError
from twostroke.engines.file_records import BLOCK, BLOCKS, LARGE, check_file, file_record, fingerprint

SIZE = LARGE + 12345
STRIDE = (SIZE - BLOCK) / (BLOCKS - 1)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of holes with a byte in it here and there."""
    path = tmp_path / "weights.bin"
    with open(path, "wb") as file:
        file.truncate(SIZE)
        for at in range(0, SIZE, 10_000_000):
            file.seek(at)
            file.write(b"x")
    return path


def change(path: Path, at: int, data: bytes = b"!") -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def test_a_small_file_has_a_hash_and_a_large_one_a_fingerprint_too(tmp_path: Path, large: Path) -> None:
    (tmp_path / "small").write_bytes(b"abc")
    assert file_record(tmp_path / "small").fingerprint is None
    record = file_record(large)
    with open(large, "rb") as file:
        assert record.sha256 == hashlib.file_digest(file, "sha256").hexdigest()
    assert record.fingerprint == fingerprint(large) != record.sha256
    check_file(large, record)
    check_file(large, record, full=True)


@pytest.mark.parametrize("at", [0, BLOCK - 1, SIZE - 1, SIZE - BLOCK, int(STRIDE * 500) + 5])
def test_a_change_in_a_block_is_noticed_at_load(large: Path, at: int) -> None:
    record = file_record(large, "known")
    change(large, at)
    with pytest.raises(EngineError, match=r"weights\.bin: the contents changed .* \(fingerprint differs\)"):
        check_file(large, record)


def test_a_change_of_more_than_the_distance_of_blocks_is_noticed_wherever_it_is(large: Path) -> None:
    record = file_record(large, "known")
    for at in (BLOCK + 1, 77_777_777, SIZE - int(STRIDE) - BLOCK):
        change(large, at, b"!" * (int(STRIDE) + 1))
        with pytest.raises(EngineError):
            check_file(large, record)
        change(large, at, bytes(int(STRIDE) + 1))


def test_a_byte_between_the_blocks_is_noticed_in_full_only(large: Path) -> None:
    record = file_record(large)
    change(large, int(STRIDE * 500) + BLOCK + 1000)
    check_file(large, record)
    with pytest.raises(EngineError, match=r"the contents changed since the build \(SHA-256 differs\)"):
        check_file(large, record, full=True)


def test_another_size_is_noticed_without_reading(large: Path) -> None:
    record = file_record(large, "known")
    with open(large, "r+b") as file:
        file.truncate(SIZE + 1)
    with pytest.raises(EngineError, match=f"{SIZE + 1} bytes found, {SIZE} expected"):
        check_file(large, record)
