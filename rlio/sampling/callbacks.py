"""`Callbacks`: user hooks into sampling and learning.

`RunningEpisode` is the episode that callbacks see.

Example:
    >>> class Angles(Callbacks):
    ...     def on_episode_end(self, *, episode, error=None, **kwargs):
    ...         episode.custom_metrics["is_long"] = episode.length > 100
    >>> sorted(overridden(combine([Angles, Callbacks()])))
    ['on_episode_end']
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeAlias

from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.errors import OptionError, excerpt
from rlio.sampling.callback_arguments import OLD_NAMES, with_arguments

if TYPE_CHECKING:
    import os

    from rlio.batch import Batch, SampleBatch
    from rlio.policies.policy import Policy

__all__ = ["Callbacks", "CallbacksLike", "RunningEpisode", "combine", "overridden"]

# Any in this module: environments and runners come from gymnasium, PettingZoo, rlio and users.


@dataclass(slots=True, eq=False)
class RunningEpisode:
    """A running episode that callbacks can read and write.

    Attributes:
        eps_id: As in the column ``eps_id``.
        env_index: Index of its environment in the runner.
        worker_index: Index of its worker.
        length: Environment steps so far.
        total_reward: Sum of all agents' unclipped rewards so far.
        agent_rewards: Sum of each agent's unclipped rewards, by (agent id, policy id); empty with one agent.
        agent_policies: Agent id -> id of the policy that acts for it, set at the agent's first action.
        last_observation: The agent's latest observation, not preprocessed; with several agents, by agent id.
            This attribute and the next three are set only in ``on_episode_start``, ``_step`` and ``_end``.
            They belong to the runner: copy what you keep.
        last_action: The latest action sent to the environment; None before the first step.
        last_reward: The reward of the latest step; None before the first step.
        last_info: The info of the latest observation.
        custom_metrics: Numbers that go into the metrics when the episode ends.
        hist_data: Lists of numbers that go into the metrics when the episode ends.
        media: Pictures, videos and the like that go into the metrics when the episode ends.
        user_data: Free for callbacks; rlio does not read it.
        training_enabled: Whether its rows go into batches. If a callback sets it to False before the rows are
            handed out, they are dropped and counted; the metrics still include the episode.
    """

    eps_id: int
    env_index: int = 0
    worker_index: int = 0
    length: int = 0
    total_reward: float = 0.0
    agent_rewards: dict[tuple[Any, str], float] = field(default_factory=dict)
    agent_policies: dict[Any, str] = field(default_factory=dict)
    last_observation: Any = None
    last_action: Any = None
    last_reward: Any = None
    last_info: Any = None
    custom_metrics: dict[str, Any] = field(default_factory=dict)
    hist_data: dict[str, list[Any]] = field(default_factory=dict)
    media: dict[str, Any] = field(default_factory=dict)
    user_data: dict[str, Any] = field(default_factory=dict)
    training_enabled: bool = True

    def policy_for(self, agent_id: Any = None) -> str:
        """The id of the policy that acts for ``agent_id``; pass None if there is one agent.

        Raises:
            OptionError: The agent has not acted in this episode.
        """
        if agent_id is None and not self.agent_policies:
            return DEFAULT_POLICY_ID
        try:
            return self.agent_policies[agent_id]
        except KeyError:
            raise OptionError(
                f"no policy acts for the agent {excerpt(agent_id)} in episode {self.eps_id}: agents so far "
                f"are {excerpt(list(self.agent_policies))}"
            ) from None


class Callbacks:
    """Methods that are called while workers sample and learn. Override those you need; the rest do nothing.

    All arguments are keywords. A method gets those that it names, and with ``**kwargs`` the others of this
    class too. It may also name arguments of RLlib, see `rlio.sampling.callback_arguments`. Only overridden
    methods are called, so an unused ``on_episode_step`` costs nothing. An exception in a callback is raised
    from the call that triggered it. ``env`` is the (vector) environment and ``runner`` the runner: an
    `EnvRunner`, a `MultiAgentEnvRunner` or another sampler.

    In each step, methods are called environment by environment: `on_episode_step`; if the episode ends,
    `on_postprocess_trajectory` for each agent in the order in which they appeared, `on_episode_end`,
    `on_episode_created` and `on_episode_start`; if it is cut instead, because the fragment is complete,
    `on_postprocess_trajectory`.
    """

    # ---- environments ----

    def on_environment_created(self, *, runner: Any, env: Any, context: Any = None, **kwargs: Any) -> None:
        """The runner's (vector) environment was made, but not reset yet.

        Args:
            runner: Runner that owns the environment.
            env: The (vector) environment.
            context: The context passed to its creator; see `rlio.envs`.
            kwargs: Reserved for later versions.
        """

    def on_sub_environment_created(
        self, *, runner: Any, env: Any, env_index: int, context: Any = None, **kwargs: Any
    ) -> None:
        """One environment was made, at the start or to replace one that failed.

        Args:
            runner: Runner that owns the environment.
            env: The environment; None if it lives in another process.
            env_index: Its index.
            context: The context passed to its creator; see `rlio.envs`.
            kwargs: Reserved for later versions.
        """

    # ---- episodes ----

    def on_episode_created(self, *, runner: Any, env: Any, episode: RunningEpisode, **kwargs: Any) -> None:
        """An episode is about to begin. Its environment was not reset yet, unless it resets automatically."""

    def on_episode_start(self, *, runner: Any, env: Any, episode: RunningEpisode, **kwargs: Any) -> None:
        """An episode got its first observation."""

    def on_episode_step(self, *, runner: Any, env: Any, episode: RunningEpisode, **kwargs: Any) -> None:
        """A step was taken; `on_episode_end` follows after the episode's last step."""

    def on_episode_end(
        self,
        *,
        runner: Any,
        env: Any,
        episode: RunningEpisode,
        error: Exception | None = None,
        **kwargs: Any,
    ) -> None:
        """An episode ended; called before it goes into the metrics.

        Args:
            runner: Runner that samples.
            env: The environment.
            episode: The episode.
            error: Why the environment failed, if it did. The episode is then discarded.
            kwargs: Reserved for later versions.
        """

    # ---- batches ----

    def on_postprocess_trajectory(
        self,
        *,
        runner: Any,
        episode: RunningEpisode | None,
        agent_id: Any,
        policy_id: str,
        policies: Mapping[str, Policy],
        postprocessed_batch: SampleBatch,
        original_batches: Mapping[Any, tuple[str, SampleBatch]],
        **kwargs: Any,
    ) -> None:
        """An agent's rows of an episode, or of a chunk, were postprocessed, before `on_episode_end`.

        Args:
            runner: Runner that samples.
            episode: The episode; None for rows that a client of a policy server sampled.
            agent_id: The agent that the rows belong to; None if there is one agent.
            policy_id: The policy that acted.
            policies: All policies, by id.
            postprocessed_batch: The rows; may be changed in place.
            original_batches: Agent id -> (policy id, rows before postprocessing), of all agents.
            kwargs: Reserved for later versions.
        """

    def on_sample_end(self, *, runner: Any, samples: Any, **kwargs: Any) -> None:
        """A batch was sampled and is about to be written and returned.

        Args:
            runner: Runner that sampled.
            samples: The batch of a `RolloutWorker`, which may be changed in place, or the list of episodes
                from a runner's own ``sample()``.
            kwargs: Reserved for later versions.
        """

    # ---- policies ----

    def on_create_policy(self, *, policy_id: str, policy: Policy, **kwargs: Any) -> None:
        """A worker got a new policy, which has its spaces."""

    def on_learn_on_batch(
        self, *, policy: Policy, train_batch: Batch, result: dict[str, Any], **kwargs: Any
    ) -> None:
        """A policy is about to learn on ``train_batch``.

        Args:
            policy: The policy that learns.
            train_batch: The batch; may be changed in place.
            result: Values that you add go into the learning results.
            kwargs: Reserved for later versions.
        """

    # ---- workers ----

    def on_evaluate_start(self, *, runner: Any, **kwargs: Any) -> None:
        """`rlio.sampling.evaluate.evaluate` starts."""

    def on_evaluate_end(self, *, runner: Any, evaluation_metrics: Any, **kwargs: Any) -> None:
        """`rlio.sampling.evaluate.evaluate` has its result, an `EvaluationResult`."""

    def on_checkpoint_loaded(self, *, worker: Any, path: str | os.PathLike[str], **kwargs: Any) -> None:
        """A worker's `restore` loaded a checkpoint."""


