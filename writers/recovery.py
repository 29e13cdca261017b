"""Recovery: turns the log of a dead writer into the shards that the writer would have made.

Recovery makes the same bytes under the same names, however often it runs and wherever it is interrupted. A
log holds everything the writer knew, and is removed only after every row in it is published.

Example:
    >>> import tempfile
    >>> recover(tempfile.mkdtemp()).rows
    0
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias

from rlio.catalog.commit import put_header, put_shard
from rlio.catalog.listing import Listing, list_writer
from rlio.catalog.markers import disclaim, seal
from rlio.catalog.names import DATA_DIR, check_writer_id, schema_path
from rlio.catalog.rows import joined
from rlio.errors import (
    CorruptData,
    DataNotFound,
    LedgerError,
    PublishError,
    RlioError,
    SchemaConflict,
    UnsafeData,
    excerpt,
)
from rlio.log.publisher import Publisher, check_schema
from rlio.log.spool import (
    LogFolder,
    LogState,
    Spool,
    SpoolLike,
    find_logs,
    first_row,
    parse_spool,
    spool_of,
    sweep,
)
from rlio.log.stray_logs import stray_logs, stray_message
from rlio.log.wal import Damage, Frame, SegmentReader, count_whole_rows, read_plain, read_segment
from rlio.opening import require_header
from rlio.schemas.schema import Schema
from rlio.storage.clients import within
from rlio.storage.filesystem import Storage
from rlio.support.progress import Progress, silent
from rlio.writers.encoder import Encoder
from rlio.writers.json_encoder import JsonEncoder
from rlio.writers.parquet_encoder import ParquetEncoder
from rlio.writers.roll import Roll

__all__ = [
    "Outcome",
    "RecoveredLog",
    "RecoveryReport",
    "WriterLog",
    "recover",
    "recover_before_writing",
    "recover_interrupted",
    "recover_log",
]

logger: logging.Logger = logging.getLogger("rlio")

#: Folder for files that cannot be used; no writer id begins with an underscore.
_ASIDE: Final = "_damaged"
#: Bytes of shards that may wait for the store before recovery stops making more.
_MOST_WAITING: Final = 128 << 20
#: Seconds that a new writer waits for recovery; what remains is stored in the background.
_OPEN_SECONDS: Final = 30.0
#: Seconds between two checks whether a writer has died.
_POLL_SECONDS: Final = 0.05
# How many folders of a root without a header are searched for shards.
_LOOKED_AT: Final = 8


Outcome: TypeAlias = Literal["recovered", "alive", "other-host", "other-user", "elsewhere", "failed"]
#: Outcomes that leave rows of writers that are, as far as known, dead.
_LEFT: Final[frozenset[Outcome]] = frozenset(["other-host", "other-user", "elsewhere", "failed"])


@dataclass(frozen=True, kw_only=True)
class RecoveredLog:
    """The result for one writer's log.

    Attributes:
        writer: The writer's id.
        outcome: "recovered"; "alive": its writer is alive, or may be (a copy); "failed": the next recovery
            tries again; "other-host", "other-user": left for them; "elsewhere": left, because it was written
            to the same URI with other storage options.
        rows: Rows that were not published before.
        lost_rows: Rows of whole frames behind damage; they are set aside, not deleted.
        set_aside: Files that hold the unreadable data.
        error: Why recovery failed, or what is damaged.
    """

    writer: str
    outcome: Outcome
    rows: int = 0
    lost_rows: int = 0
    set_aside: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class RecoveryReport:
    """The result of `recover`.

    Attributes:
        root: The data set.
        spool: The folder of its logs; None if it can have none.
        logs: One entry per log.
    """

    root: str
    spool: str | None
    logs: tuple[RecoveredLog, ...] = field(default=())

    @property
    def rows(self) -> int:
        """Rows that were not published before."""
        return sum(log.rows for log in self.logs)

    @property
    def is_clean(self) -> bool:
        """Whether nothing failed or was damaged, and only logs of live writers are left."""
        return all(log.error is None and log.outcome not in _LEFT for log in self.logs)

    def to_json(self) -> dict[str, Any]:
        """Return the report as `rlio recover --json` prints it."""
        return {**asdict(self), "logs": [asdict(log) for log in self.logs], "rows": self.rows}


@dataclass(frozen=True)
class WriterLog:
    """The place of a writer's write-ahead log. Can be pickled for other processes.

    Attributes:
        storage: The data set's root.
        folder: The log's folder, on the machine of the writer.
    """

    storage: Storage
    folder: str


def recover(
    uri: str | os.PathLike[str],
    *,
    spool: SpoolLike = "auto",
    all_hosts: bool = False,
    conflicting: bool = False,
    must_exist: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> RecoveryReport:
    """Publish the rows that dead writers left in their logs. Safe at any time, in any number of processes.

    Args:
        uri: Root of the data set.
        spool: The value that the writers were given.
        all_hosts: Also recover logs of other hosts, and copies of logs. Use it only if their writers are
            surely dead.
        conflicting: Also store rows whose schema gives a column another type than the data set does. Read
            them with ``columns=``, without that column. Without this option, such a log fails and stays.
        must_exist: Raise if the root has neither a data set nor a log, because it may be mistyped.
        storage_options: Options for fsspec. Logs are kept apart by server: pass the options of the writers.
        progress: Shows how many bytes of logs are done; see `rlio.support.progress`.

    Returns:
        One entry per log. Failures are in the report and logged; these logs stay for another attempt.

    Raises:
        DataNotFound: With ``must_exist``: the root has neither a data set nor a log.
        OptionError: ``spool`` is None, or illegal.
        UnknownName: No filesystem has the URL's scheme.
    """
    storage = Storage.open(uri, storage_options=storage_options)
    kept = parse_spool(spool, None)
    where = None if kept is None else spool_of(storage, kept)
    if where is not None:
        sweep(where)
    logs = [] if where is None else find_logs(where)
    sizes = [log.bytes() for log in logs]
    found = []
    with progress("recover", sum(sizes)) as advance:
        for log, size in zip(logs, sizes, strict=True):
            part = _Part(advance, size)
            found.append(
                _try_log(storage, log, all_hosts=all_hosts, conflicting=conflicting, advance=part.advance)
            )
            part.advance(size)  # What is left: a log that stays is not read.
    report = RecoveryReport(
        root=storage.uri,
        spool=where,
        logs=(*(log for log in found if log is not None), *_elsewhere(storage, kept)),
    )
    if must_exist and not report.logs:
        try:
            require_header(storage)
        except DataNotFound:
            if not _has_shards(storage):
                raise
    return report


class _Part:
    """A part of a progress, which is not exceeded."""

    def __init__(self, advance: Callable[[int], object], total: int) -> None:
        self._advance, self._left = advance, total

    def advance(self, done: int) -> None:
        """Count what is done."""
        done = min(done, self._left)
        self._left -= done
        self._advance(done)


def _has_shards(storage: Storage) -> bool:
    """Whether one of the first folders of a root without a header holds a shard."""
    return any(list_writer(storage, writer).writers for writer in storage.folders(DATA_DIR)[:_LOOKED_AT])


def recover_log(log: WriterLog, *, timeout: float) -> int:
    """Publish the rows that one dead writer left in its log, on the machine of that log. Safe at any time.

    Args:
        log: The writer's log.
        timeout: Seconds to wait for a writer that is still alive, such as one that was killed a moment ago.

    Returns:
        Rows of the writer that the data set has now without a gap, from its first row on. They may be fewer
        than the writer logged, if the log was damaged or is gone with its disk.

    Raises:
        PublishError: The log could not be recovered, or its writer is alive; the log stays.
        StoreError: The store did not answer.
    """
    deadline = time.monotonic() + timeout
    abandoned = LogFolder(log.folder)
    while True:
        found = _try_log(log.storage, abandoned)
        if found is None or found.outcome == "recovered":
            return _end_of(_coverage(list_writer(log.storage, abandoned.writer), abandoned.writer))
        if found.outcome != "alive" or time.monotonic() >= deadline:
            raise PublishError(
                f"the log {log.folder} is not recovered ({found.outcome}): {found.error or 'it stays'}",
                uri=log.storage.uri,
            )
        time.sleep(_POLL_SECONDS)


def _elsewhere(storage: Storage, spool: Spool | None) -> list[RecoveredLog]:
    """Return the logs of the same URI in the folders of other servers, which no other call reports."""
    found = []
    for log in [] if spool is None else stray_logs(storage, spool):
        message = stray_message(log, storage.uri)
        logger.warning("%s", message)
        found.append(RecoveredLog(writer=log.writer, outcome="elsewhere", error=message))
    return found


def recover_before_writing(
    root: str | os.PathLike[str], spool: Spool | None, *, storage_options: Mapping[str, Any] | None
) -> None:
    """Run `recover` for a writer that is about to open. Logs failures, and opens the writer anyway.

    A recovery that takes long, for instance because the store hangs, continues in the background.
    """
    if spool is None:
        return
    try:
        report = within(_OPEN_SECONDS, lambda: recover(root, spool=spool, storage_options=storage_options))
    except OSError as error:
        logger.error("rows that writers of %s left in their logs are not stored yet: %s", root, error)
        return
    if report.rows:
        logger.warning("%s: recovered %d rows of writers that had died", report.root, report.rows)


def recover_interrupted(publisher: Publisher, *, timeout: float | None) -> None:
    """Store the rows of a live writer from its log, as if it had died. The writer accepts no more rows.

    Args:
        publisher: The publisher of a writer whose encoding threads have ended. You can repeat the call.
        timeout: Seconds; None: without limit.

    Raises:
        PublishError: The rows could not be stored, or not in time; the log stays.
    """
    if publisher.log is None:
        return
    publisher.close(seal_at=None)
    storage, path = publisher.storage, publisher.log.path
    try:
        found = within(timeout, lambda: _try_log(storage, LogFolder(path)))
    except TimeoutError as error:
        raise PublishError(
            f"the store did not take the rows within {timeout} s: they are safe in {path}; "
            "`rlio recover` stores them",
            uri=storage.uri,
        ) from error
    if found is None:
        return
    publisher.rows_published += found.rows
    if found.error is not None or (found.outcome != "recovered" and os.path.exists(path)):
        raise PublishError(
            f"the rows in {path} could not be stored: {found.error or 'they are being recovered elsewhere'}",
            uri=storage.uri,
        )


def _try_log(
    storage: Storage,
    log: LogFolder,
    *,
    all_hosts: bool = False,
    conflicting: bool = False,
    advance: Callable[[int], object] = lambda done: None,
) -> RecoveredLog | None:
    """Recover one log. Catches its errors, because one log must not block the others.

    Returns None if nothing is left: the writer has closed, or another process has recovered the log.
    """
    try:
        state = None if log.claim(all_hosts=all_hosts) else log.state()
    except (RlioError, OSError) as error:
        logger.error("the log %s could not be claimed: %s", log.path, error)
        return RecoveredLog(writer=log.writer, outcome="failed", error=str(error))
    if state is not None:
        return _left(storage, log, state)
    try:
        return _Recovery(storage, log, conflicting=conflicting, advance=advance).run()
    except (RlioError, OSError) as error:
        hint = "; `rlio recover --conflicting` stores its rows anyway"
        reason = f"{error}{hint if isinstance(error, SchemaConflict) else ''}"
        logger.error("the log %s could not be recovered, and stays: %s", log.path, reason)
        return RecoveredLog(writer=log.writer, outcome="failed", error=reason)
    finally:
        log.release()


def _left(storage: Storage, log: LogFolder, state: LogState) -> RecoveredLog | None:
    """Return the entry for a log that could not be claimed."""
    if state == "gone":
        return None
    if state == "ownerless" and _is_stored(storage, log):
        # The writer had removed the log. A power failure brought back some files, but not the owner file.
        log.remove()
        return RecoveredLog(writer=log.writer, outcome="recovered")
    if state == "ownerless":
        error = f"{log.path} has rows and no owner file: restore it, or copy the whole log again"
        logger.error("%s", error)
        return RecoveredLog(writer=log.writer, outcome="failed", error=error)
    return RecoveredLog(writer=log.writer, outcome=state)


def _is_stored(storage: Storage, log: LogFolder) -> bool:
    """Whether the log's writer is closed for good and all its rows are stored, including those in the log."""
    listing = list_writer(storage, log.writer)
    sealed = listing.sealed.get(log.writer)
    if sealed is None or _end_of(_coverage(listing, log.writer)) < sealed:
        return False
    ends = [name.end for name, _ in log.shards()]
    for path in log.segments():
        try:
            ends.append(read_segment(path).end)
        except CorruptData:
            ends.append(first_row(path) + count_whole_rows(path))
    return max(ends, default=0) <= sealed


