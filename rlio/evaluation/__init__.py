"""Off-policy evaluation: what a policy would earn, by what another one recorded. See docs/evaluation.md.

`evaluate_offline` reads a data set; `OffPolicyEvaluator` takes batches as they come. `weighting` has the
estimators' arithmetic as pure functions of arrays, `intervals` says how far they may be off, `fitted_q` fits
the values of actions, and `feature_importance` says which parts of observations a policy looks at.
"""

from rlio.evaluation.estimates import Measured, OffPolicyEstimate, Overlap
from rlio.evaluation.estimation import ESTIMATORS, Estimation
from rlio.evaluation.evaluator import OffPolicyEvaluator, evaluate_offline
from rlio.evaluation.feature_importance import feature_importance
from rlio.evaluation.fitted_q import FittedQ
from rlio.evaluation.intervals import IntervalOptions
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
]
