"""`NStep`: transitions of n steps, with the discount and the mask that bootstrapping needs.

    R = r_0 + gamma r_1 + ... + gamma^(k-1) r_(k-1)
    target = R + n_step_discount * bootstrap_mask * V(new_obs)

with k = n, or less if the episode, or its recording, ends earlier. ``n_step_discount`` is gamma^k.
``bootstrap_mask`` is 0 after a termination and where the final observation is missing, else 1: a truncated
episode bootstraps from its true final observation.

Source: Sutton and Barto, "Reinforcement Learning" (2nd ed.), section 7.1; Pardo et al., "Time Limits in
Reinforcement Learning" (2018), for truncation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.replay.table import RowTable
from rlio.support.options import check_count, check_number, checked_keywords, set_options

__all__ = ["NStep", "Window", "windows"]

Ids = NDArray[np.int64]


@checked_keywords
@dataclass(frozen=True)
class NStep:
    """n-step transitions, as ``draw=rlio.NStep(3, gamma=0.99)`` of readers and samplers.

    ``rewards`` are discounted sums over up to ``n`` rows; ``new_obs`` and the end flags are those of the last
    row. ``n_step_discount`` (float32) is gamma to the power of the steps taken. ``bootstrap_mask`` (float32)
    is 0 after a termination and where the final observation is missing.

    Attributes:
        n: Steps to look ahead, at least 1; fewer at the end of an episode.
        gamma: Discount of a step, 0 to 1.

    Raises:
        OptionError: A value is out of range.
    """

    n: int = 1
    gamma: float = 0.99

    def __post_init__(self) -> None:
        set_options(
            self,
            n=check_count("NStep.n", self.n, least=1, of="steps"),
            gamma=check_number("NStep.gamma", self.gamma, least=0, most=1),
        )


@dataclass(frozen=True)
class Window:
    """The steps that each drawn row looks ahead.

    Attributes:
        last: Logical number of the last row of each window, shape (n,).
        steps: Number of rows in each window, shape (n,) int64, at least 1.
        rewards: Discounted sum, shape (n,), in the rewards' dtype; float32 for integer rewards.
        discount: gamma to the power of ``steps``, shape (n,) float32.
    """

    last: Ids
    steps: Ids
    rewards: NDArray[Any]
    discount: NDArray[np.float32]


def windows(table: RowTable, rows: Ids, step: NStep, *, rewards: str, head: int | None = None) -> Window:
    """Follow each row for ``step.n`` steps, or to the end of its episode.

    Args:
        table: Holds the rows.
        rows: Logical numbers.
        step: How far to look ahead.
        rewards: Physical name of the rewards.
        head: Ignore rows from this logical number on; None: ignore none.
    """
    own = table.values(rewards, rows)
    total = own.astype(np.float64)
    last, steps = rows.copy(), np.ones(len(rows), np.int64)
    live = np.arange(len(rows))
    factor = 1.0
    for _ in range(step.n - 1):
        following = table.successors(last[live], head=head)
        goes_on = following >= 0
        live, following = live[goes_on], following[goes_on]
        if not len(live):
            break
        factor *= step.gamma
        last[live] = following
        steps[live] += 1
        total[live] += factor * table.values(rewards, following)
    # Discounted sums of integers are not integers.
    kind = own.dtype if own.dtype.kind == "f" else np.dtype(np.float32)
    return Window(last, steps, total.astype(kind), np.power(step.gamma, steps).astype(np.float32))
