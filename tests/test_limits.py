"""Every limit of `rlio.Limits` refuses through the public readers, and can be raised through them."""

from __future__ import annotations

import base64
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import h5py
import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from further import further
from hostile_corpus import _json_lines, _packed_shard, json_files, save

import rlio
from rlio.errors import UnsafeData
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.schemas.schema import Schema, canonical_json

NAMES = [field.name for field in fields(Limits)]
# Compression is bound where both of these are exceeded: one is set to 1 while the other is looked at.
PARTNERS = {"inflation": "free_bytes", "free_bytes": "inflation"}


def pack(value: Any) -> str:
    return base64.b64encode(lz4.frame.compress(pickle.dumps(value, 5))).decode()


def steps(rows: int) -> rlio.SampleBatch:
    return rlio.SampleBatch(
        obs={"a": {"b": np.arange(rows * 4.0).reshape(rows, 4), "c": np.zeros((rows, 4))}},
        actions=np.zeros(rows, np.int64),
        rewards=np.ones(rows),
        eps_id=np.arange(rows) // 5,
        t=np.arange(rows) % 5,
        infos=np.array([{"n": i} for i in range(rows)], object),
    )


def several(rows: int) -> rlio.MultiAgentBatch:
    return rlio.MultiAgentBatch({"a": steps(rows), "b": steps(rows)}, rows)


def written(root: Path, make: Callable[..., Any], **options: Any) -> Path:
    for number in range(2):
        with make(root, writer_id=f"w0000{number}-00000000", **options) as writer:
            writer.write(several(40))
    return root


def rllib(root: Path) -> Path:
    root.mkdir()
    record = {
        "type": "SampleBatch",
        "obs": {"a": {"b": [[0.0, 1.0]] * 30}},
        "actions": pack(np.zeros(30)),
        "rewards": [1.0] * 30,
    }
    for name in ("a", "b"):
        (root / f"{name}.json").write_text(json.dumps(record) + "\n")
    return root


