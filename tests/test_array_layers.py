"""Small networks act in NumPy: the same outputs, actions and errors as through torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from further import further
from gymnasium.spaces import Box, Discrete
from torch import nn

from rlio.errors import SchemaError
from rlio.policies.actor_critic import ActorCritic
from rlio.policies.array_layers import outputs_in_numpy
from rlio.policies.networks import Flatten, mlp
from rlio.policies.torch_policy import TorchPolicy

SPACE = Box(-1.0, 1.0, (4,), np.float32)


def network() -> nn.Sequential:
    return mlp(SPACE, outputs=3, hidden=(8, 8), generator=torch.Generator())


def rows(n: int = 5) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(n, 4)).astype(np.float32)


def agrees(module: nn.Module, obs: np.ndarray) -> bool:
    """Whether NumPy gives what torch gives; None does not."""
    found = outputs_in_numpy(module, obs)
    with torch.no_grad():
        expected = module(torch.from_numpy(obs)).numpy()
    return found is not None and bool(np.allclose(found, expected, atol=1e-6))


def test_outputs_are_those_of_torch_for_any_layout_of_the_observations() -> None:
    module = network()
    obs = rows(12)
    for given in (obs, obs[:0], obs[::2], np.asfortranarray(obs)):
        assert agrees(module, given)
    without_bias = nn.Sequential(Flatten(SPACE), nn.Linear(4, 2, bias=False))
    assert agrees(without_bias, obs)


@pytest.mark.further
def test_arrays_follow_whatever_happens_to_the_parameters() -> None:
    module, obs = network(), rows()
    assert agrees(module, obs)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module(torch.from_numpy(obs)).square().sum().backward()
    optimizer.step()
    assert agrees(module, obs)
    module.load_state_dict(network().state_dict())
    assert agrees(module, obs)
    with torch.no_grad():
        module[1].weight = nn.Parameter(torch.randn(8, 4))
    assert agrees(module, obs)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other[1].weight.add_(1.0)
    assert agrees(other, obs)
    assert agrees(module, obs)
    module[1] = nn.Linear(4, 8)
    assert agrees(module, obs)


def hooked(module: nn.Sequential) -> nn.Module:
    module[1].register_forward_hook(lambda *_: None)
    return module


def hooked_itself(module: nn.Sequential) -> nn.Module:
    module.register_forward_pre_hook(lambda *_: None)
    return module


class Other(nn.Sequential):
    def forward(self, obs: Any) -> torch.Tensor:
        return super().forward(obs) + 1.0


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "change",
    [
        hooked,
        hooked_itself,
        lambda module: module.double(),
        lambda module: module.to("meta"),
        lambda module: Other(*module),
        lambda module: nn.Sequential(*module, nn.Dropout(0.5)),
        lambda module: nn.Sequential(*list(module)[1:]),
        lambda module: nn.utils.parametrizations.weight_norm(module[1]) and module,
    ],
)
def test_what_numpy_cannot_do_is_left_to_torch(change: Callable[[nn.Sequential], nn.Module]) -> None:
    assert outputs_in_numpy(change(network()), rows()) is None


def test_other_observations_and_much_work_are_left_to_torch() -> None:
    module = network()
    assert outputs_in_numpy(module, rows().astype(np.float64)) is None
    assert outputs_in_numpy(module, torch.from_numpy(rows())) is None
    assert outputs_in_numpy(module, rows()[0]) is None
    assert outputs_in_numpy(module, rows(100_000)) is None
    choices = mlp(Discrete(4), outputs=3, hidden=(8,), generator=torch.Generator())
    assert outputs_in_numpy(choices, np.zeros(5, np.int64)) is None


@pytest.mark.few(1)
@pytest.mark.parametrize("start", [0, *further(7)])
@pytest.mark.parametrize("kind", [TorchPolicy, ActorCritic])
def test_policies_draw_the_same_actions_either_way(
    kind: type[TorchPolicy], start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def acted(quick: bool) -> list[Any]:
        policy = kind(hidden=(16,))
        policy.bind(SPACE, Discrete(3, start=start), 3)
        few = policy._few_actions
        monkeypatch.setattr(policy, "_few_actions", lambda obs: called.append(few(obs)) or called[-1])
        if not quick:
            monkeypatch.setattr(policy, "_few_actions", lambda obs: None)
        return [policy.compute_actions(rows(50)) for _ in range(20)]

    quick, slow = acted(True), acted(False)
    assert len(called) == 20
    assert None not in called
    for (actions, _, extras), (expected, _, others) in zip(quick, slow, strict=True):
        np.testing.assert_array_equal(actions, expected)
        assert actions.dtype == expected.dtype
        assert extras.keys() == others.keys()
        for name, values in extras.items():
            np.testing.assert_allclose(values, others[name], atol=2e-6)
            assert values.dtype == others[name].dtype


class Doubled(TorchPolicy):
    def forward(self, obs: Any) -> torch.Tensor:
        return 2 * super().forward(obs)


def test_a_policy_with_its_own_forward_acts_by_it() -> None:
    policy = Doubled(hidden=(16,))
    policy.bind(SPACE, Discrete(3), 3)
    inputs = policy.compute_actions(rows())[2]["action_dist_inputs"]
    with torch.no_grad():
        np.testing.assert_allclose(inputs, 2 * policy.module(torch.from_numpy(rows())), atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_outputs_that_give_no_probabilities_are_an_error(value: float) -> None:
    policy = TorchPolicy(hidden=(16,))
    policy.bind(SPACE, Discrete(3), 3)
    with torch.no_grad():
        policy.module[-1].bias[1] = value
    with pytest.raises(SchemaError, match="5 of 5 observations give no probabilities"):
        policy.compute_actions(rows())


def test_a_choice_that_is_ruled_out_is_never_drawn() -> None:
    policy = TorchPolicy(hidden=(16,))
    policy.bind(SPACE, Discrete(3), 3)
    with torch.no_grad():
        policy.module[-1].bias[1] = -np.inf
    actions, _, extras = policy.compute_actions(rows(500))
    assert set(actions.tolist()) == {0, 2}
    assert np.isfinite(extras["action_logp"]).all()
