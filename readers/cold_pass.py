"""Epochs over a source, decoded as it is read: recorded order or shuffled.

`DatasetReader` uses this pass without a store. A position is a unit (row, sequence or
joint step) of an epoch: see `rlio.replay.epoch_pass`.
"""

from __future__ import annotations

import logging
from typing import Literal

from rlio.batch import Batch
from rlio.errors import CorruptData, DataNotFound, EndOfData, excerpt
from rlio.query.filter_pushdown import matches
from rlio.query.filters import RowFilter
from rlio.query.order import share
from rlio.query.positions import columns_digest
from rlio.read_options import ReadOptions
from rlio.reader import JsonState, Unit
from rlio.readers.group_source import Groups, GroupSource, RecordedOrder, WindowedOrder
from rlio.replay.buffers import Buffers
from rlio.replay.epoch_pass import EpochPass
from rlio.schemas.folded import Folded, unfold
from rlio.source.damage import Damage
from rlio.source.selection import group_options, own_size
from rlio.source.source import Source
from rlio.source.span_reader import GoneSegments, SegmentGone

__all__ = ["ColdPass"]

logger: logging.Logger = logging.getLogger("rlio")


class ColdPass(EpochPass):
    """Reads epochs of a source from its segments.

    Args:
        source: The source; a new listing with the same rows replaces it when segments are gone.
        options: The read options.
        missing: The rule for columns that only some writers have.
        row_filter: Selects the rows to read; None: all.

    Raises:
        OptionError: The filter does not fit the columns, or single rows of the data are not units.
    """

    order = "windows"
    cache: Literal["memory", "disk", "none"] = "none"

    def __init__(
        self,
        source: Source,
        options: ReadOptions,
        missing: Literal["error", "drop", "fill"],
        row_filter: RowFilter | None = None,
    ) -> None:
        super().__init__(options, uri=source.uri, usual=own_size(source))
        self._filter = row_filter
        self._missing: Literal["error", "drop", "fill"] = missing
        self._gone = GoneSegments(options.on_error)
        #: The damaged places.
        self.damage: Damage = Damage()
        # For frame stacks.
        self._buffers = Buffers()
        #: The source, as listed last.
        self.source: Source
        self.source, self._groups = self._opened(source)

    @property
    def unit(self) -> Unit:
        """The unit that ``n`` counts."""
        return self._groups.unit

    @property
    def total(self) -> int:
        """Units of one epoch, of all ranks together."""
        return self._groups.total

    @property
    def skipped(self) -> int:
        """Rows lost to damage so far, each counted once."""
        return self._groups.skipped

    # ---- batches ----

    def take(self, n: int | None) -> Batch:
        """The next ``n`` units; None: the batch size of the options."""
        if self._groups.total == 0:
            raise EndOfData(self._why_empty())
        self._check_size(n or self.batch_size)
        before = self.epoch, self.offset
        self._gone.forget()
        while True:
            try:
                return unfold(self._gather(n or self.batch_size), self._buffers.empty)
            except EndOfData:
                raise
            except SegmentGone as gone:
                self._go_back(before)
                self._list_again(gone)
            except BaseException:
                # Rows that were read but not served are read again: the error repeats until its cause is
                # gone.
                self._go_back(before)
                raise

    def skip(self, n: int, size: int | None = None) -> None:
        """See `EpochPass.skip`. If damage is skipped, only reading finds the start of a batch."""
        if self.options.on_error == "raise":
            super().skip(n, size)
            return
        for _ in range(n):
            self.take(size)

    def _why_empty(self) -> str:
        if self._filter is None or not len(self.source):
            return self.source.why_empty()
        return f"no row of {self.source.uri} passes the filter {excerpt(self._filter.text)}"

    def _go_back(self, before: tuple[int, int]) -> None:
        self.epoch: int = before[0]
        self.offset: int = before[1]
        self._groups.rewind()

    def _gather(self, n: int) -> list[Folded]:
        """Batches of ``n`` units in all, at least one batch.

        Raises:
            EndOfData: The last epoch is over (or its rest is dropped), or has no units left for this rank.
        """
        if self.options.on_error == "skip":
            parts = self._gather_what_is_there(n)
        else:
            spans = self._deal(n)
            dealt = [each for span in spans for each in self._groups.units(*span, range(n))]
            parts = [each.batch for each in dealt if each.batch is not None]
        if not parts:  # This rank has no share of the last step.
            raise self._end()
        return parts

    def _gather_what_is_there(self, n: int) -> list[Folded]:
        """`_gather` for ``on_error="skip"``: rows after damage move up, and the next step begins later.

        A rank's share of a step, and the end of the step, then depend on all damage in it. Every rank
        therefore looks at the whole step (and makes batches of its own share), so all ranks agree.
        """
        before = self.epoch, self.offset
        rank, world = self.options.shard
        parts, found = self._look_through(world * n, range(rank * n, (rank + 1) * n))
        if found == world * n:
            return parts
        if self.options.drop_last:
            raise EndOfData(f"the last {found} {self.unit} are fewer than {world * n}: drop_last drops them")
        if world > 1:  # The last step is divided evenly, and its size is known only now.
            self.epoch, self.offset = before  # Go back: the decoded units were not served.
            parts, _ = self._look_through(world * n, range(*share(found, self.options.shard)))
        return parts

    def _look_through(self, units: int, wanted: range) -> tuple[list[Folded], int]:
        """Move past ``units`` undamaged units, or past all that are left.

        Args:
            units: Units of all ranks.
            wanted: This rank's units among them, counted from 0.

        Returns:
            Batches of the wanted units, and the number of undamaged units.
        """
        parts: list[Folded] = []
        found, began = 0, self.epoch
        while found < units and not (found and self._is_over()):
            covered = self._left(units - found)
            spans = self._spans(covered)
            self._step(covered)
            for span in spans:
                own = range(max(wanted.start - found, 0), max(wanted.stop - found, 0))
                for dealt in self._groups.units(*span, own):
                    parts += [] if dealt.batch is None else [dealt.batch]
                    found += dealt.found
            if not found and self.epoch > began + 1:
                raise CorruptData("every row of an epoch is damaged", uri=self.source.uri)
        return parts, found

    def _is_over(self) -> bool:
        """Whether the last epoch is over."""
        return self.options.epochs is not None and self.epoch >= self.options.epochs

    # ---- shards that are gone ----

    def _opened(self, source: Source) -> tuple[Source, GroupSource]:
        """The groups of a listing, or of a later listing if its segments are gone."""
        return self._gone.read(source, lambda source: (source, self._open(source)))

    def _open(self, source: Source) -> GroupSource:
        options = group_options(source, self.options, self._missing)
        found = None
        if self._filter is not None:
            found = matches(
                source,
                self._filter,
                missing=self._missing,
                on_error=self.options.on_error,
                given_up=self._gone.given_up,
                damage=self.damage,
            )
        groups = Groups(source, options, self._gone.given_up, found, self.damage)
        return RecordedOrder(groups) if self.seed is None else WindowedOrder(groups, seed=self.seed)

    def _list_again(self, gone: SegmentGone) -> None:
        """List the source again, and continue with the segments that now hold the same rows.

        Raises:
            DataNotFound: The order cannot continue over the new shards.
            HoleError: No shards hold the rows.
        """
        fresh = self.source.listed_again()
        lost = sum(rows for _, rows in fresh.lost_rows())
        if lost > sum(rows for _, rows in self.source.lost_rows()):
            # No other shard has the rows: this is damage, raised or counted like any other.
            if self.options.on_error == "raise":
                fresh.check_complete()
            self._gone.given_up.add(gone.segment.path)
            return
        self._gone.miss(gone)
        if any(segment.path == gone.segment.path for segment in fresh.segments):
            return
        fresh, other = self._opened(fresh)
        if other.layout != self._groups.layout:
            other.close()
            raise DataNotFound(
                "the shard was compacted into a larger one and removed while it was being read: this order "
                "depends on row groups, and cannot continue over others. Open the data again for a new "
                "epoch, and let gc keep covered shards for longer than an epoch takes",
                uri=self.source.uri_of(gone.segment.path),
            ) from gone.error
        self._groups.close()
        logger.info("%s: listed again, because %s is gone", self.source.uri, gone.segment.path)
        self.source, self._groups = fresh, other

    # ---- state ----

    def seek(self, position: JsonState) -> None:
        """See `EpochPass.seek`."""
        drawn = self.seed
        super().seek(position)
        if self.seed is not None and self.seed != drawn and isinstance(self._groups, WindowedOrder):
            self._groups.reseed(self.seed)
        self._groups.rewind()

    def _identity(self) -> JsonState:
        options = {
            "columns": columns_digest(self.options),
            "on_error": self.options.on_error,
            "missing": self._missing,
            "filter": None if self._filter is None else self._filter.text,
        }
        return {"snapshot": self.source.state_identity, "layout": self._groups.layout, "options": options}

    def close(self) -> None:
        """End the background thread."""
        self._groups.close()
