"""The rows of one policy in slots of fixed size: appended, linked to their successors, and gathered.

Rows have logical numbers, which only grow; row r lies in slot r mod capacity, so that a full table forgets
its oldest rows. Not here: where the memory comes from, and which rows are drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.columns import Columns
from rlio.errors import OptionError
from rlio.nested import Path
from rlio.replay.buffers import Buffers, batch_dtype
from rlio.replay.frames import Allocate, FramePool
from rlio.replay.layout import RowLayout
from rlio.schemas.schema import Leaf

__all__ = ["NEXT", "RowTable"]

Ids = NDArray[np.int64]

#: Hidden field of a packed row: how many rows below its successor lies, 0 for none.
NEXT: Final = "@next"
_OBS: Final = "@obs "
_NEW_OBS: Final = "@new_obs "


class RowTable:
    """Fixed-capacity storage of rows.

    Args:
        layout: Which columns lie where.
        capacity: Rows that are kept.
        allocate: Makes the arrays.
        frames: Frames that each pool of wide observations keeps: where they are used up, rows are forgotten
            before there are ``capacity`` of them. None: enough for ``capacity`` rows, whatever they share.
    """

    def __init__(
        self, layout: RowLayout, *, capacity: int, allocate: Allocate, frames: int | None = None
    ) -> None:
        if capacity < 1:
            raise OptionError(f"capacity={capacity}: rows to keep, at least 1")
        self.layout = layout
        self.capacity = capacity
        pairs = _pooled(layout)
        self._row = _with_hidden(layout, pairs)
        self._rows = allocate("rows", (capacity,), self._row)
        self._void = self._rows.view(np.dtype((np.void, self._row.itemsize)))
        self._pools = {
            obs.physical: FramePool(
                allocate=allocate,
                name=obs.physical,
                shape=obs.spec.shape,
                dtype=obs.spec.numpy,
                stack=obs.spec.stack,
                capacity=frames or 2 * capacity * (1 if obs.spec.stack is None else obs.spec.stack.depth),
            )
            for obs, _ in pairs
        }
        self._pairs = pairs
        pooled = {leaf.physical for pair in pairs for leaf in pair}
        self._wide = {
            leaf.physical: allocate(leaf.physical, (capacity, *leaf.spec.shape), leaf.spec.numpy)
            for leaf in layout.wide
            if leaf.physical not in pooled
        }
        self._texts: dict[str, list[Any]] = {leaf.physical: [None] * capacity for leaf in layout.texts}
        self._buffers = Buffers()
        #: Logical numbers of the oldest row that is kept, and of the next one.
        self.tail = self.head = 0
        #: For each append that is still in the pools: its first row, and the lowest frame of each pool.
        self._marks: deque[tuple[int, dict[str, int]]] = deque()

    def __len__(self) -> int:
        return self.head - self.tail

    def append(self, arrays: Mapping[str, NDArray[Any]], after: Ids) -> None:
        """Add rows; the oldest ones make room.

        Args:
            arrays: Physical column -> values, one a row; texts as objects.
            after: For each row, the row here that is its successor in its episode, or -1; later than it.

        Raises:
            OptionError: They are more than the table keeps.
        """
        rows = len(after)
        if rows > self.capacity:
            raise OptionError(f"{rows} rows at once into a table of {self.capacity}: add fewer")
        first = self.head
        slots = np.arange(first, first + rows) % self.capacity
        # Nobody may draw what is about to be overwritten.
        self.tail = max(self.tail, first + rows - self.capacity)
        self._append_packed(arrays, after, slots)
        for name, target in self._wide.items():
            target[slots] = arrays[name]
        for name, texts in self._texts.items():
            for slot, value in zip(slots.tolist(), arrays[name].tolist(), strict=True):
                texts[slot] = value
        self.head = first + rows
        self._forget_frames()

    def _append_packed(self, arrays: Mapping[str, NDArray[Any]], after: Ids, slots: Ids) -> None:
        block = np.zeros(len(slots), self._row)
        for leaf in self.layout.packed:
            block[leaf.physical] = arrays[leaf.physical]
        block[NEXT] = np.where(after >= 0, after - np.arange(len(after)), 0)
        lowest: dict[str, int] = {}
        for obs, new_obs in self._pairs:
            pool = self._pools[obs.physical]
            here, there = arrays[obs.physical], arrays[new_obs.physical]
            # The same bytes, not only the same episode: what was recorded comes back.
            same = np.array(
                [a >= 0 and there[i].tobytes() == here[a].tobytes() for i, a in enumerate(after)], bool
            )
            at, following = pool.append(here, there, np.where(same, after, -1))
            block[_OBS + obs.physical], block[_NEW_OBS + obs.physical] = at, following
            lowest[obs.physical] = int(at.min(initial=pool.head))
        if lowest:
            self._marks.append((self.head, lowest))
        self._rows[slots] = block

    def _forget_frames(self) -> None:
        """Drop the rows of appends whose frames have been overwritten."""
        while self._marks and any(
            frame < self._pools[name].head - self._pools[name].capacity
            for name, frame in self._marks[0][1].items()
        ):
            self._marks.popleft()
            self.tail = max(self.tail, self._marks[0][0] if self._marks else self.head)

    def link(self, row: int, successor: int) -> None:
        """Say that ``successor`` follows ``row``, which was added before it; both by logical number."""
        if row >= self.tail:
            self._rows[NEXT][row % self.capacity] = successor - row

    def gather(self, rows: Ids, leaves: Iterable[Leaf] | None = None) -> dict[str, NDArray[Any]]:
        """Copies of the given rows: physical column -> contiguous array, texts as objects.

        The arrays are the caller's; their memory is used again once nobody sees it.
        """
        wanted = list(self._leaves() if leaves is None else leaves)
        slots = rows % self.capacity
        block = self.block(slots)
        packed = [leaf for leaf in wanted if leaf.physical in (self._row.names or ())]
        pooled = self._windows()
        fixed = {
            leaf.physical: (leaf.spec.numpy, leaf.spec.shape)
            for leaf in wanted
            if leaf.spec.kind not in _TEXTS
        }
        out: dict[str, NDArray[Any]] = self._buffers.columns(batch_dtype(len(rows), fixed))
        for leaf in packed:
            np.copyto(out[leaf.physical], block[leaf.physical])
        for leaf in wanted:
            name = leaf.physical
            if name in pooled:
                pool, hidden = pooled[name]
                pool.gather(block[hidden], out[name])
            elif name in self._wide:
                np.take(self._wide[name], slots, axis=0, out=out[name], mode="clip")
            elif name in self._texts:
                values = self._texts[name]
                found = np.empty(len(rows), object)
                found[:] = [values[slot] for slot in slots.tolist()]
                out[name] = found
        return out

    def block(self, slots: Ids) -> NDArray[Any]:
        """The packed rows in the given slots: a structured array in memory that is used again."""
        memory = self._buffers.empty((len(slots),), self._void.dtype)
        np.take(self._void, slots, out=memory, mode="clip")
        return memory.view(self._row)

    def successors(self, rows: Ids) -> Ids:
        """The successor of each row in its episode, by logical number; -1 where none is kept."""
        distance = self._rows[NEXT][rows % self.capacity]
        return np.where(distance > 0, rows + distance, -1)

    def column(self, physical: str) -> NDArray[Any]:
        """A packed column in the order of the slots: a view, strided."""
        values: NDArray[Any] = self._rows[physical]
        return values

    def _windows(self) -> dict[str, tuple[FramePool, str]]:
        """Leaves that lie in pools: which, and the hidden field that says where."""
        found = {}
        for obs, new_obs in self._pairs:
            pool = self._pools[obs.physical]
            found[obs.physical] = (pool, _OBS + obs.physical)
            found[new_obs.physical] = (pool, _NEW_OBS + obs.physical)
        return found

    def _leaves(self) -> list[Leaf]:
        layout = self.layout
        return [*layout.packed, *layout.wide, *layout.texts]


_TEXTS = ("text", "json")


def _pooled(layout: RowLayout) -> list[tuple[Leaf, Leaf]]:
    """The pairs of wide ``obs`` and ``new_obs`` leaves of one kind, which share a pool."""
    observations = {leaf.path: leaf for leaf in layout.wide if leaf.column == Columns.OBS}
    following = {leaf.path: leaf for leaf in layout.wide if leaf.column == Columns.NEXT_OBS}
    both: list[Path] = [path for path in observations if path in following]
    pairs = [(observations[path], following[path]) for path in both]
    return [(a, b) for a, b in pairs if a.spec.dtype == b.spec.dtype and a.spec.shape == b.spec.shape]


def _with_hidden(layout: RowLayout, pairs: list[tuple[Leaf, Leaf]]) -> np.dtype[Any]:
    """The packed row with its hidden fields."""
    row = layout.row
    hidden = [(NEXT, np.dtype(np.int64))]
    for obs, _ in pairs:
        hidden += [(_OBS + obs.physical, np.dtype(np.int64)), (_NEW_OBS + obs.physical, np.dtype(np.int64))]
    fields: Mapping[str, Any] = row.fields or {}
    names = list(row.names or ())
    return np.dtype(
        {
            "names": [*names, *(name for name, _ in hidden)],
            "formats": [*(fields[name][0] for name in names), *(kind for _, kind in hidden)],
            "offsets": [
                *(fields[name][1] for name in names),
                *range(row.itemsize, row.itemsize + 8 * len(hidden), 8),
            ],
            "itemsize": row.itemsize + 8 * len(hidden),
        }
    )
