"""`setup_torch_data_parallel`: several processes learn as one, each on batches of its own.

Each process calls it once, with a policy of the same make. From then on every update takes the mean of all
processes' gradients, so that their weights stay equal. Each must make the same number of updates: one that
makes more waits for the others until the time is up.

Example::

    setup_torch_data_parallel([policy], "tcp://127.0.0.1:29500", world_rank=rank, world_size=2)
    policy.learn_on_batch(batch)
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

from rlio.errors import OptionError, excerpt
from rlio.policies.policy import Policy
from rlio.policies.torch_policy import TorchPolicy

if TYPE_CHECKING:
    import torch

__all__ = ["average_gradients", "setup_torch_data_parallel"]


def setup_torch_data_parallel(
    policies: Iterable[Policy],
    url: str,
    world_rank: int,
    world_size: int,
    backend: str = "gloo",
    *,
    timeout: float = 1800.0,
) -> None:
    """Join the processes that learn together, and give all of them the weights of the first.

    Args:
        policies: This process's; all must be TorchPolicies that have their spaces.
        url: Where the processes meet, such as ``"tcp://127.0.0.1:29500"``. Whoever reaches that port can
            take part: use an address that only your machines reach.
        world_rank: Number of this process, from 0.
        world_size: How many there are.
        backend: Of ``torch.distributed``: ``"gloo"`` for CPUs, ``"nccl"`` for GPUs.
        timeout: Seconds that processes wait for each other, here and at every update.

    Raises:
        OptionError: A policy is no TorchPolicy, or a number is out of range, or torch has no such backend.
    """
    import torch.distributed as dist

    chosen = list(policies)
    for policy in chosen:
        if not isinstance(policy, TorchPolicy):
            raise OptionError(
                f"{excerpt(policy)} cannot learn with other processes: it is no TorchPolicy, and only "
                "gradients of torch are averaged"
            )
    if not 0 <= world_rank < world_size:
        raise OptionError(f"world_rank={world_rank}, world_size={world_size}: ranks are 0 to world_size - 1")
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise OptionError(
            f"backend={excerpt(backend)}: this torch has none of that name; 'gloo' needs no GPU"
        )
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (world_rank, world_size):
            raise OptionError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already, "
                f"not {world_rank} of {world_size}"
            )
    else:
        dist.init_process_group(
            backend,
            init_method=url,
            rank=world_rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
    for policy in chosen:
        assert isinstance(policy, TorchPolicy)
        for module in policy.synced_modules():
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, src=0)
        policy.distributed_world_size = world_size


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace each gradient by the mean over all processes; a parameter without one has a gradient of 0."""
    import torch
    import torch.distributed as dist

    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_kind.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter)
    for group in by_kind.values():
        gradients = [parameter.grad for parameter in group if parameter.grad is not None]
        # One message for all of them: each costs a round trip.
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        at = 0
        for gradient in gradients:
            gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
            at += gradient.numel()
