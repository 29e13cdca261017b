"""`Callbacks`: what users hook into sampling and learning.

`RunningEpisode` is what they get to know of an episode.

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

# Any in this module: environments and runners are those of gymnasium, PettingZoo, ours and other people's.


@dataclass(slots=True, eq=False)
class RunningEpisode:
    """An episode that callbacks look at while it runs, and may write into.

    Attributes:
        eps_id: As in the column ``eps_id``.
        env_index: Which environment of the runner it runs in.
        worker_index: Which worker.
        length: Steps of the environment so far.
        total_reward: Sum of all agents' rewards so far, not clipped.
        agent_rewards: The same by (agent id, policy id); empty with one agent.
        agent_policies: Which policy acts for which agent: set when it first acts.
        last_observation: What the agent saw last, not preprocessed; with several, by agent id. This and the
            next three are there in ``on_episode_start``, ``_step`` and ``_end`` only, and belong to the
            runner: copy what is kept.
        last_action: What was sent to the environment last; None before the first step.
        last_reward: What the last step gave; None before the first.
        last_info: What came with the last observation.
        custom_metrics: Numbers that go into the metrics when the episode has ended.
        hist_data: Lists of numbers that do.
        media: Pictures, videos and the like that do.
        user_data: For callbacks alone.
        training_enabled: Whether its rows go into batches. If a callback sets it to False before they are
            handed out, they are dropped, and counted; the metrics still have the episode.
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
        """The id of the policy that acts for ``agent_id``; None for the only agent there is.

        Raises:
            OptionError: The agent has not acted in this episode.
        """
        if agent_id is None and not self.agent_policies:
            return DEFAULT_POLICY_ID
        try:
            return self.agent_policies[agent_id]
        except KeyError:
            raise OptionError(
                f"no policy acts for the agent {excerpt(agent_id)} in episode {self.eps_id}: "
                f"agents so far are {excerpt(list(self.agent_policies))}"
            ) from None


