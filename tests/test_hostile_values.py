"""What a writer accepts comes back equal, whatever it is; the rest is refused as a whole, by row and path."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from gymnasium.spaces import GraphInstance
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_batches import assert_identical, files, fresh_root, load, same_objects

import rlio
from rlio import JsonWriter, MultiAgentBatch, ParquetWriter, Roll, SampleBatch
from rlio.batch.arrays import is_tensor, object_column
from rlio.errors import SchemaError
from rlio.schemas.json_values import check_text, check_value, dump_value, load_value
from rlio.writer import OutputWriter
from rlio.writers.recovery import recover

KINDS: dict[str, Callable[..., OutputWriter]] = {
    "parquet": ParquetWriter,
    "json": JsonWriter,
    "json, compressed": lambda root, **more: JsonWriter(
        root, compression="zstd", compress_columns=["infos", "x"], **more
    ),
}


class Colour(enum.Enum):
    RED = 1


class Gear(enum.IntEnum):
    FIRST = 1


class Mode(enum.StrEnum):
    FAST = "fast"


class Place(tuple[int, int], enum.Enum):
    HOME = (1, 2)


class Text(str):
    __slots__ = ()


class Whole(int):
    __slots__ = ()


class Frozen(dict[str, Any]):
    __hash__ = object.__hash__  # type: ignore[assignment]  # A dict that may be a key.


class Pair(NamedTuple):
    a: int
    b: Any


class Metres(np.ndarray[Any, np.dtype[Any]]):
    """An array with a unit."""


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@dataclasses.dataclass
class Pose:
    x: float = 1.0


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = {"a": value} if number % 2 else [value]
    return value


def endless() -> Any:
    value: dict[str, Any] = {}
    value["again"] = value
    return value


def own_dtypes() -> list[Any]:
    """Arrays and numbers of another library's dtypes, one of which NumPy takes for its own kind "f"."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    names = ("bfloat16", "float8_e5m2", "float8_e4m3fn", "int4")
    found = [np.zeros(2, getattr(ml_dtypes, name)) for name in names]
    return [*found, *(array[0] for array in found)]


RECORDS = np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])


def half(text: str) -> str:
    return text.encode("ascii").decode("unicode_escape")


