"""What small shards cost, beside pyarrow on the same files: a part of ``python -m benchmarks.scaling``.

``python -m benchmarks.small_shards 20000`` measures what has no epoch, of so many shards.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import rlio
from benchmarks.report import table
from rlio.maintenance import compact

__all__ = ["draw", "exponent", "make", "measure", "show"]

#: Rows of a shard.
ROWS = 10
#: Name of the work -> what the page calls it.
WORK = {
    "pyarrow": "pyarrow opens and reads each file",
    "stored": "first shuffled batch, default store",
    "shuffled": 'first shuffled batch, cache="none"',
    "epoch": 'shuffled epoch, cache="none"',
    "ordered": 'epoch in order, cache="none"',
    "verify": "verify",
    "compact": "compact",
}


def make(root: Path, shards: int, writers: int) -> None:
    """Write shards of rows like those of HalfCheetah, in episodes of 1,000 steps."""
    rng = np.random.default_rng(0)
    rows = shards // writers * ROWS
    step = np.arange(rows)
    for number in range(writers):
        obs = rng.standard_normal((rows + 1, 17)).astype(np.float32)
        batch = rlio.SampleBatch(
            obs=obs[:-1],
            new_obs=obs[1:],
            actions=rng.standard_normal((rows, 6)).astype(np.float32),
            rewards=rng.standard_normal(rows).astype(np.float32),
            terminateds=np.zeros(rows, bool),
            truncateds=step % 1000 == 999,
            eps_id=step // 1000,
            t=step % 1000,
        )
        name = f"w{number:05d}-{number:08x}"
        with rlio.ParquetWriter(root, writer_id=name, spool=None, roll=rlio.Roll(max_rows=ROWS)) as writer:
            writer.write(batch)


def measure(root: str, rounds: int, names: Sequence[str] = tuple(WORK)) -> dict[str, dict[str, float]]:
    """Seconds on the clock and of the processor of works, which take turns; the least of the rounds."""
    files = sorted(Path(root).glob("data/*/*.parquet"))

    def first(**options: Any) -> None:
        with rlio.DatasetReader(root, batch_size=256, shuffle=True, seed=0, epochs=1, **options) as reader:
            reader.sample()

    def epoch(**options: Any) -> None:
        with rlio.DatasetReader(root, batch_size=256, epochs=1, cache="none", **options) as reader:
            for _ in reader:
                pass

    work: dict[str, Callable[[Path], object]] = {
        "pyarrow": lambda copy: [pq.ParquetFile(file).read() for file in files],
        "stored": lambda copy: first(),
        "shuffled": lambda copy: first(cache="none"),
        "epoch": lambda copy: epoch(shuffle=True, seed=0),
        "ordered": lambda copy: epoch(),
        "verify": lambda copy: rlio.verify(root),
        "compact": lambda copy: compact(copy),
    }
    work = {name: work[name] for name in names}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    first(cache="none")  # Imports what the first call imports.
    for _ in range(rounds):
        for name, call in work.items():
            with tempfile.TemporaryDirectory(dir=Path(root).parent) as folder:
                copy = Path(folder) / "copy"
                if name == "compact":  # It adds shards.
                    shutil.copytree(root, copy)
                begun, used = time.perf_counter(), time.process_time()
                call(copy)
                found[name].append((time.perf_counter() - begun, time.process_time() - used))
    return {
        name: {"seconds": min(clock for clock, _ in each), "cpu": min(cpu for _, cpu in each)}
        for name, each in found.items()
    }


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the line nearest to the logarithms of (shards, time): 1 is linear."""
    x, y = (np.log(values) for values in zip(*points, strict=True))
    return float(np.polyfit(x, y, 1)[0]) if len(points) > 1 else math.nan


def _curves(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    return {name: [(each["shards"], each["values"][name]["cpu"]) for each in runs] for name in WORK}


def show(runs: Sequence[Mapping[str, Any]]) -> str:
    """The table: processor time a shard, by number of shards, and how it grows."""
    rows = []
    if not runs:
        return ""
    for name, points in _curves(runs).items():
        cells = [f"{1e3 * cpu / shards:.2f}" for shards, cpu in points]
        beside = [cpu / each["values"]["pyarrow"]["cpu"] for (_, cpu), each in zip(points, runs, strict=True)]
        rows.append([WORK[name], *cells, f"{beside[-1]:.2f}", f"{exponent(points):.2f}"])
    headings = ["milliseconds of processor a shard", *(f"{each['shards']:,} shards" for each in runs)]
    return table([*headings, "beside pyarrow", "exponent"], rows, "l" + "r" * (len(runs) + 2))


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the curves.

    Raises:
        ImportError: matplotlib, extra ``plot``, is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Equal figures give equal files.
    with plt.rc_context({"svg.hashsalt": "small shards", "font.size": 9}):
        figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
        for name, points in _curves(runs).items():
            style = "k--" if name == "pyarrow" else "o-"
            axes.loglog(*zip(*points, strict=True), style, label=f"{WORK[name]}: n^{exponent(points):.2f}")
        axes.set_xlabel("shards of ten rows")
        axes.set_ylabel("seconds of processor")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main(shards: int) -> None:
    """Show what the first shuffled batches of so many shards cost, and `verify` and `compact`."""
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "root", shards, 5)
        found = measure(str(Path(folder) / "root"), 2, ("pyarrow", "stored", "shuffled", "verify", "compact"))
    for name, values in found.items():
        beside = values["cpu"] / found["pyarrow"]["cpu"]
        sys.stdout.write(f"{WORK[name]}: {1e3 * values['cpu'] / shards:.2f} ms a shard, {beside:.2f}x\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
