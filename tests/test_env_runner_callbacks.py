"""What a runner tells callbacks and counts, what it does when environments fail, and its states."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from counting_env import CountingEnv, length_of
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlio import SampleBatch
from rlio.connectors.frame_stack import FrameStack
from rlio.connectors.mean_std import MeanStdFilter
from rlio.envs.external import ExternalEnv
from rlio.envs.multi_agent import make_multi_agent
from rlio.envs.seeds import episode_seed
from rlio.envs.vector import Stepper, VectorStep
from rlio.errors import ClosedError, EnvError, OptionError, StateError
from rlio.policies.policy import Policy
from rlio.sampling.callbacks import Callbacks, RunningEpisode
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.external_runner import ExternalRunner
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner

MODES = list(AutoresetMode)


class Idle(Policy):
    """Always the same action."""

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        return np.zeros(len(obs), np.int64), state, {}


class Ten(gym.Env[Any, Any]):
    """Episodes of 10 steps with a reward of 100 each; shows the step."""

    observation_space = Box(0, np.inf, (1,), np.float32)
    action_space = Discrete(2)
    fails_at: int | None = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seed, self.t = seed, 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.t == self.fails_at:
            raise ConnectionError("the simulator is gone")
        return np.array([self.t], np.float32), 100.0, self.t == 10, False, {"t": self.t}


def runner_of(env: Any, policy: Policy | None = None, *, callbacks: Any = None, **config: Any) -> EnvRunner:
    config.setdefault("rollout_fragment_length", 10)
    return EnvRunner(env, policy or Idle(), config=RolloutConfig(**config), callbacks=callbacks, seed=1)


def counting(mode: AutoresetMode, n: int = 3) -> Any:
    makers = [partial(CountingEnv, i, truncates=False) for i in range(n)]
    return SyncVectorEnv(makers, copy=False, autoreset_mode=mode)


# ---- callbacks ----


class Log(Callbacks):
    """Writes down everything."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, Any]] = []

    def _log(self, what: str, episode: RunningEpisode) -> None:
        obs = None if episode.last_observation is None else np.array(episode.last_observation).tolist()
        self.events.append((what, episode.eps_id, (episode.env_index, episode.length, obs)))

    def on_episode_created(self, *, episode: RunningEpisode, **kwargs: Any) -> None:
        self._log("created", episode)

    def on_episode_start(self, *, episode: RunningEpisode, **kwargs: Any) -> None:
        self._log("start", episode)

    def on_episode_step(self, *, episode: RunningEpisode, **kwargs: Any) -> None:
        assert episode.last_reward == episode.length
        assert episode.last_action == 0
        self._log("step", episode)

    def on_episode_end(self, *, episode: RunningEpisode, error: Any = None, **kwargs: Any) -> None:
        assert error is None
        assert episode.total_reward == episode.length * (episode.length + 1) / 2
        self._log("end", episode)


