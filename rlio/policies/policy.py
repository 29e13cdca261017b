"""`Policy`: what chooses actions, and may learn.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> class Left(Policy):
    ...     def compute_actions(self, obs, state=(), *, explore=True, inputs=None, timestep=0):
    ...         return np.zeros(len(obs), np.int64), state, {}
    >>> policy = Left()
    >>> policy.bind(Box(-1.0, 1.0, (3,)), Discrete(2))
    >>> policy.compute_actions(np.zeros((2, 3)))[0].tolist()
    [0, 0]
    >>> policy.compute_single_action(np.zeros(3))[0].item()
    0
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, SampleBatch, concat_samples
from rlio.batch.arrays import object_column
from rlio.batch.nested import map_structure, unflatten
from rlio.errors import OptionError, StateError, excerpt
from rlio.policies.weights import GlobalVars, Gradients, Weights

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.policies.policy_spec import PolicySpec

__all__ = ["Gradients", "Policy", "PolicyOutput", "PolicyState", "Stats", "Weights", "state_part"]

logger = logging.getLogger("rlio")

# Any: observations and actions are arrays, or dicts and tuples of them, as the spaces are.
#: Recurrent state: arrays of shape (N, ...), one row for each environment.
RecurrentState: TypeAlias = tuple[NDArray[Any], ...]
PolicyOutput: TypeAlias = tuple[Any, RecurrentState, dict[str, NDArray[Any]]]
#: Nested dicts and lists of arrays and of what JSON takes.
PolicyState: TypeAlias = dict[str, Any]
#: What `Policy.learn_on_batch` measured.
Stats: TypeAlias = dict[str, float]


class Policy(ABC):
    """Chooses actions for batches of observations.

    To write one, implement `compute_actions` and, as needed, `_setup`, `learn_on_batch`, `get_weights` and
    `set_weights`, `get_state` and `set_state`, `initial_state`, `postprocess_trajectory` and the hooks
    `on_episode_start`, `on_episode_end` and `on_global_var_update`.
    """

    #: Columns of the step before that `compute_actions` wants in ``inputs``: ``prev_actions`` and
    #: ``prev_rewards`` (zeros at the first step of an episode), ``t``, ``eps_id``, ``env_id``.
    input_columns: Sequence[str] = ()
    #: Version of the weights: recorded with every step, counted up by `learn_on_batch` of those that learn.
    weights_seq_no: int = 0
    #: Rows of a recurrent policy's sequences at most: longer chunks of episodes are several.
    max_seq_len: int = 20
    #: What all workers share, as of the last `on_global_var_update`.
    global_vars: GlobalVars = GlobalVars()
    #: Processes that learn as one with this; see `rlio.policies.data_parallel`.
    distributed_world_size: int = 1
    #: How it was made, where it was made from a spec.
    spec: PolicySpec | None = None

    # Class-level defaults, so that authors need not call super().__init__().
    _spaces: tuple[gym.Space[Any], gym.Space[Any]] | None = None

    # ---- spaces ----

    def bind(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        seed: int | None = None,
    ) -> None:
        """Tell the policy its spaces and seed; done by `EnvRunner` and `RolloutWorker`.

        The first call counts. Later ones only check that the spaces are the same, so that several workers
        can share a policy and none restarts its random numbers.

        Args:
            observation_space: Of one environment.
            action_space: Of one environment.
            seed: Of everything random in it; None draws one from the OS.

        Raises:
            OptionError: The spaces are others than before, or none that this policy can act in.
        """
        if self._spaces is None:
            seeds = np.random.SeedSequence(seed)
            if seed is None:
                logger.info("%s: seed %s, drawn from the OS", type(self).__name__, seeds.entropy)
            self._setup(observation_space, action_space, seeds)
            self._spaces = observation_space, action_space
            return
        for what, bound, given in zip(
            ("observation", "action"), self._spaces, (observation_space, action_space), strict=True
        ):
            if bound != given:
                raise OptionError(
                    f"the policy was made for the {what} space {excerpt(str(bound))}, but is to act in "
                    f"{excerpt(str(given))}: make another policy"
                )

    def _setup(  # noqa: B027 - optional hook
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        seeds: np.random.SeedSequence,
    ) -> None:
        """Make what depends on the spaces or the seed; called once.

        Raises:
            OptionError: The policy cannot act in these spaces.
        """

    @property
    def is_bound(self) -> bool:
        """Whether `bind` was called."""
        return self._spaces is not None

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Of one environment."""
        return self._bound()[0]

    @property
    def action_space(self) -> gym.Space[Any]:
        """Of one environment."""
        return self._bound()[1]

    @property
    def spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Observation and action space of one environment."""
        return self._bound()

    def _bound(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        if self._spaces is None:
            raise OptionError(
                f"{type(self).__name__} has no spaces yet: "
                "give the runner or worker an environment, or call bind(observation_space, action_space), "
                "such as policy.bind(*data.spaces) for a data set"
            )
        return self._spaces

    @property
    def lock(self) -> threading.RLock:
        """Held by runners while the policy acts, and by rlio's own policies while they learn or change.

        A policy of yours that acts in one thread and changes in another (``sample_async``) changes under this
        lock: in ``with self.lock``, or by the methods of `RolloutWorker`, which take it. Sample before that:
        with an empty queue, a `sample` under the lock would wait for the thread that waits for the lock.
        """
        found: threading.RLock | None = self.__dict__.get("_lock")
        return self.__dict__.setdefault("_lock", threading.RLock()) if found is None else found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    # ---- acting ----

    @abstractmethod
    def compute_actions(
        self,
        obs: Any,
        state: RecurrentState = (),
        *,
        explore: bool = True,
        inputs: SampleBatch | None = None,
        timestep: int = 0,
    ) -> PolicyOutput:
        """Choose an action for each observation.

        Args:
            obs: (N, *shape of the space), nested as the space is. The arrays belong to the caller, who
                overwrites them: copy what is kept.
            state: What the last call returned for the same environments, or `initial_state`.
            explore: Whether to try things out.
            inputs: N rows of `input_columns`; None if there are none.
            timestep: Environment steps that the runner has sampled so far, for schedules. Of several workers,
                `global_vars` has the sum, as of the last weights.

        Returns:
            Actions, (N, *shape of the space), nested as the space is; the next state; and columns to record,
            name -> (N, ...), the same ones at every call. The caller may keep all of them.
        """

    def initial_state(self, batch_size: int) -> RecurrentState:
        """The recurrent state at the start of an episode, with ``batch_size`` rows; () if there is none."""
        return ()

    @property
    def is_recurrent(self) -> bool:
        """Whether there is an `initial_state`."""
        return len(self.initial_state(1)) > 0

    def compute_single_action(
        self,
        obs: Any,
        state: RecurrentState = (),
        *,
        explore: bool = True,
        inputs: SampleBatch | None = None,
        timestep: int = 0,
    ) -> PolicyOutput:
        """Choose an action for one observation: `compute_actions` without the leading dimension.

        Args:
            obs: Of the space's shape, nested as the space is.
            state: What the last call returned; () at the start of an episode.
            explore: Whether to try things out.
            inputs: One row of `input_columns`; None if there are none.
            timestep: Environment steps that the runner has sampled so far, for schedules. Of several workers,
                `global_vars` has the sum, as of the last weights.

        Returns:
            The action, the next state, and the columns' values, all without a leading dimension.

        Raises:
            OptionError: The policy has no spaces yet.
        """
        before = tuple(np.asarray(part)[None] for part in state) or self.initial_state(1)
        actions, after, extras = self.compute_actions(
            _one_row(self.observation_space, obs), before, explore=explore, inputs=inputs, timestep=timestep
        )
        return (
            map_structure(lambda leaf: leaf[0], actions),
            tuple(part[0] for part in after),
            {name: column[0] for name, column in extras.items()},
        )

    def compute_log_likelihoods(
        self, actions: Any, obs: Any, *, explore: bool = True, timestep: int | None = None
    ) -> NDArray[np.float64]:
        """Log of the probability (density, of continuous actions) with which each action would be chosen.

        Nothing is drawn, and nothing is changed: this is what off-policy evaluation asks of a policy.

        Args:
            actions: (N, *shape of the space), nested as the space is.
            obs: N observations, as in `compute_actions`.
            explore: As in `compute_actions`; without it, all probability is on one action.
            timestep: As in `compute_actions`; None: once schedules of exploration have come to their end.

        Returns:
            (N,) float64; -inf where an action is never chosen.

        Raises:
            OptionError: This policy cannot say it.
        """
        raise OptionError(
            f"{type(self).__name__} does not say how likely actions are: give it compute_log_likelihoods, or "
            "give a function (obs, actions) -> log-probabilities in its place"
        )

    # ---- what happens around it ----

    def on_episode_start(self, env_ids: NDArray[np.int64]) -> None:  # noqa: B027 - optional hook
        """Called when episodes begin, before their first action: for exploration that lasts an episode.

        Args:
            env_ids: Environments (as in the column ``env_id``) whose episodes begin, shape (n,).
        """

    def on_episode_end(self, env_ids: NDArray[np.int64]) -> None:  # noqa: B027 - optional hook
        """Called when episodes ended, before `on_episode_start` of those that follow; see there."""

    @property
    def has_episode_hooks(self) -> bool:
        """Whether `on_episode_start` or `on_episode_end` does anything: nobody else needs to be called."""
        kind = type(self)
        return (
            kind.on_episode_start is not Policy.on_episode_start
            or kind.on_episode_end is not Policy.on_episode_end
        )

    def on_global_var_update(self, global_vars: GlobalVars) -> None:
        """Take note of what all workers share, for schedules; kept in `global_vars`.

        Called when others say it (`RolloutWorker.set_global_vars`), and before the policy learns.
        """
        self.global_vars = global_vars

    # ---- learning ----

    def postprocess_trajectory(
        self,
        batch: SampleBatch,
        other_agent_batches: Mapping[Any, tuple[str, SampleBatch]] | None = None,
        episode: Any = None,
    ) -> SampleBatch:
        """Add or change columns of one agent's rows of one episode, or of a chunk of them, after sampling.

        An override may take ``batch`` alone.

        Args:
            batch: The rows, in order; the policy may change it.
            other_agent_batches: Of the same episode, agent id -> (policy id, rows), not to be changed; None
                where there is one agent.
            episode: What the runner knows of the episode, if it is still at hand.

        Returns:
            As many rows.
        """
        return batch

    def postprocess_batch(self, batch: SampleBatch) -> SampleBatch:
        """`postprocess_trajectory` of each trajectory in ``batch``, where there is one agent.

        Policies that can do so take all trajectories at once.

        Args:
            batch: Trajectories, or chunks of them, one after the other.
        """
        if not self.postprocesses or not len(batch):
            return batch
        return concat_samples([self.postprocess_trajectory(part) for part in batch.split_by_episode()])

    @property
    def postprocesses(self) -> bool:
        """Whether `postprocess_trajectory` does anything: nobody else's rows are cut into episodes."""
        return type(self).postprocess_trajectory is not Policy.postprocess_trajectory

    def learn_on_batch(self, batch: Batch) -> Stats:
        """Improve on ``batch`` and return what was measured.

        Raises:
            OptionError: This policy does not learn.
        """
        raise OptionError(
            f"{type(self).__name__} does not learn: use a policy with learn_on_batch, such as DQN"
        )

    def compute_gradients(self, batch: Batch) -> tuple[Gradients, Stats]:
        """The gradients of the loss of ``batch``, by the names of the weights, and what was measured.

        Nothing is changed. ``stats["batch_count"]`` is the number of rows.

        Raises:
            OptionError: This policy has no gradients.
        """
        raise OptionError(f"{type(self).__name__} has no gradients: use a policy that has, such as DQN")

    def apply_gradients(self, gradients: Mapping[str, NDArray[Any]]) -> None:
        """Improve by ``gradients``, as `compute_gradients` gave them here or elsewhere.

        Raises:
            OptionError: This policy has no gradients.
            StateError: Names or shapes differ.
        """
        raise OptionError(f"{type(self).__name__} has no gradients: use a policy that has, such as DQN")

    def get_weights(self, *, inference_only: bool = False) -> Weights:
        """Copies of the weights, by name; {} if there are none.

        Args:
            inference_only: Leave out those that acting does not need; `set_weights` takes both kinds.
        """
        return {}

    def set_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Take over ``weights`` as `get_weights` gave them.

        Raises:
            StateError: Names or shapes differ.
        """
        if weights:
            raise StateError(f"{type(self).__name__} has no weights but was given {excerpt(sorted(weights))}")

    # ---- state ----

    def get_state(self) -> PolicyState:
        """All that decides what the policy does next; see `rlio.policies.checkpoint` for storing it."""
        return {
            "weights": self.get_weights(),
            "weights_seq_no": self.weights_seq_no,
            "global_vars": self.global_vars.to_json(),
        }

    def set_state(self, state: PolicyState) -> None:
        """Continue from a state of `get_state`.

        Raises:
            StateError: It is not of such a policy.
        """
        self.set_weights(state_part(state, "weights", dict))
        self.weights_seq_no = state_part(state, "weights_seq_no", int)
        if "global_vars" in state:  # earlier states have none
            self.on_global_var_update(GlobalVars.from_json(state_part(state, "global_vars", dict)))

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        components: Collection[str] | None = None,
        not_components: Collection[str] = (),
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the state in ``folder``, a path or any fsspec URL; see `save_state`.

        Args:
            folder: What is there is replaced.
            components: Names of the state's parts to store, such as ``"weights"``; None: all.
            not_components: Parts to leave out.
            storage_options: For fsspec.

        Raises:
            OptionError: The state has no such part.
            PublishError: It could not be stored.
        """
        from rlio.policies.checkpoint import save_state, select_components

        state = select_components(self.get_state(), components, not_components)
        save_state(folder, state, storage_options=storage_options)

    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        components: Collection[str] | None = None,
        not_components: Collection[str] = (),
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Continue from what `save` stored; the policy must be bound, and of the same make.

        Parts that are not stored, or not asked for, stay as they are.

        Raises:
            DataNotFound: Nothing is stored there.
            OptionError: What is stored has no such part.
            StateError: It is the state of another kind of policy, or of something else.
        """
        from rlio.policies.checkpoint import load_state, select_components

        self._bound()
        stored = load_state(folder, storage_options=storage_options)
        parts, own = select_components(stored, components, not_components), self.get_state()
        # Without this, a worker's or a learner's checkpoint would load as one without any part: in silence.
        if unknown := parts.keys() - own.keys():
            raise StateError(
                f"this is no state of a {type(self).__name__}: it has {excerpt(sorted(unknown))}, which are "
                f"none of {excerpt(sorted(own))}. Give a folder that Policy.save or "
                "export_policy_checkpoint of a worker stored, or name the components to load",
                uri=os.fspath(folder),
            )
        self.set_state(own | parts)

    def export_model(
        self, path: str | os.PathLike[str], *, format: Literal["npz", "torchscript"] = "npz"
    ) -> None:
        """Write the weights to a file for use elsewhere.

        Args:
            path: A local file, which is replaced.
            format: ``"npz"``: the arrays by name, for `numpy.load` and `import_model`.

        Raises:
            OptionError: The policy cannot be written in this format, or it has no weights.
        """
        from rlio.policies.checkpoint import write_arrays

        if format != "npz":
            raise OptionError(f"format={excerpt(format)}: {type(self).__name__} is exported as 'npz'")
        weights = self.get_weights()
        if not weights:
            raise OptionError(f"{type(self).__name__} has no weights to export")
        write_arrays(path, weights)

    def import_model(self, path: str | os.PathLike[str]) -> None:
        """Take over the weights in a file of `export_model` in the format ``"npz"``.

        Raises:
            DataNotFound: There is no such file.
            CorruptData: It is none of these.
            StateError: Names or shapes differ.
        """
        from rlio.policies.checkpoint import read_arrays

        self.set_weights(read_arrays(path))


def state_part(state: PolicyState, key: str, kind: type) -> Any:
    """``state[key]``, checked to be a ``kind``."""
    value = state.get(key)
    if not isinstance(value, kind):
        raise StateError(f"the policy's state needs {key!r} ({kind.__name__}), but it has {excerpt(value)}")
    return value


def _one_row(space: gym.Space[Any], value: Any) -> Any:
    """``value`` of ``space`` as a batch of one."""
    from rlio.envs.leaves import leaf_of, leaves_of

    specs = leaves_of(space)
    rows = [
        object_column([part]) if leaf.is_object else np.asarray(part, leaf.dtype)[None]
        for leaf, part in ((leaf, leaf_of(value, leaf.path)) for leaf in specs)
    ]
    return rows[0] if specs[0].path == () else unflatten([leaf.path for leaf in specs], rows)
