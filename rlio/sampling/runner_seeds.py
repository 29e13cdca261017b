"""`RunnerSeeds`: the seeds of a runner's random generators.

Example:
    >>> seeds = RunnerSeeds.of(7, worker_index=2)
    >>> seeds.as_dict()["seed"], seeds.as_dict()["worker_index"]
    (7, 2)
    >>> bool(seeds.episode_ids().integers(99) == seeds.episode_ids().integers(99))
    True
    >>> seeds.of_episodes(num_envs=1).next(0) == seeds.after_restart().of_episodes(num_envs=1).next(0)
    False
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from rlio.envs.seeds import EpisodeSeeds
from rlio.reader import JsonState
from rlio.sampling.progress import runner_number

__all__ = ["RunnerSeeds"]

logger: logging.Logger = logging.getLogger("rlio")

# Positions in the seed tree below (worker, restart). Position 0 was the environments'; 2 belongs to
# `EpisodeSeeds`.
_IDS, _RANDOM_ACTIONS = 1, 3


@dataclass(frozen=True)
class RunnerSeeds:
    """Seeds of a runner, all derived from one number.

    Attributes:
        seed: The number that all seeds derive from.
        worker_index: Index of the runner's worker; workers with the same ``seed`` get different seeds.
        restarts: How often a runner has loaded a state since, because a restored runner must not repeat its
            episodes.
    """

    seed: int
    worker_index: int = 0
    restarts: int = 0

    @classmethod
    def of(cls, seed: int | None, *, worker_index: int, restarts: int = 0) -> RunnerSeeds:
        """Return the seeds that derive from ``seed``; None draws one from the OS and logs it."""
        entropy = np.random.SeedSequence(seed).entropy
        assert isinstance(entropy, int)
        if seed is None:
            logger.info("runner: seed %s, drawn from the OS", entropy)
        return cls(entropy, worker_index, restarts)

    @classmethod
    def from_state(cls, state: JsonState, *, worker_index: int) -> RunnerSeeds:
        """Return the seeds in a runner's state, for the runner with ``worker_index``.

        Raises:
            StateError: A key is missing or not an integer.
        """
        return cls(runner_number(state, "seed"), worker_index, runner_number(state, "restarts"))

    def after_restart(self) -> RunnerSeeds:
        """Return the seeds of a runner that loads this runner's state."""
        return replace(self, restarts=self.restarts + 1)

    @property
    def policy(self) -> int:
        """The policy's seed, the same after restarts."""
        _, policy = np.random.SeedSequence(self.seed, spawn_key=(self.worker_index,)).spawn(2)
        return _number(policy)

    @property
    def random_actions(self) -> int:
        """Seed of the random policy that replaces the runner's for random actions."""
        return _number(self._sequence(_RANDOM_ACTIONS))

    def episode_ids(self) -> np.random.Generator:
        """Make the generator that draws episode ids."""
        return np.random.default_rng(self._sequence(_IDS))

    def of_episodes(self, *, num_envs: int) -> EpisodeSeeds:
        """Make the seeds of the environments' resets."""
        return EpisodeSeeds(
            self.seed, worker_index=self.worker_index, restart=self.restarts, num_envs=num_envs
        )

    def as_dict(self) -> dict[str, int]:
        """Return ``seed, worker_index, policy``, which reproduce the run."""
        return {"seed": self.seed, "worker_index": self.worker_index, "policy": self.policy}

    def _sequence(self, *key: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.seed, spawn_key=(self.worker_index, self.restarts, *key))


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1)[0])
