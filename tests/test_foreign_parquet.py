"""Parquet that others wrote: rows as steps or as batches, extension types that cannot act, and limits."""

import base64
import datetime
import functools
import io
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import gymnasium as gym
import lz4.frame
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from further import further
from hypothesis import given, settings
from hypothesis import strategies as st

import rlio
from rlio import Limits
from rlio.batch import MultiAgentBatch, SampleBatch, concat_samples
from rlio.errors import (
    CorruptData,
    DataNotFound,
    MissingColumn,
    OptionError,
    SchemaError,
    UnknownLayout,
    UnsafeData,
)
from rlio.formats.files.parquet_footer import Extension, open_parquet
from rlio.readers.foreign_parquet import ForeignParquetReader
from rlio.testing.readers import ReaderTests, assert_resumes
from rlio.writers.parquet_writer import ParquetWriter


def pack(value: Any) -> str:
    return base64.b64encode(lz4.frame.compress(pickle.dumps(value, 5))).decode("ascii")


def save(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def read(path: Any, **options: Any) -> SampleBatch:
    with ForeignParquetReader(path, epochs=1, **options) as reader:
        batch = concat_samples(list(reader))
    assert isinstance(batch, SampleBatch)
    return batch


def steps(first: int, rows: int) -> dict[str, Any]:
    numbers = np.arange(first, first + rows)
    return {
        "obs": pa.array(np.stack([numbers, -numbers], 1).tolist(), pa.list_(pa.float32())),
        "actions": numbers % 3,
        "rewards": numbers / 2,
        "dones": numbers % 5 == 4,
        "t": numbers,
    }


# ---- columns ----


def test_numbers_lists_and_text_become_columns_with_their_dtypes(tmp_path: Path) -> None:
    cube = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    columns = {
        "u1": pa.array([1, 2], pa.uint8()),
        "i2": pa.array([1, -2], pa.int16()),
        "f2": pa.array(np.float16([0.5, 1.5])),
        "f4": pa.array([0.5, None], pa.float32()),
        "flag": pa.array([True, False]),
        "obs": pa.array(np.arange(4.0).reshape(2, 2).tolist(), pa.list_(pa.float32(), 2)),
        "cube": pa.array(cube.tolist(), pa.list_(pa.large_list(pa.uint8()))),
        "text": pa.array(["left", None]),
        "words": pa.array([["a"], ["b", "c"]]),
        "infos": pa.array([{"a": 1}, None]),
        "eps_id": pa.array(["69a7", "69a7"]),
        "rewards": pa.array([1, 2], pa.int64()),
        "when": pa.array([datetime.datetime(2024, 1, 1), None], pa.timestamp("ms")),
        "nothing": pa.nulls(2),
        "colour": pa.array(["x", "y"]).dictionary_encode(),
        "blob": pa.array([b"ab", b"c"]),
        "empty": pa.array([[], []], pa.list_(pa.float32())),
    }
    batch = read(save(tmp_path / "a.parquet", columns))
    assert {name: (str(batch[name].dtype), batch[name].shape[1:]) for name in batch} == {
        "u1": ("uint8", ()),
        "i2": ("int16", ()),
        "f2": ("float16", ()),
        "f4": ("float32", ()),
        "flag": ("bool", ()),
        "obs": ("float32", (2,)),
        "cube": ("uint8", (3, 4)),
        "text": ("object", ()),
        "words": ("object", ()),
        "infos": ("object", ()),
        "eps_id": ("object", ()),
        "rewards": ("float64", ()),
        "when": ("datetime64[ms]", ()),
        "colour": ("object", ()),
        "blob": ("object", ()),
        "empty": ("float32", (0,)),
    }
    np.testing.assert_array_equal(batch["cube"], cube)
    np.testing.assert_array_equal(batch["f4"], np.float32([0.5, np.nan]))
    assert batch["text"].tolist() == ["left", None]
    assert batch["infos"].tolist() == [{"a": 1}, None]
    assert batch["words"].tolist() == [["a"], ["b", "c"]]
    assert all(batch[name].flags.writeable for name in batch)


def test_structs_become_nested_columns(tmp_path: Path) -> None:
    rows = [{"image": [[1, 2]], "speed": 0.5}, {"image": [[3, 4]], "speed": 1.5}]
    batch = read(save(tmp_path / "a.parquet", {"obs": rows, "rewards": [1.0, 2.0]}))
    assert batch["obs"]["image"].tolist() == [[[1, 2]], [[3, 4]]]
    assert batch["obs"]["speed"].tolist() == [0.5, 1.5]


def test_data_frames_of_pandas_are_read(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"obs": [[0.0, 1.0], [2.0, 3.0]], "rewards": [1.0, np.nan], "terminateds": [False, True]}
    )
    frame.to_parquet(tmp_path / "a.parquet")
    batch = read(tmp_path)
    assert batch["obs"].shape == (2, 2)
    np.testing.assert_array_equal(batch["rewards"], [1.0, np.nan])
    assert list(batch) == ["obs", "rewards", "terminateds"]


