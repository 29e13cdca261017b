"""An epoch in order over small shards on an S3 server of this machine, 30 and 50 ms away.

By one reader; by eight ranks in processes of their own, which open the data set themselves, or read one that
this process opens for all, as docs/clusters.md says; and by the first of the ranks alone: so long does an
epoch take where each rank has processors of its own, since all have equally many shards.
"""

from __future__ import annotations

import copy
import importlib.util
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import rlio
from benchmarks import object_store
from benchmarks.data import half_cheetah, slices
from benchmarks.results import Line, Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, interleave, seconds_of

__all__ = ["run"]

_SHARD_ROWS = 2500
_SHARDS = 200
_DELAYS = (0.03, 0.05)
_PEERS = ("pyarrow.dataset", "datasets")
_WORLD = 8
_RANKS = f"rlio, {_WORLD} ranks"
_TOGETHER = f"rlio, {_WORLD} ranks, opened once"
_FIRST = f"rlio, 1 of {_WORLD} ranks alone"


def run(setup: Setup) -> Section:
    """An epoch of rlio beside pyarrow.dataset with s3fs, and Hugging Face's streaming."""
    rows = min(_SHARDS * _SHARD_ROWS, setup.scale.rows)
    shards = -(-rows // _SHARD_ROWS)
    section = Section(
        "s3", f"S3 (moto): an epoch in order over {shards} shards of {_SHARD_ROWS:,} rows of HalfCheetah-v5"
    )
    work = "an epoch in order on S3, {:.0f} ms a request"
    try:
        with object_store.server([]) as (root, options):
            parts = slices(half_cheetah(setup.data, rows), _SHARD_ROWS)
            with rlio.ParquetWriter(root, storage_options=options) as writer:
                for part in parts:
                    writer.write(rlio.SampleBatch(part))
                    writer.flush()
            _server(section, root, options)
            for delay in _DELAYS:
                with object_store.delayed(options, delay) as (far, traffic):
                    _measure(section, setup, root, far, traffic, rows=rows, work=work.format(1000 * delay))
    except object_store.Unavailable as error:
        section.absent |= {name: str(error) for name in ("rlio", *_PEERS)}
        for delay in _DELAYS:
            section.missing(work.format(1000 * delay), beside=_PEERS[0], at_least=1, names=["rlio"])
    return section


def _server(section: Section, root: str, options: dict[str, Any]) -> None:
    """How long the server itself takes to answer one client: each rank that opens the data set lists it."""
    import s3fs

    client = s3fs.S3FileSystem(**options, use_listings_cache=False)
    files = client.find(f"{root}/data")
    calls = {"list": lambda: client.find(f"{root}/data"), "get": lambda: client.cat_file(files[0])}
    for name, call in calls.items():
        section.facts[f"the server, not late: ms of a {name}"] = 1000 * statistics.median(
            seconds_of(call) for _ in range(10)
        )


def _measure(
    section: Section,
    setup: Setup,
    root: str,
    options: dict[str, Any],
    traffic: Callable[[], object_store.Traffic],
    *,
    rows: int,
    work: str,
) -> None:
    at = work.rpartition(", ")[2]
    calls: dict[str, Callable[[], object]] = {"rlio": lambda: _rlio(root, options)}
    calls["pyarrow.dataset"] = lambda: _pyarrow(root, options)
    if importlib.util.find_spec("datasets") is None:
        section.absent["datasets"] = "not installed"
    else:
        calls["datasets"] = lambda: _hugging_face(root, options)
    with _ranks(root, options) as ranks:
        calls[_RANKS] = lambda: ranks.epoch(rows)
        calls[_TOGETHER] = lambda: ranks.epoch_opened_once(rows)
        calls[_FIRST] = ranks.first
        moved = {}
        for name, call in calls.items():
            traffic()
            call()
            moved[name] = traffic()
            section.facts[f"{at}, {name}: requests"] = moved[name].requests
            section.facts[f"{at}, {name}: MB"] = moved[name].bytes / 1e6
        ranks.cpu.clear()
        cases = [Case(name, call, rows, once=True) for name, call in calls.items()]
        taken = interleave(cases, rounds=setup.scale.rounds, seconds=0)
        for name, done in ((_RANKS, "epoch"), (_TOGETHER, "opened once"), (_FIRST, "first")):
            # This process waits for others: its own processor time says nothing.
            taken[name].cpu[:] = [seconds / rows for seconds in ranks.cpu[done][1:]]
    for name in calls:
        if cpu := taken[name].cpu:
            section.facts[f"{at}, {name}: processor seconds"] = statistics.median(cpu) * rows
    section.add_taken(work, taken)
    section.compare(work, case=work, ours="rlio", beside="pyarrow.dataset", at_least=1)
    if "datasets" in calls:
        section.compare(work, case=work, ours="rlio", beside="datasets")
    for name in (_RANKS, _TOGETHER):
        section.compare(f"{work}, {name[6:]}", case=work, ours=name, beside="rlio", at_least=1)
        more = moved[name].bytes / moved["rlio"].bytes
        line = Line(f"{work}: bytes of {name[6:]}", "one reader's", more, goal=1.3, sense="<=")
        section.lines.append(line)
    section.compare(f"{work}, {_FIRST[6:]}", case=work, ours=_FIRST, beside="rlio")


class _Ranks:
    """Processes that stay; each reads its share of an epoch when it is asked.

    Attributes:
        cpu: Call -> processor seconds of the processes that took part in it, one value a call.
    """

    def __init__(self, root: str, options: dict[str, Any], asked: list[Connection]) -> None:
        self._root = root
        self._options = options
        self._asked = asked
        self.cpu: defaultdict[str, list[float]] = defaultdict(list)

    def epoch(self, rows: int) -> None:
        """All ranks open the data set and read an epoch together."""
        self._check(rows, self._read(None, self._asked, "epoch"))

    def epoch_opened_once(self, rows: int) -> None:
        """This process opens the data set, and all ranks read it together."""
        begun = time.process_time()
        data = rlio.open_dataset(self._root, storage_options=self._options)
        opening = time.process_time() - begun
        self._check(rows, self._read(data, self._asked, "opened once"))
        self.cpu["opened once"][-1] += opening

    def first(self) -> None:
        """The first rank reads its share alone."""
        self._read(None, self._asked[:1], "first")

    def _read(self, data: rlio.Dataset | None, ranks: list[Connection], call: str) -> int:
        for rank in ranks:
            rank.send(data)
        answers = [rank.recv() for rank in ranks]
        self.cpu[call].append(sum(seconds for _, seconds in answers))
        return sum(rows for rows, _ in answers)

    def _check(self, rows: int, found: int) -> None:
        if found != rows:
            raise RuntimeError(f"the ranks read {found} rows, expected {rows} in all")


@contextmanager
def _ranks(root: str, options: dict[str, Any]) -> Iterator[_Ranks]:
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        asked = []
        for rank in range(_WORLD):
            ours, theirs = context.Pipe()
            child = context.Process(target=_rank, args=(theirs, root, options, rank))
            child.start()
            theirs.close()
            stack.callback(child.join)
            asked.append(stack.enter_context(ours))  # Closed first, which ends the process.
        yield _Ranks(root, options, asked)


def _rank(asked: Connection, root: str, options: dict[str, Any], rank: int) -> None:
    """One of the ranks. It is sent a data set to read, or None: it opens that itself.

    After an epoch it answers with the rows that it read, and the processor seconds that it took.
    """
    how: dict[str, Any] = {"shuffle": False, "cache": "none", "batch_size": _SHARD_ROWS, "epochs": 1}
    with suppress(EOFError):
        while True:
            data, begun = asked.recv(), time.process_time()
            opening = {"storage_options": options} if data is None else {}
            with rlio.DatasetReader(
                root if data is None else data, shard=(rank, _WORLD), **opening, **how
            ) as reader:
                rows = sum(len(batch) for batch in reader)
            asked.send((rows, time.process_time() - begun))


def _rlio(root: str, options: dict[str, Any]) -> None:
    with rlio.DatasetReader(
        root, epochs=1, shuffle=False, cache="none", batch_size=_SHARD_ROWS, storage_options=options
    ) as reader:
        for _ in reader:
            pass


def _pyarrow(root: str, options: dict[str, Any]) -> None:
    import pyarrow.dataset
    import s3fs

    folder = root.removeprefix("s3://") + "/data"
    found = pyarrow.dataset.dataset(folder, filesystem=s3fs.S3FileSystem(**options), format="parquet")
    for _ in found.to_batches(batch_size=_SHARD_ROWS):
        pass


def _hugging_face(root: str, options: dict[str, Any]) -> None:
    import datasets
    import s3fs

    files = [f"s3://{path}" for path in s3fs.S3FileSystem(**options).glob(f"{root}/data/**/*.parquet")]
    own = copy.deepcopy(options)  # It adds options of its own.
    found = datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True, storage_options=own
    )
    # Its arrays of NumPy fail at columns with nulls, such as that of written batches.
    for _ in found.with_format("arrow").iter(batch_size=_SHARD_ROWS):
        pass
