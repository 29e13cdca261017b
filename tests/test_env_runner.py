"""The env runner: true transitions in every autoreset mode, exact sizes, seeds, ids, whole episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rlio.batch import SampleBatch
from rlio.envs.multi_agent import make_multi_agent
from rlio.envs.vector import VectorStepper
from rlio.errors import ClosedError, OptionError, SchemaError, StateError
from rlio.policies.policy import Policy
from rlio.policies.random_policy import RandomPolicy
from rlio.readers.sampler_input import Runner
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner
from rlio.sampling.recorder import until_last

MODES = list(AutoresetMode)
ID = 1_000_000


class Counter(gym.Env):
    """Observes (number of the episode in this env, step in the episode); ends now and then, in both ways."""

    action_space = Discrete(3)

    def __init__(self, longest: int = 12, scale: int = 1) -> None:
        self.observation_space = Box(0, np.inf, (2,), np.float64)
        self._longest = longest
        self._scale = scale
        self._episode = -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if seed is not None and self._episode < 0:
            self._id = seed % 1000
        self._episode += 1
        self._t = 0
        self._end = int(self.np_random.integers(1, self._longest + 1))
        return self._obs(), {"reset": True}

    def _obs(self) -> np.ndarray:
        return np.array([self._id * ID + self._episode, self._t], np.float64)

    def step(self, action: Any) -> Any:
        self._t += 1
        ends = self._t == self._end
        truncates = ends and self._end % 2 == 0
        reward = self._scale * (100 * self._t + int(action))
        return self._obs(), reward, ends and not truncates, truncates, {"t": self._t, "action": int(action)}


class Chosen(Policy):
    """Acts as t mod 3, found from the observation, and records what it saw."""

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        actions = obs[:, 1].astype(np.int64) % 3
        return actions, state, {"seen": obs.copy(), "timestep": np.full(len(obs), timestep)}


def vector(mode: AutoresetMode, kind: Any = SyncVectorEnv, n: int = 3, longest: int = 12) -> Any:
    return kind([lambda: Counter(longest)] * n, copy=False, autoreset_mode=mode)


def runner_of(mode: AutoresetMode, kind: Any = SyncVectorEnv, **config: Any) -> EnvRunner:
    return EnvRunner(vector(mode, kind), Chosen(), config=RolloutConfig(**config), seed=5)


def check_rows(batch: SampleBatch) -> None:
    """Each row is a transition of the counter, and rows follow one another."""
    t, obs, new_obs = batch["t"], batch["obs"], batch["new_obs"]
    assert np.array_equal(obs[:, 1], t)
    assert np.array_equal(new_obs[:, 1], t + 1)
    assert np.array_equal(new_obs[:, 0], obs[:, 0])
    assert np.array_equal(batch["seen"], obs)
    assert np.array_equal(batch["actions"], t % 3)
    assert np.array_equal(batch["rewards"], 100 * (t + 1) + t % 3)
    follows = batch["eps_id"][1:] == batch["eps_id"][:-1]
    assert np.array_equal(t[1:][follows], t[:-1][follows] + 1)
    assert not batch["dones"][:-1][follows].any()
    # an episode's id and what the env says of the episode are one to one
    assert np.array_equal(follows, obs[1:, 0] == obs[:-1, 0])


def check_stream(parts: list[SampleBatch]) -> None:
    """The fragments of a run, put together: nothing is missing within an episode, and ends are ends."""
    for env in np.unique(parts[0]["env_id"]):
        rows = [part[np.flatnonzero(part["env_id"] == env)] for part in parts]
        eps_id = np.concatenate([part["eps_id"] for part in rows])
        t = np.concatenate([part["t"] for part in rows])
        done = np.concatenate([part["dones"] for part in rows])
        episode = np.concatenate([part["obs"][:, 0] for part in rows])
        change = eps_id[1:] != eps_id[:-1]
        assert np.array_equal(change, done[:-1])
        assert np.array_equal(t, _counted(change))
        assert np.array_equal(np.diff(episode), change)
        truncated = np.concatenate([part["truncateds"] for part in rows])
        terminated = np.concatenate([part["terminateds"] for part in rows])
        assert truncated.any()
        assert terminated.any()
        assert not (truncated & terminated).any()
        assert np.array_equal(truncated[done], (t[done] + 1) % 2 == 0)


def _counted(change: np.ndarray) -> np.ndarray:
    starts = np.concatenate([[0], np.flatnonzero(change) + 1])
    position = np.arange(len(change) + 1)
    return position - starts[np.searchsorted(starts, position, side="right") - 1]


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv], ids=["sync", "async"])
@pytest.mark.each_value_once
def test_every_recorded_row_is_a_true_transition(mode: AutoresetMode, kind: Any) -> None:
    fragment, fragments = (150, 5) if kind is SyncVectorEnv else (40, 3)
    runner = runner_of(mode, kind, rollout_fragment_length=fragment)
    parts = [runner.run() for _ in range(fragments)]
    runner.stop()
    for part in parts:
        assert len(part) == 3 * fragment
        check_rows(part)
    check_stream(parts)
    if mode is not AutoresetMode.NEXT_STEP:
        assert all(np.array_equal(np.bincount(part["env_id"]), [fragment] * 3) for part in parts)
    assert runner.timesteps >= 3 * fragment * fragments
    assert runner.steps_dropped == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_complete_episodes_are_whole_and_none_is_lost(mode: AutoresetMode) -> None:
    runner = runner_of(mode, rollout_fragment_length=40, batch_mode="complete_episodes")
    parts = [runner.run() for _ in range(10)]
    for part in parts:
        check_rows(part)
        assert 3 * 40 <= len(part) < 3 * 40 + 12
        for episode in part.split_by_episode():
            assert episode["t"][0] == 0
            assert episode["dones"][-1]
    check_stream(parts)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_episodes_of_one_step_are_recorded(mode: AutoresetMode) -> None:
    runner = EnvRunner(vector(mode, longest=1), Chosen(), config=RolloutConfig(rollout_fragment_length=10))
    for _ in range(3):
        batch = runner.run()
        check_rows(batch)
        assert len(batch) == 30
        assert batch["dones"].all()
        assert len(np.unique(batch["eps_id"])) == 30


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_infos_belong_to_their_transition_also_at_the_end_of_an_episode(mode: AutoresetMode) -> None:
    batch = runner_of(mode, rollout_fragment_length=100, record_infos=True).run()
    assert [info["t"] for info in batch["infos"]] == (batch["t"] + 1).tolist()
    assert [info["action"] for info in batch["infos"]] == batch["actions"].tolist()
    assert batch["dones"].any()
    assert "reset" not in batch["infos"][0]


def test_infos_are_left_out_unless_asked_for() -> None:
    assert "infos" not in runner_of(AutoresetMode.SAME_STEP, rollout_fragment_length=5).run()


def test_an_exact_number_of_whole_episodes_comes_back() -> None:
    runner = runner_of(AutoresetMode.SAME_STEP)
    seen: set[int | str] = set()
    for k in (1, 2, 7, 1):
        episodes = runner.sample(num_episodes=k)
        assert len(episodes) == k
        assert all(e.t_started == 0 and e.is_done and e.has_final_observation for e in episodes)
        seen |= {e.id_ for e in episodes}
    assert len(seen) == 11
    assert isinstance(runner, Runner)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_episodes_that_wait_for_the_next_call_keep_their_final_observations(mode: AutoresetMode) -> None:
    envs = SyncVectorEnv([lambda: Counter(3)] * 6, copy=False, autoreset_mode=mode)
    runner = EnvRunner(envs, Chosen(), config=RolloutConfig(batch_mode="complete_episodes"), seed=2)
    for _ in range(40):
        for episode in runner.sample(num_episodes=1):
            assert episode.observations[:, 1].tolist() == [*range(len(episode) + 1)]
    recorder = runner._loop.recorder
    while (rows := until_last(recorder.ended, recorder.valid).sum()) < max(6, recorder.ended.sum() + 3):
        runner.sample(num_episodes=1)
    stepped = runner.timesteps
    check_rows(runner.run(int(rows) // 6))
    assert runner.timesteps == stepped, "the episodes that waited were enough"


class TwoLengths(gym.Env[Any, Any]):
    """Episodes have 2 or 30 steps, by chance."""

    observation_space, action_space = gym.spaces.Box(0, 99, (1,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.choice([2, 30]))
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t == self.length, False, {}


@pytest.mark.few(1)
@pytest.mark.parametrize("several_agents", [False, True])
def test_episodes_that_all_begin_in_one_call_are_not_those_that_end_first(several_agents: bool) -> None:
    config = RolloutConfig(num_envs=8)
    runner: Any
    if several_agents:
        make = make_multi_agent(lambda: TwoLengths())
        runner = MultiAgentEnvRunner(make, {"default_policy": RandomPolicy()}, config=config, seed=0)
    else:
        runner = EnvRunner(lambda context=None: TwoLengths(), RandomPolicy(), config=config, seed=0)
    lengths = []
    for _ in range(12):
        episodes = runner.sample(num_episodes=12, force_reset=True)
        assert len(episodes) == 12
        lengths += [episode.env_t if several_agents else len(episode) for episode in episodes]
    short = lengths.count(2)
    assert short + lengths.count(30) == 144
    assert 54 < short < 90, "144 fair coins: 72 with a standard deviation of 6; biased: about 110"


def test_episodes_that_wait_come_before_those_that_end_later() -> None:
    runner = EnvRunner(
        lambda context=None: TwoLengths(), RandomPolicy(), config=RolloutConfig(num_envs=8), seed=0
    )
    runner.sample(num_episodes=8)  # One of each environment; those that had a short one have played more.
    stepped = runner.timesteps
    waiting = runner._loop.recorder.ended.sum()
    assert waiting > 1
    runner.sample(num_episodes=int(waiting))
    assert runner.timesteps == stepped


def test_sampled_steps_are_at_least_as_many_as_asked_for() -> None:
    runner = runner_of(AutoresetMode.SAME_STEP)
    assert sum(map(len, runner.sample(num_timesteps=10))) == 12
    assert sum(map(len, runner.sample(num_timesteps=1000))) == 1002  # more than a fragment


def test_whole_episodes_after_fragments_starts_over() -> None:
    runner = runner_of(AutoresetMode.NEXT_STEP, rollout_fragment_length=7)
    rows = len(runner.run())
    episodes = runner.sample(num_episodes=5)
    assert all(e.t_started == 0 and e.is_done for e in episodes)
    rows += sum(map(len, episodes))
    while runner._loop.recorder.rows:  # fragments take up the rows of unfinished episodes
        rows += len(runner.run(1))
        if rows > 200:
            break
    assert rows + runner._loop.recorder.rows + runner.steps_dropped == runner.timesteps


def test_truncate_mode_gives_exactly_the_fragment_and_complete_mode_packs_episodes() -> None:
    class Ten(Counter):
        def reset(self, **kwargs: Any) -> Any:
            made = super().reset(**kwargs)
            self._end = 10
            return made

    def batch(length: int, mode: Any, n: int = 1) -> SampleBatch:
        config = RolloutConfig(rollout_fragment_length=length, batch_mode=mode, num_envs=n)
        return EnvRunner(Ten, Chosen(), config=config, seed=0).run()

    assert batch(15, "truncate_episodes").count == 15
    assert batch(5, "complete_episodes").count == 10
    packed = batch(15, "complete_episodes")
    assert packed["t"].tolist() == [*range(10), *range(10)]
    assert batch(2, "truncate_episodes", n=8).count == 16
    eight = batch(10, "truncate_episodes", n=8)
    assert eight.count == 80
    assert len(eight.split_by_episode()) == 8


def test_unroll_ids_are_never_used_again_and_mark_the_pieces_of_episodes() -> None:
    runner = runner_of(AutoresetMode.SAME_STEP, rollout_fragment_length=20)
    first, second = runner.run(), runner.run()
    assert not set(first["unroll_id"]) & set(second["unroll_id"])
    pieces = {(e, u) for e, u in zip(first["eps_id"].tolist(), first["unroll_id"].tolist(), strict=True)}
    assert len(pieces) == len(set(first["eps_id"])) == len(set(first["unroll_id"]))
    other = EnvRunner(Counter, Chosen(), seed=5, worker_index=1).run()
    assert not set(first["unroll_id"]) & set(other["unroll_id"])


def test_the_same_seed_gives_the_same_rows_and_other_workers_others() -> None:
    def batch(seed: int, worker: int = 0, n: int = 2) -> SampleBatch:
        config = RolloutConfig(rollout_fragment_length=30, num_envs=n)
        return EnvRunner("CartPole-v1", RandomPolicy(), config=config, seed=seed, worker_index=worker).run()

    assert batch(1).equals(batch(1))
    assert not np.array_equal(batch(1)["obs"], batch(2)["obs"])
    assert not np.array_equal(batch(1)["obs"], batch(1, worker=1)["obs"])
    assert not set(batch(1)["eps_id"]) & set(batch(1, worker=1)["eps_id"])
    seeds = [EnvRunner("CartPole-v1", RandomPolicy(), seed=7, worker_index=i).seeds for i in range(4)]
    assert len({s["policy"] for s in seeds}) == 4
    assert batch(1)["eps_id"].min() >= 0


def test_a_drawn_seed_is_kept_and_gives_the_same_rows_again() -> None:
    first = EnvRunner(Counter, RandomPolicy())
    again = EnvRunner(Counter, RandomPolicy(), seed=first.seeds["seed"])
    assert first.run(50).equals(again.run(50))


def test_a_batch_is_not_overwritten_by_the_next() -> None:
    runner = runner_of(AutoresetMode.SAME_STEP, rollout_fragment_length=20)
    first = runner.run()
    kept = first.copy()
    runner.run()
    assert first.equals(kept)
    single = EnvRunner(Counter, Chosen(), seed=0)
    first = single.run(20)
    kept = first.copy()
    single.run(20)
    assert first.equals(kept)


def test_columns_have_the_dtypes_of_the_spaces() -> None:
    batch = runner_of(AutoresetMode.DISABLED, rollout_fragment_length=4).run()
    assert {name: batch[name].dtype.str for name in batch} == {
        "obs": "<f8",
        "new_obs": "<f8",
        "actions": "<i8",
        "rewards": "<f4",
        "terminateds": "|b1",
        "truncateds": "|b1",
        "eps_id": "<i8",
        "t": "<i8",
        "weights_seq_no": "<i8",
        "seen": "<f8",
        "timestep": "<i8",
        "env_id": "<i8",
        "agent_index": "<i8",
        "unroll_id": "<i8",
    }


class Nested(Counter):
    """Observations and actions of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Dict(
            count=Box(0, np.inf, (2,), np.float64),
            pair=Tuple([Discrete(1000), Box(0, 255, (2, 2), np.uint8)]),
        )
        self.action_space = Dict(turn=Discrete(3), push=Tuple([Box(-1.0, 1.0, (2,), np.float32)]))

    def _obs(self) -> Any:
        frame = np.full((2, 2), self._t, np.uint8)
        return {"count": super()._obs(), "pair": (self._t, frame)}

    def step(self, action: Any) -> Any:
        assert action["push"][0].shape == (2,)
        assert abs(action["push"][0]).max() <= 1.0
        return super().step(action["turn"])


