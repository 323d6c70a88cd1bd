"""Engines of the runtime's tests beside the shared one."""

from __future__ import annotations

import pytest

from twostroke.engines.loading import LoadedEngine, load_engine_directory


@pytest.fixture(scope="session")
def f4_long_engine() -> LoadedEngine:
    """F4 with room for 1100 tokens: five pages, page tiers 1, 2, 4 and 5."""
    from twostroke.tests.engines import engine_directory

    return load_engine_directory(engine_directory(max_position_embeddings=1100))
