"""A checkpoint folder: config.json and safetensors shards, checked as a whole before any weight is used.

The headers are read here instead of through a library because one pass must report every problem.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import torch

from twostroke.builder.config import load_config
from twostroke.builder.inventory import DTYPE_BYTES, TensorSpec
from twostroke.builder.resumable_file import PIECE
from twostroke.builder.strict_json import named, parse_json_object, read_json_object, shown, shown_list
from twostroke.engines.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    # Codes: FP8, E8M0 scales, two packed FP4 a byte. No family has a plain 8-bit tensor.
    "F8_E4M3": torch.uint8,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
    "U8": torch.uint8,
}
_QUANTISED = {"F8_E4M3": "FP8", "F8_E5M2": "FP8", "F8_E8M0": "E8M0 scale", "I8": "packed FP4", "U8": "packed FP4"}
SCALES = ("scale", "weight_scale_inv", "weight_scale")  # what the scales beside a quantised weight are called
_NOT_ANNOUNCED = "the config has no quantization_config; restore it, or convert the folder to bf16"


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies. `offset` counts from the start of `file` (relative to the folder); `dtype` is as stored."""

    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of one folder and a ledger of which were consumed. Make it with `Checkpoint.open`.

    `config` is the ModelConfig of the checkpoint's family.
    """

    def __init__(self, folder: Path, config: Any, entries: Mapping[str, TensorEntry]) -> None:
        self.folder = folder
        self.config = config
        self.entries: Mapping[str, TensorEntry] = MappingProxyType(dict(entries))
        self.consumed: set[str] = set()
        self.skipped: set[str] = set()
        self._sizes = {file: _size(folder / file) for file in sorted({entry.file for entry in entries.values()})}

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Read config, index and every shard header; no weights. Raises ConfigError for the config, and as
        `read_entries` for the rest."""
        folder = Path(folder)
        config = load_config(folder)
        return cls(folder, config, in_family_names(config, read_entries(folder)))

    def check(self, inventory: Iterable[TensorSpec]) -> None:
        """Compare with what the network needs: unknown, missing, misshapen and mistyped tensors, all in one error.

        Tensors that were skipped are not unknown. Raises CheckpointError.
        """
        if problems := self.problems(inventory):
            raise collected(f"{self.folder} does not hold the tensors its config describes", problems)

    def problems(self, inventory: Iterable[TensorSpec], excused: Collection[str] = ()) -> list[str]:
        """What `check` would complain of; tensors that are `excused` are not missing, their shard is damaged."""
        specs = {spec.name: spec for spec in inventory}
        unannounced = not self.config.quantised
        quantised = {n for n, spec in specs.items() if unannounced and n in self.entries and self._is_quantised(spec)}
        stems = [name.removesuffix(".weight") for name in quantised]
        scales = {f"{stem}.{scale}" for stem in stems for scale in SCALES} - specs.keys()
        unknown = self.entries.keys() - specs.keys() - self.skipped - scales
        present = self.entries.keys() | set(excused)
        missing = [name for name, spec in specs.items() if name not in present and spec.copy_of is None]
        problems = [self._missing(specs[name]) for name in missing]
        problems += [f"unknown tensor {named(name)}, which nothing would read" for name in sorted(unknown)]
        for name, spec in specs.items():
            entry = self.entries.get(name)
            if entry is None or name in quantised:
                continue
            if entry.shape != spec.shape:
                problems.append(f"tensor {name} has shape {list(entry.shape)}; expected {list(spec.shape)}")
            if entry.dtype not in spec.dtypes:
                problems.append(f"tensor {name} has dtype {entry.dtype}; accepted: {', '.join(spec.dtypes)}")
        for name in sorted(quantised):
            problems.append(f"{_QUANTISED[self.entries[name].dtype]} tensor {name}: {_NOT_ANNOUNCED}")
        return problems

    def _missing(self, spec: TensorSpec) -> str:
        weight = self.entries.get(f"{spec.name.rpartition('.')[0]}.weight")
        if spec.name.endswith(SCALES) and weight is not None and weight.dtype in _QUANTISED:
            name = spec.name.rpartition(".")[0]
            return (
                f"{_QUANTISED[weight.dtype]} tensor {name}.weight has no scale: there is no {name} with suffix "
                f"{', '.join(f'.{suffix}' for suffix in SCALES)}"
            )
        return f"missing tensor {spec.name} {list(spec.shape)}"

    def _is_quantised(self, spec: TensorSpec) -> bool:
        dtype = self.entries[spec.name].dtype
        return dtype in _QUANTISED and dtype not in spec.dtypes

    def use(self, name: str) -> TensorEntry:
        """Where tensor `name` is, and mark it consumed. Raises CheckpointError for an unknown name, or a file that
        changed since `open`."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder} has no tensor {named(name)}")
        path, size = self.folder / entry.file, self._sizes[entry.file]
        if (found := _size(path)) != size:
            raise CheckpointError(f"{path} changed since it was opened: it had {size} bytes and has {found} now")
        self.consumed.add(name)
        return entry

    def pieces(self, name: str) -> Iterator[memoryview]:
        """The bytes of tensor `name` as stored, at most PIECE at a time and always whole elements. A piece is valid
        until the next one is asked for. Marks the tensor consumed. Raises CheckpointError as `use` does.

        The file is read, not mapped: pages of a mapping count as this process's own memory for as long as it stays.
        """
        entry = self.use(name)
        left, buffer = entry.nbytes, memoryview(bytearray(min(PIECE, entry.nbytes)))
        path = self.folder / entry.file
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(entry.offset)
                while left:
                    piece = buffer[: min(PIECE, left)]
                    _fill(file, piece)
                    left -= len(piece)
                    yield piece
        except (OSError, EOFError) as reason:
            raise CheckpointError(f"{path} cannot be read: {getattr(reason, 'strerror', None) or reason}") from None

    def values(self, name: str) -> Iterator[torch.Tensor]:
        """Tensor `name`, flat, in the dtype stored (codes as uint8), in pieces as `pieces`."""
        dtype = self._torch_dtype(name)
        return (torch.frombuffer(piece, dtype=dtype) for piece in self.pieces(name))

    def read(self, name: str) -> torch.Tensor:
        """Tensor `name` in the dtype and shape stored, codes as uint8, in memory of its own, and mark it consumed.
        Raises CheckpointError for an unknown name, a dtype no family has, or a file that changed since `open`."""
        entry = self.use(name)
        tensor, at = torch.empty(math.prod(entry.shape), dtype=self._torch_dtype(name)), 0
        for piece in self.values(name):
            tensor[at : at + len(piece)] = piece
            at += len(piece)
        return tensor.view(entry.shape)

    def _torch_dtype(self, name: str) -> torch.dtype:
        stored = self.entries[name].dtype
        if stored not in _TORCH_DTYPES:
            raise CheckpointError(f"tensor {name} has dtype {stored}; readable: {', '.join(_TORCH_DTYPES)}")
        return _TORCH_DTYPES[stored]

    def files(self) -> tuple[str, ...]:
        """The shards, relative to the folder."""
        return tuple(self._sizes)

    def skip(self, prefix: str) -> tuple[str, ...]:
        """Leave the tensors under `prefix` out on purpose. Returns their names, which the caller must show."""
        names = tuple(sorted(name for name in self.entries if name.startswith(prefix)))
        self.skipped.update(names)
        return names

    def unconsumed(self) -> tuple[str, ...]:
        """Names neither read nor skipped, sorted."""
        return tuple(sorted(self.entries.keys() - self.consumed - self.skipped))

    def assert_all_consumed(self) -> None:
        """Raise CheckpointError if a tensor was neither read nor skipped: a drafter without its head still runs."""
        left = self.unconsumed()
        if left:
            raise CheckpointError(
                f"{self.folder}: {len(left):,} tensors were read by nobody: {shown_list(left)}",
                tuple(f"tensor {name} was read by nobody" for name in left),
            )


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _fill(file: RawIOBase, piece: memoryview) -> None:
    while piece:
        count = file.readinto(piece)
        if not count:
            raise EOFError("it ends early")
        piece = piece[count:]


@dataclass(frozen=True)
class Survey:
    """All that one pass over index and headers finds. `damaged` are tensors that index or header name and of which no
    sound entry was found; `problems` says why."""

    entries: Mapping[str, TensorEntry]
    damaged: frozenset[str]
    problems: tuple[str, ...]


def read_entries(folder: Path) -> Mapping[str, TensorEntry]:
    """Every tensor of the folder's shards, from index and headers.

    Raises CheckpointError with all findings in `problems`: a shard that is missing, truncated or longer than its header
    says, offsets that overlap or leave the file, and every disagreement between index and shards.
    """
    found = survey(folder)
    if found.problems:
        raise collected(f"{folder} is not a usable checkpoint", found.problems)
    return found.entries


def survey(folder: Path) -> Survey:
    """As `read_entries`, with the findings beside what is sound. Raises CheckpointError where there is nothing to read:
    no folder, no index, no shard."""
    weight_map, files, problems = _weight_map(folder)
    headers: dict[str, _Header] = {}
    for file in files:
        try:
            headers[file] = _read_header(folder, file)
            problems.extend(headers[file].problems)
        except CheckpointError as error:
            problems.append(str(error))
    problems.extend(_disagreements(weight_map, headers))
    entries = {name: entry for header in headers.values() for name, entry in header.entries.items()}
    mentioned = {name for header in headers.values() for name in header.damaged}
    mentioned.update(name for name, file in (weight_map or {}).items() if file not in headers)
    return Survey(entries, frozenset(mentioned - entries.keys()), tuple(problems))


def in_family_names(config: Any, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries under the names of the original layout of the config's family, scales included, whichever names a
    folder uses."""
    from twostroke.builder.networks.registry import TARGETS  # here: networks are written in terms of this module

    found = TARGETS[config.model_type].original_names(entries)
    return with_family_scales(found, config.scale_suffix) if config.quantised else found


