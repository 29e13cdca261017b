"""`RecordExperience`, `RecordVectorExperience` and runners give one schema: they may share a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from further import further
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import rlio

LENGTH = 7


class Drawn(gym.Env[Any, Any]):
    """Draws its observations from any space; episodes of seven steps, with rewards of a dtype."""

    def __init__(self, observations: spaces.Space[Any], actions: spaces.Space[Any], reward: Any) -> None:
        self.observation_space, self.action_space = observations, actions
        self.reward = reward
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {"steps": 0}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.steps += 1
        over = self.steps == LENGTH
        return self.observation_space.sample(), self.reward(self.steps), over, False, {"steps": self.steps}


SPACES: list[tuple[spaces.Space[Any], spaces.Space[Any], Any]] = [
    (spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4), float),
    (spaces.Box(-1, 1, (3,), np.float64), spaces.Discrete(4, start=-1), np.float64),
    (spaces.Box(-1, 1, (), np.float32), spaces.Box(-1, 1, (2,), np.float64), np.float32),
    (spaces.Discrete(9), spaces.MultiDiscrete([3, 4]), int),
    (spaces.MultiBinary(5), spaces.MultiBinary(2), np.int64),
    (spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Box(-1, 1, (1,), np.float32), float),
    (spaces.Box(0, 255, (32, 40, 4), np.uint8), spaces.Discrete(2), float),
    (spaces.Box(-9, 9, (2,), np.int16), spaces.Discrete(3), bool),
    (spaces.Text(5), spaces.Discrete(2), float),
    (spaces.Sequence(spaces.Box(0, 1, (2,))), spaces.Text(4), float),
    (
        spaces.Dict({"image": spaces.Box(0, 255, (4, 4), np.uint8), "speed": spaces.Box(0, 1, (2,))}),
        spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))),
        float,
    ),
    (
        spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(5)}), "c": spaces.MultiDiscrete([2, 2])}),
        spaces.Dict({"turn": spaces.Discrete(2), "push": spaces.Box(-1, 1, (), np.float32)}),
        float,
    ),
]


def record_alone(root: str, make: Any, steps: int = 20, **options: Any) -> None:
    with rlio.RecordExperience(make(), root, seed=1, **options) as env:
        env.reset(seed=3)
        for _ in range(steps):
            env.record(action_logp=-0.5, value=np.zeros(2))
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()


def record_several(root: str, make: Any, mode: AutoresetMode, steps: int = 20, **options: Any) -> None:
    vector = SyncVectorEnv([make, make], autoreset_mode=mode)
    envs = rlio.RecordVectorExperience(vector, root, seed=2, **options)
    envs.reset(seed=3)
    for _ in range(steps):
        envs.record(action_logp=np.full(2, -0.5, np.float32), value=np.zeros((2, 2)))
        *_, terminated, truncated, _ = envs.step(envs.action_space.sample())
        if mode is AutoresetMode.DISABLED and (over := terminated | truncated).any():
            envs.reset(options={"reset_mask": over})
    envs.close()


@pytest.mark.parametrize(
    "mode", [AutoresetMode.NEXT_STEP, *further(AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)]
)
def test_both_recorders_give_one_schema_and_share_a_root(tmp_path: Path, mode: AutoresetMode) -> None:
    for number, (observations, actions, reward) in enumerate(SPACES):
        root = str(tmp_path / str(number))

        def make(given: Any = (observations, actions, reward)) -> Drawn:
            return Drawn(*given)

        options = {"infos": number % 2 == 0, "seeds": number % 3 == 0}
        record_alone(root, make, **options)
        record_several(root, make, mode, **options)
        dataset = rlio.open_dataset(root)
        assert len(dataset.schemas) == 1, (observations, actions)
        assert rlio.verify(root).ok
        assert dataset.spaces == (observations, actions)
        batch = rlio.DatasetReader(root, epochs=1, batch_size=200).sample()
        assert isinstance(batch, rlio.SampleBatch)
        assert batch["rewards"].dtype == np.float32
        assert set(batch["env_id"].tolist()) == {0, 1}
        for eps_id in set(batch["eps_id"].tolist()):
            chosen = batch["eps_id"] == eps_id
            assert batch["t"][chosen].tolist() == list(range(chosen.sum()))
            if options["infos"]:
                told = [info["steps"] for info in batch["infos"][chosen]]
                assert told == list(range(1, chosen.sum() + 1))


def test_a_policy_trains_on_rows_of_both_recorders_and_a_worker_in_one_root(tmp_path: Path) -> None:
    root = str(tmp_path / "all")

    def make() -> gym.Env[Any, Any]:
        return gym.make("CartPole-v1")

    record_alone(root, make, steps=60)
    record_several(root, make, AutoresetMode.NEXT_STEP, steps=60)
    rollout = rlio.RolloutConfig(rollout_fragment_length=60)
    with rlio.RolloutWorker(
        "CartPole-v1", rlio.RandomPolicy(), output=root, rollout=rollout, seed=5
    ) as worker:
        worker.sample()
    assert rlio.verify(root).ok
    data = rlio.open_dataset(root)
    learner = rlio.policies.BehaviourCloning(hidden=(8,))
    learner.bind(*data.spaces)
    rows = 0
    # A worker records more: what the policy said, whose weights it had.
    with rlio.DatasetReader(root, missing="drop", batch_size=50, shuffle=True, seed=0, epochs=1) as reader:
        for batch in reader:
            assert isinstance(batch, rlio.SampleBatch)
            assert np.isfinite(learner.learn_on_batch(batch)["loss"])
            rows += len(batch)
    assert rows == len(data) > 200
