"""RolloutWorker, live: what RLlib's tests of its rollout worker assert; callbacks and metrics."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from linear_policy import LinearPolicy, worker_options

import rlio
from rlio.batch import SampleBatch
from rlio.connectors.mean_std import MeanStdFilter
from rlio.envs.multi_agent import make_multi_agent
from rlio.errors import ClosedError, OptionError, StateError
from rlio.policies.random_policy import RandomPolicy
from rlio.policies.weights import GlobalVars
from rlio.sampling.callbacks import Callbacks
from rlio.sampling.config import RolloutConfig
from rlio.sampling.metrics import RolloutMetrics
from rlio.worker import RolloutWorker


class Mock(gym.Env[Any, Any]):
    """Ends after so many steps; rewards ``reward`` each; observes the time."""

    action_space: Any = Discrete(2)
    observation_space = Box(0.0, 1000.0, (1,), np.float32)

    def __init__(self, length: int = 10, reward: float = 1.0) -> None:
        self.length, self.reward = length, reward
        self.t = self.steps = 0
        self.seeds: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.t = 0
        return self._obs(), {"began": True}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.steps += 1
        return self._obs(), self.reward, self.t >= self.length, False, {"t": self.t}

    def _obs(self) -> Any:
        return np.full(1, self.t, np.float32)


class Continuous(Mock):
    """Keeps the actions that it gets."""

    action_space = Box(-2.0, 2.0, (1,), np.float32)

    def __init__(self) -> None:
        super().__init__()
        self.got: list[float] = []

    def step(self, action: Any) -> Any:
        self.got.append(float(action[0]))
        return super().step(action)


class Outside(LinearPolicy):
    """Acts beyond all bounds."""

    def compute_actions(self, obs: Any, *args: Any, **kwargs: Any) -> Any:
        actions, state, extras = super().compute_actions(obs, *args, **kwargs)
        return actions + 3, state, extras


def worker_of(env: Any = Mock, policy: Any = None, **options: Any) -> RolloutWorker:
    rollout = RolloutConfig(**{"rollout_fragment_length": 10} | options.pop("rollout", {}))
    return RolloutWorker(
        env,
        LinearPolicy() if policy is None else policy,
        rollout=rollout,
        **worker_options(**{"seed": 0} | options),
    )


# ---- upstream's test_rollout_worker ----


def test_fragments_are_exact() -> None:
    """Upstream: truncate_episodes gives exactly the fragment, 15 rows of episodes of 10."""
    with worker_of(rollout={"rollout_fragment_length": 15}) as worker:
        batch = worker.sample()
    assert batch["t"].tolist() == [*range(10), *range(5)]


def test_complete_episodes_are_packed_and_not_cut() -> None:
    """Upstream: complete_episodes gives 10, and packs 20 with t = 0..9, 0..9."""
    for fragment, expected in ((5, 1), (10, 1), (15, 2)):
        config = {"rollout_fragment_length": fragment, "batch_mode": "complete_episodes"}
        with worker_of(rollout=config) as worker:
            assert worker.sample()["t"].tolist() == [*range(10)] * expected


def test_vectorised_environments_are_counted_together() -> None:
    """Upstream: 8 environments, batches of 16; no episode after 8 of them, 8 after 16."""
    with worker_of(lambda: Mock(20), rollout={"rollout_fragment_length": 2, "num_envs": 8}) as worker:
        assert [len(worker.sample()) for _ in range(8)] == [16] * 8
        assert worker.get_metrics().counts.episodes == 0
        assert [len(worker.sample()) for _ in range(8)] == [16] * 8
        metrics = worker.get_metrics()
        assert (metrics.counts.episodes, metrics.lifetime.env_steps) == (8, 256)


@pytest.mark.parametrize(
    ("clip", "largest"), [(True, 1.0), (False, 100.0), (None, 100.0), (10.0, 10.0)], ids=str
)
def test_clipped_rewards_are_in_batches_and_not_in_metrics(clip: Any, largest: float) -> None:
    """Upstream: clip_rewards; error 30 of 5.3: numbers are not ignored."""
    with worker_of(lambda: Mock(10, 100.0), rollout={"clip_rewards": clip}) as worker:
        assert worker.sample()["rewards"].max() == largest
        assert worker.get_metrics().summarise()["episode_return_mean"] == 1000.0


@pytest.mark.parametrize(
    ("options", "got"),
    [({}, 3.0), ({"clip_actions": True}, 2.0), ({"normalize_actions": True}, 2.0)],
)
def test_batches_have_the_policys_own_actions(options: dict[str, Any], got: float) -> None:
    """Upstream: action clipping and normalisation leave raw actions in the batch."""
    with worker_of(Continuous, Outside(), rollout=options) as worker:
        assert set(worker.sample()["actions"].ravel()) == {3.0}
        assert worker.foreach_env(lambda env: set(env.unwrapped.got)) == [{got}]


def test_unroll_ids_of_batches_and_workers_are_disjoint() -> None:
    """Upstream: test_batch_ids."""
    seen: set[int] = set()
    for index in (1, 2):
        with worker_of(worker_index=index, num_workers=2) as worker:
            for _ in range(3):
                unrolls = set(worker.sample()["unroll_id"].tolist())
                assert unrolls
                assert not unrolls & seen
                seen |= unrolls


def test_workers_seed_their_environments_differently_and_the_same_each_time() -> None:
    """Upstream: seeds of workers 1, 2, 3 are distinct."""

    def seeds(index: int) -> list[int]:
        with worker_of(worker_index=index, num_workers=3, rollout={"num_envs": 2}) as worker:
            worker.sample()
            return worker.foreach_env(lambda env: env.unwrapped.seeds[0])

    found = [seeds(index) for index in (1, 2, 3)]
    assert len({seed for of_worker in found for seed in of_worker}) == 6
    assert found == [seeds(index) for index in (1, 2, 3)]


def test_filters_are_synchronised() -> None:
    """Upstream: get_filters(flush_after=True), sync_filters; rows "sync_filters / get_filters" of 2.2."""
    config = {"observation_connectors": [MeanStdFilter()], "rollout_fragment_length": 50}
    with worker_of(rollout=config) as here, worker_of(rollout=config, seed=1) as there:
        here.sample()
        (flushed,) = here.get_filters(flush_after=True)["default_policy"]
        assert flushed.buffer.n > 50
        (mine,) = here.get_filters()["default_policy"]
        assert (mine.buffer.n, mine.running_stats.n) == (0, flushed.running_stats.n)
        there.sync_filters(here.get_filters())
        (theirs,) = there.get_filters()["default_policy"]
        assert theirs.running_stats.n == mine.running_stats.n
        assert np.array_equal(theirs.running_stats.mean, mine.running_stats.mean)
        with pytest.raises(StateError, match="0 filters"):
            there.sync_filters({})
    with RolloutWorker(None, {"a": LinearPolicy()}, input=None, policy_setup=_setup("a")) as bare:
        assert bare.get_filters() == {}
        with pytest.raises(OptionError, match="no environment"):
            bare.sync_filters({})


def test_filters_are_in_the_checkpoint_of_a_worker_that_reads(tmp_path: Path) -> None:
    """Not only where the runner is what a worker reads, and its filters are in the position."""
    config = {"observation_connectors": [MeanStdFilter()], "rollout_fragment_length": 50}
    with worker_of(output=str(tmp_path / "data"), rollout=config) as sampler:
        sampler.sample()
        filters = sampler.get_filters()
    (saw,) = filters["default_policy"]
    with worker_of(input=str(tmp_path / "data"), rollout=config) as reader:
        reader.sync_filters(filters)
        reader.save(tmp_path / "saved")
        wrong = reader.get_state(["connectors"])
    for options in ({}, {"not_components": ["position"]}):
        with worker_of(input=str(tmp_path / "data"), rollout=config, seed=1) as restored:
            restored.restore(tmp_path / "saved", **options)
            (found,) = restored.get_filters()["default_policy"]
            assert (found.running_stats.n, found.buffer.n) == (saw.running_stats.n, saw.buffer.n)
            assert np.array_equal(found.running_stats.mean, saw.running_stats.mean)
    with worker_of() as plain, pytest.raises(StateError):
        plain.set_state(wrong)


def _setup(policy_id: str) -> Any:
    from rlio.sampling.policy_setup import PolicySetup

    return PolicySetup(spaces={policy_id: (Mock.observation_space, Mock.action_space)})


def test_episodes_that_are_not_for_training_are_in_no_batch() -> None:
    """Upstream: training_enabled=False yields empty batches; the rows are counted."""

    class Refuses(Callbacks):
        def on_episode_start(self, *, episode: Any, **kwargs: Any) -> None:
            episode.training_enabled = False

    with worker_of(callbacks=Refuses) as worker:
        batch, count = worker.sample_with_count()
        assert (len(batch), count) == (0, 0)
        summary = worker.get_metrics().summarise()
        assert summary["num_rows_dropped"] == 10
        assert summary["num_episodes"] == 1
        assert worker.learn_on_batch(batch) == {}
        assert worker.sample_and_learn()[0] == {}


def test_environment_variables_are_set_before_environments_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream: extra_python_environs_for_driver / _for_worker."""
    monkeypatch.setenv("RLIO_TEST_ENVIRON", "before")
    seen = []

    def make() -> Mock:
        seen.append(os.environ["RLIO_TEST_ENVIRON"])
        return Mock()

    with worker_of(make, rollout={"extra_python_environs": {"RLIO_TEST_ENVIRON": "set"}}):
        assert set(seen) == {"set"}


