"""The V4 target against the `deepseek_v4` of the transformers library, same random weights, fp32.

Where that library and the publisher's reference differ, the tests at the end say which one this project follows.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as library

from twostroke.builder.config import DeepseekV4Config, RopeScaling, parse_config
from twostroke.builder.networks.layers import Rotation, rms, rope_frequencies
from twostroke.plugins.hyper_connection.reference import hc_post
from twostroke.plugins.moe.reference import moe_experts, moe_route
from twostroke.plugins.nsa.reference import indexer_scores
from twostroke.tests.builder.flat_runs import Memory, Toy, assert_close, feed
from twostroke.tests.checkpoints import F4, write_checkpoint

TOLERANCE = 1e-4
MAX_SEQ_LEN = 384

# (pattern, replacement) from checkpoint names to the library's, spec section 10.2. First match wins.
NAMES = [
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^norm\.", "model.norm."),
    (r"^hc_head_", "model.hc_head.hc_"),
    (r"\.hc_attn_", ".attn_hc."),
    (r"\.hc_ffn_", ".ffn_hc."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
    (r"\.attn\.indexer\.", ".self_attn.compressor.indexer.scorer."),
    (r"\.attn\.compressor\.", ".self_attn.compressor."),
    (r"\.attn\.attn_sink$", ".self_attn.sinks"),
    (r"\.attn\.wq_a\.", ".self_attn.q_a_proj."),
    (r"\.attn\.q_norm\.", ".self_attn.q_a_norm."),
    (r"\.attn\.wq_b\.", ".self_attn.q_b_proj."),
    (r"\.attn\.wkv\.", ".self_attn.kv_proj."),
    (r"\.attn\.wo_a\.", ".self_attn.o_a_proj."),
    (r"\.attn\.wo_b\.", ".self_attn.o_b_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.ffn\.shared_experts\.w1\.", ".mlp.shared_experts.gate_proj."),
    (r"\.ffn\.shared_experts\.w2\.", ".mlp.shared_experts.down_proj."),
    (r"\.ffn\.shared_experts\.w3\.", ".mlp.shared_experts.up_proj."),
    (r"\.ffn\.", ".mlp."),
]
COMPRESSOR = [
    (r"compressor\.((?:indexer\.)?)wkv\.", r"compressor.\1kv_proj."),
    (r"compressor\.((?:indexer\.)?)wgate\.", r"compressor.\1gate_proj."),
    (r"compressor\.((?:indexer\.)?)ape$", r"compressor.\1position_bias"),
    (r"compressor\.((?:indexer\.)?)norm\.", r"compressor.\1kv_norm."),
]


def library_name(name: str) -> str:
    for pattern, replacement in NAMES:
        if re.search(pattern, name):
            name = re.sub(pattern, replacement, name)
            break
    for pattern, replacement in COMPRESSOR:
        name = re.sub(pattern, replacement, name)
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def library_weights(config: DeepseekV4Config, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The library's state dict: renamed, experts stacked with w1 above w3, draft stages left out."""
    found = {library_name(n): w for n, w in weights.items() if ".experts." not in n and not n.startswith("mtp.")}
    for layer in range(config.num_hidden_layers):
        bank = [
            {w: weights[f"layers.{layer}.ffn.experts.{e}.{w}.weight"] for w in ("w1", "w2", "w3")}
            for e in range(config.n_routed_experts)
        ]
        at = f"model.layers.{layer}.mlp.experts"
        found[f"{at}.gate_up_proj"] = torch.stack([torch.cat([e["w1"], e["w3"]]) for e in bank])
        found[f"{at}.down_proj"] = torch.stack([e["w2"] for e in bank])
    return found


def library_config(config: DeepseekV4Config) -> transformers.DeepseekV4Config:
    scaling = config.rope_scaling
    assert scaling is not None
    # fmt: off
    same = [
        "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "q_lora_rank", "num_experts_per_tok", "n_routed_experts", "routed_scaling_factor", "max_position_embeddings",
        "hc_mult", "hc_sinkhorn_iters", "hc_eps", "swiglu_limit", "sliding_window", "o_groups", "o_lora_rank",
        "index_n_heads", "index_head_dim", "index_topk", "rms_norm_eps",
    ]
    # fmt: on
    share = config.qk_rope_head_dim / config.head_dim
    rates = {kind: rate for kind, rate in zip(config.layer_types, config.compress_ratios, strict=True) if rate}
    return transformers.DeepseekV4Config(
        **{name: getattr(config, name) for name in same},
        layer_types=list(config.layer_types),
        compress_rates=rates,
        mlp_layer_types=["hash_moe" if i < config.num_hash_layers else "moe" for i in range(config.num_hidden_layers)],
        partial_rotary_factor=share,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": share},
            "compress": {
                "rope_type": "yarn",
                "rope_theta": config.compress_rope_theta,
                "partial_rotary_factor": share,
                "attention_factor": 1.0,
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
            },
        },
    )


