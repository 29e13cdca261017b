"""Epochs over a source that is served from a store: `DatasetReader` with a cache.

The store is built in the background as soon as the reader is made; the first batch waits for the store.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final, Literal, TypeAlias

from rlio.batch.columns import Columns
from rlio.errors import LedgerError, OptionError
from rlio.query.positions import columns_digest
from rlio.read_options import ReadOptions
from rlio.replay.draws import Draw, Units
from rlio.replay.epochs import StorePass
from rlio.replay.store import ReplayStore
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.schema import Schema
from rlio.source.damage import Damage
from rlio.source.selection import common_columns, counting_of, own_size
from rlio.source.source import Source

__all__ = ["Cache", "Kept", "StoredPass", "choose_cache"]

logger: logging.Logger = logging.getLogger("rlio")

#: Where a pass keeps its rows for random access.
Kept: TypeAlias = Literal["memory", "disk", "none"]
#: The user's choice of place.
Cache: TypeAlias = Literal["auto", "memory", "disk", "none"]

# With cache="auto": the largest stores that are kept in memory, and on disk. They are the same on every
# machine, because the order of rows depends on them.
_MEMORY_BYTES: Final = 2 << 30
_DISK_BYTES: Final = 64 << 30
_DRAWS: Final = "draw, derive, views, indexes, policy and filters of episode columns"
# Default number of sequences, or episodes, in a batch.
_OWN_SEQUENCES: Final = 32


class StoredPass(StorePass):
    """Reads epochs of a source from a store of it.

    Args:
        source: The source.
        options: The read options.
        draw: What to draw.
        cache: Where to keep the rows.
        missing: The rule for columns that only some writers have.
    """

    def __init__(
        self,
        source: Source,
        options: ReadOptions,
        *,
        draw: Draw,
        cache: Literal["memory", "disk"],
        missing: Literal["error", "drop", "fill"],
    ) -> None:
        self.source = source
        self.cache: Kept = cache
        common_columns(source, missing=missing, wanted=options.columns)
        known = {name for names in source.columns.values() for name in names}
        kept = draw.needs(known) if cache == "memory" else None
        store = ReplayStore.of(
            source,
            cache=cache,
            # A store on disk is shared by all readers of the data.
            columns=None if kept is None else sorted(kept),
            missing=missing,
            on_error=options.on_error,
            wait=False,
        )
        also = {"columns": columns_digest(options), "on_error": options.on_error, "missing": missing}
        usual = own_size(source) if draw.by_row else _OWN_SEQUENCES
        super().__init__(store, draw, options, usual=usual, also=also)

    def _open(self) -> Units:
        """The units, once the store is built; checks the store's rows against the shards' names."""
        units = super()._open()
        named = len(self.source) + sum(rows for _, rows in self.source.lost_rows())
        if len(self.store) + self.store.skipped != named:
            raise LedgerError(
                f"the data set has {named} rows, as the shards' names say, but {len(self.store)} were "
                f"stored and {self.store.skipped} are lost: this is a bug of rlio, please report it",
                uri=self.source.uri,
            )
        return units

    @property
    def skipped(self) -> int:
        """Rows lost to damage, each counted once; waits for the store.

        A store that could not be built has lost none: a sample raises its error.
        """
        self.store.wait_ended()
        return self.store.skipped

    @property
    def damage(self) -> Damage:
        """The damaged places; waits for the store."""
        self.store.wait_ended()
        return self.store.damage

    def close(self) -> None:
        """Close the store, and end its threads."""
        super().close()
        self.store.close()


def choose_cache(source: Source, options: ReadOptions, draw: Draw, cache: Cache) -> Kept:
    """Choose where the rows of a source are kept, by the options and the size alone.

    Args:
        source: The source.
        options: The read options.
        draw: What to draw.
        cache: The user's choice.

    Raises:
        OptionError: The user's choice does not fit the draw or the data.
    """
    plain = Draw(columns=draw.columns, gamma=draw.gamma)  # A discount needs no store by itself.
    chooses = draw != plain
    recorded = counting_of(source, None)
    if recorded.unit == "sequences" and (chooses or cache in ("memory", "disk")):
        raise OptionError(
            f"the data was recorded in sequences (seq_lens), which are served unchanged: leave out "
            f"{_DRAWS} and filter; also cache, unless it is 'none'"
        )
    known = {name for names in source.columns.values() for name in names}
    needs_store = replace(draw, filter=None) != plain or bool(draw.derived(known))
    if cache == "none" and needs_store:
        raise OptionError(f"{_DRAWS} need a store: pass cache='memory' or 'disk', not 'none'")
    if cache == "none" and draw.filter is not None and not recorded.by_row:
        raise OptionError(
            "filter with cache='none' selects rows, but this data has several agents and is read in joint "
            "steps: pass cache='memory' or 'disk'"
        )
    if cache != "auto":
        return cache
    size = len(source) * max(map(_row_bytes, source.schemas.values()), default=0)
    chosen: Kept
    if not chooses and (recorded.unit == "sequences" or not options.shuffle):
        chosen = "none"  # In recorded order, decoding during reading is as fast and takes no room.
    elif size <= _MEMORY_BYTES:
        chosen = "memory"
    elif size <= _DISK_BYTES or needs_store or (chooses and not recorded.by_row):
        chosen = "disk"
    else:
        chosen = "none"
    logger.info("%s: cache='auto' is %r, for a store of %d bytes", source.uri, chosen, size)
    return chosen


def _row_bytes(schema: Schema) -> int:
    """Approximate bytes of a row in a store: of the widest policy, with each frame counted once."""
    return max(map(_policy_bytes, schema.policies.values()), default=0)


def _policy_bytes(policy: PolicySchema) -> int:
    linked = {new_obs.physical for _, new_obs in policy.linked}
    total = 0
    for leaf in policy.per_row:
        wide = leaf.spec.row_bytes > 1024
        if wide and leaf.physical in linked:
            continue  # It is the next row's obs.
        depth = 1 if leaf.spec.stack is None or leaf.column != Columns.OBS else leaf.spec.stack.depth
        total += leaf.spec.row_bytes // depth
    return total
