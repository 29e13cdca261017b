"""Processes that die on purpose, and what a data set must hold after them.

Children are forked from the warm test process, so that each costs milliseconds; what a child has had
acknowledged it notes in shared memory, which outlives it.
"""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from stored_batches import columns_of_parts, same_objects

from rlio import DatasetReader, JsonWriter, ParquetWriter, SampleBatch
from rlio.batch.arrays import object_column
from rlio.batch.picture_codecs import encode_column
from rlio.catalog.listing import list_shards
from rlio.catalog.names import WAL_DIR
from rlio.errors import DataNotFound
from rlio.storage.filesystem import Storage

WRITERS: dict[str, type[ParquetWriter] | type[JsonWriter]] = {"parquet": ParquetWriter, "json": JsonWriter}


class Tally:
    """Rows that a writer was given and rows that it has acknowledged; shared with forked children.

    Args:
        parts: Whether the rows have columns of pictures, of lists and of graphs, which take longer.
    """

    def __init__(self, *, parts: bool = True) -> None:
        self._memory = mmap.mmap(-1, 16)
        self._parts = parts
        _pool()  # Not in each of the children.

    @property
    def attempted(self) -> int:
        """Rows that `write` was called with."""
        return int(struct.unpack_from("<q", self._memory, 0)[0])

    @attempted.setter
    def attempted(self, rows: int) -> None:
        struct.pack_into("<q", self._memory, 0, rows)

    @property
    def acked(self) -> int:
        """Rows of the calls that have returned."""
        return int(struct.unpack_from("<q", self._memory, 8)[0])

    @acked.setter
    def acked(self, rows: int) -> None:
        struct.pack_into("<q", self._memory, 8, rows)

    def write(self, writer: ParquetWriter | JsonWriter, rows: int) -> None:
        """Write the next rows and note that it returned."""
        self.attempted = self.acked + rows
        writer.write(batch_of(self.acked, rows, parts=self._parts))
        self.acked = self.attempted


def fork(act: Callable[..., object], *args: Any) -> int:
    """Call ``act`` in a child; give its process id. It ends with 0, or with 1 and a traceback."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # What other tests left for the collector is not this child's to end: s3fs waits a second for each of
        # its clients, in a loop whose thread only the parent has.
        gc.freeze()
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
        act(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def wait_for(pid: int, *, seconds: float = 60.0) -> int:
    """The exit code of a child, negative for a signal; one that does not end is killed: an error.

    Where it was is on stderr then.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        _pause(pid, until - time.monotonic())
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child did not end within {seconds} s")


def _pause(pid: int, seconds: float) -> None:
    """Wait until a child ends, for so many seconds at most; for a moment where the system cannot tell."""
    if not hasattr(os, "pidfd_open"):
        time.sleep(0.0005)
        return
    fd = os.pidfd_open(pid)
    try:
        ends = select.poll()
        ends.register(fd, select.POLLIN)
        ends.poll(max(0.0, seconds) * 1000)
    finally:
        os.close(fd)


def batch_of(first: int, rows: int, *, parts: bool = False) -> SampleBatch:
    """Rows of which every value follows from their number."""
    number = np.arange(first, first + rows)
    return SampleBatch(
        {name: values[number % 60] for name, values in _pool().items() if parts},
        t=number,
        obs=np.stack([number, 2 * number + 1, -number], axis=1).astype(np.float32),
        rewards=(number % 97) / 4,
    )


@cache
def _pool() -> dict[str, np.ndarray]:
    """Rows of some lists, graphs and pictures, which the rows of a test have again and again."""
    parts = columns_of_parts(60)
    pictures = np.repeat(np.arange(60, dtype=np.uint8), 18).reshape(-1, 3, 2, 3)
    return {
        "tokens": object_column(np.full(n % 4, n, np.int32) for n in range(60)),
        "words": parts["words"],
        "graphs": parts["graphs"],
        "camera": encode_column(pictures),
    }


def rows_of(root: str | os.PathLike[str]) -> list[int]:
    """Numbers of the rows that a reader is served, each checked in every column; [] for no data set."""
    try:
        with DatasetReader(root, epochs=1) as reader:
            batches: list[Any] = list(reader)
    except DataNotFound:
        return []
    numbers: list[int] = []
    for batch in batches:
        t = batch["t"]
        obs = np.stack([t, 2 * t + 1, -t], axis=1).astype(np.float32)
        np.testing.assert_array_equal(batch["obs"], obs)
        np.testing.assert_array_equal(batch["rewards"], (t % 97) / 4)
        if "camera" in batch:
            assert (batch["camera"] == (t % 60)[:, None, None, None]).all()
            for name in ("tokens", "words", "graphs"):
                assert same_objects(list(batch[name]), list(_pool()[name][t % 60]))
        numbers += t.tolist()
    return numbers


def shard_names(root: str | os.PathLike[str]) -> list[str]:
    """Names, and so bytes, of the shards of a root."""
    shards = list_shards(Storage.open(root)).shards
    return [ref.path for refs in shards.values() for ref in refs]


def files_of(root: str | os.PathLike[str]) -> dict[str, bytes]:
    """Path -> bytes of everything below a root but unfinished files."""
    found = {}
    for path in sorted(Path(root).rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_file() and not name.startswith("_tmp/"):
            found[name] = path.read_bytes()
    return found


def logs_of(root: str | os.PathLike[str]) -> list[str]:
    """Segments and shards that wait in the logs of a local root; not what was set aside."""
    found = (path for path in Path(root, WAL_DIR).rglob("*") if not path.parent.name.startswith("_"))
    return sorted(path.name for path in found if path.suffix in (".wal", ".parquet", ".jsonl"))
