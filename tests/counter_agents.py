"""A multi-agent environment whose every row can be judged: who acts when follows from the episode's seed.

An observation is [seed of the episode, agent, step of the environment]. Agents join late, leave early, act
every so many steps, are born done, get rewards before they join and, if asked for, after they have left;
final observations are shown or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.columns import Columns
from rlio.envs.multi_agent import MultiAgentEnv
from rlio.policies.policy import Policy

__all__ = ["AgentCounter", "Chosen", "by_agent", "check_stream", "map_agent", "plan"]

AGENTS = 5
LONGEST = 30


class Part(NamedTuple):
    """What one agent does in an episode, and what its rows are to be."""

    acts: tuple[int, ...]
    end: int
    #: Whether its own flag is set, and which one: (terminated, truncated); None: that of all.
    flags: tuple[bool, bool] | None
    shown: bool
    born_done: bool
    early: bool


class Plan(NamedTuple):
    """An episode."""

    length: int
    flags: tuple[bool, bool]
    parts: tuple[Part, ...]


@lru_cache(maxsize=100_000)
def plan(seed: int, longest: int = LONGEST) -> Plan:
    """The episode of a seed."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, longest + 1))
    numbers = rng.integers(0, 1000, (AGENTS, 6)).tolist()
    parts = []
    for i, (a, b, c, d, e, f) in enumerate(numbers):
        join = 0 if i == 0 else a % 4
        leaves = c % 3 == 0 and i > 0
        end = min(join + b % (length + 1), length) if leaves else length
        if i == 0:
            end = length
        born_done = leaves and end == join and 0 < join < length
        acts = tuple(range(join, end, 1 + d % 3))
        own = ((True, False), (False, True))[e % 2] if leaves and end < length else None
        parts.append(Part(acts, end, own, f % 2 == 0, born_done, early=a % 2 == 0))
    return Plan(length, ((True, False), (False, True))[int(rng.integers(2))], tuple(parts))


def reward(agent: int, step: int) -> float:
    """Of ``agent`` for the step that led to ``step``."""
    return 100.0 * agent + step


class AgentCounter(MultiAgentEnv):
    """Plays `plan`.

    Args:
        late: Whether agents get rewards after they have left.
        repeats: Whether what is final is said again in every step, as some environments do.
    """

    possible_agents = tuple(f"a{i}" for i in range(AGENTS))
    observation_spaces = {f"a{i}": Box(0, np.inf, (3,), np.float64) for i in range(AGENTS)}  # noqa: RUF012
    action_spaces = {f"a{i}": Discrete(7) for i in range(AGENTS)}  # noqa: RUF012

    def __init__(self, *, late: bool = False, repeats: bool = False) -> None:
        self._late = late
        self._repeats = repeats

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        assert seed is not None
        self._seed, self._plan, self._t = seed, plan(seed), 0
        return self._seen(), {"__common__": {"t": 0}}

    def _obs(self, agent: int) -> NDArray[np.float64]:
        return np.array([self._seed, agent, self._t], np.float64)

    def _seen(self) -> dict[str, Any]:
        t = self._t
        found = {}
        for i, part in enumerate(self._plan.parts):
            if (
                t in part.acts
                or (part.acts and part.shown and (t == part.end or (self._repeats and t > part.end)))
                or (part.born_done and t == part.end)
            ):
                found[f"a{i}"] = self._obs(i)
        return found

    def step(self, actions: Any) -> Any:
        due = {f"a{i}" for i, part in enumerate(self._plan.parts) if self._t in part.acts}
        assert actions.keys() == due, (actions, due)
        assert all(action == chosen(int(agent[1:]), self._t) for agent, action in actions.items())
        self._t += 1
        t, over = self._t, self._t == self._plan.length
        rewards, terminateds, truncateds = {}, {"__all__": False}, {"__all__": False}
        infos: dict[str, Any] = {"__common__": {"t": t}}
        for i, part in enumerate(self._plan.parts):
            agent = f"a{i}"
            if part.acts and (part.early or t > part.acts[0]) and (self._late or t <= part.end):
                rewards[agent] = reward(i, t)
                infos[agent] = {"t": t}
            if part.acts or part.born_done:
                flags = part.flags or ((True, False) if part.born_done else None)
                if flags and (t == part.end or (self._repeats and t > part.end)):
                    terminateds[agent], truncateds[agent] = flags
        if over:
            terminateds["__all__"], truncateds["__all__"] = self._plan.flags
        return self._seen(), rewards, terminateds, truncateds, infos


