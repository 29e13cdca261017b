"""`RandomPolicy`: uniform actions from its own random generator.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> policy = RandomPolicy()
    >>> policy.bind(Box(0.0, 1.0, (3,)), Discrete(4), seed=0)
    >>> actions, _, extras = policy.compute_actions(np.zeros((5, 3)))
    >>> actions.shape, extras["action_prob"].tolist()
    ((5,), [0.25, 0.25, 0.25, 0.25, 0.25])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import row_count
from rlio.batch.columns import Columns
from rlio.batch.nested import unflatten
from rlio.envs.leaves import leaf_of, leaves_of
from rlio.errors import OptionError, excerpt
from rlio.policies.policy import POLICY_STATE, Policy, PolicyOutput, PolicyState, RecurrentState, state_part
from rlio.support.states import restore_generator

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["RandomPolicy"]


class RandomPolicy(Policy):
    """Acts uniformly in Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple spaces; never learns.

    A number of a Box without bounds is standard normal; with one bound, exponential from that bound, as in
    gymnasium's own sampling. Extra columns: ``action_logp`` and ``action_prob``; for a Box, they are
    densities. ``explore=False`` acts just as randomly.
    """

    _rng: np.random.Generator
    #: Log of the probability of every action; None if it depends on the action.
    _constant: np.float32 | None

    def _setup(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        seeds: np.random.SeedSequence,
    ) -> None:
        from gymnasium.spaces import Box

        self._rng = np.random.default_rng(seeds)
        self._leaves = leaves_of(action_space)
        self._is_plain = [leaf.path for leaf in self._leaves] == [()]
        # Also refuses unsupported spaces. Between bounds, all actions are equally likely.
        logp = self._logp(self._drawn(1, np.random.default_rng(0)))
        boxes = [leaf.space for leaf in self._leaves if isinstance(leaf.space, Box)]
        self._constant = np.float32(logp[0]) if all(box.is_bounded() for box in boxes) else None

    def _drawn(self, rows: int, rng: np.random.Generator) -> Any:
        drawn = [_draw(leaf.space, rows, rng) for leaf in self._leaves]
        if self._is_plain:
            return drawn[0]
        return unflatten([leaf.path for leaf in self._leaves], drawn)

    def _logp(self, actions: Any) -> NDArray[np.float64]:
        """Log of the probability (density) of each of ``actions`` under `_drawn`."""
        parts = [_logp(leaf.space, leaf_of(actions, leaf.path)) for leaf in self._leaves]
        return parts[0] if self._is_plain else np.asarray(np.sum(parts, axis=0))

    def compute_actions(
        self,
        obs: Any,
        state: RecurrentState = (),
        *,
        explore: bool = True,
        inputs: SampleBatch | None = None,
        timestep: int = 0,
    ) -> PolicyOutput:
        rows = row_count(obs) or 0
        actions = self._drawn(rows, self._rng)
        if self._constant is not None:
            logp = np.full(rows, self._constant)
        else:
            logp = self._logp(actions).astype(np.float32)
        return actions, state, {Columns.ACTION_LOGP: logp, Columns.ACTION_PROB: np.exp(logp)}

    def compute_log_likelihoods(
        self, actions: Any, obs: Any, *, explore: bool = True, timestep: int | None = None
    ) -> NDArray[np.float64]:
        self._bound()
        return self._logp(actions)

    def get_state(self) -> PolicyState:
        return super().get_state() | {"rng": self._rng.bit_generator.state}

    def set_state(self, state: PolicyState) -> None:
        self._bound()
        rng = state_part(state, "rng", dict)
        super().set_state(state)
        restore_generator(self._rng.bit_generator, rng, of=f"{POLICY_STATE}['rng']")


def _draw(space: gym.Space[Any], n: int, rng: np.random.Generator) -> Any:
    """Draw ``n`` actions of ``space``, which is one leaf."""
    from gymnasium import spaces

    match space:
        case spaces.Discrete():
            return rng.integers(space.start, space.start + space.n, n, dtype=space.dtype)
        case spaces.MultiDiscrete():
            return rng.integers(space.start, space.start + space.nvec, (n, *space.shape), dtype=space.dtype)
        case spaces.MultiBinary():
            return rng.integers(0, 2, (n, *space.shape), dtype=space.dtype)
        case spaces.Box():
            return _draw_box(space, n, rng)
    raise OptionError(
        f"RandomPolicy cannot act in {excerpt(str(space))}: expected Box, Discrete, MultiDiscrete, "
        "MultiBinary, or Dict and Tuple of them"
    )


def _draw_box(space: Any, n: int, rng: np.random.Generator) -> Any:
    shape = (n, *space.shape)
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    lower, upper = space.bounded_below, space.bounded_above  # masks of the bounds that exist
    both = lower & upper
    if both.all() and space.dtype.kind in "iu":
        return rng.integers(space.low, space.high, shape, dtype=space.dtype, endpoint=True)
    values = np.where(both, low, 0.0) + rng.random(shape) * np.where(both, high - low, 1.0)
    if not both.all():
        tail, normal = rng.exponential(size=shape), rng.standard_normal(shape)
        values = np.where(lower & ~upper, np.where(lower, low, 0.0) + tail, values)
        values = np.where(upper & ~lower, np.where(upper, high, 0.0) - tail, values)
        values = np.where(~lower & ~upper, normal, values)
    # Rounding to the space's dtype may exceed a bound.
    return np.clip(values.astype(space.dtype), space.low, space.high)


def _logp(space: gym.Space[Any], actions: Any) -> NDArray[np.float64]:
    """Log of the probability (density) of each of ``actions`` under `_draw`."""
    from gymnasium import spaces

    match space:
        case spaces.Discrete():
            low, high, counted = space.start, space.start + space.n - 1, -np.log(float(space.n))
        case spaces.MultiDiscrete():
            low, high = space.start, space.start + space.nvec - 1
            counted = -np.log(space.nvec.astype(np.float64)).sum()
        case spaces.MultiBinary():
            low, high, counted = 0, 1, -np.log(2.0) * np.prod(space.shape)
        case spaces.Box():
            return _logp_box(space, np.asarray(actions))
        case _:
            raise OptionError(f"RandomPolicy does not act in {excerpt(str(space))}")
    values = np.asarray(actions)
    inside = ((values >= low) & (values <= high)).reshape(len(values), -1).all(-1)
    return np.where(inside, float(counted), -np.inf)


def _logp_box(space: Any, actions: NDArray[Any]) -> NDArray[np.float64]:
    axes = tuple(range(1, 1 + len(space.shape)))
    values = actions.astype(np.float64)
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    lower, upper = space.bounded_below, space.bounded_above
    both = lower & upper
    whole = space.dtype.kind in "iu"
    if whole and not both.all():
        raise OptionError(
            f"the probabilities of whole numbers without bounds, {excerpt(str(space))}, are unknown"
        )
    width = np.where(both, high - low + whole, 1.0)
    logp = np.broadcast_to(-np.log(np.where(width > 0, width, 1.0)), values.shape)
    if not both.all():
        tail = np.where(lower, values - np.where(lower, low, 0.0), np.where(upper, high, 0.0) - values)
        normal = 0.5 * (values**2 + np.log(2 * np.pi))
        logp = np.where(both, logp, np.where(lower | upper, -tail, -normal))
    logp = np.where((values >= low) & (values <= high), logp, -np.inf)
    return np.asarray(logp.sum(axis=axes), np.float64)
