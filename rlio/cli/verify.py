"""`rlio verify`: check a data set, list where its rows are, and repair it on request."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlio.cli.exit_codes import OK, WRONG
from rlio.cli.failures import print_json
from rlio.cli.options import Spool, StorageOptions, Uri, parse_storage_options
from rlio.cli.tables import print_table, progress_of

if TYPE_CHECKING:
    from rlio.maintenance.findings import VerifyReport
    from rlio.maintenance.repair import RepairReport

__all__ = ["verify"]


class LevelOption(Enum):
    """How much to read."""

    quick = "quick"
    full = "full"


_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}
_COLUMNS = ("end", "trimmed", "missing", "damaged", "live", "waiting", "shards")


def verify(
    uri: Uri,
    level: Annotated[
        LevelOption, typer.Option(help="full: read every byte. quick: names, footers and small files only.")
    ] = LevelOption.full,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; see docs/verify.md.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair what can be repaired without loss, then verify again.")
    ] = False,
    spool: Spool = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 also for warnings.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Findings to show; the rest are counted.")] = 1000,
    storage_options: StorageOptions = None,
) -> None:
    """Check names, checksums, schemas, values, episodes and the ledger of a data set.

    Exit codes: 0, no errors (warnings and notes are possible); 1, errors, or, with --strict, warnings; 2, the
    data set could not be verified: it does not exist, cannot be read, or an option is wrong.
    """
    done: RepairReport | None = None
    given: dict[str, Any] = {
        "level": level.value,
        "spool": spool,
        "limit": limit,
        "storage_options": parse_storage_options(storage_options),
        "progress": progress_of(as_json=as_json, unit="B"),
    }
    if repair:
        from rlio.maintenance.repair import repair as run_repair

        done = run_repair(uri, **given)
        report = done.after
    else:
        from rlio.maintenance.verify import verify as run_verify

        report = run_verify(uri, **given)
    if as_json:
        shown = report.to_json()
        if done is not None:
            shown["repair"] = done.to_json()
        print_json(shown)
    else:
        _show(report, done)
    bad = report.counts["error"] + (report.counts["warning"] if strict else 0)
    raise typer.Exit(WRONG if bad else OK)


def _show(report: VerifyReport, done: RepairReport | None) -> None:
    """Print the findings, the ledger and the totals."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    for action in done.actions if done is not None else ():
        console.print(f"[green]repaired[/green]: {escape(action.message)} {escape(f'[in {action.uri}]')}")
    for finding in report.findings:
        colour = _COLOURS[finding.severity]
        text = str(finding).removeprefix(finding.severity)
        console.print(f"[{colour}]{finding.severity}[/{colour}]{escape(text)}")
    if report.omitted:
        console.print(f"and {report.omitted} more findings: raise --limit to see them")
    entries = [*report.ledger, report.total] if len(report.ledger) != 1 else [*report.ledger]
    rows = [
        [
            entry.writer,
            *(f"{getattr(entry, name):,}" for name in _COLUMNS),
            "" if entry.sealed is None else f"{entry.sealed:,}",
        ]
        for entry in entries
    ]
    print_table("rows by writer", ["writer", *_COLUMNS, "sealed"], rows)
    counts = report.counts
    verdict = "clean" if report.ok else "damaged"
    console.print(
        f"{escape(report.uri)}: {verdict}; {counts['error']} errors, {counts['warning']} warnings, "
        f"{counts['note']} notes; {report.total.live:,} rows verify ({report.level}), {report.bytes:,} bytes"
    )
