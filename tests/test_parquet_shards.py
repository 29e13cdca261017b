"""Parquet shards under damage and malice: equal data or a typed error, and no unchecked byte to pyarrow."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from further import further
from golden_data import DATA_SETS
from stored_batches import assert_identical, files, fresh_root, group_bytes, load, numbered, put, store

import rlio.schemas.shard_file as shard_file
from rlio import DatasetReader, MultiAgentBatch, ParquetWriter, Roll, SampleBatch, open_dataset
from rlio.batch import Batch
from rlio.batch.arrays import object_column
from rlio.catalog.names import ShardName
from rlio.errors import CorruptData, EndOfData, MissingColumn, UnsafeData
from rlio.limits import DEFAULT_LIMITS, Limits
from rlio.schemas import parquet_metadata
from rlio.schemas.batches import to_batch
from rlio.schemas.shard_file import ShardFile

SOAK = "RLIO_SOAK" in os.environ


def small_batch() -> SampleBatch:
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(31, 3)).astype(np.float32)
    infos = np.empty(30, object)
    infos[:] = [{"n": [i]} for i in range(30)]  # A list is stored as JSON.
    return SampleBatch(
        obs=obs[:-1], new_obs=obs[1:], actions=rng.integers(0, 4, 30), infos=infos, eps_id=np.arange(30) // 10
    )


@cache
def small_shard() -> tuple[str, bytes]:
    """Path and bytes of a shard with several row groups."""
    with group_bytes(1000):
        root = store(small_batch(), writer_id="w00000-00000000")
    ((path, data),) = files(root).items()
    return path, data


def open_bytes(data: bytes, *, size: int, footer_crc32: int, limits: Limits = DEFAULT_LIMITS) -> ShardFile:
    return ShardFile(
        lambda start, stop: data[start:stop],
        size=size,
        footer_crc32=footer_crc32,
        uri="test://shard",
        limits=limits,
    )


def read_all(file: ShardFile) -> list[Batch]:
    return [to_batch(file.read_group(i, batches=True)) for i in range(len(file.groups))]


def read_or_refuse(data: bytes) -> list[Batch] | None:
    """The groups of bytes that stand under the small shard's name; None if they are refused."""
    path, whole = small_shard()
    name = ShardName.parse(path.rsplit("/", 1)[1])
    assert name is not None
    try:
        return read_all(open_bytes(data, size=len(whole), footer_crc32=name.footer_crc32))
    except CorruptData as error:
        if error.uri != "test://shard":
            raise
        return None


def test_the_shard_of_these_tests_has_several_row_groups_and_is_read() -> None:
    batches = read_or_refuse(small_shard()[1])
    assert batches is not None
    assert len(batches) > 2
    assert_identical(batches[0], small_batch()[: len(batches[0])])


def test_a_shard_truncated_at_any_byte_is_refused() -> None:
    data = small_shard()[1]
    for length in range(len(data)):
        assert read_or_refuse(data[:length]) is None, length


@pytest.mark.parametrize("count", [300, *further(1000, 4000), pytest.param(None, marks=pytest.mark.soak)])
def test_a_shard_with_a_flipped_bit_is_refused(count: int | None) -> None:
    data = small_shard()[1]
    bits = np.arange(8 * len(data))
    if count is not None:
        bits = np.random.default_rng(0).choice(bits, count, replace=False)
    for bit in bits.tolist():
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert read_or_refuse(bytes(damaged)) is None, bit


def test_bytes_put_in_are_refused() -> None:
    data = small_shard()[1]
    for at in range(0, len(data), 97):
        assert read_or_refuse(data[:at] + b"\0" + data[at:]) is None, at


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["flip", "truncate"])
def test_no_byte_reaches_pyarrow_before_its_crc_has_matched(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small_shard()[1]
    footer_start = len(data) - int.from_bytes(data[-8:-4], "little") - 8
    whole = open_bytes(data, size=len(data), footer_crc32=zlib.crc32(data[footer_start:]))
    legal = {data[info.start : info.stop] for info in whole.groups}
    seen = []

    def read_metadata(source: pa.BufferReader) -> Any:
        seen.append(source.read())
        assert seen[-1] == b"PAR1" + data[footer_start:]
        source.seek(0)
        return real_metadata(source)

    def group_bytes_init(self: Any, group: bytes, *args: Any) -> None:
        seen.append(group)
        assert group in legal
        real_init(self, group, *args)

    real_metadata, real_init = pq.read_metadata, shard_file._GroupBytes.__init__
    monkeypatch.setattr(shard_file.pq, "read_metadata", read_metadata)
    monkeypatch.setattr(shard_file._GroupBytes, "__init__", group_bytes_init)
    for at in range(0, len(data), 61):
        damaged = data[:at] if kind == "truncate" else data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :]
        assert read_or_refuse(damaged) is None
    assert kind == "truncate" or len(seen) > 10


# ---- damage as a reader of the data set meets it ----


