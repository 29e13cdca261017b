"""`status`: what the writers and followers of a data set do at this moment. Nothing is written.

It reads the listing of the root, and the owner files and the frame headers of the logs on this machine. No
shard is opened, and no payload of a log is read.

Example:
    >>> import numpy as np, rlio
    >>> writer = rlio.ParquetWriter("status-example", writer_id="w0")
    >>> writer.write(rlio.SampleBatch(obs=np.zeros((3, 4)), rewards=np.ones(3)))
    >>> writer.flush()
    >>> writer.write(rlio.SampleBatch(obs=np.zeros((2, 4)), rewards=np.ones(2)))
    >>> (one,) = rlio.maintenance.status("status-example").writers
    >>> one.state, one.rows, one.rows_unpublished
    ('alive', 3, 2)
    >>> writer.close()
    >>> (one,) = rlio.maintenance.status("status-example").writers
    >>> one.state, one.rows, one.rows_unpublished
    ('closed', 5, 0)
"""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from rlio.catalog.commit import read_header
from rlio.catalog.listing import Listing, Segment, ShardRef, list_with_times
from rlio.catalog.names import HEADER
from rlio.catalog.rows import joined, without
from rlio.errors import DataNotFound, RlioError
from rlio.following.marks import PROGRESS_DIR, Mark, newest, parse_mark_path
from rlio.log.spool import LogFolder, Spool, find_logs, spool_of
from rlio.log.stray_logs import stray_logs, stray_message
from rlio.log.wal import logged_rows
from rlio.maintenance.logs import set_aside
from rlio.opening import require_header
from rlio.storage.filesystem import Storage

__all__ = [
    "DatasetStatus",
    "FollowerStatus",
    "LogOwner",
    "LogStatus",
    "WriterState",
    "WriterStatus",
    "status",
]

logger: logging.Logger = logging.getLogger("rlio")

WriterState: TypeAlias = Literal["alive", "dead", "closed", "unknown"]
LogOwner: TypeAlias = Literal["alive", "dead", "other-host", "other-user", "ownerless", "elsewhere"]


@dataclass(frozen=True, kw_only=True)
class WriterStatus:
    """One writer.

    Attributes:
        writer: Its id.
        state: "alive": its process runs on this host and holds its log; "dead": it left its log on this
            host; "closed": it is closed for good; "unknown": another host's or user's, or one without a log.
        rows: Rows that readers see.
        rows_hidden: Rows in shards of an attempt at a part of a job, which readers do not see: the attempt
            is not closed yet, or another one was taken.
        rows_unpublished: Rows in its log that are in no shard yet; None: not known on this machine.
        shards: Shards that are stored, also those whose rows a larger shard has.
        bytes: Bytes of those.
        last_commit: When its newest row was stored, in seconds since the epoch by the store's clock; None:
            it has no shard, or the store's listing does not tell. Of rows that `compact` has merged since,
            when they were merged, once `gc` has removed the shards before.
    """

    writer: str
    state: WriterState
    rows: int
    rows_hidden: int
    rows_unpublished: int | None
    shards: int
    bytes: int
    last_commit: float | None


@dataclass(frozen=True, kw_only=True)
class LogStatus:
    """One write-ahead log on this machine.

    Attributes:
        writer: Id of its writer.
        path: Its folder.
        owner: "alive": the owner process runs here; "dead": it does not, and the log is left;
            "other-host", "other-user": theirs, and whether the process lives is not known; "ownerless": the
            log's owner file is missing; "elsewhere": left by a writer to the same URI with other storage
            options.
        pid: Process id of the owner on its host; None: not known.
        rows: Rows in it that are in no shard; None: it may not be read.
        bytes: Bytes of its files; None: they may not be listed.
        unread_bytes: Bytes after the last whole frames of its files: a frame that is being written, one
            that a crash cut, or damage; `rlio.verify` distinguishes them.
        command: The command that publishes its rows; None: its owner publishes them, or the command is not
            known. With owner "other-host", only for a host that is gone for good.
    """

    writer: str
    path: str
    owner: LogOwner
    pid: int | None = None
    rows: int | None = None
    bytes: int | None = None
    unread_bytes: int = 0
    command: str | None = None


