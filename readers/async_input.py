"""`AsyncInput`: another reader's batches, sampled in a background thread.

Example:
    >>> from rlio.batch import SampleBatch
    >>> from rlio.reader import InputReader
    >>> class Always(InputReader):
    ...     def _next(self):
    ...         return SampleBatch(rewards=[1.0] * 10)
    >>> with AsyncInput(Always()) as reader:
    ...     len(reader.sample()), len(reader.sample(25))
    (10, 25)
"""

from __future__ import annotations

import operator
import threading
from functools import partial

from rlio.batch import Batch
from rlio.errors import OptionError
from rlio.reader import Endless, InputReader, InputReaderAround, JsonState
from rlio.support.forks import ReadAhead

__all__ = ["AsyncInput"]


class AsyncInput(InputReaderAround):
    """Samples ``child`` in a thread of its own, ahead of what is asked for; for live experience.

    Environments step while a learner learns, with the weights of that moment: rows are up to ``queue_size``
    batches older than those of a plain sampler. A policy that it samples with learns and changes under its
    `rlio.Policy.lock`; ``lock`` is held while the child samples. Hold neither while you call `sample`, load a
    state or close: the thread may wait for it.

    An error of the child surfaces in `sample`, after the batches before it; the next call goes on. So does
    its end. `close` waits for the batch that is being sampled, unless the child waits for others and can be
    interrupted (`InputReader.interrupt`). A forked child has no such thread: a reader that has begun raises a
    ClosedError there.

    Args:
        child: The reader; used by the thread alone, and closed with this one.
        queue_size: Batches that wait at most; the thread waits then.
        blackhole_outputs: Drop batches where the queue is full, or always if it is 0: the child's metrics are
            all that is wanted. Their rows are counted in `rows_dropped`. With 0, `sample` raises what the
            child raised, or an OptionError.

    Attributes:
        lock: Held while the child samples.

    Raises:
        OptionError: ``child`` is no reader, or ``queue_size`` below 1 (0 with ``blackhole_outputs``).
    """

    def __init__(self, child: InputReader, *, queue_size: int = 5, blackhole_outputs: bool = False) -> None:
        super().__init__(child)
        self.replayable = False
        if operator.index(queue_size) < (0 if blackhole_outputs else 1):
            raise OptionError(f"AsyncInput(queue_size={queue_size}): batches that may wait, at least 1")
        self.lock = threading.RLock()
        self._dropped = _Dropped()
        self._is_black_hole = blackhole_outputs
        self._keeps = queue_size > 0
        self._ahead: ReadAhead[Batch] = ReadAhead(
            partial(_sample, child, self.lock),
            queue_size,
            name="rlio-async-input",
            on_full=self._dropped.add if blackhole_outputs else None,
        )
        if blackhole_outputs:
            self._ahead.start()

    @property
    def rows_dropped(self) -> int:
        """Rows that were sampled but not kept."""
        return self._dropped.rows

    def _next(self) -> Batch:
        self._ahead.check()
        if not self._keeps and self._ahead.is_empty:
            raise OptionError(
                "AsyncInput(queue_size=0, blackhole_outputs=True) keeps no batch: set queue_size, or ask the "
                "child's runner for metrics"
            )
        try:
            return self._ahead.get()
        finally:
            if self._is_black_hole:  # It samples on after an error.
                self._ahead.start()

    def _endless(self) -> Endless | None:
        found = self.child._endless()
        # It reads ahead: the number of the child's pass says nothing of the batches that it gives.
        return None if found is None else Endless(0, found.units)

    def interrupt(self) -> None:
        """Stop sampling, and wake a `sample` that waits for a batch; see `InputReader`."""
        if not self._ahead.is_lost:
            self._ahead.interrupt()
            self.child.interrupt()

    def _position(self) -> JsonState:
        self._ahead.check()
        with self.lock:
            return super()._position()

    def _seek(self, position: JsonState) -> None:
        self._ahead.check()
        for batch in self._ahead.halt():
            self._dropped.add(batch)
        with self.lock:
            super()._seek(position)
        if self._is_black_hole:
            self._ahead.start()

    def _close(self) -> None:
        if self._ahead.is_lost:
            return  # The child is the parent's, as its thread is.
        self.interrupt()
        self._ahead.halt()
        super()._close()


class _Dropped:
    """Counts rows that were sampled but not kept."""

    def __init__(self) -> None:
        self.rows = 0

    def add(self, batch: Batch) -> None:
        self.rows += batch.agent_steps()


def _sample(child: InputReader, lock: threading.RLock) -> Batch:
    with lock:
        return child.sample()
