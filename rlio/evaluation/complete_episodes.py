"""`EpisodeAssembler`: joins episodes from rows that arrive in parts, and finds incomplete ones.

The episode id and the agent identify the parts of an episode. They may arrive in any order, from fragments,
batches and shards. An episode is whole if it has every step from 0 to one that ended it. Only parts of
incomplete episodes are kept.

Example:
    >>> import numpy as np
    >>> from rlio.evaluation.logged_rows import LoggedRows
    >>> assembler = EpisodeAssembler()
    >>> def rows(t, end):
    ...     ends = np.array([False] * (len(t) - 1) + [end])
    ...     return LoggedRows(np.full(len(t), 7), None, np.array(t), ends, {"rewards": np.array(t) * 1.0})
    >>> len(assembler.add(rows([2, 3], end=True)).lengths)
    0
    >>> episodes = assembler.add(rows([0, 1], end=False))
    >>> episodes.lengths.tolist(), episodes.columns["rewards"].tolist()
    ([4], [0.0, 1.0, 2.0, 3.0])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import Column, concat_leaves, take_leaf
from rlio.batch.columns import Columns
from rlio.batch.nested import map_structure
from rlio.errors import SchemaError, excerpt
from rlio.evaluation.logged_rows import LoggedRows

__all__ = ["EpisodeAssembler", "EpisodePart", "Episodes", "join_episodes", "join_ids"]

_Key: TypeAlias = tuple[Any, Any]


@dataclass(frozen=True)
class Episodes:
    """Consecutive whole episodes.

    Attributes:
        columns: Name -> values of all rows.
        lengths: Rows of each episode, int64, at least 1.
        eps_id: Id of each episode.
        agent: Agent of each episode; None if there is one agent.
    """

    columns: dict[str, Column]
    lengths: NDArray[np.int64]
    eps_id: NDArray[Any]
    agent: NDArray[Any] | None

    def take(self, episodes: NDArray[np.int64]) -> Episodes:
        """Return the episodes with the given numbers, in that order."""
        lengths = self.lengths[episodes]
        starts = (np.cumsum(self.lengths) - self.lengths)[episodes]
        rows = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        agent = None if self.agent is None else self.agent[episodes]
        return Episodes(_taken(self.columns, rows), lengths, self.eps_id[episodes], agent)


def join_episodes(parts: Sequence[Episodes]) -> Episodes:
    """Return all episodes of ``parts``, which is not empty."""
    if len(parts) == 1:
        return parts[0]
    columns = _joined_columns([part.columns for part in parts])
    agents = None
    if any(part.agent is not None for part in parts):
        agents = join_ids([_agents(part) for part in parts])
    lengths = np.concatenate([part.lengths for part in parts])
    return Episodes(columns, lengths, join_ids([part.eps_id for part in parts]), agents)


def join_ids(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Join ids as one array: as objects if they have several types, because ids must not be rounded."""
    kinds = {part.dtype.kind if part.dtype.kind == "U" else part.dtype.str for part in parts}
    return np.concatenate([part if len(kinds) == 1 else part.astype(object) for part in parts])


def _joined_columns(parts: Sequence[dict[str, Column]]) -> dict[str, Column]:
    return {
        name: map_structure(lambda *leaves: concat_leaves(leaves), *(part[name] for part in parts))
        for name in parts[0]
    }


def _agents(part: Episodes) -> NDArray[Any]:
    return np.full(len(part.lengths), None, object) if part.agent is None else part.agent


class EpisodePart(NamedTuple):
    """Consecutive rows of an incomplete episode.

    Attributes:
        eps_id, agent: The episode and its agent.
        first: Step of the first row.
        rows: Number of rows.
        ends: Whether the last row ended the episode.
        columns: Their values.
    """

    eps_id: Any
    agent: Any
    first: int
    rows: int
    ends: bool
    columns: dict[str, Column]


@dataclass
class _Running:
    """The parts of one episode so far, by their first step."""

    parts: dict[int, EpisodePart] = field(default_factory=dict)
    rows: int = 0
    last: int | None = None  # The step that ended it.

    @property
    def is_whole(self) -> bool:
        return self.last is not None and self.rows == self.last + 1


