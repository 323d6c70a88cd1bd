"""The folder in the released layout: config, two safetensors shards with their index, tokenizer files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

BOS_TEXT, EOS_TEXT, NOISE_TEXT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁noise▁｜>"


def stored_dtype(name: str) -> torch.dtype:
    """V4 section 10.1: float32 for sinks, compressor positions, hyper-connections and the selection bias, the last in
    V3.2 too (section 11)."""
    if name.endswith("tid2eid"):
        return torch.int64
    kept = (
        name.endswith(("attn_sink", ".ape", "gate.bias", "gate.e_score_correction_bias"))
        or "hc_" in name.rsplit(".", 1)[-1]
    )
    return torch.float32 if kept else torch.bfloat16


def as_stored(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values that a reader of the files computes with, in float32 (the hash table stays int64)."""
    return {
        name: tensor.detach().to(stored_dtype(name)).to(torch.int64 if name.endswith("tid2eid") else torch.float32)
        for name, tensor in weights.items()
    }


def save(folder: Path, config: Mapping[str, Any], shards: Sequence[Mapping[str, Tensor]], tokenizer: Tokenizer) -> None:
    """One file of weights for each of `shards`."""
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        stored = {name: tensor.detach().cpu().to(stored_dtype(name)).contiguous() for name, tensor in shard.items()}
        save_file(stored, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(stored, file)
        total += sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))},
    )
    write_json(folder / "config.json", dict(config))
    write_json(
        folder / "generation_config.json",
        {
            "_from_model_config": True,
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": config["eos_token_id"],
            "do_sample": False,
        },
    )
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS_TEXT,
            "eos_token": EOS_TEXT,
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def load(folder: Path) -> tuple[SimpleNamespace, dict[str, Tensor], Tokenizer]:
    """Config, weights in float32 (values as stored) and tokenizer."""
    config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weights: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        weights |= load_file(folder / file)
    return config, as_stored(weights), Tokenizer.from_file(str(folder / "tokenizer.json"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
