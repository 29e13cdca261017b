"""`LinearPolicy`: a policy that tests can see through: one weight, one gradient, no randomness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlio.batch import SampleBatch
from rlio.policies.policy import Policy
from rlio.sampling import PolicySetup, WorkerPlace


class LinearPolicy(Policy):
    """Always gives the action 0. Its weight ``w``, shape (1,), follows the mean reward; it keeps the batches
    that it learned on."""

    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate
        self.w = np.zeros(1)
        self.seen: list[Any] = []
        self.global_updates: list[Any] = []

    def compute_actions(
        self, obs: Any, state: Any = (), *, explore: bool = True, inputs: Any = None, timestep: int = 0
    ) -> Any:
        rows = len(obs)
        shape = (rows, *(self.action_space.shape or ()))
        return np.zeros(shape, self.action_space.dtype), state, {"w_then": np.full(rows, self.w[0])}

    def learn_on_batch(self, batch: Any) -> dict[str, float]:
        self.seen.append(batch)
        gradients, stats = self.compute_gradients(batch)
        self.apply_gradients(gradients)
        return stats

    def compute_gradients(self, batch: Any) -> tuple[dict[str, NDArray[Any]], dict[str, float]]:
        assert isinstance(batch, SampleBatch)
        error = float(np.mean(batch["rewards"])) - self.w[0]
        return {"w": np.array([-error])}, {"loss": error**2}

    def apply_gradients(self, gradients: Mapping[str, NDArray[Any]]) -> None:
        self.w = self.w - self.rate * gradients["w"]
        self.weights_seq_no += 1

    def get_weights(self, *, inference_only: bool = False) -> dict[str, NDArray[Any]]:
        return {"w": self.w.copy()}

    def set_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        self.w = np.array(weights["w"])

    def on_global_var_update(self, global_vars: Any) -> None:
        super().on_global_var_update(global_vars)
        self.global_updates.append(global_vars)


def even_odd(agent_id: Any, episode: Any = None, **kwargs: Any) -> str:
    """A mapping that can be imported."""
    return "even" if int(agent_id) % 2 == 0 else "odd"


def only_even(policy_id: str, batch: Any = None) -> bool:
    """A choice of policies to train that can be imported."""
    return policy_id == "even"


def unnamed() -> Callable[..., str]:
    """A mapping that cannot be imported."""
    return lambda agent_id, episode=None, **kwargs: "even"


def worker_options(**flat: Any) -> dict[str, Any]:
    """Keywords of a `RolloutWorker`; those of its `PolicySetup` and `WorkerPlace` may be flat."""
    for option, kind in (("policy_setup", PolicySetup), ("place", WorkerPlace)):
        names = flat.keys() & {field.name for field in fields(kind)}
        if names:
            flat[option] = replace(flat.get(option) or kind(), **{name: flat.pop(name) for name in names})
    return flat
