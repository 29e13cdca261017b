"""The index of sealed writers: openers ask for less, and are told the same, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import random
import shutil
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from further import further
from servers import Server
from stored_batches import files, fresh_root, load, numbered, put, remove, store

import rlio
from rlio import DatasetReader, Limits, Roll
from rlio.errors import HoleError, PublishError
from rlio.maintenance import indexing
from rlio.maintenance.indexing import LEAST_AGE, Changes, refresh_index
from rlio.storage import sealed_index
from rlio.storage.filesystem import Storage
from rlio.storage.listing import Listing, Patience, list_settled, list_shards
from rlio.storage.markers import seal
from rlio.storage.markers import trim as put_trim
from rlio.storage.sealed_index import (
    INDEX_DIR,
    distrust_index,
    encode_index,
    list_index,
    list_indexed,
    list_to_read,
    load_index,
    place_of,
    put_change,
)

WRITERS = [f"w{i:05d}-{i:08x}" for i in range(4)]
SEALED, GROWING = WRITERS[:3], WRITERS[3]
FOUR = Roll(max_rows=4, max_seconds=None)


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data sets of a dozen shards are worth an index here."""
    monkeypatch.setattr(sealed_index, "PAGE", 2)
    monkeypatch.setattr(indexing, "PAGE", 2)


def recorded(root: str | None = None, shards: int = 3) -> str:
    """Three sealed writers and one that is not, of ``shards`` shards of four rows each."""
    root = root or fresh_root()
    for number, writer in enumerate(WRITERS):
        first = 100 * number
        store(
            numbered(4 * shards, first, who=np.full(4 * shards, number)),
            root=root,
            writer_id=writer,
            roll=FOUR,
            spool=None,
        )
    storage = Storage.open(root)
    storage.remove(f"data/{GROWING}/_sealed-{4 * shards}")
    return root


def indexed(root: str | None = None) -> str:
    """`recorded`, with an index of the small shards."""
    root = recorded(root)
    assert refresh_index(Storage.open(root), begin=True) is not None
    return root


def shown(listing: Listing) -> dict[str, Any]:
    """What readers make of a listing."""
    return {
        writer: (listing.cover(writer), listing.sealed.get(writer), listing.trimmed.get(writer))
        for writer in sorted({*listing.writers, *listing.trimmed})
    }


def check_told_the_same(root: str) -> bool:
    """Whoever opens the data set now is told what is stored; whether by an index."""
    found, whole = list_indexed(Storage.open(root)), list_shards(Storage.open(root))
    if found is not None:
        assert shown(found) == shown(whole)
    return found is not None


def indexes(root: str) -> list[str]:
    return [stored.object.path for stored in list_index(Storage.open(root)).indexes]


def changes(root: str) -> set[str]:
    return set(list_index(Storage.open(root)).changes)


def values(root: str, **options: Any) -> list[int]:
    return sorted(load(root, **options)["t"].tolist())


def times(batch: Any) -> list[int]:
    return [int(t) for t in batch["t"]]


class Asked:
    """What is listed while it is in force."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders: list[str] = []
        real = Storage.list

        def listing(storage: Storage, prefix: str = "", **options: Any) -> Any:
            self.folders.append(prefix)
            return real(storage, prefix, **options)

        monkeypatch.setattr(Storage, "list", listing)


# ---- what it is for ----


def test_compact_leaves_an_index_by_which_only_growing_writers_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = recorded()
    report = rlio.compact(root)
    assert report.index == Storage.open(root).uri_of(indexes(root)[0])
    assert (
        sorted(
            load_index(Storage.open(root), list_index(Storage.open(root)).indexes[0].object).listing.sealed
        )
        == SEALED
    )
    whole = rlio.open_dataset(root).snapshot()
    asked = Asked(monkeypatch)
    data = rlio.open_dataset(root)
    assert asked.folders == [INDEX_DIR, f"data/{GROWING}"]
    assert data.snapshot() == whole == dict.fromkeys(WRITERS, 12)
    assert [segment.rows for segment in data.segments] == [12] * 4


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 0}, {"follow": True, "idle_timeout": 0}])
def test_rows_are_the_same_with_and_without_it(options: dict[str, Any]) -> None:
    root = indexed()
    if "follow" not in options:
        options = {**options, "epochs": 1}
    with DatasetReader(root, **options) as reader:
        told = list(map(times, reader))
    for path in indexes(root):
        remove(f"{root}/{path}")
    with DatasetReader(root, **options) as reader:
        assert list(map(times, reader)) == told


def test_a_second_compact_that_finds_nothing_new_leaves_the_index_alone() -> None:
    root = recorded()
    rlio.compact(root)
    before = files(root, INDEX_DIR)
    report = rlio.compact(root)
    assert report.index is None
    assert files(root, INDEX_DIR) == before


def test_a_small_data_set_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request lists it; nor is anything announced of it."""
    monkeypatch.setattr(indexing, "PAGE", 1000)
    root = recorded()
    assert rlio.compact(root).index is None
    rlio.trim(root, before={SEALED[0]: 4})
    assert not files(root, INDEX_DIR)


def test_a_follower_of_few_names_does_not_look_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_index, "PAGE", 1000)
    root = recorded()
    storage = Storage.open(root)
    list_to_read(storage, lacks=lambda listing: False)
    asked = Asked(monkeypatch)
    list_to_read(storage, lacks=lambda listing: False)
    assert asked.folders == ["data"]


