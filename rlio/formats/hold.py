"""`hold_folder`: one conversion at a time writes into a local folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

try:
    import fcntl
except ImportError:  # Windows has no flock.
    fcntl = None  # type: ignore[assignment]  # To mypy a module is never None.

from rlio.errors import OptionError
from rlio.storage.filesystem import Storage

__all__ = ["hold_folder"]

logger: logging.Logger = logging.getLogger("rlio")


@contextmanager
def hold_folder(storage: Storage) -> Iterator[None]:
    """Hold the folder of ``storage``, which is made if it is absent, until the block ends.

    The lock is flock's, on the folder itself: it leaves no file, and ends with its process, so a conversion
    that was killed can be called again. Storage that is not local has no lock, nor has Windows. A local
    filesystem without one, such as NFS, is warned of.

    Raises:
        OptionError: Another conversion holds it, or it cannot be opened as a folder.
    """
    if fcntl is None or not storage.is_local:
        yield
        return
    try:
        os.makedirs(storage.root, exist_ok=True)
        fd = os.open(storage.root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OptionError(
            f"no folder can be made or opened there ({error.strerror}): name another", uri=storage.uri
        ) from error
    try:
        _lock(fd, storage.uri)
        yield
    finally:
        # A process that was forked meanwhile has the descriptor, too: closing alone would not end the lock.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _lock(fd: int, uri: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OptionError(
            "another conversion writes into this folder: wait until it is done, or name another folder",
            uri=uri,
        ) from error
    except OSError as error:
        logger.warning("%s has no lock (%s): run one conversion into it at a time", uri, error.strerror)
