"""Several threads may call one object: their calls take turns, or are refused (docs/guarantees.md)."""

from __future__ import annotations

import copy
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
import pytest
from counter_env import episode
from crash_child import fork, wait_for
from followed_rows import until
from further import first, further
from pettingzoo import ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec
from stored_batches import group_bytes, store
from threads import THREADS, in_a_thread, together

import rlio
import rlio.torch
from rlio import DatasetReader, FollowReader, ReplayStore, Roll
from rlio.errors import ClosedError, EndOfData, OptionError, RlioError
from rlio.following.replay import FollowCounters
from rlio.reader import InputReader
from rlio.replay.samplers import EpochReader, PrioritisedSampler, UniformSampler
from rlio.sampling.external_runner import ExternalRunner
from rlio.sampling.runner import Runner
from rlio.support import forks, turns

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
        event.wait(60)
        build(self, *args)

    monkeypatch.setattr(ReplayStore, "_build", slow)
    yield event
    event.set()


@pytest.mark.further
def test_eight_threads_ask_a_store_that_is_being_built(root: str, go_on: threading.Event) -> None:
    """Three of four got an AttributeError: the first to wake up took the builder away from the others."""
    for _ in range(4):
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
    "sequences": lambda kept: kept.uniform(seed=0, draw=rlio.Sequences(4)).sample,
    "length": lambda kept: kept.__len__,
    "epochs": lambda kept: kept.epochs,
}


@pytest.mark.few(1)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("name", first(2, WAITING))
def test_a_fork_does_not_wait_for_a_store_that_is_being_built(
    root: str, go_on: threading.Event, name: str
) -> None:
    """A sampler held the store's lock while it waited for the build; a fork takes the locks of all stores."""
    kept = ReplayStore.open(root, wait=False)
    call = WAITING[name](kept)
    waiting = in_a_thread(call)
    assert waiting.is_running(0.1)
    late = threading.Timer(30.0, go_on.set)
    late.start()

    def child() -> None:
        for each in (call, kept.__len__, kept.uniform(seed=1).sample):
            with pytest.raises(ClosedError):
                each()
        kept.close()

    assert wait_for(fork(child)) == 0
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
    "whole episodes": lambda root, kept: kept.uniform(seed=0, draw=rlio.WholeEpisodes(), batch_size=2),
    "epochs of a data set": lambda root, kept: DatasetReader(root, cache="memory"),
    "epochs of a data set on disk": lambda root, kept: DatasetReader(root, cache="disk"),
    "a mixture": lambda root, kept: rlio.MixedInput([(kept.uniform(seed=0), 1)], batch_size=3),
    "a shuffle": lambda root, kept: rlio.ShuffledInput(kept.uniform(seed=0), 3, seed=0),
}


@pytest.mark.few(2)
@pytest.mark.each_value_once
@pytest.mark.parametrize("ended_by", ["interrupt", "close"])
@pytest.mark.parametrize("name", BUILDING)
def test_a_sample_that_waits_for_a_build_ends_when_its_reader_is_closed(
    root: str, go_on: threading.Event, name: str, ended_by: str
) -> None:
    with ReplayStore.open(root, wait=False) as kept:
        reader = BUILDING[name](root, kept)
        waiting = [in_a_thread(reader.sample) for _ in range(2)]
        assert all(each.is_running(0.05) for each in waiting)
        ending = in_a_thread(getattr(reader, ended_by))
        for each in waiting:
            assert isinstance(each.result(), ClosedError)
        if name.startswith("epochs") and ended_by == "close":
            go_on.set()  # A reader that owns its store waits for its builder.
        assert ending.result() is None
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


def test_a_store_is_closed_by_a_thread_that_holds_its_lock(root: str, go_on: threading.Event) -> None:
    kept = ReplayStore.open(root, wait=False)

    def close() -> None:
        with kept.lock:
            kept.close()

    closing = in_a_thread(close)
    assert closing.is_running(0.05), "it waits for its builder"
    go_on.set()
    assert closing.result() is None


def test_a_wait_for_a_build_ends_after_its_timeout(root: str, go_on: threading.Event) -> None:
    with ReplayStore.open(root, wait=False) as kept:
        assert together(*[lambda: kept.wait(0.05)] * THREADS) == [False] * THREADS
        assert not kept.ready
        go_on.set()
        assert kept.wait(60)
        assert kept.ready


def test_a_build_that_fails_raises_in_every_thread(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: ReplayStore, *_: Any) -> None:
        raise EndOfData("it broke")

    monkeypatch.setattr(ReplayStore, "_build", fails)
    with ReplayStore.open(root, wait=False) as kept:
        results = together(*[kept.wait, kept.__len__, kept.uniform(seed=0).sample] * 3)
        assert [type(result) for result in results] == [EndOfData] * 9


# ---- readers ----

BATCHES = 3


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


