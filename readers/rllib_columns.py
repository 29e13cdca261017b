"""What RLlib's columns mean beyond their values: ``dones`` that stand for two flags, actions in [-1, 1].

Example:
    >>> columns = {"dones": np.array([False, True]), "infos": [{}, {"TimeLimit.truncated": True}]}
    >>> DoneFlags(None, "old.json").settle(columns)
    >>> columns["terminateds"].tolist(), columns["truncateds"].tolist()
    ([False, False], [False, True])
"""

from __future__ import annotations

import logging
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch.actions import unsquash_actions
from rlio.batch.columns import Columns
from rlio.batch.nested import leaves
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.readers.space_arrays import Spaces, space_of

__all__ = ["ActionScaling", "DoneFlags"]

logger = logging.getLogger("rlio")

Array: TypeAlias = NDArray[Any]

# What gymnasium's time limit used to write into the info of an episode's last step.
_TIME_LIMIT = "TimeLimit.truncated"


class DoneFlags:
    """Makes ``terminateds`` and ``truncateds`` of the ``dones`` of older files.

    Args:
        asked: The columns that the user asked for; None: all.
        source: What messages call the input.
    """

    def __init__(self, asked: list[str] | None, source: str) -> None:
        self._asked = asked
        self._source = source
        self._said = False

    def settle(self, columns: dict[str, Any]) -> None:
        """Replace ``dones``, in place: they become ``terminateds``, less those that were truncated.

        Whether a row was truncated is told by ``truncateds``, else by ``terminateds``, else by the entry
        ``TimeLimit.truncated`` of its info. Where nothing tells it, that is logged, once.

        Raises:
            SchemaError: There are flags too, and they say something else.
        """
        if Columns.DONES in columns:
            self._replace(columns, columns.pop(Columns.DONES))
        if self._asked is not None:  # Some were decoded for the sake of others.
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
                f"dones has shape {np.shape(dones)}, unlike the flags beside it", column=Columns.DONES
            )
        if terminateds is None:
            if truncateds is None and dones.any():
                self._warn()
            columns[Columns.TERMINATEDS] = dones if truncateds is None else dones & ~truncateds
        elif truncateds is not None and not np.array_equal(dones, terminateds | truncateds):
            raise SchemaError(
                "dones is not terminateds or truncateds: one of them is wrong", column=Columns.DONES
            )
        elif truncateds is None and not np.array_equal(dones, terminateds):
            # Done and not terminated is truncated.
            if (terminateds & ~dones).any():
                raise SchemaError("a row is terminated and not done", column=Columns.DONES)
            columns[Columns.TRUNCATEDS] = dones & ~terminateds

    def _told_by_infos(self, infos: Any, dones: Array) -> Array:
        """Which rows were truncated, by their infos; none where those do not say it."""
        said = [info.get(_TIME_LIMIT) if isinstance(info, dict) else None for info in infos]
        if dones.any() and all(word is None for word in said):
            self._warn()
        return np.array([word is True for word in said], np.bool_) & dones

    def _warn(self) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "%s has dones, which do not say whether an episode terminated or was truncated: all count as "
                "terminateds, so that no value is bootstrapped at the end of an episode",
                self._source,
            )


class ActionScaling:
    """Scales the actions that RLlib recorded to the bounds of their space, or says once that it does not.

    RLlib's policies give actions of bounded Boxes in [-1, 1] (its ``normalize_actions``, on by default), and
    that is what it records.

    Args:
        spaces: See `RllibDecoder`.
        wished: Whether to scale them; None: not, and say so.
        source: What messages call the input.

    Raises:
        OptionError: They are to be scaled, and no space is known.
    """

    def __init__(self, spaces: Spaces | None, wished: bool | None, source: str) -> None:
        if wished not in (None, True, False):
            raise OptionError(f"unnormalise_actions={excerpt(wished)}: True, False, or None to be told")
        if wished and spaces is None:
            raise OptionError(
                "unnormalise_actions=True needs spaces=(observation_space, action_space): actions are scaled "
                "to the bounds of the action space"
            )
        self._spaces = spaces
        self._wished = wished
        self._source = source

    def scale(self, columns: dict[str, Any], policy: str, *, is_rllibs: bool = True) -> None:
        """Scale the actions of ``policy`` in place.

        Raises:
            OptionError: The policy's space is not known.
            SchemaError: They do not fit it.
        """
        if self._wished is None:
            self._warn(columns.get(Columns.ACTIONS) if is_rllibs else None)
        if not self._wished:
            return
        space = space_of(self._spaces, policy).get(Columns.ACTIONS)
        if space is None:
            raise OptionError(f"unnormalise_actions=True, and spaces= has none of policy {excerpt(policy)}")
        for name in (Columns.ACTIONS, Columns.PREV_ACTIONS):
            if name in columns:
                columns[name] = unsquash_actions(columns[name], space)

    def _warn(self, actions: Any) -> None:
        if actions is None or not any(leaf.dtype.kind == "f" for _, leaf in leaves(actions)):
            return
        self._wished = False
        logger.warning(
            "%s: RLlib records continuous actions scaled to [-1, 1], unless its normalize_actions was off, "
            "and they are served like that; give unnormalise_actions=True and spaces= to have those that the "
            "environment got, or unnormalise_actions=False if these are meant",
            self._source,
        )
