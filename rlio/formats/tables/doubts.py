"""Signs that a mapping means something else than the table: each would give wrong rows without an error.

A flag that marks the first row of an episode, or all but its last; one that the mapping does not name, within
an episode; a step number that begins again within an episode; a row that is a whole episode.

Example:
    >>> check_flagged(np.array([0, 3]), 6, ["episode_starts"])
    Traceback (most recent call last):
    ...
    rlio.errors.SchemaError: 'episode_starts' is true in row 0 and not in the last row: ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.batch.nested import leaves
from rlio.batch.other_names import OTHER_NAMES
from rlio.errors import SchemaError, excerpt
from rlio.formats.files.value_arrays import flags_in

__all__ = [
    "CUT_NAMES",
    "EDGE_NAMES",
    "ENV_NAMES",
    "NOT",
    "STEP_NAMES",
    "TIME_NAMES",
    "Followed",
    "Restarts",
    "advice_of_flags",
    "break_in",
    "check_edges",
    "check_env",
    "check_first",
    "check_flagged",
    "check_followed",
    "check_one_step",
    "check_starts",
    "check_times",
    "cut_paths",
    "is_time_limit",
    "mask_ends",
]

_FIELDS: Final = {Columns.TERMINATEDS: "terminated", Columns.TRUNCATEDS: "truncated"}
#: Names of columns that count the steps of an episode, in lower case.
STEP_NAMES: Final = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "episode_", "env_")
    for name in ("t", "step", "steps", "timestep", "time_step", "step_id", "step_idx", "step_index")
) | {"frame_index", "step_num", "step_number", "step_count", "timesteps"}

#: Names of columns that say when a row was recorded, in lower case.
TIME_NAMES: Final = frozenset(
    ("time", "timestamp", "timestamps", "time_stamp", "datetime", "date", "ts", "unix_time", "wall_time")
)

#: Names of columns that tell environments apart whose rows may be interleaved, in lower case.
ENV_NAMES: Final = frozenset(
    f"{name}{tail}"
    for name in ("env", "environment", "worker", "actor")
    for tail in ("", "_id", "_idx", "_index", "_num", "_number", "_rank")
)
_OF_INFOS: Final = tuple(f"{top}{dot}" for top in ("info", "infos") for dot in "./_")
#: As Gym's wrapper writes it, or as it becomes where infos are columns; and further names.
_TIME_LIMITS: Final = (
    *(f"{top}timelimit{dot}truncated" for top in ("", *_OF_INFOS) for dot in "._"),
    *("time_limit", "time_out", "timed_out", "is_timeout"),
)
#: Names of columns that mark the first or the last rows of episodes, in lower case -> the field for them.
EDGE_NAMES: Final = {
    **{name: _FIELDS[meant[0]] for meant, names in OTHER_NAMES if meant[0] in _FIELDS for name in names},
    **dict.fromkeys((Columns.TERMINATEDS, Columns.DONES), "terminated"),
    **dict.fromkeys((Columns.TRUNCATEDS, "is_last", *_TIME_LIMITS), "truncated"),
    **dict.fromkeys(("is_first", "is_init", "episode_start", "episode_starts"), "starts"),
}
#: Those that mark episodes that a time limit cut.
CUT_NAMES: Final = frozenset(
    name
    for name in EDGE_NAMES
    if name in (Columns.TRUNCATEDS, *_TIME_LIMITS)
    or any(meant == (Columns.TRUNCATEDS,) and name in names for meant, names in OTHER_NAMES)
)
_TIME_LIMIT: Final = re.compile(r"timelimit[._/]truncated", re.IGNORECASE)
#: Most environments whose rows may be interleaved, see `check_followed`.
_MOST_ENVS: Final = 256

#: Most different changes of a step number; what has more is no number of steps.
_MOST_CHANGES: Final = 64

#: What a flag that is true where a column is 0 begins with, in a mapping.
NOT: Final = "not "
_STARTS: Final = re.compile(r"start|first|begin|reset|is_init|(^|_)new(_|$)", re.IGNORECASE)


def advice_of_flags(names: Sequence[str], *, is_inverted: bool | None = None) -> str:
    """How a flag of first rows, or of rows that go on, is spelled; None: the name decides which it is.

    ``names`` are as in a mapping: ``"masks"``, ``"not masks"``.
    """
    name = next((name for name in names if _STARTS.search(name)), names[0])
    shown, bare = excerpt(name), name.removeprefix(NOT)
    if is_inverted is None:
        is_inverted = _STARTS.search(name) is None and name == bare
    if is_inverted and name != bare:
        return f"if {excerpt(bare)} is true where an episode ends, pass terminated={excerpt(bare)}"
    if is_inverted:
        return (
            f"if {shown} is 0 where an episode ends (a mask, a discount, not_done), pass "
            f"terminated={excerpt(NOT + name)}"
        )
    return (
        f"if {shown} marks the first row of each episode, pass starts={shown} instead of that flag (and of "
        "episode=)"
    )


_NOT_WHOLE: Final = "if the first episode is not recorded from its beginning, leave out its rows"


def _column_of(names: Sequence[str]) -> str | None:
    return names[0].removeprefix(NOT) if names else None


def check_first(is_start: np.bool_, is_forced: np.bool_, row: int, name: str) -> None:
    """Refuse a flag of first rows that the first row, or that of a file that is episodes, does not have."""
    if is_forced and not is_start:
        bare = name.removeprefix(NOT)
        other = bare if name != bare else NOT + bare
        raise SchemaError(
            f"row {row} begins an episode, and {excerpt(name)} is not true there: expected a flag of the "
            f"first row of each episode; if {excerpt(bare)} is {int(name != bare)} in first rows only, pass "
            f"starts={excerpt(other)}; "
            f"if it marks the last row, pass terminated={excerpt(name)} or truncated={excerpt(name)} "
            "instead of starts=; "
            + ("if it goes on from the file before, pass per_file=False" if row else _NOT_WHOLE),
            column=bare,
        )


def check_starts(episodes: int, rows: int, name: str) -> None:
    """Refuse a flag of first rows that most rows have, but not all."""
    if rows > episodes > max(2, rows // 2):
        raise SchemaError(
            f"{excerpt(name)} is true in {episodes} of {rows} rows: expected a flag of the first row of each "
            f"episode; {advice_of_flags([name], is_inverted=True)} instead of starts=; if most episodes have "
            "one row, name the column of ids in episode=",
            column=_column_of([name]),
        )


def mask_ends(name: str, values: NDArray[Any], *, fills: bool) -> NDArray[np.bool_]:
    """Where a mask is 0, which ends an episode; elsewhere it is above 0, and 1 at most, as discounts are.

    Args:
        name: The column.
        values: One a row.
        fills: Whether NaN is a row that has no mask.

    Raises:
        SchemaError: There are other values.
    """
    if values.dtype.kind != "f":
        return ~np.array(flags_in(name, values), np.bool_)
    wrong = ~((values >= 0) & (values <= 1) | (fills & np.isnan(values)))
    if wrong.any():
        raise SchemaError(
            f"found {excerpt(values[wrong][:4].tolist())}, expected a mask or discount: 0 where an episode "
            "ends, and above 0 up to 1 elsewhere",
            column=name,
        )
    return np.array(values == 0, np.bool_)


def check_flagged(flagged: NDArray[np.int64], rows: int, names: Sequence[str]) -> None:
    """Refuse flags, of which alone episodes are made, that do not mark last rows.

    Args:
        flagged: The rows with a flag.
        rows: Rows of the table.
        names: The columns of the flags.

    Raises:
        SchemaError: The first row has a flag, and the last one has none, or most rows have one.
    """
    if rows < 2 or not len(flagged) or flagged[0] != 0:
        return
    is_most = 2 * len(flagged) > rows
    if not is_most and flagged[-1] == rows - 1:
        return
    shown = " or ".join(map(excerpt, names))
    found = f"and in {len(flagged)} of {rows} rows" if is_most else "and not in the last row"
    raise SchemaError(
        f"{shown} is true in row 0 {found}: expected a flag of the last row of each episode; "
        f"{advice_of_flags(names, is_inverted=is_most)}; if the first episode has one row, name the column "
        "of its id in episode=",
        column=_column_of(names),
    )


class Followed(NamedTuple):
    """Some rows and those after them, to compare the ``new_obs`` of each with the ``obs`` of the next.

    Attributes:
        obs: ``obs`` of the rows.
        new_obs: ``new_obs`` of the rows.
        ends: Whether each is the last of its episode.
        terminated: Whether each has a terminal ``new_obs``.
        row: Number of the first of these rows.
    """

    obs: Any
    new_obs: Any
    ends: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    row: int


def break_in(rows: Followed) -> int | None:
    """The first row that goes on, by its flags, and whose ``new_obs`` is not the ``obs`` of the next row.

    None: there is none, or most rows are so, which then do not follow each other at all.
    """
    found = _goes_on(rows)
    if found is None or not found[1].any():
        return None
    broken = ~found[0] & ~rows.ends[:-1]
    if not broken.any() or 2 * int(broken.sum()) > len(broken):
        return None
    return rows.row + int(broken.argmax())


def check_followed(rows: Followed, names: Sequence[str], *, cuts: bool) -> str:
    """Refuse ends at rows whose ``new_obs`` is the ``obs`` of the row after them.

    Either flags are not in the last rows of episodes, or the final observations are lost.

    Args:
        rows: Some rows.
        names: The columns of the flags.
        cuts: Whether flags alone say where episodes end.

    Returns:
        What the user should know if rows may go on after an end; "": nothing.
    """
    found = _goes_on(rows)
    if found is None:
        return ""
    goes_on, moves, spread = found
    flagged = rows.ends[:-1]
    if moves.any() and (breaks := int((~goes_on & ~flagged).sum())) * 2 > len(goes_on):
        _check_interleaved(rows)
        return (
            f"In {breaks} of {len(goes_on)} compared rows from row {rows.row} on, new_obs is not the obs of "
            "the next row of the episode: rows seem to be missing, or in another order."
        )
    if not flagged.any() or not moves.any() or not goes_on[flagged].any():
        return ""
    elsewhere = bool(goes_on[flagged].all() and (~goes_on & ~flagged).any())
    mostly = bool(cuts and flagged.mean() > 0.5 and goes_on[flagged].mean() > 0.5)
    if names and (elsewhere or mostly):
        at = rows.row + int((flagged & goes_on).argmax())
        raise SchemaError(
            f"row {at} ends an episode by {' or '.join(map(excerpt, names))}, but its new_obs is the "
            f"obs of row {at + 1}: expected a flag of the last row of each episode; "
            + (_late_or_early(flagged, goes_on, names[0]) or advice_of_flags(names, is_inverted=mostly)),
            column=_column_of(names),
        )
    return _check_resets(rows, moves, spread) if goes_on.all() else ""


def _goes_on(rows: Followed) -> tuple[NDArray[np.bool_], NDArray[np.float64], float] | None:
    """Of each row, whether its ``new_obs`` is the ``obs`` of the next, and how far it is from its ``obs``.

    The last value is how far ``obs`` that are far apart in time are from each other. None: they are no
    numbers that can be compared.
    """
    goes_on, moves = np.ones(len(rows.ends) - 1, np.bool_), np.zeros(len(rows.ends) - 1)
    others, spread = dict(leaves(rows.new_obs)), np.zeros(len(rows.ends))
    for path, one in leaves(rows.obs):
        other = others.get(path)
        if other is None or one.shape != other.shape or one.dtype.kind not in "biuf":
            return None
        now, after = (leaf.reshape(len(leaf), -1).astype(np.float64) for leaf in (one, other))
        goes_on &= np.where(np.isnan(after[:-1]), np.isnan(now[1:]), after[:-1] == now[1:]).all(axis=1)
        moves += np.nan_to_num(np.abs(after[:-1] - now[:-1]), posinf=0.0).sum(axis=1)
        spread += np.nan_to_num(np.abs(now - np.roll(now, len(now) // 2, axis=0)), posinf=0.0).sum(axis=1)
    return goes_on, moves, float(np.median(spread))


def _check_interleaved(rows: Followed) -> None:
    """Refuse rows of several environments in turn: ``new_obs`` is the ``obs`` some rows later."""
    others = dict(leaves(rows.new_obs))
    keys: list[list[int]] = [[], []]
    for row in range(len(rows.ends)):
        for each, parts in zip(keys, (dict(leaves(rows.obs)), others), strict=True):
            each.append(hash(tuple(leaf[row].astype(np.float64).tobytes() for leaf in parts.values())))
    now, after = map(np.array, keys)
    for apart in range(2, min(_MOST_ENVS, len(now) // 2) + 1):
        if (after[:-apart] == now[apart:]).mean() > 0.5:
            raise SchemaError(
                f"the new_obs of most rows is the obs {apart} rows later: rows of {apart} environments seem "
                f"to be interleaved, expected those of an episode together; {_WAY_OF_ENVS}",
                column="new_obs",
            )


def _late_or_early(flagged: NDArray[np.bool_], goes_on: NDArray[np.bool_], name: str) -> str:
    """What to do with flags of which each is a row after the end that ``new_obs`` shows, or before it."""
    bare = excerpt(name.removeprefix(NOT))
    if np.array_equal(flagged[1:], ~goes_on[:-1]):
        return (
            f"it is the first row of the next one: pass starts={excerpt(name)}, if row 0 has that flag, too; "
            f"otherwise move it up, such as log[{bare}] = log[{bare}].shift(-1)"
        )
    if np.array_equal(flagged[:-1], ~goes_on[1:]):
        return f"it is one row early: move it down, such as log[{bare}] = log[{bare}].shift(1)"
    return ""


def _check_resets(rows: Followed, moves: NDArray[np.float64], spread: float) -> str:
    """Refuse final observations that are the first ones of the next episodes, unless rows may just go on.

    Rows may go on if an endless run was cut, or its goals are marked: then the observation moves no further
    at ends than elsewhere. Where it may move anywhere in a step, that says nothing.
    """
    flagged = rows.ends[:-1]
    within = moves[~flagged]
    jumps = len(within) and np.median(moves[flagged]) > np.quantile(within, 0.99)
    is_smooth = len(within) and np.median(within) < spread / 2
    found = (
        f"the new_obs of the last row of each episode is the first obs of the next one (from row "
        f"{rows.row + int(flagged.argmax())} on, {int(flagged.sum())} compared)"
    )
    lost = (
        "if the environments reset themselves, the final observations are lost: pass next_obs='derive', "
        "which marks them as unknown, or write those of infos (final_obs, final_observation, "
        "terminal_observation) into these rows"
    )
    if jumps or (rows.terminated[:-1][flagged].any() and not is_smooth):
        raise SchemaError(f"{found}: expected the one that the last action led to; {lost}", column="new_obs")
    return f"{found[0].upper()}{found[1:]}: an endless run seems to be cut there; {lost}."


#: What to do with rows of several environments.
_WAY_OF_ENVS: Final = (
    "name the column of the environment in episode=, and what orders its rows in sort=; if flags end "
    "episodes within it, number them: done = log['done'].astype(int), log['part'] = "
    "done.groupby(log['env']).cumsum() - done, episode=['env', 'part']"
)


def check_env(name: str, values: NDArray[Any], before: Any, is_first: NDArray[np.bool_], row: int) -> None:
    """Refuse a column that tells environments apart, and changes within an episode.

    Args:
        name: The column.
        values: Its values in some rows.
        before: Its value in the row before these.
        is_first: Which of the rows are the first of an episode.
        row: Number of the first of these rows.
    """
    changes = np.concatenate([[before is not None and values[0] != before], values[1:] != values[:-1]])
    if (wrong := changes & ~is_first).any():
        at = int(wrong.argmax())
        raise SchemaError(
            f"row {row + at}: {excerpt(name)} changes within an episode: rows of several environments seem "
            f"to be interleaved, expected those of an episode together; {_WAY_OF_ENVS}",
            column=name,
        )


def check_edges(name: str, flagged: NDArray[np.bool_], may_be: NDArray[np.bool_], row: int, way: str) -> None:
    """Refuse a flag of first or last rows that the mapping does not name, and that is true within an episode.

    Args:
        name: The column, one of `EDGE_NAMES`.
        flagged: Where it is true, in some rows.
        may_be: Which of the rows begin an episode, or end one.
        row: Number of the first of these rows.
        way: Which field to pass, for the message.
    """
    if (wrong := flagged & ~may_be).any():
        edge = "first" if EDGE_NAMES[name.lower()] == "starts" else "last"
        shown = excerpt(name)
        raise SchemaError(
            f"row {row + int(wrong.argmax())}: {shown}, which the mapping does not name, is true within an "
            f"episode: expected it in {edge} rows only; if it marks the {edge} row of each episode, {way}; "
            "if it means something else, read it as a further column: "
            f"columns={{..., {excerpt('also_' + name)}: {shown}}}",
            column=name,
        )


def cut_paths(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Where flags of time limits may be in a table with some columns, also where infos are a nested one."""
    for name in names:
        if name.lower() in CUT_NAMES:
            yield (name,)
        if "info" in name.lower():
            for between in ((), ("final_info",)):
                yield (name, *between, "TimeLimit", "truncated")


