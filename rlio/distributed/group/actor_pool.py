"""`ActorPool`: starts a group's actors, sends them requests, takes their answers, and replaces dead ones.

Use it from one thread at a time. No call here waits longer than its timeout.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rlio.distributed.group.actors import Opened, Sampled, WorkerActor
from rlio.distributed.group.broadcasts import Broadcasts
from rlio.distributed.group.fault_tolerance import FaultTolerance, Loss
from rlio.distributed.group.joint import JointMetrics
from rlio.distributed.group.log_recovery import LogRecovery, LostLog
from rlio.distributed.group.remote_worker import Fragment, RemoteWorker
from rlio.distributed.group.worker_spec import WorkerSpec
from rlio.distributed.ray_import import require_ray
from rlio.errors import ClosedError, OptionError, WorkerError, WorkerLost, excerpt
from rlio.worker import RolloutWorker

__all__ = ["ActorPool", "raise_first"]

logger: logging.Logger = logging.getLogger("rlio")

# Any in this module: Ray's handles, references and errors, and results of users' functions.

# How often waiting calls check for `interrupt` and for workers that hang.
_LOOK_UP_S = 0.5
# Answers of a dead worker are available, or are errors, immediately.
_SALVAGE_S = 5.0
# Ray's colour codes in tracebacks.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Characters shown of a message from elsewhere.
_SHOWN = 200
# The part of Ray's report that gives the reason in half a sentence; the rest is for debugging.
_WHY_DEAD = re.compile(r"[Aa]ctor (?:is dead|died) because ([^.\n]*)")
_SHUT_DOWN = "Ray was shut down before the group was closed"
# The group itself restarts workers, with new identities; Ray would restart the same ones.
_OURS = ("max_restarts", "max_task_retries", "max_concurrency", "concurrency_groups")


class _Asked(NamedTuple):
    """A call that waits for an answer; ``reference`` is None if the worker has no actor."""

    worker: RemoteWorker
    incarnation: int
    told: int
    reference: Any


class ActorPool:
    """Workers in separate processes, on the machines that Ray chooses.

    Args:
        spec: Arguments of each worker.
        tolerance: How to treat workers that die.
        actor_options: Options for Ray: resources and the like.

    Attributes:
        workers: The workers by index.
        broadcasts: Weights for the workers.
        filters: Reference to the filters for later workers; None: new ones.
        metrics: Metrics of the workers.
        losses: Workers that were lost.
        interrupted: Set to make waiting calls stop.

    Raises:
        OptionError: ``actor_options`` has an option that the group sets itself.
        MissingExtra: Ray is not installed.
    """

    def __init__(
        self, spec: WorkerSpec, *, tolerance: FaultTolerance, actor_options: Mapping[str, Any] | None = None
    ) -> None:
        self._ray = require_ray()
        options = dict(actor_options or {})
        for name in _OURS:
            if name in options:
                raise OptionError(
                    f"actor_options has {name}={excerpt(options[name])}, but the group restarts workers "
                    "itself, and sends each one request at a time: omit it, and see FaultTolerance"
                )
        self.tolerance = tolerance
        self.workers: list[RemoteWorker] = [RemoteWorker(index) for index in range(1, spec.num_workers + 1)]
        self.broadcasts: Broadcasts = Broadcasts()
        self.filters: Any = None
        self.metrics: JointMetrics = JointMetrics()
        self.losses: list[Loss] = []
        #: Times of all restarts, from `time.monotonic`.
        self._restarted: list[float] = []
        self._seed = spec.seed
        self._recovery = LogRecovery(options.get("runtime_env"))
        self.interrupted: threading.Event = threading.Event()
        self._class = self._ray.remote(WorkerActor).options(
            **{"num_cpus": 1, **options}, max_restarts=0, max_task_retries=0
        )
        self._errors: list[WorkerError] = []
        self._fragments = 0
        errors = self._ray.exceptions
        # Later versions of Ray have the second one, for errors whose class cannot be unpickled here.
        self._raised = (errors.RayTaskError, getattr(errors, "UnserializableException", errors.RayTaskError))
        self._spec = self._ray.put(spec)
        self._session = self._present_session()

    def reseed(self, seed: int) -> None:
        """Derive the seeds of new workers from ``seed`` from now on."""
        # Uses Ray's copy, because a policy among the caller's objects may already act in this process.
        self._spec = self._ray.put(replace(self._ray.get(self._spec), seed=seed))
        self._seed = seed

    def _present_session(self) -> tuple[str, str]:
        context = self._ray.get_runtime_context()
        return context.get_job_id(), context.get_node_id()

    @property
    def connected(self) -> bool:
        """Whether this process is still connected to the Ray session of the workers."""
        return self._ray.is_initialized() and self._present_session() == self._session

    @property
    def restarts(self) -> int:
        """Number of workers that were replaced, or will be after a pause."""
        return len(self._restarted)

    @property
    def alive(self) -> list[RemoteWorker]:
        """Workers that are not lost, including those that wait for a restart."""
        return [worker for worker in self.workers if worker.gone is None]

    @property
    def present(self) -> list[RemoteWorker]:
        """Workers that are neither lost nor waiting for a restart."""
        return [worker for worker in self.alive if worker.restart_at is None]

    # ---- starting ----

    def start(self) -> None:
        """Start all workers, and wait until they have started.

        Raises:
            WorkerError: A worker cannot be made; its own error is the cause.
            WorkerLost: A worker does not start in time, or dies too often.
        """
        for worker in self.workers:
            worker.incarnation += 1
            self._start(worker)
        self.settle()

    def settle(self) -> None:
        """Wait until all workers that start, or wait for their restart, have started."""
        while any(worker.opening is not None or worker.restart_at is not None for worker in self.workers):
            self.wait(None)

    def reopen(self) -> None:
        """Replace each worker by a new one in the same process."""
        for worker in self.alive:
            worker.incarnation, worker.position = worker.incarnation + 1, None
            self._open(worker, worker.actor or self._class.remote())
        self.settle()

    def _start(self, worker: RemoteWorker) -> None:
        self._open(worker, self._class.remote())

    def _start_due(self) -> float:
        """Start the workers whose pause is over; returns the seconds until the next pause ends."""
        now, waiting = time.monotonic(), [math.inf]
        for worker in self.workers:
            if worker.restart_at is not None and worker.restart_at <= now:
                self._start(worker)
            elif worker.restart_at is not None:
                waiting.append(worker.restart_at - now)
        return min(waiting)

    def _await_restart(self, worker: RemoteWorker, deadline: float | None) -> None:
        """Wait until a pending restart of ``worker`` begins, but not past the deadline."""
        while worker.restart_at is not None and not self.interrupted.is_set():
            moment = min(self._start_due(), _LOOK_UP_S)
            if worker.restart_at is None or (deadline is not None and time.monotonic() >= deadline):
                return
            self.interrupted.wait(moment)

    def _open(self, worker: RemoteWorker, actor: Any) -> None:
        count, references = self.broadcasts.snapshot(0)
        opening = actor.open.remote(self._spec, worker.worker_id, self.filters, worker.position, *references)
        worker.begin(actor, opening, told=count)

    # ---- asking ----

    def ask(self, worker: RemoteWorker, method: str, *arguments: Any) -> Any:
        """Send a request, preceded by the newest weights. Returns Ray's reference."""
        told, references = self.broadcasts.snapshot(worker.told)
        reference = getattr(worker.actor, method).remote(*arguments, *references)
        # Set afterwards, because a request that cannot be pickled sends no weights.
        worker.told = told
        return reference

    def request(self, worker: RemoteWorker) -> None:
        """Request a batch; `wait` stores it when it arrives."""
        told = worker.told
        if worker.first is None:
            worker.note()
        worker.requests[self.ask(worker, "sample")] = told

    def call(
        self, workers: Iterable[RemoteWorker], method: str, *arguments: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Send one request to several workers, and wait.

        Returns:
            By worker, its answer, or a `WorkerError` in its place.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        chosen = list(workers)
        for worker in chosen:
            self._await_restart(worker, deadline)
        asked = [self._asked(worker, method, arguments) for worker in chosen]
        return [self._answer(each, deadline) for each in asked]

    def _asked(self, worker: RemoteWorker, method: str, arguments: Sequence[Any] = ()) -> _Asked:
        told, is_there = worker.told, worker.gone is None and worker.restart_at is None
        reference = self.ask(worker, method, *arguments) if is_there else None
        return _Asked(worker, worker.incarnation, told, reference)

    def _answer(self, asked: _Asked, deadline: float | None = None) -> Any:
        worker, incarnation, told, reference = asked
        where = {"worker_index": worker.index, "incarnation": incarnation}
        if reference is None:
            why = worker.gone or "it will be replaced after a pause"
            return WorkerLost(f"worker {worker.index} is lost: {why}", **where)
        errors = self._ray.exceptions
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return self._ray.get(reference, timeout=left)
        except errors.GetTimeoutError:
            return WorkerError(
                f"worker {worker.index} has not answered in time, because it finishes earlier requests "
                "first: use a longer timeout",
                **where,
            )
        except self._raised as error:
            worker.told = min(worker.told, told)
            return _raised_there(worker, incarnation, error)
        except errors.RaySystemError as error:
            return WorkerError(
                f"the answer of worker {worker.index} cannot be read here: {_reason(error)}", **where
            )
        except errors.RayError as error:
            reason = _reason(error)
            if worker.incarnation == incarnation:
                self.lose(worker, reason, cause=error)
            return WorkerLost(f"worker {worker.index} was lost before it answered: {reason}", **where)

    # ---- listening ----

    def wait(self, timeout_s: float | None) -> None:
        """Wait until a worker answers, and take all answers that have arrived.

        Args:
            timeout_s: Seconds; None: no limit.

        Raises:
            WorkerError: A worker raised an error; the answers of the others are taken.
            WorkerLost: A worker was lost and not replaced.
            ClosedError: The wait was interrupted.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._take_answers(deadline) and not self._errors:
            if deadline is not None and time.monotonic() >= deadline:
                break
            if self.interrupted.is_set():
                raise ClosedError("the group was interrupted while this thread waited for its workers")
        self.raise_errors()

    def _take_answers(self, deadline: float | None) -> bool:
        """Wait briefly; returns whether an answer arrived, or nothing remains to wait for."""
        paused = [worker for worker in self.workers if worker.restart_at is not None]
        due = self._start_due()
        if any(worker.restart_at is None for worker in paused):
            return True
        self._take_recovered(self._recovery.ended())
        asked = [reference for worker in self.workers for reference in worker.missing]
        moment = min(_LOOK_UP_S, due, math.inf if deadline is None else deadline - time.monotonic())
        moment = max(0.0, moment)
        if not asked:
            self.interrupted.wait(moment if math.isfinite(due) else 0.0)
            return not math.isfinite(due)
        there, _ = self._ray.wait(asked, num_returns=1, timeout=moment)
        if there:
            there, _ = self._ray.wait(asked, num_returns=len(asked), timeout=0)
        self._take_all(set(there))
        return self._look_for_hanging() or bool(there)

    def _take_all(self, there: set[Any]) -> None:
        """Take the answers that have arrived, of each worker in order, with one request to Ray."""
        found = [
            (worker, reference)
            for worker in self.workers
            for reference in itertools.takewhile(there.__contains__, worker.missing)
        ]
        try:
            answers = self._ray.get([reference for _, reference in found])
        except (*self._raised, self._ray.exceptions.RayError):
            for worker, reference in found:
                if reference is worker.first:  # A worker that is lost meanwhile has no further answers.
                    self._take(worker, reference)
            return
        for (worker, reference), answer in zip(found, answers, strict=True):
            self._answered(worker, reference, answer)

    def _take(self, worker: RemoteWorker, reference: Any) -> None:
        try:
            answer = self._ray.get(reference)
        except self._raised as error:
            self._failed(worker, reference, error)
        except self._ray.exceptions.RayError as error:
            self.lose(worker, _reason(error), cause=error)
        else:
            self._answered(worker, reference, answer)

    def _answered(self, worker: RemoteWorker, reference: Any, answer: Opened | Sampled) -> None:
        worker.note()
        if isinstance(answer, Opened):
            worker.opening, worker.opened = None, answer
            return
        del worker.requests[reference]
        worker.written, worker.published = answer.written, answer.published
        self.metrics.add(worker.worker_id, answer.metrics)
        if answer.batch is None:
            worker.ended = True
            return
        worker.failures, worker.position = 0, answer.position
        worker.rows += answer.batch.agent_steps()
        worker.ready.append(Fragment(answer.batch, worker.index, worker.incarnation, self._fragments))
        self._fragments += 1

    def _failed(self, worker: RemoteWorker, reference: Any, error: Any) -> None:
        """Handle an error that a worker raised while it was made or sampled."""
        told = _raised_there(worker, worker.incarnation, error)
        if reference is not worker.opening:
            # The weights may be the cause, so the worker gets them again.
            worker.told = min(worker.told, worker.requests.pop(reference))
            worker.note()
            self._errors.append(told)
        elif worker.incarnation == 0:
            worker.opening = None
            self._let_go(worker, f"it could not be made: {_line(str(told.__cause__))}")
            self._errors.append(told)
        else:
            self.lose(worker, f"it could not be recreated: {_line(str(told.__cause__))}", cause=told)

    def _look_for_hanging(self) -> bool:
        """Lose workers that exceeded their time limit; returns whether any did."""
        now, found = time.monotonic(), False
        for worker in self.workers:
            starting = worker.opening is not None
            limit = self.tolerance.start_timeout_s if starting else self.tolerance.request_timeout_s
            if worker.first is None or limit is None or now - worker.heard < limit:
                continue
            found = True
            if starting:
                reason = f"it has not started in {limit:g} s; the cluster has {self._room()}"
            else:
                reason = f"it has not sampled a batch in {limit:g} s"
            self.lose(worker, reason)
        return found

    def _room(self) -> str:
        resources = self._ray.cluster_resources().items()
        shown = [f"{name} {there:g}" for name, there in resources if ":" not in name and "memory" not in name]
        return ", ".join(shown) or "nothing"

    def raise_errors(self) -> None:
        """Raise the errors of workers since the last call, as one.

        Raises:
            WorkerError: The first error; the others are its notes.
        """
        errors, self._errors = self._errors, []
        raise_first(errors)

    def check_connected(self) -> None:
        """Raise if Ray no longer has the workers, because any call would start a new Ray without them.

        Raises:
            WorkerLost: Ray was shut down.
        """
        if self.connected:
            return
        self._shut_down()
        raise WorkerLost(
            f"{_SHUT_DOWN}, and all workers ended with it: close the group. The rows that they wrote are in "
            "the data set, or will be after recovery",
            **_whose(self.workers[0]),
        )

    def check_whole(self) -> None:
        """Raise if too many workers are lost.

        Raises:
            WorkerLost: A worker was lost and may not be dropped, or all were lost.
        """
        empty = [worker for worker in self.workers if worker.gone is not None]
        if not empty or (self.tolerance.lost_workers == "drop" and len(empty) < len(self.workers)):
            return
        first = empty[0]
        raise WorkerLost(
            f"{len(empty)} of {len(self.workers)} workers are lost, worker {first.index} because "
            f"{first.gone}: close the group. Their rows are in the data set, or will be after recovery",
            **_whose(first),
        )

    # ---- losing ----

    def lose(self, worker: RemoteWorker, reason: str, *, cause: BaseException | None = None) -> None:
        """Give up a worker, keep the answers that arrived, and replace the worker if that is allowed.

        Args:
            worker: The lost worker.
            reason: The reason in one line.
            cause: The error from Ray or the worker, with all details.
        """
        self._ray.kill(worker.actor)  # It may be unreachable or hang.
        lost, pause = self._salvage(worker), self._pause_before_restart(worker)
        loss = self._write_off(worker, reason, requests=lost, restarted=pause is not None)
        worker.failures += 1
        logger.warning(
            "worker %d (incarnation %d, machine %s) is lost: %s; %d requested batches are lost, "
            "%d of its rows are not in the data set yet; %s",
            loss.worker_index,
            loss.incarnation,
            loss.host,
            reason,
            loss.requests,
            loss.rows_unpublished,
            _what_follows(pause),
        )
        logger.debug("worker %d is lost", loss.worker_index, exc_info=cause)
        if pause is not None:
            self._restart(worker, pause)
            return
        self._let_go(worker, reason)
        if self.tolerance.lost_workers == "raise" or all(other.gone for other in self.workers):
            error = WorkerLost(
                f"worker {worker.index} is lost, and FaultTolerance allows no restart: {reason}",
                **_whose(worker),
            )
            error.__cause__ = cause
            self._errors.append(error)

    def _pause_before_restart(self, worker: RemoteWorker) -> float | None:
        """Return the seconds until ``worker`` may be replaced; None: it may not."""
        now = time.monotonic()
        if not self.tolerance.allows(restarted=self._restarted, now=now, in_a_row=worker.failures):
            return None
        spread = np.random.default_rng([self._seed, worker.index, worker.incarnation]).random()
        return self.tolerance.pause_s(in_a_row=worker.failures, spread=spread)

    def _restart(self, worker: RemoteWorker, pause: float) -> None:
        now = time.monotonic()
        self._restarted.append(now)
        worker.incarnation += 1
        worker.wait_for_restart(now + pause)
        self._start_due()

    def _write_off(self, worker: RemoteWorker, reason: str, *, requests: int, restarted: bool) -> Loss:
        opened = worker.opened
        loss = Loss(
            worker_index=worker.index,
            incarnation=worker.incarnation,
            reason=reason,
            requests=requests,
            rows=worker.rows,
            rows_unpublished=worker.written - worker.published,
            writer_id=None if opened is None else opened.writer_id,
            host=None if opened is None else opened.host,
            logs=() if opened is None else tuple(log.folder for log in opened.logs),
            node_id=None if opened is None else opened.node_id,
            restarted=restarted,
        )
        self.losses.append(loss)
        if opened is not None and opened.logs:
            lost = LostLog(loss, opened.logs, rows=worker.written, stored=worker.published)
            self._recovery.add(len(self.losses) - 1, lost, connected=self.connected)
        worker.published = worker.written  # From now on, the loss counts them.
        return loss

    def _take_recovered(self, found: Mapping[int, int]) -> None:
        """Update in the losses how many rows are in the data set now."""
        for number, unpublished in found.items():
            self.losses[number] = replace(self.losses[number], rows_unpublished=unpublished)

    def recover(self, timeout_s: float) -> None:
        """Recover the remaining logs of lost workers; called once, at the end."""
        self._take_recovered(self._recovery.finish(timeout_s, connected=self.connected))

    def _let_go(self, worker: RemoteWorker, reason: str) -> None:
        worker.gone, worker.restart_at = reason, None
        if worker.actor is not None:
            self._ray.kill(worker.actor)

    def _salvage(self, worker: RemoteWorker) -> int:
        """Take the answers of a lost worker that had arrived; returns how many batches are lost."""
        expected = [*([] if worker.opening is None else [worker.opening]), *worker.requests]
        if expected:
            self._ray.wait(expected, num_returns=len(expected), timeout=_SALVAGE_S)
        lost = 0
        for reference in expected:
            try:
                answer = self._ray.get(reference, timeout=0)
            except self._ray.exceptions.RayError as error:
                if reference is worker.opening:
                    # All its other answers say that it is not open.
                    lost, worker.opening = len(worker.requests), None
                    worker.requests.clear()
                    return lost
                if isinstance(error, self._raised):
                    self._failed(worker, reference, error)
                else:
                    lost += 1
                    del worker.requests[reference]
            else:
                self._answered(worker, reference, answer)
        return lost

    def replace_silent(self, workers: Sequence[RemoteWorker], *, timeout_s: float) -> None:
        """Lose workers that do not answer a call in time."""
        pings = [self._asked(worker, "apply", [RolloutWorker.assert_healthy]) for worker in workers]
        asked = {each.reference: each for each in pings}
        if not asked:
            return
        there, silent = self._ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
        for reference in there:
            answer = self._answer(asked[reference])
            if isinstance(answer, WorkerError) and not isinstance(answer, WorkerLost):
                self._errors.append(answer)
        for reference in silent:
            self.lose(asked[reference].worker, f"it has not answered in {timeout_s:g} s")

    # ---- ending ----

    def close(self, timeout_s: float) -> None:
        """Let all workers store their rows, and end them.

        Raises:
            WorkerError: A worker could not store everything.
            WorkerLost: A worker died meanwhile, or did not finish in time.
        """
        if not self.connected:
            self._shut_down()
        asked = [(worker, worker.actor.close.remote()) for worker in self.present]
        for worker in self.alive:
            if worker.restart_at is not None:
                self._let_go(worker, "the group was closed")
        if asked:
            references = [reference for _, reference in asked]
            self._ray.wait(references, num_returns=len(references), timeout=timeout_s)
        told = [self._closed(worker, reference, timeout_s) for worker, reference in asked]
        for error in self._errors:
            logger.warning("error in a batch that is no longer needed: %s", error)
        self._errors = [error for error in told if error is not None]
        self.raise_errors()

    def _shut_down(self) -> None:
        """Record that Ray, and with it all workers, ended before the group."""
        alive = self.alive
        for worker in alive:
            if worker.restart_at is None:
                self._write_off(worker, _SHUT_DOWN, requests=len(worker.requests), restarted=False)
            worker.gone, worker.restart_at = _SHUT_DOWN, None
            worker.requests.clear()
        if alive:
            logger.error("%s: rows that workers wrote are in their logs, see `rlio recover`", _SHUT_DOWN)

    def _closed(self, worker: RemoteWorker, reference: Any, timeout_s: float) -> WorkerError | None:
        """End a worker that was asked to close; returns the error, if any."""
        errors = self._ray.exceptions
        failed, reason = None, "the group was closed"
        try:
            self._ray.get(reference, timeout=0)
        except self._raised as error:
            failed = _raised_there(worker, worker.incarnation, error)
        except errors.GetTimeoutError:
            reason = f"it was not closed in {timeout_s:g} s"
        except errors.RayError as error:
            reason = f"{_reason(error)}, while it was closed"
        else:
            reference = None
        self._let_go(worker, reason)
        lost = self._salvage(worker)
        if reference is None:
            worker.published = worker.written  # Rows of answers that were taken just now are stored, too.
            return None
        if failed is not None:
            return failed
        self._write_off(worker, reason, requests=lost, restarted=False)
        return WorkerLost(
            f"worker {worker.index} is lost: {reason}; its rows are in its log. The group recovers the log "
            "now; if that fails, run `rlio recover` on its machine",
            **_whose(worker),
        )


def _whose(worker: RemoteWorker) -> dict[str, int]:
    """Return the fields of a `WorkerError` that identify the worker."""
    return {"worker_index": worker.index, "incarnation": worker.incarnation}


def raise_first(answers: Iterable[Any]) -> None:
    """Raise the first error among ``answers``, with the others as its notes."""
    errors = [answer for answer in answers if isinstance(answer, WorkerError)]
    if errors:
        for other in errors[1:]:
            errors[0].add_note(str(other))
        raise errors[0]


def _what_follows(pause: float | None) -> str:
    if pause is None:
        return "it is not replaced, see FaultTolerance"
    return f"its replacement starts in {pause:.1f} s" if pause else "its replacement starts at once"


def _reason(error: Any) -> str:
    """Return why a worker did not answer, in one short line."""
    found = _WHY_DEAD.search(str(error))
    return f"{type(error).__name__}: {_line(found[1] if found else str(error))}"


def _line(text: str) -> str:
    """Return the beginning of ``text`` without line breaks."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def _raised_there(worker: RemoteWorker, incarnation: int, error: Any) -> WorkerError:
    """Return a worker's error, to be raised in this process."""
    cause = getattr(error, "cause", None)
    if cause is None:  # Its class cannot be unpickled here; the traceback ends with its name and text.
        cause = RuntimeError(str(error).rstrip().rpartition("\n")[2])
    told = WorkerError(
        f"worker {worker.index} raised {type(cause).__name__}: {_line(str(cause))}",
        worker_index=worker.index,
        incarnation=incarnation,
    )
    told.add_note(f"In the process of worker {worker.index}:\n{_COLOURS.sub('', str(error)).rstrip()}")
    told.__cause__ = cause
    return told
