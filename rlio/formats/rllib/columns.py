"""Conventions of RLlib's columns: ``dones`` for two flags, ``infos`` of ``obs``, actions in [-1, 1].

Example:
    >>> columns = {"dones": np.array([False, True]), "infos": [{}, {"TimeLimit.truncated": True}]}
    >>> DoneFlags(None, "old.json").settle(columns)
    >>> columns["terminateds"].tolist(), columns["truncateds"].tolist()
    ([False, False], [False, True])
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch.actions import unsquash_actions
from rlio.batch.arrays import object_column
from rlio.batch.columns import Columns
from rlio.batch.nested import leaves
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.formats.episode_files import EPISODE_FILE
from rlio.formats.files.space_arrays import space_of
from rlio.support.options import check_choice, refuse_unknown
from rlio.support.spaces import Spaces

__all__ = [
    "INFO_COLUMNS",
    "INFO_KEYS",
    "NEXT_INFOS",
    "ActionScaling",
    "DoneFlags",
    "InfoOrder",
    "infos_of_next_obs",
    "infos_of_obs",
]

logger: logging.Logger = logging.getLogger("rlio")

Array: TypeAlias = NDArray[Any]

#: In files that rlio wrote for RLlib: the infos of ``new_obs``, beside ``infos``, those of ``obs``.
NEXT_INFOS: Final = "new_infos"
#: The columns that tell which row follows which.
INFO_KEYS: Final = (Columns.EPS_ID, Columns.AGENT_INDEX, Columns.T)
#: All columns that `InfoOrder.settle` looks at, beside ``infos``.
INFO_COLUMNS: Final = (NEXT_INFOS, *INFO_KEYS, Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.DONES)
_ENDS: Final = (Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.DONES)

# The key that gymnasium's time limit wrote into the info of an episode's last step.
_TIME_LIMIT = "TimeLimit.truncated"


class DoneFlags:
    """Makes ``terminateds`` and ``truncateds`` from the ``dones`` of older files.

    Args:
        asked: The requested columns; None: all.
        source: Name of the input in messages.
    """

    def __init__(self, asked: list[str] | None, source: str) -> None:
        self._asked = asked
        self._source = source
        self._said = False

    def settle(self, columns: dict[str, Any]) -> None:
        """Replace ``dones`` in place by ``terminateds``, without the rows that were truncated.

        ``truncateds`` shows which rows were truncated, or else ``terminateds``, or else the entry
        ``TimeLimit.truncated`` of the infos. If none of them does, this is logged once.

        Raises:
            SchemaError: The existing flags contradict ``dones``, or have parts.
        """
        for name in _ENDS:
            if name in columns and not isinstance(columns[name], np.ndarray):
                raise SchemaError(f"found {excerpt(columns[name])}, expected a flag a row", column=name)
        if Columns.DONES in columns:
            self._replace(columns, columns.pop(Columns.DONES))
        if self._asked is not None:  # Some columns were decoded only to compute others.
            if Columns.INFOS not in self._asked:
                columns.pop(Columns.INFOS, None)
            if not {Columns.TRUNCATEDS, Columns.DONES} & set(self._asked):
                columns.pop(Columns.TRUNCATEDS, None)

    def _replace(self, columns: dict[str, Any], dones: Any) -> None:
        terminateds, truncateds = columns.get(Columns.TERMINATEDS), columns.get(Columns.TRUNCATEDS)
        if terminateds is None and truncateds is None and Columns.INFOS in columns:
            truncated = self._told_by_infos(columns[Columns.INFOS], dones)
            columns[Columns.TERMINATEDS], columns[Columns.TRUNCATEDS] = dones & ~truncated, truncated
            return
        others = [flags for flags in (terminateds, truncateds) if flags is not None]
        if any(np.shape(flags) != np.shape(dones) for flags in others):
            raise SchemaError(
                f"dones has shape {np.shape(dones)}, unlike the other flags", column=Columns.DONES
            )
        if terminateds is None:
            if truncateds is None and dones.any():
                self._warn()
            columns[Columns.TERMINATEDS] = dones if truncateds is None else dones & ~truncateds
        elif truncateds is not None and not np.array_equal(dones, terminateds | truncateds):
            raise SchemaError(
                "dones differs from terminateds OR truncateds: one of them is wrong", column=Columns.DONES
            )
        elif truncateds is None and not np.array_equal(dones, terminateds):
            # Rows that are done and not terminated are truncated.
            if (terminateds & ~dones).any():
                raise SchemaError("a row is terminated, but not done", column=Columns.DONES)
            columns[Columns.TRUNCATEDS] = dones & ~terminateds

    def _told_by_infos(self, infos: Any, dones: Array) -> Array:
        """The rows that their infos mark as truncated; none if no info has the mark."""
        said = [info.get(_TIME_LIMIT) if isinstance(info, dict) else None for info in infos]
        if dones.any() and all(word is None for word in said):
            self._warn()
        return np.array([word is True for word in said], np.bool_) & dones

    def _warn(self) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "%s has dones, which do not say whether an episode terminated or was truncated: all count as "
                "terminateds, so no value is bootstrapped at the end of an episode",
                self._source,
            )


# ---- infos ----


class InfoOrder:
    """Gives each row the info that came with its ``new_obs``, as rlio has it.

    RLlib changed what an info belongs to. In files with ``dones`` (until 2.2) it belongs to ``new_obs``. In
    batches with ``terminateds`` (since 2.3) it belongs to ``obs``; in single steps, which only RLlib's new
    stack reads, to ``new_obs``.

    Args:
        options: ``{"infos": "obs"}`` or ``{"infos": "new_obs"}`` overrides this rule; None: it holds.
        of: The reader, for messages.

    Attributes:
        given: What ``options`` say; None: nothing.

    Raises:
        OptionError: ``options`` hold something else.
    """

    def __init__(self, options: Mapping[str, Any] | None, *, of: str = "a reader") -> None:
        refuse_unknown(options or {}, ("infos",), of=f"format_options of {of}")
        self.given: str | None = (options or {}).get("infos")
        if self.given is not None:
            check_choice("format_options['infos']", self.given, ("obs", "new_obs"))

    def settle(
        self,
        columns: dict[str, Any],
        *,
        is_batch: bool,
        following: Callable[[], Mapping[str, Any] | None] | None = None,
    ) -> None:
        """Replace ``infos`` in place.

        Args:
            columns: Columns of one record, with `INFO_KEYS` and flags if the record has them.
            is_batch: Whether the record is a batch, not a single step.
            following: Returns the columns of the next record; called if a row goes on there.

        Raises:
            SchemaError: Columns have other lengths than ``infos``.
        """
        infos = columns.get(Columns.INFOS)
        known = None if infos is None else columns.pop(NEXT_INFOS, None)
        if known is not None and self.given is None:
            columns[Columns.INFOS] = known
        elif isinstance(infos, np.ndarray) and self._belong_to_obs(columns, is_batch):
            columns[Columns.INFOS] = infos_of_next_obs(columns, following)

    def _belong_to_obs(self, columns: Mapping[str, Any], is_batch: bool) -> bool:
        if self.given is not None:
            return self.given == "obs"
        has_flags = Columns.TERMINATEDS in columns or Columns.TRUNCATEDS in columns
        return is_batch and has_flags and Columns.DONES not in columns


def infos_of_next_obs(
    columns: Mapping[str, Any], following: Callable[[], Mapping[str, Any] | None] | None = None
) -> Array:
    """The infos of ``new_obs``, made of infos of ``obs``: each row gets the info of the row that follows it.

    The last row of an episode gets ``{}``: its info was not recorded. So does the last row of a fragment, if
    ``following`` does not have the row after it.

    Args:
        columns: ``infos``, and of `INFO_KEYS` and flags what there is. Rows of an episode and agent are in
            their order; rows of others may lie between them.
        following: Returns such columns of the rows that were recorded next, or None; called if an episode
            goes on.

    Returns:
        Array of N objects, which are those of ``infos``.

    Raises:
        SchemaError: A column has another length than ``infos``.
    """
    infos = columns[Columns.INFOS]
    rows = len(infos)
    ended = np.zeros(rows, np.bool_)
    for name in _ENDS:
        if name in columns:
            ended |= _checked(columns, name, rows).astype(np.bool_)
    goes_on = not ended.all() and Columns.EPS_ID in columns
    more = following() if goes_on and following is not None else None
    if more is None and all(type(info) is dict and not info for info in infos):
        return infos  # type: ignore[no-any-return]  # the column is an array
    after = _next_rows(columns, rows)
    after[ended] = rows
    found = np.append(infos, [None])[after]
    unknown = np.flatnonzero(after == rows)
    for row in unknown:
        found[row] = {}
    if more is not None:
        _fill(found, unknown[~ended[unknown]], columns, more)
    return found


def _next_rows(columns: Mapping[str, Any], rows: int) -> Array:
    """For each row, the next one of the same episode and agent; ``rows``: there is none."""
    keys, after = _keys(columns, rows), np.arange(1, rows + 1)
    goes_on = np.ones(max(rows - 1, 0), np.bool_)
    for values in keys:
        goes_on &= values[1:] == values[:-1]
    later: dict[Hashable, int] = {}
    last = rows - 1
    # Runs of rows of one episode and agent, from the last to the first.
    for start in (*(np.flatnonzero(~goes_on)[::-1] + 1).tolist(), *([0] if rows else [])):
        key = _key(keys, start)
        after[last] = later.get(key, rows)
        later[key], last = start, start - 1
    if (times := _times(columns, rows)) is not None:
        known = np.flatnonzero(after < rows)
        after[known[times[after[known]] <= times[known]]] = rows
    return after


def _fill(found: Array, unknown: Array, columns: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Put the infos of the first rows of ``more`` into the ``unknown`` rows that they follow."""
    infos = more.get(Columns.INFOS, found[:0])
    keys, times = _keys(more, len(infos)), _times(more, len(infos))
    own_keys, own_times = _keys(columns, len(found)), _times(columns, len(found))
    first = {_key(keys, row): row for row in reversed(range(len(infos)))}
    for row in unknown:
        after = first.get(_key(own_keys, row))
        if after is not None and (times is None or own_times is None or own_times[row] < times[after]):
            found[row] = infos[after]


