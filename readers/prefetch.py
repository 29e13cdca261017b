"""`Prefetch`: reads and copies the next batches in the background; users call `rlio.torch.prefetch`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from rlio.batch import Batch
from rlio.batch.nested import leaves
from rlio.batch.tensors import Dtypes
from rlio.errors import ClosedError, EndOfData, OptionError, excerpt
from rlio.reader import InputReader, JsonState, Restorable
from rlio.support.forks import ReadAhead
from rlio.support.options import check_count
from rlio.support.turns import Turns

__all__ = ["Prefetch"]

logger: logging.Logger = logging.getLogger("rlio")

#: A dict of tensors, or of such dicts by policy.
Tensors = dict[str, Any]


class _Ready(NamedTuple):
    """A batch ready for delivery: its tensors, the reader's state after it, and the event of its copy."""

    tensors: Tensors
    state: JsonState
    copied: torch.cuda.Event | None


class _Copier:
    """Turns batches into tensors on a device; on a GPU, on a separate stream."""

    def __init__(
        self, device: torch.device | str | None, dtype: Dtypes | None, pin_memory: bool | None
    ) -> None:
        self.dtype = dtype
        self.device = None if device is None else torch.device(device)
        self.stream: torch.cuda.Stream | None = None
        if self.device is not None and self.device.type == "cuda":
            # "cuda" alone means the caller's current device, which the thread does not know.
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            self.device = torch.device("cuda", index)
            self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # Its __new__ is not annotated.
        self.pin_memory = self.stream is not None if pin_memory is None else pin_memory

    def send(self, batch: Batch) -> tuple[Tensors, torch.cuda.Event | None]:
        """Begin the copy; called in the thread."""
        if self.stream is None:
            return batch.to_torch(self.device, dtype=self.dtype, pin_memory=self.pin_memory), None
        with torch.cuda.stream(self.stream):
            tensors = batch.to_torch(
                self.device, dtype=self.dtype, pin_memory=self.pin_memory, non_blocking=self.pin_memory
            )
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # Likewise.
            copied.record(self.stream)
        return tensors, copied

    def receive(self, item: _Ready) -> Tensors:
        """Make the caller's later work on the tensors wait for their copy."""
        if item.copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(item.copied)
            for _, leaf in leaves(item.tensors):
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                    # The memory belongs to the other stream, and must outlast the work on this one.
                    leaf.record_stream(current)
        return item.tensors


class Prefetch(Restorable, Iterator[Tensors]):
    """Batches of a reader as tensors; a background thread reads and copies the next ones.

    Only the thread uses the reader until `close`. `close` leaves the reader open and, if it is replayable, at
    the position after the last delivered batch. If the reader waits for rows, `close` interrupts it after
    some seconds; close the reader then. An error of the reader is raised after the batches before it; the
    next call tries the reader again.

    Several threads may call it: their calls take turns, and each batch goes to one of them. `interrupt` and
    `close` end a call that waits.

    Args:
        reader: Any reader; the caller closes it.
        device: Where the tensors go; None: the CPU. On a GPU, copies have a separate stream.
        dtype: See `SampleBatch.to_torch`.
        depth: Maximum number of waiting batches, at least 1; one more is being prepared.
        pin_memory: See `SampleBatch.to_torch`; None: only for a GPU.

    Raises:
        OptionError: ``reader`` is not a reader, or ``depth`` is below 1.
    """

    def __init__(
        self,
        reader: InputReader,
        *,
        device: torch.device | str | None = None,
        dtype: Dtypes | None = None,
        depth: int = 2,
        pin_memory: bool | None = None,
    ) -> None:
        if not isinstance(reader, InputReader):
            raise OptionError(f"prefetch() was given {excerpt(reader)}: expected an InputReader")
        depth = check_count("depth", depth, least=1, of="batches")
        self._reader = reader
        self._copier = _Copier(device, dtype, pin_memory)
        self._state = reader.state_dict()
        self._ahead: ReadAhead[_Ready] = ReadAhead(
            partial(_next_of, reader, self._copier), depth, name="rlio-prefetch"
        )
        # Whether the reader may be past batches that were not delivered.
        self._is_ahead = False
        self._ended = self._closed = False
        self._turns = Turns(type(self).__name__)

    def _describe(self) -> Iterator[str]:
        yield repr(self._reader)

    def __iter__(self) -> Self:
        if not self._closed:
            self._reader._say_if_endless()
        return self

    def __next__(self) -> Tensors:
        """The next batch: a dict of tensors; with several policies, a dict by policy.

        Raises:
            StateError: The last `load_state_dict` failed.
            ClosedError: After `close`.
        """
        self._turns.take(self._check_open)
        try:
            return self._take()
        finally:
            self._turns.lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this prefetch() is closed: begin a new one, or use it before close()")

    def _take(self) -> Tensors:
        self._check_open()
        self._check_loaded()
        self._ahead.check()
        if self._ended:
            raise StopIteration
        self._is_ahead = True
        try:
            item = self._ahead.get()
        except BaseException as error:
            if self._ahead.is_running:
                raise  # This thread was interrupted; the background thread continues to read.
            if not isinstance(error, EndOfData):
                self._go_back()  # The batch may have been read before its copy failed.
                raise
            self._ended, self._is_ahead = True, False
            with contextlib.suppress(ClosedError):  # The reader may have been closed since.
                self._state = self._reader.state_dict()
            raise StopIteration from None
        self._state = item.state
        return self._copier.receive(item)

    def state_dict(self) -> JsonState:
        """The reader's state after the last delivered batch: the reader alone can continue from it.

        Raises:
            StateError: The last `load_state_dict` failed.
        """
        self._check_loaded()
        return self._state

    def load_state_dict(self, state: JsonState) -> None:
        """Continue from a state of `state_dict` or of the reader.

        After any error here, no batch is delivered until a load succeeds.

        Raises:
            StateError: The state does not fit the reader.
            ClosedError: After `close`.
        """
        with self._turns.held():
            if self._closed:
                raise ClosedError("this prefetch() is closed: load the state into a new one")
            self._ahead.check()
            self._go_back()
            with self._loading():
                self._reader.load_state_dict(state)
                self._state = self._reader.state_dict()
            self._ended = False

    def _go_back(self, wake: Callable[[], None] | None = None) -> None:
        """End the thread and move the reader back to its position after the last delivered batch."""
        left = len(self._ahead.halt(wake))
        is_ahead, self._is_ahead = self._is_ahead, False
        if is_ahead and self._reader.replayable:
            with contextlib.suppress(ClosedError):  # A closed reader has no position to return to.
                self._reader.load_state_dict(self._state)
        elif left:
            logger.warning(
                "%d batches of %s that were read ahead are dropped: the reader cannot give them again",
                left,
                type(self._reader).__name__,
            )

    def interrupt(self) -> None:
        """End a call of another thread that waits, and interrupt the reader; `close` follows."""
        self._ahead.interrupt()
        if not self._ahead.is_lost:
            self._reader.interrupt()

    def close(self) -> None:
        """End the thread after the running `sample`, and calls that wait. May be called again."""
        if not self._closed and self._turns.begin_close():
            self._closed = True
            with self._turns.after_calls(self._ahead.interrupt):
                if not self._ahead.is_lost:
                    self._go_back(self._reader.interrupt)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _next_of(reader: InputReader, copier: _Copier) -> _Ready:
    """The next batch of a reader; runs in the thread."""
    tensors, copied = copier.send(reader.sample())
    return _Ready(tensors, reader.state_dict(), copied)