_HOOKS = tuple(name for name in vars(Callbacks) if name.startswith("on_"))

#: A function, several of them that are called in their order, or None, which calls nothing.
_Functions: TypeAlias = Callable[..., Any] | Sequence[Callable[..., Any]] | None
_Part: TypeAlias = Callbacks | Callable[[], Callbacks] | Mapping[str, _Functions]
CallbacksLike: TypeAlias = _Part | Sequence[_Part] | None


def overridden(callbacks: Callbacks) -> frozenset[str]:
    """Names of the overridden methods, in a subclass or on the object itself."""
    kind = type(callbacks)
    return frozenset(
        name
        for name in _HOOKS
        if getattr(kind, name) is not getattr(Callbacks, name) or name in vars(callbacks)
    )


def combine(callbacks: CallbacksLike) -> Callbacks:
    """Make one `Callbacks` of the user's argument.

    Several callbacks are called in their order. Methods and functions may take fewer arguments, and those
    that RLlib passes; see `rlio.sampling.callback_arguments`.

    Args:
        callbacks: Callbacks, a class or function that makes them, functions by the names of the methods,
            several of these, or None.

    Raises:
        OptionError: A part does not give `Callbacks`, has an unknown method ``on_...`` that would never be
            called, or a method with an argument that rlio does not have.
    """
    if callbacks is None:
        return Callbacks()
    if isinstance(callbacks, (Callbacks, type, Mapping)) or not isinstance(callbacks, Iterable):
        return _made(callbacks)
    parts = [_made(part) for part in callbacks]
    return (
        parts[0]
        if len(parts) == 1
        else _Called(
            {name: [getattr(part, name) for part in parts if name in overridden(part)] for name in _HOOKS}
        )
    )


