"""Embedding and head of a draft layer: absent, copies of the target's, or its own (C-02, V4 Preview; C-03, V3.2)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from twostroke.builder.build import BuildOptions, build
from twostroke.builder.config import parse_config
from twostroke.builder.networks.registry import TARGETS
from twostroke.builder.weights import load_into
from twostroke.engines.errors import ConfigError
from twostroke.engines.loading import LoadedEngine, load_engine_directory, map_weights
from twostroke.engines.manifest import read_weights_index
from twostroke.tests.builder.flat_runs import Toy
from twostroke.tests.builder.mtp_runs import assert_same_chain, compiled, draft_steps, eager
from twostroke.tests.checkpoints import F4_PREVIEW, T32, with_overrides, write_checkpoint
from twostroke.tests.engines import CACHE, code_hash, locked

FAMILIES: dict[str, Mapping[str, Any]] = {"v4-preview": F4_PREVIEW, "v32": T32}
# By family: embedding and head of the draft, and the target's.
NAMES = {
    "v4-preview": {"mtp.0.emb.tok_emb.weight": "embed.weight", "mtp.0.head.weight": "head.weight"},
    "v32": {
        "model.layers.3.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight": "lm_head.weight",
    },
}


def checkpoint_with(folder: Path, config: Mapping[str, Any], states: Mapping[str, str], **overrides: Any) -> Toy:
    """A checkpoint in which each named tensor is `absent`, a `copy` as released, or the draft's `own`."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name, state in states.items():
            if state == "absent":
                del tensors[name]
            elif state == "own":
                tensors[name] = tensors[name].roll(1, dims=0)

    return Toy(write_checkpoint(folder, config, edit=edit, **overrides))


@pytest.mark.parametrize("head", ["absent", "copy", "own"])
@pytest.mark.parametrize("embedding", ["absent", "copy", "own"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_draft_has_of_its_own_is_used_and_what_it_lacks_is_the_targets(
    tmp_path: Path,
    stream: list[int],
    caplog: pytest.LogCaptureFixture,
    family: str,
    embedding: str,
    head: str,
) -> None:
    names = NAMES[family]
    states = dict(zip(names, (embedding, head), strict=True))
    toy = checkpoint_with(tmp_path, FAMILIES[family], states)
    toy.checkpoint.check(TARGETS[toy.config.model_type].all_tensors(toy.config))  # no KeyError, nothing unknown
    with caplog.at_level(logging.INFO):
        steps = draft_steps(toy)
    for name, state in states.items():
        said = [r for r in caplog.records if name in r.getMessage()]
        assert [r.levelname for r in said] == {"absent": ["INFO"], "copy": [], "own": ["WARNING"]}[state]
        assert all(names[name] in r.getMessage() for r in said)

    # NaN before they are loaded, none unset after, and those of a name once in the draft.
    parameters: dict[str, torch.Tensor] = {}
    for step in steps:
        assert all(p.isnan().all() for p in step.module.parameters())
        load_into(step.module, toy.checkpoint)
        parameters |= dict(step.module.named_parameters())
    assert not [name for name, p in parameters.items() if p.isnan().any()]
    for name, state in states.items():
        assert (name in parameters, names[name] in parameters) == (state == "own", state != "own")

    drafting = Toy(toy.checkpoint.folder)
    if family == "v4-preview":  # its reference knows no tensors of a draft's own
        drafting.weights.update({names[name]: toy.weights[name] for name, state in states.items() if state == "own"})
    draft, taps, tokens = eager(toy), toy.oracle(stream[:31])[1], stream[:31]
    found = draft.propose(draft.seen(taps, tokens, [30]), [(1, 30)], 3)
    assert_same_chain(found, drafting.chain(taps, tokens))
    if "own" in states.values():
        shared = checkpoint_with(tmp_path / "shared", FAMILIES[family], {})
        assert np.abs(found["logits"][0, 0] - shared.chain(taps, tokens)["logits"][0]).max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_embeddings_are_refused_with_what_to_do(family: str) -> None:
    """Sharing with the target is what absent tensors mean; this field would tie the target's own two."""
    with pytest.raises(ConfigError, match=r"tie_word_embeddings.*beside.*set this field to false"):
        parse_config(with_overrides(FAMILIES[family], tie_word_embeddings=True), "config.json")


OWN = ("model.layers.1.embed_tokens.weight", "model.layers.1.shared_head.head.weight")


@pytest.fixture(scope="module")
def one_layer_engine() -> LoadedEngine:
    """A compiled T32 of one layer whose draft has an embedding and a head of its own."""
    place = CACHE / f"own-tensors-{code_hash()}"
    with locked(place):
        if not (place / "engine" / "config.json").exists():
            checkpoint_with(place / "checkpoint", T32, dict.fromkeys(OWN, "own"), num_hidden_layers=1)
            build(place / "checkpoint", place / "engine", BuildOptions(force=True))
    return load_engine_directory(place / "engine")


def test_an_engine_keeps_the_drafts_own_embedding_and_head(one_layer_engine: LoadedEngine, stream: list[int]) -> None:
    folder = one_layer_engine.folder
    toy, weights = Toy(folder.parent / "checkpoint"), map_weights(folder, read_weights_index(folder))
    used = {name: {b.name for b in step.bindings} for name, step in one_layer_engine.manifest.steps.items()}
    shared = {"model.embed_tokens.weight", "lm_head.weight"}
    assert shared <= used["target"]
    assert not (used["observe"] | used["next"] | used["pick"]) & shared
    assert OWN[0] in used["observe"] & used["next"]
    assert OWN[1] in used["pick"]
    for name in {*OWN, *shared}:
        np.testing.assert_array_equal(weights[name].owner, toy.weights[name].numpy(), err_msg=name)
    draft, taps, tokens = compiled(one_layer_engine), toy.oracle(stream[:31])[1], stream[:31]
    found = draft.propose(draft.seen(taps, tokens, [30]), [(1, 30)], 3)
    assert_same_chain(found, toy.chain(taps, tokens))
