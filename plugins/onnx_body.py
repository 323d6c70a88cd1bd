"""Ops in ONNX: an opaque node in domain `twostroke` for engines with plugins, a plain-ONNX body for all others.

A body is the op's reference exported on its own, so graph and reference are one piece of maths. Attribute values are
constants of a body: there is one body per op, attribute set and input signature.
"""

from __future__ import annotations

import hashlib
import logging
import re
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import onnx
import onnx_ir as ir
import onnxscript
import onnxscript.optimizer
import torch
from torch.export import Dim

from twostroke.plugins.catalogue import CATALOGUE
from twostroke.plugins.op import NAMESPACE, Op

OPSET = 18
_EXAMPLE_SIZES = (12, 7, 5, 9, 11, 6, 10, 8, 13, 14, 15, 16)
_TYPES = ["tensor(float)", "tensor(int64)", "tensor(int32)", "tensor(uint8)", "tensor(bool)"]
_ATTRIBUTE = {int: onnx.defs.OpSchema.AttrType.INT, bool: onnx.defs.OpSchema.AttrType.INT}
_opset = onnxscript.values.Opset("", OPSET)


def _node_builder(op: Op) -> Callable[..., Any]:
    schema_of = onnx.defs.OpSchema
    hints = typing.get_type_hints(op.reference)
    outputs = [f"out{i}" for i in range(op.outputs)]
    schema = schema_of(
        op.name,
        NAMESPACE,
        1,
        inputs=[schema_of.FormalParameter(name, f"T_{name}") for name in op.tensors],
        outputs=[schema_of.FormalParameter(name, f"T_{name}") for name in outputs],
        type_constraints=[(f"T_{name}", _TYPES, "") for name in (*op.tensors, *outputs)],
        attributes=[
            schema_of.Attribute(name, _ATTRIBUTE.get(hints[name], schema_of.AttrType.FLOAT), "")
            for name in op.attributes
        ],
    )
    if not onnx.defs.has(op.name, NAMESPACE):
        onnx.defs.register_schema(schema)
    node = onnxscript.values.Op(onnxscript.values.Opset(NAMESPACE, 1), op.name, schema)

    def build(*arguments: Any) -> Any:
        tensors, attributes = arguments[: len(op.tensors)], arguments[len(op.tensors) :]
        values = (int(value) if isinstance(value, bool) else value for value in attributes)
        return node(*tensors, **dict(zip(op.attributes, values, strict=True)))

    return build


def _floor_divide(dividend: Any, divisor: Any) -> Any:
    """Integer division of non-negative numbers: positions, rows and slots are never negative where they are divided."""
    return _opset.Div(dividend, _opset.Constant(value_int=divisor) if isinstance(divisor, int) else divisor)


@cache
def translation_table() -> Mapping[Any, Callable[..., Any]]:
    """What the ONNX exporter needs to know of our ops."""
    table: dict[Any, Callable[..., Any]] = {op.overload: _node_builder(op) for op in CATALOGUE.values()}
    table[torch.ops.aten.floor_divide.default] = _floor_divide
    return table


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps what torch's exporter says about its own internals from the people who run a build."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        yield


def to_onnx(program: torch.export.ExportedProgram) -> ir.Model:
    """An exported program as an ONNX model, our ops as opaque nodes. Parameters become graph inputs of their own
    name, before the optimiser sees them: it would fold, merge or reshape what it takes for constants. Unread ones are
    left out."""
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with quiet():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            custom_translation_table=dict(translation_table()),
            opset_version=OPSET,
            optimize=False,
            verbose=False,
        )
    assert exported is not None
    model = exported.model
    for name in program.graph_signature.parameters:
        value = model.graph.initializers.pop(name) if name in model.graph.initializers else None
        if value is not None and value.uses():
            constant = value.const_value
            assert constant is not None
            value.shape, value.type = ir.Shape(constant.shape.numpy()), ir.TensorType(constant.dtype)
            value.const_value = None
            model.graph.inputs.append(value)
    known = {
        id(value): (value, value.type, value.shape)
        for node in model.graph
        if node.domain == NAMESPACE
        for value in node.outputs
    }
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)
    onnxscript.optimizer.optimize_ir(model)
    # The optimiser forgets the types of nodes it does not know.
    for value, kind, shape in known.values():
        value.type, value.shape = kind, shape
    return model


class _Reference(torch.nn.Module):
    def __init__(self, op: Op, attributes: Sequence[Any]) -> None:
        super().__init__()
        self.op, self.attributes = op, tuple(attributes)

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.op.reference(*tensors, *self.attributes)


