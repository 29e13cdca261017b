"""`LogRecovery`: publishes the logs of lost workers, on the machines that hold them.

A log can only be read where its disk is. Each recovery is therefore a task that is pinned to a Ray node on
the machine of the lost worker; it starts as soon as the loss is seen. A failed recovery is retried when the
group closes; a second failure is logged as a warning. Recovery needs no live worker.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlio.distributed.group.fault_tolerance import Loss
from rlio.distributed.ray_import import require_ray
from rlio.errors import RlioError
from rlio.writers.recovery import WriterLog, recover_log

__all__ = ["LogRecovery", "LostLog", "recover_logs"]

logger: logging.Logger = logging.getLogger("rlio")

# Any in this module: Ray's references and errors.

#: Seconds that a killed worker may take to die: until then it holds its log.
_DYING_S = 30.0


@dataclass
class LostLog:
    """The logs of a worker that was lost.

    Attributes:
        loss: The loss, with worker and machine.
        logs: At least one.
        rows: Rows that the writer had accepted at its last batch.
        stored: Rows among them that are known to be in the data set.
        tried: Ray's id of the node of the last attempt.
        reason: Why that attempt failed.
    """

    loss: Loss
    logs: tuple[WriterLog, ...]
    rows: int
    stored: int
    tried: str | None = None
    reason: str = "it was not tried"


def recover_logs(logs: Sequence[WriterLog]) -> int:
    """Recover the logs of one writer; returns how many of its rows are then in all of its data sets."""
    return min(recover_log(log, timeout=_DYING_S) for log in logs)


class LogRecovery:
    """Recovers logs in Ray tasks. Use it from one thread at a time.

    Args:
        runtime_env: Runtime environment of the workers, so that the tasks can import the same modules.
    """

    def __init__(self, runtime_env: Any = None) -> None:
        self._ray = require_ray()
        self._task = self._ray.remote(recover_logs)
        self._options: dict[str, Any] = {} if runtime_env is None else {"runtime_env": runtime_env}
        #: Logs that are not recovered, by the number of the loss.
        self._left: dict[int, LostLog] = {}
        self._running: dict[Any, int] = {}

    def add(self, number: int, lost: LostLog, *, connected: bool) -> None:
        """Start to recover the logs of loss ``number``; `ended` reports the result.

        Args:
            number: Number of the loss.
            lost: The logs to recover.
            connected: Whether Ray still runs. If not, `finish` recovers the logs.
        """
        self._left[number] = lost
        if connected:
            self._start(number)

    def _start(self, number: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        lost = self._left[number]
        lost.tried = self._node_of(lost)
        if lost.tried is None:
            lost.reason = "no node of Ray is up on that machine"
            return
        pinned = NodeAffinitySchedulingStrategy(node_id=lost.tried, soft=False)
        task = self._task.options(num_cpus=0, max_retries=0, scheduling_strategy=pinned, **self._options)
        self._running[task.remote(lost.logs)] = number

    def _node_of(self, lost: LostLog) -> str | None:
        """Return the worker's own node, or, if Ray was restarted there, another node of its machine."""
        up = [node for node in self._ray.nodes() if node["Alive"]]
        if any(node["NodeID"] == lost.loss.node_id for node in up):
            return lost.loss.node_id
        return next((node["NodeID"] for node in up if node["NodeManagerHostname"] == lost.loss.host), None)

    def ended(self, timeout_s: float = 0.0) -> dict[int, int]:
        """Return the finished recoveries: number of the loss -> rows that are still not in the data set.

        Args:
            timeout_s: Seconds to wait for all running tasks.
        """
        if not self._running:
            return {}
        tasks = list(self._running)
        done, _ = self._ray.wait(tasks, num_returns=len(tasks), timeout=timeout_s)
        found = {}
        for task in done:
            number = self._running.pop(task)
            try:
                stored = self._ray.get(task)
            except self._ray.exceptions.RayError as error:
                self._failed(number, error)
            else:
                found[number] = self._stored(number, stored)
        return found

    def _failed(self, number: int, error: Any) -> None:
        lost = self._left[number]
        cause = getattr(error, "cause", None) or error
        lost.reason = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        logger.debug("the log of worker %d is not recovered", lost.loss.worker_index, exc_info=error)
        if self._node_of(lost) not in (None, lost.tried):  # The node went down during the task.
            self._start(number)

    def _stored(self, number: int, rows: int) -> int:
        lost = self._left[number]
        lost.stored, lost.reason = min(rows, lost.rows), "it lacks rows, or it is gone"
        if lost.stored == lost.rows:
            del self._left[number]
        return lost.rows - lost.stored

    def finish(self, timeout_s: float, *, connected: bool) -> dict[int, int]:
        """Retry the remaining logs, wait, and warn of failures; returns the same as `ended`.

        Args:
            timeout_s: Total time in seconds.
            connected: Whether Ray still runs. If not, only logs on this machine can be recovered.
        """
        deadline = time.monotonic() + timeout_s
        if connected:
            found = self.ended(timeout_s)
            for number in self._left.keys() - set(self._running.values()):
                self._start(number)
            while self._running and time.monotonic() < deadline:
                found |= self.ended(max(0.0, deadline - time.monotonic()))
            for number in self._running.values():
                self._left[number].reason = f"it took longer than {timeout_s:g} s"
        else:
            found = self._recovered_here()
        for lost in self._left.values():
            _warn(lost)
        self._left.clear()
        self._running.clear()
        return found

    def _recovered_here(self) -> dict[int, int]:
        found = {}
        for number, lost in list(self._left.items()):
            lost.reason = "Ray was shut down"
            if lost.loss.host != platform.node():
                continue
            try:
                stored = recover_logs(lost.logs)
            except (RlioError, OSError) as error:
                lost.reason = f"{type(error).__name__}: {error}"
            else:
                found[number] = self._stored(number, stored)
        return found


def _warn(lost: LostLog) -> None:
    for log in lost.logs:
        logger.warning(
            "the log of lost worker %d is not recovered: %s; at most %d of its returned rows are not in the "
            "data set; the log is %s on machine %s: run `rlio recover %s` there",
            lost.loss.worker_index,
            lost.reason,
            lost.rows - lost.stored,
            log.folder,
            lost.loss.host,
            log.storage.uri,
        )
