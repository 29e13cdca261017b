"""What notebooks show of stored columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlio.schemas.leaves import Leaf
from rlio.support.html import Html, table

__all__ = ["leaf_table"]


def leaf_table(policies: Mapping[str, Iterable[Leaf]]) -> Html:
    """Name, dtype and shape of a row of each stored array, by policy if there are several."""
    several = len(policies) > 1
    heads = ("policy", "column", "dtype", "shape")[not several :]
    return table(
        heads,
        (
            (*((policy,) if several else ()), leaf.name, leaf.spec.numpy, leaf.spec.shape)
            for policy, leaves in policies.items()
            for leaf in leaves
        ),
    )
