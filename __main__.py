"""The `twostroke` command.

Exit codes: 0 done; 1 an error of ours; 2 what was asked for cannot be honoured, and one line on stderr says why;
130 interrupted; 143 terminated; 141 the reader of stdout went away. TWOSTROKE_TRACEBACK=1 shows where an error was
raised.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from twostroke import __version__
from twostroke.engines.errors import TwostrokeError
from twostroke.engines.manifest import WEIGHTS_FILE

AddArguments = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int | None]
# Packages of the `build` extra.
BUILD_PACKAGES = frozenset({"torch", "onnx", "onnxscript", "onnx_ir", "safetensors"})


def _build() -> tuple[AddArguments, Run]:
    from twostroke.builder.cli import add_build_arguments, run_build

    return add_build_arguments, run_build


def _demo() -> tuple[AddArguments, Run]:
    from twostroke.builder.demo.cli import add_demo_arguments, prepare
    from twostroke.runtime.demo.showcase import HeldOutText, show

    def run(args: argparse.Namespace) -> int | None:
        demo = prepare(args)
        if args.build_only:
            return 0
        text = HeldOutText(demo.rows, demo.scored_bytes, demo.recorded)
        return show(
            demo.engine, demo.prompts, text, max_tokens=args.max_tokens, threads=args.threads, as_json=args.json
        )

    return add_demo_arguments, run


def _generate() -> tuple[AddArguments, Run]:
    from twostroke.runtime.cli import add_generate_arguments, run_generate

    return add_generate_arguments, run_generate


def _make_checkpoint() -> tuple[AddArguments, Run]:
    from twostroke.builder.make_checkpoint.cli import add_make_checkpoint_arguments, run_make_checkpoint

    return add_make_checkpoint_arguments, run_make_checkpoint


def _inspect() -> tuple[AddArguments, Run]:
    from twostroke.runtime.cli import add_inspect_arguments, run_inspect

    def run(args: argparse.Namespace) -> int | None:
        if (args.path / WEIGHTS_FILE).exists() or not any(args.path.glob("*.safetensors*")):
            return run_inspect(args)
        from twostroke.builder.cli import run_inspect_checkpoint

        return run_inspect_checkpoint(args)

    return add_inspect_arguments, run


def _refit() -> tuple[AddArguments, Run]:
    from twostroke.builder.cli import add_refit_arguments, run_refit

    return add_refit_arguments, run_refit


COMMANDS: dict[str, tuple[str, Callable[[], tuple[AddArguments, Run]]]] = {
    "build": ("make an engine directory from a checkpoint folder", _build),
    "refit": ("put the weights of another checkpoint into an engine directory", _refit),
    "generate": ("answer one prompt with an engine directory", _generate),
    "inspect": ("explain an engine directory or a checkpoint folder", _inspect),
    "make-checkpoint": ("write a checkpoint of a named model with random weights, at any scale", _make_checkpoint),
    "demo": ("build a demo model and complete held-out prompts with it", _demo),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the option that was probably meant."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; `{self.prog} --help` lists what is accepted", file=sys.stderr)
        raise SystemExit(2)

    def check_options(self, arguments: Sequence[str]) -> None:
        """Refuses an unknown option before a missing one is complained about: it may be that one, misspelt."""
        known = [option for action in self._actions for option in action.option_strings]
        for argument in arguments:
            name = argument.partition("=")[0]
            if name == "--":
                return
            if name.startswith("--") and " " not in argument and name not in known:
                self.error(f"unknown option {name}{_closest(name, known)}")


def _closest(name: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Nobody reads stdout any more; what is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except TwostrokeError as error:
        if _traceback_wanted():
            raise
        print(f"twostroke: {_one_line(error)}", file=sys.stderr)
        return 2
    except Exception as error:
        if _traceback_wanted():
            raise
        package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else None
        if package in BUILD_PACKAGES:
            print(f"twostroke {arguments[0]} needs {package}: pip install 'twostroke[build]'", file=sys.stderr)
            return 2
        print(
            f"twostroke: internal error, {type(error).__name__}: {_one_line(error)}; TWOSTROKE_TRACEBACK=1 shows where",
            file=sys.stderr,
        )
        return 1


def _run(arguments: list[str]) -> int:
    if not arguments:
        _top_level().error("no command")
    if arguments[0].startswith("-"):
        _top_level().check_options(arguments)
        _top_level().parse_args(arguments)
    name = arguments[0]
    if name not in COMMANDS:
        _top_level().error(f"unknown command {name}{_closest(name, list(COMMANDS))}")
    description, load = COMMANDS[name]
    add_arguments, run = load()
    parser = _Parser(
        prog=f"twostroke {name}", description=f"{description[0].upper()}{description[1:]}.", allow_abbrev=False
    )
    add_arguments(parser)
    parser.check_options(arguments[1:])
    return run(parser.parse_args(arguments[1:])) or 0


def _top_level() -> _Parser:
    width = max(map(len, COMMANDS))
    parser = _Parser(
        prog="twostroke",
        usage="twostroke COMMAND ...",
        description="Speculative decoding for DeepSeek models on compiled engines.",
        epilog="commands:\n" + "\n".join(f"  {name:{width}}  {text}" for name, (text, _) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"twostroke {__version__}")
    return parser


def _traceback_wanted() -> bool:
    return os.environ.get("TWOSTROKE_TRACEBACK") == "1"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    raise SystemExit(main())
