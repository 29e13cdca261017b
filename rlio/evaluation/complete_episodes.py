"""`EpisodeAssembler`: joins episodes from rows that arrive in parts, and finds incomplete ones.

The episode id and the agent identify the parts of an episode. They may arrive in any order, from fragments,
batches and shards. An episode is whole if it has every step from 0 to one that ended it. Only parts of
incomplete episodes are kept.

Example:
    >>> import numpy as np
    >>> from rlio.evaluation.logged_rows import NO_AGENT, LoggedRows
    >>> assembler = EpisodeAssembler()
    >>> def rows(t, end):
    ...     ends = np.array([False] * (len(t) - 1) + [end])
    ...     agent = np.full(len(t), NO_AGENT)
    ...     return LoggedRows(np.full(len(t), 7), agent, np.array(t), ends, {"rewards": np.array(t) * 1.0})
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

from rlio.batch.arrays import Column, join_columns, take_column
from rlio.batch.columns import Columns
from rlio.batch.nested import map_structure
from rlio.batch.rows import ragged_rows
from rlio.errors import SchemaError, excerpt
from rlio.evaluation.logged_rows import NO_AGENT, LoggedRows

__all__ = ["EpisodeAssembler", "EpisodePart", "Episodes", "join_episodes", "sortable"]

#: (source, episode, agent)
_Key: TypeAlias = tuple[Any, Any, Any]


@dataclass(frozen=True)
class Episodes:
    """Consecutive whole episodes.

    Attributes:
        columns: Name -> values of all rows.
        lengths: Rows of each episode, int64, at least 1.
        eps_id: Id of each episode.
        agent: Agent of each episode; `NO_AGENT` if there is one agent.
    """

    columns: dict[str, Column]
    lengths: NDArray[np.int64]
    eps_id: NDArray[Any]
    agent: NDArray[Any]

    def take(self, episodes: NDArray[np.int64]) -> Episodes:
        """Return the episodes with the given numbers, in that order."""
        columns = take_column(self.columns, ragged_rows(self.lengths, episodes))
        return Episodes(columns, self.lengths[episodes], self.eps_id[episodes], self.agent[episodes])


def join_episodes(parts: Sequence[Episodes]) -> Episodes:
    """Return all episodes of ``parts``, which is not empty."""
    if len(parts) == 1:
        return parts[0]
    return Episodes(
        join_columns([part.columns for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        _join_ids([part.eps_id for part in parts]),
        _join_ids([part.agent for part in parts]),
    )


def _join_ids(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Join ids as one array: as objects if they have several types, because ids must not be rounded."""
    kinds = {part.dtype.kind if part.dtype.kind == "U" else part.dtype.str for part in parts}
    return np.concatenate([part if len(kinds) == 1 else part.astype(object) for part in parts])


def sortable(ids: NDArray[Any]) -> NDArray[Any]:
    """Return ``ids``, or, for objects, which may be unsortable, sortable text."""
    if ids.dtype != object:
        return ids
    names = {value: f"{type(value).__name__} {value!r}" for value in set(ids.tolist())}
    return np.array([names[value] for value in ids.tolist()])


class EpisodePart(NamedTuple):
    """Consecutive rows of an incomplete episode.

    Attributes:
        source: Scope of the episode's id.
        eps_id, agent: The episode and its agent, (1,) each.
        first: Step of the first row.
        rows: Number of rows.
        ends: Whether the last row ended the episode.
        columns: Their values.
    """

    source: Any
    eps_id: NDArray[Any]
    agent: NDArray[Any]
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
        """Number of episodes that lack steps or their end, including dropped ones."""
        return len(self._running) + self.dropped

    def add(self, rows: LoggedRows, source: Any = None) -> Episodes:
        """Take ``rows`` and return the episodes that are whole now.

        Args:
            rows: Rows of any episodes.
            source: Scope of their ids: two writers may use the same episode numbers.

        Raises:
            SchemaError: A step came twice.
        """
        starts, stops = _parts(rows)
        whole = (rows.t[starts] == 0) & rows.ends[stops - 1]
        if whole.all():
            return Episodes(rows.columns, stops - starts, rows.eps_id[starts], rows.agent[starts])
        is_whole = np.repeat(whole, stops - starts)
        found = [self.add(_selected(rows, np.flatnonzero(is_whole)))]
        rest = _selected(rows, np.flatnonzero(~is_whole))
        # Rows of vectorised environments alternate between episodes; sorting them gives fewer parts.
        rest = _selected(rest, np.lexsort((rest.t, sortable(rest.agent), sortable(rest.eps_id))))
        starts, stops = _parts(rest)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            found += self.put(_part(rest, start, stop, source))
        return join_episodes(found)

    def put(self, part: EpisodePart) -> list[Episodes]:
        """Take one part of an episode; returns the episode if it is now whole.

        Raises:
            SchemaError: A step came twice.
        """
        key = part.source, part.eps_id.item(), part.agent.item()
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
        for first, part in sorted(episode.parts.items()):
            if first != expected:
                self._came_twice(key, min(first, expected))
                return []
            parts.append(part)
            expected += part.rows
        del self._running[key]
        self.waiting -= episode.rows
        columns = join_columns([part.columns for part in parts])
        return [Episodes(columns, np.array([expected]), parts[0].eps_id, parts[0].agent)]

    def _came_twice(self, key: _Key, step: int) -> None:
        """Raise, or drop the waiting rows of the episode."""
        if self._most_rows is None:
            raise SchemaError(
                f"step {step} of episode {excerpt(key[1])} came twice: two runs used the same episode ids "
                "(evaluate them separately, and give each its own seed), or rows were read twice (pass "
                "epochs=1)",
                column=Columns.EPS_ID,
            )
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
        (_, eps_id, agent), episode = next(iter(self._running.items()))
        spans = [f"{first} to {first + part.rows - 1}" for first, part in sorted(episode.parts.items())]
        whose = "" if agent == NO_AGENT else f" of agent {excerpt(agent)}"
        return (
            f"episode {excerpt(eps_id)}{whose} has the steps {', '.join(spans[:5])}"
            + (f" and {len(spans) - 5} more parts" if len(spans) > 5 else "")
            + (", and no end" if episode.last is None else f", and its end is step {episode.last}")
        )


def _part(rows: LoggedRows, start: int, stop: int, source: Any) -> EpisodePart:
    """Return rows ``start`` to ``stop`` as copies, because a view would keep the whole batch."""
    columns = map_structure(lambda leaf: leaf[start:stop].copy(), rows.columns)
    ends = bool(rows.ends[stop - 1])
    eps_id, agent = rows.eps_id[start : start + 1].copy(), rows.agent[start : start + 1].copy()
    return EpisodePart(source, eps_id, agent, int(rows.t[start]), stop - start, ends, columns)


def _parts(rows: LoggedRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first row, and the row after the last, of each run of consecutive steps of one episode."""
    new = rows.ends[:-1] | (rows.t[1:] != rows.t[:-1] + 1)
    new |= (rows.eps_id[1:] != rows.eps_id[:-1]) | (rows.agent[1:] != rows.agent[:-1])
    bounds = (
        np.concatenate([[0], np.flatnonzero(new) + 1, [len(rows)]]) if len(rows) else np.zeros(1, np.int64)
    )
    return bounds[:-1], bounds[1:]


def _selected(rows: LoggedRows, index: NDArray[np.int64]) -> LoggedRows:
    return LoggedRows(**take_column(vars(rows), index))
