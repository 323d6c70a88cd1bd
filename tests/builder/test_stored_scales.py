"""Scales beside quantised weights: in every storage and under every name the same values, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from twostroke.__main__ import main
from twostroke.builder.checkpoint import SCALES, Checkpoint
from twostroke.builder.networks.layers import Linear, keep_as_stored
from twostroke.builder.networks.registry import TARGETS
from twostroke.builder.weights import collect, parameters_of, read_weight
from twostroke.engines.errors import CheckpointError
from twostroke.engines.loading import map_weights
from twostroke.tests.checkpoints import F4_FP8, T32_FP8, write_checkpoint

Tensors = dict[str, Tensor]
LINEAR = {"F4_FP8": "layers.0.attn.wkv", "T32_FP8": "model.layers.0.self_attn.kv_a_proj_with_mqa"}
EXPERT = {"F4_FP8": "layers.1.ffn.experts.2.w2", "T32_FP8": "model.layers.1.mlp.experts.2.down_proj"}
FAMILIES: Mapping[str, Mapping[str, Any]] = {"F4_FP8": F4_FP8, "T32_FP8": T32_FP8}
STORAGES = ("F8_E8M0", "U8", "F32")
ONE = 0x38  # 1.0 in e4m3


def stored_as(storage: str, byte: int, shape: torch.Size) -> Tensor:
    """A scale of 2^(byte - 127), as a checkpoint may store it; NaN for 255."""
    if storage == "F32":
        return torch.full(shape, 2.0 ** (byte - 127) if byte < 255 else float("nan"), dtype=torch.float32)
    scale = torch.full(shape, byte, dtype=torch.uint8)
    return scale if storage == "U8" else scale.view(torch.float8_e8m0fnu)


def with_scale(folder: Path, family: str, stem: str, storage: str, byte: int) -> Checkpoint:
    """A toy with that scale beside `stem`, and codes 1.0 in the first row of an FP8 weight."""

    def edit(tensors: Tensors) -> None:
        name = f"{stem}.{TARGET_SCALE[family]}"
        tensors[name] = stored_as(storage, byte, tensors[name].shape)
        if tensors[f"{stem}.weight"].dtype == torch.float8_e4m3fn:
            tensors[f"{stem}.weight"].view(torch.uint8)[0] = ONE

    checkpoint = Checkpoint.open(write_checkpoint(folder, FAMILIES[family], edit=edit))
    checkpoint.check(TARGETS[checkpoint.config.model_type].all_tensors(checkpoint.config))
    return checkpoint


TARGET_SCALE = {"F4_FP8": "scale", "T32_FP8": "weight_scale_inv"}


class Holder(torch.nn.Module):
    """A network of one linear layer, of that name."""

    def __init__(self, stem: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        inner: torch.nn.Module = Linear(shape[1], shape[0])
        for part in reversed(stem.split(".")):
            outer = torch.nn.Module()
            outer.add_module(part, inner)
            inner = outer
        self.inner = inner


def matrix_as_bound(checkpoint: Checkpoint, stem: str, out: Path) -> tuple[str, Tensor]:
    """The matrix a step computes with, of codes and scale as an engine binds them, and the scale's dtype there."""
    network = Holder(stem, checkpoint.entries[f"{stem}.weight"].shape).inner
    keep_as_stored(network, {name: entry.dtype for name, entry in checkpoint.entries.items()})
    out.mkdir()
    bound = map_weights(out, collect(checkpoint, parameters_of([network]), out))
    assert all(checkpoint.entries[name].nbytes == buffer.owner.nbytes for name, buffer in bound.items())
    for name, parameter in network.named_parameters():
        parameter.data = torch.from_numpy(np.array(bound[name].owner))
    (scale,) = (buffer.dtype for name, buffer in bound.items() if not name.endswith(".weight"))
    return scale, network.get_submodule(stem).matrix()  # type: ignore[operator]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("byte", [0, 120, 127, 254])
def test_a_scale_is_a_power_of_two_in_every_storage_and_destination(  # C-08
    family: str, byte: int, tmp_path: Path
) -> None:
    """E8M0, the same byte as a plain one and fp32; bound as stored and dequantised to fp32: six equal matrices."""
    stem = LINEAR[family]
    found, bound_as = [], []
    for storage in STORAGES:
        checkpoint = with_scale(tmp_path / storage, family, stem, storage, byte)
        dtype, matrix = matrix_as_bound(checkpoint, stem, tmp_path / f"bound {storage}")
        bound_as.append(dtype)
        shape = checkpoint.entries[f"{stem}.weight"].shape
        found += [matrix, read_weight(checkpoint, f"{stem}.weight", shape, torch.float32)]
    assert bound_as == ["uint8", "uint8", "float32"]
    assert torch.equal(found[0][0], torch.full_like(found[0][0], 2.0 ** (byte - 127)))
    assert found[0].abs().max() > 0
    for other in found[1:]:
        assert torch.equal(found[0], other)


