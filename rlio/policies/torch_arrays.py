"""Converts modules and optimizers to arrays by name, and back.

Example:
    >>> import torch
    >>> sorted(arrays_of(torch.nn.Linear(2, 1)))
    ['bias', 'weight']
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.errors import StateError, excerpt
from rlio.policies.weights import Weights
from rlio.support.states import fitting

if TYPE_CHECKING:
    import torch

__all__ = [
    "arrays_of",
    "is_optimizer",
    "load_arrays",
    "load_gradients",
    "load_optimizer",
    "state_of",
    "state_to",
    "writable",
]


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
    with torch.no_grad(), fitting(f"the {what}"):
        given = {name: torch.as_tensor(np.array(value)) for name, value in weights.items()}
        for name, value in given.items():
            if value.is_complex() and not own[name].is_complex():
                raise StateError(f"{what} {excerpt(name)} are complex, the module's are not")
        for name, value in given.items():
            own[name].copy_(value)


# What torch's optimizers keep for each element of a parameter; others keep more, in shapes of their own.
_MOMENTS: Final = frozenset(
    (
        *("acc_delta", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer"),
        *("prev", "square_avg", "step_size", "sum"),
    )
)


def is_optimizer(value: object) -> bool:
    """Whether ``value`` is an optimizer of torch, without importing torch."""
    optimizers = getattr(sys.modules.get("torch"), "optim", None)
    return optimizers is not None and isinstance(value, optimizers.Optimizer)


def load_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Give ``optimizer`` a state of `torch.optim.Optimizer.state_dict`.

    torch itself takes a state for parameters of other shapes, and fails at a later step.

    Raises:
        StateError: The state is of another optimizer or of other parameters; nothing is changed.
    """
    with fitting("the optimizer's state"):
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if len(set(numbers)) != len(parameters) or any(type(number) is not int for number in numbers):
            raise StateError(
                f"the optimizer's state is of the parameters {excerpt(numbers)}, but it has {len(parameters)}"
            )
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state["state"].get(number, {}).items():
                _check_kept(name, value, parameter)
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
            for name in saved.keys() & group.keys() - {"params"}:
                if not _is_alike(saved[name], group[name]):
                    raise StateError(
                        f"the optimizer's {excerpt(name)} is {excerpt(saved[name])} in the state, and "
                        f"{excerpt(group[name])} here"
                    )
        optimizer.load_state_dict(state)


def _check_kept(name: str, value: Any, parameter: torch.Tensor) -> None:
    """Check what an optimizer keeps for a parameter, as far as torch's own optimizers tell."""
    import torch

    if name == "step" and (isinstance(value, (bool, str)) or float(value) < 0.0):
        raise StateError(f"the optimizer's step is {excerpt(value)}: expected a number of steps")
    if name not in _MOMENTS or (value is None and name == "momentum_buffer"):
        return
    found = tuple(value.shape) if isinstance(value, torch.Tensor) else None
    if found != tuple(parameter.shape):
        raise StateError(
            f"the optimizer's {name} is {excerpt(value) if found is None else f'of shape {found}'}: expected "
            f"shape {tuple(parameter.shape)}, that of the parameter"
        )


def _is_alike(saved: Any, own: Any) -> bool:
    """Whether an option of an optimizer has the type that it has here. None stands for a choice of torch."""
    import torch

    if isinstance(own, (list, tuple)):
        return isinstance(saved, (list, tuple)) and len(saved) == len(own) and all(map(_is_alike, saved, own))
    if own is None or saved is None or isinstance(own, bool) or isinstance(saved, bool):
        return all(value is None or isinstance(value, bool) for value in (saved, own))
    if isinstance(saved, int) and abs(saved) >= 2**63:
        return False  # torch fails at a later step.
    numbers = int, float, torch.Tensor
    return isinstance(saved, type(own)) or (isinstance(saved, numbers) and isinstance(own, numbers))


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
