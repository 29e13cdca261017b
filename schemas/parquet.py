"""Shards as Parquet files: encodes row groups to bytes, every byte under a CRC.

The file is plain Parquet, readable by any engine. rlio adds structure columns (``_next``, ``_stream``,
``_batch``) and footer metadata (``rlio.*``); docs/format.md describes both. It writes no extension types and
no ``ARROW:schema``, so there is nothing that could run a hook.

`rlio.storage` handles files and names, and `rlio.schemas.row_groups` rows in memory.

`joined_crc32` computes the CRC-32 of two consecutive pieces of data from the CRC-32s of both. A CRC-32 is the
remainder of the data, as a polynomial over GF(2), by a fixed one. The joint CRC-32 is therefore the first
one's, times x to the number of bits of the second, plus the second one's. It takes 50 us for any size.

Example:
    >>> joined_crc32(zlib.crc32(b"first"), zlib.crc32(b"second"), 6) == zlib.crc32(b"firstsecond")
    True
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from numpy.typing import NDArray

from rlio.errors import OptionError, SchemaError, excerpt
from rlio.limits import Limits
from rlio.schemas.arrow import page_rows
from rlio.schemas.group_arrays import file_fields, group_table
from rlio.schemas.nested import nested_leaves
from rlio.schemas.row_groups import RowGroup
from rlio.schemas.schema import FORMAT_VERSION, Schema, canonical_json
from rlio.schemas.streams import StreamTable
from rlio.support.options import check_count, set_options

__all__ = ["Compression", "EncodedShard", "GroupInfo", "ShardEncoder", "check_footer", "joined_crc32"]

# One page per column and row group: pages of 1 MiB cost a tenth more to write, for their levels and CRCs, and
# readers must check the header of each.
_PAGE_BYTES = 8 << 20
_PAGE_ROWS = 1 << 24
# The share of a footer, in sixteenths, that is kept for the episodes of a row group: 65,536 take 2.6 MB.
_STREAMS_SHARE = 3


@dataclass(frozen=True)
class Compression:
    """Codec and level of a shard's pages.

    Attributes:
        codec: "zstd", "lz4", "snappy", "gzip", "brotli" or "none".
        level: The codec's level. None: its default; of zstd, this is 1, and 5 for frames of stacks that share
            most of their bytes.

    Raises:
        OptionError: This pyarrow lacks the codec, or the codec has no such level.
    """

    codec: str = "zstd"
    level: int | None = None

    def __post_init__(self) -> None:
        if self.codec not in (*_available(), "none"):
            raise OptionError(
                f"codec {excerpt(self.codec)}: this pyarrow has {', '.join(_available())} and none"
            )
        level = check_count("Compression.level", self.level, least=None, none="the codec's default")
        set_options(self, level=level)
        # Test it now: an error while encoding rows would be too late. The first table loads pandas, for
        # which a writer that is closed at exit has no time; pa.Codec would not load it.
        try:
            fields = pa.schema([("x", pa.int8())])
            with pq.ParquetWriter(
                pa.BufferOutputStream(), fields, compression=self.codec, compression_level=self.level
            ) as writer:
                writer.write_table(pa.table({"x": pa.array([0], pa.int8())}))
        except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
            raise OptionError(f"level {excerpt(self.level)} of codec {self.codec!r}: {error}") from error

    def of_group(self, size: int) -> Compression:
        """Return the compression for a row group of ``size`` bytes, uncompressed.

        Readers refuse a large row group if it, or some of its columns, shrank to a thousandth
        (`Limits.inflation`), as zeros do with zstd. LZ4 shrinks to a 255th at most.
        """
        return self if size <= Limits.free_bytes or self.codec in _WEAK_CODECS else _weak_compression()

    def levels(self, group: RowGroup, schema: Schema) -> int | dict[str, int] | None:
        """Return the level of each column of a shard that begins with ``group``, as pyarrow takes it."""
        if self.codec != "zstd" or self.level is not None:
            return self.level
        levels: dict[str, int] = {}
        for name, (new_name, _) in schema.stacked.items():
            sample = group.stacks[name].frames.values[:_SAMPLE_FRAMES].tobytes()
            if len(zstandard.ZstdCompressor(level=_LEVEL).compress(sample)) * _ALIKE <= len(sample):
                levels |= {name: _FRAMES_LEVEL, new_name: _FRAMES_LEVEL}
        return levels or None

    @classmethod
    def parse(cls, text: str | Compression) -> Compression:
        """Parse ``"zstd:1"``, ``"lz4"`` or ``"none"`` into a Compression.

        Raises:
            OptionError: The text has another form, or names an unknown codec or level.
        """
        if isinstance(text, Compression):
            return text
        match = _COMPRESSION.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise OptionError(
                f"compression={excerpt(text)}: write 'codec' or 'codec:level', such as 'zstd:1', or 'none'"
            )
        return cls(match[1], int(match[2]) if match[2] else None)


# Arrow's default of zstd. On HalfCheetah-v5 float32 rows, level 3 is a quarter slower to write, and no
# smaller.
_LEVEL: Final = 1
# A frame of ALE/Pong-v5 has 38 bytes at level 1, 34 at 3 and 25 at 5, which takes 10 us instead of 3. Noisy
# frames take ten times as long at level 5, for a tenth fewer bytes. Those of Atari's games shrink to a
# sixtieth, at least.
_FRAMES_LEVEL: Final = 5
_SAMPLE_FRAMES: Final = 64
_ALIKE: Final = 32

_COMPRESSION = re.compile(r"([^:]*)(?::(-?[0-9]{1,9}))?")
_CODECS = ("zstd", "lz4", "snappy", "gzip", "brotli")
_WEAK_CODECS = ("lz4", "snappy", "none")


@cache
def _weak_compression() -> Compression:
    return Compression(next(codec for codec in _WEAK_CODECS if codec in (*_available(), "none")), None)


def _available() -> list[str]:
    return [codec for codec in _CODECS if pa.Codec.is_available(codec)]


class GroupInfo(NamedTuple):
    """The place of a row group in its file, and its counts; the footer lists them.

    Attributes:
        start, stop: Byte range.
        crc32: CRC-32 of that range.
        rows: Number of rows.
        units: Steps, sequences (if the schema has ``seq_lens``) or joint steps (several agents).
        env_steps: Environment steps of the batches that begin in the group.
    """

    start: int
    stop: int
    crc32: int
    rows: int
    units: int
    env_steps: int


@dataclass(frozen=True)
class EncodedShard:
    """A whole shard in memory, ready to be published."""

    data: memoryview
    rows: int
    crc32: int
    footer_crc32: int


class ShardEncoder:
    """Encodes row groups into one Parquet file in memory.

    Args:
        schema: Schema of the rows.
        compression: Compression of the pages.
        levels: From `Compression.levels`.
        provenance: JSON text for the footer.
        memory: Memory for the file, shape (bytes,) uint8; the encoded shard is a view of it. A file that does
            not fit fails: call `has_room` before each group. With fixed memory, pyarrow never calls back into
            Python for a page.
        submit: Runs functions in another thread, one after the other; computes checksums there.
        tee: Receives the file's bytes, piece by piece and in order, in that thread and from `finish`.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        compression: Compression,
        levels: int | dict[str, int] | None,
        provenance: str,
        memory: NDArray[np.uint8],
        submit: Callable[[Callable[[], int]], Future[int]],
        tee: Callable[[memoryview], object] | None = None,
    ) -> None:
        self.schema = schema
        self.compression = compression
        self.rows: int = 0
        self._groups: list[GroupInfo] = []
        self._provenance = provenance
        self._memory = memoryview(memory)  # type: ignore[arg-type]  # NumPy's stubs hide the buffer protocol
        self._submit = submit
        self._tee = tee
        self._crc32 = 0
        self._checksums: list[Future[int]] = []
        self._sink = pa.FixedSizeBufferWriter(pa.py_buffer(memory))
        self._fields = pa.schema(file_fields(schema))
        self._about_bytes, self._group_footer_bytes = _footer_bytes(schema, provenance)
        self._streams = StreamTable()
        encodings = _Encodings.of(schema, self._fields)
        self._writer = pq.ParquetWriter(
            self._sink,
            self._fields,
            compression=compression.codec,
            compression_level=levels,
            use_dictionary=encodings.dictionary,
            use_byte_stream_split=encodings.split,
            column_encoding=dict.fromkeys(encodings.delta, "DELTA_BINARY_PACKED"),
            write_statistics=[name for name, spec in schema.columns.items() if spec.kind == "scalar"],
            store_schema=False,
            write_page_checksum=True,
            data_page_size=_PAGE_BYTES,
            **page_rows(_PAGE_ROWS),
        )

    @property
    def encoded_bytes(self) -> int:
        """Bytes encoded so far, without the footer."""
        return int(self._sink.tell())

    def has_room(self, group: RowGroup) -> bool:
        """Whether the memory is certainly large enough for this group and the footer after it.

        Also requires that the footer stays within the readers' default limit, except for a single group.
        """
        streams, texts = self._streams_with(group)
        # Measured: 13 bytes per stream, 40 with a UUID; 76 to 88 per column and group with its name.
        groups = (len(self._groups) + 1) * self._group_footer_bytes
        footer = self._about_bytes + 32 * streams + 2 * texts + groups
        # The table of streams repeats the policy's id, and may shrink to a thousandth.
        listed = streams * (100 + max(map(len, self.schema.policies))) + 6 * texts
        if self._groups and (footer > Limits.footer_bytes or listed > Limits.free_bytes):
            return False
        return self.encoded_bytes + self._bound(group) <= len(self._memory)

    def _streams_with(self, group: RowGroup) -> tuple[int, int]:
        """Return how many streams the footer may list with a group, at most, and the bytes of their ids."""
        table = self._streams.streams
        keys = (table.eps_id, table.agent_index, table.env_id, table.writer)
        texts = (key for key in chain(*(ids for ids in keys if ids and isinstance(ids[-1], str))))
        lengths = [len(key.encode("utf-8", "replace")) for key in texts if isinstance(key, str)]
        longest = max(lengths, default=0 if len(table) else 64)
        return len(table) + group.rows, sum(lengths) + group.rows * longest

    def add(self, group: RowGroup) -> None:
        """Encode a group. The caller may reuse its memory afterwards."""
        table = group_table(group, self.schema, self._streams)
        # The first group's range includes the magic bytes before it, so every byte before the footer is
        # covered.
        start = self.encoded_bytes if self._groups else 0
        self._writer.write_table(table, row_group_size=group.rows)
        stop = self.encoded_bytes
        self._checksums.append(self._submit(lambda: self._checksum(start, stop)))
        self._groups.append(GroupInfo(start, stop, 0, group.rows, group.units, group.env_steps))
        self.rows += group.rows

    def _checksum(self, start: int, stop: int) -> int:
        """Compute the CRC-32 of a byte range and add it to the file's; runs in the order of the file."""
        data = self._memory[start:stop]
        crc32 = zlib.crc32(data)
        # Reads each byte once: the file's CRC follows from those of its parts.
        self._crc32 = joined_crc32(self._crc32, crc32, stop - start)
        if self._tee is not None:
            self._tee(data)
        return crc32

    def finish(self) -> EncodedShard:
        """Write the footer and return the encoded shard."""
        groups = [
            info._replace(crc32=crc32.result())
            for info, crc32 in zip(self._groups, self._checksums, strict=True)
        ]
        packed = zstandard.ZstdCompressor(level=3).compress(
            canonical_json(self._streams.streams.to_json()).encode()
        )
        metadata = {
            "rlio.format": str(FORMAT_VERSION),
            "rlio.schema": self.schema.text,
            "rlio.groups": canonical_json(groups),
            "rlio.streams": base64.b64encode(packed).decode("ascii"),
            "rlio.provenance": self._provenance,
        }
        self._writer.add_key_value_metadata(metadata)
        start = self.encoded_bytes
        self._writer.close()
        stop = self.encoded_bytes
        self._sink.close()
        footer_crc32 = self._checksum(start, stop)
        return EncodedShard(self._memory[:stop], self.rows, self._crc32, footer_crc32)

    def _bound(self, group: RowGroup) -> int:
        """Return an upper bound for the bytes of a group and the footer after it."""
        # Frames are counted as if each stack were stored whole.
        encoded = _values_bytes(group, self.schema) + sum(
            2 * group.rows * self.schema.columns[name].row_bytes for name in group.stacks
        )
        # Add a quarter for levels and pages that do not compress, and headers and a dictionary per column.
        encoded += encoded // 4 + 64 * group.rows + (16 << 10) * (len(self._fields) + 1)
        streams, texts = self._streams_with(group)
        listed = 2 * (200 * streams + 6 * texts) + 8 * (len(self.schema.text) + len(self._provenance))
        return encoded + listed + (len(self._groups) + 1) * 512 * (len(self._fields) + 1) + (1 << 20)


