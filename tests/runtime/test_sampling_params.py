from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import numpy as np
import pytest

from twostroke.engines.errors import RequestError
from twostroke.plugins.accept import SamplingSlots
from twostroke.runtime.sampling_params import NOT_SERVED, SamplingParams

# Keywords and defaults of tensorrt_llm.SamplingParams, release 1 and what its main branch has added since.
TENSORRT_LLM: dict[str, Any] = {
    "end_id": None,
    "pad_id": None,
    "max_tokens": 32,
    "bad": None,
    "bad_token_ids": None,
    "stop": None,
    "stop_token_ids": None,
    "include_stop_str_in_output": False,
    "embedding_bias": None,
    "logits_processor": None,
    "apply_batched_logits_processor": False,
    "n": 1,
    "best_of": None,
    "use_beam_search": False,
    "top_k": None,
    "top_p": None,
    "top_p_min": None,
    "top_p_reset_ids": None,
    "top_p_decay": None,
    "seed": None,
    "temperature": None,
    "min_tokens": None,
    "beam_search_diversity_rate": None,
    "repetition_penalty": None,
    "presence_penalty": None,
    "frequency_penalty": None,
    "length_penalty": None,
    "early_stopping": None,
    "no_repeat_ngram_size": None,
    "prompt_ignore_length": None,
    "min_p": None,
    "beam_width_array": None,
    "logprobs": None,
    "prompt_logprobs": None,
    "logprobs_mode": None,
    "logprobs_simple_format": False,
    "prompt_logprobs_simple_format": False,
    "return_context_logits": False,
    "return_generation_logits": False,
    "exclude_input_from_output": True,
    "return_encoder_output": False,
    "return_perf_metrics": False,
    "additional_model_outputs": None,
    "lookahead_config": None,
    "guided_decoding": None,
    "ignore_eos": False,
    "detokenize": True,
    "add_special_tokens": True,
    "truncate_prompt_tokens": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
OURS = {"logit_bias", "coupling", "speculative"}
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


def test_names_and_defaults_are_those_of_tensorrt_llm() -> None:
    assert {name: default for name, default in DEFAULTS.items() if name not in OURS} == TENSORRT_LLM


def test_the_list_agrees_with_an_installed_tensorrt_llm() -> None:
    theirs = pytest.importorskip("tensorrt_llm").SamplingParams
    named = {name for name in inspect.signature(theirs).parameters if not name.startswith("_")}
    assert named <= set(TENSORRT_LLM)


def other_than(default: Any) -> Any:
    """A value of the kind that is not the default."""
    if isinstance(default, bool):
        return not default
    return 2


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_a_field_that_is_not_served_is_refused_by_name(name: str) -> None:
    SamplingParams(**{name: DEFAULTS[name]})
    with pytest.raises(RequestError, match=rf"{name}=.* is not supported, only .* is accepted") as caught:
        SamplingParams(**{name: other_than(DEFAULTS[name])})
    assert caught.value.field == name


def test_all_refused_fields_are_named_at_once() -> None:
    with pytest.raises(RequestError, match=r"use_beam_search=True is not supported.*; logprobs=5 is not supported"):
        SamplingParams(use_beam_search=True, logprobs=5)


def test_a_refused_array_is_named_without_comparing_it() -> None:
    with pytest.raises(RequestError, match="embedding_bias"):
        SamplingParams(embedding_bias=np.zeros(320))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", None),
        ("min_tokens", -1),
        ("min_tokens", 33),
        ("end_id", -2),
        ("end_id", "1"),
        ("pad_id", 1.5),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", 2),
        ("min_p", "0.1"),
        ("temperature", -1),
        ("temperature", 1e-9),
        ("temperature", math.inf),
        ("temperature", True),
        ("seed", -1),
        ("seed", 2**64),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 1e-46),
        ("repetition_penalty", 1e39),
        ("presence_penalty", -1e39),
        ("frequency_penalty", 1e39),
        ("logit_bias", {1: 1e39}),
        ("logit_bias", {1: -1e39}),
        ("truncate_prompt_tokens", 0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [-1]),
        ("bad_token_ids", ["a"]),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: "x"}),
        ("coupling", "exact"),
        ("speculative", "on"),
        ("speculative", -1),
        ("ignore_eos", 1),
        ("detokenize", None),
    ],
)
def test_a_value_out_of_range_is_one_sentence_that_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=r"is .*, expected ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    assert "\n" not in str(caught.value)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="stop needs detokenize=True") as caught:
        SamplingParams(stop="a", detokenize=False)
    assert caught.value.field == "stop"


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_a_change_after_construction_is_checked_when_copied() -> None:
    params = SamplingParams()
    params.max_tokens = 0
    with pytest.raises(RequestError, match="max_tokens is 0"):
        dataclasses.replace(params)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"seed": 5},
        {"temperature": 0},
        {"top_k": 1, "temperature": 0.7},
        {"top_p": 0.0},
        {"temperature": 0, "top_p": 0.9},
    ],
)
def test_no_sampling_field_or_a_degenerate_one_means_greedy(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    assert params.greedy
    assert params.judging()["temperature"] == 0


@pytest.mark.parametrize("given", [{"top_k": 5}, {"top_k": 0}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_cut_off_without_a_temperature_samples_at_one(given: dict[str, Any]) -> None:
    params = SamplingParams(seed=1, **given)
    assert not params.greedy
    assert params.judging()["temperature"] == 1


def test_a_sampled_request_without_a_seed_is_not_ready() -> None:
    with pytest.raises(ValueError, match="seed"):
        SamplingParams(temperature=1.0).judging()


def test_every_range_accepted_here_is_accepted_by_the_sampling_slots() -> None:
    slots = SamplingSlots(2, 320)
    for given in (
        {},
        {"temperature": 1e-5, "top_k": 2**31 - 1, "top_p": 1.0, "min_p": 1.0},
        {"temperature": 1e5, "top_p": 1e-9, "seed": 2**64 - 1, "coupling": "gumbel"},
        {"repetition_penalty": 0.5, "presence_penalty": -3, "frequency_penalty": 3.0},
        {"repetition_penalty": 1e-9, "presence_penalty": -1e9, "frequency_penalty": 1e9},
        {"logit_bias": {3: -math.inf, 4: 1e9}, "bad_token_ids": [5]},
    ):
        params = SamplingParams(**{"seed": 1, **given})  # type: ignore[arg-type]
        slots.set(1, **params.judging(), prompt_ids=[1, 2])


def test_bad_tokens_are_a_bias_of_minus_infinity() -> None:
    assert SamplingParams(logit_bias={3: 1.0, 4: 1.0}, bad_token_ids=[4, 5]).bias == {
        3: 1.0,
        4: -math.inf,
        5: -math.inf,
    }
