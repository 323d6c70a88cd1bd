"""A file that a stopped process left is gone on with, and only what is really there is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from twostroke.builder import resumable_file
from twostroke.builder.resumable_file import Part, journal_of, recorded_hash, vouched_bytes, write_parts

PARTS = [Part("a", 0, 1000), Part("b", 1024, 5000), Part("c", 6080, 64), Part("d", 6144, 3000)]


def byte_of(part: Part) -> bytes:
    return part.name.encode()


WHOLE = b"".join(byte_of(p) * p.bytes + bytes(-p.end % 64 if p.name != "d" else 0) for p in PARTS)


@pytest.fixture(autouse=True)
def every_part_is_vouched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_file, "VOUCH", 1)


class Writer:
    """Writes PARTS and remembers which it was asked for; stops in the middle of one if told to."""

    def __init__(self, path: Path, stop_in: str | None = None) -> None:
        self.path, self.stop_in = path, stop_in
        self.asked: list[str] = []
        self.progress: list[tuple[str, int, int]] = []

    def content(self, part: Part) -> Iterator[memoryview]:
        self.asked.append(part.name)
        yield memoryview(byte_of(part) * (part.bytes // 2))
        if part.name == self.stop_in:
            raise KeyboardInterrupt
        yield memoryview(byte_of(part) * (part.bytes - part.bytes // 2))

    def write(self, key: str = "key") -> None:
        write_parts(self.path, key, PARTS, self.content, lambda *step: self.progress.append(step))


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A file of which parts a and b are vouched for and c is half there."""
    path = tmp_path / "file"
    with pytest.raises(KeyboardInterrupt):
        Writer(path, stop_in="c").write()
    assert vouched_bytes(path) == PARTS[1].end
    assert recorded_hash(path) is None
    return path


def gone_on_with(path: Path, key: str = "key") -> Writer:
    """A second run; the file is then whole."""
    writer = Writer(path)
    writer.write(key)
    assert path.read_bytes() == WHOLE
    assert recorded_hash(path) == hashlib.sha256(WHOLE).hexdigest()
    return writer


def test_an_undisturbed_run_writes_the_parts_and_knows_the_hash(tmp_path: Path) -> None:
    writer = gone_on_with(tmp_path / "file")
    assert writer.asked == ["a", "b", "c", "d"]
    assert writer.progress[-1] == ("writing weights", len(WHOLE), len(WHOLE))
    lines = [json.loads(line) for line in journal_of(tmp_path / "file").read_text().splitlines()]
    assert lines[0] == {"key": "key"}
    assert [(line["name"], line["offset"], line["bytes"]) for line in lines[1:]] == [
        (p.name, p.offset, p.bytes) for p in PARTS
    ]
    assert [line["sha256"] for line in lines[1:]] == [hashlib.sha256(WHOLE[: p.end]).hexdigest() for p in PARTS]


def test_what_is_vouched_for_is_kept_and_the_rest_written(stopped: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = gone_on_with(stopped)
    assert writer.asked == ["c", "d"]
    assert f"kept {PARTS[1].end} of {len(WHOLE)} bytes" in caplog.text
    assert ("verifying weights", PARTS[1].end, PARTS[1].end) in writer.progress


def test_a_whole_file_is_only_verified(tmp_path: Path) -> None:
    gone_on_with(tmp_path / "file")
    assert gone_on_with(tmp_path / "file").asked == []


@pytest.mark.parametrize(
    ("at", "asked"), [(0, ["a", "b", "c", "d"]), (1010, ["b", "c", "d"]), (1024, ["b", "c", "d"]), (6030, ["c", "d"])]
)
def test_a_damaged_part_is_noticed_and_written_anew(
    stopped: Path, at: int, asked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """In part a, in the padding before b, in b, and behind what is vouched for, where nothing is to be noticed."""
    data = bytearray(stopped.read_bytes())
    data[at] ^= 1
    stopped.write_bytes(data)
    assert gone_on_with(stopped).asked == asked
    assert ("is damaged behind byte" in caplog.text) is (at < PARTS[1].end)


@pytest.mark.parametrize("left", [0, 500, 1000, 4000])
def test_data_that_never_reached_the_disk_are_written_again(stopped: Path, left: int) -> None:
    with open(stopped, "r+b") as file:
        file.truncate(left)
    assert gone_on_with(stopped).asked == (["b", "c", "d"] if left >= 1000 else ["a", "b", "c", "d"])


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_is_cut_off(stopped: Path, cut: int) -> None:
    journal = journal_of(stopped)
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert gone_on_with(stopped).asked == ["b", "c", "d"]
    assert gone_on_with(stopped).asked == [], "the journal is sound again"


@pytest.mark.parametrize("tail", [b"\0\0\0", b"{}\n", b"[]\n", b'{"name": "c", "offset": 6080}\n', b"\xff\n"])
def test_lines_that_are_none_are_cut_off(stopped: Path, tail: bytes) -> None:
    journal = journal_of(stopped)
    journal.write_bytes(journal.read_bytes() + tail)
    assert gone_on_with(stopped).asked == ["c", "d"]
    assert tail not in journal.read_bytes()


def test_what_follows_a_whole_file_and_its_journal_is_cut_off(tmp_path: Path) -> None:
    path, lines = tmp_path / "file", b'{"name": "e", "offset": 9216, "bytes": 4, "sha256": "0"}\n'
    gone_on_with(path)
    path.write_bytes(path.read_bytes() + bytes(500))
    journal_of(path).write_bytes(journal_of(path).read_bytes() + lines)
    assert gone_on_with(path).asked == []
    assert lines not in journal_of(path).read_bytes()


def test_a_line_of_another_part_vouches_for_nothing(stopped: Path) -> None:
    journal = journal_of(stopped)
    journal.write_text(journal.read_text().replace('"name": "b"', '"name": "x"'))
    assert gone_on_with(stopped).asked == ["b", "c", "d"]


def test_another_key_starts_anew_and_says_so(stopped: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert gone_on_with(stopped, key="other").asked == ["a", "b", "c", "d"]
    assert "begun from other inputs, with other options or by another version: it starts anew" in caplog.text
    assert gone_on_with(stopped, key="other").asked == []


@pytest.mark.parametrize("lost", ["file", "journal"])
def test_a_file_without_its_journal_or_the_reverse_starts_anew(stopped: Path, lost: str) -> None:
    (stopped if lost == "file" else journal_of(stopped)).unlink()
    assert gone_on_with(stopped).asked == ["a", "b", "c", "d"]


def test_a_run_that_was_stopped_again_and_again_ends_the_same(tmp_path: Path) -> None:
    for name in "aabbccdd":
        with pytest.raises(KeyboardInterrupt):
            Writer(tmp_path / "file", stop_in=name).write()
    assert gone_on_with(tmp_path / "file").asked == ["d"]


def test_nothing_to_write_is_an_empty_file(tmp_path: Path) -> None:
    write_parts(tmp_path / "file", "key", [], lambda part: [], lambda *step: None)
    assert (tmp_path / "file").read_bytes() == b""
    assert recorded_hash(tmp_path / "file") is None