def test_a_poll_does_not_read_again_what_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    root = indexed()
    rlio.trim(root, before={SEALED[1]: 4})
    put_change(Storage.open(root), [SEALED[0]])
    storage = Storage.open(root)
    assert list_indexed(storage) is not None
    monkeypatch.setattr(Storage, "read_range", None)
    found = list_indexed(storage)
    assert found is not None
    assert shown(found) == shown(list_shards(storage))


def test_where_folders_are_many_on_an_object_store_everything_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each folder is a request, and a thousand names are one."""
    root = indexed()
    monkeypatch.setattr(Storage, "lists_flat", True)
    monkeypatch.setattr(sealed_index, "PAGE", 1000)
    assert check_told_the_same(root)
    for number in range(8):
        store(numbered(1), root=root, writer_id=f"x{number}", spool=None)
    assert list_indexed(Storage.open(root)) is None
    monkeypatch.setattr(Storage, "lists_flat", False)
    assert check_told_the_same(root)


@pytest.mark.parametrize("name", ["s3", *further("sftp")])
def test_a_real_server_tells_the_same(name: str, serve: Callable[[str], Server]) -> None:
    server = serve(name)
    root = server.fresh_root()
    for number, writer in enumerate(WRITERS):
        with rlio.ParquetWriter(
            root, writer_id=writer, roll=FOUR, spool=None, storage_options=server.options
        ) as output:
            output.write(numbered(8, 100 * number))
    storage = Storage.open(root, storage_options=server.options)
    storage.remove(f"data/{GROWING}/_sealed-8")
    assert rlio.compact(root, storage_options=server.options).index is not None
    found = list_indexed(storage)
    assert found is not None
    assert shown(found) == shown(list_shards(storage))


# ---- what may happen after it was made ----


def test_a_trim_of_an_indexed_writer_is_seen_at_once() -> None:
    """Before the shards go, and before there is another index."""
    root = indexed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlio.maintenance.trim._remove", _raise)
        with pytest.raises(PublishError, match="the plug"):
            rlio.trim(root, before={SEALED[0]: 6})
    assert len(indexes(root)) == 1
    assert list_shards(Storage.open(root)).trimmed == {SEALED[0]: 6}
    assert check_told_the_same(root)
    assert len(rlio.open_dataset(root)) == 42


def _raise(*_: Any, **options: Any) -> None:
    raise PublishError("the plug was pulled")


def test_another_index_is_made_after_a_trim() -> None:
    root = indexed()
    rlio.trim(root, before={SEALED[0]: 6})
    index = load_index(Storage.open(root), list_index(Storage.open(root)).indexes[0].object)
    assert index.listing.trimmed == {SEALED[0]: 6}
    assert index.settled == changes(root)
    assert check_told_the_same(root)


def test_compacting_an_indexed_writer_is_seen_at_once() -> None:
    root = indexed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlio.maintenance.compact.refresh_index", _raise)
        with pytest.raises(PublishError, match="the plug"):
            rlio.compact(root)
    assert check_told_the_same(root)
    assert [segment.rows for segment in rlio.open_dataset(root).segments] == [12] * 4


def test_a_late_retry_changes_nothing() -> None:
    root = recorded()
    old = files(root)
    rlio.compact(root)
    rlio.trim(root, before={SEALED[2]: 8})
    rlio.gc(root, grace=0)
    for path, data in old.items():
        put(path, data)
    found = list_indexed(Storage.open(root))
    assert found is not None
    whole = list_shards(Storage.open(root))
    assert {w: c[0].segments for w, c in shown(found).items()} == {
        w: c[0].segments for w, c in shown(whole).items()
    }
    assert len(rlio.open_dataset(root)) == 40


def test_a_writer_that_was_removed_by_hand_is_not_served() -> None:
    root = indexed()
    for path in files(root, f"data/{SEALED[1]}"):
        remove(path)
    assert check_told_the_same(root)


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 0}, {"follow": True, "idle_timeout": 0}])
def test_a_shard_that_is_gone_has_everything_listed(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after somebody compacted and collected with tools that announce nothing."""
    monkeypatch.setattr("rlio.storage.listing.PATIENCE", Patience(seconds=0))
    root = indexed()
    index = files(root, INDEX_DIR)
    rlio.compact(root)
    rlio.gc(root, grace=0)
    for path in files(root, INDEX_DIR):
        remove(path)
    for path, data in index.items():
        put(path, data)
    found = list_indexed(Storage.open(root))
    assert found is not None
    assert shown(found) != shown(list_shards(Storage.open(root)))
    if "follow" not in options:
        options = {**options, "epochs": 1}
    with DatasetReader(root, **options) as reader:
        rows = sorted(t for batch in reader for t in times(batch))
    assert rows == [100 * number + t for number in range(4) for t in range(12)]


