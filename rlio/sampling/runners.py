"""`make_runner`: the runner that an environment and a group of policies need.

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

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from rlio.batch.columns import DEFAULT_POLICY_ID
from rlio.envs.context import EnvContext
from rlio.envs.external import ExternalEnv
from rlio.envs.make import ExternalEnvMade
from rlio.envs.multi_agent_processes import AgentsElsewhere
from rlio.envs.pettingzoo import is_pettingzoo
from rlio.errors import OptionError
from rlio.sampling.callbacks import CallbacksLike
from rlio.sampling.config import RolloutConfig
from rlio.sampling.env_runner import EnvRunner
from rlio.sampling.external_runner import ExternalRunner
from rlio.sampling.multi_agent_runner import MultiAgentEnvRunner
from rlio.sampling.policy_group import PolicyGroup

__all__ = ["AnyRunner", "Place", "make_runner", "sub_envs"]

# Any: environments are those of gymnasium, PettingZoo, RLlib, ours and other people's.

AnyRunner: TypeAlias = EnvRunner | MultiAgentEnvRunner | ExternalRunner


@dataclass(frozen=True)
class Place:
    """Which worker of how many.

    Attributes:
        worker_index: 0 for a local worker, 1 to ``num_workers`` for others.
        num_workers: Workers in all.
        recreated_worker: Whether the worker takes the place of one that failed.
    """

    worker_index: int = 0
    num_workers: int = 0
    recreated_worker: bool = False

    def context(self, config: RolloutConfig) -> EnvContext:
        """What makers of environments are told."""
        return EnvContext(
            config.env_config,
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
    place: Place | None = None,
) -> AnyRunner:
    """Make a runner, and bind the policies to the environment's spaces, if they were not before.

    Several agents are expected where the environment has them, where there is a mapping of agents, where no
    policy is ``default_policy``, and where there are several policies and ``env`` is a function.

    Args:
        env: What `EnvRunner` or `MultiAgentEnvRunner` takes, or an `ExternalEnv`, or a function
            that makes one.
        group: Who acts.
        config: How to step.
        callbacks: Told of what happens.
        seed: Of the runner.
        place: Whose it is.

    Raises:
        OptionError: The environment cannot be made, or the policies cannot act in it.
    """
    where = place if place is not None else Place()
    common: dict[str, Any] = {
        "config": config,
        "callbacks": callbacks,
        "seed": seed,
        "worker_index": where.worker_index,
    }
    workers: dict[str, Any] = {"num_workers": where.num_workers, "recreated_worker": where.recreated_worker}
    runner: EnvRunner | ExternalRunner
    if isinstance(env, ExternalEnv):
        runner = ExternalRunner(env, _only_actor(group), **common)
    elif _needs_agents(env, group):
        return MultiAgentEnvRunner(env, group.policies, group.policy_mapping_fn, **common, **workers)
    else:
        try:
            runner = EnvRunner(env, _only_actor(group), **common, **workers)
        except ExternalEnvMade as made:
            # The function was given the env_config, and nobody else is to heed it.
            common["config"] = replace(config, env_config=RolloutConfig().env_config)
            runner = ExternalRunner(made.env, _only_actor(group), **common)
    spaces = runner.observation_space, runner.action_space
    group.foreach_policy(lambda policy, _: policy.is_bound or policy.bind(*spaces, seed))
    return runner


def _only_actor(group: PolicyGroup) -> Any:
    if group.policies.policy_states_are_swappable:
        raise OptionError(
            "policy_states_are_swappable=True with one agent: its policy is always in memory, and would "
            "become another one"
        )
    return group.get(DEFAULT_POLICY_ID)


def _needs_agents(env: Any, group: PolicyGroup) -> bool:
    if _is_multi_agent(env) or group.policy_mapping_fn is not None:
        return True
    return DEFAULT_POLICY_ID not in group.policies or (len(group.policies) > 1 and not _is_gymnasium(env))


def _is_multi_agent(env: Any) -> bool:
    """Whether ``env`` can be seen to be an environment with several agents, or a class of such."""
    names = ("possible_agents", "get_observation_space", "get_action_space")
    return all(hasattr(env, name) for name in names) or is_pettingzoo(env)


def _is_gymnasium(env: Any) -> bool:
    """Whether ``env`` can be seen to be one of gymnasium's, or to name or make one."""
    from gymnasium import Env
    from gymnasium.envs.registration import EnvSpec
    from gymnasium.vector import VectorEnv

    kind = env if isinstance(env, type) else type(env)
    return issubclass(kind, (str, EnvSpec, Env, VectorEnv))


def sub_envs(runner: AnyRunner) -> list[Any]:
    """The environments that ``runner`` steps, one by one.

    Raises:
        OptionError: They live in other processes, or are one native vector environment.
    """
    if isinstance(runner, ExternalRunner):
        return [runner.env]
    envs: Any = runner.envs
    found = envs if isinstance(envs, list) else getattr(envs, "envs", None)
    if found is None or any(isinstance(each, AgentsElsewhere) for each in found):
        raise OptionError(
            "the environments are not in this process one by one: worker.runner.envs stands for them"
        )
    return list(found)
