"""The aliasing rules on graphs small enough to see through, run in place under ONNX Runtime where that can go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from twostroke.builder.alias_lint import check_aliases, order_reads_before_writes
from twostroke.engines.errors import BuildError

ALIASES = {"cache.next": "cache"}


def node(kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, [output], name=f"the_{output}", **attributes)


READ = node("Gather", ["cache", "read"], "seen", axis=0)
WRITE = node("ScatterND", ["cache", "write", "rows"], "cache.next")


def graph(nodes: Sequence[onnx.NodeProto], output: str = "cache.next") -> ir.Model:
    """Inputs cache [X, 4], read [N], write [N, 1], rows [N, 4]; outputs seen and the new cache."""
    values: dict[str, tuple[int, list[str | int]]] = {
        "cache": (TensorProto.FLOAT, ["X", 4]),
        "read": (TensorProto.INT64, ["N"]),
        "write": (TensorProto.INT64, ["N", 1]),
        "rows": (TensorProto.FLOAT, ["N", 4]),
    }
    inputs = [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in values.items()]
    outputs = [
        helper.make_tensor_value_info("seen", TensorProto.FLOAT, ["N", 4]),
        helper.make_tensor_value_info(output, TensorProto.FLOAT, ["X", 4]),
    ]
    proto = helper.make_graph(nodes, "step", inputs, outputs)
    model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    onnx.checker.check_model(model)
    return ir.serde.deserialize_model(model)


def refusal(model: ir.Model) -> str:
    with pytest.raises(BuildError) as caught:
        check_aliases(model, ALIASES, "toy")
    return str(caught.value)


def run_in_place(model: ir.Model) -> np.ndarray:
    """What the gather saw when cache and cache.next are one buffer and every row that is read is also written."""
    session = ort.InferenceSession(
        ir.serde.serialize_model(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    cache, seen = np.zeros((50, 4), np.float32), np.full((6, 4), np.nan, np.float32)
    rows = np.ones((6, 4), np.float32)
    index = np.arange(6, dtype=np.int64)
    binding = session.io_binding()
    shared = ort.OrtValue.ortvalue_from_numpy(cache)
    for name, array in {"read": index, "write": index[:, None].copy(), "rows": rows}.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    out = ort.OrtValue.ortvalue_from_numpy(seen)
    binding.bind_ortvalue_input("cache", shared)
    binding.bind_ortvalue_output("cache.next", shared)
    binding.bind_ortvalue_output("seen", out)
    session.run_with_iobinding(binding)
    assert (cache[:6] == 1).all()
    assert (cache[6:] == 0).all()
    return seen


@pytest.mark.parametrize("nodes", [(READ, WRITE), (WRITE, READ)], ids=["read-first", "write-first"])
def test_a_read_beside_the_write_is_refused_in_either_order(nodes: Sequence[onnx.NodeProto]) -> None:
    message = refusal(graph(nodes))
    assert "step toy" in message
    assert "node the_seen (Gather) reads the old value of cache" in message
    assert "the_cache.next" in message


@pytest.mark.parametrize("nodes", [(READ, WRITE), (WRITE, READ)], ids=["read-first", "write-first"])
def test_ordering_cures_both_orders_and_the_old_value_is_seen(nodes: Sequence[onnx.NodeProto]) -> None:
    model = graph(nodes)
    order_reads_before_writes(model, ALIASES)
    check_aliases(model, ALIASES, "toy")
    proto = ir.serde.serialize_model(model)
    onnx.checker.check_model(proto)
    np.testing.assert_array_equal(run_in_place(model), np.zeros((6, 4)))


def test_without_the_cure_some_order_sees_the_new_value() -> None:
    """Why the lint exists: no error, a wrong number."""
    seen = [run_in_place(graph(nodes)) for nodes in ((READ, WRITE), (WRITE, READ))]
    assert any((values == 1).all() for values in seen)


def test_ordering_leaves_a_graph_alone_whose_write_already_depends_on_the_read() -> None:
    scaled = node("Mul", ["seen", "rows"], "mixed")
    write = node("ScatterND", ["cache", "write", "mixed"], "cache.next")
    model = graph([READ, scaled, write])
    before = len(list(model.graph))
    order_reads_before_writes(model, ALIASES)
    check_aliases(model, ALIASES, "toy")
    assert len(list(model.graph)) == before


def test_several_readers_are_all_ordered() -> None:
    readers = [node("Gather", ["cache", "read"], f"seen{i}", axis=0) for i in range(3)]
    total = node("Sum", ["seen0", "seen1", "seen2"], "seen")
    model = graph([WRITE, *readers, total])
    order_reads_before_writes(model, ALIASES)
    check_aliases(model, ALIASES, "toy")
    np.testing.assert_array_equal(run_in_place(model), np.zeros((6, 4)))


def test_two_chained_scatters_are_refused() -> None:
    """The second takes the first's result, which has no buffer to be written in: the whole cache is copied."""
    first = node("ScatterND", ["cache", "write", "rows"], "between")
    second = node("ScatterND", ["between", "write", "rows"], "cache.next")
    model = graph([READ, first, second])
    order_reads_before_writes(model, ALIASES)
    message = refusal(model)
    assert "cache.next is not the result of the scatter the_between on cache" in message


