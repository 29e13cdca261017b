"""What is read of a source: the columns, by its schemas, and the unit that is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns, is_per_sequence
from rlio.batch.nested import leaves
from rlio.errors import MissingColumn, OptionError, SchemaConflict
from rlio.read_options import ReadOptions
from rlio.reader import Unit
from rlio.schemas.agreement import check_agreement
from rlio.schemas.filling import Filling
from rlio.schemas.leaves import column_of_name, is_in, rebuild
from rlio.schemas.policy_schema import advice_for_column, with_validity
from rlio.source.source import Source
from rlio.support.options import check_choice

__all__ = [
    "Counting",
    "GroupOptions",
    "common_columns",
    "counting_of",
    "group_options",
    "named_parts",
    "own_size",
    "with_step_columns",
]

#: Rows of a batch if the user gives no size and no row group is smaller. Large enough that calls cost nothing
#: (2 us of overhead per 4096 rows), small enough that a batch stays in the cache.
OWN_SIZE = 4096


@dataclass(frozen=True)
class GroupOptions:
    """What to read of each group.

    Attributes:
        columns: Logical columns; None: all.
        skip_damage: Whether damage is counted and skipped instead of raised.
        filling: Adds the columns that a shard lacks; None if no column may be missing.
    """

    columns: list[str] | None = None
    skip_damage: bool = False
    filling: Filling | None = None


@dataclass(frozen=True)
class Counting:
    """The unit that readers count: rows, unless the data has sequences or several agents."""

    unit: Unit
    by_row: bool


def counting_of(source: Source, columns: list[str] | None) -> Counting:
    """Return what to count in a source if only ``columns`` are read.

    Raises:
        OptionError: ``columns`` lacks columns that identify the units.
    """
    schemas = source.schemas.values()
    joint = any(schema.multi_agent for schema in schemas)
    sequences = any(
        policy.has_sequences and (columns is None or Columns.SEQ_LENS in columns)
        for schema in schemas
        for policy in schema.policies.values()
    )
    _check_columns(source, columns)
    unit: Unit = "sequences" if sequences and not joint else "steps"
    return Counting(unit, not joint and not sequences)


def _check_columns(source: Source, columns: list[str] | None) -> None:
    """Refuse ``columns`` that lack the columns that identify the units."""
    if columns is None:
        return
    states = [name for name in columns if is_per_sequence(column_of_name(name))]
    if states and Columns.SEQ_LENS not in columns:
        raise OptionError(
            f"columns={columns}: {states[0]} has one row per sequence; add 'seq_lens', or leave it out"
        )
    for name in with_step_columns(source, columns)[len(columns) :]:
        raise OptionError(
            f"columns={columns}: eps_id and t identify the joint steps of several agents; add {name!r}"
        )


def with_step_columns(source: Source, columns: list[str]) -> list[str]:
    """Return the columns, plus those that identify the joint steps of several agents."""
    known = {
        name
        for schema in source.schemas.values()
        for policy in schema.policies.values()
        if schema.multi_agent
        for name in policy.columns
    }
    return [*columns, *(n for n in (Columns.EPS_ID, Columns.T) if n in known and n not in columns)]


def group_options(
    source: Source, options: ReadOptions, missing: Literal["error", "drop", "fill"]
) -> GroupOptions:
    """Return what to read of each group, under the rule for missing columns; see `common_columns`.

    Columns with ``new_obs`` bring ``new_obs_valid`` if a schema has it: see `with_validity`.
    """
    wanted = options.columns
    if wanted is not None:
        policies = [policy for schema in source.schemas.values() for policy in schema.policies.values()]
        wanted = list(with_validity(policies, wanted))
    shared = common_columns(source, missing=missing, wanted=wanted)
    chosen = wanted if missing == "fill" else shared
    filling = Filling(source.schemas.values(), columns=chosen)
    return GroupOptions(
        columns=chosen,
        skip_damage=options.on_error == "skip",
        filling=filling if missing == "fill" or filling.adds_validity or filling.changes_infos else None,
    )


def named_parts(batch: SampleBatch, columns: Sequence[str] | None) -> SampleBatch:
    """Return a batch with only the named columns, and parts of nested ones (``obs/camera``); None: all."""
    if columns is None or batch.keys() <= set(columns):
        return batch
    found: dict[str, Any] = {}
    for name, column in batch.items():
        parts = [(path, leaf) for path, leaf in leaves(column) if is_in(name, path, columns)]
        if parts:
            found[name] = column if name in columns else rebuild(parts)
    return SampleBatch(found, zero_padded=batch.zero_padded, max_seq_len=batch.max_seq_len)


def own_size(source: Source) -> int:
    """Return the units of a batch if the user gives no size."""
    return min([OWN_SIZE, *(schema.batch_rows for schema in source.schemas.values())])


def common_columns(source: Source, *, missing: str, wanted: list[str] | None) -> list[str] | None:
    """Return the logical columns to read, under the rule for columns that only some writers have.

    The rule does not apply to ``new_obs_valid``: where it is absent, every final observation is present.

    Args:
        source: The source.
        missing: "error", "drop" or "fill".
        wanted: The columns, or parts of columns (``obs/camera``), that the user asked for; None: all.

    Returns:
        ``wanted``, or, with "drop", those that all writers have; None: all.

    Raises:
        OptionError: ``missing`` is not one of the three, no column remains, or ``wanted`` names only some
            parts of a tuple.
        MissingColumn: No writer has a wanted column.
        SchemaConflict: Only some writers have a column, and ``missing`` is "error"; or two writers give a
            column different types.
    """
    check_choice("missing", missing, ("error", "drop", "fill"))
    check_agreement(source.schemas, uri=source.uri, columns=wanted)
    by_policy: dict[str, list[tuple[str, set[str]]]] = {}
    for name, schema in sorted(source.schemas.items()):
        for pid, policy in schema.policies.items():
            names = set(policy.columns) if wanted is None else set(policy.names)
            by_policy.setdefault(pid, []).append((name, names))
            policy.check_whole_tuples(wanted or ())
    known = {column for found in by_policy.values() for _, columns in found for column in columns}
    infos: set[str] = set()
    if any(policy.infos for schema in source.schemas.values() for policy in schema.policies.values()):
        infos = {name for name in known if column_of_name(name) == Columns.INFOS}
    every = [policy for schema in source.schemas.values() for policy in schema.policies.values()]
    for column in wanted or ():
        if column not in known:
            raise MissingColumn(
                f"no column {column!r}; the data set has {', '.join(sorted(known))}"
                f"{advice_for_column(column, known, every)}",
                uri=source.uri,
                column=column,
            )
    partial: set[str] = set()
    for pid, found in by_policy.items():
        some = set.union(*(columns for _, columns in found)) & set(known if wanted is None else wanted)
        some.discard(Columns.NEXT_OBS_VALID)
        for name, columns in found:
            # Infos may lack any key.
            lacking = some - columns - (infos if Columns.INFOS in columns else set())
            partial |= lacking
            if lacking and missing == "error":
                raise SchemaConflict(
                    f"schema {name} lacks {sorted(lacking)} of policy {pid!r}, which other writers have: "
                    "read with missing='drop' or missing='fill'",
                    uri=source.uri,
                    column=min(lacking),
                )
    left = (known if wanted is None else set(wanted)) - (partial if missing == "drop" else set())
    if wanted and not left:
        raise OptionError(
            f"missing='drop' leaves no column of columns={wanted}: only some writers have them; use 'fill'"
        )
    if wanted is not None and not left:
        raise OptionError("columns=[]: no column is left to read; name at least one")
    if not left and known:
        raise OptionError("missing='drop' leaves no column: the writers have none in common; use 'fill'")
    return sorted(left) if missing == "drop" and partial else wanted
