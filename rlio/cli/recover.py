"""`rlio recover`: publish what dead writers left in their logs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

__all__ = ["recover"]


def recover(
    uri: Annotated[str, typer.Argument(help="Root of the data set: a path or any fsspec URL.")],
    spool: Annotated[
        str | None, typer.Option(help="Folder of the writers' logs, where they were given one.")
    ] = None,
    all_hosts: Annotated[
        bool,
        typer.Option(
            "--all-hosts", help="Also logs of other hosts, and copies: their writers must be dead for sure."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Publish the rows that dead writers of this machine left in their logs. Safe at any time.

    Exit codes: 0, nothing is left to recover; 1, a log could not be recovered, or was damaged.
    """
    from rlio.writers.recovery import recover as run_recover

    report = run_recover(uri, spool="auto" if spool is None else spool, all_hosts=all_hosts)
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        for log in report.logs:
            said = {
                "recovered": f"{log.rows} rows published",
                "alive": "its writer lives, or is not this host's or user's",
                "failed": "failed, and stays",
            }[log.outcome]
            typer.echo(f"{log.writer}: {said}" + (f"; {log.error}" if log.error else ""))
            for path in log.set_aside:
                typer.echo(f"  set aside: {path}")
            if log.lost_rows:
                typer.echo(f"  {log.lost_rows} whole rows lie behind the damage")
        typer.echo(f"{report.rows} rows recovered from {len(report.logs)} logs in {report.spool}")
    raise typer.Exit(0 if report.is_clean else 1)
