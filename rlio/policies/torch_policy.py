"""`TorchPolicy`: a policy made from any torch module that maps observations to inputs of a distribution.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> policy = TorchPolicy()
    >>> policy.bind(Box(-1.0, 1.0, (3,)), Discrete(2), seed=0)
    >>> actions, _, extras = policy.compute_actions(np.zeros((4, 3), np.float32))
    >>> actions.shape, sorted(extras)
    ((4,), ['action_dist_inputs', 'action_logp'])
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.arrays import take_leaf
from rlio.batch.columns import DEFAULT_POLICY_ID, STATE_IN_PREFIX, STATE_OUT_PREFIX, Columns
from rlio.batch.nested import leaves, map_structure
from rlio.envs.leaves import leaves_of
from rlio.errors import MissingColumn, OptionError, SchemaError, excerpt
from rlio.policies.distributions import Distribution, distribution_for
from rlio.policies.fitting import Fit
from rlio.policies.gradients import average_gradients
from rlio.policies.policy import (
    POLICY_STATE,
    Gradients,
    Policy,
    PolicyOutput,
    PolicyState,
    RecurrentState,
    Stats,
    Weights,
    state_part,
)
from rlio.policies.postprocessing import GAE, NStep, adjust_nstep, compute_gae
from rlio.policies.torch_arrays import (
    arrays_of,
    load_arrays,
    load_gradients,
    load_optimizer,
    state_of,
    state_to,
    writable,
)
from rlio.support.options import check_count, check_number
from rlio.support.states import fitting

if TYPE_CHECKING:
    import gymnasium as gym
    import torch

__all__ = ["Loss", "MakeModule", "MakeOptimizer", "TorchPolicy", "under_lock"]

#: Makes a module from the observation space, the number of outputs, and a generator that decides its
#: weights and device.
MakeModule: TypeAlias = "Callable[[gym.Space[Any], int, torch.Generator], torch.nn.Module]"
MakeOptimizer: TypeAlias = "Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]"
#: The loss of a batch, from the policy, the module's outputs for ``obs`` and the batch's tensors; and
#: numbers to report.
Loss: TypeAlias = (
    "Callable[[TorchPolicy, torch.Tensor, dict[str, Any]], tuple[torch.Tensor, dict[str, float]]]"
)


P = ParamSpec("P")
T = TypeVar("T")
_Self = TypeVar("_Self", bound=Policy)


def under_lock(method: Callable[Concatenate[_Self, P], T]) -> Callable[Concatenate[_Self, P], T]:
    """``method`` under `Policy.lock`, because another thread may act with the same module."""

    @functools.wraps(method)
    def locked(self: _Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked


# Rows whose likelihoods are computed at once, so memory does not grow with the log.
_LIKELIHOOD_ROWS = 65_536


class TorchPolicy(Policy):
    """Acts by a module's outputs; learns by gradient descent on a loss.

    The module gets observations as tensors, nested like the space: floating-point ones as float32, others
    with their own dtype. It returns (N, outputs) float32, the input of the action space's distribution
    (`distribution_for`). Extra columns: ``action_dist_inputs``, the outputs, and ``action_logp``.

    All randomness comes from the policy's own generator, so the seed decides its behaviour, independent of
    other users of torch. (Only dropout, in your own module, draws from torch's global generator.)

    A **recurrent** module has a method ``initial_state(batch_size)``, which returns a tuple of tensors with
    ``batch_size`` rows. The module is called with observations of (B, T, ...), T steps of B sequences, and
    the state, and returns (B, T, outputs) and the next state. It learns from batches with ``seq_lens`` and
    ``state_in_k``, which runners make; see `rlio.policies.networks.gru`.

    With ``postprocessing=GAE(...)`` the module has one more output, the last: the **value** of the
    observation. The value is recorded as ``vf_preds``, and trajectories get ``advantages``, ``value_targets``
    and ``values_bootstrapped``. With ``postprocessing=NStep(...)`` transitions become n-step transitions,
    also those written to an output. To keep single steps, leave it out and use the n-step draws of
    `rlio.ReplayStore`.

    The module may name submodules in ``non_inference_attributes`` that acting does not need;
    ``get_weights(inference_only=True)`` leaves them out. A policy that loads such weights keeps its old
    values for these submodules: in that case let the learner call `postprocess_batch`.

    Args:
        module: The module, or a function that makes it; None: a perceptron with layers of ``hidden``, and,
            with values, a second one for them.
        loss: The loss that `learn_on_batch` minimises; None: the policy does not learn.
        optimizer: Makes the optimizer of the parameters; None: Adam with ``learning_rate``.
        learning_rate: See ``optimizer``.
        hidden: Layers of the default module.
        max_grad_norm: Bound of the gradient's norm; None: none.
        device: Device of the module, for acting and learning.
        postprocessing: How to process trajectories after sampling; None: not at all.
        max_seq_len: Maximum rows of a recurrent module's sequences; None: 20.

    Attributes:
        module: The module; available after `bind`.
        distribution: The distribution of actions.
        updates: Steps of the optimizer so far.

    Raises:
        OptionError: Arguments contradict each other.
    """

    weights_seq_no: int

    def __init__(
        self,
        module: torch.nn.Module | MakeModule | None = None,
        *,
        loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None,
        learning_rate: float | None = None,
        hidden: Sequence[int] | None = None,
        max_grad_norm: float | None = None,
        device: str = "cpu",
        postprocessing: GAE | NStep | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        if optimizer is not None and learning_rate is not None:
            raise OptionError("learning_rate is for the default optimizer: pass optimizer= or learning_rate=")
        if module is not None and hidden is not None:
            raise OptionError("hidden is for the default module: pass module or hidden=")
        if module is not None and not callable(module):
            raise OptionError(
                f"module={excerpt(module)}: expected a torch module, or a function that makes one"
            )
        learning_rate = check_number("learning_rate", learning_rate, above=0, none="the default")
        max_grad_norm = check_number("max_grad_norm", max_grad_norm, above=0, none="no bound")
        if postprocessing is not None and not isinstance(postprocessing, (GAE, NStep)):
            raise OptionError(
                f"postprocessing={excerpt(postprocessing)}: expected GAE(...), NStep(...) or None"
            )
        if max_seq_len is not None:
            self.max_seq_len: int = check_count("max_seq_len", max_seq_len, least=1, of="rows of a sequence")
        self._given_module = module
        self._loss = loss
        self._make_optimizer = optimizer
        # Adam's usual rate.
        self._learning_rate = 1e-3 if learning_rate is None else learning_rate
        self._hidden = tuple(hidden) if hidden is not None else (64, 64)
        self._max_grad_norm = max_grad_norm
        self._device = device
        self._postprocessing = postprocessing
        self._has_values = isinstance(postprocessing, GAE) and postprocessing.use_critic
        self.updates: int = 0
        self._module: torch.nn.Module | None = None

    # ---- set-up ----

    def _setup(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        seeds: np.random.SeedSequence,
    ) -> None:
        import torch

        self.distribution: Distribution = distribution_for(action_space)
        self._fit_obs = Fit(Columns.OBS, observation_space)
        self._fits = {
            Columns.OBS: self._fit_obs,
            Columns.NEXT_OBS: Fit(Columns.NEXT_OBS, observation_space),
            Columns.ACTIONS: Fit(Columns.ACTIONS, action_space),
        }
        self._generator = torch.Generator(self._device)
        self._generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
        self._size = self.distribution.size + self._has_values
        self._module = self._new_module(observation_space, self._size)
        self._optimizer = self._new_optimizer()

    def _new_module(self, observation_space: gym.Space[Any], outputs: int) -> torch.nn.Module:
        import torch

        from rlio.policies.networks import actor_critic, mlp

        given = self._given_module
        if isinstance(given, torch.nn.Module):
            made = given
        elif given is None:
            make = actor_critic if self._has_values else mlp
            made = make(observation_space, outputs=outputs, hidden=self._hidden, generator=self._generator)
        else:
            made = given(observation_space, outputs, self._generator)
            if not isinstance(made, torch.nn.Module):
                raise OptionError(f"module={excerpt(given)} gave {excerpt(made)}: expected a torch module")
        return made.to(self._device)

    def _new_optimizer(self) -> torch.optim.Optimizer | None:
        import torch

        parameters = [p for p in self.module.parameters() if p.requires_grad]
        if not parameters:
            return None
        if self._make_optimizer is not None:
            return self._make_optimizer(parameters)
        return torch.optim.Adam(parameters, lr=self._learning_rate)

    @property
    def module(self) -> torch.nn.Module:
        """The module that acts and learns.

        Raises:
            OptionError: The module does not exist yet, because the policy has no spaces.
        """
        if self._module is None:
            self._bound()
        assert self._module is not None
        return self._module

    @property
    def device(self) -> torch.device:
        """Device on which the module acts and learns."""
        import torch

        return torch.device(self._device)

    # ---- acting ----

    def initial_state(self, batch_size: int) -> RecurrentState:
        initial = getattr(self.module, "initial_state", None)
        if initial is None:
            return ()
        return tuple(part.detach().cpu().numpy() for part in initial(batch_size))

    def compute_actions(
        self,
        obs: Any,
        state: RecurrentState = (),
        *,
        explore: bool = True,
        inputs: SampleBatch | None = None,
        timestep: int = 0,
    ) -> PolicyOutput:
        import torch

        found = self._few_actions(obs) if explore and not state else None
        if found is not None:
            (actions, extras), after = found, state
        else:
            with torch.inference_mode():
                if state:
                    outputs, after = self._step(obs, state)
                else:
                    outputs, after = self.forward(obs), state
                chosen_by, values = self.split_outputs(outputs)
                drawn, likely = self.distribution.draw(chosen_by, self._generator if explore else None)
                actions = map_structure(_array, drawn)
                extras = {Columns.ACTION_LOGP: _array(likely), Columns.ACTION_DIST_INPUTS: _array(chosen_by)}
                if values is not None:
                    extras[Columns.VF_PREDS] = _array(values)
        logp = extras[Columns.ACTION_LOGP]
        # NaN if any element is NaN. Takes a third of the time of isnan().any().
        if math.isnan(logp.dot(logp)):
            raise SchemaError(
                f"the module's outputs for {int(np.isnan(logp).sum())} of {len(logp)} observations give no "
                "probabilities, because they are NaN or infinite: check the learning rate and the "
                "observations",
                column=Columns.ACTION_DIST_INPUTS,
            )
        return actions, after, extras

    def _few_actions(self, obs: Any) -> tuple[Any, dict[str, NDArray[Any]]] | None:
        """Actions and extra columns for a few observations, without calling the module; None: call it."""
        from rlio.policies.array_layers import outputs_in_numpy

        if type(self).forward is not TorchPolicy.forward:
            return None
        self._fit_obs.check(obs)
        outputs = outputs_in_numpy(self._acting_module(), obs)
        if outputs is None:
            return None
        self._check_outputs(outputs)
        chosen_by = outputs[:, :-1] if self._has_values else outputs
        drawn = self.distribution.draw_few(chosen_by, self._generator)
        if drawn is None:
            return None
        extras = {Columns.ACTION_LOGP: drawn[1], Columns.ACTION_DIST_INPUTS: chosen_by}
        if self._has_values:
            extras[Columns.VF_PREDS] = outputs[:, -1]
        return drawn[0], extras

    @under_lock
    def compute_log_likelihoods(
        self, actions: Any, obs: Any, *, explore: bool = True, timestep: int | None = None
    ) -> NDArray[np.float64]:
        import torch

        if self.is_recurrent:
            raise OptionError(
                "the likelihood of an action depends on the state of a recurrent module, which logged rows "
                "do not have: pass a function (obs, actions) -> log-probabilities in the policy's place"
            )
        if not explore and not self._is_countable:
            raise OptionError(
                f"explore=False chooses one action of {excerpt(str(self.action_space))}, which has no "
                "density: use explore=True, or a policy for Discrete actions"
            )
        self._fits[Columns.ACTIONS].check(actions, numbers=True)
        parts = [np.zeros(0)]
        rows = len(leaves(actions)[0][1])
        with torch.inference_mode():
            for start in range(0, rows, _LIKELIHOOD_ROWS):
                part = slice(start, start + _LIKELIHOOD_ROWS)
                outputs = self.forward(map_structure(lambda leaf, part=part: leaf[part], obs))
                taken = self._tensors(map_structure(lambda leaf, part=part: leaf[part], actions))
                parts.append(self._log_likelihoods(outputs, taken, explore, timestep).double().cpu().numpy())
        return np.concatenate(parts)

    def _log_likelihoods(
        self, outputs: torch.Tensor, actions: Any, explore: bool, timestep: int | None
    ) -> torch.Tensor:
        """`compute_log_likelihoods` of a few rows, from the module's outputs for them."""
        import torch

        chosen_by, _ = self.split_outputs(outputs)
        if explore:
            return self.distribution.logp(chosen_by, actions)
        return torch.where(self._are_likeliest(chosen_by, actions), 0.0, -torch.inf)

    def _are_likeliest(self, chosen_by: torch.Tensor, actions: Any) -> torch.Tensor:
        """Which of ``actions`` are the most likely ones, (N,) bool, given the distribution's inputs."""
        import torch

        best = self.distribution.sample(chosen_by, None)
        same = map_structure(lambda a, b: (a == b).reshape(len(chosen_by), -1).all(-1), best, actions)
        return torch.stack([leaf for _, leaf in leaves(same)]).all(0)

    @property
    def _is_countable(self) -> bool:
        """Whether actions have probabilities, not densities as in Box spaces."""
        from gymnasium.spaces import Box

        return not any(isinstance(leaf.space, Box) for leaf in leaves_of(self.action_space))

    def forward(self, obs: Any) -> torch.Tensor:
        """The outputs, in eval mode, of a module that is not recurrent for a batch of observations.

        ``obs``: arrays or tensors, nested like the space.

        Raises:
            OptionError: The outputs do not have the shape that the action space needs.
            SchemaError: ``obs`` does not have the shape of the observation space.
        """
        import torch

        from rlio.policies.array_layers import outputs_in_numpy

        module = self._acting_module()
        self._fit_obs.check(obs)
        found = None if torch.is_grad_enabled() else outputs_in_numpy(module, obs)
        outputs = module(self._tensors(obs)) if found is None else torch.from_numpy(found)
        self._check_outputs(outputs)
        return outputs

    def split_outputs(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Split a module's outputs into the distribution's inputs and the values, (N,), if there are any."""
        return (outputs[:, :-1], outputs[:, -1]) if self._has_values else (outputs, None)

    def _acting_module(self) -> torch.nn.Module:
        module = self.module
        if module.training:
            module.eval()
        return module

    def _step(self, obs: Any, state: RecurrentState) -> tuple[torch.Tensor, RecurrentState]:
        """The outputs, (N, outputs), of one step of a recurrent module, and the next state."""
        self._fit_obs.check(obs)
        steps = map_structure(lambda leaf: leaf[:, None], self._tensors(obs))
        outputs, after = self._acting_module()(steps, self._tensors(tuple(state)))
        self._check_outputs(outputs[:, 0])
        return outputs[:, 0], tuple(part.cpu().numpy() for part in after)

    def _check_outputs(self, outputs: Any) -> None:
        shape = tuple(getattr(outputs, "shape", ()))
        if len(shape) != 2 or shape[1] != self._size:
            raise OptionError(
                f"the module returned {excerpt(type(outputs).__name__)} of shape {shape}: expected (N, "
                f"{self._size}), because actions of {excerpt(str(self.action_space))} need it"
                + (", with a value" if self._has_values else "")
            )

    def _tensors(self, obs: Any) -> Any:
        import torch

        if self._device == "cpu" and type(obs) is np.ndarray and obs.dtype == np.float32:
            return torch.from_numpy(writable(obs))  # The common case, at each step.

        def tensor(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):
                if leaf.dtype == object:
                    return leaf
                leaf = torch.as_tensor(writable(leaf))
            leaf = leaf.to(self._device)
            return leaf.float() if leaf.is_floating_point() else leaf

        return map_structure(tensor, obs)

    # ---- after sampling ----

    @under_lock
    def postprocess_trajectory(
        self,
        batch: SampleBatch,
        other_agent_batches: Mapping[Any, tuple[str, SampleBatch]] | None = None,
        episode: Any = None,
    ) -> SampleBatch:
        return self._postprocessed(batch)

    @under_lock
    def postprocess_batch(self, batch: SampleBatch) -> SampleBatch:
        if type(self).postprocess_trajectory is TorchPolicy.postprocess_trajectory:
            return self._postprocessed(batch)
        return super().postprocess_batch(batch)

    @property
    def postprocesses(self) -> bool:
        overridden = type(self).postprocess_trajectory is not TorchPolicy.postprocess_trajectory
        return overridden or self._postprocessing is not None

    def _postprocessed(self, batch: SampleBatch) -> SampleBatch:
        """Apply ``postprocessing`` to any number of trajectories."""
        if isinstance(self._postprocessing, NStep):
            return adjust_nstep(batch, self._postprocessing)
        if self._postprocessing is None or not len(batch):
            return batch
        if self._has_values and Columns.VF_PREDS not in batch:
            # Rows of another policy: they get this policy's values.
            batch = batch.copy(shallow=True)
            batch[Columns.VF_PREDS] = self._values_of(batch)
        return compute_gae(batch, self._postprocessing, lambda rows: self._values_after(batch, rows))

    def _values_of(self, batch: SampleBatch) -> NDArray[np.float32]:
        import torch

        with torch.inference_mode():
            outputs = self._outputs_for(self._acting_module(), self._columns_as_tensors(batch))
        values: NDArray[np.float32] = outputs[:, -1].cpu().numpy()
        return values

    def _values_after(self, batch: SampleBatch, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """The values of ``new_obs`` in ``rows``; for a recurrent module, in the state after them."""
        import torch

        obs = map_structure(lambda leaf: take_leaf(leaf, rows), batch[Columns.NEXT_OBS])
        states = len(self.initial_state(1))
        names = [f"{STATE_OUT_PREFIX}{k}" for k in range(states)]
        for name in names:
            if name not in batch:
                raise MissingColumn("the value of the last observation depends on it", column=name)
        with torch.inference_mode():
            if states:
                outputs, _ = self._step(obs, tuple(take_leaf(batch[name], rows) for name in names))
            else:
                outputs = self.forward(obs)
        values: NDArray[np.float32] = outputs[:, -1].cpu().numpy()
        return values

    # ---- learning ----

    @under_lock
    def learn_on_batch(self, batch: Batch) -> Stats:
        """Take one step of the optimizer on ``batch``; return the loss and its report.

        Args:
            batch: A SampleBatch, or a MultiAgentBatch whose only policy is ``default_policy``.

        Raises:
            OptionError: The policy has no loss, or no parameters to learn.
            MissingColumn: The batch lacks a column that the loss needs.
        """
        stats, _ = self._backward(batch)
        return stats | self._update()

    @under_lock
    def compute_gradients(self, batch: Batch) -> tuple[Gradients, Stats]:
        """The gradients of the loss of ``batch``, not clipped: `apply_gradients` clips them.

        With several processes, the gradients are the mean over all processes.

        Raises:
            OptionError: The policy has no loss, or no parameters to learn.
            MissingColumn: The batch lacks a column that the loss needs.
        """
        stats, rows = self._backward(batch)
        gradients = {
            name: np.zeros(tuple(parameter.shape), np.float32)
            if parameter.grad is None
            else parameter.grad.cpu().numpy().copy()
            for name, parameter in self._learned().items()
        }
        self._optimizer_or_raise().zero_grad(set_to_none=True)
        return gradients, stats | {"batch_count": rows}

    @under_lock
    def apply_gradients(self, gradients: Mapping[str, NDArray[Any]]) -> None:
        self._optimizer_or_raise()
        load_gradients(self._learned(), gradients)
        self._update()

    def _learned(self) -> dict[str, torch.nn.Parameter]:
        return {name: each for name, each in self.module.named_parameters() if each.requires_grad}

    def _optimizer_or_raise(self) -> torch.optim.Optimizer:
        self._bound()
        if self._optimizer is None:
            raise OptionError("the module has no parameters that can be learned")
        return self._optimizer

    def _backward(self, batch: Batch) -> tuple[Stats, int]:
        """Leave the gradients of the loss at the parameters; return measurements and number of rows."""
        optimizer = self._optimizer_or_raise()
        if self.distributed_world_size > 1 and not batch.agent_steps():
            # Other processes have rows, and wait for this one.
            optimizer.zero_grad(set_to_none=True)
            average_gradients(self._learned().values(), rows=0)
            return {}, 0
        rows, tensors = self._learnable(batch)
        module = self.module
        module.train()
        outputs = self._outputs_for(module, tensors)
        loss, stats = self._compute_loss(outputs, tensors)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call] # torch does not type it
        if self.distributed_world_size > 1:
            average_gradients(self._learned().values(), rows=rows)
        return {"loss": float(loss.detach())} | stats, rows

    def _update(self) -> Stats:
        """Take a step along the gradients at the parameters."""
        import torch

        optimizer = self._optimizer_or_raise()
        stats: Stats = {}
        if self._max_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._max_grad_norm)
            stats = {"grad_norm": float(norm)}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        self.weights_seq_no += 1
        self._after_update()
        return stats

    def _outputs_for(self, module: torch.nn.Module, tensors: dict[str, Any]) -> torch.Tensor:
        """The module's outputs for each row, (N, outputs)."""
        if not hasattr(module, "initial_state"):
            outputs = module(tensors[Columns.OBS])
        else:
            outputs = _by_sequence(module, tensors)
        self._check_outputs(outputs)
        return outputs  # type: ignore[no-any-return] # modules are not typed

    def _learnable(self, batch: Batch) -> tuple[int, dict[str, Any]]:
        """Rows of ``batch``, and its columns as tensors, floating-point ones as float32."""
        if isinstance(batch, MultiAgentBatch):
            if list(batch) != [DEFAULT_POLICY_ID]:
                raise OptionError(
                    f"the batch is for the policies {excerpt(list(batch))}: "
                    "learn on one policy's rows, batch[id]"
                )
            batch = batch[DEFAULT_POLICY_ID]
        if not len(batch):
            raise OptionError("the batch has no rows to learn from")
        for name in self._needed_columns():
            if name not in batch:
                raise MissingColumn(f"{type(self).__name__} cannot learn without it", column=name)
        return len(batch), self._columns_as_tensors(batch)

    def _columns_as_tensors(self, batch: SampleBatch) -> dict[str, Any]:
        wanted = batch.decompress_if_needed().unpad()
        for name, fit in self._fits.items():
            if name in wanted:
                fit.check(wanted[name], numbers=True)
        return {name: self._tensors(wanted[name]) for name in wanted.keys() - {Columns.INFOS}}

    def _needed_columns(self) -> Sequence[str]:
        return (Columns.OBS, Columns.ACTIONS)

    def _compute_loss(
        self, outputs: torch.Tensor, tensors: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        if self._loss is None:
            raise OptionError(
                "this TorchPolicy does not learn: make it with loss=, or use DQN or BehaviourCloning"
            )
        return self._loss(self, outputs, tensors)

    def _after_update(self) -> None:
        """Called after each step of the optimizer."""

    # ---- weights and state ----

    @under_lock
    def get_weights(self, *, inference_only: bool = False) -> Weights:
        """Copies of the module's parameters and buffers, by name."""
        return arrays_of(self.module, without=self._non_inference() if inference_only else ())

    @under_lock
    def set_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        load_arrays(self.module, weights, "weights", without=self._non_inference())

    def _non_inference(self) -> Sequence[str]:
        """Names of submodules that acting does not need."""
        return tuple(getattr(self.module, "non_inference_attributes", ()))

    def synced_modules(self) -> list[torch.nn.Module]:
        """Modules that must be equal in all processes that learn together."""
        return [self.module]

    @under_lock
    def get_state(self) -> PolicyState:
        optimizer = None if self._optimizer is None else state_of(self._optimizer.state_dict())
        return super().get_state() | {
            "updates": self.updates,
            "optimizer": optimizer,
            "generator": self._generator.get_state().numpy().copy(),
        }

    @under_lock
    def set_state(self, state: PolicyState) -> None:
        import torch

        updates, generator = state_part(state, "updates", int), state_part(state, "generator", np.ndarray)
        with fitting(f"{POLICY_STATE}['optimizer']"):
            optimizer = None if self._optimizer is None else state_to(state_part(state, "optimizer", dict))
        super().set_state(state)
        self.updates = updates
        with fitting(f"{POLICY_STATE}['generator']"):
            self._generator.set_state(torch.as_tensor(generator.copy()))
        if self._optimizer is not None:
            load_optimizer(self._optimizer, optimizer)

    # ---- export ----

    def export_model(
        self, path: str | os.PathLike[str], *, format: Literal["npz", "torchscript"] = "npz"
    ) -> None:
        """Write the module to a file for use elsewhere.

        Args:
            path: A local file; it is replaced.
            format: ``"npz"``: the arrays by name, for `numpy.load` and `import_model`. ``"torchscript"``: for
                `torch.jit.load`, in C++ too; maps observations to the module's outputs, traced for batches of
                any size. That file has torch's own format, and rlio does not read it.

        Raises:
            OptionError: The module is recurrent, or torch cannot trace it.
        """
        if format != "torchscript":
            super().export_model(path, format=format)
            return
        import torch

        from rlio.policies.checkpoint import replacing_file

        if self.is_recurrent:
            raise OptionError("a recurrent module is not exported as 'torchscript': use 'npz'")
        batch = [self.observation_space.sample() for _ in range(2)]
        example = self._tensors(map_structure(lambda *rows: np.stack([np.asarray(r) for r in rows]), *batch))
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # torch recommends torch.export, but C++ cannot load its files without additional tools.
                warnings.simplefilter("ignore", DeprecationWarning)
                traced = torch.jit.trace(  # type: ignore[no-untyped-call] # torch does not type it
                    self._acting_module(), (example,), strict=False
                )
                with replacing_file(path) as partial:
                    torch.jit.save(traced, os.fspath(partial))
        except (RuntimeError, ValueError, TypeError) as error:
            raise OptionError(f"torch cannot write this module as TorchScript: {error}") from error


def _by_sequence(module: torch.nn.Module, tensors: dict[str, Any]) -> torch.Tensor:
    """A recurrent module's outputs for the rows of consecutive sequences."""
    import torch

    if Columns.SEQ_LENS not in tensors:
        raise MissingColumn(
            "a recurrent module learns from sequences: use batches from a runner, which have them",
            column=Columns.SEQ_LENS,
        )
    lens = tensors[Columns.SEQ_LENS].long()
    state: list[torch.Tensor] = []
    while f"{STATE_IN_PREFIX}{len(state)}" in tensors:
        state.append(tensors[f"{STATE_IN_PREFIX}{len(state)}"])
    if not state:
        state = list(module.initial_state(len(lens)))  # type: ignore[operator] # a method of recurrent modules
    steps = int(lens.max())
    is_step = torch.arange(steps, device=lens.device) < lens[:, None]

    def padded(leaf: torch.Tensor) -> torch.Tensor:
        made = leaf.new_zeros((len(lens), steps, *leaf.shape[1:]))
        made[is_step] = leaf
        return made

    outputs, _ = module(map_structure(padded, tensors[Columns.OBS]), tuple(state))
    return outputs[is_step]  # type: ignore[no-any-return] # modules are not typed


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = (tensor if tensor.is_cpu else tensor.cpu()).numpy()
    return array
