"""Rows of one schema into row groups, and row groups into whole Parquet shards, in the calling thread."""

from __future__ import annotations

# pyarrow imports pandas at its first array, where there is one, and pandas imports this, which fails once the
# interpreter begins to exit: that is when the first array of a writer that was left open is made.
import concurrent.futures.thread  # noqa: F401
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

import numpy as np

from rlio.log.publisher import NewShard
from rlio.log.wal import Frame
from rlio.schemas.log_frames import LogFrames
from rlio.schemas.parquet import Compression, ShardEncoder
from rlio.schemas.row_groups import GroupBuffer, Piece, RowGroup
from rlio.schemas.schema import Schema
from rlio.storage.local import PendingFile
from rlio.writers.background import done_at_once
from rlio.writers.roll import Roll

__all__ = ["RowGroups", "ShardMaker"]

# Room for the row group that fills a shard and for the footer. Memory that is not written to costs nothing.
_SPARE_BYTES = 96 << 20


class ShardMaker:
    """Encodes row groups, in the calling thread, and hands over whole Parquet shards.

    Args:
        put: Given each shard.
        roll: Its ``max_bytes`` ends a shard here, and says how much memory an encoder has.
        compression: Of the pages.
        provenance: JSON text for every footer.
        begin: Called before a shard is begun; gives a file that its bytes go to, too, or None.
        on_end: Called when ``max_bytes`` has ended a shard.
        checksum: Runs a function, perhaps in another thread, one after the other.
    """

    def __init__(
        self,
        put: Callable[[NewShard], object],
        *,
        roll: Roll,
        compression: Compression,
        provenance: str,
        begin: Callable[[], PendingFile | None] = lambda: None,
        on_end: Callable[[], object] = lambda: None,
        checksum: Callable[[Callable[[], int]], Future[int]] = done_at_once,
    ) -> None:
        self._put = put
        self._begin = begin
        self._roll = roll
        self._compression = compression
        self._provenance = provenance
        self._on_end = on_end
        self._checksum = checksum
        self._encoder: ShardEncoder | None = None
        self._pending: PendingFile | None = None

    def add(self, buffer: GroupBuffer) -> GroupBuffer:
        """Encode the rows of a buffer, and give it back, empty."""
        self.encode(buffer.take(), buffer.schema)
        return buffer

    def encode(self, group: RowGroup, schema: Schema) -> None:
        """Encode a group, ending the open shard before and after as needed."""
        if self._encoder is not None and (
            self._encoder.schema is not schema or not self._encoder.has_room(group)
        ):
            self.finish()
            self._on_end()
        if self._encoder is None:
            self._encoder = self._new_encoder(group, schema)
        self._encoder.add(group)
        if self._encoder.encoded_bytes >= self._roll.max_bytes:
            self.finish()
            self._on_end()

    def finish(self) -> None:
        """End the open shard, if there is one, and hand it over."""
        encoder, self._encoder = self._encoder, None
        pending, self._pending = self._pending, None
        if encoder is None:
            return
        shard = encoder.finish()
        self._put(
            NewShard(
                data=shard.data,
                rows=shard.rows,
                suffix="parquet",
                footer_crc32=shard.footer_crc32,
                crc32=shard.crc32,
                schema=encoder.schema,
                pending=pending,
                remake=partial(
                    _remake,
                    encoder.schema,
                    roll=self._roll,
                    compression=self._compression,
                    provenance=self._provenance,
                ),
            )
        )

    def abandon(self) -> None:
        """Drop the open shard."""
        if self._pending is not None:
            self._pending.discard()

    def _new_encoder(self, group: RowGroup, schema: Schema) -> ShardEncoder:
        """An encoder whose memory has room for the group."""
        self._pending = self._begin()
        size = self._roll.max_bytes + _SPARE_BYTES
        while True:
            encoder = ShardEncoder(
                schema,
                compression=self._compression,
                provenance=self._provenance,
                memory=np.empty(size, np.uint8),
                submit=self._checksum,
                tee=None if self._pending is None else self._pending.write,
            )
            if encoder.has_room(group):
                return encoder
            size *= 2


class RowGroups:
    """Collects the rows of one schema into row groups; where one ends depends on the rows alone.

    Args:
        schema: Of the rows.
        add: Given each full buffer; gives an empty one of the same schema to go on with.
    """

    def __init__(self, schema: Schema, add: Callable[[GroupBuffer], GroupBuffer]) -> None:
        self._buffer = GroupBuffer(schema)
        self._add = add

    @property
    def rows(self) -> int:
        """Rows of the open group."""
        return self._buffer.rows

    @property
    def room(self) -> int:
        """Rows that the open group still takes."""
        return self._buffer.room

    def append(self, pieces: list[Piece]) -> None:
        """Take the pieces of one row group, ending the open group before and after as needed."""
        if self._buffer.rows and sum(piece.rows for piece in pieces) > self._buffer.room:
            self.finish()
        for piece in pieces:
            self._buffer.append(piece)
        if self._buffer.is_full:
            self.finish()

    def finish(self) -> None:
        """End the open group, if it has rows."""
        if self._buffer.rows:
            self._buffer = self._add(self._buffer)


def _remake(
    schema: Schema, frames: Iterable[Frame], *, roll: Roll, compression: Compression, provenance: str
) -> NewShard:
    """The shard that a `ShardMaker` of these options has made of the frames of a log, which are all of it."""
    made: list[NewShard] = []
    maker = ShardMaker(made.append, roll=roll, compression=compression, provenance=provenance)
    groups, logged = RowGroups(schema, maker.add), LogFrames(schema)
    for frame in frames:
        groups.append(logged.decode(frame.payload))
    groups.finish()
    maker.finish()
    (shard,) = made
    return shard
