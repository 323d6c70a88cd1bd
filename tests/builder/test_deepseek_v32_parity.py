"""The V3.2 target against the `deepseek_v32` of the transformers library, same random weights, fp32.

Tolerance: 1e-4 of the logits' spread. Top-k selections are discrete: configurations have enough index heads that no
two scores tie, except in the tie test.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as library

from twostroke.builder.config import parse_config
from twostroke.builder.networks.deepseek_v32_checkpoint import DeepseekV32Config
from twostroke.builder.networks.layers import Rotation, rope_frequencies
from twostroke.plugins.moe.reference import moe_route_grouped
from twostroke.tests.builder.flat_runs import Memory, Toy, assert_close, feed
from twostroke.tests.checkpoints import RELEASE_V32, T32, with_overrides, write_checkpoint

TOLERANCE = 1e-4
MAX_SEQ_LEN = 384


class Picked(NamedTuple):
    """What torch.topk returns."""

    values: torch.Tensor
    indices: torch.Tensor


def library_config(config: DeepseekV32Config) -> transformers.DeepseekV32Config:
    # fmt: off
    same = [
        "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
        "num_attention_heads", "n_routed_experts", "routed_scaling_factor", "kv_lora_rank", "q_lora_rank",
        "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim", "n_group", "topk_group", "num_experts_per_tok",
        "max_position_embeddings", "rms_norm_eps", "index_topk", "index_head_dim", "index_n_heads",
        "first_k_dense_replace",
    ]
    # fmt: on
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale,
        }
    return transformers.DeepseekV32Config(
        **{name: getattr(config, name) for name in same},
        num_key_value_heads=config.num_attention_heads,
        rope_parameters=rope,
    )


def library_weights(config: DeepseekV32Config, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The library's state dict: the same names, experts stacked with gate above up, the MTP layer left out."""
    mtp = f"model.layers.{config.num_hidden_layers}."
    found = {n: w for n, w in weights.items() if ".experts." not in n and not n.startswith(mtp)}
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        at = f"model.layers.{layer}.mlp.experts"
        bank = [
            {part: weights[f"{at}.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")}
            for e in range(config.n_routed_experts)
        ]
        found[f"{at}.gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in bank])
        found[f"{at}.down_proj"] = torch.stack([e["down"] for e in bank])
    return found


def library_model(toy: Toy) -> Any:
    config = library_config(toy.config)
    config._attn_implementation = "eager"
    model = transformers.DeepseekV32ForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(library_weights(toy.config, toy.weights), strict=False)
    assert not unexpected
    assert not missing, "every parameter and persistent buffer of the library has a checkpoint tensor"
    return model


# Sixteen index heads: with the four of T32 some scores are exactly zero (every head's ReLU is shut) and tie.
CONFIGS: dict[str, dict[str, Any]] = {
    "toy": {},
    "many-groups": {
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 0,
        "index_topk": 24,
    },
    "unscaled-rope": {"rope_scaling": None, "first_k_dense_replace": 2, "n_group": 1, "index_head_dim": 8},
    # Each width differs from every other, and the ramp of YaRN has room between its ends.
    "odd-widths": {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "kv_lora_rank": 28,
        "index_head_dim": 24,
        "rope_scaling": {**T32["rope_scaling"], "factor": 40, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
}


@pytest.fixture(scope="module", params=CONFIGS)
def sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Toy, Any]:
    """The toy network and the library's model of one configuration."""
    overrides = {"max_position_embeddings": MAX_SEQ_LEN, "index_n_heads": 16, **CONFIGS[request.param]}
    toy = Toy(write_checkpoint(tmp_path_factory.mktemp("checkpoint"), T32, seed=5, **overrides))
    return toy, library_model(toy)


def library_logits(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor(tokens)[None], use_cache=False).logits[0].numpy()
    return logits


def our_logits(toy: Toy, tokens: list[int], sizes: list[int]) -> np.ndarray:
    target = toy.target(max_seq_len=MAX_SEQ_LEN)
    memory = Memory(target.spec.state, slots=2, pages_per_slot=6)
    return feed(target, memory, 1, tokens, sizes)["logits"]


@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 23, 24, 25, 31, 64, 65, 131, 300])
def test_logits_equal_the_library_at_every_length(sides: tuple[Toy, Any], length: int) -> None:
    """Below and far beyond top-k (8 or 24), and across pages of 64."""
    toy, model = sides
    tokens = np.random.default_rng(length).integers(0, 320, size=length).tolist()
    assert_close(our_logits(toy, tokens, [length]), library_logits(model, tokens), TOLERANCE, f"{length} tokens")


