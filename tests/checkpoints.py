"""Toy checkpoints with the names, shapes and dtypes of a release and random weights, written in well under a second.

`write_checkpoint(folder, F4)` gives the "F4" fixture, `write_checkpoint(folder, T32)` "T32"; keywords override config
fields (`REMOVED` drops one): `write_checkpoint(folder, F4, sliding_window=6, dspark_markov_rank=REMOVED)`.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from twostroke.builder.config import parse_config
from twostroke.builder.inventory import TensorSpec
from twostroke.builder.networks.registry import TARGETS

REMOVED: Any = object()

# All three layer types, a hash layer, biased routing; window, index_topk and both ratios are crossed within 32 tokens.
F4: Mapping[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "float32",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "compress_ratios": [0, 0, 4, 8, 4, 0, 0, 0, 0],
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 128,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 1,
    "swiglu_limit": 2.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.02,
    "use_cache": True,
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 319,
    "dspark_target_layer_ids": [3, 4, 5],
    "dspark_markov_rank": 8,
}

# The same network over eight tokens: small enough to compare whole distributions.
TINY8: Mapping[str, Any] = {**F4, "vocab_size": 8, "dspark_noise_token_id": 7}

# The same target with the Preview's drafter: one NextN block, no dspark_* fields.
F4_PREVIEW: Mapping[str, Any] = {
    **{name: value for name, value in F4.items() if not name.startswith("dspark_")},
    "compress_ratios": [0, 0, 4, 8, 4, 0, 0],
}
PREVIEW8: Mapping[str, Any] = {**F4_PREVIEW, "vocab_size": 8}

# The same target without a drafter.
F4_PLAIN: Mapping[str, Any] = {
    **{name: value for name, value in F4.items() if not name.startswith("dspark_")},
    "compress_ratios": [0, 0, 4, 8, 4, 0],
    "num_nextn_predict_layers": 0,
}

# What a release's config says of its quantised weights.
FP8_BLOCKS: Mapping[str, Any] = {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    }
}

# The numbers of the 0731 release. For counting only: nobody writes 284 B weights.
FLASH_0731: Mapping[str, Any] = {
    **F4,
    **FP8_BLOCKS,
    "expert_dtype": "fp4",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}


# F4 as released, in widths that cut blocks: FP8 linears, packed FP4 experts.
F4_FP8: Mapping[str, Any] = {
    **F4,
    **FP8_BLOCKS,
    "torch_dtype": "bfloat16",
    "expert_dtype": "fp4",
    "hidden_size": 160,
    "q_lora_rank": 144,
    "num_attention_heads": 6,
    "o_lora_rank": 80,
    "moe_intermediate_size": 96,
}

# V3.2: a dense layer and two of experts, an MTP layer; index_topk and, with pages of 4 tokens, pages are crossed early.
T32: Mapping[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "torch_dtype": "float32",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
    "max_position_embeddings": 96,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.02,
    "use_cache": True,
    "num_nextn_predict_layers": 1,
}

T32_8: Mapping[str, Any] = {**T32, "vocab_size": 8}

# T32 as released, in widths that cut blocks: every matrix of a layer FP8.
T32_FP8: Mapping[str, Any] = {
    **T32,
    **FP8_BLOCKS,
    "torch_dtype": "bfloat16",
    "hidden_size": 160,
    "q_lora_rank": 144,
    "intermediate_size": 200,
    "moe_intermediate_size": 136,
}

# The numbers of the V3.2 release. For counting only.
RELEASE_V32: Mapping[str, Any] = {
    **T32,
    **FP8_BLOCKS,
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "max_position_embeddings": 163840,
    "rope_scaling": {**T32["rope_scaling"], "factor": 40, "original_max_position_embeddings": 4096},
}


def with_overrides(config: Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
    """`config` with fields replaced, or dropped where the value is `REMOVED`."""
    return {name: value for name, value in {**config, **overrides}.items() if value is not REMOVED}


def write_checkpoint(
    folder: Path | str,
    config: Mapping[str, Any] = F4,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 2,
    scale: float = 3.0,
    edit: Callable[[dict[str, torch.Tensor]], None] | None = None,
    **overrides: Any,
) -> Path:
    """Write config.json and random weights (logits of about `scale`) in `shards` files, and return the folder.

    `dtype` is float32 (everything) or bfloat16 (as released: weights BF16; hyper-connections, sinks, ape and gate bias
    F32); a quantised config gets its codes and scales whatever it is. One shard gives a lone model.safetensors without
    an index. `edit` may change the tensors before they are written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if "quantization_config" in config:
        dtype = "bfloat16"
    values = with_overrides({**config, "torch_dtype": dtype}, **overrides)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    tensors = random_weights(parse_config(values, "config.json"), seed=seed, dtype=dtype, scale=scale)
    if edit is not None:
        edit(tensors)
    write_tensors(folder, tensors, shards)
    return folder


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> None:
    """`tensors` dealt in order over `shards` safetensors files, with an index when there is more than one."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        mine = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map.update(dict.fromkeys(mine, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def random_weights(
    config: Any, *, seed: int = 0, dtype: str = "float32", scale: float = 3.0
) -> dict[str, torch.Tensor]:
    """Every tensor of the inventory; a draft's embedding and head are copies of the target's, as released. A tensor's
    values depend on seed, name and shape only, so that a changed config keeps all weights it does not reshape."""
    if config.quantised:
        return quantised_weights(config, seed=seed, scale=scale)
    weights = {}
    for spec in TARGETS[config.model_type].all_tensors(config):
        if spec.copy_of is not None:
            weights[spec.name] = weights[spec.copy_of].clone()
            continue
        values = torch.from_numpy(_values(spec, config, seed, scale))
        if values.is_floating_point():
            values = values.to(torch.bfloat16 if dtype == "bfloat16" and spec.dtypes[0] == "BF16" else torch.float32)
        weights[spec.name] = values
    return weights


def quantised_weights(config: Any, *, seed: int = 0, scale: float = 3.0) -> dict[str, torch.Tensor]:
    """The random weights of the same config without quantisation, codes and scales in place of those that a release
    quantises. V4's scales are powers of two, V3.2's are not."""
    plain = random_weights(replace(config, quantised=False), seed=seed, dtype="bfloat16", scale=scale)
    weights: dict[str, torch.Tensor] = {}
    for spec in TARGETS[config.model_type].all_tensors(config):
        kind = spec.dtypes[0]
        if kind in ("F8_E4M3", "I8"):
            scaled = _fp8 if kind == "F8_E4M3" else _fp4
            stem = spec.name.removesuffix(".weight")
            name = "scale" if config.model_type == "deepseek_v4" else "weight_scale_inv"
            codes, scales = scaled(plain[spec.name].float(), power_of_two=name == "scale")
            weights[spec.name], weights[f"{stem}.{name}"] = codes, scales
        elif spec.name not in weights:
            weights[spec.name] = plain[spec.name]
    return weights


def _fp8(values: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes and a scale for each block of 128 x 128."""
    rows, columns = (-(-size // 128) for size in values.shape)
    scales = torch.zeros(rows, columns)
    codes = torch.zeros(values.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            scales[i, j] = values[block].abs().max() / 448
            if power_of_two:
                scales[i, j] = 2.0 ** math.ceil(math.log2(scales[i, j]))
            codes[block] = (values[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales.to(torch.float8_e8m0fnu) if power_of_two else scales


FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _fp4(values: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two e2m1 codes a byte, the even column in the low half, and a scale for every 32 of a row."""
    groups = values.reshape(values.shape[0], -1, 32)
    scales = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(dim=2) / 6)))
    size = (groups / scales[..., None]).reshape(values.shape)
    code = (size.abs()[..., None] - FP4_VALUES).abs().argmin(dim=-1) + 8 * (size < 0)
    return (code[:, ::2] + 16 * code[:, 1::2]).to(torch.uint8).view(torch.int8), scales.to(torch.float8_e8m0fnu)


def _values(spec: TensorSpec, config: Any, seed: int, scale: float) -> np.ndarray:
    """Sizes that keep every sublayer's output near one, so that each part of the network matters to the logits."""
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    if spec.name.endswith("tid2eid"):  # [V, experts per token], distinct within a row
        order = rng.random((spec.shape[0], config.n_routed_experts)).argsort(axis=1)
        return order[:, : spec.shape[1]].astype(np.int64)
    values = rng.standard_normal(spec.shape)
    part = spec.name.removesuffix(".weight").rsplit(".", 1)[-1]
    if part.endswith("norm"):
        return 1 + 0.1 * values
    if part.startswith("hc_") and part.endswith("_scale"):
        return 0.8 + 0.1 * values
    if (part.startswith("hc_") and part.endswith("_base")) or part in ("ape", "attn_sink"):
        return 0.5 * values
    if part.endswith("bias"):
        return 0.2 * values
    if part in ("embed", "embed_tokens", "markov_w1"):
        return values
    if part in ("head", "lm_head", "markov_w2"):
        return scale * values / math.sqrt(spec.shape[-1])
    return values / math.sqrt(spec.shape[-1])
