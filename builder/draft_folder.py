"""A drafter in a folder of its own, beside a target without one.

The draft folder has a config.json of the target's family and the draft's tensors under the names they have in a
combined checkpoint. An embedding or a head under the target's name is the draft's own.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from twostroke.builder.checkpoint import Checkpoint, TensorEntry
from twostroke.builder.networks.registry import TARGETS, Target
from twostroke.builder.strict_json import named, shown_list
from twostroke.engines.errors import CheckpointError, ConfigError

# What a draft folder may say otherwise: it changes neither shapes nor maths of the draft.
FREE = ("max_position_embeddings", "bos_token_id", "eos_token_ids", "torch_dtype")

_log = logging.getLogger(__name__)


def check_holds_target(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a folder that holds a drafter alone."""
    family = TARGETS[checkpoint.config.model_type]
    prefix = family.draft_prefix(checkpoint.config)
    shared = {spec.copy_of for spec in family.all_tensors(checkpoint.config)}
    of_target = [name for name in checkpoint.entries if not name.startswith(prefix) and name not in shared]
    if not of_target and any(name.startswith(prefix) for name in checkpoint.entries):
        raise CheckpointError(
            f"{checkpoint.folder} holds a drafter alone ({prefix}*): build from its target's folder, with this one as "
            "--draft-checkpoint"
        )


def with_draft(target: Checkpoint, folder: Path) -> Checkpoint:
    """`target` with the drafter of `folder` in place of what drafter it has.

    Raises ConfigError where the two configs do not fit together, CheckpointError for a tensor that is no draft's.
    """
    draft = Checkpoint.open(folder)
    family = TARGETS[target.config.model_type]
    if draft.config.model_type != target.config.model_type:
        raise ConfigError(
            f"draft folder {folder} holds a {draft.config.model_type}, the target in {target.folder} is a "
            f"{target.config.model_type}; a drafter and its target are of one family"
        )
    _check_fit(target, draft, family)
    prefix = family.draft_prefix(target.config)
    kept = {name: entry for name, entry in target.entries.items() if not name.startswith(prefix)}
    if left := sorted(target.entries.keys() - kept.keys()):
        _log.warning(
            "the drafter is that of %s: %d tensors of the one in %s are left out: %s",
            folder,
            len(left),
            target.folder,
            shown_list(left),
        )
    promised = {name: getattr(draft.config, name) for name in family.draft_fields}
    config = dataclasses.replace(target.config, **promised)
    return Checkpoint(target.folder, config, {**kept, **_draft_entries(draft, family, prefix)})


def _check_fit(target: Checkpoint, draft: Checkpoint, family: Target) -> None:
    ours, theirs = target.config, draft.config
    if ours.vocab_size != theirs.vocab_size:
        raise ConfigError(
            f"draft folder {draft.folder} has vocab_size {theirs.vocab_size}, the target in {target.folder} has "
            f"{ours.vocab_size}; a drafter must share its target's tokens"
        )
    held = {field.name for field in dataclasses.fields(ours)} - {*FREE, *family.draft_fields}
    different = [
        f"{name} is {getattr(theirs, name)!r}, the target's {getattr(ours, name)!r}"
        for name in sorted(held)
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if different:
        raise ConfigError(
            f"draft folder {draft.folder} was made for another target than {target.folder}: {'; '.join(different)}"
        )


def _draft_entries(draft: Checkpoint, family: Target, prefix: str) -> dict[str, TensorEntry]:
    """Entries of the draft by their combined names, their files as absolute paths."""
    own: dict[Any, str] = {spec.copy_of: spec.name for spec in family.all_tensors(draft.config) if spec.copy_of}
    foreign = sorted(name for name in draft.entries if not name.startswith(prefix) and name not in own)
    if foreign:
        raise CheckpointError(
            f"draft folder {draft.folder}: {len(foreign):,} tensors are no drafter's ({prefix}*): "
            f"{shown_list(foreign)}; pass the folder as the checkpoint if it holds the target too"
        )
    found: dict[str, TensorEntry] = {}
    for name, entry in draft.entries.items():
        combined = own.get(name, name)
        if combined in found:
            raise CheckpointError(f"draft folder {draft.folder} holds {named(combined)} twice, once as the target's")
        found[combined] = dataclasses.replace(entry, file=str((draft.folder / entry.file).resolve()))
    return found
