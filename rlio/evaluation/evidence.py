"""`Evidence`: the data about a policy from logged episodes, before estimation.

It keeps a few numbers of each whole episode, and the rows of incomplete ones. Evidence of parts of the data,
gathered anywhere, adds up (`absorb`) to the evidence of all of it: to the last bit, because episodes are
sorted by id before anything is summed.

Example:
    >>> import numpy as np
    >>> from rlio.evaluation.logged_rows import LoggedRows
    >>> def rows(eps_id, t, end):
    ...     ends = np.array([False] * (len(t) - 1) + [end])
    ...     columns = {LOG_RATIOS: np.zeros(len(t)), "rewards": np.ones(len(t))}
    ...     return LoggedRows(np.full(len(t), eps_id), np.zeros(len(t)), np.array(t), ends, columns)
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
from rlio.evaluation.complete_episodes import EpisodeAssembler, Episodes, join_episodes, sortable
from rlio.evaluation.fitted_q import ModelValues
from rlio.evaluation.logged_rows import LoggedRows
from rlio.evaluation.weighting import EpisodeWeights, WeightedSteps

__all__ = ["LOG_RATIOS", "Evidence", "weighted_steps"]

#: Log of the ratio of the judged policy's probability of each action to the acting policy's.
LOG_RATIOS: Final = "log_ratios"


def weighted_steps(episodes: Episodes, gamma: float, values: ModelValues | None = None) -> WeightedSteps:
    """Return the steps of ``episodes``, with a model's values if given."""
    columns: Mapping[str, Any] = episodes.columns
    steps = columns[LOG_RATIOS], columns[Columns.REWARDS], episodes.lengths, gamma
    if values is None:
        return WeightedSteps(*steps)
    return WeightedSteps(*steps, values.states, values.actions, values.finals)


@dataclass(frozen=True)
class _Judged:
    """Whole episodes of one source, with columns only if those are kept."""

    source: Hashable
    episodes: Episodes
    weights: EpisodeWeights


class Evidence:
    """Evidence from logged episodes; see the module.

    Args:
        gamma: Discount per step.
        keep_steps: Whether to keep all columns of whole episodes, for estimators that use steps; otherwise a
            few numbers of each.
        most_rows: As in `EpisodeAssembler`.
    """

    def __init__(self, *, gamma: float, keep_steps: bool = False, most_rows: int | None = None) -> None:
        self.gamma = gamma
        self.keep_steps = keep_steps
        self._most_rows = most_rows
        self._assembler = EpisodeAssembler(most_rows=most_rows)
        self._judged: list[_Judged] = []
        self._whole = 0

    @property
    def episodes(self) -> int:
        """Number of whole episodes."""
        return self._whole

    @property
    def incomplete(self) -> int:
        """Number of episodes that lack steps or their end, including dropped ones."""
        return self._assembler.incomplete

    def why_incomplete(self) -> str:
        """Describe the first incomplete episode, for a message."""
        return self._assembler.why_incomplete()

    def add(self, rows: LoggedRows, *, source: Hashable = None) -> None:
        """Add rows with the columns `LOG_RATIOS`, rewards, and any others to keep.

        Args:
            rows: Rows of any episodes, or parts of them, in any order.
            source: Scope of the episode ids; sources must be sortable.

        Raises:
            SchemaError: A step came twice.
        """
        self._judge(source, self._assembler.add(rows, source))

    def _judge(self, source: Hashable, episodes: Episodes) -> None:
        if not len(episodes.lengths):
            return
        weights = weighted_steps(episodes, self.gamma).episode_weights
        kept = episodes if self.keep_steps else replace(episodes, columns={})
        self._judged.append(_Judged(source, kept, weights))
        self._whole += len(episodes.lengths)

    def absorb(self, other: Evidence) -> None:
        """Add all of ``other``, which does not change; parts of the same episode are joined.

        Raises:
            OptionError: It has another discount, or keeps other data.
            SchemaError: A step came twice.
        """
        if (self.gamma, self.keep_steps) != (other.gamma, other.keep_steps):
            raise OptionError("cannot add evidence: expected the same gamma and the same kind of estimators")
        self._judged += other._judged
        self._whole += other._whole
        self._assembler.dropped += other._assembler.dropped
        for part in other._assembler.running():
            for episodes in self._assembler.put(part):
                self._judge(part.source, episodes)

    def rename_source(self, source: Hashable) -> None:
        """Set the source of all whole episodes."""
        self._judged = [replace(part, source=source) for part in self._judged]

    def taken(self) -> Evidence:
        """Return the evidence of newly whole episodes since the last call; incomplete ones stay here."""
        found = Evidence(gamma=self.gamma, keep_steps=self.keep_steps, most_rows=self._most_rows)
        found._judged, self._judged = self._judged, []
        found._whole, self._whole = self._whole, 0
        found._assembler.dropped, self._assembler.dropped = self._assembler.dropped, 0
        return found

    @property
    def has_weight(self) -> bool:
        """Whether the judged policy could have produced any whole episode."""
        return any(bool((part.weights.log_weights > -np.inf).any()) for part in self._judged)

    def keep_last(self, episodes: int) -> None:
        """Drop the oldest whole episodes, and maybe some more, if there are more than ``episodes``."""
        if self._whole <= episodes:
            return
        while self._whole > episodes // 2 and len(self._judged) > 1:
            self._whole -= len(self._judged.pop(0).weights.lengths)

    def joined(self) -> tuple[EpisodeWeights, Episodes | None]:
        """Return all whole episodes, ordered by source and id, with their steps if those are kept.

        Raises:
            SchemaError: No episode is whole.
        """
        if not self._judged:
            raise SchemaError(
                f"no episode to evaluate is complete ({self.incomplete} are incomplete)",
                column=Columns.T,
            )
        parts = self._judged
        episodes = join_episodes([part.episodes for part in parts])
        order = _order(parts, episodes)
        arrays = [
            np.concatenate([getattr(part.weights, field.name) for part in parts])[order]
            for field in fields(EpisodeWeights)
        ]
        return EpisodeWeights(*arrays), episodes.take(order) if self.keep_steps else None


def _order(parts: list[_Judged], episodes: Episodes) -> NDArray[np.int64]:
    """Return the order of all episodes by source, id and agent."""
    keys = [sortable(episodes.agent), sortable(episodes.eps_id)]
    found = sorted({part.source for part in parts})  # type: ignore[type-var] # sortable, as `add` requires
    if len(found) > 1:
        ranks = {source: rank for rank, source in enumerate(found)}
        counts = [len(part.weights.lengths) for part in parts]
        keys.append(np.repeat([ranks[part.source] for part in parts], counts))
    return np.lexsort(keys)
