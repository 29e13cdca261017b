"""`average_gradients`: averages the gradients of several processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["average_gradients"]


def average_gradients(parameters: Iterable[torch.nn.Parameter], *, rows: int) -> None:
    """Replace each gradient by the mean over all processes, weighted by their ``rows``.

    A parameter without a gradient counts as 0.

    Args:
        parameters: This process's parameters.
        rows: Number of rows behind its gradients; 0 in a process without rows.
    """
    import torch
    import torch.distributed as dist

    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_device.setdefault(parameter.grad.device, []).append(parameter.grad)
    for gradients in by_device.values():
        # One message for all gradients and the rows, because each costs a round trip.
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))  # Half precision ends at 65504.
        flat = torch.cat([flat * rows, flat.new_tensor([rows])])
        dist.all_reduce(flat)
        means = torch.split(flat[:-1] / flat[-1].clamp(min=1), [gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))
