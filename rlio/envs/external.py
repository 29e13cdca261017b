"""`ExternalEnv`: an environment that drives the loop, such as a simulator or a game server.

Example:
    >>> from gymnasium.spaces import Box, Discrete
    >>> class Countdown(ExternalEnv):
    ...     def run(self):
    ...         while True:
    ...             episode = self.start_episode()
    ...             for left in (3.0, 2.0, 1.0):
    ...                 action = self.get_action(episode, [left])
    ...                 self.log_returns(episode, float(action))
    ...             self.end_episode(episode, [0.0])
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> from rlio.sampling.external_runner import ExternalRunner
    >>> runner = ExternalRunner(Countdown(Box(0.0, 3.0, (1,)), Discrete(2)), RandomPolicy(), seed=0)
    >>> batch = runner.run(6)
    >>> batch["obs"].ravel().tolist()
    [3.0, 2.0, 1.0, 3.0, 2.0, 1.0]
    >>> runner.stop()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlio.errors import OptionError

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.sampling.external_episodes import ExternalEpisodes

__all__ = ["ExternalEnv"]


class ExternalEnv:
    """Base class of environments that drive the loop. Override `run`, which gets its own thread.

    `run` calls the other methods, from any thread. Any number of episodes may run side by side; their actions
    are chosen together. Policies act in ``observation_space`` and ``action_space``.

    Args:
        observation_space: Space of the reported observations.
        action_space: Space of the requested actions.
    """

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self._sink: ExternalEpisodes | None = None

    def run(self) -> None:
        """Play episodes.

        An error in it is raised where experience is sampled. When it returns, the data ends.
        """
        raise OptionError(
            f"{type(self).__name__} has no run(): override it with the loop that plays episodes"
        )

    def attach(self, sink: ExternalEpisodes) -> None:
        """Set the object that answers; called by `ExternalRunner`.

        Raises:
            OptionError: The environment already has a runner.
        """
        if self._sink is not None:
            raise OptionError("this ExternalEnv already has a runner: make another ExternalEnv")
        self._sink = sink

    @property
    def _attached(self) -> ExternalEpisodes:
        if self._sink is None:
            raise OptionError(f"this {type(self).__name__} has no runner: pass it to an ExternalRunner")
        return self._sink

    def start_episode(self, episode_id: str | None = None, training_enabled: bool = True) -> str:
        """Begin an episode and return its name; see `ExternalEpisodes.start`."""
        return self._attached.start(episode_id, training_enabled=training_enabled)

    def get_action(self, episode_id: str, observation: Any) -> Any:
        """Report an observation and wait for the policy's action; see `ExternalEpisodes.get_action`."""
        return self._attached.get_action(episode_id, observation)

    def log_action(self, episode_id: str, observation: Any, action: Any, **columns: Any) -> None:
        """Report an observation and the action that was taken; see `ExternalEpisodes.log_action`."""
        self._attached.log_action(episode_id, observation, action, **columns)

    def log_returns(self, episode_id: str, reward: float, info: Mapping[str, Any] | None = None) -> None:
        """Report a reward for the latest action; see `ExternalEpisodes.log_returns`."""
        self._attached.log_returns(episode_id, reward, info)

    def end_episode(self, episode_id: str, observation: Any = None, *, truncated: bool = False) -> None:
        """Report the end of an episode; see `ExternalEpisodes.end`."""
        self._attached.end(episode_id, observation, truncated=truncated)
