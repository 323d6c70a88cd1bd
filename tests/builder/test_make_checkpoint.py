"""Checkpoints of named models: what a release holds, at any scale, with random weights or holes."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.__main__ import main
from twostroke.builder.checkpoint import INDEX, TensorEntry, read_entries
from twostroke.builder.config import CSA, HCA, SLIDING
from twostroke.builder.inventory import TensorSpec
from twostroke.builder.make_checkpoint.named_models import NAMED_MODELS
from twostroke.builder.make_checkpoint.random_weights import tensor_pieces
from twostroke.builder.make_checkpoint.variants import Variant, variant
from twostroke.builder.make_checkpoint.writer import split
from twostroke.engines.errors import ConfigError
from twostroke.engines.manifest import read_manifest

# The dtype tables of the releases (`spec/deepseek_v4.md` 10.1, `spec/dspark.md` 11 and 12, `spec/deepseek_v32.md` 5.1,
# 8.1 and 11): every tensor is described by exactly one line.
V4_DTYPES = {
    r"(mtp\.\d+\.)?norm\.weight|.*\.(attn|ffn|q|kv|main)_norm\.weight|.*compressor\.norm\.weight": "BF16",
    r"embed\.weight|head\.weight|.*\.(gate|weights_proj)\.weight|.*compressor\.(wkv|wgate)\.weight": "BF16",
    r"mtp\.\d+\.(enorm|hnorm|markov_head\.markov_w[12]|confidence_head\.proj)\.weight": "BF16",
    r".*hc_(attn|ffn|head)_(fn|base|scale)|.*\.attn_sink|.*\.ape|.*\.gate\.bias": "F32",
    r".*\.gate\.tid2eid": "I64",
    r".*\.experts\.\d+\.w[123]\.weight": "I8",
    r".*\.shared_experts\.w[123]\.weight|.*\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight": "F8_E4M3",
    r"mtp\.\d+\.(main_proj|e_proj|h_proj)\.weight": "F8_E4M3",
    r".*\.scale": "F8_E8M0",
}
V32_DTYPES = {
    r".*(embed_tokens|lm_head|norm|\.head|eh_proj|mlp\.gate|weights_proj)\.weight|.*k_norm\.bias": "BF16",
    r".*e_score_correction_bias": "F32",
    r".*\.(q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|wq_b|wk)\.weight": "F8_E4M3",
    r".*\.(gate_proj|up_proj|down_proj)\.weight": "F8_E4M3",
    r".*\.weight_scale_inv": "F32",
}
DISTINCT = ("v4-flash-0731", "v4-flash-preview", "v4-pro", "v3.2")
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@functools.cache
def whole(model: str) -> Variant:
    return variant(NAMED_MODELS[model])


def made(folder: Path, *options: str, model: str = "v4-flash-0731") -> Path:
    assert main(["make-checkpoint", "--model", model, "-o", str(folder), *options]) == 0
    return folder


def stored(folder: Path, entry: TensorEntry) -> torch.Tensor:
    """The bytes of a tensor, u8."""
    with open(folder / entry.file, "rb") as shard:
        shard.seek(entry.offset)
        return torch.frombuffer(bytearray(shard.read(entry.nbytes)), dtype=torch.uint8)


def values(folder: Path, entries: Mapping[str, TensorEntry], name: str) -> torch.Tensor:
    """A tensor as numbers, dequantised by torch's own types; FP4 from the table of its codes."""
    entry = entries[name]
    data = stored(folder, entry)
    types = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
    if entry.dtype in types:
        return data.view(types[entry.dtype]).reshape(entry.shape)
    if entry.dtype == "F8_E8M0":
        return data.view(torch.float8_e8m0fnu).float().reshape(entry.shape)
    stem = name.removesuffix(".weight")
    scale = values(folder, entries, f"{stem}.{'scale' if f'{stem}.scale' in entries else 'weight_scale_inv'}")
    if entry.dtype == "F8_E4M3":
        codes = data.view(torch.float8_e4m3fn).float().reshape(entry.shape)
        rows, columns = entry.shape
        return codes * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    assert entry.dtype == "I8"
    nibbles = torch.stack([data & 15, data >> 4], dim=-1).reshape(entry.shape[0], -1).long()
    codes = torch.tensor(E2M1)[nibbles & 7] * (1 - 2 * (nibbles >> 3))
    return codes * scale.repeat_interleave(32, 1)


