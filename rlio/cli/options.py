"""Arguments that several commands share: the URI, and the options of its store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rlio.errors import OptionError

__all__ = ["IntoStorageOptions", "Json", "Spool", "StorageOptions", "Uri", "parse_storage_options"]

Uri = Annotated[str, typer.Argument(help="Root of the data set: a path or any fsspec URL.")]
StorageOptions = Annotated[
    str | None,
    typer.Option(
        "--storage-options",
        metavar="JSON",
        help="Options of the store, the same as for its writers: a JSON object, or @FILE that contains one "
        "(use a file for secrets: other users can see the command line).",
    ),
]
Spool = Annotated[str | None, typer.Option(help="Folder of the writers' logs, if it was passed to them.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
IntoStorageOptions = Annotated[
    str | None,
    typer.Option("--into-storage-options", metavar="JSON", help="The same for the root that is written."),
]


def parse_storage_options(text: str | None, *, option: str = "--storage-options") -> dict[str, Any] | None:
    """Parse the value of ``option``; None if it is absent.

    Raises:
        OptionError: The value is not a JSON object, or its file cannot be read. The message never quotes the
            value, which may hold secrets.
    """
    if text is None:
        return None
    wanted = 'expected a JSON object, such as \'{"endpoint_url": "http://127.0.0.1:9000"}\', or @FILE'
    try:
        if text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
        found = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise OptionError(f"{option}: {where}: {wanted}") from None
    except OSError as error:
        raise OptionError(f"{option}: the file cannot be read ({error.strerror}): {wanted}") from None
    except (ValueError, RecursionError):
        raise OptionError(f"{option}: not JSON: {wanted}") from None
    if not isinstance(found, dict):
        kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
        raise OptionError(f"{option}: {kinds.get(type(found), 'a number')}: {wanted}")
    return found
