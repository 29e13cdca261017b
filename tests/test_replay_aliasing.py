"""A batch in a user's hands never changes: whatever is drawn later, in whichever thread or process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from counter_env import decode, episode
from counter_world import World, record_world
from counting import Keeping
from crash_child import fork, wait_for
from further import first, further

import rlio
from rlio import DatasetReader, RecordingInput, ReplayStore, SampleBatch, ShuffledInput
from rlio.batch import Batch
from rlio.errors import ClosedError, EndOfData
from rlio.reader import InputReader
from rlio.replay import build as building


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    folder = tmp_path_factory.mktemp("worlds")
    return {kind: record_world(folder / kind, kind=kind, episodes=12) for kind in ("vector", "stack")}


def reading(cache: Any = "memory", **options: Any) -> Callable[[World], InputReader]:
    return lambda world: DatasetReader(world.root, cache=cache, shuffle=True, seed=0, epochs=2, **options)


class Some(InputReader):
    """As many batches of another reader."""

    def __init__(self, child: InputReader, batches: int) -> None:
        self.child, self.left = child, batches

    def _next(self) -> Batch:
        if not self.left:
            raise EndOfData("enough")
        self.left -= 1
        return self.child.sample()


READERS: dict[str, Callable[[World], InputReader]] = {
    "memory": reading(batch_size=64),
    "disk": reading("disk", batch_size=300),
    "cold": reading("none", batch_size=64),
    "n-step": reading(batch_size=100, draw=rlio.NStep(3)),
    "sequences": reading(batch_size=20, draw=rlio.Sequences(5, burn_in=2)),
    "episodes": reading(batch_size=5, draw=rlio.WholeEpisodes()),
    "views": reading(batch_size=64, views=True),
    "uniform": lambda world: Some(ReplayStore.open(world.root).uniform(batch_size=128, seed=0), 100),
    "prioritised": lambda world: Some(ReplayStore.open(world.root).prioritised(batch_size=128, seed=0), 100),
}


def arrays(batch: Batch) -> dict[str, np.ndarray]:
    assert isinstance(batch, SampleBatch)
    return {name: np.asarray(values) for name, values in batch.items()}


@pytest.mark.few(2)
@pytest.mark.parametrize("wrapped", ["plain", "shuffled", "recorded"])
@pytest.mark.parametrize("kind", ["vector", "stack"])
@pytest.mark.parametrize("name", READERS)
@pytest.mark.each_value_once
def test_what_was_given_never_changes(worlds: dict[str, World], name: str, kind: str, wrapped: str) -> None:
    """All batches are kept until the end; some only as a slice, a tensor or one column, the rest dropped."""
    reader = READERS[name](worlds[kind])
    kept: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = []
    writer = _ByReference()
    if wrapped == "shuffled":
        reader = ShuffledInput(reader, 7, seed=1)
    elif wrapped == "recorded":
        reader = RecordingInput(reader, writer)
    for number, batch in enumerate(reader):
        found = arrays(batch)
        match number % 5:
            case 0:
                held = found
            case 1:
                held = {"obs": found["obs"][3:5]}
            case 2:
                held = {key: torch.as_tensor(found[key])[1:] for key in ("obs", "rewards")} if (
                    found["obs"].flags.writeable) else {"obs": found["obs"][::2]}  # fmt: skip
            case 3:
                held = {"new_obs": memoryview(found["new_obs"])}
            case _:
                held = {}
        kept.append((held, {key: np.asarray(values).copy() for key, values in held.items()}))
        del batch, found, held
    assert len(kept) > 10
    for held, expected in kept:
        for key, values in held.items():
            np.testing.assert_array_equal(np.asarray(values), expected[key])
    for batch, copy in writer.batches:
        assert batch.equals(copy)
    reader.close()


class _ByReference(Keeping):
    """A writer that keeps what it was given, not copies, and copies to compare with."""

    def _write(self, batch: Batch) -> None:
        self.batches.append((batch, batch.copy()))  # type: ignore[arg-type]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", first(3, (name for name in READERS if name != "views")))
def test_writing_into_a_batch_changes_no_other_and_not_the_store(worlds: dict[str, World], name: str) -> None:
    world = worlds["vector"]
    reader = READERS[name](world)
    kept = []
    for number, batch in enumerate(reader):
        found = arrays(batch)
        for values in found.values():
            if values.dtype != object:
                values[...] = number % 2
        kept.append((number, found))
    for number, found in kept:
        for values in found.values():
            assert (values == number % 2).all()
    for _, batch in zip(range(5), READERS["memory"](world), strict=False):
        world.check(batch)  # type: ignore[arg-type]


# ---- threads ----


def test_threads_draw_while_another_appends() -> None:
    """Each row of a draw is one that was appended, whole; windows stay in their episode."""
    store = ReplayStore(capacity=700)
    store.append(episode(0, 0, 50))
    over, failures = threading.Event(), []
    drawn = [0] * 4

    def draw(number: int) -> None:
        options: dict[str, Any] = [
            {},
            {"draw": rlio.NStep(3, gamma=1.0)},
            {"draw": rlio.NStep(2, gamma=1.0)},
            {},
        ][number]
        sampler = store.uniform(batch_size=[64, 32, 7, 300][number], seed=number, **options)
        steps = options["draw"].n if options else 1
        kept: list[tuple[SampleBatch, SampleBatch]] = []
        try:
            while not over.is_set():
                batch = sampler.sample()
                assert isinstance(batch, SampleBatch)
                here, there = decode(batch["obs"]), decode(batch["new_obs"])
                np.testing.assert_array_equal(here[:, :2], there[:, :2])
                ahead = there[:, 2] - here[:, 2]
                assert ((ahead >= 1) & (ahead <= steps)).all()
                total = sum((here[:, 2] + 1 + k) * (k < ahead) for k in range(steps))
                np.testing.assert_array_equal(batch["rewards"], total)
                np.testing.assert_array_equal(batch["eps_id"], here[:, 1])
                drawn[number] += len(batch)
                if len(kept) < 20:
                    kept.append((batch, batch.copy()))
            assert all(batch.equals(copy) for batch, copy in kept)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=draw, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for number in range(1, 40):
        for start in range(0, 50, 10):
            store.append(episode(0, number, 50, start=start, stop=start + 10))
    while min(drawn) < 1000 and not failures:
        store.append(episode(0, 0, 50))
    over.set()
    for thread in threads:
        thread.join()
    assert not failures, failures


# ---- forks ----

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@pytest.mark.further
@forks
@pytest.mark.parametrize("live", [True, *further(False)])
@pytest.mark.parametrize("children", [4, *further(25)])
def test_children_draw_on_while_the_parents_threads_draw_and_append(
    worlds: dict[str, World], live: bool, children: int
) -> None:
    world = worlds["vector"]
    store = ReplayStore(capacity=500) if live else ReplayStore.open(world.root, cache="disk")
    if live:
        store.append(episode(0, 0, 50))
    over = threading.Event()

    def draw() -> None:
        sampler = store.uniform(batch_size=1000, seed=1)
        while not over.is_set():
            sampler.sample()

    def append() -> None:
        while not over.is_set():
            store.append(episode(0, 0, 50))

    mine = store.uniform(batch_size=200, seed=0, indexes=live)

    def child() -> None:
        for sampler in (mine, store.uniform(batch_size=64, seed=5)):
            for _ in range(20):
                batch = sampler.sample()
                assert isinstance(batch, SampleBatch)
                if live:
                    here, there = decode(batch["obs"]), decode(batch["new_obs"])
                    np.testing.assert_array_equal(here + np.array([0, 0, 1]), there)
                    if "batch_indexes" in batch:
                        np.testing.assert_array_equal(batch["batch_indexes"] % 50, here[:, 2])
                else:
                    world.check(batch)
        if live:
            store.append(episode(0, 0, 50))

    threads = [threading.Thread(target=draw), *([threading.Thread(target=append)] if live else [])]
    for thread in threads:
        thread.start()
    try:
        for _ in range(children):
            mine.sample()
            assert wait_for(fork(child), seconds=30) == 0
    finally:
        over.set()
        for thread in threads:
            thread.join()


@forks
def test_a_child_of_a_process_that_was_still_building_says_so(
    worlds: dict[str, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that builds is the parent's: the child would take the store for an empty one."""
    go_on, plain = threading.Event(), building.batches_of

    def slowly(*args: Any) -> Any:
        go_on.wait()
        yield from plain(*args)

    monkeypatch.setattr(building, "batches_of", slowly)
    store = ReplayStore.open(worlds["vector"].root, wait=False)

    def child() -> None:
        for _ in range(2):
            with pytest.raises(ClosedError, match="forked"):
                store.uniform(batch_size=5).sample()
        store.close()

    try:
        assert wait_for(fork(child), seconds=20) == 0
    finally:
        go_on.set()
    worlds["vector"].check(store.uniform(batch_size=5).sample())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> World:
    """More rows than are gathered at once."""
    return record_world(tmp_path_factory.mktemp("large"), episodes=40)


def keys_of(batches: Any) -> list[Any]:
    return [decode(batch["obs"]).tolist() for batch in batches]


@pytest.mark.further
def test_a_state_of_another_seed_is_gone_on_from_whatever_was_gathered_ahead(large: World) -> None:
    options: dict[str, Any] = {"shuffle": True, "batch_size": 64, "cache": "memory"}
    with (
        DatasetReader(large.root, seed=5, **options) as other,
        DatasetReader(large.root, **options) as reader,
    ):
        for _ in range(64):  # As many as are gathered at once: the next ones are on their way.
            other.sample()
        reader.sample()
        reader.load_state_dict(other.state_dict())
        for _ in range(200):
            assert keys_of([reader.sample()]) == keys_of([other.sample()])
