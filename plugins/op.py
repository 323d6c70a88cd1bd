"""An op as both sides see it: one reference function, a torch op of the same name and signature, a shape function.

Tensor parameters of the reference are the op's inputs, the others (int, float, bool) its attributes, in the same
order and under the same names in torch, in ONNX and in a TensorRT plugin.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "twostroke"


@dataclass(frozen=True)
class Op:
    """`shapes(*args)` returns empty tensors of the result's shapes; it is what tracing sees instead of the maths.
    `any_size`: one ONNX body serves inputs of every size, where there would be one for each."""

    name: str
    reference: Callable[..., Any]
    shapes: Callable[..., Any]
    any_size: bool = False
    tensors: tuple[str, ...] = field(init=False)
    attributes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(self.reference)
        names = list(inspect.signature(self.reference).parameters)
        object.__setattr__(self, "tensors", tuple(n for n in names if hints[n] is Tensor))
        object.__setattr__(self, "attributes", tuple(n for n in names if hints[n] is not Tensor))
        if names != [*self.tensors, *self.attributes]:
            raise TypeError(f"op {self.name}: tensors must come before attributes")
        functional = torch.library.custom_op(f"{NAMESPACE}::{self.name}", self.reference, mutates_args=())
        functional.register_fake(self.shapes)

    @property
    def overload(self) -> Any:
        """The functional torch op, `torch.ops.twostroke.<name>.default`."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    @property
    def outputs(self) -> int:
        """Number of results."""
        hint = typing.get_type_hints(self.reference)["return"]
        return len(typing.get_args(hint)) or 1
