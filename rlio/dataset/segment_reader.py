"""The live parts of shards, a row group at a time: opened, checked, cut to what is live, filled up.

Not here: in which order they are read (`rlio.readers.group_source`, `rlio.following.follow`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from rlio.batch import Batch, SampleBatch, count_units, split_units
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
    "split_batch",
    "with_step_columns",
]

logger = logging.getLogger("rlio")

T = TypeVar("T")

# Footers of this many shards stay parsed; a window of row groups seldom spans more.
_OPEN_SHARDS = 16

#: Rows of a batch where the user asks for none in particular, if no row group is smaller: large enough that
#: calls cost nothing (2 us of overhead over 4096 rows), small enough that a batch stays in the cache.
OWN_SIZE = 4096


@dataclass(frozen=True)
class GroupOptions:
    """What is read of each group.

    Attributes:
        columns: Logical columns; None: all.
        skip_damage: Whether damage is counted and passed over instead of raised.
        filling: Adds the columns that a shard lacks; None where none may be lacking.
    """

    columns: list[str] | None = None
    skip_damage: bool = False
    filling: Filling | None = None


@dataclass(frozen=True)
class Counting:
    """What readers count: rows, unless there are sequences or several agents."""

    unit: Unit
    by_row: bool


class Span(NamedTuple):
    """The live part of a row group.

    Attributes:
        group: Its number; -1 for a shard that is damaged as a whole, which is one group.
        rows: Rows of the group that are live (of the shard, for a damaged one).
        first: Number of the first of them within the writer.
        units: What readers count of them; 0 where that cannot be known, as all is lost.
        whole: Whether that is all of the group.
    """

    group: int
    rows: range
    first: int
    units: int
    whole: bool

    @property
    def end(self) -> int:
        """Number, within the writer, of the row after the last."""
        return self.first + len(self.rows)


class ShardGone(Exception):
    """A shard that was listed is not there: it was compacted and collected, or it is lost. List again."""

    def __init__(self, segment: Segment, error: DataNotFound) -> None:
        super().__init__(segment.ref.path)
        self.segment = segment
        self.error = error


class GoneShards:
    """Shards that are listed and not there: each is looked for in a few listings, and then it is lost.

    Args:
        storage: The root.
        on_error: What to do with a shard that is lost: "raise", or "skip": its rows are damage.

    Attributes:
        given_up: Paths of the shards that are lost.
    """

    def __init__(self, storage: Storage, on_error: Literal["raise", "skip"]) -> None:
        self.given_up: set[str] = set()
        self._storage = storage
        self._on_error = on_error
        self._attempts: Counter[str] = Counter()

    def miss(self, gone: ShardGone) -> None:
        """Note that a shard is gone, before the caller lists again; wait where that has not helped before.

        Raises:
            HoleError: Listings have named it too often.
        """
        path = gone.segment.ref.path
        self._attempts[path] += 1
        attempts, patience = self._attempts[path], listing.HOLE_CHECK
        if attempts <= patience.listings:
            logger.info("%s is gone: listing again", self._storage.uri_of(path))
            if attempts > 1:
                patience.sleep(patience.seconds)
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
        dataset: Opens shards; its schemas are those that are known.
        options: What is read.
        counting: What is counted.
        given_up: Paths of shards that are listed and, in several attempts, not there: damage; may grow.
        learn: Called where a shard has a schema that is not known; may replace `dataset` and `options`.
        weigh: Says how many rows count as lost with a span, or, if that is None, with a whole segment.
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
        self.skipped = 0
        self._given_up = given_up
        self._learn = learn
        self._weigh = weigh or _all_rows
        self._open: OpenFiles[str, OpenShard] = OpenFiles(_OPEN_SHARDS)
        self._damaged: set[tuple[str, int]] = set()

    def with_options(self, options: GroupOptions, counting: Counting) -> SegmentReader:
        """A reader of other columns that shares the open shards: each footer is read once."""
        other = SegmentReader(self.dataset, options, counting, given_up=self._given_up)
        other._open = self._open
        return other

    def open(self, segment: Segment) -> OpenShard | None:
        """The shard of a segment; None if it is damaged as a whole, which is then counted.

        Raises:
            ShardGone: It is not there.
        """
        path = segment.ref.path
        shard = self._open.get(path)
        if shard is not None:
            return shard
        if (path, -1) in self._damaged:
            return None  # Its rows are passed over batch by batch, and looked at once.
        try:
            shard = self.dataset.open_shard(segment)
        except (CorruptData, DataNotFound) as error:
            self._lose(segment, -1, self._weigh(segment, None), error)
            return None
        self._check_schema(shard, segment)
        return self._open.add(path, shard)

    def _check_schema(self, shard: OpenShard, segment: Segment) -> None:
        """Raise where the schemas by which units are told apart do not have this shard's."""
        if shard.schema.hash not in self.dataset.schemas and self._learn is not None:
            self._learn()
        if shard.schema.hash not in self.dataset.schemas:
            raise CorruptData(
                f"its schema {shard.schema.hash} is not under {SCHEMA_DIR}/: restore {SCHEMA_DIR}/"
                f"{shard.schema.hash}.json; the shard's footer holds its text",
                uri=self.dataset.storage.uri_of(segment.ref.path),
            )

    def spans(self, segment: Segment) -> list[Span]:
        """The groups of a segment that have live rows.

        A shard that is damaged as a whole is one group of its rows: what is lost is counted when reached.

        Raises:
            ShardGone: The shard is not there.
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
        """The units of a part of a group; only its rows can tell."""
        if self.counting.by_row:
            return len(rows)
        try:
            part = shard.read(group, columns=self._columns(shard), rows=rows)
        except (CorruptData, DataNotFound) as error:
            self._lose(segment, group, len(rows), error)
            return 0
        return count_units(part, self.counting.unit)

    def read(self, segment: Segment, span: Span) -> Batch | None:
        """The units of a span, filled up as the options say; None if they are lost.

        Raises:
            ShardGone: The shard is not there.
        """
        folded = self.read_folded(segment, span)
        return None if folded is None else unfold([folded])

    def read_folded(self, segment: Segment, span: Span) -> Folded | None:
        """`read`, but that frame stacks are not looked up yet."""
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
        """The batch with every column that is known by now, if columns are filled."""
        filling = self.options.filling
        return batch if filling is None else filling.fill(batch)

    def _check(self, batch: Batch, span: Span, segment: Segment) -> None:
        """Positions count what the shard says about its groups, so that it must be so."""
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
        """The wanted columns; with filling, those that this shard has."""
        columns = self.options.columns
        if columns is None or self.options.filling is None:
            return columns
        has = [column for policy in shard.schema.policies.values() for column in policy.columns]
        # Rows of which everything is filled are counted by a column that goes again.
        found = [column for column in columns if column in has]
        return found or [column for column in has if not is_per_sequence(column)][:1]

    def _lose(self, segment: Segment, group: int, rows: int, error: CorruptData | DataNotFound) -> None:
        """Count lost rows once, or raise.

        Raises:
            ShardGone: The shard is not there, and another listing may show where its rows are.
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
    """Loads in a background thread what will be wanted next, one item ahead."""

    def __init__(self, load: Callable[[Any], T]) -> None:
        self._load = load
        self._thread = BackgroundThread("rlio-ahead")
        #: What was announced, and what comes of it.
        self._announced: tuple[Hashable, Future[T]] | None = None

    def get(self, key: Any) -> T:
        """The item of ``key``, from the background if it was announced."""
        announced = self._take()
        if announced is not None:
            if announced[0] == key:
                return announced[1].result()
            wait([announced[1]])  # The loader is not to run in two threads at once.
        return self._load(key)

    def _take(self) -> tuple[Hashable, Future[T]] | None:
        announced, self._announced = self._announced, None
        return None if self._thread.was_forked() else announced

    def announce(self, key: Any) -> None:
        """Begin to load the item of ``key``."""
        self._announced = key, self._thread.submit(self._load, key)

    def forget(self) -> None:
        """Drop what was announced, once it is loaded: it is not wanted any more."""
        announced = self._take()
        if announced is not None:
            wait([announced[1]])

    def close(self) -> None:
        """End the thread."""
        self._announced = None
        self._thread.close()