def test_nothing_is_stepped_before_it_is_asked_for() -> None:
    """Upstream: test_no_step_on_init."""
    with worker_of() as worker:
        assert worker.foreach_env(lambda env: env.unwrapped.steps) == [0]


def test_global_variables_reach_the_policy() -> None:
    """Upstream: test_global_vars_update."""
    with worker_of() as worker:
        worker.set_global_vars(GlobalVars(500, {"default_policy": 3}))
        assert worker.policy.global_vars.timestep == 500
        assert worker.get_global_vars().num_grad_updates_per_policy == {"default_policy": 3}


def test_the_steps_of_a_worker_are_in_its_global_vars(tmp_path: Path) -> None:
    """``timestep`` stayed 0: nothing counted. Policies that learn are told before they learn."""
    with worker_of(output=tmp_path / "old") as worker:
        assert worker.get_global_vars().timestep == 0
        batch = worker.sample(25)
        assert worker.get_global_vars().timestep == 30, "three fragments of 10 steps"
        worker.learn_on_batch(batch)
        assert worker.policy.global_vars.timestep == 30
        worker.set_global_vars(GlobalVars(20))
        assert worker.get_global_vars().timestep == 30, "it has not sampled less than it has"
        worker.set_global_vars(GlobalVars(1000))
        assert worker.get_global_vars().timestep == 1000, "others have sampled as well"
        worker.save(tmp_path / "state")
    for components, steps in ((None, 1000), (["position"], 30)):
        with worker_of(output=tmp_path / f"new-{steps}") as restored:
            restored.restore(tmp_path / "state", components=components)
            assert restored.get_global_vars().timestep == steps
    with worker_of(input={"sampler": 0.5, str(tmp_path / "old"): 0.5}) as mixed:
        mixed.sample(40)
        assert mixed.get_global_vars().timestep == 20, "rows that are read are no steps"


