"""Publishing: a shard is there whole under a name that certifies it, or not at all."""

from __future__ import annotations

import threading
import uuid
import zlib
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from growing_data import publish_shard
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.catalog.commit import HEADER_BYTES, put_header, read_header
from rlio.catalog.listing import list_shards, load_shard
from rlio.catalog.names import HEADER, ShardName
from rlio.errors import CorruptData, DataNotFound, OptionError, PublishError, UnsafeData
from rlio.storage.filesystem import Retry, Storage
from rlio.testing import FaultyFileSystem, FaultyRenamingFileSystem
from rlio.testing.filesystem import Call, Fault

WRITER = "w00000-0a1b2c3d"


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return Storage.open(tmp_path / "run", sync=False)
    return Storage.open(f"memory://{uuid.uuid4().hex}")


def publish(storage: Storage, data: bytes, *, first: int = 0, rows: int = 1, writer: str = WRITER) -> str:
    return publish_shard(storage, writer, data, first=first, rows=rows, suffix="jsonl", footer_crc32=0).path


def test_a_shard_s_name_says_what_it_holds(storage: Storage) -> None:
    data = b"some rows"
    ref = publish_shard(
        storage, WRITER, memoryview(data), first=7, rows=3, suffix="parquet", footer_crc32=0xABC
    )
    assert ref.writer == WRITER
    assert ref.name == ShardName(first=7, rows=3, size=9, crc32=zlib.crc32(data), footer_crc32=0xABC)
    assert ref.path == f"data/{WRITER}/{ref.name.format()}"
    assert storage.read(ref.path) == data
    assert list_shards(storage).shards == {WRITER: [ref]}
    assert load_shard(storage, ref) == data


def test_publishing_again_is_the_same_shard(storage: Storage) -> None:
    assert publish(storage, b"rows") == publish(storage, b"rows")
    assert len(storage.list()) == 1


def test_a_shard_without_bytes_or_rows_or_of_an_illegal_writer_is_refused(storage: Storage) -> None:
    with pytest.raises(OptionError, match="1 <= size"):
        publish(storage, b"")
    with pytest.raises(OptionError, match="1 <= rows"):
        publish(storage, b"rows", rows=0)
    with pytest.raises(OptionError, match="writer_id="):
        publish(storage, b"rows", writer="../w")
    assert storage.list() == []


def test_many_writers_of_one_root_get_all_their_shards_in(storage: Storage) -> None:
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            put_header(storage)
            for k in range(10):
                publish(storage, b"%d %d" % (index, k), first=k, writer=f"w{index}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    listing = list_shards(storage)
    assert listing.rejected == []
    rows = {
        (writer, ref.name.first, load_shard(storage, ref))
        for writer, refs in listing.shards.items()
        for ref in refs
    }
    assert rows == {(f"w{i}", k, b"%d %d" % (i, k)) for i in range(8) for k in range(10)}


faults = st.sampled_from([None, None, None, "before", "after", "torn"])


@settings(max_examples=30, deadline=None)
@given(st.lists(faults, max_size=60), st.booleans())
def test_under_any_faults_what_was_acknowledged_is_read_and_nothing_torn_is(
    script: list[Fault | None], renames: bool
) -> None:
    def choose(call: Call) -> Fault | None:
        return script[call.number] if call.number < len(script) else None

    kind = FaultyRenamingFileSystem if renames else FaultyFileSystem
    fs = kind(MemoryFileSystem(), choose)
    storage = Storage.on(fs, f"/{uuid.uuid4().hex}", retry=Retry(attempts=3, first_delay=0))
    acknowledged = {}
    failed = {}
    for k in range(6):
        data = bytes([k]) * (10 + k)
        try:
            acknowledged[publish(storage, data, first=k)] = data
        except PublishError:
            failed[k] = data
    fs.choose = lambda call: None
    listing = list_shards(storage)
    read = {ref.path: load_shard(storage, ref) for refs in listing.shards.values() for ref in refs}
    assert acknowledged.items() <= read.items()
    whole = {**acknowledged, **{path: data for path, data in read.items() if data in failed.values()}}
    assert read == whole
    # The data of a failed put is still the caller's: publishing it again completes the set.
    for k, data in failed.items():
        publish(storage, data, first=k)
    listing = list_shards(storage)
    assert listing.rejected == []
    assert [ref.name.first for ref in listing.shards[WRITER]] == list(range(6))


# ---- the header ----


def test_every_writer_puts_the_same_header_and_any_may_be_first(storage: Storage) -> None:
    for _ in range(3):
        put_header(storage)
    assert storage.read(HEADER) == HEADER_BYTES == b'{"format": 0}\n'
    assert read_header(storage) == {"format": 0}


@pytest.mark.parametrize("length", range(len(HEADER_BYTES)))
def test_a_header_torn_at_any_byte_is_completed_by_the_next_writer(storage: Storage, length: int) -> None:
    storage.put(HEADER, HEADER_BYTES[:length])
    # Only the closing newline is no loss.
    if length < len(HEADER_BYTES) - 1:
        with pytest.raises(CorruptData, match="the header is"):
            read_header(storage)
    put_header(storage)
    assert read_header(storage) == {"format": 0}


@pytest.mark.parametrize("version", [1, -1, 99, 10**30])
def test_another_format_version_is_refused_and_left_as_it_is(storage: Storage, version: int) -> None:
    content = b'{"format": %d}\n' % version
    storage.put(HEADER, content)
    for use in (put_header, read_header):
        with pytest.raises(
            OptionError, match=f"format {version}, and this version of rlio reads and writes 0"
        ):
            use(storage)
    assert storage.read(HEADER) == content


@pytest.mark.parametrize(
    "content",
    [
        b"null",
        b"[]",
        b"{}",
        b'{"format": true}',
        b'{"format": "0"}',
        b'{"format": 0.0}',
        b'{"format": null}',
        b"\xff\xfe",
        b"not json",
        b'{"format": 0',
        b'{"format": 0}{"format": 0}',
        b'{"format": ' + b"9" * 5000 + b"}",
        b"[" * 60_000,
    ],
)
def test_a_foreign_or_damaged_header_is_corrupt_and_left_as_it_is(storage: Storage, content: bytes) -> None:
    storage.put(HEADER, content)
    for use in (put_header, read_header):
        if HEADER_BYTES.startswith(content) and use is put_header:
            continue  # torn, see above
        with pytest.raises(CorruptData, match="the header is") as caught:
            use(storage)
        assert len(str(caught.value)) < 700 + len(storage.uri)
    assert storage.read(HEADER) == content


def test_a_header_of_our_version_with_more_keys_is_read_and_kept(storage: Storage) -> None:
    storage.put(HEADER, b'{"format": 0, "note": "x"}')
    assert read_header(storage) == {"format": 0, "note": "x"}
    put_header(storage)
    assert storage.read(HEADER) == b'{"format": 0, "note": "x"}'


def test_a_huge_header_is_not_read(storage: Storage) -> None:
    storage.put(HEADER, b" " * 100_000 + HEADER_BYTES)
    with pytest.raises(UnsafeData, match="more than the 65536 bytes"):
        read_header(storage)


def test_no_header_is_no_data_set_and_the_error_lists_what_is_there(storage: Storage) -> None:
    with pytest.raises(DataNotFound, match="empty or does not exist"):
        read_header(storage)
    for name in ("run-1.json", "sub/run-2.json"):
        storage.put(name, b"{}")
    with pytest.raises(DataNotFound, match=r"_rlio\.json is not there; found .*'run-1\.json', 'sub'"):
        read_header(storage)