class Callbacks:
    """Methods that are called while workers sample and learn. All are empty: override those you need.

    They get keywords only; take ``**kwargs`` too, as later versions may pass more. Only overridden ones are
    called, so that ``on_episode_step`` costs nothing where nobody wants it. An exception in one surfaces in
    the call that led to it. With ``env`` they get the (vector) environment, with ``runner`` the runner:
    `EnvRunner`, `MultiAgentEnvRunner` or whoever samples.
    """

    # ---- environments ----

    def on_environment_created(self, *, runner: Any, env: Any, **kwargs: Any) -> None:
        """The runner has its (vector) environment, which was not reset yet."""

    def on_sub_environment_created(
        self, *, runner: Any, env: Any, env_index: int, context: Any = None, **kwargs: Any
    ) -> None:
        """One environment was made, at the start or in place of one that failed.

        Args:
            runner: Whose it is.
            env: The environment; None where it lives in another process.
            env_index: Its number.
            context: What its creator got, see `rlio.envs`.
            kwargs: Of later versions.
        """

    # ---- episodes ----

    def on_episode_created(self, *, runner: Any, env: Any, episode: RunningEpisode, **kwargs: Any) -> None:
        """An episode is about to begin: the environment was not reset yet, if it does not reset by itself."""

    def on_episode_start(self, *, runner: Any, env: Any, episode: RunningEpisode, **kwargs: Any) -> None:
        """An episode has its first observation."""

    def on_episode_step(self, *, runner: Any, env: Any, episode: RunningEpisode, **kwargs: Any) -> None:
        """A step was taken; after an episode's last one comes `on_episode_end`."""

    def on_episode_end(
        self,
        *,
        runner: Any,
        env: Any,
        episode: RunningEpisode,
        error: Exception | None = None,
        **kwargs: Any,
    ) -> None:
        """An episode has ended, before it goes into the metrics.

        Args:
            runner: Who samples.
            env: The environment.
            episode: What is known of it.
            error: Why the environment failed, where it did: the episode is discarded then.
            kwargs: Of later versions.
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
        """An agent's rows of an episode, or of a chunk of it, were postprocessed.

        Args:
            runner: Who samples.
            episode: None where it is over and forgotten.
            agent_id: Whose rows; None for the only agent there is.
            policy_id: Who acted.
            policies: All of them.
            postprocessed_batch: May be changed in place.
            original_batches: Agent id -> (policy id, the rows before), of all agents.
            kwargs: Of later versions.
        """

    def on_sample_end(self, *, runner: Any, samples: Any, **kwargs: Any) -> None:
        """Something was sampled, and is about to be written and served.

        Args:
            runner: Who sampled.
            samples: The batch of a `RolloutWorker`, which may be changed in place; the list of episodes of a
                runner's own ``sample()``.
            kwargs: Of later versions.
        """

    # ---- policies ----

    def on_create_policy(self, *, policy_id: str, policy: Policy, **kwargs: Any) -> None:
        """A policy joined a worker and has its spaces."""

    def on_learn_on_batch(
        self, *, policy: Policy, train_batch: Batch, result: dict[str, Any], **kwargs: Any
    ) -> None:
        """A policy is about to learn on ``train_batch``.

        Args:
            policy: Who learns.
            train_batch: May be changed in place.
            result: What is put here goes into what was measured.
            kwargs: Of later versions.
        """

    # ---- workers ----

    def on_evaluate_start(self, *, runner: Any, **kwargs: Any) -> None:
        """`rlio.sampling.evaluate.evaluate` begins."""

    def on_evaluate_end(self, *, runner: Any, evaluation_metrics: Any, **kwargs: Any) -> None:
        """It has its result, an `EvaluationResult`."""

    def on_checkpoint_loaded(self, *, worker: Any, path: str | os.PathLike[str], **kwargs: Any) -> None:
        """A worker's `restore` has loaded what was saved."""


_HOOKS = tuple(name for name in vars(Callbacks) if name.startswith("on_"))

CallbacksLike: TypeAlias = (
    Callbacks | Callable[[], Callbacks] | Sequence[Callbacks | Callable[[], Callbacks]] | None
)


def overridden(callbacks: Callbacks) -> frozenset[str]:
    """Names of the methods that do something: those of a subclass, or set on the object itself."""
    kind = type(callbacks)
    return frozenset(
        name
        for name in _HOOKS
        if getattr(kind, name) is not getattr(Callbacks, name) or name in vars(callbacks)
    )


def combine(callbacks: CallbacksLike) -> Callbacks:
    """Make one of what a user gave: callbacks, a class or function that makes them, several, or None.

    Several are called in their order.

    Raises:
        OptionError: Something among them gives no `Callbacks`, or has a method ``on_...`` that nobody
            calls.
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
            f"callbacks={excerpt(given)}: expected Callbacks, a class or function that gives them, "
            "or a list of these"
        )
    unknown = sorted(name for name in dir(made) if name.startswith("on_") and name not in _HOOKS)
    if unknown:
        raise OptionError(
            f"{type(made).__name__} has {', '.join(unknown)}, which nobody would call: callbacks are "
            f"{', '.join(_HOOKS)}. What belongs to the loop that trains stands in it, under another name"
        )
    return made


class _Combined(Callbacks):
    """Several callbacks, one after the other."""

    def __init__(self, parts: Sequence[Callbacks]) -> None:
        for name in _HOOKS:
            methods = [getattr(part, name) for part in parts if name in overridden(part)]
            if methods:
                # On the object, not in the class: `overridden` is to see those that somebody wants.
                setattr(self, name, _each(methods))


def _each(methods: list[Callable[..., None]]) -> Callable[..., None]:
    def call(**keywords: Any) -> None:
        for method in methods:
            method(**keywords)

    return call
