"""Folders damaged at random: config, index, headers and files. Whatever is wrong is said in one line, and soon.

Toy folders are kept as JSON and sizes and written anew for every example, their weights as holes: nothing reads them.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twostroke.__main__ import main
from twostroke.builder.checkpoint import INDEX, Checkpoint
from twostroke.builder.inspection import inspect_checkpoint
from twostroke.builder.networks.registry import TARGETS
from twostroke.engines.errors import CheckpointError, ConfigError
from twostroke.tests import checkpoints
from twostroke.tests.dense_drafts import write_dense_draft

SECONDS = 2  # of CPU time, whatever else the machine does
HANG = 30
BYTES = 256 << 20  # beyond what the process has mapped before
TOYS = ("F4", "F4_PREVIEW", "T32", "F4_FP8", "T32_FP8", "dense")
CONFIG = "config.json"

Draw = st.DrawFn


@dataclass
class Folder:
    """A folder to be: JSON files, and shards of which the header is JSON too and the weights are so many bytes.

    `raw` are files whose bytes are given, `placed` makes something else of a path.
    """

    json: dict[str, Any]
    headers: dict[str, Any]
    sizes: dict[str, int]
    raw: dict[str, Callable[[bytes], bytes]] = field(default_factory=dict)
    placed: dict[str, Callable[[Path], None]] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        for name, value in {**self.json, **self.headers}.items():
            data = as_text(value).encode()
            if name in self.headers:
                data = len(data).to_bytes(8, "little") + data
            data = self.raw.get(name, bytes)(data)
            with open(folder / name, "wb") as file:
                file.write(data)
                file.truncate(len(data) + self.sizes.get(name, 0))
        for name, place in self.placed.items():
            (folder / name).unlink()
            place(folder / name)
        return folder


class Raw(str):
    """Stands in a JSON value for text that the writer of JSON would not write."""

    __slots__ = ()


class Twin(str):
    """A key that is equal to no other, so that an object can have two of one name."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def as_text(value: Any) -> str:
    """JSON, and what only looks like it: the texts of `Raw` as they are, keys twice, NaN."""
    raws: list[str] = []

    def marked(item: Any) -> Any:
        if isinstance(item, Raw):
            raws.append(str(item))
            return f"@raw{len(raws) - 1}@"
        if isinstance(item, dict):
            return {key: marked(inner) for key, inner in item.items()}
        return [marked(inner) for inner in item] if isinstance(item, list) else item

    text = json.dumps(marked(value))
    for number, raw in enumerate(raws):
        text = text.replace(f'"@raw{number}@"', raw)
    return text


@cache
def toy(name: str) -> Folder:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "toy"
        if name == "dense":
            write_dense_draft(folder)
        else:
            checkpoints.write_checkpoint(folder, getattr(checkpoints, name))
        files = sorted(path.name for path in folder.iterdir())
        headers, sizes = {}, {}
        for file in files:
            if file.endswith(".safetensors"):
                data = (folder / file).read_bytes()
                length = int.from_bytes(data[:8], "little")
                headers[file] = json.loads(data[8 : 8 + length])
                sizes[file] = len(data) - 8 - length
        values = {file: json.loads((folder / file).read_text()) for file in files if file.endswith(".json")}
        return Folder(values, headers, sizes)


# What can be done to a folder

DEEP = [Raw(f"{'[' * n}{']' * n}") for n in (300, 900, 100_000)] + [Raw('{"a":' * 900 + "1" + "}" * 900)]
JUNK = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 7, 64, 255, 1 << 12, 1 << 16, 1 << 24, (1 << 24) + 1, (1 << 31) - 1, 1 << 48]),
    st.sampled_from([1 << 62, 1 << 63, -(1 << 63), 10**30, 10**400, Raw("1" * 5000), Raw("1e999"), Raw("-0")]),
    st.sampled_from([0.0, 0.5, -1.5, 1e-320, 1e-30, 1e29, 1e308, float("nan"), float("inf"), float("-inf")]),
    st.sampled_from([None, True, False, "", "1", "a\nb", "\0", "\ud800", "‮🦊", "x" * 100_000, "../x", "/etc/passwd"]),
    st.sampled_from([[], {}, [[]], [None], [0] * 5000, {"": {}}, {"main": {}, "compress": {}}, *DEEP]),
    st.sampled_from(["deepseek_v4", "deepseek_v32", "yarn", "default", "BF16", "F8_E4M3", "I8", "U8", "bfloat16"]),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
).map(copy.deepcopy)  # a second change may go into it
# Fields that change what a config means, present in no toy.
NAMES = st.one_of(
    st.sampled_from(["rope_parameters", "layer_types", "compress_rates", "mlp_layer_types", "partial_rotary_factor"]),
    st.sampled_from(["quantization_config", "expert_dtype", "dspark_config", "dtype", "head_dim", "weight_map"]),
    st.sampled_from(["speculators_model_type", "transformer_layer_config", "d2t", "__metadata__", "n_group", "dim"]),
    st.text(max_size=8),
)