# A release


@pytest.mark.parametrize(
    ("model", "tensors", "nbytes"),
    [
        ("v4-flash-0731", 72_317, 166_878_536_440),
        ("v4-flash-dspark", 72_317, 166_878_536_440),
        ("v3.2", 92_425, 689_468_986_496),
        ("v3.2-exp", 92_425, 689_468_986_496),
    ],
)
def test_a_named_model_has_the_published_counts_and_bytes(model: str, tensors: int, nbytes: int) -> None:
    full = whole(model)
    assert (len(full.tensors), full.nbytes) == (tensors, nbytes)


def test_parts_of_v32_have_their_published_sizes() -> None:
    full = whole("v3.2")
    mtp = [spec for spec in full.tensors if spec.name.startswith("model.layers.61.")]
    size = sum(spec.nbytes for spec in mtp)
    assert (len(full.tensors) - len(mtp), len(mtp)) == (90_854, 1_571)
    assert (round((full.nbytes - size) / 1e7), round(size / 1e7)) == (67_403, 1_544)


def test_the_preview_has_its_published_size_and_no_copies_of_embedding_and_head() -> None:
    full = whole("v4-flash-preview")
    assert round(full.nbytes / 1e8) == 1596
    assert not [spec.name for spec in full.tensors if spec.copy_of]
    assert full.values["compress_ratios"] == [0, 0, *[4, 128] * 20, 4, 0]


def test_pro_has_61_layers_of_two_kinds() -> None:
    full = whole("v4-pro")
    assert full.config.layer_types[:4] == (HCA, HCA, CSA, HCA)
    assert (full.config.layer_types.count(HCA), full.config.layer_types.count(CSA)) == (31, 30)
    shapes = {spec.name: spec.shape for spec in full.tensors}
    assert shapes["layers.60.ffn.experts.383.w2.weight"] == (7168, 1536)
    assert shapes["layers.0.attn.wo_a.weight"] == (16 * 1024, 8 * 512)


@pytest.mark.parametrize("model", sorted(NAMED_MODELS))
def test_every_kind_of_tensor_has_the_dtype_of_the_release(model: str) -> None:
    table = V32_DTYPES if model.startswith("v3") else V4_DTYPES
    full = whole(model)
    layers = {0, 2, 3, 4, full.config.num_hidden_layers}
    for spec in full.tensors:
        number = re.match(r"(?:model\.)?layers\.(\d+)\.", spec.name)
        if (number and int(number[1]) not in layers) or re.search(r"experts\.([2-9]|\d\d+)\.", spec.name):
            continue
        assert [dtype for pattern, dtype in table.items() if re.fullmatch(pattern, spec.name)] == [spec.dtypes[0]], spec


def test_shards_are_of_about_five_gigabytes_and_wide_elements_come_first() -> None:
    tensors = whole("v4-flash-0731").tensors
    shards = split(tensors)
    sizes = [sum(spec.nbytes for spec in shard) for shard in shards]
    assert max(sizes) <= 5_000_000_000
    assert min(sizes[:-1]) > 4_900_000_000
    assert sorted(spec.name for shard in shards for spec in shard) == sorted(spec.name for spec in tensors)
    widths = {"I64": 8, "F32": 4, "BF16": 2}
    for shard in shards:
        order = [widths.get(spec.dtypes[0], 1) for spec in shard]
        assert order == sorted(order, reverse=True)


# Scaled and cut


