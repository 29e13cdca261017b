"""A shim between rlio and the operating system: every call that touches files passes through a function.

`intercepted` replaces the calls in the module `os` of this process; children forked inside keep it.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import pytest

from rlio.storage.filesystem import Retry

#: Everything that rlio's local storage and log change files with.
CALLS: Final = (
    "open",
    "write",
    "writev",
    "fsync",
    "fdatasync",
    "rename",
    "replace",
    "unlink",
    "mkdir",
    "rmdir",
    "ftruncate",
    "close",
)
REAL: Final = {name: getattr(os, name) for name in CALLS}


class Call(NamedTuple):
    """A call on its way: its name, its number from 1, its arguments, and a function that makes it."""

    name: str
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    go: Callable[[], Any]


#: Makes the call, or not.
Handler: TypeAlias = Callable[[Call], Any]

#: Exit code of a child that died at a call.
DIED: Final = 77


def open_files_below(folder: str | os.PathLike[str]) -> list[str]:
    """Files and folders below ``folder`` that this process has open: not those of other tests."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # It was that of the listing, or of another thread.
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(path for path in found if path.startswith(os.path.realpath(folder)))


@contextmanager
def impatient() -> Iterator[None]:
    """Failures are tried again at once: tests of results wait for nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlio.storage.filesystem.Retry", partial(Retry, sleep=lambda seconds: None))
        patch.setattr("rlio.log.publisher._FIRST_DELAY", 0.01)
        patch.setattr("rlio.log.publisher._PATIENCE", 0.05)
        yield


@contextmanager
def intercepted(handle: Handler) -> Iterator[list[str]]:
    """Pass every call to ``handle``; gives the list of names of the calls so far.

    Calls on folders and files opened for reading alone count as well: the shim cannot know what matters.
    """
    seen: list[str] = []
    lock = threading.Lock()

    def replacement(name: str) -> Callable[..., Any]:
        real = REAL[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                seen.append(name)
                number = len(seen)
            return handle(Call(name, number, args, kwargs, lambda: real(*args, **kwargs)))

        return call

    with pytest.MonkeyPatch.context() as patch:
        supported = {getattr(os, name) for name in CALLS} & os.supports_dir_fd
        for name in CALLS:
            patch.setattr(os, name, replacement(name))
        # So that what asks for the abilities of a call finds them under the new functions as well.
        patch.setattr(
            os, "supports_dir_fd", os.supports_dir_fd | {getattr(os, f.__name__) for f in supported}
        )
        yield seen


def dying_at(point: int) -> Handler:
    """Die at the ``point``-th call that changes something, as if by SIGKILL: of a write, half is done.

    A death at a call that changes nothing is one at the next that does.
    """
    changes = itertools.count(1)

    def handle(call: Call) -> Any:
        reads = call.name == "close" or (call.name == "open" and not call.args[1] & os.O_CREAT)
        if reads or next(changes) != point:
            return call.go()
        if call.name in ("write", "writev"):
            _write_half(call)
        os._exit(DIED)

    return handle


def failing(fails: Callable[[str, int], bool], code: int) -> Handler:
    """Raise the error ``code`` from calls that ``fails`` names; of a write, half is done before."""

    def handle(call: Call) -> Any:
        if not fails(call.name, call.number):
            return call.go()
        if call.name == "close":
            call.go()  # The descriptor is gone even where close() reports an error.
        if call.name in ("write", "writev") and code in (errno.ENOSPC, errno.EDQUOT):
            _write_half(call)
        raise OSError(code, os.strerror(code))

    return handle


def data_of(call: Call) -> bytes:
    """What a write is to write."""
    return bytes(call.args[1]) if call.name == "write" else b"".join(call.args[1])


def _write_half(call: Call) -> None:
    data = data_of(call)
    REAL["write"](call.args[0], data[: len(data) // 2])