def damage_json(draw: Draw, value: Any) -> Any:
    """`value` with one thing somewhere in it changed."""
    inside = [key for key in (value if isinstance(value, dict) else range(len(value)))] if has_parts(value) else []
    if inside and draw(st.integers(0, 9)) > 0:
        key = draw(st.sampled_from(inside))
        if has_parts(value[key]) and draw(st.booleans()):
            value[key] = damage_json(draw, value[key])
            return value
        return damage_member(draw, value, key)
    if isinstance(value, dict):
        value[draw(NAMES)] = draw(JUNK)
        return value
    return draw(JUNK)


def damage_member(draw: Draw, value: Any, key: Any) -> Any:
    how = draw(st.sampled_from(["junk", "junk", "junk", "near", "drop", "twice", "other", "rename"]))
    old = value[key]
    if how == "near" and isinstance(old, int | float) and not isinstance(old, bool):
        value[key] = draw(st.sampled_from([-old, old + 1, old - 1, 2 * old, old / 2, old * 1000, float(old), str(old)]))
    elif how == "drop":
        del value[key]
    elif how == "twice" and isinstance(value, dict):
        value[Twin(key)] = draw(st.sampled_from([old, None]))
    elif how == "twice":
        value.append(old)
    elif how == "other":
        value[key] = copy.deepcopy(value[draw(st.sampled_from(list(value)))] if isinstance(value, dict) else value[0])
    elif how == "rename" and isinstance(value, dict):
        value[draw(NAMES) if draw(st.booleans()) else f"{key}_"] = value.pop(key)
    else:
        value[key] = draw(JUNK)
    return value


def has_parts(value: Any) -> bool:
    return isinstance(value, dict | list) and len(value) > 0


@st.composite
def damaged_config(draw: Draw) -> Folder:
    folder = copy.deepcopy(toy(draw(st.sampled_from(TOYS))))
    for _ in range(draw(st.integers(1, 3))):
        folder.json[CONFIG] = damage_json(draw, folder.json[CONFIG])
    return folder


@st.composite
def damaged_index_or_header(draw: Draw) -> Folder:
    folder = copy.deepcopy(toy(draw(st.sampled_from(TOYS))))
    for _ in range(draw(st.integers(1, 3))):
        part = folder.json if INDEX in folder.json and draw(st.booleans()) else folder.headers
        name = INDEX if part is folder.json else draw(st.sampled_from(list(part)))
        part[name] = damage_json(draw, part[name])
    return folder


@st.composite
def damaged_bytes(draw: Draw) -> Folder:
    folder = copy.deepcopy(toy(draw(st.sampled_from(TOYS))))
    name = draw(st.sampled_from([*folder.json, *folder.headers, *folder.headers]))
    edits = draw(st.lists(byte_edit(name in folder.headers), min_size=1, max_size=3))

    def edited(data: bytes) -> bytes:
        for edit in edits:
            data = edit(data)
        return data

    folder.raw[name] = edited
    return folder


@st.composite
def byte_edit(draw: Draw, shard: bool) -> Callable[[bytes], bytes]:
    how = draw(st.sampled_from(["flip", "cut", "insert", "length"] if shard else ["flip", "cut", "insert"]))
    # Near the front as often as anywhere: that is where the length of a header stands.
    place = draw(st.integers(0, 16) | st.integers(0, 1 << 16))
    if how == "length":
        length = draw(st.sampled_from([0, 1, 7, 10**8, 10**8 + 1, 1 << 32, 1 << 62, (1 << 64) - 1]))
        return lambda data: length.to_bytes(8, "little") + data[8:]
    if how == "flip":
        bit = 1 << draw(st.integers(0, 7))
        return lambda data: bytes(byte ^ bit * (i == place % len(data)) for i, byte in enumerate(data))
    more = draw(st.binary(min_size=1, max_size=16))
    rest = 0 if how == "insert" else draw(st.integers(1, 1 << 12))
    return lambda data: data[: place % (len(data) + 1)] + more * (rest == 0) + data[place % (len(data) + 1) + rest :]


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


PLACES: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_bytes(b"") and None,
    "four bytes": lambda path: path.write_bytes(b"\4\0\0\0") and None,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": link_to("nowhere"),
    "device": link_to("/dev/zero"),
    "outside": link_to("/etc/passwd"),
    "itself": link_to("."),
    "huge": lambda path: path.touch() or os.truncate(path, 1 << 40),  # type: ignore[func-returns-value]
}


