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
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import (
    Annotated,
    Any,
    Final,
    TypeVar,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from rlio.errors import OptionError, UnknownName, excerpt

__all__ = [
    "check_choice",
    "check_count",
    "check_flag",
    "check_number",
    "check_seconds",
    "checked_keywords",
    "default_options",
    "expected",
    "expected_mapping",
    "folded",
    "in_own_spelling",
    "option_names",
    "refuse_mapped_columns",
    "refuse_replaced",
    "refuse_unknown",
    "set_options",
]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_SPELLINGS = (("is(?=[aei])", "iz"), ("our", "or"), ("grey", "gray"))
_NUMPY_BOOLS = (("numpy", "bool"), ("numpy", "bool_"))
# What to write instead of options that a taker has no more, or does not have.
_EPISODES_OF_DATA = "it needs whole episodes: pass it to a reader or a store of recorded data"
_SEQUENCES = "write draw=rlio.Sequences(length, {}=...)"
_INSTEAD = {
    "n_step": "write draw=rlio.NStep(3, gamma=0.99)",
    "gamma": "write draw=rlio.NStep(3, gamma=0.99), or derive=['mc_return(0.99)']",
    "sequence_length": "write draw=rlio.Sequences(20)",
    "episodes": "write draw=rlio.WholeEpisodes(), or to choose some filter='eps_id in (1, 2)'",
    "num_workers": "write rlio.torch.ReplayDataset(...).loader(num_workers=...)",
    "device": "write rlio.torch.prefetch(reader, device=...)",
    **dict.fromkeys(("rank", "world", "world_size"), "write shard=(rank, world)"),
    **{name: _SEQUENCES.format(name) for name in ("burn_in", "overlap", "starts", "padding", "layout")},
    "derive": _EPISODES_OF_DATA,
    "split": _EPISODES_OF_DATA,
}
# The same for `rlio.Mapping`.
_INSTEAD_OF_FIELDS = {
    **{name: f"write columns={{{name!r}: ...}}" for name in ("obs", "actions", "rewards", "t")},
    **dict.fromkeys(("done", "dones", "terminals", "terminateds"), "name the column in terminated="),
    **dict.fromkeys(("timeouts", "truncateds"), "name the column in truncated="),
    "new_obs": "name the column in next_obs=",
}
_TYPED_KEYWORDS = re.compile(r"Unpack\[(\w+)\]")


_MAPPING: Final = "mapping=rlio.Mapping(columns={...}, episode=..., terminated=...)"
_FOLLOW: Final = (
    "rlio.FollowReader(root, ...) follows a data set; in a worker, input=rlio.FollowReader, "
    "input_options={'root': root, ...}"
)
#: Options of readers that were replaced -> what to write now.
_REPLACED: Final[Mapping[str, str]] = {
    "follow": _FOLLOW,
    "idle_timeout": _FOLLOW,
    "poll_seconds": _FOLLOW,
    "grow": "for each epoch, open a reader with at=rlio.open_dataset(root).snapshot() and epochs=1: "
    "docs/replay.md shows the loop",
    **dict.fromkeys(
        (
            "episode",
            "terminated",
            "truncated",
            "next_obs",
            "dtypes",
            "per_file",
            "final_row",
            "lengths",
            "ends",
        ),
        f"what the columns of a table mean is one option, {_MAPPING}",
    ),
}


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
        fits = isinstance(value, Mapping) and value.keys() <= inspect.signature(kind).parameters.keys()
        how = f"{kind.__name__}(**{name})" if fits else f"{kind.__name__}(...)"
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


@overload
def check_count(
    name: str, value: object, *, least: int | None, most: int | None = None, of: str = "", none: None = None
) -> int: ...
@overload
def check_count(
    name: str, value: object, *, least: int | None, most: int | None = None, of: str = "", none: str
) -> int | None: ...
def check_count(
    name: str,
    value: object,
    *,
    least: int | None,
    most: int | None = None,
    of: str = "",
    none: str | None = None,
) -> int | None:
    """The ``value`` of the option ``name``, a whole number (also NumPy's), as an int.

    Args:
        name: As the user writes it, such as ``Roll.max_rows``.
        value: What was given.
        least: The smallest number that is allowed; None: any.
        most: The largest; None: any.
        of: What it counts, for the message.
        none: What None stands for; None is then allowed.

    Raises:
        OptionError: It is something else, such as a bool, or out of bounds.
    """
    if value is None and none is not None:
        return None
    if isinstance(value, Integral) and not isinstance(value, bool):
        count = int(value)
        if (least is None or count >= least) and (most is None or count <= most):
            return count
    what = f"a number of {of}" if of else "a whole number"
    raise _illegal(name, value, what + _bounds(least=least, most=most), none)


@overload
def check_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    of: str = "",
    none: None = None,
) -> float: ...
@overload
def check_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    of: str = "",
    none: str,
) -> float | None: ...
def check_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    of: str = "",
    none: str | None = None,
) -> float | None:
    """The ``value`` of the option ``name``, a finite number (also NumPy's), as an int or a float.

    ``least`` and ``most`` are allowed, ``above`` and ``below`` are not. See `check_count`.

    Raises:
        OptionError: It is something else, such as a bool, NaN or infinity, or out of bounds; or it is a
            number of seconds for which Python cannot wait (over 292 years).
    """
    if value is None and none is not None:
        return None
    if isinstance(value, Real) and not isinstance(value, bool):
        number = int(value) if isinstance(value, Integral) else float(value)
        if (
            abs(number) <= (threading.TIMEOUT_MAX if of == "seconds" else sys.float_info.max)
            and (least is None or number >= least)
            and (above is None or number > above)
            and (most is None or number <= most)
            and (below is None or number < below)
        ):
            return number
    if of == "seconds" and above is not None:
        raise _illegal(name, value, f"seconds > {above}", none)
    what = f"a number of {of}" if of else "a number"
    raise _illegal(name, value, what + _bounds(least=least, above=above, most=most, below=below), none)


