"""Connectors: what they make of spaces and batches, each row of its own stream."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from gymnasium.wrappers import FrameStackObservation

from rlio.connectors.clip import ClipAction, UnsquashAction, clip_rewards
from rlio.connectors.connector import (
    ActionPipeline,
    Connector,
    Function,
    ObservationPipeline,
    Streams,
)
from rlio.connectors.flatten import Flatten, OneHot
from rlio.connectors.frame_stack import FrameStack
from rlio.connectors.mean_std import MeanStdFilter
from rlio.errors import OptionError, StateError


def streams(*slots: int, starts: Any = False) -> Streams:
    return Streams(np.array(slots), np.broadcast_to(np.array(starts), (len(slots),)).copy())


def batch_of(space: gym.Space[Any], rows: int) -> tuple[list[Any], Any]:
    """Samples of ``space``, alone and batched."""
    from gymnasium.vector.utils import concatenate, create_empty_array

    space.seed(3)
    samples = [space.sample() for _ in range(rows)]
    return samples, concatenate(space, samples, create_empty_array(space, rows))


SPACES = [
    Box(-1.0, 1.0, (2, 3), np.float64),
    Discrete(4, start=-2),
    MultiDiscrete([3, 2, 4]),
    MultiDiscrete([[2, 3], [4, 5]]),
    MultiBinary((2, 2)),
    Dict(a=Discrete(3), b=Tuple([Box(0, 255, (2,), np.uint8), Dict(c=MultiBinary(2))])),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_flat_observations_are_those_of_gymnasium(space: gym.Space[Any]) -> None:
    """Row 2.1, preprocessor_pref="rllib"."""
    samples, batch = batch_of(space, 7)
    flatten = Flatten()
    flat_space = flatten.bind(space)
    flat = flatten(batch)
    assert flat.dtype == flat_space.dtype == np.float32
    assert all(flat_space.contains(row) for row in flat)
    expected = np.stack([gym.spaces.flatten(space, sample) for sample in samples])
    np.testing.assert_array_equal(flat, expected.astype(np.float32))


def test_one_hot_changes_discrete_leaves_only() -> None:
    space = Dict(gear=Discrete(3, start=1), speed=Box(0.0, 9.0, (2,)), pair=Tuple([MultiDiscrete([2, 2])]))
    pipeline = ObservationPipeline([OneHot()], space)
    assert pipeline.space["gear"] == Box(0.0, 1.0, (3,))  # type: ignore[index]
    assert pipeline.space["pair"][0].shape == (4,)  # type: ignore[index]
    obs = {"gear": np.array([3]), "speed": np.ones((1, 2), np.float32), "pair": (np.array([[1, 0]]),)}
    made = pipeline(obs, streams(0))
    assert made["gear"].tolist() == [[0.0, 0.0, 1.0]]
    assert made["pair"][0].tolist() == [[0.0, 1.0, 1.0, 0.0]]
    assert made["speed"] is obs["speed"]


@pytest.mark.parametrize("axis", [0, -1])
def test_stacks_are_those_of_gymnasium_stream_by_stream(axis: int) -> None:
    class Frames(gym.Env[Any, Any]):
        observation_space = Box(0, 255, (2, 2), np.uint8)
        action_space = Discrete(2)

        def __init__(self, index: int) -> None:
            self._rng = np.random.default_rng(index)

        def reset(self, **options: Any) -> Any:
            return self.step(0)[0], {}

        def step(self, action: Any) -> Any:
            return self._rng.integers(0, 255, (2, 2), dtype=np.uint8), 0.0, False, False, {}

    stack = FrameStack(3, axis=axis)
    space = stack.bind(Frames.observation_space)
    assert space.shape == ((3, 2, 2) if axis == 0 else (2, 2, 3))
    plain, stacked = [Frames(i) for i in range(4)], [FrameStackObservation(Frames(i), 3) for i in range(4)]
    rng = np.random.default_rng(0)
    begun = np.zeros(4, bool)
    for _ in range(60):
        slots = np.flatnonzero(rng.random(4) < 0.6)
        if not len(slots):
            continue
        starts = ~begun[slots] | (rng.random(len(slots)) < 0.2)
        begun[slots] = True
        frames, expected = (
            np.stack(
                [
                    envs[env].reset()[0] if first else envs[env].step(0)[0]
                    for env, first in zip(slots, starts, strict=True)
                ]
            )
            for envs in (plain, stacked)
        )
        made = stack(frames, Streams(slots, starts))
        np.testing.assert_array_equal(made, expected if axis == 0 else np.moveaxis(expected, 1, -1))
        assert space.contains(made[0])


def test_a_final_stack_leaves_no_trace() -> None:
    stack = FrameStack(2)
    stack.bind(Box(0.0, 9.0, (1,)))
    stack(np.array([[1.0], [5.0]]), streams(0, 1, starts=True))
    assert stack.final(np.array([[6.0]]), streams(1)).ravel().tolist() == [5.0, 6.0]
    assert stack(np.array([[7.0]]), streams(1)).ravel().tolist() == [5.0, 7.0]


def test_the_space_behind_a_function_is_found_out_from_samples() -> None:
    def halves(obs: Any) -> Any:
        return {
            "low": obs["image"][:, :2] // 2,
            "mean": obs["image"].mean((1, 2)),
            "dark": obs["image"][:, 0] < 9,
        }

    given = Dict(image=Box(0, 255, (4, 4), np.uint8))
    space = ObservationPipeline([halves], given).space
    assert space == Dict(
        low=Box(0, 255, (2, 4), np.uint8), mean=Box(-np.inf, np.inf, (), np.float64), dark=MultiBinary((4,))
    )
    assert list(space) == ["low", "mean", "dark"]  # type: ignore[call-overload]
    named = ObservationPipeline([Function(halves, space=Box(0.0, 1.0))], given)
    assert named.space == Box(0.0, 1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ObservationPipeline([lambda obs: obs["x"]], Box(0, 1)), "failed on 2 samples.*IndexError"),
        (lambda: ObservationPipeline([lambda obs: obs[0]], Box(0, 1, (3,))), "function of a batch"),
        (lambda: ObservationPipeline([lambda obs: 3], Box(0, 1)), "function of a batch"),
        (lambda: ObservationPipeline([FrameStack], Box(0, 1)), r"such as FrameStack\(4\)"),
        (lambda: ObservationPipeline(["flatten"], Box(0, 1)), "is not a connector"),
        (lambda: ObservationPipeline([Flatten()], Dict(t=Text(5))), "Flatten is for Box.*Text"),
        (lambda: ObservationPipeline([FrameStack(2)], Discrete(2)), "FrameStack is for Box"),
        (lambda: ObservationPipeline([MeanStdFilter()], Discrete(2)), "has none"),
        (lambda: FrameStack(0), "frames=0"),
        (lambda: FrameStack(4, axis=1), "axis=1"),
        (lambda: MeanStdFilter(clip=0), "clip=0"),
        (lambda: Function(3), "fn=3"),
    ],
)
def test_what_cannot_be_is_said_when_the_pipeline_is_made(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_pipelines_made_from_the_same_connectors_share_no_state() -> None:
    given = [FrameStack(2), MeanStdFilter()]
    first, second = (ObservationPipeline(given, Box(0.0, 9.0, (1,))) for _ in range(2))
    first(np.array([[4.0]]), streams(0, starts=True))
    assert first.connectors[1].running_stats.n == 1  # type: ignore[attr-defined]
    assert second.connectors[1].running_stats.n == 0  # type: ignore[attr-defined]
    second.load_state_dict(first.state_dict())
    assert second.connectors[1].running_stats.n == 1  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="connector '7'"):
        second.load_state_dict({"7": {}})
    with pytest.raises(StateError, match="FrameStack has no state"):
        second.load_state_dict({"0": {"n": 1}})


def test_action_connectors_are_bound_from_the_side_of_the_environment() -> None:
    class Choose(Connector):
        """One of five forces."""

        def bind(self, space: Any, policy: Any = None) -> Any:
            self._forces = np.linspace(space.low, space.high, 5).astype(np.float32)
            return Discrete(5)

        def __call__(self, values: Any, streams: Any) -> Any:
            return self._forces[values]

    pipeline = ActionPipeline([Choose(), ClipAction()], Box(-2.0, 2.0, (1,)))
    assert pipeline.space == Discrete(5)
    assert pipeline(np.array([0, 4, 2]), streams(0, 1, 2)).ravel().tolist() == [-2.0, 2.0, 0.0]


def test_actions_are_scaled_and_clipped() -> None:
    """Row 2.1, normalize_actions / clip_actions."""
    space = Dict(push=Box(0.0, 10.0, (1,)), turn=Discrete(2))
    pipeline = ActionPipeline([UnsquashAction(), ClipAction()], space)
    sent = pipeline({"push": np.array([[0.5], [7.0]], np.float32), "turn": np.array([0, 1])}, streams(0, 1))
    assert sent["push"].ravel().tolist() == [7.5, 10.0]
    assert pipeline.space is space


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (None, [-3, 0, 0.5]),
        (False, [-3, 0, 0.5]),
        (True, [-1, 0, 1]),
        (2, [-2, 0, 0.5]),
        (0.25, [-0.25, 0, 0.25]),
    ],
)
def test_rewards_are_clipped_as_said(how: Any, expected: list[float]) -> None:
    """Row 2.1, clip_rewards; section 5 item 30: whole numbers count too."""
    assert clip_rewards(np.array([-3, 0, 0.5]), how).tolist() == expected