@st.composite
def damaged_layout(draw: Draw) -> Folder:
    folder = copy.deepcopy(toy(draw(st.sampled_from(TOYS))))
    files = [*folder.json, *folder.headers]
    for name in draw(st.lists(st.sampled_from(files), min_size=1, max_size=2, unique=True)):
        folder.placed[name] = PLACES[draw(st.sampled_from(sorted(PLACES)))]
    if INDEX in folder.json and draw(st.booleans()):
        weight_map = folder.json[INDEX]["weight_map"]
        elsewhere = ["../x", "/etc/passwd", "/dev/zero", "a/../b", ".", "", "a\\b", "x\0", "y" * 300, "\ud800", CONFIG]
        weight_map[draw(st.sampled_from(sorted(weight_map)))] = draw(st.sampled_from(elsewhere))
    return folder


# What must hold


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Ends what takes too much time or memory, as a failure."""

    def hung(*_: object) -> None:
        raise TimeoutError(f"hung for {HANG} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, HANG)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + BYTES, hard))
    started = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    took = time.process_time() - started
    assert took < SECONDS, f"took {took:.1f} s"


def one_line(message: str) -> None:
    assert message.isprintable(), message
    assert 10 < len(message) < 20_000, len(message)


def check(folder: Path) -> str:
    """Both ways to read the folder end well or with an error that a person can use, and agree. What was found."""
    report: dict[str, Any] | None = None
    found = ""
    with bounded():
        try:
            report = inspect_checkpoint(folder)
        except (CheckpointError, ConfigError) as error:
            found = str(error)
    with bounded():
        refusal = opened(folder, report)
    problems = [found] if report is None else report.get("problems", [])
    for message in (*problems, *([refusal] if refusal else [])):
        one_line(message)
    if report is None:
        assert any(words in found for words in (str(folder), "shard ", "tensor ")), found
        assert refusal, f"opened without an error, but not inspected: {found}"
    if refusal:
        assert str(folder) in refusal, refusal
    if report is not None and "draft_folder" not in report:
        assert bool(report["problems"]) == bool(refusal), (report["problems"], refusal)
    return refusal


def opened(folder: Path, report: dict[str, Any] | None) -> str:
    """What is said against the folder where it is opened to be built with the drafter that `report` names."""
    try:
        checkpoint = Checkpoint.open(folder)
        target, config = TARGETS[checkpoint.config.model_type], checkpoint.config
        if target.detect_draft(config, checkpoint.entries) == "none":
            checkpoint.skip(target.draft_prefix(config))
            checkpoint.check(target.target_tensors(config))
        else:
            checkpoint.check(target.all_tensors(config))
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return ""


# What is damaged, and how many folders: in the fast suite, in the slow one.
KINDS: list[tuple[Callable[[], Any], int, int]] = [
    (damaged_config, 110, 900),
    (damaged_index_or_header, 90, 800),
    (damaged_bytes, 60, 500),
    (damaged_layout, 60, 300),
]
CASES = [pytest.param(kind, few, id=kind.__name__) for kind, few, _ in KINDS]
CASES += [pytest.param(kind, many, id=f"{kind.__name__}-many", marks=pytest.mark.slow) for kind, _, many in KINDS]


@pytest.mark.parametrize("name", TOYS)
def test_the_folders_that_are_damaged_are_sound_before(name: str, tmp_path: Path) -> None:
    folder = toy(name).write(tmp_path / name)
    assert name == "dense" or check(folder) == ""
    assert not inspect_checkpoint(folder).get("problems")


@pytest.mark.parametrize(("kind", "examples"), CASES)
def test_a_damaged_folder_is_refused_by_name_within_bounds(kind: Callable[[], Any], examples: int) -> None:
    """Thousands of folders: no traceback, no hang, no memory by a number in a file; inspecting agrees with opening."""
    refused: list[bool] = []

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,  # wall time is the machine's; `bounded` holds CPU time
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(kind())
    def run(damaged: Folder) -> None:
        with tempfile.TemporaryDirectory() as place:
            refused.append(bool(check(damaged.write(Path(place) / "folder"))))

    run()
    assert len(refused) >= examples
    assert sum(refused) > 0.6 * len(refused), "most damage matters, or the fuzz touches nothing"


def test_the_command_line_answers_a_damaged_folder_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one line on stderr, or 0 where the damage means nothing."""
    codes: list[int] = []

    @settings(max_examples=48, derandomize=True, database=None, deadline=None)
    @given(st.one_of(damaged_config(), damaged_index_or_header(), damaged_bytes(), damaged_layout()))
    def run(damaged: Folder) -> None:
        with tempfile.TemporaryDirectory() as place:
            folder = damaged.write(Path(place) / "folder")
            capsys.readouterr()
            codes.append(main(["inspect", str(folder)]))
            said = capsys.readouterr().err
        assert codes[-1] in (0, 2), said
        assert said.count("\n") == (codes[-1] == 2), said

    run()
    assert codes.count(2) > 24
