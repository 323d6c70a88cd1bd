"""`twostroke build`, and `twostroke inspect` of a checkpoint. Declaring the options needs neither torch nor onnx."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twostroke.builder.devices import DEVICES
from twostroke.engines.errors import ConfigError
from twostroke.engines.launch_flags import BUILD_BATCH_SIZE, DRAFT, MAX_DRAFT_LEN
from twostroke.engines.launch_parser import add_flag, add_sglang_flags, launch_options
from twostroke.engines.manifest import DEFAULT_MAX_BATCH_SIZE


def add_build_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `twostroke build`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="folder with config.json and safetensors")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="engine directory to make")
    parser.add_argument("--engine", default="onnxruntime", choices=("onnxruntime",), help="compiler (onnxruntime)")
    add_flag(parser, DRAFT)
    parser.add_argument(
        "--draft-checkpoint", metavar="DIR", type=Path, help="folder with the drafter alone (default: in CHECKPOINT)"
    )
    add_flag(parser, MAX_DRAFT_LEN)
    parser.add_argument(
        "--force-draft-len",
        action="store_true",
        help="build a dspark block of that many tokens although it was trained for another number",
    )
    add_flag(parser, BUILD_BATCH_SIZE)
    parser.add_argument(
        "--max-seq-len", metavar="N", type=int, help="longest sequence (the config's limit, at most 8192)"
    )
    parser.add_argument(
        "--index-key-dtype",
        default="float32",
        choices=("float32", "fp8_e4m3"),
        help="how the lightning indexer keeps its keys (float32); fp8_e4m3: rotated and quantised, as published",
    )
    parser.add_argument(
        "--no-self-check", action="store_true", help="do not compare the engine with its network at the end"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be built and whether it fits; write nothing"
    )
    parser.add_argument("--device", choices=DEVICES, help="with --dry-run: the device it is for (cpu)")
    parser.add_argument("--json", action="store_true", help="with --dry-run: the report as JSON")
    parser.add_argument("--force", action="store_true", help="replace an engine directory that is there already")
    add_sglang_flags(parser)


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command with exit code 143 as Ctrl-C does with 130: what can be gone on with is kept."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_build(args: argparse.Namespace) -> int:
    """Builds one engine directory and says what it holds."""
    from twostroke.builder.build import BuildOptions, build
    from twostroke.builder.progress import bars

    started = time.perf_counter()
    launch = launch_options(args)
    launch.check_engine(args.engine)
    options = BuildOptions(
        engine=args.engine,
        draft=launch.draft or "auto",
        draft_checkpoint=args.draft_checkpoint,
        max_seq_len=args.max_seq_len,
        max_draft_len=launch.draft_len,
        index_key_dtype=args.index_key_dtype,
        force=args.force,
        force_draft_len=args.force_draft_len,
        max_batch_size=DEFAULT_MAX_BATCH_SIZE if launch.max_batch_size is None else launch.max_batch_size,
        prefill_backend=launch.prefill_backend,
        decode_backend=launch.decode_backend,
        kv_cache_dtype=launch.kv_cache_dtype,
        self_check=not args.no_self_check,
    )
    if args.dry_run:
        from twostroke.builder.dry_run import dry_run
        from twostroke.builder.inspection import render

        found = dry_run(args.checkpoint, args.output, options, args.device or "cpu")
        print(json.dumps(found, indent=1) if args.json else render(found))
        return _exit_code(args.checkpoint, found.get("problems", []))
    if args.device is not None or args.json:
        raise ConfigError(f"{'--device' if args.device else '--json'} is for a report; give --dry-run with it")
    with stopped_by_sigterm(), bars() as progress:
        manifest = build(args.checkpoint, args.output, options, progress)
    size = sum(record.bytes for record in manifest.files.values())
    print(
        f"twostroke: built {args.output} in {time.perf_counter() - started:.0f} s: steps {', '.join(manifest.steps)}; "
        f"draft {manifest.speculative.method}, {manifest.speculative.draft_len} tokens a block; maximum length "
        f"{manifest.build_config.max_seq_len}, batches of {manifest.build_config.max_batch_size}; {size / 1e6:.1f} MB",
        file=sys.stderr,
    )
    return 0


def add_refit_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `twostroke refit`."""
    parser.add_argument("engine", metavar="DIR", type=Path, help="engine directory")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="folder of the same config, other weights")
    parser.add_argument("--draft-checkpoint", metavar="DIR", type=Path, help="folder with the drafter alone")


def run_refit(args: argparse.Namespace) -> int:
    """Replaces the weights of one engine directory and says so."""
    from twostroke.builder.progress import bars
    from twostroke.builder.refit import refit

    with stopped_by_sigterm(), bars() as progress:
        manifest = refit(args.engine, args.checkpoint, args.draft_checkpoint, progress)
    print(
        f"twostroke: {args.engine} has the weights of {args.checkpoint}; steps {', '.join(manifest.steps)} unchanged",
        file=sys.stderr,
    )
    return 0


def run_inspect_checkpoint(args: argparse.Namespace) -> int:
    """Explains a checkpoint folder from its config and headers; no weight is read. Exit code 2 if anything is wrong."""
    from twostroke.builder.inspection import inspect_checkpoint, render

    if args.verify:
        raise ConfigError(f"--verify is for engine directories; nothing records the hashes of checkpoint {args.path}")
    found = inspect_checkpoint(args.path, batch_size=args.batch_size, seq_len=args.seq_len)
    print(json.dumps(found, indent=1) if args.json else render(found))
    return _exit_code(args.path, found.get("problems", []))


def _exit_code(folder: Path, problems: list[str]) -> int:
    """0, or 2 after a line that says how many problems there are."""
    if problems:
        count = f"{len(problems):,} problems" if len(problems) > 1 else "1 problem"
        print(f"twostroke: {folder} has {count}, first: {problems[0]}", file=sys.stderr)
    return 2 if problems else 0