def test_spaces_give_structure_and_dtypes(tmp_path: Path) -> None:
    path = save(tmp_path / "a.parquet", {"obs": [[0.0] * 4] * 3, "actions": [0, 1, 0], "dones": [0, 0, 1]})
    spaces = (gym.spaces.Box(-1, 1, (2, 2), np.float32), gym.spaces.Discrete(2))
    batch = read(path, spaces=spaces)
    assert batch["obs"].shape == (3, 2, 2)
    assert batch["obs"].dtype == np.float32
    assert batch["terminateds"].tolist() == [False, False, True]


def test_rows_that_rllibs_recorder_wrote_twice_are_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def record(name: str, ids: list[str]) -> None:
        rows = range(len(ids))
        save(
            tmp_path / name,
            {
                "eps_id": ids, "module_id": ["default_module"] * len(ids), "obs": [[0.5]] * len(ids),
                "actions": list(rows), "rewards": [1.0] * len(ids),
                "terminateds": [r % 2 == 1 for r in rows], "truncateds": [False for _ in rows],
            },
        )  # fmt: skip

    record("a.parquet", ["x", "x", "y", "y"])
    assert len(read(tmp_path)) == 4
    assert not caplog.records
    record("b.parquet", ["x", "x", "y", "y", "z", "z"])
    for options in ({}, {"shuffle": True, "seed": 3}):
        caplog.clear()
        assert len(read(tmp_path, **options)) == 10
        assert [each.levelname for each in caplog.records] == ["WARNING"]
        first, second = caplog.records[0].args[1], caplog.records[0].args[3]  # type: ignore[index]
        assert {str(first)[-9:], str(second)[-9:]} == {"a.parquet", "b.parquet"}


def test_packed_text_of_one_row_a_step_is_unpacked(tmp_path: Path) -> None:
    """As RLlib's new recordings are."""
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    columns = {
        "eps_id": ["69a706a9519d4761863f41192f572563"] * 4,
        "agent_id": pa.nulls(4),
        "module_id": pa.nulls(4),
        "obs": [pack(row) for row in rows],
        "new_obs": [pack(row + 1) for row in rows],
        "actions": [0, 1, 1, 0],
        "rewards": [1.0] * 4,
        "terminateds": [False] * 4,
        "truncateds": [False, False, False, True],
        "weights_seq_no": [3] * 4,
    }
    batch = read(save(tmp_path / "a.parquet", columns, row_group_size=3))
    np.testing.assert_array_equal(batch["obs"], rows)
    assert batch["obs"].dtype == batch["new_obs"].dtype == np.float32
    assert batch["actions"].dtype == np.int64
    assert "agent_id" not in batch


