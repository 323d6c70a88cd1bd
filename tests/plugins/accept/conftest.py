"""One call that judges blocks given as plain numbers, so that the tests state inputs and answers only."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from twostroke.plugins.accept import Acceptor, SamplingSlots
from twostroke.plugins.accept.reference import Request

Judge = Callable[..., list[tuple[list[int], int]]]


def slots_of(requests: Sequence[Request], vocab_size: int) -> SamplingSlots:
    sampling = SamplingSlots(len(requests) + 1, vocab_size)
    for slot, request in enumerate(requests):
        sampling.set(slot, **asdict(request))
    return sampling


def judge_blocks(
    logits: Any,
    drafts: Any,
    draft_logits: Any,
    requests: Sequence[Request],
    anchor_position: Any,
    draft_length: Any = None,
    allowed: Any = None,
) -> list[tuple[list[int], int]]:
    """(tokens, accepted) per request; logits [R, T, V], drafts [R, G], draft_logits [R, G, V]; slot r is for r."""
    logits = np.array(logits, np.float32)
    count, rows, vocab_size = logits.shape
    lengths = np.full(count, rows - 1) if draft_length is None else draft_length
    tokens = np.full((count, rows), -7, np.int32)
    counts, accepted = np.full(count, -7, np.int32), np.full(count, -7, np.int32)
    Acceptor(count, rows - 1, vocab_size).accept(
        logits,
        np.array(drafts, np.int32).reshape(count, rows - 1),
        np.array(draft_logits, np.float32).reshape(count, rows - 1, vocab_size),
        np.array(lengths, np.int32),
        np.arange(count, dtype=np.int32),
        np.array(anchor_position, np.int32),
        slots_of(requests, vocab_size),
        None if allowed is None else np.array(allowed, np.bool_),
        tokens_out=tokens,
        count_out=counts,
        accepted_out=accepted,
    )
    assert (counts == accepted + 1).all()
    assert all((tokens[r, counts[r] :] == 0).all() for r in range(count))
    assert ((tokens >= 0) & (tokens < vocab_size)).all()
    return [(tokens[r, : counts[r]].tolist(), int(accepted[r])) for r in range(count)]


@pytest.fixture(scope="session")
def judge() -> Judge:
    return judge_blocks


@pytest.fixture(scope="session")
def make_slots() -> Callable[[Sequence[Request], int], SamplingSlots]:
    return slots_of
