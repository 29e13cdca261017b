"""Off-policy evaluation: estimates a policy's return from another policy's record. See docs/evaluation.md.

`evaluate_offline` reads a data set; `OffPolicyEvaluator` takes batches as they arrive. `weighting` has the
estimators' arithmetic as pure functions of arrays, `intervals` their uncertainty, `fitted_q` fits action
values, and `feature_importance` measures which parts of observations a policy depends on.
`normalised_score` puts returns on the scale of D4RL and Minari.
"""

from rlio.evaluation.estimates import Measured, OffPolicyEstimate, Overlap
from rlio.evaluation.estimation import ESTIMATORS, Estimation
from rlio.evaluation.evaluator import OffPolicyEvaluator, evaluate_offline
from rlio.evaluation.feature_importance import feature_importance
from rlio.evaluation.fitted_q import FittedQ
from rlio.evaluation.intervals import IntervalOptions
from rlio.evaluation.scores import normalised_score, normalized_score
from rlio.evaluation.target import Target

__all__ = [
    "ESTIMATORS",
    "Estimation",
    "FittedQ",
    "IntervalOptions",
    "Measured",
    "OffPolicyEstimate",
    "OffPolicyEvaluator",
    "Overlap",
    "Target",
    "evaluate_offline",
    "feature_importance",
    "normalised_score",
    "normalized_score",
]
