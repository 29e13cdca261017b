"""JSON shards of rlio as files of lines: what `JsonReader` reads of data sets.

A ``.jsonl`` shard is read line by line, a ``.jsonl.zst`` shard frame by frame, each of which is a line: no
shard is in memory as a whole (but where shards overlap, while it is found out where). Damage costs the line
that it is in.

Not here: the grammar of a line (`rlio.schemas.json_lines`), and which shards are live (`rlio.dataset`).

Example:
    >>> import rlio
    >>> with rlio.JsonWriter("memory://shard-lines-example", compression="zstd") as writer:
    ...     writer.write(rlio.SampleBatch(obs=[0.5, 1.0]))
    ...     writer.write(rlio.SampleBatch(obs=[1.5]))
    >>> (shard,) = open_shards(rlio.open_dataset("memory://shard-lines-example"))
    >>> [shard.decode(line)["obs"].tolist() for line in shard.lines()]
    [[0.5, 1.0], [1.5]]
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, NamedTuple

import zstandard

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.columns import Columns, is_per_sequence
from rlio.dataset import Dataset, dataset_on
from rlio.errors import CorruptData, DataNotFound, OptionError, UnsafeData
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.readers.line_files import Line, read_lines, too_long
from rlio.schemas.json_lines import SchemaLookup, decode_line, is_intact, is_provenance, parse_head
from rlio.schemas.schema import Schema
from rlio.schemas.zstd_frames import inflate
from rlio.storage import InputFile, Listing, Segment, ShardName, ShardRef, Storage, open_input, read_header
from rlio.storage.json_shard import JsonShard, schema_lookup
from rlio.storage.names import DATA_DIR, HEADER, SCHEMA_DIR, is_writer_id, parse_sealed, parse_trim

__all__ = ["JsonSet", "ShardLines", "find_data_sets", "open_shards", "read_frames"]

_CHUNK = 1 << 20
_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_FRAME_HEAD_BYTES = 18
_BATCH_HEADS = (b'{"type":"SampleBatch","schema":"', b'{"type":"MultiAgentBatch","schema":"')


class ShardLines:
    """The lines of a JSON shard that are records: not its provenance, and not those that others supersede.

    Args:
        storage: The data set's root.
        segment: The shard, and which of its rows are live: those from ``skip`` on.
        schemas: Gives the schema of a hash.
        columns: Logical columns to decode; None: all.
    """

    #: Its schema says what the dtypes are.
    has_dtypes = True

    def __init__(
        self,
        storage: Storage,
        segment: Segment,
        schemas: SchemaLookup,
        *,
        columns: Sequence[str] | None = None,
    ) -> None:
        self.uri = storage.uri_of(segment.ref.path)
        self.skip = segment.skip
        self.file = _input_file(storage, segment.ref)
        self._storage = storage
        self._ref = segment.ref
        self._schemas = schemas
        self._columns = _with_lengths(columns)
        self._limit = storage.limits.line_bytes
        self._packed = segment.ref.name.suffix == "jsonl.zst"

    def open(self) -> IO[bytes]:
        """Open it for `line_at`; the caller closes it."""
        return open_input(self.file)

    def lines(self, *, offset: int = 0, number: int = 0) -> Generator[Line, None, None]:
        """The records from ``offset``, where line ``number`` begins; of a packed shard, their frames.

        Raises:
            CorruptData: At the end: the shard has more or fewer bytes than its name says.
        """
        first = self._cut[0]
        last, end = None, offset
        with self.open() as stream:
            read = read_frames if self._packed else read_lines
            for line in read(stream, offset=offset, number=number, limit=self._limit):
                end, number = line.end, line.number + 1
                if line.number or not self._is_provenance(line):
                    last = line
                    if line.number >= first:
                        yield line
        # A line that was cut is damaged and says so itself.
        if end != self._ref.name.size and (last is None or is_intact(self._unpacked(last) or b"")):
            raise CorruptData(
                f"the shard has {end} bytes and its name says {self._ref.name.size}: it is torn or was "
                "changed; copy it again from where it came",
                uri=self.uri,
                record=number,
            )

    def line_at(self, stream: IO[bytes], *, offset: int, size: int, number: int) -> Line:
        """The line of `lines` that is known to be there."""
        stream.seek(offset)
        data = stream.read(size) if size <= (_longest(self._limit) if self._packed else self._limit) else None
        if data is not None and not self._packed:
            data = data.strip()
        return Line(number, data, offset, size, offset + size)

    def decode(self, line: Line) -> SampleBatch | MultiAgentBatch:
        """The batch in a line; errors as of `rlio.schemas.json_lines.decode_line`, without the place."""
        data = self._unpacked(line)
        if data is None:
            raise too_long(line, self._limit)
        batch = decode_line(data, self._schema, columns=self._columns, limits=self._storage.limits)
        first, rows = self._cut
        if line.number != first or not rows:
            return batch
        if isinstance(batch, MultiAgentBatch) or Columns.SEQ_LENS in batch:
            raise CorruptData(
                f"only rows from number {rows} on of the line are live: its sequences or joint steps cannot "
                "be cut there"
            )
        live: SampleBatch = batch[rows:]
        return live

    def names(self, line: Line) -> Hashable:
        """The line's schema, which says what its columns are called.

        Raises:
            CorruptData: The line is damaged.
        """
        head = parse_head(self._unpacked(line) or b"")
        if head is None:
            raise CorruptData("no line of a shard")
        return head.schema

    def _schema(self, name: str) -> Schema:
        try:
            return self._schemas(name)
        except CorruptData as error:
            # Without a place: it becomes that of the line, by which lost records are counted.
            raise CorruptData(str(error)) from error

    def _unpacked(self, line: Line) -> bytes | None:
        """A line's text; none of it if its frame is damaged, None if there is too much."""
        if not self._packed or line.data is None:
            return line.data
        try:
            return inflate(line.data, most=self._limit + 1, limits=self._storage.limits).removesuffix(b"\n")
        except UnsafeData:
            return None
        except CorruptData:
            return b""

    def _is_provenance(self, line: Line) -> bool:
        """Whether the shard's first line holds no rows, as it should be, even if it is damaged."""
        data = self._unpacked(line)
        if data is None:
            return False
        if is_provenance(data) and is_intact(data):
            return True
        # Where the line end is damaged, it has swallowed the next one.
        return not any(head in data for head in _BATCH_HEADS)

    @cached_property
    def _cut(self) -> tuple[int, int]:
        """Number of the first line with live rows, and how many of its rows come before them."""
        if not self.skip:
            return 0, 0
        # Rare: shards overlap after a retry or a compaction. How many rows damaged lines hold takes an index.
        shard = JsonShard(self._storage, self._ref, self._schema)
        try:
            number = 1 if shard.provenance else 0
        except CorruptData:
            number = 0
        before = 0
        for rows in shard.rows:
            if before + rows > self.skip:
                break
            before, number = before + rows, number + 1
        return number, self.skip - before


