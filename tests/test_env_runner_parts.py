"""Parts of the single-agent runner: infos of resets, counters, what is asked of environments twice."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
from counting_env import CountingEnv
from further import further
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from linear_policy import LinearPolicy

from rlio.envs.vector import VectorStep
from rlio.errors import StateError
from rlio.policies.random_policy import RandomPolicy
from rlio.sampling.callbacks import Callbacks, RunningEpisode
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.evaluate import evaluate
from rlio.sampling.progress import Progress
from rlio.sampling.recorder import StepRecorder, until_last


class Telling(CountingEnv):
    """Says in its infos what it was reset to and where it is."""

    def reset(self, **kwargs: Any) -> Any:
        obs, _ = super().reset(**kwargs)
        return obs, {"began": self._number}

    def step(self, action: Any) -> Any:
        *given, _ = super().step(action)
        return *given, {"t": self._t}


def made(how: str, envs: int = 3) -> tuple[Any, dict[str, Any]]:
    """Environments in a mode of gymnasium's, or stepped one by one; and the options for them."""
    if how in ("sync", "async"):
        return lambda context: Telling(context.vector_index, truncates=False), {
            "num_envs": envs,
            "vectorize_mode": how,
        }
    makers = [partial(Telling, index, truncates=False) for index in range(envs)]
    return SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode[how]), {}


class Starts(Callbacks):
    def __init__(self) -> None:
        self.began: list[tuple[int, Any, Any]] = []

    def on_episode_start(self, *, episode: RunningEpisode, **kwargs: Any) -> None:
        self.began.append((episode.env_index, episode.last_observation[1], episode.last_info))

    def on_episode_end(self, *, episode: RunningEpisode, **kwargs: Any) -> None:
        assert episode.last_info == {"t": episode.length}


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["sync", *AutoresetMode.__members__, *further("async")])
def test_callbacks_get_what_came_with_a_reset_and_nobody_else_keeps_it(how: str) -> None:
    """`RunningEpisode.last_info` is there in `on_episode_start`, of the first episodes and of later ones."""
    env, options = made(how)
    starts = Starts()
    config = RolloutConfig(rollout_fragment_length=100, **options)
    runner = EnvRunner(env, RandomPolicy(), config=config, callbacks=starts, seed=0)
    runner.run()
    runner.stop()
    assert len(starts.began) > 20
    assert all(info == {"began": number} for _, number, info in starts.began)
    assert {env for env, _, _ in starts.began} == {0, 1, 2}

    env, options = made(how)
    runner = EnvRunner(env, RandomPolicy(), config=RolloutConfig(**options), seed=0)
    runner.run()
    assert runner._stepper.reset_infos == [{}] * 3, "infos were not requested"
    runner.stop()


def test_where_an_episode_begins_without_a_reset_its_info_is_that_of_the_step() -> None:
    class Longer(Telling):
        def reset(self, **kwargs: Any) -> Any:
            given = super().reset(**kwargs)
            self._end = 1000
            return given

    seen: list[Any] = []

    class Sees(Callbacks):
        def on_episode_start(self, *, episode: RunningEpisode, **kwargs: Any) -> None:
            seen.append(episode.last_info)

    config = RolloutConfig(rollout_fragment_length=10, horizon=4, soft_horizon=True)
    runner = EnvRunner(
        lambda: Longer(0, truncates=False), RandomPolicy(), config=config, callbacks=Sees, seed=0
    )
    runner.run()
    assert seen == [{"began": 0}, {"t": 4}, {"t": 8}]


@pytest.mark.further
def test_evaluating_long_episodes_needs_no_advice(caplog: pytest.LogCaptureFixture) -> None:
    class Long(Telling):
        def reset(self, **kwargs: Any) -> Any:
            given = super().reset(**kwargs)
            self._end = 3000
            return given

    with caplog.at_level(logging.WARNING, logger="rlio"):
        result = evaluate(LinearPolicy(), lambda: Long(0, truncates=False), episodes=2, num_envs=2, seed=0)
    assert result.lengths.tolist() == [3000, 3000]
    assert "wait for their episodes" not in caplog.text


