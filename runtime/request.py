"""What a caller asks for, what it gets back step by step, and which requests are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from twostroke.engines.errors import RequestError
from twostroke.runtime.counters import Acceptance
from twostroke.runtime.sampling_params import SamplingParams

# Ids besides the model's own end-of-text ids that may end an answer.
MAX_STOP_TOKEN_IDS = 16

FinishReasonName = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Request:
    """A prompt of token ids and how to continue it. `id` is the caller's and unique among unfinished requests."""

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True)
class Progress:
    """What one step brought for one request: its new tokens, and on the last one why it ended.

    `stop_reason` is the id from `stop_token_ids` that ended it (None for end of text). `acceptance` is the request's
    own, as it stood then: one step may bring a request several. `logits` f32 [new tokens, V], where asked for: the
    target rows that judged, before any processing.
    """

    request_id: str
    token_ids: list[int]
    acceptance: Acceptance
    finish_reason: FinishReasonName | None = None
    stop_reason: int | None = None
    logits: NDArray[np.float32] | None = None


def check_prompt(prompt_ids: Sequence[int], vocab_size: int, max_seq_len: int) -> None:
    """RequestError unless the prompt has a token, room for an answer, and ids of the vocabulary only."""
    length = len(prompt_ids)
    if length == 0:
        raise RequestError("the prompt is empty, expected at least one token", field="prompt")
    if length >= max_seq_len:
        raise RequestError(
            f"the prompt has {length} tokens, but prompt and answer together may have {max_seq_len}, so at most "
            f"{max_seq_len - 1} for the prompt",
            field="prompt",
        )
    _check_ids("prompt", prompt_ids, vocab_size)


def check_stops(params: SamplingParams, vocab_size: int) -> None:
    """RequestError where an id that ends or bans something is not of the vocabulary, or too many ids end the answer."""
    stop = params.stop_token_ids or ()
    if len(stop) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids has {len(stop)} ids, expected at most {MAX_STOP_TOKEN_IDS}", field="stop_token_ids"
        )
    _check_ids("stop_token_ids", stop, vocab_size)
    if params.end_id is not None and params.end_id >= 0:
        _check_ids("end_id", [params.end_id], vocab_size)
    _check_ids("bad_token_ids", params.bad_token_ids or (), vocab_size)
    _check_ids("logit_bias", list(params.logit_bias or ()), vocab_size)
    if sum(value == -math.inf for value in params.bias.values()) == vocab_size:
        raise RequestError(
            f"bad_token_ids and logit_bias forbid all {vocab_size} tokens, expected at least one that may be chosen",
            field="bad_token_ids" if params.bad_token_ids else "logit_bias",
        )


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
            raise RequestError(
                f"token {index} of {field} is {token!r}, expected a token id in 0..{vocab_size - 1}", field=field
            )


def token_limit(prompt_length: int, max_tokens: int | None, max_seq_len: int) -> int:
    """Tokens that prompt and answer may have together; a budget beyond the context is cut to the context."""
    if max_tokens is None:
        return max_seq_len
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens!r}, expected a whole number of at least 1", field="max_tokens")
    return min(prompt_length + max_tokens, max_seq_len)


def draft_depth(speculative: Literal["off"] | int | None, draft_length: int) -> int:
    """Drafts to verify per iteration: None leaves the server's `draft_length`, "off" is 0."""
    if speculative is None:
        return draft_length
    if speculative == "off":
        return 0
    if isinstance(speculative, bool) or not isinstance(speculative, int) or speculative < 0:
        raise RequestError(f'speculative is {speculative!r}, expected "off" or a number of drafts', field="speculative")
    if speculative > draft_length:
        raise RequestError(
            f"speculative asks for {speculative} drafts per iteration, but this server verifies at most {draft_length}",
            field="speculative",
        )
    return speculative
