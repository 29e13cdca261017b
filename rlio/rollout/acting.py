"""`Acting`: a policy in N environments, with the state and the inputs that it wants, step after step.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> policy = RandomPolicy()
    >>> policy.bind(Box(-1.0, 1.0, (3,)), Discrete(2), seed=0)
    >>> acting = Acting(policy, num_envs=4)
    >>> acted = acting.act(np.zeros((4, 3)), {}, explore=True, timestep=0)
    >>> acted.actions.shape, sorted(acted.extras)
    ((4,), ['action_logp', 'action_prob'])
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.columns import RECORDED, STATE_OUT_PREFIX, Columns
from rlio.envs.leaves import leaves_of
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.nested import map_structure, unflatten
from rlio.policies.policy import Policy, RecurrentState

if TYPE_CHECKING:
    from rlio.envs.stepping import VectorStep

__all__ = ["STATE_BEFORE_PREFIX", "Acted", "Acting", "check_extras"]

#: Columns of the recorder: the recurrent state before each step.
STATE_BEFORE_PREFIX = "_state_before_"
_INPUTS = (Columns.PREV_ACTIONS, Columns.PREV_REWARDS, Columns.T, Columns.EPS_ID, Columns.ENV_ID)


class Acted(NamedTuple):
    """What a policy gave for N environments.

    Attributes:
        actions: (N, ...), nested as the action space.
        extras: Further columns, (N, ...).
        weights_seq_no: Version of the weights that acted: a number, or (N,) where it differs.
    """

    actions: Any
    extras: dict[str, NDArray[Any]]
    weights_seq_no: int | NDArray[np.int64]


def check_extras(extras: Iterable[str], own: Collection[str] = RECORDED) -> None:
    """Refuse a policy's extra columns that have names of columns which are recorded anyway.

    Raises:
        SchemaError: One has.
    """
    for name in extras:
        if name in own:
            raise SchemaError(
                "the policy gave an extra column of this name, which runners record: give it another name",
                column=name,
            )


class Acting:
    """Calls ``policy`` for ``num_envs`` environments.

    Environments that still work on an earlier action keep it: what the policy says of them meanwhile does
    not count.

    Raises:
        OptionError: The policy's ``input_columns`` has a name that nobody knows.
    """

    def __init__(self, policy: Policy, num_envs: int) -> None:
        for name in policy.input_columns:
            if name not in _INPUTS:
                raise OptionError(
                    f"{type(policy).__name__}.input_columns has {excerpt(name)}: known are "
                    f"{', '.join(_INPUTS)}"
                )
        self.policy = policy
        self._num_envs = num_envs
        self.begin()

    @property
    def remembers(self) -> bool:
        """Whether what the policy does depends on the steps before."""
        return bool(self._state) or bool(self.policy.input_columns)

    def begin(self) -> None:
        """New episodes begin everywhere."""
        self._state: RecurrentState = self.policy.initial_state(self._num_envs)
        self._before: dict[str, Any] = {}
        #: Environments that work on the action of `_last`; None: none does.
        self._in_flight: NDArray[np.bool_] | None = None
        self._last: Acted | None = None

    def act(self, obs: Any, known: Mapping[str, Any], *, explore: bool, timestep: int) -> Acted:
        """Choose actions.

        Args:
            obs: (N, ...), which may be overwritten later.
            known: ``t`` and ``eps_id`` of the environments, (N,).
            explore: As for `Policy.compute_actions`, like the next.
            timestep: Steps so far.
        """
        policy, before = self.policy, self._state
        with policy.lock:
            actions, after, extras = policy.compute_actions(
                obs,
                before,
                explore=explore,
                inputs=self._inputs(known) if policy.input_columns else None,
                timestep=timestep,
            )
            version = policy.weights_seq_no
        check_extras(extras)
        if after:
            extras = dict(extras)
            for k, (part, old) in enumerate(zip(after, before, strict=True)):
                extras[f"{STATE_OUT_PREFIX}{k}"] = np.asarray(part)
                extras[f"{STATE_BEFORE_PREFIX}{k}"] = np.asarray(old)
        acted = Acted(actions, extras, version)
        if self._in_flight is not None and self._last is not None:
            acted = _kept(self._in_flight, self._last, acted)
            after = tuple(acted.extras[f"{STATE_OUT_PREFIX}{k}"] for k in range(len(after)))
        self._state, self._last = after, acted
        return acted

    def advance(self, step: VectorStep, rewards: NDArray[Any]) -> None:
        """Take note of what came of the last actions; ``rewards`` as they are learned from."""
        moved = None if step.valid is None else step.valid | step.starts
        self._in_flight = None if moved is None or moved.all() else ~moved
        if self._state and step.starts.any():
            fresh = self.policy.initial_state(self._num_envs)
            self._state = tuple(
                np.where(_per_row(step.starts, old), new, old)
                for old, new in zip(self._state, fresh, strict=True)
            )
        if self.policy.input_columns:
            assert self._last is not None
            self._remember(step, self._last.actions, rewards, moved)

    def _remember(
        self, step: VectorStep, actions: Any, rewards: NDArray[Any], moved: NDArray[np.bool_] | None
    ) -> None:
        def fresh(leaf: Any) -> Any:
            return np.where(_per_row(step.starts, leaf), 0, leaf)

        new = {
            Columns.PREV_ACTIONS: map_structure(fresh, actions),
            Columns.PREV_REWARDS: fresh(np.asarray(rewards)),
        }
        if self._in_flight is not None and moved is not None:
            old = self._before or self._nothing_before()
            new = {name: _where(moved, value, old[name]) for name, value in new.items()}
        self._before = new

    def _inputs(self, known: Mapping[str, Any]) -> SampleBatch:
        """What the policy asked for in `Policy.input_columns`."""
        found = {
            Columns.T: known[Columns.T].copy(),
            Columns.EPS_ID: known[Columns.EPS_ID].copy(),
            Columns.ENV_ID: np.arange(self._num_envs),
        }
        found |= self._before or self._nothing_before()
        return SampleBatch({name: found[name] for name in self.policy.input_columns})

    def _nothing_before(self) -> dict[str, Any]:
        specs = leaves_of(self.policy.action_space)
        zeros = [np.zeros((self._num_envs, *leaf.shape), leaf.dtype) for leaf in specs]
        actions = unflatten([leaf.path for leaf in specs], zeros)
        return {Columns.PREV_ACTIONS: actions, Columns.PREV_REWARDS: np.zeros(self._num_envs, np.float32)}


def _kept(in_flight: NDArray[np.bool_], last: Acted, new: Acted) -> Acted:
    """``new``, with what was sent before for the environments that still work on it."""
    return Acted(
        _where(in_flight, last.actions, new.actions),
        {
            name: _where(in_flight, last.extras[name], value) if name in last.extras else value
            for name, value in new.extras.items()
        },
        np.where(in_flight, last.weights_seq_no, new.weights_seq_no),
    )


def _where(mask: NDArray[np.bool_], first: Any, second: Any) -> Any:
    """The rows of ``first`` where ``mask`` says so, else those of ``second``; nested alike."""

    def choose(one: Any, other: Any) -> NDArray[Any]:
        one, other = np.asarray(one), np.asarray(other)
        chosen: NDArray[Any] = np.where(_per_row(mask, one), one, other)
        return chosen.astype(other.dtype, copy=False)

    return map_structure(choose, first, second)


def _per_row(mask: NDArray[np.bool_], like: NDArray[Any]) -> NDArray[np.bool_]:
    """``mask``, (N,), with as many axes as ``like``."""
    return mask.reshape(-1, *[1] * (like.ndim - 1))
