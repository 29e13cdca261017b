"""Writers that are open: seen by followers before their first shard, and closed with the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from further import further
from servers import Server
from stored_batches import numbered

import rlio


@pytest.mark.parametrize("kind", [rlio.ParquetWriter, rlio.JsonWriter])
def test_a_follower_waits_for_a_writer_that_has_stored_nothing_yet(tmp_path: Path, kind: type) -> None:
    """A recorder that was killed and started again: the dead writer is sealed long before the first shard."""
    with kind(tmp_path) as first:
        first.write(numbered(3))
    second = kind(tmp_path)
    found: list[int] = []
    reader = rlio.FollowReader(tmp_path, poll_seconds=0.02, idle_timeout=60)

    def follow() -> None:
        for batch in reader:
            found.extend(batch["t"].tolist())

    thread = threading.Thread(target=follow)
    thread.start()
    thread.join(1.0)
    assert thread.is_alive(), "it ended while a writer was open"
    second.write(numbered(2, 3))
    second.close()
    thread.join(60)
    assert not thread.is_alive()
    assert sorted(found) == [0, 1, 2, 3, 4]


def test_a_writer_id_that_was_given_cannot_be_given_again_before_its_first_shard(tmp_path: Path) -> None:
    """Rows of its first life may be in a log, here or elsewhere, under the same numbers."""
    first = rlio.ParquetWriter(tmp_path, writer_id="job", spool=tmp_path / "spool")
    first.write(numbered(3))
    with pytest.raises(rlio.errors.OptionError, match="used there already"):
        rlio.ParquetWriter(tmp_path, writer_id="job", spool=None)
    first.close()
    assert len(rlio.open_dataset(tmp_path)) == 3


def test_a_writer_that_took_no_rows_leaves_no_trace(tmp_path: Path) -> None:
    for _ in range(2):
        rlio.ParquetWriter(tmp_path, writer_id="job").close()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["_rlio.json"]


@pytest.mark.further
@pytest.mark.xdist_group("s3")
@pytest.mark.parametrize("spool", ["spool=None", *further("sync='never'")])
def test_a_writer_on_s3_that_is_left_open_stores_its_rows_when_the_interpreter_ends(
    tmp_path: Path, serve: Callable[[str], Server], spool: str
) -> None:
    """The client's thread pool refuses work once what atexit runs has begun."""
    server = serve("s3")
    root = server.fresh_root()
    code = (
        "import numpy as np, rlio\n"
        f"writer = rlio.ParquetWriter({root!r}, storage_options={server.options!r}, {spool})\n"
        "writer.write(rlio.SampleBatch(obs=np.zeros((100, 3))))\n"
    )
    environment = {**os.environ, "RLIO_SPOOL": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert len(rlio.open_dataset(root, storage_options=server.options)) == 100
