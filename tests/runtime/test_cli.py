from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import twostroke
from twostroke.__main__ import COMMANDS, main
from twostroke.engines.loading import load_engine_directory
from twostroke.runtime.state import State
from twostroke.runtime.tokenizer import Tokenizer
from twostroke.tests.runtime.byte_level_tokenizer import write_tokenizer
from twostroke.tests.runtime.scripted_engine import VOCAB, write_scripted_engine

STORY = "a naïve story 😀 of the end\nSTOP and more"
PROMPT_IDS = "0,3,4"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("engine"))
    ids = Tokenizer(folder).encode(STORY, add_special_tokens=False)
    return write_scripted_engine(folder, [0, 3, 4, *ids], draft_length=5)


@pytest.fixture
def story_ids(engine: Path) -> list[int]:
    return Tokenizer(engine).encode(STORY, add_special_tokens=False)


def command(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`twostroke` as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "twostroke", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


def test_generate_writes_the_answer_to_stdout_and_the_rest_to_stderr(
    engine: Path, story_ids: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(engine), "--prompt-ids", PROMPT_IDS, "--max-tokens", str(len(story_ids))]) == 0
    out, err = capsys.readouterr()
    assert out == STORY + "\n"
    assert err.startswith(
        "twostroke: Scripted; draft dspark, depth 5 of 5, markov_head missing, confidence_head missing"
    )
    summary = err.splitlines()[-1]
    for word in (f"{len(story_ids)} tokens after 3 of prompt", "tokens/iteration", "ms/token", "by length", "seed "):
        assert word in summary