@pytest.mark.few(1)
@pytest.mark.each_value_once
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv], ids=["sync", "async"])
def test_nested_observations_and_actions_are_recorded_leaf_by_leaf(mode: AutoresetMode, kind: Any) -> None:
    envs = kind([Nested] * 2, autoreset_mode=mode)
    runner = EnvRunner(envs, RandomPolicy(), config=RolloutConfig(rollout_fragment_length=40), seed=1)
    batch = runner.run()
    runner.stop()
    t = batch["t"]
    for name, shift in (("obs", 0), ("new_obs", 1)):
        assert np.array_equal(batch[name]["count"][:, 1], t + shift)
        assert np.array_equal(batch[name]["pair"][0], t + shift)
        assert np.array_equal(batch[name]["pair"][1], np.tile((t + shift)[:, None, None], (1, 2, 2)))
        assert batch[name]["pair"][1].dtype == np.uint8
    assert batch["actions"]["push"][0].shape == (80, 2)
    assert np.array_equal(batch["rewards"], 100 * (t + 1) + batch["actions"]["turn"])
    for episode in batch.split_by_episode():
        assert len(episode.split_by_episode()) == 1


class Talking(Counter):
    """Observes a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Dict(say=Text(20), count=Discrete(1000))

    def _obs(self) -> Any:
        return {"say": "a" * (self._t + 1), "count": self._t}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_text_observations_are_objects(mode: AutoresetMode) -> None:
    envs = SyncVectorEnv([Talking] * 2, autoreset_mode=mode)
    batch = EnvRunner(envs, RandomPolicy(), config=RolloutConfig(rollout_fragment_length=30)).run()
    assert batch["obs"]["say"].dtype == object
    assert [len(text) for text in batch["new_obs"]["say"]] == (batch["t"] + 2).tolist()


def test_text_observations_come_out_of_processes_too() -> None:
    config = RolloutConfig(rollout_fragment_length=10, num_envs=2, vectorize_mode="async")
    runner = EnvRunner(Talking, RandomPolicy(), config=config)
    batch = runner.run()
    runner.stop()
    assert [len(text) for text in batch["obs"]["say"]] == (batch["t"] + 1).tolist()


class Bounded(Counter):
    """Takes actions in [0, 10], and says which it got."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = Box(0.0, 10.0, (1,), np.float32)
        self.got: list[float] = []

    def step(self, action: Any) -> Any:
        self.got.append(float(action[0]))
        return super().step(0)


