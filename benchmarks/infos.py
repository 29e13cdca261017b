"""Infos: speed of recording and reading them, as ratios to the same rows without.

    python -m benchmarks.infos [--rows N]

HalfCheetah-v5 with `RecordEpisodeStatistics`. Processor time of one process, the median of five passes, each
of which takes its turn with the others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym

import rlio

PASSES = 5
KEYS = [f"infos/{key}" for key in ("x_position", "x_velocity", "reward_forward", "reward_ctrl")]
OTHERS = ["obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "eps_id", "t"]
#: What is read: whether the rows have infos, the columns, and whether objects are made.
CASES: dict[str, tuple[bool, list[str] | None, bool]] = {
    "without infos": (False, None, False),
    "infos, as objects": (True, None, True),
    "infos, not looked at": (True, None, False),
    "infos, four keys": (True, [*OTHERS, *KEYS], False),
    "infos not asked for": (True, OTHERS, False),
}


def record(root: Path, rows: int, *, infos: bool) -> None:
    """Record random steps."""
    env: Any = gym.wrappers.RecordEpisodeStatistics(gym.make("HalfCheetah-v5"))
    env.action_space.seed(0)
    with rlio.RecordExperience(env, root, infos=infos) as recorder:
        recorder.reset(seed=0)
        for _ in range(rows):
            _, _, terminated, truncated, _ = recorder.step(env.action_space.sample())
            if terminated or truncated:
                recorder.reset()


def first(roots: dict[bool, Path], case: str, **options: Any) -> float:
    """Seconds until the first batch of 256 rows."""
    has_infos, columns, makes_objects = CASES[case]
    begun = time.process_time()
    with rlio.read(roots[has_infos], columns=columns, batch_size=256, seed=0, **options) as reader:
        batch = reader.sample()
        if makes_objects:
            batch["infos"]
        return time.process_time() - begun


def each(roots: dict[bool, Path], case: str, **options: Any) -> float:
    """Seconds of 30 batches of 1024 rows."""
    has_infos, columns, makes_objects = CASES[case]
    with rlio.read(roots[has_infos], columns=columns, batch_size=1024, seed=0, **options) as reader:
        reader.sample()
        begun = time.process_time()
        for _ in range(30):
            batch = reader.sample()
            if makes_objects:
                batch["infos"]
        return time.process_time() - begun


def ratios(measure: Callable[[str], float], cases: list[str]) -> dict[str, float]:
    """Case -> its median, as a ratio to the first one's; passes of all cases take turns."""
    taken: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(PASSES):
        for case in cases:
            taken[case].append(measure(case))
    base = statistics.median(taken[cases[0]])
    return {case: statistics.median(found) / base for case, found in taken.items()}


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.infos")
    parser.add_argument("--rows", type=int, default=20_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        roots = {infos: Path(folder) / f"infos-{infos}" for infos in (False, True)}
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(PASSES):
            for infos, root in roots.items():
                begun = time.process_time()
                record(root.with_name(f"recorded-{infos}"), rows // PASSES, infos=infos)
                seconds[infos].append(time.process_time() - begun)
        ratio = statistics.median(seconds[True]) / statistics.median(seconds[False])
        for infos, root in roots.items():
            record(root, rows, infos=infos)
        print(f"recording with infos: {ratio:.2f}\n")
        print(f"| | {' | '.join(CASES)} |\n|---|{'---|' * len(CASES)}")
        for name, measure in (("first batch", first), ("each batch", each)):
            for cache, shuffle in (("none", False), ("none", True), ("memory", True)):
                found = ratios(partial(measure, roots, cache=cache, shuffle=shuffle), list(CASES))
                order = "shuffled" if shuffle else "in order"
                shown = " | ".join(f"{ratio:.2f}" for ratio in found.values())
                print(f"| {name}, cache={cache!r}, {order} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
