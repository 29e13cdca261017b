"""Memory of a reader without a store, over small and large files of other libraries, and over rlio's own.

Run:  python -m benchmarks.foreign_memory   (writes 2 GB a layout; --gigabytes 0.5 for a first look)

Each reading is a process of its own, whose peak of resident memory is counted, that of starting included.
Both data sets have files of about 250 MB, because chunks and row groups are parts of a file. Linux only:
/proc tells the peak.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import rlio
from benchmarks.layouts import LAYOUTS, Shape, rows_in

_KINDS = ("rlio", "d4rl", "robomimic", "rlds", "parquet", "arrow", "npz", "zarr")
_EPISODE, _WIDTH = 500, 96
_FILE_BYTES = 250_000_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each layout and size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foreign_memory", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the larger data set")
    parser.add_argument(
        "--small", type=float, default=0.25, help="that of the smaller one, which is one file"
    )
    parser.add_argument("--only", nargs="+", choices=_KINDS, default=_KINDS, help="some layouts")
    options = parser.parse_args(arguments)
    print("| layout | GB | rows | MB at most, in order | shuffled |\n| --- | ---: | ---: | ---: | ---: |")
    for kind in options.only:
        for size in (options.small, options.gigabytes):
            with tempfile.TemporaryDirectory() as folder:
                rows, stored = _write(kind, Path(folder), size * 1e9)
                peaks = [_peak(folder, rows, shuffle) for shuffle in (False, True)]
            print(f"| {kind} | {stored / 1e9:.2f} | {rows:,} | {peaks[0]:.0f} | {peaks[1]:.0f} |", flush=True)


def _write(kind: str, folder: Path, size: float) -> tuple[int, int]:
    """Write a data set; gives its rows and bytes."""
    count = max(1, round(size / _FILE_BYTES))
    rows = int(size / count / (4 * (_WIDTH + 6))) // _EPISODE * _EPISODE
    shape = Shape(rows, _EPISODE, _WIDTH)
    stored = 0
    for path, content in LAYOUTS[kind](shape, count).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        stored += len(content)
    return rows_in(kind, shape, count), stored


def _peak(folder: str, rows: int, shuffle: bool) -> float:
    """MB of the peak of a process that reads an epoch."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_read, args=(theirs, folder, rows, shuffle))
    child.start()
    theirs.close()
    peak: float = ours.recv()
    child.join()
    return peak


def _read(answer: Connection, folder: str, rows: int, shuffle: bool) -> None:
    seed = 0 if shuffle else None
    with rlio.read(folder, epochs=1, shuffle=shuffle, seed=seed, cache="none", batch_size=256) as reader:
        if (found := sum(len(batch) for batch in reader)) != rows:
            raise ValueError(f"read {found} rows of {rows}")
    status = Path("/proc/self/status").read_text()
    peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    answer.send(int(peak) / 1000)


if __name__ == "__main__":
    main()
