"""`Progress`: how far a runner is, as its state says it; and `check_amount`: how far it is to go.

Example:
    >>> progress = Progress(timesteps=40)
    >>> progress.dropped += 3
    >>> Progress.from_state({"seed": 1, **progress.state_dict()})
    Progress(timesteps=40, unrolls=268435456, dropped=3)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlio.errors import OptionError, StateError, excerpt
from rlio.reader import JsonState
from rlio.sampling.trajectories import piece_starts

__all__ = ["Progress", "check_amount", "whole_number"]

# Unroll ids of different workers never meet: 2^40 fragments each.
_UNROLLS_A_WORKER = 1 << 40
# A runner that loads a state skips the ids that the runner which saved it may have given since.
_UNROLLS_A_RESTART = 1 << 28


@dataclass(slots=True)
class Progress:
    """Counters that the parts of a runner share: each part counts what it does.

    Attributes:
        timesteps: Rows recorded.
        unrolls: The next ``unroll_id``.
        dropped: Rows that were recorded but are in no batch.
    """

    timesteps: int = 0
    unrolls: int = 0
    dropped: int = 0

    @classmethod
    def of_worker(cls, worker_index: int) -> Progress:
        """The beginning."""
        return cls(unrolls=worker_index * _UNROLLS_A_WORKER)

    @classmethod
    def from_state(cls, state: JsonState) -> Progress:
        """That of a runner which loads a state with what `state_dict` gave.

        Its unroll ids are others than those that were given after the state was saved.

        Raises:
            StateError: A key is missing, or no whole number.
        """
        timesteps, unrolls, dropped = (
            whole_number(state, key) for key in ("timesteps", "unrolls", "steps_dropped")
        )
        return cls(timesteps, unrolls + _UNROLLS_A_RESTART, dropped)

    def take_over(self, other: Progress) -> None:
        """Go on where ``other`` is."""
        self.timesteps, self.unrolls, self.dropped = other.timesteps, other.unrolls, other.dropped

    def unroll_ids(self, eps_id: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids, never given before, of the pieces of episodes that follow one another in ``eps_id``."""
        starts = piece_starts(eps_id)
        ids: NDArray[np.int64] = self.unrolls + np.cumsum(starts) - 1
        self.unrolls += int(starts.sum())
        return ids

    def state_dict(self, *, waiting: int = 0) -> JsonState:
        """The counters as JSON.

        Args:
            waiting: Rows that were not handed out yet: who loads the state will never have them.
        """
        return {
            "timesteps": self.timesteps,
            "unrolls": self.unrolls,
            "steps_dropped": self.dropped + waiting,
        }


def check_amount(num_timesteps: int | None, num_episodes: int | None) -> None:
    """Check what a runner's ``sample`` is asked for.

    Raises:
        OptionError: Both are given, or one is below 1.
    """
    if num_timesteps is not None and num_episodes is not None:
        raise OptionError(f"num_timesteps={num_timesteps} and num_episodes={num_episodes}: give one of them")
    for name, number in (("num_timesteps", num_timesteps), ("num_episodes", num_episodes)):
        if number is not None and number < 1:
            raise OptionError(f"{name}={number}: at least 1")


def whole_number(state: JsonState, key: str) -> int:
    """What a runner's state says under ``key``.

    Raises:
        StateError: Nothing, or no whole number.
    """
    value = state.get(key)
    if not isinstance(value, int):
        raise StateError(
            f"the runner's state needs {key!r} (int), but it has {excerpt(value)}; if an earlier version "
            "saved it, restore the rest into a new worker: not_components=['position']"
        )
    return value