def library_model(toy: Toy) -> Any:
    config = library_config(toy.config)
    config._attn_implementation = "eager"
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(library_weights(toy.config, toy.weights), strict=False)
    assert not unexpected
    assert not missing, "every parameter and persistent buffer of the library has a checkpoint tensor"
    return model


# Sixteen index heads: with the two of F4 about a quarter of the scores are exactly zero (every head's ReLU is shut),
# and the library breaks ties as torch.topk happens to; see the tie test below.
CONFIGS: dict[str, dict[str, Any]] = {
    # The ratios of the release, four streams, window and top-k far below the length.
    "4-and-128": {"compress_ratios": [0, 0, 4, 128, 4, 128, 0, 0, 0], "hc_mult": 4, "index_topk": 6},
    "4-and-8": {},
    "compressed-first": {"compress_ratios": [8, 4, 8, 4, 0, 4, 0, 0, 0], "num_hash_layers": 3, "hc_mult": 3},
}


@pytest.fixture(scope="module", params=CONFIGS)
def sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Toy, Any]:
    """The toy network and the library's model of one configuration."""
    overrides = {"max_position_embeddings": MAX_SEQ_LEN, "index_n_heads": 16, **CONFIGS[request.param]}
    toy = Toy(write_checkpoint(tmp_path_factory.mktemp("checkpoint"), F4, seed=5, **overrides))
    return toy, library_model(toy)


def library_logits(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor(tokens)[None], use_cache=False).logits[0].numpy()
    return logits


@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 31, 33, 127, 128, 131, 300])
def test_logits_equal_the_library_at_every_length(sides: tuple[Toy, Any], length: int) -> None:
    """Below and far beyond window (8), top-k (4 or 6 rows of 4 tokens) and both compression rates."""
    toy, model = sides
    tokens = np.random.default_rng(length).integers(0, 320, size=length).tolist()
    target = toy.target(max_seq_len=MAX_SEQ_LEN)
    memory = Memory(target.spec.state, slots=2, pages_per_slot=2)
    ours = feed(target, memory, 1, tokens, [length])["logits"]
    assert_close(ours, library_logits(model, tokens), TOLERANCE, f"{length} tokens")


def test_decoding_with_state_equals_the_library_with_its_cache(sides: tuple[Toy, Any]) -> None:
    """Token after token, both sides with their own memory, across a boundary of every kind."""
    toy, model = sides
    tokens = np.random.default_rng(0).integers(0, 320, size=140).tolist()
    target = toy.target(max_seq_len=MAX_SEQ_LEN)
    memory = Memory(target.spec.state, slots=2, pages_per_slot=2)
    ours = feed(target, memory, 1, tokens, [101, *[1] * 39])["logits"]
    with torch.no_grad():
        first = model(torch.tensor(tokens[:101])[None], use_cache=True)
        theirs, cache = [first.logits[0]], first.past_key_values
        for token in tokens[101:]:
            step = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            theirs.append(step.logits[0])
    assert_close(ours, torch.cat(theirs).numpy(), TOLERANCE)


# Where the library and the publisher differ, or leave a choice open.


def test_tied_index_scores_go_to_the_lowest_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two index heads exact zeros tie. The library takes what torch.topk gives; with its picks made stable, lowest
    row first, both sides agree, and without, they need not."""
    toy = Toy(write_checkpoint(tmp_path, F4, seed=5, max_position_embeddings=MAX_SEQ_LEN))
    model = library_model(toy)
    tokens = np.random.default_rng(33).integers(0, 320, size=90).tolist()
    target = toy.target(max_seq_len=MAX_SEQ_LEN)
    ours = feed(target, Memory(target.spec.state, slots=2, pages_per_slot=2), 1, tokens, [90])["logits"]

    def stable_topk(self: torch.Tensor, k: int, dim: int = -1, **options: Any) -> SimpleNamespace:
        values, indices = torch.sort(self, dim=dim, descending=True, stable=True)
        return SimpleNamespace(values=values[..., :k], indices=indices[..., :k])

    loose = library_logits(model, tokens)
    monkeypatch.setattr(torch.Tensor, "topk", stable_topk)
    assert_close(ours, library_logits(model, tokens), TOLERANCE)
    assert np.abs(ours - loose).max() > TOLERANCE * loose.std(), "no tie in this sequence: pick another"


def test_rope_stays_fp32_at_long_positions_as_the_publisher_keeps_it() -> None:
    """The library rounds cos and sin to the model's dtype: equal in fp32, not in bf16. We follow the publisher."""
    config = library_config(parse_config(F4, "config.json"))
    embedding = library.DeepseekV4RotaryEmbedding(config)
    positions = torch.tensor([100_003, 1_000_003])
    frequencies = embedding.compress_inv_freq
    ours = Rotation.at(positions, frequencies, config.qk_rope_head_dim)
    for dtype, tolerance, apart in ((torch.float32, 1e-6, False), (torch.bfloat16, 1e-6, True)):
        cos, sin = embedding(torch.zeros(1, dtype=dtype), positions[None], layer_type="compress")
        difference = max(
            float((ours.cos[:, ::2] - cos[0].float()).abs().max()),
            float((ours.sin[:, 1::2] - sin[0].float()).abs().max()),
        )
        assert (difference > tolerance) is apart


