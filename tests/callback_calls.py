"""Scenarios in which callbacks are called, and a recorder of the calls, for rlio and for RLlib.

A call is [name, environment, number of its episode, steps of the episode, what else it got]. RLlib's own
runners wrote `tests/golden/rllib_callbacks/calls.json`, see the `make.py` beside it.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

__all__ = ["GOLDEN", "SCENARIOS", "Scenario", "Steps", "agents_env", "golden", "policy_of", "recorder"]

GOLDEN = Path(__file__).with_name("golden") / "rllib_callbacks" / "calls.json"

#: Lengths of the episodes of each environment, over and over.
LENGTHS = ((3, 5), (4, 2, 1), (2,))


class Scenario(NamedTuple):
    """How a runner samples.

    Attributes:
        stack: ``"old"``: RLlib's RolloutWorker; ``"new"``: its SingleAgentEnvRunner or MultiAgentEnvRunner.
        agents: What the agents do, see `agents_env`; None: there is one agent.
        num_envs: Number of environments.
        samples: Number of calls of ``sample``.
        config: Fields that both libraries have.
    """

    stack: str
    agents: str | None = None
    num_envs: int = 1
    samples: int = 3
    config: dict[str, Any] = {}  # noqa: RUF012 - never changed


_WHOLE = {"batch_mode": "complete_episodes"}
_BY_AGENTS = {"count_steps_by": "agent_steps"}

SCENARIOS: dict[str, Scenario] = {
    f"{stack}, {agents or 'one agent'}, {n} env, {how}": Scenario(stack, agents, n, 3, config)
    for stack, agents in [
        *(("old", agents) for agents in (None, "together", "turns", "come and go")),
        *(("new", agents) for agents in (None, "together", "turns", "come and go")),
    ]
    for n in (1, 3)
    for how, config in [
        ("fragments of 4", {"rollout_fragment_length": 4}),
        ("fragments of 2", {"rollout_fragment_length": 2}),
        ("whole episodes", {"rollout_fragment_length": 4, **_WHOLE}),
        ("agent steps", {"rollout_fragment_length": 4, **_BY_AGENTS}),
    ]
    # RLlib counts the rows of each environment, rlio those of all.
    if (how != "agent steps" or (agents and n == 1 and stack == "old"))
    # Without arguments, RLlib's env runners take one episode of each environment; `run` has its own rule.
    and not (how == "whole episodes" and stack == "new")
}


class Lengths:
    """Counts the episodes of an environment, and knows their lengths."""

    made = count()

    def __init__(self, context: Any = None) -> None:
        index = getattr(context, "vector_index", None)
        self.index = next(Lengths.made) if index is None else index
        self.number = -1

    def next(self) -> int:
        self.number += 1
        lengths = LENGTHS[self.index % len(LENGTHS)]
        return lengths[self.number % len(lengths)]


class Steps(gym.Env[Any, Any]):
    """Episodes of known lengths, which terminate; the reward is the step's number."""

    observation_space = Box(-1, 99, (3,), np.float32)
    action_space = Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self._lengths = Lengths(config)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._t, self._length = 0, self._lengths.next()
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        return self._seen(), float(self._t), self._t == self._length, False, {"t": self._t}

    def _seen(self) -> Any:
        return np.array([self._lengths.index, self._lengths.number, self._t], np.float32)


def agents_env(base: Any, agents: str) -> Any:
    """An environment of several agents, as a subclass of ``base``.

    Args:
        base: `rlio.MultiAgentEnv`, or RLlib's.
        agents: ``"together"``: "a" and "b" act in each step. ``"turns"``: one after the other. ``"come and
            go"``: "a" stays, "b" comes after a step, "c" leaves after two.
    """

    class Agents(base):  # type: ignore[misc]
        possible_agents = ["a", "b"] if agents != "come and go" else ["a", "b", "c"]
        observation_spaces = dict.fromkeys(possible_agents, Steps.observation_space)
        action_spaces = dict.fromkeys(possible_agents, Steps.action_space)

        def __init__(self, config: Any = None) -> None:
            super().__init__()
            self.agents = list(self.possible_agents)
            self._lengths = Lengths(config)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self._t, self._length = 0, self._lengths.next()
            obs = self._seen(self._present())
            self._acted = set(obs)
            return obs, {agent: {} for agent in obs}

        def _present(self) -> list[str]:
            if agents == "turns":
                return ["ab"[self._t % 2]]
            if agents == "together":
                return ["a", "b"]
            return ["a"] + ["b"] * (self._t >= 1) + ["c"] * (self._t < 2)

        def _seen(self, who: list[str]) -> dict[str, Any]:
            seen = [self._lengths.index, self._lengths.number, self._t]
            return {agent: np.array(seen, np.float32) for agent in who}

        def step(self, action_dict: Any) -> Any:
            self._t += 1
            over = self._t == self._length
            leaves = agents == "come and go" and self._t == 2
            who = self._present()
            if over and agents == "turns" and self._t > 1:
                who = ["a", "b"]  # All that acted see the end.
            obs = self._seen(sorted({*who, *("c" * leaves)}))
            # None with an agent's first observation, which RLlib drops.
            rewards = {agent: float(self._t) for agent in obs if agent in self._acted}
            self._acted |= obs.keys()
            ended = {"c": True} if leaves else {}
            flags = ended | {"__all__": over}
            return obs, rewards, flags, {"__all__": False}, {agent: {} for agent in obs}

    return Agents


