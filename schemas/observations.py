"""Stores each observation once: links from ``new_obs`` to a later row's ``obs``, and newest frames only.

In one row group, ``_next[i] = k > 0`` means that ``new_obs`` of row i is ``obs`` of row i + k; 0 means that
it is stored in the row; -1 means that it is missing. Frame stacks (consecutive rows that share all but one
frame) store the newest frame of every row. They store the older frames only if the row does not overlap with
the row before it in the same stream. Both are used only if the bytes are equal, so NaN and -0.0 survive.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import object_column
from rlio.batch.copies import own_copy
from rlio.batch.encoded_picture import is_encoded
from rlio.batch.frames import empty_array
from rlio.batch.ragged import Ragged
from rlio.errors import CorruptData
from rlio.schemas.column import FrameStack, object_rows
from rlio.schemas.structure import packed

__all__ = [
    "MISSING",
    "STORED",
    "SplitStack",
    "as_unsigned",
    "as_words",
    "detect_stack",
    "equal_rows",
    "link",
    "own_rows",
    "previous_rows",
    "resolve_links",
    "stack_places",
    "successors",
]

STORED = 0
MISSING = -1
_STACK_ROWS = 64
# Words of a row from which `all(axis=1)` is the quickest.
_WIDE = 256

Rows = NDArray[np.int64]
Places = NDArray[np.int32]


def successors(stream: NDArray[np.int32]) -> Rows:
    """Return the next row of the same stream for every row of a group, or -1; shape (rows,)."""
    rows = len(stream)
    following = np.full(rows, -1, np.int64)
    if rows < 2:
        return following
    order = np.argsort(stream, kind="stable")
    same = stream[order[1:]] == stream[order[:-1]]
    following[order[:-1]] = np.where(same, order[1:], -1)
    return following


def previous_rows(following: Rows) -> Rows:
    """Return the row before each row in its stream, or -1, from `successors`."""
    previous = np.full(len(following), -1, np.int64)
    linked = np.flatnonzero(following >= 0)
    previous[following[linked]] = linked
    return previous


def link(
    pairs: list[tuple[NDArray[Any], NDArray[Any]]],
    following: Rows,
    missing: NDArray[np.bool_] | None,
    *,
    equal: NDArray[np.bool_] | None = None,
) -> NDArray[np.int32]:
    """Return the ``_next`` column of a group.

    Args:
        pairs: (obs, new_obs) of every leaf, each of shape (rows, *shape).
        following: From `successors`.
        missing: Rows without a final observation, or None.
        equal: Rows that other leaves allow to be linked; None: all rows that have a next one.
    """
    rows = len(following)
    equal = following >= 0 if equal is None else equal.copy()
    contiguous = bool((following[equal] == np.flatnonzero(equal) + 1).all())
    for obs, new_obs in pairs:
        here, there = as_unsigned(new_obs), as_unsigned(obs)
        if contiguous:
            equal[:-1] &= equal_rows(here[:-1], there[1:])
        else:
            candidates = np.flatnonzero(equal)
            equal[candidates] = equal_rows(here[candidates], there[following[candidates]])
    distance = np.where(equal, following - np.arange(rows), STORED).astype(np.int32)
    if missing is not None:
        distance[missing] = MISSING
    return distance


def resolve_links(
    distance: NDArray[np.int32], obs: NDArray[Any], stored: NDArray[Any], *, blank: Any = 0
) -> NDArray[Any]:
    """Rebuild ``new_obs`` of a group.

    Args:
        distance: The ``_next`` column.
        obs: Shape (rows, *shape).
        stored: The stored rows in order, shape (number of zeros in ``distance``, *shape).
        blank: The value where it is missing.

    Raises:
        CorruptData: A link leaves the group, or the stored rows do not fit.
    """
    rows = len(distance)
    target = np.arange(rows) + np.maximum(distance, 0)
    own = np.flatnonzero(distance == STORED)
    if rows and (int(target.max()) >= rows or int(distance.min()) < MISSING):
        raise CorruptData("a link in _next leaves its row group")
    if len(own) != len(stored):
        raise CorruptData(f"{len(stored)} observations are stored, but _next says {len(own)}")
    known = Ragged.known(obs), Ragged.known(stored)
    if known[0] is not None and known[1] is not None:  # Items of their own, copied together.
        source = np.where(distance == MISSING, rows + len(stored), target)
        source[own] = rows + np.arange(len(own))
        return Ragged.taken([known[0], known[1]], source).rows()
    # Memory of Arrow is no place for objects (encoded pictures).
    out = np.empty(obs.shape, object) if obs.dtype == object else empty_array(obs.shape, obs.dtype)
    new_obs = np.take(obs, target, axis=0, out=out, mode="clip")
    new_obs[own] = stored
    missing = distance == MISSING
    if missing.any():
        new_obs[missing] = (
            object_rows([own_copy(blank) for _ in range(int(missing.sum()))])
            if obs.dtype == object
            else blank
        )
    return own_rows(new_obs, distance > 0)


def own_rows(column: NDArray[Any], shared: NDArray[np.bool_]) -> NDArray[Any]:
    """Rows of which the shared ones are no longer the objects of others, which a user may change in place.

    Args:
        column: Rows of any kind, overwritten. Numbers and encoded pictures are returned as they are.
        shared: Whether a row is that of another column or batch, shape (rows,).
    """
    if column.dtype != object or not len(column) or is_encoded(column):
        return column
    first = column[0]
    if isinstance(first, np.ndarray) and first.ndim and first.dtype != object:  # All rows at once.
        joined = Ragged.joined(column, first.dtype, first.shape[1:])
        if joined is not None:
            return joined.rows()
    column[shared] = object_rows([own_copy(row) for row in column[shared]])
    return column


def detect_stack(obs: NDArray[Any], new_obs: NDArray[Any]) -> FrameStack | None:
    """Return the stack if ``obs`` and ``new_obs`` mostly share all frames but one; else None.

    Compares each row with itself, because the row before may be of another environment. A few rows are
    enough.
    """
    if obs.ndim < 4 or len(obs) < 8:
        return None
    obs, new_obs = obs[:_STACK_ROWS], new_obs[:_STACK_ROWS]
    for axis in (obs.ndim - 2, 0):
        stack = FrameStack(axis, obs.shape[axis + 1])
        if 2 <= stack.depth <= 16 and _overlaps(obs, new_obs, axis).mean() >= 0.5:
            return stack
    return None


@dataclass(frozen=True)
class SplitStack:
    """The stored form of frame stacks: newest frames of all rows, older frames of the rows in ``full``."""

    newest: NDArray[Any]
    older: NDArray[Any]
    full: NDArray[np.bool_]


def stack_places(full: NDArray[np.bool_], following: Rows, depth: int) -> Places:
    """Find the frames of a group's stacks along the streams.

    Args:
        full: Rows that store all of their frames, shape (rows,).
        following: From `successors`.
        depth: Frames of a stack.

    Returns:
        Shape (rows, depth), oldest first: index i is the newest frame of row i; indices from ``rows`` on are
        the older frames of the rows in ``full``.

    Raises:
        CorruptData: A row overlaps with a row before it, but there is none.
    """
    rows = len(following)
    previous = previous_rows(following)
    if ((previous < 0) & ~full).any():
        raise CorruptData("a frame stack refers to a row before its row group")
    # Follow the chain depth times. Each step moves all rows to the row before, until a row that stores its
    # own older frames.
    places = np.empty((rows, depth), np.int32)
    older_start = np.full(rows, -1, np.int64)
    older_start[full] = rows + np.arange(int(full.sum())) * (depth - 1)
    row = np.arange(rows)
    taken = np.zeros(rows, np.int64)  # Older frames already taken from a row that stores them.
    for position in range(depth - 1, -1, -1):
        at_end = taken > 0
        places[:, position] = np.where(at_end, older_start[row] + (depth - 1) - taken, row)
        moves = ~at_end & ~full[row]
        taken = np.where(moves, 0, taken + 1)
        row = np.where(moves, previous[row], row)
    return places


def _overlaps(before: NDArray[Any], after: NDArray[Any], axis: int) -> NDArray[np.bool_]:
    """Whether ``after`` without its newest frame equals ``before`` without its oldest, shape (rows,)."""
    older, newer = as_words(before, axis), as_words(after, axis)
    if older is None or newer is None:
        same = np.moveaxis(before, axis + 1, 1)[:, 1:] == np.moveaxis(after, axis + 1, 1)[:, :-1]
    else:
        bits = 8 * before.itemsize
        same = older >> bits == newer & ((1 << (bits * (before.shape[axis + 1] - 1))) - 1)
    found: NDArray[np.bool_] = same.reshape(len(before), -1).all(axis=1)
    return found


def as_words(values: NDArray[Any], axis: int) -> NDArray[Any] | None:
    """Return the values of one place in all frames as one integer, oldest lowest; None if impossible.

    Interleaved frames are then compared, and picked, one word at a time: twenty times as fast.
    """
    size = values.shape[-1] * values.itemsize
    if axis != values.ndim - 2 or size not in (2, 4, 8) or sys.byteorder != "little":
        return None
    if not values.flags.c_contiguous or values.dtype.byteorder == ">":
        return None
    return values.view(f"u{size}")[..., 0]


def equal_rows(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether the rows of two arrays of unsigned integers are equal, shape (rows,)."""
    equal: NDArray[np.bool_] = a[:, 0] == b[:, 0]
    if a.shape[1] >= _WIDE or 2 * np.count_nonzero(equal) < len(equal):
        whole: NDArray[np.bool_] = (a == b).all(axis=1)
        return whole
    # Most rows are equal: finding the few different values takes a quarter of `all(axis=1)`, which is slow on
    # rows this short.
    unlike = np.flatnonzero((a != b).reshape(-1))
    equal[unlike // a.shape[1]] = False
    return equal


def as_unsigned(values: NDArray[Any]) -> NDArray[Any]:
    """Return rows as the widest unsigned integers that fit, shape (rows, k): equal iff the bytes are."""
    rows = len(values)
    if rows == 0:
        return np.empty((0, 1), np.uint8)
    if values.dtype == object:  # Encoded pictures and lists, which are equal if their bytes are.
        if not is_encoded(values):
            values = object_column(map(packed, values.tolist()))
        return values.reshape(rows, 1)
    flat = np.ascontiguousarray(values).reshape(rows, -1)
    width = flat.shape[1] * flat.itemsize
    size = next(size for size in (8, 4, 2, 1) if width % size == 0)
    return flat.view(np.dtype(f"u{size}"))