#: Values of each kind, alone, as keys and in arrays; most cannot be stored.
VALUES: list[Any] = [
    *(None, ..., True, NotImplemented, 0, -1, 2**63 - 1, 2**63, -(2**70), 10**4299, 10**4300, -(10**4300)),
    *(0.0, -0.0, 1e-320, float("nan"), -float("inf"), 1j),
    *("", "é", "nul\0", "$array", "😀", half(r"a\ud800b"), half(r"\udce9"), half(r"\ud83d\ude00")),
    *({half(r"\ud83d\ude00"): 1, "😀": 2}, [half(r"\udce9")]),
    *(b"", b"\0\xff", bytearray(b"ab"), memoryview(b"ab"), Text("a"), Whole(3)),
    *(Colour.RED, Gear.FIRST, Mode.FAST, Place.HOME, {Gear.FIRST: 1}, {Mode.FAST: 1}),
    *(datetime.datetime(2024, 1, 2), datetime.date(2024, 1, 2), datetime.timedelta(1)),
    *(datetime.datetime(2024, 1, 2, 3, 4, 5, 6), datetime.datetime(1, 1, 1, tzinfo=datetime.UTC)),
    *(datetime.datetime(2024, 1, 2, fold=1), pd.Timestamp("2024-01-02"), {datetime.date(2024, 1, 2): 1}),
    *({1}, frozenset("a"), range(3), decimal.Decimal("1.5"), Path("a"), Silent(), len, (n for n in range(2))),
    *(GraphInstance(np.eye(2), None, None), [GraphInstance(np.eye(2), np.zeros((1, 3)), np.array([[0, 1]]))]),
    *(GraphInstance([1], {"a": Gear.FIRST}, None), {GraphInstance(1, 2, 3): 1}),
    *(Pair(1, [2]), Pose(), Pose, ValueError("x"), collections.deque([1]), collections.OrderedDict(a=1, b=2)),
    *(collections.defaultdict(list, a=[1]), collections.Counter("aab"), collections.UserDict(a=1)),
    types.MappingProxyType({"a": 1}),
    # Keys: several NaN are one key when they are read, and a tensor would be an array.
    *({1: 2}, {None: 1}, {True: 1}, {"": 1}, {"a/b": {"~": 1}}, {"$array": 1}, {(1, "a"): 1}, {b"a": 1}),
    *({1.5: 1}, {np.int64(3): 1}, {Pair(1, 2): 1}, {float("nan"): 1}, {float("nan"): 1, float("nan"): 2}),
    *({np.float64("nan"): 1, np.float64("nan"): 2}, {torch.zeros(1): 1}, {Frozen(): 1}, {Text("a"): 1}),
    # Numbers of NumPy; its arrays lose NULs at the end of texts.
    *(np.bool_(True), np.float16(1.5), np.int64(-1), np.uint64(2**64 - 1), np.complex64(1j)),
    *(
        np.longdouble(1) / 3,
        np.str_("é"),
        np.str_("a\0"),
        np.bytes_(b"a"),
        np.bytes_(b"a\0"),
        np.void(b"abc"),
    ),
    *(np.datetime64("NaT"), np.datetime64("2024-01-01T00:00:00.5", "ns"), np.timedelta64(3, "s")),
    # Arrays.
    *(np.array(3), np.array({"a": Gear.FIRST}, object), np.array([1, {2}], object), np.zeros((0, 3), object)),
    *(np.array([np.zeros(2), None, {"a": 1}], object), np.array([[1, "a"], [None, 2.0]], object)),
    *(np.zeros((2**40, 0)), np.zeros((0, 3), "<c8"), np.array([1j, np.nan]), np.array([1, 2], "M8[25s]")),
    *(np.array(["2024-01-01", "NaT"], "M8[ns]"), np.array([-0.0, np.nan, np.inf], np.float16)),
    *(np.array([0.1, 1], np.longdouble) / 3, np.arange(10)[::3], np.arange(3, dtype=">i4")),
    *(np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.frombuffer(b"abcd", np.uint8)),
    *(np.array(["a", "bcd"]), np.array(["ab"], ">U2"), np.array([half(r"\udce9")]), np.array([b"a", b"bcd"])),
    *(np.array([half(r"\ud83d\ude00")]), np.array(["a" * 400_000, *[""] * 20])),  # Mostly padding.
    *(np.zeros(2, [("a", "f4")]), RECORDS, RECORDS[0], np.array([1, 2]).view(Metres)),
    *(np.ma.array([1, 2], mask=[False, True]), np.ma.array([1.0, 2.0], mask=[False, True])),
    *(np.ma.array([1, 2]), np.ma.masked, np.arange(4.0).reshape(2, 2).view(np.matrix)),
    # Tensors; torch keeps a conjugation or a sign as a flag.
    *(torch.arange(3, dtype=torch.int16), torch.tensor(3.5), torch.zeros(2, requires_grad=True)),
    *(
        torch.nn.Parameter(torch.ones(2)),
        torch.zeros(2, 3).shape,
        torch.ones(2, dtype=torch.complex64).conj(),
    ),
    *((torch.ones(2, dtype=torch.complex64) * 1j).conj().imag, torch.zeros(2, dtype=torch.bfloat16)),
    *(torch.zeros(2, 2).to_sparse(), torch.zeros(2, device="meta")),
    *map(nested, (62, 63, 64, 65, 200)),
    endless(),
]

hostile = st.recursive(
    st.integers(0, len(VALUES) - 1).map(lambda number: VALUES[number]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "a/b", "", "$b", "é", half(r"\udce9")]), inner, max_size=3)
        | inner.map(lambda value: object_column([value, 1]))
    ),
    max_leaves=4,
)


