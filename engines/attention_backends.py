"""Names by which people choose how sparse attention is computed, and which of them each engine has.

The names are SGLang's (0.5.23, and the two generations before it), so that a launch line means the same here. Prefill
has a choice of its own; verify, draft and plain decoding share the decode choice. An engine lists what it really has:
a name from elsewhere is refused with that list, it never stands for something else.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Phase = Literal["prefill", "decode"]

BOTH: tuple[Phase, ...] = ("prefill", "decode")

KNOWN: Mapping[str, tuple[Phase, ...]] = {
    "portable": BOTH,
    "flashmla_sparse": BOTH,
    "flashmla_sparse_q8": ("prefill",),
    "flashmla_kv": BOTH,
    "flashmla_auto": BOTH,
    "flashinfer_sparse_mla": BOTH,
    "triton_sparse_mla": ("prefill",),
    "fa3": BOTH,
    "tilelang": BOTH,
    "triton": BOTH,
    "aiter": BOTH,
    "trtllm": BOTH,
    "intel_xpu": BOTH,
}
"""Every name that means an implementation somewhere, and its phases. `portable` is ours: the graph body."""

RENAMED: Mapping[str, str] = {"flashmla_prefill": "flashmla_sparse", "flashmla_decode": "flashmla_kv"}
"""Names of the first generation, and what they are called now."""


@dataclass(frozen=True)
class AttentionBackend:
    """One implementation an engine has. `verify_rows`: rows a request (T) it can judge in one step; None: any."""

    name: str
    phases: tuple[Phase, ...] = BOTH
    verify_rows: tuple[int, ...] | None = None


@dataclass(frozen=True)
class EngineChoices:
    """What an engine leaves to be chosen; the first of each is its default."""

    attention: tuple[AttentionBackend, ...]
    kv_cache_dtypes: tuple[str, ...]

    def names(self, phase: Phase) -> tuple[str, ...]:
        """Its implementations of a phase."""
        return tuple(backend.name for backend in self.attention if phase in backend.phases)


# The portable graph body computes every row of a flat step by itself, so any number of rows a request will do.
ENGINES: Mapping[str, EngineChoices] = {
    "onnxruntime": EngineChoices(attention=(AttentionBackend("portable"),), kv_cache_dtypes=("float32",)),
}


def backend_refusal(engine: str, phase: Phase, name: str) -> str | None:
    """Why `engine` cannot compute `phase` by the implementation `name` (a present name); None where it can."""
    has = ENGINES[engine].names(phase)
    if name in has:
        return None
    if name not in KNOWN:
        close = difflib.get_close_matches(name, KNOWN, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        return f"no implementation has that name{meant}, engine {engine} has {', '.join(has)} for {phase}"
    if phase not in KNOWN[name]:
        return f"{name} computes {KNOWN[name][0]} only, engine {engine} has {', '.join(has)} for {phase}"
    return f"engine {engine} has {', '.join(has)} for {phase}, not {name}"


def kv_cache_refusal(engine: str, dtype: str) -> str | None:
    """Why `engine` cannot keep its memory in `dtype`; None where it can."""
    has = ENGINES[engine].kv_cache_dtypes
    return None if dtype in has else f"engine {engine} keeps its memory in {', '.join(has)}"


def depth_refusal(engine: str, decode_backend: str, draft_len: int) -> str | None:
    """Why iterations that verify `draft_len` drafts (T = draft_len + 1 rows a request) cannot run; None where they can.

    An implementation of the decode phase may be limited to some T; one row, the plain step, is needed besides.
    """
    backend = next((each for each in ENGINES[engine].attention if each.name == decode_backend), None)
    if backend is None or backend.verify_rows is None or {1, draft_len + 1} <= set(backend.verify_rows):
        return None
    depths = ", ".join(str(rows - 1) for rows in sorted(backend.verify_rows))
    unlimited = [each.name for each in ENGINES[engine].attention if "decode" in each.phases and not each.verify_rows]
    other = f", or build with --dsa-decode-backend {unlimited[0]}, which takes any" if unlimited else ""
    return (
        f"{draft_len} drafts are {draft_len + 1} rows a request, which {decode_backend} of engine {engine} does not "
        f"judge in one step: ask for one of the depths {depths}{other}"
    )
