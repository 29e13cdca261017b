"""DataLoaders: no row is lost or repeated with any number of ranks and workers, stopped and resumed anywhere.

Most workers here live in this process: `WorkersHere` does what a DataLoader does with its own, in the same
order. A few tests fork and spawn.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from further import further
from stored_batches import files, fresh_root, group_bytes, numbered, put, store
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as torch_worker

import rlio.torch
from rlio import DatasetReader, MultiAgentBatch, Roll, SampleBatch
from rlio.batch import Batch
from rlio.errors import ClosedError, CorruptData, EndOfData, MissingExtra, OptionError, StateError
from rlio.reader import InputReader, JsonState
from rlio.storage.filesystem import Storage
from rlio.testing import assert_resumes, assert_same
from rlio.torch import ReplayDataset

ROWS = 61
SHUFFLED = {"shuffle": True, "seed": 3}


@pytest.fixture(scope="module")
def root() -> str:
    """61 rows of two writers, in shards of 13 rows and row groups of 4."""
    root = fresh_root()
    for writer, (first, rows) in enumerate([(0, 40), (40, 21)]):
        with group_bytes(100):
            store(
                numbered(rows, first),
                root=root,
                roll=Roll(max_rows=13, max_seconds=None),
                writer_id=f"w0000{writer}-00000000",
            )
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """61 rows on disk, where other processes find them."""
    folder = str(tmp_path_factory.mktemp("data") / "set")
    with group_bytes(100):
        store(numbered(ROWS), root=folder, roll=Roll(max_rows=13, max_seconds=None))
    return folder


class WorkersHere:
    """In the place of a DataLoader: its workers are copies of the data set in this process."""

    def __init__(self, dataset: Any, *, num_workers: int, generator: Any, prefetch_factor: int = 2, **_: Any):
        self.dataset = dataset
        self.workers = num_workers
        self.ahead = prefetch_factor

    def __iter__(self) -> Iterator[Any]:
        if self.workers == 0:
            return iter(self.dataset)
        return self.deliver()

    def deliver(self) -> Iterator[Any]:
        """Ask the workers in turns, so many requests ahead, and deliver in the order of the requests."""
        copies = [pickle.loads(pickle.dumps(self.dataset)) for _ in range(self.workers)]
        iterators = [self.within(number, iter, copy) for number, copy in enumerate(copies)]
        turns = deque(range(self.workers))
        answers: deque[tuple[int, Any]] = deque()

        def ask() -> None:
            if turns:
                number = turns[0]
                turns.rotate(-1)
                answer = self.within(number, next, iterators[number], None)
                answers.append((number, pickle.loads(pickle.dumps(answer))))

        for _ in range(self.ahead * self.workers):
            ask()
        while answers:
            number, answer = answers.popleft()
            if answer is None:
                if number in turns:
                    turns.remove(number)
                ask()
            else:
                ask()
                yield answer

    def within(self, number: int, call: Any, *args: Any) -> Any:
        info = torch_worker.WorkerInfo(id=number, num_workers=self.workers, seed=0, dataset=None)
        before, torch_worker._worker_info = torch_worker._worker_info, info
        try:
            return call(*args)
        finally:
            torch_worker._worker_info = before


@pytest.fixture
def workers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlio.torch, "DataLoader", WorkersHere)


def read(root: Any, **options: Any) -> list[list[int]]:
    """Row numbers of the batches that one reader gives."""
    with DatasetReader(root, **options) as reader:
        return [batch["t"].tolist() for batch in reader]  # type: ignore[call-overload]  # One policy.


def delivered(loader: Any) -> list[list[int]]:
    return [batch["t"].tolist() for batch in loader]


def flat(parts: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


class Ranks:
    """The loaders of all ranks, which take their batches together, as ranks do."""

    def __init__(self, root: Any, world: int, workers: int, **options: Any) -> None:
        self.loaders = [
            ReplayDataset(root, rank=rank, world=world, **options).loader(num_workers=workers)
            for rank in range(world)
        ]

    def step(self) -> list[int] | None:
        """The row numbers of the next global step; None at the end."""
        batches = [next(loader, None) for loader in self.loaders]
        found = [batch["t"].tolist() for batch in batches if batch is not None]
        return flat(found) if found else None

    def state(self) -> JsonState:
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states), "states are equal after equal calls"
        return json.loads(json.dumps(states[0]))  # type: ignore[no-any-return]

    def load(self, state: JsonState) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state)

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


@pytest.mark.usefixtures("workers_here")
class TestElastic:
    @pytest.mark.few(1)
    @pytest.mark.parametrize("workers", [0, 1, *further(2, 4)])
    @pytest.mark.parametrize("world", [1, 2, *further(3, 8)])
    @pytest.mark.each_value_once
    def test_stopped_anywhere_and_resumed_with_others_each_row_comes_once_and_from_a_store_in_the_same_order(
        self, root: str, world: int, workers: int
    ) -> None:
        rng = random.Random(world * 10 + workers)
        # Half of them from a store, and half decoded as they are read: the orders differ.
        options: dict[str, Any] = {"epochs": 2, "cache": "none" if workers % 2 else "memory", **SHUFFLED}
        expected = flat(read(root, batch_size=7, **options))
        found: list[int] = []
        state: JsonState | None = None
        over = False
        while not over:
            at_once = rng.randint(1, 5)
            group = Ranks(root, world, workers, batch_size=at_once, **options)
            if state is not None:
                group.load(state)
            for _ in range(rng.randint(0, 1 + 60 // (world * at_once))):
                rows = group.step()
                over = rows is None
                if rows is None:
                    break
                found += rows
            state = group.state()
            group.close()
            world, workers = rng.choice([1, 2, 3, 8]), rng.choice([0, 1, 2, 4])
        if options["cache"] == "none":  # In the order of the lanes of each epoch.
            assert sorted(found) == sorted(expected)
        else:
            assert found == expected

    @pytest.mark.few(1)
    @pytest.mark.parametrize("workers", [1, 2, 3, *further(20)])
    @pytest.mark.parametrize(
        "options", [{}, SHUFFLED, {"drop_last": True}, {**SHUFFLED, "epochs": 3}], ids=str
    )
    @pytest.mark.each_value_once
    def test_a_loader_gives_the_batches_of_a_reader(
        self, root: str, workers: int, options: dict[str, Any]
    ) -> None:
        options = {"epochs": 1, "batch_size": 4, **options}
        with ReplayDataset(root, **options).loader(num_workers=workers) as loader:
            assert delivered(loader) == read(root, **options)
            assert delivered(loader) == []

    @pytest.mark.few(1)
    @pytest.mark.parametrize(
        "options",
        [
            {"cache": "disk", "draw": rlio.NStep(3, gamma=0.9), "shuffle": True, "seed": 1},
            {"cache": "memory", "draw": rlio.Sequences(4, burn_in=1), "shuffle": True, "seed": 1},
            {"cache": "memory", "filter": "t > 20", "shuffle": True, "seed": 1},
            {"cache": "none", "columns": ["t"]},
        ],
        ids=["n-step", "sequences", "filter", "columns"],
    )
    def test_so_it_does_with_every_option_of_a_reader(
        self, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RLIO_CACHE", str(tmp_path / "cache"))
        t = np.arange(60)
        root = store(numbered(60, eps_id=t // 12, rewards=t / 7, terminateds=t % 12 == 11))
        options = {"batch_size": 7, "epochs": 1, **options}
        with DatasetReader(root, **options) as reader:
            expected = list(reader)
        assert len(expected) > 2
        dataset = ReplayDataset(root, transform=as_it_is, **options)
        with dataset.loader(num_workers=2) as loader:
            found = [next(loader)]
            state = loader.state_dict()
        with dataset.loader(num_workers=3) as loader:
            loader.load_state_dict(state)
            found += list(loader)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)

    def test_it_is_endless_without_epochs(self, root: str) -> None:
        dataset = ReplayDataset(root, batch_size=10, **SHUFFLED)
        with (
            dataset.loader(num_workers=3) as loader,
            DatasetReader(root, batch_size=10, **SHUFFLED) as reader,
        ):
            for _ in range(20):
                assert next(loader)["t"].tolist() == reader.sample()["t"].tolist()
                assert loader.state_dict() == reader.state_dict()

    @pytest.mark.few(1)
    @pytest.mark.parametrize("workers", [0, 3])
    def test_sequences_and_joint_steps_come_whole(self, workers: int) -> None:
        lens = np.arange(1, 11, dtype=np.int32)
        t = np.arange(30)
        a = SampleBatch(t=t, eps_id=t * 0)
        joint = MultiAgentBatch({"a": a, "b": a[10:]}, 30)
        with group_bytes(150):
            sequences = store(numbered(55, seq_lens=lens))
            steps = store(*joint.timeslices(3))
        with ReplayDataset(sequences, batch_size=3, epochs=1).loader(num_workers=workers) as loader:
            assert [b["seq_lens"].tolist() for b in loader] == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10]]
        with ReplayDataset(steps, batch_size=7, epochs=1).loader(num_workers=workers) as loader:
            found = list(loader)
        assert flat(batch["a"]["t"].tolist() for batch in found) == t.tolist()
        assert flat(batch["b"]["t"].tolist() for batch in found if "b" in batch) == t[10:].tolist()

    @pytest.mark.few(1)
    @pytest.mark.parametrize("workers", [0, 1, 3])
    def test_damage_that_is_skipped_moves_no_batch(self, workers: int) -> None:
        with group_bytes(100):
            root = store(numbered(ROWS), roll=Roll(max_rows=13, max_seconds=None))
        path, data = list(files(root).items())[1]
        put(path, data[:100] + bytes([data[100] ^ 1]) + data[101:])
        options: dict[str, Any] = {"batch_size": 4, "epochs": 2, "on_error": "skip"}
        expected = read(root, **options)
        assert len(flat(expected)) < 2 * ROWS
        with ReplayDataset(root, **options).loader(num_workers=workers) as loader:
            assert delivered(loader) == expected

    def test_a_state_is_one_of_a_dataset_reader_and_the_other_way_round(self, root: str) -> None:
        options: dict[str, Any] = {"batch_size": 4, "epochs": 1, **SHUFFLED}
        expected = read(root, **options)
        with ReplayDataset(root, **options).loader(num_workers=2) as loader:
            for _ in range(5):
                next(loader)
            with DatasetReader(root, **options) as reader:
                reader.load_state_dict(loader.state_dict())
                assert reader.sample()["t"].tolist() == expected[5]
                loader.load_state_dict(reader.state_dict())
            assert delivered(loader) == expected[6:]

    @pytest.mark.few(1)
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_second_loop_goes_on_where_the_first_was_left(self, root: str, workers: int) -> None:
        with ReplayDataset(root, batch_size=4, epochs=1).loader(num_workers=workers) as loader:
            first = []
            for batch in loader:
                first.append(batch["t"].tolist())
                if len(first) == 3:
                    break
            assert first + delivered(loader) == read(root, batch_size=4, epochs=1)

    @pytest.mark.few(1)
    @pytest.mark.parametrize("workers", [0, 2])
    def test_after_an_error_the_batch_comes_again(self, root: str, workers: int) -> None:
        flaky = Flaky()
        with ReplayDataset(root, batch_size=4, epochs=1, transform=flaky).loader(
            num_workers=workers
        ) as loader:
            found = [next(loader) for _ in range(3)]
            with pytest.raises(ValueError, match="row 12"):
                next(loader)
            Flaky.well = True
            try:
                found += list(loader)
            finally:
                Flaky.well = False
        assert found == read(root, batch_size=4, epochs=1)

    @pytest.mark.parametrize("several", [False, True])
    def test_workers_do_not_list_what_was_listed_at_opening(
        self, root: str, several: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        roots: Any = [root, fresh_root()] if several else root
        if several:
            store(numbered(5, ROWS), root=roots[1])
        dataset = ReplayDataset(roots, batch_size=4, epochs=1, cache="none", storage_options={})
        asked: list[str] = []
        for name in ("list", "read"):
            real = getattr(Storage, name)

            def counted(self: Storage, path: str = "", *, _real: Any = real, **options: Any) -> Any:
                asked.append(path)
                return _real(self, path, **options)

            monkeypatch.setattr(Storage, name, counted)
        for _ in range(2):
            found = delivered(dataset.loader(num_workers=2))
            assert sorted(flat(found)) == list(range(ROWS + 5 * several))
        assert asked == []

    def test_a_seed_that_was_drawn_is_that_of_all_workers_and_of_the_state(self, root: str) -> None:
        dataset = ReplayDataset(root, batch_size=4, epochs=1, shuffle=True)
        with dataset.loader(num_workers=3) as loader:
            found = [next(loader)["t"].tolist() for _ in range(5)]
            state = loader.state_dict()
        with ReplayDataset(root, batch_size=4, epochs=1, shuffle=True).loader(num_workers=2) as loader:
            loader.load_state_dict(state)
            found += delivered(loader)
        assert sorted(flat(found)) == list(range(ROWS))
        with dataset.loader(num_workers=0) as loader:
            assert delivered(loader) == found

    def test_what_is_added_later_is_not_read(self) -> None:
        root = store(numbered(20), writer_id="w00001-00000000")
        dataset = ReplayDataset(root, batch_size=4, epochs=1)
        store(numbered(20, 20), root=root, writer_id="w00000-00000000")
        for workers in (0, 2):
            with dataset.loader(num_workers=workers) as loader:
                assert flat(delivered(loader)) == list(range(20))


def as_it_is(batch: Batch) -> Batch:
    """A transform that gives the batch itself."""
    return batch


class Flaky:
    """A transform that fails at row 12 until it is well."""

    well = False

    def __call__(self, batch: Any) -> list[int]:
        rows: list[int] = batch["t"].tolist()
        if 12 in rows and not Flaky.well:
            raise ValueError("row 12")
        return rows


class TestTheDataset:
    def test_options_that_cannot_be_meant_are_refused(self, root: str) -> None:
        for options, text in (
            ({"shard": (0, 2)}, "rank"),
            ({"follow": True}, "no option .follow."),
            ({"rank": 1}, "both"),
            ({"rank": 2, "world": 2}, "rank < world"),
            ({"rank": 0, "world": 2, "shuffle": True}, "seed"),
            ({"batch_size": 0}, "batch_size"),
            ({"batch_size": None}, "batch_size"),
        ):
            with pytest.raises(OptionError, match=text):
                ReplayDataset(root, **{"batch_size": 4, **options})
        dataset = ReplayDataset(root, batch_size=4)
        for options, text in (
            ({"batch_size": 3}, "no option .batch_size."),
            ({"persistent_workers": True}, "persistent_workers"),
            ({"num_workers": -1}, "num_workers"),
        ):
            with pytest.raises(OptionError, match=text):
                dataset.loader(**options)

    def test_a_dataloader_of_ones_own_gives_the_same_batches_each_time(self, root: str) -> None:
        dataset = ReplayDataset(root, batch_size=4, epochs=1, **SHUFFLED)
        expected = read(root, batch_size=4, epochs=1, **SHUFFLED)
        loader = DataLoader(dataset, batch_size=None)
        assert delivered(loader) == delivered(loader) == expected
        assert delivered(WorkersHere(dataset, num_workers=3, generator=None)) == expected

    def test_iterated_without_a_loader_its_state_counts_what_it_gave(self, root: str) -> None:
        options: dict[str, Any] = {"batch_size": 4, "epochs": 1, **SHUFFLED}
        expected = read(root, **options)
        dataset = ReplayDataset(root, **options)
        batches = iter(dataset)
        for _ in range(3):
            next(batches)
        other = ReplayDataset(root, **options)
        other.load_state_dict(dataset.state_dict())
        assert delivered(other) == expected[3:]
        assert delivered(other) == expected, "a state is for one iteration"
        with dataset.loader() as loader:
            assert delivered(loader) == expected[3:]

    def test_a_foreign_state_is_refused_at_once(self, root: str) -> None:
        dataset = ReplayDataset(root, batch_size=4, **SHUFFLED)
        loader = dataset.loader(num_workers=2)
        state = ReplayDataset(store(numbered(20)), batch_size=4, **SHUFFLED).state_dict()
        workers = {"worker": [1, 2], "state": dataset.state_dict()}
        for wrong in (state, {}, {"version": 1}, workers, {"worker": [0, 1]}, None):
            with pytest.raises(StateError):
                loader.load_state_dict(wrong)  # type: ignore[arg-type]
            with pytest.raises(StateError):
                dataset.load_state_dict(wrong)  # type: ignore[arg-type]

    def test_after_a_load_that_failed_nothing_is_delivered_until_one_succeeds(self, root: str) -> None:
        """They went on from where they had been."""
        dataset = ReplayDataset(root, batch_size=4, epochs=1, **SHUFFLED)
        expected = read(root, batch_size=4, epochs=1, **SHUFFLED)
        state = dataset.state_dict()
        loader = dataset.loader()
        batches = rlio.torch.prefetch(DatasetReader(root, batch_size=4, epochs=1, **SHUFFLED))
        next(loader)
        next(batches)
        for each in (dataset, loader, batches):
            with pytest.raises(StateError):
                each.load_state_dict({**state, "version": -1})
            with pytest.raises(StateError):
                each.state_dict()
            for _ in range(2):
                with pytest.raises(StateError):
                    next(iter(each))
            each.load_state_dict(state)
            assert delivered(each) == expected

    def test_it_travels_and_so_does_an_open_dataset(self, folder: str) -> None:
        expected = read(folder, batch_size=4, epochs=1, **SHUFFLED)
        for root in (folder, rlio.open_dataset(folder)):
            dataset = ReplayDataset(root, batch_size=4, epochs=1, **SHUFFLED)
            assert delivered(pickle.loads(pickle.dumps(dataset))) == expected

    def test_a_forgotten_init_process_group_is_told(
        self, root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        assert ReplayDataset(root, batch_size=4).world == 1
        assert "WORLD_SIZE is 4" in caplog.text


def numbers_and_process(batch: Batch) -> tuple[list[int], str]:
    """A transform that spawned workers can import; tells which of them it ran in."""
    info = torch.utils.data.get_worker_info()
    return batch["t"].tolist(), "main" if info is None else str(info.id)  # type: ignore[union-attr]


def failing(batch: Batch) -> Any:
    """A transform that fails late."""
    if 24 in batch["t"]:  # type: ignore[operator]
        raise CorruptData("this row\nis bad", uri="somewhere", record=24)
    return batch["t"].tolist()  # type: ignore[union-attr]


class CannotTravel(Exception):
    """An error that `pickle` does not bring back."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def failing_strangely(batch: Batch) -> Any:
    raise CannotTravel(1, 2)


