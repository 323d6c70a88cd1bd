"""Steps driven by hand: poisoned memory, packed chunks of several requests, and the rows a request lives on."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from twostroke.builder.checkpoint import Checkpoint
from twostroke.builder.demo import whole_sequence
from twostroke.builder.eager import EagerEngine
from twostroke.builder.networks.dspark import Observe, Propose
from twostroke.builder.networks.registry import TARGETS
from twostroke.builder.weights import load_into
from twostroke.engines.base import Buffer, Engine
from twostroke.engines.manifest import StateTensor
from twostroke.tests.builder.deepseek_v32_reference import Alignment, Drafter, Network

Array = np.ndarray
Rows = Mapping[str, Array]


class Toy:
    """A toy checkpoint three ways: parsed config, networks with its weights, and the whole-sequence oracle of its
    family; all with index keys of one dtype."""

    def __init__(self, folder: Path, index_key_dtype: str = "float32") -> None:
        self.checkpoint = Checkpoint.open(folder)
        family = TARGETS[self.checkpoint.config.model_type]
        self.config: Any = family.index_keys[index_key_dtype](self.checkpoint.config)  # the family's own class
        self.raw = SimpleNamespace(**json.loads((folder / "config.json").read_text()))

    @functools.cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """Every tensor by its checkpoint name, floating ones in fp32."""
        read = {name: self.checkpoint.read(name) for name in self.checkpoint.entries}
        return {name: value.float() if value.is_floating_point() else value for name, value in read.items()}

    @functools.cached_property
    def reference(self) -> Network | None:
        """The numpy network, of a V3.2 checkpoint."""
        if self.config.model_type != "deepseek_v32":
            return None
        weights = {name: value.numpy() for name, value in self.weights.items()}
        return Network(vars(self.raw), weights, fp8_index=self.config.index_key_dtype == "fp8_e4m3")

    def target(self, draft_len: int = 5, max_seq_len: int = 128) -> EagerEngine:
        """The target step in eager torch."""
        dspark = getattr(self.config, "dspark", None)
        network = TARGETS[self.config.model_type].network(
            self.config, draft_len, max_seq_len, dspark.target_layer_ids if dspark else ()
        )
        assert isinstance(network, torch.nn.Module)
        load_into(network, self.checkpoint)
        return EagerEngine(network.step())

    def draft(self) -> tuple[EagerEngine, EagerEngine]:
        """The observe and propose steps in eager torch."""
        assert self.config.dspark is not None
        modules = Observe(self.config, self.config.dspark), Propose(self.config, self.config.dspark)
        for module in modules:
            load_into(module, self.checkpoint)
        return EagerEngine(modules[0].step()), EagerEngine(modules[1].step())

    @torch.no_grad()
    def oracle(self, tokens: Iterable[int]) -> tuple[Array, Array]:
        """Logits [L, V] and taps [L, W] of a whole sequence."""
        if self.reference:
            rows = self.reference.target(list(tokens))
            return rows.logits, rows.hidden
        ids = torch.tensor(list(tokens), dtype=torch.int64)[None]
        found = whole_sequence.target(self.raw, self.weights, ids)
        return found.logits[0].numpy(), found.taps[0].numpy()

    @torch.no_grad()
    def chain(self, taps: Array, tokens: Sequence[int], depth: int = 3, shift: int = 1) -> dict[str, Array]:
        """Greedy tokens and logits of an MTP chain behind `tokens`, the last of which is the anchor; every row is
        computed anew each time. `shift` 1 is the rule, hidden i with token i+1; 0 is the documented mistake."""
        if self.reference:
            drafter = Drafter(self.reference, Alignment(token_shift=shift))
            drafter.observe(taps, tokens, 0, len(tokens) - 1)
            chain, rows = drafter.chain(depth)
            return {"tokens": np.array(chain), "logits": rows}
        hidden = torch.from_numpy(taps[: len(tokens) - 1])[None]
        paired, picked, logits = list(tokens[shift:])[: hidden.shape[1]], [], []
        for _ in range(depth):
            out = whole_sequence.nextn(self.raw, self.weights, hidden, torch.tensor([paired]))
            logits.append(out.logits[0, -1].numpy())
            picked.append(int(logits[-1].argmax()))
            hidden = torch.cat([hidden, out.hidden[:, -1:]], dim=1)
            paired = [*paired, picked[-1]]
        return {"tokens": np.array(picked), "logits": np.stack(logits)}


class Memory:
    """State arrays full of NaN, packed ones of 0xFF, and a page table whose pages are dealt in no particular order."""

    def __init__(self, state: Iterable[StateTensor], slots: int = 4, pages_per_slot: int = 1) -> None:
        self.state = tuple(state)
        pages = 1 + (slots - 1) * pages_per_slot
        self.arrays = {
            t.name: np.full(t.shape(slots, pages), np.nan if t.dtype == "float32" else 0xFF, t.dtype)
            for t in self.state
        }
        self.table = np.zeros((slots, pages_per_slot), np.int32)
        dealt = np.random.default_rng(pages).permutation(np.arange(1, pages, dtype=np.int32))
        self.table[1:] = dealt.reshape(slots - 1, pages_per_slot)

    def rows(self, tensor: StateTensor, slot: int, logical: Sequence[int] | range) -> Array:
        """Physical rows of logical ones: the addressing rule of the contract, spelt out."""
        physical = []
        for row in logical:
            if tensor.addressing == "paged":
                physical.append(int(self.table[slot, row // tensor.rows]) * tensor.rows + row % tensor.rows)
            else:
                physical.append(slot * tensor.rows + (row % tensor.rows if tensor.addressing == "ring" else row))
        return np.array(physical, np.intp)

    def live(self, slot: int, position: int) -> dict[str, Array]:
        """Copies of what `slot` needs to go on after `position` committed tokens."""
        return {t.name: self.read(t, slot, t.live(position)) for t in self.state}

    def read(self, tensor: StateTensor, slot: int, logical: Sequence[int] | range) -> Array:
        """Copies of logical rows; of a packed one the pieces side by side, each from its plane of the page."""
        array, rows = self.arrays[tensor.name], self.rows(tensor, slot, logical)
        if not tensor.planes:
            return array[rows].copy()
        found = []
        for page, inside in (divmod(int(row), tensor.rows) for row in rows):
            planes = np.split(array[page], np.cumsum([tensor.rows * size for size in tensor.planes])[:-1])
            found.append(np.concatenate([plane.reshape(tensor.rows, -1)[inside] for plane in planes]))
        return np.array(found, tensor.dtype).reshape(-1, tensor.width)


@dataclass(frozen=True)
class Chunk:
    """Rows of one request in a step. The last `dead` of them are given to the scratch slot."""

    slot: int
    start: int
    tokens: Sequence[int]
    dead: int = 0


@dataclass(frozen=True)
class Packed:
    """Chunks side by side with `padding` rows behind them, as every flat step takes them."""

    chunks: Sequence[Chunk]
    padding: int = 0

    @property
    def inputs(self) -> dict[str, Array]:
        """token_ids, positions, slots, row_start and request_slot; at least two rows."""
        counts = [len(chunk.tokens) for chunk in self.chunks]
        tokens = sum(counts)
        total = max(tokens + self.padding, 2)
        token_ids, positions, slots = (np.zeros(total, np.int32) for _ in range(3))
        token_ids[:tokens] = np.concatenate([np.asarray(c.tokens) for c in self.chunks])
        positions[:tokens] = np.concatenate([np.arange(c.start, c.start + len(c.tokens)) for c in self.chunks])
        slots[:tokens] = np.repeat([c.slot for c in self.chunks], counts)
        for end, chunk in zip(np.cumsum(counts), self.chunks, strict=True):
            slots[end - chunk.dead : end] = 0
        return {
            "token_ids": token_ids,
            "positions": positions,
            "slots": slots,
            "row_start": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            "request_slot": np.array([c.slot for c in self.chunks], np.int32),
        }

    def split(self, rows: Array) -> list[Array]:
        """Rows of a step's output, per chunk."""
        ends = np.cumsum([len(chunk.tokens) for chunk in self.chunks])
        return np.split(rows[: ends[-1]], ends[:-1])


