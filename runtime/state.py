"""The memory of all requests: one array per state tensor of the manifest, addressed by slot, page and position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from twostroke.engines.manifest import StateTensor

Array = NDArray[np.generic]


class State:
    """An array for each tensor, with `slots` slots and `pages` pages, the scratch ones included.

    `poison` fills them with NaN (all bits set where the type has none): what no token wrote must not matter.
    """

    def __init__(self, tensors: Iterable[StateTensor], slots: int, pages: int, *, poison: bool = False) -> None:
        self.tensors = tuple(tensors)
        self.arrays: Mapping[str, Array] = {
            tensor.name: _allocate(tensor, tensor.shape(slots, pages), poison) for tensor in self.tensors
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(array.nbytes for array in self.arrays.values())

    def bindings(self) -> dict[str, Array]:
        """Every tensor as the input it is read from and the output it is updated through: the same memory."""
        return {name: array for tensor, array in self.arrays.items() for name in (tensor, f"{tensor}.next")}

    def live_rows(self, slot: int, position: int, page_table: NDArray[np.int32]) -> dict[str, Array]:
        """Copies of the rows that `slot` needs to resume with `position` tokens committed, in logical order.

        page_table [S, P], wide enough for `position`. The pieces of a packed row come side by side.
        """
        return {
            tensor.name: _copy(tensor, self.arrays[tensor.name], _physical_rows(tensor, slot, position, page_table))
            for tensor in self.tensors
        }


def _physical_rows(tensor: StateTensor, slot: int, position: int, page_table: NDArray[np.int32]) -> NDArray[np.intp]:
    logical = np.asarray(tensor.live(position), np.intp)
    if tensor.addressing == "paged":
        pages = page_table[slot, logical // tensor.rows].astype(np.intp)
        return pages * tensor.rows + logical % tensor.rows
    if tensor.addressing == "ring":
        logical = logical % tensor.rows
    return slot * tensor.rows + logical


def _copy(tensor: StateTensor, array: Array, rows: NDArray[np.intp]) -> Array:
    if not tensor.planes:
        return array[rows]
    page, row = np.divmod(rows[:, None], tensor.rows)
    starts = np.cumsum([0, *tensor.planes[:-1]]) * tensor.rows
    columns = [start + row * size + np.arange(size) for start, size in zip(starts, tensor.planes, strict=True)]
    return array[page, np.concatenate(columns, axis=1)]


def _allocate(tensor: StateTensor, shape: tuple[int, int], poison: bool) -> Array:
    dtype = np.dtype(tensor.dtype)
    array = np.zeros(shape, dtype)
    if poison and dtype.kind == "f":
        array.fill(np.nan)
    elif poison:
        array.view(np.uint8).fill(0xFF)
    return array
