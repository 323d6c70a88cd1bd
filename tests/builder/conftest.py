"""The F4 toy network as oracle, as eager torch and as a compiled engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from twostroke.builder.eager import EagerEngine
from twostroke.engines.base import Engine
from twostroke.engines.loading import LoadedEngine
from twostroke.engines.manifest import StateTensor
from twostroke.tests.builder.flat_runs import Toy


@pytest.fixture(scope="session")
def toy(f4_engine_dir: Path) -> Toy:
    """The checkpoint the F4 engine was built from."""
    return Toy(f4_engine_dir.parent / "checkpoint")


@pytest.fixture(scope="session")
def eager_target(toy: Toy) -> EagerEngine:
    """The target step in eager torch, rings for five drafted tokens."""
    return toy.target()


@pytest.fixture(scope="session")
def compiled_target(f4_engine: LoadedEngine) -> Engine:
    """The target step under ONNX Runtime."""
    return f4_engine.engines["target"]


@pytest.fixture(scope="session")
def target_state(eager_target: EagerEngine) -> tuple[StateTensor, ...]:
    """State tensors of the target, the same in both engines."""
    return eager_target.spec.state


@pytest.fixture(scope="session")
def stream() -> list[int]:
    """120 tokens, none of them special."""
    return np.random.default_rng(3).integers(2, 319, size=120).tolist()
