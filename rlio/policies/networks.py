"""Networks over any observation: those that torch policies use when they are given none, and a recurrent one.

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
    """Observations as rows of float32: numbers as they are, choices one-hot, Dict and Tuple side by side.

    Attributes:
        size: Numbers of a row.
        is_flat: Whether observations are rows of numbers already.

    Raises:
        OptionError: A space has no numbers of a fixed count (Text, Sequence, Graph, OneOf).
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        self._leaves = [(leaf.path, _choices(leaf)) for leaf in leaves_of(space)]
        self.size = flatdim(space)
        self.is_flat = len(self._leaves) == 1 and self._leaves[0] == ((), None)

    def forward(self, obs: Any) -> torch.Tensor:
        """``obs``: tensors of (N, *shape), nested as the space. Returns (N, size) float32."""
        if self.is_flat and obs.dim() == 2 and obs.dtype == torch.float32:
            return obs  # type: ignore[no-any-return] # the usual case: a tensor, with nothing to do at each step
        parts = [_flat(leaf_of(obs, path), choices) for path, choices in self._leaves]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _choices(leaf: Leaf) -> list[tuple[int, int]] | None:
    """(Start, number) of each choice in a Discrete or MultiDiscrete space; None in one of numbers.

    Raises:
        OptionError: It is neither.
    """
    from gymnasium import spaces

    match leaf.space:
        case spaces.Box() | spaces.MultiBinary():
            return None
        case spaces.Discrete() as space:
            return [(int(space.start), int(space.n))]
        case spaces.MultiDiscrete() as space:
            return list(zip(space.start.ravel().tolist(), space.nvec.ravel().tolist(), strict=True))
    raise OptionError(
        f"the default network cannot read observations of {excerpt(str(leaf.space))}: pass a module that can"
    )


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
        observation_space: Of one environment.
        outputs: Numbers a row.
        hidden: Sizes of the layers between.
        generator: Decides the weights, and the device.
    """
    layers: list[nn.Module] = [Flatten(observation_space)]
    size = flatdim(observation_space)
    for width in hidden:
        layers += [linear(size, width, generator=generator, gain=math.sqrt(3)), nn.Tanh()]
        size = width
    # Small outputs at first: no action is preferred before anything was learned.
    layers.append(linear(size, outputs, generator=generator, gain=0.1))
    return nn.Sequential(*layers)


class ActorCriticNetwork(nn.Module):
    """Two networks side by side: outputs of ``actor`` and then the one of ``critic``, the value."""

    #: Acting does without it.
    non_inference_attributes = ("critic",)

    def __init__(self, actor: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic

    def forward(self, obs: Any) -> torch.Tensor:
        """``obs``: as the two take it. Returns (N, outputs + 1)."""
        return torch.cat([self.actor(obs), self.critic(obs)], -1)


def actor_critic(
    observation_space: gym.Space[Any],
    *,
    outputs: int,
    hidden: Sequence[int],
    generator: torch.Generator,
) -> ActorCriticNetwork:
    """Two perceptrons, with nothing shared: ``outputs`` - 1 numbers for actions, and the value; see `mlp`."""
    actor = mlp(observation_space, outputs=outputs - 1, hidden=hidden, generator=generator)
    critic = mlp(observation_space, outputs=1, hidden=hidden, generator=generator)
    return ActorCriticNetwork(actor, critic)


class GRUNetwork(nn.Module):
    """A recurrent network: observations through a layer and a GRU to outputs.

    Its state is one tensor, (B, ``size``).

    Args:
        observation_space: Of one environment.
        outputs: Numbers a step.
        size: Of the layer and of the state.
        generator: Decides the weights, and the device.
    """

    def __init__(
        self, observation_space: gym.Space[Any], *, outputs: int, size: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.size = size
        self.flatten = Flatten(observation_space)
        self.read = linear(self.flatten.size, size, generator=generator, gain=math.sqrt(3))
        # As in `linear`: no number is drawn from torch's global generator.
        self.memory = nn.GRU(size, size, batch_first=True, device="meta").to_empty(device=generator.device)
        bound = 1.0 / math.sqrt(size)
        with torch.no_grad():
            for parameter in self.memory.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
        self.write = linear(size, outputs, generator=generator, gain=0.1)

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
