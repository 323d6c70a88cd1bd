"""The eager oracle: a step's own torch module run behind the engine interface. Slow, plain, and never shipped."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from twostroke.builder.export import step_bindings
from twostroke.builder.networks.layers import StepSpec
from twostroke.engines.base import Buffer
from twostroke.engines.errors import EngineError
from twostroke.engines.manifest import Binding, Step


class EagerEngine:
    """Engine over a torch module whose parameters are loaded."""

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec
        self.step = Step(spec.name, "eager", "final", "", step_bindings(spec), {"torch": torch.__version__})
        self.in_place = True

    @property
    def bindings(self) -> Mapping[str, Binding]:
        return {binding.name: binding for binding in self.step.bindings}

    def bind(self, buffers: Mapping[str, Buffer]) -> EagerStep:
        missing = [name for name in self.bindings if name not in buffers]
        if missing:
            raise EngineError(f"step {self.spec.name}: no buffer for {', '.join(missing)}")
        return EagerStep(self.spec, buffers)


class EagerStep:
    """A module call on fixed buffers."""

    def __init__(self, spec: StepSpec, buffers: Mapping[str, Buffer]) -> None:
        arrays: dict[str, np.ndarray] = {name: buffer.owner for name, buffer in buffers.items()}
        self.module = spec.module
        self.arguments = [torch.from_numpy(arrays[b.name]) for b in spec.inputs]
        self.arguments += [torch.from_numpy(arrays[t.name]) for t in spec.state]
        names = [b.name for b in spec.outputs] + [f"{name}.next" for name in spec.writes]
        self.results = [torch.from_numpy(arrays[name]) for name in names]

    @torch.no_grad()
    def enqueue(self, stream: int = 0) -> None:
        for buffer, value in zip(self.results, self.module(*self.arguments), strict=True):
            buffer.copy_(value)
