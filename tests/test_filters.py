"""Row filters: what their texts may say, what that means for rows, and what bounds tell of it."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import rlio
from rlio.batch import SampleBatch
from rlio.errors import MissingColumn, OptionError, SchemaError
from rlio.query.filters import Ref, RowFilter
from rlio.schemas.policy_schema import PolicySchema
from rlio.schemas.schema import Schema

# ---- texts ----

CANONICAL = {
    "rewards>0": "rewards > 0",
    "((rewards) > (0))": "rewards > 0",
    " rewards\n\t> 0 ": "rewards > 0",
    "(rewards > 0) & ~terminateds": "rewards > 0 and not terminateds",
    "(a > 0) | (b > 0) & c": "a > 0 or b > 0 and c",
    "((a > 0) | b) & c": "(a > 0 or b) and c",
    "a and (b and c)": "a and b and c",
    "not (a and b)": "not (a and b)",
    "obs[0, 2] < 1": "obs[0][2] < 1",
    "obs.position[0] < 1": "obs['position'][0] < 1",
    'obs["position", 0] < 1': "obs['position'][0] < 1",
    "column('my column') == b'x'": "column('my column') == b'x'",
    "column('t') == +1": "t == 1",
    "t in [1, -2]": "t in (1, -2)",
    "not t in (1)": "t not in (1,)",
    "a - (b - c) - d > 2 * 3": "a - (b - c) - d > 6",
    "(a - b) - c > -x * (-y)": "a - b - c > -x * -y",
    "a / (b * c) > -(a + b)": "a / (b * c) > -(a + b)",
    "0 < a <= .5": "0 < a <= 0.5",
    "dones": "terminateds or truncateds",
    "~dones & (t > 1)": "not (terminateds or truncateds) and t > 1",
    "isnan(a) or isfinite(abs(b))": "isnan(a) or isfinite(abs(b))",
    "name == 'it''s'": 'name == "its"'.replace('"', "'"),
    "name == 'é\\n'": "name == '\\xe9\\n'",
    "x > abs(-3)": "x > 3",
}


def test_the_canonical_text_forgets_spaces_and_parentheses_and_means_the_same() -> None:
    for text, canonical in CANONICAL.items():
        assert RowFilter.parse(text).text == canonical
        assert RowFilter.parse(canonical).text == canonical
        assert RowFilter.parse(text).references == RowFilter.parse(canonical).references


def test_columns_are_those_of_the_text_in_its_order_each_once() -> None:
    chosen = RowFilter.parse("obs.a[0] > rewards and t in (1, 2) and obs.b > t")
    assert chosen.columns == ("obs", "rewards", "t")
    assert chosen.reads("t")
    assert not chosen.reads("actions")


REFUSED = [
    "9**9**9 > x",
    "x.__class__ > 1",
    "__import__('os').system('true')",
    "exec('1')",
    "(lambda: x)() > 0",
    "[y for y in x]",
    "x if y else z",
    "x > 1 and (y := 2)",
    "rewards = 1",
    "x is y",
    "x > None",
    "x > 1j",
    "x > ...",
    "f'{x}' == y",
    "x @ y > 1",
    "x // 2 > 1",
    "x % 2 == 1",
    "x > {1}",
    "obs[1:2] > 0",
    "obs[x] > 0",
    "obs[1.0] > 0",
    "obs[True] > 0",
    "obs[()] > 0",
    "x > 1; y",
    "x > 1 # c",
    "x >",
    "",
    "(x > 1",
    "x > 1)",
    "x y",
    "x > 1e999",
    "x > 1/0",
    "x > 1/(2-2)",
    "x > 1e308*10",
    "x > 18446744073709551616",
    "x > -9223372036854775809",
    "x > 4611686018427387904 * 8",
    "x > 'a' + 'b'",
    "x > -'a'",
    "1 < 2",
    "0 < 1 < x",
    "True",
    "1",
    "x + 1",
    "'a'",
    "x > 0 & y < 1",
    "x > 1 & y",
    "1 & x",
    "x in y",
    "x in ()",
    "x in (1, 'a')",
    "1 in (1, 2)",
    "0 < x in (1, 2)",
    "isnan(x, y)",
    "isnan(x=1)",
    "isnan(*x)",
    "isnan",
    "column(x) > 1",
    "sqrt(x) > 1",
    "x.sum() > 1",
    "(x + y)[0] > 1",
    "é > 1 and ü ^ y",
    "é > 1 and 'ü' > ö + 'x'",
    "x > 1 # c\n and y > 2",
]


def test_everything_else_is_refused() -> None:
    columns = {name: np.array([1.0, 2.0]) for name in ("x", "y", "z", "é", "ü")}
    flags = {name: np.array([True, False]) for name in ("terminateds", "truncateds")}
    for text in REFUSED:
        with pytest.raises(OptionError):
            RowFilter.parse(text).mask(columns | flags)


def test_the_return_of_a_table_of_episodes_is_answered_with_its_name_in_a_filter() -> None:
    with pytest.raises(OptionError, match=r"cannot be read: .*; the return of an episode is episode_return"):
        RowFilter.of("return > 5")


def test_conditions_are_not_mixed_up_with_numbers() -> None:
    columns = {"x": np.array([1.0, 2.0]), "y": np.array([True, False])}
    for text in ("x > 1 & y", "x > x & y", "y and x", "not x", "~x > 1", "y | x"):
        with pytest.raises(OptionError):
            RowFilter.parse(text).mask(columns)
    assert RowFilter.parse("(x > 1) == y").mask(columns).tolist() == [False, False]


HUGE = {
    "characters": "x > 0 or " * 120_000 + "x > 0",
    "digits": "x > " + "9" * 60_000,
    "digits with underscores": "x > 9" + "_9" * 30_000 + "z",
    "parentheses": "(" * 5000 + "x > 0" + ")" * 5000,
    "a few parentheses too many": "(" * 300 + "x > 0" + ")" * 300,
    "brackets": "x" + "[0]" * 20_000 + " > 0",
    "attributes": "x" + ".a" * 30_000 + " > 0",
    "not": "not " * 15_000 + "x",
    "a few nots too many": "not " * 60 + "x",
    "minus": "x > " + "-" * 60_000 + "1",
    "minus, of which Python's parser would take all": "x > " + "-" * 900 + "y",
    "tilde": "~" * 60_000 + "x",
    "sums": "x" + " + x" * 10_000 + " > 0",
    "sums, deeper than it is long": "x" + "+x" * 90 + " > 0",
    "products in parentheses": "(x*" * 60 + "x" + ")" * 60 + " > 0",
    "flat, but long": "x or " * 2000 + "x",
    "names": "x" * 60_000 + " > 'y",
    "open text": "x == '" + "a" * 60_000,
    "backslashes": "x == '" + "\\" * 60_001 + "'",
    "calls": "abs(" * 100 + "x" + ")" * 100 + " > 0",
    "nul": "x == '\0'",
    "surrogate": "x == '\ud800'",
    "million": "(" * 1_000_000,
}


def test_texts_without_bound_are_refused_and_harm_nobody() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in HUGE.values():
            with pytest.raises(OptionError) as caught:
                RowFilter.parse(text)
            assert len(str(caught.value)) < 1000


def test_within_the_bounds_long_texts_are_taken() -> None:
    ids = ", ".join(map(str, range(8000)))
    assert RowFilter.parse(f"eps_id in ({ids})").mask({"eps_id": np.array([7, 8000])}).tolist() == [
        True,
        False,
    ]
    many = " or ".join(f"t == {i}" for i in range(200))
    assert RowFilter.parse(many).mask({"t": np.arange(300)}).sum() == 200
    assert RowFilter.parse("not " * 40 + "x").mask({"x": np.array([True])}).tolist() == [True]


@pytest.mark.parametrize("value", [1, None, b"x > 1", ["x > 1"]])
def test_what_is_neither_text_nor_function_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="a text such as"):
        RowFilter.of(value)


# ---- meanings, one by one ----

X = {
    "u1": np.array([0, 1, 255], np.uint8),
    "i1": np.array([-128, 0, 127], np.int8),
    "i8": np.array([-(2**63), 2**53 + 1, 2**63 - 1]),
    "u8": np.array([0, 2**53 + 1, 2**64 - 1], np.uint64),
    "f4": np.array([0.1, np.nan, np.inf], np.float32),
    "f8": np.array([0.1, np.nan, -np.inf]),
    "f2": np.array([0.5, 1.0, 65504], np.float16),
    "be": np.array([1, 2, 3], ">i4"),
    "b": np.array([True, False, True]),
    "s": np.array(["a", "b", ""]),
    "o": np.array(["a", "b", "é"], object),
    "y": np.array([b"a", b"b", b""]),
    "v": np.arange(12).reshape(3, 4),
    "m": np.arange(18).reshape(3, 2, 3),
    "n": {"p": np.arange(6.0).reshape(3, 2), "q": (np.arange(3), {"deep": np.arange(3)[::-1]})},
}
MEANINGS = {
    "u1 - 1 < 0": [1, 0, 0],
    "u1 + 1 > 255": [0, 0, 1],
    "u1 < 1000": [1, 1, 1],
    "u1 > -1": [1, 1, 1],
    "-1 < u1 < 256": [1, 1, 1],
    "-u1 < 0": [0, 1, 1],
    "abs(i1) == 128": [1, 0, 0],
    "-i1 == 128": [1, 0, 0],
    "i1 * i1 * i1 == -2097152": [1, 0, 0],
    "i8 == 9007199254740993": [0, 1, 0],
    "i8 == 9007199254740992": [0, 0, 0],
    "i8 == 9007199254740992.0": [0, 1, 0],
    "i8 < u8": [1, 0, 1],
    "u8 == i8": [0, 1, 0],
    "u8 > 18446744073709551614": [0, 0, 1],
    "i8 in (9007199254740993, 1)": [0, 1, 0],
    "i8 in (9007199254740992, 1)": [0, 0, 0],
    "i8 in (9007199254740992.0, 1)": [0, 1, 0],
    "u8 in (-1, 18446744073709551615)": [0, 0, 1],
    "u1 in (256, 257, 1)": [0, 1, 0],
    "b in (1, 5)": [1, 0, 1],
    "b < 18446744073709551615": [1, 1, 1],
    "b not in (True,)": [0, 1, 0],
    "f4 == 0.1": [1, 0, 0],
    "f4 in (0.1, 7)": [1, 0, 0],
    "f4 == f8": [0, 0, 0],
    "f4 != f4": [0, 1, 0],
    "f4 > 1e300": [0, 0, 0],
    "not f4 > 1": [1, 1, 0],
    "f4 <= 1": [1, 0, 0],
    "isnan(f4)": [0, 1, 0],
    "isinf(f8)": [0, 0, 1],
    "isfinite(f8)": [1, 0, 0],
    "isnan(u1)": [0, 0, 0],
    "f8 / 0 > 1": [1, 0, 0],
    "u1 / 2 == 0.5": [0, 1, 0],
    "i1 / u1 < -1e300": [1, 0, 0],
    "f2 * 2 > 60000": [0, 0, 1],
    "be == 2": [0, 1, 0],
    "b": [1, 0, 1],
    "not b": [0, 1, 0],
    "b == True": [1, 0, 1],
    "b + b + 1 == 3": [1, 0, 1],
    "-b < 0": [1, 0, 1],
    "b < u1": [0, 1, 1],
    "s == 'a'": [1, 0, 0],
    "s >= 'a'": [1, 1, 0],
    "s in ('', 'b', 'long one')": [0, 1, 1],
    "s == o": [1, 1, 0],
    "o == 'é'": [0, 0, 1],
    "'b' < o": [0, 0, 1],
    "o in ('a', 'é')": [1, 0, 1],
    "y == b'a'": [1, 0, 0],
    "y in (b'', b'b')": [0, 1, 1],
    "v[-1] == 7": [0, 1, 0],
    "v[0] + v[1] > 8": [0, 1, 1],
    "m[1, 2] == 11": [0, 1, 0],
    "m[1][2] == 11": [0, 1, 0],
    "n.p[1] > 2": [0, 1, 1],
    "n['q', 1].deep == n.q[0]": [0, 1, 0],
    "b and u1 > 0 or s == 'b'": [0, 1, 1],
}


def test_what_a_filter_means() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text, expected in MEANINGS.items():
            found = RowFilter.parse(text).mask(X)
            assert found.dtype == np.bool_, text
            assert found.tolist() == [bool(one) for one in expected], text


def test_no_rows_pass_no_rows() -> None:
    empty = {name: value[:0] for name, value in X.items() if isinstance(value, np.ndarray)}
    empty["n"] = {"p": np.zeros((0, 2)), "q": (np.arange(0), {"deep": np.arange(0)})}
    for text in MEANINGS:
        found = RowFilter.parse(text).mask(empty)
        assert (found.shape, found.dtype) == ((0,), np.bool_)


def test_integers_never_wrap_around() -> None:
    for text in (
        "i8 - 1 < 0", "i8 * i8 > 0", "abs(i8) > 0",
        "-i8 > 0", "u8 - u8 == 0", "u8 - 18446744073709551615 > 0",
        "u8 + i8 > 0", "i8 + 1 in (1, 2)", "i1 * 9223372036854775807 > 0", "i1 + 18446744073709551615 > 0",
    ):  # fmt: skip
        with pytest.raises(OptionError):
            RowFilter.parse(text).mask(X)
    assert RowFilter.parse("i8 * 1.0 * i8 > 1e37").mask(X).tolist() == [True, False, True]


def test_dones_are_those_of_a_batch() -> None:
    batch = SampleBatch(terminateds=[True, False, False], truncateds=[False, True, False], t=[0, 1, 2])
    assert RowFilter.parse("dones").mask(batch).tolist() == batch["dones"].tolist() == [True, True, False]


def test_the_mask_is_fresh_and_the_columns_stay_as_they_are() -> None:
    flags = np.array([True, False])
    for text in ("flags", "not flags", "flags and flags", "flags == True"):
        found = RowFilter.parse(text).mask({"flags": flags})
        assert not np.shares_memory(found, flags)
        found[:] = ~found
    given_back = RowFilter.of(_its_flags).mask({"flags": flags})
    assert not np.shares_memory(given_back, flags)
    assert flags.tolist() == [True, False]


def test_lists_and_tensors_are_columns_too() -> None:
    assert RowFilter.parse("a > 1").mask({"a": [1, 2]}).tolist() == [False, True]
    assert RowFilter.parse("a[1] > 1").mask({"a": torch.tensor([[0, 1], [0, 2]])}).tolist() == [False, True]


def test_columns_of_different_lengths_are_an_error() -> None:
    with pytest.raises(SchemaError, match="2 rows where others have 3"):
        RowFilter.parse("a > 1 and b > 1").mask({"a": np.arange(3), "b": np.arange(2)})
    with pytest.raises(SchemaError):
        RowFilter.parse("a > 1").mask({"a": np.arange(3)}, rows=2)


# ---- refused before data is read, and the same where it is ----

POLICY: PolicySchema = Schema.of(
    SampleBatch(
        obs=np.zeros((2, 4), np.float32),
        image=np.zeros((2, 8, 8, 3), np.uint8),
        nested={"p": np.zeros((2, 2)), "q": (np.zeros(2), np.zeros((2, 1)))},
        rewards=np.zeros(2, np.float32),
        terminateds=np.zeros(2, bool),
        infos=np.array([{}, {"a": 1}], object),
        name=np.array(["a", "b"]),
        raw=np.array([b"a", b"b"]),
        when=np.zeros(2, "M8[s]"),
        z=np.zeros(2, np.complex64),
    )
).policies["default_policy"]
MISFITS: dict[str, type[Exception]] = {
    "reward > 0": MissingColumn,
    "obs > 0": OptionError,
    "image[0] > 0": OptionError,
    "obs[4] > 0": OptionError,
    "obs[-5] > 0": OptionError,
    "obs[0][0] > 0": OptionError,
    "rewards[0] > 0": OptionError,
    "obs.p > 0": MissingColumn,
    "nested > 0": OptionError,
    "nested.q > 0": OptionError,
    "nested.r > 0": MissingColumn,
    "nested[0] > 0": MissingColumn,
    "nested.q[2] > 0": MissingColumn,
    "nested.q[1] > 0": OptionError,
    "rewards and terminateds": OptionError,
    "not rewards": OptionError,
    "name": OptionError,
    "infos == 'a'": OptionError,
    "when > 0": OptionError,
    "z > 0": OptionError,
    "name > 0": OptionError,
    "name == raw": OptionError,
    "rewards == 'a'": OptionError,
    "name in (1, 2)": OptionError,
    "rewards in ('a', 'b')": OptionError,
    "name + 1 > 0": OptionError,
    "abs(raw) > 0": OptionError,
    "isnan(name)": OptionError,
    "seq_lens > 1": MissingColumn,
    "dones": MissingColumn,
}


def test_a_filter_that_does_not_fit_is_refused_by_schema_and_by_data_alike() -> None:
    for text, kind in MISFITS.items():
        chosen = RowFilter.parse(text)
        with pytest.raises(kind):
            chosen.check(POLICY)
        with pytest.raises(kind):
            chosen.mask(example_columns())


def example_columns() -> dict[str, Any]:
    """Columns of the policy above."""
    found: dict[str, Any] = {
        "obs": np.zeros((2, 4), np.float32),
        "image": np.zeros((2, 8, 8, 3), np.uint8),
        "nested": {"p": np.zeros((2, 2)), "q": (np.zeros(2), np.zeros((2, 1)))},
        "rewards": np.zeros(2, np.float32),
        "terminateds": np.zeros(2, bool),
        "infos": np.array([{}, {"a": 1}], object),
        "name": np.array(["a", "b"]),
        "raw": np.array([b"a", b"b"]),
        "when": np.zeros(2, "M8[s]"),
        "z": np.zeros(2, np.complex64),
    }
    return found


def test_a_filter_that_fits_is_taken() -> None:
    RowFilter.parse("obs[3] > 0 and nested.q[1][0] < 1 and name == 'a' and raw != b'x'").check(POLICY)
    RowFilter.parse("terminateds and terminateds == 1 and terminateds + 1 > rewards").check(POLICY)


def test_columns_with_a_row_a_sequence_choose_no_rows() -> None:
    policy = Schema.of(
        SampleBatch(t=np.arange(4), seq_lens=np.array([2, 2]), state_in_0=np.zeros((2, 3)))
    ).policies["default_policy"]
    for text in ("seq_lens > 1", "state_in_0[0] > 1"):
        with pytest.raises(OptionError, match="a row a sequence"):
            RowFilter.parse(text).check(policy)
    with pytest.raises(OptionError, match="a row a sequence"):
        RowFilter.of(_its_flags, columns=["seq_lens"]).check(policy)


# ---- functions ----


def _its_flags(batch: SampleBatch) -> Any:
    return batch["flags"]


class Holder:
    @staticmethod
    def positive(batch: SampleBatch) -> Any:
        return np.asarray(batch["x"]) > 0

    def bound(self, batch: SampleBatch) -> Any:
        return self.positive(batch)


def test_a_function_chooses_rows_and_is_named_by_its_place() -> None:
    chosen = RowFilter.of(Holder.positive)
    assert chosen.text == f"function {__name__}:Holder.positive"
    assert chosen.columns is None
    assert chosen.reads("anything")
    assert chosen.mask({"x": np.array([1, 0]), "y": np.zeros(2)}).tolist() == [True, False]
    assert chosen.may_match({Ref("x"): (np.int64(0), np.int64(0))})
    named = RowFilter.of(lambda batch: batch["x"] > 0, columns=["x"], name="good ones")
    assert (named.text, named.columns) == ("function good ones", ("x",))
    assert named.mask({"x": np.array([1, 0])}).tolist() == [True, False]
    assert RowFilter.of(named) is named


def test_a_function_sees_only_the_columns_that_were_asked_for() -> None:
    seen: list[list[str]] = []

    def look(batch: SampleBatch) -> Any:
        seen.append(sorted(batch))
        return np.ones(len(batch), bool)

    RowFilter.of(look, columns=["x"], name="look").mask({"x": np.zeros(2), "y": np.zeros(2)})
    RowFilter.of(look, name="look").mask({"x": np.zeros(2), "y": np.zeros(2)})
    assert seen == [["x"], ["x", "y"]]
    with pytest.raises(MissingColumn, match="'z'"):
        RowFilter.of(look, columns=["z"], name="look").mask({"x": np.zeros(2)})
    with pytest.raises(MissingColumn, match="'y'"):
        RowFilter.of(look, columns=["y"], name="look").check(POLICY)


def _nameless() -> dict[str, Callable[[SampleBatch], Any]]:
    def inner(batch: SampleBatch) -> Any:
        return batch["x"]

    return {"lambda": lambda batch: batch["x"], "inner": inner, "bound": Holder().bound}


@pytest.mark.parametrize("kind", ["lambda", "inner", "bound"])
def test_a_function_without_a_lasting_name_is_refused(kind: str) -> None:
    with pytest.raises(OptionError, match="define it at the top of a module"):
        RowFilter.of(_nameless()[kind])


@pytest.mark.parametrize(
    "result",
    [np.array([1, 0]), np.array([True]), np.array([[True], [False]]), True, [1.0, 0.0], "xy"],
)
def test_a_function_must_give_a_bool_for_each_row(result: Any) -> None:
    with pytest.raises(OptionError, match="expected a bool for each row"):
        RowFilter.of(lambda _: result, name="bad").mask({"x": np.zeros(2)})


def test_options_of_functions_are_not_ignored_for_texts() -> None:
    with pytest.raises(OptionError, match="for functions"):
        RowFilter.of("x > 1", columns=["x"])
    with pytest.raises(OptionError, match="a list of names"):
        RowFilter.of(Holder.positive, columns="x")


# ---- against a row-by-row evaluation ----

DTYPES = ("?", "i1", "u1", "i4", "u4", "i8", "u8", "f4", "f8")
EDGES = [0, 1, -1, 2, 127, 128, 255, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1]


@st.composite
def columns_of(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Some columns of equal length with values near the edges of their types."""
    rows = draw(st.integers(0, 6))
    found = {}
    for index in range(3):
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        if dtype.kind == "b":
            values: Any = st.booleans()
        elif dtype.kind == "f":
            width = 32 if dtype.itemsize == 4 else 64
            values = st.one_of(st.floats(width=width), st.sampled_from([0.0, 0.5, -1.0, 3.0]))
        else:
            info = np.iinfo(dtype)
            values = st.one_of(
                st.integers(info.min, info.max),
                st.sampled_from([edge for edge in EDGES if info.min <= edge <= info.max]),
            )
        found["abc"[index]] = np.array(draw(st.lists(values, min_size=rows, max_size=rows)), dtype)
    return found


