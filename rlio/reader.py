"""`InputReader`: the contract of all sources of batches.

Authors implement one hook, `_next`, and two more, `_position` and `_seek`, if the reader can resume. The base
owns checks, counters, iteration, left-over rows, state and context management. `rlio.testing.ReaderTests`
tests an implementation.

Example:
    >>> import rlio
    >>> class Ones(rlio.InputReader):
    ...     def _next(self):
    ...         return rlio.SampleBatch(obs=[[1.0], [1.0], [1.0]], rewards=[1.0, 1.0, 1.0])
    >>> reader = Ones()
    >>> len(reader.sample()), len(reader.sample(5))
    (3, 5)
"""

from __future__ import annotations

import contextlib
import logging
import operator
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from rlio.batch import (
    Batch,
    MultiAgentBatch,
    SampleBatch,
    concat_samples,
    copy_into,
    count_units,
    split_units,
)
from rlio.errors import ClosedError, EndOfData, OptionError, SchemaError, StateError, excerpt
from rlio.read_options import check_batch_size
from rlio.support.described import Described
from rlio.support.states import fitting, value_in, whole_number
from rlio.support.turns import Turns
from rlio.writer import ClosedByWith

__all__ = ["Endless", "InputReader", "InputReaderAround", "JsonState", "Restorable", "Unit", "warn_endless"]

logger: logging.Logger = logging.getLogger("rlio")

Unit: TypeAlias = Literal["steps", "sequences", "episodes"]
#: A dict that `json.dumps` takes; `Any` because JSON's recursion gains nothing in practice.
JsonState: TypeAlias = dict[str, Any]

_STATE_VERSION = 1


class Endless(NamedTuple):
    """One pass of an endless series of passes over the same data: no batch may be larger than a pass.

    Attributes:
        number: Number of the pass that the last batch came from.
        units: Units of each pass; None: known only by reading.
        by_epochs: Whether the option ``epochs`` would end it.
    """

    number: int
    units: int | None
    by_epochs: bool = True


def warn_endless(name: str) -> None:
    """Log that a loop over an object of the class ``name`` ends only by a break."""
    logger.warning(
        "%s is endless, because epochs is None: this loop serves the data again and again, and ends only by "
        "a break; pass epochs=1 for one pass",
        name,
    )


class _Rest(NamedTuple):
    """A batch, or the unserved part of one, that waits for the next call."""

    batch: Batch
    #: Position at which the whole batch was read. `served` counts its units that were served.
    origin: JsonState
    served: int


