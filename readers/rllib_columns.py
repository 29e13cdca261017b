"""Conventions of RLlib's columns: ``dones`` that stand for two flags, actions in [-1, 1].

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

logger: logging.Logger = logging.getLogger("rlio")

Array: TypeAlias = NDArray[Any]

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
            SchemaError: The existing flags contradict ``dones``.
        """
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

    def scale(self, columns: dict[str, Any], policy: str, *, is_rllibs: bool = True) -> None:
        """Scale the actions of ``policy`` in place.

        Raises:
            OptionError: The policy's space is not known.
            SchemaError: The actions do not fit the space.
        """
        if self._wished is None:
            self._warn(columns.get(Columns.ACTIONS) if is_rllibs else None)
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
