"""Reads the live parts of shards, one row group at a time: opens, checks, cuts and fills them.

`rlio.readers.group_source` and `rlio.following.follow` decide the order of reading.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from rlio.batch import Batch, count_units
from rlio.batch.columns import Columns, is_per_sequence
from rlio.dataset import listing
from rlio.dataset.listing import Segment
from rlio.dataset.names import SCHEMA_DIR
from rlio.dataset.shards import OpenShard
from rlio.dataset.snapshot import DatasetSnapshot, common_columns
from rlio.errors import CorruptData, DataNotFound, HoleError, OptionError
from rlio.reader import Unit
from rlio.readers.read_options import ReadOptions
from rlio.schemas.filling import Filling
from rlio.schemas.folded import Folded, unfold
from rlio.schemas.schema import column_of_name, with_validity
from rlio.storage.filesystem import Storage
from rlio.storage.open_files import OpenFiles
from rlio.support.forks import BackgroundThread

__all__ = [
    "Ahead",
    "Counting",
    "GoneShards",
    "GroupOptions",
    "SegmentReader",
    "ShardGone",
    "Span",
    "counting_of",
    "group_options",
    "own_size",
    "with_step_columns",
]

logger: logging.Logger = logging.getLogger("rlio")

T = TypeVar("T")

# The footers of this many shards stay parsed; a window of row groups seldom spans more.
_OPEN_SHARDS = 16

#: Rows of a batch if the user gives no size and no row group is smaller. Large enough that calls cost nothing
#: (2 us of overhead per 4096 rows), small enough that a batch stays in the cache.
OWN_SIZE = 4096


@dataclass(frozen=True)
class GroupOptions:
    """What to read of each group.

    Attributes:
        columns: Logical columns; None: all.
        skip_damage: Whether damage is counted and skipped instead of raised.
        filling: Adds the columns that a shard lacks; None if no column may be missing.
    """

    columns: list[str] | None = None
    skip_damage: bool = False
    filling: Filling | None = None


@dataclass(frozen=True)
class Counting:
    """The unit that readers count: rows, unless the data has sequences or several agents."""

    unit: Unit
    by_row: bool


class Span(NamedTuple):
    """The live part of a row group.

    Attributes:
        group: Number of the group; -1 for a shard that is damaged as a whole, which is one group.
        rows: Live rows of the group (of the shard, for a damaged one).
        first: Number of the first live row within the writer.
        units: Number of units in these rows; 0 if unknown, because all are lost.
        whole: Whether these are all rows of the group.
    """

    group: int
    rows: range
    first: int
    units: int
    whole: bool

    @property
    def end(self) -> int:
        """Number, within the writer, of the row after the last one."""
        return self.first + len(self.rows)


class ShardGone(Exception):
    """A listed shard is missing: it was compacted and collected, or it is lost. List again."""

    def __init__(self, segment: Segment, error: DataNotFound) -> None:
        super().__init__(segment.ref.path)
        self.segment = segment
        self.error = error


class GoneShards:
    """Listed shards that are missing: each is looked for in a few listings, then counts as lost.

    Args:
        storage: The root.
        on_error: What to do with a lost shard: "raise", or "skip" to treat its rows as damage.

    Attributes:
        given_up: Paths of the lost shards.
    """

    def __init__(self, storage: Storage, on_error: Literal["raise", "skip"]) -> None:
        self.given_up: set[str] = set()
        self._storage = storage
        self._on_error = on_error
        self._attempts: Counter[str] = Counter()

    def miss(self, gone: ShardGone) -> None:
        """Record a missing shard before the caller lists again. Waits from the second time on.

        Raises:
            HoleError: Too many listings have named the missing shard.
        """
        path = gone.segment.ref.path
        self._attempts[path] += 1
        attempts, hole_check = self._attempts[path], listing.HOLE_CHECK
        if attempts <= hole_check.listings:
            logger.info("%s is gone: listing again", self._storage.uri_of(path))
            if attempts > 1:
                hole_check.sleep(hole_check.seconds)
        elif self._on_error == "skip":
            self.given_up.add(path)
        else:
            raise HoleError(
                f"the shard is listed and is not there, in {attempts} attempts: restore it, or read with "
                "on_error='skip'",
                uri=self._storage.uri_of(path),
            ) from gone.error

    def forget(self) -> None:
        """Count attempts from 0 again."""
        self._attempts.clear()


class SegmentReader:
    """Opens shards and reads their groups; used from one thread at a time.

    Args:
        dataset: Opens shards; has the known schemas.
        options: What to read.
        counting: What to count.
        given_up: Paths of shards that are listed but were missing in several attempts, so count as damage;
            may grow.
        learn: Called if the schema of a shard is unknown; may replace `dataset` and `options`.
        weigh: Returns how many rows count as lost with a span, or, for None, with a whole segment.
    """

    def __init__(
        self,
        dataset: DatasetSnapshot,
        options: GroupOptions,
        counting: Counting,
        *,
        given_up: set[str],
        learn: Callable[[], object] | None = None,
        weigh: Callable[[Segment, Span | None], int] | None = None,
    ) -> None:
        self.dataset = dataset
        self.options = options
        self.counting = counting
        #: Rows lost to damage.
        self.skipped: int = 0
        self._given_up = given_up
        self._learn = learn
        self._weigh = weigh or _all_rows
        self._open: OpenFiles[str, OpenShard] = OpenFiles(_OPEN_SHARDS)
        self._damaged: set[tuple[str, int]] = set()

    def with_options(self, options: GroupOptions, counting: Counting) -> SegmentReader:
        """Return a reader of other columns that shares the open shards, so each footer is read once."""
        other = SegmentReader(self.dataset, options, counting, given_up=self._given_up)
        other._open = self._open
        return other

    def open(self, segment: Segment) -> OpenShard | None:
        """Open the shard of a segment; None if the whole shard is damaged, which is then counted.

        Raises:
            ShardGone: The shard is missing.
        """
        path = segment.ref.path
        shard = self._open.get(path)
        if shard is not None:
            return shard
        if (path, -1) in self._damaged:
            return None  # Its rows are skipped batch by batch, but it is opened only once.
        try:
            shard = self.dataset.open_shard(segment)
        except (CorruptData, DataNotFound) as error:
            self._lose(segment, -1, self._weigh(segment, None), error)
            return None
        self._check_schema(shard, segment)
        return self._open.add(path, shard)

    def _check_schema(self, shard: OpenShard, segment: Segment) -> None:
        """Raise if the known schemas, which define the units, do not include this shard's."""
        if shard.schema.hash not in self.dataset.schemas and self._learn is not None:
            self._learn()
        if shard.schema.hash not in self.dataset.schemas:
            raise CorruptData(
                f"its schema {shard.schema.hash} is not under {SCHEMA_DIR}/: restore {SCHEMA_DIR}/"
                f"{shard.schema.hash}.json; the shard's footer holds its text",
                uri=self.dataset.storage.uri_of(segment.ref.path),
            )

    def spans(self, segment: Segment) -> list[Span]:
        """Return the groups of a segment that have live rows.

        A shard that is damaged as a whole is one group. Its lost rows are counted when a reader reaches them.

        Raises:
            ShardGone: The shard is missing.
        """
        shard = self.open(segment)
        live = range(segment.skip, segment.skip + segment.rows)
        if shard is None:
            units = segment.rows if self.counting.by_row else 0
            return [Span(-1, live, segment.first, units, False)]
        found = []
        starts = [0, *accumulate(shard.rows)]
        for group, (start, stop) in enumerate(pairwise(starts)):
            first, last = max(start, live.start), min(stop, live.stop)
            if first >= last:
                continue
            rows = range(first - start, last - start)
            whole = len(rows) == stop - start
            number = segment.ref.name.first + first
            units = shard.units[group] if whole else self._count(segment, shard, group, rows)
            found.append(Span(group, rows, number, len(rows) if self.counting.by_row else units, whole))
        return found

    def _count(self, segment: Segment, shard: OpenShard, group: int, rows: range) -> int:
        """Count the units of a part of a group; this needs its rows."""
        if self.counting.by_row:
            return len(rows)
        try:
            part = shard.read(group, columns=self._columns(shard), rows=rows)
        except (CorruptData, DataNotFound) as error:
            self._lose(segment, group, len(rows), error)
            return 0
        return count_units(part, self.counting.unit)

    def read(self, segment: Segment, span: Span) -> Batch | None:
        """Read the units of a span, with missing columns filled; None if they are lost.

        Raises:
            ShardGone: The shard is missing.
        """
        folded = self.read_folded(segment, span)
        return None if folded is None else unfold([folded])

    def read_folded(self, segment: Segment, span: Span) -> Folded | None:
        """Read like `read`, but without looking up frame stacks yet."""
        shard = self.open(segment)
        if shard is None or span.group < 0:
            return None
        try:
            folded = shard.read_folded(
                span.group, columns=self._columns(shard), rows=None if span.whole else span.rows
            )
            self._check(folded.batch, span, segment)
        except (CorruptData, DataNotFound) as error:
            self._lose(segment, span.group, self._weigh(segment, span), error)
            return None
        return replace(folded, batch=self.filled(folded.batch))

    def filled(self, batch: Batch) -> Batch:
        """Return the batch with every column known so far, if columns are filled."""
        filling = self.options.filling
        return batch if filling is None else filling.fill(batch)

    def _check(self, batch: Batch, span: Span, segment: Segment) -> None:
        """Check the counts that the shard states for its group, because positions rely on them."""
        unit = self.counting.unit
        found = count_units(batch, unit)
        if found != span.units:
            raise CorruptData(
                f"the row group has {found} {unit} and its shard says {span.units}",
                uri=self.dataset.storage.uri_of(segment.ref.path),
                record=span.group,
            )
        if batch.agent_steps() != len(span.rows):
            raise CorruptData(
                f"the row group has {batch.agent_steps()} rows and its shard says {len(span.rows)}",
                uri=self.dataset.storage.uri_of(segment.ref.path),
                record=span.group,
            )

    def _columns(self, shard: OpenShard) -> list[str] | None:
        """Return the wanted columns; with filling, those that this shard has."""
        columns = self.options.columns
        if columns is None or self.options.filling is None:
            return columns
        policies = shard.schema.policies.values()
        # If all wanted columns are filled, one other column is read to count the rows, and dropped.
        found = [name for name in columns if any(name in policy.names for policy in policies)]
        has = [column for policy in policies for column in policy.columns]
        return found or [column for column in has if not is_per_sequence(column)][:1]

    def _lose(self, segment: Segment, group: int, rows: int, error: CorruptData | DataNotFound) -> None:
        """Count lost rows once, or raise.

        Raises:
            ShardGone: The shard is missing, and another listing may show where its rows are.
        """
        path = segment.ref.path
        if isinstance(error, DataNotFound) and path not in self._given_up:
            raise ShardGone(segment, error) from error
        if not self.options.skip_damage:
            raise error
        if (path, group) not in self._damaged:
            self._damaged.add((path, group))
            self.skipped += rows
            logger.warning("skipped %d rows: %s", rows, error)


