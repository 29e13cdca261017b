"""Options by name: an unknown one is answered with those that are known, and both spellings are known.

Example:
    >>> @checked_keywords
    ... def paint(*, colour="grey", width=1):
    ...     return colour
    >>> paint(color="red")
    'red'
    >>> paint(widht=3)
    Traceback (most recent call last):
    ...
    rlio.errors.UnknownName: paint has no option 'widht': did you mean 'width'? It takes colour, width
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from rlio.errors import OptionError, UnknownName, excerpt

__all__ = ["checked_keywords", "expected", "expected_mapping", "folded", "option_names", "refuse_unknown"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_SPELLINGS = (("is(?=[aei])", "iz"), ("our", "or"), ("grey", "gray"))
_TYPED_KEYWORDS = re.compile(r"Unpack\[(\w+)\]")


def folded(name: str) -> str:
    """``name`` in one spelling of the two: equal for "prioritised" and "prioritized". Only to compare."""
    for british, american in _SPELLINGS:
        name = re.sub(british, american, name, flags=re.IGNORECASE)
    return name


def expected(value: T | None, kind: type[T], name: str) -> T:
    """The ``value`` of the option ``name``, a ``kind`` of options; None: its defaults.

    Raises:
        OptionError: It is something else, such as a dict.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        how = f"{kind.__name__}(**{name})" if isinstance(value, Mapping) else f"{kind.__name__}(...)"
        raise OptionError(f"{name}={excerpt(value)}: expected a {kind.__name__}; write {name}={how}")
    return value


def expected_mapping(value: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    """The ``value`` of the option ``name``, a mapping of keywords; None: none.

    Raises:
        OptionError: It is something else.
    """
    if value is not None and not isinstance(value, Mapping):
        raise OptionError(f"{name}={excerpt(value)}: expected a dict of keywords, or None")
    return value or {}


def option_names(taker: Callable[..., Any]) -> tuple[str, ...] | None:
    """The keywords that a function or class takes, in order; None: any, or it does not tell.

    Those behind ``**options: Unpack[SomeTypedDict]`` are among them.
    """
    init = taker.__init__ if isinstance(taker, type) else taker  # type: ignore[misc] # of this very class
    function = inspect.unwrap(init)
    try:
        parameters = inspect.signature(taker).parameters.values()
    except (TypeError, ValueError):  # Some that are written in C have no signature.
        return None
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            typed = _TYPED_KEYWORDS.fullmatch(str(parameter.annotation))
            if typed is None:
                return None
            names += function.__globals__[typed[1]].__annotations__
        elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return tuple(names)


def refuse_unknown(options: Iterable[str], known: Iterable[str] | None, *, of: str) -> None:
    """Raise where one of ``options`` is not among the ``known``; None: any is.

    Raises:
        UnknownName: One is not. The message has the nearest of the known names, and all of them.
    """
    if known is None:
        return
    names = list(known)
    for name in options:
        if name not in names:
            raise UnknownName(f"{of} has no option {excerpt(name)}{_nearest(name, names)} {', '.join(names)}")


def _nearest(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    found = get_close_matches(name, known, 1)
    return f": did you mean {found[0]!r}? It takes" if found else "; it takes"


def checked_keywords(taker: F) -> F:
    """Make a function, or the constructor of a class, check its keywords by name.

    A keyword in British or American spelling is taken for the one in the other spelling. An unknown one
    raises `UnknownName`, an `OptionError`, in place of Python's TypeError, which names no others.
    """
    if isinstance(taker, type):
        init = taker.__init__  # type: ignore[misc] # of this very class, not of a subclass
        taker.__init__ = _checked(init, taker.__name__)  # type: ignore[misc] # likewise
        return taker
    owner = taker.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]
    return cast("F", _checked(taker, owner))


def _checked(function: Callable[..., Any], owner: str) -> Callable[..., Any]:
    known = [name for name in option_names(function) or () if name != "self"]
    spelled = {folded(name): name for name in known}

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        for name in options.keys() - set(known):
            other = spelled.get(folded(name))
            if other is None:
                refuse_unknown([name], known, of=owner)
            elif other in options:
                raise OptionError(f"{owner}: {name!r} and {other!r} are one option: give one of them")
            else:
                options[other] = options.pop(name)
        return function(*args, **options)

    return checked
