"""A damaged folder is refused as a whole, with every finding, before a weight is used."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from twostroke.builder.checkpoint import INDEX, SINGLE, Checkpoint
from twostroke.builder.inventory import inventory, target_inventory
from twostroke.engines.errors import CheckpointError
from twostroke.tests.checkpoints import F4, F4_FP8, F4_PLAIN, TINY8, random_weights, write_checkpoint

FIRST, LAST = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "toy", F4)


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert caught.value.problems or "\n" not in str(caught.value)
    return caught.value


def check_refusal(folder: Path, **kwargs: Any) -> CheckpointError:
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check(inventory(checkpoint.config, **kwargs))
    return caught.value


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def shard_bytes(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: Any, end: Any, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


# A sound folder


def test_toys_are_written_in_well_under_a_second(tmp_path: Path) -> None:
    start = time.perf_counter()
    write_checkpoint(tmp_path, F4)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("config", [F4, F4_PLAIN, TINY8])
@pytest.mark.parametrize(("dtype", "shards"), [("float32", 2), ("bfloat16", 1), ("bfloat16", 3)])
def test_every_tensor_reads_back_as_written(tmp_path: Path, config: Any, dtype: str, shards: int) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, config, dtype=dtype, shards=shards))
    checkpoint.check(inventory(checkpoint.config))
    written = random_weights(checkpoint.config, dtype=dtype)
    assert checkpoint.entries.keys() == written.keys()
    for name, tensor in written.items():
        found = checkpoint.read(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor), name
    checkpoint.assert_all_consumed()


def test_bfloat16_toy_keeps_the_dtypes_of_the_release(tmp_path: Path) -> None:
    entries = Checkpoint.open(write_checkpoint(tmp_path, F4, dtype="bfloat16")).entries
    assert entries["embed.weight"].dtype == entries["layers.2.attn.compressor.wkv.weight"].dtype == "BF16"
    for name in ("hc_head_fn", "layers.0.attn.attn_sink", "layers.2.attn.compressor.ape", "layers.1.ffn.gate.bias"):
        assert entries[name].dtype == "F32"
    assert entries["layers.0.ffn.gate.tid2eid"].dtype == "I64"


def test_what_is_read_is_memory_of_its_own(folder: Path) -> None:
    before = (folder / LAST).read_bytes()
    checkpoint = Checkpoint.open(folder)
    name = next(name for name, place in checkpoint.entries.items() if place.file == LAST)
    checkpoint.read(name).zero_()
    assert (folder / LAST).read_bytes() == before
    assert checkpoint.read(name).abs().sum() > 0


def test_a_tensor_in_pieces_is_its_bytes_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces are cut where the buffer is full, the last one is short."""
    monkeypatch.setattr("twostroke.builder.checkpoint.PIECE", 5000)
    checkpoint = Checkpoint.open(folder)
    place = checkpoint.entries["embed.weight"]
    pieces = [bytes(piece) for piece in checkpoint.pieces("embed.weight")]
    assert [len(piece) for piece in pieces] == [5000] * (place.nbytes // 5000) + [place.nbytes % 5000]
    whole = (folder / place.file).read_bytes()
    assert b"".join(pieces) == whole[place.offset : place.offset + place.nbytes]
    assert checkpoint.consumed == {"embed.weight"}
    values = torch.cat([piece.clone() for piece in checkpoint.values("embed.weight")])
    assert torch.equal(values, checkpoint.read("embed.weight").flatten())


def test_tensor_not_aligned_to_its_dtype_is_read_correctly(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, F4, shards=1)
    values = torch.arange(4, dtype=torch.float32)
    header = json.dumps({"a": entry(0, 1, [1], "BOOL"), "b": entry(1, 17)}).encode()
    (folder / SINGLE).write_bytes(shard_bytes(header + b" " * (-len(header) % 8), b"\x01" + values.numpy().tobytes()))
    checkpoint = Checkpoint.open(folder)
    assert torch.equal(checkpoint.read("b"), values)
    assert checkpoint.read("a").tolist() == [True]


def test_empty_and_scalar_tensors_are_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, F4, shards=1)
    save_file({"none": torch.zeros(0, 3), "one": torch.tensor(2.5)}, folder / SINGLE)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.read("none").shape == (0, 3)
    assert checkpoint.read("one").item() == 2.5


def test_shards_behind_links_are_read(folder: Path, tmp_path: Path) -> None:
    for name in (FIRST, LAST):  # as the hub's cache stores them
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    Checkpoint.open(folder).read("norm.weight")


# The ledger: C-06


