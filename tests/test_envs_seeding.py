"""What environments are seeded with: by worker, environment and episode, the same in every run.

Rows of RLlib's tables: "seeding", "env context", "validate_env", "custom_vector_env",
"extra_python_environs", "render_env".
"""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from crashing_env import Crashing, fails_once
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlio.batch.sample_batch import SampleBatch
from rlio.envs.context import EnvContext, takes_context
from rlio.envs.seeds import EpisodeSeeds, episode_seed
from rlio.envs.vector import VectorStepper
from rlio.errors import OptionError
from rlio.policies.random_policy import RandomPolicy
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.make_env import make_stepper, set_environs

LENGTH = 3


class Seeded(gym.Env[Any, Any]):
    """Shows what it was seeded with last, and a number that is drawn from it."""

    observation_space = Box(-1, 2.0**31, (2,), np.float64)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.seed = 0, -1 if seed is None else seed
        return self._obs(), {}

    def _obs(self) -> Any:
        return np.array([self.seed, self.np_random.random()])

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._obs(), 0.0, self.t == LENGTH, False, {}


def sampled(env: Any = Seeded, *, seed: int = 7, worker_index: int = 0, **options: Any) -> SampleBatch:
    config = RolloutConfig(
        **{"num_envs": 3, "rollout_fragment_length": 4 * LENGTH, "record_env_seeds": True} | options
    )
    runner = EnvRunner(env, RandomPolicy(), config=config, seed=seed, worker_index=worker_index)
    try:
        return runner.run()
    finally:
        runner.stop()


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_episode_has_a_seed_that_can_be_computed_and_is_recorded(mode: Any) -> None:
    batch = sampled(worker_index=2, vectorize_mode=mode)
    episodes = batch["obs"][batch["t"] == 0]
    expected = [episode_seed(7, 2, env, episode) for env in range(3) for episode in range(4)]
    assert episodes[:, 0].tolist() == expected
    assert (batch["env_seed"] == batch["obs"][:, 0]).all()
    assert len(set(expected)) == 12
    # The seed alone repeats the episode.
    env = Seeded()
    for row in np.flatnonzero(batch["t"] == 0).tolist():
        obs, _ = env.reset(seed=int(batch["env_seed"][row]))
        assert (obs == batch["obs"][row]).all()
        assert (env.step(0)[0] == batch["new_obs"][row]).all()


def test_two_runs_are_equal_and_workers_differ() -> None:
    """ "seeding": the seeds of workers 1, 2 and 3 are distinct."""
    first, again, other = sampled(), sampled(), sampled(seed=8)
    for name in first:
        assert np.array_equal(first[name], again[name]), name
    assert not np.array_equal(first["env_seed"], other["env_seed"])
    of_workers = [set(sampled(worker_index=index)["env_seed"].tolist()) for index in (1, 2, 3)]
    assert len(set.union(*of_workers)) == sum(map(len, of_workers)) == 3 * 12


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_a_given_vector_environment_is_seeded_as_far_as_it_lets_itself(mode: AutoresetMode) -> None:
    stepper = VectorStepper(SyncVectorEnv([Seeded] * 2, autoreset_mode=mode))
    seeds = EpisodeSeeds(7, num_envs=2)
    obs = np.array(stepper.reset(seeds=seeds))
    for _ in range(3 * LENGTH):
        assert (stepper.env_seeds == obs[:, 0]).all()
        step = stepper.step(np.zeros(2, int))
        obs = np.array(step.obs)
    later = [episode_seed(7, 0, env, 3 if mode is AutoresetMode.DISABLED else 0) for env in range(2)]
    assert obs[:, 0].tolist() == (later if mode is AutoresetMode.DISABLED else [-1, -1])


def test_a_native_vector_environment_gets_one_number() -> None:
    stepper = make_stepper("CartPole-v1", RolloutConfig(num_envs=2, vectorize_mode="native"))
    first = np.array(stepper.reset(seeds=EpisodeSeeds(7, num_envs=2)))
    assert stepper.env_seeds.tolist() == [episode_seed(7, 0, 0, 0)] * 2
    assert (stepper.reset(seeds=EpisodeSeeds(7, num_envs=2)) == first).all()
    assert not (stepper.reset() == first).any()
    stepper.close()


