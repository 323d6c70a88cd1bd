"""The flat target step against the whole-sequence oracle, which shares no code with it and keeps no state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from twostroke.builder.eager import EagerEngine
from twostroke.builder.networks.deepseek_v4 import DeepseekV4
from twostroke.builder.weights import load_into
from twostroke.engines.base import Engine
from twostroke.engines.manifest import StateTensor
from twostroke.tests.builder.flat_runs import Chunk, Memory, Toy, assert_close, enqueue, feed, forward
from twostroke.tests.checkpoints import F4, F4_PLAIN, write_checkpoint

State = tuple[StateTensor, ...]
TOLERANCE = 1e-5


@pytest.mark.parametrize("length", [2, 4, 8, 9, 16, 17, 24, 61, 120])
def test_logits_and_taps_equal_the_oracle(
    toy: Toy, eager_target: EagerEngine, compiled_target: Engine, stream: list[int], length: int
) -> None:
    """Lengths on and beside window (8), top-k (4 rows of 4), and ratios 4 and 8; eager torch and the compiled graph."""
    logits, taps = toy.oracle(stream[:length])
    for engine in (eager_target, compiled_target):
        found = feed(engine, Memory(eager_target.spec.state), 2, stream[:length], [length])
        assert_close(found["logits"], logits, TOLERANCE)
        assert_close(found["taps"], taps, TOLERANCE)


@pytest.mark.parametrize(
    "overrides",
    [
        {"hc_mult": 4, "hc_sinkhorn_iters": 20},
        {"sliding_window": 6},
        {"sliding_window": 32, "index_topk": 1},
        {"compress_ratios": [4, 16, 4, 8, 4, 4, 0, 0, 0], "num_hash_layers": 6},
        {"rope_scaling": None, "num_hash_layers": 0},
        {"swiglu_limit": 0.5, "routed_scaling_factor": 2.5, "num_experts_per_tok": 4},
        {"dspark_target_layer_ids": [0, 2, 5]},
    ],
    ids=lambda overrides: "-".join(overrides),
)
def test_every_dimension_and_limit_of_the_config_is_honoured(tmp_path: Path, overrides: dict[str, object]) -> None:
    toy = Toy(write_checkpoint(tmp_path, F4, **overrides))
    if toy.raw.rope_scaling is None:  # the oracle always reads YaRN; these factors make it the identity
        toy.raw.rope_scaling = {
            "factor": 1,
            "original_max_position_embeddings": 32,
            "beta_fast": 32,
            "beta_slow": 1,
        }
    tokens = np.random.default_rng(9).integers(0, 320, size=70).tolist()
    target = toy.target()
    found = feed(target, Memory(target.spec.state), 1, tokens, [33, 1, 7, 29])
    logits, taps = toy.oracle(tokens)
    assert_close(found["logits"], logits, TOLERANCE)
    assert_close(found["taps"], taps, TOLERANCE)


def test_without_a_draft_method_there_are_no_taps(tmp_path: Path) -> None:
    toy = Toy(write_checkpoint(tmp_path, F4_PLAIN))
    target = toy.target(draft_len=0)
    assert "taps" not in target.bindings
    toy.raw.dspark_target_layer_ids = [0]
    tokens = list(range(2, 42))
    found = feed(target, Memory(target.spec.state), 1, tokens, [11, 1, 28])
    assert_close(found["logits"], toy.oracle(tokens)[0], TOLERANCE)


def test_logit_rows_choose_which_rows_come_back_and_in_which_order(
    compiled_target: Engine, target_state: State, stream: list[int]
) -> None:
    every_row, chosen = np.arange(20, dtype=np.int32), np.array([19, 3, 3, 11], np.int32)
    found = []
    for rows in (every_row, chosen):
        memory = Memory(target_state)
        inputs = {
            "token_ids": np.array(stream[:20], np.int32),
            "positions": every_row,
            "slots": np.full(20, 2, np.int32),
            "row_start": np.array([0, 20], np.int32),
            "request_slot": np.array([2], np.int32),
            "page_table": memory.table,
            "logit_rows": rows,
        }
        found.append(enqueue(compiled_target, memory, **inputs)["logits"])
    np.testing.assert_array_equal(found[1], found[0][chosen])


def test_rows_given_to_the_scratch_slot_leave_the_request_alone(
    compiled_target: Engine, target_state: State, stream: list[int]
) -> None:
    """Rejected rows, rows beyond the draft length and padding carry slot 0, inside a request's rows or behind them."""
    plain, with_dead = Memory(target_state), Memory(target_state)
    feed(compiled_target, plain, 1, stream[:30], [30])
    feed(compiled_target, with_dead, 1, stream[:30], [30])
    expected = forward(compiled_target, plain, [Chunk(1, 30, stream[30:33])])[0]
    chunks = [Chunk(1, 30, [*stream[30:33], 5, 6, 7], dead=3), Chunk(0, 0, [9, 9])]
    found = forward(compiled_target, with_dead, chunks, padding=3)[0]
    np.testing.assert_array_equal(found["logits"][:3], expected["logits"])
    for name, rows in plain.live(1, 33).items():
        np.testing.assert_array_equal(with_dead.live(1, 33)[name], rows)
    for tensor in target_state:  # no other real slot or page was touched either
        for slot in (2, 3):
            untouched = with_dead.arrays[tensor.name][with_dead.rows(tensor, slot, range(tensor.rows))]
            assert np.isnan(untouched).all()


def test_what_a_network_holds_without_a_checkpoint_is_shapes_only(toy: Toy) -> None:
    """Loading fills every parameter: none keeps the memory it was allocated with."""
    network = DeepseekV4(toy.config, 5, 128, (3, 4, 5))
    for parameter in network.parameters():
        parameter.data.fill_(torch.nan if parameter.is_floating_point() else -1)
    load_into(network, toy.checkpoint)
    for name, parameter in network.named_parameters():
        assert not torch.isnan(parameter.float()).any(), name
        assert (parameter >= 0).all() or parameter.is_floating_point(), name


def test_state_declares_no_more_than_the_contract(eager_target: EagerEngine) -> None:
    """Rings hold T + window - 1, T + 2*ratio - 2 (CSA raw) and T + ratio - 2 (HCA raw) rows, T = 6: never the chunk."""
    state = {t.name.removeprefix("layers."): t for t in eager_target.spec.state}
    assert {name: t.rows for name, t in state.items() if name.startswith(("0.", "2.", "3."))} == {
        "0.window": 6 + 7,
        "2.window": 6 + 7,
        "2.compressed": 64,
        "2.index": 64,
        "2.raw": 6 + 6,
        "2.index_raw": 6 + 6,
        "3.window": 6 + 7,
        "3.compressed": 16,
        "3.raw": 6 + 6,
    }
