"""`Encoder`: makes shards from rows, for writers and for recovery.

The end of a shard depends only on the rows, so recovery makes the same shards as the writer.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from rlio.batch import Batch, MultiAgentBatch
from rlio.batch.encoded_picture import Codec
from rlio.errors import SchemaConflict
from rlio.log.publisher import Publisher
from rlio.log.wal import Buffer, Frame
from rlio.schemas.schema import Schema
from rlio.writers.background import Worker
from rlio.writers.roll import Roll

__all__ = ["Encoder"]

Part = TypeVar("Part")

# A new schema begins a shard where rows before it are encoded, so later keys of infos are left in their rows.
_MOST_NEW_KEYS = 4


class Encoder(ABC, Generic[Part]):
    """Cuts batches into parts and collects parts into shards. A background thread makes the shards.

    A part is one frame of the log, and is never divided between shards. Called under the writer's lock.

    Args:
        publisher: Numbers and stores the shards.
        roll: When a shard ends; the writer watches the age.
        provenance: JSON text for every shard.
    """

    #: Whether keys of infos are columns.
    has_info_keys: bool = False

    def __init__(self, publisher: Publisher, *, roll: Roll, provenance: str) -> None:
        self.roll = roll
        self._publisher = publisher
        self._provenance = provenance
        self._jobs = Worker("rlio-encode")
        #: The rows' schema; None before the first row.
        self.schema: Schema | None = None
        #: How often keys of infos were added to the schema.
        self._new_keys = 0
        #: Rows that count towards ``max_rows`` of the open shard.
        self.shard_rows: int = 0

    # ---- what the formats differ in ----

    @property
    def header(self) -> dict[str, Any]:
        """The log's description for making its shards again; formats add their ``kind`` and compression."""
        return {"roll": [self.roll.max_rows, self.roll.max_bytes], "provenance": self._provenance}

    @abstractmethod
    def cut(self, batch: Batch, schema: Schema) -> list[Part]:
        """Check a batch and cut it into parts.

        Raises:
            SchemaError: The batch cannot be stored under the schema; nothing has changed.
        """

    @abstractmethod
    def rows_of(self, part: Part) -> int:
        """Number of rows in a part."""

    @abstractmethod
    def to_frame(self, part: Part) -> Sequence[Buffer]:
        """A part's payload in the log, as consecutive buffers."""

    @abstractmethod
    def from_frame(self, frame: Frame) -> Part:
        """The part of a frame, under `schema`.

        Raises:
            CorruptData: The frame belongs to another schema.
        """

    @abstractmethod
    def _add(self, part: Part) -> None:
        """Add a part to the open shard."""

    @abstractmethod
    def _finish(self) -> None:
        """Submit the job that ends the open shard, if there is one, and hands the shard over."""

    def _has_room(self, part: Part) -> bool:
        """Whether the part fits the open shard's byte limit."""
        return True

    def _is_full(self) -> bool:
        """Whether the open shard has reached its byte limit."""
        return False

    def resume(self, shard_rows: int, stored: Iterable[int]) -> None:
        """Continue the row count of a dead writer, so shards end where its own would have ended.

        Args:
            shard_rows: The dead writer's `shard_rows` before the first of ``stored``.
            stored: Rows of each later part that is stored already.
        """

    # ---- what they share ----

    def start(self) -> None:
        """Start the threads, unless they are running. Too late once the interpreter has begun to exit."""
        self._jobs.start()
        self._publisher.start()

    def check(self) -> None:
        """Raise the error of an earlier shard, so no row is taken after it."""
        self._jobs.check()

    def schema_after(
        self,
        batch: Batch,
        *,
        spaces: Mapping[str, Mapping[str, Any]] | None,
        stored: Mapping[str, str],
        pictures: Mapping[str, Codec] | None = None,
    ) -> Schema:
        """The schema after ``batch``: made from the first batch, extended by new policies of later ones.

        Raises:
            SchemaError: The batch cannot be stored.
            SchemaConflict: The batch is of another kind than those before.
        """
        info_keys = self._new_keys < _MOST_NEW_KEYS if self.has_info_keys else None
        if self.schema is None:
            return Schema.of(batch, spaces=spaces, stored=stored, pictures=pictures, info_keys=info_keys)
        if self.schema.multi_agent != isinstance(batch, MultiAgentBatch):
            raise SchemaConflict(
                f"found a {type(batch).__name__} after batches of the other kind: wrap SampleBatches with "
                "as_multi_agent(), or open another writer"
            )
        return self.schema.extended(batch, spaces=spaces, pictures=pictures, info_keys=info_keys)

    def goes_on(self, schema: Schema) -> bool:
        """Whether rows of ``schema``, the present or an extended one, may follow in the open shard."""
        return schema is self.schema

    def use(self, schema: Schema) -> None:
        """Continue with another schema. A shard has only one: its rows get the later one, or it ends."""
        if schema is not self.schema:
            if self.goes_on(schema):
                self._cut(begins_shard=False)  # The header of a segment has the schema.
            else:
                self.finish()
            if self.schema is not None and schema.masks.keys() - self.schema.masks.keys():
                self._new_keys += 1
            self.schema = schema

    def append(self, part: Part) -> None:
        """Add a part to the open shard; end the shard before or after it as needed."""
        most, rows = self.roll.max_rows, self.rows_of(part)
        if self.shard_rows and (
            (most is not None and self.shard_rows + rows > most) or not self._has_room(part)
        ):
            self._end()
        self._add(part)
        self.shard_rows += rows
        if (most is not None and self.shard_rows >= most) or self._is_full():
            self._end()

    def finish(self) -> None:
        """End the open shard, if it has rows; a background thread stores it."""
        self._end(begins_shard=True)

    def store(self, timeout: float | None = None) -> None:
        """End the open shard, and return when all shards are stored.

        Raises:
            PublishError: A shard could not be stored, or not within ``timeout`` seconds; it is kept.
        """
        until = None if timeout is None else time.monotonic() + timeout
        self._wait(timeout)
        self.finish()
        self._wait(_left(until))
        self._publisher.flush(_left(until))

    def close(self) -> None:
        """End the threads. Drops the rows of the open shard, which the log keeps. May be called again."""
        self._jobs.stop()

    def _end(self, *, begins_shard: bool = False) -> None:
        """End the open shard. The log marks the cuts that recovery cannot find by counting rows and bytes."""
        self.shard_rows = 0
        self._finish()
        self._cut(begins_shard=begins_shard)

    def _cut(self, *, begins_shard: bool) -> None:
        if self._publisher.log is not None:
            self._publisher.log.cut(begins_shard=begins_shard)

    def _wait(self, timeout: float | None = None) -> None:
        """Wait for the last job, so memory holds no third shard.

        Rows that could not be encoded are lost from memory, so every later call raises that error; the log,
        if there is one, still has them.
        """
        if not self._jobs.wait(timeout):
            raise self._publisher.overdue(
                "a shard was not made, because an earlier one is still being stored,", timeout
            )


def _left(until: float | None) -> float | None:
    return None if until is None else max(until - time.monotonic(), 0.0)
