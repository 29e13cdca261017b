"""`rlio recover`: publish what dead writers left in their logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from rlio.cli.failures import EXIT_WRONG, print_json
from rlio.cli.options import StorageOptions, Uri, parse_storage_options

if TYPE_CHECKING:
    from rlio.log.recovery import RecoveredLog, RecoveryReport

__all__ = ["recover"]

_SAID: Final = {
    "alive": "its writer lives, or it is the copy of a log whose writer does",
    "other-host": "another host's, and stays: recover it there, or with --all-hosts if that host is gone",
    "other-user": "another user's, who must recover it",
    "elsewhere": "written with other storage options, and stays",
    "failed": "failed, and stays",
}


def recover(
    uri: Uri,
    spool: Annotated[
        str | None, typer.Option(help="Folder of the writers' logs, where they were given one.")
    ] = None,
    all_hosts: Annotated[
        bool,
        typer.Option(
            "--all-hosts", help="Also logs of other hosts, and copies: their writers must be dead for sure."
        ),
    ] = False,
    conflicting: Annotated[
        bool,
        typer.Option(
            "--conflicting",
            help="Also rows that give a column another type than the data set has: it is then read without.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    storage_options: StorageOptions = None,
) -> None:
    """Publish the rows that dead writers of this machine left in their logs. Safe at any time.

    Exit codes: 0, nothing is left but what living writers have; 1, a log could not be recovered, was damaged,
    is another host's or user's, or was written with other storage options; 2, there is neither a data set
    nor a log, the store cannot be asked, or an option is wrong.
    """
    from rlio.log.recovery import recover as run_recover

    report = run_recover(
        uri,
        spool="auto" if spool is None else spool,
        all_hosts=all_hosts,
        conflicting=conflicting,
        must_exist=True,
        storage_options=parse_storage_options(storage_options),
    )
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)
    raise typer.Exit(0 if report.is_clean else EXIT_WRONG)


def _show(report: RecoveryReport) -> None:
    """Print what became of each log, and the sum of it."""
    for log in report.logs:
        _show_log(log)
    done = sum(log.outcome == "recovered" for log in report.logs)
    left = len(report.logs) - done
    rest = f"; {left} logs are left" if left else ""
    typer.echo(f"{report.rows} rows recovered from {done} logs in {report.spool}{rest}")


def _show_log(log: RecoveredLog) -> None:
    said = _SAID.get(log.outcome, f"{log.rows} rows published")
    typer.echo(f"{log.writer}: {said}" + (f"; {log.error}" if log.error else ""))
    for path in log.set_aside:
        typer.echo(f"  set aside: {path}")
    if log.lost_rows:
        typer.echo(f"  {log.lost_rows} whole rows lie behind the damage")