@pytest.mark.few(1)
@pytest.mark.parametrize("connectors", [[], [FrameStack(2)]], ids=["", "stacked"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.each_value_once
def test_callbacks_get_to_know_each_episode_from_beginning_to_end(
    mode: AutoresetMode, connectors: Any
) -> None:
    """Row 2.4, callbacks: created, start, step and end of every episode, with unprocessed observations."""
    log = Log()
    runner = runner_of(counting(mode), callbacks=log, observation_connectors=connectors)
    for _ in range(20):
        runner.run()
    episodes: dict[int, list[tuple[str, Any]]] = {}
    for what, eps_id, seen in log.events:
        episodes.setdefault(eps_id, []).append((what, seen))
    numbers = dict.fromkeys(range(3), 0)
    ended = 0
    for events in episodes.values():
        env = events[0][1][0]
        length, number = length_of(env, numbers[env]), numbers[env]
        expected = [("created", (env, 0, None)), ("start", (env, 0, [env, number, 0]))]
        expected += [("step", (env, t, [env, number, t])) for t in range(1, length + 1)]
        expected += [("end", (env, length, [env, number, length]))]
        assert events == expected[: len(events)]
        if len(events) == len(expected):
            ended += 1
        numbers[env] += 1
    assert ended > 20
    metrics = runner.get_metrics()
    assert metrics.counts.episodes == ended == len(metrics.details)


class Sums(Callbacks):
    """Adds rewards up step by step."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, int, float, float]] = []

    def on_episode_start(self, *, episode: RunningEpisode, **kwargs: Any) -> None:
        episode.user_data |= {"steps": 0, "rewards": 0.0}

    def on_episode_step(self, *, episode: RunningEpisode, **kwargs: Any) -> None:
        reward = episode.last_reward
        episode.user_data["steps"] += 1
        episode.user_data["rewards"] += sum(reward.values()) if isinstance(reward, dict) else reward
        assert episode.last_observation is not None
        assert episode.length == episode.user_data["steps"]

    def on_episode_end(self, *, episode: RunningEpisode, **kwargs: Any) -> None:
        own = episode.user_data
        self.ended.append((own["steps"], episode.length, own["rewards"], episode.total_reward))


class Three(ExternalEnv):
    """Plays episodes of three steps."""

    def __init__(self) -> None:
        super().__init__(Box(0, 9, (1,), np.float32), Discrete(2))

    def run(self) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                episode = self.start_episode()
                for t in range(3):
                    self.get_action(episode, [float(t)])
                    self.log_returns(episode, t + 1.0)
                self.end_episode(episode, [3.0])


def test_the_last_step_of_an_episode_is_a_step() -> None:
    """``on_episode_step`` was called 8 times in 10 steps: rewards summed up there lacked the last."""
    config = RolloutConfig(num_envs=2, rollout_fragment_length=25)
    soft = RolloutConfig(rollout_fragment_length=25, horizon=4, soft_horizon=True)
    agents = make_multi_agent(Ten)
    makers: list[Any] = [
        *(lambda callbacks, mode=mode: runner_of(counting(mode), callbacks=callbacks) for mode in MODES),
        lambda callbacks: EnvRunner(Ten, Idle(), config=config, callbacks=callbacks),
        lambda callbacks: EnvRunner(Ten, Idle(), config=soft, callbacks=callbacks),
        lambda callbacks: MultiAgentEnvRunner(agents, {"p": Idle()}, config=config, callbacks=callbacks),
        lambda callbacks: MultiAgentEnvRunner(agents, {"p": Idle()}, config=soft, callbacks=callbacks),
        lambda callbacks: ExternalRunner(Three(), Idle(), callbacks=callbacks),
    ]
    for make in makers:
        sums = Sums()
        runner = make(sums)
        for _ in range(3):
            runner.run()
        runner.stop()
        assert len(sums.ended) > 3
        for steps, length, rewards, total in sums.ended:
            assert steps == length
            assert rewards == total


def test_only_what_is_overridden_is_called_and_custom_metrics_arrive() -> None:
    class Custom(Callbacks):
        def on_episode_end(self, *, episode: RunningEpisode, **kwargs: Any) -> None:
            assert episode.last_info == {"t": 10}
            episode.custom_metrics["half"] = episode.length / 2
            episode.hist_data["lengths"] = [episode.length]
            episode.media["picture"] = "a frame"

    runner = runner_of(Ten, callbacks=[Custom], num_envs=2)
    runner.run(25)
    summary = runner.get_metrics().summarise()
    assert summary["custom_metrics"]["half_mean"] == 5
    assert summary["hist_stats"]["lengths"] == [10] * 4
    assert summary["episode_media"] == {"picture": ["a frame"] * 4}
    assert summary["episode_return_mean"] == 1000


def test_environments_are_told_of_when_they_are_made() -> None:
    """Row 2.4, on_environment_created and on_sub_environment_created; row 2.5, make_env."""
    told: list[Any] = []

    class Tell(Callbacks):
        def on_environment_created(self, *, env: Any, **kwargs: Any) -> None:
            told.append(env.num_envs)

        def on_sub_environment_created(
            self, *, env: Any, env_index: int, context: Any, **kwargs: Any
        ) -> None:
            told.append((env.unwrapped.__class__, env_index, context.worker_index, context.recreated))

    config = RolloutConfig(num_envs=2, restart_failed_sub_environments=True)
    runner = EnvRunner(Ten, Idle(), config=config, callbacks=Tell, seed=0, worker_index=4)
    assert told == [2, (Ten, 0, 4, False), (Ten, 1, 4, False)]
    runner.make_env()
    assert told[3:] == told[:3]
    assert len(runner.run(4)) == 8
    runner.envs.envs[1].unwrapped.fails_at = 5  # type: ignore[attr-defined]
    runner.run(4)
    assert told[6:] == [(Ten, 1, 4, True)]


def test_trajectories_and_samples_are_shown() -> None:
    """Row 2.4, on_postprocess_trajectory and on_sample_end."""
    shown: list[Any] = []

    class Show(Callbacks):
        def on_postprocess_trajectory(
            self, *, episode: Any, postprocessed_batch: Any, original_batches: Any, **kwargs: Any
        ) -> None:
            (policy_id, original) = original_batches[None]
            assert policy_id == "default_policy"
            assert "doubled" not in original
            assert set(postprocessed_batch["eps_id"]) == {episode.eps_id}
            shown.append((episode.length, len(postprocessed_batch)))
            postprocessed_batch["seen"] = np.ones(len(postprocessed_batch))

        def on_sample_end(self, *, samples: Any, **kwargs: Any) -> None:
            shown.append(samples)

    class Doubles(Idle):
        def postprocess_trajectory(
            self, batch: SampleBatch, other_agent_batches: Any = None, episode: Any = None
        ) -> SampleBatch:
            assert isinstance(episode, RunningEpisode)
            batch["doubled"] = 2 * batch["rewards"]
            return batch

    runner = runner_of(Ten, Doubles(), callbacks=Show)
    batch = runner.run(25)
    assert shown == [(10, 10), (10, 10), (5, 5)]
    assert (batch["doubled"] == 200).all()
    assert (batch["seen"] == 1).all()
    chunks = runner.sample(num_timesteps=3)
    assert shown[3:] == [(8, 3), chunks]


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
def test_episodes_that_are_not_for_training_are_in_no_batch(batch_mode: Any) -> None:
    """Rows 2.3 and 6.2, training_enabled=False: empty batches, metrics all the same."""

    class Never(Callbacks):
        def on_episode_start(self, *, episode: RunningEpisode, **kwargs: Any) -> None:
            episode.training_enabled = False

    class Odd(Callbacks):
        ended = 0

        def on_episode_end(self, *, episode: RunningEpisode, **kwargs: Any) -> None:
            self.ended += 1
            episode.training_enabled = self.ended % 2 == 1

    runner = runner_of(Ten, callbacks=Never, batch_mode=batch_mode, rollout_fragment_length=20)
    assert [len(runner.run()) for _ in range(3)] == [0, 0, 0]
    assert {"obs", "actions", "eps_id", "unroll_id"} <= set(runner.run())
    assert runner.sample() == []
    assert runner.steps_dropped == 100
    metrics = runner.get_metrics()
    assert (metrics.counts.episodes, metrics.counts.rows_dropped) == (10, 100)
    runner = runner_of(Ten, callbacks=Odd, batch_mode=batch_mode, rollout_fragment_length=40)
    assert [len(runner.run()) for _ in range(3)] == [20, 20, 20]


# ---- metrics ----


def test_returns_are_those_of_the_environment_whatever_is_learned_from() -> None:
    """Rows 2.1 and 6.2, clip_rewards: batches are clipped, metrics are not."""
    runner = runner_of(Ten, num_envs=2, clip_rewards=True)
    batch = runner.run(25)
    assert (batch["rewards"] == 1).all()
    summary = runner.get_metrics().summarise()
    assert summary["episode_return_mean"] == 1000
    assert summary["episode_len_mean"] == 10
    assert summary["num_episodes"] == 4
    assert summary["num_env_steps_sampled"] == 50
    assert summary["episode_duration_sec_mean"] > 0
    assert summary["sampler_perf"]["mean_inference_ms"] > 0
    assert summary["sampler_perf"]["mean_env_wait_ms"] > 0
    runner.run(25)
    again = runner.get_metrics().summarise()
    assert (again["num_episodes"], again["num_env_steps_sampled_lifetime"]) == (6, 100)
    assert (runner_of(Ten, clip_rewards=30).run()["rewards"] == 30).all()
    assert (runner_of(Ten, clip_rewards=False).run()["rewards"] == 100).all()


def test_previous_rewards_are_those_that_are_learned_from() -> None:
    class Remembers(Idle):
        input_columns = ("prev_rewards",)

        def compute_actions(
            self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
        ) -> Any:
            return np.zeros(len(obs), np.int64), (), {"before": inputs["prev_rewards"].astype(np.float32)}

    batch = runner_of(Ten, Remembers(), clip_rewards=True).run(12)
    assert batch["before"].tolist() == [0] + [1] * 9 + [0, 1]


# ---- failures ----


@pytest.mark.few(1)
@pytest.mark.each_value_once
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
def test_the_episode_of_an_environment_that_fails_is_discarded_and_the_others_go_on(
    kind: Any, batch_mode: Any
) -> None:
    """Rows 2.1, restart_failed_sub_environments, and 2.3, env-error protocol."""
    errors: list[Any] = []

    class Tell(Callbacks):
        def on_episode_end(self, *, episode: RunningEpisode, error: Any = None, **kwargs: Any) -> None:
            if error is not None:
                errors.append((episode.env_index, episode.length, type(error).__name__))

    runner = EnvRunner(
        Fragile,
        Idle(),
        config=RolloutConfig(
            num_envs=3,
            vectorize_mode=kind,
            batch_mode=batch_mode,
            rollout_fragment_length=15,
            restart_failed_sub_environments=True,
        ),
        callbacks=Tell,
        seed=0,
    )
    parts = [runner.run() for _ in range(6)]
    runner.stop()
    if batch_mode == "truncate_episodes":
        assert [len(part) for part in parts] == [45] * 6
    for part in parts:
        for episode in part.split_by_episode():
            env, t = int(episode["env_id"][0]), episode["t"]
            assert np.array_equal(episode["obs"][:, 0], t)
            assert np.array_equal(episode["new_obs"][:, 0], t + 1)
            # Environment 1 fails in step 7 of each second episode.
            assert episode["dones"][-1] or batch_mode == "truncate_episodes"
            assert env != 1 or len(episode) <= 10
    assert len(errors) >= 2
    assert set(errors) == {(1, 6, errors[0][2])}
    metrics = runner.get_metrics()
    assert metrics.counts.faulty_episodes == metrics.counts.env_restarts == len(errors)
    assert metrics.counts.rows_dropped == runner.steps_dropped > 0
    whole = {
        int(eps_id): len(rows)
        for eps_id, rows in ((e["eps_id"][0], e) for p in parts for e in p.split_by_episode())
        if rows["t"][0] == 0 and rows["dones"][-1]
    }
    assert set(whole.values()) == {10}


class Fragile(Ten):
    """Environment 1 fails in step 7 of its first episode after it was made, if it was made once before."""

    def __init__(self, context: Any) -> None:
        self._index, self._episodes = context.vector_index, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._episodes += 1
        self.fails_at = 7 if self._index == 1 and self._episodes == 2 else None
        return super().reset(seed=seed)


def test_without_restarts_a_failure_is_raised_and_says_where() -> None:
    runner = runner_of(Fragile, num_envs=2)
    with pytest.raises(EnvError, match=r"environment 1 failed in step 6.*the simulator is gone") as caught:
        runner.run(100)
    assert caught.value.env_index == 1
    assert isinstance(caught.value.__cause__, ConnectionError)


class Scripted(Stepper):
    """Two environments; the second answers in every third step only. Shows (steps so far, last action)."""

    def __init__(self) -> None:
        super().__init__(counting(AutoresetMode.SAME_STEP, 2))
        self._space = Box(0, np.inf, (2,), np.float64)
        self._obs, self._now, self.sent = np.zeros((2, 2)), 0, np.zeros(2, np.int64)

    @property
    def observation_space(self) -> Any:
        return self._space

    @property
    def action_space(self) -> Any:
        return Discrete(1000)

    def reset(self, *, seed: Any = None, seeds: Any = None) -> Any:
        return self._obs

    def step(self, actions: Any) -> VectorStep:
        if self._now % 3 == 0:
            self.sent[1] = actions[1]  # later ones are not looked at
        self.sent[0] = actions[0]
        self._now += 1
        valid = np.array([True, self._now % 3 == 0])
        self._obs = self._obs.copy()
        self._obs[valid, 0] += 1
        self._obs[valid, 1] = self.sent[valid]
        none = np.zeros(2, bool)
        rewards = np.where(valid, self._obs[:, 0], 0.0)
        return VectorStep(self._obs, rewards, none, none, valid, none, [], [{}, {}])

    def env_infos(self, step: VectorStep) -> Any:
        return step.infos


class Counts(Policy):
    """Acts by the number of the call; its state counts the transitions of each environment."""

    input_columns = ("prev_actions", "prev_rewards")
    calls = 0

    def initial_state(self, batch_size: int) -> Any:
        return (np.zeros(batch_size, np.int64),)

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        self.calls += 1
        self.weights_seq_no = self.calls
        extras = {"call": np.full(len(obs), self.calls), "before": inputs["prev_actions"].astype(np.int64)}
        return np.full(len(obs), self.calls), (state[0] + 1,), extras


@pytest.mark.parametrize("connectors", [[], [FrameStack(2)]], ids=["", "stacked"])
def test_an_environment_that_is_slow_gets_one_action_and_that_one_is_recorded(
    monkeypatch: pytest.MonkeyPatch, connectors: Any
) -> None:
    """Row 2.1, remote_env_batch_wait_ms: exact accounting of each environment."""
    monkeypatch.setattr("rlio.sampling.env_runner.make_stepper", lambda *_: Scripted())
    runner = runner_of("x", Counts(), observation_connectors=connectors)
    batch = runner.run(12)
    newest = batch["obs"][:, -1] if connectors else batch["obs"]
    after = batch["new_obs"][:, -1] if connectors else batch["new_obs"]
    fast, slow = (np.flatnonzero(batch["env_id"] == env) for env in (0, 1))
    assert (len(fast), len(slow)) == (18, 6)
    for rows, calls in ((fast, np.arange(1, 19)), (slow, np.arange(1, 19, 3))):
        t = np.arange(len(rows))
        assert np.array_equal(batch["t"][rows], t)
        assert np.array_equal(newest[rows, 0], t)
        assert np.array_equal(after[rows, 0], t + 1)
        assert np.array_equal(batch["actions"][rows], calls)
        assert np.array_equal(after[rows, 1], calls), "the environment acted so"
        assert np.array_equal(batch["call"][rows], calls)
        assert np.array_equal(batch["weights_seq_no"][rows], calls)
        assert np.array_equal(batch["before"][rows], [0, *calls[:-1]])
        assert np.array_equal(batch["state_out_0"][rows], t + 1)
        if connectors:
            assert np.array_equal(batch["obs"][rows, 0, 0], np.maximum(t - 1, 0))


# ---- recurrent policies ----


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_sequences_have_the_state_that_they_began_with(mode: AutoresetMode) -> None:
    """Row 2.5, extra outputs: STATE_OUT; 2.3, max_seq_len chopping and seq_lens."""

    class Steps(Idle):
        max_seq_len = 4

        def initial_state(self, batch_size: int) -> Any:
            return (np.zeros((batch_size, 2)),)

        def compute_actions(
            self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
        ) -> Any:
            return np.zeros(len(obs), np.int64), (state[0] + 1,), {}

    runner = runner_of(counting(mode), Steps(), rollout_fragment_length=30)
    for _ in range(3):
        batch = runner.run()
        first = np.cumsum(batch["seq_lens"]) - batch["seq_lens"]
        assert batch["seq_lens"].max() == 4
        assert batch["seq_lens"].sum() == 90
        assert np.array_equal(batch["state_in_0"], np.repeat(batch["t"][first][:, None], 2, axis=1))
        assert np.array_equal(batch["state_out_0"][:, 0], batch["t"] + 1)
        ends = np.append(first[1:], 90) - 1
        assert np.array_equal(batch["eps_id"][first], batch["eps_id"][ends])
    for chunk in runner.sample():
        assert "state_out_0" in chunk.extra_outputs
        assert not any("before" in name for name in chunk.extra_outputs)


# ---- seeds, states, health ----


def test_each_episode_has_a_seed_of_its_own_that_is_recorded() -> None:
    """Row 2.1, seeding: by worker, environment and episode."""
    batches = {}
    for worker in (1, 2, 3):
        config = RolloutConfig(num_envs=2, rollout_fragment_length=25, record_env_seeds=True)
        runner = EnvRunner(Ten, Idle(), config=config, seed=9, worker_index=worker)
        batches[worker] = batch = runner.run()
        for env in range(2):
            seeds = batch["env_seed"][batch["env_id"] == env].reshape(5, 5)[:, 0]
            expected = [episode_seed(9, worker, env, episode) for episode in (0, 0, 1, 1, 2)]
            assert seeds.tolist() == expected
    assert len({seed for batch in batches.values() for seed in batch["env_seed"].tolist()}) == 18
    assert "env_seed" not in runner_of(Ten).run()


def test_the_parts_of_a_state_can_be_taken_over_one_by_one() -> None:
    """Row 2.5, get_state(components, not_components) and set_state."""
    config = {"observation_connectors": [MeanStdFilter()]}
    first, second = (runner_of(Ten, **config) for _ in range(2))
    first.run()
    first.policy.weights_seq_no = 3
    everything = first.get_state()
    assert set(everything) == {
        "policy", "observation_connectors", "action_connectors", "runner", "metrics",
    }  # fmt: skip
    chunk = second.run(5)
    second.set_state(first.get_state(["observation_connectors", "policy"]))
    assert second.policy.weights_seq_no == 3
    assert second.get_filters()["default_policy"][0].running_stats.n == 11
    assert second.run(3)["t"].tolist() == [5, 6, 7], "episodes go on"
    assert len(chunk) == 5
    assert set(first.get_state(not_components=["policy"])) == set(everything) - {"policy"}
    second.set_state(everything)
    assert second.run(3)["t"].tolist() == [0, 1, 2]
    assert second.timesteps == first.timesteps + 3
    assert second.get_metrics().lifetime.env_steps == 13
    with pytest.raises(OptionError, match="weights"):
        first.get_state(["weights"])
    with pytest.raises(StateError, match="connectors"):
        first.load_state_dict(first.state_dict() | {"connectors": {"reward_connectors": {}}})


def test_older_weights_are_not_taken_over() -> None:
    """Row 2.6, weights_seq_no: newer, or 0."""
    runner = runner_of(Ten)
    runner.policy.weights_seq_no = 5
    for version, expected in ((4, 5), (5, 5), (7, 7), (0, 0)):
        state = runner.get_state(["policy"])
        state["policy"]["weights_seq_no"] = version
        runner.set_state(state)
        assert runner.policy.weights_seq_no == expected


def test_the_state_with_filters_is_json_and_restores_them() -> None:
    config = {"observation_connectors": [MeanStdFilter()]}
    first, second = (runner_of(Ten, **config) for _ in range(2))
    first.run()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    (mine,), (theirs,) = (each.get_filters()["default_policy"] for each in (first, second))
    assert mine.running_stats.state_dict() == theirs.running_stats.state_dict()


def test_policies_are_told_of_episodes() -> None:
    """Row 2.3, exploration hooks."""
    told: list[Any] = []

    class Told(Idle):
        def on_episode_start(self, env_ids: Any) -> None:
            told.append(("start", env_ids.tolist()))

        def on_episode_end(self, env_ids: Any) -> None:
            told.append(("end", env_ids.tolist()))

    runner_of(Ten, Told(), num_envs=2).run(10)
    assert told == [("start", [0, 1]), ("end", [0, 1]), ("start", [0, 1])]


def test_a_stopped_runner_is_not_healthy() -> None:
    """Row 2.5, assert_healthy and stop."""
    runner = runner_of(Ten)
    runner.assert_healthy()
    runner.stop()
    with pytest.raises(ClosedError):
        runner.assert_healthy()
