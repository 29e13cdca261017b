"""`AsyncInput`: another reader's batches, sampled in a background thread.

Example:
    >>> from rlio.batch import SampleBatch
    >>> from rlio.interfaces import InputReader
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
import weakref
from collections import deque

from rlio.errors import ClosedError, EndOfData, OptionError, excerpt
from rlio.forks import Owner
from rlio.interfaces import Batch, Endless, InputReader, JsonState, ReadLedger

__all__ = ["AsyncInput"]

# How long a thread whose reader nobody closed is waited for: it may be in a `sample` that waits for rows.
_LAST_SECONDS = 5.0


class AsyncInput(InputReader):
    """Samples ``child`` in a thread of its own, ahead of what is asked for; for live experience.

    Environments step while a learner learns, with the weights of that moment: rows are up to ``queue_size``
    batches older than those of a plain sampler. A policy that it samples with learns and changes under its
    `rlio.Policy.lock`; ``lock`` is held while the child samples.

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

    replayable = False

    def __init__(self, child: InputReader, *, queue_size: int = 5, blackhole_outputs: bool = False) -> None:
        if not isinstance(child, InputReader):
            raise OptionError(f"AsyncInput takes a reader, not {excerpt(child)}: rlio.read() opens a path")
        if operator.index(queue_size) < (0 if blackhole_outputs else 1):
            raise OptionError(f"AsyncInput(queue_size={queue_size}): batches that may wait, at least 1")
        self.child = child
        self.unit = child.unit
        self._queue = _Queue(queue_size, drops=blackhole_outputs)
        self.lock = self._queue.sampling
        self._thread: threading.Thread | None = None
        #: Whose the thread is.
        self._owner = Owner()
        if blackhole_outputs:
            self._start()

    @property
    def rows_dropped(self) -> int:
        """Rows that were sampled but not kept."""
        return self._queue.dropped

    @property
    def ledger(self) -> ReadLedger:
        """With what the child left out, and what was not kept. See `InputReader`."""
        if self._is_lost:
            return ReadLedger()
        dropped = self.rows_dropped
        return super().ledger.over(self.child.ledger).plus(expected=dropped, dropped=dropped)

    def _start(self) -> None:
        self._owner = Owner()
        # A daemon: the interpreter waits for other threads before anybody could tell them to end.
        self._thread = threading.Thread(
            target=_sample_on, args=(self._queue, self.child), name="rlio-async-input", daemon=True
        )
        self._finalizer = weakref.finalize(self, _end, self._queue, self._thread, _LAST_SECONDS, self._owner)
        self._thread.start()

    @property
    def _is_lost(self) -> bool:
        """Whether this is a fork of the process whose thread uses the child, and may hold its locks."""
        return self._thread is not None and not self._owner.is_here

    def _check_owner(self) -> None:
        if self._is_lost:
            self._owner.check(type(self).__name__)

    def _next(self) -> Batch:
        self._check_owner()
        if self._thread is None:
            self._start()
        if not self._queue.keeps and self._queue.is_empty:
            raise OptionError(
                "AsyncInput(queue_size=0, blackhole_outputs=True) keeps no batch: set queue_size, or ask the "
                "child's runner for metrics"
            )
        return self._queue.get()

    def _endless(self) -> Endless | None:
        found = self.child._endless()
        # It reads ahead: the number of the child's pass says nothing of the batches that it gives.
        return None if found is None else Endless(0, found.units)

    def interrupt(self) -> None:
        """Stop sampling, and let who waits for a batch go; see `InputReader`."""
        if self._is_lost:
            return
        self._queue.stop()
        self.child.interrupt()

    def _position(self) -> JsonState:
        self._check_owner()
        with self.lock:
            return {"child": self.child.state_dict()}

    def _seek(self, position: JsonState) -> None:
        self._check_owner()
        with self.lock:
            self._queue.clear()
            self.child.load_state_dict(position["child"])

    def _close(self) -> None:
        if self._is_lost:
            return  # The child is the parent's, as its thread is.
        if self._thread is not None:
            self._finalizer.detach()
            self.interrupt()
            _end(self._queue, self._thread, None, self._owner)
        self.child.close()


class _Queue:
    """Batches, and errors, that wait for their turn."""

    def __init__(self, size: int, *, drops: bool) -> None:
        #: Held while the child is used.
        self.sampling = threading.RLock()
        self.stopped = False
        self.dropped = 0
        self._size, self._drops = size, drops
        self._items: deque[Batch | BaseException] = deque()
        self._changed = threading.Condition()

    @property
    def keeps(self) -> bool:
        """Whether there is room for a batch at all."""
        return self._size > 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._items

    def put(self, item: Batch | BaseException) -> None:
        """Add an item, once there is room; after an error wait until it was taken."""
        with self._changed:
            if self._drops and not isinstance(item, BaseException) and len(self._items) >= self._size:
                self.dropped += item.agent_steps()
                return
            self._changed.wait_for(lambda: self.stopped or len(self._items) < max(self._size, 1))
            self._items.append(item)
            self._changed.notify_all()
            if isinstance(item, BaseException):
                self._changed.wait_for(lambda: self.stopped or item not in self._items)

    def get(self) -> Batch:
        """Wait for the next batch, or raise the error in its place."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or bool(self._items))
            if not self._items:
                raise ClosedError("the AsyncInput was closed while this thread waited for a batch")
            item = self._items.popleft()
            self._changed.notify_all()
        if isinstance(item, BaseException):
            raise item
        return item

    def clear(self) -> None:
        """Drop what waits."""
        with self._changed:
            self.dropped += sum(
                item.agent_steps() for item in self._items if not isinstance(item, BaseException)
            )
            self._items.clear()
            self._changed.notify_all()

    def stop(self) -> None:
        """Tell the thread to end."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()


def _sample_on(queue: _Queue, child: InputReader) -> None:
    """What the thread does. It holds no reference to the `AsyncInput`, which may be dropped unclosed."""
    while not queue.stopped:
        item: Batch | BaseException
        try:
            with queue.sampling:
                item = child.sample()
        # Whatever it is, it is raised where the batch would have been.
        except BaseException as error:
            item = error
        queue.put(item)
        if isinstance(item, EndOfData) and queue.stopped:
            return


def _end(queue: _Queue, thread: threading.Thread, timeout: float | None, owner: Owner) -> None:
    if not owner.is_here:
        return
    queue.stop()
    if thread is not threading.current_thread():  # Garbage is collected in any thread.
        thread.join(timeout)
