"""`RecordReader`: the base of readers of RLlib's records, which are served as they were written, or as rows.

Not here: the contents of files (`rlio.readers.json_reader`, `rlio.readers.foreign_parquet`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from rlio.source.damage import Damage
from rlio.source.files import content_of_all
from rlio.source.uniform import Agreed
from rlio.storage import InputFile
from rlio.support.calls import closing_on_error
from rlio.support.forks import cached_property
from rlio.support.states import seed_in, whole_number

__all__ = ["RecordReader"]

logger: logging.Logger = logging.getLogger("rlio")

# Positions of the permutation that are computed at a time: 1024 cost as much as one.
_BLOCK: Final = 1024


class RecordReader(FileReader):
    """Serves records whole, or, if an option needs rows, their rows. A subclass opens the files."""

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
        options = asked.options
        as_rows = partial(RecordFiles, records, files, decoder_of, options, columns=asked.columns)
        chosen = asked.cache != "auto" or bool(asked.normalise)
        with closing_on_error(records):
            if options.batch_size is not None or asked.drawn or chosen:
                self._open_files(as_rows(), asked)
                return
            self.options: ReadOptions = options
            self.drop_last: bool = options.drop_last
            self._failures, self._is_owner, self._uri = records.failures, False, files[0].uri
            decoder = decoder_of(options.columns)
            details = {**decoder.details, **details}
            self._pass = _Whole(records, files, decoder, options, details, as_rows, name=type(self).__name__)
        # A reader that ended in a loop, and was not closed, leaves no open file.
        weakref.finalize(self, records.close)

    def __bool__(self) -> bool:
        """True: the rows of whole records are not counted."""
        return True

    @property
    def content_identity(self) -> str:
        """Changes with the content of the files."""
        whole = self._pass if isinstance(self._pass, _Whole) else None
        return super().content_identity if whole is None else content_of_all(whole.files)

    # ---- hooks of InputReader ----

    def _take(self, n: int) -> Batch:
        return InputReader._take(self, n) if isinstance(self._pass, _Whole) else super()._take(n)

    def _endless(self) -> Endless | None:
        return self._pass.endless() if isinstance(self._pass, _Whole) else super()._endless()

    def _load(self, state: JsonState) -> None:
        if isinstance(self._pass, _Whole):
            self._pass.check_ranks(state)
        super()._load(state)

    def _seek(self, position: JsonState) -> None:
        if isinstance(self._pass, _Whole):
            self._pass.seek(position)
        else:
            super()._seek(position)


class _Whole:
    """Records as they were written: number i of the order over all epochs belongs to rank i modulo world.

    It is what a `ColdPass` is to readers of rows, but for sizes: a batch is a record.

    The saved state is a few integers, with digests of the files and options that it fits. The position is the
    start of the next round over the ranks, so it is the same on every rank after equally many calls. Between
    records, it loads into a reader with another number of ranks.
    """

    unit: Unit = "steps"
    cache: Kept = "none"
    #: Of the order of rows.
    seed: int | None = None

    def __init__(
        self,
        records: Records,
        files: Sequence[InputFile],
        decoder: RllibDecoder,
        options: ReadOptions,
        details: Mapping[str, Any],
        as_rows: Callable[[], RecordFiles],
        *,
        name: str,
    ) -> None:
        self.options, self.files, self._records, self._decoder = options, files, records, decoder
        self._as_rows = as_rows
        self._agreed = Agreed(
            options, lambda: records.firsts(decoder), several=len(records.files) > 1, lists=LISTS_WAY
        )
        self._seed = choose_seed(options, name) or 0  # 0 is not used: no shuffling.
        self._failures, self.damage = records.failures, Damage()
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
        self.epoch = self._record = 0
        #: Number of the epoch of the last record.
        self._given = 0
        #: (epoch, first position, record numbers from there): a stretch of the permutation.
        self._block: tuple[int, int, list[int]] = (-1, 0, [])
        logger.info("%s: %d files, the first is %s", name, len(files), files[0].uri)

    @cached_property
    def source(self) -> RecordFiles:
        """The records as a source of rows, made when it is asked for."""
        return self._as_rows()

    @property
    def place(self) -> str:
        """Where it is, for `repr`."""
        more = f"and {len(self.files) - 1} more, " if len(self.files) > 1 else ""
        return f"{more}at epoch {self.epoch}, record {self._record}"

    @property
    def total(self) -> int:
        """Raise, because the rows of records are counted only where rows are served."""
        raise TypeError("records are served whole, and their rows are not counted: pass batch_size=...")

    def skip(self, n: int) -> None:
        """Refuse to skip batches of rows."""
        raise OptionError("records are served whole: pass batch_size=... to skip batches of rows")

    def take(self, n: int | None) -> Batch:
        """The next record that has rows."""
        while True:
            batch = self._next_record()
            if len(batch):
                return batch

    def _next_record(self) -> Batch:
        options = self.options
        while True:
            turn, at = self._place(self._record + options.shard[0])
            epoch = self.epoch + turn
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
            self.epoch += turn
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

    def endless(self) -> Endless | None:
        """See `InputReader`: only reading tells the rows of an epoch."""
        return None if self.options.epochs is not None else Endless(self._given, None)

    def position(self) -> JsonState:
        """The state that `seek` needs."""
        return {
            **self._fingerprint,
            "seed": self._seed if self.options.shuffle else None,
            "world": self.options.shard[1],
            "at": {"epoch": self.epoch, "record": self._record},
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

    def seek(self, position: JsonState) -> None:
        """Continue from a position."""
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
        self.epoch, self._record = reached, record

    def interrupt(self) -> None:
        """Do nothing: reading a record does not wait for other threads."""

    def close(self) -> None:
        """Close the files."""
        self._records.close()


def _seal_files(files: Sequence[InputFile]) -> list[Any]:
    """Number, bytes and digest of ``files``: equal for the same files."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(json.dumps([file.uri, file.size]).encode())
    return [len(files), sum(file.size or 0 for file in files), digest.hexdigest()]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=4).hexdigest()
