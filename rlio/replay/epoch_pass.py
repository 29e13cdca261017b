"""`EpochPass`: the common part of all passes over epochs: positions, ranks, ends and saved states.

A position counts the units of all ranks together: equal calls lead to equal positions on all ranks. Rank r of
w reads slice r of every ``w * batch_size`` units. The units left at the end of the last epoch are split
evenly.

Subclasses define which units are at a position (`rlio.replay.epochs`, `rlio.readers.cold_pass`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from rlio.batch import Batch
from rlio.errors import EndOfData
from rlio.query.order import ORDER_VERSION, share
from rlio.query.positions import (
    UnitRange,
    check_offset,
    check_position,
    choose_seed,
    own_batch_size,
    spans_of,
)
from rlio.read_options import ReadOptions, check_batch_size
from rlio.reader import JsonState, Unit
from rlio.support.forks import cached_property

__all__ = ["EpochPass"]


class EpochPass(ABC):
    """Reads every unit once an epoch, in recorded order or shuffled.

    Args:
        options: Batch size, epochs, order and shard.
        uri: URI for messages.
        usual: Default number of units in a batch.

    Attributes:
        options: Batch size, epochs, order and shard.
        uri: URI for messages.
        seed: Seed of the order; None: the recorded order.
        epoch: Number of the epoch in which the next batch begins.
        offset: Units of this epoch already given to all ranks together.
    """

    #: Name of the order of shuffled units; part of the state.
    order: ClassVar[str]

    def __init__(self, options: ReadOptions, *, uri: str, usual: int) -> None:
        self.options: ReadOptions = options
        self.uri = uri
        self.seed: int | None = choose_seed(options, uri)
        self.epoch: int = 0
        self.offset: int = 0
        #: Whether `interrupt` was called.
        self.interrupted: bool = False
        self._usual = usual

    # ---- hooks ----

    @property
    @abstractmethod
    def unit(self) -> Unit:
        """The kind of unit that is counted."""

    @property
    @abstractmethod
    def total(self) -> int:
        """Units of one epoch, of all ranks together."""

    @abstractmethod
    def take(self, n: int | None) -> Batch:
        """The next ``n`` units of this rank; None: `batch_size`."""

    @abstractmethod
    def _why_empty(self) -> str:
        """The reason why there is nothing to read."""

    @abstractmethod
    def _identity(self) -> JsonState:
        """What else must be equal for a position to mean the same units; includes a dict ``options``."""

    def interrupt(self) -> None:
        """End a `take` of another thread that waits for rows, with a ClosedError; `close` follows."""
        self.interrupted = True

    # ---- positions ----

    @property
    def place(self) -> str:
        """Where it is, for `repr`."""
        return f"at {self.offset} of epoch {self.epoch}"

    @cached_property
    def batch_size(self) -> int:
        """Default number of units in a batch."""
        return own_batch_size(self.options, self._usual, there=lambda: self.total)

    def skip(self, n: int, size: int | None = None) -> None:
        """Advance as ``n`` calls of `take` would.

        Args:
            n: Number of batches.
            size: Units of each batch; None: `batch_size`.

        Raises:
            EndOfData: The pass has fewer batches, and is now at its end.
            OptionError: As in `take`.
        """
        if not n:
            return
        size = size or self.batch_size
        self._check_size(size)
        if not self.total:
            raise EndOfData(self._why_empty())
        covered, whole = self.options.shard[1] * size, n
        if self.options.epochs is not None:
            whole = min(n, max(self._remaining(self.options.epochs), 0) // covered)
        self._step(whole * covered)
        if whole < n and self.options.drop_last:
            raise self._end()
        for _ in range(n - whole):  # The last batch, which may be short, or the end.
            self._deal(size)

    def mark(self) -> tuple[int, int]:
        """The epoch and the offset before a `take`, for `go_back`."""
        return self.epoch, self.offset

    def go_back(self, before: tuple[int, int]) -> None:
        """Return to a `mark` from which a `take` began that failed."""
        self.epoch, self.offset = before

    def _remaining(self, epochs: int) -> int:
        """Units of all ranks up to the end of ``epochs`` epochs."""
        return (epochs - self.epoch) * self.total - self.offset

    def _check_size(self, units: int) -> None:
        if self.options.epochs is None and self.total:
            check_batch_size(units, there=self.total, unit=self.unit, uri=self.uri)

    def _step(self, units: int) -> None:
        """Advance by a number of units of all ranks."""
        if units:
            crossed, offset = divmod(self.offset + units, self.total)
            self.epoch, self.offset = self.epoch + crossed, offset

    def _left(self, units: int) -> int:
        """How many of the next ``units`` of all ranks remain.

        Raises:
            EndOfData: The last epoch is over, or its remaining units are dropped.
        """
        if self.options.epochs is None:
            return units
        left = self._remaining(self.options.epochs)
        if left <= 0 or (self.options.drop_last and left < units):
            raise self._end()
        return min(units, left)

    def _spans(self, units: int, shard: tuple[int, int] = (0, 1)) -> list[UnitRange]:
        """A rank's part of the next units of all ranks, split at epoch boundaries."""
        first, last = share(units, shard)
        return list(spans_of(self.epoch, self.offset + first, self.offset + last, self.total))

    def _deal(self, n: int) -> list[UnitRange]:
        """This rank's part of the next ``world * n`` units; advances past all of them.

        Raises:
            EndOfData: As in `_left`; or this rank gets none of the last units.
        """
        covered = self._left(self.options.shard[1] * n)
        spans = self._share_of(covered)
        self._step(covered)
        if not spans:
            raise self._end()
        return spans

    def _share_of(self, units: int) -> list[UnitRange]:
        """This rank's part of the next ``units`` of all ranks."""
        return self._spans(units, self.options.shard)

    def _end(self) -> EndOfData:
        return EndOfData(f"all {self.options.epochs} epochs of {self.total} {self.unit} have been read")

    # ---- state ----

    def position(self) -> JsonState:
        """The state that `seek` needs."""
        return {"epoch": self.epoch, "position": self.offset, "seed": self.seed, **self._fingerprint}

    def seek(self, position: JsonState) -> None:
        """Continue from a position.

        Raises:
            StateError: The position belongs to other data or other options.
        """
        check_position(position, self._fingerprint, self.options, uri=self.uri)
        self.epoch, self.offset = check_offset(position, self.options, total=self.total)
        self.seed = position["seed"]  # If both seeds came from the OS, the saved one counts.

    @cached_property
    def _fingerprint(self) -> JsonState:
        """Values that must be equal for a position to mean the same units."""
        order = [self.order, ORDER_VERSION] if self.options.shuffle else ["recorded", 0]
        return self._printed_as(order, self._identity())

    def _printed_as(self, order: list[Any], found: JsonState) -> JsonState:
        options = {"shuffle": self.options.shuffle, "epochs": self.options.epochs}
        return {"order": order, **found, "options": options | found["options"]}