def test_rows_that_are_batches_are_records(tmp_path: Path) -> None:
    """As RLlib's dataset writer left them."""
    records = [
        {
            "type": "SampleBatch",
            "obs": pack(np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)),
            "actions": list(range(rows)),
            "terminateds": [False] * rows,
            "infos": [{"a": 1}] * rows,
        }
        for rows in (3, 1, 4, 2)
    ]
    pq.write_table(pa.Table.from_pylist(records[:3]), tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(pa.Table.from_pylist([{"value": records[3]}]).select(["value"]), tmp_path / "b.parquet")
    with ForeignParquetReader(tmp_path, epochs=1) as reader:
        assert [len(batch) for batch in reader] == [3, 1, 4, 2]
    with ForeignParquetReader(tmp_path, epochs=1, batch_size=4) as reader:
        assert [len(batch) for batch in reader] == [4, 4, 2]
    with ForeignParquetReader(tmp_path, epochs=1, shuffle=True, seed=0) as reader:
        batches = list(reader)
        assert sorted(len(batch) for batch in batches) == [1, 2, 3, 4]
        assert batches[0]["obs"].dtype == np.float32
    make = functools.partial(ForeignParquetReader, tmp_path, shuffle=True, seed=1)
    assert_resumes(make, n=3)


def test_rows_that_are_multi_agent_batches_are_records(tmp_path: Path) -> None:
    columns = {"obs": pack(np.zeros((2, 3))), "actions": [0, 1]}
    rows = [
        {"type": "MultiAgentBatch", "count": 2, "policy_batches": {"p0": columns, "p1": columns}},
        {"type": "MultiAgentBatch", "count": 2, "policy_batches": {"p0": columns, "p1": None}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with ForeignParquetReader(tmp_path, epochs=1) as reader:
        one, two = reader
    assert isinstance(one, MultiAgentBatch)
    assert set(one.policy_batches) == {"p0", "p1"}
    assert set(two.policy_batches) == {"p0"}


# ---- extension types ----


class Tensor(pa.ExtensionType):
    """A tensor type like Ray's; reading it as more than storage would fail the tests."""

    def __init__(self, shape: tuple[int, ...], name: str, storage: Any) -> None:
        self.shape = shape
        super().__init__(storage, name)

    def __arrow_ext_serialize__(self) -> bytes:
        return str(list(self.shape)).encode()

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, serialized: bytes) -> Any:
        raise AssertionError("the hook of an extension type ran")


@pytest.fixture
def nobody_registered() -> Iterator[None]:
    """Tests of Ray Data, which registers its tensor types, may have run in this process before."""
    known: list[pa.ExtensionType] = pa.lib._python_extension_types_registry
    found = [kind for kind in known if kind.extension_name.startswith("ray.")]
    known[:] = [kind for kind in known if kind not in found]  # pyarrow does not: it only forgets the types.
    for kind in found:
        pa.unregister_extension_type(kind.extension_name)
    yield
    for kind in found:
        pa.register_extension_type(kind)


def tensor_file(path: Path, name: str, storage: Any) -> np.ndarray:
    images = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    values = pa.array([image.ravel().tolist() for image in images], storage)
    column = pa.ExtensionArray.from_storage(Tensor((3, 4), name, storage), values)
    pq.write_table(pa.table({"obs": column, "rewards": [1.0, 2.0]}), path)
    return images


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        ("ray.data.arrow_tensor", pa.list_(pa.float32())),
        ("ray.data.arrow_tensor_v2", pa.large_list(pa.float32())),
    ],
)
@pytest.mark.usefixtures("nobody_registered")
def test_an_unregistered_tensor_type_reads_as_its_storage_in_its_shape(
    name: str, storage: Any, tmp_path: Path
) -> None:
    images = tensor_file(tmp_path / "a.parquet", name, storage)
    np.testing.assert_array_equal(read(tmp_path)["obs"], images)
    tensor_file(tmp_path / "a.parquet", "somebody.elses", storage)
    np.testing.assert_array_equal(read(tmp_path)["obs"], images.reshape(2, 12))


def test_arrows_own_tensor_type_reads_in_its_shape(tmp_path: Path) -> None:
    images = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    pq.write_table(pa.table({"obs": column, "rewards": [1.0, 2.0]}), tmp_path / "a.parquet")
    np.testing.assert_array_equal(read(tmp_path)["obs"], images)