def counting_of(dataset: DatasetSnapshot, columns: list[str] | None) -> Counting:
    """What is counted of a data set, of which only ``columns`` are read.

    Raises:
        OptionError: The columns by which units are told apart are not among them.
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
    """Refuse a choice of columns without those by which units are told apart."""
    if columns is None:
        return
    states = [name for name in columns if is_per_sequence(name)]
    if states and Columns.SEQ_LENS not in columns:
        raise OptionError(
            f"columns={columns}: {states[0]} has a row a sequence; add 'seq_lens', or leave it out"
        )
    for schema in dataset.schemas.values():
        for policy in schema.policies.values() if schema.multi_agent else ():
            for name in (Columns.EPS_ID, Columns.T):
                if name in policy.columns and name not in columns:
                    raise OptionError(
                        f"columns={columns}: joint steps of several agents are told apart by eps_id and t; "
                        f"add {name!r}"
                    )


def with_step_columns(dataset: DatasetSnapshot, columns: list[str]) -> list[str]:
    """The columns, and those by which joint steps of several agents are told apart."""
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
    """What to read of each group, by the rule for columns that some writers lack; see `common_columns`."""
    shared = common_columns(dataset, missing=missing, wanted=options.columns)
    chosen = options.columns if missing == "fill" else shared
    filling = Filling(dataset.schemas.values(), columns=chosen)
    return GroupOptions(
        columns=chosen,
        skip_damage=options.on_error == "skip",
        filling=filling if missing == "fill" or filling.adds_validity else None,
    )


def own_size(dataset: DatasetSnapshot) -> int:
    """Units of a batch where the user asks for none in particular."""
    return min([OWN_SIZE, *(schema.batch_rows for schema in dataset.schemas.values())])


def split_batch(batch: Batch, start: int, stop: int, unit: Unit) -> tuple[Batch, Batch]:
    """Units ``start`` to ``stop - 1`` of a batch, and those after them, as views."""
    if unit == "steps" and isinstance(batch, SampleBatch):
        return (batch if start == 0 and stop == len(batch) else batch[start:stop]), batch[stop:]
    rest = split_units(batch, start, unit)[1] if start else batch
    return split_units(rest, stop - start, unit)
