"""Rows of different lengths: a column of tokens, written and read, beside pyarrow with the same lists.

pyarrow writes a file with its defaults, and gives each row of a batch as an array. Goals are of processor
time.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

import rlio
from benchmarks import machine
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, interleave

__all__ = ["run"]

_MEAN = 400
_BATCHES = 8


def run(setup: Setup) -> Section:
    """Write and read the same lists in two ways."""
    rows = max(setup.scale.recorded_rows // 8, 80)
    batches = _tokens(rows)
    count = sum(len(batch.values) for batch in batches)
    section = Section("ragged", f"Rows of different lengths: {rows:,} rows, {count:,} tokens of int32")
    own, other = setup.scratch / "ragged", setup.scratch / "ragged-pyarrow"
    writes = [
        Case("rlio", partial(_write, own, batches), rows, before=partial(_clear, own), once=True),
        Case(
            "pyarrow", partial(_write_arrow, other, batches), rows, before=partial(_clear, other), once=True
        ),
    ]
    section.add_taken("write tokens", interleave(writes, rounds=setup.scale.rounds, seconds=0))
    reads = [
        Case("rlio", partial(_checked, _read, own, count), rows, once=True),
        Case("pyarrow", partial(_checked, _read_arrow, other, count), rows, once=True),
    ]
    section.add_taken("read tokens", interleave(reads, rounds=setup.scale.rounds, seconds=0))
    for case in ("write tokens", "read tokens"):
        ours, theirs = section.find(case, "rlio"), section.find(case, "pyarrow")
        assert ours is not None
        assert theirs is not None
        value = statistics.median(ours.cpu) / max(statistics.median(theirs.cpu), 1e-12)
        section.quantity(case, "pyarrow", value, "x", at_most=1 / 0.4)
    section.quantity(
        "bytes of tokens",
        "pyarrow",
        machine.folder_bytes(own) / machine.folder_bytes(other),
        "x",
        at_most=1.15,
    )
    _clear(own)
    _clear(other)
    return section


def _tokens(rows: int) -> list[rlio.Ragged]:
    """Tokens of batches: few are frequent, as the words of a language are."""
    rng = np.random.default_rng(0)
    found = []
    for part in np.array_split(np.arange(rows), _BATCHES):
        ends = np.cumsum([0, *rng.integers(0, 2 * _MEAN, len(part))])
        found.append(rlio.Ragged(np.minimum(rng.zipf(1.3, ends[-1]), 50_000).astype(np.int32), ends))
    return found


def _write(folder: Path, batches: list[rlio.Ragged]) -> None:
    with rlio.ParquetWriter(folder) as writer:
        for tokens in batches:
            writer.write(rlio.SampleBatch(tokens=tokens))


def _read(folder: Path) -> int:
    with rlio.read(folder, epochs=1, shuffle=False, cache="none", batch_size=4096) as reader:
        return sum(len(rlio.Ragged.of(batch["tokens"]).values) for batch in reader)


def _write_arrow(folder: Path, batches: list[rlio.Ragged]) -> None:
    folder.mkdir(parents=True)
    kind = pa.schema([("tokens", pa.list_(pa.int32()))])
    with pq.ParquetWriter(folder / "tokens.parquet", kind) as writer:
        for tokens in batches:
            lists = pa.ListArray.from_arrays(tokens.offsets.astype(np.int32), tokens.values)
            writer.write_table(pa.table([lists], schema=kind))


def _read_arrow(folder: Path) -> int:
    count = 0
    for batch in pq.ParquetFile(folder / "tokens.parquet").iter_batches(4096):
        rows: NDArray[np.object_] = batch.column("tokens").to_numpy(zero_copy_only=False)
        count += sum(map(len, rows))
    return count


def _checked(read: Callable[[Path], int], folder: Path, expected: int) -> None:
    if (found := read(folder)) != expected:
        raise ValueError(f"read {found} tokens of {expected}")


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
