"""`SourceReader`: replays a `rlio.source.source.Source`, in recorded order or shuffled, exactly resumable.

It is the one engine of everything that is stored and finite: epochs, ranks, orders, filters, splits, n-step
transitions, sequences, derived columns, statistics, stores, skipping and resuming. `rlio.DatasetReader` reads
data sets of rlio; `rlio.readers.episode_reader.EpisodeReader` reads the files of other libraries.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, cast

from rlio.batch import Batch
from rlio.errors import OptionError, StateError, excerpt
from rlio.formats.files.inputs import Failures, FileOptions
from rlio.look.stats import Normalise, Normaliser
from rlio.read_options import ReadKeywords, ReadOptions
from rlio.reader import Endless, InputReader, JsonState, Unit
from rlio.readers.cold_pass import ColdPass
from rlio.readers.stored_pass import Cache, Kept, StoredPass, choose_cache
from rlio.replay.draw_options import DrawKeywords, UnitKeywords, draw_of
from rlio.replay.draws import Draw
from rlio.replay.joint_gather import RowSource
from rlio.source.damage import SkippedRecord
from rlio.source.source import FileSource, Source
from rlio.support.calls import closing_on_error
from rlio.support.options import check_choice

__all__ = ["Asked", "FileReader", "Missing", "SourceKeywords", "SourceReader"]

Missing: TypeAlias = Literal["error", "drop", "fill"]

# The keywords of units.
_DRAWN: Final = tuple(UnitKeywords.__annotations__)
# The key of a state that names the statistics, if rows are normalised.
_NORMALISE: Final = "normalise"


class SourceKeywords(ReadKeywords, UnitKeywords, total=False):
    """The keyword options that all readers of stored data share, with defaults; see `rlio.DatasetReader`."""

    cache: Annotated[Cache, "auto"]
    normalise: Annotated[Normalise | None, None]


class Asked(NamedTuple):
    """What the keywords of a reader ask for.

    Attributes:
        options: What is read and in which order; without the columns that are derived.
        draw: What a unit is.
        drawn: Whether any keyword of units is given.
        cache: Where rows are kept.
        normalise: What brings columns to one range.
    """

    options: ReadOptions
    draw: Draw
    drawn: bool
    cache: Cache
    normalise: Normalise | None

    @property
    def columns(self) -> list[str] | None:
        """The columns that are named, also those that the filter reads; None: all are read."""
        if self.options.columns is None:
            return None
        read = () if self.draw.filter is None else self.draw.filter.columns or ()
        return [*dict.fromkeys((*self.options.columns, *read))]

    def opening(self, how: FileOptions) -> FileOptions:
        """How files are opened for this."""
        return replace(how, on_error=self.options.on_error, columns=self.columns or ())

    @classmethod
    def of(cls, keywords: SourceKeywords) -> Asked:
        """Read the keywords.

        Raises:
            OptionError: One is illegal, or two exclude each other.
        """
        given: dict[str, Any] = {**keywords}
        cache, normalise = given.pop("cache", "auto"), given.pop("normalise", None)
        check_choice("cache", cache, ("auto", "memory", "disk", "none"))
        drawn = {name: given.pop(name) for name in _DRAWN if name in given}
        options = ReadOptions.of(cast(ReadKeywords, given))
        draw = draw_of(cast(DrawKeywords, drawn), columns=options.columns)
        if options.columns is not None and draw.derive:
            stored = [name for name in options.columns if name not in draw.derive]
            options = replace(options, columns=stored)
        return cls(options, draw, bool(drawn), cache, normalise)


class SourceReader(InputReader):
    """Reads a source, which subclasses open.

    Attributes:
        options: What is read and in which order.
    """

    replayable = True
    options: ReadOptions
    _uri: str
    _pass: Any  # A `ColdPass` or `StoredPass`, or what a subclass has instead.
    _normaliser: Normaliser | None = None

    def _open(self, source: Source, asked: Asked, *, missing: Missing) -> None:
        """Begin to read a source."""
        options, draw = asked.options, asked.draw
        self.options = options
        self.drop_last: bool = options.drop_last
        # With ranks or drop_last, reading ahead changes the rows that are dropped.
        self.can_read_ahead: bool = options.shard[1] == 1 and not options.drop_last
        self._uri = source.uri
        if asked.normalise is not None:
            self._normaliser = Normaliser.of(
                asked.normalise,
                source,
                policy=draw.policy,
                columns=options.columns,
                missing=missing,
                on_error=options.on_error,
            )
        cache = choose_cache(source, options, draw, asked.cache)
        if cache == "none":
            self._pass = ColdPass(source, options, missing, draw.filter)
        else:
            self._pass = StoredPass(source, options, draw=draw, cache=cache, missing=missing)

    def _describe(self) -> Iterator[str]:
        yield repr(self._uri)
        yield self._pass.place
        yield from self.options.given()

    @property
    def stored_source(self) -> Source:
        """What it reads."""
        source: Source = self._pass.source
        return source

    @property
    def content_identity(self) -> str:
        """Changes with the content of what it reads; see `Source.content_identity`."""
        return self.stored_source.content_identity

    @property
    def cache(self) -> Kept:
        """Where the rows are kept; with ``cache="auto"``, the choice."""
        kept: Kept = self._pass.cache
        return kept

    # A property, because a reader may know the unit only once there is a row to read.
    @property
    def unit(self) -> Unit:  # type: ignore[override]  # The base has an attribute, for authors' sake.
        """The unit that ``n`` and ``batch_size`` count."""
        unit: Unit = self._pass.unit
        return unit

    @property
    def skipped(self) -> int:
        """Rows lost to damage so far, with ``on_error="skip"``."""
        rows: int = self._pass.skipped
        return rows

    @property
    def epoch(self) -> int:
        """Number, from 0, of the epoch in which the next batch begins."""
        number: int = self._pass.epoch
        return number

    @property
    def seed(self) -> int | None:
        """Seed of the order; None for the recorded order."""
        seed: int | None = self._pass.seed
        return seed

    def __len__(self) -> int:
        """Units of one epoch, of all ranks together."""
        total: int = self._pass.total
        return total

    def skip(self, n: int) -> None:
        """Skip ``n`` batches of ``batch_size`` units: move to the position after ``n`` calls of `sample`.

        Reads nothing, except with ``on_error="skip"``, because rows after damaged ones fill up batches and
        only reading finds the next batch.

        Args:
            n: Batches, 0 or more.

        Raises:
            EndOfData: Fewer batches are left. The reader is then at the end, as if `sample` had raised it.
            OptionError: ``n`` is below 0.
            StateError: The last `load_state_dict` failed.
            ClosedError: After `close`.
        """
        with self._turns_of_threads.held():
            self._check_open()
            self._check_loaded()
            if operator.index(n) < 0:
                raise OptionError(f"skip(n={n}): expected a number of batches, 0 or more")
            self._pass.skip(operator.index(n))

    @property
    def row_source(self) -> RowSource | None:
        """The source of its next rows, to gather them with those of others; None without a store.

        None also if rows are normalised, which comes after gathering.
        """
        return self._pass if isinstance(self._pass, StoredPass) and self._normaliser is None else None

    # ---- hooks of InputReader ----

    def _endless(self) -> Endless | None:
        return None if self.options.epochs is not None else Endless(self.epoch, len(self))

    def interrupt(self) -> None:
        """Wake a `sample` that waits for rows, or for its store to be built; see `InputReader`."""
        self._pass.interrupt()

    def _next(self) -> Batch:
        return self._read(None)

    def _take(self, n: int) -> Batch:
        return self._read(n)

    def _read(self, n: int | None) -> Batch:
        if self._normaliser is None:
            batch: Batch = self._pass.take(n)
            return batch
        before = self._pass.mark()
        batch = self._pass.take(n)
        try:
            return self._normaliser(batch)
        except BaseException:  # The next call serves these rows.
            self._pass.go_back(before)
            raise

    def _position(self) -> JsonState:
        position: JsonState = self._pass.position()
        return position if self._normaliser is None else {**position, _NORMALISE: self._normaliser.digest}

    def _seek(self, position: JsonState) -> None:
        rest = dict(position)
        saved, ours = rest.pop(_NORMALISE, None), self._normaliser and self._normaliser.digest
        if saved != ours:
            raise StateError(
                f"state['position'][{_NORMALISE!r}] is {excerpt(saved)} but this reader has {excerpt(ours)}: "
                "normalise by the same statistics, normalise=..., as the reader that saved the state",
                uri=self._uri,
            )
        self._pass.seek(rest)

    def _close(self) -> None:
        self._pass.close()


class FileReader(SourceReader):
    """Reads files of another library, through a source that it owns."""

    _source: FileSource
    _is_owner: bool
    #: What could not be opened.
    _failures: Failures

    def _open_files(
        self, source: FileSource, asked: Asked, *, missing: Missing = "error", owns: bool = True
    ) -> None:
        """Begin to read a source."""
        self._source, self._is_owner = source, owns
        self._failures = getattr(source, "failures", None) or Failures(asked.options.on_error)
        if not owns:
            self._open(source, asked, missing=missing)
            return
        with closing_on_error(source):
            self._open(source, asked, missing=missing)
        # A reader that ended in a loop, and was not closed, leaves no open file.
        weakref.finalize(self, source.leave)

    @property
    def skipped(self) -> int:
        """Damaged records, episodes and files that ``on_error="skip"`` has skipped, each counted once."""
        count: int = self._failures.count + self._pass.damage.count
        return count

    @property
    def errors(self) -> list[SkippedRecord]:
        """The first 1000 of them, each with its place and its damage."""
        return [*self._failures.errors, *self._pass.damage.errors][:1000]

    def _seek(self, position: JsonState) -> None:
        if "at" in position:
            raise StateError(
                "the state was saved by a reader of whole records, without batch_size, or by an earlier "
                "version, which served the rows of such files in another order: load it into a reader with "
                "the options of the saved one, or begin a new epoch",
                uri=self._uri,
            )
        super()._seek(position)

    def _close(self) -> None:
        super()._close()
        if self._is_owner:
            self._source.close()
