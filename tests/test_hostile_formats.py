"""A payload in the files of other libraries runs nothing: no pickle, no named class, no hook, no template.

In each carrier, what another program would run leaves a mark: a pickle that is loaded, a module `trap` that
is imported, a text that is evaluated, an extension type that is asked, a file that is opened outside.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import lz4.frame
import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rlio
from rlio.errors import RlioError
from rlio.formats.format import recognise

GOLDEN = Path(__file__).with_name("golden") / "formats"
CODE = "__import__('trap').go()"
MODULE = """
from pathlib import Path
def go(*_, **__):
    Path(__file__).with_name("ran").touch()
class Go:
    def __init__(self, *_, **__): go()
    def __setstate__(self, _): go()
    __call__ = from_json = deserialize = __arrow_ext_deserialize__ = go
go()
"""
#: What libraries of JSON, of pickles and of configurations take for the name of something to call.
NAMES = {
    "__class__": "trap.Go", "__type__": "trap:Go", "_type": "trap.Go", "py/object": "trap.Go",
    "py/reduce": [{"py/type": "trap.go"}, {"py/tuple": []}], "py/repr": f"trap/{CODE}",
    "class_name": "trap.Go", "_target_": "trap.go", "$type": "trap.Go",
    "pythonClassName": "trap.Go", "entry_point": "trap:go",
    "!!python/object/apply": "trap.go",
}  # fmt: skip


class Harm:
    def __reduce__(self) -> Any:
        return eval, (CODE,)


def pickled() -> bytes:
    return pickle.dumps(Harm())


def packed() -> str:
    """As RLlib packs a column."""
    return base64.b64encode(lz4.frame.compress(pickled())).decode("ascii")


class Asked(pa.ExtensionType):  # type: ignore[misc]  # pyarrow ships no types
    """An extension type that notes whether it is asked."""

    marks: list[Path] = []  # noqa: RUF012  # One list for all.

    def __init__(self, storage: Any = None) -> None:
        super().__init__(storage or pa.int64(), "rlio.test.trap")

    def __arrow_ext_serialize__(self) -> bytes:
        return pickled()

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, serialized: bytes) -> Any:
        for mark in cls.marks:
            mark.touch()
        return cls(storage)


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What is there after anything ran."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/trap.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.chdir(tmp_path)
    pa.register_extension_type(Asked())
    Asked.marks = [tmp_path / "modules/ran"]
    yield tmp_path / "modules/ran"
    pa.unregister_extension_type("rlio.test.trap")


def lines(path: Path, **columns: Any) -> Path:
    step = {"obs": [[0.0], [1.0]], "actions": [0, 1], "rewards": [1.0, 1.0], "terminateds": [False, True]}
    path.write_text(json.dumps({"type": "SampleBatch", **step, **columns}) + "\n")
    return path


def copied(name: str, to: Path) -> Path:
    shutil.copytree(GOLDEN / name, to)
    return to


def edited(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def extended(path: Path, name: str) -> None:
    """A column of a Parquet file, in an extension type whose metadata is a pickle."""
    table = pq.read_table(path)
    index = table.schema.get_field_index(name)
    storage = table[name].combine_chunks()
    storage = storage.chunk(0) if isinstance(storage, pa.ChunkedArray) else storage
    column = pa.ExtensionArray.from_storage(Asked(storage.type), storage)
    pq.write_table(table.set_column(index, name, column), path)


# ---- carriers ----


def json_names(root: Path) -> Path:
    return lines(root / "a.json", obs=[NAMES, NAMES], infos=[NAMES, NAMES], **NAMES)


def json_infos(root: Path) -> Path:
    return lines(root / "a.json", infos=[NAMES, NAMES])


def json_type(root: Path) -> Path:
    return lines(root / "a.json", type="trap.Go")


def json_packed(root: Path) -> Path:
    return lines(root / "a.json", obs=packed())


def json_packed_rows(root: Path) -> Path:
    return lines(root / "a.json", infos=[packed(), packed()])


def rllib_parquet(root: Path) -> Path:
    columns = {"eps_id": [0, 0], "obs": [packed()] * 2, "actions": [0, 1], "rewards": [1.0, 1.0]}
    pq.write_table(pa.table({**columns, "dones": [False, True]}), root / "a.parquet")
    return root / "a.parquet"


def rllib_parquet_extension(root: Path) -> Path:
    columns = {"eps_id": [0, 0], "obs": [[0.0], [1.0]], "actions": [0, 1], "rewards": [1.0, 1.0]}
    pq.write_table(pa.table({**columns, "dones": [False, True]}), root / "a.parquet")
    extended(root / "a.parquet", "actions")
    return root / "a.parquet"


def arrow_extension(root: Path) -> Path:
    storage = pa.array([0, 1])
    column = pa.ExtensionArray.from_storage(Asked(storage.type), storage)
    steps = {"obs": [0.0, 1.0], "actions": column, "rewards": [1.0, 1.0], "terminateds": [False, True]}
    with pa.ipc.new_stream(root / "a.arrow", (table := pa.table(steps)).schema) as writer:
        writer.write_table(table)
    return root / "a.arrow"


def episodes(root: Path, **values: Any) -> Path:
    item = pq.read_table(GOLDEN / "rllib/chunks/episodes.parquet")["item"][0].as_py()
    state = msgpack.unpackb(item, strict_map_key=False)
    items = [msgpack.packb({**state, **values})]
    pq.write_table(pa.table({"item": pa.array(items, pa.binary())}), root / "a.parquet")
    return root / "a.parquet"


def msgpack_object_array(root: Path) -> Path:
    array = {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": pickled()}
    return episodes(root, observations=array)


def msgpack_extension(root: Path) -> Path:
    return episodes(root, infos=msgpack.ExtType(5, pickled()))


def msgpack_space(root: Path) -> Path:
    return episodes(root, observation_space={"space": "trap.Go", "gym_version": CODE, **NAMES})


def npz(root: Path) -> Path:
    steps = {"obs": np.zeros((4, 2)), "actions": np.zeros(4), "rewards": np.zeros(4)}
    np.savez(root / "a.npz", lengths=np.array([4]), infos=np.array([Harm()] * 4, object), **steps)
    return root / "a.npz"


def hdf5(root: Path, observations: Any, **attributes: Any) -> Path:
    with h5py.File(root / "a.hdf5", "w") as file:
        file["observations"], file["actions"] = observations, np.zeros((2, 1))
        file["rewards"], file["terminals"] = np.zeros(2), np.array([False, True])
        file.attrs.update(attributes)
    return root / "a.hdf5"


def hdf5_opaque(root: Path) -> Path:
    return hdf5(root, np.array([np.void(pickled())] * 2))


def hdf5_bytes(root: Path) -> Path:
    return hdf5(root, np.array([np.frombuffer(pickled(), np.uint8)] * 2, dtype=np.uint8), pickle=CODE)


def hdf5_texts(root: Path) -> Path:
    return hdf5(root, np.array([base64.b64encode(pickled())] * 2, "S"))


def robomimic(root: Path) -> Path:
    with h5py.File(root / "a.hdf5", "w") as file:
        file.create_group("data").attrs.update(total=2, env_args=json.dumps({"env_name": CODE, **NAMES}))
        group = file.create_group("data/demo_0")
        group.attrs.update(num_samples=2, model_file=CODE)
        group["obs/x"], group["actions"] = np.zeros((2, 1)), np.zeros((2, 1))
        group["rewards"], group["dones"] = np.zeros(2), np.array([0, 1])
    return root / "a.hdf5"


def tianshou(root: Path) -> Path:
    shutil.copy(GOLDEN / "tianshou/ring.hdf5", root / "a.hdf5")
    with h5py.File(root / "a.hdf5", "r+") as file:
        del file["_meta/obs"]
        file["_meta/obs"] = np.frombuffer(pickled(), np.int8)
        file["_meta/obs"].attrs["__data_type__"] = "pickled_ndarray"
    return root / "a.hdf5"


def d3rlpy(root: Path) -> Path:
    shutil.copy(GOLDEN / "d3rlpy/buffer.h5", root / "a.h5")
    with h5py.File(root / "a.h5", "r+") as file:
        name = next(name for name in file if name.startswith("observations"))
        del file[name]
        file[name] = np.array([np.void(pickled())] * 3)
    return root / "a.h5"


def minari_env_spec(root: Path) -> Path:
    found = copied("minari/cart/collected-v0", root / "a")
    spec = {"id": "Trap-v0", "kwargs": {"code": CODE}, "additional_wrappers": [NAMES], **NAMES}
    edited(found / "data/metadata.json", env_spec=json.dumps(spec), eval_env_spec=CODE, requirements=[CODE])
    return found


def minari_space(root: Path) -> Path:
    found = copied("minari/cart/collected-v0", root / "a")
    edited(found / "data/metadata.json", action_space=json.dumps({"type": "trap.Go", **NAMES}))
    return found


def minari_space_text(root: Path) -> Path:
    found = copied("minari/cart/collected-v0", root / "a")
    edited(found / "data/metadata.json", observation_space=CODE, data_format="trap")
    return found


def minari_parquet(root: Path) -> Path:
    found = copied("minari/nested/parquet-v0", root / "a")
    extended(found / "data/0/part-0.parquet", "rewards")
    return found


def lerobot_template(root: Path) -> Path:
    found = copied("lerobot/v3.0", root / "a")
    edited(
        found / "meta/info.json", data_path="{chunk_index.__class__.__init__.__globals__}/{file_index!r:{x}}"
    )
    return found


def lerobot_outside(root: Path) -> Path:
    found = copied("lerobot/v3.0", root / "a")
    shutil.copy(found / "data/chunk-000/file-000.parquet", root / "outside.parquet")
    extended(root / "outside.parquet", "next.reward")  # Its reader would ask the type.
    edited(found / "meta/info.json", data_path="../outside.parquet")
    return found


def lerobot_features(root: Path) -> Path:
    found = copied("lerobot/v3.0", root / "a")
    features = json.loads((found / "meta/info.json").read_text())["features"]
    features["action"] = {**features["action"], "dtype": "trap.Go", "names": [CODE], **NAMES}
    edited(found / "meta/info.json", features=features, robot_type=CODE)
    return found


def lerobot_data(root: Path) -> Path:
    found = copied("lerobot/v3.0", root / "a")
    extended(found / "data/chunk-000/file-000.parquet", "next.reward")
    return found


def lerobot_tasks(root: Path) -> Path:
    found = copied("lerobot/v3.0", root / "a")
    extended(found / "meta/tasks.parquet", "task_index")
    return found


def lerobot_episodes(root: Path) -> Path:
    found = copied("lerobot/v3.0", root / "a")
    extended(found / "meta/episodes/chunk-000/file-000.parquet", "length")
    return found


def folder_of(name: str, **values: Any) -> Callable[[Path], Path]:
    """The metadata of a library, full of names."""

    def make(root: Path) -> Path:
        (root / "a").mkdir()
        (root / "a" / name).write_text(json.dumps({**NAMES, **values}))
        (root / "a/data.bin").write_bytes(pickled())
        return root / "a"

    make.__name__ = name
    return make


CARRIERS = [
    *(
        json_names,
        json_infos,
        json_type,
        json_packed,
        json_packed_rows,
        rllib_parquet,
        rllib_parquet_extension,
        arrow_extension,
    ),
    *(msgpack_object_array, msgpack_extension, msgpack_space, npz, hdf5_opaque, hdf5_bytes, hdf5_texts),
    *(robomimic, tianshou, d3rlpy, minari_env_spec, minari_space, minari_space_text, minari_parquet),
    *(lerobot_template, lerobot_outside, lerobot_features, lerobot_data, lerobot_tasks, lerobot_episodes),
    folder_of("state.json", _data_files=[{"filename": "../../data.bin"}], _fingerprint=CODE),
    folder_of("dataset_info.json", builder_name=CODE, dataset_size=1, features={"a": NAMES}),
    folder_of("features.json", featuresDict={"features": {"steps": NAMES}}),
    folder_of("meta.json", obs={"type": "trap.Go", "dtype": CODE, "device": CODE, "shape": [1]}),
]
#: Served, because nothing of what they name is needed for the rows; columns of an extension type as what is
#: stored in them.
SERVED = {
    *(json_infos, hdf5_bytes, robomimic, minari_env_spec, msgpack_space, lerobot_features),
    *(arrow_extension, minari_parquet, lerobot_data, lerobot_tasks, lerobot_episodes),
}


@pytest.mark.parametrize("carrier", CARRIERS, ids=lambda make: make.__name__)
def test_a_payload_runs_nothing(carrier: Callable[[Path], Path], ran: Path, tmp_path: Path) -> None:
    src = carrier(tmp_path)
    ran.unlink(missing_ok=True)  # Making the file may have asked the extension type.
    served = 0
    for use in (read, convert):
        with contextlib.suppress(RlioError):
            served += use(src, tmp_path / "out")
        assert not ran.exists(), use.__name__
    assert bool(served) == (carrier in SERVED)


def read(src: Path, _: Path) -> int:
    recognise(src)
    with rlio.read(src, epochs=1) as reader:
        return sum(map(len, reader))


def convert(src: Path, dst: Path) -> int:
    return rlio.convert(src, dst).rows


def test_the_traps_go_off(ran: Path, tmp_path: Path) -> None:
    """What the carriers hold leaves its mark if it is used as its library would."""
    pickle.loads(pickled())
    assert ran.exists()
    ran.unlink()
    rllib_parquet_extension(tmp_path)
    ran.unlink(missing_ok=True)
    pq.read_table(tmp_path / "a.parquet")
    assert ran.exists()
