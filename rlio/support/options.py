"""Options by name: signatures show all, errors list the known names, and both spellings are accepted.

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
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar, Unpack, cast, get_args, get_origin, get_type_hints

from rlio.errors import OptionError, UnknownName, excerpt

__all__ = [
    "check_count",
    "check_seconds",
    "checked_keywords",
    "default_options",
    "expected",
    "expected_mapping",
    "folded",
    "in_own_spelling",
    "option_names",
    "refuse_unknown",
]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_SPELLINGS = (("is(?=[aei])", "iz"), ("our", "or"), ("grey", "gray"))
_TYPED_KEYWORDS = re.compile(r"Unpack\[(\w+)\]")


def folded(name: str) -> str:
    """``name`` in a common spelling, equal for "prioritised" and "prioritized". Only for comparison."""
    for british, american in _SPELLINGS:
        name = re.sub(british, american, name, flags=re.IGNORECASE)
    return name


def in_own_spelling(value: T, known: Iterable[str]) -> T:
    """The ``known`` name that ``value`` is in either spelling; ``value`` if it is none of them."""
    if not isinstance(value, str):
        return value
    return cast("T", next((name for name in known if folded(name) == folded(value)), value))


def expected(value: T | None, kind: type[T], name: str) -> T:
    """The ``value`` of the option ``name``, of class ``kind``; None: an object with its defaults.

    Raises:
        OptionError: ``value`` has another type, such as a dict.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        how = f"{kind.__name__}(**{name})" if isinstance(value, Mapping) else f"{kind.__name__}(...)"
        raise OptionError(f"{name}={excerpt(value)}: expected a {kind.__name__}; write {name}={how}")
    return value


def expected_mapping(value: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    """The ``value`` of the option ``name``, a mapping of keywords; None: an empty one.

    Raises:
        OptionError: ``value`` has another type.
    """
    if value is not None and not isinstance(value, Mapping):
        raise OptionError(f"{name}={excerpt(value)}: expected a dict of keywords, or None")
    return value or {}


def check_seconds(name: str, value: object, *, least: float = 0.0) -> float:
    """The ``value`` of the option ``name``, a finite number of seconds.

    Raises:
        OptionError: It is not a number, or below ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise OptionError(f"{name}={excerpt(value)}: expected a number of seconds, {least:g} or more")
    return float(value)


def check_count(name: str, value: object, *, least: int, of: str = "rows") -> None:
    """Refuse the ``value`` of the option ``name`` if it is not a whole number from ``least`` on.

    Raises:
        OptionError: It is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name}={excerpt(value)}: expected a number of {of}, at least {least}")


def option_names(taker: Callable[..., Any]) -> tuple[str, ...] | None:
    """The keywords that a function or class takes, in order; None: any keyword, or unknown."""
    try:
        parameters = inspect.signature(taker).parameters.values()
    except (TypeError, ValueError):  # Some functions written in C have no signature.
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in by_name)


def default_options(typed: Any) -> dict[str, Any]:
    """Name -> default of the keywords of a TypedDict whose fields are ``Annotated[type, default]``."""
    hints = get_type_hints(typed, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def _typed_keywords(annotation: object, function: Callable[..., Any]) -> Any:
    """The TypedDict of an annotation ``Unpack[SomeTypedDict]``; None: it is another annotation."""
    if get_origin(annotation) is Unpack:
        return get_args(annotation)[0]
    unpacked = _TYPED_KEYWORDS.fullmatch(str(annotation))  # As text: from __future__ import annotations.
    return None if unpacked is None else function.__globals__[unpacked[1]]


def _full_signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature, with the options that ``**options: Unpack[SomeTypedDict]`` stands for."""
    signature = inspect.signature(function)
    shown = []
    for parameter in signature.parameters.values():
        typed = _typed_keywords(parameter.annotation, function)
        if typed is None:
            shown.append(parameter)
            continue
        for name, hint in get_type_hints(typed, include_extras=True).items():
            assert get_origin(hint) is Annotated, f"{typed.__name__}.{name} has no default"
            default, kind = hint.__metadata__[0], parameter.KEYWORD_ONLY
            shown.append(inspect.Parameter(name, kind, default=default, annotation=hint.__origin__))
    return signature.replace(parameters=shown)


def refuse_unknown(options: Iterable[str], known: Iterable[str] | None, *, of: str) -> None:
    """Raise if one of ``options`` is not in ``known``; None: all options are allowed.

    Raises:
        UnknownName: An option is unknown. The message has the nearest known name, and all known names.
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

    A keyword may have British or American spelling. An unknown keyword raises `UnknownName`, an
    `OptionError`, instead of Python's TypeError, which does not list the known ones. The signature, and so
    `help()`, shows the options that ``**options: Unpack[SomeTypedDict]`` stands for.
    """
    if isinstance(taker, type):
        init = taker.__init__  # type: ignore[misc] # of this very class, not of a subclass
        taker.__init__ = _checked(init, taker.__name__)  # type: ignore[misc] # likewise
        return taker
    owner = taker.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]
    return cast("F", _checked(taker, owner))


def _checked(function: Callable[..., Any], owner: str) -> Callable[..., Any]:
    signature = _full_signature(function)
    function.__signature__ = signature  # type: ignore[attr-defined] # inspect looks for it
    known = [name for name in option_names(function) or () if name != "self"]
    spelled = {folded(name): name for name in known}

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        for name in options.keys() - set(known):
            other = spelled.get(folded(name))
            if other is None:
                refuse_unknown([name], known, of=owner)
            elif other in options:
                raise OptionError(f"{owner}: {name!r} and {other!r} are one option: pass only one of them")
            else:
                options[other] = options.pop(name)
        return function(*args, **options)

    return checked
