"""Environments that fail in a step, a reset or their making, whose process dies or that hang.

Rows of RLlib's tables: "restart_failed_sub_environments", "env-error protocol", "endless reset retry".
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from crashing_env import LENGTH, Crashing, Transitions, fails_once
from further import further
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlio import (
    DatasetReader,
    EnvRunner,
    RandomPolicy,
    RolloutConfig,
    RolloutWorker,
    SampleBatch,
    concat_samples,
)
from rlio.envs.context import EnvContext
from rlio.envs.local import LocalStepper
from rlio.envs.process_stepper import ProcessStepper
from rlio.envs.restarts import Restarts
from rlio.envs.seeds import EpisodeSeeds, episode_seed
from rlio.envs.vector import Stepper
from rlio.errors import EnvError, OptionError
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.make_env import make_stepper

AT_ONCE = 100
ACTIONS = np.zeros(3, int)


@pytest.fixture(autouse=True)
def _quick_and_quiet(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.CRITICAL, "rlio")
    monkeypatch.setattr("rlio.envs.restarts._PAUSE_S", 0.0)


def stepper_of(
    fails: Callable[[Crashing, str], None],
    mode: str,
    *,
    max_restarts: int | None = AT_ONCE,
    **more: Any,
) -> Stepper:
    """Steps three environments."""
    setup = RolloutConfig(
        num_envs=3,
        vectorize_mode=mode,
        env_config={"fails": fails},
        restart_failed_sub_environments=max_restarts is not None,
        max_env_restarts=max_restarts or 1,
        **more,
    )
    return make_stepper(Crashing, setup)


def sampled(stepper: Stepper, *, until: int) -> Transitions:
    """Steps until each environment has ``until`` whole episodes of its own."""
    seen = Transitions(stepper.reset(seeds=EpisodeSeeds(7, num_envs=3)))
    for _ in range(2000):
        seen.add(stepper.step(ACTIONS))
        if all(len(seen.episodes(env)) >= until for env in range(3)):
            stepper.close()
            return seen
    raise AssertionError("the environments do not go on")


def run(stepper: Stepper, steps: int) -> None:
    for _ in range(steps):
        stepper.step(ACTIONS[: stepper.num_envs])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("mode", "t"),
    [
        *(("sync", t) for t in (0, 1, 3, LENGTH)),
        ("async", 3),
        *further(*(("async", t) for t in (0, 1, LENGTH))),
    ],
)
def test_an_environment_that_fails_is_recreated_and_the_others_go_on(mode: str, t: int) -> None:
    """Row "restart_failed_sub_environments": its episode is discarded, and no other row is lost or wrong."""
    seen = sampled(stepper_of(fails_once(1, episode=2, t=t), mode), until=5)
    assert seen.faulty == [1]
    assert seen.episodes(1)[:4] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert seen.episodes(0)[:5] == seen.episodes(2)[:5] == [(0, n) for n in range(5)]


def test_a_vector_environment_that_fails_is_an_error_and_a_reset_starts_over() -> None:
    for autoreset in AutoresetMode:
        fails = fails_once(1, episode=1, t=2)
        makers = [
            lambda i=i, fails=fails: Crashing(EnvContext({"fails": fails}, vector_index=i)) for i in range(3)
        ]
        stepper = make_stepper(SyncVectorEnv(makers, autoreset_mode=autoreset))
        stepper.reset(seeds=EpisodeSeeds(7, num_envs=3))
        with pytest.raises(EnvError, match=r"SyncVectorEnv.step\(\) failed") as caught:
            run(stepper, 3 * LENGTH)
        assert not isinstance(caught.value.__cause__, EnvError)
        assert len(stepper.reset()) == 3
        stepper.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_without_restarts_the_error_says_which_environment_episode_and_seed(mode: str) -> None:
    stepper = stepper_of(fails_once(1, episode=2, t=3), mode, max_restarts=None)
    stepper.reset(seeds=EpisodeSeeds(7, num_envs=3))
    with pytest.raises(EnvError, match="the simulator is gone") as caught:
        run(stepper, 100)
    seed = episode_seed(7, 0, 1, 2)
    assert (caught.value.env_index, caught.value.episode, caught.value.seed) == (1, 2, seed)
    assert f"environment 1 failed in step 2, episode 2 (seed {seed}): ValueError" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    # It can go on, with new episodes.
    seen = Transitions(stepper.reset())
    for _ in range(12):
        seen.add(stepper.step(ACTIONS))
    stepper.close()
    assert len(seen.rows) == 3 * 2 * LENGTH


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_first_observation_that_does_not_fit_is_a_failed_reset_and_the_last_step_counts(mode: str) -> None:
    class Widens(Crashing):
        def reset(self, **options: Any) -> Any:
            obs, info = super().reset(**options)
            return obs[: 1 if self.episode == 1 else None], info

    for restarts in (True, False):
        config = RolloutConfig(vectorize_mode=mode, restart_failed_sub_environments=restarts)
        stepper = make_stepper(Widens, config)
        stepper.reset(seeds=EpisodeSeeds(7, num_envs=1))
        run(stepper, LENGTH - 1)
        if restarts:
            step = stepper.step(ACTIONS[:1])
            assert step.valid is None or step.valid.all()
            assert len(step.finals) == 1
        else:
            with pytest.raises(EnvError, match="in reset, episode 1 "):
                stepper.step(ACTIONS[:1])
        stepper.close()


@pytest.mark.parametrize(("how", "t"), [("die", 3), *further(("hang", 3), ("die", 0))])
def test_a_process_that_dies_or_hangs_is_replaced(how: str, t: int) -> None:
    fails = fails_once(1, episode=2, t=t, how=how)
    stepper = stepper_of(fails, "async", env_step_timeout=5.0 if how == "hang" else None)
    seen = sampled(stepper, until=5)
    # The reset is part of the step before it, whose row is lost with it: nobody is left to tell of it.
    assert seen.faulty == [1]
    assert seen.episodes(1)[:3] == ([(0, 0), (1, 0), (1, 1)] if t == 0 else [(0, 0), (0, 1), (1, 0)])
    assert seen.episodes(0)[:5] == [(0, n) for n in range(5)]


def test_a_process_that_died_is_an_error_without_restarts_and_a_reset_replaces_it() -> None:
    stepper = stepper_of(fails_once(1, episode=0, t=2, how="die"), "async", max_restarts=None)
    stepper.reset(seeds=EpisodeSeeds(7, num_envs=3))
    with pytest.raises(EnvError, match=r"process of environment 1 is gone \(killed by signal 9\)"):
        run(stepper, 10)
    seen = Transitions(stepper.reset())
    for _ in range(LENGTH):
        seen.add(stepper.step(ACTIONS))
    stepper.close()
    assert [seen.episodes(env) for env in range(3)] == [[(0, 1)], [(1, 0)], [(0, 1)]]


def test_a_process_killed_between_two_steps_is_replaced() -> None:
    stepper = stepper_of(lambda env, what: None, "async")
    assert isinstance(stepper, ProcessStepper)
    seen = Transitions(stepper.reset())
    seen.add(stepper.step(ACTIONS))
    os.kill(stepper.envs.call("pid")[2], signal.SIGKILL)
    for _ in range(100):
        seen.add(stepper.step(ACTIONS))
        if len(seen.episodes(2)) >= 2:
            break
    stepper.close()
    assert seen.faulty == [2]
    assert seen.episodes(2)[0] == (1, 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_restarts_are_bounded_and_the_last_error_is_raised(mode: str) -> None:
    """Row "endless reset retry": a reset that keeps failing is an error, not a loop."""

    def fails(env: Crashing, what: str) -> None:
        if env.index == 1 and (env.recreated or (env.episode, what) == (1, "reset")):
            raise ValueError("no connection")

    stepper = stepper_of(fails, mode, max_restarts=3)
    with pytest.raises(EnvError, match="no connection'; it was recreated 3 times in a row, see max_env_re"):
        sampled(stepper, until=10)
    assert stepper.failures == 4
    stepper.close()


def test_pauses_grow_up_to_a_bound_and_the_others_go_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    down = {"until": 4}

    def fails(env: Crashing, what: str) -> None:
        if env.index == 1 and (env.recreated or (env.episode, env.t) == (1, 2)) and down["until"]:
            down["until"] -= 1
            raise ValueError("no connection")

    envs = SyncVectorEnv(
        [
            lambda i=i: Crashing(EnvContext({"fails": fails}, vector_index=i))  # type: ignore[misc]
            for i in range(3)
        ]
    )
    stepper = LocalStepper(
        envs,
        make=lambda i: Crashing(EnvContext({"fails": fails}, vector_index=i, recreated=True)),
        max_restarts=100,
    )
    monkeypatch.setattr("rlio.envs.restarts._PAUSE_S", 1.0)
    monkeypatch.setattr("rlio.envs.restarts._MAX_PAUSE_S", 2.5)
    monkeypatch.setattr("rlio.envs.restarts.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("rlio.envs.local.time", SimpleNamespace(sleep=sleep))
    seen = Transitions(stepper.reset())
    back = []
    for step in range(40):
        made = stepper.step(ACTIONS)
        seen.add(made)
        if 1 in made.errors or made.starts[1]:
            back.append((step, 1 in made.errors))
        now[0] += 0.5
    # At once, after 1 s, after 2 s, after 2.5 s: two, four and five steps of half a second.
    assert back[1:] == [
        (6, True),
        (8, True),
        (12, True),
        (17, False),
        *[(n, False) for n in (22, 27, 32, 37)],
    ]
    assert seen.episodes(0) == [(0, n) for n in range(8)]
    assert slept == []


def test_where_all_are_down_it_waits_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    failures = iter([True, True, True])

    def fails(env: Crashing, what: str) -> None:
        if env.t == 2 and what == "step" and not env.recreated:
            raise ValueError("gone")
        if what == "make" and env.recreated and next(failures, False):
            raise ValueError("still gone")

    envs = SyncVectorEnv([lambda: Crashing(EnvContext({"fails": fails}))])
    stepper = LocalStepper(
        envs,
        make=lambda i: Crashing(EnvContext({"fails": fails}, recreated=True)),
        max_restarts=100,
    )
    monkeypatch.setattr("rlio.envs.restarts._PAUSE_S", 1.0)
    monkeypatch.setattr("rlio.envs.restarts.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("rlio.envs.local.time", SimpleNamespace(sleep=sleep))
    seen = Transitions(stepper.reset())
    for _ in range(LENGTH + 6):
        seen.add(stepper.step(ACTIONS[:1]))
    assert slept == [1.0, 2.0, 4.0]
    assert seen.episodes(0) == [(1, 0)]


def test_an_environment_whose_episodes_never_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlio.envs.restarts._EPISODES_LOST", 50)

    def fails(env: Crashing, what: str) -> None:
        if env.t == 2:
            raise ValueError("always")

    stepper = stepper_of(fails, "sync")
    with pytest.raises(EnvError, match="none of its last 50 episodes ended"):
        sampled(stepper, until=1)


def test_what_cannot_be_recreated_is_refused_beforehand() -> None:
    with pytest.raises(OptionError, match="pass a function"):
        make_stepper(Crashing(EnvContext()), RolloutConfig(restart_failed_sub_environments=True))

    envs = SyncVectorEnv([lambda: Crashing(EnvContext())])
    with pytest.raises(OptionError, match="pass a function"):
        make_stepper(envs, RolloutConfig(restart_failed_sub_environments=True))
    with pytest.raises(OptionError, match="pass a function"):
        make_stepper(lambda: envs, RolloutConfig(restart_failed_sub_environments=True))


def test_an_environment_recreated_has_the_spaces_of_the_first() -> None:
    class Changed(Crashing):
        def __init__(self, context: EnvContext) -> None:
            super().__init__(context)
            if context.recreated:
                self.action_space = type(self.action_space)(5)

    for mode in ("sync", "async"):
        context = EnvContext({"fails": fails_once(0, episode=0, t=1)})
        config = RolloutConfig(vectorize_mode=mode, restart_failed_sub_environments=True, max_env_restarts=2)
        stepper = make_stepper(Changed, config, context)
        stepper.reset()
        with pytest.raises(EnvError, match=r"has the spaces.*Discrete\(5\)"):
            run(stepper, 10)
        stepper.close()


def test_failures_in_the_first_reset_are_waited_for_and_told() -> None:
    def fails(env: Crashing, what: str) -> None:
        if what == "reset" and not env.recreated and env.index == 2:
            raise ValueError("not yet")

    for mode in ("sync", "async"):
        stepper = stepper_of(fails, mode)
        seen = Transitions(stepper.reset(seeds=EpisodeSeeds(7, num_envs=3)))
        assert seen.obs[:, 1].tolist() == [0, 0, 1]
        step = stepper.step(ACTIONS)
        assert list(step.errors) == [2]
        assert step.faulty is None
        seen.add(step)
        stepper.close()


def test_recreated_environments_are_told() -> None:
    for mode in ("sync", "async"):
        stepper = stepper_of(fails_once(1, episode=1, t=2), mode)
        told: list[int] = []
        stepper.on_recreated = told.append
        sampled(stepper, until=4)
        assert told == [1]


def test_a_step_that_works_begins_the_count_again() -> None:
    restarts = Restarts(2, num_envs=1)
    for _ in range(50):
        restarts.failed(0, ValueError("now and then"))
        restarts.recreated(0)
        restarts.stepped(0)
    assert restarts.count == 50


# ---- what becomes of it in a runner ----


class Told(Callbacks):
    """Keeps what episodes ended with, and which environments were made."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, int, str]] = []
        self.made: list[tuple[int, bool]] = []

    def on_episode_end(self, *, episode: Any, error: Exception | None = None, **kwargs: Any) -> None:
        self.ends.append((episode.env_index, episode.length, "" if error is None else str(error)))

    def on_sub_environment_created(self, *, env_index: int, context: Any = None, **kwargs: Any) -> None:
        self.made.append((env_index, context.recreated))