class Deadly:
    """A transform that kills its process at row 24, once, when the file ``may_die`` is there."""

    def __init__(self, killed: Path, may_die: Path) -> None:
        self.killed, self.may_die = killed, may_die

    def __call__(self, batch: Any) -> list[int]:
        rows: list[int] = batch["t"].tolist()
        if 24 in rows and not self.killed.exists():
            self.killed.touch()
            while not self.may_die.exists():
                time.sleep(0.01)
            time.sleep(0.5)  # torch raises the error wherever the main process is: let it wait for the batch.
            os.kill(os.getpid(), signal.SIGKILL)
        return rows


class TestRealWorkers:
    @pytest.mark.parametrize("method", ["fork", *further("spawn")])
    def test_batches_come_in_order_from_all_workers_and_resume_with_others(
        self, folder: str, method: str
    ) -> None:
        options: dict[str, Any] = {"batch_size": 4, "epochs": 1, **SHUFFLED}
        dataset = ReplayDataset(folder, transform=numbers_and_process, **options)
        others = set(multiprocessing.active_children())
        with dataset.loader(num_workers=2, multiprocessing_context=method) as loader:
            found = [next(loader) for _ in range(5)]
            state = loader.state_dict()
        assert [worker for _, worker in found] == ["0", "1", "0", "1", "0"]
        with dataset.loader(num_workers=1, multiprocessing_context="fork") as loader:
            loader.load_state_dict(state)
            found += list(loader)
        assert [rows for rows, _ in found] == read(folder, **options)
        assert set(multiprocessing.active_children()) <= others

    def test_tensors_come_whole_and_this_process_s_generator_is_left_alone(self, folder: str) -> None:
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        with ReplayDataset(folder, batch_size=8, epochs=1).loader(num_workers=2) as loader:
            batches = list(loader)
        assert torch.equal(torch.rand(3), expected)
        whole = read(folder, batch_size=ROWS, epochs=1)[0]
        assert torch.cat([batch["t"] for batch in batches]).tolist() == whole

    def test_errors_of_workers_arrive_as_they_are_with_their_traceback(self, folder: str) -> None:
        dataset = ReplayDataset(folder, batch_size=8, epochs=1, transform=failing)
        others = set(multiprocessing.active_children())
        with dataset.loader(num_workers=2) as loader:
            found = [next(loader) for _ in range(3)]
            with pytest.raises(CorruptData) as caught:
                next(loader)
            assert set(multiprocessing.active_children()) <= others
            assert caught.value.record == 24
            (note,) = caught.value.__notes__
            assert "DataLoader worker 1" in note
            assert "in failing" in note
            with DatasetReader(folder, batch_size=8, epochs=1) as reader:
                reader.skip(3)
                assert loader.state_dict() == reader.state_dict()
        assert flat(found) == list(range(24))

    def test_so_do_errors_that_cannot_travel(self, folder: str) -> None:
        dataset = ReplayDataset(folder, batch_size=8, transform=failing_strangely)
        with (
            dataset.loader(num_workers=1) as loader,
            pytest.raises(RuntimeError, match="CannotTravel: 1 and 2"),
        ):
            next(loader)

    def test_a_worker_that_is_killed_is_an_error_and_its_batches_come_again(
        self, folder: str, tmp_path: Path
    ) -> None:
        transform = Deadly(tmp_path / "was killed", may_die := tmp_path / "may die")
        dataset = ReplayDataset(folder, batch_size=8, epochs=1, transform=transform)
        others = set(multiprocessing.active_children())
        with dataset.loader(num_workers=2, prefetch_factor=2) as loader:
            found = [next(loader) for _ in range(3)]
            may_die.touch()
            with pytest.raises(RuntimeError, match="DataLoader worker") as caught:
                next(loader)
            assert set(multiprocessing.active_children()) <= others, "though the traceback is still held"
            del caught
            found += list(loader)
        assert found == read(folder, batch_size=8, epochs=1)

    @pytest.mark.further
    def test_closing_ends_the_workers(self, folder: str) -> None:
        others = set(multiprocessing.active_children())
        loader = ReplayDataset(folder, batch_size=4).loader(num_workers=2)
        next(loader)
        assert len(set(multiprocessing.active_children()) - others) == 2
        loader.close()
        assert set(multiprocessing.active_children()) <= others
        loader.close()
        with pytest.raises(ClosedError):
            next(loader)
        with pytest.raises(ClosedError):
            loader.load_state_dict(loader.state_dict())

    @pytest.mark.parametrize("workers", [0, *further(2)])
    def test_a_stateful_dataloader_resumes_with_as_many_workers(self, folder: str, workers: int) -> None:
        stateful = pytest.importorskip("torchdata.stateful_dataloader")
        options: dict[str, Any] = {"batch_size": 4, "epochs": 1, **SHUFFLED}
        expected = read(folder, **options)

        def make() -> Any:
            dataset = ReplayDataset(folder, **options)
            return stateful.StatefulDataLoader(dataset, batch_size=None, num_workers=workers)

        for taken in (1, 4, 15):
            loader = make()
            batches = iter(loader)
            found = [next(batches)["t"].tolist() for _ in range(taken)]
            state = loader.state_dict()
            del batches
            loader = make()
            loader.load_state_dict(state)
            assert found + delivered(loader) == expected
            assert delivered(loader) == expected, "the next pass is a whole one"


