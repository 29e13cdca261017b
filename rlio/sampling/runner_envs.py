"""`RunnerEnvs`: makes, recreates and closes the environments of an `EnvRunner`, and notifies callbacks.

Example:
    >>> from rlio.sampling.callbacks import Callbacks
    >>> from rlio.sampling.config import RolloutConfig
    >>> class Tell(Callbacks):
    ...     def on_environment_created(self, *, env, **kwargs):
    ...         print("made", env.num_envs)
    >>> envs = RunnerEnvs("CartPole-v1", config=RolloutConfig(num_envs=3), callbacks=Tell(), runner=None)
    >>> envs.make()
    made 3
    >>> envs.env_id
    'CartPole-v1'
    >>> envs.close()
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rlio.envs.context import EnvContext
from rlio.envs.make import EnvLike, make_stepper, set_environs
from rlio.envs.sub_envs import SubEnvStepper
from rlio.envs.vector import Stepper
from rlio.errors import OptionError
from rlio.sampling.callbacks import Callbacks, overridden
from rlio.sampling.config import RolloutConfig

__all__ = ["RunnerEnvs"]


class RunnerEnvs:
    """The environments that a runner steps. Call `make` first.

    Args:
        env: Environment that `make_stepper` accepts.
        config: How to make and step the environments.
        callbacks: Called when environments are made.
        runner: Passed to callbacks as ``runner``.
        worker_index: Passed to functions that make environments, like the next two.
        num_workers: Total number of workers.
        recreated_worker: Whether the worker replaces a failed one.

    Raises:
        OptionError: Environment variables of the process cannot be set.
    """

    def __init__(
        self,
        env: EnvLike,
        *,
        config: RolloutConfig,
        callbacks: Callbacks,
        runner: Any,
        worker_index: int = 0,
        num_workers: int = 0,
        recreated_worker: bool = False,
    ) -> None:
        self._given = env
        self._config = config
        self._context = EnvContext(
            config.env_config,
            worker_index=worker_index,
            num_workers=num_workers,
            remote=config.envs_are_elsewhere,
            recreated_worker=recreated_worker,
        )
        self._callbacks = callbacks
        self._runner = runner
        self._made: Stepper | None = None
        self._failures_told = 0
        set_environs(config.extra_python_environs)

    def make(self) -> None:
        """Make the environments; closes the previous ones, if any.

        Raises:
            OptionError: The environments cannot be made, or cannot be rendered as requested.
            EnvError: An environment breaks gymnasium's API.
        """
        self.close()
        self._made = stepper = make_stepper(self._given, self._config, self._context)
        self._failures_told = 0
        if self._config.render_env and stepper.envs.render_mode is None:
            stepper.close()
            raise OptionError(
                "render_env=True, but the environments have no render mode: set it in the function that "
                "makes them, as in gymnasium.make(id, render_mode='rgb_array')"
            )
        self._callbacks.on_environment_created(runner=self._runner, env=stepper.envs)
        if "on_sub_environment_created" in overridden(self._callbacks):
            for i in range(stepper.num_envs):
                self._tell_of(i)
            if isinstance(stepper, SubEnvStepper):
                stepper.on_recreated = partial(self._tell_of, recreated=True)

    def _tell_of(self, env: int, recreated: bool = False) -> None:
        made = getattr(self.stepper.envs, "envs", None)
        self._callbacks.on_sub_environment_created(
            runner=self._runner,
            env=None if made is None else made[env],
            env_index=env,
            context=self._context.with_index(env, recreated=recreated),
        )

    @property
    def stepper(self) -> Stepper:
        """The stepper of the environments."""
        assert self._made is not None, "make() comes first"
        return self._made

    @property
    def env_id(self) -> str | None:
        """The environments' registered id; None if it is unknown."""
        if isinstance(self._given, str):
            return self._given
        envs = self.stepper.envs
        first = next(iter(getattr(envs, "envs", ())), None)
        spec = envs.spec or getattr(first, "spec", None)
        return None if spec is None else str(spec.id)

    def take_failures(self) -> int:
        """Number of environment failures since the last call, or since the environments were made."""
        new = self.stepper.failures - self._failures_told
        self._failures_told += new
        return new

    def close(self) -> None:
        """Close the environments, if they were made."""
        if self._made is not None:
            self._made.close()
