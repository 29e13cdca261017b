"""`LocalStepper`: steps environments that live in this process, one after the other.

Example:
    >>> import numpy as np
    >>> import gymnasium as gym
    >>> stepper = LocalStepper(gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"))
    >>> obs = stepper.reset(seed=1)
    >>> step = stepper.step(np.array([0, 1]))
    >>> step.rewards, step.valid is None, step.finals
    (array([1., 1.]), True, [])
    >>> stepper.close()
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.vector.utils import iterate

from rlio.batch.columns import Columns
from rlio.batch.copies import own_copy
from rlio.envs.env_server import EnvServer
from rlio.envs.sub_envs import SubEnvStepper
from rlio.envs.values import MOST_REWARD, as_flag, as_info, as_reward
from rlio.envs.vector import VectorStep

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium.vector import SyncVectorEnv

__all__ = ["LocalStepper"]

Recreate = Callable[[int], "gym.Env[Any, Any]"]

_GIVER = "the environment"


class LocalStepper(SubEnvStepper):
    """Steps the environments in ``envs``, whose autoreset mode has no effect here.

    Args:
        envs: Holds the environments; a failed one is replaced in ``envs.envs``.
        make: Makes environment number i again; None: environments are not recreated.
        check: Check the first reset and the first step of each.
        options: Options of `SubEnvStepper`.
    """

    def __init__(
        self, envs: SyncVectorEnv, *, make: Recreate | None = None, check: bool = False, **options: Any
    ) -> None:
        super().__init__(envs, **options)
        self._envs: list[gym.Env[Any, Any]] = envs.envs
        self._servers = [
            EnvServer(i, partial(_given_or_made, env, make), check=check) for i, env in enumerate(self._envs)
        ]
        for server in self._servers:
            server.make(False)
        #: Whether an action is a number, which cannot change.
        self._acts_by_number = type(self.action_space) is Discrete
        #: Environments whose first step was not checked yet.
        self._unchecked = set(range(self.num_envs)) if check else set()

    # ---- stepping ----

    def step(self, actions: Any) -> VectorStep:
        """Step all environments.

        Raises:
            EnvError: An environment failed and must not be recreated, or failed too often.
        """
        outcome = self._new_outcome()
        down, failing, unchecked = self._restarts.down, self._restarts.failing, self._unchecked
        waiting = self._make_due() if down else ()
        envs, write, steps = self._envs, self._buffer.write, self._steps
        keeps_infos = self.keeps_infos
        rewards, terminateds, truncateds = outcome.rewards, outcome.terminateds, outcome.truncateds
        if not (self._acts_by_number and type(actions) is np.ndarray and actions.dtype.kind in "iu"):
            # A copy, because environments may change the action that they get.
            actions = iterate(self.envs.action_space, own_copy(actions))
        for i, action in enumerate(actions):
            if waiting and i in waiting:
                continue
            try:
                result = envs[i].step(action)
                if unchecked and i in unchecked:
                    unchecked.discard(i)
                    self._servers[i].check_step(result)
                obs, reward, terminated, truncated, info = result
                usual = type(reward) is float and -MOST_REWARD <= reward <= MOST_REWARD
                rewards[i] = reward if usual else as_reward(reward, giver=_GIVER)
                if terminated is not False and terminated is not True:
                    terminated = as_flag(terminated, column=Columns.TERMINATEDS, giver=_GIVER)
                if truncated is not False and truncated is not True:
                    truncated = as_flag(truncated, column=Columns.TRUNCATEDS, giver=_GIVER)
                ended = terminated or truncated
                # A copy, because the reset may overwrite the info, and another environment may share it.
                outcome.infos[i] = (
                    as_info(info, giver=_GIVER) if keeps_infos else own_copy(info) if ended else info
                )
                if ended:
                    terminateds[i], truncateds[i] = terminated, truncated
                    outcome.finals.append((i, self._buffer.own_leaves(obs)))
                else:
                    write(i, obs)
            # Any exception, because environments are user code.
            except Exception as error:
                self._skipped.add(i)
                outcome.rewards[i] = 0
                self._failed(i, error, where=f" in step {steps[i]}")
                continue
            if failing and i in failing:
                self._restarts.stepped(i, ended=bool(terminated or truncated))
            if terminated or truncated:
                self._begin(i, self._next_seed(i))
        steps += 1
        return self._filled()

    def _begin(self, env: int, seed: int | None) -> None:
        """Start the next episode of ``env``."""
        self._steps[env] = -1
        try:
            self._reset_one(env, seed)
        except Exception as error:
            self._failed(env, error, where=" in reset")
        else:
            self._outcome.starts[env] = True

    def _reset_one(self, env: int, seed: int | None) -> None:
        _, obs, info = self._servers[env].reset(seed, self.keeps_reset_infos)
        self._buffer.write(env, obs)
        if info is not None:
            self.reset_infos[env] = info

    # ---- failures ----

    def _failed(self, env: int, error: Exception, *, where: str) -> None:
        self._note(env, error, where=where, episode=True)
        if self._restarts.is_due(env):
            self._recreate(env)

    def _make_due(self) -> set[int]:
        """Recreate environments that are due; returns those that take no part in this step."""
        down = self._restarts.down
        waiting = set(down)
        if len(down) == self.num_envs:
            time.sleep(self._restarts.seconds_until_due())
        self._skipped |= waiting
        self._recreate_due()
        return waiting

    def _recreate_due(self) -> None:
        for env in sorted(self._restarts.down):
            if self._restarts.is_due(env):
                self._recreate(env)

    def _recreate(self, env: int) -> None:
        """Try to recreate ``env``; the result is in the outcome and in `Restarts.down`."""
        try:
            self._servers[env].make(True)
            self._envs[env] = self._servers[env].env
            self._reset_one(env, self._next_seed(env))
        except Exception as error:
            self._note(env, error, where=" when it was recreated", episode=False)
        else:
            self._restarts.recreated(env)
            self._outcome.starts[env] = True
            self._steps[env] = -1
            self.on_recreated(env)

    def _reset_all(self, seed: int | None) -> None:
        self._new_outcome()
        for env in sorted(set(range(self.num_envs)) - self._restarts.down):
            self._begin(env, self._next_seed(env) if seed is None else seed + env)
        while self._restarts.down:
            time.sleep(self._restarts.seconds_until_due())
            self._recreate_due()
        self._steps[:] = 0
        self._untold = self._errors


def _given_or_made(given: Any, make: Recreate | None, index: int, recreated: bool) -> Any:
    """Return the existing environment, or make its replacement."""
    if not recreated:
        return given
    assert make is not None
    return make(index)
