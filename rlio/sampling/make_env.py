"""`make_stepper`: makes environments from an id, a function or an object, and their stepper.

Example:
    >>> stepper = make_stepper("CartPole-v1", RolloutConfig(num_envs=3))
    >>> stepper.num_envs, str(stepper.action_space)
    (3, 'Discrete(2)')
    >>> stepper.close()
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rlio.envs.checking import check_spaces
from rlio.envs.context import EnvContext, create
from rlio.envs.external import ExternalEnv
from rlio.envs.vector import Stepper, VectorStepper
from rlio.errors import EnvError, MissingExtra, OptionError, excerpt
from rlio.sampling.config import RolloutConfig

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.vector import VectorEnv

T = TypeVar("T")

#: Options of functions that make environments.
_OF_MAKERS = (
    "env_config",
    "vectorize_mode",
    "remote_worker_envs",
    "num_envs",
    "restart_failed_sub_environments",
)

__all__ = ["EnvLike", "ExternalEnvMade", "made", "make_stepper", "refuse_makers_options", "set_environs"]

# Any: gymnasium's generic parameters carry no information here.
if TYPE_CHECKING:
    EnvLike: TypeAlias = (
        str
        | EnvSpec
        | gym.Env[Any, Any]
        | VectorEnv[Any, Any, Any]
        | Callable[..., gym.Env[Any, Any] | VectorEnv[Any, Any, Any]]
    )
else:
    EnvLike = object


class ExternalEnvMade(OptionError):
    """A function made an environment that drives the loop, which no runner can step.

    Attributes:
        env: The environment.
    """

    def __init__(self, env: ExternalEnv, name: str) -> None:
        super().__init__(f"env={name} returned an ExternalEnv, which drives the loop: use ExternalRunner")
        self.env = env


def set_environs(environs: Mapping[str, str | float]) -> None:
    """Set environment variables of this process, which its child processes inherit; numbers as their text.

    Raises:
        OptionError: A name is not a str, or a value is neither a str nor a number.
    """
    for name, value in environs.items():
        if not isinstance(name, str) or not isinstance(value, (str, Real)):
            raise OptionError(
                f"extra_python_environs has {excerpt(name)}: {excerpt(value)}: expected str names, and "
                "values that are str or numbers"
            )
    os.environ.update({name: str(value) for name, value in environs.items()})


def make_stepper(
    env: EnvLike, config: RolloutConfig | None = None, context: EnvContext | None = None
) -> Stepper:
    """Make environments and their stepper.

    The stepper resets single environments, gives each episode its own seed, and can replace them one by one.
    A vector environment resets itself and is seeded once; its errors are raised unchanged.

    Args:
        env: A gymnasium id or spec; a function that makes an environment (or, except for ``"async"``, a
            vector environment) and may take an `EnvContext`; an environment, which cannot be copied; or a
            vector environment, also one of RLlib's kind.
        config: How to make and step them; None uses the defaults.
        context: Argument of functions that make environments. For an environment given by id, its items are
            keyword arguments. None: the ``env_config``.

    Returns:
        The stepper. The caller closes it, which also closes the environments, even one that was passed in.

    Raises:
        OptionError: The environments cannot be made as requested; the message says why.
        EnvError: An environment breaks gymnasium's API.
    """
    from gymnasium import Env
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.vector import VectorEnv

    from rlio.envs.rllib_vector import as_gymnasium

    config = RolloutConfig() if config is None else config
    context = config.context() if context is None else context
    env = as_gymnasium(env)
    if isinstance(env, VectorEnv):
        refuse_makers_options(env, config, ["env_config"])
        return _stepper_of(env, config)
    if isinstance(env, Env):
        refuse_makers_options(env, config)
        given_env = _limited(env, _horizon_of(config))
        return _local(made("env", lambda: _sync([lambda: given_env])), config, None)
    named = isinstance(env, (str, EnvSpec))
    if not named and not callable(env):
        raise _unknown(env)
    name = excerpt(getattr(env, "id", env))
    if named and (horizon := _horizon_of(config)) is not None:
        env, config = made(name, partial(_shortened, env, horizon)), replace(config, horizon=None)
    if config.vectorize_mode == "native":
        given: Any = env  # Any: `named` tells the type.
        make = partial(_native, given, config, context) if named else partial(create, given, context)
        vector = as_gymnasium(made(name, make))
        if not isinstance(vector, VectorEnv):
            raise OptionError(
                f"env={name} returned {excerpt(vector)}: expected a vector environment, which 'native' needs"
            )
        return _stepper_of(vector, config)
    one = _EnvMaker(env, config, context)
    if config.envs_are_elsewhere:
        return made(name, partial(_apart, one, config))
    first = as_gymnasium(made(name, partial(one, 0)))
    if isinstance(first, VectorEnv):
        return _stepper_of(first, config)
    if isinstance(first, ExternalEnv):
        raise ExternalEnvMade(first, name)
    if not isinstance(first, Env):
        raise OptionError(f"env={name} returned {excerpt(first)}: expected a gymnasium environment")
    makers = [lambda: first, *(partial(one, index) for index in range(1, config.num_envs))]
    return _local(made(name, partial(_sync, makers)), config, partial(one, recreated=True))


class _EnvMaker:
    """Makes environment number ``index``, in any process."""

    def __init__(self, env: Any, config: RolloutConfig, context: EnvContext) -> None:
        self._env, self._context, self._validate = env, context, config.validate_env
        self._keywords = {"render_mode": "rgb_array"} if config.render_env else {}
        self._check, self._horizon = config.check_env, _horizon_of(config)

    def __call__(self, index: int, recreated: bool = False) -> Any:
        from gymnasium import Env

        context = self._context.with_index(index, recreated=recreated)
        if callable(self._env):
            made = _limited(create(self._env, context), self._horizon)
        else:
            made = _make(self._env, **self._keywords, **context)
        if self._check and isinstance(made, Env):
            check_spaces(made, f"environment {index} ({type(made.unwrapped).__name__})")
        if self._validate is not None:
            self._validate(made, context)
        return made


def _local(
    envs: VectorEnv[Any, Any, Any], config: RolloutConfig, make: Callable[[int], gym.Env[Any, Any]] | None
) -> Stepper:
    from gymnasium.vector import SyncVectorEnv

    from rlio.envs.local import LocalStepper

    assert isinstance(envs, SyncVectorEnv)
    try:
        return LocalStepper(envs, make=make, check=config.check_env, max_restarts=config.most_restarts)
    except BaseException:
        envs.close()
        raise


def _apart(make: Callable[[int, bool], Any], config: RolloutConfig) -> Stepper:
    """The stepper of environments that live in their own processes or actors."""
    from rlio.envs.process_stepper import ProcessStepper
    from rlio.envs.served_envs import ServedEnvs

    one = partial(_one_elsewhere, make, dict(config.extra_python_environs))
    envs: ServedEnvs
    if config.remote_worker_envs:
        from rlio.envs.remote import EnvActors

        envs = EnvActors(one, num_envs=config.num_envs, check=config.check_env)
    else:
        from rlio.envs.processes import EnvProcesses

        envs = EnvProcesses(one, num_envs=config.num_envs, check=config.check_env)
    try:
        return ProcessStepper(
            envs,
            step_timeout=config.env_step_timeout,
            batch_wait_ms=config.remote_env_batch_wait_ms,
            max_restarts=config.most_restarts,
        )
    except BaseException:
        envs.close()
        raise


def _one_elsewhere(
    make: Callable[[int, bool], Any], environs: Mapping[str, str | float], index: int, recreated: bool
) -> Any:
    """Make environment ``index``, in its own process."""
    from gymnasium import Env

    set_environs(environs)
    env = make(index, recreated)
    if not isinstance(env, Env):
        raise TypeError(f"expected one gymnasium environment, found a {type(env).__name__}")
    return env


def refuse_makers_options(env: object, config: RolloutConfig, names: Iterable[str] = _OF_MAKERS) -> None:
    """Refuse options that are for functions that make environments, because ``env`` exists already.

    Raises:
        OptionError: One of the options ``names`` is not the default.
    """
    if changed := config.changed(names):
        raise OptionError(
            f"{', '.join(changed)}, but {excerpt(env)} exists already in this process: pass a function that "
            "makes it"
        )


def _horizon_of(config: RolloutConfig) -> int | None:
    """Steps after which the environments themselves end an episode."""
    return None if config.soft_horizon else config.horizon


def _stepper_of(envs: VectorEnv[Any, Any, Any], config: RolloutConfig) -> Stepper:
    """The stepper of a vector environment that a user passed or whose function made one."""
    _limited(envs, _horizon_of(config))
    # A vector environment steps its own environments; they cannot be replaced, moved or timed one by one.
    for name, value in (
        ("restart_failed_sub_environments", config.restart_failed_sub_environments),
        ("remote_worker_envs", config.remote_worker_envs),
        ("env_step_timeout", config.env_step_timeout),
        ("remote_env_batch_wait_ms", config.remote_env_batch_wait_ms),
    ):
        if value is not None and value is not False:
            raise OptionError(
                f"{name}={value}, but {excerpt(envs)} steps all its environments itself: pass a function "
                "that makes one of them"
            )
    if config.num_envs not in (1, envs.num_envs):
        raise OptionError(
            f"num_envs={config.num_envs}, but the vector environment has {envs.num_envs}: leave num_envs at 1"
        )
    return VectorStepper(envs, check=config.check_env)


def _unknown(env: object) -> OptionError:
    return OptionError(
        f"env={excerpt(env)}: expected a gymnasium id or spec, an environment, a vector environment, "
        "or a function that makes one"
    )


def made(name: str, make: Callable[[], T]) -> T:
    """Call ``make()``, turning its failure into an OptionError.

    Args:
        name: What is made, for the message.
        make: Makes it.
    """
    try:
        return make()
    except (EnvError, MissingExtra, OptionError):
        raise  # These already say what is wrong.
    except Exception as error:
        raise OptionError(
            f"env={name} cannot be made: {type(error).__name__}: {excerpt(str(error), 500)}"
        ) from error


def _shortened(env: Any, horizon: int) -> EnvSpec:
    """The spec of ``env`` with episodes of at most ``horizon`` steps."""
    import gymnasium as gym

    spec = copy.deepcopy(gym.spec(env) if isinstance(env, str) else env)
    spec.max_episode_steps = min(horizon, spec.max_episode_steps or horizon)
    return spec


def _limited(env: Any, horizon: int | None) -> Any:
    """Truncate the episodes of an environment after ``horizon`` steps, if there is one."""
    from gymnasium import Env
    from gymnasium.wrappers import TimeLimit

    if horizon is None:
        return env
    if not isinstance(env, Env):
        raise OptionError(
            f"horizon applies to single environments, not to {excerpt(env)}: give it its own time limit, or "
            "set soft_horizon=True"
        )
    return TimeLimit(env, horizon)


def _make(env: str | EnvSpec, **keywords: Any) -> gym.Env[Any, Any]:
    import gymnasium as gym

    # gymnasium's checker checks every step and only warns; ours checks once and raises.
    return gym.make(env, disable_env_checker=True, **keywords)


def _native(env: str | EnvSpec, config: RolloutConfig, context: EnvContext) -> VectorEnv[Any, Any, Any]:
    import gymnasium as gym

    return gym.make_vec(env, num_envs=config.num_envs, vectorization_mode="vector_entry_point", **context)


# SAME_STEP: every step is a transition, whereas NEXT_STEP spends one on each reset. copy=False: the recorder
# copies rows into its columns anyway.


def _sync(makers: list[Any]) -> VectorEnv[Any, Any, Any]:
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    return SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
