"""`FaultTolerance`: how a `WorkerGroup` treats workers that die or hang; `Loss`: its report of one.

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

from rlio.support.options import check_choice, check_count, check_number, check_seconds, set_options

__all__ = ["FaultTolerance", "Loss"]


@dataclass(frozen=True, kw_only=True)
class FaultTolerance:
    """Limits for the replacement of a group's workers.

    A worker is lost when its process or its machine dies, is unreachable, or does not answer in time. An
    exception in its environment or policy is not a loss: the group raises it from its sampling calls, and the
    worker stays.

    The first restart of a worker is immediate. If the worker is lost again before it returns a batch, the
    next restart waits `restart_pause_s` seconds, and each further one twice as long, up to
    `max_restart_pause_s`. The group's seed shortens each pause at random by up to half, so that workers that
    were lost together do not restart together. The other workers continue.

    Attributes:
        max_restarts: Limit for all workers together, within any `restart_window_s` seconds.
        restart_window_s: Seconds after which a restart no longer counts against `max_restarts`. None: it
            counts for the life of the group.
        max_restarts_in_a_row: Limit for one worker without a batch in between, so that a worker that dies
            whenever it samples is not restarted endlessly. With the default pauses, 8 take about two minutes.
        restart_pause_s: Seconds before the second restart in a row; 0: restarts never wait.
        max_restart_pause_s: Longest pause before any restart, in seconds.
        lost_workers: What happens when a worker may not be restarted. ``"raise"``: the group raises a
            `WorkerLost`, now and in each later sampling call. ``"drop"``: it continues with the others while
            there are any.
        start_timeout_s: Seconds for a worker to start: its process, the imports, the environment, and Ray's
            wait for free resources.
        request_timeout_s: Seconds for a batch, after which the worker counts as hanging: it is killed and
            replaced. None: no limit for environments or outputs; a `PacedWriter` waits for its followers.
        probe_timeout_s: Seconds for an idle worker to answer `WorkerGroup.probe`.
        close_timeout_s: Seconds for all workers to store their rows when the group is closed; and as long
            again for the logs of lost workers.

    Raises:
        OptionError: A value is illegal.
    """

    # As in RLlib, for runs of days on machines that come and go.
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
        checked: float | None
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            if name == "lost_workers":
                check_choice(name, value, ("raise", "drop"))
                continue
            if option.type == "int":
                checked = check_count(name, value, least=0)
            elif option.type == "float | None":
                checked = check_number(name, value, above=0, of="seconds", none="no limit")
            elif name.endswith("_pause_s"):
                checked = check_seconds(name, value)
            else:
                checked = check_number(name, value, above=0, of="seconds")
            set_options(self, **{name: checked})

    def allows(self, *, restarted: Sequence[float], now: float, in_a_row: int) -> bool:
        """Return whether a worker may be restarted once more.

        Args:
            restarted: Times of all restarts so far, of all workers, in seconds.
            now: Current time on the same clock.
            in_a_row: Restarts of this worker since its last batch.
        """
        since = -math.inf if self.restart_window_s is None else now - self.restart_window_s
        recent = sum(when > since for when in restarted)
        return recent < self.max_restarts and in_a_row < self.max_restarts_in_a_row

    def pause_s(self, *, in_a_row: int, spread: float) -> float:
        """Return the seconds to wait before a restart.

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
    """A worker that was lost, and its unfinished work.

    Attributes:
        worker_index: Index, 1 to the number of workers.
        incarnation: Number of earlier workers with this index.
        reason: What happened, in one line.
        requests: Requested batches that never arrived. The output may contain rows of batches that had begun,
            complete or not, but no batch and no metrics do.
        rows: Rows of its batches that arrived.
        rows_unpublished: Rows that its writer had accepted at its last batch and that are not known to be in
            the data set: an upper bound of the `rows` missing there. Once the log is recovered this is 0, or
            the number of rows that could not be recovered.
        writer_id: Writer id of its rows in the data set, which are in their order: the first ``rows`` of them
            arrived, later ones are of lost batches. None if its output has no such id.
        host: Name of its machine; None if it had not started.
        logs: Folders of its write-ahead log on that machine, one for each data set that it wrote; empty if
            the group knows no log of its output.
        node_id: Ray's id of that machine; None if it had not started.
        restarted: Whether it is replaced.
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
