"""Pinned memory that is used again: a buffer comes back when the copy to the device has finished.

Only memory that is locked into RAM ("pinned") can be copied to a GPU while the program goes on, and locking
costs more than the copy. Whoever stages a batch takes a buffer, fills it, starts the copy and gives the
buffer back at once, together with the event that tells when the copy is over.

Example:
    >>> import torch
    >>> pool = PinnedPool(lambda size: torch.empty(size, dtype=torch.uint8))  # Not pinned: no GPU needed.
    >>> buffer = pool.take(1000)
    >>> pool.give_back(buffer)
    >>> pool.take(500) is buffer
    True
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Protocol

from rlio.errors import OptionError

if TYPE_CHECKING:
    import torch

__all__ = ["Done", "PinnedPool", "pinned_memory", "staging"]

# Sizes are rounded up to a power of two, so that batches of like sizes share buffers; none is smaller.
_LEAST = 1 << 16


class Done(Protocol):
    """Tells whether a copy has finished: a `torch.cuda.Event` that was recorded after it."""

    def query(self) -> bool:
        """Whether it has."""

    def synchronize(self) -> None:
        """Return once it has."""


class PinnedPool:
    """Buffers from which copies are made. Thread-safe.

    Args:
        allocate: Gives a 1-D uint8 tensor of so many bytes.
        keep: Buffers that are remembered, free or being copied from. With so many copies under way, the next
            one waits for the oldest: more would only queue up behind them, in memory that is locked.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], *, keep: int = 4) -> None:
        self._allocate = allocate
        self._keep = keep
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []
        self._copied: deque[tuple[torch.Tensor, Done]] = deque()

    def take(self, size: int) -> torch.Tensor:
        """A buffer of at least ``size`` bytes, of any content, that nobody reads or writes any more."""
        with self._lock:
            self._collect()
            while True:
                fitting = [buffer for buffer in self._free if buffer.numel() >= size]
                if fitting:
                    best = min(fitting, key=lambda buffer: buffer.numel())
                    self._free = [buffer for buffer in self._free if buffer is not best]
                    return best
                if len(self._free) + len(self._copied) < self._keep:
                    break
                self._make_room()
        return self._allocate(max(_LEAST, 1 << max(size - 1, 0).bit_length()))

    def give_back(self, buffer: torch.Tensor, done: Done | None = None) -> None:
        """Return a buffer that `take` gave.

        Args:
            buffer: It; the caller neither reads nor writes it any more.
            done: Tells when the copy from it is over; None: it is.
        """
        with self._lock:
            if done is None:
                self._free.append(buffer)
            else:
                self._copied.append((buffer, done))

    def _collect(self) -> None:
        """Take back what has been copied; copies of several streams finish in any order."""
        waiting: deque[tuple[torch.Tensor, Done]] = deque()
        for buffer, done in self._copied:
            if done.query():
                self._free.append(buffer)
            else:
                waiting.append((buffer, done))
        self._copied = waiting

    def _make_room(self) -> None:
        """Forget the smallest free buffer, for which batches have grown too large; or wait for one."""
        if self._free:
            least = min(self._free, key=lambda buffer: buffer.numel())
            self._free = [buffer for buffer in self._free if buffer is not least]
        else:
            buffer, done = self._copied.popleft()
            done.synchronize()
            self._free.append(buffer)


def pinned_memory(size: int) -> torch.Tensor:
    """Fresh pinned memory as a uint8 tensor of ``size`` bytes; torch itself uses it again once it is freed.

    Raises:
        OptionError: torch cannot pin memory here.
    """
    import torch

    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise OptionError(
            f"pin_memory=True: torch could not pin {size:,} bytes ({error}); pinned memory is for copies to "
            "an accelerator: leave it out where there is none"
        ) from error


@cache
def staging() -> PinnedPool:
    """The pool of this process for copies to devices."""
    return PinnedPool(pinned_memory)
