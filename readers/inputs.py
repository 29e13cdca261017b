"""The common parts of readers of foreign files: options, order, sharding, damaged records, saved positions.

A reader of such files numbers its pieces, and a cursor walks them. `RecordCursor` walks recorded batches,
which are served whole; `TableCursor` walks ranges of rows. Both shuffle by pseudo-random permutations, divide
pieces among ranks, cross epochs, and give their position as a few integers.

Not here: the contents of files (`rlio.readers.json_reader`, `rlio.readers.d4rl_reader`,
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

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, SampleBatch, concat_samples
from rlio.errors import (
    CorruptData,
    DataNotFound,
    EndOfData,
    RlioError,
    SchemaError,
    StateError,
    UnknownLayout,
    excerpt,
    raise_at,
)
from rlio.formats.format import refuse_known
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.reader import Endless, InputReader, JsonState
from rlio.readers.read_options import ReadOptions
from rlio.replay.order import ORDER_VERSION, Permutation, share
from rlio.replay.positions import check_position, choose_seed
from rlio.source.damage import SkippedRecord
from rlio.storage import InputFile, expand_inputs
from rlio.storage.paths import StrPath
from rlio.support.states import seed_in, whole_number

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
    "in_column",
    "index_in",
    "raise_at",
]

logger: logging.Logger = logging.getLogger("rlio")

T = TypeVar("T")

# Maximum rows and bytes of a shuffled window. The rows of a batch then come from about 16 places of a large
# file, and memory stays bounded.
_WINDOW_ROWS = 65_536
_WINDOW_BYTES = 256 << 20
# Positions of the permutation that are computed at a time: 1024 cost as much as one.
_RECORD_BLOCK = 1024
_KEPT_ERRORS = 1000
# Damaged records whose places are remembered, to count each once; 100 MB at most.
_KNOWN_PLACES = 1_000_000


def guarded(
    file: InputFile,
    record: int | None,
    action: Callable[[], T],
    *,
    format: str,
    also: tuple[type[Exception], ...] = (),
) -> T:
    """Call ``action``; turn a library's errors about damage into CorruptData with the place.

    Args:
        file: The file.
        record: Number of the record or row group; None: the file as a whole.
        action: Reads the file or record.
        format: Name of the format, for the message.
        also: Exceptions of the library besides OSError, KeyError, ValueError and TypeError.
    """
    damage: tuple[type[Exception], ...] = (OSError, KeyError, ValueError, TypeError, *also)
    try:
        return action()
    except (SchemaError, CorruptData, UnknownLayout) as error:
        raise_at(error, uri=file.uri, record=record)
    except RlioError:
        raise
    except damage as error:
        # Errors of the library have no errno, unlike errors of the filesystem.
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
    """The files that ``inputs`` name, see `expand_inputs`. If there are none, the error says why.

    Raises:
        UnsafeData: ``inputs`` hold more names than `Limits.listed_names`.
        UnknownLayout: ``inputs`` hold no such files, but data of another library.
        DataNotFound: ``inputs`` hold no such files.
    """
    try:
        return expand_inputs(
            inputs, suffixes=suffixes, storage_options=storage_options, limit=limits.listed_names
        )
    except DataNotFound as error:
        values = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
        refuse_known(values, storage_options, error)
        raise


@contextlib.contextmanager
def in_column(name: str) -> Iterator[None]:
    """Add the column to errors about data that have none."""
    try:
        yield
    except (CorruptData, SchemaError) as error:
        if error.column is not None:
            raise
        raise type(error)(str(error), column=name) from error


# ---- damaged records ----


class Failures:
    """Handles damaged records: raises their errors, or counts and logs them.

    Attributes:
        skips: Whether damaged records are skipped and counted.
        count: Records skipped so far, each counted once over all epochs.
        errors: The first 1000 of them.
    """

    def __init__(self, on_error: Literal["raise", "skip"]) -> None:
        self.skips: bool = on_error == "skip"
        self.count: int = 0
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
                return  # Counted in an earlier epoch.
            if len(self._known) < _KNOWN_PLACES:
                self._known.add(place)
        self.count += 1
        if len(self.errors) < _KEPT_ERRORS:
            self.errors.append(SkippedRecord(error.uri, error.record, str(error)))
        logger.warning("skipped a record: %s", error)

    def succeeded(self) -> None:
        """Note that a record was read: not all data is damaged."""
        self._in_a_row = 0

    def check_hope(self, records: int) -> None:
        """Raise if ``records`` in a row failed: an endless reader would search without end."""
        if self._in_a_row and self._in_a_row >= records:
            raise CorruptData(
                f"none of the last {self._in_a_row} records could be read: an endless reader would never "
                f"return; one of the errors: {self.errors[-1].message if self.errors else 'unknown'}"
            )


# ---- cursors ----


class RecordSource(Protocol):
    """Records that can be read in any order."""

    def has(self, index: int) -> bool:
        """Whether a record ``index`` exists; reads no further than needed."""

    def count(self) -> int:
        """The number of records."""

    def load(self, index: int) -> Batch:
        """Read one record; raises CorruptData or SchemaError, with the place, if the record is damaged."""

    def close(self) -> None:
        """Release files."""


class RecordCursor:
    """Serves records whole: number i of the order over all epochs belongs to rank i modulo world.

    The position is the start of the next round over the ranks, so it is the same on every rank after equally
    many calls. It may be loaded with another number of ranks.

    Attributes:
        units: Units of an epoch; None: known only by reading.
        given: Number of the epoch of the last batch.
    """

    units: int | None = None

    def __init__(self, source: RecordSource, options: ReadOptions, *, seed: int, failures: Failures) -> None:
        self._source = source
        self._options = options
        self._seed = seed
        self._failures = failures
        self.given: int = 0
        self._epoch = 0
        self._record = 0
        #: (epoch, first position, record numbers from there): a stretch of the permutation.
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
        """How many epochs after this one a record comes, and its position in that epoch."""
        if not self._options.shuffle and self._source.has(number):
            return 0, number
        count = self._source.count()
        if count == 0:
            raise DataNotFound("found no record in the files: expected at least one")
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
        # States of 4d4987e, of JSON in the order of the files, store the number as "round".
        self._record = index_in(position, "round" if "round" in position else "record")

    def close(self) -> None:
        self._source.close()


class TableSource(Protocol):
    """Rows in groups whose sizes are known without reading them."""

    @property
    def rows(self) -> Sequence[int]:
        """Rows of each group."""

    @property
    def sizes(self) -> Sequence[int]:
        """Approximate bytes of each group in memory."""

    def load(self, group: int, start: int, stop: int) -> SampleBatch:
        """Read rows of one group as new arrays; raises CorruptData or SchemaError if the group is damaged."""


class TableCursor:
    """Serves groups of rows. When shuffled, it permutes windows of groups, and the rows in each window.

    Every rank gets an even share of each group or window, so shares differ by at most one row a window. The
    position is the next window, so it is the same on every rank after equally many batches.
    """

    def __init__(self, source: TableSource, options: ReadOptions, *, seed: int, failures: Failures) -> None:
        self._source = source
        self._options = options
        self._seed = seed
        self._failures = failures
        self.given: int = 0
        self._epoch = 0
        self._window = 0
        self._plan: tuple[int, NDArray[np.int64], list[int]] | None = None

    @property
    def units(self) -> int:
        """Rows of an epoch, of all ranks."""
        return sum(self._source.rows)

    def next(self) -> Batch:
        if not any(self._source.rows):
            raise DataNotFound("found no row in the files: expected at least one")
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
        """The groups in the order of this epoch, and the bounds of its windows among them."""
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
            # Rows of unreadable groups leave gaps; the other rows move up.
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
        """Do nothing: the cursor holds no files."""


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
    """``position[key]``, checked to be a whole number, at least 0 and below ``count``."""
    value = whole_number(position, key)
    if count is not None and value >= max(count, 1):
        raise StateError(
            f"state['position'][{key!r}] is {value}; expected a whole number below {count}: the data changed "
            "after the state was saved"
        )
    return value


#: Walks the pieces of a reader, endlessly or for a number of epochs.
Cursor: TypeAlias = RecordCursor | TableCursor


# ---- the reader ----


class StoredReader(InputReader):
    """Base of the readers in this package that read foreign files.

    Its saved state is a few integers, with digests of the files and options that it fits. Between batches, it
    loads into a reader with another number of ranks. docs/guarantees.md says what else may differ.

    Args:
        options: The shared options.
        files: The files to read; their names and sizes are part of the state.
        make_cursor: Makes the cursor over the files' pieces, from the seed of the order and the handler of
            damaged records.
        details: Further options that change the served rows, as JSON values.

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
        self.drop_last: bool = options.drop_last
        self._seed = choose_seed(options, type(self).__name__) or 0  # 0 is not used: no shuffling.
        self._failures = Failures(options.on_error)
        self._source = repr(files[0].uri) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        unlike = None if options.unlike == "error" else options.unlike
        sealed = {
            "batch_size": options.batch_size,
            "shuffle": options.shuffle,
            "columns": sorted(options.columns) if options.columns is not None else unlike,
            "on_error": options.on_error,
            "drop_last": options.drop_last,
            **(details or {}),
        }
        # What must be equal for a position to mean the same records.
        self._fingerprint: JsonState = {
            "order": ORDER_VERSION,
            "files": _seal_files(files),
            "options": {name: _digest(value) for name, value in sealed.items()},
        }
        self._cursor = make_cursor(self._seed, self._failures)
        logger.info("%s: %d files, the first is %s", type(self).__name__, len(files), files[0].uri)

    def _describe(self) -> Iterator[str]:
        yield self._source
        yield "at " + ", ".join(f"{name} {value}" for name, value in self._cursor.position().items())
        yield from self.options.given()

    @property
    def skipped(self) -> int:
        """Damaged records that ``on_error="skip"`` has skipped so far, each counted once."""
        return self._failures.count

    @property
    def errors(self) -> list[SkippedRecord]:
        """The first 1000 of them, each with its place and its damage."""
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
            **self._fingerprint,
            "seed": self._seed if self.options.shuffle else None,
            "world": self.options.shard[1],
            "at": self._cursor.position(),
        }

    def _load(self, state: JsonState) -> None:
        self.check_ranks(state)
        super()._load(state)

    def check_ranks(self, state: JsonState) -> None:
        """Refuse a state that was saved inside a batch by another number of ranks."""
        position = state.get("position") if isinstance(state, Mapping) else None
        if isinstance(position, dict) and state.get("skip"):
            world = self.options.shard[1]
            if position.get("world") != world:
                raise StateError(
                    f"the state was saved inside a batch, by one of {excerpt(position.get('world'))} ranks; "
                    f"this reader is one of {world}: save the state between batches, or keep the number of "
                    "ranks"
                )

    def _seek(self, position: JsonState) -> None:
        check_position(position, self._fingerprint, self.options, uri=self._source)
        if self.options.shuffle and position["seed"] != self._seed:
            # Both seeds were drawn from the OS: continue with the state's.
            self._seed = seed_in(position)
            self._cursor.close()
            self._cursor = self._make_cursor(self._seed, self._failures)
        epochs, at = self.options.epochs, position["at"]
        reached = whole_number(at, "epoch", of="state['position']['at']")
        within = any(value for name, value in at.items() if name != "epoch")
        if epochs is not None and (reached, within) > (epochs, False):
            raise StateError(
                f"state['position']['at'] is in epoch {reached}, but the reader has {epochs} epochs: open "
                "the data with at least as many epochs",
                uri=self._source,
            )
        self._cursor.seek(at)

    def _close(self) -> None:
        self._cursor.close()


def _seal_files(files: Sequence[InputFile]) -> list[Any]:
    """Number, bytes and digest of ``files``: equal for the same files."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(json.dumps([file.uri, file.size]).encode())
    return [len(files), sum(file.size or 0 for file in files), digest.hexdigest()]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=4).hexdigest()
