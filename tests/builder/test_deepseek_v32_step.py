"""The V3.2 step: one result however a sequence is cut, packed or padded, compiled or eager; rope pairings; MLA forms.

Memory starts as NaN, packed pages as 0xFF. Under ONNX Runtime comparisons are to the bit, with index keys in fp32 and
in fp8; eager torch is held to them in fp32, for a difference in the last bit can be a step of fp8.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from twostroke.builder.eager import EagerEngine
from twostroke.builder.networks import deepseek_v32
from twostroke.builder.networks.deepseek_v32 import DeepseekV32, Flat, LatentAttention
from twostroke.engines.base import Engine
from twostroke.engines.loading import LoadedEngine
from twostroke.engines.manifest import StateTensor
from twostroke.plugins.nsa import reference
from twostroke.tests.builder import deepseek_v32_reference
from twostroke.tests.builder.flat_runs import (
    Array,
    Chunk,
    Memory,
    Toy,
    assert_close,
    assert_same_live,
    every,
    feed,
    forward,
)
from twostroke.tests.checkpoints import T32, write_checkpoint

State = tuple[StateTensor, ...]
# One below, at and above top-k (8) and a page (64), and between.
LENGTHS = [2, 3, 7, 8, 9, 15, 16, 17, 31, 40, 63, 64, 65, 90]


@pytest.fixture(scope="module")
def t32(t32_engine_dir: Path) -> Toy:
    """The checkpoint the T32 engine was built from."""
    return Toy(t32_engine_dir.parent / "checkpoint")


@pytest.fixture(scope="module")
def eager(t32: Toy) -> EagerEngine:
    return t32.target(max_seq_len=96)


@pytest.fixture(scope="module", params=["float32", "fp8_e4m3"])
def loaded(request: pytest.FixtureRequest) -> LoadedEngine:
    """The T32 engine, and one with index keys in fp8."""
    engine = request.getfixturevalue("t32_engine" if request.param == "float32" else "t32_fp8_engine")
    assert isinstance(engine, LoadedEngine)
    assert engine.manifest.build_config.index_key_dtype == request.param
    return engine


IN_FLOAT32 = pytest.mark.parametrize("loaded", ["float32"], indirect=True)


@pytest.fixture(scope="module")
def compiled(loaded: LoadedEngine) -> Engine:
    return loaded.engines["target"]


@pytest.fixture(scope="module")
def state(loaded: LoadedEngine) -> State:
    return tuple(tensor for tensor in loaded.manifest.state if tensor.name in loaded.engines["target"].bindings)


def fresh(state: State) -> Memory:
    return Memory(state, pages_per_slot=2)


@pytest.fixture(scope="module")
def token_by_token(compiled: Engine, state: State, stream: list[int]) -> dict[int, dict[str, Array]]:
    """Live state after every prefix of the stream, and under key -1 the logits of every row."""
    memory, found, states = fresh(state), [], {}
    for at, token in enumerate(stream[:90]):
        found.append(forward(compiled, memory, [Chunk(2, at, [token])])[0]["logits"])
        states[at + 1] = memory.live(2, at + 1)
    states[-1] = {"logits": np.concatenate(found)}
    return states


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 9, 13, 33, 64, 90])
def test_chunks_of_every_size_equal_decode_and_one_shot(
    compiled: Engine, state: State, stream: list[int], token_by_token: dict, size: int
) -> None:
    for length in LENGTHS:
        memory = fresh(state)
        found = feed(compiled, memory, 2, stream[:length], every(size))["logits"]
        np.testing.assert_array_equal(found, token_by_token[-1]["logits"][:length], err_msg=f"{length} tokens")
        assert_same_live(memory.live(2, length), token_by_token[length])


@IN_FLOAT32
@pytest.mark.parametrize("length", LENGTHS)
def test_the_compiled_step_equals_eager_torch(
    compiled: Engine, eager: EagerEngine, state: State, stream: list[int], length: int
) -> None:
    ours, theirs = fresh(state), fresh(state)
    found = feed(compiled, ours, 1, stream[:length], [length])["logits"]
    assert_close(found, feed(eager, theirs, 1, stream[:length], [length])["logits"], 1e-5)
    assert_same_live(ours.live(1, length), theirs.live(1, length), 1e-5)


@IN_FLOAT32
@pytest.mark.parametrize("size", [1, 3, 4, 5, 16, 96])
def test_pages_of_four_tokens_are_crossed_without_a_trace(
    t32: Toy, eager: EagerEngine, state: State, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager torch, 24 pages a request, dealt out of order, to the last position of the range."""
    tokens = np.random.default_rng(6).integers(2, 319, size=96).tolist()
    expected = feed(eager, fresh(state), 1, tokens, [96])["logits"]
    monkeypatch.setattr(deepseek_v32, "TOKENS_PER_PAGE", 4)
    paged = t32.target(max_seq_len=96)
    assert {t.rows for t in paged.spec.state} == {4}
    memory = Memory(paged.spec.state, pages_per_slot=24)
    assert_close(feed(paged, memory, 1, tokens, every(size))["logits"], expected, 1e-5)