def test_with_several_agents_the_steps_are_those_of_environments() -> None:
    """What a schedule goes by and what workers add up have one unit: three agents are not three workers."""
    seen: list[int] = []

    class Scheduled(RandomPolicy):
        def compute_actions(self, *args: Any, timestep: int = 0, **options: Any) -> Any:
            seen.append(timestep)
            return super().compute_actions(*args, timestep=timestep, **options)

    make = make_multi_agent("CartPole-v1")
    steps = []
    state = None
    for _ in range(2):
        seen.clear()
        with worker_of(lambda: make(num_agents=3), {"p": Scheduled()}, rollout={"num_envs": 2}) as worker:
            if state is not None:
                worker.set_state(state)
            worker.sample()
            state = worker.get_state()
            steps.append((worker.get_global_vars().timestep, list(seen)))
    assert steps == [(20, list(range(0, 20, 2))), (40, list(range(20, 40, 2)))]


# ---- environments ----


def test_functions_are_called_for_each_environment() -> None:
    """Rows "foreach_env / foreach_env_with_context" and "env context"."""
    config = {"num_envs": 3, "env_config": {"x": 1}}
    with worker_of(lambda context: Mock(), rollout=config, worker_index=2, num_workers=2) as worker:
        assert worker.foreach_env(lambda env: env.unwrapped.length) == [10, 10, 10]
        contexts = worker.foreach_env_with_context(lambda env, context: context)
        assert [(c["x"], c.vector_index, c.worker_index, c.num_workers) for c in contexts] == [
            (1, 0, 2, 2),
            (1, 1, 2, 2),
            (1, 2, 2, 2),
        ]
    native = worker_of("CartPole-v1", rollout={"num_envs": 2, "vectorize_mode": "native"})
    with native, pytest.raises(OptionError, match="not separate objects in this process"):
        native.foreach_env(print)


