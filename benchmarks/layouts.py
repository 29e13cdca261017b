r"""Data sets of other libraries as the files that they write, by the documented layouts; of rlio, as it does.

Row t of an episode has the observation t. The libraries are not needed, but those of the file formats are:
h5py, zarr and google-crc32c, whose `ImportError` is the caller's.

Example:
    >>> files = LAYOUTS["csv"](Shape(rows=4, episode=2, width=1), 2)
    >>> sorted(files), files["f-0.csv"].count(b"\n")
    (['f-0.csv', 'f-1.csv'], 5)
"""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.feather as feather
import pyarrow.parquet as pq
from fsspec.implementations.memory import MemoryFileSystem
from numpy.typing import NDArray

import rlio

__all__ = ["LAYOUTS", "Shape", "episodes", "rows_in", "rows_of"]

Columns: TypeAlias = dict[str, NDArray[Any]]
#: The files of a data set, by their paths.
Files: TypeAlias = dict[str, bytes]


class Shape(NamedTuple):
    """Rows of a file (`LONE` layouts: of all) and of an episode, numbers of an observation and an action."""

    rows: int
    episode: int
    width: int
    actions: int = 4


def rows_of(shape: Shape, file: int) -> Columns:
    """Rows of a file, which has whole episodes."""
    rng, last = np.random.default_rng(file), shape.episode - 1
    t = np.arange(shape.rows) % shape.episode
    obs = rng.random((shape.rows, shape.width), np.float32)
    actions = rng.random((shape.rows, shape.actions), np.float32)
    return {"t": t, "obs": obs, "actions": actions, "rewards": t * np.float32(0.5), "last": t == last}


def episodes(shape: Shape, file: int) -> Iterator[tuple[int, Columns]]:
    """The number of each episode of a file, and its rows."""
    rows = rows_of(shape, file)
    for number, start in enumerate(range(0, shape.rows, shape.episode)):
        yield number, {name: values[start : start + shape.episode] for name, values in rows.items()}


def _with_final(rows: Columns) -> NDArray[Any]:
    return np.concatenate([rows["obs"], rows["obs"][:1]])


# ---- HDF5 ----


def _hdf5(fill: Callable[[Any, Shape, int], None], shape: Shape, file: int) -> bytes:
    import h5py

    stream = io.BytesIO()
    with h5py.File(stream, "w") as opened:
        fill(opened, shape, file)
    return stream.getvalue()


