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

from rlio.envs.env_server import EnvServer
from rlio.envs.sub_envs import Outcome, SubEnvStepper, action_iterator
from rlio.envs.vector import VectorStep
from rlio.errors import OptionError

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium.vector import SyncVectorEnv

__all__ = ["LocalStepper"]

MakeAnew = Callable[[int], "gym.Env[Any, Any]"]


class LocalStepper(SubEnvStepper):
    """Steps the environments that ``envs`` holds; its autoreset mode is of no meaning here.

    Args:
        envs: Holds them; one that failed is replaced in ``envs.envs``.
        make: Makes environment number i anew; None: they cannot be.
        check: Check the first reset and the first step of each.
        options: Of `SubEnvStepper`.

    Raises:
        OptionError: There are ``restarts``, but no ``make``.
    """

    def __init__(
        self, envs: SyncVectorEnv, *, make: MakeAnew | None = None, check: bool = False, **options: Any
    ) -> None:
        super().__init__(envs, **options)
        if self._restarts.policy is not None and make is None:
            raise OptionError(
                "restart_failed_sub_environments=True, but env is an object, which cannot be made anew: "
                "pass a function that makes it"
            )
        self._envs: list[gym.Env[Any, Any]] = envs.envs
        self._iterate = action_iterator(self.action_space, envs.action_space)
        self._servers = [
            EnvServer(i, partial(_given_or_made, env, make), buffer=self._buffer, check=check)
            for i, env in enumerate(self._envs)
        ]
        for server in self._servers:
            server.make(False)
        #: Environments whose first step was not checked yet.
        self._unchecked = set(range(self.num_envs)) if check else set()

    # ---- stepping ----

    def step(self, actions: Any) -> VectorStep:
        """Step all environments.

        Raises:
            EnvError: An environment failed, and is not to be made anew, or failed too often.
        """
        outcome = self._new_outcome()
        down, failing, unchecked = self._restarts.down, self._restarts.failing, self._unchecked
        waiting = self._make_due() if down else ()
        envs, write, steps = self._envs, self._buffer.write, self._steps
        rewards, terminateds, truncateds = outcome.rewards, outcome.terminateds, outcome.truncateds
        for i, action in enumerate(self._iterate(actions)):
            if waiting and i in waiting:
                continue
            try:
                result = envs[i].step(action)
                if unchecked and i in unchecked:
                    unchecked.discard(i)
                    self._servers[i].check_step(result)
                obs, rewards[i], terminated, truncated, outcome.infos[i] = result
                if terminated or truncated:
                    terminateds[i], truncateds[i] = terminated, truncated
                    outcome.finals.append((i, self._buffer.leaves_of(obs)))
                else:
                    write(i, obs)
            # Whatever it is: an environment is other people's code.
            except Exception as error:
                outcome.is_none(i)
                outcome.rewards[i] = 0
                self._failed(i, error, where=f" in step {steps[i]}")
                continue
            if failing and i in failing:
                self._restarts.stepped(i, ended=bool(terminated or truncated))
            if terminated or truncated:
                self._begin(i, outcome)
        steps += 1
        return outcome.step(self._buffer.value)

    def _begin(self, env: int, outcome: Outcome) -> None:
        """Start the next episode of ``env``, which ended one in this step."""
        self._steps[env] = -1
        try:
            self._reset_one(env, self._next_seed(env))
        except Exception as error:
            self._failed(env, error, where=" in reset")
        else:
            outcome.starts[env] = True

    def _reset_one(self, env: int, seed: int | None) -> None:
        _, info = self._servers[env].reset(seed, self.keeps_reset_infos)
        if info is not None:
            self.reset_infos[env] = info

    # ---- failures ----

    def _failed(self, env: int, error: Exception, *, where: str) -> None:
        self._note(env, error, where=where, episode=True)
        if self._restarts.is_due(env):
            self._make_anew(env)

    def _make_due(self) -> set[int]:
        """Make anew what is due, and return what is none of this step: what was, and what still is down."""
        down = self._restarts.down
        waiting = set(down)
        if len(down) == self.num_envs:
            time.sleep(self._restarts.seconds_until_due())
        for env in sorted(waiting):
            self._outcome.is_none(env)
            if self._restarts.is_due(env):
                self._make_anew(env)
        return waiting

    def _make_anew(self, env: int) -> None:
        """Try to; what comes out of it is in the outcome and in `Restarts.down`."""
        try:
            self._servers[env].make(True)
            self._envs[env] = self._servers[env].env
            self._reset_one(env, self._next_seed(env))
        except Exception as error:
            self._note(env, error, where=" when it was made anew", episode=False)
        else:
            self._restarts.made_anew(env)
            self._outcome.starts[env] = True
            self._steps[env] = -1
            self._tell_made_anew(env)

    def _reset_all(self, seed: int | None) -> None:
        self._steps[:] = 0
        outcome = self._new_outcome()
        for env in range(self.num_envs):
            if env in self._restarts.down:
                continue
            try:
                self._reset_one(env, self._next_seed(env) if seed is None else seed + env)
            except Exception as error:
                self._failed(env, error, where=" in reset")
        while self._restarts.down:
            time.sleep(self._restarts.seconds_until_due())
            for env in sorted(self._restarts.down):
                if self._restarts.is_due(env):
                    self._make_anew(env)
        self._steps[:] = 0
        self._untold = outcome.errors


def _given_or_made(given: Any, make: MakeAnew | None, index: int, recreated: bool) -> Any:
    """The environment that is there already, or another one in its place."""
    if not recreated:
        return given
    assert make is not None
    return make(index)
