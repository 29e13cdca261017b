"""`ProcessStepper`: steps environments in their own processes, and skips slow or broken ones.

Example:
    >>> import gymnasium as gym
    >>> import numpy as np
    >>> from rlio.envs.processes import EnvProcesses
    >>> envs = EnvProcesses(lambda index, recreated: gym.make("CartPole-v1"), num_envs=2)
    >>> stepper = ProcessStepper(envs)
    >>> obs = stepper.reset(seed=1)
    >>> step = stepper.step(np.array([0, 1]))
    >>> step.rewards, step.valid is None, step.finals
    (array([1., 1.]), True, [])
    >>> stepper.close()
"""

from __future__ import annotations

import time
from enum import Enum
from typing import Any

from gymnasium.vector.utils import iterate

from rlio.envs.env_server import Transition
from rlio.envs.seeds import EpisodeSeeds
from rlio.envs.served_envs import ProcessDied, ServedEnvs
from rlio.envs.sub_envs import SubEnvStepper
from rlio.envs.vector import VectorStep

__all__ = ["ProcessStepper"]

# Seconds to make and reset an environment: it may import and load much before its first step.
_MAKING_SECONDS = 60.0


class _Is(Enum):
    """State of an environment."""

    FREE = 0  #: Waits for an action.
    STEPPING = 1  #: Works on an action.
    STARTING = 2  #: Is being reset, or recreated and reset.
    DOWN = 3  #: Failed, and waits to be recreated.


