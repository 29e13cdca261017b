"""The rows of all policies of a store, and the part that a reader sees.

Example:
    >>> import rlio
    >>> from rlio.schemas.schema import Schema
    >>> from rlio.replay.memory import RamArrays
    >>> batch = rlio.SampleBatch(obs=[[0.0], [1.0]], rewards=[1.0, 2.0])
    >>> rows = StoreRows(Schema.of(batch), capacity=10, arrays=RamArrays())
    >>> piece = rows.add(batch)
    >>> rows.units(Draw()).batch(np.array([1]))["rewards"]
    array([2.])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from rlio.batch import Batch, MultiAgentBatch, SampleBatch
from rlio.batch.columns import DEFAULT_POLICY_ID, Columns, is_per_sequence
from rlio.batch.multi_agent import step_numbers
from rlio.errors import OptionError, SchemaError, excerpt
from rlio.replay.draws import Draw, PolicyView, RowRange, Units, open_units
from rlio.replay.ingest import Ingest, Part
from rlio.replay.layout import RowLayout
from rlio.replay.memory import Arrays, RamArrays
from rlio.replay.steps import StepLog, bounds_of
from rlio.replay.table import RowTable
from rlio.schemas.folded import Folded
from rlio.schemas.leaves import is_named
from rlio.schemas.policy_schema import PolicySchema, with_validity
from rlio.schemas.schema import Schema
from rlio.support.states import flag_in

__all__ = ["AddedRows", "StoreRows"]

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class AddedRows:
    """Rows that were added together, from one part of a shard.

    Attributes:
        rows: Policy id -> (logical number of the first row, number of rows).
        steps: (number of the first joint step, number of steps); (0, 0) for a single agent.
        writer: Id of the writer of the shard; "" if unknown.
    """

    rows: Mapping[str, tuple[int, int]]
    steps: tuple[int, int] = (0, 0)
    writer: str = ""


class StoreRows:
    """Tables, one a policy, to which batches are added. They continue after the rows in the arrays.

    Args:
        schema: Schema of every batch.
        capacity: Rows of each policy.
        arrays: Makes the arrays for the rows.
        ring: Replace the oldest rows by new ones.
        frames: See `RowTable`.
        columns: Logical columns, or parts of them, to keep, if they exist; None: all.
        sealed: Add no rows.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        capacity: int,
        arrays: Arrays,
        ring: bool = False,
        frames: int | None = None,
        columns: frozenset[str] | None = None,
        sealed: bool = False,
    ) -> None:
        #: Schema of all policies. Their tables may have other physical names, because a table's names never
        #: change.
        self.schema: Schema = schema
        self.tables: dict[str, RowTable] = {}
        #: Policy id -> the `Ingest` that adds its rows.
        self.ingests: dict[str, Ingest] = {}
        #: Policy id -> the columns of its table.
        self._policies: dict[str, PolicySchema] = {}
        self._ring = ring
        self._table = partial(RowTable, ring=ring, frames=frames, sealed=sealed)
        self._capacity = capacity
        self._arrays = arrays
        self._columns = columns
        self._sealed = sealed
        for pid, policy in schema.policies.items():
            self._add_policy(pid, policy)
        self.joint: bool = schema.multi_agent
        # Live policies of which every row so far has its final observation, and so no validity column.
        self._whole = set(schema.policies) if ring else set()
        #: How often `_whole` or the policies changed; units opened earlier ignore the change.
        self.changes: int = 0
        self.steps: StepLog = StepLog(arrays, schema.policies)

    @property
    def used(self) -> dict[str, int]:
        """Array -> number of its rows in use, for partly used arrays."""
        return {
            f"{pid} {name}": rows for pid, table in self.tables.items() for name, rows in table.used.items()
        }

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, for the policy with the widest rows, without texts."""
        return max(table.layout.bytes for table in self.tables.values())

    def pools(self, folded: Folded) -> bool:
        """Whether stacks need not be looked up to be added: see `RowTable.pools`."""
        return not folded.frames or (
            not self.joint and all(table.pools(folded.frames) for table in self.tables.values())
        )

    def add(self, batch: Batch | Folded, *, writer: str = "") -> AddedRows:
        """Add the rows of a batch; a folded one if the store `pools` it.

        Raises:
            SchemaError: The batch does not fit the schema.
            OptionError, CacheError: There is no room. Any error here adds no row.
        """
        rows = batch.batch if isinstance(batch, Folded) else batch
        if not self.joint and isinstance(rows, SampleBatch):
            (table,) = self.tables.values()
            ((pid, ingest),) = self.ingests.items()
            first = table.head
            ingest.add(batch if isinstance(batch, Folded) else rows, writer=writer)
            self._look_for_missing(pid, rows)
            return AddedRows({DEFAULT_POLICY_ID: (first, table.head - first)})
        return self._add_joint(rows.as_multi_agent() if isinstance(rows, SampleBatch) else rows, writer)

    def _add_joint(self, batch: MultiAgentBatch, writer: str) -> AddedRows:
        if not self.joint:
            raise SchemaError("a MultiAgentBatch in a store of SampleBatches: add the batch of one policy")
        numbers, count = step_numbers(batch)
        parts = self._prepared(batch, writer)
        for pid, own in parts.items():
            self.ingests[pid].reserve(own)
        rows: dict[str, tuple[int, int]] = {}
        order, bounds = {}, {}
        for pid, table in self.tables.items():
            first = table.head
            if pid in parts:
                self.ingests[pid].commit(parts[pid])
                self._look_for_missing(pid, batch[pid])
            number = numbers.get(pid, np.empty(0, np.int64))
            rows[pid] = first, table.head - first
            order[pid] = np.argsort(number, kind="stable") + first
            bounds[pid] = bounds_of(np.bincount(number, minlength=count), first=first)
        start = self.steps.stop
        self.steps.added.add(order, bounds)
        self._forget_steps()
        return AddedRows(rows, (start, count))

    def _forget_steps(self) -> None:
        """Drop joint steps whose rows the tables of a ring have forgotten."""
        self.steps.added.forget({pid: table.tail for pid, table in self.tables.items()})

    def _prepared(self, batch: MultiAgentBatch, writer: str) -> dict[str, list[Part]]:
        """Policy id -> its checked rows; makes tables for new policies of a live store."""
        unknown = sorted(set(batch) - set(self.tables))
        if unknown and not self._ring:
            raise SchemaError(
                f"policy {excerpt(unknown[0])} is new: expected one of {', '.join(sorted(self.tables))}"
            )
        known = [pid for pid in batch if pid in self.tables]
        parts = self._prepared_of(known, batch, writer)
        if unknown:
            self._take_in(unknown, batch)
        return parts | self._prepared_of(unknown, batch, writer)

    def _prepared_of(self, pids: Sequence[str], batch: MultiAgentBatch, writer: str) -> dict[str, list[Part]]:
        return {pid: self.ingests[pid].prepare(batch[pid], writer=writer) for pid in pids if len(batch[pid])}

    def _add_policy(self, pid: str, policy: PolicySchema) -> None:
        if any(is_per_sequence(column) for column in policy.columns):
            raise OptionError(
                f"policy {pid!r} was recorded in sequences (seq_lens), but a store cuts sequences from "
                "single steps: read these with cache='none'"
            )
        wanted = None if self._columns is None else with_validity((policy,), self._columns)
        arrays = _Prefixed(self._arrays, f"{pid} ")
        self.tables[pid] = self._table(
            RowLayout.of(policy, columns=wanted),
            capacity=self._capacity,
            # The files of a policy without rows are empty.
            arrays=RamArrays() if self._sealed and not arrays.size("rows") else arrays,
        )
        self.ingests[pid] = Ingest(self.tables[pid], policy, name=pid)
        kept = [leaf for leaf in policy.leaves if is_named(leaf, wanted)]
        self._policies[pid] = policy if wanted is None else PolicySchema(tuple(kept), policy.spaces)

    def _take_in(self, fresh: Sequence[str], batch: MultiAgentBatch) -> None:
        """Make tables for new policies of a live store."""
        schema = self.schema.extended(batch).with_validity()
        for pid in fresh:
            if pid in schema.policies:  # Otherwise it has no columns, and so no rows.
                self._add_policy(pid, schema.policies[pid])
                self._whole.add(pid)
        self.schema = schema
        self.changes += 1

    def _look_for_missing(self, pid: str, batch: SampleBatch) -> None:
        if pid in self._whole and not np.all(batch.get(Columns.NEXT_OBS_VALID, True)):
            self._whole.remove(pid)
            self.changes += 1

    # ---- keeping a ring ----

    def dump(self, arrays: Arrays) -> dict[str, Any]:
        """Copy the content of a ring into arrays; returns as JSON what `restored` needs besides.

        Raises:
            CacheError: There is no room for the arrays.
        """
        policies = {
            pid: {
                **table.dump(_Prefixed(arrays, f"{pid} ")),
                "open": self.ingests[pid].open_to_json(),
                "whole": pid in self._whole,
            }
            for pid, table in self.tables.items()
        }
        return {
            # The tables' own schemas: their physical names do not change when policies are added.
            "schema": Schema(self._policies, self.joint).text,
            "policies": policies,
            "steps": self.steps.added.dump(arrays),
        }

    @classmethod
    def restored(
        cls, stored: Arrays, state: Mapping[str, Any], *, capacity: int, frames: int | None, arrays: Arrays
    ) -> Self:
        """Restore a ring from `dump`: every row keeps its number and its successor.

        Args:
            stored: The arrays that `dump` wrote.
            state: The result of `dump`.
            capacity: Capacity of the ring.
            frames: Frames of the ring.
            arrays: Makes the arrays for the rows.

        Raises:
            CorruptData, KeyError, TypeError, ValueError: ``state`` is not a result of `dump`.
        """
        schema = Schema.from_text(state["schema"])
        if state["policies"].keys() != schema.policies.keys():
            raise ValueError(f"policies {list(state['policies'])}, and a schema of {list(schema.policies)}")
        ordered = Schema({pid: schema.policies[pid] for pid in state["policies"]}, schema.multi_agent)
        made = cls(ordered, capacity=capacity, arrays=arrays, ring=True, frames=frames)
        for pid, own in state["policies"].items():
            made.tables[pid].restore(_Prefixed(stored, f"{pid} "), own)
            made.ingests[pid].open_from_json(own["open"])
        made._whole = {
            pid for pid, own in state["policies"].items() if flag_in(own, "whole", of="the saved store")
        }
        heads = {pid: table.head for pid, table in made.tables.items()}
        made.steps.added.restore(stored, state["steps"], heads)
        made._forget_steps()
        return made

    # ---- what a reader sees ----

    def units(
        self,
        draw: Draw,
        *,
        pieces: Sequence[AddedRows] | None = None,
        trimmed: frozenset[str] = frozenset(),
    ) -> Units:
        """The units of a draw.

        Args:
            draw: What to draw.
            pieces: The rows to include, in recorded order; None: all, in the order in which they were added.
            trimmed: The writers whose first rows were trimmed.

        Raises:
            OptionError: The policy or such units do not exist.
            MissingColumn: A column is absent.
        """
        policy = draw.policy
        if policy is not None and policy not in self.tables:
            raise OptionError(f"policy={excerpt(policy)}: expected one of {', '.join(sorted(self.tables))}")
        chosen = self.tables if policy is None else {policy: self.tables[policy]}
        held = {pid: replace(self._held(pid, pieces), trimmed=trimmed) for pid in chosen}
        steps = None
        if self.joint and policy is None:
            steps = self.steps.view(None if pieces is None else [piece.steps for piece in pieces])
        return open_units(held, draw, steps=steps)

    def _held(self, pid: str, pieces: Sequence[AddedRows] | None) -> PolicyView:
        table = self.tables[pid]
        policy = self._policies[pid]
        if pid in self._whole:
            policy = PolicySchema(tuple(x for x in policy.leaves if x.column != Columns.NEXT_OBS_VALID))
        if pieces is None:
            return PolicyView(pid, policy, table)
        held = [piece for piece in pieces if piece.rows.get(pid, (0, 0))[1]]
        spans = [piece.rows[pid] for piece in held]
        count = sum(size for _, size in spans)
        head = max((first + size for first, size in spans), default=0)
        first = spans[0][0] if spans else 0
        ends = np.cumsum([0, *(size for _, size in spans)]).tolist()
        names = np.array([piece.writer for piece in held], object)
        rows = None
        if any(at != first + end for (at, _), end in zip(spans, ends, strict=False)):
            first, rows = 0, np.concatenate([np.arange(at, at + size) for at, size in spans])
        writers = np.array(ends[:-1], np.int64) + first, names
        return PolicyView(pid, policy, table, rows, RowRange(first, count, head), writers)


class _Prefixed:
    """Arrays with a prefix before each name."""

    def __init__(self, arrays: Arrays, prefix: str) -> None:
        self._arrays = arrays
        self._prefix = prefix

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> NDArray[Any]:
        return self._arrays.array(self._prefix + name, shape, dtype)

    def size(self, name: str) -> int | None:
        return self._arrays.size(self._prefix + name)

    def reserve(self, name: str, rows: int) -> None:
        self._arrays.reserve(self._prefix + name, rows)
