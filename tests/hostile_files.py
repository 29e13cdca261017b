"""Forged files in the layouts of other libraries: a few kilobytes that claim gigabytes, or work without end.

Each is a case of `hostile_corpus.CASES`, beside those of rlio's own files.
"""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hostile_corpus import GOOD, add, parquet_files

import rlio

GOLDEN = Path(__file__).with_name("golden") / "formats"
#: Rows that take no byte of a file.
MANY = 10**8
#: Rows of one byte, of which deflate makes a thousandth.
SOME = 30_000_000
_MAPPING = rlio.Mapping(
    columns={"obs": ["x"], "actions": "a", "rewards": "r"}, episode="e", terminated=True, next_obs="derive"
)


def case(name: str, **options: Any) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    """Put what the function makes into the corpus."""

    def put(make: Callable[[Path], object]) -> Callable[[Path], object]:
        add(name, lambda folder: (make(folder), None)[1], "read", **options)
        return make

    return put


# ---- NPZ ----


def _npy(descr: str, shape: str, data: bytes = b"") -> bytes:
    head = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    head += b" " * ((53 - len(head)) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + data


def _npz(folder: Path, arrays: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(folder / "a.npz", "w", method) as archive:
        for name, data in arrays.items():
            archive.writestr(f"{name}.npy", data)


@case("NPZ: arrays of 10^8 rows and no column")
def _npz_of_no_width(folder: Path) -> None:
    wide = {name: _npy("<f4", f"({MANY}, 0)") for name in ("obs", "actions", "rewards")}
    _npz(folder, {**wide, "lengths": _npy("<i8", "(1,)", struct.pack("<q", MANY))})


@case("NPZ: an array of texts without a character")
def _npz_of_no_text(folder: Path) -> None:
    wide = {name: _npy("<U0", f"({MANY},)") for name in ("obs", "actions", "rewards", "terminateds")}
    _npz(folder, wide)


@case("NPZ: a header of 2 GB")
def _npz_of_a_long_header(folder: Path) -> None:
    head = b"\x93NUMPY\2\0" + struct.pack("<I", 0x7FFFFFFF)
    _npz(folder, {"obs": head + b" " * (60 << 20)}, zipfile.ZIP_DEFLATED)


def _npz_packed(method: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        arrays = {name: _npy("<f8", "(1000000,)", bytes(8_000_000)) for name in ("obs", "actions")}
        _npz(
            folder,
            {**arrays, "rewards": arrays["obs"], "terminateds": _npy("|b1", "(1000000,)", bytes(10**6))},
            method,
        )

    return make


case("NPZ: bzip2")(_npz_packed(zipfile.ZIP_BZIP2))
case("NPZ: lzma")(_npz_packed(zipfile.ZIP_LZMA))


@case("NPZ: a directory of 110,000 names")
def _npz_of_names(folder: Path) -> None:
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        for number in range(110_000):
            archive.writestr(f"{'x' * 100}{number}.npy", b"")


@case("NPZ: a header of nested tuples")
def _npz_nested(folder: Path) -> None:
    _npz(folder, {"obs": _npy("<f4", "(" * 5000 + "1" + ",)" * 5000)})


@case("NPZ: a negative shape")
def _npz_negative(folder: Path) -> None:
    _npz(folder, {name: _npy("<f4", "(-3,)", bytes(8)) for name in ("obs", "actions", "rewards")})


@case("NPZ: a shape of texts")
def _npz_text_shape(folder: Path) -> None:
    _npz(folder, {name: _npy("<f4", "('a',)", bytes(8)) for name in ("obs", "actions", "rewards")})


@case("NPZ: a shape of 10^30 rows")
def _npz_huge(folder: Path) -> None:
    _npz(folder, {name: _npy("<f4", f"({10**30}, 0)") for name in ("obs", "actions", "rewards")})


# ---- HDF5 ----


def _hdf5(folder: Path, name: str = "a.hdf5") -> Any:
    return h5py.File(folder / name, "w", libver="latest")


@case("HDF5: d3rlpy's datasets of 10^8 rows and no column")
def _d3rlpy_of_no_width(folder: Path) -> None:
    with _hdf5(folder, "a.h5") as file:
        file["columns"] = ["observations", "actions", "rewards", "terminated"]
        file["num_episodes"], file["version"], file["terminated_0"] = 1, "2.1", False
        for name in ("observations_0", "actions_0", "rewards_0"):
            file.create_dataset(name, (MANY, 0), np.float32)


@case("HDF5: Robomimic's datasets of 10^8 rows and no column")
def _robomimic_of_no_width(folder: Path) -> None:
    with _hdf5(folder) as file:
        group = file.create_group("data/demo_0")
        group.create_dataset("actions", (MANY, 0), np.float32)
        group.create_dataset("obs/x", (MANY, 0), np.float32)


@case("HDF5: d3rlpy 1 of 10^8 rows and no column")
def _d3rlpy_1_of_no_width(folder: Path) -> None:
    with _hdf5(folder) as file:
        for name in ("observations", "actions", "rewards", "terminals", "episode_terminals"):
            file.create_dataset(name, (MANY, 0), np.float32)


@case("HDF5: D4RL of 10^8 rows and no column")
def _d4rl_of_no_width(folder: Path) -> None:
    with _hdf5(folder) as file:
        for name in ("observations", "actions", "rewards", "terminals"):
            file.create_dataset(name, (MANY, 0), np.float32)


def _flags(file: Any, name: str, rows: int) -> None:
    """Flags that all are set, deflated to a thousandth."""
    file.create_dataset(name, data=np.ones(rows, np.bool_), chunks=(1 << 20,), compression="gzip")


@case("HDF5: D4RL of 30 million episodes of a row of no column")
def _d4rl_of_ends(folder: Path) -> None:
    with _hdf5(folder) as file:
        for name in ("observations", "actions"):
            file.create_dataset(name, (SOME, 0), np.float32)
        for name in ("rewards", "terminals", "timeouts"):
            _flags(file, name, SOME)


@case("HDF5: Tianshou's ring of 10^8 rows and no column")
def _tianshou_of_no_width(folder: Path) -> None:
    with _hdf5(folder) as file:
        for name in ("obs", "act", "rew", "terminated", "truncated", "done"):
            file.create_dataset(f"_meta/{name}", (MANY, 0), np.float32)
        file.attrs.update(_size=MANY, _index=0, maxsize=MANY)
        file["_indices"] = np.zeros(1)


@case("HDF5: Tianshou's ring of 30 million rows of a byte")
def _tianshou_of_flags(folder: Path) -> None:
    with _hdf5(folder) as file:
        for name in ("obs", "act", "rew", "terminated", "truncated", "done"):
            _flags(file, f"_meta/{name}", SOME)
        file.attrs.update(_size=SOME, _index=0, maxsize=SOME)
        file["_indices"] = np.zeros(1)


def _minari(folder: Path, steps: int) -> Any:
    (folder / "data").mkdir()
    about = {"total_episodes": 1, "total_steps": steps, "data_format": "hdf5"}
    (folder / "data/metadata.json").write_text(json.dumps(about))
    file = _hdf5(folder / "data", "main_data.hdf5")
    file.create_group("episode_0").attrs.update(id=0, total_steps=steps)
    return file


@case("HDF5: Minari's datasets of 10^8 rows and no column")
def _minari_of_no_width(folder: Path) -> None:
    with _minari(folder, MANY) as file:
        file.create_dataset("episode_0/observations", (MANY + 1, 0), np.float32)
        for name in ("actions", "rewards", "terminations", "truncations"):
            file.create_dataset(f"episode_0/{name}", (MANY, 0), np.float32)


@case("HDF5: Minari's groups that hold each other")
def _minari_groups(folder: Path) -> None:
    with _minari(folder, 3) as file:
        group = file["episode_0"]
        for name in ("actions", "rewards", "terminations", "truncations"):
            group[name] = np.zeros(3)
        _shared_groups(group.create_group("observations"), np.zeros(4))


def _shared_groups(group: Any, values: Any, depth: int = 40) -> None:
    """Two names for one group, in a group that has two names, and so on: 2^40 paths to one dataset."""
    for _ in range(depth):
        below = group.create_group("a")
        group["b"] = below
        group = below
    group["x"] = values


def _robomimic(file: Any, rows: int = 3) -> Any:
    group = file.create_group("data/demo_0")
    group["actions"], group["rewards"], group["dones"] = np.zeros((rows, 1)), np.ones(rows), np.zeros(rows)
    group.create_group("obs")["x"] = np.zeros((rows, 1))
    return group


@case("HDF5: Robomimic's groups that hold each other")
def _robomimic_groups(folder: Path) -> None:
    with _hdf5(folder) as file:
        _shared_groups(_robomimic(file).create_group("more"), np.zeros(3))


@case("HDF5: Robomimic's observations of 2^40 paths")
def _robomimic_observations(folder: Path) -> None:
    with _hdf5(folder) as file:
        _shared_groups(_robomimic(file)["obs"], np.zeros(3))


@case("HDF5: Robomimic's group in itself")
def _robomimic_loop(folder: Path) -> None:
    with _hdf5(folder) as file:
        group = _robomimic(file).create_group("more")
        group["again"] = group


@case("HDF5: Tianshou's group in itself")
def _tianshou_loop(folder: Path) -> None:
    with _hdf5(folder) as file:
        for name in ("act", "rew", "terminated", "truncated", "done"):
            file[f"_meta/{name}"] = np.zeros(3)
        group = file.create_group("_meta/obs")
        group["again"] = group
        file.attrs.update(_size=3, _index=0, maxsize=3)
        file["_indices"] = np.zeros(1)


@case("HDF5: Tianshou's groups that hold each other")
def _tianshou_groups(folder: Path) -> None:
    with _hdf5(folder) as file:
        for name in ("act", "rew", "terminated", "truncated", "done"):
            file[f"_meta/{name}"] = np.zeros(3)
        _shared_groups(file.create_group("_meta/obs"), np.zeros(3))
        file.attrs.update(_size=3, _index=0, maxsize=3)
        file["_indices"] = np.zeros(1)


def _shared_datasets(group: Any, rows: int) -> None:
    """A thousand names for one dataset, of which each has its proportion."""
    first = group.create_dataset(
        "x0", data=np.zeros((rows, 2**18 // rows), np.float64), compression="gzip", compression_opts=9
    )
    for number in range(1, 1000):
        group[f"x{number}"] = first


@case("HDF5: Robomimic's dataset of a thousand names")
def _robomimic_names(folder: Path) -> None:
    with _hdf5(folder) as file:
        group = _robomimic(file, 4)
        _shared_datasets(group["obs"], 4)


@case("HDF5: D4RL's dataset of a thousand names")
def _d4rl_names(folder: Path) -> None:
    with _hdf5(folder) as file:
        file["observations"], file["actions"] = np.zeros((4, 2)), np.zeros((4, 1))
        file["rewards"], file["terminals"] = np.zeros(4), np.array([0, 0, 0, 1], np.bool_)
        _shared_datasets(file.create_group("infos"), 4)


@case("HDF5: D4RL's filters, each twice")
def _d4rl_filters(folder: Path) -> None:
    with _hdf5(folder) as file:
        for name in ("observations", "actions", "rewards", "terminals"):
            about = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            about.set_chunk((1 << 23,))
            about.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (9,))
            about.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (9,))
            made = h5py.h5d.create(
                file.id, name.encode(), h5py.h5t.NATIVE_DOUBLE, h5py.h5s.create_simple((1 << 23,)), about
            )
            made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.zeros(1 << 23))


def _repeated_text(file: Any, group: Any, name: str, rows: int) -> None:
    """A dataset of texts whose references lead to one text of 60,000 characters, all but the first."""
    texts, few = ["y"] * rows, 100
    texts[few] = "x" * 60_000
    group.create_dataset(name, data=texts, dtype=h5py.string_dtype())
    start, path = group[name].id.get_offset(), file.filename
    file.close()
    data = bytearray(Path(path).read_bytes())
    first, end = start + 16 * few, start + 16 * rows
    data[first:end] = bytes(data[first : first + 16]) * (rows - few)
    Path(path).write_bytes(data)


_SMALL = (("group_bytes", 16 << 20),)


@case("HDF5: Minari's texts that are one text", options=_SMALL)
def _minari_texts(folder: Path) -> None:
    rows = 40_000
    file = _minari(folder, rows)
    group = file["episode_0"]
    for name in ("actions", "rewards", "terminations", "truncations"):
        group.create_dataset(name, data=np.zeros(rows), compression="gzip")
    _repeated_text(file, group, "observations", rows + 1)


@case("HDF5: Robomimic's texts that are one text", options=_SMALL)
def _robomimic_texts(folder: Path) -> None:
    file = _hdf5(folder)
    group = _robomimic(file, 40_000)
    _repeated_text(file, group["obs"], "y", 40_000)


def _no_axes(name: str, make: Callable[[Any], object]) -> None:
    def put(folder: Path) -> None:
        with _hdf5(folder) as file:
            make(file)

    case(f"HDF5: {name} without an axis")(put)


def _d3rlpy_scalar(file: Any) -> None:
    file["columns"] = ["observations", "actions", "rewards", "terminated"]
    file["num_episodes"], file["version"], file["terminated_0"] = 1, "2.1", False
    for name in ("observations_0", "actions_0", "rewards_0"):
        file[name] = 1.0


def _robomimic_scalar(file: Any) -> None:
    file.create_group("data/demo_0")["actions"] = 1.0


def _d3rlpy_1_scalar(file: Any) -> None:
    for name in ("observations", "actions", "rewards", "terminals", "episode_terminals"):
        file[name] = 1.0


def _tianshou_scalar(file: Any) -> None:
    for name in ("obs", "act", "rew", "terminated", "truncated", "done"):
        file[f"_meta/{name}"] = 1.0
    file.attrs.update(_size=1, _index=0)
    file["_indices"] = np.zeros(1)


_no_axes("d3rlpy", _d3rlpy_scalar)
_no_axes("Robomimic", _robomimic_scalar)
_no_axes("d3rlpy 1", _d3rlpy_1_scalar)
_no_axes("Tianshou", _tianshou_scalar)


# ---- TorchRL ----


@case("TorchRL: tensors of 10^8 rows and no column")
def _torchrl_of_no_width(folder: Path) -> None:
    (folder / "next").mkdir()
    kind, leaf = (
        "<class 'tensordict._td.TensorDict'>",
        {"device": "cpu", "shape": [MANY, 0], "dtype": "torch.float32"},
    )
    above = {
        "observation": leaf,
        "action": leaf,
        "shape": [MANY],
        "_type": kind,
        "next": {"type": "TensorDict"},
    }
    below = {
        "observation": leaf,
        "reward": leaf,
        "terminated": {**leaf, "dtype": "torch.bool"},
        "shape": [MANY],
        "_type": kind,
    }
    (folder / "meta.json").write_text(json.dumps(above))
    (folder / "next/meta.json").write_text(json.dumps(below))
    for name in ("observation", "action", "next/observation", "next/reward", "next/terminated"):
        (folder / f"{name}.memmap").touch()


# ---- RLlib ----


def _array(rows: int, *shape: int) -> dict[bytes, Any]:
    return {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [rows, *shape], b"data": b""}


@case("RLlib: an episode of 10^8 steps of no column")
def _rllib_of_no_width(folder: Path) -> None:
    item = pq.read_table(GOLDEN / "rllib/chunks/episodes.parquet")["item"][0].as_py()
    state = msgpack.unpackb(item, strict_map_key=False)

    def buffer(rows: int) -> dict[str, Any]:
        return {"data": _array(rows, 0), "lookback": 0, "finalized": True, "space": None}

    state |= {
        "t_started": 0,
        "t": MANY,
        "observations": buffer(MANY + 1),
        "actions": buffer(MANY),
        "rewards": buffer(MANY),
    }
    state |= {"infos": {"data": [], "lookback": 0, "finalized": False}, "extra_model_outputs": None}
    items = pa.array([msgpack.packb(state)], pa.binary())
    pq.write_table(pa.table({"item": items}), folder / "a.parquet")


# ---- RLDS ----


def _masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + _masked(head) + data + _masked(data)


def _field(number: int, data: bytes) -> bytes:
    size, out = len(data), b""
    while True:
        out += bytes([size & 0x7F | (0x80 if size > 0x7F else 0)])
        size >>= 7
        if not size:
            return bytes([number << 3 | 2]) + out + data


def _example(**features: tuple[int, bytes]) -> bytes:
    entries = b"".join(
        _field(1, _field(1, name.replace("__", "/").encode()) + _field(2, _field(kind, data)))
        for name, (kind, data) in features.items()
    )
    return _field(1, entries)


def _floats(values: int) -> tuple[int, bytes]:
    return 2, _field(1, bytes(4 * values))


def _ints(values: bytes) -> tuple[int, bytes]:
    return 3, _field(1, values)


def _tensor(dtype: str, *shape: int) -> dict[str, Any]:
    return {"tensor": {"shape": {"dimensions": list(map(str, shape))}, "dtype": dtype, "encoding": "none"}}


def _rlds(folder: Path, steps: dict[str, Any], above: dict[str, Any], example: bytes, count: int) -> None:
    def features(found: dict[str, Any]) -> dict[str, Any]:
        return {"featuresDict": {"features": found}}

    described = features({"steps": {"sequence": {"feature": features(steps)}}, **above})
    (folder / "features.json").write_text(json.dumps(described))
    template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    split = {"name": "train", "shardLengths": ["1"], "numBytes": "1", "filepathTemplate": template}
    about = {"name": "forged", "version": "1.0.0", "fileFormat": "tfrecord", "splits": [split]}
    (folder / "dataset_info.json").write_text(json.dumps(about))
    (folder / "forged-train.tfrecord-00000-of-00001").write_bytes(_record(example))


_RLDS_STEPS = {
    "is_first": _tensor("bool"),
    "is_last": _tensor("bool"),
    "is_terminal": _tensor("bool"),
    "reward": _tensor("float32"),
    "action": _tensor("float32"),
    "observation": _tensor("float32"),
}


def _rlds_steps(count: int) -> dict[str, tuple[int, bytes]]:
    ends = bytes(count - 1) + b"\1"
    return {
        "steps__is_first": _ints(b"\1" + bytes(count - 1)),
        "steps__is_last": _ints(ends),
        "steps__is_terminal": _ints(ends),
        **{f"steps__{name}": _floats(count) for name in ("reward", "action", "observation")},
    }


@case("RLDS: a text of an episode in each of its steps", harmless=True, rows=9999)
def _rlds_text(folder: Path) -> None:
    text = {"instruction": {"text": {}}}
    example = _example(**_rlds_steps(10_000), instruction=(1, _field(1, b"x" * 40_000)))
    _rlds(folder, _RLDS_STEPS, text, example, 10_000)


@case("RLDS: texts of a step, one of them long")
def _rlds_texts(folder: Path) -> None:
    texts = _field(1, b"x" * 1_000_000) + _field(1, b"") * 9_999
    example = _example(**_rlds_steps(10_000), steps__text=(1, texts))
    _rlds(folder, {**_RLDS_STEPS, "text": {"text": {}}}, {}, example, 10_000)


def _png(side: int) -> bytes:
    """A picture of zeros, of which deflate makes a thousandth."""
    packer, rows = zlib.compressobj(9), []
    for _ in range(side):
        rows.append(packer.compress(bytes(1 + 3 * side)))
    data = b"".join([*rows, packer.flush()])

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def _rlds_pictures(side: int, count: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        shape = {"dimensions": [str(side), str(side), "3"]}
        kind = {"image": {"shape": shape, "dtype": "uint8", "encodingFormat": "png"}}
        example = _example(**_rlds_steps(count), steps__picture=(1, _field(1, _png(side)) * count))
        _rlds(folder, {**_RLDS_STEPS, "picture": kind}, {}, example, count)

    return make


case("RLDS: pictures of 11,000 by 11,000")(_rlds_pictures(11_000, 3))


@case("RLDS: a picture that claims 60,000 by 60,000")
def _rlds_claimed(folder: Path) -> None:
    shape = {"dimensions": ["60000", "60000", "3"]}
    kind = {"image": {"shape": shape, "dtype": "uint8", "encodingFormat": "png"}}
    picture = _png(8).replace(struct.pack(">II", 8, 8), struct.pack(">II", 60_000, 60_000))
    example = _example(**_rlds_steps(2), steps__picture=(1, _field(1, picture) * 2))
    _rlds(folder, {**_RLDS_STEPS, "picture": kind}, {}, example, 2)


# ---- zip files ----


@case("zip: 4,000 members of a line", harmless=True, rows=8_000)
def _zip_of_lines(folder: Path) -> None:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        for number in range(4_000):
            archive.writestr(f"{number}.json", GOOD)


def _zip_of_folders(folder: Path) -> None:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        for path, data in parquet_files().items():
            archive.writestr(path, data)
        for number in range(30_000):
            archive.writestr(f"data/w{number:05}-00000000/x", b"")


add("zip: 30,000 folders of a data set", _zip_of_folders, "zip", harmless=True, rows=30)


# ---- JSON lines ----


def _line(depth: int, closed: int) -> bytes:
    head = b'{"x":1.0,"a":1,"r":1.0,"e":1,"s":"' + b"]" * closed
    return head + b'","d":' + b"[" * depth + b"]" * depth + b"}\n"


def _jsonl(name: str, text: bytes) -> None:
    case(f"JSON lines: {name}", mapping=_MAPPING)(lambda folder: (folder / "a.jsonl").write_bytes(text))


_jsonl("lists 30,000 deep after a text of brackets", _line(30_000, 30_000))
_jsonl("lists 4,000 deep after a text of brackets", _line(4_000, 4_000))
_jsonl(
    "lists 30,000 deep after an escaped quote",
    b'{"x":1.0,"s":"\\"' + b"]" * 30_000 + b'","d":' + b"[" * 30_000 + b"]" * 30_000 + b"}\n",
)
_jsonl(
    "lists 30,000 deep after a line end in a text",
    b'{"x":1.0,"s":"\n' + b"]" * 30_000 + b'","d":' + b"[" * 30_000 + b"]" * 30_000 + b"}\n",
)
_jsonl("lists 30,000 deep", _line(30_000, 0))


# ---- Arrow ----


def _arrow(folder: Path, **columns: Any) -> None:
    rows = max(map(len, columns.values()))
    table = pa.table({"x": columns.get("x", pa.array(np.zeros(rows))), **columns})
    with pa.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table)


_BESIDE = rlio.Mapping(
    columns={"obs": ["x"], "actions": "x", "rewards": "x", "beside": "y"}, terminated=True, per_file=True
)
_TEXT = "x" * 100_000


def _views() -> Any:
    """Texts of which each is all of one buffer."""
    one = struct.pack("<i4sii", len(_TEXT), _TEXT[:4].encode(), 0, 0)
    buffers = [None, pa.py_buffer(one * 50_000), pa.py_buffer(_TEXT.encode())]
    return pa.Array.from_buffers(pa.string_view(), 50_000, buffers)


def _list_views() -> Any:
    offsets, sizes = np.zeros(20_000, np.int32), np.full(20_000, 100_000, np.int32)
    return pa.ListViewArray.from_arrays(pa.array(offsets), pa.array(sizes), pa.array(np.zeros(100_000)))


def _run_ends(value: Any, rows: int) -> Any:
    return pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), pa.array([value]))


