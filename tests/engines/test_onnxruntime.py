"""Binding buffers to a step: what fits, what is refused by name, and whose memory is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from twostroke.engines.base import Buffer, Engine
from twostroke.engines.errors import EngineError
from twostroke.engines.loading import LoadedEngine
from twostroke.engines.manifest import Binding, Step
from twostroke.engines.onnxruntime import OnnxRuntimeCompiler, versions

BINDINGS = (
    Binding("x", "float32", ("N", 4), "input"),
    Binding("index", "int64", ("N", 1), "input"),
    Binding("rows", "float32", ("X", 4), "state"),
    Binding("w", "float32", (4, 4), "weight"),
    Binding("y", "float32", ("N", 4), "output"),
    Binding("rows.next", "float32", ("X", 4), "output", alias="rows"),
)


def step_of(bindings: tuple[Binding, ...] = BINDINGS) -> Step:
    return Step("toy", "onnxruntime", "portable", "toy.onnx", bindings, versions())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y = x w, and y is scattered into rows."""
    kinds = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
    values = {b.name: helper.make_tensor_value_info(b.name, kinds[b.dtype], b.shape) for b in BINDINGS}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("ScatterND", ["rows", "index", "y"], ["rows.next"]),
    ]
    inputs = [values[n] for n in ("x", "index", "rows", "w")]
    graph = helper.make_graph(nodes, "toy", inputs, [values["y"], values["rows.next"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    place = tmp_path_factory.mktemp("toy")
    onnx.save(model, place / "toy.onnx")
    return place


WEIGHT = np.diag([1.0, 2.0, 3.0, 4.0]).astype(np.float32)


@pytest.fixture
def engine(folder: Path) -> Engine:
    return OnnxRuntimeCompiler().load(folder, step_of(), {"w": Buffer.of(WEIGHT)})


def arrays(n: int = 3) -> dict[str, np.ndarray]:
    return {
        "x": np.ones((n, 4), np.float32),
        "index": np.arange(n, dtype=np.int64)[:, None].copy(),
        "rows": np.zeros((8, 4), np.float32),
        "y": np.full((n, 4), np.nan, np.float32),
    }


def bind(engine: Engine, **changed: np.ndarray | None) -> dict[str, np.ndarray]:
    given = {name: array for name, array in {**arrays(), **changed}.items() if array is not None}
    engine.bind({name: Buffer.of(array) for name, array in given.items()}).enqueue()
    return given


def refusal(engine: Engine, **changed: np.ndarray | None) -> str:
    with pytest.raises(EngineError) as caught:
        bind(engine, **changed)
    return str(caught.value)


def test_state_named_once_is_updated_where_it_lies(engine: Engine) -> None:
    given = bind(engine)
    np.testing.assert_array_equal(given["y"], np.tile([1.0, 2.0, 3.0, 4.0], (3, 1)))
    np.testing.assert_array_equal(given["rows"][:3], given["y"])
    assert (given["rows"][3:] == 0).all()


def test_state_given_another_output_buffer_is_left_alone(engine: Engine) -> None:
    given = bind(engine, **{"rows.next": np.full((8, 4), np.nan, np.float32)})
    assert (given["rows"] == 0).all()
    np.testing.assert_array_equal(given["rows.next"][:3], given["y"])


def test_a_bound_step_reads_its_buffers_anew_at_every_call(engine: Engine) -> None:
    given = arrays()
    step = engine.bind({name: Buffer.of(array) for name, array in given.items()})
    for value in (1.0, 5.0):
        given["x"].fill(value)
        step.enqueue()
        assert given["y"][0, 0] == value


def test_a_bound_step_keeps_its_memory_alive(engine: Engine) -> None:
    import gc

    result = np.zeros((3, 4), np.float32)
    given = {**arrays(), "y": result}
    step = engine.bind({name: Buffer.of(array) for name, array in given.items()})
    del given
    gc.collect()
    junk = [np.full((3, 4), 9.0, np.float32) for _ in range(100)]
    step.enqueue()
    np.testing.assert_array_equal(result[0], [1.0, 2.0, 3.0, 4.0])
    assert junk


def test_any_number_of_rows_fits_one_session(engine: Engine) -> None:
    for n in (2, 7, 8):
        assert not np.isnan(bind(engine, **arrays(n))["y"]).any()


def test_names_the_step_does_not_have_are_ignored(engine: Engine) -> None:
    bind(engine, anything=np.zeros(3, np.int8))


@pytest.mark.parametrize("name", ["x", "index", "rows", "y"])
def test_a_missing_buffer_is_named_with_what_it_should_be(engine: Engine, name: str) -> None:
    binding = engine.bindings[name]
    assert f"step toy: no buffer for {name} {binding.dtype}{list(binding.shape)}" in refusal(engine, **{name: None})


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("x", np.ones((3, 4)), "x is float64 on cpu, expected float32 on cpu"),
        ("index", np.zeros((3, 1), np.int32), "index is int32 on cpu, expected int64"),
        ("x", np.ones((3, 5), np.float32), "x has shape (3, 5), expected ('N', 4)"),
        ("x", np.ones(4, np.float32), "x has shape (4,), expected ('N', 4)"),
        ("y", np.ones((2, 4), np.float32), "y has N=2, but x has N=3"),
        ("rows.next", np.zeros((9, 4), np.float32), "rows.next has X=9, but rows has X=8"),
    ],
)
def test_a_buffer_that_does_not_fit_is_named(engine: Engine, name: str, array: np.ndarray, words: str) -> None:
    assert words in refusal(engine, **{name: array})


def test_a_buffer_on_another_device_is_refused(engine: Engine) -> None:
    given = {name: Buffer.of(array) for name, array in arrays().items()}
    x = given["x"]
    given["x"] = Buffer(x.pointer, x.dtype, x.shape, "cuda:0", x.owner)
    with pytest.raises(EngineError, match="x is float32 on cuda:0, expected float32 on cpu"):
        engine.bind(given)


def test_two_views_that_begin_at_one_address_keep_their_own_shapes(f4_engine: LoadedEngine) -> None:
    """`logit_rows` as a slice of `positions`: same pointer, fewer rows."""
    target = f4_engine.engines["target"]
    positions = np.arange(6, dtype=np.int32)
    given = {
        "token_ids": np.arange(6, dtype=np.int32),
        "positions": positions,
        "slots": np.ones(6, np.int32),
        "row_start": np.array([0, 6], np.int32),
        "request_slot": np.array([1], np.int32),
        "page_table": np.array([[0], [1]], np.int32),
        "logit_rows": positions[:2],
        "logits": np.full((2, 320), np.nan, np.float32),
        "taps": np.full((6, 192), np.nan, np.float32),
    }
    for tensor in f4_engine.manifest.state:
        given[tensor.name] = np.zeros((tensor.total_rows(2, 2), tensor.width), np.float32)
    target.bind({name: Buffer.of(array) for name, array in given.items()}).enqueue()
    assert not np.isnan(given["logits"]).any()


def test_only_contiguous_arrays_are_buffers() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        Buffer.of(np.zeros((4, 4), np.float32)[:, :2])


def test_a_buffer_is_the_array_itself() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    buffer = Buffer.of(array)
    assert (buffer.pointer, buffer.dtype, buffer.shape, buffer.device) == (array.ctypes.data, "float32", (2, 3), "cpu")
    other = np.from_dlpack(buffer)
    array[0, 0] = 42.0
    assert other[0, 0] == 42.0


def test_a_graph_and_a_manifest_that_disagree_are_refused_at_load(folder: Path) -> None:
    with pytest.raises(EngineError, match=r"graph and manifest disagree on bindings x; rebuild"):
        OnnxRuntimeCompiler().load(folder, step_of(BINDINGS[1:]), {"w": Buffer.of(WEIGHT)})


def test_a_missing_or_unfit_weight_is_refused_at_load(folder: Path) -> None:
    load = OnnxRuntimeCompiler().load
    with pytest.raises(EngineError, match="weight w is not in the weights index"):
        load(folder, step_of(), {})
    with pytest.raises(EngineError, match="w is float64 on cpu, expected float32"):
        load(folder, step_of(), {"w": Buffer.of(WEIGHT.astype(np.float64))})
    with pytest.raises(EngineError, match=r"weight w has shape \(2, 8\)"):
        load(folder, step_of(), {"w": Buffer.of(WEIGHT.reshape(2, 8))})


def test_a_file_that_is_missing_or_no_graph_is_refused_with_its_path(tmp_path: Path) -> None:
    for content in (None, b"", b"nonsense"):
        if content is not None:
            (tmp_path / "toy.onnx").write_bytes(content)
        with pytest.raises(EngineError, match="cannot load it") as caught:
            OnnxRuntimeCompiler().load(tmp_path, step_of(), {"w": Buffer.of(WEIGHT)})
        assert str(tmp_path / "toy.onnx") in str(caught.value)


def test_weights_are_read_where_they_lie(folder: Path) -> None:
    """A change of the bytes behind a weight is seen by a session that is already loaded: nothing was copied."""
    weight = WEIGHT.copy()
    engine = OnnxRuntimeCompiler().load(folder, step_of(), {"w": Buffer.of(weight)})
    weight *= 10
    np.testing.assert_array_equal(bind(engine)["y"][0], [10.0, 20.0, 30.0, 40.0])
