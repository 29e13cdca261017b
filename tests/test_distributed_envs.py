"""Environments that are Ray actors: the same rows, the same errors and restarts as those in this process.

Row of RLlib's tables: "remote_worker_envs" with "remote_env_batch_wait_ms", "RemoteBaseEnv".
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from counter_agents import AgentCounter
from counting_env import CountingEnv, CountingVectorEnv, check_stream
from gymnasium.vector import AutoresetMode
from remote_env import RemoteEnv

from rlio import EnvRunner, MultiAgentEnvRunner, RandomPolicy, RolloutConfig, RolloutWorker, SampleBatch
from rlio.envs.process_stepper import ProcessStepper
from rlio.envs.remote import EnvActors
from rlio.envs.seeds import EpisodeSeeds, episode_seed
from rlio.errors import EnvError, MissingExtra, OptionError
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.make_env import make_stepper

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "rlio")


def setup_of(**options: Any) -> RolloutConfig:
    return RolloutConfig(remote_worker_envs=True, **options)


@pytest.fixture(scope="module")
def shared(ray_cluster: None) -> Iterator[ProcessStepper]:
    """Three actors; failures are raised, and a reset recreates what is gone."""
    stepper = make_stepper(
        RemoteEnv, setup_of(num_envs=3, remote_env_batch_wait_ms=0.0, env_step_timeout=60.0)
    )
    assert isinstance(stepper, ProcessStepper)
    yield stepper
    stepper.close()


def step_until(stepper: ProcessStepper, env: int, action: int) -> Any:
    """Step until there is a row of ``env``."""
    for _ in range(1_000_000):
        step = stepper.step(np.full(stepper.num_envs, action))
        if step.valid is None or step.valid[env]:
            return step
    raise AssertionError(f"environment {env} does not go on")


@pytest.mark.further
def test_only_the_ready_ones_are_stepped_and_the_slow_one_keeps_its_action(
    shared: ProcessStepper, tmp_path: Path
) -> None:
    first = np.array(shared.reset(seeds=EpisodeSeeds(1, num_envs=3)))
    gate = tmp_path / "open"
    shared.envs.set_attr("fault", [None, str(gate), None])
    rows = np.zeros(3, int)
    number = 0
    while min(rows[0], rows[2]) < 20:
        step = shared.step(np.full(3, 100 + number))
        assert step.valid is not None
        assert not step.valid[1]
        assert not step.starts[1]
        assert (step.obs[1] == first[1]).all()
        rows += step.valid
        number += 1
    gate.touch()
    step = step_until(shared, 1, 200)
    # Of all that was sent to it, it got the first.
    assert int(step.rewards[1]) == 100
    assert step.obs[1][:4].tolist() == [1, first[1][1], first[1][2], 1]


@pytest.mark.further
def test_an_exception_says_which_environment_episode_and_seed(shared: ProcessStepper) -> None:
    shared.reset(seeds=EpisodeSeeds(7, num_envs=3))
    shared.envs.set_attr("fault", [None, None, "raise"])
    with pytest.raises(EnvError, match=r"environment 2 failed in step 0.*the simulator is gone") as caught:
        step_until(shared, 2, 0)
    assert (caught.value.env_index, caught.value.episode) == (2, 0)
    assert caught.value.seed == episode_seed(7, 0, 2, 0)
    assert isinstance(caught.value.__cause__, ValueError)
    # It can go on, with new episodes.
    shared.reset()
    assert int(step_until(shared, 2, 5).rewards[2]) == 5


@pytest.mark.few(1)
@pytest.mark.parametrize(("fault", "words"), [("untold", "Untold: '1 and 2'"), ("lock", "pickle")])
def test_what_cannot_be_pickled_is_told_all_the_same(shared: ProcessStepper, fault: str, words: str) -> None:
    shared.reset()
    shared.envs.set_attr("fault", [fault, None, None])
    with pytest.raises(EnvError, match=words) as caught:
        step_until(shared, 0, 0)
    assert caught.value.env_index == 0
    shared.reset()
    assert int(step_until(shared, 0, 5).rewards[0]) == 5


def test_what_is_asked_meanwhile_loses_no_step(shared: ProcessStepper, tmp_path: Path) -> None:
    shared.reset()
    gate = tmp_path / "open"
    shared.envs.set_attr("fault", [None, str(gate), None])
    shared.step(np.full(3, 5))
    gate.touch()
    assert shared.envs.get_attr("index") == (0, 1, 2)
    step = step_until(shared, 1, 6)
    assert int(step.rewards[1]) == 5
    pids = shared.envs.get_attr("made_in")
    assert len({os.getpid(), *(pid for pid, _ in pids)}) == 4
    with pytest.raises(AttributeError, match="nonsense"):
        shared.envs.get_attr("nonsense")


@pytest.mark.further
def test_an_actor_that_is_killed_or_hangs_is_an_error_without_restarts_and_a_reset_replaces_it(
    shared: ProcessStepper,
) -> None:
    shared.reset(seeds=EpisodeSeeds(7, num_envs=3))
    old, _ = shared.envs.get_attr("made_in")[1]
    os.kill(old, signal.SIGKILL)
    with pytest.raises(EnvError, match=r"process of environment 1 is gone \(ActorDiedError") as caught:
        step_until(shared, 1, 0)
    assert caught.value.env_index == 1
    assert shared.envs.get_attr("index") == (0, None, 2)
    assert shared.reset()[:, 1].tolist() == [0, 1, 0]
    assert shared.envs.get_attr("made_in")[1][0] != old
    shared.envs.set_attr("fault", [None, None, "hang"])
    shared.step(np.zeros(3, int))
    shared._since[2] -= 3600.0  # As if it had been asked an hour ago: the others have all the time they need.
    with pytest.raises(EnvError, match=r"environment 2 failed in step 0") as caught:
        step_until(shared, 2, 0)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert shared.reset()[:, 1].tolist() == [0, 1, 1]
    assert int(step_until(shared, 2, 5).rewards[2]) == 5


class Told(Callbacks):
    """Keeps what episodes ended with, and which environments were made."""

    def __init__(self) -> None:
        self.failed: list[tuple[int, str]] = []
        self.made: list[tuple[int, bool]] = []

    def on_episode_end(self, *, episode: Any, error: Exception | None = None, **kwargs: Any) -> None:
        if error is not None:
            self.failed.append((episode.env_index, type(error).__name__))

    def on_sub_environment_created(self, *, env_index: int, context: Any = None, **kwargs: Any) -> None:
        self.made.append((env_index, context.recreated))


def worker_of(output: Path, told: Callbacks | None = None, **config: Any) -> RolloutWorker:
    rollout = RolloutConfig(
        num_envs=2,
        rollout_fragment_length=40,
        batch_mode="complete_episodes",
        record_env_seeds=True,
        record_infos=True,
        restart_failed_sub_environments=True,
        **config,
    )
    return RolloutWorker(
        RemoteEnv, RandomPolicy(), rollout=rollout, output=str(output), seed=3, callbacks=told
    )


def rows_of(batch: SampleBatch, env: int) -> SampleBatch:
    return batch[np.flatnonzero(batch["env_id"] == env)]


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.further
def test_a_worker_records_the_rows_of_environments_in_this_process_and_replaces_a_dead_actor(
    tmp_path: Path,
) -> None:
    """Same seed, same rows; the one that is killed by SIGKILL loses its episode, which is counted."""
    told = Told()
    remote = {
        "remote_worker_envs": True,
        "env_config": {"goodbye": str(tmp_path)},
        "extra_python_environs": {"RLIO_TESTED": "there"},
    }
    with worker_of(tmp_path / "local") as local, worker_of(tmp_path / "remote", told, **remote) as worker:
        for _ in range(3):
            assert worker.sample().equals(local.sample())
        assert isinstance(worker.runner, EnvRunner)
        envs: Any = worker.runner.envs
        assert envs.get_attr("remote") == (True, True)
        assert {variable for _, variable in envs.get_attr("made_in")} == {"there"}
        os.kill(envs.get_attr("made_in")[1][0], signal.SIGKILL)
        after = [worker.sample()]
        while not (rows_of(after[-1], 1)["obs"][:, 1] == 1).any():
            after.append(worker.sample())
        assert worker.get_metrics().summarise()["num_faulty_episodes"] == 1
        pids = [pid for pid, _ in envs.get_attr("made_in")]
    # Environments are closed, and their processes end.
    assert {file.name for file in tmp_path.glob("?-?")} == {"0-0", "1-1"}
    while any(map(runs, pids)):
        time.sleep(0.01)
    assert told.failed == [(1, "ProcessDied")]
    assert told.made == [(0, False), (1, False), (1, True)]
    for batch in after:
        for episode in batch.split_by_episode():
            assert (episode["obs"][:, :3] == episode["obs"][0, :3]).all()
            assert episode["t"].tolist() == list(range(len(episode))) == episode["obs"][:, 3].tolist()
            assert episode["terminateds"].tolist() == [False] * (len(episode) - 1) + [True]


@pytest.mark.further
def test_every_row_is_recorded_in_order_with_true_final_observations() -> None:
    config = RolloutConfig(remote_worker_envs=True, remote_env_batch_wait_ms=0.0)
    runner = EnvRunner(partial(CountingEnv, 0, truncates=True), RandomPolicy(), config=config, seed=3)
    assert isinstance(runner.envs, EnvActors)
    parts = [runner.run(size) for size in (1, 80, 15)]
    runner.stop()
    assert check_stream(parts, num_envs=1, truncates=True) == 96


@pytest.mark.further
def test_restarts_are_bounded_and_the_last_error_is_raised() -> None:
    def make(context: Any) -> gym.Env[Any, Any]:
        if context.recreated:
            raise ValueError("no connection")
        return RemoteEnv(context)

    stepper = make_stepper(make, setup_of(restart_failed_sub_environments=True, max_env_restarts=2))
    assert isinstance(stepper, ProcessStepper)
    stepper.reset()
    stepper.envs.set_attr("fault", "raise")
    with pytest.raises(EnvError, match="no connection'; it was recreated 2 times in a row, see max_env_re"):
        step_until(stepper, 0, 0)
    assert stepper.failures == 3
    stepper.close()


@pytest.mark.further
def test_what_cannot_be_made_there_is_an_option_error() -> None:
    def make(context: Any) -> Any:
        if context.vector_index == 0:
            raise ValueError("port in use")
        return RemoteEnv(context)

    with pytest.raises(OptionError, match="port in use"):
        make_stepper(make, setup_of())


def test_what_actors_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = CountingVectorEnv(2, AutoresetMode.SAME_STEP, truncates=True)
    for env, words in (
        (CountingEnv(0, truncates=True), "remote_worker_envs=True, but .*already in this process"),
        (vector, "remote_worker_envs=True, but .*pass a function"),
    ):
        with pytest.raises(OptionError, match=words):
            make_stepper(env, setup_of())
    with pytest.raises(OptionError, match="remote_worker_envs=True with vectorize_mode='async'"):
        RolloutConfig(remote_worker_envs=True, vectorize_mode="async")
    with pytest.raises(OptionError, match="remote_worker_envs=True: environments with several agents"):
        MultiAgentEnvRunner(
            AgentCounter, {"p": RandomPolicy()}, config=RolloutConfig(remote_worker_envs=True), seed=0
        )
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'rlio\[ray\]'"):
        make_stepper("CartPole-v1", setup_of())