def as_stored(value: Any) -> Any:
    """What comes back for ``value``: the type rules of docs/columns.md, and nothing else."""
    if isinstance(value, dict):
        return {as_stored(key): as_stored(item) for key, item in value.items()}
    if isinstance(value, GraphInstance):
        return GraphInstance(*map(as_stored, value))
    if isinstance(value, tuple):
        return tuple(map(as_stored, value))
    if isinstance(value, list):
        return list(map(as_stored, value))
    if isinstance(value, bytearray):
        return bytes(value)
    if is_tensor(value):
        return np.array(value.detach().tolist(), str(value.dtype).removeprefix("torch."))
    if isinstance(value, np.ndarray):
        plain = np.array(value)
        if plain.dtype == object:
            return object_column(map(as_stored, plain.reshape(-1))).reshape(plain.shape)
        return plain
    return value


def equal(found: Any, expected: Any) -> bool:
    """Whether two values agree in types and values; several NaN as keys are no difference."""
    if isinstance(expected, dict) and type(found) is dict:
        pairs = zip(found.items(), expected.items(), strict=False)
        return len(found) == len(expected) and all(equal(a, c) and equal(b, d) for (a, b), (c, d) in pairs)
    if isinstance(expected, list | tuple) and type(found) is type(expected):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(expected, np.ndarray) and expected.dtype == object and found.dtype == object:
        flat = zip(found.reshape(-1), expected.reshape(-1), strict=True)
        return found.shape == expected.shape and all(equal(a, b) for a, b in flat)
    return same_objects(found, expected)


def is_storable(value: Any) -> bool:
    try:
        check_value(value, "infos")
    except SchemaError:
        return False
    return True


@settings(max_examples=100, deadline=None)
@given(value=hostile)
def test_a_value_is_refused_before_or_comes_back_equal(value: Any) -> None:
    if is_storable(value):
        assert equal(load_value(dump_value(value).encode()), as_stored(value))
    else:
        with pytest.raises(SchemaError) as caught:
            dump_value(value, "infos")
        assert str(caught.value.column).startswith("infos")


def test_each_hostile_value_is_refused_before_or_comes_back_equal() -> None:
    refused = 0
    for value in VALUES:
        if is_storable(value):
            assert equal(load_value(dump_value(value)), as_stored(value)), repr(value)
        else:
            refused += 1
            with pytest.raises(SchemaError):
                dump_value(value)
    assert 40 < refused < len(VALUES) - 60


def test_values_of_other_libraries_dtypes_are_refused() -> None:
    for value in own_dtypes():
        with pytest.raises(SchemaError, match=r"cannot be stored.*infos/v"):
            check_value({"v": value}, "infos")


def rows(values: list[Any]) -> SampleBatch:
    return SampleBatch(t=np.arange(len(values)), infos=object_column({"v": value} for value in values))


