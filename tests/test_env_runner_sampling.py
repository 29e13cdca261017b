"""What a runner gives besides plain batches: chunks, horizons, fragments, and what connectors make."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from counting_env import CountingEnv, CountingVectorEnv, length_of
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode

from rlio import ParquetWriter
from rlio.connectors.connector import Connector
from rlio.connectors.flatten import Flatten
from rlio.connectors.frame_stack import FrameStack
from rlio.connectors.mean_std import MeanStdFilter
from rlio.envs.external import ExternalEnv
from rlio.envs.multi_agent import make_multi_agent
from rlio.errors import OptionError, RlioError, SchemaError, StateError
from rlio.policies.policy import Policy
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.external_runner import ExternalRunner
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner

MODES = list(AutoresetMode)


class Idle(Policy):
    """Always the same action, with one extra column."""

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        rows = len(next(iter(obs.values())) if isinstance(obs, dict) else obs)
        actions = np.zeros((rows, *(self.action_space.shape or ())), self.action_space.dtype)
        return actions, state, {"explored": np.full(rows, explore)}


def counting(mode: AutoresetMode = AutoresetMode.SAME_STEP, n: int = 3, *, truncates: bool = False) -> Any:
    return CountingVectorEnv(n, mode, truncates=truncates)


def runner_of(env: Any = None, *, callbacks: Any = None, seed: int = 1, **config: Any) -> EnvRunner:
    config.setdefault("rollout_fragment_length", 10)
    env = counting() if env is None else env
    return EnvRunner(env, Idle(), config=RolloutConfig(**config), callbacks=callbacks, seed=seed)


class Fixed(gym.Env[Any, Any]):
    """Episodes of 10 steps with a reward of 100 each."""

    observation_space = Box(0, np.inf, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(1, np.float32), {"began": True}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.array([self.t], np.float32), 100.0, self.t == 10, False, {"t": self.t}


@pytest.mark.parametrize("name", ["rewards", "t", "eps_id", "weights_seq_no", "env_id", "unroll_id", "infos"])
def test_a_policy_cannot_overwrite_what_a_runner_records(name: str) -> None:
    """Its column took the place of the runner's in silence, as ``record(env_seed=)`` did."""

    class Overwrites(Idle):
        def compute_actions(self, obs: Any, *args: Any, **kwargs: Any) -> Any:
            actions, state, _ = super().compute_actions(obs, *args, **kwargs)
            return actions, state, {name: np.full(len(obs), 77)}

    class Loop(ExternalEnv):
        def run(self) -> None:
            with contextlib.suppress(RlioError):
                episode = self.start_episode()
                for t in range(20):
                    self.get_action(episode, np.full(1, t, np.float32))
                    self.log_returns(episode, 1.0)

    config = RolloutConfig(rollout_fragment_length=5, record_infos=True)
    runners: list[Any] = [
        EnvRunner(Fixed, Overwrites(), config=config),
        MultiAgentEnvRunner(make_multi_agent(Fixed), {"p": Overwrites()}, config=config),
        ExternalRunner(Loop(Box(0, 99, (1,), np.float32), Discrete(2)), Overwrites(), config=config),
    ]
    for runner in runners:
        with pytest.raises(SchemaError) as raised:
            runner.run()
        assert raised.value.column == name
        runner.stop()


# ---- chunks ----


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_chunks_keep_their_ids_and_come_with_the_steps_before_them(mode: AutoresetMode) -> None:
    """Row 2.5, chunking: ids preserved, episode_lookback_horizon."""
    runner = runner_of(counting(mode), episode_lookback_horizon=4)
    served: dict[int | str, int] = {}
    with_history = 0
    for steps in [7, 1, 1, 1, 30, 2, 9] * 4:
        for chunk in runner.sample(num_timesteps=steps):
            assert chunk.t_started == served.get(chunk.id_, 0)
            if chunk.t_started:
                assert chunk.lookback is not None
                assert len(chunk.lookback) == min(4, chunk.t_started)
                with_history += 1
                joined = chunk.with_lookback()
                assert np.array_equal(
                    joined.observations[:, 2], joined.t_started + np.arange(len(joined) + 1)
                )
            else:
                assert chunk.lookback is None
            served[chunk.id_] = chunk.t_started + len(chunk)
    assert with_history > 20
    assert len(runner._look_back._kept) <= 3


