"""What `make test` leaves to `make test-all`: more seeds, servers and permutations of the same test.

Tests that take long have the mark ``further``, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest


def further(*values: Any) -> list[Any]:
    """Values of a parameter that only `make test-all` runs; a tuple is one value for several names.

    The first values stand before them: ``[0, *further(1, 2)]``.
    """
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.further)
        for value in values
    ]


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, of which `make test` runs the first ``count``."""
    values = list(values)
    return [*values[:count], *further(*values[count:])]


def on_servers(first: str, *others: str) -> list[Any]:
    """Names of `servers.SERVERS` as values of a parameter, of which `make test` runs the first.

    The items of one server are of one ``xdist_group``, and so in one process, which starts it.
    """
    return [
        pytest.param(name, marks=[pytest.mark.xdist_group(name), *marks])
        for name, marks in [(first, []), *((name, [pytest.mark.further]) for name in others)]
    ]


def leave_permutations(items: Iterable[pytest.Item]) -> None:
    """Of a test marked ``each_value_once``, mark items as further until each value is in few of the others.

    Every value of every parameter stays in `make test`, but not with every value of the other parameters.
    Values that are `further` or `soak` do not count.
    """
    functions = defaultdict(list)
    for item in items:
        if item.get_closest_marker("further") or item.get_closest_marker("soak"):
            continue
        if isinstance(item, pytest.Function) and item.get_closest_marker("each_value_once"):
            # Values by identity, as they need not be hashable.
            values = {(name, id(value)) for name, value in item.callspec.params.items()}
            functions[item.parent, item.originalname].append((item, values))
    for permutations in functions.values():
        missing = set().union(*(values for _, values in permutations))
        while missing:
            best = max(permutations, key=lambda permutation: len(permutation[1] & missing))
            missing -= best[1]
            permutations.remove(best)
        for item, _ in permutations:
            item.add_marker("further")
