"""`setup_torch_data_parallel`: several processes learn as one, each on batches of its own.

Each process calls it once, with a policy of the same make. From then on every update takes the mean of all
processes' gradients, each counted by its rows, so that their weights stay equal, and are those of one process
that has the rows of all. Each must make the same number of updates: one that makes more waits for the others
until the time is up. `in_step` sees to that.

Example::

    setup_torch_data_parallel([policy], "tcp://127.0.0.1:29500", world_rank=rank, world_size=2)
    reader = rlio.DatasetReader(root, batch_size=128, shard=(rank, 2), epochs=10, shuffle=True, seed=0)
    for batch in in_step(reader):
        policy.learn_on_batch(batch)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from rlio.batch import SampleBatch
from rlio.errors import OptionError, excerpt
from rlio.policies.policy import Policy
from rlio.policies.torch_policy import TorchPolicy

if TYPE_CHECKING:
    pass

__all__ = ["in_step", "setup_torch_data_parallel"]


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


def in_step(batches: Iterable[SampleBatch]) -> Iterator[SampleBatch]:
    """Give ``batches`` until those of all processes have ended: to each as many as to the others.

    The rows at the end of the last epoch are dealt out evenly, so that some processes may have one batch less
    than others. Each of those gets a batch without rows or columns then, on which a policy learns what the
    others find. The processes tell each other in each step whether they go on: a message of one number.

    Args:
        batches: This process's, such as a `rlio.DatasetReader`; in one process alone, they are given as is.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        yield from batches
        return
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    own = iter(batches)
    while True:
        batch = next(own, None)
        going_on = torch.tensor([int(batch is not None)], device=device)
        dist.all_reduce(going_on)
        if not going_on.item():
            return
        yield SampleBatch() if batch is None else batch
