"""Data sets on every kind of store, real servers too: written, read, shuffled, resumed, damaged, copied."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from further import on_servers
from servers import Server, free_port
from stored_batches import assert_identical, group_bytes, numbered

from rlio import (
    DatasetReader,
    FollowReader,
    JsonReader,
    JsonWriter,
    MultiAgentBatch,
    ParquetWriter,
    Roll,
    SampleBatch,
    concat_samples,
    open_dataset,
)
from rlio.catalog.names import part_id
from rlio.distributed.ray_data.part_writer import PartOptions, PartWriter
from rlio.errors import CorruptData, DataNotFound, PublishError, StateError
from rlio.storage.filesystem import Retry, Storage
from rlio.testing import assert_resumes

SMALL = Roll(max_rows=16, max_seconds=None)


class Place(NamedTuple):
    """A root that nobody else has, and fsspec's options for it."""

    root: str
    options: dict[str, Any]

    def open(self) -> Storage:
        return Storage.open(self.root, storage_options=self.options)


IN_PROCESS = {
    "local": lambda tmp: Place(str(tmp / "run"), {}),
    "memory": lambda tmp: Place(f"memory://{uuid.uuid4().hex}/run", {}),
    "folder of a folder": lambda tmp: Place(f"dir::file://{tmp}/outer", {}),
}
ON_SERVERS = ("s3", "azure", "sftp", "ftp")
PLACES = [
    *(pytest.param(name, id=name) for name in IN_PROCESS),
    *(pytest.param(name, id=name, marks=pytest.mark.xdist_group(name)) for name in ON_SERVERS),
]

#: What takes long is done on one server in `make test`.
FEWER_PLACES = pytest.mark.parametrize("place", [*PLACES[:3], *on_servers(*ON_SERVERS)], indirect=True)
#: For what takes seconds on a server: all of them are in `make test-all`.
NO_SERVER_FIRST = pytest.mark.parametrize(
    "place",
    [
        PLACES[0],
        *(pytest.param(name, id=name, marks=pytest.mark.further) for name in list(IN_PROCESS)[1:]),
        *(
            pytest.param(name, marks=[pytest.mark.xdist_group(name), pytest.mark.further])
            for name in ON_SERVERS
        ),
    ],
    indirect=True,
)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path, serve: Callable[[str], Server]) -> Place:
    if request.param in IN_PROCESS:
        return IN_PROCESS[request.param](tmp_path)
    server = serve(request.param)
    return Place(server.fresh_root(), server.options)


def write(place: Place, *batches: Any, kind: Any = ParquetWriter, name: str = "w00000-00000000") -> None:
    with kind(place.root, writer_id=name, roll=SMALL, spool=None, storage_options=place.options) as writer:
        for batch in batches:
            writer.write(batch)


def read(place: Place, **options: Any) -> Any:
    with DatasetReader(place.root, epochs=1, storage_options=place.options, **options) as reader:
        return concat_samples(list(reader))


def test_what_is_written_is_what_is_read_to_the_bit(place: Place) -> None:
    rows = numbered(50, images=np.arange(50 * 12, dtype=np.uint8).reshape(50, 3, 4))
    write(place, rows[:20], rows[20:50], kind=ParquetWriter, name="w00000-00000000")
    write(place, rows[:20], rows[20:50], kind=JsonWriter, name="w00001-00000000")
    assert_identical(read(place), concat_samples([rows, rows]))
    both = MultiAgentBatch(
        {"a": numbered(3, eps_id=np.zeros(3, int)), "b": numbered(3, eps_id=np.zeros(3, int))}, 3
    )
    other = Place(f"{place.root}-joint", place.options)
    write(other, both)
    assert_identical(read(other), both)


@NO_SERVER_FIRST
def test_a_shuffled_reader_serves_every_row_once_and_resumes_at_every_batch(place: Place) -> None:
    with group_bytes(256):
        write(place, numbered(60))

    def make() -> DatasetReader:
        return DatasetReader(
            place.root, batch_size=8, shuffle=True, seed=3, epochs=1, storage_options=place.options
        )

    assert_resumes(make)
    with make() as reader:
        order = concat_samples(list(reader))["t"].tolist()
    assert order != sorted(order)
    assert sorted(order) == list(range(60))