def enqueue(engine: Engine, memory: Memory | None, **arrays: Array) -> dict[str, Array]:
    """Runs a step once with state in place; outputs start as NaN (floats) or -1 and come back by name."""
    arrays = dict(arrays)
    state = memory.arrays if memory is not None else {}
    dims: dict[str, int] = {}
    for name, binding in engine.bindings.items():
        if name in arrays:
            dims |= {d: n for d, n in zip(binding.shape, arrays[name].shape, strict=True) if isinstance(d, str)}
    outputs = {}
    for name, binding in engine.bindings.items():
        if binding.role == "output" and binding.alias is None:
            shape = [d if isinstance(d, int) else dims[d] for d in binding.shape]
            outputs[name] = np.full(shape, np.nan if binding.dtype == "float32" else -1, binding.dtype)
    buffers = {**arrays, **outputs, **state, **{f"{name}.next": array for name, array in state.items()}}
    engine.bind({name: Buffer.of(array) for name, array in buffers.items()}).enqueue()
    return outputs


def forward(
    engine: Engine, memory: Memory, chunks: Sequence[Chunk], *, padding: int = 0, columns: int | None = None
) -> list[dict[str, Array]]:
    """One target step over packed chunks: logits and taps of every row, per chunk. `columns` narrows the page table."""
    packed = Packed(chunks, padding)
    inputs = packed.inputs
    inputs["page_table"] = np.ascontiguousarray(memory.table[:, :columns])
    inputs["logit_rows"] = np.arange(len(inputs["token_ids"]), dtype=np.int32)
    found = {name: packed.split(rows) for name, rows in enqueue(engine, memory, **inputs).items()}
    return [{name: parts[i] for name, parts in found.items()} for i in range(len(chunks))]


