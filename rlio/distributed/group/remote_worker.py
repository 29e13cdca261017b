"""`RemoteWorker`: one place of a group: who sits there, what it was asked for, and what has come.

It holds, and decides nothing: see `rlio.distributed.group.actor_pool`.
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
        batch: Its arrays are read-only, and lie in Ray's object store until nobody holds them: copy what is
            to be changed, or kept for long.
        worker_index: Whose.
        incarnation: How often another had taken that worker's place before.
        order: How many batches of the group had come before.
    """

    batch: Batch
    worker_index: int
    incarnation: int
    order: int


@dataclass(frozen=True)
class WorkerStatus:
    """How a worker is, as far as its group knows.

    Attributes:
        worker_index: Which.
        incarnation: How often another took the place of the one before.
        alive: False: it was lost, and nobody takes its place.
        started: Whether it has said that it is there. False too while it waits for its restart.
        in_flight: Batches that it was asked for.
        waiting: Batches of it that nobody has asked the group for yet.
        rows: Rows of its batches so far, those of earlier ones at its place excepted.
        rows_unpublished: Rows that its writer had taken, and that were not in the data set, when its last
            batch came: they are in its log, or in memory where it has none. At most so many of `rows` are not
            in the data set.
        pid: Of its process; None before it has started.
        host: Name of its machine; None before it has started.
        node_id: Ray's id of its machine; None before it has started.
        writer_id: Under which its rows lie; None where its output has no such id.
        ended: Whether its data have come to an end.
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
    """A place of a group.

    Attributes:
        index: From 1 on.
        incarnation: Of who sits there; -1 before the first.
        actor: Ray's handle.
        opening: Reference to the answer of `WorkerActor.open`, until it is there.
        opened: That answer.
        requests: Batches that were asked for, in their order: reference -> the number of the last broadcast
            that the worker had got before.
        ready: Batches that came, and that nobody has taken yet.
        told: The number of the last broadcast that it has got, or will get with what it was asked for.
        position: Where its reader was behind the last batch that came, if one can go on from there.
        rows: Rows of its batches.
        written: Rows that its writer had taken when its last batch came.
        published: Those of them that were in the data set then.
        failures: How often a worker here was lost, since the last batch.
        restart_at: When the next worker starts here, `time.monotonic`; None: no restart is due.
        heard: When something last came, or was first asked for: `time.monotonic`.
        gone: Why nobody sits here any longer.
        ended: Whether its data have come to an end.
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
        """Who sits there."""
        return WorkerId(self.index, self.incarnation)

    @property
    def samples(self) -> bool:
        """Whether batches are expected from here, now or after a restart."""
        return self.gone is None and not self.ended

    @property
    def can_be_asked(self) -> bool:
        """Whether there is an actor that may be asked for batches."""
        return self.samples and self.restart_at is None

    @property
    def first(self) -> Any:
        """Reference to the first answer that has not come; None: nothing is asked.

        Answers are taken in the order of the questions, as the rows are written.
        """
        return self.opening if self.opening is not None else next(iter(self.requests), None)

    @property
    def unserved(self) -> int:
        """Batches that it was asked for, or that wait for whoever takes them."""
        return len(self.requests) + len(self.ready)

    def note(self) -> None:
        """Something came, or is asked for: the clock starts anew."""
        self.heard = time.monotonic()

    def begin(self, actor: Any, opening: Any, *, told: int) -> None:
        """A worker starts here; ``opening`` is the reference to its first answer."""
        self.actor, self.opening, self.opened = actor, opening, None
        self.told, self.ended, self.restart_at = told, False, None
        self.rows = self.written = self.published = 0
        self.note()

    def wait_for_restart(self, until: float) -> None:
        """No worker is here until then, `time.monotonic`."""
        self.actor = self.opening = self.opened = None
        self.rows = self.written = self.published = 0
        self.restart_at = until

    def status(self) -> WorkerStatus:
        """How it is."""
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
