"""`Estimation`: the estimators, and how they turn `Evidence` into estimates.

Example:
    >>> import numpy as np
    >>> from rlio.evaluation.evidence import LOG_RATIOS, Evidence
    >>> from rlio.evaluation.logged_rows import LoggedRows
    >>> estimation = Estimation(gamma=1.0, estimators=("is", "wis"))
    >>> evidence = estimation.evidence()
    >>> columns = {LOG_RATIOS: np.log([1.5, 0.5]), "rewards": np.array([4.0, 0.0])}
    >>> evidence.add(LoggedRows(np.arange(2), np.zeros(2), np.zeros(2), np.ones(2, bool), columns))
    >>> {name: round(estimate.v_target.value, 6) for name, estimate in estimation.of(evidence).items()}
    {'is': 3.0, 'wis': 3.0}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypedDict

import numpy as np

from rlio.batch.columns import Columns
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.evaluation.complete_episodes import Episodes
from rlio.evaluation.estimates import OffPolicyEstimate, Overlap, measured
from rlio.evaluation.evidence import Evidence, weighted_steps
from rlio.evaluation.fitted_q import FittedQ, QModel, Transitions, cross_fitted
from rlio.evaluation.intervals import IntervalOptions, Resampling, empirical_bernstein
from rlio.evaluation.target import Target
from rlio.evaluation.weighting import (
    Contributions,
    EpisodeWeights,
    WeightedSteps,
    direct_method,
    doubly_robust,
    importance_sampling,
    per_decision,
    stepwise_weighted,
    weighted_doubly_robust,
    weighted_importance_sampling,
    weighted_per_decision,
)
from rlio.support.options import check_choice, check_count, check_number, set_options

__all__ = ["ESTIMATORS", "Estimation", "EstimationKeywords"]

_BY_EPISODE: Final = {"is": importance_sampling, "pdis": per_decision, "wis": weighted_importance_sampling}
_BY_STEP: Final = {
    "wpdis": weighted_per_decision,
    "stepwise_wis": stepwise_weighted,
    "dm": direct_method,
    "dr": doubly_robust,
    "wdr": weighted_doubly_robust,
}
_BY_MODEL: Final = ("dm", "dr", "wdr")
#: A doubt about the direct method, which weighs nothing.
_MODEL_ERROR: Final = "the interval does not include the error of the model"
#: Names of all estimators.
ESTIMATORS: Final = (*_BY_EPISODE, *_BY_STEP)


class EstimationKeywords(TypedDict, total=False):
    """The fields of `Estimation` that have defaults."""

    estimators: Annotated[Sequence[str], ("is", "pdis", "wis", "wpdis")]
    bandit: Annotated[bool, False]
    incomplete: Annotated[Literal["raise", "drop"], "raise"]
    q_model: Annotated[QModel | None, None]
    folds: Annotated[int, 2]
    intervals: Annotated[IntervalOptions | None, None]


@dataclass(frozen=True, kw_only=True)
class Estimation:
    """The estimators and their options.

    Attributes:
        gamma: Discount per step, from 0 to 1.
        estimators: Names from `ESTIMATORS`.
        bandit: Each row is an episode of one step: ``eps_id`` and ``t`` are ignored.
        incomplete: What to do with episodes that lack steps or an end: ``"raise"``, or ``"drop"``, which
            leaves them out and counts them. Longer episodes are cut more often, so the remaining ones may be
            biased.
        q_model: Model of the action values, for ``dm``, ``dr`` and ``wdr``; None: `FittedQ()`.
        folds: Number of parts of the episodes. A model that was fitted to the other parts judges each part,
            so that no reward counts twice; 1: one model, fitted to all.
        intervals: Options of intervals; None: the defaults.

    Raises:
        OptionError: A value is out of range.
    """

    gamma: float
    estimators: Sequence[str] = ("is", "pdis", "wis", "wpdis")
    bandit: bool = False
    incomplete: Literal["raise", "drop"] = "raise"
    q_model: QModel | None = None
    folds: int = 2
    intervals: IntervalOptions | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.estimators if name not in ESTIMATORS]
        if unknown or not self.estimators or isinstance(self.estimators, str):
            raise OptionError(
                f"estimators={excerpt(self.estimators)}: expected a list of {', '.join(ESTIMATORS)}"
            )
        object.__setattr__(self, "estimators", tuple(dict.fromkeys(self.estimators)))
        check_choice("incomplete", self.incomplete, ("raise", "drop"))
        set_options(
            self,
            gamma=check_number("gamma", self.gamma, least=0, most=1),
            folds=check_count("folds", self.folds, least=1, of="parts"),
        )

    @property
    def fits(self) -> bool:
        """Whether a model is fitted."""
        return any(name in _BY_MODEL for name in self.estimators)

    @property
    def weighs(self) -> bool:
        """Whether rows need the probabilities of their actions."""
        return any(name != "dm" for name in self.estimators)

    def evidence(self, *, most_rows: int | None = None) -> Evidence:
        """Return empty evidence of the kind that these estimators need."""
        keep_steps = any(name in _BY_STEP for name in self.estimators)
        return Evidence(gamma=self.gamma, keep_steps=keep_steps, most_rows=most_rows)

    def of(self, evidence: Evidence, target: Target | None = None) -> dict[str, OffPolicyEstimate]:
        """Return the estimates from the whole episodes of ``evidence``, by name.

        Args:
            evidence: Evidence from `evidence`, filled with rows.
            target: The judged policy; required if a model is fitted.

        Raises:
            SchemaError: An episode lacks steps or its end, and ``incomplete="raise"``; or none is whole.
            OptionError: All weights are 0, or a model cannot be fitted.
        """
        left_out = evidence.incomplete
        if left_out and self.incomplete == "raise":
            raise SchemaError(
                f"{left_out} {'episode is' if left_out == 1 else 'episodes are'} incomplete: "
                f"{evidence.why_incomplete()}. Add the missing rows, or leave such episodes out, which "
                "favours short ones: pass incomplete='drop', or --drop-incomplete to `rlio evaluate`",
                column=Columns.T,
            )
        weights, episodes = evidence.joined()
        found = self._contributions(weights, episodes, target)
        return self._estimates(weights, left_out, found)

    def _contributions(
        self, weights: EpisodeWeights, episodes: Episodes | None, target: Target | None
    ) -> dict[str, Contributions]:
        found = {name: _BY_EPISODE[name](weights) for name in self.estimators if name in _BY_EPISODE}
        if episodes is not None:
            steps = self._steps(episodes, target)
            found |= {name: _BY_STEP[name](steps) for name in self.estimators if name in _BY_STEP}
        return {name: found[name] for name in self.estimators}

    def _steps(self, episodes: Episodes, target: Target | None) -> WeightedSteps:
        """Return the steps, with a model's values if they are needed."""
        if not self.fits:
            return weighted_steps(episodes, self.gamma)
        if target is None:
            raise OptionError(f"{', '.join(_BY_MODEL)} fit a model of the judged policy: pass target=")
        values = cross_fitted(
            FittedQ() if self.q_model is None else self.q_model,
            Transitions.of(episodes, bandit=self.bandit),
            episodes.lengths,
            target,
            gamma=self.gamma,
            folds=self.folds,
        )
        return weighted_steps(episodes, self.gamma, values)

    def _estimates(
        self, weights: EpisodeWeights, left_out: int, contributions: Mapping[str, Contributions]
    ) -> dict[str, OffPolicyEstimate]:
        """Turn contributions into estimates, all with the same episodes and draws."""
        options = self.intervals or IntervalOptions()
        draws = Resampling(len(weights.lengths), resamples=options.resamples, seed=options.seed)
        logged = Contributions(weights.returns, np.ones(len(weights.returns)))
        behavior = measured([logged], draws, options)
        weighed = Overlap.of(weights.log_weights) if self.weighs else None
        estimates = {}
        for name, found in contributions.items():
            overlap = None if name == "dm" else weighed
            doubts = [_MODEL_ERROR] if overlap is None else overlap.doubts
            concentration = _concentration(found, options) if name in ("is", "pdis") else None
            target = measured([found], draws, options, concentration, doubts=doubts)
            estimates[name] = OffPolicyEstimate(
                estimator=name,
                v_behavior=behavior,
                v_target=target,
                v_gain=measured([found, logged], draws, options, doubts=doubts),
                v_gain_ratio=target.value / behavior.value if behavior.value > 0 else None,
                overlap=overlap,
                episodes=len(weights.lengths),
                steps=int(weights.lengths.sum()),
                left_out=left_out,
                gamma=self.gamma,
                confidence=options.confidence,
            )
        return estimates


def _concentration(found: Contributions, options: IntervalOptions) -> tuple[float, float] | None:
    if options.value_bounds is None:
        return None
    # On this scale, numbers that are too large become infinite, and outside of any bounds.
    with np.errstate(over="ignore"):
        values = found.numerators * np.exp(found.log_scale)
    return empirical_bernstein(values, bounds=options.value_bounds, confidence=options.confidence)
