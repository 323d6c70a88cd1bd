"""Folders that transformers wrote: another spelling of the config, other names, experts in one tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.builder.checkpoint import Checkpoint
from twostroke.builder.config import parse_config
from twostroke.builder.networks.registry import TARGETS
from twostroke.engines.errors import CheckpointError, ConfigError
from twostroke.tests.builder.test_transformers_parity import library_config, library_weights
from twostroke.tests.checkpoints import F4_FP8, F4_PLAIN, random_weights, write_checkpoint, write_tensors


@pytest.fixture
def original(tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(write_checkpoint(tmp_path / "original", F4_PLAIN))


def test_a_folder_of_transformers_holds_the_tensors_of_the_original(original: Checkpoint, tmp_path: Path) -> None:
    """Its config is the library's own, as `save_pretrained` writes it."""
    folder = tmp_path / "transformers"
    weights = random_weights(original.config)
    config = library_config(original.config)
    config.dtype = torch.float32
    config.save_pretrained(folder)
    write_tensors(folder, {name: t.contiguous() for name, t in library_weights(original.config, weights).items()}, 3)
    found = Checkpoint.open(folder)
    found.check(TARGETS["deepseek_v4"].target_tensors(found.config))
    assert found.entries.keys() == original.entries.keys()
    for name in original.entries:
        assert torch.equal(found.read(name), original.read(name)), name


def test_fp8_linears_keep_their_scales_under_the_librarys_suffix(tmp_path: Path) -> None:
    """As far as names go: `weight_scale_inv` beside a linear is V4's `scale`."""
    plain = Checkpoint.open(write_checkpoint(tmp_path, F4_FP8)).entries
    theirs = {
        name.replace("layers.0.attn.wq_a.", "model.layers.0.self_attn.q_a_proj.").replace(
            "q_a_proj.scale", "q_a_proj.weight_scale_inv"
        ): entry
        for name, entry in plain.items()
    }
    from twostroke.builder.checkpoint import with_family_scales

    assert with_family_scales(TARGETS["deepseek_v4"].original_names(theirs), "scale") == dict(plain)


def refusal(change: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config({**F4_PLAIN, **change}, "config.json")
    return str(caught.value)


def test_a_field_in_two_spellings_must_say_the_same() -> None:
    hashed = ["hash_moe"] + ["moe"] * 5
    same = {"mlp_layer_types": hashed, "partial_rotary_factor": 0.25}
    assert parse_config({**F4_PLAIN, **same}, "config.json") == parse_config(F4_PLAIN, "config.json")
    assert "num_hash_layers is 1, but mlp_layer_types means 2" in refusal(
        {"mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 4}
    )
    assert "mlp_layer_types" in refusal({"mlp_layer_types": ["moe", *hashed[:-1]]})
    assert "qk_rope_head_dim is 8, but partial_rotary_factor means 4" in refusal({"partial_rotary_factor": 0.125})
    types = ["sliding_attention"] * 2 + ["compressed_sparse_attention", "heavily_compressed_attention"] * 2
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    assert "compress_ratios is" in refusal({"compress_rates": rates, "layer_types": types})
    assert "beside a list layer_types" in refusal({"compress_rates": rates})


def test_the_config_of_the_publishers_inference_code_is_told_apart() -> None:
    inference = {"dim": 4096, "n_layers": 43, "vocab_size": 129280}
    with pytest.raises(ConfigError, match=r"put the config\.json of the release in its place"):
        parse_config(inference, "config.json")


def test_what_is_no_bank_or_is_there_twice_is_named(original: Checkpoint) -> None:
    names = TARGETS["deepseek_v4"].original_names
    entry = original.entries["embed.weight"]
    with pytest.raises(CheckpointError, match=r"gate_up_proj has shape \[320, 64\]; expected \[experts, 2 \* rows"):
        names({"model.layers.0.mlp.experts.gate_up_proj": entry})
    with pytest.raises(CheckpointError, match=r"embed\.weight is there twice, once as model\.embed"):
        names({"embed.weight": entry, "model.embed_tokens.weight": entry})


def test_the_saved_config_is_another_spelling_indeed(original: Checkpoint, tmp_path: Path) -> None:
    library_config(original.config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {"compress_rates", "mlp_layer_types"} <= saved.keys()
    assert "compress_ratios" not in saved
