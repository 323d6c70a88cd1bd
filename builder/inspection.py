"""A checkpoint folder in words and numbers, from its config and headers alone: what it is, what a build would make of
it, what that takes, and everything that is wrong with it. No weight is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twostroke.builder import dense_draft_folder
from twostroke.builder.checkpoint import SCALES, Checkpoint, Survey, TensorEntry, collected, in_family_names, survey
from twostroke.builder.config import ModelConfig, load_config
from twostroke.builder.draft_folder import check_holds_target
from twostroke.builder.networks.layers import StepSpec, keep_as_stored
from twostroke.builder.networks.registry import TARGETS, Target
from twostroke.builder.weights import parameters_of, usable, weight_source
from twostroke.engines.errors import ConfigError, TwostrokeError
from twostroke.engines.manifest import (
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_SEQ_LEN,
    StateTensor,
    bytes_per_slot,
    bytes_per_token,
    state_bytes,
)

_SCALES = tuple(f".{suffix}" for suffix in SCALES)
_FORMATS = {"F8_E4M3": "fp8 e4m3 in blocks of 128x128", "I8": "packed fp4 e2m1 in groups of 32 along a row"}


def inspect_checkpoint(folder: Path, *, batch_size: int | None = None, seq_len: int | None = None) -> dict[str, Any]:
    """Everything `twostroke inspect` tells of a checkpoint, ready to be written as JSON, all problems among it.

    Memory is that of `batch_size` requests of `seq_len` tokens, by default what a build takes. Raises CheckpointError
    or ConfigError for a folder with nothing to explain, ConfigError for numbers that cannot be.
    """
    try:
        if dense_draft_folder.holds_dense_draft(folder):
            return dense_draft_folder.describe(folder)
        config = load_config(folder)
    except ConfigError as error:
        raise _with_damage(folder, error) from None
    load = _load(config, batch_size, seq_len)
    target, found = TARGETS[config.model_type], survey(folder)
    checkpoint = Checkpoint(folder, config, in_family_names(config, found.entries))
    if not found.damaged:
        check_holds_target(checkpoint)
    problems = list(found.problems)
    method = _draft_method(checkpoint, target, found, problems)
    tensors = target.target_tensors(config) if method == "none" else target.all_tensors(config)
    problems += checkpoint.problems(tensors, found.damaged)
    draft = target.drafts[method](config, None)
    with torch.device("meta"):  # shapes only: no memory for the weights of any size of model
        network = target.network(config, draft.block_size, load.seq_len, draft.taps)
        steps = (network.step(), *draft.steps(load.seq_len, frozenset()))
        if config.quantised:
            stored = {spec.name: spec.dtypes[0] for spec in tensors}
            for module in dict.fromkeys(step.module for step in steps):
                keep_as_stored(module, stored)
    report = {
        "checkpoint": str(folder),
        "model_type": config.model_type,
        "draft": method,
        "draft_block_size": draft.block_size,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "layers": dict(Counter(config.layer_kinds)),
        "quantisation": _quantisation(found.entries.values()),
        "tensors": len(found.entries),
        **_components(checkpoint, target, [spec.name for spec in tensors]),
        **describe_build(checkpoint, method, draft.block_size, steps, target.tokens_per_page, load),
        "problems": problems,
    }
    return report


@dataclass(frozen=True)
class Load:
    """Requests at once and tokens of each."""

    batch_size: int
    seq_len: int


def _load(config: ModelConfig, batch_size: int | None, seq_len: int | None) -> Load:
    longest = config.max_position_embeddings
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"--batch-size is {batch_size}; expected at least 1")
    if seq_len is not None and not 2 <= seq_len <= longest:
        raise ConfigError(f"--seq-len is {seq_len}; accepted: 2 to {longest}, the config's max_position_embeddings")
    return Load(batch_size or DEFAULT_MAX_BATCH_SIZE, seq_len or min(longest, DEFAULT_MAX_SEQ_LEN))


def _with_damage(folder: Path, error: ConfigError) -> TwostrokeError:
    """The config's error, and what is wrong with the shards where they are there."""
    try:
        problems = survey(folder).problems
    except TwostrokeError:
        return error
    return collected(f"{folder} is not a usable checkpoint", (str(error), *problems)) if problems else error


def _draft_method(checkpoint: Checkpoint, target: Target, found: Survey, problems: list[str]) -> str:
    """The draft method a build would choose; none, and a problem more, where config and files contradict each other.
    What a damaged shard should hold counts as there."""
    try:
        return target.detect_draft(checkpoint.config, found.entries.keys() | found.damaged)
    except TwostrokeError as error:
        problems.append(str(error))
        checkpoint.skip(target.draft_prefix(checkpoint.config))
        return "none"