def _all_rows(segment: Segment, span: Span | None) -> int:
    return segment.rows if span is None else len(span.rows)


class Ahead(Generic[T]):
    """Loads the next wanted item in a background thread, one item ahead."""

    def __init__(self, load: Callable[[Any], T]) -> None:
        self._load = load
        self._thread = BackgroundThread("rlio-ahead")
        #: The announced key, and its future result.
        self._announced: tuple[Hashable, Future[T]] | None = None

    def get(self, key: Any) -> T:
        """Return the item of ``key``, from the background if it was announced."""
        announced = self._take()
        if announced is not None:
            if announced[0] == key:
                return announced[1].result()
            wait([announced[1]])  # The loader must not run in two threads at once.
        return self._load(key)

    def _take(self) -> tuple[Hashable, Future[T]] | None:
        announced, self._announced = self._announced, None
        return None if self._thread.was_forked() else announced

    def announce(self, key: Any) -> None:
        """Start to load the item of ``key``."""
        self._announced = key, self._thread.submit(self._load, key)

    def forget(self) -> None:
        """Drop the announced item after it is loaded, because it is no longer wanted."""
        announced = self._take()
        if announced is not None:
            wait([announced[1]])

    def close(self) -> None:
        """End the thread."""
        self._announced = None
        self._thread.close()


