"""Reads small JSON files that describe a data set of another library, within limits."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Final

from rlio.batch.columns import Columns
from rlio.errors import CorruptData, UnknownLayout, excerpt, raise_at
from rlio.formats.files.step_columns import suggested_mapping
from rlio.limits import Limits
from rlio.storage import Storage
from rlio.storage.pointers import refuse_pointer

__all__ = [
    "NUMBERS",
    "OURS",
    "first_keys",
    "list_of_records",
    "parse_json",
    "read_object",
    "spread_value",
    "whole_number",
]

#: Names of the dtypes of numbers in descriptions, and names that mean a column of rlio.
NUMBERS: Final = frozenset(
    (
        "bool",
        *(f"float{n}" for n in (16, 32, 64)),
        *(f"{s}int{n}" for s in ("", "u") for n in (8, 16, 32, 64)),
    )
)
OURS: Final = frozenset(value for name, value in vars(Columns).items() if name.isupper())


_KEY: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')


def list_of_records(names: Collection[str]) -> UnknownLayout:
    """The error of a JSON file that is one list of objects with these names, where objects are expected."""
    return UnknownLayout(
        "found a list of records in one JSON value, expected one object a line: write them so (jq -c '.[]'), "
        f"or pass rlio.read(pandas.read_json(path), {suggested_mapping(names)})"
    )


def spread_value(line: bytes, rest: bytes) -> UnknownLayout | None:
    """The error of a JSON file that is one value over several lines, where each should be an object.

    Args:
        line: The first line, which is no object.
        rest: The beginning of the lines after it.

    Returns:
        The error; None: the first line may be a damaged one of a file of objects.
    """
    text = line.strip()
    if not text.endswith((b"{", b"[", b",")):
        return None
    if text.startswith(b"["):
        return list_of_records(first_keys(line + rest))
    # A line of RLlib, which may follow one that was cut off, begins with its brace.
    if text.startswith(b"{") and rest[:1] in b' \t\n\r"' and (text[1:] + rest).lstrip()[:1] == b'"':
        return UnknownLayout(
            "found one JSON value over several lines, expected one object a line: write it so (jq -c .), "
            "or load it with json.load, and pass its episodes to rlio.from_episodes(episodes), or columns "
            f"to rlio.from_arrays(columns, {suggested_mapping(first_keys(line + rest))})"
        )
    return None


def first_keys(text: bytes) -> list[str]:
    """The keys of the beginning of a JSON text, each once."""
    found = (key.decode("utf-8", "replace") for key in _KEY.findall(text[:4096]))
    return list(dict.fromkeys(found))


def parse_json(text: bytes | str, what: str, *, uri: str, limits: Limits) -> Any:
    """The value of a JSON text.

    Raises:
        UnknownLayout: It is a pointer of Git LFS.
        CorruptData: It is not JSON. (UnsafeData: it is too large.)
    """
    refuse_pointer(text if isinstance(text, bytes) else text[:100].encode(), uri=uri)
    try:
        limits.check_json(text, what)
        return json.loads(text)
    except CorruptData as error:
        raise_at(error, uri=uri)
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{what} is not readable as JSON: {excerpt(str(error))}", uri=uri) from error


def read_object(storage: Storage, path: str, *, limits: Limits) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        DataNotFound: The file is absent.
        CorruptData: It is not a JSON object. (UnsafeData: it is too large.)
    """
    uri = storage.uri_of(path)
    found = parse_json(storage.read(path, limit=limits.schema_bytes), path, uri=uri, limits=limits)
    if not isinstance(found, dict):
        raise CorruptData(f"found {excerpt(found)}, expected a JSON object", uri=uri)
    return found


def whole_number(found: Any, name: str, *, uri: str) -> int:
    """A field of a JSON object that is a whole number, 0 or more.

    Raises:
        CorruptData: It is absent or something else, or ``found`` is no object.
    """
    if not isinstance(found, dict):
        raise CorruptData(f"found {excerpt(found)}, expected a JSON object with {name}", uri=uri)
    value = found.get(name)
    if type(value) is not int or value < 0:
        raise CorruptData(f"{name} is {excerpt(value)}, expected a whole number", uri=uri)
    return value
