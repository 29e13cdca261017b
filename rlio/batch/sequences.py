"""Where sequences lie in a batch's rows: the arithmetic behind ``seq_lens``.

Sequences lie one after the other (*ragged*: ``sum(seq_lens)`` rows), or each in ``max_seq_len`` rows of which
the last ones are padding (*padded*: ``B * T`` rows), or padded with time first (*time-major*: shape ``(T, B,
...)``).

Example:
    >>> import numpy as np
    >>> padded_rows(np.array([2, 3, 1]), 3)
    array([0, 1, 3, 4, 5, 6])
    >>> ragged_rows(np.array([2, 3, 1]), np.array([1, 0]))
    array([2, 3, 4, 0, 1])
"""

from __future__ import annotations

import numpy as np

from rlio.errors import SchemaError

__all__ = ["boundaries", "cuts", "padded_rows", "ragged_rows", "sequence_range"]


def boundaries(seq_lens: np.ndarray) -> np.ndarray:
    """First step of each of B sequences, and the end of the last: (B + 1,) int64."""
    bounds = np.zeros(len(seq_lens) + 1, np.int64)
    np.cumsum(seq_lens, out=bounds[1:])
    return bounds


def ragged_rows(seq_lens: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Row numbers of the sequences ``order``, one after the other, where sequences lie ragged."""
    starts = boundaries(seq_lens)[:-1][order]
    lens = seq_lens[order].astype(np.int64)
    ends = np.cumsum(lens)
    rows: np.ndarray = np.arange(lens.sum()) + np.repeat(starts - (ends - lens), lens)
    return rows


def padded_rows(seq_lens: np.ndarray, max_seq_len: int) -> np.ndarray:
    """Row numbers of the steps among the ``B * max_seq_len`` rows of the padded layout."""
    lens = seq_lens.astype(np.int64)
    gaps = np.arange(len(lens)) * max_seq_len - boundaries(lens)[:-1]
    rows: np.ndarray = np.arange(lens.sum()) + np.repeat(gaps, lens)
    return rows


def sequence_range(seq_lens: np.ndarray, rows: slice) -> tuple[int, int]:
    """The sequences (first, end) that the slice ``rows`` of steps covers.

    Raises:
        SchemaError: The slice has a step, or cuts a sequence; the message names the nearest boundaries.
    """
    bounds = boundaries(seq_lens)
    start, stop, step = rows.indices(int(bounds[-1]))
    if step != 1:
        raise SchemaError(
            f"a slice with step {step} would cut sequences: a batch with seq_lens is sliced with step 1 "
            "(or by sequence: batch.sequences(i, j))"
        )
    stop = max(start, stop)
    found = []
    for position in (start, stop):
        i = int(np.searchsorted(bounds, position))
        if bounds[i] != position:
            raise SchemaError(
                f"a slice [{start}:{stop}] cuts a sequence at step {position}: the nearest boundaries are "
                f"{bounds[i - 1]} and {bounds[i]}; slice there, by sequence (batch.sequences(i, j)), "
                "or cut on purpose with batch.slice(start, end)"
            )
        found.append(i)
    return found[0], found[1]


def cuts(count: int, bounds: np.ndarray | None, size: int) -> list[int]:
    """Where to cut ``count`` steps into parts of ``size`` steps, or, given sequence ``bounds``, at most that.

    Returns:
        The ends of the parts, 0 first; a sequence longer than ``size`` makes a part of its own.
    """
    if bounds is None:
        return [*range(0, count, size), count] if count else [0]
    at = [0]
    while at[-1] < count:
        i = int(np.searchsorted(bounds, at[-1] + size, side="right")) - 1
        if bounds[i] <= at[-1]:
            i = int(np.searchsorted(bounds, at[-1], side="right"))
        at.append(int(bounds[i]))
    return at
