"""`RecordReader`: the base of readers of RLlib's records, which are served as they were written, or as rows.

Not here: the contents of files (`rlio.readers.json_reader`, `rlio.readers.foreign_parquet`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache as cache_calls
from typing import Any, Final

from rlio.batch import Batch
from rlio.errors import (
    CorruptData,
    DataNotFound,
    EndOfData,
    OptionError,
    SchemaError,
    StateError,
    excerpt,
    raise_at,
)
from rlio.formats.rllib.decoder import LISTS_WAY, RllibDecoder
from rlio.formats.rllib.record_source import DecoderOf, RecordFiles, Records
from rlio.query.order import ORDER_VERSION, Permutation
from rlio.query.positions import check_position, choose_seed
from rlio.read_options import ReadOptions
from rlio.reader import Endless, InputReader, JsonState, Unit
from rlio.readers.source_reader import Asked, FileReader
from rlio.readers.stored_pass import Kept
from rlio.replay.joint_gather import RowSource
from rlio.source.damage import SkippedRecord
from rlio.source.files import GroupFiles, content_of_all
from rlio.source.source import Source
from rlio.source.uniform import Agreed
from rlio.storage import InputFile
from rlio.support.calls import closing_on_error
from rlio.support.states import seed_in, whole_number

__all__ = ["RecordReader"]

logger: logging.Logger = logging.getLogger("rlio")

# Positions of the permutation that are computed at a time: 1024 cost as much as one.
_BLOCK: Final = 1024


class RecordReader(InputReader):
    """Serves records whole, or, if an option needs rows, their rows. A subclass opens the files.

    Attributes:
        options: What is read and in which order.
    """

    replayable = True
    _inner: _Whole | _Rows

    def _serve(
        self,
        records: Records,
        files: Sequence[InputFile],
        decoder_of: DecoderOf,
        asked: Asked,
        *,
        details: Mapping[str, Any],
    ) -> None:
        """Serve records, which the reader then owns: whole, unless the options ask for rows.

        ``details`` are further options that change the records, as JSON values.
        """
        #: The records as a source of rows, made when it is asked for.
        self._as_rows = cache_calls(
            lambda: RecordFiles(records, files, decoder_of, asked.options, columns=asked.columns)
        )
        self._files = files
        chosen = asked.cache != "auto" or bool(asked.normalise)
        by_rows = asked.options.batch_size is not None or asked.drawn or chosen
        with closing_on_error(records):
            if by_rows:
                self._serve_rows(self._as_rows(), asked)
                return
            self.options: ReadOptions = asked.options
            self.drop_last: bool = asked.options.drop_last
            decoder = decoder_of(asked.options.columns)
            details = {**decoder.details, **details}
            self._inner = _Whole(records, files, decoder, asked.options, details, name=type(self).__name__)
        # A reader that ended in a loop, and was not closed, leaves no open file.
        weakref.finalize(self, records.close)

    def _serve_rows(self, source: GroupFiles, asked: Asked) -> None:
        """Serve the rows of a source, which the reader then owns."""
        self.options = asked.options
        self.drop_last = asked.options.drop_last
        self.can_read_ahead: bool = asked.options.shard[1] == 1 and not self.drop_last
        self._inner = _Rows(source, asked)

    def _describe(self) -> Iterator[str]:
        yield from self._inner._describe()

    @property
    def unit(self) -> Unit:  # type: ignore[override]  # The base has an attribute, for authors' sake.
        """The unit that ``n`` and ``batch_size`` count."""
        return self._inner.unit

    @property
    def cache(self) -> Kept:
        """Where the rows are kept; with ``cache="auto"``, the choice."""
        return self._inner.cache if isinstance(self._inner, _Rows) else "none"

    @property
    def skipped(self) -> int:
        """Damaged records that ``on_error="skip"`` has skipped so far, each counted once."""
        return self._inner.skipped

    @property
    def errors(self) -> list[SkippedRecord]:
        """The first 1000 of them, each with its place and its damage."""
        return self._inner.errors

    @property
    def stored_source(self) -> Source:
        """What it reads, as a source of rows."""
        return self._inner.stored_source if isinstance(self._inner, _Rows) else self._as_rows()

    @property
    def seed(self) -> int | None:
        """Seed of the order of rows; None for the recorded order, and for whole records."""
        return self._inner.seed if isinstance(self._inner, _Rows) else None

    def skip(self, n: int) -> None:
        """Skip ``n`` batches; see `SourceReader.skip`.

        Raises:
            OptionError: Records are served whole.
        """
        with self._turns_of_threads.held():
            self._check_open()
            self._check_loaded()
            if isinstance(self._inner, _Whole):
                raise OptionError("records are served whole: pass batch_size=... to skip batches of rows")
            self._inner.skip(n)

    @property
    def content_identity(self) -> str:
        """Changes with the content of the files."""
        return self._inner.content_identity if isinstance(self._inner, _Rows) else content_of_all(self._files)

    @property
    def row_source(self) -> RowSource | None:
        """The source of its next rows, to gather them with those of others; None without a store."""
        return self._inner.row_source if isinstance(self._inner, _Rows) else None

    # ---- hooks of InputReader ----

    def _next(self) -> Batch:
        return self._inner._next()

    def _take(self, n: int) -> Batch:
        return self._inner._take(n) if isinstance(self._inner, _Rows) else super()._take(n)

    def _endless(self) -> Endless | None:
        return self._inner._endless()

    def interrupt(self) -> None:
        """Wake a `sample` that waits for its store to be built; see `InputReader`."""
        self._inner.interrupt()

    def _position(self) -> JsonState:
        return self._inner._position()

    def _load(self, state: JsonState) -> None:
        if isinstance(self._inner, _Whole):
            self._inner.check_ranks(state)
        super()._load(state)

    def _seek(self, position: JsonState) -> None:
        self._inner._seek(position)

    def _close(self) -> None:
        self._inner._close()


class _Rows(FileReader):
    """Rows, by the engine of all stored data."""

    def __init__(self, source: GroupFiles, asked: Asked) -> None:
        self._open_files(source, asked)


class _Whole(InputReader):
    """Records as they were written: number i of the order over all epochs belongs to rank i modulo world.

    The saved state is a few integers, with digests of the files and options that it fits. The position is the
    start of the next round over the ranks, so it is the same on every rank after equally many calls. Between
    records, it loads into a reader with another number of ranks.
    """

    def __init__(
        self,
        records: Records,
        files: Sequence[InputFile],
        decoder: RllibDecoder,
        options: ReadOptions,
        details: Mapping[str, Any],
        *,
        name: str,
    ) -> None:
        self.options, self._records, self._decoder = options, records, decoder
        self._agreed = Agreed(
            options, lambda: records.firsts(decoder), several=len(records.files) > 1, lists=LISTS_WAY
        )
        self._seed = choose_seed(options, name) or 0  # 0 is not used: no shuffling.
        self._failures = records.failures
        self._source = repr(files[0].uri) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        unlike = None if options.unlike == "error" else options.unlike
        sealed = {
            "batch_size": options.batch_size,
            "shuffle": options.shuffle,
            "columns": sorted(options.columns) if options.columns is not None else unlike,
            "on_error": options.on_error,
            "drop_last": options.drop_last,
            **details,
        }
        # What must be equal for a position to mean the same records.
        self._fingerprint: JsonState = {
            "order": ORDER_VERSION,
            "files": _seal_files(files),
            "options": {name: _digest(value) for name, value in sealed.items()},
        }
        self._epoch = self._record = 0
        #: Number of the epoch of the last record.
        self._given = 0
        #: (epoch, first position, record numbers from there): a stretch of the permutation.
        self._block: tuple[int, int, list[int]] = (-1, 0, [])
        logger.info("%s: %d files, the first is %s", name, len(files), files[0].uri)

    def _describe(self) -> Iterator[str]:
        yield self._source
        yield f"at epoch {self._epoch}, record {self._record}"
        yield from self.options.given()

    @property
    def skipped(self) -> int:
        return self._failures.count

    @property
    def errors(self) -> list[SkippedRecord]:
        return list(self._failures.errors)

    def _next(self) -> Batch:
        while True:
            batch = self._next_record()
            if len(batch):
                return batch

    def _next_record(self) -> Batch:
        options = self.options
        while True:
            turn, at = self._place(self._record + options.shard[0])
            epoch = self._epoch + turn
            if options.epochs is not None and epoch >= options.epochs:
                raise EndOfData(f"all {self._records.count()} records were read {options.epochs} times")
            try:
                batch = self._loaded(self._number(epoch, at))
            except (CorruptData, SchemaError) as error:
                self._failures.handle(error)
                if options.epochs is None and epoch:
                    self._failures.check_hope(self._records.count())
                batch = None
            self._given = epoch
            turn, self._record = self._place(self._record)
            self._record += options.shard[1]
            self._epoch += turn
            if batch is not None:
                self._failures.succeeded()
                return batch

    def _loaded(self, index: int) -> Batch:
        batch = self._records.load(index, self._decoder)
        try:
            return self._agreed.conform(batch)
        except SchemaError as error:
            raise_at(error, uri=self._records.uri_of(index), record=self._records.numbers[index])

    def _place(self, number: int) -> tuple[int, int]:
        """How many epochs after this one a record comes, and its position in that epoch."""
        if not self.options.shuffle and self._records.has(number):
            return 0, number
        count = self._records.count()
        if count == 0:
            raise DataNotFound("found no record in the files: expected at least one")
        return divmod(number, count)

    def _number(self, epoch: int, at: int) -> int:
        """Number of the record at position ``at`` of ``epoch``."""
        if not self.options.shuffle:
            return at
        count = self._records.count()
        known, first, numbers = self._block
        if known != epoch or not first <= at < first + len(numbers):
            order = Permutation(count, seed=self._seed, epoch=epoch)
            first, numbers = at, order.take(at, min(at + _BLOCK, count)).tolist()
            self._block = (epoch, first, numbers)
        return numbers[at - first]

    def _endless(self) -> Endless | None:
        return None if self.options.epochs is not None else Endless(self._given, None)

    def _position(self) -> JsonState:
        return {
            **self._fingerprint,
            "seed": self._seed if self.options.shuffle else None,
            "world": self.options.shard[1],
            "at": {"epoch": self._epoch, "record": self._record},
        }

    def check_ranks(self, state: JsonState) -> None:
        """Refuse a state that was saved inside a record by another number of ranks."""
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
            self._seed, self._block = seed_in(position), (-1, 0, [])
        epochs, at = self.options.epochs, position["at"]
        reached = whole_number(at, "epoch", of="state['position']['at']")
        # States of 4d4987e, of JSON in the order of the files, store the number as "round".
        record = whole_number(at, "round" if "round" in at else "record")
        if epochs is not None and (reached, bool(record)) > (epochs, False):
            raise StateError(
                f"state['position']['at'] is in epoch {reached}, but the reader has {epochs} epochs: open "
                "the data with at least as many epochs",
                uri=self._source,
            )
        self._epoch, self._record = reached, record

    def _close(self) -> None:
        self._records.close()


def _seal_files(files: Sequence[InputFile]) -> list[Any]:
    """Number, bytes and digest of ``files``: equal for the same files."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(json.dumps([file.uri, file.size]).encode())
    return [len(files), sum(file.size or 0 for file in files), digest.hexdigest()]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=4).hexdigest()
