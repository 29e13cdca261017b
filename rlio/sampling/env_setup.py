"""`env_setup`: what a `RolloutConfig` says of environments, as those who make them want it.

Example:
    >>> from rlio.sampling.config import RolloutConfig
    >>> setup = env_setup(RolloutConfig(num_envs=2, env_config={"gravity": 9.8}), worker_index=3)
    >>> setup.num_envs, setup.context, setup.context.worker_index
    (2, {'gravity': 9.8}, 3)
"""

from __future__ import annotations

from rlio.envs.context import EnvContext
from rlio.envs.make import EnvSetup
from rlio.envs.restarts import RestartPolicy
from rlio.sampling.config import RolloutConfig

__all__ = ["env_setup"]


def env_setup(
    config: RolloutConfig, *, worker_index: int = 0, num_workers: int = 0, recreated_worker: bool = False
) -> EnvSetup:
    """Say how the environments of a worker are made and stepped.

    Args:
        config: How to step.
        worker_index: Of the worker, for functions that make environments; likewise the next two.
        num_workers: Workers in all.
        recreated_worker: Whether the worker replaces one that failed.
    """
    restarts = config.restart_failed_sub_environments
    return EnvSetup(
        num_envs=config.num_envs,
        vectorize_mode="actors" if config.remote_worker_envs else config.vectorize_mode,
        context=EnvContext(
            config.env_config,
            worker_index=worker_index,
            num_workers=num_workers,
            remote=config.remote_worker_envs or config.vectorize_mode == "async",
            recreated_worker=recreated_worker,
        ),
        check=config.check_env,
        validate=config.validate_env,
        restarts=RestartPolicy(max_restarts=config.max_env_restarts) if restarts else None,
        step_timeout=config.env_step_timeout,
        batch_wait_ms=config.remote_env_batch_wait_ms,
        render=config.render_env,
        environs=config.extra_python_environs,
    )
