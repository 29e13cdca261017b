"""From columns to torch tensors; torch is imported when they are asked for.

On the CPU a tensor shares the memory of its array where that is safe. To another device all columns of a
batch go in one copy where they lie in one piece of memory, as those of pinned batches always do: each copy is
a call of the driver, and batches are made of many small columns.

Example:
    >>> to_tensors({"obs": np.zeros((2, 3), np.float32)})["obs"].shape
    torch.Size([2, 3])
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import Column
from rlio.batch.nested import leaves, map_structure
from rlio.errors import OptionError

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
# Where a column may begin in a piece of memory that holds several: a multiple of every item size.
_ALIGN = 64
# A piece is copied as a whole only if its columns fill as much of it, but for what aligns them: they may be
# slices of longer ones.
_LEAST_FILLED = 0.75

Array = NDArray[Any]


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
        pin_memory: With a device, copy through pinned memory, which is used again once the copy is over.
            Without one, give tensors in pinned memory.
        non_blocking: Start copies to the device without waiting; of use with ``pin_memory`` only. The arrays
            may be changed at once: they have been copied into pinned memory then.
        stream: CUDA stream on which copies to the device are issued.

    Returns:
        The same structure. A CPU tensor shares the memory of its array where torch allows: not of read-only
        arrays, of those with negative strides or a foreign byte order, which are copied once, and not of
        pinned ones. Tensors that were copied in one piece share its memory, without overlapping.

    Raises:
        OptionError: ``pin_memory`` where torch has no accelerator to pin memory for.
    """
    import torch

    target = None if device is None else torch.device(device)

    def convert(leaf: Any) -> Any:
        if _is_numeric(leaf):
            return next(tensors)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if pin_memory and leaf.device.type == "cpu":
            leaf = leaf.pin_memory()
        return leaf if target is None else leaf.to(target, non_blocking=non_blocking)

    arrays = [leaf for column in columns.values() for _, leaf in leaves(column) if _is_numeric(leaf)]
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        if pin_memory and arrays:
            made = _through_pinned(arrays, target, non_blocking)
        elif target is None or target.type == "cpu":
            made = [torch.from_numpy(_plain(array)) for array in arrays]
        else:
            made = _to_device(arrays, target, non_blocking)
        tensors = iter(made)
        return {name: map_structure(convert, column) for name, column in columns.items()}


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and (leaf.dtype.kind, leaf.dtype.itemsize) in _TORCH_DTYPES


def _plain(array: Array) -> Array:
    """``array``, or a copy of it in the layout that torch accepts."""
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    # torch has no read-only tensors: writing into one would reach rows that others share.
    if not array.flags.writeable or any(s < 0 or s % array.itemsize for s in array.strides):
        return array.copy()
    return array


# ---- through pinned memory ----


def _through_pinned(
    arrays: Sequence[Array], target: torch.device | None, non_blocking: bool
) -> list[torch.Tensor]:
    """Copy arrays into one piece of pinned memory, whatever their layout, and on to ``target``, if any."""
    sizes = [-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays]
    offsets = [0, *accumulate(sizes)]
    flat = _pinned_memory(offsets.pop())
    _fill(flat, arrays, offsets)
    if target is None or target.type == "cpu":
        return _cut(flat, arrays, offsets)
    # torch uses the pinned memory again, once the copy from it is over.
    return _cut(_copy(flat, target, non_blocking), arrays, offsets)


def _pinned_memory(size: int) -> torch.Tensor:
    """Pinned memory of ``size`` bytes, which torch keeps when it is freed: locking costs more than the copy.

    Raises:
        OptionError: torch cannot pin memory here.
    """
    import torch

    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise OptionError(
            f"pin_memory=True: torch could not pin {size:,} bytes ({error}); pinned memory is for copies to "
            "an accelerator: leave it out where there is none"
        ) from error


def _fill(flat: torch.Tensor, arrays: Sequence[Array], offsets: Sequence[int]) -> None:
    """Copy arrays to their places; in the machine's byte order and C order."""
    memory: Array = flat.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        place = memory[offset : offset + array.nbytes].view(array.dtype.newbyteorder("="))
        np.copyto(place.reshape(array.shape), array)


def _cut(flat: torch.Tensor, arrays: Sequence[Array], offsets: Sequence[int]) -> list[torch.Tensor]:
    """Tensors of the dtypes and shapes of ``arrays`` at their places in ``flat``."""
    # One view a dtype, and one call a tensor: slicing, viewing and shaping each would cost twice as much.
    whole: dict[torch.dtype, torch.Tensor] = {}
    found = []
    for array, offset in zip(arrays, offsets, strict=True):
        dtype, size = _torch_dtype(array.dtype), array.itemsize
        if dtype not in whole:
            whole[dtype] = flat[: flat.numel() // size * size].view(dtype)
        found.append(whole[dtype].as_strided(array.shape, _c_strides(array.shape), offset // size))
    return found


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    import torch

    return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype


@lru_cache(256)
def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements from one index to the next of each dimension, in C order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _copy(flat: torch.Tensor, target: torch.device, non_blocking: bool) -> torch.Tensor:
    return flat.to(target, non_blocking=non_blocking)


# ---- from where they lie ----


def _to_device(arrays: Sequence[Array], target: torch.device, non_blocking: bool) -> list[torch.Tensor]:
    """Copy arrays to a device: all at once if they lie side by side, else one by one."""
    import torch

    found = _one_piece(arrays)
    if found is None:
        return [_copy(torch.from_numpy(_plain(array)), target, non_blocking) for array in arrays]
    piece, offsets = found
    return _cut(_copy(torch.from_numpy(piece), target, non_blocking), arrays, offsets)


def _one_piece(arrays: Sequence[Array]) -> tuple[Array, list[int]] | None:
    """The bytes from the first array to the last, if there is little else between, and where each begins.

    Arrays that overlap are no such piece: their tensors would share memory, and be written to.
    """
    if len(arrays) < 2:
        return None
    owner = _owner(arrays[0])
    if not (owner.flags.c_contiguous and owner.flags.writeable) or owner.dtype.hasobject:
        return None
    for array in arrays:
        if not (array.flags.c_contiguous and array.dtype.isnative and _owner(array) is owner):
            return None
    addresses = [_address(array) for array in arrays]
    sizes = [array.nbytes for array in arrays]
    spans = sorted((address, address + size) for address, size in zip(addresses, sizes, strict=True))
    start, stop = spans[0][0], spans[-1][1]
    if any(end > following for (_, end), (following, _) in pairwise(spans)):
        return None
    if stop - start > sum(sizes) / _LEAST_FILLED + _ALIGN * len(arrays):
        return None
    offsets = [address - start for address in addresses]
    if any(offset % array.itemsize for offset, array in zip(offsets, arrays, strict=True)):
        return None
    first = start - _address(owner)
    return owner.reshape(-1).view(np.uint8)[first : first + stop - start], offsets


def _owner(array: Array) -> Array:
    """The array whose memory ``array`` shows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _address(array: Array) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]  # NumPy types it as Any.