def damaged_root(change: Callable[[bytearray, ShardFile], None]) -> tuple[str, int]:
    """A root of three shards of which the middle one is changed; and its number of row groups."""
    root = fresh_root()
    with group_bytes(200):
        store(numbered(60), root=root, roll=Roll(max_rows=20, max_seconds=None))
    path, data = list(files(root).items())[1]
    name = ShardName.parse(path.rsplit("/", 1)[1])
    assert name is not None
    file = open_bytes(data, size=len(data), footer_crc32=name.footer_crc32)
    damaged = bytearray(data)
    change(damaged, file)
    put(path, bytes(damaged))
    return root, len(file.groups)


@pytest.mark.few(2)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("group", [0, 1])
def test_skipping_a_damaged_row_group_costs_exactly_its_rows(group: int, shuffle: bool) -> None:
    lost: list[int] = []

    def change(data: bytearray, file: ShardFile) -> None:
        info = file.groups[group]
        data[(info.start + info.stop) // 2] ^= 1
        first = 20 + sum(before.rows for before in file.groups[:group])
        lost.extend(range(first, first + info.rows))

    root, groups = damaged_root(change)
    assert groups > 1
    with pytest.raises(CorruptData, match=rf"{len(lost)} rows are lost.*record {group}\]"):
        load(root, shuffle=shuffle, seed=1 if shuffle else None)
    seed = 1 if shuffle else None
    with DatasetReader(root, epochs=1, batch_size=7, on_error="skip", shuffle=shuffle, seed=seed) as reader:
        batches = list(reader)
        assert reader.skipped == len(lost)
    served = sorted(t for batch in batches for t in batch["t"].tolist())
    assert served == [t for t in range(60) if t not in lost]
    assert all(len(batch) == 7 for batch in batches[:-1])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_damaged_footer_costs_its_shard(shuffle: bool) -> None:
    def change(data: bytearray, file: ShardFile) -> None:
        data[-20] ^= 1

    root, _ = damaged_root(change)
    with pytest.raises(CorruptData, match="footer"):
        load(root)
    with DatasetReader(
        root, epochs=2, on_error="skip", shuffle=shuffle, seed=1 if shuffle else None
    ) as reader:
        served = sorted(t for batch in reader for t in batch["t"].tolist())
        assert reader.skipped == 20  # Once, however many epochs.
    assert served == sorted([*range(20), *range(40, 60)] * 2)


def test_a_damaged_group_is_an_error_again_when_tried_again_and_rows_before_it_are_not_lost() -> None:
    def change(data: bytearray, file: ShardFile) -> None:
        data[file.groups[0].stop - 3] ^= 1

    root, _ = damaged_root(change)
    path = list(files(root))[1]
    whole = bytearray(files(root)[path])
    with DatasetReader(root, epochs=1, batch_size=7) as reader:
        found = [reader.sample() for _ in range(2)]
        for _ in range(2):
            with pytest.raises(CorruptData, match="record 0"):
                reader.sample()
        state = reader.state_dict()
        whole[_middle(root, path).groups[0].stop - 3] ^= 1
        put(path, bytes(whole))
        found += list(reader)
    assert [t for batch in found for t in batch["t"].tolist()] == list(range(60))
    with DatasetReader(root, epochs=1, batch_size=7) as reader:
        reader.load_state_dict(state)
        assert reader.sample()["t"].tolist() == list(range(14, 21))


def _middle(root: str, path: str) -> ShardFile:
    data = files(root)[path]
    name = ShardName.parse(path.rsplit("/", 1)[1])
    assert name is not None
    return open_bytes(data, size=len(data), footer_crc32=name.footer_crc32)


@pytest.mark.few(3)
@pytest.mark.parametrize("epochs", [1, 3, None])
@pytest.mark.parametrize("shard", [(0, 1), (1, 3)])
def test_a_data_set_that_is_damaged_throughout_ends_instead_of_turning_for_ever(
    epochs: int | None, shard: tuple[int, int]
) -> None:
    root = store(numbered(2000))
    for path, data in files(root).items():
        put(path, data[:-20] + b"x" * 20)
    with (
        DatasetReader(root, epochs=epochs, batch_size=1, on_error="skip", shard=shard) as reader,
        pytest.raises(EndOfData if epochs == 1 else CorruptData),
    ):
        reader.sample()


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_store_that_fails_is_no_damage(on_error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.source.span_reader.RUN_ROWS", 1)  # Otherwise all are read at once.
    with group_bytes(200):
        root = store(numbered(60))
    with DatasetReader(root, epochs=1, batch_size=5, on_error=on_error) as reader:
        found = reader.sample()["t"].tolist()
        storage = reader.dataset.storage
        read_range = type(storage).read_range
        monkeypatch.setattr(type(storage), "read_range", _unreachable)
        batches: list[Batch] = []
        with pytest.raises(TimeoutError):
            batches.extend(reader)
        found += [t for batch in batches for t in batch["t"].tolist()]
        monkeypatch.setattr(type(storage), "read_range", read_range)
        found += [t for batch in reader for t in batch["t"].tolist()]
        assert reader.skipped == 0
    assert found == list(range(60))


def _unreachable(*args: Any) -> bytes:
    raise TimeoutError("the store does not answer")


# ---- forged shards: every CRC is right, and nothing else need be ----


class Forger:
    """Rewrites the small shard, or one of several agents, with changes, under right CRCs."""

    def __init__(self, *batches: Batch) -> None:
        with group_bytes(1000):
            root = store(*(batches or (small_batch(),)))
        (data,) = files(root).values()
        self.table = pq.read_table(pa.BufferReader(data))
        metadata = pq.read_metadata(pa.BufferReader(data))
        self.sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self.footer = {key.decode(): value.decode() for key, value in metadata.metadata.items()}
        self.schema = json.loads(self.footer["rlio.schema"])
        self.groups: Callable[[list[list[int]]], Any] = lambda groups: groups
        self.units = [entry[4:] for entry in json.loads(self.footer["rlio.groups"])]
        self.options: dict[str, Any] = {"store_schema": False}

    def open(self, limits: Limits = DEFAULT_LIMITS) -> ShardFile:
        sink = pa.BufferOutputStream()
        writer = pq.ParquetWriter(sink, self.table.schema, **self.options)
        start, groups, first = 0, [], 0
        written: list[int] = []
        for rows, units in zip(self.sizes, self.units, strict=True):
            writer.write_table(self.table.slice(first, rows), row_group_size=rows)
            written.append(sink.tell())
            groups.append([start, sink.tell(), 0, rows, *units])
            start, first = sink.tell(), first + rows
        # The data are the same whatever the metadata are, so that their CRCs can be had from a first go.
        data = self._finish(writer, sink, groups)
        for group in groups:
            group[2] = zlib.crc32(data[group[0] : group[1]])
        sink = pa.BufferOutputStream()
        writer = pq.ParquetWriter(sink, self.table.schema, **self.options)
        first = 0
        for rows in self.sizes:
            writer.write_table(self.table.slice(first, rows), row_group_size=rows)
            first += rows
        data = self._finish(writer, sink, self.groups(groups))
        footer = data[len(data) - int.from_bytes(data[-8:-4], "little") - 8 :]
        return open_bytes(data, size=len(data), footer_crc32=zlib.crc32(footer), limits=limits)

    def _finish(self, writer: pq.ParquetWriter, sink: Any, groups: Any) -> bytes:
        self.footer["rlio.schema"] = self.schema if isinstance(self.schema, str) else json.dumps(self.schema)
        writer.add_key_value_metadata({**self.footer, "rlio.groups": json.dumps(groups)})
        writer.close()
        return bytes(sink.getvalue())

    def replace(
        self, name: str, values: Any, kind: pa.DataType | None = None, nullable: bool = False
    ) -> None:
        """Put other values, and perhaps another type, into a column."""
        index = self.table.schema.get_field_index(name)
        array = pa.array(values, kind or self.table.schema.field(name).type)
        field = pa.field(name, array.type, nullable=nullable or self.table.schema.field(name).nullable)
        self.table = self.table.set_column(index, field, array)

    def streams(self, change: Callable[[dict[str, Any]], Any]) -> None:
        packed = base64.b64decode(self.footer["rlio.streams"])
        table = json.loads(zstandard.ZstdDecompressor().decompress(packed))
        change(table)
        again = zstandard.ZstdCompressor().compress(json.dumps(table).encode())
        self.footer["rlio.streams"] = base64.b64encode(again).decode()


def refused(forger: Forger, kind: type[CorruptData] = CorruptData, match: str | None = None) -> None:
    with pytest.raises(kind, match=match):
        read_all(forger.open())


def test_a_forger_who_changes_nothing_is_believed() -> None:
    found = read_all(Forger().open())
    assert sum(map(len, found)) == 30


def test_an_arrow_schema_in_the_footer_is_refused_before_pyarrow_sees_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forger = Forger()
    forger.options["store_schema"] = True
    monkeypatch.setattr(shard_file.pq, "read_metadata", lambda source: pytest.fail("pyarrow saw it"))
    refused(forger, UnsafeData, "Arrow schema")


def test_registered_extension_types_are_refused_and_run_nothing() -> None:
    ran = []

    class Evil(pa.ExtensionType):  # type: ignore[misc]  # pyarrow ships no types
        def __init__(self) -> None:
            super().__init__(pa.int64(), "rlio.test.evil")

        def __arrow_ext_serialize__(self) -> bytes:
            return b"x"

        @classmethod
        def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> Any:
            ran.append(serialized)
            return cls()

    pa.register_extension_type(Evil())
    try:
        forger = Forger()
        storage = pa.array(range(30), pa.int64())
        index = forger.table.schema.get_field_index("actions")
        forger.table = forger.table.set_column(
            index, "actions", pa.ExtensionArray.from_storage(Evil(), storage)
        )
        forger.options["store_schema"] = True
        ran.clear()
        refused(forger, UnsafeData)
        assert ran == []
    finally:
        pa.unregister_extension_type("rlio.test.evil")


@pytest.mark.few(11)
@pytest.mark.parametrize(
    "groups",
    [
        lambda g: [],
        lambda g: g[:-1],
        lambda g: [*g, g[-1]],
        lambda g: g[::-1],
        lambda g: [[e[0], e[1] + 1, *e[2:]] for e in g],
        lambda g: [[e[0] + 4, *e[1:]] for e in g],
        lambda g: [[-1, *g[0][1:]], *g[1:]],
        lambda g: [[*g[0][:1], 10**18, *g[0][2:]], *g[1:]],
        lambda g: [g[0], [g[0][0], g[1][1], *g[1][2:]], *g[2:]],
        lambda g: [[*g[0][:3], g[0][3] + 1, *g[0][4:]], *g[1:]],
        lambda g: [[*g[0][:4], 0, 0], *g[1:]],
        lambda g: [[*g[0][:4], -5, 0], *g[1:]],
        lambda g: [[*g[0][:4], 10**15, 0], *g[1:]],
        lambda g: [[*g[0][:5], -1], *g[1:]],
        lambda g: [e[:5] for e in g],
        lambda g: [[*e, 1] for e in g],
        lambda g: {"a": 1},
        lambda g: 7,
        lambda g: None,
        lambda g: [["x"] * 6] * len(g),
        lambda g: [[None] * 6] * len(g),
        lambda g: [[float("1e400")] * 6] * len(g),
    ],
)
def test_a_wrong_list_of_row_groups_is_refused_by_the_footer_alone(groups: Callable[[Any], Any]) -> None:
    forger = Forger()
    forger.groups = groups
    with pytest.raises(CorruptData):
        forger.open()


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", "nonsense", '{"format": 1}', '{"format": "0"}', "[" * 100_000, "1" * 5000],
)
@pytest.mark.each_value_once
@pytest.mark.parametrize("key", ["rlio.schema", "rlio.provenance", "rlio.streams"])
def test_footer_entries_that_are_no_such_thing_are_refused(key: str, text: str) -> None:
    forger = Forger()
    forger.footer[key] = text
    if key == "rlio.schema":
        forger.schema = text
    if key == "rlio.provenance" and text in ("{}", "[]", "null", '{"format": 1}', '{"format": "0"}'):
        return  # Nothing depends on what provenance says.
    refused(forger)


@pytest.mark.few(2)
@pytest.mark.parametrize("key", ["rlio.schema", "rlio.groups", "rlio.streams", "rlio.provenance"])
def test_a_footer_without_one_of_its_entries_is_refused(key: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forger, "_finish", _without(key))
        refused(Forger(), match=key)


def _without(key: str) -> Callable[..., bytes]:
    def finish(self: Forger, writer: pq.ParquetWriter, sink: Any, groups: Any) -> bytes:
        entries = {**self.footer, "rlio.groups": json.dumps(groups), "rlio.schema": json.dumps(self.schema)}
        writer.add_key_value_metadata({name: text for name, text in entries.items() if name != key})
        writer.close()
        return bytes(sink.getvalue())

    return finish


@pytest.mark.few(12)
@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["obs"].update(shape=[1 << 40]),
        lambda c: c["obs"].update(shape=[1 << 32, 1 << 32]),
        lambda c: c["obs"].update(shape=[0, 1 << 62]),
        lambda c: c["obs"].update(shape=[-3]),
        lambda c: c["obs"].update(shape=[3.0]),
        lambda c: c["obs"].update(shape=[4]),
        lambda c: c["obs"].update(shape=[1] * 40),
        lambda c: c["obs"].update(shape="3"),
        lambda c: c["obs"].update(dtype="|O"),
        lambda c: c["obs"].update(dtype="<f8"),
        lambda c: c["obs"].update(dtype="<f4,<f4"),
        lambda c: c["obs"].update(dtype=[["a", "<f4"]]),
        lambda c: c["obs"].update(dtype=None),
        lambda c: c["obs"].update(dtype="nonsense"),
        lambda c: c["obs"].update(kind="bytes"),
        lambda c: c["obs"].update(kind="pickle"),
        lambda c: c["obs"].update(stack={"axis": 0, "depth": 3}),
        lambda c: c["obs"].update(stack={"axis": 7, "depth": 2}),
        lambda c: c["obs"].update(stack={"axis": "x"}),
        lambda c: c["obs"].pop("dtype"),
        lambda c: c["infos"].update(kind="text", dtype="<U9"),
        lambda c: c.pop("obs"),
        lambda c: c.update({f"x{i}": c["obs"] for i in range(5000)}),
    ],
)
def test_a_schema_that_does_not_describe_the_file_is_refused(change: Callable[[Any], Any]) -> None:
    forger = Forger()
    change(forger.schema["columns"])
    refused(forger)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(group_rows=0),
        lambda s: s.update(group_rows=1 << 40),
        lambda s: s.update(group_rows=None),
        lambda s: s.update(policies={}),
        lambda s: s.update(policies=[]),
        lambda s: s["policies"].update({f"p{i}": s["policies"]["default_policy"] for i in range(5000)}),
        lambda s: s["policies"]["default_policy"].update(columns=[["obs", [], "actions", 4]]),
        lambda s: s["policies"]["default_policy"].update(columns=[["obs", ["a"] * 9, "obs"]]),
        lambda s: s["policies"]["default_policy"].update(columns=[["obs", [-1], "obs"]]),
        lambda s: s["policies"]["default_policy"].update(columns=[["obs", [1 << 70], "obs"]]),
        lambda s: s["policies"]["default_policy"].update(columns=[["obs", [], "obs"], ["obs", [], "obs"]]),
        lambda s: s["policies"]["default_policy"].update(columns=[["obs", [], "nowhere"]]),
        lambda s: s["policies"]["default_policy"].update(columns=[["seq_lens", [], "actions"]]),
        lambda s: s.update(columns=7),
        lambda s: s.update(format=99),
    ],
)
def test_a_schema_of_absurd_structure_is_refused(change: Callable[[Any], Any]) -> None:
    forger = Forger()
    change(forger.schema)
    refused(forger)


