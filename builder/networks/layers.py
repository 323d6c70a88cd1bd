"""Small parts every network shares: weights without values, norms, rope, and the declaration of a step.

Networks are built with uninitialised memory (nothing is touched), exported, and their parameters become inputs of the
graph: a network on its own holds shapes and maths, never a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from twostroke.builder.config import RopeScaling
from twostroke.engines.manifest import Binding, StateTensor


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter of which only the shape is known yet."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T, no bias. weight [out, in], as checkpoints store it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = weight(outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Affine(Linear):
    """y = x W^T + b. bias [out]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.bias = weight(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = weight(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.eps) * self.weight


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = weight(size)
        self.bias = weight(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def rms(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, spelt as graph compilers recognise it."""
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def rope_frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angle per position of each of the dim/2 pairs, f32 [dim/2]; YaRN if `scaling`, without any attention factor.

    f_i = theta^(-2i/dim); with YaRN f'_i = f_i/factor * (1 - s_i) + f_i * s_i,
    s_i = 1 - clamp((i - low)/(high - low), 0, 1),
    low/high = floor/ceil of dim * ln(original/(2 pi beta)) / (2 ln theta) at beta_fast/beta_slow.
    """
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    frequencies = theta**-exponent
    if scaling is None:
        return frequencies.float()

    def pair_of(beta: float) -> float:
        turns = scaling.original_max_position_embeddings / (2 * math.pi * beta)
        return dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    keep = 1 - ramp
    return (frequencies / scaling.factor * (1 - keep) + frequencies * keep).float()


@dataclass(frozen=True)
class Rotation:
    """Rope of rows of `size` features, 2*pairs of which turn: the last ones, or the first ones where `leading`.

    Neighbours (2i, 2i+1) form a pair, or with `halves` feature i of each half: (i, i+pairs).
    y = x * cos + swapped(x) * sin, with swapped exchanging the members of every pair and sin [N, size] carrying the
    signs (-, +); features that stay have angle 0. One gather and three elementwise nodes in a graph.
    """

    cos: Tensor
    sin: Tensor
    partner: Tensor  # [size], where the other member of each feature's pair is

    @classmethod
    def at(
        cls, positions: Tensor, frequencies: Tensor, size: int, *, halves: bool = False, leading: bool = False
    ) -> Rotation:
        """Angles of `positions` [N] for pair frequencies [pairs]."""
        pairs = frequencies.shape[0]
        rest, first = torch.zeros(size - 2 * pairs), 0 if leading else size - 2 * pairs
        turned = torch.cat([frequencies, frequencies]) if halves else frequencies.repeat_interleave(2)
        turning = torch.cat([turned, rest] if leading else [rest, turned])
        angle = positions[:, None].float() * turning[None, :]
        sign, inside = torch.ones(size), torch.arange(2 * pairs)
        sign[first : first + (pairs if halves else 2 * pairs) : 1 if halves else 2] = -1.0
        swapped = torch.cat([inside[pairs:], inside[:pairs]]) if halves else inside ^ 1
        partner = torch.cat([torch.arange(first), first + swapped, torch.arange(first + 2 * pairs, size)])
        return cls(torch.cos(angle), torch.sin(angle) * sign, partner)

    def __call__(self, x: Tensor, inverse: bool = False) -> Tensor:
        """x [N, ..., size] turned by each token's angle, or back."""
        shape = [-1, *([1] * (x.dim() - 2)), x.shape[-1]]
        cos, sin = self.cos.reshape(shape), self.sin.reshape(shape)
        turned = x.index_select(-1, self.partner) * sin
        return x * cos - turned if inverse else x * cos + turned


@dataclass(frozen=True)
class StepSpec:
    """A step ready for export: `module(*inputs, *state)` returns the outputs, then the new value of every state
    tensor it `writes`, in this order. `sizes` are example values (at least 2) of the dynamic letters."""

    name: str
    module: nn.Module
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    state: tuple[StateTensor, ...]
    writes: tuple[str, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)


def step_input(name: str, *shape: int | str, dtype: str = "int32") -> Binding:
    """Declares an input of a step."""
    return Binding(name, dtype, shape, "input")


def step_output(name: str, *shape: int | str, dtype: str = "float32") -> Binding:
    """Declares an output of a step."""
    return Binding(name, dtype, shape, "output")