def with_family_scales(entries: Mapping[str, TensorEntry], suffix: str) -> dict[str, TensorEntry]:
    """The entries with each quantised weight's scale under its family's `suffix`, whichever of SCALES a folder uses. A
    weight with two scales keeps both names."""
    found = dict(entries)
    for name, entry in entries.items():
        stem = name.removesuffix(".weight")
        held = [f"{stem}.{other}" for other in SCALES if f"{stem}.{other}" in entries]
        if entry.dtype in _QUANTISED and len(held) == 1 and stem != name:
            found[f"{stem}.{suffix}"] = found.pop(held[0])
    return found


@dataclass(frozen=True)
class _Header:
    """The sound entries of one shard, the names of the others, and what is wrong."""

    entries: Mapping[str, TensorEntry]
    damaged: tuple[str, ...]
    problems: tuple[str, ...]

    def names(self) -> Iterable[str]:
        return (*self.entries, *self.damaged)


def _read_header(folder: Path, file: str) -> _Header:
    """The header of one safetensors file, checked against its size. Raises CheckpointError where it cannot be read.

    Layout: 8 bytes little-endian header length, that many bytes of JSON, then the tensors without gap or overlap.
    """
    path, shard = folder / file, f"shard {named(file)}"
    try:
        if not path.is_file():
            raise CheckpointError(f"{shard} is {'not a regular file' if path.exists() else 'missing'}")
        with path.open("rb") as stream:
            actual = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            least = 8 + length if actual >= 8 else 8
            if length > MAX_HEADER_BYTES and actual >= 8:
                raise CheckpointError(
                    f"{shard} claims a header of {length} bytes where at most {MAX_HEADER_BYTES} are accepted (actual"
                    f" size {actual} bytes): it is not a safetensors file"
                )
            if actual < least:
                raise CheckpointError(
                    f"{shard} is truncated: expected at least {least} bytes, actual size {actual} bytes"
                )
            header = stream.read(length)
    except (OSError, ValueError) as reason:
        raise CheckpointError(f"{shard} cannot be read: {getattr(reason, 'strerror', None) or reason}") from None
    values = parse_json_object(header, f"header of {shard}", CheckpointError)
    values.pop("__metadata__", None)
    problems: dict[str, str] = {}
    entries: dict[str, TensorEntry] = {}
    for name, value in values.items():
        try:
            entries[name] = _entry(file, 8 + length, value)
        except CheckpointError as error:
            problems[name] = f"{shard}, tensor {named(name)}: {error}"
    # A damaged entry leaves a gap that is no second finding.
    layout = [] if problems else _layout_problems(shard, entries, 8 + length, actual)
    return _Header(entries, tuple(problems), (*problems.values(), *layout))


