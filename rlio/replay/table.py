"""The rows of one policy in slots of fixed size: appended, linked along their episodes, and gathered.

Rows have logical numbers, which only grow. In a ring, row r lies in slot r mod capacity, so that a full table
forgets its oldest rows; else in slot r. Not here: where the memory comes from, and which rows are drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.batch.nested import Path
from rlio.errors import OptionError
from rlio.replay.beside import beside
from rlio.replay.buffers import Buffers, batch_dtype
from rlio.replay.frames import FramePool, Frames
from rlio.replay.layout import RowLayout
from rlio.replay.memory import Arrays, copied
from rlio.replay.texts import TextExtent, TextHeap, encoded
from rlio.schemas.schema import Leaf

__all__ = ["ROW_VERSION", "Extent", "Plan", "Prepared", "RowTable", "slots_of"]

#: Of what rows, frames and texts look like in memory, and so in files: raise it with every change of them, so
#: that stores of before are built anew. The tests hold what this version looks like.
ROW_VERSION: Final = 1

Ids = NDArray[np.int64]

#: Hidden fields of a packed row: how many rows below its successor lies, and above its predecessor, 0 for
#: none; and its place in its episode, counted from the first row of it that was recorded without a gap.
_NEXT: Final = "@next"
_PREV: Final = "@prev"
_AT: Final = "@at"
_OBS: Final = "@obs "
_NEW_OBS: Final = "@new_obs "
_TEXTS: Final = ("text", "json")
# Rows of an episode that lie further apart than this are not linked.
_FAR: Final = 2**31 - 1
# Of packed rows that are copied into columns at a time: half of a second-level cache.
_CACHED_BYTES: Final = 512 << 10
# Wide columns of more than this are gathered each in a thread: below, starting one costs more than it gains.
_BESIDE_BYTES: Final = 1 << 20
# Rows below which it costs more to look at vectors as single values than to copy them number by number.
_FEW: Final = 512
# Sizes of batches whose layout is remembered; few are used, but sequences come in any size.
_MOST_SIZES: Final = 64


@dataclass(frozen=True)
class Prepared:
    """Rows that a table can take: checked, linked among each other, and not yet in it.

    Attributes:
        block: The packed rows, but for the fields that depend on where they will lie.
        wide: Physical column -> values, of columns with an array of their own.
        texts: Physical column -> texts as bytes.
        frames: Pool -> the frames of its observations.
    """

    block: NDArray[Any]
    wide: Mapping[str, NDArray[Any]]
    texts: Mapping[str, list[bytes]]
    frames: Mapping[str, Frames]

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True)
class Extent:
    """How far a table is filled: what another one over the same arrays begins with.

    Attributes:
        rows: Rows.
        frames: Pool -> frames.
        texts: Column -> its heap.
    """

    rows: int = 0
    frames: Mapping[str, int] = field(default_factory=dict)
    texts: Mapping[str, TextExtent] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """How some leaves of a table are gathered.

    Attributes:
        fixed: Physical column -> (dtype, shape of a row), of those of fixed size.
        packed, windows, wide, texts: Physical columns, by where they lie.
    """

    fixed: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
    packed: list[str]
    windows: list[str]
    wide: list[str]
    texts: list[str]
    _batches: dict[int, np.dtype[Any]] = field(default_factory=dict, compare=False)

    def batch(self, rows: int) -> np.dtype[Any]:
        """The memory of a batch of so many rows; see `batch_dtype`."""
        found = self._batches.get(rows)
        if found is None:
            if len(self._batches) >= _MOST_SIZES:
                self._batches.clear()
            found = self._batches[rows] = batch_dtype(rows, self.fixed)
        return found


class RowTable:
    """Storage of rows.

    Args:
        layout: Which columns lie where.
        capacity: Rows that are kept.
        arrays: Where they lie.
        ring: Whether new rows take the place of the oldest; else a full table refuses them.
        frames: Frames that each pool of wide observations of a ring keeps: where they are used up, rows are
            forgotten before there are ``capacity`` of them. None: enough for ``capacity`` rows, whatever they
            share.
        extent: What is in the arrays already; of a table that is no ring.
        sealed: Whether nothing is added, and the arrays are no longer than ``extent`` says.
    """

    def __init__(
        self,
        layout: RowLayout,
        *,
        capacity: int,
        arrays: Arrays,
        ring: bool = False,
        frames: int | None = None,
        extent: Extent | None = None,
        sealed: bool = False,
    ) -> None:
        if capacity < 1:
            raise OptionError(f"capacity={capacity}: rows to keep, at least 1")
        self.layout = layout
        self.capacity = capacity
        self.ring = ring
        self._arrays = arrays
        filled = extent or Extent()
        pairs = _pooled(layout)
        self._row = _with_hidden(layout, pairs)
        self._rows = arrays.array("rows", (capacity,), self._row)
        self._void = self._rows.view(np.dtype((np.void, self._row.itemsize)))
        self._values = _as_values(self._row)
        self._next, self._prev, self._at = self._rows[_NEXT], self._rows[_PREV], self._rows[_AT]
        self._pools = {
            obs.physical: FramePool(
                arrays=arrays,
                name=f"frames {obs.physical}",
                shape=obs.spec.shape,
                dtype=obs.spec.numpy,
                stack=obs.spec.stack,
                capacity=max(filled.frames.get(obs.physical, 0), 1)
                if sealed
                else frames or 2 * capacity * (1 if obs.spec.stack is None else obs.spec.stack.depth),
                head=filled.frames.get(obs.physical, 0),
            )
            for obs, _ in pairs
        }
        self._pairs = pairs
        #: Leaf -> its pool, and the hidden field that says where in it.
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
                extent=filled.texts.get(leaf.physical, TextExtent()),
                sealed=sealed,
            )
            for leaf in layout.texts
        }
        self._buffers = Buffers()
        #: Logical numbers of the oldest row that is kept, and of the next one.
        self.tail, self.head = 0, filled.rows
        #: For each append that is still in the pools: its first row, and the lowest frame of each pool.
        self._marks: deque[tuple[int, dict[str, int]]] = deque()

    def __len__(self) -> int:
        return self.head - self.tail

    @property
    def extent(self) -> Extent:
        """How far it is filled."""
        return Extent(
            self.head,
            {name: pool.head for name, pool in self._pools.items()},
            {name: heap.extent for name, heap in self._texts.items()},
        )

    @property
    def used(self) -> dict[str, int]:
        """Array -> rows of it that are used."""
        found = {"rows": self.head}
        found |= {f"frames {name}": pool.head for name, pool in self._pools.items()}
        found |= {f"wide {name}": self.head for name in self._wide}
        for heap in self._texts.values():
            found |= heap.used
            found[heap.places] = self.head
        return found

    @property
    def leaves(self) -> list[Leaf]:
        """What can be gathered."""
        layout = self.layout
        return [*layout.packed, *layout.wide, *layout.texts, *layout.empty]

    # ---- adding ----

    def prepare(self, arrays: Mapping[str, NDArray[Any]], after: Ids) -> Prepared:
        """Check rows and bring them into the table's form. The table stays as it is.

        Args:
            arrays: Physical column -> values, one a row; texts as objects.
            after: For each row, the row here that is its successor in its episode, or -1; later than it.

        Raises:
            OptionError: They are more than the table keeps, or the frames of one episode than a pool keeps.
        """
        rows = len(after)
        if rows > self.capacity:
            raise OptionError(f"{rows} rows at once into a table of {self.capacity}: add fewer")
        block = np.zeros(rows, self._row)
        for leaf in self.layout.packed:
            block[leaf.physical] = arrays[leaf.physical]
        linked = np.flatnonzero(after >= 0)
        linked = linked[after[linked] - linked <= _FAR]
        block[_NEXT][linked] = block[_PREV][after[linked]] = after[linked] - linked
        frames = {}
        for obs, new_obs in self._pairs:
            here, there = arrays[obs.physical], arrays[new_obs.physical]
            # The same bytes, not only the same episode: what was recorded comes back.
            same = np.array(
                [a >= 0 and there[i].tobytes() == here[a].tobytes() for i, a in enumerate(after)], bool
            )
            frames[obs.physical] = self._pools[obs.physical].prepare(here, there, np.where(same, after, -1))
        return Prepared(
            block,
            {name: arrays[name] for name in self._wide},
            {name: encoded(arrays[name]) for name in self._texts},
            frames,
        )

    def reserve(self, parts: Sequence[Prepared]) -> None:
        """Make sure that there is memory for the rows that the next calls of `append` add.

        Raises:
            OptionError: The table is full, and no ring.
            CacheError: There is no memory.
        """
        rows = sum(map(len, parts))
        if not self.ring and rows > self.capacity - self.head:
            raise OptionError(
                f"{rows} rows into a table of {self.capacity}, {self.head} used: add fewer, or make it larger"
            )
        slots = min(self.head % self.capacity + rows, self.capacity) if self.ring else self.head + rows
        for name in ("rows", *(f"wide {name}" for name in self._wide)):
            self._arrays.reserve(name, slots)
        for name, pool in self._pools.items():
            pool.reserve([part.frames[name] for part in parts])

    def append(self, rows: Prepared, at: Ids) -> None:
        """Add rows, for which memory was reserved; in a ring, the oldest ones make room.

        Args:
            rows: What `prepare` gave.
            at: For each row, its place in its episode.

        Raises:
            CacheError: There is no memory for texts; of a ring, never. No row was added.
        """
        first = self.head
        slots = self._slots(np.arange(first, first + len(rows)))
        # Nobody may draw what is about to be overwritten.
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
        """Drop the rows of appends whose frames have been overwritten."""
        while self._marks and any(
            frame < self._pools[name].head - self._pools[name].capacity
            for name, frame in self._marks[0][1].items()
        ):
            self._marks.popleft()
            self.tail = max(self.tail, self._marks[0][0] if self._marks else self.head)

    def link(self, row: int, successor: int) -> None:
        """Say that ``successor`` follows ``row``, which was added before it; both by logical number."""
        if row >= self.tail and successor - row <= _FAR:
            row_slot, next_slot = self._slots(np.array([row, successor])).tolist()
            self._next[row_slot] = self._prev[next_slot] = successor - row

    # ---- keeping a ring ----

    def dump(self, arrays: Arrays) -> dict[str, Any]:
        """Copy what a ring holds into arrays of as many rows; give, as JSON, what `restore` needs besides.

        Rows are copied with what links them, so that whatever is drawn of the copy is what is drawn here.

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
        """Take what `dump` of a table of the same layout and capacity gave; into an empty ring.

        Raises:
            CacheError: There is no memory.
            KeyError, TypeError, ValueError: The state is not one of `dump`.
        """
        self.tail, self.head = map(int, state["rows"])
        lowest = {name: int(state["frames"][name][0]) for name in self._pools}
        for name, pool in self._pools.items():
            pool.head = int(state["frames"][name][1])
        for name, (values, kept) in self._kept(lowest).items():
            self._arrays.reserve(name, min(kept.stop, len(values)))
            stored = arrays.array(name, (len(kept), *values.shape[1:]), values.dtype)
            for there, here in _stretches(kept, len(values)):
                values[there] = stored[here]
        slots = self._slots(np.arange(self.tail, self.head))
        for name, heap in self._texts.items():
            heap.restore(arrays, slots, int(state["texts"][name]))
        marks = arrays.array("marks", (state["marks"], 1 + len(self._pools)), np.int64).tolist()
        self._marks.extend((first, dict(zip(self._pools, low, strict=True))) for first, *low in marks)

    def _kept(self, lowest: Mapping[str, int] | None = None) -> dict[str, tuple[NDArray[Any], range]]:
        """Array -> its values by slot, and the logical numbers of those that are kept.

        Args:
            lowest: Pool -> the first of its frames that is needed; None: what the rows say.
        """
        rows = range(self.tail, self.head)
        found = {"rows": (self._void, rows)}
        found |= {f"wide {name}": (values, rows) for name, values in self._wide.items()}
        for name, pool in self._pools.items():
            first = self._lowest(name) if lowest is None else lowest[name]
            found[f"frames {name}"] = pool.frames, range(first, pool.head)
        return found

    def _lowest(self, pool: str) -> int:
        """The first frame of a pool that some row needs."""
        kept = slots_of(range(self.tail, self.head), self.capacity)
        fields = self._rows[_OBS + pool], self._rows[_NEW_OBS + pool]
        found = [int(values[s.start : s.stop].min()) for s in kept for values in fields]
        return min(found, default=self._pools[pool].head)

    # ---- drawing ----

    def _slots(self, rows: Ids) -> Ids:
        return rows % self.capacity if self.ring else rows

    def plan(self, leaves: Iterable[Leaf] | None = None) -> Plan:
        """How to gather some leaves, for any number of rows; None: all."""
        wanted = self.leaves if leaves is None else list(leaves)
        names = [leaf.physical for leaf in wanted]
        return Plan(
            fixed={
                leaf.physical: (leaf.spec.numpy, leaf.spec.shape)
                for leaf in wanted
                if leaf.spec.kind not in _TEXTS
            },
            packed=[leaf.physical for leaf in self.layout.packed if leaf.physical in names],
            windows=[name for name in names if name in self._windows],
            wide=[name for name in names if name in self._wide],
            texts=[name for name in names if name in self._texts],
        )

    def gather(self, rows: Ids, plan: Plan) -> dict[str, NDArray[Any]]:
        """Copies of the given rows: physical column -> contiguous array, texts as objects.

        The arrays are the caller's; their memory is used again once nobody sees it.
        """
        slots = self._slots(rows)
        out: dict[str, NDArray[Any]] = self._buffers.columns(plan.batch(len(rows)))
        if plan.packed or plan.windows:
            windows = {name: np.empty(len(rows), np.int64) for name in plan.windows}
            # As many rows at a time as stay in the processor's cache from one copy to the next.
            step = max(_CACHED_BYTES // self._row.itemsize, 1)
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
        """Observations from their pools, large ones one beside the other.

        Args:
            windows: Physical column -> where in its pool each row's observation begins.
            out: Physical column -> memory for them; gets the arrays.
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
        """The given rows as views of one gathered block, as far as that goes: quicker than `gather`.

        Small columns are strided, and writable. Wide ``obs`` and ``new_obs`` overlap and are read-only, where
        each row's ``new_obs`` begins one frame behind its ``obs``; else they are copies, as all others are.
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

    @property
    def row(self) -> np.dtype[Any]:
        """A packed row, hidden fields included."""
        return self._row

    @property
    def void(self) -> np.dtype[Any]:
        """A packed row as one value, so that drawing it is one copy of memory."""
        return self._void.dtype

    @property
    def packed_values(self) -> NDArray[Any]:
        """All packed rows as values of `void`; of a table that is no ring, by their logical numbers."""
        return self._void

    def unpacked(self, packed: NDArray[Any], plan: Plan, buffers: Buffers) -> dict[str, NDArray[Any]]:
        """The packed columns of rows taken from `packed_values`: physical column -> contiguous array."""
        out = buffers.columns(plan.batch(len(packed)))
        self._unpack(packed.view(self._row), plan, out, slice(None))
        return out

    def _unpack(self, block: NDArray[Any], plan: Plan, out: Mapping[str, NDArray[Any]], part: slice) -> None:
        """Copy the packed columns of a block to a part of contiguous ones."""
        values = block.view(self._values)
        for name in plan.packed:
            target = out[name][part]
            value = self._values[name]
            if len(target) < _FEW or block.dtype[name] == value:
                np.copyto(target, block[name])
            else:
                np.copyto(target.reshape(len(target), -1).view(value)[:, 0], values[name])

    def _block(self, slots: Ids) -> NDArray[Any]:
        """The packed rows in the given slots: a structured array in memory that is used again."""
        memory = self._buffers.empty((len(slots),), self._void.dtype)
        np.take(self._void, slots, out=memory, mode="clip")
        return memory.view(self._row)

    def packed(self, rows: Ids) -> NDArray[Any]:
        """The packed rows, hidden fields included: a structured array in memory that is used again."""
        return self._block(self._slots(rows))

    def distances(self, rows: Ids) -> Ids:
        """How many rows behind each row its successor in its episode lies, 0 for none."""
        found: Ids = self._next[self._slots(rows)].astype(np.int64)
        return found

    def successors(self, rows: Ids, *, head: int | None = None) -> Ids:
        """The successor of each row in its episode, by logical number; -1 where none is kept.

        Args:
            rows: Logical numbers.
            head: Rows from here on are taken to be not there; None: all are.
        """
        distance = self.distances(rows)
        found = rows + distance
        return np.where((distance > 0) & (found < (self.head if head is None else head)), found, -1)

    def predecessors(self, rows: Ids) -> Ids:
        """The predecessor of each row in its episode, by logical number; -1 where none is kept."""
        distance = self._prev[self._slots(rows)].astype(np.int64)
        found = rows - distance
        return np.where((distance > 0) & (found >= self.tail), found, -1)

    def places(self, rows: Ids) -> Ids:
        """The place of each row in its episode."""
        found: Ids = self._at[self._slots(rows)]
        return found

    def values(self, physical: str, rows: Ids) -> NDArray[Any]:
        """A packed column of the given rows: a copy."""
        found: NDArray[Any] = self._rows[physical][self._slots(rows)]
        return found


def slots_of(rows: range, capacity: int) -> list[range]:
    """The slots of neighbouring rows in a ring: one stretch, or two."""
    if not rows:
        return []
    rows = rows[-capacity:]
    start = rows.start % capacity
    stop = start + len(rows)
    if stop <= capacity:
        return [range(start, stop)]
    return [range(start, capacity), range(stop - capacity)]


def _stretches(kept: range, capacity: int) -> Iterator[tuple[slice, slice]]:
    """Where numbers lie in a ring, and where in a copy of them alone."""
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
    """The same row, of which each vector is one value: to copy it takes two thirds of the time."""
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
