"""What a build would make, for a device, without making it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from twostroke.__main__ import main
from twostroke.engines.manifest import read_manifest, read_weights_index
from twostroke.runtime.inspection import inspect_engine
from twostroke.tests.checkpoints import F4_FP8, T32, write_checkpoint
from twostroke.tests.engines import engine_directory


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["build", *arguments, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_dry_run_foretells_what_the_build_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights referred to and written, state and memory of the quantised toy; and nothing is written."""
    folder = engine_directory(F4_FP8)
    found = report(capsys, str(folder.parent / "checkpoint"), "-o", str(tmp_path / "engine"))
    assert list(tmp_path.iterdir()) == []
    records = read_weights_index(folder).weights.values()
    built = inspect_engine(folder)
    stored = [record.bytes for record in records if record.transform == "as stored"]
    assert found["build"]["weights_referred_to"] == len(stored)
    assert found["build"]["bytes_referred_to"] == sum(stored)
    assert found["build"]["bytes_written"] == built["weights"]["bytes"] - sum(stored) == found["disk"]["written"]
    assert found["build"]["steps"] == list(read_manifest(folder).steps)
    assert found["state"]["bytes_per_slot"] == built["state"]["bytes_per_slot"]
    assert found["memory"]["total"] == built["memory"]["total"]


def test_options_of_the_build_are_those_of_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = str(write_checkpoint(tmp_path / "checkpoint", T32))
    with_draft = report(capsys, checkpoint, "-o", str(tmp_path / "e"))
    without = report(capsys, checkpoint, "-o", str(tmp_path / "e"), "--draft", "none")
    packed = report(
        capsys, checkpoint, "-o", str(tmp_path / "e"), "--index-key-dtype", "fp8_e4m3", "--max-seq-len", "64"
    )
    assert with_draft["build"]["depth"] == 3
    assert (without["build"]["depth"], without["build"]["steps"]) == (0, ["target"])
    assert packed["state"]["bytes_per_token"] < with_draft["state"]["bytes_per_token"]
    assert packed["memory"]["seq_len"] == 64


def test_the_largest_batch_is_the_one_that_just_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = str(write_checkpoint(tmp_path / "checkpoint", T32))
    largest = report(capsys, checkpoint, "-o", str(tmp_path / "e"), "--device", "h200")["device"]["largest_batch"]
    for batch, fits in ((largest, True), (largest + 1, False)):
        found = report(
            capsys, checkpoint, "-o", str(tmp_path / "e"), "--device", "h200", "--max-batch-size", str(batch)
        )
        assert found["device"] == {
            "name": "h200",
            "bytes": 141 * 10**9,
            "needed": found["memory"]["total"],
            "fits": fits,
            "largest_batch": largest,
        }


def test_all_problems_are_reported_and_the_exit_code_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()

    checkpoint = write_checkpoint(tmp_path / "checkpoint", T32, edit=damage)
    assert main(["build", str(checkpoint), "-o", str(tmp_path / "e"), "--dry-run"]) == 2
    said = capsys.readouterr()
    assert "missing tensor model.norm.weight [64]" in said.out
    assert "lm_head.weight has shape [319, 64]" in said.out
    assert "has 2 problems" in said.err


@pytest.mark.parametrize("option", [["--device", "h200"], ["--json"]])
def test_options_of_the_report_without_it_are_refused(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", T32)
    assert main(["build", str(checkpoint), "-o", str(tmp_path / "e"), *option]) == 2
    assert f"{option[0]} is for a report; give --dry-run with it" in capsys.readouterr().err