def test_makers_of_environments_know_whether_the_worker_replaces_another() -> None:
    """Row "ctor args": recreated_worker, with one agent and with several."""
    seen: list[bool] = []

    def make(context: Any) -> Any:
        seen.append(context.recreated_worker)
        return Mock()

    def make_several(context: Any) -> Any:
        seen.append(context.recreated_worker)
        return make_multi_agent(Mock)()

    for env, policy in ((make, None), (make_several, {"a": LinearPolicy, "b": LinearPolicy})):
        seen.clear()
        options = {"policy_mapping_fn": lambda agent_id, episode: "a"} if policy else {}
        with worker_of(env, policy, recreated_worker=True, **options) as worker:
            assert set(seen) == {True}
            (told,) = worker.foreach_env_with_context(lambda env, context: context.recreated_worker)
            assert told
        with worker_of(env, policy, **options):
            assert not seen[-1]


def test_a_stopped_worker_is_not_healthy() -> None:
    """Row "assert_healthy, get_spaces, make_env"."""
    worker = worker_of()
    worker.assert_healthy()
    assert worker.runner is not None
    worker.runner.stop()
    with pytest.raises(ClosedError):
        worker.assert_healthy()
    worker.stop()
    with pytest.raises(ClosedError, match="RolloutWorker is closed"):
        worker.assert_healthy()


def test_what_connectors_made_is_recorded_as_preprocessed(tmp_path: Path) -> None:
    """Error 29 of 5.3: what is preprocessed already is not to be preprocessed again."""
    for connectors, expected in (([], "raw"), ([lambda obs: obs / 10], "preprocessed")):
        root = tmp_path / expected
        with worker_of(output=root, rollout={"observation_connectors": connectors}) as worker:
            worker.sample()
            assert worker.get_spaces()["__env__"][0] == Mock.observation_space
        data = rlio.open_dataset(root)
        assert data.open_shard(data.segments[0]).provenance["observations"] == expected


# ---- callbacks ----


class Counts(Callbacks):
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.ended: list[Any] = []

    def _called(self, name: str, **kwargs: Any) -> None:
        self.calls[name] += 1

    def on_environment_created(self, **kwargs: Any) -> None:
        self._called("environment")

    def on_sub_environment_created(self, **kwargs: Any) -> None:
        self._called("sub_environment")

    def on_create_policy(self, **kwargs: Any) -> None:
        self._called("policy")

    def on_episode_created(self, **kwargs: Any) -> None:
        self._called("created")

    def on_episode_start(self, *, episode: Any, **kwargs: Any) -> None:
        self._called("start")
        episode.user_data["seen"] = 0

    def on_episode_step(self, *, episode: Any, **kwargs: Any) -> None:
        self._called("step")
        episode.user_data["seen"] += 1
        assert episode.last_info == {"t": episode.length}
        assert episode.last_observation == [episode.length]

    def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
        self._called("end")
        episode.custom_metrics["seen"] = episode.user_data["seen"]
        episode.hist_data["lengths"] = [episode.length, episode.length]
        episode.media["last"] = "picture"
        self.ended.append((episode.env_index, episode.length, episode.total_reward))

    def on_postprocess_trajectory(self, *, postprocessed_batch: Any, **kwargs: Any) -> None:
        self._called("postprocess")
        postprocessed_batch["extra"] = np.ones(len(postprocessed_batch))

    def on_sample_end(self, **kwargs: Any) -> None:
        self._called("sample")

    def on_learn_on_batch(self, *, result: Any, **kwargs: Any) -> None:
        self._called("learn")
        result["learned"] = 1


def test_every_callback_is_called_when_its_time_comes() -> None:
    """Rows "callbacks" of 2.4 and "on_episode_*" of 2.5, through a worker."""
    callbacks = Counts()
    with worker_of(callbacks=callbacks, rollout={"num_envs": 2, "rollout_fragment_length": 15}) as worker:
        batch = worker.sample()
        assert (batch["extra"] == 1).all()
        assert worker.learn_on_batch(batch)["learned"] == 1
        summary = worker.get_metrics().summarise()
    assert callbacks.calls == {
        "environment": 1,
        "sub_environment": 2,
        "policy": 1,
        "created": 4,
        "start": 4,
        "step": 30,
        "end": 2,
        "postprocess": 4,
        "sample": 1,
        "learn": 1,
    }
    assert callbacks.ended == [(0, 10, 10.0), (1, 10, 10.0)]
    assert summary["custom_metrics"]["seen_mean"] == 10.0
    assert summary["hist_stats"]["lengths"] == [10] * 4
    assert summary["episode_media"] == {"last": ["picture", "picture"]}
    assert summary["episode_return_mean"] == 10.0


