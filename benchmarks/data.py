"""Real recordings, made once and kept: HalfCheetah-v5 as vectors, ALE/Pong-v5 as stacks of frames.

Actions are random: what they are changes neither sizes nor dtypes, and little of how well rows compress.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rlio
from benchmarks.first_light import record

__all__ = ["Columns", "Pong", "episode_slices", "half_cheetah", "pong", "slices", "write_dataset"]

Columns = dict[str, NDArray[Any]]

#: Frames of a stack, 84 x 84 pixels each: what `gymnasium.wrappers` and RLlib make of Atari games.
DEPTH = 4
# Of Pong.
_ACTIONS = 6


def half_cheetah(folder: Path, rows: int) -> Columns:
    """Steps of HalfCheetah-v5 in 8 columns, 182 bytes a row."""
    return _kept(folder / f"halfcheetah-{rows}", lambda: record(rows), f"{rows:,} steps of HalfCheetah-v5")


@dataclass(frozen=True)
class Pong:
    """Steps of Pong; stacks are put together of single frames where they are asked for.

    Attributes:
        frames: Shape (n, 84, 84) uint8: for each episode its first stack, then the newest frame of each step.
        first: For each row, the frame with which its ``obs`` begins; its ``new_obs`` begins one later.
        columns: The other columns.
    """

    frames: NDArray[np.uint8]
    first: NDArray[np.int64]
    columns: Columns

    def __len__(self) -> int:
        return len(self.first)

    def rows(self, start: int, stop: int, *, last_axis: bool = False) -> Columns:
        """Rows ``start`` to ``stop`` with their stacks, shape (4, 84, 84), or (84, 84, 4)."""
        windows = np.lib.stride_tricks.sliding_window_view(self.frames, DEPTH, axis=0)  # (n, 84, 84, 4)
        if not last_axis:
            windows = np.moveaxis(windows, -1, 1)
        at = self.first[start:stop]
        stacks = {"obs": np.ascontiguousarray(windows[at]), "new_obs": np.ascontiguousarray(windows[at + 1])}
        return stacks | {name: values[start:stop] for name, values in self.columns.items()}

    def batches(self, rows: int, size: int, *, last_axis: bool = False) -> Iterator[Columns]:
        """The first ``rows`` rows in batches."""
        for start in range(0, rows, size):
            yield self.rows(start, min(start + size, rows), last_axis=last_axis)


def pong(folder: Path, rows: int) -> Pong:
    """Steps of ALE/Pong-v5 in grey, every fourth frame kept, in stacks of four."""
    columns = _kept(folder / f"pong-{rows}", lambda: _play_pong(rows), f"{rows:,} steps of ALE/Pong-v5")
    return Pong(columns.pop("frames"), columns.pop("first"), columns)


def _play_pong(rows: int) -> Columns:
    from ale_py.vector_env import AtariVectorEnv
    from gymnasium.vector import AutoresetMode

    env = AtariVectorEnv("pong", num_envs=1, autoreset_mode=AutoresetMode.SAME_STEP)
    rng = np.random.default_rng(0)
    columns: Columns = {
        "actions": rng.integers(0, _ACTIONS, rows),
        "rewards": np.empty(rows, np.float32),
        "terminateds": np.empty(rows, bool),
        "truncateds": np.empty(rows, bool),
        "eps_id": np.empty(rows, np.int64),
        "t": np.empty(rows, np.int64),
        "first": np.empty(rows, np.int64),
    }
    frames = list(env.reset(seed=0)[0][0].copy())
    episode, t = int(rng.integers(2**62)), 0
    for row in range(rows):
        obs, reward, terminated, truncated, infos = env.step(columns["actions"][row : row + 1])
        ended = bool(terminated[0] or truncated[0])
        columns["first"][row] = len(frames) - DEPTH
        frames.append((infos["final_obs"] if ended else obs)[0, -1].copy())
        values = (reward[0], terminated[0], truncated[0], episode, t)
        for name, value in zip(("rewards", "terminateds", "truncateds", "eps_id", "t"), values, strict=True):
            columns[name][row] = value
        t += 1
        if ended:
            frames.extend(obs[0].copy())
            episode, t = int(rng.integers(2**62)), 0
    env.close()
    return columns | {"frames": np.stack(frames)}


def _kept(folder: Path, make: Any, what: str) -> Columns:
    """The arrays in a folder, which is made if it is not there."""
    if not folder.is_dir():
        print(f"recording {what} into {folder}, once", file=sys.stderr, flush=True)
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        # MuJoCo writes its warnings into a file where it is run.
        with contextlib.chdir(unfinished):
            recorded = make()
        for name, values in recorded.items():
            np.save(unfinished / f"{name}.npy", values)
        unfinished.rename(folder)
    return {file.stem: np.load(file) for file in sorted(folder.glob("*.npy"))}


def slices(columns: Mapping[str, NDArray[Any]], size: int) -> list[Columns]:
    """The columns in batches of ``size`` rows; the last one may be short."""
    rows = len(next(iter(columns.values())))
    return [
        {name: values[start : start + size] for name, values in columns.items()}
        for start in range(0, rows, size)
    ]


def episode_slices(eps_id: NDArray[np.int64]) -> list[slice]:
    """Where each episode lies, in rows that follow one another."""
    starts = [0, *(np.flatnonzero(np.diff(eps_id)) + 1).tolist(), len(eps_id)]
    return [slice(a, b) for a, b in itertools.pairwise(starts)]


def write_dataset(root: Path, batches: Iterator[Columns] | list[Columns]) -> Path:
    """A data set of the batches; gives ``root``."""
    # What is written here can be written again, so it needs no log.
    with rlio.ParquetWriter(root, spool=None) as writer:
        for batch in batches:
            writer.write(rlio.SampleBatch(batch))
    return root
