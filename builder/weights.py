"""From checkpoint tensors to the weight bindings of an engine.

A network's parameter carries the name of the checkpoint tensor it is; the experts of a layer are one bank, stacked
from one tensor an expert: `P.experts.M.weight` from all `P.experts.<e>.M.weight`. Bytes usable as stored stay in the
checkpoint's shard, the rest is written once into `weights.bin`. FP8 and FP4 codes are bound as they are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from twostroke.builder.checkpoint import SCALES, Checkpoint, TensorEntry
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

    def value(tensor: str) -> Tensor:
        stored = checkpoint.read(tensor)
        if dtype == torch.uint8 or checkpoint.entries[tensor].dtype not in ("F8_E4M3", "I8"):
            return stored.to(dtype)
        stem = tensor.removesuffix(".weight")
        scale = next(checkpoint.read(f"{stem}.{s}") for s in SCALES if f"{stem}.{s}" in checkpoint.entries)
        dequantise = dequantise_fp8 if checkpoint.entries[tensor].dtype == "F8_E4M3" else dequantise_fp4
        return dequantise(stored, scale).to(dtype)

    tensors = [value(n) for n in source.names]
    return torch.stack(tensors) if source.stacked else tensors[0].clone()


def load_into(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Fills every parameter of a network (the eager oracle; engines never hold a module)."""
    for name, parameter in module.named_parameters():
        parameter.data = read_weight(checkpoint, name, tuple(parameter.shape), parameter.dtype)


def collect(
    checkpoint: Checkpoint,
    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    folder: Path,
    advance: Callable[[str, int], None] = lambda name, done: None,
) -> WeightsIndex:
    """Writes `weights.bin` into `folder` and says where every weight binding's bytes are. Raises as `check_scales`."""
    check_scales(checkpoint)
    weights: dict[str, WeightRecord] = {}
    shards: dict[str, ShardRecord] = {}
    with open(folder / WEIGHTS_BIN, "wb") as out:
        for name, (shape, dtype) in parameters.items():
            source = weight_source(name, shape)
            entry = None if source.stacked else checkpoint.entries[source.names[0]]
            if entry is not None and usable(entry, dtype):
                checkpoint.read(source.names[0])
                shard = str((checkpoint.folder / entry.file).resolve())
                if shard not in shards:
                    shards[shard] = shard_record(Path(shard))
                record = WeightRecord(shard, entry.offset, entry.nbytes, _name(dtype), shape, "as stored")
            else:
                value = read_weight(checkpoint, name, shape, dtype)
                out.write(b"\0" * (-out.tell() % ALIGNMENT))
                start = out.tell()
                out.write(value.contiguous().view(torch.uint8).numpy().data.cast("B"))
                record = WeightRecord(WEIGHTS_BIN, start, out.tell() - start, _name(dtype), shape, source.transform)
            weights[name] = record
            advance(name, len(weights))
    return WeightsIndex(weights, shards)


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