@pytest.mark.parametrize("scale", [0.001, 0.03, 0.0625, 0.13, 0.37])
@pytest.mark.parametrize("model", DISTINCT)
def test_a_scaled_model_parses_and_has_every_kind_of_layer(model: str, scale: float) -> None:
    full, small = whole(model), variant(NAMED_MODELS[model], scale=scale)
    assert set(small.config.layer_kinds) == set(full.config.layer_kinds)
    assert small.nbytes < full.nbytes
    assert {generic(spec) for spec in small.tensors} == {generic(spec) for spec in full.tensors}
    for spec in small.tensors:
        assert 0 not in spec.shape, spec
    weights = {spec.name: spec for spec in small.tensors}
    for name, spec in weights.items():
        if spec.dtypes[0] == "I8":
            assert weights[name.replace(".weight", ".scale")].shape[1] * 16 == spec.shape[1], "whole groups of 32"


def generic(spec: TensorSpec) -> str:
    """The name without layer, stage and expert; V3.2's MTP layer and its last layer may look alike."""
    return re.sub(r"\.\d+", "", spec.name)


def test_a_slice_keeps_the_kinds_of_its_layers_at_full_width() -> None:
    full = whole("v4-flash-0731")
    cut = variant(NAMED_MODELS["v4-flash-0731"], layers=[0, 2, 3, 42])
    assert cut.config.layer_types == (SLIDING, CSA, HCA, CSA)
    assert (cut.config.num_hash_layers, cut.config.dspark.target_layer_ids) == (2, (1, 2, 3))
    shapes = {spec.name: spec.shape for spec in full.tensors}
    for spec in cut.tensors:
        match = re.fullmatch(r"layers\.(\d)\.(.*)", spec.name)
        name = f"layers.{[0, 2, 3, 42][int(match[1])]}.{match[2]}" if match else spec.name
        assert spec.shape == shapes[name]


def test_a_slice_of_two_layers_has_a_stage_for_each() -> None:
    cut = variant(NAMED_MODELS["v4-flash-0731"], layers=[3, 4])
    assert cut.config.dspark.stages == 2
    assert cut.values["compress_ratios"] == [128, 4, 0, 0]


def test_a_slice_of_v32_keeps_dense_layers_dense() -> None:
    cut = variant(NAMED_MODELS["v3.2"], layers=[1, 2, 60])
    assert cut.config.layer_kinds == ("dense", "dense", "experts")
    assert any(spec.name == "model.layers.3.eh_proj.weight" for spec in cut.tensors)


@pytest.mark.parametrize("model", sorted(NAMED_MODELS))
def test_without_draft_neither_config_nor_files_speak_of_one(model: str) -> None:
    plain = variant(NAMED_MODELS[model], scale=0.01, draft=False)
    assert plain.config.num_nextn_predict_layers == 0
    assert not [name for name in plain.values if name.startswith("dspark")]
    beyond = f"model.layers.{plain.config.num_hidden_layers}."
    assert not [spec.name for spec in plain.tensors if spec.name.startswith(("mtp.", beyond))]


@pytest.mark.parametrize(("dtype", "wide"), [("bf16", {"BF16", "F32"}), ("f32", {"F32"})])
def test_plain_dtypes_have_no_scales_and_no_quantisation_fields(dtype: str, wide: set[str]) -> None:
    for model in NAMED_MODELS:
        plain = variant(NAMED_MODELS[model], scale=0.01, dtype=dtype)
        assert {spec.dtypes[0] for spec in plain.tensors} - {"I64"} == wide
        assert not {"quantization_config", "expert_dtype"} & plain.values.keys()
        assert not [spec.name for spec in plain.tensors if re.search(r"\.(scale|weight_scale_inv)$", spec.name)]


# Weights