@pytest.mark.few(13)
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda f: f.replace("_next", [30 * (k > 0) for k in _next(f)]), "leaves its row group"),
        (lambda f: f.replace("_next", [(2**31 - 1) * (k > 0) for k in _next(f)]), "leaves its row group"),
        (lambda f: f.replace("_next", [-2 * (k > 0) for k in _next(f)]), "leaves its row group"),
        (lambda f: f.replace("_next", [-2] * 30), "_next"),
        (lambda f: f.replace("_next", [0] * 30), "_next"),
        (lambda f: f.replace("_stream", [99] * 30), "no stream"),
        (lambda f: f.replace("_stream", [-1] * 30), "no stream"),
        (lambda f: f.replace("obs", [[1.0, 2.0]] * 30), "lists of 2"),
        (lambda f: f.replace("obs", [[1.0] * 2, [1.0] * 4] * 15), "lists of 2"),
        (lambda f: f.replace("obs", [None] * 30, nullable=True), None),
        (lambda f: f.replace("actions", [None] * 30, nullable=True), None),
        (lambda f: f.replace("actions", ["x"] * 30, pa.string()), "columns"),
        (lambda f: f.replace("infos", ["nonsense"] * 30), "JSON"),
        (lambda f: f.replace("infos", ['{"$array":"<f4","shape":[9],"data":[1]}'] * 30), "JSON"),
        (lambda f: f.replace("infos", ['{"$array":"<U9999999","shape":[1],"data":["a"]}'] * 30), "padding"),
        (lambda f: f.replace("infos", ['{"$array":"<i4","shape":[1],"data":[1e99]}'] * 30), "JSON"),
        (lambda f: f.replace("infos", ["[" * 900 + "]" * 900] * 30), "deep"),
        (lambda f: f.replace("infos", ["[1]"] * 30), "what is left of an info"),
        (lambda f: f.replace("_batch", ["nonsense"] * 30), "damaged"),
        (lambda f: f.replace("_batch", ['{"num_grad_updates": "x"}'] * 30), "damaged"),
        (lambda f: f.replace("_batch", ["[1]"] * 30), "damaged"),
        (lambda f: f.streams(lambda s: s.update(policy=[1] * len(s["policy"]))), "has 1 as policy"),
        (lambda f: f.streams(lambda s: s.update(policy=7)), "not lists"),
        (lambda f: f.streams(lambda s: s.pop("rows")), "unexpected columns"),
        (lambda f: f.streams(lambda s: s["rows"].append(1)), "differ in length"),
    ],
)
def test_rows_that_break_the_rules_are_refused(change: Callable[[Forger], None], match: str | None) -> None:
    forger = Forger()
    change(forger)
    refused(forger, match=match)


