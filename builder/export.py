"""A step as ONNX: `*.plugin.onnx` with opaque op nodes, `*.portable.onnx` with every op replaced by its body.

Both are functional (state in, state out) and hold no weights: parameters become graph inputs of their own name. Dynamic
dimensions carry the letters of the design.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
from torch.export import Dim

from twostroke.builder.alias_lint import check_aliases, order_reads_before_writes
from twostroke.builder.networks.layers import StepSpec
from twostroke.engines.manifest import Binding, StateTensor
from twostroke.plugins.onnx_body import inline_bodies, quiet, to_onnx


@dataclass(frozen=True)
class ExportedStep:
    """One step's two graphs and the bindings both have, weights included."""

    name: str
    plugin: ir.Model
    portable: ir.Model
    bindings: tuple[Binding, ...]


def lines_letter(tensor: StateTensor) -> str:
    """Named dimension of a state tensor's array: rows, or packed pages."""
    return f"{tensor.name}.{'pages' if tensor.planes else 'rows'}"


def step_bindings(spec: StepSpec) -> tuple[Binding, ...]:
    """Every binding of a step but its weights: inputs, state, outputs, and the new state aliased to the old."""
    state = tuple(Binding(t.name, t.dtype, (lines_letter(t), t.line), "state") for t in spec.state)
    after = tuple(
        Binding(f"{t.name}.next", t.dtype, (lines_letter(t), t.line), "output", alias=t.name)
        for t in spec.state
        if t.name in spec.writes
    )
    return (*spec.inputs, *state, *spec.outputs, *after)


def export_program(spec: StepSpec) -> torch.export.ExportedProgram:
    """The step traced with every named dimension dynamic."""
    dims: dict[str, Dim] = {}

    def dynamic(binding: Binding) -> dict[int, Dim]:
        letters = {axis: d for axis, d in enumerate(binding.shape) if isinstance(d, str)}
        for letter in letters.values():
            dims.setdefault(letter, Dim(letter.replace(".", "_"), min=2, max=1 << 30))
        return {axis: dims[letter] for axis, letter in letters.items()}

    state = [b for b in step_bindings(spec) if b.role == "state"]
    lines = {lines_letter(t): t.shape(spec.sizes["S"], spec.sizes.get("pages", 2))[0] for t in spec.state}

    def example(binding: Binding) -> torch.Tensor:
        shape = [d if isinstance(d, int) else {**spec.sizes, **lines}[d] for d in binding.shape]
        return torch.zeros(shape, dtype=getattr(torch, binding.dtype))

    arguments = tuple(example(b) for b in (*spec.inputs, *state))
    shapes = (*(dynamic(b) for b in spec.inputs), tuple(dynamic(b) for b in state))
    with quiet():
        return torch.export.export(spec.module, arguments, dynamic_shapes=shapes)


def export_step(spec: StepSpec) -> ExportedStep:
    """Both graphs of a step, named, linted. Raises BuildError if the graph breaks an aliasing rule."""
    model = to_onnx(export_program(spec))
    bindings = step_bindings(spec)
    _name_values(model, bindings)
    weights = _weights(model, bindings)
    for node in model.graph:
        node.name = f"{spec.name}/{node.name}"
    portable = inline_bodies(model)
    aliases = {b.name: b.alias for b in bindings if b.alias is not None}
    order_reads_before_writes(portable, aliases)
    check_aliases(portable, aliases, spec.name)
    bindings = (*bindings, *weights)
    for graph in (model, portable):
        _declare(graph, bindings)
        ir.passes.common.ClearMetadataAndDocStringPass()(
            graph
        )  # the exporter leaves source paths of the building machine there
    return ExportedStep(spec.name, model, portable, bindings)


def _name_values(model: ir.Model, bindings: tuple[Binding, ...]) -> None:
    takes = [b for b in bindings if b.role in ("input", "state")]
    gives = [b for b in bindings if b.role == "output"]
    taken = {b.name for b in bindings}
    for node in model.graph:
        for value in node.outputs:
            if value.name in taken:
                value.name = f"{value.name}.value"
    for binding, value in zip(takes, model.graph.inputs, strict=False):  # parameters follow
        value.name = binding.name
    for binding, value in zip(gives, model.graph.outputs, strict=True):
        value.name = binding.name


def _declare(model: ir.Model, bindings: tuple[Binding, ...]) -> None:
    """Writes dtype and shape of every binding, with the design's letters, onto the graph's inputs and outputs."""
    by_name = {b.name: b for b in bindings}
    for value in (*model.graph.inputs, *model.graph.outputs):
        binding = by_name[value.name or ""]
        value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(binding.dtype)))
        value.shape = ir.Shape(list(binding.shape))


def _weights(model: ir.Model, bindings: tuple[Binding, ...]) -> tuple[Binding, ...]:
    """The graph inputs that are parameters."""
    others = {b.name for b in bindings}
    return tuple(
        Binding(v.name or "", v.dtype.numpy().name, tuple(v.shape.numpy()), "weight")
        for v in model.graph.inputs
        if v.name not in others and v.dtype is not None and v.shape is not None
    )
