"""Recorded or live rows on their way into a table: checked, flattened, and linked along their episodes.

An episode is told by (writer, eps_id, agent_index, env_id) and followed by contiguous ``t``, over the
fragments and shards that it was cut into.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.columns import Columns
from rlio.replay.table import RowTable
from rlio.schemas.observations import successors
from rlio.schemas.schema import PolicySchema
from rlio.schemas.streams import STREAM_COLUMNS, StreamTable

__all__ = ["Ingest"]

# Episodes that were cut, and may go on in rows to come: of more, those that waited longest are given up.
_MOST_OPEN: Final = 1_000_000


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
        #: Key of an episode that goes on -> (its last row, that row's t).
        self._open: OrderedDict[tuple[Hashable, ...], tuple[int, Any]] = OrderedDict()

    def add(self, batch: SampleBatch, *, writer: str = "") -> None:
        """Add the rows of a batch, in order, those of one writer after the other or mixed.

        Raises:
            SchemaError: The batch does not fit the schema.
        """
        # In parts: a table forgets the rows of one part together.
        step = max(self.table.capacity // 8, 1)
        for start in range(0, len(batch), step):
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
        base = self.table.head
        self.table.append(arrays, after)
        self._link(streams, stream, base, ended, t, writer)

    def _link(
        self,
        streams: StreamTable,
        stream: NDArray[np.int32],
        base: int,
        ended: NDArray[np.bool_],
        t: NDArray[Any] | None,
        writer: str,
    ) -> None:
        """Link the first row of every stream here to the last one that came before, and remember the last."""
        numbers, first = np.unique(stream, return_index=True)
        last = len(stream) - 1 - np.unique(stream[::-1], return_index=True)[1]
        named = streams.streams
        for number, begin, end in zip(numbers.tolist(), first.tolist(), last.tolist(), strict=True):
            key = (
                writer,
                named.writer[number],
                named.eps_id[number],
                named.agent_index[number],
                named.env_id[number],
            )
            before = self._open.pop(key, None)
            if before is not None and (t is None or t[begin] == before[1] + 1):
                self.table.link(before[0], base + begin)
            if not ended[end]:
                self._open[key] = (base + end, None if t is None else t[end])
        while len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)


def _flags(named: Mapping[str, NDArray[Any]], name: str, rows: int) -> NDArray[np.bool_]:
    values = named.get(name)
    return np.zeros(rows, bool) if values is None else np.asarray(values, bool)
