"""The network that torch policies use when they are given none: a multilayer perceptron over any observation.

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
from torch import nn

from rlio.errors import OptionError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["Flatten", "linear", "mlp"]


class Flatten(nn.Module):
    """Observations as rows of float32: numbers as they are, choices one-hot, Dict and Tuple side by side.

    Attributes:
        size: Numbers of a row.

    Raises:
        OptionError: A space has no numbers of a fixed count (Text, Sequence, Graph, OneOf).
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        self._space = space
        self.size = _flat_size(space)

    def forward(self, obs: Any) -> torch.Tensor:
        """``obs``: tensors of (N, *shape), nested as the space. Returns (N, size) float32."""
        parts = _flat(self._space, obs)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _flat_size(space: gym.Space[Any]) -> int:
    from gymnasium import spaces

    match space:
        case spaces.Box() | spaces.MultiBinary():
            return math.prod(space.shape)
        case spaces.Discrete():
            return int(space.n)
        case spaces.MultiDiscrete():
            return int(space.nvec.sum())
        case spaces.Dict():
            return sum(_flat_size(child) for child in space.spaces.values())
        case spaces.Tuple():
            return sum(_flat_size(child) for child in space.spaces)
    raise OptionError(
        f"the default network cannot read observations of {excerpt(str(space))}: pass a module that can"
    )


def _flat(space: gym.Space[Any], obs: Any) -> list[torch.Tensor]:
    from gymnasium import spaces

    match space:
        case spaces.Discrete():
            return [nn.functional.one_hot(obs.long() - int(space.start), int(space.n)).float()]
        case spaces.MultiDiscrete():
            chosen = obs.reshape(len(obs), -1).long()
            starts, sizes = space.start.ravel().tolist(), space.nvec.ravel().tolist()
            return [
                nn.functional.one_hot(chosen[:, i] - start, size).float()
                for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
            ]
        case spaces.Dict():
            return [part for key, child in space.spaces.items() for part in _flat(child, obs[key])]
        case spaces.Tuple():
            return [part for i, child in enumerate(space.spaces) for part in _flat(child, obs[i])]
    return [obs.reshape(len(obs), -1).float()]


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
    size = _flat_size(observation_space)
    for width in hidden:
        layers += [linear(size, width, generator=generator, gain=math.sqrt(3)), nn.Tanh()]
        size = width
    # Small outputs at first: no action is preferred before anything was learned.
    layers.append(linear(size, outputs, generator=generator, gain=0.1))
    return nn.Sequential(*layers)
