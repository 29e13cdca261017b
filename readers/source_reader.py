"""`SourceReader`: replays a `rlio.source.source.Source`, in recorded order or shuffled, exactly resumable.

It is the one engine of everything that is stored and finite: epochs, ranks, orders, filters, splits, n-step
transitions, sequences, derived columns, statistics, stores, skipping and resuming. `rlio.DatasetReader` reads
data sets of rlio; `rlio.readers.episode_reader.EpisodeReader` reads the files of other libraries.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from rlio.batch import Batch
from rlio.errors import OptionError, StateError, excerpt
from rlio.look.stats import Normalise, Normaliser
from rlio.read_options import ReadKeywords, ReadOptions
from rlio.reader import Endless, InputReader, JsonState, Unit
from rlio.readers.cold_pass import ColdPass
from rlio.readers.stored_pass import Cache, Kept, StoredPass, choose_cache
from rlio.replay.draws import Draw
from rlio.replay.joint_gather import RowSource
from rlio.replay.store import DrawKeywords, UnitKeywords, draw_of
from rlio.source.source import Source
from rlio.support.options import check_choice

__all__ = ["DRAWN", "Asked", "SourceKeywords", "SourcePass", "SourceReader", "open_pass", "refuse_earlier"]

#: A pass over epochs of one source.
SourcePass: TypeAlias = ColdPass | StoredPass
Missing: TypeAlias = Literal["error", "drop", "fill"]

#: The keywords of units.
DRAWN: Final = tuple(UnitKeywords.__annotations__)
# The key of a state that names the statistics, if rows are normalised.
_NORMALISE: Final = "normalise"


class SourceKeywords(ReadKeywords, UnitKeywords, total=False):
    """The keyword options of a `SourceReader` that select and shape rows, with defaults."""


class Asked(NamedTuple):
    """What the keywords of a reader ask for.

    Attributes:
        options: What is read and in which order; without the columns that are derived.
        draw: What a unit is.
        drawn: Whether any keyword of units is given.
    """

    options: ReadOptions
    draw: Draw
    drawn: bool

    @property
    def columns(self) -> list[str] | None:
        """The columns that are named, also those that the filter reads; None: all are read."""
        if self.options.columns is None:
            return None
        read = () if self.draw.filter is None else self.draw.filter.columns or ()
        return [*dict.fromkeys((*self.options.columns, *read))]

    @classmethod
    def of(cls, keywords: SourceKeywords) -> Asked:
        """Read the keywords.

        Raises:
            OptionError: One is illegal, or two exclude each other.
        """
        given: dict[str, Any] = {**keywords}
        drawn = {name: given.pop(name) for name in DRAWN if name in given}
        options = ReadOptions.of(cast(ReadKeywords, given))
        draw = draw_of(cast(DrawKeywords, drawn), columns=options.columns)
        if options.columns is not None and draw.derive:
            stored = [name for name in options.columns if name not in draw.derive]
            options = replace(options, columns=stored)
        return cls(options, draw, bool(drawn))


def refuse_earlier(position: JsonState, *, uri: str) -> None:
    """Refuse the state of a reader of records, or of a version that read files of other libraries otherwise.

    Raises:
        StateError: It was.
    """
    if "at" in position:
        raise StateError(
            "the state was saved by a reader of whole records, without batch_size, or by an earlier version, "
            "which served the rows of such files in another order: load it into a reader with the options of "
            "the saved one, or begin a new epoch",
            uri=uri,
        )


def open_pass(
    source: Source, options: ReadOptions, *, draw: Draw, cache: Cache, missing: Missing
) -> SourcePass:
    """The pass that reads epochs of a source."""
    check_choice("cache", cache, ("auto", "memory", "disk", "none"))
    chosen = choose_cache(source, options, draw, cache)
    if chosen == "none":
        return ColdPass(source, options, missing, draw.filter)
    return StoredPass(source, options, draw=draw, cache=chosen, missing=missing)


class SourceReader(InputReader):
    """Reads a source. Subclasses open it, and set `options`, `drop_last`, `_uri` and `_pass`.

    Attributes:
        options: What is read and in which order.
    """

    replayable = True
    options: ReadOptions
    _uri: str
    _pass: Any  # `SourcePass`, or what a subclass has instead.
    _normaliser: Normaliser | None = None

    def _open(
        self, source: Source, asked: Asked, *, cache: Cache, missing: Missing, normalise: Normalise | None
    ) -> None:
        """Begin to read a source."""
        if normalise is not None:
            self._normaliser = Normaliser.of(
                normalise,
                source,
                policy=asked.draw.policy,
                columns=asked.options.columns,
                missing=missing,
                on_error=asked.options.on_error,
            )
        self._pass = open_pass(source, asked.options, draw=asked.draw, cache=cache, missing=missing)

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
        before = self._pass.epoch, self._pass.offset
        batch: Batch = self._pass.take(n)
        if self._normaliser is None:
            return batch
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
        saved, ours = (
            rest.pop(_NORMALISE, None),
            None if self._normaliser is None else self._normaliser.digest,
        )
        if saved != ours:
            raise StateError(
                f"state['position'][{_NORMALISE!r}] is {excerpt(saved)} but this reader has {excerpt(ours)}: "
                "normalise by the same statistics, normalise=..., as the reader that saved the state",
                uri=self._uri,
            )
        self._pass.seek(rest)

    def _close(self) -> None:
        self._pass.close()