def _coverage(listing: Listing, writer: str) -> list[range]:
    """Return the rows of a writer that are stored or trimmed."""
    stored = [range(segment.first, segment.end) for segment in listing.cover(writer).segments]
    return [range(listing.trimmed_below(writer)), *stored]


class _Recovery:
    """The recovery of one claimed log."""

    def __init__(
        self, storage: Storage, folder: LogFolder, *, conflicting: bool, advance: Callable[[int], object]
    ) -> None:
        self._storage = storage
        self._advance = advance
        self._conflicting = conflicting
        self._folder = folder
        self._writer = check_writer_id(folder.writer)
        #: Files that cannot be used, and why.
        self._unusable: list[tuple[str, str]] = []
        self._set_aside: list[str] = []
        self._lost = 0
        #: Row counts of the stored frames in the first segment that also has unstored frames.
        self._passed: list[int] = []
        #: Rows stored by this recovery, including rows that were already stored before.
        self._published: list[range] = []

    def run(self) -> RecoveredLog:
        """Publish the rows of the log, mark its writer as closed, and remove the log."""
        put_header(self._storage)  # Without the header, the data set that is stored now could not be opened.
        before = _coverage(list_writer(self._storage, self._writer), self._writer)
        self._publish_shards()
        end = self._publish_frames(_end_of([*before, *self._published]))
        end = max([end, *(rows.stop for rows in self._published)])
        self._move_aside()
        if end:
            seal(self._storage, self._writer, end)
        disclaim(self._storage, self._writer)
        self._folder.remove()
        return RecoveredLog(
            writer=self._writer,
            outcome="recovered",
            rows=sum(map(len, joined([*before, *self._published]))) - sum(map(len, joined(before))),
            lost_rows=self._lost,
            set_aside=tuple(self._set_aside),
            error="; ".join(reason for _, reason in self._unusable) or None,
        )

    def _publish_shards(self) -> None:
        """Store the encoded shards that an earlier version left in the log, after their schemas."""
        for path in self._folder.schemas():
            schema = Schema.from_text(read_plain(path), uri=path)
            if not self._conflicting:
                check_schema(self._storage, schema, again=True)
            self._storage.put(schema_path(schema.hash), schema.text.encode())
        for name, path in self._folder.shards():
            data = read_plain(path)
            if len(data) != name.size or zlib.crc32(data) != name.crc32:
                self._put_aside(path, f"the shard {name.format()} that waited in the log is damaged")
                self._lost += name.rows
                continue
            put_shard(self._storage, self._writer, name, memoryview(data))
            self._advance(len(data))
            self._published.append(range(name.first, name.end))

    def _publish_frames(self, stored: int) -> int:
        """Make shards of the logged rows from ``stored`` on. Returns the row after the last stored row."""
        frames = self._frames(stored)
        first = next(frames, None)
        if first is None:
            return stored
        publisher = Publisher(
            self._storage,
            self._writer,
            first=first[1].first,
            is_new=False,
            conflicting=self._conflicting,
        )
        try:
            encoder = _encoder(first[0], publisher)
            try:
                end = self._make_shards(encoder, publisher, itertools.chain([first], frames))
            finally:
                encoder.close()
        finally:
            publisher.close(seal_at=None)
        self._published.append(range(first[1].first, end))
        return end

    def _make_shards(
        self, encoder: Encoder[Any], publisher: Publisher, frames: Iterable[tuple[SegmentReader, Frame, bool]]
    ) -> int:
        """Make and store shards of frames. Returns the row after the last one."""
        schema, first, end = None, publisher.next_row, 0
        for index, (segment, frame, begins_shard) in enumerate(frames):
            if begins_shard and index:
                encoder.finish()
            if segment.header.get("schema") != schema:
                schema = segment.header.get("schema")
                encoder.use(Schema.from_text(str(schema), uri=segment.path))
            if not index:
                encoder.resume(_shard_rows(segment), self._passed)
            encoder.append(encoder.from_frame(frame))
            self._advance(len(frame.payload))
            end = frame.first + frame.rows
            # A log may be larger than memory. If the store does not take the shards, flush() raises here.
            if publisher.waiting_bytes >= _MOST_WAITING:
                publisher.flush()
        encoder.store()
        # The log is removed after this: make sure that no row is missing, even after a miscount.
        if publisher.next_row != end or publisher.rows_published != end - first:
            raise LedgerError(
                f"rows {first} to {end - 1} were in the log, and {publisher.rows_published} of them were "
                "stored: the log stays; report this",
                uri=self._storage.uri,
            )
        return end

    def _frames(self, stored: int) -> Iterator[tuple[SegmentReader, Frame, bool]]:
        """Yield the frames with unstored rows, each row once, and whether the frame begins a shard."""
        paths = self._folder.segments()
        segments = [segment for path in paths if (segment := self._read(path)) is not None]
        position, whole = stored, True
        if not self._may_lack_files(segments):
            # A segment is removed once its rows are stored, so the rows before the first segment are stored,
            # even if no listing shows them. This needs the first file: an unreadable file may hold rows.
            position = max([stored, *map(first_row, paths[:1])])
        begun = False
        for index, segment in enumerate(segments):
            # After a broken segment, the next one starts with the rows that the broken one never
            # acknowledged.
            limit = segments[index + 1].first if index + 1 < len(segments) else segment.end
            begins = bool(segment.header.get("begins_shard"))
            if not whole or segment.first > position:
                whole = False
                self._put_aside(segment.path, f"the rows before {segment.first} are missing")
                self._lost += segment.end - segment.first
                continue
            if not begun:
                self._passed = []
            for frame in segment.frames:
                end = frame.first + frame.rows
                if not begun and end <= position:
                    self._passed.append(frame.rows)
                if end > position and frame.first < limit:
                    begun = True
                    yield segment, frame, begins
                    begins, position = False, end
            if segment.damage is not None:
                whole = self._take_damage(segment, segment.damage) or limit <= segment.end

    def _may_lack_files(self, segments: list[SegmentReader]) -> bool:
        """Whether a power failure may have removed a segment but kept a later one.

        The names of segments are synced with their rows. Except with ``sync="always"``, all of them may be
        unsynced. The stored rows then decide; a local root lists them exactly.
        """
        return self._storage.is_local and any(one.header.get("sync") != "always" for one in segments)

    def _read(self, path: str) -> SegmentReader | None:
        try:
            return read_segment(path)
        except UnsafeData as error:  # A link or a pipe: do not follow it.
            self._put_aside(path, str(error))
            return None
        except CorruptData as error:
            rows = count_whole_rows(path)
            if rows:  # Without rows, the writer died while it made the segment.
                self._lost += rows
                self._put_aside(path, str(error))
            return None

    def _take_damage(self, segment: SegmentReader, damage: Damage) -> bool:
        """Keep the data behind the valid prefix. Returns whether all acknowledged rows are there."""
        if damage.torn:
            logger.info("%s: %s: its write() never returned", segment.path, damage.reason)
            return True
        self._lost += damage.rows
        self._put_aside(segment.path, f"{damage.reason}; {damage.rows} whole rows follow the damage")
        return False

    def _put_aside(self, path: str, reason: str) -> None:
        """Keep a file that cannot be used. It is moved after its usable rows are stored."""
        self._unusable.append((path, f"{reason} [in {path}]"))

    def _move_aside(self) -> None:
        """Move the unusable files to a folder that nothing changes."""
        folder = os.path.join(os.path.dirname(self._folder.path), _ASIDE)
        # Last file first: if this is interrupted, the remaining files still begin with the damage, and
        # recovery does not take a later file for the beginning of the log.
        for path, reason in sorted(self._unusable, reverse=True):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            target = os.path.join(folder, f"{self._writer}-{os.path.basename(path)}")
            os.replace(path, target)
            self._set_aside.append(target)
            logger.error("%s: set aside as %s", reason, target)


