"""What `DatasetReader` cuts its batches from: reading ahead."""

from __future__ import annotations

import threading
import time

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
