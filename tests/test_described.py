"""`repr` of readers, writers, data sets, stores, samplers and workers says what they hold, in one line."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch.utils.data

import rlio
import rlio.torch
from rlio.support.described import Described

SECRET = "hunter2-is-secret"

# The process that runs these tests calls the hook until it ends, so one process does.
pytestmark = pytest.mark.xdist_group("described")

IO = ("open", "os", "socket", "subprocess", "shutil", "mmap")
_seen: list[str] = []
#: The thread whose I/O is noted: readers read ahead in others.
_watched: int | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is not None and _watched == threading.get_ident() and event.split(".")[0] in IO:
        _seen.append(f"{event} {arguments}")


@cache
def _listen() -> None:
    """Nothing takes a hook away again."""
    sys.addaudithook(_audit)


def checked(thing: object) -> str:
    """Its `repr`, which is short, one line and does no I/O."""
    global _watched
    _listen()
    _seen.clear()
    _watched = threading.get_ident()
    try:
        text = repr(thing)
    finally:
        _watched = None
    assert not _seen, f"{type(thing).__name__}.__repr__ did I/O: {_seen}"
    assert "\n" not in text
    assert len(text) <= 200, text
    assert text.startswith(type(thing).__name__ + "(")
    assert text.endswith(")")
    assert SECRET not in text
    return text


def rows(n: int = 100) -> rlio.SampleBatch:
    return rlio.SampleBatch(
        obs=np.zeros((n, 2), np.float32),
        actions=np.zeros(n, np.int64),
        rewards=np.ones(n, np.float32),
        terminateds=np.arange(n) % 10 == 9,
        truncateds=np.zeros(n, bool),
        new_obs=np.zeros((n, 2), np.float32),
        eps_id=np.arange(n) // 10,
        t=np.arange(n) % 10,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("described")
    with rlio.ParquetWriter(folder / "data") as writer:
        writer.write(rows())
    lines = '{"type": "SampleBatch", "obs": [[1.0], [2.0]], "rewards": [1.0, 2.0]}\n'
    (folder / "lines.json").write_text(lines * 3)
    return str(folder / "data")


def reader(root: str) -> rlio.DatasetReader:
    return rlio.DatasetReader(root, batch_size=8, shuffle=True, seed=3)


def store(root: str) -> rlio.ReplayStore:
    return rlio.ReplayStore.open(root)


Make = Callable[[str], Any]
#: What is made, and what its `repr` says.
THINGS: list[tuple[Make, list[str]]] = [
    (reader, ["data", "at 0 of epoch 0", "batch_size=8", "shuffle=True", "seed=3"]),
    (lambda root: rlio.FollowReader(root, idle_timeout=0), ["FollowReader", "data", "0 rows"]),
    (lambda root: rlio.DatasetReader(root, columns=["obs"]), ["data", "columns=['obs']"]),
    (lambda root: rlio.JsonReader(f"{root}/../lines.json", epochs=2), ["lines.json", "epoch 0", "epochs=2"]),
    (lambda root: rlio.MixedInput([(reader(root), 3)], batch_size=4), ["3 x DatasetReader(", "batch_size=4"]),
    (lambda root: rlio.ShuffledInput(reader(root), 4, seed=1), ["DatasetReader(", "n=4", "seed=1"]),
    (lambda root: rlio.MappedInput(reader(root), rows), ["DatasetReader(", "rows"]),
    (lambda root: rlio.AsyncInput(reader(root)), ["DatasetReader("]),
    (lambda root: rlio.RecordingInput(reader(root), rlio.NoopOutput()), ["DatasetReader(", "NoopOutput("]),
    (lambda root: rlio.FollowingReplay(root, capacity=50), ["data", "0 rows inserted", "capacity=50"]),
    (lambda root: rlio.ReplayStore(capacity=9), ["capacity=9"]),
    (store, ["data", "100 rows", "8 columns"]),
    (lambda root: store(root).uniform(batch_size=4, seed=2), ["data", "batch_size=4", "seed=2", "0 drawn"]),
    (lambda root: store(root).epochs(batch_size=4), ["data", "at 0 of epoch 0", "batch_size=4"]),
    (lambda root: store(root).prioritised(alpha=0.5), ["data", "batch_size=256", "alpha=0.5"]),
    (lambda root: store(root).uniform(draw=rlio.Sequences(3)), ["sequences"]),
    (rlio.open_dataset, ["data", "100 rows", "1 shard,", "1 writer)"]),
    (lambda root: rlio.open_dataset(root, at=rlio.open_dataset(root).snapshot()), ["a snapshot"]),
    (lambda root: rlio.ParquetWriter(f"{root}2"), ["data2", "0 rows received", "writer_id="]),
    (lambda root: rlio.JsonWriter(f"{root}3"), ["data3", "0 rows received"]),
    (lambda root: rlio.TeeWriter(rlio.NoopOutput(), rlio.NoopOutput()), ["NoopOutput("]),
    (lambda root: rlio.PacedWriter(rlio.ParquetWriter(f"{root}4")), ["0 waits", "ParquetWriter(", "data4"]),
    (lambda root: rlio.torch.ReplayDataset(root, batch_size=4), ["data", "batch_size=4", "world=1"]),
    (lambda root: rlio.torch.ReplayDataset(root, batch_size=4).loader(), ["num_workers=0", "ReplayDataset("]),
    (lambda root: rlio.torch.prefetch(reader(root)), ["DatasetReader("]),
    (lambda root: rlio.EnvRunner("CartPole-v1", rlio.RandomPolicy()), ["CartPole-v1", "0 env steps"]),
    (
        lambda root: rlio.SamplerInput(rlio.EnvRunner("CartPole-v1", rlio.RandomPolicy())),
        ["EnvRunner(", "CartPole-v1"],
    ),
    (
        lambda root: rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), output=f"{root}5"),
        ["CartPole-v1", "default_policy", "ParquetWriter(", "data5"],
    ),
]


@pytest.mark.parametrize("number", range(len(THINGS)))
def test_repr_says_what_it_holds_while_open_and_when_closed(root: str, number: int) -> None:
    make, parts = THINGS[number]
    thing = make(root)
    text = checked(thing)
    for part in parts:
        assert part in text, text
    for method in ("close", "stop"):
        if hasattr(thing, method):
            getattr(thing, method)()
            assert checked(thing).endswith("closed)") or method == "stop"


def described_classes(base: type = Described) -> Iterator[type]:
    for each in base.__subclasses__():
        yield each
        yield from described_classes(each)


def test_repr_of_what_is_half_made_never_raises() -> None:
    import rlio.distributed.group.worker_group
    import rlio.serving

    found = {each for each in described_classes() if each.__module__.startswith("rlio.")}
    assert len(found) > 30
    for each in found:
        if not getattr(each, "__abstractmethods__", None):
            checked(each.__new__(each))
    readers_and_writers = (rlio.InputReader, rlio.OutputWriter, torch.utils.data.IterableDataset)
    public = [getattr(rlio, name) for name in rlio.__all__]
    for each in public:
        if isinstance(each, type) and issubclass(each, readers_and_writers):
            assert issubclass(each, Described)


def test_repr_is_cut_after_many_parts_and_shows_the_position_that_was_reached(root: str) -> None:
    source = reader(root)
    source.sample()
    assert "at 8 of epoch 0" in checked(source)
    for _ in range(6):
        source = rlio.ShuffledInput(source, 2, seed=0)  # type: ignore[assignment]
    assert "..." in checked(source)
    with rlio.ReplayStore(capacity=10) as ring:
        ring.append(rows(4))
        assert "4 rows" in checked(ring)
    with rlio.NoopOutput() as output:
        output.write(rows(7))
        assert "7 rows received" in checked(output)
    checked(rlio.DatasetReader(root, columns=["obs", "actions", "rewards"] * 30))


def test_no_password_of_an_address_or_of_storage_options_is_shown() -> None:
    address = f"memory://user:{SECRET}@described-secrets"
    with rlio.ParquetWriter(address, storage_options={"skip_instance_cache": True}) as writer:
        writer.write(rows())
        checked(writer)
    options = {"skip_instance_cache": True, "token": SECRET}
    for thing in (
        rlio.DatasetReader(address, storage_options=options),
        rlio.open_dataset(address, storage_options=options),
        rlio.ReplayStore.open(address, storage_options=options),
        rlio.torch.ReplayDataset(address, batch_size=4, storage_options=options),
        rlio.read({address: 1.0}, storage_options=options),
    ):
        assert "described-secrets" in checked(thing)
