"""RLlib's runners call callbacks as `tests/golden/rllib_callbacks/calls.json` says, which RLlib wrote."""

from __future__ import annotations

import runpy
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import rlio

pytest.importorskip("ray.rllib", reason="ray[rllib] is not installed")
pytest.importorskip("torch", reason="torch is not installed")

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from callback_calls import GOLDEN, SCENARIOS, Lengths, Steps, golden  # noqa: E402
from ray.rllib.callbacks.callbacks import RLlibCallback  # noqa: E402

# RLlib uses what others have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

MAKE: Any = runpy.run_path(str(GOLDEN.with_name("make.py")))


@pytest.mark.parametrize("name", SCENARIOS)
def test_rllib_calls_callbacks_as_the_golden_list_says(name: str) -> None:
    assert MAKE["calls_of"](SCENARIOS[name]) == golden()[name]


@pytest.mark.parametrize(
    ("clip", "rewards", "sums"),
    [(True, [1, 1, 1, 1], 3), (0.5, [0.5] * 4, 1.5), (2.0, [1, 2, 2, 1], 5), (2, [1, 2, 3, 1], 6)],
)
def test_rewards_are_clipped_as_the_page_says(clip: Any, rewards: list[float], sums: float) -> None:
    """Episodes have rewards 1, 2, 3. A float is a bound, for RLlib's metrics too; RLlib ignores an int."""
    worker = MAKE["_old"](
        SCENARIOS["old, one agent, 1 env, fragments of 4"], Steps, RLlibCallback, clip_rewards=clip
    )
    assert worker.sample()["default_policy"]["rewards"].tolist() == rewards
    assert [each.episode_reward for each in worker.get_metrics()] == [sums]
    worker.stop()
    config = rlio.RolloutConfig(rollout_fragment_length=4, clip_rewards=clip)
    with rlio.RolloutWorker(lambda: Steps(), rlio.RandomPolicy(), rollout=config, seed=0) as own:
        bound = [1, 2, 2, 1] if clip == 2 else rewards
        Lengths.made = count()
        assert list(own.sample()["rewards"]) == bound
        assert [float(total) for total in own.get_metrics().summarise()["hist_stats"]["episode_reward"]] == [
            6
        ]
