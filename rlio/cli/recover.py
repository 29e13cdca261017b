"""`rlio recover`: publish rows from the logs of dead writers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from rlio.cli.exit_codes import OK, WRONG
from rlio.cli.failures import print_json
from rlio.cli.options import Json, Spool, StorageOptions, Uri, parse_storage_options
from rlio.cli.tables import progress_of

if TYPE_CHECKING:
    from rlio.writers.recovery import RecoveredLog, RecoveryReport

__all__ = ["recover"]

_SAID: Final = {
    "alive": "kept: its writer is alive, or it is a copy of a live writer's log",
    "other-host": "kept: it belongs to another host; recover it there, or use --all-hosts if it is gone",
    "other-user": "kept: it belongs to another user, who must recover it",
    "elsewhere": "kept: it was written with other storage options",
    "failed": "kept: recovery failed",
}


def recover(
    uri: Uri,
    spool: Spool = None,
    all_hosts: Annotated[
        bool,
        typer.Option(
            "--all-hosts",
            help="Also logs of other hosts, and copies. Make sure that their writers are dead.",
        ),
    ] = False,
    conflicting: Annotated[
        bool,
        typer.Option(
            "--conflicting",
            help="Also rows with another column type than the data set's. Readers must then omit the column.",
        ),
    ] = False,
    as_json: Json = False,
    storage_options: StorageOptions = None,
) -> None:
    """Publish the rows in the logs of this machine's dead writers. Safe at any time.

    Exit codes: 0, only logs of living writers remain; 1, a log could not be recovered, was damaged, belongs
    to another host or user, or was written with other storage options; 2, neither a data set nor a log
    exists, the store does not answer, or an option is wrong.
    """
    from rlio.writers.recovery import recover as run_recover

    report = run_recover(
        uri,
        spool="auto" if spool is None else spool,
        all_hosts=all_hosts,
        conflicting=conflicting,
        must_exist=True,
        progress=progress_of(as_json=as_json, unit="B"),
        storage_options=parse_storage_options(storage_options),
    )
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)
    raise typer.Exit(OK if report.is_clean else WRONG)


def _show(report: RecoveryReport) -> None:
    """Print the outcome for each log, and the totals."""
    for log in report.logs:
        _show_log(log)
    done = sum(log.outcome == "recovered" for log in report.logs)
    left = len(report.logs) - done
    rest = f"; {left} logs remain" if left else ""
    typer.echo(f"{report.rows} rows recovered from {done} logs in {report.spool}{rest}")


def _show_log(log: RecoveredLog) -> None:
    said = _SAID.get(log.outcome, f"{log.rows} rows published")
    typer.echo(f"{log.writer}: {said}" + (f"; {log.error}" if log.error else ""))
    for path in log.set_aside:
        typer.echo(f"  set aside: {path}")
    if log.lost_rows:
        typer.echo(f"  {log.lost_rows} complete rows lie after the damage")
