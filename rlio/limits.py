"""How much stored data may ask for: every bound on what a stranger's bytes cost to read, in one place.

All of them are finite, and the defaults are those of `docs/security.md`. Raise one where your own data needs
it; lower them where you open data of strangers and have little memory. For a hard bound on the memory of a
process, its operating system has the means (a cgroup, ``RLIMIT_AS``): these limits keep what one shard, row
group, line or file can claim in proportion, and no more.

Example:
    >>> small = Limits(group_bytes=64 << 20, listed_names=10_000)
    >>> small.group_bytes, small.columns
    (67108864, 4096)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from rlio.errors import OptionError, UnsafeData, excerpt

__all__ = ["DEFAULT_LIMITS", "Limits"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what is read; what exceeds one is refused with `UnsafeData`, before it is decoded.

    Attributes:
        listed_names: Names that one listing may return: 10 times the shards of the largest data set that is
            planned for.
        schema_bytes: Bytes of a schema's JSON, and of the provenance's.
        schema_values: Lists and objects in that, and an eighth of its values.
        footer_bytes: Bytes of a Parquet footer. 10^5 columns of row groups take 8 MB; writers end a shard
            before its footer is larger. Parsing takes 11 times as many bytes, and of a forged one up to 240
            times: 3.8 GiB.
        columns: Physical columns of a shard, file or record.
        policies: Policies of a schema.
        nesting: Levels of a nested column.
        streams_bytes: Bytes of a shard's table of streams, as JSON.
        group_rows: Rows of one row group, line or record.
        group_bytes: What one row group, or line, decodes to, with 64 bytes for each text and object. Objects
            (infos) may take four times as much, since Python's lists and dicts are that much larger. Of
            RLlib's packed columns, what unpacking them makes on the way counts too.
        packed_values: Opcodes of RLlib's packed columns in one record, and values in them: some 50 an array.
            Where each row of a Parquet file is packed, four more for each byte that is stored.
        shard_bytes: Bytes of a JSON shard, which is held whole while it is opened.
        line_bytes: Bytes of one line of JSON, unpacked. Parsing it takes up to 27 times as many.
        inflation: How many times its stored bytes a compressed piece may be; those below `free_bytes` may.
        free_bytes: Bytes that harm nobody, however small the piece was that they came from.
        zstd_window: Bytes that unpacking a zstd frame may keep for looking back.

    Raises:
        OptionError: One of them is no positive whole number.
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
    # No text or table of ours shrinks a thousandfold, except for zeros, of which a page has 8 MiB.
    inflation: int = 1000
    free_bytes: int = 64 << 20
    zstd_window: int = 128 << 20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise OptionError(f"Limits({field.name}={excerpt(value)}): a whole number, at least 1")

    def check_inflation(self, stored: int, inflated: int, what: str) -> None:
        """Refuse ``what`` where ``stored`` bytes stand for out of all proportion more.

        Raises:
            UnsafeData: They do.
        """
        if inflated > self.free_bytes and inflated > self.inflation * max(stored, 1):
            raise UnsafeData(
                f"{what}: {stored} bytes would inflate to {inflated}, more than {self.inflation} times as "
                "many; raise Limits.inflation if the data are yours"
            )

    def check_json(self, text: bytes | str, what: str) -> None:
        """Refuse JSON of a schema's kind that would take many times its size once it is parsed.

        Raises:
            UnsafeData: It has more bytes, lists and objects, or values than it may.
        """
        if len(text) > self.schema_bytes:
            raise UnsafeData(f"{what} of {len(text)} bytes: at most {self.schema_bytes}")
        raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
        lists, commas = raw.count(b"[") + raw.count(b"{"), raw.count(b",")
        if lists > self.schema_values or commas > 8 * self.schema_values:
            raise UnsafeData(
                f"{what} of {lists} lists and objects and {commas} values: at most {self.schema_values} and "
                f"{8 * self.schema_values}; raise Limits.schema_values if the data are yours"
            )


DEFAULT_LIMITS: Final = Limits()
