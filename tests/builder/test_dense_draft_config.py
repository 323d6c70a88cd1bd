"""Drafts of dense targets: the spellings of their config, and what a person reads when it contradicts itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from twostroke.builder.config import parse_config
from twostroke.builder.dense_draft_config import DenseDraftConfig, is_dense_draft, read_dense_draft
from twostroke.engines.errors import ConfigError
from twostroke.tests.checkpoints import F4, F4_PLAIN, REMOVED, T32, with_overrides
from twostroke.tests.dense_drafts import SPECULATORS, TOY, TOY_DRAFT


def read(base: Mapping[str, Any] = TOY, **overrides: Any) -> DenseDraftConfig:
    return read_dense_draft(with_overrides(base, **overrides), "draft/config.json")


def refusal(base: Mapping[str, Any] = TOY, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(base, **overrides)
    message = str(caught.value)
    assert message.startswith("draft/config.json"), "the file is named"
    assert "\n" not in message
    return message


def moved(section: str, prefix: str = "", **overrides: Any) -> dict[str, Any]:
    """The toy config with all of the draft's fields in a section."""
    fields = {prefix + name: value for name, value in {**TOY_DRAFT, **overrides}.items()}
    return {**dict.fromkeys(TOY_DRAFT, REMOVED), section: fields}