Row = dict[str, Any]


@st.composite
def values_of(draw: st.DrawFn, depth: int = 2) -> tuple[str, Callable[[Row], Any]]:
    """A text of a value, and what it comes to for a row of NumPy scalars: Python's int, or NumPy's float."""
    kind = draw(st.sampled_from(["column", "column", "constant", "+", "-", "*", "/", "abs", "neg"]))
    if depth == 0 and kind not in ("column", "constant"):
        kind = "column"
    if kind == "column":
        name = draw(st.sampled_from("abc"))
        return name, lambda row: row[name]
    if kind == "constant":
        number = draw(st.one_of(st.sampled_from(EDGES), st.sampled_from([0.5, 0.1, -2.5, 1e300])))
        return f"({number})", lambda row: Weak(number)
    text, inner = draw(values_of(depth - 1))
    if kind == "abs":
        return f"abs({text})", lambda row: one_operand(abs, inner(row))
    if kind == "neg":
        return f"-{text}", lambda row: one_operand(lambda x: -x, inner(row))
    other_text, other = draw(values_of(depth - 1))
    return f"({text} {kind} {other_text})", lambda row: calculate(kind, inner(row), other(row))


class Weak:
    """A constant, which takes the precision of what it meets."""

    def __init__(self, value: float) -> None:
        self.value = value


