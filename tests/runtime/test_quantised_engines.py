"""Engines over FP8 and FP4 weights as released: answers of the network that dequantises first, from stored bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file

from twostroke.builder.demo import whole_sequence
from twostroke.engines.loading import LoadedEngine, load_engine_directory
from twostroke.engines.manifest import WeightsIndex, read_weights_index
from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.scheduler import Scheduler
from twostroke.tests.builder.deepseek_v32_reference import Network
from twostroke.tests.builder.flat_runs import Chunk, Memory, forward
from twostroke.tests.checkpoints import F4_FP8, FP4_VALUES, T32_FP8
from twostroke.tests.engines import engine_directory
from twostroke.tests.runtime.serving import greedy, serve

RELEASES = {"v4-dspark": (F4_FP8, {}), "v32-mtp": (T32_FP8, {"max_draft_len": 3})}


@pytest.fixture(scope="module", params=list(RELEASES))
def engine(request: pytest.FixtureRequest) -> LoadedEngine:
    config, options = RELEASES[request.param]
    return load_engine_directory(engine_directory(config, **options))


@pytest.fixture(scope="module")
def index(engine: LoadedEngine) -> WeightsIndex:
    return read_weights_index(engine.folder)


def dequantised(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a quantised checkpoint in fp32, by torch's own number formats."""
    stored = {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}
    found = {}
    for name, value in stored.items():
        stem = name.removesuffix(".weight")
        scale = stored.get(f"{stem}.scale", stored.get(f"{stem}.weight_scale_inv"))
        if name.endswith(("scale", "scale_inv")) and f"{name.rpartition('.')[0]}.weight" in stored:
            continue
        if value.dtype == torch.float8_e4m3fn:
            assert scale is not None
            blocks = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            found[name] = value.float() * blocks[: value.shape[0], : value.shape[1]]
        elif value.dtype == torch.int8:
            assert scale is not None
            codes = value.view(torch.uint8).long()
            both = torch.stack([codes % 16, codes // 16], dim=2).reshape(codes.shape[0], -1)
            signed = FP4_VALUES[both % 8] * (1 - 2 * (both // 8))
            found[name] = signed * scale.float().repeat_interleave(32, 1)
        else:
            found[name] = value.float() if value.is_floating_point() else value
    return found


def logits_of(raw: Mapping[str, Any], weights: Mapping[str, torch.Tensor], tokens: list[int]) -> np.ndarray:
    """Logits [L, V] of a whole sequence by the family's reference."""
    if raw["model_type"] == "deepseek_v32":
        return Network(dict(raw), {name: value.numpy() for name, value in weights.items()}).target(tokens).logits
    with torch.no_grad():
        found = whole_sequence.target(SimpleNamespace(**raw), dict(weights), torch.tensor([tokens]))
    return found.logits[0].numpy()


def test_logits_are_those_of_the_network_that_dequantises_first(engine: LoadedEngine) -> None:
    """To 1e-5 of their scale, prefilled whole and token by token."""
    folder = engine.folder.parent / "checkpoint"
    raw, weights = json.loads((folder / "config.json").read_text()), dequantised(folder)
    tokens = np.random.default_rng(1).integers(2, 318, size=40).tolist()
    expected = logits_of(raw, weights, tokens)
    memory = Memory(engine.manifest.state, slots=3, pages_per_slot=2)
    whole = forward(engine.engines["target"], memory, [Chunk(1, 0, tokens)])[0]["logits"]
    single = [forward(engine.engines["target"], memory, [Chunk(2, i, [t])])[0]["logits"] for i, t in enumerate(tokens)]
    for found in (whole, np.concatenate(single)):
        np.testing.assert_allclose(found, expected, atol=1e-5 * float(np.abs(expected).max()), rtol=0)
    assert expected.argmax(1).tolist() == whole.argmax(1).tolist()


def test_speculation_over_codes_says_what_plain_decoding_says(engine: LoadedEngine) -> None:
    prompts = [np.random.default_rng(n).integers(2, 318, size=5 + 7 * n).tolist() for n in range(4)]
    requests = [Request(str(n), tuple(prompt), greedy(40)) for n, prompt in enumerate(prompts)]
    depth = engine.manifest.speculative.draft_len
    answers = [
        {name: answer.tokens for name, answer in serve(Scheduler(engine, config, poison=True), requests).items()}
        for config in (RuntimeConfig(max_batch_size=3, draft_length=length) for length in (0, depth))
    ]
    assert depth > 0
    assert answers[0] == answers[1]
    assert len({token for tokens in answers[0].values() for token in tokens}) > 10


def test_bytes_usable_as_stored_stay_in_the_shards_and_only_banks_and_small_tables_are_written(
    engine: LoadedEngine, index: WeightsIndex
) -> None:
    stored = {name: record for name, record in index.weights.items() if record.transform == "as stored"}
    written = {name: record for name, record in index.weights.items() if name not in stored}
    assert {record.dtype for record in stored.values()} >= {"uint8", "bfloat16", "float32"}
    assert all(Path(record.file).is_absolute() for record in stored.values())
    assert {record.transform for name, record in written.items() if ".experts." in name} == {"stack"}
    converted = [name for name in written if ".experts." not in name]
    assert all(name.endswith(("norm.weight", "gate.weight", "tid2eid", "k_norm.bias")) for name in converted), converted


def test_no_weight_is_part_of_a_graph(engine: LoadedEngine) -> None:
    """Nothing that could be folded or copied: what is constant in a graph are tables of a few hundred numbers."""
    for step in engine.manifest.steps.values():
        graph = onnx.load(engine.folder / step.file).graph
        constants = [attribute.t for node in graph.node for attribute in node.attribute if attribute.name == "value"]
        largest = max((int(np.prod(t.dims)) for t in (*graph.initializer, *constants)), default=0)
        assert largest <= 512
