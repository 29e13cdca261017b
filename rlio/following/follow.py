"""Following a data set that may still grow: one pass over every row, in order within each writer.

What is next is a cursor, the number of a row, for each writer; which shards hold it is found anew with every
listing. So shards may be compacted and collected, rows trimmed, and the reader restarted, at any time.

Example:
    >>> import numpy as np, rlio
    >>> with rlio.ParquetWriter("memory://follow-example", writer_id="w00000-00000000") as writer:
    ...     writer.write(rlio.SampleBatch(t=np.arange(5)))
    >>> with rlio.DatasetReader("memory://follow-example", follow=True, idle_timeout=0) as reader:
    ...     print([batch["t"].tolist() for batch in reader], reader.state_dict()["position"]["rows"])
    [[0, 1, 2, 3, 4]] {'w00000-00000000': 5}
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from rlio.batch import Batch, MultiAgentBatch, concat_samples, count_units
from rlio.dataset import listing as listings
from rlio.dataset.commit import read_header
from rlio.dataset.dataset import Dataset
from rlio.dataset.listing import Listing, Segment, list_settled
from rlio.dataset.names import MAX_ROW, is_writer_id
from rlio.dataset.segment_reader import (
    Ahead,
    GoneShards,
    SegmentReader,
    ShardGone,
    Span,
    counting_of,
    group_options,
    own_size,
    split_batch,
)
from rlio.dataset.snapshot import rows_waiting
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
from rlio.reader import JsonState, Unit
from rlio.readers.read_options import ReadOptions
from rlio.replay.buffers import Buffers
from rlio.replay.order import rank_of
from rlio.replay.positions import check_options, columns_digest
from rlio.schemas.folded import Folded, unfold
from rlio.storage.filesystem import Storage
from rlio.support.forks import cached_property

__all__ = ["FollowPass", "Taken"]

logger = logging.getLogger("rlio")

#: Version of the order in which writers take turns; readers keep it in their state.
_ORDER = ["follow", 1]
# The least pause between two listings, in durations of a listing: 10^5 shards take a second of processor.
_LISTINGS_APART = 10


@dataclass(frozen=True)
class _Chunk:
    """What is left of the rows that were decoded last.

    Attributes:
        writer: Whose they are.
        until: The row after the last of them.
        batch: What is left, frame stacks not looked up yet.
        units: How many units that is.
        rows: How many rows.
        served: Units that were served before it.
    """

    writer: str
    until: int
    batch: Folded
    units: int
    rows: int
    served: int = 0


class _Decoded(NamedTuple):
    """A row group from the background: all live ones of its segment, and its rows (None: lost)."""

    spans: list[Span]
    batch: Folded | None


class Taken(NamedTuple):
    """Rows that follow each other.

    Attributes:
        batch: The rows.
        writer: Whose they are.
        first: Number of the first of them within the writer.
    """

    batch: Batch
    writer: str
    first: int


class _Mark(NamedTuple):
    """Where the pass stands, to come back to."""

    rows: dict[str, int]
    turn: str
    chunk: tuple[int, int] | None
    skipped: int


class FollowPass:
    """What `DatasetReader` does with ``follow=True``; see there.

    Args:
        storage: The root; need not exist yet.
        options: How to read; no epochs, no shuffling, no seed.
        missing: "error" or "fill".
        idle_timeout: Seconds of waiting after which to end; None: never.
        poll_seconds: Seconds between two listings while there is nothing to read; more where a listing takes
            long, see `pause`.
        slots: Deal the writers to so many slots, by CRC-32 of their ids modulo it; rank r of the world of
            ``options.shard`` has the slots s with s modulo world = r. Cursors then fit any number of ranks.
            None: the ranks are the slots.

    Raises:
        OptionError: The options do not go with following, or the data set is of another format.
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
        _check_combination(options, missing)
        self._slots = slots
        self._idle_timeout = None if idle_timeout is None else _seconds("idle_timeout", idle_timeout)
        self._poll_seconds = _seconds("poll_seconds", poll_seconds)
        self._listing_seconds = 0.0
        self._storage = storage
        self._options = options
        self._missing: Literal["error", "drop", "fill"] = missing
        # The cursors: next row of each of this rank's writers; none: 0.
        self._rows: dict[str, int] = {}
        # Whose rows were served last: the next turn goes on from there.
        self._turn = ""
        self._chunk: _Chunk | None = None
        # (until, served) of a chunk that a state or a step back left to be decoded again.
        self._pending: tuple[int, int] | None = None
        self._queue: deque[Segment] = deque()
        # The segment that is being served, its live groups, and how many of them are taken.
        self._current: tuple[Segment, list[Span], int] | None = None
        self._listing = Listing()
        self._reader: SegmentReader | None = None
        self._gone = GoneShards(storage, options.on_error)
        self._ahead: Ahead[_Decoded] = Ahead(self._decode)
        # Of frame stacks.
        self._buffers = Buffers()
        self._spans_of: tuple[Segment, list[Span]] | None = None
        #: Rows lost to damage and holes.
        self.skipped = 0
        self._over = False
        self._closing = threading.Event()
        self._begin()

    # ---- what DatasetReader tells ----

    @property
    def dataset(self) -> Dataset:
        """What was listed last."""
        if not self._listing.writers:
            read_header(self._storage)  # Says what is there instead.
        return Dataset(self._storage, self._listing)

    @property
    def unit(self) -> Unit:
        """What is counted, as far as it is known."""
        return "steps" if self._reader is None else self._reader.counting.unit

    @property
    def total(self) -> int:
        """Rows that were listed last, of all ranks."""
        return len(Dataset(self._storage, self._listing))

    # ---- batches ----

    def take(self, n: int | None) -> Batch:
        """The next ``n`` units; None: ``batch_size``, else what is there. Waits for them."""
        wanted = n or self._options.batch_size
        with self._serving() as mark:
            parts, found = self._gather(wanted)
            if parts and self._options.drop_last and wanted is not None and found < wanted:
                skipped = self.skipped
                self._go_back(mark)  # So that the state leaves them to the next reader.
                self.skipped, self._over, parts = skipped, True, []
            if not parts:
                raise EndOfData(self._why_ended())
            return parts[0] if len(parts) == 1 else concat_samples(parts)

    @contextmanager
    def _serving(self) -> Iterator[_Mark]:
        """Undoes what fails: rows that were read and not served are read again.

        Raises:
            EndOfData: The end was reached before.
        """
        if self._over:
            raise EndOfData(self._why_ended())
        mark = self._mark()
        try:
            yield mark
        except EndOfData:
            raise
        except BaseException:
            self._go_back(mark)
            raise

    def _why_ended(self) -> str:
        waiting = "" if self._rows else rows_waiting(self._storage)
        return f"{self._storage.uri} was followed to its end{waiting}"

    def take_now(self, n: int) -> Taken | None:
        """At most ``n`` rows that are there now, of one writer; None: there is none. It does not wait.

        Raises:
            EndOfData: Every writer is closed, and its rows were given.
            OptionError: What is counted are no rows: there are sequences, or several agents.
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
                    f"rows are wanted one by one, and this data set counts in {self.unit} of several rows: "
                    "follow it with rlio.DatasetReader(follow=True)",
                    uri=self._storage.uri,
                )
            batch, units = self._serve(chunk, min(n, chunk.units))
            batch = self._segments.filled(batch)
            return Taken(batch, chunk.writer, self._rows[chunk.writer] - units)

    @property
    def listing(self) -> Listing:
        """What was listed last."""
        return self._listing

    @property
    def reached(self) -> dict[str, int]:
        """Writer -> next row, also behind what was trimmed or skipped; after `take_now` gave None."""
        found = dict(self._rows)
        for writer, row in self._listing.trimmed.items():  # Also of those with no shard left.
            if row > found.get(writer, 0) and self.owns(writer):
                found[writer] = row
        return found

    def owns(self, writer: str) -> bool:
        """Whether this rank follows a writer."""
        rank, world = self._options.shard
        return rank_of(writer, world=world, slots=self._slots) == rank

    def skip(self, n: int) -> None:
        """Refuse to: a batch is what is there when it is read."""
        raise OptionError("skip() with follow=True: what comes is not known; sample() and drop the batches")

    def _gather(self, wanted: int | None) -> tuple[list[Batch], int]:
        """Batches of ``wanted`` units in all, or fewer at the end; None: one batch of what is there."""
        parts: list[Batch] = []
        found = 0
        while wanted is None or found < wanted:
            chunk = self._chunk or self._advance()
            if chunk is None:
                break
            size = own_size(self._segments.dataset) if wanted is None else wanted - found
            batch, units = self._serve(chunk, min(size, chunk.units))
            parts.append(batch)
            found += units
            if wanted is None:
                break
        # Decoded before a column was known that others have by now.
        return [self._segments.filled(part) for part in parts], found

    def _serve(self, chunk: _Chunk, units: int) -> tuple[Batch, int]:
        """Units from the front of the chunk; the cursor steps over them."""
        head, rest = split_batch(chunk.batch.batch, 0, units, self.unit)
        batch = unfold([replace(chunk.batch, batch=head)], self._buffers.empty)
        left = rest.agent_steps()
        # Of plain rows as many as were asked for; of others, what is not left over.
        rows = units if self._segments.counting.by_row else chunk.rows - left
        self._turn = chunk.writer
        if units == chunk.units:
            self._rows[chunk.writer] = chunk.until
            self._chunk = None
            return batch, units
        if not self._is_joint:  # The rows of joint steps do not follow each other: see `_position_in_chunk`.
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
        """Seconds until the next listing while there is nothing to read."""
        return max(self._poll_seconds, _LISTINGS_APART * self._listing_seconds)

    @property
    def _segments(self) -> SegmentReader:
        """The reader of row groups; there is one as soon as there are rows."""
        assert self._reader is not None
        return self._reader

    @property
    def _is_joint(self) -> bool:
        counting = self._segments.counting
        return counting.unit == "steps" and not counting.by_row

    # ---- going on ----

    def _advance(self) -> _Chunk | None:
        """Decode the next rows, waiting for them if there are none yet; None: there will be none."""
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
        """Decode the next rows, if there are any by now; None: a listing has just shown none."""
        while not self._closing.is_set():
            chunk = self._resume() if self._pending is not None else self._next_chunk()
            if chunk is not None:
                self._chunk = chunk
                return chunk
            if not (self._queue or self._current is not None or self._pending is not None or self._poll()):
                return None
        raise ClosedError("the reader was closed while it waited for rows")

    def _next_chunk(self) -> _Chunk | None:
        """The next of the row groups that were listed; None if there is none, or it is lost or gone."""
        key = self._next_key()
        if key is None:
            self._current = None
            return None
        segment, index = key
        try:
            spans, batch = self._ahead.get(key)
        except ShardGone as gone:
            self._forget_listing()
            self._gone.miss(gone)
            return None
        if index == 0:
            self._queue.popleft()
        self._current = (segment, spans, index + 1)
        following = self._next_key()
        if following is not None:
            self._ahead.announce(following)
        return self._enter(segment.ref.writer, spans[index], batch)

    def _next_key(self) -> tuple[Segment, int] | None:
        """The segment and number of the group that comes next."""
        if self._current is not None and self._current[2] < len(self._current[1]):
            return self._current[0], self._current[2]
        return (self._queue[0], 0) if self._queue else None

    def _enter(self, writer: str, span: Span, batch: Folded | None) -> _Chunk | None:
        """Bring the cursor to a group's first row, and over the group if it is lost."""
        self._skip(writer, span.first)  # A hole: it was believed, or there would be no group after it.
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

    def _decode(self, key: tuple[Segment, int]) -> _Decoded:
        """A row group of a segment. In the background, as a rule."""
        segment, index = key
        if self._spans_of is None or self._spans_of[0] != segment:
            self._spans_of = (segment, self._segments.spans(segment))
        spans = self._spans_of[1]
        return _Decoded(spans, self._segments.read_folded(segment, spans[index]))

    def _forget_listing(self) -> None:
        """List again before going on."""
        self._queue.clear()
        self._current = self._spans_of = None
        self._ahead.forget()

    # ---- listings ----

    def _poll(self) -> bool:
        """List once, more often only where rows are missing; whether there is anything to go on with."""
        began = time.monotonic()
        took: list[float] = []

        def lacks(found: Listing) -> bool:
            took.append(time.monotonic() - began)
            own = self._own(found.staying_with(self._rows))
            return any(found.cover(w, start=self._rows.get(w, 0)).holes for w in own)

        # An attempt of which rows were served is not given up for another that a later listing shows.
        self._listing = found = list_settled(self._storage, lacks=lacks).staying_with(self._rows)
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
        """This rank's writers, by id, beginning with the one whose turn it is."""
        own = [w for w in found.writers if self.owns(w)]
        return [w for w in own if w >= self._turn] + [w for w in own if w < self._turn]

    def _pass_trimmed(self, writer: str, row: int) -> bool:
        """Step over rows that are gone on purpose; whether there are any."""
        gone = row - self._rows.get(writer, 0)
        if gone <= 0:
            return False
        self._rows[writer] = row
        logger.warning(
            "%d rows of writer %s in %s were trimmed before they were read", gone, writer, self._storage.uri
        )
        return True

    def _hole(self, writer: str, hole: range) -> HoleError:
        """What to say of missing rows."""
        torn = [
            rejected
            for rejected, name in self._listing.torn().get(writer, [])
            if name.first < hole.stop and hole.start < name.end
        ]
        sealed = self._listing.sealed.get(writer)
        why = (
            f": the shard {torn[0].reason}"
            if torn
            else f", of the {sealed} with which it was closed"
            if sealed == hole.stop
            else ", and later ones are there"
        )
        return HoleError(
            f"rows {hole.start} to {hole.stop - 1} of writer {writer!r} are not there, in "
            f"{listings.HOLE_CHECK.listings} listings{why}; restore them, or read with on_error='skip'",
            uri=self._storage.uri if not torn else self._storage.uri_of(torn[0].path),
        )

    def _is_complete(self) -> bool:
        """Whether every writer is closed for good; all that was listed is served."""
        # With those that are only known by a marker: writers that have just begun.
        writers = self._listing.writers + list(self._listing.trimmed)
        return bool(writers) and all(writer in self._listing.sealed for writer in writers)

    def _end_idle(self) -> None:
        """End after waiting in vain.

        Raises:
            CorruptData: A shard has not got its size all the while: it is torn.
        """
        self._over = True
        for writer in self._own(self._listing):
            cursor = self._rows.get(writer, 0)
            for rejected, name in self._listing.torn().get(writer, []):
                if name.end <= cursor:
                    continue
                error = CorruptData(
                    f"the shard {rejected.reason}, and so it was until idle_timeout; wait for it, restore "
                    "it, or read with on_error='skip'",
                    uri=self._storage.uri_of(rejected.path),
                )
                if self._options.on_error == "raise":
                    raise error
                lost = name.end - max(name.first, cursor)
                self.skipped += lost
                logger.warning("skipped %d rows: %s", lost, error)

    # ---- schemas ----

    def _begin(self) -> bool:
        """Find out what is counted, once there is a data set with a schema."""
        try:
            read_header(self._storage)
        except DataNotFound:
            if self._listing.shards or self._storage.is_file:
                raise  # Rows without a header: it was put before them, and is lost. A file stays one.
            return False
        dataset = Dataset(self._storage, self._listing)
        if not dataset.schemas and not self._listing.shards:
            return False
        self._reader = SegmentReader(
            dataset,
            group_options(dataset, self._options, self._missing),
            counting_of(dataset, self._options.columns),
            given_up=self._gone.given_up,
            learn=self._learn,
        )
        return True

    def _learn(self) -> None:
        """Take up schemas that came since. In the background, as a rule.

        Raises:
            SchemaConflict: They do not go with those before.
        """
        reader = self._segments
        dataset = Dataset(self._storage, Listing())
        options = group_options(dataset, self._options, self._missing)
        counting = counting_of(dataset, self._options.columns)
        if counting != reader.counting:
            raise SchemaConflict(
                f"a writer brings data that counts in {counting.unit} of another kind than the "
                f"{reader.counting.unit} that were followed so far: keep them in different roots, or begin "
                "again with a fresh reader",
                uri=self._storage.uri,
            )
        reader.options, reader.dataset = options, dataset

    # ---- state ----

    def position(self) -> JsonState:
        """The cursors; and, as the rows of joint steps do not follow each other, steps within a chunk."""
        return {
            "order": _ORDER,
            "rows": dict(sorted(self._rows.items())),
            "turn": self._turn,
            "chunk": None if (chunk := self._position_in_chunk()) is None else list(chunk),
            "options": self._fingerprint,
        }

    def _position_in_chunk(self) -> tuple[int, int] | None:
        """(row after its last, joint steps served), where a cursor alone cannot say it."""
        if self._pending is not None:
            return self._pending
        if self._chunk is None or not self._is_joint or not self._chunk.served:
            return None
        return self._chunk.until, self._chunk.served

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same rows."""
        dealt = {"shard": list(self._options.shard)} if self._slots is None else {"slots": self._slots}
        return {**dealt, "columns": columns_digest(self._options)}

    def seek(self, position: JsonState) -> None:
        """Continue from a position; `skipped` counts from 0.

        Raises:
            StateError: It is not one of `position`, or was saved with other options.
        """
        if position.get("order") != _ORDER:
            raise StateError(
                f"state['position']['order'] is {excerpt(position.get('order'))} but this reader follows "
                f"({_ORDER}): load it into a reader with the options of that time"
            )
        check_options(position.get("options"), self._fingerprint, uri=self._storage.uri)
        rows = dict(position["rows"])
        for writer, row in rows.items():
            if not is_writer_id(writer) or type(row) is not int or not 0 <= row <= MAX_ROW:
                raise StateError(
                    f"state['position']['rows'] has row {excerpt(row)} of writer {excerpt(writer)}"
                )
        turn, chunk = position["turn"], position["chunk"]
        if chunk is not None:
            until, served = map(int, chunk)
            if turn not in rows or until <= rows[turn] or served < 1:
                raise StateError(
                    f"state['position']['chunk'] is {excerpt(chunk)}, after row {excerpt(rows.get(turn))}"
                )
            chunk = (until, served)
        self._go_back(_Mark(rows, str(turn), chunk, 0))

    def _mark(self) -> _Mark:
        return _Mark(dict(self._rows), self._turn, self._position_in_chunk(), self.skipped)

    def _go_back(self, mark: _Mark) -> None:
        """Stand where the mark was made; what was decoded is forgotten."""
        self._forget_listing()
        self._rows, self._turn = dict(mark.rows), mark.turn
        self._pending, self.skipped = mark.chunk, mark.skipped
        self._chunk = None
        self._over = False

    def _resume(self) -> _Chunk | None:
        """Decode again what is left of a chunk of joint steps, from whatever shards hold its rows now."""
        assert self._pending is not None
        (until, served), writer = self._pending, self._turn
        first = self._rows[writer]
        self._listing = found = list_settled(
            self._storage, lacks=lambda found: bool(found.cover(writer, start=first, end=until).holes)
        )
        if self._reader is None and not self._begin():
            raise DataNotFound("the state is of a data set that is not there", uri=self._storage.uri)
        if found.trimmed_below(writer) > first:
            # Which of the rows belong to steps that were served is not to be known any more.
            self._pending = None
            self._pass_trimmed(writer, until)
            return None
        segments, holes = found.cover(writer, start=first, end=until)
        if holes and self._options.on_error == "raise":
            raise self._hole(writer, holes[0])
        try:
            parts = list(self._parts(segments))
        except ShardGone as gone:
            self._gone.miss(gone)
            return None
        self._pending = None
        if holes or None in parts:
            self._skip(writer, until)
            return None
        return self._rest_of([part for part in parts if part is not None], writer, until, served)

    def _parts(self, segments: list[Segment]) -> Iterator[Batch | None]:
        """The groups of segments, decoded."""
        for segment in segments:
            for span in self._segments.spans(segment):
                yield self._segments.read(segment, span)

    def _rest_of(self, parts: list[Batch], writer: str, until: int, served: int) -> _Chunk:
        """The chunk made of ``parts``, without the steps that were served."""
        whole = parts[0] if len(parts) == 1 else concat_samples(parts)
        if isinstance(whole, MultiAgentBatch) and len(parts) > 1:
            # As one group has them: the order of steps can depend on that of the policies.
            whole = MultiAgentBatch({pid: whole[pid] for pid in sorted(whole)}, whole.env_steps())
        units = count_units(whole, self.unit)
        if served >= units:
            raise StateError(
                f"state['position']['chunk'] says that {served} steps up to row {until} of writer "
                f"{writer!r} were served, but there are {units}: the data changed since it was saved",
                uri=self._storage.uri,
            )
        rest = split_batch(whole, 0, served, self.unit)[1]
        return _Chunk(writer, until, Folded(rest), units - served, rest.agent_steps(), served)

    def interrupt(self) -> None:
        """End any wait for rows with a ClosedError; `close` follows."""
        self._closing.set()

    def close(self) -> None:
        """End the background thread, and any wait for rows."""
        self._closing.set()
        self._ahead.close()
        self._chunk = None


def _check_combination(options: ReadOptions, missing: str) -> None:
    """Refuse options that contradict following.

    Raises:
        OptionError: One does.
    """
    for name in ("epochs", "shuffle", "seed"):
        value = getattr(options, name)
        if value is not None and value is not False:
            raise OptionError(
                f"follow=True and {name}={value!r}: following is one pass in recorded order; leave {name} "
                "out (rlio.ShuffledInput shuffles the batches of any reader)"
            )
    if missing not in ("error", "fill"):
        raise OptionError(
            f"follow=True and missing={excerpt(missing)}: which columns later writers lack is not known; "
            "name columns=[...], or use missing='fill'"
        )


def _seconds(name: str, value: object) -> float:
    """A time, checked; also of the poll, where 0 would be a busy loop."""
    least = 0.0 if name == "idle_timeout" else 1e-3
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise OptionError(f"{name}={excerpt(value)}: a number of seconds, {least:g} or more")
    return float(value)
