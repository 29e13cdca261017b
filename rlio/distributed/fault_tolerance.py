"""`FaultTolerance`: what a `WorkerGroup` does about workers that die or hang; `Loss`: what it then tells.

Example:
    >>> FaultTolerance(max_restarts=2).allows(restarts=1, in_a_row=1)
    True
    >>> FaultTolerance(max_restarts=2).allows(restarts=2, in_a_row=1)
    False
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlio.errors import OptionError, excerpt

__all__ = ["FaultTolerance", "Loss"]

_COUNTS = ("max_restarts", "max_restarts_in_a_row")
_SECONDS = ("start_timeout_s", "request_timeout_s", "probe_timeout_s", "close_timeout_s")


@dataclass(frozen=True, kw_only=True)
class FaultTolerance:
    """How much a group of workers puts up with.

    A worker is lost when its process or its machine dies, cannot be reached, or does not answer in time.
    An exception that its environment or policy raises is no such thing: it is raised where the group is asked
    for samples, and the worker stays.

    Attributes:
        max_restarts: Of all workers together, over the life of the group.
        max_restarts_in_a_row: Of one worker, without a batch of it in between: one that dies whenever it
            samples is not to be started for ever.
        lost_workers: What happens to a worker that may not be started again. ``"raise"``: the group raises a
            `WorkerLost`, now and whenever it is asked for samples. ``"drop"``: it goes on with the others, as
            long as there are any.
        start_timeout_s: Seconds for a worker to start: its process, the imports, the environment, and
            whatever Ray waits for until it has room.
        request_timeout_s: Seconds for a batch, after which a worker hangs: it is ended, and another takes its
            place. None: environments may take as long as they like, and outputs too: a `PacedWriter` waits
            for those who follow it.
        probe_timeout_s: Seconds for an idle worker to answer `WorkerGroup.probe`.
        close_timeout_s: Seconds for all workers to store what they have, when the group is closed.

    Raises:
        OptionError: A value is illegal.
    """

    # As RLlib: a run of days on machines that come and go.
    max_restarts: int = 1000
    max_restarts_in_a_row: int = 3
    lost_workers: Literal["raise", "drop"] = "raise"
    # A process takes 2 to 5 s with its imports; a cluster that grows takes minutes to get a machine.
    start_timeout_s: float = 300.0
    request_timeout_s: float | None = None
    probe_timeout_s: float = 30.0
    # Writers wait for a store that is down for up to a minute: see `Spool.publish_seconds`.
    close_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise OptionError(f"{name}={excerpt(value)}: a whole number, at least 0")
        for name in _SECONDS:
            value = getattr(self, name)
            if value is None and name == "request_timeout_s":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise OptionError(f"{name}={excerpt(value)}: seconds, above 0")
        if self.lost_workers not in ("raise", "drop"):
            raise OptionError(f"lost_workers={excerpt(self.lost_workers)}: 'raise' or 'drop'")

    def allows(self, *, restarts: int, in_a_row: int) -> bool:
        """Whether a worker may be started once more.

        Args:
            restarts: Of all workers, so far.
            in_a_row: Of this one since its last batch.
        """
        return restarts < self.max_restarts and in_a_row < self.max_restarts_in_a_row


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A worker that was lost, and what with it.

    Attributes:
        worker_index: Which, 1 to the number of workers.
        incarnation: How often another had taken its place before.
        reason: What happened.
        requests: Batches that it was asked for and that never came. The rows of those that it had begun may
            be in its output, complete or not, but are in no batch and in no metrics.
        rows: Rows of its batches that did come.
        writer_id: Under which its rows lie in a data set, in their order: the first ``rows`` of them came,
            those behind are of the lost batches. None where its output has no such id.
        node_id: Ray's id of the machine that it was on; None if it had not started.
        restarted: Whether another takes its place.
    """

    worker_index: int
    incarnation: int
    reason: str
    requests: int
    rows: int
    writer_id: str | None
    node_id: str | None
    restarted: bool