def is_time_limit(path: tuple[str, ...]) -> bool:
    """Whether a flag is the one of Gym's wrapper ``TimeLimit``.

    Gym writes it where the limit was reached, so infos without it were not cut. It is true only where the
    state is not terminal; ``done`` is true there, too.

    Source: ``gymnasium.utils.step_api_compatibility.convert_to_terminated_truncated_step_api``.
    """
    name = ".".join(path)
    # A column is there, whatever its case; a key that is spelled otherwise would be absent from all infos.
    return _TIME_LIMIT.search(name) is not None and (len(path) == 1 or name.endswith("TimeLimit.truncated"))


def check_cut(name: str, rows: NDArray[np.int64], terminated: str) -> None:
    """Refuse a flag of time limits that the mapping does not name, in episodes that it says have terminated.

    Args:
        name: The column.
        rows: Where it is true, in episodes that are terminated by the mapping.
        terminated: The field ``terminated`` of the mapping, for the message.
    """
    if not len(rows):
        return
    shown, flag = excerpt(name), terminated.removeprefix(NOT)
    way = "name a flag of terminal states alone"
    if is_time_limit((name,)) and terminated != "True":
        way = "with it, rows that have both flags are truncated, not terminated"
    elif terminated == flag != "True":
        way += f", such as log['ended'] = log[{excerpt(flag)}] & ~log[{shown}]"
    raise SchemaError(
        f"row {rows[0]}: {shown}, which the mapping does not name, says that a time limit ended the episode, "
        f"and terminated={terminated if terminated == 'True' else excerpt(terminated)} that it terminated: "
        f"expected terminal states only, and the others in truncated={shown}; {way}; if it means something "
        f"else, read it as a further column: columns={{..., {excerpt('also_' + name)}: {shown}}}",
        column=name,
    )