def test_decoding_with_state_equals_the_library_with_its_cache(sides: tuple[Toy, Any]) -> None:
    """Token after token, both sides with their own memory, across a page."""
    toy, model = sides
    tokens = np.random.default_rng(0).integers(0, 320, size=90).tolist()
    ours = our_logits(toy, tokens, [51, *[1] * 39])
    with torch.no_grad():
        first = model(torch.tensor(tokens[:51])[None], use_cache=True)
        theirs, cache = [first.logits[0]], first.past_key_values
        for token in tokens[51:]:
            step = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            theirs.append(step.logits[0])
    assert_close(ours, torch.cat(theirs).numpy(), TOLERANCE)


def test_tied_index_scores_go_to_the_lowest_position(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one index head half of the scores are exactly zero. The library takes what torch.topk gives; with its picks
    made stable, lowest position first, both sides agree, and without, they do not."""
    overrides = {"index_n_heads": 1, "max_position_embeddings": MAX_SEQ_LEN}
    toy = Toy(write_checkpoint(tmp_path_factory.mktemp("ties"), T32, seed=5, **overrides))
    model = library_model(toy)
    tokens = np.random.default_rng(33).integers(0, 320, size=90).tolist()
    ours = our_logits(toy, tokens, [90])

    def stable_topk(self: torch.Tensor, k: int, dim: int = -1) -> Picked:
        values, indices = torch.sort(self, dim=dim, descending=True, stable=True)
        return Picked(values[..., :k], indices[..., :k])

    loose = library_logits(model, tokens)
    monkeypatch.setattr(torch.Tensor, "topk", stable_topk)
    assert_close(ours, library_logits(model, tokens), TOLERANCE)
    assert np.abs(ours - loose).max() > TOLERANCE * loose.std(), "no tie in this sequence: pick another"


def test_grouped_routing_equals_the_library(sides: tuple[Toy, Any]) -> None:
    """The same experts and weights, whatever the order; the bias spreads selections over all groups."""
    toy, _ = sides
    config = toy.config
    router = library.DeepseekV32TopkRouter(library_config(config))
    g = torch.Generator().manual_seed(1)
    x = torch.randn(200, config.hidden_size, generator=g)
    router.weight.data = torch.randn(config.n_routed_experts, config.hidden_size, generator=g) / 8
    bias = torch.randn(config.n_routed_experts, generator=g)
    router.e_score_correction_bias.copy_(bias)
    _, weights, ids = router(x)
    found_ids, found = moe_route_grouped(
        x, router.weight.data, bias, config.n_group, config.topk_group, config.num_experts_per_tok, 2.5
    )
    theirs = torch.zeros(200, config.n_routed_experts).scatter(1, ids, weights.detach())
    ours = torch.zeros(200, config.n_routed_experts).scatter(1, found_ids, found)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_yarn_tables_and_softmax_scale_of_the_release_equal_the_library() -> None:
    """64 rotary dims, factor 40 over 4096: the ramp runs from pair 10 to 23, the scale is 192^-0.5 * 1.368888^2."""
    config = parse_config(with_overrides(RELEASE_V32, num_hidden_layers=1, first_k_dense_replace=1), "config.json")
    theirs = library_config(config)
    embedding = library.DeepseekV32RotaryEmbedding(theirs)
    with torch.device("meta"):
        attention = library.DeepseekV32Attention(theirs, 0)
    assert config.softmax_scale == pytest.approx(0.1352338, rel=1e-6)
    assert config.softmax_scale == pytest.approx(attention.scaling, rel=1e-12)
    assert embedding.attention_scaling == 1.0
    frequencies = rope_frequencies(64, config.rope_theta, config.rope_scaling)
    torch.testing.assert_close(frequencies, embedding.inv_freq, rtol=1e-6, atol=0)
    plain = rope_frequencies(64, config.rope_theta, None)
    assert torch.equal(frequencies[:11], plain[:11])
    torch.testing.assert_close(frequencies[23:] * 40, plain[23:], rtol=1e-6, atol=0)
    assert (frequencies[11:23] < plain[11:23]).all()
    positions = torch.tensor([1, 4097, 163_839])
    cos, sin = embedding(torch.zeros(1), positions[None])
    x = torch.randn(3, 2, 128)
    head, _ = library.apply_rotary_pos_emb(x[None, :, :, :64], x[None, :, :, :64], cos, sin, unsqueeze_dim=2)
    turned = Rotation.at(positions, embedding.inv_freq, 128, halves=True, leading=True)(x)
    torch.testing.assert_close(turned, torch.cat([head[0], x[:, :, 64:]], dim=-1), rtol=1e-5, atol=1e-5)
