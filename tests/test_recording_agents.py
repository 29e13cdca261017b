"""`RecordParallelEnv`, `RecordAECEnv`: your own loops in PettingZoo's environments, recorded as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from numpy.testing import assert_array_equal
from pettingzoo import ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec
from pettingzoo.utils.wrappers import OrderEnforcingWrapper
from test_pettingzoo import Countdown, Falls

import rlio
from rlio import DatasetReader, MultiAgentBatch, RecordAECEnv, RecordParallelEnv, open_dataset
from rlio.errors import OptionError, SchemaError


def read(root: Path) -> dict[str, rlio.SampleBatch]:
    batch = DatasetReader(root, epochs=1, batch_size=10_000, shuffle=False).sample()
    assert isinstance(batch, MultiAgentBatch)
    return dict(batch.policy_batches)


def play_parallel(env: Any, episodes: int) -> None:
    for episode in range(episodes):
        env.reset(seed=episode)
        while env.agents:
            env.step({agent: int(agent[1:]) % 2 for agent in env.agents})


def play_in_turns(env: Any, episodes: int, *, leave_at: int = 0) -> None:
    for _ in range(episodes):
        env.reset()
        for _ in env.agent_iter():
            obs, _, terminated, truncated, _ = env.last()
            if leave_at and obs["observation"][0] % 100 <= leave_at:
                break
            env.step(None if terminated or truncated else int(obs["action_mask"][1]))


def test_every_step_of_every_agent_is_a_row(tmp_path: Path) -> None:
    with RecordParallelEnv(Falls(), tmp_path, seeds=True) as env:
        play_parallel(env, 2)
    (rows,) = read(tmp_path).values()
    # Agent i falls after i + 2 steps; p3 and p4 are cut off together at step 5. They see who and when.
    expected = [(f"p{i}", t) for i in range(5) for t in range(min(i + 2, 5))] * 2
    assert sorted(zip(rows["agent_id"], rows["t"].tolist(), strict=True)) == sorted(expected)
    number = np.array([int(name[1:]) for name in rows["agent_id"]])
    assert_array_equal(rows["agent_index"], number)
    assert_array_equal(rows["obs"], np.stack([number, rows["t"]], 1))
    assert_array_equal(rows["new_obs"], np.stack([number, rows["t"] + 1], 1))
    assert_array_equal(rows["actions"], number % 2)
    assert_array_equal(rows["rewards"], rows["t"] + 1)
    assert_array_equal(rows["terminateds"], (rows["t"] == number + 1) & (number < 3))
    assert_array_equal(rows["truncateds"], (rows["t"] == 4) & (number >= 3))
    assert sorted(set(zip(rows["eps_id"].tolist(), rows["env_seed"].tolist(), strict=True))) == sorted(
        zip(dict.fromkeys(rows["eps_id"].tolist()), [0, 1], strict=True)
    )


def test_stored_episodes_bear_the_names_of_their_agents(tmp_path: Path) -> None:
    with RecordParallelEnv(Falls(), tmp_path) as env:
        play_parallel(env, 1)
    data = open_dataset(tmp_path)
    episodes = [data.episode(number) for number in range(data.episode_count)]
    assert [(episode.agent_id, len(episode)) for episode in episodes] == [
        ("p0", 2), ("p1", 3), ("p2", 4), ("p3", 5), ("p4", 5)
    ]  # fmt: skip
    # Agents are told apart by their names alone, too: those rows have no agent_index.
    with rlio.ParquetWriter(tmp_path / "again") as writer:
        joined = rlio.concat_samples([episode.to_batch() for episode in episodes])
        assert "agent_index" not in joined
        writer.write(joined[np.random.default_rng(0).permutation(len(joined))].copy())
    again = open_dataset(tmp_path / "again")
    assert again.episode_count == 5
    (schema,) = again.schemas.values()
    assert "agent_id" in schema.policies["default_policy"].columns


def test_the_rows_are_those_of_a_runner_that_plays_the_same(tmp_path: Path) -> None:
    """An agent acts, others act, and its row ends with what it sees at its next turn."""
    with RecordAECEnv(OrderEnforcingWrapper(Countdown()), tmp_path) as env:
        play_in_turns(env, 1)
    (rows,) = read(tmp_path).values()
    found = {
        (name, t): (obs, action, reward, new_obs, end, cut)
        for name, t, obs, action, reward, new_obs, end, cut in zip(
            rows["agent_id"],
            rows["t"].tolist(),
            rows["obs"]["observation"].ravel().tolist(),
            rows["actions"].tolist(),
            rows["rewards"].tolist(),
            rows["new_obs"]["observation"].ravel().tolist(),
            rows["terminateds"].tolist(),
            rows["truncateds"].tolist(),
            strict=True,
        )
    }

    class Greedy(rlio.Policy):
        def compute_actions(
            self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
        ) -> Any:
            return obs["action_mask"][:, 1].astype(np.int64), state, {}

    config = rlio.RolloutConfig(batch_mode="complete_episodes", rollout_fragment_length=1)
    policies = {"default_policy": Greedy()}
    runner = rlio.MultiAgentEnvRunner(lambda context=None: Countdown(), policies, config=config)
    sampled = runner.run().policy_batches["default_policy"]
    expected = {
        ("xyz"[agent], t): (obs, action, reward, new_obs, end, cut)
        for agent, t, obs, action, reward, new_obs, end, cut in zip(
            sampled["agent_index"].tolist(),
            sampled["t"].tolist(),
            sampled["obs"]["observation"].ravel().tolist(),
            sampled["actions"].tolist(),
            sampled["rewards"].tolist(),
            sampled["new_obs"]["observation"].ravel().tolist(),
            sampled["terminateds"].tolist(),
            sampled["truncateds"].tolist(),
            strict=True,
        )
    }
    assert found == expected
    runner.stop()


def test_an_episode_that_is_left_ends_with_what_the_agents_would_see(tmp_path: Path) -> None:
    with RecordAECEnv(Countdown(), tmp_path) as env:
        play_in_turns(env, 2, leave_at=3)
    (rows,) = read(tmp_path).values()
    assert not (rows["terminateds"] | rows["truncateds"]).any()
    assert rows["agent_id"].tolist() == ["x", "y", "z"] * 2
    # Three are left: each sees them, and its own number.
    assert rows["new_obs"]["observation"].ravel().tolist() == [3, 103, 203] * 2


def test_agents_of_unlike_spaces_have_policies_of_their_own(tmp_path: Path) -> None:
    spaces = {f"p{i}": Discrete(3 + i % 2) for i in range(5)}

    class Unlike(Falls):
        def action_space(self, agent: str) -> Any:
            return spaces[agent]

    with RecordParallelEnv(Unlike(), tmp_path / "own") as env:
        play_parallel(env, 1)
    assert {name: len(rows) for name, rows in read(tmp_path / "own").items()} == {
        "p0": 2, "p1": 3, "p2": 4, "p3": 5, "p4": 5
    }  # fmt: skip
    mapping = {"policy_mapping_fn": lambda agent: ("even", "odd")[int(agent[1:]) % 2]}
    with RecordParallelEnv(Unlike(), tmp_path / "two", **mapping) as env:
        play_parallel(env, 1)
    assert {name: len(rows) for name, rows in read(tmp_path / "two").items()} == {"even": 11, "odd": 8}
    with pytest.raises(OptionError, match="policy_mapping_fn="):
        RecordParallelEnv(Unlike(), tmp_path / "no", policy_mapping_fn=lambda agent: "all")
    with pytest.raises(OptionError, match="expected a policy id"):
        RecordParallelEnv(Falls(), tmp_path / "no", policy_mapping_fn=lambda agent: 3)  # type: ignore[arg-type,return-value]
    assert not (tmp_path / "no").exists()


def test_columns_belong_to_the_agents_next_step(tmp_path: Path) -> None:
    with RecordParallelEnv(Falls(), tmp_path / "p") as env:
        env.reset()
        for step in range(2):
            for agent in env.agents:
                env.record(agent, action_logp=-1.0 - step, value=np.full(2, int(agent[1:])))
            env.step(dict.fromkeys(env.agents, 0))
    (rows,) = read(tmp_path / "p").values()
    assert_array_equal(rows["action_logp"], -1.0 - rows["t"])
    assert rows["action_logp"].dtype == np.float32
    assert_array_equal(rows["value"], np.stack([rows["agent_index"]] * 2, 1))
    with RecordAECEnv(Countdown(), tmp_path / "a") as turns:
        turns.reset()
        for _ in turns.agent_iter():
            *_, terminated, truncated, _ = turns.last()
            if not (terminated or truncated):
                turns.record(action_logp=-float(turns.left))
            turns.step(None if terminated or truncated else 0)
    (rows,) = read(tmp_path / "a").values()
    assert_array_equal(rows["action_logp"], -(rows["obs"]["observation"].ravel() % 100))


def test_columns_are_the_same_for_all_agents_and_never_the_recorders_own(tmp_path: Path) -> None:
    env = RecordParallelEnv(Falls(), tmp_path)
    for name in ("agent_id", "agent_index", "t", "obs"):
        with pytest.raises(OptionError, match="records this column itself"):
            env.record("p0", **{name: 1})
    env.reset()
    env.record("p0", value=1.0)
    with pytest.raises(SchemaError, match="all agents of a policy have the same columns"):
        env.step(dict.fromkeys(env.agents, 0))
    env.step(dict.fromkeys(env.agents, 0))
    env.close()
    (rows,) = read(tmp_path).values()
    assert rows["t"].tolist() == [0] * 5, "the refused call took no step"


def test_a_step_that_fails_leaves_no_open_row(tmp_path: Path) -> None:
    class Fragile(Falls):
        broken = False

        def step(self, actions: Any) -> Any:
            if self._t == 1 and not self.broken:
                self.broken = True
                raise ConnectionError("the robot")
            return super().step(actions)

    with RecordParallelEnv(Fragile(), tmp_path) as env:
        env.reset()
        env.step(dict.fromkeys(env.agents, 0))
        with pytest.raises(ConnectionError):
            env.step(dict.fromkeys(env.agents, 0))
        with pytest.raises(OptionError, match="call reset"):
            env.step(dict.fromkeys(env.agents, 0))
        play_parallel(env, 1)
    (rows,) = read(tmp_path).values()
    assert len(rows) == 5 + 19


def test_an_agent_that_ends_without_an_observation_has_none(tmp_path: Path) -> None:
    class Silent(Falls):
        def step(self, actions: Any) -> Any:
            obs, *rest = super().step(actions)
            return {agent: value for agent, value in obs.items() if not rest[1][agent]}, *rest

    with RecordParallelEnv(Silent(), tmp_path) as env:
        play_parallel(env, 1)
    (rows,) = read(tmp_path).values()
    assert_array_equal(rows["new_obs_valid"], ~rows["terminateds"])
    assert rows["terminateds"].sum() == 3


def test_an_agent_that_waits_sums_its_rewards(tmp_path: Path) -> None:
    class Every2(ParallelEnv):  # type: ignore[misc,type-arg]
        """Agent b acts in every other step."""

        metadata = {"name": "every2_v0"}  # noqa: RUF012
        possible_agents = ["a", "b"]  # noqa: RUF012

        def observation_space(self, agent: str) -> Any:
            return box

        def action_space(self, agent: str) -> Any:
            return two

        def _obs(self) -> Any:
            return {a: np.full(1, self.t, np.float32) for a in ("a", "b") if a == "a" or self.t % 2 == 0}

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            self.agents, self.t = ["a", "b"], 0
            return self._obs(), {}

        def step(self, actions: Any) -> Any:
            self.t += 1
            over = self.t == 6
            flags, no = dict.fromkeys("ab", over), dict.fromkeys("ab", False)
            self.agents = [] if over else ["a", "b"]
            return self._obs(), dict.fromkeys("ab", 1.0), flags, no, {}

    box, two = Box(0, 9, (1,), np.float32), Discrete(2)
    with RecordParallelEnv(Every2(), tmp_path) as env:
        obs, _ = env.reset()
        while env.agents:
            obs, *_ = env.step(dict.fromkeys(obs, 1))
    (rows,) = read(tmp_path).values()
    of_b = rows[rows["agent_id"] == "b"]
    assert of_b["t"].tolist() == [0, 2, 4]
    assert of_b["rewards"].tolist() == [2, 2, 2]
    assert of_b["new_obs"].ravel().tolist() == [2, 4, 6]


def test_attributes_and_wrappers_are_those_of_the_environment(tmp_path: Path) -> None:
    env = RecordParallelEnv(Falls(), tmp_path / "p")
    assert env.possible_agents == [f"p{i}" for i in range(5)]
    assert env.metadata["name"] == "falls_v0"
    assert env.env.closed is False
    with pytest.raises(AttributeError):
        _ = env.nothing
    env.close()
    assert env.env.closed
    # Converted environments, whose wrappers hide private attributes.
    with RecordAECEnv(parallel_to_aec(Falls()), tmp_path / "a") as turns:
        turns.reset()
        for _ in range(7):
            *_, terminated, truncated, _ = turns.last()
            turns.step(None if terminated or truncated else 0)
    assert len(open_dataset(tmp_path / "a")) == 7


@pytest.mark.parametrize(
    ("recorder", "env", "advice"),
    [
        (RecordParallelEnv, lambda: Countdown(), "RecordAECEnv"),
        (RecordAECEnv, lambda: Falls(), "RecordParallelEnv"),
        (RecordAECEnv, object, "RecordExperience"),
        (RecordParallelEnv, lambda: None, "RecordVectorExperience"),
    ],
)
def test_an_environment_of_another_kind_is_refused(
    tmp_path: Path, recorder: Any, env: Any, advice: str
) -> None:
    with pytest.raises(OptionError, match=advice):
        recorder(env(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_new_recording_of_agents_refuses_a_root_with_rows(tmp_path: Path) -> None:
    with rlio.ParquetWriter(tmp_path) as writer:
        writer.write(rlio.SampleBatch(t=[0, 1]))
    with pytest.raises(OptionError, match="holds 2 rows"):
        RecordParallelEnv(Falls(), tmp_path, mode="new")
