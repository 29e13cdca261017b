"""Frame stacks while they are written and read: each frame once, and per row the indices of its frames.

Consecutive stacks share all frames but one, so rows take an eighth of the memory of ``obs`` and ``new_obs``.
The caller's arrays are read once; single frames are logged, collected and encoded. Frames are shared only if
their bytes are equal, so the stored form depends on bytes alone.

Example:
    >>> frames = np.arange(5 * 6, dtype=np.uint8).reshape(5, 2, 3)
    >>> stacks = np.stack([frames[i : i + 2] for i in range(4)])
    >>> pool = pool_stacks(stacks[:-1], stacks[1:], FrameStack(0, 2), np.array([1, 2, -1]))
    >>> len(pool.frames), pool.obs.tolist(), pool.new_obs.tolist()
    (5, [[3, 4], [4, 0], [0, 1]], [[4, 0], [0, 1], [1, 2]])
    >>> np.array_equal(pool.frames.at(pool.obs), stacks[:-1])
    True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch.frames import empty_array
from rlio.errors import CorruptData
from rlio.schemas.column import FrameStack
from rlio.schemas.observations import (
    SplitStack,
    as_unsigned,
    as_words,
    equal_rows,
    previous_rows,
    stack_places,
)

__all__ = ["Frames", "StackPool", "Stacks", "grown", "pool_stacks"]

Rows: TypeAlias = "NDArray[np.int64]"
Places: TypeAlias = "NDArray[np.int32]"

# Rows are compared one block at a time, so that a block stays in the cache after its first read.
_BLOCK_BYTES: Final = 1 << 20


class Frames:
    """The frames of which stacks are made.

    Args:
        values: The frames, shape (k, *frame), in C order.
        stack: Axis and depth of the stacks.
    """

    def __init__(self, values: NDArray[Any], stack: FrameStack) -> None:
        self.values: NDArray[Any] = values
        self.stack: FrameStack = stack
        #: Shape of one frame.
        self.shape: tuple[Any, ...] = values.shape[1:]
        self.dtype: np.dtype[Any] = values.dtype
        # Each frame as one value, so that copying it is one copy of memory.
        self._frame = np.dtype((np.void, math.prod(self.shape) * self.dtype.itemsize))

    @classmethod
    def joined(cls, parts: Sequence[NDArray[Any]], stack: FrameStack) -> Frames:
        """Return frames that are numbered consecutively through several arrays of one dtype."""
        shape = sum(map(len, parts)), *parts[0].shape[1:]
        return cls(np.concatenate(parts, out=empty_array(shape, parts[0].dtype)), stack)

    def __len__(self) -> int:
        return len(self.values)

    def look_up(self, places: Places, out: NDArray[Any]) -> None:
        """Copy stacks.

        Args:
            places: Indices of frames, oldest first, shape (rows, depth); or of any frames, in any shape.
            out: Receives the frames of each row one after the other: shape (rows, depth, *frame), C order.
        """
        np.take(self._whole(self.values), places.reshape(-1), out=self._whole(out), mode="clip")

    def _whole(self, frames: NDArray[Any]) -> NDArray[Any]:
        return frames.reshape(-1).view(self._frame)

    def with_blank(self) -> Frames:
        """Return these frames with one more, of zeros, after them."""
        return Frames.joined([self.values, np.zeros((1, *self.shape), self.dtype)], self.stack)

    def is_like(self, other: Frames) -> bool:
        """Whether stacks of both fit into one array."""
        return (self.stack, self.shape, self.dtype) == (other.stack, other.shape, other.dtype)

    def at(self, places: Places) -> NDArray[Any]:
        """Return the frames with the given indices: a copy, shape (*places.shape, *frame)."""
        taken = empty_array((*places.shape, *self.shape), self.dtype)
        self.look_up(places, taken)
        return taken

    def equal(self, a: Places, b: Places) -> NDArray[np.bool_]:
        """Compare the frames of two lists of indices byte for byte.

        Args:
            a: Shape (k, frames of a stack, or of a part of one).
            b: The same shape.

        Returns:
            Shape (k,): whether all frames of a row are equal.
        """
        same = a == b
        unlike = np.nonzero(~same)
        step = max(1, _BLOCK_BYTES // max(self._frame.itemsize, 1))
        for start in range(0, len(unlike[0]), step):
            here = unlike[0][start : start + step], unlike[1][start : start + step]
            same[here] = (as_unsigned(self.at(a[here])) == as_unsigned(self.at(b[here]))).all(axis=1)
        whole: NDArray[np.bool_] = same.all(axis=1)
        return whole


@dataclass(frozen=True)
class Stacks:
    """The stacks of some rows, which are not looked up.

    Attributes:
        frames: Has all frames of these stacks.
        places: Indices of each row's frames, oldest first, shape (rows, depth).
    """

    frames: Frames
    places: Places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, rows: slice) -> Stacks:
        return Stacks(self.frames, self.places[rows])


@dataclass(frozen=True)
class StackPool:
    """The stacks of some rows.

    Attributes:
        frames: The frames of all these stacks.
        obs, new_obs: Indices of each row's frames in `frames`, oldest first, shape (rows, depth).
    """

    frames: Frames
    obs: Places
    new_obs: Places

    def split_obs(self, previous: Rows) -> SplitStack:
        """Return the stored form of all rows' obs, which may overlap with the row before.

        Args:
            previous: From `rlio.schemas.observations.previous_rows`.
        """
        has = np.flatnonzero(previous >= 0)
        full = np.ones(len(self.obs), bool)
        full[has] = ~self.frames.equal(self.obs[has, :-1], self.obs[previous[has], 1:])
        return self._split(self.obs, full)

    def split_new_obs(self, rows: Rows) -> SplitStack:
        """Return the stored form of the new_obs of ``rows``, which may overlap with their own obs."""
        own = self.new_obs[rows]
        return self._split(own, ~self.frames.equal(own[:, :-1], self.obs[rows, 1:]))

    def _split(self, places: Places, full: NDArray[np.bool_]) -> SplitStack:
        return SplitStack(self.frames.at(places[:, -1]), self.frames.at(places[full, :-1]), full)

    @classmethod
    def of_split(
        cls,
        obs: SplitStack,
        new_obs: SplitStack | None,
        *,
        stack: FrameStack,
        following: Rows,
        stored: Rows,
    ) -> StackPool:
        """Return the stacks of a row group from their stored form.

        Args:
            obs: Stacks of every row.
            new_obs: Stacks of the rows in ``stored``, each of which may overlap with its own obs; None: not
                wanted.
            stack: Axis and depth.
            following: From `rlio.schemas.observations.successors`.
            stored: Rows that store their new_obs, ascending.

        Returns:
            `new_obs` has one row per row in ``stored``, or none.

        Raises:
            CorruptData: A row overlaps with a missing row, or the parts do not fit each other.
        """
        depth = stack.depth
        _check_split(obs, len(following))
        places = stack_places(obs.full, following, depth)
        parts = [obs.newest, _single(obs)]
        if new_obs is None:
            return cls(Frames.joined(parts, stack), places, places[:0])
        _check_split(new_obs, len(stored))
        count = len(parts[0]) + len(parts[1])
        own = np.empty((len(stored), depth), np.int32)
        own[:, :-1] = places[stored, 1:]
        own[:, -1] = count + np.arange(len(stored))
        older = count + len(stored) + np.arange(len(new_obs.older) * (depth - 1))
        own[new_obs.full, :-1] = older.reshape(-1, depth - 1)
        return cls(Frames.joined([*parts, new_obs.newest, _single(new_obs)], stack), places, own)


def _check_split(split: SplitStack, rows: int) -> None:
    found = len(split.newest), len(split.full), len(split.older)
    if found != (rows, rows, int(split.full.sum())):
        raise CorruptData(f"frame stacks of {found[0]} rows, {found[2]} of them whole, expected {rows}")


def _single(split: SplitStack) -> NDArray[Any]:
    """Return the older frames, one by one."""
    return split.older.reshape(-1, *split.newest.shape[1:])


def grown(old: NDArray[Any], rows: int) -> NDArray[Any]:
    """Return an array of ``rows`` rows that begins with the rows of ``old``."""
    fresh = empty_array((rows, *old.shape[1:]), old.dtype)
    fresh[: len(old)] = old
    return fresh


def pool_stacks(obs: NDArray[Any], new_obs: NDArray[Any], stack: FrameStack, following: Rows) -> StackPool:
    """Return the frames of rows as copies, each once if rows follow each other.

    Args:
        obs: Shape (rows, *shape).
        new_obs: The same shape and dtype.
        stack: Axis and depth.
        following: The next row of the same stream for every row, or -1.
    """
    rows, depth = len(obs), stack.depth
    lying = [np.moveaxis(values, stack.axis + 1, 1) for values in (obs, new_obs)]
    # The newest frames of new_obs come first, then the other frames: few, or all of them.
    frames = empty_array((rows + rows // 4 + 4 * depth, *lying[0].shape[2:]), obs.dtype)
    own, linked = _compare(obs, new_obs, stack, following, frames[:rows])
    previous = previous_rows(following)
    follows = (previous >= 0) & linked[previous]
    leans = _leaning(lying[0], previous, follows)
    # Number of frames that a row adds: for its obs, and for its new_obs without the newest.
    fresh = np.stack([np.where(follows, 0, np.where(leans, 1, depth)), np.where(own, 0, depth - 1)], axis=1)
    ends = rows + np.cumsum(fresh).reshape(rows, 2)
    first = ends - fresh
    count = int(ends[-1, 1]) if rows else 0
    if count > len(frames):
        frames = grown(frames, count)
    for row in np.flatnonzero(fresh[:, 0]).tolist():
        frames[first[row, 0] : ends[row, 0]] = lying[0][row, depth - fresh[row, 0] :]
    for row in np.flatnonzero(fresh[:, 1]).tolist():
        frames[first[row, 1] : ends[row, 1]] = lying[1][row, :-1]
    # Column by column: each frame of a stack is the next frame of the stack before.
    mine, theirs = np.empty((rows, depth), np.int32), np.empty((rows, depth), np.int32)
    theirs[:, -1] = np.arange(rows)
    for k in reversed(range(depth)):
        leant = mine[previous, k + 1] if k < depth - 1 else first[:, 0]
        mine[:, k] = np.where(follows, theirs[previous, k], np.where(leans, leant, first[:, 0] + k))
        if k:
            theirs[:, k - 1] = np.where(own, mine[:, k], first[:, 1] + k - 1)
    return StackPool(Frames(frames[:count], stack), mine, theirs)


def _leaning(lying: NDArray[Any], previous: Rows, follows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of rows whose obs overlaps with the previous obs but is not its new_obs."""
    leans = np.zeros(len(lying), bool)
    rows = np.flatnonzero((previous >= 0) & ~follows)
    if len(rows):
        older, newer = lying[previous[rows]][:, 1:], lying[rows][:, :-1]
        leans[rows] = (as_unsigned(older) == as_unsigned(newer)).all(axis=1)
    return leans


