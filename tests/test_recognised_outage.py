"""A lone file whose store fails while rlio recognises it: the error is the store's, not one about formats."""

from __future__ import annotations

import ast
import io
import json
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import h5py
import kinds
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import test_known_kinds
from far_layouts import LAYOUTS
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

import rlio
from benchmarks import layouts
from rlio.errors import RlioError, StoreError
from rlio.formats.format import recognise
from rlio.formats.place import recognise_inputs
from rlio.storage.filesystem import Retry
from rlio.testing import FaultyFileSystem
from rlio.testing.filesystem import Call, Fault


class FaultyRanges(FaultyFileSystem):
    """Its files request ranges, as those of object stores do."""

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        return AbstractBufferedFile(self, path, mode)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("faulty", FaultyRanges, clobber=True)
    monkeypatch.setattr(Retry, "wait", lambda self, attempt, path: None)
    # Files of some kilobytes are read by several requests.
    for name, size in {
        "input_files._WHOLE_BYTES": 100,
        "input_files.GAP": 64,
        "far_file.GAP": 64,
        "far_file._PIECE": 1024,
        "far_file._RUN_BYTES": 4096,
        "far_file._KEPT_BYTES": 8192,
        "inputs._BUFFER_BYTES": 2048,
    }.items():
        monkeypatch.setattr(f"rlio.storage.{name}", size)
    yield
    MemoryFileSystem.store.clear()


