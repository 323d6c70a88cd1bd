"""Every code of every format, bit by bit, and matrices and products made of them, in torch and under ONNX Runtime."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor

from twostroke.plugins.onnx_body import inline_bodies, to_onnx
from twostroke.plugins.quantised import reference
from twostroke.plugins.quantised.torch_op import DEQUANTISE_FP8, LINEAR_FP8

Array = np.ndarray
Function = Callable[..., Any]
ENGINES = ("torch", "onnxruntime")
ONE, UNIT = 0x38, 127  # 1.0 in e4m3 and in e8m0
BYTES = np.arange(256, dtype=np.uint8)


def bits_of_e4m3(code: int) -> int:
    """The fp32 bits of a code, NaN apart: its exponent rebiased from 7 to 127, three bits of mantissa moved up."""
    sign, exponent, mantissa = code >> 7 << 31, code >> 3 & 15, code & 7
    if exponent:
        return sign | (exponent + 120) << 23 | mantissa << 20
    if not mantissa:
        return sign
    top = mantissa.bit_length() - 1
    return sign | (top - 9 + 127) << 23 | (mantissa << 23 - top) & 0x7FFFFF


def bits_of_e2m1(code: int) -> int:
    sign, exponent, mantissa = code >> 3 << 31, code >> 1 & 3, code & 1
    if exponent:
        return sign | (exponent + 126) << 23 | mantissa << 22
    return sign | (126 << 23 if mantissa else 0)


def bits_of_e8m0(code: int) -> int:
    return code << 23 if code else 1 << 22  # 2^-127 is subnormal: half of the lowest normal number


def fp32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


E4M3 = np.array([fp32(bits_of_e4m3(code)) if code & 127 != 127 else np.nan for code in range(256)], np.float32)
E8M0 = np.array([*(fp32(bits_of_e8m0(code)) for code in range(255)), np.nan], np.float32)
E2M1 = np.array([fp32(bits_of_e2m1(code)) for code in range(16)], np.float32)


def assert_same_bits(found: Array, expected: Array) -> None:
    """Zeros with their sign; every NaN is as good as another."""
    assert found.dtype == expected.dtype == np.float32
    assert found.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    real = ~np.isnan(expected)
    np.testing.assert_array_equal(found.view(np.uint32)[real], expected.view(np.uint32)[real])


def compiled(function: Function, arguments: tuple[Tensor, ...]) -> Array:
    """`function` exported and run under ONNX Runtime."""

    class Alone(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return function(*tensors)

    proto = ir.serde.serialize_model(inline_bodies(to_onnx(torch.export.export(Alone(), arguments))))
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    (result,) = session.run(None, dict(zip(names, (t.numpy() for t in arguments), strict=True)))
    return np.asarray(result)


def evaluated(where: str, function: Function, *arrays: Array) -> Array:
    """What `function` gives in torch or under ONNX Runtime."""
    tensors = tuple(torch.from_numpy(array) for array in arrays)
    return np.asarray(function(*tensors).numpy()) if where == "torch" else compiled(function, tensors)


def by_hand(values: Array, scale: Array, rows: int, columns: int) -> Array:
    """values [O, K], float64, times the scale of each one's block."""
    blown_up = np.repeat(np.repeat(scale.astype(np.float64), rows, 0), columns, 1)
    return values.astype(np.float64) * blown_up[: values.shape[0], : values.shape[1]]