class Varied:
    """A transform whose outputs have everything that may be sent, and differ from batch to batch."""

    def __call__(self, batch: Any) -> dict[str, Any]:
        t = torch.from_numpy(np.array(batch["t"]))
        return {
            "t": t,
            "nested": ({"half": t.to(torch.bfloat16)}, [t[::2], t[:0]]),
            "gradient": (t * 1.0).requires_grad_(),
            "sparse": torch.eye(3).to_sparse(),
            "large": (t[0] * torch.ones(800_000)).reshape(2, -1),
            "text": [f"row {number}" for number in t.tolist()],
            "infos": np.array([{"t": number} for number in t.tolist()], object),
        }


def assert_equal_items(one: Any, other: Any) -> None:
    """Same types, values, dtypes and shapes."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        assert_equal_items(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal_items(a, b)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        assert torch.equal(
            one.to_dense() if one.is_sparse else one, other.to_dense() if other.is_sparse else other
        )
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other


def items(dataset: ReplayDataset, **options: Any) -> list[Any]:
    with dataset.loader(**options) as loader:
        return list(loader)


WATCHED = """
import multiprocessing, os, re, sys, threading
import rlio.torch

def shared(pids):
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return [name for name in names if pids & set(re.findall("[0-9]+", name))]

def threads():
    return {thread.name for thread in threading.enumerate()}

