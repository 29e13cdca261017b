"""`DatasetWriter`: base of the writers of data sets; they differ in the `Encoder` that makes their shards.

`write` logs and collects rows. Background threads make and store shards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rlio.batch import Batch
from rlio.batch.pictures import pillow
from rlio.errors import LedgerError, OptionError, PublishError, RlioError, SchemaError, excerpt
from rlio.log.new_writer import open_publisher
from rlio.log.publisher import Publisher
from rlio.log.spool import SpoolLike, parse_spool
from rlio.log.wal import Buffer, Sync
from rlio.schemas.provenance import Provenance
from rlio.schemas.schema import Schema
from rlio.source.videos import keep_videos
from rlio.storage.filesystem import Storage
from rlio.writer import OutputWriter
from rlio.writers.background import AgeTimer
from rlio.writers.encoder import Encoder
from rlio.writers.ended_episodes import EndedEpisodes
from rlio.writers.recovery import WriterLog, recover_before_writing, recover_interrupted

__all__ = ["DatasetWriter", "checked_pictures"]


def checked_pictures(pictures: Mapping[str, Literal["png"]] | None) -> dict[str, Literal["png"]]:
    """Return the option ``pictures`` of a writer.

    Raises:
        OptionError: It is not a mapping of names to ``"png"``.
        MissingExtra: Pillow is not installed.
    """
    if pictures is None:
        return {}
    if not isinstance(pictures, Mapping) or not all(
        isinstance(name, str) and codec == "png" for name, codec in pictures.items()
    ):
        raise OptionError(
            f"pictures={excerpt(pictures)}: expected names of columns with 'png', such as "
            "{'obs/camera': 'png'}; frames are not encoded with loss"
        )
    if pictures:
        pillow()
    return dict(pictures)


class DatasetWriter(OutputWriter):
    """Base of the writers of data sets.

    Args:
        root: Folder of the data set: a path or any fsspec URL.
        encoder: Makes the encoder for a publisher, which takes its shards.
        spool, sync, writer_id, worker_index, spaces, pictures, provenance, storage_options: See
            `rlio.ParquetWriter`.

    Raises:
        OptionError: An option is illegal, or ``writer_id`` has rows already.
        UnknownName: No filesystem has the URL's scheme.
        PublishError: Rows cannot be stored, or logged, there.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        encoder: Callable[[Publisher], Encoder[Any]],
        *,
        spool: SpoolLike,
        sync: Sync | None,
        writer_id: str | None,
        worker_index: int,
        spaces: Mapping[str, tuple[Any, Any]] | None,
        pictures: Mapping[str, Literal["png"]] | None,
        provenance: Provenance,
        storage_options: dict[str, object] | None,
    ) -> None:
        self._stored = provenance.stored
        self._pictures = checked_pictures(pictures)
        self._spaces = provenance.spaces_to_json(spaces)
        kept = parse_spool(spool, sync)
        if writer_id is not None:  # An earlier process may have left a log of this writer.
            recover_before_writing(root, kept, storage_options=storage_options)
        self._publisher = open_publisher(
            root,
            writer_id=writer_id,
            worker_index=worker_index,
            storage_options=storage_options,
            spool=kept,
        )
        if writer_id is None:
            # Only after this writer is visible: followers must not find every writer closed in between.
            recover_before_writing(root, kept, storage_options=storage_options)
        self.durable: bool = self._publisher.log is not None
        self.patience: float | None = None if kept is None else kept.publish_seconds
        self._encoder = encoder(self._publisher)
        self._timer = AgeTimer(self._encoder.roll.max_seconds, self._on_timer)
        if self._publisher.log is not None:  # After a failed sync, only publishing makes rows safe.
            self._publisher.log.on_failure = self._on_timer
        self._episodes = EndedEpisodes()
        #: Digests of the videos that the root has, of the rows that were written.
        self._videos: set[bytes] = set()
        # Whether a `write()` was interrupted: the rows of its batch in memory are then unknown.
        self._interrupted = False
        super().__init__()  # Last: from here on the exit hook may close the writer, which needs all of it.

    def _describe(self) -> Iterator[str]:
        yield repr(self.storage.uri)
        yield from super()._describe()
        yield f"writer_id={self.writer_id!r}"

    @property
    def writer_id(self) -> str:
        """The id under which this writer's shards are stored."""
        return self._publisher.writer_id

    @property
    def storage(self) -> Storage:
        """The data set's folder."""
        return self._publisher.storage

    @property
    def rows_published(self) -> int:
        """Rows that every reader can see."""
        return self._publisher.rows_published

    @property
    def bytes_published(self) -> int:
        """Bytes of the shards that every reader can see."""
        return self._publisher.bytes_published

    @property
    def logs(self) -> tuple[WriterLog, ...]:
        """The place of this writer's write-ahead log; empty without a log."""
        log = self._publisher.log
        return () if log is None else (WriterLog(self.storage, log.path),)

    @property
    def seconds_waited(self) -> float:
        """Seconds that `write` has waited for room in the log."""
        log = self._publisher.log
        return 0.0 if log is None else log.waited

    def _write(self, batch: Batch) -> None:
        encoder, publisher = self._encoder, self._publisher
        publisher.check()
        if self._interrupted:
            raise PublishError(
                "an earlier write() was interrupted, which ends this writer: close() stores every row that "
                "was taken; open another writer",
                uri=self.storage.uri,
            )
        encoder.check()
        self._make_room()
        schema = encoder.schema_after(
            batch, spaces=self._spaces, stored=self._stored, pictures=self._pictures
        )
        if not schema.policies:
            return
        # Finds every error in the batch before anything changes.
        parts = encoder.cut(batch, schema) if batch.agent_steps() else []
        seen = self._episodes.check(batch, schema) if parts else {}
        if schema is not encoder.schema:
            publisher.check_schema(schema)
        if schema.has_videos:
            keep_videos(batch, self.storage, self._videos)
        encoder.start()
        try:
            if not encoder.goes_on(schema):
                self._timer.stop()
            encoder.use(schema)
            if parts:
                self._take(parts, schema)
                self._episodes.take(seen)
        except RlioError:
            raise  # rlio's own errors refuse a batch as a whole.
        except BaseException:
            # For example a KeyboardInterrupt: memory and the log may hold different rows.
            self._interrupted = True
            raise

    def _take(self, parts: list[Any], schema: Schema) -> None:
        """Log and collect the parts of a batch."""
        encoder = self._encoder
        log = self._publisher.log
        if log is not None:
            about = {**encoder.header, "shard_rows": encoder.shard_rows, "schema": schema.text}
            log.append(self._frames(parts), header=about)
            self._publisher.expect(schema)
        for part in parts:
            encoder.append(part)
            self._publisher.received += encoder.rows_of(part)
        self._timer.start()

    def _frames(self, parts: list[Any]) -> list[tuple[Sequence[Buffer], int]]:
        """The parts as frames of the log.

        Raises:
            SchemaError: They have no such form; nothing of the batch is taken.
        """
        encoder = self._encoder
        try:
            return [(encoder.to_frame(part), encoder.rows_of(part)) for part in parts]
        except RlioError:
            raise
        except Exception as error:  # For example Arrow's, for texts of over 2 GiB.
            raise SchemaError(f"the batch cannot be logged: {error!r}; write smaller batches") from error

    def _make_room(self) -> None:
        """Publish first if the log or the memory has no room for the rows.

        Raises:
            PublishError: The rows cannot be published; the new batch must be refused.
        """
        log = self._publisher.log
        if log is None:
            if self._publisher.waiting_bytes >= self._encoder.roll.max_bytes:
                self._publisher.flush()
        elif log.failure is not None:  # A sync has failed: the log no longer protects its rows.
            self._flush()
        elif not log.has_room():
            self._finish()
            self._publisher.wait_for_room()

    def _finish(self) -> None:
        """End the open shard, if it has rows; a background thread stores it."""
        self._timer.stop()
        self._encoder.finish()

    def _flush(self) -> None:
        self._publisher.check_process()
        self._timer.stop()
        if self._interrupted and self.durable:
            self._encoder.close()
            recover_interrupted(self._publisher, timeout=self._seconds_left())
            return
        self._encoder.store(self._seconds_left())

    def _close(self) -> None:
        publisher = self._publisher
        self._timer.stop()
        self._encoder.close()
        if not self._interrupted:
            publisher.check_counts()
            publisher.close(seal_at=publisher.received, timeout=self._seconds_left())
        elif not self.durable:  # Otherwise the flush has recovered and closed the log.
            publisher.close(seal_at=publisher.rows_published, timeout=self._seconds_left())
            if (lost := publisher.received - publisher.rows_published) > 0:
                raise LedgerError(
                    f"a write() was interrupted, and {lost} rows that were taken before are lost: open the "
                    "writer with a log (spool='auto') to keep them",
                    uri=self.storage.uri,
                )

    def _on_timer(self) -> None:
        with self._lock:
            if not self._closed and not self._interrupted:
                self._finish()
