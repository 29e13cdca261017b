"""`Target`: the judged policy, as estimators see it: the likelihood of actions, and its own actions.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Discrete
    >>> def prefers_one(obs, actions):
    ...     return np.log(np.where(actions == 1, 0.9, 0.1))
    >>> target = Target(prefers_one, action_space=Discrete(2), epsilon_greedy=0.5)
    >>> np.exp(target.log_probabilities(np.zeros((2, 3)), np.array([0, 1]))).round(2).tolist()
    [0.3, 0.7]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import row_count
from rlio.batch.columns import Columns
from rlio.batch.nested import leaves
from rlio.batch.probabilities import ROUNDING
from rlio.envs.leaves import leaves_of
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.policies.policy import Policy
from rlio.support.options import check_number, set_options

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["DrawActions", "LogProbabilities", "Target", "as_target"]

# Any: observations and actions are arrays, or dicts and tuples of them, like the spaces.
#: (observations, actions), N rows of each -> log-probabilities or log-densities, shape (N,).
LogProbabilities: TypeAlias = Callable[[Any, Any], NDArray[np.float64]]
#: (observations, generator) -> an action for each row.
DrawActions: TypeAlias = Callable[[Any, np.random.Generator], Any]


@dataclass(frozen=True)
class Target:
    """A policy to judge by the record of another policy.

    Attributes:
        policy: A `Policy` that is bound to its spaces and has `compute_log_likelihoods`, or a function
            (observations, actions) -> log-probabilities.
        explore: Whether a `Policy` is judged with exploration, at the end of its exploration schedules.
        epsilon_greedy: Probability of a uniformly random action instead of the policy's, for Discrete
            actions.
        observation_space: Space of one environment; required if a function is judged and a model is fitted.
        action_space: Likewise; also required with ``epsilon_greedy``.
        draw: Draws actions; required if a function is judged, actions are not Discrete and a model is fitted.

    Raises:
        OptionError: The policy has no spaces yet, a value is out of range, or actions are not Discrete.
    """

    policy: Policy | LogProbabilities
    _: KW_ONLY
    explore: bool = True
    epsilon_greedy: float = 0.0
    observation_space: gym.Space[Any] | None = None
    action_space: gym.Space[Any] | None = None
    draw: DrawActions | None = None

    def __post_init__(self) -> None:
        if isinstance(self.policy, Policy):
            if self.observation_space or self.action_space or self.draw:
                raise OptionError(
                    "observation_space, action_space and draw are for functions: omit them for a policy"
                )
            spaces = self.policy.spaces
            object.__setattr__(self, "observation_space", spaces[0])
            object.__setattr__(self, "action_space", spaces[1])
        elif isinstance(self.policy, type) and issubclass(self.policy, Policy):
            raise OptionError(
                f"policy={self.policy.__name__} is a class: make a policy, bind() it to its spaces, and "
                "load or set its weights"
            )
        elif not callable(self.policy):
            raise OptionError(
                f"policy={excerpt(self.policy)}: expected a Policy, or a function (obs, actions) -> "
                "log-probabilities"
            )
        elif not self.explore:
            raise OptionError("explore=False is for policies; a function defines its probabilities: omit it")
        epsilon = check_number("epsilon_greedy", self.epsilon_greedy, least=0, most=1)
        set_options(self, epsilon_greedy=epsilon)
        if self.epsilon_greedy and self.choices is None:
            raise OptionError(
                f"epsilon_greedy={self.epsilon_greedy} is for Discrete actions, but the action space is "
                f"{excerpt(str(self.action_space))}: for a function, pass action_space=Discrete(n)"
            )

    @property
    def choices(self) -> NDArray[np.int64] | None:
        """All actions, (n,), if they are Discrete; otherwise None."""
        from gymnasium.spaces import Discrete

        if not isinstance(self.action_space, Discrete):
            return None
        first = int(self.action_space.start)
        return np.arange(first, first + int(self.action_space.n), dtype=np.int64)

    def has_densities(self, actions: Any) -> bool:
        """Whether likelihoods of ``actions`` may be above 1, as densities of floats may be."""
        from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete

        discrete = Discrete, MultiBinary, MultiDiscrete
        if self.action_space is not None and all(
            isinstance(leaf.space, discrete) for leaf in leaves_of(self.action_space)
        ):
            return False
        return not all(
            isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iub" for _, leaf in leaves(actions)
        )

    def log_probabilities(self, obs: Any, actions: Any) -> NDArray[np.float64]:
        """Return the log of the probability, or density, of each action.

        Args:
            obs: N observations.
            actions: N actions.

        Returns:
            (N,) float64, -inf for actions that the policy never takes.

        Raises:
            OptionError: The policy cannot compute them, or returned values that are not log-probabilities.
            SchemaError: An action is outside of the action space.
        """
        self._check_actions(actions)
        if isinstance(self.policy, Policy):
            found = self.policy.compute_log_likelihoods(actions, obs, explore=self.explore)
        else:
            found = self.policy(obs, actions)
        logp = np.asarray(found, np.float64)
        self._check_logs(logp, actions)
        choices = self.choices
        if self.epsilon_greedy and choices is not None:
            logp = np.log((1.0 - self.epsilon_greedy) * np.exp(logp) + self.epsilon_greedy / len(choices))
        return logp

    def _check_actions(self, actions: Any) -> None:
        choices = self.choices
        if choices is None:
            return
        outside = np.flatnonzero((actions < choices[0]) | (actions > choices[-1]))
        if len(outside):
            raise SchemaError(
                f"action {excerpt(actions[outside[0]].item())} was logged, but the judged policy acts in "
                f"{excerpt(str(self.action_space))}: judge a policy of the same action space",
                column=Columns.ACTIONS,
            )

    def _check_logs(self, logp: NDArray[np.float64], actions: Any) -> None:
        rows = row_count(actions)
        if logp.shape != (rows,):
            raise OptionError(
                f"the policy gave log-probabilities of shape {logp.shape} "
                f"for {rows} actions: expected one each"
            )
        if np.isnan(logp).any() or (logp == np.inf).any():
            row = int(np.flatnonzero(np.isnan(logp) | (logp == np.inf))[0])
            raise OptionError(
                f"the policy gave {logp[row]} as the log-probability of action {row} of {rows}: expected a "
                "number, or -inf for an action that it never takes"
            )
        if rows and logp.max() > ROUNDING and not self.has_densities(actions):
            raise OptionError(
                f"the policy gave {logp.max():.4g} as the log of a probability, which is at most 0: return "
                "logs, not probabilities"
            )

    def action_probabilities(self, obs: Any) -> NDArray[np.float64]:
        """Return the probability of each of the n `choices`, (N, n), for N observations.

        Raises:
            OptionError: Actions are not Discrete, or the probabilities do not add up to 1.
        """
        choices, rows = self.choices, row_count(obs) or 0
        if choices is None:
            raise OptionError(f"actions of {excerpt(str(self.action_space))} cannot be listed")
        columns = [self.log_probabilities(obs, np.full(rows, choice)) for choice in choices]
        found: NDArray[np.float64] = np.exp(np.stack(columns, axis=-1))
        totals = found.sum(-1)
        if rows and np.abs(totals - 1.0).max() > 1e-3:
            raise OptionError(
                f"the policy's probabilities of all {len(choices)} actions add up to "
                f"{totals[np.abs(totals - 1.0).argmax()]:.4g}: expected 1"
            )
        found /= totals[:, None]
        return found

    def draw_actions(self, obs: Any, rng: np.random.Generator) -> Any:
        """Return an action for each observation.

        Raises:
            OptionError: A function is judged and ``draw`` is missing.
        """
        if isinstance(self.policy, Policy):
            return self.policy.compute_actions(obs, explore=self.explore)[0]
        if self.draw is None:
            raise OptionError(
                "a model of continuous actions needs actions of the policy: pass "
                "Target(function, draw=function that draws actions)"
            )
        return self.draw(obs, rng)


def as_target(policy: Policy | LogProbabilities | Target) -> Target:
    """Return ``policy`` as a `Target`.

    Raises:
        OptionError: As `Target`.
    """
    return policy if isinstance(policy, Target) else Target(policy)
