"""Folders with drafts of dense targets: explained from config and headers, refused by a build."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.__main__ import main
from twostroke.builder.dense_draft_folder import open_dense_draft
from twostroke.engines.errors import CheckpointError
from twostroke.tests.checkpoints import F4_PLAIN, write_checkpoint
from twostroke.tests.dense_drafts import SPECULATORS, Tensors, write_dense_draft


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    entries = open_dense_draft(folder).entries
    return {name: entry.shape for name, entry in entries.items() if not name.startswith("layers.")}


def refusal(folder: Path, edit: Callable[[Tensors], None] = lambda tensors: None, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_dense_draft(write_dense_draft(folder, edit=edit, **options))
    return str(caught.value)


def removed(name: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        del tensors[name]

    return edit


def added(**shapes: tuple[int, ...]) -> Callable[[Tensors], None]:
    """Tensors more; `__` in a keyword stands for a dot."""

    def edit(tensors: Tensors) -> None:
        tensors.update({name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()})

    return edit


def test_a_draft_has_its_projection_norms_and_heads(tmp_path: Path) -> None:
    assert shapes(write_dense_draft(tmp_path)) == {
        "fc.weight": (16, 3 * 16),
        "hidden_norm.weight": (16,),
        "norm.weight": (16,),
        "markov_head.markov_w1.weight": (32, 4),
        "markov_head.markov_w2.weight": (32, 4),
        "confidence_head.proj.weight": (1, 16 + 4),
        "confidence_head.proj.bias": (1,),
    }


@pytest.mark.parametrize(
    ("kind", "joined"),
    [
        ("gated", {"gate_proj.weight": (4, 16 + 4), "gate_proj.bias": (4,)}),
        ("rnn", {"joint_proj.weight": (12, 2 * 4 + 16), "joint_proj.bias": (12,)}),
    ],
)
def test_gated_and_rnn_heads_have_a_projection_with_bias(
    tmp_path: Path, kind: str, joined: dict[str, tuple[int, ...]]
) -> None:
    found = shapes(write_dense_draft(tmp_path, markov_head_type=kind))
    assert {name.removeprefix("markov_head."): s for name, s in found.items() if "_proj." in name} == joined


def test_heads_follow_the_flags(tmp_path: Path) -> None:
    alone = shapes(write_dense_draft(tmp_path / "alone", confidence_head_with_markov=False))
    assert alone["confidence_head.proj.weight"] == (1, 16)
    none = shapes(write_dense_draft(tmp_path / "none", enable_confidence_head=False, markov_rank=0))
    assert set(none) == {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_a_reduced_vocabulary_scores_its_own_ids_after_any_token_and_needs_a_map(tmp_path: Path) -> None:
    found = shapes(write_dense_draft(tmp_path / "whole", SPECULATORS, draft_vocab_size=8))
    assert found["markov_head.markov_w1.weight"] == (32, 4)
    assert found["markov_head.markov_w2.weight"] == (8, 4)
    assert found["d2t"] == (8,)
    message = refusal(tmp_path / "without", removed("d2t"), config=SPECULATORS, draft_vocab_size=8)
    assert "missing tensor d2t [8]" in message


def test_copies_of_the_targets_embedding_and_head_may_be_there(tmp_path: Path) -> None:
    copies = added(embed_tokens__weight=(32, 16), lm_head__weight=(32, 16))
    assert {"embed_tokens.weight", "lm_head.weight"} <= shapes(
        write_dense_draft(tmp_path / "right", edit=copies)
    ).keys()
    assert "expected [32, 16]" in refusal(tmp_path / "wrong", added(lm_head__weight=(8, 16)))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (removed("confidence_head.proj.bias"), "missing tensor confidence_head.proj.bias [1]"),
        (removed("markov_head.markov_w2.weight"), "missing tensor markov_head.markov_w2.weight [32, 4]"),
        (added(markov_head__gate_proj__weight=(4, 20)), "unknown tensor markov_head.gate_proj.weight"),
        (added(markov_head__embed=(32, 4)), "unknown tensor markov_head.embed"),
        (added(fc__weight=(16, 32)), "tensor fc.weight has shape [16, 32]; expected [16, 48]"),
        (added(confidence_head__proj__weight=(1, 16)), "has shape [1, 16]; expected [1, 20]"),
        (added(layers__2__mlp__up_proj__weight=(32, 16)), "holds layers 0, 1, 2; its config promises"),
        (removed("layers.1.mlp.up_proj.weight"), "holds layers 0; its config promises num_hidden_layers = 2"),
    ],
)
def test_headers_that_contradict_the_config_are_refused_with_both(
    tmp_path: Path, edit: Callable[[Tensors], None], says: str
) -> None:
    assert says in refusal(tmp_path, edit)


def test_inspect_explains_the_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_dense_draft(tmp_path, markov_head_type="gated", target_layer_ids=[-1, 3, 6])
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    for line in (
        "draft: dspark",
        "draft_block_size: 5",
        "block: 5 rows: the anchor and 4 of token 31; every row predicts a token",
        "target_layers: embedding, 3, 6 of 8",
        "markov_head: gated, rank 4",
        "confidence_head: of the hidden row and the token before",
        "markov_head.gate_proj.weight: [4, 20]",
        "build: not supported: dense targets are not built; the folder is only explained",
    ):
        assert line in text
    assert main(["inspect", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["draft_block_size"] == 5
    assert report["head_tensors"]["confidence_head.proj.bias"] == [1]
    assert report["tensors"] == 11
    assert sum(report["bytes"].values()) == sum(e.nbytes for e in open_dense_draft(folder).entries.values())


def test_inspect_explains_a_speculators_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(write_dense_draft(tmp_path, SPECULATORS))]) == 0
    text = capsys.readouterr().out
    assert "format: speculators" in text
    assert "draft_block_size: 7" in text
    assert "8 rows: the anchor and 7 of token 31; the anchor row is dropped" in text
    assert "target_layers: 1, 5\n" in text


def test_a_damaged_folder_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_dense_draft(tmp_path)
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    assert main(["inspect", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "model.safetensors is truncated" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("as_draft", [False, True], ids=["CHECKPOINT", "--draft-checkpoint"])
def test_a_build_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], as_draft: bool) -> None:
    folder = write_dense_draft(tmp_path / "draft")
    command = ["build", str(folder), "-o", str(tmp_path / "engine")]
    if as_draft:
        command[1:2] = [str(write_checkpoint(tmp_path / "target", F4_PLAIN)), "--draft-checkpoint", str(folder)]
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "describes a draft for a dense target ('qwen3'); dense targets are not supported for building" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "engine").exists()
