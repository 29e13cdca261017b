"""Checks whether two writers recorded the same episodes, because a run was restarted with its seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from rlio.batch.columns import Columns
from rlio.errors import excerpt
from rlio.maintenance.findings import Findings
from rlio.maintenance.shard_scan import Rows, flat_column
from rlio.query.splits import is_drawn_id
from rlio.schemas.schema import Schema

__all__ = ["RepeatCheck"]

#: Ids to remember per writer. The first ids of a repeated run are equal.
_MOST_IDS: Final = 64


@dataclass
class RepeatCheck:
    """Compares the first episodes of the writers.

    Args:
        findings: Receives the writers that begin with an episode of another one.
    """

    findings: Findings
    _seen: set[str] = field(default_factory=set)
    _owners: dict[Any, str] = field(default_factory=dict)

    def add(self, writer: str, schema: Schema, rows: Rows, *, uri: str) -> None:
        """Add rows of a writer. Only the first call per writer counts, so you can call this for all rows."""
        if writer in self._seen:
            return
        self._seen.add(writer)
        for name in _drawn_ids(schema, rows):
            owner = self._owners.setdefault(name, writer)
            if owner != writer:
                self.findings.add(
                    "recorded-twice",
                    f"writers {owner!r} and {writer!r} begin with the same episode, {excerpt(name)}: a run "
                    "was started again with the seed of an earlier one, and recorded the same episodes until "
                    "the two diverged. Give each run its own seed, or resume from the worker's saved state; "
                    f"`rlio trim --before {writer}=ROW` removes the repeated rows",
                    uri=uri,
                    column=Columns.EPS_ID,
                )
                return


def _drawn_ids(schema: Schema, rows: Rows) -> list[Any]:
    """Return the first ids among ``rows`` that were drawn at random (by rlio or as UUIDs), so are unique."""
    found: dict[Any, None] = {}
    for part in rows.parts:
        column = flat_column(schema, part, Columns.EPS_ID)
        for name in () if column is None else column[: 64 * _MOST_IDS].tolist():
            if is_drawn_id(name):
                found.setdefault(name)
    return list(found)[:_MOST_IDS]