@pytest.mark.parametrize(
    ("family", "place", "storage"),
    [
        *(("F4_FP8", LINEAR, storage) for storage in STORAGES),
        *(("F4_FP8", EXPERT, storage) for storage in STORAGES[:2]),
        *(("T32_FP8", place, storage) for place in (LINEAR, EXPERT) for storage in ("F8_E8M0", "F32")),
    ],
)
def test_a_scale_that_is_nan_is_refused_by_name_before_a_weight_is_written(  # C-08
    family: str, place: Mapping[str, str], storage: str, tmp_path: Path
) -> None:
    stem = place[family]
    checkpoint = with_scale(tmp_path / "checkpoint", family, stem, storage, 255)
    with pytest.raises(CheckpointError) as refusal:
        collect(checkpoint, {}, tmp_path)
    (problem,) = refusal.value.problems
    assert problem.startswith(f"tensor {stem}.{TARGET_SCALE[family]} has ")
    assert "NaN" in problem
    assert not (tmp_path / "weights.bin").exists()
    checkpoint.skip(stem)
    collect(checkpoint, {}, tmp_path)


def test_every_scale_that_is_no_number_is_counted_in_one_error(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{LINEAR['F4_FP8']}.scale"].view(torch.uint8)[0, -1] = 255
        tensors[f"{EXPERT['F4_FP8']}.scale"].view(torch.uint8)[:, -1] = 255

    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "checkpoint", F4_FP8, edit=edit))
    rows = checkpoint.entries[f"{EXPERT['F4_FP8']}.scale"].shape[0]
    with pytest.raises(CheckpointError) as refusal:
        collect(checkpoint, {}, tmp_path)
    assert [problem.split(" scales")[0] for problem in refusal.value.problems] == [
        f"tensor {LINEAR['F4_FP8']}.scale has 1",
        f"tensor {EXPERT['F4_FP8']}.scale has {rows}",
    ]


@pytest.mark.slow
def test_a_build_from_nan_scales_ends_with_one_line_and_no_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_scale(tmp_path / "checkpoint", "T32_FP8", EXPERT["T32_FP8"], "F32", 255)
    assert main(["build", str(tmp_path / "checkpoint"), "-o", str(tmp_path / "engine")]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "NaN" in line]
    assert len(said) == 1
    assert f"tensor {EXPERT['T32_FP8']}.weight_scale_inv" in said[0]
    assert not (tmp_path / "engine").exists()


def with_suffix(folder: Path, family: str, suffix: str) -> Path:
    """A toy with all scales under that suffix."""

    def edit(tensors: Tensors) -> None:
        ours = f".{TARGET_SCALE[family]}"
        for name in [name for name in tensors if name.endswith(ours)]:
            tensors[name.removesuffix(ours) + f".{suffix}"] = tensors.pop(name)

    return write_checkpoint(folder, FAMILIES[family], edit=edit)


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_under_every_known_suffix_load_equally(family: str, tmp_path: Path) -> None:  # C-09
    """The same names after opening, and the same values, dequantised and as stored, in linears and experts."""
    loaded = []
    for suffix in SCALES:
        checkpoint = Checkpoint.open(with_suffix(tmp_path / suffix, family, suffix))
        config = checkpoint.config
        checkpoint.check(TARGETS[config.model_type].all_tensors(config))
        assert not any(
            name.endswith(f".{other}") for name in checkpoint.entries for other in {*SCALES} - {config.scale_suffix}
        )
        values = {name: checkpoint.read(name) for name in checkpoint.entries}
        for place in (LINEAR, EXPERT):
            name = f"{place[family]}.weight"
            values[f"dequantised {name}"] = read_weight(checkpoint, name, tuple(values[name].shape), torch.float32)
        loaded.append(values)
    first, *others = loaded
    assert first[f"dequantised {EXPERT[family]}.weight"].abs().max() < 10
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], value) for name, value in first.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_whose_scales_have_an_unknown_suffix_are_refused_by_name(family: str, tmp_path: Path) -> None:  # C-09
    checkpoint = Checkpoint.open(with_suffix(tmp_path, family, "qscale"))
    problems = checkpoint.problems(TARGETS[checkpoint.config.model_type].all_tensors(checkpoint.config))
    kind = {"F4_FP8": "packed FP4", "T32_FP8": "FP8"}[family]
    for what, stem in (("FP8", LINEAR[family]), (kind, EXPERT[family])):
        assert [
            p for p in problems if p.startswith(f"{what} tensor {stem}.weight has no scale: there is no {stem} with")
        ]
        assert f"unknown tensor {stem}.qscale, which nothing would read" in problems