def _next(forger: Forger) -> list[int]:
    return forger.table["_next"].to_pylist()  # type: ignore[no-any-return]  # pyarrow ships no types


def test_rows_of_a_policy_that_the_schema_lacks_are_not_dropped_in_silence() -> None:
    rows = {pid: numbered(3, eps_id=[1] * 3) for pid in ("a", "b")}
    forger = Forger(MultiAgentBatch(rows, 3))
    forger.streams(lambda s: s.update(policy=["a", "stranger"]))
    refused(forger, match="policy that the schema does not have")


def test_a_table_of_streams_that_would_inflate_is_refused() -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=True).compress(b" " * (257 << 20))
    forger = Forger()
    forger.footer["rlio.streams"] = base64.b64encode(bomb).decode()
    refused(forger, match="bytes")
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"[]")
    forger.footer["rlio.streams"] = base64.b64encode(unsized).decode()
    refused(forger)


def test_one_text_that_stands_in_every_row_is_measured_before_it_is_spread() -> None:
    """A dictionary of one megabyte, 30 kilobytes on disk, is 64 GB in 65,536 rows."""
    forger = Forger()
    rows, text = 65_536, '"' + "x" * (1 << 20) + '"'
    forger.table = pa.table(
        [
            pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([text]))
            if field.name == "infos"
            else pa.array([_zero(field)] * rows, field.type)
            for field in forger.table.schema
        ],
        schema=pa.schema(
            [
                f.with_type(pa.dictionary(pa.int32(), pa.string())) if f.name == "infos" else f
                for f in forger.table.schema
            ]
        ),
    )
    forger.replace("_new_obs", [[0.0] * 3] * rows)
    forger.sizes, forger.units = [rows], [[rows, rows]]
    forger.options["compression"] = "zstd"
    refused(forger, UnsafeData, "bytes of text")