_Signature = tuple[tuple[str, tuple[int | str, ...]], ...]


@cache
def _body(name: str, attributes: tuple[Any, ...], signature: _Signature) -> ir.Model:
    dims_by_name: dict[str, Any] = {}
    sizes: dict[str, int] = {}

    def dimension(text: str) -> tuple[Any, int]:
        """A dynamic dimension, `d0` or `5*d0`, and its size in the example."""
        factor, _, name = text.rpartition("*")
        if name not in dims_by_name:
            sizes[name] = _EXAMPLE_SIZES[len(sizes)]
            dims_by_name[name] = Dim(name, min=2, max=1 << 30)
        times = int(factor or 1)
        return (times * dims_by_name[name] if factor else dims_by_name[name]), times * sizes[name]

    arguments, dynamic = [], []
    for dtype, shape in signature:
        dims = {axis: dimension(d) for axis, d in enumerate(shape) if isinstance(d, str)}
        concrete = [dims[axis][1] if isinstance(d, str) else d for axis, d in enumerate(shape)]
        arguments.append(torch.zeros(concrete, dtype=getattr(torch, dtype)))
        dynamic.append({axis: dim for axis, (dim, _) in dims.items()})
    module = _Reference(CATALOGUE[name], attributes)
    with quiet():
        program = torch.export.export(module, tuple(arguments), dynamic_shapes=(tuple(dynamic),))
    return to_onnx(program)


_MULTIPLE = re.compile(r"(?:(\d+)\*)?([A-Za-z_]\w*)")


def _signature(node: ir.Node) -> _Signature:
    """dtypes and shapes of a node's inputs, with dynamic dimensions renamed in order of appearance so that layers of
    one kind share a body. A dimension that is more than a multiple of a name counts as a name of its own."""
    renamed: dict[str, str] = {}

    def canonical(dim: Any) -> int | str:
        if isinstance(dim, int):
            return dim
        text = str(dim.value if hasattr(dim, "value") else dim)
        multiple = _MULTIPLE.fullmatch(text)
        factor, name = multiple.groups() if multiple else (None, text)
        short = renamed.setdefault(name, f"d{len(renamed)}")
        return f"{factor}*{short}" if factor else short

    found = []
    for value in node.inputs:
        assert value is not None, node.name
        assert value.shape is not None, value
        assert value.dtype is not None, value
        found.append((_dtype(value.dtype), tuple(canonical(dim) for dim in value.shape)))
    return tuple(found)


def _dtype(dtype: ir.DataType) -> str:
    names = {"FLOAT": "float32", "INT64": "int64", "INT32": "int32", "UINT8": "uint8", "BOOL": "bool"}
    return names[dtype.name]


def _function(node: ir.Node, op: Op) -> ir.Function:
    hints = typing.get_type_hints(op.reference)
    attributes = tuple(hints[name](node.attributes[name].value) for name in op.attributes)
    signature = _signature(node)
    model = ir.serde.deserialize_model(ir.serde.serialize_model(_body(op.name, attributes, signature)))
    for value in list(model.graph.initializers.values()):
        constant = ir.Node(
            "", "Constant", [], attributes=[ir.Attr("value", ir.AttributeType.TENSOR, value.const_value)], num_outputs=1
        )
        constant.outputs[0].name = value.name
        model.graph.insert_before(model.graph[0], constant)
        ir.convenience.replace_all_uses_with(value, constant.outputs[0])
        model.graph.initializers.pop(value.name or "")
    overload = hashlib.sha256(repr((attributes, signature)).encode()).hexdigest()[:12]
    return ir.Function(NAMESPACE, op.name, overload, graph=model.graph, attributes=[])


def inline_bodies(model: ir.Model) -> ir.Model:
    """A copy of `model` in which every op node is replaced by its body."""
    model = ir.serde.deserialize_model(ir.serde.serialize_model(model))
    for node in model.graph:
        if node.domain == NAMESPACE:
            function = _function(node, CATALOGUE[node.op_type])
            node.overload = function.overload
            for name in list(node.attributes):
                node.attributes.pop(name)
            model.functions.setdefault(function.identifier(), function)
    model.opset_imports[NAMESPACE] = 1
    inlined = ir.passes.common.InlinePass()(model).model
    inlined.functions.clear()
    # Bodies name their dimensions each for itself; engines take equal names for equal sizes and share buffers by them.
    kept = set(inlined.graph.outputs)
    for node in inlined.graph:
        for value in node.outputs:
            if value not in kept:
                value.shape = None
    inlined.opset_imports.pop(NAMESPACE, None)
    return inlined
