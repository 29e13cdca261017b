"""`Episodes`: ids, lengths and returns of the episodes that run in N environments, and who is told of them.

Example:
    >>> from rlio.sampling.metrics import MetricsCollector
    >>> metrics = MetricsCollector()
    >>> episodes = Episodes(2, metrics=metrics, ids=np.random.default_rng(0))
    >>> episodes.begin()
    >>> episodes.count(np.array([1.0, 2.0]), None)
    2
    >>> episodes.end([1])
    >>> episodes.flush()
    >>> metrics.drain().returns.tolist(), episodes.t.tolist()
    ([2.0], [1, 0])
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.envs.games import Game
from rlio.sampling.episode_hooks import EpisodeHooks
from rlio.sampling.metrics import MetricsCollector

__all__ = ["Episodes"]

# A draw costs as much as a few hundred numbers.
_IDS_AT_ONCE = 256


class Episodes:
    """Counts the steps and sums up the rewards of the episodes of N environments.

    Args:
        num_envs: Environments.
        metrics: Who counts episodes that have ended.
        ids: What ids are drawn from.
        hooks: Who keeps what callbacks leave in episodes; None where callbacks do not ask for them.

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
        self._drawn: list[int] = []
        #: (Return, length, seconds) of episodes that the metrics have not got yet.
        self._over: list[tuple[float, int, float]] = []

    @property
    def ids(self) -> set[int]:
        """Ids of the episodes that run."""
        return set(self.eps_id.tolist())

    def begin(self) -> None:
        """Episodes begin everywhere."""
        now = time.perf_counter()
        for env in range(len(self.t)):
            self._renew(env, now)

    def count(self, rewards: NDArray[Any], valid: NDArray[np.bool_] | None) -> int:
        """Add a step to the episodes of the rows ``valid``, None: of all; returns how many they are."""
        if valid is None:
            self.t += 1
            self.totals += rewards
            return len(self.t)
        self.t += valid
        np.add(self.totals, rewards, out=self.totals, where=valid)
        return int(np.count_nonzero(valid))

    def end(self, envs: Iterable[int], games: Mapping[int, Game | None] | None = None) -> None:
        """The episodes of ``envs`` have ended; others follow.

        Args:
            envs: The environments, by index.
            games: What is counted in place of some of them, see `rlio.envs.games`; None counts as nothing.
        """
        now = time.perf_counter()
        # A loop: few episodes end in a step, and a masked assignment costs more than several rows.
        for env in envs:
            self._end_one(env, now, games)
            self._renew(env, now)

    def _end_one(self, env: int, now: float, games: Mapping[int, Game | None] | None) -> None:
        total, length, duration = self.totals.item(env), self.t.item(env), now - self._began[env]
        game = None
        if games and env in games:
            game = games[env]
            if game is None:
                return
            total, length, duration = game.total_reward, game.length, math.nan
        if self._hooks is None:
            self._over.append((total, length, duration))
            return
        episode = self._hooks.running[env]
        if game is not None:
            episode = replace(episode, total_reward=total, length=length)
        self._metrics.episode_ended(episode, duration=duration)

    def flush(self) -> None:
        """Let the metrics have all episodes that have ended."""
        if self._over:
            returns, lengths, durations = np.array(self._over).T
            self._metrics.episodes_ended(returns, lengths.astype(np.int64), durations)
            self._over.clear()

    def fail(self, which: NDArray[np.bool_], *, rows: int) -> None:
        """The episodes ``which``, (N,), are discarded with ``rows`` rows; others follow."""
        self._metrics.episodes_failed(int(np.count_nonzero(which)), rows=rows)
        now = time.perf_counter()
        for env in np.flatnonzero(which).tolist():
            self._renew(env, now)

    def _renew(self, env: int, now: float) -> None:
        if not self._drawn:
            drawn = self._ids.integers(0, 1 << 63, _IDS_AT_ONCE, dtype=np.int64, endpoint=False)
            self._drawn = drawn[::-1].tolist()
        self.eps_id[env] = self._drawn.pop()
        self.t[env] = 0
        self.totals[env] = 0.0
        self._began[env] = now
