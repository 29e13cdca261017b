"""Clipping and scaling of actions, of arrays and of batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st

from rlio.batch import MultiAgentBatch, SampleBatch
from rlio.batch.actions import (
    ClipActions,
    NormalizeActions,
    clip_actions,
    has_boxes,
    normalize_actions,
    unsquash_actions,
)
from rlio.errors import MissingColumn, SchemaError
from rlio.reader import InputReader
from rlio.readers.mapped_input import MappedInput

BOX = Box(np.array([-2.0, 0.0], np.float32), np.array([4.0, 10.0], np.float32))
NESTED = Dict(push=Tuple([BOX, Discrete(3)]), turn=Box(-1.0, 1.0, (), np.float64))


def test_clipping_keeps_dtype_and_shape_and_what_is_within_bounds() -> None:
    given_ = np.array([[-3.0, 5.0], [1.0, 11.0]], np.float16)
    clipped = clip_actions(given_, BOX)
    assert clipped.dtype == np.float16
    assert clipped.tolist() == [[-2.0, 5.0], [1.0, 10.0]]
    assert given_[0, 0] == -3.0, "the operand is not changed"


def test_unsquashing_maps_the_unit_interval_onto_the_bounds_and_clips() -> None:
    actions = np.array([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [-7.0, 7.0]], np.float32)
    assert unsquash_actions(actions, BOX).tolist() == [[-2.0, 0.0], [1.0, 5.0], [4.0, 10.0], [-2.0, 10.0]]


@settings(max_examples=50, deadline=None)
@given(
    low=st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3),
    width=st.lists(st.sampled_from([0.0, 0.5, 3.0, 200.0]), min_size=3, max_size=3),
    unit=st.lists(st.floats(-1, 1), min_size=3, max_size=3),
)
def test_normalising_is_the_inverse_of_unsquashing(
    low: list[float], width: list[float], unit: list[float]
) -> None:
    bounds = np.array(low, np.float64), np.array(low, np.float64) + width
    space = Box(*bounds, dtype=np.float64)
    sent = unsquash_actions(np.array([unit]), space)
    assert space.contains(sent[0])
    expected = np.where(np.array(width) > 0, unit, 0.0)
    assert np.allclose(normalize_actions(sent, space)[0], expected, atol=1e-9)


def test_numbers_without_two_finite_bounds_and_other_spaces_are_left_alone() -> None:
    space = Box(np.array([-np.inf, 0.0, 0.0]), np.array([1.0, np.inf, 2.0]), dtype=np.float64)
    actions = np.array([[-5.0, 7.0, 0.5]])
    assert unsquash_actions(actions, space).tolist() == [[-5.0, 7.0, 1.5]]
    assert normalize_actions(actions, space).tolist() == [[-5.0, 7.0, -0.5]]
    whole = Box(0, 255, (2,), np.uint8)
    assert unsquash_actions(np.array([[3, 4]], np.uint8), whole).tolist() == [[3, 4]]
    chosen = np.array([2])
    assert clip_actions(chosen, Discrete(2)) is chosen


def test_nested_actions_are_treated_leaf_by_leaf() -> None:
    actions = {"push": (np.array([[9.0, -9.0]], np.float32), np.array([7])), "turn": np.array([0.5])}
    clipped = clip_actions(actions, NESTED)
    assert clipped["push"][0].tolist() == [[4.0, 0.0]]
    assert clipped["push"][1] is actions["push"][1]
    assert clipped["turn"].shape == (1,)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.zeros(3), "a dict of"),
        ({"push": np.zeros(3), "turn": np.zeros(3)}, "at push .*a tuple of 2"),
        (
            {"push": (np.zeros((1, 3)), np.zeros(1)), "turn": np.zeros(1)},
            r"push/0 .*\(1, 3\).*\(\.\.\., 2\)",
        ),
        ({"turn": np.zeros(1)}, "a dict of"),
    ],
)
def test_actions_that_are_not_nested_as_their_space_are_refused(actions: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        clip_actions(actions, NESTED)


def test_a_space_has_boxes_at_any_depth() -> None:
    assert has_boxes(NESTED)
    assert not has_boxes(Dict(a=Discrete(2), b=Tuple([Discrete(3)])))


class Logged(InputReader):
    def _next(self) -> SampleBatch:
        return SampleBatch(obs=[0, 1], actions=np.array([[9.0, 5.0], [1.0, 2.5]], np.float32))


def test_both_work_on_every_batch_of_a_mapped_input() -> None:
    reader = MappedInput(Logged(), ClipActions(BOX), NormalizeActions(BOX))
    batch = reader.sample(3)
    assert batch["actions"].tolist() == [[1.0, 0.0], [0.0, -0.5], [1.0, 0.0]]
    assert batch["actions"].dtype == np.float32
    assert batch["obs"].tolist() == [0, 1, 0]


def test_batches_of_several_policies_keep_their_kind_and_steps_and_the_operand_is_not_changed() -> None:
    batch = MultiAgentBatch({"a": Logged().sample(), "b": Logged().sample()}, 2)
    clipped = ClipActions(BOX)(batch)
    assert isinstance(clipped, MultiAgentBatch)
    assert clipped.env_steps() == 2
    assert clipped["b"]["actions"][0, 0] == 4.0
    assert batch["b"]["actions"][0, 0] == 9.0


def test_a_batch_without_actions_is_named_as_such() -> None:
    with pytest.raises(MissingColumn, match="no actions"):
        ClipActions(BOX)(SampleBatch(obs=[1]))
