"""Markers in a writer's folder: the writer is closed for good, or its oldest rows were removed on purpose.

A marker is an object whose name states everything; its content repeats the name for people who open it. Of
several markers of one kind, the largest number counts, so a marker can be put at any time, in any order, and
repeatedly.

Example:
    >>> from rlio.storage.filesystem import Storage
    >>> from rlio.catalog.listing import list_shards
    >>> storage = Storage.open("memory://markers-example")
    >>> seal(storage, "w00000-0a1b2c3d", 4096)
    >>> trim(storage, "w00000-0a1b2c3d", 1024)
    >>> listing = list_shards(storage)
    >>> listing.sealed, listing.trimmed
    ({'w00000-0a1b2c3d': 4096}, {'w00000-0a1b2c3d': 1024})
"""

from __future__ import annotations

from rlio.catalog.names import sealed_name, trim_name, writer_dir
from rlio.storage.filesystem import Storage

__all__ = ["claim", "disclaim", "seal", "trim"]


def seal(storage: Storage, writer: str, rows: int) -> None:
    """Mark ``writer`` as closed for good after ``rows`` rows, so that a reader that follows it sees the end.

    Raises:
        PublishError: The marker could not be stored.
        OptionError: The writer id or the number of rows is illegal.
    """
    _put(storage, writer, sealed_name(rows))


def trim(storage: Storage, writer: str, row: int) -> None:
    """Mark the rows of ``writer`` below ``row`` as removed: no shard brings them back.

    Raises:
        PublishError: The marker could not be stored.
        OptionError: The writer id or the row is illegal.
    """
    _put(storage, writer, trim_name(row))


def claim(storage: Storage, writer: str) -> None:
    """Announce ``writer`` before it has stored a row; the claim is a trim marker at row 0.

    Readers that follow the data set then wait for this writer, even if all others are closed. The claim also
    reserves an id that the user gave: it cannot be used again while a log still holds rows of it, because
    their numbers would then mean other rows.

    Raises:
        PublishError: The marker could not be stored.
        OptionError: The writer id is illegal.
    """
    trim(storage, writer, 0)


def disclaim(storage: Storage, writer: str) -> None:
    """Remove the marker of `claim`: ``writer`` is sealed, or has no rows and never will."""
    storage.remove(f"{writer_dir(writer)}/{trim_name(0)}")


def _put(storage: Storage, writer: str, name: str) -> None:
    # Not empty: some stores and copying tools drop objects without bytes.
    storage.put(f"{writer_dir(writer)}/{name}", f"{name}\n".encode())
