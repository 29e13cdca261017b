"""`Episodes`: the running episodes of N environments, for the runner, its metrics and its callbacks.

Example:
    >>> from gymnasium.spaces import Box
    >>> from rlio.sampling.callbacks import Callbacks
    >>> from rlio.sampling.metrics import MetricsCollector
    >>> class Tell(Callbacks):
    ...     def on_episode_start(self, *, episode, **kwargs):
    ...         print("episode in", episode.env_index, "begins with", episode.last_observation)
    >>> metrics = MetricsCollector()
    >>> episodes = Episodes(2, space=Box(0.0, 9.0, (1,)), callbacks=Tell(), metrics=metrics)
    >>> episodes.draw_from(np.random.default_rng(0))
    >>> episodes.begin()
    >>> episodes.started(np.array([[1.0], [2.0]]), [{}, {}])
    episode in 0 begins with [1.]
    episode in 1 begins with [2.]
    >>> episodes.count(np.array([1.0, 2.0]), None)
    2
    >>> episodes.end([1])
    >>> episodes.renew(1)
    >>> metrics.drain().counts.episodes, episodes.t.tolist()
    (1, [1, 0])
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.nested import map_structure, unflatten
from rlio.envs.games import Game
from rlio.envs.leaves import leaf_of, leaves_of
from rlio.sampling.callbacks import Callbacks, RunningEpisode, overridden
from rlio.sampling.metrics import MetricsCollector
from rlio.support.clock import utc_ms

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.envs.vector import VectorStep

__all__ = ["Episodes"]

# Any throughout: users define what callbacks get, and spaces define observations and actions.

# One draw costs as much as a few hundred numbers.
_IDS_AT_ONCE = 256
_HOOKS = frozenset(
    {
        "on_episode_created",
        "on_episode_start",
        "on_episode_step",
        "on_episode_end",
        "on_postprocess_trajectory",
    }
)


class Episodes:
    """Counts the steps and sums the rewards of the episodes of N environments, and shows them to callbacks.

    Args:
        num_envs: Number of environments.
        space: Space of one environment's observations.
        callbacks: The callbacks; only overridden methods are called.
        metrics: Counts the ended episodes.
        runner: Passed to callbacks as ``runner``; its ``envs`` is passed as ``env``.
        worker_index: Index of the runner's worker.
        keeps_media: Whether the caller keeps media in `running`.

    Attributes:
        eps_id: Id of each environment's episode, 63 random bits, (N,).
        t: Steps of each episode, (N,).
        totals: Sum of each episode's unclipped rewards, float64, (N,).
        starts: When the running episodes, and those with waiting rows, began, by id: see
            `SampleBatch.episode_starts`.
        are_shown: Whether a callback or the caller uses `running`.
        running: The episode of each environment, as callbacks see it.
        known: Episodes that may have waiting rows, by id.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        space: gym.Space[Any],
        callbacks: Callbacks,
        metrics: MetricsCollector,
        runner: Any = None,
        worker_index: int = 0,
        keeps_media: bool = False,
    ) -> None:
        self.eps_id: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self.t: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self.totals: NDArray[np.float64] = np.zeros(num_envs)
        self._began = [0.0] * num_envs
        self.starts: dict[int | str, int] = {}
        self._wants = overridden(callbacks) & _HOOKS
        self.are_shown: bool = bool(self._wants) or keeps_media
        self.running: list[RunningEpisode] = [
            RunningEpisode(-1, env, worker_index) for env in range(num_envs)
        ]
        self.known: dict[int, RunningEpisode] = {}
        self._callbacks, self._metrics = callbacks, metrics
        self._runner, self._worker_index = runner, worker_index
        self._paths = [leaf.path for leaf in leaves_of(space)]
        #: Environments whose episode ended and that have no new one in `running` yet.
        self._over: list[int] = []

    def draw_from(self, ids: np.random.Generator) -> None:
        """Draw the ids of new episodes from ``ids``."""
        self._ids = ids
        self._drawn: list[int] = []

    @property
    def ids(self) -> set[int]:
        """Ids of the running episodes."""
        return set(self.eps_id.tolist())

    # ---- events, in this order: begin, started; then, in each step, count and, for each environment, follow,
    # end, fail, renew; if no episode is shown, only count, end and fail ----

    def begin(self) -> None:
        """Begin an episode in every environment."""
        now, began_at = time.perf_counter(), utc_ms()
        self.starts.clear()
        for env in range(len(self.t)):
            self._renew(env, now, began_at)
        self.known.clear()
        self._over = list(range(len(self.t)))
        self._create()

    def started(self, obs: Any, infos: Sequence[Any]) -> None:
        """Pass the first observations with their ``infos`` to callbacks."""
        if self.looks_at_starts:
            for env in range(len(self.running)):
                self._start(env, obs, infos[env])

    def count(self, rewards: NDArray[Any], valid: NDArray[np.bool_] | None) -> int:
        """Add a step to the episodes of the rows ``valid`` (None: all), and return the number of rows."""
        if valid is None:
            self.t += 1
            self.totals += rewards
            return len(self.t)
        self.t += valid
        np.add(self.totals, rewards, out=self.totals, where=valid)
        return int(np.count_nonzero(valid))

    def follow(
        self, env: int, step: VectorStep, *, final: Any, sent: Any, infos: Sequence[Any] | None
    ) -> None:
        """Pass the step of one environment to callbacks. The caller then calls `end` or `forget_values`.

        Args:
            env: The environment.
            step: The step, before connectors.
            final: The leaves of the episode's last observation; None if ``step.obs`` has it.
            sent: The actions that the environments got.
            infos: Infos of the rows; None if no callback needs them.
        """
        episode = self.updated(env)
        episode.last_observation = self._row(step.obs, env) if final is None else self._nested(final)
        episode.last_action = map_structure(lambda leaf: leaf[env], sent)
        episode.last_reward = float(step.rewards[env])
        episode.last_info = None if infos is None else infos[env]
        self._call("on_episode_step", episode)

    def forget_values(self, env: int) -> None:
        """Take the values of the step from the episode, because the next step overwrites their arrays."""
        _forget_values(self.running[env])

    def end(self, envs: Iterable[int], games: Mapping[int, Game | None] | None = None) -> None:
        """End the episodes of ``envs``, and begin new ones.

        Args:
            envs: The environments, by index.
            games: Games to count instead of some episodes, see `rlio.envs.games`; None counts no game.

        A callback is called before the episode goes into the metrics.
        """
        now, began_at, shown = time.perf_counter(), utc_ms(), self.are_shown
        plain = []
        # A loop, because few episodes end in a step, and a masked assignment costs more than several rows.
        for env in envs:
            total, length, duration = self.totals.item(env), self.t.item(env), now - self._began[env]
            if shown:
                ended = self.updated(env)
                self._show_end(ended)
                _forget_values(ended)
            self._renew(env, now, began_at)
            episode = self.running[env]
            if games and env in games:
                game = games[env]
                if game is None:
                    continue
                total, length, duration = game.total_reward, game.length, math.nan
                episode = replace(episode, total_reward=total, length=length)
            if shown:
                self._metrics.episode_ended(episode, duration=duration)
            else:
                plain.append((total, length, duration))
        if plain:
            self._metrics.plain_episodes_ended(plain)

    def fail(self, envs: Sequence[int], errors: Mapping[int, Exception], *, rows: int) -> None:
        """Discard the episodes of the failed ``envs``, with ``rows`` rows, and begin new ones."""
        now, began_at = time.perf_counter(), utc_ms()
        for env in envs:
            # It may have ended in this step, and the next one has not begun.
            if self.are_shown and env not in self._over:
                episode = self.updated(env)
                self._show_end(episode, errors.get(env))
                self.known.pop(episode.eps_id, None)
            self._renew(env, now, began_at)
        self._metrics.episodes_failed(len(envs), rows=rows)

    def renew(self, env: int, obs: Any = None, infos: Sequence[Any] = ()) -> None:
        """Show a new episode of ``env`` if the last one ended; start it if its first observation is there.

        Args:
            env: The environment.
            obs: The observations, before connectors, if the environment was reset; None if it was not.
            infos: Infos of each environment's last reset.
        """
        self._create()
        if obs is not None and self.looks_at_starts:
            self._start(env, obs, infos[env])

    @property
    def looks_at_steps(self) -> bool:
        """Whether a callback needs every step."""
        return "on_episode_step" in self._wants

    @property
    def looks_at_starts(self) -> bool:
        """Whether a callback needs the results of resets."""
        return "on_episode_start" in self._wants

    def looks_at(self, ended: NDArray[np.bool_]) -> bool:
        """Whether a callback needs the infos of a step."""
        return self.looks_at_steps or ("on_episode_end" in self._wants and bool(ended.any()))

    def update(self) -> None:
        """Update what callbacks see of the running episodes."""
        if self.are_shown:
            for env in range(len(self.running)):
                self.updated(env)

    def _renew(self, env: int, now: float, began_at: int) -> None:
        if not self._drawn:
            drawn = self._ids.integers(0, 1 << 63, _IDS_AT_ONCE, dtype=np.int64, endpoint=False)
            self._drawn = drawn[::-1].tolist()
        eps_id = self._drawn.pop()
        self.eps_id[env] = eps_id
        self.starts[eps_id] = began_at
        self.t[env] = 0
        self.totals[env] = 0.0
        self._began[env] = now

    # ---- calls ----

    def updated(self, env: int) -> RunningEpisode:
        """The episode of ``env`` as callbacks see it, up to now."""
        episode = self.running[env]
        episode.length, episode.total_reward = self.t.item(env), self.totals.item(env)
        return episode

    def _create(self) -> None:
        for env in self._over if self.are_shown else ():
            episode = RunningEpisode(self.eps_id.item(env), env, self._worker_index)
            self.running[env] = self.known[episode.eps_id] = episode
            self._call("on_episode_created", episode)
        self._over = []

    def _start(self, env: int, obs: Any, info: Any) -> None:
        episode = self.running[env]
        episode.last_observation, episode.last_info = self._row(obs, env), info
        self._call("on_episode_start", episode)
        _forget_values(episode)

    def _show_end(self, episode: RunningEpisode, error: Exception | None = None) -> None:
        self._over.append(episode.env_index)
        self._call("on_episode_end", episode, error=error)

    def _call(self, name: str, episode: RunningEpisode, **more: Any) -> None:
        if name in self._wants:
            envs = getattr(self._runner, "envs", None)
            getattr(self._callbacks, name)(runner=self._runner, env=envs, episode=episode, **more)

    def _row(self, obs: Any, env: int) -> Any:
        return self._nested([leaf_of(obs, path)[env] for path in self._paths])

    def _nested(self, parts: list[Any]) -> Any:
        return unflatten(self._paths, parts)

    # ---- episodes with waiting rows ----

    @property
    def not_for_training(self) -> list[int]:
        """Ids of the known episodes that are excluded from training."""
        return [eps_id for eps_id, episode in self.known.items() if not episode.training_enabled]

    def take_starts(self, eps_ids: Iterable[int], *, waiting: Iterable[int]) -> dict[int | str, int]:
        """The `starts` of episodes; forgets those of others that neither run nor have ``waiting`` rows."""
        taken: dict[int | str, int] = {eps_id: self.starts[eps_id] for eps_id in eps_ids}
        wanted = self.ids.union(waiting)
        self.starts = {eps_id: self.starts[eps_id] for eps_id in wanted}
        return taken

    def keep(self, eps_ids: Iterable[int]) -> None:
        """Forget all shown episodes except the running ones and those in ``eps_ids``."""
        wanted = {*eps_ids, *(episode.eps_id for episode in self.running)}
        self.known = {eps_id: self.known[eps_id] for eps_id in wanted if eps_id in self.known}


def _forget_values(episode: RunningEpisode) -> None:
    # These are views of arrays that the next step overwrites.
    episode.last_observation = episode.last_action = episode.last_reward = episode.last_info = None
