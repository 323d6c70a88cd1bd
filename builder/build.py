"""From a checkpoint folder to an engine directory: check, export, collect weights, seal.

Nothing here needs a GPU and no weight is read before every check has passed.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

import twostroke
from twostroke.builder.checkpoint import Checkpoint
from twostroke.builder.draft_folder import check_holds_target, with_draft
from twostroke.builder.engine_directory import check_space, file_records, seal, staging
from twostroke.builder.export import export_step
from twostroke.builder.networks.dspark import with_forced_block
from twostroke.builder.networks.layers import StepSpec, allocate, keep_as_stored, shapes_only
from twostroke.builder.networks.registry import TARGETS, Draft, Target
from twostroke.builder.self_check import DEFAULT_LIMIT, compare
from twostroke.builder.shared_tensors import own_tensors
from twostroke.builder.strict_json import shown, shown_list
from twostroke.builder.weights import WEIGHTS_BIN, collect, parameters_of, plan_weights, written_bytes
from twostroke.engines.attention_backends import ENGINES, Phase, backend_refusal, depth_refusal, kv_cache_refusal
from twostroke.engines.errors import BuildError
from twostroke.engines.manifest import (
    CONFIG_FILE,
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_SEQ_LEN,
    SCHEMA,
    WEIGHTS_FILE,
    BuildConfig,
    Manifest,
    SelfCheck,
    Speculative,
    StateTensor,
    Step,
    WeightsIndex,
    encode,
)
from twostroke.engines.onnxruntime import versions

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`: steps of a phase, or bytes (`progress.BYTES`)."""


@dataclass(frozen=True)
class BuildOptions:
    """Choices of a build.

    `draft_checkpoint` is a folder that holds the drafter alone. `max_seq_len` None takes the config's limit, at most
    DEFAULT_MAX_SEQ_LEN; `max_draft_len` None the draft method's own block; `force_draft_len` takes another than the
    block dspark was trained for. The backends and the dtype are the engine's first where they are None;
    `index_key_dtype` is how the lightning indexers of target and draft keep their keys. `max_batch_size` is recorded as
    the runtime's default. `force` replaces an engine directory.
    """

    engine: str = "onnxruntime"
    draft: str = "auto"
    draft_checkpoint: Path | None = None
    max_seq_len: int | None = None
    max_draft_len: int | None = None
    index_key_dtype: str = "float32"
    force: bool = False
    force_draft_len: bool = False
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    prefill_backend: str | None = None
    decode_backend: str | None = None
    kv_cache_dtype: str | None = None
    self_check: bool = True


def silent(what: str, done: int, total: int) -> None:
    """The progress nobody watches."""
    return None


@dataclass(frozen=True)
class Plan:
    """A build that has passed every check and has read no weight but a draft's copies."""

    checkpoint: Checkpoint
    config: Any  # of the family's own class
    target: Target
    method: str
    draft: Draft
    build_config: BuildConfig
    trained_len: int | None
    own: frozenset[str]

    def networks(self) -> tuple[StepSpec, ...]:
        """The steps, fp32, in export order."""
        limit = self.build_config.max_seq_len
        network = self.target.network(self.config, self.draft.block_size, limit, self.draft.taps)
        return (network.step(), *self.draft.steps(limit, self.own))

    def stored_networks(self) -> tuple[StepSpec, ...]:
        """The steps over weights as the engine binds them, in shapes only."""
        with shapes_only():
            specs = self.networks()
            if self.config.quantised:
                stored = {name: entry.dtype for name, entry in self.checkpoint.entries.items()}
                for module in dict.fromkeys(spec.module for spec in specs):
                    keep_as_stored(module, stored)
        return specs