class Fixed(Policy):
    def __init__(self, value: float) -> None:
        self.value = value

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        return np.full((len(obs), 1), self.value, np.float32), state, {}


@pytest.mark.parametrize(
    ("options", "given", "sent"),
    [
        ({}, 12.0, 12.0),
        ({"clip_actions": True}, 12.0, 10.0),
        ({"normalize_actions": True}, 0.5, 7.5),
        ({"normalize_actions": True}, 3.0, 10.0),
    ],
)
def test_actions_are_recorded_as_given_and_sent_as_configured(
    options: dict[str, Any], given: float, sent: float
) -> None:
    env = Bounded()
    batch = EnvRunner(env, Fixed(given), config=RolloutConfig(**options)).run(5)
    assert batch["actions"].ravel().tolist() == [given] * 5
    assert env.got == [sent] * 5


class Remembering(Policy):
    """Its state counts the steps of the episode, and it wants what happened before."""

    input_columns = ("prev_actions", "prev_rewards", "t", "env_id", "eps_id")

    def initial_state(self, batch_size: int) -> Any:
        return (np.zeros((batch_size, 1), np.int64),)

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        assert list(inputs) == list(self.input_columns)
        (count,) = state
        extras = {"count": count[:, 0].copy(), "before": inputs["prev_actions"].astype(np.int64)}
        extras |= {"reward_before": inputs["prev_rewards"].astype(np.float64), "own_t": inputs["t"]}
        return (obs[:, 1].astype(np.int64) + 1) % 3, (count + 1,), extras


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_recurrent_state_and_inputs_start_over_with_every_episode(mode: AutoresetMode) -> None:
    batch = EnvRunner(vector(mode), Remembering(), config=RolloutConfig(rollout_fragment_length=80)).run()
    t = batch["t"]
    assert np.array_equal(batch["count"], t)
    assert np.array_equal(batch["own_t"], t)
    assert np.array_equal(batch["before"], np.where(t == 0, 0, t % 3))
    assert np.array_equal(batch["reward_before"], np.where(t == 0, 0, 100 * t + t % 3))


