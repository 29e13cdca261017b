"""`make_stepper`: makes environments from an id, a function or an object, and their stepper.

Example:
    >>> stepper = make_stepper("CartPole-v1", EnvSetup(num_envs=3, max_restarts=5))
    >>> stepper.num_envs, str(stepper.action_space)
    (3, 'Discrete(2)')
    >>> stepper.close()
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rlio.envs.checking import check_spaces
from rlio.envs.context import EnvContext, create
from rlio.envs.external import ExternalEnv
from rlio.envs.vector import Stepper, VectorStepper
from rlio.errors import EnvError, MissingExtra, OptionError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.vector import VectorEnv

T = TypeVar("T")

__all__ = ["EnvLike", "EnvSetup", "ExternalEnvMade", "make_stepper", "set_environs"]

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


@dataclass(frozen=True, kw_only=True)
class EnvSetup:
    """How to make and step environments: the environment fields of `RolloutConfig`.

    Attributes:
        num_envs: Number of environments. A vector environment that is passed has its own number; then 1 keeps
            it.
        vectorize_mode: ``"sync"``, ``"async"`` or ``"native"``, see `RolloutConfig`; or ``"actors"``, which
            is its ``remote_worker_envs``.
        horizon: Truncate episodes after this many steps; None leaves it to the environments.
        context: Argument of functions that make environments; its items are the ``env_config``. For an
            environment given by id, the items are keyword arguments.
        check: Check each environment and its results, once.
        validate: Called with each environment and its context, in the process that makes it; raises to reject
            it.
        max_restarts: See `rlio.envs.restarts.Restarts`.
        step_timeout: Seconds for a step or reset, with ``"async"`` or ``"actors"``.
        batch_wait_ms: See ``remote_env_batch_wait_ms`` of `RolloutConfig`.
        render: Make environments given by id with ``render_mode="rgb_array"``.
        environs: Environment variables, set in the other processes that run environments.
    """

    num_envs: int = 1
    vectorize_mode: str = "sync"
    horizon: int | None = None
    context: EnvContext = field(default_factory=EnvContext, hash=False)
    check: bool = True
    validate: Callable[[Any, EnvContext], None] | None = None
    max_restarts: int | None = None
    step_timeout: float | None = None
    batch_wait_ms: float | None = None
    render: bool = False
    environs: Mapping[str, str] = field(default_factory=dict, hash=False)


def set_environs(environs: Mapping[str, str]) -> None:
    """Set environment variables of this process, which its child processes inherit.

    Raises:
        OptionError: A name or a value is not a str.
    """
    for name, value in environs.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise OptionError(
                f"extra_python_environs has {excerpt(name)}: {excerpt(value)}: expected str names and values"
            )
    os.environ.update(environs)


def make_stepper(env: EnvLike, setup: EnvSetup | None = None) -> Stepper:
    """Make environments and their stepper.

    The stepper resets single environments, gives each episode its own seed, and can replace them one by one.
    A vector environment resets itself and is seeded once; its errors are raised unchanged.

    Args:
        env: A gymnasium id or spec; a function that makes an environment (or, except for ``"async"``, a
            vector environment) and may take an `EnvContext`; an environment, which cannot be copied; or a
            vector environment.
        setup: How to make and step them; None uses the defaults.

    Returns:
        The stepper. The caller closes it, which also closes the environments, even one that was passed in.

    Raises:
        OptionError: The environments cannot be made as requested; the message says why.
        EnvError: An environment breaks gymnasium's API.
    """
    from gymnasium import Env
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.vector import VectorEnv

    setup = setup if setup is not None else EnvSetup()
    if isinstance(env, (VectorEnv, Env)) and setup.context:
        raise OptionError(
            f"env_config={excerpt(dict(setup.context))} is used to make environments, but {excerpt(env)} "
            "exists already: pass its id, or a function that makes it"
        )
    if isinstance(env, VectorEnv):
        return _stepper_of(env, setup)
    if isinstance(env, Env):
        if setup.vectorize_mode != "sync":
            raise OptionError(
                f"{_mode(setup)}, but {excerpt(env)} is already in this process: pass its id, or a function "
                "that makes it"
            )
        if setup.num_envs != 1:
            raise OptionError(
                f"num_envs={setup.num_envs}, but env is one environment, {excerpt(env)}: pass a function "
                "that makes it"
            )
        given_env = _limited(env, setup.horizon)
        return _local(_made("env", lambda: _sync([lambda: given_env])), setup, None)
    named = isinstance(env, (str, EnvSpec))
    if not named and not callable(env):
        raise _unknown(env)
    name = excerpt(getattr(env, "id", env))
    if named and setup.horizon is not None:
        env, setup = _made(name, partial(_shortened, env, setup.horizon)), replace(setup, horizon=None)
    if setup.vectorize_mode == "native":
        given: Any = env  # Any: `named` tells the type.
        make = partial(_native, given, setup) if named else partial(create, given, setup.context)
        made = _made(name, make)
        if not isinstance(made, VectorEnv):
            raise OptionError(
                f"env={name} returned {excerpt(made)}: expected a vector environment, which 'native' needs"
            )
        return _stepper_of(made, setup)
    one = _EnvMaker(env, setup)
    if setup.vectorize_mode in ("async", "actors"):
        return _made(name, partial(_apart, one, setup))
    first = _made(name, partial(one, 0))
    if isinstance(first, VectorEnv):
        return _stepper_of(first, setup)
    if isinstance(first, ExternalEnv):
        raise ExternalEnvMade(first, name)
    if not isinstance(first, Env):
        raise OptionError(f"env={name} returned {excerpt(first)}: expected a gymnasium environment")
    makers = [lambda: first, *(partial(one, index) for index in range(1, setup.num_envs))]
    return _local(_made(name, partial(_sync, makers)), setup, partial(one, recreated=True))


class _EnvMaker:
    """Makes environment number ``index``, in any process."""

    def __init__(self, env: Any, setup: EnvSetup) -> None:
        self._env, self._context, self._validate = env, setup.context, setup.validate
        self._keywords = {"render_mode": "rgb_array"} if setup.render else {}
        self._check, self._horizon = setup.check, setup.horizon

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
    envs: VectorEnv[Any, Any, Any], setup: EnvSetup, make: Callable[[int], gym.Env[Any, Any]] | None
) -> Stepper:
    from gymnasium.vector import SyncVectorEnv

    from rlio.envs.local import LocalStepper

    assert isinstance(envs, SyncVectorEnv)
    try:
        return LocalStepper(envs, make=make, check=setup.check, max_restarts=setup.max_restarts)
    except BaseException:
        envs.close()
        raise


def _apart(make: Callable[[int, bool], Any], setup: EnvSetup) -> Stepper:
    """The stepper of environments that live in their own processes or actors."""
    from rlio.envs.process_stepper import ProcessStepper
    from rlio.envs.served_envs import ServedEnvs

    one = partial(_one_elsewhere, make, dict(setup.environs))
    envs: ServedEnvs
    if setup.vectorize_mode == "actors":
        from rlio.envs.remote import EnvActors

        envs = EnvActors(one, num_envs=setup.num_envs, check=setup.check)
    else:
        from rlio.envs.processes import EnvProcesses

        envs = EnvProcesses(one, num_envs=setup.num_envs, check=setup.check)
    try:
        return ProcessStepper(
            envs,
            step_timeout=setup.step_timeout,
            batch_wait_ms=setup.batch_wait_ms,
            max_restarts=setup.max_restarts,
        )
    except BaseException:
        envs.close()
        raise


def _one_elsewhere(
    make: Callable[[int, bool], Any], environs: Mapping[str, str], index: int, recreated: bool
) -> Any:
    """Make environment ``index``, in its own process."""
    from gymnasium import Env

    set_environs(environs)
    env = make(index, recreated)
    if not isinstance(env, Env):
        raise TypeError(f"expected one gymnasium environment, found a {type(env).__name__}")
    return env


def _mode(setup: EnvSetup) -> str:
    """The user's option that says where environments live."""
    actors = setup.vectorize_mode == "actors"
    return "remote_worker_envs=True" if actors else f"vectorize_mode={setup.vectorize_mode!r}"


