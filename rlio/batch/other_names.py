"""The names that other libraries use for the standard columns, and the name that a wrong one may mean.

Example:
    >>> did_you_mean("action", ["obs", "actions", "rewards"])
    ": did you mean 'actions'?"
    >>> did_you_mean("next_state", ["obs", "new_obs"]), did_you_mean("speed", ["obs"])
    (": did you mean 'new_obs'?", '')
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rlio.batch.columns import Columns

__all__ = ["MEANT", "OTHER_NAMES", "did_you_mean"]

_ENDS: Final = (Columns.TERMINATEDS, Columns.TRUNCATEDS)
#: The names that other libraries use for the columns that give a row its meaning or end an episode. Each may
#: mean the columns listed before it.
OTHER_NAMES: Final = (
    ((Columns.OBS,), ("observation", "observations", "state", "states")),
    ((Columns.NEXT_OBS,), ("next_obs", "next_observation", "next_observations", "next_state", "next_states")),
    ((Columns.NEXT_OBS,), ("obs_next",)),
    ((Columns.ACTIONS,), ("action",)),
    ((Columns.REWARDS,), ("reward", "next.reward")),
    ((Columns.TERMINATEDS,), ("terminal", "terminals", "terminated", "termination", "terminations")),
    ((Columns.TERMINATEDS,), ("is_terminal",)),
    (
        (Columns.TRUNCATEDS,),
        ("timeout", "timeouts", "truncated", "truncation", "truncations", "is_truncated"),
    ),
    (_ENDS, ("done", "next.done", "is_last", "episode_end", "episode_ends", "episode_terminals")),
    ((Columns.EPS_ID,), ("episode", "episode_id", "episode_idx", "episode_index", "ep_id", "is_first")),
    ((Columns.EPS_ID,), ("traj_id", "trajectory", "trajectory_id")),
)
#: Another library's name -> the columns that it may mean.
MEANT: Final = {name: meant for meant, names in OTHER_NAMES for name in names}

_STANDARD: Final = frozenset(value for value in vars(Columns).values() if isinstance(value, str))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The question that names the known column that ``name`` may mean, to be appended; "": none is near.

    A name with a meaning for rlio is no mistake: who asks for ``truncateds`` does not mean ``terminateds``.
    Parts of nested columns (``observation/position``) are compared with their whole name, and by their first
    part.
    """
    from difflib import get_close_matches

    if name in _STANDARD:
        return ""
    names = [one for one in known if isinstance(one, str)]
    top, slash, rest = name.partition("/")
    meant = [column + slash + rest for column in MEANT.get(top.lower(), ())]
    found = [column for column in meant if column in names]
    if not found:
        folded = {one.lower(): one for one in names}
        found = [folded[one] for one in get_close_matches(name.lower(), folded, 1, 0.7)]
    return f": did you mean {' or '.join(map(repr, found))}?" if found else ""
