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

from rlio.errors import OptionError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.envs.multi_agent import AgentId, MultiAgentDict
    from rlio.sampling.external_agents import AgentLoops
    from rlio.sampling.external_episodes import ExternalEpisodes

__all__ = ["ExternalEnv", "ExternalMultiAgentEnv"]


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


class ExternalMultiAgentEnv(ExternalEnv):
    """Base class of environments with several agents that drive the loop; see `ExternalEnv`.

    Values are dicts by agent id. The agents in a call of `get_action` or `log_action` act together: each such
    call after an episode's first is one environment step, and so is `end_episode`. Agents may act in turns,
    join late, and leave early (``multiagent_done_dict``).

    Args:
        observation_space: Space of the agents' observations, or a dict of spaces by agent id.
        action_space: Space of their actions, or a dict with the same agents.

    Attributes:
        possible_agents: The agents with spaces of their own, in the order of ``agent_index``; [] if the
            spaces are those of any agent, which are then numbered as they appear in an episode.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any] | Mapping[AgentId, gym.Space[Any]],
        action_space: gym.Space[Any] | Mapping[AgentId, gym.Space[Any]],
    ) -> None:
        spaces: tuple[Any, Any] = observation_space, action_space
        # Dict spaces are mappings too, of parts instead of agents.
        by_agent = [type(space) is dict for space in spaces]
        if any(by_agent) and (not all(by_agent) or spaces[0].keys() != spaces[1].keys() or not spaces[0]):
            raise OptionError(
                f"observation_space={excerpt(spaces[0])}, action_space={excerpt(spaces[1])}: expected two "
                "spaces, or two dicts of spaces with the same agents"
            )
        super().__init__(*spaces)
        self.possible_agents: list[AgentId] = list(spaces[0]) if all(by_agent) else []

    def get_observation_space(self, agent_id: AgentId) -> gym.Space[Any]:
        """Space of an agent's observations; KeyError if it is unknown."""
        spaces: Any = self.observation_space
        return spaces[agent_id] if self.possible_agents else spaces  # type: ignore[no-any-return] # checked above

    def get_action_space(self, agent_id: AgentId) -> gym.Space[Any]:
        """Space of an agent's actions; KeyError if it is unknown."""
        spaces: Any = self.action_space
        return spaces[agent_id] if self.possible_agents else spaces  # type: ignore[no-any-return] # checked above

    @property
    def _loops(self) -> AgentLoops:
        sink: Any = self._attached
        return sink  # type: ignore[no-any-return] # `ExternalAgentsRunner` attaches no other

    def get_action(self, episode_id: str, observation_dict: MultiAgentDict) -> MultiAgentDict:
        """Report observations and wait for the agents' actions; see `AgentLoops.get_action`."""
        return self._loops.get_action(episode_id, observation_dict)

    def log_action(  # type: ignore[override] # values are of all agents
        self, episode_id: str, observation_dict: MultiAgentDict, action_dict: MultiAgentDict
    ) -> None:
        """Report observations and the actions that were taken; see `AgentLoops.log_action`."""
        self._loops.log_action(episode_id, observation_dict, action_dict)

    def log_returns(  # type: ignore[override] # values are of all agents
        self,
        episode_id: str,
        reward_dict: Mapping[AgentId, float],
        info_dict: Mapping[AgentId, Mapping[str, Any]] | None = None,
        multiagent_done_dict: Mapping[AgentId, bool] | None = None,
    ) -> None:
        """Report rewards, infos, and agents that have ended; see `AgentLoops.log_returns`."""
        self._loops.log_returns(episode_id, reward_dict, info_dict, multiagent_done_dict)

    def end_episode(
        self, episode_id: str, observation_dict: MultiAgentDict | None = None, *, truncated: bool = False
    ) -> None:
        """Report the end of an episode for all agents; see `AgentLoops.end`."""
        self._loops.end(episode_id, observation_dict, truncated=truncated)
