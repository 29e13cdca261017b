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
from collections.abc import Mapping
from functools import partial
from typing import Any

from rlio.interfaces import Batch, OutputWriter
from rlio.options import checked_keywords, expected
from rlio.schemas.log_frames import LogFrames
from rlio.schemas.parquet import Compression
from rlio.schemas.provenance import Provenance
from rlio.schemas.row_groups import Piece
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage
from rlio.storage.shard_log import ShardLog, WriteLedger
from rlio.storage.wal import Sync
from rlio.writers.age_timer import AgeTimer
from rlio.writers.recovery import WriterLog, parquet_header, recover_before_writing, recover_interrupted
from rlio.writers.roll import Roll
from rlio.writers.row_collector import RowCollector, remake_parquet
from rlio.writers.shard_builder import ShardBuilder
from rlio.writers.spooling import SpoolLike, make_room, parse_spool, schema_after

__all__ = ["ParquetWriter"]


class ParquetWriter(OutputWriter):
    """Writes batches into a data set of Parquet shards, on any filesystem.

    Any number of writers share a root without knowing of each other. Rows are logged by `write` and
    collected; in the background they are encoded a row group at a time, and stored as a whole shard when
    `roll` says so, at `flush` and at `close`. What a dead writer of this machine has left in its log is
    published when the next writer opens the root, and by `rlio recover`.

    Args:
        root: Folder of the data set: a path or any fsspec URL.
        roll: When to store a shard.
        compression: ``"codec:level"`` (zstd, lz4, snappy, gzip, brotli, none), or a `Compression`.
        spool: The write-ahead log: "auto", a folder, a `Spool`, or None: rows are safe once published.
        sync: When logged rows become safe against power failure: "interval", "always" or "never"; see
            `Spool`. None: as the `Spool` says.
        writer_id: For jobs and tests that want fixed names; it must have no rows yet. None draws one.
        worker_index: Goes into a drawn id.
        spaces: Policy id -> (observation space, action space), stored with the schema.
        provenance: What made the data, stored in every shard.
        storage_options: For fsspec.

    A store that is down when the writer opens, or that hangs, does not refuse it where rows can wait: in a
    log that is not on the root's own disk, under a drawn id. Opening then takes about a minute at most.

    Raises:
        OptionError: An option is illegal, or ``writer_id`` has rows.
        UnknownName: No filesystem has the URL's scheme.
        PublishError: Nothing can be stored, or logged, there.
    """

    @checked_keywords
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        roll: Roll | None = None,
        compression: str | Compression = "zstd:1",
        spool: SpoolLike = "auto",
        sync: Sync | None = None,
        writer_id: str | None = None,
        worker_index: int = 0,
        spaces: Mapping[str, tuple[Any, Any]] | None = None,
        provenance: Provenance | None = None,
        storage_options: dict[str, object] | None = None,
    ) -> None:
        self._roll = expected(roll, Roll, "roll")
        codec = Compression.parse(compression)
        self._provenance = provenance or Provenance()
        self._spaces = self._provenance.spaces_to_json(spaces)
        kept = parse_spool(spool, sync)
        if writer_id is not None:  # Of which there may be a log.
            recover_before_writing(root, kept, storage_options=storage_options)
        self._log = ShardLog(
            root,
            writer_id=writer_id,
            worker_index=worker_index,
            storage_options=storage_options,
            spool=kept,
            about=parquet_header(codec, roll=self._roll, provenance=self._provenance.text),
            remake=partial(
                remake_parquet, roll=self._roll, compression=codec, provenance=self._provenance.text
            ),
        )
        if writer_id is None:
            # After this writer is there to see: who follows must not find every writer closed in between.
            recover_before_writing(root, kept, storage_options=storage_options)
        self.durable = self._log.is_durable
        self.patience = None if kept is None else kept.publish_seconds
        self._builder = ShardBuilder(
            self._log,
            roll=self._roll,
            compression=codec,
            provenance=self._provenance.text,
            on_end=lambda: self._log.cut(begins_shard=False),
        )
        self._rows = RowCollector(self._builder, roll=self._roll)
        self._frames: LogFrames | None = None
        self._timer = AgeTimer(self._roll.max_seconds, self._on_timer)
        self._log.on_log_failure(self._on_timer)
        super().__init__()  # Last: from here on the writer is closed at exit, which needs all of it.

    @property
    def writer_id(self) -> str:
        """The id under which this writer's shards lie."""
        return self._log.writer_id

    @property
    def storage(self) -> Storage:
        """The data set's folder."""
        return self._log.storage

    @property
    def rows_published(self) -> int:
        """Rows that every reader can see."""
        return self._log.rows_published

    @property
    def bytes_published(self) -> int:
        """Bytes of the shards that every reader can see."""
        return self._log.bytes_published

    @property
    def logs(self) -> tuple[WriterLog, ...]:
        """Where this writer's write-ahead log lies; empty without one."""
        journal = self._log.journal
        return () if journal is None else (WriterLog(self.storage, journal.path),)

    @property
    def ledger(self) -> WriteLedger:
        """Where the rows are that this writer was given."""
        return self._log.ledger

    def _write(self, batch: Batch) -> None:
        self._log.check_whole()
        self._builder.check()
        make_room(self._log, self._roll, store=self._builder.store, flush=self._flush, finish=self._finish)
        schema = schema_after(self._rows.schema, batch, spaces=self._spaces, stored=self._provenance.stored)
        if not schema.policies:
            return
        # Everything that can be wrong with the batch is found here, before anything changes.
        parts = self._rows.cut(batch, schema) if batch.agent_steps() else []
        if schema is not self._rows.schema:
            self._log.check_schema(schema)
        self._builder.start()
        with self._log.taking():
            if schema is not self._rows.schema:
                self._use(schema)
            if parts:
                self._take(parts, schema)

    def _take(self, parts: list[list[Piece]], schema: Schema) -> None:
        """Log the rows and collect them."""
        if self._frames is not None:
            frames = [(self._frames.encode(pieces), sum(piece.rows for piece in pieces)) for pieces in parts]
            self._log.log(frames, schema, shard_rows=self._rows.shard_rows)
        ended = self._rows.ended
        for pieces in parts:
            self._rows.append(pieces)
            self._log.received += sum(piece.rows for piece in pieces)
        if self._rows.ended > ended:
            self._log.cut(begins_shard=False)
        self._timer.start()

    def _use(self, schema: Schema) -> None:
        """Go on with a new schema."""
        self._timer.stop()
        self._rows.use(schema)
        self._log.cut(begins_shard=True)
        self._frames = LogFrames(schema) if self._log.is_durable else None

    def _finish(self) -> None:
        """End the open shard; it is stored in the background, or waits where it cannot be."""
        self._timer.stop()
        self._rows.finish()
        self._log.cut(begins_shard=True)

    def _flush(self) -> None:
        self._log.check_process()
        self._timer.stop()
        if self._log.interrupted and self.durable:
            self._builder.abandon()
            recover_interrupted(self._log, timeout=self._seconds_left())
            return
        self._rows.hand_over()
        self._log.cut(begins_shard=True)
        self._builder.store(self._seconds_left())

    def _close(self) -> None:
        self._timer.stop()
        if self._log.interrupted:
            self._builder.abandon()
            if not self.durable:  # Else the flush has recovered and closed the log.
                self._log.close(seal_at=self.rows_published, timeout=self._seconds_left())
                self._log.check_interrupted()
            return
        self._builder.close()
        self.ledger.check(uri=self._log.storage.uri)
        self._log.close(seal_at=self._log.received, timeout=self._seconds_left())

    def _on_timer(self) -> None:
        with self._lock:
            if not self._closed and not self._log.interrupted:
                self._finish()
