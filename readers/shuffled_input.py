"""Shuffles the batches of another reader, window by window, without losing or repeating any.

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
import secrets
from collections.abc import Iterator

from rlio.batch import Batch, count_units
from rlio.errors import EndOfData, StateError, excerpt
from rlio.query.order import ORDER_VERSION, Permutation
from rlio.query.positions import check_seed
from rlio.reader import Endless, InputReader, InputReaderAround, JsonState
from rlio.support.options import check_count
from rlio.support.states import whole_number

__all__ = ["ShuffledInput"]

logger: logging.Logger = logging.getLogger("rlio")


class ShuffledInput(InputReaderAround):
    """Reads ``n`` batches of ``child`` at a time and serves them in a permuted order, each exactly once.

    The last window is shorter if the child ends, and is served whole. Batches are permuted, not the rows in
    them. Memory holds ``n`` batches.

    The state is the child's state at the window's start and a number, so a restored reader reads the window
    again. If the child is not replayable (live experience), the unserved rest of the window is dropped
    instead, and counted in `dropped`.

    Several threads may call it: see `rlio.InputReader`.

    Args:
        child: The reader; closed with this one.
        n: Batches in a window; 0 and 1 keep the child's order.
        seed: Seed of the order; None draws one from the OS, logs it and keeps it in the state.

    Raises:
        OptionError: ``child`` is not a reader, or ``n`` is negative.
    """

    def __init__(self, child: InputReader, n: int, *, seed: int | None) -> None:
        super().__init__(child)
        n = check_count("ShuffledInput.n", n, least=0, of="batches in a window")
        given = seed = check_count("seed", seed, least=0, none="one from the OS")
        if seed is None:
            seed = secrets.randbits(63)
            if n > 1:
                logger.info("ShuffledInput: seed=%d, drawn from the OS", seed)
        self.n: int = max(n, 1)
        self.seed: int = seed
        self._given = given
        self._number = 0  # windows served whole before this one
        self._index = 0  # batches of this window that were served
        # The window that is being filled or served; its served batches are None.
        self._window: list[Batch | None] = []
        self._order: list[int] | None = None
        # The units in the window; None: it was not read yet.
        self._units: int | None = None
        # The child's state at the window's start; None: the child's present state, since nothing was read
        # ahead.
        self._start: JsonState | None = None

    def _describe(self) -> Iterator[str]:
        yield f"n={self.n}, seed={self.seed}"
        yield from super()._describe()

    def _next(self) -> Batch:
        if self.n == 1:
            return self.child.sample()
        if self._order is None:
            self._fill()
        assert self._order is not None
        place = self._order[self._index]
        batch = self._window[place]
        assert batch is not None
        # Each is one step, which no signal divides: the batch is served, or waits for the next call.
        if self._index + 1 == len(self._order):
            self._begin(self._number + 1, 0)
        else:
            self._window[place], self._index = None, self._index + 1
        return batch

    def _fill(self) -> None:
        """Read a window and draw its order; after an error, batches read before it stay for the next try.

        After a KeyboardInterrupt and the like, the window is read again: a batch of the child may be lost.
        """
        if self._start is None:
            self._start = self.child.state_dict()
        try:
            self._read_window()
        except Exception:  # Batches read before it stay for the next try.
            raise
        except BaseException:
            if self.replayable:
                with self._loading():
                    self.child.load_state_dict(self._start)
                self._window = []
            raise

    def _read_window(self) -> None:
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
                f"found a state after {self._index} batches of window {self._number}, but the window has "
                f"{size}: the data changed after the state was saved"
            )
        units = sum(count_units(batch, self.unit) for batch in self._window if batch is not None)
        if self._units not in (None, units):
            raise StateError(
                f"found a state in the middle of a window of {self._units} {self.unit}, but the window has "
                f"{units}: make the child with the batch size and epochs of the one that was saved"
            )
        self._units = units
        self._order = Permutation(size, seed=self.seed, epoch=self._number).take(0, size).tolist()

    def _begin(self, number: int, index: int) -> None:
        """Move before batch ``index`` of window ``number``, with nothing read of it."""
        self._number, self._index, self._units, self._window, self._order, self._start = (
            *(number, index, None),
            *([], None, None),
        )

    def _whole_state(self) -> JsonState:
        state = super()._whole_state()
        if not self.replayable:
            waiting = (batch for batch in self._window if batch is not None)
            state["dropped"] += sum(count_units(batch, self.unit) for batch in waiting)
        return state

    def _position(self) -> JsonState:
        number, index, start = self._number, self._index, self._start
        if not self.replayable and self._window:
            # These batches cannot be read again: the state continues after the window.
            number, index, start = number + 1, 0, None
        return {
            "order": ORDER_VERSION,
            "n": self.n,
            "seed": self.seed,
            "window": number,
            "index": index,
            **({"units": self._units} if index and self._units is not None else {}),
            "child": self.child.state_dict() if start is None else start,
        }

    def _seek(self, position: JsonState) -> None:
        if position["order"] != ORDER_VERSION:
            raise StateError(
                f"state['position']['order'] is {excerpt(position['order'])}, expected {ORDER_VERSION}: use "
                "the version of rlio that saved the state"
            )
        if position.get("n", self.n) != self.n:  # Earlier states do not hold it.
            raise StateError(
                f"state['position']['n'] is {excerpt(position['n'])}, but this reader has {self.n}: make it "
                "with the same windows"
            )
        seed = check_seed(position, self._given)
        window, index = (whole_number(position, key) for key in ("window", "index"))
        # States of earlier versions, and those of a window that was not begun, do not hold it.
        units = whole_number(position, "units") if "units" in position else None
        super()._seek(position)
        self.seed = seed
        self._begin(window, index)
        self._units = units if index else None

    def _endless(self) -> Endless | None:
        found = self.child._endless()
        # Batches are read ahead, so the number of the child's pass is not that of the served batches.
        return None if found is None else found._replace(number=0)

    def _close(self) -> None:
        self._begin(self._number, self._index)
        super()._close()
