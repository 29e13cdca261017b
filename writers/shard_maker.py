"""Makes row groups from rows of one schema, and whole Parquet shards from row groups, in one thread."""

from __future__ import annotations

# At its first array, pyarrow imports pandas if installed, and pandas imports this module. That import fails
# once the interpreter begins to exit, which is when a writer that was left open may make its first array.
import concurrent.futures.thread  # noqa: F401
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from itertools import chain, islice, repeat

import numpy as np

from rlio.errors import OptionError
from rlio.log.publisher import NewShard
from rlio.log.wal import Frame
from rlio.schemas.log_frames import LogFrames
from rlio.schemas.parquet import Compression, ShardEncoder, group_bytes
from rlio.schemas.row_groups import GroupBuffer, Piece, RowGroup, Texts
from rlio.schemas.schema import Schema
from rlio.storage.local import PendingFile
from rlio.writers.background import done_at_once
from rlio.writers.roll import Roll

__all__ = ["RowGroups", "ShardMaker", "check_memory"]

# Room for the row group that fills a shard, and for the footer. Untouched memory costs nothing.
_SPARE_BYTES = 96 << 20


def check_memory(roll: Roll) -> None:
    """Refuse shards for which there is no memory, before a row is taken: they are encoded in memory.

    Raises:
        OptionError: ``roll.max_bytes`` is too large.
    """
    try:
        np.empty(roll.max_bytes + _SPARE_BYTES, np.uint8)
    except (MemoryError, ValueError) as error:
        raise OptionError(
            f"Roll.max_bytes={roll.max_bytes}: a shard is encoded in memory, and this process cannot have as "
            f"much ({error}); expected less"
        ) from error


class ShardMaker:
    """Encodes row groups in the calling thread, and hands over whole Parquet shards.

    Args:
        put: Called with each shard.
        roll: Its ``max_bytes`` ends a shard, and decides an encoder's memory.
        compression: Compression of the pages.
        provenance: JSON text for every footer.
        begin: Called before a shard begins; returns a file that also gets its bytes, or None.
        on_end: Called when ``max_bytes`` has ended a shard.
        checksum: Runs functions one after the other, perhaps in another thread.
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
        #: The earlier schemas of the open shard's first rows, in the log.
        self._earlier: tuple[tuple[Schema, int], ...] = ()

    def add(self, buffer: GroupBuffer) -> GroupBuffer:
        """Encode the rows of a buffer, and return the buffer empty."""
        self.encode(buffer.take(), buffer.schema)
        return buffer

    def encode(self, group: RowGroup, schema: Schema) -> None:
        """Encode a group; end the open shard before or after it as needed."""
        compression = self._compression.of_group(group_bytes(group, schema))
        if self._encoder is not None and (
            self._encoder.schema is not schema
            or self._encoder.compression != compression
            or not self._encoder.has_room(group)
        ):
            self.finish()
            self._on_end()
        if self._encoder is None:
            self._encoder, self._earlier = self._new_encoder(group, schema, compression), group.earlier
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
                remake=partial(self._remade, encoder.schema, self._earlier),
            )
        )

    def abandon(self) -> None:
        """Drop the open shard."""
        if self._pending is not None:
            self._pending.discard()

    def _remade(
        self, schema: Schema, earlier: tuple[tuple[Schema, int], ...], frames: Iterable[Frame]
    ) -> NewShard:
        """Make a shard again from its frames in a log, whose first rows are logged under earlier schemas."""
        made: list[NewShard] = []
        maker = ShardMaker(
            made.append, roll=self._roll, compression=self._compression, provenance=self._provenance
        )
        schemas = chain.from_iterable(repeat(each, rows) for each, rows in earlier)
        groups, logged = RowGroups(schema, maker.add), LogFrames(schema)
        for frame in frames:
            own = next(islice(schemas, frame.rows - 1, None), schema)
            if own is not logged.schema:
                groups.use(own)
                logged = LogFrames(own)
            groups.append(logged.decode(frame.payload))
        groups.finish()
        maker.finish()
        (shard,) = made
        return shard

    def _new_encoder(self, group: RowGroup, schema: Schema, compression: Compression) -> ShardEncoder:
        """An encoder with enough memory for the group."""
        self._pending = self._begin()
        size = self._roll.max_bytes + _SPARE_BYTES
        while True:
            encoder = ShardEncoder(
                schema,
                compression=compression,
                levels=compression.levels(group, schema),
                provenance=self._provenance,
                memory=np.empty(size, np.uint8),
                submit=self._checksum,
                tee=None if self._pending is None else self._pending.write,
            )
            if encoder.has_room(group):
                return encoder
            size *= 2


class RowGroups:
    """Collects the rows of one schema into row groups; the end of a group depends only on the rows.

    Args:
        schema: The rows' schema.
        add: Called with each full buffer; returns an empty one of the same schema.
    """

    def __init__(self, schema: Schema, add: Callable[[GroupBuffer], GroupBuffer]) -> None:
        self._buffer = GroupBuffer(schema)
        self._add = add

    @property
    def schema(self) -> Schema:
        """The schema of the open group."""
        return self._buffer.schema

    @property
    def rows(self) -> int:
        """Rows of the open group."""
        return self._buffer.rows

    @property
    def room(self) -> int:
        """Rows that still fit the open group."""
        return self._buffer.room

    def use(self, schema: Schema) -> None:
        """Continue with another schema, which must hold the rows of the open group; see `Schema.holds`."""
        if schema is not self.schema:
            self._buffer = self._buffer.extended(schema)

    def append(self, pieces: list[Piece]) -> None:
        """Take the pieces of one row group; end the open group before or after them as needed."""
        policies = self._buffer.schema.policies
        texts = [Texts.of(piece.arrays, policies[piece.policy]) for piece in pieces]
        if self._buffer.rows and not self._buffer.fits(sum(piece.rows for piece in pieces), texts):
            self.finish()
        for piece, each in zip(pieces, texts, strict=True):
            self._buffer.append(piece, each)
        if self._buffer.is_full:
            self.finish()

    def finish(self) -> None:
        """End the open group, if it has rows."""
        if self._buffer.rows:
            self._buffer = self._add(self._buffer)