def test_a_hole_is_not_believed_on_its_word() -> None:
    """An index that says less than is stored, which no call of ours makes, is no damage."""
    root = recorded()
    storage = Storage.open(root)
    place = place_of(storage)
    assert place is not None
    refs = list_shards(storage).shards[SEALED[0]]
    names = [refs[0].path.rsplit("/")[-1], refs[2].path.rsplit("/")[-1], "_sealed-12"]
    stored, data = encode_index({SEALED[0]: names}, settled=[], generation=1, place=place)
    storage.put(stored.object.path, data)
    found = list_indexed(storage)
    assert found is not None
    assert found.cover(SEALED[0]).holes
    data_set = rlio.open_dataset(root)
    assert (data_set.holes, len(data_set)) == ({}, 48)


def test_a_first_attempt_that_is_sealed_late_is_taken() -> None:
    root = fresh_root()
    late, early = "xjob-000000~0000-00000000", "xjob-000000~0001-00000001"
    store(numbered(8, 100), root=root, writer_id=early, roll=FOUR, spool=None)
    store(numbered(8), root=root, writer_id=SEALED[0], roll=FOUR, spool=None)
    assert refresh_index(Storage.open(root), begin=True) is not None
    assert check_told_the_same(root)
    store(numbered(8, 200), root=root, writer_id=late, roll=FOUR, spool=None)
    assert check_told_the_same(root)
    assert values(root) == [*range(8), *range(200, 208)]


def test_an_attempt_that_gives_way_and_is_collected_is_listed() -> None:
    """An index from when it was taken would promise its rows to whoever began with it."""
    root = fresh_root()
    late, early = "xjob-000000~0000-00000000", "xjob-000000~0001-00000001"
    store(numbered(8, 100), root=root, writer_id=early, roll=FOUR, spool=None)
    store(numbered(8), root=root, writer_id=SEALED[0], roll=FOUR, spool=None)
    assert refresh_index(Storage.open(root), begin=True) is not None
    begun = rlio.open_dataset(root).snapshot()
    store(numbered(8, 200), root=root, writer_id=late, roll=FOUR, spool=None)
    assert len(rlio.open_dataset(root, at=begun)) == 16
    rlio.gc(root, grace=0)
    assert rlio.verify(root).ok
    assert check_told_the_same(root)
    with pytest.raises(HoleError, match=early):
        rlio.open_dataset(root, at=begun)