def one_operand(operation: Callable[[Any], Any], x: Any) -> Any:
    return Weak(operation(x.value)) if isinstance(x, Weak) else operation(x)


def as_float(x: Any) -> Any:
    """Integers as float64."""
    if isinstance(x, int):
        try:
            return np.float64(x)
        except OverflowError:
            return np.float64(math.copysign(math.inf, x))
    return x


def alike(x: Any, y: Any, divides: bool = False) -> tuple[Any, Any]:
    """Two operands as both integers of Python, or both floats of NumPy."""
    whole = [isinstance(v.value if isinstance(v, Weak) else v, int) for v in (x, y)]
    if all(whole) and not divides:
        return (x.value if isinstance(x, Weak) else x), (y.value if isinstance(y, Weak) else y)
    if isinstance(x, Weak):
        return type(as_float(y))(float(x.value)), as_float(y)
    if isinstance(y, Weak):
        return as_float(x), type(as_float(x))(float(y.value))
    return as_float(x), as_float(y)


def calculate(symbol: str, x: Any, y: Any) -> Any:
    if isinstance(x, Weak) and isinstance(y, Weak):
        found = eval(f"p {symbol} q", {"p": x.value, "q": y.value})
        return Weak(found)
    p, q = alike(x, y, symbol == "/")
    return eval(f"p {symbol} q", {"p": p, "q": q})


