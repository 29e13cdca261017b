"""`MultiAgentEpisode`: the data of all agents in one episode, or in a chunk of it.

Example:
    >>> import numpy as np
    >>> from rlio.batch.episode import Episode
    >>> white = Episode(7, agent_id="white", observations=[0, 2, 4], actions=[1, 1], rewards=[0.0, 1.0])
    >>> black = Episode(7, agent_id="black", observations=[1, 3], actions=[5], rewards=[2.0])
    >>> episode = MultiAgentEpisode(
    ...     7,
    ...     {"white": white, "black": black},
    ...     env_ts={"white": [0, 2, 4], "black": [1, 3]},
    ...     policy_ids={"white": "main", "black": "main"},
    ...     env_t=4,
    ... )
    >>> episode.env_steps(), episode.agent_steps(), episode.get_return()
    (4, 3, 3.0)
    >>> episode.get_actions(1), episode.get_observations(slice(2, 5))
    ({'black': np.int64(5)}, {'white': array([2, 4]), 'black': array([3])})
    >>> episode.to_batch()["main"]["t"].tolist()
    [0, 2, 1]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, Any, Self, TypeAlias, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch, concat_samples
from rlio.batch.arrays import Column, object_column, row_count, take_leaf, to_numpy
from rlio.batch.columns import Columns
from rlio.batch.episode import Episode
from rlio.batch.nested import leaves, map_structure, unflatten
from rlio.envs.multi_agent import AgentId
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt
from rlio.support.options import checked_keywords
from rlio.support.states import fitting, flag_in, text_in, whole_number

__all__ = ["Indices", "MultiAgentEpisode"]

#: One agent, several agents, or None for all.
Agents: TypeAlias = AgentId | Collection[AgentId] | None
#: One step, several steps, or None for all.
Indices: TypeAlias = int | slice | Sequence[int] | None


class LookKeywords(TypedDict, total=False):
    """The keyword options, with defaults, of `MultiAgentEpisode.get_actions` and its like."""

    env_steps: Annotated[bool, True]
    neg_index_as_lookback: Annotated[bool, False]
    return_list: Annotated[bool, False]
    fill: Annotated[float | None, None]


@dataclass(slots=True, eq=False, repr=False)
class MultiAgentEpisode:
    """The trajectories of the agents of one episode, from environment step ``env_t_started`` on.

    Agents need not act in every step. Each has its own `Episode`, which counts only the steps in which it
    acted, and the environment step of each of its observations. A row belongs to the chunk in which its
    outcome became known. Arrays are kept, not copied; do not change an episode.

    Attributes:
        id_: The episode's id.
        agent_episodes: Agent id -> its trajectory; ``t_started`` counts the agent's own steps.
        env_ts: Agent id -> environment steps of its observations, ascending, one per observation. Each action
            was taken at the step of its observation; the last observation may have no action.
        policy_ids: Agent id -> id of the policy that acted for it.
        agent_indexes: Agent id -> its ``agent_index`` in batches; default: the order of ``agent_episodes``.
        env_t_started: Environment steps before this chunk.
        env_t: Environment steps at the end of this chunk.
        terminated: Whether the episode terminated here, for all agents.
        truncated: Whether the episode was cut off here.
        lookback: Some of the preceding steps, for callers that need a short history; not part of the chunk.

    Raises:
        SchemaError: The mappings have different agents, or ``env_ts`` does not fit the observations.
    """

    id_: int | str
    agent_episodes: dict[AgentId, Episode]
    _: KW_ONLY
    env_ts: dict[AgentId, Any]
    policy_ids: dict[AgentId, str]
    agent_indexes: dict[AgentId, int] = field(default_factory=dict)
    env_t_started: int = 0
    env_t: int
    terminated: bool = False
    truncated: bool = False
    lookback: MultiAgentEpisode | None = None

    def __post_init__(self) -> None:
        self.agent_episodes = dict(self.agent_episodes)
        self.env_ts = {agent: np.asarray(ts, np.int64) for agent, ts in self.env_ts.items()}
        self.policy_ids = dict(self.policy_ids)
        in_order = {agent: i for i, agent in enumerate(self.agent_episodes)}
        self.agent_indexes = dict(self.agent_indexes or in_order)
        self.env_t_started, self.env_t = int(self.env_t_started), int(self.env_t)
        self.terminated, self.truncated = bool(self.terminated), bool(self.truncated)
        self._check()

    def _check(self) -> None:
        if self.env_t < self.env_t_started:
            raise SchemaError(f"env_t={self.env_t} is before env_t_started={self.env_t_started}")
        for name in ("env_ts", "policy_ids", "agent_indexes"):
            if getattr(self, name).keys() != self.agent_episodes.keys():
                raise SchemaError(
                    f"{name} has the agents {excerpt(list(getattr(self, name)))}, but the episodes are of "
                    f"{excerpt(list(self.agent_episodes))}"
                )
        for agent, episode in self.agent_episodes.items():
            ts, seen = self.env_ts[agent], row_count(episode.observations)
            if ts.shape != (seen,) or (np.diff(ts) <= 0).any():
                raise SchemaError(
                    f"agent {excerpt(agent)} has {seen} observations, at the steps {excerpt(ts.tolist())}: "
                    "expected one step for each, ascending"
                )

    # ---- properties ----

    def __len__(self) -> int:
        """Number of environment steps."""
        return self.env_t - self.env_t_started

    def env_steps(self) -> int:
        """Number of environment steps."""
        return len(self)

    def agent_steps(self) -> int:
        """Number of steps of all agents, which is the number of rows."""
        return sum(map(len, self.agent_episodes.values()))

    @property
    def agent_ids(self) -> list[AgentId]:
        """Agents with data in this chunk."""
        return list(self.agent_episodes)

    @property
    def is_done(self) -> bool:
        """Whether the episode ended in this chunk."""
        return self.terminated or self.truncated

    def policy_for(self, agent_id: AgentId) -> str:
        """Id of the policy that acts for an agent.

        Raises:
            OptionError: The agent is not in this chunk.
        """
        return self.policy_ids[self._known(agent_id)]

    def get_return(self) -> float:
        """Sum of all agents' rewards in this chunk, in float64."""
        return sum(self.agent_returns().values())

    def agent_returns(self) -> dict[AgentId, float]:
        """Sum of each agent's rewards in this chunk."""
        return {agent: episode.total_reward for agent, episode in self.agent_episodes.items()}

    def __repr__(self) -> str:
        end = " and ".join(name for name in ("terminated", "truncated") if getattr(self, name)) or "ongoing"
        return (
            f"MultiAgentEpisode({excerpt(self.id_)}: env steps {self.env_t_started} to {self.env_t}, "
            f"{self.agent_steps()} steps of {len(self.agent_episodes)} agents, {end})"
        )

    def _known(self, agent_id: AgentId) -> AgentId:
        if agent_id not in self.agent_episodes:
            raise OptionError(
                f"agent {excerpt(agent_id)} is not in this chunk: expected one of {excerpt(self.agent_ids)}"
            )
        return agent_id

    # ---- reading values ----

    @checked_keywords
    def get_observations(
        self, indices: Indices = None, agent_ids: Agents = None, **options: Unpack[LookKeywords]
    ) -> Any:
        """Observations by agent.

        Args:
            indices: Steps counted from the beginning of the chunk, negative ones from its end: environment
                steps, or with ``env_steps=False`` each agent's own steps. There is one more observation than
                there are steps.
            agent_ids: As in `get_actions`.
            options: As in `get_actions`.

        Returns:
            As in `get_actions`.
        """
        return self._get("observations", indices, agent_ids, **options)

    @checked_keywords
    def get_actions(
        self, indices: Indices = None, agent_ids: Agents = None, **options: Unpack[LookKeywords]
    ) -> Any:
        """Actions by agent.

        Args:
            indices: As in `get_observations`.
            agent_ids: The agent or agents; None: all.
            options: ``env_steps``: True for environment steps, False for each agent's own.
                ``neg_index_as_lookback``: whether negative indices are steps before the chunk, in its
                ``lookback``. ``return_list``: return one dict per step. ``fill``: a number that replaces
                missing values, also those outside the episode: indices then have no bounds, and slices are
                not cut to the chunk.

        Returns:
            Agent id -> a value, or for several steps a column of values, nested as the space. Agents without
            values are left out.

        Raises:
            OptionError: An agent is not in this chunk, an index is out of range, or a column's dtype cannot
                hold ``fill``.
        """
        return self._get("actions", indices, agent_ids, **options)

    @checked_keywords
    def get_rewards(
        self, indices: Indices = None, agent_ids: Agents = None, **options: Unpack[LookKeywords]
    ) -> Any:
        """Rewards by agent, at the steps of the actions that earned them; options as in `get_actions`."""
        return self._get("rewards", indices, agent_ids, **options)

    @checked_keywords
    def get_infos(
        self, indices: Indices = None, agent_ids: Agents = None, **options: Unpack[LookKeywords]
    ) -> Any:
        """Infos by agent that came with the rewards; options as in `get_actions`."""
        return self._get("infos", indices, agent_ids, **options)

    @checked_keywords
    def get_extra_outputs(
        self, name: str, indices: Indices = None, agent_ids: Agents = None, **options: Unpack[LookKeywords]
    ) -> Any:
        """One further policy column, for the agents that have it; options as in `get_actions`."""
        return self._get(name, indices, agent_ids, **options)

    def _get(
        self,
        what: str,
        indices: Indices,
        agent_ids: Agents,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        return_list: bool = False,
        fill: float | None = None,
    ) -> Any:
        if return_list and not env_steps:
            raise OptionError(
                "return_list=True requires env_steps=True, because each agent has its own steps"
            )
        given = [agent_ids] if isinstance(agent_ids, (str, int)) else agent_ids
        chosen = self.agent_ids if given is None else [self._known(agent) for agent in given]
        is_open = fill is not None  # Indices have no bounds.
        source = self.with_lookback() if neg_index_as_lookback or is_open else self
        times = np.zeros(0, np.int64)
        if env_steps:
            size = len(self) + (what == "observations")
            times = self.env_t_started + _chosen(
                indices, size, neg_index_as_lookback, is_open=is_open, check=True
            )
        found: dict[AgentId, tuple[Column, NDArray[np.int64]]] = {}
        for agent in chosen:
            column = source._column(agent, what)
            if column is None:
                continue
            ts = source.env_ts[agent][: row_count(column)]
            if not env_steps:
                # Number the agent's own steps from the first one in this chunk.
                before = self.agent_episodes[agent].t_started - source.agent_episodes[agent].t_started
                ts = np.arange(len(ts)) - before
                times = _chosen(indices, len(ts) - before, neg_index_as_lookback, is_open=is_open)
            at = _positions(ts, times)
            found[agent] = column, at if return_list or is_open else at[at >= 0]
        if return_list:
            return [
                {
                    agent: _rows(column, at[i : i + 1], fill, one=True)
                    for agent, (column, at) in found.items()
                    if at[i] >= 0 or fill is not None
                }
                for i in range(len(times))
            ]
        is_one = isinstance(indices, (int, np.integer))
        return {
            agent: _rows(column, at, fill, one=is_one) for agent, (column, at) in found.items() if len(at)
        }

    def _column(self, agent: AgentId, what: str) -> Column | None:
        if agent not in self.agent_episodes:
            return None
        episode = self.agent_episodes[agent]
        if what in _COLUMNS:
            column: Column | None = getattr(episode, what)
            return column
        return episode.extra_outputs.get(what)

    # ---- parts ----

    def with_lookback(self) -> MultiAgentEpisode:
        """The `lookback` and this chunk, joined in new arrays; the chunk itself if it has no lookback."""
        return self if self.lookback is None else self.lookback.concat(self)

    def slice(self, start: int = 0, stop: int | None = None) -> Self:
        """The environment steps ``start`` to ``stop``, counted from this chunk's first, as views.

        A row is in the slice in which its agent acted; rows from before the chunk are in the first slice.
        """
        first, end, _ = slice(start, stop).indices(len(self))
        end = max(first, end)
        low = self.env_t_started + first if first else np.iinfo(np.int64).min
        high = self.env_t_started + end
        agents = {}
        for agent, episode in self.agent_episodes.items():
            acted = self.env_ts[agent][: len(episode)]
            a, b = np.searchsorted(acted, [low, high]).tolist()
            agents[agent] = (a, len(episode) if end == len(self) else b)
        last = end == len(self)
        return self._part(
            {agent: at for agent, at in agents.items() if at[1] > at[0]},
            env_t_started=self.env_t_started + first,
            env_t=high,
            terminated=self.terminated and last,
            truncated=self.truncated and last,
            lookback=None if first else self.lookback,
        )

    def _part(self, rows: Mapping[AgentId, tuple[int, int]], **changes: Any) -> Self:
        """The rows from, to of each agent in ``rows``."""
        agents = {agent: self.agent_episodes[agent].slice(*at) for agent, at in rows.items()}
        return replace(
            self,
            agent_episodes=agents,
            env_ts={
                agent: self.env_ts[agent][rows[agent][0] :][: row_count(part.observations)]
                for agent, part in agents.items()
            },
            policy_ids={agent: self.policy_ids[agent] for agent in agents},
            agent_indexes={agent: self.agent_indexes[agent] for agent in agents},
            **changes,
        )

    def tail(self, steps: int) -> MultiAgentEpisode:
        """The last ``steps`` steps of each agent that has not ended, lookback included, as copies."""
        whole = self.with_lookback()
        rows = {
            agent: (max(0, len(episode) - steps), len(episode))
            for agent, episode in whole.agent_episodes.items()
            if len(episode) and not episode.is_done
        }
        starts = [int(whole.env_ts[agent][at[0]]) for agent, at in rows.items()]
        start = min([*starts, self.env_t])
        part = whole._part(rows, env_t_started=start, terminated=False, truncated=False, lookback=None)
        for agent, episode in part.agent_episodes.items():
            part.agent_episodes[agent] = episode.tail(steps)
            part.env_ts[agent] = part.env_ts[agent].copy()
        return part

    def cut(self, lookback: int = 0) -> Self:
        """The chunk that follows this one, still without steps.

        It holds the last observation of each agent that has not ended.

        Args:
            lookback: Number of each agent's steps to keep as the new chunk's `lookback`.

        Raises:
            OptionError: The episode ended.
        """
        if self.is_done:
            raise OptionError(f"{self!r} has ended: no chunk follows it")
        rows = {
            agent: (len(episode), len(episode))
            for agent, episode in self.agent_episodes.items()
            if not episode.is_done and episode.has_final_observation
        }
        before = self.tail(lookback) if lookback else None
        return self._part(rows, env_t_started=self.env_t, lookback=before)

    def concat(self, next_chunk: MultiAgentEpisode) -> Self:
        """This chunk and the one that follows it, joined in new arrays.

        Raises:
            SchemaError: ``next_chunk`` belongs to another episode or does not follow this chunk, or an
                agent's steps are not consecutive.
        """
        if self.id_ != next_chunk.id_ or self.is_done or next_chunk.env_t_started != self.env_t:
            raise SchemaError(
                f"{self!r} cannot be followed by {next_chunk!r}: expected the same id, an unfinished first "
                "chunk, and a second one that begins at the step where the first stops"
            )
        agents, env_ts = dict(self.agent_episodes), dict(self.env_ts)
        for agent, chunk in next_chunk.agent_episodes.items():
            ts = next_chunk.env_ts[agent]
            if agent in agents:
                before = agents[agent]
                agents[agent] = before.concat(chunk)
                ts = np.concatenate([self.env_ts[agent][: len(before)], ts])
                if self.policy_ids[agent] != next_chunk.policy_ids[agent]:
                    raise SchemaError(
                        f"agent {excerpt(agent)} has the policy {excerpt(self.policy_ids[agent])} here, but "
                        f"{excerpt(next_chunk.policy_ids[agent])} in the next chunk"
                    )
            else:
                agents[agent] = chunk
            env_ts[agent] = ts
        return replace(
            self,
            agent_episodes=agents,
            env_ts=env_ts,
            policy_ids=self.policy_ids | next_chunk.policy_ids,
            agent_indexes=self.agent_indexes | next_chunk.agent_indexes,
            env_t=next_chunk.env_t,
            terminated=next_chunk.terminated,
            truncated=next_chunk.truncated,
        )

    def leads_to(self, chunk: MultiAgentEpisode) -> bool:
        """Whether `concat` can join ``chunk`` to this one, because it continues this one for all agents."""
        return (
            self.id_ == chunk.id_
            and self.env_t == chunk.env_t_started
            and all(
                before.leads_to(chunk.agent_episodes[agent])
                and self.policy_ids[agent] == chunk.policy_ids[agent]
                for agent, before in self.agent_episodes.items()
                if agent in chunk.agent_episodes
            )
        )

    # ---- as rows ----

    def to_batch(self) -> MultiAgentBatch:
        """The rows, policy by policy, agent by agent; see `Episode.to_batch`.

        ``t`` is the environment step in which the agent acted; ``agent_index`` identifies the agent.
        """
        parts: dict[str, list[SampleBatch]] = {}
        for agent, episode in self.agent_episodes.items():
            if not len(episode):
                continue
            batch = episode.to_batch()
            if "agent_id" in batch:
                del batch["agent_id"]
            batch[Columns.T] = self.env_ts[agent][: len(episode)]
            batch[Columns.AGENT_INDEX] = np.full(len(episode), self.agent_indexes[agent], np.int64)
            parts.setdefault(self.policy_ids[agent], []).append(batch)
        return MultiAgentBatch(
            {policy_id: concat_samples(own) for policy_id, own in parts.items()}, self.env_steps()
        )

    @classmethod
    def from_batch(
        cls,
        batch: MultiAgentBatch,
        *,
        agents: Sequence[AgentId] | None = None,
        id_: int | str | None = None,
    ) -> Self:
        """Make an episode, or chunk, from the rows in ``batch``.

        Assumes that an agent saw its last observation one step after its last action. The episode ended if
        all agents ended.

        Args:
            batch: Rows of one episode, in order for each agent, with ``t``.
            agents: ``agent_index`` -> agent id: an environment's ``possible_agents``; None uses the index
                itself.
            id_: The episode's id if there is no ``eps_id``.

        Raises:
            MissingColumn: A column is missing, or there is neither ``eps_id`` nor ``id_``.
            SchemaError: The batch has no rows, or rows of several episodes, or an agent's rows are out of
                order.
        """
        found: dict[AgentId, Episode] = {}
        env_ts, policy_ids, indexes = {}, {}, {}
        for policy_id, rows in batch.items():
            if not len(rows):
                continue
            for index, own in _by_agent(rows, policy_id):
                agent = index if agents is None else agents[index]
                ts = to_numpy(own[Columns.T]).astype(np.int64)
                episode = _episode_of(own, agent, id_)
                final = [ts[-1:] + 1] if episode.has_final_observation else []
                found[agent], policy_ids[agent], indexes[agent] = episode, policy_id, index
                env_ts[agent] = np.concatenate([ts, *final])
        if not found:
            raise SchemaError("the batch has no rows: expected rows of one episode")
        ids = {episode.id_ for episode in found.values()}
        if len(ids) > 1:
            raise SchemaError(
                f"the rows belong to the episodes {excerpt(sorted(map(str, ids)))}: expected one"
            )
        acted = [env_ts[agent][: len(episode)] for agent, episode in found.items()]
        start = min(int(ts[0]) for ts in acted)
        is_over = all(episode.is_done for episode in found.values())
        terminated = is_over and any(episode.terminated for episode in found.values())
        return cls(
            ids.pop(),
            found,
            env_ts=env_ts,
            policy_ids=policy_ids,
            agent_indexes=indexes,
            env_t_started=start,
            env_t=max(int(ts[-1]) + 1 for ts in acted),
            terminated=terminated,
            truncated=is_over and not terminated,
        )

    # ---- state ----

    def get_state(self) -> dict[str, Any]:
        """The whole episode as nested dicts and lists of arrays and JSON values; see `save_state`."""
        return {
            "id": self.id_,
            **{name: getattr(self, name) for name in (*_NUMBERS, *_FLAGS)},
            "agents": [
                {
                    "id": agent,
                    "index": self.agent_indexes[agent],
                    "policy_id": self.policy_ids[agent],
                    "env_ts": self.env_ts[agent],
                    "episode": _state_of(episode),
                }
                for agent, episode in self.agent_episodes.items()
            ],
            "lookback": None if self.lookback is None else self.lookback.get_state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Make an episode from a `get_state` result.

        Raises:
            StateError: The state is not a MultiAgentEpisode's.
        """
        with fitting("this is not the state of a MultiAgentEpisode: it"):
            agents = {described["id"]: described for described in state["agents"]}
            lookback = state["lookback"]
            policy_ids = {agent: text_in(each, "policy_id", of=_STATE) for agent, each in agents.items()}
            return cls(
                state["id"],
                {agent: _from_state(each["episode"], state["id"], agent) for agent, each in agents.items()},
                env_ts={agent: each["env_ts"] for agent, each in agents.items()},
                policy_ids=policy_ids,
                agent_indexes={
                    agent: whole_number(each, "index", of=_STATE) for agent, each in agents.items()
                },
                **_numbers(state, _NUMBERS),
                lookback=None if lookback is None else cls.from_state(lookback),
            )


# ---- looking up ----


def _positions(ts: NDArray[np.int64], times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Position of each of ``times`` in the ascending ``ts``; -1 if absent."""
    at = np.searchsorted(ts, times)
    known = np.minimum(at, len(ts) - 1)
    return np.where((at < len(ts)) & (ts[known] == times), at, -1) if len(ts) else np.full(len(times), -1)


def _rows(column: Column, at: NDArray[np.int64], fill: float | None, *, one: bool = False) -> Any:
    """Rows of a column, with ``fill`` at positions of -1."""

    def rows(leaf: Any) -> Any:
        known = at >= 0
        if known.all() or fill is None:
            taken = take_leaf(leaf, at)
        else:
            values = to_numpy(leaf)
            taken = np.full((len(at), *values.shape[1:]), _fitting(fill, values.dtype), values.dtype)
            taken[known] = values[at[known]]
        return taken[0] if one else taken

    return map_structure(rows, column)


def _fitting(fill: float, dtype: np.dtype[Any]) -> Any:
    """``fill`` as ``dtype``, if that holds it."""
    with np.errstate(invalid="ignore"):
        holds = dtype.kind not in "biu" or np.asarray(float(fill)).astype(dtype) == fill
    if not holds:
        raise OptionError(f"fill={excerpt(fill)}: the values are {dtype}, which cannot hold it")
    return fill


def _chosen(
    indices: Indices, size: int, as_lookback: bool, *, is_open: bool, check: bool = False
) -> NDArray[np.int64]:
    """The steps ``indices`` of ``size`` steps, counted from the first one; negative ones precede it.

    Args:
        indices: The steps.
        size: Number of steps.
        as_lookback: Whether negative indices are steps before the first one, instead of counting from the
            end.
        is_open: Whether steps out of range are allowed, and kept.
        check: Whether to refuse other indices out of range.

    Raises:
        OptionError: An index is out of range.
    """
    if indices is None:
        indices = slice(None)
    if isinstance(indices, slice):
        if as_lookback or is_open:
            return _counted(indices, size, as_lookback, is_open)
        return np.arange(size)[indices]
    at = np.atleast_1d(np.asarray(indices, np.int64))
    if as_lookback:
        return at
    at = np.where(at < 0, at + size, at)
    if check and not is_open and ((at < 0) | (at >= size)).any():
        raise OptionError(
            f"indices={excerpt(indices)}: the chunk has {size} such steps; to read earlier ones, set "
            "neg_index_as_lookback=True"
        )
    return at


def _counted(indices: slice, size: int, as_lookback: bool, is_open: bool) -> NDArray[np.int64]:
    """Indices of a slice that may begin before the first step, and if it ``is_open`` end after the last."""
    step = 1 if indices.step is None else indices.step
    ends = (0, size) if step > 0 else (size - 1, -1)
    start, stop = (
        end if given is None else given + size if given < 0 and not as_lookback else given
        for given, end in zip((indices.start, indices.stop), ends, strict=True)
    )
    return np.arange(start, stop if is_open else min(stop, size), step)


# ---- rows ----


def _by_agent(rows: SampleBatch, policy_id: str) -> list[tuple[int, SampleBatch]]:
    for name in (Columns.AGENT_INDEX, Columns.T):
        if name not in rows:
            raise MissingColumn(
                f"policy {excerpt(policy_id)} lacks this column, which distinguishes the rows", column=name
            )
    indexes = to_numpy(rows[Columns.AGENT_INDEX])
    return [(int(index), rows[np.flatnonzero(indexes == index)]) for index in np.unique(indexes)]


def _episode_of(rows: SampleBatch, agent: AgentId, id_: int | str | None) -> Episode:
    """An agent's rows as an episode; ``t`` must ascend but may have gaps."""
    ts = to_numpy(rows[Columns.T])
    if (np.diff(ts) <= 0).any():
        raise SchemaError(
            f"agent {excerpt(agent)} has rows of the steps {excerpt(ts.tolist())}: expected ascending steps",
            column=Columns.T,
        )
    own = rows.copy(shallow=True)
    own[Columns.T] = np.arange(len(rows))
    episode = Episode.from_batch(own, id_=id_)
    episode.agent_id = agent
    return episode


# ---- state ----

_STATE = "the state of a MultiAgentEpisode"
_NUMBERS = ("env_t_started", "env_t")
_FLAGS = ("terminated", "truncated")
_COLUMNS = ("observations", "actions", "rewards", "infos")


def _state_of(episode: Episode) -> dict[str, Any]:
    return {
        **{name: _column_state(getattr(episode, name)) for name in _COLUMNS},
        "extra_outputs": {name: _column_state(column) for name, column in episode.extra_outputs.items()},
        **{name: getattr(episode, name) for name in ("t_started", *_FLAGS)},
    }


def _column_state(column: Column | None) -> Any:
    """A list of paths and arrays, because JSON would turn nested tuples into lists."""
    if column is None:
        return None
    return [
        {"path": list(path), "values": list(leaf) if to_numpy(leaf).dtype == object else leaf}
        for path, leaf in leaves(column)
    ]


def _from_state(state: Mapping[str, Any], id_: int | str, agent: AgentId) -> Episode:
    return Episode(
        id_,
        agent_id=agent,
        extra_outputs={name: _column_of(column) for name, column in state["extra_outputs"].items()},
        **{name: _column_of(state[name]) for name in _COLUMNS},
        **_numbers(state, ("t_started",)),
    )


def _numbers(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Whole numbers of a state, by name, and how the episode ended."""
    flags = {name: flag_in(state, name, of=_STATE) for name in _FLAGS}
    return flags | {name: whole_number(state, name, of=_STATE) for name in names}


def _column_of(described: Any) -> Any:
    if described is None:
        return None
    paths = [tuple(part["path"]) for part in described]
    values = [part["values"] for part in described]
    return unflatten(paths, [object_column(each) if isinstance(each, list) else each for each in values])
