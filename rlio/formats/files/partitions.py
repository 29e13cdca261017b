"""Columns in the names of folders: ``eps_id=3/part.parquet``, as Hive, Spark, Polars and pandas write them.

Example:
    >>> from rlio.storage import InputFile
    >>> files = [InputFile(None, f"/log/eps_id={n}/0.parquet", "", 1) for n in (3, 11)]
    >>> partitions_of(files)
    [{'eps_id': 3}, {'eps_id': 11}]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from rlio.batch.columns import TRAJECTORY
from rlio.batch.other_names import MEANT
from rlio.errors import DataNotFound, RlioError, SchemaError, StoreError, UnknownLayout, excerpt
from rlio.storage import InputFile, expand_inputs
from rlio.storage.filesystem import Storage
from rlio.storage.paths import StrPath

__all__ = [
    "expand_with_partitions",
    "has_partitions",
    "partitions_of",
    "refuse_partitions",
    "with_partitions",
]

_PARTITION: Final = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_WHOLE: Final = re.compile(r"0|-?[1-9][0-9]{0,17}")
#: The folder of rows without a value.
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"


def partitions_of(files: Sequence[InputFile]) -> list[dict[str, Any]]:
    """The columns that the folders directly above each file state: whole numbers if all values are, or text.

    Raises:
        SchemaError: Only some of the files have one that gives rows a meaning, such as ``eps_id``.
    """
    texts = [_texts(file.path) for file in files]
    names = {name for one in texts for name in one}
    some = {name for name in names if any(name not in one for one in texts)}
    if lost := sorted(name for name in some if _has_meaning(name)):
        raise SchemaError(
            f"only some of the files are in a folder {excerpt(lost[0] + '=...')}: expected all or none",
            column=lost[0],
        )
    names -= some
    whole = {name for name in names if all(_WHOLE.fullmatch(one[name] or "") for one in texts)}
    return [
        {name: int(text or "") if name in whole else text for name, text in one.items() if name in names}
        for one in texts
    ]


def refuse_partitions(files: Sequence[InputFile]) -> None:
    """Refuse files in folders that state a column which gives rows a meaning, for a reader that ignores it.

    Raises:
        UnknownLayout: One of the files is in such a folder.
    """
    for file in files:
        if found := sorted(name for name in _texts(file.path) if _has_meaning(name)):
            raise UnknownLayout(
                f"found files in folders {excerpt(found[0] + '=...')}, whose column this reader would lose: "
                "read them with mapping=rlio.Mapping(columns={...}), or with rlio.read from CSV or Parquet",
                uri=file.uri,
                column=found[0],
            )


def has_partitions(value: StrPath, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether the folder ``value`` has folders that state a column."""
    try:
        folders = Storage.open(value, storage_options=storage_options).folders("")
        return any(_PARTITION.fullmatch(name) for name in folders)
    except StoreError:
        raise
    except (RlioError, OSError):  # It is no folder; what opens it says why it cannot.
        return False


def expand_with_partitions(
    values: Sequence[StrPath], storage_options: Mapping[str, Any] | None = None
) -> list[InputFile]:
    """`expand_inputs`; of one folder without files, those in its folders that state a column.

    Raises:
        DataNotFound: There are none.
    """
    try:
        return expand_inputs(values, storage_options=storage_options)
    except DataNotFound:
        if len(values) != 1 or not has_partitions(values[0], storage_options):
            raise
        return expand_inputs(values, recursive=True, storage_options=storage_options)


def with_partitions(table: Any, values: Mapping[str, Any], rows: int) -> Any:
    """An Arrow table with the same value in all ``rows``; ``table`` None: with these columns only."""
    import pyarrow as pa

    more = {name: pa.array([value] * rows, _type(value)) for name, value in values.items()}
    if table is None:
        return pa.table(more)
    table = table if isinstance(table, pa.Table) else pa.Table.from_batches([table])
    for name, column in more.items():
        table = table.append_column(name, column)
    return table


def _type(value: Any) -> Any:
    import pyarrow as pa

    return pa.int64() if isinstance(value, int) else pa.string()


def _texts(path: str) -> dict[str, str | None]:
    """The columns and their values as text; None: no value."""
    found: dict[str, str | None] = {}
    for folder in reversed(path.replace("\\", "/").split("/")[:-1]):
        match = _PARTITION.fullmatch(folder)
        if match is None:
            break
        found.setdefault(unquote(match[1]), None if match[2] == _NULL else unquote(match[2]))
    return found


def _has_meaning(name: str) -> bool:
    return name in TRAJECTORY or name.lower() in MEANT
