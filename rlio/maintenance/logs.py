"""Rows that lie in the write-ahead logs of a data set on this machine, and are not stored yet."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlio.dataset.names import MAX_ROW, ShardName
from rlio.dataset.row_ranges import without
from rlio.errors import CorruptData
from rlio.log.spool import Spool, find_logs, spool_of
from rlio.log.stray_logs import stray_logs
from rlio.log.wal import read_segment
from rlio.maintenance.findings import Findings
from rlio.maintenance.set_aside import tell_set_aside
from rlio.storage.filesystem import Storage

__all__ = ["waiting_rows"]


def waiting_rows(
    storage: Storage,
    stored: Mapping[str, list[range]],
    findings: Findings,
    *,
    spool: str | os.PathLike[str] | None = None,
) -> dict[str, int]:
    """Writer id -> rows in its log that no shard holds. Logs are read, and left as they are.

    Args:
        storage: The data set's root.
        stored: Writer id -> rows that are stored or trimmed.
        findings: Takes logs that wait, and their damage.
        spool: Folder of the logs; None: where writers of this root have theirs by default.
    """
    folder = spool_of(storage, Spool(folder=spool))
    found: dict[str, int] = {}
    if folder is None:
        return found
    try:
        logs = find_logs(folder)
        tell_set_aside(folder, stored, findings)
    except OSError as error:
        findings.add("log-unreadable", f"the folder of logs cannot be listed: {error}", uri=folder)
        return found
    for log in logs:
        logged = _logged_rows(log.path, findings)
        waiting = sum(len(rows) for rows in without(logged, stored.get(log.writer, [])))
        found[log.writer] = waiting
        if waiting:
            findings.add(
                "log-waiting",
                f"{waiting} rows of writer {log.writer!r} are in its log and not in a shard yet: it will "
                "store them if it is alive, and `rlio recover` does if it is not",
                uri=log.path,
                rows=waiting,
            )
    _tell_strays(storage, stored, findings, Spool(folder=spool))
    return found


def _tell_strays(
    storage: Storage, stored: Mapping[str, list[range]], findings: Findings, spool: Spool
) -> None:
    """Tell of logs of the same URI in the folders of other servers, whose rows may be this data set's."""
    for stray in stray_logs(storage, spool):
        rows = without(_logged_rows(stray.log.path, findings), stored.get(stray.log.writer, []))
        if rows:
            waiting = sum(map(len, rows))
            message = f"{waiting} rows of writer {stray.log.writer!r} are in no shard here: {stray.message}"
            findings.add("log-elsewhere", message, uri=stray.log.path, rows=waiting)


def _logged_rows(path: str, findings: Findings) -> list[range]:
    """The rows of the valid prefix of each segment, and of the encoded shards beside them."""
    rows: list[range] = []
    try:
        names = sorted(os.listdir(path))
    except OSError as error:  # Another user's, or recovered a moment ago.
        findings.add("log-unreadable", f"the log cannot be looked at: {error}", uri=path)
        return rows
    for text in names:
        file = os.path.join(path, text)
        shard = ShardName.parse(text)
        try:
            if shard is not None:
                if os.stat(file, follow_symlinks=False).st_size == shard.size:
                    rows.append(range(shard.first, shard.end))
            elif text.endswith(".wal"):
                rows.append(_segment_rows(file, findings))
        except CorruptData as error:
            findings.add_error("log-damaged", error, uri=file)
        except FileNotFoundError:
            continue  # Published since it was listed.
        except OSError as error:
            findings.add("log-unreadable", f"the log cannot be read: {error}", uri=file)
    return rows


def _segment_rows(file: str, findings: Findings) -> range:
    segment = read_segment(file)
    damage = segment.damage
    if damage is not None and not damage.torn:
        findings.add(
            "log-damaged",
            f"byte {damage.start}: {damage.reason}; {damage.rows} rows behind it cannot follow: "
            "`rlio recover` keeps the rows before it and sets the rest aside",
            uri=file,
            rows=damage.rows,
        )
    return range(segment.first, min(segment.end, MAX_ROW))
