"""Memory layout of a transition: small columns packed into one row, wide columns and texts beside it.

Drawing a transition then touches one place in memory, not one for each column.

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
from rlio.schemas.column import TEXTS
from rlio.schemas.leaves import Leaf, is_named
from rlio.schemas.policy_schema import PolicySchema
from rlio.support.forks import cached_property

__all__ = ["RowLayout"]

#: Columns with wider rows get their own array, because copying so much costs more than the cache misses that
#: packing saves.
WIDE_BYTES = 1024


@dataclass(frozen=True)
class RowLayout:
    """Where each leaf of a policy's columns lies.

    Attributes:
        packed: Leaves in the packed row.
        wide: Leaves with their own array, with rows of fixed size.
        texts: Leaves of varying size: texts and JSON.
        empty: Leaves whose rows have no values (a shape with a zero), which need no memory.
    """

    packed: tuple[Leaf, ...]
    wide: tuple[Leaf, ...]
    texts: tuple[Leaf, ...]
    empty: tuple[Leaf, ...]

    @classmethod
    def of(cls, policy: PolicySchema, *, columns: Collection[str] | None = None) -> RowLayout:
        """Lay out a policy's columns, or some of them, or of their parts.

        Leaves out columns with one value a sequence: the rows already contain the same information.
        """
        parts: dict[str, list[Leaf]] = {"packed": [], "wide": [], "texts": [], "empty": []}
        for leaf in policy.leaves:
            if not is_per_sequence(leaf.column) and is_named(leaf, columns):
                parts[_place(leaf)].append(leaf)
        # Large values first: every column is then aligned without gaps.
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
        """Bytes of a row, without texts."""
        return self.row.itemsize + sum(leaf.spec.row_bytes for leaf in self.wide)


def _place(leaf: Leaf) -> str:
    if leaf.spec.kind == "none":
        return "empty"
    if leaf.spec.kind in TEXTS:
        return "texts"
    return "packed" if leaf.spec.row_bytes <= WIDE_BYTES else "wide"
