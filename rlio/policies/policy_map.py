"""`PolicyMap`: policies by id, of which only those used last are in memory.

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

__all__ = ["PolicyMap"]


class _Stored(NamedTuple):
    """A policy that is not in memory.

    Attributes:
        spec: How to make it again; None: only from another one, if states are swappable.
        folder: Holds its state; None: it was not bound, and has none.
        world_size: Its `Policy.distributed_world_size`, which is of this run and in no state.
    """

    spec: PolicySpec | None
    folder: Path | None
    world_size: int


class PolicyMap(MutableMapping[str, Policy]):
    """Policies by id. The ``capacity`` ones used last are in memory, the states of the others in a folder.

    A policy is made from its spec again when it is next asked for, and goes on from its state. What a policy
    learns after it was put away is lost: learn inside `held`.

    Iteration is over all ids, in the order in which they came. Every method may be called from any thread.

    Args:
        policies: Policies, or specs that are made here.
        capacity: Policies in memory.
        policy_states_are_swappable: Policies are alike but for their states: instead of making a policy
            again, one that is in memory is given its state. Faster, and policies need no spec; but an object
            that was got from the map may become another policy as soon as others are asked for.
        folder: Where states are put, a local path; None: a temporary folder, which `close` removes.
        seed: Of the policies that are made here.

    Raises:
        OptionError: ``capacity`` is below 1, or a policy cannot be made or put away.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy | PolicySpec] | None = None,
        *,
        # RLlib's default; of policies with small networks, these are some 10 MB.
        capacity: int = 100,
        policy_states_are_swappable: bool = False,
        folder: str | os.PathLike[str] | None = None,
        seed: int | None = None,
    ) -> None:
        if capacity < 1:
            raise OptionError(f"capacity={capacity}: at least one policy is in memory")
        self.capacity = capacity
        self.policy_states_are_swappable = policy_states_are_swappable
        self._seed = seed
        self._lock = threading.RLock()
        #: All ids, in the order in which they came; None: in `_cache`.
        self._stored: dict[str, _Stored | None] = {}
        #: In memory, least recently used first.
        self._cache: OrderedDict[str, Policy] = OrderedDict()
        self._held: Counter[str] = Counter()
        #: A policy that was put away or removed: another's state goes into it, where states are swappable.
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
            raise OptionError(f"{excerpt(policy_id)} is no policy id: any text but ''")
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
        """Ids of the policies in memory, those used last at the end."""
        with self._lock:
            return tuple(self._cache)

    @contextmanager
    def held(self, policy_id: str) -> Iterator[Policy]:
        """Keep a policy in memory while it is used: ``with policies.held("a") as policy: ...``.

        More than ``capacity`` held ones are all in memory.

        Raises:
            KeyError: There is no such policy.
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
        """Remove the states of the policies that are not in memory: these cannot be used any more."""
        with self._lock:
            self._closed = True
            self._remove_folder()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- memory and folder ----

    def _seed_of(self, policy_id: str) -> int | None:
        """A seed for each id, the same whatever other policies there are."""
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
                    f"policy_states_are_swappable=True asks for policies of one class with the same spaces, "
                    f"but {other_id!r} is a {type(other).__name__} and {policy_id!r} a "
                    f"{type(policy).__name__}, or in other spaces or none yet"
                )

    def _make_room(self) -> None:
        """Put policies away until there is room for one more."""
        self._shrink(self.capacity - 1)
        if len(self._cache) >= self.capacity and not any(self._held.values()):
            raise OptionError(
                f"the PolicyMap has {len(self._cache)} policies in memory and capacity={self.capacity}, and "
                "none can be put away: they were made without a PolicySpec, by which they could be made "
                "again; add specs, or give a larger capacity or policy_states_are_swappable=True"
            )

    def _shrink(self, policies: int) -> None:
        """Put away those not used for longest until so many are left, or none that can be."""
        for policy_id, policy in list(self._cache.items()):
            if len(self._cache) <= policies:
                return
            can_return = policy.is_bound if self.policy_states_are_swappable else policy.spec is not None
            if can_return and not self._held[policy_id]:
                self._put_away(policy_id)

    def _put_away(self, policy_id: str) -> None:
        parent, policy = self._open_folder(), self._cache[policy_id]
        spec, folder = policy.spec, None
        if policy.is_bound:  # Else there is nothing that its spec does not say.
            spec = None if spec is None else spec.with_spaces(*policy.spaces)
            folder = Path(tempfile.mkdtemp(dir=parent))
            write_scratch(folder, policy.get_state())
        self._stored[policy_id] = _Stored(spec, folder, policy.distributed_world_size)
        self._spare_is(self._cache.pop(policy_id))

    def _spare_is(self, policy: Policy | None) -> None:
        if self.policy_states_are_swappable:
            self._spare = policy or self._spare

    def _restored(self, policy_id: str, stored: _Stored) -> Policy:
        """The policy as it was put away."""
        self._open_folder()
        policy, self._spare = self._spare, None
        if policy is None:
            if stored.spec is None:
                raise OptionError(
                    f"policy {policy_id!r} has no place in memory: all {self.capacity} others are held, and "
                    "it was made without a PolicySpec; hold fewer at a time, or give a larger capacity"
                )
            policy = stored.spec.make(seed=self._seed_of(policy_id))
        if stored.folder is not None:
            policy.set_state(read_scratch(stored.folder))
        policy.distributed_world_size = stored.world_size
        return policy

    def _forget_state(self, policy_id: str) -> None:
        """The policy is in memory from now on, or removed."""
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
    # A forked child has the map too, and its states are its parent's.
    if os.getpid() == owner and folder.exists():
        shutil.rmtree(folder)
