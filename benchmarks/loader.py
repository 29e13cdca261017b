"""Measures a DataLoader without and with a worker.

Run:  python -m benchmarks.loader [--method spawn] [--data FOLDER]

Rounds alternate, so that a slow moment of the machine hits all of them. With a worker, a batch takes
processor time in two processes. Both are shown, since wall time depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import rlio
import rlio.torch
from benchmarks.__main__ import default_data
from benchmarks.data import half_cheetah

__all__ = ["main", "measure"]

SIZE = 256


class Cost(NamedTuple):
    """Of one batch: batches a second, and microseconds of processor time here and in the worker."""

    rate: float
    here: float
    worker: float


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loader", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rows", type=int, default=200_000, help="rows of HalfCheetah (default %(default)s)")
    parser.add_argument("--batches", type=int, default=5000, help="batches of a round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default %(default)s)")
    parser.add_argument("--method", choices=["fork", "spawn"], default="fork", help="how workers start")
    parser.add_argument(
        "--data", type=Path, default=default_data(), help="folder of recordings (default %(default)s)"
    )
    options = parser.parse_args()
    data: Path = options.data.absolute()
    data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=data) as root:
        with rlio.ParquetWriter(root) as writer:
            writer.write(rlio.SampleBatch(half_cheetah(data, options.rows)))
        dataset = rlio.torch.ReplayDataset(root, batch_size=SIZE, shuffle=True, seed=0, cache="memory")
        found: dict[int, list[Cost]] = {0: [], 1: []}
        for _ in range(options.rounds):
            for workers, costs in found.items():
                costs.append(measure(dataset, workers, options.batches, options.method))
    print(f"batches of {SIZE} rows of HalfCheetah-v5; medians of {options.rounds} rounds")
    for workers, costs in found.items():
        rate, here, worker = map(statistics.median, zip(*costs, strict=True))
        print(f"{workers} workers: {rate:,.0f} batches/s; {here:.0f} us here, {worker:.0f} us in the worker")


def measure(dataset: rlio.torch.ReplayDataset, workers: int, batches: int, method: str) -> Cost:
    """Read so many batches; the worker's time includes its start."""
    options: dict[str, Any] = {"multiprocessing_context": method} if workers else {}
    before = _cpu(resource.RUSAGE_CHILDREN)
    with dataset.loader(num_workers=workers, **options) as loader:
        next(loader)
        here, begun = time.process_time(), time.perf_counter()
        for _ in islice(loader, batches):
            pass
        rate = batches / (time.perf_counter() - begun)
        here = time.process_time() - here
    worker = _cpu(resource.RUSAGE_CHILDREN) - before
    return Cost(rate, here / batches * 1e6, worker / batches * 1e6)


def _cpu(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
