"""`RolloutWorker`: policies, their environments, the input and the output, combined into one reader.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from inspect import signature
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np

from rlio.batch import Batch
from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.connectors.mean_std import MeanStdFilter
from rlio.envs.context import EnvContext
from rlio.errors import DataNotFound, OptionError, StateError, excerpt
from rlio.policies.checkpoint import load_components, save_components, select_components
from rlio.policies.policy import Policy, PolicyState
from rlio.policies.policy_spec import Spaces, as_specs
from rlio.policies.weights import GlobalVars
from rlio.reader import InputReader, JsonState, Unit
from rlio.readers.recording_input import RecordingInput
from rlio.resolve import IOContext, resolve_output
from rlio.sampling.callbacks import Callbacks, CallbacksLike, combine, overridden
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.external_runner import ExternalRunner
from rlio.sampling.make_env import EnvLike
from rlio.sampling.metrics import Counts, RolloutMetrics
from rlio.sampling.multi_agent_envs import MultiAgentEnvLike
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner
from rlio.sampling.offline import refuse_same_root
from rlio.sampling.policy_group import MappingFn, PoliciesToTrain, PolicyGroup
from rlio.sampling.policy_setup import PolicySetup
from rlio.sampling.runners import AnyRunner, WorkerPlace, make_runner, sub_envs
from rlio.sampling.worker_input import WorkerInput
from rlio.serving.network import find_free_port, get_host, get_node_ip
from rlio.support.options import check_choice, checked_keywords, expected, expected_mapping
from rlio.support.states import fitting
from rlio.writer import OutputWriter

__all__ = ["RolloutWorker"]

P = ParamSpec("P")
T = TypeVar("T")

# In the seed tree, runners use (worker, restart, 0 to 2).
_SGD = 1 << 20


class RolloutWorker(InputReader):
    """Gives batches of live experience, logged experience or both, and records what it samples.

    It combines parts that also work alone: an `EnvRunner` and its `SamplerInput`, readers, a writer, a
    `PolicyGroup`. Batches from files are first adapted according to ``rollout`` (`offline_functions`), and
    shuffled by batches if ``rollout.shuffle_buffer_size`` is set.

    Args:
        env: A value that `make_stepper` takes; with several policies, one that `MultiAgentEnvRunner` takes;
            or an `ExternalEnv`. None for reading or learning only: policies then need spaces.
        policy: Acts and learns. It is bound to the environment's spaces unless it is bound already. A
            `Policy`, a `PolicySpec`, a policy class, or a ``"module:name"`` of one; or several, by id, for an
            environment with several agents.
        input: A value that `resolve_input` takes. ``"sampler"`` is the worker's own sampler; it may be part
            of a mixture. None: no input, for a worker that only learns.
        output: A value that `resolve_output` takes: where rows go. None keeps no rows.
        rollout: How to step the environments; None: the defaults.
        seed: Seed of the environments, of policies that are not yet bound, and of the order of the input,
            unless other workers read shares of it: see `WorkerPlace.order_seed`.
        input_options: Keywords of the readers that ``input`` opens, as for `rlio.read`. Pass a reader as
            ``input`` instead to see its options in its signature.
        output_options: Keywords of the writer that ``output`` opens: those of `rlio.ParquetWriter` for a
            path. A writer may also be passed as ``output``.
        record: ``"live"``: only rows of the sampler are written, because rows from files are stored already.
            A mixture takes whole fragments from the sampler. They are written when they are sampled, even if
            rows of the last one are never served. ``"all"``: every served batch is written; a data set takes
            an episode once, so read stored inputs with ``epochs=1``.
        callbacks: A `Callbacks`, a class of it, or several.
        policy_setup: How policies are made and kept, which agents they act for (``policy_mapping_fn``) and
            which of them learn (``policies_to_train``); None: the defaults.
        place: The worker's position among all workers, and its folder for logs; None: the only worker.

    The worker closes all its parts, also those that were passed as objects.

    Several threads may call a worker. Calls that sample, and those that read or load a state, take turns;
    calls that change a policy wait until it has acted (`rlio.Policy.lock`). `interrupt` and `close` do not
    wait for their turn: they end a call that samples.

    Attributes:
        group: The policies, and operations on all of them.
        runner: The EnvRunner, MultiAgentEnvRunner or ExternalRunner; None without an environment.
        reader: The source of batches.
        writer: The sink of rows.
        creation_args: The arguments that the worker was made with, by name.

    Raises:
        OptionError: The environment or a policy cannot be made; its spaces do not fit the policy; a value
            describes no reader or writer; or options contradict each other.
        DataNotFound: Nothing is stored at ``input``.
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
        input_options: Mapping[str, Any] | None = None,
        output_options: Mapping[str, Any] | None = None,
        record: Literal["live", "all"] = "live",
        callbacks: CallbacksLike = None,
        policy_setup: PolicySetup | None = None,
        place: WorkerPlace | None = None,
    ) -> None:
        self.creation_args: dict[str, Any] = {
            name: value for name, value in locals().items() if name in _ARGUMENTS
        }
        check_choice("record", record, ("live", "all"))
        self.rollout: RolloutConfig = expected(rollout, RolloutConfig, "rollout")
        self.callbacks: Callbacks = combine(callbacks)
        self.runner: AnyRunner | None = None
        self._setup = expected(policy_setup, PolicySetup, "policy_setup")
        self._lock = threading.RLock()
        self._place = expected(place, WorkerPlace, "place")
        log_dir = self._place.log_dir
        self._entropy = np.random.SeedSequence(seed).entropy
        # Closes what is already open if a later part fails.
        with ExitStack() as opened:
            given = policy if isinstance(policy, Mapping) else {DEFAULT_POLICY_ID: policy}
            self.group: PolicyGroup = self._setup.group(given, seed=seed, callbacks=self.callbacks)
            opened.callback(self.group.policies.close)
            if env is not None:
                self.group.count_steps = self._env_steps
                self.runner = make_runner(
                    env,
                    self.group,
                    config=self.rollout,
                    callbacks=self.callbacks,
                    seed=seed,
                    place=self._place,
                )
                opened.callback(self.runner.stop)
            hear = self._hear if "on_sample_end" in overridden(self.callbacks) else None
            self._inputs = WorkerInput(
                self.runner, config=self.rollout, policies=self.group.policies, hear=hear
            )
            context = IOContext(
                worker_index=self._place.worker_index,
                num_workers=self._place.num_workers,
                log_dir=None if log_dir is None else os.fspath(log_dir),
                seed=seed,
                order_seed=self._place.order_seed_of(seed),
                spaces=self._policy_spaces(needed=env is None),
                made_by=self._made_by(),
                default_sampler_input=None if self.runner is None else self._inputs.sampler,
            )
            self.group.announce()
            self.writer: OutputWriter = resolve_output(
                output, _with_options(context, "output_options", output_options)
            )
            opened.callback(self.writer.close)
            self._inputs.writer = self.writer if output is not None and record == "live" else None
            self.reader: InputReader = self._inputs.open(
                input, _with_options(context, "input_options", input_options)
            )
            opened.callback(self.reader.close)
            if record == "all" and output is not None:
                refuse_same_root(input, context.log_dir if output == "logdir" else output)
                self.reader = RecordingInput(self.reader, self.writer)
            opened.pop_all()
        self.replayable: bool = self.reader.replayable
        self.unit: Unit = self.reader.unit

    def _describe(self) -> Iterator[str]:
        yield repr(None if self.runner is None else self.runner.env_id)
        yield f"policies={excerpt(list(self.group.policies), 60)}"
        yield f"reader={type(self.reader).__name__}"
        yield f"writer={self.writer!r}"

    def _made_by(self) -> dict[str, Any]:
        """The description of this worker for a data set's provenance."""
        kinds = self.group.foreach_policy(lambda policy, policy_id: (policy_id, type(policy).__name__))
        names = kinds[0][1] if self.group.is_single else ", ".join(f"{name}: {kind}" for name, kind in kinds)
        made_by: dict[str, Any] = {"policy": names}
        if self.runner is None:
            return made_by
        made_by |= {"env": self.runner.env_id, "seed": self.runner.seeds["seed"]}
        # Readers must not preprocess such observations again.
        return made_by | ({"observations": "preprocessed"} if self.rollout.observation_connectors else {})

    def _hear(self, batch: Batch) -> None:
        """Pass a batch, of the sampler or from files, to the callbacks."""
        self.callbacks.on_sample_end(runner=self, samples=batch)

    # ---- sampling ----

    def _next(self) -> Batch:
        return self._take(None)

    def _take(self, n: int | None) -> Batch:
        # `WorkerInput` built the chain of readers: the innermost steps the environments or reads files, the
        # outer ones call callbacks and the writer. They cut to size, so exactly the served rows are recorded.
        batch = self.reader.sample(n)
        how = self.rollout.compress_observations
        return batch.compress(bulk=how == "bulk") if how else batch

    def sample_with_count(self) -> tuple[Batch, int]:
        """Return the next batch, and its number of environment steps."""
        batch = self.sample()
        return batch, batch.count

    # ---- policies ----

    @property
    def policy(self) -> Policy:
        """The policy ``default_policy``.

        Raises:
            OptionError: The policies have other ids.
        """
        return self.group.get()

    def get_policy(self, policy_id: str = DEFAULT_POLICY_ID) -> Policy | None:
        """The policy ``policy_id``; None if there is none."""
        return self.group.policies.get(policy_id)

    def add_policy(
        self,
        policy_id: str,
        policy: Any,
        *,
        state: PolicyState | None = None,
        policy_mapping_fn: MappingFn | None = None,
        policies_to_train: PoliciesToTrain = None,
    ) -> Policy:
        """Add a policy, and return it.

        Args:
            policy_id: A new id.
            policy: As in the worker's arguments. Without spaces, it takes those of the other policies, if
                they agree.
            state: A `Policy.get_state` result.
            policy_mapping_fn: Replaces the current mapping; None keeps it.
            policies_to_train: Replaces the current choice; None keeps it.

        Raises:
            OptionError: The id exists already, or the policy cannot be made.
            StateError: ``state`` does not fit the policy.
        """
        (given,) = as_specs({policy_id: policy}).values()
        made = self._setup.complete(policy_id, given)
        added = self.group.add(policy_id, made, spaces=self._common_spaces(), state=state)
        self._remap(policy_mapping_fn, policies_to_train)
        return added

    def remove_policy(
        self,
        policy_id: str = DEFAULT_POLICY_ID,
        *,
        policy_mapping_fn: MappingFn | None = None,
        policies_to_train: PoliciesToTrain = None,
    ) -> None:
        """Remove a policy and all records of its id.

        Args:
            policy_id: Id of the policy.
            policy_mapping_fn: As in `add_policy`.
            policies_to_train: As in `add_policy`.

        Raises:
            OptionError: The id is unknown, or the policy is the last one or the only one that acts.
        """
        if policy_id == DEFAULT_POLICY_ID and isinstance(self.runner, EnvRunner | ExternalRunner):
            raise OptionError(f"{policy_id!r} acts in the worker's environment and cannot be removed")
        with self._not_sampling():
            self.group.remove(policy_id)
        self._remap(policy_mapping_fn, policies_to_train)

    def _remap(self, policy_mapping_fn: MappingFn | None, policies_to_train: PoliciesToTrain) -> None:
        if policy_mapping_fn is not None:
            self.set_policy_mapping_fn(policy_mapping_fn)
        if policies_to_train is not None:
            self.set_is_policy_to_train(policies_to_train)

    def _common_spaces(self) -> Spaces | None:
        """Spaces for a new policy that has none: those of the other policies, if they agree."""
        if isinstance(self.runner, EnvRunner | ExternalRunner):
            return self.runner.observation_space, self.runner.action_space
        found = list(self._policy_spaces().values())
        return found[0] if found and all(spaces == found[0] for spaces in found) else None

    def set_policy_mapping_fn(self, policy_mapping_fn: MappingFn | None) -> None:
        """Change which policies act for which agents in new episodes; None uses the worker's default.

        Raises:
            OptionError: ``policy_mapping_fn`` is not a function, or there is only one agent.
        """
        if policy_mapping_fn is not None and isinstance(self.runner, EnvRunner | ExternalRunner):
            raise OptionError(
                "policy_mapping_fn assigns policies to agents, but the environment has only one agent"
            )
        with self._not_sampling():
            self.group.set_policy_mapping_fn(policy_mapping_fn)
            self._tell_mapping()

    def _tell_mapping(self) -> None:
        if isinstance(self.runner, MultiAgentEnvRunner):
            self.runner.set_policy_mapping_fn(self.group.policy_mapping_fn)

    def set_is_policy_to_train(self, is_policy_to_train: PoliciesToTrain) -> None:
        """See `PolicyGroup.set_policies_to_train`."""
        self.group.set_policies_to_train(is_policy_to_train)

    def get_policies_to_train(self, batch: Batch | None = None) -> set[str]:
        """See `PolicyGroup.get_policies_to_train`."""
        return self.group.get_policies_to_train(batch)

    def for_policy(self, func: Callable[..., T], policy_id: str = DEFAULT_POLICY_ID, **kwargs: Any) -> T:
        """See `PolicyGroup.for_policy`."""
        return self.group.for_policy(func, policy_id, **kwargs)

    def foreach_policy(self, func: Callable[..., T], **kwargs: Any) -> list[T]:
        """See `PolicyGroup.foreach_policy`."""
        return self.group.foreach_policy(func, **kwargs)

    def foreach_policy_to_train(self, func: Callable[..., T], **kwargs: Any) -> list[T]:
        """See `PolicyGroup.foreach_policy_to_train`."""
        return self.group.foreach_policy_to_train(func, **kwargs)

    def _not_sampling(self) -> AbstractContextManager[object]:
        """Keep other threads from sampling, while the acting policies change or environments are called."""
        ahead = self._inputs.ahead
        # A call of `sample` may wait for the sampler that runs ahead, and its callbacks may change policies.
        return self._turns_of_threads.held() if ahead is None else ahead.lock

    def _policy_spaces(self, *, needed: bool = False) -> dict[str, Spaces]:
        """Spaces by policy id. Skips unbound policies unless ``needed``, which makes them raise."""
        return {
            policy_id: (policy.observation_space, policy.action_space)
            for policy_id, policy in self.group.policies.items()
            if policy.is_bound or needed
        }

    # ---- learning ----

    def learn_on_batch(self, batch: Batch) -> dict[str, Any]:
        """Make the policies learn on ``batch``; see `PolicyGroup.learn_on_batch`."""
        return self.group.learn_on_batch(batch)

    @checked_keywords
    def sample_and_learn(
        self,
        expected_batch_size: int | None = None,
        num_sgd_iter: int = 1,
        sgd_minibatch_size: int = 0,
        standardize_fields: Collection[str] = (),
    ) -> tuple[dict[str, Any], int]:
        """Sample a batch, and make the policies learn on it in shuffled parts.

        Args:
            expected_batch_size: Exact number of environment steps; None uses the input's own size.
            num_sgd_iter: Passes over the batch.
            sgd_minibatch_size: Rows in a part; 0 uses the whole batch.
            standardize_fields: Columns to scale to mean 0 and standard deviation 1 first.

        Returns:
            The learning results (see `PolicyGroup.do_minibatch_sgd`), and the number of environment steps.
        """
        batch = self.sample(expected_batch_size)
        updates = sum(self.group.num_grad_updates.values())
        # A new order each time; after a restore, the orders continue as without it.
        order = np.random.SeedSequence(self._entropy, spawn_key=(self._place.worker_index, _SGD, updates))
        stats = self.group.do_minibatch_sgd(
            batch,
            seed=np.random.default_rng(order),
            num_sgd_iter=num_sgd_iter,
            sgd_minibatch_size=sgd_minibatch_size,
            standardize_fields=standardize_fields,
        )
        return stats, batch.count

    def compute_gradients(self, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return gradients and learning results; see `PolicyGroup.compute_gradients`."""
        return self.group.compute_gradients(batch)

    def apply_gradients(self, gradients: Mapping[str, Any]) -> None:
        """Update the policies with gradients; see `PolicyGroup.apply_gradients`."""
        self.group.apply_gradients(gradients)

    def get_weights(
        self, policies: Collection[str] | None = None, inference_only: bool = False
    ) -> dict[str, Any]:
        """Copies of weights, by default of the policies that learn; see `PolicyGroup.get_weights`."""
        return self.group.get_weights(policies, inference_only=inference_only)

    def set_weights(
        self,
        weights: Mapping[str, Any],
        global_vars: GlobalVars | Mapping[str, Any] | None = None,
        weights_seq_no: int | None = None,
    ) -> None:
        """Replace the policies' weights.

        Args:
            weights: A `get_weights` result; that of a worker with more policies too, see
                `PolicyGroup.set_weights`.
            global_vars: See `set_global_vars`.
            weights_seq_no: Version of the weights, recorded with every step from now on. A policy with this
                version or a newer one keeps its weights. 0 and None always set the weights and keep the
                version.
        """
        told = None if global_vars is None else GlobalVars.of(global_vars)
        self.group.set_weights(weights, weights_seq_no)
        if told is not None:
            self.group.set_global_vars(told)

    def get_global_vars(self) -> GlobalVars:
        """Variables shared by all workers; ``timestep`` is at least the number of steps sampled here."""
        return self.group.get_global_vars()

    def set_global_vars(
        self, global_vars: GlobalVars | Mapping[str, Any], policy_ids: Collection[str] | None = None
    ) -> None:
        """Set variables from a `GlobalVars` or a dict of its fields, such as ``{"timestep": 42}``.

        See `PolicyGroup.set_global_vars`.
        """
        self.group.set_global_vars(global_vars, policy_ids)

    def export_policy_model(
        self,
        path: str | os.PathLike[str],
        policy_id: str = DEFAULT_POLICY_ID,
        *,
        format: Literal["npz", "torchscript"] = "npz",
    ) -> None:
        """Write a policy's weights to a file; see `Policy.export_model`."""
        self.group.for_policy(lambda policy: policy.export_model(path, format=format), policy_id)

    def import_policy_model(self, path: str | os.PathLike[str], policy_id: str = DEFAULT_POLICY_ID) -> None:
        """Load weights from a file of `export_policy_model`; see `Policy.import_model`."""
        self.group.for_policy(lambda policy: policy.import_model(path), policy_id)

    def export_policy_checkpoint(
        self, folder: str | os.PathLike[str], policy_id: str = DEFAULT_POLICY_ID
    ) -> None:
        """Store a policy's state in a folder, for `Policy.load`; see `Policy.save`."""
        self.group.for_policy(lambda policy: policy.save(folder), policy_id)

    def setup_torch_data_parallel(
        self, url: str, world_rank: int, world_size: int, backend: str = "gloo"
    ) -> None:
        """Make the policies that learn do so together with those of other workers' processes.

        See `rlio.policies.data_parallel.setup_torch_data_parallel`.
        """
        from rlio.policies.data_parallel import setup_torch_data_parallel

        chosen = self.group.foreach_policy_to_train(lambda policy, _: policy)
        setup_torch_data_parallel(chosen, url, world_rank, world_size, backend)

    # ---- environments ----

    def _env_steps(self) -> int:
        return 0 if self.runner is None else self.runner.env_steps

    def foreach_env(self, func: Callable[[Any], T]) -> list[T]:
        """Call ``func(env)`` for each environment of the runner. Returns the results; [] without a runner.

        Raises:
            OptionError: The environments live in other processes, or are one native vector environment.
        """
        with self._not_sampling():
            return [] if self.runner is None else [func(env) for env in sub_envs(self.runner)]

    def foreach_env_with_context(self, func: Callable[[Any, EnvContext], T]) -> list[T]:
        """Like `foreach_env`, with the context given to each environment's maker: ``func(env, context)``."""
        context = self._place.context(self.rollout)
        with self._not_sampling():
            envs = [] if self.runner is None else sub_envs(self.runner)
            return [func(env, context.with_index(i)) for i, env in enumerate(envs)]

    def assert_healthy(self) -> None:
        """Raise unless the worker can sample.

        Raises:
            ClosedError: The worker or its runner is stopped.
            StateError: The last state could not be loaded.
        """
        self._check_open()
        self._check_loaded()
        if self.runner is not None:
            self.runner.assert_healthy()

    def get_metrics(self) -> RolloutMetrics:
        """The counts of the runner and of ``input_evaluation`` since the last call."""
        metrics = RolloutMetrics() if self.runner is None else self.runner.get_metrics()
        if self._inputs.evaluation is not None:
            metrics.off_policy = self._inputs.evaluation.take()
        return metrics

    def get_filters(self, flush_after: bool = False) -> dict[str, list[MeanStdFilter]]:
        """Copies of the runner's filters, by policy id; see `EnvRunner.get_filters`."""
        return {} if self.runner is None else self.runner.get_filters(flush_after=flush_after)

    def sync_filters(self, filters: Mapping[str, Sequence[MeanStdFilter]]) -> None:
        """Make the runner's filters equal to ``filters``; see `EnvRunner.sync_filters`.

        Raises:
            OptionError: The worker has no runner.
            StateError: The number of filters differs.
        """
        if self.runner is None:
            raise OptionError("this worker has no environment, and therefore no filters")
        self.runner.sync_filters(filters)

    # ---- this worker, and this machine ----

    def apply(self, func: Callable[Concatenate[RolloutWorker, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``func(worker, *args, **kwargs)``: for callers that can only call methods of the worker."""
        return func(self, *args, **kwargs)

    def get_spaces(self) -> dict[str, Spaces]:
        """Policy id -> its spaces; and, under ``"__env__"``, those of the environment."""
        spaces = self._policy_spaces()
        return spaces if self.runner is None else spaces | self.runner.get_spaces()

    def lock(self) -> None:
        """Acquire a lock for the caller's own use; the worker itself never acquires it."""
        self._lock.acquire()

    def unlock(self) -> None:
        """Release the lock that `lock` acquired.

        Raises:
            RuntimeError: This thread does not hold the lock.
        """
        self._lock.release()

    def get_host(self) -> str:
        """The machine's host name."""
        return get_host()

    def get_node_ip(self) -> str:
        """The machine's address; see `rlio.serving.network.get_node_ip`."""
        return get_node_ip()

    def find_free_port(self) -> int:
        """A TCP port that is free now."""
        return find_free_port()

    # ---- state and end ----

    def _position(self) -> JsonState:
        return {"reader": self.reader.state_dict()}

    def _seek(self, position: JsonState) -> None:
        self.reader.load_state_dict(position["reader"])

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        not_components: str | Collection[str] | None = None,
        *,
        trainable_only: bool = False,
    ) -> dict[str, Any]:
        """The complete state of the worker, as arrays and JSON values.

        Its components are ``policies`` (how to make them, and their states), ``policy_mapping_fn``,
        ``policies_to_train``, ``global_vars``, ``position`` (`state_dict`: of readers, and of the runner if
        it is one of them), ``metrics`` (counts over the lifetime) and ``connectors`` (of the runner: its
        filters). Functions and classes are stored by name; see `PolicyGroup.get_state`.

        Args:
            components: The component or components to return; None: all.
            not_components: The component or components to leave out; None: none.
            trainable_only: Leave out the policies that do not learn.

        Raises:
            OptionError: A component does not exist.
            StateError: A policy that was added cannot be made from the state: it has no importable class, or
                its arguments cannot be stored.
        """
        with self._turns_of_threads.held():
            state = self.group.get_state(trainable_only=trainable_only) | {"position": self.state_dict()}
            if self.runner is not None:
                state["metrics"] = self.runner.metrics.state_dict()
                with self._not_sampling():
                    state["connectors"] = self.runner.connector_states()
        state = select_components(state, components, not_components)
        self.group.check_remade(state.get("policies", ()))
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`, or from some of its components.

        Makes policies that the worker does not have. Names are imported: load a state only from a source
        whose code you would run.

        After any error here, policies and counts are unchanged. If the state had a ``position``, `sample`,
        `state_dict` and `get_state` raise StateError until a position is loaded, because a worker that was
        not restored must not continue as if it were fresh.

        Raises:
            StateError: The state does not fit.
            OptionError: A name cannot be imported.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"the state is {excerpt(state)}: expected the dict that get_state() returned")
        loading = self._loading() if "position" in state else nullcontext()
        with self._turns_of_threads.held(), loading, fitting("the worker's state"):
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
                try:
                    self.load_state_dict(state["position"])
                except StateError as error:
                    raise StateError(
                        f"{error}; a worker with another input or output continues without the position: "
                        "make it again, and call restore(folder, not_components='position')"
                    ) from error
            undo.pop_all()
        if self.runner is not None and counted:
            self.runner.metrics.load_state_dict(state["metrics"])

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        components: str | Collection[str] | None = None,
        not_components: str | Collection[str] | None = None,
        trainable_only: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the state in ``folder``, a path or any fsspec URL: JSON, and arrays as .npz.

        Args:
            folder: Its contents are replaced.
            components: As in `get_state`.
            not_components: As in `get_state`.
            trainable_only: As in `get_state`.
            storage_options: For fsspec.

        Raises:
            OptionError: A component does not exist.
            StateError: As in `get_state`.
            PublishError: The state could not be stored.
        """
        state = self.get_state(components, not_components, trainable_only=trainable_only)
        save_components(folder, state, storage_options=storage_options)

    def restore(
        self,
        folder: str | os.PathLike[str],
        *,
        components: str | Collection[str] | None = None,
        not_components: str | Collection[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Continue from what `save` stored, or from some components of it; see `set_state`.

        Raises:
            DataNotFound: Nothing is stored there; the worker is unchanged.
            CorruptData: The stored state is damaged.
            OptionError: The stored state has no such component.
            StateError: The stored state does not fit.
        """
        try:
            stored = load_components(folder, storage_options=storage_options)
        except DataNotFound:  # Normal in the first run of a program that resumes if it can.
            raise
        except Exception as error:
            self._note_load_failure(error)
            raise
        self.set_state(select_components(stored, components, not_components))
        self.callbacks.on_checkpoint_loaded(worker=self, path=folder)

    def interrupt(self) -> None:
        """End a `sample` of another thread, after the running step of the environments; see `InputReader`."""
        self.reader.interrupt()
        if self.runner is not None:  # The reader of logged experience beside it does not know it.
            self.runner.interrupt()

    def _close(self) -> None:
        with ExitStack() as stack:
            # Last in, first out: the reader may still write, and then the writer publishes its rows.
            stack.callback(self.group.policies.close)
            if self.runner is not None:
                stack.callback(self.runner.stop)
            stack.callback(self.writer.close)
            stack.callback(self.reader.close)

    def stop(self) -> None:
        """Same as `close`; RLlib users know this name."""
        self.close()


def _with_options(context: IOContext, name: str, options: Any) -> IOContext:
    return replace(context, options=dict(expected_mapping(options, name)))


_ARGUMENTS = frozenset(signature(RolloutWorker.__init__).parameters) - {"self"}
