"""Stray logs: logs for the same URI in another store's folder, whose writers had other storage options.

A log names the URI of its root; its folder's name also encodes the server (`rlio.storage.endpoint`). Only the
user knows whether two servers are one, so such logs are reported, and never recovered or changed.
"""

from __future__ import annotations

import contextlib

from rlio.log.spool import LogFolder, Spool, find_logs, spool_of, spools_beside
from rlio.storage.filesystem import Storage

__all__ = ["stray_logs", "stray_message"]


def stray_message(log: LogFolder, root: str) -> str:
    """Return what a stray log is, and what to do about it.

    Args:
        log: The log.
        root: The URI, as the owner file states it.
    """
    return (
        f"{log.path} holds rows that were written to {root} with other storage options, such as another "
        "endpoint, or with another spool: recover them with the options of their writer (storage_options=, "
        "or --storage-options)"
    )


def stray_logs(storage: Storage, spool: Spool) -> list[LogFolder]:
    """Return the logs with rows whose owner names the root of ``storage``, in folders of other stores.

    Leaves out logs of live writers, which publish their own rows.
    """
    own = spool_of(storage, spool)
    if own is None:
        return []
    found: list[LogFolder] = []
    for folder in spools_beside(own):
        with contextlib.suppress(OSError):  # The folder is gone, with its logs.
            found += [log for log in find_logs(folder) if _is_of(log, storage.uri)]
    return found


def _is_of(log: LogFolder, root: str) -> bool:
    """Whether a log holds rows of ``root`` and its writer is not alive."""
    try:
        owner = log.read_owner()
        return owner.get("root") == root and log.has_rows() and not log.is_held(owner)
    except OSError:  # Another user's log, or recovered at this moment.
        return False