def group_bytes(group: RowGroup, schema: Schema) -> int:
    """Return an upper bound for the bytes of a group's pages before compression."""
    # A frame is stored for each row's obs, and again for a stack that does not overlap with another one.
    frames = sum(
        (group.rows + len(pool.frames)) * pool.frames.values[:1].nbytes for pool in group.stacks.values()
    )
    return _values_bytes(group, schema) + frames + 32 * group.rows


def _values_bytes(group: RowGroup, schema: Schema) -> int:
    """Return an upper bound for the encoded bytes of a group's columns without frame stacks."""
    encoded = 0
    for name, (values, _) in group.columns.items():
        spec = schema.columns[name]
        if spec.kind == "picture":
            encoded += sum(len(picture.data) + 8 for picture in values)
        elif spec.items is not None:
            # Values are widened to four bytes, and each has levels.
            wide = max(spec.items.numpy.itemsize, 4) + 2
            encoded += sum(map(len, values.tolist())) * spec.items.size * wide + 8 * len(values)
        elif spec.structure is not None:
            # One-byte values are widened to four bytes; a character has up to four in UTF-8.
            encoded += int(spec.structure.sizes(values.tolist()).sum()) * 6 + 8 * len(values)
        elif spec.kind in ("text", "json"):
            encoded += sum(4 * len(text) + 8 for text in values)
        else:
            # One- and two-byte values of scalars and lists are widened to four bytes.
            narrow = spec.kind in ("scalar", "list") and spec.numpy.itemsize < 4
            encoded += values.nbytes * (4 if narrow else 1)
    return encoded


