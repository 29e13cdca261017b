"""`episode_seed`: what each episode of each environment of each worker is seeded with.

Example:
    >>> seeds = EpisodeSeeds(7, worker_index=1, num_envs=2)
    >>> first = [seeds.next(0), seeds.next(0), seeds.next(1)]
    >>> first == [episode_seed(7, 1, env, episode) for env, episode in ((0, 0), (0, 1), (1, 0))]
    True
    >>> len(set(first))
    3
"""

from __future__ import annotations

import numpy as np

__all__ = ["EpisodeSeeds", "episode_seed"]

# A SeedSequence costs 10 us: one gives the seeds of so many episodes.
_BLOCK = 256


def _block(seed: int, worker_index: int, restart: int, env_index: int, block: int) -> list[int]:
    # In the tree of seeds, runners use (worker, restart, 0) and (worker, restart, 1).
    sequence = np.random.SeedSequence(seed, spawn_key=(worker_index, restart, 2, env_index, block))
    # 31 bits: some environments take a signed 32-bit int.
    return [int(number) for number in sequence.generate_state(_BLOCK) >> 1]


def episode_seed(seed: int, worker_index: int, env_index: int, episode: int, *, restart: int = 0) -> int:
    """The seed of one episode, in [0, 2^31): what ``reset(seed=...)`` gets.

    Args:
        seed: The runner's: ``runner.seeds["seed"]``.
        worker_index: Its worker index.
        env_index: The environment, as in the column ``env_id``.
        episode: How many episodes that environment had begun before, those included that failed.
        restart: How often the runner had loaded a state (``state_dict()["restarts"]``).
    """
    block, at = divmod(episode, _BLOCK)
    return _block(seed, worker_index, restart, env_index, block)[at]


class EpisodeSeeds:
    """The seeds of the next episodes of ``num_envs`` environments, and of those that run.

    Args:
        seed: As for `episode_seed`, like the next two.
        worker_index: Of the worker.
        restart: Of the runner.
        num_envs: Environments.

    Attributes:
        episodes: Episodes that each environment has begun.
        current: The seed of each environment's last begun episode.
    """

    def __init__(self, seed: int, *, worker_index: int = 0, restart: int = 0, num_envs: int) -> None:
        self.episodes = [0] * num_envs
        self.current: list[int | None] = [None] * num_envs
        self._key = seed, worker_index, restart
        self._blocks: list[list[int]] = [[] for _ in range(num_envs)]
        self._block_of = [-1] * num_envs

    def peek(self, env: int) -> int:
        """The seed of the next episode of environment ``env``."""
        block, at = divmod(self.episodes[env], _BLOCK)
        if block != self._block_of[env]:
            self._blocks[env] = _block(*self._key, env, block)
            self._block_of[env] = block
        return self._blocks[env][at]

    def next(self, env: int) -> int:
        """The seed of the next episode of environment ``env``, which begins now."""
        self.current[env] = seed = self.peek(env)
        self.episodes[env] += 1
        return seed
