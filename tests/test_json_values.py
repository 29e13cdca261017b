"""Objects as JSON text: types and dtypes survive, and nothing in the text can do more than be data."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from stored_batches import same_objects

from rlio.errors import CorruptData, SchemaError
from rlio.schemas.column import ColumnSpec
from rlio.schemas.json_values import dump_value, load_value

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.binary(max_size=5),
    st.text(st.characters(codec=None), max_size=5), st.sampled_from(["$array", "$tuple", "NaN", "{}"]),
)  # fmt: skip
arrays = npst.arrays(
    st.sampled_from(["<f2", "<f4", ">f8", "<i8", "<u8", "|b1", "<c8", "<M8[us]", "<U3", "|S2", "|u1"]),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
values = st.recursive(
    scalars | arrays | arrays.map(lambda a: a.reshape(-1)[0] if a.size else np.float32(1)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=3) | st.integers() | st.sampled_from(["$bytes", ("a", 1)]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(values)
@settings(max_examples=80, deadline=None)
def test_values_come_back_with_their_types(value: Any) -> None:
    text = dump_value(value)
    text.encode()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert same_objects(load_value(text), value)
    assert same_objects(load_value(text.encode()), value)


@pytest.mark.parametrize("value", [-0.0, math.inf, -math.inf, math.nan, 1e-320, 0.1, 2**70, -(2**63)])
def test_numbers_keep_their_bits(value: float) -> None:
    assert same_objects(load_value(dump_value(value)), value)


def test_half_surrogate_pairs_come_back_from_text_that_utf_8_can_hold() -> None:
    """As in the names of files that are not valid UTF-8."""
    value = {"path": "caf\udce9", "\ud800": ["ž"]}
    text = dump_value(value)
    assert load_value(text.encode()) == value


def test_longdoubles_and_arrays_of_objects_come_back() -> None:
    value = {"x": np.array([0.1, 1], np.longdouble) / 3, "o": np.array([[1, (2,)], [None, {}]], object)}
    assert same_objects(load_value(dump_value(value)), value)


def test_tensors_come_back_as_arrays() -> None:
    found = load_value(dump_value({"x": torch.arange(3, dtype=torch.int16).requires_grad_(False)}))
    assert found["x"].dtype == np.int16


@pytest.mark.parametrize("value", [{1}, object(), len, 1j, np.zeros(1, [("a", "f4")]), {"a": range(3)}])
def test_what_has_no_stored_form_is_refused(value: Any) -> None:
    with pytest.raises(SchemaError):
        dump_value(value)


def test_numbers_that_python_would_not_write_are_refused() -> None:
    with pytest.raises(SchemaError, match="4300"):
        dump_value([10**5000])


def test_values_without_end_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SchemaError, match="deep"):
        dump_value(endless)


@pytest.mark.parametrize(
    "text",
    ["", "{", "nonsense", '{"$array":1}', '{"$array":"<f4","shape":[2],"data":[1]}', '{"$bytes":"*"}',
     '{"$array":"O","shape":[1],"data":[1]}', '{"$array":"<f4","shape":[-1,-1],"data":[1]}',
     '{"$array":"<f4","shape":"x","data":[1]}', '{"$array":"<f4","shape":[1],"data":"AA=="}',
     '{"$array":"<i4","shape":[1],"data":[99999999999]}', '{"$array":"<i4","shape":[1],"data":[1e400]}',
     '{"$array":"<f4","shape":[1],"data":["NotANumber"]}', '{"$array":"|V9","shape":[1],"data":"AAAA"}',
     '{"$array":"<U9999999","shape":[1],"data":["a"]}', '{"$array":"<f8","shape":[99999999999],"data":[]}',
     '{"$array":[["a","<f4"]],"shape":[1],"data":[1]}', '{"$scalar":"<f4","data":[]}', '{"$float":"x"}',
     '{"$float":[]}', '{"$map":[[[],1]]}', '{"$map":7}', '{"$tuple":7}',
     '{"$array":"|O","shape":[2],"data":[1]}',
     '{"$array":"<f4","shape":[1],"data":7}', "[" * 200 + "]" * 200, "[" * 100_000, "1" * 5000, b"\xff"],
)  # fmt: skip
def test_text_that_is_no_such_value_is_refused(text: str) -> None:
    with pytest.raises(CorruptData):
        load_value(text)


def test_names_of_classes_are_only_text() -> None:
    assert load_value('{"__class__":"os.system","py/object":"os.system"}') == {
        "__class__": "os.system", "py/object": "os.system",
    }  # fmt: skip


@given(npst.arrays(np.float32, npst.array_shapes(max_dims=2, max_side=4), elements=st.floats(width=32)))
def test_lists_of_floats_hold_what_any_json_reader_takes(values: np.ndarray) -> None:
    text = dump_value(values)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert np.array_equal(load_value(text), values, equal_nan=True)


@pytest.mark.parametrize(
    "text", ["<,", ",4", "3f4,i8", "f4,f4", "(2,)f4", "<f4 ", "|V8", "a,b" * 99, "<f99", 4]
)
def test_a_dtype_is_one_name_and_nothing_that_numpy_would_evaluate(text: object) -> None:
    with pytest.raises(CorruptData):
        load_value(json.dumps({"$array": text, "shape": [0], "data": []}))
    with pytest.raises(CorruptData):
        ColumnSpec.from_json({"dtype": text, "shape": [], "kind": "scalar"}, column="obs")
