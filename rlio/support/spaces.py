"""The option ``spaces``: the observation and action space of rows whose files do not state them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from rlio.errors import OptionError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["Spaces", "check_spaces", "pair_of"]

#: (observation space, action space), or policy id -> such a pair.
Spaces: TypeAlias = (
    "tuple[gym.Space[Any], gym.Space[Any]] | Mapping[str, tuple[gym.Space[Any], gym.Space[Any]]]"
)


def check_spaces(spaces: Spaces | None) -> None:
    """Raise OptionError unless ``spaces`` has the form that readers take."""
    if spaces is None:
        return
    import gymnasium as gym

    pairs = list(spaces.values()) if isinstance(spaces, Mapping) else [spaces]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(s, gym.Space) for s in pair)):
            raise OptionError(
                f"spaces={excerpt(spaces)}: expected (observation_space, action_space), or a dict from "
                "policy id to such a pair"
            )


def pair_of(spaces: Spaces | None, stated: tuple[Any, Any] | None, *, uri: str) -> tuple[Any, Any] | None:
    """The spaces of rows of one policy: those of the option, or those that the data states.

    Raises:
        OptionError: Both are given, or the option has another form, or several policies.
    """
    check_spaces(spaces)
    if spaces is None:
        return stated
    if stated is not None:
        raise OptionError("spaces=: the data, or its mapping, states its spaces: leave it out", uri=uri)
    pairs = list(spaces.values()) if isinstance(spaces, Mapping) else [spaces]
    if len(pairs) != 1:
        raise OptionError(f"spaces={excerpt(spaces)}: the rows are of one policy: pass one pair", uri=uri)
    return pairs[0]
