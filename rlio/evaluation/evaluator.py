"""`OffPolicyEvaluator` and `evaluate_offline`: how much a policy would earn, by what another one recorded.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Discrete
    >>> from rlio.batch import SampleBatch
    >>> rng = np.random.default_rng(0)
    >>> actions = rng.integers(0, 2, 1000)
    >>> half = np.full(1000, 0.5)
    >>> logged = SampleBatch(obs=half, actions=actions, rewards=actions * 1.0, action_prob=half)
    >>> def mostly_one(obs, actions):
    ...     return np.log(np.where(actions == 1, 0.9, 0.1))
    >>> found = evaluate_offline(logged, mostly_one, gamma=1.0, bandit=True)
    >>> round(found["wis"].v_target.value, 1), round(found["wis"].v_behavior.value, 1)
    (0.9, 0.5)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.arrays import Column
from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.columns import Columns
from rlio.dataset import Dataset
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.evaluation.complete_episodes import EpisodeAssembler, Episodes, join_episodes
from rlio.evaluation.estimates import OffPolicyEstimate, Overlap, measured
from rlio.evaluation.fitted_q import FittedQ, ModelValues, QModel, Transitions, cross_fitted
from rlio.evaluation.intervals import IntervalOptions, Resampling, empirical_bernstein
from rlio.evaluation.logged_rows import LoggedRows, read_log_probabilities, read_nested, read_rewards, rows_of
from rlio.evaluation.target import LogProbabilities, Target, as_target
from rlio.evaluation.weighting import (
    Contributions,
    EpisodeWeights,
    WeightedSteps,
    direct_method,
    doubly_robust,
    importance_sampling,
    per_decision,
    weighted_doubly_robust,
    weighted_importance_sampling,
    weighted_per_decision,
)
from rlio.interfaces import Batch, InputReader, ReadOptions
from rlio.nested import map_structure
from rlio.policies.policy import Policy
from rlio.resolve import read

__all__ = ["ESTIMATORS", "Logged", "OffPolicyEvaluator", "evaluate_offline"]

#: What rows may come from: a root, path or glob, whatever else `rlio.read` opens, a reader, or batches.
Logged: TypeAlias = "str | os.PathLike[str] | Dataset | InputReader | Batch | Iterable[Batch]"

_BY_EPISODE: Final = {"is": importance_sampling, "pdis": per_decision, "wis": weighted_importance_sampling}
_BY_STEP: Final = {
    "wpdis": weighted_per_decision,
    "dm": direct_method,
    "dr": doubly_robust,
    "wdr": weighted_doubly_robust,
}
_BY_MODEL: Final = ("dm", "dr", "wdr")
#: Every estimator's name.
ESTIMATORS: Final = (*_BY_EPISODE, *_BY_STEP)
_LOG_RATIOS: Final = "log_ratios"


class OffPolicyEvaluator:
    """Estimates what a policy would earn, from batches that come one by one.

    ``is``, ``pdis`` and ``wis`` keep five numbers of each whole episode, beside two a step of those that are
    not whole yet; ``wpdis`` keeps two numbers a step of all; ``dm``, ``dr`` and ``wdr`` keep all rows, since
    a model is fitted to them.

    Args:
        policy: The one to judge: a bound `Policy`, a function (obs, actions) -> logs of probabilities, or a
            `Target`, which says how to act epsilon-greedily and more.
        gamma: Discount a step, from 0 to 1.
        estimators: Names, of `ESTIMATORS`.
        bandit: Each row is an episode of one step: neither ``eps_id`` nor ``t`` is looked at.
        incomplete: What to do with episodes that lack steps or an end: ``"raise"``, or ``"drop"``, which
            leaves them out and counts them. Longer episodes are cut more often: what is left may be biased.
        policy_id: Whose rows count, where batches have those of several policies.
        q_model: What fits the values of actions, for ``dm``, ``dr`` and ``wdr``; None: `FittedQ()`.
        folds: Each of so many parts of the episodes is judged by a model that was fitted to the others, so
            that no reward counts twice; 1: one model, fitted to all.
        intervals: How intervals are made.

    Raises:
        OptionError: A value is out of range, or the policy cannot be judged.
    """

    def __init__(
        self,
        policy: Policy | LogProbabilities | Target,
        *,
        gamma: float,
        estimators: Sequence[str] = ("is", "pdis", "wis", "wpdis"),
        bandit: bool = False,
        incomplete: Literal["raise", "drop"] = "raise",
        policy_id: str | None = None,
        q_model: QModel | None = None,
        folds: int = 2,
        intervals: IntervalOptions | None = None,
    ) -> None:
        unknown = [name for name in estimators if name not in ESTIMATORS]
        if unknown or not estimators or isinstance(estimators, str):
            raise OptionError(f"estimators={excerpt(estimators)}: a list of {', '.join(ESTIMATORS)}")
        if not 0.0 <= gamma <= 1.0:
            raise OptionError(f"gamma={gamma}: a discount a step, from 0 to 1")
        if incomplete not in ("raise", "drop"):
            raise OptionError(f"incomplete={excerpt(incomplete)}: 'raise' or 'drop'")
        if folds < 1:
            raise OptionError(f"folds={folds}: parts of the episodes, at least 1")
        self.target = as_target(policy)
        self.gamma = gamma
        self.estimators = tuple(dict.fromkeys(estimators))
        self._bandit, self._incomplete, self._policy_id = bandit, incomplete, policy_id
        self._q_model = FittedQ() if q_model is None else q_model
        self._folds = folds
        self._intervals = IntervalOptions() if intervals is None else intervals
        self._fits = any(name in _BY_MODEL for name in self.estimators)
        self._weighs = any(name != "dm" for name in self.estimators)
        self._keeps_steps = any(name in _BY_STEP for name in self.estimators)
        self._assembler = EpisodeAssembler()
        self._weights: list[EpisodeWeights] = []
        self._kept: list[Episodes] = []

    def add(self, batch: Batch) -> None:
        """Take the rows of ``batch``: of any episodes, or parts of them, in any order.

        Raises:
            MissingColumn: A column is absent that is needed.
            SchemaError: A probability or reward cannot be, or a step came twice.
            OptionError: The policy cannot say how likely the actions are.
        """
        rows = rows_of(batch, self._policy_id)
        if not len(rows):
            return
        episodes = self._assembler.add(LoggedRows.of(rows, self._columns(rows), bandit=self._bandit))
        if not len(episodes.lengths):
            return
        self._weights.append(self._steps(episodes).episode_weights)
        if self._keeps_steps:
            self._kept.append(episodes)

    def _columns(self, rows: SampleBatch) -> dict[str, Column]:
        """What is kept of rows until their episode is whole."""
        kept: dict[str, Column] = {Columns.REWARDS: read_rewards(rows)}
        obs, actions = read_nested(rows, Columns.OBS), read_nested(rows, Columns.ACTIONS)
        if self._weighs:
            densities = self.target.has_densities(actions)
            logp = read_log_probabilities(rows, densities=densities)
            kept[_LOG_RATIOS] = self.target.log_probabilities(obs, actions) - logp
        else:
            kept[_LOG_RATIOS] = np.zeros(len(rows))
        if self._fits:
            kept |= {Columns.OBS: obs, Columns.ACTIONS: actions}
            for name in (Columns.NEXT_OBS, Columns.NEXT_OBS_VALID, Columns.TERMINATEDS):
                if name in rows:
                    kept[name] = read_nested(rows, name)
            # Copies: who reads with out= overwrites what was added.
            kept = {name: map_structure(np.copy, column) for name, column in kept.items()}
        return kept

    def _steps(self, episodes: Episodes, values: ModelValues | None = None) -> WeightedSteps:
        columns: Mapping[str, Any] = episodes.columns
        steps = columns[_LOG_RATIOS], columns[Columns.REWARDS], episodes.lengths, self.gamma
        if values is None:
            return WeightedSteps(*steps)
        return WeightedSteps(*steps, values.states, values.actions, values.finals)

    def estimate(self) -> dict[str, OffPolicyEstimate]:
        """What the estimators say by the episodes that are whole so far, by name.

        Raises:
            SchemaError: An episode lacks steps or its end, and ``incomplete="raise"``; or none is whole.
            OptionError: All weights are 0, or a model cannot be fitted.
        """
        left_out = self._assembler.incomplete
        if left_out and self._incomplete == "raise":
            raise SchemaError(
                f"{left_out} episodes are incomplete: {self._assembler.why_incomplete()}. Add the rows that "
                "are "
                "missing, or leave such episodes out with incomplete='drop' (which favours short episodes)",
                column=Columns.T,
            )
        if not self._weights:
            raise SchemaError(f"there is no complete episode to evaluate ({left_out} are incomplete)")
        weights = _joined(self._weights)
        contributions = self._contributions(weights)
        draws = Resampling(
            len(weights.lengths), resamples=self._intervals.resamples, seed=self._intervals.seed
        )
        overlap = Overlap.of(weights.log_weights) if self._weighs else None
        logged = Contributions(weights.returns, np.ones(len(weights.returns)))
        return {
            name: self._estimate(name, found, logged, draws, weights, None if name == "dm" else overlap)
            for name, found in contributions.items()
        }

    def _contributions(self, weights: EpisodeWeights) -> dict[str, Contributions]:
        found = {name: _BY_EPISODE[name](weights) for name in self.estimators if name in _BY_EPISODE}
        if self._keeps_steps:
            episodes = join_episodes(self._kept)
            self._kept = [episodes]
            values = self._model_values(episodes) if self._fits else None
            steps = self._steps(episodes, values)
            found |= {name: _BY_STEP[name](steps) for name in self.estimators if name in _BY_STEP}
        return {name: found[name] for name in self.estimators}

    def _model_values(self, episodes: Episodes) -> ModelValues:
        transitions = Transitions.of(episodes, bandit=self._bandit)
        return cross_fitted(
            self._q_model, transitions, episodes.lengths, self.target, gamma=self.gamma, folds=self._folds
        )

    def _estimate(
        self,
        name: str,
        found: Contributions,
        logged: Contributions,
        draws: Resampling,
        weights: EpisodeWeights,
        overlap: Overlap | None,
    ) -> OffPolicyEstimate:
        options = self._intervals
        concentration = None
        if options.value_bounds is not None and name in ("is", "pdis"):
            # On this scale numbers that are too large are infinite, and outside of any bounds.
            with np.errstate(over="ignore"):
                values = found.numerators * np.exp(found.log_scale)
            concentration = empirical_bernstein(
                values, bounds=options.value_bounds, confidence=options.confidence
            )
        behavior = measured([logged], draws, options)
        target = measured([found], draws, options, concentration)
        return OffPolicyEstimate(
            estimator=name,
            v_behavior=behavior,
            v_target=target,
            v_gain=measured([found, logged], draws, options),
            v_gain_ratio=target.value / behavior.value if behavior.value > 0 else None,
            overlap=overlap,
            episodes=len(weights.lengths),
            steps=int(weights.lengths.sum()),
            left_out=self._assembler.incomplete,
            gamma=self.gamma,
            confidence=options.confidence,
        )


def _joined(parts: list[EpisodeWeights]) -> EpisodeWeights:
    """All of ``parts``, which are left as one."""
    if len(parts) > 1:
        joined: list[NDArray[Any]] = [
            np.concatenate(same) for same in zip(*(vars_of(p) for p in parts), strict=True)
        ]
        parts[:] = [EpisodeWeights(*joined)]
    return parts[0]


def vars_of(weights: EpisodeWeights) -> tuple[NDArray[Any], ...]:
    """Its arrays, in the order of its fields."""
    return (
        weights.returns,
        weights.log_weights,
        weights.per_decision,
        weights.per_decision_scale,
        weights.lengths,
    )


def evaluate_offline(
    data: Logged, policy: Policy | LogProbabilities | Target, **options: Any
) -> dict[str, OffPolicyEstimate]:
    """What a policy would earn, by rows that another one recorded.

    Args:
        data: A root, path or glob, or whatever else `rlio.read` opens: read once, in order. Or a reader that
            comes to an end, which is closed by nobody but its owner; or a batch, or batches.
        policy: The one to judge.
        options: ``gamma`` and the other keywords of `OffPolicyEvaluator`; see there, also for what is raised.

    Returns:
        Name of the estimator -> what it says.
    """
    evaluator = OffPolicyEvaluator(policy, **options)
    for batch in _batches(data):
        evaluator.add(batch)
    return evaluator.estimate()


def _batches(data: Logged) -> Iterator[Batch]:
    if isinstance(data, SampleBatch | MultiAgentBatch):
        yield data
        return
    if isinstance(data, str | os.PathLike | Dataset):
        opened = read(os.fspath(data), epochs=1) if not isinstance(data, Dataset) else _reader_of(data)
        with opened as reader:
            yield from reader
        return
    options = getattr(data, "options", None)
    if isinstance(options, ReadOptions) and options.epochs is None:
        raise OptionError(f"{type(data).__name__} never ends: open it with epochs=1")
    yield from data


def _reader_of(dataset: Dataset) -> InputReader:
    from rlio.readers.dataset_reader import DatasetReader

    return DatasetReader(dataset, epochs=1)
