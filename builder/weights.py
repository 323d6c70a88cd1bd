"""From checkpoint tensors to the weight bindings of an engine.

A network's parameter carries the name of the checkpoint tensor it is; the experts of a layer are one bank, stacked
from one tensor an expert: `P.experts.M.weight` from all `P.experts.<e>.M.weight`. Bytes usable as stored stay in the
checkpoint's shard, the rest is written once into `weights.bin`, in pieces: a checkpoint is far larger than memory. FP8
and FP4 codes are bound as they are.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

import twostroke
from twostroke.builder.checkpoint import SCALES, Checkpoint, TensorEntry
from twostroke.builder.resumable_file import Part, Progress, write_parts
from twostroke.builder.scales import check_scales
from twostroke.engines.manifest import ShardRecord, WeightRecord, WeightsIndex
from twostroke.plugins.quantised.reference import dequantise_fp4, dequantise_fp8

WEIGHTS_BIN = "weights.bin"
ALIGNMENT = 64
_BANK = re.compile(r"(?P<prefix>.*\.experts)\.(?P<matrix>\w+)\.(?P<tensor>\w+)$")
_STORED = {
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.uint8,
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
    "I8": torch.uint8,
}


@dataclass(frozen=True)
class WeightSource:
    """The checkpoint tensors behind one binding: one, or one an expert to be stacked."""

    names: tuple[str, ...]
    stacked: bool

    @property
    def transform(self) -> str:
        return "stack" if self.stacked else "convert"


def weight_source(name: str, shape: tuple[int, ...]) -> WeightSource:
    """Source of the parameter `name` of shape `shape`."""
    bank = _BANK.match(name)
    if bank is None:
        return WeightSource((name,), stacked=False)
    prefix, rest = bank["prefix"], f"{bank['matrix']}.{bank['tensor']}"
    return WeightSource(tuple(f"{prefix}.{e}.{rest}" for e in range(shape[0])), stacked=True)


def read_weight(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The value of a parameter, in memory of its own: codes as they are for one of uint8, their values for another."""
    source = weight_source(name, shape)
    tensors = [_value(checkpoint, n, dtype) for n in source.names]
    return torch.stack(tensors) if source.stacked else tensors[0]


def _value(checkpoint: Checkpoint, tensor: str, dtype: torch.dtype) -> Tensor:
    stored = checkpoint.read(tensor)
    if not _holds_codes(checkpoint.entries[tensor], dtype):
        return stored.to(dtype)
    stem = tensor.removesuffix(".weight")
    scale = next(checkpoint.read(f"{stem}.{s}") for s in SCALES if f"{stem}.{s}" in checkpoint.entries)
    dequantise = dequantise_fp8 if checkpoint.entries[tensor].dtype == "F8_E4M3" else dequantise_fp4
    return dequantise(stored, scale).to(dtype)


def _holds_codes(entry: TensorEntry, dtype: torch.dtype) -> bool:
    """Whether a value of `dtype` is more than the stored number: a code times its scale."""
    return dtype != torch.uint8 and entry.dtype in ("F8_E4M3", "I8")


def load_into(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Fills every parameter of a network (the eager oracle; engines never hold a module)."""
    for name, parameter in module.named_parameters():
        parameter.data = read_weight(checkpoint, name, tuple(parameter.shape), parameter.dtype)


def plan_weights(
    checkpoint: Checkpoint, parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, WeightRecord]:
    """Where the bytes of every weight binding are, or will be when `weights.bin` is written. Reads nothing."""
    shards = {file: str((checkpoint.folder / file).resolve()) for file in checkpoint.files()}
    records, end = {}, 0
    for name, (shape, dtype) in parameters.items():
        source = weight_source(name, shape)
        entry = None if source.stacked else checkpoint.entries[source.names[0]]
        if entry is not None and usable(entry, dtype):
            place = (shards[entry.file], entry.offset, entry.nbytes)
            records[name] = WeightRecord(*place, _name(dtype), shape, "as stored")
        else:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + math.prod(shape) * dtype.itemsize
            records[name] = WeightRecord(WEIGHTS_BIN, start, end - start, _name(dtype), shape, source.transform)
    return records


def written_bytes(records: Mapping[str, WeightRecord]) -> int:
    """Size of the `weights.bin` that the plan asks for."""
    return max((part.end for part in _parts(records)), default=0)


def collect(
    checkpoint: Checkpoint,
    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    folder: Path,
    progress: Progress = lambda what, done, total: None,
    choices: str = "",
) -> WeightsIndex:
    """Writes `weights.bin` into `folder` and says where every weight binding's bytes are. In memory is one piece of a
    tensor, or one tensor where its codes are multiplied out.

    What a killed process left of the same file is kept: the same shards by size, date and header, the same weights,
    `choices` and version. Raises as `check_scales`.
    """
    check_scales(checkpoint)
    records = plan_weights(checkpoint, parameters)
    shards = {
        path: shard_record(path) for path in {(checkpoint.folder / file).resolve() for file in checkpoint.files()}
    }
    inputs = [(str(path), path.stat().st_mtime_ns, msgspec.to_builtins(shards[path])) for path in sorted(shards)]
    key = json.dumps([twostroke.__version__, choices, inputs, msgspec.to_builtins(records)])

    def content(part: Part) -> Iterator[memoryview]:
        shape, dtype = parameters[part.name]
        for name in weight_source(part.name, shape).names:
            yield from _bytes(checkpoint, name, dtype)

    for name, (shape, _) in parameters.items():
        for tensor in weight_source(name, shape).names:
            checkpoint.use(tensor)
    digest = hashlib.sha256(key.encode()).hexdigest()
    write_parts(folder / WEIGHTS_BIN, digest, _parts(records), content, progress)
    referred = {record.file for record in records.values()}
    return WeightsIndex(records, {str(path): shards[path] for path in sorted(shards) if str(path) in referred})


def _parts(records: Mapping[str, WeightRecord]) -> list[Part]:
    return [Part(name, r.offset, r.bytes) for name, r in records.items() if r.file == WEIGHTS_BIN]


def _bytes(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Iterator[memoryview]:
    """A tensor's bytes as a weight of `dtype`."""
    entry = checkpoint.entries[name]
    if _STORED.get(entry.dtype) == dtype:
        yield from checkpoint.pieces(name)
    elif _holds_codes(entry, dtype):
        yield _memory(_value(checkpoint, name, dtype))
    else:
        for values in checkpoint.values(name):
            yield _memory(values.to(dtype))


def _memory(values: Tensor) -> memoryview:
    return values.contiguous().view(-1).view(torch.uint8).numpy().data


def parameters_of(modules: Iterable[nn.Module]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Every weight binding the modules need, each once: the draft shares the target's embedding and head by name."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            found.setdefault(name, (tuple(parameter.shape), parameter.dtype))
    return found


def shard_record(path: Path) -> ShardRecord:
    """Size and header hash of a safetensors shard: enough to notice that it was replaced."""
    with open(path, "rb") as shard:
        length = shard.read(8)
        header = shard.read(int.from_bytes(length, "little"))
    return ShardRecord(path.stat().st_size, hashlib.sha256(length + header).hexdigest())


def usable(entry: TensorEntry, dtype: torch.dtype) -> bool:
    """Whether the bytes of a tensor are, where they are, a weight of `dtype`."""
    return _STORED.get(entry.dtype) == dtype and entry.offset % dtype.itemsize == 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
