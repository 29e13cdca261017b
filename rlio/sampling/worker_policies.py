"""The policies of a `RolloutWorker`: which exist, which agents they act for, their learning and weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar

import numpy as np

from rlio.batch import Batch
from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.errors import OptionError
from rlio.policies.policy import Policy, PolicyState
from rlio.policies.policy_spec import Spaces, as_specs
from rlio.policies.weights import GlobalVars
from rlio.reader import InputReader
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.external_runner import ExternalRunner
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner
from rlio.sampling.policy_group import MappingFn, PoliciesToTrain, PolicyGroup
from rlio.sampling.policy_setup import PolicySetup
from rlio.sampling.runners import AnyRunner, WorkerPlace
from rlio.sampling.worker_input import WorkerInput
from rlio.support.options import checked_keywords

__all__ = ["WorkerPolicies"]

T = TypeVar("T")

# In the seed tree, runners use (worker, restart, 0 to 2).
_SGD = 1 << 20


class WorkerPolicies(InputReader):
    """A reader of live experience, with the policies that act in it and their operations.

    The subclass sets all attributes in its ``__init__``.

    Attributes:
        group: The policies, and operations on all of them.
        runner: Steps the environments; None without an environment.
    """

    group: PolicyGroup
    runner: AnyRunner | None
    _setup: PolicySetup
    _inputs: WorkerInput
    _place: WorkerPlace
    #: Entropy of the worker's seed.
    _entropy: Any

    @property
    def policy(self) -> Policy:
        """The policy ``default_policy``.

        Raises:
            OptionError: The policies have other ids.
        """
        return self.group.get()

    def get_policy(self, policy_id: str = DEFAULT_POLICY_ID) -> Policy | None:
        """The policy ``policy_id``; None if there is none."""
        return self.group.policies.get(policy_id)

    def add_policy(
        self,
        policy_id: str,
        policy: Any,
        *,
        state: PolicyState | None = None,
        policy_mapping_fn: MappingFn | None = None,
        policies_to_train: PoliciesToTrain = None,
    ) -> Policy:
        """Add a policy, and return it.

        Args:
            policy_id: A new id.
            policy: As in the worker's arguments. Without spaces, it takes those of the other policies, if
                they agree.
            state: A `Policy.get_state` result.
            policy_mapping_fn: Replaces the current mapping; None keeps it.
            policies_to_train: Replaces the current choice; None keeps it.

        Raises:
            OptionError: The id exists already, or the policy cannot be made.
            StateError: ``state`` does not fit the policy.
        """
        (given,) = as_specs({policy_id: policy}).values()
        made = self._setup.complete(policy_id, given)
        added = self.group.add(policy_id, made, spaces=self._common_spaces(), state=state)
        self._remap(policy_mapping_fn, policies_to_train)
        return added

    def remove_policy(
        self,
        policy_id: str = DEFAULT_POLICY_ID,
        *,
        policy_mapping_fn: MappingFn | None = None,
        policies_to_train: PoliciesToTrain = None,
    ) -> None:
        """Remove a policy and all records of its id.

        Args:
            policy_id: Id of the policy.
            policy_mapping_fn: As in `add_policy`.
            policies_to_train: As in `add_policy`.

        Raises:
            OptionError: The id is unknown, or the policy is the last one or the only one that acts.
        """
        if policy_id == DEFAULT_POLICY_ID and isinstance(self.runner, EnvRunner | ExternalRunner):
            raise OptionError(f"{policy_id!r} acts in the worker's environment and cannot be removed")
        with self._not_sampling():
            self.group.remove(policy_id)
        self._remap(policy_mapping_fn, policies_to_train)

    def _remap(self, policy_mapping_fn: MappingFn | None, policies_to_train: PoliciesToTrain) -> None:
        if policy_mapping_fn is not None:
            self.set_policy_mapping_fn(policy_mapping_fn)
        if policies_to_train is not None:
            self.set_is_policy_to_train(policies_to_train)

    def _common_spaces(self) -> Spaces | None:
        """Spaces for a new policy that has none: those of the other policies, if they agree."""
        if isinstance(self.runner, EnvRunner | ExternalRunner):
            return self.runner.observation_space, self.runner.action_space
        found = list(self._policy_spaces().values())
        return found[0] if found and all(spaces == found[0] for spaces in found) else None

    def set_policy_mapping_fn(self, policy_mapping_fn: MappingFn | None) -> None:
        """Change which policies act for which agents in new episodes; None uses the worker's default.

        Raises:
            OptionError: ``policy_mapping_fn`` is not a function, or there is only one agent.
        """
        if policy_mapping_fn is not None and isinstance(self.runner, EnvRunner | ExternalRunner):
            raise OptionError(
                "policy_mapping_fn assigns policies to agents, but the environment has only one agent"
            )
        with self._not_sampling():
            self.group.set_policy_mapping_fn(policy_mapping_fn)
            self._tell_mapping()

    def _tell_mapping(self) -> None:
        if isinstance(self.runner, MultiAgentEnvRunner):
            self.runner.set_policy_mapping_fn(self.group.policy_mapping_fn)

    def set_is_policy_to_train(self, is_policy_to_train: PoliciesToTrain) -> None:
        """See `PolicyGroup.set_policies_to_train`."""
        self.group.set_policies_to_train(is_policy_to_train)

    def get_policies_to_train(self, batch: Batch | None = None) -> set[str]:
        """See `PolicyGroup.get_policies_to_train`."""
        return self.group.get_policies_to_train(batch)

    def for_policy(self, func: Callable[..., T], policy_id: str = DEFAULT_POLICY_ID, **kwargs: Any) -> T:
        """See `PolicyGroup.for_policy`."""
        return self.group.for_policy(func, policy_id, **kwargs)

    def foreach_policy(self, func: Callable[..., T], **kwargs: Any) -> list[T]:
        """See `PolicyGroup.foreach_policy`."""
        return self.group.foreach_policy(func, **kwargs)

    def foreach_policy_to_train(self, func: Callable[..., T], **kwargs: Any) -> list[T]:
        """See `PolicyGroup.foreach_policy_to_train`."""
        return self.group.foreach_policy_to_train(func, **kwargs)

    def _not_sampling(self) -> AbstractContextManager[object]:
        """Pause a sampler that runs ahead while the acting policies change."""
        ahead = self._inputs.ahead
        return nullcontext() if ahead is None else ahead.lock

    def _policy_spaces(self, *, needed: bool = False) -> dict[str, Spaces]:
        """Spaces by policy id. Skips unbound policies unless ``needed``, which makes them raise."""
        return {
            policy_id: (policy.observation_space, policy.action_space)
            for policy_id, policy in self.group.policies.items()
            if policy.is_bound or needed
        }

    # ---- learning ----

    def learn_on_batch(self, batch: Batch) -> dict[str, Any]:
        """Make the policies learn on ``batch``; see `PolicyGroup.learn_on_batch`."""
        return self.group.learn_on_batch(batch)

    @checked_keywords
    def sample_and_learn(
        self,
        expected_batch_size: int | None = None,
        *,
        num_sgd_iter: int = 1,
        sgd_minibatch_size: int = 0,
        standardize_fields: Collection[str] = (),
    ) -> tuple[dict[str, Any], int]:
        """Sample a batch, and make the policies learn on it in shuffled parts.

        Args:
            expected_batch_size: Exact number of environment steps; None uses the input's own size.
            num_sgd_iter: Passes over the batch.
            sgd_minibatch_size: Rows in a part; 0 uses the whole batch.
            standardize_fields: Columns to scale to mean 0 and standard deviation 1 first.

        Returns:
            The learning results (see `PolicyGroup.do_minibatch_sgd`), and the number of environment steps.
        """
        batch = self.sample(expected_batch_size)
        updates = sum(self.group.num_grad_updates.values())
        # A new order each time; after a restore, the orders continue as without it.
        order = np.random.SeedSequence(self._entropy, spawn_key=(self._place.worker_index, _SGD, updates))
        stats = self.group.do_minibatch_sgd(
            batch,
            seed=np.random.default_rng(order),
            num_sgd_iter=num_sgd_iter,
            sgd_minibatch_size=sgd_minibatch_size,
            standardize_fields=standardize_fields,
        )
        return stats, batch.count

    def compute_gradients(self, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return gradients and learning results; see `PolicyGroup.compute_gradients`."""
        return self.group.compute_gradients(batch)

    def apply_gradients(self, gradients: Mapping[str, Any]) -> None:
        """Update the policies with gradients; see `PolicyGroup.apply_gradients`."""
        self.group.apply_gradients(gradients)

    def get_weights(
        self, policies: Collection[str] | None = None, *, inference_only: bool = False
    ) -> dict[str, Any]:
        """Copies of weights, by default of the policies that learn; see `PolicyGroup.get_weights`."""
        return self.group.get_weights(policies, inference_only=inference_only)

    def set_weights(
        self,
        weights: Mapping[str, Any],
        weights_seq_no: int | None = None,
        *,
        global_vars: GlobalVars | None = None,
    ) -> None:
        """Replace the policies' weights.

        Args:
            weights: A `get_weights` result.
            weights_seq_no: Version of the weights, recorded with every step from now on. A policy with this
                version or a newer one keeps its weights. 0 and None always set the weights and keep the
                version.
            global_vars: See `set_global_vars`.
        """
        self.group.set_weights(weights, weights_seq_no)
        if global_vars is not None:
            self.group.set_global_vars(global_vars)

    def get_global_vars(self) -> GlobalVars:
        """Variables shared by all workers; ``timestep`` is at least the number of steps sampled here."""
        return self.group.get_global_vars()

    def set_global_vars(self, global_vars: GlobalVars, policy_ids: Collection[str] | None = None) -> None:
        """See `PolicyGroup.set_global_vars`."""
        self.group.set_global_vars(global_vars, policy_ids)

    def export_policy_model(
        self,
        path: str | os.PathLike[str],
        policy_id: str = DEFAULT_POLICY_ID,
        *,
        format: Literal["npz", "torchscript"] = "npz",
    ) -> None:
        """Write a policy's weights to a file; see `Policy.export_model`."""
        self.group.for_policy(lambda policy: policy.export_model(path, format=format), policy_id)

    def import_policy_model(self, path: str | os.PathLike[str], policy_id: str = DEFAULT_POLICY_ID) -> None:
        """Load weights from a file of `export_policy_model`; see `Policy.import_model`."""
        self.group.for_policy(lambda policy: policy.import_model(path), policy_id)

    def export_policy_checkpoint(
        self, folder: str | os.PathLike[str], policy_id: str = DEFAULT_POLICY_ID
    ) -> None:
        """Store a policy's state in a folder, for `Policy.load`; see `Policy.save`."""
        self.group.for_policy(lambda policy: policy.save(folder), policy_id)

    def setup_torch_data_parallel(
        self, url: str, world_rank: int, world_size: int, backend: str = "gloo"
    ) -> None:
        """Make the policies that learn do so together with those of other workers' processes.

        See `rlio.policies.data_parallel.setup_torch_data_parallel`.
        """
        from rlio.policies.data_parallel import setup_torch_data_parallel

        chosen = self.group.foreach_policy_to_train(lambda policy, _: policy)
        setup_torch_data_parallel(chosen, url, world_rank, world_size, backend)