def test_an_exception_in_a_callback_surfaces_in_sample() -> None:
    class Fails(Callbacks):
        def on_episode_end(self, **kwargs: Any) -> None:
            raise ValueError("mine")

    with worker_of(callbacks=Fails) as worker, pytest.raises(ValueError, match="mine"):
        worker.sample()


# ---- metrics ----


def test_metrics_are_drained_and_summarised_over_workers() -> None:
    """Rows "get_metrics" of 2.2, "metrics" of 2.5 and "perf stats" of 2.3."""
    parts = []
    for index in (1, 2):
        with worker_of(lambda: Mock(5), worker_index=index, num_workers=2) as worker:
            worker.sample()
            worker.sample()
            worker.set_weights(worker.get_weights(), weights_seq_no=7)
            worker.sample()
            parts.append(worker.get_metrics())
            assert worker.get_metrics().episodes == []
    summary = RolloutMetrics.merge(parts).summarise()
    assert summary["num_episodes"] == 12
    assert summary["episode_len_mean"] == 5.0
    assert summary["num_env_steps_sampled"] == summary["num_env_steps_sampled_lifetime"] == 60
    assert summary["weights_seq_no"] == pytest.approx(7 / 3)
    assert summary["num_env_steps_sampled_throughput"] > 0
    assert summary["time_between_sampling"] > 0
    assert set(summary["sampler_perf"]) == {
        "mean_raw_obs_processing_ms",
        "mean_inference_ms",
        "mean_action_processing_ms",
        "mean_env_wait_ms",
        "mean_env_render_ms",
    }
    assert summary["sampler_perf"]["mean_env_wait_ms"] > 0


def test_a_worker_that_only_reads_has_no_metrics(tmp_path: Path) -> None:
    with worker_of(output=tmp_path) as worker:
        worker.sample()
    policy = LinearPolicy()
    policy.bind(Mock.observation_space, Mock.action_space)
    with RolloutWorker(None, policy, input=tmp_path, input_options={"batch_size": 5}) as reader:
        assert len(reader.sample()) == 5
        assert reader.get_metrics().summarise()["num_env_steps_sampled"] == 0
        assert reader.foreach_env(len) == []


def test_lifetime_counts_and_filters_survive_a_restore(tmp_path: Path) -> None:
    config = {"observation_connectors": [MeanStdFilter()]}
    with worker_of(rollout=config) as worker:
        worker.sample()
        worker.save(tmp_path)
        (expected,) = worker.get_filters()["default_policy"]
    with worker_of(rollout=config) as restored:
        restored.restore(tmp_path)
        restored.sample()
        assert restored.get_metrics().lifetime.env_steps == 20
    with worker_of(rollout=config) as restored:
        restored.restore(tmp_path, components=["position"])
        (found,) = restored.get_filters()["default_policy"]
        assert found.running_stats.n == expected.running_stats.n
        assert restored.get_metrics().lifetime.env_steps == 0


def test_simulated_episodes_are_in_the_metrics(tmp_path: Path) -> None:
    """``input_evaluation="simulation"``: what is served is logged, what is measured is live."""
    with worker_of(output=tmp_path, rollout={"rollout_fragment_length": 30}) as worker:
        worker.sample()
    with worker_of(
        lambda: Mock(10, 7.0),
        input=tmp_path,
        input_options={"batch_size": 5},
        rollout={"input_evaluation": "simulation"},
    ) as worker:
        batches = [worker.sample() for _ in range(3)]
        assert all(set(batch["rewards"]) == {1.0} for batch in batches)
        assert worker.get_metrics().summarise()["episode_return_mean"] == 70.0


def test_workers_of_one_policy_object_share_it() -> None:
    policy = RandomPolicy()
    with worker_of(policy=policy) as one, worker_of(policy=policy, worker_index=1, num_workers=1) as other:
        assert one.policy is other.policy
        assert isinstance(one.sample(), SampleBatch)
        assert isinstance(other.sample(), SampleBatch)
