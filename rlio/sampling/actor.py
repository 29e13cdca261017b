"""`Actor`: a policy with its connectors and its memory of each stream.

A stream is an environment, an agent of one, or an episode of an external loop; see
`rlio.connectors.connector.Streams`.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> policy = RandomPolicy()
    >>> actor = Actor(policy, Box(-1.0, 1.0, (3,)), Discrete(2), seed=0)
    >>> streams = Streams(np.arange(4), np.ones(4, bool))
    >>> acted = actor.act(policy, np.zeros((4, 3)), streams, {}, explore=True, timestep=0)
    >>> acted.actions.shape, sorted(acted.extras)
    ((4,), ['action_logp', 'action_prob'])
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.columns import RECORDED, STATE_OUT_PREFIX, Columns
from rlio.batch.nested import map_structure, unflatten
from rlio.connectors.clip import ClipAction, UnsquashAction
from rlio.connectors.connector import ActionPipeline, ConnectorLike, ObservationPipeline, Streams
from rlio.envs.leaves import leaf_of, leaves_of
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.policies.policy import Policy, RecurrentState
from rlio.policies.random_policy import RandomPolicy
from rlio.reader import JsonState
from rlio.sampling.config import RolloutConfig
from rlio.support.states import value_in

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["STATE_BEFORE_PREFIX", "Acted", "Actor", "remembers"]

#: Columns of row stores: the recurrent state before each step.
STATE_BEFORE_PREFIX = "_state_before_"
_INPUTS = (
    Columns.PREV_ACTIONS, Columns.PREV_REWARDS, Columns.T, Columns.EPS_ID, Columns.ENV_ID,
    Columns.AGENT_INDEX,
)  # fmt: skip


class Acted(NamedTuple):
    """A policy's results for N streams.

    Attributes:
        actions: (N, ...), nested as the action space.
        extras: Further columns, (N, ...).
        weights_seq_no: Version of the weights that acted: a number, or (N,) if it differs.
        state: The recurrent state after this step.
    """

    actions: Any
    extras: dict[str, Any]
    weights_seq_no: int | NDArray[np.int64]
    state: RecurrentState

    def where(self, which: NDArray[np.bool_], other: Acted) -> Acted:
        """Take these rows where ``which``, (N,), is True, else those of ``other``."""
        return Acted(
            _where(which, self.actions, other.actions),
            {
                name: _where(which, self.extras[name], value) if name in self.extras else value
                for name, value in other.extras.items()
            },
            np.where(which, self.weights_seq_no, other.weights_seq_no),
            tuple(map(_where, [which] * len(self.state), self.state, other.state)),
        )


class Actor:
    """Calls a policy, and keeps recurrent state and the last actions and rewards by stream.

    Args:
        policy: Bound here if it is not bound yet. Not kept, because a `PolicyMap` swaps out only policies
            without other references; pass it to `act`.
        observation_space: Space of one stream's observation, as the environment defines it.
        action_space: Space of one stream's action, as the environment defines it.
        config: Defines the connectors; None: no connectors.
        seed: Seed of the policy, if it is bound here.
        random_seed: Returns the seed of random actions, called when first needed.

    Attributes:
        observations: Connectors from environments to the policy.
        actions: Connectors from the policy to environments.
        remembers_steps: Whether the policy requests columns of the previous step.

    Raises:
        OptionError: The policy cannot act in these spaces, it requests unknown ``input_columns``, or a
            connector does not fit.
    """

    def __init__(
        self,
        policy: Policy,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        config: RolloutConfig | None = None,
        seed: int | None = None,
        random_seed: Callable[[], int] | None = None,
    ) -> None:
        given = config if config is not None else RolloutConfig()
        self.observations: ObservationPipeline = ObservationPipeline(
            given.observation_connectors, observation_space, policy
        )
        connectors = [*given.action_connectors, *_bounding(given)]
        self.actions: ActionPipeline = ActionPipeline(connectors, action_space, policy)
        self._seed, self._random_seed = seed, random_seed
        self._action_leaves = leaves_of(self.actions.space)
        self._random: RandomPolicy | None = None
        #: Memory by slot.
        self._state: list[NDArray[Any]] = []
        self._prev_actions: list[NDArray[Any]] = []
        self._prev_rewards = np.zeros(0, np.float32)
        self._slots = 0
        self._free: list[int] = []
        self._meet(policy)

    def new_slot(self) -> int:
        """Reserve a slot for a new stream, until `free_slot` releases it."""
        if self._free:
            return self._free.pop()
        self._slots += 1
        return self._slots - 1

    def free_slot(self, slot: int) -> None:
        """Release the slot of an ended stream."""
        self._free.append(slot)

    def free_slots(self) -> None:
        """Release all slots."""
        self._free = list(range(self._slots))

    def _meet(self, policy: Policy) -> None:
        """Bind ``policy``, which acts for the first time or replaced another one with the same id."""
        policy.bind(self.observations.space, self.actions.space, self._seed)
        for name in policy.input_columns:
            if name not in _INPUTS:
                raise OptionError(
                    f"{type(policy).__name__}.input_columns has {excerpt(name)}: expected some of "
                    f"{', '.join(_INPUTS)}"
                )
        self._met = weakref.ref(policy)
        # Read once, not at each step, because it takes as long as a small policy's action.
        self._is_recurrent = policy.is_recurrent
        self.remembers_steps: bool = bool(policy.input_columns)

    def act(
        self,
        policy: Policy,
        obs: Any,
        streams: Streams,
        known: Mapping[str, Any],
        *,
        explore: bool,
        timestep: int,
        at_random: bool = False,
        own: Collection[str] = RECORDED,
    ) -> Acted:
        """Choose actions. Does not change the memory of the streams; see `keep`.

        Args:
            policy: The current policy.
            obs: (N, ...), nested as the space of `observations`; may be overwritten later.
            streams: Streams of the N rows. Memory is empty where an episode starts.
            known: ``t``, ``eps_id``, ``env_id`` and ``agent_index`` of the rows, (N,), if the policy requests
                them.
            explore: As in `Policy.compute_actions`.
            timestep: Environment steps so far, as in `Policy.compute_actions`.
            at_random: Whether a `RandomPolicy` acts instead.
            own: Names of columns that are recorded in any case.

        Raises:
            SchemaError: The policy returned an extra column with one of these names.
        """
        if self._met() is not policy:
            self._meet(policy)
        acting = self._at_random() if at_random else policy
        # The lock keeps the weights unchanged, so rows record the version that acted.
        with acting.lock:
            before = self._state_before(acting, streams) if self._is_recurrent and not at_random else ()
            actions, after, extras = acting.compute_actions(
                obs,
                before,
                explore=explore,
                inputs=self._inputs(acting, streams, known) if acting.input_columns else None,
                timestep=timestep,
            )
            version = acting.weights_seq_no
        for name in extras:
            if name in own:
                raise SchemaError(
                    "the policy gave an extra column with a name that runners record: use another name",
                    column=name,
                )
        if after:
            extras, after = dict(extras), tuple(map(np.asarray, after))
            for k, (new, old) in enumerate(zip(after, before, strict=True)):
                if new.shape != old.shape:
                    raise SchemaError(
                        f"the policy gave a state of shape {new.shape} for one of {old.shape}: return the "
                        "shapes of initial_state() at every step",
                        column=f"{STATE_OUT_PREFIX}{k}",
                    )
                extras |= {f"{STATE_OUT_PREFIX}{k}": new, f"{STATE_BEFORE_PREFIX}{k}": old}
        return Acted(actions, extras, version, after)

    def keep(self, slots: NDArray[np.int64], acted: Acted) -> None:
        """Store the state and the actions of ``acted`` for its streams."""
        if acted.state:
            for part, new in zip(self._state, acted.state, strict=True):
                part[slots] = new
        if self.remembers_steps and self._prev_actions:
            for leaf, buffer in zip(self._action_leaves, self._prev_actions, strict=True):
                buffer[slots] = leaf_of(acted.actions, leaf.path)

    def reward(self, slots: NDArray[np.int64] | Sequence[int], rewards: Any) -> None:
        """Store the recorded rewards of the streams' last actions."""
        if self.remembers_steps and len(self._prev_rewards):
            self._prev_rewards[slots] = rewards

    def state_dict(self) -> dict[str, JsonState]:
        """The states of its connectors, as JSON."""
        return {"observation": self.observations.state_dict(), "action": self.actions.state_dict()}

    def load_state_dict(self, state: Mapping[str, JsonState]) -> None:
        """Continue from a `state_dict` state.

        Raises:
            StateError: The state belongs to other connectors.
        """
        for pipeline, key in ((self.observations, "observation"), (self.actions, "action")):
            pipeline.load_state_dict(value_in(state, key, dict, of="the connectors' state"))

    # ---- inputs of the policy ----

    def _state_before(self, policy: Policy, streams: Streams) -> RecurrentState:
        slots, starts = streams
        like = policy.initial_state(1)
        if [part.shape[1:] for part in self._state] != [part.shape[1:] for part in like]:
            starts = np.ones(len(slots), bool)  # The new policy has another kind of state.
            self._state = [np.zeros((0, *part.shape[1:]), part.dtype) for part in like]
        self._state = [_at_least(part, slots) for part in self._state]
        before = tuple(part[slots] for part in self._state)
        if starts.any():
            fresh = policy.initial_state(int(np.count_nonzero(starts)))
            for part, new in zip(before, fresh, strict=True):
                part[starts] = new
        return before

    def _inputs(self, policy: Policy, streams: Streams, known: Mapping[str, Any]) -> SampleBatch:
        """The columns that the policy requests in `Policy.input_columns`."""
        slots, starts = streams
        if not self._prev_actions:
            self._prev_actions = [np.zeros((0, *leaf.shape), leaf.dtype) for leaf in self._action_leaves]
        self._prev_actions = [_at_least(buffer, slots) for buffer in self._prev_actions]
        self._prev_rewards = _at_least(self._prev_rewards, slots)
        before = [buffer[slots] for buffer in (*self._prev_actions, self._prev_rewards)]
        for part in before:
            part[starts] = 0
        *actions, rewards = before
        found = {name: np.array(values) for name, values in known.items()}
        found[Columns.PREV_ACTIONS] = unflatten([leaf.path for leaf in self._action_leaves], actions)
        found[Columns.PREV_REWARDS] = rewards
        return SampleBatch({name: found[name] for name in policy.input_columns})

    def _at_random(self) -> RandomPolicy:
        if self._random is None:
            self._random = RandomPolicy()
            seed = None if self._random_seed is None else self._random_seed()
            self._random.bind(self.observations.space, self.actions.space, seed)
        return self._random


