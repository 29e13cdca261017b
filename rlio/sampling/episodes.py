"""`Episodes`: ids, lengths and returns of the running episodes in N environments.

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

# One draw costs as much as a few hundred numbers.
_IDS_AT_ONCE = 256


class Episodes:
    """Counts the steps and sums the rewards of the episodes of N environments.

    Args:
        num_envs: Number of environments.
        metrics: Counts the ended episodes.
        ids: Generator that draws episode ids.
        hooks: Keeps the data that callbacks put into episodes; None if no callback needs episodes.

    Attributes:
        eps_id: Id of each environment's episode, 63 random bits, (N,).
        t: Steps of each episode, (N,).
        totals: Sum of each episode's unclipped rewards, float64, (N,).
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
        self.eps_id: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self.t: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self.totals: NDArray[np.float64] = np.zeros(num_envs)
        self._began = np.zeros(num_envs)
        self._drawn: list[int] = []
        #: (Return, length, seconds) of episodes not yet passed to the metrics.
        self._over: list[tuple[float, int, float]] = []

    @property
    def ids(self) -> set[int]:
        """Ids of the running episodes."""
        return set(self.eps_id.tolist())

    def begin(self) -> None:
        """Begin an episode in every environment."""
        now = time.perf_counter()
        for env in range(len(self.t)):
            self._renew(env, now)

    def count(self, rewards: NDArray[Any], valid: NDArray[np.bool_] | None) -> int:
        """Add a step to the episodes of the rows ``valid`` (None: all), and return the number of rows."""
        if valid is None:
            self.t += 1
            self.totals += rewards
            return len(self.t)
        self.t += valid
        np.add(self.totals, rewards, out=self.totals, where=valid)
        return int(np.count_nonzero(valid))

    def end(self, envs: Iterable[int], games: Mapping[int, Game | None] | None = None) -> None:
        """End the episodes of ``envs``, and begin new ones.

        Args:
            envs: The environments, by index.
            games: Games to count instead of some episodes, see `rlio.envs.games`; None counts no game.
        """
        now = time.perf_counter()
        # A loop, because few episodes end in a step, and a masked assignment costs more than several rows.
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
        """Pass all ended episodes to the metrics."""
        if self._over:
            returns, lengths, durations = np.array(self._over).T
            self._metrics.episodes_ended(returns, lengths.astype(np.int64), durations)
            self._over.clear()

    def fail(self, which: NDArray[np.bool_], *, rows: int) -> None:
        """Discard the episodes ``which``, (N,), with ``rows`` rows, and begin new ones."""
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
