"""`JsonWriter`: shards of JSON lines, for people and for tools that read nothing else.

Each `write()` becomes one line, of which `rlio.schemas.json_lines` describes the grammar; the first line of
each shard is its provenance. Parquet is read some eight times faster (HalfCheetah-v5, 1,000 rows a line).

Example:
    >>> import numpy as np, rlio
    >>> with rlio.JsonWriter("memory://json-writer-example") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.zeros((3, 4), np.float32), rewards=np.ones(3, np.float32)))
    >>> len(rlio.open_dataset("memory://json-writer-example"))
    3
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.columns import Columns
from rlio.errors import OptionError
from rlio.interfaces import Batch, OutputWriter
from rlio.options import checked_keywords, expected
from rlio.schemas.json_lines import LineTooLarge, encode_line
from rlio.schemas.provenance import Provenance
from rlio.schemas.row_groups import unpadded
from rlio.schemas.schema import Schema
from rlio.storage.filesystem import Storage
from rlio.storage.json_shard import MAX_JSON_SHARD_BYTES
from rlio.storage.shard_log import ShardLog, WriteLedger
from rlio.storage.wal import Sync
from rlio.writers.age_timer import AgeTimer
from rlio.writers.line_collector import LineCollector, remake_lines
from rlio.writers.recovery import WriterLog, json_header, recover_before_writing, recover_interrupted
from rlio.writers.roll import Roll
from rlio.writers.spooling import SpoolLike, make_room, parse_spool, schema_after

__all__ = ["JsonWriter"]

# Level 3 is no smaller on lines of 1,000 HalfCheetah-v5 steps, and a third slower.
_DEFAULT_LEVEL: Final = 1
_MAX_LEVEL: Final = 22


class JsonWriter(OutputWriter):
    """Writes batches into a data set of JSON shards, on any filesystem, beside Parquet shards if there are.

    Lines are logged by `write` and collected, and stored as a whole shard, in the background, when `roll`
    says so, at `flush` and at `close`. A batch that makes no legal line (64 MiB) or has more than
    ``roll.max_rows`` is cut into several; sequences, and batches of several policies, are not cut. What a
    dead writer of this machine has left in its log is published when the next writer opens the root, and by
    `rlio recover`.

    Args:
        root: Folder of the data set: a path or any fsspec URL.
        roll: When to store a shard.
        compression: None, or ``"zstd"`` or ``"zstd:level"``: ``.jsonl.zst``, in which each line is a frame.
        compress_columns: Columns to write as compressed binary within the line, as RLlib's
            ``output_compress_columns``; those that a batch lacks do not matter.
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
        compression: str | None = None,
        compress_columns: Iterable[str] = (),
        spool: SpoolLike = "auto",
        sync: Sync | None = None,
        writer_id: str | None = None,
        worker_index: int = 0,
        spaces: Mapping[str, tuple[Any, Any]] | None = None,
        provenance: Provenance | None = None,
        storage_options: dict[str, object] | None = None,
    ) -> None:
        self._roll = _checked_roll(expected(roll, Roll, "roll"))
        self._level = _parse_level(compression)
        self._compress_columns = _checked_columns(compress_columns)
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
            about=json_header(self._level, roll=self._roll, provenance=self._provenance.text),
            remake=partial(remake_lines, level=self._level, provenance=self._provenance.text),
        )
        if writer_id is None:
            # After this writer is there to see: who follows must not find every writer closed in between.
            recover_before_writing(root, kept, storage_options=storage_options)
        self.durable = self._log.is_durable
        self.patience = None if kept is None else kept.publish_seconds
        self._lines = LineCollector(
            self._log, roll=self._roll, level=self._level, provenance=self._provenance.text
        )
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
        self._lines.check()
        make_room(self._log, self._roll, store=self._log.publish, flush=self._flush, finish=self._finish)
        if batch.agent_steps() == 0:
            return
        # Until all of the batch is encoded nothing is kept: one that is refused leaves no trace.
        schema = schema_after(self._lines.schema, batch, spaces=self._spaces, stored=self._provenance.stored)
        encoded = list(self._encode(batch, schema))
        if schema is not self._lines.schema:
            self._log.check_schema(schema)
        self._lines.start()
        with self._log.taking():
            self._take(encoded, schema)

    def _take(self, encoded: list[tuple[bytes, int]], schema: Schema) -> None:
        """Log the lines and collect them."""
        if schema is not self._lines.schema:
            self._finish()
            self._lines.use(schema)
        self._log.log([([line], rows) for line, rows in encoded], schema)
        ended = self._lines.ended
        for line, rows in encoded:
            self._lines.append(line, rows)
            self._log.received += rows
        if self._lines.ended > ended:
            self._log.cut(begins_shard=False)
        self._timer.start()

    def _encode(self, batch: Batch, schema: Schema) -> Iterator[tuple[bytes, int]]:
        """Lines, as they will lie in the file, and the rows of each."""
        if isinstance(batch, MultiAgentBatch):
            yield self._lines.packed(self._line(batch, schema)), batch.agent_steps()
            return
        plain = unpadded(batch)
        waiting = [plain] if Columns.SEQ_LENS in plain else list(_pieces(plain, self._roll.max_rows))
        waiting.reverse()
        while waiting:
            part = waiting.pop()
            try:
                yield self._lines.packed(self._line(part, schema)), len(part)
            except LineTooLarge:
                halves = _halves(part)
                if halves is None:
                    raise
                waiting += reversed(halves)

    def _line(self, batch: Batch, schema: Schema) -> bytes:
        return encode_line(batch, schema, compress_columns=self._compress_columns)

    def _finish(self) -> None:
        """End the open shard, if it has lines; it is stored in the background."""
        self._timer.stop()
        self._lines.finish()
        self._log.cut(begins_shard=True)

    def _flush(self) -> None:
        self._log.check_process()
        if self._log.interrupted and self.durable:
            self._timer.stop()
            self._lines.close()
            recover_interrupted(self._log, timeout=self._seconds_left())
            return
        self._finish()
        self._lines.store(self._seconds_left())

    def _close(self) -> None:
        self._timer.stop()
        self._lines.close()
        if self._log.interrupted:
            if not self.durable:  # Else the flush has recovered and closed the log.
                self._log.close(seal_at=self.rows_published, timeout=self._seconds_left())
                self._log.check_interrupted()
            return
        self.ledger.check(uri=self._log.storage.uri)
        self._log.close(seal_at=self._log.received, timeout=self._seconds_left())

    def _on_timer(self) -> None:
        with self._lock:
            if not self._closed and not self._log.interrupted:
                self._finish()


