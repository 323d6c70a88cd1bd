"""Experts as stored against numpy that dequantises first, in torch and as a Loop under ONNX Runtime."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor
from torch.export import Dim

from twostroke.plugins.moe.reference import picked_experts
from twostroke.plugins.moe.torch_op import MOE_EXPERTS_FP4, MOE_EXPERTS_FP8
from twostroke.plugins.onnx_body import inline_bodies, to_onnx
from twostroke.plugins.op import Op
from twostroke.plugins.quantised.reference import dequantise_fp8

Array = np.ndarray
E, D, F, K, LIMIT = 7, 140, 130, 2, 2.0  # the last blocks of both formats are short
FORMS = ("fp4", "fp8")
FOURS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
OPS = {"fp4": MOE_EXPERTS_FP4, "fp8": MOE_EXPERTS_FP8}
Banks = dict[str, Array]


def banks(form: str) -> Banks:
    """Codes and scales of w1, w2 and w3; e8m0 scales with fp4, fp32 ones with fp8."""
    rng, made = np.random.default_rng(5), {}
    for name, rows, columns in (("w1", F, D), ("w2", D, F), ("w3", F, D)):
        if form == "fp4":
            made[name] = rng.integers(0, 256, (E, rows, columns // 2), dtype=np.uint8)
            made[f"{name}_scale"] = rng.integers(120, 126, (E, rows, -(-columns // 32)), dtype=np.uint8)
        else:
            made[name] = rng.integers(0, 120, (E, rows, columns), dtype=np.uint8)
            made[name] |= rng.integers(0, 2, made[name].shape, dtype=np.uint8) << 7
            made[f"{name}_scale"] = rng.random((E, 2, 2), dtype=np.float32) * np.float32(2**-8)
    return made


def matrices(form: str, codes: Array, scale: Array) -> Array:
    """float64 [E, O, K]."""
    if form == "fp4":
        values = np.stack([FOURS[codes & 15], FOURS[codes >> 4]], axis=-1).reshape(*codes.shape[:2], -1)
        return values * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=2)[:, :, : values.shape[2]]
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    spread = np.repeat(np.repeat(scale.astype(np.float64), 128, axis=1), 128, axis=2)
    return values * spread[:, : values.shape[1], : values.shape[2]]


def by_hand(form: str, x: Array, ids: Array, weights: Array, stored: Banks) -> Array:
    w1, w2, w3 = (matrices(form, stored[name], stored[f"{name}_scale"]) for name in ("w1", "w2", "w3"))
    out = np.zeros(x.shape)
    for n, row in enumerate(x.astype(np.float64)):
        for e, share in zip(ids[n], weights[n], strict=True):
            gate, up = np.minimum(w1[e] @ row, LIMIT), np.clip(w3[e] @ row, -LIMIT, LIMIT)
            out[n] += share * (w2[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def tokens(count: int, seed: int = 0) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(count)])
    return rng.standard_normal((count, D), dtype=np.float32), ids, rng.random((count, K), dtype=np.float32)


def graph(op: Op, stored: Banks, layers: int = 1) -> ir.Model:
    """`layers` calls one upon the other over the same banks, bodies inlined."""

    class Stack(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            x, *rest = tensors
            for _ in range(layers):
                x = op.overload(x, *rest, LIMIT)
            return x

    rows = Dim("N", min=2, max=1 << 20)
    arguments = tuple(torch.from_numpy(array) for array in (*tokens(9), *stored.values()))
    shapes = tuple({0: rows} if i < 3 else {} for i in range(len(arguments)))
    return inline_bodies(to_onnx(torch.export.export(Stack(), arguments, dynamic_shapes=(shapes,))))


def session(model: ir.Model, profile: Path | None = None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    proto = ir.serde.serialize_model(model).SerializeToString()
    return ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


def run_session(engine: ort.InferenceSession, *arrays: Array) -> Array:
    names = [value.name for value in engine.get_inputs()]
    return np.asarray(engine.run(None, dict(zip(names, arrays, strict=True)))[0])


Case = tuple[str, Banks, Callable[..., Array]]


@pytest.fixture(scope="module", params=[(form, where) for form in FORMS for where in ("torch", "onnxruntime")])
def case(request: pytest.FixtureRequest) -> Case:
    """Form, banks, and the op somewhere."""
    form, where = request.param
    stored, op = banks(form), OPS[form]
    if where == "torch":
        return form, stored, lambda *arrays: op.overload(*map(torch.from_numpy, arrays), LIMIT).numpy()
    engine = session(graph(op, stored))
    return form, stored, lambda *arrays: run_session(engine, *arrays)


def assert_close(found: Array, expected: Array) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_the_sum_is_that_of_the_experts_dequantised_first(case: Case, count: int) -> None:
    form, stored, run = case
    given = tokens(count, seed=count)
    assert_close(run(*given, *stored.values()), by_hand(form, *given, stored))


@pytest.mark.parametrize("picks", [[[3, 3], [3, 3]], [[6, 0], [0, 6]], [[5, 5], [1, 5], [1, 1]]])
def test_an_expert_picked_several_times_counts_each_time(case: Case, picks: list[list[int]]) -> None:
    form, stored, run = case
    x, _, weights = tokens(len(picks), seed=8)
    assert_close(run(x, np.array(picks), weights, *stored.values()), by_hand(form, x, np.array(picks), weights, stored))


def test_an_expert_spoils_the_rows_that_picked_it_and_no_others(case: Case) -> None:
    """First all that nobody picked consist of NaN, codes in fp8, scales in both; then one that two rows picked."""
    form, stored, run = case
    x, _, weights = tokens(3, seed=9)
    ids = np.array([[4, 2], [2, 5], [5, 4]])
    spoilt = {name: array.copy() for name, array in stored.items()}
    others = [e for e in range(E) if e not in ids]
    for array in spoilt.values():
        array[others] = 0xFF if array.dtype == np.uint8 else np.nan
    np.testing.assert_array_equal(run(x, ids, weights, *spoilt.values()), run(x, ids, weights, *stored.values()))
    spoilt["w2_scale"][4] = 0xFF if form == "fp4" else np.nan
    assert np.isnan(run(x, ids, weights, *spoilt.values())).any(axis=1).tolist() == [True, False, True]


def test_only_picked_experts_are_dequantised_each_once_in_ascending_order() -> None:
    stored, seen = banks("fp8"), []

    def noting(codes: Tensor, scale: Tensor) -> Tensor:
        seen.append(codes)
        return dequantise_fp8(codes, scale)

    x, ids, weights, *rest = (torch.from_numpy(array) for array in (*tokens(3), *stored.values()))
    ids = torch.tensor([[5, 2], [2, 2], [0, 5]])
    picked_experts(noting, x, ids, weights, rest, LIMIT)
    expected = [rest[bank][e] for e in (0, 2, 5) for bank in (0, 2, 4)]
    assert len(seen) == len(expected)
    assert all(torch.equal(codes, one) for codes, one in zip(seen, expected, strict=True))


def test_a_row_does_not_depend_on_how_others_were_routed(case: Case) -> None:
    _, stored, run = case
    x, ids, weights = tokens(5, seed=10)
    other = ids.copy()
    other[1:] = (ids[1:] + 3) % E
    whole = run(x, ids, weights, *stored.values())
    np.testing.assert_array_equal(run(x, other, weights, *stored.values())[0], whole[0])


@pytest.mark.parametrize("form", FORMS)
def test_the_loop_turns_once_a_picked_expert_and_holds_one_matrix_at_a_time(form: str, tmp_path: Path) -> None:
    """By ONNX Runtime's own profile: no node's result is larger than the indices of one matrix."""
    stored = banks(form)
    engine = session(graph(OPS[form], stored), tmp_path / "profile")
    x, _, weights = tokens(4)
    run_session(engine, x, np.array([[1, 6], [6, 1], [3, 1], [6, 6]]), weights, *stored.values())
    events = [e for e in json.loads(Path(engine.end_profiling()).read_text()) if "output_size" in e.get("args", {})]
    turns = [
        e for e in events if e["args"]["op_name"] == "Gather" and e["args"]["output_type_shape"] == [{"int64": []}]
    ]
    assert len(turns) == 3
    padded = -(-F // 128) * 128 * -(-D // 128) * 128
    assert F * D * 4 <= max(int(e["args"]["output_size"]) for e in events) <= max(F * D * 8, padded * 4)


@pytest.mark.parametrize("form", FORMS)
def test_bodies_of_several_layers_share_no_name(form: str) -> None:
    stored = banks(form)
    model = graph(OPS[form], stored, layers=3)
    loops = [node for node in model.graph if node.op_type == "Loop"]
    assert len(loops) == 3
    names = [v.name for v in model.graph.inputs]
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        names += [value.name for value in node.outputs]
        if node.op_type == "Loop":
            names += [value.name for value in node.attributes["body"].as_graph().inputs]
    assert len(set(names)) == len(names)
    onnx.checker.check_model(ir.serde.serialize_model(model))
    x, ids, weights = tokens(3)
    expected = x.astype(np.float64)
    for _ in range(3):
        expected = by_hand(form, expected, ids, weights, stored)
    assert (
        np.abs(run_session(session(model), x, ids, weights, *stored.values()) - expected).max()
        < 1e-4 * np.abs(expected).max()
    )
