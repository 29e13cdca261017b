"""Functions and classes as text, ``module:name``: how they travel in states and checkpoints.

Reading such a name imports the module: load states only from where you would run code from.

Example:
    >>> import math
    >>> callable_name(math.sqrt)
    'math:sqrt'
    >>> load_callable("math:sqrt")(9.0)
    3.0
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from rlio.errors import OptionError, excerpt

__all__ = ["callable_name", "load_callable"]


def callable_name(value: Callable[..., Any]) -> str:
    """``module:name`` of a function or class that can be imported.

    Raises:
        OptionError: It cannot be: it is a lambda, was made inside a function, is an object, or belongs to
            ``__main__``, which is another module elsewhere.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None or "<" in name or module == "__main__":
        raise OptionError(
            f"{excerpt(value)} has no name that it could be imported by: "
            "define it at the top of a module, and give it, or its 'module:name'"
        )
    text = f"{module}:{name}"
    if load_callable(text) is not value:
        raise OptionError(f"{excerpt(value)} says it is {text}, but that is another object: give it a name")
    return text


def load_callable(name: str) -> Callable[..., Any]:
    """What `callable_name` named.

    Raises:
        OptionError: There is no such module, or no such thing in it, or it cannot be called.
    """
    module, _, path = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not all(part.isidentifier() for part in [*module.split("."), *path.split(".")]):
        raise OptionError(f"{excerpt(name)} is no name of a function or class: expected 'module:name'")
    try:
        value: Any = import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"there is no {name}: {error}") from error
    if not callable(value):
        raise OptionError(f"{name} is {excerpt(value)}: expected a function or class")
    return value  # type: ignore[no-any-return] # whatever has this name; checked to be callable
