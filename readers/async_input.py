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

import threading
from functools import partial

from rlio.batch import Batch
from rlio.errors import OptionError
from rlio.reader import Endless, InputReader, InputReaderAround, JsonState
from rlio.support.forks import ReadAhead
from rlio.support.options import check_count, check_flag

__all__ = ["AsyncInput"]


class AsyncInput(InputReaderAround):
    """Samples ``child`` ahead in a background thread; for live experience.

    Environments step while a learner learns. Rows use the weights of the moment of sampling, so they are up
    to ``queue_size`` batches older than those of a plain sampler. If the child samples with a policy, that
    policy learns and changes under its `rlio.Policy.lock`. The thread holds ``lock`` while the child samples.
    Hold neither lock while you call `sample`, load a state or close, because the thread may wait for it.

    `sample` raises an error of the child, or its end, after the batches before it; the next call continues.
    `close` waits for the batch that is being sampled, unless the child can be interrupted
    (`InputReader.interrupt`). A forked process does not have the thread: there a reader that has begun raises
    ClosedError. In a callback of the thread, `state_dict` does not wait for a `sample` of another thread,
    because that one may wait for the thread.

    Several threads may call it: see `rlio.InputReader`.

    Args:
        child: The reader; used only by the thread, and closed with this one.
        queue_size: Maximum number of waiting batches; the thread waits when the queue is full.
        blackhole_outputs: Drop batches when the queue is full, or always if ``queue_size`` is 0: for users
            who need only the child's metrics. `rows_dropped` counts the dropped rows. With ``queue_size=0``,
            `sample` raises the child's error, or an OptionError.

    Attributes:
        lock: Held while the child samples.

    Raises:
        OptionError: ``child`` is not a reader, or ``queue_size`` is below 1 (0 with ``blackhole_outputs``).
    """

    def __init__(self, child: InputReader, *, queue_size: int = 5, blackhole_outputs: bool = False) -> None:
        super().__init__(child)
        self.replayable = False
        least = 0 if check_flag("blackhole_outputs", blackhole_outputs) else 1
        queue_size = check_count("AsyncInput.queue_size", queue_size, least=least, of="batches")
        self.lock: threading.RLock = threading.RLock()
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
                "AsyncInput(queue_size=0, blackhole_outputs=True) keeps no batch: set queue_size, or read "
                "the metrics of the child's runner"
            )
        try:
            return self._ahead.get()
        finally:
            if self._is_black_hole:  # Sampling continues after an error.
                self._ahead.start()

    def _endless(self) -> Endless | None:
        found = self.child._endless()
        # Batches are read ahead, so the number of the child's pass is not that of the served batches.
        return None if found is None else found._replace(number=0)

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
            return  # The child, like its thread, belongs to the parent process.
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