def runner_of(fails: Callable[[Crashing, str], None], mode: Any, **options: Any) -> tuple[EnvRunner, Told]:
    told = Told()
    config = RolloutConfig(
        num_envs=3,
        vectorize_mode=mode,
        env_config={"fails": fails},
        **{"rollout_fragment_length": 4 * LENGTH, "restart_failed_sub_environments": True} | options,
    )
    return EnvRunner(Crashing, RandomPolicy(), config=config, callbacks=told, seed=7), told


def assert_whole(batch: SampleBatch) -> None:
    """Each episode of the batch has steps 0, 1, 2, ... of one life and episode of one environment."""
    for rows in batch.split_by_episode():
        assert (rows["obs"][:, :3] == rows["obs"][0, :3]).all()
        assert (rows["obs"][:, 3] == rows["t"]).all()
        assert (np.diff(rows["t"]) == 1).all()
        assert (rows["new_obs"][:, :3] == rows["obs"][:, :3]).all()
        assert (rows["new_obs"][:, 3] == rows["t"] + 1).all()
        assert (rows["terminateds"] == (rows["t"] == LENGTH - 1)).all()


@pytest.mark.few(1)
@pytest.mark.each_value_once
@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize(
    ("mode", "t"),
    [*(("sync", t) for t in (0, 3, LENGTH)), ("async", 3), *further(("async", 0), ("async", LENGTH))],
)
def test_a_runner_discards_the_episode_counts_it_and_goes_on(mode: str, batch_mode: str, t: int) -> None:
    """Row "env-error protocol": on_episode_end gets the error; the metrics count a faulty episode."""
    runner, told = runner_of(fails_once(1, episode=2, t=t), mode, batch_mode=batch_mode)
    batches = [runner.run() for _ in range(4)]
    runner.stop()
    for batch in batches:
        assert_whole(batch)
        if batch_mode == "truncate_episodes":
            assert len(batch) == 3 * 4 * LENGTH
        else:
            assert len(batch) >= 4 * LENGTH
            assert all(len(rows) == LENGTH for rows in batch.split_by_episode())
    rows = concat_samples(batches)
    of_env = rows["obs"][rows["env_id"] == 1][:, 1:3]
    # The failed one, (0, 2), is not among them, or only its rows that were handed out before.
    assert [tuple(row) for row in np.unique(of_env, axis=0).astype(int).tolist()][:3] == [
        (0, 0),
        (0, 1),
        (1, 0),
    ]
    assert runner.steps_dropped == max(t - 1, 0)
    summary = runner.get_metrics().summarise()
    assert summary["num_faulty_episodes"] == 1
    assert told.made == [(0, False), (1, False), (2, False), (1, True)]
    errors = [end for end in told.ends if end[2]]
    # Where the reset fails, no episode had begun that could end.
    assert errors == ([] if t == 0 else [(1, t - 1, "the simulator is gone")])
    assert all(length == LENGTH for _, length, error in told.ends if not error)


