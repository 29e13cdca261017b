"""Encoded lines on their way into JSON shards, for writing and for recovery alike.

Where a shard ends depends on the lines alone, so that recovery makes what the writer would have.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import zstandard

from rlio.schemas.json_lines import encode_provenance
from rlio.schemas.schema import Schema
from rlio.storage.publisher import NewShard
from rlio.storage.shard_log import ShardLog
from rlio.storage.wal import Frame
from rlio.writers.background import Jobs
from rlio.writers.roll import Roll

__all__ = ["LineCollector", "remake_lines"]


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
        self._level = level
        self._compressor = _compressor(level)
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
        return _packed(line, self._compressor)

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
        self._jobs.submit(
            lambda: self._log.append(_shard(lines, schema, level=self._level, provenance=self._provenance))
        )

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

    def _end(self) -> None:
        self.ended += 1
        self.finish()


def remake_lines(schema: Schema, frames: Iterable[Frame], *, level: int | None, provenance: str) -> NewShard:
    """The shard into which a writer of these options has made the frames, which are all of its lines."""
    lines = [(frame.payload, frame.rows) for frame in frames]
    return _shard(lines, schema, level=level, provenance=provenance)


def _shard(lines: list[tuple[bytes, int]], schema: Schema, *, level: int | None, provenance: str) -> NewShard:
    """The shard of packed lines."""
    first = _packed(encode_provenance(provenance, schema), _compressor(level))
    return NewShard(
        data=b"".join([first, *(line for line, _ in lines)]),
        rows=sum(rows for _, rows in lines),
        suffix="jsonl" if level is None else "jsonl.zst",
        footer_crc32=0,
        schema=schema,
    )


def _compressor(level: int | None) -> zstandard.ZstdCompressor | None:
    """One for one thread; None: lines are plain."""
    return None if level is None else zstandard.ZstdCompressor(level=level, write_checksum=True)


def _packed(line: bytes, compressor: zstandard.ZstdCompressor | None) -> bytes:
    return line + b"\n" if compressor is None else compressor.compress(line + b"\n")
