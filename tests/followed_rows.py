"""Helpers of the tests of `FollowingReplay`: what is in its ring, and waiting for what its thread does."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from growing_data import grow, seal
from stored_batches import fresh_root

from rlio import FollowingReplay
from rlio.replay.draws import Draw


def in_ring(replay: FollowingReplay) -> Counter[tuple[int, int]]:
    """(label, number) of the rows in the ring, and how often each is there."""
    with replay._feed.changed:
        count = len(replay.store)
        if not count:
            return Counter()
        batch = replay.store.units(Draw()).batch(np.arange(count))
        return Counter(zip(batch["label"].tolist(), batch["t"].tolist(), strict=True))


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something holds; fail where it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


def settle(replay: FollowingReplay, inserted: int) -> None:
    """Wait until so many rows were put in, and then that the thread has looked once more in vain."""
    replay._feed.start()
    until(lambda: replay.counters.inserted == inserted)
    looked = replay._feed._look_at
    until(lambda: replay.counters.inserted != inserted or replay._feed._look_at > looked or not room(replay))
    assert replay.counters.inserted == inserted


def room(replay: FollowingReplay) -> int:
    """Rows that may be put in."""
    with replay._feed.changed:
        return replay._feed._room()


def replay_of(root: Any, **options: Any) -> FollowingReplay:
    """A follower that looks often and does not wait for ever."""
    return FollowingReplay(
        root,
        **{"capacity": 1000, "batch_size": 10, "seed": 0, "poll_seconds": 0.003, "timeout": 30, **options},
    )


def finished(rows: dict[str, int]) -> str:
    """A data set of closed writers: id -> rows; labels are their numbers."""
    root = fresh_root()
    for label, (writer, count) in enumerate(rows.items()):
        grow(root, writer, 0, count, label=label)
        seal(root, writer, count)
    return root


def every_row(rows: dict[str, int]) -> Counter[tuple[int, int]]:
    """What `finished` holds, each row once."""
    return Counter((label, t) for label, count in enumerate(rows.values()) for t in range(count))