class Restorable(Described):
    """An object that continues from saved states. After a failed load it gives nothing until one succeeds.

    After the failure its position may be the old one, the new one, or a mix of both. A caller that caught the
    error and continued would silently get rows from an undefined position.
    """

    #: The error of the last load; None: the load succeeded.
    _load_failure: str | None = None
    #: Whether a KeyboardInterrupt, or the like, ended a change of the position that has several steps.
    _is_torn: bool = False

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """Remember whether the load in the block fails."""
        try:
            yield
        except BaseException as error:
            self._note_load_failure(error)
            raise
        self._load_failure, self._is_torn = None, False

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Remember whether a KeyboardInterrupt, or the like, ends the block, which moves the position."""
        try:
            yield
        except Exception:  # The block undoes its steps; an interrupt may come within one.
            raise
        except BaseException:
            self._is_torn = True
            raise

    def _note_load_failure(self, error: BaseException) -> None:
        # The text only: the error object would keep its frames, and what they hold, alive.
        self._load_failure = excerpt(repr(error))

    def _check_loaded(self) -> None:
        """Raise if the last load failed, or an interrupt left the position between two batches.

        Raises:
            StateError: It is so.
        """
        if self._is_torn:
            raise StateError(
                f"a call of this {type(self).__name__} was interrupted while it moved on, so rows would be "
                "lost or doubled: load a state that was saved before, or open a new one"
            )
        if self._load_failure is not None:
            raise StateError(
                f"the last state could not be loaded into this {type(self).__name__}, which gives nothing "
                "until a load succeeds: load a state that fits, or open a new one. It was: "
                f"{self._load_failure}"
            )


class InputReader(Restorable, ClosedByWith):
    """A source of experience: `sample()` gives the next batch.

    To write a reader, implement `_next`. If it can resume, implement `_position` and `_seek` too. The base
    handles exact sizes, iteration, saved state, closing and threads.

    Several threads may call a reader: their calls take turns, and each batch goes to one of them. `interrupt`
    and `close` do not wait for their turn. A reader inside another one is called by that one alone.
    """

    #: Whether the reader resumes exactly: a fresh reader that loads a state gives the identical remainder.
    replayable: bool = True
    #: The unit that ``n`` of `sample` counts. One step of a MultiAgentBatch is all rows of one (eps_id, t).
    unit: Unit = "steps"
    #: Whether a last batch shorter than ``n`` is dropped instead of served.
    drop_last: bool = False

    #: Whether any number of rows may be read ahead: reading does not change them, nothing else waits for
    #: them, and nothing else is informed of the reading.
    can_read_ahead: bool = False

    #: Units that were read but not served when the state was saved. A restored reader that is not
    #: `replayable` cannot give them again.
    dropped: int = 0

    #: Names that the class had when states were saved, besides its own.
    _earlier_names: ClassVar[tuple[str, ...]] = ()

    # Class-level defaults, because authors need not call super().__init__(). None stands for an empty queue.
    _rests: deque[_Rest] | None = None
    _closed: bool = False
    # Whether the log says already that iteration does not end.
    _said_endless: bool = False
    # Made by the first call, because authors need not call super().__init__(); see `_turns_of_threads`.
    _thread_turns: Turns | None = None

    @property
    def skipped(self) -> int:
        """Rows, or damaged records, that ``on_error="skip"`` has skipped so far, each counted once."""
        return 0

    # ---- hooks for authors ----

    @abstractmethod
    def _next(self) -> Batch:
        """Return the source's next batch, in its own size; raise `EndOfData` at the end."""

    def _position(self) -> JsonState:
        """Return, as JSON, what `_seek` needs to make `_next` continue from here."""
        return {}

    def _seek(self, position: JsonState) -> None:
        """Continue from ``position``, a value that `_position` returned."""

    def _close(self) -> None:
        """Release files and threads. Called once."""

    def _endless(self) -> Endless | None:
        """The current pass of a reader that never ends; None if the reader ends, or its rows are live."""
        return None

    def interrupt(self) -> None:
        """Wake a `sample` that waits in another thread: it raises `ClosedError`. `close` follows.

        For readers that may wait without limit, such as for clients, and for readers that wrap them. Called
        while another thread is in a call.
        """

    def _next_batch(self) -> Batch:
        batch = self._next()
        if not isinstance(batch, (SampleBatch, MultiAgentBatch)):
            raise SchemaError(
                f"{type(self).__name__}._next() gave {excerpt(batch)}: expected a SampleBatch or "
                "MultiAgentBatch, such as rlio.SampleBatch(columns)"
            )
        return batch

    def _take(self, n: int) -> Batch:
        """Return exactly ``n`` units, or fewer before the end of the data.

        The default joins and splits the batches of `_next`. It remembers the position of the left-over batch,
        so a saved state needs no data. Readers that can cut to size override this.
        """
        parts, kept = self._gather(n)
        batch = parts[0] if len(parts) == 1 else concat_samples(parts)
        # The one step that changes what is left: until then, a failure, a batch that does not fit the others
        # and a KeyboardInterrupt lose no rows.
        self._rests = kept
        return batch

    def _gather(self, n: int) -> tuple[list[Batch], deque[_Rest]]:
        """Parts of ``n`` units in all, and what is left over then; all batches that are read are kept."""
        parts: list[Batch] = []
        missing, used = n, 0
        limit = _SizeLimit(n, self)
        rests = self._rests = deque() if self._rests is None else self._rests
        while missing:
            if used == len(rests):
                # A reader that is not replayable needs no position, and computing one may wait for a thread.
                origin = self._position() if self.replayable else {}
                try:
                    rests.append(_Rest(self._next_batch(), origin, 0))
                except EndOfData:
                    if parts and not self.drop_last:
                        break
                    rests.clear()
                    raise
            rest = rests[used]
            used += 1
            size = count_units(rest.batch, self.unit)
            limit.count(size)
            if size > missing:
                head, tail = split_units(rest.batch, missing, self.unit)
                parts.append(head)
                left = _Rest(tail, rest.origin, rest.served + missing)
                return parts, deque([left, *islice(rests, used, None)])
            if size:
                parts.append(rest.batch)
            missing -= size
        return parts, deque(islice(rests, used, None))

    # ---- the contract ----

    def sample(self, n: int | None = None, *, out: SampleBatch | None = None) -> Batch:
        """Return the next batch.

        Args:
            n: Exact number of units (see `unit`) to return; the left-over is kept for the next call. None
                gives the source's own size: a record, a fragment, its ``batch_size``, or the left-over.
            out: A batch whose arrays are overwritten and returned instead of new ones. It must have the
                columns, shapes and dtypes of the result.

        Returns:
            A batch that the caller owns. Only the last one before `EndOfData` may be shorter than ``n``
            (``drop_last`` drops it).

        Raises:
            EndOfData: A finite reader is exhausted.
            OptionError: ``n`` is below 1; or the reader is endless and its data has fewer than ``n`` units.
            SchemaError: ``out`` does not fit; this pass does not give the batch again.
            StateError: The last `load_state_dict` failed, or a KeyboardInterrupt ended an earlier call at a
                moment at which rows would be lost or doubled (in mixtures).
            ClosedError: After `close`.
        """
        lock = (self._thread_turns or self._turns_of_threads).lock
        if not lock.acquire(False):  # A with block takes twice as long, which is 1 % of a small batch.
            self._turns_of_threads.take(self._check_open)
        try:
            self._check_open()
            self._check_loaded()
            if n is None:
                batch = self._rests.popleft().batch if self._rests else self._next_batch()
            elif operator.index(n) < 1:
                raise OptionError(f"sample(n={n}): n is a number of {self.unit} and at least 1, or None")
            else:
                batch = self._take(operator.index(n))
            return batch if out is None else copy_into(out, batch)
        finally:
            lock.release()

    @property
    def _turns_of_threads(self) -> Turns:
        """The turns of the threads that call this reader."""
        if self._thread_turns is None:  # Of two threads that come here at once, both get the same turns.
            self.__dict__.setdefault("_thread_turns", Turns(type(self).__name__))
        assert self._thread_turns is not None
        return self._thread_turns

    def next(self) -> Batch:
        """Same as `sample()`; RLlib users know this name."""
        return self.sample()

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches until the end of the data.

        An endless reader has no end: it logs this once, as a warning. `sample` does not.

        Raises:
            EndOfData: An endless reader has no data. Its loop must not end as if all data had been served.
        """
        while True:
            try:
                batch = self.sample()
            except EndOfData:
                if self._endless() is not None:
                    raise
                return
            self._say_if_endless()
            yield batch

    def _say_if_endless(self) -> None:
        """Log, once, that iteration does not end, if an option that may have been forgotten would end it."""
        if not self._said_endless:
            self._said_endless = True
            if (found := self._endless()) is not None and found.by_epochs:
                warn_endless(type(self).__name__)

    def state_dict(self) -> JsonState:
        """Return the position as JSON: never options, buffers or data.

        If the reader is `replayable`, a fresh reader with the same arguments that loads the state gives the
        same remainder. Otherwise the left-over is dropped and counted in `dropped`. The state survives any
        JSON encoder, also one that sorts keys. Other versions of rlio may not load it.

        Waits for a `sample` of another thread.

        Raises:
            StateError: The last `load_state_dict` failed.
        """
        with self._turns_of_threads.held():
            return self._whole_state()

    def _whole_state(self) -> JsonState:
        """The state, between two batches."""
        self._check_loaded()
        state: JsonState = {"version": _STATE_VERSION, "reader": type(self).__name__}
        rests = self._rests or ()
        if not self.replayable:
            left = sum(count_units(rest.batch, self.unit) for rest in rests)
            return state | {"position": self._position(), "skip": 0, "dropped": self.dropped + left}
        if rests:
            return state | {"position": rests[0].origin, "skip": rests[0].served, "dropped": self.dropped}
        return state | {"position": self._position(), "skip": 0, "dropped": self.dropped}

    def load_state_dict(self, state: JsonState) -> None:
        """Continue from a state of `state_dict`.

        After any error here, the position of the reader is undefined: `sample` and `state_dict` raise
        StateError until a load succeeds.

        Raises:
            StateError: ``state`` comes from another version or class of reader, or does not fit the data; the
                message says which key.
            ClosedError: After `close`.
        """
        with self._turns_of_threads.held():
            self._check_open()
            with self._loading():
                self._load(state)

    def _load(self, state: JsonState) -> None:
        if not isinstance(state, Mapping):
            raise StateError(f"the state is {excerpt(state)}: expected the dict that state_dict() returned")
        expected = {"version": _STATE_VERSION, "reader": type(self).__name__}
        for key, value in expected.items():
            is_earlier = key == "reader" and state.get(key) in self._earlier_names
            if state.get(key) != value and not is_earlier:
                raise StateError(
                    f"state[{key!r}] is {excerpt(state.get(key))} but this reader needs {value!r}: "
                    "load it into the reader and version that saved it"
                )
        if self.replayable and type(self)._seek is InputReader._seek:
            logger.warning(
                "%s has no _position and _seek: it begins anew, and gives rows again that it gave before the "
                "state was saved, unless all of its batches are alike; implement both, or set replayable = "
                "False",
                type(self).__name__,
            )
        position = dict(value_in(state, "position", dict, of="state"))
        skip, dropped = (whole_number(state, key, of="state") for key in ("skip", "dropped"))
        self._rests = None
        self.dropped = dropped
        with fitting(f"state['position'] of {type(self).__name__}"):
            self._seek(position)
        if dropped:
            logger.warning(
                "%s: %d %s in all were read but not served, and are dropped: they cannot be read again",
                type(self).__name__,
                dropped,
                self.unit,
            )
        if skip:
            self._skip(skip)

    def _skip(self, served: int) -> None:
        """Read the next batch and keep its unserved part."""
        origin = self._position()
        try:
            batch = self._next_batch()
        except EndOfData as end:
            raise StateError(
                f"state['skip'] is {served} but no data is left there: the data changed after the state was "
                "saved"
            ) from end
        size = count_units(batch, self.unit)
        if not 0 < served < size:
            raise StateError(
                f"state['skip'] is {served} but the batch there has {size} {self.unit}: the data changed "
                "after the state was saved"
            )
        _, tail = split_units(batch, served, self.unit)
        self._rests = deque([_Rest(tail, origin, served)])

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{type(self).__name__} is closed: open a new one, or use it before close()")

    def close(self) -> None:
        """Release files, threads and buffers. May be called again.

        Interrupts a call of another thread that waits, and waits some seconds for a call that does not.
        """
        if not self._closed and self._turns_of_threads.begin_close():
            self._closed = True
            with self._turns_of_threads.after_calls(self.interrupt):
                self._rests = None
                self._close()


class InputReaderAround(InputReader):
    """Base of readers that take their batches from another reader: to shuffle, map, record or read ahead.

    State, end of data and `skipped` are those of ``child``.

    Args:
        child: The wrapped reader; closed together with this one.

    Raises:
        OptionError: ``child`` is not a reader.
    """

    def __init__(self, child: InputReader) -> None:
        if not isinstance(child, InputReader):
            raise OptionError(
                f"{type(self).__name__} takes a reader, not {excerpt(child)}: open a path with rlio.read()"
            )
        self.child = child
        self.replayable: bool = child.replayable
        self.unit: Unit = child.unit

    @property
    def skipped(self) -> int:
        """Rows or records that the child skipped."""
        return self.child.skipped

    def _describe(self) -> Iterator[str]:
        yield repr(self.child)

    def _position(self) -> JsonState:
        return {"child": self.child.state_dict()}

    def _seek(self, position: JsonState) -> None:
        self.child.load_state_dict(position["child"])

    def _endless(self) -> Endless | None:
        return self.child._endless()

    def interrupt(self) -> None:
        """Interrupt the child; see `InputReader`."""
        self.child.interrupt()

    def _close(self) -> None:
        self.child.close()


class _SizeLimit:
    """Refuses a batch that is larger than the data of an endless reader.

    If the size of the data is known only by reading, a batch is refused when it contains a whole pass and
    rows before and after that pass. This depends only on the position, so a restored reader refuses the same
    batches.
    """

    def __init__(self, units: int, reader: InputReader) -> None:
        self._units = units
        self._reader = reader
        self._first: int | None = None
        # Units of the second pass.
        self._second = 0
        found = reader._endless()
        check_batch_size(units, there=None if found is None else found.units, unit=reader.unit)
        if found is not None and reader._rests:
            self._first = found.number

    def count(self, units: int) -> None:
        """Add ``units`` that were read.

        Raises:
            OptionError: The batch is larger than the data.
        """
        found = self._reader._endless()
        if found is None or found.units is not None:
            return
        if self._first is None:
            self._first = found.number
        if found.number == self._first + 1:
            self._second += units
        if found.number > self._first + 1:
            check_batch_size(self._units, there=self._second, unit=self._reader.unit)
