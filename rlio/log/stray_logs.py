"""Stray logs: logs for the same URI in another store's folder, whose writers had other storage options.

A log names the URI of its root; its folder's name also encodes the server (`rlio.storage.endpoint`). Only the
user knows whether two servers are one, so such logs are reported, and never recovered or changed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from rlio.log.spool import LogFolder, Spool, find_logs, spool_of, spools_beside
from rlio.storage.filesystem import Storage

__all__ = ["StrayLog", "stray_logs"]


@dataclass(frozen=True, kw_only=True)
class StrayLog:
    """A log for the same URI in another store's folder.

    Attributes:
        log: The log.
        root: The URI, as the owner file states it.
    """

    log: LogFolder
    root: str

    @property
    def message(self) -> str:
        """What the log is, and what to do about it."""
        return (
            f"{self.log.path} holds rows that were written to {self.root} with other storage options, such "
            "as another endpoint, or with another spool: recover them with the options of their writer "
            "(storage_options=, or --storage-options)"
        )


def stray_logs(storage: Storage, spool: Spool) -> list[StrayLog]:
    """Return the logs with rows whose owner names the root of ``storage``, in folders of other stores.

    Leaves out logs of live writers, which publish their own rows.
    """
    own = spool_of(storage, spool)
    if own is None:
        return []
    found = []
    for folder in spools_beside(own):
        with contextlib.suppress(OSError):  # The folder is gone, with its logs.
            found += [log for log in find_logs(folder) if _is_of(log, storage.uri)]
    return [StrayLog(log=log, root=storage.uri) for log in found]


def _is_of(log: LogFolder, root: str) -> bool:
    """Whether a log holds rows of ``root`` and its writer is not alive."""
    try:
        owner = log.read_owner()
        return owner.get("root") == root and log.has_rows() and not log.is_held(owner)
    except OSError:  # Another user's log, or recovered at this moment.
        return False