@pytest.fixture(scope="module", params=["v4-flash-0731", "v3.2"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("small") / request.param, "--scale", "0.06", model=request.param)


def test_every_value_is_finite_when_dequantised_and_rows_keep_unit_variance(small: Path) -> None:
    entries = read_entries(small)
    variances: dict[str, list[float]] = {"F8_E4M3": [], "I8": []}
    for name, entry in entries.items():
        if entry.dtype == "I64":
            continue
        found = values(small, entries, name).double()
        assert bool(found.isfinite().all()), name
        if entry.dtype in variances:
            variances[entry.dtype].append(float(found.square().sum(dim=1).mean()))
        if name.endswith("norm.weight"):
            assert float((found - 1).abs().max()) < 0.6
        if name.endswith(("gate.bias", "e_score_correction_bias")):
            assert float(found.abs().max()) < 0.1
    assert bool(variances["I8"]) == small.name.startswith("v4")
    for found in filter(None, variances.values()):
        assert statistics.mean(found) == pytest.approx(1, abs=0.1)


def test_scales_differ_from_block_to_block_and_are_powers_of_two(small: Path) -> None:
    entries = read_entries(small)
    scales = [n for n, e in entries.items() if n.endswith((".scale", ".weight_scale_inv")) and math.prod(e.shape) > 15]
    assert len(scales) > 2
    for name in scales:
        exponents = values(small, entries, name).log2()
        assert torch.equal(exponents, exponents.round())
        assert 2 <= len(exponents.unique()) <= 3, name


def test_a_full_row_of_codes_is_close_to_normal() -> None:
    weight = TensorSpec("layers.0.ffn.experts.0.w1.weight", (64, 4096), ("F8_E4M3",))
    data = bytearray(b"".join(tensor_pieces(weight, weight, 256, 0)))
    codes = torch.frombuffer(data, dtype=torch.float8_e4m3fn).double()
    kurtosis = float(codes.pow(4).mean() / codes.square().mean() ** 2)
    assert 2.7 < kurtosis < 3.2, "3 for a normal distribution, 1.8 for a uniform one"
    assert 16 <= float(codes.std()) < 32


def test_ids_of_a_routing_table_are_distinct_experts(tmp_path: Path) -> None:
    folder = made(tmp_path / "toy", "--scale", "0.03")
    entries, experts = read_entries(folder), json.loads((folder / "config.json").read_text())["n_routed_experts"]
    for layer in range(3):
        ids = values(folder, entries, f"layers.{layer}.ffn.gate.tid2eid")
        assert 0 <= int(ids.min()) <= int(ids.max()) < experts
        assert bool((ids.sort(dim=1).values.diff(dim=1) > 0).all())
        assert len(ids.unique()) == experts


def test_the_draft_copies_of_embedding_and_head_are_equal_to_the_target(tmp_path: Path) -> None:
    folder = made(tmp_path / "toy", "--scale", "0.01", model="v3.2")
    entries = read_entries(folder)
    last = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    for copy, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        mine, theirs = entries[f"model.layers.{last}.{copy}.weight"], entries[f"{original}.weight"]
        assert torch.equal(stored(folder, mine), stored(folder, theirs))


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_same_seed_gives_the_same_folder_and_another_seed_other_weights(tmp_path: Path) -> None:
    first = hashes(made(tmp_path / "a", "--scale", "0.02", "--seed", "7"))
    assert first == hashes(made(tmp_path / "b", "--scale", "0.02", "--seed", "7"))
    other = hashes(made(tmp_path / "c", "--scale", "0.02", "--seed", "8"))
    assert [name for name in first if first[name] == other[name]] == ["config.json", INDEX]


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("F8_E4M3", (300, 4000), "2a48c79cd980e628"),
        ("I8", (300, 4000), "c84acd52e6adeb55"),
        ("BF16", (300, 4000), "751ad613cad63919"),
        ("F32", (300, 4000), "209c8def35db2b30"),
        ("I64", (300, 6), "e55f0c0517cc4fe1"),
    ],
)
def test_values_of_a_seed_are_the_same_on_every_machine(dtype: str, shape: tuple[int, int], expected: str) -> None:
    """Known answers, of tensors longer than one piece."""
    spec = TensorSpec("layers.0.ffn.gate.weight", shape, (dtype,))
    assert hashlib.sha256(b"".join(tensor_pieces(spec, spec, 256, 3))).hexdigest()[:16] == expected


# The folder


