"""What a V3.2 config.json may say, which tensors it implies, and what becomes of the MTP layer."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.__main__ import main
from twostroke.builder.build import BuildOptions, build
from twostroke.builder.checkpoint import Checkpoint
from twostroke.builder.config import RopeScaling, parse_config
from twostroke.builder.networks.deepseek_v32 import DeepseekV32
from twostroke.builder.networks.deepseek_v32_checkpoint import (
    HARMLESS,
    ONLY_VALUE,
    all_tensors,
    detect_draft,
    target_tensors,
)
from twostroke.engines.errors import CheckpointError, ConfigError
from twostroke.tests.checkpoints import RELEASE_V32, REMOVED, T32, with_overrides, write_checkpoint

YARN = dict(T32["rope_scaling"])
NEW_YARN = {"rope_type": "yarn", "rope_theta": 10000, **{k: v for k, v in YARN.items() if k != "type"}}


def parse(base: Any = T32, **overrides: Any) -> Any:
    return parse_config(with_overrides(base, **overrides), "toy/config.json")


def refusal(base: Any = T32, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(base, **overrides)
    message = str(caught.value)
    assert message.startswith("toy/config.json"), "the file is named"
    return message


def test_fixture_parses_to_its_own_numbers() -> None:
    config = parse()
    assert (config.vocab_size, config.kv_lora_rank, config.index_topk, config.qk_head_dim) == (320, 16, 8, 24)
    assert config.rope_scaling == RopeScaling(4.0, 32, 32.0, 1.0, mscale=1.0)
    assert config.layer_kinds == ("dense", "experts", "experts")
    assert config.indexer_rope_interleave is False, "absent means half-split"
    assert parse(indexer_rope_interleave=True).indexer_rope_interleave is True


def test_changed_field_of_a_known_model_is_in_effect() -> None:  # C-14
    assert parse(RELEASE_V32, index_topk=1024).index_topk == 1024


REQUIRED = sorted(
    T32.keys() - set(HARMLESS) - ONLY_VALUE.keys() - {"num_key_value_heads", "rope_scaling", "num_nextn_predict_layers"}
)


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_or_mistyped_field_is_refused_by_name(name: str) -> None:
    assert f"field {name} is missing" in refusal(**{name: REMOVED})
    for value in (None, -3, True, {"a": 1}) if name != "model_type" else ():
        assert name.removeprefix("torch_") in refusal(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scoring_func", "sqrtsoftplus"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("moe_layer_freq", 2),
        ("n_shared_experts", 2),
        ("tie_word_embeddings", True),
        ("attention_bias", True),
        ("num_key_value_heads", 1),
        ("head_dim", 16),
        ("mlp_layer_types", ["dense"] * 3),
        ("n_group", 3),
        ("n_group", 4),
        ("topk_group", 3),
        ("num_experts_per_tok", 3),
        ("qk_rope_head_dim", 7),
        ("index_head_dim", 4),
        ("first_k_dense_replace", 4),
        ("indexer_rope_interleave", 1),
        ("quantization_config", {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}),
        ("torch_dtype", "float16"),
    ],
)
def test_value_that_is_not_implemented_is_refused(name: str, value: Any) -> None:
    assert f"field {name}" in refusal(**{name: value})


@pytest.mark.parametrize("name", ["index_topk_freq", "index_share_for_mtp_iteration", "indexer_types"])
def test_fields_of_a_sister_family_are_not_ignored(name: str) -> None:
    assert f"not understood: {name} = 4" in refusal(**{name: 4})


def test_what_the_library_adds_when_it_saves_a_config_is_understood() -> None:
    repeated = {
        "head_dim": 8,
        "qk_head_dim": 24,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["indexed_attention"] * 3,
        "mlp_bias": False,
        "dtype": "float32",
        "torch_dtype": REMOVED,
        "rope_theta": REMOVED,
        "rope_scaling": REMOVED,
        "rope_parameters": NEW_YARN,
        "moe_layer_freq": REMOVED,
        "scoring_func": REMOVED,
        "topk_method": REMOVED,
    }
    assert parse(**repeated) == parse()


# C-12


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": YARN},
        {"rope_parameters": YARN},
        {"rope_parameters": NEW_YARN, "rope_theta": REMOVED},
        {"rope_parameters": NEW_YARN, "rope_scaling": {**YARN, "rope_theta": 10000}},
    ],
)
def test_every_spelling_of_yarn_gives_the_same_tables(rope: dict[str, Any]) -> None:
    config = parse(**{"rope_scaling": REMOVED, **rope})
    assert config == parse()
    assert config.softmax_scale == pytest.approx(24**-0.5 * (0.1 * 1.3862943611 + 1) ** 2)
    assert torch.equal(DeepseekV32(config, 0, 96, ()).frequencies, DeepseekV32(parse(), 0, 96, ()).frequencies)


@pytest.mark.parametrize(
    "rope",
    [{"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}}, {}],
)
def test_null_and_default_mean_unscaled(rope: dict[str, Any]) -> None:
    config = parse(**{"rope_scaling": REMOVED, **rope})
    assert config.rope_scaling is None
    assert config.softmax_scale == 24**-0.5
    frequencies = DeepseekV32(config, 0, 96, ()).frequencies
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]))


@pytest.mark.parametrize(
    ("rope", "name"),
    [
        ({"rope_parameters": {**YARN, "factor": 8}}, "rope_parameters"),
        ({"rope_scaling": {**YARN, "rope_theta": 500}}, "rope_theta"),
        ({"rope_scaling": {k: v for k, v in YARN.items() if k != "mscale_all_dim"}}, "rope_scaling.mscale_all_dim"),
        ({"rope_scaling": {**YARN, "mscale": 0.707}}, "rope_scaling.mscale"),
        ({"rope_scaling": {"type": "yarn", "rope_theta": 10000}}, "rope_scaling.factor"),
    ],
)
def test_contradicting_or_partial_rope_settings_are_refused(rope: dict[str, Any], name: str) -> None:
    assert name in refusal(**rope)


# C-13


def test_both_families_are_named_to_whoever_has_another() -> None:
    assert "supported model types: deepseek_v4, deepseek_v32" in refusal(model_type="glm_moe_dsa")


# Tensors.


def test_inventory_of_the_release_has_its_published_counts_and_bytes() -> None:
    release = parse(RELEASE_V32)
    main = target_tensors(release)
    mtp = all_tensors(release)[len(main) :]
    assert (len(main), len(mtp)) == (90_854, 1_571)
    assert round(sum(spec.nbytes for spec in main) / 1e9, 2) == 674.03
    assert round(sum(spec.nbytes for spec in mtp) / 1e9, 2) == 15.44
    shapes = {spec.name: spec.shape for spec in main}
    assert shapes["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == (5, 56), "the last block is cut"
    plain = target_tensors(replace(release, quantised=False))
    parameters = sum(torch.Size(spec.shape).numel() for spec in plain)
    assert round(parameters / 1e9, 3) == 671.878


def test_plain_inventory_is_the_same_tensors_without_scales() -> None:
    release = parse(RELEASE_V32)
    quantised = [spec.name for spec in all_tensors(release)]
    assert {spec.name for spec in all_tensors(replace(release, quantised=False))} == {
        n for n in quantised if not n.endswith("_scale_inv")
    }
    assert len(set(quantised)) == len(quantised)


def test_every_parameter_of_the_network_is_a_tensor_of_the_inventory() -> None:
    network = DeepseekV32(parse(), 0, 96, ())
    specs = {spec.name: spec.shape for spec in target_tensors(parse())}
    banks = {name: p.shape for name, p in network.named_parameters() if ".mlp.experts." in name}
    single = {name: tuple(p.shape) for name, p in network.named_parameters() if name not in banks}
    assert single == {name: shape for name, shape in specs.items() if ".mlp.experts." not in name}
    assert {shape[0] for shape in banks.values()} == {4}
    assert len(banks) * 4 + len(single) == len(specs)


def test_quantised_tensors_that_the_config_does_not_announce_are_named(tmp_path: Path) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.self_attn.o_proj"
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_inv"] = torch.ones(1, 1)

    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, T32, edit=quantise))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check(all_tensors(checkpoint.config))
    assert caught.value.problems == (
        "FP8 tensor model.layers.0.self_attn.o_proj.weight: the config has no quantization_config; restore it, or "
        "convert the folder to bf16",
    )


# The MTP layer.

NAMES = [spec.name for spec in all_tensors(parse())]
TARGET_NAMES = [spec.name for spec in target_tensors(parse())]


@pytest.mark.parametrize("requested", ["auto", "mtp"])
def test_an_mtp_layer_in_config_and_files_is_the_drafter(requested: str) -> None:
    assert detect_draft(parse(), NAMES, requested) == "mtp"


@pytest.mark.parametrize(("promised", "layers"), [(0, 1), (2, 1), (1, 2)])
def test_a_layer_count_that_config_and_files_disagree_on_is_refused_with_both(promised: int, layers: int) -> None:
    names = [*TARGET_NAMES, *(f"model.layers.{3 + layer}.enorm.weight" for layer in range(layers))]
    with pytest.raises(CheckpointError) as caught:
        detect_draft(parse(num_nextn_predict_layers=promised), names)
    assert f"promises {promised} MTP layers" in str(caught.value)
    assert "the files hold MTP layers model.layers.3.*" in str(caught.value)
    assert detect_draft(parse(num_nextn_predict_layers=promised), names, "none") == "none"


def test_several_mtp_layers_are_refused_because_one_is_implemented() -> None:
    names = [*TARGET_NAMES, "model.layers.3.enorm.weight", "model.layers.4.enorm.weight"]
    with pytest.raises(ConfigError, match="one layer is implemented, used again for every token: use 'none'"):
        detect_draft(parse(num_nextn_predict_layers=2), names)


def test_without_its_tensors_auto_warns_mtp_is_refused_and_none_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    assert detect_draft(parse(), TARGET_NAMES, "none") == "none"  # C-05
    assert not caplog.records
    assert detect_draft(parse(), TARGET_NAMES, "auto") == "none"
    assert "promises 1 MTP layers" in caplog.text
    assert "no model.layers.3.* tensors" in caplog.text
    with pytest.raises(ConfigError, match=r"model\.layers\.3\.enorm\.weight, model\.layers\.3\.hnorm\.weight"):
        detect_draft(parse(), TARGET_NAMES, "mtp")
    caplog.clear()
    assert detect_draft(parse(num_nextn_predict_layers=0), TARGET_NAMES) == "none"
    assert not caplog.records


def test_a_folder_without_the_promised_mtp_tensors_is_inspected_with_a_warning_and_not_built_with_mtp(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:  # C-05
    def leave_out(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.3.")]:
            del tensors[name]

    folder = str(write_checkpoint(tmp_path / "checkpoint", T32, edit=leave_out))
    assert main(["inspect", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft"] == "none"
    assert "promises 1 MTP layers" in caplog.text
    assert main(["build", folder, "-o", str(tmp_path / "engine"), "--draft", "mtp"]) == 2
    said = capsys.readouterr().err
    for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm"):
        assert f"model.layers.3.{part}.weight" in said
    assert not (tmp_path / "engine").exists()


def test_dspark_is_no_method_of_this_family() -> None:
    with pytest.raises(ConfigError, match=r"'dspark' is none of deepseek_v32's.*use 'mtp'"):
        detect_draft(parse(), NAMES, "dspark")
    with pytest.raises(ConfigError, match="'dspark' is none of deepseek_v32's"):
        detect_draft(parse(), TARGET_NAMES, "dspark")
    with pytest.raises(ConfigError, match="accepted: auto, none, dspark, mtp"):
        detect_draft(parse(), TARGET_NAMES, "eagle")


def test_a_build_without_a_drafter_leaves_the_mtp_layer_out_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", T32, num_hidden_layers=1)
    with caplog.at_level(logging.WARNING):
        manifest = build(folder, tmp_path / "engine", BuildOptions(draft="none"))
    assert "37 tensors are left out: model.layers.1.eh_proj.weight, model.layers.1.embed_tokens.weight" in caplog.text
    assert manifest.speculative.method == "none"
    assert manifest.pretrained_config == json.loads((folder / "config.json").read_text())
    assert manifest.build_config.tokens_per_page == 64
    assert {t.name: (t.addressing, t.tokens_per_row, t.rows, t.width) for t in manifest.state} == {
        "layers.0.latent": ("paged", 1, 64, 24),
        "layers.0.index": ("paged", 1, 64, 16),
    }


def test_layers_beyond_the_mtp_layer_are_unknown_tensors(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.4.enorm.weight"] = torch.ones(64)

    folder = write_checkpoint(tmp_path / "checkpoint", T32, edit=add)
    with pytest.raises(CheckpointError, match=r"unknown tensor model\.layers\.4\.enorm\.weight"):
        build(folder, tmp_path / "engine", BuildOptions(draft="none"))
