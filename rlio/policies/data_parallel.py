"""`setup_torch_data_parallel`: several processes learn together, each on its own batches.

Each process calls it once, with a policy made in the same way. From then on every update uses the mean of all
processes' gradients, weighted by rows. Weights therefore stay equal, and equal those of a single process with
all rows. Each process must make the same number of updates: a process that makes more waits for the others
until its timeout. `in_step` makes the numbers equal.

Example::

    setup_torch_data_parallel([policy], "tcp://127.0.0.1:29500", world_rank=rank, world_size=2)
    reader = rlio.DatasetReader(root, batch_size=128, shard=(rank, 2), epochs=10, shuffle=True, seed=0)
    for batch in in_step(reader):
        policy.learn_on_batch(batch)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta

from rlio.batch import SampleBatch
from rlio.errors import OptionError, excerpt
from rlio.policies.policy import Policy
from rlio.policies.torch_policy import TorchPolicy

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
        policies: This process's policies; all must be bound TorchPolicies.
        url: Where the processes meet, such as ``"tcp://127.0.0.1:29500"``. Any program that reaches the port
            can take part: use an address that only your machines reach.
        world_rank: Index of this process, from 0.
        world_size: Number of processes.
        backend: Backend of ``torch.distributed``: ``"gloo"`` for CPUs, ``"nccl"`` for GPUs.
        timeout: Seconds that processes wait for each other, here and at every update.

    Raises:
        OptionError: A policy is not a TorchPolicy, a number is out of range, or torch lacks the backend.
    """
    import torch.distributed as dist

    chosen = list(policies)
    for policy in chosen:
        if not isinstance(policy, TorchPolicy):
            raise OptionError(
                f"{excerpt(policy)} cannot learn with other processes: expected a TorchPolicy, because "
                "only gradients of torch are averaged"
            )
    if not 0 <= world_rank < world_size:
        raise OptionError(
            f"world_rank={world_rank}, world_size={world_size}: expected a rank from 0 to world_size - 1"
        )
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise OptionError(f"backend={excerpt(backend)}: this torch has no such backend; 'gloo' needs no GPU")
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
    """Give ``batches`` until those of all processes have ended: the same number in each process.

    The rows at the end of the last epoch are divided evenly, so some processes may have one batch fewer. Such
    a process then gets a batch without rows or columns; its policy learns from the others' gradients. In each
    step the processes exchange one number, to decide whether to continue.

    Args:
        batches: This process's batches, such as a `rlio.DatasetReader`; a single process gets them unchanged.
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
