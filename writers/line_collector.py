"""Encoded lines on their way into JSON shards, for writing and for recovery alike.

Where a shard ends depends on the lines alone, so that recovery makes what the writer would have.
"""

from __future__ import annotations

import zstandard

from rlio.schemas.json_lines import encode_provenance
from rlio.schemas.schema import Schema
from rlio.storage.shard_log import NewShard, ShardLog
from rlio.writers.roll import Roll

__all__ = ["LineCollector"]


class LineCollector:
    """Collects the lines of a shard and hands it over when it is full.

    Args:
        log: Numbers and stores the shards.
        roll: When a shard is full.
        level: Of zstd; None: lines are plain.
        provenance: JSON text for the first line of every shard.
    """

    def __init__(self, log: ShardLog, *, roll: Roll, level: int | None, provenance: str) -> None:
        self._log = log
        self._roll = roll
        self._compressor = (
            None if level is None else zstandard.ZstdCompressor(level=level, write_checksum=True)
        )
        self._provenance = provenance
        self._lines: list[bytes] = []
        self._rows = 0
        self._bytes = 0
        #: Of the lines; None before the first.
        self.schema: Schema | None = None
        #: Shards that were ended here because they were full.
        self.ended = 0

    def use(self, schema: Schema) -> None:
        """Go on with another schema: a shard has one."""
        if schema is not self.schema:
            self.finish()
            self.schema = schema

    def packed(self, line: bytes) -> bytes:
        """A line as it lies in the file: with its end, and in a frame of its own if compressed."""
        ended = line + b"\n"
        return ended if self._compressor is None else self._compressor.compress(ended)

    def append(self, line: bytes, rows: int) -> None:
        """Add a packed line to the open shard, ending it before and after as needed."""
        roll = self._roll
        has_no_room = self._bytes + len(line) > roll.max_bytes or (
            roll.max_rows is not None and self._rows + rows > roll.max_rows
        )
        if self._lines and has_no_room:
            self._end()
        self._lines.append(line)
        self._rows += rows
        self._bytes += len(line)
        if self._bytes >= roll.max_bytes or (roll.max_rows is not None and self._rows >= roll.max_rows):
            self._end()

    def finish(self) -> None:
        """End the open shard, if it has lines; it is stored in the background."""
        if not self._lines or self.schema is None:
            return
        provenance = self.packed(encode_provenance(self._provenance, self.schema))
        self._log.append(
            NewShard(
                data=b"".join([provenance, *self._lines]),
                rows=self._rows,
                suffix="jsonl" if self._compressor is None else "jsonl.zst",
                footer_crc32=0,
                schema=self.schema,
            )
        )
        self._lines, self._rows, self._bytes = [], 0, 0

    def _end(self) -> None:
        self.ended += 1
        self.finish()