def remembers(policy: Policy) -> bool:
    """Whether the actions of ``policy`` depend on earlier steps other than through observations."""
    return policy.is_recurrent or bool(policy.input_columns)


def _bounding(config: RolloutConfig) -> list[ConnectorLike]:
    """The action connectors of the config's flags, applied last."""
    scales: list[ConnectorLike] = [UnsquashAction()] if config.normalize_actions else []
    return [*scales, ClipAction()] if config.clip_actions else scales


def _at_least(buffer: NDArray[Any], slots: NDArray[np.int64]) -> NDArray[Any]:
    """``buffer`` with room for ``slots``."""
    size = int(slots.max(initial=-1)) + 1
    if len(buffer) >= size:
        return buffer
    made = np.zeros((2 * size, *buffer.shape[1:]), buffer.dtype)
    made[: len(buffer)] = buffer
    return made


def _where(mask: NDArray[np.bool_], first: Any, second: Any) -> Any:
    """Take rows of ``first`` where ``mask`` is True, else of ``second``, which has the same nesting."""

    def choose(one: Any, other: Any) -> NDArray[Any]:
        one, other = np.asarray(one), np.asarray(other)
        chosen: NDArray[Any] = np.where(mask.reshape(-1, *[1] * (one.ndim - 1)), one, other)
        return chosen.astype(other.dtype, copy=False)

    return map_structure(choose, first, second)
