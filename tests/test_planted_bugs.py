"""The tests, tested: each bug that a commit protocol may have is planted, and caught by a named check.

A check is a test of another file, or a function of this one where a bug takes several parts. Each passes on
the library as it is, and fails on the library with the bug in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
import tracemalloc
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import fsspec
import numpy as np
import pytest
import test_filesystem
import test_json_shard
import test_listing
import test_outages
import test_parquet_shards
import zstandard
from fsspec.implementations.memory import MemoryFileSystem
from further import further
from stored_batches import assert_identical, columns_of_parts, load
from test_structured_rows import TestDamage

import rlio
from rlio.batch.arrays import object_column
from rlio.catalog import listing
from rlio.catalog.names import ShardName, shard_path
from rlio.errors import EndOfData, RlioError
from rlio.log import new_writer, publisher, spool, wal
from rlio.log.publisher import Publisher
from rlio.replay import texts
from rlio.schemas import nested, shard_file, structure, zstd_frames
from rlio.schemas.json_lines import encode_line
from rlio.schemas.schema import Schema
from rlio.source import json_shard
from rlio.storage import local
from rlio.storage.clients import Clients
from rlio.storage.filesystem import Storage
from rlio.storage.local import LocalFolder, PendingFile
from rlio.storage.paths import Entry
from rlio.storage.remote import RemoteFolder
from rlio.testing import FaultyFileSystem, assert_resumes
from rlio.writers.recovery import recover

Plant: TypeAlias = Callable[[pytest.MonkeyPatch], object]
Check: TypeAlias = Callable[[Path], object]

ROWS = 10


def steps(first: int, rows: int = ROWS, who: int = 0) -> rlio.SampleBatch:
    t = np.arange(first, first + rows)
    obs = np.random.default_rng(first).normal(size=(rows, 4)).astype(np.float32)
    return rlio.SampleBatch(t=t, who=np.full(rows, who), obs=obs)


def rows_of(root: Any, **options: Any) -> list[tuple[int, int]]:
    with rlio.DatasetReader(root, epochs=1, **options) as reader:
        pairs = [zip(part["who"].tolist(), part["t"].tolist(), strict=True) for part in reader]
        return [pair for part in pairs for pair in part]


def numbered(rows: int, who: int = 0) -> list[tuple[int, int]]:
    return [(who, t) for t in range(rows)]


def small(**options: Any) -> dict[str, Any]:
    return {"roll": rlio.Roll(max_rows=ROWS, max_seconds=None), **options}


# ---- the checks of this file ----


def shards_are_synced_before_they_are_named(folder: Path) -> None:
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        check = test_filesystem.test_the_object_then_its_name_are_synced_and_a_new_folder_before_what_it_holds
        check(folder, patch)


def what_write_acknowledged_is_synced(folder: Path) -> None:
    """With ``sync="always"``: before `write()` returns, the log's file, and its name."""
    synced: list[str] = []

    def note(real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
            real(fd)

        return sync

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", note(os.fsync))
        patch.setattr(os, "fdatasync", note(os.fdatasync))
        with rlio.ParquetWriter(folder, sync="always") as writer:
            for number in range(3):
                synced.clear()
                writer.write(steps(number * ROWS))
                assert "000000000000.wal" in synced
                assert number or writer.writer_id in synced
            synced.clear()
            writer.flush()
            shard = next(place for place, name in enumerate(synced) if name.endswith(".tmp"))
            assert writer.writer_id in synced[shard:]


def no_process_that_dies_leaves_half_an_object(folder: Path) -> None:
    test_filesystem.test_a_process_that_dies_at_any_system_call_of_a_put_leaves_the_object_old_or_whole(
        folder, None
    )


def no_unchecked_byte_reaches_pyarrow(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_parquet_shards.test_no_byte_reaches_pyarrow_before_its_crc_has_matched("flip", patch)


def no_flipped_bit_in_a_line_gives_wrong_rows(folder: Path) -> None:
    folder.mkdir(parents=True)
    test_json_shard.test_no_flipped_bit_gives_wrong_rows_and_most_cost_one_line(folder, None, 5)


def no_flipped_bit_in_the_log_is_recovered(folder: Path) -> None:
    die_in_a_child(lambda: log_of(folder, 3))
    (segment,) = (folder / "_wal").glob("*/*.wal")
    data = bytearray(segment.read_bytes())
    place = data.index(np.asarray(steps(ROWS)["obs"]).tobytes()[:8])
    data[place + 1] ^= 4
    segment.write_bytes(data)
    report = recover(folder)
    assert not report.is_clean
    assert rows_of(folder) == numbered(ROWS), "the frames before the damage, and none of it"


def lists_and_graphs_come_back(folder: Path) -> None:
    tokens = object_column(np.full(n % 4, n, np.int32) for n in range(40))
    batch = rlio.SampleBatch({"t": np.arange(40), "tokens": tokens, **columns_of_parts(40)})
    with rlio.ParquetWriter(folder) as writer:
        writer.write(batch)
    for cache in ("none", "memory"):
        assert_identical(load(str(folder), cache=cache, batch_size=40), batch)


def no_list_refers_beyond_its_items(folder: Path) -> None:
    TestDamage().test_lists_whose_offsets_lie_are_errors()


def log_of(root: Path, batches: int) -> None:
    writer = rlio.ParquetWriter(root)
    for number in range(batches):
        writer.write(steps(number * ROWS))


def die_in_a_child(act: Callable[[], object]) -> None:
    """Do something in a forked process that dies at its end, if it has not before."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def no_torn_shard_is_listed(folder: Path) -> None:
    test_listing.test_a_shard_cut_at_any_byte_or_grown_is_rejected_with_both_sizes(Storage.open(folder))


def writers_that_begin_in_one_second_keep_all_rows(folder: Path) -> None:
    def write(who: int) -> None:
        with rlio.ParquetWriter(folder, worker_index=1, spool=None) as writer:
            writer.write(steps(0, who=who))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(write, range(16)))
    assert sorted(rows_of(folder)) == [pair for who in range(16) for pair in numbered(ROWS, who)]


def a_lost_response_doubles_no_row(folder: Path) -> None:
    # Each shard's first response, because a later shard may replace the rows that an earlier one doubled.
    lost: list[str] = []

    def choose(call: Any) -> Any:
        if call.operation == "pipe_file" and call.path.endswith(".parquet") and call.path not in lost:
            lost.append(call.path)
            return "after"
        return None

    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    root = f"faulty://{folder}"
    options = {"target": MemoryFileSystem(), "choose": choose}
    with rlio.ParquetWriter(root, spool=None, storage_options=options, **small()) as writer:
        for number in range(3):
            writer.write(steps(number * ROWS))
    assert lost
    assert rows_of(root, storage_options=options) == numbered(3 * ROWS)


def a_process_that_dies_in_a_publish_loses_no_row(folder: Path) -> None:
    def write() -> None:
        acknowledged = threading.Event()
        commit = PendingFile.commit

        def die(self: PendingFile, path: str) -> None:
            if not path.endswith(".parquet"):
                return commit(self, path)
            acknowledged.wait(60)  # Else no batch may be taken yet.
            os._exit(9)

        PendingFile.commit = die  # type: ignore[method-assign]  # In the child.
        with rlio.ParquetWriter(folder, **small()) as writer:
            for number in range(5):
                writer.write(steps(number * ROWS))
                with (folder / "taken").open("ab") as taken:  # A byte a batch: it is there whole or not.
                    taken.write(b"x")
                acknowledged.set()

    die_in_a_child(write)
    recover(folder)
    found = rows_of(folder)
    assert found == numbered(len(found))
    assert len(found) >= (folder / "taken").stat().st_size * ROWS


def the_log_of_a_living_writer_is_not_recovered(folder: Path) -> None:
    writer = rlio.ParquetWriter(folder, spool=folder / "spool")
    try:
        writer.write(steps(0))
        assert [log.outcome for log in recover(folder, spool=folder / "spool").logs] == ["alive"]
        writer.write(steps(ROWS))
    finally:
        writer.close()
    assert rows_of(folder) == numbered(2 * ROWS)


def a_reader_resumes_before_every_batch(folder: Path) -> None:
    with rlio.ParquetWriter(folder, spool=None) as writer:
        writer.write(steps(0, 30))
    assert_resumes(lambda: rlio.DatasetReader(folder, batch_size=4, epochs=1))


def a_listing_is_never_stale(folder: Path) -> None:
    fsspec.register_implementation("norename", test_filesystem.NoRename, clobber=True)
    suite = test_filesystem.TestNoRename()
    suite.test_a_listing_sees_at_once_what_others_did(suite.make_storage(folder))


def a_bad_line_costs_that_line(folder: Path) -> None:
    test_json_shard.test_damage_in_one_line_leaves_the_others(folder, None)


def no_extension_type_gets_as_far_as_pyarrow(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_parquet_shards.test_an_arrow_schema_in_the_footer_is_refused_before_pyarrow_sees_it(patch)


def a_bomb_is_not_inflated(folder: Path) -> None:
    line = encode_line(test_json_shard.steps(2), Schema.of(test_json_shard.steps(1)))
    bomb = zstandard.ZstdCompressor().compress(line[: line.index(b'"columns"')] + bytes(200 << 20))
    good = zstandard.ZstdCompressor().compress(line + b"\n")
    place = test_json_shard.forged(folder, good + bomb, rows=4, suffix="jsonl.zst")
    tracemalloc.start()
    try:
        shard = test_json_shard.open_shard(*place)
        with pytest.raises(rlio.errors.CorruptData):
            shard.read(1)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def outages_change_no_byte(folder: Path) -> None:
    for seed in range(3):
        test_outages.run_through_outages(folder / str(seed), seed)


def no_write_handle_is_opened(folder: Path) -> None:
    test_filesystem.test_no_write_handle_is_ever_opened()


# ---- the bugs ----


def no_fsync(patch: pytest.MonkeyPatch) -> None:
    for module in (local, spool, wal):
        patch.setattr(module, "sync_descriptor", lambda fd: None)


def no_fsync_of_the_log(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wal, "_fdatasync", lambda fd: None)


def no_fsync_of_the_log_s_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wal, "sync_folder", lambda path: None)


def rename_before_write(patch: pytest.MonkeyPatch) -> None:
    def put(self: LocalFolder, path: str, data: memoryview) -> None:
        *folders, name = path.split("/")
        local.make_folders(self.root)
        with self.folder(["_tmp"], create=True) as tmp, self.folder(folders, create=True) as target:
            fd = os.open("x.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd=tmp.fd)
            os.replace("x.tmp", name, src_dir_fd=tmp.fd, dst_dir_fd=target.fd)
            os.write(fd, data)
            os.fsync(fd)
            os.close(fd)

    patch.setattr(LocalFolder, "put", put)


class Equal(int):
    """A CRC that matches every other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def no_crc_check_of_parquet(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shard_file, "zlib", types.SimpleNamespace(crc32=lambda *data: Equal()))


def no_crc_check_of_lines(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(json_shard, "is_intact", lambda line: True)
    patch.setattr("rlio.schemas.json_lines.is_intact", lambda line: True)


def no_crc_check_of_the_log(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wal, "zlib", types.SimpleNamespace(crc32=lambda *data: 0))


def no_size_check(patch: pytest.MonkeyPatch) -> None:
    real = Storage.list

    def without_sizes(self: Storage, *args: Any, **options: Any) -> list[Entry]:
        return [Entry(path, None) for path, _ in real(self, *args, **options)]

    patch.setattr(Storage, "list", without_sizes)
    patch.setattr(listing, "load_shard", lambda storage, ref: storage.read(ref.path))


def fixed_writer_id(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(new_writer, "make_writer_id", lambda index: f"w{index:05d}-00000000")


def second_resolution_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(new_writer, "make_writer_id", lambda index: f"w{index:05d}-{int(time.time()):08x}")


def retry_with_a_new_name(patch: pytest.MonkeyPatch) -> None:
    def put(storage: Storage, writer: str, name: Any, data: memoryview) -> None:
        for attempt in range(2):
            renamed = name._replace(first=name.first + attempt * name.rows)
            try:
                storage._backend.put(shard_path(writer, renamed), data)
            except OSError:
                continue
            return

    patch.setattr(publisher, "put_shard", put)


def unlink_the_log_before_publishing(patch: pytest.MonkeyPatch) -> None:
    real = Publisher._store

    def store(self: Publisher, name: ShardName, shard: Any) -> None:
        if self.log is not None:
            self.log.release(name.end)
        real(self, name, shard)

    patch.setattr(Publisher, "_store", store)


def recover_without_flock(patch: pytest.MonkeyPatch) -> None:
    unlocked = types.SimpleNamespace(**{**vars(fcntl), "flock": lambda fd, how: None})
    patch.setattr(spool, "fcntl", unlocked)


def cursor_saved_before_yield(patch: pytest.MonkeyPatch) -> None:
    """A reader that reads ahead, and saves how far it has read."""
    real = rlio.InputReader.sample

    def sample(self: Any, n: int | None = None, *, out: Any = None) -> Any:
        batch = vars(self).pop("_ahead_of_time", None)
        batch = real(self, n) if batch is None else batch
        with contextlib.suppress(EndOfData):
            self._ahead_of_time = real(self, n)
        return batch

    patch.setattr(rlio.InputReader, "sample", sample)


def stale_ls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Clients, "invalidate_cache", lambda self: None)


def stop_at_a_bad_line(patch: pytest.MonkeyPatch) -> None:
    real = json_shard.JsonShard._checked

    def checked(self: Any, line: Any) -> Any:
        found = real(self, line)
        self._stopped = vars(self).get("_stopped", False) or found.is_damaged
        return replace(found, is_damaged=self._stopped)

    patch.setattr(json_shard.JsonShard, "_checked", checked)


class Blind(bytes):
    """A footer in which nothing is found."""

    def __contains__(self, part: object) -> bool:
        return False


def accept_extension_types(patch: pytest.MonkeyPatch) -> None:
    real = shard_file.ShardFile._read_footer
    patch.setattr(shard_file.ShardFile, "_read_footer", lambda self, crc32: Blind(real(self, crc32)))


def unbounded_zstd(patch: pytest.MonkeyPatch) -> None:
    def inflate(packed: bytes, **bounds: Any) -> bytes:
        return zstandard.ZstdDecompressor().decompress(packed)

    patch.setattr(zstd_frames, "inflate", inflate)
    patch.setattr(json_shard, "inflate", inflate)


def write_through_fs_open(patch: pytest.MonkeyPatch) -> None:
    def put(self: RemoteFolder, full: str, content: bytes) -> None:
        with self.fs.open(full, "wb") as file:
            file.write(content)

    patch.setattr(RemoteFolder, "_put_object", put)


def lengths_of_other_lists(patch: pytest.MonkeyPatch) -> None:
    real = nested._lists
    patch.setattr(nested, "_lists", lambda lengths, *rest: real(lengths[::-1], *rest))


def rows_of_a_store_in_another_order(patch: pytest.MonkeyPatch) -> None:
    real = structure.packed
    patch.setattr(texts, "packed", lambda value: real(value[::-1] if type(value) is list else value))


def no_check_of_offsets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nested, "check_offsets", lambda ends, items: None)


BUGS: list[tuple[Plant, Check]] = [
    (no_fsync, shards_are_synced_before_they_are_named),
    (no_fsync, what_write_acknowledged_is_synced),
    (no_fsync_of_the_log, what_write_acknowledged_is_synced),
    (no_fsync_of_the_log_s_name, what_write_acknowledged_is_synced),
    (rename_before_write, no_process_that_dies_leaves_half_an_object),
    (no_crc_check_of_parquet, no_unchecked_byte_reaches_pyarrow),
    (no_crc_check_of_lines, no_flipped_bit_in_a_line_gives_wrong_rows),
    (no_crc_check_of_the_log, no_flipped_bit_in_the_log_is_recovered),
    (no_size_check, no_torn_shard_is_listed),
    (fixed_writer_id, writers_that_begin_in_one_second_keep_all_rows),
    (second_resolution_name, writers_that_begin_in_one_second_keep_all_rows),
    (retry_with_a_new_name, a_lost_response_doubles_no_row),
    (unlink_the_log_before_publishing, a_process_that_dies_in_a_publish_loses_no_row),
    (recover_without_flock, the_log_of_a_living_writer_is_not_recovered),
    (cursor_saved_before_yield, a_reader_resumes_before_every_batch),
    (stale_ls, a_listing_is_never_stale),
    (stop_at_a_bad_line, a_bad_line_costs_that_line),
    (accept_extension_types, no_extension_type_gets_as_far_as_pyarrow),
    (unbounded_zstd, a_bomb_is_not_inflated),
    (write_through_fs_open, no_write_handle_is_opened),
    (lengths_of_other_lists, lists_and_graphs_come_back),
    (rows_of_a_store_in_another_order, lists_and_graphs_come_back),
    (no_check_of_offsets, no_list_refers_beyond_its_items),
]
#: What takes seconds to catch.
LONG = (rename_before_write, no_crc_check_of_lines, unbounded_zstd)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    ("plant", "check"),
    [further(bug)[0] if bug[0] in LONG else bug for bug in BUGS],
    ids=lambda function: function.__name__,
)
def test_a_planted_bug_is_caught(plant: Plant, check: Check, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception, RlioError)):
            check(tmp_path / "with")
    check(tmp_path / "without")
