"""The report of `verify`: findings with stable codes, and the ledger of the rows.

Example:
    >>> findings = Findings(limit=1)
    >>> findings.add("hole", "rows 3 to 4 are missing", uri="runs/data/w0", rows=2)
    >>> findings.add("nan", "1 of 8 rewards", uri="runs/data/w0", column="rewards", rows=1)
    >>> findings.counts, len(findings.kept), findings.omitted
    ({'error': 1, 'warning': 1, 'note': 0}, 1, 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from rlio.errors import RlioError

__all__ = ["CODES", "Finding", "Findings", "Level", "Severity", "VerifyReport", "WriterLedger"]

Severity: TypeAlias = Literal["error", "warning", "note"]
Level: TypeAlias = Literal["quick", "full"]

#: Code -> severity. Codes are stable: scripts may rely on them. docs/verify.md explains each.
CODES: Final[Mapping[str, Severity]] = MappingProxyType(
    {
        # Stored bytes and names.
        "header-missing": "error",
        "header-damaged": "error",
        "schema-file-missing": "error",
        "schema-file-damaged": "error",
        "footer-crc": "error",
        "footer-malformed": "error",
        "group-crc": "error",
        "group-malformed": "error",
        "file-crc": "error",
        "video-damaged": "error",
        "line-damaged": "error",
        "line-malformed": "error",
        "provenance-damaged": "error",
        "shard-damaged": "error",
        "shard-rows": "error",
        "torn": "error",
        "hole": "error",
        "past-the-seal": "error",
        "overlap-differs": "error",
        "unsafe": "error",
        "unreadable": "error",
        "uploading": "warning",
        "attempt": "note",
        "vanished": "note",
        "link": "warning",
        "stray": "warning",
        "foreign": "note",
        "unfinished": "note",
        "quarantined": "note",
        "unused-index": "note",
        # Schemas and values.
        "schema-conflict": "error",
        "nan": "warning",
        "infinite": "warning",
        # Time.
        "time-gap": "warning",
        "time-overlap": "warning",
        "episode-again": "error",
        "after-the-end": "warning",
        "terminated-and-truncated": "note",
        "left-open": "note",
        "time-unchecked": "note",
        "recorded-twice": "warning",
        # Logs.
        "log-damaged": "error",
        "log-unreadable": "warning",
        "log-set-aside": "error",
        "log-waiting": "note",
        "log-elsewhere": "warning",
    }
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem, or one fact worth knowing.

    Attributes:
        severity: "error": rows are lost, wrong, or cannot be trusted. "warning": the rows are as written, but
            look odd. "note": worth knowing.
        code: The kind of problem, as a stable word; docs/verify.md lists them.
        uri: The object or folder concerned.
        message: What was found, what was expected, and what to do.
        record: Row group, line or log frame within ``uri``, from 0.
        column: Column concerned.
        rows: Rows affected.
    """

    severity: Severity
    code: str
    uri: str
    message: str
    record: int | None = None
    column: str | None = None
    rows: int = 0

    def __str__(self) -> str:
        places = [f"in {self.uri}"]
        places += [] if self.record is None else [f"record {self.record}"]
        places += [] if self.column is None else [f"column {self.column}"]
        return f"{self.severity}: {self.code}: {self.message} [{', '.join(places)}]"


