"""A drafter in a folder of its own (F-09): built like the combined checkpoint, or refused with both findings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.__main__ import main
from twostroke.builder.build import BuildOptions, build
from twostroke.builder.checkpoint import Checkpoint
from twostroke.builder.draft_folder import check_holds_target, with_draft
from twostroke.builder.networks.registry import TARGETS
from twostroke.builder.shared_tensors import own_tensors
from twostroke.engines.errors import BuildError, CheckpointError, ConfigError
from twostroke.engines.manifest import read_weights_index
from twostroke.tests.checkpoints import F4, F4_PREVIEW, T32, write_checkpoint

Tensors = dict[str, torch.Tensor]
SMALL: Mapping[str, Any] = {**T32, "num_hidden_layers": 1}
LAYER = "model.layers.1."


def halves(folder: Path, config: Mapping[str, Any], prefix: str, also: Callable[[Tensors], None] | None = None) -> Path:
    """`combined`, `target` without the drafter and `draft` with nothing else, all of the same weights."""

    def target(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    def draft(tensors: Tensors) -> None:
        kept = {name: value for name, value in tensors.items() if name.startswith(prefix)}
        tensors.clear()
        tensors.update(kept)
        if also is not None:
            also(tensors)

    write_checkpoint(folder / "combined", config)
    write_checkpoint(folder / "target", config, edit=target)
    write_checkpoint(folder / "draft", config, edit=draft)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return halves(tmp_path_factory.mktemp("halves"), SMALL, LAYER)


def test_a_drafter_in_its_own_folder_gives_the_engine_of_the_combined_checkpoint(small: Path, tmp_path: Path) -> None:
    """Graphs byte for byte, and every weight; the target folder itself promises the layer or does not."""
    build(small / "combined", tmp_path / "combined", BuildOptions())
    apart = BuildOptions(draft_checkpoint=small / "draft")
    manifest = build(small / "target", tmp_path / "apart", apart)
    assert manifest.speculative.method == "mtp"
    for name in manifest.steps:
        for kind in ("portable", "plugin"):
            file = f"{name}.{kind}.onnx"
            assert (tmp_path / "apart" / file).read_bytes() == (tmp_path / "combined" / file).read_bytes()
    values = []
    for engine in ("combined", "apart"):
        index = read_weights_index(tmp_path / engine)
        values.append({})
        for name, record in index.weights.items():
            with open(tmp_path / engine / record.file, "rb") as file:  # an absolute path stays itself
                file.seek(record.offset)
                values[-1][name] = file.read(record.bytes)
    assert values[0] == values[1]


@pytest.mark.parametrize(("config", "prefix"), [(F4, "mtp."), (F4_PREVIEW, "mtp.")])
def test_the_stages_of_v4_can_lie_apart_too(tmp_path: Path, config: Mapping[str, Any], prefix: str) -> None:
    folder = halves(tmp_path, config, prefix)
    joined = with_draft(Checkpoint.open(folder / "target"), folder / "draft")
    combined = Checkpoint.open(folder / "combined")
    family = TARGETS[combined.config.model_type]
    assert joined.config == combined.config
    joined.check(family.all_tensors(joined.config))
    for name in combined.entries:
        assert torch.equal(joined.read(name), combined.read(name))


def test_a_target_config_that_promises_no_drafter_takes_the_promise_of_the_draft_folder(
    small: Path, tmp_path: Path
) -> None:
    def bare(tensors: Tensors) -> None:
        assert not any(name.startswith(LAYER) for name in tensors)

    plain = write_checkpoint(tmp_path / "plain", SMALL, num_nextn_predict_layers=0, edit=bare)
    joined = with_draft(Checkpoint.open(plain), small / "draft")
    assert joined.config.num_nextn_predict_layers == 1
    assert TARGETS["deepseek_v32"].detect_draft(joined.config, joined.entries) == "mtp"


def test_another_vocabulary_is_refused_with_both_sizes(small: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "draft", SMALL, vocab_size=512)
    with pytest.raises(ConfigError, match=r"has vocab_size 512, the target in .* has 320") as caught:
        build(small / "target", tmp_path / "engine", BuildOptions(draft_checkpoint=other))
    assert str(other) in str(caught.value)
    assert not (tmp_path / "engine").exists()


def test_a_drafter_of_another_target_is_refused_with_every_field(small: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "draft", SMALL, index_topk=4, rms_norm_eps=1e-5, eos_token_id=7)
    with pytest.raises(ConfigError, match="index_topk is 4, the target's 8; rms_norm_eps is 1e-05, the target's 1e-06"):
        with_draft(Checkpoint.open(small / "target"), other)


def test_a_drafter_of_another_family_is_refused_with_both_names(small: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "draft", F4_PREVIEW)
    with pytest.raises(ConfigError, match=r"holds a deepseek_v4, the target in .* is a deepseek_v32"):
        with_draft(Checkpoint.open(small / "target"), other)


def test_a_whole_checkpoint_is_no_draft_folder(small: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensors are no drafter's .*pass the folder as the checkpoint"):
        with_draft(Checkpoint.open(small / "target"), small / "combined")


@pytest.mark.parametrize("own", [(), ("lm_head.weight",)])
def test_a_drafter_alone_is_no_checkpoint_and_the_option_for_it_is_named(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], own: tuple[str, ...]
) -> None:
    """With or without a head under the target's name."""

    def draft(tensors: Tensors) -> None:
        for name in [name for name in tensors if not name.startswith(LAYER) and name not in own]:
            del tensors[name]

    folder = write_checkpoint(tmp_path / "draft", SMALL, edit=draft)
    for line in (["inspect", str(folder)], ["build", str(folder), "-o", str(tmp_path / "engine")]):
        assert main(line) == 2
        assert capsys.readouterr().err == (
            f"twostroke: {folder} holds a drafter alone ({LAYER}*): build from its target's folder, with this one as "
            "--draft-checkpoint\n"
        )
    check_holds_target(Checkpoint.open(small / "target"))


