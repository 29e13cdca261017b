"""Converts columns to torch tensors; imports torch on first use.

On the CPU, a tensor shares the memory of its array if that is safe. All columns of a batch go to another
device in one copy if they lie in one block of memory, as columns of pinned batches always do. One copy is
faster, because each copy is a driver call and batches have many small columns.

Example:
    >>> to_tensors({"obs": np.zeros((2, 3), np.float32)})["obs"].shape
    torch.Size([2, 3])
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import Column
from rlio.batch.columns import Columns
from rlio.batch.nested import Path, leaves, map_structure, unflatten
from rlio.batch.other_names import did_you_mean
from rlio.errors import MissingColumn, OptionError, excerpt

if TYPE_CHECKING:
    import torch

__all__ = ["Dtypes", "to_tensors"]

#: What ``dtype`` of `to_tensors` takes: a dtype of torch, or its name, such as "float32"; or one for each
#: named column.
Dtypes: TypeAlias = Union["torch.dtype", str, Mapping[str, Union["torch.dtype", str]]]

#: (kind, size) of the dtypes that torch supports.
_TORCH_DTYPES = {
    ("b", 1),
    *(("i", size) for size in (1, 2, 4, 8)),
    *(("u", size) for size in (1, 2, 4, 8)),
    *(("f", size) for size in (2, 4, 8)),
    *(("c", size) for size in (8, 16)),
}
# Alignment of columns in a block of memory: a multiple of every item size.
_ALIGN = 64
# A block is copied as a whole only if its columns fill at least this part of it, apart from alignment: the
# columns may be slices of longer ones.
_LEAST_FILLED = 0.75

Array = NDArray[Any]


def to_tensors(
    columns: dict[str, Column],
    device: torch.device | str | None = None,
    *,
    dtype: Dtypes | None = None,
    pin_memory: bool = False,
    non_blocking: bool = False,
    stream: torch.cuda.Stream | None = None,
) -> dict[str, Any]:
    """Convert each array that torch can hold to a tensor; the others (objects, text, dates) stay NumPy.

    Args:
        columns: Columns, nested or not.
        device: Device of the tensors; None: the CPU, and existing tensors are not moved.
        dtype: The dtype of all floats, a floating one: ids, actions and flags that are whole numbers or bools
            keep theirs. Or a dict of column, or part (``obs/position``) -> dtype of any kind; ``obs`` stands
            for ``new_obs`` too, unless that is named. None: as they are.
        pin_memory: With a device, copy through pinned memory, which is reused after the copy. Without one,
            return tensors in pinned memory.
        non_blocking: Start copies to the device without waiting for them; useful only with ``pin_memory``.
            The arrays may then be changed at once, because they have been copied into pinned memory.
        stream: CUDA stream for copies to the device.

    Returns:
        The same structure. A CPU tensor shares the memory of its array if torch allows it. Read-only arrays,
        and arrays with negative strides or a foreign byte order, are copied once; pinned tensors are always
        copies. Tensors copied as one block share its memory without overlap.

    Raises:
        OptionError: ``pin_memory`` without an accelerator that torch can pin memory for; or ``dtype`` is no
            dtype, or one for all columns and not floating, or names a column without numbers.
        MissingColumn: ``dtype`` names a column that is absent.
    """
    import torch

    if dtype is not None:
        columns = _cast(columns, dtype)
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


# ---- dtypes ----


def _cast(columns: Mapping[str, Column], dtype: Dtypes) -> dict[str, Column]:
    """The columns in other dtypes, before they are copied anywhere: float32 halves the copy of float64."""
    if not isinstance(dtype, Mapping):
        wanted = _checked_dtype(dtype)
        if not wanted.is_floating_point:
            raise OptionError(
                f"dtype={excerpt(dtype)}: expected a floating dtype, which all floats get; for other columns "
                "pass a dict, such as {'actions': 'int32'}"
            )
        return {
            name: map_structure(lambda leaf: _as(leaf, wanted) if _is_float(leaf) else leaf, column)
            for name, column in columns.items()
        }
    left, wanted_of = set(dtype), {name: _checked_dtype(one) for name, one in dtype.items()}

    def leaf_as(name: str, path: Path, leaf: Any) -> Any:
        full = "/".join([name, *map(str, path)])
        names = [full, name]
        if name == Columns.NEXT_OBS:
            names += [one.replace(Columns.NEXT_OBS, Columns.OBS, 1) for one in names]
        key = next((one for one in names if one in wanted_of), None)
        if key is None:
            return leaf
        left.discard(key)
        if not _is_numeric(leaf) and not hasattr(leaf, "is_floating_point"):
            raise OptionError(
                f"dtype: torch has no dtype for {leaf.dtype}: leave the column out", column=full
            )
        return _as(leaf, wanted_of[key])

    made: dict[str, Column] = {}
    for name, column in columns.items():
        found = leaves(column)
        cast = [leaf_as(name, path, leaf) for path, leaf in found]
        made[name] = (
            cast[0] if not isinstance(column, dict | tuple) else unflatten([p for p, _ in found], cast)
        )
    if left:
        name, known = min(left), ", ".join(columns)
        raise MissingColumn(
            f"dtype names a column that is absent; the batch has {known}{did_you_mean(name, columns)}",
            column=name,
        )
    return made


def _checked_dtype(dtype: object) -> torch.dtype:
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise OptionError(f"dtype={excerpt(dtype)}: expected a dtype of torch, such as torch.float32")
    return found


def _is_float(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind == "f" and _is_numeric(leaf)
    return hasattr(leaf, "is_floating_point") and bool(leaf.is_floating_point())


def _as(leaf: Any, dtype: torch.dtype) -> Any:
    """The numbers in a dtype of torch: an array where NumPy has the dtype, else a tensor."""
    import torch

    if not isinstance(leaf, np.ndarray):
        return leaf.to(dtype)
    own = _numpy_dtype(dtype)
    if own is None:
        return torch.from_numpy(_plain(leaf)).to(dtype)
    with np.errstate(all="ignore"):  # As torch casts: a float16 may become an infinity.
        return leaf.astype(own, copy=False)


@cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """NumPy's dtype of the same numbers; None: it has none, as for bfloat16."""
    import torch

    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and (leaf.dtype.kind, leaf.dtype.itemsize) in _TORCH_DTYPES


