"""The figures mean what they say, and the folder on disk is what they were measured on."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from twostroke.builder.demo import checkpoint, cli
from twostroke.builder.demo.evaluate import target_bits_per_byte
from twostroke.builder.demo.models import MODELS, DemoModel, v4_dspark, v32_mtp
from twostroke.builder.demo.shape import NOISE
from twostroke.builder.demo.tokenizer import train_tokenizer

FOLDERS = Path(__file__).parents[3] / "runtime" / "demo"
INSTALLED = ("v4-dspark", "v32-mtp")
TOKENS_AN_ITERATION = {"v4-dspark": 2.5, "v32-mtp": 1.9}


@pytest.mark.parametrize(("make", "head"), [(v4_dspark, "head.weight"), (v32_mtp, "lm_head.weight")])
def test_an_indifferent_target_pays_the_same_bits_for_every_token_exactly_once(
    make: Callable[..., DemoModel], head: str
) -> None:
    text = "def f(x):\n    return x + 1\n" * 20
    tokenizer = train_tokenizer([text], 290)
    model = make(vocab_size=tokenizer.get_vocab_size())
    weights = model.initial(model.config, 0)
    weights[head].zero_()
    count = len(tokenizer.encode(text).ids) - 1
    expected = count * math.log2(model.config.vocab_size) / len(text.encode())
    assert count > 64
    for window in (16, 64, 512):
        measured = target_bits_per_byte(model, weights, [text], tokenizer, window)
        assert measured == pytest.approx(expected, rel=1e-5)


def test_saved_weights_come_back_under_their_names_with_the_stored_dtypes(tmp_path: Path) -> None:
    model = v4_dspark(vocab_size=300, hidden_size=32)
    weights = model.initial(model.config, 0)
    tokenizer = train_tokenizer(["x = 1\n" * 50], 300)
    checkpoint.save(tmp_path, model.raw, model.shards(weights), tokenizer)
    again, loaded, _ = checkpoint.load(tmp_path)
    assert vars(again) == model.raw
    assert set(loaded) == set(weights)
    for name, tensor in checkpoint.as_stored(weights).items():
        assert torch.equal(loaded[name], tensor), name
    assert checkpoint.stored_dtype("layers.0.hc_attn_fn") is torch.float32
    assert checkpoint.stored_dtype("layers.0.attn.wq_a.weight") is torch.bfloat16
    assert checkpoint.stored_dtype("mtp.2.hc_head_base") is torch.float32


def test_every_model_of_the_recipe_can_be_asked_for() -> None:
    assert tuple(MODELS) == cli.MODELS
    assert all(make().name == name for name, make in MODELS.items())


@pytest.mark.parametrize("name", INSTALLED)
def test_a_demo_folder_is_small_and_meets_its_bars(name: str) -> None:
    folder = FOLDERS / name
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10_000_000
    record = json.loads((folder / "training.json").read_text())
    bits = record["bits_per_byte"]
    assert all(bits["target"] < value for key, value in bits.items() if key.endswith("kneser_ney"))
    assert record["loops"]["after"]["eight_tokens_thrice"] <= 0.1
    assert record["acceptance"]["tokens_per_iteration"] >= TOKENS_AN_ITERATION[name]


@pytest.mark.parametrize("name", INSTALLED)
def test_a_demo_folder_holds_the_shape_of_the_recipe(name: str) -> None:
    config, weights, tokenizer = checkpoint.load(FOLDERS / name)
    model = MODELS[name]()
    assert vars(config) == model.raw
    expected = {n: t for shard in model.shards(model.initial(config, 0)) for n, t in shard.items()}
    assert {n: tensor.shape for n, tensor in weights.items()} == {n: t.shape for n, t in expected.items()}
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert tokenizer.token_to_id(checkpoint.BOS_TEXT) == config.bos_token_id
    assert tokenizer.token_to_id(checkpoint.EOS_TEXT) == config.eos_token_id
    assert tokenizer.token_to_id(checkpoint.NOISE_TEXT) == NOISE
