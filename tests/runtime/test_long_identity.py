"""A-02: two hundred greedy tokens, the engine's own draft at every depth, weights stored in fp32 and in bf16."""

from __future__ import annotations

import numpy as np
import pytest

from twostroke.engines.loading import load_engine_directory
from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.sampling_params import SamplingParams
from twostroke.runtime.scheduler import Scheduler
from twostroke.tests.served import DRAFTED, Served

PROMPTS = [tuple(int(t) for t in np.random.default_rng(seed).integers(2, 318, 5 + 9 * seed)) for seed in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("served", DRAFTED, ids=str)
def test_long_greedy_answers_are_those_of_plain_decoding_at_every_depth(served: Served, dtype: str) -> None:
    loaded = load_engine_directory(served.directory(max_position_embeddings=256, dtype=dtype))

    def ids(draft_length: int, batch: int) -> dict[str, list[int]]:
        scheduler = Scheduler(loaded, RuntimeConfig(max_batch_size=batch, draft_length=draft_length))
        for index, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=200, seed=0, ignore_eos=True)
            scheduler.submit(Request(str(index), prompt, params))
        found: dict[str, list[int]] = {}
        while scheduler.has_work:
            for progress in scheduler.step():
                found.setdefault(progress.request_id, []).extend(progress.token_ids)
        return found

    plain = ids(0, 1)
    assert {len(answer) for answer in plain.values()} == {200}
    for depth in range(1, 6):
        assert ids(depth, 1) == plain
        assert ids(depth, 4) == plain
