"""The last thing a build does: every compiled step against its own network in eager torch, on a golden prompt.

Engines that load and talk nonsense are a known fault of compilers. Both sides get the same inputs, step by step, each
with memory of its own; outputs and memory must agree before the directory is called ready. Two requests of a few tokens
are prefilled, observed and drafted for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from twostroke.builder.checkpoint import Checkpoint
from twostroke.builder.eager import EagerEngine
from twostroke.builder.networks.layers import StepSpec
from twostroke.builder.weights import load_into
from twostroke.engines.base import Buffer, Engine
from twostroke.engines.errors import BuildError
from twostroke.engines.loading import COMPILERS, map_weights
from twostroke.engines.manifest import SelfCheck, Step, WeightsIndex, named_dims

BOUND = 1e-3
"""Largest error accepted, as a share of the largest value of the output. Kernels that sum in another order differ by
some 1e-6, a wrong weight by more than a tenth."""
DEFAULT_LIMIT = 4 << 30
"""Bytes of fp32 weights up to which the network is run: it holds all of them dequantised."""

SLOTS = (1, 2)
TOKENS = 8
WHOLE_SEQUENCES = ("target", "observe")  # steps over all tokens; the others take one row a request

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class _Run:
    """One engine of a step and the memory of its side, [2 slots and scratch]."""

    engine: Engine
    memory: Arrays

    def __call__(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Outputs by name; memory is updated."""
        dims = named_dims(
            {name: binding for name, binding in self.engine.bindings.items() if name in inputs},
            {name: array.shape for name, array in inputs.items()},
            self.engine.step.name,
        )
        outputs = {
            name: np.zeros([d if isinstance(d, int) else dims[d] for d in binding.shape], binding.dtype)
            for name, binding in self.engine.bindings.items()
            if binding.role == "output" and binding.alias is None
        }
        state = {**self.memory, **{f"{name}.next": array for name, array in self.memory.items()}}
        buffers = {name: Buffer.of(array) for name, array in {**inputs, **outputs, **state}.items()}
        self.engine.bind(buffers).enqueue()
        return outputs


def compare(
    checkpoint: Checkpoint,
    networks: Sequence[StepSpec],
    folder: Path,
    steps: Mapping[str, Step],
    index: WeightsIndex,
    vocab_size: int,
) -> SelfCheck:
    """Compares the steps compiled in `folder` with `networks`, fp32 steps of the same build without values.

    Raises BuildError that names the first step and value that disagree.
    """
    weights = map_weights(folder, index)
    state = {tensor.name: tensor for spec in networks for tensor in spec.state}
    slots = len(SLOTS) + 1
    ours, theirs = ({t.name: np.zeros(t.shape(slots, slots), t.dtype) for t in state.values()} for _ in range(2))
    carried: dict[str, np.ndarray] = {}
    worst = 0.0
    for spec in networks:
        load_into(spec.module, checkpoint)
        reference = _Run(EagerEngine(spec), theirs)
        step = steps[spec.name]
        compiled = _Run(COMPILERS[step.engine]().load(folder, step, weights, 1), ours)
        inputs = _inputs(spec, vocab_size, carried)
        expected, found = reference(inputs), compiled(inputs)
        carried.update(expected)
        kept = {
            f"memory {name}": (theirs[name], ours[name]) for name in spec.writes if theirs[name].dtype == np.float32
        }
        for name, (right, mine) in {**{n: (expected[n], found[n]) for n in expected}, **kept}.items():
            error = _error(right, mine)
            worst = max(worst, error)
            if not error <= BOUND:
                raise BuildError(
                    f"step {spec.name} as compiled for {step.engine} does not compute what its network computes: "
                    f"{name} is off by {error:.1e} of its largest value on the golden prompt, at most {BOUND:.0e} is "
                    "accepted; nothing was built"
                )
        for parameter in spec.module.parameters():
            parameter.data = torch.empty(0)
    return SelfCheck(True, f"{len(networks)} steps over {len(SLOTS)} prompts of {TOKENS} tokens", worst)


def _error(right: np.ndarray, mine: np.ndarray) -> float:
    """Largest difference as a share of the largest value; infinite where one side is NaN or tokens differ."""
    if right.dtype.kind != "f":
        return 0.0 if np.array_equal(right, mine) else float("inf")
    if np.isnan(right).any() or np.isnan(mine).any():
        return float("inf")
    return float(np.abs(right - mine).max() / max(float(np.abs(right).max()), 1e-30))


def _inputs(spec: StepSpec, vocab_size: int, carried: Arrays) -> dict[str, np.ndarray]:
    """Two requests of TOKENS tokens, or one row for each behind them; what earlier steps gave is handed on."""
    whole = spec.name in WHOLE_SEQUENCES
    count = TOKENS if whole else 1
    requests, rng = len(SLOTS), np.random.default_rng(17)
    rows = requests * count
    tokens = rng.integers(0, vocab_size, rows)
    start = np.arange(0, TOKENS) if whole else np.array([TOKENS])
    known = {
        "token_ids": tokens,
        "next_ids": tokens[::-1],
        "anchor": tokens[:requests],
        "positions": np.tile(start, requests),
        "position": np.full(requests, TOKENS),
        "slots": np.repeat(SLOTS, count),
        "slot": np.array(SLOTS),
        "request_slot": np.array(SLOTS),
        "row_start": np.arange(requests + 1) * count,
        "page_table": np.arange(requests + 1)[:, None],
        "logit_rows": np.arange(rows),
        "valid_from": np.zeros(requests + 1, np.int64),
        "inverse_temperature": np.ones(rows),
        "taps": carried.get("taps"),
    }
    letters = {"R": requests, "N": rows, "S": requests + 1}
    found = {}
    for binding in spec.inputs:
        if binding.name == "noise":
            shape = [d if isinstance(d, int) else letters[d] for d in binding.shape]
            found[binding.name] = np.zeros(shape, binding.dtype)
        else:
            found[binding.name] = np.ascontiguousarray(known[binding.name]).astype(binding.dtype)
    return found