def test_a_registered_extension_type_is_refused_before_its_code_runs(tmp_path: Path) -> None:
    tensor_file(tmp_path / "a.parquet", "ray.data.arrow_tensor", pa.list_(pa.float32()))
    script = f"""
        import pyarrow as pa, pyarrow.parquet as pq
        calls = []
        class Hook(pa.ExtensionType):
            def __init__(self):
                super().__init__(pa.list_(pa.float32()), "ray.data.arrow_tensor")
            def __arrow_ext_serialize__(self):
                return b"[3, 4]"
            @classmethod
            def __arrow_ext_deserialize__(cls, storage, serialized):
                calls.append(serialized)
                return cls()
        pa.register_extension_type(Hook())
        path = {str(tmp_path / "a.parquet")!r}
        pq.read_metadata(path), pq.ParquetFile(path).close()
        assert calls, "the hook does not work, so that not seeing it proves nothing"
        del calls[:]

        from rlio.errors import UnsafeData
        from rlio.readers.foreign_parquet import ForeignParquetReader
        try:
            ForeignParquetReader(path)
        except UnsafeData as error:
            assert "ray.data.arrow_tensor" in str(error) and "a.parquet" in str(error), error
            assert error.column == "obs", error
        else:
            raise AssertionError("not refused")
        with ForeignParquetReader(path, extension_types="storage", epochs=1) as reader:
            (batch,) = reader
            assert batch["obs"].shape == (2, 3, 4)
        assert not calls, calls
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=240)


def test_extension_types_are_found_at_any_depth() -> None:
    inner = Tensor((2,), "inner", pa.list_(pa.int8()))
    values = pa.ExtensionArray.from_storage(inner, pa.array([[1, 2]], pa.list_(pa.int8())))
    nested = pa.StructArray.from_arrays([values, pa.array([1])], ["a", "b"])
    stream = io.BytesIO()
    pq.write_table(pa.table({"obs": nested, "x": [1]}), stream)
    with open_parquet(stream) as file:
        assert file.extensions == {"obs.a": Extension("inner", b"[2]")}


@pytest.mark.skipif(not hasattr(pa, "uuid"), reason="this pyarrow has no type of its own for UUIDs")
def test_parquets_own_logical_types_do_not_become_extension_types(tmp_path: Path) -> None:
    """Some of those, too, are types that a library can register code for."""
    values = pa.array([b"0123456789abcdef", b"fedcba9876543210"], pa.uuid())
    batch = read(save(tmp_path / "a.parquet", {"id": values, "rewards": [1.0, 2.0]}))
    assert batch["id"].tolist() == [b"0123456789abcdef", b"fedcba9876543210"]


@pytest.mark.usefixtures("nobody_registered")
def test_a_tensor_whose_shape_does_not_fit_its_rows_is_refused(tmp_path: Path) -> None:
    storage = pa.list_(pa.float32())
    column = pa.ExtensionArray.from_storage(
        Tensor((3, 5), "ray.data.arrow_tensor", storage), pa.array([[0.0] * 12] * 2, storage)
    )
    pq.write_table(pa.table({"obs": column}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match=r"shape \[3, 5\].*a\.parquet, record 0, column obs"):
        read(tmp_path)


def test_an_unknown_way_with_extension_types_is_refused() -> None:
    with pytest.raises(OptionError, match="extension_types"):
        ForeignParquetReader("a.parquet", extension_types="load")  # type: ignore[arg-type]


# ---- order ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "1_2.parquet", steps(0, 30), row_group_size=8)
    save(tmp_path / "1_10.parquet", steps(30, 25), row_group_size=10)
    return tmp_path


def test_rows_are_served_in_the_order_in_which_they_were_written(folder: Path) -> None:
    with ForeignParquetReader(folder, epochs=1, batch_size=8) as reader:
        batches = list(reader)
    assert [len(batch) for batch in batches] == [8, 8, 8, 8, 8, 8, 7]
    assert np.concatenate([batch["t"] for batch in batches]).tolist() == list(range(55))


@pytest.mark.few(2)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.each_value_once
def test_ranks_get_each_row_once(world: int, shuffle: bool, folder: Path) -> None:
    found: list[int] = []
    for rank in range(world):
        with ForeignParquetReader(folder, epochs=1, shard=(rank, world), shuffle=shuffle, seed=1) as reader:
            found += [int(t) for batch in reader for t in batch["t"]]
    assert sorted(found) == list(range(55))


def test_shuffled_epochs_are_different_permutations_of_the_rows(folder: Path) -> None:
    with ForeignParquetReader(folder, epochs=2, shuffle=True, seed=1, batch_size=11) as reader:
        batches = [batch["t"] for batch in reader]
    first, second = np.concatenate(batches[:5]), np.concatenate(batches[5:])
    assert sorted(first) == sorted(second) == list(range(55))
    assert first.tolist() != second.tolist()
    assert len(set(batches[0] // 8)) > 3, "rows of one batch come from several row groups"


@pytest.mark.parametrize(
    ("n", "shuffle", "shard"),
    [
        (7, True, (0, 1)),
        *further((None, False, (0, 1)), (40, False, (2, 3)), (7, False, (0, 1)), (None, True, (2, 3))),
    ],
)
def test_it_resumes_across_epochs(n: int | None, shuffle: bool, shard: tuple[int, int], folder: Path) -> None:
    make = functools.partial(ForeignParquetReader, folder, shuffle=shuffle, seed=3, shard=shard)
    assert_resumes(make, n=n, batches=10)


class ForeignParquetSuite(ReaderTests):
    options: ClassVar[dict[str, Any]] = {"epochs": 1}

    @pytest.fixture(autouse=True)
    def _files(self, folder: Path) -> None:
        self.folder = folder

    def make_reader(self) -> ForeignParquetReader:
        return ForeignParquetReader(self.folder, **self.options)

    def expected_rows(self) -> SampleBatch:
        columns = steps(0, 55)
        flags = columns.pop("dones")
        return SampleBatch(columns | {"obs": np.float32(columns["obs"].to_pylist()), "terminateds": flags})


@pytest.mark.further
class TestInOrder(ForeignParquetSuite):
    pass


@pytest.mark.further  # The engine shuffles any source: test_dataset_reader, test_every_option.
class TestShuffled(ForeignParquetSuite):
    ordered = False
    options: ClassVar[dict[str, Any]] = {"epochs": 1, "shuffle": True, "seed": 1, "batch_size": 10}


def test_columns_chooses_what_is_read(folder: Path) -> None:
    assert set(read(folder, columns=["t", "terminateds"])) == {"t", "terminateds"}
    with pytest.raises(MissingColumn, match=r"1_2\.parquet and 1 more, column advantages"):
        ForeignParquetReader(folder, columns=["advantages"])


def test_files_on_other_filesystems_are_read(folder: Path) -> None:
    for path in folder.iterdir():
        fsspec.filesystem("memory").pipe_file(f"/foreign/{path.name}", path.read_bytes())
    assert read("memory://foreign/*.parquet").equals(read(folder))


def test_a_large_row_group_is_read_in_parts_and_each_page_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlio.formats.tables.parquet_source._GROUP_BYTES", 1)
    monkeypatch.setattr("rlio.formats.files.parquet_files._BATCH_ROWS", 40)
    path = save(tmp_path / "a.parquet", steps(0, 300), row_group_size=200)
    begun: list[int] = []
    real = pq.ParquetFile.iter_batches

    def counted(self: Any, size: int, groups: list[int], *args: Any) -> Any:
        begun.append(groups[0])
        return real(self, size, groups, *args)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    with ForeignParquetReader(path, epochs=1, batch_size=37) as reader:
        assert [len(rows) for rows in [reader._source.rows]] == [6]
        begun.clear()
        assert np.concatenate([batch["t"] for batch in reader]).tolist() == list(range(300))
    assert begun == [0, 1]
    for options in ({"cache": "none"}, {"cache": "memory"}):
        with ForeignParquetReader(path, epochs=1, shuffle=True, seed=0, **options) as reader:
            assert sorted(np.concatenate([batch["t"] for batch in reader]).tolist()) == list(range(300))


# ---- bad files ----


BAD_COLUMNS = {
    "unequal within lists": (pa.array([[[1.0], [1.0, 2.0]], [[1.0]]]), "different lengths"),
    "null list": (pa.array([[1.0], None]), "null"),
    "null integer": (pa.array([1, None], pa.int64()), "null"),
    "null flag": (pa.array([True, None]), "null"),
    "null struct": (pa.array([{"a": 1}, None]), "null"),
    "decimal": (pa.array([1, 2], pa.decimal128(10, 2)), "decimal"),
    "packed": (pa.array(["BCJNGGhA!!", "BCJNGGhA!!"]), "base64"),
    "packed unlike": (pa.array([pack(np.zeros(2)), pack(np.zeros(3))]), "different"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [8, 300])
def test_lists_of_different_lengths_are_rows_of_a_ragged_column(rows: int, tmp_path: Path) -> None:
    """Also if the first file, or its first rows, have lists of one length."""
    lists = [[n] * (2 if n < 150 else n % 4) for n in range(rows)]
    boxes = [[[n, 0.5]] * (n % 3) for n in range(rows)]
    columns = {
        "tokens": pa.array(lists, pa.list_(pa.int32())),
        "boxes": pa.array(boxes, pa.list_(pa.list_(pa.float32()))),
        "rewards": np.arange(rows, dtype=np.float32),
    }
    table = pa.table(columns)
    pq.write_table(table[: rows // 2], tmp_path / "a.parquet", row_group_size=50)
    pq.write_table(table[rows // 2 :], tmp_path / "b.parquet")
    for options in ({}, {"cache": "memory", "shuffle": True, "seed": 0}, {"batch_size": 7}):
        with ForeignParquetReader(tmp_path, epochs=1, **options) as reader:
            found = rlio.concat_samples(list(reader))
        found = found[np.argsort(found["rewards"])]
        assert [np.asarray(row).tolist() for row in found["tokens"]] == lists
        assert {row.dtype.str for row in found["tokens"]} == {"<i4"}
        assert [row.tolist() for row in found["boxes"]] == boxes
        assert {row.shape[1:] for row in found["boxes"]} == {(2,)}
        if rows == 300:
            assert rlio.Ragged.of(found["tokens"]).lengths.tolist() == list(map(len, lists))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", BAD_COLUMNS)
def test_a_column_that_is_no_column_names_file_group_and_column(name: str, tmp_path: Path) -> None:
    values, match = BAD_COLUMNS[name]
    save(tmp_path / "a.parquet", {"x": values, "rewards": [1.0, 2.0]})
    place = rf"{match}.*a\.parquet, record 0, column x"
    with pytest.raises((SchemaError, CorruptData), match=place):
        ForeignParquetReader(tmp_path)
    assert read(tmp_path, columns=["rewards"])["rewards"].tolist() == [1.0, 2.0]


def test_a_row_group_unlike_the_first_is_named_and_the_rest_is_served(tmp_path: Path) -> None:
    save(tmp_path / "1.parquet", steps(0, 6))
    save(tmp_path / "2.parquet", steps(6, 4) | {"obs": [[1.0]] * 4})
    save(tmp_path / "3.parquet", {name: v for name, v in steps(10, 4).items() if name != "actions"})
    save(tmp_path / "4.parquet", steps(14, 3))
    with pytest.raises(SchemaError) as caught:
        ForeignParquetReader(tmp_path)
    assert (caught.value.uri, caught.value.column) == (str(tmp_path / "3.parquet"), "actions")
    with ForeignParquetReader([tmp_path / f"{number}.parquet" for number in (1, 2, 4)]) as reader:
        reader.sample(6)
        with pytest.raises(SchemaError, match=r"shape \(1,\).*2\.parquet, record 0, column obs"):
            reader.sample(4)
    for shuffle in (False, True):
        with ForeignParquetReader(tmp_path, on_error="skip", epochs=2, shuffle=shuffle, seed=0) as reader:
            found = sorted(int(t) for batch in reader for t in batch["t"])
            assert found == sorted([*range(6), *range(14, 17)] * 2)
            assert reader.skipped == 2
            assert any("actions" in error.message for error in reader.errors)


def test_files_that_only_their_endings_make_known_are_opened_again(tmp_path: Path) -> None:
    """Exports, statistics, tasks and conversions open a data set's files again."""
    for number in range(2):
        steps = pa.table({"eps_id": [number] * 3, "t": [0, 1, 2], "rewards": [1.0, 2.0, 3.0]})
        pq.write_table(steps, tmp_path / f"{number}.parquet")
    data = pickle.loads(pickle.dumps(rlio.open_dataset(tmp_path)))
    assert data.to_arrow()["eps_id"].to_pylist() == [0, 0, 0, 1, 1, 1]
    assert data.stats()["rewards"].mean == 2
    assert data.returns().tolist() == [6, 6]
    with rlio.read(data, epochs=1) as reader:
        assert sum(map(len, reader)) == 6


