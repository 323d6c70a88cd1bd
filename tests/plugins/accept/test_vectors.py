"""The committed vectors that every implementation of this op is held to."""

import json
from pathlib import Path

import numpy as np
import pytest

from twostroke.plugins.accept import Purpose, uniforms
from twostroke.plugins.accept.reference import Request, accept, noise
from twostroke.plugins.accept.vectors import write

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())


@pytest.mark.parametrize("vector", VECTORS["noise"], ids=lambda v: Purpose(v["purpose"]).name)
def test_noise_equals_the_vector(vector):
    key = vector["seed"], vector["position"], vector["k"], Purpose(vector["purpose"])
    assert float(uniforms(*key)) == vector["uniform"]
    np.testing.assert_allclose(noise(VECTORS["vocab_size"], *key), vector["gumbel"], rtol=1e-6)


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_the_reference_and_the_batched_implementation_give_the_vectors_answer(judge, case):
    fields = case["request"]
    request = Request(**{**fields, "bias": {int(token): value for token, value in fields["bias"].items()}})
    logits, drafts = np.array(case["target_logits"]), case["draft_tokens"]
    draft_logits = np.array(case["draft_logits"]).reshape(len(drafts), logits.shape[1])
    allowed = None if case["allowed"] is None else np.array(case["allowed"], bool)
    expected = case["tokens"], case["accepted"]
    assert accept(logits, drafts, draft_logits, request, case["anchor_position"], allowed) == expected
    rows = len(drafts) + 1
    mask = None if allowed is None else allowed[None, :rows]
    assert judge([logits[:rows]], [drafts], [draft_logits], [request], [case["anchor_position"]], None, mask) == [
        expected
    ]


def test_vectors_are_written_by_one_call(tmp_path):
    write(tmp_path / "vectors.json")
    written = json.loads((tmp_path / "vectors.json").read_text())
    assert [case["name"] for case in written["cases"]] == [case["name"] for case in VECTORS["cases"]]