def zipped(root: Path) -> Path:
    root.mkdir()
    with zipfile.ZipFile(root / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", json.dumps({"obs": [[0.0]] * 2000, "rewards": [1.0] * 2000}) + "\n")
    return root


def parquet(root: Path) -> Path:
    root.mkdir()
    table = pa.table(
        {
            "obs": [{"a": {"b": [0.0, 1.0]}}] * 30,
            "actions": [pack([0] * 2_000)] * 30,
            "rewards": [1.0] * 30,
        }
    )
    for name in ("a", "b"):
        pq.write_table(
            table, root / f"{name}.parquet", compression="zstd", use_dictionary=False, write_statistics=False
        )
    return root


def hdf5(root: Path) -> Path:
    root.mkdir()
    for number in range(2):
        with h5py.File(root / f"{number}.hdf5", "w") as file:
            for name in ("observations", "actions", "rewards", "terminals", "timeouts"):
                file.create_dataset(name, data=np.zeros(3000), compression="gzip", chunks=(1000,))
    return root


#: Name -> (maker, reader, the limits that its data can meet).
SOURCES: dict[str, tuple[Callable[[Path], Path], Callable[..., Any], str]] = {
    "Parquet shards": (
        lambda root: written(root, rlio.ParquetWriter),
        rlio.DatasetReader,
        "listed_names schema_bytes schema_values footer_bytes columns policies nesting "
        "streams_bytes group_rows group_bytes inflation free_bytes zstd_window",
    ),
    "JSON shards": (
        lambda root: written(root, rlio.JsonWriter, compression=None),
        rlio.DatasetReader,
        "listed_names schema_bytes schema_values columns policies nesting group_rows group_bytes shard_bytes "
        "line_bytes",
    ),
    "packed JSON shards": (
        lambda root: written(root, rlio.JsonWriter, compression="zstd"),
        rlio.DatasetReader,
        "line_bytes inflation free_bytes zstd_window group_rows",
    ),
    "JSON shards without compression": (
        lambda root: written(root, rlio.JsonWriter, compression=None),
        rlio.DatasetReader,
        "listed_names schema_bytes schema_values columns policies nesting group_rows group_bytes line_bytes",
    ),
    "RLlib's JSON": (
        rllib,
        rlio.JsonReader,
        "listed_names columns nesting group_rows group_bytes packed_values line_bytes",
    ),
    "zipped JSON": (zipped, rlio.JsonReader, "line_bytes inflation free_bytes"),
    "others' Parquet": (
        parquet,
        rlio.ForeignParquetReader,
        "listed_names footer_bytes columns nesting group_rows group_bytes packed_values inflation free_bytes",
    ),
    "D4RL": (hdf5, rlio.D4RLReader, "listed_names columns group_bytes inflation free_bytes"),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> folder of the source."""
    folder = tmp_path_factory.mktemp("limits")
    return {name: make(folder / name.replace(" ", "-")) for name, (make, _, _) in SOURCES.items()}


def rows_of(reader: Callable[..., Any], place: Any, **limits: int) -> int:
    """Rows of an epoch; raises what the limits refuse."""
    with reader(place, epochs=1, limits=Limits(**limits)) as opened:
        rows = sum(batch.agent_steps() for batch in opened)
        if isinstance(opened, rlio.DatasetReader):
            list(opened.dataset.episode_parts())  # The tables of streams.
    return rows


def is_refused(reader: Callable[..., Any], place: Any, **limits: int) -> bool:
    try:
        rows_of(reader, place, **limits)
    except UnsafeData:
        return True
    return False


def test_each_limit_is_met_by_some_source() -> None:
    met = {name for _, _, names in SOURCES.values() for name in names.split()}
    assert met == set(NAMES)


@pytest.mark.few(2)
@pytest.mark.parametrize("source", SOURCES)
def test_each_limit_decides_what_is_read(source: str, sources: dict[str, Path]) -> None:
    _, reader, names = SOURCES[source]
    rows = rows_of(reader, sources[source])
    assert rows > 0
    for name in names.split():
        others = {PARTNERS[name]: 1} if name in PARTNERS else {}
        value = 1
        while value < getattr(DEFAULT_LIMITS, name) and is_refused(
            reader, sources[source], **{name: value}, **others
        ):
            value *= 16
        assert value > 1, f"{name}=1 refuses nothing"
        assert rows_of(reader, sources[source], **{name: value}, **others) == rows, name


@contextmanager
def tiny_defaults() -> Iterator[None]:
    """Whatever takes the default limits in place of those that it was given refuses everything."""
    kept = {name: getattr(DEFAULT_LIMITS, name) for name in NAMES}
    try:
        for name in NAMES:
            object.__setattr__(DEFAULT_LIMITS, name, 1)
        yield
    finally:
        for name, value in kept.items():
            object.__setattr__(DEFAULT_LIMITS, name, value)


@pytest.mark.few(2)
@pytest.mark.parametrize("source", SOURCES)
def test_limits_that_are_given_reach_everything_that_is_read(source: str, sources: dict[str, Path]) -> None:
    _, reader, _ = SOURCES[source]
    rows = rows_of(reader, sources[source])
    with tiny_defaults():
        assert rows_of(reader, sources[source]) == rows
        assert is_refused(lambda place, limits, **options: reader(place, **options), sources[source])


# ---- more than the defaults allow ----


def of_json(folder: Path, text: str | bytes) -> tuple[Any, Path]:
    (folder / "a.json").write_bytes(text.encode() if isinstance(text, str) else text)
    return rlio.JsonReader, folder


def many_columns(folder: Path) -> tuple[Any, Path]:
    return of_json(folder, json.dumps({"obs": [1], **{f"c{i}": [1] for i in range(5000)}}))


def deep_column(folder: Path) -> tuple[Any, Path]:
    return of_json(folder, '{"obs":' + '{"a":' * 9 + "[1]" + "}" * 9 + "}")


def many_rows(folder: Path) -> tuple[Any, Path]:
    return of_json(folder, json.dumps({"obs": pack(np.zeros((1 << 24) + 1, bool))}))


def many_mentions(folder: Path) -> tuple[Any, Path]:
    return of_json(folder, json.dumps({"obs": [0] * 70, "infos": pack([np.zeros(16 << 20, np.uint8)] * 70)}))


def many_opcodes(folder: Path) -> tuple[Any, Path]:
    stream = b"\x80\x04](" + b"N" * 600_000 + b"t" + b"a."
    infos = base64.b64encode(lz4.frame.compress(stream)).decode()
    return of_json(folder, json.dumps({"obs": [0], "infos": infos}))


def long_line(folder: Path) -> tuple[Any, Path]:
    return of_json(folder, b'{"obs": [1]' + b" " * (65 << 20) + b"}")


def small_zip(folder: Path) -> tuple[Any, Path]:
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", b'{"obs": [1]}\n' + (b" " * (1 << 20) + b"\n") * 70)
    return rlio.JsonReader, folder


def with_schema(folder: Path, change: Callable[[bytes], bytes]) -> tuple[Any, Path]:
    found = json_files()
    save(folder, {path: change(data) if "_schema" in path else data for path, data in found.items()})
    return rlio.DatasetReader, folder


def long_schema(folder: Path) -> tuple[Any, Path]:
    return with_schema(folder, lambda text: text + b" " * (65 << 20))


def schema_of_lists(folder: Path) -> tuple[Any, Path]:
    return with_schema(folder, lambda text: text[:-1] + b',"more":[' + b"[]," * 1_000_001 + b"[]]}")


def many_policies(folder: Path) -> tuple[Any, Path]:
    reader, _ = with_schema(folder, lambda text: text)
    (path,) = (folder / "_schema").iterdir()
    found = json.loads(path.read_bytes())
    (policy,) = found["policies"].values()
    found["policies"] = {f"p{i}": policy for i in range(4200)}
    text = canonical_json(found)
    schema = Schema.from_text(text, limits=Limits(policies=5000))
    (folder / f"_schema/{schema.hash}.json").write_text(text)
    return reader, folder


def long_footer(folder: Path) -> tuple[Any, Path]:
    table = pa.table({"obs": [1]})
    with pq.ParquetWriter(folder / "a.parquet", table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"more": "x" * (17 << 20)})
    return rlio.ForeignParquetReader, folder


@pytest.mark.further
def test_writers_and_compaction_end_a_shard_before_its_footer_is_more_than_readers_accept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether columns, row groups or episodes make it large."""
    monkeypatch.setattr("rlio.schemas.schema._GROUP_BYTES", 4000)
    monkeypatch.setattr(Limits, "footer_bytes", 20_000)
    limits = Limits(footer_bytes=20_000)
    rows = np.arange(800)
    wide = {f"c{i}": rows.astype(np.float32) for i in range(20)}
    for name, columns in {
        "columns": {**wide, "eps_id": rows // 400},
        "episodes": {"obs": rows, "eps_id": rows},
        "long ids": {"obs": rows, "eps_id": np.array([f"{row:040}" for row in rows])},
    }.items():
        with rlio.ParquetWriter(tmp_path / name, roll=rlio.Roll(max_seconds=None)) as writer:
            writer.write(rlio.SampleBatch(columns))
        shards = len(rlio.open_dataset(tmp_path / name).segments)
        assert shards > 1, name
        rlio.maintenance.compact(tmp_path / name)
        with rlio.DatasetReader(tmp_path / name, epochs=1, limits=limits) as reader:
            assert sum(len(batch) for batch in reader) == len(rows)
        assert len(rlio.open_dataset(tmp_path / name).segments) > 1, name


def wide_window(folder: Path) -> tuple[Any, Path]:
    provenance, line, *_ = (line + b"\n" for line in _json_lines())
    # Magic, flags (its size follows in two bytes), the window's exponent, the size; and one raw block.
    head = struct.pack("<IBBH", 0xFD2FB528, 0x40, (28 - 10) << 3, len(line) - 256)
    frame = head + (len(line) << 3 | 1).to_bytes(3, "little") + line
    _packed_shard(zstandard.compress(provenance), frame, rows=10)(folder)
    return rlio.DatasetReader, folder


RAISED: list[Any] = [
    (many_columns, {"columns": 6000}),
    (deep_column, {"nesting": 9}),
    (many_rows, {"group_rows": 1 << 25}),
    (many_mentions, {"group_bytes": 2 << 30}),
    (small_zip, {"inflation": 2000}),
    (small_zip, {"free_bytes": 100 << 20}),
    *further(
        (many_opcodes, {"packed_values": 2_000_000}),
        (long_line, {"line_bytes": 70 << 20}),
        (long_schema, {"schema_bytes": 70 << 20}),
        (schema_of_lists, {"schema_values": 2_000_000}),
        (many_policies, {"policies": 5000}),
    ),
    (long_footer, {"footer_bytes": 18 << 20}),
    (wide_window, {"zstd_window": 1 << 28}),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("make", "limits"), RAISED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_what_exceeds_a_default_is_refused_and_read_where_the_limit_is_raised(
    make: Callable[[Path], tuple[Any, Path]], limits: dict[str, int], tmp_path: Path
) -> None:
    reader, place = make(tmp_path)
    assert is_refused(reader, place)
    assert rows_of(reader, place, **limits) > 0
