"""Every option of a launch line that has more than one spelling: what it chooses, and how its value is read.

Ours, those of SGLang 0.5.23 and those SGLang had before, as one table. The parser, `LaunchOptions` and a test of
`builder/FLAGS.md` read it; nothing here parses a command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from twostroke.engines.attention_backends import RENAMED
from twostroke.engines.errors import ConfigError

Choice = Literal[
    "draft",
    "draft_len",
    "topk",
    "max_batch_size",
    "attention",
    "prefill_backend",
    "decode_backend",
    "kv_cache_dtype",
    "tensor_parallel",
    "prefix_cache",
]

MEANING: Mapping[Choice, str] = {
    "draft": "the draft method",
    "draft_len": "how many tokens are drafted",
    "topk": "how many candidates a draft step has",
    "max_batch_size": "how many requests run at once",
    "attention": "the attention",
    "prefill_backend": "the implementation of attention in prefill",
    "decode_backend": "the implementation of attention in decode",
    "kv_cache_dtype": "the dtype of the memory",
    "tensor_parallel": "how many devices share a model",
    "prefix_cache": "whether prompts share the memory of a common beginning",
}

ALGORITHMS: Mapping[str, str] = {"EAGLE": "mtp", "NEXTN": "mtp", "DSPARK": "dspark"}
"""Draft methods by SGLang's names; there NEXTN is an alias of EAGLE, the chain over a model's own NextN layer."""


@dataclass(frozen=True)
class Typed:
    """An option as it was typed; `value` None for one without a value."""

    option: str
    value: str | int | None = None

    def __str__(self) -> str:
        return self.option if self.value is None else f"{self.option} {self.value}"


def _as_typed(typed: Typed) -> str | int | None:
    return typed.value


@dataclass(frozen=True)
class Flag:
    """An option: its present names, the first being the one to recommend; the names and values it had before; the
    choice it makes. `read` gives what was chosen, None for what leaves the choice open, or raises ConfigError."""

    names: tuple[str, ...]
    choice: Choice
    kind: type
    metavar: str | None
    help: str
    read: Callable[[Typed], str | int | None] = _as_typed
    older: tuple[str, ...] = ()
    older_values: Mapping[str, str] = field(default_factory=dict)
    accepted: tuple[str, ...] | None = None


def _number(typed: Typed, lowest: int) -> int:
    if not isinstance(typed.value, int) or typed.value < lowest:
        raise ConfigError(f"{typed}: expected at least {lowest}")
    return typed.value


def _at_least_one(typed: Typed) -> int:
    return _number(typed, 1)


def _drafts_of_rows(typed: Typed) -> int:
    """SGLang's `num_draft_tokens` counts the rows verified: the drafts, and the token they follow."""
    return _number(typed, 2) - 1


def _method(typed: Typed) -> str | int | None:
    return None if typed.value == "auto" else typed.value


def _algorithm(typed: Typed) -> str:
    if typed.value not in ALGORITHMS:
        raise ConfigError(f"{typed}: accepted are EAGLE and NEXTN (draft method mtp), and DSPARK")
    return ALGORITHMS[str(typed.value)]


def _one_candidate(typed: Typed) -> int:
    if typed.value != 1:
        raise ConfigError(
            f"{typed}: accepted is 1; more candidates make a tree, and sparse attention has no mask for a tree: drafts "
            "are chains"
        )
    return 1


def _sparse(typed: Typed) -> str:
    if typed.value not in ("dsa", "nsa"):
        raise ConfigError(f"{typed}: the networks built here have sparse attention, accepted is dsa")
    return "dsa"


def _backend(typed: Typed) -> str:
    return RENAMED.get(str(typed.value), str(typed.value))


def _dtype(typed: Typed) -> str | None:
    value = str(typed.value)
    return None if value == "auto" else {"bf16": "bfloat16"}.get(value, value)


DRAFT = Flag(
    ("--draft",),
    "draft",
    str,
    None,
    "draft method (auto: what the files hold)",
    _method,
    accepted=("auto", "dspark", "mtp", "none"),
)
NO_SPECULATION = Flag(("--no-speculation",), "draft", bool, None, "decode plainly", lambda typed: "none")
MAX_DRAFT_LEN = Flag(
    ("--max-draft-len",), "draft_len", int, "N", "tokens drafted an iteration with mtp (3); dspark keeps its block"
)
DRAFT_LENGTH = Flag(
    ("--draft-length",), "draft_len", int, "N", "drafts to verify an iteration (all that the engine drafts)"
)
BUILD_BATCH_SIZE = Flag(
    ("--max-batch-size",),
    "max_batch_size",
    int,
    "N",
    "requests that run at once where the runtime is told nothing else (8)",
    _at_least_one,
)
MAX_BATCH_SIZE = Flag(
    ("--max-batch-size",), "max_batch_size", int, "N", "requests that run at once (as built)", _at_least_one
)

STEPS = Flag(("--speculative-num-steps",), "draft_len", int, "N", "tokens drafted an iteration", _at_least_one)
DRAFT_TOKENS = Flag(
    ("--speculative-num-draft-tokens",),
    "draft_len",
    int,
    "N",
    "rows verified an iteration: one more than drafted",
    _drafts_of_rows,
)
BLOCK_SIZE = Flag(
    ("--speculative-dspark-block-size",), "draft_len", int, "N", "tokens drafted an iteration, DSPARK", _at_least_one
)
ALGORITHM = Flag(
    ("--speculative-algorithm",), "draft", str, "NAME", "draft method: EAGLE or NEXTN for mtp, DSPARK", _algorithm
)

SGLANG_FLAGS: tuple[Flag, ...] = (
    ALGORITHM,
    STEPS,
    Flag(("--speculative-eagle-topk",), "topk", int, "K", "candidates a draft step: 1", _one_candidate),
    DRAFT_TOKENS,
    BLOCK_SIZE,
    Flag(
        ("--cuda-graph-max-bs-decode",),
        "max_batch_size",
        int,
        "N",
        "as --max-batch-size",
        _at_least_one,
        older=("--cuda-graph-max-bs",),
    ),
    Flag(("--max-running-requests",), "max_batch_size", int, "N", "as --max-batch-size", _at_least_one),
    Flag(
        ("--attention-backend",),
        "attention",
        str,
        "NAME",
        "dsa: sparse attention, which is all there is",
        _sparse,
        older_values={"nsa": "dsa"},
    ),
    Flag(
        ("--dsa-prefill-backend",),
        "prefill_backend",
        str,
        "NAME",
        "implementation of attention in prefill (the engine's first)",
        _backend,
        older=("--nsa-prefill-backend", "--nsa-prefill"),
        older_values=RENAMED,
    ),
    Flag(
        ("--dsa-decode-backend",),
        "decode_backend",
        str,
        "NAME",
        "the same in verify, draft and plain decoding",
        _backend,
        older=("--nsa-decode-backend", "--nsa-decode"),
        older_values=RENAMED,
    ),
    Flag(("--kv-cache-dtype",), "kv_cache_dtype", str, "DTYPE", "dtype of the memory (auto: the engine's)", _dtype),
    Flag(
        ("--tp-size", "--tensor-parallel-size", "--tp"),
        "tensor_parallel",
        int,
        "N",
        "devices that share a model: 1",
        _at_least_one,
    ),
    Flag(
        ("--disable-radix-cache",),
        "prefix_cache",
        bool,
        None,
        "no prefix cache, which is all there is",
        lambda typed: "off",
    ),
)
