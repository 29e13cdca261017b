"""What `DatasetReader` cuts its batches from: reading ahead."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait

import pytest

from rlio.source import ahead as module
from rlio.source.ahead import Ahead


def test_what_was_announced_is_finished_before_anything_else_is_loaded() -> None:
    """Shards are opened, and damage is counted, by one thread at a time."""
    started, busy, overlaps = threading.Event(), threading.Lock(), 0

    def load(key: int) -> int:
        nonlocal overlaps
        free = busy.acquire(blocking=False)
        overlaps += not free
        started.set()
        time.sleep(0.05)  # The other thread has the time to come in, if it may.
        if free:
            busy.release()
        return key

    ahead = Ahead[int]()
    ahead.announce(1, load)
    started.wait()
    assert ahead.get(2, load) == 2
    ahead.announce(3, load)
    assert ahead.get(3, load) == 3
    assert overlaps == 0
    ahead.close()


@pytest.mark.parametrize(
    ("holds_gil", "busy", "meanwhile"),
    [(True, 0.1, False), (True, 0.2, False), (True, 0.3, True), (True, 5.0, True), (False, 0.0, True)],
)
def test_a_thread_loads_ahead_of_an_idle_caller_unless_loading_holds_pythons_lock(
    holds_gil: bool, busy: float, meanwhile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread for less hides little, and both wait for the lock."""
    now, loaded_by = 0.0, list[threading.Thread]()
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)

    def load(key: int) -> int:
        nonlocal now
        now += 1
        loaded_by.append(threading.current_thread())
        return key

    ahead = Ahead[int](holds_gil=holds_gil)
    for key in range(4):
        assert ahead.get(key, load) == key
        ahead.announce(key + 1, load)
        if ahead._announced is not None:
            wait([ahead._announced[1]])
        now += busy
    ahead.close()
    main = threading.current_thread()
    first = 1 + holds_gil  # Of the caller, nothing is known at the first item.
    expected = [True] * first + [False] * (5 - first) if meanwhile else [True] * 4
    assert [thread is main for thread in loaded_by] == expected
