"""`ActorPool`: the actors of a group: started, asked, listened to, and replaced where they die.

One thread at a time uses it; nothing here waits longer than it is told to.
"""

from __future__ import annotations

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

__all__ = ["ActorPool", "raise_first"]

logger = logging.getLogger("rlio")

# Any in this module: Ray's handles, references and errors, and what users' functions give.

# Whoever waits looks up so often: for `interrupt`, and for workers that hang.
_LOOK_UP_S = 0.5
# Answers of a worker that died are there, or are errors, in no time.
_SALVAGE_S = 5.0
# Ray's own, in tracebacks.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Of a message of somebody else's.
_SHOWN = 200
# Where Ray says in half a sentence what became of a process; the rest of its report is for debugging.
_WHY_DEAD = re.compile(r"[Aa]ctor (?:is dead|died) because ([^.\n]*)")
_SHUT_DOWN = "Ray was shut down before the group was closed"
# The group starts workers anew itself, as others: Ray would start the same ones.
_OURS = ("max_restarts", "max_task_retries", "max_concurrency", "concurrency_groups")


class _Asked(NamedTuple):
    """A call whose answer somebody waits for; ``reference`` is None where nobody is there to be asked."""

    worker: RemoteWorker
    incarnation: int
    told: int
    reference: Any


