"""Fills columns that only some writers have with zeros where a shard lacks them (``missing="fill"``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns, is_per_sequence
from rlio.batch.infos import REST
from rlio.errors import SchemaConflict
from rlio.schemas.column import ColumnSpec, object_rows
from rlio.schemas.info_columns import InfoForm
from rlio.schemas.leaves import Leaf, column_of_name, info_leaves, is_in, is_named, leaf_name, rebuild
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.schema import Schema

__all__ = ["Filling", "blank_rows", "joint_columns", "joint_infos"]


def joint_columns(
    schemas: Iterable[Schema], policy: str, columns: Collection[str] | None = None
) -> dict[str, list[Leaf]]:
    """Return every column of a policy in any schema -> its leaves; if given, only what ``columns`` name.

    Infos are in the typed form that holds those of all schemas, if one has it. A column of texts in one
    schema and of lists or other objects in another has objects. If some schemas lack
    ``new_obs``, which is then filled, adds ``new_obs_valid``.
    """
    policies = [schema.policies[policy] for schema in schemas if policy in schema.policies]
    parts = [known.columns for known in policies]
    form = joint_infos(policies)
    found: dict[str, list[Leaf]] = {}
    for part in parts:
        for column, leaves in part.items():
            if column == Columns.INFOS and form is not None:
                if named := _named_infos(form, policies, columns):
                    found[column] = named
                continue
            if named := [leaf for leaf in leaves if is_named(leaf, columns)]:
                before = found.setdefault(column, named)
                if before is not named:
                    after = {leaf.path: leaf for leaf in named}
                    found[column] = [_joint(leaf, after.get(leaf.path, leaf)) for leaf in before]
    valid = Columns.NEXT_OBS_VALID
    if Columns.NEXT_OBS in found and not all(Columns.NEXT_OBS in part for part in parts):
        found.setdefault(valid, [Leaf(valid, (), valid, ColumnSpec("|b1", (), "scalar"))])
    return found


def joint_infos(policies: Sequence[PolicySchema]) -> InfoForm | None:
    """The form of the infos of several schemas of a policy; None: they are objects in all of them.

    Where a schema has none, they are filled with None, which is no key's.
    """
    forms = [policy.infos for policy in policies]
    return InfoForm.joint(forms) if any(form is not None for form in forms) else None


def _named_infos(
    form: InfoForm, policies: Iterable[PolicySchema], columns: Collection[str] | None
) -> list[Leaf]:
    """The leaves of infos in a joint form that are named.

    Raises:
        SchemaConflict: A key is named that has several types.
    """
    found = [leaf for leaf in info_leaves(form) if is_named(leaf, columns)]
    for policy in policies if columns is not None and Columns.INFOS not in columns else ():
        for path in policy.infos.keys if policy.infos is not None else ():
            if path not in form.keys and is_in(Columns.INFOS, path, columns):
                raise SchemaConflict(
                    f"writers have values of several types under {leaf_name(Columns.INFOS, path)!r}: read "
                    "'infos' whole",
                    column=Columns.INFOS,
                )
    return found


def _is_read_whole(policy: PolicySchema) -> bool:
    """Whether infos are read whole even if parts of them are wanted: these may be in objects."""
    return policy.infos is None or policy.infos.has_rest


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
        self._infos: dict[str, InfoForm] = {}
        for pid in self._columns:
            form = joint_infos([policy for other, policy in policies if other == pid])
            if form is not None and Columns.INFOS in self._columns[pid]:
                self._infos[pid] = form
        #: Whether infos of some schemas are in another form than those that are read.
        self.changes_infos: bool = any(
            self._is_other(pid, policy) for pid, policy in policies if pid in self._infos
        )

    def _is_other(self, pid: str, policy: PolicySchema) -> bool:
        wanted = [(leaf.path, leaf.spec) for leaf in self._columns[pid][Columns.INFOS]]
        own = [(leaf.path, leaf.spec) for leaf in policy.columns.get(Columns.INFOS, ())]
        if not own or own == wanted:
            return False
        is_whole = any(path == REST for path, _ in wanted)
        return is_whole or _is_read_whole(policy) or any(leaf not in own for leaf in wanted)

    def names_in(self, policies: Mapping[str, PolicySchema], names: Sequence[str]) -> list[str]:
        """What to read of a segment to get the columns, or parts of them, that ``names`` name."""
        found = [name for name in names if any(name in policy.names for policy in policies.values())]
        infos = {name for name in names if column_of_name(name) == Columns.INFOS}
        own = [policies[pid] for pid in self._infos if pid in policies]
        if infos and any(Columns.INFOS in policy.columns and _is_read_whole(policy) for policy in own):
            return [*(name for name in found if name not in infos), Columns.INFOS]
        return found

    def fill(self, batch: SampleBatch | MultiAgentBatch) -> SampleBatch | MultiAgentBatch:
        """Return the batch with every column; keeps its own arrays."""
        if isinstance(batch, MultiAgentBatch):
            parts = {pid: self._fill(pid, part) for pid, part in batch.items()}
            return MultiAgentBatch(parts, batch.env_steps())
        return self._fill(DEFAULT_POLICY_ID, batch)

    def _fill(self, pid: str, batch: SampleBatch) -> SampleBatch:
        rows = len(batch)
        made: dict[str, Any] = {
            column: self._info_column(pid, batch)
            if column == Columns.INFOS and pid in self._infos
            else batch._raw(column)
            if column in batch
            else rebuild([(leaf.path, blank_rows(leaf.spec, rows)) for leaf in leaves])
            for column, leaves in self._columns[pid].items()
        }
        made |= {column: batch[column] for column in batch if is_per_sequence(column)}
        if Columns.NEXT_OBS_VALID in self._columns[pid] and Columns.NEXT_OBS_VALID not in batch:
            # Without the column, the batch has its final observations, if it has new_obs.
            knows_next = Columns.NEXT_OBS in batch or Columns.NEXT_OBS not in self._columns[pid]
            made[Columns.NEXT_OBS_VALID] = np.full(rows, knows_next)
        return SampleBatch(made, max_seq_len=batch.max_seq_len, num_grad_updates=batch.num_grad_updates)

    def _info_column(self, pid: str, batch: SampleBatch) -> Any:
        """The infos of a batch in the form that is read, or the parts of them that are read."""
        form, wanted, rows = self._infos[pid], self._columns[pid][Columns.INFOS], len(batch)
        column = batch._raw(Columns.INFOS) if Columns.INFOS in batch else np.full(rows, None, object)
        if any(leaf.path == REST for leaf in wanted):
            return form.conformed(column)
        return form.parts(column, [leaf.path for leaf in wanted], rows)


def blank_rows(spec: ColumnSpec, rows: int) -> Any:
    """Return zeros, empty strings or lists, or None for objects."""
    if spec.kind in ("ragged", "nested"):
        return object_rows([spec.empty_row for _ in range(rows)])
    if spec.kind == "json":
        return np.full(rows, None, object)
    if spec.kind == "text":
        return np.full(rows, b"" if spec.dtype == "|S" else "", object if spec.dtype == "|O" else None)
    return np.zeros((rows, *spec.shape), spec.numpy)
