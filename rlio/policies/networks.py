"""Networks over any observation: the default networks of torch policies, and a recurrent one.

Importing this module imports torch.

Example:
    >>> import torch
    >>> from gymnasium.spaces import Box, Dict, Discrete
    >>> space = Dict(place=Box(-1.0, 1.0, (2,)), gear=Discrete(5))
    >>> network = mlp(space, outputs=3, hidden=[16], generator=torch.Generator())
    >>> network({"place": torch.zeros(4, 2), "gear": torch.zeros(4, dtype=torch.int64)}).shape
    torch.Size([4, 3])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from gymnasium.spaces import flatdim
from torch import nn

from rlio.batch.nested import map_structure
from rlio.envs.leaves import Leaf, leaf_of, leaves_of
from rlio.errors import OptionError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = [
    "ActorCriticNetwork",
    "Flatten",
    "GRUNetwork",
    "actor_critic",
    "gru",
    "linear",
    "mlp",
]


class Flatten(nn.Module):
    """Turns observations into rows of float32: choices become one-hot; Dict and Tuple parts are joined.

    Attributes:
        size: Numbers in a row.
        is_flat: Whether observations are already rows of numbers.

    Raises:
        OptionError: A space has no fixed count of numbers (Text, Sequence, Graph, OneOf).
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        self._leaves = [(leaf.path, _choices(leaf)) for leaf in leaves_of(space)]
        self.size: int = flatdim(space)
        self.is_flat: bool = len(self._leaves) == 1 and self._leaves[0] == ((), None)

    def forward(self, obs: Any) -> torch.Tensor:
        """``obs``: tensors of (N, *shape), nested like the space. Returns (N, size) float32."""
        if self.is_flat and obs.dim() == 2 and obs.dtype == torch.float32:
            return obs  # type: ignore[no-any-return] # the common case: a tensor that needs no work
        parts = [_flat(leaf_of(obs, path), choices) for path, choices in self._leaves]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _choices(leaf: Leaf) -> list[tuple[int, int]] | None:
    """`Leaf.choices`.

    Raises:
        OptionError: The space has no fixed count of numbers.
    """
    if leaf.is_object:
        raise OptionError(
            f"the default network cannot read observations of {excerpt(str(leaf.space))}: pass a module that "
            "can"
        )
    return leaf.choices


def _flat(values: torch.Tensor, choices: list[tuple[int, int]] | None) -> torch.Tensor:
    if choices is None:
        return values.reshape(values.shape[0], -1).float()
    columns = values.reshape(values.shape[0], -1).long()
    return torch.cat(
        [
            nn.functional.one_hot(columns[:, i] - start, number).float()
            for i, (start, number) in enumerate(choices)
        ],
        -1,
    )


def linear(inputs: int, outputs: int, *, generator: torch.Generator, gain: float = 1.0) -> nn.Linear:
    """A linear layer whose weights come from ``generator``: uniform in +- gain / sqrt(inputs); biases 0."""
    # On the meta device first: the ordinary constructor draws from torch's global generator.
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device=generator.device)
    bound = gain / math.sqrt(max(inputs, 1))
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
        layer.bias.zero_()
    return layer


def mlp(
    observation_space: gym.Space[Any],
    *,
    outputs: int,
    hidden: Sequence[int],
    generator: torch.Generator,
) -> nn.Sequential:
    """A perceptron with tanh between its layers, from observations to ``outputs`` numbers.

    Args:
        observation_space: Space of one environment.
        outputs: Numbers in an output row.
        hidden: Sizes of the hidden layers.
        generator: Decides the weights, and the device.
    """
    layers: list[nn.Module] = [Flatten(observation_space)]
    size = flatdim(observation_space)
    for width in hidden:
        layers += [linear(size, width, generator=generator, gain=math.sqrt(3)), nn.Tanh()]
        size = width
    # Small outputs at first: no action is preferred before learning.
    layers.append(linear(size, outputs, generator=generator, gain=0.1))
    return nn.Sequential(*layers)


class ActorCriticNetwork(nn.Module):
    """Two networks side by side: the outputs of ``actor``, then the one of ``critic``, the value."""

    #: Not needed for acting.
    non_inference_attributes: tuple[str, ...] = ("critic",)

    def __init__(self, actor: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.actor: nn.Module = actor
        self.critic: nn.Module = critic

    def forward(self, obs: Any) -> torch.Tensor:
        """``obs``: as both networks take it. Returns (N, outputs + 1)."""
        return torch.cat([self.actor(obs), self.critic(obs)], -1)


def actor_critic(
    observation_space: gym.Space[Any],
    *,
    outputs: int,
    hidden: Sequence[int],
    generator: torch.Generator,
) -> ActorCriticNetwork:
    """Two perceptrons that share nothing: ``outputs`` - 1 numbers for actions, and the value; see `mlp`."""
    actor = mlp(observation_space, outputs=outputs - 1, hidden=hidden, generator=generator)
    critic = mlp(observation_space, outputs=1, hidden=hidden, generator=generator)
    return ActorCriticNetwork(actor, critic)


class GRUNetwork(nn.Module):
    """A recurrent network: a layer and a GRU from observations to outputs.

    Its state is one tensor, (B, ``size``).

    Args:
        observation_space: Space of one environment.
        outputs: Numbers for each step.
        size: Size of the layer and of the state.
        generator: Decides the weights, and the device.
    """

    def __init__(
        self, observation_space: gym.Space[Any], *, outputs: int, size: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.size = size
        self.flatten: Flatten = Flatten(observation_space)
        self.read: nn.Linear = linear(self.flatten.size, size, generator=generator, gain=math.sqrt(3))
        # As in `linear`: torch's global generator is not used.
        self.memory: nn.GRU = nn.GRU(size, size, batch_first=True, device="meta").to_empty(
            device=generator.device
        )
        bound = 1.0 / math.sqrt(size)
        with torch.no_grad():
            for parameter in self.memory.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
        self.write: nn.Linear = linear(size, outputs, generator=generator, gain=0.1)

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor]:
        """Zeros, (batch_size, size)."""
        return (self.write.weight.new_zeros(batch_size, self.size),)

    def forward(
        self, obs: Any, state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """``obs``: (B, T, ...), nested as the space; ``state``: (B, size). Returns (B, T, outputs), state."""
        (before,) = state
        rows = self.flatten(map_structure(lambda leaf: leaf.flatten(0, 1), obs))
        read = self.read(rows).tanh().reshape(len(before), -1, self.size)
        steps, after = self.memory(read, before[None].contiguous())
        return self.write(steps), (after[0],)


def gru(observation_space: gym.Space[Any], outputs: int, generator: torch.Generator) -> GRUNetwork:
    """A `GRUNetwork` of size 64, in the form that `TorchPolicy` takes: ``TorchPolicy(gru)``."""
    return GRUNetwork(observation_space, outputs=outputs, size=64, generator=generator)
