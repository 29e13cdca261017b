"""After a fork an owner of a thread goes on in the child, or raises: the thread exists in the parent only."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from counter_env import episode
from crash_child import fork, wait_for
from further import further
from stored_batches import group_bytes, numbered, store
from threads import in_a_thread

import rlio
import rlio.torch
from rlio import (
    DatasetReader,
    FollowReader,
    JsonWriter,
    MixedInput,
    PacedWriter,
    ParquetWriter,
    ReplayStore,
    Roll,
    ShuffledInput,
    TeeWriter,
)
from rlio.errors import ClosedError, EndOfData, PublishError, RlioError
from rlio.reader import InputReader
from rlio.readers.async_input import AsyncInput
from rlio.sampling.external_runner import ExternalRunner
from rlio.storage.open_files import OpenFiles
from rlio.support.forks import ReadAhead, cached_property
from rlio.writer import OutputWriter

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

#: Seconds that a child may take, also on a busy machine: it has nothing to do that takes one.
DEADLINE = 60.0
ROWS = 61


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """61 rows in many row groups."""
    root = str(tmp_path_factory.mktemp("data") / "set")
    with group_bytes(100):
        return store(numbered(ROWS), root=root, roll=Roll(max_rows=13, max_seconds=None))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLIO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def in_a_child(*acts: Callable[[], object]) -> None:
    """One after the other, in one child."""

    def act() -> None:
        for each in acts:
            each()

    assert wait_for(fork(act), seconds=DEADLINE) == 0


@contextmanager
def held(lock: Any) -> Iterator[None]:
    """A lock, held by another thread: a child will never see it given back."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def rest_of(reader: InputReader, batches: int = 24) -> list[list[int]]:
    """Some more batches, fewer at the end of the data."""
    found = []
    for _ in range(batches):
        try:
            found.append(reader.sample()["t"].tolist())  # type: ignore[index]
        except EndOfData:
            break
    return found


SHUFFLED: dict[str, Any] = {"shuffle": True, "seed": 3}
#: Readers that go on in the child where the parent was.
GOES_ON: dict[str, Callable[[str], InputReader]] = {
    "cold": lambda root: DatasetReader(root, batch_size=3, cache="none"),
    "cold, shuffled": lambda root: DatasetReader(root, batch_size=3, cache="none", **SHUFFLED),
    "cold, filtered": lambda root: DatasetReader(
        root, batch_size=3, cache="none", filter="t > 2", **SHUFFLED
    ),
    "following": lambda root: FollowReader(root, batch_size=3),
    "in memory": lambda root: DatasetReader(root, batch_size=3, cache="memory", **SHUFFLED),
    "on disk": lambda root: DatasetReader(root, batch_size=3, cache="disk", **SHUFFLED),
    "a mixture": lambda root: MixedInput(
        [(DatasetReader(root, batch_size=3, cache="none"), 1), (DatasetReader(root, cache="memory"), 2)],
        batch_size=4,
    ),
    "a shuffle": lambda root: ShuffledInput(DatasetReader(root, batch_size=3, cache="none"), 4, seed=0),
    "draws": lambda root: ReplayStore.open(root).uniform(batch_size=3, seed=0),
    "draws by priority": lambda root: ReplayStore.open(root).prioritised(batch_size=3, seed=0),
}


#: `make test` runs one with a thread that decodes ahead, and one with a lock of its store.
FIRST = ("on disk", "draws by priority")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*FIRST, *further(*(name for name in GOES_ON if name not in FIRST))])
def test_a_reader_goes_on_in_a_forked_child(root: str, name: str) -> None:
    """The executor of one that decodes ahead was that of the parent: the child waited for ever."""
    with GOES_ON[name](root) as reader:
        for _ in range(2):
            reader.sample()
        expected: list[Any] = []
        with GOES_ON[name](root) as other:
            for _ in range(2):
                other.sample()
            expected = rest_of(other)

        def act() -> None:
            assert rest_of(reader) == expected
            reader.state_dict()
            reader.close()

        in_a_child(act)
        assert rest_of(reader) == expected
        in_a_child(reader.close)
        in_a_child(lambda: reader.load_state_dict(GOES_ON[name](root).state_dict()))