def check_missing(is_missing: NDArray[np.bool_], is_first: Any, is_last: Any, row: int) -> None:
    """Refuse actions that are NaN in the last rows of episodes only, or in the first rows only.

    Args:
        is_missing: Which of some rows have no action.
        is_first: Which begin an episode.
        is_last: Which are the last of an episode.
        row: Number of the first of these rows.
    """
    for marks, edge, way in (
        (is_last, "last", "if these rows hold the final observation, pass next_obs='derive', final_row=True"),
        (
            is_first,
            "first",
            "if each row has the action before its observation, pass next_obs='derive', "
            "shifted=('actions', ...), with all columns that are stored so",
        ),
    ):
        if is_missing.any() and len(is_missing) > marks.sum() and np.array_equal(is_missing, marks):
            raise SchemaError(
                f"row {row + int(is_missing.argmax())}: actions are NaN in the {edge} row of each episode, "
                f"and in no other: expected one in each row; {way}",
                column=Columns.ACTIONS,
            )


def check_times(name: str, back: NDArray[np.int64], later: int, *, in_order: bool) -> str:
    """Refuse rows of which many are earlier than the row before them, and others later, if they must go on.

    Args:
        name: The column of times.
        back: The rows that are earlier than the row before them in their episode.
        later: Number of the rows that are later.
        in_order: Whether a row goes on from the row before it.

    Returns:
        What the user should know, if few rows go back or they need not go on; "": nothing.
    """
    if not len(back) or not later:
        return ""
    shown = excerpt(name)
    found = (
        f"{shown} goes back in {len(back)} rows of an episode (first in row {back[0]}), and on in {later}: "
        f"rows seem to be in another order than they were recorded in; pass sort={shown}"
    )
    if in_order and len(back) * 10 > later:  # Not the time of a day, which goes back at midnight.
        raise SchemaError(
            f"{found}; if it is no time of rows, map it under a name of your own: columns={{'age': {shown}}}",
            column=name,
        )
    return f"{found}."


