"""One check for every value of a step, in all recorders and runners."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from pettingzoo import AECEnv, ParallelEnv

import rlio
from rlio.batch import Batch
from rlio.envs.leaves import leaves_of
from rlio.envs.multi_agent import MultiAgentEnv
from rlio.envs.values import as_flag, as_flags, as_reward, as_rewards, fitted
from rlio.errors import EnvError, SchemaError
from rlio.policies.random_policy import RandomPolicy
from rlio.writer import OutputWriter

SMALL = Box(-128, 127, (2,), np.int8)
PIXELS = Box(0, 255, (2,), np.uint8)
REALS = Box(-1e9, 1e9, (2,), np.float32)


def fit(space: gym.Space[Any], value: Any, rows: int | None = None) -> Any:
    (leaf,) = leaves_of(space)
    return fitted(leaf, value, column="obs", giver="it", rows=rows)


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (SMALL, np.array([127, -128])),
        (SMALL, np.array([1, 2], np.uint64)),
        (PIXELS, [0, 255]),
        (PIXELS, np.array([True, False])),
        (REALS, np.array([1.5, np.nan])),
        (REALS, np.array([np.inf, 3], np.float16)),
        (REALS, [1, 2]),
        (REALS, torch.tensor([1.0, 2.0], requires_grad=True)),
        (Discrete(3), 2),
        (Discrete(3), np.array(2, np.int8)),
        (Discrete(3), np.uint64(2)),
    ],
)
def test_a_value_that_the_dtype_holds_fits(space: Any, value: Any) -> None:
    made = fit(space, value)
    assert (made.dtype, made.shape) == (space.dtype, space.shape)
    np.testing.assert_array_equal(made, value.detach() if isinstance(value, torch.Tensor) else value)
    batch = torch.stack([value] * 3) if isinstance(value, torch.Tensor) else np.array([value] * 3)
    assert fit(space, batch, rows=3).shape == (3, *space.shape)


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (PIXELS, np.array([0.5, 0.9])),
        (PIXELS, np.array([-1, 0])),
        (PIXELS, np.array([1, 256], np.int16)),
        (SMALL, np.array([300, 1])),
        (SMALL, np.array([1, 2**63], np.uint64)),
        (REALS, np.array([1e300, 0])),
        (REALS, np.array([1 + 1j, 0])),
        (REALS, ["a", "b"]),
        (REALS, None),
        (REALS, [[1.0], [2.0, 3.0]]),
        (REALS, np.zeros(3, np.float32)),
        (REALS, np.ma.masked_array(np.zeros(2, np.float32), [True, False])),
        (Box(-9, 9, (2,), np.float16), np.array([1e5, 0])),
        (Discrete(3), 2.0),
        (Discrete(3), np.array([1])),
        (Discrete(3), 2**63),
        (Discrete(3), np.datetime64(5, "s")),
        (Text(5), 3),
        (Text(5), None),
    ],
)
def test_a_value_that_would_change_is_refused(space: Any, value: Any) -> None:
    with pytest.raises(SchemaError, match=r"^it gave ") as raised:
        fit(space, value)
    assert raised.value.column == "obs"


@pytest.mark.parametrize(
    "value",
    [1.5, np.float32(1.5), np.array(1.5), np.array([1.5]), [1.5], torch.tensor([1.5]), Decimal("1.5")],
)
def test_a_reward_of_one_element_is_a_number(value: Any) -> None:
    assert as_reward(value, giver="it") == 1.5
    assert type(as_reward(value, giver="it")) is float


@pytest.mark.parametrize(
    "value",
    [None, "1.5", b"1", [1.0, 2.0], [], np.zeros(0), 1e300, -(10**400), {"a": 1.0}, 1j, np.array([None]),
     np.datetime64(1, "s"), np.array("1.5"), np.ma.masked_array([1.5], [True])],
)  # fmt: skip
def test_a_reward_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(SchemaError, match=r"it gave the reward .* number that float32 holds"):
        as_reward(value, giver="it")


def test_rewards_of_a_vector_are_one_number_each() -> None:
    for given in ([1.0, 2.0], np.array([[1.0], [2.0]]), torch.tensor([1.0, 2.0]), np.array([1, 2])):
        assert as_rewards(given, 2, giver="it").tolist() == [1, 2]
    strange = [np.nan, np.inf]
    np.testing.assert_array_equal(as_rewards(np.array(strange), 2, giver="it"), strange)
    for wrong in ([1.0], [1.0, None], [1.0, "2"], np.zeros((2, 2)), [1e300, 0.0], 3.0):
        with pytest.raises(SchemaError, match="it gave the rewards"):
            as_rewards(wrong, 2, giver="it")


def test_flags_are_true_or_false() -> None:
    for given, flag in ((True, True), (np.False_, False), (1, True), (np.array([0.0]), False)):
        assert as_flag(given, column="terminateds", giver="it") is flag
    assert as_flag(torch.tensor([True]), column="terminateds", giver="it") is True
    assert as_flags(np.array([[1], [0]]), 2, column="terminateds", giver="it").tolist() == [True, False]
    for wrong in (None, "False", 2, 0.5, [True, False], np.nan):
        with pytest.raises(SchemaError, match="it gave"):
            as_flag(wrong, column="terminateds", giver="it")
    for wrongs in ([True], [True, None], ["False", "True"], [0, 2]):
        with pytest.raises(SchemaError, match="it gave"):
            as_flags(wrongs, 2, column="terminateds", giver="it")


# ---- the same faults, in every recorder and runner ----


class Kept(OutputWriter):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[rlio.SampleBatch] = []

    def _write(self, batch: Batch) -> None:
        parts = batch.policy_batches.values() if isinstance(batch, rlio.MultiAgentBatch) else [batch]
        self.batches += [part.copy() for part in parts]

    def rows(self, name: str) -> list[Any]:
        return [value for batch in self.batches for value in batch[name].tolist()]


#: What a step gives instead of the right value, and the space that it breaks.
FAULTS: dict[str, tuple[Box, dict[str, Any]]] = {
    "a float in uint8": (PIXELS, {"obs": np.array([0.5, 0.9], np.float32)}),
    "300 in int8": (SMALL, {"obs": np.array([300, 1])}),
    "another shape": (REALS, {"obs": np.zeros(3, np.float32)}),
    "1e300 in float32": (REALS, {"obs": np.array([1e300, 0.0])}),
    "a reward of None": (REALS, {"reward": None}),
    "a reward of two numbers": (REALS, {"reward": np.zeros(2)}),
    "a reward beyond float32": (REALS, {"reward": 1e300}),
}
#: How many rows each costs: an observation is in two rows.
COSTS = {fault: 2 if "obs" in given else 1 for fault, (_, given) in FAULTS.items()}


class Counts(gym.Env[Any, Any]):
    """Observations and rewards count the steps. One step, of episode 0, gives a wrong value."""

    action_space = Discrete(100)

    def __init__(self, fault: str = "", at: int = 3, length: int = 6) -> None:
        self.observation_space, self.wrong = FAULTS[fault] if fault else (REALS, {})
        self.at, self.length, self.episode = at, length, -1

    def _obs(self) -> Any:
        return np.array([self.episode, self.t], self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.episode = 0, self.episode + 1
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        wrong = self.wrong if (self.episode, self.t) == (0, self.at) else {}
        reward = wrong.get("reward", float(self.t))
        return wrong.get("obs", self._obs()), reward, self.t == self.length, False, {}


def steps_of(kept: Kept) -> list[list[float]]:
    """[episode, t] of each row; checks that each row is a step of the counting environment."""
    for batch in kept.batches:
        for row in batch.rows():
            assert row["new_obs"].tolist() == [row["obs"][0], row["obs"][1] + 1]
            assert row["rewards"] == row["obs"][1] + 1
            assert row["t"] == row["obs"][1], "the gap is seen in t"
    return kept.rows("obs")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_value_that_cannot_be_stored_costs_its_row_alone(fault: str) -> None:
    writer, refused = Kept(), []
    with rlio.RecordExperience(Counts(fault), writer) as env:
        for _ in range(2):
            env.reset()
            for step in range(6):
                try:
                    env.step(step)
                except SchemaError as error:
                    refused.append((step, str(error)))
    lost = [2, 3][: COSTS[fault]]
    assert [step for step, _ in refused] == lost
    expected = [[0, t] for t in range(6) if t not in lost] + [[1, t] for t in range(6)]
    assert steps_of(writer) == expected
    assert writer.rows("terminateds") == [t == 5 for _, t in expected]
    assert writer.closed


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
def test_a_value_that_cannot_be_stored_costs_the_rows_of_its_environment_alone(
    fault: str, mode: AutoresetMode
) -> None:
    space = FAULTS[fault][0]

    class Vector(VectorEnv[Any, Any, Any]):
        """Two environments, of which the second gives wrong values, in arrays that hold them."""

        num_envs, metadata = 2, {"autoreset_mode": mode}
        single_observation_space, single_action_space = space, Discrete(100)
        observation_space, action_space = batch_space(space, 2), batch_space(Discrete(100), 2)

        def __init__(self) -> None:
            self.envs = [Counts("", length=6), Counts(fault, length=6)]
            self.envs[0].observation_space = space
            self.ended = np.zeros(2, bool)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            mask = (options or {}).get("reset_mask", np.ones(2, bool))
            for env in range(2):
                if mask[env]:
                    self.envs[env].reset()
            self.ended[mask] = False
            return np.stack([env._obs() for env in self.envs]), {}

        def step(self, actions: Any) -> Any:
            results = []
            for number, env in enumerate(self.envs):
                if mode is AutoresetMode.NEXT_STEP and self.ended[number]:
                    results.append((env.reset()[0], 0.0, False))
                else:
                    results.append(env.step(actions[number])[:3])
            obs, rewards, ended = (list(values) for values in zip(*results, strict=True))
            self.ended = np.array(ended)
            infos: dict[str, Any] = {}
            if mode is AutoresetMode.SAME_STEP and any(ended):
                finals = np.full(2, None, object)
                for env in np.flatnonzero(ended).tolist():
                    finals[env], obs[env] = obs[env], self.envs[env].reset()[0]
                infos = {"final_obs": finals, "_final_obs": self.ended.copy()}
            # Objects if the shapes differ, as in a list that a user joins.
            shapes = {np.shape(value) for value in obs}
            batched = np.stack(obs) if len(shapes) == 1 else obs
            given = rewards if any(np.ndim(r) or r is None for r in rewards) else np.array(rewards)
            return batched, given, self.ended.copy(), np.zeros(2, bool), infos

    # Floats of one environment make the whole batch float.
    hit = (0, 1) if space is PIXELS else (1,)
    writer, refused = Kept(), []
    with rlio.RecordVectorExperience(Vector(), writer) as recorder:
        recorder.reset()
        for step in range(13 if mode is AutoresetMode.NEXT_STEP else 12):
            try:
                *_, ended, _, _ = recorder.step(np.full(2, step))
            except SchemaError as error:
                refused.append((step, str(error)))
                ended = recorder.env.ended
            if mode is AutoresetMode.DISABLED and np.any(ended):
                recorder.reset(options={"reset_mask": np.array(ended)})
    lost = [2, 3][: COSTS[fault]]
    assert [step for step, _ in refused] == lost
    assert all(f"not recorded in environment {', '.join(map(str, hit))}:" in text for _, text in refused)
    found = [[env, *row] for env, row in zip(writer.rows("env_id"), steps_of(writer), strict=True)]
    gone = [[env, 0, t] for env in hit for t in lost]
    places = [[env, episode, t] for env in range(2) for episode in range(2) for t in range(6)]
    assert sorted(found) == [place for place in places if place not in gone]


def test_an_action_that_does_not_fit_is_refused_before_the_step() -> None:
    writer = Kept()
    env = Counts()
    with rlio.RecordExperience(env, writer) as recorder:
        recorder.reset()
        recorder.step(1)
        for action in (2.9, None, "2", [1, 2], np.array([1])):
            with pytest.raises(SchemaError, match="the loop gave"):
                recorder.step(action)
        assert env.t == 1, "the environment was not stepped"
        recorder.step(np.int8(2))
    assert (writer.rows("actions"), writer.rows("t")) == ([1, 2], [0, 1])
    envs = SyncVectorEnv([Counts, Counts])
    vector = rlio.RecordVectorExperience(envs, writer2 := Kept())
    vector.reset()
    for actions in ([1, 2.5], [1], np.array([[1], [2]]), None):
        with pytest.raises(SchemaError, match="the loop gave"):
            vector.step(actions)
    vector.step([1, 2])
    vector.close()
    assert (writer2.rows("actions"), writer2.rows("t")) == ([1, 2], [0, 0])


@pytest.mark.parametrize("which", ["observation_space", "action_space"])
@pytest.mark.parametrize("space", [Dict({}), Tuple(())], ids=str)
def test_a_space_without_values_is_refused(space: gym.Space[Any], which: str) -> None:
    env = Counts()
    setattr(env, which, space)
    with pytest.raises(SchemaError, match=r"has no values"):
        rlio.RecordExperience(env, Kept())
    with pytest.raises(SchemaError, match=r"has no values"):
        rlio.RolloutWorker(lambda: env, RandomPolicy(), output=Kept())


def test_a_flag_that_is_none_ends_the_episode_of_a_recorder() -> None:
    class Forgets(Counts):
        def step(self, action: Any) -> Any:
            obs, reward, terminated, _, info = super().step(action)
            return obs, reward, terminated, None if self.t == 2 else False, info

    writer = Kept()
    with rlio.RecordExperience(Forgets(), writer) as env:
        env.reset()
        env.step(0)
        with pytest.raises(SchemaError, match="truncateds"):
            env.step(0)
        with pytest.raises(rlio.errors.OptionError, match="call reset"):
            env.step(0)
        env.reset()
        env.step(0)
    assert steps_of(writer) == [[0, 0], [1, 0]]


class OneAgent(MultiAgentEnv):
    def __init__(self, fault: str) -> None:
        self.env = Counts(fault)
        self.possible_agents = ["a"]
        self.observation_spaces = {"a": self.env.observation_space}
        self.action_spaces = {"a": self.env.action_space}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = self.env.reset()
        return {"a": obs}, {"a": info}

    def step(self, actions: Any) -> Any:
        obs, reward, end, cut, info = self.env.step(actions["a"])
        return {"a": obs}, {"a": reward}, {"a": end, "__all__": end}, {"a": cut, "__all__": cut}, {"a": info}


CONFIG = rlio.RolloutConfig(rollout_fragment_length=10, check_env=False)
RUNNERS: dict[str, Callable[[str], Any]] = {
    "environment": lambda fault: rlio.EnvRunner(
        lambda context=None: Counts(fault), RandomPolicy(), config=CONFIG, seed=0
    ),
    "vector environment": lambda fault: rlio.EnvRunner(
        SyncVectorEnv([lambda: Counts(fault)], copy=False), RandomPolicy(), config=CONFIG, seed=0
    ),
    "agents": lambda fault: rlio.MultiAgentEnvRunner(
        lambda context=None: OneAgent(fault), {"default_policy": RandomPolicy()}, config=CONFIG, seed=0
    ),
}


# gymnasium's SyncVectorEnv casts most observations and rewards itself, before rlio sees them.
OF_RUNNERS = [
    (kind, fault)
    for kind in RUNNERS
    for fault in FAULTS
    if kind != "vector environment" or fault in ("another shape", "a reward beyond float32")
]


@pytest.mark.parametrize(("kind", "fault"), OF_RUNNERS)
def test_a_runner_refuses_what_a_recorder_refuses(kind: str, fault: str) -> None:
    runner = RUNNERS[kind](fault)
    with pytest.raises((SchemaError, EnvError)):
        runner.run()
    runner.stop()


@pytest.mark.parametrize("kind", ["environment", "agents"])
def test_a_runner_takes_a_reward_of_shape_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAULTS, "shape one", (REALS, {"reward": np.array([3.0])}))
    runner = RUNNERS[kind]("shape one")
    batch = runner.run()
    rows = batch.policy_batches["default_policy"] if isinstance(batch, rlio.MultiAgentBatch) else batch
    assert rows["rewards"].tolist()[:6] == [1, 2, 3, 4, 5, 6]
    runner.stop()


class Falls(ParallelEnv):  # type: ignore[misc,type-arg]
    """Two agents count; the second gives wrong values."""

    metadata = {"name": "counts_v0"}  # noqa: RUF012
    possible_agents = ["a", "b"]  # noqa: RUF012

    def __init__(self, fault: str) -> None:
        self.games = {"a": Counts(""), "b": Counts(fault)}
        self.games["a"].observation_space = FAULTS[fault][0]

    def observation_space(self, agent: str) -> Any:
        return self.games[agent].observation_space

    def action_space(self, agent: str) -> Any:
        return self.games[agent].action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        return {agent: game.reset()[0] for agent, game in self.games.items()}, {}

    def step(self, actions: Any) -> Any:
        results = {agent: self.games[agent].step(action) for agent, action in actions.items()}
        parts = [{agent: result[part] for agent, result in results.items()} for part in range(5)]
        if any(parts[2].values()):
            self.agents = []
        return tuple(parts)


class Turns(AECEnv):  # type: ignore[misc,type-arg]
    """The same agents, in turns."""

    metadata = {"name": "turns_v0"}  # noqa: RUF012

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.inner = Falls(fault)
        self.possible_agents = ["a", "b"]
        self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space

    def observe(self, agent: str) -> Any:
        return self.obs[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(self.possible_agents)
        self.obs, _ = self.inner.reset()
        self.rewards: dict[str, Any] = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards: dict[str, Any] = dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys("ab", False), dict.fromkeys("ab", False)
        self.infos: dict[str, Any] = {"a": {}, "b": {}}
        self.agent_selection = "a"

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        obs, reward, end, _, _ = self.inner.games[agent].step(action)
        self.obs[agent], self._cumulative_rewards[agent], self.terminations[agent] = obs, reward, end
        self.agent_selection = "b" if agent == "a" else "a"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_value_that_cannot_be_stored_costs_the_rows_of_its_agent_alone(fault: str) -> None:
    writer, refused = Kept(), 0
    with rlio.RecordParallelEnv(Falls(fault), writer) as env:
        for _ in range(2):
            env.reset()
            while env.agents:
                try:
                    env.step(dict.fromkeys(env.agents, 1))
                except SchemaError:
                    refused += 1
    assert refused == COSTS[fault]
    lost = [("b", 0, t) for t in [2, 3][: COSTS[fault]]]
    found = [(name, *row) for name, row in zip(writer.rows("agent_id"), steps_of(writer), strict=True)]
    places = [(agent, episode, t) for agent in "ab" for episode in range(2) for t in range(6)]
    assert sorted(found) == [place for place in places if place not in lost]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_value_that_cannot_be_stored_costs_the_rows_of_its_agent_alone_in_turns(fault: str) -> None:
    writer, refused = Kept(), 0
    with rlio.RecordAECEnv(Turns(fault), writer) as env:
        for _ in range(2):
            env.reset()
            for _ in env.agent_iter():
                *_, terminated, truncated, _ = env.last()
                try:
                    env.step(None if terminated or truncated else 1)
                except SchemaError:
                    refused += 1
    assert refused == COSTS[fault]
    lost = [("b", 0, t) for t in [2, 3][: COSTS[fault]]]
    found = [
        (name, *obs)
        for batch in writer.batches
        for name, obs in zip(batch["agent_id"].tolist(), batch["obs"].tolist(), strict=True)
    ]
    places = [(agent, episode, t) for agent in "ab" for episode in range(2) for t in range(6)]
    assert sorted(found) == [place for place in places if place not in lost]
