"""Epochs over a data set as it was listed: recorded order or shuffled, shared out among ranks.

This is what `DatasetReader` does unless it follows. A position is a unit (row, sequence or joint step) of an
epoch, counted over all ranks, so that states are equal on all ranks after equal calls.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any, Literal

from rlio.dataset import Dataset
from rlio.errors import CorruptData, DataNotFound, EndOfData, HoleError, LedgerError, excerpt
from rlio.interfaces import Batch, JsonState, ReadLedger, ReadOptions, Unit
from rlio.read_options import check_batch_size
from rlio.readers.group_source import Dealt, GroupSource, WindowedOrder, open_groups
from rlio.replay.buffers import Buffers
from rlio.replay.filter_pushdown import matches
from rlio.replay.filters import RowFilter
from rlio.replay.order import ORDER_VERSION
from rlio.replay.positions import (
    check_offset,
    check_position,
    choose_seed,
    columns_digest,
    own_batch_size,
    spans_of,
)
from rlio.replay.segment_reader import ShardGone, group_options, own_size
from rlio.schemas.folded import Folded, unfold
from rlio.storage import listing

__all__ = ["EpochPass"]

logger = logging.getLogger("rlio")


class EpochPass:
    """See the module.

    Args:
        dataset: What is read; another listing of the same rows takes its place where shards are gone.
        options: How.
        missing: The rule for columns that only some writers have.
        row_filter: Which rows are read; None: all.

    Raises:
        OptionError: A filter does not fit the columns, or the data, of which single rows are not units.
    """

    cache: Literal["memory", "disk", "none"] = "none"

    def __init__(
        self,
        dataset: Dataset,
        options: ReadOptions,
        missing: Literal["error", "drop", "fill"],
        row_filter: RowFilter | None = None,
    ) -> None:
        self.dataset = dataset
        self.options = options
        self._filter = row_filter
        self._missing: Literal["error", "drop", "fill"] = missing
        self.seed = choose_seed(options, dataset.uri)
        # Paths of shards that are listed and not there, again and again.
        self._given_up: set[str] = set()
        # Of frame stacks.
        self._buffers = Buffers()
        self._source = self._open_first()
        #: Units of a batch, where no number is asked for.
        self.batch_size = own_batch_size(options, own_size(self.dataset), there=lambda: self._source.total)
        #: Number of the epoch that the next batch begins in.
        self.epoch = 0
        # Units of this epoch that all ranks together have been dealt.
        self._offset = 0
        # Where the ledger began, and what it holds but for rows that have no position.
        self._began = (0, 0)
        self._tally = ReadLedger()
        # Whether drop_last dropped the end of the last epoch.
        self._cut_short = False
        # Whether batches were stepped over unread, which are in no ledger.
        self._stepped_over = False

    @property
    def unit(self) -> Unit:
        """What is counted."""
        return self._source.unit

    @property
    def total(self) -> int:
        """Units of one epoch, of all ranks together."""
        return self._source.total

    @property
    def offset(self) -> int:
        """Units of this epoch that all ranks together have been dealt."""
        return self._offset

    @property
    def skipped(self) -> int:
        """Rows lost to damage so far, each once."""
        return self._source.skipped

    @property
    def ledger(self) -> ReadLedger:
        """What became of the rows."""
        if self.options.shard[0] != 0:  # Rows that no position stands for are counted by the first rank.
            return self._tally
        lost = (self._ended if self._source.total else 1) * self._source.missing_rows
        return self._tally.plus(expected=lost, skipped=lost, trimmed=self.dataset.trimmed_rows)

    @property
    def _ended(self) -> int:
        """Epochs that have ended since the ledger began; with the last one, those that drop_last dropped."""
        return ((self.options.epochs or 0) if self._cut_short else self.epoch) - self._began[0]

    @property
    def _reads_all(self) -> bool:
        """Whether the ledger holds what one reader alone read, from the beginning of an epoch."""
        return not self._began[1] and self.options.shard[1] == 1 and not self._stepped_over

    # ---- batches ----

    def take(self, n: int | None) -> Batch:
        """The next ``n`` units; None: as many as the options say."""
        if self._source.total == 0:
            raise EndOfData(self._why_empty())
        self._check_size(n or self.batch_size)
        before = self.epoch, self._offset, self._tally
        attempts: Counter[str] = Counter()
        while True:
            try:
                parts = self._gather(n or self.batch_size)
                batch = unfold(parts, self._buffers.empty)
                self._tally = self._tally.plus(served=batch.agent_steps())
                self._tally.check(self.dataset.uri)
                return batch
            except EndOfData:  # Of a rank that has no part in the last step; for the others it is served.
                self.check_whole_epochs()
                raise
            except ShardGone as gone:
                self._go_back(before)
                self._list_again(gone, attempts)
            except BaseException:
                # What was read and not served is read again: the error comes back until its cause is gone.
                self._go_back(before)
                raise

    def skip(self, n: int, size: int | None = None) -> None:
        """Go where ``n`` calls of `take` would lead; what they would give is in no number of the ledger.

        Args:
            n: Batches.
            size: Units of each; None: `batch_size`.

        Raises:
            EndOfData: There are fewer; it is at the end then.
            OptionError: As `take`.
        """
        if n == 0:
            return
        self._check_size(size or self.batch_size)
        self._stepped_over = True
        if self.options.on_error == "skip":
            self._read_over(n, size)
            return
        total, epochs = self._source.total, self.options.epochs
        covered = self.options.shard[1] * (size or self.batch_size)
        if epochs is None and total:
            self._step_over(n * covered)
            return
        left = max(((epochs or 0) - self.epoch) * total - self._offset, 0)
        whole, rest = divmod(left, covered)
        if n <= whole:
            self._step_over(n * covered)
            return
        if self.options.drop_last:
            self._step_over(whole * covered)
            raise EndOfData(f"fewer than {n} batches are left: drop_last leaves the last {rest} {self.unit}")
        start, stop = self._part_of(rest)
        self._step_over(left)
        if n > whole + (stop > start):
            raise EndOfData(f"fewer than {n} batches were left of {epochs} epochs of {total} {self.unit}")

    def _check_size(self, units: int) -> None:
        if self.options.epochs is None and self.total:
            check_batch_size(units, there=self.total, unit=self.unit, uri=self.dataset.uri)

    def _read_over(self, n: int, size: int | None) -> None:
        """Step over batches by reading them: those after damage are filled up with what comes next."""
        before = self._tally, self._cut_short
        try:
            for _ in range(n):
                self.take(size)
        finally:
            self._tally, self._cut_short = before

    def _step_over(self, units: int) -> None:
        """Step over units of all ranks."""
        if units:
            crossed, self._offset = divmod(self._offset + units, self._source.total)
            self.epoch += crossed

    def _part_of(self, covered: int) -> tuple[int, int]:
        """This rank's part, from where to where, of so many units of all ranks."""
        rank, world = self.options.shard
        return covered * rank // world, covered * (rank + 1) // world

    def _why_empty(self) -> str:
        if self._filter is None or not len(self.dataset):
            return self.dataset.why_empty()
        return f"no row of {self.dataset.uri} passes the filter {excerpt(self._filter.text)}"

    def _go_back(self, before: tuple[int, int, ReadLedger]) -> None:
        self.epoch, self._offset, self._tally = before
        self._source.rewind()

    def _gather(self, n: int) -> list[Folded]:
        """Batches of ``n`` units in all; at least one.

        Raises:
            EndOfData: The last epoch is over (or its rest is dropped), or has nothing left for this rank.
        """
        if self.options.on_error == "skip":
            parts = self._gather_what_is_there(n)
        else:
            covered = self._deal(self.options.shard[1] * n, [])
            start, stop = self._part_of(covered)
            spans = spans_of(self.epoch, self._offset + start, self._offset + stop, self.total)
            self._step_over(covered)
            parts = []
            for span in spans:
                for dealt in self._source.units(*span, range(n)):
                    self._put(dealt, parts)
        if not parts:  # A rank that has no part in the last step.
            raise EndOfData(f"all {self.options.epochs} epochs of {self.total} {self.unit} have been read")
        return parts

    def _gather_what_is_there(self, n: int) -> list[Folded]:
        """`_gather` where damage is passed over: rows after it move up, and the next step begins later.

        What a rank has of a step, and where it ends, then depends on all that is damaged in it: every rank
        looks at the whole step (and makes batches of its own part), so that all agree.
        """
        before = self.epoch, self._offset, self._tally
        rank, world = self.options.shard
        parts, found = self._step(world * n, range(rank * n, (rank + 1) * n))
        if found == world * n:
            return parts
        if self.options.drop_last:
            self._drop(parts)
            raise EndOfData(f"the last {found} {self.unit} are fewer than {world * n}: drop_last drops them")
        if world > 1:  # The last step is dealt evenly, and only now it is known how much there is of it.
            self.epoch, self._offset, self._tally = before  # Nobody got what was decoded: it serves again.
            parts, _ = self._step(world * n, range(found * rank // world, found * (rank + 1) // world))
        return parts

    def _step(self, units: int, wanted: range) -> tuple[list[Folded], int]:
        """Step over ``units`` that are not lost, or all that are left.

        Args:
            units: Of all ranks.
            wanted: Which of them, counted from 0, are this rank's.

        Returns:
            Batches of those, and how many units there were.
        """
        parts: list[Folded] = []
        found, began = 0, self.epoch
        while found < units and not (found and self._is_over()):
            covered = self._deal(units - found, parts)
            spans = list(spans_of(self.epoch, self._offset, self._offset + covered, self.total))
            self._step_over(covered)
            for span in spans:
                own = range(max(wanted.start - found, 0), max(wanted.stop - found, 0))
                for dealt in self._source.units(*span, own):
                    self._put(dealt, parts)
                    found += dealt.found
            if not found and self.epoch > began + 1:
                raise CorruptData("every row of an epoch is damaged", uri=self.dataset.uri)
        return parts, found

    def _put(self, dealt: Dealt, parts: list[Folded]) -> None:
        """Count what was dealt, and take what is this rank's."""
        rank, world = self.options.shard
        lost = dealt.lost * (rank + 1) // world - dealt.lost * rank // world
        self._tally = self._tally.plus(expected=dealt.rows + lost, skipped=lost)
        if dealt.batch is not None:
            parts.append(dealt.batch)

    def _deal(self, units: int, parts: list[Folded]) -> int:
        """How many of the next ``units`` of all ranks there are; ``parts`` wait for them.

        Raises:
            EndOfData: The last epoch is over (or its rest is dropped).
        """
        epochs = self.options.epochs
        if epochs is None:
            return units
        left = (epochs - self.epoch) * self.total - self._offset
        if left <= 0 or (self.options.drop_last and left < units):
            self._drop(parts)
            self._drop_rest(left)
            raise EndOfData(f"all {epochs} epochs of {self.total} {self.unit} have been read")
        return min(units, left)

    def _drop(self, parts: list[Folded]) -> None:
        self._tally = self._tally.plus(dropped=sum(part.batch.agent_steps() for part in parts))

    def _drop_rest(self, left: int) -> None:
        """Count, once, the rows of the last ``left`` units, which are not read any more.

        Rows of sequences and joint steps are known only where this reader has read all the others.
        """
        if left <= 0 or self._cut_short:
            return
        self._cut_short = True
        rows = 0
        if self._source.by_row:
            start, stop = self._part_of(left)
            rows = stop - start
        elif self._reads_all:
            epochs = (self.options.epochs or 0) - self._began[0]
            rows = epochs * self._named_rows() - self.ledger.expected
        self._tally = self._tally.plus(expected=rows, dropped=rows)

    def _named_rows(self) -> int:
        """Rows of an epoch by the names of the shards, those that are missing included.

        With a filter, those that pass, and those that are lost and might have passed.
        """
        if self._filter is not None:
            return self.total + self._source.missing_rows
        return sum(rows for _, rows in self.dataset.lost_rows()) + len(self.dataset)

    def _is_over(self) -> bool:
        """Whether nothing is left."""
        return self.options.epochs is not None and self.epoch >= self.options.epochs

    def check_whole_epochs(self) -> None:
        """Compare what one reader alone read in whole epochs with what the shards' names say.

        Raises:
            LedgerError: They differ.
        """
        ledger = self.ledger
        ledger.check(self.dataset.uri)
        if not self._reads_all or not self.total or (self._offset and not self._cut_short):
            return
        epochs, named = self._ended, self._ended * self._named_rows()
        if ledger.expected != named:
            raise LedgerError(
                f"{epochs} epochs have {named} rows, as the shards' names say, but "
                f"{ledger.expected} were come across: this is a bug of rlio, please report it",
                uri=self.dataset.uri,
            )

    # ---- other listings, and shards that are gone ----

    def serves(self, dataset: Dataset) -> bool:
        """Whether another listing of the data set has the same rows, in the same shards."""
        ours = self.dataset
        return dataset.segments == ours.segments and dataset.lost_rows() == ours.lost_rows()

    def extend(self, epochs: int) -> None:
        """Read so many epochs in all."""
        self.options = replace(self.options, epochs=epochs)

    def _open_first(self) -> GroupSource:
        attempts: Counter[str] = Counter()
        while True:
            try:
                return self._open(self.dataset)
            except ShardGone as gone:
                self.dataset = self.dataset.refresh(at=self.dataset.snapshot())
                self._try_again(gone, attempts)

    def _open(self, dataset: Dataset) -> GroupSource:
        options = group_options(dataset, self.options, self._missing)
        found = None
        if self._filter is not None:
            found = matches(
                dataset,
                self._filter,
                missing=self._missing,
                on_error=self.options.on_error,
                given_up=self._given_up,
            )
        return open_groups(dataset, options, seed=self.seed, given_up=self._given_up, matches=found)

    def _list_again(self, gone: ShardGone, attempts: Counter[str]) -> None:
        """Go on with the shards that hold the same rows now.

        Raises:
            DataNotFound: The order cannot go on over them.
            HoleError: There are none.
        """
        fresh = self.dataset.refresh(at=self.dataset.snapshot())
        lost = sum(rows for _, rows in fresh.lost_rows())
        if lost > sum(rows for _, rows in self.dataset.lost_rows()):
            # The rows are nowhere else: this is damage, raised or counted like any other.
            if self.options.on_error == "raise":
                fresh.check_complete()
            self._given_up.add(gone.segment.ref.path)
            return
        self._try_again(gone, attempts)
        if any(segment.ref.path == gone.segment.ref.path for segment in fresh.segments):
            return
        other = self._open(fresh)
        if other.layout != self._source.layout:
            other.close()
            raise DataNotFound(
                "the shard was compacted into a larger one and removed while it was being read: this order "
                "goes by row groups, and cannot go on over others. Open the data again for a new epoch, and "
                "let gc keep covered shards for longer than an epoch takes",
                uri=self.dataset.storage.uri_of(gone.segment.ref.path),
            ) from gone.error
        self._source.close()
        logger.info("%s: listed again, as %s is gone", self.dataset.uri, gone.segment.ref.path)
        self.dataset, self._source = fresh, other

    def _try_again(self, gone: ShardGone, attempts: Counter[str]) -> None:
        """Wait a moment, or give up on a shard that is listed and is not there.

        Raises:
            HoleError: It was not there for long enough.
        """
        path = gone.segment.ref.path
        attempts[path] += 1
        if attempts[path] <= listing.PATIENCE.listings:
            listing.PATIENCE.sleep(listing.PATIENCE.seconds)
        elif self.options.on_error == "skip":
            self._given_up.add(path)
        else:
            raise HoleError(
                f"the shard is listed and is not there, in {attempts[path]} attempts: restore it, or read "
                "with on_error='skip'",
                uri=self.dataset.storage.uri_of(path),
            ) from gone.error

    # ---- state ----

    def position(self) -> JsonState:
        """What `seek` needs."""
        return {"epoch": self.epoch, "position": self._offset, "seed": self.seed, **self._fingerprint()}

    def seek(self, position: JsonState) -> None:
        """Continue from a position; the ledger begins anew.

        Raises:
            StateError: It is one of other data, or of other options.
        """
        check_position(position, self._fingerprint(), self.options, uri=self.dataset.uri)
        if position["seed"] != self.seed:  # Drawn from the OS by both: the saved one counts.
            self.seed = position["seed"]
            if isinstance(self._source, WindowedOrder):
                self._source.reseed(position["seed"])
        epoch, offset = check_offset(position, self.options, total=self._source.total)
        self.epoch, self._offset = self._began = (epoch, offset)
        self._tally, self._cut_short, self._stepped_over = ReadLedger(), False, False
        self._source.rewind()

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same rows."""
        options = {
            "shuffle": self.options.shuffle,
            "columns": columns_digest(self.options),
            "epochs": self.options.epochs,
            "on_error": self.options.on_error,
            "missing": self._missing,
            "filter": None if self._filter is None else self._filter.text,
        }
        order = ("windows", ORDER_VERSION) if self.options.shuffle else ("recorded", 0)
        return {
            "order": list(order),
            "snapshot": self.dataset.digest,
            "layout": self._source.layout,
            "options": options,
        }

    def close(self) -> None:
        """End the background thread."""
        self._source.close()
