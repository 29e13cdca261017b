"""`Storage`: a folder on any filesystem, with the few operations on which the format is built.

The operations are: read a range, put a whole object, list, exists, remove. This module does not know what a
shard is. `expand_inputs` finds foreign files (globs, folders, URIs), which need not be in a data set's
folder.

Example:
    >>> storage = Storage.open("memory://storage-example")
    >>> storage.put("data/a.bin", b"0123456789")
    >>> storage.read_range("data/a.bin", 2, 5)
    b'234'
    >>> storage.list("data")
    [Entry(path='data/a.bin', size=10)]
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import os
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Self, TypeVar

from rlio.errors import DataNotFound, OptionError, PublishError, RlioError, UnsafeData, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.storage.call_options import split_options
from rlio.storage.clients import CONNECTING, TIMEOUT, protocols_of, within
from rlio.storage.failures import is_permanent, store_error
from rlio.storage.inputs import InputFile, expand_inputs, open_input
from rlio.storage.local import LocalFolder
from rlio.storage.near import did_you_mean_path
from rlio.storage.others import OthersFolder
from rlio.storage.parallel import Plan
from rlio.storage.paths import (
    Entry,
    Location,
    StrPath,
    check_path,
    is_litter,
    is_uri,
    locate,
    locate_on,
    mask_secrets,
)
from rlio.storage.remote import RemoteFolder
from rlio.support.options import check_count, check_number, check_seconds, expected, set_options

__all__ = [
    "Entry",
    "InputFile",
    "Retry",
    "Storage",
    "StrPath",
    "expand_inputs",
    "is_uri",
    "open_input",
]

logger: logging.Logger = logging.getLogger("rlio")

T = TypeVar("T")

_path_of = attrgetter("path")

#: Errors that mean that no object is there.
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How often, and how far apart, to retry a failed operation.

    Attributes:
        attempts: Attempts in all. Five attempts over 1.5 s outlast a burst of 503s and a failover. A caller
            that must outlast more keeps the data and calls again.
        first_delay: Seconds before the second attempt; doubles for each further one, with a spread of +-50 %.
        max_delay: Longest delay in seconds.
        sleep: Waits for a number of seconds; tests replace it.
    """

    attempts: int = 5
    first_delay: float = 0.1
    max_delay: float = 5.0
    sleep: Callable[[float], object] = time.sleep

    def __post_init__(self) -> None:
        set_options(
            self,
            attempts=check_count("Retry.attempts", self.attempts, least=1),
            first_delay=check_seconds("Retry.first_delay", self.first_delay),
            max_delay=check_seconds("Retry.max_delay", self.max_delay),
        )

    def wait(self, attempt: int, path: str) -> None:
        """Wait after the failed ``attempt`` (from 0).

        Delays differ between paths and processes, so that writers that failed together do not retry together.
        """
        key = f"{path} {attempt} {os.getpid()}".encode("utf-8", "surrogateescape")
        spread = 0.5 + zlib.crc32(key) / 2**32
        self.sleep(min(self.first_delay * 2**attempt * spread, self.max_delay))


#: The file that makes a folder the root of a data set (`rlio.catalog.names` is above this module).
_ROOT_MARKER = "_rlio.json"

_ONCE = Retry(attempts=1)


