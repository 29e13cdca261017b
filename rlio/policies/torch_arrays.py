"""Converts modules and optimizers to arrays by name, and back.

Example:
    >>> import torch
    >>> sorted(arrays_of(torch.nn.Linear(2, 1)))
    ['bias', 'weight']
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.errors import StateError, excerpt
from rlio.policies.weights import Weights

if TYPE_CHECKING:
    import torch

__all__ = ["arrays_of", "load_arrays", "load_gradients", "state_of", "state_to", "writable"]


def writable(leaf: NDArray[Any]) -> NDArray[Any]:
    """``leaf``, or a copy if it is read-only, because torch would warn."""
    return leaf if leaf.flags.writeable else leaf.copy()


def arrays_of(module: torch.nn.Module, *, without: Collection[str] = ()) -> Weights:
    """Copies of the parameters and buffers of ``module``, by name.

    Args:
        module: The module.
        without: Names of submodules to leave out.
    """
    prefixes = tuple(f"{name}." for name in without)
    return {
        name: value.detach().cpu().numpy().copy()
        for name, value in module.state_dict().items()
        if not name.startswith(prefixes)
    }


def load_arrays(
    module: torch.nn.Module, weights: Mapping[str, NDArray[Any]], what: str, *, without: Collection[str] = ()
) -> None:
    """Copy ``weights`` into ``module``.

    Args:
        module: The module.
        weights: By name: all of them, or those of `arrays_of` ``without`` some submodules.
        what: Name of the weights in messages.
        without: See ``weights``.

    Raises:
        StateError: Names or shapes differ from the module's; nothing is copied.
    """
    import torch

    own = module.state_dict()
    prefixes = tuple(f"{name}." for name in without)
    fewer = {name for name in own if not name.startswith(prefixes)}
    if weights.keys() not in (own.keys(), fewer):
        raise StateError(
            f"the {what} are {excerpt(sorted(weights))}, but the module has {excerpt(sorted(own))}: they "
            "belong to another module"
        )
    _check_shapes(weights, own, what)
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(torch.as_tensor(np.array(value)))


def load_gradients(
    parameters: Mapping[str, torch.nn.Parameter], gradients: Mapping[str, NDArray[Any]]
) -> None:
    """Make ``gradients`` the gradients of the parameters of the same names.

    Raises:
        StateError: Names or shapes differ; nothing is changed.
    """
    import torch

    if parameters.keys() != gradients.keys():
        raise StateError(
            f"the gradients are {excerpt(sorted(gradients))}, but the learned parameters are "
            f"{excerpt(sorted(parameters))}: they belong to another module"
        )
    _check_shapes(gradients, parameters, "gradients")
    for name, parameter in parameters.items():
        given = torch.as_tensor(np.array(gradients[name]), dtype=parameter.dtype)
        parameter.grad = given.to(parameter.device)


def _check_shapes(given: Mapping[str, NDArray[Any]], own: Mapping[str, torch.Tensor], what: str) -> None:
    for name, value in given.items():
        if tuple(own[name].shape) != np.shape(value):
            raise StateError(
                f"{what} {excerpt(name)} have the shape {np.shape(value)}, "
                f"the module's {tuple(own[name].shape)}"
            )


def state_of(value: Any) -> Any:
    """An optimizer's state, with arrays instead of tensors and strings as keys."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy().copy()
    if isinstance(value, dict):
        return {str(key): state_of(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [state_of(part) for part in value]
    return value


def state_to(value: Any) -> Any:
    """The inverse of `state_of`: numbers of parameters become int keys again."""
    import torch

    if isinstance(value, np.ndarray):
        return torch.as_tensor(value.copy())
    if isinstance(value, dict):
        return {int(key) if key.isdigit() else key: state_to(part) for key, part in value.items()}
    if isinstance(value, list):
        return [state_to(part) for part in value]
    return value
