"""What the children of `test_writer_lifecycle.py` are made of; imported in them and in the tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

import rlio
import rlio.schemas.parquet
import rlio.writers.recovery
from rlio.catalog.listing import list_shards
from rlio.storage.filesystem import Storage
from rlio.testing.filesystem import Call, FaultyFileSystem

__all__ = ["Site", "batch", "gc", "os", "rlio", "signal", "sys", "threading", "time"]

ROWS = 10


class SlowStore(FaultyFileSystem):
    """A folder as an object store, of which every put hangs for ever while ``<root>.hang`` is there."""

    protocol = "slowstore"

    def __init__(self, **options: Any) -> None:
        super().__init__(LocalFileSystem(), self._choose)

    def _choose(self, call: Call) -> None:
        if call.operation == "pipe_file":
            while os.path.exists(call.path.split("/run/")[0] + "/hang"):
                time.sleep(0.05)


fsspec.register_implementation("slowstore", SlowStore, clobber=True)


def batch(first: int, rows: int = ROWS, who: int = 0) -> rlio.SampleBatch:
    t = np.arange(first, first + rows)
    return rlio.SampleBatch(t=t, who=np.full(rows, who), obs=np.repeat(t, 3).reshape(-1, 3).astype("f4"))


class Site:
    """A data set, its spool, and a list of the rows that were acknowledged.

    Args:
        folder: Of its own.
        store: "local", "memory", or "slow", which can hang.
        kind: "parquet" or "json".
    """

    def __init__(self, folder: str, store: str, kind: str) -> None:
        self.folder, self.store, self.kind = Path(folder), store, kind
        self.folder.mkdir(parents=True, exist_ok=True)
        local = str(self.folder / "run")
        self.root = {"local": local, "memory": f"memory://{local}", "slow": f"slowstore://{local}"}[store]
        self.spool = None if store == "memory" else self.folder / "spool"

    def writer(self, **options: Any) -> Any:
        kind = rlio.ParquetWriter if self.kind == "parquet" else rlio.JsonWriter
        options.setdefault("roll", rlio.Roll(max_rows=25, max_seconds=None))
        return kind(self.root, spool=self.spool, **options)

    def write(self, writer: Any, number: int = 1) -> None:
        """Write batches, and say of each that it was taken."""
        for _ in range(number):
            writer.write(batch(writer.rows_received))
            with open(self.folder / "taken", "a") as file:
                file.write(f"{writer.rows_received}\n")

    def hang(self) -> None:
        (self.folder / "hang").write_text("")

    def mend(self) -> None:
        (self.folder / "hang").unlink(missing_ok=True)

    def taken(self) -> int:
        file = self.folder / "taken"
        return int(file.read_text().split()[-1]) if file.exists() else 0

    def recover(self) -> Any:
        return rlio.writers.recovery.recover(self.root, spool=self.spool)

    def rows(self, who: int = 0) -> list[int]:
        with rlio.DatasetReader(self.root, epochs=1) as reader:
            return [t for part in reader for t, w in zip(part["t"], part["who"], strict=True) if w == who]

    def print_rows(self) -> None:
        """How many rows there are, as the names of shards tell: where nobody else can look."""
        found = list_shards(Storage.open(self.root))
        rows = sum(segment.rows for writer in found.writers for segment in found.cover(writer).segments)
        print("rows", rows, "of", self.taken(), flush=True)  # noqa: T201


def work(folder: str, who: int) -> None:
    """A worker with a writer of its own."""
    with Site(folder, "local", "parquet").writer(worker_index=who) as writer:
        writer.write(batch(0, who=who))
