"""Environments in processes: those that are slow do not hold up the others.

Row of RLlib's tables: "remote_worker_envs" with "remote_env_batch_wait_ms", "RemoteBaseEnv".
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from crashing_env import cartpole
from further import further
from gymnasium.spaces import Box, Dict, Discrete, Graph, GraphInstance, Text

from rlio.envs.context import EnvContext
from rlio.envs.process_stepper import ProcessStepper
from rlio.envs.processes import EnvProcesses
from rlio.envs.seeds import EpisodeSeeds
from rlio.errors import EnvError, OptionError
from rlio.policies.random_policy import RandomPolicy
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.make_env import make_stepper

LENGTH = 7


class Echo(gym.Env[Any, Any]):
    """Observations are (index, episode, t, last action); the reward is the action. May wait in a step."""

    observation_space = Box(-1, 1e6, (4,), np.float32)
    action_space = Discrete(1000)

    def __init__(self, context: EnvContext) -> None:
        self.index, self.wait = context.vector_index, context["wait"]
        self.episode = -1

    def pid(self) -> int:
        return os.getpid()

    def _obs(self, action: int) -> Any:
        return np.array([self.index, self.episode, self.t, action], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._obs(-1), {}

    def step(self, action: Any) -> Any:
        self.wait(self)
        self.t += 1
        return self._obs(action), float(action), False, self.t == LENGTH, {"action": int(action)}


def stepper_of(wait: Callable[[Echo], None], **options: Any) -> ProcessStepper:
    setup = RolloutConfig(num_envs=3, vectorize_mode="async", env_config={"wait": wait}, **options)
    stepper = make_stepper(Echo, setup)
    assert isinstance(stepper, ProcessStepper)
    return stepper


def test_the_ready_ones_go_on_and_the_slow_one_keeps_its_action() -> None:
    gate = multiprocessing.get_context().Event()

    def wait(env: Echo) -> None:
        if env.index == 1:
            gate.wait()

    stepper = stepper_of(wait, remote_env_batch_wait_ms=0.0)
    first = np.array(stepper.reset(seeds=EpisodeSeeds(1, num_envs=3)))
    rows = np.zeros(3, int)
    number = 0
    while min(rows[0], rows[2]) < 20:
        step = stepper.step(np.full(3, 100 + number))
        assert step.valid is not None
        assert not step.valid[1]
        assert not step.starts[1]
        assert (step.obs[1] == first[1]).all()
        rows += step.valid
        number += 1
    gate.set()
    for number in range(1_000_000):
        step = stepper.step(np.full(3, 200 + number))
        if step.valid is None or step.valid[1]:
            break
    # Of all that was sent to it, it got the first.
    assert step.rewards[1] == 100
    assert step.obs[1].tolist() == [1, 0, 1, 100]
    stepper.close()


@pytest.mark.parametrize("wait_ms", [0.0, *further(None, 2.0)])
def test_rows_of_slow_environments_are_exact(wait_ms: float | None) -> None:
    def wait(env: Echo) -> None:
        if env.np_random.random() < 0.2:
            time.sleep(0.003 * env.index)

    config = RolloutConfig(
        num_envs=4,
        vectorize_mode="async",
        rollout_fragment_length=30,
        remote_env_batch_wait_ms=wait_ms,
        env_config={"wait": wait},
        record_infos=True,
    )
    runner = EnvRunner(Echo, RandomPolicy(), config=config, seed=0)
    batches = [runner.run() for _ in range(2)]
    runner.stop()
    for batch in batches:
        assert len(batch) == 120
        assert (batch["rewards"] == batch["actions"]).all()
        assert (batch["new_obs"][:, 3] == batch["actions"]).all()
        assert [info["action"] for info in batch["infos"]] == batch["actions"].tolist()
        assert (batch["obs"][:, 2] == batch["t"]).all()
        assert (batch["new_obs"][:, 2] == batch["t"] + 1).all()
        assert (batch["obs"][:, :2] == batch["new_obs"][:, :2]).all()
        assert (batch["obs"][:, 0] == batch["env_id"]).all()
        assert (batch["truncateds"] == (batch["t"] == LENGTH - 1)).all()
    for env in range(4):
        # One after the other, none missing and none twice.
        rows = np.concatenate([batch["obs"][batch["env_id"] == env] for batch in batches])
        number = rows[:, 1] * LENGTH + rows[:, 2]
        assert number.tolist() == list(range(len(rows)))
        if wait_ms is None:
            assert len(rows) == 60


def test_what_is_asked_meanwhile_loses_no_step() -> None:
    gate = multiprocessing.get_context().Event()

    def wait(env: Echo) -> None:
        if env.index == 1:
            gate.wait()

    stepper = stepper_of(wait, remote_env_batch_wait_ms=0.0)
    stepper.reset()
    step = stepper.step(np.full(3, 5))
    gate.set()
    assert stepper.envs.get_attr("index") == (0, 1, 2)
    stepper.envs.set_attr("index", [10, 11, 12])
    seen = {}
    for _ in range(100):
        step = stepper.step(np.full(3, 6))
        if step.valid is None or step.valid[1]:
            seen[1] = step.rewards[1], step.obs[1].copy()
            break
    assert seen[1][0] == 5
    assert seen[1][1].tolist() == [1, 0, 1, 5]
    assert stepper.envs.call("get_wrapper_attr", "index") == (10, 11, 12)
    stepper.close()


def test_a_new_beginning_waits_for_steps_under_way() -> None:
    stepper = stepper_of(lambda env: time.sleep(0.01 * env.index), remote_env_batch_wait_ms=0.0)
    stepper.reset()
    for _ in range(3):
        stepper.step(np.full(3, 5))
        obs = stepper.reset()
        assert obs[:, 2].tolist() == [0, 0, 0]
    assert obs[:, 1].tolist() == [3, 3, 3]
    stepper.close()


def test_observations_of_any_kind_come_through() -> None:
    class Mixed(gym.Env[Any, Any]):
        observation_space = Dict(text=Text(9), image=Box(0, 255, (3, 2), np.uint8), n=Discrete(9))
        action_space = Dict(a=Discrete(5), b=Box(-1, 1, (2,)))

        def _obs(self) -> Any:
            return {"text": "x" * self.t, "image": np.full((3, 2), self.t, np.uint8), "n": self.t}

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.t = 1
            return self._obs(), {}

        def step(self, action: Any) -> Any:
            self.t += int(action["a"])
            return self._obs(), 0.0, self.t > 6, False, {}

    for mode in ("sync", "async"):
        stepper = make_stepper(Mixed, RolloutConfig(num_envs=2, vectorize_mode=mode))
        obs = stepper.reset()
        assert obs["text"].tolist() == ["x", "x"]
        step = stepper.step({"a": np.array([1, 2]), "b": np.zeros((2, 2), np.float32)})
        assert step.obs["text"].tolist() == ["xx", "xxx"]
        assert step.obs["image"][:, 0, 0].tolist() == [2, 3] == step.obs["n"].tolist()
        step = stepper.step({"a": np.array([1, 4]), "b": np.zeros((2, 2), np.float32)})
        ((env, final),) = step.finals
        assert env == 1
        assert {str(leaf) for leaf in final if np.ndim(leaf) == 0} == {"xxxxxxx", "7"}
        assert step.obs["n"].tolist() == [3, 1]
        stepper.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_final_observations_of_a_graph_space_are_graphs(mode: str) -> None:
    class Grows(gym.Env[Any, Any]):
        observation_space, action_space = Graph(Box(0, 9, (2,)), None), Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return GraphInstance(np.zeros((1, 2), np.float32), None, None), {}

        def step(self, action: Any) -> Any:
            return GraphInstance(np.ones((2, 2), np.float32), None, None), 0.0, True, False, {}

    stepper = make_stepper(Grows, RolloutConfig(vectorize_mode=mode))
    stepper.reset()
    ((_, (final,)),) = stepper.step(np.zeros(1, int)).finals
    assert isinstance(final, GraphInstance)
    stepper.close()


def test_times_below_zero_are_refused() -> None:
    with pytest.raises(OptionError, match="remote_env_batch_wait_ms=-1"):
        stepper_of(lambda env: None, remote_env_batch_wait_ms=-1.0)
    with pytest.raises(OptionError, match="env_step_timeout=-1"):
        RolloutConfig(vectorize_mode="async", env_step_timeout=-1.0)
    with pytest.raises(OptionError, match="vectorize_mode='async'"):
        RolloutConfig(remote_env_batch_wait_ms=0.0)


def test_what_environments_that_are_there_already_cannot_do_is_refused() -> None:
    """Not passed over: nobody believes in a time limit that there is not."""
    vector = gym.vector.SyncVectorEnv([lambda: cartpole(0, False)])
    for env, options, words in (
        (cartpole(0, False), {}, "vectorize_mode='async'.*already in this process"),
        (vector, {"env_step_timeout": 5.0}, "env_step_timeout=5.0.*pass a function"),
        (vector, {"remote_env_batch_wait_ms": 0.0}, "remote_env_batch_wait_ms=0.0.*pass a function"),
    ):
        with pytest.raises(OptionError, match=words):
            make_stepper(env, RolloutConfig(vectorize_mode="async", **options))


def test_processes_end_with_their_environments() -> None:
    def running() -> set[str]:
        return {child.name for child in multiprocessing.active_children()}

    before = running()
    stepper = stepper_of(lambda env: None)
    assert len(running() - before) == 3
    stepper.close()
    stepper.close()
    assert running() <= before, "those of other tests may end meanwhile"


def test_environments_of_unlike_spaces_are_refused_and_leave_no_process() -> None:
    before = set(multiprocessing.active_children())

    def make(context: EnvContext) -> gym.Env[Any, Any]:
        env = Echo(context)
        if context.vector_index == 1:
            env.action_space = gym.spaces.Discrete(7)
        return env

    context = EnvContext({"wait": lambda env: None})
    with pytest.raises(OptionError, match="environment 1 has the spaces"):
        make_stepper(make, RolloutConfig(num_envs=2, vectorize_mode="async"), context)
    assert set(multiprocessing.active_children()) <= before


def test_an_environment_that_cannot_be_made_there_is_an_option_error_and_leaves_no_process() -> None:
    before = set(multiprocessing.active_children())

    def make(context: EnvContext) -> gym.Env[Any, Any]:
        if context.vector_index == 2:
            raise ValueError("port in use")
        return Echo(EnvContext({**context, "wait": None}, vector_index=context.vector_index))

    with pytest.raises(OptionError, match="port in use"):
        make_stepper(make, RolloutConfig(num_envs=3, vectorize_mode="async"))
    assert set(multiprocessing.active_children()) <= before


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_errors_and_infos_that_cannot_be_pickled_are_told_all_the_same() -> None:
    class Odd(Echo):
        def step(self, action: Any) -> Any:
            if action == 1:
                raise Unpicklable(1, 2)
            return *super().step(action)[:4], {"lambda": lambda: None}

    context = EnvContext({"wait": lambda env: None})
    stepper = make_stepper(Odd, RolloutConfig(vectorize_mode="async"), context)
    for action, message in ((1, "Unpicklable: '1 and 2'"), (0, "pickle")):
        stepper.reset()
        with pytest.raises(RuntimeError, match=message):
            stepper.step(np.array([action]))
    stepper.close()


@pytest.mark.further
def test_environments_in_processes_that_were_started_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent to a process does not need to be inherited."""
    spawn = multiprocessing.get_context("spawn")
    monkeypatch.setattr(multiprocessing, "get_context", lambda: spawn)
    envs = EnvProcesses(cartpole, num_envs=2)
    stepper = ProcessStepper(envs)
    obs = np.array(stepper.reset(seed=3))
    alone, _ = gym.make("CartPole-v1").reset(seed=4)
    assert (obs[1] == alone).all()
    assert stepper.step(np.array([0, 1])).rewards.tolist() == [1.0, 1.0]
    stepper.close()


