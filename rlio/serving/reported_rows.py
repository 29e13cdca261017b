"""`ReportedRows`: rows that clients with local inference send to a `PolicyServerInput`, until sampled.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> from rlio.batch import SampleBatch
    >>> rows = ReportedRows(Box(0.0, 9.0, (1,)), Discrete(2))
    >>> rows.check(SampleBatch(obs=np.zeros((2, 1))))
    Traceback (most recent call last):
    ...
    rlio.errors.SchemaError: reported rows lack this column [column actions]
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch import Column, SampleBatch
from rlio.batch.columns import Columns, is_per_sequence
from rlio.batch.nested import leaves, path_text
from rlio.batch.probabilities import read_log_probabilities
from rlio.envs.leaves import Leaf, leaves_of
from rlio.errors import SchemaError, excerpt
from rlio.sampling.external_episodes import LOGGED
from rlio.sampling.given_values import OF_THE_CHOICE, has_densities, inside, value_of

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["ReportedRows"]

_NUMBERS: Final = {
    Columns.REWARDS: np.dtype(np.float32),
    Columns.TERMINATEDS: np.dtype(bool),
    Columns.TRUNCATEDS: np.dtype(bool),
    Columns.EPS_ID: np.dtype(np.int64),
    Columns.T: np.dtype(np.int64),
}
# Duplicate reports come soon after the first: so many ids are remembered.
_REMEMBERED: Final = 65_536


class ReportedRows:
    """Checked batches in order of arrival. Not thread-safe: the caller holds a lock.

    Args:
        observation_space: Space of one observation.
        action_space: Space of one action.
    """

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self._leaves = {
            Columns.OBS: leaves_of(observation_space),
            Columns.ACTIONS: leaves_of(action_space),
            Columns.NEXT_OBS: leaves_of(observation_space),
        }
        self._has_densities = has_densities(action_space)
        self._batches: deque[SampleBatch] = deque()
        #: Bytes of the waiting batches.
        self.waiting_bytes: int = 0
        #: Further columns, as in the first batch: name -> path, dtype and shape of each leaf.
        self._further: dict[str, list[Any]] | None = None
        self._ids: dict[str, None] = {}

    def __len__(self) -> int:
        """Number of waiting batches."""
        return len(self._batches)

    @property
    def rows(self) -> int:
        """Rows of the waiting batches."""
        return sum(map(len, self._batches))

    def add(self, batch: SampleBatch, report_id: str | None = None) -> bool:
        """Append a checked batch.

        Args:
            batch: Rows.
            report_id: The sender's id of the report; None: it is sent once.

        Returns:
            Whether it is new: False if a batch with this ``report_id`` came before.
        """
        if report_id is not None:
            if report_id in self._ids:
                return False
            self._ids[report_id] = None
            if len(self._ids) > _REMEMBERED:
                del self._ids[next(iter(self._ids))]
        if len(batch):
            self._batches.append(batch)
            self.waiting_bytes += batch.size_bytes()
        return True

    def pop(self) -> SampleBatch:
        """Take the oldest batch."""
        batch = self._batches.popleft()
        self.waiting_bytes -= batch.size_bytes()
        return batch

    def check(self, batch: SampleBatch) -> None:
        """Check that rows fit the spaces, and have the same columns as earlier rows.

        Raises:
            SchemaError: They do not; the message names the column, and the row.
        """
        for name in (*self._leaves, *_NUMBERS):
            if name not in batch:
                raise SchemaError("reported rows lack this column", column=name)
        for name, dtype in _NUMBERS.items():
            _plain(batch, name, dtype)
        _check_each(~np.isfinite(batch[Columns.REWARDS]), "NaN or infinity", Columns.REWARDS)
        _check_each(batch[Columns.T] < 0, "a step below 0", Columns.T)
        for name, specs in self._leaves.items():
            self._check_nested(name, specs, batch)
        self._check_choices(batch)
        self._check_further(batch)

    def _check_nested(self, name: str, specs: list[Leaf], batch: SampleBatch) -> None:
        found = leaves(batch[name])
        if [path for path, _ in found] != [leaf.path for leaf in specs]:
            raise SchemaError(
                f"reported rows are nested as {excerpt([path_text(path) for path, _ in found])}, but the "
                f"space as {excerpt([path_text(leaf.path) for leaf in specs])}",
                column=name,
            )
        known = np.ones(len(batch), bool)
        if name == Columns.NEXT_OBS and Columns.NEXT_OBS_VALID in batch:
            known = _plain(batch, Columns.NEXT_OBS_VALID, np.dtype(bool))
        own = ~_logged(batch) if name == Columns.ACTIONS else np.zeros(len(batch), bool)
        for leaf, (path, array) in zip(specs, found, strict=True):
            column = "/".join(filter(None, (name, path_text(path))))
            if array.dtype != leaf.dtype or array.shape[1:] != leaf.shape:
                raise _other(array, f"{leaf.dtype} {leaf.shape} for each", column)
            if leaf.is_object:
                _check_objects(leaf, array, known, column)
                continue
            wrong = _rows_with(~inside(leaf.space, array))
            if leaf.dtype.kind == "f":
                # A Gaussian policy's own actions exceed the bounds: only the environment gets clipped ones.
                wrong = np.where(own, _rows_with(~np.isfinite(array)), wrong)
            _check_each(wrong & known, f"values outside {excerpt(str(leaf.space))}", column)
            _check_each(_rows_with(array != 0) & ~known, "an unknown observation that is not zeros", column)

    def _check_choices(self, batch: SampleBatch) -> None:
        """Check how likely actions were: nobody knows it for logged actions, whose values are NaN."""
        given = {name: batch[name] for name in OF_THE_CHOICE if name in batch}
        if not given:
            return
        columns = {name: _plain(batch, name, None) for name in given}
        unknown = _logged(batch) & np.all([np.isnan(column) for column in columns.values()], axis=0)
        rows = np.flatnonzero(~unknown)
        read_log_probabilities(
            SampleBatch({name: column[rows] for name, column in columns.items()}),
            densities=self._has_densities,
        )

    def _check_further(self, batch: SampleBatch) -> None:
        further = {}
        for name, column in batch.items():
            if is_per_sequence(name):
                raise SchemaError("reported rows are not sequences: leave this column out", column=name)
            if name not in self._leaves and name not in _NUMBERS and name != Columns.NEXT_OBS_VALID:
                further[name] = [(path, array.dtype, array.shape[1:]) for path, array in leaves(column)]
                if name not in OF_THE_CHOICE:
                    _check_numbers(name, column)
        if self._further is None:
            self._further = further
        if further.keys() != self._further.keys():
            raise SchemaError(
                f"reported rows have the further columns {excerpt(sorted(further))}, but earlier rows had "
                f"{excerpt(sorted(self._further))}: use the same policy in all clients"
            )
        for name, found in further.items():
            if found != self._further[name]:
                raise SchemaError(
                    f"reported rows have {excerpt(str(found))} here, but earlier rows "
                    f"{excerpt(str(self._further[name]))}",
                    column=name,
                )


def _plain(batch: SampleBatch, name: str, dtype: np.dtype[Any] | None) -> NDArray[Any]:
    """A column of one number a row, of this dtype, or of any float; raises SchemaError if it is not."""
    found = batch[name]
    is_array = isinstance(found, np.ndarray) and found.ndim == 1
    if is_array and (found.dtype == dtype or (dtype is None and found.dtype.kind == "f")):
        return np.asarray(found)
    raise _other(found, f"{dtype or 'a float dtype'} and one number a row", name)


def _logged(batch: SampleBatch) -> NDArray[np.bool_]:
    """Which actions the loop chose; all, if rows do not say so."""
    if LOGGED not in batch:
        return np.ones(len(batch), bool)
    return _plain(batch, LOGGED, np.dtype(bool))


def _rows_with(wrong: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return np.asarray(np.any(wrong.reshape(len(wrong), -1), axis=1))


def _check_each(wrong: NDArray[np.bool_], what: str, column: str) -> None:
    if wrong.any():
        raise SchemaError(f"reported rows have {what}, the first in row {wrong.argmax()}", column=column)


def _check_objects(leaf: Leaf, values: NDArray[Any], known: NDArray[np.bool_], column: str) -> None:
    """Check values of Text, Sequence, Graph or OneOf, and replace them by those of the space."""
    for row in np.flatnonzero(known):
        try:
            values[row] = value_of(leaf.space, values[row], "")[0]
        except SchemaError as error:
            raise SchemaError(f"reported rows have in row {row}: {error}", column=column) from error


def _check_numbers(name: str, column: Column) -> None:
    for path, array in leaves(column):
        if array.dtype.kind == "f":
            whole_name = "/".join(filter(None, (name, path_text(path))))
            _check_each(_rows_with(np.isnan(array)), "NaN", whole_name)


def _other(found: Any, expected: str, column: str) -> SchemaError:
    is_array = isinstance(found, np.ndarray)
    what = f"{found.dtype} {found.shape[1:]}" if is_array else "a nested column"
    return SchemaError(f"reported rows have {what}, expected {expected}", column=column)
