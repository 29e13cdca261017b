"""Recorded or live rows on their way into a table: checked, flattened, and linked along their episodes.

An episode is told by (writer, eps_id, agent_index, env_id) and followed by contiguous ``t``, over the
fragments and shards that it was cut into.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.columns import Columns
from rlio.replay.table import Chains, RowTable
from rlio.schemas.observations import successors
from rlio.schemas.schema import PolicySchema
from rlio.schemas.streams import STREAM_COLUMNS, StreamTable

__all__ = ["Ingest", "OpenEpisode"]

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
            OptionError: The table is full, and no ring.
        """
        # In parts: a ring forgets the rows of one part together.
        step = max(self.table.capacity // 8, 1) if self.table.ring else len(batch)
        for start in range(0, len(batch), step or 1):
            self._add(batch[start : start + step] if step < len(batch) else batch, writer)

    def _add(self, batch: SampleBatch, writer: str) -> None:
        rows = len(batch)
        if not rows:
            return
        arrays = self._policy.flatten(batch, policy=self._name)
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
        base = self.table.head
        keys = [_key(streams, number, writer) for number in numbers.tolist()]
        links = self._continued(keys, first, None if t is None else t[first])
        continued = np.zeros(int(chain.max(initial=0)) + 1, np.int64)
        for begin, before in links:
            continued[chain[begin]] = before.at + 1
        at += continued[chain]
        self.table.append(arrays, Chains(after, at))
        for begin, before in links:
            self.table.link(before.row, base + begin)
        for key, end in zip(keys, last.tolist(), strict=True):
            if not ended[end]:
                self.open[key] = OpenEpisode(base + end, None if t is None else t[end].item(), int(at[end]))
        while len(self.open) > _MOST_OPEN:
            self.open.popitem(last=False)

    def _continued(
        self, keys: list[tuple[Hashable, ...]], first: Ids, t: NDArray[Any] | None
    ) -> list[tuple[int, OpenEpisode]]:
        """The first rows of streams here that go on with an episode that was cut, and its last row."""
        found = []
        for number, (key, begin) in enumerate(zip(keys, first.tolist(), strict=True)):
            before = self.open.pop(key, None)
            if before is not None and (t is None or t[number] == before.t + 1):
                found.append((begin, before))
        return found


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
