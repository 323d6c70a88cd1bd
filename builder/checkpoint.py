"""A checkpoint folder: config.json and safetensors shards, checked as a whole before any weight is used.

The headers are read here instead of through a library because one pass must report every problem, and because a
memory-mapped tail that is missing reads as zeros or garbage rather than failing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import torch

from twostroke.builder.config import load_config
from twostroke.builder.inventory import DTYPE_BYTES, TensorSpec
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
}
# One byte per element: FP8 values, E8M0 scales, or two packed FP4 values (I8, U8). No family has a plain 8-bit tensor.
_QUANTISED = {"F8_E4M3": "FP8", "F8_E5M2": "FP8", "F8_E8M0": "E8M0 scale", "I8": "packed FP4", "U8": "packed FP4"}
_SCALES = ("scale", "weight_scale_inv")  # as V4 and as V3.2 call the scale beside a quantised weight
_NOT_READ_YET = "quantised weights are not read yet; convert to bf16"


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
        self._sizes: dict[str, int] = {}
        for entry in entries.values():
            self._sizes[entry.file] = max(self._sizes.get(entry.file, 0), entry.offset + entry.nbytes)
        self._mapped: dict[str, torch.Tensor] = {}

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Read config, index and every shard header; no weights. Raises ConfigError for the config, and as
        `read_entries` for the rest."""
        folder = Path(folder)
        return cls(folder, load_config(folder), read_entries(folder))

    def check(self, inventory: Iterable[TensorSpec]) -> None:
        """Compare with what the network needs: unknown, missing, misshapen and mistyped tensors, all in one error.

        Tensors that were skipped are not unknown. Raises CheckpointError.
        """
        specs = {spec.name: spec for spec in inventory}
        quantised = {name for name, spec in specs.items() if name in self.entries and self._is_quantised(spec)}
        stems = [name.removesuffix(".weight") for name in quantised]
        scales = {f"{stem}.{scale}" for stem in stems for scale in _SCALES} - specs.keys()
        unknown = self.entries.keys() - specs.keys() - self.skipped - scales
        missing = [name for name, spec in specs.items() if name not in self.entries and spec.copy_of is None]
        problems = [f"missing tensor {name} {list(specs[name].shape)}" for name in missing]
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
            problems.append(f"{_QUANTISED[self.entries[name].dtype]} tensor {name}: {_NOT_READ_YET}")
        if problems:
            raise _collected(f"{self.folder} does not hold the tensors its config describes", problems)

    def _is_quantised(self, spec: TensorSpec) -> bool:
        dtype = self.entries[spec.name].dtype
        return dtype in _QUANTISED and dtype not in spec.dtypes

    def read(self, name: str) -> torch.Tensor:
        """Tensor `name` in the dtype and shape stored, and mark it consumed.

        It shares the memory of the mapped file (copy on write: changing it never reaches the file, but a second `read`
        of the same name sees the change); a tensor that is not aligned to its dtype is copied. Raises CheckpointError
        for an unknown name, a quantised dtype, or a file that changed since `open`.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder} has no tensor {named(name)}")
        if entry.dtype in _QUANTISED:
            raise CheckpointError(f"{_QUANTISED[entry.dtype]} tensor {name}: {_NOT_READ_YET}")
        dtype = _TORCH_DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(f"tensor {name} has dtype {entry.dtype}; readable: {', '.join(_TORCH_DTYPES)}")
        if entry.nbytes == 0:
            tensor = torch.empty(entry.shape, dtype=dtype)
        else:
            mine = self._bytes_of(entry.file)[entry.offset : entry.offset + entry.nbytes]
            if entry.offset % dtype.itemsize:
                mine = mine.clone()
            tensor = mine.view(dtype).view(entry.shape)
        self.consumed.add(name)
        return tensor

    def _bytes_of(self, file: str) -> torch.Tensor:
        """The whole file as u8, mapped copy-on-write at its first use."""
        if file not in self._mapped:
            path, size = self.folder / file, self._sizes[file]
            found = path.stat().st_size if path.is_file() else 0
            if found != size:
                raise CheckpointError(f"{path} changed since it was opened: it had {size} bytes and has {found} now")
            self._mapped[file] = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        return self._mapped[file]

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


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the folder's shards, from index and headers.

    Raises CheckpointError with all findings in `problems`: a shard that is missing, truncated or longer than its header
    says, offsets that overlap or leave the file, and every disagreement between index and shards.
    """
    weight_map, files, problems = _weight_map(folder)
    shards: dict[str, dict[str, TensorEntry]] = {}
    for file in files:
        try:
            shards[file] = read_header(folder, file)
        except CheckpointError as error:
            problems.extend(error.problems or (str(error),))
    problems.extend(_disagreements(weight_map, shards))
    if problems:
        raise _collected(f"{folder} is not a usable checkpoint", problems)
    return {name: entry for shard in shards.values() for name, entry in shard.items()}


def read_header(folder: Path, file: str) -> dict[str, TensorEntry]:
    """The entries of one safetensors file, checked against its size. Raises CheckpointError with all findings.

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
    problems: list[str] = []
    entries: dict[str, TensorEntry] = {}
    for name, value in values.items():
        try:
            entries[name] = _entry(file, 8 + length, value)
        except CheckpointError as error:
            problems.append(f"{shard}, tensor {named(name)}: {error}")
    if not problems:
        problems = _layout_problems(shard, entries, 8 + length, actual)
    if problems:
        raise CheckpointError("; ".join(problems), tuple(problems))
    return entries


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
    for name, file in mapping.items():
        if _stays_inside(file):
            kept[name] = file
        else:
            problems.append(
                f"{INDEX}: {named(name)} is in {shown(file)}; expected the name of a shard inside the folder"
            )
    return kept, problems


def _stays_inside(file: object) -> bool:
    if not isinstance(file, str) or not file or any(mark in file for mark in ("\\", "\0")):
        return False
    path = PurePosixPath(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and str(path) == file


def _disagreements(weight_map: Mapping[str, str] | None, shards: Mapping[str, Mapping[str, TensorEntry]]) -> list[str]:
    """Index against headers. A shard that could not be read is reported already and not held to it."""
    holders: dict[str, list[str]] = {}
    for file, entries in shards.items():
        for name in entries:
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


def _collected(title: str, problems: Sequence[str], limit: int = 20) -> CheckpointError:
    """One error for all findings: the first `limit` in the message, every one in `problems`."""
    rest = f"; and {len(problems) - limit:,} more" if len(problems) > limit else ""
    return CheckpointError(f"{title}: {'; '.join(problems[:limit])}{rest}", tuple(problems))
