"""`PolicyMap`: policies by id; only the most recently used ones are in memory.

Example:
    >>> from rlio.policies.policy_spec import PolicySpec
    >>> from gymnasium.spaces import Box, Discrete
    >>> spec = PolicySpec("rlio.policies.random_policy:RandomPolicy", Box(-1.0, 1.0, (3,)), Discrete(2))
    >>> with PolicyMap({"a": spec, "b": spec, "c": spec}, capacity=2) as policies:
    ...     _ = policies["a"]
    ...     list(policies), policies.loaded
    (['a', 'b', 'c'], ('c', 'a'))
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from rlio.errors import ClosedError, OptionError, excerpt
from rlio.policies.checkpoint import read_scratch, write_scratch
from rlio.policies.policy import Policy
from rlio.policies.policy_spec import PolicySpec
from rlio.support.options import check_count

__all__ = ["PolicyMap"]


class _Stored(NamedTuple):
    """A policy that is not in memory.

    Attributes:
        spec: How to make it again; None: its state can only go into another policy, if states are swappable.
        folder: Holds its state; None: it was not bound, and has no state.
        world_size: Its `Policy.distributed_world_size`, which belongs to this run and is not in the state.
    """

    spec: PolicySpec | None
    folder: Path | None
    world_size: int


class PolicyMap(MutableMapping[str, Policy]):
    """Policies by id: the ``capacity`` most recently used in memory, the states of others in a folder.

    When a policy that is not in memory is requested, it is made again from its spec, and continues from its
    state. A policy that learns after it left memory loses what it learns: learn inside `held`.

    Iteration is over all ids, in the order of insertion. All methods are thread-safe.

    Args:
        policies: Policies, or specs that are made here.
        capacity: Maximum number of policies in memory.
        policy_states_are_swappable: All policies are alike except for their states: instead of making a
            policy again, a policy in memory gets its state. This is faster, and policies need no spec; but an
            object taken from the map may become another policy as soon as others are requested.
        folder: Local folder for states; None: a temporary folder, which `close` removes.
        seed: Seed of the policies that are made here.

    Raises:
        OptionError: ``capacity`` is below 1, or a policy cannot be made or moved out of memory.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy | PolicySpec] | None = None,
        *,
        # RLlib's default; 100 policies with small networks take some 10 MB.
        capacity: int = 100,
        policy_states_are_swappable: bool = False,
        folder: str | os.PathLike[str] | None = None,
        seed: int | None = None,
    ) -> None:
        self.capacity: int = check_count("capacity", capacity, least=1, of="policies in memory")
        self.policy_states_are_swappable = policy_states_are_swappable
        self._seed = seed
        self._lock = threading.RLock()
        #: All ids, in the order of insertion; None: the policy is in `_cache`.
        self._stored: dict[str, _Stored | None] = {}
        #: Policies in memory, least recently used first.
        self._cache: OrderedDict[str, Policy] = OrderedDict()
        self._held: Counter[str] = Counter()
        #: A policy that left memory or was removed: with swappable states, it takes the next state.
        self._spare: Policy | None = None
        self._parent = None if folder is None else Path(folder)
        self._folder: Path | None = None
        self._remove_folder: Callable[[], object] = lambda: None
        self._closed = False
        for policy_id, policy in (policies or {}).items():
            self[policy_id] = policy

    # ---- the mapping ----

    def __getitem__(self, policy_id: str) -> Policy:
        with self._lock:
            stored = self._stored[policy_id]
            if stored is not None:
                self._make_room()
                self._cache[policy_id] = self._restored(policy_id, stored)
                self._forget_state(policy_id)
            self._cache.move_to_end(policy_id)
            return self._cache[policy_id]

    def __setitem__(self, policy_id: str, policy: Policy | PolicySpec) -> None:
        if not isinstance(policy_id, str) or not policy_id:
            raise OptionError(f"{excerpt(policy_id)} is not a policy id: expected any text but ''")
        if isinstance(policy, PolicySpec):
            policy = policy.make(seed=self._seed_of(policy_id))
        if not isinstance(policy, Policy):
            raise OptionError(
                f"the policy {policy_id!r} is {excerpt(policy)}: expected a Policy or a PolicySpec"
            )
        with self._lock:
            self._check_alike(policy_id, policy)
            if policy_id not in self._cache:
                self._make_room()
            self._forget_state(policy_id)
            self._cache[policy_id] = policy
            self._cache.move_to_end(policy_id)

    def __delitem__(self, policy_id: str) -> None:
        with self._lock:
            if policy_id not in self._stored:
                raise KeyError(policy_id)
            self._forget_state(policy_id)
            del self._stored[policy_id]
            self._spare_is(self._cache.pop(policy_id, None))

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._stored))

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, policy_id: object) -> bool:
        return policy_id in self._stored

    def __repr__(self) -> str:
        return f"PolicyMap({len(self)} policies, {len(self._cache)} of {self.capacity} in memory)"

    @property
    def loaded(self) -> tuple[str, ...]:
        """Ids of the policies in memory, the most recently used last."""
        with self._lock:
            return tuple(self._cache)

    @contextmanager
    def held(self, policy_id: str) -> Iterator[Policy]:
        """Keep a policy in memory while it is used: ``with policies.held("a") as policy: ...``.

        All held policies are in memory, even if they are more than ``capacity``.

        Raises:
            KeyError: The policy does not exist.
        """
        with self._lock:
            policy = self[policy_id]
            self._held[policy_id] += 1
        try:
            yield policy
        finally:
            with self._lock:
                self._held[policy_id] -= 1
                if not self._closed:
                    self._shrink(self.capacity)

    def close(self) -> None:
        """Remove the states of the policies that are not in memory; those policies can no longer be used."""
        with self._lock:
            self._closed = True
            self._remove_folder()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- memory and folder ----

    def _seed_of(self, policy_id: str) -> int | None:
        """A seed for each id, independent of the other policies."""
        if self._seed is None:
            return None
        sequence = np.random.SeedSequence(self._seed, spawn_key=tuple(policy_id.encode()))
        return int(sequence.generate_state(1)[0])

    def _check_alike(self, policy_id: str, policy: Policy) -> None:
        if not self.policy_states_are_swappable:
            return
        for other_id, other in self._cache.items():
            if type(policy) is not type(other) or not (policy.is_bound and policy.spaces == other.spaces):
                raise OptionError(
                    f"policy_states_are_swappable=True needs policies of one class with the same spaces, "
                    f"but {other_id!r} is a {type(other).__name__} and {policy_id!r} a "
                    f"{type(policy).__name__}, or has other spaces or none yet"
                )

    def _make_room(self) -> None:
        """Move policies out of memory until there is room for one more."""
        self._shrink(self.capacity - 1)
        if len(self._cache) >= self.capacity and not any(self._held.values()):
            raise OptionError(
                f"the PolicyMap has {len(self._cache)} policies in memory and capacity={self.capacity}, and "
                "none can be moved to disk: without a PolicySpec they could not be recreated; add specs, or "
                "pass a larger capacity or policy_states_are_swappable=True"
            )

    def _shrink(self, policies: int) -> None:
        """Move the least recently used policies out of memory until ``policies`` remain, if possible."""
        for policy_id, policy in list(self._cache.items()):
            if len(self._cache) <= policies:
                return
            can_return = policy.is_bound if self.policy_states_are_swappable else policy.spec is not None
            if can_return and not self._held[policy_id]:
                self._put_away(policy_id)

    def _put_away(self, policy_id: str) -> None:
        parent, policy = self._open_folder(), self._cache[policy_id]
        spec, folder = policy.spec, None
        if policy.is_bound:  # Otherwise its spec is its complete state.
            spec = None if spec is None else spec.with_spaces(*policy.spaces)
            folder = Path(tempfile.mkdtemp(dir=parent))
            write_scratch(folder, policy.get_state())
        self._stored[policy_id] = _Stored(spec, folder, policy.distributed_world_size)
        self._spare_is(self._cache.pop(policy_id))

    def _spare_is(self, policy: Policy | None) -> None:
        if self.policy_states_are_swappable:
            self._spare = policy or self._spare

    def _restored(self, policy_id: str, stored: _Stored) -> Policy:
        """Restore a policy that left memory."""
        self._open_folder()
        policy, self._spare = self._spare, None
        if policy is None:
            if stored.spec is None:
                raise OptionError(
                    f"policy {policy_id!r} has no place in memory: all {self.capacity} others are held, and "
                    "it was made without a PolicySpec; hold fewer at a time, or pass a larger capacity"
                )
            policy = stored.spec.make(seed=self._seed_of(policy_id))
        if stored.folder is not None:
            policy.set_state(read_scratch(stored.folder))
        policy.distributed_world_size = stored.world_size
        return policy

    def _forget_state(self, policy_id: str) -> None:
        """Drop the stored state: the policy is now in memory, or removed."""
        stored = self._stored.get(policy_id)
        self._stored[policy_id] = None
        if stored is not None and stored.folder is not None:
            shutil.rmtree(stored.folder)

    def _open_folder(self) -> Path:
        if self._closed:
            raise ClosedError("the PolicyMap is closed: only the policies in memory can still be used")
        if self._folder is None:
            if self._parent is not None:
                self._parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="rlio-policies-", dir=self._parent))
            self._remove_folder = weakref.finalize(self, _remove, self._folder, os.getpid())
        return self._folder


def _remove(folder: Path, owner: int) -> None:
    # A forked child has the map too, but the states belong to its parent.
    if os.getpid() == owner and folder.exists():
        shutil.rmtree(folder)
