"""How a transition lies in memory: small columns packed into one row, wide ones and texts beside it.

Drawing one transition then touches one place in memory instead of one a column.

Example:
    >>> import numpy as np
    >>> from rlio.batch import SampleBatch
    >>> from rlio.schemas.schema import Schema
    >>> schema = Schema.of(SampleBatch(obs=np.zeros((1, 3), "f4"), actions=[1], rewards=[0.5]))
    >>> layout = RowLayout.of(schema.policies["default_policy"])
    >>> layout.row.itemsize, sorted(layout.row.names)
    (32, ['actions', 'obs', 'rewards'])
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlio.batch.columns import is_per_sequence
from rlio.errors import MissingColumn
from rlio.schemas.schema import Leaf, PolicySchema
from rlio.support.forks import cached_property

__all__ = ["RowLayout"]

#: Rows of a column wider than this lie in an array of their own: a copy of so much costs more than the
#: cache misses that packing saves.
WIDE_BYTES = 1024


@dataclass(frozen=True)
class RowLayout:
    """Where the leaves of one policy's columns lie.

    Attributes:
        packed: Leaves in the packed row.
        wide: Leaves with an array of their own, a row of fixed size each.
        texts: Leaves of varying size: texts and JSON.
        empty: Leaves of rows without values (a shape with a zero), which lie nowhere.
    """

    packed: tuple[Leaf, ...]
    wide: tuple[Leaf, ...]
    texts: tuple[Leaf, ...]
    empty: tuple[Leaf, ...]

    @classmethod
    def of(cls, policy: PolicySchema, *, columns: Collection[str] | None = None) -> RowLayout:
        """Lay out a policy's columns, or those of them that are asked for.

        Columns with one value a sequence are left out: what they say is in the rows they belong to.

        Raises:
            MissingColumn: The policy has not all of them.
        """
        missing = sorted(set(columns or ()) - set(policy.columns))
        if missing:
            raise MissingColumn(
                f"no column {missing[0]!r}; there are {', '.join(sorted(policy.columns))}", column=missing[0]
            )
        parts: dict[str, list[Leaf]] = {"packed": [], "wide": [], "texts": [], "empty": []}
        for leaf in policy.leaves:
            if not is_per_sequence(leaf.column) and (columns is None or leaf.column in columns):
                parts[_place(leaf)].append(leaf)
        # Wide values first: every column is then aligned without gaps.
        parts["packed"].sort(key=lambda leaf: (-leaf.spec.numpy.itemsize, leaf.physical))
        return cls(**{name: tuple(leaves) for name, leaves in parts.items()})

    @cached_property
    def row(self) -> np.dtype[Any]:
        """The packed row: a structured dtype of a multiple of 8 bytes."""
        offsets, end = [], 0
        for leaf in self.packed:
            offsets.append(end)
            end += leaf.spec.row_bytes
        return np.dtype(
            {
                "names": [leaf.physical for leaf in self.packed],
                "formats": [(leaf.spec.numpy, leaf.spec.shape) for leaf in self.packed],
                "offsets": offsets,
                "itemsize": max(-(-end // 8) * 8, 8),
            }
        )

    @cached_property
    def bytes(self) -> int:
        """Bytes of a row, texts apart."""
        return self.row.itemsize + sum(leaf.spec.row_bytes for leaf in self.wide)


def _place(leaf: Leaf) -> str:
    if leaf.spec.kind == "none":
        return "empty"
    if leaf.spec.kind in ("text", "json"):
        return "texts"
    return "packed" if leaf.spec.row_bytes <= WIDE_BYTES else "wide"
