"""What recovery could not use of damaged logs: which acknowledged rows lie there and in no shard."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Final

from rlio.dataset.names import ShardName
from rlio.dataset.row_ranges import without
from rlio.log.spool import first_row
from rlio.log.wal import whole_rows
from rlio.maintenance.findings import Findings

__all__ = ["tell_set_aside"]

#: Where recovery puts what it cannot use, within a spool.
_FOLDER: Final = "_damaged"


def tell_set_aside(spool: str, stored: Mapping[str, list[range]], findings: Findings) -> None:
    """Tell of each file that recovery set aside, and of the rows that are nowhere else.

    Args:
        spool: Folder of the logs.
        stored: Writer id -> rows that are stored or trimmed.
        findings: Takes one finding a file.

    Raises:
        OSError: The folder cannot be listed.
    """
    folder = os.path.join(spool, _FOLDER)
    if os.path.islink(folder) or not os.path.isdir(folder):
        return
    for text in sorted(os.listdir(folder)):
        _tell_file(os.path.join(folder, text), spool, stored, findings)


def _tell_file(path: str, spool: str, stored: Mapping[str, list[range]], findings: Findings) -> None:
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
    # The last frame of a log may be damaged so that nothing tells its rows.
    what = f"{count} rows of writer {writer!r} ({_text(lost)})" if lost else f"rows of writer {writer!r}"
    findings.add(
        "log-set-aside",
        f"{what} were acknowledged and cannot be read: their log was damaged, and recovery set this file "
        f"aside. If there is an undamaged copy of the log, put it back as {os.path.join(spool, writer)} and "
        "run `rlio recover --all-hosts`; else they are lost. Then remove this file, which ends this error",
        uri=path,
        rows=count,
    )


def _parts(text: str) -> tuple[str, str]:
    """The writer's id, which may have dashes, and the file's name in its log."""
    for dashes in (5, 1):  # A shard's name has four of its own, a segment's none.
        writer, *rest = text.rsplit("-", dashes)
        name = "-".join(rest)
        if len(rest) == dashes and (dashes == 1 or ShardName.parse(name) is not None):
            return writer, name
    return text, text


def _rows_of(path: str, name: str) -> list[range]:
    """The rows that a damaged segment held, as far as its name and what is whole in it still say so.

    Damage lies before, or between, frames that are whole: its rows are counted, too.
    """
    try:
        if not stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode):
            return []
        whole = whole_rows(path)
    except OSError:  # Another user's, or removed a moment ago.
        return []
    first = first_row(name)
    return [range(first, max((rows.stop for rows in whole), default=first))]


def _text(rows: list[range]) -> str:
    return ", ".join(f"{part.start} to {part.stop - 1}" for part in rows)
