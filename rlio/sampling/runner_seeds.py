"""`RunnerSeeds`: what everything random of a runner is seeded with.

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
from rlio.sampling.progress import whole_number

__all__ = ["RunnerSeeds"]

logger = logging.getLogger("rlio")

# Places in the tree of seeds below (worker, restart); 0 was the environments', and 2 is `EpisodeSeeds`'s.
_IDS, _RANDOM_ACTIONS = 1, 3


@dataclass(frozen=True)
class RunnerSeeds:
    """Seeds of a runner, all from one number.

    Attributes:
        seed: The number.
        worker_index: Of the runner: workers with the same ``seed`` have others.
        restarts: How often a runner loaded a state since: a restored one is not to repeat its episodes.
    """

    seed: int
    worker_index: int = 0
    restarts: int = 0

    @classmethod
    def of(cls, seed: int | None, *, worker_index: int, restarts: int = 0) -> RunnerSeeds:
        """Those of ``seed``; None draws one from the OS and logs it."""
        entropy = np.random.SeedSequence(seed).entropy
        assert isinstance(entropy, int)
        if seed is None:
            logger.info("runner: seed %s, drawn from the OS", entropy)
        return cls(entropy, worker_index, restarts)

    @classmethod
    def from_state(cls, state: JsonState, *, worker_index: int) -> RunnerSeeds:
        """Those of a runner's state, for the runner with ``worker_index``.

        Raises:
            StateError: A key is missing, or no whole number.
        """
        return cls(whole_number(state, "seed"), worker_index, whole_number(state, "restarts"))

    def after_restart(self) -> RunnerSeeds:
        """Those of a runner that loads the state of this one."""
        return replace(self, restarts=self.restarts + 1)

    @property
    def policy(self) -> int:
        """The policy's: the same after restarts."""
        _, policy = np.random.SeedSequence(self.seed, spawn_key=(self.worker_index,)).spawn(2)
        return _number(policy)

    @property
    def random_actions(self) -> int:
        """That of the policy that acts at random in place of the runner's."""
        return _number(self._sequence(_RANDOM_ACTIONS))

    def episode_ids(self) -> np.random.Generator:
        """What the ids of episodes are drawn from."""
        return np.random.default_rng(self._sequence(_IDS))

    def of_episodes(self, *, num_envs: int) -> EpisodeSeeds:
        """What environments are seeded with."""
        return EpisodeSeeds(
            self.seed, worker_index=self.worker_index, restart=self.restarts, num_envs=num_envs
        )

    def as_dict(self) -> dict[str, int]:
        """``seed, worker_index, policy``, for those who want to make the same run again."""
        return {"seed": self.seed, "worker_index": self.worker_index, "policy": self.policy}

    def _sequence(self, *key: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.seed, spawn_key=(self.worker_index, self.restarts, *key))


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1)[0])
