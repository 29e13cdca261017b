"""`Actor`: a policy between its connectors, with what it remembers of each stream.

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

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["STATE_BEFORE_PREFIX", "Acted", "Actor", "remembers"]

#: Columns of stores: the recurrent state before each step.
STATE_BEFORE_PREFIX = "_state_before_"
_INPUTS = (
    Columns.PREV_ACTIONS, Columns.PREV_REWARDS, Columns.T, Columns.EPS_ID, Columns.ENV_ID,
    Columns.AGENT_INDEX,
)  # fmt: skip


class Acted(NamedTuple):
    """What a policy gave for N streams.

    Attributes:
        actions: (N, ...), nested as the action space.
        extras: Further columns, (N, ...).
        weights_seq_no: Version of the weights that acted: a number, or (N,) where it differs.
        state: The recurrent state after this step.
    """

    actions: Any
    extras: dict[str, Any]
    weights_seq_no: int | NDArray[np.int64]
    state: RecurrentState

    def where(self, which: NDArray[np.bool_], other: Acted) -> Acted:
        """These rows where ``which``, (N,), says so, else those of ``other``."""
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
    """Calls a policy, and keeps recurrent state, the last actions and rewards by stream.

    Args:
        policy: Bound here, if it was not before. It is not held, since a `PolicyMap` puts away only
            policies without other references: `act` is given it.
        observation_space: Of one stream, as the environment has it.
        action_space: The same of actions.
        config: Which connectors there are; None: none.
        seed: Of the policy, if it is bound here.
        random_seed: Gives the seed of random actions when they are first asked for.

    Attributes:
        observations: Connectors between environments and the policy.
        actions: Connectors between the policy and environments.
        remembers_steps: Whether the policy asks for columns of the step before.

    Raises:
        OptionError: The policy cannot act in these spaces, it asks for unknown ``input_columns``, or a
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
        self.observations = ObservationPipeline(given.observation_connectors, observation_space, policy)
        connectors = [*given.action_connectors, *_bounding(given)]
        self.actions = ActionPipeline(connectors, action_space, policy)
        self._seed, self._random_seed = seed, random_seed
        self._action_leaves = leaves_of(self.actions.space)
        self._random: RandomPolicy | None = None
        #: By slot.
        self._state: list[NDArray[Any]] = []
        self._prev_actions: list[NDArray[Any]] = []
        self._prev_rewards = np.zeros(0, np.float32)
        self._slots = 0
        self._free: list[int] = []
        self._meet(policy)

    def new_slot(self) -> int:
        """A number for a stream that begins; of no other until it is given to `free_slot`."""
        if self._free:
            return self._free.pop()
        self._slots += 1
        return self._slots - 1

    def free_slot(self, slot: int) -> None:
        """The stream is over: another may have its number."""
        self._free.append(slot)

    def free_slots(self) -> None:
        """All streams are over."""
        self._free = list(range(self._slots))

    def _meet(self, policy: Policy) -> None:
        """``policy`` acts from now on: the first time, or in place of another of the same id."""
        policy.bind(self.observations.space, self.actions.space, self._seed)
        for name in policy.input_columns:
            if name not in _INPUTS:
                raise OptionError(
                    f"{type(policy).__name__}.input_columns has {excerpt(name)}: known are "
                    f"{', '.join(_INPUTS)}"
                )
        self._met = weakref.ref(policy)
        # Asked here and not at each step: it takes as long as acting does for small policies.
        self._is_recurrent, self.remembers_steps = policy.is_recurrent, bool(policy.input_columns)

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
        """Choose actions. What is remembered of the streams stays as it is: see `keep`.

        Args:
            policy: The policy, as it is now.
            obs: (N, ...), nested as the space of `observations`; may be overwritten later.
            streams: Of the N rows. Where an episode starts nothing is remembered.
            known: ``t``, ``eps_id``, ``env_id`` and ``agent_index`` of the rows, (N,), if the policy asks for
                them.
            explore: As for `Policy.compute_actions`, like the next.
            timestep: Steps so far.
            at_random: Whether a `RandomPolicy` acts in its place.
            own: Names of columns that are recorded anyway.

        Raises:
            SchemaError: The policy gave an extra column with one of these names.
        """
        if self._met() is not policy:
            self._meet(policy)
        acting = self._at_random() if at_random else policy
        # Rows have the version of the weights that acted: nothing changes them in between.
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
                    "the policy gave an extra column of this name, which runners record: give it another "
                    "name",
                    column=name,
                )
        if after:
            extras, after = dict(extras), tuple(map(np.asarray, after))
            for k, (new, old) in enumerate(zip(after, before, strict=True)):
                if new.shape != old.shape:
                    raise SchemaError(
                        f"the policy gave the state {new.shape}, and got {old.shape}: "
                        "it has the shapes of initial_state() at every step",
                        column=f"{STATE_OUT_PREFIX}{k}",
                    )
                extras |= {f"{STATE_OUT_PREFIX}{k}": new, f"{STATE_BEFORE_PREFIX}{k}": old}
        return Acted(actions, extras, version, after)

    def keep(self, slots: NDArray[np.int64], acted: Acted) -> None:
        """Remember the state and the actions of ``acted`` for its streams."""
        if acted.state:
            for part, new in zip(self._state, acted.state, strict=True):
                part[slots] = new
        if self.remembers_steps and self._prev_actions:
            for leaf, buffer in zip(self._action_leaves, self._prev_actions, strict=True):
                buffer[slots] = leaf_of(acted.actions, leaf.path)

    def reward(self, slots: NDArray[np.int64] | Sequence[int], rewards: Any) -> None:
        """Remember what the last actions of streams got, as it is recorded."""
        if self.remembers_steps and len(self._prev_rewards):
            self._prev_rewards[slots] = rewards

    def state_dict(self) -> dict[str, JsonState]:
        """What its connectors keep, as JSON."""
        return {"observation": self.observations.state_dict(), "action": self.actions.state_dict()}

    def load_state_dict(self, state: Mapping[str, JsonState]) -> None:
        """Continue from a state of `state_dict`.

        Raises:
            StateError: It is of other connectors.
        """
        self.observations.load_state_dict(state["observation"])
        self.actions.load_state_dict(state["action"])

    # ---- what the policy gets ----

    def _state_before(self, policy: Policy, streams: Streams) -> RecurrentState:
        slots, starts = streams
        like = policy.initial_state(1)
        if [part.shape[1:] for part in self._state] != [part.shape[1:] for part in like]:
            starts = np.ones(len(slots), bool)  # A policy that remembers other things than the one before.
            self._state = [np.zeros((0, *part.shape[1:]), part.dtype) for part in like]
        self._state = [_at_least(part, slots) for part in self._state]
        before = tuple(part[slots] for part in self._state)
        if starts.any():
            fresh = policy.initial_state(int(np.count_nonzero(starts)))
            for part, new in zip(before, fresh, strict=True):
                part[starts] = new
        return before

    def _inputs(self, policy: Policy, streams: Streams, known: Mapping[str, Any]) -> SampleBatch:
        """What the policy asks for in `Policy.input_columns`."""
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
    """Whether what ``policy`` does depends on the steps before, other than by observations."""
    return policy.is_recurrent or bool(policy.input_columns)


def _bounding(config: RolloutConfig) -> list[ConnectorLike]:
    """What the config's flags do to actions, last of all."""
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
    """The rows of ``first`` where ``mask`` says so, else those of ``second``; nested alike."""

    def choose(one: Any, other: Any) -> NDArray[Any]:
        one, other = np.asarray(one), np.asarray(other)
        chosen: NDArray[Any] = np.where(mask.reshape(-1, *[1] * (one.ndim - 1)), one, other)
        return chosen.astype(other.dtype, copy=False)

    return map_structure(choose, first, second)