def _zero(field: pa.Field) -> Any:
    if pa.types.is_list(field.type):
        return [0.0] * 3
    return None if field.nullable else 0


def test_more_rows_than_memory_should_hold_are_refused_from_the_footer() -> None:
    forger = Forger()
    forger.schema["columns"]["obs"].update(shape=[16 << 20], kind="bytes")
    forger.schema["columns"]["_new_obs"].update(shape=[16 << 20], kind="bytes")
    refused(forger, UnsafeData, "a row group of")


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("{text} {number}", Limits(group_bytes=4000)),
        ("", Limits(group_bytes=200_000, inflation=2, free_bytes=2000)),
    ],
)
def test_columns_that_declare_more_bytes_than_the_limits_are_refused_before_a_page_is_decoded(
    text: str, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    forger = Forger()
    texts = [text.format(text="x" * 1000, number=i) for i in range(30)]
    forger.replace("infos", [json.dumps([0] * 300 + [text]) for text in texts])
    forger.options["use_dictionary"] = False
    forger.options["compression"] = "zstd"
    file = forger.open(limits)
    with monkeypatch.context() as patch:
        patch.setattr(shard_file.pq, "ParquetFile", lambda *args, **kwargs: pytest.fail("it was decoded"))
        with pytest.raises(UnsafeData):
            file.read_group(0)
    assert len(file.read_group(0, columns=["actions"]).stream) == file.groups[0].rows


def test_a_column_that_the_shard_lacks_is_missing_by_name() -> None:
    path, data = small_shard()
    name = ShardName.parse(path.rsplit("/", 1)[1])
    assert name is not None
    file = open_bytes(data, size=len(data), footer_crc32=name.footer_crc32)
    with pytest.raises(MissingColumn, match="no column 'rewards'; the shard has actions"):
        file.read_group(0, columns=["rewards"])


def test_decoded_arrays_share_no_memory_with_what_was_read() -> None:
    """Nothing is compressed, so that a decoder could point into the bytes; the caller may write."""
    batch = small_batch()
    batch["pixels"] = np.arange(30 * 600, dtype=np.uint8).reshape(30, 600)
    batch["halves"] = np.arange(60, dtype=np.float16).reshape(30, 2)
    root = store(batch, compression="none")
    (data,) = files(root).values()
    before = bytes(data)
    found = load(root)
    for name in ("obs", "new_obs", "actions", "eps_id", "pixels", "halves"):
        found[name][...] = 0
    found["infos"][0]["n"] = "changed"
    assert next(iter(files(root).values())) == before
    assert_identical(load(root), batch)
    for i, a in enumerate(columns := [v for v in load(root).values() if v.dtype != object]):
        assert not any(np.shares_memory(a, b) for b in columns[i + 1 :])


def test_bytes_between_the_row_groups_and_the_footer_are_refused() -> None:
    """No CRC covers them, and every other one is right."""
    data = small_shard()[1]
    start = len(data) - int.from_bytes(data[-8:-4], "little") - 8
    padded = data[:start] + b"junk" + data[start:]
    with pytest.raises(CorruptData, match="no row group"):
        open_bytes(padded, size=len(padded), footer_crc32=zlib.crc32(data[start:]))


def two_agents() -> MultiAgentBatch:
    """Two policies in turns; only ``a`` can link its new_obs, and both have a row whose one is missing."""
    rng = np.random.default_rng(0)
    obs = rng.random((7, 2))
    valid = np.array([True, True, False, True, True, True])
    t = np.arange(6)
    own = rng.random((6, 2))
    return MultiAgentBatch(
        {
            "a": SampleBatch(obs=obs[:-1], new_obs=obs[1:] * valid[:, None], eps_id=t * 0, t=t,
                             new_obs_valid=valid),
            "b": SampleBatch(obs=rng.random((6, 3)), new_obs=own, eps_id=t * 0, t=t, new_obs_valid=valid),
        },
        6,
    )  # fmt: skip


def test_a_policy_that_cannot_link_keeps_its_new_obs_beside_one_that_can() -> None:
    root = store(two_agents())
    assert_identical(load(root), two_agents())
    ((_, data),) = files(root).items()
    table = pq.read_table(pa.BufferReader(data))
    assert table["_new_obs"].null_count == 5  # Four links of policy a, and what it misses.


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(lambda n: [5 if k == 1 else k for k in n], id="to a row of the other policy"),
        pytest.param(lambda n: [12 if k > 0 else k for k in n], id="out of the row group"),
        pytest.param(lambda n: [0] * len(n), id="stored although it is not"),
        pytest.param(lambda n: [1] * len(n), id="not stored although it is"),
    ],
)
def test_forged_links_between_policies_are_refused(forge: Callable[[list[int]], list[int]]) -> None:
    forger = Forger(two_agents())
    forger.replace("_next", forge(_next(forger)))
    refused(forger, match="_next")


