"""`Dataset.episodes` and `Dataset.info`: the first of a data set, and the next, beside pyarrow.

Pyarrow reads the narrow columns of the same files.
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

import rlio
from benchmarks.data import Columns
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, Taken, interleave

__all__ = ["run"]

_LENGTH = 200
_SHARD_ROWS = 100
_BATCH_ROWS = 100_000
_FIRST, _NEXT, _READ = "rlio, first", "rlio, next", "pyarrow reads the narrow columns"
_NARROW = ["eps_id", "t", "rewards", "terminateds", "truncateds"]
# A round opens every shard three times.
_ROUNDS = 5


def run(setup: Setup) -> Section:
    """Seconds of `Dataset.episodes` and `Dataset.info`: with an empty cache folder, and with a kept table."""
    rows = setup.scale.rows
    section = Section(
        "episodes", f"The table of {rows // _LENGTH:,} episodes of {rows:,} synthetic rows", unit="call"
    )
    for roll in (None, rlio.Roll(max_rows=_SHARD_ROWS)):
        root = setup.scratch / "episodes"
        with rlio.ParquetWriter(root, spool=None, **({} if roll is None else {"roll": roll})) as writer:
            for batch in _batches(rows):
                writer.write(rlio.SampleBatch(batch))
        for name, look in (("table", lambda data: data.episodes), ("info", lambda data: data.info())):
            _measure(section, name, look, root, setup)
        shutil.rmtree(root)
    return section


def _batches(rows: int) -> Iterator[Columns]:
    """227 bytes a row, as HalfCheetah has."""
    random = np.random.default_rng(0)
    for start in range(0, rows, _BATCH_ROWS):
        row = np.arange(start, min(rows, start + _BATCH_ROWS))
        is_last = row % _LENGTH == _LENGTH - 1
        yield {
            "obs": random.normal(size=(len(row), 17)).astype(np.float32),
            "actions": random.normal(size=(len(row), 6)).astype(np.float32),
            "rewards": random.normal(size=len(row)),
            "terminateds": is_last & (row // _LENGTH % 2 == 0),
            "truncateds": is_last & (row // _LENGTH % 2 == 1),
            "eps_id": row // _LENGTH,
            "t": row % _LENGTH,
        }


def _measure(
    section: Section, name: str, look: Callable[[rlio.Dataset], object], root: Path, setup: Setup
) -> None:
    opened = [rlio.open_dataset(root)]
    files = [file.removeprefix("file://") for file in opened[0].files()]
    kept = setup.scratch / "kept"

    def reopen(*, is_first: bool) -> None:
        """A data set that is open keeps its table."""
        if is_first:
            shutil.rmtree(kept, ignore_errors=True)
        opened[0] = rlio.open_dataset(root)
        if not is_first:
            opened[0].refresh().episodes  # noqa: B018  # It leaves the file.

    def read() -> None:
        for file in files:
            pq.ParquetFile(file).read(_NARROW, use_threads=False)

    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(kept)
    try:
        taken = interleave(
            [
                Case(_FIRST, lambda: look(opened[0]), 1, before=partial(reopen, is_first=True), once=True),
                Case(_NEXT, lambda: look(opened[0]), 1, before=partial(reopen, is_first=False), once=True),
                Case(_READ, read, 1, once=True),
            ],
            rounds=_ROUNDS,
            seconds=0,
        )
        if len(opened[0].episodes) != setup.scale.rows // _LENGTH:
            raise ValueError("the table has other episodes")
    finally:
        del os.environ["XDG_CACHE_HOME"]
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before
    case = f"{name}, {len(files):,} shard{'s' if len(files) > 1 else ''}"
    section.add_taken(case, taken)
    _ratio(section, f"the first {case}", "of the processor time of pyarrow", taken, _FIRST, _READ, 2)
    _ratio(section, f"the next {case}", "of that of the first", taken, _NEXT, _FIRST, 0.1)


def _ratio(
    section: Section, work: str, what: str, taken: dict[str, Taken], ours: str, theirs: str, goal: float
) -> None:
    ratios = [a / b for a, b in zip(taken[ours].cpu, taken[theirs].cpu, strict=True)]
    section.quantity(work, what, statistics.median(ratios), "x", at_most=goal)
