"""Engines of the runtime's tests beside the shared ones, and what plain decoding on each says."""

from __future__ import annotations

import pytest

from twostroke.engines.loading import LoadedEngine, load_engine_directory
from twostroke.tests.runtime.guarded import guarded
from twostroke.tests.runtime.serving import Oracle


@pytest.fixture(scope="module")
def oracle(drafted_engine: LoadedEngine) -> Oracle:
    """Plain decoding of each engine that drafts, every call watched."""
    return Oracle(guarded(drafted_engine))


@pytest.fixture(scope="module")
def any_oracle(served_engine: LoadedEngine) -> Oracle:
    """The same, and of an engine that never drafts."""
    return Oracle(guarded(served_engine))


@pytest.fixture(scope="session")
def f4_long_engine() -> LoadedEngine:
    """F4 with room for 1100 tokens: five pages, page tiers 1, 2, 4 and 5."""
    from twostroke.tests.engines import engine_directory

    return load_engine_directory(engine_directory(max_position_embeddings=1100))


@pytest.fixture(scope="session")
def t32_long_engine() -> LoadedEngine:
    """T32 with its MTP layer and room for 256 tokens: four pages, page tiers 1, 2 and 4."""
    from twostroke.tests.checkpoints import T32
    from twostroke.tests.engines import engine_directory

    return load_engine_directory(engine_directory(T32, max_draft_len=5, max_position_embeddings=256))
