"""`ParquetWriter`: compressed, columnar, self-certifying shards.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://parquet-writer-example") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.zeros((3, 4), np.float32), rewards=np.ones(3, np.float32)))
    >>> len(rlio.open_dataset("memory://parquet-writer-example"))
    3
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from rlio.batch import MultiAgentBatch
from rlio.errors import SchemaConflict
from rlio.interfaces import Batch, OutputWriter
from rlio.schemas.parquet import Compression, ShardEncoder
from rlio.schemas.provenance import Provenance
from rlio.schemas.row_groups import GroupBuffer, Piece, pieces_of
from rlio.schemas.schema import Schema
from rlio.schemas.streams import StreamTable
from rlio.storage.shard_log import ShardLog
from rlio.writers.roll import Roll

__all__ = ["ParquetWriter"]


class ParquetWriter(OutputWriter):
    """Writes batches into a data set of Parquet shards, on any filesystem.

    Any number of writers share a root without knowing of each other. Rows are collected, encoded a row group
    at a time, and stored as a whole shard when `roll` says so, at `flush` and at `close`; until then they are
    in memory only (``durable`` is False).

    Args:
        root: Folder of the data set: a path or any fsspec URL.
        roll: When to store a shard.
        compression: ``"codec:level"`` (zstd, lz4, snappy, gzip, brotli, none), or a `Compression`.
        writer_id: For jobs and tests that want fixed names; it must have no rows yet. None draws one.
        worker_index: Goes into a drawn id.
        spaces: Policy id -> (observation space, action space), stored with the schema.
        provenance: What made the data, stored in every shard.
        storage_options: For fsspec.

    Raises:
        OptionError: An option is illegal, or ``writer_id`` has rows.
        UnknownName: No filesystem has the URL's scheme.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        roll: Roll | None = None,
        compression: str | Compression = "zstd:1",
        writer_id: str | None = None,
        worker_index: int = 0,
        spaces: Mapping[str, tuple[Any, Any]] | None = None,
        provenance: Provenance | None = None,
        storage_options: dict[str, object] | None = None,
    ) -> None:
        super().__init__()
        self._roll = roll or Roll()
        self._compression = Compression.parse(compression)
        self._log = ShardLog(
            root, writer_id=writer_id, worker_index=worker_index, storage_options=storage_options
        )
        self._provenance = provenance or Provenance()
        self._spaces = self._provenance.spaces_to_json(spaces)
        self._schema: Schema | None = None
        self._buffer: GroupBuffer | None = None
        self._encoder: ShardEncoder | None = None
        self._streams = StreamTable()
        self._timer: threading.Timer | None = None

    @property
    def writer_id(self) -> str:
        """The id under which this writer's shards lie."""
        return self._log.writer_id

    @property
    def rows_published(self) -> int:
        """Rows that every reader can see."""
        return self._log.rows_published

    @property
    def bytes_published(self) -> int:
        """Bytes of the shards that every reader can see."""
        return self._log.bytes_published

    def _write(self, batch: Batch) -> None:
        # Rows of earlier calls that could not be stored are tried again here, before anything new is taken.
        if self._log.waiting_bytes >= self._roll.max_bytes:
            self._log.publish()
        self._adopt(batch)
        if len(batch) == 0 or self._schema is None or self._buffer is None:
            return
        for pieces in pieces_of(batch, self._schema, room=self._room()):
            self._append(pieces)
        self._start_timer()

    def _adopt(self, batch: Batch) -> None:
        """Take the schema from the first batch, and new policies from later ones."""
        schema = self._schema
        if schema is None:
            schema = Schema.of(batch, spaces=self._spaces, stored=self._provenance.stored)
        elif schema.multi_agent != isinstance(batch, MultiAgentBatch):
            raise SchemaConflict(
                f"a {type(batch).__name__} after batches of the other kind: wrap SampleBatches with "
                "as_multi_agent(), or open another writer"
            )
        else:
            schema = schema.extended(batch, spaces=self._spaces)
        if schema is self._schema or not schema.policies:
            return
        self._store()
        self._schema, self._buffer = schema, GroupBuffer(schema)

    def _room(self) -> int:
        """Rows that still fit the open row group and the open shard."""
        assert self._buffer is not None
        room = self._buffer.room
        if self._roll.max_rows is not None:
            room = min(room, self._roll.max_rows - self._open_rows())
        return room

    def _open_rows(self) -> int:
        buffered = self._buffer.rows if self._buffer else 0
        return buffered + (self._encoder.rows if self._encoder else 0)

    def _append(self, pieces: list[Piece]) -> None:
        """Add the pieces of one row group, finishing the group or shard before and after as needed."""
        assert self._buffer is not None
        rows = sum(piece.rows for piece in pieces)
        max_rows = self._roll.max_rows
        if max_rows is not None and self._open_rows() and self._open_rows() + rows > max_rows:
            self._roll_shard()
        elif self._buffer.rows and rows > self._buffer.room:
            self._encode_group()
        for piece in pieces:
            self._buffer.append(piece, self._streams)
        if self._buffer.is_full:
            self._encode_group()
        encoded = self._encoder.encoded_bytes if self._encoder else 0
        if encoded >= self._roll.max_bytes or (max_rows is not None and self._open_rows() >= max_rows):
            self._roll_shard()

    def _encode_group(self) -> None:
        """Move the collected rows into the open shard."""
        assert self._buffer is not None
        assert self._schema is not None
        if self._encoder is None:
            self._encoder = ShardEncoder(
                self._schema, compression=self._compression, provenance=self._provenance.text
            )
        self._encoder.add(self._buffer.take())

    def _finish_shard(self) -> None:
        """Hand the open shard, if it has rows, over to the log."""
        if self._buffer is not None and self._buffer.rows:
            self._encode_group()
        if self._encoder is not None and self._schema is not None:
            shard = self._encoder.finish(self._streams.streams)
            self._log.append(
                shard.data,
                rows=shard.rows,
                suffix="parquet",
                footer_crc32=shard.footer_crc32,
                schema=self._schema,
            )
            self._encoder = None
            self._streams = StreamTable()
        self._stop_timer()

    def _roll_shard(self) -> None:
        """Finish a shard in the middle of a write: what cannot be stored now stays queued."""
        self._finish_shard()
        self._log.try_publish()

    def _store(self) -> None:
        self._finish_shard()
        self._log.publish()

    def _flush(self) -> None:
        self._store()

    def _close(self) -> None:
        self._stop_timer()

    def _start_timer(self) -> None:
        """Bound the age of rows that are only in memory, also when no further write comes."""
        if self._timer is None and self._roll.max_seconds is not None and self._open_rows():
            self._timer = threading.Timer(self._roll.max_seconds, self._on_timer)
            self._timer.daemon = True
            self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        with self._lock:
            if not self._closed and self._timer is not None:
                self._roll_shard()
