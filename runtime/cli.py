"""`twostroke generate` and `twostroke inspect`.

The answer goes to stdout as it comes; everything about it goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.engines.errors import RequestError
from twostroke.engines.launch_flags import DRAFT_LENGTH, MAX_BATCH_SIZE, NO_SPECULATION
from twostroke.engines.launch_parser import add_flag, add_sglang_flags, launch_options
from twostroke.engines.loading import verify_files
from twostroke.engines.manifest import read_manifest, read_weights_index
from twostroke.runtime.generation import Generation
from twostroke.runtime.inspection import inspect_engine, render, startup_line
from twostroke.runtime.llm import LLM
from twostroke.runtime.outputs import RequestOutput
from twostroke.runtime.sampling_params import SamplingParams

# Options that are fields of RuntimeConfig, and those that are fields of SamplingParams, by the same names.
_RUNTIME_OPTIONS = ("max_num_tokens", "confidence_threshold", "threads", "enable_prefix_caching")
_SAMPLING_OPTIONS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos", "coupling")


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids; write them like 1,2,3") from None


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `twostroke generate`."""
    parser.add_argument("engine", metavar="DIR", type=Path, help="engine directory")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-file", metavar="FILE", help="file with the prompt as UTF-8 text; - reads stdin")
    prompt.add_argument("--prompt-ids", metavar="IDS", type=_token_ids, help="the prompt as token ids: 1,2,3")

    sampling = parser.add_argument_group("sampling (greedy unless one of the first four is given)")
    sampling.add_argument("--temperature", metavar="T", type=float, help="0 is greedy")
    sampling.add_argument("--top-k", metavar="K", type=int, help="keep the K most likely tokens")
    sampling.add_argument("--top-p", metavar="P", type=float, help="keep the smallest set of probability P")
    sampling.add_argument("--min-p", metavar="P", type=float, help="keep tokens of at least P times the best one")
    sampling.add_argument("--seed", metavar="N", type=int, help="same seed, same answer; drawn and reported if missing")
    sampling.add_argument(
        "--coupling",
        choices=("rejection", "gumbel"),
        help="gumbel: a seeded answer is the same with and without speculation",
    )

    length = parser.add_argument_group("length")
    length.add_argument("--max-tokens", metavar="N", type=int, help="new tokens at most (32)")
    length.add_argument("--stop", metavar="TEXT", action="append", help="end before this text; may be repeated")
    length.add_argument("--ignore-eos", action="store_true", default=None, help="go on after end of text")

    draft = parser.add_argument_group("speculation")
    add_flag(draft, DRAFT_LENGTH)
    add_flag(draft, NO_SPECULATION)
    draft.add_argument(
        "--confidence-threshold", metavar="C", type=float, help="verify the leading drafts of at least this confidence"
    )

    runtime = parser.add_argument_group("runtime")
    add_flag(runtime, MAX_BATCH_SIZE)
    runtime.add_argument("--max-num-tokens", metavar="N", type=int, help="prompt tokens of one prefill step (64)")
    runtime.add_argument("--threads", metavar="N", type=int, help="CPU threads of the engine (1)")
    runtime.add_argument(
        "--enable-prefix-caching", action="store_true", default=None, help="refused: there is no prefix cache yet"
    )

    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object instead of the text")
    output.add_argument(
        "--dump-logits",
        metavar="FILE.npz",
        type=Path,
        help="write the target rows that judged the answer: logits, positions and token_ids of what they judged",
    )
    output.add_argument("--stats", action="store_true", help="counters of the run as JSON on stderr")
    add_sglang_flags(parser)


