"""Spaces as JSON: exact both ways, a fixed grammar, and nothing that a stranger's description can abuse."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict
from typing import Any

import gymnasium
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.errors import CorruptData, SchemaError, UnsafeData
from rlio.schemas.spaces import space_from_json, space_to_json


def through_text(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """The space after a trip through JSON text of the strict kind."""
    return space_from_json(json.loads(json.dumps(space_to_json(space), allow_nan=False)))


def assert_same(found: Any, expected: Any) -> None:
    """Compare field by field: gymnasium's own equality lets bounds and dtypes differ."""
    assert type(found) is type(expected)
    match expected:
        case spaces.Box():
            for name in ("low", "high", "bounded_below", "bounded_above"):
                ours, theirs = getattr(found, name), getattr(expected, name)
                assert ours.dtype == theirs.dtype, name
                assert ours.shape == theirs.shape
                assert ours.tobytes() == theirs.tobytes(), name
            assert found.dtype == expected.dtype
        case spaces.Discrete():
            assert (found.n, found.start, found.dtype) == (expected.n, expected.start, expected.dtype)
            assert type(found.n) is type(expected.n)
        case spaces.MultiDiscrete():
            assert found.dtype == expected.dtype
            assert found.shape == expected.shape
            np.testing.assert_array_equal(found.nvec, expected.nvec, strict=True)
            np.testing.assert_array_equal(found.start, expected.start, strict=True)
        case spaces.MultiBinary():
            assert (found.n, found.shape) == (expected.n, expected.shape)
        case spaces.Text():
            assert found == expected
            assert found.character_list == expected.character_list
        case spaces.Dict():
            assert list(found.spaces) == list(expected.spaces)
            for key in expected.spaces:
                assert_same(found[key], expected[key])
        case spaces.Tuple() | spaces.OneOf():
            assert len(found.spaces) == len(expected.spaces)
            for ours, theirs in zip(found.spaces, expected.spaces, strict=True):
                assert_same(ours, theirs)
        case spaces.Sequence():
            assert found.stack == expected.stack
            assert_same(found.feature_space, expected.feature_space)
        case spaces.Graph():
            assert_same(found.node_space, expected.node_space)
            if expected.edge_space is None:
                assert found.edge_space is None
            else:
                assert_same(found.edge_space, expected.edge_space)
        case _:
            raise AssertionError(f"no comparison for {expected}")


@st.composite
def boxes(draw: st.DrawFn) -> spaces.Box:
    dtype = np.dtype(draw(st.sampled_from(["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u4", "u8", "?"])))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    kind: dict[str, Any] = {"allow_nan": False} if dtype.kind == "f" else {}
    one, other = (draw(hnp.arrays(dtype, shape, elements=kind, fill=st.nothing())) for _ in range(2))
    low, high = np.asarray(np.minimum(one, other)), np.asarray(np.maximum(one, other))  # 0-d ones stay arrays
    return spaces.Box(low, high, shape, dtype)


@st.composite
def discretes(draw: st.DrawFn) -> spaces.Discrete:
    dtype = draw(st.sampled_from([np.int64, np.int32, np.uint8]))
    low = 0 if dtype is np.uint8 else -100
    return spaces.Discrete(draw(st.integers(1, 100)), start=draw(st.integers(low, 100)), dtype=dtype)


@st.composite
def multi_discretes(draw: st.DrawFn) -> spaces.MultiDiscrete:
    dtype = draw(st.sampled_from([np.int64, np.int32, np.int8]))
    shape = draw(hnp.array_shapes(max_dims=2, max_side=3))
    nvec = draw(hnp.arrays(dtype, shape, elements=st.integers(1, 50)))
    start = draw(hnp.arrays(dtype, shape, elements=st.integers(-50, 50)))
    return spaces.MultiDiscrete(nvec, dtype=dtype, start=start)


characters = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
leaves = st.one_of(
    boxes(),
    discretes(),
    multi_discretes(),
    st.one_of(st.integers(1, 9), st.lists(st.integers(1, 4), min_size=1, max_size=3)).map(spaces.MultiBinary),
    st.builds(
        # gymnasium 1.2 cannot sample where a charset has a character twice.
        lambda low, more, charset: spaces.Text(
            low + more, min_length=low, charset="".join(dict.fromkeys(charset))
        ),
        st.integers(0, 9),
        st.integers(0, 9),
        characters,
    ),
    st.builds(
        spaces.Graph, st.one_of(boxes(), discretes()), st.one_of(st.none(), boxes(), discretes())
    ),
)  # fmt: skip
any_space = st.recursive(
    leaves,
    lambda child: st.one_of(
        st.lists(child, min_size=1, max_size=3).map(spaces.Tuple),
        st.lists(child, min_size=1, max_size=3).map(spaces.OneOf),
        st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), child, max_size=3).map(
            lambda found: spaces.Dict(OrderedDict(found))
        ),
        st.builds(lambda inner, stack: spaces.Sequence(inner, stack=stack), child, st.booleans()),
    ),
    max_leaves=4,
)