def open_shards(dataset: Dataset, *, columns: Sequence[str] | None = None) -> list[ShardLines]:
    """The live JSON shards of a data set, in its order: writers by id, rows ascending.

    Raises:
        OptionError: There are Parquet shards too.
    """
    for segment in dataset.segments:
        if segment.ref.name.suffix == "parquet":
            raise OptionError(
                "a Parquet shard, which JsonReader does not read: open the data set with DatasetReader, "
                "which reads shards of both kinds",
                uri=dataset.storage.uri_of(segment.ref.path),
            )
    schemas = schema_lookup(dataset.storage)
    return [ShardLines(dataset.storage, segment, schemas, columns=columns) for segment in dataset.segments]


def _with_lengths(columns: Sequence[str] | None) -> Sequence[str] | None:
    """``columns``, with the lengths without which recurrent states belong to no rows."""
    if columns is None or Columns.SEQ_LENS in columns or not any(map(is_per_sequence, columns)):
        return columns
    return [*columns, Columns.SEQ_LENS]


def _input_file(storage: Storage, ref: ShardRef) -> InputFile:
    path = f"{storage.root.rstrip('/')}/{ref.path}"
    fs = None if storage.is_local else storage.fs
    return InputFile(fs, path, storage.uri_of(ref.path), ref.name.size)


# ---- finding shards among files ----


class JsonSet(NamedTuple):
    """A data set of which something was named.

    Attributes:
        dataset: What was named of it.
        is_whole: Whether that is all.
    """

    dataset: Dataset
    is_whole: bool


class _Root(NamedTuple):
    """Where a data set is, and which of its shards were named; None: all."""

    storage: Storage
    refs: list[ShardRef] | None


def find_data_sets(files: Iterable[InputFile], limits: Limits = DEFAULT_LIMITS) -> list[InputFile | JsonSet]:
    """``files``, with those that belong to data sets of rlio replaced by the data sets.

    A header stands for its whole data set. Shards stand for themselves: their data set has no others, and
    each row once where they overlap. A data set comes where the first of its files was.

    Raises:
        OptionError: A data set is in another format version, or a file is of a kind that is not read.
        DataNotFound: The folder of schemas is not where a shard needs it.
    """
    found: dict[tuple[int, str], InputFile | _Root] = {}
    for file in files:
        parts = file.path.split("/")
        name = ShardName.parse(parts[-1])
        if parts[-1] == HEADER:
            found[id(file.fs), "/".join(parts[:-1])] = _Root(_folder(file, 1, limits), None)
        elif name is not None:
            _check_place(file, parts)
            key = (id(file.fs), "/".join(parts[:-3]))
            if key not in found:
                found[key] = _Root(_folder(file, 3, limits), [])
            root = found[key]
            if isinstance(root, _Root) and root.refs is not None:
                root.refs.append(ShardRef(parts[-2], name, "/".join(parts[-3:])))
        elif parse_sealed(parts[-1]) is not None or parse_trim(parts[-1]) is not None:
            continue  # A marker, which a glob names beside the shards, holds no records.
        else:
            found[id(file.fs), file.path] = file
    return [_json_set(item) if isinstance(item, _Root) else item for item in found.values()]


