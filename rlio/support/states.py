"""Checks of values in saved states, which may come from anywhere: each error is a StateError with the place.

A value must have the type that was saved: a float or text in the place of a whole number is refused, even
where Python would convert it, because a state that is wrong in one place is probably wrong in others.

Example:
    >>> whole_number({"epoch": 3}, "epoch")
    3
    >>> whole_number({"epoch": 1.5}, "epoch")
    Traceback (most recent call last):
    ...
    rlio.errors.StateError: state['position']['epoch'] is 1.5: expected a whole number, 0 or more; ...
    >>> with fitting("the state"):
    ...     {}["epoch"]
    Traceback (most recent call last):
    ...
    rlio.errors.StateError: the state lacks a value, or has an unexpected one: KeyError: "'epoch'"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from rlio.errors import RlioError, StateError, excerpt

__all__ = [
    "fitting",
    "flag_in",
    "restore_generator",
    "seed_in",
    "text_in",
    "value_in",
    "whole_number",
    "whole_numbers",
]

#: Where most values are.
_POSITION: Final = "state['position']"
#: Counters become NumPy's int64, and are added to.
_MOST: Final = 2**62
_NAMES: Final = {
    dict: "a dict",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a whole number",
    np.ndarray: "an array",
}
# Numbers in the states of NumPy's generators that index an array there, which NumPy does not check.
_MOST_IN_GENERATORS: Final = {"has_uint32": 1, "uinteger": 2**32 - 1, "buffer_pos": 4, "pos": 624}
# Errors of code that finds another type or value than it expects. RuntimeError: torch's.
_UNEXPECTED: Final = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """Turn the errors of code that takes an unexpected value for a state into StateErrors.

    Also a decorator.

    Args:
        what: Name of the state in the message.
    """
    try:
        yield
    except RlioError:
        raise
    except _UNEXPECTED as error:
        raise StateError(
            f"{what} lacks a value, or has an unexpected one: {type(error).__name__}: {excerpt(str(error))}"
        ) from error


def value_in(state: Any, key: str, kind: type, *, of: str = _POSITION) -> Any:
    """``state[key]``, checked to be a ``kind``; a bool is no int.

    Args:
        state: Expected to be a mapping.
        key: The key.
        kind: dict, list, str, bool or int.
        of: The state in messages, as an expression or a noun.

    Raises:
        StateError: It is absent, or of another type.
    """
    value = state.get(key) if isinstance(state, Mapping) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _unlike(key, value, _NAMES[kind], of)
    return value


def _unlike(key: str, value: Any, expected: str, of: str) -> StateError:
    if of.startswith("state"):
        return StateError(f"{of}[{excerpt(key)}] is {excerpt(value)}: expected {expected}")
    return StateError(f"{of} needs {excerpt(key)} ({expected}), but it has {excerpt(value)}")


def flag_in(state: Any, key: str, *, of: str = _POSITION) -> bool:
    """A bool of a state; see `value_in`."""
    found: bool = value_in(state, key, bool, of=of)
    return found


def text_in(state: Any, key: str, *, of: str = _POSITION) -> str:
    """Text of a state; see `value_in`."""
    found: str = value_in(state, key, str, of=of)
    return found


def whole_number(state: Any, key: str, *, most: int | None = _MOST, of: str = _POSITION) -> int:
    """A whole number of a state, from 0 to ``most`` (None: without limit); see `value_in`."""
    value = state.get(key) if isinstance(state, Mapping) else None
    if type(value) is not int or value < 0 or (most is not None and value > most):
        expected = f"a whole number, {'0 or more' if most is None or most >= _MOST else f'0 to {most}'}"
        if type(value) is not int:
            expected += "; floats and text are no whole numbers"
        raise _unlike(key, value, expected, of)
    return value


def whole_numbers(state: Any, key: str, count: int, *, of: str = _POSITION) -> list[int]:
    """A list of ``count`` whole numbers of a state, of either sign; see `value_in`."""
    values = value_in(state, key, list, of=of)
    if len(values) != count or any(type(value) is not int for value in values):
        raise _unlike(key, values, f"{count} whole numbers", of)
    return list(values)


def seed_in(state: Any, key: str = "seed", *, of: str = _POSITION) -> int:
    """A seed of a state, which may be any whole number; see `value_in`."""
    found: int = value_in(state, key, int, of=of)
    return found


# Any: states of generators differ.
def restore_generator(generator: Any, state: Any, *, of: str) -> None:
    """Give a NumPy bit generator a state.

    Raises:
        StateError: The state is of another kind of generator, or no state.
    """
    _check_like(state, generator.state, of)
    with fitting(of):
        generator.state = state


def _check_like(given: Any, own: Any, of: str) -> None:
    """Check that a state of a generator has the form of another."""
    if isinstance(own, Mapping):
        if not isinstance(given, Mapping) or given.keys() != own.keys():
            raise StateError(f"{of} is {excerpt(given)}: expected {excerpt(sorted(own))}")
        for key, value in own.items():
            if isinstance(value, Mapping):
                _check_like(given[key], value, f"{of}[{key!r}]")
            elif isinstance(value, str):
                if given[key] != value:
                    raise _unlike(key, given[key], value, of)
            elif isinstance(value, np.ndarray):
                _check_array(given[key], value, f"{of}[{key!r}]")
            else:
                whole_number(given, key, most=_MOST_IN_GENERATORS.get(key, 2**128 - 1), of=of)


def _check_array(given: Any, own: np.ndarray[Any, Any], of: str) -> None:
    if isinstance(given, np.ndarray):
        fits = given.dtype == own.dtype and given.shape == own.shape
    else:
        most = int(np.iinfo(own.dtype).max)
        fits = isinstance(given, list) and len(given) == own.size
        fits = fits and all(type(value) is int and 0 <= value <= most for value in given)
    if not fits:
        raise StateError(f"{of} is {excerpt(given)}: expected {own.size} whole numbers")
