"""Rows that are only in the write-ahead logs of a data set on this machine.

They are not stored yet, or lie in damaged logs that recovery has set aside.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from rlio.catalog.names import MAX_ROW, ShardName
from rlio.catalog.rows import without
from rlio.errors import CorruptData, UnsafeData
from rlio.log.spool import LogFolder, Spool, find_logs, first_row, spool_of
from rlio.log.stray_logs import stray_logs, stray_message
from rlio.log.wal import read_segment, whole_rows
from rlio.maintenance.findings import Findings
from rlio.storage.filesystem import Storage

__all__ = ["set_aside", "waiting_rows"]


def waiting_rows(
    storage: Storage,
    stored: Mapping[str, list[range]],
    findings: Findings,
    *,
    spool: str | os.PathLike[str] | None = None,
) -> dict[str, int]:
    """Return writer id -> rows in its log that no shard holds. Reads logs without changing them.

    Args:
        storage: The data set's root.
        stored: Writer id -> rows that are stored or trimmed.
        findings: Receives logs with waiting rows, and damage.
        spool: Folder of the logs; None: the default folder for this root.
    """
    folder = spool_of(storage, Spool(folder=spool))
    found: dict[str, int] = {}
    if folder is None:
        return found
    try:
        logs = find_logs(folder)
        for path in set_aside(folder):
            _tell_file(path, folder, stored, findings)
    except OSError as error:
        findings.add("log-unreadable", f"the folder of logs cannot be listed: {error}", uri=folder)
        return found
    for log in logs:
        logged = _logged_rows(log, findings)
        waiting = sum(len(rows) for rows in without(logged, stored.get(log.writer, [])))
        found[log.writer] = waiting
        if waiting:
            findings.add(
                "log-waiting",
                f"{waiting} rows of writer {log.writer!r} are in its log and not in a shard yet: if the "
                "writer is alive, it stores them; if it is dead, run `rlio recover`",
                uri=log.path,
                rows=waiting,
            )
    _tell_strays(storage, stored, findings, Spool(folder=spool))
    return found


def _tell_strays(
    storage: Storage, stored: Mapping[str, list[range]], findings: Findings, spool: Spool
) -> None:
    """Report logs of the same URI in the folders of other servers; their rows may belong to this data set."""
    for log in stray_logs(storage, spool):
        rows = without(_logged_rows(log, findings), stored.get(log.writer, []))
        if rows:
            waiting = sum(map(len, rows))
            message = f"{waiting} rows of writer {log.writer!r} are in no shard here: "
            message += stray_message(log, storage.uri)
            findings.add("log-elsewhere", message, uri=log.path, rows=waiting)


def _logged_rows(log: LogFolder, findings: Findings) -> list[range]:
    """Return the rows of the valid prefix of each segment, and of the encoded shards beside them."""
    try:
        rows, files = log.shard_rows(), log.segments()
    except OSError as error:  # Another user's log, or recovered a moment ago.
        findings.add("log-unreadable", f"the log cannot be listed: {error}", uri=log.path)
        return []
    for file in files:
        try:
            rows.append(_segment_rows(file, findings))
        except CorruptData as error:
            findings.add_error("log-damaged", error, uri=file)
        except FileNotFoundError:
            continue  # Published after the listing.
        except OSError as error:
            findings.add("log-unreadable", f"the log cannot be read: {error}", uri=file)
    return rows


def _segment_rows(file: str, findings: Findings) -> range:
    segment = read_segment(file)
    damage = segment.damage
    if damage is not None and not damage.torn:
        findings.add(
            "log-damaged",
            f"byte {damage.start}: {damage.reason}; {damage.rows} rows behind it cannot be stored: "
            "`rlio recover` keeps the rows before it and sets the rest aside",
            uri=file,
            rows=damage.rows,
        )
    return range(segment.first, min(segment.end, MAX_ROW))


#: Folder in a spool for the files that recovery cannot use.
_FOLDER: Final = "_damaged"


def set_aside(spool: str) -> tuple[str, ...]:
    """Paths of the files that recovery has set aside in ``spool``, the folder of the logs.

    Raises:
        OSError: The folder cannot be listed.
    """
    folder = os.path.join(spool, _FOLDER)
    if os.path.islink(folder) or not os.path.isdir(folder):
        return ()
    return tuple(os.path.join(folder, text) for text in sorted(os.listdir(folder)))


def _tell_file(path: str, spool: str, stored: Mapping[str, list[range]], findings: Findings) -> None:
    """Report a file that recovery set aside, and its rows that are nowhere else."""
    writer, name = _parts(os.path.basename(path))
    shard = ShardName.parse(name)
    rows = _rows_of(path, name) if shard is None else [range(shard.first, shard.end)]
    lost = without(rows, stored.get(writer, []))
    if shard is not None and not lost:
        findings.add(
            "log-set-aside",
            f"rows {_text(rows)} of writer {writer!r} were damaged in its log, and other copies of them are "
            "stored: remove this file",
            uri=path,
            severity="note",
        )
        return
    count = sum(map(len, lost))
    # The last frame of a log may be so damaged that its rows are unknown.
    what = f"{count} rows of writer {writer!r} ({_text(lost)})" if lost else f"rows of writer {writer!r}"
    findings.add(
        "log-set-aside",
        f"{what} were acknowledged and cannot be read: their log was damaged, and recovery set this file "
        f"aside. If you have an undamaged copy of the log, put it back as {os.path.join(spool, writer)} and "
        "run `rlio recover --all-hosts`; else they are lost. Then remove this file to end this error",
        uri=path,
        rows=count,
    )


def _parts(text: str) -> tuple[str, str]:
    """Split the writer's id, which may have dashes, from the file's name in its log."""
    for dashes in (5, 1):  # A shard's name has four dashes, a segment's none.
        writer, *rest = text.rsplit("-", dashes)
        name = "-".join(rest)
        if len(rest) == dashes and (dashes == 1 or ShardName.parse(name) is not None):
            return writer, name
    return text, text


def _rows_of(path: str, name: str) -> list[range]:
    """Return the rows that a damaged segment held, as far as its name and its whole frames show.

    Rows in damage before or between whole frames count too.
    """
    try:
        whole = whole_rows(path)
    except (OSError, UnsafeData):  # Another user's file, or removed a moment ago, or a link.
        return []
    first = first_row(name)
    return [range(first, max((rows.stop for rows in whole), default=first))]


def _text(rows: list[range]) -> str:
    return ", ".join(f"{part.start} to {part.stop - 1}" for part in rows)
