"""A multi-agent environment whose every row can be judged: who acts when follows from the episode's seed.

An observation is [seed of the episode, agent, step of the environment]. Agents join late, leave early, act
every so many steps, are born done, get rewards before they join and, if asked for, after they have left;
final observations are shown or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.columns import Columns
from rlio.envs.multi_agent import MultiAgentEnv
from rlio.policies.policy import Policy

__all__ = ["AgentCounter", "Chosen", "by_agent", "check_stream", "map_agent", "plan"]

AGENTS = 5
LONGEST = 30
#: Different episodes; seeds, and so observations, are many more.
PLANS = 2048


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


def plan(seed: int) -> Plan:
    """The episode of a seed."""
    return _plan(seed % PLANS)


@cache
def _plan(number: int) -> Plan:
    rng = np.random.default_rng(number)
    length = int(rng.integers(1, LONGEST + 1))
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


class Moment(NamedTuple):
    """What the environment gives at one step of a plan."""

    seen: tuple[int, ...]
    actions: dict[str, int]
    rewards: dict[str, float]
    terminateds: dict[str, bool]
    truncateds: dict[str, bool]
    infos: dict[str, Any]


@cache
def _moments(number: int, late: bool, repeats: bool) -> tuple[Moment, ...]:
    """A plan, step by step."""
    episode = _plan(number)
    return tuple(_moment(episode, t, late=late, repeats=repeats) for t in range(episode.length + 1))


def _moment(episode: Plan, t: int, *, late: bool, repeats: bool) -> Moment:
    parts = list(enumerate(episode.parts))
    seen = tuple(
        i
        for i, part in parts
        if t in part.acts
        or (part.acts and part.shown and (t == part.end or (repeats and t > part.end)))
        or (part.born_done and t == part.end)
    )
    actions = {f"a{i}": chosen(i, t) for i, part in parts if t in part.acts}
    moment = Moment(seen, actions, {}, {"__all__": False}, {"__all__": False}, {"__common__": {"t": t}})
    for i, part in parts:
        agent = f"a{i}"
        if part.acts and (part.early or t > part.acts[0]) and (late or t <= part.end):
            moment.rewards[agent] = reward(i, t)
            moment.infos[agent] = {"t": t}
        if part.acts or part.born_done:
            flags = part.flags or ((True, False) if part.born_done else None)
            if flags and (t == part.end or (repeats and t > part.end)):
                moment.terminateds[agent], moment.truncateds[agent] = flags
    if t == episode.length:
        moment.terminateds["__all__"], moment.truncateds["__all__"] = episode.flags
    return moment


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
        self._t = 0
        self._moments = _moments(seed % PLANS, self._late, self._repeats)
        self._obs = np.zeros((len(self._moments), AGENTS, 3))
        self._obs[..., 0] = seed
        self._obs[..., 1] = np.arange(AGENTS)
        self._obs[..., 2] = np.arange(len(self._moments))[:, None]
        return self._seen(), {"__common__": {"t": 0}}

    def _seen(self) -> dict[str, Any]:
        now = self._obs[self._t]
        return {f"a{i}": now[i] for i in self._moments[self._t].seen}

    def step(self, actions: Any) -> Any:
        assert actions == self._moments[self._t].actions
        self._t += 1
        _, _, rewards, terminateds, truncateds, infos = self._moments[self._t]
        return self._seen(), dict(rewards), dict(terminateds), dict(truncateds), dict(infos)


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


class _Tables(NamedTuple):
    """All plans as arrays, by plan and agent: what an agent's rows are to be."""

    #: Steps in which it acts, (PLANS, AGENTS, LONGEST), and how many they are.
    acts: NDArray[np.int64]
    rows: NDArray[np.int64]
    end: NDArray[np.int64]
    shown: NDArray[np.bool_]
    early: NDArray[np.bool_]
    terminates: NDArray[np.bool_]
    truncates: NDArray[np.bool_]
    #: Of the episode, (PLANS,).
    length: NDArray[np.int64]


