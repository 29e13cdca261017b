"""From columns to torch tensors; torch is imported when they are asked for.

Example:
    >>> to_tensors({"obs": np.zeros((2, 3), np.float32)})["obs"].shape
    torch.Size([2, 3])
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from rlio.arrays import Column
from rlio.nested import map_structure

if TYPE_CHECKING:
    import torch

__all__ = ["to_tensors"]

#: (kind, size) of the dtypes that torch has.
_TORCH_DTYPES = {
    ("b", 1),
    *(("i", size) for size in (1, 2, 4, 8)),
    *(("u", size) for size in (1, 2, 4, 8)),
    *(("f", size) for size in (2, 4, 8)),
    *(("c", size) for size in (8, 16)),
}


def to_tensors(
    columns: dict[str, Column],
    device: torch.device | str | None = None,
    *,
    pin_memory: bool = False,
    non_blocking: bool = False,
    stream: torch.cuda.Stream | None = None,
) -> dict[str, Any]:
    """Turn each array that torch can hold into a tensor; leave the others (objects, text, dates) as NumPy.

    Args:
        columns: Columns, nested or not.
        device: Where the tensors go; None: the CPU, and tensors stay where they are.
        pin_memory: Copy CPU memory into pinned memory first.
        non_blocking: Start copies to the device without waiting; of use with ``pin_memory`` only.
        stream: CUDA stream on which copies to the device are issued.

    Returns:
        The same structure. A CPU tensor shares the memory of its array where torch allows: not of read-only
        arrays, of those with negative strides or a foreign byte order, and not of pinned ones.
    """
    import torch

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            if (leaf.dtype.kind, leaf.dtype.itemsize) not in _TORCH_DTYPES:
                return leaf
            leaf = torch.from_numpy(_plain(leaf))
        if pin_memory and leaf.device.type == "cpu":
            leaf = leaf.pin_memory()
        return leaf if device is None else leaf.to(device, non_blocking=non_blocking)

    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        return {name: map_structure(convert, column) for name, column in columns.items()}


def _plain(array: np.ndarray) -> np.ndarray:
    """``array``, or a copy of it in the layout that torch accepts."""
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    # torch has no read-only tensors: writing into one would reach rows that others share.
    if not array.flags.writeable or any(s < 0 or s % array.itemsize for s in array.strides):
        return array.copy()
    return array
