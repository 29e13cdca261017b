"""Wide observations, each stored once: stacks and next observations are windows on a sequence of frames.

The observations of an episode are contiguous. ``new_obs`` of a row is therefore the window one frame after
its ``obs``, and a stack of d frames is the window of d frames that ends with its newest frame.

Example:
    >>> import numpy as np
    >>> from rlio.replay.memory import RamArrays
    >>> pool = FramePool(arrays=RamArrays(), name="obs", shape=(2,), dtype=np.dtype("u1"), stack=None,
    ...                  capacity=8)
    >>> obs = np.array([[0, 0], [1, 1]], "u1")
    >>> frames = pool.prepare(obs, obs + 1, np.array([1, -1]))
    >>> pool.reserve([frames])
    >>> at, after = pool.append(frames)
    >>> at.tolist(), after.tolist()                                # Three observations, not four.
    ([0, 1], [1, 2])
    >>> pool.gather(after, np.empty((2, 2), "u1")).tolist()
    [[1, 1], [2, 2]]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.errors import OptionError
from rlio.replay.buffers import Buffers
from rlio.replay.memory import Arrays
from rlio.schemas.column import FrameStack
from rlio.schemas.frame_pools import Frames as SharedFrames
from rlio.schemas.frame_pools import Stacks
from rlio.schemas.observations import as_unsigned

__all__ = ["FramePool", "Frames"]

Ids: TypeAlias = NDArray[np.int64]

# Observations are compared one block at a time, so that what differs stays in the cache.
_BLOCK_BYTES: Final = 1 << 20


class _Chain(NamedTuple):
    """Rows in which the ``new_obs`` of each row is the ``obs`` of the next.

    Attributes:
        rows: Their places in the batch, shape (n,).
        frames: The frames of the rows' ``obs`` and of the last row's ``new_obs``, each once.
        fresh: How many of them each observation adds to those before it, shape (n + 1,).
    """

    rows: Ids
    frames: NDArray[Any]
    fresh: Ids


@dataclass(frozen=True)
class Frames:
    """Observations that fit a pool, ready for `FramePool.append`.

    Attributes:
        rows: Number of rows.
        chains: The rows, in groups that share frames.
    """

    rows: int
    chains: list[_Chain]

    @property
    def sizes(self) -> list[int]:
        """Number of frames of each chain."""
        return [len(chain.frames) for chain in self.chains]


class FramePool:
    """The observations of one leaf.

    Frames have logical numbers, which only increase. Frame f lies in slot f mod capacity, so old frames make
    room for new ones. Windows do not wrap: slots at the end are skipped if a window would. A pool continues
    after the frames that the array already holds.

    Args:
        arrays: Makes the array of frames.
        name: Name of the array.
        shape: Shape of an observation.
        dtype: Dtype of its values.
        stack: How frames are stacked into an observation; None: an observation is one frame.
        capacity: Number of frames.
        sealed: Add no frames; the capacity is then the number of existing frames.
    """

    def __init__(
        self,
        *,
        arrays: Arrays,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        stack: FrameStack | None,
        capacity: int,
        sealed: bool = False,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.stack = stack
        self.depth: int = 1 if stack is None else stack.depth
        frame = shape if stack is None else tuple(n for axis, n in enumerate(shape) if axis != stack.axis)
        self.frame_shape = frame
        #: Dtype of a frame as one value: drawing it is then one copy of memory.
        self._frame = np.dtype((np.void, math.prod(frame) * dtype.itemsize))
        #: Logical number of the next frame.
        self.head: int = (arrays.size(name) or 0) // self._frame.itemsize
        self.capacity: int = max(self.head, 1) if sealed else capacity
        #: The frames by slot, one value each.
        self.frames: NDArray[Any] = arrays.array(name, (self.capacity,), self._frame)
        self._arrays = arrays
        self._name = name

    def prepare(self, obs: NDArray[Any], new_obs: NDArray[Any], after: Ids) -> Frames:
        """Cut the observations of rows into frames. The pool does not change.

        Args:
            obs: Shape (rows, *shape).
            new_obs: Shape (rows, *shape).
            after: For each row, the row whose ``obs`` may be its ``new_obs``, or -1; always a later row,
                named only once. Their bytes decide: the recorded observations must come back.

        Raises:
            OptionError: The frames of one episode exceed the pool.
        """
        return self._prepared(_Pair(self._frames_of(obs), self._frames_of(new_obs)), after)

    def prepare_stacks(self, obs: Stacks, new_obs: Stacks, after: Ids) -> Frames:
        """Prepare stacks of the pool's form without looking them up.

        The result is that of `prepare`, which copies and compares each frame ``2 * depth`` times.
        """
        return self._prepared(_SharedPair(obs, new_obs, self._frame), after)

    def _prepared(self, given: _Pair | _SharedPair, after: Ids) -> Frames:
        linked = np.flatnonzero(after >= 0)
        linked = linked[given.are_linked(linked, after[linked])]
        begins = np.ones(len(after), bool)
        begins[after[linked]] = False
        links = np.full(len(after), -1, np.int64)
        links[linked] = after[linked]
        chains = []
        for first in np.flatnonzero(begins).tolist():
            rows = _chain(links, first)
            last = rows[-1:]
            overlaps = given.overlap(rows)
            at_end = given.overlaps_own(last)
            # An observation adds one frame, or all of them.
            fresh = np.where([False, *overlaps, *at_end], 1, self.depth)
            newest = fresh[:, None] > np.arange(self.depth)[::-1]
            chains.append(_Chain(rows, given.frames(rows, newest), fresh))
        found = Frames(len(after), chains)
        most = max(found.sizes, default=0)
        if most > self.capacity:
            raise OptionError(f"{most} frames of one episode do not fit {self.capacity}: raise the capacity")
        return found

    def reserve(self, parts: Sequence[Frames]) -> None:
        """Reserve memory for the frames that the next calls of `append` add.

        Raises:
            CacheError: There is no memory.
        """
        head, slots = self.head, 0
        for size in (size for part in parts for size in part.sizes):
            head = self._begin(head, size) + size
            slots = max(slots, head % self.capacity or self.capacity)
        self._arrays.reserve(self._name, slots)

    def append(self, frames: Frames) -> tuple[Ids, Ids]:
        """Add observations whose memory is reserved; cannot fail.

        Returns:
            The windows of ``obs`` and of ``new_obs``, by the logical numbers of their first frames.
        """
        at = np.full(frames.rows, -1, np.int64)
        following = np.full(frames.rows, -1, np.int64)
        for chain in frames.chains:
            starts = self._place(chain)
            at[chain.rows], following[chain.rows] = starts[:-1], starts[1:]
        return at, following

    def gather(self, windows: Ids, out: NDArray[Any]) -> NDArray[Any]:
        """The observations of the given windows, shape (n, *shape).

        If the last axis of a stack counts frames, the frames of an observation still lie one after the other
        in memory; `rlio.batch.in_c_order` interleaves them.

        Args:
            windows: Windows, by the logical numbers of their first frames.
            out: A contiguous array of that shape, whose memory is used.
        """
        count = len(windows)
        slots = windows % self.capacity
        if self.depth == 1:
            np.take(self.frames, slots, out=self._as_frames(out, count), mode="clip")
            return out
        assert self.stack is not None
        wanted = (slots[:, None] + np.arange(self.depth)).reshape(-1)
        np.take(self.frames, wanted, out=self._as_frames(out, count * self.depth), mode="clip")
        if self.stack.axis == 0:
            return out
        return np.moveaxis(out.reshape(count, self.depth, *self.frame_shape), 1, -1)

    def gather_pairs(self, windows: Ids, buffers: Buffers) -> tuple[NDArray[Any], NDArray[Any]]:
        """The observations of windows, and those one frame later: read-only views of one block."""
        count, span = len(windows), self.depth + 1
        wanted = ((windows % self.capacity)[:, None] + np.arange(span)).reshape(-1)
        block = buffers.empty((count * span,), self._frame)
        np.take(self.frames, wanted, out=block, mode="clip")
        frames = block.view(self.dtype).reshape(count, span, *self.frame_shape)
        frames.flags.writeable = False
        if self.stack is None:
            return frames[:, 0], frames[:, 1]
        earlier, later = frames[:, :-1], frames[:, 1:]
        if self.stack.axis == 0:
            return earlier, later
        return np.moveaxis(earlier, 1, -1), np.moveaxis(later, 1, -1)

    def _as_frames(self, out: NDArray[Any], frames: int) -> NDArray[Any]:
        return out.reshape(-1).view(np.uint8).view(self._frame).reshape(frames)

    def _frames_of(self, values: NDArray[Any]) -> NDArray[Any]:
        """Shape (rows, depth), each element one frame."""
        axis = 0 if self.stack is None else self.stack.axis
        moved = np.moveaxis(values, axis + 1, 1) if self.stack is not None else values
        flat = np.ascontiguousarray(moved, self.dtype).reshape(-1).view(np.uint8)
        return flat.view(self._frame).reshape(len(values), self.depth)

    def _begin(self, head: int, size: int) -> int:
        """The logical number of the first of ``size`` frames added at ``head``, such that none wraps."""
        slot = head % self.capacity
        return head if slot + size <= self.capacity else head + self.capacity - slot

    def _place(self, chain: _Chain) -> Ids:
        """Write the new frames of each observation; returns where its window begins."""
        total = len(chain.frames)
        first = self._begin(self.head, total)
        ends = first + np.cumsum(chain.fresh)
        slot = first % self.capacity
        self.frames[slot : slot + total] = chain.frames
        self.head = first + total
        return ends - self.depth


class _Pair:
    """The observations of rows, and the next ones, whose frames are compared and copied.

    Args:
        obs, new_obs: Shape (rows, depth), each element one frame.
    """

    def __init__(self, obs: NDArray[Any], new_obs: NDArray[Any]) -> None:
        self._obs, self._new_obs = obs, new_obs
        self._words, self._new_words = _words(obs), _words(new_obs)

    def are_linked(self, here: Ids, there: Ids) -> NDArray[np.bool_]:
        """Whether the ``new_obs`` of rows equal the ``obs`` of as many others."""
        return _are_equal(self._new_words, here, self._words, there)

    def overlap(self, rows: Ids) -> NDArray[np.bool_]:
        """Whether the ``obs`` of each row but the first adds one frame to that of the row before."""
        return _are_equal(self._words[:, :-1], rows[1:], self._words[:, 1:], rows[:-1])

    def overlaps_own(self, rows: Ids) -> NDArray[np.bool_]:
        """Whether the ``new_obs`` of rows adds one frame to their own ``obs``."""
        return _are_equal(self._new_words[:, :-1], rows, self._words[:, 1:], rows)

    def frames(self, rows: Ids, wanted: NDArray[np.bool_]) -> NDArray[Any]:
        """Frames of the ``obs`` of rows and of the last row's ``new_obs``, as a copy.

        Args:
            rows: At least one row.
            wanted: Shape (len(rows) + 1, depth).
        """
        own = _rows_of(self._obs, rows)[wanted[:-1]]
        return np.concatenate([own, self._new_obs[rows[-1]][wanted[-1]]])


class _SharedPair:
    """A `_Pair` of stacks that are not looked up: frames with one index are equal.

    Args:
        obs, new_obs: The stacks.
        frame: Dtype of a frame as one value.
    """

    def __init__(self, obs: Stacks, new_obs: Stacks, frame: np.dtype[Any]) -> None:
        self._frame = frame
        shared, self._obs, self._new_obs = obs.frames, obs.places, new_obs.places
        if new_obs.frames is not shared:
            self._new_obs = new_obs.places + len(shared)
            shared = SharedFrames.joined([shared.values, new_obs.frames.values], shared.stack)
        self._shared = shared

    def are_linked(self, here: Ids, there: Ids) -> NDArray[np.bool_]:
        return self._shared.equal(self._new_obs[here], self._obs[there])

    def overlap(self, rows: Ids) -> NDArray[np.bool_]:
        return self._shared.equal(self._obs[rows[1:], :-1], self._obs[rows[:-1], 1:])

    def overlaps_own(self, rows: Ids) -> NDArray[np.bool_]:
        return self._shared.equal(self._new_obs[rows, :-1], self._obs[rows, 1:])

    def frames(self, rows: Ids, wanted: NDArray[np.bool_]) -> NDArray[Any]:
        places = np.concatenate([self._obs[rows], self._new_obs[rows[-1:]]])
        return self._shared.at(places[wanted]).reshape(-1).view(self._frame)


def _chain(after: Ids, first: int) -> Ids:
    """The rows from ``first`` on, in which each follows the one before."""
    rows = [first]
    while (row := int(after[rows[-1]])) >= 0:
        rows.append(row)
    return np.asarray(rows, np.int64)


def _words(stacks: NDArray[Any]) -> NDArray[Any]:
    """Frames as integers, shape (rows, depth, words): equal if their bytes are."""
    rows, depth = stacks.shape
    values = stacks.reshape(-1).view(np.uint8).reshape(rows * depth, stacks.itemsize)
    words = as_unsigned(values)
    return words.reshape(rows, depth, words.shape[1])


def _are_equal(a: NDArray[Any], here: Ids, b: NDArray[Any], there: Ids) -> NDArray[np.bool_]:
    """Whether some rows of ``a`` equal as many of ``b``."""
    found = np.empty(len(here), bool)
    step = max(_BLOCK_BYTES // max(a[:1].nbytes, 1), 1)
    for start in range(0, len(here), step):
        part = slice(start, start + step)
        same = _rows_of(a, here[part]) == _rows_of(b, there[part])
        found[part] = same.reshape(len(same), -1).all(axis=1)
    return found


def _rows_of(values: NDArray[Any], rows: Ids) -> NDArray[Any]:
    """The given rows; a view if they follow each other."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return values[rows[0] : rows[-1] + 1]
    return values[rows]