def counting_of(dataset: DatasetSnapshot, columns: list[str] | None) -> Counting:
    """Return what to count in a data set if only ``columns`` are read.

    Raises:
        OptionError: ``columns`` lacks columns that identify the units.
    """
    schemas = dataset.schemas.values()
    joint = any(schema.multi_agent for schema in schemas)
    sequences = any(
        policy.has_sequences and (columns is None or Columns.SEQ_LENS in columns)
        for schema in schemas
        for policy in schema.policies.values()
    )
    _check_columns(dataset, columns)
    unit: Unit = "sequences" if sequences and not joint else "steps"
    return Counting(unit, not joint and not sequences)


def _check_columns(dataset: DatasetSnapshot, columns: list[str] | None) -> None:
    """Refuse ``columns`` that lack the columns that identify the units."""
    if columns is None:
        return
    states = [name for name in columns if is_per_sequence(column_of_name(name))]
    if states and Columns.SEQ_LENS not in columns:
        raise OptionError(
            f"columns={columns}: {states[0]} has one row per sequence; add 'seq_lens', or leave it out"
        )
    for name in with_step_columns(dataset, columns)[len(columns) :]:
        raise OptionError(
            f"columns={columns}: eps_id and t identify the joint steps of several agents; add {name!r}"
        )


def with_step_columns(dataset: DatasetSnapshot, columns: list[str]) -> list[str]:
    """Return the columns, plus those that identify the joint steps of several agents."""
    known = {
        name
        for schema in dataset.schemas.values()
        for policy in schema.policies.values()
        if schema.multi_agent
        for name in policy.columns
    }
    return [*columns, *(n for n in (Columns.EPS_ID, Columns.T) if n in known and n not in columns)]


def group_options(
    dataset: DatasetSnapshot, options: ReadOptions, missing: Literal["error", "drop", "fill"]
) -> GroupOptions:
    """Return what to read of each group, under the rule for missing columns; see `common_columns`.

    Columns with ``new_obs`` bring ``new_obs_valid`` if a schema has it: see `with_validity`.
    """
    wanted = options.columns
    if wanted is not None:
        policies = [policy for schema in dataset.schemas.values() for policy in schema.policies.values()]
        wanted = list(with_validity(policies, wanted))
    shared = common_columns(dataset, missing=missing, wanted=wanted)
    chosen = wanted if missing == "fill" else shared
    filling = Filling(dataset.schemas.values(), columns=chosen)
    return GroupOptions(
        columns=chosen,
        skip_damage=options.on_error == "skip",
        filling=filling if missing == "fill" or filling.adds_validity else None,
    )


def own_size(dataset: DatasetSnapshot) -> int:
    """Return the units of a batch if the user gives no size."""
    return min([OWN_SIZE, *(schema.batch_rows for schema in dataset.schemas.values())])
