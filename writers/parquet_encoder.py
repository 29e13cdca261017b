"""`ParquetEncoder`: makes Parquet shards from rows.

One thread a writer encodes row groups and hands over shards, in the order of the rows. Memory holds at most
two row groups and one encoded shard; a second shard if the store is slow or fails; more only if it fails and
there is no log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlio.batch import Batch
from rlio.log.publisher import Publisher
from rlio.log.wal import Buffer, Frame
from rlio.schemas.log_frames import LogFrames
from rlio.schemas.parquet import Compression, check_footer
from rlio.schemas.row_groups import GroupBuffer, Piece, pieces_of, pooled
from rlio.schemas.schema import Schema
from rlio.storage.local import PendingFile
from rlio.writers.background import Worker
from rlio.writers.encoder import Encoder
from rlio.writers.roll import Roll
from rlio.writers.shard_maker import RowGroups, ShardMaker

__all__ = ["ParquetEncoder"]

# Seconds that the encoding of a shard waits for the store to take the previous one.
_SHORTLY = 0.2


class ParquetEncoder(Encoder[list[Piece]]):
    """Makes Parquet shards; see `Encoder`. A part holds the pieces of one row group.

    Args:
        publisher: Numbers and stores the shards.
        roll: Its ``max_bytes`` ends a shard in the background, at a time that varies. Such an end does not
            reset the count of rows towards ``max_rows``.
        compression: Compression of the pages.
        provenance: JSON text for every footer.
    """

    has_info_keys: bool = True

    def __init__(
        self, publisher: Publisher, *, roll: Roll, compression: Compression, provenance: str
    ) -> None:
        super().__init__(publisher, roll=roll, provenance=provenance)
        self._compression = compression
        # A separate thread, because encoding must not wait: it checksums encoded bytes and writes them to
        # disk.
        self._checksummer = Worker("rlio-checksum")
        self._maker = ShardMaker(
            lambda shard: publisher.submit(shard),
            roll=roll,
            compression=compression,
            provenance=provenance,
            begin=self._begin,
            on_end=lambda: self._cut(begins_shard=False),
            checksum=self._checksummer.submit,
        )
        self._groups: RowGroups | None = None
        self._frames: LogFrames | None = None
        self._spare: GroupBuffer | None = None

    @classmethod
    def from_header(cls, publisher: Publisher, roll: Roll, header: Mapping[str, Any]) -> ParquetEncoder:
        """Make the encoder that wrote ``header``."""
        codec, level = header["compression"]
        return cls(
            publisher, roll=roll, compression=Compression(codec, level), provenance=str(header["provenance"])
        )

    @property
    def header(self) -> dict[str, Any]:
        """See `Encoder`."""
        return {
            **super().header,
            "kind": "parquet",
            "compression": [self._compression.codec, self._compression.level],
        }

    def cut(self, batch: Batch, schema: Schema) -> list[list[Piece]]:
        """See `Encoder`."""
        if schema is not self.schema:
            check_footer(schema, self._provenance)
        limit = min(schema.group_rows, self.roll.max_rows or schema.group_rows)
        cut = pieces_of(batch, schema, rooms=self._rooms(schema), limit=limit)
        return [[pooled(piece, schema) for piece in pieces] for pieces in cut]

    def rows_of(self, part: list[Piece]) -> int:
        """See `Encoder`."""
        return sum(piece.rows for piece in part)

    def to_frame(self, part: list[Piece]) -> list[Buffer]:
        """See `Encoder`."""
        assert self._frames is not None
        return [*self._frames.encode(part)]

    def from_frame(self, frame: Frame) -> list[Piece]:
        """See `Encoder`."""
        assert self._frames is not None
        return self._frames.decode(frame.payload)

    def resume(self, shard_rows: int, stored: Iterable[int]) -> None:
        """See `Encoder`."""
        self.shard_rows: int = shard_rows
        most = self.roll.max_rows
        for rows in stored:
            if most is not None and self.shard_rows and self.shard_rows + rows > most:
                self.shard_rows = 0
            self.shard_rows += rows
            if most is not None and self.shard_rows >= most:
                self.shard_rows = 0

    def start(self) -> None:
        """See `Encoder`."""
        super().start()
        self._checksummer.start()

    def goes_on(self, schema: Schema) -> bool:
        """See `Encoder`: rows of the open row group get an extended schema; those before it end a shard."""
        groups = self._groups
        return super().goes_on(schema) or (
            groups is not None and 0 < groups.rows < schema.group_rows and schema.holds(groups.schema)
        )

    def use(self, schema: Schema) -> None:
        """See `Encoder`."""
        if schema is not self.schema:
            super().use(schema)
            self._frames = LogFrames(schema)

    def close(self) -> None:
        """See `Encoder`."""
        super().close()
        self._checksummer.stop()
        self._maker.abandon()

    def _add(self, part: list[Piece]) -> None:
        assert self.schema is not None
        if self._groups is None:
            self._groups = RowGroups(self.schema, self._encode)
        # Only now: rows that the log refused must not change the shard of those before.
        self._groups.use(self.schema)
        self._groups.append(part)

    def _finish(self) -> None:
        if self._groups is not None:
            self._groups.finish()
            self._wait()
            self._jobs.submit(self._maker.finish)

    def _encode(self, buffer: GroupBuffer) -> GroupBuffer:
        """Encode the rows of a buffer in the background, and return an empty buffer."""
        group = buffer.take()
        try:
            self._wait()
        finally:
            # Also after an interrupted wait: the rows have left their buffer, and exist nowhere else.
            self._jobs.submit(lambda: self._maker.encode(group, buffer.schema))
        spare, self._spare = self._spare, buffer
        return spare if spare is not None and spare.schema is buffer.schema else GroupBuffer(buffer.schema)

    def _begin(self) -> PendingFile | None:
        # A local disk soon takes the previous shard: memory then holds one shard instead of two.
        self._publisher.wait(_SHORTLY)
        return self._publisher.pending_file()

    def _rooms(self, schema: Schema) -> Iterator[int]:
        """Yield the rows that fit the open row group and shard, then those that fit the later groups."""
        goes_on = self._groups is not None and self.goes_on(schema)
        group = schema.group_rows - (self._groups.rows if goes_on and self._groups is not None else 0)
        most = self.roll.max_rows
        shard = None if most is None else most - (self.shard_rows if goes_on else 0)
        while True:
            room = group if shard is None else min(group, shard)
            yield room
            group = group - room or schema.group_rows
            if most is not None and shard is not None:
                shard -= room
                if not shard:
                    group, shard = schema.group_rows, most
