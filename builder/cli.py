"""`twostroke build`, and `twostroke inspect` of a checkpoint. Declaring the options needs neither torch nor onnx."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

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
    parser.add_argument("--force", action="store_true", help="replace an engine directory that is there already")
    add_sglang_flags(parser)


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
    )
    with bars() as progress:
        manifest = build(args.checkpoint, args.output, options, progress)
    size = sum(record.bytes for record in manifest.files.values())
    print(
        f"twostroke: built {args.output} in {time.perf_counter() - started:.0f} s: steps {', '.join(manifest.steps)}; "
        f"draft {manifest.speculative.method}, {manifest.speculative.draft_len} tokens a block; maximum length "
        f"{manifest.build_config.max_seq_len}, batches of {manifest.build_config.max_batch_size}; {size / 1e6:.1f} MB",
        file=sys.stderr,
    )
    return 0


def run_inspect_checkpoint(args: argparse.Namespace) -> int:
    """Explains a checkpoint folder from its config and headers; no weight is read."""
    found = inspect_checkpoint(args.path)
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, item in value.items():
                print(f"  {key}: {item}")
        else:
            print(f"{name}: {value}")
    return 0


def inspect_checkpoint(folder: Path) -> dict[str, Any]:
    """Model, draft method, tensors and bytes by component. Raises as `Checkpoint.open` and `check` do."""
    from twostroke.builder import dense_draft_folder
    from twostroke.builder.checkpoint import Checkpoint
    from twostroke.builder.networks.registry import TARGETS

    if dense_draft_folder.holds_dense_draft(folder):
        return dense_draft_folder.describe(folder)
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config
    target = TARGETS[config.model_type]
    method = target.detect_draft(config, checkpoint.entries)
    checkpoint.check(target.target_tensors(config) if method == "none" else target.all_tensors(config))
    draft_prefix = target.draft_prefix(config)
    components: dict[str, int] = {}
    for name, entry in checkpoint.entries.items():
        part = "draft" if name.startswith(draft_prefix) else "experts" if ".experts." in name else "target"
        components[part] = components.get(part, 0) + entry.nbytes
    kinds = {kind: config.layer_kinds.count(kind) for kind in dict.fromkeys(config.layer_kinds)}
    return {
        "checkpoint": str(folder),
        "model_type": config.model_type,
        "draft": method,
        "draft_block_size": target.drafts[method](config, None).block_size,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "layers": kinds,
        "tensors": len(checkpoint.entries),
        "bytes": components,
    }