def test_two_scatters_on_one_state_are_refused() -> None:
    other = node("ScatterND", ["cache", "read2", "rows"], "other")
    index = node("Unsqueeze", ["read", "axis"], "read2")
    axis = node("Constant", [], "axis", value=helper.make_tensor("axis", TensorProto.INT64, [1], [1]))
    message = refusal(graph([READ, axis, index, other, WRITE]))
    assert "state cache is written by 2 scatters" in message


def test_a_node_between_the_scatter_and_the_state_is_refused() -> None:
    write = node("ScatterND", ["cache", "write", "rows"], "written")
    model = graph([READ, write, node("Identity", ["written"], "cache.next")])
    order_reads_before_writes(model, ALIASES)
    assert "cache.next is not the result of the scatter the_written on cache; nothing may stand between" in refusal(
        model
    )


def test_a_node_between_the_state_and_the_scatter_is_refused() -> None:
    before = node("Identity", ["cache"], "copy")
    model = graph([READ, before, node("ScatterND", ["copy", "write", "rows"], "cache.next")])
    assert "state cache is written by 0 scatters" in refusal(model)


def test_a_state_without_its_output_is_refused() -> None:
    write = node("ScatterND", ["cache", "write", "rows"], "elsewhere")
    assert "state cache has no output cache.next" in refusal(graph([READ, write], output="elsewhere"))


def test_a_state_that_leaves_the_step_unchanged_is_refused() -> None:
    """Another output may be copied from the old or the new memory."""
    model = graph([READ, WRITE])
    model.graph.outputs[0] = model.graph.inputs[0]
    order_reads_before_writes(model, ALIASES)
    assert "state cache is an output itself" in refusal(model)


@pytest.mark.parametrize("view", ["Identity", "Flatten"])
def test_a_view_of_the_state_is_refused(view: str) -> None:
    """A view is the same memory under another name: what reads the view may run after the scatter, and sees the new
    value, though the view itself stands before it."""
    nodes = [node(view, ["cache"], "view"), WRITE, node("Gather", ["view", "read"], "seen", axis=0)]
    model = graph(nodes)
    order_reads_before_writes(model, ALIASES)
    message = refusal(model)
    assert f"node the_view ({view}) reads cache" in message
    assert "Gather" in message


def test_what_a_loop_takes_from_outside_counts_as_read_by_it() -> None:
    """The scatter writes what a loop made of the gathered rows: nothing but the loop's inside says so."""
    state = [
        helper.make_tensor_value_info("turn", TensorProto.INT64, []),
        helper.make_tensor_value_info("go", TensorProto.BOOL, []),
        helper.make_tensor_value_info("sum", TensorProto.FLOAT, ["N", 4]),
    ]
    after = [
        helper.make_tensor_value_info("still", TensorProto.BOOL, []),
        helper.make_tensor_value_info("more", TensorProto.FLOAT, ["N", 4]),
    ]
    inside = helper.make_graph(
        [node("Identity", ["go"], "still"), node("Add", ["sum", "seen"], "more")], "inside", state, after
    )
    once = node("Constant", [], "once", value=helper.make_tensor("one", TensorProto.INT64, [], [1]))
    loop = node("Loop", ["once", "", "rows"], "looped", body=inside)
    write = node("ScatterND", ["cache", "write", "looped"], "cache.next")
    check_aliases(graph([READ, once, loop, write]), ALIASES, "toy")