def test_a_footer_longer_than_the_first_read_is_fetched_whole() -> None:
    rows = 20_000
    batch = SampleBatch(obs=np.zeros(rows), eps_id=np.random.default_rng(0).integers(2**62, size=rows))
    root = store(batch)
    (data,) = files(root).values()
    assert int.from_bytes(data[-8:-4], "little") > parquet_metadata.FOOTER_BYTES
    assert_identical(load(root), batch)
    assert sum(1 for _ in open_dataset(root).episode_parts()) == rows


def test_rule_3_6_a_new_obs_that_overlaps_with_its_own_obs_stores_its_newest_frame_alone() -> None:
    frames = np.random.default_rng(0).integers(0, 255, (44, 6, 6), np.uint8)
    stacks = np.stack([np.moveaxis(frames[i : i + 4], 0, -1) for i in range(41)])
    batch = SampleBatch(
        obs=stacks[:-1], new_obs=stacks[1:], terminateds=np.arange(40) % 10 == 9, eps_id=np.arange(40) // 10
    )
    root = store(batch)
    assert_identical(load(root), batch)
    (data,) = files(root).values()
    table = pq.read_table(pa.BufferReader(data))
    stored = {name: 40 - table[name].null_count for name in table.column_names if "obs" in name}
    assert stored == {"obs": 40, "obs#older": 4, "_new_obs": 4, "_new_obs#older": 0}


