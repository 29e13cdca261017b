"""`MultiAgentEnv`: an environment in which several agents act, with dicts by agent id.

`rlio.envs.pettingzoo` converts PettingZoo's environments. `rlio.envs.multi_agent_stepping` steps and checks
an environment.

Example:
    >>> env = make_multi_agent("CartPole-v1")(num_agents=2)
    >>> obs, infos = env.reset(seed=1)
    >>> obs, rewards, terminateds, truncateds, infos = env.step({0: 1, 1: 0})
    >>> rewards, terminateds
    ({0: 1.0, 1: 1.0}, {0: False, 1: False, '__all__': False})
    >>> env.close()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from rlio.errors import OptionError, excerpt
from rlio.support.options import check_count

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = [
    "ALL_AGENTS",
    "COMMON_INFO",
    "AgentId",
    "MultiAgentDict",
    "MultiAgentEnv",
    "make_multi_agent",
]

#: Id of an agent.
AgentId: TypeAlias = int | str
#: Values by agent. Any: spaces and environments define observations, actions and infos.
MultiAgentDict: TypeAlias = dict[Any, Any]

#: The key of ``terminateds`` and ``truncateds`` that says whether the episode ended for all agents.
ALL_AGENTS = "__all__"
#: The key of the info that belongs to no particular agent.
COMMON_INFO = "__common__"


class MultiAgentEnv(ABC):
    """An environment with agents that may join late, leave early, and act in turns.

    To write one, set the three attributes and implement `reset` and `step`. An agent that gets an observation
    acts in the next step; an agent that gets none does not. An agent whose id is not among `possible_agents`
    may appear if `get_observation_space` and `get_action_space` know its spaces.

    Attributes:
        possible_agents: Ids, int or str, of all agents that may appear. An agent's position is its
            ``agent_index`` in recorded rows.
        observation_spaces: Agent id -> space of its observations.
        action_spaces: Agent id -> space of its actions.
    """

    metadata: ClassVar[dict[str, Any]] = {}
    render_mode: str | None = None

    # Authors set these. Class-level defaults serve those who override the two methods below instead.
    possible_agents: Sequence[AgentId] = ()
    observation_spaces: Mapping[AgentId, gym.Space[Any]] = {}
    action_spaces: Mapping[AgentId, gym.Space[Any]] = {}

    @abstractmethod
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[MultiAgentDict, MultiAgentDict]:
        """Start an episode.

        Args:
            seed: Seed of all randomness in the environment from now on; None keeps the current generators.
            options: Options for the environment.

        Returns:
            Observations of the agents that act first, and infos, by agent id.
        """

    @abstractmethod
    def step(
        self, actions: MultiAgentDict
    ) -> tuple[MultiAgentDict, MultiAgentDict, MultiAgentDict, MultiAgentDict, MultiAgentDict]:
        """Take one step.

        Args:
            actions: Agent id -> action, for every agent that got an observation in the last step and has not
                ended.

        Returns:
            observations: Observations of the agents that act next, and final ones of agents that ended.
            rewards: Rewards of any agents that have appeared, including those without an observation.
            terminateds: Agent id -> whether it terminated; ``"__all__"``: whether the episode did, for every
                agent without a True of its own.
            truncateds: Agent id -> whether it was truncated, in the same form.
            infos: Infos by agent id; ``"__common__"`` for all agents.
        """

    def get_observation_space(self, agent_id: AgentId) -> gym.Space[Any]:
        """The space of the observations of ``agent_id``.

        Raises:
            OptionError: The agent is unknown.
        """
        return _space_of(self, "observation_spaces", agent_id)

    def get_action_space(self, agent_id: AgentId) -> gym.Space[Any]:
        """The space of the actions of ``agent_id``.

        Raises:
            OptionError: The agent is unknown.
        """
        return _space_of(self, "action_spaces", agent_id)

    def render(self) -> Any:
        """Return a frame in the render mode; None if there is none."""
        return None

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release the environment's resources."""


def _space_of(env: MultiAgentEnv, name: str, agent_id: AgentId) -> gym.Space[Any]:
    spaces = getattr(env, name)
    try:
        return spaces[agent_id]  # type: ignore[no-any-return] # one of two attributes, each typed
    except KeyError:
        raise OptionError(
            f"{type(env).__name__}.{name} has no agent {excerpt(agent_id)}: it has {excerpt(list(spaces))}; "
            "add the agent, or use one of these ids"
        ) from None


# ---- independent copies of one environment ----


class _Copies(MultiAgentEnv):
    """Agents 0, 1, ... with one environment each. The episode ends when all their episodes have ended."""

    def __init__(self, makers: Sequence[Callable[[], gym.Env[Any, Any]]]) -> None:
        self.envs = [make() for make in makers]
        self.possible_agents = list(range(len(self.envs)))
        self.observation_spaces = {i: env.observation_space for i, env in enumerate(self.envs)}
        self.action_spaces = {i: env.action_space for i, env in enumerate(self.envs)}
        self._ended: dict[int, bool] = {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[MultiAgentDict, MultiAgentDict]:
        self._ended = {}
        # Copies with the same seed would behave alike.
        starts = [
            env.reset(seed=None if seed is None else seed + i, options=options)
            for i, env in enumerate(self.envs)
        ]
        return {i: obs for i, (obs, _) in enumerate(starts)}, {i: info for i, (_, info) in enumerate(starts)}

    def step(
        self, actions: MultiAgentDict
    ) -> tuple[MultiAgentDict, MultiAgentDict, MultiAgentDict, MultiAgentDict, MultiAgentDict]:
        results = {i: self.envs[i].step(action) for i, action in actions.items()}
        obs, rewards, terminateds, truncateds, infos = (
            {i: result[part] for i, result in results.items()} for part in range(5)
        )
        self._ended |= {i: bool(terminateds[i]) for i in results if terminateds[i] or truncateds[i]}
        over = len(self._ended) == len(self.envs)
        by_rules = over and all(self._ended.values())
        terminateds[ALL_AGENTS] = by_rules
        truncateds[ALL_AGENTS] = over and not by_rules
        return obs, rewards, terminateds, truncateds, infos

    def render(self) -> Any:
        return self.envs[0].render()

    def close(self) -> None:
        for env in self.envs:
            env.close()


def make_multi_agent(env: str | Callable[[], gym.Env[Any, Any]]) -> Callable[..., MultiAgentEnv]:
    """Make a function that makes environments in which each agent has its own copy of ``env``.

    Args:
        env: A gymnasium id, or a function that makes an environment.

    Returns:
        A function of ``num_agents`` (default 1), which may also be a key of a mapping, as in RLlib:
        ``make_multi_agent("CartPole-v1")({"num_agents": 2})``. Agents are 0, 1, ...; an agent that has ended
        waits for the others.

    Raises:
        OptionError: ``env`` is neither; or, in the call, ``num_agents`` is below 1.
    """
    make: Callable[[], gym.Env[Any, Any]]
    if isinstance(env, str):
        env_id = env

        def make() -> gym.Env[Any, Any]:
            import gymnasium

            return gymnasium.make(env_id)

    elif callable(env):
        make = env
    else:
        raise OptionError(
            f"env={excerpt(env)}: expected a gymnasium id, or a function that makes an environment"
        )

    def make_copies(
        config: Mapping[str, Any] | None = None, *, num_agents: int | None = None
    ) -> MultiAgentEnv:
        wanted = (config or {}).get("num_agents", 1) if num_agents is None else num_agents
        return _Copies([make] * check_count("num_agents", wanted, least=1))

    return make_copies