def test_seeds_of_many_episodes_are_those_of_each() -> None:
    seeds = EpisodeSeeds(3, worker_index=1, restart=2, num_envs=2)
    drawn = [seeds.next(1) for _ in range(600)]
    assert drawn == [episode_seed(3, 1, 1, episode, restart=2) for episode in range(600)]
    assert seeds.peek(1) == episode_seed(3, 1, 1, 600, restart=2)
    assert seeds.peek(0) == episode_seed(3, 1, 0, 0, restart=2)
    assert all(0 <= seed < 1 << 31 for seed in drawn)


def test_an_episode_after_a_failure_has_the_next_seed() -> None:
    batch = sampled(
        Crashing,
        env_config={"fails": fails_once(1, episode=1, t=2)},
        restart_failed_sub_environments=True,
        rollout_fragment_length=20,
    )
    of_env = dict.fromkeys(batch["env_seed"][batch["env_id"] == 1].tolist())
    assert list(of_env)[:2] == [episode_seed(7, 0, 1, 0), episode_seed(7, 0, 1, 2)]


# ---- what functions that make environments are told ----


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_function_is_told_for_whom_it_makes_an_environment(mode: Any) -> None:
    """ "env context": worker_index, vector_index, num_workers, remote, recreated_worker."""

    class Told(Seeded):
        def __init__(self, context: EnvContext) -> None:
            self.context = dict(context), vars(context)

    context = EnvContext({"port": 5}, worker_index=3, num_workers=4, remote=mode == "async")
    stepper = make_stepper(Told, RolloutConfig(num_envs=2, vectorize_mode=mode), context)
    for index, (items, attributes) in enumerate(stepper.envs.get_attr("context")):
        assert items == {"port": 5}
        assert attributes == {
            "worker_index": 3, "vector_index": index, "num_workers": 4, "remote": mode == "async",
            "recreated_worker": False, "recreated": False,
        }  # fmt: skip
    stepper.close()


def test_who_wants_a_context_says_so_with_an_argument() -> None:
    assert takes_context(lambda context: None)
    assert takes_context(Crashing)
    assert not takes_context(lambda context=None: None)
    assert not takes_context(lambda *, option=1: None)
    assert not takes_context(Seeded)
    assert not takes_context(dict)


def test_an_env_config_reaches_who_makes_environments_or_is_refused() -> None:
    """RLlib's ``__init__(self, config=None)`` gets it; nobody is given an environment that never saw it."""

    class Configured(Seeded):
        def __init__(self, config: Any = None) -> None:
            self.told = config

    # Without items too: RLlib's classes read `config.worker_index`, and got None.
    for items in ({}, {"a": 1}):
        stepper = make_stepper(Configured, None, EnvContext(items, worker_index=3))
        (told,) = stepper.envs.get_attr("told")
        assert told == items
        assert (told.worker_index, told.vector_index) == (3, 0)
        stepper.close()
    setup = RolloutConfig(env_config={"a": 1})
    for env, words in (
        (Seeded, "takes no argument"),
        (lambda render_mode=None: Seeded(), "takes no argument"),
        (lambda **options: Seeded(), "takes no argument"),
        (Seeded(), "exists already"),
        (SyncVectorEnv([Seeded]), "exists already"),
    ):
        with pytest.raises(OptionError, match=f"env_config={{'a': 1}}.*{words}"):
            make_stepper(env, setup)


def test_a_context_is_copied_with_changes_and_takes_defaults() -> None:
    context = EnvContext({"a": 1}, worker_index=2, recreated_worker=True)
    other = context.copy_with_overrides({"b": 2}, worker_index=3)
    assert (other, other.worker_index, other.recreated_worker) == ({"a": 1, "b": 2}, 3, True)
    assert (context, context.worker_index) == ({"a": 1}, 2)
    context.set_defaults({"a": 5, "c": 6})
    assert context == {"a": 1, "c": 6}


def test_the_config_of_an_id_is_its_keywords() -> None:
    envs = {}
    for mode in ("sync", "async"):
        setup = RolloutConfig(vectorize_mode=mode, env_config={"g": 1.5})
        stepper = make_stepper("Pendulum-v1", setup)
        envs[mode] = stepper.envs.get_attr("g")
        stepper.close()
    assert envs == {"sync": (1.5,), "async": (1.5,)}


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_validate_env_sees_each_environment(mode: Any) -> None:
    """ "validate_env": it raises where it does not like what it sees."""

    def refuse(env: Any, context: EnvContext) -> None:
        if context.vector_index == 1:
            raise ValueError(f"no {type(env).__name__}, please")

    with pytest.raises(OptionError, match="no Seeded, please"):
        make_stepper(Seeded, RolloutConfig(num_envs=2, vectorize_mode=mode, validate_env=refuse))
    make_stepper(Seeded, RolloutConfig(num_envs=1, vectorize_mode=mode, validate_env=refuse)).close()


