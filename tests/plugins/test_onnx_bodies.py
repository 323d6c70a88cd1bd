"""Every op's ONNX body, run alone under ONNX Runtime, against its reference on fresh inputs of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor
from torch.export import Dim

from twostroke.plugins.catalogue import CATALOGUE
from twostroke.plugins.nsa import index_keys
from twostroke.plugins.onnx_body import inline_bodies, to_onnx
from twostroke.plugins.op import NAMESPACE, Op
from twostroke.tests.plugins.flat_inputs import Layout, layout, normal

Values = dict[str, Tensor]
FIRST = layout((1, 0, 12), (2, 17, 6), padding=2, dead=2)  # what a graph is traced with
FRESH = layout((3, 5, 9), (1, 30, 1), (2, 11, 6), padding=4, dead=1)  # what it is run with
STEP = {"positions": ("N",), "slots": ("N",), "row_start": ("R1",)}


def step(where: Layout) -> Values:
    return {"positions": where.positions, "slots": where.slots, "row_start": where.row_start}


def table(seed: int) -> Tensor:
    order = torch.randperm(11, generator=torch.Generator().manual_seed(seed)) + 1
    return torch.cat([torch.zeros(1, 3, dtype=torch.int64), order[:9].reshape(3, 3)])


def compressor(overlap: bool) -> Callable[[Layout, int], Values]:
    def values(where: Layout, seed: int) -> Values:
        n, width, ring = where.tokens, 12 if overlap else 6, 12
        return {
            "kv": normal(seed, n, width),
            "gate": normal(seed + 1, n, width),
            "ape": normal(7, 4 if overlap else 8, width),
            "raw": normal(seed + 2, 4 * ring, 2 * width),
            **step(where),
            "closing": where.closing(4 if overlap else 8),
        }

    return values


def attention(where: Layout, seed: int) -> Values:
    n = where.tokens
    return {"q": normal(seed, n, 3, 8), "kv": normal(seed + 1, n, 8), "sink": normal(seed + 2, 3)}


def window(where: Layout, seed: int) -> Values:
    return {**attention(where, seed), "window_rows": normal(seed + 3, 4 * 13, 8), **step(where)}


def hca(where: Layout, seed: int) -> Values:
    given = attention(where, seed)
    return {
        "q": given["q"],
        "kv": given["kv"],
        "entry": normal(seed + 4, len(where.closing(4)), 8),
        "sink": given["sink"],
        "window_rows": normal(seed + 3, 4 * 13, 8),
        "hca_rows": normal(seed + 5, 4 * 9, 8),
        **step(where),
        "closing": where.closing(4),
    }


def csa(where: Layout, seed: int) -> Values:
    n, given = where.tokens, attention(where, seed)
    gate = normal(seed + 7, n, 2)
    gate[::3] = 0.0  # all scores of these rows tie
    return {
        "q": given["q"],
        "kv": given["kv"],
        "entry": normal(seed + 4, len(where.closing(4)), 8),
        "index_q": normal(seed + 6, n, 2, 4),
        "index_weight": gate,
        "index_entry": normal(seed + 8, len(where.closing(4)), 4),
        "sink": given["sink"],
        "window_rows": normal(seed + 3, 4 * 13, 8),
        "compressed_rows": normal(seed + 5, 12 * 4, 8),
        "index_rows": normal(seed + 9, 12 * 4, 4),
        **step(where),
        "closing": where.closing(4),
        "page_table": table(seed),
    }


def mla(where: Layout, seed: int) -> Values:
    n, gate = where.tokens, normal(seed + 7, where.tokens, 2)
    gate[::3] = 0.0  # all scores of these rows tie
    return {
        "q": normal(seed, n, 3, 8),
        "row": normal(seed + 1, n, 8),
        "index_q": normal(seed + 6, n, 2, 4),
        "index_weight": gate,
        "index_row": normal(seed + 8, n, 4),
        "latent_rows": normal(seed + 5, 12 * 12, 8),
        "index_rows": normal(seed + 9, 12 * 12, 4),
        "positions": where.positions,
        "slots": where.slots,
        "page_table": table(seed),
    }


def mla_fp8_index(where: Layout, seed: int) -> Values:
    given = mla(where, seed)
    empty = torch.zeros(12, 12 * 8, dtype=torch.uint8)
    pages = index_keys.write_pages(empty, torch.arange(12 * 12), given.pop("index_rows"), 12)
    values = list(given.items())
    values.insert(list(CATALOGUE["nsa_mla_fp8_index"].tensors).index("index_pages"), ("index_pages", pages))
    return dict(values)


def block(where: Layout, seed: int) -> Values:
    requests = 3 if where is FIRST else 5
    return {
        "q": normal(seed, requests * 5, 3, 8),
        "kv": normal(seed + 1, requests * 5, 8),
        "sink": normal(seed + 2, 3),
        "context_rows": normal(seed + 3, 6 * 13, 8),
        "position": torch.tensor([20, 1, 0, 7, 13])[:requests],
        "slot": torch.tensor([2, 5, 0, 1, 3])[:requests],
        "valid_from": torch.tensor([0, 3, 0, 0, 10, 0]),
    }


def hyper(where: Layout, seed: int) -> Values:
    return {
        "streams": normal(seed, where.tokens, 3, 4),
        "fn": normal(seed + 1, 15, 12),
        "base": normal(seed + 2, 15),
        "scale": normal(seed + 3, 3),
    }


def hyper_post(where: Layout, seed: int) -> Values:
    n = where.tokens
    return {
        "y": normal(seed, n, 4),
        "streams": normal(seed + 1, n, 3, 4),
        "post": normal(seed + 2, n, 3),
        "comb": normal(seed + 3, n, 3, 3),
    }


def hyper_head(where: Layout, seed: int) -> Values:
    return {
        "streams": normal(seed, where.tokens, 3, 4),
        "fn": normal(seed + 1, 3, 12),
        "base": normal(seed + 2, 3),
        "scale": normal(seed + 3, 1),
    }


def route(where: Layout, seed: int) -> Values:
    gate = normal(seed + 1, 6, 4).round()
    gate[4] = gate[2]  # two experts tie on every row: with whole numbers every matrix kernel agrees on that
    return {"x": normal(seed, where.tokens, 4).round(), "gate": gate, "bias": torch.zeros(6)}


def route_grouped(where: Layout, seed: int) -> Values:
    gate = normal(seed + 1, 8, 4).round()
    gate[2:4] = gate[:2]  # the first two groups tie on every row, the third wins some
    return {"x": normal(seed, where.tokens, 4).round(), "gate": gate, "bias": torch.zeros(8)}


def route_hash(where: Layout, seed: int) -> Values:
    g = torch.Generator().manual_seed(seed)
    return {
        "x": normal(seed, where.tokens, 4),
        "gate": normal(seed + 1, 6, 4),
        "token_ids": torch.randint(0, 9, (where.tokens,), generator=g),
        "experts_of_token": torch.stack([torch.randperm(6, generator=g)[:2] for _ in range(9)]).int(),
    }


def experts(where: Layout, seed: int) -> Values:
    g = torch.Generator().manual_seed(seed)
    n = where.tokens
    return {
        "x": normal(seed, n, 4),
        "ids": torch.stack([torch.randperm(6, generator=g)[:2] for _ in range(n)]),
        "weights": torch.rand(n, 2, generator=g),
        "w1": normal(seed + 1, 6, 5, 4),
        "w2": normal(seed + 2, 6, 4, 5),
        "w3": normal(seed + 3, 6, 5, 4),
    }


def markov(kind: str) -> Callable[[Layout, int], Values]:
    def values(where: Layout, seed: int) -> Values:
        requests = 3 if where is FIRST else 5
        base = normal(seed, requests, 4, 9)
        w1 = normal(seed + 2, 9, 2)
        if kind == "vanilla":
            base[0] = 0.0  # with a zero embedding of its anchor, the first pick is a tie of all tokens
            w1[0] = 0.0
        hidden = {} if kind == "vanilla" else {"hidden": normal(seed + 1, requests, 4, 6)}
        joined = {
            "vanilla": {},
            "gated": {"gate_weight": normal(seed + 4, 2, 8), "gate_bias": normal(seed + 6, 2)},
            "rnn": {"joint_weight": normal(seed + 4, 6, 10), "joint_bias": normal(seed + 6, 6)},
        }
        return {
            "base_logits": base,
            **hidden,
            "anchor": torch.tensor([0, 3, 8, 1, 1])[:requests],
            "w1": w1,
            "w2": normal(seed + 3, 9, 2),
            **joined[kind],
            "inverse_temperature": torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0])[:requests],
            "noise": torch.zeros(requests, 4, 9) if seed % 2 else normal(seed + 5, requests, 4, 9) * torch.eye(4, 9),
        }

    return values


# op, input values, dynamic dimensions by input, attributes in the op's order
CASES: dict[str, tuple[str, Callable[[Layout, int], Values], Mapping[str, tuple[Any, ...]], tuple[Any, ...]]] = {
    "all_reduce": ("all_reduce", lambda where, seed: {"x": normal(seed, where.tokens, 5)}, {"x": ("N",)}, ()),
    "compress-csa": (
        "compress",
        compressor(overlap=True),
        {"kv": ("N",), "gate": ("N",), "raw": ("X",), **STEP, "closing": ("C",)},
        (4, True, 12),
    ),
    "compress-hca": (
        "compress",
        compressor(overlap=False),
        {"kv": ("N",), "gate": ("N",), "raw": ("X",), **STEP, "closing": ("C",)},
        (8, False, 12),
    ),
    "nsa_window": (
        "nsa_window",
        window,
        {"q": ("N",), "kv": ("N",), "window_rows": ("X",), **STEP},
        (8, 13, 0.3),
    ),
    "nsa_hca": (
        "nsa_hca",
        hca,
        {
            "q": ("N",),
            "kv": ("N",),
            "entry": ("C",),
            "window_rows": ("X",),
            "hca_rows": ("Y",),
            **STEP,
            "closing": ("C",),
        },
        (8, 13, 4, 9, 0.3),
    ),
    "nsa_csa": (
        "nsa_csa",
        csa,
        {
            **dict.fromkeys(("q", "kv", "index_q", "index_weight"), ("N",)),
            **dict.fromkeys(("entry", "index_entry", "closing"), ("C",)),
            "window_rows": ("X",),
            "compressed_rows": ("Y",),
            "index_rows": ("Z",),
            **STEP,
            "page_table": ("S", "P"),
        },
        (8, 13, 4, 4, 3, 0.3),
    ),
    "nsa_mla": (
        "nsa_mla",
        mla,
        {
            **dict.fromkeys(("q", "row", "index_q", "index_weight", "index_row", "positions", "slots"), ("N",)),
            "latent_rows": ("X",),
            "index_rows": ("Y",),
            "page_table": ("S", "P"),
        },
        (6, 12, 5, 0.3),
    ),
    "nsa_mla_fp8_index": (
        "nsa_mla_fp8_index",
        mla_fp8_index,
        {
            **dict.fromkeys(("q", "row", "index_q", "index_weight", "index_row", "positions", "slots"), ("N",)),
            "latent_rows": ("X",),
            "index_pages": ("Y",),
            "page_table": ("S", "P"),
        },
        (6, 12, 5, 0.3),
    ),
    "nsa_block": (
        "nsa_block",
        block,
        {"q": ("5R",), "kv": ("5R",), "context_rows": ("X",), "position": ("R",), "slot": ("R",), "valid_from": ("S",)},
        (8, 13, 0.3),
    ),
    "hc_pre": ("hc_pre", hyper, {"streams": ("N",)}, (5, 1e-6, 1e-6)),
    "hc_post": ("hc_post", hyper_post, dict.fromkeys(("y", "streams", "post", "comb"), ("N",)), ()),
    "hc_head": ("hc_head", hyper_head, {"streams": ("N",)}, (1e-6, 1e-6)),
    "moe_route": ("moe_route", route, {"x": ("N",)}, (3, 1.5)),
    "moe_route_grouped": ("moe_route_grouped", route_grouped, {"x": ("N",)}, (4, 2, 3, 2.5)),
    "moe_route_hash": ("moe_route_hash", route_hash, {"x": ("N",), "token_ids": ("N",)}, (1.5,)),
    "moe_experts": ("moe_experts", experts, {"x": ("N",), "ids": ("N",), "weights": ("N",)}, (2.0,)),
    "moe_experts-unclamped": (
        "moe_experts",
        experts,
        {"x": ("N",), "ids": ("N",), "weights": ("N",)},
        (float("inf"),),
    ),
    "markov_picks": (
        "markov_picks",
        markov("vanilla"),
        dict.fromkeys(("base_logits", "anchor", "inverse_temperature", "noise"), ("R",)),
        (),
    ),
    **{
        f"markov_picks_{kind}": (
            f"markov_picks_{kind}",
            markov(kind),
            dict.fromkeys(("base_logits", "hidden", "anchor", "inverse_temperature", "noise"), ("R",)),
            (),
        )
        for kind in ("gated", "rnn")
    },
}


class Alone(torch.nn.Module):
    """One call of an op."""

    def __init__(self, op: Op, attributes: tuple[Any, ...]) -> None:
        super().__init__()
        self.op, self.attributes = op, attributes

    def forward(self, *tensors: Tensor) -> Any:
        return self.op.overload(*tensors, *self.attributes)


def graphs(case: str) -> tuple[ir.Model, ir.Model]:
    """The op as an opaque node and as its body."""
    name, make, dynamic, attributes = CASES[case]
    values = make(FIRST, 100)
    assert tuple(values) == CATALOGUE[name].tensors
    base = {letter: Dim(letter, min=2, max=1 << 20) for dims in dynamic.values() for letter in dims if letter != "5R"}
    shapes = tuple(
        {axis: 5 * base["R"] if letter == "5R" else base[letter] for axis, letter in enumerate(dynamic.get(n, ()))}
        for n in values
    )
    program = torch.export.export(Alone(CATALOGUE[name], attributes), tuple(values.values()), dynamic_shapes=(shapes,))
    opaque = to_onnx(program)
    return opaque, inline_bodies(opaque)


def test_every_op_has_a_case() -> None:
    assert {case[0] for case in CASES.values()} == set(CATALOGUE)


@pytest.mark.parametrize("case", CASES)
def test_the_body_computes_what_the_reference_does(case: str) -> None:
    name, make, _, attributes = CASES[case]
    opaque, body = graphs(case)
    assert [node.domain for node in opaque.graph if node.domain] == [NAMESPACE]
    proto = ir.serde.serialize_model(body)
    onnx.checker.check_model(proto)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for where, seed in ((FRESH, 201), (FRESH, 302), (FIRST, 403)):
        values = make(where, seed)
        feeds = {entry.name: value.numpy() for entry, value in zip(session.get_inputs(), values.values(), strict=True)}
        found = session.run(None, feeds)
        expected = CATALOGUE[name].reference(*values.values(), *attributes)
        expected = expected if isinstance(expected, tuple) else (expected,)
        assert len(found) == len(expected) == CATALOGUE[name].outputs
        for i, (ours, reference) in enumerate(zip(found, expected, strict=True)):
            ours, reference = real_rows(name, i, where, attributes, torch.from_numpy(ours), reference)
            if reference.is_floating_point():
                torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)
            else:
                np.testing.assert_array_equal(ours, reference)


def real_rows(
    name: str, output: int, where: Layout, attributes: tuple[Any, ...], found: Tensor, expected: Tensor
) -> tuple[Tensor, Tensor]:
    """Without what is scratch: rows of slot 0 and fillers, and in memory row 0, which several tokens write."""
    if name in ("compress", "nsa_window", "nsa_hca", "nsa_csa", "nsa_mla", "nsa_mla_fp8_index"):
        if output:
            keep = torch.arange(len(expected)) > 0
        else:
            keep = where.closing(attributes[0]) >= 0 if name == "compress" else where.slots > 0
        return found[keep], expected[keep]
    return found, expected


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_the_torch_op_is_the_reference_and_tracing_sees_its_shapes(name: str) -> None:
    """Eager calls give the reference's values; the shape function agrees with them in shape and dtype."""
    case = next(case for case, (op, *_) in CASES.items() if op == name)
    _, make, _, attributes = CASES[case]
    values = list(make(FRESH, 11).values())
    op = CATALOGUE[name]
    found, expected = op.overload(*values, *attributes), op.reference(*values, *attributes)
    assert callable(op.shapes)
    shapes = op.shapes(*values, *attributes)
    for ours, reference, shape in zip(
        *(x if isinstance(x, tuple) else (x,) for x in (found, expected, shapes)), strict=True
    ):
        torch.testing.assert_close(ours, reference, rtol=0, atol=0)
        assert shape.shape == reference.shape
        assert shape.dtype == reference.dtype


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_an_op_never_hands_back_its_argument(name: str) -> None:
    """A result that shares memory with an input would be updated behind its owner's back."""
    case = next(case for case, (op, *_) in CASES.items() if op == name)
    _, make, _, attributes = CASES[case]
    values = list(make(FIRST, 12).values())
    results = CATALOGUE[name].overload(*values, *attributes)
    addresses = {value.untyped_storage().data_ptr() for value in values}
    for result in results if isinstance(results, tuple) else (results,):
        assert result.untyped_storage().data_ptr() not in addresses