def _compare(
    obs: NDArray[Any], new_obs: NDArray[Any], stack: FrameStack, following: Rows, newest: NDArray[Any]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return masks of rows whose new_obs overlaps with their obs, and whose new_obs is the next obs.

    Writes the newest frames of new_obs into ``newest``.
    """
    rows = len(obs)
    own, linked = np.zeros(rows, bool), following >= 0
    a, b = as_words(obs, stack.axis), as_words(new_obs, stack.axis)
    if a is None or b is None:
        split = _split_lying
        a, b = (np.ascontiguousarray(np.moveaxis(v, stack.axis + 1, 1)) for v in (obs, new_obs))
        frames = (as_unsigned(v.reshape(-1, *v.shape[2:])) for v in (a, b))
        a, b = (v.reshape(rows, stack.depth, v.shape[1]) for v in frames)
        newest = as_unsigned(newest)
    else:
        split = _split_woven
        a, b = (words.reshape(rows, math.prod(words.shape[1:])) for words in (a, b))
    whole = as_unsigned(a), as_unsigned(b)
    block = max(1, _BLOCK_BYTES // max(a[:1].nbytes, 1))
    # One thread: a second one reads memory no faster, and takes a processor from the encoder.
    for first in range(0, rows, block):
        part = slice(first, min(first + block, rows))
        own[part] = split(a[part], b[part], stack.depth, newest[part])
        here = np.flatnonzero(linked[part]) + first
        linked[here] = _are_linked(*whole, here, following[here])
    return own, linked


def _are_linked(obs: NDArray[Any], new_obs: NDArray[Any], here: Rows, there: Rows) -> NDArray[np.bool_]:
    """Whether the new_obs of the rows ``here`` equal the obs of the rows ``there``, shape (k,)."""
    if len(here) and here[-1] - here[0] == len(here) - 1 and (there == here + 1).all():  # Views suffice.
        return equal_rows(new_obs[here[0] : here[-1] + 1], obs[there[0] : there[-1] + 1])
    return equal_rows(new_obs[here], obs[there])


def _split_woven(
    obs: NDArray[Any], new_obs: NDArray[Any], depth: int, newest: NDArray[Any]
) -> NDArray[np.bool_]:
    """Compare words that hold one place of all frames, the oldest lowest; see `_compare`."""
    bits = 8 * obs.itemsize // depth
    top = bits * (depth - 1)
    unlike = obs >> bits
    np.bitwise_xor(unlike, new_obs, out=unlike)
    # The highest place of the shifted obs was empty, so it holds the newest frame; differences are below it.
    own: NDArray[np.bool_] = np.bitwise_or.reduce(unlike, axis=1) & ((1 << top) - 1) == 0
    np.right_shift(unlike, top, out=unlike)
    places = newest.reshape(len(newest), -1).view(f"u{newest.itemsize}")
    np.copyto(places, unlike, casting="unsafe")
    return own


def _split_lying(
    obs: NDArray[Any], new_obs: NDArray[Any], depth: int, newest: NDArray[Any]
) -> NDArray[np.bool_]:
    """Compare stacks whose frames are stored one after the other; see `_compare`."""
    newest[:] = new_obs[:, -1]
    rows, size = len(obs), newest.shape[1]
    # All rows in one run of memory, a frame apart: the frame that goes with the row below is compared, too,
    # and left out. Row by row, it takes half as long again.
    same = np.empty(obs.size, bool)
    np.equal(obs.reshape(-1)[size:], new_obs.reshape(-1)[:-size], out=same[:-size])
    return np.asarray(same.reshape(rows, -1)[:, :-size].all(axis=1))