def check_seconds(name: str, value: object, *, least: float = 0.0) -> float:
    """The ``value`` of the option ``name``, a finite number of seconds; see `check_number`."""
    return float(check_number(name, value, least=least, of="seconds"))


def check_choice(name: str, value: T, choices: Collection[object]) -> T:
    """The ``value`` of the option ``name``, one of ``choices``.

    Raises:
        OptionError: It is something else.
    """
    for choice in choices:
        # By type, too: True equals 1, and an array has no truth value.
        if type(value) is type(choice) and value == choice:
            return value
    *first, last = map(repr, choices)
    raise _illegal(name, value, f"{', '.join(first)} or {last}", None)


def check_flag(name: str, value: object) -> bool:
    """The ``value`` of the option ``name``, True or False (also NumPy's), as a bool.

    Raises:
        OptionError: It is something else.
    """
    # (Without NumPy, which `import rlio` does not load.)
    if not isinstance(value, bool) and (type(value).__module__, type(value).__name__) not in _NUMPY_BOOLS:
        raise _illegal(name, value, "True or False", None)
    return bool(value)


def set_options(options: object, **checked: object) -> None:
    """Set fields of a frozen dataclass in its ``__post_init__``, to what the checks here returned."""
    for name, value in checked.items():
        object.__setattr__(options, name, value)


def _bounds(
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> str:
    if least is not None and most is not None:
        return f", from {least} to {most}"
    if least == 0 and below is None:
        return ", 0 or more"
    shown = (("at least", least), ("above", above), ("at most", most), ("below", below))
    parts = [f"{word} {bound}" for word, bound in shown if bound is not None]
    return f", {' and '.join(parts)}" if parts else ""


def _illegal(name: str, value: object, what: str, none: str | None) -> OptionError:
    more = "" if none is None else f", or None for {none}"
    return OptionError(f"{name}={excerpt(value)}: expected {what}{more}")


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
    names, options = list(known), list(options)
    if "on_error" in names:  # A reader.
        refuse_replaced((name for name in options if name not in names), of=of)
    for name in options:
        if name not in names:
            raise UnknownName(f"{of} has no option {excerpt(name)}{_instead(name, names)} {', '.join(names)}")


def refuse_replaced(options: Iterable[str], *, of: str) -> None:
    """Raise for an option that readers had before, with what to write now.

    Raises:
        UnknownName: There is one.
    """
    for name in options:
        if name in _REPLACED:
            raise UnknownName(f"{of} has no option {name!r}: {_REPLACED[name]}")


def refuse_mapped_columns(columns: object) -> None:
    """Raise if ``columns``, which selects columns by name, is the dict of a mapping.

    Raises:
        OptionError: It is.
    """
    if isinstance(columns, Mapping):
        raise OptionError(
            f"columns={excerpt(columns)}: expected a list of names, which are read; what the columns of a "
            f"table mean is {_MAPPING}"
        )


def _instead(name: str, known: list[str]) -> str:
    """What to write for an unknown option, to be followed by the known ones."""
    from difflib import get_close_matches

    # Options that shape units are known where ``draw`` is.
    former = _INSTEAD if "draw" in known else _INSTEAD_OF_FIELDS if "per_row" in known else {}
    found = get_close_matches(name, [*known, *former], 1)
    if found and found[0] in former and found[0] not in known:
        return f": {former[found[0]]}. It takes"
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
    known = [name for name in option_names(function) or () if name not in ("self", "cls")]
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
