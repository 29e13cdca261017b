"""`WorkerActor`: a `RolloutWorker` in a process of its own, and what travels between it and its group.

It knows nothing of Ray but the machine's id: Ray makes an actor of the class, and calls its methods one after
the other, in the order in which they were asked for.

Example:
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> spec = WorkerSpec("CartPole-v1", RandomPolicy, {}, num_workers=1, seed=7)
    >>> actor = WorkerActor()
    >>> actor.open(spec, WorkerId(1), None, None).unit
    'steps'
    >>> reply = actor.sample()
    >>> len(reply.batch), reply.metrics.counts.env_steps
    (200, 200)
    >>> actor.close()
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from rlio.batch import Batch
from rlio.batch.nested import map_structure
from rlio.connectors.mean_std import MeanStdFilter
from rlio.distributed.group.worker_spec import Acknowledge, WorkerId, WorkerSpec
from rlio.errors import ClosedError, EndOfData
from rlio.log.recovery import WriterLog
from rlio.policies.policy_spec import Spaces
from rlio.policies.weights import GlobalVars
from rlio.reader import JsonState, Unit
from rlio.sampling.metrics import RolloutMetrics
from rlio.worker import RolloutWorker
from rlio.writer import OutputWriter

__all__ = ["Broadcast", "Filters", "Opened", "Sampled", "WorkerActor"]

logger = logging.getLogger("rlio")

#: `MeanStdFilter`s by policy id.
Filters = Mapping[str, Sequence[MeanStdFilter]]


@dataclass(frozen=True)
class Broadcast:
    """Weights for all workers.

    Attributes:
        weights: As `RolloutWorker.get_weights` gave them.
        seq_no: Their version; 0: they are set whatever the worker has.
        global_vars: For `RolloutWorker.set_global_vars`; None: none.
    """

    weights: Mapping[str, Any]
    seq_no: int
    global_vars: GlobalVars | None = None


@dataclass(frozen=True)
class Opened:
    """What a worker says of itself once it is there.

    Attributes:
        pid: Of its process.
        host: Name of its machine.
        node_id: Ray's id of its machine; "" where there is no Ray.
        writer_id: Under which its rows lie; None where its output has no such id.
        logs: The write-ahead logs of its writer; empty where it has none, or none that can travel.
        unit: What its batches are counted in.
        spaces: See `RolloutWorker.get_spaces`.
    """

    pid: int
    host: str
    node_id: str
    writer_id: str | None
    logs: tuple[WriterLog, ...]
    unit: Unit
    spaces: dict[str, Spaces]


@dataclass(frozen=True)
class Sampled:
    """A worker's next batch.

    Attributes:
        batch: None at the end of its data.
        metrics: What happened since the batch before.
        position: Behind the batch, where one can go on from there: see `InputReader.state_dict`; else None.
        written: Rows that the writer had taken when this was sent.
        published: Those of them that were in the data set.
    """

    batch: Batch | None
    metrics: RolloutMetrics
    position: JsonState | None = None
    written: int = 0
    published: int = 0


class WorkerActor:
    """Holds a worker. Every method but `close` takes the broadcasts that came since the last call, and gives
    them to the worker first: weights that it has, or newer ones, stay.
    """

    def __init__(self) -> None:
        self._worker: RolloutWorker | None = None
        self._acknowledge: Acknowledge = "written"
        #: What was sampled and could not be published yet, where that is waited for: the next call's.
        self._kept: Sampled | None = None

    def open(
        self,
        spec: WorkerSpec,
        worker_id: WorkerId,
        filters: Filters | None,
        position: JsonState | None,
        *broadcasts: Broadcast,
    ) -> Opened:
        """Make the worker, in place of the one that is there, if any, which is closed.

        Args:
            spec: What it is made of.
            worker_id: Which one it is.
            filters: That it begins with; None: with new ones.
            position: Where it goes on; None: at the beginning.
            broadcasts: Weights.
        """
        self.close()
        self._worker = worker = spec.make(worker_id)
        self._acknowledge = spec.acknowledge
        if filters:
            worker.sync_filters(filters)
        if position is not None:
            worker.load_state_dict(position)
        self._taken(broadcasts)
        writer_id = getattr(worker.writer, "writer_id", None)
        return Opened(
            pid=os.getpid(),
            host=platform.node(),
            node_id=_node_id(),
            writer_id=writer_id if isinstance(writer_id, str) else None,
            logs=_portable_logs(worker.writer),
            unit=worker.unit,
            spaces=worker.get_spaces(),
        )

    def _taken(self, broadcasts: Sequence[Broadcast]) -> RolloutWorker:
        """The worker, once it has got the ``broadcasts``."""
        worker = self._worker
        if worker is None:
            raise ClosedError("the worker of this actor is not open")
        for each in broadcasts:
            # Ray's arrays are read-only, and hold its memory: a policy may keep what it is given.
            weights = map_structure(np.array, each.weights)
            worker.set_weights(weights, each.seq_no, global_vars=each.global_vars)
        return worker

    def sample(self, *broadcasts: Broadcast) -> Sampled:
        """The worker's next batch, in its own size. When this returns, the output's writer has taken it; and
        has published it, where that is what the group acknowledges.

        Raises:
            PublishError: It could not be published; it is kept, and the next call tries again.
        """
        worker = self._taken(broadcasts)
        if self._kept is None:
            self._kept = self._sampled(worker)
        if self._acknowledge == "published":
            worker.writer.flush()
        sampled, self._kept = self._kept, None
        writer = worker.writer
        return replace(sampled, written=writer.rows_received, published=writer.rows_published)

    def _sampled(self, worker: RolloutWorker) -> Sampled:
        try:
            batch = worker.sample()
        except EndOfData:
            return Sampled(None, worker.get_metrics())
        position = worker.state_dict() if worker.replayable else None
        return Sampled(batch, worker.get_metrics(), position)

    def apply(self, func: Callable[[RolloutWorker], Any], *broadcasts: Broadcast) -> Any:
        """``func(worker)``."""
        return func(self._taken(broadcasts))

    def take_filters(self, *broadcasts: Broadcast) -> dict[str, list[MeanStdFilter]]:
        """The filters; what came into their buffers until now is the caller's to count."""
        return self._taken(broadcasts).get_filters(flush_after=True)

    def adopt_filters(self, joint: Filters, *broadcasts: Broadcast) -> None:
        """Make the filters equal to ``joint``, and add what came in since `take_filters`: it stays to be
        taken the next time.
        """
        worker = self._taken(broadcasts)
        since = worker.get_filters()
        ours = {policy_id: [each.copy() for each in filters] for policy_id, filters in joint.items()}
        for policy_id, filters in ours.items():
            for mine, own in zip(filters, since[policy_id], strict=True):
                mine.apply_changes(own, with_buffer=True)
        worker.sync_filters(ours)

    def ping(self, *broadcasts: Broadcast) -> None:
        """Raise unless the worker can sample."""
        self._taken(broadcasts).assert_healthy()

    def close(self) -> None:
        """Close the worker: its rows are stored when this returns."""
        worker, self._worker = self._worker, None
        self._kept = None
        if worker is not None:
            worker.close()


def _portable_logs(writer: OutputWriter) -> tuple[WriterLog, ...]:
    """The logs of ``writer``, unless they name a store that cannot be opened in another process."""
    logs: tuple[WriterLog, ...] = getattr(writer, "logs", ())
    try:
        ForkingPickler.dumps(logs)
    except Exception as error:  # A filesystem of the user may raise anything here.
        logger.warning("the group cannot recover the log of this worker: %s", error)
        return ()
    return logs


def _node_id() -> str:
    try:
        import ray
    except ImportError:
        return ""
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""
