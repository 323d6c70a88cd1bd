"""A variant of a named model on disk, written shard by shard: memory holds one piece of one tensor.

The folder appears under its name when it is whole; the index, without which no shard is read, is its last file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from twostroke.builder.checkpoint import INDEX
from twostroke.builder.engine_directory import staging
from twostroke.builder.inventory import DTYPE_BYTES, TensorSpec
from twostroke.builder.make_checkpoint.random_weights import tensor_pieces
from twostroke.builder.make_checkpoint.variants import Variant
from twostroke.engines.errors import BuildError

SHARD_BYTES = 5_000_000_000
_BUFFER = 1 << 20


def write_checkpoint(
    destination: Path,
    variant: Variant,
    *,
    seed: int | None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> int:
    """Writes config, shards and index, and returns how many shards. Without a `seed` the data of the shards are holes
    that read as zeros. Raises BuildError."""
    if destination.is_dir() and any(destination.iterdir()):
        raise BuildError(f"{destination} already exists and is not empty: choose another -o")
    _check_space(destination, variant.nbytes if seed is not None else 0)
    shards = split(variant.tensors)
    weights = {spec.name: spec for spec in variant.tensors}
    done, total = 0, len(variant.tensors)
    with staging(destination, replace=False) as folder:
        (folder / "config.json").write_text(json.dumps(variant.values, indent=2) + "\n")
        weight_map: dict[str, str] = {}
        for number, specs in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            weight_map.update(dict.fromkeys((spec.name for spec in specs), file))
            header = shard_header(specs)
            with open(folder / file, "wb", buffering=_BUFFER) as out:
                out.write(header)
                if seed is None:
                    out.truncate(len(header) + sum(spec.nbytes for spec in specs))
                    continue
                for spec in specs:
                    for piece in tensor_pieces(spec, _weight_of(spec, weights), variant.config.n_routed_experts, seed):
                        out.write(piece)
                    done += 1
                    progress(f"writing {file}", done, total)
        index = {"metadata": {"total_size": variant.nbytes}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return len(shards)


def split(tensors: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """The tensors of each shard, in their order there: what has wide elements first, so that all are aligned. Shards
    are cut from the inventory in turn, at least two of them where there are two tensors."""
    total = sum(spec.nbytes for spec in tensors)
    limit = min(SHARD_BYTES, total // 2)
    shards: list[list[TensorSpec]] = []
    room = 0
    for spec in tensors:
        if not shards or spec.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(spec)
        room -= spec.nbytes
    return [sorted(shard, key=lambda spec: (-DTYPE_BYTES[spec.dtypes[0]], spec.name)) for shard in shards]


def shard_header(specs: Sequence[TensorSpec]) -> bytes:
    """Length and JSON of a safetensors header, padded so that the data begin at a multiple of eight."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for spec in specs:
        end = begin + spec.nbytes
        entries[spec.name] = {"dtype": spec.dtypes[0], "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _weight_of(spec: TensorSpec, weights: dict[str, TensorSpec]) -> TensorSpec:
    """The weight that `spec` scales, or itself."""
    stem, _, last = spec.name.rpartition(".")
    return weights.get(f"{stem}.weight", spec) if last in ("scale", "weight_scale_inv") else spec


def _check_space(destination: Path, needed: int) -> None:
    place = destination.resolve().parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise BuildError(
            f"{destination} needs {needed:,} bytes and {place} has {free:,} free; choose a smaller --scale, fewer "
            "--layers, or --sparse"
        )
