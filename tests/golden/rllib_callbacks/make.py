"""Writes `calls.json` beside it: `python make.py`, with ray[rllib]==2.60.0 and torch.

The calls of callbacks in the scenarios of `tests/callback_calls.py`, as RLlib's own runners make them:
RolloutWorker, SingleAgentEnvRunner and MultiAgentEnvRunner.
"""

from __future__ import annotations

import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.evaluation.rollout_worker import RolloutWorker
from ray.rllib.examples._old_api_stack.policy.random_policy import RandomPolicy
from ray.tune.registry import register_env

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import callback_calls  # noqa: E402
from callback_calls import GOLDEN, SCENARIOS, Scenario, Steps, agents_env, policy_of, recorder  # noqa: E402


def calls_of(scenario: Scenario) -> list[Any]:
    """The calls that RLlib makes."""
    callback_calls.Lengths.made = count()
    made = recorder(RLlibCallback)
    env = Steps if scenario.agents is None else agents_env(MultiAgentEnv, scenario.agents)
    runner = (_old if scenario.stack == "old" else _new)(scenario, env, made)
    for _ in range(scenario.samples):
        runner.sample()
    runner.stop()
    return made.calls


def _old(scenario: Scenario, env: Any, callbacks: Any, *, clip_rewards: Any = None) -> Any:
    config = _config(AlgorithmConfig(), scenario, env, callbacks)
    config.api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False)
    config.experimental(_disable_preprocessor_api=True)
    config.environment(clip_rewards=clip_rewards)
    return RolloutWorker(env_creator=env, default_policy_class=RandomPolicy, config=config)


def _new(scenario: Scenario, env: Any, callbacks: Any) -> Any:
    config = _config(PPOConfig(), scenario, env, callbacks)
    if scenario.agents is None:
        return SingleAgentEnvRunner(config=config)
    return MultiAgentEnvRunner(config=config)


def _config(config: Any, scenario: Scenario, env: Any, callbacks: Any) -> Any:
    if scenario.stack == "new":
        register_env("callback-calls", lambda context: env())
        config.environment("callback-calls", disable_env_checking=True)
    else:
        config.environment(env, disable_env_checking=True)
    own = {name: value for name, value in scenario.config.items() if name != "count_steps_by"}
    config.env_runners(
        num_env_runners=0, num_envs_per_env_runner=scenario.num_envs, create_env_on_local_worker=True, **own
    )
    if scenario.agents is not None:
        spaces = (None, Steps.observation_space, Steps.action_space, {})
        policies = (
            {"first", "second"} if scenario.stack == "new" else dict.fromkeys(("first", "second"), spaces)
        )
        config.multi_agent(
            policies=policies,
            policy_mapping_fn=policy_of,
            count_steps_by=scenario.config.get("count_steps_by", "env_steps"),
        )
    config.callbacks(callbacks)
    return config


if __name__ == "__main__":
    found = {name: calls_of(scenario) for name, scenario in SCENARIOS.items()}
    lines = (f"{json.dumps(name)}: {json.dumps(calls)}" for name, calls in found.items())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(GOLDEN, sum(map(len, found.values())), "calls")  # noqa: T201