def _made(given: Any) -> Callbacks:
    if isinstance(given, Mapping):
        return _of_functions(given)
    made = given() if callable(given) and not isinstance(given, Callbacks) else given
    if not isinstance(made, Callbacks):
        raise OptionError(
            f"callbacks={excerpt(given)}: expected Callbacks, a class or function that returns them, a dict "
            "of functions by the names of its methods, or a list of these"
        )
    _check_names(type(made).__name__, [name for name in dir(made) if name.startswith("on_")])
    methods = {name: getattr(made, name) for name in overridden(made)}
    fitting = {name: with_arguments(name, _native(name), method) for name, method in methods.items()}
    if all(fitting[name] is method for name, method in methods.items()):
        return made
    return _Called({name: [method] for name, method in fitting.items()})


def _of_functions(given: Mapping[Any, Any]) -> Callbacks:
    """Callbacks that call functions, given by the names of the methods, as in RLlib."""
    _check_names("callbacks", [name for name in given if name not in OLD_NAMES])
    calls: dict[str, list[Callable[..., None]]] = {}
    for name, functions in given.items():
        hook = OLD_NAMES.get(name, name)
        for function in functions if isinstance(functions, Sequence) else (functions,):
            if function is None:
                continue
            if not callable(function):
                raise OptionError(
                    f"callbacks[{excerpt(name)}]={excerpt(function)}: expected a function, a list of "
                    "functions, or None"
                )
            calls.setdefault(hook, []).append(with_arguments(name, _native(hook), function))
    return _Called(calls)


def _check_names(giver: str, names: Sequence[Any]) -> None:
    unknown = sorted(str(name) for name in names if name not in _HOOKS)
    if unknown:
        told = ", ".join(name if name.isidentifier() else excerpt(name) for name in unknown)
        raise OptionError(
            f"{giver} has {told}, which would never be called: callbacks are {', '.join(_HOOKS)}. Rename a "
            "method that your training loop calls"
        )


def _native(name: str) -> tuple[str, ...]:
    """The arguments with which rlio calls a method."""
    return tuple(
        each for each in signature(getattr(Callbacks, name)).parameters if each not in ("self", "kwargs")
    )


class _Called(Callbacks):
    """Callbacks of which each calls several methods or functions, in their order."""

    def __init__(self, calls: Mapping[str, Sequence[Callable[..., None]]]) -> None:
        for name, methods in calls.items():
            if methods:
                # Set on the object, not on the class, because `overridden` must report only hooks that a part
                # overrides.
                setattr(self, name, methods[0] if len(methods) == 1 else _each(methods))


def _each(methods: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call(**keywords: Any) -> None:
        for method in methods:
            method(**keywords)

    return call
