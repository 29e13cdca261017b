"""What `verify` reports: findings with stable codes, and the ledger of the rows.

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

#: Code -> severity. Codes are stable: scripts may rely on them. docs/verify.md says what each means.
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
    """One thing that is not as it should be.

    Attributes:
        severity: "error": rows are lost, wrong, or not to be trusted. "warning": they are as they were
            written, and look odd. "note": worth knowing.
        code: What kind of thing, as a stable word; docs/verify.md lists them.
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
    """The rows of one writer, and where they are: ``end == trimmed + missing + damaged + live``.

    Attributes:
        writer: Its id.
        shards: Shards that stand under their names, covered ones included.
        end: Rows that the writer is known to have published: the end of its last shard, or what its seal
            says.
        sealed: Rows that its seal declares; None while it may grow.
        stored: Rows that its shards hold, each counted once, below the trim marker too.
        trimmed: Rows below its trim marker: gone on purpose.
        missing: Rows that no shard holds although a later one is stored, or the seal declares them.
        damaged: Rows that a live shard holds and that do not verify.
        live: Rows that verify: what ``DatasetReader(on_error="skip")`` serves.
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
    """What `rlio.verify` found.

    Attributes:
        uri: The root.
        level: "quick": nothing but names, footers and small files was read. "full": every byte.
        findings: In the order of the data set; at most as many as asked for.
        omitted: Findings beyond those.
        counts: Severity -> findings, the omitted ones included.
        ledger: Writers by id.
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
        """Whether there is no error; warnings and notes may be there."""
        return self.counts["error"] == 0

    @property
    def total(self) -> WriterLedger:
        """The ledger's sums; ``sealed`` is that of all writers, or None if one may grow."""
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
        """The written form of ``rlio verify --json``; docs/verify.md describes it."""
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
    """Collects findings, a bounded number of them: what is damaged everywhere still fits into memory.

    Attributes:
        limit: Findings that are kept; of the others only the number is.
        kept: Those.
        omitted: How many others.
        counts: Severity -> all of them.
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
        """Take one finding; its severity is that of its code, where none is given."""
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
        """Take an error of ours, its places as fields and not in the message.

        Args:
            code: What kind of thing.
            error: Its own places count, where it has them.
            uri: Else this object is concerned,
            record: and this record of it.
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
