"""`builder/FLAGS.md` says what the parsers take and no more, and its commands run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from twostroke.__main__ import main
from twostroke.engines.attention_backends import ENGINES, KNOWN, RENAMED
from twostroke.engines.launch_flags import SGLANG_FLAGS
from twostroke.tests.checkpoints import T32, write_checkpoint
from twostroke.tests.engines import write_byte_tokenizer
from twostroke.tests.launch_lines import PARSERS, REQUIRED, parser

PAGE = (Path(__file__).parent.parent.parent / "builder" / "FLAGS.md").read_text("utf-8")
OPTION = re.compile(r"`(--?[a-z][\w-]*)`")


def table(heading: str) -> list[Mapping[str, str]]:
    """The rows of the first table below a heading, by column."""
    lines = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if line.startswith("|")]
    assert all(len(row) == len(rows[0]) for row in rows), heading
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


SEVERAL, NAMES, ONE = (
    table(heading)
    for heading in ("Choices with several spellings", "Implementations of attention", "Options with one spelling")
)


def on_the_page(command: str) -> set[str]:
    """Options the page says `command` takes."""
    found = {option for row in ONE if row["where"] == command for option in OPTION.findall(row["ours"])}
    for row in SEVERAL:
        for option, where in re.findall(r"`(--[a-z-]+)`(?: \((\w+)\))?", row["ours"]):
            found |= {option} if where in ("", command) else set()
        found |= set(OPTION.findall(row["SGLang"] + row["before"]))
    return found


@pytest.mark.parametrize("command", PARSERS)
def test_the_page_and_the_parser_have_the_same_options(command: str) -> None:
    taken = {option for action in parser(command)._actions for option in action.option_strings}
    assert on_the_page(command) == taken - {"-h", "--help"}


def test_the_page_calls_outdated_what_is_outdated() -> None:
    for row in SEVERAL:
        flags = [flag for flag in SGLANG_FLAGS if flag.names[0] in OPTION.findall(row["SGLang"])]
        assert OPTION.findall(row["SGLang"]) == [name for flag in flags for name in flag.names]
        assert OPTION.findall(row["before"]) == [name for flag in flags for name in flag.older]
        assert re.findall(r"value `(\w+)`", row["before"]) == [
            value for flag in flags for value in flag.older_values if flag.older_values is not RENAMED
        ]


def test_the_page_lists_every_implementation_with_its_phases_and_engines() -> None:
    found = {row["name"].strip("`"): row for row in NAMES}
    assert list(found) == list(KNOWN)
    for name, row in found.items():
        assert row["before"].strip("`") == next((old for old, now in RENAMED.items() if now == name), "")
        assert row["exists for"] == ", ".join(KNOWN[name])
        has = [engine for engine, choices in ENGINES.items() if name in {each.name for each in choices.attention}]
        assert row["engines here"] == ", ".join(has)


@pytest.mark.parametrize("command", PARSERS)
def test_names_of_tensorrt_llm_are_refused_with_the_nearest_of_ours(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = {option for row in (*SEVERAL, *ONE) for option in OPTION.findall(row["TensorRT-LLM"])}
    assert "--max_batch_size" in foreign
    for option in foreign:
        assert main([command, *REQUIRED[command], option, "1"]) == 2
        message = capsys.readouterr().err
        assert f"unknown option {option}" in message
        ours = option.replace("_", "-")
        if ours in on_the_page(command):
            assert f"(did you mean {ours}?)" in message


def test_the_commands_of_the_page_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same launch line at both, on a V3.2 of one layer and its MTP layer, which EAGLE names."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", T32, num_hidden_layers=1, first_k_dense_replace=0)
    write_byte_tokenizer(checkpoint, T32["vocab_size"])
    places = {"CHECKPOINT": str(checkpoint), "ENGINE": str(tmp_path / "engine")}
    commands = [line for line in PAGE.splitlines() if line.startswith("$ twostroke ")]
    assert len(commands) == 2
    for command in commands:
        assert main([places.get(word, word) for word in shlex.split(command)[2:]]) == 0
    said = capsys.readouterr().err
    assert "draft mtp, 3 tokens a block; maximum length 96, batches of 32" in said
    assert "draft mtp, depth 3 of 3; onnxruntime, attention portable; up to 32 requests" in said
    assert "outdated" not in said
