"""`EpisodeHooks`: the episodes that run in a vector environment, as callbacks get to know them.

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

# Any throughout: what callbacks get is other people's, and observations and actions are as spaces have them.

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
    """Calls the callbacks of episodes, and keeps what these leave in them.

    Args:
        callbacks: Whose methods are called, if they are overridden.
        runner: What they get as ``runner``; its ``envs`` is what they get as ``env``.
        space: Of one environment's observations.
        num_envs: Environments.
        worker_index: Of the runner.

    Attributes:
        wants: Names of the overridden methods that have to do with episodes. Where it is empty nobody looks
            at episodes, and nothing here needs to be called.
        running: The episode of each environment.
        known: Episodes of which rows may wait, by id.
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
        self.wants = overridden(callbacks) & _HOOKS
        self.running = [RunningEpisode(-1, env, worker_index) for env in range(num_envs)]
        self._callbacks = callbacks
        self._runner = runner
        self._paths = [leaf.path for leaf in leaves_of(space)]
        self._worker_index = worker_index
        self._steps = "on_episode_step" in self.wants
        self.known: dict[int, RunningEpisode] = {}
        #: Environments whose episode is over and has no successor yet.
        self._over: list[int] = []

    # ---- what happens, in this order: begin, started; and with each step: follow, failed, renew ----

    def begin(self, eps_ids: NDArray[np.int64]) -> None:
        """Episodes are about to begin everywhere."""
        self.known.clear()
        self._over = list(range(len(self.running)))
        self._create(eps_ids)

    def started(self, obs: Any, infos: Sequence[Any]) -> None:
        """They have their first observations, and the ``infos`` that came with these."""
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
        """A step was taken.

        Args:
            step: What it gave, before connectors.
            ended: Which rows end an episode, (N,).
            sent: What the environments got.
            infos: Of the rows; None if nobody wants them.
            lengths: Of the episodes, this step included, (N,).
            totals: Sums of their rewards, (N,).
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
        """The environment failed: its episode is discarded."""
        episode = self.running[env]
        if env in self._over:  # the one that was to follow an episode that has ended
            return
        episode.length, episode.total_reward = length, total
        self._end(episode, error)
        self.known.pop(episode.eps_id, None)

    def renew(self, step: VectorStep, eps_ids: NDArray[np.int64], infos: Sequence[Any]) -> None:
        """Other episodes follow those that are over; those that ``step`` started begin.

        Args:
            step: Before connectors.
            eps_ids: Of the episodes that run now, (N,).
            infos: What came with the last reset of each environment.
        """
        self._create(eps_ids)
        if self.looks_at_starts:
            for env in np.flatnonzero(step.starts).tolist():
                self._start(env, step.obs, infos[env])

    @property
    def looks_at_starts(self) -> bool:
        """Whether a callback gets to see what resets give."""
        return "on_episode_start" in self.wants

    def looks_at(self, ended: NDArray[np.bool_]) -> bool:
        """Whether a callback gets to see the infos of a step."""
        return self._steps or ("on_episode_end" in self.wants and bool(ended.any()))

    def update(self, lengths: NDArray[np.int64], totals: NDArray[np.float64]) -> None:
        """Bring the episodes that run up to date."""
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

    # ---- episodes whose rows wait ----

    @property
    def not_for_training(self) -> list[int]:
        """Ids of the known episodes whose rows nobody wants."""
        return [eps_id for eps_id, episode in self.known.items() if not episode.training_enabled]

    def keep(self, eps_ids: Iterable[int]) -> None:
        """Forget all episodes but those that run, and those of ``eps_ids``."""
        wanted = {*eps_ids, *(episode.eps_id for episode in self.running)}
        self.known = {eps_id: self.known[eps_id] for eps_id in wanted if eps_id in self.known}


def _forget_values(episode: RunningEpisode) -> None:
    # They are views of what is overwritten next.
    episode.last_observation = episode.last_action = episode.last_reward = episode.last_info = None
