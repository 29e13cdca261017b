"""The names in a data set: the name of a shard states which rows it holds and what its bytes must be.

Readers trust names, so each kind has one strict grammar: a name that does not match is not from rlio.

Example:
    >>> name = ShardName(first=4096, rows=2048, size=913422, crc32=0x9F0C11AA, footer_crc32=0x1B)
    >>> name.format()
    '000000004096-2048-913422-9f0c11aa-0000001b.parquet'
    >>> ShardName.parse(name.format()) == name
    True
    >>> ShardName.parse("../escape.parquet") is None
    True
"""

from __future__ import annotations

import re
import uuid
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias, get_args

from rlio.errors import OptionError, excerpt
from rlio.support.options import check_count

__all__ = [
    "DATA_DIR",
    "HEADER",
    "INDEX_DIR",
    "MAX_ROW",
    "MAX_ROWS",
    "MAX_SHARD_BYTES",
    "SCHEMA_DIR",
    "VIDEO_DIR",
    "WAL_DIR",
    "ShardName",
    "Suffix",
    "check_writer_id",
    "is_job",
    "is_writer_id",
    "make_attempt_id",
    "make_writer_id",
    "parse_sealed",
    "parse_trim",
    "part_id",
    "part_of",
    "schema_path",
    "sealed_name",
    "shard_path",
    "trim_name",
    "video_path",
    "writer_dir",
]

HEADER: Final = "_rlio.json"
SCHEMA_DIR: Final = "_schema"
DATA_DIR: Final = "data"
#: Folder of the videos whose frames are rows.
VIDEO_DIR: Final = "_videos"
#: Folder that early versions left as a hint for readers: it is not used, and `gc` removes it.
INDEX_DIR: Final = "_index"
WAL_DIR: Final = "_wal"

Suffix: TypeAlias = Literal["parquet", "jsonl", "jsonl.zst"]
_SUFFIXES: Final = get_args(Suffix)

#: Upper bounds of the rows and bytes of one shard, and of a writer's last row. Arithmetic in any language
#: keeps them exact (int64). They are far above real data, and far below what a hostile name could ask for.
MAX_ROWS: Final = 2**48
MAX_SHARD_BYTES: Final = 2**48
MAX_ROW: Final = 2**62

_MAX_PART: Final = 10**6 - 1
_MAX_ATTEMPT: Final = 9999

# ASCII digits only: \d would also match other scripts' digits.
_SHARD = re.compile(
    r"([0-9]{1,19})-([0-9]{1,19})-([0-9]{1,19})-([0-9a-f]{8})-([0-9a-f]{8})\.(parquet|jsonl|jsonl\.zst)"
)
_WRITER = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_JOB = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_ATTEMPT = re.compile(rf"(x{_JOB.pattern}-[0-9]{{6}})~[0-9]{{4}}-[0-9a-f]{{8}}")
_SEALED = re.compile(r"_sealed-([0-9]{1,19})")
_TRIM = re.compile(r"_trim-([0-9]{1,19})")
_SCHEMA_HASH = re.compile(r"[0-9a-f]{8,64}")


class _Certified(NamedTuple):
    """The fields of a `ShardName`, unchecked; creating a tuple is several times faster than a dataclass."""

    first: int
    rows: int
    size: int
    crc32: int
    footer_crc32: int
    suffix: Suffix


class ShardName(_Certified):
    """The facts that a shard's name certifies. Immutable.

    Attributes:
        first: Row number, within its writer, of the first row.
        rows: Rows in the shard, at least 1.
        size: Bytes of the shard.
        crc32: zlib's CRC-32 of all its bytes.
        footer_crc32: CRC-32 of a Parquet shard's footer (thrift metadata, its length and magic); for a JSON
            shard, the value that the encoding declares, or 0.
        suffix: The file format.

    Raises:
        OptionError: A value is out of bounds.
    """

    __slots__ = ()

    def __new__(
        cls,
        *,
        first: int,
        rows: int,
        size: int,
        crc32: int,
        footer_crc32: int,
        suffix: Suffix = "parquet",
    ) -> Self:
        self = super().__new__(cls, first, rows, size, crc32, footer_crc32, suffix)
        if not (
            first >= 0
            and 1 <= rows <= MAX_ROWS
            and first + rows <= MAX_ROW
            and 1 <= size <= MAX_SHARD_BYTES
            and 0 <= crc32 < 2**32
            and 0 <= footer_crc32 < 2**32
            and suffix in _SUFFIXES
        ):
            raise OptionError(
                f"{self}: expected first >= 0, 1 <= rows <= 2**48, first + rows <= 2**62, "
                f"1 <= size <= 2**48, two CRC-32s and a suffix of {', '.join(_SUFFIXES)}"
            )
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        # The arguments are keywords, but a tuple is pickled by position.
        return (), self._asdict()

    @property
    def end(self) -> int:
        """The row after the last one."""
        return self.first + self.rows

    def format(self) -> str:
        """Return the file name."""
        crcs = f"{self.crc32:08x}-{self.footer_crc32:08x}"
        return f"{self.first:012d}-{self.rows}-{self.size}-{crcs}.{self.suffix}"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Parse the file name ``name`` (without folder); None if it is not the name of a shard."""
        match = _SHARD.fullmatch(name)
        if match is None:
            return None
        first_text, rows_text, size_text, crc32, footer_crc32, suffix = match.groups()
        first, rows, size = int(first_text), int(rows_text), int(size_text)
        if not (1 <= rows <= MAX_ROWS and first + rows <= MAX_ROW and 1 <= size <= MAX_SHARD_BYTES):
            return None
        # Bypasses __new__, which would repeat the checks of the pattern and of the line above: large data
        # sets have hundreds of thousands of names.
        return tuple.__new__(cls, (first, rows, size, int(crc32, 16), int(footer_crc32, 16), suffix))


def make_writer_id(worker_index: int) -> str:
    """Return a new id, ``w<worker_index:05d>-<8 hex>``; no other process start has it, on any machine.

    Raises:
        OptionError: ``worker_index`` is negative.
    """
    worker_index = check_count("worker_index", worker_index, least=0)
    return f"w{worker_index:05d}-{uuid.uuid4().hex[:8]}"


def is_writer_id(text: object) -> bool:
    """Whether ``text`` is a legal writer id (or the id of an attempt), and so a folder's name."""
    return isinstance(text, str) and (_WRITER.fullmatch(text) is not None or part_of(text) is not None)


