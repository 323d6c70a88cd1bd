"""What config.json may say, and what a person reads when it says something else."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from twostroke.builder.config import CSA, HARMLESS, HCA, SLIDING, RopeScaling, load_config, parse_config
from twostroke.builder.networks.registry import TARGETS
from twostroke.engines.errors import ConfigError
from twostroke.tests.checkpoints import F4, F4_PLAIN, FLASH_0731, FP8_BLOCKS, RELEASE_V32, REMOVED, T32, with_overrides

YARN = dict(F4["rope_scaling"])
BARE_DSPARK = {name.removeprefix("dspark_"): value for name, value in F4.items() if name.startswith("dspark_")}


def parse(base: Any = F4, **overrides: Any) -> Any:
    return parse_config(with_overrides(base, **overrides), "toy/config.json")


def refusal(base: Any = F4, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(base, **overrides)
    message = str(caught.value)
    assert message.startswith("toy/config.json"), "the file is named"
    assert "\n" not in message
    return message


def without_dspark(**extra: Any) -> dict[str, Any]:
    return {**{name: REMOVED for name in F4 if name.startswith("dspark_")}, **extra}


def write(folder: Path, data: bytes) -> Path:
    (folder / "config.json").write_bytes(data)
    return folder


def test_fixture_parses_to_its_own_numbers() -> None:
    config = parse()
    assert (config.vocab_size, config.hidden_size, config.sliding_window, config.index_topk) == (320, 64, 8, 4)
    assert config.compress_ratios == (0, 0, 4, 8, 4, 0), "entries of the draft stages are cut off"
    assert config.layer_types == (SLIDING, SLIDING, CSA, HCA, CSA, SLIDING)
    assert config.rope_scaling == RopeScaling(4.0, 32, 32.0, 1.0)
    assert config.eos_token_ids == (1,)
    assert config.dspark is not None
    assert (config.dspark.block_size, config.dspark.noise_token_id, config.dspark.markov_rank) == (5, 319, 8)
    assert config.dspark.target_layer_ids == (3, 4, 5)
    assert config.dspark.stages == 3, "num_nextn_predict_layers = 1 is not the stage count"


def test_release_has_two_sliding_21_csa_and_20_hca_layers() -> None:
    types = parse(FLASH_0731).layer_types
    assert [types.count(kind) for kind in (SLIDING, CSA, HCA)] == [2, 21, 20]


# C-14


def test_changed_field_of_a_known_model_is_in_effect() -> None:
    assert parse(sliding_window=6).sliding_window == 6


@pytest.mark.parametrize(
    ("release", "name", "value"), [(FLASH_0731, "sliding_window", 6), (RELEASE_V32, "index_topk", 1024)]
)
def test_a_folder_that_differs_from_a_release_in_one_field_is_read_with_that_field(
    tmp_path: Path, release: Any, name: str, value: int
) -> None:
    changed = load_config(write(tmp_path, json.dumps({**release, name: value}).encode()))
    assert getattr(changed, name) == value
    assert dataclasses.replace(changed, **{name: release[name]}) == parse(release)


def test_a_changed_window_reaches_the_memory_of_every_layer(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, json.dumps({**F4, "sliding_window": 6}).encode()))
    state = TARGETS[config.model_type].network(config, 5, 128, (3, 4, 5)).step().state
    assert [t.lookback for t in state if t.name.endswith(".window")] == [5] * config.num_hidden_layers


REQUIRED = sorted(
    F4.keys()
    - HARMLESS.keys()
    - {"num_key_value_heads", "n_shared_experts", "scoring_func", "topk_method", "norm_topk_prob", "hidden_act"}
    - {"attention_bias", "tie_word_embeddings", "rope_scaling", "num_nextn_predict_layers"}
)


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_field_is_refused_by_name_never_defaulted(name: str) -> None:
    assert f"field {name} is missing" in refusal(**{name: REMOVED})


@pytest.mark.parametrize("name", [name for name in REQUIRED if name != "model_type"])
@pytest.mark.parametrize("value", [None, "64", -3, True, {"a": 1}, float("nan")])
def test_wrong_type_or_range_is_refused_with_field_and_value(name: str, value: Any) -> None:
    message = refusal(**{name: value})
    assert name.removeprefix("torch_") in message
    if value is not None:
        assert str(value)[:4] in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_key_value_heads", 2),
        ("n_shared_experts", 2),
        ("scoring_func", "sigmoid"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("quantization_config", {"quant_method": "fp8"}),
        ("quantization_config", {**FP8_BLOCKS["quantization_config"], "fmt": "e5m2"}),
        ("quantization_config", {**FP8_BLOCKS["quantization_config"], "weight_block_size": [64, 64]}),
        ("quantization_config", {**FP8_BLOCKS["quantization_config"], "activation_scheme": "static"}),
        ("quantization_config", "fp8"),
        ("expert_dtype", "fp4"),
        ("torch_dtype", "float16"),
        ("dspark_markov_head_type", "mlp"),
        ("dspark_target_layer_ids", [3, 4, 6]),
        ("dspark_target_layer_ids", [3, 3]),
        ("dspark_noise_token_id", 320),
        ("num_experts_per_tok", 5),
        ("o_groups", 3),
        ("qk_rope_head_dim", 7),
        ("index_head_dim", 4),
        ("num_hash_layers", 7),
        ("eos_token_id", [1, 320]),
        ("bos_token_id", 320),
        ("compress_ratios", [0, 0, 4, 1, 4, 0]),
        ("compress_ratios", [0, 0, 4, 8, 4]),
        ("compress_ratios", [0, 0, 4, 8, 4, 0, 4]),
        ("compress_rope_theta", 1),
        ("rms_norm_eps", 1e-320),
        ("head_dim", 1 << 24),
        ("n_routed_experts", 4096),
        ("num_hidden_layers", 1000),
        ("partial_rotary_factor", 10**400),
        ("compress_rates", {"sliding_attention": 0}),
    ],
)
def test_value_that_is_not_implemented_is_refused(name: str, value: Any) -> None:
    assert f"field {name}" in refusal(**{name: value})


def test_more_experts_than_anybody_has_are_refused_before_they_are_listed() -> None:
    message = refusal(num_hidden_layers=61, compress_ratios=[0] * 61, n_routed_experts=1000)
    assert "field n_routed_experts is 1000; in 64 layers that is more than 32,768 experts in all" in message


def test_a_layer_count_is_not_believed_before_it_is_checked() -> None:
    """A list of that length would not fit in memory."""
    message = refusal(num_hidden_layers=10**15, mlp_layer_types=["moe"] * 6)
    assert "field mlp_layer_types is ['moe', " in message
    assert "num_hidden_layers = 1000000000000000" in message


def test_quantised_weights_are_those_of_the_release_or_refused() -> None:
    """The blocks, and FP4 experts beside them; one without the other would leave a storage to be guessed."""
    assert parse(**FP8_BLOCKS, expert_dtype="fp4").quantised
    assert not parse(expert_dtype="bf16").quantised
    assert 'field expert_dtype is None; beside this quantization_config only "fp4"' in refusal(**FP8_BLOCKS)
    assert "expert_dtype" in refusal(**FP8_BLOCKS, expert_dtype="fp8")
    assert "expected a multiple" in refusal(**FP8_BLOCKS, expert_dtype="fp4", moe_intermediate_size=40)
    grouped = {**FP8_BLOCKS["quantization_config"], "group_size": 128}
    assert "not understood: quantization_config.group_size" in refusal(quantization_config=grouped, expert_dtype="fp4")
    ours = {**FP8_BLOCKS["quantization_config"], "modules_to_not_convert": ["head"]}
    assert parse(quantization_config=ours, expert_dtype="fp4").quantised


def test_unknown_field_is_refused_with_the_name_it_resembles() -> None:
    message = refusal(routed_scaling_facto=2.5)
    assert "routed_scaling_facto = 2.5" in message
    assert "routed_scaling_factor" in message
    assert "dspark_n_routed_experts" in refusal(dspark_n_routed_experts=128)


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_field_changes_nothing(name: str) -> None:
    assert parse(**{name: ["anything"]}) == parse()


def test_layer_types_override_what_the_ratio_suggests() -> None:
    types = [SLIDING, SLIDING, HCA, CSA, CSA, SLIDING]
    assert parse(layer_types=types).layer_types == tuple(types)
    assert "layer_types[0]" in refusal(layer_types=[CSA, *types[1:]]), "a compressor needs a ratio"
    assert "layer_types[2]" in refusal(layer_types=[SLIDING, SLIDING, "full_attention", CSA, CSA, SLIDING])
    assert "layer_types" in refusal(layer_types=types[:5])


def test_both_spellings_of_the_dtype_must_agree() -> None:
    assert parse(torch_dtype=REMOVED, dtype="float32") == parse(dtype="float32") == parse()
    assert "dtype is 'bfloat16'" in refusal(dtype="bfloat16")


# C-12


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": YARN},
        {"rope_scaling": YARN, "rope_parameters": {**YARN, "attention_factor": 1.0}},
        {"rope_parameters": {"rope_type": "yarn", **{k: v for k, v in YARN.items() if k != "type"}}},
        {"rope_parameters": {**YARN, "rope_theta": 10000}, "rope_theta": REMOVED},
        {
            "rope_theta": REMOVED,
            "compress_rope_theta": REMOVED,
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25},
                "compress": {**YARN, "rope_theta": 160000, "attention_factor": 1.0, "partial_rotary_factor": 0.25},
            },
        },
    ],
)
def test_every_spelling_of_yarn_gives_the_same_config(rope: dict[str, Any]) -> None:
    assert parse(**{"rope_scaling": REMOVED, **rope}) == parse()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"type": "default", "rope_theta": 10000}},
        {"rope_parameters": {"rope_type": "default", "theta": 10000}},
        {"rope_parameters": None},
    ],
)
def test_null_and_partial_rope_dictionaries_mean_unscaled(rope: dict[str, Any]) -> None:
    config = parse(**{"rope_scaling": REMOVED, **rope})
    assert config.rope_scaling is None
    assert (config.rope_theta, config.compress_rope_theta) == (10000, 160000)


@pytest.mark.parametrize(
    ("rope", "name"),
    [
        ({"rope_parameters": {**YARN, "factor": 8}}, "rope_parameters"),
        ({"rope_scaling": {"type": "default", "rope_theta": 500}}, "rope_theta"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "rope_scaling.type"),
        ({"rope_scaling": {**YARN, "rope_type": "default"}}, "rope_scaling"),
        ({"rope_scaling": {"factor": 4}}, "rope_scaling"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling.original_max_position_embeddings"),
        ({"rope_scaling": {**YARN, "mscale": 1.0}}, "rope_scaling.mscale"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.277}}, "rope_scaling.attention_factor"),
        ({"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}, "rope_scaling.partial_rotary_factor"),
        ({"rope_scaling": {"main": {"type": "default"}}}, "rope_scaling"),
        ({"rope_scaling": {"main": YARN, "compress": YARN}}, "rope_scaling.main"),
        ({"rope_scaling": [4]}, "rope_scaling"),
    ],
)
def test_contradicting_or_foreign_rope_settings_are_refused(rope: dict[str, Any], name: str) -> None:
    assert name in refusal(**rope)


# C-07


@pytest.mark.parametrize("prefix", ["", "dspark_"])
def test_nested_dspark_fields_give_the_same_config_as_flat_ones(prefix: str) -> None:
    nested = {prefix + name: value for name, value in BARE_DSPARK.items()}
    assert parse(**without_dspark(dspark_config=nested)) == parse()
    assert parse(dspark_config=nested) == parse(), "both, and equal"


def test_flat_and_nested_dspark_fields_that_differ_are_refused_by_name() -> None:
    message = refusal(dspark_config={**BARE_DSPARK, "block_size": 7})
    assert "dspark_block_size is 5" in message
    assert "dspark_config.block_size is 7" in message


def test_confidence_flags_are_read_from_every_place() -> None:
    for flags in (
        {"enable_confidence_head": False},
        {"dspark_enable_confidence_head": False},
        {"dspark_config": {"enable_confidence_head": False}},
    ):
        assert parse(**flags).dspark.enable_confidence_head is False
    assert "dspark_enable_confidence_head" in refusal(enable_confidence_head="no")
    assert "enable_confidence_head" in refusal(F4_PLAIN, enable_confidence_head=True), "means nothing without DSpark"


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_head_types_are_read_from_every_place(kind: str) -> None:
    assert parse(dspark_markov_head_type=kind).dspark.markov_head_type == kind
    nested = {**BARE_DSPARK, "markov_head_type": kind}
    assert parse(**without_dspark(dspark_config=nested)).dspark.markov_head_type == kind
    assert parse().dspark.markov_head_type == "vanilla", "the release does not say"


@pytest.mark.parametrize("kind", ["mlp", "Gated", None, ["rnn"], 1])
def test_unknown_markov_head_type_is_answered_with_the_known_ones(kind: Any) -> None:
    message = refusal(dspark_markov_head_type=kind)
    assert f"dspark_markov_head_type is {kind!r}; accepted: vanilla, gated, rnn" in message


def test_incomplete_or_foreign_dspark_settings_are_refused() -> None:
    assert "dspark_noise_token_id is missing" in refusal(
        **without_dspark(dspark_block_size=5, dspark_markov_rank=8, dspark_target_layer_ids=[3, 4, 5])
    )
    assert "dspark_config.gamma" in refusal(dspark_config={"gamma": 5})
    assert "dspark_config" in refusal(**without_dspark(dspark_config=[5]))


def test_config_without_dspark_fields_has_no_drafter() -> None:
    assert parse(F4_PLAIN).dspark is None
    assert parse(F4_PLAIN, dspark_config=None).dspark is None


# C-13


def test_unsupported_model_type_is_answered_with_the_supported_ones() -> None:
    assert "supported model types: deepseek_v4" in refusal(model_type="llama")
    assert "V4.1 is a different network" in refusal(model_type="deepseek_v41")
    assert "supported model types" in refusal(model_type=["deepseek_v4"])


def test_configs_are_read_where_the_library_that_names_their_classes_is_missing(tmp_path: Path) -> None:
    folders = []
    for config in (F4, T32):
        folders.append(tmp_path / config["model_type"])
        folders[-1].mkdir()
        write(folders[-1], json.dumps(config).encode())
    script = (
        "import sys; sys.modules['transformers'] = None\n"
        "from twostroke.builder.config import load_config\n"
        "print(*(load_config(folder).model_type for folder in sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", script, *folders], capture_output=True, text=True)
    assert done.stdout.split() == ["deepseek_v4", "deepseek_v32"], done.stderr


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "expected a JSON object"),
        (b'"text"', "expected a JSON object"),
        (b'{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' occurs more than once"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a":' * 200_000, "too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
    ],
)
def test_file_that_is_no_json_object_is_refused_in_one_sentence(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        load_config(write(tmp_path, data))
    assert says in str(caught.value)
    assert len(str(caught.value)) < 600


def test_wrong_path_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; expected a checkpoint folder"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json is a folder"):
        load_config(tmp_path)
    (tmp_path / "file").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="is a file; expected a checkpoint folder"):
        load_config(tmp_path / "file")


def test_huge_value_does_not_flood_the_message(tmp_path: Path) -> None:
    values = with_overrides(F4, hidden_size="9" * 100_000, **{"x" * 100_000: 1})
    with pytest.raises(ConfigError, match="hidden_size") as caught:
        load_config(write(tmp_path, json.dumps(values).encode()))
    assert len(str(caught.value)) < 400
