"""`WorkerGroup`: rollout workers in processes of their own, on one machine or many, as one reader.

Example::

    import ray, rlio
    from rlio.distributed import WorkerGroup

    ray.init()
    with WorkerGroup("CartPole-v1", rlio.policies.DQN, num_workers=4, output="runs/cartpole", seed=0,
                     local_worker=True) as group:
        for step in range(100):
            batch = group.sample()                    # a fragment of each worker
            group.local_worker.learn_on_batch(batch)
            group.sync_weights()                      # before their next fragment
"""

from __future__ import annotations

import atexit
import functools
import logging
import operator
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeVar, Unpack

from rlio.batch import Batch, SampleBatch, concat_samples
from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.connectors.mean_std import MeanStdFilter
from rlio.distributed.group.actor_pool import ActorPool, raise_first
from rlio.distributed.group.actors import Broadcast
from rlio.distributed.group.fault_tolerance import FaultTolerance, Loss
from rlio.distributed.group.joint import JointFilters, JointMetrics
from rlio.distributed.group.remote_worker import Fragment, RemoteWorker, WorkerStatus
from rlio.distributed.group.worker_spec import Acknowledge, WorkerKeywords, WorkerSpec, draw_seed, portable
from rlio.distributed.ray_import import require_ray
from rlio.errors import EndOfData, OptionError, RlioError, WorkerError, excerpt
from rlio.policies.policy import Policy
from rlio.policies.policy_spec import Spaces
from rlio.policies.weights import GlobalVars, accepts_weights
from rlio.reader import InputReader, JsonState
from rlio.sampling.metrics import RolloutMetrics
from rlio.sampling.policy_setup import PolicySetup
from rlio.worker import RolloutWorker

__all__ = ["WorkerGroup"]

logger = logging.getLogger("rlio")
T = TypeVar("T")

_ENDED = "all workers have come to the end of their inputs"

# Any in this module: environments, policies and options are what `RolloutWorker` takes.


class _HasWeights(Protocol):
    """A worker, or a policy."""

    def get_weights(self) -> dict[str, Any]: ...


