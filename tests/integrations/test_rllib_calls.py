"""Calls as RLlib's own code and docstrings make them, on RLlib's classes and on rlio's."""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import rlio
from rlio.sampling import MultiAgentEpisode

pytest.importorskip("ray.rllib", reason="ray[rllib] is not installed")
pytest.importorskip("torch", reason="torch is not installed")

from ray.rllib.algorithms.ppo import PPOConfig, PPOTorchPolicy
from ray.rllib.env.external_env import ExternalEnv
from ray.rllib.env.multi_agent_env import make_multi_agent
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode as RllibEpisode
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.evaluation.metrics import summarize_episodes
from ray.rllib.evaluation.rollout_worker import RolloutWorker
from ray.rllib.policy.sample_batch import SampleBatch
from ray.rllib.utils.filter import MeanStdFilter

# RLlib leaves files open, and uses what others have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

#: Calls that docs/rllib.md names as different.
OTHERWISE = {
    (RolloutWorker, "add_policy"),
    (RolloutWorker, "compute_gradients"),
    (SampleBatch, "timeslices"),
    (SampleBatch, "to_device"),
    (RllibEpisode, "get_return"),
    (RllibEpisode, "slice"),
}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (RolloutWorker, rlio.RolloutWorker),
        (SampleBatch, rlio.SampleBatch),
        (SingleAgentEnvRunner, rlio.EnvRunner),
        (MultiAgentEnvRunner, rlio.MultiAgentEnvRunner),
        (RllibEpisode, MultiAgentEpisode),
        (ExternalEnv, rlio.ExternalEnv),
        (MeanStdFilter, rlio.connectors.MeanStdFilter),
    ],
    ids=lambda kind: f"{kind.__module__.partition('.')[0]}.{kind.__name__}",
)
def test_methods_of_the_same_name_take_rllibs_arguments_by_position(theirs: type, ours: type) -> None:
    refused, bound = [], 0
    for name in dir(theirs):
        own = getattr(ours, name, None)
        if name.startswith("_") or not inspect.isfunction(getattr(theirs, name)) or not callable(own):
            continue
        given = [
            each
            for each in inspect.signature(getattr(theirs, name)).parameters.values()
            if each.kind is each.POSITIONAL_OR_KEYWORD
        ]
        try:
            inspect.signature(own).bind(*given)
            bound += 1
        except TypeError:
            if (theirs, name) not in OTHERWISE:
                refused.append((name, [each.name for each in given]))
    assert not refused
    assert bound > 3


def test_constants_of_the_batch_are_rllibs() -> None:
    names = [name for name in dir(SampleBatch) if name.isupper()]
    assert len(names) > 20
    assert {name: getattr(rlio.SampleBatch, name) for name in names} == {
        name: getattr(SampleBatch, name) for name in names
    }


