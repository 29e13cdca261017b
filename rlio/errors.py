"""Every error that rlio raises on purpose, as one tree.

::

    RlioError
    |- EndOfData                     a finite reader has no more batches
    |- OptionError (ValueError)      an argument is illegal, or two contradict each other
    |  |- UnknownName                no reader, writer, filesystem or option has that name
    |  |- UnknownLayout              the layout is unknown, or this reader does not read it
    |- SchemaError (ValueError)      data does not fit the schema: dtype, shape, length
    |  |- SchemaConflict             two schemas give one column different types
    |  |- MissingColumn (KeyError)   a required column is absent
    |- CorruptData (ValueError)      stored bytes are damaged: torn, truncated, flipped, malformed
    |  |- UnsafeData                 stored bytes ask for more than data may: code, memory, other files
    |  |- HoleError                  rows that should be stored are missing
    |- DataNotFound (FileNotFoundError)   nothing is stored there
    |- StateError (ValueError)       a saved state does not fit this reader
    |- ClosedError (ValueError)      the reader or writer was used after close()
    |- LedgerError                   both sides counted the rows, and the numbers differ
    |- StoreError (OSError)          a store or a disk failed, or could not be reached
    |  |- StoreRefused (PermissionError)   the store refused the call: rights or credentials
    |  |- StoreTimeout (TimeoutError)      the store did not answer in time
    |- PublishError (OSError)        a shard could not be stored
    |- EnvError (RuntimeError)       an environment failed, died, hangs, or is invalid
    |- WorkerError (RuntimeError)    a worker of a group raised an error in its own process
    |  |- WorkerLost                 a worker of a group died or hangs, and is not replaced
    |- WaitTimeout (TimeoutError)    a wait reached its time limit
    |- CacheError (OSError)          the folder of built stores is full or unusable
    |- MissingExtra (ImportError)    an optional dependency is not installed

A message says what was found, what was expected, where, and what to do.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = [
    "CacheError",
    "ClosedError",
    "CorruptData",
    "DataNotFound",
    "EndOfData",
    "EnvError",
    "HoleError",
    "LedgerError",
    "MissingColumn",
    "MissingExtra",
    "OptionError",
    "PublishError",
    "RlioError",
    "SchemaConflict",
    "SchemaError",
    "StateError",
    "StoreError",
    "StoreRefused",
    "StoreTimeout",
    "UnknownLayout",
    "UnknownName",
    "UnsafeData",
    "WaitTimeout",
    "WorkerError",
    "WorkerLost",
    "excerpt",
    "raise_at",
]


class RlioError(Exception):
    """Base of all errors raised by rlio.

    Args:
        message: What was found, what was expected, and what to do.
        uri: The file or folder concerned; appended to the message.
        record: Record (line, row group or batch) number within ``uri``, from 0; appended likewise.
        column: Column concerned; appended likewise.
    """

    def __init__(
        self,
        message: str = "",
        *,
        uri: str | None = None,
        record: int | None = None,
        column: str | None = None,
    ) -> None:
        self.uri = uri
        self.record = record
        self.column = column
        places = [
            f"{label} {value}"
            for label, value in (("in", uri), ("record", record), ("column", _name(column)))
            if value is not None
        ]
        super().__init__(_printable(f"{message} [{', '.join(places)}]" if places else message))

    def __str__(self) -> str:
        # KeyError's own __str__ would show the repr, with escaped quotes.
        return str(self.args[0]) if self.args else ""


class EndOfData(RlioError):
    """A finite reader has no more batches. Iteration turns it into a plain stop."""


class OptionError(RlioError, ValueError):
    """An argument is illegal, or two arguments contradict each other."""


class UnknownName(OptionError):
    """No reader, writer, filesystem or option is known under the given name."""


class UnknownLayout(OptionError):
    """The layout of the files is unknown, or this reader does not read it.

    The files are not damaged, so ``on_error="skip"`` raises this error too.
    """


class SchemaError(RlioError, ValueError):
    """Data does not fit its schema: wrong dtype, shape or length."""


class SchemaConflict(SchemaError):
    """Two schemas of one data set give the same column different dtypes or shapes."""


class MissingColumn(SchemaError, KeyError):
    """A required column is absent."""


class CorruptData(RlioError, ValueError):
    """Stored bytes are damaged: torn, truncated, flipped or malformed."""


class UnsafeData(CorruptData):
    """Stored bytes ask for more than data may: to import code, to inflate memory, or to leave the root."""


class HoleError(CorruptData):
    """Rows that should be stored are missing: several listings showed none of them."""


class DataNotFound(RlioError, FileNotFoundError):
    """Nothing is stored under the given path, glob or URI."""


class StateError(RlioError, ValueError):
    """A saved state does not fit the reader that should load it."""


class ClosedError(RlioError, ValueError):
    """A reader or writer was used after ``close()``."""


class StoreError(RlioError, OSError):
    """A store or a disk failed, or could not be reached. The original error is the ``__cause__``.

    Attributes:
        errno: The errno of the cause, if it has one.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # For pickling to other processes: OSError's own method does not know the attributes set here.
        return type(self), (str(self),), {"uri": self.uri, "errno": self.errno}


