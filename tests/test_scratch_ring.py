"""A live store in files without names: the rows of one in memory, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_child import fork, wait_for

from rlio import ReplayStore, SampleBatch
from rlio.errors import CacheError
from rlio.replay.draws import Draw


def frames(first: int, rows: int, width: int) -> SampleBatch:
    """Rows that go on from each other, with objects beside them; ``width`` over 1024 makes them wide."""
    obs = np.zeros((rows + 1, width), np.uint8)
    obs[:, 0] = np.arange(first, first + rows + 1) % 251
    infos = np.empty(rows, object)
    infos[:] = [{"row": row} for row in range(first, first + rows)]
    numbers = np.arange(first, first + rows)
    return SampleBatch(obs=obs[:-1], new_obs=obs[1:], t=numbers, eps_id=np.zeros(rows, np.int64), infos=infos)


def rows_of(store: ReplayStore) -> Any:
    return store.units(Draw()).batch(np.arange(len(store)))


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [4, 3000])
def test_a_ring_in_files_has_the_rows_of_one_in_memory(tmp_path: Path, width: int) -> None:
    with ReplayStore(100) as memory, ReplayStore(100, folder=tmp_path / "new" / "folder") as disk:
        for first in range(0, 400, 30):
            for store in (memory, disk):
                store.append(frames(first, 30, width))
            expected, found = rows_of(memory), rows_of(disk)
            for column in ("obs", "new_obs", "t"):
                np.testing.assert_array_equal(found[column], expected[column])
            assert found["infos"].tolist() == expected["infos"].tolist()
        kept = disk.uniform(batch_size=5, seed=0).sample()
    assert kept["t"].min() > 300
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_stores_share_a_folder_and_what_is_dropped_is_gone(tmp_path: Path) -> None:
    one, other = ReplayStore(10, folder=tmp_path), ReplayStore(10, folder=tmp_path)
    one.append(frames(0, 5, 4))
    other.append(frames(50, 5, 4))
    assert rows_of(one)["t"].tolist() == [0, 1, 2, 3, 4]
    one.close()
    one.close()
    assert rows_of(other)["t"].tolist() == [50, 51, 52, 53, 54]
    del other
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_killed_process_leaves_no_file_and_a_fork_keeps_its_hands_off(tmp_path: Path) -> None:
    store = ReplayStore(10, folder=tmp_path)

    def close_and_die() -> None:
        store.close()
        ReplayStore(10, folder=tmp_path).append(frames(0, 5, 4))
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait_for(fork(close_and_die)) == -signal.SIGKILL
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    store.append(frames(0, 5, 4))
    assert len(store) == 5
    store.close()


def test_a_place_where_nothing_can_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError):
        ReplayStore(10, folder=tmp_path / "file")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc takes no files, not even from root")
def test_a_folder_that_takes_no_files_is_refused_at_opening() -> None:
    with pytest.raises(CacheError, match="choose another folder"):
        ReplayStore(10, folder="/proc")
