"""`Progress`: a runner's counters, as saved in its state; `check_amount`: checks the requested amount.

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

from rlio.errors import OptionError, StateError
from rlio.reader import JsonState
from rlio.sampling.trajectories import piece_starts
from rlio.support.states import whole_number

__all__ = ["Progress", "check_amount", "runner_number", "shares_of"]

# Each worker has 2^40 fragments of its own, so unroll ids of different workers never collide.
_UNROLLS_A_WORKER = 1 << 40
# Far from what int64 can hold, also after many restarts.
_MOST_COUNTED = 1 << 62
# A runner that loads a state skips this many ids, which the saving runner may have used since.
_UNROLLS_A_RESTART = 1 << 28


@dataclass(slots=True)
class Progress:
    """Counters shared by the parts of a runner. Each part counts its own work.

    Attributes:
        timesteps: Rows recorded.
        unrolls: The next ``unroll_id``.
        dropped: Recorded rows that are in no batch.
    """

    timesteps: int = 0
    unrolls: int = 0
    dropped: int = 0

    @classmethod
    def of_worker(cls, worker_index: int) -> Progress:
        """Return the initial counters of a worker."""
        return cls(unrolls=worker_index * _UNROLLS_A_WORKER)

    @classmethod
    def from_state(cls, state: JsonState) -> Progress:
        """Return the counters of a runner that loads a `state_dict` state.

        Its unroll ids differ from those used after the state was saved.

        Raises:
            StateError: A key is missing or not an integer.
        """
        timesteps, unrolls, dropped = (
            runner_number(state, key) for key in ("timesteps", "unrolls", "steps_dropped")
        )
        return cls(timesteps, unrolls + _UNROLLS_A_RESTART, dropped)

    def take_over(self, other: Progress) -> None:
        """Copy the counters of ``other``."""
        self.timesteps, self.unrolls, self.dropped = other.timesteps, other.unrolls, other.dropped

    def unroll_ids(self, eps_id: NDArray[np.int64]) -> NDArray[np.int64]:
        """Assign a new id to each run of equal ids in ``eps_id``, one value per row."""
        starts = piece_starts(eps_id)
        ids: NDArray[np.int64] = self.unrolls + np.cumsum(starts) - 1
        self.unrolls += int(starts.sum())
        return ids

    def state_dict(self, *, waiting: int = 0) -> JsonState:
        """The counters as JSON.

        Args:
            waiting: Rows that were not handed out yet. A runner that loads the state never gets them.
        """
        return {
            "timesteps": self.timesteps,
            "unrolls": self.unrolls,
            "steps_dropped": self.dropped + waiting,
        }


def check_amount(num_timesteps: int | None, num_episodes: int | None) -> None:
    """Check the amount requested from a runner's ``sample``.

    Raises:
        OptionError: Both numbers are given, or one is below 1.
    """
    if num_timesteps is not None and num_episodes is not None:
        raise OptionError(
            f"num_timesteps={num_timesteps} and num_episodes={num_episodes}: pass only one of them"
        )
    for name, number in (("num_timesteps", num_timesteps), ("num_episodes", num_episodes)):
        if number is not None and number < 1:
            raise OptionError(f"{name}={number}: expected at least 1")


def runner_number(state: JsonState, key: str) -> int:
    """Return the whole number under ``key`` in a runner's state.

    Raises:
        StateError: The key is missing, or its value is not a whole number.
    """
    try:
        most = None if key == "seed" else _MOST_COUNTED  # NumPy's seed sequences take numbers of any size.
        return whole_number(state, key, most=most, of="the runner's state")
    except StateError as error:
        raise StateError(
            f"{error}; if an earlier version saved it, restore the rest into a new worker: "
            "not_components=['position']"
        ) from None


def shares_of(episodes: int, num_envs: int) -> list[int]:
    """How many of ``episodes`` each environment plays: equal numbers, and one more in the first ones."""
    whole, more = divmod(episodes, num_envs)
    return [whole + (env < more) for env in range(num_envs)]