def _quantisation(entries: Iterable[TensorEntry]) -> str:
    """How the weights are stored."""
    dtypes = {entry.dtype for entry in entries}
    named = [words for dtype, words in _FORMATS.items() if dtype in dtypes]
    return "; ".join(named) or f"none: {', '.join(sorted(dtypes))}"


def _components(checkpoint: Checkpoint, target: Target, order: list[str]) -> dict[str, Any]:
    """Parameters and bytes of all that the headers name, and by component in the order of the network. Two FP4 values
    are one byte, a scale is no parameter."""
    parts: dict[str, dict[str, int]] = {}
    for name in dict.fromkeys((*order, *checkpoint.entries)):
        entry = checkpoint.entries.get(name)
        if entry is None:
            continue
        part = parts.setdefault(target.component(checkpoint.config, name), {"tensors": 0, "parameters": 0, "bytes": 0})
        part["tensors"] += 1
        part["bytes"] += entry.nbytes
        if not name.endswith(_SCALES):
            part["parameters"] += math.prod(entry.shape) * (2 if entry.dtype == "I8" else 1)
    return {
        "parameters": sum(part["parameters"] for part in parts.values()),
        "bytes": sum(part["bytes"] for part in parts.values()),
        "components": parts,
    }


def describe_build(
    checkpoint: Checkpoint, method: str, depth: int, steps: Sequence[StepSpec], tokens_per_page: int, load: Load
) -> dict[str, Any]:
    """What a build of `steps` makes, its state, and the memory that takes to serve `load`."""
    state = tuple({tensor.name: tensor for step in steps for tensor in step.state}.values())
    weights = _weights(checkpoint, steps)
    return {
        "state": {
            "tensors": len(state),
            "bytes_per_token": bytes_per_token(state, tokens_per_page),
            "bytes_per_slot": bytes_per_slot(state),
        },
        "build": {
            "engine": "onnxruntime",
            "steps": [step.name for step in steps],
            "draft": method,
            "depth": depth,
            "max_seq_len": load.seq_len,
            **weights,
        },
        "memory": _memory(load, state, tokens_per_page, weights),
    }


def _weights(checkpoint: Checkpoint, steps: Iterable[StepSpec]) -> dict[str, int]:
    """How many weight bindings a build has and their bytes: those it refers to in the shards, those it writes anew.

    A draft's copies of the target's embedding and head are taken for equal, which only their bytes can tell.
    """
    referred: list[int] = []
    written: list[int] = []
    for name, (shape, dtype) in parameters_of(step.module for step in steps).items():
        source = weight_source(name, shape)
        entry = None if source.stacked else checkpoint.entries.get(source.names[0])
        (referred if entry is not None and usable(entry, dtype) else written).append(math.prod(shape) * dtype.itemsize)
    return {
        "weights_referred_to": len(referred),
        "bytes_referred_to": sum(referred),
        "weights_written": len(written),
        "bytes_written": sum(written),
    }


def _memory(
    load: Load, state: tuple[StateTensor, ...], tokens_per_page: int, weights: dict[str, int]
) -> dict[str, int]:
    """Bytes an engine holds while it serves `load`: weights and state. What a step computes in between is not known
    before it runs."""
    held = weights["bytes_referred_to"] + weights["bytes_written"]
    needed = state_bytes(state, load.batch_size, load.seq_len, tokens_per_page)
    return {
        "batch_size": load.batch_size,
        "seq_len": load.seq_len,
        "weights": held,
        "state": needed,
        "total": held + needed,
    }


def render(report: dict[str, Any]) -> str:
    """The report as lines for a person, problems last."""
    lines: list[str] = []
    for name, value in report.items():
        if name == "problems":
            lines.append(f"problems: {len(value) or 'none'}")
            lines += [f"  {problem}" for problem in value]
        elif name == "components":
            lines.append(f"components: {'tensors':>18}  {'parameters':>18}  {'bytes':>18}")
            lines += [
                f"  {part:24}  " + "  ".join(f"{numbers[key]:>{width},}" for key, width in _COLUMNS)
                for part, numbers in value.items()
            ]
        elif isinstance(value, dict):
            lines.append(f"{name}:")
            lines += [f"  {key}: {_shown(item)}" for key, item in value.items()]
        else:
            lines.append(f"{name}: {_shown(value)}")
    return "\n".join(lines)


_COLUMNS = (("tensors", 8), ("parameters", 18), ("bytes", 18))


def _shown(value: object) -> str:
    names = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return ", ".join(value) if names else str(value)  # type: ignore[arg-type]
