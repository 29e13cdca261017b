"""Many writers that begin in the same second with the same worker index: no row is lost, no name shared."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.forkserver import ensure_running
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from further import further, on_servers
from servers import Server

from rlio import DatasetReader, JsonWriter, ParquetWriter, Roll, SampleBatch, concat_samples, open_dataset

WRITERS, ROWS = 16, 60
# Forked from a warm process without threads, to begin together. This process may have threads of SSH: a fork
# while one of them holds a lock of OpenSSL leaves the child waiting forever.
method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else None
pytestmark = pytest.mark.skipif(method is None, reason="no fork here")


def _write(root: str, options: dict[str, Any], who: int, spool: Any, barrier: Barrier) -> None:
    kind = JsonWriter if who % 4 == 3 else ParquetWriter
    t = np.arange(ROWS)
    batch = SampleBatch(t=t, who=np.full(ROWS, who), obs=t.astype(np.float32))
    barrier.wait(60)
    with kind(
        root, worker_index=1, roll=Roll(max_rows=25, max_seconds=None), spool=spool, storage_options=options
    ) as writer:
        for first in range(0, ROWS, 10):
            writer.write(batch[first : first + 10])


def _begin_together(root: str, options: dict[str, Any], spool: Any = "auto") -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11's process does not get this one's sys.path.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        ensure_running()
    barrier = context.Barrier(WRITERS)
    processes = [
        context.Process(target=_write, args=(root, options, who, spool, barrier)) for who in range(WRITERS)
    ]
    begun = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, 120 - (time.monotonic() - begun)))
    # None: it has not ended in time; 1: its traceback is on stderr.
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert codes == [0] * WRITERS


def _check(root: str, options: dict[str, Any]) -> None:
    with DatasetReader(root, epochs=1, storage_options=options) as reader:
        rows: Any = concat_samples(list(reader))
    found = list(zip(rows["who"].tolist(), rows["t"].tolist(), strict=True))
    assert Counter(found) == Counter((who, t) for who in range(WRITERS) for t in range(ROWS))
    for who in range(WRITERS):
        assert [t for w, t in found if w == who] == list(range(ROWS)), (
            "in the order in which they were written"
        )
    ids = list(open_dataset(root, storage_options=options).snapshot())
    assert len(ids) == WRITERS
    assert all(name.startswith("w00001-") for name in ids)


@pytest.mark.further
@pytest.mark.parametrize("spool", ["auto", *further(None)])
def test_16_writers_of_one_worker_index_that_begin_together_lose_nothing_on_a_disk(
    tmp_path: Path, spool: Any
) -> None:
    root = str(tmp_path / "run")
    _begin_together(root, {}, spool)
    _check(root, {})


@pytest.mark.further
@pytest.mark.parametrize(
    "name",
    on_servers("s3", "azure", "sftp", "ftp"),
)
def test_16_writers_of_one_worker_index_that_begin_together_lose_nothing_on_a_server(
    serve: Callable[[str], Server], name: str
) -> None:
    server = serve(name)
    root = server.fresh_root()
    _begin_together(root, server.options, None)
    _check(root, server.options)