@dataclass(frozen=True, kw_only=True)
class WriterLedger:
    """The rows of one writer, counted by state: ``end == trimmed + missing + damaged + live``.

    Attributes:
        writer: The writer's id.
        shards: Shards of the writer, including covered ones.
        end: Rows that the writer is known to have published: the end of its last shard, or the number in its
            seal.
        sealed: Rows that its seal declares; None while the writer may grow.
        stored: Rows in its shards, each counted once, including rows below the trim marker.
        trimmed: Rows below its trim marker, removed on purpose.
        missing: Rows that no shard holds although a later row is stored, or the seal declares them.
        damaged: Rows in live shards that do not verify.
        live: Rows that verify: ``DatasetReader(on_error="skip")`` serves these.
        waiting: Rows in the writer's log that are not stored yet.
    """

    writer: str
    shards: int = 0
    end: int = 0
    sealed: int | None = None
    stored: int = 0
    trimmed: int = 0
    missing: int = 0
    damaged: int = 0
    live: int = 0
    waiting: int = 0


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The result of `rlio.verify`.

    Attributes:
        uri: The root.
        level: "quick": only names, footers and small files were read. "full": every byte.
        findings: In the order of the data set; at most ``limit`` of them.
        omitted: Number of further findings.
        counts: Severity -> number of findings, including the omitted ones.
        ledger: One entry per writer, by id.
        bytes: Bytes of the shards.
    """

    uri: str
    level: Level
    findings: tuple[Finding, ...]
    omitted: int
    counts: Mapping[Severity, int]
    ledger: tuple[WriterLedger, ...]
    bytes: int

    @property
    def ok(self) -> bool:
        """Whether no finding is an error; warnings and notes are allowed."""
        return self.counts["error"] == 0

    @property
    def total(self) -> WriterLedger:
        """The sums of the ledger; ``sealed`` is None if any writer may grow."""
        sums = {
            name: sum(getattr(entry, name) for entry in self.ledger)
            for name in WriterLedger.__dataclass_fields__
            if name not in ("writer", "sealed")
        }
        seals = [entry.sealed for entry in self.ledger]
        known = [seal for seal in seals if seal is not None]
        return WriterLedger(
            writer="total", sealed=sum(known) if seals and len(known) == len(seals) else None, **sums
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as ``rlio verify --json`` prints it; docs/verify.md describes it."""
        return {
            "version": 1,
            "uri": self.uri,
            "level": self.level,
            "ok": self.ok,
            "counts": dict(self.counts),
            "omitted": self.omitted,
            "bytes": self.bytes,
            "findings": [asdict(finding) for finding in self.findings],
            "ledger": [asdict(entry) for entry in self.ledger],
            "total": {name: value for name, value in asdict(self.total).items() if name != "writer"},
        }


@dataclass
class Findings:
    """Collects a bounded number of findings, so that badly damaged data does not fill the memory.

    Attributes:
        limit: Findings to keep; the others are only counted.
        kept: The kept findings.
        omitted: Number of other findings.
        counts: Severity -> number of all findings.
    """

    limit: int = 10_000
    kept: list[Finding] = field(default_factory=list)
    omitted: int = 0
    counts: dict[Severity, int] = field(default_factory=lambda: {"error": 0, "warning": 0, "note": 0})

    def add(
        self,
        code: str,
        message: str,
        *,
        uri: str,
        record: int | None = None,
        column: str | None = None,
        rows: int = 0,
        severity: Severity | None = None,
    ) -> None:
        """Add one finding; without ``severity``, its code decides."""
        found = Finding(
            severity=severity or CODES[code],
            code=code,
            uri=uri,
            message=message,
            record=record,
            column=column,
            rows=rows,
        )
        self.counts[found.severity] += 1
        if len(self.kept) < self.limit:
            self.kept.append(found)
        else:
            self.omitted += 1

    def add_error(
        self, code: str, error: RlioError, *, uri: str, record: int | None = None, rows: int = 0
    ) -> None:
        """Add an error of rlio as a finding, with its places as fields instead of in the message.

        Args:
            code: The kind of problem.
            error: The error. Its own URI and record come first.
            uri: The object concerned, if the error names none.
            record: The record in it, if the error names none.
            rows: Rows affected.
        """
        message = str(error)
        if error.uri or error.record is not None or error.column:
            message = message.rsplit(" [", 1)[0]
        self.add(
            code,
            message,
            uri=error.uri or uri,
            record=record if error.record is None else error.record,
            column=error.column,
            rows=rows,
        )
