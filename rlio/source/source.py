"""`Source`: experience that is stored. The contract between the formats and the engine.

A format implements it and owns its layout. The engine reads nothing else: stores, epochs, orders, ranks,
filters, splits, statistics, skipping and resuming exist once, for every source (docs/design/sources.md).

    Source           its schemas and segments are known before any row is read
      segments       rows of one writer in one file: listed, not opened
        open         the segment's schema, the sizes of its groups, and their bounds
          groups     rows that are decoded together, and damaged together

The rows of a source are ordered: segment after segment, group after group. They are numbered within each
writer. An instance and what it opens are used from one thread at a time.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeAlias

from rlio.catalog.listing import HoleCheck, SegmentKey
from rlio.errors import CorruptData, HoleError, OptionError, SchemaConflict, SchemaError, excerpt
from rlio.schemas.folded import Folded
from rlio.schemas.schema import Schema, canonical_json
from rlio.schemas.spaces import space_from_json
from rlio.schemas.streams import Streams
from rlio.source.row_streams import read_streams, without_rewards
from rlio.storage.parallel import Plan, Range

if TYPE_CHECKING:
    from rlio.schemas.parquet_statistics import Bounds

__all__ = [
    "Coming",
    "EpisodeInfo",
    "FileSource",
    "HoleCheck",
    "OpenSegment",
    "SegmentKey",
    "Source",
    "StoredSegment",
]


#: Segments that are read in turn, each with the numbers of its groups that are; None: all, empty: it is only
#: opened.
Coming: TypeAlias = "Iterable[tuple[StoredSegment, Sequence[int] | None]]"


class Source(ABC):
    """Stored experience: which rows there are, and how to read them. See the module."""

    #: Whether these rows stay the same: a chosen snapshot, or files that nobody appends to.
    pinned: bool = True
    #: Rows that a shuffle without a store mixes, if not four times those of the largest group.
    window_rows: int | None = None
    #: Rows of the groups of every segment, apart from shorter ones; None: known only once one is opened.
    stated_group_rows: int | None = None
    #: Whether pictures that are stored as PNG or JPEG stay so (`rlio.batch.encoded_picture`), for
    #: conversions. Set it before a row is read.
    keeps_pictures: bool = False
    #: Whether reading it keeps Python's lock, as h5py does: a thread that reads ahead then gains nothing,
    #: unless the caller computes or waits meanwhile.
    holds_gil: bool = False
    #: Sentences about what is not read, for reports.
    notes: Sequence[str] = ()

    # ---- what is stored, known before any row is read ----

    @property
    @abstractmethod
    def uri(self) -> str:
        """Where it is stored, for messages and states."""

    @property
    @abstractmethod
    def schemas(self) -> Mapping[str, Schema]:
        """Hash -> schema: of each policy, the columns, their dtypes and shapes, and its spaces if known."""

    @property
    @abstractmethod
    def segments(self) -> Sequence[StoredSegment]:
        """The segments, in order; do not modify."""

    @property
    @abstractmethod
    def state_identity(self) -> str:
        """A short text that names the rows; equal on every host that has them. Saved states hold it."""

    @property
    def content_identity(self) -> str:
        """A digest of the keys of all segments; it changes with the content."""
        keys = [list(segment.key) for segment in self.segments]
        return hashlib.blake2b(canonical_json(keys).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        """Number of rows."""
        return sum(segment.rows for segment in self.segments)

    def episode_parts(self) -> Iterator[EpisodeInfo] | None:
        """The episodes in each segment, if they are known without reading rows; None: only the rows tell."""
        return None

    # ---- reading ----

    @abstractmethod
    def open_segment(self, segment: StoredSegment) -> OpenSegment:
        """Open one of `segments`.

        Raises:
            CorruptData: It is damaged as a whole.
            DataNotFound: It is missing.
        """

    def plan(self) -> Plan | None:
        """A plan for one reader of segments: see `ranges`. None: requests side by side save nothing."""
        return None

    def opened_in_turn(
        self, segments: Sequence[StoredSegment], *, footers: bool = False
    ) -> Iterator[tuple[StoredSegment, OpenSegment]]:
        """Segments that are opened and read one after the other; ``footers``: their rows are not read."""
        plan, groups = self.plan(), range(0) if footers else None
        if plan is not None:
            plan.expect(wanted for segment in segments for wanted in self.ranges(segment, None, groups))
        for segment in segments:
            yield segment, self.open_segment(segment)

    def ranges(
        self, segment: StoredSegment, opened: OpenSegment | None, groups: Sequence[int] | None
    ) -> Sequence[Range]:
        """What will be fetched to open a segment, or for some of its groups once it is opened; see `plan`.

        Args:
            segment: One of `segments`.
            opened: The opened segment; None: it is not open.
            groups: The groups; None: all; empty: it is only opened.
        """
        return ()

    def expect(  # noqa: B027 - optional hook
        self, coming: Coming, columns: Sequence[str] | None
    ) -> None:
        """State what is read next, where requests take a round trip and there is no `plan`: a hint.

        Args:
            coming: Segments in order, each with its groups that are read (None: all); taken as far as there
                is room, also by later reads. In place of what was stated before; (): it is not known any
                more, which any thread may say.
            columns: The columns that are read; None: all.
        """

    def stated_groups(self, segment: StoredSegment) -> Sequence[int] | None:
        """Rows of each group of a segment's file, if that is stated without opening it; None: open it.

        Orders rely on them and are the same if the file has others, which then take longer to read.
        """
        return None

    def streams(self, opened: OpenSegment, segment: StoredSegment) -> Streams:
        """The episodes in a segment, with the sums of their rewards: NaN if the rows have none.

        Reads the columns that tell them apart, group by group. Not that of other rows of the file.

        Args:
            opened: What `open_segment` returned.
            segment: One of `segments`.

        Raises:
            CorruptData: Rows are damaged.
            DataNotFound: The segment is missing.
        """
        return without_rewards(opened, read_streams(opened, segment))

    @abstractmethod
    def uri_of(self, path: str) -> str:
        """The URI of the `StoredSegment.path` of a segment, for messages."""

    # ---- rows that are missing or moved ----

    @property
    def hole_check(self) -> HoleCheck:
        """How often to look for a missing segment."""
        return HoleCheck(listings=0)

    def listed_again(self) -> Self:
        """The same rows, looked for again, because a segment is missing: they may be in another one now."""
        return self

    def lost_rows(self) -> list[tuple[str, int]]:
        """Rows that should exist and are in no segment: (where, number of rows)."""
        return []

    def check_complete(self) -> None:
        """Raise CorruptData (HoleError) if `lost_rows` has any."""
        for where, rows in self.lost_rows():
            raise HoleError(f"{rows} rows are missing: {where}; read with on_error='skip'", uri=self.uri)

    def check_schema(self, schema: Schema, segment: StoredSegment) -> None:
        """Raise CorruptData unless `schemas`, which define the units, have that of an opened segment."""
        if schema.hash not in self.schemas:
            raise CorruptData(f"its schema {schema.hash} is unknown", uri=self.uri_of(segment.path))

    def why_empty(self) -> str:
        """The message for a source without rows."""
        return f"{self.uri} has no rows"

    # ---- what follows from the schemas ----

    @property
    def columns(self) -> dict[str, list[str]]:
        """Policy id -> its columns in all writers, in the order in which they were first written."""
        merged: dict[str, dict[str, None]] = {}
        for schema in self.schemas.values():
            for pid, policy in schema.policies.items():
                merged.setdefault(pid, {}).update(dict.fromkeys(policy.columns))
        return {pid: list(columns) for pid, columns in merged.items()}

    @property
    def policy_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Policy id -> (observation space, action space), for each policy with stored spaces.

        Raises:
            SchemaConflict: Writers stored different spaces for one policy.
        """
        stored: dict[str, Mapping[str, Any]] = {}
        for schema in self.schemas.values():
            for pid, policy in schema.policies.items():
                if policy.spaces is None:
                    continue
                if stored.setdefault(pid, policy.spaces) != policy.spaces:
                    raise SchemaConflict(
                        f"writers stored different spaces for policy {excerpt(pid)}: {excerpt(stored[pid])} "
                        f"and {excerpt(policy.spaces)}; read writers with equal spaces, writers=[...], and "
                        "make the spaces yourself",
                        uri=self.uri,
                    )
        return {
            pid: (space_from_json(spaces["observation"]), space_from_json(spaces["action"]))
            for pid, spaces in stored.items()
        }

    _why_no_spaces: ClassVar[str] = (
        "the data set has no stored spaces: workers and RecordExperience store them; pass "
        "spaces={policy_id: (observation_space, action_space)} to a writer of your own"
    )

    @property
    def spaces(self) -> tuple[Any, Any]:
        """(observation space, action space) of the only recorded policy.

        Training from stored data needs no environment: ``policy.bind(*data.spaces)``.

        Raises:
            SchemaError: No writer stored spaces.
            OptionError: Several policies were recorded: use `policy_spaces`.
            SchemaConflict: Writers stored different spaces.
        """
        found = self.policy_spaces
        if len(found) > 1:
            raise OptionError(
                f"the data set has the spaces of {len(found)} policies: use "
                f"policy_spaces[{min(found)!r}] or another of {', '.join(map(excerpt, sorted(found)))}",
                uri=self.uri,
            )
        if not found:
            raise SchemaError(self._why_no_spaces, uri=self.uri)
        return next(iter(found.values()))


