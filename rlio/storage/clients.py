"""Calls an fsspec filesystem from any thread, within a time limit, over connections that may break.

fsspec's clients differ. Clients of object stores are asynchronous: one serves all threads, and a call can be
cancelled. Clients of SFTP and FTP are one connection each: two threads that share it mix up their replies,
and a broken connection stays broken. Every call to them therefore gets its own connection, from a pool.

Example:
    >>> import fsspec
    >>> clients = Clients(fsspec.filesystem("memory"), timeout=60)
    >>> clients.call("pipe_file", "/clients-example/a.bin", b"0123")
    >>> clients.call("cat_file", "/clients-example/a.bin", start=1, end=3)
    b'12'
"""

from __future__ import annotations

import contextlib
import ftplib
import inspect
import os
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, TypeVar

from rlio.errors import OptionError, excerpt
from rlio.storage.parallel import REQUESTS
from rlio.storage.paths import mask_secrets

__all__ = ["CONNECTING", "TIMEOUT", "Clients", "protocols_of", "within"]

T = TypeVar("T")

#: Protocols whose client is one connection, made together with the client.
CONNECTING: Final = frozenset({"sftp", "ssh", "ftp"})

#: Seconds for one attempt: no answer ever took longer in practice, and a store that hangs must not block the
#: caller. The time for an object's bytes is added.
TIMEOUT: Final = 60.0

#: Protocols that run in this process and cannot hang.
_IN_PROCESS = frozenset({"memory", "zipped"})

#: Most idle connections to keep for later calls; further ones serve concurrent calls and are then closed.
_MAX_IDLE = 4

#: Bytes a second below which a transfer counts as hanging: 2 Mbit/s.
_SLOWEST = 256 * 1024

# Replies that show that the connection works.
_ANSWERS = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ftplib.error_perm,
)

# Connections inherited by fork: closing or collecting one could write to a socket that the parent still uses.
_INHERITED: list[Any] = []


class Clients:
    """The clients of one fsspec filesystem.

    Args:
        fs: An fsspec filesystem, in synchronous mode. If its clients are connections, it serves only as the
            pattern for new ones, because it belongs to the caller.
        timeout: Seconds for a call; None: no limit.
    """

    # Any: fsspec ships no type information.
    def __init__(self, fs: Any, *, timeout: float | None) -> None:
        self._fs = fs
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self.timeout = timeout
        protocols = protocols_of(fs)
        self._connecting = not CONNECTING.isdisjoint(protocols)
        self._in_process = not _IN_PROCESS.isdisjoint(protocols)
        _speed_up_listings(fs)

    def __getstate__(self) -> dict[str, Any]:
        return {"fs": self._fs, "timeout": self.timeout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Connections cannot be pickled: __init__ makes everything new except these two.
        self.__init__(state["fs"], timeout=state["timeout"])  # type: ignore[misc]  # No subclass changes it.

    def __del__(self) -> None:
        if sys.is_finalizing():
            return  # Threads no longer run, and closing waits for one. The process takes its sockets along.
        for client in getattr(self, "_idle", ()):
            if self._pid == os.getpid():
                _close(client)
            else:
                _INHERITED.append(client)

    @property
    def fs(self) -> Any:
        """The filesystem; a fork gets new asynchronous clients, because each owns a thread."""
        if os.getpid() != self._pid:
            _INHERITED.extend(self._idle)
            self._idle = []
            self._lock = threading.Lock()
            if getattr(self._fs, "async_impl", False) or getattr(self._fs, "renewed_in_forks", False):
                _INHERITED.append(self._fs)
                self._fs = type(self._fs)(*self._fs.storage_args, **self._fs.storage_options)
                _speed_up_listings(self._fs)
            self._pid = os.getpid()
        return self._fs

    @property
    def at_once(self) -> int:
        """How many calls to make side by side; 1: this process answers them itself."""
        return 1 if self._in_process else _MAX_IDLE if self._connecting else REQUESTS

    def call(self, operation: str, *args: Any, size: int = 0, patience: float = 1, **keywords: Any) -> Any:
        """Call a method of the filesystem.

        Args:
            operation: Name of the method.
            args: Positional arguments.
            size: Most bytes to transfer: large objects get more time.
            patience: Factor of the time limit, for operations of many requests.
            keywords: Keyword arguments.

        Raises:
            TimeoutError: The call took longer than ``timeout`` allows. It may still take effect later.
        """
        fs = self.fs
        coroutine = _coroutine_of(fs, operation)
        if coroutine is None:
            return self.run(
                lambda client: getattr(client, operation)(*args, **keywords), size=size, patience=patience
            )
        from fsspec.asyn import sync
        from fsspec.exceptions import FSTimeoutError

        seconds = self._seconds(size, patience)
        try:
            # Like the synchronous method, but with a time limit, after which the request is cancelled.
            return sync(fs.loop, coroutine, *args, timeout=seconds, **keywords)
        except FSTimeoutError as error:
            raise TimeoutError(_overdue(seconds)) from error

    def run(self, function: Callable[[Any], T], *, size: int = 0, patience: float = 1) -> T:
        """Call ``function`` with its own client, or with the one that all share. See `call`."""
        fs = self.fs
        seconds = None if self._in_process else self._seconds(size, patience)
        return (
            self._run_connected(function, seconds)
            if self._connecting
            else within(seconds, lambda: function(fs))
        )

    def invalidate_cache(self) -> None:
        """Forget listings. Pooled clients do so before every call."""
        self.fs.invalidate_cache()

    # ---- inside ----

    def _seconds(self, size: int, patience: float) -> float | None:
        return None if self.timeout is None else self.timeout * patience + size / _SLOWEST

    def _run_connected(self, function: Callable[[Any], T], seconds: float | None) -> T:
        with self._lock:
            taken = [self._idle.pop()] if self._idle else []

        given_up: list[bool] = []

        def work() -> T:
            if not taken:
                fs = self._fs
                taken.append(type(fs)(*fs.storage_args, skip_instance_cache=True, **fs.storage_options))
            try:
                taken[0].invalidate_cache()
                return function(taken[0])
            finally:
                if given_up:
                    _close(taken[0])

        try:
            result = within(seconds, work)
        except BaseException as error:
            given_up.append(True)  # a call that still hangs closes its connection when it ends
            if isinstance(error, _ANSWERS):
                self._give_back(taken)
            else:
                # The other connections are probably lost too: an idle one would fail the next attempt.
                with self._lock:
                    broken, self._idle = [*taken, *self._idle], []
                for client in broken:
                    _close_later(client)
            raise
        self._give_back(taken)
        return result

    def _give_back(self, taken: list[Any]) -> None:
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle += taken
                return
        for client in taken:
            _close(client)


def within(seconds: float | None, function: Callable[[], T]) -> T:
    """Call ``function``, and wait for it at most ``seconds``; None: call it without a limit.

    After the limit, a daemon thread keeps waiting, because nothing can stop a call that hangs in a client.

    Raises:
        TimeoutError: The call took longer.
    """
    if seconds is None:
        return function()
    done = threading.Event()
    results: list[T] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=work, name="rlio-storage-call", daemon=True).start()
    except RuntimeError:
        # Python 3.12 and later start no threads once the interpreter is exiting. A last shard is then stored
        # from a dedicated thread, and no one waits longer for it than for its answer.
        return function()
    if not done.wait(seconds):
        raise TimeoutError(_overdue(seconds))
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # an exception referenced by its own frame would live until garbage collection
    return results[0]