@pytest.mark.few(1)
@pytest.mark.each_value_once
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recovered", [False, True])
@settings(max_examples=8, deadline=None)
@given(values=st.lists(hostile, min_size=1, max_size=20))
def test_what_a_writer_accepts_comes_back_equal(
    kind: str, recovered: bool, values: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Directly, or out of the log of a writer that died."""
    root = tmp_path_factory.mktemp("hostile") / "root"
    good = [value for value in values if is_storable({"v": value})]
    with KINDS[kind](root, roll=Roll(max_seconds=None)) as writer:
        if len(good) < len(values):
            row = next(n for n, value in enumerate(values) if not is_storable({"v": value}))
            with pytest.raises(SchemaError, match=rf"^row {row}: .*\[column infos/v"):
                writer.write(rows(values))
            assert writer.rows_received == 0
        if good:
            writer.write(rows(good))
        if recovered and good:
            copy = root.with_name("copy")
            shutil.copytree(root, copy, ignore=shutil.ignore_patterns("*.tmp"))
            assert [log.rows for log in recover(copy, all_hosts=True).logs] == [len(good)]
            root = copy
    shutil.rmtree(root / "_wal", ignore_errors=True)
    if good:
        found = load(str(root))
        assert all(
            equal(info, {"v": as_stored(value)}) for info, value in zip(found["infos"], good, strict=True)
        )
        assert rlio.verify(root).ok
    shutil.rmtree(root.parent)


# ---- whole columns ----

COLUMNS: dict[str, Callable[[], Any]] = {
    "masked ints": lambda: np.ma.array([1, 2, 3], mask=[False, True, False]),
    "masked floats": lambda: np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False]),
    "masked without a mask": lambda: np.ma.array([1.0, 2.0, 3.0]),
    "masked within a dict": lambda: {"a": np.ma.array([1, 2, 3], mask=[False, True, False])},
    "a unit": lambda: np.zeros((3, 2)).view(Metres),
    "a matrix": lambda: np.arange(6.0).reshape(3, 2).view(np.matrix),
    "dates": lambda: np.array(["2024-01-01", "NaT", "2025-01-01"], "M8[ns]"),
    "dates of Python": lambda: object_column([datetime.date(2024, 1, 2)] * 3),
    "datetimes": lambda: object_column([datetime.datetime(2024, 1, 2, 3, 4, 5, 6)] * 3),
    "datetimes in UTC": lambda: object_column([datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC)] * 3),
    "datetimes of two kinds": lambda: object_column(
        [datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC), datetime.datetime(2024, 1, 2), None]
    ),
    "datetimes and NaT": lambda: object_column([np.datetime64("NaT"), datetime.datetime(2024, 1, 2), None]),
    "dates with many units": lambda: np.array([1, 2, 3], "M8[1000000s]"),
    "structured": lambda: np.zeros(3, [("a", "f4")]),
    "records": lambda: np.rec.array([(1, 2.0)] * 3, dtype=[("a", "i4"), ("b", "f8")]),
    "bytes without meaning": lambda: np.zeros(3, "V4"),
    "objects of several kinds": lambda: object_column([np.zeros(2), None, {"a": 1}]),
    "objects with a set": lambda: object_column([{}, {1}, {}]),
    "objects in two axes": lambda: np.array([[1, None], [2, {}], [3, "a"]], object),
    "texts with half a pair": lambda: np.array(["a", half(r"\ud800"), "c"]),
    "text objects with half a pair": lambda: object_column(["a", half(r"\udce9"), "c"]),
    "texts of a subclass": lambda: object_column(["a", Text("b"), "c"]),
    "enums": lambda: object_column([Mode.FAST, "b", "c"]),
    "texts with NUL": lambda: np.array(["a\0b", "c", ""]),
    "byte strings": lambda: np.array([b"a\0b", b"\xff", b""]),
    "swapped": lambda: np.arange(3, dtype=">f8"),
    "strided": lambda: np.arange(9.0)[::3],
    "long doubles": lambda: np.array([0.1, 1, 2], np.longdouble) / 3,
    "no bytes": lambda: np.zeros((3, 0, 2)),
    "conjugate tensor": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated tensor": lambda: (torch.ones(3, dtype=torch.complex64) * 1j).conj().imag,
    "bfloat16 tensor": lambda: torch.zeros(3, dtype=torch.bfloat16),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "meta tensor": lambda: torch.zeros(3, device="meta"),
}  # fmt: skip
REFUSED_COLUMNS = {
    *(
        "masked ints",
        "masked floats",
        "masked without a mask",
        "masked within a dict",
        "a unit",
        "structured",
    ),
    *(
        "records",
        "bytes without meaning",
        "objects with a set",
        "objects in two axes",
        "texts with half a pair",
    ),
    *("text objects with half a pair", "texts of a subclass", "enums", "bfloat16 tensor"),
    *("sparse tensor", "meta tensor"),
}


@pytest.mark.few(17)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.each_value_once
def test_a_column_is_refused_as_a_whole_or_comes_back_to_the_bit(name: str, kind: str) -> None:
    ids, column, root = {"t": np.arange(3)}, COLUMNS[name](), fresh_root()
    with KINDS[kind](root) as writer:
        if name in REFUSED_COLUMNS:
            with pytest.raises(SchemaError, match=r"\[column x"):
                writer.write(SampleBatch(x=column, **ids))
            writer.write(SampleBatch(ids))
            assert writer.rows_received == 3
        else:
            writer.write(SampleBatch(x=column, **ids))
    if name not in REFUSED_COLUMNS:
        ids = {"x": as_stored(column) if is_tensor(column) else np.asarray(column), **ids}
    assert_identical(load(root), SampleBatch(ids))


def test_columns_of_other_libraries_dtypes_are_refused() -> None:
    with ParquetWriter(fresh_root()) as writer:
        for value in own_dtypes():
            if isinstance(value, np.ndarray):
                with pytest.raises(SchemaError, match=r"cannot be stored.*\[column x"):
                    writer.write(SampleBatch(x=value))


# ---- a refused batch changes nothing ----

ABROAD = datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=1)))
STAMP = {"camera": {"stamp": ABROAD, "size": (640, 480)}}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("stopped_clock")
def test_one_info_with_a_foreign_time_refuses_its_batch_alone_and_names_row_and_path(
    kind: str, tmp_path: Path
) -> None:
    good, bad, shards = rows([1.0, 2.0]), rows([1.0, STAMP, 3.0]), []
    for refused in (False, True):
        root = fresh_root()
        with KINDS[kind](root, writer_id="w", roll=Roll(max_rows=3, max_seconds=None)) as writer:
            for number in range(5):
                if refused:
                    expected = r"^row 1: .*isoformat.*\[column infos/v/camera/stamp\]"
                    with pytest.raises(SchemaError, match=expected):
                        writer.write(bad)
                writer.write(good)
                assert writer.rows_received == 2 * number + 2
        shards.append([*files(root).values()])
        assert len(load(root)) == 10
    assert shards[0] == shards[1], "something of a refused batch is in the writer's state"


@pytest.mark.parametrize("kind", KINDS)
def test_the_row_of_several_policies_is_named_with_its_policy(kind: str) -> None:
    ids = {"eps_id": np.zeros(2, int)}
    with KINDS[kind](fresh_root()) as writer, pytest.raises(SchemaError, match=r"^row 1 of policy 'b': "):
        writer.write(
            MultiAgentBatch(
                {"a": SampleBatch(rows([1, 2]), **ids), "b": SampleBatch(rows([1, {2}]), **ids)}, 2
            )
        )


def test_the_row_of_a_json_line_that_is_cut_is_counted_in_the_batch() -> None:
    root, values = fresh_root(), [*range(25), {1}]
    with JsonWriter(root, roll=Roll(max_rows=10)) as writer, pytest.raises(SchemaError, match=r"^row 25: "):
        writer.write(rows(values))
    assert files(root) == {}


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        (ABROAD, "isoformat.*UTC"), (datetime.time(3), "isoformat"),
        (Gear.FIRST, "value.value"), ({1}, "list"),
        (np.ma.array([1], mask=[True]), "filled"), (1j, "complex128"), (Pose(), "asdict"), (Text("a"), "str"),
        (types.MappingProxyType({}), "dict"), (Path("a"), "str"),
        (torch.zeros(1, dtype=torch.bfloat16), "float"), (collections.deque(), "list"),
        (pd.Series([1]), "numpy.asarray"), (object(), "NumPy arrays"), (np.zeros(1, [("a", "f4")]), "field"),
    ],
)  # fmt: skip
def test_the_error_says_what_to_store_instead(value: Any, instead: str) -> None:
    with pytest.raises(SchemaError, match=rf"store .*{instead}.*\[column infos/a~1b/1/c\]"):
        check_value({"a/b": [1, {"c": value}]}, "infos")


def test_a_text_is_checked_like_a_column_of_texts_is() -> None:
    for text in ("", "a", "é", "😀", "nul\0"):
        check_text(text, "obs")
    for text in (half(r"\ud800"), "a" + half(r"\udce9")):
        check_value(text, "infos")
        with pytest.raises(SchemaError, match=r"half of a surrogate pair.*\[column obs\]"):
            check_text(text, "obs")