def looked_at(theirs: Any, ours: Any, *args: Any, **options: Any) -> None:
    """The same call of both episodes gives the same values."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        return np.asarray(value, np.float64).tolist()

    for name in ("get_rewards", "get_observations", "get_actions"):
        said = plain(getattr(theirs, name)(*args, **options))
        assert plain(getattr(ours, name)(*args, **options)) == said, (name, args, options)


def test_values_of_an_episode_are_filled_as_rllib_fills_them() -> None:
    theirs = RllibEpisode(agent_module_ids={"a": "m", "b": "m"}, agent_to_module_mapping_fn=lambda *_: "m")
    theirs.add_env_reset(observations={"a": 0, "b": 5}, infos={})
    for step in (1, 2):
        theirs.add_env_step(
            {"a": step, "b": 5 + step},
            {"a": step, "b": 2 * step},
            {"a": 1.0 * step, "b": 3.0 * step},
            {},
            terminateds={"__all__": False},
            truncateds={"__all__": False},
        )
    theirs.to_numpy()
    ours = MultiAgentEpisode(
        7,
        {
            name: rlio.Episode(
                7,
                agent_id=name,
                observations=first + np.arange(3),
                actions=by * np.arange(1, 3),
                rewards=reward * np.arange(1, 3),
            )
            for name, first, by, reward in (("a", 0, 1, 1.0), ("b", 5, 2, 3.0))
        },
        env_ts={"a": [0, 1, 2], "b": [0, 1, 2]},
        policy_ids={"a": "m", "b": "m"},
        env_t=2,
    )
    for indices in (9, -9, 0, [0, 9], slice(1, 5), slice(-5, -1), slice(5, 8), slice(-9, -6), slice(None)):
        looked_at(theirs, ours, indices, fill=0.0)
        looked_at(theirs, ours, indices, env_steps=False, fill=0.0)
        looked_at(theirs, ours, indices, "a", fill=0.0)
        looked_at(theirs, ours, indices, ["b"], fill=0.0)
    looked_at(theirs, ours, slice(-2, 2), neg_index_as_lookback=True, fill=0.0)
    looked_at(theirs, ours, [0, 9], return_list=True, fill=0.0)


def old_stack() -> Any:
    config = PPOConfig().api_stack(
        enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False
    )
    return config.env_runners(rollout_fragment_length=100).debugging(seed=0)


def test_metrics_of_the_old_stack_have_the_same_names_with_one_agent() -> None:
    theirs = RolloutWorker(
        env_creator=lambda _: gym.make("CartPole-v1"),
        default_policy_class=PPOTorchPolicy,
        config=old_stack().environment("CartPole-v1"),
    )
    batch = theirs.sample()
    said = summarize_episodes(theirs.get_metrics())
    config = rlio.RolloutConfig(rollout_fragment_length=100)
    with rlio.RolloutWorker("CartPole-v1", rlio.RandomPolicy(), rollout=config, seed=0) as worker:
        worker.sample()
        found = worker.get_metrics().summarise()
    assert said.keys() - found.keys() == {"connector_metrics"}
    assert said["hist_stats"].keys() == found["hist_stats"].keys()
    for name in ("policy_reward_mean", "policy_reward_min", "policy_reward_max"):
        assert said[name].keys() == found[name].keys() == {"default_policy"}
    assert theirs.compute_gradients(batch, single_agent=True)[1]["batch_count"] == 100


def test_the_batch_count_lies_beside_the_policies() -> None:
    policies = {"p0", "p1"}
    two = make_multi_agent("CartPole-v1")
    theirs = RolloutWorker(
        env_creator=lambda _: two({"num_agents": 2}),
        default_policy_class=PPOTorchPolicy,
        config=old_stack().multi_agent(
            policies=policies, policy_mapping_fn=lambda agent_id, *_, **__: f"p{agent_id}"
        ),
    )
    said = theirs.compute_gradients(theirs.sample())[1]
    from rlio.policies import ActorCritic

    config = rlio.RolloutConfig(rollout_fragment_length=100, env_config={"num_agents": 2})
    setup = rlio.sampling.PolicySetup(policy_mapping_fn=lambda agent_id, episode: f"p{agent_id}")
    made: dict[str, Any] = dict.fromkeys(policies, ActorCritic)
    env = rlio.envs.make_multi_agent("CartPole-v1")
    with rlio.RolloutWorker(env, made, rollout=config, policy_setup=setup, seed=0) as worker:
        found = worker.compute_gradients(worker.sample())[1]
    assert said.keys() == found.keys()
    assert said["batch_count"] == found["batch_count"] == 100


#: Of RLlib's results, what is of Ray's connectors, and times.
NOT_OURS = ("connector", "env_to_module", "module_to_env", "timer", "sample_")


@pytest.mark.parametrize("agents", [1, 2])
def test_metrics_of_the_new_stack_have_the_same_names(agents: int) -> None:
    ours = rlio.RolloutConfig(rollout_fragment_length=100)
    if agents == 1:
        config = PPOConfig().environment("CartPole-v1").debugging(seed=0)
        theirs: Any = SingleAgentEnvRunner(config=config, worker_index=1)
        runner: Any = rlio.EnvRunner("CartPole-v1", rlio.RandomPolicy(), config=ours, seed=0)
    else:
        from ray import tune

        two = make_multi_agent("CartPole-v1")
        tune.register_env("two", lambda _: two({"num_agents": 2}))
        config = PPOConfig().environment("two").debugging(seed=0)
        config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda agent_id, *_, **__: f"p{agent_id}")
        theirs = MultiAgentEnvRunner(config=config, worker_index=1)
        runner = rlio.MultiAgentEnvRunner(
            lambda: rlio.envs.make_multi_agent("CartPole-v1")(num_agents=2),
            {name: rlio.RandomPolicy() for name in ("p0", "p1")},
            lambda agent_id, episode: f"p{agent_id}",
            config=ours,
            seed=0,
        )
    for _ in range(2):
        theirs.sample(num_timesteps=100)
        said = {
            name: value
            for name, value in theirs.get_metrics().items()
            if not any(part in name for part in NOT_OURS)
        }
        runner.run()
        found = runner.get_metrics().summarise()
        # Both are named in docs/rllib.md: the time of a call, and the steps of each agent by episode.
        assert said.keys() - found.keys() <= {"sample", "agent_steps"}
        for name, value in said.items():
            if isinstance(value, dict) and name in found:
                assert set(value) == set(found[name]), name
    runner.stop()
    theirs.stop()


def test_a_vector_env_of_rllib_gives_the_steps_of_its_environments() -> None:
    from ray.rllib.env.vector_env import VectorEnv

    made = [gym.make("CartPole-v1") for _ in range(2)]
    env = VectorEnv.vectorize_gym_envs(existing_envs=made, num_envs=2)
    config = rlio.RolloutConfig(rollout_fragment_length=60)
    with rlio.RolloutWorker(env, rlio.RandomPolicy(), rollout=config, seed=0) as worker:
        rows = worker.sample()
        assert worker.foreach_env(lambda each: each) == made
    assert len(rows) == 120
    again = gym.make("CartPole-v1")
    for one in rows.split_by_episode():
        again.reset(seed=0)
        again.unwrapped.state = one["obs"][0].astype(np.float64)
        for row in range(min(3, len(one))):
            seen, reward, terminated, *_ = again.step(int(one["actions"][row]))
            np.testing.assert_allclose(seen, one["new_obs"][row], atol=1e-4)
            assert (reward, terminated) == (one["rewards"][row], one["terminateds"][row])


def agents_play(env: Any) -> None:
    """Agent "a" sees 0, 1, .. and "late" joins at step 1; the second game logs its actions."""
    for logs in (False, True):
        name = env.start_episode()
        for t in range(4):
            seen = {"a": np.array([t], np.float32)}
            if t:
                seen["late"] = np.array([10 + t], np.float32)
            if logs:
                env.log_action(name, seen, dict.fromkeys(seen, 0))
            else:
                env.get_action(name, seen)
            env.log_returns(name, {agent: float(t) for agent in seen})
        env.end_episode(name, {"a": np.array([4], np.float32), "late": np.array([14], np.float32)})


def transitions_of_rllib(env: Any, games: int) -> list[Any]:
    """What RLlib's own adapter of an ExternalMultiAgentEnv polls, as transitions; its workers refuse it."""
    from ray.rllib.env.external_env import ExternalEnvWrapper

    base, over = ExternalEnvWrapper(env), 0
    found: list[Any] = []
    last: dict[Any, Any] = {}
    while over < games:
        obs, rewards, terminateds, _, _, logged = base.poll()
        for name, of_agents in obs.items():
            is_over = bool(terminateds[name]["__all__"])
            for agent, seen in of_agents.items():
                if (name, agent) in last:
                    found.append((agent, *last[name, agent], float(seen[0]), rewards[name][agent], is_over))
                last[name, agent] = float(seen[0]), logged.get(name, {}).get(agent, 1)
            over += is_over
            if not is_over:
                base.send_actions({name: dict.fromkeys(of_agents, 1)})
    return found


