"""What `twostroke demo` needs before it runs: the model's folder, a built engine, prompts, text held out of training.

Declaring the options needs neither torch nor onnx.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twostroke.engines.errors import ConfigError

MODELS = ("v4-dspark", "v32-mtp")
SCORED_BYTES = 48_000
_PACKAGE = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Prepared:
    """A built demo: engine directory, prompts (texts or token ids), scored rows, and figures recorded in training."""

    engine: Path
    prompts: Sequence[str] | Sequence[Sequence[int]]
    rows: list[tuple[list[int], int]]
    scored_bytes: int
    recorded: dict[str, float]


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `twostroke demo`."""
    parser.add_argument("--model", default=MODELS[0], choices=MODELS, help=f"demo model ({MODELS[0]})")
    parser.add_argument("--engine", default="onnxruntime", choices=("onnxruntime",), help="compiler (onnxruntime)")
    parser.add_argument(
        "--prompts", metavar="FILE", type=Path, help="prompts of your own, one JSON string a line (held-out code)"
    )
    parser.add_argument("--count", metavar="N", type=int, default=100, help="held-out prompts to complete (100)")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=128, help="new tokens a prompt (128)")
    parser.add_argument("--threads", metavar="N", type=int, default=1, help="CPU threads of the engine (1)")
    parser.add_argument("--build-only", action="store_true", help="build the engine and stop")
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=Path, help="engine directory (a cache under $TWOSTROKE_CACHE)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on one line instead of text")


def prepare(args: argparse.Namespace) -> Prepared:
    """Builds the engine unless it is there, and gathers prompts and text. Raises ConfigError for bad choices."""
    from tokenizers import Tokenizer

    import twostroke.builder.build  # noqa: F401  a missing extra is the first thing to say
    from twostroke.builder.demo import corpus

    checkpoint = _PACKAGE / "runtime" / "demo" / args.model
    if not (checkpoint / "config.json").is_file():
        raise ConfigError(f"the weights of demo model {args.model} are not installed: {checkpoint} is missing")
    for name in ("count", "max_tokens", "threads"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected at least 1")
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    _, held = corpus.split(corpus.stdlib_root())
    prompts: Sequence[str] | Sequence[Sequence[int]]
    if args.prompts is not None:
        prompts = _prompts_of(args.prompts)
    else:
        try:
            prompts = [list(prompt.token_ids) for prompt in corpus.prompts(held, tokenizer, args.count)]
        except ValueError as error:
            raise ConfigError(f"--count is {args.count}: {error}") from None
    engine = _engine(checkpoint, args)
    rows, scored = scored_rows(held, tokenizer)
    return Prepared(engine, prompts, rows, scored, _recorded(checkpoint))


def scored_rows(held: dict[str, str], tokenizer: object, window: int = 512) -> tuple[list[tuple[list[int], int]], int]:
    """Rows of at most `window` + 1 tokens over whole held-out modules, at least SCORED_BYTES of them, in an order that
    follows from the modules' names. Windows move by half: every token is scored once, with half a window before it."""
    rows: list[tuple[list[int], int]] = []
    scored = 0
    for name in sorted(held, key=lambda name: hashlib.sha256(name.encode()).digest()):
        ids = tokenizer.encode(held[name]).ids  # type: ignore[attr-defined]
        done = 0
        while done < len(ids) - 1:
            begin = 0 if done == 0 else done - window // 2
            row = [ids[0], *ids[begin + 1 : begin + 1 + window]]
            rows.append((row, done - begin + 1))
            done = begin + len(row) - 1
        scored += len(held[name].encode())
        if scored >= SCORED_BYTES:
            break
    return rows, scored


def _prompts_of(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)
        except ValueError:
            prompt = None
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f'--prompts {path}, line {number}: expected a JSON string such as "def main():\\n"')
        found.append(prompt)
    if not found:
        raise ConfigError(f"--prompts {path} holds no prompt; write one JSON string a line")
    return found


def _engine(checkpoint: Path, args: argparse.Namespace) -> Path:
    from twostroke.builder.build import BuildOptions, build
    from twostroke.builder.progress import bars
    from twostroke.engines.errors import EngineError
    from twostroke.engines.loading import verify_files
    from twostroke.engines.manifest import read_manifest, read_weights_index

    if args.output is not None:
        folder = args.output
    else:
        cache = Path(os.environ.get("TWOSTROKE_CACHE") or Path.home() / ".cache" / "twostroke")
        folder = cache / f"demo-{args.model}-{args.engine}-{_key(checkpoint)}"
    try:
        manifest = read_manifest(folder)
        verify_files(folder, manifest, read_weights_index(folder))
        if manifest.pretrained_config == json.loads((checkpoint / "config.json").read_text()):
            print(f"twostroke: using the engine in {folder}", file=sys.stderr)
            return folder
    except EngineError:
        pass  # not built yet, or not whole: built below
    with bars() as progress:
        build(checkpoint, folder, BuildOptions(engine=args.engine, force=args.output is None), progress)
    print(f"twostroke: built {folder}", file=sys.stderr)
    return folder


def _key(checkpoint: Path) -> str:
    """Hash of all an engine depends on: our sources, the checkpoint, the compilers' versions."""
    digest = hashlib.sha256()
    sources = [path for part in ("builder", "plugins", "engines") for path in (_PACKAGE / part).rglob("*.py")]
    for path in [*sorted(sources), *sorted(checkpoint.iterdir())]:
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes())
    for package in ("torch", "onnx", "onnxscript", "onnx-ir", "onnxruntime"):
        digest.update(f"{package}={importlib.metadata.version(package)}".encode())
    return digest.hexdigest()[:16]


def _recorded(checkpoint: Path) -> dict[str, float]:
    """Bits per byte on the whole held-out text, measured when the model was made."""
    found = json.loads((checkpoint / "training.json").read_text())["bits_per_byte"]
    return {
        "this model": found["target"],
        "5 bytes of context": found["5_bytes_of_context_kneser_ney"],
        "5-gram of tokens": found["5_gram_of_tokens_kneser_ney"],
    }