def _entry(file: str, start: int, value: Any) -> TensorEntry:
    """One header entry {dtype, shape, data_offsets}. Raises CheckpointError."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"header entry {shown(value)}; expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"dtype {shown(dtype)}; accepted: {', '.join(DTYPE_BYTES)}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape) or len(shape) > 16:
        raise CheckpointError(f"shape {shown(shape)}; expected at most 16 sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        raise CheckpointError(f"data_offsets {shown(offsets)}; expected [begin, end]")
    begin, end = offsets
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if not 0 <= begin <= end < 1 << 62 or end - begin != nbytes:
        raise CheckpointError(f"data_offsets {shown(offsets)}; expected {nbytes} bytes for {dtype} {shown(shape)}")
    return TensorEntry(file, start + begin, nbytes, dtype, tuple(shape))


def _layout_problems(shard: str, entries: Mapping[str, TensorEntry], start: int, actual: int) -> list[str]:
    """Overlaps and gaps between tensors, and a file shorter or longer than its header says."""
    problems = []
    previous, reached = "the header", start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != reached:
            how = "overlaps" if entry.offset < reached else "leaves a gap after"
            problems.append(f"{shard}: tensor {named(name)} {how} {named(previous)}")
        if entry.offset + entry.nbytes >= reached:
            previous, reached = name, entry.offset + entry.nbytes
    if reached > actual:
        problems.append(f"{shard} is truncated: expected {reached} bytes, actual size {actual} bytes")
    if reached < actual:
        problems.append(
            f"{shard} has {actual - reached} trailing bytes: expected {reached} bytes, actual size {actual} bytes"
        )
    return problems


def _weight_map(folder: Path) -> tuple[dict[str, str] | None, list[str], list[str]]:
    """(tensor -> shard as the index says, shards to read, problems). Without an index: (None, one file, none)."""
    try:
        present = sorted(path.name for path in folder.iterdir() if path.name.endswith(".safetensors"))
    except OSError as reason:
        raise CheckpointError(f"{folder} cannot be listed: {reason}") from None
    weight_map: dict[str, str] | None = None
    files = [SINGLE]
    problems: list[str] = []
    if not (folder / INDEX).exists():
        if SINGLE not in present:
            found = f"found {shown_list(present, 5)}" if present else "no safetensors file is there"
            raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE}; {found}")
    else:
        weight_map, problems = _read_index(folder / INDEX)
        files = sorted(set(weight_map.values()))
    for stray in sorted(set(present) - set(files)):
        why = f"{INDEX} does not name it" if weight_map is not None else f"without {INDEX} only {SINGLE} is read"
        problems.append(f"{named(stray)} lies in the folder, but {why}")
    return weight_map, files, problems


def _read_index(path: Path) -> tuple[dict[str, str], list[str]]:
    """The index's weight_map without the entries that cannot be file names inside the folder, and those as problems."""
    mapping = read_json_object(path, CheckpointError).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(f"{path}: weight_map is {shown(mapping)}; expected an object of tensor name -> shard")
    problems, kept = [], {}
    inside = {file for file in {file for file in mapping.values() if isinstance(file, str)} if _stays_inside(file)}
    for name, file in mapping.items():
        if isinstance(file, str) and file in inside:
            kept[name] = file
        else:
            problems.append(
                f"{INDEX}: {named(name)} is in {shown(file)}; expected the name of a shard inside the folder"
            )
    return kept, problems


