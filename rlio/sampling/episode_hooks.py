"""`EpisodeHooks`: the running episodes of a vector environment, as callbacks see them.

Example:
    >>> from gymnasium.spaces import Box
    >>> from rlio.sampling.callbacks import Callbacks
    >>> class Tell(Callbacks):
    ...     def on_episode_start(self, *, episode, **kwargs):
    ...         print("episode", episode.eps_id, "begins with", episode.last_observation)
    >>> hooks = EpisodeHooks(Tell(), runner=None, space=Box(0.0, 9.0, (1,)), num_envs=2)
    >>> hooks.begin(np.array([77, 78]))
    >>> hooks.started(np.array([[1.0], [2.0]]), [{}, {}])
    episode 77 begins with [1.]
    episode 78 begins with [2.]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.nested import map_structure, unflatten
from rlio.envs.leaves import leaf_of, leaves_of
from rlio.sampling.callbacks import Callbacks, RunningEpisode, overridden

if TYPE_CHECKING:
    import gymnasium as gym

    from rlio.envs.vector import VectorStep

__all__ = ["EpisodeHooks"]

# Any throughout: users define what callbacks get, and spaces define observations and actions.

_HOOKS = frozenset(
    {
        "on_episode_created",
        "on_episode_start",
        "on_episode_step",
        "on_episode_end",
        "on_postprocess_trajectory",
    }
)


class EpisodeHooks:
    """Calls the episode callbacks, and keeps the data that they store in episodes.

    Args:
        callbacks: The callbacks; only overridden methods are called.
        runner: Passed to callbacks as ``runner``; its ``envs`` is passed as ``env``.
        space: Space of one environment's observations.
        num_envs: Number of environments.
        worker_index: Index of the runner's worker.

    Attributes:
        wants: Names of the overridden episode methods. If empty, this object need not be called.
        running: The episode of each environment.
        known: Episodes that may have waiting rows, by id.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        *,
        runner: Any,
        space: gym.Space[Any],
        num_envs: int,
        worker_index: int = 0,
    ) -> None:
        self.wants: frozenset[str] = overridden(callbacks) & _HOOKS
        self.running: list[RunningEpisode] = [
            RunningEpisode(-1, env, worker_index) for env in range(num_envs)
        ]
        self._callbacks = callbacks
        self._runner = runner
        self._paths = [leaf.path for leaf in leaves_of(space)]
        self._worker_index = worker_index
        self._steps = "on_episode_step" in self.wants
        self.known: dict[int, RunningEpisode] = {}
        #: Environments whose episode ended and that have no new one yet.
        self._over: list[int] = []

    # ---- events, in this order: begin, started; then for each step: follow, failed, renew ----

    def begin(self, eps_ids: NDArray[np.int64]) -> None:
        """Announce new episodes in all environments."""
        self.known.clear()
        self._over = list(range(len(self.running)))
        self._create(eps_ids)

    def started(self, obs: Any, infos: Sequence[Any]) -> None:
        """Pass the first observations with their ``infos`` to callbacks."""
        for env in range(len(self.running)):
            self._start(env, obs, infos[env])

    def follow(
        self,
        step: VectorStep,
        ended: NDArray[np.bool_],
        *,
        sent: Any,
        infos: Sequence[Any] | None,
        lengths: NDArray[np.int64],
        totals: NDArray[np.float64],
    ) -> None:
        """Pass a step to callbacks.

        Args:
            step: The step, before connectors.
            ended: Mask of the rows that end an episode, (N,).
            sent: The actions that the environments got.
            infos: Infos of the rows; None if no callback needs them.
            lengths: Lengths of the episodes, including this step, (N,).
            totals: Sums of the episodes' rewards, (N,).
        """
        finals = dict(step.finals)
        told = np.flatnonzero(ended)
        if self._steps:
            told = np.arange(len(ended)) if step.valid is None else np.flatnonzero(step.valid)
        for env in told.tolist():
            final = finals.get(env)
            episode = self.running[env]
            episode.length, episode.total_reward = int(lengths[env]), float(totals[env])
            episode.last_observation = self._row(step.obs, env) if final is None else self._nested(final)
            episode.last_action = map_structure(lambda leaf, env=env: leaf[env], sent)
            episode.last_reward = float(step.rewards[env])
            episode.last_info = None if infos is None else infos[env]
            self._call("on_episode_step", episode)
            if ended[env]:
                self._end(episode)
            _forget_values(episode)

    def failed(self, env: int, error: Exception | None, *, length: int, total: float) -> None:
        """End the episode of a failed environment; the episode is discarded."""
        episode = self.running[env]
        if env in self._over:  # its episode already ended, and the next one has not begun
            return
        episode.length, episode.total_reward = length, total
        self._end(episode, error)
        self.known.pop(episode.eps_id, None)

    def renew(self, step: VectorStep, eps_ids: NDArray[np.int64], infos: Sequence[Any]) -> None:
        """Replace ended episodes by new ones, and start those that ``step`` started.

        Args:
            step: The step, before connectors.
            eps_ids: Ids of the running episodes, (N,).
            infos: Infos of each environment's last reset.
        """
        self._create(eps_ids)
        if self.looks_at_starts:
            for env in np.flatnonzero(step.starts).tolist():
                self._start(env, step.obs, infos[env])

    @property
    def looks_at_starts(self) -> bool:
        """Whether a callback needs the results of resets."""
        return "on_episode_start" in self.wants

    def looks_at(self, ended: NDArray[np.bool_]) -> bool:
        """Whether a callback needs the infos of a step."""
        return self._steps or ("on_episode_end" in self.wants and bool(ended.any()))

    def update(self, lengths: NDArray[np.int64], totals: NDArray[np.float64]) -> None:
        """Update the lengths and rewards of running episodes."""
        for episode, length, total in zip(self.running, lengths.tolist(), totals.tolist(), strict=True):
            episode.length, episode.total_reward = length, total

    # ---- calls ----

    def _create(self, eps_ids: NDArray[np.int64]) -> None:
        for env in self._over:
            episode = RunningEpisode(int(eps_ids[env]), env, self._worker_index)
            self.running[env] = self.known[episode.eps_id] = episode
            self._call("on_episode_created", episode)
        self._over = []

    def _start(self, env: int, obs: Any, info: Any) -> None:
        if self.looks_at_starts:
            episode = self.running[env]
            episode.last_observation, episode.last_info = self._row(obs, env), info
            self._call("on_episode_start", episode)
            _forget_values(episode)

    def _end(self, episode: RunningEpisode, error: Exception | None = None) -> None:
        self._over.append(episode.env_index)
        if "on_episode_end" in self.wants:
            self._callbacks.on_episode_end(
                runner=self._runner, env=self._runner.envs, episode=episode, error=error
            )

    def _call(self, name: str, episode: RunningEpisode) -> None:
        if name in self.wants:
            envs = getattr(self._runner, "envs", None)
            getattr(self._callbacks, name)(runner=self._runner, env=envs, episode=episode)

    def _row(self, obs: Any, env: int) -> Any:
        return self._nested([leaf_of(obs, path)[env] for path in self._paths])

    def _nested(self, parts: list[Any]) -> Any:
        return unflatten(self._paths, parts)

    # ---- episodes with waiting rows ----

    @property
    def not_for_training(self) -> list[int]:
        """Ids of the known episodes that are excluded from training."""
        return [eps_id for eps_id, episode in self.known.items() if not episode.training_enabled]

    def keep(self, eps_ids: Iterable[int]) -> None:
        """Forget all episodes except the running ones and those in ``eps_ids``."""
        wanted = {*eps_ids, *(episode.eps_id for episode in self.running)}
        self.known = {eps_id: self.known[eps_id] for eps_id in wanted if eps_id in self.known}


def _forget_values(episode: RunningEpisode) -> None:
    # These are views of arrays that the next step overwrites.
    episode.last_observation = episode.last_action = episode.last_reward = episode.last_info = None
