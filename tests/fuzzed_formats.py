"""Small valid files of every format that rlio reads, their mutations, and a process that reads these.

As a script it reads the mutations of a format one after the other, within bounds, and prints a line for each.
Mutations know the formats: checksums are made right again, JSON and HDF5 change in their structure, and all
files change in their bytes.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import foreign_files
import google_crc32c
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hostile_corpus import GOOD
from kinds import KINDS, d4rl_arrays, episodes_of, made
from test_fuzz import mutated, other_json

import rlio
from rlio.batch.nested import leaves
from rlio.errors import RlioError

GOLDEN = Path(__file__).with_name("golden") / "formats"
MEMORY = 1536 << 20
SECONDS = 20
#: So many times as long on the clock, while others use the processors.
WAITS = 30
MEMORY_DISK = "/dev/shm"
#: Path below a folder -> bytes.
Files: TypeAlias = dict[str, bytes]
_MAPPING = rlio.Mapping(
    columns={"obs": ["x", "y"], "actions": "a", "rewards": "r"},
    episode="e",
    terminated=True,
    next_obs="derive",
)


# ---- small files ----


def _files(root: Path) -> Files:
    found = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    above = root.parent if root.is_file() else root
    return {path.relative_to(above).as_posix(): path.read_bytes() for path in found}


def _golden(*names: str) -> Callable[[], list[Files]]:
    return lambda: [_files(GOLDEN / name) for name in names]


def _in_folder(make: Callable[[Path], object]) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        return _files(Path(folder))


def _steps() -> rlio.SampleBatch:
    ends = np.array([0, 0, 1, 0, 1], np.bool_)
    obs = np.arange(14, dtype=np.float32).reshape(7, 2)
    now, after = [0, 1, 2, 4, 5], [1, 2, 3, 5, 6]
    return rlio.SampleBatch(
        obs=obs[now],
        new_obs=obs[after],
        actions=np.arange(10, dtype=np.float32).reshape(5, 2),
        rewards=np.arange(5) / 2,
        terminateds=ends,
        truncateds=np.zeros(5, np.bool_),
        eps_id=np.array([0, 0, 0, 1, 1]),
        t=np.array([0, 1, 2, 0, 1]),
    )


def _written(name: str, ending: str = "") -> Callable[[], list[Files]]:
    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as root:
            with rlio.ParquetWriter(f"{root}/data", spool=None) as writer:
                writer.write(_steps())
            rlio.convert(f"{root}/data", folder / f"a{ending}" if ending else folder, to=name)

    return lambda: [_in_folder(make)]


def _table(folder: Path) -> None:
    with pa.ipc.new_file(folder / "a.arrow", (table := _arrow()).schema) as file:
        file.write_table(table)


def _arrow() -> pa.Table:
    columns = {name: column.tolist() for name, column in _steps().items() if name != "new_obs"}
    return pa.table({**columns, "note": ["a", "b", "c", "d", "e"]})


_LINES = [{"x": 1.5, "y": 2.0, "a": 1, "r": 0.5, "e": n // 2, "s": "a\nb"} for n in range(4)]


def _groups(folder: Path) -> None:
    """A group an episode, under names that only a mapping knows."""
    with h5py.File(folder / "a.hdf5", "w") as file:
        for number, episode in enumerate(episodes_of(_steps())):
            for name in ("obs", "actions", "rewards"):
                file[f"ep_{number}/my_{name}"] = episode[name]


def _d4rl(folder: Path) -> None:
    """As D4RL writes it. What rlio writes has 0.5 MB of room for further rows, which most mutations hit."""
    with h5py.File(folder / "a.hdf5", "w") as file:
        for name, column in d4rl_arrays(_steps()).items():
            file[name] = column


def _kind(name: str, folder: Path) -> None:
    rows = _steps()
    rows["actions"] = np.asarray(rows["actions"])[:, 0]
    made(name, rows, folder)


def _all(*makers: Callable[[], list[Files]]) -> Callable[[], list[Files]]:
    return lambda: [files for make in makers for files in make()]


def _of(make: Callable[[Path], object]) -> Callable[[], list[Files]]:
    return lambda: [_in_folder(make)]


#: Name of a format -> its small data sets.
SEEDS: dict[str, Callable[[], list[Files]]] = {
    "arrow": _of(_table),
    "csv": lambda: [{"a.csv": b"x,y,a,r,e,s\n1.5,2,1,0.5,0,u\n1.5,2,0,0.5,0,\"v,w\"\n1,2,1,0.5,1,\n"}],
    "d3rlpy": _golden("d3rlpy/buffer.h5"),
    "d3rlpy-1": _of(foreign_files.d3rlpy_1),
    "d4rl": _of(_d4rl),
    "huggingface": _golden("huggingface/saved/train"),
    "jsonl": lambda: [{"a.jsonl": b"".join(json.dumps(line).encode() + b"\n" for line in _LINES)}],
    "lerobot": _all(_golden("lerobot/v2.1", "lerobot/v3.0-image"), _written("lerobot")),
    "minari": _golden("minari/cart/collected-v0", "minari/nested/arrow-v0", "minari/nested/parquet-v0"),
    "npz": _written("npz"),
    "parquet": _written("parquet"),
    "rlds": _golden("rlds/counts/1.0.0", "rlds/parts/0.1.0"),
    "rllib-episodes": _golden("rllib/chunks", "rllib/nested"),
    "rllib-json": lambda: [
        *_golden("rllib-2019/output-2019-10-28_00-00-00_worker-0_0.json")(),
        {"a.json": GOOD + b"\n" + GOOD + b"\n"},
        {"a.zip": _zipped({"a.json": GOOD + b"\n", "b.json": GOOD})},
    ],
    "rllib-parquet": _golden("rllib-dataset/one-agent.parquet", "rllib-dataset/two-policies.parquet"),
    "robomimic": _written("robomimic", ".hdf5"),
    "tianshou": _golden("tianshou/ring.hdf5", "tianshou/vector.hdf5", "tianshou/pickled.hdf5"),
    "torchrl": _golden("torchrl/ring", "torchrl/woven", "torchrl/tensors"),
    "hdf5": _of(_groups),
    **{name: _of(partial(_kind, name)) for name in KINDS},
}  # fmt: skip
#: How those are read whose columns have other names than ours.
MAPPINGS = {
    "csv": _MAPPING,
    "jsonl": _MAPPING,
    "hdf5": rlio.Mapping(
        columns={"obs": "my_obs", "actions": "my_actions", "rewards": "my_rewards"},
        episode="ep_*",
        terminated=True,
        next_obs="derive",
    ),
    "huggingface": rlio.Mapping(
        columns={"obs": "observation.state", "actions": "action", "rewards": "next.reward"},
        episode="episode_index",
        terminated="next.done",
    ),
}


# ---- mutations ----


def _zipped(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()


def _other_zip(data: bytes, rng: random.Random) -> bytes:
    """A zip file with one member changed under a right checksum."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice([*members])
    members[name] = mutated(members[name][:200], rng) + members[name][200:]
    return _zipped(members, rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))