@st.composite
def conditions(draw: st.DrawFn, depth: int = 2) -> tuple[str, Callable[[Row], bool]]:
    """A text of a condition, and whether it holds for a row."""
    kind = draw(st.sampled_from(["compare", "compare", "chain", "in", "isnan", "and", "or", "not"]))
    if depth == 0 and kind in ("and", "or", "not"):
        kind = "compare"
    if kind in ("and", "or", "not"):
        (one, holds), (other, holds_too) = draw(conditions(depth - 1)), draw(conditions(depth - 1))
        if kind == "not":
            return f"not ({one})", lambda row: not holds(row)
        if kind == "and":
            return f"({one}) and ({other})", lambda row: holds(row) and holds_too(row)
        return f"({one}) | ({other})", lambda row: holds(row) or holds_too(row)
    text, value = draw(values_of())
    if kind == "isnan":
        return f"isnan(a + {text})", lambda row: bool(
            np.isnan(as_float(calculate("+", row["a"], value(row))))
        )
    if kind == "in":
        among = draw(st.lists(st.sampled_from([*EDGES, 0.5, 0.1, 3.0]), min_size=1, max_size=4))
        listed = ", ".join(map(str, among))
        return f"a - {text} in ({listed},)", lambda row: any(
            compare("==", calculate("-", row["a"], value(row)), Weak(one)) for one in among
        )
    symbols = draw(st.lists(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), min_size=2, max_size=2))
    last, last_value = draw(values_of(1))
    if kind == "compare":
        return f"a {symbols[0]} {text}", lambda row: compare(symbols[0], row["a"], value(row))
    return (
        f"{last} {symbols[0]} b {symbols[1]} {text}",
        lambda row: (
            compare(symbols[0], last_value(row), row["b"]) and compare(symbols[1], row["b"], value(row))
        ),
    )