def test_a_child_opens_the_files_anew_that_a_thread_of_its_parent_reads() -> None:
    """The thread has the lock of the open file: a child that read, closed or freed it waited for ever."""
    reads, done = threading.Event(), threading.Event()

    class Slow(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            reads.set()
            done.wait()
            return 0

    files: OpenFiles[int, io.BufferedIOBase] = OpenFiles(1, close=lambda file: file.close())
    thread = threading.Thread(target=files.add(0, io.BufferedReader(Slow())).read, daemon=True)
    thread.start()
    reads.wait()
    try:

        def act() -> None:
            assert files.peek(0) is None
            assert files.get(0) is None
            assert list(files) == []
            assert files.add(1, io.BytesIO(b"anew")).read() == b"anew"
            files.drop(0)
            files.close()
            gc.collect()

        in_a_child(act, files.close)
        assert files.get(0) is not None
    finally:
        done.set()
        thread.join()


def test_a_child_calculates_a_property_that_a_thread_of_its_parent_is_calculating() -> None:
    """Before Python 3.12 the lock of `functools.cached_property` is one for all instances of a class."""
    taken, done = threading.Event(), threading.Event()

    class Shard:
        def __init__(self, *, slow: bool) -> None:
            self._slow = slow

        @cached_property
        def rows(self) -> int:
            if self._slow:
                taken.set()
                done.wait()
            return 3

    thread = threading.Thread(target=lambda: Shard(slow=True).rows, daemon=True)
    thread.start()
    taken.wait()
    try:
        shard = Shard(slow=False)

        def act() -> None:
            assert shard.rows == 3

        in_a_child(act)
    finally:
        done.set()
        thread.join()


def test_what_reads_ahead_goes_on_after_an_error_and_a_halt_but_not_after_an_interrupt() -> None:
    made = iter(range(100))
    fails = {3}

    def make() -> int:
        if 3 in fails and len(asked) == 3:
            fails.remove(3)
            raise ValueError("once")
        asked.append(next(made))
        return asked[-1]

    asked: list[int] = []
    ahead = ReadAhead(make, 2, name="rlio-test")
    assert [ahead.get() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="once"):
        ahead.get()
    assert not ahead.is_running
    assert ahead.get() == 3
    left = ahead.halt()
    assert left == list(range(4, asked[-1] + 1))
    assert len(left) <= 3
    following = asked[-1] + 1
    assert ahead.get() == following
    ahead.interrupt()
    assert ahead.halt() == list(range(following + 1, asked[-1] + 1))
    ahead.start()
    with pytest.raises(ClosedError):
        ahead.get()
    assert not [thread for thread in threading.enumerate() if thread.name == "rlio-test"]


def test_a_child_that_is_forked_while_a_thread_starts_knows_that_it_is_its_parents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a child waited for ever: the lock under which the thread starts was never released there."""
    starting, go_on, start = threading.Event(), threading.Event(), threading.Thread.start

    def slowly(self: threading.Thread) -> None:
        if self.name == "rlio-test":
            starting.set()
            go_on.wait(60)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", slowly)
    ahead = ReadAhead(lambda: 1, 2, name="rlio-test")
    first = in_a_thread(ahead.get)
    assert starting.wait(60)

    def act() -> None:
        refused(ahead.get)
        ahead.interrupt()
        assert ahead.halt() == []

    in_a_child(act)
    go_on.set()
    assert first.result() == 1
    ahead.halt()


def always(root: str) -> InputReader:
    return DatasetReader(root, batch_size=3)


@pytest.mark.further
def test_an_async_input_says_that_its_thread_is_the_parents(root: str) -> None:
    with AsyncInput(always(root), queue_size=1) as reader:
        reader.sample()
        state = reader.state_dict()
        for lock in (threading.Lock(), reader._ahead._queue.changed, reader.lock):
            with held(lock):
                in_a_child(
                    lambda: refused(reader.sample),
                    lambda: refused(lambda: reader.sample(5)),
                    lambda: refused(reader.state_dict),
                    lambda: refused(lambda: reader.load_state_dict(state)),
                    reader.interrupt,
                )
                in_a_child(reader.close)
        assert len(reader.sample()) == 3  # The parent's goes on.
    early = AsyncInput(always(root))
    in_a_child(early.sample)  # There was no thread yet.
    early.close()


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(RlioError):
        call()


def test_a_prefetch_says_that_its_thread_is_the_parents(root: str) -> None:
    with rlio.torch.prefetch(always(root)) as batches:
        next(batches)
        state = batches.state_dict()
        for lock in (threading.Lock(), batches._ahead._queue.changed):
            with held(lock):
                in_a_child(
                    lambda: refused(lambda: next(batches)),
                    lambda: refused(lambda: batches.load_state_dict(state)),
                    batches.state_dict,
                )
                in_a_child(batches.close)
        assert len(next(batches)["t"]) == 3
    early = rlio.torch.prefetch(always(root))
    in_a_child(lambda: next(early))
    early.close()


@pytest.mark.further
def test_a_replay_that_follows_says_that_its_thread_is_the_parents(root: str) -> None:
    with rlio.FollowingReplay(root, capacity=50, batch_size=3) as replay:
        replay.sample()
        state = replay.state_dict()
        for lock in (threading.Lock(), replay._feed.changed):
            with held(lock):
                in_a_child(
                    lambda: refused(replay.sample),
                    lambda: refused(replay.state_dict),
                    lambda: refused(lambda: replay.counters),
                    lambda: refused(lambda: replay.load_state_dict(state)),
                    replay.interrupt,
                )
                in_a_child(replay.close)
        replay.sample()


class Loop(rlio.ExternalEnv):
    """An environment that has the loop itself, and never ends."""

    def __init__(self) -> None:
        super().__init__(gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2))

    def run(self) -> None:
        while True:
            episode_id = self.start_episode()
            for _ in range(5):
                self.get_action(episode_id, np.zeros(2, np.float32))
                self.log_returns(episode_id, 1.0)
            self.end_episode(episode_id, np.zeros(2, np.float32))


@pytest.mark.further
def test_a_runner_of_a_loop_elsewhere_says_that_it_is_the_parents() -> None:
    runner = ExternalRunner(
        Loop(), rlio.RandomPolicy(), config=rlio.RolloutConfig(rollout_fragment_length=5), seed=0
    )
    runner.run()
    for lock in (threading.Lock(), runner.episodes.changed):
        with held(lock):
            in_a_child(lambda: refused(runner.run), lambda: refused(runner.sample), runner.interrupt)
            in_a_child(runner.stop)
    runner.run()
    runner.stop()


@pytest.mark.further
def test_a_policy_server_says_that_it_is_the_parents() -> None:
    spaces = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    with rlio.serving.PolicyServerInput(rlio.RandomPolicy(), spaces=spaces, idle_timeout=60) as server:
        for lock in (threading.Lock(), server.runner.episodes.changed):
            with held(lock):
                in_a_child(lambda: refused(server.sample), server.interrupt)
                in_a_child(server.close)
        client = rlio.serving.PolicyClient(server.url, token=server.token)
        client.start_episode()  # The parent's goes on.
        client.close()


def test_environments_in_processes_are_the_parents() -> None:
    """A child that closed its copy of the worker ended them."""
    config = rlio.RolloutConfig(num_envs=2, vectorize_mode="async", rollout_fragment_length=4)
    with rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), rollout=config, seed=0) as worker:
        worker.sample()
        in_a_child(lambda: refused(worker.sample))
        in_a_child(worker.close)
        with rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), rollout=config, seed=0) as other:
            other.sample()
            expected = other.sample()
        np.testing.assert_array_equal(worker.sample()["obs"], expected["obs"])  # The parent's go on.


WRITERS: dict[str, Callable[[str], OutputWriter]] = {
    "parquet": lambda root: ParquetWriter(root),
    "parquet, no log": lambda root: ParquetWriter(root, spool=None),
    "json": lambda root: JsonWriter(root),
    "json, no log": lambda root: JsonWriter(root, spool=None),
    "tee": lambda root: TeeWriter(ParquetWriter(root), JsonWriter(f"{root}-json")),
    "paced": lambda root: PacedWriter(ParquetWriter(root), pace=rlio.Pace(stale_seconds=0)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", ["parquet", "paced", *further(*sorted(WRITERS.keys() - {"parquet", "paced"}))]
)
def test_a_writer_says_that_it_is_the_parents(tmp_path: Path, name: str) -> None:
    root = str(tmp_path / "set")
    with WRITERS[name](root) as writer:
        writer.write(numbered(5))
        locks = [threading.Lock(), writer._lock]
        if isinstance(writer, PacedWriter):
            locks.append(writer._turn)
        for lock in locks:
            with held(lock):
                in_a_child(
                    lambda: refused_to_write(lambda: writer.write(numbered(3))),
                    lambda: refused_to_write(writer.flush),
                    lambda: refused_to_write(writer.close),
                )
        writer.write(numbered(5, 5))
    assert len(rlio.open_dataset(root)) == 10


def refused_to_write(call: Callable[[], object]) -> None:
    with pytest.raises(PublishError):
        call()


def test_a_recorder_says_that_it_is_the_parents(tmp_path: Path) -> None:
    """Steps of a child were in no data set, without a word."""
    root = tmp_path / "set"
    with rlio.RecordExperience(gym.make("CartPole-v1"), root) as env:
        env.reset(seed=0)
        env.step(0)
        in_a_child(lambda: refused_to_write(lambda: env.step(1)))
        in_a_child(lambda: refused_to_write(env.close))
        env.step(1)
    vector = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    with contextlib.closing(rlio.RecordVectorExperience(vector, root)) as envs:
        envs.reset(seed=1)
        envs.step(np.zeros(2, np.int64))
        in_a_child(lambda: refused_to_write(lambda: envs.step(np.zeros(2, np.int64))))
    assert len(rlio.open_dataset(root)) == 4


def test_a_store_that_is_being_built_says_that_its_builder_is_the_parents(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    build = ReplayStore._build

    def slow(self: ReplayStore, *args: Any) -> None:
        go_on.wait()
        build(self, *args)

    monkeypatch.setattr(ReplayStore, "_build", slow)
    kept = ReplayStore.open(root, wait=False)
    in_a_child(lambda: refused(lambda: len(kept)))
    in_a_child(kept.close)
    go_on.set()
    assert len(kept) == ROWS
    kept.close()


def test_a_live_store_goes_on_in_a_forked_child() -> None:
    kept = ReplayStore(100)
    kept.append(episode(0, 0, 10))
    sampler = kept.uniform(batch_size=4, seed=0)
    with held(threading.Lock()):

        def act() -> None:
            kept.append(episode(0, 1, 10))
            assert len(kept) == 20
            sampler.sample()

        in_a_child(act)
    assert len(kept) == 10
