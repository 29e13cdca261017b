"""Checks of zip files before their directory is read, and of their members before one is opened."""

from __future__ import annotations

import io
import zipfile
import zlib
from typing import IO, Final

from rlio.errors import UnsafeData
from rlio.limits import Limits

__all__ = ["READ_ERRORS", "check_directory", "check_member", "members_of", "open_archive"]

#: Errors raised by reading a damaged zip file, or member.
READ_ERRORS: Final = (zipfile.BadZipFile, zlib.error, EOFError)
#: Most members of a zip file.
_MAX_MEMBERS: Final = 100_000
# About 100 bytes a member; and the end of a zip file that may hold its end records: a 64 KiB comment may
# follow.
_MAX_DIRECTORY_BYTES: Final = 12 << 20
_END_BYTES: Final = (64 << 10) + 256
_ENCRYPTED: Final = 1


def check_directory(stream: IO[bytes] | io.RawIOBase, *, uri: str) -> None:
    """Refuse a zip file whose directory would take gigabytes of memory, before it is read.

    Source: APPNOTE.TXT, 4.3.14 to 4.3.16: the end record, and the zip64 record before it, hold its size.

    Raises:
        UnsafeData: The directory is too large.
    """
    size = stream.seek(0, io.SEEK_END)
    stream.seek(max(0, size - _END_BYTES))
    tail = stream.read(_END_BYTES) or b""
    found = [0]
    for magic, offset, width in ((b"PK\x05\x06", 12, 4), (b"PK\x06\x06", 40, 8)):
        at = tail.find(magic)
        while at >= 0:  # Check each possible record: which one counts depends on the zip reader.
            found.append(int.from_bytes(tail[at + offset : at + offset + width], "little"))
            at = tail.find(magic, at + 1)
    # A claim beyond the file's size is damage, which the zip reader finds.
    largest = max((claim for claim in found if claim <= size), default=0)
    if largest > _MAX_DIRECTORY_BYTES:
        raise UnsafeData(
            f"a zip file with a directory of {largest} bytes: expected at most {_MAX_DIRECTORY_BYTES}; split "
            "it",
            uri=uri,
        )
    stream.seek(0)


def members_of(archive: zipfile.ZipFile, limits: Limits, *, uri: str) -> list[zipfile.ZipInfo]:
    """The members of a zip file.

    Raises:
        UnsafeData: They are too many.
        zipfile.BadZipFile: One has no name, with which zipfile and fsspec raise an `IndexError`.
    """
    found = archive.infolist()
    if not all(info.filename for info in found):
        raise zipfile.BadZipFile("a member without a name")
    if len(found) > min(_MAX_MEMBERS, limits.listed_names):
        raise UnsafeData(f"{len(found)} members in one zip file: at most {_MAX_MEMBERS}", uri=uri)
    return found


def open_archive(stream: IO[bytes], limits: Limits, *, uri: str) -> zipfile.ZipFile:
    """A zip file, whose directory was checked before it was read.

    Raises:
        UnsafeData: The directory is too large, or has too many members.
        zipfile.BadZipFile: It is damaged.
    """
    check_directory(stream, uri=uri)
    archive = zipfile.ZipFile(stream)
    members_of(archive, limits, uri=uri)
    return archive


def check_member(info: zipfile.ZipInfo, limits: Limits, *, uri: str) -> None:
    """Refuse a member that cannot be read, or inflates too much.

    zipfile yields no more bytes than a member declares.

    Raises:
        UnsafeData: The member is one.
    """
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UnsafeData(
            f"compression method {info.compress_type}: expected a stored or deflated member", uri=uri
        )
    if info.flag_bits & _ENCRYPTED:
        raise UnsafeData("an encrypted member: decrypt it first", uri=uri)
    try:
        limits.check_inflation(info.compress_size, info.file_size, "a zip member")
    except UnsafeData as error:
        raise UnsafeData(str(error), uri=uri) from error
