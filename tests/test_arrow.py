"""Columns between NumPy and Arrow: the same bits back, present in all rows or in some."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from stored_batches import assert_same_bits

from rlio.errors import CorruptData
from rlio.schemas.arrow import arrow_type, expanded_bytes, from_arrow, to_arrow
from rlio.schemas.column import ColumnSpec
from rlio.schemas.number_arrays import with_nat

DTYPES = ["|b1", "|u1", "<i2", ">i4", "<u8", "<f2", "<f4", ">f8", "<c8", "<M8[ns]"]
DTYPES += ["<M8[D]", ">M8[s]", "<M8[ms]", ">M8[us]", "<M8[h]", "<M8[M]", "<M8[25s]", "<m8[25s]", ">m8[D]"]


@given(
    values=npst.arrays(
        st.sampled_from(DTYPES), npst.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5)
    ),
    seed=st.one_of(st.none(), st.integers(0, 1000)),
    offset=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_values_come_back_whether_all_rows_have_one_or_some(
    values: np.ndarray, seed: int | None, offset: int
) -> None:
    """Also from an array that is a slice of a longer one."""
    spec = ColumnSpec.of(values)
    if spec.kind == "time" and spec.mismatch(values):
        values = (values.astype(np.int64) >> 40).astype(values.dtype)
    valid = None
    if seed is not None:
        rng = np.random.default_rng(seed)
        valid = np.zeros(3 * len(values) + 1, bool)
        valid[rng.choice(len(valid), len(values), replace=False)] = True
    array = to_arrow(values, valid, spec)
    assert array.type == arrow_type(spec, nullable=valid is not None)
    array.validate(full=True)
    found, has = from_arrow(array if valid is not None else with_nat(array, spec), spec)
    assert_same_bits(found, values, "x")
    assert found.flags.writeable
    if valid is not None:
        assert has is not None
        assert np.array_equal(has, valid)
    if valid is None:
        sliced, _ = from_arrow(with_nat(array[offset:], spec), spec)
        assert_same_bits(sliced, values[offset:], "x")


@pytest.mark.parametrize("values", [["a", "", "ž"], ["", "", ""]])
@pytest.mark.parametrize("dtype", [object, "<U9", ">U9", "S9"])
def test_texts_come_back_in_their_byte_order(values: list[str], dtype: object) -> None:
    texts = np.array([v.encode() for v in values] if dtype == "S9" else values, dtype)
    spec = ColumnSpec.of(texts)
    array = to_arrow(texts.astype(object), np.array([True, False, True, True]), spec)
    for form in (array, array.dictionary_encode()):
        found, has = from_arrow(form, spec)
        assert has is not None
        assert has.tolist() == [True, False, True, True]
        assert_same_bits(found, texts, "x")


def test_objects_of_equal_text_are_objects_of_their_own() -> None:
    spec = ColumnSpec("|O", (), "json")
    found, _ = from_arrow(pa.array(['{"a":[1]}'] * 3).dictionary_encode(), spec)
    found[0]["a"].append(2)
    assert found[1] == {"a": [1]}


def test_expanded_texts_are_measured() -> None:
    assert expanded_bytes(pa.array(["ab", "c", "ab", None, "žž"]).dictionary_encode()) == 2 + 1 + 2 + 4
    assert expanded_bytes(pa.array([None, None], pa.string()).dictionary_encode()) == 0


@pytest.mark.parametrize(
    ("array", "spec"),
    [
        (pa.array([[1.0, 2.0]], pa.list_(pa.float32())), ColumnSpec("<f4", (3,), "list")),
        (pa.array([[1.0, None]], pa.list_(pa.float32())), ColumnSpec("<f4", (2,), "list")),
        (pa.array([b"12345"], pa.binary(5)), ColumnSpec("|u1", (2, 2), "bytes")),
        (pa.array([b"12345", None], pa.binary()), ColumnSpec("|u1", (2, 2), "bytes")),
        (pa.array([b"1234", None], pa.binary(4)), ColumnSpec("|u1", (2, 2), "bytes")),
    ],
)
def test_rows_of_another_size_are_damage(array: pa.Array, spec: ColumnSpec) -> None:
    with pytest.raises(CorruptData):
        from_arrow(array, spec)
