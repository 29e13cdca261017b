"""`RolloutWorker`: a policy, the environments it acts in, what it reads and what it writes, as one reader.

Example:
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> output = "memory://worker-example"
    >>> with RolloutWorker("CartPole-v1", RandomPolicy(), output=output, seed=0) as worker:
    ...     rows = sum(len(worker.sample()) for _ in range(3))
    >>> rows, worker.writer.rows_received
    (600, 600)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from inspect import signature
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np

from rlio.batch import Batch
from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.connectors.mean_std import MeanStdFilter
from rlio.envs.context import EnvContext
from rlio.envs.make import EnvLike
from rlio.errors import DataNotFound, OptionError, excerpt
from rlio.policies.checkpoint import load_components, save_components, select_components
from rlio.policies.policy_spec import Spaces
from rlio.reader import JsonState
from rlio.readers.recording_input import RecordingInput
from rlio.resolve import IOContext, resolve_output
from rlio.sampling.callbacks import CallbacksLike, combine, overridden
from rlio.sampling.config import RolloutConfig
from rlio.sampling.metrics import Counts, RolloutMetrics
from rlio.sampling.multi_agent_envs import MultiAgentEnvLike
from rlio.sampling.offline import refuse_same_root
from rlio.sampling.policy_group import MappingFn, PoliciesToTrain, PolicyGroup
from rlio.sampling.policy_setup import PolicySetup
from rlio.sampling.runners import AnyRunner, Place, make_runner, sub_envs
from rlio.sampling.worker_input import WorkerInput
from rlio.sampling.worker_policies import WorkerPolicies
from rlio.serving.network import find_free_port, get_host, get_node_ip
from rlio.support.options import checked_keywords, expected, expected_mapping

__all__ = ["RolloutWorker"]

P = ParamSpec("P")
T = TypeVar("T")


class RolloutWorker(WorkerPolicies):
    """Gives batches of live experience, logged experience or both, and writes down what it samples.

    It puts together what works alone: an `EnvRunner` and its `SamplerInput`, readers, a writer, a
    `PolicyGroup`. What it reads from files is adapted first, as ``rollout`` says (`offline_functions`), and
    shuffled by batches if ``rollout.shuffle_buffer_size`` says so.

    Args:
        env: What `make_stepper` takes; with several policies, what `MultiAgentEnvRunner` takes; or an
            `ExternalEnv`. None for reading or learning only: policies need spaces then.
        policy: Acts and learns; bound to the environment's spaces, if it was not before. A `Policy`, a
            `PolicySpec`, a class of policies, or a ``"module:name"`` of one; or several, by id, for an
            environment with several agents.
        input: What `resolve_input` takes. ``"sampler"`` is the worker's own; it may be part of a mixture.
            None: nothing, of a worker that only learns.
        output: What `resolve_output` takes: where rows go. None keeps none.
        rollout: How to step the environments; None: the defaults.
        seed: Of the environments, the policies (if they are not yet bound) and the order of the input.
        worker_index: 0 for a local worker, 1 to ``num_workers`` for others, which share the files of an
            input.
        num_workers: Workers in all.
        log_dir: Folder of ``output="logdir"``.
        input_options: Keywords of the readers that ``input`` opens.
        output_options: Keywords of the writer that ``output`` opens.
        record: ``"live"``: only rows of the sampler are written; what is read from files is there already.
            A mixture takes whole fragments from it, which are written when they are sampled, even if rows of
            the last one are never served. ``"all"``: every batch that is served is written.
        policy_mapping_fn: Agent id and episode -> policy id, asked once an agent and episode, for an
            environment with several agents. None: the only policy acts for all, or each for the agent of its
            name.
        policies_to_train: Ids of the policies that learn, or a function of policy id and batch; None: all.
        callbacks: A `Callbacks`, a class of it, or several.
        policy_setup: How policies are made and kept; None: the defaults.
        recreated_worker: Whether the worker takes the place of one that failed: for makers of environments.

    The worker closes all of them, also those that were given as objects.

    Attributes:
        group: The policies, and what is done to all of them.
        runner: The EnvRunner, MultiAgentEnvRunner or ExternalRunner; None without an environment.
        reader: Where batches come from.
        writer: Where rows go.
        creation_args: What the worker was made with, by name.

    Raises:
        OptionError: The environment or a policy cannot be made; its spaces do not fit the policy; a value
            stands for no reader or writer; or options contradict each other.
        DataNotFound: Nothing is stored where ``input`` says.
    """

    @checked_keywords
    def __init__(
        self,
        env: EnvLike | MultiAgentEnvLike | None,
        policy: Any,
        *,
        input: Any = "sampler",
        output: Any = None,
        rollout: RolloutConfig | None = None,
        seed: int | None = None,
        worker_index: int = 0,
        num_workers: int = 0,
        log_dir: str | os.PathLike[str] | None = None,
        input_options: Mapping[str, Any] | None = None,
        output_options: Mapping[str, Any] | None = None,
        record: Literal["live", "all"] = "live",
        policy_mapping_fn: MappingFn | None = None,
        policies_to_train: PoliciesToTrain = None,
        callbacks: CallbacksLike = None,
        policy_setup: PolicySetup | None = None,
        recreated_worker: bool = False,
    ) -> None:
        self.creation_args = {name: value for name, value in locals().items() if name in _ARGUMENTS}
        if record not in ("live", "all"):
            raise OptionError(f"record={excerpt(record)}: 'live' or 'all'")
        self.rollout = expected(rollout, RolloutConfig, "rollout")
        self.callbacks = combine(callbacks)
        self.runner: AnyRunner | None = None
        self._setup = policy_setup if policy_setup is not None else PolicySetup()
        self._lock = threading.RLock()
        self._place = Place(worker_index, num_workers, recreated_worker)
        self._entropy = np.random.SeedSequence(seed).entropy
        # Whatever was opened is closed again where a later part fails.
        with ExitStack() as opened:
            given = policy if isinstance(policy, Mapping) else {DEFAULT_POLICY_ID: policy}
            policies = self._setup.make(given, seed=seed)
            opened.callback(policies.close)
            self.group = PolicyGroup(
                policies,
                policy_mapping_fn=policy_mapping_fn,
                policies_to_train=policies_to_train,
                callbacks=self.callbacks,
            )
            if env is not None:
                self.runner = self._make_runner(env, seed)
                opened.callback(self.runner.stop)
            self._inputs = self._make_inputs()
            context = IOContext(
                worker_index=worker_index,
                num_workers=num_workers,
                log_dir=None if log_dir is None else os.fspath(log_dir),
                seed=seed,
                spaces=self._policy_spaces(needed=env is None),
                made_by=self._made_by(),
                default_sampler_input=None if self.runner is None else self._inputs.sampler,
            )
            self.group.announce()
            self.writer = resolve_output(output, _with_options(context, "output_options", output_options))
            opened.callback(self.writer.close)
            self._inputs.writer = self.writer if output is not None and record == "live" else None
            self.reader = self._inputs.open(input, _with_options(context, "input_options", input_options))
            opened.callback(self.reader.close)
            if record == "all" and output is not None:
                refuse_same_root(input, context.log_dir if output == "logdir" else output)
                self.reader = RecordingInput(self.reader, self.writer)
            opened.pop_all()
        self.replayable, self.unit = self.reader.replayable, self.reader.unit

    def _make_runner(self, env: Any, seed: int | None) -> AnyRunner:
        self.group.count_steps = self._env_steps
        return make_runner(
            env, self.group, config=self.rollout, callbacks=self.callbacks, seed=seed, place=self._place
        )

    def _make_inputs(self) -> WorkerInput:
        hears = "on_sample_end" in overridden(self.callbacks)
        return WorkerInput(
            self.runner,
            config=self.rollout,
            policies=self.group.policies,
            hear=self._hear if hears else None,
        )

    def _made_by(self) -> dict[str, Any]:
        """What a data set's provenance says of this worker."""
        kinds = self.group.foreach_policy(lambda policy, policy_id: (policy_id, type(policy).__name__))
        single = self.group.is_single
        names = kinds[0][1] if single else ", ".join(f"{policy_id}: {kind}" for policy_id, kind in kinds)
        made_by: dict[str, Any] = {"policy": names}
        if self.runner is None:
            return made_by
        made_by |= {"env": self.runner.env_id, "seed": self.runner.seeds["seed"]}
        # What was preprocessed is not to be preprocessed again by whoever reads it.
        return made_by | ({"observations": "preprocessed"} if self.rollout.observation_connectors else {})

    def _hear(self, batch: Batch) -> None:
        """Tell callbacks of a batch of the sampler, or from files."""
        self.callbacks.on_sample_end(runner=self, samples=batch)

    # ---- sampling ----

    def _next(self) -> Batch:
        return self._take(None)

    def _take(self, n: int | None) -> Batch:
        # `WorkerInput` put the readers together: one steps the environments or reads files, and those around
        # it call callbacks and the writer. They cut to size, so that exactly what is served is recorded.
        batch = self.reader.sample(n)
        how = self.rollout.compress_observations
        return batch.compress(bulk=how == "bulk") if how else batch

    def sample_with_count(self) -> tuple[Batch, int]:
        """Return the next batch, and how many environment steps it has."""
        batch = self.sample()
        return batch, batch.count

    # ---- environments ----

    def _env_steps(self) -> int:
        return 0 if self.runner is None else self.runner.env_steps

    def foreach_env(self, func: Callable[[Any], T]) -> list[T]:
        """``func(env)`` for each environment of the runner, and what that gave; [] without a runner.

        Raises:
            OptionError: They live in other processes, or are one native vector environment.
        """
        return [] if self.runner is None else [func(env) for env in sub_envs(self.runner)]

    def foreach_env_with_context(self, func: Callable[[Any, EnvContext], T]) -> list[T]:
        """The same with what each environment's maker was told: ``func(env, context)``."""
        context = self._place.context(self.rollout)
        envs = [] if self.runner is None else sub_envs(self.runner)
        return [func(env, context.with_index(i)) for i, env in enumerate(envs)]

    def assert_healthy(self) -> None:
        """Raise unless the worker can sample.

        Raises:
            ClosedError: It, or its runner, is stopped.
            StateError: The last state could not be loaded.
        """
        self._check_open()
        self._check_loaded()
        if self.runner is not None:
            self.runner.assert_healthy()

    def get_metrics(self) -> RolloutMetrics:
        """What the runner has counted since the last call, and what ``input_evaluation`` found since."""
        metrics = RolloutMetrics() if self.runner is None else self.runner.get_metrics()
        if self._inputs.evaluation is not None:
            metrics.off_policy = self._inputs.evaluation.take()
        return metrics

    def get_filters(self, *, flush_after: bool = False) -> dict[str, list[MeanStdFilter]]:
        """Copies of the runner's filters, by policy id; see `EnvRunner.get_filters`."""
        return {} if self.runner is None else self.runner.get_filters(flush_after=flush_after)

    def sync_filters(self, filters: Mapping[str, Sequence[MeanStdFilter]]) -> None:
        """Make the runner's filters equal to ``filters``; see `EnvRunner.sync_filters`.

        Raises:
            OptionError: There is no runner.
            StateError: There are more or fewer of them.
        """
        if self.runner is None:
            raise OptionError("this worker has no environment, and so no filters")
        self.runner.sync_filters(filters)

    # ---- this worker, and this machine ----

    def apply(self, func: Callable[Concatenate[RolloutWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``func(worker, *args, **kwargs)``: for those who reach the worker by its methods only."""
        return func(self, *args, **kwargs)

    def get_spaces(self) -> dict[str, Spaces]:
        """Policy id -> its spaces; and, under ``"__env__"``, those of the environment."""
        spaces = self._policy_spaces()
        return spaces if self.runner is None else spaces | self.runner.get_spaces()

    def lock(self) -> None:
        """Wait until no other thread has this lock, and take it. Nothing here takes it by itself."""
        self._lock.acquire()

    def unlock(self) -> None:
        """Give back what `lock` took.

        Raises:
            RuntimeError: This thread has not taken it.
        """
        self._lock.release()

    def get_host(self) -> str:
        """The machine's host name."""
        return get_host()

    def get_node_ip(self) -> str:
        """The machine's address; see `rlio.serving.network.get_node_ip`."""
        return get_node_ip()

    def find_free_port(self) -> int:
        """A TCP port that nobody listens on now."""
        return find_free_port()

    # ---- state and end ----

    def _position(self) -> JsonState:
        return {"reader": self.reader.state_dict()}

    def _seek(self, position: JsonState) -> None:
        self.reader.load_state_dict(position["reader"])

    def get_state(
        self,
        components: Collection[str] | None = None,
        not_components: Collection[str] = (),
        *,
        trainable_only: bool = False,
    ) -> dict[str, Any]:
        """All that decides what the worker does next, as arrays and what JSON takes.

        Its components are ``policies`` (how to make them, and their states), ``policy_mapping_fn``,
        ``policies_to_train``, ``global_vars``, ``position`` (`state_dict`: of readers, and of the runner if
        it is one of them), ``metrics`` (what was counted over the lifetime) and ``connectors`` (of the
        runner: its filters). Functions and classes travel by name; see `PolicyGroup.get_state`.

        Args:
            components: Those that are asked for; None: all.
            not_components: Those to leave out.
            trainable_only: Leave out the policies that do not learn.

        Raises:
            OptionError: There is no such component.
        """
        state = self.group.get_state(trainable_only=trainable_only) | {"position": self.state_dict()}
        if self.runner is not None:
            state["metrics"] = self.runner.metrics.state_dict()
            with self._not_sampling():
                state["connectors"] = self.runner.connector_states()
        return select_components(state, components, not_components)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`, or from some of its components.

        Policies that are not here are made. Names are imported: load states only from where you would run
        code from.

        After any error here, policies and counts are as they were. If the state had a ``position``, `sample`,
        `state_dict` and `get_state` raise StateError from then on, until a position was loaded: a worker that
        was not restored does not go on as if it were fresh.

        Raises:
            StateError: It does not fit.
            OptionError: A name cannot be imported.
        """
        with self._loading() if "position" in state else nullcontext():
            self._set_state(state)

    def _set_state(self, state: Mapping[str, Any]) -> None:
        counted = "metrics" in state and self.runner is not None
        if counted:
            Counts.from_state(state["metrics"])
        with ExitStack() as undo:
            with self._not_sampling():
                undo.callback(self._tell_mapping)
                undo.callback(self.group.set_state(state))
                self._tell_mapping()
                if self.runner is not None and "connectors" in state:
                    self.runner.load_connectors(state["connectors"], undo)
            if "position" in state:
                self.load_state_dict(state["position"])
            undo.pop_all()
        if self.runner is not None and counted:
            self.runner.metrics.load_state_dict(state["metrics"])

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        components: Collection[str] | None = None,
        not_components: Collection[str] = (),
        trainable_only: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the state in ``folder``, a path or any fsspec URL: JSON, and arrays as .npz.

        Args:
            folder: What is there is replaced.
            components: As in `get_state`.
            not_components: As in `get_state`.
            trainable_only: As in `get_state`.
            storage_options: For fsspec.

        Raises:
            OptionError: There is no such component.
            PublishError: It could not be stored.
        """
        state = self.get_state(components, not_components, trainable_only=trainable_only)
        save_components(folder, state, storage_options=storage_options)

    def restore(
        self,
        folder: str | os.PathLike[str],
        *,
        components: Collection[str] | None = None,
        not_components: Collection[str] = (),
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Continue from what `save` stored, or from some components of it; see `set_state`.

        Raises:
            DataNotFound: Nothing is stored there: the worker is as it was.
            CorruptData: What is stored is damaged.
            OptionError: What is stored has no such component.
            StateError: It does not fit.
        """
        try:
            stored = load_components(folder, storage_options=storage_options)
        except DataNotFound:  # As in the first run of a program that goes on where there is something.
            raise
        except Exception as error:
            self._note_load_failure(error)
            raise
        self.set_state(select_components(stored, components, not_components))
        self.callbacks.on_checkpoint_loaded(worker=self, path=folder)

    def _close(self) -> None:
        with ExitStack() as stack:
            # Last in, first out: the reader may still write, and the writer publishes what it was given.
            stack.callback(self.group.policies.close)
            if self.runner is not None:
                stack.callback(self.runner.stop)
            stack.callback(self.writer.close)
            stack.callback(self.reader.close)

    def stop(self) -> None:
        """Same as `close`: the name that RLlib's users know."""
        self.close()


def _with_options(context: IOContext, name: str, options: Any) -> IOContext:
    return replace(context, options=dict(expected_mapping(options, name)))


_ARGUMENTS = frozenset(signature(RolloutWorker.__init__).parameters) - {"self"}
