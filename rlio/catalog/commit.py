"""Committing: a shard is committed when it appears under its name.

This needs no lock, log, clock, rename or conditional put. Each writer has its own folder, a shard's name
certifies its bytes, and a second put stores the same object again.

Example:
    >>> from rlio.storage.filesystem import Storage
    >>> storage = Storage.open("memory://publish-example")
    >>> put_header(storage)
    >>> name = ShardName(first=0, rows=4, size=4, crc32=0x0A8BF4A1, footer_crc32=0, suffix="jsonl")
    >>> put_shard(storage, "w00000-0a1b2c3d", name, memoryview(b"rows")).path
    'data/w00000-0a1b2c3d/000000000000-4-4-0a8bf4a1-00000000.jsonl'
    >>> read_header(storage)
    {'format': 0}
"""

from __future__ import annotations

import json
from typing import Any, Final

from rlio.catalog.listing import ShardRef
from rlio.catalog.names import DATA_DIR, HEADER, ShardName, shard_path
from rlio.errors import CorruptData, DataNotFound, OptionError, excerpt
from rlio.storage.filesystem import Storage

__all__ = ["FORMAT", "HEADER_BYTES", "put_header", "put_shard", "read_header"]

#: Version of the written format that this library writes; it reads no other.
FORMAT: Final = 0
#: The header: every writer puts the same bytes, so it does not matter which writer puts it, or how often.
HEADER_BYTES: Final = b'{"format": 0}\n'

_HEADER_LIMIT = 64 * 1024
# How many names of a folder without a header are read, and how many of them the error shows.
_LOOKED_AT = 100
_SHOWN = 8


def put_shard(storage: Storage, writer_id: str, name: ShardName, data: memoryview) -> ShardRef:
    """Store one shard. After the return, every reader that lists the root finds it.

    Args:
        storage: The data set's root.
        writer_id: The writer's id; no other writer has it.
        name: The shard's name, which certifies ``data``.
        data: The encoded rows.

    Raises:
        PublishError: The shard could not be stored. You can repeat the call with the same arguments.
        OptionError: The writer id is illegal.
    """
    path = shard_path(writer_id, name)
    storage.put(path, data)
    return ShardRef(writer_id, name, path)


def put_header(storage: Storage) -> None:
    """Make ``storage`` the root of a data set, unless it already is.

    Raises:
        OptionError: ``storage`` is the root of a data set in another format version, or a file.
        CorruptData: The header is damaged, or not from rlio.
        PublishError: The header could not be stored.
    """
    if storage.is_zipped:
        raise OptionError("found a zip file, which is read only: pass another folder", uri=storage.uri)
    if storage.is_file:
        raise OptionError("found a file, expected a folder or nothing: pass another folder", uri=storage.uri)
    try:
        present = storage.read(HEADER, limit=_HEADER_LIMIT)
    except DataNotFound:
        present = b""
    if present == HEADER_BYTES:
        return
    # Where puts are not atomic, a part of the header means a put in progress, or a writer that died in one.
    if HEADER_BYTES.startswith(present):
        storage.put(HEADER, HEADER_BYTES)
        return
    _parse(present, storage)


def read_header(storage: Storage) -> dict[str, Any]:
    """Return the header of the data set at ``storage``: ``{"format": version}``.

    Raises:
        DataNotFound: ``storage`` has no header, so it is not the root of a data set. The message lists its
            files.
        OptionError: The header has a format version that this library does not read.
        CorruptData: The header is damaged, or not from rlio.
    """
    try:
        data = storage.read(HEADER, limit=_HEADER_LIMIT)
    except DataNotFound as error:
        raise DataNotFound(
            f"no data set: {HEADER} is not there; {_contents(storage)}", uri=storage.uri
        ) from error
    return _parse(data, storage)


def _parse(data: bytes, storage: Storage) -> dict[str, Any]:
    uri = storage.uri_of(HEADER)
    try:
        header = json.loads(data.decode("utf-8"))
    # ValueError: not UTF-8, not JSON, or an integer of thousands of digits; RecursionError: nested too deep.
    except (ValueError, RecursionError) as error:
        raise CorruptData(
            f"the header is {excerpt(data)}: expected {excerpt(HEADER_BYTES)}; restore it, or, if the shards "
            f"under {DATA_DIR}/ are of format {FORMAT}, remove it and open a writer there",
            uri=uri,
        ) from error
    version = header.get("format") if isinstance(header, dict) else None
    if type(version) is not int:
        raise CorruptData(
            f"the header is {excerpt(data)}: expected a JSON object with an integer 'format'", uri=uri
        )
    if version != FORMAT:
        raise OptionError(
            f"the data set has format {version}, and this version of rlio reads and writes {FORMAT}: "
            "install the rlio that wrote it, or use another root",
            uri=uri,
        )
    return dict(header)


def _contents(storage: Storage) -> str:
    """Describe what the folder holds: a few names, because there may be millions. Does not descend."""
    names = [name for name, _ in storage.children(most=_LOOKED_AT)]
    if storage.is_file:
        return "this is a file: pass the folder of the data set, or open the file with rlio.read()"
    if not names:
        return "the folder is empty or does not exist"
    more = f"{len(names) - _SHOWN} more" if len(names) < _LOOKED_AT else "many more"
    return (
        "found "
        + ", ".join(excerpt(name, 80) for name in names[:_SHOWN])
        + (f" and {more}" if len(names) > _SHOWN else "")
    )
