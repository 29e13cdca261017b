"""`do_minibatch_sgd`: several passes over a batch, in shuffled minibatches.

Example:
    >>> import numpy as np
    >>> from rlio.batch import SampleBatch
    >>> batch = SampleBatch(rewards=np.arange(5.0))
    >>> learned = lambda part: {"rows": float(len(part)), "mean": float(part["rewards"].mean())}
    >>> do_minibatch_sgd(learned, batch, num_sgd_iter=2, sgd_minibatch_size=2, seed=0)["rows"]
    1.6666666666666667
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from rlio.batch import SampleBatch
from rlio.policies.postprocessing import standardize_fields as standardized
from rlio.support.options import check_count

__all__ = ["do_minibatch_sgd", "mean_stats", "minibatches"]


def minibatches(
    batch: SampleBatch, sgd_minibatch_size: int, *, seed: int | np.random.Generator | None = None
) -> Iterator[SampleBatch]:
    """One pass over ``batch`` in random order; each row, or whole sequence, once.

    Args:
        batch: Rows; with ``seq_lens``, sequences, which are never cut.
        sgd_minibatch_size: Rows of a minibatch, except the last. With sequences: the maximum, unless one
            sequence is longer. 0: yields ``batch`` itself, unchanged.
        seed: Seed of the order, or the generator to draw it from; None draws one from the OS.

    Raises:
        OptionError: ``sgd_minibatch_size`` is below 0.
    """
    sgd_minibatch_size = check_count("sgd_minibatch_size", sgd_minibatch_size, least=0, of="rows")
    if not sgd_minibatch_size:
        yield batch
        return
    yield from batch.shuffle(seed).timeslices(sgd_minibatch_size)


def do_minibatch_sgd(
    learn_on_batch: Callable[[SampleBatch], dict[str, Any]],
    batch: SampleBatch,
    *,
    num_sgd_iter: int = 1,
    sgd_minibatch_size: int = 0,
    standardize_fields: Collection[str] = (),
    seed: int | np.random.Generator | None = None,
) -> dict[str, Any]:
    """Learn on each minibatch of ``num_sgd_iter`` passes over ``batch``.

    Args:
        learn_on_batch: For example `Policy.learn_on_batch`: returns its measurements.
        batch: One policy's rows.
        num_sgd_iter: Passes.
        sgd_minibatch_size: As in `minibatches`.
        standardize_fields: Columns that are first scaled to mean 0 and standard deviation 1 over the whole
            batch, such as ``advantages``.
        seed: Seed of the orders; None draws one from the OS.

    Returns:
        The mean of each measured number (`mean_stats`).

    Raises:
        OptionError: A number is out of range.
        MissingColumn: A field to standardise is absent.
    """
    num_sgd_iter = check_count("num_sgd_iter", num_sgd_iter, least=1, of="passes")
    if standardize_fields:
        batch = standardized(batch, standardize_fields)
    rng = np.random.default_rng(seed)
    return mean_stats(
        [
            learn_on_batch(part)
            for _ in range(num_sgd_iter)
            for part in minibatches(batch, sgd_minibatch_size, seed=rng)
        ]
    )


def mean_stats(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each number over the dicts that have it; for other values, the last one.

    NaNs are left out, unless all values are NaN.
    """
    made: dict[str, Any] = {}
    for name in dict.fromkeys(name for stats in measured for name in stats):
        values = [stats[name] for stats in measured if name in stats]
        numbers = [value for value in values if isinstance(value, (int, float, np.number))]
        if len(numbers) < len(values):
            made[name] = values[-1]
            continue
        known = [float(value) for value in numbers if not np.isnan(value)]
        made[name] = sum(known) / len(known) if known else float("nan")
    return made
