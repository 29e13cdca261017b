"""`FaultTolerance`: what a `WorkerGroup` does about workers that die or hang; `Loss`: what it then tells.

Example:
    >>> tolerance = FaultTolerance(max_restarts=2, restart_window_s=60.0)
    >>> [tolerance.allows(restarted=[0.0, 30.0], now=now, in_a_row=0) for now in (50.0, 70.0)]
    [False, True]
    >>> [tolerance.pause_s(in_a_row=failures, spread=1.0) for failures in range(5)]
    [0.0, 1.0, 2.0, 4.0, 8.0]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from rlio.errors import OptionError, excerpt

__all__ = ["FaultTolerance", "Loss"]


@dataclass(frozen=True, kw_only=True)
class FaultTolerance:
    """How much a group of workers puts up with.

    A worker is lost when its process or its machine dies, cannot be reached, or does not answer in time.
    An exception that its environment or policy raises is no such thing: it is raised where the group is asked
    for samples, and the worker stays.

    The first restart of a worker comes at once. If it is lost again before it has given a batch, the next
    restart waits `restart_pause_s` seconds, and each further one twice as long as the one before, up to
    `max_restart_pause_s`. Each pause is shortened by up to a half, at random by the group's seed, so that
    workers that were lost together do not come back together. The other workers go on meanwhile.

    Attributes:
        max_restarts: Of all workers together, within any `restart_window_s` seconds.
        restart_window_s: Seconds after which a restart no longer counts against `max_restarts`. None: it
            counts for the life of the group.
        max_restarts_in_a_row: Of one worker, without a batch of it in between: one that dies whenever it
            samples is not to be started for ever. With the default pauses, 8 take about two minutes.
        restart_pause_s: Seconds before the second restart in a row; 0: restarts never wait.
        max_restart_pause_s: Seconds before any restart, at most.
        lost_workers: What happens to a worker that may not be started again. ``"raise"``: the group raises a
            `WorkerLost`, now and whenever it is asked for samples. ``"drop"``: it goes on with the others, as
            long as there are any.
        start_timeout_s: Seconds for a worker to start: its process, the imports, the environment, and
            whatever Ray waits for until it has room.
        request_timeout_s: Seconds for a batch, after which a worker hangs: it is ended, and another takes its
            place. None: environments may take as long as they like, and outputs too: a `PacedWriter` waits
            for those who follow it.
        probe_timeout_s: Seconds for an idle worker to answer `WorkerGroup.probe`.
        close_timeout_s: Seconds for all workers to store what they have, when the group is closed; and as
            long again for the logs of lost workers.

    Raises:
        OptionError: A value is illegal.
    """

    # As RLlib: a run of days on machines that come and go.
    max_restarts: int = 1000
    restart_window_s: float | None = 3600.0
    # A service that restarts, or a machine that is short of memory, is back within two minutes.
    max_restarts_in_a_row: int = 8
    restart_pause_s: float = 1.0
    max_restart_pause_s: float = 60.0
    lost_workers: Literal["raise", "drop"] = "raise"
    # A process takes 2 to 5 s with its imports; a cluster that grows takes minutes to get a machine.
    start_timeout_s: float = 300.0
    request_timeout_s: float | None = None
    probe_timeout_s: float = 30.0
    # Writers wait for a store that is down for up to a minute: see `Spool.publish_seconds`.
    close_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if option.type == "int" and not (is_number and isinstance(value, int) and value >= 0):
                raise OptionError(f"{name}={excerpt(value)}: a whole number, at least 0")
            if not name.endswith("_s") or (value is None and option.type == "float | None"):
                continue
            may_be_0 = name.endswith("_pause_s")
            if not is_number or not (0 if may_be_0 else 1e-9) <= value < math.inf:
                raise OptionError(
                    f"{name}={excerpt(value)}: seconds, {'at least' if may_be_0 else 'above'} 0"
                )
        if self.lost_workers not in ("raise", "drop"):
            raise OptionError(f"lost_workers={excerpt(self.lost_workers)}: 'raise' or 'drop'")

    def allows(self, *, restarted: Sequence[float], now: float, in_a_row: int) -> bool:
        """Whether a worker may be started once more.

        Args:
            restarted: When workers were started again so far, all of them, in seconds.
            now: On the same clock.
            in_a_row: Restarts of this one since its last batch.
        """
        since = -math.inf if self.restart_window_s is None else now - self.restart_window_s
        recent = sum(when > since for when in restarted)
        return recent < self.max_restarts and in_a_row < self.max_restarts_in_a_row

    def pause_s(self, *, in_a_row: int, spread: float) -> float:
        """Seconds to wait before a restart.

        Args:
            in_a_row: Restarts of this worker since its last batch.
            spread: From 0 to 1, drawn for each restart: the pause is between half and all of its length.
        """
        if in_a_row == 0:
            return 0.0
        pause = self.restart_pause_s * 2.0 ** min(in_a_row - 1, 60)
        return min(pause, self.max_restart_pause_s) * (0.5 + 0.5 * spread)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A worker that was lost, and what with it.

    Attributes:
        worker_index: Which, 1 to the number of workers.
        incarnation: How often another had taken its place before.
        reason: What happened, in one line.
        requests: Batches that it was asked for and that never came. The rows of those that it had begun may
            be in its output, complete or not, but are in no batch and in no metrics.
        rows: Rows of its batches that did come.
        rows_unpublished: Of the rows that its writer had taken when its last batch came, those that are not
            in the data set as far as is known: at most so many of `rows` are missing there. Once the log is
            recovered this is 0, or the number of rows that could not be recovered.
        writer_id: Under which its rows lie in a data set, in their order: the first ``rows`` of them came,
            those behind are of the lost batches. None where its output has no such id.
        host: Name of the machine that it was on; None if it had not started.
        logs: Folders of its write-ahead log on that machine, one for each data set that it wrote; empty where
            its output has no log that the group knows.
        node_id: Ray's id of that machine; None if it had not started.
        restarted: Whether another takes its place.
    """

    worker_index: int
    incarnation: int
    reason: str
    requests: int
    rows: int
    rows_unpublished: int
    writer_id: str | None
    host: str | None
    logs: tuple[str, ...]
    node_id: str | None
    restarted: bool
