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
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.errors import OptionError, StateError, excerpt
from rlio.interfaces import Batch

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["Policy", "PolicyOutput", "PolicyState", "Stats", "Weights", "state_part"]

logger = logging.getLogger("rlio")

# Any: observations and actions are arrays, or dicts and tuples of them, as the spaces are.
Weights: TypeAlias = dict[str, NDArray[Any]]
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
    `set_weights`, `get_state` and `set_state`, `initial_state` and `postprocess_trajectory`.
    """

    #: Columns of the step before that `compute_actions` wants in ``inputs``: ``prev_actions`` and
    #: ``prev_rewards`` (zeros at the first step of an episode), ``t``, ``eps_id``, ``env_id``.
    input_columns: Sequence[str] = ()
    #: Version of the weights: recorded with every step, counted up by `learn_on_batch` of those that learn.
    weights_seq_no: int = 0

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

    def _bound(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        if self._spaces is None:
            raise OptionError(
                f"{type(self).__name__} has no spaces yet: "
                "pass it to an EnvRunner or RolloutWorker, or call bind()"
            )
        return self._spaces

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
            timestep: Steps sampled so far, for schedules.

        Returns:
            Actions, (N, *shape of the space), nested as the space is; the next state; and columns to record,
            name -> (N, ...), the same ones at every call. The caller may keep all of them.
        """

    def initial_state(self, batch_size: int) -> RecurrentState:
        """The recurrent state at the start of an episode, with ``batch_size`` rows; () if there is none."""
        return ()

    # ---- learning ----

    def postprocess_trajectory(self, batch: SampleBatch) -> SampleBatch:
        """Add or change columns of one episode's rows, or of a chunk of them, after sampling."""
        return batch

    def learn_on_batch(self, batch: Batch) -> Stats:
        """Improve on ``batch`` and return what was measured.

        Raises:
            OptionError: This policy does not learn.
        """
        raise OptionError(
            f"{type(self).__name__} does not learn: use a policy with learn_on_batch, such as DQN"
        )

    def get_weights(self) -> Weights:
        """Copies of the weights, by name; {} if there are none."""
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
        return {"weights": self.get_weights(), "weights_seq_no": self.weights_seq_no}

    def set_state(self, state: PolicyState) -> None:
        """Continue from a state of `get_state`.

        Raises:
            StateError: It is not of such a policy.
        """
        self.set_weights(state_part(state, "weights", dict))
        self.weights_seq_no = state_part(state, "weights_seq_no", int)


def state_part(state: PolicyState, key: str, kind: type) -> Any:
    """``state[key]``, checked to be a ``kind``."""
    value = state.get(key)
    if not isinstance(value, kind):
        raise StateError(f"the policy's state needs {key!r} ({kind.__name__}), but it has {excerpt(value)}")
    return value