@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": True, "seed": 0}, {"follow": True, "idle_timeout": 0}, {"on_error": "skip"}],
)
def test_a_shard_that_is_torn_since_is_served_from_those_that_it_covers(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing passes it over by its size, which no index knows."""
    monkeypatch.setattr("rlio.storage.listing.PATIENCE", Patience(seconds=0))
    root = recorded()
    rlio.compact(root)
    path = list_shards(Storage.open(root)).cover(SEALED[0]).segments[0].ref.path
    put(f"{root}/{path}", Storage.open(root).read(path)[:-5])
    assert list_indexed(Storage.open(root)) is not None
    if "follow" not in options:
        options = {**options, "epochs": 1}
    with DatasetReader(root, **options) as reader:
        rows = sorted(t for batch in reader for t in times(batch))
    assert rows == [100 * number + t for number in range(4) for t in range(12)]


# ---- which writers it tells of ----


def untidy(root: str, what: str) -> None:
    """Make something of the first writer that an index cannot tell of."""
    storage = Storage.open(root)
    folder = f"data/{SEALED[0]}"
    shards = [entry.path for entry in storage.list(folder) if entry.path.endswith(".parquet")]
    if what == "a hole":
        storage.remove(shards[1])
    elif what == "a lost end":
        storage.remove(shards[2])
    elif what == "rows past the seal":
        storage.remove(f"{folder}/_sealed-12")
        seal(storage, SEALED[0], 8)
    elif what == "a torn object":
        first, _, rest = shards[0].rsplit("/", 1)[1].split("-", 2)
        storage.put(f"{folder}/{first}-3-{rest}", b"torn")
    elif what == "a foreign object":
        storage.put(f"{folder}/notes.txt", b"mine")
    else:  # Two that overlap, neither within the other: which one serves a row depends on where one begins.
        data = storage.read(shards[0])
        name = f"000000000002-4-{len(data)}-{zlib.crc32(data):08x}-{shards[0][-16:-8]}.parquet"
        storage.put(f"{folder}/{name}", data)


@pytest.mark.parametrize(
    "what",
    ["a hole", "a lost end", "rows past the seal", "a torn object", "a foreign object", "an odd overlap"],
)
def test_a_writer_of_which_more_is_to_be_said_is_left_to_the_listing(what: str) -> None:
    root = recorded()
    untidy(root, what)
    refresh_index(Storage.open(root), begin=True)
    index = load_index(Storage.open(root), list_index(Storage.open(root)).indexes[0].object)
    assert sorted(index.listing.sealed) == SEALED[1:]
    assert check_told_the_same(root)
    if what in ("a hole", "a lost end"):
        with pytest.raises(HoleError):
            load(root)


# ---- several at once, and interruptions ----


class Turns:
    """Runs calls in threads, one storage operation at a time, in an order that a seed says.

    Between two operations nobody runs, so that what a reader would be told then can be checked.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self._random = random.Random(seed)
        self._mine = threading.local()
        for name in ("put", "remove", "list", "read_range"):
            monkeypatch.setattr(Storage, name, self._gated(getattr(Storage, name)))

    def _gated(self, call: Any) -> Any:
        def operation(storage: Storage, *args: Any, **options: Any) -> Any:
            gate = getattr(self._mine, "gate", None)
            if gate is not None:
                gate.wait_for_turn()
            return call(storage, *args, **options)

        return operation

    def run(self, calls: list[Callable[[], object]], check: Callable[[], object]) -> None:
        """Run ``calls`` to their ends; some are killed on the way."""
        gates = [_Gate(call, self._mine) for call in calls]
        while waiting := [gate for gate in gates if gate.is_waiting()]:
            gate = self._random.choice(waiting)
            gate.go_on(kill=self._random.random() < 0.01)
            gate.is_waiting()
            check()
        for gate in gates:
            gate.thread.join()
            if gate.failure is not None:
                raise gate.failure


class _Killed(BaseException):
    """What ends a call as a signal would: nothing catches it."""


class _Gate:
    def __init__(self, call: Callable[[], object], mine: threading.local) -> None:
        self._turn, self._stopped = threading.Semaphore(0), threading.Event()
        self._kill = self._ended = False
        self.failure: BaseException | None = None

        def run() -> None:
            mine.gate = self
            try:
                call()
            except _Killed:
                pass
            except Exception as error:
                self.failure = error
            self._ended = True
            self._stopped.set()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def wait_for_turn(self) -> None:
        self._stopped.set()
        self._turn.acquire()
        if self._kill:
            raise _Killed

    def is_waiting(self) -> bool:
        """Whether it stands before an operation; False: it has ended."""
        assert self._stopped.wait(30)
        return not self._ended

    def go_on(self, *, kill: bool) -> None:
        self._kill = self._kill or kill
        self._stopped.clear()
        self._turn.release()


@pytest.mark.parametrize("seed", [*range(4), *further(*range(4, 12))])
def test_compactors_and_a_trim_at_once_never_mislead_a_reader(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment, also after some were killed, an opener is told by the index what a listing tells."""
    root = indexed() if seed % 2 else recorded()
    told: list[bool] = []
    with monkeypatch.context() as patch:
        Turns(patch, seed).run(
            [
                lambda: rlio.compact(root),
                lambda: rlio.compact(root, max_bytes=6000),
                lambda: rlio.trim(root, before={SEALED[seed % 3]: 4}),
                lambda: refresh_index(Storage.open(root), begin=True),
            ],
            lambda: told.append(check_told_the_same(root)),
        )
    assert sum(told) > 5, "the index was never used: nothing was tested"
    report = rlio.compact(root)
    assert check_told_the_same(root) or report.index is None
    assert len(rlio.open_dataset(root)) in (44, 48)


def test_a_slow_compactor_does_not_hide_a_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listed before the marker was put, and its index is stored last."""
    root = recorded()
    listed: list[bool] = []

    def listing(storage: Storage) -> Listing:
        found = list_shards(storage)
        if not listed:
            listed.append(True)
            changes = Changes(storage, [SEALED[0]], found)
            changes.announce()
            put_change(storage, [SEALED[0]])
            put_trim(storage, SEALED[0], 4)
        return found

    monkeypatch.setattr(indexing, "list_shards", listing)
    assert refresh_index(Storage.open(root), begin=True) is not None
    assert (
        load_index(Storage.open(root), list_index(Storage.open(root)).indexes[0].object).listing.trimmed == {}
    )
    assert check_told_the_same(root)


def test_an_index_that_took_too_long_is_not_stored() -> None:
    root = recorded()
    times = iter([0.0, LEAST_AGE])
    assert refresh_index(Storage.open(root), begin=True, clock=lambda: next(times)) is None
    assert not indexes(root)


def test_a_long_call_announces_its_changes_again() -> None:
    root = indexed()
    now = [0.0]
    changes = Changes(Storage.open(root), SEALED, list_shards(Storage.open(root)), clock=lambda: now[0])
    for now[0] in (0.0, 10.0, 700.0):
        changes.announce()
    assert len(changes.nonces) == 2


def test_markers_count_where_an_index_is_worth_announcing_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many writers that were trimmed away there are few shards, and names enough for a first index."""
    monkeypatch.setattr(indexing, "PAGE", 40)
    root = recorded()
    storage = Storage.open(root)
    for number in range(20):
        put(f"{root}/data/gone{number}/_sealed-4", b"x")
        put(f"{root}/data/gone{number}/_trim-4", b"x")
    listed: list[bool] = []

    def listing(storage: Storage) -> Listing:
        found = list_shards(storage)
        if not listed:
            listed.append(True)
            rlio.trim(root, before={SEALED[0]: 4})
        return found

    monkeypatch.setattr(indexing, "list_shards", listing)
    assert refresh_index(storage, begin=True) is not None
    assert check_told_the_same(root)


def test_threads_that_look_at_one_root_do_not_take_each_others_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that looked a while ago, and reads an old index as the other reads the new one."""
    root = indexed()
    storage = Storage.open(root)
    (old,) = list_index(storage).indexes
    rlio.trim(root, before={SEALED[0]: 4})
    rlio.gc(root, grace=0)
    memory = sealed_index._memory_of(storage)

    class Racing(sealed_index._Memory):
        """Of which another thread changes the index once this one has set it."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "index" and value is not None:
                super().__setattr__(name, (old.object.path, sealed_index.SealedIndex(listing, frozenset())))

    listing = Listing({SEALED[0]: []}, sealed={SEALED[0]: 0})
    memory.__class__ = Racing
    found = list_indexed(storage)
    assert found is not None
    assert shown(found) == shown(list_shards(storage))


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="no other clock is known to go on")
def test_an_index_is_not_stored_if_the_machine_slept_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock that others measure time by in Python stands still then."""
    root = recorded()
    seconds = iter([0.0, LEAST_AGE])
    monkeypatch.setattr(time, "clock_gettime", lambda clock: next(seconds))
    assert refresh_index(Storage.open(root), begin=True) is None
    assert not indexes(root)


# ---- gc ----


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The store's time, which only this list changes."""
    now, times = [0.0], dict[str, float]()
    real = Storage.put

    def storing(storage: Storage, path: str, data: Any) -> None:
        real(storage, path, data)
        times[path] = now[0]

    monkeypatch.setattr(Storage, "put", storing)
    monkeypatch.setattr(Storage, "modified", lambda storage, path: times.get(path, 0.0))
    return now


def test_gc_removes_replaced_indexes_and_what_they_had_to_know(clock: list[float]) -> None:
    root = recorded()
    rlio.compact(root)
    (first,) = indexes(root)
    rlio.trim(root, before={SEALED[0]: 6})
    second, other = indexes(root)
    assert other == first
    assert len(changes(root)) == 2
    clock[0] = 1000.0
    assert "index" not in {entry.kind for entry in rlio.gc(root, grace=10_000).removed}
    clock[0] = 10_001.0
    rlio.gc(root, grace=10_000)
    assert indexes(root) == [second]
    assert changes(root) == set()
    assert check_told_the_same(root)


def test_gc_keeps_an_announcement_as_long_as_somebody_may_act_on_it(clock: list[float]) -> None:
    """Even if the grace is shorter: another's index may be stored a moment later."""
    root = indexed()
    put_change(Storage.open(root), [SEALED[0]])
    bare = recorded()
    put_change(Storage.open(bare), [SEALED[0]])
    clock[0] = LEAST_AGE - 1
    for one in (root, bare):
        rlio.gc(one, grace=1)
        assert len(changes(one)) == 1
    assert len(indexes(root)) == 1, "it was not settled either"
    assert check_told_the_same(root)
    clock[0] += 1
    rlio.gc(bare, grace=1)
    assert not changes(bare)


def test_a_change_whose_maker_died_is_settled_by_gc(clock: list[float]) -> None:
    root = indexed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlio.maintenance.trim._remove", _raise)
        with pytest.raises(PublishError, match="the plug"):
            rlio.trim(root, before={SEALED[0]: 6})
    clock[0] = LEAST_AGE
    rlio.gc(root, grace=60)
    index = load_index(Storage.open(root), list_index(Storage.open(root)).indexes[0].object)
    assert index.listing.trimmed == {SEALED[0]: 6}
    assert len(changes(root)) == 1
    clock[0] *= 2
    rlio.gc(root, grace=60)
    assert (len(indexes(root)), changes(root)) == (1, set())
    assert check_told_the_same(root)


def test_gc_without_a_grace_leaves_one_index_and_a_dry_run_everything() -> None:
    root = indexed()
    rlio.trim(root, before={SEALED[0]: 6})
    before = files(root, INDEX_DIR)
    told = rlio.gc(root, grace=0, dry_run=True)
    assert files(root, INDEX_DIR) == before
    report = rlio.gc(root, grace=0)
    assert [entry.uri for entry in told.removed if "change" not in entry.uri] == [
        entry.uri for entry in report.removed if "change" not in entry.uri
    ]
    assert (len(indexes(root)), changes(root)) == (1, set())
    assert check_told_the_same(root)


def test_gc_keeps_a_torn_announcement_until_an_index_knows_of_its_change(clock: list[float]) -> None:
    root = indexed()
    put_change(Storage.open(root), [SEALED[0]])
    put_trim(Storage.open(root), SEALED[0], 4)
    (path,) = (path for path in files(root, INDEX_DIR) if "change" in path)
    put(path, files(root, INDEX_DIR)[path][:-2])
    assert list_indexed(Storage.open(root)) is None
    clock[0] = LEAST_AGE - 1
    rlio.gc(root, grace=1)
    assert list_indexed(Storage.open(root)) is None
    clock[0] = LEAST_AGE
    rlio.gc(root, grace=1)
    assert check_told_the_same(root)
    clock[0] *= 2
    rlio.gc(root, grace=1)
    assert (len(indexes(root)), changes(root)) == (1, set())
    assert check_told_the_same(root)
    assert len(rlio.open_dataset(root)) == 44


# ---- copies, damage, strangers ----


def test_a_copy_does_not_use_the_index_of_the_original(tmp_path: Path) -> None:
    root = indexed(str(tmp_path / "one"))
    assert check_told_the_same(root)
    other = str(shutil.copytree(tmp_path / "one", tmp_path / "two"))
    assert list_indexed(Storage.open(other)) is None
    assert "index-elsewhere" in {finding.code for finding in rlio.verify(other).findings}
    # In the place of the original, it is a copy all the same.
    shutil.rmtree(root)
    shutil.move(other, root)
    assert list_indexed(Storage.open(root)) is None
    assert refresh_index(Storage.open(root)) is not None
    assert check_told_the_same(root)


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_backup_that_took_the_place_of_the_original_does_not_use_its_index(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index was copied before a trim, the data after it. Folders get the numbers of those removed."""
    root = indexed(str(tmp_path / "root") if where == "disk" else None)
    storage = Storage.open(root)
    backup = {path: storage.read(path) for path, _ in storage.list(INDEX_DIR)}
    monkeypatch.setattr("rlio.maintenance.trim._remove", lambda *_: None)
    rlio.trim(root, before={SEALED[0]: 8})
    backup |= {
        path: storage.read(path) for path, _ in storage.list() if not path.startswith((INDEX_DIR, "_tmp"))
    }
    for path, _ in storage.list():
        storage.remove(path)
    if where == "disk":
        number = os.stat(tmp_path / "root" / "data").st_ino
        real = os.stat
        monkeypatch.setattr(os, "stat", lambda path, **options: _Numbered(real(path, **options), number))
    else:
        real_modified = Storage.modified
        monkeypatch.setattr(Storage, "modified", lambda *a: (real_modified(*a) or 0) + 60)
    for path, data in backup.items():
        Storage.open(root).put(path, data)
    assert list_indexed(Storage.open(root)) is None
    assert len(rlio.open_dataset(root)) == 40


class _Numbered:
    """What `os.stat` gave, with another inode number."""

    def __init__(self, found: os.stat_result, number: int) -> None:
        self._found, self.st_ino = found, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)


@pytest.mark.parametrize("error", [PermissionError("not yours"), OSError(5, "I/O error")])
def test_an_index_that_cannot_be_read_is_passed_over_and_told_of_once(
    error: OSError, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = indexed()
    real = Storage.read_range

    def reading(storage: Storage, path: str, start: int, stop: int) -> bytes:
        if path.startswith(INDEX_DIR):
            raise error
        return real(storage, path, start, stop)

    monkeypatch.setattr(Storage, "read_range", reading)
    data = rlio.open_dataset(root)
    assert len(data) == len(data.refresh()) == 48
    (record,) = caplog.records
    assert "listing everything" in record.message
    assert str(error.args[-1]) in record.message


def test_a_strangers_index_of_the_last_generation_does_not_fill_the_folder(
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = recorded()
    forge(root, b"x", 10**8 - 1)
    assert rlio.compact(root).index is None
    assert [path for path in files(root, INDEX_DIR) if "change-" not in path] == [
        f"{root}/{indexes(root)[0]}".removeprefix("memory:/")
    ]
    assert "remove it" in caplog.text
    remove(f"{root}/{indexes(root)[0]}")
    assert rlio.compact(root).index is not None


def test_a_damaged_index_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    root = indexed()
    whole = values(root)
    (path,) = files(root, INDEX_DIR)
    data = files(root, INDEX_DIR)[path]
    rng = random.Random(0)
    for _ in range(40):
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        put(path, data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        assert list_indexed(Storage.open(root)) is None
    put(path, data[:-1])
    assert list_indexed(Storage.open(root)) is None
    assert values(root) == whole
    assert {f.code for f in rlio.verify(root).findings if f.code.startswith("index")} == {"index-damaged"}
    with caplog.at_level(logging.WARNING):
        put(path, data[:-1] + b"x")
        assert list_indexed(Storage.open(root)) is None
    assert "listing everything" in caplog.text


def test_behind_a_torn_index_an_older_one_is_not_used() -> None:
    """It may have been put back by hand, and what it does not settle be collected."""
    root = indexed()
    ((old, data),) = files(root, INDEX_DIR).items()
    rlio.trim(root, before={SEALED[0]: 4})
    rlio.gc(root, grace=0)
    put(old, data)
    assert check_told_the_same(root)
    newest = f"{root}/{indexes(root)[0]}"
    put(newest, files(root, INDEX_DIR)[newest.removeprefix("memory:/")][:-1])
    assert list_indexed(Storage.open(root)) is None
    assert len(rlio.open_dataset(root)) == 44
    rlio.compact(root)
    assert check_told_the_same(root)
    assert list_indexed(Storage.open(root)) is not None


def test_a_damaged_announcement_has_everything_listed() -> None:
    root = indexed()
    put_change(Storage.open(root), [SEALED[0]])
    (path,) = (path for path in files(root, INDEX_DIR) if "change" in path)
    data = files(root, INDEX_DIR)[path]
    put(path, data[:-2] + b"xy")
    assert list_indexed(Storage.open(root)) is None
    put(path, data[:-2])
    assert list_indexed(Storage.open(root)) is None


def test_too_many_announcements_have_everything_listed() -> None:
    root = indexed()
    for _ in range(65):
        put_change(Storage.open(root), [SEALED[0]])
    assert list_indexed(Storage.open(root)) is None


NAME = "000000000000-4-1000-00000000-00000000.parquet"
HOSTILE: dict[str, Any] = {
    "no object": [],
    "no texts": {"settled": [], "writers": {SEALED[0]: [7, "_sealed-0"]}},
    "no lists": {"settled": "", "writers": {SEALED[0]: "_sealed-0"}},
    "no nonces": {"settled": ["x"], "writers": {}},
    "no writer": {"settled": [], "writers": {"../other": ["_sealed-0"]}},
    "no seal": {"settled": [], "writers": {SEALED[0]: [NAME]}},
    "a way out": {"settled": [], "writers": {SEALED[0]: [f"../../{NAME}", "_sealed-4"]}},
    "a deeper folder": {"settled": [], "writers": {SEALED[0]: [f"x/{NAME}", "_sealed-4"]}},
    "rows out of nothing": {
        "settled": [],
        "writers": {SEALED[0]: ["000000000000-281474976710656-1-00000000-00000000.parquet", "_sealed-4"]},
    },
    "no JSON": b"{",
    "no UTF-8": b"\xff",
    "depth": b"[" * 100_000 + b"]" * 100_000,
    "a number of thousands of digits": b'{"settled":' + b"1" * 10_000 + b"}",
    "nothing": b"",
}


def forge(root: str, packed: bytes, generation: int = 7) -> None:
    """Store bytes as an index that fits."""
    storage = Storage.open(root)
    storage.put(
        f"{INDEX_DIR}/{generation:08d}-{place_of(storage)}-{len(packed)}-{zlib.crc32(packed):08x}.json.zst",
        packed,
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_a_strangers_index_is_passed_over(name: str) -> None:
    root = recorded()
    value = HOSTILE[name]
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    forge(root, zstandard.compress(text))
    assert list_indexed(Storage.open(root)) is None
    assert len(rlio.open_dataset(root)) == 48


def test_an_index_asks_for_no_more_than_a_listing_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of names, and of bytes before they are unpacked, or read."""
    root = indexed()
    assert list_indexed(Storage.open(root, limits=Limits(listed_names=20))) is not None
    assert list_indexed(Storage.open(root, limits=Limits(listed_names=6))) is None
    forge(root, zstandard.compress(b" " * (100 << 20)))
    assert list_indexed(Storage.open(root)) is None
    many = {"settled": [], "writers": {SEALED[0]: ["_sealed-12"] * 50_000}}
    forge(root, zstandard.compress(json.dumps(many).encode()), 8)
    assert list_indexed(Storage.open(root)) is not None
    assert list_indexed(Storage.open(root, limits=Limits(listed_names=10_000))) is None
    for path in indexes(root):
        remove(f"{root}/{path}")
    forge(root, b"x" * 2000)
    monkeypatch.setattr(Storage, "read_range", None)  # It would be called, were the size not looked at.
    assert list_indexed(Storage.open(root, limits=Limits(listed_names=12))) is None


def test_distrust_lasts_until_there_is_another_index() -> None:
    root = indexed()
    storage = Storage.open(root)
    assert list_indexed(storage) is not None
    distrust_index(storage)
    assert list_indexed(storage) is None
    rlio.trim(root, before={SEALED[0]: 4})
    assert list_indexed(storage) is not None


def test_distrust_reaches_a_process_that_was_sent_what_another_listed() -> None:
    """It has read no index yet, and would read the very one that named the shard that is gone."""
    root = indexed()
    sent = pickle.loads(pickle.dumps(rlio.open_dataset(root)))
    distrust_index(sent.storage)
    assert list_indexed(sent.storage) is None
    rlio.trim(root, before={SEALED[0]: 4})
    assert list_indexed(sent.storage) is not None


def test_without_an_index_a_shard_that_is_gone_is_no_word_against_the_first_one() -> None:
    root = recorded()
    storage = Storage.open(root)
    distrust_index(storage)
    assert list_indexed(storage) is None
    assert refresh_index(storage, begin=True) is not None
    assert list_indexed(storage) is not None


# ---- verify and repair ----


def test_verify_finds_an_index_that_says_something_else() -> None:
    root = indexed()
    assert rlio.verify(root).ok
    put_change(Storage.open(root), [SEALED[0]])
    put_trim(Storage.open(root), SEALED[0], 4)
    assert rlio.verify(root).ok, "it was announced"
    put_trim(Storage.open(root), SEALED[1], 4)
    (finding,) = [f for f in rlio.verify(root).findings if f.severity == "error"]
    assert finding.code == "index-differs"
    assert SEALED[1] in finding.message
    put(f"{root}/{INDEX_DIR}/notes.txt", b"mine")
    assert "stray" in {f.code for f in rlio.verify(root).findings}


def test_verify_does_not_take_a_change_meanwhile_for_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at the index first, and lists everything a while later."""
    root = indexed()

    def listing(storage: Storage, **options: Any) -> Listing:
        put_change(storage, [SEALED[0]])
        put_trim(storage, SEALED[0], 4)
        return list_settled(storage, **options)

    monkeypatch.setattr("rlio.maintenance.verify.list_settled", listing)
    assert rlio.verify(root).ok


def test_a_repair_is_seen_at_once_and_makes_another_index() -> None:
    root = indexed()
    path = list_shards(Storage.open(root)).shards[SEALED[0]][1].path
    data = bytearray(Storage.open(root).read(path))
    data[len(data) // 4] ^= 1
    put(f"{root}/{path}", bytes(data))
    rlio.repair(root)
    assert check_told_the_same(root)
    assert "index-differs" not in {f.code for f in rlio.verify(root).findings}
    assert len(indexes(root)) == 2


# ---- anything, in any order ----


class Anything:
    """Does what may happen to a data set, as a seed says, and checks each time what openers are told."""

    def __init__(self, root: str, options: dict[str, Any] | None, seed: int) -> None:
        self.root, self.options, self.random = root, options, random.Random(seed)
        self.storage, self.follower = self.opened(), self.opened()
        #: How often an index was believed.
        self.told = 0
        #: Path -> bytes of every shard and index that there ever was.
        self.history: dict[str, bytes] = {}
        self.snapshots: list[Any] = []
        for _ in range(3):
            self.write()

    def opened(self) -> Storage:
        return Storage.open(self.root, storage_options=self.options, sync=False)

    def run(self, steps: int) -> None:
        acts = [getattr(self, name) for name in dir(type(self)) if name.startswith("do_")]
        for _ in range(steps):
            for path, _ in self.storage.list():
                if path.startswith((INDEX_DIR, "data")) and path not in self.history:
                    self.history[path] = self.storage.read(path)
            self.random.choice(acts)()
            self.check()

    def check(self) -> None:
        whole = list_shards(self.storage)
        for storage in (self.opened(), self.follower):
            found = list_indexed(storage)
            if found is None:
                continue
            self.told += 1
            assert shown(found) == shown(whole)
            for at in self.snapshots:
                for writer, rows in at.items():
                    first, stop = rows if isinstance(rows, list) else (0, rows)
                    assert found.trimmed_below(writer) == whole.trimmed_below(writer)
                    assert found.cover(writer, start=first, end=stop) == whole.cover(
                        writer, start=first, end=stop
                    )
        self.snapshots.append(rlio.open_dataset(self.root, storage_options=self.options).snapshot())

    def write(self, writer: str | None = None, *, is_sealed: bool = True) -> None:
        number = len(list_shards(self.storage).writers)
        rows = self.random.choice([4, 8, 12])
        writer = writer or f"w{number}-{self.random.getrandbits(32):08x}"
        with rlio.ParquetWriter(
            self.root, writer_id=writer, roll=FOUR, spool=None, storage_options=self.options
        ) as output:
            output.write(numbered(rows, 100 * number))
        if not is_sealed:
            self.storage.remove(f"data/{writer}/_sealed-{rows}")

    def maintain(self, call: Callable[[], object]) -> None:
        """Call it; of three calls, one is killed before one of its puts."""
        puts, real = self.random.randrange(12), Storage.put

        def putting(storage: Storage, path: str, data: Any) -> None:
            nonlocal puts
            puts -= 1
            if puts < 0:
                _raise()
            real(storage, path, data)

        with pytest.MonkeyPatch.context() as patch:
            if puts < 4:
                patch.setattr(Storage, "put", putting)
            with contextlib.suppress(PublishError):
                call()

    def do_write(self) -> None:
        self.write(is_sealed=self.random.random() < 0.8)

    def do_attempt(self) -> None:
        part, attempt = self.random.randrange(2), self.random.randrange(4)
        name = f"xjob-{part:06d}~{attempt:04d}-{self.random.getrandbits(32):08x}"
        self.write(name, is_sealed=self.random.random() < 0.7)

    def do_compact(self) -> None:
        size = self.random.choice([6000, 64 << 20])
        self.maintain(lambda: rlio.compact(self.root, max_bytes=size, storage_options=self.options))

    def do_trim(self) -> None:
        shards = list_shards(self.storage).shards
        writer = self.random.choice(sorted(shards))
        row = self.random.randrange(1, 1 + max(ref.name.end for ref in shards[writer]))
        self.maintain(lambda: rlio.trim(self.root, before={writer: row}, storage_options=self.options))

    def do_gc(self) -> None:
        rlio.gc(self.root, grace=0, storage_options=self.options)

    def do_remove_all_of_the_index(self) -> None:
        for path, _ in sorted(self.storage.list(INDEX_DIR)):  # Announcements last.
            self.storage.remove(path)

    def do_put_back(self) -> None:
        """Late retries: of shards, announcements, and indexes that were replaced by now."""
        newest = list_index(self.storage).newest(place_of(self.storage) or "")
        most = "" if newest is None else newest.object.path
        old = [
            path
            for path in self.history
            if path.endswith(".parquet") or "change-" in path or (INDEX_DIR in path and path < most)
        ]
        path = self.random.choice(sorted(old))
        self.storage.put(path, self.history[path])

    def do_damage(self) -> None:
        """A bit of the index, or the end of it."""
        if not (paths := [path for path, _ in self.storage.list(INDEX_DIR)]):
            return
        path = self.random.choice(paths)
        if data := bytearray(self.storage.read(path)):
            at = self.random.randrange(len(data))
            if self.random.random() < 0.5:
                del data[at:]
            else:
                data[at] ^= 1 << self.random.randrange(8)
            self.storage.put(path, bytes(data))


@pytest.mark.parametrize("seed", [0, *further(1, 2, 3)])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_whatever_happens_openers_are_told_what_is_stored(where: str, seed: int, tmp_path: Path) -> None:
    anything = Anything(fresh_root() if where == "memory" else str(tmp_path / "root"), None, seed)
    anything.run(40)
    assert anything.told > 5, "the index was never used: nothing was tested"


@pytest.mark.further
def test_whatever_happens_on_s3_openers_are_told_what_is_stored(serve: Callable[[str], Server]) -> None:
    server = serve("s3")
    anything = Anything(server.fresh_root(), server.options, 0)
    anything.run(15)
    assert anything.told > 0