def test_plain_and_drafted_answers_are_the_same(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = set()
    for option in ([], ["--no-speculation"], ["--draft-length", "2"], ["--confidence-threshold", "0.6"]):
        assert main(["generate", str(engine), "--prompt-ids", PROMPT_IDS, *option]) == 0
        answers.add(capsys.readouterr().out)
    assert len(answers) == 1


@pytest.mark.parametrize("source", ["--prompt", "--prompt-file", "stdin"])
def test_the_prompt_comes_from_an_argument_a_file_or_stdin(
    engine: Path,
    source: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "prompt.txt").write_text("naïve")
    monkeypatch.setattr(sys, "stdin", io.StringIO("naïve"))
    chosen = {
        "--prompt": ["--prompt", "naïve"],
        "--prompt-file": ["--prompt-file", str(tmp_path / "prompt.txt")],
        "stdin": ["--prompt-file", "-"],
    }
    assert main(["generate", str(engine), *chosen[source], "--max-tokens", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prompt"] == "naïve"
    assert answer["prompt_token_ids"] == Tokenizer(engine).encode("naïve")


def test_json_has_the_answer_its_end_and_the_acceptance(
    engine: Path, story_ids: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-tokens", "60", "--stop", "STOP", "--stop", "nothing", "--seed", "5", "--temperature", "0"]
    assert main(["generate", str(engine), "--prompt-ids", PROMPT_IDS, "--json", *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == STORY[: STORY.index("STOP")]
    assert answer["token_ids"] == story_ids[: len(answer["token_ids"])]
    assert (answer["finish_reason"], answer["stop_reason"], answer["seed"]) == ("stop", "STOP", 5)
    assert answer["acceptance"]["emitted"] == len(answer["token_ids"]) - 1
    assert answer["ms_per_token"] > 0


def test_dumped_logits_say_which_token_at_which_position_they_judged(
    engine: Path, story_ids: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.npz"
    options = ["--max-tokens", "9", "--dump-logits", str(file)]
    assert main(["generate", str(engine), "--prompt-ids", PROMPT_IDS, *options]) == 0
    with np.load(file) as rows:
        assert rows["logits"].shape == (9, VOCAB)
        assert rows["logits"].argmax(axis=1).tolist() == rows["token_ids"].tolist() == story_ids[:9]
        assert rows["positions"].tolist() == list(range(3, 12))
        assert rows["prompt_token_ids"].tolist() == [0, 3, 4]


def test_dumped_logits_that_find_no_space_are_one_line_and_exit_code_2(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-tokens", "2", "--dump-logits", "/dev/full"]
    assert main(["generate", str(engine), "--prompt-ids", PROMPT_IDS, *options]) == 2
    assert "--dump-logits: /dev/full could not be written (No space left on device)" in capsys.readouterr().err


def test_stats_are_json_on_stderr(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(engine), "--prompt-ids", PROMPT_IDS, "--max-tokens", "7", "--stats"]) == 0
    stats = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert stats["finished"] == {"length": 1}
    assert stats["acceptance"]["emitted"] == 6


def test_without_a_tokenizer_token_ids_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_scripted_engine(tmp_path, [0, 10, 11, 12])
    assert main(["generate", str(folder), "--prompt-ids", "0", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.split() == ["10", "11", "12"]


def test_all_names_of_the_batch_size_mean_the_same_and_may_not_differ(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["generate", str(engine), "--prompt-ids", PROMPT_IDS, "--max-tokens", "1"]
    for name in ("--max-batch-size", "--cuda-graph-max-bs", "--cuda-graph-max-bs-decode", "--max-running-requests"):
        assert main([*run, name, "2"]) == 0
        assert "up to 2 requests" in capsys.readouterr().err
    assert main([*run, "--max-batch-size", "2", "--max-running-requests", "2"]) == 0
    capsys.readouterr()
    assert main([*run, "--max-batch-size", "2", "--max-running-requests", "3"]) == 2
    assert "--max-running-requests 3 contradicts --max-batch-size 2" in capsys.readouterr().err


def test_a_launch_line_drafts_as_deep_as_it_says(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["generate", str(engine), "--prompt-ids", PROMPT_IDS, "--json"]
    whole = "--speculative-algorithm DSPARK --speculative-dspark-block-size 5 --speculative-num-draft-tokens 6"
    for line, depth in (
        (whole, 5),
        ("--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4", 3),
        ("--speculative-num-steps 1", 1),
        ("--tp 1 --attention-backend dsa --dsa-prefill-backend portable --kv-cache-dtype float32", 5),
    ):
        assert main([*run, *line.split()]) == 0
        found = capsys.readouterr()
        assert f"depth {depth} of 5" in found.err
        assert len(json.loads(found.out)["acceptance"]["accepted_at"]) == depth


def test_outdated_spellings_work_and_one_line_says_what_they_are_called_now(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["generate", str(engine), "--prompt-ids", PROMPT_IDS, "--max-tokens", "1"]
    old = "--attention-backend nsa --nsa-prefill portable --nsa-decode-backend portable --cuda-graph-max-bs 2"
    assert main([*run, *old.split(), "--nsa-decode", "portable"]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if " now " in line] == [
        "twostroke: outdated spellings, accepted: nsa is now dsa; --nsa-prefill is now --dsa-prefill-backend; "
        "--nsa-decode-backend is now --dsa-decode-backend; --cuda-graph-max-bs is now --cuda-graph-max-bs-decode; "
        "--nsa-decode is now --dsa-decode-backend"
    ]
    new = "--attention-backend dsa --dsa-prefill-backend portable --cuda-graph-max-bs-decode 2"
    assert main([*run, *new.split()]) == 0
    assert " now " not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generat"], "unknown command generat (did you mean generate?)"),
        ([], "no command"),
        (["--verison"], "unknown option --verison (did you mean --version?)"),
        (["generate", "ENGINE", "--promt", "x"], "unknown option --promt (did you mean --prompt?)"),
        (["generate", "ENGINE", "--prompt", "x", "--top_k=5"], "unknown option --top_k (did you mean --top-k?)"),
        (["generate", "ENGINE", "--prompt", "x", "--max-tok", "5"], "unknown option --max-tok"),
        (["generate", "ENGINE", "--prompt", "x", "more"], "unrecognized arguments: more"),
        (["generate", "ENGINE"], "one of the arguments --prompt --prompt-file --prompt-ids is required"),
        (["generate", "ENGINE", "--prompt", "x", "--prompt-ids", "1"], "not allowed with argument"),
        (["generate", "ENGINE", "--prompt-ids", "1,,2"], "'1,,2' is no list of token ids"),
        (["generate", "ENGINE", "--prompt-ids", "1,400"], "token 1 of prompt is 400"),
        (["generate", "ENGINE", "--prompt", ""], "the prompt is empty"),
        (["generate", "ENGINE", "--prompt-file", "/nowhere"], "--prompt-file /nowhere cannot be read"),
        (["generate", "ENGINE", "--prompt", "x", "--temperature", "hot"], "--temperature: invalid float value: 'hot'"),
        (["generate", "ENGINE", "--prompt", "x", "--temperature", "-1"], "temperature is -1.0, expected"),
        (["generate", "ENGINE", "--prompt", "x", "--max-tokens", "0"], "max_tokens is 0, expected"),
        (["generate", "ENGINE", "--prompt", "x", "--top-p", "7"], "top_p is 7.0, expected a number from 0 to 1"),
        (["generate", "ENGINE", "--prompt", "x", "--coupling", "exact"], "invalid choice: 'exact'"),
        (["generate", "ENGINE", "--prompt", "x", "--draft-length", "6"], "--draft-length 6 asks for 6 drafted tokens"),
        (["generate", "ENGINE", "--prompt", "x", "--draft-length", "-1"], "draft_length is -1"),
        (["generate", "ENGINE", "--prompt", "x", "--no-speculation", "--draft-length", "1"], "contradicts --no-specul"),
        (["generate", "ENGINE", "--prompt", "x", "--speculative-num-steps", "6"], "was built with dspark, 5 tokens an"),
        (["generate", "ENGINE", "--prompt", "x", "--speculative-algorithm", "EAGLE"], "draft method mtp, but"),
        (["generate", "ENGINE", "--prompt", "x", "--nsa-decode-backend", "fa3"], "onnxruntime has portable for decode"),
        (
            ["generate", "ENGINE", "--prompt", "x", "--tp-size", "2"],
            "there is no tensor parallelism yet, accepted is 1",
        ),
        (["generate", "ENGINE", "--prompt", "x", "--max-batch-size", "0"], "--max-batch-size 0: expected at least 1"),
        (["generate", "ENGINE", "--prompt", "x", "--no-speculation", "--confidence-threshold", "0.5"], "no meaning"),
        (["generate", "ENGINE", "--prompt", "x", "--confidence-threshold", "2"], "confidence_threshold is 2.0"),
        (["generate", "ENGINE", "--prompt", "x", "--threads", "0"], "threads is 0"),
        (["generate", "ENGINE", "--prompt", "x", "--enable-prefix-caching"], "there is no prefix cache yet"),
        (["generate", "ENGINE", "--prompt", "x", "--dump-logits", "/nowhere/x.npz"], "folder of /nowhere/x.npz"),
        (["generate", "/nowhere", "--prompt", "x"], "/nowhere: no such engine directory"),
        (["inspect", "/nowhere"], "/nowhere: no such engine directory"),
        (["inspect"], "the following arguments are required: PATH"),
    ],
)
def test_what_cannot_be_honoured_is_one_line_and_exit_code_2(
    engine: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(engine) if argument == "ENGINE" else argument for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    complaints = [line for line in err.splitlines() if "Scripted" not in line and " now " not in line]
    assert len(complaints) == 1
    assert complaints[0].startswith("twostroke")
    assert expected in complaints[0]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("config.json", "config.json is missing"),
        ("target.portable.onnx", "file target.portable.onnx is missing"),
    ],
)
def test_a_missing_file_of_the_engine_is_named(
    tmp_path: Path, file: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_scripted_engine(tmp_path, [0, 10])
    (folder / file).unlink()
    assert main(["generate", str(folder), "--prompt-ids", "0"]) == 2
    assert expected in capsys.readouterr().err


def test_inspect_explains_an_engine_directory(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(engine)]) == 0
    text = capsys.readouterr().out
    for word in (
        "Scripted",
        "dspark, 5 tokens drafted",
        "96 tokens a request",
        "target.portable.onnx",
        "16 bytes a slot",
    ):
        assert word in text
    assert main(["inspect", str(engine), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["speculation"] == {
        "method": "dspark",
        "draft_length": 5,
        "trained_length": None,
        "taps_width": 1,
        "heads": {"markov_head": False, "confidence_head": False},
    }
    assert report["steps"]["observe"]["in_place"] == 1
    assert report["state"] == {"tensors": 1, "bytes_per_token": 0, "bytes_per_slot": 16, "packed": {}}
    assert set(report["files"]) == {f"{step}.portable.onnx" for step in ("target", "observe", "propose")}


def test_help_and_version_need_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.split() == ["twostroke", twostroke.__version__]
    for name in ("generate", "inspect"):
        assert main([name, "--help"]) == 0
        assert f"twostroke {name}" in capsys.readouterr().out


def test_an_error_shows_where_it_was_raised_only_when_asked(engine: Path) -> None:
    run = ("generate", engine, "--prompt-ids", "400")
    quiet, loud = command(*run), command(*run, TWOSTROKE_TRACEBACK="1")
    assert quiet.returncode == 2
    assert "Traceback" not in quiet.stderr
    assert "Traceback" in loud.stderr


def test_an_error_of_ours_is_one_line_and_exit_code_1(
    engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setitem(COMMANDS, "inspect", ("", fail))
    assert main(["inspect", str(engine)]) == 1
    assert capsys.readouterr().err.startswith("twostroke: internal error, ZeroDivisionError: by zero;")


def test_an_interrupt_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    folder = write_scripted_engine(tmp_path, [0, 3], max_seq_len=100_000, vocab_size=4)
    process = subprocess.Popen(
        [sys.executable, "-m", "twostroke", "generate", folder, "--prompt-ids", "0", "--max-tokens", "99999"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_reader_that_goes_away_ends_with_141_and_no_traceback(tmp_path: Path) -> None:
    folder = write_scripted_engine(tmp_path, [0, 3], max_seq_len=100_000, vocab_size=4)
    process = subprocess.Popen(
        [sys.executable, "-m", "twostroke", "generate", folder, "--prompt-ids", "0", "--max-tokens", "99999"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(20)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=30) == 141
    assert "Traceback" not in err


def test_build_without_its_packages_is_one_sentence(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'onnxscript', 'onnx_ir', 'safetensors'): sys.modules[name] = None\n"
        "from twostroke.__main__ import main\n"
        f"sys.exit(main(['build', {str(tmp_path)!r}, '-o', {str(tmp_path / 'engine')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "pip install 'twostroke[build]'" in done.stderr


def test_the_start_up_line_says_model_method_depth_and_heads(
    f4_engine_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["generate", str(f4_engine_dir), "--prompt", "hello", "--max-tokens", "8"]
    assert main(run) == 0
    drafted = capsys.readouterr()
    assert drafted.err.startswith(
        "twostroke: DeepseekV4ForCausalLM, 6 layers; draft dspark, depth 5 of 5, "
        "markov_head loaded, confidence_head loaded; onnxruntime"
    )
    assert main([*run, "--no-speculation"]) == 0
    plain = capsys.readouterr()
    assert "draft dspark switched off" in plain.err
    assert plain.out == drafted.out


def test_inspect_gives_the_memory_a_token_and_a_slot_take(
    f4_engine_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(f4_engine_dir), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    engine = load_engine_directory(f4_engine_dir)
    state = State(engine.manifest.state, slots=2, pages=3)
    tokens = 3 * report["limits"]["tokens_per_page"]
    assert state.nbytes == 2 * report["state"]["bytes_per_slot"] + tokens * report["state"]["bytes_per_token"]
    weights = report["weights"]
    assert weights["bytes"] == weights["bytes_in_directory"] + weights["bytes_in_checkpoint"]
    assert all(step["in_place"] == step["states"] for name, step in report["steps"].items() if name != "propose")