class ActorPool:
    """Workers in processes of their own, on whatever machines Ray puts them.

    Args:
        spec: What each is made of.
        tolerance: What to do about those that die.
        actor_options: For Ray: resources and the like.

    Attributes:
        workers: By place.
        broadcasts: Weights for them.
        filters: Reference to the filters that those begin with which come later; None: new ones.
        metrics: What they counted.
        losses: Those that were lost.
        interrupted: Set by whoever wants those who wait to give up.

    Raises:
        OptionError: ``actor_options`` has something that is the group's to decide.
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
                    f"actor_options has {name}={excerpt(options[name])}: the group starts workers anew by "
                    "itself, and asks each for one thing at a time; see FaultTolerance"
                )
        self.tolerance = tolerance
        self.workers = [RemoteWorker(index) for index in range(1, spec.num_workers + 1)]
        self.broadcasts = Broadcasts()
        self.filters: Any = None
        self.metrics = JointMetrics()
        self.losses: list[Loss] = []
        #: When workers were allowed to take another's place, `time.monotonic`.
        self._restarted: list[float] = []
        self._seed = spec.seed
        self._recovery = LogRecovery(options.get("runtime_env"))
        self.interrupted = threading.Event()
        self._class = self._ray.remote(WorkerActor).options(
            **{"num_cpus": 1, **options}, max_restarts=0, max_task_retries=0
        )
        self._errors: list[WorkerError] = []
        self._fragments = 0
        errors = self._ray.exceptions
        # The second, of later versions, is for those whose class cannot be made anew from what travels.
        self._raised = (errors.RayTaskError, getattr(errors, "UnserializableException", errors.RayTaskError))
        self._spec = self._ray.put(spec)
        self._session = self._present_session()

    def reseed(self, seed: int) -> None:
        """Make workers with seeds of ``seed`` from now on."""
        # Ray's copy, not the caller's objects: a policy among them may have begun to act in this process.
        self._spec = self._ray.put(replace(self._ray.get(self._spec), seed=seed))
        self._seed = seed

    def _present_session(self) -> tuple[str, str]:
        context = self._ray.get_runtime_context()
        return context.get_job_id(), context.get_node_id()

    @property
    def connected(self) -> bool:
        """Whether Ray is still the one that has the workers."""
        return self._ray.is_initialized() and self._present_session() == self._session

    @property
    def restarts(self) -> int:
        """How many workers have taken another's place, or will after a pause."""
        return len(self._restarted)

    @property
    def alive(self) -> list[RemoteWorker]:
        """Places where a worker is, or will be after a restart."""
        return [worker for worker in self.workers if worker.gone is None]

    @property
    def present(self) -> list[RemoteWorker]:
        """Of those, the ones that do not wait for their restart."""
        return [worker for worker in self.alive if worker.restart_at is None]

    # ---- starting ----

    def start(self) -> None:
        """Start all workers, and wait until they are there.

        Raises:
            WorkerError: One cannot be made; its own error is the cause.
            WorkerLost: One does not start in time, or dies too often.
        """
        for worker in self.workers:
            worker.incarnation += 1
            self._start(worker)
        self.settle()

    def settle(self) -> None:
        """Wait until all workers that start, or wait for their restart, are there."""
        while any(worker.opening is not None or worker.restart_at is not None for worker in self.workers):
            self.wait(None)

    def reopen(self) -> None:
        """Let another worker begin at each place, in the processes that are there."""
        for worker in self.alive:
            worker.incarnation, worker.position = worker.incarnation + 1, None
            self._open(worker, worker.actor or self._class.remote())
        self.settle()

    def _start(self, worker: RemoteWorker) -> None:
        self._open(worker, self._class.remote())

    def _start_due(self) -> float:
        """Start the workers whose pause is over; gives the seconds until the next one's is."""
        now, waiting = time.monotonic(), [math.inf]
        for worker in self.workers:
            if worker.restart_at is not None and worker.restart_at <= now:
                self._start(worker)
            elif worker.restart_at is not None:
                waiting.append(worker.restart_at - now)
        return min(waiting)

    def _await_restart(self, worker: RemoteWorker, deadline: float | None) -> None:
        """Wait until ``worker`` is started, if it waits for that, but not past the deadline."""
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
        """Ask for something; the worker gets the newest weights first. Returns Ray's reference."""
        told, references = self.broadcasts.snapshot(worker.told)
        reference = getattr(worker.actor, method).remote(*arguments, *references)
        worker.told = (
            told  # Not before: what cannot be sent, as it cannot be pickled, takes no weights along.
        )
        return reference

    def request(self, worker: RemoteWorker) -> None:
        """Ask for a batch, which `wait` puts where it belongs once it is there."""
        told = worker.told
        if worker.first is None:
            worker.note()
        worker.requests[self.ask(worker, "sample")] = told

    def call(
        self, workers: Iterable[RemoteWorker], method: str, *arguments: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Ask several for the same, and wait.

        Returns:
            By worker, what it answered, or the `WorkerError` in its place.
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
            why = worker.gone or "another takes its place, after a pause"
            return WorkerLost(f"worker {worker.index} is lost: {why}", **where)
        errors = self._ray.exceptions
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return self._ray.get(reference, timeout=left)
        except errors.GetTimeoutError:
            return WorkerError(
                f"worker {worker.index} has not answered in time: batches that it was asked for before come "
                "first; give it longer",
                **where,
            )
        except self._raised as error:
            worker.told = min(worker.told, told)
            return _raised_there(worker, incarnation, error)
        except errors.RaySystemError as error:
            return WorkerError(
                f"what worker {worker.index} answered cannot be read here: {_reason(error)}", **where
            )
        except errors.RayError as error:
            reason = _reason(error)
            if worker.incarnation == incarnation:
                self.lose(worker, reason, cause=error)
            return WorkerLost(f"worker {worker.index} was lost before it answered: {reason}", **where)

    # ---- listening ----

    def wait(self, timeout_s: float | None) -> None:
        """Wait until a worker answers, and take all answers that are there.

        Args:
            timeout_s: Seconds; None: until somebody does.

        Raises:
            WorkerError: A worker raised an error; what others answered is taken all the same.
            WorkerLost: One was lost that is not replaced.
            ClosedError: Interrupted.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._take_answers(deadline) and not self._errors:
            if deadline is not None and time.monotonic() >= deadline:
                break
            if self.interrupted.is_set():
                raise ClosedError("the group was interrupted while this thread waited for its workers")
        self.raise_errors()

    def _take_answers(self, deadline: float | None) -> bool:
        """Wait for a moment; gives whether there is something new, or nothing to wait for."""
        paused = [worker for worker in self.workers if worker.restart_at is not None]
        due = self._start_due()
        if any(worker.restart_at is None for worker in paused):
            return True
        self._take_recovered(self._recovery.ended())
        asked = {worker.first: worker for worker in self.workers if worker.first is not None}
        moment = min(_LOOK_UP_S, due, math.inf if deadline is None else deadline - time.monotonic())
        moment = max(0.0, moment)
        if not asked:
            self.interrupted.wait(moment if math.isfinite(due) else 0.0)
            return not math.isfinite(due)
        there, _ = self._ray.wait(list(asked), num_returns=1, timeout=moment)
        if there:
            there, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for reference in there:
            self._take(asked[reference], reference)
        return self._look_for_hanging() or bool(there)

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
        """A worker raised an error of its own: while it was made, or while it sampled."""
        told = _raised_there(worker, worker.incarnation, error)
        if reference is not worker.opening:
            # Perhaps it did not like the weights: it is to get them again.
            worker.told = min(worker.told, worker.requests.pop(reference))
            worker.note()
            self._errors.append(told)
        elif worker.incarnation == 0:
            worker.opening = None
            self._let_go(worker, f"it could not be made: {_line(str(told.__cause__))}")
            self._errors.append(told)
        else:
            self.lose(worker, f"it could not be made again: {_line(str(told.__cause__))}", cause=told)

    def _look_for_hanging(self) -> bool:
        """Lose those that have not answered for too long; gives whether there were any."""
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
        """Raise what workers raised since the last call, as one.

        Raises:
            WorkerError: That of the first; the others are notes.
        """
        errors, self._errors = self._errors, []
        raise_first(errors)

    def check_connected(self) -> None:
        """Raise where Ray no longer has the workers: to ask anything would start it anew, without them.

        Raises:
            WorkerLost: Ray was shut down.
        """
        if self.connected:
            return
        self._shut_down()
        raise WorkerLost(
            f"{_SHUT_DOWN}, and all workers ended with it: close the group; what they had written is in "
            "their data set, or will be",
            **_whose(self.workers[0]),
        )

    def check_whole(self) -> None:
        """Raise where places are empty that should not be.

        Raises:
            WorkerLost: One worker was lost and may not be dropped, or all were lost.
        """
        empty = [worker for worker in self.workers if worker.gone is not None]
        if not empty or (self.tolerance.lost_workers == "drop" and len(empty) < len(self.workers)):
            return
        first = empty[0]
        raise WorkerLost(
            f"{len(empty)} of {len(self.workers)} workers are lost, worker {first.index} because "
            f"{first.gone}: close the group; what they had written is in their data set, or will be",
            **_whose(first),
        )

    # ---- losing ----

    def lose(self, worker: RemoteWorker, reason: str, *, cause: BaseException | None = None) -> None:
        """Give a worker up, keep what had come of it, and let another take its place if that is allowed.

        Args:
            worker: Which.
            reason: In one line.
            cause: What Ray or the worker raised, with all that they say.
        """
        self._ray.kill(worker.actor)  # It may be out of reach, or hang, rather than be dead.
        lost, pause = self._salvage(worker), self._pause_before_restart(worker)
        loss = self._write_off(worker, reason, requests=lost, restarted=pause is not None)
        worker.failures += 1
        logger.warning(
            "worker %d (incarnation %d, machine %s) is lost: %s; %d batches that it was asked for will not "
            "come, %d of its rows are not in the data set yet; %s",
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
                f"worker {worker.index} is lost, and FaultTolerance allows no other: {reason}",
                **_whose(worker),
            )
            error.__cause__ = cause
            self._errors.append(error)

    def _pause_before_restart(self, worker: RemoteWorker) -> float | None:
        """Seconds until another may take the place of ``worker``; None: none may."""
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
        worker.published = worker.written  # The loss counts them from here on.
        return loss

    def _take_recovered(self, found: Mapping[int, int]) -> None:
        """Note in the losses how many rows are in the data set now."""
        for number, unpublished in found.items():
            self.losses[number] = replace(self.losses[number], rows_unpublished=unpublished)

    def recover(self, timeout_s: float) -> None:
        """Recover the logs of lost workers that are not recovered yet; called once, at the end."""
        self._take_recovered(self._recovery.finish(timeout_s, connected=self.connected))

    def _let_go(self, worker: RemoteWorker, reason: str) -> None:
        worker.gone, worker.restart_at = reason, None
        if worker.actor is not None:
            self._ray.kill(worker.actor)

    def _salvage(self, worker: RemoteWorker) -> int:
        """Take the answers of a lost worker that had come; gives how many batches never will."""
        expected = [*([] if worker.opening is None else [worker.opening]), *worker.requests]
        if expected:
            self._ray.wait(expected, num_returns=len(expected), timeout=_SALVAGE_S)
        lost = 0
        for reference in expected:
            try:
                answer = self._ray.get(reference, timeout=0)
            except self._ray.exceptions.RayError as error:
                if reference is worker.opening:
                    # All else that it answers is that it is not open.
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
        """Lose those of ``workers`` that do not answer a call in time."""
        asked = {each.reference: each for each in [self._asked(worker, "ping") for worker in workers]}
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
        """Let all workers store what they have, and end them.

        Raises:
            WorkerError: One could not store everything.
            WorkerLost: One died meanwhile, or was not done in time.
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
            logger.warning("while a batch was sampled that nobody waits for any more: %s", error)
        self._errors = [error for error in told if error is not None]
        self.raise_errors()

    def _shut_down(self) -> None:
        """Take note that Ray, and with it all workers, ended before the group."""
        alive = self.alive
        for worker in alive:
            if worker.restart_at is None:
                self._write_off(worker, _SHUT_DOWN, requests=len(worker.requests), restarted=False)
            worker.gone, worker.restart_at = _SHUT_DOWN, None
            worker.requests.clear()
        if alive:
            logger.error("%s: what workers had written is in their logs, see `rlio recover`", _SHUT_DOWN)

    def _closed(self, worker: RemoteWorker, reference: Any, timeout_s: float) -> WorkerError | None:
        """End a worker that was asked to close; gives what went wrong."""
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
            worker.published = worker.written
        self._let_go(worker, reason)
        lost = self._salvage(worker)
        if reference is None or failed is not None:
            return failed
        self._write_off(worker, reason, requests=lost, restarted=False)
        return WorkerLost(
            f"worker {worker.index} is lost: {reason}; what it had written is in its log, which is recovered "
            "now, or by `rlio recover` on its machine",
            **_whose(worker),
        )


def _whose(worker: RemoteWorker) -> dict[str, int]:
    """What a `WorkerError` says of the worker that it tells of."""
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
        return "no other takes its place, see FaultTolerance"
    return f"another starts in {pause:.1f} s" if pause else "another starts at once"


def _reason(error: Any) -> str:
    """What became of a worker that did not answer, in one short line."""
    found = _WHY_DEAD.search(str(error))
    return f"{type(error).__name__}: {_line(found[1] if found else str(error))}"


def _line(text: str) -> str:
    """The beginning of ``text`` without its breaks."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def _raised_there(worker: RemoteWorker, incarnation: int, error: Any) -> WorkerError:
    """What a worker raised, to be raised here."""
    cause = getattr(error, "cause", None)
    if cause is None:  # It cannot be made here; its traceback ends with what it was.
        cause = RuntimeError(str(error).rstrip().rpartition("\n")[2])
    told = WorkerError(
        f"worker {worker.index} raised {type(cause).__name__}: {_line(str(cause))}",
        worker_index=worker.index,
        incarnation=incarnation,
    )
    told.add_note(f"In the process of worker {worker.index}:\n{_COLOURS.sub('', str(error)).rstrip()}")
    told.__cause__ = cause
    return told
