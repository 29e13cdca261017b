"""`BehaviourCloning`: learns to act like the policy that made the data.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> from rlio.batch import SampleBatch
    >>> policy = BehaviourCloning()
    >>> policy.bind(Box(-1.0, 1.0, (1,)), Discrete(2), seed=0)
    >>> obs = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    >>> data = SampleBatch(obs=obs, actions=(obs[:, 0] > 0).astype(np.int64))
    >>> losses = [policy.learn_on_batch(data)["loss"] for _ in range(50)]
    >>> bool(losses[-1] < losses[0])
    True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlio.batch.columns import Columns
from rlio.policies.torch_policy import TorchPolicy

if TYPE_CHECKING:
    import torch

__all__ = ["BehaviourCloning"]


class BehaviourCloning(TorchPolicy):
    """Minimises the negative log-likelihood of recorded actions, in any space that `TorchPolicy` supports.

    Rows count equally, or by the column ``weights`` if it exists. Reports ``entropy`` of the policy, and
    ``accuracy``: the share of rows whose recorded action is the policy's most likely one (only in spaces
    without floating-point numbers). Arguments are those of `TorchPolicy`, except ``loss``.

    Source: Pomerleau, "ALVINN: an autonomous land vehicle in a neural network" (1988).
    """

    def _compute_loss(
        self, outputs: torch.Tensor, tensors: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        actions = tensors[Columns.ACTIONS]
        losses = -self.distribution.logp(outputs, actions)
        weights = tensors.get(Columns.WEIGHTS)
        loss = losses.mean() if weights is None else (losses * weights).sum() / weights.sum()
        stats = {"entropy": float(self.distribution.entropy(outputs.detach()).mean())}
        if self._is_countable:
            stats["accuracy"] = float(self._are_likeliest(outputs.detach(), actions).float().mean())
        return loss, stats
