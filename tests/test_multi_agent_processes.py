"""Environments with several agents in processes of their own: the same rows, slow ones, dead ones."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from counter_agents import map_agent
from further import further
from gymnasium.spaces import Box, Discrete
from sampled_rows import BOTH, TWO, WALKS, Counter, Fails, by_number, described, made, several

from rlio.connectors.mean_std import MeanStdFilter
from rlio.envs.context import EnvContext
from rlio.envs.multi_agent import MultiAgentEnv, make_multi_agent
from rlio.envs.multi_agent_processes import MultiAgentProcess
from rlio.envs.served_envs import ProcessDied
from rlio.errors import EnvError, OptionError, SchemaError
from rlio.policies.random_policy import RandomPolicy
from rlio.sampling.config import RolloutConfig
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner
from rlio.sampling.runners import sub_envs


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "make",
    [
        partial(several, Counter, None, map_agent, record_env_seeds=True, record_infos=True),
        *further(
            partial(several, Counter, None, map_agent, observation_connectors=[MeanStdFilter()], horizon=7)
        ),
        *further(partial(several, Counter, None, map_agent, "episodes")),
        partial(
            several,
            make_multi_agent(Fails),
            None,
            by_number,
            restart_failed_sub_environments=True,
            rollout_fragment_length=6,  # Each failure begins a process.
            **TWO,
        ),
        *further(partial(several, Counter, None, map_agent, env_step_timeout=60.0, vectorize_mode="async")),
    ],
    ids=["counter", "horizon", "episodes", "failures", "timeout"],
)
def test_rows_are_those_of_environments_in_this_process(make: Any) -> None:
    function, _, mapping, *how = make.args
    here = {"vectorize_mode": "sync", "env_step_timeout": None}
    found = [
        [described(each) for each in several(function, made(BOTH), mapping, *how, **make.keywords | options)]
        for options in (here, {"vectorize_mode": "async"})
    ]
    assert found[0] == found[1]


class Odd(MultiAgentEnv):
    """Says its process in its observations; environment 0 does what its ``env_config`` says, at step 3.

    If that is a function, environment 1 calls it in each step.
    """

    possible_agents = ("a",)

    def __init__(self, config: EnvContext) -> None:
        self.observation_spaces = {"a": Box(0, 1e7, (3,), np.float64)}
        self.action_spaces = {"a": Discrete(2)}
        obeys = config.vector_index == int(callable(config["what"]))
        self._what = config["what"] if obeys and not config.recreated else None
        self._index = config.vector_index

    def _seen(self) -> np.ndarray[Any, Any]:
        return np.array([self._index, self._t, os.getpid()], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._t = 0
        return {"a": self._seen()}, {}

    def step(self, actions: Any) -> Any:
        self._t += 1
        if self._t == 3 and self._what == "hangs":
            time.sleep(3600)
        if self._t == 3 and self._what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if callable(self._what):
            self._what()
        obs = {"a": self._seen()}
        if self._t >= 3 and self._what == "brings guests":
            obs |= {f"guest {self._t // 3}": self._seen()}
        no = {"__all__": self._t == 8}
        return obs, {"a": 1.0}, no, {"__all__": False}, {}

    def get_observation_space(self, agent_id: Any) -> Any:
        return self.observation_spaces["a"]

    def get_action_space(self, agent_id: Any) -> Any:
        return self.action_spaces["a"]


def runner_of(what: Any, **options: Any) -> MultiAgentEnvRunner:
    given: dict[str, Any] = {"num_envs": 2, "rollout_fragment_length": 12, "vectorize_mode": "async"}
    config = RolloutConfig(**given | options, env_config={"what": what})
    return MultiAgentEnvRunner(Odd, {"one": RandomPolicy()}, config=config, seed=0)


@pytest.mark.parametrize("what", ["dies", *further("hangs")])
def test_one_that_hangs_or_dies_is_recreated_or_raised(what: str) -> None:
    options: dict[str, Any] = {"env_step_timeout": 3.0 if what == "hangs" else None}
    runner = runner_of(what, **options)
    with pytest.raises(EnvError) as caught:
        runner.run()
    assert isinstance(caught.value.__cause__, TimeoutError if what == "hangs" else ProcessDied)
    runner.stop()
    runner = runner_of(what, restart_failed_sub_environments=True, **options)
    rows = runner.run()["one"]
    assert len(rows) == 24
    processes = np.unique(rows["obs"][:, 2])
    assert os.getpid() not in processes
    runner.run()
    metrics = runner.get_metrics()
    assert metrics.counts.env_restarts == metrics.counts.faulty_episodes == 1
    runner.stop()


def test_a_slow_one_does_not_hold_up_the_others() -> None:
    gate = multiprocessing.get_context().Event()
    runner = runner_of(gate.wait, remote_env_batch_wait_ms=0.0)
    batches = [runner.run()["one"] for _ in range(2)]
    index = np.concatenate([batch["obs"][:, 0] for batch in batches])
    assert len(index) == 48
    assert (index == 0).all(), "the other has made all steps"
    gate.set()
    while (batches[-1]["obs"][:, 0] == 0).all():
        batches.append(runner.run()["one"])
    index, t = np.concatenate([batch["obs"][:, :2] for batch in batches]).T
    for env in range(2):
        mine = t[index == env]
        assert np.array_equal(mine, np.arange(len(mine)) % 8), "none is left out"
    assert len(runner.sample(num_timesteps=4, force_reset=True)) > 0
    runner.stop()


def test_actions_that_cannot_be_pickled_leave_no_request_behind() -> None:
    """The next reset must not wait for the answer to a step that was not sent."""
    process = MultiAgentProcess(0, lambda index, recreated: Odd(EnvContext({"what": None})), timeout=60.0)
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        process.send({"a": lambda: None})
    process.reset()
    process.send({"a": 1})
    assert process.step().observations["a"][1] == 1
    process.close()


def test_agents_that_nobody_named_before_have_spaces() -> None:
    runner = runner_of("brings guests", num_envs=1)
    batch = runner.run()["one"]
    assert set(batch["agent_index"]) == {0, 1, 2}
    runner.stop()


def test_what_an_environment_gives_wrongly_is_a_schema_error_and_misuse_is_told() -> None:
    class Wrong(Odd):
        def step(self, actions: Any) -> Any:
            return 1

    config = RolloutConfig(vectorize_mode="async", env_config={"what": None})
    runner = MultiAgentEnvRunner(Wrong, {"one": RandomPolicy()}, config=config)
    with pytest.raises(SchemaError):
        runner.run()
    for misuse in (runner.envs[0].reset, lambda: sub_envs(runner)):
        with pytest.raises(OptionError):
            misuse()
    assert runner.env_id == "Wrong"
    runner.stop()
    with pytest.raises(OptionError):
        MultiAgentEnvRunner(
            WALKS(num_agents=1), {"one": RandomPolicy()}, config=RolloutConfig(vectorize_mode="async")
        )
