"""What fails in a store, or on a disk, is an error of ours: callers that catch `RlioError` catch it."""

from __future__ import annotations

import errno
import io
import json
import pickle
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
from crash_shim import failing, intercepted
from fsspec.implementations.memory import MemoryFileSystem
from further import further

import rlio
from rlio.errors import PublishError, RlioError, StoreError, StoreRefused, StoreTimeout
from rlio.storage.failures import is_permanent
from rlio.storage.filesystem import InputFile, Retry, Storage, expand_inputs, open_input
from rlio.testing import FaultyFileSystem
from rlio.testing.filesystem import Call, Fault


class ClientError(Exception):
    """As clients have them: no error of the system."""


ERRORS: list[tuple[Callable[[], Exception], type[StoreError]]] = [
    (lambda: OSError(errno.EIO, "injected"), StoreError),
    (lambda: ConnectionResetError(errno.ECONNRESET, "reset"), StoreError),
    (lambda: TimeoutError("no answer"), StoreTimeout),
    (lambda: PermissionError(errno.EACCES, "denied"), StoreRefused),
    (lambda: ClientError("teapot"), StoreError),
]


class Ailing:
    """A store in memory of which the calls that `ails` chooses fail with `error`."""

    def __init__(self) -> None:
        fsspec.register_implementation("ailing", _AilingFileSystem, clobber=True)
        self.root = f"ailing:///{uuid.uuid4().hex}/run"
        self.ails: Callable[[Call], bool] = lambda call: False
        self.error: Callable[[], Exception] = ERRORS[0][0]
        self.options: dict[str, Any] = {
            "target": MemoryFileSystem(),
            "choose": self._choose,
            "error": lambda: self.error(),
        }

    def _choose(self, call: Call) -> Fault | None:
        return "before" if self.ails(call) else None


class _AilingFileSystem(FaultyFileSystem):
    protocol = "ailing"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ailing]:
    monkeypatch.setattr(Retry, "wait", lambda self, attempt, path: None)
    yield Ailing()
    MemoryFileSystem.store.clear()


OPERATIONS: dict[str, Callable[[Storage], object]] = {
    "read": lambda storage: storage.read("data/a.bin"),
    "read_range": lambda storage: storage.read_range("data/a.bin", 0, 2),
    "put": lambda storage: storage.put("data/a.bin", b"b"),
    "list": lambda storage: storage.list(),
    "exists": lambda storage: storage.exists("data/a.bin"),
    "remove": lambda storage: storage.remove("data/a.bin"),
    "modified": lambda storage: storage.modified("data/a.bin"),
    "folders": lambda storage: storage.folders("data"),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_whatever_a_client_raises_is_an_error_of_ours_with_its_place_and_cause(
    store: Ailing, operation: str
) -> None:
    storage = Storage.open(store.root, storage_options=store.options)
    storage.put("data/a.bin", b"0123")
    for make, kind in ERRORS:
        store.ails, store.error = lambda call: True, make
        with pytest.raises(RlioError) as caught:
            OPERATIONS[operation](storage)
        store.ails = lambda call: False
        error = caught.value
        assert str(error.uri).startswith(storage.uri)
        assert type(error.__cause__) is type(make())
        if operation != "put":
            assert type(error) is kind
            assert error.errno == getattr(make(), "errno", None)  # type: ignore[attr-defined]
            assert is_permanent(error) is is_permanent(make())
            again = pickle.loads(pickle.dumps(error))
            assert (type(again), str(again), again.uri) == (kind, str(error), error.uri)
    assert storage.read("data/a.bin") == b"0123"


def test_whatever_a_local_disk_says_is_an_error_of_ours(tmp_path: Path) -> None:
    storage = Storage.open(tmp_path)
    storage.put("data/a.bin", b"0123")
    for operation in ("read", "read_range", "put", "remove", "modified"):
        for code, kind in ((errno.EIO, StoreError), (errno.EACCES, StoreRefused)):
            with (
                intercepted(failing(lambda name, number: name in ("open", "unlink"), code)),
                pytest.raises(RlioError) as caught,
            ):
                OPERATIONS[operation](storage)
            assert str(caught.value.uri).startswith(str(tmp_path))
            assert operation == "put" or type(caught.value) is kind
    assert storage.read("data/a.bin") == b"0123"


def test_a_client_that_cannot_connect_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("paramiko")
    monkeypatch.setattr(Retry, "wait", lambda self, attempt, path: None)
    with pytest.raises(StoreError):
        Storage.open("sftp://127.0.0.1:1/run")


# ---- writers and readers ----


def steps(rows: int = 4) -> rlio.SampleBatch:
    return rlio.SampleBatch(t=np.arange(rows), obs=np.zeros((rows, 2), np.float32))


@pytest.mark.further
@pytest.mark.parametrize("kind", [rlio.ParquetWriter, *further(rlio.JsonWriter)])
def test_every_call_of_a_writer_without_a_log_raises_errors_of_ours(
    store: Ailing, kind: type[rlio.ParquetWriter]
) -> None:
    """Each call of the store fails in turn, in each way, until a writer comes through without one."""

    def use(writer: Any) -> None:
        opened.append(writer)
        for _ in range(3):
            writer.write(steps())
        writer.flush()
        writer.write(steps())
        writer.close()

    opened: list[Any] = []
    for make, _ in ERRORS:
        store.error = make
        for ailing in range(40):
            root, count = f"ailing:///{uuid.uuid4().hex}/run", [0]

            def ails(call: Call, count: list[int] = count, ailing: int = ailing) -> bool:
                count[0] += 1
                return count[0] > ailing

            options = {**store.options, "rlio_retries": 0}
            store.ails = ails
            try:
                use(kind(root, spool=None, roll=rlio.Roll(max_rows=4), storage_options=options))
            except (StoreError, PublishError):
                continue
            break
        else:
            raise AssertionError("no writer came through")
        assert ailing > 5
    store.ails = lambda call: False
    for writer in opened:
        writer.close()


READERS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "cold": lambda root, options: rlio.DatasetReader(root, epochs=1, cache="none", storage_options=options),
    "store": lambda root, options: rlio.DatasetReader(
        root, epochs=1, shuffle=True, cache="memory", storage_options=options
    ),
    "follow": lambda root, options: rlio.FollowReader(root, storage_options=options),
    "json": lambda root, options: rlio.JsonReader(f"{root}/other.json", epochs=1, storage_options=options),
    "parquet": lambda root, options: rlio.ForeignParquetReader(
        f"{root}/other.parquet", epochs=1, on_error="skip", storage_options=options
    ),
    "hdf5": lambda root, options: rlio.D4RLReader(
        f"{root}/other.hdf5", epochs=1, on_error="skip", storage_options=options
    ),
}