#: Formats of other libraries, by the suffix of their files.
FOREIGN = {"minari": "", "lerobot": "", "npz": "", "d3rlpy": ".h5", "d4rl": ".hdf5", "rllib-json": ""}


def foreign(root: str, name: str, **options: Any) -> InputReader:
    """A shuffled reader of the data set in another format, or in a file that tells nothing of its rows."""
    target = Path(root).parent / f"foreign-{name}{FOREIGN.get(name, '')}"
    if not target.exists():
        if name in FOREIGN:
            rlio.convert(root, target, to=name)
        else:
            table = rlio.open_dataset(root).to_arrow()
            own = table.select(["actions", "rewards", "terminateds", "truncateds", "eps_id", "t"])
            own.to_pandas().to_csv(target, index=False) if name.endswith(".csv") else pq.write_table(
                own, target, row_group_size=10
            )
    return rlio.read(target, **{"batch_size": 7, "shuffle": True, "seed": 0, **options})


MAPPING = rlio.Mapping(
    {"obs": "rewards", "actions": "actions", "rewards": "rewards"}, episode="eps_id", terminated="terminateds"
)


#: Readers that give the same batches whenever they are made.
READERS: dict[str, Callable[[str], InputReader]] = {
    "uniform": lambda root: ReplayStore.open(root).uniform(batch_size=7, seed=0),
    "uniform, on disk": lambda root: ReplayStore.open(root, cache="disk").uniform(batch_size=7, seed=0),
    "uniform, loaded": lambda root: loaded(root).uniform(batch_size=7, seed=0),
    "prioritised": lambda root: ReplayStore.open(root).prioritised(batch_size=7, seed=0),
    "prioritised, loaded": lambda root: loaded(root).prioritised(batch_size=7, seed=0),
    "epochs": lambda root: ReplayStore.open(root).epochs(batch_size=7, seed=0),
    "n-step": lambda root: ReplayStore.open(root).epochs(batch_size=7, seed=0, draw=rlio.NStep(3)),
    "sequences": lambda root: ReplayStore.open(root).epochs(batch_size=3, seed=0, draw=rlio.Sequences(4)),
    "whole episodes": lambda root: ReplayStore.open(root).epochs(
        batch_size=3, seed=0, draw=rlio.WholeEpisodes()
    ),
    "a data set in memory": lambda root: stored(root, cache="memory"),
    "a data set on disk": lambda root: stored(root, cache="disk"),
    "a data set as it is read": lambda root: stored(root, cache="none"),
    "a mixture": lambda root: rlio.MixedInput(
        [(stored(root, cache="disk"), 2), (stored(root, cache="memory"), 1)], batch_size=6
    ),
    "a shuffle": lambda root: rlio.ShuffledInput(stored(root, cache="memory"), 4, seed=0),
    "a function": lambda root: rlio.MappedInput(stored(root, cache="none"), lambda batch: batch[1:]),
    "a recording": lambda root: rlio.RecordingInput(stored(root, cache="none"), rlio.NoopOutput()),
    "asynchronous": lambda root: rlio.AsyncInput(stored(root, cache="none")),
    "a worker": worker,
    **{
        f"{name}{how}": partial(foreign, name=name, **options)
        for name in FOREIGN
        for how, options in (("", {}), (", as it is read", {"cache": "none"}))
    },
    "others' Parquet": partial(foreign, name="others.parquet"),
    "others' Parquet, as it is read": partial(foreign, name="others.parquet", cache="none"),
    "a table": partial(foreign, name="table.csv", mapping=MAPPING),
}