def test_the_mixing_matrix_stays_fp32_as_the_publisher_keeps_it() -> None:
    """The library casts post and C to the streams' dtype before mixing. In fp32 both are one; in bf16 rounding C moves
    the result, and this project, fp32 throughout, gives the unrounded one."""
    g = torch.Generator().manual_seed(0)
    y, streams = torch.randn(5, 16, generator=g), torch.randn(5, 4, 16, generator=g)
    post, comb = torch.rand(5, 4, generator=g), torch.rand(5, 4, 4, generator=g)

    def mixed(dtype: torch.dtype) -> torch.Tensor:
        rounded_post, rounded_comb = post.to(dtype).float(), comb.to(dtype).float()
        return rounded_post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(rounded_comb.transpose(-1, -2), streams)

    ours = hc_post(y, streams, post, comb)
    torch.testing.assert_close(ours, mixed(torch.float32), rtol=1e-6, atol=1e-6)
    assert (ours - mixed(torch.bfloat16)).abs().max() > 1e-3


def test_hadamard_rotation_of_indexer_rows_changes_no_score() -> None:
    """The publisher turns index queries and keys by a Walsh-Hadamard matrix before FP4 rounding, the library does
    neither. The turn alone is orthogonal: scores and selection are the same, so leaving it out follows both."""
    g = torch.Generator().manual_seed(1)
    q, weight, keys = (torch.randn(6, 2, 16, generator=g), torch.randn(6, 2, generator=g), torch.randn(6, 9, 16))
    hadamard = torch.ones(1, 1)
    for _ in range(4):
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)], 0)
    turn = hadamard * 16**-0.5
    plain = indexer_scores(q, weight, keys)
    torch.testing.assert_close(indexer_scores(q @ turn, weight, keys @ turn), plain, rtol=1e-5, atol=1e-5)


def test_routing_weight_before_or_after_the_last_projection_is_one_result_in_fp32() -> None:
    """The publisher weighs inside the expert, the library its result. Without quantisation both equal ours."""
    g = torch.Generator().manual_seed(2)
    x, w1, w3 = (torch.randn(*s, generator=g) for s in ((7, 8), (4, 6, 8), (4, 6, 8)))
    w2 = torch.randn(4, 8, 6, generator=g)
    ids = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, generator=g)
    before, after = torch.zeros(7, 8), torch.zeros(7, 8)
    for n in range(7):
        for e, share in zip(ids[n].tolist(), weights[n], strict=True):
            inner = torch.nn.functional.silu((w1[e] @ x[n]).clamp(max=2.0)) * (w3[e] @ x[n]).clamp(-2.0, 2.0)
            before[n] += w2[e] @ (inner * share)
            after[n] += share * (w2[e] @ inner)
    ours = moe_experts(x, ids, weights, w1, w2, w3, 2.0)
    torch.testing.assert_close(ours, before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, after, rtol=1e-5, atol=1e-5)


def test_epsilons_stand_where_both_sides_put_them() -> None:
    """rms eps 1e-6 on a row of zeros gives zeros, and the sum of routing scores has a floor."""
    norm = library.DeepseekV4RMSNorm(4, eps=1e-6)
    x = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1e-4, -1e-4, 2e-4, 0.0]])
    torch.testing.assert_close(rms(x, 1e-6), norm(x).detach(), rtol=1e-6, atol=1e-9)
    _, weights = moe_route(torch.full((1, 1), -2e4), torch.ones(3, 1), torch.zeros(3), 2, 1.5)
    assert torch.isfinite(weights).all()


# Frequencies.


def test_yarn_table_equals_the_library() -> None:
    """The release's numbers: 64 rotary dims, theta 160000, factor 16 over 65536; the ramp runs from pair 15 to 25."""
    config = transformers.DeepseekV4Config(
        head_dim=512,
        partial_rotary_factor=64 / 512,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    )
    embedding = library.DeepseekV4RotaryEmbedding(config)
    plain = rope_frequencies(64, 160000, None)
    ours = rope_frequencies(64, 160000, RopeScaling(16, 65536, 32, 1))
    torch.testing.assert_close(ours, embedding.compress_inv_freq, rtol=1e-6, atol=0)
    torch.testing.assert_close(rope_frequencies(64, 10000, None), embedding.main_inv_freq, rtol=1e-6, atol=0)
    assert embedding.compress_attention_scaling == 1.0
    changed = (ours != plain).nonzero()[:, 0]
    assert int(changed[0]) == 16, "pair 15 is the last that keeps its frequency"
    torch.testing.assert_close(ours[25:] * 16, plain[25:], rtol=1e-6, atol=0)
    low = 64 * math.log(65536 / (2 * math.pi * 32)) / (2 * math.log(160000))
    assert math.floor(low) == 15
