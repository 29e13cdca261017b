"""`Episodes`: ids, lengths and returns of the episodes that run in N environments, and who is told of them.

Example:
    >>> from rlio.rollout.metrics import MetricsCollector
    >>> metrics = MetricsCollector()
    >>> episodes = Episodes(2, metrics=metrics, ids=np.random.default_rng(0))
    >>> episodes.begin()
    >>> episodes.count(np.array([1.0, 2.0]), None)
    2
    >>> episodes.end(np.array([False, True]))
    >>> metrics.drain().returns.tolist(), episodes.t.tolist()
    ([2.0], [1, 0])
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.envs.games import Game
from rlio.rollout.episode_hooks import EpisodeHooks
from rlio.rollout.metrics import MetricsCollector

__all__ = ["Episodes"]


class Episodes:
    """Counts the steps and sums up the rewards of the episodes of N environments.

    Args:
        num_envs: Environments.
        metrics: Who counts episodes that have ended.
        ids: What ids are drawn from.
        hooks: Who keeps what callbacks leave in episodes; None where nobody looks at them.

    Attributes:
        eps_id: Of each environment's episode, 63 random bits, (N,).
        t: Steps of each, (N,).
        totals: Sum of the rewards of each, not clipped, float64, (N,).
    """

    def __init__(
        self,
        num_envs: int,
        *,
        metrics: MetricsCollector,
        ids: np.random.Generator,
        hooks: EpisodeHooks | None = None,
    ) -> None:
        self._metrics = metrics
        self._ids = ids
        self._hooks = hooks
        self.eps_id = np.zeros(num_envs, np.int64)
        self.t = np.zeros(num_envs, np.int64)
        self.totals = np.zeros(num_envs)
        self._began = np.zeros(num_envs)

    @property
    def ids(self) -> set[int]:
        """Ids of the episodes that run."""
        return set(self.eps_id.tolist())

    def begin(self) -> None:
        """Episodes begin everywhere."""
        self._renew(np.ones(len(self.t), bool))

    def count(self, rewards: NDArray[Any], valid: NDArray[np.bool_] | None) -> int:
        """Add a step to the episodes of the rows ``valid``, None: of all; returns how many they are."""
        if valid is None:
            self.t += 1
            self.totals += rewards
            return len(self.t)
        self.t += valid
        np.add(self.totals, rewards, out=self.totals, where=valid)
        return int(np.count_nonzero(valid))

    def end(self, which: NDArray[np.bool_], games: Mapping[int, Game | None] | None = None) -> None:
        """The episodes ``which``, (N,), have ended; others follow.

        Args:
            which: Their environments.
            games: What is counted in place of some of them, see `rlio.envs.games`; None counts as nothing.
        """
        durations = time.perf_counter() - self._began[which]
        if games:
            for env, duration in zip(np.flatnonzero(which).tolist(), durations.tolist(), strict=True):
                own = Game(float(self.totals[env]), int(self.t[env]))
                self._end_one(env, games.get(env, own), duration if env not in games else math.nan)
        elif self._hooks is None:
            self._metrics.episodes_ended(self.totals[which], self.t[which], durations)
        else:
            for env, duration in zip(np.flatnonzero(which).tolist(), durations.tolist(), strict=True):
                self._metrics.episode_ended(self._hooks.running[env], duration=duration)
        self._renew(which)

    def _end_one(self, env: int, game: Game | None, duration: float) -> None:
        if game is None:
            return
        if self._hooks is None:
            returns, lengths = np.array([game.total_reward]), np.array([game.length])
            self._metrics.episodes_ended(returns, lengths, np.array([duration]))
        else:
            episode = replace(self._hooks.running[env], total_reward=game.total_reward, length=game.length)
            self._metrics.episode_ended(episode, duration=duration)

    def fail(self, which: NDArray[np.bool_], *, rows: int) -> None:
        """The episodes ``which``, (N,), are discarded with ``rows`` rows; others follow."""
        self._metrics.episodes_failed(int(np.count_nonzero(which)), rows=rows)
        self._renew(which)

    def _renew(self, which: NDArray[np.bool_]) -> None:
        new = int(np.count_nonzero(which))
        self.eps_id[which] = self._ids.integers(0, 1 << 63, new, dtype=np.int64, endpoint=False)
        self.t[which] = 0
        self.totals[which] = 0.0
        self._began[which] = time.perf_counter()
