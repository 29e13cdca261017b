"""The cache of built stores: one folder a user, bounded in bytes, shared by processes; never the only copy.

A builder locks its key while it builds. Readers see the result only when it is whole and durable: a first
build by the name of its folder, an extension by its manifest. Readers never read what a killed build left,
and the next builder removes it. Readers hold no lock. A reader maps all arrays of a store when it opens the
store, and mapped files stay valid after eviction. If the store disappears before all arrays are mapped, the
reader starts again.

Example:
    >>> import tempfile
    >>> import numpy as np
    >>> entry = CacheFolder(tempfile.mkdtemp()).entry("0123456789abcdef", {"root": "/data"})
    >>> with entry.building() as build:
    ...     if build.manifest is None:                                 # Else another process was quicker.
    ...         rows = build.arrays.array("rows", (1000,), np.dtype("f4"))
    ...         build.arrays.reserve("rows", 3)
    ...         rows[:3] = [1, 2, 3]
    ...         _ = build.publish({"head": 3}, rows={"rows": 3})
    >>> reading = entry.reading()
    >>> reading.arrays.array("rows", (reading.manifest.state["head"],), np.dtype("f4")).tolist()
    [1.0, 2.0, 3.0]
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self

from filelock import FileLock, Timeout

from rlio.errors import CacheError, ClosedError, CorruptData, OptionError, excerpt
from rlio.log.spool import sync_folder
from rlio.replay.cache_files import (
    EXTENDING,
    MANIFEST,
    builder_lock,
    explained,
    new_path,
    prepare,
    remove,
    remove_store,
    scan,
    store_path,
    user_folder,
    write_file,
)
from rlio.replay.cache_room import make_room, sweep
from rlio.replay.manifests import MAX_BYTES, Manifest
from rlio.replay.memory import FileArrays
from rlio.schemas.schema import canonical_json
from rlio.support.calls import closing_on_error
from rlio.support.forks import Owner
from rlio.support.options import check_count

__all__ = ["Build", "CacheFolder", "Entry", "Manifest", "Reading"]

logger: logging.Logger = logging.getLogger("rlio")

#: Default limit on the bytes of all stores together.
DEFAULT_BYTES: Final = 64 << 30
# The time of use of a store is updated at most this often.
_STAMP_SECONDS: Final = 60.0
_BLOCK: Final = 4096


class CacheFolder:
    """The folder of one user's built stores. Only that user may access it (mode 0700).

    Args:
        path: Path of the folder, on a local disk; created if missing. None: the environment variable
            ``RLIO_CACHE``, or ``rlio/replay`` in the user's cache folder.
        max_bytes: Approximate limit on the bytes of all stores together. The least recently used stores make
            room for new ones. A process that has an evicted store open keeps its rows, and the disk space is
            freed when the process closes it. Concurrent builders do not count each other's next bytes. None:
            ``RLIO_CACHE_BYTES``, or 64 GiB. A twentieth of the disk always stays free.

    Raises:
        OptionError: An argument, or its environment variable, is illegal; or the folder holds other files:
            rlio never removes files that it did not create.
        UnsafeData: The folder is a link, belongs to another user, or others may write into it.
        CacheError: The folder cannot be created, lies on a network filesystem, or does not support locks.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | None = None,
    ) -> None:
        given = os.environ.get("RLIO_CACHE") if path is None else os.fspath(path)
        self.path: str = os.path.abspath(os.path.expanduser(given or user_folder()))
        most = _bytes_from_environment() if max_bytes is None else max_bytes
        self.max_bytes: int = check_count("max_bytes", most, least=1, of="bytes")
        prepare(self.path)

    @property
    def bytes(self) -> int:
        """Disk space of all stores now, half-built ones included. Reads the size of every file."""
        return sum(found.bytes for found in scan(self.path))

    def entry(self, key: str, describe: Mapping[str, Any]) -> Entry:
        """The entry of a key, which may or may not have a store.

        Args:
            key: Digest of ``describe``: 16 to 128 lower-case hexadecimal digits.
            describe: What identifies the store, as JSON. A store with another description does not match.
        """
        return Entry(self, key, describe)

    def __repr__(self) -> str:
        return f"CacheFolder({self.path!r}, max_bytes={self.max_bytes})"


def _bytes_from_environment() -> int:
    given = os.environ.get("RLIO_CACHE_BYTES")
    if not given:
        return DEFAULT_BYTES
    try:
        return int(given)
    except ValueError:
        raise OptionError(f"RLIO_CACHE_BYTES={excerpt(given)}: expected a number of bytes") from None


