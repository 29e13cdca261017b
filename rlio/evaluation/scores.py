"""Normalised scores: returns on a scale from a random policy's (0) to an expert's (100).

Example:
    >>> normalised_score([-280.18, 12135.0], reference=(-280.178953, 12135.0)).round(3).tolist()
    [-0.0, 100.0]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from rlio.errors import OptionError, excerpt

__all__ = ["normalised_score", "normalized_score"]

#: The names of the two references in the metadata of Minari's and D4RL's data sets.
_NAMES = ("ref_min_score", "ref_max_score")


def normalised_score(
    returns: npt.ArrayLike, *, reference: Sequence[float] | Mapping[str, Any]
) -> NDArray[np.float64]:
    """Return ``100 * (return - low) / (high - low)`` of each return.

    Args:
        returns: Undiscounted returns of episodes, or their mean; any shape.
        reference: (low, high): the mean return of a random policy and that of an expert in the same
            environment. Or metadata with ``ref_min_score`` and ``ref_max_score``.

    Returns:
        float64 of the same shape.

    Raises:
        OptionError: ``reference`` is neither, or ``low`` is not below ``high``.

    Source: Fu et al., "D4RL: Datasets for Deep Data-Driven Reinforcement Learning" (2020).
    """
    if isinstance(reference, Mapping):
        reference = [reference.get(name) for name in _NAMES]  # type: ignore[misc]  # checked below
    try:
        if isinstance(reference, str | bytes | Set):
            raise TypeError("neither is a pair of numbers")
        low, high = (float(value) for value in reference)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"reference={excerpt(reference)}: expected the returns (low, high) of a random policy and an "
            f"expert, or metadata with {' and '.join(_NAMES)}"
        ) from error
    if not (np.isfinite([low, high]).all() and low < high):
        raise OptionError(
            f"reference=({low}, {high}): expected two finite numbers, the first below the second"
        )
    return np.asarray(100.0 * (np.asarray(returns, np.float64) - low) / (high - low))


normalized_score = normalised_score