def _end_of(stored: list[range]) -> int:
    """Return the row up to which all rows are stored."""
    first = next(iter(joined(stored)), range(0))
    return 0 if first.start else first.stop


_ENCODERS: Final[Mapping[str, Callable[[Publisher, Roll, Mapping[str, Any]], Encoder[Any]]]] = {
    "parquet": ParquetEncoder.from_header,
    "json": JsonEncoder.from_header,
}


def _shard_rows(segment: SegmentReader) -> int:
    rows = segment.header.get("shard_rows", 0)
    if type(rows) is not int or rows < 0:
        raise CorruptData(
            f"the log's header says shard_rows={excerpt(rows)}: expected a number of rows", uri=segment.path
        )
    return rows


def _encoder(segment: SegmentReader, publisher: Publisher) -> Encoder[Any]:
    """Return the encoder that the segment's header describes.

    Raises:
        CorruptData: The header lacks a value, or has a later format.
    """
    header = segment.header
    try:
        if header["format"] != 0 or header["kind"] not in _ENCODERS:
            raise CorruptData(
                f"found a log of format {excerpt(header['format'])} and kind {excerpt(header['kind'])}: "
                "recover it with the rlio that wrote it",
                uri=segment.path,
            )
        max_rows, max_bytes = header["roll"]
        roll = Roll(max_rows=max_rows, max_bytes=max_bytes, max_seconds=None)
        return _ENCODERS[header["kind"]](publisher, roll, header)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, RlioError):
            raise
        raise CorruptData(f"the log's header lacks a value: {error!r}", uri=segment.path) from error
