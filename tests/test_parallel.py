"""Many requests at once: in order, the first error in its turn, and no more results ahead than asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlio.storage.parallel import each

REMOTE: Any = SimpleNamespace(at_once=16)


def counted(begun: list[int]) -> Callable[[int], int]:
    def work(item: int) -> int:
        begun.append(item)
        if item == 30:
            raise ValueError("30")
        return -item

    return work


@pytest.mark.parametrize("ahead", [None, 1, 3])
@pytest.mark.parametrize("storage", [REMOTE, SimpleNamespace(at_once=1)], ids=["remote", "local"])
def test_results_come_in_order_and_an_error_in_its_turn(storage: Any, ahead: int | None) -> None:
    begun: list[int] = []
    found = each(storage, counted(begun), range(60), ahead=ahead)
    assert [next(found) for _ in range(30)] == [-item for item in range(30)]
    with pytest.raises(ValueError, match="30"):
        next(found)
    assert next(found, None) is None
    assert list(each(storage, counted([]), range(3), ahead=ahead)) == [0, -1, -2]


def test_no_more_results_are_made_ahead_than_asked_for() -> None:
    begun: list[int] = []
    found = each(REMOTE, counted(begun), range(25), ahead=2)
    for asked, _ in enumerate(found, 1):
        assert len(begun) <= asked + 2
    assert sorted(begun) == list(range(25))


def test_several_are_worked_on_at_once() -> None:
    barrier = threading.Barrier(3)

    def work(item: int) -> int:
        if item:
            barrier.wait(30)  # Broken unless three are here together.
        return item

    assert list(each(REMOTE, work, range(4))) == [0, 1, 2, 3]
    assert list(each(REMOTE, work, range(4), ahead=3)) == [0, 1, 2, 3]