def _other_records(data: bytes, rng: random.Random) -> bytes:
    """A TFRecord file with records changed under right checksums."""

    def masked(part: bytes) -> bytes:
        crc = google_crc32c.value(part)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    found, at = b"", 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        record = data[at + 12 : at + 12 + size]
        if rng.random() < 0.5:
            record = mutated(record, rng)
        head = struct.pack("<Q", len(record))
        found, at = found + head + masked(head) + record + masked(record), at + size + 16
    return found


def _other_hdf5(data: bytes, rng: random.Random) -> bytes:
    """An HDF5 file with another object in the place of one."""
    stream = io.BytesIO(data)
    with h5py.File(stream, "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        name = rng.choice(names)
        about = rng.choice([file, *(file[one] for one in names[:20])]).attrs
        above, _, last = name.rpartition("/")
        group = file[above] if above else file
        old = file[name]
        shape = old.shape if isinstance(old, h5py.Dataset) else (3,)
        kind = rng.randrange(9)
        if kind == 8 and len(about):
            key = rng.choice([*about])
            about[key] = rng.choice((-1, 2**40, "x", 0.5, np.zeros(3), b"\xff"))
            return stream.getvalue()
        del file[name]
        if kind == 1:
            group[last] = rng.choice((1.0, "text", -1))
        elif kind == 2:
            group[last] = np.zeros(rng.choice(((0,), (3, 0), (2, 3, 4), (1,), (100, 1))))
        elif kind == 3:
            group[last] = group
        elif kind == 4:
            group[last] = np.full(shape, rng.choice((np.nan, -1, 1e30, 2)), rng.choice(("f4", "f8", "f2")))
        elif kind == 5:
            group.create_dataset(last, data=["a"] * max(1, (shape or (1,))[0]), dtype=h5py.string_dtype())
        elif kind == 6:
            group.create_group(last)
        elif kind == 7:
            group[last] = rng.choice((h5py.SoftLink("/"), h5py.ExternalLink("/etc/passwd", "/")))
    return stream.getvalue()


def _other_parquet(data: bytes, rng: random.Random) -> bytes:
    """A Parquet file with a column of another type, or other values."""
    table = pq.read_table(pa.BufferReader(data))
    stream = io.BytesIO()
    pq.write_table(_other_table(table, rng), stream)
    return stream.getvalue()


def _other_table(table: pa.Table, rng: random.Random) -> pa.Table:
    at, rows = rng.randrange(len(table.column_names)), len(table)
    name = table.column_names[at]
    kind = rng.randrange(8)
    if kind == 0:
        return table.drop_columns([name])
    if kind == 1:
        return table.append_column(name, table[name])
    if kind == 2:
        return table.slice(rng.randrange(rows + 1), rng.randrange(rows + 1))
    values = (
        pa.nulls(rows),
        pa.array(["x"] * rows),
        pa.array([[1.0] * (n % 3) for n in range(rows)]),
        pa.array([rng.choice((-1, 2**62, 0)) for _ in range(rows)]),
        pa.array([{"a": n} for n in range(rows)]),
    )
    return table.set_column(at, name, values[kind - 3])


def _other_text(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(other_json(json.loads(lines[at]), rng)).encode() + b"\n"
    return b"".join(lines)


_KNOWING = {
    ".json": _other_text,
    ".jsonl": _other_text,
    ".npz": _other_zip,
    ".zip": _other_zip,
    ".hdf5": _other_hdf5,
    ".h5": _other_hdf5,
    ".parquet": _other_parquet,
}


def mutation(seeds: list[Files], rng: random.Random) -> Files:
    """A data set with one file changed, sometimes two."""
    found = dict(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2))):
        name = rng.choice([*found])
        data = found[name]
        change = _other_records if "tfrecord" in name else _KNOWING.get(Path(name).suffix, mutated)
        with contextlib.suppress(Exception):  # It no longer is such a file.
            data = change(data, rng) if data and rng.random() < 0.5 else mutated(data, rng)
        found[name] = data
    return found


