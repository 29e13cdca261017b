"""Shuffles the batches of another reader, window by window; nothing is lost or repeated.

Example:
    >>> from rlio.batch import SampleBatch
    >>> from rlio.errors import EndOfData
    >>> from rlio.reader import InputReader
    >>> class Count(InputReader):
    ...     number = 0
    ...     def _next(self):
    ...         if self.number == 7:
    ...             raise EndOfData("seven batches")
    ...         self.number += 1
    ...         return SampleBatch(t=[self.number])
    >>> numbers = [int(batch["t"][0]) for batch in ShuffledInput(Count(), 3, seed=0)]
    >>> sorted(numbers[:3]), sorted(numbers[3:6]), numbers[6:]
    ([1, 2, 3], [4, 5, 6], [7])
"""

from __future__ import annotations

import logging
import operator
import secrets

from rlio.batch import Batch, count_units
from rlio.errors import EndOfData, OptionError, StateError, excerpt
from rlio.reader import Endless, InputReader, InputReaderAround, JsonState
from rlio.replay.order import ORDER_VERSION, Permutation

__all__ = ["ShuffledInput"]

logger = logging.getLogger("rlio")


class ShuffledInput(InputReaderAround):
    """Reads ``n`` batches of ``child`` at a time and serves them in a permuted order, each exactly once.

    The last window is shorter where the child ends, and is served whole. Batches are permuted, not the rows
    in them, and the memory in use is that of ``n`` batches.

    The state is the child's at the window's start and a number, so a restored reader reads the window again.
    Where the child is not replayable (live experience), the unserved rest of the window is dropped instead,
    and counted in `dropped`.

    Args:
        child: The reader; closed with this one.
        n: Batches in a window; 0 and 1 pass the child's batches on in their order.
        seed: Seed of the order; None draws one from the OS, logs it and keeps it in the state.

    Raises:
        OptionError: ``child`` is no reader or ``n`` negative.
    """

    def __init__(self, child: InputReader, n: int, *, seed: int | None) -> None:
        super().__init__(child)
        if operator.index(n) < 0:
            raise OptionError(f"ShuffledInput(n={n}): batches in a window, 0 or more")
        if seed is None:
            seed = secrets.randbits(63)
            if n > 1:
                logger.info("ShuffledInput: seed=%d, drawn from the OS", seed)
        self.n = max(operator.index(n), 1)
        self.seed = operator.index(seed)
        self._number = 0  # windows served whole before this one
        self._index = 0  # batches of this window that were served
        # Of the window that is being served or filled; its served batches are None.
        self._window: list[Batch | None] = []
        self._order: list[int] | None = None
        # The child's state at the window's start; None: its present one, as nothing was read ahead.
        self._start: JsonState | None = None

    def _next(self) -> Batch:
        if self.n == 1:
            return self.child.sample()
        if self._order is None:
            self._fill()
        assert self._order is not None
        place = self._order[self._index]
        batch, self._window[place] = self._window[place], None
        assert batch is not None
        self._index += 1
        if self._index == len(self._order):
            self._begin(self._number + 1, 0)
        return batch

    def _fill(self) -> None:
        """Read a window and draw its order; batches read before an error stay for the next try."""
        if self._start is None:
            self._start = self.child.state_dict()
        while len(self._window) < self.n:
            try:
                self._window.append(self.child.sample())
            except EndOfData:
                if not self._window and not self._index:
                    self._start = None
                    raise
                break
        size = len(self._window)
        if self._index >= size:
            raise StateError(
                f"the state says that {self._index} batches of window {self._number} were served but it has "
                f"{size}: the data changed since it was saved"
            )
        self._order = Permutation(size, seed=self.seed, epoch=self._number).take(0, size).tolist()

    def _begin(self, number: int, index: int) -> None:
        """Stand before batch ``index`` of window ``number``, with nothing read of it."""
        self._number, self._index = number, index
        self._window, self._order, self._start = [], None, None

    def state_dict(self) -> JsonState:
        state = super().state_dict()
        if not self.replayable:
            waiting = (batch for batch in self._window if batch is not None)
            state["dropped"] += sum(count_units(batch, self.unit) for batch in waiting)
        return state

    def _position(self) -> JsonState:
        number, index, start = self._number, self._index, self._start
        if not self.replayable and self._window:
            # What was read cannot be read again: go on behind it.
            number, index, start = number + 1, 0, None
        return {
            "order": ORDER_VERSION,
            "seed": self.seed,
            "window": number,
            "index": index,
            "child": self.child.state_dict() if start is None else start,
        }

    def _seek(self, position: JsonState) -> None:
        if position["order"] != ORDER_VERSION:
            raise StateError(
                f"state['position']['order'] is {excerpt(position['order'])} but this version has order "
                f"{ORDER_VERSION}: use the version of rlio that saved it"
            )
        super()._seek(position)
        self.seed = int(position["seed"])
        self._begin(int(position["window"]), int(position["index"]))

    def _endless(self) -> Endless | None:
        found = self.child._endless()
        # It reads ahead: the number of the child's pass says nothing of the batches that it gives.
        return None if found is None else Endless(0, found.units)

    def _close(self) -> None:
        self._begin(self._number, self._index)
        super()._close()
