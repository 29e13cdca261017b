"""A lone file whose store fails while rlio recognises it: the error is the store's, not one about formats."""

from __future__ import annotations

import io
import json
import uuid
import zipfile
from collections.abc import Callable, Iterator
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
    "open_dataset": lambda place, how: type(rlio.open_dataset(place, storage_options=how)),
}
ERRORS = {"fails": lambda: OSError(5, "injected fault"), "refuses": lambda: PermissionError(13, "denied")}


def put(name: str) -> str:
    place = f"{uuid.uuid4().hex}/{name}"
    MemoryFileSystem().pipe_file(f"/{place}", FILES[name]())
    return f"faulty:///{place}"


@pytest.mark.each_value_once
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("lasts", ["one call", "from then on"])
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
            # The call is tried again; so it fails for good.
            alike = call[1:] == so_far[begin][1:]
            return "before" if lasts == "from then on" or alike else None

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