def _arrow(name: str, rows: int, make: Callable[[], Any]) -> None:
    def put(folder: Path) -> None:
        table = pa.table({"x": np.zeros(rows), "y": make()})
        with pa.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
            writer.write_table(table)

    case(f"Arrow: {name}", mapping=_BESIDE)(put)


_arrow("a run of a long text", 50_000, lambda: _run_ends(_TEXT, 50_000))
_arrow("views of one list", 20_000, _list_views)
_arrow("views of one text", 50_000, _views)
_arrow(
    "lists of 10^9 nothings",
    2,
    lambda: pa.FixedSizeListArray.from_arrays(pa.nulls(2 * 10**9), 10**9),
)


@case("Arrow: 16 million rows of nothing", mapping=_BESIDE)
def _arrow_of_nothing(folder: Path) -> None:
    rows = 16_000_000
    table = pa.table({"x": _run_ends(1.0, rows), "y": pa.nulls(rows)})
    with pa.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table)


def _union() -> Any:
    """Rows that all are the one text of their child."""
    kinds, offsets = np.zeros(50_000, np.int8), np.zeros(50_000, np.int32)
    return pa.UnionArray.from_dense(pa.array(kinds), pa.array(offsets), [pa.array([_TEXT])])


_arrow("a union of one text", 50_000, _union)