def test_a_state_with_a_key_that_is_missing_changes_nothing() -> None:
    runner = EnvRunner("CartPole-v1", RandomPolicy(), config=RolloutConfig(rollout_fragment_length=5), seed=0)
    runner.run()
    before = runner.state_dict()
    for key in ("seed", "restarts", "timesteps", "unrolls", "steps_dropped"):
        state = {**before, "timesteps": 999, "seed": 5}
        del state[key]
        with pytest.raises(StateError, match=key):
            runner.load_state_dict(state)
    assert runner.state_dict() == before
    with pytest.raises(StateError, match="unrolls"):
        Progress.from_state({"timesteps": 1, "unrolls": "2", "steps_dropped": 0})


def test_recreated_in_the_middle_it_counts_what_waited_and_goes_on() -> None:
    config = RolloutConfig(batch_mode="complete_episodes", rollout_fragment_length=20, num_envs=4)
    runner = EnvRunner("CartPole-v1", RandomPolicy(), config=config, seed=0)
    rows = len(runner.run())
    waited = runner.timesteps - rows
    assert waited > 0
    runner.make_module()
    assert runner.steps_dropped == waited
    rows += len(runner.run())
    runner.make_env()
    batch = runner.run()
    assert np.array_equal(batch["t"][batch["t"] == 0], np.zeros(batch["dones"].sum()))
    assert rows + len(batch) + runner.steps_dropped + runner._loop.recorder.rows == runner.timesteps


@pytest.mark.further
@pytest.mark.parametrize(
    "mode", [AutoresetMode.NEXT_STEP, *further(AutoresetMode.SAME_STEP)], ids=lambda mode: mode.name
)
def test_a_slow_environment_keeps_the_steps_of_its_own_rows_only(mode: AutoresetMode) -> None:
    """Environment 0 answers in every 20th step; the others' episodes are over and taken long before."""
    rng = np.random.default_rng(0)
    envs, now, t = 3, np.zeros(3), np.zeros(3, np.int64)
    resetting = np.zeros(3, bool)
    recorder = StepRecorder(Box(0, np.inf, (), np.float64), Discrete(2), num_envs=envs, capacity=128)
    recorder.start(now)
    served: list[list[float]] = [[], [], []]
    most, waited_long = 0, 0
    for at in range(4000):
        answers = rng.random(envs) < [0.05, 0.9, 0.7]
        valid, starts = answers & ~resetting, answers & resetting
        ended = valid & (rng.random(envs) < [0.1, 0.2, 0.1])
        now[valid] += 1
        finals: list[tuple[int, list[Any]]] = []
        if mode is AutoresetMode.SAME_STEP:
            finals, starts = [(env, [now[env]]) for env in np.flatnonzero(ended).tolist()], ended
        resetting = (resetting & ~answers) | (ended & (mode is AutoresetMode.NEXT_STEP))
        scalars = {"t": t.copy()}
        t = np.where(ended, 0, t + valid)
        now[starts] += 1000
        none = np.zeros(envs, bool)
        step = VectorStep(now, now, ended, none, valid, starts, finals, {})
        recorder.add(step, actions=np.zeros(envs, np.int64), extras={}, scalars=scalars)
        assert np.array_equal(recorder.obs, now)
        if at % 5 == 0 or recorder.is_full:
            over = recorder.ended
            if not recorder.is_full:  # as with num_episodes=
                over &= np.cumsum(over).reshape(over.shape) <= rng.integers(4)
            chosen = until_last(over, recorder.valid)
            waiting = recorder.rows - int(chosen.sum())
            columns, counts = recorder.take(chosen)
            assert recorder.steps <= recorder.rows == waiting
            most, waited_long = max(most, recorder.steps), waited_long + (recorder.steps > 10)
            assert np.array_equal(columns["new_obs"], np.asarray(columns["obs"]) + 1)
            for env, rows in enumerate(np.split(np.asarray(columns["obs"]), np.cumsum(counts)[:-1])):
                served[env] += rows.tolist()
    assert waited_long
    assert recorder.capacity == 128 > most
    for rows in served:
        steps = np.diff(rows)
        assert set(steps) == {1, 1001}, "each row once, in order"