def _plain(array: Array) -> Array:
    """``array``, or a copy of it in a layout that torch accepts."""
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    # torch has no read-only tensors: writing into one would change rows that others share.
    if not array.flags.writeable or any(s < 0 or s % array.itemsize for s in array.strides):
        return array.copy()
    return array


# ---- through pinned memory ----


def _through_pinned(
    arrays: Sequence[Array], target: torch.device | None, non_blocking: bool
) -> list[torch.Tensor]:
    """Copy arrays of any layout into one block of pinned memory, and on to ``target``, if any."""
    sizes = [-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays]
    offsets = [0, *accumulate(sizes)]
    flat = _pinned_memory(offsets.pop())
    _fill(flat, arrays, offsets)
    if target is None or target.type == "cpu":
        return _cut(flat, arrays, offsets)
    # torch reuses the pinned memory after the copy from it.
    return _cut(_copy(flat, target, non_blocking), arrays, offsets)


def _pinned_memory(size: int) -> torch.Tensor:
    """Pinned memory of ``size`` bytes, which torch keeps after use: locking costs more than the copy.

    Raises:
        OptionError: torch cannot pin memory here.
    """
    import torch

    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise OptionError(
            f"pin_memory=True: torch could not pin {size:,} bytes ({error}); pinned memory is for copies to "
            "an accelerator: drop pin_memory on machines without one"
        ) from error


def _fill(flat: torch.Tensor, arrays: Sequence[Array], offsets: Sequence[int]) -> None:
    """Copy arrays to their places, in native byte order and C order."""
    memory: Array = flat.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        place = memory[offset : offset + array.nbytes].view(array.dtype.newbyteorder("="))
        np.copyto(place.reshape(array.shape), array)


def _cut(flat: torch.Tensor, arrays: Sequence[Array], offsets: Sequence[int]) -> list[torch.Tensor]:
    """Tensors over ``flat`` with the dtypes, shapes and places of ``arrays``."""
    # One view a dtype and one call a tensor: slicing, viewing and reshaping each tensor would cost twice as
    # much.
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
    """Strides in elements of each dimension, in C order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _copy(flat: torch.Tensor, target: torch.device, non_blocking: bool) -> torch.Tensor:
    return flat.to(target, non_blocking=non_blocking)


# ---- without pinned memory ----


def _to_device(arrays: Sequence[Array], target: torch.device, non_blocking: bool) -> list[torch.Tensor]:
    """Copy arrays to a device: all at once if they are adjacent, else one by one."""
    import torch

    found = _one_piece(arrays)
    if found is None:
        return [_copy(torch.from_numpy(_plain(array)), target, non_blocking) for array in arrays]
    piece, offsets = found
    return _cut(_copy(torch.from_numpy(piece), target, non_blocking), arrays, offsets)


def _one_piece(arrays: Sequence[Array]) -> tuple[Array, list[int]] | None:
    """The bytes from the first array to the last, and where each begins; None if too much lies between them.

    Overlapping arrays give None as well, because their tensors would share memory that users may write to.
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
    """The array that owns the memory of ``array``."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _address(array: Array) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]  # NumPy types it as Any.
