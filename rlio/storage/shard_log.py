"""One writer's side of the commit: its id, its row numbers, and the shards that wait to be stored.

What encodes rows (`rlio.writers`) hands whole shards over; a shard that cannot be stored is kept and tried
again, so that no row is lost or numbered twice.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from dataclasses import dataclass

from rlio.errors import OptionError, PublishError
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage
from rlio.storage.names import Suffix, check_writer_id, make_writer_id, schema_path, writer_dir
from rlio.storage.publish import publish_shard, put_header
from rlio.storage.schema_files import check_agreement, read_schemas

__all__ = ["ShardLog"]

logger = logging.getLogger("rlio")


@dataclass(frozen=True)
class _Waiting:
    """An encoded shard that is not stored yet."""

    data: bytes | memoryview
    first: int
    rows: int
    suffix: Suffix
    footer_crc32: int
    schema: Schema
    crc32: int | None


class ShardLog:
    """Numbers a writer's rows and stores its shards in order.

    Args:
        root: Folder of the data set, on any filesystem.
        writer_id: None draws a fresh one; a given one must have no rows there yet.
        worker_index: Goes into a drawn id.
        storage_options: For fsspec.

    Raises:
        OptionError: The given id is illegal, or has rows; or the root is in another format version.
        CorruptData: The root's header is damaged.
        PublishError: Nothing can be stored there.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        writer_id: str | None = None,
        worker_index: int = 0,
        storage_options: dict[str, object] | None = None,
    ) -> None:
        self.storage = Storage.open(root, storage_options=storage_options)
        self.writer_id = make_writer_id(worker_index) if writer_id is None else check_writer_id(writer_id)
        if writer_id is not None and self.storage.list(writer_dir(writer_id)):
            raise OptionError(
                f"writer {writer_id!r} has rows there already: take another writer_id, or None for a new one",
                uri=self.storage.uri,
            )
        # A root that cannot be written, or is in another format, is found out before rows are taken.
        put_header(self.storage)
        #: Rows handed over so far: the number of the next row.
        self.next_row = 0
        #: Rows that are stored.
        self.rows_published = 0
        #: Bytes of the shards that are stored.
        self.bytes_published = 0
        #: Bytes of encoded shards that are not stored yet.
        self.waiting_bytes = 0
        self._waiting: deque[_Waiting] = deque()
        self._schemas: set[str] = set()

    def check_schema(self, schema: Schema) -> None:
        """Refuse a schema that gives a column another type than the root's other writers do.

        A writer that begins at the same moment is not seen here; then readers refuse.

        Raises:
            SchemaConflict: It does; the message names both schemas.
        """
        check_agreement({**read_schemas(self.storage), schema.hash: schema}, uri=self.storage.uri)

    def append(
        self,
        data: bytes | memoryview,
        *,
        rows: int,
        suffix: Suffix,
        footer_crc32: int,
        schema: Schema,
        crc32: int | None = None,
    ) -> None:
        """Number a shard's rows and queue it; `publish` stores it. ``crc32`` is of ``data``, where known."""
        self._waiting.append(_Waiting(data, self.next_row, rows, suffix, footer_crc32, schema, crc32))
        self.next_row += rows
        self.waiting_bytes += len(data)

    def publish(self) -> None:
        """Store every queued shard, the oldest first.

        Raises:
            PublishError: One could not be stored; it and those after it stay queued.
        """
        while self._waiting:
            shard = self._waiting[0]
            self._put_schema(shard.schema)
            ref = publish_shard(
                self.storage,
                self.writer_id,
                shard.data,
                first=shard.first,
                rows=shard.rows,
                suffix=shard.suffix,
                footer_crc32=shard.footer_crc32,
                crc32=shard.crc32,
            )
            self._waiting.popleft()
            self.waiting_bytes -= len(shard.data)
            self.rows_published += shard.rows
            self.bytes_published += len(shard.data)
            logger.info("stored %s: %d rows", self.storage.uri_of(ref.path), shard.rows)

    def try_publish(self) -> None:
        """`publish` for a caller whose rows are safe in the queue: a failure is logged and tried again."""
        try:
            self.publish()
        except PublishError as error:
            logger.warning("%d bytes wait to be stored: %s", self.waiting_bytes, error)

    def _put_schema(self, schema: Schema) -> None:
        """A schema comes before the first shard that needs it."""
        if schema.hash not in self._schemas:
            self.storage.put(schema_path(schema.hash), schema.text.encode())
            self._schemas.add(schema.hash)
