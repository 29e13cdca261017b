"""`WorkerActor`: a `RolloutWorker` in a separate process, and the messages between it and its group.

It depends on Ray only for the machine's id. Ray makes an actor of the class, and calls its methods one at a
time, in the order of the requests.

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
from rlio.policies.policy_spec import Spaces
from rlio.policies.weights import GlobalVars
from rlio.reader import JsonState, Unit
from rlio.sampling.metrics import RolloutMetrics
from rlio.worker import RolloutWorker
from rlio.writer import OutputWriter
from rlio.writers.recovery import WriterLog

__all__ = ["Broadcast", "Filters", "Opened", "Sampled", "WorkerActor"]

logger: logging.Logger = logging.getLogger("rlio")

#: `MeanStdFilter`s by policy id.
Filters = Mapping[str, Sequence[MeanStdFilter]]


@dataclass(frozen=True)
class Broadcast:
    """Weights for all workers.

    Attributes:
        weights: As `RolloutWorker.get_weights` returned them.
        seq_no: Their version; 0: set them even if the worker has a newer version.
        global_vars: For `RolloutWorker.set_global_vars`; None: none.
    """

    weights: Mapping[str, Any]
    seq_no: int
    global_vars: GlobalVars | None = None


@dataclass(frozen=True)
class Opened:
    """A worker's description of itself after it started.

    Attributes:
        pid: Process id.
        host: Name of its machine.
        node_id: Ray's id of its machine; "" without Ray.
        writer_id: Writer id of its rows; None if its output has none.
        logs: The write-ahead logs of its writer; empty if it has none, or none that can be sent.
        unit: The unit of its batches.
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
        batch: The batch; None at the end of its data.
        metrics: Metrics since the previous batch.
        position: State after the batch, if the reader can continue from there: see `InputReader.state_dict`;
            otherwise None.
        written: Rows that the writer had accepted when this was sent.
        published: Rows among them that were in the data set.
    """

    batch: Batch | None
    metrics: RolloutMetrics
    position: JsonState | None = None
    written: int = 0
    published: int = 0


class WorkerActor:
    """Holds a worker.

    Every method except `close` takes the broadcasts since the last call, and first gives them to the worker,
    which ignores weights that are not newer than its own.
    """

    def __init__(self) -> None:
        self._worker: RolloutWorker | None = None
        self._acknowledge: Acknowledge = "written"
        #: A sampled batch that could not be published although that is required: the next call returns it.
        self._kept: Sampled | None = None

    def open(
        self,
        spec: WorkerSpec,
        worker_id: WorkerId,
        filters: Filters | None,
        position: JsonState | None,
        *broadcasts: Broadcast,
    ) -> Opened:
        """Make the worker; closes an existing one first.

        Args:
            spec: Arguments of the worker.
            worker_id: Its identity.
            filters: Its initial filters; None: new ones.
            position: Where it continues; None: at the beginning.
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
        """Return the worker after it applied the ``broadcasts``."""
        worker = self._worker
        if worker is None:
            raise ClosedError("the worker of this actor is not open")
        for each in broadcasts:
            # Copied, because Ray's arrays are read-only and hold its memory, and a policy may keep them.
            weights = map_structure(np.array, each.weights)
            worker.set_weights(weights, each.global_vars, each.seq_no)
        return worker

    def sample(self, *broadcasts: Broadcast) -> Sampled:
        """Return the worker's next batch, in its own size.

        When this returns, the output's writer has accepted the batch, and has published it if the group
        acknowledges published rows.

        Raises:
            PublishError: The batch could not be published; it is kept, and the next call retries.
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
        """Return ``func(worker)``."""
        return func(self._taken(broadcasts))

    def adopt_filters(self, joint: Filters, *broadcasts: Broadcast) -> None:
        """Set the filters to ``joint`` plus the observations since their buffers were reset.

        These observations stay in the buffers for the next synchronisation.
        """
        worker = self._taken(broadcasts)
        since = worker.get_filters()
        ours = {policy_id: [each.copy() for each in filters] for policy_id, filters in joint.items()}
        for policy_id, filters in ours.items():
            for mine, own in zip(filters, since[policy_id], strict=True):
                mine.apply_changes(own, with_buffer=True)
        worker.sync_filters(ours)

    def close(self) -> None:
        """Close the worker. When this returns, its rows are stored."""
        worker, self._worker = self._worker, None
        self._kept = None
        if worker is not None:
            worker.close()


def _portable_logs(writer: OutputWriter) -> tuple[WriterLog, ...]:
    """Return the logs of ``writer``, or none if they name a store that other processes cannot open."""
    logs: tuple[WriterLog, ...] = getattr(writer, "logs", ())
    try:
        ForkingPickler.dumps(logs)
    except Exception as error:  # A user's filesystem may raise anything here.
        logger.warning("the group cannot recover the log of this worker: %s", error)
        return ()
    return logs


def _node_id() -> str:
    try:
        import ray
    except ImportError:
        return ""
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""
