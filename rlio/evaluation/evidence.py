"""`Evidence`: what logged episodes said about a policy, before anything is estimated from it.

Of each whole episode it keeps a few numbers, and of others the rows that came so far. Evidence of parts of
the data, gathered anywhere, adds up (`absorb`) to the evidence of all of it: to the last bit, as episodes
are put in the order of their ids before anything is summed.

Example:
    >>> import numpy as np
    >>> from rlio.evaluation.logged_rows import LoggedRows
    >>> def rows(eps_id, t, end):
    ...     ends = np.array([False] * (len(t) - 1) + [end])
    ...     columns = {LOG_RATIOS: np.zeros(len(t)), "rewards": np.ones(len(t))}
    ...     return LoggedRows(np.full(len(t), eps_id), None, np.array(t), ends, columns)
    >>> one, other = Evidence(gamma=1.0), Evidence(gamma=1.0)
    >>> one.add(rows(8, [0, 1], end=False))
    >>> other.add(rows(8, [2], end=True))
    >>> other.add(rows(5, [0], end=True))
    >>> one.absorb(other)
    >>> weights, _ = one.joined()
    >>> weights.returns.tolist(), one.incomplete
    ([1.0, 3.0], 0)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.errors import OptionError, SchemaError
from rlio.evaluation.complete_episodes import EpisodeAssembler, Episodes, join_episodes, join_ids
from rlio.evaluation.fitted_q import ModelValues
from rlio.evaluation.logged_rows import LoggedRows
from rlio.evaluation.weighting import EpisodeWeights, WeightedSteps

__all__ = ["LOG_RATIOS", "Evidence", "weighted_steps"]

#: Log of the judged policy's probability of each action over the acting one's.
LOG_RATIOS: Final = "log_ratios"


def weighted_steps(episodes: Episodes, gamma: float, values: ModelValues | None = None) -> WeightedSteps:
    """The steps of ``episodes``, with a model's values if there are any."""
    columns: Mapping[str, Any] = episodes.columns
    steps = columns[LOG_RATIOS], columns[Columns.REWARDS], episodes.lengths, gamma
    if values is None:
        return WeightedSteps(*steps)
    return WeightedSteps(*steps, values.states, values.actions, values.finals)


@dataclass(frozen=True)
class _Judged:
    """Some whole episodes of one source: their ids, and what is kept of them."""

    source: Hashable
    eps_id: NDArray[Any]
    agent: NDArray[Any] | None
    weights: EpisodeWeights
    steps: Episodes | None