def check_writer_id(writer_id: str) -> str:
    """Return ``writer_id`` if it is legal.

    Raises:
        OptionError: It is not 1 to 64 of ``a-z 0-9 -``, or starts with ``-``, and is not the id of an
            attempt.
    """
    if not is_writer_id(writer_id):
        raise OptionError(
            f"writer_id={excerpt(writer_id)}: expected 1 to 64 of the characters a-z, 0-9 and '-', "
            "not starting with '-'"
        )
    return writer_id


def is_job(text: object) -> bool:
    """Whether ``text`` is a legal name of a job whose parts are written by attempts."""
    return isinstance(text, str) and _JOB.fullmatch(text) is not None


def part_id(job: str, number: int) -> str:
    """Return the prefix that all attempts at one part of a job share: ``x<job>-<number:06d>``.

    Raises:
        OptionError: ``job`` is not 1 to 31 of ``a-z 0-9 -`` or starts with ``-``, or the number is too large.
    """
    if not is_job(job):
        raise OptionError(
            f"job={excerpt(job)}: expected 1 to 31 of the characters a-z, 0-9 and '-', not starting with '-'"
        )
    if not 0 <= number <= _MAX_PART:
        raise OptionError(f"part {number}: a job has at most {_MAX_PART + 1}; give each more rows")
    return f"x{job}-{number:06d}"


def make_attempt_id(part: str, number: int) -> str:
    """Return a new writer id, ``<part>~<number:04d>-<8 hex>``; no other attempt at the part has it.

    Args:
        part: From `part_id`.
        number: From 0; a later attempt has a larger number than all known ones.

    Raises:
        OptionError: The part has had too many attempts.
    """
    if not 0 <= number <= _MAX_ATTEMPT:
        raise OptionError(f"attempt {number} at {part}: after {_MAX_ATTEMPT + 1}, give the job another name")
    return check_writer_id(f"{part}~{number:04d}-{uuid.uuid4().hex[:8]}")


def part_of(writer_id: str) -> str | None:
    """Return the part that an attempt writes; None if ``writer_id`` is not the id of an attempt.

    Example:
        >>> part_of("xnightly-000007~0001-9b1c22aa"), part_of("w00000-0a1b2c3d")
        ('xnightly-000007', None)
    """
    match = _ATTEMPT.fullmatch(writer_id)
    return None if match is None else match[1]


def writer_dir(writer_id: str) -> str:
    """Return the folder of a writer's shards, relative to the root."""
    return f"{DATA_DIR}/{check_writer_id(writer_id)}"


def shard_path(writer_id: str, name: ShardName) -> str:
    """Return the path of a shard, relative to the root."""
    return f"{writer_dir(writer_id)}/{name.format()}"


def schema_path(schema_hash: str) -> str:
    """Return the path of the schema with that hash (8 to 64 lower-case hex digits), relative to the root.

    Raises:
        OptionError: ``schema_hash`` is not such a hash.
    """
    if _SCHEMA_HASH.fullmatch(schema_hash) is None:
        raise OptionError(f"schema hash {excerpt(schema_hash)}: expected 8 to 64 lower-case hex digits")
    return f"{SCHEMA_DIR}/{schema_hash}.json"


def video_path(digest: str) -> str:
    """Return the path of the video with that digest (32 lower-case hex digits), relative to the root."""
    return f"{VIDEO_DIR}/{digest}.mp4"


def sealed_name(rows: int) -> str:
    """Return the name of the marker that closes a writer for good, after ``rows`` rows."""
    return f"_sealed-{_check_row(rows)}"


def trim_name(row: int) -> str:
    """Return the name of the marker that rows below ``row`` were removed on purpose."""
    return f"_trim-{_check_row(row)}"


def parse_sealed(name: str) -> int | None:
    """Return the rows that a `sealed_name` declares, or None if ``name`` is not one."""
    return _parse_row(_SEALED, name)


def parse_trim(name: str) -> int | None:
    """Return the row that a `trim_name` declares, or None if ``name`` is not one."""
    return _parse_row(_TRIM, name)


def _check_row(row: int) -> int:
    if not 0 <= row <= MAX_ROW:
        raise OptionError(f"row {row}: expected 0 to 2**62")
    return row


def _parse_row(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    if match is None:
        return None
    row = int(match[1])
    return row if row <= MAX_ROW else None
