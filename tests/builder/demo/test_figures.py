"""The figures mean what they say, and the folder on disk is what they were measured on."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from twostroke.builder.demo import checkpoint
from twostroke.builder.demo.evaluate import target_bits_per_byte
from twostroke.builder.demo.shape import demo_config, initial_weights
from twostroke.builder.demo.tokenizer import train_tokenizer

FOLDER = Path(__file__).parents[3] / "runtime" / "demo" / "v4-dspark"


def test_an_indifferent_target_pays_the_same_bits_for_every_token_exactly_once() -> None:
    text = "def f(x):\n    return x + 1\n" * 20
    tokenizer = train_tokenizer([text], 290)
    config = SimpleNamespace(**(demo_config() | {"vocab_size": tokenizer.get_vocab_size()}))
    weights = initial_weights(config)
    weights["head.weight"].zero_()
    count = len(tokenizer.encode(text).ids) - 1
    expected = count * math.log2(config.vocab_size) / len(text.encode())
    assert count > 64
    for window in (16, 64, 512):
        measured = target_bits_per_byte(config, weights, [text], tokenizer, window)
        assert measured == pytest.approx(expected, rel=1e-5)


def test_saved_weights_come_back_under_their_names_with_the_stored_dtypes(tmp_path: Path) -> None:
    raw = demo_config() | {"vocab_size": 300, "hidden_size": 32}
    config = SimpleNamespace(**raw)
    weights = initial_weights(config)
    tokenizer = train_tokenizer(["x = 1\n" * 50], 300)
    checkpoint.save(tmp_path, raw, weights, tokenizer)
    again, loaded, _ = checkpoint.load(tmp_path)
    assert vars(again) == raw
    assert set(loaded) == set(weights)
    for name, tensor in checkpoint.as_stored(weights).items():
        assert torch.equal(loaded[name], tensor), name
    assert checkpoint.stored_dtype("layers.0.hc_attn_fn") is torch.float32
    assert checkpoint.stored_dtype("layers.0.attn.wq_a.weight") is torch.bfloat16
    assert checkpoint.stored_dtype("mtp.2.hc_head_base") is torch.float32


def test_the_demo_folder_is_small_and_meets_its_bars() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 10_000_000
    record = json.loads((FOLDER / "training.json").read_text())
    bits = record["bits_per_byte"]
    assert all(bits["target"] < value for name, value in bits.items() if name.endswith("kneser_ney"))
    assert record["loops"]["after"]["eight_tokens_thrice"] <= 0.1
    assert record["acceptance"]["tokens_per_iteration"] >= 2.5


def test_the_demo_folder_holds_the_shape_of_the_recipe() -> None:
    config, weights, tokenizer = checkpoint.load(FOLDER)
    assert vars(config) == demo_config()
    expected = initial_weights(config)
    assert {name: tensor.shape for name, tensor in weights.items()} == {n: t.shape for n, t in expected.items()}
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert tokenizer.token_to_id(checkpoint.BOS_TEXT) == config.bos_token_id
    assert tokenizer.token_to_id(checkpoint.EOS_TEXT) == config.eos_token_id
    assert tokenizer.token_to_id(checkpoint.NOISE_TEXT) == config.dspark_noise_token_id