def bytes_of(batch: Any) -> tuple[bytes, ...]:
    """The content of a batch, except what tells when it was made."""
    return tuple(batch[name].tobytes() for name in sorted(batch))


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [None, *further(5)])
@pytest.mark.parametrize(
    "name",
    [
        further(name)[0]
        if name.endswith((", as it is read", ", loaded", "on disk")) or name in list(FOREIGN)[2:]
        else name
        for name in READERS
    ],
)
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
            for state in states[:: taken // 6]:  # A state lies between two batches.
                other.load_state_dict(state)
                assert bytes_of(other.sample(size)) in expected


class Halting(InputReader):
    """A reader that halts in the middle of a batch, until it is told to go on."""

    def __init__(self) -> None:
        self.go_on, self.begun, self.ended = threading.Event(), 0, 0

    def _next(self) -> rlio.SampleBatch:
        self.begun += 1
        self.go_on.wait(60)
        self.ended += 1
        return rlio.SampleBatch(t=[self.ended])

    def _position(self) -> dict[str, Any]:
        return {"begun": self.begun, "ended": self.ended}

    def _seek(self, position: dict[str, Any]) -> None:
        self.begun, self.ended = position["begun"], position["ended"]


def test_other_calls_wait_for_a_sample_in_the_middle_of_a_batch() -> None:
    reader = Halting()
    mixture = rlio.MixedInput([(reader, 1)], batch_size=1)
    earlier = {
        "version": 1,
        "reader": "Halting",
        "position": {"begun": 7, "ended": 7},
        "skip": 0,
        "dropped": 0,
    }
    sampling = in_a_thread(mixture.sample)
    until(lambda: reader.begun == 1)
    calls = [
        in_a_thread(call)
        for call in (reader.state_dict, mixture.state_dict, lambda: mixture.counts, reader.sample)
    ]
    loading = in_a_thread(lambda: reader.load_state_dict(earlier))
    assert all(each.is_running(0.02) for each in (sampling, *calls, loading))
    reader.go_on.set()
    assert sampling.result()["t"].tolist() == [1]
    state, mixed, counts, sample = (each.result() for each in calls)
    assert state["position"]["begun"] == state["position"]["ended"] > 0
    assert mixed["position"]["counts"] == [1]
    assert counts == {"source_0": 1}
    assert sample["t"].tolist()[0] > 1
    assert loading.result() is None


def test_a_mixture_tells_its_counts_while_other_threads_sample(root: str) -> None:
    """A look at the counts moved the sources past rows that were still being served."""
    with READERS["a mixture"](root) as mixture:
        assert isinstance(mixture, rlio.MixedInput)
        results = together(
            *[lambda: sum(len(mixture.sample()) for _ in range(20))] * 4,
            *[lambda: [mixture.counts for _ in range(20)]] * 4,
        )
        assert not [result for result in results if isinstance(result, BaseException)]
        assert mixture.counts == {"source_0": 320, "source_1": 160}


def test_eight_threads_append_to_a_store_and_draw_from_one_sampler() -> None:
    live = ReplayStore(ROWS)
    live.append(episode(0, 0, LENGTH))
    samplers = [live.uniform(batch_size=7, seed=0), live.prioritised(batch_size=7, seed=0)]

    def append(env: int) -> None:
        for number in range(1, EPISODES):
            for at in range(0, LENGTH, 3):
                live.append(episode(env, number, LENGTH, start=at, stop=at + 3))

    def draw() -> None:
        for _ in range(10):
            for sampler in samplers:
                batch: Any = sampler.sample()
                here, there = batch["obs"], batch["new_obs"]
                assert ((there - here) == [0, 0, 1]).all()
                if "batch_indexes" in batch:
                    sampler.update_priorities(batch["batch_indexes"], batch["rewards"])  # type: ignore[union-attr]
            assert 0 < len(live) <= ROWS
            samplers[0].state_dict()

    results = together(*[lambda env=env: append(env) for env in range(4)], *[draw] * 4)
    assert results == [None] * THREADS
    (table,) = live.tables.values()
    assert table.head == LENGTH + 4 * (EPISODES - 1) * LENGTH, "each row was appended once"


def test_a_store_that_is_closed_ends_the_draws_of_eight_threads() -> None:
    live = ReplayStore(ROWS)
    live.append(episode(0, 0, LENGTH))
    sampler = live.uniform(batch_size=7, seed=0)

    def draw() -> None:
        while True:
            sampler.sample()

    def append() -> None:
        while True:
            live.append(episode(0, 1, LENGTH))

    *others, closed = together(*[draw] * 6, append, lambda: time.sleep(0.05) or live.close())
    assert closed is None
    assert all(isinstance(each, ClosedError) for each in others)
    with pytest.raises(ClosedError):
        len(live)


def test_rows_that_wait_for_their_turn_are_not_appended_to_a_closed_store() -> None:
    live = ReplayStore(ROWS)
    with live.lock:
        appending = in_a_thread(lambda: live.append(episode(0, 0, LENGTH)))
        assert appending.is_running(0.05)
        live.close()
    assert isinstance(appending.result(), ClosedError)
    with pytest.raises(ClosedError):
        len(live)


def test_eight_threads_draw_from_a_data_set_that_is_followed(root: str) -> None:
    ratio = rlio.SamplesPerInsert(max=4, min_size=10)  # The first ten rows are not counted.
    others = set(threading.enumerate())
    with rlio.FollowingReplay(root, capacity=ROWS, batch_size=6, ratio=ratio, seed=0) as replay:

        def draw() -> int:
            rows = 0
            for batch in replay:
                assert ((batch["new_obs"] - batch["obs"]) == [0, 0, 1]).all()  # type: ignore[index]
                rows += batch.count
                replay.state_dict()
            return rows

        drawn = together(*[draw] * THREADS)
        assert sum(drawn) == 4 * (ROWS - 10)
        assert replay.counters == FollowCounters(ROWS, sum(drawn), ROWS)
        assert [thread.name for thread in set(threading.enumerate()) - others].count("rlio-feed") <= 1


def test_a_state_is_taken_while_a_sample_waits_for_rows(tmp_path: Path) -> None:
    with rlio.FollowingReplay(tmp_path / "set", capacity=ROWS, batch_size=6, seed=0) as replay:
        waiting = in_a_thread(replay.sample)
        assert waiting.is_running(0.1)
        assert in_a_thread(replay.state_dict).result()["position"]["drawn"] == 0
        replay.close()
        assert isinstance(waiting.result(), ClosedError)


# ---- interrupt and close, while calls wait ----


class Loop(rlio.ExternalEnv):
    """An environment that has the loop itself: episodes of some steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2))
        self._steps = steps

    def run(self) -> None:
        while True:
            time.sleep(0.001)
            episode_id = self.start_episode()
            for _ in range(self._steps):
                self.get_action(episode_id, np.zeros(2, np.float32))
                self.log_returns(episode_id, 1.0)
            self.end_episode(episode_id, np.zeros(2, np.float32))


class Waits(InputReader):
    """A reader of a plug-in that waits until it is interrupted; its author calls no __init__ of the base."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()

    def _next(self) -> rlio.SampleBatch:
        self.begun.set()
        self.over.wait()
        raise ClosedError("it was interrupted")

    def interrupt(self) -> None:
        self.over.set()


def served(root: str) -> InputReader:
    spaces = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    return rlio.serving.PolicyServerInput(rlio.RandomPolicy(), spaces=spaces)


def endless_steps(root: str) -> rlio.RolloutWorker:
    rollout = rlio.RolloutConfig(rollout_fragment_length=10**6)
    return rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), rollout=rollout, seed=0)


