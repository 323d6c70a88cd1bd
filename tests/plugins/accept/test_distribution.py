"""A-19: what comes out is distributed as the target's own samples, and acceptance is the overlap of p and q."""

import numpy as np
import pytest
from scipy import stats

from twostroke.plugins.accept import Acceptor, SamplingSlots
from twostroke.plugins.accept.reference import Request, process_row, softmax

V, DRAFTS, BATCH = 8, 3, 1000
# Odd and even positions have their own pair, so that a row or noise off by one shows; every pair overlaps by 60 %.
P = np.array([[0.30, 0.20, 0.15, 0.10, 0.10, 0.05, 0.05, 0.05], [0.05, 0.05, 0.05, 0.10, 0.10, 0.15, 0.20, 0.30]])
Q = np.array([[0.10, 0.05, 0.10, 0.10, 0.10, 0.05, 0.05, 0.45], [0.45, 0.05, 0.05, 0.10, 0.10, 0.05, 0.10, 0.10]])


def two_tokens(rounds, **settings):
    """First two emitted tokens of `rounds` seeded requests, and whether each kept its first drafted token."""
    sampling, acceptor = SamplingSlots(BATCH, V), Acceptor(BATCH, DRAFTS, V)
    slots, lengths = np.arange(BATCH, dtype=np.int32), np.full(BATCH, DRAFTS, np.int32)
    noise, inverse = np.empty((BATCH, DRAFTS, V), np.float32), np.empty(BATCH, np.float32)
    tokens, count, accepted = np.empty((BATCH, DRAFTS + 1), np.int32), slots.copy(), slots.copy()
    emitted, kept = np.full((rounds, 2), -1), np.zeros(rounds, np.bool_)
    for first in range(0, rounds, BATCH):
        for slot in range(BATCH):
            sampling.set(slot, seed=first + slot, **settings)
        known = np.zeros(BATCH, np.int64)
        while (waiting := np.flatnonzero(known < 2)).size:
            size = waiting.size
            anchor = (5 + known[waiting]).astype(np.int32)
            place = (anchor[:, None] + 1 + np.arange(DRAFTS + 1)) % 2
            logits, draft_logits = (np.log(table[place]).astype(np.float32) for table in (P, Q))
            part = slots[waiting]
            acceptor.draft_noise(part, anchor, sampling, noise[:size], inverse[:size])
            scores = draft_logits[:, :DRAFTS] * inverse[:size, None, None] + noise[:size]
            acceptor.accept(
                logits,
                scores.argmax(axis=2).astype(np.int32),
                draft_logits[:, :DRAFTS],
                lengths[:size],
                part,
                anchor,
                sampling,
                tokens_out=tokens[:size],
                count_out=count[:size],
                accepted_out=accepted[:size],
            )
            for row, request in enumerate(waiting):
                fresh = tokens[row, : min(count[row], 2 - known[request])]
                if known[request] == 0:
                    kept[first + request] = accepted[row] > 0
                emitted[first + request, known[request] : known[request] + fresh.size] = fresh
                known[request] += fresh.size
    return emitted, kept


def assert_distributed(emitted, wanted):
    """Chi-square of the joint histogram of two tokens against wanted [V, V]."""
    seen = np.bincount(emitted[:, 0] * V + emitted[:, 1], minlength=V * V).reshape(V, V)
    assert seen[wanted == 0].sum() == 0
    possible = wanted > 0
    assert stats.chisquare(seen[possible], wanted[possible] * len(emitted)).pvalue > 1e-3


def test_two_emitted_tokens_are_distributed_as_the_targets_and_acceptance_is_the_overlap():
    assert np.allclose(np.minimum(P, Q).sum(axis=1), 0.6)
    emitted, kept = two_tokens(50_000, temperature=1.0)
    assert_distributed(emitted, np.outer(P[0], P[1]))
    assert abs(kept.mean() - 0.6) < 4 * np.sqrt(0.24 / len(kept))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.75, "top_k": 5, "top_p": 0.9},
        {"temperature": 1.5, "min_p": 0.4},
        {"temperature": 1.0, "top_k": 4, "coupled": True},
    ],
)
def test_cut_offs_and_temperature_leave_the_targets_distribution(settings):
    emitted, kept = two_tokens(10_000, **settings)
    p = [softmax(process_row(np.log(row), Request(**settings), 0)) for row in P]
    assert_distributed(emitted, np.outer(p[0], p[1]))
    if not settings.get("coupled"):
        overlap = np.minimum(p[0], softmax(np.log(Q[0]) / settings["temperature"])).sum()
        assert abs(kept.mean() - overlap) < 4 * np.sqrt(0.25 / len(kept))
