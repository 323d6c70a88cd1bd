"""Shared test vectors: small inputs, their noise and the specification's answers, for every implementation of this op.

    python -m twostroke.plugins.accept.vectors tests/plugins/accept/vectors.json

Logits and parameters are short binary fractions, so float32 holds them exactly. A sampled case is taken only if moving
every logit by up to 1e-4 leaves its answer alone: an implementation whose logarithms round differently still agrees.
"""

import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .philox import Purpose, uniforms
from .reference import Request, accept, noise

VOCAB_SIZE = 16
DRAFTS = 3
_NUDGE = 1e-4
_NUDGES = 8
_ANCHOR = 40

_RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "rejection": {"temperature": 1.0},
    "rejection, warm": {"temperature": 2.0},
    "gumbel": {"temperature": 1.0, "coupled": True},
}
_EDITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut-offs": {"top_k": 8, "top_p": 0.875, "min_p": 0.0625},
    "penalties": {
        "repetition_penalty": 2.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "prompt_ids": [3, 4, 5],
        "output_ids": [5, 5, 6],
    },
    "bias and ban": {"bias": {1: -8.0, 2: 2.5}, "min_position": _ANCHOR + 3, "eos_ids": [2, 7]},
}
_DRAFTS: dict[str, list[int | None]] = {
    "likely": [None, None, None],
    "invalid second": [None, -1, None],
    "invalid first": [VOCAB_SIZE, None, None],
    "none": [],
}


def build() -> dict[str, Any]:
    """All vectors as plain numbers: `noise` by purpose, and `cases` of `reference.accept`."""
    return {"vocab_size": VOCAB_SIZE, "noise": [_noise(purpose) for purpose in Purpose], "cases": _cases()}


def _noise(purpose: Purpose) -> dict[str, Any]:
    seed, position, k = 2**63 + 12345, 1_000_003, 0 if purpose is Purpose.COUPLED else 2
    return {
        "purpose": int(purpose),
        "seed": seed,
        "position": position,
        "k": k,
        "uniform": float(uniforms(seed, position, k, purpose)),
        "gumbel": noise(VOCAB_SIZE, seed, position, k, purpose).tolist(),
    }


def _cases() -> list[dict[str, Any]]:
    generator = np.random.default_rng(20)
    cases = []
    for rule, edit, kind in product(_RULES, _EDITS, _DRAFTS):
        masked = kind == "likely" and edit == "plain"
        while True:
            request = Request(**_RULES[rule], **_EDITS[edit], seed=int(generator.integers(2**63)))
            logits = _dyadic(generator, (DRAFTS + 1, VOCAB_SIZE), 4.0)
            draft_logits = logits[:DRAFTS] + _dyadic(generator, (DRAFTS, VOCAB_SIZE), 1.0)
            allowed = generator.random(logits.shape) < 0.75 if masked else None
            # What plain decoding would say in most places, so that chains of every length are kept.
            drafts = [
                accept(logits[k:], [], draft_logits, request, _ANCHOR + k)[0][0] if token is None else token
                for k, token in enumerate(_DRAFTS[kind])
            ]
            if kind == "likely" and generator.random() < 0.5:
                drafts[generator.integers(DRAFTS)] = int(generator.integers(VOCAB_SIZE))
            answer = accept(logits, drafts, draft_logits, request, _ANCHOR, allowed)
            nudged = [
                accept(_nudge(generator, logits), drafts, _nudge(generator, draft_logits), request, _ANCHOR, allowed)
                for _ in range(_NUDGES)
            ]
            if all(other == answer for other in nudged):
                break
        cases.append(
            {
                "name": f"{rule}, {edit}, draft {kind}" + (", masked" if masked else ""),
                "request": asdict(request),
                "anchor_position": _ANCHOR,
                "target_logits": logits.tolist(),
                "draft_tokens": drafts,
                "draft_logits": draft_logits[: len(drafts)].tolist(),
                "allowed": None if allowed is None else allowed.astype(int).tolist(),
                "tokens": answer[0],
                "accepted": answer[1],
            }
        )
    return cases


def _dyadic(generator: np.random.Generator, shape: tuple[int, int], spread: float) -> NDArray[np.float64]:
    return np.round(generator.normal(0, spread, shape) * 64) / 64


def _nudge(generator: np.random.Generator, logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return logits + generator.uniform(-_NUDGE, _NUDGE, logits.shape)


def write(path: Path) -> None:
    """Write the vectors as JSON, one case a line."""
    vectors = build()
    cases = ",\n".join(json.dumps(case) for case in vectors.pop("cases"))
    path.write_text(json.dumps(vectors)[:-1] + ',\n"cases": [\n' + cases + "\n]}\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
