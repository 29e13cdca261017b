"""Callbacks: only what somebody overrides is called, and several are one."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rlio import EnvRunner, RandomPolicy, RolloutConfig, RolloutWorker, TorchPolicy
from rlio.envs.external import ExternalEnv
from rlio.envs.multi_agent import make_multi_agent
from rlio.errors import ClosedError, OptionError
from rlio.sampling.callbacks import Callbacks, RunningEpisode, combine, overridden
from rlio.sampling.evaluate import evaluate
from rlio.sampling.external_runner import ExternalRunner
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner

EPISODE = RunningEpisode(eps_id=3)


class Tells(Callbacks):
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def on_episode_end(
        self, *, episode: RunningEpisode, error: Exception | None = None, **kwargs: Any
    ) -> None:
        self.log.append(f"{self.name}:{episode.eps_id}:{error}")


def test_every_callback_of_the_table_that_belongs_to_a_worker_is_there() -> None:
    """Rows "callbacks" of 2.4."""
    hooks = {name for name in vars(Callbacks) if name.startswith("on_")}
    assert hooks >= {
        "on_environment_created",
        "on_sub_environment_created",
        "on_episode_created",
        "on_episode_start",
        "on_episode_step",
        "on_episode_end",
        "on_sample_end",
        "on_postprocess_trajectory",
        "on_create_policy",
        "on_learn_on_batch",
        "on_evaluate_start",
        "on_evaluate_end",
        "on_checkpoint_loaded",
    }
    for name in hooks:
        parameters = list(inspect.signature(getattr(Callbacks, name)).parameters.values())[1:]
        kinds = {parameter.kind for parameter in parameters}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}, name


def test_nothing_is_overridden_unless_somebody_does() -> None:
    assert overridden(Callbacks()) == frozenset()
    assert overridden(combine(None)) == frozenset()
    assert overridden(combine([Callbacks, Callbacks])) == frozenset()
    assert overridden(Tells("a", [])) == {"on_episode_end"}
    callbacks: Any = Callbacks()
    callbacks.on_sample_end = print
    assert overridden(callbacks) == {"on_sample_end"}

    class Inherits(Tells):
        pass

    assert overridden(Inherits("a", [])) == {"on_episode_end"}


def test_several_callbacks_are_called_in_their_order_and_may_be_nested() -> None:
    """Row "list of callback classes supported (make_callback)"."""
    log: list[str] = []
    inner = combine([Tells("b", log), Callbacks])
    callbacks = combine([lambda: Tells("a", log), inner, Tells("c", log)])
    assert overridden(callbacks) == {"on_episode_end"}
    callbacks.on_episode_end(runner=None, env=None, episode=EPISODE, error=ValueError("x"))
    callbacks.on_episode_start(runner=None, env=None, episode=EPISODE)
    assert log == ["a:3:x", "b:3:x", "c:3:x"]


def test_one_callback_stays_itself_and_a_class_is_made_once() -> None:
    own = Tells("a", [])
    assert combine(own) is own
    assert combine([own]) is own
    assert type(combine(Callbacks)) is Callbacks


@pytest.mark.parametrize("given", [3, [3], "callbacks", [int], dict])
def test_what_gives_no_callbacks_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="expected Callbacks"):
        combine(given)


def test_a_callback_that_nobody_would_call_is_refused() -> None:
    """A slip, and those of RLlib that belong to an Algorithm."""

    class Slip(Callbacks):
        def on_episode_ended(self, **kwargs: Any) -> None:
            raise AssertionError

        def on_train_result(self, **kwargs: Any) -> None:
            raise AssertionError

    for given in (Slip, Slip(), [Callbacks, Slip]):
        with pytest.raises(
            OptionError, match=r"Slip has on_episode_ended, on_train_result, .* on_episode_end,"
        ):
            combine(given)


def test_an_episode_knows_who_acts_for_whom() -> None:
    assert EPISODE.policy_for() == "default_policy"
    episode = RunningEpisode(eps_id=1, agent_policies={"a": "left"})
    assert episode.policy_for("a") == "left"
    with pytest.raises(OptionError, match="agents so far are \\['a'\\]"):
        episode.policy_for("b")


# ---- RLlib's signatures ----


class Twice(gym.Env[Any, Any]):
    """Episodes of two steps."""

    observation_space, action_space = Box(0, 9, (1,), np.float32), Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t == 2, False, {}


def sampled(callbacks: Any, **options: Any) -> RolloutWorker:
    rollout = RolloutConfig(num_envs=2, rollout_fragment_length=2)
    worker = RolloutWorker(Twice, RandomPolicy(), rollout=rollout, callbacks=callbacks, seed=0, **options)
    worker.sample()
    worker.close()
    return worker


def test_callbacks_with_rllibs_arguments_get_what_there_is_of_them() -> None:
    """They raised a TypeError at the first call: missing 'worker', 'base_env', 'policies', 'env_index'."""
    told: dict[str, Any] = {}

    class Old(Callbacks):
        """As RLlib's old stack writes them, mypy aside."""

        def on_sub_environment_created(  # type: ignore[override]
            self, *, worker: Any, sub_environment: Any, env_context: Any, env_index: Any = None, **kwargs: Any
        ) -> None:
            told["env"] = type(sub_environment.unwrapped), env_context.vector_index, env_index

        def on_episode_end(  # type: ignore[override]
            self, worker: Any, base_env: Any, policies: Any, episode: Any, env_index: Any, **kwargs: Any
        ) -> None:
            told["end"] = worker, base_env.num_envs, list(policies), episode.length, env_index
            told["more"] = sorted(kwargs)

        def on_postprocess_trajectory(  # type: ignore[override]
            self, *, worker: Any, episode: Any, agent_id: Any, policy_id: Any, policies: Any,
            postprocessed_batch: Any, original_batches: Any, **kwargs: Any,
        ) -> None:  # fmt: skip
            told["trajectory"] = worker, list(policies)

        def on_sample_end(self, *, worker: Any, samples: Any, **kwargs: Any) -> None:  # type: ignore[override]
            told["sample"] = worker, len(samples), list(worker.group.policies)

    worker = sampled(Old)
    assert told == {
        "env": (Twice, 1, 1),
        "end": (worker.runner, 2, ["default_policy"], 2, 1),
        "more": ["env", "error", "runner"],
        "trajectory": (worker.runner, ["default_policy"]),
        "sample": (worker, 4, ["default_policy"]),
    }


