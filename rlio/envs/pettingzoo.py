"""Adapters from PettingZoo's parallel and AEC environments to `MultiAgentEnv`.

This module does not import PettingZoo (``pip install rlio[pettingzoo]``); the code that makes the environment
does.

Example:
    >>> from gymnasium.spaces import Discrete
    >>> class Once:
    ...     metadata = {"name": "once"}
    ...     possible_agents = ["a"]
    ...     observation_space = action_space = lambda self, agent: Discrete(2)
    ...     def reset(self, seed=None, options=None):
    ...         self.agents = ["a"]
    ...         return {"a": 0}, {"a": {}}
    ...     def step(self, actions):
    ...         self.agents = []
    ...         return {"a": 1}, {"a": 2.0}, {"a": True}, {"a": False}, {"a": {}}
    >>> env = from_pettingzoo(Once())
    >>> env.reset()
    ({'a': 0}, {'a': {}})
    >>> env.step({"a": 1})[2]
    {'a': True, '__all__': True}
"""

from __future__ import annotations

from typing import Any

from rlio.batch.copies import own_copy
from rlio.envs.multi_agent import ALL_AGENTS, AgentId, MultiAgentDict, MultiAgentEnv
from rlio.errors import OptionError, SchemaError, excerpt

__all__ = [
    "PettingZooAEC",
    "PettingZooParallel",
    "as_multi_agent_env",
    "from_pettingzoo",
    "is_aec",
    "is_pettingzoo",
]

_Step = tuple[MultiAgentDict, MultiAgentDict, MultiAgentDict, MultiAgentDict, MultiAgentDict]


def is_aec(env: Any) -> bool:
    """Whether ``env`` has the methods of PettingZoo's AEC environments."""
    return all(hasattr(env, name) for name in ("agent_iter", "last", "observe"))


def is_pettingzoo(env: Any) -> bool:
    """Whether ``env`` has the methods of PettingZoo's AEC or parallel environments."""
    spaces = callable(getattr(env, "observation_space", None)) and callable(
        getattr(env, "action_space", None)
    )
    # Other environments have their spaces as attributes, which are not callable.
    return spaces and (is_aec(env) or (hasattr(env, "step") and hasattr(env, "possible_agents")))


def from_pettingzoo(env: Any) -> MultiAgentEnv:
    """Return ``env``, parallel or AEC, as a `MultiAgentEnv`, which closes it.

    Raises:
        OptionError: ``env`` is not a PettingZoo environment.
    """
    if not is_pettingzoo(env):
        raise OptionError(
            f"{excerpt(env)} lacks the methods of a PettingZoo environment: pass one made by parallel_env() "
            "or env() of a PettingZoo module"
        )
    return PettingZooAEC(env) if is_aec(env) else PettingZooParallel(env)


class _PettingZoo(MultiAgentEnv):
    """Base class of both kinds."""

    def __init__(self, env: Any) -> None:
        #: The PettingZoo environment.
        self.env = env
        self.render_mode: str | None = getattr(env, "render_mode", None)
        try:
            self.possible_agents: list[AgentId] = list(env.possible_agents)
        except AttributeError as error:
            raise OptionError(
                f"{excerpt(env)} has no possible_agents, which are needed to find spaces and policies"
            ) from error
        self.observation_spaces: dict[AgentId, Any] = {
            agent: env.observation_space(agent) for agent in self.possible_agents
        }
        self.action_spaces: dict[AgentId, Any] = {
            agent: env.action_space(agent) for agent in self.possible_agents
        }

    @property
    def unwrapped(self) -> Any:
        """The environment without any wrapper."""
        return getattr(self.env, "unwrapped", self.env)

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close is not None:
            close()


def _with_all(terminateds: MultiAgentDict, truncateds: MultiAgentDict, *, over: bool) -> None:
    """Add ``"__all__"`` flags: PettingZoo has a flag per agent, and no agents once the episode is over."""
    cut = any(truncateds.values())
    terminateds[ALL_AGENTS] = over and not cut
    truncateds[ALL_AGENTS] = over and cut


class PettingZooParallel(_PettingZoo):
    """A parallel environment: all agents act in every step."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[MultiAgentDict, MultiAgentDict]:
        obs, infos = self.env.reset(seed=seed, options=options)
        return obs, infos

    def step(self, actions: MultiAgentDict) -> _Step:
        obs, rewards, terminateds, truncateds, infos = self.env.step(actions)
        terminateds, truncateds = dict(terminateds), dict(truncateds)
        _with_all(terminateds, truncateds, over=not self.env.agents)
        return obs, rewards, terminateds, truncateds, infos


class PettingZooAEC(_PettingZoo):
    """An AEC environment: agents act in turns, one in each step.

    An agent's reward is the result of `last` at its turn: the sum since its last action. Agents that end are
    removed at once, with their final observation and reward.
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[MultiAgentDict, MultiAgentDict]:
        self.env.reset(seed=seed, options=options)
        obs, _, _, _, infos = self._until_a_turn()
        return obs, infos

    def step(self, actions: MultiAgentDict) -> _Step:
        agent: AgentId = self.env.agent_selection
        if agent not in actions:
            raise SchemaError(
                f"it is the turn of agent {excerpt(agent)}, but the actions are for {excerpt(list(actions))}"
            )
        self.env.step(actions[agent])
        return self._until_a_turn()

    def _until_a_turn(self) -> _Step:
        """Remove ended agents until one must act or none is left."""
        found: _Step = ({}, {}, {}, {}, {})
        obs, rewards, terminateds, truncateds, infos = found
        while self.env.agents:
            agent = self.env.agent_selection
            seen, rewards[agent], terminateds[agent], truncateds[agent], info = self.env.last()
            infos[agent] = own_copy(info)  # the environment keeps writing into its own
            if seen is not None:
                obs[agent] = seen
            if not (terminateds[agent] or truncateds[agent]):
                break
            # A copy, because the environment continues and may overwrite its arrays.
            obs |= {agent: own_copy(obs[agent])} if agent in obs else {}
            self.env.step(None)
        _with_all(terminateds, truncateds, over=not self.env.agents)
        return found


def as_multi_agent_env(made: Any) -> MultiAgentEnv:
    """Return ``made`` as a `MultiAgentEnv`: one of ours, of PettingZoo's (parallel or AEC), or of RLlib's
    kind.

    Raises:
        OptionError: ``made`` is something else, such as an environment with one agent.
    """
    if isinstance(made, MultiAgentEnv):
        return made
    if is_pettingzoo(made):
        return from_pettingzoo(made)
    needed = ("reset", "step", "close", "possible_agents", "get_observation_space", "get_action_space")
    if all(hasattr(made, name) for name in needed):
        return made  # type: ignore[no-any-return] # RLlib's MultiAgentEnv has these names and meanings
    hint = ""
    if hasattr(made, "action_space"):
        hint = ". It has one agent: use EnvRunner, or make_multi_agent for independent copies"
    raise OptionError(
        f"env returned {excerpt(made)}: expected a MultiAgentEnv or a PettingZoo environment{hint}"
    )