# ---- reading ----


def _digest(reader: Any) -> tuple[int, str]:
    """The rows, and a digest of their values."""
    rows, digest = 0, hashlib.sha256()
    for batch in reader:
        if isinstance(batch, rlio.SampleBatch):
            for name, column in batch.items():
                for _, leaf in leaves(column):
                    assert len(leaf) == len(batch), name
                    # Floats of 16 bytes have six that mean nothing.
                    as_values = leaf.dtype == object or leaf.dtype.itemsize == 16
                    digest.update(repr(leaf.tolist() if as_values else leaf.tobytes()).encode())
        rows += len(batch)
    return rows, digest.hexdigest()


def read(folder: Path, name: str, on_error: str) -> str:
    """What reading a data set comes to: "RlioError", or the rows, which a second pass must give again."""
    options: dict[str, Any] = {"epochs": 1, "on_error": on_error}
    if name in MAPPINGS:
        options["mapping"] = MAPPINGS[name]
    found = []
    for _ in range(2):
        try:
            with rlio.read(folder, **options) as reader:
                found.append(_digest(reader))
        except RlioError as error:
            return type(error).__name__
    assert found[0] == found[1], "a second pass gives other rows"
    return f"{found[0][0]} rows"


def _watch(allowed: tuple[str, ...], opened: list[str]) -> None:
    """Note each file that is opened outside the folder, and what only code from the data would do."""
    forbidden = (
        "os.system",
        "os.exec",
        "subprocess.Popen",
        "socket.connect",
        "os.remove",
        "os.mkdir",
        "os.rename",
    )

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in forbidden:
            opened.append(f"{event} {arguments!r:.200}")
        elif event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith(allowed):
                opened.append(f"{event} {path}")

    sys.dont_write_bytecode = True  # What is imported first while the data is read is not the data's.
    sys.addaudithook(hook)


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) << 10