def test_callbacks_with_the_arguments_of_rllibs_new_stack_get_what_there_is_of_them() -> None:
    told: dict[str, Any] = {}

    class New(Callbacks):
        def on_environment_created(self, *, env_runner: Any, env: Any, env_context: Any) -> None:  # type: ignore[override]
            told["env"] = env.num_envs, env_context.worker_index

        def on_episode_end(  # type: ignore[override]
            self, *, episode: Any, prev_episode_chunks: Any, env_runner: Any, env: Any, env_index: Any,
            rl_module: Any, metrics_logger: Any = None,
        ) -> None:  # fmt: skip
            told["end"] = episode.length, prev_episode_chunks, env_index, rl_module, metrics_logger

    assert told == {}
    module = torch.nn.Linear(1, 2)
    rollout = RolloutConfig(num_envs=2, rollout_fragment_length=2)
    runner = EnvRunner(Twice, TorchPolicy(module), config=rollout, callbacks=New, seed=0)
    runner.run()
    runner.stop()
    assert told == {"env": (2, 0), "end": (2, [], 1, module, None)}


def test_a_callback_gets_only_the_arguments_that_it_names() -> None:
    lengths: list[int] = []

    class Short(Callbacks):
        def on_episode_end(self, episode: Any) -> None:  # type: ignore[override]
            lengths.append(episode.length)

    sampled([Short, Callbacks])
    assert lengths == [2, 2]


def test_an_argument_that_rlio_does_not_have_is_refused_when_callbacks_are_given() -> None:
    class Logs(Callbacks):
        def on_episode_end(self, *, episode: Any, metrics_logger: Any, **kwargs: Any) -> None:  # type: ignore[override]
            raise AssertionError

    class Evaluates(Callbacks):
        def on_evaluate_end(self, *, algorithm: Any, **kwargs: Any) -> None:  # type: ignore[override]
            raise AssertionError

    class Slips(Callbacks):
        def on_sample_end(self, *, sample: Any, **kwargs: Any) -> None:  # type: ignore[override]
            raise AssertionError

    for given, message in (
        (Logs, "on_episode_end takes 'metrics_logger'.*runner, env, episode, error, worker.*custom_metrics"),
        (Evaluates, "on_evaluate_end takes 'algorithm'.*training loop"),
        (Slips, "on_sample_end takes 'sample'.*runner, samples, worker"),
        ({"on_learn_on_batch": lambda worker, **kwargs: None}, "policy, train_batch, result$"),
    ):
        with pytest.raises(OptionError, match=message):
            combine(given)
        with pytest.raises(OptionError, match=message):
            combine([Callbacks, given])
    # A default says that the callback does without it.
    call = combine({"on_episode_end": lambda *, episode, metrics_logger=3: log.append(metrics_logger)})
    log: list[Any] = []
    call.on_episode_end(runner=None, env=None, episode=EPISODE)
    assert log == [3]


