"""Where the bytes of a weight are, and that they are the checkpoint's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from twostroke.builder.checkpoint import Checkpoint
from twostroke.builder.networks.deepseek_v4 import DeepseekV4
from twostroke.builder.networks.dspark import Observe, Propose
from twostroke.builder.weights import ALIGNMENT, WEIGHTS_BIN, collect, parameters_of, shard_record, weight_source
from twostroke.engines.loading import LoadedEngine, map_weights
from twostroke.engines.manifest import WeightsIndex, read_weights_index
from twostroke.engines.onnxruntime import OnnxRuntimeEngine
from twostroke.tests.checkpoints import F4, write_checkpoint


def collected(folder: Path, dtype: str, out: Path) -> tuple[Checkpoint, WeightsIndex]:
    checkpoint = Checkpoint.open(write_checkpoint(folder, F4, dtype=dtype))
    config = checkpoint.config
    assert config.dspark is not None
    modules = DeepseekV4(config, 5, 128, (3, 4, 5)), Observe(config, config.dspark), Propose(config, config.dspark)
    out.mkdir()
    return checkpoint, collect(checkpoint, parameters_of(modules), out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_is_the_checkpoints_value_to_the_bit(tmp_path: Path, dtype: str) -> None:
    """A bf16 checkpoint gives fp32 weights that are exactly the stored, rounded values."""
    checkpoint, index = collected(tmp_path / "checkpoint", dtype, tmp_path / "engine")
    mapped = map_weights(tmp_path / "engine", index)
    exact = Checkpoint.open(write_checkpoint(tmp_path / "exact", F4, dtype="float32")) if dtype == "bfloat16" else None
    rounded = 0
    for name, record in index.weights.items():
        source = weight_source(name, record.shape)
        parts = [checkpoint.read(n) for n in source.names]
        expected = torch.stack(parts) if source.stacked else parts[0]
        found = torch.from_numpy(np.array(mapped[name].owner))
        assert found.dtype == (torch.int32 if name.endswith("tid2eid") else torch.float32)
        assert torch.equal(found, expected.to(found.dtype)), name
        if exact is not None and parts[0].dtype == torch.bfloat16:
            original = [exact.read(n) for n in source.names]
            rounded += int(not torch.equal(found, torch.stack(original) if source.stacked else original[0]))
    assert rounded == 0 if exact is None else rounded > 50
    checkpoint.assert_all_consumed()


def test_bytes_usable_as_stored_stay_in_the_shard(tmp_path: Path) -> None:
    checkpoint, index = collected(tmp_path / "checkpoint", "float32", tmp_path / "engine")
    for name, record in index.weights.items():
        if record.transform == "as stored":
            entry = checkpoint.entries[name]
            assert record.file == str((checkpoint.folder / entry.file).resolve())
            assert (record.offset, record.bytes) == (entry.offset, entry.nbytes)
        else:
            assert record.file == WEIGHTS_BIN
            assert record.offset % ALIGNMENT == 0
    materialised = {name for name, record in index.weights.items() if record.file == WEIGHTS_BIN}
    stored = {name for name in index.weights if name not in materialised}
    assert all(".experts." in name or name.endswith("tid2eid") for name in materialised)
    assert {"embed.weight", "head.weight", "mtp.2.markov_head.markov_w1.weight"} <= stored
    assert set(index.shards) == {index.weights[name].file for name in stored}
    for shard, record in index.shards.items():
        assert record == shard_record(Path(shard))


def test_a_bf16_checkpoint_is_converted_once_and_only_where_needed(tmp_path: Path) -> None:
    checkpoint, index = collected(tmp_path / "checkpoint", "bfloat16", tmp_path / "engine")
    for name, record in index.weights.items():
        single = checkpoint.entries.get(name)
        as_stored = record.transform == "as stored"
        assert as_stored is (single is not None and single.dtype == "F32" and single.offset % 4 == 0), name
    regions = sorted((r.offset, r.bytes) for r in index.weights.values() if r.file == WEIGHTS_BIN)
    ends = [offset + size for offset, size in regions]
    assert all(end <= start for end, (start, _) in zip(ends, regions[1:], strict=False)), "no byte belongs to two"
    assert (tmp_path / "engine" / WEIGHTS_BIN).stat().st_size == ends[-1]
    assert ends[-1] < sum(size for _, size in regions) + ALIGNMENT * len(regions)


def test_a_weight_of_several_steps_is_there_once(f4_engine_dir: Path, f4_engine: LoadedEngine) -> None:
    """The draft's embedding and head are the target's; what observe reads, propose may read too."""
    index = read_weights_index(f4_engine_dir)
    steps = {
        name: {b.name for b in step.bindings if b.role == "weight"} for name, step in f4_engine.manifest.steps.items()
    }
    assert {"embed.weight", "head.weight"} <= steps["target"] & steps["propose"]
    assert set(index.weights) == set().union(*steps.values())
    regions = [(r.file, r.offset) for r in index.weights.values()]
    assert len(set(regions)) == len(regions)


def test_sessions_share_the_mapped_pages(f4_engine: LoadedEngine) -> None:
    """No copy: both steps read the embedding at one address, inside a mapping of the checkpoint's shard."""

    def address(step: str, weight: str) -> int:
        engine = f4_engine.engines[step]
        assert isinstance(engine, OnnxRuntimeEngine)
        pointer: int = engine._weights[weight].data_ptr()
        return pointer

    assert address("target", "embed.weight") == address("propose", "embed.weight")
    assert mapping_of(address("target", "embed.weight")).endswith(".safetensors")
    assert mapping_of(address("target", "layers.1.ffn.experts.w1.weight")).endswith(WEIGHTS_BIN)


