"""`RowStore`: rows as preallocated columns, the base class of `StepRecorder` and `AgentRows`.

A `StepRecorder` holds the rows of N streams that all act at every step, with one assignment per column and
step. An `AgentRows` holds rows of streams that come and go: it opens them when they act and closes them when
the outcome is known. docs/design/house.md states the cost of one store for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Column
from rlio.batch.columns import Columns
from rlio.batch.nested import unflatten
from rlio.envs.leaves import Leaf, leaf_of, leaves_of
from rlio.envs.values import fitted, in_numpy, is_plain, text_column
from rlio.errors import SchemaError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["RowStore", "assign", "nested"]


class RowStore:
    """Columns of rows. Observations, actions and flags have the dtypes of the spaces.

    Args:
        observation_space: Space of one observation, as the policy gets it.
        action_space: Space of one action, as the policy gives it.
        entries: Initial number of entries.
        streams: Number of streams that share an entry, if there are several: columns are (entries, streams,
            ...).
        rewards: Dtype in which rewards are kept; they are handed out as float32.
        flags: Names of bool columns, beside terminateds and truncateds, that only the store uses.
        infos: Whether to record a column of infos.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        entries: int,
        streams: int | None = None,
        rewards: type[np.floating[Any]],
        flags: Sequence[str],
        infos: bool,
    ) -> None:
        self._entries = entries
        self._axes = () if streams is None else (streams,)
        self._observation_leaves = leaves_of(observation_space)
        self._action_leaves = leaves_of(action_space)
        self._obs = self._buffers(self._observation_leaves)
        self._actions = self._buffers(self._action_leaves)
        #: The columns that every store has, by name.
        self._own: dict[str, NDArray[Any]] = {Columns.REWARDS: self._buffer(rewards)}
        for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS, *flags):
            self._own[name] = self._buffer(bool)
        if infos:
            self._own[Columns.INFOS] = np.full((entries, *self._axes), None, object)
        #: Integer columns that the caller passes; known once there are rows.
        self._integers: dict[str, NDArray[np.int64]] = {}
        #: The policy's further columns; None before it has acted.
        self._extras: dict[str, NDArray[Any]] | None = None

    def _buffer(self, dtype: Any, shape: tuple[int, ...] = ()) -> NDArray[Any]:
        return np.zeros((self._entries, *self._axes, *shape), dtype)

    def _buffers(self, leaves: Iterable[Leaf]) -> list[NDArray[Any]]:
        return [self._buffer(leaf.dtype, leaf.shape) for leaf in leaves]

    # ---- all columns ----

    def _put(
        self,
        at: int | slice,
        actions: Sequence[Any],
        extras: Mapping[str, NDArray[Any]],
        integers: Mapping[str, Any],
    ) -> None:
        """Store checked actions and further columns of the policy, and integer columns."""
        assert self._extras is not None
        for buffer, value in zip(self._actions, actions, strict=True):
            assign(buffer, at, value)
        for name, array in extras.items():
            self._extras[name][at] = array
        for name, number in integers.items():
            if name not in self._integers:
                self._integers[name] = self._buffer(np.int64)
            self._integers[name][at] = number

    def _columns(
        self, rows: Callable[[NDArray[Any]], NDArray[Any]], new_obs: Sequence[NDArray[Any]]
    ) -> dict[str, Column]:
        """The columns of some rows, which ``rows`` copies from a buffer."""
        own = self._own
        columns: dict[str, Column] = {
            Columns.OBS: nested(self._observation_leaves, [rows(buffer) for buffer in self._obs]),
            Columns.ACTIONS: nested(self._action_leaves, [rows(buffer) for buffer in self._actions]),
            # Learners compute in float32, which takes half the memory of the environments' float64.
            Columns.REWARDS: rows(own[Columns.REWARDS]).astype(np.float32, copy=False),
            Columns.NEXT_OBS: nested(self._observation_leaves, new_obs),
            Columns.TERMINATEDS: rows(own[Columns.TERMINATEDS]),
            Columns.TRUNCATEDS: rows(own[Columns.TRUNCATEDS]),
        }
        if Columns.INFOS in own:
            columns[Columns.INFOS] = rows(own[Columns.INFOS])
        for name, buffer in (self._integers | (self._extras or {})).items():
            columns[name] = rows(buffer)
        return columns

    def _leaf_buffers(self) -> list[list[NDArray[Any]]]:
        """The columns that are lists of leaves."""
        return [self._obs, self._actions]

    def _named_buffers(self) -> list[dict[str, NDArray[Any]]]:
        """The columns that have a name."""
        return [self._own, self._integers, self._extras or {}]

    def _keep_entries(self, which: Any, entries: int) -> None:
        """Move the ``entries`` entries ``which`` to the front."""
        for buffers in self._leaf_buffers():
            for buffer in buffers:
                buffer[:entries] = buffer[which]
        for columns in self._named_buffers():
            for buffer in columns.values():
                buffer[:entries] = buffer[which]

    def _lengthen(self, entries: int, used: int) -> None:
        """Make room for ``entries`` entries, and keep the first ``used``."""
        self._entries = entries
        for buffers in self._leaf_buffers():
            buffers[:] = [_longer(buffer, entries, used) for buffer in buffers]
        for columns in self._named_buffers():
            for name, buffer in columns.items():
                columns[name] = _longer(buffer, entries, used)

    # ---- checks of a policy's results ----

    def _checked_actions(self, actions: Any, n: int) -> list[Any]:
        """The leaves of ``actions``, (n, ...).

        Raises:
            SchemaError: The actions do not fit the space.
        """
        leaves = self._action_leaves
        if leaves and is_plain(leaves, actions, (n, *leaves[0].shape)):
            return [actions]
        found = []
        for leaf in leaves:
            value = leaf_of(actions, leaf.path) if leaf.path else actions
            found.append(fitted(leaf, value, column=Columns.ACTIONS, giver="the policy", rows=n))
        return found

    def _checked_extras(self, extras: Mapping[str, Any], n: int) -> dict[str, NDArray[Any]]:
        """The policy's further columns, (n, ...); the first call fixes their names, dtypes and shapes.

        Raises:
            SchemaError: A column is not one array with n rows, or differs from earlier calls.
        """
        if not extras and self._extras is not None and not self._extras:
            return {}
        arrays = {
            name: value if type(value) is np.ndarray and value.dtype.kind in "biuf" else _extra(value)
            for name, value in extras.items()
        }
        if self._extras is None:
            for name, array in arrays.items():
                is_misfit = isinstance(extras[name], tuple) or array.shape[:1] != (n,)
                if is_misfit or (array.dtype == object and text_column(array) is None):
                    raise SchemaError(
                        f"the policy gave {array.dtype} {array.shape}: expected an extra column as one "
                        f"array with a row for each of the {n} observations",
                        column=name,
                    )
            self._extras = {
                name: self._buffer(array.dtype, array.shape[1:]) for name, array in arrays.items()
            }
        if arrays.keys() != self._extras.keys():
            raise SchemaError(
                f"the policy gave the extra columns {excerpt(sorted(arrays))}, but "
                f"{excerpt(sorted(self._extras))} before: return the same columns at every step"
            )
        first = 1 + len(self._axes)
        for name, array in arrays.items():
            buffer = self._extras[name]
            if array.dtype != buffer.dtype or array.shape != (n, *buffer.shape[first:]):
                raise SchemaError(
                    f"the policy gave {array.dtype} {array.shape} for {n} observations, but {buffer.dtype} "
                    f"{buffer.shape[first:]} for each before",
                    column=name,
                )
        return arrays

    @property
    def has_extras(self) -> bool:
        """Whether rows have further columns of the policy."""
        return bool(self._extras)

    def forget_extras(self) -> None:
        """Allow other extra columns in new rows; there must be no rows with the old ones."""
        self._extras = None


def _extra(value: Any) -> NDArray[Any]:
    """Rows of a further column; texts as objects, because a buffer cuts texts longer than the first."""
    texts = text_column(value)
    return in_numpy(value) if texts is None else texts


def nested(leaves: Sequence[Leaf], values: Sequence[Any]) -> Any:
    """Nest ``values``, one per leaf, as in the space of ``leaves``."""
    if len(leaves) == 1 and not leaves[0].path:
        return values[0]
    return unflatten([leaf.path for leaf in leaves], values)


def _longer(buffer: NDArray[Any], entries: int, used: int) -> NDArray[Any]:
    made = np.zeros((entries, *buffer.shape[1:]), buffer.dtype)
    made[:used] = buffer[:used]
    return made


def assign(buffer: NDArray[Any], at: Any, values: Any) -> None:
    """Set ``buffer[at] = values``, one by one for objects, because NumPy would unpack them."""
    if buffer.dtype.kind != "O":
        buffer[at] = values
        return
    if isinstance(at, int):
        buffer, at = buffer[at], slice(0, len(buffer[at]))
    numbers = range(at.start, at.stop) if isinstance(at, slice) else at.tolist()
    for row, value in zip(numbers, values, strict=True):
        buffer[row] = value
