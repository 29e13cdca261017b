"""Subclasses of RLlib's VectorEnv are environments like those of gymnasium."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

import rlio
from rlio.errors import EnvError, OptionError

OBS = Dict(at=Box(-1000.0, 1000.0, (2,), np.float32), episode=Discrete(100))


class Counters:
    """RLlib's `VectorEnv`: environment i counts from 100 i; its episodes have 3 + i steps."""

    def __init__(self, num_envs: int = 2, *, fails: bool = False) -> None:
        self.observation_space, self.action_space, self.num_envs = OBS, Discrete(3), num_envs
        self.t, self.episodes = [0] * num_envs, [-1] * num_envs
        self.seeds: list[Any] = []
        self.actions: list[Any] = []
        self.fails = fails

    def _obs(self, i: int) -> dict[str, Any]:
        return {"at": np.array([100.0 * i, self.t[i]], np.float32), "episode": self.episodes[i]}

    def vector_reset(self, *, seeds: Any = None, options: Any = None) -> Any:
        self.seeds.append(seeds)
        for i in range(self.num_envs):
            self.t[i], self.episodes[i] = 0, self.episodes[i] + 1
        return [self._obs(i) for i in range(self.num_envs)], [{"seed": seed} for seed in seeds]

    def reset_at(self, index: int, *, seed: Any = None, options: Any = None) -> Any:
        if self.fails:
            return ValueError("no connection"), {}
        self.t[index], self.episodes[index] = 0, self.episodes[index] + 1
        return self._obs(index), {"again": self.episodes[index]}

    def vector_step(self, actions: list[Any]) -> Any:
        self.actions.append(actions)
        self.t = [t + 1 for t in self.t]
        everyone = range(self.num_envs)
        terminateds = [i == 0 and self.t[0] == 3 for i in everyone]
        truncateds = [i == 1 and self.t[1] == 4 for i in everyone]
        rewards = [float(10 * i + self.t[i]) for i in everyone]
        return (
            [self._obs(i) for i in everyone],
            rewards,
            terminateds,
            truncateds,
            [{"i": i} for i in everyone],
        )

    def get_sub_environments(self) -> list[Any]:
        return []


@pytest.mark.parametrize("how", ["object", "function", "native"])
def test_a_vector_env_of_rllib_is_sampled(how: str) -> None:
    made: list[Counters] = []

    def make() -> Counters:
        made.append(Counters())
        return made[-1]

    config = rlio.RolloutConfig(
        rollout_fragment_length=8, record_infos=True, vectorize_mode="native" if how == "native" else "sync"
    )
    env: Any = make() if how == "object" else make
    with rlio.RolloutWorker(env, rlio.RandomPolicy(), rollout=config, seed=0) as worker:
        rows = worker.sample()
        assert isinstance(rows, rlio.SampleBatch)
        ends = {0: [False, False, True], 1: [False] * 3 + [True]}
        for i, (steps, flag) in enumerate(((3, "terminateds"), (4, "truncateds"))):
            own = rows[np.flatnonzero(rows["env_id"] == i)]
            t = np.arange(8) % steps
            assert own["t"].tolist() == own["obs"]["at"][:, 1].tolist() == t.tolist()
            assert own["new_obs"]["at"][:, 1].tolist() == (t + 1).tolist(), "the true final observations"
            assert set(own["obs"]["at"][:, 0]) == {100.0 * i}
            assert own["obs"]["episode"].tolist() == own["new_obs"]["episode"].tolist()
            assert own["rewards"].tolist() == (10.0 * i + t + 1).tolist()
            assert own[flag].tolist() == (ends[i] * 3)[:8]
            assert [info["i"] for info in own["infos"]] == [i] * 8
        sent = np.array(made[0].actions)
        assert sent.tolist() == np.stack([rows["actions"][rows["env_id"] == i] for i in (0, 1)], 1).tolist()
        (seeds,) = made[0].seeds
        assert len(set(seeds)) == 2


def test_a_reset_that_returns_an_error_raises_it() -> None:
    config = rlio.RolloutConfig(rollout_fragment_length=8)
    with (
        rlio.RolloutWorker(Counters(fails=True), rlio.RandomPolicy(), rollout=config, seed=0) as worker,
        pytest.raises(EnvError, match="no connection"),
    ):
        worker.sample()


def test_options_that_a_vector_env_does_not_use_are_refused() -> None:
    for options in ({"num_envs": 3}, {"restart_failed_sub_environments": True}):
        with pytest.raises(OptionError):
            rlio.RolloutWorker(Counters(), rlio.RandomPolicy(), rollout=rlio.RolloutConfig(**options))
