"""`RowStore`: rows as preallocated columns, the base class of `StepRecorder` and `AgentRows`.

A `StepRecorder` holds the rows of N streams that all act at every step, with one assignment per column and
step. An `AgentRows` holds rows of streams that come and go: it opens them when they act and closes them when
the outcome is known. docs/design/house.md states the cost of one store for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch.columns import Columns
from rlio.batch.nested import path_text, unflatten
from rlio.envs.leaves import Leaf, leaf_of, leaves_of
from rlio.errors import SchemaError, excerpt

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["RowStore", "assign", "longer", "nested"]


class RowStore:
    """Columns of rows. Observations, actions and flags have the dtypes of the spaces.

    Args:
        observation_space: Space of one observation, as the policy gets it.
        action_space: Space of one action, as the policy gives it.
        capacity: Initial number of entries.
        streams: Number of streams that share an entry, if there are several: columns are (capacity, streams,
            ...).
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        capacity: int,
        streams: int | None = None,
    ) -> None:
        self.capacity = capacity
        self._axes = () if streams is None else (streams,)
        self._observation_leaves = leaves_of(observation_space)
        self._action_leaves = leaves_of(action_space)
        #: The policy's further columns; None before it has acted.
        self._extras: dict[str, NDArray[Any]] | None = None

    def _buffers(self, leaves: Iterable[Leaf], entries: int) -> list[NDArray[Any]]:
        return [np.zeros((entries, *self._axes, *leaf.shape), leaf.dtype) for leaf in leaves]

    # ---- checks of a policy's results ----

    def _checked_actions(self, actions: Any, n: int) -> list[Any]:
        """The leaves of ``actions``, (n, ...).

        Raises:
            SchemaError: The actions do not fit the space.
        """
        found = []
        for leaf in self._action_leaves:
            value = leaf_of(actions, leaf.path) if leaf.path else actions
            if not leaf.is_object:
                value = np.asarray(value)
                expected = (n, *leaf.shape)
                fits = value.dtype == leaf.dtype or np.can_cast(value.dtype, leaf.dtype, "same_kind")
                if not fits or value.shape != expected:
                    raise SchemaError(
                        f"the policy gave {value.dtype} {value.shape}: expected {n} actions of "
                        f"{leaf.space}, {leaf.dtype} {expected}",
                        column="/".join(filter(None, (Columns.ACTIONS, path_text(leaf.path)))),
                    )
            found.append(value)
        return found

    def _checked_extras(self, extras: Mapping[str, Any], n: int) -> dict[str, NDArray[Any]]:
        """The policy's further columns, (n, ...); the first call fixes their names, dtypes and shapes.

        Raises:
            SchemaError: A column is not one array with n rows, or differs from earlier calls.
        """
        arrays = {name: np.asarray(value) for name, value in extras.items()}
        if self._extras is None:
            for name, array in arrays.items():
                if isinstance(extras[name], tuple) or array.dtype == object or array.shape[:1] != (n,):
                    raise SchemaError(
                        f"the policy gave {array.dtype} {array.shape}: expected an extra column as one "
                        f"array with a row for each of the {n} observations",
                        column=name,
                    )
            self._extras = {
                name: np.zeros((self.capacity, *self._axes, *array.shape[1:]), array.dtype)
                for name, array in arrays.items()
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

    def forget_extras(self) -> None:
        """Allow other extra columns in new rows; there must be no rows with the old ones."""
        self._extras = None


def nested(leaves: Sequence[Leaf], values: Sequence[Any]) -> Any:
    """Nest ``values``, one per leaf, as in the space of ``leaves``."""
    if len(leaves) == 1 and not leaves[0].path:
        return values[0]
    return unflatten([leaf.path for leaf in leaves], values)


def longer(buffer: NDArray[Any], entries: int, used: int) -> NDArray[Any]:
    """A buffer with room for ``entries`` that begins with the first ``used`` entries of ``buffer``."""
    made = np.zeros((entries, *buffer.shape[1:]), buffer.dtype)
    made[:used] = buffer[:used]
    return made


def assign(buffer: NDArray[Any], at: Any, values: Any) -> None:
    """Set ``buffer[at] = values``, one by one for objects, because NumPy would unpack them."""
    if buffer.dtype != object:
        buffer[at] = values
        return
    if isinstance(at, int):
        buffer, at = buffer[at], slice(0, len(buffer[at]))
    numbers = range(at.start, at.stop) if isinstance(at, slice) else at.tolist()
    for row, value in zip(numbers, values, strict=True):
        buffer[row] = value