def _others(storage: Storage, folder: Path) -> None:
    """Files of other libraries."""
    import h5py
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"obs": np.arange(6.0), "actions": np.arange(6)}), folder / "a.parquet")
    storage.put("other.parquet", (folder / "a.parquet").read_bytes())
    line = {"type": "SampleBatch", "obs": [[0.0], [1.0]], "actions": [0, 1], "eps_id": [1, 1]}
    storage.put("other.json", json.dumps(line).encode() + b"\n")
    with h5py.File(folder / "a.hdf5", "w") as file:
        file["observations"] = np.zeros((6, 2), np.float32)
        file["actions"] = np.zeros((6, 1), np.float32)
        file["rewards"] = np.zeros(6, np.float32)
        file["terminals"] = np.arange(6) == 5
        file["timeouts"] = np.zeros(6, bool)
    storage.put("other.hdf5", (folder / "a.hdf5").read_bytes())


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", READERS)
def test_every_call_of_a_reader_raises_errors_of_ours_and_an_outage_skips_no_row(
    store: Ailing, kind: str, tmp_path: Path
) -> None:
    with rlio.ParquetWriter(store.root, spool=None, storage_options=store.options) as writer:
        writer.write(steps(6))
    _others(Storage.open(store.root, storage_options=store.options), tmp_path)
    options = store.options if kind in ("json", "parquet", "hdf5") else {**store.options, "rlio_retries": 0}

    def rows() -> int:
        with READERS[kind](store.root, options) as reader:
            found = sum(len(batch) for batch in reader)
            assert reader.skipped == 0
        return found

    whole = rows()
    assert whole >= 2
    for make, _ in ERRORS:
        store.error = make
        for ailing in range(60):
            count = [0]

            def ails(call: Call, count: list[int] = count, ailing: int = ailing) -> bool:
                count[0] += 1
                return count[0] == ailing + 1

            store.ails = ails
            try:
                assert rows() == whole
            except StoreError:
                continue
            if count[0] <= ailing:
                break
        else:
            raise AssertionError("no reader came through")
        assert ailing >= 2


def test_a_file_of_others_that_cannot_be_read_further_is_an_error_of_ours(store: Ailing) -> None:
    storage = Storage.open(store.root, storage_options=store.options)
    storage.put("a.json", b"x" * 10_000_000)
    (file,) = expand_inputs(f"{store.root}/a.json", storage_options=store.options)
    for make, kind in ERRORS:
        stream = open_input(file)
        assert stream.read(5) == b"xxxxx"

        def refuse(*args: Any, make: Callable[[], Exception] = make) -> Any:
            raise make()

        broken = SimpleNamespace(read=refuse, close=lambda: None)
        stream.raw._file = broken  # type: ignore[attr-defined]  # In place of the client's own file.
        with stream, pytest.raises(kind):
            stream.read()


def test_a_timeout_while_a_file_of_others_is_read_is_no_damage_that_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    noise = np.random.default_rng(0).normal(size=60_000)
    pq.write_table(pa.table({"obs": noise, "actions": np.arange(60_000)}), path, row_group_size=6000)

    class Late(io.BytesIO):
        reads = 0

        def read(self, size: int | None = -1) -> bytes:
            self.reads += 1
            if self.reads > 2:
                raise TimeoutError("no answer")  # As clients raise it: without a number.
            return super().read(size)

    # Of this protocol, no file is fetched whole.
    fs = SimpleNamespace(protocol="memory", open=lambda path, mode: Late(Path(path).read_bytes()))
    late = InputFile(fs, str(path), f"late://{path}", path.stat().st_size)
    monkeypatch.setattr("rlio.formats.tables.parquet_source.find_files", lambda *args, **options: [late])
    with (
        pytest.raises(StoreTimeout) as caught,
        rlio.ForeignParquetReader("late", epochs=1, on_error="skip") as reader,
    ):
        list(reader)
    assert caught.value.uri == late.uri
