"""Whether the schemas of several writers agree.

Readers combine the schemas of all writers, so a column must have one type throughout a source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from rlio.batch.columns import Columns
from rlio.batch.nested import Path, path_text
from rlio.errors import SchemaConflict, excerpt
from rlio.schemas.column import ColumnSpec
from rlio.schemas.leaves import is_named
from rlio.schemas.schema import Schema

__all__ = ["check_agreement"]


def check_agreement(
    schemas: Mapping[str, Schema], *, uri: str, columns: Collection[str] | None = None
) -> None:
    """Refuse schemas in which a column of a policy nests differently, or a leaf has another dtype or shape.

    Texts and other objects in one column agree: readers give objects.

    Args:
        schemas: Hash -> schema.
        uri: The root, for the message.
        columns: Logical columns, or parts of them, to check; None: all.

    Raises:
        SchemaConflict: Two schemas differ; the message names both.
    """
    seen: dict[tuple[str, str], tuple[str, dict[Path, ColumnSpec]]] = {}
    for name, schema in sorted(schemas.items()):
        for pid, policy in schema.policies.items():
            for column, every in policy.columns.items():
                leaves = [leaf for leaf in every if is_named(leaf, columns)]
                if not leaves:
                    continue
                found = {leaf.path: leaf.spec for leaf in leaves}
                if column == Columns.INFOS and policy.infos is not None:
                    found = {(): ColumnSpec("|O", (), "json")}  # Their keys never conflict.
                other, specs = seen.setdefault((pid, column), (name, found))
                difference = _difference(specs, found)
                if difference is not None:
                    raise SchemaConflict(
                        f"policy {excerpt(pid)} has {difference[0]} in schema {other} and {difference[1]} in "
                        f"schema {name}: keep them in different roots, or read the columns that agree with "
                        "columns=[...]",
                        uri=uri,
                        column=column,
                    )


def _difference(one: Mapping[Path, ColumnSpec], other: Mapping[Path, ColumnSpec]) -> tuple[str, str] | None:
    """Return how the leaves of a column differ in two schemas, as a text for each; None: they agree."""
    if one.keys() != other.keys():
        return _nesting(one), _nesting(other)
    for path, spec in one.items():
        if (spec.dtype, spec.shape) != (other[path].dtype, other[path].shape):
            return f"{spec.dtype} {spec.shape}", f"{other[path].dtype} {other[path].shape}"
    return None


def _nesting(paths: Iterable[Path]) -> str:
    found = sorted(map(path_text, paths))
    return "no parts" if found == [""] else f"the parts {excerpt(found)}"