def infos_of_obs(infos: Array) -> Array:
    """The infos of ``obs`` of one episode's rows, made of infos of ``new_obs``; the first is ``{}``."""
    return object_column([{}, *infos[:-1]] if len(infos) else [])


def _keys(columns: Mapping[str, Any], rows: int) -> list[Array]:
    """The columns that tell episodes and agents apart."""
    return [
        _checked(columns, name, rows) for name in (Columns.EPS_ID, Columns.AGENT_INDEX) if name in columns
    ]


def _key(keys: list[Array], row: int) -> Hashable:
    """Episode and agent of a row. As texts, because an untrusted id may not be hashable."""
    return tuple(str(values.item(row)) for values in keys)


def _times(columns: Mapping[str, Any], rows: int) -> Array | None:
    """The step of each row; None: steps are not recorded."""
    times = _checked(columns, Columns.T, rows) if Columns.T in columns else None
    return times if times is not None and times.dtype.kind in "iu" else None


def _checked(columns: Mapping[str, Any], name: str, rows: int) -> Array:
    """A column of one value a row."""
    column = columns[name]
    if not isinstance(column, np.ndarray) or column.shape != (rows,):
        raise SchemaError(
            f"found {excerpt(column, 80)}, expected a value for each of {rows} infos", column=name
        )
    return column


