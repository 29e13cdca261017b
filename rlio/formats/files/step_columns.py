"""Refuses a table of steps whose columns would be read wrong, because another library names them otherwise.

Example:
    >>> check_step_columns(["obs", "actions", "rewards", "terminateds", "episode_index"])
    Traceback (most recent call last):
    ...
    rlio.errors.UnknownLayout: ... [column episode_index]
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from rlio.batch.columns import Columns
from rlio.batch.other_names import MEANT as _MEANT
from rlio.errors import UnknownLayout, excerpt

__all__ = ["check_other_names", "check_step_columns", "suggested_mapping"]

#: A table of steps has one or more of these columns.
_STEP_COLUMNS: Final = (Columns.OBS, Columns.ACTIONS, Columns.REWARDS)
#: Parts of names by which `suggested_mapping` guesses; what it guesses is only shown.
_HINTS: Final = (
    (Columns.OBS, ("obs", "state", "pixels", "image")),
    (Columns.ACTIONS, ("act", "acs")),
    (Columns.REWARDS, ("rew",)),
    (Columns.EPS_ID, ("episode", "traj", "eps", "ep_", "mdp")),
    (Columns.TERMINATEDS, ("terminal", "terminated", "done", "end")),
)
#: Names that say where episodes end otherwise than by an id or a flag of last rows, and how they are passed.
_OTHER_ENDS: Final = (
    (re.compile(r"(^|_)(starts?|is_first|first|is_init)$"), "starts={!r}"),
    (re.compile(r"^(traj[a-z]*|eps?|episode|path|seq)s?_?(len|lens|lengths?)$|^lengths$"), "lengths={!r}"),
    (re.compile(r"(^|_)(ends|indices|splits|split_points)$"), "ends={!r}"),
    (re.compile(r"^(masks?|not_dones?|non_?terminals?|discounts?|continues?)$"), "terminated='not {}'"),
)
_RETURN: Final = re.compile(r"(^|_)(returns?|rets?|values?)$")


def suggested_mapping(names: Collection[str], *, ends: str | None = None) -> str:
    """The mapping that a table with these columns may need, as code for a message; ``...`` where none fits.

    ``ends``: the option that says where an episode ends, if it is no column; "": none is needed.

    Example:
        >>> suggested_mapping(["x_obs", "act", "rew", "traj"])
        "mapping=rlio.Mapping(columns={'obs': 'x_obs', 'actions': 'act', 'rewards': 'rew'}, episode='traj')"
        >>> suggested_mapping(["obs", "acs", "rews", "ep_rets", "is_first"])
        "mapping=rlio.Mapping(columns={'obs': 'obs', 'actions': 'acs', 'rewards': 'rews'}, starts='is_first')"
        >>> suggested_mapping(["obs", "acts", "rews", "indices", "terminal", "ep_value"]).partition("}, ")[2]
        "ends='indices', terminated='terminal')"
    """
    other = [(name, way) for pattern, way in _OTHER_ENDS for name in names if pattern.search(name.lower())]
    taken = {name for name, _ in other}
    left = [
        name
        for name in names
        if Columns.NEXT_OBS not in _MEANT.get(name, ())
        and "next_" not in name
        and name not in taken
        and not _RETURN.search(name.lower())
    ]
    found: dict[str, str] = {}
    for column, hints in _HINTS:
        meant = [name for name in left if name == column or column in _MEANT.get(name.lower(), ())]
        meant += [name for name in left if any(hint in name.lower() for hint in hints)]
        if meant:
            left.remove(meant[0])
        found[column] = excerpt(meant[0], 60) if meant else "..."
    named = [column for column in _STEP_COLUMNS if column != Columns.REWARDS or found[column] != "..."]
    columns = ", ".join(f"{column!r}: {found[column]}" for column in named)
    end = found[Columns.TERMINATEDS]
    # Beside what says where an episode ends, only a name that has no other meaning.
    flags = [f"terminated={end}"] * (_MEANT.get(end.strip("'").lower()) == (Columns.TERMINATEDS,))
    if ends is not None:
        ends = ", ".join(filter(None, (ends, *flags)))
    elif found[Columns.EPS_ID] != "..." or (end == "..." and not other):
        ends = ", ".join([f"episode={found[Columns.EPS_ID]}", *flags])
    else:
        flag = "" if end == "..." else f"terminated={end}"
        only_flag = flag and (not other or "not" in other[0][1])
        ends = flag if only_flag else ", ".join(filter(None, (_other_end(*other[0]), flag)))
    return f"mapping=rlio.Mapping(columns={{{columns}}}{', ' if ends else ''}{ends})"


def _other_end(name: str, way: str) -> str:
    return way.format(excerpt(name, 60).strip("'") if "not" in way else name)


def check_step_columns(names: Collection[str], *, uri: str | None = None) -> None:
    """Refuse a table of one row per step if its columns are not known to be steps.

    Args:
        names: The columns of the file.
        uri: The file, for the message.

    Raises:
        UnknownLayout: It has neither ``obs`` nor ``actions`` nor ``rewards``, or see `check_other_names`.
    """
    check_other_names(names, uri=uri)
    if not set(names).intersection(_STEP_COLUMNS):
        raise UnknownLayout(
            f"found the columns {excerpt(sorted(names))}, expected one row per step with "
            f"{', '.join(_STEP_COLUMNS)} or some of them: say what they mean, "
            f"{suggested_mapping(names)} (docs/mapping.md); or name those to read: columns=[...]",
            uri=uri,
        )


def check_other_names(names: Collection[str], *, uri: str | None = None) -> None:
    """Refuse a column that, in another library, stands for one that is absent.

    For instance ``episode_id`` without ``eps_id``: reading without it would join the episodes.

    Args:
        names: The columns of the file or record.
        uri: The file, for the message.

    Raises:
        UnknownLayout: ``names`` has such a column.
    """
    found = set(names)
    if Columns.DONES in found:
        found.add(Columns.TERMINATEDS)  # DONES marks the end of an episode, but not its cause.
    for name in names:
        absent = [meant for meant in _MEANT.get(name, ()) if meant not in found]
        if absent:
            raise UnknownLayout(
                f"the column {name!r} may be the column {' or '.join(absent)}, which is absent: say what "
                f"the columns mean, {suggested_mapping(names)} (docs/mapping.md); or, if it is something "
                "else, name the columns to read: columns=[...]",
                uri=uri,
                column=name,
            )