class ProcessStepper(SubEnvStepper):
    """Steps the environments of ``envs`` in parallel.

    Args:
        envs: The environments.
        step_timeout: Seconds after which a step, with the reset that follows it, counts as failed and its
            process is killed; None sets no limit. Calls of `reset` and restarts get at least a minute.
        batch_wait_ms: Milliseconds to wait for other environments when one is ready; 0 does not wait; None
            makes `step` wait for all that have an action. `step` waits for environments that are being
            recreated only if no other is left.
        options: Options of `SubEnvStepper`.
    """

    def __init__(
        self,
        envs: ServedEnvs,
        *,
        step_timeout: float | None = None,
        batch_wait_ms: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(envs, **options)
        self._processes = envs
        envs.patience = step_timeout
        self._batch_wait = None if batch_wait_ms is None else batch_wait_ms / 1e3
        self._limits = {
            _Is.STEPPING: step_timeout,
            _Is.STARTING: None if step_timeout is None else max(step_timeout, _MAKING_SECONDS),
        }
        self._has_limits = step_timeout is not None
        self._state = [_Is.FREE] * self.num_envs
        self._since = [0.0] * self.num_envs
        #: Environments that must be made before they are reset.
        self._unmade: set[int] = set()
        self._news = 0

    # ---- stepping ----

    def step(self, actions: Any) -> VectorStep:
        """Send actions to the environments that wait for one, and return the results.

        Waits for the first result, and for others as the options say.

        Raises:
            EnvError: An environment failed and must not be recreated, or failed too often.
        """
        self._new_outcome(idle=True)
        self._news = 0
        if self._restarts.down:
            self._make_due()
        for env, action in enumerate(iterate(self.envs.action_space, actions)):
            if self._state[env] is _Is.FREE:
                seed = None if self._seeds is None else self._seeds.peek(env)
                self._ask(env, _Is.STEPPING, "step", action, (seed, self.keeps_reset_infos))
        self._collect()
        return self._filled()

    def _collect(self) -> None:
        """Take answers until the options are satisfied."""
        until: float | None = None
        while True:
            if self._news:
                if _Is.STEPPING not in self._state:
                    return
                if self._batch_wait is not None:
                    now = time.monotonic()
                    until = now + self._batch_wait if until is None else until
                    if now >= until:
                        return
            self._take_answers(until)

    def _take_answers(self, until: float | None = None) -> None:
        """Wait up to ``until`` for a change, and process all changes."""
        for env in self._processes.ready(self._seconds(until)):
            self._take(env)
        if self._has_limits:
            self._fail_overdue()
        if self._restarts.down:
            self._make_due()

    def _seconds(self, until: float | None) -> float | None:
        """Seconds to wait for answers."""
        ends = [] if until is None else [until]
        if self._has_limits:
            for state, since in zip(self._state, self._since, strict=True):
                limit = self._limits.get(state)
                if limit is not None:
                    ends.append(since + limit)
        seconds = [end - time.monotonic() for end in ends]
        if self._restarts.down:
            down = [env for env in self._restarts.down if self._state[env] is _Is.DOWN]
            if down:
                seconds.append(self._restarts.seconds_until_due(down))
        return max(0.0, min(seconds)) if seconds else None

    def _ask(self, env: int, state: _Is, command: str, *arguments: Any) -> None:
        self._state[env], self._since[env] = state, time.monotonic()
        try:
            self._processes.ask(env, command, *arguments)
        except ProcessDied as error:
            self._failed(env, error)

    def _take(self, env: int) -> None:
        """Take the answer of ``env``."""
        made: Transition | None = None
        reset_info = None
        try:
            made, obs, reset_info = self._processes.answer(env)
            if made is None or made.error is None:
                self._buffer.write(env, obs)
        # Any exception, because environments are user code.
        except Exception as error:
            if made is None or made.final is None:
                self._failed(env, error)
                return
            made = made._replace(error=error)  # ``obs`` is from the reset after the episode.
        self._news += 1
        self._state[env] = _Is.FREE
        if made is not None:
            self._transition(env, made)
        if made is None or (made.final is not None and made.error is None):
            self._started(env, reset_info)

    def _transition(self, env: int, made: Transition) -> None:
        outcome, final = self._outcome, made.final
        self._skipped.discard(env)
        outcome.rewards[env] = made.reward
        outcome.infos[env] = made.info
        if self._restarts.failing and env in self._restarts.failing:
            self._restarts.stepped(env, ended=final is not None)
        if final is None:
            self._steps[env] += 1
            return
        outcome.terminateds[env], outcome.truncateds[env] = made.terminated, made.truncated
        outcome.finals.append((env, final))
        if self._seeds is not None:
            self._seeds.next(env)
        if made.error is not None:
            self._state[env] = _Is.STEPPING  # Treat the reset as a failed step.
            self._failed(env, made.error, where=" in reset")

    def _started(self, env: int, info: dict[str, Any] | None) -> None:
        if info is not None:
            self.reset_infos[env] = info
        self._outcome.starts[env] = True
        self._steps[env] = 0
        if env in self._unmade or env in self._restarts.down:
            self._unmade.discard(env)
            self._restarts.recreated(env)
            self.on_recreated(env)

    # ---- failures ----

    def _failed(self, env: int, error: Exception, *, where: str = "") -> None:
        """Record that ``env`` failed.

        Raises:
            EnvError: The environment must not be recreated.
        """
        self._news += 1
        starting = self._state[env] is _Is.STARTING
        if isinstance(error, (ProcessDied, TimeoutError)):
            self._processes.drop(env)
        if not self._processes.is_alive(env) or starting:
            self._unmade.add(env)
        self._state[env] = _Is.DOWN
        if not where:
            again = " when it was recreated" if env in self._restarts.down else " in reset"
            where = again if starting else f" in step {self._steps[env]}"
        self._note(env, error, where=where, episode=not starting)

    def _fail_overdue(self) -> None:
        now = time.monotonic()
        for env, state in enumerate(self._state):
            limit = self._limits.get(state)
            if limit is not None and now >= self._since[env] + limit:
                self._failed(env, TimeoutError(f"no answer for {limit:g} s, see env_step_timeout"))

    def _make_due(self) -> None:
        """Begin to recreate environments that are due."""
        for env in sorted(self._restarts.down):
            if self._state[env] is _Is.DOWN and self._restarts.is_due(env):
                self._unmade.add(env)
                self._start(env, self._next_seed(env))

    def _start(self, env: int, seed: int | None) -> None:
        """Begin a reset; recreates the environment first if necessary."""
        try:
            if not self._processes.is_alive(env):
                self._processes.spawn(env)
        except OSError as error:  # No memory for another process, or too many processes.
            self._state[env] = _Is.STARTING
            self._failed(env, error)
            return
        command = "recreate" if env in self._unmade else "reset"
        self._ask(env, _Is.STARTING, command, seed, self.keeps_reset_infos)

    # ---- resetting ----

    def reset(self, *, seed: int | None = None, seeds: EpisodeSeeds | None = None) -> Any:
        self._abandon()
        return super().reset(seed=seed, seeds=seeds)

    def _abandon(self) -> None:
        """Wait for answers that are no longer needed, and drop them."""
        for env, state in enumerate(self._state):
            if state not in (_Is.STEPPING, _Is.STARTING):
                continue
            try:
                if not self._processes.is_ready(env, self._limits[state]):
                    raise TimeoutError
                self._processes.answer(env)
            # A failure is abandoned with its episode; the following reset reports any that persists.
            except Exception as error:
                if isinstance(error, (ProcessDied, TimeoutError)):
                    self._processes.drop(env)
                    self._unmade.add(env)
                elif state is _Is.STARTING:
                    self._unmade.add(env)
            self._state[env] = _Is.FREE

    def _reset_all(self, seed: int | None) -> None:
        self._new_outcome(idle=True)
        for env in range(self.num_envs):
            if self._state[env] is _Is.DOWN and env in self._restarts.down:
                continue  # The loop below restarts it.
            self._start(env, self._next_seed(env) if seed is None else seed + env)
        while any(state is not _Is.FREE for state in self._state):
            self._take_answers()
        self._steps[:] = 0
        self._untold = self._errors
