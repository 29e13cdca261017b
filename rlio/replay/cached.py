"""Stores of sources in the cache folder: found, built, or extended by newly recorded rows.

A store holds segments in the order in which they were added. It serves a source if the source's segments are
the first ones of the store. A source with more segments extends the store. Any other source (after shards
were compacted, trimmed or replaced) rebuilds the store, and so does one whose damaged rows were restored:
``on_error="skip"`` leaves them out no longer. The key of a segment changes with its content: another source
under the same URI is never mistaken for this one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlio.errors import CorruptData
from rlio.replay.build import SegmentRows, StoreInput, build, lost_again
from rlio.replay.cache import Build, CacheFolder, Entry
from rlio.replay.memory import FileArrays
from rlio.replay.rows import AddedRows, StoreRows
from rlio.replay.table import ROW_VERSION
from rlio.schemas.schema import Schema, canonical_json
from rlio.source.source import SegmentKey

__all__ = ["open_cached"]

logger: logging.Logger = logging.getLogger("rlio")


@dataclass(frozen=True)
class _Contents:
    """What the builder of a store recorded.

    Attributes:
        parts: What the store has of each segment, in the order in which they were added.
        open: Policy id -> episodes that may continue.
        damage: The damaged places, as `Damage.to_json` gives them.
    """

    parts: dict[SegmentKey, SegmentRows]
    open: Mapping[str, list[Any]]
    damage: list[list[Any]]

    def serves(self, wanted: list[SegmentKey]) -> bool:
        """Whether the segments of a source are exactly the first ones of the store."""
        return set(list(self.parts)[: len(wanted)]) == set(wanted)

    def is_served(self, given: StoreInput) -> bool:
        """Whether it serves a source, and no row that was damaged when it was built can be read again."""
        segments = given.source.segments
        return self.serves([segment.key for segment in segments]) and not self.was_restored(given)

    def was_restored(self, given: StoreInput) -> bool:
        """Whether rows of a source that were damaged when the store was built can be read now."""
        damaged = [one for one in given.source.segments if one.key in self.parts and self.parts[one.key].lost]
        lost = lost_again(given, damaged) if damaged else {}
        return any(rows < self.parts[key].lost for key, rows in lost.items())

    def to_json(self) -> dict[str, Any]:
        """The JSON form for a manifest."""
        return {
            "pieces": [
                [*key, None if added is None else [dict(added.rows), list(added.steps)], lost]
                for key, (added, lost) in self.parts.items()
            ],
            "open": dict(self.open),
            "damage": self.damage,
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> _Contents:
        """Read the form of `to_json`.

        Raises:
            CorruptData: ``state`` has another form.
        """
        try:
            parts: dict[SegmentKey, SegmentRows] = {}
            for path, skip, rows, added, lost in state["pieces"]:
                made = None
                if added is not None:
                    spans = {pid: (first, count) for pid, (first, count) in added[0].items()}
                    made = AddedRows(spans, (added[1][0], added[1][1]))
                parts[SegmentKey(path, skip, rows)] = SegmentRows(made, lost)
            # Stores of earlier versions do not say.
            return cls(parts, state["open"], state.get("damage", []))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CorruptData(
                f"a store's record of its rows is damaged: {error!r}; remove the store"
            ) from error


def open_cached(
    given: StoreInput, schema: Schema, folder: CacheFolder
) -> tuple[StoreRows, list[SegmentRows]]:
    """Open the store of a source; builds or extends it if needed.

    Args:
        given: What to read.
        schema: Schema of its rows.
        folder: The cache folder.

    Returns:
        All rows of the store, and what it has of each segment of the source.

    Raises:
        CorruptData: Rows are damaged.
        CacheError: There is no room, or the folder cannot be used.
        SegmentGone: A segment is missing.
    """
    wanted = [segment.key for segment in given.source.segments]
    entry = _entry(given, schema, folder, pinned=given.source.pinned)
    found = _opened(entry)
    if found is not None and not found[0].serves(wanted) and set(wanted) <= found[0].parts.keys():
        # Meanwhile another process added rows newer than these, which therefore gets its own store.
        entry = _entry(given, schema, folder, pinned=True)
        found = _opened(entry)
    if found is None or not found[0].is_served(given):
        with entry.building(stop=given.stop) as making:
            _make(making, given, schema, wanted)
            # Open the store before releasing the right to build, so that it cannot be evicted in between.
            found = _opened(entry)
    if found is None or not found[0].serves(wanted):
        raise CorruptData(
            "the newly built store is missing or incomplete: remove the folder if it exists, and open again",
            uri=entry.path,
        )
    contents, arrays = found
    given.damage.add_json(contents.damage)
    return StoreRows(schema, capacity=1, arrays=arrays, sealed=True), [contents.parts[key] for key in wanted]


def _opened(entry: Entry) -> tuple[_Contents, FileArrays] | None:
    """The content and the arrays of a store, if it exists."""
    found = entry.reading()
    return None if found is None else (_Contents.from_json(found.manifest.state), found.arrays)


def _entry(given: StoreInput, schema: Schema, folder: CacheFolder, *, pinned: bool) -> Entry:
    """The cache entry of a source; if ``pinned``, of these rows alone."""
    describe = {
        "rows": ROW_VERSION,
        "uri": given.source.uri,
        "schema": schema.text,
        "missing": given.missing,
        "on_error": given.on_error,
        "snapshot": given.source.state_identity if pinned else None,
    }
    key = hashlib.blake2b(canonical_json(describe).encode(), digest_size=16).hexdigest()
    return folder.entry(key, describe)


def _make(making: Build, given: StoreInput, schema: Schema, wanted: list[SegmentKey]) -> None:
    """Build or extend a store, unless another process has done so since."""
    contents = None if making.manifest is None else _Contents.from_json(making.manifest.state)
    if contents is not None and contents.is_served(given):
        return
    if contents is not None and (not contents.parts.keys() <= set(wanted) or contents.was_restored(given)):
        logger.info("%s has changed: rebuilding its store", given.source.uri)
        making.start_over()
        contents = None
    known = {} if contents is None else contents.parts
    segments = [s for s in given.source.segments if s.key not in known]
    rows = StoreRows(schema, capacity=max(len(given.source), 1), arrays=making.arrays)
    for pid, episodes in ({} if contents is None else contents.open).items():
        rows.ingests[pid].open_from_json(episodes)
    given.progress(sum(key.rows for key in known))
    given.damage.add_json([] if contents is None else contents.damage)
    built = build(given, segments, rows)
    parts = known | {s.key: part for s, part in zip(segments, built, strict=True)}
    rows.steps.save()
    going_on = {pid: ingest.open_to_json() for pid, ingest in rows.ingests.items()}
    making.publish(_Contents(parts, going_on, given.damage.to_json()).to_json(), rows=rows.used)
