"""`JsonEncoder`: makes JSON shards from rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import zstandard

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.columns import Columns
from rlio.errors import UnsafeData
from rlio.limits import DEFAULT_LIMITS
from rlio.log.publisher import NewShard, Publisher
from rlio.log.wal import Buffer, Frame
from rlio.schemas.json_lines import LineTooLarge, encode_line, encode_provenance
from rlio.schemas.row_groups import unpadded
from rlio.schemas.schema import Schema
from rlio.writers.encoder import Encoder
from rlio.writers.roll import Roll

__all__ = ["JsonEncoder"]

# Readers refuse shards of more than four million lines.
_MAX_LINES = 1_000_000


class JsonEncoder(Encoder[tuple[bytes, int]]):
    """Makes shards of JSON lines; see `Encoder`. A part is a line as stored in the file, and its rows.

    Args:
        publisher: Numbers and stores the shards.
        roll: When a shard is full.
        level: The zstd level; None: lines are plain.
        provenance: JSON text for the first line of every shard.
        compress_columns: Columns to compress within the lines.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        roll: Roll,
        level: int | None,
        provenance: str,
        compress_columns: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(publisher, roll=roll, provenance=provenance)
        self._level = level
        self._compressor = _compressor(level)
        self._compress_columns = compress_columns
        self._lines: list[tuple[bytes, int]] = []
        self._bytes = 0

    @classmethod
    def from_header(cls, publisher: Publisher, roll: Roll, header: Mapping[str, Any]) -> JsonEncoder:
        """Make the encoder that wrote ``header``."""
        return cls(publisher, roll=roll, level=header["compression"], provenance=str(header["provenance"]))

    @property
    def header(self) -> dict[str, Any]:
        """See `Encoder`."""
        return {**super().header, "kind": "json", "compression": self._level}

    def cut(self, batch: Batch, schema: Schema) -> list[tuple[bytes, int]]:
        """See `Encoder`."""
        if isinstance(batch, MultiAgentBatch):
            return [(self._line(batch, schema), batch.agent_steps())]
        plain = unpadded(batch)
        most = len(plain) if Columns.SEQ_LENS in plain else self.roll.max_rows or len(plain)
        waiting = [plain]
        if len(plain) > most:
            waiting = [plain[start : start + most] for start in range(0, len(plain), most)]
        waiting.reverse()
        lines: list[tuple[bytes, int]] = []
        rows = 0
        while waiting:
            part = waiting.pop()
            try:
                lines.append((self._line(part, schema, first_row=rows), len(part)))
                rows += len(part)
            except LineTooLarge:
                halves = _halves(part)
                if halves is None:
                    raise
                waiting += reversed(halves)
        return lines

    def rows_of(self, part: tuple[bytes, int]) -> int:
        """See `Encoder`."""
        return part[1]

    def to_frame(self, part: tuple[bytes, int]) -> list[Buffer]:
        """See `Encoder`."""
        return [part[0]]

    def from_frame(self, frame: Frame) -> tuple[bytes, int]:
        """See `Encoder`."""
        return frame.payload, frame.rows

    def _has_room(self, part: tuple[bytes, int]) -> bool:
        return self._bytes + len(part[0]) <= self.roll.max_bytes

    def _is_full(self) -> bool:
        return self._bytes >= self.roll.max_bytes or len(self._lines) >= _MAX_LINES

    def _add(self, part: tuple[bytes, int]) -> None:
        self._lines.append(part)
        self._bytes += len(part[0])

    def _finish(self) -> None:
        if not self._lines or self.schema is None:
            return
        self._wait()
        lines, self._lines, self._bytes = self._lines, [], 0
        schema = self.schema
        self._jobs.submit(
            lambda: self._publisher.submit(
                _shard(lines, schema, level=self._level, provenance=self._provenance)
            )
        )

    def _line(self, batch: Batch, schema: Schema, *, first_row: int = 0) -> bytes:
        line = encode_line(batch, schema, compress_columns=self._compress_columns, first_row=first_row)
        packed = _packed(line, self._compressor)
        try:
            DEFAULT_LIMITS.check_inflation(len(packed), len(line) + 1, "a compressed line")
        except UnsafeData as error:
            raise LineTooLarge(f"{error}; write smaller batches") from error
        return packed


def _shard(lines: list[tuple[bytes, int]], schema: Schema, *, level: int | None, provenance: str) -> NewShard:
    """Make the shard of packed lines."""
    first = _packed(encode_provenance(provenance, schema), _compressor(level))

    def remake(frames: Iterable[Frame]) -> NewShard:
        logged = [(frame.payload, frame.rows) for frame in frames]
        return _shard(logged, schema, level=level, provenance=provenance)

    return NewShard(
        data=b"".join([first, *(line for line, _ in lines)]),
        rows=sum(rows for _, rows in lines),
        suffix="jsonl" if level is None else "jsonl.zst",
        footer_crc32=0,
        schema=schema,
        remake=remake,
    )


def _compressor(level: int | None) -> zstandard.ZstdCompressor | None:
    """A compressor for one thread; None: lines are plain."""
    return None if level is None else zstandard.ZstdCompressor(level=level, write_checksum=True)


def _packed(line: bytes, compressor: zstandard.ZstdCompressor | None) -> bytes:
    """A line with its newline, as one zstd frame if compressed."""
    return line + b"\n" if compressor is None else compressor.compress(line + b"\n")


def _halves(batch: SampleBatch) -> list[SampleBatch] | None:
    """The batch in two parts, cut between rows or sequences; None if it has only one."""
    if Columns.SEQ_LENS in batch:
        count = len(batch[Columns.SEQ_LENS])
        return [batch.sequences(0, count // 2), batch.sequences(count // 2, count)] if count > 1 else None
    count = len(batch)
    return [batch[: count // 2], batch[count // 2 :]] if count > 1 else None
