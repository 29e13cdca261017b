"""Folded batches: frame stacks as the indices of their frames, so rows are moved as small integers.

A row group holds every frame once: 7 kB per row of Atari, where ``obs`` and ``new_obs`` take 56 kB. A
`Folded` batch holds the indices of the frames in place of stacks. `unfold` copies the frames, for the given
rows only.

Example:
    >>> from rlio.schemas.column import FrameStack
    >>> frames = Frames(np.arange(12, dtype=np.uint8).reshape(3, 2, 2), FrameStack(0, 2))
    >>> rows = Folded(SampleBatch(obs=[[0, 1], [1, 2]], t=[5, 6]), {("obs", ()): frames})
    >>> unfold([Folded(rows.batch[1:], rows.frames)])["obs"].tolist()
    [[[[4, 5], [6, 7]], [[8, 9], [10, 11]]]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Column, MultiAgentBatch, SampleBatch, concat_samples
from rlio.batch.columns import Columns
from rlio.batch.frames import empty_array
from rlio.batch.nested import Path, leaves, unflatten
from rlio.schemas.frame_pools import Frames, Stacks

__all__ = ["Folded", "join_folded", "unfold"]

Empty: TypeAlias = "Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]"


@dataclass(frozen=True)
class Folded:
    """A batch whose frame stacks are not looked up yet.

    Attributes:
        batch: Stacked leaves hold indices of frames, shape (rows, depth) int32.
        frames: (column, path of the leaf) -> its frames; empty if the batch has no stacks to look up.
    """

    batch: SampleBatch | MultiAgentBatch
    frames: Mapping[tuple[str, Path], Frames] = field(default_factory=dict)

    def parts(self, rows: int) -> Iterator[Folded]:
        """Yield the batch in parts of ``rows`` rows that can be unfolded alone; else the whole batch."""
        batch = self.batch
        if not self.frames or not isinstance(batch, SampleBatch) or Columns.SEQ_LENS in batch:
            yield self
            return
        for start in range(0, len(batch), rows):
            yield replace(self, batch=batch[start : start + rows])

    def stacks(self, column: str, path: Path) -> Stacks:
        """Return the stacks of a leaf in `frames`."""
        return Stacks(self.frames[column, path], _leaf(self.batch, column, path))

    def outline(self) -> SampleBatch | MultiAgentBatch:
        """Return the batch with zeros for stacks: of their dtype and shape, but without memory."""
        if not self.frames:
            return self.batch
        assert isinstance(self.batch, SampleBatch)
        found: dict[str, Column] = {name: self.batch._raw(name) for name in self.batch}
        for (column, path), frames in self.frames.items():
            shape = list(frames.shape)
            shape.insert(frames.stack.axis, frames.stack.depth)
            zeros = np.broadcast_to(np.zeros((), frames.dtype), (len(self.batch), *shape))
            found[column] = _with_leaf(found[column], path, zeros)
        return self.batch._like(found)


def unfold(parts: Sequence[Folded], empty: Empty = empty_array) -> SampleBatch | MultiAgentBatch:
    """Join batches and look up their stacks.

    For stacks along the last axis, the frames of a row follow each other in memory, not in C order.
    `rlio.batch.in_c_order` interleaves them.

    Args:
        parts: At least one.
        empty: Returns memory for stacks: (shape, dtype) -> array in C order.

    Raises:
        SchemaError: The batches cannot be joined.
    """
    first = parts[0]
    if not _are_alike(parts):
        return concat_samples([unfold([part], empty) for part in parts])
    joined = first.batch if len(parts) == 1 else concat_samples([part.batch for part in parts])
    if not first.frames:
        return joined
    assert isinstance(joined, SampleBatch)
    ends = [0, *accumulate(len(part.batch) for part in parts)]
    found: dict[str, Column] = {name: joined._raw(name) for name in joined}
    for (column, path), frames in first.frames.items():
        out = empty((ends[-1], frames.stack.depth, *frames.shape), frames.dtype)
        for part, (start, stop) in zip(parts, pairwise(ends), strict=True):
            part.frames[column, path].look_up(_leaf(part.batch, column, path), out[start:stop])
        stacks = np.moveaxis(out, 1, frames.stack.axis + 1)
        found[column] = _with_leaf(found[column], path, stacks)
    return joined._like(found)


def join_folded(parts: Sequence[Folded]) -> Folded:
    """Join batches into one, without looking up stacks if possible.

    Raises:
        SchemaError: The batches cannot be joined.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if not first.frames or not _are_alike(parts):
        return Folded(unfold(parts))
    batch = concat_samples([part.batch for part in parts])
    assert isinstance(batch, SampleBatch)
    columns: dict[str, Column] = {name: batch._raw(name) for name in batch}
    joined: dict[tuple[int, ...], Frames] = {}  # obs and new_obs share their frames, and still do joined.
    frames = {}
    for column, path in first.frames:
        own = [part.frames[column, path] for part in parts]
        key = tuple(map(id, own))
        if key not in joined:
            joined[key] = Frames.joined([one.values for one in own], own[0].stack)
        frames[column, path] = joined[key]
        starts = accumulate(map(len, own), initial=0)
        places = [_leaf(part.batch, column, path) + start for part, start in zip(parts, starts, strict=False)]
        columns[column] = _with_leaf(columns[column], path, np.concatenate(places))
    return Folded(batch._like(columns), frames)


def _are_alike(parts: Sequence[Folded]) -> bool:
    """Whether all parts have the same folded leaves, in the same form."""
    first = parts[0].frames
    return all(
        part.frames.keys() == first.keys() and all(first[key].is_like(part.frames[key]) for key in first)
        for part in parts[1:]
    )


def _leaf(batch: SampleBatch | MultiAgentBatch, column: str, path: Path) -> NDArray[Any]:
    found: NDArray[Any] = dict(leaves(batch[column]))[path]
    return found


def _with_leaf(column: Any, path: Path, leaf: NDArray[Any]) -> Any:
    """Return the column with one leaf replaced."""
    if not path:
        return leaf
    found = {**dict(leaves(column)), path: leaf}
    return unflatten(found, found.values())