class Entry:
    """The place of one store in a cache folder; see `CacheFolder.entry`."""

    def __init__(self, folder: CacheFolder, key: str, describe: Mapping[str, Any]) -> None:
        self.folder = folder
        self.key = key
        self.describe: dict[str, Any] = dict(describe)

    @property
    def path(self) -> str:
        """Path of the store, if it exists."""
        return store_path(self.folder.path, self.key)

    @property
    def manifest(self) -> str:
        """Path of its manifest."""
        return os.path.join(self.path, MANIFEST)

    def reading(self) -> Reading | None:
        """Open the store for reading; None: it must be built.

        All arrays are mapped, and do not change when the store grows, is replaced or evicted. Threads and
        forks may read.

        Raises:
            CacheError: The cache folder cannot be used.
        """
        opened: Reading | None = None
        found: bytes | None = None
        failure: CorruptData | None = None
        with explained(self.path):
            # If the manifest is another one now, the store was extended, evicted or replaced while it was
            # opened.
            while (data := _read(self.manifest)) != found:
                opened, found, failure = None, data, None
                try:
                    opened = None if data is None else self._map(data)
                except CorruptData as error:
                    failure = error
        if failure is not None:
            logger.warning("%s is damaged, and will be built again when needed: %s", self.path, failure)
        return opened

    def _map(self, data: bytes) -> Reading:
        """Map the arrays of a manifest.

        Raises:
            CorruptData: The store is incomplete, or has another description.
        """
        manifest = Manifest.load(data)
        if canonical_json(manifest.describe) != canonical_json(self.describe):
            raise CorruptData(
                f"found a store of {excerpt(manifest.describe)}, expected {excerpt(self.describe)}: two "
                "descriptions share one key"
            )
        arrays = FileArrays(self.path, sizes=manifest.arrays)
        _stamp(self.manifest)
        return Reading(manifest, arrays)

    def building(self, *, stop: threading.Event | None = None) -> Build:
        """Acquire the right to build or extend the store; waits while another process or thread holds it.

        Args:
            stop: Set it to stop waiting.

        Raises:
            CacheError: The cache folder cannot be used.
            ClosedError: ``stop`` was set.
        """
        with explained(self.path):
            prepare(self.folder.path)  # The folder may have been removed since.
            return Build(self, self._lock(stop))

    def _lock(self, stop: threading.Event | None) -> FileLock:
        lock = builder_lock(self.folder.path, self.key)
        try:
            lock.acquire(blocking=False)
            return lock
        except Timeout:
            logger.info("waiting for another builder of %s", self.path)
        try:
            lock.acquire(cancel_check=None if stop is None else stop.is_set)
        except Timeout as error:
            raise ClosedError(
                "the store was closed while another process built it: open a new one"
            ) from error
        return lock

    def __repr__(self) -> str:
        return f"Entry({self.path!r})"


class Reading(NamedTuple):
    """A store opened for reading; see `Entry.reading`.

    Attributes:
        manifest: The store's manifest.
        arrays: Its arrays, with the sizes in the manifest, even if the store has grown since.
    """

    manifest: Manifest
    arrays: FileArrays


def _stamp(manifest: str) -> None:
    """Record the use of a store, in the modification time of its manifest."""
    # The disk may be read-only, and nothing is evicted from it then.
    with contextlib.suppress(OSError):
        if abs(time.time() - os.stat(manifest).st_mtime) > _STAMP_SECONDS:
            os.utime(manifest)


