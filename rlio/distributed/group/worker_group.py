"""`WorkerGroup`: rollout workers in separate processes, on one machine or many, as one reader.

Example::

    import ray, rlio
    from rlio.distributed import WorkerGroup

    ray.init()
    with WorkerGroup("CartPole-v1", rlio.policies.DQN, num_workers=4, output="runs/cartpole", seed=0,
                     local_worker=True) as group:
        for step in range(100):
            batch = group.sample()                    # one fragment from each worker
            group.local_worker.learn_on_batch(batch)
            group.sync_weights()                      # before their next fragment
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar, Unpack

from rlio.batch import Batch, SampleBatch, concat_samples
from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.connectors.mean_std import MeanStdFilter
from rlio.distributed.group.actor_pool import ActorPool, raise_first
from rlio.distributed.group.actors import Broadcast
from rlio.distributed.group.fault_tolerance import FaultTolerance, Loss
from rlio.distributed.group.joint import JointFilters, JointMetrics
from rlio.distributed.group.remote_worker import Fragment, WorkerStatus
from rlio.distributed.group.worker_spec import Acknowledge, WorkerKeywords, WorkerSpec, draw_seed, portable
from rlio.distributed.ray_import import require_ray
from rlio.errors import EndOfData, OptionError, RlioError, WorkerError
from rlio.policies.policy import Policy
from rlio.policies.policy_spec import Spaces
from rlio.policies.weights import GlobalVars, accepts_weights
from rlio.reader import InputReader, JsonState, Unit
from rlio.sampling.metrics import RolloutMetrics
from rlio.sampling.policy_setup import PolicySetup
from rlio.sampling.runners import WorkerPlace
from rlio.support.options import check_choice, check_count, check_number, checked_keywords
from rlio.support.states import value_in, whole_number
from rlio.support.turns import Turns
from rlio.support.words import counted
from rlio.worker import RolloutWorker

__all__ = ["WorkerGroup"]

logger: logging.Logger = logging.getLogger("rlio")
T = TypeVar("T")

_ENDED = "all workers reached the end of their inputs"

# Any in this module: environments, policies and options are what `RolloutWorker` takes.


class WorkerGroup(InputReader):
    """N rollout workers, each a Ray actor, made from one set of `RolloutWorker` arguments.

    The group is a live reader: `sample()` returns one fragment from each worker, in the order of their
    indices, ``sample(n)`` exactly n steps. All workers write one data set, each under its own writer id and
    without coordination. Each worker, and each replacement, has its own seed, so no two record the same
    episodes. The provenance in the shards holds this seed and the group's.

    The group replaces a worker that dies or hangs, as ``fault_tolerance`` allows; the others continue. It
    serves and counts the batches that arrived. A task on the lost worker's machine publishes its log at once,
    or the group does when it closes. `losses` lists requested batches that never arrived. An exception in an
    environment or policy is raised in `sample`; the worker stays.

    A row that a call returned is in the output's write-ahead log, on a disk of the worker's machine, and in
    the data set once it is published: usually within half a minute. If that disk is lost before, so is the
    row. `rows_unpublished` counts such rows, and ``acknowledge="published"`` excludes them.

    Call ``ray.init()`` first; otherwise Ray starts itself on this machine and listens to the network: see
    docs/distributed.md. Modules that workers import must be importable in their processes; functions and
    classes of a script are sent along.

    Several threads may call it: their calls take turns. `set_weights`, `interrupt` and `close` do not wait
    for their turn.

    Args:
        env: As for `RolloutWorker`: an id, or a function that makes environments; not an environment object.
        policy: As for `RolloutWorker`; not yet bound to spaces. Workers start with the same weights: the
            local worker's, or otherwise the first worker's.
        num_workers: Number of actors; their ``worker_index`` is 1 to this.
        seed: Seed of the group. None draws one from the OS, logs it and keeps it in the state.
        local_worker: Whether to make a worker 0 in this process too, without environment, input and output:
            to learn, and to hold the weights. A policy object becomes that worker's.
        acknowledge: What is guaranteed for a row when a call returns it. ``"written"``: the worker's writer
            has accepted it. ``"published"``: it is in the data set. Workers then flush their output before
            they return a batch: one shard per fragment, and one wait for the store.
        fault_tolerance: How to treat workers that die; None: the defaults.
        actor_options: For Ray's ``options()``: ``num_cpus`` (1), ``num_gpus``, ``resources``,
            ``runtime_env``, ``scheduling_strategy`` and the like.
        arguments: Other arguments of `RolloutWorker`. Outputs and inputs are paths or functions, not open
            objects; each worker reads its share of a stored input.

    Attributes:
        seed: Seed of the group.
        num_workers: Number of actors.
        local_worker: Worker 0; None if it was not requested.
        fault_tolerance: As given.

    Raises:
        OptionError: An argument is illegal, or a worker cannot be made from the arguments; or ``acknowledge``
            is "published" without an output.
        MissingExtra: Ray is not installed.
        WorkerError: A worker cannot be made for another reason.
        WorkerLost: Workers do not start.
    """

    dropped: int

    replayable = False

    @checked_keywords
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
        num_workers = check_count("num_workers", num_workers, least=1, of="workers")
        self._ray = require_ray()
        self._arguments = portable(env, policy, arguments)
        _check_acknowledge(acknowledge, self._arguments.get("output"))
        self.num_workers = num_workers
        self.seed: int = draw_seed() if seed is None else seed
        if seed is None:
            logger.info("WorkerGroup: seed %s, drawn from the OS", self.seed)
        self.fault_tolerance: FaultTolerance = (
            fault_tolerance if fault_tolerance is not None else FaultTolerance()
        )
        self.local_worker: RolloutWorker | None = None
        self._lock = threading.RLock()
        self._thread_turns = Turns(type(self).__name__, self._lock)
        self._filters = JointFilters()
        self._earlier_incarnations: dict[str, int] = {}
        spec = WorkerSpec(env, policy, self._arguments, num_workers, self.seed, acknowledge)
        self._pool = ActorPool(spec, tolerance=self.fault_tolerance, actor_options=actor_options)
        try:
            self._pool.start()
            opened = self._pool.alive[0].opened
            assert opened is not None
            self.unit: Unit = opened.unit
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

    def _describe(self) -> Iterator[str]:
        yield f"{counted(self.num_workers, 'worker')}, of which {len(self._pool.alive)} alive"
        yield f"seed={self.seed}"

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
        return RolloutWorker(
            None,
            policy,
            input=None,
            policy_setup=setup,
            seed=self.seed,
            callbacks=self._arguments.get("callbacks"),
            place=WorkerPlace(num_workers=self.num_workers),
        )

    def _begin_alike(self) -> None:
        """Give all workers the weights of one, because random initial policies differ."""
        if self.local_worker is not None:
            weights = _all_weights(self.local_worker)
        else:
            weights = self._of_one_worker(_all_weights)
        weights = {policy_id: own for policy_id, own in weights.items() if own}
        if weights:
            self._broadcast(Broadcast(weights, seq_no=0))

    def _give_up(self) -> None:
        """End everything that was started."""
        for worker in self._pool.workers:
            if worker.actor is not None:
                self._ray.kill(worker.actor)
        if self.local_worker is not None:
            self.local_worker.close()
        self._closed = True

    # ---- sampling ----

    def sample(self, n: int | None = None, *, out: SampleBatch | None = None) -> Batch:
        """Return the next batch: one fragment from each worker, joined in the order of their indices.

        Workers sample in parallel, and wait once each has a fragment; with `submit` they continue.

        Args:
            n: Exact number of units (see `unit`); the next call gets the remainder.
            out: As in `InputReader.sample`.

        Returns:
            A batch that the caller owns, copied out of Ray's object store.

        Raises:
            WorkerError: An environment or policy raised an error in its worker; the error is the cause. The
                next call returns what the other workers sampled.
            WorkerLost: A worker was lost and may not be replaced: see `FaultTolerance`.
            EndOfData: The workers' inputs are exhausted.
            OptionError: ``n`` is below 1.
        """
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
        # Joining copies several batches; a single batch lies in Ray's memory, and needs a copy.
        return concat_samples(batches) if len(batches) > 1 else batches[0].copy()

    def submit(self, max_in_flight: int = 1) -> int:
        """Request fragments from each worker and return at once; `ready` returns them.

        Args:
            max_in_flight: Most fragments of a worker that are requested or wait for `ready`. A fragment uses
                the weights at its start. With 2, a worker samples one while another is on its way.

        Returns:
            Number of fragments requested.

        Raises:
            WorkerLost: As in `sample`.
            EndOfData: The workers' inputs are exhausted, and all fragments were taken.
        """
        max_in_flight = check_count("max_in_flight", max_in_flight, least=1, of="fragments")
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
        """Return the fragments that have arrived, in order; waits for the first.

        Their arrays are read-only and in Ray's memory, not copied.

        Args:
            timeout_s: Seconds after which the list may be empty; None: wait while a fragment is requested or
                a worker starts.

        Raises:
            WorkerError: As in `sample`.
        """
        timeout_s = check_number("timeout_s", timeout_s, least=0, of="seconds", none="no limit")
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
        """Interrupt a `sample` that waits in another thread; see `InputReader`."""
        self._pool.interrupted.set()

    # ---- weights ----

    def set_weights(
        self,
        weights: Mapping[str, Any],
        global_vars: GlobalVars | Mapping[str, Any] | None = None,
        weights_seq_no: int | None = None,
    ) -> int:
        """Send new weights to all workers; each applies them after its current requests.

        The weights are put into Ray's object store once. A worker gets the newest version before its next
        request, and so does each later worker; older versions are skipped.

        Args:
            weights: As `RolloutWorker.get_weights` returns them, or those of one `Policy`.
            global_vars: For `RolloutWorker.set_global_vars`; None: the steps of all workers' batches so far.
            weights_seq_no: Their version, recorded with every step; None: one more than any before. Workers
                ignore a version that is not newer than their own. 0: forces the update, and leaves the
                version unchanged.

        Returns:
            The version. You may call this in any thread while others sample.

        Raises:
            OptionError: ``weights_seq_no`` is below 0, or ``global_vars`` is not as `GlobalVars.of` takes it.
            ClosedError: The group is closed. Workers check whether the weights fit: see `sample`.
        """
        self._check_open()
        seq_no = self._pool.broadcasts.next_seq_no() if weights_seq_no is None else weights_seq_no
        accepts_weights(0, seq_no)
        given = self._global_vars() if global_vars is None else GlobalVars.of(global_vars)
        self._broadcast(Broadcast(weights, seq_no, given))
        return seq_no

    def _global_vars(self) -> GlobalVars:
        """Return the steps of all workers, including lost ones, and the local worker's updates."""
        local = self.local_worker
        updates = {} if local is None else local.get_global_vars().num_grad_updates_per_policy
        return GlobalVars(self._pool.metrics.lifetime.env_steps, updates)

    def _broadcast(self, broadcast: Broadcast) -> None:
        weights = broadcast.weights
        several = bool(weights) and all(isinstance(own, Mapping) for own in weights.values())
        policies = frozenset(weights if several else {DEFAULT_POLICY_ID})
        self._pool.broadcasts.add(self._ray.put(broadcast), policies, seq_no=broadcast.seq_no)

    def sync_weights(self, source: Policy | RolloutWorker | None = None) -> int:
        """Send the weights of ``source`` to all workers; see `set_weights`.

        Args:
            source: A policy or worker; None: the local worker, which also receives the steps of all workers.

        Raises:
            OptionError: ``source`` is None and the group has no local worker.
        """
        if source is not None:
            return self.set_weights(source.get_weights())
        if self.local_worker is None:
            raise OptionError(
                "the group has no local worker to take weights from: call sync_weights(policy), or make the "
                "group with local_worker=True"
            )
        self.local_worker.set_global_vars(self._global_vars())
        return self.set_weights(self.local_worker.get_weights())

    @property
    def weights_seq_no(self) -> int:
        """The version of the newest weights; 0 before `set_weights`."""
        return self._pool.broadcasts.newest

    # ---- filters, metrics ----

    def sync_filters(self) -> dict[str, list[MeanStdFilter]]:
        """Add up the running statistics of all workers, and send the sum to all of them.

        Each observation counts once, however often you call this, and even if workers sample meanwhile. When
        a worker is lost, so is what it saw since the last call; its replacement starts with the sum.

        Returns:
            Copies of the joint filters, by policy id.

        Raises:
            WorkerError: A worker failed.
            StateError: Workers have different filters.
        """
        with self._lock:
            self._check_open()
            # The group counts what the buffers hold, so they are reset.
            flushed = functools.partial(RolloutWorker.get_filters, flush_after=True)
            answers = self._pool.call(self._pool.present, "apply", flushed)
            parts = [part for part in answers if not isinstance(part, WorkerError)]
            self._filters.add(parts)
            if any(self._filters.filters.values()):
                self._pool.filters = self._ray.put(self._filters.filters)
                answers += self._pool.call(self._pool.present, "adopt_filters", self._pool.filters)
            raise_first(answers)
            return self.get_filters()

    def get_filters(self) -> dict[str, list[MeanStdFilter]]:
        """Return copies of the joint filters, by policy id, as of the last `sync_filters`; {} before."""
        return {
            policy_id: [each.copy() for each in filters]
            for policy_id, filters in self._filters.filters.items()
        }

    def get_metrics(self) -> RolloutMetrics:
        """Return the metrics of the batches that arrived since the last call; see `RolloutMetrics`.

        ``lifetime`` covers all workers, including lost ones, but not work for batches that never arrived.
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
        """Call ``func(worker)`` in the process of each worker, after its earlier requests.

        Args:
            func: Sent to the workers; its results are sent back.
            local_worker: Whether to call it in this process first, with the local worker.
            timeout_s: Seconds to wait for all. A late worker yields an error, but still runs the function.
            errors: ``"raise"`` raises the first error once all are done; ``"return"`` puts each in place of
                its result.

        Returns:
            Results by worker index, without workers that were lost and not replaced.

        Raises:
            WorkerError: ``func`` raised an error, which is the cause.
            WorkerLost: A worker died meanwhile; it may be replaced.
        """
        check_choice("errors", errors, ("raise", "return"))
        if local_worker and self.local_worker is None:
            raise OptionError("local_worker=True, but the group has no local worker")
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
        """Call ``func(policy, policy_id)`` for each policy of each worker; see `foreach_worker`."""
        return self.foreach_worker(lambda worker: worker.foreach_policy(func))

    def _of_one_worker(self, func: Callable[[RolloutWorker], T]) -> T:
        answers = self._pool.call(self._pool.alive[:1], "apply", func)
        raise_first(answers)
        found: T = answers[0]
        return found

    def probe(self, timeout_s: float | None = None) -> list[WorkerStatus]:
        """Find workers that are dead or hang, replace them, and return the status of all.

        Idle workers must answer a call. Those that sample have the time limit ``request_timeout_s`` of
        `FaultTolerance`. `sample` detects deaths too.

        Args:
            timeout_s: Seconds for idle ones; None: ``probe_timeout_s``.

        Raises:
            WorkerLost: A worker was lost and may not be replaced.
            WorkerError: A worker cannot sample; or as in `sample`, for a requested batch.
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
        """Return the status of the workers as far as the group knows, without asking them."""
        return [worker.status() for worker in self._pool.workers]

    @property
    def losses(self) -> list[Loss]:
        """Workers that were lost so far. Sampling calls and `probe` update how many rows were recovered."""
        return list(self._pool.losses)

    @property
    def rows_unpublished(self) -> int:
        """Upper bound of the rows that were returned and are not known to be in the data set.

        For live workers, this is the count at their last batches; their writers may have published more
        since. Rows in `losses` count until a log is recovered.
        """
        living = sum(status.rows_unpublished for status in self.status())
        return living + sum(loss.rows_unpublished for loss in self._pool.losses)

    @property
    def restarts(self) -> int:
        """Number of workers that were replaced."""
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
        numbers = value_in(position, "incarnations", dict)
        incarnations: dict[str, int] = {
            index: value_in(numbers, index, int, of="state['position']['incarnations']") for index in numbers
        }
        seed = whole_number(position, "seed", most=None)
        waiting, newest = (whole_number(position, key) for key in ("waiting", "weights_seq_no"))
        metrics = JointMetrics()
        metrics.load_state_dict(position["lifetime"])
        with self._lock:
            saved = position["filters"]
            self._filters.load_state_dict(
                saved, self._of_one_worker(RolloutWorker.get_filters) if saved else {}
            )
            self.dropped += waiting + self._drain()
            pool.metrics, self.seed = metrics, seed
            pool.reseed(seed)
            pool.broadcasts.newest = max(pool.broadcasts.newest, newest)
            pool.filters = self._ray.put(self._filters.filters) if self._filters.filters else None
            for worker in pool.workers:
                worker.incarnation = max(worker.incarnation, incarnations.get(str(worker.index), -1))
            self._earlier_incarnations = incarnations
            pool.reopen()

    def _drain(self) -> int:
        """Wait for requests in flight, then drop all waiting fragments; returns their rows."""
        pool = self._pool
        while any(worker.requests for worker in pool.workers):
            pool.wait(None)
        rows = sum(fragment.batch.agent_steps() for worker in pool.workers for fragment in worker.ready)
        for worker in pool.workers:
            worker.ready.clear()
        return rows

    def _close(self) -> None:
        """Let workers store their rows, recover the logs of dead ones, and end all processes.

        The data set also contains rows of fragments that were never taken.
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
        """Same as `close`, under RLlib's name."""
        self.close()


def _all_weights(worker: RolloutWorker) -> dict[str, Any]:
    return dict(worker.foreach_policy(lambda policy, policy_id: (policy_id, policy.get_weights())))


def _check_acknowledge(acknowledge: Any, output: Any) -> None:
    check_choice("acknowledge", acknowledge, ("written", "published"))
    if acknowledge == "published" and output is None:
        raise OptionError(
            "acknowledge='published' without an output, so nothing can be published: pass output=, or omit "
            "acknowledge"
        )


_open_groups: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()


def _close_open_groups() -> None:
    """Close all groups when the interpreter exits, because Ray exits later and would kill the workers."""
    for group in list(_open_groups):
        try:
            group.close()
        except Exception:  # Logged, because nothing catches it at exit, and other groups must close.
            logger.exception("closing a WorkerGroup at exit failed")


@functools.cache
def _close_at_exit() -> None:
    """Register the exit handler after Ray's import: the last registered handler runs first."""
    atexit.register(_close_open_groups)
