"""Which tensors a drafter has of its own, and which it shares with its target.

Releases store the embedding and the head of a draft layer as copies of the target's, as tensors of its own, or not at
all. What is absent or equal is shared and stored once; what differs is kept: dropping it, or leaving a head unset,
costs every accepted token without an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch

from twostroke.builder.checkpoint import Checkpoint
from twostroke.builder.inventory import TensorSpec
from twostroke.builder.resumable_file import PIECE

_BLOCK = PIECE // 8  # elements: a piece of any dtype is a whole number of blocks

_log = logging.getLogger(__name__)


def own_tensors(checkpoint: Checkpoint, inventory: Iterable[TensorSpec]) -> frozenset[str]:
    """Names of the tensors that may be copies and are not. What is shared for want of a tensor, and what is not shared,
    is logged. The checkpoint's ledger counts all of them as read. The target's tensors must be there."""
    own: set[str] = set()
    for spec in inventory:
        if spec.copy_of is None:
            continue
        if spec.name not in checkpoint.entries:
            _log.info("the draft has no %s: the target's %s is used", spec.name, spec.copy_of)
        elif not _equal(checkpoint, spec.name, spec.copy_of):
            _log.warning("%s differs from the target's %s: the draft keeps its own", spec.name, spec.copy_of)
            own.add(spec.name)
    return frozenset(own)


def _equal(checkpoint: Checkpoint, mine: str, target: str) -> bool:
    """Equal values, element by element whatever the dtypes, in pieces: a released pair is two gigabytes each."""
    if checkpoint.entries[mine].shape != checkpoint.entries[target].shape:
        return False
    ours, theirs = _blocks(checkpoint, mine), _blocks(checkpoint, target)
    return all(torch.equal(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True))


def _blocks(checkpoint: Checkpoint, name: str) -> Iterator[torch.Tensor]:
    """Flat blocks of as many elements for every dtype."""
    for piece in checkpoint.values(name):
        yield from piece.split(_BLOCK)
