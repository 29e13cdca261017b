"""What `make test` leaves to `make test-all`: more seeds, servers and permutations of the same test.

Tests that take long have the mark ``further``, too.
"""

from __future__ import annotations

import zlib
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


def some(step: int, values: Iterable[Any], start: int = 0) -> list[Any]:
    """Values of a parameter, of which `make test` runs each ``step``-th from ``start`` on.

    Tests of one family have unlike starts, so that each value is in one of them.
    """
    return [value if (place - start) % step == 0 else further(value)[0] for place, value in enumerate(values)]


def on_servers(first: str, *others: str) -> list[Any]:
    """Names of `servers.SERVERS` as values of a parameter, of which `make test` runs the first.

    The items of one server are of one ``xdist_group``, and so in one process, which starts it.
    """
    return [
        pytest.param(name, marks=[pytest.mark.xdist_group(name), *marks])
        for name, marks in [(first, []), *((name, [pytest.mark.further]) for name in others)]
    ]


def leave_permutations(items: Iterable[pytest.Item]) -> None:
    """Mark items of tests marked ``each_value_once`` or ``few(count)`` as further.

    Of ``each_value_once``, every value of every parameter stays in `make test`, but not with every value of
    the other parameters. Of ``few``, ``count`` items stay. Items that are `further` or `soak` do not count.
    """
    functions = defaultdict(list)
    for item in items:
        if item.get_closest_marker("further") or item.get_closest_marker("soak"):
            continue
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions[item.parent, item.originalname].append(item)
    for name, permutations in functions.items():
        if permutations[0].get_closest_marker("each_value_once"):
            permutations = _each_value_once(permutations)
        if few := permutations[0].get_closest_marker("few"):
            _leave(permutations, _spread(len(permutations), *few.args, seed=zlib.crc32(name[1].encode())))


def _leave(permutations: list[pytest.Function], stay: Iterable[int]) -> None:
    places = set(stay)
    for place, item in enumerate(permutations):
        if place not in places:
            item.add_marker("further")


def _spread(total: int, count: int, seed: int) -> set[int]:
    """Places of ``count`` of ``total`` items at equal distances; tests of one family begin at unlike ones."""
    return {(seed + place * total // count) % total for place in range(count)}


def _each_value_once(permutations: list[pytest.Function]) -> list[pytest.Function]:
    """Permutations that stay."""
    # Values by identity, as they need not be hashable.
    shown = [{(name, id(value)) for name, value in item.callspec.params.items()} for item in permutations]
    missing = set().union(*shown)
    stay = []
    while missing:
        best = max(range(len(shown)), key=lambda place: len(shown[place] & missing))
        missing -= shown[best]
        stay.append(best)
    _leave(permutations, stay)
    return [permutations[place] for place in sorted(stay)]
