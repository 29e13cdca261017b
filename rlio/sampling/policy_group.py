"""`PolicyGroup`: a worker's policies, which agent each of them acts for, and which of them learn.

Example:
    >>> from gymnasium.spaces import Box, Discrete
    >>> from rlio.policies.policy_map import PolicyMap
    >>> from rlio.policies.policy_spec import PolicySpec
    >>> spec = PolicySpec("rlio.policies.random_policy:RandomPolicy", Box(-1.0, 1.0, (3,)), Discrete(2))
    >>> group = PolicyGroup(PolicyMap({"main": spec, "frozen": spec}), policies_to_train=["main"])
    >>> group.get_policies_to_train()
    {'main'}
    >>> _ = group.remove("frozen")
    >>> list(group.policies)
    ['main']
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, SampleBatch
from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.errors import OptionError, RlioError, StateError, excerpt
from rlio.policies.policy import Policy, PolicyState
from rlio.policies.policy_map import PolicyMap
from rlio.policies.policy_spec import PolicySpec, Spaces, callable_name, load_callable
from rlio.policies.sgd import do_minibatch_sgd
from rlio.policies.weights import GlobalVars, update_weights
from rlio.sampling.callbacks import Callbacks, overridden

__all__ = ["MappingFn", "PoliciesToTrain", "PolicyGroup"]

logger = logging.getLogger("rlio")

T = TypeVar("T")
# Any: what was measured is a policy's own; states are nested dicts; agents' ids are the environments'.

#: Agent id and episode -> policy id. It takes further keywords if it says so by ``**kwargs``.
MappingFn: TypeAlias = Callable[..., str]
#: Ids of policies, or a function of policy id and batch (None where there is none yet); None: all of them.
PoliciesToTrain: TypeAlias = Collection[str] | Callable[[str, Batch | None], bool] | None

#: In states: there is no function. Names of functions have a colon.
_DEFAULT = "default"
_UPDATES = "num_grad_updates_lifetime"


class PolicyGroup:
    """Policies by id, who they act for, and what is done to all of them.

    Results are by policy id, except where ``default_policy`` is the only one: then they are that policy's
    own, as batches of it are plain ones.

    Args:
        policies: The policies.
        policy_mapping_fn: Agent id and episode -> policy id; None: the runner's default. It is kept here and
            followed by runners.
        policies_to_train: Those that learn; None: all.
        callbacks: ``on_create_policy`` and ``on_learn_on_batch`` are called here.

    Attributes:
        policies: The policies.
        policy_mapping_fn: As given, or set since.
        num_grad_updates: How often each policy has learned.
        count_steps: Gives the environment steps that the worker has sampled itself.

    Raises:
        OptionError: ``policies_to_train`` names an unknown policy, or something is no function.
    """

    def __init__(
        self,
        policies: PolicyMap,
        *,
        policy_mapping_fn: MappingFn | None = None,
        policies_to_train: PoliciesToTrain = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.policies = policies
        self.policy_mapping_fn: MappingFn | None = None
        self.num_grad_updates: Counter[str] = Counter()
        self.count_steps: Callable[[], int] = lambda: 0
        #: What others said: the steps of all workers.
        self._timestep = 0
        self._callbacks = callbacks if callbacks is not None else Callbacks()
        self._hooks = overridden(self._callbacks)
        self._to_train: frozenset[str] | Callable[[str, Batch | None], bool] | None = None
        self.set_policies_to_train(policies_to_train)
        self.set_policy_mapping_fn(policy_mapping_fn)

    # ---- who is there ----

    @property
    def is_single(self) -> bool:
        """Whether ``default_policy`` is the only one."""
        return len(self.policies) == 1 and DEFAULT_POLICY_ID in self.policies

    def get(self, policy_id: str = DEFAULT_POLICY_ID) -> Policy:
        """The policy ``policy_id``.

        Raises:
            OptionError: There is none.
        """
        self._check_known([policy_id])
        return self.policies[policy_id]

    def announce(self, policy_ids: Iterable[str] | None = None) -> None:
        """Call ``on_create_policy`` for policies that have their spaces now; None: for all."""
        if "on_create_policy" in self._hooks:
            for policy_id in list(self.policies) if policy_ids is None else policy_ids:
                self._callbacks.on_create_policy(policy_id=policy_id, policy=self.policies[policy_id])

    def add(
        self,
        policy_id: str,
        policy: Policy | PolicySpec,
        *,
        spaces: Spaces | None = None,
        state: PolicyState | None = None,
    ) -> Policy:
        """Add a policy, and return it.

        Args:
            policy_id: A new id.
            policy: The policy, or how to make it.
            spaces: For a spec, or a policy, that has none.
            state: As `Policy.get_state` gave it.

        Raises:
            OptionError: There is such a policy already, it cannot be made, or has no spaces.
            StateError: ``state`` does not fit.
        """
        if policy_id in self.policies:
            raise OptionError(f"there is a policy {policy_id!r} already: remove it first, or take another id")
        given = policy
        if isinstance(given, PolicySpec) and spaces is not None:
            given = given.with_spaces(*spaces)
        self.policies[policy_id] = given
        try:
            added = self.policies[policy_id]
            if not added.is_bound and spaces is not None:
                added.bind(*spaces)
            if not added.is_bound:
                raise OptionError(
                    f"the policy {policy_id!r} has no spaces, and none are known here: give a PolicySpec "
                    "with observation_space and action_space"
                )
            if state is not None:
                added.set_state(state)
        except BaseException:
            del self.policies[policy_id]
            raise
        self.announce([policy_id])
        return added

    def remove(self, policy_id: str) -> Policy:
        """Remove a policy, and return it; nothing here knows the id any longer.

        Raises:
            OptionError: There is none, or it is the last one.
        """
        policy = self.get(policy_id)
        if len(self.policies) == 1:
            raise OptionError(f"{policy_id!r} is the last policy: add another one first")
        del self.policies[policy_id]
        del self.num_grad_updates[policy_id]
        if isinstance(self._to_train, frozenset):
            self._to_train -= {policy_id}
        return policy

    def _check_known(self, policy_ids: Iterable[str]) -> None:
        for policy_id in policy_ids:
            if policy_id not in self.policies:
                raise OptionError(
                    f"there is no policy {excerpt(policy_id)}: known are {excerpt(list(self.policies))}"
                )

    # ---- who acts, who learns ----

    def set_policy_mapping_fn(self, policy_mapping_fn: MappingFn | None) -> None:
        """Give agents other policies, in episodes that begin from now on.

        Raises:
            OptionError: It is no function.
        """
        if policy_mapping_fn is not None and not callable(policy_mapping_fn):
            raise OptionError(
                f"policy_mapping_fn={excerpt(policy_mapping_fn)}: a function of agent id and episode"
            )
        self.policy_mapping_fn = policy_mapping_fn

    def set_policies_to_train(self, policies_to_train: PoliciesToTrain) -> None:
        """Say which policies learn; None: all.

        Raises:
            OptionError: A policy is unknown, or it is neither ids nor a function.
        """
        if policies_to_train is None or callable(policies_to_train):
            self._to_train = policies_to_train
            return
        if isinstance(policies_to_train, (str, bytes)) or not isinstance(policies_to_train, Iterable):
            raise OptionError(
                f"policies_to_train={excerpt(policies_to_train)}: a list of policy ids, or a function of "
                "policy id and batch"
            )
        chosen = frozenset(policies_to_train)
        self._check_known(chosen)
        self._to_train = chosen

    def is_policy_to_train(self, policy_id: str, batch: Batch | None = None) -> bool:
        """Whether the policy learns, from ``batch`` in particular."""
        if policy_id not in self.policies:
            return False
        if callable(self._to_train):
            return bool(self._to_train(policy_id, batch))
        return self._to_train is None or policy_id in self._to_train

    def get_policies_to_train(self, batch: Batch | None = None) -> set[str]:
        """Ids of the policies that learn, from ``batch`` in particular."""
        return {policy_id for policy_id in self.policies if self.is_policy_to_train(policy_id, batch)}

    # ---- each ----

    def for_policy(self, func: Callable[..., T], policy_id: str = DEFAULT_POLICY_ID, **kwargs: Any) -> T:
        """``func(policy, **kwargs)``, with that policy in memory and under its lock meanwhile.

        Raises:
            OptionError: There is no such policy.
        """
        with self._held(policy_id) as policy:
            return func(policy, **kwargs)

    def foreach_policy(self, func: Callable[..., T], **kwargs: Any) -> list[T]:
        """``func(policy, policy_id, **kwargs)`` for each policy, and what that gave."""
        return self._foreach(list(self.policies), func, **kwargs)

    def foreach_policy_to_train(self, func: Callable[..., T], **kwargs: Any) -> list[T]:
        """The same for each policy that learns."""
        chosen = self.get_policies_to_train()
        return self._foreach([each for each in self.policies if each in chosen], func, **kwargs)

    def _foreach(self, policy_ids: list[str], func: Callable[..., T], **kwargs: Any) -> list[T]:
        results = []
        for policy_id in policy_ids:
            with self._held(policy_id) as policy:
                results.append(func(policy, policy_id, **kwargs))
        return results

    @contextmanager
    def _held(self, policy_id: str) -> Iterator[Policy]:
        """The policy, in memory and not acting in another thread meanwhile."""
        self._check_known([policy_id])
        with self.policies.held(policy_id) as policy, policy.lock:
            yield policy

    # ---- learning ----

    def learn_on_batch(self, batch: Batch) -> dict[str, Any]:
        """Let each policy that is to be trained learn on its rows.

        Returns:
            What was measured, with ``num_grad_updates_lifetime``; {} for who does not learn, or has no rows.

        Raises:
            OptionError: The batch has rows of an unknown policy, or of one that cannot learn.
        """
        return self._own({name: self._learn(name, rows) for name, rows in self.trained_rows(batch)})

    def _own(self, by_policy: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Results by policy id, or those of the only policy."""
        return by_policy.get(DEFAULT_POLICY_ID, {}) if self.is_single else by_policy

    def do_minibatch_sgd(
        self, batch: Batch, *, seed: int | np.random.Generator | None = None, **options: Any
    ) -> dict[str, Any]:
        """Let each policy that is to be trained learn on its rows several times, in shuffled parts.

        Args:
            batch: As for `learn_on_batch`.
            seed: Of the orders; None draws one from the OS.
            options: Of `rlio.policies.sgd.do_minibatch_sgd`: ``num_sgd_iter``, ``sgd_minibatch_size`` and
                ``standardize_fields``.

        Returns:
            As `learn_on_batch`, averaged over the parts.

        Raises:
            OptionError: As `learn_on_batch`, or a number is out of range.
            MissingColumn: A field to be standardised is absent.
        """
        rng = np.random.default_rng(seed)
        learned = self.trained_rows(batch)
        return self._own({name: self._sgd(name, rows, rng, options) for name, rows in learned})

    def _sgd(
        self, policy_id: str, rows: SampleBatch, rng: np.random.Generator, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        stats = do_minibatch_sgd(lambda part: self._learn(policy_id, part), rows, seed=rng, **options)
        # A count has no mean.
        return stats | {_UPDATES: self.num_grad_updates[policy_id]}

    def trained_rows(self, batch: Batch) -> list[tuple[str, SampleBatch]]:
        """The policies that learn from ``batch``, each with its rows; those without rows are left out.

        Raises:
            OptionError: There are rows of an unknown policy.
        """
        parts = batch.policies()
        self._check_known(parts)
        return [
            (policy_id, rows)
            for policy_id, rows in parts.items()
            if rows.count and self.is_policy_to_train(policy_id, batch)
        ]

    def _learn(self, policy_id: str, rows: SampleBatch) -> dict[str, Any]:
        result: dict[str, Any] = {}
        with self._held(policy_id) as policy:
            if "on_learn_on_batch" in self._hooks:
                self._callbacks.on_learn_on_batch(policy=policy, train_batch=rows, result=result)
            if policy.global_vars.timestep < self.timestep:
                policy.on_global_var_update(self.get_global_vars())
            stats = policy.learn_on_batch(rows)
        self.num_grad_updates[policy_id] += 1
        return {**stats, **result, _UPDATES: self.num_grad_updates[policy_id]}

    def compute_gradients(self, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
        """Gradients and what was measured, with ``batch_count``, of policies that learn; nothing is changed.

        Raises:
            OptionError: As `learn_on_batch`.
        """
        found = {policy_id: self._gradients(policy_id, rows) for policy_id, rows in self.trained_rows(batch)}
        return (
            self._own({policy_id: gradients for policy_id, (gradients, _) in found.items()}),
            self._own({policy_id: stats for policy_id, (_, stats) in found.items()}),
        )

    def _gradients(self, policy_id: str, rows: SampleBatch) -> tuple[dict[str, Any], dict[str, Any]]:
        with self._held(policy_id) as policy:
            gradients, stats = policy.compute_gradients(rows)
        return gradients, {**stats, "batch_count": rows.count}

    def apply_gradients(self, gradients: Mapping[str, Any]) -> None:
        """Improve by what `compute_gradients` gave, here or elsewhere; only policies that learn do.

        Raises:
            OptionError: They are of an unknown policy.
            StateError: Names or shapes differ.
        """
        for policy_id, own in self._by_policy(gradients).items():
            with self._held(policy_id) as policy:
                if own and self.is_policy_to_train(policy_id):
                    policy.apply_gradients(own)
                    self.num_grad_updates[policy_id] += 1

    # ---- weights ----

    def get_weights(
        self, policies: Collection[str] | None = None, *, inference_only: bool = False
    ) -> dict[str, Any]:
        """Copies of the weights: policy id -> name -> array; name -> array of ``default_policy`` alone.

        Args:
            policies: Of which; None: of those that learn.
            inference_only: As in `Policy.get_weights`.

        Raises:
            OptionError: A policy is unknown.
        """
        chosen = self.get_policies_to_train() if policies is None else set(policies)
        self._check_known(chosen)
        ordered = [policy_id for policy_id in self.policies if policy_id in chosen]
        weights = self._foreach(ordered, lambda policy, _: policy.get_weights(inference_only=inference_only))
        return self._own(dict(zip(ordered, weights, strict=True)))

    def set_weights(self, weights: Mapping[str, Any], weights_seq_no: int | None = None) -> bool:
        """Give policies other weights, those that they have, or newer ones, excepted.

        Args:
            weights: As `get_weights` gave them; an empty mapping, as of policies that do not learn, changes
                no weights.
            weights_seq_no: Their version; 0 or None sets them in any case. See `update_weights`.

        Returns:
            Whether any policy has taken them.

        Raises:
            OptionError: A policy is unknown.
            StateError: Names or shapes differ.
        """
        parts = self._by_policy(weights)
        self._check_known(parts)
        taken = []
        for policy_id, own in parts.items():
            with self._held(policy_id) as policy:
                if own or not policy.get_weights():
                    taken.append(update_weights(policy, own, weights_seq_no))
        return any(taken)

    def _by_policy(self, values: Mapping[str, Any]) -> dict[str, Mapping[str, NDArray[Any]]]:
        """Arrays by policy id and name: those of the only policy are by name alone."""
        if all(isinstance(value, Mapping) for value in values.values()) and (values or not self.is_single):
            return dict(values)
        return {DEFAULT_POLICY_ID: values}

    @property
    def timestep(self) -> int:
        """Environment steps that all workers have sampled, as far as it is known here."""
        return max(self._timestep, self.count_steps())

    def get_global_vars(self) -> GlobalVars:
        """What all workers share, as known here."""
        return GlobalVars(self.timestep, {each: self.num_grad_updates[each] for each in self.policies})

    def set_global_vars(self, global_vars: GlobalVars, policy_ids: Collection[str] | None = None) -> None:
        """Take over what all workers share, and tell the policies; None: all of them.

        Raises:
            OptionError: A policy is unknown, or ``global_vars`` is something else, such as a dict.
        """
        if not isinstance(global_vars, GlobalVars):
            raise OptionError(
                f"global_vars is {excerpt(global_vars)}: expected what get_global_vars() gave, a GlobalVars"
            )
        chosen = list(self.policies) if policy_ids is None else list(policy_ids)
        self._check_known(chosen)
        self._timestep = global_vars.timestep
        for policy_id, updates in global_vars.num_grad_updates_per_policy.items():
            if policy_id in self.policies:
                self.num_grad_updates[policy_id] = updates
        self._foreach(chosen, lambda policy, _: policy.on_global_var_update(global_vars))

    # ---- state ----

    def get_state(self, *, trainable_only: bool = False) -> dict[str, Any]:
        """What `set_state` needs: arrays and what JSON takes, by components.

        Functions and specs travel by name. What has no name it could be imported by is left out, with a
        warning: whoever loads the state has to have the same.

        Args:
            trainable_only: Leave out the policies that do not learn.
        """
        chosen = self.get_policies_to_train() if trainable_only else set(self.policies)
        ordered = [policy_id for policy_id in self.policies if policy_id in chosen]
        states = self._foreach(ordered, _policy_state)
        to_train = self._to_train
        return {
            "policies": dict(zip(ordered, states, strict=True)),
            "policy_mapping_fn": _described(self.policy_mapping_fn, "policy_mapping_fn"),
            "policies_to_train": sorted(to_train)
            if isinstance(to_train, frozenset)
            else _described(to_train, "policies_to_train"),
            "global_vars": self.get_global_vars().to_json(),
        }

    def set_state(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Continue from a state of `get_state`, or from some of its components.

        Policies that are not here are made, if the state says how. Names are imported: load states only from
        where you would run code from.

        Returns:
            What takes all of it back.

        Raises:
            StateError: It does not fit, or a policy is missing and cannot be made; all is as it was.
            OptionError: A name cannot be imported; likewise.
        """
        with ExitStack() as undo:
            self._set_state(state, undo)
            return undo.pop_all().close

    def _set_state(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        for policy_id, described in _mapping(state, "policies").items():
            self._set_policy(policy_id, described, undo)
        mapping = state.get("policy_mapping_fn")
        if mapping is not None:
            undo.callback(self.set_policy_mapping_fn, self.policy_mapping_fn)
            self.set_policy_mapping_fn(None if mapping == _DEFAULT else load_callable(mapping))
        to_train = state.get("policies_to_train")
        undo.callback(self.set_policies_to_train, self._to_train)
        if isinstance(to_train, str):
            self.set_policies_to_train(None if to_train == _DEFAULT else load_callable(to_train))
        elif to_train is not None:
            self.set_policies_to_train([policy_id for policy_id in to_train if policy_id in self.policies])
        if "global_vars" in state:
            undo.callback(self.set_global_vars, self.get_global_vars())
            self.set_global_vars(GlobalVars.from_json(_mapping(state, "global_vars")))

    def _set_policy(self, policy_id: str, described: Any, undo: ExitStack) -> None:
        if not isinstance(described, Mapping) or not isinstance(described.get("state"), Mapping):
            raise StateError(
                f"the state of the policy {policy_id!r} is {excerpt(described)}: expected spec and state"
            )
        if policy_id in self.policies:
            with self._held(policy_id) as policy:
                undo.callback(self._restore, policy_id, policy.get_state())
                policy.set_state(dict(described["state"]))
        elif described.get("spec") is None:
            raise StateError(
                f"the state has the policy {policy_id!r}, which is not here, and does not say how to make "
                "it: add it before, or make policies by a PolicySpec with an importable policy_class"
            )
        else:
            spec = PolicySpec.from_state(described["spec"])
            self.add(policy_id, spec, state=dict(described["state"]))
            undo.callback(self.remove, policy_id)

    def _restore(self, policy_id: str, state: PolicyState) -> None:
        with self._held(policy_id) as policy:
            policy.set_state(state)


def _policy_state(policy: Policy, policy_id: str) -> dict[str, Any]:
    spec = None
    if policy.spec is not None:
        given = policy.spec
        if policy.is_bound:
            given = given.with_spaces(policy.observation_space, policy.action_space)
        try:
            spec = given.to_state()
        except RlioError as error:
            logger.warning("how to make the policy %r is not in the state: %s", policy_id, error)
    return {"spec": spec, "state": policy.get_state()}


def _described(function: Callable[..., Any] | None, what: str) -> str | None:
    """The name of ``function``; None where it has none."""
    if function is None:
        return _DEFAULT
    try:
        return callable_name(function)
    except OptionError as error:
        logger.warning("%s is not in the state: %s", what, error)
        return None


def _mapping(state: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = state.get(key, {})
    if not isinstance(value, Mapping):
        raise StateError(f"state[{key!r}] is {excerpt(value)}: expected a dict")
    return value