# ---- Parquet ----


@case("Parquet: 15 million rows of one value", mapping=_BESIDE)
def _parquet_of_one_value(folder: Path) -> None:
    rows = 5_000_000
    table = pa.table({"x": np.zeros(rows), "y": np.zeros(rows, np.bool_)})
    with pq.ParquetWriter(folder / "a.parquet", table.schema, compression="zstd") as writer:
        for _ in range(3):
            writer.write_table(table, row_group_size=rows)


# ---- metadata that claims ----


@case("Minari: an episode of 10^12 steps")
def _minari_of_steps(folder: Path) -> None:
    with _minari(folder, 10**12) as file:
        for name in ("observations", "actions", "rewards", "terminations", "truncations"):
            file["episode_0"].create_dataset(name, (10**12 + (name == "observations"), 0), np.bool_)


@case("Minari: a space of 10^9 numbers")
def _minari_of_a_space(folder: Path) -> None:
    with _minari(folder, 3) as file:
        for name in ("observations", "actions", "rewards", "terminations", "truncations"):
            file["episode_0"][name] = np.zeros(3 + (name == "observations"))
    space = {"type": "Box", "dtype": "float32", "shape": [10**9], "low": [0.0], "high": [1.0]}
    about = json.loads((folder / "data/metadata.json").read_text())
    about |= {
        "observation_space": json.dumps(space),
        "action_space": json.dumps({"type": "MultiBinary", "n": 10**10}),
    }
    (folder / "data/metadata.json").write_text(json.dumps(about))