def test_without_a_horizon_of_lookback_there_is_none() -> None:
    runner = runner_of(episode_lookback_horizon=0)
    assert all(chunk.lookback is None for _ in range(5) for chunk in runner.sample(num_timesteps=6))


def test_steps_that_were_served_as_a_batch_are_no_lookback() -> None:
    runner = runner_of(Fixed)
    runner.sample(num_timesteps=2)
    runner.run(2)
    (chunk,) = runner.sample(num_timesteps=2)
    assert (chunk.t_started, chunk.lookback) == (4, None)


def test_force_reset_abandons_what_runs() -> None:
    """Row 2.5, sample(force_reset=)."""
    runner = runner_of()
    first = runner.sample(num_timesteps=3)
    again = runner.sample(num_timesteps=3, force_reset=True)
    assert [chunk.t_started for chunk in again] == [0, 0, 0]
    assert not {chunk.id_ for chunk in first} & {chunk.id_ for chunk in again}
    assert all(chunk.lookback is None for chunk in again)


def test_random_actions_are_of_the_runners_seed_and_have_columns_of_their_own() -> None:
    """Row 2.5, sample(random_actions=, explore=); section 5 item 34."""

    def acted() -> list[Any]:
        runner = runner_of()
        warm_up = runner.sample(num_timesteps=30, random_actions=True)
        later = runner.sample(num_timesteps=30, explore=False)
        episodes = runner.sample(num_episodes=2, random_actions=True)
        assert {"action_logp", "action_prob"} <= warm_up[0].extra_outputs.keys()
        assert "explored" in later[0].extra_outputs
        assert not any(chunk.extra_outputs["explored"].any() for chunk in later)
        assert runner.run()["explored"].all()
        assert all(chunk.t_started == 0 and chunk.is_done for chunk in episodes)
        assert all((chunk.actions == 0).all() for chunk in later)
        return [chunk.actions.tolist() for chunk in warm_up]

    actions = acted()
    assert {action for chunk in actions for action in chunk} == {0, 1, 2}
    assert acted() == actions


