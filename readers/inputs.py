"""What readers of other people's files share: options, order, sharding, damaged records, saved positions.

A reader of such files names its pieces, and a cursor walks them: `RecordCursor` where a piece is a batch that
somebody wrote and that is served whole, `TableCursor` where pieces are stretches of rows. Both shuffle by
pseudo-random permutations, deal to ranks, cross epochs, and say where they are in a few integers.

Not here: what is in a file (`rlio.readers.json_reader`, `rlio.readers.d4rl_reader`,
`rlio.readers.foreign_parquet`).

Example:
    >>> from rlio.batch import SampleBatch
    >>> class Numbers:
    ...     def has(self, index):
    ...         return index < 4
    ...     def load(self, index):
    ...         return SampleBatch(t=[index])
    >>> options = ReadOptions(epochs=1, shard=(1, 2))
    >>> cursor = RecordCursor(Numbers(), options, seed=0, failures=Failures("raise"))
    >>> cursor.next()["t"], cursor.next()["t"], cursor.position()
    (array([1]), array([3]), {'epoch': 0, 'record': 4})
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, SampleBatch, concat_samples
from rlio.dataset.foreign_layouts import refuse_known
from rlio.errors import (
    CorruptData,
    DataNotFound,
    EndOfData,
    RlioError,
    SchemaError,
    StateError,
    excerpt,
)
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.reader import Endless, InputReader, JsonState
from rlio.readers.read_options import ReadOptions
from rlio.replay.order import ORDER_VERSION, Permutation, share
from rlio.replay.positions import choose_seed
from rlio.storage import InputFile, expand_inputs
from rlio.storage.paths import StrPath

__all__ = [
    "Cursor",
    "Failures",
    "RecordCursor",
    "RecordSource",
    "SkippedRecord",
    "StoredReader",
    "TableCursor",
    "TableSource",
    "find_files",
    "guarded",
    "index_in",
    "raise_at",
]

logger = logging.getLogger("rlio")

T = TypeVar("T")

# A shuffled window holds so many rows or bytes: rows of a batch then come from some 16 places of a large
# file, and memory stays bounded.
_WINDOW_ROWS = 65_536
_WINDOW_BYTES = 256 << 20
# Records whose number in the permutation is worked out at a time: 1024 cost as much as one.
_RECORD_BLOCK = 1024
_KEPT_ERRORS = 1000
# Damaged records that are recognised when they are met again; 100 MB at the most.
_KNOWN_PLACES = 1_000_000


def raise_at(error: RlioError, *, uri: str, record: int | None = None) -> NoReturn:
    """Raise ``error`` with the place where it happened, unless it knows one already."""
    if error.uri is not None:
        raise error
    # The message ends with the column, if that was known; it comes again, together with the place.
    message = str(error).removesuffix(f" [column {error.column}]")
    raise type(error)(message, uri=uri, record=record, column=error.column) from error


def guarded(
    file: InputFile,
    record: int | None,
    action: Callable[[], T],
    *,
    format: str,
    also: tuple[type[Exception], ...] = (),
) -> T:
    """What ``action`` returns; what a library says about damage becomes CorruptData with the place.

    Args:
        file: The file.
        record: Number of the record or row group; None: the file as a whole.
        action: Reads.
        format: Name of the format, for the message.
        also: What its library raises besides OSError, KeyError, ValueError and TypeError.
    """
    damage: tuple[type[Exception], ...] = (OSError, KeyError, ValueError, TypeError, *also)
    try:
        return action()
    except (SchemaError, CorruptData) as error:
        raise_at(error, uri=file.uri, record=record)
    except RlioError:
        raise
    except damage as error:
        # Errors of the library carry no errno, unlike those of the filesystem.
        if getattr(error, "errno", None) is not None:
            raise
        raise CorruptData(
            f"not readable as {format}: {excerpt(str(error))}", uri=file.uri, record=record
        ) from error


def find_files(
    inputs: StrPath | Sequence[StrPath],
    *,
    suffixes: tuple[str, ...],
    storage_options: Mapping[str, Any] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> list[InputFile]:
    """The files that ``inputs`` name, see `expand_inputs`; where there are none, why.

    Raises:
        UnsafeData: There are more than `Limits.listed_names`.
        UnknownLayout: There are none, but something that another library stored.
        DataNotFound: There are none.
    """
    try:
        return expand_inputs(
            inputs, suffixes=suffixes, storage_options=storage_options, limit=limits.listed_names
        )
    except DataNotFound as error:
        values = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
        refuse_known(values, storage_options, error)
        raise


# ---- damaged records ----


class SkippedRecord(NamedTuple):
    """A record that ``on_error="skip"`` left out."""

    uri: str | None
    record: int | None
    message: str


class Failures:
    """What is done with damaged records: raised, or counted and logged.

    Attributes:
        skips: Whether they are counted.
        count: Records skipped so far, each counted once whatever the epochs.
        errors: The first 1000 of them.
    """

    def __init__(self, on_error: Literal["raise", "skip"]) -> None:
        self.skips = on_error == "skip"
        self.count = 0
        self.errors: list[SkippedRecord] = []
        self._in_a_row = 0
        self._known: set[tuple[str | None, int]] = set()

    def handle(self, error: CorruptData | SchemaError) -> None:
        """Raise ``error``, or count it and return."""
        if not self.skips:
            raise error
        self._in_a_row += 1
        if error.record is not None:
            place = (error.uri, error.record)
            if place in self._known:
                return  # Met in an earlier epoch.
            if len(self._known) < _KNOWN_PLACES:
                self._known.add(place)
        self.count += 1
        if len(self.errors) < _KEPT_ERRORS:
            self.errors.append(SkippedRecord(error.uri, error.record, str(error)))
        logger.warning("skipped a record: %s", error)

    def succeeded(self) -> None:
        """A record was read: the data is not all bad."""
        self._in_a_row = 0

    def check_hope(self, records: int) -> None:
        """Raise if so many records in a row failed that an endless reader would look for ever."""
        if self._in_a_row and self._in_a_row >= records:
            raise CorruptData(
                f"none of the last {self._in_a_row} records could be read: an endless reader would never "
                f"return; one of the errors: {self.errors[-1].message if self.errors else 'unknown'}"
            )


# ---- cursors ----


class RecordSource(Protocol):
    """Records that can be read in any order."""

    def has(self, index: int) -> bool:
        """Whether there are more than ``index``; no more is read than tells it."""

    def count(self) -> int:
        """How many there are."""

    def load(self, index: int) -> Batch:
        """Read one; raises CorruptData or SchemaError, with the place, if that record is damaged."""

    def close(self) -> None:
        """Release files."""


class RecordCursor:
    """Serves records whole: number i of the order over all epochs belongs to rank i modulo world.

    The position is where the next round of dealing begins, and so the same on every rank after as many calls;
    it may be loaded with another number of ranks.

    Attributes:
        units: Units of an epoch; None: only reading tells.
        given: Number of the epoch that the last batch was from.
    """

    units: int | None = None

    def __init__(self, source: RecordSource, options: ReadOptions, *, seed: int, failures: Failures) -> None:
        self._source = source
        self._options = options
        self._seed = seed
        self._failures = failures
        self.given = 0
        self._epoch = 0
        self._record = 0
        #: (epoch, first position, numbers of the records there): a stretch of the permutation.
        self._block: tuple[int, int, list[int]] = (-1, 0, [])

    def next(self) -> Batch:
        options = self._options
        while True:
            turn, at = self._place(self._record + options.shard[0])
            epoch = self._epoch + turn
            if options.epochs is not None and epoch >= options.epochs:
                raise EndOfData(f"all {self._source.count()} records were read {options.epochs} times")
            try:
                batch = self._source.load(self._number(epoch, at))
            except (CorruptData, SchemaError) as error:
                self._failures.handle(error)
                if options.epochs is None and epoch:
                    self._failures.check_hope(self._source.count())
                batch = None
            self.given = epoch
            turn, self._record = self._place(self._record)
            self._record += options.shard[1]
            self._epoch += turn
            if batch is not None:
                self._failures.succeeded()
                return batch

    def _place(self, number: int) -> tuple[int, int]:
        """How many epochs after this one a record is, and where in its epoch."""
        if not self._options.shuffle and self._source.has(number):
            return 0, number
        count = self._source.count()
        if count == 0:
            raise DataNotFound("the files hold no record: expected at least one")
        return divmod(number, count)

    def _number(self, epoch: int, at: int) -> int:
        """Number of the record at position ``at`` of ``epoch``."""
        if not self._options.shuffle:
            return at
        count = self._source.count()
        known, first, numbers = self._block
        if known != epoch or not first <= at < first + len(numbers):
            order = Permutation(count, seed=self._seed, epoch=epoch)
            first, numbers = at, order.take(at, min(at + _RECORD_BLOCK, count)).tolist()
            self._block = (epoch, first, numbers)
        return numbers[at - first]

    def position(self) -> JsonState:
        return {"epoch": self._epoch, "record": self._record}

    def seek(self, position: JsonState) -> None:
        self._epoch = index_in(position, "epoch")
        # States of 4d4987e, of JSON in the order of the files, have its number as "round".
        self._record = index_in(position, "round" if "round" in position else "record")

    def close(self) -> None:
        self._source.close()


class TableSource(Protocol):
    """Rows in groups, whose sizes are known without reading them."""

    @property
    def rows(self) -> Sequence[int]:
        """Rows of each group."""

    @property
    def sizes(self) -> Sequence[int]:
        """About how many bytes each group takes in memory."""

    def load(self, group: int, start: int, stop: int) -> SampleBatch:
        """Read rows of one group, as fresh arrays; raises CorruptData or SchemaError if it is damaged."""


class TableCursor:
    """Serves groups of rows; shuffled, windows of permuted groups with their rows permuted.

    Every rank gets an even share of each group or window, so that shares differ by at most one row a window.
    The position is the next window, and so the same on every rank after as many batches.
    """

    def __init__(self, source: TableSource, options: ReadOptions, *, seed: int, failures: Failures) -> None:
        self._source = source
        self._options = options
        self._seed = seed
        self._failures = failures
        self.given = 0
        self._epoch = 0
        self._window = 0
        self._plan: tuple[int, NDArray[np.int64], list[int]] | None = None

    @property
    def units(self) -> int:
        """Rows of an epoch, of all ranks."""
        return sum(self._source.rows)

    def next(self) -> Batch:
        if not any(self._source.rows):
            raise DataNotFound("the files hold no row: expected at least one")
        while True:
            if self._options.epochs is not None and self._epoch >= self._options.epochs:
                raise EndOfData(f"all {sum(self._source.rows)} rows were read {self._options.epochs} times")
            order, bounds = self._windows()
            groups = order[bounds[self._window] : bounds[self._window + 1]].tolist()
            batch = self._shuffled(groups) if self._options.shuffle else self._in_order(groups[0])
            self.given = self._epoch
            self._window += 1
            if self._window == len(bounds) - 1:
                self._epoch, self._window = self._epoch + 1, 0
            if batch is not None and len(batch):
                self._failures.succeeded()
                return batch
            if self._options.epochs is None:
                self._failures.check_hope(len(order))

    def _windows(self) -> tuple[NDArray[np.int64], list[int]]:
        """The groups in the order of this epoch, and where among them its windows begin."""
        count = len(self._source.rows)
        if self._plan is None or (self._options.shuffle and self._plan[0] != self._epoch):
            if self._options.shuffle:
                order = Permutation(count, seed=self._seed, epoch=self._epoch).take(0, count)
                rows = np.asarray(self._source.rows, np.int64)[order]
                bounds = _cut(rows, np.asarray(self._source.sizes, np.int64)[order])
            else:
                order, bounds = np.arange(count), list(range(count + 1))
            self._plan = (self._epoch, order, bounds)
        return self._plan[1:]

    def _load(self, group: int, start: int, stop: int) -> SampleBatch | None:
        try:
            return self._source.load(group, start, stop)
        except (CorruptData, SchemaError) as error:
            self._failures.handle(error)
            return None

    def _in_order(self, group: int) -> SampleBatch | None:
        start, stop = share(self._source.rows[group], self._options.shard)
        return self._load(group, start, stop) if start < stop else None

    def _shuffled(self, groups: list[int]) -> SampleBatch | None:
        rows = np.array([self._source.rows[group] for group in groups], np.int64)
        ends = np.cumsum(rows)
        start, stop = share(int(ends[-1]), self._options.shard)
        order = Permutation(int(ends[-1]), seed=self._seed, epoch=self._epoch, key=(1, self._window))
        picks = order.take(start, stop)
        if start == stop:
            return None
        parts = [self._load(group, 0, self._source.rows[group]) for group in groups]
        loaded = np.array([part is not None for part in parts])
        if not loaded.all():
            # Rows of a group that could not be read leave gaps, which the other rows close.
            home = np.searchsorted(ends, picks, side="right")
            gaps = np.cumsum(np.where(loaded, 0, rows))
            picks = (picks - gaps[home])[loaded[home]]
        found = [part for part in parts if part is not None]
        if not found or not len(picks):
            return None
        joined = found[0] if len(found) == 1 else concat_samples(found)
        picked = joined[picks]
        assert isinstance(picked, SampleBatch)
        return picked

    def position(self) -> JsonState:
        return {"epoch": self._epoch, "window": self._window}

    def seek(self, position: JsonState) -> None:
        self._epoch = index_in(position, "epoch")
        bounds = self._windows()[1]
        self._window = index_in(position, "window", len(bounds) - 1)

    def close(self) -> None:
        """Nothing is held here."""


def _cut(rows: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[int]:
    """Bounds of windows of consecutive groups: as many as fit, and at least one."""
    row_ends, size_ends = np.cumsum(rows), np.cumsum(sizes)
    bounds, at = [0], 0
    while at < len(rows):
        before_rows = int(row_ends[at - 1]) if at else 0
        before_sizes = int(size_ends[at - 1]) if at else 0
        by_rows = int(np.searchsorted(row_ends, before_rows + _WINDOW_ROWS, side="right"))
        by_size = int(np.searchsorted(size_ends, before_sizes + _WINDOW_BYTES, side="right"))
        at = max(at + 1, min(by_rows, by_size))
        bounds.append(at)
    return bounds


def index_in(position: JsonState, key: str, count: int | None = None) -> int:
    """``position[key]``, checked to be a whole number from 0 and below ``count``."""
    value = position.get(key)
    if type(value) is not int or value < 0 or (count is not None and value >= max(count, 1)):
        limit = "" if count is None else f" below {count}"
        raise StateError(
            f"state['position'][{key!r}] is {excerpt(value)}; expected a whole number from 0{limit}: the "
            "data changed since the state was saved, or the state is damaged"
        )
    return value


#: Walks the pieces of a reader, endlessly or for some epochs.
Cursor: TypeAlias = RecordCursor | TableCursor


# ---- the reader ----


class StoredReader(InputReader):
    """Base of the readers in this package that read other people's files.

    Its saved state is a few integers, with digests of the files and options that it fits. It loads into a
    reader with other ``epochs``, and, between batches, with another number of ranks.

    Args:
        options: The shared options.
        files: What is read; their names and sizes are part of the state.
        make_cursor: Makes the cursor over the files' pieces, from the seed of the order and from what is done
            with damaged records.
        details: Further options that change what is served, as JSON values.

    Attributes:
        options: The shared options.
    """

    def __init__(
        self,
        options: ReadOptions,
        files: Sequence[InputFile],
        make_cursor: Callable[[int, Failures], Cursor],
        *,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        self.options = options
        self._make_cursor = make_cursor
        self.drop_last = options.drop_last
        self._seed = choose_seed(options, type(self).__name__) or 0  # Which is not used without shuffling.
        self._failures = Failures(options.on_error)
        self._files_seal = _seal_files(files)
        self._options_seal = {
            name: _digest(value)
            for name, value in {
                "batch_size": options.batch_size,
                "shuffle": options.shuffle,
                "columns": options.columns if options.unlike == "error" else options.unlike,
                "on_error": options.on_error,
                "drop_last": options.drop_last,
                **(details or {}),
            }.items()
        }
        self._cursor = make_cursor(self._seed, self._failures)

    @property
    def skipped(self) -> int:
        """Damaged records that ``on_error="skip"`` left out so far, each counted once."""
        return self._failures.count

    @property
    def errors(self) -> list[SkippedRecord]:
        """The first 1000 of them: where each is, and what is wrong with it."""
        return list(self._failures.errors)

    def sample(self, n: int | None = None, *, out: SampleBatch | None = None) -> Batch:
        return super().sample(self.options.batch_size if n is None else n, out=out)

    def _next(self) -> Batch:
        while True:
            batch = self._cursor.next()
            if len(batch):
                return batch

    def _endless(self) -> Endless | None:
        ends = self.options.epochs is not None
        return None if ends else Endless(self._cursor.given, self._cursor.units)

    def _position(self) -> JsonState:
        return {
            "order": ORDER_VERSION,
            "seed": self._seed if self.options.shuffle else None,
            "world": self.options.shard[1],
            "files": self._files_seal,
            "options": self._options_seal,
            "at": self._cursor.position(),
        }

    def _load(self, state: JsonState) -> None:
        position = state.get("position") if isinstance(state, Mapping) else None
        if isinstance(position, dict) and state.get("skip"):
            world = self.options.shard[1]
            if position.get("world") != world:
                raise StateError(
                    f"the state was saved inside a batch, by one of {excerpt(position.get('world'))} ranks; "
                    f"this reader is one of {world}: save it where no rows are left over, or keep the ranks"
                )
        super()._load(state)

    def _seek(self, position: JsonState) -> None:
        if position["order"] != ORDER_VERSION:
            raise StateError(
                f"state['position']['order'] is {excerpt(position['order'])}, this version of rlio has order "
                f"{ORDER_VERSION}: finish the run with the version that began it"
            )
        self._check_files(position["files"])
        self._check_options(position["options"])
        self._check_seed(position["seed"])
        self._cursor.seek(position["at"])

    def _check_files(self, saved: Any) -> None:
        if saved != self._files_seal:
            raise StateError(
                f"the state was saved over other files: [files, bytes, digest] were {excerpt(saved)} and are "
                f"{self._files_seal}; open the same files, or start anew"
            )

    def _check_options(self, saved: Any) -> None:
        ours = self._options_seal
        unlike = [name for name in sorted({*ours, *saved}) if ours.get(name) != saved.get(name)]
        if unlike:
            raise StateError(
                f"the state was saved with another value of {', '.join(map(excerpt, unlike))}: open the "
                "reader with the options of that time, or start anew"
            )

    def _check_seed(self, saved: Any) -> None:
        if not self.options.shuffle or saved == self._seed:
            return
        if type(saved) is not int or self.options.seed is not None:
            raise StateError(
                f"the state's seed is {excerpt(saved)}, this reader's {self._seed}: give the same seed"
            )
        # Drawn from the OS, both times: the state's is the one to go on with.
        self._seed = saved
        self._cursor.close()
        self._cursor = self._make_cursor(saved, self._failures)

    def _close(self) -> None:
        self._cursor.close()


def _seal_files(files: Sequence[InputFile]) -> list[Any]:
    """Number, bytes and digest of ``files``: equal where the same files are read."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(json.dumps([file.uri, file.size]).encode())
    return [len(files), sum(file.size or 0 for file in files), digest.hexdigest()]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=4).hexdigest()
