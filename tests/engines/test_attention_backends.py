"""Names of implementations: which an engine has, which exist elsewhere, which nobody knows, and what they verify."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from twostroke.builder.build import BuildOptions, build
from twostroke.engines import attention_backends
from twostroke.engines.attention_backends import (
    ENGINES,
    KNOWN,
    RENAMED,
    AttentionBackend,
    EngineChoices,
    Phase,
    backend_refusal,
    depth_refusal,
    kv_cache_refusal,
)
from twostroke.engines.errors import BuildError, ConfigError
from twostroke.engines.loading import COMPILERS, LoadedEngine
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.tests.checkpoints import F4_PREVIEW, write_checkpoint

# An implementation like the scoring kernels that were reported: two rows a request at most.
NARROW = EngineChoices((AttentionBackend("portable"), AttentionBackend("narrow", verify_rows=(1, 2))), ("float32",))


@pytest.mark.parametrize(
    ("phase", "name", "sentence"),
    [
        ("prefill", "portable", None),
        ("decode", "portable", None),
        ("prefill", "flashmla_sparse", "engine onnxruntime has portable for prefill, not flashmla_sparse"),
        ("decode", "trtllm", "engine onnxruntime has portable for decode, not trtllm"),
        (
            "decode",
            "flashmla_sparse_q8",
            "flashmla_sparse_q8 computes prefill only, engine onnxruntime has portable for ",
        ),
        ("prefill", "flashmla_spars", "no implementation has that name (did you mean flashmla_sparse?), engine onnxr"),
        ("decode", "nonsense", "no implementation has that name, engine onnxruntime has portable for decode"),
    ],
)
def test_a_name_the_engine_lacks_is_refused_with_the_engines_own(phase: Phase, name: str, sentence: str | None) -> None:
    found = backend_refusal("onnxruntime", phase, name)
    assert found == sentence if sentence is None or found is None else found.startswith(sentence)


def test_names_of_the_first_generation_are_present_ones_today_and_every_engine_has_a_default() -> None:
    assert set(RENAMED.values()) <= set(KNOWN)
    assert not set(RENAMED) & set(KNOWN)
    assert set(ENGINES) == set(COMPILERS)
    for engine in ENGINES.values():
        assert {backend.name for backend in engine.attention} <= set(KNOWN)
        assert engine.names("prefill")
        assert engine.names("decode")


def test_the_dtype_of_the_memory_is_the_engines(f4_engine: LoadedEngine, t32_engine: LoadedEngine) -> None:
    assert kv_cache_refusal("onnxruntime", "float32") is None
    assert kv_cache_refusal("onnxruntime", "fp8_e4m3") == "engine onnxruntime keeps its memory in float32"
    for loaded in (f4_engine, t32_engine):
        assert {tensor.dtype for tensor in loaded.manifest.state} == {loaded.manifest.build_config.kv_cache_dtype}


@pytest.mark.parametrize("depth", [0, 1])
def test_depths_an_implementation_can_verify_pass(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backends, "ENGINES", {"onnxruntime": NARROW})
    assert depth_refusal("onnxruntime", "narrow", depth) is None


@pytest.mark.parametrize("depth", [2, 3, 4, 5])
def test_a_depth_whose_rows_an_implementation_cannot_judge_is_refused_with_the_depths_it_can(
    preview_engine: LoadedEngine, tmp_path: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the build before anything is written, and at start-up, where fewer drafts than were built may do."""
    monkeypatch.setattr(attention_backends, "ENGINES", {"onnxruntime": NARROW})
    expected = (
        f"{depth} drafts are {depth + 1} rows a request, which narrow of engine onnxruntime does not judge in one "
        "step: ask for one of the depths 0, 1, or build with --dsa-decode-backend portable, which takes any"
    )
    checkpoint = write_checkpoint(tmp_path / "checkpoint", F4_PREVIEW)
    monkeypatch.setattr("twostroke.builder.build.ENGINES", {"onnxruntime": NARROW})
    monkeypatch.setitem(KNOWN, "narrow", attention_backends.BOTH)  # type: ignore[arg-type]
    with pytest.raises(BuildError) as at_build:
        build(checkpoint, tmp_path / "engine", BuildOptions(max_draft_len=depth, decode_backend="narrow"))
    assert str(at_build.value) == expected
    assert not (tmp_path / "engine").exists()

    manifest = preview_engine.manifest
    config = msgspec.structs.replace(manifest.build_config, decode_backend="narrow")
    manifest = msgspec.structs.replace(manifest, build_config=config)
    with pytest.raises(ConfigError) as at_start:
        RuntimeConfig(draft_length=depth).limits(manifest)
    assert str(at_start.value) == f"draft_length is {depth}: {expected}"
    assert RuntimeConfig(draft_length=1).limits(manifest).rows == 2