if __name__ == "__main__":
    root, method = sys.argv[1:]
    dataset = rlio.torch.ReplayDataset(root, batch_size=4, epochs=1_000_000)
    before, pids = threads(), {str(os.getpid())}
    for killed in (False, True):
        loader = dataset.loader(num_workers=2, multiprocessing_context=method)
        for batch in loader:
            break
        pids |= {str(worker.pid) for worker in multiprocessing.active_children()}
        if killed:
            worker = multiprocessing.active_children()[0]
            os.kill(worker.pid, 9)
            try:
                for batch in loader:
                    pass
            except RuntimeError:
                pass
        loader.close()
        assert multiprocessing.active_children() == []
    for thread in threading.enumerate():
        if thread.name not in before:
            thread.join(30)  # torch does not wait for the threads of its queues.
    assert threads() == before, threads()
    assert len(pids) == 5
    print(shared(pids))
"""


class TestMessages:
    """Several small batches of a worker travel together."""

    def test_whatever_a_transform_gives_arrives_as_it_is_without_workers(self, folder: str) -> None:
        dataset = ReplayDataset(folder, batch_size=8, epochs=1, transform=Varied())
        expected = items(dataset)
        assert len(expected) > 3
        for options in ({}, {"prefetch_factor": 7}):
            assert_equal_items(items(dataset, num_workers=2, **options), expected)

    @pytest.mark.further
    def test_so_do_batches_of_any_columns_without_a_transform(self, tmp_path: Path) -> None:
        t = np.arange(60)
        columns: dict[str, Any] = {
            "eps_id": t // 12,
            "terminateds": t % 12 == 11,
            "rewards": t / 7,
            "infos": [{"t": int(number)} for number in t],
            "words": np.array([f"w{number}" for number in t]),
            "images": np.ones((60, 4, 84, 84), np.uint8) * t[:, None, None, None].astype(np.uint8),
        }
        nested = {"obs": {"place": np.ones((60, 2)), "speed": (t * 0.5, t)}}
        small = {name: column for name, column in columns.items() if name != "images"}
        agents = MultiAgentBatch({"a": numbered(60, **small), "b": numbered(60, **small)}, 60)
        for number, (options, batch) in enumerate(
            [
                ({}, numbered(60, **small)),
                ({}, numbered(60, **columns)),
                ({}, numbered(60, **nested)),
                ({"draw": rlio.WholeEpisodes()}, numbered(60, **small)),
                ({"draw": rlio.Sequences(5)}, numbered(60, **small)),
                ({}, agents),
            ]
        ):
            root = str(tmp_path / str(number))
            with rlio.ParquetWriter(root) as writer:
                writer.write(batch)
            for shuffle in ({},) if number else ({}, SHUFFLED):
                dataset = ReplayDataset(root, batch_size=4, epochs=1, **options, **shuffle)
                expected = items(dataset)
                assert len(expected) > 1
                assert_equal_items(items(dataset, num_workers=2), expected)

    def test_a_batch_may_be_kept_and_changed_without_a_change_to_others(self, tmp_path: Path) -> None:
        with rlio.ParquetWriter(str(tmp_path)) as writer:
            writer.write(numbered(60, rewards=np.arange(60, dtype=np.float32)))
        dataset = ReplayDataset(str(tmp_path), batch_size=4, epochs=1)
        expected = items(dataset)
        with dataset.loader(num_workers=1) as loader:
            kept = [next(loader), next(loader)]
            weight = torch.ones(1, requires_grad=True)
            loss = (weight * kept[0]["rewards"]).sum()
            kept[1]["rewards"].fill_(-1.0)
            loss.backward()  # type: ignore[no-untyped-call]  # It is not annotated.
            kept[1]["rewards"].mul_(weight)
            rest = list(loader)
        assert_equal_items([kept[0], *rest], [expected[0], *expected[2:]])

    def test_prefetch_factor_and_timeout_bound_what_is_read_ahead(self, folder: str) -> None:
        dataset = ReplayDataset(folder, batch_size=1)
        for options, together, ahead in (
            ({}, 16, None),
            ({"prefetch_factor": 1}, 1, 1),
            ({"prefetch_factor": 3}, 1, 3),
            ({"prefetch_factor": 8}, 4, 1),
            ({"prefetch_factor": 64}, 16, 3),
            ({"timeout": 60}, 1, None),
        ):
            given, found = dataset.loader(num_workers=1, **options)._grouped()
            assert (found, given.get("prefetch_factor")) == (together, ahead)
        assert ReplayDataset(folder, batch_size=10**5).loader(num_workers=1)._grouped()[1] == 1
        assert (
            ReplayDataset(folder, batch_size=1, draw=rlio.WholeEpisodes()).loader(num_workers=1)._grouped()[1]
            == 1
        )

    @pytest.mark.parametrize("method", further("fork", "spawn"))
    def test_a_break_and_a_killed_worker_leave_nothing_behind(
        self, folder: str, tmp_path: Path, method: str
    ) -> None:
        script = tmp_path / "watched.py"
        script.write_text(WATCHED, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(script), folder, method],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


RANK = """
import datetime, json, sys
import torch.distributed
import rlio.torch
rank, meeting, root = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.distributed.init_process_group(
    "gloo", init_method="file://" + meeting, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
)
try:
    rlio.torch.ReplayDataset(root + "-is-not-there", batch_size=4)
