"""Opening an engine directory: every reason not to load it is found before anything is allocated."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twostroke.engines.base import Buffer, Compiler, Engine
from twostroke.engines.errors import EngineError
from twostroke.engines.file_records import check_file
from twostroke.engines.manifest import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Manifest,
    WeightRecord,
    WeightsIndex,
    read_manifest,
    read_weights_index,
)


def _onnxruntime() -> Compiler:
    from twostroke.engines.onnxruntime import OnnxRuntimeCompiler

    return OnnxRuntimeCompiler()


COMPILERS: Mapping[str, Callable[[], Compiler]] = {"onnxruntime": _onnxruntime}


@dataclass(frozen=True)
class LoadedEngine:
    """An engine directory ready to bind: its manifest and one engine a step."""

    folder: Path
    manifest: Manifest
    engines: Mapping[str, Engine]


def load_engine_directory(
    folder: Path | str, threads: int = 1, progress: Callable[[int, int], None] = lambda done, total: None
) -> LoadedEngine:
    """Verifies `folder`, maps its weights, loads every step. EngineError names the one reason it must not load."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    index = read_weights_index(folder)
    check_manifest(folder, manifest)
    verify_files(folder, manifest, index)
    verify_state(folder, manifest)
    for step in manifest.steps.values():
        if step.engine not in COMPILERS:
            raise EngineError(
                f"{folder}: step {step.name} is for engine {step.engine!r}; this installation has "
                f"{', '.join(COMPILERS)}"
            )
    weights = map_weights(folder, index)
    engines = {}
    for done, (name, step) in enumerate(manifest.steps.items()):
        progress(done, len(manifest.steps))
        engines[name] = COMPILERS[step.engine]().load(folder, step, weights, threads)
    progress(len(manifest.steps), len(manifest.steps))
    return LoadedEngine(folder, manifest, engines)


def check_manifest(folder: Path, manifest: Manifest) -> None:
    """Values that no build writes, and steps that do not make up an engine."""
    build, speculative = manifest.build_config, manifest.speculative
    wrong = [
        f"{name} is {value}, expected {least} or more"
        for name, value, least in (
            ("build_config.tokens_per_page", build.tokens_per_page, 1),
            ("build_config.max_seq_len", build.max_seq_len, 2),
            ("build_config.vocab_size", build.vocab_size, 2),
            ("speculative.draft_len", speculative.draft_len, 0),
        )
        if value < least
    ]
    drafts = sorted(set(manifest.steps) - {"target"})
    if "target" not in manifest.steps:
        wrong.append(f"steps holds {', '.join(drafts) or 'nothing'}, expected target among them")
    if (speculative.method == "none") != (speculative.draft_len == 0) or (speculative.method == "none" and drafts):
        wrong.append(
            f"speculative.method is {speculative.method}, draft_len {speculative.draft_len} and the draft steps are "
            f"{', '.join(drafts) or 'none'}, which do not go together"
        )
    proposed = [b for s in manifest.steps.values() if s.name == "propose" for b in s.bindings if b.name == "tokens"]
    if proposed and proposed[0].shape[1] != speculative.draft_len:
        wrong.append(
            f"speculative.draft_len is {speculative.draft_len}, but step propose drafts {proposed[0].shape[1]}"
        )
    if wrong:
        raise EngineError(f"{folder / CONFIG_FILE}: {'; '.join(wrong)}; rebuild the engine")


def verify_files(
    folder: Path,
    manifest: Manifest,
    index: WeightsIndex,
    full: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> None:
    """Checks presence, size and contents of every file the manifest names, and size and header of every shard it uses.

    Contents are held against the hash; those of a large file, unless `full`, against its fingerprint.
    """
    for step in manifest.steps.values():
        if step.file not in manifest.files:
            raise EngineError(
                f"{folder / CONFIG_FILE}: step {step.name} is in {step.file}, which is none of the directory's files; "
                "rebuild the engine"
            )
    done, total = 0, sum(record.bytes for record in manifest.files.values())

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("verifying files", done, total)

    for name, record in manifest.files.items():
        if not (folder / name).is_file():
            raise EngineError(f"{folder}: file {name} is missing; rebuild the engine")
        check_file(folder / name, record, full, advance)
    for shard, expected in index.shards.items():
        path = Path(shard)
        if not path.is_file():
            raise EngineError(f"{folder}: checkpoint shard {path} is missing; restore it or rebuild the engine")
        with open(path, "rb") as file:
            length = file.read(8)
            header = file.read(min(int.from_bytes(length, "little"), expected.bytes))
        if (
            path.stat().st_size != expected.bytes
            or hashlib.sha256(length + header).hexdigest() != expected.header_sha256
        ):
            raise EngineError(f"{folder}: checkpoint shard {path} changed since the build; rebuild the engine")


def verify_state(folder: Path, manifest: Manifest) -> None:
    """Checks that every step reads and writes the memory that the manifest has the runtime allocate."""
    declared = {tensor.name: tensor for tensor in manifest.state}
    for step in manifest.steps.values():
        for binding in step.bindings:
            if binding.role != "state":
                continue
            tensor = declared.get(binding.name)
            found = f"{binding.dtype} lines of {binding.shape[-1]}"
            expected = "nothing" if tensor is None else f"{tensor.dtype} lines of {tensor.line} ({tensor.layout})"
            if tensor is None or (tensor.dtype, tensor.line) != (binding.dtype, binding.shape[-1]):
                raise EngineError(
                    f"{folder}: step {step.name} keeps {binding.name} as {found}, the manifest declares {expected}; "
                    "rebuild the engine"
                )


def map_weights(folder: Path, index: WeightsIndex) -> dict[str, Buffer]:
    """Every weight as a read-only view of its mapped file; no bytes are copied."""
    files: dict[str, np.memmap] = {}
    weights = {}
    for name, record in index.weights.items():
        path = folder / record.file
        if record.file not in files:
            if not path.is_file():
                raise EngineError(f"{folder / WEIGHTS_FILE}: weight {name} is in {record.file}, which is missing")
            files[record.file] = np.memmap(path, np.uint8, mode="r")
        weights[name] = Buffer.of(_view(path, files[record.file], name, record), record.dtype)
    return weights


def _view(path: Path, data: np.ndarray, name: str, record: WeightRecord) -> np.ndarray:
    dtype = np.dtype(np.uint16 if record.dtype == "bfloat16" else record.dtype)
    expected = int(np.prod(record.shape, dtype=np.int64)) * dtype.itemsize
    if record.bytes != expected or record.offset < 0 or record.offset + record.bytes > data.size:
        raise EngineError(
            f"{path}: weight {name} should be {expected} bytes at {record.offset}, the file has {data.size}; rebuild "
            "the engine"
        )
    return data[record.offset : record.offset + record.bytes].view(dtype).reshape(record.shape)