def test_trajectories_are_postprocessed_one_by_one() -> None:
    class Returns(Chosen):
        def postprocess_trajectory(self, batch: SampleBatch, *_: Any) -> SampleBatch:
            assert len(np.unique(batch["eps_id"])) == 1
            batch["return"] = np.full(len(batch), batch["rewards"].sum())
            return batch

    batch = EnvRunner(vector(AutoresetMode.SAME_STEP), Returns(), seed=0).run(30)
    for part in batch.split_by_episode():
        assert (part["return"] == part["rewards"].sum()).all()


def test_the_version_of_the_weights_is_recorded_with_every_step() -> None:
    policy = Chosen()
    runner = EnvRunner(Counter, policy)
    first = runner.run(5)
    policy.weights_seq_no = 7
    assert set(first["weights_seq_no"]) == {0}
    assert set(runner.run(5)["weights_seq_no"]) == {7}


@pytest.mark.parametrize(
    "make",
    [lambda: "CartPole-v1", lambda: gym.spec("CartPole-v1"), lambda: gym.make("CartPole-v1")],
    ids=["id", "spec", "env"],
)
def test_an_environment_can_be_named_in_several_ways(make: Callable[[], Any]) -> None:
    runner = EnvRunner(make(), RandomPolicy(), seed=0)
    assert runner.run(20)["obs"].dtype == np.float32
    runner.stop()