def mapping_of(address: int) -> str:
    """The file mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            return line.split(maxsplit=5)[-1]
    return ""


@pytest.mark.parametrize(
    ("name", "shape", "sources"),
    [
        ("head.weight", (320, 64), ("head.weight",)),
        (
            "layers.3.ffn.experts.w2.weight",
            (2, 64, 32),
            ("layers.3.ffn.experts.0.w2.weight", "layers.3.ffn.experts.1.w2.weight"),
        ),
        ("layers.3.ffn.shared_experts.w1.weight", (32, 64), ("layers.3.ffn.shared_experts.w1.weight",)),
        ("mtp.2.markov_head.markov_w1.weight", (320, 8), ("mtp.2.markov_head.markov_w1.weight",)),
    ],
)
def test_only_routed_experts_are_stacked(name: str, shape: tuple[int, ...], sources: tuple[str, ...]) -> None:
    """ "w1" appears in the names of the shared expert and of the markov head too."""
    assert weight_source(name, shape).names == sources
    assert weight_source(name, shape).stacked is (len(sources) > 1)


PEAK = """
import resource, sys
from pathlib import Path
import torch
from twostroke.builder.checkpoint import Checkpoint, read_entries
from twostroke.builder.inventory import TensorSpec
from twostroke.builder.shared_tensors import own_tensors
from twostroke.builder.weights import collect

folder, out = map(Path, sys.argv[1:])
checkpoint = Checkpoint(folder, None, read_entries(folder))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
torch.zeros(1 << 20).to(torch.bfloat16).float()
before = peak()
parameters = {
    "a.experts.w1.weight": ((4, 1 << 15, 1 << 11), torch.float32),  # 1 GiB, stacked
    "codes.experts.w1.weight": ((4, 1 << 15, 1 << 11), torch.uint8),  # 256 MiB, stacked as they are
    "embed.weight": ((1 << 15, 1 << 12), torch.float32),  # 512 MiB of 256 converted
}
collect(checkpoint, parameters, out)
middle = peak()
own_tensors(checkpoint, [TensorSpec("copy.weight", (1 << 15, 1 << 12), ("BF16",), "embed.weight")])
print(middle - before, peak() - middle)
"""


def test_weights_of_any_size_are_written_and_compared_in_little_memory(tmp_path: Path) -> None:
    """1.8 GB are written and half a gigabyte compared with another half; the process grows by a few pieces."""
    entries, at = {}, 0
    tensors = {f"a.experts.{e}.w1.weight": ("F32", (1 << 15, 1 << 11), 4) for e in range(4)}
    tensors |= {f"codes.experts.{e}.w1.weight": ("F8_E4M3", (1 << 15, 1 << 11), 1) for e in range(4)}
    tensors |= {name: ("BF16", (1 << 15, 1 << 12), 2) for name in ("embed.weight", "copy.weight")}
    for name, (dtype, shape, itemsize) in tensors.items():
        end = at + math.prod(shape) * itemsize
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + at)  # holes
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", PEAK, str(tmp_path), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / WEIGHTS_BIN).stat().st_size == (1024 + 256 + 512) << 20
    grown, compared = map(int, result.stdout.split())
    assert grown < 160, f"writing took {grown} MiB"
    assert compared < 96, f"comparing took {compared} MiB"
