"""The recorded probabilities of actions: ``action_logp`` and ``action_prob``, which say the same twice.

Example:
    >>> from rlio.batch import SampleBatch
    >>> read_log_probabilities(SampleBatch(action_prob=[0.5, 0.25]), densities=False).round(2).tolist()
    [-0.69, -1.39]
    >>> logp = np.log(np.float32([0.5, 0.5, 0.1]))
    >>> contradicting(logp, np.float32([0.5, 0.9, 0.1])).tolist()
    [False, True, False]
    >>> contradicting(np.array([-120.0, -1.0]), np.zeros(2, np.float32)).tolist()  # e^-120 underflows
    [False, True]
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch.arrays import to_numpy
from rlio.batch.columns import Columns
from rlio.batch.nested import map_structure
from rlio.batch.sample_batch import SampleBatch
from rlio.errors import MissingColumn, SchemaError, excerpt

__all__ = ["ROUNDING", "contradicting", "read_log_probabilities"]

#: Largest effect of float32 rounding on the log of a probability.
ROUNDING: Final = 1e-4

# Columns of float64 may hold numbers that were computed in float32, for example those read from JSON.
_FLOAT32: Final = np.finfo(np.float32)


def read_log_probabilities(batch: SampleBatch, *, densities: bool) -> NDArray[np.float64]:
    """Return the log of the probability of each action: ``action_logp``, or log of ``action_prob``.

    Args:
        batch: The rows.
        densities: Whether values may be above 1.

    Returns:
        (N,) float64, all finite.

    Raises:
        MissingColumn: Both columns are absent.
        SchemaError: A value is NaN, zero or above 1, or the two columns contradict each other.
    """
    names = (Columns.ACTION_LOGP, Columns.ACTION_PROB)
    found = {name: _read_numbers(batch, name) for name in names if name in batch}
    if not found:
        raise MissingColumn(
            "rows do not say how likely their actions were: record with a policy whose extra columns are "
            "action_logp or action_prob, add the column (rlio.MappedInput), or use the direct method, "
            "which does not need it",
            column=Columns.ACTION_LOGP,
        )
    logs = {name: _logs_of(name, values) for name, values in found.items()}
    for name, logp in logs.items():
        _check_range(batch, logp, name, densities)
    if len(found) == 2:
        _check_agreement(batch, found[Columns.ACTION_LOGP], found[Columns.ACTION_PROB])
    name, logp = next(iter(logs.items()))
    for bad, why in (
        (logp == np.inf, "is infinite"),
        (logp == -np.inf, "is zero, but the action was taken: the column is wrong, or is of another policy"),
    ):
        if bad.any():
            raise SchemaError(f"the probability of the action in {_row(batch, bad)} {why}", column=name)
    return logp


def _row(batch: SampleBatch, wrong: NDArray[np.bool_]) -> str:
    """Where the first of the ``wrong`` rows is: readers cut a data set into batches of their own size."""
    row = int(wrong.argmax())
    keys = [
        f"{name} {excerpt(to_numpy(batch[name])[row].item())}"
        for name in (Columns.EPS_ID, Columns.T)
        if name in batch
    ]
    return f"row {row} of the batch" + (f" ({', '.join(keys)})" if keys else "")


def _read_numbers(batch: SampleBatch, name: str) -> NDArray[Any]:
    values = map_structure(to_numpy, batch[name])
    if isinstance(values, np.ndarray) and values.shape == (len(batch),) and values.dtype.kind in "iuf":
        return values
    found = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else "a nested column"
    raise SchemaError(
        f"found {found}: expected one number per row, real numbers of shape ({len(batch)},)", column=name
    )


def _logs_of(name: str, values: NDArray[Any]) -> NDArray[np.float64]:
    numbers = values.astype(np.float64)
    if name == Columns.ACTION_LOGP:
        return numbers
    if (numbers < 0).any():
        raise SchemaError(
            f"{numbers.min():.4g} is not a probability: if these are logs, name the column action_logp",
            column=name,
        )
    with np.errstate(divide="ignore"):
        return np.log(numbers)


def _check_range(batch: SampleBatch, logp: NDArray[np.float64], name: str, densities: bool) -> None:
    if np.isnan(logp).any():
        where = _row(batch, np.isnan(logp))
        raise SchemaError(f"the probability of the action in {where} is NaN", column=name)
    if not densities and len(logp) and logp.max() > ROUNDING:
        most = np.exp(min(logp.max(), 700.0))
        raise SchemaError(
            f"the action in {_row(batch, logp == logp.max())} has the probability {most:.4g}, "
            "above 1: the column has densities of continuous actions that were rounded later, not "
            "probabilities of the logged actions",
            column=name,
        )


def _check_agreement(batch: SampleBatch, logp: NDArray[Any], prob: NDArray[Any]) -> None:
    wrong = contradicting(logp, prob)
    rows = np.flatnonzero(wrong)
    if len(rows):
        first = rows[0]
        raise SchemaError(
            f"action_logp and action_prob contradict each other in {len(rows)} of {len(logp)} rows of the "
            f"batch, rows {', '.join(map(str, rows[:5]))}{', ...' if len(rows) > 5 else ''}: in "
            f"{_row(batch, wrong)}, action_logp is {logp[first]:.6g}, but the log of action_prob "
            f"{prob[first]:.6g} is {_log(prob[first]):.6g}. Remove the wrong column, for example with "
            "rlio.MappedInput",
            column=Columns.ACTION_LOGP,
        )


def _log(prob: Any) -> float:
    return math.log(prob) if prob > 0 else -math.inf


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