def compare(symbol: str, x: Any, y: Any) -> bool:
    p, q = alike(x, y)
    return bool(eval(f"p {symbol} q", {"p": p, "q": q}))


def rows_of(columns: dict[str, np.ndarray]) -> list[Row]:
    """Rows of Python's integers and NumPy's floats."""
    count = len(columns["a"])
    return [
        {name: values[i] if values.dtype.kind == "f" else int(values[i]) for name, values in columns.items()}
        for i in range(count)
    ]


@given(columns_of(), conditions())
def test_masks_are_those_of_a_row_by_row_evaluation(
    columns: dict[str, np.ndarray], condition: tuple[str, Callable[[Row], bool]]
) -> None:
    text, holds = condition
    try:
        chosen = RowFilter.parse(text)
    except OptionError:  # Constants calculated beyond 64 bits, or with each other.
        return
    assert RowFilter.parse(chosen.text).text == chosen.text
    try:
        found = chosen.mask(columns)
    except OptionError:
        assume(False)
    with np.errstate(all="ignore"):
        assert found.tolist() == [holds(row) for row in rows_of(columns)], chosen


def bounds_of(columns: dict[str, np.ndarray]) -> dict[Ref, Any]:
    """As Parquet's statistics give them: without NaNs, and none where there is nothing else."""
    found = {}
    for name, values in columns.items():
        known = values[~np.isnan(values)] if values.dtype.kind == "f" else values
        if len(known):
            found[Ref(name)] = (known.min(), known.max())
    return found


