"""The gumbel rule: a seeded answer is the same tokens with any draft, block length or batch, and without drafts."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.plugins.accept import Acceptor, SamplingSlots
from twostroke.plugins.accept.reference import Request

V, LENGTH, ANCHOR = 16, 14, 20


def target_row(context):
    """Logits [V] as a fixed function of all tokens so far."""
    return np.random.default_rng([7, *context]).normal(0, 2, V)


def decode(judge, request, depth, generator, right=0.7):
    """LENGTH tokens in blocks of up to `depth` drafted ids, each right with the given probability, else anything."""
    answer = plain(judge, request) if depth else []
    output: list[int] = []
    while len(output) < LENGTH:
        drafts = [
            answer[len(output) + k]
            if len(output) + k < LENGTH and generator.random() < right
            else int(generator.integers(-1, V + 1))
            for k in range(depth)
        ]
        rows = [target_row(output + drafts[:i] if min(drafts[:i], default=0) >= 0 else []) for i in range(depth + 1)]
        ((tokens, _),) = judge(
            [rows],
            [drafts],
            generator.normal(size=(1, depth, V)),
            [replace(request, output_ids=output)],
            [ANCHOR + len(output)],
            [int(generator.integers(0, depth + 1))],
        )
        output += tokens
    return output[:LENGTH]


def plain(judge, request):
    return decode(judge, request, 0, np.random.default_rng(0))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    request=st.builds(
        Request,
        temperature=st.sampled_from([0.3, 0.7, 1.0, 1.3]),
        coupled=st.just(True),
        top_k=st.sampled_from([0, 5]),
        top_p=st.sampled_from([1.0, 0.8]),
        min_p=st.sampled_from([0.0, 0.05]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.7]),
        seed=st.integers(0, 2**64 - 1),
        min_position=st.sampled_from([0, ANCHOR + 5]),
        eos_ids=st.just([3, 4]),
        prompt_ids=st.just([1, 2, 3]),
    ),
    depth=st.integers(1, 4),
    draft_seed=st.integers(0, 2**32),
)
def test_speculative_tokens_are_the_plain_ones_for_any_draft(judge, request, depth, draft_seed):
    assert decode(judge, request, depth, np.random.default_rng(draft_seed)) == plain(judge, request)


def test_a_draft_that_knows_the_target_is_accepted_whole(judge):
    sampling, acceptor = SamplingSlots(20, V), Acceptor(20, 3, V)
    wanted = [Request(temperature=0.7, coupled=True, seed=seed) for seed in range(20)]
    for slot, request in enumerate(wanted):
        sampling.set(slot, temperature=request.temperature, coupled=True, seed=request.seed)
    logits = np.random.default_rng(1).normal(0, 2, (20, 4, V)).astype(np.float32)
    noise, inverse = np.empty((20, 3, V), np.float32), np.empty(20, np.float32)
    slots, anchors = np.arange(20, dtype=np.int32), np.full(20, ANCHOR, np.int32)
    acceptor.draft_noise(slots, anchors, sampling, noise, inverse)
    drafts = (logits[:, :3] * inverse[:, None, None] + noise).argmax(axis=2)
    assert all(accepted == 3 for _, accepted in judge(logits, drafts, logits[:, :3], wanted, anchors))