class WorkerGroup(InputReader):
    """N rollout workers, each an actor of Ray's, made from one set of `RolloutWorker` arguments.

    The group is a live reader: `sample()` gives a fragment of each worker, in the order of their indices,
    ``sample(n)`` exactly n steps. All workers write one data set, each under a writer id of its own, and need
    not know of each other. Each has a seed of its own, which the provenance in its shards holds, with the
    group's; so has each that takes the place of a lost one: no two record the same episodes.

    A worker that dies or hangs is replaced, as ``fault_tolerance`` allows; the others go on. Batches of it
    that came are served and counted. What it left in its log is published at once by a task on its machine,
    or when the group is closed. Batches that it was asked for and that never came are told in `losses`. An
    exception in its environment or policy is raised in `sample`, and is no death.

    A row that a call returned is in the output's write-ahead log, on a disk of the worker's machine, and in
    the data set once it is published: usually within half a minute. If that disk is lost before, so is the
    row. `rows_unpublished` counts such rows, and ``acknowledge="published"`` excludes them.

    Ray is used as it is: call ``ray.init()`` before, or Ray starts itself on this machine, and listens to the
    network: see docs/distributed.md. What workers import must be importable in their processes; functions and
    classes of a script travel along.

    Args:
        env: As for `RolloutWorker`: an id, or a function that makes environments. No environment itself.
        policy: As for `RolloutWorker`; not yet bound to spaces. Workers begin with the same weights: the
            local worker's, or else the first one's.
        num_workers: Actors; their ``worker_index`` is 1 to this.
        seed: Of all of them. None draws one from the OS, logs it and keeps it in the state.
        local_worker: Whether to make a worker 0 in this process too, without environment, input and output:
            to learn, and to hold the weights. A policy given as an object becomes that worker's.
        acknowledge: What has happened to a row when a call returns it. ``"written"``: the worker's writer has
            taken it. ``"published"``: it is in the data set. Workers then flush their output before they
            return a batch: one shard a fragment, and one wait for the store.
        fault_tolerance: What to do about workers that die; None: the defaults.
        actor_options: For Ray's ``options()``: ``num_cpus`` (1), ``num_gpus``, ``resources``,
            ``runtime_env``, ``scheduling_strategy`` and the like.
        arguments: Others of `RolloutWorker`. Outputs and inputs are paths or functions, not open ones; each
            worker reads its share of a stored input.

    Attributes:
        seed: Of all workers.
        num_workers: Actors.
        local_worker: Worker 0; None without.
        fault_tolerance: As given.

    Raises:
        OptionError: An argument is illegal, or a worker cannot be made of them; or ``acknowledge`` is
            "published" without an output.
        MissingExtra: Ray is not installed.
        WorkerError: A worker cannot be made, for another reason.
        WorkerLost: Workers do not start.
    """

    replayable = False

    def __init__(
        self,
        env: Any,
        policy: Any,
        *,
        num_workers: int,
        seed: int | None = None,
        local_worker: bool = False,
        acknowledge: Acknowledge = "written",
        fault_tolerance: FaultTolerance | None = None,
        actor_options: Mapping[str, Any] | None = None,
        **arguments: Unpack[WorkerKeywords],
    ) -> None:
        if operator.index(num_workers) < 1:
            raise OptionError(f"num_workers={num_workers}: at least 1")
        self._ray = require_ray()
        self._arguments = portable(env, policy, arguments)
        _check_acknowledge(acknowledge, self._arguments.get("output"))
        self.num_workers = num_workers
        self.seed = draw_seed() if seed is None else seed
        if seed is None:
            logger.info("WorkerGroup: seed %s, drawn from the OS", self.seed)
        self.fault_tolerance = fault_tolerance if fault_tolerance is not None else FaultTolerance()
        self.local_worker: RolloutWorker | None = None
        self._lock = threading.RLock()
        self._filters = JointFilters()
        self._earlier_incarnations: dict[str, int] = {}
        spec = WorkerSpec(env, policy, self._arguments, num_workers, self.seed, acknowledge)
        self._pool = ActorPool(spec, tolerance=self.fault_tolerance, actor_options=actor_options)
        try:
            self._pool.start()
            opened = self._pool.alive[0].opened
            assert opened is not None
            self.unit = opened.unit
            if local_worker:
                self.local_worker = self._make_local_worker(policy, opened.spaces)
            self._begin_alike()
        except BaseException as error:
            self._give_up()
            if isinstance(error, WorkerError) and isinstance(error.__cause__, RlioError):
                error.__cause__.add_note(str(error))
                raise error.__cause__ from None
            raise
        _open_groups.add(self)
        _close_at_exit()

    def _check_open(self) -> None:
        super()._check_open()
        self._pool.check_connected()

    # ---- making ----

    def _make_local_worker(self, policy: Any, spaces: Mapping[str, Spaces]) -> RolloutWorker:
        known = {policy_id: own for policy_id, own in spaces.items() if policy_id != "__env__"}
        for policy_id, given in (
            policy if isinstance(policy, Mapping) else {DEFAULT_POLICY_ID: policy}
        ).items():
            if isinstance(given, Policy) and policy_id in known:
                given.bind(*known[policy_id], self.seed)
        setup = self._arguments.get("policy_setup") or PolicySetup()
        setup = replace(setup, spaces={**known, **setup.spaces})
        names = ("policy_mapping_fn", "policies_to_train", "callbacks")
        keywords = {name: self._arguments[name] for name in names if name in self._arguments}
        return RolloutWorker(
            None,
            policy,
            input=None,
            policy_setup=setup,
            seed=self.seed,
            num_workers=self.num_workers,
            **keywords,
        )

    def _begin_alike(self) -> None:
        """Give all workers the weights of one: policies that are made at random are not made alike."""
        if self.local_worker is not None:
            weights = _all_weights(self.local_worker)
        else:
            (weights,) = self._called(self._pool.alive[:1], _all_weights)
        weights = {policy_id: own for policy_id, own in weights.items() if own}
        if weights:
            self._broadcast(Broadcast(weights, seq_no=0))

    def _give_up(self) -> None:
        """End what was started, however far that is."""
        for worker in self._pool.workers:
            if worker.actor is not None:
                self._ray.kill(worker.actor)
        if self.local_worker is not None:
            self.local_worker.close()
        self._closed = True

    # ---- sampling ----

    def sample(self, n: int | None = None, *, out: SampleBatch | None = None) -> Batch:
        """Return the next batch: a fragment of each worker, joined in the order of their indices.

        Workers sample side by side, and wait when they have one each; with `submit` they go on.

        Args:
            n: Units (see `unit`), exactly; what is left over is kept for the next call.
            out: As in `InputReader.sample`.

        Returns:
            A batch that the caller owns, copied out of Ray's object store.

        Raises:
            WorkerError: An environment or policy raised an error in its worker, which is the cause. What
                other workers have sampled is the next call's.
            WorkerLost: A worker was lost, and may not be replaced: see `FaultTolerance`.
            EndOfData: The workers' inputs are exhausted.
            OptionError: ``n`` is below 1.
        """
        with self._lock:
            return super().sample(n, out=out)

    def _next(self) -> Batch:
        pool = self._pool
        while True:
            pool.check_whole()
            for worker in pool.workers:
                if worker.can_be_asked and not worker.unserved:
                    pool.request(worker)
            if not any(worker.samples and not worker.ready for worker in pool.workers):
                break
            pool.wait(None)
        batches = [worker.ready.popleft().batch for worker in pool.workers if worker.ready]
        if not batches:
            raise EndOfData(_ENDED)
        # Several are joined in fresh memory; one alone lies in Ray's.
        return concat_samples(batches) if len(batches) > 1 else batches[0].copy()

    def submit(self, max_in_flight: int = 1) -> int:
        """Ask each worker for more, and return at once; `ready` gives what comes.

        Args:
            max_in_flight: Fragments that a worker may be asked for, or that may wait for `ready`, at most:
                they are sampled with the weights of the moment that they are begun. With 2, a worker samples
                one while another is on its way.

        Returns:
            How many more fragments were asked for.

        Raises:
            WorkerLost: As in `sample`.
            EndOfData: The workers' inputs are exhausted, and all fragments were taken.
        """
        if operator.index(max_in_flight) < 1:
            raise OptionError(f"max_in_flight={max_in_flight}: at least 1")
        asked = 0
        with self._lock:
            self._check_open()
            self._pool.check_whole()
            if not any(worker.samples or worker.unserved for worker in self._pool.workers):
                raise EndOfData(_ENDED)
            for worker in self._pool.workers:
                while worker.can_be_asked and worker.unserved < max_in_flight:
                    self._pool.request(worker)
                    asked += 1
        return asked

    def ready(self, timeout_s: float | None = None) -> list[Fragment]:
        """Fragments that have come and that nobody has taken, in their order; waits for the first.

        Their arrays are read-only: they are Ray's, and are not copied.

        Args:
            timeout_s: Seconds after which there may be none; None: wait as long as any is asked for, or a
                worker starts.

        Raises:
            WorkerError: As in `sample`.
        """
        if timeout_s is not None and not timeout_s >= 0:
            raise OptionError(f"timeout_s={timeout_s}: seconds, at least 0, or None")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pool = self._pool
        with self._lock:
            self._check_open()
            while True:
                expected = any(
                    worker.first is not None or worker.restart_at is not None for worker in pool.workers
                )
                if expected:
                    there = any(worker.ready for worker in pool.workers)
                    left = None if deadline is None else max(0.0, deadline - time.monotonic())
                    pool.wait(0.0 if there else left)
                found = [fragment for worker in pool.workers for fragment in worker.ready]
                is_past = deadline is not None and time.monotonic() >= deadline
                if found or not expected or is_past:
                    for worker in pool.workers:
                        worker.ready.clear()
                    return sorted(found, key=lambda fragment: fragment.order)

    def interrupt(self) -> None:
        """Let a `sample` that waits in another thread go; see `InputReader`."""
        self._pool.interrupted.set()

    # ---- weights ----

    def set_weights(
        self,
        weights: Mapping[str, Any],
        weights_seq_no: int | None = None,
        *,
        global_vars: GlobalVars | None = None,
    ) -> int:
        """Give all workers other weights, once each has finished what it was asked for before.

        They are put into Ray's object store once. A worker gets them before the next thing that it is asked
        for, and if newer ones are there by then, only those; so does each that comes later.

        Args:
            weights: As `RolloutWorker.get_weights` gives them, or those of one `Policy`.
            weights_seq_no: Their version, recorded with every step; None: one more than any before. Workers
                that have it, or a newer one, keep theirs. 0: they are set in any case, and the version stays.
            global_vars: For `RolloutWorker.set_global_vars`; None: the steps of all workers' batches so far.

        Returns:
            The version. May be called in any thread, while others sample.

        Raises:
            OptionError: ``weights_seq_no`` is below 0.
            ClosedError: After `close`. That they do not fit is seen by the workers: see `sample`.
        """
        self._check_open()
        seq_no = self._pool.broadcasts.next_seq_no() if weights_seq_no is None else weights_seq_no
        accepts_weights(0, seq_no)
        given = self._global_vars() if global_vars is None else global_vars
        self._broadcast(Broadcast(weights, seq_no, given))
        return seq_no

    def _global_vars(self) -> GlobalVars:
        """The steps of all workers, those that were lost included, and the local worker's updates."""
        local = self.local_worker
        updates = {} if local is None else local.get_global_vars().num_grad_updates_per_policy
        return GlobalVars(self._pool.metrics.lifetime.env_steps, updates)

    def _broadcast(self, broadcast: Broadcast) -> None:
        weights = broadcast.weights
        several = bool(weights) and all(isinstance(own, Mapping) for own in weights.values())
        policies = frozenset(weights if several else {DEFAULT_POLICY_ID})
        self._pool.broadcasts.add(self._ray.put(broadcast), policies, seq_no=broadcast.seq_no)

    def sync_weights(self, source: _HasWeights | None = None) -> int:
        """Give all workers the weights of ``source``; see `set_weights`.

        Args:
            source: A policy or worker; None: the local worker, which gets to know the steps of all workers
                too.

        Raises:
            OptionError: There is neither.
        """
        if source is not None:
            return self.set_weights(source.get_weights())
        if self.local_worker is None:
            raise OptionError(
                "the group has no local worker to take weights from: sync_weights(policy), or make it with "
                "local_worker=True"
            )
        self.local_worker.set_global_vars(self._global_vars())
        return self.set_weights(self.local_worker.get_weights())

    @property
    def weights_seq_no(self) -> int:
        """The version of the newest weights; 0 before `set_weights`."""
        return self._pool.broadcasts.newest

    # ---- filters, metrics ----

    def sync_filters(self) -> dict[str, list[MeanStdFilter]]:
        """Put the running statistics of all workers together, and give all of them the sum.

        Each observation counts once, however often this is done and whatever is sampled meanwhile. What a
        lost worker had seen since the last time is lost with it; those that take its place begin with the
        sum.

        Returns:
            Copies of the joint filters, by policy id.

        Raises:
            WorkerError: One could not do it.
            StateError: Workers have unlike filters.
        """
        with self._lock:
            self._check_open()
            answers = self._pool.call(self._pool.present, "take_filters")
            parts = [part for part in answers if not isinstance(part, WorkerError)]
            self._filters.add(parts)
            if any(self._filters.filters.values()):
                self._pool.filters = self._ray.put(self._filters.filters)
                answers += self._pool.call(self._pool.present, "adopt_filters", self._pool.filters)
            raise_first(answers)
            return self.get_filters()

    def get_filters(self) -> dict[str, list[MeanStdFilter]]:
        """Copies of the joint filters, by policy id, as of the last `sync_filters`; {} before."""
        return {
            policy_id: [each.copy() for each in filters]
            for policy_id, filters in self._filters.filters.items()
        }

    def get_metrics(self) -> RolloutMetrics:
        """What the workers counted in batches that came since the last call; see `RolloutMetrics`.

        ``lifetime`` is of all of them, those that were lost included: of what a lost worker did for a batch
        that never came, nothing is counted.
        """
        with self._lock:
            return self._pool.metrics.take()

    # ---- workers ----

    def foreach_worker(
        self,
        func: Callable[[RolloutWorker], T],
        *,
        local_worker: bool = False,
        timeout_s: float | None = None,
        errors: Literal["raise", "return"] = "raise",
    ) -> list[T | WorkerError]:
        """``func(worker)`` in the process of each worker, once it has done what it was asked for before.

        Args:
            func: Travels to the workers, and what it returns travels back.
            local_worker: Whether to call it here too, first, with the local worker.
            timeout_s: Seconds to wait for all; who is late is an error, and does it all the same.
            errors: ``"raise"`` the first, once all are done; ``"return"`` each in the place of its result.

        Returns:
            Results by worker index; workers that are gone for good are left out.

        Raises:
            WorkerError: ``func`` raised an error, which is the cause.
            WorkerLost: A worker died meanwhile; another may take its place.
        """
        if errors not in ("raise", "return"):
            raise OptionError(f"errors={excerpt(errors)}: 'raise' or 'return'")
        if local_worker and self.local_worker is None:
            raise OptionError("local_worker=True, but the group has none")
        with self._lock:
            self._check_open()
            here: list[Any] = []
            if local_worker:
                assert self.local_worker is not None
                here = [func(self.local_worker)]
            answers = self._pool.call(self._pool.alive, "apply", func, timeout_s=timeout_s)
            if errors == "raise":
                raise_first(answers)
            return here + answers

    def foreach_policy(self, func: Callable[..., T]) -> list[list[T] | WorkerError]:
        """``func(policy, policy_id)`` for each policy of each worker; see `foreach_worker`."""
        return self.foreach_worker(lambda worker: worker.foreach_policy(func))

    def _called(self, workers: Sequence[RemoteWorker], func: Callable[[RolloutWorker], T]) -> list[T]:
        answers = self._pool.call(workers, "apply", func)
        raise_first(answers)
        return answers

    def probe(self, timeout_s: float | None = None) -> list[WorkerStatus]:
        """Find workers that are dead or hang, replace them, and say how all are.

        Idle workers are asked for a sign of life. Those that sample are given the time that
        ``request_timeout_s`` of `FaultTolerance` says. Deaths are noticed in `sample` too.

        Args:
            timeout_s: Seconds for idle ones; None: ``probe_timeout_s``.

        Raises:
            WorkerLost: One was lost, and may not be replaced.
            WorkerError: One says that it cannot sample; or as in `sample`, for one that was asked to.
        """
        pool = self._pool
        with self._lock:
            self._check_open()
            pool.wait(0.0)
            idle = [worker for worker in pool.present if worker.first is None]
            limit = self.fault_tolerance.probe_timeout_s if timeout_s is None else timeout_s
            pool.replace_silent(idle, timeout_s=limit)
            pool.raise_errors()
            return self.status()

    def status(self) -> list[WorkerStatus]:
        """How the workers are, as far as is known without asking them."""
        return [worker.status() for worker in self._pool.workers]

    @property
    def losses(self) -> list[Loss]:
        """Workers that were lost so far, and what with them. Calls that sample, and `probe`, note what was
        recovered since.
        """
        return list(self._pool.losses)

    @property
    def rows_unpublished(self) -> int:
        """Rows that were returned and are not in the data set as far as the group knows: at most so many.

        Those of workers that live were counted when their last batches came; since then their writers may
        have published more. Those of `losses` are there until a log is recovered.
        """
        living = sum(status.rows_unpublished for status in self.status())
        return living + sum(loss.rows_unpublished for loss in self._pool.losses)

    @property
    def restarts(self) -> int:
        """How many workers have taken another's place."""
        return self._pool.restarts

    # ---- state and end ----

    def _position(self) -> JsonState:
        incarnations = {str(worker.index): worker.incarnation for worker in self._pool.workers}
        waiting = sum(fragment.batch.agent_steps() for w in self._pool.workers for fragment in w.ready)
        return {
            "seed": self.seed,
            "incarnations": {**self._earlier_incarnations, **incarnations},
            "weights_seq_no": self.weights_seq_no,
            "filters": self._filters.state_dict(),
            "lifetime": self._pool.metrics.state_dict(),
            "waiting": waiting,
        }

    def _seek(self, position: JsonState) -> None:
        pool = self._pool
        incarnations = {str(index): int(number) for index, number in position["incarnations"].items()}
        seed, waiting, newest = (int(position[key]) for key in ("seed", "waiting", "weights_seq_no"))
        metrics = JointMetrics()
        metrics.load_state_dict(position["lifetime"])
        with self._lock:
            saved = position["filters"]
            self._filters.load_state_dict(saved, self._filters_of_a_worker() if saved else {})
            self.dropped += waiting + self._drain()
            pool.metrics, self.seed = metrics, seed
            pool.reseed(seed)
            pool.broadcasts.newest = max(pool.broadcasts.newest, newest)
            pool.filters = self._ray.put(self._filters.filters) if self._filters.filters else None
            for worker in pool.workers:
                worker.incarnation = max(worker.incarnation, incarnations.get(str(worker.index), -1))
            self._earlier_incarnations = incarnations
            pool.reopen()

    def _filters_of_a_worker(self) -> dict[str, list[MeanStdFilter]]:
        (found,) = self._called(self._pool.alive[:1], _filters_of)
        return found

    def _drain(self) -> int:
        """Wait for what is in flight, and forget it and what waits; gives its rows."""
        pool = self._pool
        while any(worker.requests for worker in pool.workers):
            pool.wait(None)
        rows = sum(fragment.batch.agent_steps() for worker in pool.workers for fragment in worker.ready)
        for worker in pool.workers:
            worker.ready.clear()
        return rows

    def _close(self) -> None:
        """Store what workers have, publish what dead ones left, and end all processes.

        Rows of fragments that nobody asked for any more are in the data set all the same.
        """
        _open_groups.discard(self)
        with self._lock:
            try:
                self._pool.close(self.fault_tolerance.close_timeout_s)
            finally:
                if self.local_worker is not None:
                    self.local_worker.close()
                self._pool.recover(self.fault_tolerance.close_timeout_s)

    def stop(self) -> None:
        """Same as `close`: the name that RLlib's users know."""
        self.close()


def _all_weights(worker: RolloutWorker) -> dict[str, Any]:
    return dict(worker.foreach_policy(lambda policy, policy_id: (policy_id, policy.get_weights())))


def _filters_of(worker: RolloutWorker) -> dict[str, list[MeanStdFilter]]:
    return worker.get_filters()


def _check_acknowledge(acknowledge: Any, output: Any) -> None:
    if acknowledge not in ("written", "published"):
        raise OptionError(f"acknowledge={excerpt(acknowledge)}: 'written' or 'published'")
    if acknowledge == "published" and output is None:
        raise OptionError(
            "acknowledge='published' without an output: nothing is published then; give output=, or leave "
            "acknowledge out"
        )


_open_groups: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()


def _close_open_groups() -> None:
    """Let workers store what they have when the interpreter exits: Ray, which goes later, would kill them."""
    for group in list(_open_groups):
        try:
            group.close()
        except Exception:  # Logged: at exit there is no caller, and other groups are to be closed.
            logger.exception("closing a WorkerGroup at exit failed")


@functools.cache
def _close_at_exit() -> None:
    """Once Ray is imported: what is registered last runs first."""
    atexit.register(_close_open_groups)