def _d4rl(file: Any, shape: Shape, number: int, *, chunked: bool = True) -> None:
    rows = rows_of(shape, number)
    names = {"observations": "obs", "actions": "actions", "rewards": "rewards", "terminals": "last"}
    for name, column in names.items():
        chunks = (shape.rows // 20, *rows[column].shape[1:]) if chunked else None
        file.create_dataset(name, data=rows[column], chunks=chunks)
    file["timeouts"] = np.zeros(shape.rows, np.bool_)


def _d3rlpy_1(file: Any, shape: Shape, number: int) -> None:
    rows = rows_of(shape, number)
    file["observations"], file["actions"], file["rewards"] = rows["obs"], rows["actions"], rows["rewards"]
    file["terminals"] = file["episode_terminals"] = rows["last"].astype(np.float32)


def _d3rlpy_2(file: Any, shape: Shape, number: int) -> None:
    for episode, rows in episodes(shape, number):
        for name, column in {"observations": "obs", "actions": "actions"}.items():
            file[f"{name}_{episode}"] = rows[column]
        file[f"rewards_{episode}"], file[f"terminated_{episode}"] = rows["rewards"][:, None], True
    file["columns"], file["version"] = ["observations", "actions", "rewards", "terminated"], "2.1"
    file["num_episodes"] = shape.rows // shape.episode


def _robomimic(file: Any, shape: Shape, number: int) -> None:
    for episode, rows in episodes(shape, number):
        group = file.create_group(f"data/demo_{episode}")
        group["obs/state"], group["obs/other"] = rows["obs"], rows["actions"]
        group["actions"], group["rewards"], group["dones"] = rows["actions"], rows["rewards"], rows["last"]


def _tianshou(file: Any, shape: Shape, number: int) -> None:
    rows = rows_of(shape, number)
    names = {"obs": "obs", "obs_next": "obs", "act": "actions", "rew": "rewards", "terminated": "last"}
    for name, column in names.items():
        file[f"_meta/{name}"] = rows[column]
    file["_meta/truncated"], file["_indices"] = np.zeros(shape.rows, np.bool_), np.arange(shape.rows)
    file.attrs.update(_size=shape.rows, _index=0)


def _minari(file: Any, shape: Shape, number: int) -> None:
    for episode, rows in episodes(shape, number):
        group = file.create_group(f"episode_{episode}")
        group.attrs.update(id=episode, total_steps=shape.episode)
        group["observations"] = _with_final(rows)
        group["actions"], group["rewards"], group["terminations"] = (
            rows[name] for name in ("actions", "rewards", "last")
        )
        group["truncations"] = np.zeros(shape.episode, np.bool_)


def _of_minari(shape: Shape, count: int) -> Files:
    about = {
        "total_episodes": shape.rows // shape.episode, "total_steps": shape.rows, "data_format": "hdf5"
    }  # fmt: skip
    return {"metadata.json": json.dumps(about).encode(), "main_data.hdf5": _hdf5(_minari, shape, 0)}


def _maniskill(shape: Shape, count: int) -> Files:
    found, steps = Files(), shape.episode
    for number in range(count):
        found[f"f-{number}.h5"] = _hdf5(_trajectories, shape, number)
        about = [{"episode_id": one, "elapsed_steps": steps} for one in range(shape.rows // steps)]
        info = {"env_info": {"env_id": "X-v1", "env_kwargs": {}}, "episodes": about}
        found[f"f-{number}.json"] = json.dumps(info).encode()
    return found


def _trajectories(file: Any, shape: Shape, number: int) -> None:
    for episode, rows in episodes(shape, number):
        group = file.create_group(f"traj_{episode}", track_order=True)
        group["obs"], group["actions"], group["rewards"] = _with_final(rows), rows["actions"], rows["rewards"]
        group["terminated"] = group["success"] = rows["last"]
        group["truncated"] = np.zeros(shape.episode, np.bool_)


def _aloha(shape: Shape, count: int) -> Files:
    """A file is an episode. The bytes of observations are pictures, of shape (width / 12, 16, 3)."""
    return {f"episode_{number}.hdf5": _hdf5(_pictures, shape, number) for number in range(count)}


def _pictures(file: Any, shape: Shape, number: int) -> None:
    rows = rows_of(shape, number)
    file.attrs["sim"] = True
    file["observations/qpos"] = file["observations/qvel"] = file["action"] = rows["actions"]
    picture = rows["obs"].view(np.uint8).reshape(shape.rows, shape.width // 12, 16, 3)
    file.create_dataset("observations/images/top", data=picture, chunks=(1, *picture.shape[1:]))


# ---- Parquet and Arrow ----


def _parquet(table: pa.Table, **options: Any) -> bytes:
    stream = io.BytesIO()
    pq.write_table(table, stream, compression="none", **options)
    return stream.getvalue()


def _arrow(table: pa.Table, opens: Callable[..., Any], rows: int) -> bytes:
    stream = io.BytesIO()
    with opens(stream, table.schema) as file:
        file.write_table(table, max_chunksize=rows)
    return stream.getvalue()


def _minari_files(
    kind: str, written: Callable[[pa.Table, Shape], bytes], shape: Shape, count: int, *, long: bool = False
) -> Files:
    """A file for each episode; ``long``: two episodes in all."""
    steps = shape.rows // 2 if long else shape.episode
    about = {"total_episodes": shape.rows // steps, "total_steps": shape.rows, "data_format": kind}
    found, rows = {"metadata.json": json.dumps(about).encode()}, rows_of(shape, 0)
    for number in range(shape.rows // steps):
        part = {name: values[number * steps :][:steps] for name, values in rows.items()}
        more = {name: np.concatenate([values, values[:1]]) for name, values in part.items()}
        columns = {"rewards": more["rewards"], "terminations": more["last"], "truncations": more["t"] < 0}
        arrays = {"observations": more["obs"].tolist(), "actions": more["actions"].tolist()}
        found[f"{number}/part-0.{kind}"] = written(pa.table({**arrays, **columns}), shape)
        found[f"{number}/metadata.json"] = json.dumps({"id": number, "total_steps": steps}).encode()
    return found


def _listed(rows: NDArray[Any]) -> pa.Array:
    """Lists of a row's numbers; of one number, the numbers."""
    if rows.ndim == 1:
        return pa.array(rows)
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * rows.shape[1]
    return pa.ListArray.from_arrays(offsets, pa.array(rows.ravel()))


def _lerobot(shape: Shape, count: int) -> Files:
    kinds = {
        "observation.state": ("float32", shape.width), "action": ("float32", shape.actions),
        "next.reward": ("float32", 1),
    }  # fmt: skip
    kinds |= dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), ("int64", 1))
    features = {name: {"dtype": dtype, "shape": [width]} for name, (dtype, width) in kinds.items()}
    total, each = count * shape.rows, shape.rows // shape.episode
    info = {
        "codebase_version": "v3.0", "total_episodes": count * each, "total_frames": total, "fps": 10,
        "features": features, "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    }  # fmt: skip
    found = {"meta/info.json": json.dumps(info).encode()}
    for number in range(count):
        rows, index = rows_of(shape, number), np.arange(shape.rows) + number * shape.rows
        columns = {
            "observation.state": _listed(rows["obs"]), "action": _listed(rows["actions"]),
            "next.reward": rows["rewards"], "frame_index": rows["t"],
            "episode_index": index // shape.episode, "index": index, "task_index": index * 0,
        }  # fmt: skip
        data = _parquet(pa.table(columns), row_group_size=shape.rows // 4)
        found[f"data/chunk-000/file-{number:03}.parquet"] = data
    episode = np.arange(count * each)
    about = {
        "episode_index": episode, "length": episode * 0 + shape.episode,
        "dataset_from_index": episode * shape.episode, "dataset_to_index": (episode + 1) * shape.episode,
        "data/chunk_index": episode * 0, "data/file_index": episode // each,
    }  # fmt: skip
    found["meta/episodes/chunk-000/file-000.parquet"] = _parquet(pa.table(about))
    found["meta/tasks.parquet"] = _parquet(pa.table({"task_index": [0], "task": ["x"]}))
    return found


def _imitation(shape: Shape, count: int) -> Files:
    names, columns = [f"data-{number:05}-of-{count:05}.arrow" for number in range(count)], dict[str, Any]()
    found = Files()
    for number, name in enumerate(names):
        several = [rows for _, rows in episodes(shape, number)]
        columns = {
            "obs": [_with_final(rows).tolist() for rows in several],
            "acts": [rows["actions"].tolist() for rows in several],
            "infos": [["{}"] * shape.episode for _ in several],
            "terminal": [True for _ in several],
            "rews": [rows["rewards"].tolist() for rows in several],
        }
        found[name] = _arrow(pa.table(columns), pa.ipc.new_stream, 2)
    about = {"features": {name: {"_type": "List"} for name in columns}}
    state = {"_data_files": [{"filename": name} for name in names]}
    described = {"state.json": json.dumps(state).encode(), "dataset_info.json": json.dumps(about).encode()}
    return {**found, **described}


# ---- others ----


def _rlds(shape: Shape, count: int) -> Files:
    """The last step of an episode is its final observation."""
    axes = {"observation": [shape.width], "action": [shape.actions], "reward": []}
    kinds = dict.fromkeys(axes, "float32") | dict.fromkeys(("is_first", "is_last", "is_terminal"), "bool")
    features = {
        name: {
            "tensor": {
                "dtype": kind, "encoding": "none", "shape": {"dimensions": list(map(str, axes.get(name, [])))}
            }
        }
        for name, kind in kinds.items()
    }  # fmt: skip
    steps = {"sequence": {"feature": {"featuresDict": {"features": features}}}}
    described = {"pythonClassName": "x", "featuresDict": {"features": {"steps": steps}}}
    found = {"features.json": json.dumps(described).encode()}
    for number in range(count):
        records = []
        for _, rows in episodes(shape, number):
            flags = {"is_first": rows["t"] == 0, "is_last": rows["last"], "is_terminal": rows["last"]}
            values = {
                "observation": rows["obs"],
                "action": rows["actions"],
                "reward": np.float32(rows["rewards"]),
            }
            records.append(_record({f"steps/{name}": each for name, each in (values | flags).items()}))
        found[f"x-train.tfrecord-{number:05}-of-{count:05}"] = b"".join(records)
    splits = [{"name": "train", "shardLengths": [str(shape.rows // shape.episode)] * count}]
    about = {"name": "x", "fileFormat": "tfrecord", "moduleName": "x", "version": "1.0.0", "splits": splits}
    return {**found, "dataset_info.json": json.dumps(about).encode()}


def _record(features: Columns) -> bytes:
    """A TFRecord of an Example: lists of floats, or of flags as whole numbers."""
    lists = {
        name: _field(2, _field(1, values.tobytes()))
        if values.dtype.kind == "f"
        else _field(3, _field(1, values.astype(np.uint8).tobytes()))
        for name, values in features.items()
    }
    entries = (_field(1, name.encode()) + _field(2, values) for name, values in lists.items())
    data = _field(1, b"".join(_field(1, entry) for entry in entries))
    size = len(data).to_bytes(8, "little")
    return size + _masked(size) + data + _masked(data)


def _field(number: int, data: bytes) -> bytes:
    """A field of a protobuf message, of bytes."""
    size, found = len(data), bytes([number << 3 | 2])
    while size > 0x7F:
        found, size = found + bytes([size & 0x7F | 0x80]), size >> 7
    return found + bytes([size]) + data


def _masked(data: bytes) -> bytes:
    """TFRecord's sum of bytes."""
    import google_crc32c

    crc = google_crc32c.value(data)
    return int.to_bytes(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF, 4, "little")


def _torchrl(shape: Shape, count: int) -> Files:
    rows, found = rows_of(shape, 0), Files()
    ends = dict.fromkeys(("terminated", "done"), rows["last"][:, None])
    folders = {
        "": {"observation": rows["obs"], "action": rows["actions"]},
        "next/": {"observation": rows["obs"] + 1, "reward": rows["rewards"][:, None], **ends},
        "collector/": {"traj_ids": np.arange(shape.rows) // shape.episode},
    }
    for folder, arrays in folders.items():
        meta: dict[str, Any] = {"_type": "<class 'tensordict._td.TensorDict'>", "shape": [shape.rows]}
        for name, values in arrays.items():
            found[f"{folder}{name}.memmap"] = np.ascontiguousarray(values).tobytes()
            meta[name] = {"shape": list(values.shape), "dtype": f"torch.{values.dtype}", "is_nested": False}
        meta |= {} if folder else {"next": {"type": "TensorDict"}, "collector": {"type": "TensorDict"}}
        found[f"{folder}meta.json"] = json.dumps(meta).encode()
    return found


def _zarr(shape: Shape, count: int, *, version: Literal[2, 3], **chunks: float) -> Files:
    """A replay buffer, whose ``chunks`` (and ``shards``) have such a part of a file's rows."""
    import zarr

    rows, stored = [rows_of(shape, number) for number in range(count)], dict[str, Any]()
    names = {"state": "obs", "keypoint": "actions", "action": "actions", "reward": "rewards"}
    root = zarr.open_group(zarr.storage.MemoryStore(stored), mode="w", zarr_format=version)
    for name, column in names.items():
        values = np.concatenate([one[column] for one in rows])
        shapes: dict[str, Any] = {
            key: (round(part * shape.rows), *values.shape[1:]) for key, part in chunks.items()
        }
        root.create_array(f"data/{name}", data=values, compressors=None, **shapes)
    ends = np.arange(shape.episode, count * shape.rows + 1, shape.episode)
    root.create_array("meta/episode_ends", data=ends, chunks=ends.shape)
    return {name: data.to_bytes() for name, data in stored.items()}


def _rlio(shape: Shape, count: int) -> Files:
    """A data set of rlio, with a shard for each file."""
    root = f"memory://{uuid.uuid4().hex}"
    with rlio.ParquetWriter(root, spool=None, roll=rlio.Roll(max_bytes=1 << 30, max_seconds=None)) as writer:
        for number in range(count):
            writer.write(rlio.SampleBatch(_by_names(shape, number)))
            writer.flush()
    store, folder = MemoryFileSystem(), root.removeprefix("memory:/")
    found = {path.removeprefix(f"{folder}/"): store.cat_file(path) for path in store.find(folder)}
    store.rm(folder, recursive=True)
    return found


# ---- tables, by rlio's names, or by a mapping ----


def _by_names(shape: Shape, number: int) -> Columns:
    rows = rows_of(shape, number)
    ids = number * shape.rows + np.arange(shape.rows) // shape.episode
    columns = {"eps_id": ids, "t": rows["t"], "obs": rows["obs"], "actions": rows["actions"]}
    ends = {"terminateds": rows["last"], "truncateds": np.zeros(shape.rows, np.bool_)}
    return {**columns, "rewards": rows["rewards"], **ends}


def _table(columns: Columns) -> pa.Table:
    return pa.table({name: _listed(values) for name, values in columns.items()})


def _groups(table: pa.Table, shape: Shape) -> bytes:
    return _parquet(table, row_group_size=shape.rows // 4, use_dictionary=False)


def _unsorted(columns: Columns, shape: Shape) -> pa.Table:
    """Steps of each episode backwards."""
    order = np.arange(shape.rows).reshape(-1, shape.episode)[:, ::-1].ravel()
    return _table({name: values[order] for name, values in columns.items()})


def _rows_are_episodes(columns: Columns, shape: Shape) -> bytes:
    offsets = np.arange(0, shape.rows + 1, shape.episode, dtype=np.int32)
    names = ("obs", "actions", "rewards")
    lists = {name: pa.ListArray.from_arrays(offsets, _listed(columns[name])) for name in names}
    return _parquet(pa.table(lists), row_group_size=max(1, (len(offsets) - 1) // 4), use_dictionary=False)


def _feather(columns: Columns, shape: Shape) -> bytes:
    stream = io.BytesIO()
    feather.write_feather(_table(columns), stream, compression="uncompressed", chunksize=shape.rows // 4)
    return stream.getvalue()


def _csv(columns: Columns, shape: Shape) -> bytes:
    flat = dict[str, NDArray[Any]]()
    for name, values in columns.items():
        parts = {f"{name}_{at}": values[:, at] for at in range(values.shape[1])} if values.ndim > 1 else None
        flat |= parts or {name: values}
    stream = io.BytesIO()
    csv.write_csv(pa.table(flat), stream)
    return stream.getvalue()


def _jsonl(columns: Columns, shape: Shape) -> bytes:
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return b"".join(json.dumps(dict(zip(columns, row, strict=True))).encode() + b"\n" for row in rows)


def _rllib_json(columns: Columns, shape: Shape) -> bytes:
    """A batch on each line: an episode."""
    parts = range(0, shape.rows, shape.episode)
    batches = (
        {name: values[at : at + shape.episode].tolist() for name, values in columns.items()} for at in parts
    )
    return b"".join(json.dumps({"type": "SampleBatch", **batch}).encode() + b"\n" for batch in batches)


def _npz(columns: Columns, shape: Shape) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **cast("Any", columns))
    return stream.getvalue()


def _hdf5_columns(columns: Columns, shape: Shape, *, chunked: bool) -> bytes:
    def fill(file: Any, shape: Shape, number: int) -> None:
        for name, values in columns.items():
            chunks = (shape.rows // 8, *values.shape[1:]) if chunked else None
            file.create_dataset(name, data=values, chunks=chunks)

    return _hdf5(fill, shape, 0)


def _several(fill: Callable[[Any, Shape, int], None], shape: Shape, count: int) -> Files:
    return {f"f-{number}.hdf5": _hdf5(fill, shape, number) for number in range(count)}


def _tables(ending: str, written: Callable[[Columns, Shape], bytes], shape: Shape, count: int) -> Files:
    return {f"f-{n}.{ending}": written(_by_names(shape, n), shape) for n in range(count)}


def _of_table(ending: str, written: Callable[[Columns, Shape], bytes]) -> Layout:
    return partial(_tables, ending, written)


#: Makes the files of a data set: so many large ones of a shape.
Layout: TypeAlias = "Callable[[Shape, int], Files]"

#: Name -> what makes the files.
LAYOUTS: dict[str, Layout] = {
    "arrow": _of_table("feather", _feather),
    "csv": _of_table("csv", _csv),
    "jsonl": _of_table("jsonl", _jsonl),
    "npz": _of_table("npz", _npz),
    "hdf5": _of_table("hdf5", partial(_hdf5_columns, chunked=False)),
    "hdf5-chunks": _of_table("hdf5", partial(_hdf5_columns, chunked=True)),
    "parquet": _of_table("parquet", lambda columns, shape: _groups(_table(columns), shape)),
    "parquet-unsorted": _of_table(
        "parquet", lambda columns, shape: _groups(_unsorted(columns, shape), shape)
    ),
    "parquet-episodes": _of_table("parquet", _rows_are_episodes),
    "rlio": _rlio,
    "rllib-json": _of_table("json", _rllib_json),
    "d4rl": partial(_several, _d4rl),
    "d4rl-contiguous": partial(_several, partial(_d4rl, chunked=False)),
    "robomimic": partial(_several, _robomimic),
    "maniskill": _maniskill,
    "aloha": _aloha,
    "minari": _of_minari,
    "minari-parquet": partial(
        _minari_files, "parquet", lambda table, shape: _parquet(table, row_group_size=shape.episode * 2 // 5)
    ),
    "minari-arrow": partial(
        _minari_files, "arrow", lambda table, shape: _arrow(table, pa.ipc.new_file, shape.rows)
    ),
    # Episodes that are read in parts.
    "minari-arrow-long": partial(
        _minari_files,
        "arrow",
        lambda table, shape: _arrow(table, pa.ipc.new_file, shape.rows * 3 // 100),
        long=True,
    ),
    "imitation": _imitation,
    "zarr": partial(_zarr, version=2, chunks=0.07),
    "zarr-shards": partial(_zarr, version=3, chunks=0.05, shards=0.4),
    "lerobot": _lerobot,
    "rlds": _rlds,
    "torchrl": _torchrl,
    "d3rlpy-1": partial(_several, _d3rlpy_1),
    "d3rlpy-2": partial(_several, _d3rlpy_2),
    "tianshou": partial(_several, _tianshou),
}
#: Those whose data set is one file, or has one for each episode, whatever their number is said to be.
LONE = frozenset(name for name in LAYOUTS if name.startswith(("minari", "torchrl")))


def rows_in(kind: str, shape: Shape, count: int) -> int:
    """Rows of a data set of a layout."""
    lost = shape.rows // shape.episode if kind == "rlds" else 0
    return (shape.rows - lost) * (1 if kind in LONE else count)
