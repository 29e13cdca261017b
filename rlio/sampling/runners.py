"""`make_runner`: makes the runner that fits an environment and a group of policies.

Example:
    >>> from rlio.policies.policy_map import PolicyMap
    >>> from rlio.policies.random_policy import RandomPolicy
    >>> group = PolicyGroup(PolicyMap({"default_policy": RandomPolicy()}))
    >>> runner = make_runner("CartPole-v1", group, config=RolloutConfig(num_envs=3), seed=0)
    >>> type(runner).__name__, len(sub_envs(runner))
    ('EnvRunner', 3)
    >>> runner.stop()
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.envs.context import EnvContext
from rlio.envs.external import ExternalEnv, ExternalMultiAgentEnv
from rlio.envs.multi_agent_processes import AgentsElsewhere
from rlio.envs.pettingzoo import is_pettingzoo
from rlio.errors import OptionError
from rlio.sampling.callbacks import CallbacksLike
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.external_agents import ExternalAgentsRunner
from rlio.sampling.external_runner import ExternalRunner
from rlio.sampling.make_env import ExternalEnvMade
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner
from rlio.sampling.policy_group import PolicyGroup

__all__ = ["AnyRunner", "WorkerPlace", "make_runner", "sub_envs"]

# Any: environments come from gymnasium, PettingZoo, RLlib, rlio and users.

AnyRunner: TypeAlias = EnvRunner | MultiAgentEnvRunner | ExternalRunner


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's position among all workers.

    Attributes:
        worker_index: 0 for a local worker, 1 to ``num_workers`` for others, which share the files of an
            input.
        num_workers: Total number of workers.
        recreated_worker: Whether the worker replaces a failed one: for makers of environments.
        log_dir: Folder of ``output="logdir"``.
        order_seed: Seed for the order of a shuffled input that the workers share, the same in all of them. A
            `rlio.distributed.WorkerGroup` passes its own. None: 0; for a worker that reads alone, its seed.
    """

    worker_index: int = 0
    num_workers: int = 0
    recreated_worker: bool = False
    log_dir: str | os.PathLike[str] | None = None
    order_seed: int | None = None

    def order_seed_of(self, seed: int | None) -> int | None:
        """The seed for the order of a stored input of the worker with this ``seed``; None: draw one."""
        if self.order_seed is None and self.worker_index > 0 and self.num_workers > 1:
            return 0  # The workers' own seeds may differ. torch's DistributedSampler has the same default.
        return seed if self.order_seed is None else self.order_seed

    def context(self, config: RolloutConfig) -> EnvContext:
        """The context passed to functions that make environments."""
        return config.context(
            worker_index=self.worker_index,
            num_workers=self.num_workers,
            recreated_worker=self.recreated_worker,
        )


def make_runner(
    env: Any,
    group: PolicyGroup,
    *,
    config: RolloutConfig,
    callbacks: CallbacksLike = None,
    seed: int | None = None,
    place: WorkerPlace | None = None,
) -> AnyRunner:
    """Make a runner, and bind the policies to the environment's spaces if they are not bound yet.

    Expects several agents in these cases: the environment has them, an agent mapping is given, no policy is
    ``default_policy``, or ``env`` is a function and there are several policies.

    Args:
        env: An environment that `EnvRunner` or `MultiAgentEnvRunner` accepts, an `ExternalEnv`, or a function
            that makes one.
        group: Policies that act.
        config: How to step.
        callbacks: Called on sampling events.
        seed: Seed of the runner.
        place: Position of the runner's worker.

    Raises:
        OptionError: The environment cannot be made, or the policies cannot act in it.
    """
    where = place if place is not None else WorkerPlace()
    common: dict[str, Any] = {
        "config": config,
        "callbacks": callbacks,
        "seed": seed,
        "worker_index": where.worker_index,
    }
    workers: dict[str, Any] = {"num_workers": where.num_workers, "recreated_worker": where.recreated_worker}
    runner: AnyRunner
    try:
        if isinstance(env, ExternalEnv):
            runner = _external(env, group, common)
        elif _needs_agents(env, group):
            return MultiAgentEnvRunner(env, group.policies, group.policy_mapping_fn, **common, **workers)
        else:
            runner = EnvRunner(env, _only_actor(group), **common, **workers)
    except ExternalEnvMade as made:
        # The function already got the env_config, and the external runner does not use it.
        common["config"] = replace(config, env_config=RolloutConfig().env_config)
        runner = _external(made.env, group, common)
    if isinstance(runner, MultiAgentEnvRunner):
        return runner
    spaces = runner.observation_space, runner.action_space
    group.foreach_policy(lambda policy, _: policy.is_bound or policy.bind(*spaces, seed))
    return runner


def _external(
    env: ExternalEnv, group: PolicyGroup, common: dict[str, Any]
) -> ExternalRunner | ExternalAgentsRunner:
    if isinstance(env, ExternalMultiAgentEnv):
        return ExternalAgentsRunner(env, group.policies, group.policy_mapping_fn, **common)
    return ExternalRunner(env, _only_actor(group), **common)


def _only_actor(group: PolicyGroup) -> Any:
    if group.policies.policy_states_are_swappable:
        raise OptionError(
            "policy_states_are_swappable=True with one agent: its policy always stays in memory and would "
            "be replaced by another one; set it to False"
        )
    return group.get(DEFAULT_POLICY_ID)


def _needs_agents(env: Any, group: PolicyGroup) -> bool:
    if _is_multi_agent(env) or group.policy_mapping_fn is not None:
        return True
    return DEFAULT_POLICY_ID not in group.policies or (len(group.policies) > 1 and not _is_gymnasium(env))


def _is_multi_agent(env: Any) -> bool:
    """Whether ``env`` is recognisably a multi-agent environment, or a class of one."""
    names = ("possible_agents", "get_observation_space", "get_action_space")
    return all(hasattr(env, name) for name in names) or is_pettingzoo(env)


def _is_gymnasium(env: Any) -> bool:
    """Whether ``env`` is recognisably a gymnasium environment, or names or makes one."""
    from gymnasium import Env
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.vector import VectorEnv

    kind = env if isinstance(env, type) else type(env)
    return issubclass(kind, (str, EnvSpec, Env, VectorEnv))


def sub_envs(runner: AnyRunner) -> list[Any]:
    """The environments that ``runner`` steps, as a list.

    Raises:
        OptionError: The environments live in other processes, or form one native vector environment.
    """
    if isinstance(runner, ExternalRunner):
        return [runner.env]
    envs: Any = runner.envs
    found = envs if isinstance(envs, list) else getattr(envs, "envs", None)
    if found is None or any(isinstance(each, AgentsElsewhere) for each in found):
        raise OptionError(
            "the environments are not separate objects in this process: use worker.runner.envs instead"
        )
    return list(found)
