"""The options of a launch line on an argparse parser, kept as they were typed until `LaunchOptions` reads them."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from twostroke.engines.launch_flags import SGLANG_FLAGS, Flag, Typed
from twostroke.engines.launch_options import Given, LaunchOptions


class _Keep(argparse.Action):
    """Adds an option, as typed, to those the line has so far: two spellings of one choice may not overwrite each
    other before they are compared."""

    def __init__(self, option_strings: list[str], dest: str, flag: Flag, **options: Any) -> None:
        super().__init__(option_strings, dest, **options)
        self._flag = flag

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        value = None if self.nargs == 0 else values
        kept = (*getattr(namespace, self.dest, ()), Given(self._flag, Typed(str(option), value)))
        setattr(namespace, self.dest, kept)


def add_flag(parser: argparse._ActionsContainer, flag: Flag) -> None:
    """One option of the table on a parser or a group of it."""
    options: dict[str, Any] = {"nargs": 0} if flag.kind is bool else {"type": flag.kind, "choices": flag.accepted}
    parser.add_argument(
        *flag.names,
        *flag.older,
        action=_Keep,
        flag=flag,
        dest="launch",
        default=(),
        metavar=flag.metavar,
        help=flag.help,
        **options,
    )


def add_sglang_flags(parser: argparse.ArgumentParser) -> None:
    """SGLang's spellings, in a group of their own."""
    group = parser.add_argument_group(
        "SGLang's names for the same choices",
        "A whole launch line may be given to build and to generate: what the other one settles is checked.",
    )
    for flag in SGLANG_FLAGS:
        add_flag(group, flag)


def launch_options(args: argparse.Namespace) -> LaunchOptions:
    """The choices of a parsed line; one line on stderr names the present spelling of every outdated one."""
    options = LaunchOptions.of(args.launch)
    if options.older:
        print(f"twostroke: outdated spellings, accepted: {'; '.join(options.older)}", file=sys.stderr)
    return options