def _check_place(file: InputFile, parts: Sequence[str]) -> None:
    if len(parts) < 4 or parts[-3] != DATA_DIR or not is_writer_id(parts[-2]):
        raise DataNotFound(
            "a shard of rlio needs the schema of its data set, and this one does not lie in one: expected "
            f"<root>/{DATA_DIR}/<writer>/<shard> and <root>/{SCHEMA_DIR}/; copy these folders too",
            uri=file.uri,
        )


def _folder(file: InputFile, levels: int, limits: Limits) -> Storage:
    """The folder so many levels above ``file``."""
    if file.fs is None:
        return Storage.open(Path(file.path).parents[levels - 1], limits=limits)
    root, uri = file.path.rsplit("/", levels)[0], file.uri.rsplit("/", levels)[0]
    return Storage.on(file.fs, root, uri=uri, limits=limits)


def _json_set(root: _Root) -> JsonSet:
    if root.refs is None:
        return JsonSet(dataset_on(root.storage), True)
    if root.storage.exists(HEADER):
        read_header(root.storage)  # Refuses other versions of the format.
    if not root.storage.exists(SCHEMA_DIR):
        raise DataNotFound(
            f"the shards need their schemas, and there is no {SCHEMA_DIR}/ beside {DATA_DIR}/: copy it from "
            "where they came",
            uri=root.storage.uri,
        )
    listing = Listing()
    for ref in root.refs:
        listing.shards.setdefault(ref.writer, []).append(ref)
    return JsonSet(Dataset(root.storage, listing), False)


# ---- frames ----


def read_frames(
    stream: IO[bytes], *, offset: int = 0, number: int = 0, limit: int = DEFAULT_LIMITS.line_bytes
) -> Iterator[Line]:
    """Yield the zstd frames of ``stream`` from ``offset``, where frame ``number`` begins, as they are.

    Where there is damage, what lies before the next frame is one of them, and never blank. At most ``limit``
    bytes of a frame and a piece of the file are in memory; what is larger comes in parts, without data.
    """
    if offset:
        stream.seek(offset)
    window = _Window(stream)
    longest = _longest(limit)
    while window.reach(1):
        size = _frame_size(window, longest)
        if size is None or (window.reach(size + 1) and not window.has(_FRAME_MAGIC, size)):
            following = window.find(_FRAME_MAGIC, 1, longest)
            # A frame that seems to reach into the next has a damaged length.
            size = following if size is None else min(size, following)
        data = window.take(size)
        yield Line(number, data if size <= longest else None, offset, size, offset + size)
        offset, number = offset + size, number + 1


def _longest(limit: int) -> int:
    """Bytes of a frame of ``limit`` bytes, at most: what does not compress grows a little."""
    return limit + limit // 256 + 1024


class _Window:
    """The bytes of a stream from the current place on, as far as they were asked for."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._bytes = bytearray()

    def reach(self, size: int) -> bool:
        """Whether there are so many bytes."""
        while len(self._bytes) < size:
            chunk = self._stream.read(_CHUNK)
            if not chunk:
                return False
            self._bytes += chunk
        return True

    def has(self, text: bytes, at: int) -> bool:
        """Whether ``text`` is at that place."""
        self.reach(at + len(text))
        return self._bytes.startswith(text, at)

    def get(self, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)``; fewer at the end of the stream."""
        self.reach(stop)
        return bytes(self._bytes[start:stop])

    def find(self, text: bytes, start: int, limit: int) -> int:
        """Where ``text`` is found from ``start`` on; the end of the stream, or past ``limit``, if nowhere."""
        while (found := self._bytes.find(text, start)) < 0:
            size = len(self._bytes)
            if size > limit or not self.reach(size + 1):
                return size
            start = max(start, size - len(text) + 1)
        return found

    def take(self, size: int) -> bytes:
        """Go past ``size`` bytes, and give them."""
        taken = self.get(0, size)
        del self._bytes[:size]
        return taken


def _frame_size(window: _Window, longest: int) -> int | None:
    """Bytes of the zstd frame here, by the sizes of its blocks (RFC 8878, 3.1.1); None if it is none."""
    head = window.get(0, _FRAME_HEAD_BYTES)
    try:
        checksum = 4 if zstandard.get_frame_parameters(head).has_checksum else 0
        at = zstandard.frame_header_size(head)
    except zstandard.ZstdError:
        return None
    while at <= longest and window.reach(at + 3):
        block = int.from_bytes(window.get(at, at + 3), "little")
        last, kind, size = block & 1, block >> 1 & 3, block >> 3
        at += 3 + (1 if kind == 1 else size)  # Kind 1 repeats one byte.
        if last:
            return at + checksum if window.reach(at + checksum) else None
    return None
