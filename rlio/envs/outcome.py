"""`Outcome`: what a step of N environments gives, while it is being found out, one after the other."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.envs.vector import VectorStep

__all__ = ["Outcome"]


class Outcome:
    """A `VectorStep` in the making; its attributes are those of it.

    Args:
        num_envs: Environments.
        idle: Whether rows are nothing until somebody says otherwise; else they are transitions.
    """

    __slots__ = (
        "_valid", "errors", "faulty", "finals", "infos", "rewards", "starts", "terminateds", "truncateds",
    )  # fmt: skip

    def __init__(self, num_envs: int, *, idle: bool = False) -> None:
        self.rewards = np.zeros(num_envs)
        self.terminateds = np.zeros(num_envs, bool)
        self.truncateds = np.zeros(num_envs, bool)
        self.starts = np.zeros(num_envs, bool)
        self._valid = np.zeros(num_envs, bool) if idle else None
        self.faulty: NDArray[np.bool_] | None = None
        self.errors: dict[int, Exception] = {}
        self.finals: list[tuple[int, list[Any]]] = []
        self.infos: list[dict[str, Any]] = [{}] * num_envs

    def is_transition(self, env: int) -> None:
        """Say that row ``env`` is one, where rows are nothing at first."""
        if self._valid is not None:
            self._valid[env] = True

    def is_none(self, env: int) -> None:
        """Say that row ``env`` is no transition."""
        if self._valid is None:
            self._valid = np.ones(len(self.rewards), bool)
        self._valid[env] = False

    def failed(self, env: int, error: Exception, *, episode: bool) -> None:
        """Say that ``env`` failed with ``error``, and whether an ``episode`` is lost by it."""
        self.errors[env] = error
        if episode:
            if self.faulty is None:
                self.faulty = np.zeros(len(self.rewards), bool)
            self.faulty[env] = True

    def step(self, obs: Any) -> VectorStep:
        """The step, with the observations after it."""
        valid = self._valid
        self.finals.sort(key=itemgetter(0))  # As they came: processes answer in any order.
        return VectorStep(
            obs,
            self.rewards,
            self.terminateds,
            self.truncateds,
            None if valid is not None and valid.all() else valid,
            self.starts,
            self.finals,
            self.infos,
            self.faulty,
            self.errors,
        )
