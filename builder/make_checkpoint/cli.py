"""`twostroke make-checkpoint`. Declaring the options needs neither torch nor onnx."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from twostroke.builder.make_checkpoint.named_models import NAMED_MODELS
from twostroke.engines.errors import ConfigError


def _layer_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers; write them like 0,2,3") from None


def add_make_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `twostroke make-checkpoint`."""
    parser.add_argument("--model", required=True, choices=sorted(NAMED_MODELS), help="release to take after")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="checkpoint folder to make")
    parser.add_argument(
        "--scale",
        metavar="F",
        type=float,
        default=1.0,
        help="widths, heads, experts, vocabulary and layers times F, above 0 and at most 1 (1)",
    )
    parser.add_argument(
        "--layers", metavar="LIST", type=_layer_list, help="keep only these layers of the release, renumbered: 0,2,3"
    )
    parser.add_argument(
        "--dtype",
        choices=("release", "bf16", "f32"),
        default="release",
        help="quantised as released, or plain (release)",
    )
    parser.add_argument("--no-draft", action="store_true", help="leave the drafter out, of config and files")
    parser.add_argument("--sparse", action="store_true", help="headers and sizes only: the data are holes")
    parser.add_argument("--seed", metavar="N", type=int, help="same seed, same weights (0)")


def run_make_checkpoint(args: argparse.Namespace) -> int:
    """Writes one folder and says what it holds."""
    from twostroke.builder.make_checkpoint.variants import variant
    from twostroke.builder.make_checkpoint.writer import write_checkpoint
    from twostroke.builder.progress import bars

    if args.sparse and args.seed is not None:
        raise ConfigError(f"--seed {args.seed} contradicts --sparse, which writes no weights; leave one of them out")
    if args.seed is not None and args.seed < 0:
        raise ConfigError(f"--seed is {args.seed}; expected 0 or more")
    started = time.perf_counter()
    made = variant(
        NAMED_MODELS[args.model], scale=args.scale, layers=args.layers, draft=not args.no_draft, dtype=args.dtype
    )
    with bars() as progress:
        shards = write_checkpoint(args.output, made, seed=None if args.sparse else args.seed or 0, progress=progress)
    print(
        f"twostroke: made {args.output} in {time.perf_counter() - started:.0f} s: {args.model}, "
        f"{len(made.tensors):,} tensors, {made.nbytes:,} bytes in {shards} shards{' of holes' if args.sparse else ''}",
        file=sys.stderr,
    )
    return 0