def _checked_roll(roll: Roll) -> Roll:
    if roll.max_bytes > MAX_JSON_SHARD_BYTES // 2:
        raise OptionError(
            f"Roll(max_bytes={roll.max_bytes}): a JSON shard is read as a whole when it is opened; at most "
            f"{MAX_JSON_SHARD_BYTES // 2} bytes"
        )
    return roll


def _parse_level(compression: str | None) -> int | None:
    """The zstd level; None without compression."""
    if compression is None:
        return None
    match = re.fullmatch(r"zstd(?::([0-9]{1,2}))?", compression)
    level = int(match[1] or _DEFAULT_LEVEL) if match else 0
    if not 1 <= level <= _MAX_LEVEL:
        raise OptionError(f"compression={compression!r}: None, 'zstd', or 'zstd:1' to 'zstd:{_MAX_LEVEL}'")
    return level


def _checked_columns(columns: Iterable[str]) -> frozenset[str]:
    if isinstance(columns, str):
        raise OptionError(f"compress_columns={columns!r}: names of columns, such as ('obs', 'new_obs')")
    return frozenset(columns)


def _pieces(batch: SampleBatch, rows: int | None) -> Iterator[SampleBatch]:
    """Parts of at most ``rows`` rows; views."""
    if rows is None or len(batch) <= rows:
        yield batch
        return
    for start in range(0, len(batch), rows):
        yield batch[start : start + rows]


def _halves(batch: SampleBatch) -> list[SampleBatch] | None:
    """Two parts, cut between rows or sequences; None if there is one."""
    if Columns.SEQ_LENS in batch:
        count = len(batch[Columns.SEQ_LENS])
        return [batch.sequences(0, count // 2), batch.sequences(count // 2, count)] if count > 1 else None
    count = len(batch)
    return [batch[: count // 2], batch[count // 2 :]] if count > 1 else None
