"""Writers, followers, compactors, a trimmer and gc at work on one data set, at once and in any order."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from further import on_servers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from servers import Server
from stored_batches import files, fresh_root, group_bytes, load, put
from test_compact import shard_files

import rlio
from rlio import EndOfData, FollowReader, ParquetWriter, Roll, SampleBatch
from rlio.catalog.listing import list_shards
from rlio.storage.filesystem import Storage

linux_only = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="resident memory is read from /proc, which is Linux's"
)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def rows_of(label: int, first: int, count: int) -> SampleBatch:
    """Rows that know whose they are and which."""
    t = np.arange(first, first + count)
    return SampleBatch(t=t, label=np.full(count, label), obs=(t[:, None] * np.ones(3)).astype(np.float32))


def writer_id(label: int) -> str:
    return f"w{label:05d}-{label:08x}"


# ---- at once ----


def _write(root: str, label: int, shards: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with ParquetWriter(root, writer_id=writer_id(label), roll=Roll(max_seconds=None)) as writer:
        first = 0
        for _ in range(shards):
            count = int(rng.integers(1, 30))
            writer.write(rows_of(label, first, count))
            writer.flush()
            first += count


def _write_in_threads(root: str, label: int, shards: int, threads: int) -> None:
    """A process with one writer of many shards, and some threads with a writer of few."""
    with ThreadPoolExecutor(threads) as pool:
        others = [pool.submit(_write, root, label + 1 + i, 2, label + i) for i in range(threads)]
        _write(root, label, shards, label)
        for other in others:
            other.result()  # What one raised ends this process with 1.


def _follow(root: str, log: str, seed: int, done: Any) -> None:
    """Follow with a fresh reader every few batches, from the last one's state, and log what is served."""
    rng = np.random.default_rng(seed)
    state = None
    served: list[list[int]] = []
    while True:
        complete = done.is_set()
        with FollowReader(root, idle_timeout=0.2, poll_seconds=0.05) as reader:
            if state is not None:
                reader.load_state_dict(json.loads(state))
            try:
                for _ in range(int(rng.integers(2, 12))):
                    batch = reader.sample(int(rng.integers(1, 200)))
                    served += np.stack([batch["label"], batch["t"]], axis=1).tolist()
                    state = json.dumps(reader.state_dict())
            except EndOfData:
                if complete:
                    break
    Path(log).write_text(json.dumps(served))


def _compact(root: str, done: Any, max_bytes: int) -> None:
    while not done.is_set():
        rlio.maintenance.compact(root, max_bytes=max_bytes)
        time.sleep(0.01)


def _collect(root: str, done: Any, grace: float) -> None:
    while not done.is_set():
        rlio.maintenance.gc(root, grace=grace)
        time.sleep(0.05)