def test_native_vector_environments_are_stepped_truly() -> None:
    config = RolloutConfig(num_envs=4, vectorize_mode="native", rollout_fragment_length=200)
    runner = EnvRunner("CartPole-v1", RandomPolicy(), config=config, seed=0)
    parts = [runner.run() for _ in range(3)]
    for batch in parts:
        assert len(batch) == 800
        assert (batch["rewards"] == 1.0).all()
        follows = batch["eps_id"][1:] == batch["eps_id"][:-1]
        assert np.array_equal(batch["new_obs"][:-1][follows], batch["obs"][1:][follows])
        out = (abs(batch["new_obs"][:, 2]) > 12 * 2 * np.pi / 360) | (abs(batch["new_obs"][:, 0]) > 2.4)
        assert np.array_equal(batch["terminateds"], out)


def test_a_failed_step_loses_the_begun_episodes_and_nothing_else() -> None:
    class Fails(Counter):
        def step(self, action: Any) -> Any:
            if self._episode == 3 and self._t == 1:
                self._episode += 1
                raise RuntimeError("the simulator is gone")
            return super().step(action)

    runner = EnvRunner(Fails, Chosen(), seed=0)
    with pytest.raises(RuntimeError, match="the simulator is gone"):
        runner.run(100)
    batch = runner.run(100)
    check_rows(batch)
    assert batch["t"][0] == 0
    assert runner.steps_dropped + 100 == runner.timesteps


