"""The script that wrote tests/golden/spilled-log: logs of dead writers that hold encoded shards.

Until 4d4987e a shard that could not be stored was moved into the writer's log, and its rows left the log's
segments. Later writers never do so; recovery still publishes such shards. To write the files again:

    git worktree add ../then 4d4987e
    cp tests/spilled_log.py ../then/tests/
    cd ../then && python tests/spilled_log.py FOLDER
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import rlio
from rlio.errors import PublishError
from rlio.storage.filesystem import Storage

#: Rows of each shard; shards in all, of which the first is published and the others are in the log; rows in
#: the log's last segment.
ROWS, SHARDS, REST = 10, 4, 7
TOTAL = ROWS * SHARDS + REST


def batch_of(first: int, rows: int) -> rlio.SampleBatch:
    """Rows that their numbers tell."""
    t = np.arange(first, first + rows)
    return rlio.SampleBatch(t=t, obs=np.stack([t, t * 0.5], axis=1).astype(np.float32))


def write(root: Path, kind: Any) -> None:
    """Leave a log in ``root`` whose store went away after the first shard. Ends the process."""
    writer = kind(root, writer_id="w", roll=rlio.Roll(max_rows=ROWS, max_seconds=None))
    writer.write(batch_of(0, ROWS))
    writer.flush()

    def put(self: Storage, path: str, data: bytes) -> None:
        raise PublishError("the store is gone")

    def no_file(root: str) -> None:
        raise OSError("no unfinished files")

    Storage.put = put  # type: ignore[method-assign]  # The process ends with it.
    importlib.import_module("rlio.storage.shard_log").PendingFile = no_file  # type: ignore[attr-defined]  # Of 4d4987e.
    for first in range(ROWS, ROWS * SHARDS, ROWS):
        writer.write(batch_of(first, ROWS))
    writer.write(batch_of(ROWS * SHARDS, REST))
    log = root / "_wal" / "w"
    while len([path for path in log.iterdir() if path.name.startswith("0000") and path.suffix != ".wal"]) < 3:
        time.sleep(0.01)
    os._exit(0)


if __name__ == "__main__":
    for name, kind in (("parquet", rlio.ParquetWriter), ("json", rlio.JsonWriter)):
        if os.fork() == 0:
            write(Path(sys.argv[1]) / name, kind)
        os.wait()
