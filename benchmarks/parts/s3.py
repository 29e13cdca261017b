"""An epoch in order over small shards on an S3 server of this machine, 30 and 50 ms away.

By one reader, and by eight ranks in processes of their own.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import rlio
from benchmarks import object_store
from benchmarks.data import half_cheetah, slices
from benchmarks.results import Line, Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, interleave

__all__ = ["run"]

_SHARD_ROWS = 2500
_SHARDS = 200
_DELAYS = (0.03, 0.05)
_PEERS = ("pyarrow.dataset", "datasets")
_WORLD = 8
_RANKS = f"rlio, {_WORLD} ranks"

# One of the ranks. Every line on stdin is answered, after an epoch, with the rows that it read.
_RANK = """
import json, sys
import rlio
root, options, rank, world, size = json.loads(sys.argv[1])
for _ in sys.stdin:
    how = {"shuffle": False, "cache": "none", "batch_size": size, "shard": (rank, world)}
    with rlio.DatasetReader(root, epochs=1, storage_options=options, **how) as reader:
        print(sum(len(batch) for batch in reader), flush=True)
"""


def run(setup: Setup) -> Section:
    """An epoch of rlio beside pyarrow.dataset with s3fs, and Hugging Face's streaming."""
    shards = min(_SHARDS, max(2, setup.scale.rows // _SHARD_ROWS))
    rows = shards * _SHARD_ROWS
    section = Section(
        "s3", f"S3 (moto): an epoch in order over {shards} shards of {_SHARD_ROWS:,} rows of HalfCheetah-v5"
    )
    work = "an epoch in order on S3, {:.0f} ms a request"
    try:
        with object_store.server([]) as (root, options):
            parts = slices(half_cheetah(setup.data, min(rows, setup.scale.rows)), _SHARD_ROWS)
            with rlio.ParquetWriter(root, storage_options=options) as writer:
                for number in range(shards):  # A small recording is repeated.
                    writer.write(rlio.SampleBatch(parts[number % len(parts)]))
                    writer.flush()
            for delay in _DELAYS:
                with object_store.delayed(options, delay) as (far, traffic):
                    _measure(section, setup, root, far, traffic, rows=rows, work=work.format(1000 * delay))
    except object_store.Unavailable as error:
        section.absent |= {name: str(error) for name in ("rlio", *_PEERS)}
        for delay in _DELAYS:
            section.missing(work.format(1000 * delay), beside=_PEERS[0], at_least=1, names=["rlio"])
    return section


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
    calls: dict[str, Callable[[], object]] = {"rlio": lambda: _rlio(root, options)}
    calls["pyarrow.dataset"] = lambda: _pyarrow(root, options)
    if importlib.util.find_spec("datasets") is None:
        section.absent["datasets"] = "not installed"
    else:
        calls["datasets"] = lambda: _hugging_face(root, options)
    with _ranks(root, options, rows) as calls[_RANKS]:
        moved = {}
        for name, call in calls.items():
            traffic()
            call()
            moved[name] = traffic()
            section.facts[f"{work}: requests of {name}"] = moved[name].requests
            section.facts[f"{work}: MB of {name}"] = moved[name].bytes / 1e6
        cases = [Case(name, call, rows, once=True) for name, call in calls.items()]
        taken = interleave(cases, rounds=min(setup.scale.rounds, 3), seconds=0)
    taken[_RANKS].cpu.clear()  # It is that of other processes.
    section.add_taken(work, taken)
    section.compare(work, case=work, ours="rlio", beside="pyarrow.dataset", at_least=1)
    if "datasets" in calls:
        section.compare(work, case=work, ours="rlio", beside="datasets")
    section.compare(f"{work}, {_WORLD} ranks", case=work, ours=_RANKS, beside="rlio", at_least=1)
    more = moved[_RANKS].bytes / moved["rlio"].bytes
    section.lines.append(
        Line(f"{work}: bytes of {_WORLD} ranks together", "one reader's", more, goal=1.3, sense="<=")
    )


@contextmanager
def _ranks(root: str, options: dict[str, Any], rows: int) -> Iterator[Callable[[], None]]:
    """A call in which the ranks, each a process that stays, read one epoch together."""
    with ExitStack() as stack:
        running = []
        for rank in range(_WORLD):
            about = json.dumps([root, options, rank, _WORLD, _SHARD_ROWS])
            command = [sys.executable, "-c", _RANK, about]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            running.append(stack.enter_context(child))  # Closes its pipes, which ends it, and waits.

        def epoch() -> None:
            for child in running:
                assert child.stdin is not None
                child.stdin.write("\n")
                child.stdin.flush()
            read = [int(child.stdout.readline()) for child in running if child.stdout is not None]
            if sum(read) != rows:
                raise RuntimeError(f"the ranks read {read} rows, expected {rows} in all")

        yield epoch


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
