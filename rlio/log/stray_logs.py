"""Logs of writers to the same URI that lie in another store's folder: they were given other storage options.

A log says the URI of its root, and its folder's name the server too (`rlio.storage.endpoint`). Nobody but the
user knows whether two servers are one: such logs are shown, and never recovered or changed.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from rlio.log.spool import (
    AbandonedLog,
    Spool,
    boot_id,
    find_logs,
    host_id,
    is_running,
    spool_of,
    spools_beside,
)
from rlio.storage.filesystem import Storage

try:
    import fcntl
except ImportError:  # Windows: no flock, and so no log.
    fcntl = None  # type: ignore[assignment]  # To mypy a module is never None.

__all__ = ["StrayLog", "stray_logs"]


@dataclass(frozen=True, kw_only=True)
class StrayLog:
    """A log of a writer to the same URI that lies in another store's folder.

    Attributes:
        log: The log.
        root: The URI, as its owner wrote it.
    """

    log: AbandonedLog
    root: str

    @property
    def message(self) -> str:
        """What to do about it."""
        return (
            f"{self.log.path} holds rows that were written to {self.root} with other storage options, such "
            "as another endpoint, or with another spool: recover them with the options of their writer "
            "(storage_options=, or --storage-options)"
        )


def stray_logs(storage: Storage, spool: Spool) -> list[StrayLog]:
    """Logs with rows whose owner names the root of ``storage``, in other folders than its own.

    Those of writers that live are left out: their rows are theirs to publish.
    """
    own = spool_of(storage, spool)
    if own is None:
        return []
    found = []
    for folder in spools_beside(own):
        with contextlib.suppress(OSError):  # It is gone, with its logs.
            found += [log for log in find_logs(folder) if _is_of(log, storage.uri)]
    return [StrayLog(log=log, root=storage.uri) for log in found]


def _is_of(log: AbandonedLog, root: str) -> bool:
    """Whether a log holds rows of ``root`` whose writer does not live."""
    try:
        owner = log.owner()
        return owner.get("root") == root and log.has_rows() and not _lives(log, owner)
    except OSError:  # Another user's, or recovered at this moment.
        return False


def _lives(log: AbandonedLog, owner: dict[str, Any]) -> bool:
    """Whether the writer of a log surely lives."""
    here = (owner.get("host"), owner.get("boot")) == (host_id(), boot_id())
    if not here or not is_running(owner.get("pid")):
        return False
    # Its number may be another process's by now. The lock is tried only here, where somebody most likely has
    # it: whoever takes it, if for a moment, is in the way of a recovery that begins in that moment.
    fd = os.open(log.owner_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
