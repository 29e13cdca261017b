"""`DatasetWriter`: what the writers of data sets share; they differ in the `Encoder` that makes their shards.

Rows are logged by `write` and collected; shards are made and stored in the background.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from rlio.interfaces import Batch, OutputWriter
from rlio.schemas.provenance import Provenance
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage
from rlio.storage.shard_log import ShardLog, WriteLedger
from rlio.storage.spool import SpoolLike, parse_spool
from rlio.storage.wal import Sync
from rlio.writers.age_timer import AgeTimer
from rlio.writers.encoder import Encoder
from rlio.writers.recovery import WriterLog, recover_before_writing, recover_interrupted

__all__ = ["DatasetWriter"]


class DatasetWriter(OutputWriter):
    """Base of the writers of data sets.

    Args:
        root: Folder of the data set: a path or any fsspec URL.
        encoder: Makes the encoder, given the log that takes its shards.
        spool, sync, writer_id, worker_index, spaces, provenance, storage_options: See `rlio.ParquetWriter`.

    Raises:
        OptionError: An option is illegal, or ``writer_id`` has rows.
        UnknownName: No filesystem has the URL's scheme.
        PublishError: Nothing can be stored, or logged, there.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        encoder: Callable[[ShardLog], Encoder[Any]],
        *,
        spool: SpoolLike,
        sync: Sync | None,
        writer_id: str | None,
        worker_index: int,
        spaces: Mapping[str, tuple[Any, Any]] | None,
        provenance: Provenance,
        storage_options: dict[str, object] | None,
    ) -> None:
        self._stored = provenance.stored
        self._spaces = provenance.spaces_to_json(spaces)
        kept = parse_spool(spool, sync)
        if writer_id is not None:  # Of which there may be a log.
            recover_before_writing(root, kept, storage_options=storage_options)
        self._log = ShardLog(
            root,
            writer_id=writer_id,
            worker_index=worker_index,
            storage_options=storage_options,
            spool=kept,
        )
        if writer_id is None:
            # After this writer can be seen: followers must not find every writer closed in between.
            recover_before_writing(root, kept, storage_options=storage_options)
        self.durable = self._log.is_durable
        self.patience = None if kept is None else kept.publish_seconds
        self._encoder = encoder(self._log)
        self._timer = AgeTimer(self._encoder.roll.max_seconds, self._on_timer)
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
        self._encoder.check()
        self._make_room()
        encoder = self._encoder
        schema = encoder.schema_after(batch, spaces=self._spaces, stored=self._stored)
        if not schema.policies:
            return
        # Everything that can be wrong with the batch is found here, before anything changes.
        parts = encoder.cut(batch, schema) if batch.agent_steps() else []
        if schema is not encoder.schema:
            self._log.check_schema(schema)
        encoder.start()
        with self._log.taking():
            if schema is not encoder.schema:
                self._timer.stop()
                encoder.use(schema)
            if parts:
                self._take(parts, schema)

    def _take(self, parts: list[Any], schema: Schema) -> None:
        """Log the parts of a batch and collect them."""
        encoder = self._encoder
        if self.durable:
            frames = [(encoder.to_frame(part), encoder.rows_of(part)) for part in parts]
            self._log.log(frames, schema, header={**encoder.header, "shard_rows": encoder.shard_rows})
        for part in parts:
            encoder.append(part)
            self._log.received += encoder.rows_of(part)
        self._timer.start()

    def _make_room(self) -> None:
        """Publish first what can be neither logged nor held in memory any longer.

        Raises:
            PublishError: It cannot be published; nothing new is to be taken.
        """
        journal = self._log.journal
        if journal is None:
            if self._log.waiting_bytes >= self._encoder.roll.max_bytes:
                self._log.publish()
        elif journal.failure is not None:  # A sync has failed: the log no longer protects what is in it.
            self._flush()
        elif not journal.has_room():
            self._finish()
            self._log.wait_for_room()

    def _finish(self) -> None:
        """End the open shard, if it has rows; it is stored in the background."""
        self._timer.stop()
        self._encoder.finish()

    def _flush(self) -> None:
        self._log.check_process()
        self._timer.stop()
        if self._log.interrupted and self.durable:
            self._encoder.close()
            recover_interrupted(self._log, timeout=self._seconds_left())
            return
        self._encoder.store(self._seconds_left())

    def _close(self) -> None:
        self._timer.stop()
        self._encoder.close()
        if self._log.interrupted:
            if not self.durable:  # Else the flush has recovered and closed the log.
                self._log.close(seal_at=self.rows_published, timeout=self._seconds_left())
                self._log.check_interrupted()
            return
        self.ledger.check(uri=self.storage.uri)
        self._log.close(seal_at=self._log.received, timeout=self._seconds_left())

    def _on_timer(self) -> None:
        with self._lock:
            if not self._closed and not self._log.interrupted:
                self._finish()
