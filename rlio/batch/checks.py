"""The check that a batch's columns fit together: rows, sequences, padding.

Example:
    >>> import numpy as np
    >>> check_layout({"obs": np.zeros((3, 4)), "rewards": np.zeros(2)}, False, False, None)
    Traceback (most recent call last):
        ...
    rlio.errors.SchemaError: column 'rewards' has 2 rows but column 'obs' has 3: all have the same rows
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlio.batch.arrays import Column, to_numpy
from rlio.batch.columns import STATE_IN_PREFIX, Columns
from rlio.batch.nested import Path, leaves, path_text
from rlio.errors import SchemaError, excerpt

__all__ = ["check_layout"]

_SEQ_LENS = Columns.SEQ_LENS


def check_layout(
    columns: dict[str, Column], time_major: bool, zero_padded: bool, max_seq_len: int | None
) -> None:
    """Check that ``columns`` form a batch.

    Args:
        columns: Name -> array, tensor, or nested.
        time_major: Whether columns are (max_seq_len, sequences, ...).
        zero_padded: Whether each sequence takes ``max_seq_len`` rows.
        max_seq_len: Rows of a padded sequence; None: the longest sequence.

    Raises:
        SchemaError: The columns do not fit; the message names the columns and lengths that disagree.
    """
    if _SEQ_LENS in columns:
        _check_sequences(columns, time_major, zero_padded, max_seq_len)
        return
    if zero_padded and columns:
        raise SchemaError("a padded or time-major batch needs seq_lens, which mark the padding")
    _check_rows(columns)


def _check_rows(columns: dict[str, Column]) -> None:
    first, rows = "", -1
    for name, column in columns.items():
        # The path without nesting comes first, because it runs for every new batch.
        if type(column) is np.ndarray and len(column) == rows:
            continue
        for path, leaf in leaves(column):
            if rows < 0:
                first, rows = _full_name(name, path), len(leaf)
            elif len(leaf) != rows:
                raise _unlike(_full_name(name, path), len(leaf), first, rows)


def _unlike(name: str, found: int, first: str, rows: int) -> SchemaError:
    hint = ""
    if name.startswith(STATE_IN_PREFIX) or first.startswith(STATE_IN_PREFIX):
        hint = "; state_in_* have one row a sequence only beside seq_lens: pass it too"
    return SchemaError(
        f"column {excerpt(name)} has {found} rows but column {excerpt(first)} has {rows}: all have the same "
        f"rows{hint}"
    )


def _full_name(name: str, path: Path) -> str:
    return f"{name}/{path_text(path)}" if path else name


def _check_sequences(
    columns: dict[str, Column], time_major: bool, zero_padded: bool, max_seq_len: int | None
) -> None:
    lens = _checked_lens(columns[_SEQ_LENS])
    total, longest, number = int(lens.sum()), int(lens.max(initial=0)), len(lens)
    length = longest if max_seq_len is None else max_seq_len
    if longest > length:
        raise SchemaError(
            f"the longest sequence has {longest} steps but max_seq_len is {length}", column=_SEQ_LENS
        )
    for name, column in columns.items():
        if name == _SEQ_LENS:
            continue
        expected: tuple[int, ...] = (total,)
        why = "the sum of column 'seq_lens'"
        if name.startswith(STATE_IN_PREFIX):
            expected, why = (number,), f"one a sequence, and column 'seq_lens' has {number}"
        elif time_major:
            expected = (length, number)
            why = f"max_seq_len {length} by the {number} sequences of column 'seq_lens'"
        elif zero_padded:
            expected, why = (
                (number * length,),
                f"max_seq_len {length} times the {number} of column 'seq_lens'",
            )
        for path, leaf in leaves(column):
            found = tuple(leaf.shape[: len(expected)])
            if found != expected:
                full = excerpt(_full_name(name, path))
                raise SchemaError(f"column {full} has {_by(found)} rows, expected {_by(expected)}: {why}")


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _checked_lens(column: Any) -> np.ndarray:
    nested = isinstance(column, dict | tuple)
    lens = np.zeros(0) if nested else to_numpy(column)
    if lens.ndim != 1 or lens.dtype.kind not in "iu":
        found = "nested" if nested else f"{lens.dtype} of shape {lens.shape}"
        raise SchemaError(
            f"seq_lens is {found}, expected 1-D integers, one length a sequence", column=_SEQ_LENS
        )
    if len(lens) and int(lens.min()) < 1:
        raise SchemaError(
            f"sequence {int(lens.argmin())} has length {int(lens.min())}, expected at least 1: leave it out",
            column=_SEQ_LENS,
        )
    return lens