#: Readers whose `sample` waits without limit.
ENDLESS: dict[str, Callable[[str], InputReader]] = {
    "a plug-in": lambda root: Waits(),
    "a data set that is followed": lambda root: FollowReader(f"{root}-later"),
    "a replay that follows": lambda root: rlio.FollowingReplay(f"{root}-later", capacity=9, batch_size=1),
    "a policy server": served,
    "a worker of a loop": lambda root: rlio.RolloutWorker(Loop(0), rlio.RandomPolicy(), seed=0),
    "a worker that steps": endless_steps,
    "asynchronous": lambda root: rlio.AsyncInput(Waits()),
    "a mixture": lambda root: rlio.MixedInput([(Waits(), 1), (stored(root, cache="none"), 1)], batch_size=4),
    "a shuffle": lambda root: rlio.ShuffledInput(Waits(), 3, seed=0),
    "a function": lambda root: rlio.MappedInput(Waits(), lambda batch: batch),
    "a recording": lambda root: rlio.RecordingInput(Waits(), rlio.NoopOutput()),
}


@pytest.mark.few(6)
@pytest.mark.each_value_once
@pytest.mark.parametrize("ended_by", ["interrupt", "close"])
@pytest.mark.parametrize("name", ENDLESS)
def test_samples_of_eight_threads_that_wait_end_when_their_reader_is_closed(
    root: str, name: str, ended_by: str
) -> None:
    reader = ENDLESS[name](root)
    waiting = [in_a_thread(reader.sample) for _ in range(THREADS)]
    assert all(each.is_running(0.02) for each in waiting)
    in_a_thread(getattr(reader, ended_by)).result()
    results = [each.result() for each in waiting]
    assert [type(result) for result in results] == [ClosedError] * THREADS
    assert together(*[reader.close] * THREADS) == [None] * THREADS
    with pytest.raises(ClosedError):
        reader.sample()


def test_a_reader_that_cannot_be_interrupted_is_closed_beside_its_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its author closes what the call waits for, where the contract has `interrupt`: it must not hang."""
    monkeypatch.setattr(turns, "_LAST_SECONDS", 0.1)

    class Late(Waits):
        def interrupt(self) -> None: ...

        def _close(self) -> None:
            self.over.set()

    late = Late()
    reader = rlio.MappedInput(rlio.MappedInput(late))
    waiting = in_a_thread(reader.sample)
    assert late.begun.wait(60)
    in_a_thread(reader.close).result()
    assert isinstance(waiting.result(), ClosedError)
    (record,) = [record.message for record in caplog.records if "is closed while" in record.message]
    assert record.startswith("MappedInput"), "it waits once, and not for each reader around the call"


def test_prefetching_ends_while_its_reader_waits(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` waited for the reader, and so for ever: also at the end of a `with` block after a Ctrl-C."""
    monkeypatch.setattr(forks, "_LAST_SECONDS", 0.1)
    for end in (rlio.torch.Prefetch.close, rlio.torch.Prefetch.interrupt):
        batches = rlio.torch.prefetch(FollowReader(f"{root}-later"))
        waiting = [in_a_thread(lambda: next(batches)) for _ in range(THREADS)]  # noqa: B023
        assert all(each.is_running(0.02) for each in waiting)
        assert in_a_thread(lambda: end(batches)).result() is None  # noqa: B023
        assert [type(each.result()) for each in waiting] == [ClosedError] * THREADS
        in_a_thread(batches.close).result()


