"""Several threads may call one object: their calls take turns, or are refused (docs/guarantees.md)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
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


# ---- readers ----

BATCHES = 5


def loaded(root: str) -> ReplayStore:
    """A live store that was saved and loaded."""
    live = ReplayStore(ROWS)
    for number in range(EPISODES):
        live.append(episode(0, number, LENGTH))
    folder = Path(root).parent / "saved"
    live.save(folder)
    return ReplayStore.load(folder)


def worker(root: str) -> rlio.RolloutWorker:
    rollout = rlio.RolloutConfig(num_envs=2, rollout_fragment_length=10)
    return rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), rollout=rollout, seed=0)


def stored(root: str, **options: Any) -> DatasetReader:
    return DatasetReader(root, **{"batch_size": 7, "shuffle": True, "seed": 0, **options})


#: Readers that give the same batches whenever they are made.
READERS: dict[str, Callable[[str], InputReader]] = {
    "uniform": lambda root: ReplayStore.open(root).uniform(batch_size=7, seed=0),
    "uniform, on disk": lambda root: ReplayStore.open(root, cache="disk").uniform(batch_size=7, seed=0),
    "uniform, loaded": lambda root: loaded(root).uniform(batch_size=7, seed=0),
    "prioritised": lambda root: ReplayStore.open(root).prioritised(batch_size=7, seed=0),
    "prioritised, loaded": lambda root: loaded(root).prioritised(batch_size=7, seed=0),
    "epochs": lambda root: ReplayStore.open(root).epochs(batch_size=7, seed=0),
    "n-step": lambda root: ReplayStore.open(root).epochs(batch_size=7, seed=0, n_step=3),
    "sequences": lambda root: ReplayStore.open(root).epochs(batch_size=3, seed=0, sequence_length=4),
    "whole episodes": lambda root: ReplayStore.open(root).epochs(batch_size=3, seed=0, episodes=True),
    "a data set in memory": lambda root: stored(root, cache="memory"),
    "a data set on disk": lambda root: stored(root, cache="disk"),
    "a data set as it is read": lambda root: stored(root, cache="none"),
    "a data set that grows": lambda root: DatasetReader(root, batch_size=7, cache="none", grow=True),
    "a mixture": lambda root: rlio.MixedInput(
        [(stored(root, cache="disk"), 2), (stored(root, cache="memory"), 1)], batch_size=6
    ),
    "a shuffle": lambda root: rlio.ShuffledInput(stored(root, cache="memory"), 4, seed=0),
    "a function": lambda root: rlio.MappedInput(stored(root, cache="none"), lambda batch: batch[1:]),
    "a recording": lambda root: rlio.RecordingInput(stored(root, cache="none"), rlio.NoopOutput()),
    "asynchronous": lambda root: rlio.AsyncInput(stored(root, cache="none")),
    "a worker": worker,
}


def bytes_of(batch: Any) -> tuple[bytes, ...]:
    """The content of a batch, except what tells when it was made."""
    return tuple(batch[name].tobytes() for name in sorted(batch))


@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("name", READERS)
def test_eight_threads_share_the_batches_of_one_reader(root: str, name: str, size: int | None) -> None:
    """Batches were lost, given twice or mixed, or a call raised an error that told nothing."""
    taken = THREADS * BATCHES
    with READERS[name](root) as twin:
        expected = [bytes_of(twin.sample(size)) for _ in range(taken + 1)]
    with READERS[name](root) as reader:
        states: list[Any] = []

        def sample() -> list[tuple[bytes, ...]]:
            found = []
            for _ in range(BATCHES):
                found.append(bytes_of(reader.sample(size)))
                states.append(reader.state_dict())
            return found

        results = together(*[sample] * THREADS)
        assert not [result for result in results if isinstance(result, BaseException)]
        assert sorted(batch for found in results for batch in found) == sorted(expected[:taken])
    if reader.replayable:
        with READERS[name](root) as other:
            for state in states[:: taken // 10]:  # A state lies between two batches.
                other.load_state_dict(state)
                assert bytes_of(other.sample(size)) in expected
