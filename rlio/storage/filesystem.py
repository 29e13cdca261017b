"""`Storage`: a folder on any filesystem, as the few operations that the format is built on.

Read a range, put a whole object, list, exists, remove: nothing here knows what a shard is. `expand_inputs`
finds the files of others (globs, folders, URIs), which need not be in a folder of ours.

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
import logging
import os
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Self, TypeVar

from rlio.errors import DataNotFound, OptionError, PublishError, RlioError, UnsafeData, excerpt
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.storage.call_options import split_options
from rlio.storage.clients import CONNECTING, within
from rlio.storage.failures import is_permanent, store_error
from rlio.storage.inputs import InputFile, expand_inputs, open_input
from rlio.storage.local import LocalFolder
from rlio.storage.paths import Entry, Location, StrPath, check_path, is_uri, locate, locate_on, mask_secrets
from rlio.storage.remote import RemoteFolder
from rlio.support.options import expected

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

logger = logging.getLogger("rlio")

T = TypeVar("T")

_path_of = attrgetter("path")

#: What says that an object is not there, or is none.
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
#: Seconds that one attempt may take: no answer that took longer was ever seen, and a store that hangs must
#: not hang the caller. What an object's bytes take comes on top.
TIMEOUT = 60.0


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How often, and how long apart, a failed operation is tried again.

    Attributes:
        attempts: Attempts in all. Five over 1.5 s outlast a burst of 503s and a failover; whoever must
            outlast more keeps the data and calls again.
        first_delay: Seconds before the second attempt; doubled for each one after, spread by +-50 %.
        max_delay: Bound of the delay in seconds.
        sleep: Waits that many seconds; replaced in tests.
    """

    attempts: int = 5
    first_delay: float = 0.1
    max_delay: float = 5.0
    sleep: Callable[[float], object] = time.sleep

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_delay < 0 or self.max_delay < 0:
            raise OptionError(f"{self}: expected attempts >= 1 and delays >= 0")

    def wait(self, attempt: int, path: str) -> None:
        """Wait after the failed ``attempt`` (from 0).

        Paths and processes differ in their delays: writers that failed together do not retry together.
        """
        key = f"{path} {attempt} {os.getpid()}".encode("utf-8", "surrogateescape")
        spread = 0.5 + zlib.crc32(key) / 2**32
        self.sleep(min(self.first_delay * 2**attempt * spread, self.max_delay))