@settings(max_examples=60)
@given(any_space)
def test_every_space_comes_back_exactly(space: spaces.Space[Any]) -> None:
    assert_same(through_text(space), space)


@settings(max_examples=25)
@given(any_space)
def test_a_space_that_came_back_has_the_same_json_and_the_same_samples(space: spaces.Space[Any]) -> None:
    again = through_text(space)
    assert space_to_json(again) == space_to_json(space)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Text)):
        space.seed(3)
        again.seed(3)
        np.testing.assert_array_equal(space.sample(), again.sample())


def test_uniform_bounds_take_one_number_whatever_the_shape() -> None:
    image = space_to_json(spaces.Box(0, 255, (84, 84, 4), np.uint8))
    assert image == {"type": "Box", "dtype": "|u1", "shape": [84, 84, 4], "low": 0, "high": 255}


def test_bounds_that_differ_only_in_the_sign_of_zero_stay_apart() -> None:
    space = spaces.Box(np.array([0.0, -0.0]), np.ones(2), dtype=np.float64)
    assert space_to_json(space)["low"] == [0.0, -0.0]
    assert_same(through_text(space), space)


def test_an_unbounded_integer_box_stays_unbounded() -> None:
    space = spaces.Box(-np.inf, 9, (3,), np.int64)
    described = space_to_json(space)
    assert (described["low"], described["high"]) == ("-Infinity", 9)
    assert not through_text(space).bounded_below.any()
    mixed = spaces.Box(np.array([-np.inf, 2.0]), np.array([np.inf, 2**30]), dtype=np.int32)
    assert space_to_json(mixed)["low"] == ["-Infinity", 2]
    assert_same(through_text(mixed), mixed)


def test_integer_bounds_beyond_double_precision_are_exact() -> None:
    space = spaces.Box(np.array([2**62 + 1, 0]), np.array([2**62 + 3, 1]), dtype=np.int64)
    assert_same(through_text(space), space)


def test_the_order_of_a_dict_survives_canonical_json() -> None:
    space = spaces.Dict(OrderedDict(z=spaces.Discrete(2), a=spaces.Discrete(3)))
    text = json.dumps(space_to_json(space), sort_keys=True)
    assert list(space_from_json(json.loads(text)).spaces) == ["z", "a"]


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "Taxi-v4", "Blackjack-v1", "FrozenLake-v1"])
def test_spaces_of_real_environments_come_back(name: str) -> None:
    try:
        env = gymnasium.make(name)
    except gymnasium.error.Error as error:
        pytest.skip(f"this gymnasium has no {name}: {error}")
    for space in (env.observation_space, env.action_space):
        assert_same(through_text(space), space)
    env.close()


def test_a_subclass_is_written_as_the_space_it_derives_from() -> None:
    class Torque(spaces.Box):
        pass

    assert space_to_json(Torque(-1, 1, (2,))) == space_to_json(spaces.Box(-1, 1, (2,)))


