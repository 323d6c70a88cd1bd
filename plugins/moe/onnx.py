"""The quantised experts in ONNX: a Loop over the distinct picked experts, its inside exported from the reference.

The trip count is data. An iteration slices one expert off the banks, so that no more than one is ever dequantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from twostroke.plugins.moe.reference import Dequantise, add_expert
from twostroke.plugins.quantised.reference import dequantise_fp4, dequantise_fp8

Signature = tuple[tuple[str, tuple[int | str, ...]], ...]  # dtype and shape of every input
Export = Callable[[Callable[..., Any], tuple[Any, ...], Signature], ir.Model]


def _loop(dequantise: Dequantise, export: Export, attributes: tuple[Any, ...], signature: Signature) -> ir.Model:
    """Body of `moe_experts_*`: inputs x, ids, weights and six banks [E, ...], output [N, D]."""
    (limit,) = attributes
    x, ids, weights, *banks = signature
    exported = export(
        lambda total, x, ids, weights, expert, *stored: add_expert(
            dequantise, total, x, ids, weights, expert, stored, limit
        ),
        (),
        (x, x, ids, weights, ("int64", ()), *((dtype, shape[1:]) for dtype, shape in banks)),
    )
    step = exported.graph
    given = [_value(f"given_{i}", dtype, shape) for i, (dtype, shape) in enumerate(signature)]
    picked = _node("picked", "Unique", given[1], sorted=1)
    count = _node("count", "Size", picked)
    shape = _node("shape", "Shape", given[0])
    nothing = _node("nothing", "ConstantOfShape", shape, value=ir.tensor(np.zeros(1, np.float32)))

    turn, go_on, total = _value("turn", "int64", ()), _value("go_on", "bool", ()), _value("total", *x)
    expert = _node("expert", "Gather", picked, turn, axis=0)
    stored = [_node(f"stored_{i}", "Gather", bank, expert, axis=0) for i, bank in enumerate(given[3:])]
    still = _node("still", "Identity", go_on)
    for parameter, argument in zip(step.inputs, [total, *given[:3], expert, *stored], strict=True):
        ir.convenience.replace_all_uses_with(parameter, argument)
    inside, (sum_so_far,), constants = list(step), step.outputs, list(step.initializers.values())
    step.outputs.clear()
    step.initializers.clear()
    step.remove(inside)
    nodes = [*_nodes(expert, *stored, still), *inside]
    body = ir.Graph([turn, go_on, total], [still, sum_so_far], nodes=nodes, name="add_expert")

    result = _node("result", "Loop", count, None, nothing, body=body)
    result.type, result.shape = total.type, total.shape
    nodes = _nodes(picked, count, shape, nothing, result)
    graph = ir.Graph(given, [result], nodes=nodes, initializers=constants, opset_imports=step.opset_imports)
    return ir.Model(graph, ir_version=exported.ir_version)


def _value(name: str, dtype: str, shape: tuple[int | str, ...]) -> ir.Value:
    kind = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
    return ir.Value(name=f"loop.{name}", type=kind, shape=ir.Shape(shape))  # exported names have no dots


def _node(name: str, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
    """The result of a new node."""
    (value,) = ir.node(op_type, inputs, attributes, name=f"loop.{name}").outputs
    value.name = f"loop.{name}"
    return value


def _nodes(*values: ir.Value) -> list[ir.Node]:
    return [node for value in values if (node := value.producer()) is not None]


LOOPS: Mapping[str, Callable[[Export, tuple[Any, ...], Signature], ir.Model]] = {
    "moe_experts_fp4": partial(_loop, dequantise_fp4),
    "moe_experts_fp8": partial(_loop, dequantise_fp8),
}