def test_the_draft_folder_wins_over_the_drafter_beside_the_target_and_says_so(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    joined = with_draft(Checkpoint.open(small / "combined"), small / "draft")
    assert {Path(joined.entries[name].file).parent for name in joined.entries if name.startswith(LAYER)} == {
        (small / "draft").resolve()
    }
    assert "37 tensors of the one in" in caplog.text
    assert "are left out" in caplog.text


@pytest.mark.parametrize(
    ("theirs", "own"),
    [
        ("lm_head.weight", f"{LAYER}shared_head.head.weight"),
        ("model.embed_tokens.weight", f"{LAYER}embed_tokens.weight"),
    ],
)
def test_a_head_or_embedding_under_the_targets_name_is_the_drafts_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, theirs: str, own: str
) -> None:
    def rename(tensors: Tensors) -> None:
        tensors[theirs] = 2 * tensors.pop(own)

    folder = halves(tmp_path, SMALL, LAYER, rename)
    joined = with_draft(Checkpoint.open(folder / "target"), folder / "draft")
    with caplog.at_level(logging.INFO):
        assert own_tensors(joined, TARGETS["deepseek_v32"].all_tensors(joined.config)) == {own}
    assert f"{own} differs from the target's {theirs}: the draft keeps its own" in caplog.text
    assert torch.equal(joined.read(own), 2 * joined.read(theirs))


def test_a_draft_folder_and_no_drafting_contradict_each_other(small: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="draft method none was asked for and a draft folder given"):
        build(small / "target", tmp_path / "engine", BuildOptions(draft="none", draft_checkpoint=small / "draft"))


def test_a_draft_folder_that_is_not_there_is_named(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone does not exist"):
        build(small / "target", tmp_path / "engine", BuildOptions(draft_checkpoint=tmp_path / "gone"))
