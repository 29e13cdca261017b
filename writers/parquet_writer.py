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
from collections.abc import Iterator, Mapping
from typing import Any

from rlio.batch import MultiAgentBatch
from rlio.errors import SchemaConflict
from rlio.interfaces import Batch, OutputWriter
from rlio.schemas.parquet import Compression
from rlio.schemas.provenance import Provenance
from rlio.schemas.row_groups import GroupBuffer, Piece, pieces_of
from rlio.schemas.schema import Schema
from rlio.storage.shard_log import ShardLog
from rlio.writers.age_timer import AgeTimer
from rlio.writers.roll import Roll
from rlio.writers.shard_builder import ShardBuilder

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
        self._roll = roll or Roll()
        self._log = ShardLog(
            root, writer_id=writer_id, worker_index=worker_index, storage_options=storage_options
        )
        self._provenance = provenance or Provenance()
        self._builder = ShardBuilder(
            self._log,
            roll=self._roll,
            compression=Compression.parse(compression),
            provenance=self._provenance.text,
        )
        self._spaces = self._provenance.spaces_to_json(spaces)
        self._schema: Schema | None = None
        self._buffer: GroupBuffer | None = None
        #: Rows since a shard was ended here; the builder may have ended it earlier, at ``max_bytes``.
        self._shard_rows = 0
        self._timer = AgeTimer(self._roll.max_seconds, self._on_timer)
        super().__init__()  # Last: from here on the writer is closed at exit, which needs all of it.

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
            self._builder.store()
        schema = self._schema_for(batch)
        if not schema.policies:
            return
        # Everything that can be wrong with the batch is found here, before anything changes.
        limit = min(schema.group_rows, self._roll.max_rows or schema.group_rows)
        parts = (
            pieces_of(batch, schema, rooms=self._rooms(schema), limit=limit) if batch.agent_steps() else []
        )
        if schema is not self._schema:
            self._log.check_schema(schema)
            self._finish()
            self._schema, self._buffer = schema, GroupBuffer(schema)
        for pieces in parts:
            self._append(pieces)
        if parts:
            self._timer.start()

    def _schema_for(self, batch: Batch) -> Schema:
        """The schema after ``batch``: from the first batch, and with new policies from later ones."""
        if self._schema is None:
            return Schema.of(batch, spaces=self._spaces, stored=self._provenance.stored)
        if self._schema.multi_agent != isinstance(batch, MultiAgentBatch):
            raise SchemaConflict(
                f"a {type(batch).__name__} after batches of the other kind: wrap SampleBatches with "
                "as_multi_agent(), or open another writer"
            )
        return self._schema.extended(batch, spaces=self._spaces)

    def _rooms(self, schema: Schema) -> Iterator[int]:
        """Rows that still fit the open row group and shard, then those that fit the groups after it."""
        goes_on = schema is self._schema and self._buffer is not None
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

    def _append(self, pieces: list[Piece]) -> None:
        """Add the pieces of one row group, ending the group or shard before and after as needed."""
        assert self._buffer is not None
        rows = sum(piece.rows for piece in pieces)
        max_rows = self._roll.max_rows
        if max_rows is not None and self._shard_rows and self._shard_rows + rows > max_rows:
            self._finish()
        elif self._buffer.rows and rows > self._buffer.room:
            self._buffer = self._builder.add(self._buffer)
        for piece in pieces:
            self._buffer.append(piece)
        self._shard_rows += rows
        if max_rows is not None and self._shard_rows >= max_rows:
            self._finish()
        elif self._buffer.is_full:
            self._buffer = self._builder.add(self._buffer)

    def _hand_over(self) -> None:
        """Give the collected rows to the background."""
        self._timer.stop()
        self._shard_rows = 0
        if self._buffer is not None and self._buffer.rows:
            self._buffer = self._builder.add(self._buffer)

    def _finish(self) -> None:
        """End the open shard; it is stored in the background, or stays queued where it cannot be."""
        self._hand_over()
        self._builder.finish()

    def _flush(self) -> None:
        self._hand_over()
        self._builder.store()

    def _close(self) -> None:
        self._timer.stop()
        self._builder.close()

    def _on_timer(self) -> None:
        with self._lock:
            if not self._closed:
                self._finish()
