"""In-place state, made safe and proved safe on the graph.

A state input and its `.next` output share one buffer. That is right only if every reader of the old value runs before
the one scatter that replaces it. An engine may run independent nodes in any order, so the order has to be a data
dependency: `order_reads_before_writes` adds it, `check_aliases` proves it, together with the rest of the rule: one
scatter a state tensor, directly on the input, whose result is the output, and readers that copy what they read: a
reshaped state would be the same memory under another name, whose readers no rule sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from twostroke.engines.errors import BuildError

_COPYING_READERS = ("Gather", "GatherND", "GatherElements")


def _inputs(model: ir.Model) -> dict[str, ir.Value]:
    return {value.name or "": value for value in model.graph.inputs}


def _readers_and_writers(value: ir.Value) -> tuple[list[ir.Node], list[ir.Node]]:
    readers: list[ir.Node] = []
    writers: list[ir.Node] = []
    for node, index in value.uses():
        (writers if node.op_type == "ScatterND" and index == 0 else readers).append(node)
    return readers, writers


def order_reads_before_writes(model: ir.Model, aliases: Mapping[str, str]) -> None:
    """Makes each scatter's index depend on every reader of the old value: index + 0 * dim0(reader's result)."""
    inputs = _inputs(model)
    for state in aliases.values():
        readers, writers = _readers_and_writers(inputs[state])
        for scatter in writers:
            for reader in readers:
                if not _is_ancestor(reader, scatter):
                    _depend(model.graph, scatter, reader)


def _depend(graph: ir.Graph, scatter: ir.Node, reader: ir.Node) -> None:
    zero = ir.tensor(np.array([0], dtype=np.int64))
    extent = ir.Node("", "Shape", [reader.outputs[0]], [ir.AttrInt64("start", 0), ir.AttrInt64("end", 1)])
    constant = ir.Node("", "Constant", [], [ir.AttrTensor("value", zero)])
    nothing = ir.Node("", "Mul", [extent.outputs[0], constant.outputs[0]])
    index = ir.Node("", "Add", [scatter.inputs[1], nothing.outputs[0]])
    for node, suffix in ((extent, "extent"), (constant, "zero"), (nothing, "nothing"), (index, "after")):
        node.name = f"{scatter.name}/{reader.name}/{suffix}"
        node.outputs[0].name = node.name
    graph.insert_before(scatter, [extent, constant, nothing, index])
    scatter.replace_input_with(1, index.outputs[0])
    if list(graph).index(reader) > list(graph).index(extent):
        graph.sort()


def _is_ancestor(candidate: ir.Node, node: ir.Node) -> bool:
    stack, seen = [node], set()
    while stack:
        for value in _operands(stack.pop()):
            producer = value.producer()
            if producer is None or producer in seen:
                continue
            if producer is candidate:
                return True
            seen.add(producer)
            stack.append(producer)
    return False


def _operands(node: ir.Node) -> Iterator[ir.Value]:
    """Everything a node reads, what its subgraphs take from outside among it."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                yield from _operands(inner)


def check_aliases(model: ir.Model, aliases: Mapping[str, str], step: str) -> None:
    """Raises BuildError that names state, node and rule if a graph may not update its state in place."""
    inputs = _inputs(model)
    outputs = {value.name: value for value in model.graph.outputs}
    for after, before in aliases.items():
        if after not in outputs or before not in inputs:
            raise BuildError(f"step {step}: state {before} has no output {after} in the graph")
        readers, writers = _readers_and_writers(inputs[before])
        if len(writers) != 1:
            raise BuildError(
                f"step {step}: state {before} is written by {len(writers)} scatters, exactly one is allowed; a second "
                "one would copy the whole tensor"
            )
        scatter = writers[0]
        if scatter.outputs[0] is not outputs[after]:
            raise BuildError(
                f"step {step}: {after} is not the result of the scatter {scatter.name} on {before}; nothing may stand "
                "between a scatter and the state it writes"
            )
        if inputs[before] in model.graph.outputs:
            raise BuildError(f"step {step}: state {before} is an output itself; only {after} may leave the step")
        for reader in readers:
            if reader.op_type not in _COPYING_READERS:
                raise BuildError(
                    f"step {step}: node {reader.name} ({reader.op_type}) reads {before}; only "
                    f"{', '.join(_COPYING_READERS)} may, others can hand on the memory itself"
                )
            if not _is_ancestor(reader, scatter):
                raise BuildError(
                    f"step {step}: node {reader.name} ({reader.op_type}) reads the old value of {before} but the "
                    f"scatter {scatter.name} does not depend on it, so it may see the new one"
                )
