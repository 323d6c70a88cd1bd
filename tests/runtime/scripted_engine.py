"""An engine directory whose answer is known: at every position the target wants the token of a script.

Real files, loaded and run like any other engine; only the network is a table. With `draft_length` its draft proposes
the script too, or `wrong_at` one other token a block, so a block may bring several tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from twostroke.engines.manifest import (
    CONFIG_FILE,
    SCHEMA,
    WEIGHTS_FILE,
    Binding,
    BuildConfig,
    FileRecord,
    Manifest,
    Speculative,
    StateTensor,
    Step,
    WeightsIndex,
    encode,
)

VOCAB = 320
EOS = 1
MARGIN = 10.0
CONTEXT = StateTensor(name="context", addressing="ring", tokens_per_row=1, rows=4, width=1)
_TYPES = {"int32": TensorProto.INT32, "float32": TensorProto.FLOAT}


def write_scripted_engine(
    folder: Path,
    script: Sequence[int],
    draft_length: int = 0,
    wrong_at: int | None = None,
    max_seq_len: int = 96,
    vocab_size: int = VOCAB,
) -> Path:
    """`script[p]` is the token at position p of every sequence; behind its end comes token 2 for ever."""
    folder.mkdir(parents=True, exist_ok=True)
    length = max_seq_len + draft_length + 2
    tokens = np.full(length, 2, np.int32)
    tokens[: len(script)] = script
    table = np.zeros((length, vocab_size), np.float32)
    table[np.arange(length - 1), tokens[1:]] = MARGIN
    steps = {"target": _target(folder, table, draft_length)}
    if draft_length:
        steps["observe"] = _observe(folder)
        steps["propose"] = _propose(folder, table, tokens, draft_length, wrong_at)
    (folder / WEIGHTS_FILE).write_bytes(encode(WeightsIndex(weights={})))
    manifest = Manifest(
        schema=SCHEMA,
        twostroke_version="0",
        pretrained_config={"architectures": ["Scripted"], "model_type": "scripted"},
        build_config=BuildConfig(
            max_seq_len=max_seq_len,
            max_draft_len=draft_length,
            tokens_per_page=4,
            vocab_size=vocab_size,
            eos_token_ids=(EOS,),
            bos_token_id=0,
        ),
        speculative=Speculative(
            method="dspark" if draft_length else "none", draft_len=draft_length, taps_width=1 if draft_length else 0
        ),
        steps=steps,
        state=(CONTEXT,) if draft_length else (),
        files={step.file: _record(folder / step.file) for step in steps.values()},
    )
    (folder / CONFIG_FILE).write_bytes(encode(manifest))
    return folder


def _target(folder: Path, table: np.ndarray, draft_length: int) -> Step:
    bindings = [
        Binding("token_ids", "int32", ("N",), "input"),
        Binding("positions", "int32", ("N",), "input"),
        Binding("slots", "int32", ("N",), "input"),
        Binding("row_start", "int32", ("R1",), "input"),
        Binding("request_slot", "int32", ("R",), "input"),
        Binding("page_table", "int32", ("S", "P"), "input"),
        Binding("logit_rows", "int32", ("M",), "input"),
        Binding("logits", "float32", ("M", table.shape[1]), "output"),
    ]
    nodes = [
        helper.make_node("Gather", ["positions", "logit_rows"], ["judged"]),
        helper.make_node("Gather", ["table", "judged"], ["logits"]),
    ]
    if draft_length:
        bindings.append(Binding("taps", "float32", ("N", 1), "output"))
        nodes += [
            helper.make_node("Cast", ["positions"], ["wide"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["wide", "one"], ["taps"]),
        ]
    return _step(folder, "target", nodes, bindings, {"table": table, "one": np.array([1], np.int64)})


def _observe(folder: Path) -> Step:
    bindings = [
        Binding("taps", "float32", ("N", 1), "input"),
        Binding("next_ids", "int32", ("N",), "input"),
        Binding("positions", "int32", ("N",), "input"),
        Binding("slots", "int32", ("N",), "input"),
        Binding("row_start", "int32", ("R1",), "input"),
        Binding(CONTEXT.name, "float32", ("C", 1), "state"),
        Binding(f"{CONTEXT.name}.next", "float32", ("C", 1), "output", alias=CONTEXT.name),
    ]
    nodes = [helper.make_node("Identity", [CONTEXT.name], [f"{CONTEXT.name}.next"])]
    return _step(folder, "observe", nodes, bindings, {})


def _propose(folder: Path, table: np.ndarray, tokens: np.ndarray, draft_length: int, wrong_at: int | None) -> Step:
    rows = ("R", draft_length)
    bindings = [
        Binding("anchor", "int32", ("R",), "input"),
        Binding("position", "int32", ("R",), "input"),
        Binding("slot", "int32", ("R",), "input"),
        Binding("valid_from", "int32", ("S",), "input"),
        Binding("inverse_temperature", "float32", ("R",), "input"),
        Binding("noise", "float32", (*rows, table.shape[1]), "input"),
        Binding("tokens", "int32", rows, "output"),
        Binding("logits", "float32", (*rows, table.shape[1]), "output"),
        Binding("confidence", "float32", rows, "output"),
    ]
    shift = np.zeros(draft_length, np.int32)
    if wrong_at is not None:
        shift[wrong_at] = 1
    constants = {
        "table": table,
        "script": tokens,
        "place": np.arange(draft_length, dtype=np.int32),
        "shift": shift,
        "one": np.array([1], np.int64),
        "step": np.array(1, np.int32),
        "vocab": np.array(table.shape[1], np.int32),
        "half": np.array(0.5, np.float32),
        "nothing": np.array(0, np.float32),
    }
    nodes = [
        helper.make_node("Unsqueeze", ["position", "one"], ["column"]),
        helper.make_node("Add", ["column", "place"], ["before"]),
        helper.make_node("Add", ["before", "step"], ["at"]),
        helper.make_node("Gather", ["script", "at"], ["right"]),
        helper.make_node("Add", ["right", "shift"], ["shifted"]),
        helper.make_node("Mod", ["shifted", "vocab"], ["tokens"]),
        helper.make_node("Gather", ["table", "before"], ["logits"]),
        helper.make_node("Cast", ["before"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["wide", "nothing"], ["flat"]),
        helper.make_node("Add", ["flat", "half"], ["confidence"]),
    ]
    return _step(folder, "propose", nodes, bindings, constants)


def _step(
    folder: Path, name: str, nodes: list[onnx.NodeProto], bindings: list[Binding], constants: dict[str, np.ndarray]
) -> Step:
    values = {each: helper.make_tensor_value_info(each.name, _TYPES[each.dtype], each.shape) for each in bindings}
    inputs = [value for each, value in values.items() if each.role != "output"]
    outputs = [value for each, value in values.items() if each.role == "output"]
    initializers = [numpy_helper.from_array(value, key) for key, value in constants.items()]
    graph = helper.make_graph(nodes, name, inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    file = f"{name}.portable.onnx"
    onnx.save(model, folder / file)
    return Step(name=name, engine="onnxruntime", stage="portable", file=file, bindings=tuple(bindings))


def _record(path: Path) -> FileRecord:
    data = path.read_bytes()
    return FileRecord(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
