"""Specs of stored columns: how values lie in a file, and which specs are believed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlio.errors import CorruptData, SchemaError
from rlio.schemas.column import ColumnSpec, FrameStack


@pytest.mark.parametrize(
    ("dtype", "shape", "kind"),
    [
        ("<f4", (), "scalar"), ("?", (), "scalar"), ("<u8", (), "scalar"), (">f8", (), "scalar"),
        ("<f4", (1,), "list"), ("<f4", (512,), "list"), ("<f4", (513,), "bytes"), ("|u1", (16,), "list"),
        ("|u1", (17,), "bytes"), ("?", (4,), "list"), ("<i2", (17,), "bytes"), ("<f4", (2, 3), "bytes"),
        ("<f2", (), "bytes"), ("<f2", (3,), "bytes"), ("<c8", (), "bytes"), ("<M8[s]", (), "time"),
        ("<M8[s]", (2,), "bytes"),
        ("<M8[25s]", (), "bytes"), ("<M8[M]", (), "bytes"),
        ("<m8[25s]", (), "time"), ("<m8", (), "bytes"),
        ("<f4", (0,), "none"), ("<f4", (3, 0), "none"), ("|u1", (84, 84, 4), "bytes"),
    ],
)  # fmt: skip
def test_small_vectors_are_lists_and_the_rest_is_bytes(dtype: str, shape: tuple[int, ...], kind: str) -> None:
    spec = ColumnSpec.of(np.zeros((2, *shape), dtype))
    assert (spec.kind, spec.shape, spec.numpy) == (kind, shape, np.dtype(dtype))
    assert spec.row_bytes == np.zeros(shape, dtype).nbytes
    assert ColumnSpec.from_json(spec.to_json(), column="x") == spec


@pytest.mark.parametrize(
    ("values", "dtype", "kind"),
    [
        (np.array(["a", "b"], object), "|O", "text"), (np.array(["a", 1], object), "|O", "json"),
        (np.array([], object), "|O", "json"), (np.array(["ab"]), "<U", "text"),
        (np.array([b"ab"]), "|S", "text"), (np.array(["ab"], ">U2"), ">U", "text"),
    ],
)  # fmt: skip
def test_objects_and_texts_have_no_width(values: np.ndarray, dtype: str, kind: str) -> None:
    spec = ColumnSpec.of(values)
    assert (spec.dtype, spec.kind) == (dtype, kind)
    assert ColumnSpec.from_json(spec.to_json(), column="x") == spec


def test_specs_with_stacks_are_written_and_read() -> None:
    spec = ColumnSpec("|u1", (84, 84, 4), "bytes", FrameStack(2, 4))
    assert ColumnSpec.from_json(spec.to_json(), column="x") == spec


def test_mismatches_say_what_was_found_and_expected() -> None:
    spec = ColumnSpec.of(np.zeros((2, 3), np.float32))
    assert spec.mismatch(np.zeros((5, 3), np.float32)) is None
    assert spec.mismatch(np.zeros((5, 3))) == "dtype float64, but the column has <f4"
    assert spec.mismatch(np.zeros((5, 4), np.float32)) == "rows of shape (4,), but the column has (3,)"
    text = ColumnSpec.of(np.array(["a"], object))
    assert text.mismatch(np.array(["a", None], object)) == "objects, but the column has only strings"


@pytest.mark.parametrize(
    "values", [np.zeros(2, [("a", "f4")]), np.zeros((2,) + (1,) * 33), np.empty((2, 2), object)]
)
def test_what_cannot_be_read_back_has_no_spec(values: np.ndarray) -> None:
    with pytest.raises(SchemaError, match=r"\[column x\]"):
        ColumnSpec.of(values, column="x")


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "|O"}, {"dtype": "<f4,<f4"}, {"dtype": "float32"}, {"dtype": None}, {"dtype": 4},
        {"dtype": [["a", "<f4"]]}, {"dtype": "<U4"}, {"dtype": "|V4"}, {"dtype": "<f8", "kind": "bytes"},
        {"shape": [-1]}, {"shape": [1.5]}, {"shape": [True]}, {"shape": "3"}, {"shape": None},
        {"shape": [1] * 33}, {"shape": [2**32, 2**32]}, {"shape": [0, 2**62]}, {"shape": [2**63]},
        {"kind": "pickle"}, {"kind": None}, {"kind": "scalar"}, {"stack": 1}, {"stack": {}},
        {"stack": {"axis": 0, "depth": 1}},
        {"stack": {"axis": 1, "depth": 3}}, {"stack": {"axis": 0, "depth": "3"}},
    ],
)  # fmt: skip
def test_descriptions_from_strangers_are_checked(change: dict[str, Any]) -> None:
    legal = {"dtype": "<f4", "shape": [3], "kind": "list"}
    assert ColumnSpec.from_json(legal, column="x").shape == (3,)
    with pytest.raises(CorruptData, match=r"\[in u, column x\]"):
        ColumnSpec.from_json(legal | change, column="x", uri="u")