class FileSource(Source):
    """A source that holds files open, or a table in memory."""

    #: What the files state of themselves: the name of the format, its version, and the environment.
    format: str = ""
    format_version: str | None = None
    environment: str | None = None
    #: Whether its reader is gone: a thread that reads ahead may still be at its last work.
    is_left: bool = False

    @property
    def sizes(self) -> Sequence[int | None]:
        """Bytes of each file that holds rows; None: unknown. (): they are in memory."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Close the files. May be called again."""

    def leave(self) -> None:
        """Close the files of a reader that is gone; nothing is stated to be read any more."""
        self.is_left = True
        self.close()


class StoredSegment(Protocol):
    """Consecutive rows of one writer in one file. A value; listed without being opened."""

    @property
    def key(self) -> SegmentKey:
        """Identifies the content of the segment."""

    @property
    def path(self) -> str:
        """Names the file within its source."""

    @property
    def writer(self) -> str:
        """Whose rows they are. Episodes of two writers are never one, even with equal ``eps_id``."""

    @property
    def first(self) -> int:
        """Number of the first row within the writer. Above 0: earlier rows may have existed."""

    @property
    def skip(self) -> int:
        """Number of rows of the file before the first."""

    @property
    def rows(self) -> int:
        """Number of rows."""


class OpenSegment(Protocol):
    """An opened file: decodes its rows one group at a time.

    Where groups that follow each other cost less if they are decoded together, it may have two more:
    ``run_rows``, up to how many rows, and ``read_run(groups, columns)``, which is `read_folded` of a range of
    groups. If one of them is damaged, the whole call raises, and the groups are then read one by one.

    Likewise for whole segments of one group each: ``form``, the same object in those that can be decoded
    together (None: this one cannot), ``held_bytes``, what it keeps in memory until then, and
    ``joined(others, columns)``, which is `read_folded` of all of them. If one of them is damaged, it raises.
    """

    schema: Schema
    #: Whether `read_folded` leaves pictures encoded; as the `Source` has it, unless it is set before.
    keeps_pictures: bool
    #: Number of rows of each group.
    rows: list[int]
    #: Number of units of each group: steps, joint steps, or sequences.
    units: list[int]

    def read_folded(
        self, index: int, *, columns: Sequence[str] | None = None, rows: range | None = None
    ) -> Folded:
        """Check and decode one group into a new batch, which the caller owns; frame stacks stay folded.

        Args:
            index: Number of the group.
            columns: Logical columns; None: all.
            rows: The rows of the group to return, if only a part of it is live: whole written batches, or any
                rows if the data has neither sequences nor several agents. None: all.

        Raises:
            CorruptData: The group is damaged; ``uri`` and ``record`` say where. Its neighbours are not.
        """

    def bounds(self, index: int) -> Mapping[str, Bounds]:
        """A group's least and greatest values by physical column, if known without reading it."""


@dataclass(frozen=True)
class EpisodeInfo:
    """The rows of one episode in one segment.

    Attributes:
        writer: Id of the writer.
        policy, eps_id, agent_index, env_id: Identify the episode; None where the data has no such column.
        rows: Rows in this segment.
        t0: ``t`` of the first of these rows.
        end: "terminated", "truncated" or "open" (another segment continues the episode, or it was cut).
        reward: Sum of the rewards in this segment.
        began: When the episode began, in UTC by the clock of the writer's machine; None if unknown.
        written: When the first of these rows was written, likewise.
        version: ``weights_seq_no`` of the first of these rows; None if unknown.
    """

    writer: str
    policy: str
    eps_id: Any
    agent_index: Any
    env_id: Any
    rows: int
    t0: int | None
    end: str
    reward: float | None
    began: datetime | None = None
    written: datetime | None = None
    version: int | None = None
