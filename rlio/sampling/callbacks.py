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
from typing import TYPE_CHECKING, Any, TypeAlias

from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.errors import OptionError, excerpt

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

    All arguments are keywords; accept ``**kwargs`` too, because later versions may pass more. Only overridden
    methods are called, so an unused ``on_episode_step`` costs nothing. An exception in a callback is raised
    from the call that triggered it. ``env`` is the (vector) environment and ``runner`` the runner: an
    `EnvRunner`, a `MultiAgentEnvRunner` or another sampler.
    """

    # ---- environments ----

    def on_environment_created(self, *, runner: Any, env: Any, **kwargs: Any) -> None:
        """The runner's (vector) environment was made, but not reset yet."""

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
        """An agent's rows of an episode, or of a chunk, were postprocessed.

        Args:
            runner: Runner that samples.
            episode: The episode; None if it ended and was released.
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

CallbacksLike: TypeAlias = (
    Callbacks | Callable[[], Callbacks] | Sequence[Callbacks | Callable[[], Callbacks]] | None
)


def overridden(callbacks: Callbacks) -> frozenset[str]:
    """Names of the overridden methods, in a subclass or on the object itself."""
    kind = type(callbacks)
    return frozenset(
        name
        for name in _HOOKS
        if getattr(kind, name) is not getattr(Callbacks, name) or name in vars(callbacks)
    )


def combine(callbacks: CallbacksLike) -> Callbacks:
    """Make one `Callbacks` of the user's argument: callbacks, a class or function, several, or None.

    Several callbacks are called in their order.

    Raises:
        OptionError: A part does not give `Callbacks`, or has an unknown method ``on_...`` that would never be
            called.
    """
    if callbacks is None:
        return Callbacks()
    if isinstance(callbacks, (Callbacks, type)) or not isinstance(callbacks, Iterable):
        return _made(callbacks)
    parts = [_made(part) for part in callbacks]
    return parts[0] if len(parts) == 1 else _Combined(parts)


def _made(given: Any) -> Callbacks:
    made = given() if callable(given) and not isinstance(given, Callbacks) else given
    if not isinstance(made, Callbacks):
        raise OptionError(
            f"callbacks={excerpt(given)}: expected Callbacks, a class or function that returns them, or a "
            "list of these"
        )
    unknown = sorted(name for name in dir(made) if name.startswith("on_") and name not in _HOOKS)
    if unknown:
        raise OptionError(
            f"{type(made).__name__} has {', '.join(unknown)}, which would never be called: callbacks are "
            f"{', '.join(_HOOKS)}. Rename a method that your training loop calls"
        )
    return made


class _Combined(Callbacks):
    """Several callbacks, one after the other."""

    def __init__(self, parts: Sequence[Callbacks]) -> None:
        for name in _HOOKS:
            methods = [getattr(part, name) for part in parts if name in overridden(part)]
            if methods:
                # Set on the object, not on the class, because `overridden` must report only hooks that a part
                # overrides.
                setattr(self, name, _each(methods))


def _each(methods: list[Callable[..., None]]) -> Callable[..., None]:
    def call(**keywords: Any) -> None:
        for method in methods:
            method(**keywords)

    return call
