"""`Turns`: threads that call one object take turns. The rule for all objects is in docs/guarantees.md.

Example:
    >>> turns = Turns("a counter")
    >>> with turns.lock:                     # Calls that sample.
    ...     pass
    >>> with turns.held():                   # Other calls.
    ...     pass
    >>> if turns.begin_close():
    ...     with turns.after_calls():
    ...         pass
    >>> turns.begin_close()
    False
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from rlio.errors import ClosedError, OptionError

__all__ = ["Turns", "awaited"]

logger: logging.Logger = logging.getLogger("rlio")

# Seconds that closing waits for a call of another thread: the call may hang, and then `close` must not.
_LAST_SECONDS: Final = 5.0
# A call that waits for its turn looks this often whether the object was closed.
_LOOK_SECONDS: Final = 0.5


class _Lock(Protocol):
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...


class Turns:
    """Lets the calls of several threads on one object take turns.

    A call holds `lock`; calls within a call do so again. In a forked child, an object that another thread was
    calling may be half changed: every call of it then raises a ClosedError. A copy has its own turns.

    Args:
        what: Name of the object, for errors.
        lock: A lock for reentrant calls; None: a new one. Give the lock that guards the object's data, if it
            has one: a call may then wait on a condition of this lock, and other threads have their turn.

    Attributes:
        lock: Held during a call.
    """

    def __init__(self, what: str, lock: _Lock | None = None) -> None:
        self.lock: _Lock = threading.RLock() if lock is None else lock
        self._what = what
        # Acquired by the first call of `begin_close`, and never released.
        self._closing = threading.Lock()
        _all.add(self)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock during a call, unless the lock's holder may wait for this thread: see `awaited`."""
        held = self.lock.acquire(blocking=not getattr(_here, "awaited", False))
        try:
            yield
        finally:
            if held:
                self.lock.release()

    def take(self, check_open: Callable[[], None]) -> None:
        """Acquire the lock for a call that samples.

        Args:
            check_open: Raises once the object is closed: whoever closes it holds the lock while its threads
                end, which a store that hangs may delay.
        """
        while not self.lock.acquire(False):
            check_open()
            if self.lock.acquire(True, _LOOK_SECONDS):
                return

    def taken(self) -> OptionError:
        """The error of a call that does not wait, because it could not acquire the lock at once.

        For calls whose order matters, such as the steps of an environment.
        """
        return OptionError(
            f"another thread is in a call of this {self._what}: call it from one thread, or make one for "
            "each thread"
        )

    def begin_close(self) -> bool:
        """Whether this is the first call: of several threads that close an object, one does it."""
        return self._closing.acquire(blocking=False)

    @contextmanager
    def after_calls(self, interrupt: Callable[[], None] = lambda: None) -> Iterator[bool]:
        """Hold the lock to close the object, once no other thread is in a call; waits some seconds at most.

        Args:
            interrupt: Ends a call that waits.

        Yields:
            Whether no other thread is in a call.
        """
        waited = getattr(_here, "waited", False)  # For the same call, on closing an object around this one.
        held = self.lock.acquire(blocking=False)
        if not held and not waited and not isinstance(self.lock, _Lost):
            interrupt()
            held = self.lock.acquire(timeout=_LAST_SECONDS)
            if not held:
                logger.warning(
                    "%s is closed while a call in another thread goes on after %.0f s",
                    self._what,
                    _LAST_SECONDS,
                )
        _here.waited = not held
        try:
            yield held
        finally:
            _here.waited = waited
            if held:
                self.lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return Turns, (self._what,)


class _Lost:
    """The lock of an object that a thread of the parent was calling when this process was forked."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        raise ClosedError(
            f"another thread was in a call of this {self._what} when this process was forked, so it may be "
            "half changed here: make another one in this process, or fork while no thread calls it"
        )

    def __exit__(self, *error: Any) -> None: ...

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Raise, unless the caller does not wait."""
        if blocking:
            self.__enter__()
        return False

    def release(self) -> None: ...


_here = threading.local()


@contextmanager
def awaited() -> Iterator[None]:
    """Run the block as one for which calls of other threads wait: it does not wait for them.

    The thread of an `rlio.AsyncInput` samples while `sample` waits for its batch. If a callback there asked
    for a state and waited for its turn, both threads would wait forever.
    """
    before = getattr(_here, "awaited", False)
    _here.awaited = True
    try:
        yield
    finally:
        _here.awaited = before


_all: weakref.WeakSet[Turns] = weakref.WeakSet()


def _look_for_lost_turns() -> None:
    """In a forked child, mark the objects that other threads of the parent were calling."""
    for turns in list(_all):
        if turns.lock.acquire(blocking=False):
            turns.lock.release()
        else:
            turns.lock = _Lost(turns._what)
        turns._closing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_look_for_lost_turns)