def run_generate(args: argparse.Namespace) -> int:
    """Answers one prompt."""
    launch = launch_options(args)
    if launch.draft == "none" and args.confidence_threshold is not None:
        raise RequestError("--confidence-threshold has no meaning with --no-speculation", field="confidence_threshold")
    if args.dump_logits is not None and not args.dump_logits.absolute().parent.is_dir():
        raise RequestError(f"--dump-logits: the folder of {args.dump_logits} does not exist", field="dump_logits")
    if args.dump_logits is not None and args.dump_logits.is_dir():
        raise RequestError(f"--dump-logits: {args.dump_logits} is a folder, expected a file name", field="dump_logits")
    given = {name: getattr(args, name) for name in (*_RUNTIME_OPTIONS, *_SAMPLING_OPTIONS)}
    given = {name: value for name, value in given.items() if value is not None}
    options = {name: value for name, value in given.items() if name in _RUNTIME_OPTIONS}
    launch.check_built(read_manifest(args.engine), args.engine)
    options |= {"max_batch_size": launch.max_batch_size, "draft_length": launch.draft_len}
    if launch.draft == "none":
        options["draft_length"] = 0
    params = SamplingParams(
        **{name: value for name, value in given.items() if name in _SAMPLING_OPTIONS},
        return_generation_logits=args.dump_logits is not None,
    )
    prompt = args.prompt_ids if args.prompt_ids is not None else _prompt_text(args)
    with _bars() as progress:
        llm = LLM(args.engine, progress=progress, **options)
    with llm:
        print(f"twostroke: {startup_line(llm.manifest, llm.limits)}", file=sys.stderr, flush=True)
        started = time.perf_counter()
        generation = llm.generate_async(prompt, params, streaming=True)
        output, timing = _follow(generation, started, show=None if args.json else llm.tokenizer is not None)
        stats = llm.stats()
    if args.json:
        print(json.dumps(_as_json(output, timing)))
    if args.dump_logits is not None:
        _dump_logits(args.dump_logits, output)
    print(f"twostroke: {_summary(output, timing)}", file=sys.stderr)
    if args.stats:
        print(json.dumps(stats), file=sys.stderr)
    return 0


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `twostroke inspect`."""
    parser.add_argument("path", metavar="PATH", type=Path, help="engine directory, or a checkpoint folder")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument(
        "--verify", action="store_true", help="read every file of an engine directory and compare its hash"
    )
    parser.add_argument("--batch-size", metavar="B", type=int, help="requests at once that memory is reckoned for")
    parser.add_argument("--seq-len", metavar="L", type=int, help="tokens of each of them, prompt and answer")


def run_inspect(args: argparse.Namespace) -> int:
    """Explains an engine directory."""
    report = inspect_engine(args.path, batch_size=args.batch_size, seq_len=args.seq_len)
    if args.verify:
        with _bars() as progress:
            verify_files(args.path, read_manifest(args.path), read_weights_index(args.path), True, progress)
        report["verified"] = True
    print(json.dumps(report, indent=1) if args.json else render(report))
    return 0


@dataclass(frozen=True)
class _Timing:
    """Seconds from the start to the first token and to the last one."""

    first: float
    last: float

    def per_token(self, tokens: int) -> float:
        """Milliseconds for each token of the answer."""
        return 1000 * self.last / max(1, tokens)


def _follow(generation: Generation, started: float, show: bool | None) -> tuple[RequestOutput, _Timing]:
    """Waits for the end. `show` True writes the text as it comes, False the token ids, None nothing."""
    first = last = 0.0
    output = None
    for output in generation:
        answer = output.outputs[0]
        last = time.perf_counter() - started
        first = first or last
        if show:
            sys.stdout.write(answer.text_diff)
        elif show is not None:
            sys.stdout.write("".join(f"{token_id} " for token_id in answer.token_ids_diff))
        sys.stdout.flush()
    assert output is not None
    if show is not None:
        print(flush=True)
    return output, _Timing(first, last)


def _prompt_text(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return str(args.prompt)
    name = args.prompt_file
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--prompt-file {name} cannot be read ({error})", field="prompt_file") from None


@contextmanager
def _bars() -> Iterator[Callable[[str, int, int], None]]:
    """Progress bars for loading and warm-up on stderr, where it is a terminal."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=total)
            shown.update(tasks[what], completed=done)

        yield progress


def _as_json(output: RequestOutput, timing: _Timing) -> dict[str, Any]:
    answer = output.outputs[0]
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "seed": output.seed,
        "acceptance": None if output.acceptance is None else asdict(output.acceptance),
        "first_token_ms": 1000 * timing.first,
        "ms_per_token": timing.per_token(answer.length),
    }


def _summary(output: RequestOutput, timing: _Timing) -> str:
    answer, acceptance = output.outputs[0], output.acceptance
    each = f"{acceptance.mean_accepted_length:.2f} tokens/iteration, " if acceptance and acceptance.iterations else ""
    return (
        f"{answer.length} tokens after {len(output.prompt_token_ids)} of prompt, {each}"
        f"{timing.per_token(answer.length):.2f} ms/token (first after {1000 * timing.first:.1f} ms), "
        f"finished by {answer.finish_reason}, seed {output.seed}"
    )


def _dump_logits(path: Path, output: RequestOutput) -> None:
    """Row i judged `token_ids[i]`, the token at position `positions[i]` of the sequence."""
    answer = output.outputs[0]
    prompt = output.prompt_token_ids
    assert answer.generation_logits is not None
    try:
        with open(path, "wb") as file:
            np.savez(
                file,
                logits=answer.generation_logits,
                positions=np.arange(len(prompt), len(prompt) + answer.length, dtype=np.int32),
                token_ids=np.array(answer.token_ids, np.int32),
                prompt_token_ids=np.array(prompt, np.int32),
            )
    except OSError as error:
        raise RequestError(
            f"--dump-logits: {path} could not be written ({error.strerror or error})", field="dump_logits"
        ) from None
