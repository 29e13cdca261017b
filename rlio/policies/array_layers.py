"""Computes small layers for a few rows in NumPy: calling torch takes several times as long as the work.

The arrays are views of the parameters' memory, so they change as the module learns.

Example:
    >>> from gymnasium.spaces import Box
    >>> from rlio.policies.networks import mlp
    >>> module = mlp(Box(-1.0, 1.0, (4,)), outputs=2, hidden=[8], generator=torch.Generator())
    >>> rows = np.ones((3, 4), np.float32)
    >>> np.allclose(outputs_in_numpy(module, rows), module(torch.from_numpy(rows)).detach(), atol=1e-6)
    True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rlio.policies.networks import ActorCriticNetwork, Flatten

__all__ = ["outputs_in_numpy"]

# Weights (inputs, outputs) and biases of a linear layer; None stands for tanh.
_Layer: TypeAlias = "tuple[NDArray[np.float32], NDArray[np.float32] | None] | None"

# Total multiplications above which torch is faster, because it uses the processor better.
_SMALL: Final = 1 << 20


@dataclass(frozen=True)
class _Known:
    """The layers of a module, valid while its parameters stay in the same memory.

    Attributes:
        addresses: Addresses of the parameters. The arrays keep this memory from being reused.
        weights: Count of numbers in all parameters.
        layers: None if NumPy cannot compute the module.
    """

    addresses: list[int]
    weights: int
    layers: list[_Layer] | None


# Not an attribute of the module, because copies of the module have other parameters.
_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def outputs_in_numpy(module: nn.Module, obs: Any) -> NDArray[np.float32] | None:
    """Compute a network of `rlio.policies.networks` for a few observations, equal up to rounding.

    Args:
        module: Any module.
        obs: An array of (N, inputs), or another input of the module.

    Returns:
        (N, outputs), new memory; None if torch must do it: other modules and observations, layers other than
        linear and tanh, hooks, parameters on other devices or of types other than float32, large work.
    """
    if _is_hooked(module):
        return None
    if type(module) is ActorCriticNetwork:
        parts = [outputs_in_numpy(part, obs) for part in (module.actor, module.critic)]
        found = [part for part in parts if part is not None]
        return np.concatenate(found, axis=1) if len(found) == len(parts) else None
    if type(module) is not nn.Sequential:
        return None
    flatten, *layers = module
    if type(flatten) is not Flatten or not flatten.is_flat or _is_hooked(flatten):
        return None
    if type(obs) is not np.ndarray or obs.dtype != np.float32 or obs.ndim != 2:
        return None
    addresses: list[int] = []
    for layer in layers:
        if layer._forward_hooks or layer._forward_pre_hooks:
            return None
        addresses += [part.data_ptr() for part in layer._parameters.values() if part is not None]
    known = _known.get(module)
    if known is None or known.addresses != addresses:
        known = _known[module] = _Known(addresses, *_arrays(layers))
    if known.layers is None or len(obs) * known.weights > _SMALL:
        return None
    values: NDArray[np.float32] = obs
    for arrays in known.layers:
        if arrays is None:
            values = np.tanh(values)
            continue
        weight, bias = arrays
        values = values @ weight
        if bias is not None:
            values += bias
    return values


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _arrays(layers: Sequence[nn.Module]) -> tuple[int, list[_Layer] | None]:
    """The values of `_Known.weights` and `_Known.layers`."""
    found: list[_Layer] = []
    for layer in layers:
        if type(layer) is nn.Tanh:
            found.append(None)
            continue
        parts: Any = layer._parameters
        if type(layer) is not nn.Linear or any(
            part is not None and (part.dtype != torch.float32 or part.device.type != "cpu")
            for part in parts.values()
        ):
            return 0, None
        bias = parts["bias"]
        found.append((parts["weight"].detach().numpy().T, None if bias is None else bias.detach().numpy()))
    return sum(layer[0].size for layer in found if layer is not None), found
