"""Launch lines as people type them, and what the commands make of them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping

from twostroke.builder.cli import add_build_arguments
from twostroke.engines.launch_options import LaunchOptions
from twostroke.runtime.cli import add_generate_arguments

PARSERS: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "build": add_build_arguments,
    "generate": add_generate_arguments,
}
REQUIRED = {"build": ["CHECKPOINT", "-o", "ENGINE"], "generate": ["ENGINE", "--prompt", "x"]}

# The line of SGLang's pull request 11652, which brought MTP for V3.2, in the names of its day and of the two
# generations after it.
SPECULATION = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
)
LAUNCH_LINES = {
    "2025": "--tp 8 --attention-backend nsa --nsa-prefill flashmla_prefill --nsa-decode flashmla_decode "
    f"{SPECULATION} --cuda-graph-max-bs 32 --max-running-requests 32",
    "0.5.4": "--tp-size 8 --attention-backend nsa --nsa-prefill-backend flashmla_sparse --nsa-decode-backend "
    f"flashmla_kv {SPECULATION} --cuda-graph-max-bs 32 --max-running-requests 32",
    "0.5.23": "--tensor-parallel-size 8 --attention-backend dsa --dsa-prefill-backend flashmla_sparse "
    f"--dsa-decode-backend flashmla_kv {SPECULATION} --cuda-graph-max-bs-decode 32 --max-running-requests 32",
}


def parser(command: str) -> argparse.ArgumentParser:
    """The parser of a command."""
    made = argparse.ArgumentParser(command, allow_abbrev=False)
    PARSERS[command](made)
    return made


def options(line: str, command: str = "generate") -> LaunchOptions:
    """The choices of a line. Raises as the command does."""
    return LaunchOptions.of(parser(command).parse_args([*REQUIRED[command], *shlex.split(line)]).launch)