def chosen(agent: int, t: int) -> int:
    """What `Chosen` does."""
    return (3 * agent + t) % 7


class Chosen(Policy):
    """Acts as the observation says, and records what it saw."""

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        actions = (3 * obs[:, 1] + obs[:, 2]).astype(np.int64) % 7
        return actions, state, {"seen": obs.copy()}


def map_agent(agent_id: str, episode: Any) -> str:
    """Even and odd agents have policies of their own."""
    return ("even", "odd")[int(agent_id[1:]) % 2]


# ---- judging ----


def by_agent(batches: Iterable[MultiAgentBatch]) -> dict[tuple[int, int], list[SampleBatch]]:
    """(seed of the episode, agent) -> its rows, in the order in which they came."""
    found: dict[tuple[int, int], list[SampleBatch]] = {}
    for batch in batches:
        for policy_id, rows in batch.items():
            assert np.array_equal(rows["agent_index"] % 2, np.full(len(rows), policy_id == "odd"))
            key = rows["obs"][:, 0] * 10 + rows["obs"][:, 1]
            bounds = [0, *(np.flatnonzero(key[1:] != key[:-1]) + 1).tolist(), len(rows)]
            for a, b in pairwise(bounds):
                part = rows[a:b]
                found.setdefault((int(part["obs"][0, 0]), int(part["obs"][0, 1])), []).append(part)
    return found


def check_stream(batches: list[MultiAgentBatch], *, whole: bool = False, late: bool = False) -> int:
    """Each row of ``batches``, which follow one another, is a true transition; returns how many there are.

    Args:
        batches: All that a runner gave since it began.
        whole: Whether all episodes must be whole, those of all agents.
        late: Whether agents got rewards after they left.
    """
    parts = by_agent(batches)
    rows = 0
    seeds = {seed for seed, _ in parts}
    for (seed, agent), own in parts.items():
        episode = plan(seed)
        part = episode.parts[agent]
        n = sum(map(len, own))
        rows += n
        _check_agent(seed, agent, own, part, episode, late=late)
        if whole:
            assert n == len(part.acts)
    if whole:
        for seed in seeds:
            acting = {i for i, part in enumerate(plan(seed).parts) if part.acts}
            assert acting == {agent for other, agent in parts if other == seed}
    return rows


def _check_agent(
    seed: int, agent: int, own: list[SampleBatch], part: Part, episode: Plan, *, late: bool
) -> None:
    def joined(name: str) -> NDArray[Any]:
        return np.concatenate([np.asarray(rows[name]) for rows in own])

    n = sum(map(len, own))
    acts, following = np.array(part.acts[:n]), np.array([*part.acts[1:], part.end][:n])
    is_last = np.arange(n) == len(part.acts) - 1
    unseen = is_last & (not part.shown)
    flags = part.flags or episode.flags
    assert n <= len(part.acts)
    assert np.array_equal(joined("obs"), np.stack([np.full(n, seed), np.full(n, agent), acts], 1))
    expected = np.stack([np.full(n, seed), np.full(n, agent), following], 1) * ~unseen[:, None]
    assert np.array_equal(joined("new_obs"), expected)
    valid = [
        rows[Columns.NEXT_OBS_VALID] if Columns.NEXT_OBS_VALID in rows else np.ones(len(rows), bool)
        for rows in own
    ]
    assert np.array_equal(np.concatenate(valid), ~unseen)
    assert np.array_equal(joined("t"), acts)
    assert np.array_equal(joined("actions"), (3 * agent + acts) % 7)
    assert np.array_equal(joined("terminateds"), is_last & flags[0])
    assert np.array_equal(joined("truncateds"), is_last & flags[1])
    starts = np.where(np.arange(n) == 0, 0 if part.early else acts, acts)
    ends = np.where(is_last & late, episode.length, following)
    assert np.array_equal(joined("rewards"), _sums(agent, starts, ends))
    assert len(set(joined("eps_id").tolist())) == 1


def _sums(agent: int, starts: NDArray[Any], ends: NDArray[Any]) -> NDArray[Any]:
    """Rewards of the steps after ``starts`` up to ``ends``."""
    return 100.0 * agent * (ends - starts) + (ends * (ends + 1) - starts * (starts + 1)) / 2
