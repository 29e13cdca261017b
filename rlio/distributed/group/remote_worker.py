"""`RemoteWorker`: the group's record of one worker index: its actor, its requests and its answers.

It only stores; `rlio.distributed.group.actor_pool` decides.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rlio.batch import Batch
from rlio.distributed.group.actors import Opened
from rlio.distributed.group.worker_spec import WorkerId
from rlio.reader import JsonState

__all__ = ["Fragment", "RemoteWorker", "WorkerStatus"]

# Any in this module: Ray's handles and references.


@dataclass(frozen=True)
class Fragment:
    """A batch of one worker.

    Attributes:
        batch: The batch. Its arrays are read-only and lie in Ray's object store while a reference exists:
            copy arrays that you change or keep for long.
        worker_index: Index of the worker.
        incarnation: Number of earlier workers with this index.
        order: Number of earlier batches of the group.
    """

    batch: Batch
    worker_index: int
    incarnation: int
    order: int


@dataclass(frozen=True)
class WorkerStatus:
    """Status of a worker as far as its group knows.

    Attributes:
        worker_index: Index of the worker.
        incarnation: Number of earlier workers with this index.
        alive: False: it was lost and is not replaced.
        started: Whether it has reported its start; False while it waits for its restart.
        in_flight: Number of requested batches.
        waiting: Batches that arrived and were not taken from the group yet.
        rows: Rows of its batches so far, without those of earlier workers with this index.
        rows_unpublished: Rows that its writer had accepted, and that were not in the data set, at its last
            batch: they are in its log, or in memory if it has none. An upper bound of the `rows` that are not
            in the data set.
        pid: Process id; None before it has started.
        host: Name of its machine; None before it has started.
        node_id: Ray's id of its machine; None before it has started.
        writer_id: Writer id of its rows; None if its output has none.
        ended: Whether it reached the end of its data.
    """

    worker_index: int
    incarnation: int
    alive: bool
    started: bool
    in_flight: int
    waiting: int
    rows: int
    rows_unpublished: int
    pid: int | None
    host: str | None
    node_id: str | None
    writer_id: str | None
    ended: bool


@dataclass
class RemoteWorker:
    """The record of one worker index.

    Attributes:
        index: From 1 on.
        incarnation: Incarnation of the present worker; -1 before the first.
        actor: Ray's handle.
        opening: Reference to the answer of `WorkerActor.open` until it arrives.
        opened: That answer.
        requests: Requested batches in order: reference -> the number of the last broadcast that the worker
            had received before.
        ready: Batches that arrived and were not taken yet.
        told: The number of the last broadcast that it has received, or will receive with its requests.
        position: Position of its reader after the last batch that arrived, if the reader can continue from
            there.
        rows: Rows of its batches.
        written: Rows that its writer had accepted at its last batch.
        published: Rows among them that were in the data set then.
        failures: Losses of workers at this index since the last batch.
        restart_at: When the next worker starts here (`time.monotonic`); None: no restart is due.
        heard: When the last answer arrived, or the first request was sent (`time.monotonic`).
        gone: Why the index has no worker any longer.
        ended: Whether it reached the end of its data.
    """

    index: int
    incarnation: int = -1
    actor: Any = None
    opening: Any = None
    opened: Opened | None = None
    requests: dict[Any, int] = field(default_factory=dict)
    ready: deque[Fragment] = field(default_factory=deque)
    told: int = 0
    position: JsonState | None = None
    rows: int = 0
    written: int = 0
    published: int = 0
    failures: int = 0
    restart_at: float | None = None
    heard: float = 0.0
    gone: str | None = None
    ended: bool = False

    @property
    def worker_id(self) -> WorkerId:
        """Identity of the present worker."""
        return WorkerId(self.index, self.incarnation)

    @property
    def samples(self) -> bool:
        """Whether batches are expected from this index, now or after a restart."""
        return self.gone is None and not self.ended

    @property
    def can_be_asked(self) -> bool:
        """Whether an actor exists that can be asked for batches."""
        return self.samples and self.restart_at is None

    @property
    def first(self) -> Any:
        """Reference to the first missing answer; None: no request is open.

        Answers are taken in the order of the requests, as the rows are written.
        """
        return next(iter(self.missing), None)

    @property
    def missing(self) -> list[Any]:
        """References to all missing answers that can be taken next, in order."""
        return list(self.requests) if self.opening is None else [self.opening]

    @property
    def unserved(self) -> int:
        """Number of batches that were requested, or arrived and were not taken."""
        return len(self.requests) + len(self.ready)

    def note(self) -> None:
        """Restart the clock after an answer or a first request."""
        self.heard = time.monotonic()

    def begin(self, actor: Any, opening: Any, *, told: int) -> None:
        """Record the start of a worker; ``opening`` is the reference to its first answer."""
        self.actor, self.opening, self.opened = actor, opening, None
        self.told, self.ended, self.restart_at = told, False, None
        self.rows = self.written = self.published = 0
        self.note()

    def wait_for_restart(self, until: float) -> None:
        """Record that no worker exists until then (`time.monotonic`)."""
        self.actor = self.opening = self.opened = None
        self.rows = self.written = self.published = 0
        self.restart_at = until

    def status(self) -> WorkerStatus:
        """Return the status."""
        opened = self.opened
        return WorkerStatus(
            worker_index=self.index,
            incarnation=self.incarnation,
            alive=self.gone is None,
            started=opened is not None,
            in_flight=len(self.requests),
            waiting=len(self.ready),
            rows=self.rows,
            rows_unpublished=self.written - self.published,
            pid=None if opened is None else opened.pid,
            host=None if opened is None else opened.host,
            node_id=None if opened is None else opened.node_id,
            writer_id=None if opened is None else opened.writer_id,
            ended=self.ended,
        )
