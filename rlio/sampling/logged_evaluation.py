"""`LoggedEvaluation`: estimates what a worker's policies would earn from the rows that the worker reads.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> from rlio.batch import SampleBatch
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> policy = RandomPolicy()
    >>> policy.bind(Box(-1.0, 1.0, (1,)), Discrete(2), seed=0)
    >>> config = RolloutConfig(input_evaluation=["wis"], input_evaluation_gamma=1.0)
    >>> evaluation = LoggedEvaluation(config, {"default_policy": policy})
    >>> class Logged(InputReader):
    ...     def _next(self):
    ...         return SampleBatch(obs=np.zeros((2, 1)), actions=[0, 1], rewards=[1.0, 3.0], eps_id=[7, 7],
    ...             t=[0, 1], action_prob=[0.5, 0.5], terminateds=[False, True])
    >>> reader = Logged()
    >>> _ = evaluation.judge_of(reader)(reader.sample())
    >>> evaluation.take()["default_policy"].summarise()["wis"]["v_target"]
    4.0
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from rlio.batch import Batch, SampleBatch
from rlio.batch.columns import Columns
from rlio.errors import OptionError, excerpt
from rlio.evaluation.estimates import OffPolicyEstimate
from rlio.evaluation.estimation import Estimation
from rlio.evaluation.evaluator import OffPolicyEvaluator, keeps_order
from rlio.evaluation.evidence import Evidence
from rlio.evaluation.target import Target
from rlio.policies.policy import Policy
from rlio.read_options import ReadOptions
from rlio.reader import InputReader
from rlio.readers.json_reader import JsonReader
from rlio.sampling.config import INPUT_ESTIMATORS, RolloutConfig

__all__ = ["Judged", "LoggedEvaluation"]

# As in `MetricsCollector`: memory stays bounded even if the metrics are never requested.
_MOST_EPISODES: Final = 65_536
# Rows that wait for the rest of their episode: at most some hundred megabytes of Python objects.
_MOST_WAITING: Final = 1_000_000
_WEIGHTED: Final = ("wis", "wpdis", "stepwise_wis")


@dataclass(frozen=True)
class Judged:
    """Estimates for one policy from logged episodes.

    Attributes:
        names: The names in ``input_evaluation``.
        estimation: The estimation settings.
        evidence: The episodes.
    """

    names: tuple[str, ...]
    estimation: Estimation
    evidence: Evidence

    def plus(self, other: Judged) -> Judged:
        """Combine the episodes of both, the latest 65,536 of them; changes neither."""
        both = self.estimation.evidence()
        both.absorb(self.evidence)
        both.absorb(other.evidence)
        both.keep_last(_MOST_EPISODES)
        return Judged(self.names, self.estimation, both)

    def summarise(self) -> dict[str, dict[str, Any]]:
        """Name in ``input_evaluation`` -> numbers with their reliability; {} without an episode.

        The names are RLlib's: ``v_behavior``, ``v_target``, with the standard deviation over episodes in
        ``v_behavior_std`` and ``v_target_std``, ``v_gain``, which is v_target / v_behavior (None
        if v_behavior is not above 0), and ``v_delta``, their difference. ``estimator`` is the name in
        `rlio.evaluation`.
        """
        if not self.evidence.episodes:
            return {}
        estimation = self.estimation
        if not self.evidence.has_weight:
            # The target policy could have produced no episode, and a weighted average over none is undefined.
            names = [name for name in estimation.estimators if name not in _WEIGHTED]
            if not names:
                return {}
            estimation = replace(estimation, estimators=names)
        found = estimation.of(self.evidence)
        meant = {name: INPUT_ESTIMATORS[name] for name in self.names}
        return {name: _numbers(found[own]) for name, own in meant.items() if own in found}


def _numbers(estimate: OffPolicyEstimate) -> dict[str, Any]:
    overlap = estimate.overlap
    return {
        "estimator": estimate.estimator,
        "v_behavior": estimate.v_behavior.value,
        "v_behavior_std": estimate.v_behavior.standard_deviation,
        "v_target": estimate.v_target.value,
        "v_target_std": estimate.v_target.standard_deviation,
        "v_target_standard_error": estimate.v_target.standard_error,
        "v_target_interval": list(estimate.v_target.interval),
        "reliable": estimate.reliable,
        "doubts": list(estimate.doubts),
        "v_gain": estimate.v_gain_ratio,
        "v_delta": estimate.v_gain.value,
        "effective_sample_size": math.nan if overlap is None else overlap.effective_sample_size,
        "episodes": estimate.episodes,
        "left_out": estimate.left_out,
    }


class LoggedEvaluation:
    """Judges the current policies by the rows that a worker reads.

    Episodes may come in parts, batch by batch. Rows of episodes that never become whole (for example because
    a reader was restored in the middle of them) are dropped once a million wait; such episodes are counted.

    Args:
        config: Uses ``input_evaluation``, ``input_evaluation_gamma``, ``explore`` and the settings that adapt
            actions read.
        policies: Policies by id, looked up for each batch because they may be replaced.

    Raises:
        OptionError: The discount is missing.
    """

    def __init__(self, config: RolloutConfig, policies: Mapping[str, Policy]) -> None:
        gamma = config.input_evaluation_gamma
        assert gamma is not None  # The config requires it.
        self._names = config.logged_estimators
        estimators = [INPUT_ESTIMATORS[name] for name in self._names]
        self._estimation = Estimation(gamma=gamma, estimators=estimators, incomplete="drop")
        self._config = config
        self._policies = policies
        self._evaluators: dict[str, OffPolicyEvaluator] = {}
        self._lock = threading.Lock()
        #: Number of readers whose rows are judged.
        self.sources: int = 0

    def judge_of(self, reader: InputReader) -> Callable[[Batch], Batch]:
        """Make a function for a `MappedInput` of ``reader`` that judges by a batch and returns it unchanged.

        Raises:
            OptionError: The reader's rows are known not to form whole episodes.
        """
        _check_order(reader)
        source, in_order = self.sources, keeps_order(reader)
        self.sources += 1

        def judge(batch: Batch) -> Batch:
            with self._lock:
                for policy_id, rows in batch.policies().items():
                    self._judge(policy_id, rows, source, in_order=in_order)
            return batch

        return judge

    def _judge(self, policy_id: str, rows: SampleBatch, source: int, *, in_order: bool) -> None:
        policy = self._policies.get(policy_id)
        if policy is None:
            raise OptionError(
                f"the rows belong to the policy {excerpt(policy_id)}, but the worker has "
                f"{excerpt(list(self._policies))}"
            )
        target = Target(policy, explore=self._config.explore)
        evaluator = self._evaluators.get(policy_id)
        if evaluator is None:
            evaluator = self._evaluators[policy_id] = OffPolicyEvaluator(target, self._estimation)
            evaluator.evidence = self._estimation.evidence(most_rows=_MOST_WAITING)
        config, actions = self._config, rows.get(Columns.ACTIONS)
        adapts = config.clip_actions or config.normalize_actions
        if adapts and not config.actions_in_input_normalized and target.has_densities(actions):
            raise OptionError(
                "actions read are clipped or scaled, so their recorded densities no longer apply: use "
                "input_evaluation='simulation' only, or record the policy's own actions "
                "(actions_in_input_normalized=True)"
            )
        evaluator.target = target
        evaluator.add(rows, source=source, in_order=in_order)
        evaluator.evidence.keep_last(_MOST_EPISODES)

    def take(self) -> dict[str, Judged]:
        """Return estimates by policy id, from the episodes completed since the last call."""
        with self._lock:
            return {
                policy_id: Judged(self._names, self._estimation, evaluator.evidence.taken())
                for policy_id, evaluator in self._evaluators.items()
            }


def _check_order(reader: InputReader) -> None:
    """Refuse a reader whose rows are known not to form whole episodes.

    Raises:
        OptionError: The rows are shuffled, or other workers get some of them.
    """
    options = getattr(reader, "options", None)
    if not isinstance(options, ReadOptions) or isinstance(reader, JsonReader):
        return  # Records are shuffled and dealt as units, and may hold whole episodes.
    instead = "judge the whole data set with rlio.evaluation.evaluate_offline, or use 'simulation'"
    if options.shuffle:
        raise OptionError(
            "input_evaluation judges whole episodes, but the rows are shuffled: shuffle batches with "
            f"shuffle_buffer_size, {instead}"
        )
    if options.shard[1] > 1:
        raise OptionError(
            f"input_evaluation judges whole episodes, but the rows are divided among {options.shard[1]} "
            f"workers, batch by batch: {instead}"
        )