def test_a_restored_runner_goes_on_counting_with_other_episodes() -> None:
    runner = EnvRunner(Counter, RandomPolicy(), seed=1)
    first = runner.run(50)
    state = runner.state_dict()

    def restored() -> EnvRunner:
        made = EnvRunner(Counter, RandomPolicy(), seed=99)
        made.policy.set_state(runner.policy.get_state())
        made.load_state_dict(state)
        return made

    again = restored()
    rest = again.run(50)
    assert rest.equals(restored().run(50))
    assert rest["t"][0] == 0
    assert rest["unroll_id"].min() > first["unroll_id"].max()
    assert not set(rest["eps_id"]) & set(first["eps_id"])
    assert not np.array_equal(rest["t"], first["t"])
    assert again.timesteps == 100
    assert again.seeds["seed"] == 1
    with pytest.raises(StateError, match="'unrolls'"):
        again.load_state_dict(state | {"unrolls": None})


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("env", "config", "message"),
    [
        ("NoSuchEnv-v0", {}, "NoSuchEnv"),
        (lambda: 1 / 0, {}, "ZeroDivisionError"),
        (lambda: 3, {}, "expected a gymnasium environment"),
        (3, {}, "expected a gymnasium id"),
        (Counter(), {"num_envs": 2}, "pass a function"),
        (Counter, {"vectorize_mode": "native"}, "expected a vector environment"),
        (lambda: vector(MODES[0], n=3), {"num_envs": 2}, "the vector environment has 3"),
        (lambda: vector(MODES[0], n=3), {"num_envs": 2, "vectorize_mode": "async"}, "cannot be made"),
    ],
)
def test_an_environment_that_cannot_be_made_is_an_option_error(
    env: Any, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        EnvRunner(env, RandomPolicy(), config=RolloutConfig(**config))


def test_a_vector_environment_that_hides_its_autoreset_mode_is_refused() -> None:
    envs = vector(AutoresetMode.SAME_STEP)
    del envs.metadata["autoreset_mode"], envs.autoreset_mode
    with pytest.raises(OptionError, match="autoreset_mode"):
        EnvRunner(envs, RandomPolicy())


def test_a_missing_final_observation_is_never_invented() -> None:
    class Forgets(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            *step, infos = super().step(actions)
            infos.pop("final_obs", None)
            return *step, infos

    envs = Forgets([Counter], autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(SchemaError, match="final_obs"):
        EnvRunner(envs, Chosen()).run(50)


def test_final_observations_may_come_batched() -> None:
    class Batched(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            *step, infos = super().step(actions)
            if "final_obs" in infos:
                final = infos["final_obs"]
                pair = [e["pair"] if e else (0, np.zeros((2, 2), np.uint8)) for e in final]
                infos["final_obs"] = {
                    "count": np.stack([e["count"] if e else np.zeros(2) for e in final]),
                    "pair": (np.array([p[0] for p in pair]), np.stack([p[1] for p in pair])),
                }
            return *step, infos

    envs = Batched([Nested] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    batch = EnvRunner(envs, RandomPolicy()).run(50)
    assert np.array_equal(batch["new_obs"]["pair"][0], batch["t"] + 1)


def wrong(actions: Any, extras: Any = None) -> Policy:
    class Wrong(Policy):
        calls = 0

        def compute_actions(
            self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
        ) -> Any:
            self.calls += 1
            return actions, state, (extras or (lambda calls: {}))(self.calls)

    return Wrong()


@pytest.mark.parametrize(
    ("policy", "column"),
    [
        (wrong(np.zeros(1, np.float32)), "actions"),
        (wrong(np.zeros(1, np.int64), lambda n: {"x": np.zeros(2)}), "x"),
        (wrong(np.zeros(1, np.int64), lambda n: {"x": {"y": np.zeros(1)}}), "x"),
        (wrong(np.zeros(1, np.int64), lambda n: {"x": np.zeros(1)} if n == 1 else {}), None),
        (wrong(np.zeros(1, np.int64), lambda n: {"x": np.zeros((1, n))}), "x"),
    ],
)
def test_what_a_policy_gives_wrongly_is_a_schema_error(policy: Policy, column: str | None) -> None:
    with pytest.raises(SchemaError) as caught:
        EnvRunner(Counter, policy).run(3)
    assert caught.value.column == column


def test_misuse_is_answered_with_what_to_do() -> None:
    runner = EnvRunner(Counter, Chosen())
    with pytest.raises(OptionError, match="steps=0"):
        runner.run(0)
    with pytest.raises(OptionError, match="pass only one of them"):
        runner.sample(num_timesteps=1, num_episodes=1)
    with pytest.raises(OptionError, match="num_episodes=0"):
        runner.sample(num_episodes=0)
    with pytest.raises(OptionError, match="expected a Policy"):
        EnvRunner(Counter, "random")  # type: ignore[arg-type]
    runner.stop()
    runner.stop()
    with pytest.raises(ClosedError):
        runner.run()


def test_an_input_that_nobody_knows_is_refused_when_the_runner_is_made() -> None:
    class Asks(Chosen):
        input_columns = ("prev_obs",)

    with pytest.raises(OptionError, match="prev_obs"):
        EnvRunner(Counter, Asks())


@pytest.mark.parametrize(
    "options",
    [
        {"num_envs": 0},
        {"rollout_fragment_length": 1.5},
        {"batch_mode": "truncate"},
        {"vectorize_mode": "thread"},
        {"compress_observations": "some"},
        {"explore": 1},
        {"shuffle_buffer_size": -1},
        {"actions_in_input_normalized": True},
    ],
)
def test_an_illegal_config_names_the_field(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        RolloutConfig(**options)


def test_the_stepper_tells_starts_from_ends() -> None:
    stepper = VectorStepper(vector(AutoresetMode.NEXT_STEP, n=1, longest=1))
    stepper.reset(seed=0)
    ending, resetting = stepper.step(np.array([0])), stepper.step(np.array([0]))
    assert ending.valid is not None
    assert resetting.valid is not None
    assert (ending.valid[0], ending.starts[0]) == (True, False)
    assert (resetting.valid[0], resetting.starts[0]) == (False, True)
