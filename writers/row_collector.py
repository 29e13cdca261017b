"""Rows on their way into row groups and shards, for writing and for recovery alike.

Where a group or a shard ends depends on the rows alone, so that recovery makes what the writer would have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from rlio.interfaces import Batch
from rlio.schemas.log_frames import LogFrames
from rlio.schemas.parquet import Compression
from rlio.schemas.row_groups import GroupBuffer, Piece, pieces_of, pooled
from rlio.schemas.schema import Schema
from rlio.storage.publisher import NewShard
from rlio.storage.wal import Frame
from rlio.writers.roll import Roll
from rlio.writers.shard_builder import ShardMaker

__all__ = ["RowCollector", "remake_parquet"]


class _Groups(Protocol):
    """Where full row groups go: a `ShardBuilder` or a `ShardMaker`."""

    def add(self, buffer: GroupBuffer) -> GroupBuffer: ...

    def finish(self) -> None: ...


class RowCollector:
    """Collects checked rows and hands full row groups to the builder.

    Args:
        builder: Encodes and stores.
        roll: Its ``max_rows`` ends shards here, its ``max_bytes`` in the builder.
    """

    def __init__(self, builder: _Groups, *, roll: Roll) -> None:
        self._builder = builder
        self._roll = roll
        self._buffer: GroupBuffer | None = None
        # Where the builder ends a shard, at ``max_bytes``, this counts on: when that happens is a matter of
        # timing, and where shards end must not be.
        self._shard_rows = 0
        #: Shards that were ended here because of ``max_rows``.
        self.ended = 0

    @property
    def shard_rows(self) -> int:
        """Rows that count towards ``max_rows``: those since a shard was ended, but for its bytes."""
        return self._shard_rows

    def resume(self, shard_rows: int, stored: Iterable[int]) -> None:
        """Count on where a dead writer did, so that shards end where its own would have.

        Args:
            shard_rows: Its `shard_rows` before the first of ``stored``.
            stored: Rows of each `append` after that, whose rows are stored already.
        """
        self._shard_rows = shard_rows
        most = self._roll.max_rows
        for rows in stored:
            if most is not None and self._shard_rows and self._shard_rows + rows > most:
                self._shard_rows = 0
            self._shard_rows += rows
            if most is not None and self._shard_rows >= most:
                self._shard_rows = 0

    @property
    def schema(self) -> Schema | None:
        """Of the rows; None before the first."""
        return None if self._buffer is None else self._buffer.schema

    def use(self, schema: Schema) -> None:
        """Go on with another schema: a shard has one."""
        if schema is not self.schema:
            self.finish()
            self._buffer = GroupBuffer(schema)

    def cut(self, batch: Batch, schema: Schema) -> list[list[Piece]]:
        """Check a batch and cut it into lists of pieces, each of which goes into one row group.

        Raises:
            SchemaError: It does not fit the schema; nothing has changed.
        """
        limit = min(schema.group_rows, self._roll.max_rows or schema.group_rows)
        cut = pieces_of(batch, schema, rooms=self._rooms(schema), limit=limit)
        return [[pooled(piece, schema) for piece in pieces] for pieces in cut]

    def append(self, pieces: list[Piece]) -> None:
        """Take the pieces of one row group, ending the group or shard before and after as needed."""
        assert self._buffer is not None
        rows = sum(piece.rows for piece in pieces)
        max_rows = self._roll.max_rows
        if max_rows is not None and self._shard_rows and self._shard_rows + rows > max_rows:
            self._end()
        elif self._buffer.rows and rows > self._buffer.room:
            self._buffer = self._builder.add(self._buffer)
        for piece in pieces:
            self._buffer.append(piece)
        self._shard_rows += rows
        if max_rows is not None and self._shard_rows >= max_rows:
            self._end()
        elif self._buffer.is_full:
            self._buffer = self._builder.add(self._buffer)

    def hand_over(self) -> None:
        """Give the collected rows to the builder, as a shorter group."""
        self._shard_rows = 0
        if self._buffer is not None and self._buffer.rows:
            self._buffer = self._builder.add(self._buffer)

    def finish(self) -> None:
        """End the open shard; it is stored in the background."""
        self.hand_over()
        self._builder.finish()

    def _end(self) -> None:
        self.ended += 1
        self.finish()

    def _rooms(self, schema: Schema) -> Iterator[int]:
        """Rows that still fit the open row group and shard, then those that fit the groups after it."""
        goes_on = schema is self.schema and self._buffer is not None
        group = self._buffer.room if goes_on and self._buffer is not None else schema.group_rows
        most = self._roll.max_rows
        shard = None if most is None else most - (self._shard_rows if goes_on else 0)
        while True:
            room = group if shard is None else min(group, shard)
            yield room
            group = group - room or schema.group_rows
            if most is not None and shard is not None:
                shard -= room
                if not shard:
                    group, shard = schema.group_rows, most


def remake_parquet(
    schema: Schema, frames: Iterable[Frame], *, roll: Roll, compression: Compression, provenance: str
) -> NewShard:
    """The shard into which a writer of these options has made the frames.

    Args:
        schema: Of the rows.
        frames: All that the shard was made of, and nothing else.
        roll: Its ``max_bytes`` says how much memory the encoder has.
        compression: Of the pages.
        provenance: JSON text for the footer.
    """
    made: list[NewShard] = []
    maker = ShardMaker(made.append, roll=roll, compression=compression, provenance=provenance)
    rows = RowCollector(maker, roll=roll)
    rows.use(schema)
    logged = LogFrames(schema)
    for frame in frames:
        rows.append(logged.decode(frame.payload))
    rows.finish()
    (shard,) = made
    return shard
