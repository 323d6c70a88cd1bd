"""A build ends with its engine against its network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import twostroke.builder.build as building
from twostroke.__main__ import main
from twostroke.builder.build import BuildOptions, build
from twostroke.builder.self_check import BOUND
from twostroke.engines.manifest import WeightsIndex, read_manifest
from twostroke.tests.checkpoints import F4, F4_FP8, F4_PLAIN, F4_PREVIEW, T32, write_checkpoint
from twostroke.tests.engines import engine_directory

ENGINES = {
    "v4-dspark": (F4, {}),
    "v4-mtp": (F4_PREVIEW, {"max_draft_len": 5}),
    "v32-mtp": (T32, {"max_draft_len": 5}),
    "v4-fp8": (F4_FP8, {}),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_right_engine_is_called_checked_with_its_error(engine: str) -> None:
    config, options = ENGINES[engine]
    checked = read_manifest(engine_directory(config, **options)).self_check
    assert checked.done
    assert 0 < checked.error < BOUND / 10


# A layer's own weight, an expert's, one that only a draft step reads, one of the markov head. No norm follows them: it
# would hide their size.
@pytest.mark.parametrize(
    ("config", "weight", "step"),
    [
        (F4_PLAIN, "layers.3.attn.wo_b.weight", "target"),
        pytest.param(F4, "layers.5.ffn.experts.w2.weight", "target", marks=pytest.mark.slow),
        pytest.param(F4, "mtp.1.attn.kv_norm.weight", "observe", marks=pytest.mark.slow),
        pytest.param(F4, "mtp.2.markov_head.markov_w2.weight", "propose", marks=pytest.mark.slow),
        pytest.param(T32, "model.layers.3.eh_proj.weight", "observe", marks=pytest.mark.slow),
        pytest.param(F4_FP8, "layers.2.attn.wo_b.weight", "target", marks=pytest.mark.slow),
    ],
)
def test_one_wrong_weight_ends_the_build_without_a_directory(
    config: Mapping[str, Any],
    weight: str,
    step: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After export, one weight is 1.5 times what it was; of an FP8 one, all scales are doubled."""
    collect = building.collect

    def miscompiled(checkpoint: Any, parameters: Any, folder: Path, *rest: Any) -> WeightsIndex:
        index = collect(checkpoint, parameters, folder, *rest)
        name = weight.replace(".weight", ".scale") if config is F4_FP8 else weight
        record = index.weights[name]
        source = folder / record.file
        data = np.fromfile(source, record.dtype, count=int(np.prod(record.shape)), offset=record.offset)
        wrong = data + 1 if config is F4_FP8 else data * np.float32(1.5)
        (folder / "wrong.bin").write_bytes(wrong.astype(record.dtype).tobytes())
        moved = type(record)("wrong.bin", 0, record.bytes, record.dtype, record.shape, record.transform)
        return WeightsIndex({**index.weights, name: moved}, index.shards)

    monkeypatch.setattr(building, "collect", miscompiled)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", config)
    assert main(["build", str(checkpoint), "-o", str(tmp_path / "engine")]) == 2
    said = capsys.readouterr().err
    assert f"step {step} as compiled for onnxruntime does not compute what its network computes" in said
    assert "nothing was built" in said
    assert not (tmp_path / "engine").exists()


@pytest.mark.slow
def test_an_engine_that_was_not_checked_says_so_and_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", F4_PLAIN)
    assert main(["build", str(checkpoint), "-o", str(tmp_path / "asked"), "--no-self-check"]) == 0
    assert main(["inspect", str(tmp_path / "asked")]) == 0
    assert "not checked  against its network when built: not asked for" in capsys.readouterr().out
    monkeypatch.setattr("twostroke.builder.build.self_check.__defaults__", (1000,))
    checked = build(checkpoint, tmp_path / "large", BuildOptions()).self_check
    assert not checked.done
    assert "are run" in checked.what
    assert "the engine was not compared with its network" in caplog.text
