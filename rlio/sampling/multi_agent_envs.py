"""`MultiAgentEnvs`: makes, seeds, steps and recreates the environments of a multi-agent runner.

Example:
    >>> from rlio.envs.multi_agent import make_multi_agent
    >>> from rlio.sampling.config import RolloutConfig
    >>> make = make_multi_agent("CartPole-v1")
    >>> config = RolloutConfig(num_envs=2, env_config={"num_agents": 3})
    >>> envs = MultiAgentEnvs(make, config=config, context=config.context())
    >>> envs.seeds = EpisodeSeeds(0, num_envs=2)
    >>> step = envs.reset(1)
    >>> sorted(step.observations), envs.seeds.current
    ([0, 1, 2], [None, 1038405988])
    >>> envs.close()
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from rlio.envs.context import EnvContext, create
from rlio.envs.external import ExternalEnv
from rlio.envs.multi_agent import MultiAgentDict, MultiAgentEnv
from rlio.envs.multi_agent_processes import MultiAgentProcess, ready
from rlio.envs.multi_agent_stepping import MultiAgentStep, MultiAgentStepper
from rlio.envs.pettingzoo import as_multi_agent_env
from rlio.envs.restarts import Restarts
from rlio.envs.seeds import EpisodeSeeds
from rlio.envs.served_envs import ProcessDied
from rlio.errors import OptionError, RlioError, excerpt
from rlio.sampling.make_env import ExternalEnvMade, made, refuse_makers_options, set_environs

if TYPE_CHECKING:
    from rlio.sampling.config import RolloutConfig

__all__ = ["MultiAgentEnvLike", "MultiAgentEnvs"]

logger: logging.Logger = logging.getLogger("rlio")

#: A MultiAgentEnv, a PettingZoo environment, or a function that makes one. Any: PettingZoo's classes.
MultiAgentEnvLike = Any
#: Called for each environment made, with its index, the environment and the context of its maker.
OnMade = Callable[[int, MultiAgentEnv, EnvContext], None]


class MultiAgentEnvs:
    """Environments, stepped one by one in this process, or in parallel with a process each.

    Args:
        env: A `MultiAgentEnv` or a PettingZoo environment, which cannot be copied; or a function that makes
            one and may take an `EnvContext`.
        config: Number of environments, and how to handle failures.
        context: Passed to the function.
        on_made: Called for each environment.

    Attributes:
        seeds: Seeds of the episodes that follow; set it before the first `reset`.
        restarts: Environments that are down.
        errors: Last error of each failed environment.

    Raises:
        OptionError: An environment cannot be made, or ``env`` is invalid.
    """

    seeds: EpisodeSeeds

    def __init__(
        self,
        env: MultiAgentEnvLike,
        *,
        config: RolloutConfig,
        context: EnvContext,
        on_made: OnMade | None = None,
    ) -> None:
        _check_mode(config)
        self._config = config
        self._on_made = on_made
        self._context = context
        self._build = partial(_build, self._maker(env), self._context, config)
        set_environs(config.extra_python_environs)
        self.restarts: Restarts = Restarts(config.most_restarts, num_envs=config.num_envs)
        self.errors: dict[int, Exception] = {}
        self._steppers: list[MultiAgentStepper | MultiAgentProcess] = []
        #: Actions of the steps that are running.
        self._sent: dict[int, MultiAgentDict] = {}
        with ExitStack() as opened:
            for index in range(config.num_envs):
                self._steppers.append(made(excerpt(env), partial(self._made, index)))
                opened.callback(self._steppers[-1].close)
            opened.pop_all()

    def _maker(self, env: MultiAgentEnvLike) -> Callable[[EnvContext], Any]:
        if isinstance(env, str) or env is None:
            raise OptionError(
                f"env={excerpt(env)}: expected a MultiAgentEnv, a PettingZoo environment, or a function "
                "that makes one, such as make_multi_agent('CartPole-v1')"
            )
        if not callable(env) or isinstance(env, MultiAgentEnv):
            given = as_multi_agent_env(env)
            refuse_makers_options(env, self._config)
            return lambda _: given
        return partial(create, env)

    def _made(self, index: int, *, recreated: bool = False) -> MultiAgentStepper | MultiAgentProcess:
        config = self._config
        stepper: MultiAgentStepper | MultiAgentProcess
        horizon = None if config.soft_horizon else config.horizon
        if config.vectorize_mode == "async":
            stepper = MultiAgentProcess(
                index,
                self._build,
                recreated=recreated,
                horizon=horizon,
                check=config.check_env,
                timeout=config.env_step_timeout,
            )
        else:
            stepper = MultiAgentStepper(
                self._build(index, recreated), horizon=horizon, check=config.check_env
            )
        if self._on_made is not None:
            self._on_made(index, stepper.env, self._context.with_index(index, recreated=recreated))
        return stepper

    # ---- properties ----

    def __len__(self) -> int:
        return len(self._steppers)

    @property
    def envs(self) -> list[MultiAgentEnv]:
        """The environments, including failed ones."""
        return [stepper.env for stepper in self._steppers]

    # ---- stepping ----

    @property
    def up(self) -> list[int]:
        """Environments that are not down."""
        down = self.restarts.down
        return [index for index in range(len(self)) if index not in down]

    def revive(self, *, wait: bool = False) -> list[int]:
        """Recreate failed environments that are due, and return their indexes. Then call `reset` on them.

        Args:
            wait: Whether to wait until one is due.

        Raises:
            EnvError: An environment failed too often.
        """
        restarts = self.restarts
        if wait and restarts.down:
            time.sleep(restarts.seconds_until_due())
        revived = []
        for index in sorted(restarts.down):
            if not restarts.is_due(index):
                continue
            try:
                self._close_quietly(index)
                self._steppers[index] = self._made(index, recreated=True)
            except Exception as error:
                restarts.failed(index, error, where=" when it was recreated")
            else:
                restarts.recreated(index)
                revived.append(index)
        return revived

    def _close_quietly(self, index: int) -> None:
        try:
            self._steppers[index].close()
        except Exception as error:
            # Its earlier failure was reported already; a new environment replaces it.
            logger.debug("environment %s failed to close: %s", index, error)

    def reset(self, index: int) -> MultiAgentStep | None:
        """Start an episode; returns None if the environment failed and is down.

        Raises:
            EnvError: The environment failed and must not be recreated.
            SchemaError: The environment returned invalid data.
        """
        self._sent.pop(index, None)
        seed = self.seeds.next(index)
        return self._tried(index, "in reset()", lambda stepper: stepper.reset(seed=seed))

    def send(self, index: int, actions: MultiAgentDict) -> None:
        """Begin a step, unless one is running; `step` returns its result."""
        self._sent[index] = actions
        stepper = self._steppers[index]
        if isinstance(stepper, MultiAgentProcess):
            stepper.send(actions)

    def is_stepping(self, index: int) -> bool:
        """Whether a step is running."""
        return index in self._sent

    def sent(self, index: int) -> MultiAgentDict:
        """The actions of the running step."""
        return self._sent[index]

    def ready(self, wanted: Sequence[int]) -> Sequence[int]:
        """The stepping environments of ``wanted`` to continue with; see `remote_env_batch_wait_ms`."""
        wait_ms = self._config.remote_env_batch_wait_ms
        if wait_ms is None or not wanted:
            return wanted
        processes = {index: self._steppers[index] for index in wanted}
        return ready({i: each for i, each in processes.items() if isinstance(each, MultiAgentProcess)},
                     wait_ms=wait_ms)  # fmt: skip

    def step(self, index: int) -> MultiAgentStep | None:
        """Return the result of the step that `send` began; see `reset`."""
        actions = self._sent.pop(index)

        def taken(stepper: MultiAgentStepper | MultiAgentProcess) -> MultiAgentStep:
            return stepper.step() if isinstance(stepper, MultiAgentProcess) else stepper.step(actions)

        step = self._tried(index, "in step()", taken)
        if step is not None and index in self.restarts.failing:
            self.restarts.stepped(index, ended=step.is_over)
        return step

    def _tried(
        self,
        index: int,
        where: str,
        call: Callable[[MultiAgentStepper | MultiAgentProcess], MultiAgentStep],
    ) -> MultiAgentStep | None:
        stepper = self._steppers[index]
        try:
            return call(stepper)
        except Exception as error:
            if isinstance(error, RlioError) and not isinstance(error, ProcessDied):
                raise  # the environment is invalid, which a restart does not fix
            self.errors[index] = error
            self.restarts.failed(
                index,
                error,
                where=f" {where}, step {stepper.steps}",
                episode=self.seeds.episodes[index] - 1,
                seed=self.seeds.current[index],
            )
            return None

    def close(self) -> None:
        """Close all environments."""
        with ExitStack() as stack:
            for stepper in self._steppers:
                stack.callback(stepper.close)


def _build(
    make: Callable[[EnvContext], Any], context: EnvContext, config: RolloutConfig, index: int, recreated: bool
) -> MultiAgentEnv:
    """Make an environment, in the process that will step it."""
    at = context.with_index(index, recreated=recreated)
    given = make(at)
    if isinstance(given, ExternalEnv):
        raise ExternalEnvMade(given, excerpt(make))
    env = as_multi_agent_env(given)
    if config.validate_env is not None:
        config.validate_env(env, at)
    if config.render_env and getattr(env, "render_mode", None) is None:
        raise OptionError(
            f"render_env=True, but {type(env).__name__} has no render_mode: set it where the environment is "
            "made, for example to 'rgb_array'"
        )
    return env


def _check_mode(config: RolloutConfig) -> None:
    if config.vectorize_mode == "native" or config.remote_worker_envs:
        raise OptionError(
            f"vectorize_mode={config.vectorize_mode!r}, remote_worker_envs={config.remote_worker_envs}: "
            "environments with several agents are stepped in this process, 'sync', or in one each, 'async'"
        )
