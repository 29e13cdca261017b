"""`verify`: checks a data set byte by byte, and accounts for every row.

Checks, in order: the header and the schema files; names, sizes, holes, seals and trims; the CRCs of each
shard's footer, row groups, pages and file, and that its tables agree with its rows; that shards with the same
rows hold the same values; dtypes, shapes, NaN; the steps of episodes; logs.

Memory is bounded: one row group, or up to 64 short shards; 8 bytes per row of shards that overlap; and the
episodes of one writer (`rlio.maintenance.time_check`).

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://verify-example") as writer:
    ...     writer.write(rlio.SampleBatch(obs=np.arange(10.0), t=np.arange(10), eps_id=np.zeros(10, int)))
    >>> report = rlio.verify("memory://verify-example")
    >>> report.ok, report.total.live
    (True, 10)
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from rlio.catalog.listing import Listing, Rejected, Segment, ShardRef, list_settled
from rlio.catalog.names import ShardName, part_of, schema_path, writer_dir
from rlio.catalog.rows import common, joined, without
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.maintenance.findings import Findings, Level, VerifyReport, WriterLedger
from rlio.maintenance.logs import waiting_rows
from rlio.maintenance.overlap_check import OverlapCheck
from rlio.maintenance.repeat_check import RepeatCheck
from rlio.maintenance.root_check import (
    HeaderState,
    SchemaFiles,
    check_header,
    check_strays,
    read_schema_files,
)
from rlio.maintenance.shard_scan import Rows, ShardScan, UnknownSchema, read_joined
from rlio.maintenance.time_check import TimeCheck
from rlio.maintenance.value_check import ValueCheck
from rlio.schemas.schema import Schema
from rlio.schemas.shard_file import ShardFile
from rlio.source.shards import ranges_of
from rlio.source.together import MOST_OPEN, Together
from rlio.storage.filesystem import Storage
from rlio.support.options import check_choice
from rlio.support.progress import Progress, silent

__all__ = ["DamagedShard", "Inspection", "verify"]


@dataclass(frozen=True)
class DamagedShard:
    """A shard with damaged bytes.

    Attributes:
        ref: The shard.
        codes: Codes of the findings in it.
        intact: Ranges of its rows that verify.
    """

    ref: ShardRef
    codes: frozenset[str]
    intact: tuple[range, ...]


def verify(
    uri: str | os.PathLike[str],
    *,
    level: Level = "full",
    storage_options: Mapping[str, Any] | None = None,
    spool: str | os.PathLike[str] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    progress: Progress = silent,
    limit: int = 10_000,
) -> VerifyReport:
    """Check the data set under ``uri``, without changing it.

    Args:
        uri: A path or any fsspec URL.
        level: "full" reads every byte. "quick" reads names, footers and small files: it finds missing and
            torn shards, not flipped bits in rows.
        storage_options: Options for fsspec, and ``rlio_timeout`` and ``rlio_retries``.
        spool: Folder of the writers' logs, if they were given one.
        limits: The most that the data may ask for; data that asks for more is reported as "unsafe".
        progress: Shows how many bytes of shards are done; see `rlio.support.progress`.
        limit: Findings that the report keeps; it only counts the others.

    Returns:
        The findings and the ledger; ``report.ok`` is True if no finding is an error.

    Raises:
        DataNotFound: ``uri`` has no data set.
        OptionError: The data set has another format version, or an option is illegal.
    """
    storage = Storage.open(uri, storage_options=storage_options, limits=limits)
    return Inspection(storage, level, spool, progress, Findings(limit=limit)).run()


def _lacks(listing: Listing) -> bool:
    return any(listing.cover(writer).holes for writer in listing.writers)


@dataclass
class Inspection:
    """One run of `verify` over an open root; keeps what `repair` needs.

    Attributes:
        storage: The root.
        level, spool, progress: See `verify`.
        findings: Collects the findings.
        listing: The shards and markers of the root.
        header: State of the header.
        schemas: Its schema files.
        found_schemas: Hash -> schema, from the footers of shards.
        damaged: Shards with findings.
        torn: See `Listing.torn`.
        lacking: Hash -> rows of the shards that need the schema and lack it.
        quarantined: Paths of the objects that repair has set aside.

    Raises:
        OptionError: ``level`` is illegal.
    """

    storage: Storage
    level: Level
    spool: str | os.PathLike[str] | None
    progress: Progress
    findings: Findings
    listing: Listing = field(default_factory=Listing)
    header: HeaderState = "fine"
    schemas: SchemaFiles = field(default_factory=SchemaFiles)
    found_schemas: dict[str, Schema] = field(default_factory=dict)
    damaged: list[DamagedShard] = field(default_factory=list)
    torn: dict[str, list[tuple[Rejected, ShardName]]] = field(default_factory=dict)
    lacking: dict[str, int] = field(default_factory=dict)
    quarantined: list[str] = field(default_factory=list)
    repeats: RepeatCheck = field(init=False)

    def __post_init__(self) -> None:
        check_choice("level", self.level, get_args(Level))
        self.repeats = RepeatCheck(self.findings)

    def run(self) -> VerifyReport:
        """Check everything."""
        self.listing = list_settled(self.storage, lacks=_lacks)
        self.header = check_header(self.storage, self.listing, self.findings)
        self.schemas = read_schema_files(self.storage, self.findings)
        self.quarantined = check_strays(self.storage, self.listing, self.findings)
        self.torn = self.listing.torn()
        plan, groups = self.storage.plan(), range(0) if self.level == "quick" else None
        if plan is not None:
            plan.expect(
                wanted for ref in self._read_refs() for wanted in ranges_of(self.storage, ref, None, groups)
            )
        with self.progress("verify", self._bytes()) as advance:
            ledger = {writer: self._writer(writer, advance) for writer in self._writers()}
        self._tell_lacking_schemas()
        self._tell_attempts()
        self._add_logs(ledger)
        return VerifyReport(
            uri=self.storage.uri,
            level=self.level,
            findings=tuple(self.findings.kept),
            omitted=self.findings.omitted,
            counts=self.findings.counts,
            ledger=tuple(ledger[writer] for writer in sorted(ledger)),
            bytes=self._bytes(),
        )

    def _writers(self) -> list[str]:
        return sorted({*self.listing.writers, *self.listing.trimmed, *self.torn})

    def _read_refs(self) -> Iterator[ShardRef]:
        """The shards that are read, in order; quickly, no JSON shard."""
        for writer in self._writers():
            for ref in self.listing.shards.get(writer, []):
                if self.level == "full" or ref.name.suffix == "parquet":
                    yield ref

    def _bytes(self) -> int:
        return sum(ref.name.size for refs in self.listing.shards.values() for ref in refs)

    # ---- one writer ----

    def _writer(self, writer: str, advance: Callable[[int], None]) -> WriterLedger:
        refs = self.listing.shards.get(writer, [])
        coverage = self.listing.cover(writer)
        live = {segment.ref.path: segment for segment in coverage.segments}
        overlaps, times = OverlapCheck(refs, self.findings), TimeCheck(writer, self.findings)
        readable, cursor = 0, self.listing.trimmed.get(writer, 0)
        for scans, files in self._runs(refs, live, overlaps):
            rows = read_joined(scans, files) if len(scans) > 1 else None
            if rows is not None:
                cursor = self._check_joined(scans, rows, times, cursor)
            for scan in scans:
                ref, segment = scan.ref, live.get(scan.ref.path)
                if rows is None:
                    cursor = self._scanned(scan, segment, overlaps, times, cursor)
                if not scan.is_clean:
                    self.damaged.append(DamagedShard(ref, frozenset(scan.codes), tuple(scan.intact)))
                if segment is not None:
                    wanted = [range(segment.skip, segment.skip + segment.rows)]
                    readable += sum(map(len, common(scan.intact, wanted)))
                advance(ref.name.size)
        times.finish(sealed=writer in self.listing.sealed)
        return self._ledger(writer, coverage.segments, coverage.holes, readable)

    def _runs(
        self, refs: Sequence[ShardRef], live: Mapping[str, Segment], overlaps: OverlapCheck
    ) -> Iterator[tuple[list[ShardScan], list[ShardFile]]]:
        """The shards of a writer in order, each alone or with short neighbours, which are then opened."""
        held: list[ShardScan] = []
        together = Together(MOST_OPEN)
        for ref in refs:
            scan = ShardScan(self.storage, ref, self.findings, self._schema_of)
            file, segment = None, live.get(ref.path)
            whole = segment is not None and segment.rows == ref.name.rows
            if self.level == "full" and scan.is_parquet and whole and not overlaps.wants(ref):
                file = scan.ahead()
            follows = bool(held) and held[-1].ref.name.end == ref.name.first
            if not follows or not together.takes(file, ref.name.rows):
                if held:
                    yield held, together.opened
                held, together = [], Together(MOST_OPEN)
                if not together.takes(file, ref.name.rows):
                    yield [scan], []
                    continue
            held.append(scan)
        if held:
            yield held, together.opened

    def _check_joined(self, scans: Sequence[ShardScan], rows: Rows, times: TimeCheck, cursor: int) -> int:
        """Check shards that were read together, all of whose rows are live; returns as `_scan` does."""
        schema, counts = self._seen_schema(scans[0]), [scan.ref.name.rows for scan in scans]
        values = ValueCheck(schema)
        values.add(rows, None)
        for scan, own in zip(scans, rows.split(counts), strict=True):
            scan.finish_joined()
            if values.found:
                of_shard = ValueCheck(schema)
                of_shard.add(own, None)
                of_shard.finish(self.findings, uri=scan.uri)
            self.repeats.add(scan.ref.writer, schema, own, uri=scan.uri)
            self._note_schema(scan)
        if scans[0].ref.name.first > cursor:
            times.lose()
        times.add(
            schema,
            rows,
            None,
            places=[(scan.uri, count) for scan, count in zip(scans, counts, strict=True)],
        )
        return scans[-1].ref.name.end

    def _scanned(
        self,
        scan: ShardScan,
        segment: Segment | None,
        overlaps: OverlapCheck,
        times: TimeCheck,
        cursor: int,
    ) -> int:
        """Check one shard, whose schema may be unknown; returns as `_scan` does."""
        overlaps.begin(scan.ref, uri=scan.uri)
        try:
            cursor = self._scan(scan, segment, overlaps, times, cursor)
        except UnknownSchema as error:
            self.lacking[error.name] = self.lacking.get(error.name, 0) + scan.ref.name.rows
        overlaps.end()
        return cursor

    def _scan(
        self,
        scan: ShardScan,
        segment: Segment | None,
        overlaps: OverlapCheck,
        times: TimeCheck,
        cursor: int,
    ) -> int:
        """Check one shard. Returns the row after its last live one, or ``cursor`` if none is live."""
        if self.level == "quick":
            self._look(scan)
            return cursor
        values: ValueCheck | None = None
        first = scan.ref.name.first
        for rows in scan.rows():
            schema = self._seen_schema(scan)
            overlaps.add(schema, rows)
            if segment is None:
                continue
            start = max(rows.first, segment.skip)
            stop = min(rows.first + rows.count, segment.skip + segment.rows)
            if start >= stop:
                continue
            values = values or ValueCheck(schema)
            live = _live(rows, start, stop)
            values.add(rows, live)
            self.repeats.add(scan.ref.writer, schema, rows, uri=scan.uri)
            if first + start > cursor:
                times.lose()
            times.add(schema, rows, live, places=[(scan.uri, rows.count)])
            cursor = first + stop
        if values is not None:
            values.finish(self.findings, uri=scan.uri)
        if scan.schema is not None and scan.is_parquet:
            self._note_schema(scan)
        return cursor

    def _look(self, scan: ShardScan) -> None:
        """Check a shard without reading rows; for a JSON shard that is only its size."""
        if scan.is_parquet and scan.open() is not None:
            self._note_schema(scan)
        if scan.is_clean:
            scan.intact = [range(scan.ref.name.rows)]

    def _seen_schema(self, scan: ShardScan) -> Schema:
        assert scan.schema is not None  # A scan with rows has a schema.
        return self.found_schemas.setdefault(scan.schema.hash, scan.schema)

    def _note_schema(self, scan: ShardScan) -> None:
        """Remember the schema of a Parquet shard, and whether its schema file is missing."""
        name = self._seen_schema(scan).hash
        if name not in self.schemas.intact and name not in self.schemas.damaged:
            self.lacking[name] = self.lacking.get(name, 0) + scan.ref.name.rows

    def _schema_of(self, name: str) -> Schema:
        """Return the schema for a JSON shard, which only names it."""
        schema = self.schemas.intact.get(name)
        if schema is None:
            raise UnknownSchema(name)
        return schema

    # ---- the ledger ----

    def _ledger(
        self, writer: str, segments: list[Segment], holes: list[range], readable: int
    ) -> WriterLedger:
        refs = self.listing.shards.get(writer, [])
        trim, sealed = self.listing.trimmed.get(writer, 0), self.listing.sealed.get(writer)
        stored = joined(range(ref.name.first, ref.name.end) for ref in refs)
        end = max([trim, sealed or 0, *(rows.stop for rows in stored)])
        uri = self.storage.uri_of(writer_dir(writer))
        holes = self._tell_torn(writer, stored, holes)
        later = "later rows are stored" if sealed is None else f"it is sealed after {sealed} rows"
        for hole in holes:
            self.findings.add(
                "hole",
                f"rows {hole.start} to {hole.stop - 1} of writer {writer!r} are in no shard, although "
                f"{later}{self._whereabouts(writer, hole)}: restore the shard, or read with on_error='skip'",
                uri=uri,
                rows=len(hole),
            )
        if sealed is not None and stored and stored[-1].stop > sealed:
            self.findings.add(
                "past-the-seal",
                f"writer {writer!r} is sealed after {sealed} rows and has {stored[-1].stop}",
                uri=uri,
                rows=stored[-1].stop - sealed,
            )
        held = sum(segment.rows for segment in segments)
        return WriterLedger(
            writer=writer,
            shards=len(refs),
            end=end,
            sealed=sealed,
            stored=sum(map(len, stored)),
            trimmed=trim,
            missing=end - trim - held,
            damaged=held - readable,
            live=readable,
        )

    def _whereabouts(self, writer: str, hole: range) -> str:
        """Return, for a message, which quarantined shard had the rows."""
        for path in self.quarantined:
            *_, folder, text = path.split("/")
            name = ShardName.parse(re.sub(r"\.[0-9]+$", "", text))
            if folder == writer and name is not None and common([hole], [range(name.first, name.end)]):
                return f" (they were in {path}, which is damaged)"
        return ""

    def _tell_torn(self, writer: str, stored: list[range], holes: list[range]) -> list[range]:
        """Report torn objects. Returns the holes that they do not explain."""
        trim = self.listing.trimmed.get(writer, 0)
        for (path, reason), name in self.torn.get(writer, []):
            own = range(name.first, name.end)
            lost = common([own], holes)
            waits = without([own], [*stored, *holes, range(trim)])
            uri = self.storage.uri_of(path)
            if lost:
                holes = without(holes, lost)
                message = f"the object {reason}; no other shard has its rows: restore it"
                self.findings.add("torn", message, uri=uri, rows=sum(map(len, lost)))
            elif waits:
                message = f"the object {reason}; if the writer is dead, `rlio recover` stores it again"
                self.findings.add("uploading", message, uri=uri, rows=sum(map(len, waits)))
            else:
                message = f"the object {reason}; other shards have its rows: `rlio gc` removes it"
                self.findings.add("torn", message, uri=uri, severity="warning")
        return holes

    def _tell_lacking_schemas(self) -> None:
        for name, rows in sorted(self.lacking.items()):
            if name in self.schemas.damaged:
                continue  # Already reported as damaged.
            source = "repair takes it from a footer" if name in self.found_schemas else "no footer holds it"
            self.findings.add(
                "schema-file-missing",
                f"shards of {rows} rows need this schema, but its file is missing: {source}",
                uri=self.storage.uri_of(schema_path(name)),
                rows=rows,
            )

    def _tell_attempts(self) -> None:
        """Report attempts at a part of a job whose rows are not served."""
        taken = {part_of(writer): writer for writer in self.listing.sealed}
        for writer, passed in self.listing.passed_over.items():
            other = taken.get(part_of(writer))
            why = "no attempt at its part is sealed yet" if other is None else f"{other} is taken"
            rows = sum(map(len, joined(range(ref.name.first, ref.name.end) for ref in passed.shards)))
            self.findings.add(
                "attempt",
                f"{rows} rows of an attempt are not served: {why}; `rlio gc` removes old ones",
                uri=self.storage.uri_of(writer_dir(writer)),
                rows=rows,
            )

    def _add_logs(self, ledger: dict[str, WriterLedger]) -> None:
        """Count the rows that wait in logs."""
        stored = {
            writer: [
                range(self.listing.trimmed.get(writer, 0)),
                *(range(ref.name.first, ref.name.end) for ref in self.listing.shards.get(writer, [])),
            ]
            for writer in ledger
        }
        for writer, rows in waiting_rows(self.storage, stored, self.findings, spool=self.spool).items():
            ledger[writer] = replace(ledger.get(writer, WriterLedger(writer=writer)), waiting=rows)


def _live(rows: Rows, start: int, stop: int) -> NDArray[np.bool_] | None:
    """Return a mask of the live rows of a group; None: all are live."""
    if (start, stop) == (rows.first, rows.first + rows.count):
        return None
    live = np.zeros(rows.count, bool)
    live[start - rows.first : stop - rows.first] = True
    return live
