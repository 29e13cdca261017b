"""Whether a probability and its logarithm, stored beside each other, are the same number.

Example:
    >>> logp = np.log(np.float32([0.5, 0.5, 0.1]))
    >>> contradicting(logp, np.float32([0.5, 0.9, 0.1])).tolist()
    [False, True, False]
    >>> contradicting(np.array([-120.0, -1.0]), np.zeros(2, np.float32)).tolist()  # e^-120 underflows
    [False, True]
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROUNDING", "contradicting"]

#: Largest effect of float32 rounding on the log of a probability.
ROUNDING: Final = 1e-4

# Columns of float64 may hold numbers that were computed in float32, for example those read from JSON.
_FLOAT32: Final = np.finfo(np.float32)


def contradicting(logp: NDArray[Any], prob: NDArray[Any]) -> NDArray[np.bool_]:
    """Where ``prob`` is not the exponential of ``logp``, although both were rounded to their dtypes.

    A ``prob`` of 0 fits each ``logp`` whose exponential is no normal number of its dtype, and an infinite one
    (of a density) each whose exponential is above the dtype's largest number.

    Args:
        logp: Logs of probabilities or densities, (...,); of integers or floats.
        prob: Probabilities or densities, of the same shape.

    Returns:
        Mask of that shape; True also where one is NaN.
    """
    of_log, of_prob = _precision(logp), _precision(prob)
    logs = np.asarray(logp, np.float64)
    found = np.asarray(prob, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        error = ROUNDING + np.abs(logs) * max(of_log.eps, _FLOAT32.eps)
        least, most = np.exp(logs - error), np.exp(logs + error)
        # Below the smallest normal number, floats have few digits, and hardware may replace them by 0.
        tiny = max(of_prob.smallest_normal, _FLOAT32.smallest_normal)
        spread = float(of_prob.eps)
        fits = (found >= least * (1 - spread) - tiny) & (found <= most * (1 + spread) + tiny)
        fits |= np.isposinf(found) & (most >= min(of_prob.max, _FLOAT32.max))
    return ~np.asarray(fits, bool)


def _precision(values: NDArray[Any]) -> Any:
    """`numpy.finfo` of the dtype; integers are exact, like the float64 to which they are converted."""
    dtype = np.asarray(values).dtype
    return np.finfo(dtype if dtype.kind == "f" else np.float64)