def check_footer(schema: Schema, provenance: str) -> None:
    """Refuse a schema whose shards would have footers that readers refuse.

    Raises:
        SchemaError: Its names, or the descriptions of its spaces, are too long.
    """
    about, group = _footer_bytes(schema, provenance)
    most = Limits.footer_bytes * (16 - _STREAMS_SHARE) // 16
    if about + group > most:
        raise SchemaError(
            f"the names of {len(schema.columns)} columns, the spaces and the provenance need a footer of "
            f"{about + group} bytes: at most {most}; shorten the names, or store smaller spaces"
        )


def _footer_bytes(schema: Schema, provenance: str) -> tuple[int, int]:
    """Return bounds for a footer's bytes: of the whole file, and of each row group, without streams."""
    names = [field.name for field in file_fields(schema)]
    each = sum(128 + len(name.encode()) for name in names)
    return len(schema.text.encode()) + len(provenance.encode()) + each, each


class _Encodings(NamedTuple):
    """How the pages of columns are encoded, by the paths of their values.

    Attributes:
        dictionary: Values that repeat: texts, and integers in lists (tokens, numbers of nodes).
        split: Floats, whose bytes compress better one after the other.
        delta: Other integers. All tools read this encoding, which DuckDB before 2.0 and Spark do not do for
            integers whose bytes are split; it takes as many bytes.
    """

    dictionary: list[str]
    split: list[str]
    delta: list[str]

    @classmethod
    def of(cls, schema: Schema, fields: Iterable[pa.Field]) -> _Encodings:
        found = cls([], [], [])
        for field in fields:
            spec = schema.columns.get(field.name)
            is_any_length = spec is not None and spec.kind in ("ragged", "nested")
            for path, kind in nested_leaves(field):
                if pa.types.is_string(kind) or (spec is not None and spec.kind == "text"):
                    found.dictionary.append(path)
                elif pa.types.is_integer(kind) or pa.types.is_temporal(kind):
                    (found.dictionary if is_any_length else found.delta).append(path)
                elif kind in (pa.float32(), pa.float64()):
                    found.split.append(path)
        return found


# CRC-32's polynomial, and 1; in both, the highest bit is the coefficient of x^0.
_POLYNOMIAL: Final = 0xEDB88320
_ONE: Final = 1 << 31


def joined_crc32(first: int, second: int, size: int) -> int:
    """Return the CRC-32 of two joined parts with CRC-32s ``first`` and ``second`` (of ``size`` bytes)."""
    bit = 3  # A byte is 2^3 bits.
    while size:
        if size & 1:
            first = _times(_power(bit), first)
        size >>= 1
        bit += 1
    return first ^ second


@cache
def _power(bit: int) -> int:
    """Return the remainder of x^(2^bit)."""
    if bit == 0:
        return _ONE >> 1
    root = _power(bit - 1)
    return _times(root, root)


def _times(a: int, b: int) -> int:
    """Return the remainder of a product: ``b`` times x^0, x^1, ... for each power that ``a`` has."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
