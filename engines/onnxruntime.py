"""ONNX Runtime on a CPU: one session per step, every dimension that varies dynamic, weights bound as inputs.

Weights are mapped files shared by all sessions; nothing is copied or folded into a session. State is updated in place
by binding one buffer as input and output. Threads are an explicit choice: spinning threads of several sessions fight
each other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Before the import: the library's official builds otherwise keep telemetry files in the user's cache folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

from twostroke.engines.base import Buffer
from twostroke.engines.errors import EngineError
from twostroke.engines.manifest import Binding, Step, named_dims


def versions() -> dict[str, str]:
    """What a step built for this engine depends on."""
    return {"onnxruntime": ort.__version__}


BFLOAT16 = 16  # of the ONNX tensor types


class OnnxRuntimeCompiler:
    """Loads `*.portable.onnx`; there is nothing to compile ahead of time."""

    name = "onnxruntime"

    def load(self, folder: Path, step: Step, weights: Mapping[str, Buffer], threads: int = 1) -> OnnxRuntimeEngine:
        """The engine of one step. Raises EngineError if the graph does not load or disagrees with the manifest."""
        if (step.stage, step.device) != ("portable", "cpu"):
            raise EngineError(
                f"step {step.name} is of stage {step.stage} for {step.device}; {self.name} runs portable steps on cpu, "
                "so rebuild the engine for it"
            )
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        path = folder / step.file
        try:
            session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise EngineError(f"{path}: ONNX Runtime {ort.__version__} cannot load it: {error}") from None
        return OnnxRuntimeEngine(step, session, weights)


class OnnxRuntimeEngine:
    """A session and the weights it reads."""

    in_place = True

    def __init__(self, step: Step, session: ort.InferenceSession, weights: Mapping[str, Buffer]) -> None:
        self.step = step
        self._session = session
        self._bindings = {binding.name: binding for binding in step.bindings}
        graph_names = {value.name for value in (*session.get_inputs(), *session.get_outputs())}
        if graph_names != set(self._bindings):
            differing = ", ".join(sorted(graph_names ^ set(self._bindings)))
            raise EngineError(
                f"step {step.name}: graph and manifest disagree on bindings {differing}; rebuild the engine"
            )
        states = {name for name, binding in self._bindings.items() if binding.role == "state"}
        for name, binding in self._bindings.items():
            implied = name.removesuffix(".next") if name.removesuffix(".next") in states - {name} else None
            if binding.alias != implied:
                raise EngineError(
                    f"step {step.name}: {name} updates {binding.alias} in the manifest, {implied} in the graph; "
                    "rebuild the engine"
                )
        self._weights: dict[str, ort.OrtValue] = {}
        for name, binding in self._bindings.items():
            if binding.role == "weight":
                if name not in weights:
                    raise EngineError(
                        f"step {step.name}: weight {name} is not in the weights index; rebuild the engine"
                    )
                _check(step.name, binding, weights[name])
                if weights[name].shape != binding.shape:
                    raise EngineError(
                        f"step {step.name}: weight {name} has shape {weights[name].shape} in the weights index, "
                        f"{binding.shape} in the graph; rebuild the engine"
                    )
                self._weights[name] = _value(weights[name])

    @property
    def bindings(self) -> Mapping[str, Binding]:
        return self._bindings

    def bind(self, buffers: Mapping[str, Buffer]) -> OnnxRuntimeStep:
        """See `Engine.bind`. State named once is updated in place: its `.next` output takes the same buffer."""
        wanted = {name: b for name, b in self._bindings.items() if b.role != "weight"}
        chosen: dict[str, Buffer] = {}
        for name, binding in wanted.items():
            source = name if name in buffers else binding.alias
            if source is None or source not in buffers:
                raise EngineError(f"step {self.step.name}: no buffer for {name} {binding.dtype}{list(binding.shape)}")
            chosen[name] = buffers[source]
            _check(self.step.name, binding, chosen[name])
        named_dims(wanted, {name: buffer.shape for name, buffer in chosen.items()}, self.step.name)
        binding_set = self._session.io_binding()
        values: dict[tuple[int, str, tuple[int, ...]], ort.OrtValue] = {}
        for name, value in self._weights.items():
            binding_set.bind_ortvalue_input(name, value)
        for name, buffer in chosen.items():
            memory = buffer.pointer, buffer.dtype, buffer.shape
            value = values.setdefault(memory, ort.OrtValue.ortvalue_from_numpy(buffer.owner))
            if wanted[name].role == "output":
                binding_set.bind_ortvalue_output(name, value)
            else:
                binding_set.bind_ortvalue_input(name, value)
        return OnnxRuntimeStep(self._session, binding_set, tuple(chosen.values()))


class OnnxRuntimeStep:
    """A session with every name attached to memory; `buffers` keeps that memory alive."""

    def __init__(self, session: ort.InferenceSession, binding: ort.IOBinding, buffers: tuple[Buffer, ...]) -> None:
        self._session, self._binding, self._buffers = session, binding, buffers

    def enqueue(self, stream: int = 0) -> None:
        """Runs the step on the calling thread."""
        self._session.run_with_iobinding(self._binding)


def _value(buffer: Buffer) -> ort.OrtValue:
    """The buffer's own memory as ONNX Runtime takes it."""
    if buffer.dtype == "bfloat16":
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(buffer.owner, BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(buffer.owner)


def _check(step: str, binding: Binding, buffer: Buffer) -> None:
    if buffer.dtype != binding.dtype or buffer.device != "cpu":
        raise EngineError(
            f"step {step}: {binding.name} is {buffer.dtype} on {buffer.device}, expected {binding.dtype} on cpu"
        )
