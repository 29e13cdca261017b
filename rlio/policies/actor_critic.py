"""`ActorCritic`: learns from its own recent steps, with advantages (A2C), or in several bounded passes (PPO).

Example:
    >>> from rlio.policies.sgd import do_minibatch_sgd
    >>> from rlio.sampling.config import RolloutConfig
    >>> from rlio.sampling.env_runner import EnvRunner
    >>> policy = ActorCritic(clip_param=0.2)
    >>> runner = EnvRunner("CartPole-v1", policy, config=RolloutConfig(num_envs=4), seed=0)
    >>> batch = runner.run()
    >>> batch["advantages"].shape, batch["value_targets"].dtype
    ((800,), dtype('float32'))
    >>> stats = do_minibatch_sgd(
    ...     policy.learn_on_batch, batch, num_sgd_iter=2, sgd_minibatch_size=200,
    ...     standardize_fields=["advantages"], seed=0)
    >>> policy.updates, sorted(stats)
    (8, ['entropy', 'grad_norm', 'kl', 'loss', 'policy_loss', 'vf_loss'])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlio.batch.columns import Columns
from rlio.errors import OptionError, SchemaError
from rlio.policies.postprocessing import GAE
from rlio.policies.torch_policy import MakeModule, MakeOptimizer, TorchPolicy
from rlio.support.options import check_number

if TYPE_CHECKING:
    import torch

__all__ = ["ActorCritic"]


class ActorCritic(TorchPolicy):
    """A policy with values, in any space that `TorchPolicy` supports, also with a recurrent module.

    The loss is ``policy_loss + vf_loss_coeff * vf_loss - entropy_coeff * entropy``. With ``clip_param``, the
    policy loss is PPO's clipped surrogate, which allows several passes over a batch (`do_minibatch_sgd`);
    without it, ``-logp * advantage``, for one pass. ``vf_loss`` is half the mean squared error of the values.
    Rows are weighted by the column ``weights`` if it exists. The policy reports these numbers, and ``kl``, an
    estimate of its distance from the policy that acted.

    It learns from the columns that `postprocess_trajectory` adds. It does not standardise advantages: do so
    over the batch that it learns from.

    Args:
        module: As in `TorchPolicy`, with the value as its last output.
        gae: How to estimate advantages.
        clip_param: Bound of the ratio of an action's new and old probability: 1 - clip to 1 + clip; None: no
            bound.
        vf_loss_coeff: Weight of the values' loss.
        entropy_coeff: Weight of the entropy.
        optimizer: As in `TorchPolicy`.
        learning_rate: As in `TorchPolicy`.
        hidden: As in `TorchPolicy`.
        max_grad_norm: As in `TorchPolicy`.
        device: As in `TorchPolicy`.
        max_seq_len: As in `TorchPolicy`.

    Raises:
        OptionError: A value is out of range.

    Source: Mnih et al., "Asynchronous methods for deep reinforcement learning" (2016); Schulman et al.,
    "Proximal policy optimization algorithms" (2017).
    """

    def __init__(
        self,
        module: torch.nn.Module | MakeModule | None = None,
        *,
        gae: GAE | None = None,
        clip_param: float | None = 0.2,
        vf_loss_coeff: float = 0.5,
        entropy_coeff: float = 0.0,
        optimizer: MakeOptimizer | None = None,
        learning_rate: float | None = None,
        hidden: Sequence[int] | None = None,
        max_grad_norm: float | None = 0.5,  # the usual value for PPO
        device: str = "cpu",
        max_seq_len: int | None = None,
    ) -> None:
        options = GAE() if gae is None else gae
        super().__init__(
            module,
            optimizer=optimizer,
            learning_rate=learning_rate,
            hidden=hidden,
            max_grad_norm=max_grad_norm,
            device=device,
            postprocessing=options,
            max_seq_len=max_seq_len,
        )
        if not options.use_critic:
            raise OptionError("gae=GAE(use_critic=False): an ActorCritic has a critic; leave it True")
        self._clip_param = check_number("clip_param", clip_param, above=0, none="no bound")
        self._vf_loss_coeff = check_number("vf_loss_coeff", vf_loss_coeff, least=0)
        self._entropy_coeff = check_number("entropy_coeff", entropy_coeff, least=0)

    def _needed_columns(self) -> Sequence[str]:
        return (
            Columns.OBS,
            Columns.ACTIONS,
            Columns.ACTION_LOGP,
            Columns.ADVANTAGES,
            Columns.VALUE_TARGETS,
        )

    def _compute_loss(
        self, outputs: torch.Tensor, tensors: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        import torch

        chosen_by, values = self.split_outputs(outputs)
        assert values is not None
        weights = tensors.get(Columns.WEIGHTS)

        def mean(rows: torch.Tensor) -> torch.Tensor:
            return rows.mean() if weights is None else (rows * weights).sum() / weights.sum()

        logp = self.distribution.logp(chosen_by, tensors[Columns.ACTIONS])
        moved = logp - tensors[Columns.ACTION_LOGP]
        advantages = tensors[Columns.ADVANTAGES]
        if self._clip_param is None:
            gains = logp * advantages
        else:
            _check_known(tensors[Columns.ACTION_LOGP])
            ratio = moved.exp()
            bounded = ratio.clamp(1 - self._clip_param, 1 + self._clip_param)
            gains = torch.minimum(ratio * advantages, bounded * advantages)
        policy_loss = -mean(gains)
        vf_loss = mean(0.5 * (values - tensors[Columns.VALUE_TARGETS]) ** 2)
        entropy = mean(self.distribution.entropy(chosen_by))
        loss = policy_loss + self._vf_loss_coeff * vf_loss - self._entropy_coeff * entropy
        moved = moved.detach()
        return loss, {
            "policy_loss": float(policy_loss.detach()),
            "vf_loss": float(vf_loss.detach()),
            "entropy": float(entropy.detach()),
            # Never below 0, with a small variance: Schulman, "Approximating KL divergence" (2020).
            "kl": float(mean(moved.exp() - 1 - moved)),
        }


def _check_known(logp: torch.Tensor) -> None:
    """Refuse rows without a probability: their ratio, and then every weight, would be NaN."""
    unknown = (~logp.isfinite()).nonzero()
    if len(unknown):
        row = int(unknown[0, 0])
        raise SchemaError(
            f"the action in row {row} of {len(logp)} has the log-probability {float(logp[row])}, so PPO has "
            "no ratio for it: leave out such rows, for example those with logged_action, or pass "
            "clip_param=None",
            column=Columns.ACTION_LOGP,
        )
