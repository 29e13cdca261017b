"""The columns of numbers in a source, and their values: what statistics are made of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.arrays import to_numpy
from rlio.batch.columns import Columns, is_per_sequence
from rlio.batch.infos import mask_path
from rlio.batch.nested import Path, leaves
from rlio.errors import MissingColumn, OptionError, excerpt
from rlio.schemas.column import TEXTS
from rlio.schemas.filling import joint_columns
from rlio.schemas.leaves import Leaf, is_named
from rlio.schemas.policy_schema import PolicySchema, advice_for_column
from rlio.source.source import Source

__all__ = ["is_numeric", "named_leaves", "numbers_of", "wanted_leaves"]

# Numbers that name rows, and the column that repeats another one.
_LEFT_OUT: Final = frozenset(
    (
        Columns.NEXT_OBS,
        Columns.EPS_ID,
        Columns.UNROLL_ID,
        Columns.AGENT_INDEX,
        Columns.ENV_ID,
        Columns.ENV_SEED,
    )
)


def wanted_leaves(source: Source, columns: Sequence[str] | None, policy: str | None) -> list[Leaf]:
    """The numeric leaves of the columns.

    Raises:
        OptionError: A named column has no numbers, or several policies were recorded and none is named.
        MissingColumn: A named column does not exist.
    """
    if isinstance(columns, str):
        raise OptionError(f"columns={excerpt(columns)}: expected a list of names, or None")
    if not columns:
        known = _columns(source, policy)
        if not all(map(is_numeric, known.get(Columns.INFOS, ()))):
            known = {name: own for name, own in known.items() if name != Columns.INFOS}
        every = [leaf for own in known.values() for leaf in own]
        left = [leaf for leaf in every if leaf.column not in _LEFT_OUT and not is_per_sequence(leaf.column)]
        return [leaf for leaf in left if is_numeric(leaf)]
    found: dict[str, Leaf] = {}
    for name in columns:
        named = named_leaves(source, name, policy)
        if any(is_per_sequence(leaf.column) or not is_numeric(leaf) for leaf in named):
            raise OptionError(
                f"the column {excerpt(name)} has no number a step: leave it out", uri=source.uri
            )
        found |= {leaf.name: leaf for leaf in named}
    return list(found.values())


def _columns(source: Source, policy: str | None) -> dict[str, list[Leaf]]:
    """The columns of a policy, or of the only one, and their leaves.

    Raises:
        OptionError: There are no rows, or several policies and none is named.
    """
    schemas = list(source.schemas.values())
    policies = sorted({pid for schema in schemas for pid in schema.policies})
    if not policies or not len(source):
        raise OptionError(f"statistics need rows: {source.why_empty()}", uri=source.uri)
    if len(policies) > 1 if policy is None else policy not in policies:
        raise OptionError(
            f"policy={excerpt(policy)}: statistics are those of one policy: pass one of {excerpt(policies)}",
            uri=source.uri,
        )
    known = joint_columns(schemas, policy or policies[0])
    return PolicySchema(tuple(leaf for leaves in known.values() for leaf in leaves)).listed.columns


def named_leaves(source: Source, name: str, policy: str | None) -> list[Leaf]:
    """The leaves of a column, or of a part of one.

    Raises:
        OptionError: As in `_columns`.
        MissingColumn: There is no such column.
    """
    known = _columns(source, policy)
    found = [leaf for leaves in known.values() for leaf in leaves if is_named(leaf, (name,))]
    if not found:
        policies = [each for schema in source.schemas.values() for each in schema.policies.values()]
        raise MissingColumn(
            f"no column {excerpt(name)}; the data set has {', '.join(sorted(known))}"
            f"{advice_for_column(name, known, policies)}",
            uri=source.uri,
            column=name,
        )
    return found


def is_numeric(leaf: Leaf) -> bool:
    """Whether a leaf has numbers."""
    return leaf.spec.kind not in TEXTS and leaf.spec.numpy.kind in "biuf"


def numbers_of(batch: SampleBatch, wanted: Sequence[Leaf]) -> dict[str, NDArray[Any]]:
    """Name -> values, (rows, values of a row). A final observation or key that is missing is NaN."""
    found = {}
    for leaf in wanted:
        if leaf.column == Columns.INFOS and leaf.path:
            found[leaf.name] = _info_values(batch, leaf.path)
            continue
        values = to_numpy(reduce(lambda value, step: value[step], leaf.path, batch[leaf.column]))
        values = values.reshape(len(values), -1)
        if leaf.column == Columns.NEXT_OBS and Columns.NEXT_OBS_VALID in batch:
            valid = to_numpy(batch[Columns.NEXT_OBS_VALID]).astype(bool)
            if not valid.all():
                values = np.where(valid[:, None], values, np.nan)
        found[leaf.name] = values.view(np.uint8) if values.dtype == np.bool_ else values
    return found


def _info_values(batch: SampleBatch, path: Path) -> NDArray[Any]:
    """The values of a key of infos, (rows, values of a row); NaN where a row lacks it."""
    infos = dict(leaves(batch._raw(Columns.INFOS)))
    has = infos.get(mask_path(path))
    values: NDArray[Any] = infos[path].reshape(len(infos[path]), -1)
    if has is not None and not has.all():
        return np.where(has[:, None], values, np.nan)
    return values.view(np.uint8) if values.dtype == np.bool_ else values
