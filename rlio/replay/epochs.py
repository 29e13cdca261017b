"""Passes over the units of a store: each unit once an epoch, in recorded order or as one permutation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, SampleBatch
from rlio.errors import EndOfData
from rlio.query.order import Permutation
from rlio.query.positions import UnitRange
from rlio.read_options import ReadOptions
from rlio.reader import JsonState, Unit
from rlio.replay.draws import Draw, RowUnits, Units
from rlio.replay.epoch_pass import EpochPass
from rlio.support.forks import cached_property

if TYPE_CHECKING:
    from rlio.replay.store import ReplayStore

__all__ = ["OWN_BATCH", "StorePass", "most_at_once"]

Ids = NDArray[np.int64]

#: Default number of units in a batch.
OWN_BATCH: Final = 256
# Rows and bytes to gather at once, if several batches can be gathered together.
_BLOCK_ROWS: Final = 4096
_BLOCK_BYTES: Final = 4 << 20
# Positions whose units are computed at once.
_ORDER_ROWS: Final = 32_768


class _Block(NamedTuple):
    """Batches that were gathered together.

    Attributes:
        epoch: Epoch of the batches.
        offset: Position, of all ranks together, before the first batch.
        batches: Number of batches.
        stride: Distance from one batch to the next, in batches; the batches between are skipped.
        batch: The rows of all.
    """

    epoch: int
    offset: int
    batches: int
    stride: int
    batch: Batch


class StorePass(EpochPass):
    """Epochs over a store.

    Args:
        store: The store; its units are opened on first use.
        draw: The draw that defines the units.
        options: Batch size, epochs, order and shard.
        usual: Default number of units in a batch.
        also: Further values that must be equal for a position to mean the same units.
    """

    order = "global"

    def __init__(
        self,
        store: ReplayStore,
        draw: Draw,
        options: ReadOptions,
        *,
        usual: int = OWN_BATCH,
        also: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(options, uri=store.uri, usual=usual)
        self.store = store
        self.draw = draw
        self._also = also or {}
        #: An epoch, and the order of its units.
        self._order: tuple[int, Permutation] | None = None
        #: Positions whose units were computed ahead: (epoch, first, last + 1); and their units.
        self._known: tuple[int, int, int] = (-1, 0, 0)
        self._ahead: Ids = np.empty(0, np.int64)
        self._block: _Block | None = None
        self._cut = 0
        # Batches skipped since the last batch was returned; most likely the same number is skipped next time.
        self._skipped = 0
        #: After closing: the number of units, if it was known.
        self._last_total: int | None = None

    @cached_property
    def units(self) -> Units:
        """The units of an epoch; opens them on first use."""
        return self._open()

    def _open(self) -> Units:
        self.store.wait_unless(lambda: self.interrupted)
        return self.store.units(self.draw)

    def interrupt(self) -> None:
        """See `EpochPass.interrupt`: the first `take` waits for the store to be built."""
        super().interrupt()
        self.store.wake()

    @cached_property
    def _most(self) -> int:
        """Most batches to gather at once."""
        return most_at_once(self.units, self.store.row_bytes, self.batch_size)

    @property
    def unit(self) -> Unit:
        """The kind of unit that is counted."""
        return self.draw.unit

    @property
    def total(self) -> int:
        """Units of one epoch, of all ranks together."""
        return self.units.count if self._last_total is None else self._last_total

    # ---- batches ----

    def take(self, n: int | None) -> Batch:
        """The next ``n`` units of this rank; None: the batch size of the options."""
        before = self.mark()
        try:
            return self._taken(n or self.batch_size)
        except EndOfData:
            raise
        except BaseException:  # Such as a KeyboardInterrupt: the next call serves these units.
            self.go_back(before)
            raise

    def go_back(self, before: tuple[int, int]) -> None:
        """See `EpochPass`. What was gathered or computed ahead may be half changed."""
        super().go_back(before)
        self._block, self._known = None, (-1, 0, 0)

    def _taken(self, size: int) -> Batch:
        if size != self.batch_size:
            self._block = None
        elif self._block is None or not self._goes_on(self._block):
            self._block, self._cut = self._load(), 0
        block, at = self._block, self._cut
        if block is None:
            if self.total == 0:
                raise EndOfData(self._why_empty())
            self._check_size(size)
            return self.units.batch(self._numbers_of(self._deal(size)))
        found = block.batch
        if block.batches > 1:
            assert isinstance(found, SampleBatch)
            found = found[at * size : (at + 1) * size]
        self._cut = at + 1
        self._skipped = 0
        if self._cut == block.batches:
            self._block = None
        self._step(size * self.options.shard[1])
        return found

    def _goes_on(self, block: _Block) -> bool:
        """Whether the next gathered batch is the one at the current position."""
        begins = block.offset + self._cut * block.stride * self.batch_size * self.options.shard[1]
        return block.epoch == self.epoch and begins == self.offset

    def _load(self) -> _Block | None:
        """Gather the next batches together; None if the epoch has no full batch left."""
        (rank, world), size = self.options.shard, self.batch_size
        stride, self._skipped = self._skipped + 1, 0
        full = (self.total - self.offset) // (size * world)
        if not full or (self.options.epochs is not None and self.epoch >= self.options.epochs):
            return None
        batches = min((full - 1) // stride + 1, self._most)
        if world == stride == 1:
            numbers = self._numbers(UnitRange(self.epoch, self.offset, self.offset + batches * size))
        else:
            first = self.offset + rank * size + np.arange(batches)[:, None] * (stride * world * size)
            positions = (first + np.arange(size)).reshape(-1)
            numbers = self._permutation(self.epoch).at(positions) if self.options.shuffle else positions
        return _Block(self.epoch, self.offset, batches, stride, self.units.batch(numbers))

    # ---- as a source of rows for joint gathering: see `rlio.replay.joint_gather` ----

    @property
    def row_units(self) -> RowUnits | None:
        """The units, if they are rows and this reader gets all of them."""
        units = self.units
        return units if isinstance(units, RowUnits) and self.options.shard == (0, 1) and units.count else None

    def peek(self, n: int) -> Ids | None:
        """The numbers of the next ``n`` units, valid until the next call; None if fewer are left."""
        if self.options.epochs is not None and self._remaining(self.options.epochs) < n:
            return None
        return self._numbers_of(self._spans(n))

    def advance(self, n: int) -> None:
        """Skip the next ``n`` units, which another component delivered."""
        self._block = None
        self._step(n)

    def skip(self, n: int, size: int | None = None) -> None:
        """See `EpochPass.skip`."""
        self._skipped += n
        super().skip(n, size)

    def _numbers_of(self, spans: Sequence[UnitRange]) -> Ids:
        """The units of several ranges; valid until the next call."""
        if len(spans) == 1:
            return self._numbers(spans[0])
        return np.concatenate([np.empty(0, np.int64), *(self._numbers(span).copy() for span in spans)])

    def _numbers(self, span: UnitRange) -> Ids:
        """The units at some positions; valid until the next call."""
        if not self.options.shuffle:
            return np.arange(span.start, span.stop)
        epoch, first, last = self._known
        if epoch != span.epoch or not first <= span.start <= last:
            first = last = span.start
        if span.stop > last:
            # Compute more than requested: a permutation takes as long for a few positions as for thousands.
            stop = min(max(span.stop, last + _ORDER_ROWS), self.total)
            kept = self._ahead[span.start - first : last - first]
            if stop - span.start > len(self._ahead):
                self._ahead = np.empty(stop - span.start + _ORDER_ROWS, np.int64)
            self._ahead[: len(kept)] = kept
            self._permutation(span.epoch).take(last, stop, out=self._ahead[len(kept) : stop - span.start])
            first = span.start
            self._known = (span.epoch, first, stop)
        return self._ahead[span.start - first : span.stop - first]

    def _permutation(self, epoch: int) -> Permutation:
        known = self._order
        if known is None or known[0] != epoch:
            assert self.seed is not None
            known = epoch, Permutation(self.total, seed=self.seed, epoch=epoch, key=(2,))
            self._order = known
        return known[1]

    def _why_empty(self) -> str:
        return self.store.why_empty(self.unit)

    # ---- state ----

    def seek(self, position: JsonState) -> None:
        """See `EpochPass.seek`."""
        super().seek(position)
        self._order = None
        self._known = (-1, 0, 0)
        self._block = None

    def _identity(self) -> JsonState:
        return {"snapshot": self.store.digest, "options": {**self.draw.to_json(), **self._also}}

    def close(self) -> None:
        """Release gathered rows and units."""
        self._block = None
        if "units" in self.__dict__:  # Free gigabytes now, without waiting for the garbage collector.
            self._last_total = self.total
            del self.__dict__["units"]


def most_at_once(units: Units, row_bytes: int, batch_size: int) -> int:
    """Most batches to gather together."""
    if not units.sliceable:
        return 1
    return max(min(_BLOCK_ROWS, _BLOCK_BYTES // max(row_bytes, 1)) // batch_size, 1)