class Restarts:
    """Looks for a step number that begins again within an episode, over stretches of rows in their order.

    Args:
        name: The column of step numbers.
        starts: First row of each episode, and the number of rows.
        in_order: Whether a row goes on from the row before it, so that steps must not go back.
        skips_last: Whether the last row of an episode has no step.
    """

    def __init__(self, name: str, starts: NDArray[np.int64], *, in_order: bool, skips_last: bool) -> None:
        self._name, self._starts, self._in_order, self._skips = name, starts, in_order, skips_last
        self._first: Any = None
        self._before: Any = None
        self._same = self._steps = 0
        #: Change of the step -> rows with it, and the first of these rows; None: it is no counter.
        self._changes: dict[int, tuple[int, int]] | None = {}

    def look(self, start: int, values: NDArray[Any]) -> None:
        """Take in the next rows, from row ``start``.

        Raises:
            SchemaError: A step is the first of its episode again; or goes back, if rows must go on.
        """
        if not len(values):
            return
        rows = np.arange(start, start + len(values))
        episode = np.searchsorted(self._starts, rows, side="right") - 1
        is_first = rows == self._starts[episode]
        low = int(episode[0])
        first = np.full(int(episode[-1]) - low + 1, values[0] if self._first is None else self._first)
        first[episode[is_first] - low] = values[is_first]
        before = np.concatenate([values[:1] if self._before is None else self._before, values[:-1]])
        back = (values < before) & ~is_first
        self._same += int(((values == before) & ~is_first).sum())
        self._steps += int(((values > before) & ~is_first).sum())
        self._count(rows, values, before, ~is_first & ~(self._skips & np.isin(rows + 1, self._starts)))
        wrong = back & (values == first[episode - low])
        if self._in_order:
            wrong |= back & (values + 1 < before)
        if self._skips:
            wrong &= ~np.isin(rows + 1, self._starts)
        self._first, self._before = first[-1], values[-1:]
        if wrong.any():
            at, name = int(wrong.argmax()), excerpt(self._name)
            raise SchemaError(
                f"row {start + at}: {name} goes back from {before[at]} to {values[at]} within an episode: "
                "expected one that goes on; name a further column in episode=[...] that changes there, such "
                f"as log['part'] = (log[{name}].diff() < 0).cumsum(), or sort the table, if rows of "
                "several environments are interleaved; if it is no step number, map it under a name of "
                f"your own: columns={{'phase': {name}}}",
                column=self._name,
            )

    def _count(
        self, rows: NDArray[np.int64], values: NDArray[Any], before: NDArray[Any], goes_on: NDArray[np.bool_]
    ) -> None:
        """Count by how much the step changes in the rows that go on from the row before them."""
        whole = values.astype(np.int64, copy=False) if values.dtype.kind in "iu" else values
        with np.errstate(invalid="ignore"):
            changes = (whole - before.astype(whole.dtype, copy=False))[goes_on]
            found, firsts, counts = np.unique(changes, return_index=True, return_counts=True)
            is_whole = bool((found % 1 == 0).all())
        if self._changes is None or len(found) + len(self._changes) > _MOST_CHANGES or not is_whole:
            self._changes = None
            return
        for change, first, count in zip(found.tolist(), firsts.tolist(), counts.tolist(), strict=True):
            seen, row = self._changes.get(int(change), (0, int(rows[goes_on][first])))
            self._changes[int(change)] = (seen + count, row)

    def finish(self) -> None:
        """Refuse steps of which as many repeat the step before as go on, if rows must go on."""
        if self._in_order and 0 < self._steps <= self._same:
            raise SchemaError(
                f"{excerpt(self._name)} repeats the step before in {self._same} rows, and goes on in "
                f"{self._steps}: rows of several environments seem to be interleaved, or rows are there "
                f"twice; expected those of an episode in their order; {_WAY_OF_ENVS}",
                column=self._name,
            )

    def check_even(self) -> str:
        """Refuse steps that mostly go on by one number, and elsewhere do not, if rows must go on.

        Returns:
            What the user should know, if they need not; "": nothing.
        """
        changes = self._changes or {}
        usual = max(changes, key=lambda change: changes[change][0], default=0)
        if 2 * changes.get(usual, (0, 0))[0] <= sum(count for count, _ in changes.values()):
            return ""
        # A last step may be shorter than the others, as the rest of a number of frames is.
        rows = [
            row for change, (_, row) in changes.items() if change * usual <= 0 or abs(change) > abs(usual)
        ]
        if not usual or not rows:
            return ""
        name = excerpt(self._name)
        found = (
            f"{name} changes by {usual} in most rows of an episode, and otherwise from row {min(rows) - 1} "
            f"to row {min(rows)}: rows seem to be missing, there twice, or in another order"
        )
        if not self._in_order:
            return f"{found}."
        raise SchemaError(
            f"{found}, and new_obs is to be derived from the next row; sort the table, drop what is there "
            "twice, name the column of the next observation in next_obs=, or name a further column in "
            f"episode=[...] that changes there, such as log['part'] = (log[{name}].diff() != {usual})"
            ".cumsum(); if it is no step number, map it under a name of your own: "
            f"columns={{'phase': {name}}}",
            column=self._name,
        )