# ---- fragments ----


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("batch", "envs", "workers"), [(4000, 1, 3), (1000, 4, 7), (10, 16, 2), (5, 1, 8), (64, 8, 0)]
)
def test_an_auto_fragment_shares_out_the_train_batch(batch: int, envs: int, workers: int) -> None:
    """Row 2.1, rollout_fragment_length="auto": the remainder goes to the first workers."""
    config = RolloutConfig(rollout_fragment_length="auto", train_batch_size=batch, num_envs=envs)
    indices = range(1, workers + 1) if workers else range(1)
    steps = [config.resolved(num_workers=workers, worker_index=index).fragment_steps for index in indices]
    assert steps == sorted(steps, reverse=True)
    assert max(steps) - min(steps) <= 1
    total = envs * sum(steps)
    assert total >= batch
    assert total < batch + envs or min(steps) == 1
    runner = EnvRunner(
        lambda: CountingEnv(0, truncates=False), Idle(), config=config, num_workers=workers, worker_index=1
    )
    assert len(runner.run()) == envs * steps[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_fragment_length": "auto"}, "pass that too"),
        ({"train_batch_size": 100}, "requires rollout_fragment_length='auto'"),
        ({"rollout_fragment_length": "some"}, "rollout_fragment_length='some'"),
        ({"horizon": 0}, "horizon=0"),
        ({"soft_horizon": True}, "pass horizon too"),
        ({"clip_rewards": -1.0}, "clip_rewards=-1.0"),
        ({"clip_rewards": "sign"}, "clip_rewards='sign'"),
        ({"observation_connectors": "flatten"}, "observation_connectors"),
        ({"action_connectors": [3]}, "action_connectors"),
        ({"episode_lookback_horizon": -1}, "episode_lookback_horizon=-1"),
        ({"count_steps_by": "rows"}, "count_steps_by='rows'"),
    ],
)
def test_contradictions_name_their_fields(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        RolloutConfig(**options)


def test_a_fragment_that_is_not_resolved_says_so() -> None:
    config = RolloutConfig(rollout_fragment_length="auto", train_batch_size=100)
    with pytest.raises(OptionError, match=r"resolved\(\)"):
        _ = config.fragment_steps


@pytest.mark.further
def test_a_batch_that_waits_for_long_episodes_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """Row 2.3, large batch warning."""

    class Long(Fixed):
        def step(self, action: Any) -> Any:
            obs, reward, _, truncated, info = super().step(action)
            return obs, reward, self.t == 3000, truncated, info

    runner = EnvRunner(
        Long, Idle(), config=RolloutConfig(batch_mode="complete_episodes", rollout_fragment_length=10)
    )
    with caplog.at_level(logging.WARNING, logger="rlio"):
        assert len(runner.run()) == len(runner.run()) == 3000
    told = [
        record.getMessage() for record in caplog.records if "wait for their episodes" in record.getMessage()
    ]
    assert len(told) == 1
    assert "horizon=" in told[0]


# ---- horizons ----


@pytest.mark.parametrize("kind", ["function", "spec", "env"])
def test_at_the_horizon_an_episode_is_truncated_and_the_environment_reset(kind: str) -> None:
    """Row 2.3, horizon."""
    env: Any = {"function": Fixed, "spec": "CartPole-v1", "env": Fixed()}[kind]
    batch = runner_of(env, horizon=4, rollout_fragment_length=40).run()
    assert batch["t"].max() == 3
    assert np.array_equal(batch["truncateds"] & ~batch["terminateds"], batch["t"] == 3)
    if kind != "spec":
        assert np.array_equal(batch["new_obs"][:, 0], batch["t"] + 1)
        assert not batch["terminateds"].any()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_functions_that_make_environments_keep_their_context_with_a_horizon(kind: Any) -> None:
    config = {"num_envs": 2, "vectorize_mode": kind, "horizon": 3, "rollout_fragment_length": 12}
    runner = runner_of(lambda context: CountingEnv(context.vector_index, truncates=False), **config)
    batch = runner.run()
    runner.stop()
    assert np.array_equal(batch["obs"][:, 0], batch["env_id"])
    assert batch["t"].max() == 2
    assert np.array_equal(batch["new_obs"][:, 2], batch["t"] + 1)


def test_a_horizon_beyond_the_episodes_changes_nothing() -> None:
    batch = runner_of(Fixed, horizon=11, rollout_fragment_length=40).run()
    assert not batch["truncateds"].any()
    assert np.array_equal(batch["terminateds"], batch["t"] == 9)


def test_vector_environments_have_horizons_of_their_own() -> None:
    with pytest.raises(OptionError, match="soft_horizon=True"):
        runner_of(counting(), horizon=5)


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_at_a_soft_horizon_the_environment_goes_on_in_another_episode(mode: AutoresetMode) -> None:
    """Row 2.3, soft_horizon: no flag, no reset, another episode; the true next observation."""
    runner = runner_of(counting(mode), horizon=5, soft_horizon=True, rollout_fragment_length=200)
    batch = runner.run()
    assert batch["t"].max() == 4
    env_t = batch["obs"][:, 2]
    assert np.array_equal(batch["t"], env_t % 5)
    assert np.array_equal(batch["new_obs"][:, 2], env_t + 1)
    over = env_t + 1 == length_of(batch["obs"][:, 0], batch["obs"][:, 1])
    assert np.array_equal(batch["terminateds"], over)
    follows = batch["eps_id"][1:] == batch["eps_id"][:-1]
    assert np.array_equal(~follows, batch["t"][1:] == 0)
    metrics = runner.get_metrics()
    assert metrics.lengths.max() == 5
    whole = runner.sample(num_episodes=20)
    assert all(episode.t_started == 0 and len(episode) <= 5 for episode in whole)


def test_a_stack_starts_over_at_a_soft_horizon() -> None:
    config = {"observation_connectors": [FrameStack(2)], "horizon": 3, "soft_horizon": True}
    batch = runner_of(Fixed, **config, rollout_fragment_length=30).run()
    shown, t = batch["obs"][:, :, 0], batch["t"]
    assert np.array_equal(shown[:, 0] == shown[:, 1], t == 0)
    assert np.array_equal(batch["new_obs"][:, 1, 0], shown[:, 1] + 1)
    assert np.array_equal(batch["new_obs"][:, 0], batch["obs"][:, 1])


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
def test_no_row_says_that_its_episode_ended(batch_mode: Any) -> None:
    """Row 2.3, no_done_at_end."""
    runner = runner_of(Fixed, no_done_at_end=True, rollout_fragment_length=35, batch_mode=batch_mode)
    batch = runner.run()
    assert len(batch) == (35 if batch_mode == "truncate_episodes" else 40)
    assert not batch["dones"].any()
    assert batch["t"].max() == 9
    assert len(batch.split_by_episode()) == 4
    assert np.array_equal(batch["new_obs"][:, 0], batch["t"] + 1)
    assert len(runner._look_back._kept) == 0


# ---- connectors ----


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_stacks_are_true_also_at_the_end_of_episodes(mode: AutoresetMode) -> None:
    """Row 2.5, connectors: what the policy saw is recorded, and what it would have seen at the end."""
    seen: list[Any] = []

    class Watch(Idle):
        def compute_actions(self, obs: Any, *args: Any, **options: Any) -> Any:
            seen.append(obs.copy())
            return super().compute_actions(obs, *args, **options)

    config = RolloutConfig(rollout_fragment_length=150, observation_connectors=[FrameStack(3)])
    runner = EnvRunner(counting(mode), Watch(), config=config, seed=0)
    batch = runner.run()
    for name, shift in (("obs", 0), ("new_obs", 1)):
        shown = np.maximum(batch["t"][:, None] + shift - np.arange(2, -1, -1), 0)
        assert np.array_equal(batch[name][:, :, 2], shown)
        assert np.array_equal(batch[name][:, :, 1], np.repeat(batch["obs"][:, -1:, 1], 3, axis=1))
    assert seen[0].shape == (3, 3, 3)
    assert runner.get_spaces()["default_policy"][0].shape == (3, 3)
    assert runner.get_spaces()["__env__"][0].shape == (3,)


def test_filters_see_each_observation_once_and_the_same_ones_in_every_mode() -> None:
    """Final observations are filtered, and counted nowhere."""
    counts = []
    for mode in MODES:
        config = {"observation_connectors": [MeanStdFilter()], "batch_mode": "complete_episodes"}
        runner = runner_of(counting(mode, n=1), **config)
        batch = runner.run(400)
        (filter_,) = runner.get_filters()["default_policy"]
        if mode is AutoresetMode.NEXT_STEP:
            assert filter_.running_stats.n == len(batch)
            continue
        # The first observation of the episode that follows was seen too.
        assert filter_.running_stats.n == len(batch) + 1
        counts.append(filter_.running_stats.state_dict())
    assert counts[0] == counts[1]


def test_filters_are_given_and_taken() -> None:
    """Rows 2.2, sync_filters / get_filters(flush_after), and 6.2, filters sync."""
    config = {"observation_connectors": [Flatten(), MeanStdFilter()]}
    first, second = runner_of(**config), runner_of(**config, seed=2)
    first.run()
    flushed = first.get_filters(flush_after=True)
    assert flushed["default_policy"][0].buffer.n > 0
    assert first.get_filters()["default_policy"][0].buffer.n == 0
    second.sync_filters(flushed)
    assert (
        second.get_filters()["default_policy"][0].running_stats.n
        == flushed["default_policy"][0].running_stats.n
    )
    with pytest.raises(StateError, match="0 filters"):
        second.sync_filters({})


def test_the_environment_gets_what_action_connectors_make_and_the_batch_what_the_policy_said() -> None:
    class Choose(Connector):
        def bind(self, space: Any, policy: Any = None) -> Any:
            return Discrete(5, start=3)

        def __call__(self, values: Any, streams: Any) -> Any:
            assert streams.slots.tolist() == [0, 1]
            return np.array([[-9.0], [0.5]], np.float32)

    got: list[float] = []

    class Push(Fixed):
        action_space = Box(-1.0, 1.0, (1,))

        def step(self, action: Any) -> Any:
            got.append(float(action[0]))
            return super().step(action)

    runner = runner_of(Push, num_envs=2, action_connectors=[Choose()], clip_actions=True)
    batch = runner.run(2)
    assert runner.action_space == Discrete(5, start=3)
    assert batch["actions"].tolist() == [0] * 4
    assert got == [-1.0, 0.5] * 2


def test_frames_of_a_stack_that_a_connector_made_are_stored_once(tmp_path: Any) -> None:
    class Pictures(gym.Env[Any, Any]):
        observation_space = Box(0, 255, (32, 32), np.uint8)
        action_space = Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.t = 0
            return self._frame(), {}

        def _frame(self) -> Any:
            return self.np_random.integers(0, 255, (32, 32), dtype=np.uint8)

        def step(self, action: Any) -> Any:
            self.t += 1
            return self._frame(), 0.0, self.t == 50, False, {}

    config = {"observation_connectors": [FrameStack(4, axis=-1)], "num_envs": 2}
    batch = runner_of(Pictures, **config, rollout_fragment_length=200).run()
    with ParquetWriter(str(tmp_path / "stacks")) as writer:
        writer.write(batch)
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.parquet"))
    assert size < 1.5 * 400 * 32 * 32
    (read,) = list(_reader(tmp_path / "stacks", len(batch)))
    assert np.array_equal(np.sort(read["obs"], axis=0), np.sort(batch["obs"], axis=0))


def _reader(root: Any, rows: int) -> Any:
    from rlio import DatasetReader

    return DatasetReader(str(root), batch_size=rows, epochs=1)


# ---- enough episodes ----


def _made(several: bool, callbacks: Any) -> Any:
    config = RolloutConfig(num_envs=4)
    if not several:
        return EnvRunner(Fixed, Idle(), config=config, callbacks=callbacks)
    copies = make_multi_agent(Fixed)
    return MultiAgentEnvRunner(
        lambda: copies(num_agents=2), {"all": Idle()}, lambda *_: "all", config=config, callbacks=callbacks
    )


@pytest.mark.parametrize("several", [False, True], ids=["one agent", "two agents"])
def test_where_there_are_enough_episodes_nothing_is_left_out(several: bool) -> None:
    """Section 5 item 33: who is wanted no more has its callbacks, is counted once, and comes next time."""
    told: Counter[str] = Counter()

    class Tells(Callbacks):
        def on_episode_start(self, **_: Any) -> None:
            told["start"] += 1

        def on_episode_step(self, **_: Any) -> None:
            told["step"] += 1

        def on_episode_end(self, **_: Any) -> None:
            told["end"] += 1

    runner = _made(several, Tells)
    first = runner.sample(num_episodes=2)
    assert told == {"start": 8, "step": 4 * 10, "end": 4}
    assert runner.get_metrics().counts.episodes == 4
    rest = runner.sample(num_episodes=2)
    assert told["end"] == 4
    assert runner.get_metrics().counts.episodes == 0
    assert len(first) == len(rest) == 2
    assert len({episode.id_ for episode in first + rest}) == 4


class Reused(Fixed):
    """Episodes of ``length`` steps, all observed in one array."""

    def __init__(self, length: int) -> None:
        self.length, self.seen = length, np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        self.seen[:] = 0
        return self.seen, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.seen[:] = self.t
        return self.seen, 1.0, self.t == self.length, False, {}


def test_the_final_observation_stays_when_the_reset_overwrites_its_array() -> None:
    batch = runner_of(lambda: Reused(5), num_envs=2).run()
    assert batch["new_obs"][batch["terminateds"], 0].tolist() == [5.0] * 4


def test_chunks_that_ended_come_first_in_the_order_of_their_ends() -> None:
    lengths = iter([5, 3])
    runner = runner_of(lambda: Reused(next(lengths)), num_envs=2)
    # The second environment ends at steps 3 and 6, the first at step 5; its next episode is running.
    assert [len(chunk) for chunk in runner.sample(num_timesteps=12)] == [3, 5, 3, 1]