class Storage:
    """A folder on any filesystem. Thread-safe; can be pickled and forked.

    Errors of the filesystem become `StoreError`s, and `PublishError`s in `put`.

    Args:
        location: Where the folder is; see `Storage.open` and `Storage.on`.
        sync: For local folders: `put` returns only when the object survives a power failure.
        retry: How to retry failed operations.
        timeout: Seconds for one attempt, plus the time for its bytes at 256 KiB/s; None: no limit. Local
            folders have no time limit: a disk that hangs stops every process that uses it.
        bound: Of a folder of another library: the folder that was named, see `of_others`; None: it is rlio's.
    """

    def __init__(
        self,
        location: Location,
        *,
        sync: bool = True,
        retry: Retry | None = None,
        timeout: float | None = TIMEOUT,
        limits: Limits = DEFAULT_LIMITS,
        bound: str | None = None,
    ) -> None:
        timeout = check_number("timeout", timeout, above=0, of="seconds", none="no limit")
        self._location = location
        self._timeout = timeout
        #: Limits on what data stored here may demand when it is read.
        self.limits: Limits = expected(limits, Limits, "limits")
        self._retry = Retry() if retry is None else retry
        self._bound = bound
        # The plans of readers, which hold them.
        self._plans: builtins.list[weakref.ref[Plan]] = []
        self._backend: LocalFolder | RemoteFolder
        if location.fs is not None:
            self._backend = RemoteFolder(location.fs, location.path, timeout=timeout)
        elif bound is not None:
            self._backend = OthersFolder(location.path, bound)
        else:
            self._backend = LocalFolder(location.path, sync=sync)

    @classmethod
    def open(
        cls,
        uri: StrPath,
        *,
        storage_options: Mapping[str, Any] | None = None,
        sync: bool = True,
        retry: Retry | None = None,
        timeout: float | None = TIMEOUT,
        limits: Limits = DEFAULT_LIMITS,
    ) -> Self:
        """Open the folder at ``uri``, which need not exist; reads and creates nothing.

        A file whose name ends in ``.zip`` is opened as a folder that is read only: its root, or the only
        folder in it.

        Args:
            uri: A local path (``~`` is expanded, a relative path made absolute) or a URI, which fsspec gets
                unchanged. Any text that is not a URI is a path; an `os.PathLike` is always a path.
            storage_options: Keywords of the fsspec filesystem (credentials, endpoints); and ``rlio_timeout``
                and ``rlio_retries``, which override ``timeout`` and ``retry``: see `CallOptions`.
            sync: For local folders: `put` returns only when the object survives a power failure.
            retry: How to retry failed operations; None: the default.
            timeout: Seconds for one attempt, plus the time for its bytes at 256 KiB/s; None: no limit.
            limits: Limits on what data stored there may demand when it is read.

        Raises:
            UnknownName: No known filesystem has the URI's scheme.
            MissingExtra: The filesystem's client is not installed.
            OptionError: ``uri`` is empty or a URI that went through pathlib, or the options do not fit.
            StoreError: A client that connects on opening (SFTP, FTP) could not connect.
            CorruptData: A zip file is damaged. (UnsafeData: it asks for too much.)
        """
        patient = Retry() if retry is None else retry
        options, ours = split_options(storage_options)
        timeout = ours.get("rlio_timeout", timeout)
        if "rlio_retries" in ours:
            patient = replace(patient, attempts=1 + ours["rlio_retries"])
        place = _connect(uri, options, patient, timeout)
        if place.path.lower().endswith(".zip"):
            place = _unzipped(place, patient, timeout, limits)
        return cls(place, sync=sync, retry=patient, timeout=timeout, limits=limits)

    @classmethod
    def on(
        cls,
        fs: Any,
        root: str,
        *,
        uri: str | None = None,
        sync: bool = True,
        retry: Retry | None = None,
        timeout: float | None = TIMEOUT,
        limits: Limits = DEFAULT_LIMITS,
    ) -> Self:
        """The folder ``root`` of an fsspec filesystem object; messages call it ``uri``."""
        return cls(locate_on(fs, root, uri=uri), sync=sync, retry=retry, timeout=timeout, limits=limits)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_plans": []}

    def below(self, folder: str) -> Self:
        """The folder ``folder`` below this one, as a root of its own.

        Raises:
            OptionError: ``folder`` is no path below the root.
        """
        check_path(folder, uri=self.uri)
        path = folder if self.root == "" else f"{self.root.rstrip('/')}/{folder}"
        place = Location(self._location.fs, path, self.uri_of(folder))
        return self._at(place, self._bound)

    def of_others(self) -> Self:
        """The same folder as one of another library, to be read.

        Names that begin with a dot are not listed. Links are followed, but not out of the folder: such a link
        raises UnsafeData. In a folder of rlio itself, no link is followed.
        """
        return self if self._bound is not None else self._at(self._location, self.root)

    def _at(self, place: Location, bound: str | None) -> Self:
        return type(self)(place, retry=self._retry, timeout=self._timeout, limits=self.limits, bound=bound)

    def real(self, path: str) -> str:
        """Where the object at ``path`` lies, within `fs` or as an absolute local path; see `of_others`.

        Raises:
            UnsafeData: A link leads out of the folder of another library, or to nothing.
        """
        if isinstance(self._backend, OthersFolder):
            return self._backend.real(path)
        return f"{self.root.rstrip('/')}/{path}"

    def did_you_mean(self) -> str:
        """What the path of the root may mean, to be appended to a message: see `did_you_mean_path`."""
        return did_you_mean_path(self._location)

    @property
    def uri(self) -> str:
        """The absolute local path, or the URI with secrets masked: for messages, not for reopening."""
        return self._location.uri

    @property
    def is_local(self) -> bool:
        """Whether the folder is on a local filesystem, with real files that can be mapped."""
        return self._location.fs is None

    @property
    def at_once(self) -> int:
        """How many requests to make side by side; 1 where a request takes no time on its way."""
        return self._backend.at_once if isinstance(self._backend, RemoteFolder) else 1

    def plan(self) -> Plan | None:
        """A plan for one reader, who holds it. None: requests side by side save nothing here."""
        if self.at_once == 1:
            return None
        return Plan()

    def hold(self, plan: Plan) -> None:
        """Answer reads from a plan that has ranges of this folder."""
        if plan not in [known() for known in self._plans]:
            self._plans.append(weakref.ref(plan, self._plans.remove))

    @property
    def is_file(self) -> bool:
        """Whether a file is in place of the folder; always False for remote stores, which are not asked."""
        return self.is_local and os.path.isfile(self.root)

    @property
    def is_zipped(self) -> bool:
        """Whether the folder is in a zip file, and therefore read only."""
        return self._location.fs is not None and "zipped" in protocols_of(self._location.fs)

    @property
    def root(self) -> str:
        """The absolute local path, or the path within `fs`."""
        return self._location.path

    @property
    def fs(self) -> Any:
        """The fsspec filesystem; for a local folder, a `LocalFileSystem` made on demand."""
        if isinstance(self._backend, RemoteFolder):
            return self._backend.fs
        from fsspec.implementations.local import LocalFileSystem

        return LocalFileSystem()

    def __repr__(self) -> str:
        return f"Storage({self.uri!r})"

    def uri_of(self, path: str) -> str:
        """The name of the object at ``path`` in messages."""
        return f"{self.uri.rstrip('/')}/{path}"

    def read(self, path: str, *, limit: int | None = None) -> bytes:
        """Read a whole object.

        Args:
            path: Path below the root.
            limit: Most bytes to accept; None for no limit.

        Raises:
            DataNotFound: The object does not exist.
            UnsafeData: It has more than ``limit`` bytes, or is a link, folder or device.
        """
        if limit is None:
            return self._read(path, 0, None)
        data = self._read(path, 0, limit + 1)
        if len(data) > limit:
            raise UnsafeData(f"the object has more than the {limit} bytes allowed", uri=self.uri_of(path))
        return data

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)`` of the object; fewer at its end, as in a slice.

        Raises:
            DataNotFound: The object does not exist.
            UnsafeData: It is a link, folder or device.
            OptionError: Not ``0 <= start <= stop``.
        """
        if not 0 <= start <= stop:
            raise OptionError(
                f"read_range({start}, {stop}): expected 0 <= start <= stop", uri=self.uri_of(path)
            )
        return self._read(path, start, stop)

    def put(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """Store ``data`` as the whole object ``path``; replaces an existing object.

        The object appears under its name only when complete. Readers may see it grow only on filesystems with
        neither a rename nor whole-object puts. After a failure, `put` first checks whether the object was
        stored (only the response may be lost), and then retries; storing twice gives the same object.

        Args:
            path: Path below the root; folders are created as needed.
            data: Any object with the buffer protocol. Not kept.

        Raises:
            PublishError: The object could not be stored, from the last cause. The caller still has the data,
                and may call again later.
        """
        check_path(path, uri=self.uri)
        view = memoryview(data).cast("B")
        for attempt in range(self._retry.attempts):
            try:
                self._backend.put(path, view)
                return
            except Exception as error:
                if self._has_landed(path, view):
                    logger.info("%s is stored although the call failed: %r", self.uri_of(path), error)
                    return
                # Retry after a folder vanished, and create it again; otherwise FileNotFoundError is
                # permanent.
                vanished = isinstance(error, FileNotFoundError) and attempt == 0
                if attempt + 1 == self._retry.attempts or (is_permanent(error) and not vanished):
                    raise PublishError(
                        f"{len(view)} bytes could not be stored in {attempt + 1} attempts: "
                        f"{type(error).__name__}: {mask_secrets(str(error))}; the caller still has them: "
                        "make room or repair access, then try again",
                        uri=self.uri_of(path),
                    ) from error
                logger.warning("storing %s failed, trying again: %r", self.uri_of(path), error)
                self._retry.wait(attempt, path)

    def list(self, prefix: str = "", *, limit: int | None = None) -> list[Entry]:
        """Every regular object below the folder ``prefix``, sorted by path; never from a cache.

        Leaves out links (with a warning), devices and keys that are not paths. The caller decides which names
        matter.

        Args:
            prefix: A folder below the root; "" for the root.
            limit: Most names to accept; None: the limit in `limits`.

        Returns:
            Entries with paths relative to the root; empty if the folder does not exist.

        Raises:
            UnsafeData: There are more than ``limit`` names.
        """
        return self._list(prefix, limit, None)

    def list_with_times(self, prefix: str = "") -> tuple[builtins.list[Entry], dict[str, float | None]]:
        """`list`, and path -> when the object was stored, in the same requests.

        The times are those of `modified`, perhaps to the second only; None where the store's listings do not
        tell.

        Raises:
            UnsafeData: There are more names than `limits` say.
        """
        times: dict[str, float | None] = {}
        return self._list(prefix, None, times), times

    def _list(
        self, prefix: str, limit: int | None, times: dict[str, float | None] | None
    ) -> builtins.list[Entry]:
        if prefix:
            check_path(prefix, uri=self.uri)
        most = self.limits.listed_names if limit is None else limit
        found = self._attempt(prefix, lambda: self._backend.entries(prefix, most, times=times))
        if self._bound is not None:
            found = [entry for entry in found if not is_litter(entry.path)]
        # Paths are unique; comparing strings is several times faster than comparing entries.
        found.sort(key=_path_of)
        return found

    def exists(self, path: str = "") -> bool:
        """Whether an object or a folder is at ``path``; "" asks for the root. Raises if the store fails."""
        if path:
            check_path(path, uri=self.uri)
        return self._attempt(path, lambda: self._backend.exists(path))

    def remove(self, path: str) -> None:
        """Remove the object at ``path``, if it exists. Never removes a folder."""
        check_path(path, uri=self.uri)
        self._attempt(path, lambda: self._backend.remove(path))

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with everything in it; no other process may still write there."""
        check_path(folder, uri=self.uri)
        self._attempt(folder, lambda: self._backend.remove_folder(folder, self.limits.listed_names))

    @contextlib.contextmanager
    def hold_unfinished(self, path: str) -> Iterator[bool | None]:
        """Hold an unfinished file that no process writes, to remove it; yields whether it is held.

        False: a process of this machine writes it, or it is gone. None: this store does not tell.
        """
        check_path(path, uri=self.uri)
        if isinstance(self._backend, LocalFolder):
            with self._backend.hold_unfinished(path) as held:
                yield held
        else:
            yield None

    def modified(self, path: str) -> float | None:
        """When the object was stored, in seconds by the store's own clock; None if the store does not say.

        Compare it only with times of the same store, whose clock may differ from this machine's.

        Raises:
            DataNotFound: The object does not exist.
        """
        check_path(path, uri=self.uri)
        try:
            return self._attempt(path, lambda: self._backend.modified(path), absent=_ABSENT)
        except _ABSENT as error:
            raise DataNotFound("nothing is stored there", uri=self.uri_of(path)) from error

    def folders(self, folder: str, prefix: str = "") -> builtins.list[str]:
        """Names of the folders directly in ``folder`` that start with ``prefix``, sorted; never from a cache.

        Lists only one level.
        """
        return [name for name, is_folder in self.children(folder) if is_folder and name.startswith(prefix)]

    def children(self, folder: str = "", *, most: int | None = None) -> builtins.list[tuple[str, bool]]:
        """Names directly in ``folder``, sorted, each with whether it is a folder; never from a cache.

        Lists only one level.

        Args:
            folder: A folder below the root; "" for the root.
            most: Return at most this many names, in no particular choice; None: all. Reading a local folder
                stops there; other stores still list the whole level.

        Returns:
            Names; empty if the folder does not exist.
        """
        if folder:
            check_path(folder, uri=self.uri)
        found = self._attempt(folder, lambda: self._backend.children(folder, most))
        return sorted(one for one in found if self._bound is None or not is_litter(one[0]))

    # ---- inside ----

    def _read(self, path: str, start: int, stop: int | None) -> bytes:
        if self._plans and stop is not None:
            for known in tuple(self._plans):
                plan = known()
                data = None if plan is None else plan.take(self, path, start, stop)
                if data is not None:
                    return data
        return self.fetch(path, start, stop)

    def fetch(self, path: str, start: int, stop: int | None) -> bytes:
        """`read_range` without plans: a request. None: up to the end."""
        check_path(path, uri=self.uri)
        try:
            return self._attempt(path, lambda: self._backend.read(path, start, stop), absent=_ABSENT)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataNotFound("nothing is stored there", uri=self.uri_of(path)) from error
        except IsADirectoryError as error:
            raise UnsafeData("a folder is where an object was expected", uri=self.uri_of(path)) from error

    def _attempt(self, path: str, operation: Callable[[], T], *, absent: tuple[type[OSError], ...] = ()) -> T:
        """Run ``operation``, and retry it on remote stores; local calls give definite answers.

        Raises:
            StoreError: The operation failed; but errors in ``absent``, and rlio's own errors, pass unchanged.
        """
        retry = _ONCE if self.is_local else self._retry
        return _retried(operation, retry, uri=self.uri_of(path), absent=absent)

    def _has_landed(self, path: str, data: memoryview) -> bool:
        try:
            return self._backend.landed(path, data)
        except Exception as error:
            # An unknown outcome does not stop us: putting again is always correct.
            logger.warning("could not look at %s: %s", self.uri_of(path), excerpt(repr(error)))
            return False


