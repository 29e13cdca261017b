"""`TorchPolicy`: a policy made of any torch module that maps observations to the inputs of a distribution.

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

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.columns import DEFAULT_POLICY_ID, Columns
from rlio.errors import MissingColumn, OptionError, StateError, excerpt
from rlio.interfaces import Batch
from rlio.nested import map_structure
from rlio.policies.distributions import Distribution, distribution_for
from rlio.policies.policy import (
    Policy,
    PolicyOutput,
    PolicyState,
    RecurrentState,
    Stats,
    Weights,
    state_part,
)

if TYPE_CHECKING:
    import gymnasium as gym
    import torch

__all__ = ["Loss", "MakeModule", "MakeOptimizer", "TorchPolicy", "arrays_of", "load_arrays"]

#: Makes a module, given the observation space, the number of outputs, and what decides its weights and
#: device.
MakeModule: TypeAlias = "Callable[[gym.Space[Any], int, torch.Generator], torch.nn.Module]"
MakeOptimizer: TypeAlias = "Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]"
#: The loss of a batch, given the policy, the module's outputs for ``obs`` and the batch's tensors; and what
#: to report about it.
Loss: TypeAlias = (
    "Callable[[TorchPolicy, torch.Tensor, dict[str, Any]], tuple[torch.Tensor, dict[str, float]]]"
)


class TorchPolicy(Policy):
    """Acts by a module's outputs; learns by gradient descent on a loss.

    The module gets observations as tensors, nested as the space is, floating-point ones as float32, others
    as they are, and returns (N, outputs) float32: what the action space's distribution takes
    (`distribution_for`). Extra columns: ``action_dist_inputs``, the outputs, and ``action_logp``.

    Everything random comes from a generator of the policy's own: the seed decides what it does, whatever
    else uses torch. (Only dropout, in a module of yours, draws from torch's global one.)

    Args:
        module: The module, or a function that makes it; None: a perceptron with layers of ``hidden``.
        loss: What `learn_on_batch` brings down; None: the policy does not learn.
        optimizer: Makes the optimizer of the parameters; None: Adam with ``learning_rate``.
        learning_rate: See ``optimizer``.
        hidden: Layers of the module that is made where none is given.
        max_grad_norm: Bound of the gradient's norm; None: none.
        device: Where the module is, and acts and learns.

    Attributes:
        module: The module; None before `bind`, where it is made by a function.
        distribution: Of the actions.
        updates: Steps of the optimizer so far.

    Raises:
        OptionError: Arguments contradict each other.
    """

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
    ) -> None:
        if optimizer is not None and learning_rate is not None:
            raise OptionError("learning_rate is for the default optimizer: give optimizer= or learning_rate=")
        if module is not None and hidden is not None:
            raise OptionError("hidden is for the default module: give module or hidden=")
        if module is not None and not callable(module):
            raise OptionError(
                f"module={excerpt(module)}: expected a torch module, or a function that makes one"
            )
        if learning_rate is not None and not learning_rate > 0:
            raise OptionError(f"learning_rate={learning_rate}: above 0")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise OptionError(f"max_grad_norm={max_grad_norm}: above 0, or None for no bound")
        self._given_module = module
        self._loss = loss
        self._make_optimizer = optimizer
        # Adam's usual rate.
        self._learning_rate = 1e-3 if learning_rate is None else learning_rate
        self._hidden = tuple(hidden) if hidden is not None else (64, 64)
        self._max_grad_norm = max_grad_norm
        self._device = device
        self.updates = 0
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
        self._generator = torch.Generator(self._device)
        self._generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
        self._size = self._outputs(action_space)
        self._module = self._new_module(observation_space, self._size)
        self._optimizer = self._new_optimizer()

    def _outputs(self, action_space: gym.Space[Any]) -> int:
        """Outputs that the module needs."""
        return self.distribution.size

    def _new_module(self, observation_space: gym.Space[Any], outputs: int) -> torch.nn.Module:
        import torch

        from rlio.policies.networks import mlp

        given = self._given_module
        if isinstance(given, torch.nn.Module):
            made = given
        elif given is None:
            made = mlp(observation_space, outputs=outputs, hidden=self._hidden, generator=self._generator)
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
            OptionError: It is not made yet: the policy has no spaces.
        """
        if self._module is None:
            self._bound()
        assert self._module is not None
        return self._module

    # ---- acting ----

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

        with torch.inference_mode():
            outputs = self.forward(obs)
            actions, logp = self.distribution.draw(outputs, self._generator if explore else None)
            extras = {
                Columns.ACTION_LOGP: logp.cpu().numpy(),
                Columns.ACTION_DIST_INPUTS: outputs.cpu().numpy(),
            }
        return map_structure(lambda leaf: leaf.cpu().numpy(), actions), state, extras

    def forward(self, obs: Any) -> torch.Tensor:
        """The module's outputs for a batch of observations (arrays or tensors, nested as the space), in eval
        mode.

        Raises:
            OptionError: They do not have the shape that the action space needs.
        """
        module = self.module
        if module.training:
            module.eval()
        outputs = module(self._tensors(obs))
        self._check_outputs(outputs)
        return outputs  # type: ignore[no-any-return] # modules are not typed

    def _check_outputs(self, outputs: Any) -> None:
        shape = tuple(getattr(outputs, "shape", ()))
        if len(shape) != 2 or shape[1] != self._size:
            raise OptionError(
                f"the module returned {excerpt(type(outputs).__name__)} of shape {shape}: expected "
                f"(N, {self._size}), as actions of {excerpt(str(self.action_space))} need"
            )

    def _tensors(self, obs: Any) -> Any:
        import torch

        def tensor(leaf: Any) -> torch.Tensor:
            made = leaf if isinstance(leaf, torch.Tensor) else torch.as_tensor(_writable(leaf))
            made = made.to(self._device)
            return made.float() if made.is_floating_point() else made

        return map_structure(tensor, obs)

    # ---- learning ----

    def learn_on_batch(self, batch: Batch) -> Stats:
        """Take one step of the optimizer on ``batch``, and return the loss and what it reports.

        Args:
            batch: A SampleBatch, or a MultiAgentBatch whose only policy is ``default_policy``.

        Raises:
            OptionError: The policy has no loss, or nothing to learn.
            MissingColumn: The batch lacks a column that the loss needs.
        """
        import torch

        if self._optimizer is None:
            raise OptionError("the module has no parameters that can be learned")
        tensors = self._learnable(batch)
        module = self.module
        module.train()
        outputs = module(tensors[Columns.OBS])
        self._check_outputs(outputs)
        loss, stats = self._compute_loss(outputs, tensors)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call] # torch does not type it
        if self._max_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), self._max_grad_norm)
            stats = stats | {"grad_norm": float(norm)}
        self._optimizer.step()
        self.updates += 1
        self.weights_seq_no += 1
        self._after_update()
        return {"loss": float(loss.detach())} | stats

    def _learnable(self, batch: Batch) -> dict[str, Any]:
        """The columns of ``batch`` as tensors, floating-point ones as float32."""
        import torch

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
        wanted = batch.decompress_if_needed()
        tensors = {name: wanted[name] for name in wanted.keys() - {Columns.INFOS}}

        def tensor(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):
                if leaf.dtype == object:
                    return leaf
                leaf = torch.as_tensor(_writable(leaf))
            leaf = leaf.to(self._device)
            return leaf.float() if leaf.is_floating_point() else leaf

        return {name: map_structure(tensor, column) for name, column in tensors.items()}

    def _needed_columns(self) -> Sequence[str]:
        return (Columns.OBS, Columns.ACTIONS)

    def _compute_loss(
        self, outputs: torch.Tensor, tensors: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        if self._loss is None:
            raise OptionError(
                "this TorchPolicy does not learn: make it with a loss=, or use DQN or BehaviourCloning"
            )
        return self._loss(self, outputs, tensors)

    def _after_update(self) -> None:
        """Called after each step of the optimizer."""

    # ---- weights and state ----

    def get_weights(self, *, inference_only: bool = False) -> Weights:
        """Copies of the module's parameters and buffers, by name."""
        return arrays_of(self.module)

    def set_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        load_arrays(self.module, weights, "weights")

    def get_state(self) -> PolicyState:
        optimizer = None if self._optimizer is None else _to_arrays(self._optimizer.state_dict())
        return super().get_state() | {
            "updates": self.updates,
            "optimizer": optimizer,
            "generator": self._generator.get_state().numpy().copy(),
        }

    def set_state(self, state: PolicyState) -> None:
        import torch

        super().set_state(state)
        self.updates = state_part(state, "updates", int)
        self._generator.set_state(torch.as_tensor(state_part(state, "generator", np.ndarray).copy()))
        if self._optimizer is not None:
            try:
                self._optimizer.load_state_dict(_from_arrays(state_part(state, "optimizer", dict)))
            except (KeyError, ValueError, TypeError) as error:
                raise StateError(f"the optimizer's state does not fit: {error}") from error


def _writable(leaf: NDArray[Any]) -> NDArray[Any]:
    """``leaf``, or a copy where torch would warn that it is read-only."""
    return leaf if leaf.flags.writeable else leaf.copy()


def arrays_of(module: torch.nn.Module) -> Weights:
    """Copies of the parameters and buffers of ``module``, by name."""
    return {name: value.detach().cpu().numpy().copy() for name, value in module.state_dict().items()}


def load_arrays(module: torch.nn.Module, weights: Mapping[str, NDArray[Any]], what: str) -> None:
    """Copy ``weights`` into ``module``; ``what`` is what messages call them.

    Raises:
        StateError: Names or shapes are not the module's; nothing is copied.
    """
    import torch

    own = module.state_dict()
    if own.keys() != weights.keys():
        raise StateError(
            f"the {what} are {excerpt(sorted(weights))}, but the module has {excerpt(sorted(own))}: "
            "they are of another module"
        )
    for name, value in weights.items():
        if tuple(own[name].shape) != np.shape(value):
            raise StateError(
                f"{what} {excerpt(name)} have the shape {np.shape(value)}, "
                f"the module's {tuple(own[name].shape)}"
            )
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(torch.as_tensor(np.array(value)))


def _to_arrays(value: Any) -> Any:
    """An optimizer's state with arrays for tensors and strings for keys."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy().copy()
    if isinstance(value, dict):
        return {str(key): _to_arrays(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_arrays(part) for part in value]
    return value


def _from_arrays(value: Any) -> Any:
    """The inverse of `_to_arrays`: numbers of parameters are int keys again."""
    import torch

    if isinstance(value, np.ndarray):
        return torch.as_tensor(value.copy())
    if isinstance(value, dict):
        return {int(key) if key.isdigit() else key: _from_arrays(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_from_arrays(part) for part in value]
    return value
