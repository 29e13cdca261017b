"""`repair`: restores headers and schemas, recovers logs of dead writers, and sets damaged shards aside.

Replaced and damaged objects are moved to ``_quarantine/``, which readers ignore, and never deleted. A damaged
shard is set aside if other shards have its readable rows and its loss stays visible as a hole, which readers
raise for and count. Otherwise it stays in place: readers with ``on_error="skip"`` serve its intact rows.
Every step can be interrupted and repeated.

Example:
    >>> import numpy as np, rlio
    >>> from rlio.storage import Storage
    >>> with rlio.ParquetWriter("memory://repair-example") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.arange(10.0)))
    >>> Storage.open("memory://repair-example").remove("_rlio.json")
    >>> report = rlio.maintenance.repair("memory://repair-example")
    >>> [action.kind for action in report.actions], report.after.ok
    (['header-written'], True)
    >>> rlio.maintenance.repair("memory://repair-example").actions
    ()
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from rlio.catalog.commit import HEADER_BYTES
from rlio.catalog.names import HEADER, schema_path, writer_dir
from rlio.catalog.rows import joined, without
from rlio.errors import DataNotFound
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.maintenance.findings import Findings, Level, VerifyReport
from rlio.maintenance.root_check import QUARANTINE_DIR
from rlio.maintenance.verify import DamagedShard, Inspection
from rlio.storage.filesystem import Storage
from rlio.support.progress import Progress, silent

__all__ = ["Action", "RepairReport", "repair"]

logger: logging.Logger = logging.getLogger("rlio")

ActionKind: TypeAlias = Literal["header-written", "schema-written", "quarantined", "log-recovered"]

# Not the fault of the shard, or not for repair to judge: these are left alone.
_LEFT_ALONE = frozenset({"vanished", "unreadable", "unsafe", "schema-file-missing", "video-damaged"})
# The repairs of one pass may allow more: a restored schema makes lines readable.
_PASSES = 4
_MAX_OBJECT = 1 << 32


@dataclass(frozen=True, kw_only=True)
class Action:
    """One change that repair made.

    Attributes:
        kind: "header-written", "schema-written", "quarantined" (moved aside), or "log-recovered".
        uri: The object concerned, by its old name.
        message: What was done, and why.
        rows: Rows concerned.
    """

    kind: ActionKind
    uri: str
    message: str
    rows: int = 0


@dataclass(frozen=True, kw_only=True)
class RepairReport:
    """The result of `rlio.maintenance.repair`.

    Attributes:
        actions: In order; none if there was nothing to repair, or nothing that can be repaired.
        before: The findings before the repair.
        after: The remaining findings, which cannot be repaired.
    """

    actions: tuple[Action, ...]
    before: VerifyReport
    after: VerifyReport

    def to_json(self) -> dict[str, Any]:
        """Return the report as ``rlio verify --repair --json`` prints it; docs/verify.md describes it."""
        return {"actions": [asdict(action) for action in self.actions], "before": dict(self.before.counts)}


def repair(
    uri: str | os.PathLike[str],
    *,
    level: Level = "full",
    storage_options: Mapping[str, Any] | None = None,
    spool: str | os.PathLike[str] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    progress: Progress = silent,
    limit: int = 10_000,
) -> RepairReport:
    """Repair what can be repaired in the data set under ``uri``, and verify it again.

    Safe while others read and write. A damaged shard stays in place if it has readable rows that no other
    shard has: restore it from a backup, or read with ``on_error="skip"``. It also stays if its lost rows
    would not show as a hole, because they are the last rows of a writer without a seal.

    Args:
        uri: A path or any fsspec URL.
        level: As for `rlio.verify`: "quick" finds less, and so repairs less.
        storage_options: Options for fsspec.
        spool: Folder of the writers' logs, if they were given one.
        limits: The most that the data may ask for; data that asks for more is left alone.
        progress: Shows the progress of each pass.
        limit: Findings that the reports keep.

    Returns:
        The actions, and the findings before and after them. A second run finds nothing to do.

    Raises:
        DataNotFound: ``uri`` has no data set.
        OptionError: The data set has another format version.
        PublishError: An object could not be stored. All changes so far are valid; you can repeat the call.
    """
    storage = Storage.open(uri, storage_options=storage_options, limits=limits)

    def look() -> tuple[Inspection, VerifyReport]:
        found = Inspection(storage, level, spool, progress, Findings(limit=limit))
        return found, found.run()

    found, before = look()
    after = before
    actions: list[Action] = []
    if any(entry.waiting for entry in before.ledger):
        actions = _recover_logs(storage, uri, storage_options=storage_options, spool=spool)
    if actions:
        found, after = look()
    for _ in range(_PASSES):
        run = _Repair(found)
        run.repair()
        if not run.actions:
            break
        actions += run.actions
        found, after = look()
    return RepairReport(actions=tuple(actions), before=before, after=after)


def _recover_logs(
    storage: Storage,
    uri: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None,
    spool: str | os.PathLike[str] | None,
) -> list[Action]:
    """Store the rows that dead writers left in their logs. Leaves logs of live writers alone."""
    from rlio.writers.recovery import recover

    report = recover(uri, spool="auto" if spool is None else spool, storage_options=storage_options)
    return [
        Action(
            kind="log-recovered",
            uri=storage.uri_of(writer_dir(log.writer)),
            message=f"{log.rows} rows from the log of the dead writer {log.writer!r} were stored",
            rows=log.rows,
        )
        for log in report.logs
        if log.outcome == "recovered" and log.rows
    ]


@dataclass
class _Repair:
    """One pass over the results of an inspection."""

    found: Inspection
    actions: list[Action] = field(default_factory=list)

    @property
    def storage(self) -> Storage:
        """The root."""
        return self.found.storage

    def repair(self) -> None:
        """Repair what can be repaired. The header comes last, because it makes readers trust the root."""
        self._write_schemas()
        clean = self._clean_rows()
        for shard in self.found.damaged:
            if not shard.codes & _LEFT_ALONE:
                self._set_aside(shard, clean.get(shard.ref.writer, []))
        self._move_torn(clean)
        self._write_header()

    def _done(self, kind: ActionKind, uri: str, message: str, *, rows: int = 0) -> None:
        logger.info("%s: %s", uri, message)
        self.actions.append(Action(kind=kind, uri=uri, message=message, rows=rows))

    # ---- schemas and the header ----

    def _write_schemas(self) -> None:
        for name, schema in sorted(self.found.found_schemas.items()):
            if name in self.found.schemas.intact:
                continue
            path = schema_path(name)
            if name in self.found.schemas.damaged:
                self._quarantine(path, "its content does not match its name")
            self.storage.put(path, schema.text.encode())
            self._done(
                "schema-written", self.storage.uri_of(path), "the schema was taken from a shard's footer"
            )

    def _write_header(self) -> None:
        known = self.found.schemas.intact or self.found.found_schemas
        if self.found.header == "fine" or not known:
            return  # Without a schema of this format, it is uncertain that the root has this format.
        if self.found.header == "damaged":
            self._quarantine(HEADER, "it is not the header that every writer puts", keep=True)
        self.storage.put(HEADER, HEADER_BYTES)
        self._done("header-written", self.storage.uri_of(HEADER), "the header was written, as writers do")

    # ---- shards ----

    def _clean_rows(self) -> dict[str, list[range]]:
        """Return writer id -> rows in shards without damage, and rows below its trim marker."""
        damaged = {shard.ref.path for shard in self.found.damaged}
        clean = {writer: [range(row)] for writer, row in self.found.listing.trimmed.items()}
        for writer, refs in self.found.listing.shards.items():
            rows = [range(r.name.first, r.name.end) for r in refs if r.path not in damaged]
            clean[writer] = joined([*clean.get(writer, []), *rows])
        return clean

    def _set_aside(self, shard: DamagedShard, clean: list[range]) -> None:
        """Set a damaged shard aside if it has no readable row that other shards lack.

        Args:
            shard: The shard.
            clean: Rows of its writer that intact shards have.
        """
        name = shard.ref.name
        own = range(name.first, name.end)
        intact = [range(name.first + part.start, name.first + part.stop) for part in shard.intact]
        lost = without([own], clean)
        if kept := sum(map(len, without(intact, clean))):
            logger.warning(
                "%s stays in place: on_error='skip' reads %d of its rows that no other shard has",
                self.storage.uri_of(shard.ref.path),
                kept,
            )
        elif not self._shows(lost, clean, shard.ref.writer):
            logger.warning(
                "%s stays in place: its last rows are lost, and without it no hole would show that",
                self.storage.uri_of(shard.ref.path),
            )
        else:
            count = sum(map(len, lost))
            what = (
                f"{count} of its {name.rows} rows are lost" if count else "all its rows are in other shards"
            )
            self._quarantine(
                shard.ref.path, f"damaged ({', '.join(sorted(shard.codes))}); {what}", rows=count
            )

    def _shows(self, lost: list[range], clean: list[range], writer: str) -> bool:
        """Whether lost rows would show as a hole without the shard."""
        sealed = self.found.listing.sealed.get(writer, 0)
        end = max([sealed, *(part.stop for part in clean)])
        return all(part.stop <= end for part in lost)

    def _move_torn(self, clean: dict[str, list[range]]) -> None:
        """Set torn objects aside whose rows other shards have."""
        for writer, torn in sorted(self.found.torn.items()):
            for (path, reason), name in torn:
                if not without([range(name.first, name.end)], clean.get(writer, [])):
                    self._quarantine(path, f"it {reason}; other shards have its rows")

    def _quarantine(self, path: str, reason: str, *, rows: int = 0, keep: bool = False) -> None:
        """Move an object aside; with ``keep``, only copy it, because it is overwritten next."""
        try:
            data = self.storage.read(path, limit=_MAX_OBJECT)
        except DataNotFound:
            return
        for attempt in range(1000):
            aside = f"{QUARANTINE_DIR}/{path}" + (f".{attempt}" if attempt else "")
            if not self.storage.exists(aside):
                self.storage.put(aside, data)
                break
            if self.storage.read(aside, limit=_MAX_OBJECT) == data:
                break  # An earlier run was interrupted here.
        else:
            return
        if not keep:
            self.storage.remove(path)
        self._done("quarantined", self.storage.uri_of(path), f"moved to {aside}: {reason}", rows=rows)