def test_the_index_names_every_tensor_and_the_total(small: Path) -> None:
    index = json.loads((small / INDEX).read_text())
    entries = read_entries(small)
    assert index["weight_map"] == {name: entry.file for name, entry in entries.items()}
    assert index["metadata"]["total_size"] == sum(entry.nbytes for entry in entries.values())
    assert len(set(index["weight_map"].values())) >= 2


def test_sparse_shards_have_their_size_and_take_almost_no_disk(tmp_path: Path) -> None:
    folder = made(tmp_path / "full", "--sparse", "--layers", "0,2,3", "--no-draft")
    shards = sorted(folder.glob("*.safetensors"))
    header = sum(8 + int.from_bytes(path.open("rb").read(8), "little") for path in shards)
    assert sum(path.stat().st_size for path in shards) == header + 12_849_194_780
    assert sum(path.stat().st_blocks * 512 for path in shards) < header + 65536 * len(shards)


def test_a_run_that_is_killed_leaves_nothing_that_looks_whole_and_a_second_one_completes(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    options = ["make-checkpoint", "--model", "v4-flash-0731", "--scale", "0.25", "--layers", "0,2,3", "-o", str(folder)]
    run = subprocess.Popen([sys.executable, "-m", "twostroke", *options])
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.rglob("*.safetensors")):
            assert run.poll() is None, "the run ended before it wrote a shard"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert not folder.exists()
    assert not list(tmp_path.rglob(INDEX))
    assert main([*options, "--sparse"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]
    read_entries(folder)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--scale", "0"], "--scale is 0.0; expected a number above 0, at most 1"),
        (["--scale", "nan"], "--scale is nan"),
        (["--layers", "3,2"], "--layers is 3,2; expected ascending layers of the release, 0 to 42"),
        (["--layers", "43"], "0 to 42, each once"),
        (["--layers", "two"], "'two' is no list of layers"),
        (["--sparse", "--seed", "1"], "--seed 1 contradicts --sparse"),
        (["--seed", "-1"], "--seed is -1; expected 0 or more"),
        (["--model", "v4-flash"], "invalid choice: 'v4-flash'"),
    ],
)
def test_what_cannot_be_made_is_one_line_and_nothing_is_written(
    tmp_path: Path, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["make-checkpoint", "--model", "v4-flash-0731", "-o", str(tmp_path / "out"), *options]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("here")
    assert main(["make-checkpoint", "--model", "v3.2", "--scale", "0.01", "-o", str(tmp_path)]) == 2
    assert "already exists and is not empty: choose another -o" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_disk_that_is_too_small_is_known_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    full = whole("v4-pro")
    if free > full.nbytes:
        pytest.skip(f"this disk has room for {full.nbytes:,} bytes")
    assert main(["make-checkpoint", "--model", "v4-pro", "-o", str(tmp_path / "out")]) == 2
    assert f"needs {full.nbytes:,} bytes and {tmp_path} has" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_only_the_last_layers_are_tapped() -> None:
    small = variant(NAMED_MODELS["v4-flash-0731"], scale=0.3)
    assert small.config.dspark.target_layer_ids == (10, 11, 12)
    assert small.config.dspark.noise_token_id < small.config.vocab_size


def test_scale_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--scale is 1\.5"):
        variant(NAMED_MODELS["v3.2"], scale=1.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "draft"), [("v4-flash-0731", "dspark"), ("v4-flash-preview", "mtp"), ("v3.2", "mtp")]
)
def test_a_scaled_plain_model_builds_and_generates(
    tmp_path: Path, model: str, draft: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = made(tmp_path / "checkpoint", "--scale", "0.01", "--dtype", "bf16", model=model)
    engine = tmp_path / "engine"
    assert main(["build", str(checkpoint), "-o", str(engine), "--max-seq-len", "256"]) == 0
    assert read_manifest(engine).speculative.method == draft
    command: list[Any] = ["generate", engine, "--prompt-ids", "5,6,7,8", "--max-tokens", "8", "--ignore-eos"]
    capsys.readouterr()
    assert main([str(part) for part in command]) == 0
    assert capsys.readouterr().out.strip()
