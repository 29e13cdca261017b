"""`MultiAgentStepper`: checks the results of a step, and sorts them by agent.

Example:
    >>> from rlio.envs.multi_agent import make_multi_agent
    >>> stepper = MultiAgentStepper(make_multi_agent("CartPole-v1")(num_agents=2))
    >>> sorted(stepper.reset(seed=0).observations)
    [0, 1]
    >>> step = stepper.step({0: 1, 1: 0})
    >>> step.rewards, step.ended, step.is_over
    ({0: 1.0, 1: 1.0}, {}, False)
    >>> stepper.close()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rlio.batch.columns import Columns
from rlio.batch.copies import own_copy
from rlio.envs.checking import check_observation
from rlio.envs.leaves import leaves_of
from rlio.envs.multi_agent import ALL_AGENTS, COMMON_INFO, AgentId, MultiAgentDict, MultiAgentEnv
from rlio.envs.values import as_flag, as_reward
from rlio.errors import OptionError, SchemaError, excerpt

__all__ = ["MultiAgentStep", "MultiAgentStepper", "check_multi_agent_env"]

# Maximum number of steps without an action; agents that join late arrive sooner.
_IDLE_STEPS = 10_000

_STEP_GIVES = ("observations", "rewards", "terminateds", "truncateds", "infos")


class MultiAgentStep(NamedTuple):
    """The result of a step or a reset.

    Attributes:
        observations: Observations of the agents that act next.
        finals: Final observations of agents that ended in this step.
        rewards: The environment's rewards.
        ended: Agent id -> (terminated, truncated), for the agents that ended in this step.
        infos: Infos by agent id.
        common: The info for all agents.
        is_over: Whether the episode ended.
        terminated: Whether the episode terminated.
        truncated: Whether the episode was truncated.
    """

    observations: dict[AgentId, Any]
    finals: dict[AgentId, Any]
    rewards: Mapping[AgentId, Any]
    ended: dict[AgentId, tuple[bool, bool]]
    infos: Mapping[AgentId, Any]
    common: Mapping[str, Any]
    is_over: bool
    terminated: bool
    truncated: bool


class MultiAgentStepper:
    """Steps one environment, refuses invalid results, and closes the environment.

    An agent has ended if its own flag or ``"__all__"`` is True. Its own flags take precedence: if the episode
    terminates, an agent that was truncated stays truncated. An agent whose first observation comes when it
    ends ("born done") never acts. Further results for an ended agent are ignored, except its rewards. An
    ended agent that returns is an error.

    Args:
        env: The environment; make a new one after an error, because a step that failed halfway cannot be
            continued.
        horizon: Steps after which an episode is truncated; None leaves it to the environment.
        check: Whether to check the values of the first reset and the first step against the spaces.

    Attributes:
        env: The environment.
        steps: Steps of the episode so far.
    """

    def __init__(self, env: MultiAgentEnv, *, horizon: int | None = None, check: bool = False) -> None:
        self.env = env
        self.steps: int = 0
        self._horizon = horizon
        self._unchecked = {"reset", "step"} if check else set()
        self._possible: frozenset[AgentId] = frozenset(env.possible_agents)
        for agent in self._possible:
            _check_id(agent, "possible_agents")
        #: The possible agents and the other agents of this episode.
        self._known: set[AgentId] = set(self._possible)
        self._acting: dict[AgentId, Any] = {}
        #: Agents that have appeared in this episode, and those of them that have ended.
        self._seen: set[AgentId] = set()
        self._gone: set[AgentId] = set()
        self._idle = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> MultiAgentStep:
        """Start an episode.

        Raises:
            SchemaError: The environment returned no pair of dicts, or an unknown agent.
        """
        made = self.env.reset(seed=seed, options=options)
        if not isinstance(made, tuple) or len(made) != 2:
            raise self._wrong("reset", f"returned {excerpt(made)}: expected (observations, infos)")
        obs = dict(self._dict("reset", "observations", made[0]))
        infos, common = _split_common(self._dict("reset", "infos", made[1]))
        self._known = set(self._possible)
        self._check_agents("reset", obs)
        self._seen, self._gone = set(obs), set()
        self.steps = self._idle = 0
        self._acting = obs
        return self._checked("reset", MultiAgentStep(obs, {}, {}, {}, infos, common, False, False, False))

    def step(self, actions: MultiAgentDict) -> MultiAgentStep:
        """Take one step.

        Raises:
            SchemaError: An action belongs to an agent without an observation; or the environment returned
                something other than five dicts, left out ``"__all__"``, or named an agent that is unknown or
                has ended.
        """
        if actions.keys() != self._acting.keys():
            raise self._wrong_actions(actions)
        # A copy, because environments may change what they get.
        made = self.env.step(own_copy(actions))
        if not isinstance(made, tuple) or len(made) != 5:
            raise self._wrong("step", f"returned {excerpt(made)}: expected ({', '.join(_STEP_GIVES)})")
        for what, part in zip(_STEP_GIVES, made, strict=True):
            if type(part) is not dict:
                self._dict("step", what, part)
        obs, rewards, terminateds, truncateds, given = made
        obs = dict(obs)
        infos, common = _split_common(given)
        for what, flags in (("terminateds", terminateds), ("truncateds", truncateds)):
            if ALL_AGENTS not in flags:
                raise self._wrong(
                    "step",
                    f"returned {what} without {ALL_AGENTS!r}, which says whether the episode ended for "
                    "all agents",
                )
        self._check_agents("step", obs)
        if not rewards.keys() <= self._known:
            agent = next(agent for agent in rewards if agent not in self._known)
            raise self._wrong("step", f"returned a reward for agent {excerpt(agent)}, which it does not know")
        self.steps += 1
        self._idle = 0 if actions else self._idle + 1
        if self._idle > _IDLE_STEPS:
            raise self._wrong(
                "step", f"had no agent to act for {_IDLE_STEPS} steps, but the episode has not ended"
            )
        terminated = self._flag(terminateds, ALL_AGENTS, Columns.TERMINATEDS)
        truncated = self._flag(truncateds, ALL_AGENTS, Columns.TRUNCATEDS)
        if self._horizon is not None and self.steps >= self._horizon and not terminated:
            truncated = True
        self._seen |= obs.keys()
        ended = self._ended(terminateds, truncateds, obs, terminated=terminated, truncated=truncated)
        finals: dict[AgentId, Any] = {}
        if ended or self._gone:
            finals = {agent: obs[agent] for agent in ended if agent in obs}
            self._gone |= ended.keys()
            obs = {agent: value for agent, value in obs.items() if agent not in self._gone}
        self._acting = obs
        is_over = terminated or truncated
        return self._checked(
            "step",
            MultiAgentStep(obs, finals, rewards, ended, infos, common, is_over, terminated, truncated),
        )

    def _ended(
        self,
        terminateds: Mapping[Any, Any],
        truncateds: Mapping[Any, Any],
        obs: Mapping[AgentId, Any],
        *,
        terminated: bool,
        truncated: bool,
    ) -> dict[AgentId, tuple[bool, bool]]:
        """The agents that ended in this step: agent id -> (terminated, truncated)."""
        ended: dict[AgentId, tuple[bool, bool]] = {}
        for flags in (terminateds, truncateds):
            for agent, flag in flags.items():
                if flag is False or agent == ALL_AGENTS or agent in self._gone or agent not in self._seen:
                    continue
                found = (
                    self._flag(terminateds, agent, Columns.TERMINATEDS),
                    self._flag(truncateds, agent, Columns.TRUNCATEDS),
                )
                if any(found):
                    ended[agent] = found
        if terminated or truncated:
            for agent in self._seen - self._gone - ended.keys():
                ended[agent] = (terminated, truncated)
        elif self._gone:
            for agent in obs.keys() & self._gone:
                if not (terminateds.get(agent) or truncateds.get(agent)):
                    raise self._wrong(
                        "step",
                        f"returned an observation of agent {excerpt(agent)}, which has ended before: give a "
                        "returning agent another id",
                    )
        return ended

    # ---- checks ----

    def _checked(self, method: str, step: MultiAgentStep) -> MultiAgentStep:
        """Return ``step``; checks its values if it is the first of its kind."""
        if method in self._unchecked:
            self._unchecked.remove(method)
            _check_values(self.env, step)
        return step

    def _flag(self, flags: Mapping[Any, Any], agent: Any, column: str) -> bool:
        flag = flags.get(agent, False)
        return flag if type(flag) is bool else as_flag(flag, column=column, giver=type(self.env).__name__)

    def _dict(self, method: str, what: str, value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise self._wrong(
                method, f"returned {what} of type {type(value).__name__}: expected a dict by agent id"
            )
        return value

    def _check_agents(self, method: str, obs: Mapping[AgentId, Any]) -> None:
        if obs.keys() <= self._known:
            return
        for agent in obs.keys() - self._known:
            _check_id(agent, f"{method}()'s observations")
            try:
                self.env.get_observation_space(agent)
            except (KeyError, ValueError) as error:
                raise self._wrong(
                    method,
                    f"returned an observation of agent {excerpt(agent)}, which it does not know: its "
                    f"possible_agents are {excerpt(list(self.env.possible_agents))}",
                ) from error
            self._known.add(agent)

    def _wrong_actions(self, actions: Mapping[AgentId, Any]) -> SchemaError:
        extra = [agent for agent in actions if agent not in self._acting]
        if extra:
            return self._wrong(
                "step",
                f"got an action of agent {excerpt(extra[0])}, which has no observation to act on: expected "
                f"actions of {excerpt(list(self._acting))}",
            )
        lacking = [agent for agent in self._acting if agent not in actions]
        return self._wrong("step", f"got no action of agent {excerpt(lacking[0])}, which must act")

    def _wrong(self, method: str, text: str) -> SchemaError:
        return SchemaError(f"{type(self.env).__name__}.{method}() {text} (step {self.steps} of the episode)")

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def _split_common(infos: dict[Any, Any]) -> tuple[Mapping[AgentId, Any], Mapping[str, Any]]:
    if COMMON_INFO not in infos:
        return infos, {}
    rest = dict(infos)
    return rest, rest.pop(COMMON_INFO)


def _check_id(agent: Any, where: str) -> None:
    if not isinstance(agent, (int, str)) or isinstance(agent, bool) or agent in (ALL_AGENTS, COMMON_INFO):
        raise OptionError(
            f"{where} has the agent id {excerpt(agent)}: expected an int or str other than {ALL_AGENTS!r} "
            f"and {COMMON_INFO!r}"
        )


def check_multi_agent_env(env: MultiAgentEnv, *, seed: int = 0, steps: int = 20) -> None:
    """Play some steps with random actions, and raise an error if anything is wrong.

    Checks spaces, ids, dicts and flags, as `MultiAgentStepper` does in every step. Also checks that
    observations are in their spaces and that rewards are numbers. Leaves the environment in the middle of an
    episode.

    Args:
        env: The environment; not closed.
        seed: Seed of the environment and the actions.
        steps: Number of steps.

    Raises:
        SchemaError: Something does not fit.
        EnvError: An observation is not in its space.
        OptionError: An id is invalid, or an agent has no space.
    """
    stepper = MultiAgentStepper(env)
    rng = np.random.default_rng(seed)
    for agent in env.possible_agents:
        env.get_observation_space(agent), env.get_action_space(agent)
    step = stepper.reset(seed=seed)
    for _ in range(steps):
        _check_values(env, step)
        if step.is_over:
            step = stepper.reset()
            continue
        step = stepper.step({agent: _random_action(env, agent, rng) for agent in step.observations})
    _check_values(env, step)


def _random_action(env: MultiAgentEnv, agent: AgentId, rng: np.random.Generator) -> Any:
    space = env.get_action_space(agent)
    space.seed(int(rng.integers(1 << 30)))
    return space.sample()


def _check_values(env: MultiAgentEnv, step: MultiAgentStep) -> None:
    for agent, value in (step.observations | step.finals).items():
        leaves = leaves_of(env.get_observation_space(agent))
        check_observation(leaves, value, f"{type(env).__name__}, agent {excerpt(agent)}")
    for agent, reward in step.rewards.items():
        as_reward(reward, giver=f"{type(env).__name__}, agent {excerpt(agent)},")
