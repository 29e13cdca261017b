"""`own_copy`: a copy of a value that shares no memory with it.

Environments reuse what they return and change what they receive. Recorders and runners therefore keep copies
of observations, actions and infos. This module is the one place that makes them.

Example:
    >>> info = {"lives": 3, "scores": np.zeros(2)}
    >>> kept = own_copy(info)
    >>> info["scores"][:] = 9
    >>> kept["scores"].tolist()
    [0.0, 0.0]
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlio.errors import SchemaError

__all__ = ["own_copy"]

# Most values of an info are of these types, which cannot change.
_UNCHANGING = frozenset({bool, int, float, complex, str, bytes, type(None), *np.sctypeDict.values()})
_UNCHANGING -= {np.void, np.object_}


def own_copy(value: Any) -> Any:
    """A copy of ``value`` that later changes of ``value`` do not reach.

    Copies arrays, tensors, and Python's containers at any depth, and keeps their types: a named tuple stays
    one. Objects of other classes are not copied, because they may be large (an info may name its environment)
    or impossible to copy.

    Raises:
        SchemaError: ``value`` contains itself, or is nested too deeply for Python.
    """
    if type(value) is np.ndarray and value.dtype.kind != "O":  # At each step: without further calls.
        return value.copy(order="K")
    try:
        return _copied(value)
    except RecursionError as error:
        raise SchemaError(
            f"a {type(value).__name__} is nested too deeply, or contains itself: it cannot be kept"
        ) from error


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if kind is dict:
        return {key: part if type(part) in _UNCHANGING else _copied(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return _copied_array(value)
    if kind is list:
        return [part if type(part) in _UNCHANGING else _copied(part) for part in value]
    if isinstance(value, tuple):
        parts = [_copied(part) for part in value]
        if kind is tuple:
            return tuple(parts)
        if hasattr(kind, "_make"):
            return kind._make(parts)
        try:
            return tuple.__new__(kind, parts)
        except TypeError:  # A class written in C, such as torch.Size.
            return kind(parts)
    return _copied_other(value)


def _copied_array(value: np.ndarray[Any, Any]) -> Any:
    if value.dtype != object:
        return value.copy(order="K")
    made = np.empty(value.shape, object)
    # By index into one axis: NumPy would spread an array over several elements otherwise.
    flat, given = made.reshape(-1), value.reshape(-1)
    for at in range(len(flat)):
        flat[at] = _copied(given[at])
    return made


def _copied_other(value: Any) -> Any:
    """A copy of a tensor, or of a container that is seldom part of an info."""
    if isinstance(value, (np.void, set, bytearray)):
        return value.copy()
    if hasattr(value, "detach"):  # torch is not imported for this.
        return value.detach().clone()
    if isinstance(value, (dict, list, deque)):
        made = copy.copy(value)
        for key in made if isinstance(made, dict) else range(len(made)):
            made[key] = _copied(made[key])
        return made
    if isinstance(value, Mapping):  # A view of a dict that its owner changes, such as a MappingProxyType.
        return {key: _copied(part) for key, part in value.items()}
    return value
