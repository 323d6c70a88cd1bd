"""The table of misalignments: a wired-up run on a random toy, and acceptance against chains computed anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostroke.perf.misalignment import ALIGNMENTS, agreeing, answered, iterations, main, prompts, read
from twostroke.tests.builder.deepseek_v32_reference import MISTAKES, RIGHT
from twostroke.tests.builder.flat_runs import Toy
from twostroke.tests.checkpoints import F4_PLAIN, REMOVED, T32, write_checkpoint


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T32 over eight tokens, so that random drafts are accepted now and then. One of three texts ends at once, one
    within 20 tokens, one goes on."""
    return write_checkpoint(tmp_path_factory.mktemp("misaligned") / "toy", T32, vocab_size=8, eos_token_id=0)


def test_acceptance_is_that_of_chains_computed_anew(toy_folder: Path) -> None:
    """Every iteration again, from nothing but the target's hidden rows and the tokens before the anchor."""
    network, toy, total = read(toy_folder), Toy(toy_folder), 0
    lengths: list[int] = []
    for prompt in prompts(toy_folder, network, 3):
        text = answered(network, prompt, 20, depth=3)
        assert text.tokens[: len(prompt)] == prompt
        logits, taps = toy.oracle(text.tokens[:-1])
        assert text.tokens[len(prompt) :] == logits.argmax(axis=1)[len(prompt) - 1 :].tolist()
        position, found = len(prompt), []
        while position in text.anchors:
            drafted = toy.chain(taps, text.tokens[: position + 1])["tokens"]
            accepted = agreeing(drafted.tolist(), text.tokens[position + 1 :])
            found.append((position, accepted))
            position += accepted + 1
        assert list(iterations(network, text, 3, RIGHT)) == found
        total += sum(accepted for _, accepted in found)
        lengths.append(len(text.tokens) - len(prompt))
    assert total > 3, "a draft that is never right shows nothing"
    assert lengths == [10, 1, 23]


def test_the_table_has_every_alignment_and_the_harmless_one_changes_nothing(toy_folder: Path, tmp_path: Path) -> None:
    assert main([str(toy_folder), "--prompts", "3", "--tokens", "20", "--results", str(tmp_path)]) == 0
    table = json.loads((tmp_path / "misalignment-toy.json").read_text())
    rows = {row["alignment"]: row for row in table["rows"]}
    assert list(rows) == list(ALIGNMENTS)
    assert rows["right"]["largest_logit_change"] == [0.0] * 3
    assert max(rows["all rows one position on"]["largest_logit_change"]) < 1e-9
    for name in ("mean_accepted_length", "accepted_by_position", "iterations"):
        assert rows["all rows one position on"][name] == rows["right"][name]
    for name in MISTAKES:
        assert max(rows[name]["largest_logit_change"]) > 1e-3, name
    text = (tmp_path / "misalignment-toy.md").read_text()
    assert all(f"| {name} | {row['mean_accepted_length']:.2f} |" in text for name, row in rows.items())
    assert "random ids" in text


def test_what_it_cannot_measure_is_refused(tmp_path: Path, toy_folder: Path, capsys: pytest.CaptureFixture) -> None:
    other = write_checkpoint(tmp_path / "v4", F4_PLAIN)
    target_alone = write_checkpoint(tmp_path / "alone", T32, num_nextn_predict_layers=REMOVED)
    for arguments, said in (
        ([str(other)], "found one of deepseek_v4"),
        ([str(target_alone)], "found one of deepseek_v32 without model.layers.3.eh_proj.weight"),
        ([str(tmp_path / "nowhere")], "nowhere"),
        ([str(toy_folder), "--tokens", "80"], "take 115 tokens, the model 96"),
    ):
        assert main([*arguments, "--results", str(tmp_path / "results")]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
