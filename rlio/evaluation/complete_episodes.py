"""`EpisodeAssembler`: puts episodes together from rows that come in parts, and says which are not whole.

Parts of an episode are told by its id and the agent. They may come in any order, from fragments, batches and
shards; whole are those with every step from 0 to one that ended them. Only what is not whole yet is kept.

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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.arrays import Column, concat_leaves, take_leaf
from rlio.columns import Columns
from rlio.errors import SchemaError, excerpt
from rlio.evaluation.logged_rows import LoggedRows
from rlio.nested import map_structure

__all__ = ["EpisodeAssembler", "Episodes", "join_episodes"]

_Key: TypeAlias = tuple[Any, Any]
# Rows that alternate between episodes, as those of vectorised environments do, are sorted first where parts
# are more than this and shorter than that on average: each part costs microseconds, each row does not.
_MANY_PARTS, _SHORT_ROWS = 256, 8


@dataclass(frozen=True)
class Episodes:
    """Whole episodes, one after the other.

    Attributes:
        columns: Name -> values of all rows.
        lengths: Rows of each episode, int64, at least 1.
    """

    columns: dict[str, Column]
    lengths: NDArray[np.int64]


def join_episodes(parts: Sequence[Episodes]) -> Episodes:
    """All episodes of ``parts``, of which there is at least one."""
    if len(parts) == 1:
        return parts[0]
    columns = {
        name: map_structure(lambda *leaves: concat_leaves(leaves), *(part.columns[name] for part in parts))
        for name in parts[0].columns
    }
    return Episodes(columns, np.concatenate([part.lengths for part in parts]))


@dataclass
class _Running:
    """The parts of one episode that came so far: first step -> columns and rows."""

    parts: dict[int, tuple[dict[str, Column], int]] = field(default_factory=dict)
    rows: int = 0
    last: int | None = None  # the step that ended it

    @property
    def is_whole(self) -> bool:
        return self.last is not None and self.rows == self.last + 1


class EpisodeAssembler:
    """Puts episodes together; see the module."""

    def __init__(self) -> None:
        self._running: dict[_Key, _Running] = {}

    @property
    def incomplete(self) -> int:
        """Episodes that are not whole yet."""
        return len(self._running)

    def add(self, rows: LoggedRows) -> Episodes:
        """Take ``rows`` and return the episodes that are whole now.

        Raises:
            SchemaError: A step came twice.
        """
        starts, stops = _parts(rows)
        whole = (rows.t[starts] == 0) & rows.ends[stops - 1]
        if whole.all():
            return Episodes(rows.columns, stops - starts)
        is_whole = np.repeat(whole, stops - starts)
        found = [Episodes(_taken(rows.columns, np.flatnonzero(is_whole)), (stops - starts)[whole])]
        rest = _selected(rows, np.flatnonzero(~is_whole))
        starts, stops = _parts(rest)
        if len(starts) > _MANY_PARTS and len(rest) < _SHORT_ROWS * len(starts):
            rest = _selected(rest, np.lexsort((rest.t, _codes(rest))))
            starts, stops = _parts(rest)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            found += self._put(rest, start, stop)
        return join_episodes(found)

    def _put(self, rows: LoggedRows, start: int, stop: int) -> list[Episodes]:
        """Take one part of an episode; the episode, if it is whole by that."""
        key = _key(rows, start)
        episode = self._running.setdefault(key, _Running())
        first = int(rows.t[start])
        if first in episode.parts or (rows.ends[stop - 1] and episode.last is not None):
            raise _twice(key, first if first in episode.parts else int(rows.t[stop - 1]))
        # A copy: a view would keep all of the batch.
        columns = map_structure(lambda leaf: leaf[start:stop].copy(), rows.columns)
        episode.parts[first] = columns, stop - start
        episode.rows += stop - start
        if rows.ends[stop - 1]:
            episode.last = int(rows.t[stop - 1])
        if not episode.is_whole:
            return []
        del self._running[key]
        parts, expected = [], 0
        for first, (columns, length) in sorted(episode.parts.items(), key=_first):
            if first != expected:
                raise _twice(key, min(first, expected))
            parts.append(Episodes(columns, np.array([length])))
            expected += length
        return [Episodes(join_episodes(parts).columns, np.array([expected]))]

    def why_incomplete(self) -> str:
        """What is known of the first episode that is not whole, for a message."""
        (eps_id, agent), episode = next(iter(self._running.items()))
        spans = [
            f"{first} to {first + rows - 1}" for first, (_, rows) in sorted(episode.parts.items(), key=_first)
        ]
        whose = "" if agent is None else f" of agent {excerpt(agent)}"
        return (
            f"episode {excerpt(eps_id)}{whose} has the steps {', '.join(spans[:5])}"
            + (f" and {len(spans) - 5} more parts" if len(spans) > 5 else "")
            + (", and no end" if episode.last is None else f", the last being its end, step {episode.last}")
        )


def _first(item: tuple[int, Any]) -> int:
    return item[0]


def _key(rows: LoggedRows, row: int) -> _Key:
    eps_id, agent = rows.eps_id[row], None if rows.agent is None else rows.agent[row]
    return _plain(eps_id), _plain(agent)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _twice(key: _Key, step: int) -> SchemaError:
    return SchemaError(
        f"step {step} of episode {excerpt(key[0])} came twice: two runs gave their episodes the same ids "
        "(evaluate "
        "them one by one, and give each a seed of its own), or rows were read again (epochs=1)",
        column=Columns.EPS_ID,
    )


def _parts(rows: LoggedRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First row, and the row after the last, of each run of consecutive steps of one episode."""
    new = rows.ends[:-1] | (rows.t[1:] != rows.t[:-1] + 1) | (rows.eps_id[1:] != rows.eps_id[:-1])
    if rows.agent is not None:
        new |= rows.agent[1:] != rows.agent[:-1]
    bounds = (
        np.concatenate([[0], np.flatnonzero(new) + 1, [len(rows)]]) if len(rows) else np.zeros(1, np.int64)
    )
    return bounds[:-1], bounds[1:]


def _codes(rows: LoggedRows) -> NDArray[np.int64]:
    """A number for each row: the same for rows of one episode and agent."""
    agents = np.zeros(len(rows), np.int64) if rows.agent is None else _numbered(rows.agent)
    found: NDArray[np.int64] = _numbered(rows.eps_id) * (agents.max(initial=0) + 1) + agents
    return found


def _numbered(values: NDArray[Any]) -> NDArray[np.int64]:
    """Numbers from 0 for the distinct ``values``; those in object arrays may have no order."""
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
