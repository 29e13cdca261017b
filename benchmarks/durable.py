"""What the write-ahead log costs: sustained writing with and without it, beside RLlib's JsonWriter.

Run:  python benchmarks/durable.py   (needs the extra mujoco; compares with RLlib if ray is there)

Every round runs each contender once, one after the other, in this process; figures are medians over the
rounds, ratios are medians of the rounds' own ratios. The recorded steps are written several times over, so
that shards are ended and published while rows arrive. `write()` is also timed call by call: flat out, where
it waits for the encoder now and then, and at a tenth of that rate, where all that it can wait for is the log.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from first_light import BATCH_ROWS, RLlib, record, slices, timed

import rlio


class Ours:
    """ParquetWriter, with or without its log."""

    def __init__(self, name: str, folder: Path, batches: list[rlio.SampleBatch], **options: Any) -> None:
        self.name = name
        self.folder = folder / name.replace(" ", "-")
        self.batches = batches
        self.options = options

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self) -> None:
        with rlio.ParquetWriter(self.folder, **self.options) as writer:
            for batch in self.batches:
                writer.write(batch)

    def pauses(self, *, rows_per_s: float | None) -> np.ndarray:
        """Milliseconds that each `write()` took; at a given rate, or as fast as it goes."""
        took = []
        with rlio.ParquetWriter(self.folder, **self.options) as writer:
            begun = time.perf_counter()
            for number, batch in enumerate(self.batches):
                if rows_per_s is not None:
                    due = begun + number * BATCH_ROWS / rows_per_s
                    time.sleep(max(due - time.perf_counter(), 0.0))
                start = time.perf_counter()
                writer.write(batch)
                took.append(time.perf_counter() - start)
        return 1000 * np.array(took)


def speeds(contenders: list[Any], rounds: int) -> dict[str, list[float]]:
    """Nanoseconds a row of each contender in each round; the first round only warms up."""
    found: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for round_number in range(rounds + 1):
        for contender in contenders:
            contender.clear()
            os.sync()  # What one contender left to the kernel to write must not slow down the next.
            seconds = timed(contender.write)
            if round_number:
                found[contender.name].append(1e9 * seconds / (len(contender.batches) * BATCH_ROWS))
            contender.clear()
    return found


def ratio(found: dict[str, list[float]], slower: str, faster: str) -> float:
    """Median over the rounds of how many times as fast one was as the other."""
    return statistics.median(a / b for a, b in zip(found[slower], found[faster], strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=500_000, help="steps to record (default 500,000)")
    parser.add_argument("--times", type=int, default=4, help="how often they are written (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    plain = slices(record(options.rows))
    batches = [rlio.SampleBatch(batch) for batch in plain] * options.times
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        logged, unlogged = Ours("log", folder, batches), Ours("no log", folder, batches, spool=None)
        contenders: list[Any] = [logged, unlogged]
        try:
            contenders.append(RLlib(folder, plain))
        except ImportError as error:
            print(f"without RLlib ({error}): pip install 'rlio[ray]' dm-tree scipy pyyaml tensorboardX")
        found = speeds(contenders, options.rounds)
        report: dict[str, Any] = {
            "rows": len(batches) * BATCH_ROWS,
            "rows_per_s": {name: 1e9 / statistics.median(values) for name, values in found.items()},
            "log_to_no_log": ratio(found, "no log", "log"),
        }
        if len(contenders) > 2:
            report["log_to_rllib"] = ratio(found, "RLlib", "log")
            report["no_log_to_rllib"] = ratio(found, "RLlib", "no log")
        for title, rate in (("flat out", None), ("at a tenth", report["rows_per_s"]["log"] / 10)):
            for contender in (logged, unlogged):
                contender.clear()
                pauses = contender.pauses(rows_per_s=rate)
                contender.clear()
                report[f"write() ms, {title}, {contender.name}"] = {
                    "p50": float(np.percentile(pauses, 50)),
                    "p99": float(np.percentile(pauses, 99)),
                    "max": float(pauses.max()),
                }
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    print(f"HalfCheetah-v5, {report['rows']:,} rows in batches of {BATCH_ROWS:,}; medians")
    for name, rate in report["rows_per_s"].items():
        print(f"  {name:<8} {rate:>12,.0f} rows/s")
    for key, text in (
        ("log_to_no_log", "with the log / without it"),
        ("log_to_rllib", "with the log / RLlib"),
        ("no_log_to_rllib", "without the log / RLlib"),
    ):
        if key in report:
            print(f"  {text:<26} {report[key]:.2f}x")
    for key, figures in report.items():
        if key.startswith("write()"):
            print(f"  {key:<36} " + "  ".join(f"{name} {value:.2f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
