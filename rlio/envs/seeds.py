"""`episode_seed`: the seed of each episode of each environment of each worker.

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

# A SeedSequence costs 10 us, so each one gives the seeds of this many episodes.
_BLOCK = 256


def _block(seed: int, worker_index: int, restart: int, env_index: int, block: int) -> list[int]:
    # In the seed tree, runners use (worker, restart, 0) and (worker, restart, 1).
    sequence = np.random.SeedSequence(seed, spawn_key=(worker_index, restart, 2, env_index, block))
    # 31 bits: some environments take a signed 32-bit int.
    return [int(number) for number in sequence.generate_state(_BLOCK) >> 1]


def episode_seed(seed: int, worker_index: int, env_index: int, episode: int, *, restart: int = 0) -> int:
    """The seed of one episode, in [0, 2^31), which is passed to ``reset(seed=...)``.

    Args:
        seed: The runner's seed: ``runner.seeds["seed"]``.
        worker_index: The runner's worker index.
        env_index: Index of the environment, as in the column ``env_id``.
        episode: Number of episodes that the environment began before, including failed ones.
        restart: Number of times that the runner loaded a state (``state_dict()["restarts"]``).
    """
    block, at = divmod(episode, _BLOCK)
    return _block(seed, worker_index, restart, env_index, block)[at]


class EpisodeSeeds:
    """The seeds of the next and the running episodes of ``num_envs`` environments.

    Args:
        seed: As in `episode_seed`, like the next two.
        worker_index: Index of the worker.
        restart: Restart count of the runner.
        num_envs: Number of environments.

    Attributes:
        episodes: Number of episodes that each environment has begun.
        current: Seed of each environment's latest episode.
    """

    def __init__(self, seed: int, *, worker_index: int = 0, restart: int = 0, num_envs: int) -> None:
        self.episodes: list[int] = [0] * num_envs
        self.current: list[int | None] = [None] * num_envs
        self._key = seed, worker_index, restart
        #: Number and seeds of the current block of each environment.
        self._blocks: list[tuple[int, list[int]]] = [(-1, [])] * num_envs

    def peek(self, env: int) -> int:
        """The seed of the next episode of environment ``env``."""
        block, at = divmod(self.episodes[env], _BLOCK)
        if self._blocks[env][0] != block:
            self._blocks[env] = block, _block(*self._key, env, block)
        return self._blocks[env][1][at]

    def next(self, env: int) -> int:
        """Return the seed of the next episode of environment ``env``, and count the episode as begun."""
        self.current[env] = seed = self.peek(env)
        self.episodes[env] += 1
        return seed
