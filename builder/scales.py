"""Scales of quantised weights are numbers: read once before any weight is used, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twostroke.builder.checkpoint import SCALES, Checkpoint, TensorEntry, collected

NAN_BYTE = 255  # the only E8M0 byte that is no power of two
PIECE = 1 << 24  # bytes


def check_scales(checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint with a scale that is NaN or infinite, naming every tensor that has one: a block of weights
    would be lost without a word. The files are read, not mapped: nothing stays in memory.

    Tensors that were skipped are not read. Raises CheckpointError.
    """
    problems = []
    for name, entry in sorted(checkpoint.entries.items(), key=lambda item: (item[1].file, item[1].offset)):
        if name in checkpoint.skipped or not _is_scale(checkpoint, name):
            continue
        bytewise = entry.dtype in ("F8_E8M0", "U8")
        bad = sum(_count_bad(piece, bytewise) for piece in _pieces(checkpoint, entry, "u1" if bytewise else "<f4"))
        if bad:
            what = f"E8M0 byte {NAN_BYTE}, which is NaN" if bytewise else "NaN or infinite"
            problems.append(f"tensor {name} has {bad:,} scales that are no numbers ({what}); expected finite ones")
    if problems:
        raise collected(f"{checkpoint.folder} cannot be dequantised", problems)


def _is_scale(checkpoint: Checkpoint, name: str) -> bool:
    stem, _, suffix = name.rpartition(".")
    weight = checkpoint.entries.get(f"{stem}.weight")
    return suffix in SCALES and weight is not None and weight.dtype in ("F8_E4M3", "I8")


def _count_bad(scales: np.ndarray, bytewise: bool) -> int:
    return int((scales == NAN_BYTE).sum() if bytewise else (~np.isfinite(scales)).sum())


def _pieces(checkpoint: Checkpoint, entry: TensorEntry, dtype: str) -> Iterator[np.ndarray]:
    """The tensor's values in file order, at most PIECE bytes at once."""
    with open(checkpoint.folder / entry.file, "rb") as shard:
        shard.seek(entry.offset)
        for start in range(0, entry.nbytes, PIECE):
            yield np.frombuffer(shard.read(min(PIECE, entry.nbytes - start)), dtype)