def late_readers(over: threading.Event) -> dict[str, Any]:
    """Readers whose `close` waits, as for a thread in a request that the store does not answer."""

    class Late(InputReader):
        def _next(self) -> Any:
            return rlio.SampleBatch(t=np.arange(3))

        def _close(self) -> None:
            begun.set()
            over.wait(60)

    begun = threading.Event()
    return {"begun": begun, "a reader": Late(), "a mixture": rlio.MixedInput([(Late(), 1)], batch_size=2)}


@pytest.mark.parametrize("name", ["a reader", "a mixture", "prefetched", "a loader"])
def test_a_sample_that_waits_for_its_turn_ends_while_its_reader_is_being_closed(
    root: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` has its turn, and may wait for long: a store that hangs is waited for."""
    over = threading.Event()
    late = late_readers(over)
    if name in late:
        reader, begun = late[name], late["begun"]
        take = reader.sample
    else:
        begun = threading.Event()
        if name == "prefetched":
            reader, end = rlio.torch.prefetch(stored(root, cache="none")), "_go_back"
        else:
            data = rlio.torch.ReplayDataset(root, batch_size=7, cache="none", shuffle=False)
            reader, end = data.loader(), "_stop"
        plain = getattr(reader, end)

        def slowly(*args: Any) -> None:
            begun.set()
            over.wait(60)
            plain(*args)

        take = lambda: next(reader)  # noqa: E731
        take()
        monkeypatch.setattr(reader, end, slowly)
    closing = in_a_thread(reader.close)
    assert begun.wait(60)
    waiting = [in_a_thread(take) for _ in range(2)]
    assert [type(each.result()) for each in waiting] == [ClosedError] * 2
    assert closing.is_running()
    over.set()
    assert closing.result() is None


# ---- runners and workers ----

FRAGMENTS = rlio.RolloutConfig(rollout_fragment_length=20)


class Two(rlio.MultiAgentEnv):
    """Two agents, for ten steps."""

    possible_agents = ("a", "b")
    observation_spaces = dict.fromkeys(("a", "b"), gym.spaces.Box(0, 10, (1,)))
    action_spaces = dict.fromkeys(("a", "b"), gym.spaces.Discrete(2))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._t = 0
        return self._seen(), {}

    def step(self, actions: Any) -> Any:
        self._t += 1
        flags = dict.fromkeys(("a", "b", "__all__"), self._t == 10)
        return self._seen(), dict.fromkeys(("a", "b"), 1.0), flags, dict.fromkeys(flags, False), {}

    def _seen(self) -> dict[str, Any]:
        return {agent: np.full(1, self._t, np.float32) for agent in ("a", "b")}


def test_eight_threads_share_the_rows_of_a_loop(root: str) -> None:
    """Threads that waited together got empty batches: the first took all rows."""
    config = rlio.RolloutConfig(rollout_fragment_length=5)
    runner = ExternalRunner(Loop(5), rlio.RandomPolicy(), config=config, seed=0)
    batches = together(*[lambda: [runner.run() for _ in range(3)]] * THREADS)
    runner.stop()
    keys = [
        key
        for served in batches
        for batch in served
        for key in zip(batch["eps_id"].tolist(), batch["t"].tolist(), strict=True)
    ]
    assert all(len(batch) >= 5 for served in batches for batch in served)
    assert len(keys) == len(set(keys))


def test_eight_threads_call_one_runner() -> None:
    for runner in (
        rlio.EnvRunner("CartPole-v1", rlio.RandomPolicy(), config=FRAGMENTS, seed=0),
        rlio.MultiAgentEnvRunner(Two, {"default_policy": rlio.RandomPolicy()}, config=FRAGMENTS, seed=0),
    ):
        calls: list[Callable[[], Any]] = [runner.run, runner.run, runner.run, runner.sample]
        calls += [runner.state_dict, runner.get_state, runner.get_filters, runner.get_metrics]
        results = together(*calls)
        assert not [result for result in results if isinstance(result, BaseException)]
        assert runner.env_steps == 4 * FRAGMENTS.rollout_fragment_length  # type: ignore[operator]
        waiting = in_a_thread(lambda: [runner.run() for _ in range(10**6)])  # noqa: B023
        assert waiting.is_running(0.05)
        assert together(*[runner.stop] * THREADS) == [None] * THREADS
        assert isinstance(waiting.result(), ClosedError)


def test_eight_threads_learn_and_every_update_is_counted() -> None:
    with worker("") as learner:
        policy = learner.policy
        policy.learn_on_batch = lambda batch: {}  # type: ignore[method-assign]
        batch = learner.sample()
        results = together(*[lambda: [learner.learn_on_batch(batch) for _ in range(200)]] * THREADS)
        assert not [result for result in results if isinstance(result, BaseException)]
        assert learner.group.num_grad_updates["default_policy"] == 200 * THREADS
        counted = sorted(each["num_grad_updates_lifetime"] for result in results for each in result)
        assert counted == list(range(1, 200 * THREADS + 1))


def test_one_of_eight_threads_adds_a_policy_and_one_removes_it() -> None:
    with worker("") as one:
        spaces = one.policy.spaces
        added = together(*[lambda: one.group.add("other", rlio.RandomPolicy(), spaces=spaces)] * THREADS)
        assert sorted(isinstance(each, rlio.Policy) for each in added) == [False] * 7 + [True]
        assert all(isinstance(each, rlio.Policy | OptionError) for each in added)
        removed = together(*[lambda: one.remove_policy("other")] * THREADS)
        assert [type(each) for each in removed if each is not None] == [OptionError] * 7


def test_a_runner_is_asked_while_its_run_waits_for_loops() -> None:
    runner = ExternalRunner(Loop(0), rlio.RandomPolicy(), seed=0)
    waiting = in_a_thread(runner.run)
    assert waiting.is_running(0.05)
    for call in (runner.state_dict, runner.get_state, runner.get_filters, runner.get_metrics):
        assert not isinstance(in_a_thread(call).result(), BaseException)
    runner.stop()
    assert isinstance(waiting.result(), ClosedError)


def test_eight_threads_call_one_worker(tmp_path: Path) -> None:
    with worker("") as one:
        calls: list[Callable[[], Any]] = [
            one.sample,
            one.sample_with_count,
            one.get_state,
            one.state_dict,
            lambda: one.save(tmp_path / "saved"),
            one.get_filters,
            lambda: one.set_weights(one.get_weights(), None, 3),
            one.get_metrics,
        ]
        results = together(*calls)
        assert not [result for result in results if isinstance(result, BaseException)]
        state = results[2]
        timesteps = state["position"]["position"]["reader"]["position"]["runner"]["timesteps"]
        assert timesteps in (0, 20, 40), "a state lies between two fragments"


def test_a_callback_of_a_sampler_that_runs_ahead_saves_while_sample_waits_for_it(tmp_path: Path) -> None:
    """Where both wait for their turn, neither goes on."""

    class Saves(rlio.Callbacks):
        def on_episode_end(self, **_: Any) -> None:
            states.append(one.get_state())

    states: list[Any] = []
    rollout = rlio.RolloutConfig(rollout_fragment_length=200, sample_async=True)
    with rlio.RolloutWorker(
        "CartPole-v1", rlio.RandomPolicy(), rollout=rollout, seed=0, callbacks=Saves
    ) as one:
        assert in_a_thread(lambda: [one.sample() for _ in range(3)]).result()[2].count == 200
        assert states


# ---- batches for torch ----


def test_eight_threads_share_prefetched_batches(root: str) -> None:
    with stored(root, cache="memory") as twin:
        expected = [twin.sample()["t"].tolist() for _ in range(THREADS * BATCHES + 1)]  # type: ignore[index]
    with stored(root, cache="memory") as reader, rlio.torch.prefetch(reader) as batches:
        results = together(*[lambda: [next(batches)["t"].tolist() for _ in range(BATCHES)]] * THREADS)
        assert sorted(batch for served in results for batch in served) == sorted(expected[:-1])
        reader_state = batches.state_dict()
    with stored(root, cache="memory") as other:
        other.load_state_dict(reader_state)
        assert other.sample()["t"].tolist() == expected[-1]  # type: ignore[index]


@pytest.mark.further
@pytest.mark.parametrize("workers", [0, *further(2)])
def test_eight_threads_share_the_batches_of_a_loader(root: str, workers: int) -> None:
    with stored(root, cache="none") as twin:
        expected = [twin.sample()["t"].tolist() for _ in range(THREADS * BATCHES)]  # type: ignore[index]
    dataset = rlio.torch.ReplayDataset(root, batch_size=7, shuffle=True, seed=0, cache="none")
    with dataset.loader(num_workers=workers) as loader:
        results = together(*[lambda: [next(loader)["t"].tolist() for _ in range(BATCHES)]] * THREADS)
        assert sorted(batch for served in results for batch in served) == sorted(expected)
        waiting = in_a_thread(lambda: [next(loader) for _ in range(10**6)])
        assert waiting.is_running(0.02)
        loader.close()
        assert isinstance(waiting.result(), ClosedError)


@pytest.mark.further
def test_eight_threads_iterate_one_data_set_of_torch(root: str) -> None:
    """Two of them got the reader that was kept for the next iteration, and half of the batches each."""
    dataset = rlio.torch.ReplayDataset(root, batch_size=19, epochs=1, shuffle=True, seed=0, cache="none")
    expected = [batch["t"].tolist() for batch in dataset]
    for _ in range(2):
        dataset._rest()
        dataset.load_state_dict(dataset._start)  # Opens a reader, and keeps it for the next iteration.
        results = together(*[lambda: [batch["t"].tolist() for batch in dataset]] * THREADS)
        assert results == [expected] * THREADS


@pytest.mark.further
def test_eight_threads_take_rows_and_episodes_of_a_data_set(root: str) -> None:
    """All calls share the row group that was decoded last."""
    data = rlio.open_dataset(root)

    def take(number: int) -> None:
        for index in range(number, ROWS, 2 * THREADS):
            assert data[index]["t"] == index % LENGTH
            assert data.take([index, 0])["eps_id"].tolist() == [index // LENGTH, 0]
        found: Any = data.episode(number)
        assert found.id_ == number

    assert together(*[lambda n=n: take(n) for n in range(THREADS)]) == [None] * THREADS


# ---- writers ----


class Listing(rlio.OutputWriter):
    """A writer of a plug-in, which would mix up the rows of two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []
        self._busy = False

    def _write(self, batch: Any) -> None:
        assert not self._busy
        self._busy = True
        self.found.extend(batch["t"].tolist())
        self._busy = False


WRITERS: dict[str, Callable[[Path], rlio.OutputWriter]] = {
    "parquet": lambda root: rlio.ParquetWriter(root, roll=Roll(max_rows=40)),
    "parquet, no log": lambda root: rlio.ParquetWriter(root, roll=Roll(max_rows=40), spool=None),
    "json": lambda root: rlio.JsonWriter(root, roll=Roll(max_rows=40)),
    "tee": lambda root: rlio.TeeWriter(rlio.ParquetWriter(root), Listing(), rlio.NoopOutput()),
    "paced": lambda root: rlio.PacedWriter(rlio.ParquetWriter(root), pace=rlio.Pace(stale_seconds=0)),
    "a plug-in": lambda root: Listing(),
    "none": lambda root: rlio.NoopOutput(),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WRITERS)
def test_eight_threads_write_to_one_writer_and_each_row_is_there_once(tmp_path: Path, name: str) -> None:
    writer = WRITERS[name](tmp_path / "set")

    def write(number: int) -> None:
        for at in range(4):
            first = 100 * number + 5 * at
            writer.write(rlio.SampleBatch(t=np.arange(first, first + 5)))
            if at == number % 4:
                writer.flush()
            assert writer.rows_published <= writer.rows_received

    assert together(*[lambda n=n: write(n) for n in range(THREADS)]) == [None] * THREADS
    assert together(*[writer.close] * THREADS) == [None] * THREADS
    assert writer.rows_received == writer.rows_published == 20 * THREADS
    expected = sorted(100 * n + row for n in range(THREADS) for row in range(20))
    if isinstance(writer, Listing):
        assert sorted(writer.found) == expected
    if name not in ("a plug-in", "none"):
        found = [row for batch in DatasetReader(tmp_path / "set", epochs=1) for row in batch["t"].tolist()]  # type: ignore[index]
        assert sorted(found) == expected
    with pytest.raises(ClosedError):
        writer.write(rlio.SampleBatch(t=np.arange(1)))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_that_is_closed_ends_the_writes_of_eight_threads(tmp_path: Path, name: str) -> None:
    writer = WRITERS[name](tmp_path / "set")
    written = [0] * 7

    def write(number: int) -> None:
        while True:
            writer.write(rlio.SampleBatch(t=np.arange(5)))
            written[number] += 5

    *others, closed = together(
        *[lambda n=n: write(n) for n in range(7)], lambda: time.sleep(0.03) or writer.close()
    )
    assert closed is None
    assert all(isinstance(each, ClosedError) for each in others)
    assert writer.rows_published == writer.rows_received == sum(written)
    if name not in ("a plug-in", "none") and sum(written):
        assert len(rlio.open_dataset(tmp_path / "set")) == sum(written)


# ---- recorders ----


class Slow(gym.Env[Any, Any]):
    """Each step waits for an event; an observation is the number of the step."""

    observation_space = gym.spaces.Box(0, 10**6, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.go_on, self.waits, self.t = threading.Event(), threading.Event(), 0
        self.go_on.set()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        if not self.go_on.is_set():
            self.waits.set()
        self.go_on.wait(60)
        self.t += 1
        return self._seen(), 1.0, False, False, {}

    def _seen(self) -> Any:
        return np.full(1, self.t, np.float32)


class SlowAgents(ParallelEnv):  # type: ignore[misc,type-arg]
    """`Slow` as the environment of one agent."""

    metadata = {"name": "slow_v0"}  # noqa: RUF012

    def __init__(self, env: Slow) -> None:
        self.env, self.possible_agents, self.agents = env, ["a"], ["a"]

    def observation_space(self, agent: Any) -> Any:
        return self.env.observation_space

    def action_space(self, agent: Any) -> Any:
        return self.env.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return tuple({"a": part} for part in self.env.reset())

    def step(self, actions: Any) -> Any:
        return tuple({"a": part} for part in self.env.step(actions["a"]))


RECORDERS: dict[str, tuple[Callable[[Slow, Path], Any], Any]] = {
    "one": (rlio.RecordExperience, 0),
    "vector": (
        lambda env, root: rlio.RecordVectorExperience(gym.vector.SyncVectorEnv([lambda: env]), root),
        np.zeros(1, np.int64),
    ),
    "agents": (lambda env, root: rlio.RecordParallelEnv(SlowAgents(env), root), {"a": 0}),
    "agents in turns": (
        lambda env, root: rlio.RecordAECEnv(parallel_to_aec(SlowAgents(env)), root),
        0,
    ),
}


@pytest.mark.parametrize("kind", RECORDERS)
def test_a_recorder_refuses_a_step_beside_a_step(tmp_path: Path, kind: str) -> None:
    env = Slow()
    made, action = RECORDERS[kind]
    recording = made(env, tmp_path / "set")
    extras = [] if kind != "agents" else ["a"]
    recording.reset(seed=0)
    recording.step(action)
    env.go_on.clear()
    stepping = in_a_thread(lambda: recording.step(action))
    assert env.waits.wait(60)
    for call in (
        lambda: recording.step(action),
        recording.reset,
        lambda: recording.record(*extras, vf_preds=[1.0]),
    ):
        with pytest.raises(OptionError, match="another thread is in a call of this Record"):
            call()
    closing = in_a_thread(recording.close)
    assert closing.is_running(0.05), "close() waits for the step"
    env.go_on.set()
    assert not isinstance(stepping.result(), BaseException)
    assert closing.result() is None
    assert len(rlio.open_dataset(tmp_path / "set")) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", RECORDERS)
def test_eight_threads_step_one_recorder_and_what_was_not_refused_is_recorded(
    tmp_path: Path, kind: str
) -> None:
    made, action = RECORDERS[kind]
    recording = made(Slow(), tmp_path / "set")
    recording.reset(seed=0)
    refusals: set[str] = set()

    def step() -> int:
        taken, tried = 0, 0
        while tried < 100 or not taken:  # All tries may fall into a slow flush.
            tried += 1
            try:
                recording.step(action)
                taken += 1
            except OptionError as error:
                refusals.add(str(error)[:42])
        return taken

    taken = together(*[step] * 6, *[recording.flush] * 2)
    assert all(isinstance(each, int) for each in taken[:6])
    assert taken[6:] == [None, None]
    assert refusals <= {"another thread is in a call of this Record"}
    assert together(*[recording.close] * THREADS) == [None] * THREADS
    (rows,) = rlio.concat_samples(list(DatasetReader(tmp_path / "set", epochs=1))).policies().values()
    order = np.argsort(rows["t"])
    assert rows["t"][order].tolist() == list(range(sum(taken[:6])))
    assert (rows["new_obs"][order, 0] - rows["obs"][order, 0] == 1).all()


# ---- forks, copies ----


@pytest.mark.few(1)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("name", ["a function", "asynchronous", *further("a plug-in", "a worker of a loop")])
def test_a_child_does_not_wait_for_a_call_that_a_thread_of_its_parent_was_in(root: str, name: str) -> None:
    reader = ENDLESS[name](root)
    waiting = in_a_thread(reader.sample)
    lock = reader._turns_of_threads.lock

    def is_in_the_call() -> bool:
        if free := lock.acquire(blocking=False):
            lock.release()
        return not free

    until(is_in_the_call)

    def child() -> None:
        for call in (reader.sample, lambda: reader.sample(3), reader.state_dict):
            with pytest.raises(RlioError):
                call()
        reader.close()

    assert wait_for(fork(child)) == 0
    reader.close()
    assert isinstance(waiting.result(), ClosedError)


def test_a_reader_that_was_called_is_copied_and_pickled() -> None:
    reader = Numbers()
    reader.sample()
    for other in (copy.copy(reader), copy.deepcopy(reader), pickle.loads(pickle.dumps(reader))):
        assert other.sample()["t"].tolist() == [2]
    assert reader.sample()["t"].tolist() == [2]


class Numbers(InputReader):
    number = 0

    def _next(self) -> rlio.SampleBatch:
        self.number += 1
        return rlio.SampleBatch(t=[self.number])


# ---- what is said ----


def test_each_docstring_says_what_threads_may_do() -> None:
    kinds = (InputReader, rlio.OutputWriter, Runner, ReplayStore)
    known = [getattr(rlio, name) for name in rlio.__all__]
    known += [rlio.torch.Prefetch, rlio.torch.ReplayLoader, rlio.torch.ReplayDataset]
    known += [UniformSampler, PrioritisedSampler, EpochReader, ExternalRunner]
    known += [rlio.serving.PolicyServerInput, rlio.distributed.WorkerGroup]
    silent = [
        each.__name__
        for each in known
        if isinstance(each, type)
        and (issubclass(each, kinds) or re.match(r"rlio\.(recording|torch)\b", each.__module__))
        and not re.search("threads may|One thread at a time|Threads: ", each.__doc__ or "")
    ]
    assert not silent