def _trim(root: str, done: Any, labels: list[int]) -> None:
    while not done.is_set():
        snapshot = rlio.open_dataset(root).snapshot()
        for label in labels:
            known = snapshot.get(writer_id(label))
            if known is not None:
                rows = known if isinstance(known, int) else known[1]
                rlio.maintenance.trim(root, before={writer_id(label): rows // 2})
        time.sleep(0.1)


def _run_all(root: Path, *, processes: int, shards: int, threads: int, readers: int) -> None:
    """Let all of them work, and check what each reader saw."""
    context = multiprocessing.get_context("fork")
    done = context.Event()
    labels = [1000 * (i + 1) for i in range(processes)]
    data = str(root / "data-set")
    with ParquetWriter(data, writer_id="w00000-00000000") as writer:  # So that there is a data set.
        writer.write(rows_of(0, 0, 5))
    writers = [
        context.Process(target=_write_in_threads, args=(data, label, shards, threads)) for label in labels
    ]
    trimmed = labels[:2]
    others = [
        *(
            context.Process(target=_follow, args=(data, str(root / f"{i}.json"), i, done))
            for i in range(readers)
        ),
        context.Process(target=_compact, args=(data, done, 64 << 20)),
        context.Process(target=_compact, args=(data, done, 30_000)),
        context.Process(target=_collect, args=(data, done, 0.5)),
        context.Process(target=_trim, args=(data, done, trimmed)),
    ]
    for process in [*writers, *others]:
        process.start()
    for process in writers:
        process.join(120)
    until = time.monotonic() + 60  # The trimmer may only just have begun, on a busy machine.
    while not {writer_id(x) for x in trimmed} <= set(list_shards(Storage.open(data)).trimmed):
        assert time.monotonic() < until
        time.sleep(0.1)
    done.set()
    for process in others:
        process.join(60)
    assert [process.exitcode for process in [*writers, *others]] == [0] * (len(writers) + len(others))

    listing = list_shards(Storage.open(data))
    written = dict(listing.sealed)
    assert len(written) == 1 + processes * (1 + threads)
    assert set(listing.trimmed) == {writer_id(label) for label in trimmed}
    for number in range(readers):
        rows: dict[int, list[int]] = defaultdict(list)
        for label, t in json.loads((root / f"{number}.json").read_text()):
            rows[label].append(t)
        assert {writer_id(label) for label in rows} <= set(written)
        for name, count in written.items():
            seen = rows[int(name[1:6])]
            assert seen == sorted(set(seen)), f"{name}: out of order, or twice"
            gone = listing.trimmed.get(name, 0)
            assert set(range(gone, count)) <= set(seen) <= set(range(count)), name
    final = load(data)
    expected = [
        (int(w[1:6]), t) for w in sorted(written) for t in range(listing.trimmed.get(w, 0), written[w])
    ]
    assert list(zip(final["label"].tolist(), final["t"].tolist(), strict=True)) == expected
    before = len(rlio.open_dataset(data).segments)
    rlio.maintenance.compact(data)
    rlio.maintenance.gc(data, grace=0)
    assert len(rlio.open_dataset(data).segments) <= min(before, len(written))
    assert load(data)["t"].tolist() == final["t"].tolist()
    assert sum(map(len, list_shards(Storage.open(data)).shards.values())) <= len(written)


@pytest.mark.further
@needs_fork
def test_every_reader_sees_each_row_once_while_all_others_work(tmp_path: Path) -> None:
    """Writers, beside 2 compactors, readers that restart, a trimmer and gc."""
    _run_all(tmp_path, processes=4, shards=8, threads=4, readers=2)


@needs_fork
@pytest.mark.further
def test_every_reader_sees_each_row_of_288_shards_once_while_all_others_work(tmp_path: Path) -> None:
    """They are of 72 writers."""
    _run_all(tmp_path, processes=8, shards=20, threads=8, readers=4)


@needs_fork
@pytest.mark.soak
def test_every_reader_sees_each_row_once_while_all_others_work_for_long(tmp_path: Path) -> None:
    _run_all(tmp_path, processes=8, shards=200, threads=8, readers=4)


# ---- in any order ----


class Maintained(RuleBasedStateMachine):
    """A data set against a model: writer -> the numbers of its rows, and how many were trimmed."""

    @initialize(limit=st.sampled_from([150, 600, 1 << 23]))
    def begin(self, limit: int) -> None:
        self._groups = group_bytes(limit)
        self._groups.__enter__()
        self.root = fresh_root()
        self.rows: dict[int, int] = {}
        self.visible: dict[int, int] = {}
        self.trimmed: dict[int, int] = {}
        self.writers: dict[int, ParquetWriter] = {}
        #: Every shard that there ever was, by its path below the root.
        self.seen: dict[str, bytes] = {}
        self.state: Any = None
        self.served: dict[int, int] = {}
        self.write(0, 3)
        self.flush(0)

    def teardown(self) -> None:
        if hasattr(self, "root"):
            for writer in self.writers.values():
                writer.close()
            self._groups.__exit__(None, None, None)

    # ---- rules ----

    @rule(label=st.integers(0, 2), count=st.integers(1, 9))
    def write(self, label: int, count: int) -> None:
        if label not in self.rows:
            roll = Roll(max_rows=6, max_seconds=None)
            self.writers[label] = ParquetWriter(self.root, writer_id=writer_id(label), roll=roll)
            self.rows[label] = 0
        if label in self.writers:
            self.writers[label].write(rows_of(label, self.rows[label], count))
            self.rows[label] += count

    @rule(label=st.integers(0, 2))
    def flush(self, label: int) -> None:
        if label in self.writers:
            self.writers[label].flush()
            self.visible[label] = self.rows[label]

    @rule(label=st.integers(1, 2))
    def close(self, label: int) -> None:
        if label in self.writers:
            self.writers.pop(label).close()
            self.visible[label] = self.rows[label]

    @rule(max_bytes=st.sampled_from([4_000, 8_000, 64 << 20]), min_shards=st.integers(2, 4))
    def compact(self, max_bytes: int, min_shards: int) -> None:
        self._settle()
        rlio.maintenance.compact(self.root, max_bytes=max_bytes, min_shards=min_shards)

    @rule()
    def gc(self) -> None:
        report = rlio.maintenance.gc(self.root, grace=0)
        assert report.kept == ()

    @rule(label=st.integers(0, 2), share=st.floats(0, 1))
    def trim(self, label: int, share: float) -> None:
        if label in self.visible:
            self._settle()
            row = int(share * self.visible[label])
            rlio.maintenance.trim(self.root, before={writer_id(label): row})
            self.trimmed[label] = max(row, self.trimmed.get(label, 0))

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def retry_late(self, data: st.DataObject) -> None:
        """A shard comes back, whatever became of it: overlaps of all kinds, and rows that were trimmed."""
        path = data.draw(st.sampled_from(sorted(self.seen)))
        put(f"{self.root}/{path}", self.seen[path])

    @rule()
    def copy_root(self) -> None:
        """All go on with a copy."""
        for label in list(self.writers):
            self.writers.pop(label).close()
            self.visible[label] = self.rows[label]
        fs, target = fsspec.filesystem("memory"), fresh_root()
        for path, content in files(self.root, "").items():
            put(f"{target}/{path.split('/', 2)[2]}", content)
        fs.rm(self.root, recursive=True)
        self.root = target

    @rule(size=st.integers(1, 12), batches=st.integers(1, 3))
    def follow(self, size: int, batches: int) -> None:
        """A reader that is restarted each time gets what comes next of each writer, and nothing twice."""
        with FollowReader(self.root, idle_timeout=0, poll_seconds=0.001) as reader:
            if self.state is not None:
                reader.load_state_dict(self.state)
            try:
                for _ in range(batches):
                    batch = reader.sample(size)
                    self._check_served(batch)
                    self.state = json.loads(json.dumps(reader.state_dict()))
            except EndOfData:
                self._settle()
                for label, rows in self.visible.items():
                    assert max(self.served.get(label, 0), self.trimmed.get(label, 0)) == rows

    def _check_served(self, batch: SampleBatch) -> None:
        for label, t in zip(batch["label"].tolist(), batch["t"].tolist(), strict=True):
            expected = max(self.served.get(label, 0), self.trimmed.get(label, 0))
            assert t == expected, (label, t, expected)
            self.served[label] = t + 1

    def _settle(self) -> None:
        """Shards are stored in the background: make all rows visible, so that the model knows which are."""
        for label in list(self.writers):
            self.flush(label)

    # ---- what holds always ----

    @invariant()
    def the_data_set_is_the_model(self) -> None:
        if not hasattr(self, "root"):
            return
        self._settle()
        for path, content in shard_files(self.root).items():
            self.seen[path.split("/", 2)[2]] = content
        expected = [
            (label, t)
            for label in sorted(self.visible)
            for t in range(self.trimmed.get(label, 0), self.visible[label])
        ]
        data = rlio.open_dataset(self.root)
        assert len(data) == len(expected)
        assert data.holes == {}
        if expected:
            batch = load(self.root)
            assert list(zip(batch["label"].tolist(), batch["t"].tolist(), strict=True)) == expected
            assert zlib.crc32(batch["obs"].tobytes()) == zlib.crc32(
                np.array([[t] * 3 for _, t in expected], np.float32).tobytes()
            )


Maintained.TestCase.settings = settings(max_examples=5, stateful_step_count=20, deadline=None)
TestMaintained = Maintained.TestCase


class _Thorough(Maintained):
    pass


@pytest.mark.soak
class TestMaintainedForLong(_Thorough.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=1000, stateful_step_count=100, deadline=None)


# ---- on real servers ----


@pytest.mark.parametrize(
    "scheme",
    on_servers("s3", "azure", "sftp", "ftp"),
)
@pytest.mark.further
def test_a_real_store_is_compacted_trimmed_and_collected_by_its_own_clock(
    scheme: str, serve: Callable[[str], Server]
) -> None:
    server = serve(scheme)
    root, options = server.fresh_root(), {"storage_options": server.options}
    roll = Roll(max_rows=4, max_seconds=None)
    with ParquetWriter(root, writer_id="w0", roll=roll, spool=None, **options) as writer:
        for first in range(0, 40, 4):
            writer.write(rows_of(0, first, 4))
    report = rlio.maintenance.compact(root, **options)
    assert (report.shards_before, report.shards_after) == (10, 1)
    waiting = rlio.maintenance.gc(root, **options)
    assert (waiting.removed, waiting.waiting, waiting.kept) == ((), 10, ())
    # Some servers tell seconds only; what is older than nothing and a bit is older than that.
    time.sleep(2.1)
    assert len(rlio.maintenance.gc(root, grace=1.0, **options).removed) == 10
    assert rlio.maintenance.trim(root, keep_rows=15, **options).rows == 25
    assert load(root, **options)["t"].tolist() == list(range(25, 40))
    storage = Storage.open(root, **options)
    assert not [path for path, _ in storage.list() if path.startswith("_tmp/")]


# ---- memory ----

_WORK = """
import gc, sys, threading
import numpy as np, pyarrow, rlio

root, phases, rounds, leak = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
rng, leaked = np.random.default_rng(0), []
batch = rlio.SampleBatch(
    obs=rng.normal(size=(500, 17)).astype(np.float32), t=np.arange(500), eps_id=np.arange(500) // 100
)
writer = rlio.ParquetWriter(root, roll=rlio.Roll(max_rows=2000, max_seconds=None))

def write():
    for _ in range(20 * rounds):
        writer.write(batch)

def repeat(act):
    def run():
        for _ in range(rounds):
            try:
                act()
            except rlio.errors.DataNotFound:
                pass  # Trimmed while it was compacted.
    return run

acts = [write, *map(repeat, [
    lambda: rlio.maintenance.compact(root), lambda: rlio.maintenance.gc(root),
    lambda: rlio.maintenance.trim(root, keep_rows=100_000),
])]
for phase in range(phases):
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.flush()
    leaked.append(bytearray(b"x" * int(leak * 1e6)))
    gc.collect()
    with open("/proc/self/status") as status:
        anonymous = next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1000
    print(anonymous, len(gc.get_objects()), pyarrow.total_allocated_bytes() / 1e6)
writer.close()
"""


def _memory_of_work(root: Path, phases: int, rounds: int, leak: float = 0.0) -> np.ndarray:
    """After each phase: MB of the process, Python's objects, MB of Arrow. Shape (phases, 3)."""
    found = subprocess.run(
        [sys.executable, "-c", _WORK, str(root), str(phases), str(rounds), str(leak)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return np.array([line.split() for line in found.stdout.splitlines()], float)


def _growth(found: np.ndarray) -> float:
    """MB from the second quarter of the phases to the last third; the first quarter is warming up."""
    quarter = len(found) // 4
    return float(np.median(found[-(len(found) // 3) :, 0]) - np.median(found[quarter : 2 * quarter, 0]))


@linux_only
@pytest.mark.further
def test_a_process_that_writes_compacts_trims_and_collects_keeps_no_object_of_it(tmp_path: Path) -> None:
    found = _memory_of_work(tmp_path / "data", phases=6, rounds=2)
    assert np.ptp(found[2:, 1]) < 500, found
    assert found[:, 2].max() < 1, found


@linux_only
@pytest.mark.soak
def test_memory_of_a_process_that_writes_compacts_trims_and_collects_stays_flat_for_minutes(
    tmp_path: Path,
) -> None:
    found = _memory_of_work(tmp_path / "data", phases=60, rounds=8)
    assert _growth(found) < 20, found
    assert np.ptp(found[15:, 1]) < 1000, found
    assert _growth(_memory_of_work(tmp_path / "leaky", phases=24, rounds=2, leak=3.0)) > 20, (
        "it would be seen"
    )
