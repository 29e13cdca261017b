"""Whether two writers recorded the same episodes: a run that was started again with its seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from rlio.batch.columns import Columns
from rlio.errors import excerpt
from rlio.maintenance.findings import Findings
from rlio.maintenance.shard_scan import Rows, flat_column
from rlio.schemas.schema import Schema

__all__ = ["RepeatCheck"]

#: Ids that are remembered of each writer, which begin alike where a run is repeated.
_MOST_IDS: Final = 64
# Ids below, and shorter texts, are counters and names, which two writers may both use for different episodes.
_LEAST_NUMBER: Final = 1 << 32
_LEAST_LETTERS: Final = 16


@dataclass
class RepeatCheck:
    """Compares the episodes with which writers begin.

    Args:
        findings: Takes writers that begin with an episode of another one.
    """

    findings: Findings
    _seen: set[str] = field(default_factory=set)
    _owners: dict[Any, str] = field(default_factory=dict)

    def add(self, writer: str, schema: Schema, rows: Rows, *, uri: str) -> None:
        """Take rows of a writer; only its first ones count, so that this may be called for all."""
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
                    "the two parted. Give each run its own seed, or go on from the worker's saved state; "
                    f"`rlio trim --before {writer}=ROW` removes what is there twice",
                    uri=uri,
                    column=Columns.EPS_ID,
                )
                return


def _drawn_ids(schema: Schema, rows: Rows) -> list[Any]:
    """The first ids among ``rows`` that were drawn at random, by us or as UUIDs: one names one episode."""
    found: dict[Any, None] = {}
    for part in rows.parts:
        column = flat_column(schema, part, Columns.EPS_ID)
        for name in () if column is None else column[: 64 * _MOST_IDS].tolist():
            if len(name) >= _LEAST_LETTERS if isinstance(name, str) else _is_large(name):
                found.setdefault(name)
    return list(found)[:_MOST_IDS]


def _is_large(name: object) -> bool:
    return isinstance(name, int) and abs(name) >= _LEAST_NUMBER
