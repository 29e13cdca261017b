"""Calls a function in a process of its own, whose memory, processor time and open files are bounded.

A native library may crash, hang or take all memory when it decodes forged bytes. In a process of its own
that ends the process alone, and the caller gets an error that names the signal or the bound. The process is a
new Python, as a fork would copy the locks of the caller's threads. It answers in JSON: what it says is
parsed, and never unpickled. Linux only, where all three bounds hold.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import IO, Any, Final, NoReturn

from rlio import errors
from rlio.errors import CorruptData, OptionError, RlioError, UnsafeData, excerpt
from rlio.support.options import check_count

__all__ = ["Isolation", "call_isolated", "serve"]

logger: logging.Logger = logging.getLogger("rlio")

# The child has the caller's import path before it imports anything of it.
_PROGRAM: Final = "import sys; sys.path[:] = {path!r}; from rlio.support.isolation import serve; serve({fd})"
# A line that the child says has at most this many bytes.
_MAX_LINE: Final = 256 << 20
# Asks Linux for a signal to this process when the thread that started it ends.
_PR_SET_PDEATHSIG: Final = 1
# Seconds that a child has to end after SIGTERM.
_LAST_WORDS: Final = 5.0
# glibc reserves 64 MB of address space for each arena, and makes up to eight arenas a core.
_ARENAS: Final = {"MALLOC_ARENA_MAX": "4"}


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """Bounds of a process that reads untrusted files.

    Attributes:
        memory_bytes: Address space that it may take besides that of Python and rlio.
        processor_seconds: Time of all of its threads together, after which it is killed.
        open_files: Files, pipes and sockets that it may have open.

    Raises:
        OptionError: One is not a positive whole number.
    """

    memory_bytes: int = 4 << 30
    processor_seconds: int = 3600
    open_files: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(
                self, field.name, check_count(f"Isolation.{field.name}", getattr(self, field.name), least=1)
            )


def call_isolated(
    work: Callable[..., Any],
    options: Mapping[str, Any],
    bounds: Isolation,
    *,
    uri: str,
    hear: Callable[..., object],
) -> Any:
    """Call ``work(**options, tell=tell)`` in a process of its own; ``tell`` there calls ``hear`` here.

    Args:
        work: A function at the top of a module. Its result is a JSON value.
        options: What it gets; values that can be pickled.
        bounds: What the process may use.
        uri: What it reads, for errors.
        hear: Called with what ``tell`` got: JSON values.

    Returns:
        What ``work`` returns.

    Raises:
        OptionError: This is not Linux, or an option cannot be sent to another process.
        CorruptData: The process was killed by a signal. (UnsafeData: a bound was exceeded.)
        Exception: What ``work`` raised.
    """
    if sys.platform != "linux":
        raise OptionError("isolated= needs the bounds of processes that Linux has")
    try:
        payload = pickle.dumps((work, dict(options), bounds, logger.getEffectiveLevel()))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise OptionError(
            "isolated= sends the options to another process, and one cannot be pickled: "
            f"{excerpt(str(error))}"
        ) from error
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as answers:
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=sys.path, fd=writing)],
                stdin=subprocess.PIPE,
                pass_fds=(writing,),
                start_new_session=True,  # Ctrl-C reaches this process, which ends the child.
                env={**os.environ, **_ARENAS},
            )
        finally:
            os.close(writing)
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # It died: its exit code says why.
                process.stdin.write(payload)
                process.stdin.flush()
            found = _listen(answers, hear)
            code = process.wait()
        finally:
            _end(process)
    if found is None:
        raise _death(code, bounds, uri)
    if "error" in found:
        raise _error_of(found["error"], bounds, uri)
    return found["result"]


def _listen(answers: IO[bytes], hear: Callable[..., object]) -> dict[str, Any] | None:
    """The last words of the child: its result, or its error; None: it died before it had any."""
    while line := answers.readline(_MAX_LINE):
        if not line.endswith(b"\n"):
            return None
        said = json.loads(line)
        if "tell" in said:
            hear(*said["tell"])
        elif "log" in said:
            logger.log(said["log"][0], "%s", said["log"][1])
        else:
            return dict(said)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a child that may still run, because the caller was interrupted."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_LAST_WORDS)
        except subprocess.TimeoutExpired:  # It is in a library that does not return.
            process.kill()
            process.wait()
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()


def _death(code: int, bounds: Isolation, uri: str) -> RlioError:
    """The error of a child that said nothing before it ended."""
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"exit code {code}"
    if name == "SIGXCPU":
        return _exceeded("processor_seconds", bounds, uri)
    return CorruptData(
        f"the process that read it ended by {name}: a library crashed on its bytes, which are damaged or "
        "forged; or the system killed the process",
        uri=uri,
    )


def _exceeded(name: str, bounds: Isolation, uri: str) -> UnsafeData:
    most = getattr(bounds, name)
    return UnsafeData(
        f"the process that read it needed more than {name}={most}: raise it in "
        f"rlio.conversion.Isolation({name}=...) if you trust the data",
        uri=uri,
    )


def _error_of(found: dict[str, Any], bounds: Isolation, uri: str) -> BaseException:
    """The error that the child describes."""
    if name := found.get("bound"):
        return _exceeded(name, bounds, uri)
    kind = getattr(errors, found["kind"], None)
    if isinstance(kind, type) and issubclass(kind, RlioError):
        error = kind(found["text"])
        for name, value in found["place"].items():
            setattr(error, name, value)
        return error
    if found["errno"] is not None:
        return OSError(found["errno"], found["text"])
    return RuntimeError(found["trace"])


# ---- in the child ----


def serve(fd: int) -> None:
    """Do the work that standard input describes, and say on ``fd`` what comes of it."""
    signal.signal(signal.SIGTERM, _leave)
    # No thread that waits for the end of the caller: a library that hangs may hold the interpreter's lock.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        work, options, bounds, level = pickle.load(stdin)  # Raises if the caller ended before.
    with os.fdopen(fd, "w", encoding="ascii") as answers:
        say = partial(_say, answers, threading.Lock())
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(_Relay(say))
        _bound(bounds)
        try:
            say(result=work(**options, tell=lambda *values: say(tell=values)))
        except Exception as error:
            say(error=_described(error))


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _say(answers: IO[str], lock: threading.Lock, **said: Any) -> None:
    with lock:
        answers.write(json.dumps(said) + "\n")
        answers.flush()


class _Relay(logging.Handler):
    """Says each record of the log."""

    def __init__(self, say: Callable[..., None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(log=(record.levelno, record.getMessage()))


def _bound(bounds: Isolation) -> None:
    """Bound this process. What it has taken until now, for Python and imports, does not count."""
    import resource

    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_AS, taken + bounds.memory_bytes)
    _lower(resource.RLIMIT_CPU, bounds.processor_seconds)
    _lower(resource.RLIMIT_NOFILE, bounds.open_files)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(limit: int, most: int) -> None:
    """Set both limits, which cannot be raised again, unless a lower one holds already."""
    import resource

    hard = resource.getrlimit(limit)[1]
    found = most if hard == resource.RLIM_INFINITY else min(most, hard)
    # At the soft limit of the processor a signal tells which one it was; at the hard one it is SIGKILL.
    more = 1 if limit == resource.RLIMIT_CPU and hard in (resource.RLIM_INFINITY, max(hard, found + 1)) else 0
    resource.setrlimit(limit, (found, found + more))


def _described(error: Exception) -> dict[str, Any]:
    """An error in JSON."""
    number = getattr(error, "errno", None)
    # The second is the dynamic linker's.
    if isinstance(error, MemoryError) or "failed to map segment" in str(error):
        return {"bound": "memory_bytes"}
    if number == errno.EMFILE:
        return {"bound": "open_files"}
    names = ("uri", "record", "column", "errno")
    return {
        "kind": type(error).__name__,
        "text": str(error),
        "place": {name: value for name in names if (value := getattr(error, name, None)) is not None},
        "errno": number,
        "trace": "".join(traceback.format_exception(error)),
    }