def test_callbacks_may_be_functions_by_name() -> None:
    """As in RLlib's `config.callbacks(on_episode_end=...)`, and in its dict of 0.8."""
    told: list[Any] = []
    callbacks = {
        "on_episode_start": None,
        "on_episode_end": [
            lambda episode, **kwargs: told.append(episode.length),
            lambda **kwargs: told.append(1),
        ],
        "on_sample_end": lambda env_runner, samples: told.append((type(env_runner), len(samples))),
    }
    assert overridden(combine(callbacks)) == {"on_episode_end", "on_sample_end"}
    sampled(callbacks)
    assert told == [2, 1, 2, 1, (RolloutWorker, 4)]
    sampled([callbacks, Callbacks])
    assert told[5:] == told[:5]


def test_functions_of_rllib_0_8_get_one_dict() -> None:
    told: dict[str, Any] = {}

    def remember(name: str) -> Any:
        def function(info: dict[str, Any]) -> None:
            told[name] = info
            if name == "on_postprocess_traj":
                info["episode"].custom_metrics["rows"] = len(info["post_batch"])

        return function

    names = ("on_episode_start", "on_episode_step", "on_episode_end", "on_sample_end", "on_postprocess_traj")
    worker = sampled({name: remember(name) for name in names})
    runner: Any = worker.runner
    for name in names[:3]:
        assert told[name]["env"] is runner.envs
        assert list(told[name]["policy"]) == ["default_policy"]
        assert told[name]["episode"].env_index == 1
    assert (told["on_sample_end"]["worker"], len(told["on_sample_end"]["samples"])) == (worker, 4)
    trajectory = told["on_postprocess_traj"]
    assert set(trajectory) == {"episode", "agent_id", "pre_batch", "post_batch", "all_pre_batches"}
    policy, rows = trajectory["pre_batch"]
    assert (policy, len(rows), len(trajectory["post_batch"])) == (worker.policy, 2, 2)
    assert [each.custom_metrics for each in worker.get_metrics().details] == [{"rows": 2}] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"on_train_result": print}, "callbacks has on_train_result, which would never be called"),
        ({"on_episode_ended": print}, "callbacks has on_episode_ended"),
        ({"on_episode_end": 3}, "callbacks\\['on_episode_end'\\]=3: expected a function"),
        ({"on_episode_end": [print, "x"]}, "expected a function, a list of functions, or None"),
        ({"on_create_policy": lambda info: None}, "on_create_policy takes 'info'"),
    ],
)
def test_functions_that_nobody_could_call_are_refused(given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        combine(given)


class Loop(ExternalEnv):
    """Episodes of two steps."""

    def __init__(self) -> None:
        super().__init__(Twice.observation_space, Twice.action_space)

    def run(self) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                episode = self.start_episode()
                for t in range(2):
                    self.get_action(episode, [float(t)])
                    self.log_returns(episode, 1.0)
                self.end_episode(episode, [2.0])


def test_every_runner_gives_rllibs_arguments() -> None:
    told: list[Any] = []

    def tell(
        episode: Any, worker: Any, env_runner: Any, base_env: Any, policies: Any, rl_module: Any
    ) -> None:
        assert worker is env_runner
        told.append((type(worker).__name__, type(base_env).__name__, list(policies), rl_module))

    config = RolloutConfig(rollout_fragment_length=2)
    callbacks = {"on_episode_end": tell}
    evaluate(RandomPolicy(), Twice, episodes=1, callbacks=callbacks, seed=0)
    agents = make_multi_agent(Twice)
    runners: list[Any] = [
        ExternalRunner(Loop(), RandomPolicy(), config=config, callbacks=callbacks, seed=0),
        MultiAgentEnvRunner(agents, {"p": RandomPolicy()}, config=config, callbacks=callbacks, seed=0),
    ]
    for runner in runners:
        runner.run()
        runner.stop()
    assert told == [
        ("EnvRunner", "SyncVectorEnv", ["default_policy"], None),
        ("ExternalEpisodes", "NoneType", ["default_policy"], None),
        ("MultiAgentEnvRunner", type(agents()).__name__, ["p"], {"p": None}),
    ]