class Build:
    """The right to build or extend one store. Use `Entry.building`; a context manager.

    Closing drops everything unpublished. Open a reader before closing: afterwards the store may be evicted.
    Use it in one thread only, and not after a fork.

    Attributes:
        manifest: Manifest of the store to extend; None: there is no store yet. A store whose extension did
            not finish is removed: bytes below the lengths in its manifest may have been changed in place.
    """

    def __init__(self, entry: Entry, lock: FileLock) -> None:
        self._entry = entry
        self._lock: FileLock | None = lock
        self._owner = Owner()
        self._arrays: FileArrays | None = None
        self._folder = ""
        with closing_on_error(self):
            sweep(entry.folder.path, held=entry.key)
            if os.path.lexists(os.path.join(entry.path, EXTENDING)):
                remove_store(entry.folder.path, entry.key)
            found = entry.reading()
            self.manifest: Manifest | None = None if found is None else found.manifest

    @property
    def arrays(self) -> FileArrays:
        """The writable arrays: new ones, or those of `manifest`, to be extended at their ends.

        When they reserve space, room is made first, as by `ensure_room`.

        Raises:
            CacheError: The folder could not be created.
        """
        self._check_open()
        if self._arrays is None:
            with explained(self._entry.path):
                if self.manifest is None:
                    self._folder = new_path(self._entry.folder.path, self._entry.key)
                    os.mkdir(self._folder, 0o700)
                else:
                    # Mark the store as being extended, before changing any of it.
                    self._folder = self._entry.path
                    write_file(os.path.join(self._folder, EXTENDING), b"")
                    sync_folder(self._folder)
            self._arrays = FileArrays(
                self._folder,
                writable=True,
                sizes=None if self.manifest is None else self.manifest.arrays,
                before_reserving=self._take,
            )
        return self._arrays

    def ensure_room(self, bytes: int) -> None:
        """Make room for this many bytes beyond the store's current ones; evicts other stores if needed.

        Call it before a build to fail early. It is also called whenever arrays reserve space.

        Raises:
            CacheError: The cache has no such room.
        """
        self._check_open()
        folder = self._entry.folder
        with explained(folder.path):
            make_room(folder.path, self._entry.key, bytes, folder.max_bytes)

    def start_over(self) -> None:
        """Discard an existing store that cannot be extended, and build it from the beginning.

        Call it before opening arrays.
        """
        self._check_open()
        with explained(self._entry.path):
            remove_store(self._entry.folder.path, self._entry.key)
        self.manifest = None

    def publish(self, state: Mapping[str, Any], *, rows: Mapping[str, int] | None = None) -> Manifest:
        """Publish what was built: trim the arrays to their used rows, make them durable, write the manifest.

        Closes the arrays. Views of them stay valid below the given rows.

        Args:
            state: What readers need besides the arrays, as JSON.
            rows: Array -> number of used rows; arrays not listed are used completely.

        Returns:
            The manifest that readers will find.

        Raises:
            CacheError: The arrays could not be made durable; nothing is published.
        """
        arrays = self.arrays
        for name, used in (rows or {}).items():
            arrays.trim(name, used)
        manifest = Manifest(describe=self._entry.describe, arrays=arrays.sizes, state=dict(state))
        data = manifest.dump()
        self._take(len(data) + _BLOCK)
        arrays.flush()
        with explained(self._entry.path):
            self._write_manifest(data)
            if self.manifest is None:
                remove_store(self._entry.folder.path, self._entry.key)  # A damaged one.
                os.rename(self._folder, self._entry.path)
                sync_folder(self._entry.folder.path)
            else:
                os.unlink(os.path.join(self._folder, EXTENDING))
        self._close_arrays()
        self._folder, self.manifest = "", manifest
        return manifest

    def close(self) -> None:
        """Drop everything unpublished and let others build. May be called again."""
        self._close_arrays()
        lock, self._lock = self._lock, None
        if lock is None or not self._owner.is_here:
            return
        if self._folder and self.manifest is None:
            # The next builder removes what remains.
            with contextlib.suppress(OSError):
                remove(self._folder)
        lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        self._owner.check("build", error=CacheError, uri=self._entry.path)
        if self._lock is None:
            raise ClosedError("this build is closed: start another with building()", uri=self._entry.path)

    def _take(self, bytes: int) -> None:
        """Make room for the bytes of a file, which occupies whole blocks."""
        self.ensure_room(-(-bytes // _BLOCK) * _BLOCK)

    def _write_manifest(self, data: bytes) -> None:
        temporary = os.path.join(self._folder, f"manifest-{uuid.uuid4().hex[:8]}.tmp")
        write_file(temporary, data)
        # Sync the names of new arrays first: a manifest that survives a crash then finds all its arrays.
        sync_folder(self._folder)
        os.rename(temporary, os.path.join(self._folder, MANIFEST))
        sync_folder(self._folder)

    def _close_arrays(self) -> None:
        arrays, self._arrays = self._arrays, None
        if arrays is not None:
            arrays.close()


def _read(manifest: str) -> bytes | None:
    """The bytes of a manifest, or none if it is no regular file, or too long; None: there is no such file."""
    try:
        status = os.lstat(manifest)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            return b""
        with open(manifest, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