@case("LeRobot: an episode of 10^12 frames")
def _lerobot_of_frames(folder: Path) -> None:
    shutil.copytree(GOLDEN / "lerobot/v2.1", folder, dirs_exist_ok=True)
    text = (folder / "meta/episodes.jsonl").read_text().splitlines()
    first = json.loads(text[0])
    more = 10**12 - first["length"]
    (folder / "meta/episodes.jsonl").write_text(
        "\n".join([json.dumps(first | {"length": 10**12}), *text[1:]])
    )
    info = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps(info | {"total_frames": info["total_frames"] + more}))


@case("RLlib: a space of 10^9 numbers", harmless=True)
def _rllib_of_a_space(folder: Path) -> None:
    item = pq.read_table(GOLDEN / "rllib/chunks/episodes.parquet")["item"][0].as_py()
    state = msgpack.unpackb(item, strict_map_key=False)
    state["_action_space"] = {"space": "multi-binary", "n": 10**10}
    pq.write_table(pa.table({"item": pa.array([msgpack.packb(state)], pa.binary())}), folder / "a.parquet")


# ---- HDF5 by a mapping, and zarr ----

_MINE = {"obs": "my_obs", "actions": "my_actions", "rewards": "my_rewards"}


@case(
    "HDF5 by a mapping: 10^8 rows of no column",
    mapping=rlio.Mapping(columns=_MINE, episode="ep_*", next_obs="derive"),
)
def _mapped_of_no_width(folder: Path) -> None:
    with _hdf5(folder) as file:
        for name in _MINE.values():
            file.create_dataset(f"ep_0/{name}", (MANY, 0), np.float32)


