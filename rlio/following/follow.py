"""Following a data set that may still grow: one pass over every row, in order within each writer.

The position is a cursor for each writer: the number of its next row. Each new listing shows which shards hold
that row. Shards may therefore be compacted and collected, rows trimmed, and the reader restarted, at any
time.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://follow-example", writer_id="w00000-00000000") as writer:
    ...     writer.write(rlio.SampleBatch(t=np.arange(5)))
    >>> with rlio.FollowReader("memory://follow-example", idle_timeout=0) as reader:
    ...     print([batch["t"].tolist() for batch in reader], reader.state_dict()["position"]["rows"])
    [[0, 1, 2, 3, 4]] {'w00000-00000000': 5}
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

from rlio.batch import Batch, MultiAgentBatch, concat_samples, count_units, split_units
from rlio.catalog import listing as listings
from rlio.catalog.commit import read_header
from rlio.catalog.listing import Listing, Segment, list_settled
from rlio.catalog.names import MAX_ROW, is_writer_id
from rlio.dataset.dataset import Dataset
from rlio.errors import (
    ClosedError,
    CorruptData,
    DataNotFound,
    EndOfData,
    HoleError,
    OptionError,
    SchemaConflict,
    StateError,
    excerpt,
)
from rlio.query.order import rank_of
from rlio.query.positions import check_options, columns_digest
from rlio.read_options import ReadOptions
from rlio.reader import JsonState, Unit
from rlio.replay.buffers import Buffers
from rlio.schemas.folded import Folded, unfold
from rlio.source.ahead import Ahead
from rlio.source.selection import counting_of, group_options, own_size
from rlio.source.snapshot import rows_waiting
from rlio.source.span_reader import GoneSegments, SegmentGone, Span, SpanReader
from rlio.storage.filesystem import Storage
from rlio.support.forks import cached_property
from rlio.support.options import check_number, check_seconds
from rlio.support.states import text_in, value_in, whole_numbers

__all__ = ["FollowPass", "Taken"]

logger: logging.Logger = logging.getLogger("rlio")

#: Version of the order in which writers take turns; stored in the reader's state.
_ORDER = ["follow", 1]
# The least pause between two listings, in durations of a listing: 10^5 shards take a second of CPU time.
_LISTINGS_APART = 10
# Segments that are looked at for requests side by side, and those of them that are decoded together: the
# requests for the others are under way meanwhile.
_COMING = 128
_JOINED = 64


@dataclass(frozen=True)
class _Chunk:
    """The unserved part of the rows that were decoded last.

    Attributes:
        writer: The rows' writer.
        until: The row after the last of them.
        batch: The unserved rows, with frame stacks not yet looked up.
        units: Number of their units.
        rows: Number of rows.
        served: Units of the chunk that were served before.
    """

    writer: str
    until: int
    batch: Folded
    units: int
    rows: int
    served: int = 0


class _Part(NamedTuple):
    """A decoded row group of a segment (None: lost)."""

    segment: Segment
    span: Span
    batch: Folded | None


class _Key(NamedTuple):
    """A row group to decode: its segment, its number among the live ones, and the segments after it."""

    segment: Segment
    number: int
    coming: tuple[Segment, ...]


class _Decoded(NamedTuple):
    """What was decoded in the background.

    Attributes:
        parts: A row group; or several short segments of one group each.
        spans: All live groups of the last segment.
    """

    parts: list[_Part]
    spans: list[Span]


class Taken(NamedTuple):
    """Consecutive rows of one writer.

    Attributes:
        batch: The rows.
        writer: The rows' writer.
        first: Number of the first row within the writer.
    """

    batch: Batch
    writer: str
    first: int


class _Mark(NamedTuple):
    """A position of the pass to return to."""

    rows: dict[str, int]
    turn: str
    chunk: tuple[int, int] | None
    skipped: int


class FollowPass:
    """The pass of `rlio.FollowReader`, and of `rlio.FollowingReplay`; see there.

    Args:
        storage: The root; need not exist yet.
        options: How to read; no epochs, no shuffling, no seed.
        missing: "error" or "fill".
        idle_timeout: Seconds of waiting after which the data ends; None: never.
        poll_seconds: Seconds between two listings while no rows are available; more if a listing takes
            long, see `pause`.
        slots: Number of slots that writers are divided into, by CRC-32 of their ids modulo it; rank r of the
            world of ``options.shard`` has the slots s with s modulo world = r. Cursors then fit any number of
            ranks. None: the ranks are the slots.

    Raises:
        OptionError: An option is illegal, or the data set has another format.
    """

    epoch: int = 0
    seed: int | None = None
    cache: Literal["memory", "disk", "none"] = "none"

    def __init__(
        self,
        storage: Storage,
        options: ReadOptions,
        missing: Literal["error", "drop", "fill"],
        *,
        idle_timeout: float | None,
        poll_seconds: float,
        slots: int | None = None,
    ) -> None:
        if missing not in ("error", "fill"):
            raise OptionError(
                f"missing={excerpt(missing)}: expected 'error' or 'fill', because the columns that later "
                "writers lack are unknown; name columns=[...], or use missing='fill'"
            )
        self._slots = slots
        self._idle_timeout = check_number(
            "idle_timeout", idle_timeout, least=0, of="seconds", none="no limit"
        )
        # A poll of 0 seconds would be a busy loop.
        self._poll_seconds = check_seconds("poll_seconds", poll_seconds, least=1e-3)
        self._listing_seconds = 0.0
        self._storage = storage
        self._options = options
        self._missing: Literal["error", "drop", "fill"] = missing
        # The cursors: next row of each of this rank's writers; missing: 0.
        self._rows: dict[str, int] = {}
        # The writer whose rows were served last: the next turn continues from there.
        self._turn = ""
        self._chunk: _Chunk | None = None
        # (until, served) of a chunk that must be decoded again, after a loaded state or a step back.
        self._pending: tuple[int, int] | None = None
        self._queue: deque[Segment] = deque()
        # What was decoded and not entered yet; the queue begins after it.
        self._decoded: deque[_Part] = deque()
        # The current segment, its live groups, and how many of them are taken.
        self._current: tuple[Segment, list[Span], int] | None = None
        #: The last listing.
        self.listing: Listing = Listing()
        self._reader: SpanReader | None = None
        self._gone = GoneSegments(options.on_error)
        self._ahead: Ahead[_Decoded] = Ahead()
        # For frame stacks.
        self._buffers = Buffers()
        self._spans_of: tuple[Segment, list[Span]] | None = None
        #: Rows lost to damage and holes.
        self.skipped: int = 0
        # Whether the log has the path that an absent root may mean.
        self._said_absent = False
        self._over = False
        self._closing = threading.Event()
        self._begin()

    # ---- properties of FollowReader ----

    @property
    def place(self) -> str:
        """Where it is, for `repr`."""
        return f"{sum(self._rows.values())} rows of {len(self._rows)} writers read"

    @property
    def dataset(self) -> Dataset:
        """The data set, as listed last."""
        if not self.listing.writers:
            read_header(self._storage)  # Raises an error that says what is stored instead.
        return Dataset(self._storage, self.listing)

    @property
    def unit(self) -> Unit:
        """The unit that is counted, as far as known."""
        return "steps" if self._reader is None else self._reader.counting.unit

    @property
    def total(self) -> int:
        """Rows of the last listing, of all ranks."""
        return len(Dataset(self._storage, self.listing))

    # ---- batches ----

    def take(self, n: int | None) -> Batch:
        """The next ``n`` units; None: ``batch_size``, or else the available rows. Waits for them."""
        wanted = n or self._options.batch_size
        with self._serving() as mark:
            parts, found = self._gather(wanted)
            if parts and self._options.drop_last and wanted is not None and found < wanted:
                skipped = self.skipped
                self.go_back(mark)  # The state then leaves these rows to the next reader.
                self.skipped, self._over, parts = skipped, True, []
            if not parts:
                raise EndOfData(self._why_ended())
            return parts[0] if len(parts) == 1 else concat_samples(parts)

    @contextmanager
    def _serving(self) -> Iterator[_Mark]:
        """Undo a failed call: rows that were read but not served are read again.

        Raises:
            EndOfData: The end was reached before.
        """
        if self._over:
            raise EndOfData(self._why_ended())
        mark = self.mark()
        try:
            yield mark
        except EndOfData:
            raise
        except BaseException:
            self.go_back(mark)
            raise

    def _why_ended(self) -> str:
        waiting = "" if self._rows else rows_waiting(self._storage)
        return f"{self._storage.uri} was followed to its end{waiting}"

    def take_now(self, n: int) -> Taken | None:
        """At most ``n`` available rows of one writer; None: no rows are available. Does not wait.

        Raises:
            EndOfData: Every writer is closed, and its rows were given.
            OptionError: The unit is not a row: the data has sequences, or several agents.
        """
        with self._serving():
            chunk = self._chunk or self._look()
            if chunk is None:
                self._over = self._is_complete()
                if self._over:
                    raise EndOfData(self._why_ended())
                return None
            if not self._segments.counting.by_row:
                raise OptionError(
                    f"expected single rows, but this data set counts in {self.unit} of several rows: "
                    "follow it with rlio.FollowReader",
                    uri=self._storage.uri,
                )
            batch, units = self._serve(chunk, min(n, chunk.units))
            batch = self._segments.filled(batch)
            return Taken(batch, chunk.writer, self._rows[chunk.writer] - units)

    @property
    def reached(self) -> dict[str, int]:
        """Writer -> next row, also past trimmed or skipped rows; valid after `take_now` returned None."""
        found = dict(self._rows)
        for writer, row in self.listing.trimmed.items():  # Also writers without a shard left.
            if row > found.get(writer, 0) and self.owns(writer):
                found[writer] = row
        return found

    def owns(self, writer: str) -> bool:
        """Whether this rank follows a writer."""
        rank, world = self._options.shard
        return rank_of(writer, world=world, slots=self._slots) == rank

    def skip(self, n: int) -> None:
        """Raise: batches have no fixed size, because they hold the rows available at reading."""
        raise OptionError(
            "skip() of rlio.FollowReader: future rows are unknown; call sample() and drop the batches"
        )

    def _gather(self, wanted: int | None) -> tuple[list[Batch], int]:
        """Batches of ``wanted`` units in all, fewer at the end; None: one batch of the available rows."""
        parts: list[Batch] = []
        found = 0
        while wanted is None or found < wanted:
            chunk = self._chunk or self._advance()
            if chunk is None:
                break
            size = own_size(self._segments.source) if wanted is None else wanted - found
            batch, units = self._serve(chunk, min(size, chunk.units))
            parts.append(batch)
            found += units
            if wanted is None:
                break
        # A part may have been decoded before another writer's new column was known.
        return [self._segments.filled(part) for part in parts], found

    def _serve(self, chunk: _Chunk, units: int) -> tuple[Batch, int]:
        """Serve units from the front of the chunk, and move the cursor past them."""
        head, rest = split_units(chunk.batch.batch, units, self.unit)
        batch = unfold([replace(chunk.batch, batch=head)], self._buffers.empty)
        left = rest.agent_steps()
        # Plain rows: as many as requested. Other units: the rows that are not left over.
        rows = units if self._segments.counting.by_row else chunk.rows - left
        self._turn = chunk.writer
        if units == chunk.units:
            self._rows[chunk.writer] = chunk.until
            self._chunk = None
            return batch, units
        if not self._is_joint:  # The rows of joint steps are not consecutive: see `_position_in_chunk`.
            self._rows[chunk.writer] += rows
        self._chunk = replace(
            chunk,
            batch=replace(chunk.batch, batch=rest),
            units=chunk.units - units,
            rows=left,
            served=chunk.served + units,
        )
        return batch, units

    @property
    def pause(self) -> float:
        """Seconds until the next listing while no rows are available."""
        return max(self._poll_seconds, _LISTINGS_APART * self._listing_seconds)

    @property
    def _segments(self) -> SpanReader:
        """The reader of row groups; exists as soon as there are rows."""
        assert self._reader is not None
        return self._reader

    @property
    def _is_joint(self) -> bool:
        counting = self._segments.counting
        return counting.unit == "steps" and not counting.by_row

    # ---- continuing ----

    def _advance(self) -> _Chunk | None:
        """Decode the next rows, waiting for them if needed; None: the data has ended."""
        waiting_since: float | None = None
        while not self._over:
            chunk = self._look()
            if chunk is not None:
                return chunk
            if self._is_complete():
                self._over = True
                break
            now = time.monotonic()
            waiting_since = now if waiting_since is None else waiting_since
            left = math.inf if self._idle_timeout is None else waiting_since + self._idle_timeout - now
            if left <= 0:
                self._end_idle()
                break
            self._closing.wait(min(left, self.pause))
        return None

    def _look(self) -> _Chunk | None:
        """Decode the next rows if any are available; None: the newest listing shows none."""
        while not self._closing.is_set():
            chunk = self._resume() if self._pending is not None else self._next_chunk()
            if chunk is not None:
                self._chunk = chunk
                return chunk
            is_known = self._decoded or self._queue or self._current is not None or self._pending is not None
            if not (is_known or self._poll()):
                return None
        raise ClosedError("the reader was closed while it waited for rows")

    def _next_chunk(self) -> _Chunk | None:
        """The next listed row group; None if there is none, or it is lost or gone."""
        if not self._decoded and not self._decode_next():
            return None
        segment, span, batch = self._decoded.popleft()
        return self._enter(segment.ref.writer, span, batch)

    def _decode_next(self) -> bool:
        """Decode the next row group, or short segments together; False if there is none, or it is gone."""
        key = self._next_key()
        if key is None:
            self._current = None
            return False
        try:
            parts, spans = self._ahead.get(key, self._decode)
        except SegmentGone as gone:
            self._forget_listing()
            self._gone.miss(gone)
            return False
        self._decoded.extend(parts)
        if key.number == 0:
            for _ in parts:
                self._queue.popleft()
        self._current = (parts[-1].segment, spans, key.number + 1)
        following = self._next_key()
        if following is not None:
            self._ahead.announce(following, self._decode)
        return True

    def _next_key(self) -> _Key | None:
        """The next group to decode."""
        if self._current is not None and self._current[2] < len(self._current[1]):
            return _Key(self._current[0], self._current[2], tuple(islice(self._queue, _COMING)))
        coming = tuple(islice(self._queue, _COMING + 1))
        return _Key(coming[0], 0, coming[1:]) if coming else None

    def _enter(self, writer: str, span: Span, batch: Folded | None) -> _Chunk | None:
        """Move the cursor to a group's first row, and past the group if it is lost."""
        self._skip(writer, span.first)  # A confirmed hole; otherwise no group would follow it.
        if batch is None:
            self._skip(writer, span.end)
            return None
        return _Chunk(writer, span.end, batch, span.units, len(span.rows))

    def _skip(self, writer: str, row: int) -> None:
        """Count the rows before ``row`` as skipped."""
        lost = row - self._rows.get(writer, 0)
        if lost > 0:
            self.skipped += lost
            logger.warning("skipped %d rows of writer %s in %s", lost, writer, self._storage.uri)
        self._rows[writer] = row

    def _decode(self, key: _Key) -> _Decoded:
        """Decode a row group of a segment, or short segments; usually runs in the background."""
        segment, number, coming = key
        reader = self._segments
        if self._spans_of is None or self._spans_of[0] != segment:
            segments = (segment, *coming)
            reader.expect_in_turn(segments, 0)
            if (joined := reader.read_joined(segments, 0, _JOINED)) is not None:
                return _parted(segments[: len(joined[0])], joined[1], self.unit)
            self._spans_of = (segment, reader.spans(segment))
        spans = self._spans_of[1]
        span = spans[number]
        return _Decoded([_Part(segment, span, reader.read_folded(segment, span))], spans)

    def _forget_listing(self) -> None:
        """Drop the listing, so the next call lists again."""
        self._queue.clear()
        self._decoded.clear()
        self._current = self._spans_of = None
        self._ahead.forget()
        if self._reader is not None:
            self._reader.forget()

    # ---- listings ----

    def _poll(self) -> bool:
        """List once, more often only if rows are missing; return whether reading can continue."""
        began = time.monotonic()
        took: list[float] = []

        def lacks(found: Listing) -> bool:
            took.append(time.monotonic() - began)
            own = self._own(found.staying_with(self._rows))
            return any(found.cover(w, start=self._rows.get(w, 0)).holes for w in own)

        # Keep to a write attempt whose rows were served, even if a later listing prefers another attempt.
        self.listing = found = list_settled(self._storage, lacks=lacks).staying_with(self._rows)
        self._listing_seconds = took[0] if took else 0.0
        if not found.writers or (self._reader is None and not self._begin()):
            return False
        progress = False
        for writer in self._own(found):
            progress |= self._pass_trimmed(writer, found.trimmed.get(writer, 0))
            segments, holes = found.cover(writer, start=self._rows.get(writer, 0))
            if holes and self._options.on_error == "raise":
                raise self._hole(writer, holes[0])
            if holes and not segments:
                self._skip(writer, holes[-1].stop)
                progress = True
            self._queue.extend(segments)
        return progress or bool(self._queue)

    def _own(self, found: Listing) -> list[str]:
        """This rank's writers, by id, beginning with the writer whose turn it is."""
        own = [w for w in found.writers if self.owns(w)]
        return [w for w in own if w >= self._turn] + [w for w in own if w < self._turn]

    def _pass_trimmed(self, writer: str, row: int) -> bool:
        """Move past trimmed rows; return whether there were any."""
        gone = row - self._rows.get(writer, 0)
        if gone <= 0:
            return False
        self._rows[writer] = row
        logger.warning(
            "%d rows of writer %s in %s were trimmed before they were read", gone, writer, self._storage.uri
        )
        return True

    def _hole(self, writer: str, hole: range) -> HoleError:
        """The error for missing rows."""
        torn = [
            rejected
            for rejected, name in self.listing.torn().get(writer, [])
            if name.first < hole.stop and hole.start < name.end
        ]
        sealed = self.listing.sealed.get(writer)
        why = (
            f": the shard {torn[0].reason}"
            if torn
            else f", although the writer was closed with {sealed} rows"
            if sealed == hole.stop
            else ", although later rows are there"
        )
        return HoleError(
            f"rows {hole.start} to {hole.stop - 1} of writer {writer!r} are not there, in "
            f"{listings.HOLE_CHECK.listings} listings{why}; restore them, or read with on_error='skip'",
            uri=self._storage.uri if not torn else self._storage.uri_of(torn[0].path),
        )

    def _is_complete(self) -> bool:
        """Whether every writer is closed (sealed); all listed rows are served by then."""
        # Includes writers that are known only by a marker, because they have just begun.
        writers = self.listing.writers + list(self.listing.trimmed)
        return bool(writers) and all(writer in self.listing.sealed for writer in writers)

    def _end_idle(self) -> None:
        """End because no row came within the timeout.

        Raises:
            CorruptData: A shard never reached its size while waiting: it is torn.
        """
        self._over = True
        for writer in self._own(self.listing):
            cursor = self._rows.get(writer, 0)
            for rejected, name in self.listing.torn().get(writer, []):
                if name.end <= cursor:
                    continue
                error = CorruptData(
                    f"the shard {rejected.reason}, and did not change until idle_timeout; wait for it, "
                    "restore it, or read with on_error='skip'",
                    uri=self._storage.uri_of(rejected.path),
                )
                if self._options.on_error == "raise":
                    raise error
                lost = name.end - max(name.first, cursor)
                self.skipped += lost
                logger.warning("skipped %d rows: %s", lost, error)

    # ---- schemas ----

    def _begin(self) -> bool:
        """Find the unit, once there is a data set with a schema; return whether there is one."""
        try:
            read_header(self._storage)
        except DataNotFound:
            if self.listing.shards or self._storage.is_file:
                raise  # Rows without a header, which is written first: it is lost. Or the root is a file.
            if not self._said_absent:
                self._said_absent = True
                # A path that is spelled wrong would be waited for without an end.
                if hint := self._storage.did_you_mean():
                    logger.warning("no data set is at %s, and a reader waits%s", self._storage.uri, hint)
            return False
        dataset = Dataset(self._storage, self.listing)
        if not dataset.schemas and not self.listing.shards:
            return False
        this: FollowPass = weakref.proxy(self)  # It has the reader, and is freed once it is dropped.
        self._reader = SpanReader(
            dataset,
            group_options(dataset, self._options, self._missing),
            counting_of(dataset, self._options.columns),
            given_up=self._gone.given_up,
            learn=lambda: this._learn(),
        )
        return True

    def _learn(self) -> None:
        """Load schemas that were added since; usually runs in the background.

        Raises:
            SchemaConflict: They contradict the earlier schemas.
        """
        reader = self._segments
        dataset = Dataset(self._storage, Listing())
        options = group_options(dataset, self._options, self._missing)
        counting = counting_of(dataset, self._options.columns)
        if counting != reader.counting:
            raise SchemaConflict(
                f"a new writer's data counts in {counting.unit}, which differ from the "
                f"{reader.counting.unit} read so far: keep such data in different roots, or start again "
                "with a new reader",
                uri=self._storage.uri,
            )
        reader.options, reader.source = options, dataset

    # ---- state ----

    def position(self) -> JsonState:
        """The cursors. Rows of joint steps are not consecutive, so also the served steps of a chunk."""
        return {
            "order": _ORDER,
            "rows": dict(sorted(self._rows.items())),
            "turn": self._turn,
            "chunk": None if (chunk := self._position_in_chunk()) is None else list(chunk),
            "options": self._fingerprint,
        }

    def _position_in_chunk(self) -> tuple[int, int] | None:
        """(row after its last, joint steps served), if a cursor alone is not enough."""
        if self._pending is not None:
            return self._pending
        if self._chunk is None or not self._is_joint or not self._chunk.served:
            return None
        return self._chunk.until, self._chunk.served

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        """The options that must be equal for a position to mean the same rows."""
        dealt = {"shard": list(self._options.shard)} if self._slots is None else {"slots": self._slots}
        return {**dealt, "columns": columns_digest(self._options)}

    def seek(self, position: JsonState) -> None:
        """Continue from a position; `skipped` counts from 0.

        Raises:
            StateError: The position is invalid, or was saved with other options.
        """
        if position.get("order") != _ORDER:
            raise StateError(
                f"state['position']['order'] is {excerpt(position.get('order'))}, but this reader follows "
                f"({_ORDER}): load the state into a reader with the same options"
            )
        check_options(position.get("options"), self._fingerprint, self._options, uri=self._storage.uri)
        rows = dict(value_in(position, "rows", dict))
        for writer, row in rows.items():
            if not is_writer_id(writer) or type(row) is not int or not 0 <= row <= MAX_ROW:
                raise StateError(
                    f"state['position']['rows'] has row {excerpt(row)} of writer {excerpt(writer)}"
                )
        turn, chunk = text_in(position, "turn"), position["chunk"]
        if chunk is not None:
            until, served = whole_numbers(position, "chunk", 2)
            if turn not in rows or until <= rows[turn] or served < 1:
                raise StateError(
                    f"state['position']['chunk'] is {excerpt(chunk)}, after row {excerpt(rows.get(turn))}"
                )
            chunk = (until, served)
        self.go_back(_Mark(rows, turn, chunk, 0))

    def mark(self) -> _Mark:
        """The position before a `take`, for `go_back`."""
        return _Mark(dict(self._rows), self._turn, self._position_in_chunk(), self.skipped)

    def go_back(self, mark: _Mark) -> None:
        """Return to a mark; drops decoded rows."""
        self._forget_listing()
        self._rows, self._turn = dict(mark.rows), mark.turn
        self._pending, self.skipped = mark.chunk, mark.skipped
        self._chunk = None
        self._over = False

    def _resume(self) -> _Chunk | None:
        """Decode the rest of a chunk of joint steps again, from the shards that hold its rows now."""
        assert self._pending is not None
        (until, served), writer = self._pending, self._turn
        first = self._rows[writer]
        self.listing = found = list_settled(
            self._storage, lacks=lambda found: bool(found.cover(writer, start=first, end=until).holes)
        )
        if self._reader is None and not self._begin():
            raise DataNotFound("the state's data set does not exist", uri=self._storage.uri)
        if found.trimmed_below(writer) > first:
            # It is no longer possible to tell which rows belong to served steps.
            self._pending = None
            self._pass_trimmed(writer, until)
            return None
        segments, holes = found.cover(writer, start=first, end=until)
        if holes and self._options.on_error == "raise":
            raise self._hole(writer, holes[0])
        try:
            parts = list(self._parts(segments))
        except SegmentGone as gone:
            self._gone.miss(gone)
            return None
        self._pending = None
        if holes or None in parts:
            self._skip(writer, until)
            return None
        return self._rest_of([part for part in parts if part is not None], writer, until, served)

    def _parts(self, segments: list[Segment]) -> Iterator[Batch | None]:
        """The decoded groups of segments."""
        for segment in segments:
            for span in self._segments.spans(segment):
                yield self._segments.read(segment, span)

    def _rest_of(self, parts: list[Batch], writer: str, until: int, served: int) -> _Chunk:
        """The chunk made of ``parts``, without the served steps."""
        whole = parts[0] if len(parts) == 1 else concat_samples(parts)
        if isinstance(whole, MultiAgentBatch) and len(parts) > 1:
            # The order of a single group: the order of steps can depend on the order of the policies.
            whole = MultiAgentBatch({pid: whole[pid] for pid in sorted(whole)}, whole.env_steps())
        units = count_units(whole, self.unit)
        if served >= units:
            raise StateError(
                f"state['position']['chunk'] has {served} served steps up to row {until} of writer "
                f"{writer!r}, but there are {units}: the data changed after the state was saved",
                uri=self._storage.uri,
            )
        rest = split_units(whole, served, self.unit)[1]
        return _Chunk(writer, until, Folded(rest), units - served, rest.agent_steps(), served)

    def interrupt(self) -> None:
        """End a wait for rows with a ClosedError; `close` follows."""
        self._closing.set()

    def close(self) -> None:
        """End the background thread and any wait for rows."""
        self._closing.set()
        self._ahead.close()
        self._chunk = None
        if self._reader is not None:
            self._reader.forget()


def _parted(segments: Sequence[Segment], joined: Folded, unit: Unit) -> _Decoded:
    """The rows of whole segments, which were decoded together."""
    parts, rest = [], joined.batch
    for segment in segments:
        head, rest = split_units(rest, segment.rows, unit)
        span = Span(0, range(segment.rows), segment.first, segment.rows, True)
        parts.append(_Part(segment, span, replace(joined, batch=head)))
    return _Decoded(parts, [parts[-1].span])
