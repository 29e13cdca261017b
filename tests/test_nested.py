"""Nested values: mapping, flattening and building them again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.batch.nested import leaves, map_structure, rebuilt, unflatten
from rlio.errors import SchemaError


def nested_values() -> st.SearchStrategy[Any]:
    """Leaves are ints; no container is empty, since an empty one has no leaves to be rebuilt from."""
    keys = st.text(max_size=3)
    return st.recursive(
        st.integers(),
        lambda inner: (
            st.dictionaries(keys, inner, min_size=1, max_size=3)
            | st.lists(inner, min_size=1, max_size=3).map(tuple)
        ),
        max_leaves=8,
    )


@given(nested_values())
@settings(max_examples=60)
def test_unflatten_is_the_inverse_of_leaves(value: Any) -> None:
    found = leaves(value)
    made = unflatten([path for path, _ in found], [leaf for _, leaf in found])
    assert made == value
    assert leaves(made) == found


@given(nested_values())
@settings(max_examples=60)
def test_a_remembered_structure_is_built_anew_each_time(value: Any) -> None:
    paths = tuple(path for path, _ in leaves(value))
    items = [object() for _ in paths]
    for _ in range(2):
        made = rebuilt(paths, items)
        assert leaves(made) == list(zip(paths, items, strict=True))
        if isinstance(made, dict):
            made.clear()


def test_a_leaf_of_a_remembered_structure_may_be_a_dict_or_a_tuple() -> None:
    assert rebuilt((("a",), ("b", 0)), [{"x": 1}, (2,)]) == {"a": {"x": 1}, "b": ((2,),)}


@given(nested_values())
@settings(max_examples=40)
def test_mapping_keeps_structure_and_order(value: Any) -> None:
    doubled = map_structure(lambda a, b: a + b, value, value)
    assert leaves(doubled) == [(path, 2 * leaf) for path, leaf in leaves(value)]


def test_lists_are_leaves() -> None:
    assert leaves({"a": [1, (2,)]}) == [(("a",), [1, (2,)])]


def test_a_plain_value_has_the_empty_path() -> None:
    assert leaves(5) == [((), 5)]
    assert unflatten([()], [5]) == 5


def test_no_paths_give_an_empty_dict() -> None:
    assert unflatten([], []) == {}


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [
        ({"a": 1}, {"b": 1}, "at the top"),
        ({"a": {"x": 1}}, {"a": {"x": (1,)}}, "at a/x"),
        ({"a": (1, 2)}, {"a": (1,)}, "at a"),
        ((1, {"k": 2}), (1, 2), "at 1"),
        ({"a": 1}, {"a": {"b": 1}}, "at a"),
    ],
)
def test_unlike_structures_are_refused_with_the_place(first: Any, second: Any, place: str) -> None:
    with pytest.raises(SchemaError, match=f"differ {place}"):
        map_structure(lambda a, b: a, first, second)


@pytest.mark.parametrize(
    "paths",
    [
        [("a",), ("a", "b")],
        [("a", "b"), ("a",)],
        [("a",), ("a",)],
        [("a", 0), ("a", "b")],
        [(0,), (2,)],
        [(1,)],
        [(), ("a",)],
        [(True,)],
    ],
)
def test_contradicting_paths_are_refused(paths: list[tuple[str | int, ...]]) -> None:
    with pytest.raises(SchemaError):
        unflatten(paths, list(range(len(paths))))
    for _ in range(2):
        with pytest.raises(SchemaError):
            rebuilt(tuple(paths), list(range(len(paths))))


def test_leaves_that_are_dicts_are_not_taken_for_branches() -> None:
    assert unflatten([("infos", 0)], [{"lives": 3}]) == {"infos": ({"lives": 3},)}