class EpisodeAssembler:
    """Joins episodes; see the module.

    Args:
        most_rows: Most rows of incomplete episodes to keep. If more would wait, or a step came twice, the
            waiting rows of those episodes are dropped and counted. None: no limit, and a step that came twice
            is an error.

    Attributes:
        waiting: Rows of incomplete episodes.
        dropped: Episodes with dropped rows, with ``most_rows``.
    """

    def __init__(self, *, most_rows: int | None = None) -> None:
        self._most_rows = most_rows
        self._running: dict[_Key, _Running] = {}
        self.waiting: int = 0
        self.dropped: int = 0

    @property
    def incomplete(self) -> int:
        """Number of incomplete episodes."""
        return len(self._running)

    def add(self, rows: LoggedRows) -> Episodes:
        """Take ``rows`` and return the episodes that are whole now.

        Raises:
            SchemaError: A step came twice.
        """
        starts, stops = _parts(rows)
        whole = (rows.t[starts] == 0) & rows.ends[stops - 1]
        if whole.all():
            agent = None if rows.agent is None else rows.agent[starts]
            return Episodes(rows.columns, stops - starts, rows.eps_id[starts], agent)
        is_whole = np.repeat(whole, stops - starts)
        found = [self.add(_selected(rows, np.flatnonzero(is_whole)))]
        rest = _selected(rows, np.flatnonzero(~is_whole))
        # Rows of vectorised environments alternate between episodes; sorting them gives fewer parts.
        rest = _selected(rest, np.lexsort((rest.t, _codes(rest))))
        starts, stops = _parts(rest)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            found += self.put(_part(rest, start, stop))
        return join_episodes(found)

    def put(self, part: EpisodePart) -> list[Episodes]:
        """Take one part of an episode; returns the episode if it is now whole.

        Raises:
            SchemaError: A step came twice.
        """
        key = part.eps_id, part.agent
        episode = self._running.setdefault(key, _Running())
        if part.first in episode.parts or (part.ends and episode.last is not None):
            step = part.first if part.first in episode.parts else part.first + part.rows - 1
            self._came_twice(key, step)
            episode = self._running.setdefault(key, _Running())
        episode.parts[part.first] = part
        episode.rows += part.rows
        self.waiting += part.rows
        if part.ends:
            episode.last = part.first + part.rows - 1
        if not episode.is_whole:
            if self._most_rows is not None and self.waiting > self._most_rows:
                self._drop(next(iter(self._running)))
            return []
        return self._finished(key, episode)

    def _finished(self, key: _Key, episode: _Running) -> list[Episodes]:
        """Return the episode, which has as many rows as steps, if it has each step once."""
        parts, expected = [], 0
        for first, part in sorted(episode.parts.items(), key=_first):
            if first != expected:
                self._came_twice(key, min(first, expected))
                return []
            parts.append(part.columns)
            expected += part.rows
        del self._running[key]
        self.waiting -= episode.rows
        columns = parts[0] if len(parts) == 1 else _joined_columns(parts)
        agent = None if key[1] is None else _boxed(key[1])
        return [Episodes(columns, np.array([expected]), _boxed(key[0]), agent)]

    def _came_twice(self, key: _Key, step: int) -> None:
        """Raise, or drop the waiting rows of the episode."""
        if self._most_rows is None:
            raise _twice(key, step)
        self._drop(key)

    def _drop(self, key: _Key) -> None:
        self.waiting -= self._running.pop(key).rows
        self.dropped += 1

    def running(self) -> Iterator[EpisodePart]:
        """Yield the parts of incomplete episodes."""
        for episode in self._running.values():
            yield from episode.parts.values()

    def why_incomplete(self) -> str:
        """Describe the first incomplete episode, for a message."""
        (eps_id, agent), episode = next(iter(self._running.items()))
        spans = [
            f"{first} to {first + part.rows - 1}" for first, part in sorted(episode.parts.items(), key=_first)
        ]
        whose = "" if agent is None else f" of agent {excerpt(agent)}"
        return (
            f"episode {excerpt(eps_id)}{whose} has the steps {', '.join(spans[:5])}"
            + (f" and {len(spans) - 5} more parts" if len(spans) > 5 else "")
            + (", and no end" if episode.last is None else f", and its end is step {episode.last}")
        )


def _first(item: tuple[int, Any]) -> int:
    return item[0]


def _part(rows: LoggedRows, start: int, stop: int) -> EpisodePart:
    """Return rows ``start`` to ``stop`` as copies, because a view would keep the whole batch."""
    eps_id, agent = rows.eps_id[start], None if rows.agent is None else rows.agent[start]
    columns = map_structure(lambda leaf: leaf[start:stop].copy(), rows.columns)
    ends = bool(rows.ends[stop - 1])
    return EpisodePart(_plain(eps_id), _plain(agent), int(rows.t[start]), stop - start, ends, columns)


def _boxed(value: Any) -> NDArray[Any]:
    """Return an array with the one ``value``: numbers and text as such, anything else as an object."""
    if isinstance(value, int | float | str):
        return np.array([value])
    found = np.empty(1, object)
    found[0] = value
    return found


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _twice(key: _Key, step: int) -> SchemaError:
    return SchemaError(
        f"step {step} of episode {excerpt(key[0])} came twice: two runs used the same episode ids (evaluate "
        "them separately, and give each its own seed), or rows were read twice (pass epochs=1)",
        column=Columns.EPS_ID,
    )


def _parts(rows: LoggedRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first row, and the row after the last, of each run of consecutive steps of one episode."""
    new = rows.ends[:-1] | (rows.t[1:] != rows.t[:-1] + 1) | (rows.eps_id[1:] != rows.eps_id[:-1])
    if rows.agent is not None:
        new |= rows.agent[1:] != rows.agent[:-1]
    bounds = (
        np.concatenate([[0], np.flatnonzero(new) + 1, [len(rows)]]) if len(rows) else np.zeros(1, np.int64)
    )
    return bounds[:-1], bounds[1:]


def _codes(rows: LoggedRows) -> NDArray[np.int64]:
    """Return a number for each row, equal for rows of one episode and agent."""
    agents = np.zeros(len(rows), np.int64) if rows.agent is None else _numbered(rows.agent)
    found: NDArray[np.int64] = _numbered(rows.eps_id) * (agents.max(initial=0) + 1) + agents
    return found


def _numbered(values: NDArray[Any]) -> NDArray[np.int64]:
    """Number the distinct ``values`` from 0; those in object arrays may be unsortable."""
    if values.dtype != object:
        return np.unique(values, return_inverse=True)[1].astype(np.int64)
    numbers: dict[Any, int] = {}
    return np.fromiter((numbers.setdefault(value, len(numbers)) for value in values), np.int64, len(values))


def _taken(columns: dict[str, Column], index: NDArray[np.int64]) -> dict[str, Column]:
    return {
        name: map_structure(lambda leaf: take_leaf(leaf, index), column) for name, column in columns.items()
    }


def _selected(rows: LoggedRows, index: NDArray[np.int64]) -> LoggedRows:
    agent = None if rows.agent is None else rows.agent[index]
    return LoggedRows(rows.eps_id[index], agent, rows.t[index], rows.ends[index], _taken(rows.columns, index))
