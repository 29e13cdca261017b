"""Whether a footer's table of streams tells the truth about the rows: lengths, beginnings, ends, rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.columns import Columns
from rlio.maintenance.scanned import Part, flat_column
from rlio.schemas.shard_file import DecodedGroup
from rlio.schemas.streams import WRITER, Streams

__all__ = ["StreamCheck"]

# Column -> field of the table.
_KEYS = {name: name for name in (Columns.EPS_ID, Columns.AGENT_INDEX, Columns.ENV_ID)} | {WRITER: "writer"}
# Sums of rewards are compared as floats that were added in another order.
_TOLERANCE = 1e-6


class StreamCheck:
    """Counts a shard's rows by stream, group by group, and compares.

    Args:
        table: What the footer says.
    """

    def __init__(self, table: Streams) -> None:
        self._table = table
        count = len(table)
        self._rows = np.zeros(count, np.int64)
        self._reward = np.zeros(count)
        self._size = np.zeros(count)
        self._end = np.zeros(count, np.int8)
        self._t0: list[Any] = [None] * count
        self._strangers = np.zeros(count, np.int64)

    def add(self, group: DecodedGroup, parts: list[Part]) -> None:
        """Take the rows of the next group."""
        for part in parts:
            self._add_part(group, part, np.asarray(group.stream[part.rows], np.int64))

    def _add_part(self, group: DecodedGroup, part: Part, stream: NDArray[np.int64]) -> None:
        if not len(stream):
            return
        schema, count = group.schema, len(self._table)
        present, first = np.unique(stream, return_index=True)
        last = len(stream) - 1 - np.unique(stream[::-1], return_index=True)[1]
        t = _numbers(flat_column(schema, part, Columns.T))
        if t is not None:
            for number, at in zip(present.tolist(), first.tolist(), strict=True):
                if not self._rows[number]:
                    self._t0[number] = int(t[at]) if math.isfinite(t[at]) else None
        self._rows += np.bincount(stream, minlength=count)
        rewards = _numbers(flat_column(schema, part, Columns.REWARDS))
        if rewards is not None:
            values = rewards.astype(np.float64)
            with np.errstate(over="ignore", invalid="ignore"):
                self._reward += np.bincount(stream, weights=values, minlength=count)
                self._size += np.bincount(stream, weights=np.abs(values), minlength=count)
        ends = np.zeros(len(stream), np.int8)
        for code, column in ((2, Columns.TRUNCATEDS), (1, Columns.TERMINATEDS)):
            flags = _numbers(flat_column(schema, part, column))
            if flags is not None:
                ends[flags.astype(bool)] = code
        self._end[present] = ends[last]
        for column, name in _KEYS.items():
            self._compare_keys(getattr(self._table, name), flat_column(schema, part, column), stream)

    def _compare_keys(
        self, listed: list[Any], values: NDArray[Any] | None, stream: NDArray[np.int64]
    ) -> None:
        """Count the rows whose key is not that of their stream."""
        if values is None or all(key is None for key in listed):
            return
        named = np.empty(len(listed), object)
        named[:] = listed
        unlike = named[stream] != values.astype(object)
        self._strangers += np.bincount(stream[unlike], minlength=len(listed))

    def problems(self) -> Iterator[tuple[str, int]]:
        """What differs, and in how many rows; to be asked once every group was added."""
        table = self._table
        ends = {0: "open", 1: "terminated", 2: "truncated"}
        checks: list[tuple[str, list[int]]] = [
            ("lengths", [i for i, rows in enumerate(table.rows) if rows != self._rows[i]]),
            ("keys", np.flatnonzero(self._strangers).tolist()),
            ("first t", [i for i, t0 in enumerate(table.t0) if t0 != self._t0[i]]),
            ("ends", [i for i, end in enumerate(table.end) if end != ends[int(self._end[i])]]),
            ("sums of rewards", [i for i in range(len(table)) if not self._same_reward(i)]),
        ]
        for name, wrong in checks:
            if wrong:
                yield (
                    f"the footer's table of streams has other {name} than the rows, in {len(wrong)} of "
                    f"{len(table)} streams (the first: {wrong[0]}); episodes() tells what the table says",
                    int(self._rows[wrong].sum()),
                )

    def _same_reward(self, index: int) -> bool:
        listed, found = self._table.reward[index], float(self._reward[index])
        if listed is None or not math.isfinite(found):
            return listed is None and not math.isfinite(found)
        # Finite rewards whose sum is near zero may still be large.
        return abs(listed - found) <= _TOLERANCE * max(1.0, float(self._size[index]))


def _numbers(values: NDArray[Any] | None) -> NDArray[Any] | None:
    return values if values is not None and values.dtype.kind in "biuf" else None
