"""The names of columns that are derived from whole episodes, in ``derive`` and in filters.

Not here: their values (`rlio.replay.episode_columns`).
"""

from __future__ import annotations

import re
from typing import Final

from rlio.errors import OptionError, excerpt
from rlio.support.options import check_number

__all__ = [
    "EPISODE_COLUMNS",
    "EPISODE_LENGTH",
    "EPISODE_RETURN",
    "MC_RETURN",
    "RETURNS_TO_GO",
    "checked_discount",
    "named_column",
]

RETURNS_TO_GO: Final = "returns_to_go"
MC_RETURN: Final = "mc_return"
EPISODE_RETURN: Final = "episode_return"
EPISODE_LENGTH: Final = "episode_length"
#: The derived columns. ``returns_to_go``: undiscounted sum of the rewards from the row to the last row of the
#: episode. ``mc_return``: the same, discounted. Neither adds a value after a truncated end.
#: ``episode_return``, ``episode_length``: sum of the rewards, and number of rows, of the episode.
EPISODE_COLUMNS: Final = (RETURNS_TO_GO, MC_RETURN, EPISODE_RETURN, EPISODE_LENGTH)
_DISCOUNTED: Final = re.compile(rf"{MC_RETURN}\s*\((.*)\)", re.DOTALL)


def named_column(text: str) -> tuple[str, float | None]:
    """The column that an item of ``derive`` names, and its discount if it states one.

    Raises:
        OptionError: It is no `EPISODE_COLUMNS`, or the discount is not a number from 0 to 1.
    """
    found = _DISCOUNTED.fullmatch(text) if isinstance(text, str) else None
    if found is not None:
        try:
            return MC_RETURN, checked_discount(float(found[1]))
        except ValueError as error:
            raise OptionError(f"derive={excerpt([text])}: expected a discount, such as 0.99") from error
    if text not in EPISODE_COLUMNS:
        names = ", ".join(EPISODE_COLUMNS)
        raise OptionError(
            f"derive={excerpt([text])}: expected a list of {names}; a discount is written 'mc_return(0.99)'"
        )
    return text, None


def checked_discount(value: object) -> float:
    """The discount of ``mc_return``.

    Raises:
        OptionError: It is not a number from 0 to 1.
    """
    return float(check_number("discount of mc_return", value, least=0, most=1))