def test_a_wider_page_table_changes_nothing(compiled: Engine, state: State, stream: list[int]) -> None:
    results = []
    for columns in (1, 2):
        memory = fresh(state)
        feed(compiled, memory, 1, stream[:50], [50])
        verify = forward(compiled, memory, [Chunk(1, 50, stream[50:54])], columns=columns)[0]
        results.append((verify["logits"], memory.live(1, 54)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert_same_live(results[0][1], results[1][1])


def test_packed_prefill_equals_separate_ones(
    loaded: LoadedEngine, compiled: Engine, eager: EagerEngine, state: State
) -> None:
    """Two prompts of 40 and 37 tokens with padding behind; the second does not even feel another first one."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, 319, size=n).tolist() for n in (40, 37)]
    other = rng.integers(2, 319, size=40).tolist()
    engines = [(compiled, 0.0), (eager, 1e-5)]
    for engine, tolerance in engines if loaded.manifest.build_config.index_key_dtype == "float32" else engines[:1]:
        together, instead = fresh(state), fresh(state)
        found = forward(engine, together, [Chunk(1, 0, prompts[0]), Chunk(3, 0, prompts[1])], padding=5)
        second = forward(engine, instead, [Chunk(1, 0, other), Chunk(3, 0, prompts[1])], padding=5)[1]
        for slot, prompt, rows in ((1, prompts[0], found[0]), (3, prompts[1], found[1]), (3, prompts[1], second)):
            alone = fresh(state)
            expected = feed(engine, alone, slot, prompt, [len(prompt)])["logits"]
            if tolerance:
                assert_close(rows["logits"], expected, tolerance)
            else:
                np.testing.assert_array_equal(rows["logits"], expected)
            memory = instead if rows is second else together
            assert_same_live(memory.live(slot, len(prompt)), alone.live(slot, len(prompt)), tolerance)


@IN_FLOAT32
def test_selected_rows_of_a_packed_request_are_its_own(
    eager: EagerEngine, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The physical rows the attention of the second request reads lie in its own pages."""
    gathered: list[torch.Tensor] = []
    plain = reference.take

    def watching(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        gathered.append(index)
        return plain(rows, index)

    monkeypatch.setattr(reference, "take", watching)
    memory = fresh(state)
    forward(eager, memory, [Chunk(1, 0, list(range(2, 42))), Chunk(3, 0, list(range(50, 87)))])
    selected = [index for index in gathered if index.shape[1] == 8]
    assert len(selected) == 3, "one selection a layer"
    for index in selected:
        for slot, rows in ((1, index[:40]), (3, index[40:])):
            assert set((rows // 64).unique().tolist()) <= set(memory.table[slot].tolist())


def test_prefill_decode_and_verify_share_a_step(compiled: Engine, state: State, stream: list[int]) -> None:
    """A prefill chunk, one decode row and a verify block, between rows of the scratch slot and padding."""
    fed, sizes = {1: 20, 2: 66, 3: 5}, {1: 17, 2: 1, 3: 6}
    together = fresh(state)
    for slot, count in fed.items():
        feed(compiled, together, slot, stream[slot : slot + count], every(11))
    chunks = [Chunk(slot, fed[slot], stream[slot + fed[slot] :][: sizes[slot]]) for slot in (3, 1, 2)]
    chunks.insert(1, Chunk(0, 0, [4, 4, 4]))
    found = forward(compiled, together, chunks, padding=4)
    for chunk, rows in zip(chunks, found, strict=True):
        if chunk.slot:
            alone = fresh(state)
            feed(compiled, alone, chunk.slot, stream[chunk.slot :][: chunk.start], every(11))
            np.testing.assert_array_equal(rows["logits"], forward(compiled, alone, [chunk])[0]["logits"])
            end = chunk.start + len(chunk.tokens)
            assert_same_live(together.live(chunk.slot, end), alone.live(chunk.slot, end))


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rejected_rows_are_overwritten_before_they_are_read(
    compiled: Engine, state: State, stream: list[int], accepted: int
) -> None:
    """Verify blocks of four that cross a page; of each, `accepted` drafts hold and the rest is wrong."""
    at, memory = 57, fresh(state)
    feed(compiled, memory, 2, stream[:at], [at])
    for _ in range(5):
        block = [*stream[at : at + 1 + accepted], *[t + 1 for t in stream[at + 1 + accepted : at + 4]]]
        forward(compiled, memory, [Chunk(2, at, block)])
        at += 1 + accepted
    plain = fresh(state)
    feed(compiled, plain, 2, stream[:at], every(1))
    assert_same_live(memory.live(2, at), plain.live(2, at))


def test_rows_given_to_the_scratch_slot_leave_the_request_alone(
    compiled: Engine, state: State, stream: list[int]
) -> None:
    plain, with_dead = fresh(state), fresh(state)
    for memory in (plain, with_dead):
        feed(compiled, memory, 1, stream[:30], [30])
    expected = forward(compiled, plain, [Chunk(1, 30, stream[30:33])])[0]["logits"]
    chunks = [Chunk(1, 30, [*stream[30:33], 5, 6, 7], dead=3), Chunk(0, 0, [9, 9])]
    found = forward(compiled, with_dead, chunks, padding=3)[0]["logits"]
    np.testing.assert_array_equal(found[:3], expected)
    assert_same_live(with_dead.live(1, 33), plain.live(1, 33))
    for tensor in state:  # no other real slot or page was touched either
        for slot in (2, 3):
            rows = with_dead.read(tensor, slot, range(128))
            assert (rows == 0xFF if rows.dtype == np.uint8 else np.isnan(rows)).all()


# Rope pairings.


def turned(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [N, ..., 2 * pairs] by complex numbers: neighbours are a pair, or feature i of both halves."""
    pairs = len(frequencies)
    angle = (positions[:, None].double() * frequencies.double()).reshape(-1, *[1] * (x.dim() - 2), pairs)
    x = x.double()
    real, imaginary = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :pairs], x[..., pairs:])
    y = torch.complex(real, imaginary) * torch.exp(1j * angle)
    if interleaved:
        return torch.stack([y.real, y.imag], dim=-1).flatten(-2)
    return torch.cat([y.real, y.imag], dim=-1)


def scores_by_hand(network: DeepseekV32, x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Index scores [N, N] of layer 0 from its normed input x [N, D], in float64."""
    attention = network.model.layers[0].self_attn
    assert isinstance(attention, LatentAttention)
    w = {name: p.double() for name, p in attention.named_parameters()}
    positions, x = torch.arange(len(x)), x.double()
    latent = x @ w["q_a_proj.weight"].T
    latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w["q_a_layernorm.weight"]
    q = (latent @ w["indexer.wq_b.weight"].T).reshape(len(x), 4, 16)
    k = x @ w["indexer.wk.weight"].T
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    k = k * w["indexer.k_norm.weight"] + w["indexer.k_norm.bias"]
    q = torch.cat([turned(q[..., :8], positions, network.frequencies, interleaved), q[..., 8:]], dim=-1)
    k = torch.cat([turned(k[..., :8], positions, network.frequencies, interleaved), k[..., 8:]], dim=-1)
    head = x @ w["indexer.weights_proj.weight"].T
    return torch.einsum("nh,nhw->nw", head, torch.relu(torch.einsum("nhi,wi->nhw", q, k))) * (4 * 16) ** -0.5


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_indexer_pairs_as_its_own_setting_says_and_attention_always_interleaves(
    tmp_path: Path, stream: list[int], monkeypatch: pytest.MonkeyPatch, interleaved: bool
) -> None:
    overrides = {"indexer_rope_interleave": True} if interleaved else {}
    target = Toy(write_checkpoint(tmp_path, T32, **overrides)).target(max_seq_len=96)
    network = target.spec.module
    assert isinstance(network, DeepseekV32)
    watched: list[torch.Tensor] = []
    plain = reference.indexer_scores

    def watching(*arguments: torch.Tensor) -> torch.Tensor:
        watched.append(plain(*arguments))
        return watched[-1]

    monkeypatch.setattr(reference, "indexer_scores", watching)
    memory = Memory(target.spec.state)
    feed(target, memory, 1, stream[:40], [40])
    with torch.no_grad():
        layer = network.model.layers[0]
        x = layer.input_layernorm(network.model.embed_tokens.weight[torch.tensor(stream[:40])])
        causal = torch.ones(40, 40).tril().bool()
        found = watched[0][:, :40][causal]
        same, other = (scores_by_hand(network, x, pairing)[causal] for pairing in (interleaved, not interleaved))
        assert_close(found, same, 1e-5)
        assert (found - other).abs().max() > 0.1 * float(same.std())
        rows = memory.live(1, 40)["layers.0.latent"]
        keys = layer.self_attn.kv_a_proj_with_mqa(x)[:, 16:]
        assert_close(rows[:, 16:], turned(keys, torch.arange(40), network.frequencies, True), 1e-5)
        assert np.abs(rows[:, 16:] - turned(keys, torch.arange(40), network.frequencies, False).numpy()).max() > 0.1


@pytest.mark.parametrize("interleaved", [False, True])
def test_attention_over_its_choice_is_the_references_under_its_own_two_pairings_alone(
    tmp_path: Path, stream: list[int], monkeypatch: pytest.MonkeyPatch, interleaved: bool
) -> None:
    """A-07. 40 tokens, top-k 8, layer 0: the indexer as its setting says, attention interleaved whatever it says; with
    either pairing exchanged in the reference the outputs are others."""
    target = Toy(write_checkpoint(tmp_path, T32, **({"indexer_rope_interleave": True} if interleaved else {})))
    network = target.target(max_seq_len=96).spec.module
    assert isinstance(network, DeepseekV32)
    weights = {name: value.numpy() for name, value in target.weights.items()}
    numpy = deepseek_v32_reference.Network(T32, weights)
    ids = torch.tensor(stream[:40])
    memory = Memory(network.layer_state[0])
    with torch.no_grad():
        layer, x = network.model.layers[0], network.model.embed_tokens.weight[ids]
        rows = (torch.arange(40), torch.ones(40, dtype=torch.int64), torch.from_numpy(memory.table).long())
        flat = Flat.of(network.config, network.frequencies, *rows)
        held = tuple(torch.from_numpy(array) for array in memory.arrays.values())
        found = layer.self_attn(layer.input_layernorm(x), flat, held)[0].numpy()
    pairs, halves = deepseek_v32_reference.turn_pairs, deepseek_v32_reference.turn_halves

    def pairs_of_the_first(x: Array, angle: Array) -> Array:
        width = 2 * angle.shape[1]
        return np.concatenate([pairs(x[..., :width], angle), x[..., width:]], -1)

    def attention(main: Callable[..., Array], indexer: Callable[..., Array]) -> Array:
        monkeypatch.setattr(deepseek_v32_reference, "turn_pairs", main)
        monkeypatch.setattr(deepseek_v32_reference, "turn_halves", indexer)
        normed = numpy.norm("model.layers.0.input_layernorm", x.double().numpy())
        none = deepseek_v32_reference.Memory()
        return numpy.attention("model.layers.0.self_attn", normed, np.arange(40), none)

    own, other = (pairs_of_the_first, halves) if interleaved else (halves, pairs_of_the_first)
    assert_close(found, attention(pairs, own), 1e-5)
    for mistaken in (attention(pairs, other), attention(halves, own)):
        assert np.abs(found - mistaken).max() > 0.1 * found.std()


# The absorbed form is the plain one.


def plain_attention(attention: LatentAttention, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Dense causal MLA with keys and values spelt out for each head: x [N, D] -> [N, D], float64."""
    config, n = attention.config, len(x)
    w = {name: p.double() for name, p in attention.named_parameters()}
    heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
    positions, x = torch.arange(n), x.double()

    def norm(y: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    latent = norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"])
    q = (latent @ w["q_b_proj.weight"].T).reshape(n, heads, -1)
    q = torch.cat([q[..., :nope], turned(q[..., nope:], positions, frequencies, True)], dim=-1)
    both = x @ w["kv_a_proj_with_mqa.weight"].T
    kv = (norm(both[:, :rank], w["kv_a_layernorm.weight"]) @ w["kv_b_proj.weight"].T).reshape(n, heads, -1)
    rotary = turned(both[:, None, rank:], positions, frequencies, True).expand(-1, heads, -1)
    k, v = torch.cat([kv[..., :nope], rotary], dim=-1), kv[..., nope:]
    logits = torch.einsum("nhd,whd->hnw", q, k) * config.softmax_scale
    logits = logits.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf)
    out = torch.einsum("hnw,whv->nhv", torch.softmax(logits, dim=-1), v)
    return out.reshape(n, -1) @ w["o_proj.weight"].T


def test_below_top_k_the_absorbed_sparse_form_is_plain_dense_attention(tmp_path: Path) -> None:
    """Equal to 1e-5 with room for every row; with top-k 8 rows 0..7 are and later ones are not."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 64, generator=g)
    errors = []
    for name, top_k in (("dense", 64), ("sparse", 8)):
        target = Toy(write_checkpoint(tmp_path / name, T32, index_topk=top_k)).target(max_seq_len=96)
        network = target.spec.module
        assert isinstance(network, DeepseekV32)
        attention = network.model.layers[1].self_attn
        assert isinstance(attention, LatentAttention)
        memory = Memory(target.spec.state)
        rows = (torch.arange(40), torch.ones(40, dtype=torch.int64), torch.from_numpy(memory.table).long())
        held = tuple(torch.from_numpy(memory.arrays[f"layers.1.{kind}"]) for kind in ("latent", "index"))
        with torch.no_grad():
            found, _ = attention(x, Flat.of(network.config, network.frequencies, *rows), held)
            expected = plain_attention(attention, x, network.frequencies)
        errors.append((found - expected).abs().max(dim=1).values / expected.std())
    assert errors[0].max() < 1e-5
    assert errors[1][:8].max() < 1e-5
    assert errors[1][20:].min() > 1e-3
