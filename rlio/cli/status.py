"""`rlio status`: what the writers and followers of a data set do at this moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from rlio.cli.failures import print_json
from rlio.cli.options import Json, Spool, StorageOptions, Uri, parse_storage_options
from rlio.cli.tables import print_table

if TYPE_CHECKING:
    from rlio.maintenance.status import DatasetStatus, LogStatus

__all__ = ["status"]

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_NOT_KNOWN = "?"


def status(
    uri: Uri,
    spool: Spool = None,
    as_json: Json = False,
    storage_options: StorageOptions = None,
) -> None:
    """Show what writers and followers do while they record. Nothing is written.

    For each writer: whether it is alive, the rows that readers see, and the rows that wait in its log. Then
    the logs that dead writers left on this machine, with the command that publishes them, and how many rows
    each follower with progress marks is behind. "?" means that this machine cannot know: whether a writer of
    another host is alive, and the rows in its log. Followers without marks, such as
    FollowReader, are not seen.

    \b
    Examples:
      rlio status runs/cartpole
      rlio status runs/cartpole --json
      watch -n 5 rlio status s3://bucket/runs --storage-options @options.json

    Exit codes: 0, the status is shown (logs may remain); 1, the header of the data set is damaged; 2, there
    is neither a data set nor a log, the store does not answer, or an option is wrong.
    """  # noqa: D301  # Click keeps the lines of a paragraph after this character.
    from rlio.maintenance.status import status as run

    report = run(uri, spool=spool, storage_options=parse_storage_options(storage_options))
    if as_json:
        print_json(report.to_json())
        return
    _show_writers(report)
    if report.left:
        _show_logs(report)
    if report.followers:
        _show_followers(report)
    for line in _lines(report):
        typer.echo(line)


def _show_writers(report: DatasetStatus) -> None:
    headings = ("writer", "state", "rows", "unpublished", "last commit", "shards", "bytes")
    rows = [
        [
            one.writer,
            one.state,
            f"{one.rows:,}",
            _count(one.rows_unpublished),
            _ago(one.last_commit, report.time),
            f"{one.shards:,}",
            f"{one.bytes:,}",
        ]
        for one in report.writers
    ]
    print_table("writers", headings, rows)


def _show_logs(report: DatasetStatus) -> None:
    rows = [[log.path, log.owner, _count(log.rows), _count(log.bytes)] for log in report.left]
    print_table("logs on this machine without a living owner", ("log", "owner", "rows", "bytes"), rows)


def _show_followers(report: DatasetStatus) -> None:
    headings = ("follower", "rows behind", "writers marked", "writers at their ceiling", "last mark")
    rows = [
        [
            one.name,
            f"{one.rows_behind:,}",
            f"{one.writers:,}",
            f"{len(one.blocks):,}",
            _ago(one.last_mark, report.time),
        ]
        for one in report.followers
    ]
    print_table("followers", headings, rows)


def _lines(report: DatasetStatus) -> Iterator[str]:
    """Return what to do next, and the totals."""
    yield from (line for log in report.left if (line := _advice(log)))
    if report.set_aside:
        yield f"{len(report.set_aside):,} damaged log files are set aside: `rlio verify` says what they hold"
    hidden = sum(one.rows_hidden for one in report.writers)
    if hidden:
        yield f"{hidden:,} rows of attempts that are not closed, or not taken, are hidden from readers"
    states = [one.state for one in report.writers]
    counts = ", ".join(f"{states.count(state):,} {state}" for state in sorted(set(states)))
    yield (
        f"{report.uri}: {len(states):,} writers{f' ({counts})' if counts else ''}; {report.rows:,} rows, "
        f"{report.rows_unpublished:,} unpublished in logs on this machine; {report.bytes:,} bytes in "
        f"{report.shards:,} shards; last commit {_ago(report.last_commit, report.time)}"
    )


def _advice(log: LogStatus) -> str:
    """Return how to publish the rows of a remaining log; "" if a warning has stated it."""
    if log.command is not None and log.owner == "other-host":
        return f"{log.writer}: its host recovers its log, or, if that host is gone for good, `{log.command}`"
    if log.command is not None:
        return f"{log.writer}: its process is dead; `{log.command}` publishes its rows"
    if log.owner == "other-user":
        return f"{log.writer}: its log belongs to another user, who must recover it"
    if log.owner == "ownerless":
        return f"{log.writer}: its log has no owner file: restore it, or copy the complete log again"
    return ""


def _count(number: int | None) -> str:
    return _NOT_KNOWN if number is None else f"{number:,}"


def _ago(then: float | None, now: float) -> str:
    """Return how long ago that was. The store's clock may be ahead of this machine's."""
    if then is None:
        return _NOT_KNOWN
    seconds = max(now - then, 0.0)
    size, unit = next((one for one in _UNITS if seconds >= one[0]), _UNITS[-1])
    return f"{int(seconds / size)} {unit} ago"
