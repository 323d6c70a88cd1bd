"""The state contract and the dimensions of a step, as the manifest spells them."""

from __future__ import annotations

import msgspec
import pytest

from twostroke.engines.errors import EngineError
from twostroke.engines.loading import LoadedEngine
from twostroke.engines.manifest import Binding, Manifest, StateTensor, encode, named_dims

WINDOW = StateTensor("window", "ring", 1, 13, 32, lookback=7)
CSA_RAW = StateTensor("raw", "ring", 1, 12, 128, ratio=4, lookback=4)
HCA_RAW = StateTensor("raw", "ring", 1, 12, 64, ratio=8)
PAGED = StateTensor("compressed", "paged", 4, 64, 32)
LINEAR = StateTensor("compressed", "linear", 8, 16, 32)


@pytest.mark.parametrize(
    ("tensor", "position", "expected"),
    [
        (WINDOW, 0, range(0)),
        (WINDOW, 5, range(5)),
        (WINDOW, 30, range(23, 30)),
        (CSA_RAW, 3, range(3)),
        (CSA_RAW, 8, range(4, 8)),
        (CSA_RAW, 11, range(4, 11)),
        (HCA_RAW, 16, range(16, 16)),
        (HCA_RAW, 23, range(16, 23)),
        (PAGED, 3, range(0)),
        (PAGED, 4, range(1)),
        (PAGED, 11, range(2)),
        (LINEAR, 7, range(0)),
        (LINEAR, 16, range(2)),
    ],
)
def test_live_rows_are_those_needed_to_resume(tensor: StateTensor, position: int, expected: range) -> None:
    assert tensor.live(position) == expected


@pytest.mark.parametrize("tensor", [WINDOW, CSA_RAW, HCA_RAW])
def test_live_ring_rows_are_distinct_and_survive_a_block_of_six(tensor: StateTensor) -> None:
    """A verify step writes positions P .. P+5; whatever it accepts, the rows still live were not overwritten."""
    for position in range(100):
        written = {p % tensor.rows for p in range(position, position + 6)}
        for kept in range(1, 7):
            live = tensor.live(position + kept)
            rows = [p % tensor.rows for p in live]
            assert len(set(rows)) == len(rows)
            assert not written & {p % tensor.rows for p in live if p < position}


def test_total_rows_count_pages_or_slots() -> None:
    assert PAGED.total_rows(slots=9, pages=5) == 320
    assert LINEAR.total_rows(slots=9, pages=5) == 144
    assert WINDOW.total_rows(slots=9, pages=5) == 117


def test_a_packed_tensor_has_a_line_a_page() -> None:
    packed = StateTensor("index", "paged", 1, 64, 132, "uint8", "indexk_132", planes=(128, 4))
    assert packed.line == 8448
    assert packed.shape(slots=9, pages=5) == (5, 8448)
    assert PAGED.shape(slots=9, pages=5) == (320, 32)
    assert WINDOW.shape(slots=9, pages=5) == (117, 32)
    assert packed.live(70) == range(70)
    with pytest.raises(msgspec.ValidationError, match=r"planes \(128, 4\) must be paged and add up to width 130"):
        msgspec.convert({**msgspec.to_builtins(packed), "width": 130}, StateTensor)


def test_a_manifest_survives_its_file(f4_engine: LoadedEngine) -> None:
    written = encode(f4_engine.manifest)
    assert written.endswith(b"}\n")
    assert msgspec.json.decode(written, type=Manifest) == f4_engine.manifest


def test_the_manifest_of_a_build_tells_the_runtime_all_it_needs(f4_engine: LoadedEngine) -> None:
    manifest = f4_engine.manifest
    assert (manifest.speculative.method, manifest.speculative.draft_len, manifest.speculative.taps_width) == (
        "dspark",
        5,
        192,
    )
    build = manifest.build_config
    assert (build.max_seq_len, build.max_draft_len, build.tokens_per_page, build.vocab_size) == (128, 5, 256, 320)
    assert (build.eos_token_ids, build.bos_token_id) == ((1,), 0)
    names = [t.name for t in manifest.state]
    assert len(names) == len(set(names))
    bound = {b.name for step in manifest.steps.values() for b in step.bindings if b.role == "state"}
    assert set(names) == bound
    for step in manifest.steps.values():
        assert step.versions.keys() == {"onnxruntime"}


BINDINGS = {
    "a": Binding("a", "int32", ("N",), "input"),
    "b": Binding("b", "float32", ("N", 3, "S"), "input"),
}


def test_named_dimensions_are_read_off_the_shapes() -> None:
    assert named_dims(BINDINGS, {"a": (5,), "b": (5, 3, 2)}, "s") == {"N": 5, "S": 2}


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"a": (5,), "b": (6, 3, 2)}, "step s: b has N=6, but a has N=5"),
        ({"a": (5, 1)}, r"a has shape \(5, 1\), expected \('N',\)"),
        ({"b": (5, 4, 2)}, r"b has shape \(5, 4, 2\), expected \('N', 3, 'S'\)"),
    ],
)
def test_a_dimension_that_contradicts_another_is_named(shapes: dict[str, tuple[int, ...]], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        named_dims(BINDINGS, shapes, "s")
