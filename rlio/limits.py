"""Every bound on what reading untrusted bytes may cost, in one place.

All limits are finite; `docs/security.md` lists the defaults. Raise a limit if your own data needs it. Lower
the limits if you open untrusted data and have little memory. The limits keep the claims of one shard, row
group, line or file in proportion. They do not bound the memory of a process: use the operating system for
that (a cgroup, ``RLIMIT_AS``).

Example:
    >>> small = Limits(group_bytes=64 << 20, listed_names=10_000)
    >>> small.group_bytes, small.columns
    (67108864, 4096)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral
from typing import Final

from rlio.errors import OptionError, UnsafeData, excerpt

__all__ = ["DEFAULT_LIMITS", "Limits"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what is read. Data that exceeds a bound is refused with `UnsafeData` before it is decoded.

    Attributes:
        listed_names: Names that one listing may return: 10 times the shards of the largest planned data set.
        schema_bytes: Bytes of a schema's JSON, and of the provenance's.
        schema_values: Lists and objects in that JSON, and an eighth of its values.
        footer_bytes: Bytes of a Parquet footer. 10^5 columns of row groups take 8 MB; writers end a shard
            before its footer is larger. Parsing a footer takes 11 times as many bytes; a forged footer up to
            240 times: 3.8 GiB.
        columns: Physical columns of a shard, file or record.
        policies: Policies of a schema.
        nesting: Levels of a nested column.
        streams_bytes: Bytes of a shard's table of streams, as JSON.
        group_rows: Rows of one row group, line or record.
        group_bytes: Bytes of one decoded row group or line, with 64 bytes for each text and object. Objects
            (infos) may take four times as much, because Python's lists and dicts are that much larger. For
            RLlib's packed columns, the intermediate results of unpacking count too.
        packed_values: Opcodes of RLlib's packed columns in one record, and values in them: some 50 an array.
            If each row of a Parquet file is packed, each stored byte allows four more.
        shard_bytes: Bytes of a JSON shard, which is held in memory as a whole while it is opened.
        line_bytes: Bytes of one line of JSON, unpacked. Parsing takes up to 27 times as many.
        inflation: The largest ratio of decompressed to stored bytes. Pieces below `free_bytes` may exceed it.
        free_bytes: Decompressed bytes that are always allowed, for stored pieces of any size.
        zstd_window: Bytes that a zstd frame may keep as its look-back window while it is decompressed.

    Raises:
        OptionError: A limit is not a positive whole number.
    """

    listed_names: int = 1_000_000
    schema_bytes: int = 64 << 20
    schema_values: int = 1_000_000
    footer_bytes: int = 16 << 20
    columns: int = 4096
    policies: int = 4096
    nesting: int = 8
    streams_bytes: int = 256 << 20
    group_rows: int = 1 << 24
    group_bytes: int = 1 << 30
    packed_values: int = 1_000_000
    shard_bytes: int = 1 << 30
    line_bytes: int = 64 << 20
    # Our texts and tables compress by less than a thousand; only zeros compress more: 8 MiB a page.
    inflation: int = 1000
    free_bytes: int = 64 << 20
    zstd_window: int = 128 << 20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # Not by `rlio.support.options`, which is above this module.
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise OptionError(
                    f"Limits.{field.name}={excerpt(value)}: expected a whole number, at least 1"
                )
            object.__setattr__(self, field.name, int(value))

    def __repr__(self) -> str:
        given = (f.name for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Limits({', '.join(f'{name}={getattr(self, name)}' for name in given)})"

    def check_inflation(self, stored: int, inflated: int, what: str) -> None:
        """Refuse ``what`` if ``inflated`` is out of proportion to the ``stored`` bytes.

        Raises:
            UnsafeData: The ratio exceeds `inflation`, and ``inflated`` exceeds `free_bytes`.
        """
        if inflated > self.free_bytes and inflated > self.inflation * max(stored, 1):
            raise UnsafeData(
                f"{what}: {stored} bytes would inflate to {inflated}, more than {self.inflation} times as "
                "many; raise Limits.inflation if you trust the data"
            )

    def check_json(self, text: bytes | str, what: str) -> None:
        """Refuse JSON of a schema that would take many times its size after parsing.

        Raises:
            UnsafeData: The text has too many bytes, lists and objects, or values.
        """
        if len(text) > self.schema_bytes:
            raise UnsafeData(f"{what} of {len(text)} bytes: expected at most {self.schema_bytes}")
        raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
        lists, commas = raw.count(b"[") + raw.count(b"{"), raw.count(b",")
        if lists > self.schema_values or commas > 8 * self.schema_values:
            raise UnsafeData(
                f"{what} of {lists} lists and objects and {commas} values: expected at most "
                f"{self.schema_values} and {8 * self.schema_values}; raise Limits.schema_values if you "
                "trust the data"
            )


DEFAULT_LIMITS: Final = Limits()
