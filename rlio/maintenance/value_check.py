"""Whether values make sense: within the recorded spaces, finite, and not both terminated and truncated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.arrays import to_numpy
from rlio.columns import Columns
from rlio.errors import RlioError
from rlio.maintenance.findings import Findings
from rlio.maintenance.scanned import Part, Rows, flat_column
from rlio.maintenance.space_check import Misfit, rows_outside
from rlio.nested import leaves
from rlio.schemas.schema import PolicySchema, Schema, rebuild
from rlio.schemas.spaces import space_from_json

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["SchemaSpaces", "ValueCheck"]

_FINITE = (Columns.OBS, Columns.NEXT_OBS, Columns.ACTIONS, Columns.REWARDS)
_SPACE_OF = {Columns.OBS: "observation", Columns.NEXT_OBS: "observation", Columns.ACTIONS: "action"}


class SchemaSpaces:
    """The spaces of one schema that its columns can be compared with.

    Args:
        schema: The schema.
        findings: Takes spaces that are malformed, and columns that cannot be in theirs.
        uri: Of the schema's file.
    """

    def __init__(self, schema: Schema, findings: Findings, *, uri: str) -> None:
        self.schema = schema
        self._spaces: dict[tuple[str, str], gym.Space[Any]] = {}
        for pid, policy in schema.policies.items():
            for column, kind in _SPACE_OF.items():
                written = (policy.spaces or {}).get(kind)
                # What a preprocessor made of an observation is not in the environment's space.
                preprocessed = kind == "observation" and schema.stored.get("observations") == "preprocessed"
                if written is None or column not in policy.columns or preprocessed:
                    continue
                try:
                    space = space_from_json(written)
                    rows_outside(space, _no_rows(policy, column))
                    self._spaces[pid, column] = space
                except Misfit as problem:
                    findings.add(
                        "space-mismatch",
                        f"policy {pid!r} has {problem}: its rows are not compared with the recorded space",
                        uri=uri,
                        column=column,
                    )
                except RlioError as error:
                    if column != Columns.NEXT_OBS:  # Said for obs already.
                        findings.add_error("space-malformed", error, uri=uri)

    def get(self, policy: str, column: str) -> gym.Space[Any] | None:
        """The space of a column; None where there is none to compare with."""
        return self._spaces.get((policy, column))


def _no_rows(policy: PolicySchema, column: str) -> Any:
    """The column with no rows."""
    return rebuild(
        [(leaf.path, np.empty((0, *leaf.spec.shape), leaf.spec.numpy)) for leaf in policy.columns[column]]
    )


@dataclass
class _Tally:
    """Rows of one shard that share a problem."""

    rows: int
    record: int
    place: str


class ValueCheck:
    """Looks at the rows of one shard; what it finds is told once a column, by `finish`.

    Args:
        spaces: Of the shard's schema.
    """

    def __init__(self, spaces: SchemaSpaces) -> None:
        self._spaces = spaces
        self._tallies: dict[tuple[str, str | None, str], _Tally] = {}

    def add(self, rows: Rows, live: NDArray[np.bool_] | None) -> None:
        """Take an intact row group or line.

        Args:
            rows: Its rows.
            live: Which of them are served; None: all.
        """
        for part in rows.parts:
            self._check_finite(rows, part, live)
            self._check_spaces(rows, part, live)
            self._check_ends(rows, part, live)

    def finish(self, findings: Findings, *, uri: str) -> None:
        """Tell what was found in the shard at ``uri``."""
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

    def _check_spaces(self, rows: Rows, part: Part, live: NDArray[np.bool_] | None) -> None:
        for column in _SPACE_OF:
            space = self._spaces.get(part.policy, column)
            if space is None or column not in part.batch:
                continue
            value = part.batch[column]
            try:
                outside = rows_outside(space, value)
            except Misfit:  # A stranger's objects: their schema fits, and they do not.
                everything = np.ones(len(part.rows), bool)
                self._count("outside-space", column, everything, rows, part, live)
                continue
            there = ~_undefined(value)
            valid = part.batch.get(Columns.NEXT_OBS_VALID) if column == Columns.NEXT_OBS else None
            if valid is not None:
                there &= to_numpy(valid).astype(bool)
            # A policy's own actions may exceed a Box until they are clipped or scaled for the environment.
            raw = column == Columns.ACTIONS and self._spaces.schema.stored.get("actions") != "sent"
            certain = outside.beyond_discrete if raw else outside.rows
            self._count("outside-space", column, certain & there, rows, part, live)
            self._count("raw-action-outside", column, outside.rows & ~certain & there, rows, part, live)

    def _check_ends(self, rows: Rows, part: Part, live: NDArray[np.bool_] | None) -> None:
        flags = [
            flat_column(self._spaces.schema, part, name) for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS)
        ]
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
    "outside-space": "values outside of the recorded space",
    "raw-action-outside": "a policy's own actions outside of the action space",
    "terminated-and-truncated": "terminated and truncated at once",
}


def _by_row(found: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows with any such value."""
    return np.asarray(found.any(axis=tuple(range(1, found.ndim))))


def _undefined(value: Any) -> NDArray[np.bool_]:
    """Rows with a NaN, which are found as such."""
    found: NDArray[np.bool_] | None = None
    for _, leaf in leaves(value):
        values = to_numpy(leaf)
        odd = np.zeros(len(values), bool)
        if values.dtype.kind in "fc":
            odd = _by_row(np.isnan(values))
        found = odd if found is None else found | odd
    assert found is not None
    return found