@NO_SERVER_FIRST
def test_a_damaged_shard_costs_its_rows_and_no_others(place: Place) -> None:
    write(place, numbered(16), numbered(16, 16), numbered(16, 32))
    storage = place.open()
    path = open_dataset(place.root, storage_options=place.options).segments[1].ref.path
    data = bytearray(storage.read(path))
    data[len(data) // 3] ^= 1
    storage.put(path, data)
    with pytest.raises(CorruptData, match="w00000-00000000"):
        read(place)
    assert read(place, on_error="skip")["t"].tolist() == [*range(16), *range(32, 48)]
    storage.put(path, data[:100])
    with pytest.raises(CorruptData):
        read(place)
    assert read(place, on_error="skip")["t"].tolist() == [*range(16), *range(32, 48)]


@FEWER_PLACES
def test_a_reader_follows_what_a_writer_adds(place: Place) -> None:
    with ParquetWriter(place.root, spool=None, storage_options=place.options) as writer:
        writer.write(numbered(10))
        writer.flush()
        with FollowReader(
            place.root, poll_seconds=0.05, idle_timeout=20, storage_options=place.options
        ) as reader:
            assert reader.sample()["t"].tolist() == list(range(10))
            writer.write(numbered(5, 10))
            writer.flush()
            assert reader.sample()["t"].tolist() == list(range(10, 15))


@FEWER_PLACES
def test_nothing_but_the_data_set_is_left_behind(place: Place) -> None:
    write(place, numbered(40))
    names = {entry.path.split("/")[0] for entry in place.open().list()}
    assert names == {"_rlio.json", "_schema", "data"}


# ---- copies ----


def copy(source: Place, target: Place) -> None:
    """Copy object by object, as `aws s3 sync` and the like do."""
    read_from, write_to = source.open(), target.open()
    for entry in read_from.list():
        write_to.put(entry.path, read_from.read(entry.path))


def assert_same_data_set(one: Place, other: Place) -> None:
    """Rows, digests and cursors are those of each other."""

    def reader_of(place: Place) -> DatasetReader:
        return DatasetReader(place.root, batch_size=7, epochs=1, storage_options=place.options)

    first, second = (open_dataset(place.root, storage_options=place.options) for place in (one, other))
    assert first.snapshot() == second.snapshot()
    assert first.digest == second.digest
    for here, there in ((one, other), (other, one)):
        with reader_of(here) as reader, reader_of(there) as twin:
            begun = [reader.sample() for _ in range(3)]
            twin.load_state_dict(json.loads(json.dumps(reader.state_dict())))
            rest = list(twin)
            assert_identical(concat_samples([*begun, *rest]), read(one))
            for mine, its in zip(reader, rest, strict=True):
                assert_identical(mine, its)


@pytest.mark.parametrize("kind", [ParquetWriter, JsonWriter])
def test_a_copy_by_cp_is_the_same_data_set(tmp_path: Path, kind: Any) -> None:
    here, there = Place(str(tmp_path / "a"), {}), Place(str(tmp_path / "b"), {})
    for i in range(2):
        with kind(here.root, worker_index=i, roll=SMALL) as writer:
            writer.write(numbered(40))
    shutil.copytree(here.root, there.root)
    assert_same_data_set(here, there)


@pytest.mark.xdist_group("s3")
def test_a_copy_from_s3_to_local_is_the_same_data_set(tmp_path: Path, serve: Callable[[str], Server]) -> None:
    server = serve("s3")
    here, there = Place(server.fresh_root(), server.options), Place(str(tmp_path / "run"), {})
    write(here, numbered(40))
    here.open().fs.get(here.root, there.root, recursive=True)  # as `aws s3 cp --recursive` does
    assert_same_data_set(here, there)


@pytest.mark.xdist_group("s3")
def test_times_of_names_on_s3_are_those_of_the_client_and_take_no_parser_of_texts(
    serve: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dateutil.parser
    import s3fs

    server = serve("s3")
    place = Place(server.fresh_root(), server.options)
    write(place, numbered(40))
    theirs = s3fs.S3FileSystem(**server.options, skip_instance_cache=True)
    expected = {name: about["LastModified"] for name, about in theirs.find(place.root, detail=True).items()}
    fs = Storage.open(place.root, storage_options={**server.options, "use_listings_cache": False}).fs
    about = fs.info(min(expected))  # A header has the time in another form, which its own parser reads.
    assert about["LastModified"] == expected[min(expected)]

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a text was parsed")

    monkeypatch.setattr(dateutil.parser, "parse", refuse)
    found = {name: each["LastModified"] for name, each in fs.find(place.root, detail=True).items()}
    assert found == expected
    assert all(time.tzinfo is not None for time in found.values())


@pytest.mark.xdist_group("azure")
def test_a_copy_from_local_to_azure_is_the_same_data_set(
    tmp_path: Path, serve: Callable[[str], Server]
) -> None:
    server = serve("azure")
    here, there = Place(str(tmp_path / "run"), {}), Place(server.fresh_root(), server.options)
    write(here, numbered(40))
    copy(here, there)
    assert_same_data_set(here, there)


def test_a_copy_that_has_half_of_the_shards_is_read_up_to_there_by_the_cursor_of_the_whole(
    tmp_path: Path,
) -> None:
    here, there = Place(str(tmp_path / "a"), {}), Place(str(tmp_path / "b"), {})
    write(here, numbered(64))
    shutil.copytree(here.root, there.root)
    last = open_dataset(there.root).segments[-1].ref.path
    (Path(there.root) / last).unlink()
    for marker in Path(there.root).glob("data/*/_sealed-*"):
        marker.unlink()
    assert read(there)["t"].tolist() == list(range(48))
    with DatasetReader(here.root, batch_size=8, epochs=1) as reader:
        state = reader.state_dict()
    with (
        DatasetReader(there.root, batch_size=8, epochs=1) as reader,
        pytest.raises(StateError, match="snapshot"),
    ):
        reader.load_state_dict(state)


# ---- reading over HTTP ----


@pytest.fixture(params=["http", "http_whole"])
def web(request: pytest.FixtureRequest, serve: Callable[[str], Server]) -> Server:
    return serve(request.param)


def publish_on(server: Server, *batches: SampleBatch, kind: Any = ParquetWriter) -> tuple[Place, Path]:
    """A data set in the folder that the server shows."""
    assert server.folder is not None
    name = uuid.uuid4().hex
    folder = server.folder / name
    with kind(folder, roll=SMALL, spool=None, writer_id="w00000-00000000") as writer:
        for batch in batches:
            writer.write(batch)
    return Place(f"{server.base}/{name}", {}), folder


@pytest.mark.xdist_group("http")
@pytest.mark.each_value_once
@pytest.mark.parametrize("kind", [ParquetWriter, JsonWriter])
def test_a_data_set_is_read_from_a_web_server_that_lists_folders(web: Server, kind: Any) -> None:
    with group_bytes(256):
        place, folder = publish_on(web, numbered(40), numbered(20, 40), kind=kind)
    assert all(entry.size is None for entry in place.open().list()), "what is tested: listings without sizes"
    assert_identical(read(place), read(Place(str(folder), {})))
    assert sorted(read(place, shuffle=True, seed=1)["t"].tolist()) == list(range(60))
    assert_same_data_set(place, Place(str(folder), {}))


@pytest.mark.xdist_group("http")
def test_a_web_server_gives_the_ranges_that_were_asked_for(web: Server) -> None:
    assert web.folder is not None
    name = uuid.uuid4().hex
    (web.folder / name).mkdir()
    (web.folder / name / "a.bin").write_bytes(b"0123456789")
    (web.folder / name / "empty.bin").write_bytes(b"")
    storage = Storage.open(f"{web.base}/{name}")
    for start in range(12):
        for stop in range(start, 13):
            assert storage.read_range("a.bin", start, stop) == b"0123456789"[start:stop], (start, stop)
    assert storage.read("empty.bin") == storage.read("empty.bin", limit=3) == b""
    assert storage.exists("a.bin")
    assert storage.exists()
    assert not storage.exists("b.bin")
    with pytest.raises(DataNotFound):
        storage.read("b.bin")


@pytest.mark.xdist_group("http")
def test_a_torn_object_on_a_web_server_is_found_when_it_is_read(web: Server) -> None:
    place, folder = publish_on(web, numbered(16), numbered(16, 16))
    torn = folder / open_dataset(folder).segments[0].ref.path
    torn.write_bytes(torn.read_bytes()[:-7])
    with pytest.raises(CorruptData):
        read(place)
    assert read(place, on_error="skip")["t"].tolist() == list(range(16, 32))


@pytest.mark.xdist_group("http")
def test_nothing_is_written_to_a_web_server(web: Server) -> None:
    with pytest.raises(PublishError, match="read only"):
        Storage.open(f"{web.base}/x").put("a.bin", b"content")


@pytest.mark.parametrize("scheme", ["http", "sftp", "ftp", "s3"])
def test_a_server_that_is_down_is_no_empty_folder(scheme: str) -> None:
    port, once = free_port(), Retry(attempts=1)
    looks: dict[str, Callable[[Storage], object]] = {
        "exists": lambda storage: storage.exists(),
        "list": lambda storage: storage.list(),
        "read": lambda storage: storage.read("_rlio.json"),
    }
    for look in looks.values():
        with pytest.raises(OSError, match=r"(?i)connect") as caught:  # noqa: PT012
            # SFTP and FTP connect when they are opened.
            if scheme == "s3":
                options = {
                    "key": "k",
                    "secret": "s",
                    "endpoint_url": f"http://127.0.0.1:{port}",
                    "config_kwargs": {"retries": {"max_attempts": 0}},
                }
                look(Storage.open("s3://bucket/run", storage_options=options, retry=once))
            else:
                look(Storage.open(f"{scheme}://127.0.0.1:{port}/run", retry=once))
        assert not isinstance(caught.value, FileNotFoundError)


@pytest.mark.xdist_group("s3")
def test_json_lines_of_others_are_read_from_a_bucket(serve: Callable[[str], Server]) -> None:
    server = serve("s3")
    storage = Storage.open(server.fresh_root(), storage_options=server.options)
    for i in range(2):
        line = {"type": "SampleBatch", "obs": [[i, 1.0], [i, 2.0]], "rewards": [1.0, 2.0]}
        storage.put(f"out-{i}.json", json.dumps(line).encode())
    with JsonReader(f"{storage.uri}/*.json", epochs=1, storage_options=server.options) as reader:
        assert concat_samples(list(reader))["rewards"].tolist() == [1.0, 2.0, 1.0, 2.0]


@NO_SERVER_FIRST
def test_parts_of_a_job_are_written_by_attempts_of_which_one_is_read(place: Place) -> None:
    storage = place.open()

    def begin() -> PartWriter:
        writer = PartWriter(storage, part_id("job", 0), PartOptions(roll=SMALL))
        if writer.taken is None:
            writer.write(numbered(50))
        return writer

    killed, slow, first = begin(), begin(), begin()
    sealed = first.finish()
    assert slow.finish() == sealed
    assert begin().finish() == sealed
    killed.abandon()
    dataset = open_dataset(place.root, storage_options=place.options)
    assert dataset.snapshot() == {sealed.writer: 50}
    with DatasetReader(dataset, epochs=1) as reader:
        assert_identical(concat_samples(list(reader)), numbered(50))
    assert {entry.path.split("/")[1] for entry in storage.list("data")} == {sealed.writer}
