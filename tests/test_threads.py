"""Several threads may call one object: their calls take turns, or are refused (docs/guarantees.md)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from counter_env import episode
from crash_child import fork, wait_for
from stored_batches import group_bytes, store
from threads import THREADS, in_a_thread, together

import rlio
from rlio import DatasetReader, ReplayStore, Roll
from rlio.errors import ClosedError, EndOfData
from rlio.reader import InputReader

#: Episodes of 9 steps, in small row groups.
EPISODES, LENGTH = 8, 9
ROWS = EPISODES * LENGTH


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = str(tmp_path_factory.mktemp("data") / "set")
    with group_bytes(400):
        return store(
            *(episode(0, number, LENGTH) for number in range(EPISODES)),
            root=root,
            roll=Roll(max_rows=30, max_seconds=None),
        )


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


# ---- stores that are being built ----


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Builds wait for this event."""
    event = threading.Event()
    build = ReplayStore._build

    def slow(self: ReplayStore, *args: Any) -> None:
        event.wait(10)
        build(self, *args)

    monkeypatch.setattr(ReplayStore, "_build", slow)
    yield event
    event.set()


def test_eight_threads_ask_a_store_that_is_being_built(root: str, go_on: threading.Event) -> None:
    """Three of four got an AttributeError: the first to wake up took the builder away from the others."""
    for _ in range(8):
        go_on.clear()
        with ReplayStore.open(root, wait=False) as kept:
            asked: list[Callable[[], Any]] = [lambda: len(kept)] * 5
            asked += [lambda: kept.row_bytes, lambda: len(kept.tables), kept.wait]
            threading.Timer(0.01, go_on.set).start()
            *lengths, row_bytes, tables, whole = together(*asked)
            assert lengths == [ROWS] * 5
            assert (tables, whole) == (1, True)
            assert row_bytes > 0


def by_row(reader: InputReader) -> list[tuple[int, int]]:
    """Rows of a batch, as (episode, step)."""
    batch: Any = reader.sample()
    return list(zip(batch["eps_id"].tolist(), batch["t"].tolist(), strict=True))


#: What waits for a build at its first draw.
WAITING: dict[str, Callable[[ReplayStore], Callable[[], object]]] = {
    "uniform": lambda kept: kept.uniform(seed=0).sample,
    "prioritised": lambda kept: kept.prioritised(seed=0).sample,
    "sequences": lambda kept: kept.uniform(seed=0, sequence_length=4).sample,
    "length": lambda kept: kept.__len__,
    "epochs": lambda kept: kept.epochs,
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("name", WAITING)
def test_a_fork_does_not_wait_for_a_store_that_is_being_built(
    root: str, go_on: threading.Event, name: str
) -> None:
    """A sampler held the store's lock while it waited for the build; a fork takes the locks of all stores."""
    kept = ReplayStore.open(root, wait=False)
    call = WAITING[name](kept)
    waiting = in_a_thread(call)
    assert waiting.is_running(0.1)
    late = threading.Timer(5.0, go_on.set)
    late.start()

    def child() -> None:
        for each in (call, kept.__len__, kept.uniform(seed=1).sample):
            with pytest.raises(ClosedError):
                each()
        kept.close()

    assert wait_for(fork(child), seconds=30) == 0
    assert not go_on.is_set(), "the fork waited for the build"
    late.cancel()
    go_on.set()
    assert not isinstance(waiting.result(), BaseException)
    assert len(kept) == ROWS
    kept.close()


#: Readers that wait for a build at their first batch.
BUILDING: dict[str, Callable[[str, ReplayStore], InputReader]] = {
    "uniform": lambda root, kept: kept.uniform(seed=0),
    "prioritised": lambda root, kept: kept.prioritised(seed=0),
    "whole episodes": lambda root, kept: kept.uniform(seed=0, episodes=True, batch_size=2),
    "epochs of a data set": lambda root, kept: DatasetReader(root, cache="memory"),
    "epochs of a data set on disk": lambda root, kept: DatasetReader(root, cache="disk"),
    "epochs of a growing data set": lambda root, kept: DatasetReader(root, cache="memory", grow=True),
    "a mixture": lambda root, kept: rlio.MixedInput([(kept.uniform(seed=0), 1)], batch_size=3),
    "a shuffle": lambda root, kept: rlio.ShuffledInput(kept.uniform(seed=0), 3, seed=0),
}


@pytest.mark.parametrize("ended_by", ["interrupt", "close"])
@pytest.mark.parametrize("name", BUILDING)
def test_a_sample_that_waits_for_a_build_ends_when_its_reader_is_closed(
    root: str, go_on: threading.Event, name: str, ended_by: str
) -> None:
    with ReplayStore.open(root, wait=False) as kept:
        reader = BUILDING[name](root, kept)
        waiting = [in_a_thread(reader.sample) for _ in range(2)]
        assert all(each.is_running(0.05) for each in waiting)
        release = threading.Timer(0.2, go_on.set)  # A reader that owns its store waits for its builder.
        if name.startswith("epochs") and ended_by == "close":
            release.start()
        in_a_thread(getattr(reader, ended_by)).result()
        for each in waiting:
            assert isinstance(each.result(), ClosedError)
        release.cancel()
        go_on.set()
        reader.close()
        with pytest.raises(ClosedError):
            reader.sample()
        assert len(kept) == ROWS  # The store was not closed.
        if name == "uniform":
            assert kept.uniform(batch_size=5, seed=1).sample().count == 5


def test_calls_that_wait_for_a_build_end_when_the_store_is_closed(root: str, go_on: threading.Event) -> None:
    kept = ReplayStore.open(root, wait=False)
    waiting = [in_a_thread(call) for call in (kept.uniform(seed=0).sample, kept.__len__, kept.wait)]
    assert all(each.is_running(0.05) for each in waiting)
    closing = in_a_thread(kept.close)
    for each in waiting:
        assert isinstance(each.result(), ClosedError)
    go_on.set()
    assert closing.result() is None


def test_a_wait_for_a_build_ends_after_its_timeout(root: str, go_on: threading.Event) -> None:
    with ReplayStore.open(root, wait=False) as kept:
        assert together(*[lambda: kept.wait(0.05)] * THREADS) == [False] * THREADS
        assert not kept.ready
        go_on.set()
        assert kept.wait(20)
        assert kept.ready


def test_a_build_that_fails_raises_in_every_thread(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: ReplayStore, *_: Any) -> None:
        raise EndOfData("it broke")

    monkeypatch.setattr(ReplayStore, "_build", fails)
    with ReplayStore.open(root, wait=False) as kept:
        results = together(*[kept.wait, kept.__len__, kept.uniform(seed=0).sample] * 3)
        assert [type(result) for result in results] == [EndOfData] * 9