def _unzipped(place: Location, retry: Retry, timeout: float | None, limits: Limits) -> Location:
    """The folder in a zip file; ``place`` itself, if no file is there."""
    if place.fs is None and not os.path.isfile(place.path):
        return place
    from rlio.storage.zipped import open_zipped

    def found() -> Location | None:
        return open_zipped(place, marker=_ROOT_MARKER, timeout=timeout, limits=limits)

    return _retried(found, retry, uri=place.uri) or place


def _connect(
    uri: StrPath, options: Mapping[str, Any] | None, retry: Retry, timeout: float | None
) -> Location:
    """Run `locate`, and retry it for filesystems whose client connects at once."""
    scheme = uri.split("://", 1)[0] if isinstance(uri, str) and is_uri(uri) else ""
    if scheme.rpartition("::")[2] not in CONNECTING:
        return locate(uri, options)
    return _retried(lambda: within(timeout, lambda: locate(uri, options)), retry, uri=mask_secrets(str(uri)))


def _retried(
    operation: Callable[[], T], retry: Retry, *, uri: str, absent: tuple[type[OSError], ...] = ()
) -> T:
    """Run ``operation``, and retry it.

    Raises:
        StoreError: The operation failed; but errors in ``absent``, and rlio's own errors, pass unchanged.
    """
    attempt = 0
    while True:
        try:
            return operation()
        except Exception as error:
            attempt += 1
            if attempt >= retry.attempts or is_permanent(error):
                if isinstance(error, (RlioError, *absent)):
                    raise
                raise store_error(error, uri=uri, attempts=attempt) from error
            logger.warning("a call to %s failed, trying again: %r", uri, error)
            retry.wait(attempt - 1, uri)