class StoreRefused(StoreError, PermissionError):
    """A store or a disk refused a call: rights are missing, or credentials are wrong."""


class StoreTimeout(StoreError, TimeoutError):
    """A store did not answer within the time limit of a call."""


class PublishError(RlioError, OSError):
    """A shard could not be stored; the writer still has the rows."""


class CacheError(RlioError, OSError):
    """The folder of built stores is full, is unsuitable, or is in use by another process.

    Nothing is lost: the stores can be built again from the data sets.
    """


class LedgerError(RlioError):
    """The counts of rows in and rows out differ: rows were lost or duplicated in between."""


class EnvError(RlioError, RuntimeError):
    """An environment raised an error, its process died, it takes too long, or it is invalid.

    Args:
        message: What happened, and what to do.
        env_index: Index of the environment in the runner.
        episode: How many episodes that environment had begun before the one that failed.
        seed: The seed of that episode's reset, see `rlio.envs.seeds.episode_seed`.

    The environment's own error is the ``__cause__``.
    """

    def __init__(
        self, message: str, *, env_index: int = 0, episode: int | None = None, seed: int | None = None
    ) -> None:
        super().__init__(message)
        self.env_index: int = env_index
        self.episode: int | None = episode
        self.seed: int | None = seed


class WorkerError(RlioError, RuntimeError):
    """A worker of a group raised an error in its own process; the worker continues.

    Args:
        message: What happened, and what to do.
        worker_index: Index of the worker.
        incarnation: How many times the worker had been replaced before.

    The worker's own error is the ``__cause__``; the traceback from its process is a note.
    """

    def __init__(self, message: str, *, worker_index: int = 0, incarnation: int = 0) -> None:
        super().__init__(message)
        self.worker_index: int = worker_index
        self.incarnation: int = incarnation


class WorkerLost(WorkerError):
    """A worker of a group died or does not answer, and is not replaced."""


class WaitTimeout(RlioError, TimeoutError):
    """A call reached its time limit before the awaited result came; calling again waits again."""


class MissingExtra(RlioError, ImportError):
    """An optional dependency is not installed; the message holds the pip line."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: run  pip install 'rlio[{extra}]'")
        self._parts = package, extra

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return type(self), self._parts  # For pickling to other processes: `args` holds only the message.


def raise_at(error: RlioError, *, uri: str | None, record: int | None = None) -> NoReturn:
    """Raise ``error`` with the place where it happened, unless it has a place already."""
    if error.uri is not None:
        raise error
    # The message ends with the column, if it was known; the new error appends it after the place.
    message = str(error).removesuffix(f" [column {error.column}]")
    raise type(error)(message, uri=uri, record=record, column=error.column) from error


def excerpt(data: object, limit: int = 200) -> str:
    """Escaped, shortened text of untrusted ``data``, safe to put into a message or a log.

    Converts only the shown part to text: a gigabyte of data does not make a gigabyte of message.
    """
    if isinstance(data, (str, bytes, bytearray)):
        text = ascii(data[: limit + 1])
        return text if len(text) <= limit else f"{text[:limit]}... ({len(data)} in all)"
    if isinstance(data, (list, tuple, dict)):
        text = _opening(data, limit)
        return text if len(text) <= limit else f"{text[:limit]}... ({len(data)} items)"
    text = ascii(data)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _opening(data: object, limit: int, depth: int = 0) -> str:
    """The start of ``ascii(data)``: at most a little over ``limit`` characters are made."""
    if isinstance(data, (str, bytes, bytearray)):
        return ascii(data[: max(limit, 0) + 1])
    if type(data) not in (list, tuple, dict) or not isinstance(data, (list, tuple, dict)):
        return ascii(data)
    if depth > _SHOWN_DEPTH:
        return "..."
    first, last = "()" if isinstance(data, tuple) else "{}" if isinstance(data, dict) else "[]"
    text, between = first, ""
    for item in data:
        text += between + _opening(item, limit - len(text), depth + 1)
        if isinstance(data, dict):
            text += ": " + _opening(data[item], limit - len(text), depth + 1)
        if len(text) > limit:
            return text
        between = ", "
    return text + ("," if isinstance(data, tuple) and len(data) == 1 else "") + last


# Deeper data is cut off: each level costs a call.
_SHOWN_DEPTH = 40
# Column names are shown unchanged up to this length: nested ones are long.
_NAME_CHARACTERS = 400


def _name(column: str | None) -> str | None:
    """A column's name as a message shows it: the name may come from an untrusted file."""
    return column if column is None or len(column) <= _NAME_CHARACTERS else excerpt(column)


def _printable(text: str) -> str:
    """One line: escapes replace what could move a cursor, colour a terminal or forge log lines."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
