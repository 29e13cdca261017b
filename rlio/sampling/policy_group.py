"""`PolicyGroup`: a worker's policies, the agents they act for, and which of them learn.

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
from functools import partial
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
from rlio.support.options import checked_keywords
from rlio.support.states import fitting, value_in
from rlio.support.turns import Turns

__all__ = ["MappingFn", "PoliciesToTrain", "PolicyGroup", "check_mapping"]

logger: logging.Logger = logging.getLogger("rlio")

T = TypeVar("T")
# Any: learning results are up to the policy; states are nested dicts; agent ids are the environments'.

#: Agent id and episode -> policy id; may also take ``worker=``.
MappingFn: TypeAlias = Callable[..., str]
#: Ids of policies, or a function of policy id and batch (None if there is no batch yet); None: all policies.
PoliciesToTrain: TypeAlias = Collection[str] | Callable[[str, Batch | None], bool] | None

#: In states: no function is set. Function names contain a colon.
_DEFAULT = "default"
_UPDATES = "num_grad_updates_lifetime"


class PolicyGroup:
    """Policies by id, the mapping of agents to them, and operations on all of them.

    Results are by policy id. If ``default_policy`` is the only policy, they are that policy's own results,
    because its batches are plain ones.

    Args:
        policies: The policies.
        policy_mapping_fn: Agent id and episode -> policy id; None: the runner's default. Runners read it
            here.
        policies_to_train: Ids of the policies that learn; None: all.
        callbacks: Receive ``on_create_policy`` and ``on_learn_on_batch``.

    Attributes:
        policies: The policies.
        policy_mapping_fn: The current mapping.
        num_grad_updates: Number of updates of each policy.
        count_steps: Returns the environment steps that the worker itself has sampled.

    Raises:
        OptionError: ``policies_to_train`` names an unknown policy, or an argument is not a function.
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
        #: Ids of the policies that are given again when this group is made again.
        self._given = frozenset(policies)
        self.policy_mapping_fn: MappingFn | None = None
        self.num_grad_updates: Counter[str] = Counter()
        self.count_steps: Callable[[], int] = lambda: 0
        #: The steps of all workers, as last reported by others.
        self._timestep = 0
        self._callbacks = callbacks if callbacks is not None else Callbacks()
        self._hooks = overridden(self._callbacks)
        self._told_unknown: set[str] = set()
        # Of the threads that add and remove policies.
        self._turns = Turns(type(self).__name__)
        self._to_train: frozenset[str] | Callable[[str, Batch | None], bool] | None = None
        self.set_policies_to_train(policies_to_train)
        self.set_policy_mapping_fn(policy_mapping_fn)

    # ---- adding and removing ----

    @property
    def is_single(self) -> bool:
        """Whether ``default_policy`` is the only one."""
        return len(self.policies) == 1 and DEFAULT_POLICY_ID in self.policies

    def get(self, policy_id: str = DEFAULT_POLICY_ID) -> Policy:
        """The policy ``policy_id``.

        Raises:
            OptionError: The id is unknown.
        """
        self._check_known([policy_id])
        return self.policies[policy_id]

    def announce(self, policy_ids: Iterable[str] | None = None) -> None:
        """Call ``on_create_policy`` for policies that now have their spaces; None: for all."""
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
            policy: The policy, or its spec.
            spaces: Spaces for a spec or policy that has none.
            state: A `Policy.get_state` result.

        Raises:
            OptionError: The id exists already, or the policy cannot be made or has no spaces.
            StateError: ``state`` does not fit the policy.
        """
        with self._turns.held():
            added = self._added(policy_id, policy, spaces=spaces, state=state)
        self.announce([policy_id])
        return added

    def _added(
        self,
        policy_id: str,
        policy: Policy | PolicySpec,
        *,
        spaces: Spaces | None,
        state: PolicyState | None,
    ) -> Policy:
        if policy_id in self.policies:
            raise OptionError(f"the policy {policy_id!r} exists already: remove it first, or use another id")
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
                    f"the policy {policy_id!r} has no spaces, and none are known here: pass a PolicySpec "
                    "with observation_space and action_space"
                )
            if state is not None:
                added.set_state(state)
        except BaseException:
            del self.policies[policy_id]
            raise
        return added

    def remove(self, policy_id: str) -> Policy:
        """Remove a policy and all records of its id, and return it.

        Raises:
            OptionError: The id is unknown, or the policy is the last one.
        """
        with self._turns.held():
            policy = self.get(policy_id)
            if len(self.policies) == 1:
                raise OptionError(f"{policy_id!r} is the last policy: add another one first")
            del self.policies[policy_id]
            del self.num_grad_updates[policy_id]
            self._given -= {policy_id}
            if isinstance(self._to_train, frozenset):
                self._to_train -= {policy_id}
            return policy

    def _check_known(self, policy_ids: Iterable[str]) -> None:
        for policy_id in policy_ids:
            if policy_id not in self.policies:
                raise OptionError(
                    f"unknown policy {excerpt(policy_id)}: expected one of {excerpt(list(self.policies))}"
                )

    # ---- mapping and training ----

    def set_policy_mapping_fn(self, policy_mapping_fn: MappingFn | None) -> None:
        """Change which policies act for which agents, in new episodes.

        Raises:
            OptionError: ``policy_mapping_fn`` is not a function.
        """
        check_mapping(policy_mapping_fn)
        self.policy_mapping_fn = policy_mapping_fn

    def set_policies_to_train(self, policies_to_train: PoliciesToTrain) -> None:
        """Set which policies learn; None: all.

        Raises:
            OptionError: A policy is unknown, or the argument is neither ids nor a function.
        """
        if policies_to_train is None or callable(policies_to_train):
            self._to_train = policies_to_train
            return
        if isinstance(policies_to_train, (str, bytes)) or not isinstance(policies_to_train, Iterable):
            raise OptionError(
                f"policies_to_train={excerpt(policies_to_train)}: expected a list of policy ids, or a "
                "function of policy id and batch"
            )
        chosen = frozenset(policies_to_train)
        self._check_known(chosen)
        self._to_train = chosen

    def is_policy_to_train(self, policy_id: str, batch: Batch | None = None) -> bool:
        """Whether the policy learns, from ``batch`` if given."""
        if policy_id not in self.policies:
            return False
        if callable(self._to_train):
            return bool(self._to_train(policy_id, batch))
        return self._to_train is None or policy_id in self._to_train

    def get_policies_to_train(self, batch: Batch | None = None) -> set[str]:
        """Ids of the policies that learn, from ``batch`` if given."""
        return {policy_id for policy_id in self.policies if self.is_policy_to_train(policy_id, batch)}

    # ---- calls on policies ----

    def for_policy(self, func: Callable[..., T], policy_id: str = DEFAULT_POLICY_ID, **kwargs: Any) -> T:
        """Call ``func(policy, **kwargs)`` with the policy in memory and its lock held.

        Raises:
            OptionError: The id is unknown.
        """
        with self._held(policy_id) as policy:
            return func(policy, **kwargs)

    def foreach_policy(self, func: Callable[..., T], **kwargs: Any) -> list[T]:
        """Call ``func(policy, policy_id, **kwargs)`` for each policy, and return the results."""
        return self._foreach(list(self.policies), func, **kwargs)

    def foreach_policy_to_train(self, func: Callable[..., T], **kwargs: Any) -> list[T]:
        """Call ``func(policy, policy_id, **kwargs)`` for each policy that learns, and return the results."""
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
        """Keep the policy in memory, and keep other threads from acting with it."""
        self._check_known([policy_id])
        with self.policies.held(policy_id) as policy, policy.lock:
            yield policy

    # ---- learning ----

    def learn_on_batch(self, batch: Batch) -> dict[str, Any]:
        """Make each policy in training learn on its rows.

        Returns:
            The learning results, with ``num_grad_updates_lifetime``; {} for a policy that does not learn or
            has no rows.

        Raises:
            OptionError: The batch has rows of an unknown policy, or of a policy that cannot learn.
        """
        return self._own({name: self._learn(name, rows) for name, rows in self.trained_rows(batch)})

    def _own(self, by_policy: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Results by policy id, or the results of the only policy."""
        return by_policy.get(DEFAULT_POLICY_ID, {}) if self.is_single else by_policy

    @checked_keywords
    def do_minibatch_sgd(
        self,
        batch: Batch,
        *,
        num_sgd_iter: int = 1,
        sgd_minibatch_size: int = 0,
        standardize_fields: Collection[str] = (),
        seed: int | np.random.Generator | None = None,
    ) -> dict[str, Any]:
        """Make each policy in training learn on its rows several times, in shuffled parts.

        Args:
            batch: As in `learn_on_batch`.
            num_sgd_iter: Passes over the batch.
            sgd_minibatch_size: Rows of a minibatch; 0: the whole batch.
            standardize_fields: Columns to bring to mean 0 and standard deviation 1 first.
            seed: Seed of the orders; None draws one from the OS.

        Returns:
            As in `learn_on_batch`, averaged over the parts.

        Raises:
            OptionError: As in `learn_on_batch`, or a number is out of range.
            MissingColumn: A field to be standardised is missing.
        """
        rng = np.random.default_rng(seed)
        learned = {}
        for policy_id, rows in self.trained_rows(batch):
            stats = do_minibatch_sgd(
                partial(self._learn, policy_id),
                rows,
                num_sgd_iter=num_sgd_iter,
                sgd_minibatch_size=sgd_minibatch_size,
                standardize_fields=standardize_fields,
                seed=rng,
            )
            # Report the count itself, not its mean.
            learned[policy_id] = stats | {_UPDATES: self.num_grad_updates[policy_id]}
        return self._own(learned)

    def trained_rows(self, batch: Batch) -> list[tuple[str, SampleBatch]]:
        """The policies that learn from ``batch``, each with its rows; skips policies without rows.

        Raises:
            OptionError: The batch has rows of an unknown policy.
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
            self.num_grad_updates[policy_id] += 1  # Here, because another thread may learn next.
            return {**stats, **result, _UPDATES: self.num_grad_updates[policy_id]}

    def compute_gradients(self, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return gradients and results with ``batch_count``, for policies that learn; changes nothing.

        A policy's ``batch_count`` is its rows. With several policies, the results also have the batch's own,
        its environment steps, under ``batch_count`` beside the policies.

        Raises:
            OptionError: As in `learn_on_batch`.
        """
        found = {policy_id: self._gradients(policy_id, rows) for policy_id, rows in self.trained_rows(batch)}
        return (
            self._own({policy_id: gradients for policy_id, (gradients, _) in found.items()}),
            self._own({policy_id: stats for policy_id, (_, stats) in found.items()})
            | ({} if self.is_single else {"batch_count": batch.count}),
        )

    def _gradients(self, policy_id: str, rows: SampleBatch) -> tuple[dict[str, Any], dict[str, Any]]:
        with self._held(policy_id) as policy:
            gradients, stats = policy.compute_gradients(rows)
        return gradients, {**stats, "batch_count": rows.count}

    def apply_gradients(self, gradients: Mapping[str, Any]) -> None:
        """Apply `compute_gradients` results of this or another group to the policies that learn.

        Raises:
            OptionError: The gradients belong to an unknown policy.
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
            policies: Ids of the policies; None: those that learn.
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
        """Replace the weights of policies that do not have this version or a newer one.

        Args:
            weights: A `get_weights` result. An empty mapping, as from policies that do not learn, changes
                nothing. Weights of policies that this group lacks, beside others, are left out, with one
                warning a policy: a learner may have more policies than a worker.
            weights_seq_no: Version of the weights; 0 or None always sets them. See `update_weights`.

        Returns:
            Whether any policy took the weights.

        Raises:
            OptionError: All policies are unknown.
            StateError: Names or shapes differ.
        """
        parts = self._by_policy(weights)
        unknown = parts.keys() - self.policies.keys()
        if unknown == parts.keys():
            self._check_known(parts)
        for policy_id in unknown:
            del parts[policy_id]
            if policy_id not in self._told_unknown:
                self._told_unknown.add(policy_id)
                logger.warning("weights of the policy %s are left out: it is not here", excerpt(policy_id))
        taken = []
        for policy_id, own in parts.items():
            with self._held(policy_id) as policy:
                if own or not policy.get_weights():
                    taken.append(update_weights(policy, own, weights_seq_no))
        return any(taken)

    def _by_policy(self, values: Mapping[str, Any]) -> dict[str, Mapping[str, NDArray[Any]]]:
        """Arrays by policy id and name; for the only policy, the input may be by name alone."""
        if all(isinstance(value, Mapping) for value in values.values()) and (values or not self.is_single):
            return dict(values)
        return {DEFAULT_POLICY_ID: values}

    @property
    def timestep(self) -> int:
        """Environment steps of all workers, as far as known here."""
        return max(self._timestep, self.count_steps())

    def get_global_vars(self) -> GlobalVars:
        """Variables shared by all workers, as known here."""
        return GlobalVars(self.timestep, {each: self.num_grad_updates[each] for each in self.policies})

    def set_global_vars(
        self, global_vars: GlobalVars | Mapping[str, Any], policy_ids: Collection[str] | None = None
    ) -> None:
        """Store the variables shared by all workers, and pass them to the policies; None: all policies.

        Raises:
            OptionError: A policy is unknown, or ``global_vars`` is neither a `GlobalVars` nor a dict of its
                fields.
        """
        global_vars = GlobalVars.of(global_vars)
        chosen = list(self.policies) if policy_ids is None else list(policy_ids)
        self._check_known(chosen)
        self._timestep = global_vars.timestep
        for policy_id, updates in global_vars.num_grad_updates_per_policy.items():
            if policy_id in self.policies:
                self.num_grad_updates[policy_id] = updates
        self._foreach(chosen, lambda policy, _: policy.on_global_var_update(global_vars))

    # ---- state ----

    def get_state(self, *, trainable_only: bool = False) -> dict[str, Any]:
        """Return the group's state by components: arrays and JSON values.

        Functions and specs are saved by name; a policy that was given as an object has the spec of its class
        and arguments. Those without an importable name are left out, with a warning: the group that loads the
        state must have the same ones (see `check_remade`).

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

    def check_remade(self, policy_ids: Iterable[str]) -> None:
        """Raise unless a state is enough to make these policies, as far as they were added later.

        Raises:
            StateError: An added policy cannot be made from a spec that can be stored.
        """
        for policy_id in policy_ids:
            if policy_id in self._given:
                continue
            try:
                PolicySpec.of(self.get(policy_id)).to_state()
            except RlioError as error:
                raise StateError(
                    f"the policy {policy_id!r} was added, and a worker that loads this state could not make "
                    f"it: {error}. Add it as a PolicySpec of an importable class or function, with a config "
                    "that can be stored; or remove it first"
                ) from error

    def set_state(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Continue from a `get_state` state, or from some of its components.

        Makes missing policies if the state has their specs. Loading imports the names in the state: load
        states only from sources whose code you would run.

        Returns:
            A function that reverts the load.

        Raises:
            StateError: The state does not fit, or a policy is missing and cannot be made. The group is
                unchanged.
            OptionError: A name cannot be imported. The group is unchanged.
        """
        with ExitStack() as undo, fitting("the policies' state"):
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
                f"the state of the policy {excerpt(policy_id)} is {excerpt(described)}: expected spec and "
                "state"
            )
        if described.get("spec") is not None:
            value_in(described, "spec", dict, of=f"the state of the policy {excerpt(policy_id)}")
        if policy_id in self.policies:
            with self._held(policy_id) as policy:
                undo.callback(self._restore, policy_id, policy.get_state())
                policy.set_state(dict(described["state"]))
        elif described.get("spec") is None:
            raise StateError(
                f"the state has the policy {policy_id!r}, which does not exist here and has no spec: add "
                "the policy first, or make policies with a PolicySpec whose policy_class is importable"
            )
        else:
            spec = PolicySpec.from_state(described["spec"])
            self.add(policy_id, spec, state=dict(described["state"]))
            undo.callback(self.remove, policy_id)

    def _restore(self, policy_id: str, state: PolicyState) -> None:
        with self._held(policy_id) as policy:
            policy.set_state(state)


def check_mapping(policy_mapping_fn: MappingFn | None) -> None:
    """Raise unless ``policy_mapping_fn`` is a function or None.

    Raises:
        OptionError: It is not.
    """
    if policy_mapping_fn is not None and not callable(policy_mapping_fn):
        raise OptionError(
            f"policy_mapping_fn={excerpt(policy_mapping_fn)}: expected a function of agent id and episode"
        )


def _policy_state(policy: Policy, policy_id: str) -> dict[str, Any]:
    spec = None
    try:
        spec = PolicySpec.of(policy).to_state()
    except RlioError as error:
        if policy.spec is not None:  # Who gave an object expects to give it again.
            logger.warning("the spec of the policy %r is not in the state: %s", policy_id, error)
    return {"spec": spec, "state": policy.get_state()}


def _described(function: Callable[..., Any] | None, what: str) -> str | None:
    """The name of ``function``; None if it has none."""
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