@lru_cache(maxsize=1)
def _tables() -> _Tables:
    plans = [plan(seed) for seed in range(PLANS)]

    def table(value: Any, dtype: Any = np.int64) -> NDArray[Any]:
        return np.array([[value(part, episode) for part in episode.parts] for episode in plans], dtype)

    return _Tables(
        table(lambda part, _: part.acts + (0,) * (LONGEST - len(part.acts))),
        table(lambda part, _: len(part.acts)),
        table(lambda part, _: part.end),
        table(lambda part, _: part.shown, bool),
        table(lambda part, _: part.early, bool),
        table(lambda part, episode: (part.flags or episode.flags)[0], bool),
        table(lambda part, episode: (part.flags or episode.flags)[1], bool),
        np.array([episode.length for episode in plans]),
    )


def check_stream(batches: list[MultiAgentBatch], *, whole: bool = False, late: bool = False) -> int:
    """Each row of ``batches``, which follow one another, is a true transition; returns how many there are.

    Args:
        batches: All that a runner gave since it began.
        whole: Whether all episodes must be whole, those of all agents.
        late: Whether agents got rewards after they left.
    """
    rows = _by_agent_and_time(batches)
    tables, obs = _tables(), rows["obs"]
    assert np.array_equal(obs, obs.astype(np.int64))
    seed, agent = obs[:, 0].astype(np.int64), obs[:, 1].astype(np.int64)
    part = seed % PLANS, agent
    starts = np.flatnonzero(np.diff(seed * AGENTS + agent, prepend=-1))
    lengths = np.diff(starts, append=len(seed))
    number = np.arange(len(seed)) - np.repeat(starts, lengths)

    assert (number < tables.rows[part]).all(), "an agent has more rows than it acted"
    acts, is_last = tables.acts[(*part, number)], number == tables.rows[part] - 1
    after = tables.acts[(*part, np.minimum(number + 1, LONGEST - 1))]
    following = np.where(is_last, tables.end[part], after)
    unseen = is_last & ~tables.shown[part]
    since = np.where((number == 0) & tables.early[part], 0, acts)
    until = np.where(is_last & late, tables.length[part[0]], following)
    expected = {
        "obs": np.stack([seed, agent, acts], 1),
        "new_obs": np.stack([seed, agent, following], 1) * ~unseen[:, None],
        Columns.NEXT_OBS_VALID: ~unseen,
        "t": acts,
        "agent_index": agent,
        "actions": (3 * agent + acts) % 7,
        "terminateds": is_last & tables.terminates[part],
        "truncateds": is_last & tables.truncates[part],
        "rewards": _sums(agent, since, until),
    }
    for name, values in expected.items():
        wrong = np.flatnonzero((rows[name] != values).reshape(len(seed), -1).any(1))
        assert not len(wrong), (name, len(wrong), obs[wrong[0]], rows[name][wrong[0]], values[wrong[0]])
    # An episode has one id, and an id is of one episode.
    ids = len(np.unique(rows["eps_id"]))
    assert ids == len(np.unique(seed)) == len(np.unique(np.stack([seed, rows["eps_id"]], 1), axis=0))
    if whole:
        assert np.array_equal(lengths, tables.rows[part][starts])
        assert len(seed) == tables.rows[np.unique(seed) % PLANS].sum()
    return len(seed)


_JUDGED = ("obs", "new_obs", "t", "agent_index", "actions", "terminateds", "truncateds", "rewards", "eps_id")


def _by_agent_and_time(batches: list[MultiAgentBatch]) -> dict[str, NDArray[Any]]:
    """The columns that are judged: agent by agent, episode by episode, each one's rows as they came."""
    parts = [(policy_id, rows) for batch in batches for policy_id, rows in batch.items()]
    for policy_id, rows in parts:
        assert (rows["agent_index"] % 2 == (policy_id == "odd")).all()
    columns = {name: np.concatenate([rows[name] for _, rows in parts]) for name in _JUDGED}
    # Where batches have it not, all is there.
    there = [
        rows[Columns.NEXT_OBS_VALID] if Columns.NEXT_OBS_VALID in rows else np.ones(len(rows), bool)
        for _, rows in parts
    ]
    columns[Columns.NEXT_OBS_VALID] = np.concatenate(there)
    order = np.lexsort((columns["obs"][:, 1], columns["obs"][:, 0]))  # which is stable
    return {name: values[order] for name, values in columns.items()}


def _sums(agent: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any]) -> NDArray[Any]:
    """Rewards of the steps after ``starts`` up to ``ends``."""
    return 100.0 * agent * (ends - starts) + (ends * (ends + 1) - starts * (starts + 1)) / 2
