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
from typing import Any, Final

import zstandard

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.columns import Columns
from rlio.errors import OptionError, SchemaConflict
from rlio.interfaces import Batch, OutputWriter
from rlio.schemas.json_lines import LineTooLarge, encode_line, encode_provenance
from rlio.schemas.provenance import Provenance
from rlio.schemas.row_groups import unpadded
from rlio.schemas.schema import Schema
from rlio.storage.json_shard import MAX_JSON_SHARD_BYTES
from rlio.storage.names import Suffix
from rlio.storage.shard_log import ShardLog
from rlio.writers.age_timer import AgeTimer
from rlio.writers.roll import Roll

__all__ = ["JsonWriter"]

# Level 3 is no smaller on lines of 1,000 HalfCheetah-v5 steps, and a third slower.
_DEFAULT_LEVEL: Final = 1
_MAX_LEVEL: Final = 22


class JsonWriter(OutputWriter):
    """Writes batches into a data set of JSON shards, on any filesystem, beside Parquet shards if there are.

    Lines are collected and stored as a whole shard when `roll` says so, at `flush` and at `close`; until then
    they are in memory only (``durable`` is False). A batch that makes no legal line (64 MiB) or has more than
    ``roll.max_rows`` is cut into several; sequences, and batches of several policies, are not cut.

    Args:
        root: Folder of the data set: a path or any fsspec URL.
        roll: When to store a shard.
        compression: None, or ``"zstd"`` or ``"zstd:level"``: ``.jsonl.zst``, in which each line is a frame.
        compress_columns: Columns to write as compressed binary within the line, as RLlib's
            ``output_compress_columns``; those that a batch lacks do not matter.
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
        compression: str | None = None,
        compress_columns: Iterable[str] = (),
        writer_id: str | None = None,
        worker_index: int = 0,
        spaces: Mapping[str, tuple[Any, Any]] | None = None,
        provenance: Provenance | None = None,
        storage_options: dict[str, object] | None = None,
    ) -> None:
        super().__init__()
        self._roll = _checked_roll(roll or Roll())
        level = _parse_level(compression)
        self._suffix: Suffix = "jsonl" if level is None else "jsonl.zst"
        self._compressor = (
            None if level is None else zstandard.ZstdCompressor(level=level, write_checksum=True)
        )
        self._compress_columns = _checked_columns(compress_columns)
        self._log = ShardLog(
            root, writer_id=writer_id, worker_index=worker_index, storage_options=storage_options
        )
        self._provenance = provenance or Provenance()
        self._spaces = self._provenance.spaces_to_json(spaces)
        self._schema: Schema | None = None
        #: Lines of the open shard, each encoded, and what they hold.
        self._lines: list[bytes] = []
        self._shard_rows = 0
        self._shard_bytes = 0
        self._timer = AgeTimer(self._roll.max_seconds, self._on_timer)

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
            self._log.publish()
        if batch.agent_steps() == 0:
            return
        # Until all of the batch is encoded nothing is kept: one that is refused leaves no trace.
        schema = self._schema_for(batch)
        encoded = list(self._encode(batch, schema))
        if schema is not self._schema:
            self._log.check_schema(schema)
            self._hand_over()
            self._schema = schema
        for line, rows in encoded:
            self._append(line, rows)
        if self._lines:
            self._timer.start()
        if self._log.waiting_bytes:
            self._log.try_publish()

    def _schema_for(self, batch: Batch) -> Schema:
        """The schema of a first batch; later, the same one, with policies that are new added."""
        if self._schema is None:
            return Schema.of(batch, spaces=self._spaces, stored=self._provenance.stored)
        if self._schema.multi_agent != isinstance(batch, MultiAgentBatch):
            raise SchemaConflict(
                f"a {type(batch).__name__} after batches of the other kind: wrap SampleBatches with "
                "as_multi_agent(), or open another writer"
            )
        return self._schema.extended(batch, spaces=self._spaces)

    def _encode(self, batch: Batch, schema: Schema) -> Iterator[tuple[bytes, int]]:
        """Lines, as they will lie in the file, and the rows of each."""
        if isinstance(batch, MultiAgentBatch):
            yield self._packed(self._line(batch, schema)), batch.agent_steps()
            return
        plain = unpadded(batch)
        waiting = [plain] if Columns.SEQ_LENS in plain else list(_pieces(plain, self._roll.max_rows))
        waiting.reverse()
        while waiting:
            part = waiting.pop()
            try:
                yield self._packed(self._line(part, schema)), len(part)
            except LineTooLarge:
                halves = _halves(part)
                if halves is None:
                    raise
                waiting += reversed(halves)

    def _line(self, batch: Batch, schema: Schema) -> bytes:
        return encode_line(batch, schema, compress_columns=self._compress_columns)

    def _packed(self, line: bytes) -> bytes:
        """A line as it lies in the file: with its end, and in a frame of its own if compressed."""
        ended = line + b"\n"
        return ended if self._compressor is None else self._compressor.compress(ended)

    def _append(self, line: bytes, rows: int) -> None:
        """Add a line to the open shard, ending it before and after as needed."""
        roll = self._roll
        has_no_room = self._shard_bytes + len(line) > roll.max_bytes or (
            roll.max_rows is not None and self._shard_rows + rows > roll.max_rows
        )
        if self._lines and has_no_room:
            self._hand_over()
        self._lines.append(line)
        self._shard_rows += rows
        self._shard_bytes += len(line)
        is_full = self._shard_bytes >= roll.max_bytes or (
            roll.max_rows is not None and self._shard_rows >= roll.max_rows
        )
        if is_full:
            self._hand_over()

    def _hand_over(self) -> None:
        """End the open shard, if it has lines: the log queues it to be stored."""
        self._timer.stop()
        if not self._lines or self._schema is None:
            return
        provenance = self._packed(encode_provenance(self._provenance.text, self._schema))
        self._log.append(
            b"".join([provenance, *self._lines]),
            rows=self._shard_rows,
            suffix=self._suffix,
            footer_crc32=0,
            schema=self._schema,
        )
        self._lines, self._shard_rows, self._shard_bytes = [], 0, 0

    def _flush(self) -> None:
        self._hand_over()
        self._log.publish()

    def _close(self) -> None:
        self._timer.stop()

    def _on_timer(self) -> None:
        with self._lock:
            if not self._closed:
                self._hand_over()
                self._log.try_publish()


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
