"""`Collector`: steps a `VectorLoop` until there is enough for a batch: a fragment, or whole episodes.

Example:
    >>> from rlio.envs.making import EnvSetup, make_stepper
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> from rlio.rollout.config import RolloutConfig
    >>> from rlio.rollout.runner_seeds import RunnerSeeds
    >>> config = RolloutConfig(num_envs=2, rollout_fragment_length=5)
    >>> stepper = make_stepper("CartPole-v1", EnvSetup(num_envs=2))
    >>> loop = VectorLoop(stepper, RandomPolicy(), config=config, seeds=RunnerSeeds(0))
    >>> collector = Collector(loop, fragment_rows=config.rows_per_fragment)
    >>> chosen = collector.fragment(5)
    >>> rows = loop.recorder.take(chosen)
    >>> rows.counts.tolist()
    [5, 5]
    >>> chosen = collector.complete(episodes=1)  # of episodes that nobody has rows of yet
    >>> rows = loop.recorder.take(chosen)
    >>> int((rows.columns["terminateds"]).sum()), rows.columns["t"][0]
    (1, np.int64(0))
    >>> stepper.close()
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from rlio.rollout.vector_loop import VectorLoop

__all__ = ["Collector"]

logger = logging.getLogger("rlio")

# RLlib's bounds of what it calls large: a batch that waits for an episode's end.
_LARGE_BATCH, _LARGE_FRAGMENTS = 1000, 10


class Collector:
    """Collects steps in the recorder of ``loop``.

    What its methods return says which rows to take from there, shape (steps, N); None: all.

    Args:
        loop: Is stepped, and begun where it is not ready.
        fragment_rows: Of a usual batch: a warning is given where many more wait for the ends of episodes.
    """

    def __init__(self, loop: VectorLoop, *, fragment_rows: int) -> None:
        self._loop = loop
        self._fragment_rows = fragment_rows
        #: Whether rows of running episodes were collected, so that these will never be whole.
        self._is_cut = False
        self._warned = False

    def fragment(self, steps: int) -> NDArray[np.bool_] | None:
        """Collect exactly num_envs x ``steps`` rows."""
        self._make_ready()
        loop, recorder = self._loop, self._loop.recorder
        wanted = steps * recorder.num_envs
        while recorder.rows < wanted:
            if recorder.is_full:
                # With resets and failures among the steps, more of them are needed than rows.
                least = 2 * steps + 2 if loop.stepper.has_reset_steps else steps
                recorder.reserve(max(least, 2 * recorder.steps))
            loop.step()
        self._is_cut = True
        if recorder.rows == wanted:
            return None
        # The first rows in time. Rows that are left over are of the last step, unless whole episodes were
        # asked for before.
        valid = recorder.valid
        return valid & (np.cumsum(valid).reshape(valid.shape) <= wanted)

    def complete(self, *, rows: int = 0, episodes: int = 0) -> NDArray[np.bool_]:
        """Collect whole episodes: with ``rows`` rows in all, or just ``episodes``, those that ended first."""
        self._make_ready()
        if self._is_cut:
            self.begin()
        loop, recorder = self._loop, self._loop.recorder
        ended = recorder.ended
        ended_episodes, ended_rows = int(ended.sum()), int(until_last(ended, recorder.valid).sum())
        while ended_rows < rows or ended_episodes < episodes:
            if recorder.is_full:
                self._warn_if_large(rows)
                recorder.reserve(2 * recorder.capacity)
            lengths = loop.episodes.t + 1
            ended = loop.step()
            ended_episodes += int(np.count_nonzero(ended))
            ended_rows += int(lengths[ended].sum())
        ended = recorder.ended
        if episodes:
            ended &= np.cumsum(ended).reshape(ended.shape) <= episodes
        return until_last(ended, recorder.valid)

    def _make_ready(self) -> None:
        """Begin, or begin anew where the last step failed half-way."""
        if not self._loop.is_ready:
            self.begin()

    def begin(self) -> None:
        """Begin new episodes everywhere."""
        self._is_cut = False
        self._loop.begin()

    def _warn_if_large(self, rows: int) -> None:
        if rows == 1:
            return  # What was asked for is the next episode that ends, however long it is.
        limit = max(_LARGE_BATCH, _LARGE_FRAGMENTS * max(rows, self._fragment_rows))
        waiting = self._loop.recorder.rows
        if waiting > limit and not self._warned:
            self._warned = True
            logger.warning(
                "%s steps wait for their episodes to end, more than %s: if episodes are that long, set a "
                "horizon, or batch_mode='truncate_episodes'",
                waiting,
                limit,
            )


def until_last(ended: NDArray[np.bool_], valid: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of the ``valid`` rows, (steps, N), those up to each environment's last ``ended``."""
    return valid & np.logical_or.accumulate(ended[::-1], axis=0)[::-1]