def test_steps_and_batches_in_one_folder_are_an_error(tmp_path: Path) -> None:
    save(tmp_path / "a.parquet", steps(0, 4))
    save(tmp_path / "b.parquet", {"type": ["SampleBatch"], "rewards": [[1.0]], "obs": [[[1.0]]]})
    with pytest.raises(SchemaError, match=r"two readers.*b\.parquet"):
        ForeignParquetReader(tmp_path)


@pytest.mark.parametrize(
    "data",
    [b"", b"PAR1", b"not parquet, but long enough", b"PAR1" + b"\xff\xff\xff\x7fPAR1", b"x" * 50 + b"PARE"],
)
def test_bytes_that_are_no_parquet_are_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(data)
    save(tmp_path / "b.parquet", steps(0, 4))
    with pytest.raises(CorruptData, match=r"a\.parquet"):
        ForeignParquetReader(tmp_path)
    with ForeignParquetReader(tmp_path, on_error="skip", epochs=1) as reader:
        assert sum(map(len, reader)) == 4
        assert reader.skipped == 1


def test_a_file_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    data = save(tmp_path / "a.parquet", steps(0, 40), row_group_size=10).read_bytes()
    for length in range(0, len(data), max(1, len(data) // 60)):
        (tmp_path / "a.parquet").write_bytes(data[:length])
        with pytest.raises(CorruptData):
            ForeignParquetReader(tmp_path / "a.parquet")


@pytest.mark.further
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flipped_bytes_outside_of_the_footer_raise_the_typed_error_or_change_values(
    data: st.DataObject,
) -> None:
    stream = io.BytesIO()
    pq.write_table(pa.table(steps(0, 20)), stream, row_group_size=10, write_page_checksum=True)
    raw = bytearray(stream.getvalue())
    end = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
    raw[data.draw(st.integers(4, end - 1))] ^= data.draw(st.integers(1, 255))
    fsspec.filesystem("memory").pipe_file("/flipped/a.parquet", bytes(raw))
    with ForeignParquetReader("memory://flipped/a.parquet", on_error="skip", epochs=1) as reader:
        assert sum(map(len, reader)) == 20 - 10 * reader.skipped


@pytest.mark.further
def test_text_that_multiplies_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    """A dictionary of one long text, and a number a row: some kilobytes that spell out gigabytes."""
    rows = 100_000
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * 1_000_000]))
    table = pa.table({"rewards": np.zeros(rows), "text": text})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 20
    few = Limits(group_bytes=128 << 20)
    for options in ({}, {"cache": "memory", "shuffle": True, "seed": 0}):
        with pytest.raises(UnsafeData, match=r"a row group|bytes decoded together"):
            read(tmp_path, limits=few, **options)
    with ForeignParquetReader(tmp_path, columns=["rewards"], epochs=1) as reader:
        assert sum(map(len, reader)) == rows