def feed(
    engine: Engine, memory: Memory, slot: int, tokens: Sequence[int], sizes: Iterable[int], start: int = 0
) -> dict[str, Array]:
    """Feeds `tokens` from position `start` in chunks of the given sizes; rows of all chunks, concatenated."""
    found: dict[str, list[Array]] = {}
    at = 0
    for size in sizes:
        if at >= len(tokens):
            break
        piece = tokens[at : at + size]
        for name, rows in forward(engine, memory, [Chunk(slot, start + at, piece)])[0].items():
            found.setdefault(name, []).append(rows)
        at += len(piece)
    assert at == len(tokens), "the chunk sizes do not cover the sequence"
    return {name: np.concatenate(parts) for name, parts in found.items()}


def every(size: int) -> Iterable[int]:
    """Chunk sizes without end."""
    while True:
        yield size


def observe(
    engine: Engine,
    memory: Memory,
    taps: Sequence[Array],
    chunks: Sequence[Chunk],
    *,
    padding: int = 0,
    next_ids: Sequence[Sequence[int]] = (),
) -> None:
    """One observe step. `taps` are the target's rows of each chunk, `next_ids` the tokens after them."""
    inputs = Packed(chunks, padding).inputs
    rows = np.full((len(inputs["token_ids"]), taps[0].shape[1]), np.nan, np.float32)
    rows[: sum(map(len, taps))] = np.concatenate(taps)
    names = ("positions", "slots", "row_start")
    given = {name: inputs[name] for name in names if name in engine.bindings}
    if "page_table" in engine.bindings:
        given["page_table"] = memory.table
    if "next_ids" in engine.bindings:
        following = np.concatenate([np.zeros(0, np.int32), *next_ids])
        given["next_ids"] = np.zeros(len(rows), np.int32)
        given["next_ids"][: len(following)] = following
    enqueue(engine, memory, taps=rows, **given)


def propose(
    engine: Engine,
    memory: Memory,
    requests: Sequence[tuple[int, int, int]],
    *,
    valid_from: int = 0,
    inverse_temperature: Array | None = None,
    noise: Array | None = None,
) -> dict[str, Array]:
    """One propose step for (slot, position, anchor) each; greedy unless noise is given."""
    slot, position, anchor = (np.array(column, np.int32) for column in zip(*requests, strict=True))
    shape = engine.bindings["noise"].shape
    if noise is None:
        noise = np.zeros((len(requests), int(shape[1]), int(shape[2])), np.float32)
    if inverse_temperature is None:
        inverse_temperature = np.ones(len(requests), np.float32)
    return enqueue(
        engine,
        memory,
        anchor=anchor,
        position=position,
        slot=slot,
        valid_from=np.full(len(memory.table), valid_from, np.int32),
        inverse_temperature=inverse_temperature,
        noise=noise,
    )


def assert_close(found: Any, expected: Any, tolerance: float, what: str = "") -> None:
    """Largest difference at most `tolerance` times the spread of the expected values; NaN never passes."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    worst = np.abs(found - expected).max()
    assert worst <= tolerance * expected.std(), f"{what} differs by {worst:.2e}, spread {expected.std():.2e}"


def assert_same_live(found: Rows, expected: Rows, tolerance: float = 0.0) -> None:
    """Equal live rows, to the bit unless a tolerance (relative to each tensor's spread) is given."""
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        assert not np.isnan(rows).any(), f"{name}: a live row was never written"
        if tolerance == 0.0:
            np.testing.assert_array_equal(found[name], rows, err_msg=name)
        elif rows.size:
            assert_close(found[name], rows, tolerance, name)
