"""Files of layouts of other libraries that have a reader of their own, larger than a window of a shuffle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from fsspec.implementations.memory import MemoryFileSystem

from benchmarks import layouts

#: Rows of a file, of an episode, and numbers in an observation.
SHAPE = layouts.Shape(rows=1000, episode=100, width=30)

#: Those of HDF5, whose reader waits for no other thread while it reads.
OF_HDF5 = ("d4rl", "robomimic", "minari", "d3rlpy-1", "d3rlpy-2", "tianshou")
_OTHERS = (
    "minari-parquet", "minari-arrow", "minari-arrow-long", "imitation", "zarr", "zarr-shards", "lerobot",
    "rlds", "torchrl",
)  # fmt: skip
#: Name of a layout -> the files of a data set with so many large ones, by their paths.
LAYOUTS: dict[str, Callable[[int], dict[str, bytes]]] = {
    name: partial(layouts.LAYOUTS[name], SHAPE) for name in (*OF_HDF5, *_OTHERS)
}


def rows_of(file: int) -> dict[str, np.ndarray]:
    return layouts.rows_of(SHAPE, file)


def put(kind: str, path: str, *, count: int = 3) -> tuple[int, int]:
    """Store a data set in memory, below ``/{path}/data``.

    Returns:
        Its bytes, and its rows.
    """
    files = LAYOUTS[kind](count)
    for name, data in files.items():
        MemoryFileSystem().pipe_file(f"/{path}/data/{name}", data)
    return sum(map(len, files.values())), layouts.rows_in(kind, SHAPE, count)