def plan(checkpoint_folder: Path, options: BuildOptions) -> Plan:
    """Everything a build decides before it makes a file. Raises CheckpointError, ConfigError or BuildError."""
    if options.engine != "onnxruntime":
        raise BuildError(f"engine {options.engine!r} cannot be built here; accepted: onnxruntime")
    if options.draft == "none" and options.draft_checkpoint is not None:
        raise BuildError(
            f"draft method none was asked for and a draft folder given, {options.draft_checkpoint}; leave one of them"
            " out"
        )
    if options.max_batch_size < 1:
        raise BuildError(f"max_batch_size is {options.max_batch_size}, expected at least 1")
    prefill_backend = _backend(options.engine, "prefill", options.prefill_backend)
    decode_backend = _backend(options.engine, "decode", options.decode_backend)
    kv_cache_dtype = _kv_cache_dtype(options.engine, options.kv_cache_dtype)
    checkpoint = Checkpoint.open(checkpoint_folder)
    check_holds_target(checkpoint)
    if options.draft_checkpoint is not None:
        checkpoint = with_draft(checkpoint, options.draft_checkpoint)
    config = checkpoint.config
    target = TARGETS[config.model_type]
    method = target.detect_draft(config, checkpoint.entries, options.draft)
    if method == "none" and (skipped := checkpoint.skip(target.draft_prefix(config))):
        _log.warning("draft method none: %d tensors are left out: %s", len(skipped), shown_list(skipped))
    tensors = target.target_tensors(config) if method == "none" else target.all_tensors(config)
    checkpoint.check(tensors)
    config, trained_len = _with_block(config, method, options)
    if options.index_key_dtype not in target.index_keys:
        raise BuildError(
            f"--index-key-dtype is {options.index_key_dtype}, but {config.model_type} keeps its index keys in "
            f"{' or '.join(target.index_keys)}"
        )
    config = target.index_keys[options.index_key_dtype](config)
    draft = target.drafts[method](config, options.max_draft_len)
    if refusal := depth_refusal(options.engine, decode_backend, draft.block_size):
        raise BuildError(refusal)
    build_config = BuildConfig(
        max_seq_len=_sequence_limit(options.max_seq_len, config.max_position_embeddings, target.tokens_per_page),
        max_draft_len=draft.block_size,
        tokens_per_page=target.tokens_per_page,
        vocab_size=config.vocab_size,
        eos_token_ids=_eos_token_ids(checkpoint_folder, config.eos_token_ids, config.vocab_size),
        bos_token_id=config.bos_token_id,
        max_batch_size=options.max_batch_size,
        prefill_backend=prefill_backend,
        decode_backend=decode_backend,
        kv_cache_dtype=kv_cache_dtype,
        index_key_dtype=options.index_key_dtype,
    )
    own = own_tensors(checkpoint, tensors)
    return Plan(checkpoint, config, target, method, draft, build_config, trained_len, own)


def build(checkpoint_folder: Path, destination: Path, options: BuildOptions, progress: Progress = silent) -> Manifest:
    """Builds `destination`. Raises CheckpointError, ConfigError or BuildError; then nothing that loads was written."""
    planned = plan(checkpoint_folder, options)
    checkpoint, specs = planned.checkpoint, planned.stored_networks()
    parameters = parameters_of(spec.module for spec in specs)
    check_space(destination, written_bytes(plan_weights(checkpoint, parameters)), WEIGHTS_BIN)

    with staging(destination, options.force, WEIGHTS_BIN) as folder:
        steps = {}
        for done, spec in enumerate(specs):
            progress(f"exporting {spec.name}", done, len(specs))
            allocate(spec.module)
            exported = export_step(spec)
            ir.save(exported.plugin, folder / f"{spec.name}.plugin.onnx")
            ir.save(exported.portable, folder / f"{spec.name}.portable.onnx")
            steps[spec.name] = Step(
                spec.name, options.engine, "portable", f"{spec.name}.portable.onnx", exported.bindings, versions()
            )
        progress("exporting", len(specs), len(specs))
        used = {b.name for step in steps.values() for b in step.bindings if b.role == "weight"}
        bound = {name: parameter for name, parameter in parameters.items() if name in used}
        index = collect(checkpoint, bound, folder, progress, _choices(options))
        checkpoint.assert_all_consumed()
        checked = SelfCheck(False, "not asked for")
        if options.self_check:
            progress("checking", 0, 1)
            checked = self_check(planned, folder, steps, index)
            progress("checking", 1, 1)
        (folder / WEIGHTS_FILE).write_bytes(encode(index))
        copy_tokenizer(checkpoint_folder, folder)
        draft = planned.draft
        manifest = Manifest(
            schema=SCHEMA,
            twostroke_version=twostroke.__version__,
            pretrained_config=json.loads((checkpoint_folder / CONFIG_FILE).read_text()),
            build_config=planned.build_config,
            speculative=Speculative(planned.method, draft.block_size, draft.taps_width, planned.trained_len),
            steps=steps,
            state=_all_state(spec.state for spec in specs),
            files=file_records(folder),
            self_check=checked,
        )
        seal(folder, manifest)
    return manifest


