"""`MultiAgentStepper`: what happened to each agent in a step, checked and sorted out.

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

from rlio.envs.checking import check_observation
from rlio.envs.leaves import leaves_of
from rlio.envs.multi_agent import ALL_AGENTS, COMMON_INFO, AgentId, MultiAgentDict, MultiAgentEnv
from rlio.errors import OptionError, SchemaError, excerpt

__all__ = ["MultiAgentStep", "MultiAgentStepper", "check_multi_agent_env"]

# Nobody has acted in so many steps: agents that join late come sooner.
_IDLE_STEPS = 10_000

_STEP_GIVES = ("observations", "rewards", "terminateds", "truncateds", "infos")


class MultiAgentStep(NamedTuple):
    """What one step, or a reset, gave.

    Attributes:
        observations: Of the agents that act next.
        finals: Final observations of agents that have ended in this step.
        rewards: As the environment gave them.
        ended: Agent id -> (terminated, truncated), of the agents that have ended in this step.
        infos: By agent id.
        common: The info for all.
        is_over: Whether the episode is.
        terminated: Whether it ended by the rules.
        truncated: Whether it was cut off.
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
    """Steps one environment, which it closes, and refuses what makes no sense.

    An agent has ended where its own flag is True, or ``"__all__"`` is. Flags of its own count for it first:
    where the episode terminates, an agent that was truncated stays so. An agent that has its first
    observation when it ends ("born done") never acts. What an environment says once more of an agent that
    has ended is passed over, except for its rewards; that such an agent is back is an error.

    Args:
        env: Made anew after an error: a step that failed half-way cannot be gone on from.
        horizon: Steps after which an episode is truncated; None: what the environment says.
        check: Whether the values of the first reset and the first step are checked against the spaces.

    Attributes:
        env: The environment.
        steps: Steps of the episode so far.
    """

    def __init__(self, env: MultiAgentEnv, *, horizon: int | None = None, check: bool = False) -> None:
        self.env = env
        self.steps = 0
        self._horizon = horizon
        self._unchecked = {"reset", "step"} if check else set()
        self._possible: frozenset[AgentId] = frozenset(env.possible_agents)
        for agent in self._possible:
            _check_id(agent, "possible_agents")
        #: Those, and the others of this episode.
        self._known: set[AgentId] = set(self._possible)
        self._acting: dict[AgentId, Any] = {}
        #: Of this episode: who has appeared, and who of them has ended.
        self._seen: set[AgentId] = set()
        self._gone: set[AgentId] = set()
        self._idle = 0

    @property
    def agents(self) -> frozenset[AgentId]:
        """Who has appeared in this episode and not ended."""
        return frozenset(self._seen - self._gone)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> MultiAgentStep:
        """Start an episode.

        Raises:
            SchemaError: The environment gave no pair of dicts, or an agent that it does not know.
        """
        made = self.env.reset(seed=seed, options=options)
        if not isinstance(made, tuple) or len(made) != 2:
            raise self._wrong("reset", f"gave {excerpt(made)}: expected (observations, infos)")
        obs = self._dict("reset", "observations", made[0])
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
            SchemaError: An action is of an agent that has no observation; or the environment gave something
                else than five dicts, lacks ``"__all__"``, or names an agent that it does not know or that has
                ended before.
        """
        if actions.keys() != self._acting.keys():
            raise self._wrong_actions(actions)
        made = self.env.step(actions)
        if not isinstance(made, tuple) or len(made) != 5:
            raise self._wrong("step", f"gave {excerpt(made)}: expected ({', '.join(_STEP_GIVES)})")
        for what, part in zip(_STEP_GIVES, made, strict=True):
            if type(part) is not dict:
                self._dict("step", what, part)
        obs, rewards, terminateds, truncateds, given = made
        infos, common = _split_common(given)
        for what, flags in (("terminateds", terminateds), ("truncateds", truncateds)):
            if ALL_AGENTS not in flags:
                raise self._wrong(
                    "step", f"gave {what} without {ALL_AGENTS!r}: whether the episode is over for everybody"
                )
        self._check_agents("step", obs)
        if not rewards.keys() <= self._known:
            agent = next(agent for agent in rewards if agent not in self._known)
            raise self._wrong("step", f"gave a reward to agent {excerpt(agent)}, which it does not know")
        self.steps += 1
        self._idle = 0 if actions else self._idle + 1
        if self._idle > _IDLE_STEPS:
            raise self._wrong(
                "step", f"had nobody to act for {_IDLE_STEPS} steps, and the episode is not over"
            )
        terminated, truncated = bool(terminateds[ALL_AGENTS]), bool(truncateds[ALL_AGENTS])
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
        """Who has ended in this step, and how."""
        ended: dict[AgentId, tuple[bool, bool]] = {}
        for flags in (terminateds, truncateds):
            for agent, flag in flags.items():
                if flag and agent != ALL_AGENTS and agent not in self._gone and agent in self._seen:
                    ended[agent] = (bool(terminateds.get(agent)), bool(truncateds.get(agent)))
        if terminated or truncated:
            for agent in self._seen - self._gone - ended.keys():
                ended[agent] = (terminated, truncated)
        elif self._gone:
            for agent in obs.keys() & self._gone:
                if not (terminateds.get(agent) or truncateds.get(agent)):
                    raise self._wrong(
                        "step",
                        f"gave an observation of agent {excerpt(agent)}, which has ended before: give who "
                        "comes back another id",
                    )
        return ended

    # ---- checks ----

    def _checked(self, method: str, step: MultiAgentStep) -> MultiAgentStep:
        """``step``, whose values are looked at where it is the first of its kind."""
        if method in self._unchecked:
            self._unchecked.remove(method)
            _check_values(self.env, step)
        return step

    def _dict(self, method: str, what: str, value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise self._wrong(
                method, f"gave {what} that are a {type(value).__name__}: expected a dict by agent id"
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
                    f"gave an observation of agent {excerpt(agent)}, which it does not know: its "
                    f"possible_agents are {excerpt(list(self.env.possible_agents))}",
                ) from error
            self._known.add(agent)

    def _wrong_actions(self, actions: Mapping[AgentId, Any]) -> SchemaError:
        extra = [agent for agent in actions if agent not in self._acting]
        if extra:
            return self._wrong(
                "step",
                f"got an action of agent {excerpt(extra[0])}, which has no observation to act on: "
                f"agents to act are {excerpt(list(self._acting))}",
            )
        lacking = [agent for agent in self._acting if agent not in actions]
        return self._wrong("step", f"got no action of agent {excerpt(lacking[0])}, which is to act")

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
            f"{where} has the agent id {excerpt(agent)}: ids are int or str, and neither {ALL_AGENTS!r} nor "
            f"{COMMON_INFO!r}"
        )


def check_multi_agent_env(env: MultiAgentEnv, *, seed: int = 0, steps: int = 20) -> None:
    """Play a little with random actions, and raise an error that says what is wrong, if anything is.

    It looks at spaces, ids, dicts and flags as `MultiAgentStepper` does in every step, and besides that
    whether observations are in their spaces and rewards are numbers. The environment is left in the middle of
    an episode.

    Args:
        env: Is not closed.
        seed: Of the environment and the actions.
        steps: How many.

    Raises:
        SchemaError: Something does not fit.
        EnvError: An observation is not in its space.
        OptionError: An id is no id, or an agent has no space.
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
        if isinstance(reward, bool) or not isinstance(reward, (int, float, np.number)):
            raise SchemaError(
                f"{type(env).__name__} gave agent {excerpt(agent)} the reward {excerpt(reward)}: a number"
            )