def test_a_row_group_over_the_limit_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.parquet", {"obs": [[0.0] * 1000] * 100})
    with pytest.raises(UnsafeData, match="group_bytes"):
        read(tmp_path, limits=Limits(group_bytes=200_000))
    with pytest.raises(UnsafeData, match="100 rows"):
        read(tmp_path, limits=Limits(group_rows=99))


@pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.list_(pa.string())])
def test_columns_that_declare_more_bytes_than_the_limits_are_refused_before_a_page_is_decoded(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [[str(i) if kind.value_type == pa.string() else i for i in range(1000)]] * 100
    save(tmp_path / "a.parquet", {"obs": pa.array(values, kind)}, use_dictionary=False)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *args, **kwargs: pytest.fail("it was decoded"))
    with pytest.raises(UnsafeData):
        read(tmp_path, limits=Limits(group_bytes=200_000))


def test_two_columns_of_one_name_are_an_error(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match=r"one name.*a\.parquet"):
        ForeignParquetReader(tmp_path)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_shards_of_rlio_are_no_foreign_files_and_say_what_reads_them(tmp_path: Path, on_error: Any) -> None:
    """Their links and streams came out as columns, and new_obs as nulls."""
    with ParquetWriter(tmp_path) as writer:
        writer.write(SampleBatch(obs=[0.5, 1.5], rewards=[1.0, 2.0]))
    with pytest.raises(OptionError, match=r"DatasetReader.*\.parquet"):
        ForeignParquetReader(str(tmp_path / "data/*/*.parquet"), on_error=on_error)
    (shard,) = tmp_path.glob("data/*/*.parquet")
    derived = pq.read_table(shard).drop_columns(["_next", "_stream", "_batch"])
    assert b"rlio.format" in (derived.schema.metadata or {})
    pq.write_table(derived, tmp_path / "derived.parquet")
    assert read(tmp_path / "derived.parquet")["rewards"].tolist() == [1.0, 2.0]


