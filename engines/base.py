"""The contract between a compiler's output and everything above it.

A `Compiler` turns an exported step into files and loads them again as an `Engine`; an engine binds buffers once and
is then enqueued as often as wanted. Nothing above this line knows which compiler it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from twostroke.engines.manifest import Binding, Step


@dataclass(frozen=True)
class Buffer:
    """Memory an engine reads or writes. `owner` keeps it alive; on the CPU it is the numpy array itself."""

    pointer: int
    dtype: str
    shape: tuple[int, ...]
    device: str
    owner: Any

    @classmethod
    def of(cls, array: np.ndarray, dtype: str | None = None) -> Buffer:
        """A CPU buffer over a C-contiguous array, which stays the caller's. `dtype` where numpy has none of that name:
        bfloat16, in an array of uint16."""
        if not array.flags.c_contiguous:
            raise ValueError("a buffer needs a contiguous array")
        return cls(array.ctypes.data, dtype or array.dtype.name, array.shape, "cpu", array)

    def __dlpack__(self, **options: Any) -> Any:
        return self.owner.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.owner.__dlpack_device__()
        return device


class BoundStep(Protocol):
    """A step with every binding attached to memory."""

    def enqueue(self, stream: int = 0) -> None:
        """Runs the step once on what the buffers hold now; results are in the output buffers afterwards (in stream
        order on a GPU, on return on the CPU)."""


class Engine(Protocol):
    """A loaded step. Weights are bound at load; `bind` takes everything else."""

    step: Step

    @property
    def bindings(self) -> Mapping[str, Binding]:
        """Every binding by name."""

    @property
    def in_place(self) -> bool:
        """Whether state outputs are written into the buffers of the state inputs."""

    def bind(self, buffers: Mapping[str, Buffer]) -> BoundStep:
        """Attaches inputs, state and outputs. Names the step does not have are ignored; a missing one, a wrong dtype or
        a shape that contradicts another binding is an EngineError that names it."""


class Compiler(Protocol):
    """One way to make and load engines."""

    name: str

    def load(self, folder: Path, step: Step, weights: Mapping[str, Buffer], threads: int) -> Engine:
        """The engine of one step of an engine directory, weights attached."""