class Storage:
    """A folder on any filesystem. Thread-safe; travels to other processes by pickle and by fork.

    What the filesystem raises is a `StoreError` here, and a `PublishError` where something was to be stored.

    Args:
        location: Where the folder is; see `Storage.open` and `Storage.on`.
        sync: Local folders: whether `put` returns only once the object survives a power failure.
        retry: How failures are tried again.
        timeout: Seconds that one attempt may take, in addition to its bytes at 256 KiB/s; None: for ever.
            Local folders are not timed: a disk that hangs stops every process that asks it.
    """

    def __init__(
        self,
        location: Location,
        *,
        sync: bool = True,
        retry: Retry | None = None,
        timeout: float | None = TIMEOUT,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        if timeout is not None and not timeout > 0:
            raise OptionError(f"timeout={timeout!r}: expected seconds > 0, or None for no limit")
        self._location = location
        #: What is stored here may ask for this much when it is read.
        self.limits = expected(limits, Limits, "limits")
        self._retry = Retry() if retry is None else retry
        self._backend: LocalFolder | RemoteFolder = (
            LocalFolder(location.path, sync=sync)
            if location.fs is None
            else RemoteFolder(location.fs, location.path, timeout=timeout)
        )

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
        """Open the folder at ``uri``, which need not exist; nothing is read or created.

        Args:
            uri: A local path (``~`` is expanded, a relative one made absolute) or a URI, which goes to fsspec
                untouched. A path is a path, whatever letters it contains; an `os.PathLike` always is one.
            storage_options: Keywords of the fsspec filesystem (credentials, endpoints), and ``rlio_timeout``
                and ``rlio_retries``, which come before the two arguments below: see `CallOptions`.
            sync: Local folders: whether `put` returns only once the object survives a power failure.
            retry: How failures are tried again; None for the default.
            timeout: Seconds that one attempt may take, in addition to its bytes at 256 KiB/s; None: for ever.
            limits: What is stored there may ask for this much when it is read.

        Raises:
            UnknownName: No filesystem is known for the URI's scheme.
            MissingExtra: Its client is not installed.
            OptionError: ``uri`` is empty, a URI that went through pathlib, or the options do not fit.
            StoreError: Its client connects when it is opened (SFTP, FTP), and could not.
        """
        patient = Retry() if retry is None else retry
        options, ours = split_options(storage_options)
        timeout = ours.get("rlio_timeout", timeout)
        if "rlio_retries" in ours:
            patient = replace(patient, attempts=1 + ours["rlio_retries"])
        place = _connect(uri, options, patient, timeout)
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
        """The folder ``root`` of an fsspec filesystem object; ``uri`` is what messages call it."""
        return cls(locate_on(fs, root, uri=uri), sync=sync, retry=retry, timeout=timeout, limits=limits)

    @property
    def uri(self) -> str:
        """The absolute local path, or the URI with secrets masked: for messages, not for opening again."""
        return self._location.uri

    @property
    def is_local(self) -> bool:
        """Whether the folder is on this machine's own filesystem, with real files to map."""
        return self._location.fs is None

    @property
    def is_file(self) -> bool:
        """Whether a file is where the folder should be; False where the store is not local, unasked."""
        return self.is_local and os.path.isfile(self.root)

    @property
    def lists_flat(self) -> bool:
        """Whether the store lists all that is below a folder at once, many names a request."""
        return isinstance(self._backend, RemoteFolder) and self._backend.lists_flat

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
        """What messages call the object at ``path``."""
        return f"{self.uri.rstrip('/')}/{path}"

    def read(self, path: str, *, limit: int | None = None) -> bytes:
        """The whole object.

        Args:
            path: Path below the root.
            limit: Bytes that are accepted, at most; None for no bound.

        Raises:
            DataNotFound: Nothing is there.
            UnsafeData: It has more than ``limit`` bytes, or is a link, folder or device.
        """
        if limit is None:
            return self._read(path, 0, None)
        data = self._read(path, 0, limit + 1)
        if len(data) > limit:
            raise UnsafeData(f"the object has more than the {limit} bytes allowed", uri=self.uri_of(path))
        return data

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes ``[start, stop)`` of the object; fewer where it ends, as a slice has.

        Raises:
            DataNotFound: Nothing is there.
            UnsafeData: It is a link, folder or device.
            OptionError: Not ``0 <= start <= stop``.
        """
        if not 0 <= start <= stop:
            raise OptionError(
                f"read_range({start}, {stop}): expected 0 <= start <= stop", uri=self.uri_of(path)
            )
        return self._read(path, start, stop)

    def put(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """Store ``data`` as the whole object ``path``, in place of any that is there.

        It appears under its name only when complete; only on filesystems that have neither a rename nor
        whole-object puts may others see it grow. A failure is looked into first (only the response may be
        lost) and then tried again; what is stored twice is the same object.

        Args:
            path: Path below the root; folders are made as needed.
            data: Anything with the buffer protocol. Not kept.

        Raises:
            PublishError: It could not be stored, from the last cause. The data is still the caller's, and
                calling again later is right.
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
                # A folder that vanished is made again; otherwise FileNotFoundError would be permanent.
                vanished = isinstance(error, FileNotFoundError) and attempt == 0
                if attempt + 1 == self._retry.attempts or (is_permanent(error) and not vanished):
                    raise PublishError(
                        f"{len(view)} bytes could not be stored in {attempt + 1} attempts: "
                        f"{type(error).__name__}: {mask_secrets(str(error))}; the caller still has "
                        "them: make room or repair access, then try again",
                        uri=self.uri_of(path),
                    ) from error
                logger.warning("storing %s failed, trying again: %r", self.uri_of(path), error)
                self._retry.wait(attempt, path)

    def list(self, prefix: str = "", *, limit: int | None = None) -> list[Entry]:
        """Every regular object below the folder ``prefix``, sorted by path; never from a cache.

        Links, devices and keys that are no paths are left out (links with a warning). Which names mean
        something is the caller's to decide.

        Args:
            prefix: A folder below the root; "" for the root.
            limit: Names that are accepted, at most; None: as many as `limits` say.

        Returns:
            Entries with paths relative to the root; none where the folder does not exist.

        Raises:
            UnsafeData: There are more than ``limit`` names.
        """
        if prefix:
            check_path(prefix, uri=self.uri)
        most = self.limits.listed_names if limit is None else limit
        found = self._attempt(prefix, lambda: self._backend.entries(prefix, most))
        # No two have one path; strings are compared several times faster than entries.
        found.sort(key=_path_of)
        return found

    def exists(self, path: str = "") -> bool:
        """Whether an object or a folder is at ``path``; "" asks for the root. A failure is not a "no"."""
        if path:
            check_path(path, uri=self.uri)
        return self._attempt(path, lambda: self._backend.exists(path))

    def remove(self, path: str) -> None:
        """Remove the object at ``path``; that none is there is no error. Never a folder."""
        check_path(path, uri=self.uri)
        self._attempt(path, lambda: self._backend.remove(path))

    def modified(self, path: str) -> float | None:
        """When the object was stored, in seconds, by the store's own clock; None where it does not tell.

        Compare it with other times of the same store only: its clock is not this machine's.

        Raises:
            DataNotFound: Nothing is there.
        """
        check_path(path, uri=self.uri)
        try:
            return self._attempt(path, lambda: self._backend.modified(path), absent=_ABSENT)
        except _ABSENT as error:
            raise DataNotFound("nothing is stored there", uri=self.uri_of(path)) from error

    def folders(self, folder: str, prefix: str = "") -> builtins.list[str]:
        """Names of the folders directly in ``folder`` that start with ``prefix``, sorted; never from a cache.

        One level is listed, whatever lies below it.
        """
        return [name for name, is_folder in self.children(folder) if is_folder and name.startswith(prefix)]

    def children(self, folder: str = "", *, most: int | None = None) -> builtins.list[tuple[str, bool]]:
        """Names directly in ``folder``, sorted, each with whether it is a folder; never from a cache.

        One level is listed, whatever lies below it.

        Args:
            folder: A folder below the root; "" for the root.
            most: Names that are given at most, any of those there are; None: all. A local folder is read no
                further; other stores list the whole level.

        Returns:
            Nothing where the folder does not exist.
        """
        if folder:
            check_path(folder, uri=self.uri)
        return sorted(self._attempt(folder, lambda: self._backend.children(folder, most)))

    # ---- inside ----

    def _read(self, path: str, start: int, stop: int | None) -> bytes:
        check_path(path, uri=self.uri)
        try:
            return self._attempt(path, lambda: self._backend.read(path, start, stop), absent=_ABSENT)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DataNotFound("nothing is stored there", uri=self.uri_of(path)) from error
        except IsADirectoryError as error:
            raise UnsafeData("a folder is where an object was expected", uri=self.uri_of(path)) from error

    def _attempt(self, path: str, operation: Callable[[], T], *, absent: tuple[type[OSError], ...] = ()) -> T:
        """Run ``operation``, which may be repeated; local calls give definite answers and are not.

        Raises:
            StoreError: It failed; but ``absent`` are raised as they are, and errors of ours.
        """
        attempt = 0
        while True:
            try:
                return operation()
            except Exception as error:
                attempt += 1
                if self.is_local or attempt >= self._retry.attempts or is_permanent(error):
                    if isinstance(error, (RlioError, *absent)):
                        raise
                    raise store_error(error, uri=self.uri_of(path), attempts=attempt) from error
                logger.warning("reading %s failed, trying again: %r", self.uri_of(path), error)
                self._retry.wait(attempt - 1, path)

    def _has_landed(self, path: str, data: memoryview) -> bool:
        try:
            return self._backend.landed(path, data)
        except Exception as error:
            # Not knowing is no reason to stop: putting again is always right.
            logger.warning("could not look at %s: %s", self.uri_of(path), excerpt(repr(error)))
            return False


def _connect(
    uri: StrPath, options: Mapping[str, Any] | None, retry: Retry, timeout: float | None
) -> Location:
    """`locate`, tried again where the filesystem's client is a connection that could not be made."""
    scheme = uri.split("://", 1)[0] if isinstance(uri, str) and is_uri(uri) else ""
    if scheme.rpartition("::")[2] not in CONNECTING:
        return locate(uri, options)
    attempt = 0
    while True:
        try:
            return within(timeout, lambda: locate(uri, options))
        except Exception as error:
            attempt += 1
            if isinstance(error, RlioError):
                raise
            if attempt >= retry.attempts or is_permanent(error):
                raise store_error(error, uri=mask_secrets(str(uri)), attempts=attempt) from error
            logger.warning("connecting to %s failed, trying again: %r", mask_secrets(str(uri)), error)
            retry.wait(attempt - 1, str(uri))
