"""Shards a second that one follower takes from a store 30 ms away: ``python -m benchmarks.followers``.

With ``--beside CHECKOUT`` it takes turns with the rlio of another checkout, which also writes the shards: an
earlier version does not read what a later one wrote. Each call is a process of its own. The server (moto) and
the proxy that delays its answers run on the same cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rlio
from benchmarks import object_store

__all__ = ["follow", "main"]

_DELAY = 0.03
#: Rows of a shard -> shards, and their writers.
_SIZES = {2500: (200, 10), 100: (400, 40)}
_OWN = Path(rlio.__file__).resolve().parents[1]

_WRITE = """
import json, sys
checkout, root, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
shards, writers, rows = map(int, sys.argv[4:])
sys.path.insert(0, checkout)
import numpy as np
import rlio
rng = np.random.default_rng(0)
opened = [rlio.ParquetWriter(root, storage_options=options) for _ in range(writers)]
for _ in range(shards // writers):
    for writer in opened:
        obs = rng.random((2, rows, 17), np.float32)
        actions = rng.random((rows, 6), np.float32)
        writer.write(rlio.SampleBatch(obs=obs[0], new_obs=obs[1], actions=actions, rewards=rng.random(rows)))
        writer.flush()
for writer in opened:
    writer.close()
"""

_FOLLOW = """
import json, resource, sys, time
checkout, root, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
shards, writers, rows = map(int, sys.argv[4:])
sys.path.insert(0, checkout)
import rlio
begun, cpu = time.perf_counter(), time.process_time()
if hasattr(rlio, "FollowReader"):
    reader = rlio.FollowReader(root, batch_size=rows, storage_options=options)
else:
    reader = rlio.DatasetReader(root, follow=True, batch_size=rows, storage_options=options)
with reader:
    found = 0
    while found < shards * rows:
        found += len(reader.sample())
took, cpu = time.perf_counter() - begun, time.process_time() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([shards / took, 1000 * cpu / shards, peak, rlio.__file__]))
"""


def follow(
    checkouts: Sequence[Path], *, rows: int, shards: int, writers: int, rounds: int
) -> dict[Path, list[list[float]]]:
    """Follow a data set with each checkout in turns; the last one writes it.

    Returns:
        Checkout -> of each round: shards a second, milliseconds of processor a shard, MB of the process at
        its peak, and requests.

    Raises:
        Unavailable: moto or s3fs is not installed.
    """
    sizes = list(map(str, (shards, writers, rows)))
    found: dict[Path, list[list[float]]] = {checkout: [] for checkout in checkouts}
    with object_store.server([]) as (root, options):
        _run(_WRITE, checkouts[-1], root, options, sizes)
        with object_store.delayed(options, _DELAY) as (far, traffic):
            for number in range(rounds):
                for checkout in checkouts if number % 2 else reversed(checkouts):
                    found[checkout].append(_followed(checkout, root, far, sizes, traffic))
    return found


def _followed(
    checkout: Path,
    root: str,
    options: dict[str, Any],
    sizes: list[str],
    traffic: Callable[[], object_store.Traffic],
) -> list[float]:
    traffic()
    *numbers, file = json.loads(_run(_FOLLOW, checkout, root, options, sizes).splitlines()[-1])
    if not Path(file).resolve().is_relative_to(checkout):
        raise RuntimeError(f"found {file} instead of the rlio of {checkout}")
    return [*numbers, traffic().requests]


def _run(program: str, checkout: Path, root: str, options: dict[str, Any], sizes: list[str]) -> str:
    command = [sys.executable, "-c", program, str(checkout), root, json.dumps(options), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    if done.returncode:
        raise RuntimeError(f"a process ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.followers", description=__doc__)
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another checkout of rlio")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which the median is shown")
    parser.add_argument("--shards", type=int, help="shards of each size (200 and 400)")
    options = parser.parse_args(arguments)
    checkouts = [_OWN, *([] if options.beside is None else [options.beside.resolve()])]
    print("| rows of a shard | rlio | shards/s | ms of processor a shard | MB | requests | times as fast |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for rows, (shards, writers) in _SIZES.items():
        shards = options.shards or shards
        found = follow(
            checkouts, rows=rows, shards=shards, writers=min(writers, shards), rounds=options.rounds
        )
        for checkout, rounds in found.items():
            rate, cpu, peak, requests = map(statistics.median, zip(*rounds, strict=True))
            ratios = [ours[0] / theirs[0] for ours, theirs in zip(found[_OWN], rounds, strict=True)]
            name = "this" if checkout == _OWN else checkout.name
            times = "" if checkout == _OWN else f"{statistics.median(ratios):.1f}x"
            print(
                f"| {rows:,} | {name} | {rate:.1f} | {cpu:.1f} | {peak:.0f} | {requests:.0f} | {times} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