@given(columns_of(), conditions())
def test_where_bounds_say_no_row_matches_none_does(
    columns: dict[str, np.ndarray], condition: tuple[str, Callable[[Row], bool]]
) -> None:
    try:
        chosen = RowFilter.parse(condition[0])
    except OptionError:
        return
    try:
        bounds, found = bounds_of(columns), chosen.mask(columns)
    except OptionError:
        assume(False)
    if found.any():
        assert chosen.may_match(bounds)
    for name in "abc":  # What is not known may be anything.
        fewer = {ref: ends for ref, ends in bounds.items() if ref.column != name}
        if found.any():
            assert chosen.may_match(fewer)


DENIED = {
    "x > 10": {"x": (0, 10)},
    "x >= 11": {"x": (0, 10)},
    "x < 0 or x > 10": {"x": (0, 10)},
    "20 > x > 10": {"x": (0, 10)},
    "x == 11": {"x": (0, 10)},
    "x != 5": {"x": (5, 5)},
    "x in (-1, 11, 12)": {"x": (0, 10)},
    "x > 9007199254740992": {"x": (0, 2**53)},
    "z": {"z": (False, False)},
    "10 < x": {"x": (0, 10)},
    "11 <= x": {"x": (0, 10)},
    "5 != x": {"x": (5, 5)},
    "z > 0 and x > 3": {"z": (False, True), "x": (0, 3)},
    "f > 1.5": {"f": (0.0, 1.5)},
    "f == 0.1": {"f": (0.2, 0.3)},
    "f in (0.1, 0.4)": {"f": (0.2, 0.3)},
    "s == 'a' and x > 10": {"x": (0, 10)},
}


