"""`Policy`: chooses actions, and may learn.

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
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, SampleBatch, concat_samples
from rlio.batch.arrays import object_column
from rlio.batch.nested import map_structure, unflatten
from rlio.errors import OptionError, StateError, excerpt
from rlio.policies.weights import GlobalVars, Gradients, Weights
from rlio.support.states import fitting, value_in, whole_number

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.policies.policy_spec import PolicySpec

__all__ = ["Gradients", "Policy", "PolicyOutput", "PolicyState", "Stats", "Weights", "state_part"]

#: Name of a state in messages.
POLICY_STATE: Final = "the policy's state"

logger: logging.Logger = logging.getLogger("rlio")

# Any: observations and actions are arrays, or dicts and tuples of arrays, like their spaces.
#: Recurrent state: arrays of shape (N, ...), one row for each environment.
RecurrentState: TypeAlias = tuple[NDArray[Any], ...]
PolicyOutput: TypeAlias = tuple[Any, RecurrentState, dict[str, NDArray[Any]]]
#: Nested dicts and lists of arrays and JSON values.
PolicyState: TypeAlias = dict[str, Any]
#: The measurements of `Policy.learn_on_batch`.
Stats: TypeAlias = dict[str, float]


class Policy(ABC):
    """Chooses actions for batches of observations.

    To write a policy, implement `compute_actions`. As needed, implement `_setup`, `learn_on_batch`,
    `get_weights` and `set_weights`, `get_state` and `set_state`, `initial_state`, `postprocess_trajectory`
    and the hooks `on_episode_start`, `on_episode_end` and `on_global_var_update`.
    """

    #: Columns of the previous step that `compute_actions` needs in ``inputs``: ``prev_actions`` and
    #: ``prev_rewards`` (zeros at the first step of an episode), ``t``, ``eps_id``, ``env_id``.
    input_columns: Sequence[str] = ()
    #: Version of the weights: recorded with every step; `learn_on_batch` of learning policies increments it.
    weights_seq_no: int = 0
    #: Maximum rows of a recurrent policy's sequences: longer chunks of episodes are divided.
    max_seq_len: int = 20
    #: Values that all workers share, from the last `on_global_var_update`.
    global_vars: GlobalVars = GlobalVars()
    #: Number of processes that learn together with this one; see `rlio.policies.data_parallel`.
    distributed_world_size: int = 1
    #: The spec that it was made from, if any.
    spec: PolicySpec | None = None

    # Class-level defaults, so that authors need not call super().__init__().
    _spaces: tuple[gym.Space[Any], gym.Space[Any]] | None = None
    _made_with: tuple[tuple[Any, ...], Mapping[str, Any]]

    if not TYPE_CHECKING:  # Type checkers look at the subclass's __init__.

        def __new__(cls, *args: Any, **keywords: Any) -> Self:
            """Note the arguments: `PolicySpec.of` describes with them how to make the policy again."""
            if cls.__init__ is object.__init__ and (args or keywords):  # Otherwise nothing would refuse them.
                raise TypeError(f"{cls.__name__}() takes no arguments")
            policy = super().__new__(cls)
            policy._made_with = args, keywords
            return policy

    # ---- spaces ----

    def bind(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        seed: int | None = None,
    ) -> None:
        """Set the policy's spaces and seed; `EnvRunner` and `RolloutWorker` call this.

        Only the first call has an effect. Later calls check that the spaces are the same, so several workers
        can share a policy, and none restarts its random numbers.

        Args:
            observation_space: Space of one environment.
            action_space: Space of one environment.
            seed: Seed of all randomness in the policy; None draws one from the OS.

        Raises:
            OptionError: The spaces differ from earlier ones, or the policy cannot act in them.
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
                    f"the policy was made for the {what} space {excerpt(str(bound))}, not for "
                    f"{excerpt(str(given))}: make another policy"
                )

    def _setup(  # noqa: B027 - optional hook
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        seeds: np.random.SeedSequence,
    ) -> None:
        """Make everything that depends on the spaces or the seed; called once.

        Raises:
            OptionError: The policy cannot act in these spaces.
        """

    @property
    def is_bound(self) -> bool:
        """Whether `bind` was called."""
        return self._spaces is not None

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Observation space of one environment."""
        return self._bound()[0]

    @property
    def action_space(self) -> gym.Space[Any]:
        """Action space of one environment."""
        return self._bound()[1]

    @property
    def spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Observation and action space of one environment."""
        return self._bound()

    def _bound(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        if self._spaces is None:
            raise OptionError(
                f"{type(self).__name__} has no spaces yet: pass an environment to the runner or worker, or "
                "call bind(observation_space, action_space), such as policy.bind(*data.spaces) for a data set"
            )
        return self._spaces

    @property
    def lock(self) -> threading.RLock:
        """Runners hold it while the policy acts; rlio's own policies hold it while they learn or change.

        If your policy acts in one thread and changes in another (``sample_async``), change it under this
        lock: in ``with self.lock``, or through the methods of `RolloutWorker`, which acquire it. Call
        `sample` before you acquire it: with an empty queue, a `sample` under the lock would wait for a thread
        that waits for the lock.
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
            obs: (N, *shape of the space), nested like the space. The caller owns and overwrites the arrays:
                copy what you keep.
            state: The state from the last call for the same environments, or `initial_state`.
            explore: Whether to explore.
            inputs: N rows of `input_columns`; None if there are none.
            timestep: Environment steps that the runner has sampled so far, for schedules. With several
                workers, `global_vars` has the sum, from the last weights.

        Returns:
            Actions, (N, *shape of the space), nested like the space; the next state; and columns to record,
            name -> (N, ...), the same names at every call. The caller may keep all of them.
        """

    def initial_state(self, batch_size: int) -> RecurrentState:
        """The recurrent state at the start of an episode, with ``batch_size`` rows; () if there is none."""
        return ()

    @property
    def is_recurrent(self) -> bool:
        """Whether the policy has an `initial_state`."""
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
            obs: An observation of the space's shape, nested like the space.
            state: The state from the last call; () at the start of an episode.
            explore: Whether to explore.
            inputs: One row of `input_columns`; None if there are none.
            timestep: Environment steps that the runner has sampled so far, for schedules. With several
                workers, `global_vars` has the sum, from the last weights.

        Returns:
            The action, the next state, and the columns' values, all without the leading dimension.

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
        """Log of the probability (for continuous actions, the density) of choosing each action.

        Draws nothing and changes nothing. Off-policy evaluation needs this.

        Args:
            actions: (N, *shape of the space), nested like the space.
            obs: N observations, as in `compute_actions`.
            explore: As in `compute_actions`; without it, one action has all probability.
            timestep: As in `compute_actions`; None: after schedules of exploration have ended.

        Returns:
            (N,) float64; -inf for an action that is never chosen.

        Raises:
            OptionError: This policy does not know its probabilities.
        """
        raise OptionError(
            f"{type(self).__name__} does not know how likely actions are: implement compute_log_likelihoods, "
            "or pass a function (obs, actions) -> log-probabilities in its place"
        )

    # ---- events ----

    def on_episode_start(self, env_ids: NDArray[np.int64]) -> None:  # noqa: B027 - optional hook
        """Called when episodes begin, before their first action; for exploration that lasts an episode.

        Args:
            env_ids: Environments (as in the column ``env_id``) whose episodes begin, shape (n,).
        """

    def on_episode_end(self, env_ids: NDArray[np.int64]) -> None:  # noqa: B027 - optional hook
        """Called when episodes ended, before `on_episode_start` of the next ones; see there."""

    @property
    def has_episode_hooks(self) -> bool:
        """Whether `on_episode_start` or `on_episode_end` is overridden; otherwise they need not be called."""
        kind = type(self)
        return (
            kind.on_episode_start is not Policy.on_episode_start
            or kind.on_episode_end is not Policy.on_episode_end
        )

    def on_global_var_update(self, global_vars: GlobalVars) -> None:
        """Store values that all workers share, for schedules, in `global_vars`.

        Called by `RolloutWorker.set_global_vars`, and before the policy learns.
        """
        self.global_vars = global_vars

    # ---- learning ----

    def postprocess_trajectory(
        self,
        batch: SampleBatch,
        other_agent_batches: Mapping[Any, tuple[str, SampleBatch]] | None = None,
        episode: Any = None,
    ) -> SampleBatch:
        """Add or change columns of one agent's rows of one episode, or of a chunk of it, after sampling.

        An override may take ``batch`` alone.

        Args:
            batch: The rows, in order; the policy may change them.
            other_agent_batches: Rows of other agents in the episode, agent id -> (policy id, rows), not to be
                changed; None if there is one agent.
            episode: The runner's object for the episode, if it still exists.

        Returns:
            The same number of rows.
        """
        return batch

    def postprocess_batch(self, batch: SampleBatch) -> SampleBatch:
        """Apply `postprocess_trajectory` to each trajectory in ``batch``, for one agent.

        Policies may override this to process all trajectories at once.

        Args:
            batch: Consecutive trajectories, or chunks of them.
        """
        if not self.postprocesses or not len(batch):
            return batch
        return concat_samples([self.postprocess_trajectory(part) for part in batch.split_by_episode()])

    @property
    def postprocesses(self) -> bool:
        """Whether `postprocess_trajectory` is overridden; otherwise rows are not cut into episodes."""
        return type(self).postprocess_trajectory is not Policy.postprocess_trajectory

    def learn_on_batch(self, batch: Batch) -> Stats:
        """Learn from ``batch`` and return the measurements.

        Raises:
            OptionError: This policy does not learn.
        """
        raise OptionError(
            f"{type(self).__name__} does not learn: use a policy with learn_on_batch, such as DQN"
        )

    def compute_gradients(self, batch: Batch) -> tuple[Gradients, Stats]:
        """The gradients of the loss of ``batch``, by the names of the weights, and the measurements.

        Nothing is changed. ``stats["batch_count"]`` is the number of rows.

        Raises:
            OptionError: This policy has no gradients.
        """
        raise OptionError(f"{type(self).__name__} has no gradients: use a policy that has, such as DQN")

    def apply_gradients(self, gradients: Mapping[str, NDArray[Any]]) -> None:
        """Take a step along ``gradients`` from a `compute_gradients`, here or elsewhere.

        Raises:
            OptionError: This policy has no gradients.
            StateError: Names or shapes differ.
        """
        raise OptionError(f"{type(self).__name__} has no gradients: use a policy that has, such as DQN")

    def get_weights(self, *, inference_only: bool = False) -> Weights:
        """Copies of the weights, by name; {} if there are none.

        Args:
            inference_only: Leave out weights that acting does not need; `set_weights` takes both kinds.
        """
        return {}

    def set_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Replace the weights by ``weights`` from a `get_weights`.

        Raises:
            StateError: Names or shapes differ.
        """
        if weights:
            raise StateError(f"{type(self).__name__} has no weights but was given {excerpt(sorted(weights))}")

    # ---- state ----

    def get_state(self) -> PolicyState:
        """The complete state of the policy; `rlio.policies.checkpoint` stores it."""
        return {
            "weights": self.get_weights(),
            "weights_seq_no": self.weights_seq_no,
            "global_vars": self.global_vars.to_json(),
        }

    def set_state(self, state: PolicyState) -> None:
        """Continue from a state of `get_state`.

        Raises:
            StateError: The state is not of such a policy.
        """
        weights_seq_no, told = state_part(state, "weights_seq_no", int), None
        if "global_vars" in state:  # States of earlier versions have none.
            told = GlobalVars.from_json(state_part(state, "global_vars", dict))
        with fitting(POLICY_STATE):
            self.set_weights(state_part(state, "weights", dict))
        self.weights_seq_no = weights_seq_no
        if told is not None:
            self.on_global_var_update(told)

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        components: str | Collection[str] | None = None,
        not_components: str | Collection[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the state in ``folder``, a path or any fsspec URL; see `save_state`.

        Args:
            folder: Its contents are replaced.
            components: Name or names of the state's parts to store, such as ``"weights"``; None: all.
            not_components: Parts to leave out.
            storage_options: For fsspec.

        Raises:
            OptionError: The state has no such part.
            PublishError: The state could not be stored.
        """
        from rlio.policies.checkpoint import save_state, select_components

        state = select_components(self.get_state(), components, not_components)
        save_state(folder, state, storage_options=storage_options)

    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        components: str | Collection[str] | None = None,
        not_components: str | Collection[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Continue from what `save` stored; the policy must be bound, and made in the same way.

        Parts that are not stored, or not requested, are unchanged.

        Raises:
            DataNotFound: Nothing is stored there.
            OptionError: The stored state has no such part.
            StateError: The stored state is that of another kind of policy, or of another object.
        """
        from rlio.policies.checkpoint import load_state, select_components

        self._bound()
        stored = load_state(folder, storage_options=storage_options)
        parts, own = select_components(stored, components, not_components), self.get_state()
        # Otherwise a checkpoint of a worker or learner would load silently as a state without any part.
        if unknown := parts.keys() - own.keys():
            raise StateError(
                f"this is not a state of a {type(self).__name__}: it has {excerpt(sorted(unknown))}, which "
                f"are none of {excerpt(sorted(own))}. Pass a folder that Policy.save or "
                "export_policy_checkpoint of a worker stored, or name the components to load",
                uri=os.fspath(folder),
            )
        self.set_state(own | parts)

    def export_model(
        self, path: str | os.PathLike[str], *, format: Literal["npz", "torchscript"] = "npz"
    ) -> None:
        """Write the weights to a file for use elsewhere.

        Args:
            path: A local file; it is replaced.
            format: ``"npz"``: the arrays by name, for `numpy.load` and `import_model`.

        Raises:
            OptionError: The policy does not support the format, or has no weights.
        """
        from rlio.policies.checkpoint import write_arrays

        if format != "npz":
            raise OptionError(f"format={excerpt(format)}: {type(self).__name__} is exported as 'npz'")
        weights = self.get_weights()
        if not weights:
            raise OptionError(f"{type(self).__name__} has no weights to export")
        write_arrays(path, weights)

    def import_model(self, path: str | os.PathLike[str]) -> None:
        """Load the weights from a file of `export_model` with the format ``"npz"``.

        Raises:
            DataNotFound: The file does not exist.
            CorruptData: The file is not of this format.
            StateError: Names or shapes differ.
        """
        from rlio.policies.checkpoint import read_arrays

        self.set_weights(read_arrays(path))


def state_part(state: PolicyState, key: str, kind: type) -> Any:
    """``state[key]``, checked to be a ``kind``; an int is a whole number from 0.

    Raises:
        StateError: It is absent, or something else.
    """
    if kind is int:
        return whole_number(state, key, of=POLICY_STATE)
    return value_in(state, key, kind, of=POLICY_STATE)


def _one_row(space: gym.Space[Any], value: Any) -> Any:
    """``value`` of ``space`` as a batch of one."""
    from rlio.envs.leaves import leaf_of, leaves_of

    leaves = leaves_of(space)
    rows: list[Any] = []
    for leaf in leaves:
        part = leaf_of(value, leaf.path)
        rows.append(object_column([part]) if leaf.is_object else np.asarray(part, leaf.dtype)[None])
    return unflatten([leaf.path for leaf in leaves], rows)
