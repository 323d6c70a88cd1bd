"""Weights of another checkpoint in an engine that is built: all of them, or none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from twostroke.__main__ import main
from twostroke.builder.checkpoint import Checkpoint
from twostroke.builder.weights import read_weight
from twostroke.engines.file_records import file_hash
from twostroke.engines.loading import load_engine_directory, map_weights
from twostroke.engines.manifest import read_manifest, read_weights_index
from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.scheduler import Scheduler
from twostroke.tests.checkpoints import F4_FP8, T32, write_checkpoint
from twostroke.tests.engines import engine_directory
from twostroke.tests.runtime.serving import greedy, serve

REQUESTS = [
    Request(str(n), tuple(np.random.default_rng(n).integers(2, 318, size=9).tolist()), greedy(20)) for n in (1, 2)
]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A copy of the V3.2 toy's engine."""
    return Path(shutil.copytree(engine_directory(T32, max_draft_len=5), tmp_path / "engine"))


def answers(folder: Path) -> dict[str, list[int]]:
    scheduler = Scheduler(load_engine_directory(folder), RuntimeConfig(max_batch_size=2))
    return {name: answer.tokens for name, answer in serve(scheduler, REQUESTS).items()}


def hashes(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): file_hash(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_refitted_engine_is_the_one_a_fresh_build_makes(engine: Path, tmp_path: Path) -> None:
    """Every weight of the second checkpoint, to the bit, under graphs that did not change; and other answers."""
    before, graphs = answers(engine), {n: h for n, h in hashes(engine).items() if n.endswith(".onnx")}
    second = write_checkpoint(tmp_path / "second", T32, seed=1)
    assert main(["refit", str(engine), str(second)]) == 0
    checkpoint = Checkpoint.open(second)
    found = map_weights(engine, read_weights_index(engine))
    assert len(found) > 50
    for name, buffer in found.items():
        expected = read_weight(checkpoint, name, buffer.shape, getattr(torch, buffer.dtype))
        np.testing.assert_array_equal(buffer.owner, expected.numpy(), err_msg=name)
    assert {n: h for n, h in hashes(engine).items() if n.endswith(".onnx")} == graphs
    assert answers(engine) != before
    assert not read_manifest(engine).self_check.done
    assert main(["refit", str(engine), str(write_checkpoint(tmp_path / "first", T32))]) == 0
    assert answers(engine) == before


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return edit


def cut(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1].contiguous()

    return edit


def changed(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] += 1

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (without("model.layers.1.mlp.experts.2.up_proj.weight"), "missing tensor model.layers.1.mlp.experts.2.up_proj"),
        (cut("model.layers.0.self_attn.o_proj.weight"), "model.layers.0.self_attn.o_proj.weight has shape [63, 64]"),
        (changed("model.layers.3.shared_head.head.weight"), "of its own, the engine was built for nothing"),
    ],
    ids=["missing", "misshaped", "a head of its own"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name_and_changes_nothing(
    engine: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    edit: Callable[[dict[str, torch.Tensor]], None],
    said: str,
) -> None:
    before = hashes(engine)
    assert main(["refit", str(engine), str(write_checkpoint(tmp_path / "second", T32, seed=1, edit=edit))]) == 2
    assert said in capsys.readouterr().err
    assert hashes(engine) == before
    assert {path.name for path in tmp_path.iterdir()} == {"engine", "second"}


def test_another_config_is_refused_with_the_fields_that_differ(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_checkpoint(tmp_path / "other", T32, index_topk=4)
    assert main(["refit", str(engine), str(other)]) == 2
    assert "index_topk differ from the config the engine was built from" in capsys.readouterr().err


def test_weights_bound_as_stored_are_never_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BF16 where the engine takes BF16: a fp32 tensor would lose half its bits."""

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors["head.weight"] = tensors["head.weight"].float()

    engine = Path(shutil.copytree(engine_directory(F4_FP8), tmp_path / "engine"))
    before = hashes(engine)
    assert main(["refit", str(engine), str(write_checkpoint(tmp_path / "wide", F4_FP8, edit=widen))]) == 2
    assert "head.weight is F32; build another engine" in capsys.readouterr().err
    assert hashes(engine) == before
    assert main(["refit", str(engine), str(write_checkpoint(tmp_path / "second", F4_FP8, seed=1))]) == 0
    load_engine_directory(engine)
