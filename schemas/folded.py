"""Frame stacks as the places of their frames: rows are linked, picked and cut as small integers.

A row group holds every frame once: 7 kB a row of Atari, where ``obs`` and ``new_obs`` take 56 kB. A `Folded`
batch has, in place of stacks, where their frames are; `unfold` looks them up, for the rows that are given.

Example:
    >>> frames = Frames([np.arange(12, dtype=np.uint8).reshape(3, 2, 2)], FrameStack(0, 2))
    >>> rows = Folded(SampleBatch(obs=[[0, 1], [1, 2]], t=[5, 6]), {("obs", ()): frames})
    >>> unfold([Folded(rows.batch[1:], rows.frames)])["obs"].tolist()
    [[[[4, 5], [6, 7]], [[8, 9], [10, 11]]]]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Column, MultiAgentBatch, SampleBatch, concat_samples
from rlio.columns import Columns
from rlio.errors import CorruptData
from rlio.nested import Path, leaves, unflatten
from rlio.schemas.arrow import empty_array
from rlio.schemas.column import FrameStack
from rlio.schemas.observations import SplitStack, stack_places

__all__ = ["Folded", "Frames", "fold", "join_folded", "unfold"]

Empty: TypeAlias = "Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]"


class Frames:
    """Frames that stacks are made of.

    Args:
        parts: Shape (k, *frame), in C order and of one dtype; their frames are numbered through. Most are in
            the first.
        stack: How they lie in a row.
    """

    def __init__(self, parts: Sequence[NDArray[Any]], stack: FrameStack) -> None:
        self.parts, self.stack = parts, stack
        #: Of a frame.
        self.shape, self.dtype = parts[0].shape[1:], parts[0].dtype
        # As one value each, so that drawing one is one copy of memory.
        self._frame = np.dtype((np.void, math.prod(self.shape) * self.dtype.itemsize))

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def look_up(self, places: NDArray[np.int32], out: NDArray[Any]) -> None:
        """Copy stacks.

        Args:
            places: Of their frames, the oldest first, shape (rows, depth).
            out: Gets them, the frames of a row one after the other: shape (rows, depth, *frame), in C order.
        """
        wanted, first = places.reshape(-1), self._whole(self.parts[0])
        found = self._whole(out)
        np.take(first, wanted, out=found, mode="clip")
        beyond = np.flatnonzero(wanted >= len(first))
        if len(beyond):
            found[beyond] = self._others[wanted[beyond] - len(first)]

    @cached_property
    def _others(self) -> NDArray[Any]:
        """The frames behind the first part."""
        return self._whole(_all_frames(self.parts[1:]))

    def _whole(self, frames: NDArray[Any]) -> NDArray[Any]:
        return frames.reshape(-1).view(self._frame)

    def with_blank(self) -> Frames:
        """These frames and one more, of zeros, behind them."""
        return Frames([*self.parts, np.zeros((1, *self.shape), self.dtype)], self.stack)

    def is_like(self, other: Frames) -> bool:
        """Whether stacks of both fit one array."""
        return (self.stack, self.shape, self.dtype) == (other.stack, other.shape, other.dtype)


def _all_frames(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts, dtype=parts[0].dtype)  # In their byte order.


@dataclass(frozen=True)
class Folded:
    """A batch whose frame stacks are not looked up yet.

    Attributes:
        batch: In stacked leaves, the places of the frames, shape (rows, depth) int32.
        frames: (column, path of the leaf) -> where they are; empty where the batch is as it should be.
    """

    batch: SampleBatch | MultiAgentBatch
    frames: Mapping[tuple[str, Path], Frames] = field(default_factory=dict)

    def parts(self, rows: int) -> Iterator[Folded]:
        """The batch in parts of so many rows, of which each can be looked up by itself; else in one."""
        batch = self.batch
        if not self.frames or not isinstance(batch, SampleBatch) or Columns.SEQ_LENS in batch:
            yield self
            return
        for start in range(0, len(batch), rows):
            yield replace(self, batch=batch[start : start + rows])


def fold(
    obs: SplitStack,
    new_obs: SplitStack | None,
    *,
    stack: FrameStack,
    following: NDArray[np.int64],
    stored: NDArray[np.int64],
) -> tuple[Frames, NDArray[np.int32], NDArray[np.int32] | None]:
    """The stacks of a row group from their stored form.

    Args:
        obs: Of every row.
        new_obs: Of the rows in ``stored``, each of which may overlap with its own obs; None: not wanted.
        stack: Axis and depth.
        following: From `rlio.schemas.observations.successors`.
        stored: Rows that store their new_obs, ascending.

    Returns:
        (frames, places of obs, places of new_obs), shapes (rows, depth) and (len(stored), depth).

    Raises:
        CorruptData: A row overlaps with a row that there is not, or the parts do not fit each other.
    """
    depth = stack.depth
    _check_split(obs, len(following))
    places = stack_places(obs.full, following, depth)
    parts = [obs.newest, _single(obs)]
    if new_obs is None:
        return Frames(parts, stack), places, None
    _check_split(new_obs, len(stored))
    count = len(parts[0]) + len(parts[1])
    own = np.empty((len(stored), depth), np.int32)
    own[:, :-1] = places[stored, 1:]
    own[:, -1] = count + np.arange(len(stored))
    older = count + len(stored) + np.arange(len(new_obs.older) * (depth - 1))
    own[new_obs.full, :-1] = older.reshape(-1, depth - 1)
    return Frames([*parts, new_obs.newest, _single(new_obs)], stack), places, own


def _check_split(split: SplitStack, rows: int) -> None:
    found = len(split.newest), len(split.full), len(split.older)
    if found != (rows, rows, int(split.full.sum())):
        raise CorruptData(
            f"frame stacks of {found[0]} rows, {found[2]} of them whole, where {rows} should be"
        )


def _single(split: SplitStack) -> NDArray[Any]:
    """The older frames, one by one."""
    return split.older.reshape(-1, *split.newest.shape[1:])


def unfold(parts: Sequence[Folded], empty: Empty = empty_array) -> SampleBatch | MultiAgentBatch:
    """The rows of some batches, one after the other, with their stacks.

    Of stacks along the last axis, the frames of a row lie one after the other in memory, not in C order:
    `rlio.in_c_order` weaves them into each other.

    Args:
        parts: At least one.
        empty: Gives memory for stacks: (shape, dtype) -> array in C order.

    Raises:
        SchemaError: They cannot be joined.
    """
    first = parts[0]
    if not _are_alike(parts):
        return concat_samples([unfold([part], empty) for part in parts])
    joined = first.batch if len(parts) == 1 else concat_samples([part.batch for part in parts])
    if not first.frames:
        return joined
    assert isinstance(joined, SampleBatch)
    ends = [0, *accumulate(len(part.batch) for part in parts)]
    found: dict[str, Column] = dict(joined)
    for (column, path), frames in first.frames.items():
        out = empty((ends[-1], frames.stack.depth, *frames.shape), frames.dtype)
        for part, (start, stop) in zip(parts, pairwise(ends), strict=True):
            part.frames[column, path].look_up(_leaf(part.batch, column, path), out[start:stop])
        stacks = np.moveaxis(out, 1, frames.stack.axis + 1)
        found[column] = _with_leaf(found[column], path, stacks)
    return joined._like(found)


def join_folded(parts: Sequence[Folded]) -> Folded:
    """The rows of some batches in one, whose stacks are not looked up if that can be.

    Raises:
        SchemaError: They cannot be joined.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if not first.frames or not _are_alike(parts):
        return Folded(unfold(parts))
    batch = concat_samples([part.batch for part in parts])
    assert isinstance(batch, SampleBatch)
    columns: dict[str, Column] = dict(batch)
    joined: dict[tuple[int, ...], Frames] = {}  # Those of obs are those of its new_obs, and stay so.
    frames = {}
    for column, path in first.frames:
        own = [part.frames[column, path] for part in parts]
        key = tuple(map(id, own))
        if key not in joined:
            frames_of_all = [part for one in own for part in one.parts]
            joined[key] = Frames([_all_frames(frames_of_all)], own[0].stack)
        frames[column, path] = joined[key]
        starts = accumulate(map(len, own), initial=0)
        places = [_leaf(part.batch, column, path) + start for part, start in zip(parts, starts, strict=False)]
        columns[column] = _with_leaf(columns[column], path, np.concatenate(places))
    return Folded(batch._like(columns), frames)


def _are_alike(parts: Sequence[Folded]) -> bool:
    """Whether the same leaves of all are folded, and in the same way."""
    first = parts[0].frames
    return all(
        part.frames.keys() == first.keys() and all(first[key].is_like(part.frames[key]) for key in first)
        for part in parts[1:]
    )


def _leaf(batch: SampleBatch | MultiAgentBatch, column: str, path: Path) -> NDArray[Any]:
    found: NDArray[Any] = dict(leaves(batch[column]))[path]
    return found


def _with_leaf(column: Any, path: Path, leaf: NDArray[Any]) -> Any:
    """The column with another leaf."""
    if not path:
        return leaf
    found = {**dict(leaves(column)), path: leaf}
    return unflatten(found, found.values())