def known_of(bounds: dict[str, tuple[Any, Any]]) -> dict[Ref, Any]:
    return {Ref(name): (np.array(low)[()], np.array(high)[()]) for name, (low, high) in bounds.items()}


def test_bounds_that_rule_a_filter_out_are_seen() -> None:
    for text, bounds in DENIED.items():
        assert not RowFilter.parse(text).may_match(known_of(bounds)), text
        assert RowFilter.parse(text).may_match({})
        assert RowFilter.parse(text).may_match({Ref("other"): (np.int64(0), np.int64(0))})


# Bounds within which a row may well match: each would be denied by arithmetic that is a little wrong.
ALLOWED = {
    "x == 10": {"x": (0, 10)},
    "x < 1": {"x": (0, 10)},
    "-x > 3": {"x": (-10, -4)},
    "-f > 3": {"f": (-10.0, -4.0)},
    "-f < -3": {"f": (-10.0, 4.0)},
    "abs(x) < 1": {"x": (-2, 3)},
    "abs(f) < 1": {"f": (-2.0, 3.0)},
    "abs(f) > 4": {"f": (-5.0, 3.0)},
    "x - y == 10": {"x": (0, 10), "y": (0, 20)},
    "x * y == 100": {"x": (-10, 10), "y": (-10, 5)},
    "x / y > 100": {"x": (1, 1), "y": (-1, 1)},
    "f / g < -100": {"f": (1.0, 1.0), "g": (-1.0, 1.0)},
    "f * g > 5": {"f": (0.0, 5.0), "g": (1.0, np.inf)},
    "f + g > 5": {"f": (-np.inf, 5.0), "g": (1.0, np.inf)},
    "not (x > 5 and y > 5)": {"x": (6, 9), "y": (5, 9)},
    "x != 5": {"x": (5, 6)},
    "not x == 5": {"x": (4, 5)},
    "x in (1, 5, 100)": {"x": (5, 6)},
    "not z": {"z": (False, True)},
    "z": {"z": (False, True)},
    "isinf(x * x * 1e300)": {"x": (0, 2**62)},
    "s == 'a'": {"x": (0, 1)},
}


def test_bounds_that_leave_a_match_open_do_not_deny_it() -> None:
    for text, bounds in ALLOWED.items():
        assert RowFilter.parse(text).may_match(known_of(bounds)), text


def test_bounds_take_a_constant_as_precisely_as_the_rows_do() -> None:
    column = np.array([0.1], np.float32)
    product = float(np.float32(0.1) * np.float32(0.3))
    for text in ("f == 0.1", "not f < 0.1", "f >= 0.1", "f in (0.1, 5)", f"f * 0.3 == {product}"):
        assert RowFilter.parse(text).mask({"f": column})[0]
        assert RowFilter.parse(text).may_match({Ref("f"): (column[0], column[0])})
    whole = np.array([2**53 + 1])
    known = {Ref("x"): (whole[0], whole[0])}
    assert RowFilter.parse("x == 9007199254740992.0").mask({"x": whole})[0]
    assert RowFilter.parse("x == 9007199254740992.0").may_match(known)
    assert not RowFilter.parse("x == 9007199254740992").may_match(known)


@pytest.mark.parametrize(
    "text", ["not f > 0", "f != 1", "isnan(f)", "not f in (1.0,)", "not f / f == 1", "not isfinite(f)"]
)
def test_a_float_may_be_a_nan_whatever_its_bounds(text: str) -> None:
    assert RowFilter.parse(text).may_match({Ref("f"): (np.float64(1), np.float64(1))})