def main(name: str, first: int, stop: int) -> None:
    """Read the mutations ``first`` to ``stop - 1`` of a format, and print a line for each.

    A forked process reads one after the other. If a mutation ends it, the next one is forked: all is imported
    already, so that takes milliseconds.
    """
    warnings.simplefilter("ignore")
    home = Path(tempfile.mkdtemp(dir=MEMORY_DISK if os.path.isdir(MEMORY_DISK) else None))
    seeds = SEEDS[name]()
    for number, files in enumerate(seeds):  # Also so that all is imported.
        _put(home / f"seed{number}", files)
        _say(seed=read(home / f"seed{number}", name, "raise"))
        shutil.rmtree(home / f"seed{number}")
    gc.collect()
    gc.freeze()  # Collections pass over what is there: they took half of the time.
    at = mmap.mmap(-1, 8)  # Shared: the number of the mutation that the child reads.
    while first < stop:
        at[:] = struct.pack("<q", first)
        child = os.fork()
        if child == 0:
            try:
                _read_mutations(name, seeds, home, range(first, stop), at)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (last,) = struct.unpack("<q", at[:])
        if code:
            _say(end=last, died=code)
        shutil.rmtree(home / "given", ignore_errors=True)
        first = last + 1
    shutil.rmtree(home)


def _say(**said: Any) -> None:
    print(json.dumps(said), flush=True)  # noqa: T201


def _read_mutations(name: str, seeds: list[Files], home: Path, numbers: range, at: mmap.mmap) -> None:
    opened: list[str] = []
    code = (
        str(home),
        sys.prefix,
        sys.base_prefix,
        str(Path(rlio.__file__).parent.parent),
        "/proc/",
        "/dev/",
        "/sys/",
    )
    _watch(
        tuple(os.path.realpath(place) for place in (*code, *map(os.path.realpath, sys.path[1:])) if place),
        opened,
    )
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2 * MEMORY, size + 2 * MEMORY))
    folder = home / "given"
    for number in numbers:
        at[:] = struct.pack("<q", number)
        rng = random.Random(f"{name} {number}")
        _put(folder, mutation(seeds, rng))
        opened.clear()
        Path("/proc/self/clear_refs").write_text("5")
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # Of the processor: it kills the process.
        signal.alarm(WAITS * SECONDS)  # Ends an endless wait.
        try:
            said: dict[str, Any] = {"found": read(folder, name, rng.choice(("raise", "skip")))}
        except BaseException as error:
            said = {"error": repr(error)[:300], "trace": traceback.format_exc()[-2500:]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        _say(end=number, peak=_peak(), opened=opened[:3], **said)
        shutil.rmtree(folder)


def put_mutation(name: str, number: int, folder: Path) -> dict[str, Any]:
    """Make the files of a mutation; gives the options with which they are read."""
    _put(folder, mutation(SEEDS[name](), random.Random(f"{name} {number}")))
    return {"mapping": MAPPINGS.get(name)}


def _put(folder: Path, files: Files) -> None:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