def _stepper_of(envs: VectorEnv[Any, Any, Any], setup: EnvSetup) -> Stepper:
    """The stepper of a vector environment that a user passed or whose function made one."""
    # A vector environment steps its own environments; they cannot be replaced, moved or timed one by one.
    for name, value in (
        ("horizon", setup.horizon),
        ("restart_failed_sub_environments", setup.max_restarts is not None),
        ("remote_worker_envs", setup.vectorize_mode == "actors"),
        ("env_step_timeout", setup.step_timeout),
        ("remote_env_batch_wait_ms", setup.batch_wait_ms),
    ):
        if value is not None and value is not False:
            raise OptionError(
                f"{name}={value}, but {excerpt(envs)} steps all its environments itself: pass a function "
                "that makes one of them"
            )
    if setup.num_envs not in (1, envs.num_envs):
        raise OptionError(
            f"num_envs={setup.num_envs}, but the vector environment has {envs.num_envs}: leave num_envs at 1"
        )
    return VectorStepper(envs, check=setup.check)


def _unknown(env: object) -> OptionError:
    return OptionError(
        f"env={excerpt(env)}: expected a gymnasium id or spec, an environment, a vector environment, "
        "or a function that makes one"
    )


def _made(name: str, make: Callable[[], T]) -> T:
    """Call ``make()``, turning its failure into an OptionError."""
    try:
        return make()
    except (EnvError, MissingExtra, OptionError):
        raise  # These already say what is wrong.
    except Exception as error:
        raise OptionError(
            f"env={name} cannot be made: {type(error).__name__}: {excerpt(str(error), 500)}"
        ) from error


def _shortened(env: str | EnvSpec, horizon: int) -> EnvSpec:
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


def _native(env: str | EnvSpec, setup: EnvSetup) -> VectorEnv[Any, Any, Any]:
    import gymnasium as gym

    return gym.make_vec(
        env, num_envs=setup.num_envs, vectorization_mode="vector_entry_point", **setup.context
    )


# SAME_STEP: every step is a transition, whereas NEXT_STEP spends one on each reset. copy=False: the recorder
# copies rows into its columns anyway.


def _sync(makers: list[Any]) -> VectorEnv[Any, Any, Any]:
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    return SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
