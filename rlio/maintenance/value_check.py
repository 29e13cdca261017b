"""Checks that values are finite, and that no step is both terminated and truncated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import to_numpy
from rlio.batch.columns import Columns
from rlio.batch.nested import leaves
from rlio.maintenance.findings import Findings
from rlio.maintenance.shard_scan import Part, Rows, flat_column
from rlio.schemas.schema import Schema

__all__ = ["ValueCheck"]

_FINITE = (Columns.OBS, Columns.NEXT_OBS, Columns.ACTIONS, Columns.REWARDS)


@dataclass
class _Tally:
    """Rows of one shard that share a problem."""

    rows: int
    record: int
    place: str


class ValueCheck:
    """Checks the rows of one shard; `finish` reports each problem once per column."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._tallies: dict[tuple[str, str | None, str], _Tally] = {}

    @property
    def found(self) -> bool:
        """Whether there is a problem to report."""
        return bool(self._tallies)

    def add(self, rows: Rows, live: NDArray[np.bool_] | None) -> None:
        """Check an intact row group or line.

        Args:
            rows: Its rows.
            live: Mask of the served rows; None: all.
        """
        for part in rows.parts:
            self._check_finite(rows, part, live)
            self._check_ends(rows, part, live)

    def finish(self, findings: Findings, *, uri: str) -> None:
        """Report the findings of the shard at ``uri``."""
        for (code, column, policy), tally in self._tallies.items():
            findings.add(
                code,
                f"{_MESSAGES[code]} in {tally.rows} rows of policy {policy!r}; the first is {tally.place}",
                uri=uri,
                record=tally.record,
                column=column,
                rows=tally.rows,
            )

    def _check_finite(self, rows: Rows, part: Part, live: NDArray[np.bool_] | None) -> None:
        for column in _FINITE:
            if column not in part.batch:
                continue
            nan = infinite = None
            for _, leaf in leaves(part.batch[column]):
                values = to_numpy(leaf)
                if values.dtype.kind not in "fc" or np.isfinite(values).all():
                    continue
                nan = _by_row(np.isnan(values)) | (False if nan is None else nan)
                infinite = _by_row(np.isinf(values)) | (False if infinite is None else infinite)
            self._count("nan", column, nan, rows, part, live)
            self._count("infinite", column, infinite, rows, part, live)

    def _check_ends(self, rows: Rows, part: Part, live: NDArray[np.bool_] | None) -> None:
        flags = [flat_column(self._schema, part, name) for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS)]
        if flags[0] is not None and flags[1] is not None:
            both = flags[0].astype(bool) & flags[1].astype(bool)
            self._count("terminated-and-truncated", None, both, rows, part, live)

    def _count(
        self,
        code: str,
        column: str | None,
        found: NDArray[np.bool_] | None,
        rows: Rows,
        part: Part,
        live: NDArray[np.bool_] | None,
    ) -> None:
        if found is None or not found.any():
            return
        if live is not None:
            found = found & live[part.rows]
        at = np.flatnonzero(found)
        if not len(at):
            return
        key = (code, column, part.policy)
        tally = self._tallies.get(key)
        if tally is None:
            place = f"row {rows.first + int(part.rows[at[0]])} of the shard"
            tally = self._tallies[key] = _Tally(0, rows.record, place)
        tally.rows += len(at)


_MESSAGES = {
    "nan": "NaN",
    "infinite": "infinite values",
    "terminated-and-truncated": "terminated and truncated at once",
}


def _by_row(found: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of the rows with any such value."""
    return np.asarray(found.any(axis=tuple(range(1, found.ndim))))