@case(
    "HDF5 by a mapping: groups that hold each other",
    mapping=rlio.Mapping(columns=_MINE, episode="ep_*", next_obs="derive"),
)
def _mapped_groups(folder: Path) -> None:
    with _hdf5(folder) as file:
        group = file.create_group("ep_0")
        for name in ("my_actions", "my_rewards"):
            group[name] = np.zeros(3)
        _shared_groups(group.create_group("my_obs"), np.zeros(3))


@case("zarr: 10^8 rows of no column")
def _zarr_of_no_width(folder: Path) -> None:
    def about(shape: list[int], dtype: str) -> str:
        more = {"compressor": None, "fill_value": 0, "filters": None, "order": "C", "zarr_format": 2}
        return json.dumps(
            {"shape": shape, "chunks": [min(max(1, size), 1000) for size in shape], "dtype": dtype, **more}
        )

    for name, shape, dtype in (
        ("meta/episode_ends", [1], "<i8"),
        *((f"data/{one}", [MANY, 0], "<f4") for one in ("state", "action")),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / ".zarray").write_text(about(shape, dtype))
    for name in ("", "data", "meta"):
        (folder / name / ".zgroup").write_text('{"zarr_format": 2}')
    (folder / "meta/episode_ends/0").write_bytes(struct.pack("<q", MANY))