def _choices(options: BuildOptions) -> str:
    """All that was chosen but whether to replace what is there: a stopped build goes on only with the same."""
    chosen = dataclasses.asdict(dataclasses.replace(options, force=False))
    if options.draft_checkpoint is not None:
        chosen["draft_checkpoint"] = str(options.draft_checkpoint.resolve())
    return json.dumps(chosen, sort_keys=True)


def self_check(
    planned: Plan, folder: Path, steps: Mapping[str, Step], index: WeightsIndex, limit: int = DEFAULT_LIMIT
) -> SelfCheck:
    """Compares the steps compiled in `folder` with their networks. Raises BuildError where they disagree. Networks of
    more than `limit` bytes are not run: that is logged and recorded."""
    with shapes_only():
        specs = planned.networks()
    size = sum(p.numel() * 4 for spec in specs for p in spec.module.parameters())
    if size > limit:
        reason = f"the network in fp32 takes {size / 1e9:.1f} GB, at most {limit / 1e9:.1f} GB are run"
        _log.warning("the engine was not compared with its network: %s", reason)
        return SelfCheck(False, reason)
    return compare(planned.checkpoint, planned.networks(), folder, steps, index, planned.config.vocab_size)


def _with_block(config: Any, method: str, options: BuildOptions) -> tuple[Any, int | None]:
    """The config with the block that was forced, if one was, and the trained block where that is another."""
    if not options.force_draft_len:
        return config, None
    config, trained_len = with_forced_block(config, method, options.max_draft_len)
    if trained_len is not None:
        _log.warning(
            "draft blocks of %d tokens were forced, the draft was trained for %d: every row of a block changes, expect "
            "fewer accepted tokens",
            options.max_draft_len,
            trained_len,
        )
    return config, trained_len


def _backend(engine: str, phase: Phase, asked: str | None) -> str:
    if asked is None:
        return ENGINES[engine].names(phase)[0]
    if refusal := backend_refusal(engine, phase, asked):
        raise BuildError(f"{phase}_backend {asked}: {refusal}")
    return asked


def _kv_cache_dtype(engine: str, asked: str | None) -> str:
    if asked is not None and (refusal := kv_cache_refusal(engine, asked)):
        raise BuildError(f"kv_cache_dtype {asked}: {refusal}")
    return asked or ENGINES[engine].kv_cache_dtypes[0]


def _sequence_limit(asked: int | None, trained: int, page: int) -> int:
    if asked is None:
        return min(trained, DEFAULT_MAX_SEQ_LEN)
    if not 2 <= asked <= trained:
        raise BuildError(f"--max-seq-len is {asked}; accepted: 2 to {trained}, the config's max_position_embeddings")
    return asked


def _all_state(groups: object) -> tuple[StateTensor, ...]:
    found: dict[str, StateTensor] = {}
    for group in groups:  # type: ignore[attr-defined]
        for tensor in group:
            assert found.setdefault(tensor.name, tensor) == tensor, f"two steps declare {tensor.name} differently"
    return tuple(found.values())


def copy_tokenizer(source: Path, folder: Path) -> None:
    """The tokenizer's files, as far as the checkpoint has them."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _eos_token_ids(source: Path, from_config: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """End-of-text ids: the config's, and those a generation_config.json adds."""
    path = source / "generation_config.json"
    ids: list[Any] = list(from_config)
    if path.is_file():
        try:
            extra = json.loads(path.read_text()).get("eos_token_id", [])
        except (ValueError, AttributeError) as error:
            raise BuildError(f"{path} is not a JSON object: {error}") from None
        ids += extra if isinstance(extra, list) else [extra]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids):
            raise BuildError(
                f"{path}: eos_token_id is {shown(extra)}; expected a token id in 0..{vocab_size - 1}, or a list of them"
            )
    return tuple(dict.fromkeys(ids))
