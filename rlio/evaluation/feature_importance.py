"""`feature_importance`: measures which parts of observations a policy's actions depend on.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> from rlio.batch import SampleBatch
    >>> from rlio.policies.policy import Policy
    >>> class LooksAtTheFirst(Policy):
    ...     def compute_actions(self, obs, state=(), *, explore=True, inputs=None, timestep=0):
    ...         return (obs[:, 0] > 0).astype(np.int64), state, {}
    >>> policy = LooksAtTheFirst()
    >>> policy.bind(Box(-1.0, 1.0, (2,)), Discrete(2))
    >>> batch = SampleBatch(obs=np.random.default_rng(0).normal(size=(1000, 2)))
    >>> feature_importance(policy, batch, seed=0).round(1).tolist()
    [0.5, 0.0]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import to_numpy
from rlio.batch.columns import Columns
from rlio.batch.nested import leaves
from rlio.batch.rows import generator
from rlio.errors import MissingColumn, OptionError, excerpt
from rlio.policies.policy import Policy
from rlio.support.options import check_count, check_number

__all__ = ["feature_importance"]

#: (values of one feature, (N,), generator) -> other values of it, (N,).
Perturb: TypeAlias = Callable[[NDArray[Any], np.random.Generator], NDArray[Any]]


def feature_importance(
    policy: Policy,
    batch: SampleBatch,
    *,
    repeat: int = 1,
    perturb: Perturb | None = None,
    limit_fraction: float = 1.0,
    seed: int | None = None,
) -> NDArray[np.float64]:
    """Measure how a policy's actions change when one number of the observations is taken from other rows.

    Actions are computed without exploration, so that nothing else changes them.

    Args:
        policy: A bound policy that is not recurrent.
        batch: Rows with ``obs``, an array (N, ...); not changed.
        repeat: Permutations of each feature, whose effects are averaged.
        perturb: Returns other values of a feature; None: a permutation of them.
        limit_fraction: Fraction of the rows to use, drawn at random, above 0.
        seed: Seed of permutations and rows; None draws one from the OS and logs it.

    Returns:
        Importances in the shape of an observation, float64, 0 or above: the fraction of actions that differ,
        for integer actions; otherwise the mean distance between actions.

    Raises:
        MissingColumn: The batch has no ``obs``.
        OptionError: Observations are nested, or the batch is empty, or a value is out of range.

    Source: Breiman, "Random forests" (2001), section 10.
    """
    if Columns.OBS not in batch:
        raise MissingColumn("the batch has no observations to measure", column=Columns.OBS)
    repeat = check_count("repeat", repeat, least=1)
    limit_fraction = check_number("limit_fraction", limit_fraction, above=0, most=1)
    if policy.is_recurrent:
        raise OptionError("the policy is recurrent, so its actions depend on more than an observation")
    if isinstance(batch[Columns.OBS], dict | tuple) or not len(batch):
        raise OptionError(
            f"observations are {excerpt(repr(batch))}: expected an array with rows; flatten nested ones"
        )
    rng = generator(seed)
    obs = to_numpy(batch[Columns.OBS])
    rows = rng.permutation(len(obs))[: max(1, round(limit_fraction * len(obs)))]
    flat = obs[np.sort(rows)].reshape(len(rows), -1)
    shape = obs.shape[1:]

    def actions_of(values: NDArray[Any]) -> Any:
        return policy.compute_actions(values.reshape(len(values), *shape), explore=False)[0]

    usual = actions_of(flat)
    found = np.zeros(flat.shape[1])
    for feature in range(flat.shape[1]):
        for _ in range(repeat):
            changed = flat.copy()
            own = flat[:, feature]
            changed[:, feature] = rng.permutation(own) if perturb is None else perturb(own.copy(), rng)
            found[feature] += _difference(usual, actions_of(changed)) / repeat
    return found.reshape(shape)


def _difference(actions: Any, others: Any) -> float:
    """Return the fraction of rows that differ, or the mean distance of floats; summed over nested parts."""
    total = 0.0
    for (_, a), (_, b) in zip(leaves(actions), leaves(others), strict=True):
        a, b = np.asarray(a).reshape(len(a), -1), np.asarray(b).reshape(len(b), -1)
        if a.dtype.kind in "iub":
            total += float((a != b).any(-1).mean())
        else:
            total += float(np.sqrt(((a - b) ** 2).sum(-1)).mean())
    return total