class Evidence:
    """What logged episodes said; see the module.

    Args:
        gamma: Discount a step.
        keep_steps: Whether all columns of whole episodes are kept, for estimators that look at steps; else a
            few numbers of each.
        most_rows: As in `EpisodeAssembler`.
    """

    def __init__(self, *, gamma: float, keep_steps: bool = False, most_rows: int | None = None) -> None:
        self.gamma = gamma
        self.keep_steps = keep_steps
        self._most_rows = most_rows
        # Ids are those of a source: two writers may number their episodes alike.
        self._assemblers: dict[Hashable, EpisodeAssembler] = {}
        self._judged: list[_Judged] = []
        self._whole = 0
        self._dropped = 0

    @property
    def episodes(self) -> int:
        """Whole episodes."""
        return self._whole

    @property
    def incomplete(self) -> int:
        """Episodes that lack steps, or their end, and those that were given up."""
        assemblers = self._assemblers.values()
        return self._dropped + sum(assembler.incomplete + assembler.dropped for assembler in assemblers)

    def why_incomplete(self) -> str:
        """What is known of the first episode that is not whole, for a message."""
        return next(a.why_incomplete() for a in self._assemblers.values() if a.incomplete)

    def add(self, rows: LoggedRows, *, source: Hashable = None) -> None:
        """Take rows with the columns `LOG_RATIOS`, rewards, and whatever else is to be kept.

        Args:
            rows: Of any episodes, or parts of them, in any order.
            source: Where episodes have ids of their own; sources must be sortable.

        Raises:
            SchemaError: A step came twice.
        """
        self._judge(source, self._assembler(source).add(rows))

    def _assembler(self, source: Hashable) -> EpisodeAssembler:
        return self._assemblers.setdefault(source, EpisodeAssembler(most_rows=self._most_rows))

    def _judge(self, source: Hashable, episodes: Episodes) -> None:
        if not len(episodes.lengths):
            return
        weights = weighted_steps(episodes, self.gamma).episode_weights
        steps = episodes if self.keep_steps else None
        self._judged.append(_Judged(source, episodes.eps_id, episodes.agent, weights, steps))
        self._whole += len(episodes.lengths)

    def absorb(self, other: Evidence) -> None:
        """Take all of ``other``, which stays as it is: parts of episodes that are here and there are joined.

        Raises:
            OptionError: It is of another discount, or kept other things.
            SchemaError: A step came twice.
        """
        if (self.gamma, self.keep_steps) != (other.gamma, other.keep_steps):
            raise OptionError("evidence adds up if it is of the same gamma and the same kind of estimators")
        self._judged += other._judged
        self._whole += other._whole
        self._dropped += other._dropped
        for source, assembler in other._assemblers.items():
            self._dropped += assembler.dropped
            for part in assembler.running():
                for episodes in self._assembler(source).put(part):
                    self._judge(source, episodes)

    def rename_source(self, source: Hashable) -> None:
        """Say where all of it is from, after it was added as from one place.

        Raises:
            OptionError: It is from several.
        """
        if len(self._assemblers) > 1:
            raise OptionError(f"the evidence is of {len(self._assemblers)} sources: they cannot be one")
        if self._assemblers:
            self._assemblers = {source: self._assemblers.popitem()[1]}
        self._judged = [replace(part, source=source) for part in self._judged]

    def taken(self) -> Evidence:
        """What was judged since the last call, as evidence of its own; here, episodes go on that run."""
        found = Evidence(gamma=self.gamma, keep_steps=self.keep_steps, most_rows=self._most_rows)
        found._judged, self._judged = self._judged, []
        found._whole, self._whole = self._whole, 0
        found._dropped, self._dropped = self._dropped, 0
        for assembler in self._assemblers.values():
            found._dropped += assembler.dropped
            assembler.dropped = 0
        return found

    @property
    def has_weight(self) -> bool:
        """Whether any whole episode could be the judged policy's."""
        return any(bool((part.weights.log_weights > -np.inf).any()) for part in self._judged)

    def keep_last(self, episodes: int) -> None:
        """Forget the oldest whole episodes where there are more than so many, some more than need be."""
        if self._whole <= episodes:
            return
        while self._whole > episodes // 2 and len(self._judged) > 1:
            self._whole -= len(self._judged.pop(0).eps_id)

    def joined(self) -> tuple[EpisodeWeights, Episodes | None]:
        """All whole episodes, in the order of their sources and ids; with their steps, if those are kept.

        Raises:
            SchemaError: There are none.
        """
        if not self._judged:
            raise SchemaError(
                f"there is no complete episode to evaluate ({self.incomplete} are incomplete)",
                column=Columns.T,
            )
        parts, order = self._judged, _order(self._judged)
        arrays = [
            np.concatenate([getattr(part.weights, field.name) for part in parts])[order]
            for field in fields(EpisodeWeights)
        ]
        weights = EpisodeWeights(*arrays)
        kept = [part.steps for part in parts if part.steps is not None]
        return weights, join_episodes(kept).take(order) if kept else None


def _order(parts: list[_Judged]) -> NDArray[np.int64]:
    """The order of all episodes by source, id and agent."""
    counts = [len(part.eps_id) for part in parts]
    keys = [_sortable(join_ids([part.eps_id for part in parts]))]
    if any(part.agent is not None for part in parts):
        agents = [
            np.full(count, None, object) if part.agent is None else part.agent
            for part, count in zip(parts, counts, strict=True)
        ]
        keys.insert(0, _sortable(join_ids(agents)))
    found = sorted({part.source for part in parts})  # type: ignore[type-var] # sortable, as `add` asks
    if len(found) > 1:
        ranks = {source: rank for rank, source in enumerate(found)}
        keys.append(np.repeat([ranks[part.source] for part in parts], counts))
    return np.lexsort(keys)


def _sortable(ids: NDArray[Any]) -> NDArray[Any]:
    """``ids``, or, of objects, which may have no order, text that has one."""
    if ids.dtype != object:
        return ids
    names = {value: f"{type(value).__name__} {value!r}" for value in set(ids.tolist())}
    return np.array([names[value] for value in ids.tolist()])