def written(write: Callable[[Any], object]) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def of_hdf5(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        for name, values in arrays.items():
            file[name] = values
    return stream.getvalue()


def zipped(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()


ROWS = test_known_kinds.rows_of()
STEPS = np.arange(50.0)
TABLE = pa.table({"obs": STEPS, "actions": STEPS, "rewards": STEPS})
RLLIB = json.dumps({"type": "SampleBatch", "obs": [[1.0]], "actions": [1], "rewards": [1.0], "dones": [True]})
LINES = json.dumps({"speed": 1.0, "reward": 2.0}).encode() + b"\n"

#: Lone files, by name.
FILES: dict[str, Callable[[], bytes]] = {
    "d4rl.hdf5": lambda: of_hdf5(**kinds.d4rl_arrays(ROWS)),
    "table.h5": lambda: of_hdf5(speed=STEPS, reward=STEPS),
    "d4rl.npz": lambda: written(lambda to: np.savez(to, **kinds.d4rl_arrays(ROWS))),
    "further.npz": lambda: written(
        lambda to: np.savez(to, **kinds.d4rl_arrays(ROWS), speed=np.zeros((len(ROWS), 150)))
    ),
    "table.npz": lambda: written(lambda to: np.savez(to, speed=STEPS, reward=STEPS)),
    "others.parquet": lambda: written(lambda to: pq.write_table(TABLE, to)),
    "others.arrow": lambda: written(lambda to: feather.write_feather(TABLE, to, compression="uncompressed")),
    "table.csv": lambda: b"speed,reward\n1,2\n",
    "rllib.json": lambda: RLLIB.encode() + b"\n",
    "table.jsonl": lambda: LINES,
    "state.json": lambda: LINES,
    "array.npy": lambda: written(lambda to: np.save(to, STEPS)),
    "data.pkl": lambda: b"\x80\x04N.",
    "data.pt": lambda: zipped(**{"archive/data.pkl": b"\x80\x04N."}),
    "data.csv.gz": lambda: b"\x1f\x8b",
    "rllib.zip": lambda: zipped(**{"run/output.json": RLLIB.encode()}),
    "minari.zip": lambda: zipped(**LAYOUTS["minari"](1)),
    "tables.zip": lambda: zipped(**{"speed.csv": b"speed,reward\n1,2\n"}),
    "robomimic.hdf5": lambda: next(iter(LAYOUTS["robomimic"](1).values())),
    "d3rlpy.h5": lambda: next(iter(LAYOUTS["d3rlpy-2"](1).values())),
    "unknown.bin": lambda: b"abc",
}


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns; or the class and text of its error."""
    try:
        found = call()
        if isinstance(found, rlio.Dataset):
            return {name: schema.columns for name, schema in found.schemas.items()}
    except RlioError as error:
        return error if isinstance(error, StoreError) else (type(error), str(error))
    if isinstance(found, rlio.InputReader):
        found.close()
        return type(found)
    return found


CALLS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "recognise": lambda place, how: recognise(place, storage_options=how),
    "in a list": lambda place, how: recognise_inputs([place, place], how),
    "read": lambda place, how: rlio.read(place, storage_options=how, cache="none"),
    "open_dataset": lambda place, how: rlio.open_dataset(place, storage_options=how),
}
ERRORS = {"fails": lambda: OSError(5, "injected fault"), "refuses": lambda: PermissionError(13, "denied")}


def put(name: str) -> str:
    place = f"{uuid.uuid4().hex}/{name}"
    MemoryFileSystem().pipe_file(f"/{place}", FILES[name]())
    return f"faulty:///{place}"


@pytest.mark.each_value_once
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("lasts", ["one kind of calls", "some calls", "from then on"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", FILES)
def test_a_store_that_fails_is_not_taken_for_a_file_of_another_format(
    name: str, call: str, lasts: str, error: str
) -> None:
    place, calls = put(name), list[Call]()

    def made(choose: Callable[[Call], Fault | None]) -> Any:
        how = {"target": MemoryFileSystem(), "choose": choose, "error": ERRORS[error]}
        return outcome(lambda: CALLS[call](place, how))

    expected = made(calls.append)
    failed = 0
    for begin in range(len(calls)):
        so_far: list[Call] = []

        def choose(call: Call, begin: int = begin, so_far: list[Call] = so_far) -> Fault | None:
            so_far.append(call)
            if len(so_far) <= begin:
                return None
            fails = {
                "one kind of calls": call[1:] == so_far[begin][1:],
                "some calls": len(so_far) <= begin + Retry().attempts,  # A call is tried again.
                "from then on": True,
            }
            return "before" if fails[lasts] else None

        found = made(choose)
        if isinstance(found, StoreError):
            failed += 1
        else:
            assert found == expected, f"{calls[begin]} failed"
    # The ending of some names says all, without a request.
    assert failed or name.endswith((".csv", ".npy", ".pkl", ".pt", ".gz", ".bin"))


@pytest.mark.parametrize("name", ["d4rl.hdf5", "others.parquet", "rllib.json"])
def test_a_folder_with_the_name_of_a_file_is_looked_into(name: str) -> None:
    """SFTP says only "Failure" of a folder that is opened as a file."""
    place = put(name)
    path = place.removeprefix("faulty://")
    MemoryFileSystem().pipe_file(f"{path}.d/{name}", FILES[name]())
    MemoryFileSystem().mv(path, path + ".away")
    MemoryFileSystem().mv(f"{path}.d", path, recursive=True)

    def choose(call: Call) -> Fault | None:
        return "before" if call.path == path and call.operation in ("cat_file", "open") else None

    assert outcome(
        lambda: recognise(place, storage_options={"target": MemoryFileSystem(), "choose": choose})
    ) == outcome(lambda: recognise(place.replace("faulty", "memory")))


@pytest.mark.few(2)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("kind", [kind for kind in layouts.LAYOUTS if kind not in ("aloha", "zarr", "rlio")])
def test_a_store_that_fails_for_a_while_loses_neither_rows_nor_columns(kind: str, on_error: Any) -> None:
    """Whatever calls fail: what is read is the same, or the error is the store's."""
    root = uuid.uuid4().hex
    for path, data in layouts.LAYOUTS[kind](layouts.Shape(rows=20, episode=5, width=3), 2).items():
        MemoryFileSystem().pipe_file(f"/{root}/data/{path}", data)

    def read(choose: Callable[[Call], Fault | None]) -> Any:
        how = {"target": MemoryFileSystem(), "choose": choose}
        data = rlio.open_dataset(f"faulty:///{root}/data", storage_options=how, on_error=on_error)
        with data.read(cache="none", epochs=1, batch_size=16) as reader:
            rows = str([{name: np.asarray(batch[name]).tolist() for name in batch} for batch in reader])
        return {name: schema.columns for name, schema in data.schemas.items()}, list(data.notes), rows

    calls: list[Call] = []
    expected, failed = read(calls.append), 0
    for begin in range(len(calls)):
        so_far: list[Call] = []

        def choose(call: Call, begin: int = begin, so_far: list[Call] = so_far) -> Fault | None:
            so_far.append(call)
            return "before" if begin < len(so_far) <= begin + Retry().attempts else None

        try:
            assert read(choose) == expected, f"{calls[begin]} failed"
        except StoreError:
            failed += 1
    assert failed > 5


#: Where a handler is around what asks no store for anything: file and function.
_NO_STORE = [("formats/tables/mapping.py", "_check_edges")]  # Flags in an array.


def test_handlers_of_all_errors_let_those_of_a_store_pass() -> None:
    """Otherwise a store that fails would be taken for data without that column, or in another format."""
    package, found = Path(rlio.__file__).parent, []
    for folder in ("formats", "source", "look", "query"):
        for file in sorted((package / folder).rglob("*.py")):
            for function in ast.walk(ast.parse(file.read_text())):
                if isinstance(function, ast.FunctionDef):
                    found += [
                        (str(file.relative_to(package)), function.name)
                        for tried in ast.walk(function)
                        if isinstance(tried, ast.Try) and _swallows(tried)
                    ]
    assert found == _NO_STORE


def _swallows(tried: ast.Try) -> bool:
    """Whether a handler of all of rlio's errors goes on after one of a store, and does not raise it later."""
    for handler in tried.handlers:
        kinds = ast.walk(handler.type) if handler.type else [ast.Name("RlioError")]
        names = {node.id for node in kinds if isinstance(node, ast.Name)}
        if "StoreError" in names:
            return False
        if "RlioError" in names:
            raises = any(isinstance(node, ast.Raise) for node in ast.walk(handler))
            return not raises and "raise_at" not in ast.dump(handler)
    return False