def test_files_without_rows_raise(tmp_path: Path) -> None:
    save(tmp_path / "a.parquet", {"rewards": pa.array([], pa.float64())})
    with pytest.raises(DataNotFound, match="no row"):
        ForeignParquetReader(tmp_path)
    with pytest.raises(DataNotFound):
        ForeignParquetReader(tmp_path / "*.pq")


def test_episodes_in_msgpack_say_what_to_do(tmp_path: Path) -> None:
    save(tmp_path / "a.parquet", {"item": [b"\x80"]})
    with pytest.raises(UnknownLayout, match=r"rlio\.read"):
        ForeignParquetReader(tmp_path)


def test_closing_closes_the_files(folder: Path) -> None:
    reader = ForeignParquetReader(folder)
    reader.sample()
    parquet = reader._source._row_groups._parquet
    files = list(parquet._open)
    assert files
    reader.close()
    assert all(file.arrow.closed for file in files)
    assert not list(parquet._open)


def test_large_row_groups_of_small_pages_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow before 19 cannot read them with a buffer: it raised, or crashed."""
    monkeypatch.setattr("rlio.formats.files.parquet_footer._LARGE_GROUP", 1000)
    t = np.arange(4000)
    wide = {f"x{part}": np.random.default_rng(part).random(4000) for part in range(6)}
    table = pa.table(
        {"obs": t, "actions": t, "eps_id": t * 0, "t": t, "rewards": t, "terminateds": t < 0, **wide}
    )
    pages = {"data_page_size": 2048, "write_batch_size": 50, "use_dictionary": False}
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4000, compression="none", **pages)
    with rlio.read(tmp_path / "a.parquet", epochs=1, shuffle=False, batch_size=1000) as reader:
        rows = rlio.concat_samples(list(reader))
    assert rows["t"].tolist() == t.tolist()
    for name, values in wide.items():
        assert np.array_equal(rows[name], values)