def test_ledger_names_the_head_nobody_read(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    for name in checkpoint.entries:
        if "confidence_head" not in name:
            checkpoint.read(name)
    assert checkpoint.unconsumed() == ("mtp.2.confidence_head.proj.weight",)
    with pytest.raises(CheckpointError, match=r"read by nobody: mtp\.2\.confidence_head\.proj\.weight"):
        checkpoint.assert_all_consumed()
    assert checkpoint.skip("mtp.2.confidence_head.") == ("mtp.2.confidence_head.proj.weight",)
    checkpoint.assert_all_consumed()


def test_drafter_left_out_on_purpose_is_not_unknown(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match=r"unknown tensor mtp\.0"):
        checkpoint.check(target_inventory(checkpoint.config))
    skipped = checkpoint.skip("mtp.")
    assert len(skipped) == len(checkpoint.entries) - len(target_inventory(checkpoint.config))
    checkpoint.check(target_inventory(checkpoint.config))


def test_reading_an_unknown_tensor_is_refused_and_not_counted(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match="has no tensor lm_head"):
        checkpoint.read("lm_head")
    assert not checkpoint.consumed


# Truncation: C-10


@pytest.mark.parametrize("cut", ["1", "100", "half", "all", "all but 4", "all but 8"])
@pytest.mark.parametrize("shards", [1, 2])
def test_truncated_shard_is_refused_with_expected_and_actual_size(tmp_path: Path, cut: str, shards: int) -> None:
    write_checkpoint(tmp_path, F4, shards=shards)
    path = tmp_path / (SINGLE if shards == 1 else LAST)
    size = path.stat().st_size
    left = {"1": size - 1, "100": size - 100, "half": size // 2, "all": 0, "all but 4": 4, "all but 8": 8}[cut]
    os.truncate(path, left)
    error = refusal(tmp_path)
    assert len(error.problems) == 1
    assert f"shard {path.name} is truncated: expected" in error.problems[0]
    assert f"actual size {left} bytes" in error.problems[0]
    if left > size // 3:
        assert f"expected {size} bytes" in error.problems[0]


def test_shard_cut_after_opening_is_refused_at_the_first_read(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    size = (folder / LAST).stat().st_size
    os.truncate(folder / LAST, size - 1)
    with pytest.raises(
        CheckpointError, match=f"changed since it was opened: it had {size} bytes and has {size - 1} now"
    ):
        checkpoint.read(next(name for name, place in checkpoint.entries.items() if place.file == LAST))


# Index against shards: C-11


def test_tensor_moved_to_another_shard_is_refused_by_name(folder: Path) -> None:
    edit_index(folder, lambda weight_map: weight_map.update({"embed.weight": LAST}))
    (problem,) = refusal(folder).problems
    assert problem == f"{INDEX} says tensor embed.weight is in {LAST}, which lacks it; it is in {FIRST}"


def test_tensor_in_two_shards_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, F4, edit=lambda tensors: tensors.update(zz=tensors["embed.weight"].clone()))
    data = (folder / LAST).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"zz"', b'"embed.weight"')
    (folder / LAST).write_bytes(shard_bytes(header, data[8 + length :]))
    edit_index(folder, lambda weight_map: weight_map.pop("zz"))
    assert refusal(folder).problems == (f"tensor embed.weight is in more than one shard: {FIRST}, {LAST}",)


def test_trailing_bytes_are_refused(folder: Path) -> None:
    with (folder / FIRST).open("ab") as stream:
        stream.write(b"\0" * 16)
    (problem,) = refusal(folder).problems
    assert f"shard {FIRST} has 16 trailing bytes" in problem


def test_shard_beside_a_single_file_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, F4, shards=1)
    save_file({"x": torch.ones(1)}, folder / "adapter.safetensors")
    (problem,) = refusal(folder).problems
    assert "adapter.safetensors lies in the folder" in problem


def test_every_finding_is_reported_in_one_pass(folder: Path) -> None:
    os.truncate(folder / LAST, 100)
    (folder / "stray.safetensors").write_bytes(b"")

    def edit(weight_map: dict[str, Any]) -> None:
        weight_map["ghost"] = FIRST
        weight_map["lost"] = "model-00003.safetensors"
        weight_map["thief"] = "../other.safetensors"
        del weight_map["embed.weight"]

    edit_index(folder, edit)
    problems = refusal(folder).problems
    for piece in (
        f"shard {LAST} is truncated",
        "stray.safetensors lies in the folder",
        f"ghost is in {FIRST}, which lacks it; no shard has it",
        "shard model-00003.safetensors is missing",
        "thief is in '../other.safetensors'; expected the name of a shard inside the folder",
        f"embed.weight is in {FIRST}, but {INDEX} does not name it",
    ):
        assert len([problem for problem in problems if piece in problem]) == 1, piece
    assert len(problems) == 6


@pytest.mark.parametrize("file", ["/etc/passwd", "../a", "a/../../b", "", ".", "./a", "a\\b", "a\0", 5, None, ["a"]])
def test_index_cannot_lead_out_of_the_folder(folder: Path, file: Any) -> None:
    edit_index(folder, lambda weight_map: weight_map.update({"norm.weight": file}))
    assert any("inside the folder" in problem for problem in refusal(folder).problems)


@pytest.mark.parametrize("file", ["x" * 5000, "\ud800.safetensors", "a\nb", "sub/none.safetensors"])
def test_impossible_shard_names_are_findings_not_crashes(folder: Path, file: str) -> None:
    edit_index(folder, lambda weight_map: weight_map.update({"extra": file}))
    (problem,) = refusal(folder).problems
    assert "is missing" in problem or "cannot be read" in problem
    problem.encode()
    assert len(problem) < 800


@pytest.mark.parametrize("index", [b"", b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b"[" * 99999])
def test_index_that_is_no_index_is_refused(folder: Path, index: bytes) -> None:
    (folder / INDEX).write_bytes(index)
    assert INDEX in str(refusal(folder))


def test_duplicate_key_in_the_index_is_refused(folder: Path) -> None:
    text = (folder / INDEX).read_text().replace('"norm.weight"', '"embed.weight"')
    (folder / INDEX).write_text(text)
    assert "'embed.weight' occurs more than once" in str(refusal(folder))


def test_folder_without_safetensors_is_refused(folder: Path) -> None:
    (folder / INDEX).unlink()
    assert f"neither {INDEX} nor {SINGLE}; found {FIRST}, {LAST}" in str(refusal(folder))
    (folder / FIRST).unlink()
    (folder / LAST).unlink()
    assert "no safetensors file is there" in str(refusal(folder))


def test_shard_that_is_no_file_is_refused(folder: Path) -> None:
    (folder / LAST).unlink()
    (folder / LAST).mkdir()
    assert f"shard {LAST} is not a regular file" in str(refusal(folder))
    (folder / LAST).rmdir()
    os.mkfifo(folder / LAST)
    assert f"shard {LAST} is not a regular file" in str(refusal(folder))
    (folder / LAST).unlink()
    (folder / LAST).symlink_to(LAST)
    assert f"shard {LAST} is missing" in str(refusal(folder))


# Headers


@pytest.mark.parametrize(
    ("shard", "says"),
    [
        (b"\xff" * 64, "it is not a safetensors file"),
        (shard_bytes(b""), "is empty"),
        (shard_bytes(b"{"), "is not JSON"),
        (shard_bytes([1]), "expected a JSON object"),
        (shard_bytes(b'{"a":' * 100_000), "too deeply"),
        (shard_bytes(b'{"a": 1, "a": 2}'), "'a' occurs more than once"),
        (shard_bytes({"a": 1}), "expected dtype, shape and data_offsets"),
        (shard_bytes({"a": {**entry(0, 4), "extra": 1}}, b"0000"), "expected dtype, shape and data_offsets"),
        (shard_bytes({"a": entry(0, 4, dtype="F3")}, b"0000"), "dtype 'F3'; accepted: "),
        (shard_bytes({"a": entry(0, 4, dtype=["F32"])}, b"0000"), "dtype ['F32']; accepted: "),
        (shard_bytes({"a": entry(0, 4, [-1])}, b"0000"), "shape [-1]"),
        (shard_bytes({"a": entry(0, 4, [True])}, b"0000"), "shape [True]"),
        (shard_bytes({"a": entry(0, 4, [1] * 99)}, b"0000"), "at most 16 sizes"),
        (shard_bytes({"a": entry(0, 4, [2])}, b"0000"), "expected 8 bytes for F32 [2]"),
        (shard_bytes({"a": entry(0, 4, [10**14, 10**14])}, b"0000"), "bytes for F32"),
        (shard_bytes({"a": entry(-4, 0)}, b"0000"), "data_offsets [-4, 0]"),
        (shard_bytes({"a": entry(4, 0, [1])}, b"0000"), "data_offsets [4, 0]"),
        (shard_bytes({"a": entry(0.0, 4.0, [1])}, b"0000"), "expected [begin, end]"),
        (shard_bytes({"a": entry(0, 8), "b": entry(4, 12)}, b"0" * 12), "tensor b overlaps a"),
        (shard_bytes({"a": entry(0, 12), "b": entry(4, 8)}, b"0" * 12), "tensor b overlaps a"),
        (shard_bytes({"a": entry(0, 4), "b": entry(8, 12)}, b"0" * 12), "tensor b leaves a gap after a"),
        (shard_bytes({"a": entry(4, 8)}, b"0" * 8), "tensor a leaves a gap after the header"),
        (shard_bytes({"a": entry(0, 1 << 40)}, b"0" * 8), "is truncated"),
    ],
)
def test_damaged_header_is_a_finding_with_shard_and_tensor(tmp_path: Path, shard: bytes, says: str) -> None:
    folder = write_checkpoint(tmp_path, F4, shards=1)
    (folder / SINGLE).write_bytes(shard)
    message = str(refusal(folder))
    assert says in message
    assert SINGLE in message
    assert len(message) < 1000


# Against the inventory


def test_all_differences_from_the_inventory_come_in_one_error(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["layers.0.attn.attn_sink"]
        tensors["layers.9.surprise"] = torch.zeros(2)
        tensors["embed.weight"] = tensors["embed.weight"].T.contiguous()
        tensors["norm.weight"] = tensors["norm.weight"].half()

    assert check_refusal(write_checkpoint(tmp_path, F4, edit=edit)).problems == (
        "missing tensor layers.0.attn.attn_sink [4]",
        "unknown tensor layers.9.surprise, which nothing would read",
        "tensor embed.weight has shape [64, 320]; expected [320, 64]",
        "tensor norm.weight has dtype F16; accepted: BF16, F32",
    )


def test_long_lists_are_cut_in_the_message_and_whole_in_problems(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, F4, shards=1)
    save_file({"x": torch.ones(1)}, tmp_path / SINGLE)
    error = check_refusal(tmp_path)
    expected = len(inventory(Checkpoint.open(tmp_path).config)) + 1
    assert len(error.problems) == expected
    assert str(error).endswith(f"; and {expected - 20} more")


def quantise(tensors: dict[str, torch.Tensor]) -> None:
    for name in ("layers.0.attn.wq_a", "layers.0.ffn.experts.0.w1"):
        weight = tensors[f"{name}.weight"]
        packed = torch.zeros(weight.shape[0], weight.shape[1] // 2, dtype=torch.int8)
        tensors[f"{name}.weight"] = packed if "experts" in name else weight.to(torch.float8_e4m3fn)
        tensors[f"{name}.scale"] = torch.ones(1, 1).to(torch.float8_e8m0fnu)


def test_quantised_weights_that_the_config_does_not_announce_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, F4, edit=quantise)
    advice = "the config has no quantization_config; restore it, or convert the folder to bf16"
    assert check_refusal(folder).problems == (
        f"FP8 tensor layers.0.attn.wq_a.weight: {advice}",
        f"packed FP4 tensor layers.0.ffn.experts.0.w1.weight: {advice}",
    ), "their scales are not reported beside them"


def test_tensors_that_a_quantised_checkpoint_keeps_in_another_dtype_are_named(tmp_path: Path) -> None:
    """A weight that was dequantised, a scale of the other family's dtype, a scale of another block size."""

    def mix(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.attn.wq_b.weight"] = tensors["layers.0.attn.wq_b.weight"].to(torch.bfloat16)
        tensors["layers.0.attn.wkv.scale"] = torch.ones(1, 2, dtype=torch.bfloat16)
        tensors["layers.1.attn.wo_b.scale"] = torch.ones(4, 4).to(torch.float8_e8m0fnu)
        del tensors["layers.2.ffn.experts.3.w2.scale"]

    assert set(check_refusal(write_checkpoint(tmp_path, F4_FP8, edit=mix)).problems) == {
        "tensor layers.0.attn.wq_b.weight has dtype BF16; accepted: F8_E4M3",
        "tensor layers.0.attn.wkv.scale has dtype BF16; accepted: F8_E8M0, U8, F32",
        "tensor layers.1.attn.wo_b.scale has shape [4, 4]; expected [2, 2]",
        "packed FP4 tensor layers.2.ffn.experts.3.w2.weight has no scale: there is no layers.2.ffn.experts.3.w2 with "
        "suffix .scale, .weight_scale_inv, .weight_scale",
    }


def test_codes_are_read_as_bytes(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, F4_FP8))
    for name, entry in checkpoint.entries.items():
        if entry.dtype in ("F8_E4M3", "F8_E8M0", "I8"):
            assert checkpoint.read(name).dtype == torch.uint8


# The toys themselves


def test_changed_config_keeps_the_weights_it_does_not_reshape(tmp_path: Path) -> None:
    one = Checkpoint.open(write_checkpoint(tmp_path / "one", F4))
    two = Checkpoint.open(write_checkpoint(tmp_path / "two", F4, sliding_window=6, num_hidden_layers=6, index_topk=2))
    assert two.config.sliding_window == 6
    assert all(torch.equal(one.read(name), two.read(name)) for name in one.entries)
    other = Checkpoint.open(write_checkpoint(tmp_path / "three", F4, seed=1))
    assert not torch.equal(one.read("embed.weight"), other.read("embed.weight"))


def test_hash_table_sends_each_token_to_distinct_experts(folder: Path) -> None:
    table = Checkpoint.open(folder).read("layers.0.ffn.gate.tid2eid")
    assert int(table.min()) == 0
    assert int(table.max()) == 3
    assert bool((table[:, 0] != table[:, 1]).all())