def _stays_inside(file: str) -> bool:
    if not file or any(mark in file for mark in ("\\", "\0")):
        return False
    path = PurePosixPath(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and str(path) == file


def _disagreements(weight_map: Mapping[str, str] | None, shards: Mapping[str, _Header]) -> list[str]:
    """Index against headers. A shard that could not be read is reported already and not held to it."""
    holders: dict[str, list[str]] = {}
    for file, header in shards.items():
        for name in header.names():
            holders.setdefault(name, []).append(file)
    problems = [
        f"tensor {named(name)} is in more than one shard: {shown_list(held)}"
        for name, held in holders.items()
        if len(held) > 1
    ]
    for name, file in (weight_map or {}).items():
        held = holders.get(name, [])
        if file in shards and file not in held:
            where = f"it is in {named(held[0])}" if held else "no shard has it"
            problems.append(f"{INDEX} says tensor {named(name)} is in {named(file)}, which lacks it; {where}")
    if weight_map is not None:
        for name, held in holders.items():
            if name not in weight_map:
                problems.append(f"tensor {named(name)} is in {named(held[0])}, but {INDEX} does not name it")
    return problems


def collected(title: str, problems: Sequence[str], limit: int = 20) -> CheckpointError:
    """One error for all findings: the first `limit` in the message, every one in `problems`."""
    rest = f"; and {len(problems) - limit:,} more" if len(problems) > limit else ""
    return CheckpointError(f"{title}: {'; '.join(problems[:limit])}{rest}", tuple(problems))
