"""Encoded lines on their way into JSON shards, for writing and for recovery alike.

Where a shard ends depends on the lines alone, so that recovery makes what the writer would have.
"""

from __future__ import annotations

import time

import zstandard

from rlio.schemas.json_lines import encode_provenance
from rlio.schemas.schema import Schema
from rlio.storage.shard_log import NewShard, ShardLog
from rlio.writers.background import Jobs
from rlio.writers.roll import Roll

__all__ = ["LineCollector"]


class LineCollector:
    """Collects the lines of a shard and hands it over, in the background, when it is full.

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
        self._jobs = Jobs("rlio-lines")
        #: Lines, and the rows of each.
        self._lines: list[tuple[bytes, int]] = []
        self._rows = 0
        self._bytes = 0
        #: Of the lines; None before the first.
        self.schema: Schema | None = None
        #: Shards that were ended here because they were full.
        self.ended = 0

    def start(self) -> None:
        """Start the threads, unless they run: too late once the interpreter has begun to exit."""
        self._jobs.start()
        self._log.start()

    def check(self) -> None:
        """Raise the error of an earlier shard, so that no row is taken after it."""
        self._jobs.check()

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
        self._lines.append((line, rows))
        self._rows += rows
        self._bytes += len(line)
        if self._bytes >= roll.max_bytes or (roll.max_rows is not None and self._rows >= roll.max_rows):
            self._end()

    def finish(self) -> None:
        """End the open shard, if it has lines; it is stored in the background."""
        if not self._lines or self.schema is None:
            return
        # Of the shard before: no third one is in memory.
        self._jobs.wait()
        lines, self._lines, self._rows, self._bytes = self._lines, [], 0, 0
        schema = self.schema
        # Here, since a compressor serves one thread.
        provenance = self.packed(encode_provenance(self._provenance, schema))
        self._jobs.submit(lambda: self._hand_over(provenance, lines, schema))

    def store(self, timeout: float | None = None) -> None:
        """End the open shard and return once all are stored.

        Raises:
            PublishError: One could not be stored, or not within ``timeout`` seconds; it is kept.
        """
        until = None if timeout is None else time.monotonic() + timeout
        self.finish()
        if not self._jobs.wait(timeout):
            raise self._log.overdue("a shard was not made", timeout)
        self._log.publish(None if until is None else max(until - time.monotonic(), 0.0))

    def close(self) -> None:
        """End the threads; lines that were not handed over are dropped, and are in the log."""
        self._jobs.stop()

    def _hand_over(self, provenance: bytes, lines: list[tuple[bytes, int]], schema: Schema) -> None:
        self._log.append(
            NewShard(
                data=b"".join([provenance, *(line for line, _ in lines)]),
                rows=sum(rows for _, rows in lines),
                suffix="jsonl" if self._compressor is None else "jsonl.zst",
                footer_crc32=0,
                schema=schema,
            )
        )

    def _end(self) -> None:
        self.ended += 1
        self.finish()