@pytest.mark.parametrize(
    "ends", [(np.float32(np.nan), np.float32(1)), (np.float64(2), np.float64(1)), (np.int8(2), np.int8(1))]
)
def test_bounds_that_make_no_sense_say_nothing(ends: Any) -> None:
    assert RowFilter.parse("x > 100").may_match({Ref("x"): ends})


def test_no_module_is_imported_by_a_text() -> None:
    before = set(sys.modules)
    for text in REFUSED:
        with contextlib.suppress(OptionError):
            RowFilter.parse(text)
    assert set(sys.modules) == before


@pytest.mark.further
@given(st.text(max_size=30) | st.text(alphabet="abx01 .()[]<>=!&|~+-*/,'\"\\\n", max_size=40))
def test_any_text_is_a_filter_or_an_option_error(text: str) -> None:
    try:
        found = RowFilter.parse(text)
    except OptionError:
        return
    again = RowFilter.parse(found.text)
    assert (again.text, again.references) == (found.text, found.references)


def test_the_filters_of_the_pages_are_filters() -> None:
    root = Path(__file__).parents[1]
    texts = set()
    for page in (root / "README.md", *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.py")):
        texts |= set(re.findall(r'filter="([^"]* [^"]*)"', page.read_text(encoding="utf-8")))
    assert "rewards > 0" in texts
    for text in texts:
        assert RowFilter.parse(text).text


# ---- filters of objects ----


@pytest.fixture(scope="module")
def with_infos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight rows in four row groups; one row has an empty info, and the last one a key of its own."""
    root = str(tmp_path_factory.mktemp("infos"))
    infos: list[Any] = [
        {
            "success": bool(i % 2),
            "n": i,
            "mode": "early" if i < 4 else "late",
            "deep": {"x": [0, np.float32(i)]},
        }
        for i in range(8)
    ]
    infos[3] = {}
    infos[7]["rare"] = 7
    with rlio.ParquetWriter(root, roll=rlio.Roll(max_rows=2)) as writer:
        for i in range(0, 8, 2):
            writer.write(SampleBatch(t=np.arange(i, i + 2), infos=np.array(infos[i : i + 2], object)))
    return root


@pytest.mark.few(3)
@pytest.mark.parametrize("cache", ["none", "memory"])
@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('infos["success"]', [1, 5, 7]),
        ('not infos["success"]', [0, 2, 3, 4, 6]),
        ('infos["success"] == True', [1, 5, 7]),
        ('infos["success"] == False', [0, 2, 4, 6]),
        ('infos["n"] >= 4 and infos["n"] < 6.5', [4, 5, 6]),
        ('infos["n"] != 4', [0, 1, 2, 3, 5, 6, 7]),
        ('infos["n"] in (1, 7)', [1, 7]),
        ('infos["n"] not in (1, 7)', [0, 2, 3, 4, 5, 6]),
        ('infos.n * 2 + 1 > 12', [6, 7]),
        ('infos["mode"] == "late"', [4, 5, 6, 7]),
        ('infos["mode"] < "late"', [0, 1, 2]),
        ('infos["deep"]["x"][1] > 4', [5, 6, 7]),
        ('isnan(infos["n"])', [3]),
        ('infos["rare"] == 7', [7]),
        ('infos["absent"] == "x"', []),
        ('infos["absent"] == 0 or infos["absent"] or t == 0', [0]),
    ],
)  # fmt: skip
@pytest.mark.each_value_once
def test_filters_read_keys_of_infos(with_infos: str, cache: Any, text: str, rows: list[int]) -> None:
    """A row without the key is as with NaN, also in a row group in which no row has it."""
    with rlio.DatasetReader(with_infos, filter=text, cache=cache, epochs=1, columns=["t"]) as reader:
        found = [t for batch in reader for t in batch["t"].tolist()]
    assert found == rows
    assert rlio.open_dataset(with_infos).to_arrow(columns=["t"], filter=text)["t"].to_pylist() == rows


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("infos", "a key, such as infos"),
        ("infos > 1", "a key, such as infos"),
        ('infos["d"] == 1', "of one kind"),
        ('infos["mixed"] == 1', "of one kind"),
        ('infos["mode"] > 1', "compares a text with a number"),
        ('infos["mode"] + 1 > 1', "calculates with a text"),
        ('infos["n"]', "a number, for a condition"),
    ],
)
def test_filters_refuse_objects_that_cannot_be_compared(tmp_path: Path, text: str, message: str) -> None:
    infos = [{"d": {"x": 1}, "mixed": 1, "mode": "a", "n": 1}, {"d": {}, "mixed": "x", "mode": "b"}]
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(SampleBatch(t=np.arange(2), infos=np.array(infos, object)))
    for cache in ("none", "memory"):
        with pytest.raises(OptionError, match=message):
            rlio.DatasetReader(tmp_path, filter=text, cache=cache, epochs=1).sample()
