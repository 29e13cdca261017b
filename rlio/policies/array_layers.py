"""A few rows through small layers, in NumPy: calling torch for them takes several times as long as the work.

The arrays are views of the parameters' own memory, so that they learn with the module.

Example:
    >>> layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> rows = np.ones((3, 4), np.float32)
    >>> found = through_arrays(layers, list(layers), rows)
    >>> np.allclose(found, layers(torch.from_numpy(rows)).detach(), atol=1e-6)
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

__all__ = ["through_arrays"]

# Weights (inputs, outputs) and biases of a linear layer; None: tanh.
_Layer: TypeAlias = "tuple[NDArray[np.float32], NDArray[np.float32] | None] | None"

# Multiplications in all, beyond which torch is the quicker one, as it knows more of the processor.
_SMALL: Final = 1 << 20


@dataclass(frozen=True)
class _Known:
    """The layers of a module, while its parameters stay where they are.

    Attributes:
        addresses: Of the parameters; the arrays keep that memory from being given to others.
        weights: Numbers in all parameters.
        layers: None where NumPy cannot do it.
    """

    addresses: list[int]
    weights: int
    layers: list[_Layer] | None


# Not an attribute of the module: copies of it have parameters of their own.
_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def through_arrays(
    owner: nn.Module, layers: Sequence[nn.Module], rows: NDArray[np.float32]
) -> NDArray[np.float32] | None:
    """What ``layers`` make of ``rows``, but for rounding.

    Args:
        owner: The module whose layers they are, always the same ones.
        layers: Each called on what the one before it returned.
        rows: (N, inputs).

    Returns:
        (N, outputs), fresh; None where torch has to do it: layers other than linear ones and tanh, layers
        with hooks, parameters on other devices or of types other than float32, and much work.
    """
    addresses: list[int] = []
    for layer in layers:
        if layer._forward_hooks or layer._forward_pre_hooks:
            return None
        addresses += [part.data_ptr() for part in layer._parameters.values() if part is not None]
    known = _known.get(owner)
    if known is None or known.addresses != addresses:
        known = _known[owner] = _Known(addresses, *_arrays(layers))
    if known.layers is None or len(rows) * known.weights > _SMALL:
        return None
    values = rows
    for arrays in known.layers:
        if arrays is None:
            values = np.tanh(values)
            continue
        weight, bias = arrays
        values = values @ weight
        if bias is not None:
            values += bias
    return values


def _arrays(layers: Sequence[nn.Module]) -> tuple[int, list[_Layer] | None]:
    """`_Known.weights` and `_Known.layers`."""
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
