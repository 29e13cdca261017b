"""Markers in a writer's folder: that it is closed for good, and that its oldest rows are gone on purpose.

A marker is an object whose name says everything; its content repeats the name for people who look into it. Of
several of one kind the one with the largest number counts, so that putting one is right at any time, in any
order, and as often as one likes.

Example:
    >>> from rlio.storage.filesystem import Storage
    >>> from rlio.dataset.listing import list_shards
    >>> storage = Storage.open("memory://markers-example")
    >>> seal(storage, "w00000-0a1b2c3d", 4096)
    >>> trim(storage, "w00000-0a1b2c3d", 1024)
    >>> listing = list_shards(storage)
    >>> listing.sealed, listing.trimmed
    ({'w00000-0a1b2c3d': 4096}, {'w00000-0a1b2c3d': 1024})
"""

from __future__ import annotations

from rlio.dataset.names import sealed_name, trim_name, writer_dir
from rlio.storage.filesystem import Storage

__all__ = ["claim", "disclaim", "seal", "trim"]


def seal(storage: Storage, writer: str, rows: int) -> None:
    """Say that ``writer`` is closed for good, after ``rows`` rows: who follows it knows the end.

    Raises:
        PublishError: The marker could not be stored.
        OptionError: There is no such writer id or number of rows.
    """
    _put(storage, writer, sealed_name(rows))


def trim(storage: Storage, writer: str, row: int) -> None:
    """Say that the rows of ``writer`` below ``row`` are gone: no shard brings them back.

    Raises:
        PublishError: The marker could not be stored.
        OptionError: There is no such writer id or row.
    """
    _put(storage, writer, trim_name(row))


def claim(storage: Storage, writer: str) -> None:
    """Say that ``writer`` is there, before it has stored a row: no row of it is gone.

    Who follows the data set then waits for it, though all others are closed; and a writer id that was given,
    and not drawn, cannot be given again while rows of it are in a log somewhere, whose numbers would then
    stand for other rows.

    Raises:
        PublishError: The marker could not be stored.
        OptionError: There is no such writer id.
    """
    trim(storage, writer, 0)


def disclaim(storage: Storage, writer: str) -> None:
    """Remove what `claim` has put: ``writer`` is sealed, or has no rows and never will."""
    storage.remove(f"{writer_dir(writer)}/{trim_name(0)}")


def _put(storage: Storage, writer: str, name: str) -> None:
    # Not empty: some stores and copying tools drop objects without bytes.
    storage.put(f"{writer_dir(writer)}/{name}", f"{name}\n".encode())
