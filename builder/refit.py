"""Other weights into an engine that is built: the graphs stay, every weight is written or referred to anew.

All or nothing: the new directory is made beside the old one and takes its place when it is whole. A checkpoint that
lacks a tensor, or has one of another shape, dtype or sharing, leaves the engine as it was.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch

from twostroke.builder.build import Progress, copy_tokenizer, silent
from twostroke.builder.checkpoint import Checkpoint
from twostroke.builder.config import parse_config
from twostroke.builder.draft_folder import with_draft
from twostroke.builder.engine_directory import check_space, file_records, seal, staging
from twostroke.builder.networks.registry import TARGETS, Target
from twostroke.builder.shared_tensors import own_tensors
from twostroke.builder.strict_json import shown_list
from twostroke.builder.weights import WEIGHTS_BIN, collect, plan_weights, usable, weight_source, written_bytes
from twostroke.engines.errors import BuildError
from twostroke.engines.manifest import CONFIG_FILE, WEIGHTS_FILE, Manifest, SelfCheck, encode, read_manifest


def refit(
    engine: Path, checkpoint_folder: Path, draft_checkpoint: Path | None = None, progress: Progress = silent
) -> Manifest:
    """Replaces the weights of `engine`. Raises EngineError, CheckpointError, ConfigError or BuildError, and then the
    engine is unchanged."""
    manifest = read_manifest(engine)
    checkpoint = Checkpoint.open(checkpoint_folder)
    if draft_checkpoint is not None:
        checkpoint = with_draft(checkpoint, draft_checkpoint)
    target = TARGETS[checkpoint.config.model_type]
    _check_config(engine, manifest, checkpoint_folder)
    drafted = manifest.speculative.method != "none"
    if not drafted:
        checkpoint.skip(target.draft_prefix(checkpoint.config))
    tensors = target.all_tensors(checkpoint.config) if drafted else target.target_tensors(checkpoint.config)
    checkpoint.check(tensors)
    parameters = {
        binding.name: (tuple(int(size) for size in binding.shape), getattr(torch, binding.dtype))
        for step in manifest.steps.values()
        for binding in step.bindings
        if binding.role == "weight"
    }
    _check_sharing(engine, checkpoint, target, set(parameters), own_tensors(checkpoint, tensors))
    _check_storage(engine, checkpoint, parameters)
    check_space(engine, written_bytes(plan_weights(checkpoint, parameters)), WEIGHTS_BIN)

    with staging(engine, replace=True, resumable=WEIGHTS_BIN) as folder:
        for name in manifest.files:
            if name not in (WEIGHTS_FILE, WEIGHTS_BIN):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(engine / name, folder / name)
        index = collect(checkpoint, parameters, folder, progress, "refit")
        checkpoint.assert_all_consumed()
        (folder / WEIGHTS_FILE).write_bytes(encode(index))
        copy_tokenizer(checkpoint_folder, folder)
        manifest = msgspec.structs.replace(
            manifest, files=file_records(folder), self_check=SelfCheck(False, "refitted with other weights")
        )
        seal(folder, manifest)
    return manifest


def _check_config(engine: Path, manifest: Manifest, checkpoint_folder: Path) -> None:
    built = parse_config(manifest.pretrained_config, str(engine / CONFIG_FILE))
    given = Checkpoint.open(checkpoint_folder).config
    if built != given:
        names = [name for name in vars(built) if getattr(given, name, None) != getattr(built, name)]
        raise BuildError(
            f"{checkpoint_folder} is no refit for {engine}: {shown_list(names, 5)} differ from the config the engine "
            "was built from; build another engine"
        )


def _check_sharing(engine: Path, checkpoint: Checkpoint, target: Target, bound: set[str], own: frozenset[str]) -> None:
    """A drafter's copies of embedding and head are bound only where they differed when the engine was built."""
    copies = {spec.name for spec in target.all_tensors(checkpoint.config) if spec.copy_of is not None}
    if (before := bound & copies) != own:
        raise BuildError(
            f"{checkpoint.folder} is no refit for {engine}: the drafter has {shown_list(sorted(own)) or 'nothing'} of "
            f"its own, the engine was built for {shown_list(sorted(before)) or 'nothing'}; build another engine"
        )


def _check_storage(engine: Path, checkpoint: Checkpoint, parameters: dict[str, Any]) -> None:
    """What is bound as stored must be stored so: converting it would lose values."""
    wrong = []
    for name, (shape, dtype) in parameters.items():
        entry = checkpoint.entries[weight_source(name, shape).names[0]]
        if dtype in (torch.bfloat16, torch.uint8) and not usable(entry, dtype):
            wrong.append(f"{name} is {entry.dtype}")
    if wrong:
        raise BuildError(
            f"{checkpoint.folder} is no refit for {engine}, which takes these as they were stored: "
            f"{shown_list(wrong)}; build another engine"
        )