# ---- actions ----


class ActionScaling:
    """Scales recorded actions of RLlib to the bounds of their space, or logs once that it does not.

    RLlib's policies give actions of bounded Boxes in [-1, 1] (its ``normalize_actions``, on by default), and
    RLlib records these.

    Args:
        spaces: See `RllibDecoder`.
        wished: Whether to scale actions; None: do not scale, and log this.
        source: Name of the input in messages.

    Raises:
        OptionError: ``wished`` is True, and no space is known.
    """

    def __init__(self, spaces: Spaces | None, wished: bool | None, source: str) -> None:
        if wished not in (None, True, False):
            raise OptionError(f"unnormalise_actions={excerpt(wished)}: expected True, False or None")
        if wished and spaces is None:
            raise OptionError(
                "unnormalise_actions=True scales actions to the bounds of the action space: pass "
                "spaces=(observation_space, action_space)"
            )
        self._spaces = spaces
        self._wished = wished
        self._source = source
        # A conversion scales no actions.
        self._is_ours = EPISODE_FILE.search(source) is not None

    def scale(self, columns: dict[str, Any], policy: str, *, is_rllibs: bool = True) -> None:
        """Scale the actions of ``policy`` in place.

        Raises:
            OptionError: The policy's space is not known.
            SchemaError: The actions do not fit the space.
        """
        if self._wished is None:
            self._warn(columns.get(Columns.ACTIONS) if is_rllibs and not self._is_ours else None)
        if not self._wished:
            return
        space = space_of(self._spaces, policy).get(Columns.ACTIONS)
        if space is None:
            raise OptionError(f"unnormalise_actions=True: spaces= has none for policy {excerpt(policy)}")
        for name in (Columns.ACTIONS, Columns.PREV_ACTIONS):
            if name in columns:
                columns[name] = unsquash_actions(columns[name], space)

    def _warn(self, actions: Any) -> None:
        if actions is None or not any(leaf.dtype.kind == "f" for _, leaf in leaves(actions)):
            return
        self._wished = False
        logger.warning(
            "%s: RLlib records continuous actions scaled to [-1, 1], unless its normalize_actions was off, "
            "and they are served unchanged; pass unnormalise_actions=True and spaces= to get the actions "
            "that the environment got, or unnormalise_actions=False to keep them",
            self._source,
        )