# ---- how columns lie in the file (docs/format.md, rule 3.3) ----


def test_rule_3_3_encodings_statistics_and_codec_by_column() -> None:
    rows = np.arange(300)
    batch = SampleBatch(
        vector=np.random.default_rng(0).random((300, 3)), number=rows.astype(np.float32), count=rows,
        flag=rows % 2 == 0, small=rows.astype(np.int8), image=np.zeros((300, 5, 5), np.uint8),
        name=np.array(["a", "b", "c"] * 100, object), tokens=object_column([rows[:3], rows[:1]] * 150),
    )  # fmt: skip
    (data,) = files(store(batch)).values()
    group = pq.read_metadata(pa.BufferReader(data)).row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    split = {name for name, column in columns.items() if "BYTE_STREAM_SPLIT" in column.encodings}
    delta = {name for name, column in columns.items() if "DELTA_BINARY_PACKED" in column.encodings}
    dictionary = {name for name, column in columns.items() if column.has_dictionary_page}
    counted = {name for name, column in columns.items() if column.is_stats_set}
    assert split == {"vector.list.element", "number"}
    assert delta == {"count", "small", "_next", "_stream"}
    assert dictionary == {"name", "_batch", "tokens.list.element"}
    assert counted == {"number", "count", "flag", "small"}
    assert {column.compression for column in columns.values()} == {"ZSTD"}


def test_rule_3_3_pages_have_crcs_that_other_engines_check() -> None:
    batch = SampleBatch(obs=np.arange(4000, dtype=np.uint8).reshape(100, 40))
    (data,) = files(store(batch, compression="none")).values()
    at = data.index(batch["obs"].tobytes())
    damaged = data[: at + 9] + bytes([data[at + 9] ^ 1]) + data[at + 10 :]
    assert pq.read_table(pa.BufferReader(damaged)).num_rows == 100
    with pytest.raises(OSError, match=r"(?i)crc"):
        pq.read_table(pa.BufferReader(damaged), page_checksum_verification=True)


# ---- other engines ----


@pytest.fixture
def vectors(tmp_path: Any) -> tuple[list[str], SampleBatch]:
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(501, 4)).astype(np.float32)
    batch = SampleBatch(
        obs=obs[:-1], new_obs=obs[1:], rewards=rng.random(500), actions=rng.integers(0, 3, 500),
        terminateds=np.arange(500) % 50 == 49, eps_id=np.arange(500) // 50,
        name=np.array(["left", "right"] * 250, object),
    )  # fmt: skip
    store(batch, root=str(tmp_path), roll=Roll(max_rows=200, max_seconds=None))
    paths = [str(path) for path in sorted(tmp_path.rglob("*.parquet"))]
    assert len(paths) == 3
    return paths, batch


