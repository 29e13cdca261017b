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
from rlio.cli.tables import waiting
from rlio.errors import OptionError, excerpt

if TYPE_CHECKING:
    from rlio.dataset.dataset import Dataset
    from rlio.mapping import Mapping

__all__ = ["flag_of", "named_value", "open_data", "reads_data", "takes_mapping"]


def mapping_of(
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--map", help="COLUMN=NAME[,NAME...]: the columns of a table, such as obs=x,y; repeatable."
        ),
    ] = None,
    episode: Annotated[str | None, typer.Option(help="Column with the id of the episode.")] = None,
    starts: Annotated[
        str | None, typer.Option(help="Column: the flag of the first row of each episode.")
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Array of the lengths of the episodes.")] = None,
    ends: Annotated[
        str | None, typer.Option(help="Array of the rows after the last one of each episode.")
    ] = None,
    terminated: Annotated[
        str | None, typer.Option(help="Column: the episode terminated; 'not NAME': where it is 0.")
    ] = None,
    truncated: Annotated[str | None, typer.Option(help="Column: the episode was truncated.")] = None,
    next_obs: Annotated[
        str | None, typer.Option(help="Columns for new_obs, or derive: from the next row.")
    ] = None,
    codes: Annotated[
        list[str] | None,
        typer.Option(help="NAME[=CATEGORY,...]: a column of categories, which become 0, 1, ...; repeatable."),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="COLUMN=DTYPE, such as obs=float32; repeatable.")
    ] = None,
    per_file: Annotated[
        bool | None, typer.Option("--per-file/--across-files", help="Whether episodes end with their file.")
    ] = None,
    per_row: Annotated[
        bool, typer.Option("--per-row", help="Each row is an episode: its cells are lists, an item a step.")
    ] = False,
    valid: Annotated[
        str | None, typer.Option(help="With --per-row: the mask of the steps that are no padding.")
    ] = None,
    final_row: Annotated[
        bool, typer.Option("--final-row", help="Each episode has a further row with its final observation.")
    ] = False,
    sort_rows: Annotated[
        str | None, typer.Option(help="Columns by which the rows of an episode are sorted.")
    ] = None,
    shifted: Annotated[
        list[str] | None,
        typer.Option(help="Column of rlio whose values are stored a row later, such as rewards; repeatable."),
    ] = None,
    ragged: Annotated[
        list[str] | None,
        typer.Option(help="Column of the table whose cells are lists of any number of items; repeatable."),
    ] = None,
) -> "Mapping | None":
    """The mapping that ``--map`` and the other options state; None: they state none.

    Raises:
        OptionError: There is another option, and no ``--map``; or one is illegal.
    """
    from rlio.mapping import Mapping

    fields: dict[str, Any] = {
        "episode": None if episode is None else _names(episode),
        "starts": starts,
        "lengths": lengths,
        "ends": ends,
        "terminated": terminated,
        "truncated": truncated,
        "next_obs": None if next_obs is None else _names(next_obs),
        "codes": dict(map(_categories, codes or ())),
        "dtypes": dict(map(_dtype, dtype or ())),
        "per_file": per_file,
        "per_row": per_row,
        "valid": valid,
        "final_row": final_row,
        "sort": () if sort_rows is None else _names(sort_rows),
        "shifted": shifted or (),
        "ragged": ragged or (),
    }
    if column:
        return Mapping(dict(map(_mapped, column)), **fields)
    if given := [name for name, value in fields.items() if value not in (None, False, {}, ())]:
        raise OptionError(f"--{flag_of(given[0])} needs --map COLUMN=NAME, such as --map obs=x,y")
    return None


def flag_of(field: str) -> str:
    """The option for a field of `rlio.Mapping`, without the dashes."""
    return {"columns": "map", "dtypes": "dtype", "sort": "sort-rows"}.get(field, field.replace("_", "-"))


def takes_mapping(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `mapping_of`, in the place of its argument ``mapping``."""
    given, own = inspect.signature(mapping_of).parameters, inspect.signature(command)

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        return command(mapping=mapping_of(**{name: values.pop(name) for name in given}), **values)

    listed = [
        option
        for name, one in own.parameters.items()
        for option in (given.values() if name == "mapping" else (one,))
    ]
    run.__signature__ = own.replace(parameters=listed)  # type: ignore[attr-defined]  # typer reads it.
    hints = {**mapping_of.__annotations__, **command.__annotations__}
    run.__annotations__ = {name: hint for name, hint in hints.items() if name not in ("mapping", "return")}
    return run


@takes_mapping
def open_data(
    uri: Uri,
    format: Annotated[str | None, typer.Option(help="Format of the files; default: recognised.")] = None,
    format_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE: an option of the format, as JSON; repeatable.")
    ] = None,
    mapping: "Mapping | None" = None,
    storage_options: StorageOptions = None,
) -> "Dataset":
    """Open the data that a command looks at, by `rlio.open_dataset`."""
    from rlio.dataset.opening import open_dataset

    with waiting("open"):
        return open_dataset(
            uri,
            mapping=mapping,
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


def _categories(text: str) -> tuple[str, list[str] | list[int] | None]:
    """A column and its categories; None: those that it has."""
    name, equals, listed = text.partition("=")
    if not name or (equals and not listed):
        raise OptionError(
            f"{excerpt(text)}: expected NAME, or NAME=CATEGORY,CATEGORY, such as move=left,right"
        )
    values = listed.split(",")
    is_whole = all(value.removeprefix("-").isdecimal() for value in values)
    return name, None if not equals else list(map(int, values)) if is_whole else values


def _dtype(text: str) -> tuple[str, str]:
    name, equals, dtype = text.partition("=")
    if not name or not equals or not dtype:
        raise OptionError(f"{excerpt(text)}: expected COLUMN=DTYPE, such as obs=float32")
    return name, dtype


def _names(text: str) -> str | list[str]:
    """Return one name, or a list of the names between commas; ``x,`` is a list of one."""
    return [name for name in text.split(",") if name] if "," in text else text
