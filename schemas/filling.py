"""Fills columns that only some writers have with zeros where a shard lacks them (``missing="fill"``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns, is_per_sequence
from rlio.schemas.column import ColumnSpec, object_rows
from rlio.schemas.schema import Leaf, Schema, is_named, rebuild

__all__ = ["Filling", "joint_columns"]


def joint_columns(
    schemas: Iterable[Schema], policy: str, columns: Collection[str] | None = None
) -> dict[str, list[Leaf]]:
    """Return every column of a policy in any schema -> its leaves; if given, only what ``columns`` name.

    A column of texts in one schema and of lists or other objects in another has objects. If some schemas lack
    ``new_obs``, which is then filled, adds ``new_obs_valid``.
    """
    parts = [schema.policies[policy].columns for schema in schemas if policy in schema.policies]
    found: dict[str, list[Leaf]] = {}
    for part in parts:
        for column, leaves in part.items():
            if named := [leaf for leaf in leaves if is_named(leaf, columns)]:
                before = found.setdefault(column, named)
                if before is not named:
                    after = {leaf.path: leaf for leaf in named}
                    found[column] = [_joint(leaf, after.get(leaf.path, leaf)) for leaf in before]
    valid = Columns.NEXT_OBS_VALID
    if Columns.NEXT_OBS in found and not all(Columns.NEXT_OBS in part for part in parts):
        found.setdefault(valid, [Leaf(valid, (), valid, ColumnSpec("|b1", (), "scalar"))])
    return found


def _joint(one: Leaf, other: Leaf) -> Leaf:
    """The leaf that holds the values of both: objects, if they are objects of different kinds."""
    a, b = one.spec, other.spec
    if a.dtype != "|O" or b.dtype != "|O" or (a.kind, a.items, a.structure) == (b.kind, b.items, b.structure):
        return one
    return replace(one, spec=ColumnSpec("|O", (), "json"))


class Filling:
    """Gives batches every column of their policy, in one order.

    Where an observation is filled, the bool column ``new_obs_valid`` is False, as for a missing final one. If
    only that column is missing, it is True.

    Args:
        schemas: The schemas of all writers.
        columns: The wanted logical columns, or parts of them; None: all.
    """

    def __init__(self, schemas: Iterable[Schema], *, columns: Collection[str] | None) -> None:
        schemas = list(schemas)
        policies = [item for schema in schemas for item in schema.policies.items()]
        self._columns = {
            pid: {
                column: leaves
                for column, leaves in joint_columns(schemas, pid, columns).items()
                if not is_per_sequence(column)
            }
            for pid, _ in policies
        }
        #: Whether only some schemas of a policy record which final observations are missing.
        self.adds_validity: bool = any(
            Columns.NEXT_OBS_VALID in self._columns[pid] and Columns.NEXT_OBS_VALID not in policy.columns
            for pid, policy in policies
        )

    def fill(self, batch: SampleBatch | MultiAgentBatch) -> SampleBatch | MultiAgentBatch:
        """Return the batch with every column; keeps its own arrays."""
        if isinstance(batch, MultiAgentBatch):
            parts = {pid: self._fill(pid, part) for pid, part in batch.items()}
            return MultiAgentBatch(parts, batch.env_steps())
        return self._fill(DEFAULT_POLICY_ID, batch)

    def _fill(self, pid: str, batch: SampleBatch) -> SampleBatch:
        rows = len(batch)
        made = {
            column: batch[column]
            if column in batch
            else rebuild([(leaf.path, _zeros(leaf.spec, rows)) for leaf in leaves])
            for column, leaves in self._columns[pid].items()
        }
        made |= {column: batch[column] for column in batch if is_per_sequence(column)}
        if Columns.NEXT_OBS_VALID in self._columns[pid] and Columns.NEXT_OBS_VALID not in batch:
            # Without the column, the batch has its final observations, if it has new_obs.
            knows_next = Columns.NEXT_OBS in batch or Columns.NEXT_OBS not in self._columns[pid]
            made[Columns.NEXT_OBS_VALID] = np.full(rows, knows_next)
        return SampleBatch(made, max_seq_len=batch.max_seq_len, num_grad_updates=batch.num_grad_updates)


def _zeros(spec: ColumnSpec, rows: int) -> Any:
    """Return zeros, empty strings or lists, or None for objects."""
    if spec.kind in ("ragged", "nested"):
        return object_rows([spec.empty_row for _ in range(rows)])
    if spec.kind == "json":
        return np.full(rows, None, object)
    if spec.kind == "text":
        return np.full(rows, b"" if spec.dtype == "|S" else "", object if spec.dtype == "|O" else None)
    return np.zeros((rows, *spec.shape), spec.numpy)
