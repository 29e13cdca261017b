"""Writing and in-order reading, beside RLlib's JsonWriter and JsonReader, on real HalfCheetah-v5 steps.

Run:  python benchmarks/first_light.py   (needs the extra mujoco; compares with RLlib if ray is there)

Every round runs each contender once, one after the other, in this process; figures are medians over
the rounds, ratios are medians of the rounds' own ratios: a slow moment of the machine hits both sides.
RLlib is used as its users run it: obs and new_obs compressed, one file of 64 MiB.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import rlio

BATCH_ROWS = 1000


def record(rows: int) -> dict[str, np.ndarray]:
    """Real steps of HalfCheetah-v5 under random actions, as the float32 columns that learners store."""
    import gymnasium as gym

    env = gym.make("HalfCheetah-v5")
    env.action_space.seed(0)
    rng = np.random.default_rng(0)
    columns = {
        "obs": np.empty((rows, 17), np.float32),
        "new_obs": np.empty((rows, 17), np.float32),
        "actions": np.empty((rows, 6), np.float32),
        "rewards": np.empty(rows, np.float32),
        "terminateds": np.empty(rows, bool),
        "truncateds": np.empty(rows, bool),
        "eps_id": np.empty(rows, np.int64),
        "t": np.empty(rows, np.int64),
    }
    obs, _ = env.reset(seed=0)
    episode, t = int(rng.integers(2**62)), 0
    for row in range(rows):
        action = env.action_space.sample()
        new_obs, reward, terminated, truncated, _ = env.step(action)
        values = (obs, new_obs, action, reward, terminated, truncated, episode, t)
        for column, value in zip(columns.values(), values, strict=True):
            column[row] = value
        obs, t = new_obs, t + 1
        if terminated or truncated:
            obs, _ = env.reset()
            episode, t = int(rng.integers(2**62)), 0
    return columns


def slices(columns: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The columns cut into batches of 1,000 rows."""
    rows = len(columns["rewards"]) // BATCH_ROWS * BATCH_ROWS
    return [
        {name: values[start : start + BATCH_ROWS] for name, values in columns.items()}
        for start in range(0, rows, BATCH_ROWS)
    ]


class Rlio:
    """rlio's writer and reader with their defaults."""

    name = "rlio"

    def __init__(self, folder: Path, batches: list[dict[str, np.ndarray]]) -> None:
        self.folder = folder / self.name
        self.batch_rows = len(batches[0]["rewards"])
        self.batches = [rlio.SampleBatch(batch) for batch in batches]

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self) -> None:
        with rlio.ParquetWriter(self.folder) as writer:
            for batch in self.batches:
                writer.write(batch)

    def read(self) -> int:
        with rlio.DatasetReader(self.folder, batch_size=self.batch_rows, epochs=1) as reader:
            return sum(len(batch["new_obs"]) for batch in reader)

    def bytes(self) -> int:
        return rlio.open_dataset(self.folder).bytes()


class RLlib:
    """RLlib's old-stack JSON, written and read one record a batch."""

    name = "RLlib"

    def __init__(self, folder: Path, batches: list[dict[str, np.ndarray]]) -> None:
        from ray.rllib.offline.json_reader import JsonReader
        from ray.rllib.offline.json_writer import JsonWriter
        from ray.rllib.policy.sample_batch import SampleBatch

        for name in ("ray", "ray.rllib"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self.folder = folder / self.name
        self.reader, self.writer = JsonReader, JsonWriter
        self.batches = [SampleBatch(batch) for batch in batches]

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, **options: Any) -> None:
        writer = self.writer(str(self.folder), **options)
        for batch in self.batches:
            writer.write(batch)
        # Neither has a close().
        writer.cur_file.close()

    def read(self) -> int:
        reader = self.reader(str(self.folder))
        rows = sum(len(reader.next()["new_obs"]) for _ in self.batches)
        reader.cur_file.close()
        return rows

    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.iterdir())


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(contenders: list[Any], rows: int, rounds: int) -> dict[str, Any]:
    """Interleaved rounds of every contender; the first round only warms up."""
    seconds: dict[str, list[float]] = {}
    for round_number in range(rounds + 1):
        for contender in contenders:
            contender.clear()  # What was written before is removed outside of the measurement.
            for work in ("write", "read"):
                os.sync()  # What one contender left to the kernel to write must not slow down the next.
                took = timed(getattr(contender, work))
                if round_number:
                    seconds.setdefault(f"{contender.name} {work}", []).append(took)
    files = [pq.ParquetFile(file) for file in rlio.open_dataset(contenders[0].folder).files()]
    decode = statistics.median(
        timed(lambda: [file.read(use_threads=False) for file in files]) for _ in range(rounds)
    )
    report: dict[str, Any] = {
        "rows": rows,
        "raw_bytes_per_row": sum(v.nbytes for v in contenders[0].batches[0].values()) / BATCH_ROWS,
        "parquet_decode_rows_per_s": rows / decode,
    }
    for contender in contenders:
        report[contender.name] = {
            "write_rows_per_s": rows / statistics.median(seconds[f"{contender.name} write"]),
            "read_rows_per_s": rows / statistics.median(seconds[f"{contender.name} read"]),
            "bytes_per_row": contender.bytes() / rows,
        }
    for work in ("write", "read"):
        if len(contenders) > 1:
            pairs = zip(seconds[f"RLlib {work}"], seconds[f"rlio {work}"], strict=True)
            report[f"{work}_ratio"] = statistics.median(theirs / ours for theirs, ours in pairs)
    return report


def show(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"HalfCheetah-v5, {report['rows']:,} rows of {report['raw_bytes_per_row']:.0f} bytes, "
        f"batches of {BATCH_ROWS:,}"
    )
    for heading in ("", "write rows/s", "in-order read rows/s", "bytes a row"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("rlio", "RLlib"):
        if name in report:
            figures = report[name]
            table.add_row(
                name,
                f"{figures['write_rows_per_s']:,.0f}",
                f"{figures['read_rows_per_s']:,.0f}",
                f"{figures['bytes_per_row']:.1f}",
            )
    if "write_ratio" in report:
        table.add_row("ratio", f"{report['write_ratio']:.1f}x", f"{report['read_ratio']:.1f}x", "")
    table.add_row("bound: pyarrow decodes the file", "", f"{report['parquet_decode_rows_per_s']:,.0f}", "")
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=500_000, help="steps to record (default 500,000)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    batches = slices(record(options.rows))
    with tempfile.TemporaryDirectory() as folder:
        contenders: list[Any] = [Rlio(Path(folder), batches)]
        try:
            contenders.append(RLlib(Path(folder), batches))
        except ImportError as error:
            print(f"without RLlib ({error}): pip install 'rlio[ray]' dm-tree scipy pyyaml tensorboardX")
        report = measure(contenders, len(batches) * BATCH_ROWS, options.rounds)
    show(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
