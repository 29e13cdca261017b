"""`rlio compact`, `rlio trim`, `rlio gc`: merge shards, remove old rows, and free the space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlio.cli.failures import print_json
from rlio.cli.options import IntoStorageOptions, Json, StorageOptions, Uri, parse_storage_options
from rlio.cli.tables import progress_of
from rlio.errors import OptionError, excerpt

if TYPE_CHECKING:
    from rlio.maintenance.compaction import CompactReport
    from rlio.maintenance.gc import GcReport
    from rlio.maintenance.trim import TrimReport

__all__ = ["compact", "gc", "trim"]

_DryRun = Annotated[bool, typer.Option("--dry-run", help="Report what would be done, and change nothing.")]

_MIB = 1 << 20
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def compact(
    uri: Uri,
    into: Annotated[
        str | None, typer.Option(help="Write the rows of all writers into this new root instead.")
    ] = None,
    max_mib: Annotated[int, typer.Option(min=1, max=512, help="Size of the new shards, in MiB.")] = 64,
    min_shards: Annotated[
        int | None, typer.Option(min=2, help="Fewest consecutive shards to merge (default 2).")
    ] = None,
    compression: Annotated[str, typer.Option(help="For Parquet shards: codec:level, or none.")] = "zstd",
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Skip runs that contain a damaged shard.")
    ] = False,
    dry_run: _DryRun = False,
    as_json: Json = False,
    storage_options: StorageOptions = None,
    into_storage_options: IntoStorageOptions = None,
) -> None:
    """Merge small shards into large ones. Removes nothing: `rlio gc` does that, a day later."""
    from rlio.maintenance.compact import compact as run

    report = run(
        uri,
        into=into,
        max_bytes=max_mib * _MIB,
        min_shards=min_shards,
        compression=compression,
        on_error="skip" if skip_damaged else "raise",
        dry_run=dry_run,
        progress=progress_of(as_json=as_json, unit="B"),
        storage_options=parse_storage_options(storage_options),
        into_storage_options=parse_storage_options(into_storage_options, option="--into-storage-options"),
    )
    _print(report.to_json(), _compact_text(report), as_json=as_json)


def trim(
    uri: Uri,
    before: Annotated[
        list[str] | None, typer.Option(help="WRITER=ROW: the first row of a writer to keep; repeatable.")
    ] = None,
    keep_rows: Annotated[int | None, typer.Option(min=0, help="Keep this many of the newest rows.")] = None,
    dry_run: _DryRun = False,
    as_json: Json = False,
    storage_options: StorageOptions = None,
) -> None:
    """Remove the oldest rows permanently: --before WRITER=ROW, or --keep-rows N."""
    from rlio.maintenance.trim import trim as run

    rows = dict(map(_writer_row, before)) if before else None
    options = parse_storage_options(storage_options)
    report = run(
        uri,
        before=rows,
        keep_rows=keep_rows,
        dry_run=dry_run,
        progress=progress_of(as_json=as_json),
        storage_options=options,
    )
    _print(report.to_json(), _trim_text(report), as_json=as_json)


def gc(
    uri: Uri,
    grace: Annotated[
        str, typer.Option(help="How long an object must have been unneeded: 90s, 30m, 24h, 7d, or 0.")
    ] = "24h",
    dry_run: _DryRun = False,
    as_json: Json = False,
    storage_options: StorageOptions = None,
) -> None:
    """Remove objects that no reader needs: covered and trimmed shards, torn and unfinished files."""
    from rlio.maintenance.gc import gc as run

    options = parse_storage_options(storage_options)
    report = run(
        uri,
        grace=_seconds(grace),
        dry_run=dry_run,
        progress=progress_of(as_json=as_json),
        storage_options=options,
    )
    _print(report.to_json(), _gc_text(report), as_json=as_json)


def _writer_row(text: str) -> tuple[str, int]:
    writer, _, row = text.rpartition("=")
    if not writer or not row.isdecimal():
        raise OptionError(f"--before {excerpt(text)}: expected WRITER=ROW, such as w00000-0a1b2c3d=4096")
    return writer, int(row)


def _seconds(text: str) -> float:
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1.0)
    try:
        return float(number) * unit
    except ValueError as error:
        raise OptionError(f"--grace {excerpt(text)}: expected 90s, 30m, 24h, 7d, or seconds") from error


def _print(report: dict[str, Any], lines: Iterator[str], *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    for line in lines:
        typer.echo(line)


def _compact_text(report: CompactReport) -> Iterator[str]:
    will = "would merge" if report.dry_run else "merged"
    for run in report.runs:
        rows = f"rows {run.first:,} to {run.first + run.rows - 1:,} of {run.writer}"
        made = "" if report.dry_run else f" into {len(run.shards)}, {run.bytes_after:,} bytes"
        yield f"{will} {len(run.sources):,} shards, {run.bytes_before:,} bytes{made}: {rows}"
    yield from (f"skipped: {message}" for message in report.skipped)
    where = report.uri if report.into is None else f"{report.uri} -> {report.into}"
    counts = f"{report.shards_before:,} live shards -> {report.shards_after:,}"
    yield f"{where}: {counts}; {report.rows:,} rows {'would be merged' if report.dry_run else 'merged'}"


def _trim_text(report: TrimReport) -> Iterator[str]:
    will = "would be removed" if report.dry_run else "are removed"
    for entry in report.writers:
        yield f"{entry.writer}: {entry.rows:,} rows below row {entry.row:,} {will}"
    yield (
        f"{report.uri}: {report.rows:,} rows and {len(report.removed):,} shards of {report.bytes:,} bytes "
        f"{will}; {report.rows_left:,} rows remain"
    )


def _gc_text(report: GcReport) -> Iterator[str]:
    will = "would be removed" if report.dry_run else "removed"
    for entry in report.removed:
        yield f"{will} ({entry.kind}): {entry.uri}"
    for kept in report.kept:
        yield f"kept: {kept.uri}: {kept.reason}"
    yield (
        f"{report.uri}: {len(report.removed):,} objects of {report.bytes:,} bytes {will}; {report.waiting:,} "
        f"wait for the grace period of {report.grace:,.0f} s; {len(report.kept):,} kept"
    )
