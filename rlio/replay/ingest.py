"""Recorded or live rows on their way into a table: checked, flattened, and linked along their episodes.

An episode is told by (writer, eps_id, agent_index, env_id) and followed by contiguous ``t``, over the
fragments and shards that it was cut into.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns
from rlio.replay.table import Prepared, RowTable
from rlio.schemas.observations import successors
from rlio.schemas.schema import PolicySchema
from rlio.schemas.streams import STREAM_COLUMNS, StreamTable

__all__ = ["Ingest", "OpenEpisode", "Part"]

Ids = NDArray[np.int64]

# Episodes that were cut, and may go on in rows to come: of more, those that waited longest are given up.
_MOST_OPEN: Final = 1_000_000


class OpenEpisode(NamedTuple):
    """The last row of an episode that may go on.

    Attributes:
        row: Its logical number.
        t: Its ``t``; None without that column.
        at: Its place in the episode.
    """

    row: int
    t: Any
    at: int


class _Piece(NamedTuple):
    """The rows of one episode in a part.

    Attributes:
        key: What tells the episode from all others.
        first, t_first: Place of the first row, and its ``t``; None without that column.
        last, t_last: Those of the last row.
        ended: Whether the episode is over with it.
    """

    key: tuple[Hashable, ...]
    first: int
    t_first: Any
    last: int
    t_last: Any
    ended: bool


class Part(NamedTuple):
    """Rows that are checked, and not yet added.

    Attributes:
        rows: As the table takes them.
        chain, at: For each row, which chain it is in, and its place in the chain's rows of this part.
        pieces: Its episodes.
    """

    rows: Prepared
    chain: Ids
    at: Ids
    pieces: list[_Piece]


class Ingest:
    """Adds the rows of one policy to a table.

    Args:
        table: Where they go.
        policy: The schema that every batch fits.
        name: The policy's id, for messages.
    """

    def __init__(self, table: RowTable, policy: PolicySchema, *, name: str) -> None:
        self.table = table
        self._policy = policy
        self._name = name
        #: Key of an episode that may go on -> its last row.
        self.open: OrderedDict[tuple[Hashable, ...], OpenEpisode] = OrderedDict()

    def add(self, batch: SampleBatch, *, writer: str = "") -> None:
        """Add the rows of a batch, in order, those of one writer after the other or mixed.

        Raises:
            SchemaError: The batch does not fit the schema.
            OptionError: The table is full, and no ring; or the frames of an episode do not fit.
            CacheError: There is no memory. After any error here, no row was added.
        """
        parts = self.prepare(batch, writer=writer)
        self.reserve(parts)
        self.commit(parts)

    def prepare(self, batch: SampleBatch, *, writer: str = "") -> list[Part]:
        """Check the rows of a batch. Nothing is added.

        Raises:
            SchemaError, OptionError: As `add`.
        """
        arrays = self._policy.flatten(batch, policy=self._name)
        # In parts: a ring forgets the rows of one part together.
        step = max(self.table.capacity // 8, 1) if self.table.ring else max(len(batch), 1)
        return [
            self._prepared(
                arrays
                if step >= len(batch)
                else {name: values[start : start + step] for name, values in arrays.items()},
                min(step, len(batch) - start),
                writer,
            )
            for start in range(0, len(batch), step)
        ]

    def _prepared(self, arrays: Mapping[str, NDArray[Any]], rows: int, writer: str) -> Part:
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
        return Part(self.table.prepare(arrays, after), chain, at, pieces)

    def reserve(self, parts: Sequence[Part]) -> None:
        """Make sure that there is memory for what `commit` adds.

        Raises:
            OptionError, CacheError: As `add`.
        """
        self.table.reserve([part.rows for part in parts])

    def commit(self, parts: Sequence[Part]) -> None:
        """Add what `prepare` gave, for which memory was reserved."""
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

    # ---- the episodes that may go on, as JSON ----

    def open_to_json(self) -> list[Any]:
        """What `open` holds, in its order."""
        return [[list(key), *last] for key, last in self.open.items()]

    def open_from_json(self, written: Iterable[Any]) -> None:
        """Let `open` hold what `open_to_json` gave.

        Raises:
            TypeError, ValueError: It is not that.
        """
        self.open = OrderedDict((tuple(key), OpenEpisode(row, t, at)) for key, row, t, at in written)


def _key(streams: StreamTable, number: int, writer: str) -> tuple[Hashable, ...]:
    """What tells an episode from all others of the data set."""
    named = streams.streams
    return (
        named.writer[number] or writer,
        named.eps_id[number],
        named.agent_index[number],
        named.env_id[number],
    )


def _places(after: Ids) -> tuple[Ids, Ids]:
    """The chain that each row is in, numbered by their first rows, and its place in it."""
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
    # Follow all chains at once, a step at a time: as many steps as the longest has rows.
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
