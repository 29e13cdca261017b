"""Epochs over a source, decoded as it is read: recorded order or shuffled.

`DatasetReader` uses this pass without a store. A position is a unit (row, sequence or
joint step) of an epoch: see `rlio.replay.epoch_pass`. An epoch that several ranks begin is dealt to them as
lanes: see `rlio.query.lanes`.
"""

from __future__ import annotations

import logging
import weakref
from typing import Literal

from rlio.batch import Batch
from rlio.errors import CorruptData, DataNotFound, EndOfData, excerpt
from rlio.query.filter_pushdown import matches
from rlio.query.filters import RowFilter
from rlio.query.lanes import lane_parts, lanes_of_rank
from rlio.query.order import ORDER_VERSION, share
from rlio.query.positions import UnitRange, check_offset, check_position, columns_digest
from rlio.read_options import ReadOptions
from rlio.reader import JsonState, Unit
from rlio.readers.group_source import Groups
from rlio.readers.lanes import Orders
from rlio.replay.buffers import Buffers
from rlio.replay.epoch_pass import EpochPass
from rlio.schemas.folded import Folded, unfold
from rlio.source.damage import Damage
from rlio.source.selection import group_options, own_size
from rlio.source.source import Source
from rlio.source.span_reader import GoneSegments, SegmentGone
from rlio.support.states import whole_number

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
        #: The epoch that a loaded state was in the middle of, and its lanes.
        self._begun: tuple[int, int] = -1, 1
        #: Whether the loaded state is of a version without lanes, whose order goes on.
        self._is_earlier = False
        #: What a position in lanes depends on; None: not asked for yet.
        self._laned: JsonState | None = None
        #: The source, as listed last.
        self.source: Source
        self.source, self._orders = self._opened(source)

    @property
    def unit(self) -> Unit:
        """The unit that ``n`` counts."""
        return self._orders.known.unit

    @property
    def total(self) -> int:
        """Units of one epoch, of all ranks together."""
        return self._orders.known.total

    @property
    def skipped(self) -> int:
        """Rows lost to damage so far, each counted once."""
        return self._orders.skipped

    # ---- batches ----

    def take(self, n: int | None) -> Batch:
        """The next ``n`` units; None: the batch size of the options."""
        if self.total == 0:
            raise EndOfData(self._why_empty())
        self._check_size(n or self.batch_size)
        before = self.mark()
        self._gone.forget()
        while True:
            try:
                return unfold(self._gather(n or self.batch_size), self._buffers.empty)
            except EndOfData:
                raise
            except SegmentGone as gone:
                self.go_back(before)
                self._list_again(gone)
            except BaseException:
                # Rows that were read but not served are read again: the error repeats until its cause is
                # gone.
                self.go_back(before)
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

    def go_back(self, before: tuple[int, int]) -> None:
        super().go_back(before)
        self._orders.rewind()

    def _gather(self, n: int) -> list[Folded]:
        """Batches of ``n`` units in all, at least one batch.

        Raises:
            EndOfData: The last epoch is over (or its rest is dropped), or has no units left for this rank.
        """
        if self.options.on_error == "skip":
            parts = self._gather_what_is_there(n)
        else:
            parts = [batch for span in self._deal(n) for batch in self._orders.units(span)]
        if not parts:  # This rank has no share of the last step.
            raise self._end()
        return parts

    def _share_of(self, units: int) -> list[UnitRange]:
        """See `EpochPass`: the units of this rank's lanes, or its slice of the order of one reader."""
        spans = self._spans(units)
        if all(self._lanes_in(span.epoch) == 1 for span in spans):
            return super()._share_of(units)
        return [
            part
            for span in spans
            for part in lane_parts(
                span, self._lanes_in(span.epoch), total=self.total, shard=self.options.shard
            )
        ]

    def _lanes_in(self, epoch: int) -> int:
        """Lanes of an epoch: as many as ranks began it."""
        if self._is_earlier or self.options.on_error == "skip":
            return 1  # Rows after skipped damage move up, and would move from lane to lane.
        return self._begun[1] if epoch == self._begun[0] else self.options.shard[1]

    def _gather_what_is_there(self, n: int) -> list[Folded]:
        """`_gather` for ``on_error="skip"``: rows after damage move up, and the next step begins later.

        A rank's share of a step, and the end of the step, then depend on all damage in it. Every rank
        therefore looks at the whole step (and makes batches of its own share), so all ranks agree.
        """
        before = self.mark()
        rank, world = self.options.shard
        parts, found = self._look_through(world * n, range(rank * n, (rank + 1) * n))
        if found == world * n:
            return parts
        if self.options.drop_last:
            raise EndOfData(f"the last {found} {self.unit} are fewer than {world * n}: drop_last drops them")
        if world > 1:  # The last step is divided evenly, and its size is known only now.
            super().go_back(before)  # The decoded units were not served.
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
                for dealt in self._orders.of(1).units(span.epoch, span.start, span.stop, own):
                    parts += [] if dealt.batch is None else [dealt.batch]
                    found += dealt.found
            if not found and self.epoch > began + 1:
                raise CorruptData("every row of an epoch is damaged", uri=self.source.uri)
        return parts, found

    def _is_over(self) -> bool:
        """Whether the last epoch is over."""
        return self.options.epochs is not None and self.epoch >= self.options.epochs

    # ---- shards that are gone ----

    def _opened(self, source: Source) -> tuple[Source, Orders]:
        """The orders of a listing, or of a later listing if its segments are gone."""
        return self._gone.read(source, lambda source: (source, self._open(source)))

    def _open(self, source: Source) -> Orders:
        this: ColdPass = weakref.proxy(self)  # It has the orders: a reader is freed once it is dropped.
        orders = Orders(lambda: this._groups_of(source), seed=self.seed, world=self.options.shard[1])
        orders.of(self._lanes_in(self.epoch))
        return orders

    def _groups_of(self, source: Source) -> Groups:
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
        return Groups(source, options, self._gone.given_up, found, self.damage, self.options.epochs)

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
        lanes = self._lanes_in(self.epoch)
        if other.of(lanes).layout != self._orders.of(lanes).layout:
            other.close()
            raise DataNotFound(
                "the shard was compacted into a larger one and removed while it was being read: this order "
                "depends on row groups, and cannot continue over others. Open the data again for a new "
                "epoch, and let gc keep covered shards for longer than an epoch takes",
                uri=self.source.uri_of(gone.segment.path),
            ) from gone.error
        self._orders.close()
        logger.info("%s: listed again, because %s is gone", self.source.uri, gone.segment.path)
        self.source, self._orders = fresh, other

    # ---- state ----

    def position(self) -> JsonState:
        """See `EpochPass.position`; with the number of lanes of the epoch."""
        lanes = self._lanes_in(self.epoch)
        found = {"epoch": self.epoch, "position": self.offset, "seed": self.seed, **self._printed(lanes)}
        return found if self._is_earlier else {**found, "lanes": lanes}

    def seek(self, position: JsonState) -> None:
        """See `EpochPass.seek`."""
        world, drawn = self.options.shard[1], self.seed
        lanes = max(whole_number(position, "lanes"), 1) if "lanes" in position else 1
        check_position(position, self._printed(lanes), self.options, uri=self.uri)
        super().go_back(check_offset(position, self.options, total=self.total))
        self.seed: int | None = position["seed"]  # If both seeds came from the OS, the saved one counts.
        if self.seed is not None and self.seed != drawn:
            self._orders.reseed(self.seed)
        self._orders.rewind()
        self._is_earlier = world > 1 and "lanes" not in position
        self._begun = (self.epoch, lanes) if self.offset else (-1, 1)
        lanes = self._lanes_in(self.epoch)
        if self.options.on_error == "raise" and lanes_of_rank(lanes, world) * world > lanes:
            logger.warning(
                "%s: each of %d ranks reads more than its share, because %s",
                self.uri,
                world,
                "an earlier version saved the state, whose order goes on: begin an epoch without it"
                if self._is_earlier
                else f"{lanes} began epoch {self.epoch}: it is dealt again when it is over",
            )

    def _printed(self, lanes: int) -> JsonState:
        """Values that must be equal for a position in an epoch of so many lanes to mean the same units."""
        if lanes == 1:
            return self._fingerprint
        if self._laned is None:
            order = ["windows in lanes", ORDER_VERSION] if self.options.shuffle else ["recorded in lanes", 0]
            self._laned = {**self._printed_as(order, self._identity_in(lanes))}
        return self._laned

    def _identity(self) -> JsonState:
        return self._identity_in(1)

    def _identity_in(self, lanes: int) -> JsonState:
        options = {
            "columns": columns_digest(self.options),
            "on_error": self.options.on_error,
            "missing": self._missing,
            "filter": None if self._filter is None else self._filter.text,
        }
        layout = self._orders.of(lanes).layout
        return {"snapshot": self.source.state_identity, "layout": layout, "options": options}

    def close(self) -> None:
        """End the background thread."""
        self._orders.close()
