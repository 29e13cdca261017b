"""Adds recorded or live rows to a table: checks them, flattens them, and links them along their episodes.

(writer, eps_id, agent_index, env_id) identifies an episode. Its rows follow each other by contiguous ``t``,
across the fragments and shards into which it was cut.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns
from rlio.errors import excerpt
from rlio.replay.table import Prepared, RowTable
from rlio.schemas.folded import Folded
from rlio.schemas.frame_pools import Stacks
from rlio.schemas.observations import successors
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.streams import STREAM_COLUMNS, StreamTable

__all__ = ["Ingest", "OpenEpisode", "Part"]

Ids = NDArray[np.int64]

# Episodes that were cut and may continue. Beyond this number, those that have waited longest are forgotten.
_MOST_OPEN: Final = 1_000_000


class OpenEpisode(NamedTuple):
    """The last row of an episode that may continue.

    Attributes:
        row: Logical number of the row.
        t: Its ``t``; None without that column.
        at: Its place in the episode.
    """

    row: int
    t: Any
    at: int


class _Piece(NamedTuple):
    """The rows of one episode in a part.

    Attributes:
        key: Identifies the episode.
        first, t_first: Place of the first row, and its ``t``; None without that column.
        last, t_last: The same for the last row.
        ended: Whether the last row ends the episode.
    """

    key: tuple[Hashable, ...]
    first: int
    t_first: Any
    last: int
    t_last: Any
    ended: bool


class Part(NamedTuple):
    """Rows that are checked but not yet added.

    Attributes:
        rows: The rows in the table's form.
        chain, at: For each row, its chain, and its place in the chain's rows of this part.
        pieces: The episodes of the part.
    """

    rows: Prepared
    chain: Ids
    at: Ids
    pieces: list[_Piece]


class Ingest:
    """Adds the rows of one policy to a table.

    Args:
        table: Receives the rows.
        policy: The schema that every batch fits.
        name: The policy's id, for messages.
    """

    def __init__(self, table: RowTable, policy: PolicySchema, *, name: str) -> None:
        self.table = table
        self._policy = policy
        self._name = name
        #: Key of an episode that may continue -> its last row.
        self.open: OrderedDict[tuple[Hashable, ...], OpenEpisode] = OrderedDict()

    def add(self, batch: SampleBatch | Folded, *, writer: str = "") -> None:
        """Add the rows of a batch in order; the rows of different episodes may be mixed.

        The stacks of a `Folded` batch stay so if the table `pools` them; this adds the same.

        Raises:
            SchemaError: The batch does not fit the schema.
            OptionError: The table is full and is not a ring; or the frames of an episode do not fit.
            CacheError: There is no memory. Any error here adds no row.
        """
        parts = self.prepare(batch, writer=writer)
        self.reserve(parts)
        self.commit(parts)

    def prepare(self, batch: SampleBatch | Folded, *, writer: str = "") -> list[Part]:
        """Check the rows of a batch without adding them.

        Raises:
            SchemaError, OptionError: As in `add`.
        """
        stacks: dict[str, Stacks] = {}
        if isinstance(batch, Folded):
            stacks = {
                leaf.physical: batch.stacks(column, path)
                for column, path in batch.frames
                for leaf in self._policy.columns[column]
                if leaf.path == path
            }
            outline = batch.outline()
            assert isinstance(outline, SampleBatch)
            batch = outline
        arrays = self._policy.flatten(batch, policy=self._name)
        # Split into parts, because a ring forgets the rows of one part together.
        step = max(self.table.capacity // 8, 1) if self.table.ring else max(len(batch), 1)
        return [
            self._prepared(
                arrays
                if step >= len(batch)
                else {name: values[start : start + step] for name, values in arrays.items()},
                {name: values[start : start + step] for name, values in stacks.items()},
                min(step, len(batch) - start),
                writer,
            )
            for start in range(0, len(batch), step)
        ]

    def _prepared(
        self, arrays: Mapping[str, NDArray[Any]], stacks: Mapping[str, Stacks], rows: int, writer: str
    ) -> Part:
        named = {
            name: arrays[self._policy.columns[name][0].physical]
            for name in STREAM_COLUMNS
            if name in self._policy.columns
        }
        streams = StreamTable()
        stream = streams.assign(self._name, named, rows)
        ended = _flags(named, Columns.TERMINATEDS, rows) | _flags(named, Columns.TRUNCATEDS, rows)
        t = named.get(Columns.T)
        after = successors(stream)
        after[ended] = -1
        if t is not None:
            linked = np.flatnonzero(after >= 0)
            after[linked[t[after[linked]] != t[linked] + 1]] = -1
        chain, at = _places(after)
        numbers, first = np.unique(stream, return_index=True)
        last = len(stream) - 1 - np.unique(stream[::-1], return_index=True)[1]
        keys = [_key(streams, number, writer) for number in numbers.tolist()]
        t_first, t_last = ([None] * len(keys) if t is None else t[rows].tolist() for rows in (first, last))
        fields = keys, first.tolist(), t_first, last.tolist(), t_last, ended[last].tolist()
        pieces = [_Piece(*piece) for piece in zip(*fields, strict=True)]
        return Part(self.table.prepare(arrays, after, stacks), chain, at, pieces)

    def reserve(self, parts: Sequence[Part]) -> None:
        """Reserve memory for the rows that `commit` adds.

        Raises:
            OptionError, CacheError: As in `add`.
        """
        self.table.reserve([part.rows for part in parts])

    def commit(self, parts: Sequence[Part]) -> None:
        """Add what `prepare` returned and `reserve` made room for."""
        for part in parts:
            self._commit(part)

    def _commit(self, part: Part) -> None:
        base = self.table.head
        links = []
        places = np.zeros(int(part.chain.max(initial=0)) + 1, np.int64)
        for piece in part.pieces:
            before = self.open.pop(piece.key, None)
            if before is not None and (piece.t_first is None or piece.t_first == before.t + 1):
                links.append((before.row, base + piece.first))
                places[part.chain[piece.first]] = before.at + 1
        at = part.at + places[part.chain]
        self.table.append(part.rows, at)
        for row, successor in links:
            self.table.link(row, successor)
        for piece in part.pieces:
            if not piece.ended:
                self.open[piece.key] = OpenEpisode(base + piece.last, piece.t_last, int(at[piece.last]))
        while len(self.open) > _MOST_OPEN:
            self.open.popitem(last=False)

    # ---- episodes that may continue, as JSON ----

    def open_to_json(self) -> list[Any]:
        """The content of `open`, in order."""
        return [[list(key), *last] for key, last in self.open.items()]

    def open_from_json(self, written: Iterable[Any]) -> None:
        """Set `open` from the result of `open_to_json`.

        Raises:
            TypeError, ValueError: ``written`` has another form.
        """
        self.open = OrderedDict()
        for key, row, t, at in written:
            if not (isinstance(key, list) and type(row) is type(at) is int and row >= 0 and at >= 0):
                raise TypeError(f"an open episode {excerpt([key, row, t, at])}")
            self.open[tuple(key)] = OpenEpisode(row, t, at)


def _key(streams: StreamTable, number: int, writer: str) -> tuple[Hashable, ...]:
    """The key that distinguishes an episode from all others of the data set."""
    named = streams.streams
    # Two roots of merged writers may name one writer.
    merged = named.writer[number]
    return (
        writer if merged is None else f"{writer}/{merged}",
        named.eps_id[number],
        named.agent_index[number],
        named.env_id[number],
    )


def _places(after: Ids) -> tuple[Ids, Ids]:
    """The chain of each row, numbered by first rows, and the row's place in the chain."""
    rows = len(after)
    linked = np.flatnonzero(after >= 0)
    before = np.full(rows, -1, np.int64)
    before[after[linked]] = linked
    chain = np.cumsum(before < 0) - 1
    at = np.zeros(rows, np.int64)
    steps = np.flatnonzero(before >= 0)
    if (before[steps] == steps - 1).all():  # Each chain is one run of rows.
        begins = np.flatnonzero(before < 0)
        return chain, np.arange(rows) - begins[chain]
    # Follow all chains together, one step at a time, for as many steps as the longest chain has rows.
    front = np.flatnonzero(before < 0)
    number, place = chain[front], 0
    while len(front):
        chain[front], at[front] = number, place
        front = after[front]
        goes_on = front >= 0
        front, number, place = front[goes_on], number[goes_on], place + 1
    return chain, at


def _flags(named: Mapping[str, NDArray[Any]], name: str, rows: int) -> NDArray[np.bool_]:
    values = named.get(name)
    return np.zeros(rows, bool) if values is None else np.asarray(values, bool)