def protocols_of(fs: Any) -> tuple[str, ...]:
    """The schemes of a filesystem."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _speed_up_listings(fs: Any) -> None:
    """Let a client of s3fs that is not connected yet read times of names as `datetime` does.

    botocore reads them by dateutil: 75 us a name, three quarters of the processor time of a LIST. AWS's own
    command sets its parser of times in the same way.
    """
    if "s3" not in protocols_of(fs) or getattr(fs, "session", fs) is not None:
        return
    from aiobotocore.session import AioSession
    from botocore.utils import parse_timestamp

    def time_of(value: Any) -> datetime:
        if isinstance(value, str) and value.endswith("Z"):  # ISO 8601, which XML has; headers have another.
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(value)
        time: datetime = parse_timestamp(value)
        return time

    try:
        session = AioSession(**fs.kwargs)  # What s3fs does not know it passes on, at the first request.
    except TypeError as error:
        raise OptionError(
            f"s3fs refused storage_options {sorted(fs.kwargs)}: {mask_secrets(excerpt(str(error)))}; it "
            "takes endpoint_url, key, secret, ..., and those of its client in client_kwargs and config_kwargs"
        ) from error
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=time_of)
    fs.session = session


def _overdue(seconds: float | None) -> str:
    return (
        f"no answer within {seconds or 0:.3g} seconds: the store hangs, or needs more time; pass "
        f"storage_options={{'rlio_timeout': seconds}} to allow more"
    )


def _coroutine_of(fs: Any, operation: str) -> Any:
    """The coroutine function behind a method; None if calling it would bypass overriding code.

    A class that overrides only the method, not the coroutine, may encrypt what it stores. A filesystem inside
    a folder wrapper may have no coroutines.
    """
    from fsspec.asyn import AsyncFileSystem
    from fsspec.implementations.dirfs import DirFileSystem

    if not isinstance(fs, AsyncFileSystem) or fs.asynchronous or isinstance(fs, DirFileSystem):
        return None
    owner = next(cls for cls in type(fs).__mro__ if {operation, f"_{operation}"} & vars(cls).keys())
    coroutine = getattr(fs, f"_{operation}", None)
    return coroutine if f"_{operation}" in vars(owner) and inspect.iscoroutinefunction(coroutine) else None


def _close(client: Any) -> None:
    with contextlib.suppress(Exception):
        if hasattr(client, "client"):  # SFTP: paramiko's
            client.client.close()
        elif hasattr(client, "ftp"):
            client.ftp.close()


def _close_later(client: Any) -> None:
    """Close a connection in the background, because closing could wait for one that hangs."""
    # No thread can be started at interpreter exit.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=_close, args=(client,), name="rlio-storage-close", daemon=True).start()