class Custom(spaces.Space[int]):
    """A space that is none of the ten."""


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (Custom(), "Custom cannot be stored"),
        (spaces.Tuple([Custom()]), "Custom cannot be stored"),
        (spaces.Dict({1: spaces.Discrete(2)}), "key 1; only strings"),
        (spaces.Box(0, 1, (1,), np.longdouble), "dtype .* cannot be stored"),
        (spaces.Text(3, charset="a\ud800"), "surrogate"),
        (spaces.MultiBinary((1 << 13, 1 << 12)), "elements in all"),
    ],
    ids=["type", "nested type", "key", "dtype", "charset", "size"],
)
def test_a_space_that_cannot_be_stored_is_refused_when_written(space: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        space_to_json(space)


def test_an_unknown_type_is_a_schema_error_that_names_it_and_the_known_ones() -> None:
    with pytest.raises(SchemaError, match=r"unknown type 'os\.system'.*Box, Discrete"):
        space_from_json({"type": "os.system", "command": "true"})


BOX = {"type": "Box", "dtype": "<f4", "shape": [2], "low": 0, "high": 1}
DAMAGED: dict[str, Any] = {
    "no object": [BOX],
    "no type": {"dtype": "<f4"},
    "type is no string": {**BOX, "type": ["Box"]},
    "a field is missing": {k: v for k, v in BOX.items() if k != "high"},
    "a field too many": {**BOX, "seed": 1},
    "dtype of objects": {**BOX, "dtype": "|O"},
    "dtype of a record": {**BOX, "dtype": "f4,f4"},
    "dtype is a list": {**BOX, "dtype": [["a", "<f4"]]},
    "dtype of no size": {**BOX, "dtype": "<f3"},
    "shape is negative": {**BOX, "shape": [-1]},
    "shape is a float": {**BOX, "shape": [2.0]},
    "shape is a bool": {**BOX, "shape": [True]},
    "bounds of another length": {**BOX, "low": [0, 0, 0]},
    "bounds are ragged": {**BOX, "low": [0, [0]]},
    "bounds are NaN": {**BOX, "low": float("nan")},
    "bounds are infinite floats": {**BOX, "high": float("inf")},
    "bounds are text": {**BOX, "low": "zero"},
    "bounds are swapped": {**BOX, "low": 2},
    "bounds overflow the dtype": {**BOX, "high": 1e300},
    "bounds are beyond any float": {**BOX, "high": 10**400},
    "integer bounds are floats": {**BOX, "dtype": "<i4", "low": 0.5},
    "integer bounds overflow": {**BOX, "dtype": "|i1", "high": 300},
    "bool bounds are not 0 or 1": {**BOX, "dtype": "|b1", "high": 2},
    "unsigned and unbounded": {**BOX, "dtype": "|u1", "high": "Infinity"},
    "n is zero": {"type": "Discrete", "dtype": "<i8", "n": 0, "start": 0},
    "n is a bool": {"type": "Discrete", "dtype": "<i8", "n": True, "start": 0},
    "n overflows its dtype": {"type": "Discrete", "dtype": "|u1", "n": 300, "start": 0},
    "n from start overflows": {"type": "Discrete", "dtype": "|u1", "n": 200, "start": 100},
    "nvec is zero": {"type": "MultiDiscrete", "dtype": "<i8", "shape": [2], "nvec": [0, 1], "start": 0},
    "nvec is shorter": {"type": "MultiDiscrete", "dtype": "<i8", "shape": [3], "nvec": [2], "start": 0},
    "binary of none": {"type": "MultiBinary", "n": 0},
    "text is too short": {"type": "Text", "min_length": 3, "max_length": 2, "charset": "ab"},
    "charset is a list": {"type": "Text", "min_length": 1, "max_length": 2, "charset": ["a"]},
    "dict is an object": {"type": "Dict", "spaces": {"a": BOX}},
    "dict repeats a key": {"type": "Dict", "spaces": [["a", BOX], ["a", BOX]]},
    "dict key is a number": {"type": "Dict", "spaces": [[1, BOX]]},
    "tuple of a number": {"type": "Tuple", "spaces": [3]},
    "stack is a number": {"type": "Sequence", "stack": 1, "space": BOX},
    "edges are a number": {"type": "Graph", "nodes": BOX, "edges": 3},
}  # fmt: skip


@pytest.mark.parametrize("described", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_description_is_corrupt_data(described: Any) -> None:
    with pytest.raises(CorruptData):
        space_from_json(described)


def nested(depth: int) -> Any:
    described: Any = BOX
    for _ in range(depth):
        described = {"type": "Tuple", "spaces": [described]}
    return described


HOSTILE: dict[str, Any] = {
    "a huge box from one number": {**BOX, "shape": [1 << 20, 1 << 20]},
    "huge only together": {"type": "Tuple", "spaces": [{**BOX, "shape": [1 << 23]}] * 3},
    "a product that wraps round in 64 bits": {**BOX, "shape": [1 << 32, 1 << 32, 4]},
    "too many axes": {**BOX, "shape": [1] * 33},
    "a huge nvec": {"type": "MultiDiscrete", "dtype": "<i8", "shape": [1 << 40], "nvec": 2, "start": 0},
    "a huge binary": {"type": "MultiBinary", "n": 1 << 60},
    "too deep": nested(33),
    "too many": {"type": "Tuple", "spaces": [{"type": "MultiBinary", "n": 1}] * 5000},
}


@pytest.mark.few(4)
@pytest.mark.parametrize("described", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_description_that_wants_too_much_is_unsafe_data(described: Any) -> None:
    with pytest.raises(UnsafeData):
        space_from_json(described)


def test_a_shape_with_a_zero_takes_no_memory_however_large_the_rest() -> None:
    with pytest.raises(CorruptData, match="not a Box space"):  # NumPy itself refuses such a shape
        space_from_json({**BOX, "shape": [1 << 32, 1 << 32, 0, 5]})
    assert space_from_json({**BOX, "shape": [1 << 20, 0]}).shape == (1 << 20, 0)


def test_spaces_at_the_limits_are_written_and_read() -> None:
    assert_same(through_text(space_from_json(nested(32))), space_from_json(nested(32)))


def test_gymnasium_waits_until_a_space_is_there() -> None:
    code = "import rlio.schemas.spaces, sys; assert 'gymnasium' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