def test_a_function_of_a_context_may_make_a_vector_environment() -> None:
    """ "custom_vector_env": whatever the function gives is stepped."""

    def make(context: EnvContext) -> Any:
        return SyncVectorEnv([Seeded] * context["n"])

    for mode in ("sync", "native"):
        stepper = make_stepper(make, RolloutConfig(num_envs=4, vectorize_mode=mode, env_config={"n": 4}))
        assert stepper.num_envs == 4
        assert stepper.reset().shape == (4, 2)
        stepper.close()


def test_environs_are_set_before_environments_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "extra_python_environs": here and in the processes of environments."""
    monkeypatch.setenv("RLIO_TEST_ENVIRON", "before")

    class Looking(Seeded):
        def __init__(self) -> None:
            self.seen = os.environ["RLIO_TEST_ENVIRON"]

    for mode in ("sync", "async"):
        config = RolloutConfig(
            vectorize_mode=mode,  # type: ignore[arg-type]
            extra_python_environs={"RLIO_TEST_ENVIRON": mode},
        )
        runner = EnvRunner(Looking, RandomPolicy(), config=config, seed=0)
        assert runner.envs.get_attr("seen") == (mode,)
        runner.stop()
    with pytest.raises(OptionError, match="expected str names, and values that are str or numbers"):
        set_environs({"A": None})  # type: ignore[dict-item]


def test_environs_that_are_numbers_become_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """RLlib: `os.environ[key] = str(value)`."""
    for name in ("RLIO_A", "RLIO_B", "RLIO_C"):
        monkeypatch.setenv(name, "before")
    set_environs({"RLIO_A": 3, "RLIO_B": 0.5, "RLIO_C": "text"})
    assert [os.environ[name] for name in ("RLIO_A", "RLIO_B", "RLIO_C")] == ["3", "0.5", "text"]
    with pytest.raises(OptionError, match="values that are str or numbers"):
        set_environs({"RLIO_A": 4, "RLIO_B": None})  # type: ignore[dict-item]
    assert os.environ["RLIO_A"] == "3", "nothing was set"


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_environments_are_rendered_where_they_are(mode: str) -> None:
    """ "render_env": frames of each environment."""
    context = EnvContext({})
    stepper = make_stepper(Crashing, RolloutConfig(num_envs=2, vectorize_mode=mode), context)
    stepper.reset()
    stepper.step(np.zeros(2, int))
    assert [frame.tolist() for frame in stepper.render()] == [np.ones((2, 2, 3)).tolist()] * 2
    stepper.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_frames_go_into_the_media_of_episodes(mode: Any) -> None:
    """Row "render_env": a frame for each observation, in the metrics of its episode."""
    config = RolloutConfig(
        num_envs=2, rollout_fragment_length=12, vectorize_mode=mode, env_config={}, render_env=True
    )
    runner = EnvRunner(Crashing, RandomPolicy(), config=config, seed=0)
    runner.run()
    metrics = runner.get_metrics()
    runner.stop()
    assert [len(episode.media["frames"]) for episode in metrics.details] == [5] * 4
    frames = metrics.details[-1].media["frames"]
    assert [int(frame[0, 0, 0]) for frame in frames] == [0, 1, 2, 3, 4]
    assert metrics.summarise()["sampler_perf"]["mean_env_render_ms"] > 0


def test_only_the_first_worker_renders_and_only_what_can_be() -> None:
    config = RolloutConfig(rollout_fragment_length=30, render_env=True)
    runner = EnvRunner("CartPole-v1", RandomPolicy(), config=config, seed=0, worker_index=2, num_workers=2)
    runner.run()
    assert runner.get_metrics().details == []
    assert runner.envs.render_mode == "rgb_array"
    runner.stop()
    with pytest.raises(OptionError, match="no render mode"):
        EnvRunner(Seeded, RandomPolicy(), config=config, seed=0)