@dataclass(frozen=True, kw_only=True)
class FollowerStatus:
    """One follower that puts progress marks (`rlio.Markers`), or a group of them that share the writers.

    Attributes:
        name: Its name.
        writers: Writers that it has put a mark for.
        rows_behind: Rows that readers see and it has not taken, as of its last marks. Those of writers that
            it has put no mark for count.
        blocks: Ids of open writers whose rows have reached the ceiling that it gave them: a
            `rlio.PacedWriter` waits for it.
        last_mark: When it put its last mark, in seconds since the epoch by the store's clock; None: the
            store's listing does not tell. A follower with nothing new to say puts no marks.
    """

    name: str
    writers: int
    rows_behind: int
    blocks: tuple[str, ...]
    last_mark: float | None


@dataclass(frozen=True, kw_only=True)
class DatasetStatus:
    """What `status` found.

    Attributes:
        uri: The root.
        time: When it was looked at, in seconds since the epoch by this machine's clock.
        spool: The folder of this root's logs on this machine; None where there can be none.
        writers: By id.
        logs: By writer; those of other folders last.
        followers: By name.
        set_aside: Files that a recovery could not read and has kept; `rlio.verify` says what they held.
    """

    uri: str
    time: float
    spool: str | None
    writers: tuple[WriterStatus, ...]
    logs: tuple[LogStatus, ...]
    followers: tuple[FollowerStatus, ...]
    set_aside: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Rows that readers see."""
        return sum(writer.rows for writer in self.writers)

    @property
    def rows_unpublished(self) -> int:
        """Rows in logs on this machine that are in no shard yet, as far as they may be read."""
        return sum(log.rows or 0 for log in self.logs)

    @property
    def shards(self) -> int:
        """Shards that are stored."""
        return sum(writer.shards for writer in self.writers)

    @property
    def bytes(self) -> int:
        """Bytes of the shards."""
        return sum(writer.bytes for writer in self.writers)

    @property
    def last_commit(self) -> float | None:
        """When the newest row was stored, by the store's clock; None: there is none, or it does not tell."""
        return max((one.last_commit for one in self.writers if one.last_commit is not None), default=None)

    @property
    def left(self) -> tuple[LogStatus, ...]:
        """The logs whose owner is not known to live."""
        return tuple(log for log in self.logs if log.owner != "alive")

    def to_json(self) -> dict[str, Any]:
        """As ``rlio status --json`` prints it."""
        sums = ("rows", "rows_unpublished", "shards", "bytes", "last_commit")
        return asdict(self) | {name: getattr(self, name) for name in sums}


