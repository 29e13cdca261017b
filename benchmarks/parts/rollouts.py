"""Rollouts of 16 CartPole-v1 under a small torch policy: beside a loop written by hand, and beside RLlib."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rlio
from benchmarks import peers
from benchmarks.results import Section
from benchmarks.scales import Setup
from benchmarks.timing import Case, interleave

__all__ = ["run"]

ENVS = 16
HIDDEN = (64, 64)


def run(setup: Setup) -> Section:
    """Fragments of all environments, recorded as columns; the policy is a perceptron of two layers of 64."""
    steps = setup.scale.rollout_steps
    section = Section(
        "rollouts", f"Rollouts: {ENVS} CartPole-v1, fragments of {steps} steps, a torch perceptron"
    )
    config = rlio.RolloutConfig(num_envs=ENVS, rollout_fragment_length=steps)
    runner = rlio.EnvRunner("CartPole-v1", rlio.TorchPolicy(hidden=HIDDEN), config=config, seed=0)
    bare = _BareLoop(steps)
    native = rlio.EnvRunner(
        "CartPole-v1",
        rlio.TorchPolicy(hidden=HIDDEN),
        config=replace(config, vectorize_mode="native"),
        seed=0,
    )
    recorded = rlio.RolloutWorker(
        "CartPole-v1",
        rlio.TorchPolicy(hidden=HIDDEN),
        rollout=config,
        seed=0,
        output=rlio.ParquetWriter(setup.scratch / "rollouts"),
    )
    cases = [
        Case("rlio", runner.run, ENVS * steps),
        Case("rlio, native vector env", native.run, ENVS * steps),
        Case("rlio, recorded to Parquet", recorded.sample, ENVS * steps),
        Case("bare loop", bare.run, ENVS * steps),
    ]
    makers: dict[str, Callable[[], Any]] = {
        "RLlib": lambda: _rllib_worker(steps),
        "RLlib, SingleAgentEnvRunner": lambda: _EnvRunner(steps),
    }
    workers = peers.gathered(makers, section.absent)
    cases += [Case(name, worker.sample, ENVS * steps) for name, worker in workers.items()]
    with _one_thread():
        section.add_taken(
            "rollouts", interleave(cases, rounds=setup.scale.rounds, seconds=setup.scale.seconds)
        )
    work = f"rollouts of {ENVS} CartPole"
    section.compare(work, case="rollouts", ours="rlio", beside="bare loop", at_least=1.2)
    section.compare(work, case="rollouts", ours="rlio", beside="RLlib", at_least=25)
    section.compare(work, case="rollouts", ours="rlio", beside="RLlib, SingleAgentEnvRunner")
    section.compare(
        f"{work}, native vector env",
        case="rollouts",
        ours="rlio, native vector env",
        beside="RLlib",
        at_least=25,
    )
    section.compare(
        f"{work}, recorded", case="rollouts", ours="rlio, recorded to Parquet", beside="rlio", at_least=0.9
    )
    recorded.close()
    native.stop()
    runner.stop()
    bare.envs.close()
    for worker in workers.values():
        worker.stop()
    return section


@contextmanager
def _one_thread() -> Iterator[None]:
    """As Ray sets up its workers: many of them share a machine, and a small network gains nothing by more."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _BareLoop:
    """A quick version: the same environments and network, into the same columns."""

    def __init__(self, steps: int) -> None:
        import gymnasium as gym
        import torch
        from gymnasium.vector import AutoresetMode, SyncVectorEnv

        self.torch = torch
        self.steps = steps
        self.envs = SyncVectorEnv(
            [lambda: gym.make("CartPole-v1")] * ENVS, copy=False, autoreset_mode=AutoresetMode.SAME_STEP
        )
        layers: list[torch.nn.Module] = []
        size = 4
        for width in HIDDEN:
            layers += [torch.nn.Linear(size, width), torch.nn.Tanh()]
            size = width
        self.network = torch.nn.Sequential(*layers, torch.nn.Linear(size, 2))
        self.obs = self.envs.reset(seed=0)[0].copy()
        self.rng = np.random.default_rng(0)
        self.eps_id = self.rng.integers(0, 2**62, ENVS)
        self.t = np.zeros(ENVS, np.int64)

    def run(self) -> dict[str, NDArray[Any]]:
        """A fragment, one row of (steps, envs) a step."""
        torch, shape = self.torch, (self.steps, ENVS)
        columns: dict[str, NDArray[Any]] = {
            "obs": np.empty((*shape, 4), np.float32),
            "new_obs": np.empty((*shape, 4), np.float32),
            "actions": np.empty(shape, np.int64),
            "rewards": np.empty(shape, np.float32),
            "terminateds": np.empty(shape, bool),
            "truncateds": np.empty(shape, bool),
            "eps_id": np.empty(shape, np.int64),
            "t": np.empty(shape, np.int64),
            "action_dist_inputs": np.empty((*shape, 2), np.float32),
            "action_logp": np.empty(shape, np.float32),
        }
        for step in range(self.steps):
            with torch.no_grad():
                logits = self.network(torch.from_numpy(self.obs))
                logp = torch.log_softmax(logits, -1)
                actions = torch.multinomial(logp.exp(), 1)
                chosen = logp.gather(1, actions)[:, 0].numpy()
            acted = actions[:, 0].numpy()
            obs, rewards, terminateds, truncateds, infos = self.envs.step(acted)
            ended = terminateds | truncateds
            columns["obs"][step], columns["new_obs"][step] = self.obs, obs
            if ended.any():
                columns["new_obs"][step, ended] = np.stack(infos["final_obs"][ended])
            values = (acted, rewards, terminateds, truncateds, self.eps_id, self.t, logits.numpy(), chosen)
            for column, value in zip(list(columns.values())[2:], values, strict=True):
                column[step] = value
            self.obs = obs.copy()
            self.t += 1
            if ended.any():
                self.t[ended] = 0
                self.eps_id[ended] = self.rng.integers(0, 2**62, int(ended.sum()))
        return columns


