"""What survives no fork: threads, child processes, and locks that another thread holds.

A forked child has the objects of its parent, and none of its threads. `Owner` says whose an object is;
`BackgroundThread` is a thread that a child starts for itself.

Example:
    >>> thread = BackgroundThread("example")
    >>> thread.submit(divmod, 7, 2).result()
    (3, 1)
    >>> thread.was_forked()
    False
    >>> thread.close()
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from rlio.errors import ClosedError, RlioError

__all__ = ["BackgroundThread", "Owner", "cached_property"]

P = ParamSpec("P")
T = TypeVar("T")

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property  # noqa: TID251
else:

    class cached_property(functools.cached_property):  # noqa: N801, TID251
        """`functools.cached_property` without the lock that it has before Python 3.12.

        All instances of a class share that lock: a child that is forked while a thread of its parent
        calculates the property of any of them would hang. Two threads may calculate a value twice.
        """

        def __get__(self, instance: object | None, owner: type[Any] | None = None) -> Any:
            if instance is None:
                return self
            name = self.attrname
            assert name is not None
            if name not in instance.__dict__:
                instance.__dict__[name] = self.func(instance)
            return instance.__dict__[name]


class Owner:
    """The process that an object belongs to: the one that made this."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and no fork of it."""
        return self._pid == os.getpid()

    def check(self, what: str, *, error: type[RlioError] = ClosedError, uri: str | None = None) -> None:
        """Raise in a fork.

        Args:
            what: The object, for the message.
            error: What is raised.
            uri: For the message.

        Raises:
            RlioError: ``error``.
        """
        if not self.is_here:
            raise error(
                f"this {what} belongs to process {self._pid}, and this process is a fork of it, without its "
                "threads and connections: open one in each process",
                uri=uri,
            )


class BackgroundThread:
    """An executor of one thread, which starts with the first job; a forked child starts its own.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._owner = Owner()
        self._pool: ThreadPoolExecutor | None = None

    def was_forked(self) -> bool:
        """Whether this process is a fork, where jobs submitted before never end; True once a fork."""
        if self._owner.is_here:
            return False
        self._owner, pool, self._pool = Owner(), self._pool, None
        return pool is not None

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a job behind those before it."""
        self.was_forked()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        return self._pool.submit(job, *args, **kwargs)

    def close(self) -> None:
        """End the thread, after the job that runs. May be called again; a later job starts another one."""
        self.was_forked()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
