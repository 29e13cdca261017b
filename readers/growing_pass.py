"""Epochs over a growing data set: each epoch reads the rows that exist when it begins.

Each epoch is a separate pass over one snapshot (`ColdPass`, `StoredPass`); this module chains the passes. A
saved position holds the snapshot of its epoch, so a resumed epoch reads the same snapshot to its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal, TypeAlias

from rlio.batch import Batch, concat_samples, count_units
from rlio.batch.join import Unlike
from rlio.dataset.dataset import Dataset, dataset_on
from rlio.errors import CorruptData, EndOfData, OptionError, StateError, excerpt
from rlio.reader import JsonState
from rlio.readers.cold_pass import ColdPass
from rlio.readers.read_options import ReadOptions, check_batch_size
from rlio.readers.stored_pass import StoredPass
from rlio.replay.positions import check_offset, own_batch_size
from rlio.support.states import whole_number

__all__ = ["GrowingPass", "SnapshotPass", "dataset_of"]

logger: logging.Logger = logging.getLogger("rlio")

#: A pass over epochs of one snapshot.
SnapshotPass: TypeAlias = ColdPass | StoredPass


def dataset_of(running: SnapshotPass) -> Dataset:
    """The data set that a pass reads."""
    assert isinstance(running.source, Dataset)
    return running.source


# How batches of two epochs are joined if one has columns that the other lacks.
_JOINED: Final[dict[str, Unlike]] = {"error": "error", "drop": "intersect", "fill": "fill"}


class GrowingPass:
    """Reads epochs of a growing data set, each over its own snapshot.

    Args:
        dataset: The data set as it is now.
        options: The read options, for one reader without ranks.
        missing: The rule for columns that only some writers have.
        open_pass: Opens the pass over epochs of a data set.
    """

    def __init__(
        self,
        dataset: Dataset,
        options: ReadOptions,
        missing: Literal["error", "drop", "fill"],
        open_pass: Callable[[Dataset, ReadOptions], SnapshotPass],
    ) -> None:
        self.options = options
        self._storage, self._uri = dataset.storage, dataset.uri
        self._joined = _JOINED[missing]
        self._open_pass = open_pass
        # The pass over this epoch; None after a failure: it must be opened again at `_place`.
        self._running: SnapshotPass | None = None
        self._place: JsonState = {}
        self._most_skipped = 0
        self.interrupted = False
        self._running = self._open(dataset, epochs=1)

    def _open(self, dataset: Dataset, *, epochs: int) -> SnapshotPass:
        """A pass that ends after ``epochs`` epochs, the last of them over ``dataset``."""
        # The end of an epoch is not the end of the data: the pass drops nothing there.
        opened = self._open_pass(dataset, replace(self.options, epochs=epochs, drop_last=False))
        if self.interrupted:
            opened.interrupt()
        return opened

    @property
    def current(self) -> SnapshotPass:
        """The pass over this epoch; opened again after a failure."""
        if self._running is None:
            self._running = self._opened_at(self._place)
        return self._running

    @property
    def place(self) -> str:
        """Where it is, for `repr`."""
        return "grow" if self._running is None else f"grow, {self._running.place}"

    @property
    def skipped(self) -> int:
        """Rows lost to damage, in the epoch with the most damage."""
        return max(self._most_skipped, self.current.skipped)

    # ---- batches ----

    def take(self, n: int | None) -> Batch:
        """The next ``n`` units; None: the batch size of the options."""
        size = self._size_of(n)
        running = self.current
        if self.options.on_error == "raise" and size <= running.total - running.offset < running.total:
            return running.take(size)  # Well within an epoch: the common case.
        mark = self._mark()
        try:
            parts = self._gather(size)
            return parts[0] if len(parts) == 1 else concat_samples(parts, columns=self._joined)
        except EndOfData:
            raise
        except BaseException:
            self._go_back(mark)
            raise

    def _size_of(self, n: int | None) -> int:
        """Units of a batch; if the reader is endless, its next epoch has at least as many.

        If the epoch has not begun and has too few, it is listed again to include newer rows.

        Raises:
            OptionError: The epoch then still has too few.
        """
        running = self.current
        size = n or own_batch_size(self.options, running.batch_size, there=lambda: running.total)
        # At the end of an epoch, `_gather` lists newer rows and checks the size.
        begins = running.offset == 0 and running.epoch < (running.options.epochs or 0)
        if self.options.epochs is None and begins and size > running.total > 0:
            newest = dataset_on(self._storage)
            if not running.serves(newest):
                self._begin(running, newest)
            self._check_size(size)
        return size

    def _check_size(self, size: int) -> None:
        if self.options.epochs is None and self.current.total:
            check_batch_size(size, there=self.current.total, unit=self.current.unit, uri=self._uri)

    def _gather(self, size: int) -> list[Batch]:
        """Batches of ``size`` units in all, from as many epochs as needed.

        Raises:
            EndOfData: The last epoch is over, or has fewer and ``drop_last`` drops them; or there are no
                rows.
            OptionError: The reader is endless, and the epoch that begins within the batch has too few units.
        """
        parts: list[Batch] = []
        found = in_vain = 0
        while found < size:
            running = self.current
            try:
                part = running.take(size - found)
            except EndOfData:
                in_vain += 1
                if self._is_over(running) or (in_vain > 1 and not running.total):
                    if parts and not self.options.drop_last:
                        break
                    raise
                if in_vain > 1:
                    raise CorruptData("every row of an epoch is damaged", uri=self._uri) from None
                self._take_up()
                if self.current.total < size - found:  # A whole epoch, with units before and after it.
                    self._check_size(size)
                continue
            in_vain = 0
            parts.append(part)
            found += count_units(part, running.unit)
        return parts

    def skip(self, n: int) -> None:
        """Take ``n`` batches, because the size of an epoch is known only once it begins.

        Raises:
            EndOfData: There are fewer batches; the reader is then at the end.
            OptionError: As `take`.
        """
        mark = self._mark()
        try:
            for _ in range(n):
                self.take(None)
        except EndOfData:
            raise
        except BaseException:
            self._go_back(mark)
            raise

    def _is_over(self, running: SnapshotPass) -> bool:
        """Whether the last epoch is over."""
        return self.options.epochs is not None and running.epoch >= self.options.epochs

    # ---- epochs ----

    def _take_up(self) -> None:
        """Begin the next epoch, over the rows that exist now; after an empty epoch, the same one again."""
        ended = self.current
        newest = dataset_on(self._storage)
        if ended.serves(newest):
            ended.extend(ended.epoch + 1)
            return
        self._begin(ended, newest)

    def _begin(self, before: SnapshotPass, newest: Dataset) -> SnapshotPass:
        """Begin the epoch at which ``before`` stopped, over the newest listing."""
        number, seed = before.epoch, before.seed
        grown = len(newest) - len(before.source)
        logger.info("%s: epoch %d has %+d rows", self._uri, number, grown)
        self._leave()
        fresh = self._open(newest, epochs=number + 1)
        self._running = _placed(fresh, fresh.position() | {"epoch": number, "position": 0, "seed": seed})
        return self._running

    def _leave(self) -> None:
        """Close the current pass, so only one has a store at a time; it can be opened again."""
        if self._running is not None:
            self._place = self.position()
            self._most_skipped = self.skipped
            running, self._running = self._running, None
            running.close()

    def _mark(self) -> tuple[SnapshotPass, JsonState]:
        """The place to which `_go_back` returns."""
        return self.current, self.position()

    def _go_back(self, mark: tuple[SnapshotPass, JsonState]) -> None:
        """Undo a failed call: rows that were read but not served are read again."""
        running, place = mark
        if self._running is running:
            _seek_within(running, place)
        else:
            self._leave()
            self._place = place

    # ---- state ----

    def position(self) -> JsonState:
        """The state for `seek`; it includes the snapshot of this epoch, one number for each writer."""
        if self._running is None:
            return self._place
        position = self._running.position()
        options = position["options"] | {"epochs": self.options.epochs}
        return position | {"options": options, "at": dataset_of(self._running).snapshot()}

    def seek(self, position: JsonState) -> None:
        """Continue from a position, over the snapshot that was saved in it.

        Raises:
            StateError: The position belongs to other data or other options.
        """
        if not isinstance(position.get("at"), dict):
            raise StateError(
                f"state['position']['at'] is {excerpt(position.get('at'))}: the state was saved without "
                "grow=True; load it into a reader without grow, and pass the snapshot of that time as at=",
                uri=self._uri,
            )
        check_offset(position, self.options, total=whole_number(position, "position") + 1)
        running = self._running
        if running is not None and dataset_of(running).snapshot() == position["at"]:
            _seek_within(running, position)
        else:
            self._leave()
            self._running = self._opened_at(position)
        self._most_skipped = 0

    def _opened_at(self, position: JsonState) -> SnapshotPass:
        """The pass over the epoch of a position, at that position."""
        try:
            dataset = dataset_on(self._storage, at=position["at"])
        except OptionError as error:
            raise StateError(f"state['position']['at'] is not a snapshot: {error}", uri=self._uri) from error
        return _placed(self._open(dataset, epochs=_epochs_of(position)), position)

    def interrupt(self) -> None:
        """See `EpochPass.interrupt`; also for the passes that are opened later."""
        self.interrupted = True
        running = self._running
        if running is not None:
            running.interrupt()

    def close(self) -> None:
        """Close the current pass."""
        if self._running is not None:
            self._running.close()


def _epochs_of(position: JsonState) -> int:
    """How many epochs the pass over the epoch of a position reads in all."""
    epoch, offset = (whole_number(position, key) for key in ("epoch", "position"))
    # An epoch at its beginning, except the first, has not been listed yet.
    return epoch + 1 if offset or not epoch else epoch


def _placed(found: SnapshotPass, position: JsonState) -> SnapshotPass:
    """Move an opened pass to a position, and return it; close it if the position does not fit."""
    try:
        found.seek(position)
    except BaseException:
        found.close()
        raise
    return found


def _seek_within(running: SnapshotPass, position: JsonState) -> None:
    """Move to a position in the current epoch, or in an earlier one over the same snapshot."""
    epochs = running.options.epochs
    try:
        running.extend(_epochs_of(position))
        running.seek(position)
    except BaseException:
        running.extend(epochs or 0)
        raise