except rlio.errors.DataNotFound as error:
    missing = str(error)
dataset = rlio.torch.ReplayDataset(root, batch_size=4, shuffle=True, epochs=1)
rows = [batch["t"].tolist() for batch in dataset.loader()]
first = dataset.loader()
next(first)
other = rlio.torch.ReplayDataset(root, batch_size=4, shuffle=True, epochs=1)  # With another seed.
other.load_state_dict(first.state_dict())
assert [batch["t"].tolist() for batch in other.loader()] == rows[1:]
assert other.state_dict()["position"]["seed"] == dataset.state_dict()["position"]["seed"]
print(json.dumps([missing, [dataset.rank, dataset.world], rows, dataset.state_dict()]))
"""


@pytest.mark.further
def test_ranks_agree_through_torch_distributed_on_seed_and_snapshot(folder: str, tmp_path: Path) -> None:
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meeting"), folder],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = [json.loads(process.communicate(timeout=240)[0]) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    assert [place for _, place, _, _ in found] == [[0, 2], [1, 2]]
    assert all("is-not-there" in missing for missing, _, _, _ in found)
    assert found[1][0].startswith("rank 0 could not open")
    assert found[0][3] == found[1][3]
    assert sorted(flat(found[0][2] + found[1][2])) == list(range(ROWS))


class Counting(InputReader):
    """Numbered batches; counts how many were read, fails where it is told to, and may wait."""

    def __init__(self, batches: int = 10**9) -> None:
        self.number = 0
        self.batches = batches
        self.fails_at: int | None = None
        self.may_go = threading.Event()
        self.may_go.set()
        self.read = threading.Semaphore(0)

    def _next(self) -> SampleBatch:
        assert self.may_go.wait(60)
        if self.number == self.fails_at:
            raise CorruptData(f"batch {self.number}")
        if self.number == self.batches:
            raise EndOfData("no more")
        self.number += 1
        self.read.release()
        return SampleBatch(t=[self.number - 1])

    def _position(self) -> JsonState:
        return {"number": self.number}

    def _seek(self, position: JsonState) -> None:
        self.number = position["number"]


class Live(Counting):
    replayable = False


class Prefetched(InputReader):
    """A prefetching iterator as a reader, for the law of resuming."""

    def __init__(self, reader: InputReader, depth: int) -> None:
        self.batches = rlio.torch.prefetch(reader, depth=depth)
        self.reader = reader

    def _next(self) -> SampleBatch:
        try:
            tensors = next(self.batches)
        except StopIteration:
            raise EndOfData("the reader's end") from None
        return SampleBatch({name: np.asarray(tensor) for name, tensor in tensors.items()})

    def _position(self) -> JsonState:
        return self.batches.state_dict()

    def _seek(self, position: JsonState) -> None:
        self.batches.load_state_dict(position)

    def _close(self) -> None:
        self.batches.close()
        self.reader.close()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rlio-prefetch"]


class TestPrefetch:
    @pytest.mark.few(1)
    @pytest.mark.parametrize("depth", [1, 3])
    @pytest.mark.parametrize("n", [None, 3])
    @pytest.mark.each_value_once
    def test_the_law_of_resuming_holds(self, root: str, depth: int, n: int | None) -> None:
        def make() -> InputReader:
            return Prefetched(DatasetReader(root, batch_size=7, epochs=1, **SHUFFLED), depth)

        assert_resumes(make, n)

    def test_the_state_is_that_after_the_last_delivered_batch(self, root: str) -> None:
        options: dict[str, Any] = {"batch_size": 4, "epochs": 1, **SHUFFLED}
        with DatasetReader(root, **options) as reader, DatasetReader(root, **options) as other:
            with rlio.torch.prefetch(reader, depth=5) as batches:
                for _ in range(6):
                    assert next(batches)["t"].tolist() == other.sample()["t"].tolist()
                    assert batches.state_dict() == other.state_dict()
            # Closed: the reader stands there, too.
            assert reader.state_dict() == other.state_dict()
            assert [b["t"].tolist() for b in reader] == [b["t"].tolist() for b in other]  # type: ignore[call-overload]

    def test_it_reads_ahead_so_far_and_no_farther(self) -> None:
        reader = Counting()
        with rlio.torch.prefetch(reader, depth=3) as batches:
            assert next(batches)["t"].item() == 0
            for _ in range(5):  # The delivered one, three that wait, and one in the making.
                assert reader.read.acquire(timeout=60)
            assert not reader.read.acquire(timeout=0.2)

    def test_an_error_comes_after_the_batches_before_it_and_the_next_call_asks_again(self) -> None:
        reader = Counting(batches=6)
        reader.fails_at = 4
        with rlio.torch.prefetch(reader, depth=3) as batches:
            assert [next(batches)["t"].item() for _ in range(4)] == [0, 1, 2, 3]
            for _ in range(2):
                with pytest.raises(CorruptData, match="batch 4"):
                    next(batches)
            reader.fails_at = None
            assert [batch["t"].item() for batch in batches] == [4, 5]
            assert list(batches) == []
            assert batches.state_dict() == reader.state_dict()

    def test_a_batch_whose_copy_failed_is_read_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        broken = {2}
        whole = SampleBatch.to_torch

        def to_torch(batch: SampleBatch, *args: Any, **options: Any) -> dict[str, Any]:
            if int(batch["t"][0]) in broken:
                raise RuntimeError("out of memory")
            return whole(batch, *args, **options)

        monkeypatch.setattr(SampleBatch, "to_torch", to_torch)
        with rlio.torch.prefetch(Counting(batches=5)) as batches:
            assert [next(batches)["t"].item() for _ in range(2)] == [0, 1]
            with pytest.raises(RuntimeError, match="out of memory"):
                next(batches)
            broken.clear()
            assert [batch["t"].item() for batch in batches] == [2, 3, 4]

    def test_closing_ends_the_thread_and_so_does_dropping(self) -> None:
        others = set(threads())
        batches = rlio.torch.prefetch(Counting())
        next(batches)
        assert set(threads()) - others
        batches.close()
        batches.close()
        assert not set(threads()) - others
        with pytest.raises(ClosedError):
            next(batches)
        batches = rlio.torch.prefetch(Counting())
        next(batches)
        del batches
        assert not set(threads()) - others

    def test_what_a_live_reader_gave_in_vain_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        reader = Live()
        with rlio.torch.prefetch(reader, depth=2) as batches:
            next(batches)
            for _ in range(4):
                assert reader.read.acquire(timeout=60)
        assert "3 batches of Live that were read ahead are dropped" in caplog.text

    def test_a_reader_that_is_closed_says_so(self) -> None:
        reader = Counting()
        with rlio.torch.prefetch(reader) as batches:
            reader.close()
            with pytest.raises(ClosedError, match="Counting"):
                next(batches)

    def test_policies_are_kept_apart_and_the_device_is_asked_for(self) -> None:
        rows = SampleBatch(t=np.arange(4), eps_id=np.zeros(4, np.int64))
        root = store(MultiAgentBatch({"a": rows, "b": rows}, 4))
        with DatasetReader(root, epochs=1) as reader:
            (found,) = rlio.torch.prefetch(reader, device="meta", dtype={"t": torch.int32})
        assert found["a"]["t"].device.type == found["b"]["t"].device.type == "meta"
        assert found["a"]["t"].dtype == found["b"]["t"].dtype == torch.int32

    def test_illegal_arguments_are_refused(self, root: str) -> None:
        with pytest.raises(OptionError, match="InputReader"):
            rlio.torch.prefetch([1, 2])  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="depth=0"):
            rlio.torch.prefetch(Counting(), depth=0)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_batches_arrive_on_the_gpu_in_order_and_whole(self) -> None:
        with rlio.torch.prefetch(Counting(500), device="cuda", depth=3) as batches:
            sums = [(batch["t"] * 2).sum() for batch in batches]
        assert [int(value) for value in sums] == [2 * number for number in range(500)]


@pytest.mark.further
def test_importing_rlio_does_not_import_torch() -> None:
    code = "import sys, rlio; rlio.DatasetReader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_error_for_a_missing_extra_can_be_sent() -> None:
    sent = pickle.loads(pickle.dumps(MissingExtra("h5py", "hdf5")))
    assert type(sent) is MissingExtra
    assert "rlio[hdf5]" in str(sent)
