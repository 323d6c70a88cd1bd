"""Index keys in fp8: values, scales and bytes against numpy and against torch's own cast, in torch and as a graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor
from torch.export import Dim

from twostroke.plugins.nsa import reference
from twostroke.plugins.nsa.index_keys import e4m3, hadamard, page_layout, quantised, read_pages, row_scales, write_pages
from twostroke.plugins.nsa.torch_op import NSA_MLA, NSA_MLA_FP8_INDEX
from twostroke.plugins.onnx_body import inline_bodies, to_onnx
from twostroke.tests.plugins.flat_inputs import normal
from twostroke.tests.plugins.nsa import fp8_reference

CODES = torch.arange(256, dtype=torch.uint8)
HELD = CODES.view(torch.float8_e4m3fn).float()[:127]  # every size e4m3 has
SIZES = [(16, 16), (128, 64)]  # features of a key, tokens of a page
Array = np.ndarray


def neighbours(values: Tensor) -> Tensor:
    """Each value and the fp32 numbers beside it, of both signs."""
    around = torch.cat(
        [torch.nextafter(values, torch.tensor(-torch.inf)), values, torch.nextafter(values, torch.tensor(torch.inf))]
    )
    return torch.cat([around, -around])


HARD = torch.cat(
    [
        neighbours(HELD),
        neighbours((HELD[1:] + HELD[:-1]) / 2),  # ties
        neighbours(torch.tensor([448.0, 464.0, 480.0, 1e30, 2.0**-10, 2.0**-11, 1e-30, 1e-45])),
        torch.tensor([0.0, -0.0, torch.inf, -torch.inf]),
        normal(0, 200_000) * torch.exp2(torch.randint(-12, 10, (200_000,), generator=torch.Generator().manual_seed(1))),
    ]
)


def test_rounding_is_torchs_own_cast_to_the_last_tie() -> None:
    """Values and codes, for every value, every tie and both neighbours of each; above 448 it is 448."""
    rounded, code = e4m3(HARD)
    cast = HARD.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(code, cast.view(torch.uint8).float())
    assert torch.equal(rounded, cast.float())
    np.testing.assert_array_equal(fp8_reference.codes(HARD.numpy()), cast.view(torch.uint8).numpy())
    assert e4m3(torch.tensor([torch.nan]))[1].item() == 127


def test_every_code_stands_for_what_torch_reads_in_it() -> None:
    """One page of 256 keys of one feature, the code of each being its number."""
    page = torch.cat([CODES, torch.tensor([0, 0, 128, 63], dtype=torch.uint8).repeat(256)])[None]
    key, scale = read_pages(page, torch.zeros(1, 1, dtype=torch.int64), 256)
    assert torch.equal(scale, torch.ones(1, 256))
    torch.testing.assert_close(key[0, :, 0], CODES.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)


def test_a_scale_is_the_lowest_power_of_two_that_holds_the_row() -> None:
    """At 448 * 2^k and both fp32 neighbours of it, from the floor to the largest number there is."""
    boundaries = torch.tensor([448 * 2.0**k for k in range(-22, 120)])
    largest = torch.cat([neighbours(boundaries).abs(), torch.tensor([0.0, 1e-45, 1e-5, 1e-4, 3.4e38])])
    rows = torch.stack([largest * 0.25, -largest], dim=1)
    scale, exponent = row_scales(rows)
    expected = fp8_reference.scales(rows.double().numpy())
    np.testing.assert_array_equal(scale.double().numpy(), expected)
    np.testing.assert_array_equal(2.0 ** exponent.double().numpy(), expected)
    assert scale.min() == 2.0**-22, "the floor's"
    assert scale.max() == 2.0**120
    assert (rows.abs().amax(-1).double() <= 448 * scale.double()).all()
    # The published kernel multiplies by 1/448 in fp32 and looks at the bits: never another scale.
    bits = (largest.clamp(min=1e-4) * torch.tensor(1 / 448)).view(torch.int32)
    assert torch.equal(exponent.int(), (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).int())


@pytest.mark.parametrize("size", [16, 128])
def test_rotation_is_sylvesters_and_leaves_products_alone(size: int) -> None:
    matrix = hadamard(size)
    np.testing.assert_allclose(matrix, fp8_reference.hadamard(size), rtol=1e-7)
    q, k, weight = normal(1, 9, 4, size), normal(2, 9, 30, size), normal(3, 9, 4)
    plain = reference.indexer_scores(q, weight, k)
    rotated = reference.indexer_scores(q @ matrix, weight, k @ matrix)
    assert (rotated - plain).abs().max() < 1e-4 * plain.std()


def test_a_page_of_the_release_is_8448_bytes() -> None:
    assert page_layout(128) == "indexk_132"
    assert len(fp8_reference.page(np.zeros((64, 128)))) == 8448


# The op: what it writes and what it reads, in torch and under ONNX Runtime.

HEADS, INDEX_HEADS, LATENT, WIDTH, TOP_K, PAGES, SLOTS = 2, 4, 6, 8, 5, 7, 4
Op = Callable[..., tuple[Array, ...]]


def given(size: int, tokens: int, counts: tuple[int, ...], start: int, seed: int = 0) -> dict[str, Array]:
    """Inputs of a step with `counts` rows for slots 1, 2, .. from position `start` on; memory is full of 0xFF or NaN,
    pages are dealt at random."""
    n = sum(counts)
    order = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(seed))[:6] + 1
    return {
        "q": normal(seed, n, HEADS, WIDTH).numpy(),
        "row": normal(seed + 1, n, WIDTH).numpy(),
        "index_q": normal(seed + 2, n, INDEX_HEADS, size).numpy(),
        "index_weight": normal(seed + 3, n, INDEX_HEADS).numpy(),
        "index_row": normal(seed + 4, n, size).numpy(),
        "latent_rows": np.full((PAGES * tokens, WIDTH), np.nan, np.float32),
        "index_pages": np.full((PAGES, tokens * (size + 4)), 0xFF, np.uint8),
        "positions": np.concatenate([np.arange(start, start + count) for count in counts]),
        "slots": np.repeat(np.arange(1, len(counts) + 1), counts),
        "page_table": torch.cat([torch.zeros(2, dtype=torch.int64), order]).reshape(SLOTS, 2).numpy(),
    }


@pytest.fixture(scope="module", params=[(where, *sizes) for where in ("torch", "onnxruntime") for sizes in SIZES])
def case(request: pytest.FixtureRequest) -> tuple[Op, int, int]:
    """The op somewhere, with keys of so many features in pages of so many tokens."""
    where, size, tokens = request.param
    attributes = (LATENT, tokens, TOP_K, 0.3)
    example = given(size, tokens, (5, 4), 0)
    if where == "torch":

        def eager(**inputs: Array) -> tuple[Array, ...]:
            tensors = [torch.from_numpy(array) for array in inputs.values()]
            return tuple(out.numpy() for out in reference.nsa_mla_fp8_index(*tensors, *attributes))

        return eager, size, tokens

    class Alone(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
            return NSA_MLA_FP8_INDEX.overload(*tensors, *attributes)  # type: ignore[no-any-return]

    rows, latent, pages = (Dim(name, min=2, max=1 << 20) for name in ("N", "X", "Y"))
    dynamic = {"latent_rows": latent, "index_pages": pages, "page_table": None}
    shapes = tuple({0: dim} if (dim := dynamic.get(name, rows)) else {} for name in example)
    tensors = tuple(torch.from_numpy(array) for array in example.values())
    program = torch.export.export(Alone(), tensors, dynamic_shapes=(shapes,))
    proto = ir.serde.serialize_model(inline_bodies(to_onnx(program)))
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def compiled(**inputs: Array) -> tuple[Array, ...]:
        return tuple(session.run(None, dict(zip(names, inputs.values(), strict=True))))

    return compiled, size, tokens


def test_a_step_writes_the_bytes_of_its_own_keys_and_no_others(case: tuple[Op, int, int]) -> None:
    """Byte for byte the page numpy writes; rows hard to round, of all magnitudes, and an all-zero one among them."""
    op, size, tokens = case
    inputs = given(size, tokens, (tokens + 3, 2), start=0)
    keys = inputs["index_row"]
    keys *= np.exp2(np.arange(len(keys)) % 37 - 20, dtype=np.float32)[:, None]
    hard = HARD[torch.isfinite(HARD) & (HARD.abs() <= 448)].numpy()
    keys[2, : size - 1], keys[2, size - 1] = hard[: size - 1], 448.0
    keys[3, : size - 1], keys[3, size - 1] = hard[400 : 400 + size - 1], 448.0
    keys[5] = 0.0
    keys[6] *= 1e20
    pages = op(**inputs)[2]
    expected = inputs["index_pages"].copy()
    for slot, mine in ((1, keys[: tokens + 3]), (2, keys[tokens + 3 :])):
        for at, row in enumerate(mine):
            page = expected[inputs["page_table"][slot, at // tokens]]
            code, scale = fp8_reference.parsed(fp8_reference.page(row[None]), 1)
            inside = at % tokens
            page[inside * size : (inside + 1) * size] = code[0]
            page[tokens * size + inside * 4 : tokens * size + inside * 4 + 4] = scale.view(np.uint8)
    np.testing.assert_array_equal(pages[1:], expected[1:])


def test_a_whole_page_is_numpys_page(case: tuple[Op, int, int]) -> None:
    op, size, tokens = case
    inputs = given(size, tokens, (tokens, 2), start=0, seed=3)
    pages = op(**inputs)[2]
    assert pages[inputs["page_table"][1, 0]].tobytes() == fp8_reference.page(inputs["index_row"][:tokens])


def test_scores_and_choice_are_numpys_over_pages_that_numpy_wrote(case: tuple[Op, int, int]) -> None:
    """Two slots over two pages each, written by numpy, one of them with scales that are no powers of two."""
    op, size, tokens = case
    start = 2 * tokens - 3
    inputs = given(size, tokens, (3, 3), start, seed=5)
    rng = np.random.default_rng(5)
    latent = rng.standard_normal((PAGES * tokens, WIDTH)).astype(np.float32)
    inputs["latent_rows"] = latent.copy()
    for slot in (1, 2):
        for page in inputs["page_table"][slot]:
            data = bytearray(fp8_reference.page(rng.standard_normal((tokens, size)) * 3))
            if slot == 2:
                data[tokens * size :] = rng.uniform(1e-3, 1e-1, tokens).astype("<f4").tobytes()
            inputs["index_pages"][page] = np.frombuffer(bytes(data), np.uint8)
    out, latent_after, pages = op(**inputs)
    for n, (slot, position) in enumerate(zip(inputs["slots"], inputs["positions"], strict=True)):
        own = inputs["page_table"][slot]
        parts = [fp8_reference.parsed(pages[page].tobytes(), tokens) for page in own]
        key, key_scale = (np.concatenate(each) for each in zip(*parts, strict=True))
        score = fp8_reference.scores(
            inputs["index_q"][n : n + 1], inputs["index_weight"][n : n + 1], fp8_reference.decoded(key), key_scale
        )[0, : position + 1]
        chosen = np.argsort(-score, kind="stable")[:TOP_K]
        ranked = np.sort(score)[::-1]
        assert ranked[TOP_K - 1] - ranked[TOP_K] > 1e-5 * score.std(), "a choice too close to judge"
        rows = latent_after[own[chosen // tokens] * tokens + chosen % tokens].astype(np.float64)
        z = inputs["q"][n] @ rows.T * 0.3
        p = np.exp(z - z.max(-1, keepdims=True))
        np.testing.assert_allclose(out[n], p @ rows[:, :LATENT] / p.sum(-1, keepdims=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "tokens"), SIZES)
def test_scores_equal_numpys(size: int, tokens: int) -> None:
    """What `nsa_mla_fp8_index` ranks by, before the top-k: 1e-5 of the spread."""
    query, weight, keys = normal(0, 6, INDEX_HEADS, size), normal(1, 6, INDEX_HEADS), normal(2, 3 * tokens, size)
    pages = write_pages(torch.zeros(3, tokens * (size + 4), dtype=torch.uint8), torch.arange(3 * tokens), keys, tokens)
    key, key_scale = read_pages(pages, torch.tensor([[2, 0]]).expand(6, 2), tokens)
    q, q_scale = quantised(query)
    found = reference.indexer_scores(q, weight * q_scale, key) * key_scale
    order = torch.cat([torch.arange(2 * tokens, 3 * tokens), torch.arange(tokens)])
    expected = fp8_reference.scores(query.numpy(), weight.numpy(), *fp8_reference.quantised(keys[order].numpy()))
    assert np.abs(found.numpy() - expected).max() < 1e-5 * expected.std()
    unquantised = reference.indexer_scores(query, weight, keys[order][None].expand(6, -1, -1))
    assert (found - unquantised).abs().max() > 1e-3 * unquantised.std(), "quantisation is to be seen"


def test_zero_queries_and_keys_have_finite_results(case: tuple[Op, int, int]) -> None:
    """All scores are zero: the first rows are chosen. Memory behind them is never written."""
    op, size, tokens = case
    inputs = given(size, tokens, (TOP_K + 4, 2), start=0)
    inputs["index_q"][:], inputs["index_row"][:] = 0.0, 0.0
    out, latent, pages = op(**inputs)
    assert np.isfinite(out).all()
    assert fp8_reference.parsed(pages[inputs["page_table"][2, 0]].tobytes(), tokens)[1][0] == 2.0**-22
    rows = latent[[int(inputs["page_table"][1, p // tokens]) * tokens + p % tokens for p in range(TOP_K)]]
    z = inputs["q"][TOP_K + 3] @ rows.T * 0.3
    p = np.exp(z - z.max(-1, keepdims=True))
    np.testing.assert_allclose(out[TOP_K + 3], p @ rows[:, :LATENT] / p.sum(-1, keepdims=True), rtol=1e-4, atol=1e-5)


def test_a_damaged_key_is_no_index_out_of_range(case: tuple[Op, int, int]) -> None:
    """NaN and infinity in one request's index rows leave the others' results as they are."""
    op, size, tokens = case
    inputs = given(size, tokens, (4, 4), start=0)
    expected = op(**inputs)
    inputs["index_row"][5, 1], inputs["index_q"][6, 0, 2], inputs["index_row"][6, 0] = np.nan, np.nan, np.inf
    found = op(**inputs)
    np.testing.assert_array_equal(found[0][:4], expected[0][:4])
    page = inputs["page_table"][1, 0]
    np.testing.assert_array_equal(found[2][page], expected[2][page])


@pytest.mark.parametrize(("size", "tokens"), SIZES)
def test_below_top_k_both_numerics_attend_alike(size: int, tokens: int) -> None:
    """Every row is chosen, so attention does not feel how the keys are kept."""
    inputs = {name: torch.from_numpy(array) for name, array in given(size, tokens, (TOP_K, 3), start=0).items()}
    fp8 = NSA_MLA_FP8_INDEX.overload(*inputs.values(), LATENT, tokens, TOP_K, 0.3)[0]
    inputs["index_pages"] = torch.full((PAGES * tokens, size), torch.nan)
    plain = NSA_MLA.overload(*inputs.values(), LATENT, tokens, TOP_K, 0.3)[0]
    torch.testing.assert_close(fp8, plain)
