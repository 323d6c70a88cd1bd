"""v32-mtp: its config.json, its weights before training, and where its recipe departs from the common one."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from twostroke.builder.demo.shape import BOS, EOS

RECIPE = {
    "steps": 3200,
    "loop_rounds": 3,
    "prompt_length": 160,  # the MTP layer looks back over the whole text
    "sequences": 24576,
    "draft_steps": 10000,
}


def demo_config() -> dict[str, Any]:
    """All fields of a V3.2 config.json, at a size that trains in minutes and fits in 10 MB."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "vocab_size": 1024,
        "hidden_size": 192,
        "num_hidden_layers": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "intermediate_size": 512,
        "moe_intermediate_size": 72,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 64,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        "initializer_range": 0.02,
        "use_cache": True,
        "num_nextn_predict_layers": 1,
    }


def initial_weights(config: SimpleNamespace, seed: int = 0) -> dict[str, Tensor]:
    """Float32 weights under the checkpoint's names, on the CPU. The MTP layer shares embedding and head."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    hidden, heads = config.hidden_size, config.num_attention_heads

    def normal(name: str, *shape: int, std: float | None = None) -> None:
        scale = shape[-1] ** -0.5 if std is None else std
        weights[f"{name}.weight"] = torch.randn(*shape, generator=generator) * scale

    def ones(name: str, size: int) -> None:
        weights[f"{name}.weight"] = torch.ones(size)

    def mlp(at: str, inner: int) -> None:
        normal(f"{at}.gate_proj", inner, hidden)
        normal(f"{at}.up_proj", inner, hidden)
        normal(f"{at}.down_proj", hidden, inner, std=0.02)

    def layer(at: str, dense: bool) -> None:
        ones(f"{at}.input_layernorm", hidden)
        ones(f"{at}.post_attention_layernorm", hidden)
        attn, indexer = f"{at}.self_attn", f"{at}.self_attn.indexer"
        normal(f"{attn}.q_a_proj", config.q_lora_rank, hidden)
        ones(f"{attn}.q_a_layernorm", config.q_lora_rank)
        normal(f"{attn}.q_b_proj", heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), config.q_lora_rank)
        normal(f"{attn}.kv_a_proj_with_mqa", config.kv_lora_rank + config.qk_rope_head_dim, hidden)
        ones(f"{attn}.kv_a_layernorm", config.kv_lora_rank)
        normal(f"{attn}.kv_b_proj", heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank)
        normal(f"{attn}.o_proj", hidden, heads * config.v_head_dim, std=0.02)
        normal(f"{indexer}.wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        normal(f"{indexer}.wk", config.index_head_dim, hidden)
        ones(f"{indexer}.k_norm", config.index_head_dim)
        weights[f"{indexer}.k_norm.bias"] = torch.zeros(config.index_head_dim)
        normal(f"{indexer}.weights_proj", config.index_n_heads, hidden)
        if dense:
            mlp(f"{at}.mlp", config.intermediate_size)
            return
        normal(f"{at}.mlp.gate", config.n_routed_experts, hidden)
        weights[f"{at}.mlp.gate.e_score_correction_bias"] = torch.zeros(config.n_routed_experts)
        for expert in [f"experts.{e}" for e in range(config.n_routed_experts)] + ["shared_experts"]:
            mlp(f"{at}.mlp.{expert}", config.moe_intermediate_size)

    normal("model.embed_tokens", config.vocab_size, hidden, std=0.1)
    normal("lm_head", config.vocab_size, hidden)
    ones("model.norm", hidden)
    for number in range(config.num_hidden_layers):
        layer(f"model.layers.{number}", number < config.first_k_dense_replace)
    for number in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        at = f"model.layers.{number}"
        for name in ("enorm", "hnorm", "shared_head.norm"):
            ones(f"{at}.{name}", hidden)
        normal(f"{at}.eh_proj", hidden, 2 * hidden)
        layer(at, dense=False)
    return weights