def check_one_step(columns: Mapping[str, Any], *, has_flags: bool) -> None:
    """Refuse rows that are whole episodes: obs, actions and rewards all have an axis of steps.

    Args:
        columns: Columns of rlio, of some rows.
        has_flags: Whether there is a flag for each row.
    """
    obs = [leaf for _, leaf in leaves(columns.get(Columns.OBS, {}))]
    names = [name for name in (Columns.ACTIONS, Columns.REWARDS) if name in columns]
    others = [leaf for name in names for _, leaf in leaves(columns[name])]
    if not obs or not others or any(leaf.ndim < 2 for leaf in (*obs, *others)):
        return
    steps = others[0].shape[1]
    is_deep = any(leaf.ndim > 2 for leaf in obs)
    if (
        steps < 2
        or any(leaf.shape[1] != steps for leaf in others)
        or any(leaf.shape[1] not in (steps, steps + 1) for leaf in obs)
        or columns.get(Columns.REWARDS, others[0]).ndim != 2
        or not (is_deep or (Columns.REWARDS in names and len(names) == 2 and not has_flags))
    ):
        return
    shapes = {name: leaves(columns[name])[0][1].shape[1:] for name in (Columns.OBS, *names)}
    raise SchemaError(
        f"found rows of the shapes {excerpt(shapes)}: each seems to be an episode of {steps} steps, expected "
        "one step a row: pass per_row=True if each row is an episode; if the arrays have the shape (steps, "
        "environments, ...), swap these axes first, as in obs.swapaxes(0, 1)",
        column=Columns.OBS,
    )