def test_the_tables_judged_by_are_those_of_another_library() -> None:
    assert_same_bits(E4M3, BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert_same_bits(E8M0, BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert_same_bits(E2M1, BYTES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32))


@pytest.mark.parametrize("where", ENGINES)
def test_every_e4m3_code_has_its_bits(where: str) -> None:
    found = evaluated(where, DEQUANTISE_FP8.overload, BYTES.reshape(1, 256), np.full((1, 2), UNIT, np.uint8))
    assert_same_bits(found[0], E4M3)


@pytest.mark.parametrize("where", ENGINES)
def test_every_e8m0_byte_has_its_bits(where: str) -> None:
    """256 blocks of ones, each with a scale of its own; the lowest is subnormal, the last one NaN."""
    codes = np.full((256 * 128, 1), ONE, np.uint8)
    found = evaluated(where, DEQUANTISE_FP8.overload, codes, BYTES[:, None].copy())
    assert_same_bits(found, np.repeat(E8M0, 128)[:, None])
    assert found[0, 0].view(np.uint32) == 1 << 22


@pytest.mark.parametrize("where", ENGINES)
def test_every_byte_of_fp4_has_its_two_values_low_nibble_first(where: str) -> None:
    found = evaluated(where, reference.dequantise_fp4, BYTES.reshape(1, 256), np.full((1, 16), UNIT, np.uint8))
    assert_same_bits(found.reshape(256, 2), np.stack([np.tile(E2M1, 16), np.repeat(E2M1, 16)], axis=1))


@pytest.mark.parametrize("where", ENGINES)
def test_every_product_of_a_code_and_a_scale_is_exact(where: str) -> None:
    """All 256 scales beside all codes of both formats: nothing is rounded, only the largest overflow."""
    pairs = np.stack([np.tile(E2M1, 16), np.repeat(E2M1, 16)], axis=1).ravel()
    with np.errstate(over="ignore"):
        eights, fours = ((E8M0.astype(np.float64)[:, None] * v).astype(np.float32) for v in (E4M3, pairs))
    codes = np.tile(BYTES, (256 * 128, 1))
    found = evaluated(where, DEQUANTISE_FP8.overload, codes, np.repeat(BYTES[:, None], 2, axis=1))
    assert_same_bits(found[::128], eights)
    assert_same_bits(found[127::128], eights)
    packed, scale = np.tile(BYTES, (256, 1)), np.repeat(BYTES[:, None], 16, axis=1)
    assert_same_bits(evaluated(where, reference.dequantise_fp4, packed, scale), fours)


@pytest.mark.parametrize("kind", ["e8m0", "float"])
@pytest.mark.parametrize(
    ("where", "shape"),
    [
        *(("torch", shape) for shape in [(128, 128), (130, 200), (256, 129), (1, 1), (127, 300), (384, 256)]),
        ("onnxruntime", (130, 300)),
    ],
)
def test_each_block_of_fp8_has_its_own_scale_and_the_last_may_be_short(
    where: str, shape: tuple[int, int], kind: str
) -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    scale = rng.integers(100, 150, blocks, dtype=np.uint8) if kind == "e8m0" else rng.random(blocks, dtype=np.float32)
    factor = E8M0[scale] if kind == "e8m0" else scale
    found = evaluated(where, DEQUANTISE_FP8.overload, codes, scale)
    assert_same_bits(found, by_hand(E4M3[codes], factor, 128, 128).astype(np.float32))


@pytest.mark.parametrize(
    ("where", "shape"),
    [*(("torch", shape) for shape in [(3, 64), (5, 40), (2, 2), (1, 98)]), ("onnxruntime", (5, 40))],
)
def test_each_group_of_fp4_has_its_own_scale_and_the_last_may_be_short(where: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(4)
    packed = rng.integers(0, 256, (shape[0], shape[1] // 2), dtype=np.uint8)
    scale = rng.integers(100, 150, (shape[0], -(-shape[1] // 32)), dtype=np.uint8)
    values = np.stack([E2M1[packed & 15], E2M1[packed >> 4]], axis=2).reshape(shape)
    found = evaluated(where, reference.dequantise_fp4, packed, scale)
    assert_same_bits(found, by_hand(values, E8M0[scale], 1, 32).astype(np.float32))


@pytest.mark.parametrize("tokens", [2, 3, 4, 5])
def test_the_linear_is_the_product_with_the_matrix_dequantised_first(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    codes = rng.integers(0, 127, (260, 300), dtype=np.uint8) | rng.integers(0, 2, (260, 300), dtype=np.uint8) << 7
    scale = rng.integers(110, 120, (3, 3), dtype=np.uint8)
    x = rng.standard_normal((tokens, 300), dtype=np.float32)
    matrix = by_hand(E4M3[codes], E8M0[scale], 128, 128)
    expected = x.astype(np.float64) @ matrix.T
    found = evaluated("torch", LINEAR_FP8.overload, x, codes, scale)
    assert np.abs(found - expected).max() < 1e-6 * (np.abs(x) @ np.abs(matrix.T)).max()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_spoils_its_own_output_and_no_other(code: int) -> None:
    codes = np.full((5, 140), ONE, np.uint8)
    codes[3, 139] = code
    found = evaluated(
        "torch", LINEAR_FP8.overload, np.ones((2, 140), np.float32), codes, np.full((1, 2), UNIT, np.uint8)
    )
    assert np.isnan(found[:, 3]).all()
    np.testing.assert_array_equal(np.delete(found, 3, axis=1), 140.0)