def policy_of(agent_id: str, *args: Any, **kwargs: Any) -> str:
    """The policy of an agent: the first of two acts for all but "b"."""
    return "second" if agent_id == "b" else "first"


def recorder(base: Any) -> Any:
    """A subclass of ``base``, `rlio.Callbacks` or RLlib's, whose attribute ``calls`` has all calls.

    It also counts postprocessed rows in ``episode.custom_metrics``, if episodes have them.
    """

    class Recorder(base):  # type: ignore[misc]
        calls: list[Any] = []  # noqa: RUF012 - RLlib makes the object

        def _add(self, name: str, episode: Any, env_index: int | None, *more: Any) -> None:
            known = Recorder.__dict__["_known"]
            env = getattr(episode, "env_index", getattr(episode, "env_id", None))
            env = env_index if env is None else env
            eps_id = next(
                getattr(episode, each) for each in ("eps_id", "episode_id", "id_") if hasattr(episode, each)
            )
            if name == "on_episode_created":
                known[eps_id] = env, sum(other == env for other, _ in known.values())
            length = getattr(episode, "length", None)
            steps = getattr(episode, "env_t", getattr(episode, "t", 0)) if length is None else length
            self.calls.append([name, *known[eps_id], max(steps, 0), *more])

        _known: dict[Any, Any] = {}  # noqa: RUF012 - as above

        def on_episode_created(self, *, episode: Any, **kwargs: Any) -> None:
            self._add("on_episode_created", episode, kwargs.get("env_index"))

        def on_episode_start(self, *, episode: Any, **kwargs: Any) -> None:
            self._add("on_episode_start", episode, kwargs.get("env_index"))

        def on_episode_step(self, *, episode: Any, **kwargs: Any) -> None:
            self._add("on_episode_step", episode, kwargs.get("env_index"), _total(episode))

        def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
            metrics = sorted(getattr(episode, "custom_metrics", {}).items())
            self._add(
                "on_episode_end", episode, kwargs.get("env_index"), _total(episode), list(map(list, metrics))
            )

        def on_postprocess_trajectory(
            self,
            *,
            episode: Any,
            agent_id: Any,
            policy_id: str,
            postprocessed_batch: Any,
            original_batches: Any,
            **kwargs: Any,
        ) -> None:
            rows = postprocessed_batch
            episode.custom_metrics["rows"] = episode.custom_metrics.get("rows", 0) + len(rows["rewards"])
            agents = sorted(agent for agent in original_batches if agent not in (None, "agent0"))
            self._add(
                "on_postprocess_trajectory",
                episode,
                None,
                None if agent_id == "agent0" else agent_id,
                policy_id,
                agents,
                np.asarray(rows["obs"])[:, 2].astype(int).tolist(),
                np.asarray(rows["rewards"], float).tolist(),
                np.asarray(rows["terminateds"]).tolist(),
                np.asarray(rows["t"]).tolist(),
            )

        def on_sample_end(self, *, samples: Any, **kwargs: Any) -> None:
            self.calls.append(["on_sample_end", *_sizes(samples)])

    return Recorder


def _total(episode: Any) -> float:
    if hasattr(episode, "total_reward"):
        return float(episode.total_reward)
    return float(episode.get_return())


def _sizes(samples: Any) -> list[Any]:
    """(Environment steps, rows of each policy) of a batch; (first step, steps, is done) of each episode."""
    if isinstance(samples, list):
        return [[_began_at(episode), _steps(episode), bool(episode.is_done)] for episode in samples]
    if hasattr(samples, "policy_batches"):
        rows = {policy: len(batch["rewards"]) for policy, batch in samples.policy_batches.items()}
        return [samples.env_steps(), dict(sorted(rows.items()))]
    return [len(samples["rewards"]), {"default_policy": len(samples["rewards"])}]


def _began_at(episode: Any) -> int:
    started = getattr(episode, "env_t_started", getattr(episode, "t_started", None))
    return int(episode.observations[0][2] if started is None else started)


def _steps(episode: Any) -> int:
    return int(episode.env_steps() if hasattr(episode, "env_t_started") else len(episode))


def golden() -> dict[str, list[Any]]:
    """The calls of RLlib's runners, by scenario."""
    found: dict[str, list[Any]] = json.loads(GOLDEN.read_text())
    return found
