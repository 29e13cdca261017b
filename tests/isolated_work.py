"""What the processes of `test_isolation` do; each imports this module, which imports little."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from rlio.errors import SchemaError
from rlio.support.isolation import Isolation, call_isolated


def call(work: Callable[..., Any], hear: Callable[..., object] = print, **bounds: int) -> Any:
    return call_isolated(work, {}, Isolation(**bounds), uri="a.hdf5", hear=hear)


def answer(tell: Callable[..., None]) -> Any:
    tell("one", 1)
    logging.getLogger("rlio").warning("a %s", "word")
    tell("two", None)
    return {"pid": os.getpid(), "cwd": os.getcwd()}


def crash(tell: Callable[..., None]) -> None:
    ctypes.string_at(0)


def leave(tell: Callable[..., None]) -> None:
    os._exit(3)


def be_killed(tell: Callable[..., None]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def grow(tell: Callable[..., None]) -> None:
    bytearray(1 << 40)


def spin(tell: Callable[..., None]) -> None:
    while True:
        sum(range(100_000))


def hold(tell: Callable[..., None]) -> None:
    kept = []
    while True:
        kept.append(open(os.devnull))  # noqa: SIM115  # That is the point.


def refuse(tell: Callable[..., None]) -> None:
    raise SchemaError("no such thing", uri="memory://x", record=3, column="obs")


def fail(tell: Callable[..., None]) -> None:
    raise ZeroDivisionError("of no use")


def wait(tell: Callable[..., None]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(os.getpid())
    time.sleep(600)


def hang(tell: Callable[..., None]) -> None:
    """As a native library does that holds the interpreter's lock."""
    tell(os.getpid())
    ctypes.PyDLL(None).sleep(600)
