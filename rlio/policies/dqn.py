"""`DQN`: learns the values of actions, from any transitions, its own or logged ones.

Example:
    >>> import numpy as np
    >>> from gymnasium.spaces import Box, Discrete
    >>> policy = DQN(initial_epsilon=0.5, final_epsilon=0.1, epsilon_timesteps=100)
    >>> policy.bind(Box(-1.0, 1.0, (3,)), Discrete(2), seed=0)
    >>> [round(policy.epsilon(t), 2) for t in (0, 50, 100, 1000)]
    [0.5, 0.3, 0.1, 0.1]
    >>> _, _, extras = policy.compute_actions(np.zeros((4, 3), np.float32))
    >>> extras["q_values"].shape
    (4, 2)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.batch.columns import Columns
from rlio.errors import OptionError, excerpt
from rlio.policies.policy import PolicyOutput, PolicyState, RecurrentState, state_part
from rlio.policies.postprocessing import N_STEP_DISCOUNT, NStep
from rlio.policies.torch_arrays import arrays_of, load_arrays
from rlio.policies.torch_policy import MakeModule, MakeOptimizer, TorchPolicy, under_lock
from rlio.support.options import check_count, check_number

if TYPE_CHECKING:
    import gymnasium as gym
    import torch

__all__ = ["DQN"]


class DQN(TorchPolicy):
    """Double deep Q-learning with a target network, for Discrete actions; explores epsilon-greedily.

    The loss of a batch is the Huber loss of ``Q(obs, action)`` against ``reward + gamma * Q'(new_obs, argmax
    Q(new_obs))`` with the target network Q'. A terminated episode has no value after its end; a truncated one
    does. Rows without a known target do not count: their ``new_obs`` is missing (``new_obs_valid`` False),
    and they did not terminate. Rows are weighted by the column ``weights`` if it exists. n-step transitions,
    made here or by `rlio.ReplayStore`, carry the discount of their target (``n_step_discount``).

    Extra columns: ``q_values``, and ``action_logp`` of the epsilon-greedy choice.

    Args:
        module: As in `TorchPolicy`, with one output for each action.
        optimizer: As in `TorchPolicy`.
        learning_rate: As in `TorchPolicy`.
        hidden: As in `TorchPolicy`.
        max_grad_norm: As in `TorchPolicy`.
        device: As in `TorchPolicy`.
        gamma: Discount of a step.
        n_step: Steps that sampled transitions look ahead; `TorchPolicy` describes the effect on outputs.
        target_update_every: Updates between copies of the module to the target network.
        initial_epsilon: Initial probability of a random action.
        final_epsilon: Probability of a random action from ``epsilon_timesteps`` on.
        epsilon_timesteps: Sampled steps over which the probability falls linearly.

    Raises:
        OptionError: A value is out of range; at `bind`, the actions are not Discrete, or the module is
            recurrent.

    Source: van Hasselt, Guez, Silver, "Deep reinforcement learning with double Q-learning" (2016).
    """

    def __init__(
        self,
        module: torch.nn.Module | MakeModule | None = None,
        *,
        optimizer: MakeOptimizer | None = None,
        learning_rate: float | None = None,
        hidden: Sequence[int] | None = None,
        max_grad_norm: float
        | None = 10.0,  # far above the norms of a sound run; makes one bad batch harmless
        device: str = "cpu",
        gamma: float = 0.99,
        n_step: int = 1,
        target_update_every: int = 200,
        initial_epsilon: float = 1.0,
        final_epsilon: float = 0.05,
        epsilon_timesteps: int = 10_000,
    ) -> None:
        check_number("gamma", gamma, least=0, most=1)
        steps = check_count("n_step", n_step, least=1, of="steps")
        super().__init__(
            module,
            optimizer=optimizer,
            learning_rate=learning_rate,
            hidden=hidden,
            max_grad_norm=max_grad_norm,
            device=device,
            postprocessing=None if steps == 1 else NStep(steps, gamma=gamma),
        )
        for name, value in (
            ("initial_epsilon", initial_epsilon),
            ("final_epsilon", final_epsilon),
        ):
            check_number(name, value, least=0, most=1)
        for name, count in (
            ("target_update_every", target_update_every),
            ("epsilon_timesteps", epsilon_timesteps),
        ):
            check_count(name, count, least=1)
        self.gamma = gamma
        self.target_update_every = target_update_every
        self._epsilons = (initial_epsilon, final_epsilon, epsilon_timesteps)

    def epsilon(self, timestep: int) -> float:
        """Probability of a random action after ``timestep`` sampled steps."""
        initial, final, steps = self._epsilons
        return initial + (final - initial) * min(max(timestep, 0) / steps, 1.0)

    def _setup(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        seeds: np.random.SeedSequence,
    ) -> None:
        from gymnasium.spaces import Discrete

        if not isinstance(action_space, Discrete):
            raise OptionError(
                f"DQN acts in Discrete spaces, not in {excerpt(str(action_space))}: use another policy there"
            )
        super()._setup(observation_space, action_space, seeds)
        if self.is_recurrent:
            raise OptionError("DQN's module must not be recurrent: stack observations, or use ActorCritic")
        self._start = int(action_space.start)
        self._target = copy.deepcopy(self.module).requires_grad_(False).eval()

    def compute_actions(
        self,
        obs: Any,
        state: RecurrentState = (),
        *,
        explore: bool = True,
        inputs: SampleBatch | None = None,
        timestep: int = 0,
    ) -> PolicyOutput:
        import torch

        with torch.inference_mode():
            values = self.forward(obs)
            greedy = values.argmax(-1)
            # A runner knows only its own steps; the sum over all workers comes with the weights.
            epsilon = self.epsilon(max(timestep, self.global_vars.timestep)) if explore else 0.0
            actions = greedy
            if epsilon:
                draws = torch.rand((2, *greedy.shape), generator=self._generator, device=greedy.device)
                random = (draws[1] * values.shape[1]).long().clamp_(max=values.shape[1] - 1)
                actions = torch.where(draws[0] < epsilon, random, greedy)
            probability = (actions == greedy) * (1.0 - epsilon) + epsilon / values.shape[1]
            extras = {
                Columns.ACTION_LOGP: probability.log().cpu().numpy(),
                "q_values": values.cpu().numpy(),
            }
        return (actions + self._start).cpu().numpy(), state, extras

    def _log_likelihoods(
        self, outputs: torch.Tensor, actions: Any, explore: bool, timestep: int | None
    ) -> torch.Tensor:
        epsilon = 0.0
        if explore:
            epsilon = self._epsilons[1] if timestep is None else self.epsilon(timestep)
        greedy = outputs.argmax(-1) + self._start
        probability: torch.Tensor = (actions == greedy) * (1.0 - epsilon) + epsilon / outputs.shape[1]
        return probability.log()

    def _needed_columns(self) -> Sequence[str]:
        return (Columns.OBS, Columns.ACTIONS, Columns.REWARDS, Columns.NEXT_OBS, Columns.TERMINATEDS)

    def _compute_loss(
        self, outputs: torch.Tensor, tensors: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        import torch

        values, target, counts = self._values_and_targets(outputs, tensors)
        if Columns.WEIGHTS in tensors:
            counts = counts * tensors[Columns.WEIGHTS]
            target = torch.where(counts > 0, target, values.detach())
        losses = torch.nn.functional.smooth_l1_loss(values, target, reduction="none")
        loss = (losses * counts).sum() / counts.sum().clamp(min=1e-8)
        return loss, {"mean_q": float(values.detach().mean())}

    def _values_and_targets(
        self, outputs: torch.Tensor, tensors: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values of the actions taken, their targets, and 1 where the target is known; (n,) each."""
        import torch

        terminated = tensors[Columns.TERMINATEDS].bool()
        with torch.no_grad():
            new_obs = tensors[Columns.NEXT_OBS]
            best = self.module(new_obs).argmax(-1, keepdim=True)
            after = self._target(new_obs).gather(-1, best)[:, 0]
            discount = tensors.get(N_STEP_DISCOUNT, self.gamma)
            target = tensors[Columns.REWARDS] + discount * torch.where(terminated, 0.0, after)
        counts = torch.ones_like(target)
        if Columns.NEXT_OBS_VALID in tensors:
            counts = (terminated | tensors[Columns.NEXT_OBS_VALID].bool()).float()
        actions = (tensors[Columns.ACTIONS].long() - self._start)[:, None]
        values = outputs.gather(-1, actions)[:, 0]
        # A row that does not count gets its own value as target. Otherwise a placeholder for a missing
        # observation may give NaN, and NaN times 0 is NaN, in the gradient too.
        return values, torch.where(counts > 0, target, values.detach()), counts

    @under_lock
    def td_errors(self, batch: SampleBatch) -> NDArray[np.float32]:
        """Target minus value of each row, shape (n,), by the current policy: for priorities.

        0 where the target is unknown. The policy does not learn.

        Raises:
            MissingColumn: As for `learn_on_batch`.
        """
        import torch

        _, tensors = self._learnable(batch)
        with torch.no_grad():
            outputs = self._outputs_for(self.module, tensors)
            values, target, _ = self._values_and_targets(outputs, tensors)
        errors: NDArray[np.float32] = (target - values).cpu().numpy()
        return errors

    def _after_update(self) -> None:
        if self.updates % self.target_update_every == 0:
            self._target.load_state_dict(self.module.state_dict())

    def synced_modules(self) -> list[torch.nn.Module]:
        return [self.module, self._target]

    @under_lock
    def get_state(self) -> PolicyState:
        return super().get_state() | {"target": arrays_of(self._target)}

    @under_lock
    def set_state(self, state: PolicyState) -> None:
        target = state_part(state, "target", dict)
        super().set_state(state)
        load_arrays(self._target, target, "target's weights")
