"""Small parts every network shares: weights without values, norms, rope, and the declaration of a step.

Networks are built with uninitialised memory (nothing is touched), exported, and their parameters become inputs of the
graph: a network on its own holds shapes and maths, never a checkpoint. Maths is fp32 whatever weights are kept in:
`keep_as_stored` gives parameters the storage of a checkpoint, and what uses one makes it fp32 there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from twostroke.builder.config import FP4_GROUP, FP8_BLOCK, RopeScaling
from twostroke.engines.manifest import Binding, StateTensor
from twostroke.plugins.moe.torch_op import MOE_EXPERTS, MOE_EXPERTS_FP4, MOE_EXPERTS_FP8
from twostroke.plugins.quantised.torch_op import DEQUANTISE_FP8, LINEAR_FP8

_device: str | None = None  # torch's own choice


@contextmanager
def shapes_only() -> Iterator[None]:
    """Parameters made inside have shapes and no memory until `allocate`: in fp32 a release has terabytes, which some
    systems do not even promise."""
    global _device
    _device = "meta"
    try:
        yield
    finally:
        _device = None


def allocate(network: nn.Module) -> None:
    """Uninitialised memory for the parameters that have none."""
    for name, parameter in list(network.named_parameters()):
        if parameter.is_meta:
            owner, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(owner), leaf, weight(*parameter.shape, dtype=parameter.dtype))


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter of which only the shape is known yet."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=_device), requires_grad=False)


def fp32(parameter: Tensor) -> Tensor:
    """A parameter's values, whatever float it is kept in."""
    return parameter if parameter.dtype == torch.float32 else parameter.float()


class Linear(nn.Module):
    """y = x W^T, no bias. weight [out, in], as checkpoints store it: floats, or FP8 codes with a scale a block."""

    scale_name: str | None = None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = weight(outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale_name is not None:
            return LINEAR_FP8.overload(x, self.weight, getattr(self, self.scale_name))
        return nn.functional.linear(x, fp32(self.weight))

    def matrix(self) -> Tensor:
        """W, fp32 [out, in]."""
        if self.scale_name is not None:
            return DEQUANTISE_FP8.overload(self.weight, getattr(self, self.scale_name))
        return fp32(self.weight)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [N] of W, fp32 [N, in]: an embedding. Never FP8."""
        return fp32(self.weight[ids])

    def keep_fp8(self, scale: str, dtype: torch.dtype) -> None:
        """From now on the weight is FP8 codes, with scales of that name and dtype."""
        out, inputs = self.weight.shape
        self.scale_name = scale
        self.weight = weight(out, inputs, dtype=torch.uint8)
        setattr(self, scale, weight(-(-out // FP8_BLOCK), -(-inputs // FP8_BLOCK), dtype=dtype))


class Affine(Linear):
    """y = x W^T + b. bias [out]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.bias = weight(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, fp32(self.weight), self.bias)


class ExpertBank(nn.Module):
    """One matrix of all experts of a layer: weight [E, out, in], kept as floats, as FP8 codes with a scale a block or
    as two FP4 codes a byte with a scale for every 32 of a row."""

    scale_name: str | None = None

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = weight(experts, outputs, inputs)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The bank as the op of its storage takes it: the weights, or codes and scales."""
        if self.scale_name is None:
            return (self.weight,)
        return self.weight, getattr(self, self.scale_name)

    def keep_fp8(self, scale: str, dtype: torch.dtype) -> None:
        """From now on the weights are FP8 codes, with scales of that name and dtype."""
        experts, out, inputs = self.weight.shape
        self.scale_name = scale
        self.weight = weight(experts, out, inputs, dtype=torch.uint8)
        setattr(self, scale, weight(experts, -(-out // FP8_BLOCK), -(-inputs // FP8_BLOCK), dtype=dtype))

    def keep_fp4(self, scale: str) -> None:
        """From now on the weights are packed FP4 codes, with E8M0 scales of that name."""
        experts, out, inputs = self.weight.shape
        self.scale_name = scale
        self.weight = weight(experts, out, inputs // 2, dtype=torch.uint8)
        setattr(self, scale, weight(experts, out, inputs // FP4_GROUP, dtype=torch.uint8))


def routed_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate: ExpertBank, down: ExpertBank, up: ExpertBank, limit: float
) -> Tensor:
    """Weighted sum of the experts `ids` [N, k] of x [N, D], by the op of the banks' storage."""
    op = MOE_EXPERTS
    if gate.scale_name is not None:
        op = MOE_EXPERTS_FP4 if gate.weight.shape[2] < x.shape[1] else MOE_EXPERTS_FP8
    return op.overload(x, ids, weights, *gate.tensors, *down.tensors, *up.tensors, limit)


_SCALE_DTYPES = {"F8_E8M0": torch.uint8, "U8": torch.uint8, "F32": torch.float32}


def keep_as_stored(network: nn.Module, stored: Mapping[str, str]) -> None:
    """Gives matrices the storage they have in a checkpoint; `stored`: tensor name -> safetensors dtype.

    FP8 and FP4 matrices become codes and scales, BF16 ones stay BF16. All experts of a bank are stored alike. Vectors
    and small tables are fp32 always.
    """
    for name, module in network.named_modules():
        if not isinstance(module, Linear | ExpertBank):
            continue
        prefix, _, matrix = name.rpartition(".")
        source = name if isinstance(module, Linear) else f"{prefix}.0.{matrix}"
        dtype = stored[f"{source}.weight"]
        scale = next((s for s in ("scale", "weight_scale_inv") if f"{source}.{s}" in stored), "")
        if dtype == "F8_E4M3":
            module.keep_fp8(scale, _SCALE_DTYPES[stored[f"{source}.{scale}"]])
        elif dtype == "I8" and isinstance(module, ExpertBank):
            module.keep_fp4(scale)
        elif dtype == "BF16" and isinstance(module, Linear):
            module.weight = weight(*module.weight.shape, dtype=torch.bfloat16)


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
    # Values, so on the CPU even where a network is made on the meta device for its shapes alone.
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
    frequencies = theta**-exponent
    if scaling is None:
        return frequencies.float()

    def pair_of(beta: float) -> float:
        turns = scaling.original_max_position_embeddings / (2 * math.pi * beta)
        return dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - low) / max(high - low, 0.001)).clamp(0, 1)
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