# Base models' own numbers, then what the draft adds: layers captured, mask token, block (`spec/dspark.md` 2.2).
RELEASED = {
    "Qwen3-4B": ("qwen3", 2560, 151936, 36, [1, 9, 17, 25, 33], 151669),
    "Qwen3-8B": ("qwen3", 4096, 151936, 36, [1, 9, 17, 25, 33], 151669),
    "Qwen3-14B": ("qwen3", 5120, 151936, 40, [1, 10, 19, 28, 37], 151669),
    "Gemma4-12B": ("gemma4_text", 3840, 262144, 48, [5, 17, 29, 41, 46], 4),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_drafts_are_read(name: str) -> None:
    base, hidden, vocab, layers, captured, mask = RELEASED[name]
    config = read(
        model_type=base,
        hidden_size=hidden,
        vocab_size=vocab,
        num_hidden_layers=5,
        num_target_layers=layers,
        target_layer_ids=captured,
        mask_token_id=mask,
        block_size=7,
        markov_rank=256,
    )
    assert (config.num_hidden_layers, config.target_layer_ids, config.mask_token_id) == (5, tuple(captured), mask)
    assert (config.block_size, config.draft_len, config.sample_from_anchor) == (7, 7, True)
    assert (config.markov_rank, config.markov_head_type) == (256, "vanilla")
    assert config.enable_confidence_head
    assert config.confidence_head_with_markov
    assert (config.draft_vocab_size, config.num_target_layers) == (vocab, layers)


@pytest.mark.parametrize("section", ["dflash_config", "dspark_config"])
def test_fields_of_a_section_mean_what_they_mean_at_top_level(section: str) -> None:
    assert read(**moved(section)) == read()


def test_prefixed_fields_mean_the_same_and_call_the_mask_token_noise() -> None:
    prefixed = {f"dspark_{name}": value for name, value in TOY_DRAFT.items() if name != "mask_token_id"}
    given = {**dict.fromkeys(TOY_DRAFT, REMOVED), **prefixed, "dspark_noise_token_id": TOY["mask_token_id"]}
    assert read(**given) == read()


def test_later_places_override_earlier_ones_and_a_prefixed_field_beats_all(caplog: pytest.LogCaptureFixture) -> None:
    places: list[tuple[str, dict[str, Any]]] = [
        ("block_size", {"block_size": 3}),
        ("dflash_config.block_size", {"dflash_config": {"block_size": 4}}),
        ("dspark_config.block_size", {"dspark_config": {"block_size": 5}}),
        ("dspark_block_size", {"dspark_block_size": 6}),
    ]
    given: dict[str, Any] = {}
    for i, (place, fields) in enumerate(places):
        caplog.clear()
        given |= fields
        assert read(**given).block_size == 3 + i
        if i:
            assert f"{place} = {3 + i} overrides {places[i - 1][0]} = {2 + i}" in caplog.text
    given["dspark_config"] = {"block_size": 6, "markov_rank": None}
    assert read(**given).markov_rank == TOY["markov_rank"], "null is no value"


def test_agreeing_places_are_no_override(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(dspark_config=dict(TOY_DRAFT)) == read()
    assert not caplog.records


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_every_head_type_is_read(kind: str) -> None:
    assert read(markov_head_type=kind).markov_head_type == kind


def test_head_type_is_required_with_a_rank_unless_the_prefixed_style_is_used() -> None:
    assert "field markov_head_type is missing" in refusal(markov_head_type=REMOVED)
    assert read(markov_head_type=REMOVED, dspark_markov_rank=4).markov_head_type == "vanilla"
    without = read(markov_head_type=REMOVED, markov_rank=0, confidence_head_with_markov=False)
    assert (without.markov_rank, without.markov_head_type) == (0, None)


def test_flags_of_the_confidence_head() -> None:
    absent = read(enable_confidence_head=REMOVED, confidence_head_with_markov=REMOVED)
    assert (absent.enable_confidence_head, absent.confidence_head_with_markov) == (True, True)
    assert read(confidence_head_with_markov=False).confidence_head_with_markov is False
    off = read(enable_confidence_head=False)
    assert (off.enable_confidence_head, off.confidence_head_with_markov) == (False, False)
    rankless = read(markov_rank=0, confidence_head_with_markov=REMOVED)
    assert rankless.confidence_head_with_markov is False
    assert "confidence_head_with_markov is True; but markov_rank is 0" in refusal(markov_rank=0)


@pytest.mark.parametrize(
    "name", ["block_size", "target_layer_ids", "mask_token_id", "num_target_layers", "markov_rank"]
)
def test_a_field_without_default_is_refused_by_name_when_missing(name: str) -> None:
    assert f"field {name} is missing" in refusal(**{name: REMOVED})


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("block_size", 0, "from 1 to 64"),
        ("block_size", True, "expected an integer"),
        ("mask_token_id", 32, "from 0 to 31"),
        ("markov_rank", -1, "expected an integer"),
        ("markov_head_type", "mlp", "accepted: vanilla, gated, rnn"),
        ("enable_confidence_head", "yes", "expected true or false"),
        ("sample_from_anchor", 1, "expected true or false"),
        ("draft_vocab_size", 33, "from 2 to 32"),
        ("num_target_layers", 1, "from 2 to"),
        ("target_layer_ids", [], "expected a list"),
        ("target_layer_ids", [1, "3"], "expected an integer"),
        ("target_layer_ids", [1, 8], "from -1 to 7"),
        ("target_layer_ids", [-2, 1], "from -1 to 7"),
        ("target_layer_ids", [3, 1], "in ascending order"),
        ("target_layer_ids", [3, 3], "each layer once"),
        ("speculators_model_type", "eagle3", "accepted: dspark"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_can(name: str, value: Any, accepted: str) -> None:
    message = refusal(**{name: value})
    assert f"field {name}" in message
    assert accepted in message


def test_the_place_of_a_bad_value_is_named() -> None:
    assert "field dspark_config.block_size is 0" in refusal(dspark_config={"block_size": 0})
    assert "field dflash_config.target_layer_ids[1] is 9" in refusal(dflash_config={"target_layer_ids": [1, 9]})
    assert "field dspark_noise_token_id is 99" in refusal(dspark_noise_token_id=99)
    assert "field dspark_config is [1]" in refusal(dspark_config=[1])


def test_the_targets_last_layer_is_no_capture_point_and_the_embedding_is_one() -> None:
    message = refusal(target_layer_ids=[1, 7])
    assert "7 is the last of the target's 8 layers" in message
    assert "accepted: -1 to 6" in message
    assert read(target_layer_ids=[-1, 6]).target_layer_ids == (-1, 6)


def test_a_field_of_the_draft_that_nobody_knows_is_refused() -> None:
    assert "dspark_config.shift_label = True" in refusal(dspark_config={"shift_label": True})
    assert "dflash_config.use_swa = True" in refusal(dflash_config={"use_swa": True})
    assert "not understood: dspark_window" in refusal(dspark_window=8)
    assert read(dspark_config={"num_anchors": 512, "loss_decay_gamma": 4.0}) == read(), "training only"


def test_a_speculators_export_drops_the_anchor_row_unless_it_says_otherwise() -> None:
    config = read(SPECULATORS)
    assert (config.base, config.hidden_size, config.num_hidden_layers) == ("qwen3", 16, 2)
    assert config.sample_from_anchor is False
    assert (config.block_size, config.draft_len) == (8, 7), "1 + gamma rows"
    assert config.num_target_layers is None
    assert read(SPECULATORS, sample_from_anchor=True).draft_len == 8
    assert "block_size is 1" in refusal(SPECULATORS, block_size=1), "nothing would be drafted"
    assert read(sample_from_anchor=False).draft_len == TOY["block_size"] - 1, "any format may say so"


def test_a_speculators_export_counts_captured_layers_from_the_embedding() -> None:
    assert read(SPECULATORS, aux_hidden_state_layer_ids=[0, 2, 6]).target_layer_ids == (-1, 1, 5)
    assert read(SPECULATORS, target_layer_ids=[1, 5]).target_layer_ids == (1, 5)
    message = refusal(SPECULATORS, target_layer_ids=[2, 6])
    assert "target_layer_ids is [2, 6]; but aux_hidden_state_layer_ids" in message
    last = refusal(SPECULATORS, aux_hidden_state_layer_ids=[2, 8], num_target_layers=8)
    assert "aux_hidden_state_layer_ids is [2, 8]; 8 is the last of the target's 8 layers" in last
    assert "field target_layer_ids is missing" in refusal(SPECULATORS, aux_hidden_state_layer_ids=REMOVED)


def test_a_reduced_vocabulary_is_read() -> None:
    assert read(SPECULATORS, draft_vocab_size=8).draft_vocab_size == 8
    assert read(SPECULATORS, draft_vocab_size=REMOVED).draft_vocab_size == 32


@pytest.mark.parametrize("config", [TOY, SPECULATORS, with_overrides(TOY, **moved("dspark_config"))])
def test_such_a_config_is_told_from_a_checkpoint_and_refused_by_a_build(config: Mapping[str, Any]) -> None:
    assert is_dense_draft(config)
    with pytest.raises(ConfigError) as caught:
        parse_config(config, "draft/config.json")
    assert "draft for a dense target ('qwen3'); dense targets are not supported for building" in str(caught.value)
    assert "`twostroke inspect` explains the folder" in str(caught.value)


@pytest.mark.parametrize(
    "config", [F4, F4_PLAIN, T32, {**F4, "model_type": "deepseek_v41"}, {"model_type": "qwen3"}, {}]
)
def test_checkpoints_of_targets_are_no_such_draft(config: Mapping[str, Any]) -> None:
    assert not is_dense_draft(config)