def status(
    root: str | os.PathLike[str],
    *,
    spool: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> DatasetStatus:
    """Return what the writers and followers of a data set do. Writes nothing; safe at any time.

    The cost is that of two listings, of ``data/`` and of the progress marks, and of one small read for each
    frame in the logs on this machine. It cannot know whether writers of other hosts are alive, or which rows
    are in their logs. It does not see followers without progress marks, such as
    `rlio.FollowReader`, whose positions are only in their states.

    Args:
        root: The data set: a path or any fsspec URL.
        spool: Folder of the writers' logs, if it was passed to them.
        storage_options: For fsspec. Logs are separate for each server: pass the same options as to the
            writers.

    Raises:
        DataNotFound: There is neither a data set nor a log of one.
        OptionError: It is in another format version.
        CorruptData: Its header is damaged.
        StoreError: The store does not answer.
    """
    storage = Storage.open(root, storage_options=storage_options)
    kept = Spool(folder=spool)
    folder = spool_of(storage, kept)
    # Logs before shards: rows that are published meanwhile are counted once, as published.
    logs = _look_at_logs(storage, kept, folder)
    listing, times = list_with_times(storage)
    _check_header(storage, listing, has_logs=bool(logs))
    command = _recover_command(storage, kept, has_options=bool(storage_options))
    seen = [log.status(_stored(listing, log.log.writer), command) for log in logs]
    own = {log.writer: log for log in reversed(seen) if log.owner != "elsewhere"}
    shown = (
        listing.shards.keys()
        | listing.sealed.keys()
        | listing.trimmed.keys()
        | listing.passed_over.keys()
        | own.keys()
    )
    covers = {writer: listing.cover(writer).segments for writer in shown if writer not in listing.passed_over}
    return DatasetStatus(
        uri=storage.uri,
        time=time.time(),
        spool=folder,
        writers=tuple(
            _writer(writer, listing, covers.get(writer, []), own.get(writer), times)
            for writer in sorted(shown)
        ),
        logs=tuple(seen),
        followers=_followers(storage, listing, covers),
        set_aside=() if folder is None else set_aside(folder),
    )


def _check_header(storage: Storage, listing: Listing, *, has_logs: bool) -> None:
    """Raise unless the root is a data set, or one whose writers could not create it yet.

    Raises:
        DataNotFound: Neither is the case.
    """
    try:
        read_header(storage)
    except DataNotFound:
        if not listing.writers and not has_logs:
            require_header(storage)  # Raises, and says what is there instead.
        logger.warning("%s has no %s: readers do not recognise a data set there", storage.uri, HEADER)


def _recover_command(storage: Storage, spool: Spool, *, has_options: bool) -> list[str]:
    """The command that publishes what dead writers left; options may hold secrets, and are not repeated."""
    command = ["rlio", "recover", storage.uri]
    if spool.folder is not None:
        command += ["--spool", os.fspath(spool.folder)]
    return [*command, "--storage-options", "@FILE"] if has_options else command


def _shards_of(listing: Listing, writer: str) -> list[ShardRef]:
    """All shards of a writer, also those that no reader is served."""
    passed = listing.passed_over.get(writer)
    return listing.shards.get(writer, []) if passed is None else passed.shards


def _stored(listing: Listing, writer: str) -> list[range]:
    """Rows of a writer that a shard has or had, also those that no reader sees."""
    refs = _shards_of(listing, writer)
    gone = range(listing.trimmed_below(writer))
    return joined([gone, *(range(ref.name.first, ref.name.end) for ref in refs)])


# ---- writers ----


def _writer(
    writer: str,
    listing: Listing,
    segments: list[Segment],
    log: LogStatus | None,
    times: Mapping[str, float | None],
) -> WriterStatus:
    """What is known of one writer.

    Args:
        writer: Its id.
        listing: What is stored.
        segments: What serves its rows.
        log: Its log on this machine.
        times: Path -> when the object was stored.
    """
    refs = _shards_of(listing, writer)
    passed = listing.passed_over.get(writer)
    sealed = listing.sealed.get(writer) if passed is None else passed.sealed
    state: WriterState = "unknown"
    if sealed is not None:
        state = "closed"
    elif log is not None and (log.owner == "alive" or log.owner == "dead"):
        state = log.owner
    unpublished = 0 if state == "closed" else None
    return WriterStatus(
        writer=writer,
        state=state,
        rows=sum(segment.rows for segment in segments),
        rows_hidden=0 if passed is None else sum(map(len, _stored(listing, writer))),
        rows_unpublished=unpublished if log is None else log.rows,
        shards=len(refs),
        bytes=sum(ref.name.size for ref in refs),
        last_commit=_last_commit(refs, times),
    )


def _last_commit(refs: list[ShardRef], times: Mapping[str, float | None]) -> float | None:
    """When the last row was stored: by the first shard that had it, for a compacted one came later."""
    end = max((ref.name.end for ref in refs), default=0)
    found = [times.get(ref.path) for ref in refs if ref.name.end == end]
    return min((one for one in found if one is not None), default=None)


# ---- logs ----


def _look_at_logs(storage: Storage, spool: Spool, folder: str | None) -> list[_Log]:
    """The logs of the root's writers in ``folder``, and those in other folders that name the root."""
    try:
        own = [] if folder is None else find_logs(folder)
    except OSError as error:
        logger.warning("the folder of logs cannot be listed: %s", error)
        own = []
    strays = stray_logs(storage, spool)
    for stray in strays:
        logger.warning("%s", stray_message(stray, storage.uri))
    found = [_Log.look(log) for log in own]
    found += [_Log.look(stray, is_stray=True) for stray in strays]
    return [log for log in found if log is not None]


@dataclass(frozen=True)
class _Log:
    """A log as it was found, before it is known which of its rows are in shards.

    Attributes:
        log: Where it is.
        owner: See `LogStatus`.
        pid: See `LogStatus`.
        rows: Rows in it, whether they are in shards or not; None: it may not be read.
        bytes: See `LogStatus`.
        unread_bytes: See `LogStatus`.
    """

    log: LogFolder
    owner: LogOwner
    pid: int | None
    rows: list[range] | None = None
    bytes: int | None = None
    unread_bytes: int = 0

    @classmethod
    def look(cls, log: LogFolder, *, is_stray: bool = False) -> _Log | None:
        """Look at a log; None: it was done with, and removed, since it was listed."""
        try:
            state = log.state()
            if state == "gone":
                return None
            owner: LogOwner = state
            said = {} if state in ("other-user", "ownerless") else log.read_owner()
            if state == "alive" and not log.is_held(said):
                owner = "dead"
            pid = said.get("pid")
            found = cls(log, "elsewhere" if is_stray else owner, pid if type(pid) is int else None)
            return found._with_rows()
        except FileNotFoundError:
            return None
        except PermissionError:
            return cls(log, "elsewhere" if is_stray else "other-user", None)

    def _with_rows(self) -> _Log:
        """This log with the rows and bytes of its files."""
        folder = self.log
        rows = folder.shard_rows()
        unread = 0
        for path in folder.segments():
            try:
                held, behind = logged_rows(path)
            except FileNotFoundError:
                continue  # Its rows were published since it was listed.
            except RlioError as error:
                logger.warning("a part of the log of writer %s is not counted: %s", self.log.writer, error)
                continue
            rows.append(held)
            unread += behind
        return replace(self, rows=rows, bytes=folder.bytes(), unread_bytes=unread)

    def status(self, stored: list[range], command: list[str]) -> LogStatus:
        """What is told of it.

        Args:
            stored: Rows of its writer that a shard has or had.
            command: What publishes the rows of dead writers of this host.
        """
        by_owner: dict[LogOwner, list[str]] = {"dead": command, "other-host": [*command, "--all-hosts"]}
        publishes = by_owner.get(self.owner)
        return LogStatus(
            writer=self.log.writer,
            path=self.log.path,
            owner=self.owner,
            pid=self.pid,
            rows=None if self.rows is None else sum(map(len, without(self.rows, stored))),
            bytes=self.bytes,
            unread_bytes=self.unread_bytes,
            command=None if publishes is None else shlex.join(publishes),
        )


# ---- followers ----


def _followers(
    storage: Storage, listing: Listing, covers: Mapping[str, list[Segment]]
) -> tuple[FollowerStatus, ...]:
    """What the progress marks say.

    Args:
        storage: The root.
        listing: What is stored.
        covers: Writer -> what serves its rows.
    """
    entries, times = storage.list_with_times(PROGRESS_DIR)
    by_writer: dict[str, list[Mark]] = {}
    told: dict[str, float] = {}
    for path, _ in entries:
        parsed = parse_mark_path(path)
        if parsed is not None:
            writer, mark = parsed
            by_writer.setdefault(writer, []).append(mark)
            told[mark.follower] = max(told.get(mark.follower, 0.0), times[path] or 0.0)
    marks: dict[str, dict[str, Mark]] = {name: {} for name in sorted(told)}
    for writer, found in by_writer.items():
        for name, mark in newest(found).items():
            marks[name][writer] = mark
    open_ends = {
        writer: max([listing.trimmed_below(writer), *(part.end for part in parts)])
        for writer, parts in covers.items()
        if writer not in listing.sealed
    }
    return tuple(
        FollowerStatus(
            name=name,
            writers=len(own),
            rows_behind=sum(
                _rows_from(own[writer].row if writer in own else 0, parts) for writer, parts in covers.items()
            ),
            blocks=tuple(
                writer
                for writer, mark in sorted(own.items())
                if writer in open_ends and open_ends[writer] >= mark.ceiling
            ),
            last_mark=told[name] or None,
        )
        for name, own in marks.items()
    )


def _rows_from(row: int, segments: list[Segment]) -> int:
    """How many of the rows lie at or after ``row``."""
    return sum(part.end - max(part.first, row) for part in segments if part.end > row)