def test_duckdb_averages_and_filters(vectors: tuple[list[str], SampleBatch]) -> None:
    duckdb = pytest.importorskip("duckdb")
    paths, batch = vectors
    source = f"read_parquet({paths!r})"
    with duckdb.connect() as connection:
        ((mean,),) = connection.sql(f"SELECT avg(rewards) FROM {source}").fetchall()
        assert mean == pytest.approx(batch["rewards"].mean())
        ((count,),) = connection.sql(f"SELECT count(*) FROM {source} WHERE obs[1] > 0").fetchall()
        assert count == int((batch["obs"][:, 0] > 0).sum())
        rows = connection.sql(f"SELECT eps_id, sum(rewards) FROM {source} GROUP BY 1 ORDER BY 1").fetchall()
    assert [total for _, total in rows] == pytest.approx(batch["rewards"].reshape(10, 50).sum(1).tolist())


def test_pandas_and_polars_and_pyarrow_open_the_shards(vectors: tuple[list[str], SampleBatch]) -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    paths, batch = vectors
    frame = pandas.concat([pandas.read_parquet(path) for path in paths])
    assert np.array_equal(np.stack(frame["obs"]), batch["obs"])
    assert frame["name"].tolist() == batch["name"].tolist()
    lazy = polars.read_parquet(paths)
    assert lazy["rewards"].mean() == pytest.approx(batch["rewards"].mean())
    assert len(lazy.filter(polars.col("obs").list.get(0) > 0)) == int((batch["obs"][:, 0] > 0).sum())
    table = pa.concat_tables([pq.read_table(path) for path in paths])
    assert table["terminateds"].to_pylist() == batch["terminateds"].tolist()


@pytest.mark.few(5)
@pytest.mark.parametrize("make", DATA_SETS.values(), ids=DATA_SETS)
def test_other_tools_find_no_new_obs_that_is_null(make: Any) -> None:
    """It was null in 999 of 1,000 rows, and was trained on."""
    for data in files(store(make())).values():
        names = pq.read_schema(pa.BufferReader(data)).names
        assert not [name for name in names if name.startswith("new_obs")]


def test_new_obs_can_be_rebuilt_by_anybody(vectors: tuple[list[str], SampleBatch]) -> None:
    """Ten lines that know the format's page and not this library."""
    paths, batch = vectors
    rebuilt, first_rows = [], []
    for path in paths:
        file = pq.ParquetFile(path)
        for index in range(file.num_row_groups):
            rows = file.read_row_group(index).to_pylist()
            first_rows += [row["_batch"] is not None for row in rows]
            for i, row in enumerate(rows):
                k = row["_next"]
                assert (row["_new_obs"] is not None) == (k == 0)
                rebuilt.append(row["_new_obs"] if k == 0 else rows[i + k]["obs"])
                assert row["_stream"] == rows[i + k]["_stream"] or k <= 0
    assert np.array_equal(np.array(rebuilt, np.float32), batch["new_obs"])
    assert first_rows == [True] + [False] * 499


def test_streams_say_which_episodes_a_shard_has(vectors: tuple[list[str], SampleBatch]) -> None:
    paths, batch = vectors
    metadata = pq.read_metadata(paths[0]).metadata
    packed = base64.b64decode(metadata[b"rlio.streams"])
    streams = json.loads(zstandard.ZstdDecompressor().decompress(packed))
    assert streams["eps_id"] == [0, 1, 2, 3]
    assert streams["rows"] == [50] * 4
    assert streams["end"] == ["terminated"] * 4
    assert streams["reward"] == pytest.approx(batch["rewards"][:200].reshape(4, 50).sum(1).tolist())
    assert open_dataset(paths[0].split("/data/")[0]).snapshot() == {paths[0].split("/")[-2]: 500}


@pytest.mark.further
@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="only Linux lists the threads of a process here"
)
def test_no_thread_of_arrows_reads(tmp_path: Path) -> None:
    """One that drops memory of Python's while the interpreter ends aborts the process: 6 runs in 100 did."""
    rows, path = 50_000, tmp_path / "rows"
    with ParquetWriter(path, spool=None) as writer:
        writer.write(SampleBatch(obs=np.zeros((rows, 3), np.float32), t=np.arange(rows)))
    code = """
        import os, sys, pyarrow, rlio
        pyarrow.allocate_buffer(1 << 20)  # Arrow's allocator has a thread of its own.
        before = os.listdir("/proc/self/task")
        with rlio.read(sys.argv[1], epochs=1) as reader:
            assert sum(map(len, reader)) == 50_000
        assert len(os.listdir("/proc/self/task")) == len(before)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], check=True)
