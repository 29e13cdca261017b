"""Distributions over actions, made from a module's outputs, one kind for each action space.

Discrete, MultiDiscrete: categorical, one output (a logit) for each choice. MultiBinary: Bernoulli, one logit
for each bit. Box: diagonal Gaussian, first the means, then the logs of the standard deviations. Dict and
Tuple: the outputs of their parts in order; parts are drawn independently.

Example:
    >>> import torch
    >>> from gymnasium.spaces import Discrete
    >>> choice = distribution_for(Discrete(2))
    >>> choice.logp(torch.zeros(1, 2), torch.tensor([1])).exp()
    tensor([0.5000])
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.nested import Path, unflatten
from rlio.envs.leaves import leaf_of, leaves_of
from rlio.errors import OptionError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym
    import torch

__all__ = ["Distribution", "distribution_for"]

# Bounds of log standard deviations: beyond them, such as e^-20 or e^10, the numbers have gone wrong.
_LOG_STD = (-10.0, 4.0)


class Distribution(ABC):
    """Draws actions of a space from a module's outputs. Actions are tensors nested like the space.

    Attributes:
        size: Outputs for one action.
    """

    size: int

    @abstractmethod
    def sample(self, outputs: torch.Tensor, generator: torch.Generator | None) -> Any:
        """Draw an action for each row of ``outputs``, (N, size); without a generator, the most likely one."""

    def draw(self, outputs: torch.Tensor, generator: torch.Generator | None) -> tuple[Any, torch.Tensor]:
        """`sample`, and `logp` of the drawn actions."""
        actions = self.sample(outputs, generator)
        return actions, self.logp(outputs, actions)

    def draw_few(
        self, outputs: NDArray[np.float32], generator: torch.Generator
    ) -> tuple[NDArray[Any], NDArray[np.float32]] | None:
        """`draw` for a few rows in NumPy: calling torch takes longer than the work. None: use torch."""
        return None

    @abstractmethod
    def logp(self, outputs: torch.Tensor, actions: Any) -> torch.Tensor:
        """Log of the probability (density) of ``actions``, shape (N,)."""

    @abstractmethod
    def entropy(self, outputs: torch.Tensor) -> torch.Tensor:
        """Entropy in nats, shape (N,)."""


def distribution_for(space: gym.Space[Any]) -> Distribution:
    """The distribution for actions of ``space``.

    Raises:
        OptionError: No distribution supports the space.
    """
    leaves = leaves_of(space)
    parts = [_distribution_for(leaf.space) for leaf in leaves]
    paths = [leaf.path for leaf in leaves]
    return parts[0] if paths == [()] else _Composite(parts, paths)


def _distribution_for(space: gym.Space[Any]) -> Distribution:
    """The distribution of a space that is one leaf."""
    from gymnasium import spaces

    match space:
        case spaces.Discrete():
            return _Categorical([int(space.n)], (), int(space.start))
        case spaces.MultiDiscrete():
            return _Categorical(space.nvec.ravel().tolist(), space.shape, space.start)
        case spaces.MultiBinary():
            return _Bernoulli(space.shape)
        case spaces.Box() if space.dtype is not None and space.dtype.kind == "f":
            return _Gaussian(space.shape)
    raise OptionError(
        f"there is no distribution for actions of {excerpt(str(space))}: expected Discrete, MultiDiscrete, "
        "MultiBinary, floating-point Box, or Dict and Tuple of them"
    )


class _Categorical(Distribution):
    def __init__(self, choices: Sequence[int], shape: tuple[int, ...], start: Any) -> None:
        self.size = sum(choices)
        self._choices = list(choices)
        self._shape = shape
        self._start = np.broadcast_to(np.asarray(start, np.int64), shape or ()).ravel().tolist()

    def _parts(self, outputs: torch.Tensor) -> Sequence[torch.Tensor]:
        import torch

        return torch.split(outputs, self._choices, dim=-1) if len(self._choices) > 1 else [outputs]

    def sample(self, outputs: torch.Tensor, generator: torch.Generator | None) -> Any:
        import torch

        drawn = []
        for logits, start in zip(self._parts(outputs), self._start, strict=True):
            if generator is None:
                drawn.append(logits.argmax(-1) + start)
            else:
                drawn.append(_choose(logits.softmax(-1), generator)[:, 0] + start)
        return drawn[0] if not self._shape else torch.stack(drawn, -1).reshape(-1, *self._shape)

    def draw(self, outputs: torch.Tensor, generator: torch.Generator | None) -> tuple[Any, torch.Tensor]:
        if self._shape or generator is None:
            return super().draw(outputs, generator)
        # The common case, in half the calls: for a single choice, one softmax serves both results.
        logs = outputs.log_softmax(-1)
        drawn = _choose(logs.exp(), generator)
        start, actions = self._start[0], drawn[:, 0]
        return actions + start if start else actions, logs.gather(-1, drawn)[:, 0]

    def draw_few(
        self, outputs: NDArray[np.float32], generator: torch.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        import torch

        if self._shape:
            return None
        # As `_choose`; subtracting the largest logit first avoids overflow.
        times = torch.empty(outputs.shape).exponential_(generator=generator).numpy()
        with np.errstate(all="ignore"):  # Values that are not finite become NaN, as in torch.
            logs = outputs - np.maximum.reduce(outputs, axis=1, keepdims=True)
            likely = np.exp(logs)
            total = np.add.reduce(likely, axis=1)
            drawn = np.divide(likely, times, out=times).argmax(axis=1)
            logp = logs[np.arange(len(logs)), drawn] - np.log(total)
        return drawn + self._start[0] if self._start[0] else drawn, logp

    def logp(self, outputs: torch.Tensor, actions: Any) -> torch.Tensor:
        import torch

        columns = actions.reshape(len(outputs), -1).long()
        parts = [
            logits.log_softmax(-1).gather(-1, columns[:, i : i + 1] - start)[:, 0]
            for i, (logits, start) in enumerate(zip(self._parts(outputs), self._start, strict=True))
        ]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def entropy(self, outputs: torch.Tensor) -> torch.Tensor:
        import torch

        logs = [logits.log_softmax(-1) for logits in self._parts(outputs)]
        return torch.stack([-(log.exp() * log).sum(-1) for log in logs]).sum(0)


def _choose(probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw a choice for each row of ``probabilities``, (N, choices): (N, 1) int64.

    Gives the numbers of `torch.multinomial`, which takes three times as long for 16 rows, because it checks
    each probability first.

    Source: the first of exponential variables with these rates is number i with probability i.
    """
    import torch

    times = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / times).argmax(-1, keepdim=True)