@pytest.mark.few(1)
@pytest.mark.parametrize(("mode", "t"), [("sync", 0), ("sync", 3), ("async", 3), *further(("async", 0))])
def test_a_runner_without_restarts_raises_and_starts_over(mode: str, t: int) -> None:
    runner, _ = runner_of(fails_once(1, episode=2, t=t), mode, restart_failed_sub_environments=False)
    with pytest.raises(EnvError, match=r"environment 1 failed in .*the simulator is gone"):
        runner.run()
    batch = runner.run()
    runner.stop()
    assert_whole(batch)
    assert len(batch) == 3 * 4 * LENGTH


@pytest.mark.few(1)
@pytest.mark.parametrize(("p_crash", "p_crash_reset"), [(0.1, 0.3), *further((0.1, 0.0), (0.0, 0.3))])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_environments_that_crash_at_random(mode: str, p_crash: float, p_crash_reset: float) -> None:
    """Upstream's test_envs_that_crash: crash on step and on reset, with restarts."""

    def fails(env: Crashing, what: str) -> None:
        p = {"make": 0.0, "reset": p_crash_reset, "step": p_crash}[what]
        if what != "make" and env.np_random.random() < p:
            raise ValueError("crashed")

    runner, _ = runner_of(fails, mode)
    batches = [runner.run() for _ in range(3)]
    runner.stop()
    for batch in batches:
        assert_whole(batch)
        assert len(batch) == 3 * 4 * LENGTH
    summary = runner.get_metrics().summarise()
    assert summary["num_faulty_episodes"] > 0
    assert summary["episode_len_min"] == summary["episode_len_max"] == LENGTH


def test_a_worker_restarts_environments_and_records_no_row_of_a_failed_episode(tmp_path: Path) -> None:
    """Row "restart_failed_sub_environments" of RolloutWorker; what is handed out is what is stored."""
    rollout = RolloutConfig(
        num_envs=3,
        rollout_fragment_length=4 * LENGTH,
        batch_mode="complete_episodes",
        restart_failed_sub_environments=True,
        env_config={"fails": fails_once(1, episode=2, t=3)},
    )
    output = str(tmp_path / "out")
    with RolloutWorker(Crashing, RandomPolicy(), rollout=rollout, output=output, seed=0) as worker:
        rows = sum(len(worker.sample()) for _ in range(4))
    stored = concat_samples(list(DatasetReader(output, epochs=1)))
    assert len(stored) == rows
    assert_whole(stored)
    assert set(np.unique(stored["obs"][stored["env_id"] == 1][:, 1])) == {0, 1}
