"""`rlio convert`: converts data of one format into another, and reports findings."""

# Without `from __future__ import annotations`, see `rlio.cli.data`.

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlio.cli.data import flag_of, named_value, takes_mapping
from rlio.cli.failures import print_json
from rlio.cli.options import IntoStorageOptions, StorageOptions, parse_storage_options
from rlio.cli.tables import print_table, progress_bar, waiting
from rlio.errors import OptionError
from rlio.support.isolation import Isolation
from rlio.support.options import refuse_unknown

if TYPE_CHECKING:
    from rlio.conversion.report import ImportReport
    from rlio.mapping import Mapping

__all__ = ["convert"]


@takes_mapping
def convert(
    src: Annotated[str, typer.Argument(help="The data to read: a file, folder, glob or any fsspec URL.")],
    dst: Annotated[str, typer.Argument(help="The target: a folder, or a file for formats of one file.")],
    to: Annotated[
        str | None, typer.Option(help="Name of the target's format; default: a data set of rlio.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policy whose rows to convert, if there are several.")
    ] = None,
    prove: Annotated[
        bool, typer.Option("--prove", help="Read both sides again; exit with 1 if they differ.")
    ] = False,
    skip: Annotated[
        bool, typer.Option("--skip", help="Leave out episodes that are not a trajectory or do not fit.")
    ] = False,
    final_obs: Annotated[
        str,
        typer.Option(
            help="Where the observation after the last step is missing and the target needs it: error; repeat"
            " the last one; or drop-step: leave out the last step."
        ),
    ] = "error",
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE: an option of the format, as JSON; repeatable.")
    ] = None,
    read_option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE: an option of the reader, as JSON, such as max_episode_steps=1000."),
    ] = None,
    isolated: Annotated[
        bool,
        typer.Option(
            "--isolated", help="Read in a process with bounded memory, processor time and open files."
        ),
    ] = False,
    bound: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE: a bound of --isolated: memory_bytes, processor_seconds, open_files; repeatable."
        ),
    ] = None,
    mapping: "Mapping | None" = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    storage_options: StorageOptions = None,
    into_storage_options: IntoStorageOptions = None,
) -> None:
    """Convert data of any format that rlio reads, and report what looks wrong. Run again, it continues."""
    from rlio.conversion.convert import convert as run
    from rlio.mapping import Mapping

    read_options = dict(map(named_value, read_option or ()))
    if replaced := [field.name for field in fields(Mapping) if field.name in read_options]:
        raise OptionError(f"--read-option {replaced[0]}=...: pass --{flag_of(replaced[0])} instead")
    with ExitStack() as opened:
        if not as_json:
            opened.enter_context(waiting("open"))
        report = run(
            src,
            dst,
            to=to,
            mapping=mapping,
            policy=policy,
            prove=prove,
            on_error="skip" if skip else "raise",
            final_obs=final_obs,  # type: ignore[arg-type]  # It is checked there.
            options=dict(map(named_value, option or ())),
            read_options=read_options,
            storage_options=parse_storage_options(storage_options),
            into_storage_options=parse_storage_options(into_storage_options, option="--into-storage-options"),
            progress=None if as_json else _Bar(opened),
            isolated=_isolation(isolated, dict(map(named_value, bound or ()))),
        )
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)


def _isolation(isolated: bool, bounds: dict[str, Any]) -> bool | Isolation:
    """The value of ``isolated=``."""
    if bounds and not isolated:
        raise OptionError(f"--bound {next(iter(bounds))}=...: pass --isolated too")
    refuse_unknown(bounds, [field.name for field in fields(Isolation)], of="--isolated")
    return Isolation(**bounds) if bounds else isolated


class _Bar:
    """Shows the rows and episodes that were read, by `progress_bar`, in the place of what is ``opened``."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened, self._rows = opened, 0
        self._advance: Callable[[int], Any] | None = None

    def begin(self, name: str, total: int | None) -> None:
        """Begin a part of the work."""
        self._opened.close()
        self._rows = 0
        self._advance = self._opened.enter_context(progress_bar(name, total, unit=" rows"))

    def __call__(self, rows: int, episodes: int) -> None:
        assert self._advance is not None
        self._advance(rows - self._rows)
        self._rows = rows


def _print(report: "ImportReport") -> None:
    if rows := report.lines():
        print_table(
            "Found in the source", ("finding", "count", "columns", "first places", "what it is"), rows
        )
    proved = ", proved equal" if report.proved else ""
    typer.echo(
        f"{report.source} ({report.source_format}) -> {report.target} ({report.target_format}): "
        f"{report.episodes:,} episodes, {report.rows:,} rows, {report.written:,} written now{proved}"
    )