def test_agents_of_an_external_env_have_the_transitions_of_rllibs_adapter() -> None:
    import time

    from gymnasium.spaces import Box, Discrete
    from ray.rllib.env.external_multi_agent_env import ExternalMultiAgentEnv

    class Theirs(ExternalMultiAgentEnv):
        def run(self) -> None:
            agents_play(self)
            time.sleep(3600)  # RLlib raises when the thread ends.

    class Ours(rlio.envs.ExternalMultiAgentEnv):
        def run(self) -> None:
            agents_play(self)

    class One(rlio.Policy):
        def compute_actions(self, obs: Any, state: Any = (), **_: Any) -> Any:
            return np.ones(len(obs), np.int64), state, {}

    spaces = Box(-100.0, 100.0, (1,), np.float32), Discrete(2)
    said = transitions_of_rllib(Theirs(spaces[1], spaces[0]), 2)
    config = rlio.RolloutConfig(rollout_fragment_length=8)
    with rlio.RolloutWorker(Ours(*spaces), {"p": One()}, rollout=config, seed=0) as worker:
        rows = worker.sample().policies()["p"]
    columns = [rows[name] for name in ("agent_index", "obs", "actions", "new_obs", "rewards", "terminateds")]
    found = [
        (("a", "late")[agent], obs.item(), int(action), new_obs.item(), float(reward), bool(is_over))
        for agent, obs, action, new_obs, reward, is_over in zip(*columns, strict=True)
    ]
    assert sorted(found) == sorted(said)
    assert len(found) == 14
