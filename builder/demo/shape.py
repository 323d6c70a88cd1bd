"""v4-dspark's config.json and its weights before training; the token ids and frozen weights of both demo models."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

BOS, EOS, NOISE = 0, 1, 2


def demo_config() -> dict[str, Any]:
    """All fields of a V4-Flash-0731 config.json, at a size that trains in minutes and fits in 10 MB."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 1024,
        "hidden_size": 192,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 64,
        "sliding_window": 64,
        "compress_ratios": [0, 4, 128, 4, 4, 0, 0, 0],
        "compress_rope_theta": 160000,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 2048,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 32,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "num_hash_layers": 1,
        "swiglu_limit": 10.0,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "expert_dtype": "bf16",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        "initializer_range": 0.02,
        "use_cache": True,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 5,
        "dspark_noise_token_id": NOISE,
        "dspark_target_layer_ids": [2, 3, 4],
        "dspark_markov_rank": 64,
    }


def initial_weights(config: SimpleNamespace, seed: int = 0) -> dict[str, Tensor]:
    """Float32 weights under the checkpoint's names, on the CPU; `tid2eid` is int64 and never trained."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    hidden, streams, width = config.hidden_size, config.hc_mult, config.head_dim

    def normal(name: str, *shape: int, std: float | None = None) -> None:
        weights[name] = torch.randn(*shape, generator=generator) * (shape[-1] ** -0.5 if std is None else std)

    def ones(name: str, size: int) -> None:
        weights[name] = torch.ones(size)

    def hyper_connection(at: str, number: int) -> None:
        normal(f"{at}_fn", (2 + streams) * streams, streams * hidden, std=0.01)
        # Streams start as equals: without a tilt in what they receive they would stay equal for ever.
        turn = torch.arange(streams) == number % streams
        pre = torch.where(turn, 0.5, -0.5)
        post = torch.where(turn, -0.5, 0.5)
        weights[f"{at}_base"] = torch.cat((pre, post, 3 * torch.eye(streams).flatten()))
        weights[f"{at}_scale"] = torch.full((3,), 0.5)

    def head(at: str) -> None:
        normal(f"{at}_fn", streams, streams * hidden, std=0.01)
        weights[f"{at}_base"] = torch.zeros(streams)
        weights[f"{at}_scale"] = torch.full((1,), 0.5)

    def compressor(at: str, ratio: int, size: int) -> None:
        features = size * (2 if ratio == 4 else 1)
        normal(f"{at}.ape", ratio, features, std=0.02)
        ones(f"{at}.norm.weight", size)
        normal(f"{at}.wkv.weight", features, hidden)
        normal(f"{at}.wgate.weight", features, hidden, std=0.02)

    def block(at: str, number: int, ratio: int, hashed: bool) -> None:
        for kind in ("attn", "ffn"):
            ones(f"{at}.{kind}_norm.weight", hidden)
            hyper_connection(f"{at}.hc_{kind}", number)
        attn, heads = f"{at}.attn", config.num_attention_heads
        weights[f"{attn}.attn_sink"] = torch.zeros(heads)
        ones(f"{attn}.q_norm.weight", config.q_lora_rank)
        ones(f"{attn}.kv_norm.weight", width)
        normal(f"{attn}.wq_a.weight", config.q_lora_rank, hidden)
        normal(f"{attn}.wq_b.weight", heads * width, config.q_lora_rank)
        normal(f"{attn}.wkv.weight", width, hidden)
        normal(f"{attn}.wo_a.weight", config.o_groups * config.o_lora_rank, heads * width // config.o_groups)
        normal(f"{attn}.wo_b.weight", hidden, config.o_groups * config.o_lora_rank, std=0.02)
        if ratio:
            compressor(f"{attn}.compressor", ratio, width)
        if ratio == 4:
            rows = config.index_n_heads * config.index_head_dim
            normal(f"{attn}.indexer.wq_b.weight", rows, config.q_lora_rank)
            normal(f"{attn}.indexer.weights_proj.weight", config.index_n_heads, hidden)
            compressor(f"{attn}.indexer.compressor", ratio, config.index_head_dim)
        ffn, inner = f"{at}.ffn", config.moe_intermediate_size
        normal(f"{ffn}.gate.weight", config.n_routed_experts, hidden)
        if hashed:
            draws = torch.rand(config.vocab_size, config.n_routed_experts, generator=generator)
            weights[f"{ffn}.gate.tid2eid"] = draws.argsort(-1)[:, : config.num_experts_per_tok].contiguous()
        else:
            weights[f"{ffn}.gate.bias"] = torch.zeros(config.n_routed_experts)
        for expert in [f"experts.{e}" for e in range(config.n_routed_experts)] + ["shared_experts"]:
            normal(f"{ffn}.{expert}.w1.weight", inner, hidden)
            normal(f"{ffn}.{expert}.w3.weight", inner, hidden)
            normal(f"{ffn}.{expert}.w2.weight", hidden, inner, std=0.02)

    normal("embed.weight", config.vocab_size, hidden, std=0.1)
    normal("head.weight", config.vocab_size, hidden)
    ones("norm.weight", hidden)
    head("hc_head")
    for layer in range(config.num_hidden_layers):
        block(f"layers.{layer}", layer, config.compress_ratios[layer], layer < config.num_hash_layers)
    stages = len(config.dspark_target_layer_ids)
    for stage in range(stages):
        block(f"mtp.{stage}", stage, 0, False)
    normal("mtp.0.main_proj.weight", hidden, stages * hidden)
    ones("mtp.0.main_norm.weight", hidden)
    last, rank = f"mtp.{stages - 1}", config.dspark_markov_rank
    ones(f"{last}.norm.weight", hidden)
    head(f"{last}.hc_head")
    normal(f"{last}.markov_head.markov_w1.weight", config.vocab_size, rank)
    normal(f"{last}.markov_head.markov_w2.weight", config.vocab_size, rank, std=0.02)
    normal(f"{last}.confidence_head.proj.weight", 1, hidden + rank, std=0.01)
    return weights


def is_trained(name: str) -> bool:
    """Everything but the hash table and the selection bias, which balances load outside the gradient."""
    return not name.endswith((".tid2eid", "gate.bias", "gate.e_score_correction_bias"))