def _rllib_worker(steps: int) -> Any:
    """RLlib's RolloutWorker with PPO's torch policy."""
    try:
        import gymnasium as gym
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.algorithms.ppo.ppo_torch_policy import PPOTorchPolicy
        from ray.rllib.evaluation.rollout_worker import RolloutWorker
    except ImportError as error:
        raise peers.not_installed(error) from error
    logging.getLogger("ray").setLevel(logging.ERROR)

    config = (
        PPOConfig()
        .api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False)
        .environment("CartPole-v1")
        .framework("torch")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=ENVS, rollout_fragment_length=steps)
        .training(model={"fcnet_hiddens": list(HIDDEN)})
    )
    worker = RolloutWorker(
        env_creator=lambda _: gym.make("CartPole-v1"), default_policy_class=PPOTorchPolicy, config=config
    )
    # Without advantages, because no peer computes any.
    worker.policy_map["default_policy"].postprocess_trajectory = lambda batch, *_: batch
    return worker


class _EnvRunner:
    """RLlib's SingleAgentEnvRunner with PPO's torch module."""

    def __init__(self, steps: int) -> None:
        try:
            from ray.rllib.algorithms.ppo import PPOConfig
            from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
        except ImportError as error:
            raise peers.not_installed(error) from error
        self._steps = steps
        config = (
            PPOConfig()
            .environment("CartPole-v1")
            .env_runners(num_env_runners=0, num_envs_per_env_runner=ENVS)
            .rl_module(model_config={"fcnet_hiddens": list(HIDDEN)})
        )
        self._runner = SingleAgentEnvRunner(config=config)

    def sample(self) -> Any:
        """As many steps as the others."""
        return self._runner.sample(num_timesteps=ENVS * self._steps)

    def stop(self) -> None:
        """Close the environments."""
        self._runner.stop()
