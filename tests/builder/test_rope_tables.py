"""Every spelling of the rope settings gives the network the same tables (C-12)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from twostroke.builder.config import parse_config
from twostroke.builder.networks.deepseek_v4 import DeepseekV4
from twostroke.builder.networks.layers import Rotation, rope_frequencies
from twostroke.tests.checkpoints import F4, REMOVED, with_overrides

YARN = dict(F4["rope_scaling"])
NESTED = {
    "main": {"rope_type": "default", "rope_theta": 10000},
    "compress": {**{k: v for k, v in YARN.items() if k != "type"}, "rope_type": "yarn", "rope_theta": 160000},
}


def tables(**overrides: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies of window-only layers and of compressed layers."""
    network = DeepseekV4(parse_config(with_overrides(F4, **overrides), "config.json"), 5, 128, (3, 4, 5))
    return network.window_frequencies, network.frequencies


@pytest.mark.parametrize("rope", [{"rope_scaling": YARN}, {"rope_parameters": YARN}, {"rope_parameters": NESTED}])
def test_every_spelling_of_yarn_reaches_the_tables(rope: dict[str, Any]) -> None:
    window, compressed = tables(**{"rope_scaling": REMOVED, **rope})
    assert torch.equal(window, rope_frequencies(8, 10000, None)), "window layers are never scaled"
    expected = []
    for i in range(4):
        plain = 160000 ** (-2 * i / 8)
        bounds = [8 * math.log(32 / (2 * math.pi * beta)) / (2 * math.log(160000)) for beta in (32, 1)]
        low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), 7)
        ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        expected.append(plain / 4 * ramp + plain * (1 - ramp))
    torch.testing.assert_close(compressed, torch.tensor(expected), rtol=1e-6, atol=0)
    assert not torch.equal(compressed, rope_frequencies(8, 160000, None))


@pytest.mark.parametrize(
    "rope",
    [{"rope_scaling": None}, {"rope_parameters": {"type": "default", "rope_theta": 10000}}, {"rope_scaling": REMOVED}],
)
def test_null_and_default_mean_the_unscaled_table(rope: dict[str, Any]) -> None:
    window, compressed = tables(**{"rope_scaling": REMOVED, **rope})
    assert torch.equal(window, rope_frequencies(8, 10000, None))
    assert torch.equal(compressed, rope_frequencies(8, 160000, None))


def test_rope_turns_interleaved_pairs_of_the_last_features() -> None:
    """(2i, 2i+1) is a complex number times e^{i p f}; the first features stay, and the inverse undoes it."""
    frequencies = rope_frequencies(4, 100.0, None)
    positions = torch.tensor([0, 3, 11])
    x = torch.randn(3, 2, 10, generator=torch.Generator().manual_seed(0))
    turn = Rotation.at(positions, frequencies, 10)
    y = turn(x)
    assert torch.equal(y[..., :6], x[..., :6])
    pairs = torch.view_as_complex(x[..., 6:].reshape(3, 2, 2, 2).contiguous())
    angle = positions[:, None, None].float() * frequencies
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).reshape(3, 2, 4)
    torch.testing.assert_close(y[..., 6:], expected)
    torch.testing.assert_close(turn(y, inverse=True), x)
    assert torch.equal(y[0], x[0])