def test_what_cannot_be_asked_leaves_no_answer_behind() -> None:
    stepper = stepper_of(lambda env: None)
    stepper.reset()
    with pytest.raises(AttributeError, match="nonsense"):
        stepper.envs.get_attr("nonsense")
    with pytest.raises(TypeError):
        stepper.envs.call("_obs")
    assert stepper.step(np.arange(3)).rewards.tolist() == [0, 1, 2]
    os.kill(stepper.envs.call("pid")[1], signal.SIGKILL)
    assert stepper.envs.get_attr("index") == (0, None, 2)
    with pytest.raises(EnvError, match="environment 1 is gone"):
        stepper.step(np.arange(3))
    stepper.reset()
    assert stepper.step(np.arange(3)).rewards.tolist() == [0, 1, 2]
    stepper.close()


@pytest.mark.further
def test_what_hangs_is_not_waited_for_when_others_are_asked() -> None:
    def wait(env: Echo) -> None:
        if env.index == 1:
            multiprocessing.get_context().Event().wait()

    stepper = stepper_of(
        wait, remote_env_batch_wait_ms=0.0, env_step_timeout=3.0
    )  # Two others answer in time on a busy machine, too.
    stepper.reset()
    stepper.step(np.zeros(3, int))
    assert stepper.envs.get_attr("index") == (0, None, 2)
    with pytest.raises(TimeoutError, match="environment 1 does not answer"):
        stepper.envs.set_attr("index", 7)
    stepper.close()


def test_an_error_keeps_what_it_says_on_its_way_through_a_pipe() -> None:
    error = pickle.loads(pickle.dumps(EnvError("gone", env_index=2, episode=3, seed=4)))
    assert (str(error), error.env_index, error.episode, error.seed) == ("gone", 2, 3, 4)
