"""Where the episodes of a table begin, if an array beside its rows says so: their lengths, or where they end.

Example:
    >>> lengths_in(np.array([3, 1, 5]), 9, is_ends=False), lengths_in(np.array([3, 4, 9]), 9, is_ends=True)
    ([3, 1, 5], [3, 1, 5])
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.errors import MissingColumn, SchemaError, excerpt, raise_at
from rlio.formats.tables.table import Table
from rlio.mapping import Mapping

__all__ = ["lengths_in", "stated_lengths"]


def stated_lengths(table: Table, mapping: Mapping) -> list[int] | None:
    """Rows of each episode, by `Mapping.lengths`, `Mapping.ends`, or `Table.lengths`; None: nothing says so.

    Raises:
        MissingColumn: There is no such array.
        SchemaError: Its values do not fit the number of rows.
    """
    name = mapping.lengths or mapping.ends
    if table.is_cut:
        return list(table.lengths or ())
    if name is None:
        is_used = mapping.per_file is None and not (mapping.episode or mapping.starts)
        return list(table.lengths) if table.lengths is not None and is_used else None
    found: list[int] = []
    for file, rows in enumerate(table.rows):
        try:
            found += lengths_in(
                table.array(file, name), rows, is_ends=mapping.ends is not None, has_final=mapping.final_row
            )
        except MissingColumn as error:
            raise MissingColumn(f"{_option(mapping)}: {_text(error)}", column=name) from error
        except SchemaError as error:
            raise_at(
                SchemaError(f"{_option(mapping)}: {_text(error)}", column=name),
                uri=table.uri_of(file),
            )
    return found


def _option(mapping: Mapping) -> str:
    return "lengths" if mapping.ends is None else "ends"


def _text(error: SchemaError) -> str:
    """The message of an error, without its column."""
    return str(error).rpartition(" [")[0] if error.column else str(error)


def lengths_in(
    values: NDArray[Any],
    rows: int,
    *,
    is_ends: bool,
    has_final: bool = False,
    episodes: int | None = None,
) -> list[int]:
    """The lengths that ``values`` state.

    Args:
        values: Lengths of episodes.
        rows: Rows of the table.
        is_ends: Whether ``values`` are the rows after the last ones of episodes instead. A 0 may precede
            them, and the last one, the number of rows, may be absent.
        has_final: Whether each episode has a further row, which its length may leave out.
        episodes: The number of episodes, if it is known.

    Raises:
        SchemaError: The lengths do not add up to ``rows``, or the ends do not increase up to it.
    """
    is_whole = values.ndim == 1 and values.dtype.kind in "iuf" and bool((values == np.floor(values)).all())
    if not is_whole or (values < 0).any() or (values > rows).any():
        raise SchemaError(
            f"found {excerpt(values.tolist(), 80)}, expected a list of whole numbers from 0 to {rows}, the "
            "number of rows"
        )
    numbers: NDArray[np.int64] = values.astype(np.int64)
    if is_ends:
        return _between(numbers, rows, episodes)
    total = int(numbers.sum())
    if has_final and total + len(numbers) == rows:
        return [length + 1 for length in numbers.tolist()]
    if total != rows:
        hint = ""
        if len(numbers) == rows:
            hint = "; it has a value a row: if rows of one episode have one value, pass episode= instead"
        elif (np.diff(numbers) > 0).all() and len(numbers) and numbers[-1] in (rows, 0):
            hint = "; they increase up to it: pass ends= instead, if they say where each episode ends"
        elif total + len(numbers) == rows:
            hint = "; each episode seems to have one more row, its final observation: pass final_row=True"
        raise SchemaError(
            f"the {len(numbers)} lengths add up to {total}, expected {rows}, the number of rows{hint}"
        )
    return list(numbers.tolist())


def _between(ends: NDArray[np.int64], rows: int, episodes: int | None) -> list[int]:
    """The lengths between ends."""
    if (np.diff(ends) <= 0).any():
        hint = "; they add up to it: pass lengths= instead" if int(ends.sum()) == rows else ""
        raise SchemaError(
            f"found {excerpt(ends.tolist(), 80)}, expected numbers that increase, up to {rows}{hint}"
        )
    if int(ends.sum()) == rows and len(ends) > 1 and ends[0] and episodes in (None, len(ends)):
        raise SchemaError(
            f"found {excerpt(ends.tolist(), 80)}, which add up to {rows}, the number of rows: pass lengths= "
            f"instead; if these are ends, and the last episode is left out, append {rows}"
        )
    found = np.diff(np.unique([0, *ends, rows]))
    if len(ends) and ends[-1] == rows - 1 and len(found) != episodes:
        raise SchemaError(
            f"the last one is {rows - 1}, the number of the last row: expected the rows after those of each "
            f"episode, up to {rows}. If these are the last rows of episodes, load the file, add 1, and pass "
            "the arrays to rlio.from_arrays; if the last row is an episode of its own, append "
            f"{rows} likewise"
        )
    return list(found.tolist())
