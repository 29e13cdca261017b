"""Batches of one input are alike: the check that names the first column that is not.

Example:
    >>> from rlio.batch import SampleBatch
    >>> uniform = Uniform()
    >>> uniform.adopt(SampleBatch(obs=[[0.5, 1.0]]))
    >>> uniform.conform(SampleBatch(obs=[[1, 2]]))["obs"]
    array([[1., 2.]])
    >>> uniform.conform(SampleBatch(obs=[[1.0]]))
    Traceback (most recent call last):
    ...
    rlio.errors.SchemaError: rows of shape (1,) where the first record has (2,) [column obs]
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.columns import DEFAULT_POLICY_ID
from rlio.errors import MissingColumn, SchemaError, excerpt
from rlio.interfaces import Batch
from rlio.nested import Path, leaves, map_structure, path_text

__all__ = ["Uniform"]

_Leaf: TypeAlias = tuple[str, Path]


class Uniform:
    """What the columns of each policy are (names, dtypes, shapes of rows), taken from its first batch.

    Args:
        any_float: Whether floats of another size are made those of the first batch, where no value changes:
            for batches from files that say what their dtypes are, beside others from files that do not.
    """

    def __init__(self, *, any_float: bool = False) -> None:
        self._any_float = any_float
        self._policies: dict[str, dict[_Leaf, tuple[np.dtype[Any], tuple[int, ...]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._policies)

    def adopt(self, batch: Batch) -> None:
        """Expect batches like this one from now on; of policies that were not seen before."""
        for policy, rows in _policies(batch):
            if len(rows) and policy not in self._policies:
                self._policies[policy] = {
                    leaf: (values.dtype, values.shape[1:]) for leaf, values in _leaves(rows)
                }

    def conform(self, batch: Batch) -> Batch:
        """``batch`` itself, or with numbers made those that its column has elsewhere: whole ones floats.

        Raises:
            SchemaError: A column has another dtype or shape than in the first batch, or was not there.
            MissingColumn: One that was there is absent.
        """
        self.adopt(batch)
        for policy, rows in _policies(batch):
            if len(rows):
                self._conform(rows, self._policies[policy])
        return batch

    def _conform(
        self, rows: SampleBatch, expected: dict[_Leaf, tuple[np.dtype[Any], tuple[int, ...]]]
    ) -> None:
        found = dict(_leaves(rows))
        for (name, path), (dtype, shape) in expected.items():
            values = found.get((name, path))
            if values is None:
                raise MissingColumn(
                    f"the column{_within(path)} is absent, but the first record has it: give columns= with "
                    "what all records have",
                    column=name,
                )
            if values.shape[1:] != shape:
                raise SchemaError(
                    f"rows of shape {values.shape[1:]}{_within(path)} where the first record has {shape}",
                    column=name,
                )
            if values.dtype != dtype and not (values.dtype.kind == dtype.kind and dtype.kind in "US"):
                if not self._fits(values, dtype):
                    raise SchemaError(
                        f"dtype {values.dtype}{_within(path)} where the first record has {dtype}", column=name
                    )
                rows[name] = map_structure(
                    lambda leaf, old=values, dtype=dtype: leaf.astype(dtype) if leaf is old else leaf,
                    rows[name],
                )
        for name, path in found.keys() - expected.keys():
            raise SchemaError(
                f"the column{_within(path)} is not in the first record: give columns= with what all have",
                column=name,
            )

    def _fits(self, values: NDArray[Any], dtype: np.dtype[Any]) -> bool:
        """Whether numbers fit ``dtype`` as they are: text formats write 1.0 as 1."""
        floats = self._any_float and values.dtype.kind == dtype.kind == "f"
        if not floats and (values.dtype.kind not in "iu" or dtype.kind not in "iuf"):
            return False
        with np.errstate(over="ignore"):  # What overflows is unequal, and so refused.
            return bool(np.array_equal(values.astype(dtype), values, equal_nan=floats))


def _policies(batch: Batch) -> list[tuple[str, SampleBatch]]:
    if isinstance(batch, MultiAgentBatch):
        return list(batch.policy_batches.items())
    return [(DEFAULT_POLICY_ID, batch)]


def _leaves(rows: SampleBatch) -> list[tuple[_Leaf, NDArray[Any]]]:
    return [((name, path), values) for name, column in rows.items() for path, values in leaves(column)]


def _within(path: Path) -> str:
    return f" at {excerpt(path_text(path), 80)}" if path else ""
