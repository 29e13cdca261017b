"""`Recording`: the base of the recorders. It has the writer, and decides when rows go to it."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch
from rlio.batch.columns import RECORDED, Columns, is_per_sequence
from rlio.batch.nested import path_text
from rlio.catalog.commit import read_header
from rlio.envs.leaves import Leaf
from rlio.envs.values import as_info, as_text, in_numpy, text_column
from rlio.errors import DataNotFound, OptionError, PublishError, RlioError, SchemaError, excerpt
from rlio.resolve import IOContext, registered_output, resolve_output
from rlio.schemas.json_values import check_text, check_value, plain_array
from rlio.source.snapshot import DatasetSnapshot, rows_waiting
from rlio.storage.clients import within
from rlio.storage.filesystem import Storage
from rlio.support.described import Described
from rlio.support.forks import Owner
from rlio.support.turns import Turns
from rlio.support.words import counted
from rlio.writer import OutputWriter, close_after

if TYPE_CHECKING:
    pass

__all__ = [
    "ENV",
    "MOST_ROWS",
    "Mode",
    "Recording",
    "Rows",
    "WriterLike",
    "alone",
    "as_extra",
    "check_names",
    "check_object",
    "extra_rows",
    "stored_info",
]

logger: logging.Logger = logging.getLogger("rlio")

#: What recorders take as a writer.
WriterLike = OutputWriter | str | os.PathLike[str]
_Method = TypeVar("_Method", bound=Callable[..., Any])
#: Whether a root may hold rows already.
Mode = Literal["append", "new"]

#: Who gave a value, in messages.
ENV: Final = "the environment"
#: A write of any size costs as much as some hundred steps. 256 rows are few enough that a crash loses
#: little, and enough that writing costs a microsecond a step.
MOST_ROWS: Final = 256
_MOST_SECONDS: Final = 1.0
# Episodes of a few steps end faster than they could be written one by one.
_PAUSE_SECONDS: Final = 0.002
# Seconds that opening a recorder waits for the number of rows in its root.
_TELL_SECONDS: Final = 2.0
# Runners record these columns. They are not recorded here, so a loop may pass them to `record`.
_FREE: Final = frozenset({Columns.UNROLL_ID, Columns.AGENT_INDEX, Columns.WEIGHTS_SEQ_NO})


class Rows(Protocol):
    """Rows since the last write."""

    @property
    def count(self) -> int:
        """Number of rows that can be written."""

    @property
    def full(self) -> bool:
        """Whether there is no room for another step."""

    def batch(self) -> Batch:
        """The rows; they stay until `written` is called."""

    def written(self) -> None:
        """Drop the rows of the last `batch`."""


class _Recorder:
    """Decides when the rows go to the writer."""

    def __init__(self, rows: Rows, writer: OutputWriter) -> None:
        self.rows = rows
        self.writer = writer
        self._written_at = time.monotonic()
        self._owner = Owner()
        #: Whether this is the copy in a forked child. (At each step, the owner would ask the system.)
        self.was_forked = False
        _recorders.add(self)

    def write_if_due(self, *, ended: bool) -> None:
        """Write if the buffer is full, the last write is old, or an episode ended.

        Raises:
            PublishError: This is a forked child: the writer is its parent's.
        """
        if self.was_forked:
            self._owner.check("recorder", error=PublishError)
        since = time.monotonic() - self._written_at
        if self.rows.full or since > (_PAUSE_SECONDS if ended else _MOST_SECONDS):
            self.write()

    def finish(self) -> None:
        """Write all rows, unless the writer was closed before."""
        if not self.writer.closed:
            self.write()

    def write(self) -> None:
        """Write all rows. If the write fails, the rows are kept and written later.

        Raises:
            SchemaError: The writer refuses the rows, which are kept.
        """
        # A forked child has a copy of its parent's rows; the parent writes them.
        while self.rows.count and not self.was_forked:
            self.writer.write(self.rows.batch())
            self.rows.written()
        self._written_at = time.monotonic()


#: Recorders whose rows are written when the interpreter exits.
_recorders: weakref.WeakSet[_Recorder] = weakref.WeakSet()


def _mark_copies() -> None:
    for recorder in list(_recorders):
        recorder.was_forked = True


def _write_all() -> None:
    for recorder in list(_recorders):
        _let_go(recorder)


def _let_go(recorder: _Recorder) -> None:
    """Write the waiting rows where no caller can get an exception: log errors."""
    try:
        recorder.finish()
    except Exception as error:
        logger.error("%d recorded rows are lost: they could not be written: %s", recorder.rows.count, error)


# `rlio.writer` registered the closing of open writers before. The last registered function runs first, so the
# rows are written before the writers close.
getattr(threading, "_register_atexit", atexit.register)(_write_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_copies)


def alone(method: _Method) -> _Method:
    """Refuse a call of ``method`` while another thread is in a call of its recorder.

    Not `Turns.held`: a `with` block would take a tenth of the time of a step.
    """

    @wraps(method)
    def call(self: Recording, /, *args: Any, **kwargs: Any) -> Any:
        lock = self._lock
        if not lock.acquire(False):
            raise self._turns.taken()
        try:
            return method(self, *args, **kwargs)
        finally:
            lock.release()

    return cast("_Method", call)


class Recording(Described):
    """The rows of a wrapped environment, and the writer that gets them.

    One thread at a time may step it. `flush` and `close` may come from any thread; they wait for its step.
    """

    writer: OutputWriter

    def _start_recording(
        self,
        rows: Rows,
        writer: WriterLike,
        *,
        context: IOContext,
        storage_options: Mapping[str, Any] | None,
        mode: Mode,
        seeds: bool,
        close_writer: bool,
    ) -> None:
        self._turns = Turns(type(self).__name__)
        self._lock = self._turns.lock
        self.writer = _writer_of(writer, context, storage_options, mode)
        self._recorder = _Recorder(rows, self.writer)
        self._seeds, self._close_writer = seeds, close_writer
        #: Whether a step failed since the last reset: the state of the environment is then unknown.
        self._failed = False
        # The rows of an environment that was dropped without close() are written too.
        self._finalizer = weakref.finalize(self, _let_go, self._recorder)
        self._finalizer.atexit = False

    if TYPE_CHECKING:  # Each recorder closes its own kind of environment.

        def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> Literal[False]:
        close_after(self, raised[1])
        return False

    def _describe(self) -> Iterator[str]:
        yield f"{counted(self._recorder.rows.count, 'row')} waiting for {self.writer!r}"

    def _check_state(self) -> None:
        if self._failed:
            raise OptionError(
                "the last step failed, and the state of the environment is unknown: call reset() first"
            )

    def flush(self) -> None:
        """Write the waiting rows, and return once every reader can see them.

        Raises:
            PublishError: The rows cannot be written or published; they are kept.
        """
        with self._turns.held():
            self._recorder.write()
        self.writer.flush()

    def _finish(self, close_env: Callable[[], Any], *, leave: Callable[[], None] | None = None) -> None:
        """Write the rows, and close the environment and the writer, also if one of these fails.

        Args:
            close_env: Closes the environment.
            leave: Called first; ends the running episode.
        """
        errors: list[Exception] = []
        closings: list[Callable[[], Any]] = [self._recorder.finish, close_env]
        if leave is not None:
            closings.insert(0, leave)
        if self._close_writer:
            closings.append(self.writer.close)
        with self._turns.after_calls():
            for close in closings:
                try:
                    close()
                except Exception as error:  # The first is raised below, with the others as notes.
                    errors.append(error)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"closing failed too: {other!r}")
            raise errors[0]


def check_names(columns: Mapping[str, Any], *, seeds: bool, own: frozenset[str] = frozenset()) -> None:
    """Check names that a loop passes to ``record``.

    Raises:
        OptionError: The recorder records a column of that name itself.
    """
    free = (_FREE if seeds else _FREE | {Columns.ENV_SEED}) - own
    for name in columns:
        if name in (RECORDED | own) - free:
            raise OptionError(f"record({name}=...): rlio records this column itself; leave it out")
        if is_per_sequence(name):
            raise OptionError(
                f"record({name}=...): this column is of sequences, and rows are steps; leave it out"
            )


def as_extra(name: str, value: Any) -> NDArray[Any]:
    """A copy of a value given to ``record``; tensors may be on any device, with or without gradients.

    A Python float becomes a float32, because its type does not show its precision, and policies compute in
    float32. Texts, bytes and lists of texts are objects, shape ().

    Raises:
        SchemaError: It is not an array of numbers or texts, or its dtype has no stored form.
    """
    text = as_text(value)
    if text is not None:
        check_object_value(text, name)
        made = np.empty((), object)
        made[()] = text
        return made
    try:
        found = (
            np.array(value, np.float32)
            if type(value) is float
            else np.array(plain_array(in_numpy(value), name))
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise SchemaError(f"record() was given {excerpt(value)}: {error}", column=name) from error
    if found.dtype == object:
        raise SchemaError(
            f"record() was given {excerpt(value)}: expected a number, a text or an array", column=name
        )
    return found


def extra_rows(name: str, value: Any) -> NDArray[Any]:
    """As `as_extra`, of a value with a row for each of several environments.

    Raises:
        SchemaError: It is not an array of numbers or texts, or its dtype has no stored form.
    """
    texts = text_column(value)
    if texts is None:
        return as_extra(name, value)
    for text in texts.tolist():
        check_object_value(text, name)
    return texts


# ---- objects ----


def stored_info(info: Any) -> dict[str, Any]:
    """A copy of an info that every writer of a data set takes.

    Raises:
        SchemaError: It is not a dict, or a part of it has no stored form.
    """
    made = as_info(info, giver=ENV)
    check_value(made, Columns.INFOS)
    return made


def check_object(leaf: Leaf, value: Any, column: str) -> None:
    """Refuse a value that is an object, of a leaf such as Text or Sequence, if it has no stored form.

    Raises:
        SchemaError: It has none.
    """
    check_object_value(value, "/".join(filter(None, (column, path_text(leaf.path)))))


def check_object_value(value: Any, name: str) -> None:
    """Refuse an object that has no stored form as a row of a column.

    Raises:
        SchemaError: It has none.
    """
    if isinstance(value, list | tuple) and {*map(type, value)} <= {str}:
        check_text("".join(value), name)
    elif isinstance(value, str):
        check_text(value, name)
    else:
        check_value(value, name)


# ---- the writer ----


def _writer_of(
    writer: Any, context: IOContext, storage_options: Mapping[str, Any] | None, mode: Mode
) -> OutputWriter:
    if mode not in ("append", "new"):
        raise OptionError(f"mode={excerpt(mode)}: expected 'append' or 'new'")
    is_root = isinstance(writer, os.PathLike) or (
        isinstance(writer, str) and registered_output(writer) is None
    )
    if mode == "new" and not is_root:
        raise OptionError(f"mode='new' beside {excerpt(writer)}: pass the path or URL of a data set instead")
    if isinstance(writer, OutputWriter):
        if storage_options is not None:
            raise OptionError("found storage_options= beside a writer: pass them to the writer instead")
        return writer
    if not is_root:
        return resolve_output(writer, context)
    storage = Storage.open(writer, storage_options=storage_options)
    is_first = storage.uri not in _opened
    if is_first and mode == "new" and (found := _found_in(storage)):
        raise OptionError(
            f"mode='new', but the data set holds {found}: choose another root, or pass mode='append'",
            uri=storage.uri,
        )
    made = resolve_output(writer, context)
    _opened.add(storage.uri)
    if is_first and mode == "append":
        _tell_rows(storage)
    return made


#: Roots that recorders of this process have opened.
_opened: set[str] = set()


def _found_in(storage: Storage) -> str:
    """The rows of a data set, for a message; "" if it has none."""
    try:
        read_header(storage)
        rows = len(DatasetSnapshot.listed(storage))
    except DataNotFound:
        rows = 0
    waiting = "" if rows else rows_waiting(storage)
    return f"{rows} rows" if rows else waiting and f"no rows{waiting}"


def _tell_rows(storage: Storage) -> None:
    """Log how many rows a data set holds, if the store says so soon: a recorder opens also without it."""
    try:
        found = within(_TELL_SECONDS, lambda: _found_in(storage))
    except (RlioError, OSError) as error:
        logger.info("%s: the number of its rows is not known: %s", storage.uri, error)
        return
    if found:
        logger.warning("%s holds %s: new rows are added to them (mode='append')", storage.uri, found)
