"""The data that a command looks at: where it is, how its files are read, what the columns of a table mean.

`reads_data` gives a command the arguments of `open_data`, so that all of them read every format alike.
"""

# Without `from __future__ import annotations`: commands of other modules get these annotations, whose names
# they do not have. For the same reason, the modules of these commands have no such import.

import functools
import inspect
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlio.cli.options import StorageOptions, Uri, parse_storage_options
from rlio.errors import OptionError, excerpt

if TYPE_CHECKING:
    from rlio.dataset.dataset import Dataset
    from rlio.mapping import Mapping

__all__ = ["mapping_fields", "mapping_of", "named_value", "open_data", "reads_data"]


def open_data(
    uri: Uri,
    format: Annotated[str | None, typer.Option(help="Format of the files; default: recognised.")] = None,
    format_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE: an option of the format, as JSON; repeatable.")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--map", help="COLUMN=NAME[,NAME...]: the columns of a table, such as obs=x,y; repeatable."
        ),
    ] = None,
    episode: Annotated[str | None, typer.Option(help="Column with the id of the episode.")] = None,
    terminated: Annotated[str | None, typer.Option(help="Column: the episode terminated.")] = None,
    truncated: Annotated[str | None, typer.Option(help="Column: the episode was truncated.")] = None,
    next_obs: Annotated[
        str | None, typer.Option(help="Columns for new_obs, or derive: from the next row.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="COLUMN=DTYPE, such as obs=float32; repeatable.")
    ] = None,
    per_file: Annotated[
        bool | None, typer.Option("--per-file/--across-files", help="Whether episodes end with their file.")
    ] = None,
    final_row: Annotated[
        bool, typer.Option("--final-row", help="Each episode has a further row with its final observation.")
    ] = False,
    storage_options: StorageOptions = None,
) -> "Dataset":
    """Open the data that a command looks at, by `rlio.open_dataset`."""
    from rlio.dataset.opening import open_dataset

    fields = mapping_fields(
        episode=episode,
        terminated=terminated,
        truncated=truncated,
        next_obs=next_obs,
        dtype=dtype,
        per_file=per_file,
        final_row=final_row,
    )
    return open_dataset(
        uri,
        mapping=mapping_of(column, fields),
        format=format,
        format_options=dict(map(named_value, format_option)) if format_option else None,
        storage_options=parse_storage_options(storage_options),
    )


def reads_data(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function whose first argument is the data: it takes those of `open_data` instead.

    Its own options come first in the help.
    """
    given, own = inspect.signature(open_data), inspect.signature(command)
    shared, (first, *names) = given.parameters, own.parameters

    @functools.wraps(command)
    def run(**values: Any) -> None:
        data = open_data(**{name: values.pop(name) for name in shared})
        command(data, **values)

    uri, *options = shared.values()
    run.__signature__ = own.replace(parameters=[uri, *(own.parameters[name] for name in names), *options])  # type: ignore[attr-defined]  # typer reads it.
    hints = {**open_data.__annotations__, **command.__annotations__}
    run.__annotations__ = {name: hint for name, hint in hints.items() if name not in (first, "return")}
    return run


def mapping_fields(
    *,
    episode: str | None,
    next_obs: str | None,
    dtype: list[str] | None,
    **fields: Any,
) -> dict[str, Any]:
    """The fields of `rlio.Mapping` that options give, besides the columns."""
    return {
        "episode": None if episode is None else _names(episode),
        "next_obs": None if next_obs is None else _names(next_obs),
        "dtypes": dict(map(_dtype, dtype or ())),
        **fields,
    }


def mapping_of(columns: list[str] | None, fields: dict[str, Any]) -> "Mapping | None":
    """The mapping that ``--map`` and the other options state; None: they state none.

    Raises:
        OptionError: There is another option, and no ``--map``; or one is illegal.
    """
    from rlio.mapping import Mapping

    if columns:
        return Mapping(dict(map(_mapped, columns)), **fields)
    if given := [name for name, value in fields.items() if value not in (None, False, {})]:
        flag = {"dtypes": "dtype"}.get(given[0], given[0].replace("_", "-"))
        raise OptionError(f"--{flag} needs --map COLUMN=NAME, such as --map obs=x,y")
    return None


def named_value(text: str) -> tuple[str, Any]:
    """NAME=VALUE: the name, and the value as JSON, or as a text.

    Raises:
        OptionError: It is not of that form.
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise OptionError(f"{excerpt(text)}: expected NAME=VALUE, such as episodes_per_file=1000")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value  # A text needs no quotes.


def _mapped(text: str) -> tuple[str, str | list[str]]:
    name, equals, names = text.partition("=")
    if not name or not equals or not names:
        raise OptionError(f"{excerpt(text)}: expected COLUMN=NAME[,NAME...], such as obs=x,y")
    return name, _names(names)


def _dtype(text: str) -> tuple[str, str]:
    name, equals, dtype = text.partition("=")
    if not name or not equals or not dtype:
        raise OptionError(f"{excerpt(text)}: expected COLUMN=DTYPE, such as obs=float32")
    return name, dtype


def _names(text: str) -> str | list[str]:
    """Return one name, or a list of the names between commas; ``x,`` is a list of one."""
    return [name for name in text.split(",") if name] if "," in text else text