class _Bernoulli(Distribution):
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.size = math.prod(shape)
        self._shape = shape

    def sample(self, outputs: torch.Tensor, generator: torch.Generator | None) -> Any:
        import torch

        probabilities = outputs.sigmoid()
        if generator is None:
            bits = probabilities > 0.5
        else:
            bits = torch.empty_like(probabilities).uniform_(generator=generator) < probabilities
        return bits.to(torch.int8).reshape(-1, *self._shape)

    def logp(self, outputs: torch.Tensor, actions: Any) -> torch.Tensor:
        import torch

        bits = actions.reshape(len(outputs), -1).to(outputs.dtype)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(outputs, bits, reduction="none")
        return -losses.sum(-1)

    def entropy(self, outputs: torch.Tensor) -> torch.Tensor:
        import torch

        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            outputs, outputs.sigmoid(), reduction="none"
        )
        return losses.sum(-1)


class _Gaussian(Distribution):
    def __init__(self, shape: tuple[int, ...]) -> None:
        self._numbers = math.prod(shape)
        self.size = 2 * self._numbers
        self._shape = shape

    def _moments(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = outputs[:, : self._numbers], outputs[:, self._numbers :]
        return mean, log_std.clamp(*_LOG_STD)

    def sample(self, outputs: torch.Tensor, generator: torch.Generator | None) -> Any:
        import torch

        mean, log_std = self._moments(outputs)
        if generator is not None:
            noise = torch.empty_like(mean).normal_(generator=generator)
            mean = mean + log_std.exp() * noise
        return mean.reshape(-1, *self._shape)

    def logp(self, outputs: torch.Tensor, actions: Any) -> torch.Tensor:
        mean, log_std = self._moments(outputs)
        deviation: torch.Tensor = (actions.reshape(len(outputs), -1) - mean) / log_std.exp()
        return -(0.5 * deviation**2 + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, outputs: torch.Tensor) -> torch.Tensor:
        _, log_std = self._moments(outputs)
        return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


class _Composite(Distribution):
    def __init__(self, parts: Sequence[Distribution], paths: Sequence[Path]) -> None:
        self.size = sum(part.size for part in parts)
        self._parts, self._paths = parts, paths

    def _split(self, outputs: torch.Tensor) -> Iterable[tuple[Distribution, torch.Tensor]]:
        import torch

        return zip(self._parts, torch.split(outputs, [part.size for part in self._parts], -1), strict=True)

    def sample(self, outputs: torch.Tensor, generator: torch.Generator | None) -> Any:
        drawn = [part.sample(piece, generator) for part, piece in self._split(outputs)]
        return unflatten(self._paths, drawn)

    def logp(self, outputs: torch.Tensor, actions: Any) -> torch.Tensor:
        import torch

        taken = [leaf_of(actions, path) for path in self._paths]
        pairs = zip(self._split(outputs), taken, strict=True)
        return torch.stack([part.logp(piece, leaf) for (part, piece), leaf in pairs]).sum(0)

    def entropy(self, outputs: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.stack([part.entropy(piece) for part, piece in self._split(outputs)]).sum(0)
