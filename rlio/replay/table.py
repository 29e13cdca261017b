"""The rows of one policy in slots of fixed size: appended, linked along their episodes, and gathered.

Rows have logical numbers, which only increase. In a ring, row r lies in slot r mod capacity, and a full table
forgets its oldest rows. In any other table, row r lies in slot r. This module decides neither where the
memory comes from nor which rows are drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.batch.nested import Path
from rlio.batch.ragged import Ragged
from rlio.errors import OptionError
from rlio.replay.beside import beside
from rlio.replay.buffers import Buffers, batch_dtype
from rlio.replay.frames import FramePool, Frames
from rlio.replay.layout import RowLayout
from rlio.replay.memory import Arrays, copied
from rlio.replay.texts import TextHeap, encoded
from rlio.schemas.column import TEXTS
from rlio.schemas.frame_pools import Frames as SharedFrames
from rlio.schemas.frame_pools import Stacks
from rlio.schemas.leaves import Leaf
from rlio.support.forks import cached_property
from rlio.support.states import whole_number

__all__ = ["ROW_VERSION", "Plan", "Prepared", "RowTable", "slots_of"]

#: Version of the layout of rows, frames and texts in memory, and so in files. Raise it with every change of
#: the layout: older stores are then rebuilt. The tests hold the layout of this version.
ROW_VERSION: Final = 1

Ids = NDArray[np.int64]

#: Hidden fields of a packed row: the distance to its successor and from its predecessor, in rows, 0 for none;
#: and its place in its episode, counted from the first row after the last gap in the recording.
_NEXT: Final = "@next"
_PREV: Final = "@prev"
_AT: Final = "@at"
_OBS: Final = "@obs "
_NEW_OBS: Final = "@new_obs "
# Rows of an episode that are further apart than this are not linked.
_FAR: Final = 2**31 - 1
# Bytes of packed rows to copy into columns at a time: a second-level cache. Half as many take 5 % longer,
# because of the calls.
_CACHED_BYTES: Final = 1 << 20
# Wide columns larger than this are each gathered in a thread; for smaller ones, a thread costs more than it
# gains.
_BESIDE_BYTES: Final = 1 << 20
# For fewer rows, viewing vectors as single values costs more than copying them number by number.
_FEW: Final = 512
# Batch sizes whose layout is cached; few sizes are used, but sequences come in any size.
_MOST_SIZES: Final = 64


@dataclass(frozen=True)
class Prepared:
    """Rows that a table can take: checked and linked to each other, but not yet added.

    Attributes:
        block: The packed rows, without the fields that depend on where the rows will lie.
        wide: Physical column -> values, for columns with their own array.
        texts: Physical column -> texts as bytes.
        frames: Pool -> the frames of its observations.
    """

    block: NDArray[Any]
    wide: Mapping[str, NDArray[Any]]
    texts: Mapping[str, Ragged]
    frames: Mapping[str, Frames]

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True)
class Plan:
    """How to gather some leaves of a table.

    Attributes:
        fixed: Physical column -> (dtype, shape of a row), for columns of fixed size.
        packed, windows, wide, texts: Physical columns, by where they lie.
    """

    fixed: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
    packed: list[str]
    windows: list[str]
    wide: list[str]
    texts: list[str]

    @cached_property
    def batch(self) -> Callable[[int], np.dtype[Any]]:
        """The memory layout of a batch of so many rows; see `batch_dtype`."""
        return lru_cache(_MOST_SIZES)(partial(batch_dtype, columns=self.fixed))


class RowTable:
    """Storage of rows. Continues after the rows that the arrays already hold.

    Args:
        layout: Which columns lie where.
        capacity: Rows to keep.
        arrays: Makes the arrays for the rows.
        ring: Replace the oldest rows by new ones; False: a full table refuses new rows.
        frames: For a ring: frames that each pool of wide observations keeps. When a pool is full, rows are
            forgotten even if there are fewer than ``capacity``. None: enough for ``capacity`` rows that share
            no frames.
        sealed: Add no rows; the capacity is then the number of existing rows.
    """

    def __init__(
        self,
        layout: RowLayout,
        *,
        capacity: int,
        arrays: Arrays,
        ring: bool = False,
        frames: int | None = None,
        sealed: bool = False,
    ) -> None:
        if capacity < 1:
            raise OptionError(f"capacity={capacity}: expected a number of rows to keep, at least 1")
        self.layout = layout
        self.ring = ring
        self._arrays = arrays
        pairs = _pooled(layout)
        #: Dtype of a packed row, hidden fields included.
        self.row: np.dtype[Any] = _with_hidden(layout, pairs)
        #: Logical number of the oldest kept row.
        self.tail: int = 0
        #: Logical number of the next row.
        self.head: int = (arrays.size("rows") or 0) // self.row.itemsize
        capacity = max(self.head, 1) if sealed else capacity
        self.capacity = capacity
        self._rows = arrays.array("rows", (capacity,), self.row)
        #: All packed rows, one value each: drawing a row is one copy of memory. Without a ring, they are
        #: indexed by their logical numbers.
        self.packed: NDArray[Any] = self._rows.view(np.dtype((np.void, self.row.itemsize)))
        self._values = _as_values(self.row)
        self._next, self._prev, self._at = self._rows[_NEXT], self._rows[_PREV], self._rows[_AT]
        self._pools = {
            obs.physical: FramePool(
                arrays=arrays,
                name=f"frames {obs.physical}",
                shape=obs.spec.shape,
                dtype=obs.spec.numpy,
                stack=obs.spec.stack,
                capacity=frames or 2 * capacity * (1 if obs.spec.stack is None else obs.spec.stack.depth),
                sealed=sealed,
            )
            for obs, _ in pairs
        }
        self._pairs = pairs
        #: Leaf -> its pool, and the hidden field with its position in the pool.
        self._windows: dict[str, tuple[FramePool, str]] = {}
        for obs, new_obs in pairs:
            pool = self._pools[obs.physical]
            self._windows[obs.physical] = (pool, _OBS + obs.physical)
            self._windows[new_obs.physical] = (pool, _NEW_OBS + obs.physical)
        self._wide = {
            leaf.physical: arrays.array(
                f"wide {leaf.physical}", (capacity, *leaf.spec.shape), leaf.spec.numpy
            )
            for leaf in layout.wide
            if leaf.physical not in self._windows
        }
        self._texts = {
            leaf.physical: TextHeap(
                leaf.spec,
                arrays=arrays,
                name=f"texts {leaf.physical}",
                capacity=capacity,
                ring=ring,
                sealed=sealed,
            )
            for leaf in layout.texts
        }
        self._buffers = Buffers()
        #: For each append whose frames are all kept: its first row, and the lowest frame in each pool.
        self._marks: deque[tuple[int, dict[str, int]]] = deque()

    def __len__(self) -> int:
        return self.head - self.tail

    @property
    def used(self) -> dict[str, int]:
        """Array -> number of its rows in use."""
        found = {"rows": self.head}
        found |= {f"frames {name}": pool.head for name, pool in self._pools.items()}
        found |= {f"wide {name}": self.head for name in self._wide}
        for heap in self._texts.values():
            found |= heap.used
            found[heap.places] = self.head
        return found

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves that can be gathered."""
        layout = self.layout
        return [*layout.packed, *layout.wide, *layout.texts, *layout.empty]

    # ---- adding ----

    def pools(self, frames: Mapping[tuple[str, Path], SharedFrames]) -> bool:
        """Whether the table keeps all these stacks frame by frame, in their own form.

        Args:
            frames: (column, path of the leaf) -> the frames of its stacks; see `rlio.schemas.folded.Folded`.
        """
        kept = {(leaf.column, leaf.path): pair[0].spec.stack for pair in self._pairs for leaf in pair}
        return all(key in kept and found.stack == kept[key] for key, found in frames.items())

    def prepare(
        self, arrays: Mapping[str, NDArray[Any]], after: Ids, stacks: Mapping[str, Stacks] | None = None
    ) -> Prepared:
        """Check rows and convert them to the table's form. The table does not change.

        Args:
            arrays: Physical column -> values, one a row; texts as objects.
            after: For each row, the index of its successor in its episode, or -1; always a later row.
            stacks: Physical column -> stacks that the table `pools`, which are not looked up. They replace
                those in ``arrays``.

        Raises:
            OptionError: The frames of one episode exceed a pool.
        """
        block = np.zeros(len(after), self.row)
        for leaf in self.layout.packed:
            block[leaf.physical] = arrays[leaf.physical]
        linked = np.flatnonzero(after >= 0)
        linked = linked[after[linked] - linked <= _FAR]
        block[_NEXT][linked] = block[_PREV][after[linked]] = after[linked] - linked
        frames = {}
        for obs, new_obs in self._pairs:
            here, there, pool = obs.physical, new_obs.physical, self._pools[obs.physical]
            if stacks and here in stacks:
                frames[here] = pool.prepare_stacks(stacks[here], stacks[there], after)
            else:
                frames[here] = pool.prepare(arrays[here], arrays[there], after)
        return Prepared(
            block,
            {name: arrays[name] for name in self._wide},
            {name: encoded(arrays[name]) for name in self._texts},
            frames,
        )

    def reserve(self, parts: Sequence[Prepared]) -> None:
        """Reserve memory for the rows that the next calls of `append` add.

        Raises:
            OptionError: The table is full and is not a ring.
            CacheError: The memory cannot be reserved.
        """
        rows = sum(map(len, parts))
        if not self.ring and rows > self.capacity - self.head:
            raise OptionError(
                f"{rows} rows into a table of {self.capacity} with {self.head} used: add fewer, or raise the "
                "capacity"
            )
        slots = min(self.head % self.capacity + rows, self.capacity) if self.ring else self.head + rows
        for name in ("rows", *(f"wide {name}" for name in self._wide)):
            self._arrays.reserve(name, slots)
        for name, pool in self._pools.items():
            pool.reserve([part.frames[name] for part in parts])

    def append(self, rows: Prepared, at: Ids) -> None:
        """Add rows whose memory is reserved; in a ring, the oldest rows make room.

        Args:
            rows: Result of `prepare`.
            at: For each row, its place in its episode.

        Raises:
            CacheError: There is no memory for texts; never in a ring. No row was added then.
        """
        first = self.head
        slots = self._slots(np.arange(first, first + len(rows)))
        # Forget rows before overwriting them, because a concurrent draw must not see them.
        self.tail = max(self.tail, first + len(rows) - self.capacity)
        for name, texts in rows.texts.items():
            self._texts[name].append(slots, texts)
        block = rows.block
        block[_AT] = at
        lowest: dict[str, int] = {}
        for name, pool in self._pools.items():
            windows, following = pool.append(rows.frames[name])
            block[_OBS + name], block[_NEW_OBS + name] = windows, following
            lowest[name] = int(windows.min(initial=pool.head))
        if lowest and self.ring:
            self._marks.append((first, lowest))
        self._rows[slots] = block
        for name, values in rows.wide.items():
            self._wide[name][slots] = values
        self.head = first + len(rows)
        self._forget_frames()

    def _forget_frames(self) -> None:
        """Forget the rows of appends whose frames have been overwritten."""
        while self._marks and any(
            frame < self._pools[name].head - self._pools[name].capacity
            for name, frame in self._marks[0][1].items()
        ):
            self._marks.popleft()
            self.tail = max(self.tail, self._marks[0][0] if self._marks else self.head)

    def link(self, row: int, successor: int) -> None:
        """Link ``row`` to its ``successor``, which was added later; both are logical numbers."""
        if row >= self.tail and successor - row <= _FAR:
            row_slot, next_slot = self._slots(np.array([row, successor])).tolist()
            self._next[row_slot] = self._prev[next_slot] = successor - row

    # ---- keeping a ring ----

    def dump(self, arrays: Arrays) -> dict[str, Any]:
        """Copy the content of a ring into arrays of exactly that size.

        Rows are copied with their links: draws from the copy equal draws from the ring.

        Returns:
            What `restore` needs besides the arrays, as JSON.

        Raises:
            CacheError: There is no room for the arrays.
        """
        for name, (values, kept) in self._kept().items():
            target = copied(arrays, name, len(kept), values)
            for there, here in _stretches(kept, len(values)):
                target[here] = values[there]
        slots = self._slots(np.arange(self.tail, self.head))
        texts = {name: heap.dump(arrays, slots) for name, heap in self._texts.items()}
        marks = np.array(
            [[first, *(lowest[name] for name in self._pools)] for first, lowest in self._marks], np.int64
        )
        copied(arrays, "marks", len(marks), marks)[:] = marks
        frames = {name: [self._lowest(name), pool.head] for name, pool in self._pools.items()}
        return {"rows": [self.tail, self.head], "frames": frames, "texts": texts, "marks": len(marks)}

    def restore(self, arrays: Arrays, state: Mapping[str, Any]) -> None:
        """Fill an empty ring with what `dump` of a table of the same layout and capacity gave.

        Raises:
            CacheError: There is no memory.
            KeyError, TypeError, ValueError: ``state`` is not a result of `dump`.
        """
        self.tail, self.head = _span_of(state["rows"], self.capacity)
        lowest = {}
        for name, pool in self._pools.items():
            lowest[name], pool.head = _span_of(state["frames"][name], pool.capacity)
        for name, (values, kept) in self._kept(lowest).items():
            self._arrays.reserve(name, min(kept.stop, len(values)))
            stored = arrays.array(name, (len(kept), *values.shape[1:]), values.dtype)
            for there, here in _stretches(kept, len(values)):
                values[there] = stored[here]
        slots = self._slots(np.arange(self.tail, self.head))
        for name, heap in self._texts.items():
            heap.restore(arrays, slots, whole_number(state["texts"], name, of="the texts"))
        marks = arrays.array("marks", (state["marks"], 1 + len(self._pools)), np.int64).tolist()
        self._marks.extend((first, dict(zip(self._pools, low, strict=True))) for first, *low in marks)

    def _kept(self, lowest: Mapping[str, int] | None = None) -> dict[str, tuple[NDArray[Any], range]]:
        """Array -> its values by slot, and the logical numbers of the kept values.

        Args:
            lowest: Pool -> its first frame that is needed; None: computed from the rows.
        """
        rows = range(self.tail, self.head)
        found = {"rows": (self.packed, rows)}
        found |= {f"wide {name}": (values, rows) for name, values in self._wide.items()}
        for name, pool in self._pools.items():
            first = self._lowest(name) if lowest is None else lowest[name]
            found[f"frames {name}"] = pool.frames, range(first, pool.head)
        return found

    def _lowest(self, pool: str) -> int:
        """The first frame of a pool that a kept row needs."""
        kept = slots_of(range(self.tail, self.head), self.capacity)
        fields = self._rows[_OBS + pool], self._rows[_NEW_OBS + pool]
        found = [int(values[s.start : s.stop].min()) for s in kept for values in fields]
        return min(found, default=self._pools[pool].head)

    # ---- drawing ----

    def _slots(self, rows: Ids) -> Ids:
        return rows % self.capacity if self.ring else rows

    def plan(self, leaves: Iterable[Leaf] | None = None) -> Plan:
        """How to gather some leaves, for any number of rows; None: all leaves."""
        wanted = self.leaves if leaves is None else list(leaves)
        names = [leaf.physical for leaf in wanted]
        return Plan(
            fixed={
                leaf.physical: (leaf.spec.numpy, leaf.spec.shape)
                for leaf in wanted
                if leaf.spec.kind not in TEXTS
            },
            packed=[leaf.physical for leaf in self.layout.packed if leaf.physical in names],
            windows=[name for name in names if name in self._windows],
            wide=[name for name in names if name in self._wide],
            texts=[name for name in names if name in self._texts],
        )

    def gather(self, rows: Ids, plan: Plan) -> dict[str, NDArray[Any]]:
        """Copy the given rows: physical column -> contiguous array, texts as objects.

        The caller owns the arrays. Their memory is reused once no reference to them remains.
        """
        slots = self._slots(rows)
        out: dict[str, NDArray[Any]] = self._buffers.columns(plan.batch(len(rows)))
        if plan.packed or plan.windows:
            windows = {name: np.empty(len(rows), np.int64) for name in plan.windows}
            # Copy as many rows at a time as stay in the processor's cache from one copy to the next.
            step = max(_CACHED_BYTES // self.row.itemsize, 1)
            for start in range(0, len(rows), step):
                part = slice(start, start + step)
                block = self._block(slots[part])
                self._unpack(block, plan, out, part)
                for name, found in windows.items():
                    found[part] = block[self._windows[name][1]]
            self._gather_windows(windows, out)
        for name in plan.wide:
            np.take(self._wide[name], slots, axis=0, out=out[name], mode="clip")
        for name in plan.texts:
            out[name] = self._texts[name].gather(slots)
        return out

    def _gather_windows(self, windows: Mapping[str, Ids], out: dict[str, NDArray[Any]]) -> None:
        """Gather observations from their pools, large ones in parallel.

        Args:
            windows: Physical column -> start of each row's observation in its pool.
            out: Physical column -> memory for the arrays; receives the arrays.
        """
        jobs = {
            name: partial(self._windows[name][0].gather, found, out[name]) for name, found in windows.items()
        }
        others = list(jobs)[1:]
        waiting = {
            name: beside(jobs[name]) if out[name].nbytes > _BESIDE_BYTES else jobs[name] for name in others
        }
        for name in list(jobs)[:1]:
            out[name] = jobs[name]()
        for name, result in waiting.items():
            out[name] = result()

    def gather_views(self, rows: Ids, plan: Plan) -> dict[str, NDArray[Any]]:
        """The given rows, where possible as views of one gathered block: quicker than `gather`.

        Small columns are strided and writable. If each row's ``new_obs`` begins one frame after its ``obs``,
        wide ``obs`` and ``new_obs`` overlap and are read-only. All other columns are copies.
        """
        slots = self._slots(rows)
        block = self._block(slots)
        out: dict[str, NDArray[Any]] = {name: block[name] for name in plan.packed}
        for obs, new_obs in self._pairs:
            both = {obs.physical, new_obs.physical}
            at, following = block[_OBS + obs.physical], block[_NEW_OBS + obs.physical]
            if both <= set(plan.windows) and (following == at + 1).all():
                pool = self._pools[obs.physical]
                out[obs.physical], out[new_obs.physical] = pool.gather_pairs(at, self._buffers)
        rest = [name for name in (*plan.windows, *plan.wide, *plan.texts) if name not in out]
        return out | self.gather(rows, self.plan(leaf for leaf in self.leaves if leaf.physical in rest))

    def unpacked(self, packed: NDArray[Any], plan: Plan, buffers: Buffers) -> dict[str, NDArray[Any]]:
        """The packed columns of rows from `packed`: physical column -> contiguous array."""
        out = buffers.columns(plan.batch(len(packed)))
        self._unpack(packed.view(self.row), plan, out, slice(None))
        return out

    def _unpack(self, block: NDArray[Any], plan: Plan, out: Mapping[str, NDArray[Any]], part: slice) -> None:
        """Copy the packed columns of a block into a part of contiguous arrays."""
        values = block.view(self._values)
        for name in plan.packed:
            target = out[name][part]
            value = self._values[name]
            if len(target) < _FEW or block.dtype[name] == value:
                np.copyto(target, block[name])
            else:
                np.copyto(target.reshape(len(target), -1).view(value)[:, 0], values[name])

    def _block(self, slots: Ids) -> NDArray[Any]:
        """The packed rows in the given slots: a structured array in reused memory."""
        memory = self._buffers.empty((len(slots),), self.packed.dtype)
        np.take(self.packed, slots, out=memory, mode="clip")
        return memory.view(self.row)

    def distances(self, rows: Ids) -> Ids:
        """How many rows after each row its successor in its episode comes; 0 for none."""
        found: Ids = self._next[self._slots(rows)].astype(np.int64)
        return found

    def successors(self, rows: Ids, *, head: int | None = None) -> Ids:
        """The successor of each row in its episode, by logical number; -1 if none is kept.

        Args:
            rows: Logical numbers.
            head: Ignore rows from this logical number on; None: ignore none.
        """
        distance = self.distances(rows)
        found = rows + distance
        return np.where((distance > 0) & (found < (self.head if head is None else head)), found, -1)

    def predecessors(self, rows: Ids) -> Ids:
        """The predecessor of each row in its episode, by logical number; -1 if none is kept."""
        distance = self._prev[self._slots(rows)].astype(np.int64)
        found = rows - distance
        return np.where((distance > 0) & (found >= self.tail), found, -1)

    def places(self, rows: Ids) -> Ids:
        """The place of each row in its episode."""
        found: Ids = self._at[self._slots(rows)]
        return found

    def values(self, physical: str, rows: Ids) -> NDArray[Any]:
        """A copy of a packed column of the given rows."""
        found: NDArray[Any] = self._rows[physical][self._slots(rows)]
        return found


def _span_of(written: Any, capacity: int) -> tuple[int, int]:
    """The first number and the one after the last of what a ring held, from its saved form.

    Raises:
        TypeError, ValueError: It is something else, or more than the ring holds.
    """
    first, last = written
    if type(first) is not int or type(last) is not int or not 0 <= first <= last <= first + capacity:
        raise ValueError(f"{first} to {last} in a ring of {capacity}")
    return first, last


def slots_of(rows: range, capacity: int) -> list[range]:
    """The slots of consecutive rows in a ring: one stretch, or two."""
    if not rows:
        return []
    rows = rows[-capacity:]
    start = rows.start % capacity
    stop = start + len(rows)
    if stop <= capacity:
        return [range(start, stop)]
    return [range(start, capacity), range(stop - capacity)]


def _stretches(kept: range, capacity: int) -> Iterator[tuple[slice, slice]]:
    """Slices of a ring that hold some numbers, each with its slice in a copy of those numbers alone."""
    at = 0
    for slots in slots_of(kept, capacity):
        yield slice(slots.start, slots.stop), slice(at, at + len(slots))
        at += len(slots)


def _pooled(layout: RowLayout) -> list[tuple[Leaf, Leaf]]:
    """The pairs of wide ``obs`` and ``new_obs`` leaves of one kind, which share a pool."""
    observations = {leaf.path: leaf for leaf in layout.wide if leaf.column == Columns.OBS}
    following = {leaf.path: leaf for leaf in layout.wide if leaf.column == Columns.NEXT_OBS}
    both: list[Path] = [path for path in observations if path in following]
    pairs = [(observations[path], following[path]) for path in both]
    return [(a, b) for a, b in pairs if a.spec.dtype == b.spec.dtype and a.spec.shape == b.spec.shape]


def _as_values(row: np.dtype[Any]) -> np.dtype[Any]:
    """The same row with each vector as one value, which copies in two thirds of the time."""
    fields: Mapping[str, Any] = row.fields or {}
    kinds: list[np.dtype[Any]] = [kind for kind, *_ in fields.values()]
    return np.dtype(
        {
            "names": list(fields),
            "formats": [
                np.dtype((np.void, kind.itemsize)) if kind.shape and kind.itemsize else kind for kind in kinds
            ],
            "offsets": [offset for _, offset, *_ in fields.values()],
            "itemsize": row.itemsize,
        }
    )


def _with_hidden(layout: RowLayout, pairs: list[tuple[Leaf, Leaf]]) -> np.dtype[Any]:
    """The packed row with its hidden fields."""
    row = layout.row
    hidden = [(_NEXT, "<i4"), (_PREV, "<i4"), (_AT, "<i8")]
    for obs, _ in pairs:
        hidden += [(_OBS + obs.physical, "<i8"), (_NEW_OBS + obs.physical, "<i8")]
    fields: Mapping[str, Any] = row.fields or {}
    names = list(row.names or ())
    sizes = [np.dtype(kind).itemsize for _, kind in hidden]
    ends = np.cumsum([row.itemsize, *sizes]).tolist()
    return np.dtype(
        {
            "names": [*names, *(name for name, _ in hidden)],
            "formats": [*(fields[name][0] for name in names), *(kind for _, kind in hidden)],
            "offsets": [*(fields[name][1] for name in names), *ends[:-1]],
            "itemsize": ends[-1],
        }
    )
