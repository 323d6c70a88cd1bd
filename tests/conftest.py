"""Fixtures every test folder shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.engines.loading import LoadedEngine, load_engine_directory
from twostroke.tests.served import DRAFTED, SERVED


@pytest.fixture(scope="session")
def f4_engine_dir() -> Path:
    """A compiled random F4 engine (V4 with DSpark, maximum length 128) with a byte tokenizer; ids are below 320."""
    from twostroke.tests.engines import engine_directory

    return engine_directory()


@pytest.fixture(scope="session")
def preview_engine() -> LoadedEngine:
    """A compiled random F4-preview engine: the same V4 target with one NextN block, chains of up to five tokens."""
    from twostroke.tests.checkpoints import F4_PREVIEW
    from twostroke.tests.engines import engine_directory

    return load_engine_directory(engine_directory(F4_PREVIEW, max_draft_len=5))


@pytest.fixture(scope="session")
def f4_engine(f4_engine_dir: Path) -> LoadedEngine:
    """The same engine, loaded."""
    return load_engine_directory(f4_engine_dir)


@pytest.fixture(scope="session")
def t32_engine_dir() -> Path:
    """A compiled random T32 engine (V3.2, no drafter, maximum length 96) with a byte tokenizer; ids are below 320."""
    from twostroke.tests.checkpoints import T32
    from twostroke.tests.engines import engine_directory

    return engine_directory(T32, draft="none")


@pytest.fixture(scope="session")
def t32_engine(t32_engine_dir: Path) -> LoadedEngine:
    """The same engine, loaded."""
    return load_engine_directory(t32_engine_dir)


@pytest.fixture(scope="session")
def t32_fp8_engine() -> LoadedEngine:
    """A compiled random T32 engine with its MTP layer and index keys in fp8, 128 features each as in a release."""
    from twostroke.tests.checkpoints import T32
    from twostroke.tests.engines import engine_directory

    folder = engine_directory(T32, max_draft_len=5, index_key_dtype="fp8_e4m3", index_head_dim=128)
    return load_engine_directory(folder)


@pytest.fixture(scope="session")
def t32_mtp_engine() -> LoadedEngine:
    """A compiled random T32 engine with its MTP layer, chains of up to five tokens."""
    from twostroke.tests.checkpoints import T32
    from twostroke.tests.engines import engine_directory

    return load_engine_directory(engine_directory(T32, max_draft_len=5))


# Promises that take long and that V4's other draft and V3.2 hold in the fast suite too.
HEAVY_ON_PREVIEW = {
    "test_greedy_speculation_gives_the_ids_of_plain_decoding",
    "test_churn_gives_every_request_its_own_tokens",
    "test_requests_that_arrive_in_between_change_nothing_for_the_others",
    "test_sampled_answers_follow_the_target_whatever_the_draft_proposed",
    "test_penalties_give_the_same_tokens_with_and_without_speculation",
    "test_any_mix_of_accepts_chunks_and_reused_slots_leaves_the_state_of_the_committed_tokens",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the heaviest promises on the V4 Preview to the slow suite."""
    for item in items:
        name = item.name.partition("[")[0]
        if name in HEAVY_ON_PREVIEW and "v4-mtp" in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", params=DRAFTED, ids=str)
def drafted_engine(request: pytest.FixtureRequest) -> LoadedEngine:
    """Each target with each draft method."""
    return request.getfixturevalue(request.param.engine)


@pytest.fixture(scope="session", params=SERVED, ids=str)
def served_engine(request: pytest.FixtureRequest) -> LoadedEngine:
    """The same, and a target that never drafts."""
    return request.getfixturevalue(request.param.engine)
