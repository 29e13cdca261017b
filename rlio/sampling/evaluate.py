"""`evaluate`: measures how much a policy earns.

Example:
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> result = evaluate(RandomPolicy(), "CartPole-v1", episodes=20, seed=0)
    >>> result.returns.shape, bool(10 < result.mean < 40)
    ((20,), True)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.connectors.connector import ConnectorLike
from rlio.connectors.mean_std import MeanStdFilter
from rlio.errors import OptionError
from rlio.policies.policy import Policy
from rlio.sampling.callbacks import CallbacksLike, combine
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.make_env import EnvLike
from rlio.sampling.progress import shares_of
from rlio.support.options import expected

__all__ = ["EvaluationResult", "evaluate"]


@dataclass(frozen=True)
class EvaluationResult:
    """Returns of whole episodes.

    Attributes:
        returns: Sum of the rewards of each episode, float64, shape (episodes,).
        lengths: Steps of each episode, int64, shape (episodes,).
    """

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def standard_error(self) -> float:
        """Standard error of the mean: sample standard deviation / sqrt(episodes); NaN for one episode."""
        if len(self.returns) < 2:
            return math.nan
        return float(self.returns.std(ddof=1) / math.sqrt(len(self.returns)))

    @property
    def steps(self) -> int:
        """Total steps of all episodes."""
        return int(self.lengths.sum())

    def __str__(self) -> str:
        return f"{self.mean:.1f} +- {self.standard_error:.1f} ({len(self.returns)} episodes)"


def evaluate(
    policy: Policy,
    env: EnvLike,
    *,
    episodes: int = 100,
    seed: int | None = None,
    num_envs: int = 8,
    explore: bool = False,
    rollout: RolloutConfig | None = None,
    filters: Mapping[str, Sequence[MeanStdFilter]] | None = None,
    callbacks: CallbacksLike = None,
) -> EvaluationResult:
    """Measure the returns of ``policy`` in ``env``.

    Each environment plays a fixed share of the episodes, because taking the first ones to end would favour
    short episodes.

    Args:
        policy: Policy that acts; bound to the environment's spaces if it is not bound yet.
        env: An environment that `make_stepper` accepts; closed afterwards.
        episodes: Number of episodes.
        seed: Seed of the environments. With ``explore=False``, deterministic policies draw no random numbers,
            so evaluation does not change their later behaviour.
        num_envs: Number of environments stepped together, at most ``episodes``; 1 if you pass an environment
            object.
        explore: Whether the policy explores.
        rollout: How to step the environments, for example as in training. Its number of environments,
            fragment length, exploration and treatment of rewards are ignored. None uses the defaults.
        filters: The state of the `MeanStdFilter`s among the connectors, from `EnvRunner.get_filters`. They
            learn nothing during evaluation.
        callbacks: Called on the evaluation and its episodes; see `Callbacks`.

    Returns:
        The episodes by environment, and in order within each environment.

    Raises:
        OptionError: ``episodes`` is below 1, or the environment cannot be made.
        StateError: ``filters`` do not fit the connectors.
    """
    if episodes < 1:
        raise OptionError(f"episodes={episodes}: expected at least 1")
    given = expected(rollout, RolloutConfig, "rollout")
    connectors = given.observation_connectors
    config = replace(
        given,
        rollout_fragment_length=1,
        train_batch_size=None,
        num_envs=min(num_envs, episodes),
        batch_mode="complete_episodes",
        explore=explore,
        observation_connectors=connectors if filters is None else _frozen(connectors),
        # Measure the environment's own rewards, even where Atari's would be clipped.
        clip_rewards=False,
        input_evaluation=None,
        input_evaluation_gamma=None,
    )
    told = combine(callbacks)
    runner = EnvRunner(env, policy, config=config, seed=seed, callbacks=told)
    try:
        if filters is not None:
            runner.sync_filters(filters)
        told.on_evaluate_start(runner=runner)
        played = _play(runner, episodes)
        result = EvaluationResult(
            np.array([total for total, _ in played]), np.array([length for _, length in played], np.int64)
        )
        told.on_evaluate_end(runner=runner, evaluation_metrics=result)
    finally:
        runner.stop()
    return result


def _frozen(connectors: Sequence[ConnectorLike]) -> list[ConnectorLike]:
    """``connectors``, with filters replaced by copies that do not learn."""
    made: list[ConnectorLike] = []
    for connector in connectors:
        if isinstance(connector, MeanStdFilter):
            connector = connector.copy()
            connector.update = False
        made.append(connector)
    return made


def _play(runner: EnvRunner, episodes: int) -> list[tuple[float, int]]:
    """(Return, length) of each environment's share of ``episodes``."""
    shares = shares_of(episodes, runner.num_envs)
    played: list[list[tuple[float, int]]] = [[] for _ in shares]
    while any(len(done) < share for done, share in zip(played, shares, strict=True)):
        for rows in runner.run().split_by_episode():
            env = int(rows[Columns.ENV_ID][0])
            if len(played[env]) < shares[env]:
                total = float(rows[Columns.REWARDS].sum(dtype=np.float64))
                played[env].append((total, len(rows)))
    return [episode for done in played for episode in done]
